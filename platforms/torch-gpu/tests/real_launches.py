"""Compiles the launches of whole models for absent devices, with the tiles that each device gets.

python -m platforms.torch-gpu.tests.real_launches TARGETS [MODEL ...] [--decode] [--record FILE]
python -m platforms.torch-gpu.tests.real_launches --page

TARGETS are names of DEVICES with commas between them. A MODEL is one of meta_models.json, one of the zoo
(zoo_configs.py), or `zoo` for all of these; without one, all. Prints a line for each distinct launch, and exits with 1
if one does not fit the target's shared memory, or spills registers and is not listed in real_launches.json, or spills
more than is listed there. An entry of that file is for the launches of a kernel on some targets that have the given
constants:

    bytes        that a thread spills, the most of these launches
    moved        of these, what it stores and loads in an iteration of the loop with the products
    tile_bytes   what the program loads in such an iteration; threads are those of the program

docs/reference/register-spills.md shows the entries; --page writes it.

--decode compiles the launches of one decode of each model only. --record appends what was compiled to a file of JSON
lines, and does not compile what is in it already: a run that was cut goes on where it stopped.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

meta_models = import_module("platforms.torch-gpu.tests.meta_models")
compiled = import_module("platforms.triton-kernels.tests.compiled")

SPILLS = Path(__file__).with_suffix(".json")
PAGE = Path(__file__).parents[3] / "docs" / "reference" / "register-spills.md"
Device = meta_models.Device


def _device(target: str, multiprocessors: int, **more: Any) -> Any:
    more["multiplies_from_registers"] = compiled.from_registers(target)
    return Device(multiprocessors, compiled.SHARED_MEMORY[target], **more)


_WITHOUT_FLOAT8 = {"reads_float8": False, "multiplies_float8": False}
_AMD = {"warp_size": 64, "has_ptx": False}
DEVICES = {
    "sm_80": _device("sm_80", 108, **_WITHOUT_FLOAT8),
    "sm_86": _device("sm_86", 72, **_WITHOUT_FLOAT8),
    "sm_89": _device("sm_89", 58),
    "sm_90": meta_models.H100,
    "sm_100": _device("sm_100", 148, has_tensor_memory=True),
    "sm_103": _device("sm_103", 148, has_tensor_memory=True),
    "sm_120": _device("sm_120", 170),
    "gfx942": _device("gfx942", 304, float8="float8_e4m3fnuz", **_AMD),
    "gfx950": _device("gfx950", 256, **_AMD),
}
"""By target: A100, A10, L4, H100, B200, B300, RTX 5090, MI300X, MI355X."""

DECODE = (64, 1, 4096)
STEPS = ((1, 1, 4096), (16, 1, 4096), DECODE, (256, 1, 4096), (64, 5, 4096), (1, 2048, 2048), (1, 8192, 8192))
"""Requests, new tokens of each, and tokens of each sequence: decodes, a verification of drafts, and prompts."""

ZOO_STEPS = ((1, 1, 40), (16, 1, 40), (4, 5, 40), (1, 48, 48), (1, 160, 160))
"""Likewise, for the tests' small models."""

KV_DTYPES = (None, "float8_e4m3fn")


COVERAGE = """\
All launches have been compiled with these tiles: about 860 for each of `sm_80`, `sm_86`, `sm_89`,
`sm_90`, `sm_100`, `sm_103`, `sm_120`, `gfx942` and `gfx950`. All of them fit. Those that are not
listed spill nothing."""

HEAD = """\
# Register spills

Kernels of `mvllm-triton-kernels` that need more registers than a thread has, so that some values are
in local memory: the launches of real models and of the tests' small ones, compiled for absent devices
with Triton 3.7.1. Nothing was timed.

{coverage}

Most of these bytes are stored before a loop and loaded after it, once for each tile of queries or
of rows. What counts is what a thread moves in each iteration of the loop with the products: it
competes with the loads of the tile for the cache that holds both.

| column | meaning |
|---|---|
| launches | constants of the kernel that these launches have |
| spilled | bytes of a thread, the most of these launches |
| moved | bytes that a thread stores and loads in an iteration, the most of these launches |
| of a program | moved bytes of all its threads |
| tile | bytes that the program loads in an iteration from the cache or the weights and the inputs |
| share | of a program / tile |

Made by `python -m platforms.torch-gpu.tests.real_launches --page` from `real_launches.json` beside
it, which the exhaustive tests compare with what is compiled.

| kernel | targets | launches | spilled | moved | of a program | tile | share | why |
|---|---|---|--:|--:|--:|--:|--:|---|
"""


def launches_of(name: str, target: str, *, decode: bool = False) -> list[Any]:
    """The distinct launches of a model on a device with this target; of one decode only with `decode`."""
    device, found = DEVICES[target], {}
    with meta_models.device_like(device), compiled.launches() as caught:
        if name in meta_models.MODELS:
            spec = meta_models.MODELS[name]
            for kv_dtype in KV_DTYPES[: 1 if decode else None]:
                built = meta_models.build(name, spec["fixed"] + spec["period"], device, kv_dtype)
                for sizes in (DECODE,) if decode else STEPS:
                    built.run(*sizes)
        else:
            values = import_module("platforms.torch-gpu.tests.zoo_configs").values_of(name)
            built = meta_models.build_config(meta_models.read_config(values), 1, device)
            for sizes in ZOO_STEPS:
                built.run(*sizes)
    for launch in caught:
        found.setdefault(key_of(launch), launch)
    return list(found.values())


def key_of(launch: Any) -> str:
    """Equal for launches that are compiled once."""
    return str((name_of(launch), launch.signature, launch.constants, launch.aligned, launch.options))


def name_of(launch: Any) -> str:
    """Module and name of a launch's kernel."""
    return f"{launch.function.fn.__module__.rsplit('.', 1)[-1]}.{launch.function.__name__}"


def allowed_spill(launch: Any, target: str, entries: list[dict[str, Any]]) -> tuple[int, int]:
    """Bytes of registers that a thread of a launch may spill, and those that it may move in an iteration of a loop."""
    values = {**launch.constants, **launch.options}
    found = [
        entry
        for entry in entries
        if entry["kernel"] == name_of(launch)
        and target in entry["targets"]
        and all(values.get(key) == value for key, value in entry.get("constants", {}).items())
    ]
    return max((int(each["bytes"]) for each in found), default=0), max(
        (int(each["moved"]) for each in found), default=0
    )


def distinct_launches(targets: Sequence[str], names: Sequence[str], *, decode: bool) -> Iterator[tuple[str, str, Any]]:
    """Target, model and launch of each launch that no earlier model has on the target."""
    for target in targets:
        seen = set()
        for name in names:
            for launch in launches_of(name, target, decode=decode):
                if (key := key_of(launch)) not in seen:
                    seen.add(key)
                    yield target, name, launch


def main(targets: Sequence[str], names: Sequence[str], *, decode: bool = False, record: Path | None = None) -> int:
    """Compiles for targets, and returns how many launches are not as they should be."""
    entries = json.loads(SPILLS.read_text(encoding="utf-8"))
    known = {row["key"]: row for row in map(json.loads, _lines(record))}
    wrong = 0
    for target, name, launch in distinct_launches(targets, names, decode=decode):
        content = launch.function.cache_key + key_of(launch) + target
        key = hashlib.sha256(content.encode()).hexdigest()
        if (row := known.get(key)) is None:
            kernel = compiled.compile_for(launch, target)
            row = {"key": key, "target": target, "kernel": name_of(launch), "model": name, "shared": kernel.shared}
            row |= {"registers": kernel.registers, "spilled": kernel.spilled, "moved": kernel.moved}
            row["constants"] = {**launch.constants, **launch.options}
            if record is not None:
                with record.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row, default=str) + "\n")
        problems = []
        if row["shared"] > compiled.SHARED_MEMORY[target]:
            problems.append("DOES NOT FIT")
        allowed = allowed_spill(launch, target, entries)
        if (row["spilled"] or 0) > allowed[0] or row["moved"] > allowed[1]:
            problems.append(f"SPILLS MORE THAN {allowed}: {launch.constants} {launch.options}")
        wrong += bool(problems)
        numbers = f"shared {row['shared'] / 1024:6.1f} KiB  registers {row['registers']}  spilled {row['spilled']}"
        numbers += f"  moved {row['moved']}"
        print(f"{name:26} {name_of(launch):32} {target:7} {numbers}", *problems, flush=True)
    return wrong


def page() -> str:
    """The complete page of docs/reference."""
    lines = []
    for entry in json.loads(SPILLS.read_text(encoding="utf-8")):
        launches = ", ".join(f"{key} {value}" for key, value in entry["constants"].items())
        moved, loaded = entry["moved"] * entry["threads"], entry["tile_bytes"]
        cells = (f"`{entry['kernel']}`", ", ".join(entry["targets"]), launches, entry["bytes"], entry["moved"])
        share = f"{moved / loaded:.0%}" if loaded else "0%"  # of kernels without a loop that loads
        cells += (f"{moved / 1024:.1f} KiB", f"{loaded / 1024:.0f} KiB", share, entry["reason"])
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return HEAD.replace("{coverage}", COVERAGE) + "\n".join(lines) + "\n"


def _lines(path: Path | None) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path is not None and path.exists() else []


def _names(given: Sequence[str]) -> list[str]:
    names: list[str] = []
    for name in given or (*meta_models.MODELS, "zoo"):
        names += import_module("platforms.torch-gpu.tests.zoo_configs").NAMES if name == "zoo" else (name,)
    return names


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("targets", nargs="?")
    parser.add_argument("models", nargs="*")
    parser.add_argument("--decode", action="store_true")
    parser.add_argument("--record", type=Path)
    parser.add_argument("--page", action="store_true")
    given = parser.parse_args()
    if given.page:
        sys.exit(PAGE.write_text(page(), encoding="utf-8") and None)
    if given.targets is None:
        parser.error("Give targets, with commas between them.")
    sys.exit(bool(main(given.targets.split(","), _names(given.models), decode=given.decode, record=given.record)))
