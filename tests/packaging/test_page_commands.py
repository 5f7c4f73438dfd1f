"""The commands of the pages that users copy from run as they are written, in a clean environment of a clone.

tests/unit/docs/page_commands.py finds the commands and says what is done with each.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from tests.helpers.published import MISSING, find_published
from tests.packaging.user_environment import UserEnvironment
from tests.unit.docs.page_commands import (
    EXHAUSTIVE,
    PAGES,
    PUBLISHED,
    RUN,
    SERVER,
    Command,
    Row,
    blocks_of,
    commands_of,
    deploy_commands,
    files_of,
    printed_by,
    row_of,
)

pytestmark = pytest.mark.slow

ANOTHER_TEST = "docs/tutorials/writing-a-platform.md"
"""plugins/conformance/tests/packaging/test_first_hour.py runs this page."""
INSTALL = "docs/how-to/install.md"
CHANGING = (
    (r'"(id|created|request_id|system_fingerprint)": ?("[^"]*"|\d+)', r'"\1": #'),
    (r"(?<![\w.])/[\w./-]{3,}", "PATH"),
    (r"\b\d[\d.,]*( ?(tokens/s|tokens per second|tok/s|ms|s|MB|GB|MiB|GiB|%))(?!\w)", r"#\1"),
    (r"\s+", " "),
)
"""What differs from run to run, and what replaces it; lines of pages are wrapped."""


@dataclass
class Pages:
    """The environment that all pages share. A command that several pages have is run once."""

    environment: UserEnvironment
    done: dict[str, subprocess.CompletedProcess[str]] = field(default_factory=dict)

    def run(self, page: str, which: str) -> None:
        """Saves the files of a page, and runs its commands of a kind in order; starts its servers with RUN."""
        self._save(page)
        for command in commands_of(page):
            row = row_of(command)
            if row is not None and row.what == SERVER and which == RUN:
                self.environment.serve(command.normal)
                self._save(page)  # for its port
            elif row is not None and row.what == which:
                self._run(command, row)

    def _save(self, page: str) -> None:
        for name, text in files_of(page).items():
            path = self.environment.work / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self.environment.with_port(text), encoding="utf-8")

    def _run(self, command: Command, row: Row) -> None:
        if command.normal not in self.done:
            typed = "".join(f"{line}\n" for line in (command.typed or filter(None, [row.typed])))
            self.done[command.normal] = self.environment.run(command.text, typed=typed)
        done = self.done[command.normal]
        where = f"{command}\nexit status {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        if done.returncode != 0:
            pytest.fail(where, pytrace=False)
        assert re.search(row.prints, done.stdout), where
        if command.shown:
            assert is_shown("\n".join(command.shown), done.stdout), f"the page shows\n{command.shown}\n{where}"
        program = command.normal.removeprefix("python ")
        for text in printed_by(command.page, program) if program in files_of(command.page) else ():
            assert text in done.stdout, where


def is_shown(shown: str, printed: str) -> bool:
    """Whether a page shows what was printed; `...` on the page stands for anything."""
    for pattern, replacement in CHANGING:
        shown, printed = (re.sub(pattern, replacement, text) for text in (shown, printed))
    wanted = ".*".join(re.escape(part.strip()) for part in shown.split("..."))
    return re.search(wanted, printed, flags=re.DOTALL) is not None


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pages]:
    environment = UserEnvironment(tmp_path_factory.mktemp("pages"))
    yield Pages(environment)
    environment.end()


@pytest.mark.parametrize("page", [page for page in PAGES if page != ANOTHER_TEST])
def test_the_commands_of_a_page_run(pages: Pages, page: str) -> None:
    pages.run(page, RUN)


def test_the_environment_was_made_by_the_commands_of_the_pages(pages: Pages) -> None:
    """No package of the environment that runs the tests is there unless a command has asked for it."""
    listed = pages.environment.run("uv pip list --format json").stdout
    names = {package["name"] for package in json.loads(listed)}
    assert {"mvllm", "mvllm-cpu", "mvllm-tools", "torch", "pillow", "openai"} <= names
    assert not names & {"mvllm-cuda", "mvllm-ray", "mypy", "ruff", "av", "scipy", "fastapi"}
    assert (pages.environment.venv / "bin" / "mvllm").is_file()
    assert not (pages.environment.venv / "bin" / "pip").exists()
    links = {package["name"] for package in json.loads(listed) if "editable_project_location" in package}
    assert {"mvllm", "mvllm-tools"} <= links and "mvllm-cpu" not in links, "install.md says so"


def test_servers_end_with_status_0_at_ctrl_c(pages: Pages) -> None:
    """As step 5 of the server's tutorial says."""
    assert pages.environment.servers
    assert set(pages.environment.end()) == {0}


@pytest.mark.exhaustive
@pytest.mark.parametrize("page", [page for page in PAGES if page != ANOTHER_TEST])
def test_the_further_commands_of_a_page_run(pages: Pages, page: str) -> None:
    pages.run(PAGES[0], RUN)
    pages.run(page, EXHAUSTIVE)


@pytest.mark.exhaustive
@pytest.mark.skipif(find_published("smollm2") is None, reason=MISSING)
def test_the_published_model_answers(pages: Pages) -> None:
    """The packages of the index that the page installs are replaced by a link to the file of the tests."""
    pages.run(PAGES[0], RUN)
    for page in PAGES:
        for command in commands_of(page):
            if (row := row_of(command)) and row.what == PUBLISHED:
                [name] = [word for word in command.normal.split() if word.endswith(".gguf")]
                path = pages.environment.work / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.unlink(missing_ok=True)
                path.symlink_to(find_published("smollm2"))
        pages.run(page, PUBLISHED)


INSTALLATIONS = [block for block in blocks_of(INSTALL) if "-m venv" in block.text and "WHEELHOUSE" not in block.text]
GENERATE = 'mvllm generate demo --prompt "The capital of France is" --temperature 0'


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", range(len(INSTALLATIONS)))
def test_each_way_of_installation_makes_an_environment_that_generates(number: int, tmp_path) -> None:
    environment = UserEnvironment(tmp_path)
    block = INSTALLATIONS[number]
    (environment.tools / "uv").unlink()  # the block installs it, or does without
    lines = range(block.line, block.line + block.text.count("\n"))
    for command in [command.text for command in commands_of(INSTALL) if command.line in lines]:
        if "--index-url URL" in command:
            environment.deliver("pip install torch")
            continue
        done = environment.run(command)
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    done = environment.run(GENERATE)
    assert done.returncode == 0 and "Paris" in done.stdout, done.stderr


@pytest.mark.exhaustive
def test_the_installation_of_the_image_needs_no_clone(tmp_path) -> None:
    """The image contains the environment and not the clone."""
    environment = UserEnvironment(tmp_path)
    environment.run("uv venv && . .venv/bin/activate")
    [command] = [c for c in deploy_commands() if "cpu.Dockerfile" in c.page and "./platforms/cpu" in c.text]
    text = re.sub(r"VIRTUAL_ENV=\S+|--no-cache|\$EXTRA_PACKAGES|\$\{TORCH_BACKEND\S+", "", command.normal)
    text = text.replace("-c constraints.txt", "-c ci/constraints/cpu.txt")
    environment.deliver('uv pip install ".[parts]" ./platforms/cpu')
    done = environment.run(f"UV_NO_EDITABLE=1 {text.strip()}")
    assert done.returncode == 0, done.stderr
    (environment.clone / "core").rename(environment.clone / "moved")
    (environment.clone / "plugins").rename(environment.clone / "moved-plugins")
    done = environment.run(GENERATE)
    assert done.returncode == 0 and "Paris" in done.stdout, done.stderr


class TestOutput:
    def test_numbers_with_units_paths_and_line_ends_may_differ(self) -> None:
        assert is_shown("Loaded /models/a in 1.5 s,\n12 tokens", "x\nLoaded /tmp/b in 0.2 s, 12 tokens\n")
        assert is_shown('{"id": "chatcmpl-1", ... "Paris"}', '{"id": "chatcmpl-2", "created": 12, "content": "Paris"}')

    def test_other_text_must_be_the_same(self) -> None:
        assert not is_shown("12 tokens", "13 tokens")
        assert not is_shown("The capital is Paris.", "The capital is Rome.")
