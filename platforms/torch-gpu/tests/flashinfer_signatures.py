"""The signatures of FlashInfer's wrappers, in the version that the CUDA platform's extra installs.

python -m platforms.torch-gpu.tests.flashinfer_signatures WHEEL    writes flashinfer_signatures.json from the wheel

The wheel is only read: `pip download --no-deps flashinfer-python==VERSION`, with the version of
platforms/cuda/pyproject.toml.
"""

from __future__ import annotations

import ast
import functools
import inspect
import json
import sys
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

DATA = Path(__file__).with_suffix(".json")
MODULES = {
    "BatchPrefillWithPagedKVCacheWrapper": "flashinfer/prefill.py",
    "BatchDecodeWithPagedKVCacheWrapper": "flashinfer/decode.py",
}
METHODS = ("__init__", "plan", "run")


@cache
def recorded() -> dict[str, Any]:
    """The recorded version and parameters."""
    found: dict[str, Any] = json.loads(DATA.read_text(encoding="utf-8"))
    return found


@cache
def signature(wrapper: str, method: str) -> inspect.Signature:
    """The recorded signature of a method, `self` included."""
    parameters = []
    kind: inspect._ParameterKind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    for text in recorded()["wrappers"][wrapper][method]:
        name, _, default = text.partition("=")
        value = ast.literal_eval(default) if default else inspect.Parameter.empty
        if name.startswith("*"):
            parameters.append(inspect.Parameter(name[1:], inspect.Parameter.VAR_POSITIONAL))
            kind = inspect.Parameter.KEYWORD_ONLY
        else:
            parameters.append(inspect.Parameter(name, kind, default=value))
    return inspect.Signature(parameters)


def as_recorded(wrapper: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Gives a method of a replacement the recorded signature. Calls that do not fit it raise TypeError."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        found = signature(wrapper, function.__name__)

        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            found.bind(*args, **options)
            return function(*args, **options)

        call.__signature__ = found  # type: ignore[attr-defined]
        return call

    return decorate


def read_wheel(wheel: Path) -> dict[str, Any]:
    """The contents of the data file: the parameters of each method, as in the source without types."""
    wrappers: dict[str, dict[str, list[str]]] = {}
    with zipfile.ZipFile(wheel) as archive:
        for wrapper, module in MODULES.items():
            body = ast.parse(archive.read(module).decode()).body
            [made] = [node for node in body if isinstance(node, ast.ClassDef) and node.name == wrapper]
            # The last definition of a name is the implementation; those before it are overloads.
            methods = {node.name: node for node in made.body if isinstance(node, ast.FunctionDef)}
            wrappers[wrapper] = {name: _parameters(methods[name].args) for name in METHODS}
    return {"version": wheel.name.split("-")[1], "wrappers": wrappers}


def _parameters(args: ast.arguments) -> list[str]:
    plain = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(plain) - len(args.defaults)) + [*args.defaults]
    found = [_text(arg, default) for arg, default in zip(plain, defaults, strict=True)]
    if args.vararg is not None:
        found.append(f"*{args.vararg.arg}")
    return found + [_text(arg, default) for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)]


def _text(arg: ast.arg, default: ast.expr | None) -> str:
    return arg.arg if default is None else f"{arg.arg}={ast.unparse(default)}"


if __name__ == "__main__":
    read = read_wheel(Path(sys.argv[1]))
    DATA.write_text(json.dumps(read, indent=1) + "\n", encoding="utf-8")
