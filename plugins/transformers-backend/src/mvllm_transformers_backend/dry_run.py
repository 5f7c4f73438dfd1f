"""Dry run of a transformers model: records its attention calls and detects other operations across tokens.

The model runs on the meta device, which has shapes and no data. Masks are not computed: a requested mask is an empty
tensor with a recorded mask function, from which the attention call derives the window. A mask that the model creates or
changes itself has no recorded function and is detected.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

MaskRule = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(batch, head, query position, key position) to whether the query attends to the key."""

NAME, DRY_NAME = "mvllm", "mvllm-dry-run"
"""Names of core's attention in transformers' registry: for serving, and for the dry run with empty masks."""

_current: ContextVar[DryRun | None] = ContextVar("mvllm_dry_run", default=None)

# Arguments of attention that are ignored: contained in the query or the mask, or about return values.
_NEUTRAL = {
    "cache_position",
    "is_causal",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "sliding_window",  # contained in the mask
    "use_cache",
}
_MATRIX_PRODUCTS = {torch.ops.aten.mm.default: 0, torch.ops.aten.bmm.default: 0, torch.ops.aten.addmm.default: 1}
_RUNNING_SUMS = (torch.ops.aten.cumsum.default, torch.ops.aten.cumprod.default)
_VIEWS = {"alias", "detach", "expand", "select", "slice", "squeeze", "unsqueeze", "view", "_unsafe_view"}


class UnsupportedModelError(Exception):
    """The model uses an operation that a paged KV cache does not support; the message says which."""


@dataclass(frozen=True)
class AttentionParameters:
    """Parameters of one attention module, on this rank.

    Attributes:
        num_heads, num_kv_heads: Heads of query, and of key and value.
        head_size, value_size: Elements of a head of query and key, and of one of the value.
        scale: Factor on query-key products.
        window: Sliding window in tokens, the query's token included; None for full causal attention.
        soft_cap: As in AttentionSpec.
        sinks: Name of the module's parameter with the sinks, or None.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    value_size: int
    scale: float
    window: int | None
    soft_cap: float | None
    sinks: str | None


class DryRun:
    """A dry run of one model.

    Args:
        num_tokens: Tokens of the run: a number that is no size of the model, so that token dimensions are recognisable.
        max_len: Longest sequence for which the windows must be correct.

    Attributes:
        attention: Parameters of each attention module, in the order of calls.
    """

    def __init__(self, num_tokens: int, max_len: int) -> None:
        self.num_tokens, self._max_len = num_tokens, max_len
        self.attention: dict[nn.Module, AttentionParameters] = {}
        self._rules: dict[int, MaskRule] = {}
        self._windows: dict[int, int | None] = {}
        self._masks: list[torch.Tensor] = []  # kept, so that no other gets the id of one

    @contextlib.contextmanager
    def active(self, config: Any) -> Iterator[None]:
        """Makes this the active dry run of the model of `config` inside the context."""
        token = _current.set(self)
        experts = getattr(config, "_experts_implementation", None)
        config._attn_implementation = DRY_NAME
        if experts is not None:
            config._experts_implementation = "batched_mm"  # other implementations read the routing, which has no data
        try:
            yield
        finally:
            config._attn_implementation = NAME
            if experts is not None:
                config._experts_implementation = experts
            _current.reset(token)

    def blank_mask(self, rule: MaskRule) -> torch.Tensor:
        """An empty mask with the mask function `rule`. Unused masks are permitted."""
        blank = torch.empty((1, 1, self.num_tokens, self.num_tokens), dtype=torch.bool, device="meta")
        self._masks.append(blank)
        self._rules[id(blank)] = rule
        return blank

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scaling: float | None,
        extras: dict[str, Any],
    ) -> torch.Tensor:
        """Records one attention call; returns an empty result [1, T, heads, value_size]."""
        if module in self.attention:
            raise UnsupportedModelError("it calls the attention of a layer more than once")
        if not query.shape[2] == key.shape[2] == value.shape[2] == self.num_tokens or query.shape[0] != 1:
            raise UnsupportedModelError("its attention is not of each token over those before it")
        if mask is None:
            raise UnsupportedModelError("it has attention without a mask, over tokens that come later as well")
        if id(mask) not in self._rules:
            raise UnsupportedModelError("it makes attention masks of its own")
        unknown = sorted(
            name
            for name, given in extras.items()
            if name not in _NEUTRAL | {"softcap", "s_aux"} and given is not None and given is not False
        )
        if unknown:
            raise UnsupportedModelError(f"it passes unknown arguments to its attention ({', '.join(unknown)})")
        cap = extras.get("softcap")
        if key.shape[1] != value.shape[1] or query.shape[1] % key.shape[1] or query.shape[3] != key.shape[3]:
            raise UnsupportedModelError("its heads of query, key and value do not fit together")
        self.attention[module] = AttentionParameters(
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            head_size=query.shape[3],
            value_size=value.shape[3],
            scale=float(query.shape[3] ** -0.5 if scaling is None else scaling),
            window=self._window(mask),
            soft_cap=None if cap is None else float(cap),
            sinks=_sinks(module, extras.get("s_aux")),
        )
        return query.new_empty(1, self.num_tokens, query.shape[1], value.shape[3])

    def _window(self, mask: torch.Tensor) -> int | None:
        if id(mask) not in self._windows:
            self._windows[id(mask)] = window_of(self._rules[id(mask)], self._max_len)
        return self._windows[id(mask)]


class CrossTokenOpDetector(TorchDispatchMode):
    """Detects operations across tokens outside of attention.

    Args:
        num_tokens: As in DryRun.
        positions: [1, T]: the model's `position_ids`.

    Attributes:
        reads_positions: Whether an operation read them.
    """

    def __init__(self, num_tokens: int, positions: torch.Tensor) -> None:
        super().__init__()
        self._num_tokens = num_tokens
        self._positions = positions.untyped_storage()._cdata
        self.reads_positions = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if name in ("convolution", "_convolution"):
            raise UnsupportedModelError("it has convolutions, which keep more than keys and values between steps")
        if function in _MATRIX_PRODUCTS and args[_MATRIX_PRODUCTS[function]].shape[-1] == self._num_tokens:
            raise UnsupportedModelError("it combines tokens outside of its attention")
        if function in _RUNNING_SUMS and args[0].is_floating_point() and args[0].shape[args[1]] == self._num_tokens:
            raise UnsupportedModelError("it sums over tokens outside of its attention")
        if name == "arange" and result.numel() == self._num_tokens:
            raise UnsupportedModelError("it counts positions by itself, from the beginning of each step")
        if name not in _VIEWS:
            self.reads_positions = self.reads_positions or any(
                isinstance(arg, torch.Tensor) and arg.untyped_storage()._cdata == self._positions for arg in args
            )
        return result


def window_of(rule: MaskRule, max_len: int) -> int | None:
    """The sliding window of a mask function in tokens, the query's token included; None for full causal attention.

    Raises:
        UnsupportedModelError: The mask is neither causal nor that of a sliding window.
    """
    keys, none = torch.arange(max_len), torch.zeros((), dtype=torch.long)

    def first_seen(query: int) -> int:
        seen = rule(none, none, torch.tensor(query), keys)
        seen = torch.broadcast_to(seen, keys.shape)
        first = int(seen.to(torch.int8).argmax())
        if not torch.equal(seen, (keys >= first) & (keys <= query)):
            raise UnsupportedModelError("its attention masks are neither causal nor those of a sliding window")
        return first

    last = max_len - 1
    window = last + 1 - first_seen(last)
    for query in sorted({0, 1, 2, max_len // 3, max_len // 2, last - 1, last}):
        if 0 <= query <= last and first_seen(query) != max(0, query + 1 - window):
            raise UnsupportedModelError("its attention masks are neither causal nor those of a sliding window")
    return None if window >= max_len else window


def register_attention() -> None:
    """Registers core's attention in transformers under both names. Idempotent."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, _attend)
    AttentionInterface.register(DRY_NAME, _attend)
    AttentionMaskInterface.register(DRY_NAME, _blank_mask)


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **extras: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: [1, heads, T, size] each, to [1, T, heads, value_size]."""
    dry_run = _current.get()
    if dry_run is not None:
        return dry_run.attend(module, query, key, value, attention_mask, scaling, extras), None
    found: torch.Tensor = module.paged_attention(query, key, value)  # type: ignore[operator]
    return found, None


def _blank_mask(*args: Any, mask_function: MaskRule, **kwargs: Any) -> torch.Tensor:
    dry_run = _current.get()
    assert dry_run is not None, "only a dry run uses this name"
    return dry_run.blank_mask(mask_function)


def _sinks(module: nn.Module, given: torch.Tensor | None) -> str | None:
    if given is None:
        return None
    for name, parameter in module.named_parameters(recurse=False):
        if parameter is given:
            return name
    raise UnsupportedModelError("its attention sinks are not a weight of the layer")
