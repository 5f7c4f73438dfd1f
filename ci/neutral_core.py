#!/usr/bin/env python3
"""Checks that core/mvllm names no hardware vendor and uses no unsafe deserialization. Standard library only.

A vendor name in core indicates a branch that belongs behind the platform contract. So every word is checked, in
identifiers (`is_cuda_alike`, `CudaGraph`), strings, docstrings and comments. Words that are allowed in prose but not in
code ("cpu" as a device, `torch.accelerator`, `eval`) are searched in the syntax tree, where concatenated strings,
aliases of torch and computed attribute names of torch are resolved or rejected. The check prevents mistakes, not
deliberate evasion.

    python3 ci/neutral_core.py [FOLDER or FILE ...]     prints file:line: offence; exit status 1 if there is any
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
import unicodedata
from collections.abc import Callable, Iterator
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
    iluvatar biren enflame kunlun kunlunxin hygon dcu groq furiosa
    privateuseone privateuse1
    """.split()  # noqa: SIM905
)

# Exceptions: a common argument name of other engines, torch's name of its backend for devices of any vendor, and
# Python's method of asynchronous iteration.
ALLOWED_NAMES = frozenset({"gpu_memory_utilization", "PrivateUse1", "_get_privateuse1_backend_name", "__aiter__"})

# Vendor names that are ordinary words, in names of predicates.
QUESTION = re.compile(
    r"(?:is|has|on|for|use|uses)_(?:\w+_)?(apple|metal|neuron|arm|google|amazon|moore|tesla|hopper)(?:_\w+)?"
)

DEVICE_STRING = re.compile(
    r"(cpu|cuda|gpu|hip|xpu|tpu|npu|hpu|mps|xla|mlx|mlu|ipu|mtia|vulkan|privateuseone|privateuse1)(:\d+)?"
)
# Modules of torch that access devices without the DeviceRuntime. Those of vendors are found as words.
TORCH_DEVICE_MODULES = frozenset({"accelerator", "cpu", "get_device_module"})
DEVICE_QUESTIONS = frozenset({"is_cpu"})
ATTRIBUTE_READERS = frozenset({"getattr", "hasattr", "setattr", "delattr", "inspect.getattr_static"})
UNSAFE_MODULES = frozenset({"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"})
UNSAFE_BUILTINS = frozenset({"eval", "exec"})
UNSAFE_CALLS = frozenset({"torch.load", "yaml.load", "yaml.unsafe_load", "os.system", "os.popen", "builtins.eval"})

WORD = re.compile(r"[A-Z]+(?![a-z])\d*|[A-Z]?[a-z]+\d*|[A-Z]+\d*")
NAME = re.compile(r"\w+")


class Offence(NamedTuple):
    line: int
    text: str


def check_source(source: str) -> list[Offence]:
    """Returns the violations in one module's source, in the order of lines.

    Raises:
        SyntaxError: The source is not valid Python.
    """
    tree = ast.parse(source)
    return sorted({*vendor_words(source), *built_words(tree, source), *unsafe_or_device_code(tree)})


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
        if token.type == tokenize.NAME:
            if not token.string.isascii():
                yield Offence(token.start[0], f"{token.string!r}: Python reads it as another name than the eye does")
            if asked := QUESTION.fullmatch(token.string):
                yield Offence(token.start[0], f"{token.string!r} asks for a maker ({asked[1]}); ask for an ability")


def built_words(tree: ast.Module, source: str) -> Iterator[Offence]:
    """Vendor words in concatenated text."""
    lines = source.splitlines()
    for node in ast.walk(tree):
        text = built_text(node)
        if text is None:
            continue
        written = unicodedata.normalize("NFKC", "\n".join(lines[node.lineno - 1 : node.end_lineno]))
        for name in NAME.findall(text):
            if name not in ALLOWED_NAMES and name not in NAME.findall(written):
                for word in named_vendors(name):
                    yield Offence(node.lineno, f"{name!r}, concatenated here, names hardware ({word})")


TEXT_METHODS = frozenset(
    """
    lower upper casefold title capitalize swapcase strip lstrip rstrip replace removeprefix removesuffix join format
    translate decode encode
    """.split()  # noqa: SIM905
)


def built_text(node: ast.AST) -> str | None:
    """The text of an expression of constants, or None."""
    value = constant(node)
    return value.decode("latin-1") if isinstance(value, bytes) else value if isinstance(value, str) else None


def constant(node: ast.AST) -> object:
    """The value of an expression of constants; None for other expressions."""
    match node:
        case ast.Constant(value=value):
            return value
        case ast.BinOp(left=left, op=ast.Add() | ast.Mod() | ast.Mult() as op, right=right):
            values = constant(left), constant(right)
            action = {ast.Add: lambda a, b: a + b, ast.Mod: lambda a, b: a % b, ast.Mult: times}[type(op)]
            return None if None in values else tried(action, *values)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return tried(lambda a: -a, constant(operand))
        case ast.List(elts=items) | ast.Tuple(elts=items):
            values = tuple(constant(item) for item in items)
            return None if None in values else values
        case ast.JoinedStr(values=parts):
            values = [built_text(part.value if isinstance(part, ast.FormattedValue) else part) for part in parts]
            return None if None in values else "".join(map(str, values))
        case ast.Subscript(value=value, slice=ast.Slice(lower=lower, upper=upper, step=step)):
            ends = [None if end is None else constant(end) for end in (lower, upper, step)]
            return tried(lambda text: text[slice(*ends)], constant(value))
        case ast.Call(func=ast.Name(id="chr"), args=[code]):
            return tried(chr, constant(code))
        case ast.Call(func=ast.Name(id="str"), args=[text]):
            return built_text(text)
        case ast.Call(func=ast.Attribute(value=owner, attr=method), args=arguments) if method in TEXT_METHODS:
            text, values = constant(owner), [constant(argument) for argument in arguments]
            if not isinstance(text, str | bytes) or None in values:
                return None
            return tried(lambda: getattr(text, method)(*values))
        case _:
            return None


def times(a: object, b: object) -> object:
    return a * b if isinstance(b, int) and b < 100 else None  # type: ignore[operator]


def tried(action: Callable[..., object], *values: object) -> object:
    try:
        return action(*values)
    except (TypeError, ValueError, KeyError, IndexError, LookupError, UnicodeError):
        return None  # the expression raises when it runs


def named_vendors(name: str) -> list[str]:
    """Returns the vendor words in an identifier or word.

    `is_cuda_alike`, `CudaGraph`, `CUDA_VISIBLE_DEVICES`, `cuda12` and `torch_npu` hold one each; `chip`, `ship` none.
    """
    name = unicodedata.normalize("NFKC", name)  # as Python normalizes identifiers
    parts = {part.lower() for chunk in name.split("_") for part in [chunk, *WORD.findall(chunk)]}
    parts |= {part.rstrip("0123456789") for part in parts} | {part.removesuffix("s") for part in parts}
    return sorted(parts & VENDOR_WORDS)


def unsafe_or_device_code(tree: ast.Module) -> Iterator[Offence]:
    prose, torches = docstrings(tree), names_of_torch(tree)
    for node in ast.walk(tree):
        if node not in prose and isinstance(node, ast.expr) and (text := built_text(node)) is not None:
            if DEVICE_STRING.fullmatch(text.lower()):
                yield Offence(node.lineno, f"{text!r} is a device string; devices come from the platform")
        match node:
            case ast.Attribute(attr=attr):
                root, _, path = dotted(node).partition(".")
                if root in torches and uses_device_module(path.split(".")):
                    yield Offence(
                        node.lineno, f"torch.{path}: devices are reached through the platform's DeviceRuntime"
                    )
                if attr in DEVICE_QUESTIONS:
                    yield Offence(node.lineno, f"{attr} asks where a tensor is; that is the platform's to know")
                if root in torches and path in ("__dict__", "__getattribute__", "__getattr__"):
                    yield Offence(node.lineno, f"torch.{path}: name what is used of torch")
            case ast.Subscript(value=ast.Call(func=ast.Name(id="vars"), args=[owner])) if dotted(owner) in torches:
                yield Offence(node.lineno, "vars(torch)[...]: name what is used of torch")
            case ast.Import(names=names):
                for alias in names:
                    if unsafe_module(alias.name) or is_device_module_of_torch(alias.name):
                        yield forbidden_import(node.lineno, alias.name)
            case ast.ImportFrom(module=str() as module):
                if unsafe_module(module):
                    yield forbidden_import(node.lineno, module)
                for alias in node.names:
                    full = f"{module}.{alias.name}"
                    if full in UNSAFE_CALLS or is_device_module_of_torch(full):
                        yield forbidden_import(node.lineno, full)
            case _:
                pass
        if isinstance(node, ast.Call):
            yield from unsafe_call(node)
            yield from hidden_attribute(node, torches)


def names_of_torch(tree: ast.Module) -> set[str]:
    """The names of torch in a module, with aliases: `import torch as t`, `t = torch`."""
    names = {"torch"}
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=aliases):
                names |= {alias.asname for alias in aliases if alias.name == "torch" and alias.asname}
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Name(id=other)) if other in names:
                names.add(name)
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call() as call) if is_import_of_torch(call):
                names.add(name)
            case _:
                pass
    return names


def is_import_of_torch(call: ast.Call) -> bool:
    imports = dotted(call.func) in ("importlib.import_module", "import_module", "__import__")
    return imports and bool(call.args) and built_text(call.args[0]) == "torch"


def uses_device_module(path: list[str]) -> bool:
    return any(part in TORCH_DEVICE_MODULES or part.startswith("_accelerator") for part in path)


def is_device_module_of_torch(module: str) -> bool:
    top, *path = module.split(".")
    return top == "torch" and uses_device_module(path)


def hidden_attribute(call: ast.Call, torches: set[str]) -> Iterator[Offence]:
    """Attributes of torch that are looked up by text, and modules of torch that are imported by text."""
    name = dotted(call.func)
    if name in ATTRIBUTE_READERS and len(call.args) > 1:
        root, _, path = dotted(call.args[0]).partition(".")
        wanted = built_text(call.args[1])
        of_torch = root in torches or (isinstance(call.args[0], ast.Call) and is_import_of_torch(call.args[0]))
        if of_torch and wanted is None:
            yield Offence(call.lineno, f"{name} of torch with a name made at run time: name what is used of torch")
        elif of_torch and uses_device_module([*path.split("."), *str(wanted).split(".")]):
            yield Offence(
                call.lineno, f"{name} of torch.{wanted}: devices are reached through the platform's DeviceRuntime"
            )
        elif wanted in DEVICE_QUESTIONS:
            yield Offence(call.lineno, f"{wanted} asks where a tensor is; that is the platform's to know")
    if name in ("operator.attrgetter", "attrgetter", "operator.methodcaller", "methodcaller") and call.args:
        wanted = built_text(call.args[0])
        if wanted is None or uses_device_module(wanted.split(".")):
            yield Offence(call.lineno, f"{name} with {wanted or 'a name made at run time'}: name what is used")
    if name in ("importlib.import_module", "import_module", "__import__") and call.args:
        [first, *_] = call.args
        begins = first.values[0] if isinstance(first, ast.JoinedStr) and first.values else first
        while isinstance(begins, ast.BinOp):
            begins = begins.left
        text = built_text(first)
        if text is not None and is_device_module_of_torch(text):
            yield forbidden_import(call.lineno, text)
        elif text is None and (built_text(begins) or "").startswith("torch"):
            yield Offence(call.lineno, "a module of torch whose name is made at run time: name what is used of torch")
    if name == "torch.device" or (name.endswith(".device") and name.split(".")[0] in torches):
        if call.args and isinstance(call.args[0], ast.Constant) and isinstance(call.args[0].value, int):
            yield Offence(
                call.lineno, "torch.device of a number is a device of torch's choice; devices come from the platform"
            )


def unsafe_call(call: ast.Call) -> Iterator[Offence]:
    name = dotted(call.func)
    if name in UNSAFE_BUILTINS or name in UNSAFE_CALLS:
        yield Offence(call.lineno, f"{name}() runs what it reads")
    for keyword in call.keywords:
        if keyword.arg == "shell" and not (isinstance(keyword.value, ast.Constant) and keyword.value.value is False):
            yield Offence(call.lineno, "shell= hands text to a shell; pass a list of arguments")
    if name in ("importlib.import_module", "__import__") and call.args:
        module = built_text(call.args[0])
        if module is not None and unsafe_module(module):
            yield forbidden_import(call.lineno, module)


def unsafe_module(name: str) -> bool:
    top = name.split(".")[0]
    return top in UNSAFE_MODULES or top == "core" or top.startswith("mvllm_")


def forbidden_import(line: int, name: str) -> Offence:
    if name.split(".")[0] == "core":
        return Offence(line, f"import {name}: a second copy of the package; import mvllm")
    if is_device_module_of_torch(name):
        return Offence(line, f"import {name}: devices are reached through the platform's DeviceRuntime")
    if name.startswith("mvllm_"):
        return Offence(line, f"import {name}: the engine imports no plugin; plugins come through entry points")
    return Offence(line, f"import {name}: not in the core")


def dotted(node: ast.AST) -> str:
    """Returns `a.b.c` for an attribute expression, else an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        head = dotted(node.value)
        return f"{head}.{node.attr}" if head else ""
    return ""


def docstrings(tree: ast.AST) -> set[ast.AST]:
    """Strings that are statements: docstrings."""
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
