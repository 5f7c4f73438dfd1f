"""What somebody does in the first half hour with a wheelhouse, command by command, with the time of each.

    python3 ci/stranger.py WHEELHOUSE                  with pip, in a new folder
    python3 ci/stranger.py WHEELHOUSE --installer uv   with uv, which has to be on PATH
    python3 ci/stranger.py WHEELHOUSE --platform cpu --examples docs/examples --folder FOLDER

Needs Python 3.11 with venv, and curl; no compiler, and nothing of this repository but the wheelhouse and the examples.
So it runs in an empty container. The commands are those of docs/how-to/install.md and of the tutorials. It ends at the
first command that fails, with its exit status.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

SHOWN = 12  # lines of a command's output
CONVERSATION = "Tell me a story about an owl.\n/stats\n/bye\n"
SLOW = 3600  # seconds that one command may take


class Failed(Exception):
    """A command failed."""


class Session:
    """A terminal in the environment: runs commands in a folder and prints what a person sees.

    Attributes:
        folder: Where commands run.
        environment: Their environment variables.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        kept = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
        self.environment = {**kept, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        self._started = time.monotonic()

    def activate(self, environment: Path) -> None:
        """Does what `. .venv/bin/activate` does."""
        path = os.pathsep.join([str(environment / "bin"), self.environment.get("PATH", os.defpath)])
        self.environment |= {"VIRTUAL_ENV": str(environment), "PATH": path}
        print(f"{self._clock()} $ . .venv/bin/activate", flush=True)

    def run(self, command: str, *, typed: str | None = None, must_print: str = "") -> str:
        """Runs a command; returns its output.

        Args:
            command: As it is typed; no shell reads it.
            typed: Lines for its standard input.
            must_print: A text that its output must have.

        Raises:
            Failed: It is not there, takes an hour, its exit status is not 0, or the text is missing.
        """
        began = time.monotonic()
        print(f"{self._clock()} $ {command}", flush=True)
        try:
            done = subprocess.run(
                shlex.split(command),
                cwd=self.folder,
                env=self.environment,
                input=typed if typed is not None else "",
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=SLOW,
            )
        except (OSError, subprocess.TimeoutExpired) as e:
            raise Failed(f"{command}: {e}") from e
        lines = done.stdout.strip().splitlines()
        for line in lines[-SHOWN:]:
            print(f"      {line[:160]}")
        print(f"      ({time.monotonic() - began:.1f} s)", flush=True)
        if done.returncode != 0 or must_print not in done.stdout:
            raise Failed(f"{command}: exit status {done.returncode}, {must_print!r} expected")
        return done.stdout

    def serve(self, command: str, port: int) -> subprocess.Popen[str]:
        """Starts a server and waits until it answers on `/health`."""
        print(f"{self._clock()} $ {command} &", flush=True)
        with (self.folder / "server.log").open("w") as log:
            server = subprocess.Popen(
                shlex.split(command), cwd=self.folder, env=self.environment, stdout=log, stderr=log, text=True
            )
        began = time.monotonic()
        check = ["curl", "--silent", "--fail", "--output", os.devnull, f"http://127.0.0.1:{port}/health"]
        while subprocess.run(check, check=False).returncode != 0:
            if server.poll() is not None or time.monotonic() - began > 300:
                server.kill()
                raise Failed(f"{command}: {(self.folder / 'server.log').read_text()[-2000:]}")
            time.sleep(0.5)
        print(f"      (ready after {time.monotonic() - began:.1f} s)", flush=True)
        return server

    def _clock(self) -> str:
        minutes, seconds = divmod(int(time.monotonic() - self._started), 60)
        return f"{minutes:3d}:{seconds:02d}"


def first_half_hour(session: Session, options: argparse.Namespace) -> None:
    """Installs and uses everything.

    Raises:
        Failed: A command failed.
    """
    uv = options.installer == "uv"
    pip = "uv pip" if uv else "pip"
    session.run("uv venv" if uv else f"{shlex.quote(options.python)} -m venv .venv")
    session.activate(session.folder / ".venv")
    session.run(f"{pip} install --require-hashes -r {shlex.quote(str(options.wheelhouse / f'{options.platform}.txt'))}")
    session.run("mvllm doctor")
    session.run('mvllm generate demo --prompt "Once upon a time"')
    session.run("mvllm chat demo", typed=CONVERSATION)
    port = free_port()
    server = session.serve(f"mvllm serve demo --port {port}", port)
    try:
        body = json.dumps(
            {"model": "demo", "messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 32}
        )
        address = f"http://127.0.0.1:{port}/v1/chat/completions"
        session.run(
            f"curl -s {address} -H 'Content-Type: application/json' -d {shlex.quote(body)}", must_print='"choices"'
        )
    finally:
        end(server)
    session.run("mvllm plugin new acme")
    session.run(f"{pip} install -e mvllm-acme")
    session.run("mvllm platforms", must_print="acme")
    session.run("mvllm doctor --platform acme")
    session.run('mvllm generate --platform acme --model demo --prompt "The capital of France is" --temperature 0')
    if not options.short:
        session.run("mvllm conformance --platform acme --quick")
    if options.examples:
        example = shlex.quote(str(options.examples / "grpo.py"))
        # Two platforms are installed here: the example runs on the one of the machine.
        session.environment["MVLLM_PLATFORM"] = options.platform
        session.run(f"python {example} --steps {3 if options.short else 30}")


def end(server: subprocess.Popen[str]) -> None:
    """Ends a server.

    Raises:
        Failed: It did not end by itself.
    """
    server.terminate()
    try:
        server.wait(60)
    except subprocess.TimeoutExpired:
        server.kill()
        raise Failed("the server did not end within 60 s after SIGTERM") from None


def free_port() -> int:
    """A port that no server uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheelhouse", type=Path)
    parser.add_argument("--installer", choices=["pip", "uv"], default="pip")
    parser.add_argument("--platform", default="cpu", help="the requirements file (default: %(default)s)")
    parser.add_argument("--python", default="python3", help="with pip: the interpreter (default: %(default)s)")
    parser.add_argument("--examples", type=Path, help="the folder docs/examples, to run grpo.py from")
    parser.add_argument("--folder", type=Path, help="an empty folder to work in; else a temporary one")
    parser.add_argument(
        "--short", action="store_true", help="without the conformance suite, and with three steps of GRPO"
    )
    options = parser.parse_args(argv)
    for name in ("wheelhouse", "examples"):
        if getattr(options, name):
            setattr(options, name, getattr(options, name).resolve())
    with tempfile.TemporaryDirectory() as place:
        folder = (options.folder or Path(place)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        try:
            first_half_hour(Session(folder), options)
        except Failed as failure:
            print(f"FAILED {failure}", file=sys.stderr)
            return 1
    print("every command succeeded")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
