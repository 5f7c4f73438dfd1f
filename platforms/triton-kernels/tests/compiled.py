"""Compiles kernels for absent devices.

`launches` records launches instead of executing them. `compile_for` compiles a recorded launch to a target's machine
code, with the types, alignment and constants of its arguments, and returns the kernel's shared memory, registers and
spills.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from mvllm_triton import float8_linear, quantized_linear, quantized_moe

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_86": GPUTarget("cuda", 86, 32),
    "sm_89": GPUTarget("cuda", 89, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_103": GPUTarget("cuda", 103, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx90a": GPUTarget("hip", "gfx90a", 64),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
    "gfx1100": GPUTarget("hip", "gfx1100", 32),
    "gfx1201": GPUTarget("hip", "gfx1201", 32),
}
SHARED_MEMORY = {
    "sm_80": 163 << 10,
    "sm_86": 99 << 10,
    "sm_89": 99 << 10,
    "sm_90": 227 << 10,
    "sm_100": 227 << 10,
    "sm_103": 227 << 10,
    "sm_120": 99 << 10,
    "gfx90a": 64 << 10,
    "gfx942": 64 << 10,
    "gfx950": 160 << 10,
    "gfx1100": 64 << 10,
    "gfx1201": 64 << 10,
}
"""Maximum shared memory of a program in bytes, from the vendors' manuals."""

_TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "i1",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e4m3fnuz: "fp8e4b8",
    torch.float8_e5m2: "fp8e5",
}


@dataclass(frozen=True)
class Launch:
    """A recorded launch: the arguments of `ASTSource` and of the compiler."""

    function: JITFunction
    signature: dict[str, str]
    constants: dict[str, Any]
    aligned: dict[tuple[int, ...], list[list[Any]]]
    options: dict[str, Any]


@dataclass(frozen=True)
class Compiled:
    """Resources of a compiled kernel. `registers` and `spilled` bytes per thread are None if no tool reports them.

    Attributes:
        name: As profilers print it.
        moved: Spilled bytes that a thread stores or loads in an iteration of the loop with the products, the largest of
            such loops.
        copies: Asynchronous copies from global to shared memory.
        waits: The most groups of such copies that may be in flight after a wait; None without a wait.
        buffers: The least number of buffers of a tile that the compiler's pipeline fills; 0 without a pipeline.
        products: Asynchronous products of matrices in shared memory.
        packed_loads: The neighbouring bytes per thread of each load of a tile of 8-bit weights.
        wide_loads: Instructions in the PTX or AMD assembly that load 16 bytes per thread.
    """

    name: str
    target: str
    shared: int
    registers: int | None
    spilled: int | None
    copies: int
    waits: int | None
    buffers: int
    products: int
    packed_loads: tuple[int, ...] = ()
    wide_loads: int = 0
    moved: int = 0

    def __str__(self) -> str:
        return (
            f"{self.name:28} {self.target:7} shared {self.shared / 1024:6.1f} KiB  "
            f"registers {self.registers}  spilled {self.spilled}  moved {self.moved}  "
            f"copies {self.copies}  waits {self.waits}  buffers {self.buffers}  products {self.products}  "
            f"packed {','.join(map(str, self.packed_loads)) or None}  wide {self.wide_loads}"
        )


def _caught(function: JITFunction, args: tuple[Any, ...], options: dict[str, Any]) -> Launch:
    given = dict(zip(function.arg_names, args))
    names = set(function.arg_names)
    given |= {name: value for name, value in options.items() if name in names}
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    aligned: dict[tuple[int, ...], list[list[Any]]] = {}
    for place, parameter in enumerate(function.params):
        value, name = given[parameter.name], parameter.name
        if parameter.is_constexpr:
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = f"*{_TYPES[value.dtype]}"
            if not parameter.do_not_specialize:
                aligned[(place,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif value == 1 and not parameter.do_not_specialize:
            signature[name], constants[name] = "constexpr", 1
        else:
            signature[name] = "i32"
            if value % 16 == 0 and not parameter.do_not_specialize:
                aligned[(place,)] = [["tt.divisibility", 16]]
    rest = {name: value for name, value in options.items() if name not in names}
    return Launch(function, signature, constants, aligned, rest)


@contextmanager
def launches() -> Iterator[list[Launch]]:
    """Records the launches inside the block instead of executing them."""
    found: list[Launch] = []
    original = JITFunction.__getitem__

    def catch(self: JITFunction, grid: Any) -> Callable[..., None]:
        return lambda *args, **options: found.append(_caught(self, args, options))

    JITFunction.__getitem__ = catch
    try:
        yield found
    finally:
        JITFunction.__getitem__ = original


@contextmanager
def device_like(target: str, multiprocessors: int = 132) -> Iterator[None]:
    """Launches inside the block are for a device with this target and number of multiprocessors."""
    is_nvidia = target.startswith("sm_")
    with ExitStack() as stack:
        for module in (float8_linear, quantized_linear, quantized_moe):
            stack.enter_context(mock.patch.object(module, "processors", lambda _: multiprocessors))
        for module in (quantized_linear, quantized_moe):
            ptx = mock.patch.object(module, "has_ptx", lambda _, dtype: is_nvidia and dtype == torch.bfloat16)
            stack.enter_context(ptx)
            registers = mock.patch.object(module, "multiplies_from_registers", lambda _: from_registers(target))
            stack.enter_context(registers)
        yield


def from_registers(target: str) -> bool:
    """What `mvllm_triton.device.multiplies_from_registers` is on a target's device."""
    return target in ("sm_80", "sm_86", "sm_89", "sm_120")


def compile_for(launch: Launch, target: str) -> Compiled:
    """Compiles one launch for one target."""
    source = ASTSource(launch.function, launch.signature, launch.constants, launch.aligned)
    kernel = triton.compile(source, target=TARGETS[target], options=launch.options)
    registers = spilled = None
    if "cubin" in kernel.asm:
        with tempfile.TemporaryDirectory() as folder:
            binary = Path(folder) / "kernel.cubin"
            binary.write_bytes(kernel.asm["cubin"])
            tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
            text = subprocess.run([tool, "--dump-resource-usage", binary], capture_output=True, text=True).stdout
        if match := re.search(r"REG:(\d+) STACK:(\d+)", text):
            registers, spilled = int(match[1]), int(match[2])
            if spilled and not any(map(_local_bytes, _machine_code(kernel.asm["cubin"]).splitlines())):
                spilled = 0  # a stack that nothing accesses
    else:
        text = kernel.asm["amdgcn"]
        registers = int(re.search(r"\.vgpr_count:\s+(\d+)", text)[1])
        spilled = int(re.search(r"\.private_segment_fixed_size:\s+(\d+)", text)[1])
    device_text = kernel.asm.get("ptx") or kernel.asm["amdgcn"]
    if re.search(r"\b(ld|st)\.local", device_text):
        spilled = max(1, spilled or 0)
    waits = [int(n, 0) for n in re.findall(r"cp\.async\.wait_group\s+(\w+)", device_text)]
    # A pipeline allocates its buffers before a loop: a memory descriptor with one dimension more than the tile.
    sizes = [
        int(n) for n in re.findall(r"ttg\.local_alloc\s*:\s*\(\) -> !ttg\.memdesc<(\d+)x\d+x\d+x", kernel.asm["ttgir"])
    ]
    return Compiled(
        kernel.metadata.name,
        target,
        kernel.metadata.shared,
        registers,
        spilled,
        len(re.findall(r"cp\.async\.c[ag]\.|(?:buffer|global)_load\S*.*\blds\b|global_load_lds", device_text)),
        max(waits, default=None),
        min(sizes, default=0),
        len(re.findall(r"wgmma\.mma_async|tcgen05\.mma", device_text)),
        _packed_loads(kernel.asm["ttgir"]),
        len(_WIDE_LOADS.findall(device_text)),
        _moved(kernel.asm) if spilled else 0,
    )


def _moved(asm: dict[str, Any]) -> int:
    """`Compiled.moved` of a kernel."""
    if "cubin" not in asm:
        return moved_in_loops(asm["amdgcn"])
    return moved_in_loops(_machine_code(asm["cubin"]))


def _machine_code(binary: bytes) -> str:
    """nvdisasm's text of a kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
        return subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True).stdout


def moved_in_loops(text: str) -> int:
    """Bytes of local memory that one iteration of a loop accesses, the most of all innermost loops with products.

    Args:
        text: Output of nvdisasm, or AMD assembly with LLVM's comments on spills.
    """
    code: list[str] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L\w+):", line):
            labels[label[1]] = len(code)
        elif line.strip():
            code.append(line)
    jumps = [(labels.get(found[1], end + 1), end) for end, found in enumerate(map(_JUMP.search, code)) if found]
    loops = {(first, end) for first, end in jumps if any(_PRODUCT.search(each) for each in code[first : end + 1])}
    inner = [loop for loop in loops if not any(_is_inside(other, loop) for other in loops)]
    return max((sum(map(_local_bytes, code[first : end + 1])) for first, end in inner), default=0)


def _local_bytes(line: str) -> int:
    if found := re.search(r"\b(?:LDL|STL)(?:\.(?!64|128)\w+)*(?:\.(64|128))?\b", line):
        return int(found[1] or 32) // 8
    found = re.search(r"; (\d+)-byte Folded (?:Spill|Reload)", line)
    return int(found[1]) if found else 0


def _is_inside(inner: tuple[int, int], outer: tuple[int, int]) -> bool:
    return inner != outer and outer[0] <= inner[0] and inner[1] <= outer[1]


_JUMP = re.compile(r"\b(?:BRA|s_c?branch\w*)\b.*?(\.L\w+)")
_PRODUCT = re.compile(r"MMA|_mfma_|_wmma_")
_WIDE_LOADS = re.compile(
    r"cp\.async\.cg\.shared\.global [^;]*, 0x10|ld\.global[\w.:]*\.v4\.b32|(?:global|buffer)_load\w*_dwordx4"
)
_PACKED_LOAD = re.compile(
    r"(?:tt\.load|async_copy_global_to_local|buffer_load\w*) .*tensor<\d+x\d+x(?:!tt\.ptr<)?(?:i8|f8\w*)>?, (#\w+)>"
)
_LAYOUT = re.compile(r"^(#\w+) = #ttg\.blocked<\{sizePerThread = \[(\d+), (\d+)\]", re.MULTILINE)


def _packed_loads(ttgir: str) -> tuple[int, ...]:
    """The neighbouring elements per thread of each load of a tile of 8-bit weights, from Triton's GPU dialect.

    Weights [k, n] have neighbours along k. Tiles of inputs [m, k] have them along the second dimension.
    """
    layouts = [(name, int(k), int(n)) for name, k, n in _LAYOUT.findall(ttgir)]
    sizes = {name: k for name, k, n in layouts if k >= n}
    return tuple(sizes[layout] for layout in _PACKED_LOAD.findall(ttgir) if layout in sizes)
