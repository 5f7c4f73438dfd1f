"""Compiles the launches of real models for absent devices, with the tiles that each device gets.

python -m platforms.torch-gpu.tests.real_launches TARGET [MODEL ...]

Prints a line for each distinct launch, and exits with 1 if one does not fit the target's shared memory, or spills
registers and is not listed in real_launches.json, or spills more than is listed there. An entry of that file is for
the launches of a kernel on some targets that have the given constants.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

meta_models = import_module("platforms.torch-gpu.tests.meta_models")
compiled = import_module("platforms.triton-kernels.tests.compiled")

SPILLS = Path(__file__).with_suffix(".json")
Device = meta_models.Device


def _device(target: str, multiprocessors: int, **more: Any) -> Any:
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

STEPS = ((1, 1, 4096), (16, 1, 4096), (64, 1, 4096), (256, 1, 4096), (64, 5, 4096), (1, 2048, 2048), (1, 8192, 8192))
"""Requests, new tokens of each, and tokens of each sequence: decodes, a verification of drafts, and prompts."""

KV_DTYPES = (None, "float8_e4m3fn")


def launches_of(name: str, target: str) -> list[Any]:
    """The distinct launches of a model on a device with this target."""
    spec, device = meta_models.MODELS[name], DEVICES[target]
    found: dict[str, Any] = {}
    with meta_models.device_like(device), compiled.launches() as caught:
        for kv_dtype in KV_DTYPES:
            built = meta_models.build(name, spec["fixed"] + spec["period"], device, kv_dtype)
            for sizes in STEPS:
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


def allowed_spill(launch: Any, target: str, entries: list[dict[str, Any]]) -> int:
    """Bytes of registers that a launch may spill in a thread."""
    values = {**launch.constants, **launch.options}
    return max(
        (
            int(entry["bytes"])
            for entry in entries
            if entry["kernel"] == name_of(launch)
            and target in entry["targets"]
            and all(values.get(key) == value for key, value in entry.get("constants", {}).items())
        ),
        default=0,
    )


def main(target: str, names: list[str]) -> int:
    """Compiles for a target, and returns how many launches are not as they should be."""
    entries = json.loads(SPILLS.read_text(encoding="utf-8"))
    wrong, seen = 0, set()
    for name in names or meta_models.MODELS:
        for launch in launches_of(name, target):
            if (key := key_of(launch)) in seen:
                continue
            seen.add(key)
            kernel = compiled.compile_for(launch, target)
            problems = []
            if kernel.shared > compiled.SHARED_MEMORY[target]:
                problems.append("DOES NOT FIT")
            if (kernel.spilled or 0) > (allowed := allowed_spill(launch, target, entries)):
                problems.append(f"SPILLS MORE THAN {allowed}: {launch.constants} {launch.options}")
            wrong += bool(problems)
            print(f"{name:26} {name_of(launch).split('.')[0]:16}", kernel, *problems, flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1], sys.argv[2:])))
