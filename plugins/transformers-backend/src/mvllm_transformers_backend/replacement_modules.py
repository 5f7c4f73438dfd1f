"""Modules that replace transformers' modules, in the dry run and in the served model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from mvllm.extension_api import Attention, ForwardStep, LMHead, VocabEmbedding
from mvllm.extension_api.layers import GroupCoordinator, Linear
from mvllm_transformers_backend.dry_run import AttentionParameters, UnsupportedModelError


class RecordingLinear(nn.Module):
    """A linear layer of the dry run that records calls and reads of its weight.

    Args:
        original: transformers' layer, on the meta device.
        in_width, out_width: Input and output features on this rank.

    Attributes:
        original: As given.
        is_called: Whether it was called.
        is_read: Whether its weight or bias was read.
    """

    def __init__(self, original: nn.Linear, in_width: int, out_width: int) -> None:
        super().__init__()
        self._original = [original]  # in a list, so that it is not registered as a submodule
        self.in_features, self.out_features = original.in_features, original.out_features
        self._widths = (in_width, out_width)
        self.is_called = self.is_read = False

    @property
    def original(self) -> nn.Linear:
        return self._original[0]

    @property
    def weight(self) -> torch.Tensor:
        """The original's weight; records the read."""
        self.is_read = True
        return self.original.weight

    @property
    def bias(self) -> torch.Tensor | None:
        """The original's bias; records the read."""
        self.is_read = True
        return self.original.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """An empty result of the right shape."""
        in_width, out_width = self._widths
        if x.shape[-1] != in_width:
            raise UnsupportedModelError(f"a linear layer of {in_width} inputs on this rank is given {x.shape[-1]}")
        self.is_called = True
        return x.new_empty(*x.shape[:-1], out_width)


class LinearReplacement(nn.Module):
    """A linear layer of core in place of transformers' layer.

    Args:
        linear: Core's layer.
        original: transformers' layer.
        tp: The tensor-parallel group.
        columns: This rank's columns of the input, if the input is whole and the layer is row parallel.
        gathers: Whether the outputs of the ranks are gathered.
    """

    def __init__(
        self,
        linear: Linear,
        original: nn.Linear,
        tp: GroupCoordinator,
        *,
        columns: slice | None = None,
        gathers: bool = False,
    ) -> None:
        super().__init__()
        self.linear = linear
        self.in_features, self.out_features = original.in_features, original.out_features
        self._tp, self._columns, self._gathers = tp, columns, gathers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] to [..., out]."""
        rows = x.reshape(-1, x.shape[-1])
        if self._columns is not None:
            rows = rows[:, self._columns]
        found = self.linear(rows.contiguous())
        if self._gathers:
            found = self._tp.all_gather(found, dim=-1)
        return found.view(*x.shape[:-1], found.shape[-1])


class EmbeddingReplacement(nn.Module):
    """Core's token embedding in place of transformers'."""

    def __init__(self, embedding: VocabEmbedding) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """[1, T] to [1, T, hidden_size]."""
        found: torch.Tensor = self.embedding(ids.flatten())
        return found.unflatten(0, ids.shape)


class LMHeadReplacement(nn.Module):
    """Core's language-model head in place of transformers'."""

    def __init__(self, head: LMHead) -> None:
        super().__init__()
        self.head = head

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[1, n, hidden_size] to [1, n, vocab_size]."""
        found: torch.Tensor = self.head(hidden.flatten(0, 1))
        return found[None]


@dataclass
class CurrentStep:
    """The current step, for all attention layers of one model."""

    step: ForwardStep | None = None


class PagedAttention(nn.Module):
    """Core's attention with the interface of transformers' attention functions.

    Args:
        attention: The layer. Its head size is the larger of those of keys and values; the smaller heads are padded with
            zeros, which do not change the result.
        facts: Parameters from the dry run.
        now: The current step.
    """

    def __init__(self, attention: Attention, facts: AttentionParameters, now: CurrentStep) -> None:
        super().__init__()
        self.attention = attention
        self._facts, self._now = facts, now
        self._key_fill = attention.spec.head_size - facts.head_size
        self._value_fill = attention.spec.head_size - facts.value_size

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """[1, heads, T, size] each, to [1, T, heads, value_size]."""
        assert self._now.step is not None, "the model's forward sets the step"
        query, key = _rows(query, self._key_fill), _rows(key, self._key_fill)
        found = self.attention(query, key, _rows(value, self._value_fill), self._now.step)
        found = found.view(1, query.shape[0], query.shape[1], -1)
        return found[..., : self._facts.value_size] if self._value_fill else found


class PrecomputedHiddenStates(nn.Module):
    """Replaces the layers in `compute_logits`: returns the hidden states set before the call."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: torch.Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> LastHiddenStateOutput:
        """An output object with the hidden states."""
        return LastHiddenStateOutput(self.hidden)


class EmbeddingStub(nn.Module):
    """Replaces the token embedding where encoders' results are merged: embeddings of tokens are not read there.

    Args:
        hidden_size: Elements of an embedding.
        dtype: Their dtype.

    Attributes:
        result: The last result.
    """

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._hidden_size, self._dtype = hidden_size, dtype
        self.result: torch.Tensor | None = None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """[...] to zeros [..., hidden_size]."""
        self.result = torch.zeros((*ids.shape, self._hidden_size), dtype=self._dtype, device=ids.device)
        return self.result


class LanguageModelStub(nn.Module):
    """Replaces the language model in transformers' class of encoders and language model; records its arguments.

    Args:
        hidden_size, dtype: Of embeddings.

    Attributes:
        embed_tokens: Replaces the token embedding.
        arguments: The arguments of the last call.
    """

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed_tokens = EmbeddingStub(hidden_size, dtype)
        self.arguments: dict[str, Any] = {}

    def get_input_embeddings(self) -> nn.Module:
        """As that of transformers' models."""
        return self.embed_tokens

    def forward(self, **arguments: Any) -> LastHiddenStateOutput:
        """The embeddings as hidden states."""
        self.arguments = arguments
        return LastHiddenStateOutput(arguments.get("inputs_embeds"))

    def clear(self) -> None:
        """Drops the tensors of the last call."""
        self.arguments, self.embed_tokens.result = {}, None

    def unknown_arguments(self) -> dict[str, Any]:
        """Arguments of the last call beside embeddings, mask, positions, cache and settings."""
        return {
            name: value
            for name, value in sorted(self.arguments.items())
            if name not in _LANGUAGE_MODEL_ARGUMENTS and not (name == "input_ids" and value is None)
        }


_LANGUAGE_MODEL_ARGUMENTS = (
    *("inputs_embeds", "attention_mask", "position_ids", "past_key_values", "use_cache"),
    *("cache_position", "output_attentions", "output_hidden_states", "return_dict"),
)


class ModuleCalled(Exception):
    """Raised by CallDetector when its module is called.

    Args:
        name: The module's name.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class CallDetector(nn.Module):
    """Replaces a module to detect whether it, or which of its submodules, is called.

    Args:
        original: The replaced module, which provides the attributes.
        name: Its name, for ModuleCalled.
    """

    def __init__(self, original: nn.Module, name: str) -> None:
        super().__init__()
        self._original, self._name = [original], name  # in a list, so that it is not registered as a submodule

    def __getattr__(self, name: str) -> Any:
        original = self.__dict__.get("_original")
        if original is None or name == "_original":
            return super().__getattr__(name)
        found = getattr(original[0], name)
        return CallDetector(found, f"{self._name}.{name}") if isinstance(found, nn.Module) else found

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raises ModuleCalled."""
        raise ModuleCalled(self._name)


class LastHiddenStateOutput:
    """The output of transformers' base models, with the last hidden states only; other attributes are None.

    Args:
        last_hidden_state: [1, n, hidden_size].
    """

    def __init__(self, last_hidden_state: torch.Tensor | None) -> None:
        self.last_hidden_state = last_hidden_state

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> torch.Tensor | None:
        return self.last_hidden_state if index == 0 else None


def _rows(heads: torch.Tensor, fill: int) -> torch.Tensor:
    """[1, heads, T, size] to [T, heads, size + fill], contiguous."""
    rows = heads[0].transpose(0, 1)
    return F.pad(rows, (0, fill)) if fill else rows.contiguous()
