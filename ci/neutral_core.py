#!/usr/bin/env python3
"""Checks that core/mvllm names no hardware and reads nothing that can run code. Standard library only.

The idea: a vendor name in the core is a branch that belongs behind the platform contract, wherever it hides, so every
*word* is looked at: identifiers (`is_cuda_alike`, `CudaGraph`), strings, docstrings and comments alike. Words that are
harmless as prose but not as code ("cpu" as a device, `torch.accelerator`, `eval`) are looked for in the syntax tree.

    python3 ci/neutral_core.py [FOLDER or FILE ...]     prints file:line: offence; exit status 1 if there is any
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

CORE = Path(__file__).resolve().parent.parent / "core" / "mvllm"

# Makers, their devices, their runtimes and their libraries. Lower case, whole words after splitting snake_case and
# CamelCase; ordinary words that a maker also uses (apple, metal, neuron) are not here.
VENDOR_WORDS = frozenset(
    """
    nvidia cuda cudnn cublas cufft curand cusparse cutlass nvlink nvml nccl nvshmem nvcc tensorrt
    amd rocm hip hipblas miopen rccl aiter
    intel xpu ipex sycl oneapi oneccl xccl habana gaudi hpu hccl openvino
    tpu libtpu xla pjrt torchax
    ascend npu cann huawei
    mps mlx
    trainium inferentia xrt
    gpu ipu mlu mtia musa vpu vulkan
    cambricon metax maca rbln rebellions spyre tenstorrent graphcore sambanova cerebras qualcomm mthreads
    privateuseone privateuse1
    """.split()  # noqa: SIM905
)

# The neutral meanings of vendor-flavoured words: an argument that every user of the field already types, and torch's
# name of its place for devices of any maker, which core speaks of but never computes on.
ALLOWED_NAMES = frozenset({"gpu_memory_utilization", "PrivateUse1", "_get_privateuse1_backend_name"})

DEVICE_STRING = re.compile(
    r"(cpu|cuda|gpu|hip|xpu|tpu|npu|hpu|mps|xla|mlx|mlu|ipu|mtia|vulkan|privateuseone|privateuse1)(:\d+)?"
)
TORCH_DOORS = frozenset({"accelerator", "cpu"})  # torch.accelerator, torch.cpu; vendors are caught as words
UNSAFE_MODULES = frozenset({"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"})
UNSAFE_BUILTINS = frozenset({"eval", "exec"})
UNSAFE_CALLS = frozenset({"torch.load", "yaml.load", "yaml.unsafe_load", "os.system", "os.popen", "builtins.eval"})

WORD = re.compile(r"[A-Z]+(?![a-z])\d*|[A-Z]?[a-z]+\d*|[A-Z]+\d*")
NAME = re.compile(r"\w+")


class Offence(NamedTuple):
    line: int
    text: str


def check_source(source: str) -> list[Offence]:
    """Returns what is wrong with one module's source, in the order of its lines.

    Raises:
        SyntaxError: It is no Python.
    """
    tree = ast.parse(source)
    return sorted({*vendor_words(source), *unsafe_or_device_code(tree)})


def vendor_words(source: str) -> Iterator[Offence]:
    spoken = {tokenize.NAME, tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in spoken:
            continue
        for offset, line in enumerate(token.string.splitlines()):
            for name in NAME.findall(line):
                if name not in ALLOWED_NAMES:
                    for word in named_vendors(name):
                        yield Offence(token.start[0] + offset, f"{name!r} names hardware ({word})")


def named_vendors(name: str) -> list[str]:
    """Returns the vendor words in one identifier or written word, however it is spelt.

    `is_cuda_alike`, `CudaGraph`, `CUDA_VISIBLE_DEVICES`, `cuda12` and `torch_npu` hold one each; `chip`, `ship` none.
    """
    parts = {part.lower() for chunk in name.split("_") for part in [chunk, *WORD.findall(chunk)]}
    parts |= {part.rstrip("0123456789") for part in parts} | {part.removesuffix("s") for part in parts}
    return sorted(parts & VENDOR_WORDS)


def unsafe_or_device_code(tree: ast.AST) -> Iterator[Offence]:
    prose = docstrings(tree)
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str() as text) if node not in prose and DEVICE_STRING.fullmatch(text.lower()):
                yield Offence(node.lineno, f"{text!r} is a device string; devices come from the platform")
            case ast.Attribute(value=ast.Name(id="torch"), attr=attr) if attr in TORCH_DOORS:
                yield Offence(node.lineno, f"torch.{attr}: devices are reached through the platform's DeviceRuntime")
            case ast.Import(names=names):
                yield from (forbidden_import(node.lineno, alias.name) for alias in names if unsafe_module(alias.name))
            case ast.ImportFrom(module=str() as module):
                if unsafe_module(module):
                    yield forbidden_import(node.lineno, module)
                for alias in node.names:
                    if f"{module}.{alias.name}" in UNSAFE_CALLS or (module == "torch" and alias.name in TORCH_DOORS):
                        yield forbidden_import(node.lineno, f"{module}.{alias.name}")
            case _:
                pass
        if isinstance(node, ast.Call):
            yield from unsafe_call(node)


def unsafe_call(call: ast.Call) -> Iterator[Offence]:
    name = dotted(call.func)
    if name in UNSAFE_BUILTINS or name in UNSAFE_CALLS:
        yield Offence(call.lineno, f"{name}() runs what it reads")
    for keyword in call.keywords:
        if keyword.arg == "shell" and not (isinstance(keyword.value, ast.Constant) and keyword.value.value is False):
            yield Offence(call.lineno, "shell= hands text to a shell; pass a list of arguments")
    if name in ("importlib.import_module", "__import__") and call.args:
        first = call.args[0]
        if isinstance(first, ast.Constant) and isinstance(first.value, str) and unsafe_module(first.value):
            yield forbidden_import(call.lineno, first.value)


def unsafe_module(name: str) -> bool:
    top = name.split(".")[0]
    return top in UNSAFE_MODULES or top == "core" or top.startswith("mvllm_")


def forbidden_import(line: int, name: str) -> Offence:
    if name.split(".")[0] == "core":
        return Offence(line, f"import {name}: a second copy of the package; import mvllm")
    if name.startswith("mvllm_"):
        return Offence(line, f"import {name}: the engine imports no plugin; plugins come through entry points")
    return Offence(line, f"import {name}: not in the core")


def dotted(node: ast.AST) -> str:
    """Returns `a.b.c` for such an expression, else the empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        head = dotted(node.value)
        return f"{head}.{node.attr}" if head else ""
    return ""


def docstrings(tree: ast.AST) -> set[ast.AST]:
    """Strings that stand alone as statements: prose, not values."""
    return {
        node.value for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }


def check_paths(paths: list[Path]) -> list[str]:
    """Returns `file:line: offence` for every module under `paths`."""
    found = []
    for path in paths:
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            found += [f"{file}:{offence.line}: {offence.text}" for offence in check_source(file.read_text("utf-8"))]
    return found


def main(arguments: list[str]) -> int:
    found = check_paths([Path(argument) for argument in arguments] or [CORE])
    print("\n".join(found) if found else "the core names no hardware")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
