"""The project as users install it: its wheels in an empty folder, and the first commands from there.

    install    unpacks the wheels of core, the platform and what both need of the project
    doctor     `mvllm doctor`
    generate   `mvllm generate` with the demo model
    serve      `mvllm serve`: a completion with a temperature, a chat completion with a JSON schema

Wheels are those of `--wheels FOLDER`, or built here. The commands run outside of the working tree.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

from tests.gpu.result_log import OK, ResultLog, Row, one_line
from tests.gpu.settings import ON_THE_HOST, ROOT, Item, Settings

BUILD_BACKENDS = ("hatchling", "setuptools", "pip")
PROMPT = "Once upon a time"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Oslo"]}, "visits": {"enum": [1, 2, 3]}},
    "required": ["city", "visits"],
    "additionalProperties": False,
}


def items(settings: Settings) -> list[Item]:
    """Four, of which the others need the first."""
    obstacle = _obstacle(settings)
    return [
        Item("install", 5, 180, obstacle=obstacle),
        Item("doctor", 5, 90, obstacle=obstacle),
        Item("generate", 15, 300 if settings.quick else 120, obstacle=obstacle),
        Item("serve", 15, 600 if settings.quick else 180, obstacle=obstacle),
    ]


def run(item: str, settings: Settings, result_log: ResultLog) -> None:
    """See the module."""
    folder = _installed(settings)
    act = {"install": _install, "doctor": _doctor, "generate": _generate, "serve": _serve}[item]
    figures, note = act(folder, settings)
    result_log.add(Row("wheels", item, f"wheels: {item}", OK, figures, note))


def distributions(platform: str) -> dict[str, Path]:
    """Names and project folders of core, the platform's package, and the packages of the project that it needs."""
    wanted, found = [ROOT / "platforms" / ("cuda" if platform in ON_THE_HOST else platform)], {"mvllm": ROOT}
    while wanted:
        folder = wanted.pop()
        project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        if project["name"] not in found:
            found[project["name"]] = folder
            needed = (requirement.split(">")[0] for requirement in project["dependencies"])
            wanted += [_folder_of(name.removeprefix("mvllm-")) for name in needed if name.startswith("mvllm-")]
    return found


def _folder_of(name: str) -> Path:
    folder = ROOT / "platforms" / name
    return folder if folder.is_dir() else ROOT / "plugins" / name


def built(settings: Settings) -> list[Path]:
    """The project's wheels in `--wheels`; empty where one is missing."""
    found = []
    for name in distributions(settings.platform):
        pattern = f"{name.replace('-', '_')}-*.whl"
        newest = sorted(settings.wheels.glob(pattern), key=lambda path: path.stat().st_mtime) if settings.wheels else []
        if not newest:
            return []
        found.append(newest[-1])
    return found


def _obstacle(settings: Settings) -> str:
    """Why there are no wheels to install."""
    if built(settings):
        return ""
    names = ", ".join(distributions(settings.platform))
    advice = "`python3 ci/dev.py build` makes them, in dist: pass --wheels dist"
    if settings.platform == "cpu":
        return f"needs wheels of {names}, whose C++ takes minutes to compile; {advice}"
    lacking = [name for name in BUILD_BACKENDS if importlib.util.find_spec(name) is None]
    return f"needs wheels of {names}, or {' and '.join(lacking)} to build them; {advice}" if lacking else ""


def _installed(settings: Settings) -> Path:
    """The folder with the unpacked wheels. Of processes that ask at the same time, one makes it."""
    folder, complete = settings.scratch / "from-wheels", settings.scratch / "from-wheels.complete"
    with (settings.scratch / "from-wheels.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not complete.exists():
            shutil.rmtree(folder, ignore_errors=True)
            wheels = built(settings) or _build(settings)
            pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile"]
            _run([*pip, "--target", str(folder), *map(str, wheels)], settings)
            complete.touch()
    return folder


def _build(settings: Settings) -> list[Path]:
    """Builds the wheels, from copies: build backends write beside what they read."""
    sources, out = settings.scratch / "sources", settings.scratch / "built"
    left_out = shutil.ignore_patterns("build", "dist", "*.egg-info", "tests", "__pycache__", ".*", "docs", "plugins")
    for remains in (sources, out):
        shutil.rmtree(remains, ignore_errors=True)
    for name, folder in distributions(settings.platform).items():
        copy = sources / name
        if folder != ROOT:
            shutil.copytree(folder, copy, ignore=left_out)
        else:
            copy.mkdir(parents=True)
            for file in ("pyproject.toml", "README.md", "LICENSE"):
                shutil.copy(ROOT / file, copy)
            shutil.copytree(ROOT / "core", copy / "core", ignore=shutil.ignore_patterns("__pycache__"))
        options = ["-q", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(out)]
        _run([sys.executable, "-m", "pip", "wheel", *options, str(copy)], settings)
    return sorted(out.glob("*.whl"))


def variables(folder: Path, settings: Settings) -> dict[str, str]:
    """The environment of a command that sees the wheels, and nothing of the working tree.

    The platforms that have the host for a device are in the working tree: for them it comes after the wheels.
    """
    unpacked = settings.scratch / "installed"
    paths = [folder, unpacked / "site"]
    if settings.platform in ON_THE_HOST:
        paths += [ROOT, unpacked / "metadata"]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}


def _install(folder: Path, settings: Settings) -> tuple[dict[str, float], str]:
    modules = ["mvllm", *(name.replace("-", "_") for name in _import_names(settings.platform))]
    code = f"import {', '.join(modules)}\nfor module in ({', '.join(modules)},): print(module.__file__)"
    said = _run([sys.executable, "-c", code], settings, variables(folder, settings)).split()
    elsewhere = [path for path in said if not Path(path).is_relative_to(folder)]
    assert not elsewhere, f"imported from elsewhere than the wheels: {', '.join(elsewhere)}"
    return {"packages": len(said)}, ", ".join(modules)


def _import_names(platform: str) -> list[str]:
    """Modules of the platform's packages: a package of wheels has one."""
    folders = [folder for name, folder in distributions(platform).items() if name != "mvllm"]
    return [
        path.name
        for folder in folders
        for path in sorted((folder / "src").iterdir())
        if path.name[0] == "m" and path.suffix == ""
    ]


def _doctor(folder: Path, settings: Settings) -> tuple[dict[str, float], str]:
    said = _run([*_mvllm("doctor"), "--platform", settings.platform], settings, variables(folder, settings))
    return {}, said[-200:]


def _generate(folder: Path, settings: Settings) -> tuple[dict[str, float], str]:
    options = [*_model(settings), "--prompt", PROMPT, "--max-tokens", "8", "--temperature", "0"]
    said = _run([*_mvllm("generate"), *options], settings, variables(folder, settings))
    assert said.strip(), "`mvllm generate` printed nothing"
    return {}, said.strip()[-200:]


def _serve(folder: Path, settings: Settings) -> tuple[dict[str, float], str]:
    import httpx2

    from tests.helpers.server import ServerProcess

    arguments, environment = [*_model(settings), "--port", "0"], variables(folder, settings)
    with ServerProcess(settings.out / "logs", *arguments, **environment) as server:
        server.wait_for_log("Ready at ", 400 if settings.quick else 120)

        def post(path: str, **body: Any) -> Any:
            answer = httpx2.post(f"{server.url}{path}", json=body, timeout=120)
            assert answer.status_code == 200, f"{path}: {answer.status_code} {answer.text}"
            return answer.json()["choices"][0]

        request = {"prompt": PROMPT, "max_tokens": 4 if settings.quick else 12, "temperature": 0.8, "seed": 7}
        drawn, again = (post("/v1/completions", **request) for _ in range(2))
        assert drawn["text"] == again["text"], f"one seed, two texts: {drawn['text']!r}, {again['text']!r}"
        chosen = post(
            "/v1/chat/completions",
            messages=[{"role": "user", "content": "A city, and how often I was there."}],
            max_tokens=60,
            temperature=0.8,
            structured_outputs={"json": SCHEMA, "disable_any_whitespace": True},
        )
    text = chosen["message"]["content"]
    assert chosen["finish_reason"] == "stop", f"the JSON does not come to its end: {text!r}"
    found = json.loads(text)
    assert set(found) == {"city", "visits"} and found["visits"] in (1, 2, 3), f"not of the schema: {text!r}"
    return {}, f"temperature 0.8: {drawn['text']!r}; JSON schema: {text}"


def _model(settings: Settings) -> list[str]:
    """The demo model; in quick runs with steps as small as these requests need."""
    found = ["demo", "--platform", settings.platform]
    if settings.quick:
        small = {"max-model-len": 256, "max-num-batched-tokens": 256, "max-num-seqs": 2}
        small["kv-cache-memory-bytes"] = 64 << 20
        for option, value in small.items():
            found += [f"--{option}", str(value)]
    return found


def _mvllm(command: str) -> list[str]:
    return [sys.executable, "-m", "mvllm.entrypoints.cli.main", command]


def _run(command: list[str], settings: Settings, environment: dict[str, str] | None = None) -> str:
    """Standard output of a command that must succeed. It runs in the scratch folder."""
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=settings.scratch)
    shown = " ".join(Path(part).name if os.sep in part else part for part in command[:6])
    assert done.returncode == 0, f"{shown}: status {done.returncode}: {one_line((done.stdout + done.stderr)[-600:])}"
    return done.stdout
