"""What takes the places of transformers' modules: in the dry run, and in the model that serves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from mvllm.distributed.group_coordinator import GroupCoordinator
from mvllm.layers.attention import Attention
from mvllm.layers.context import ForwardStep
from mvllm.layers.embedding import LMHead, VocabEmbedding
from mvllm.layers.linear import Linear
from mvllm.models.transformers_backend.dry_run import AttentionParameters, UnsupportedModelError


class RecordingLinear(nn.Module):
    """A linear layer in the dry run: widths, and who looks at it.

    Args:
        original: transformers' own, on the meta device.
        in_width, out_width: Of what it is given and gives on this rank.

    Attributes:
        original: As given.
        is_called: Whether it has been run.
        is_read: Whether somebody read its weight, rather than calling it.
    """

    def __init__(self, original: nn.Linear, in_width: int, out_width: int) -> None:
        super().__init__()
        self._original = [original]  # in a list: not a part of the model
        self.in_features, self.out_features = original.in_features, original.out_features
        self._widths = (in_width, out_width)
        self.is_called = self.is_read = False

    @property
    def original(self) -> nn.Linear:
        return self._original[0]

    @property
    def weight(self) -> torch.Tensor:
        """Reading it is noted."""
        self.is_read = True
        return self.original.weight

    @property
    def bias(self) -> torch.Tensor | None:
        """Reading it is noted."""
        self.is_read = True
        return self.original.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A result of the right shape."""
        in_width, out_width = self._widths
        if x.shape[-1] != in_width:
            raise UnsupportedModelError(f"a linear layer of {in_width} inputs on this rank is given {x.shape[-1]}")
        self.is_called = True
        return x.new_empty(*x.shape[:-1], out_width)


class LinearReplacement(nn.Module):
    """A linear layer of ours where transformers had one of its own.

    Args:
        linear: The layer.
        original: What it stands for.
        tp: The ranks that share it.
        columns: The columns of the input that this rank takes, where the input is whole and the layer holds a band.
        gathers: Whether the ranks' bands of outputs are put together.
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
    """Our token embedding where transformers had one of its own."""

    def __init__(self, embedding: VocabEmbedding) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """[1, T] to [1, T, hidden_size]."""
        found: torch.Tensor = self.embedding(ids.flatten())
        return found.unflatten(0, ids.shape)


class LMHeadReplacement(nn.Module):
    """Our head where transformers had one of its own."""

    def __init__(self, head: LMHead) -> None:
        super().__init__()
        self.head = head

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[1, n, hidden_size] to [1, n, vocab_size]."""
        found: torch.Tensor = self.head(hidden.flatten(0, 1))
        return found[None]


@dataclass
class CurrentStep:
    """The step that runs, for all attention layers of one model."""

    step: ForwardStep | None = None


class PagedAttention(nn.Module):
    """Our attention, as transformers' attention modules call it.

    Args:
        attention: The layer. Its head size is the larger of those of keys and values; the smaller are filled up with
            zeros, which change neither products nor results.
        facts: What was asked for.
        now: Where the step is found.
    """

    def __init__(self, attention: Attention, facts: AttentionParameters, now: CurrentStep) -> None:
        super().__init__()
        self.attention = attention
        self._facts, self._now = facts, now
        self._key_fill = attention.spec.head_size - facts.head_size
        self._value_fill = attention.spec.head_size - facts.value_size

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """[1, heads, T, size] each, to [1, T, heads, value_size]."""
        assert self._now.step is not None, "the model's forward tells the step"
        query, key = _rows(query, self._key_fill), _rows(key, self._key_fill)
        found = self.attention(query, key, _rows(value, self._value_fill), self._now.step)
        found = found.view(1, query.shape[0], query.shape[1], -1)
        return found[..., : self._facts.value_size] if self._value_fill else found


class PrecomputedHiddenStates(nn.Module):
    """Stands for the layers while the rest of a language model makes logits: gives the hidden states it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: torch.Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> LastHiddenStateOutput:
        """Stands for what transformers' models give."""
        return LastHiddenStateOutput(self.hidden)


class ModuleCalled(Exception):
    """The part of a model that was called.

    Args:
        name: Its name.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class CallDetector(nn.Module):
    """Stands for a part of a model to find out whether it, or which part of it, is called.

    Args:
        original: What it stands for; attributes that are no modules are those of it.
        name: For ModuleCalled.
    """

    def __init__(self, original: nn.Module, name: str) -> None:
        super().__init__()
        self._original, self._name = [original], name  # in a list: not a part of the model

    def __getattr__(self, name: str) -> Any:
        own = self.__dict__.get("_original")
        if own is None or name == "_original":
            return super().__getattr__(name)
        found = getattr(own[0], name)
        return CallDetector(found, f"{self._name}.{name}") if isinstance(found, nn.Module) else found

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Ends the run."""
        raise ModuleCalled(self._name)


class LastHiddenStateOutput:
    """What transformers' models give, as far as making logits goes: there is nothing but the last hidden states.

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
