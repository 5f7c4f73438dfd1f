"""Launches and bytes of steps of real models, counted on torch's meta device: docs/reference/step-costs.md.

python -m platforms.torch-gpu.tests.step_costs            writes the page
python -m platforms.torch-gpu.tests.step_costs --check    exits with 1 if the page differs from what is counted now
python -m platforms.torch-gpu.tests.step_costs --kernels  prints launches and bytes by kernel, and writes nothing
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from mvllm.layers.rotary import RotaryEmbedding

meta_models = import_module("platforms.torch-gpu.tests.meta_models")

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "step-costs.md"
MODELS = ("Llama-3.1-8B", "Qwen3-30B-A3B", "DeepSeek-V3", "Qwen3-Next-80B-A3B")
STEPS = {
    "decode, 1 request": (1, 1, 4096),
    "decode, 64 requests": (64, 1, 4096),
    "prompt, 2,048 tokens": (1, 2048, 2048),
}
"""By name: requests, new tokens of each, and tokens of each sequence."""

HEAD = """\
# Costs of steps

Launches and bytes of a step of real models on the platforms of `mvllm-torch-gpu`, counted without a
device: the models are built on torch's `meta` device with the operations and the attention of the
platform, and with the tiles of an H100. A change of these numbers in a commit is a change of what a
device has to do. Nothing is timed.

*Decode* steps have 4,096 tokens in each sequence. All steps are greedy, and end with the token ids.

| column | meaning |
|---|---|
| Triton | launches of the kernels of `mvllm-triton-kernels` |
| torch | operations of torch that launch a kernel: views and allocations do not count |
| collectives | calls that all ranks of the group make together |
| bytes | of all launches: each tensor that it is given or returns, once. Of weights of \
experts, caches, tables and embeddings only what the step reads or writes; the experts \
of tokens are drawn evenly |
| floor | what any implementation moves: weights, caches, states and tables once, what the \
collectives exchange, and the logits, written and read |

Steps are counted as they run without `torch.compile`. Products of at most 64 rows are those of the
Triton kernel, whichever is faster on a device. Prompts use the Triton kernel for attention.

Made by `python -m platforms.torch-gpu.tests.step_costs`.

"""

_WITHOUT_LAUNCH = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.detach.default,
    torch.ops.aten.lift_fresh.default,
    torch.ops.aten.scalar_tensor.default,  # a number on the host
}
_GATHERS = {torch.ops.aten.embedding.default, torch.ops.aten.index_select.default, torch.ops.aten.index.Tensor}
_ATTENTION = "paged_attention"


@dataclass
class Cost:
    """Launches by kind, and bytes; numbers of layers may be added, subtracted and multiplied."""

    triton: int = 0
    torch: int = 0
    collectives: int = 0
    bytes: float = 0.0
    floor: float = 0.0

    def plus(self, other: Cost, factor: int) -> Cost:
        """This cost and `factor` times the other."""
        return Cost(*(mine + factor * its for mine, its in zip(vars(self).values(), vars(other).values(), strict=True)))


@dataclass
class Counted:
    """The launches of one step.

    Attributes:
        cost: Their cost.
        kernels: Launches by name.
        kernel_bytes: Bytes by name.
    """

    cost: Cost = field(default_factory=Cost)
    kernels: Counter[str] = field(default_factory=Counter)
    kernel_bytes: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))


class _Counter(TorchDispatchMode):
    """Counts the operations of torch, and the launches that are given to `launched`.

    Args:
        sizes: By storage: the bytes that a launch reads and writes of it, from the name of the launch and the tensor.
    """

    def __init__(self, sizes: dict[int, Callable[[str, torch.Tensor], float]]) -> None:
        super().__init__()
        self.counted = Counted()
        self._sizes = sizes
        self._made: dict[int, torch.Tensor] = {}  # keeps the step's tensors: a storage of its own for each
        self._persistent: dict[int, float] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), options: Any = None) -> Any:
        result = function(*args, **(options or {}))
        results = [each for each in torch.utils._pytree.tree_leaves(result) if isinstance(each, torch.Tensor)]
        given = [each for each in torch.utils._pytree.tree_leaves((args, options)) if isinstance(each, torch.Tensor)]
        known = {_storage(each) for each in given}
        for each in results:
            if _storage(each) not in known:
                self._made[_storage(each)] = each
        if not results or function in _WITHOUT_LAUNCH or _is_view(function):
            return result
        self.counted.cost.torch += 1
        name = str(function).removeprefix("aten.")
        if function in _GATHERS:
            self._add(name, results, sum(each.nbytes for each in results))
            if _storage(given[0]) not in self._made:
                self._persistent.update((id(each), each.nbytes) for each in results)
        else:
            self._add(name, [*given, *results])
        return result

    def launched(self, name: str, args: list[Any]) -> None:
        """Counts a launch of Triton."""
        self.counted.cost.triton += 1
        self._add(name, [each for each in args if isinstance(each, torch.Tensor)])

    def finish(self, collectives: list[tuple[str, int]], logits: int) -> Counted:
        """The counted step."""
        cost = self.counted.cost
        for name, size in collectives:
            cost.collectives += 1
            cost.bytes += size
            self.counted.kernels[name] += 1
            self.counted.kernel_bytes[name] += size
        cost.floor = sum(self._persistent.values()) + sum(size for _, size in collectives) + 2 * logits
        return self.counted

    def _add(self, name: str, tensors: list[torch.Tensor], more: float = 0.0) -> None:
        found: dict[tuple[Any, ...], float] = {}
        for each in tensors:
            storage = _storage(each)
            rule = self._sizes.get(storage)
            size = float(each.nbytes) if rule is None else rule(name, each)
            found[storage, each.storage_offset(), each.shape] = size
            if storage not in self._made:
                part = (storage, name == _ATTENTION) if rule is not None else storage
                self._persistent[part] = max(self._persistent.get(part, 0.0), size)  # type: ignore[index]
        total = sum(found.values()) + more
        self.counted.cost.bytes += total
        self.counted.kernels[name] += 1
        self.counted.kernel_bytes[name] += total


def count(name: str, num_layers: int) -> dict[str, Counted]:
    """By step: the launches of a model with this number of layers."""
    with meta_models.device_like(meta_models.H100):
        built = meta_models.build(name, num_layers)
        found = {}
        for step, sizes in STEPS.items():
            with _launches(lambda name, args: None):
                built.run(*sizes)  # creates what is created once
            if built.communicator is not None:
                built.communicator.calls.clear()
            counter = _Counter(_sizes_in_step(built, *sizes))
            with _launches(counter.launched), counter:
                built.run(*sizes)
            logits = sizes[0] * built.model.config.vocab_size * 2
            found[step] = counter.finish([] if built.communicator is None else built.communicator.calls, logits)
    return found


def whole(name: str) -> dict[str, Cost]:
    """By step: the cost of the whole model."""
    spec = meta_models.MODELS[name]
    fewer = spec["fixed"] or spec["period"]
    first, second = count(name, fewer), count(name, fewer + spec["period"])
    periods = (spec["layers"] - fewer) // spec["period"]
    return {step: first[step].cost.plus(second[step].cost.plus(first[step].cost, -1), periods) for step in STEPS}


def page() -> str:
    """The complete page."""
    lines = [
        "| model | step | Triton | torch | collectives | bytes | floor | bytes / floor |",
        "|---|---|" + "--:|" * 6,
    ]
    for name in MODELS:
        spec = meta_models.MODELS[name]
        shown = name if spec.get("tp", 1) == 1 else f"{name}, one of {spec['tp']} ranks"
        for step, cost in whole(name).items():
            numbers = f"{cost.triton:,} | {cost.torch:,} | {cost.collectives:,}"
            sizes = f"{_shown(cost.bytes)} | {_shown(cost.floor)} | {cost.bytes / cost.floor:.2f}"
            lines.append(f"| {shown} | {step} | {numbers} | {sizes} |")
    return HEAD + "\n".join(lines) + "\n"


def _sizes_in_step(
    built: Any, num_requests: int, query_len: int, seq_len: int
) -> dict[int, Callable[[str, torch.Tensor], float]]:
    """By storage: bytes that the step uses of tensors of which it does not use all."""
    tokens = num_requests * query_len
    rules: dict[int, Callable[[str, torch.Tensor], float]] = {}

    def cached(name: str, tensor: torch.Tensor) -> float:
        rows = num_requests * seq_len if name == _ATTENTION else tokens
        return float(tensor.nbytes / meta_models.BLOCK_SIZE * rows)

    def kept(name: str, tensor: torch.Tensor) -> float:
        return 2.0 * num_requests * tensor.nbytes / tensor.shape[0]  # read and written

    def rotation(name: str, tensor: torch.Tensor) -> float:
        return float(tokens * tensor[0].nbytes)

    for layer in built.model.attention_layers():
        rules.update((_storage(each), cached) for each in layer.kv_cache)
    for layer in built.model.state_layers():
        rules.update((_storage(each), kept) for each in layer.state)
    for module in built.model.modules():
        if isinstance(module, RotaryEmbedding):
            rules[_storage(module._tables[0])] = rotation
        if hasattr(module, "gate_up") and hasattr(module, "down") and hasattr(module, "num_experts"):
            top_k = built.model.config.hf_config.get("num_experts_per_tok")
            read = 1 - (1 - top_k / module.num_experts) ** tokens
            for weight in (module.gate_up, module.down):
                for each in [weight, *getattr(weight, "__dict__", {}).values()]:
                    if isinstance(each, torch.Tensor):
                        rules[_storage(each)] = lambda _, tensor, read=read: tensor.nbytes * read
    return rules


@contextmanager
def _launches(launched: Callable[[str, list[Any]], None]) -> Iterator[None]:
    """Gives the name and the arguments of launches inside the block to a function instead of executing them."""
    original = JITFunction.__getitem__

    def catch(self: JITFunction, grid: Any) -> Callable[..., None]:
        return lambda *args, **options: launched(self.__name__, [*args, *options.values()])

    JITFunction.__getitem__ = catch
    try:
        yield
    finally:
        JITFunction.__getitem__ = original


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _is_view(function: Any) -> bool:
    returned = function._schema.returns
    return bool(returned) and all(each.alias_info is not None and not each.alias_info.is_write for each in returned)


def _shown(size: float) -> str:
    return f"{size / 1e9:,.2f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"


def _print_kernels() -> None:
    for name in MODELS:
        spec = meta_models.MODELS[name]
        for step, counted in count(name, spec["fixed"] + spec["period"]).items():
            print(f"{name}, {spec['fixed'] + spec['period']} layers, {step}: {counted.cost}")
            for kernel, number in counted.kernels.most_common():
                print(f"    {kernel:40} {number:4} {_shown(counted.kernel_bytes[kernel]):>12}")


if __name__ == "__main__":
    if "--kernels" in sys.argv:
        _print_kernels()
    elif "--check" not in sys.argv:
        PAGE.write_text(page(), encoding="utf-8")
    elif (now := page()) != PAGE.read_text(encoding="utf-8"):
        print("The counts of steps have changed. Write the page again, and explain the change:", now, sep="\n")
        sys.exit(1)
