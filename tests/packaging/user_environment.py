"""A clone and a virtual environment as a user has them, in which tests run the commands of pages as they are written.

There is no network. What an index would deliver to a command that installs are links to the packages of the environment
that runs the tests: of the requirements of the folders and names in that command, no others. The distributions of the
clone are built and installed by pip or uv, as the command says; of the CPU kernels, the clone has the library of this
repository as the result of an earlier build.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

from packaging.requirements import Requirement

from tests.helpers.ports import free_port
from tests.packaging.conftest import REPOSITORY, link_distributions, site_packages

COPIED = ("core", "platforms", "plugins", "docs/examples", "docs/deploy", "ci/constraints")
"""Folders of the repository in the clone, without tests and without what was built in them."""
NOT_COPIED = shutil.ignore_patterns("build", "*.egg-info", "__pycache__", "tests", "_stubs", "*.so", "node_modules")
FILES = ("pyproject.toml", "README.md", "LICENSE")
BUILD_TOOLS = ("hatchling", "setuptools")
"""Delivered with every installation: builds have no environment of their own without a network."""
KERNELS = Path("mvllm_cpu", "_kernels.so")
START_SECONDS = 180


@dataclass
class UserEnvironment:
    """A clone, the folder in which commands are run, and the virtual environment that is active there.

    Attributes:
        root: A new folder.
        name: The name of the clone's folder.
        work: Where commands are run; the clone by default.
        port: The port of the server that was started last; commands of pages name 8000 in its place.
        servers: The servers by the command that has started them.
    """

    root: Path
    name: str = "clone"
    work: Path = field(default=Path())
    port: int = 0
    servers: dict[str, Server] = field(default_factory=dict)
    is_active: bool = False

    def __post_init__(self) -> None:
        self.clone = self.root / self.name
        if self.work == Path():
            self.work = self.clone
        for folder in COPIED:
            shutil.copytree(REPOSITORY / folder, self.clone / folder, ignore=NOT_COPIED, symlinks=True)
        for file in FILES:
            shutil.copy(REPOSITORY / file, self.clone / file)
        library = REPOSITORY / "platforms" / "cpu" / "src" / KERNELS
        if library.exists():
            built = f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
            target = self.clone / "platforms" / "cpu" / "build" / built / KERNELS
            target.parent.mkdir(parents=True)
            shutil.copy(library, target)  # newer than the sources, so that it is not built again
        self.tools = self.root / "tools"  # programs that the user has outside of environments
        for folder in (self.work, self.tools, self.root / "home"):
            folder.mkdir(parents=True, exist_ok=True)
        (self.tools / "uv").symlink_to(Path(sysconfig.get_path("scripts")) / "uv")
        (self.tools / "python3").symlink_to(os.path.realpath(sys.executable))

    @property
    def venv(self) -> Path:
        return self.work / ".venv"

    def variables(self) -> dict[str, str]:
        """The environment variables of commands: none of the shell that runs the tests."""
        search = [str(self.venv / "bin")] if self.is_active else []
        return {
            **{name: os.environ[name] for name in ("LANG", "TMPDIR") if name in os.environ},
            **({"VIRTUAL_ENV": str(self.venv)} if self.is_active else {}),
            "HOME": str(self.root / "home"),
            "PATH": os.pathsep.join([*search, str(self.tools), "/usr/local/bin", "/usr/bin", "/bin"]),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "UV_OFFLINE": "1",
            "UV_NO_INDEX": "1",
            "UV_NO_BUILD_ISOLATION": "1",
            "UV_PYTHON_DOWNLOADS": "never",
            "UV_LINK_MODE": "copy",
            "UV_CACHE_DIR": str(self.root / "uv-cache"),
            "PIP_NO_INDEX": "1",
            "PIP_NO_BUILD_ISOLATION": "0",  # 0 disables isolation
            "PIP_NO_COMPILE": "0",  # 0 disables compilation: most modules are not imported
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PIP_CONFIG_FILE": os.devnull,
        }

    def run(
        self, command: str, *, typed: str = "", timeout: float = 900, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command as the shell does; an environment that it activates stays active."""
        if re.search(r"\bpip install\b", command):
            self.deliver(command)
        done = subprocess.run(
            ["bash", "-c", self.with_port(command)],
            cwd=cwd or self.work,
            env=self.variables(),
            input=typed,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        if "/activate" in command and done.returncode == 0:
            self.is_active = True
        return done

    def with_port(self, command: str) -> str:
        """The command for the server's port in place of 8000."""
        if not self.port:
            return command
        if re.match(r"mvllm bench serve\b", command) and "8000" not in command:
            return f"{command} --port {self.port}"
        return re.sub(r"\b8000\b", str(self.port), command)

    def serve(self, command: str) -> Server:
        """Starts a server on a free port, or returns the one that this command has started; waits until it is ready."""
        if command not in self.servers:
            self.servers[command] = Server(self, command, free_port())
        server = self.servers[command]
        self.port = server.port
        server.wait_ready()
        return server

    def end(self) -> list[int]:
        """Ends the servers as Ctrl-C does; returns their exit statuses."""
        statuses = [server.end() for server in self.servers.values()]
        self.servers.clear()
        self.port = 0
        return statuses

    # -------------------------------------------------------------------------------------------- installations

    def deliver(self, command: str) -> None:
        """Links what an index would deliver to a command that installs into the environment."""
        wanted = self.requirements(command)
        target = site_packages(self.venv)
        for old in target.glob("setuptools*"):  # venv has an old one; an isolated build takes the newest
            if not old.is_symlink():
                shutil.rmtree(old)
        link_distributions([*BUILD_TOOLS, *wanted], target, copy_metadata=True)  # uv ignores links to metadata
        if "uv" in wanted:
            shutil.copy(Path(sysconfig.get_path("scripts")) / "uv", self.venv / "bin" / "uv")

    def requirements(self, command: str) -> list[str]:
        """What the arguments of an installation require of other projects."""
        words = shlex.split(re.sub(r"(\S*)\{([^}]*)\}", expanded, command))
        found: list[str] = []
        seen: set[tuple[Path, str]] = set()
        after = words.index("install") + 1
        for word in words[after:]:
            if word.startswith("-"):
                continue
            folder, _, extras = word.partition("[")
            if (self.work / folder / "pyproject.toml").exists():
                self._require((self.work / folder).resolve(), re.findall(r"[\w-]+", extras), found, seen)
            elif re.match(r"(?!mvllm)[a-z][\w-]*([\[<>=~ ].*)?$", word) and words[words.index(word) - 1] not in OPTIONS:
                found.append(word)
        return found

    def _require(self, folder: Path, extras: list[str], found: list[str], seen: set[tuple[Path, str]]) -> None:
        project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        for extra in ("", *extras):
            if (folder, extra) in seen:
                continue
            seen.add((folder, extra))
            for text in project["optional-dependencies"][extra] if extra else project.get("dependencies", ()):
                requirement = Requirement(text)
                if not requirement.name.startswith("mvllm"):
                    if requirement.marker is None or requirement.marker.evaluate():
                        found.append(text.partition(";")[0])
                elif owner := self.folders().get(requirement.name):
                    self._require(owner, sorted(requirement.extras), found, seen)

    def folders(self) -> dict[str, Path]:
        """The folders of the clone's distributions by their names."""
        projects = [self.clone, *(path.parent for path in self.clone.glob("p*/*/pyproject.toml"))]
        return {tomllib.loads((each / "pyproject.toml").read_text())["project"]["name"]: each for each in projects}


OPTIONS = ("-c", "-r", "--index-url", "--reinstall-package", "--only")
"""Options of pip and uv whose value is no package to install."""


def expanded(match: re.Match[str]) -> str:
    """`./plugins/{a,b}` as the shell expands it."""
    return " ".join(match[1] + name for name in match[2].split(","))


class Server:
    """A command of a page that serves, in the background.

    Attributes:
        port: Its port.
        process: The process.
    """

    def __init__(self, environment: UserEnvironment, command: str, port: int) -> None:
        self.port = port
        self._log = environment.root / f"server-{port}.log"
        text = re.sub(r"\b8000\b", str(port), command)
        if text == command:
            text = f"{command} --port {port}"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                ["bash", "-c", f"exec {text}"],
                cwd=environment.work,
                env=environment.variables(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def log(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def wait_ready(self) -> None:
        ends = time.monotonic() + START_SECONDS
        while f"Ready at http://127.0.0.1:{self.port}" not in self.log:
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.log[-3000:]}"
            assert time.monotonic() < ends, f"not ready after {START_SECONDS} s:\n{self.log[-3000:]}"
            time.sleep(0.1)

    def end(self) -> int:
        """Ends it as Ctrl-C does; returns its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(120)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            return self.process.wait(60)
