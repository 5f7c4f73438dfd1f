"""The heads of EAGLE-3 and of multi-token prediction in plain torch, for training.

In training a head runs several passes, as in drafting, over all positions at once.

    pass   reads at position p                          predicts
    1      states p, token p + 1                        token p + 2
    2      its own result at p - 1, token p + 1         token p + 2, as the second draft token
    3      that result at p - 1, token p + 1            token p + 2, as the third

In pass n a position attends to the keys of pass 1 up to n - 1 positions before, and to one key of each later pass.

State dicts have the names of published checkpoints; those of an MTP module stand below `model.mtp_layers.0` there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True)
class HeadConfig:
    """Sizes of a head, most of which are the served model's.

    Attributes:
        target_layers: The layers of the served model before which it reads the residual stream.
        draft_vocab_size: Tokens that it predicts.
    """

    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rms_norm_eps: float
    rope_theta: float
    max_positions: int
    target_layers: tuple[int, ...]

    @classmethod
    def of_target(cls, config: Any, draft_vocab_size: int, layers: tuple[int, ...]) -> HeadConfig:
        """A head as wide as the served model, a LlamaConfig."""
        return cls(
            config.vocab_size,
            min(draft_vocab_size, config.vocab_size),
            config.hidden_size,
            config.intermediate_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            config.rms_norm_eps,
            float((config.rope_parameters or {}).get("rope_theta", 10000.0)),
            config.max_position_embeddings,
            layers,
        )

    def published(self) -> dict[str, Any]:
        """`config.json`."""
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "draft_vocab_size": self.draft_vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_size,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "max_position_embeddings": self.max_positions,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "eagle_aux_hidden_state_layer_ids": list(self.target_layers),
        }


class Draft(NamedTuple):
    """The result of a pass.

    Attributes:
        hidden: [B, T, hidden_size], behind the last norm.
        logits: [B, T, draft_vocab_size].
    """

    hidden: torch.Tensor
    logits: torch.Tensor


class RMSNorm(nn.Module):
    """Root-mean-square norm."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size], normalised."""
        return functional.rms_norm(x, (x.shape[-1],), self.weight, self._eps)


class Attention(nn.Module):
    """Self-attention whose queries of a later pass also see the keys of the passes before.

    Args:
        input_size: Elements of what it reads.
    """

    def __init__(self, config: HeadConfig, input_size: int) -> None:
        super().__init__()
        self._config = config
        width, kv_width = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
        self.q_proj = nn.Linear(input_size, width, bias=False)
        self.k_proj = nn.Linear(input_size, kv_width, bias=False)
        self.v_proj = nn.Linear(input_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)
        self._attend_to_own_position()

    def forward(self, x: torch.Tensor, cache: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """[B, T, input_size] to [B, T, hidden_size].

        Args:
            cache: Keys and values of the passes before, [B, heads, T, head_size] each; those of this pass are appended.
        """
        query, key, value = self._heads(self.q_proj(x)), self._heads(self.k_proj(x)), self._heads(self.v_proj(x))
        query, key = self._rotate(query), self._rotate(key)
        groups = self._config.num_heads // self._config.num_kv_heads
        cache.append((key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)))
        number, length, scale = len(cache), x.shape[1], self._config.head_size**-0.5
        first_keys, first_values = cache[0]
        # A draft token in pass n is n - 1 positions behind the last position that the first pass has computed for it.
        seen = torch.ones(length, length, dtype=torch.bool, device=x.device).tril(1 - number)
        scores = [(query @ first_keys.transpose(2, 3) * scale).masked_fill(~seen, float("-inf"))]
        later = [
            tuple(each.roll(number - 1 - i, dims=2) for each in cache[i]) for i in range(1, number)
        ]  # the key of pass i that a query sees is as many positions before it as passes lie between
        scores += [(query * keys).sum(-1, keepdim=True) * scale for keys, _ in later]
        weights = torch.cat(scores, dim=-1).softmax(-1)
        result = weights[..., :length] @ first_values
        for i, (_, values) in enumerate(later):
            result = result + weights[..., length + i, None] * values
        return self.o_proj(result.transpose(1, 2).flatten(2))

    @torch.no_grad()
    def _attend_to_own_position(self) -> None:
        """Gives queries the weights of their keys. Only attention reads the embedding of the next token, so a head
        learns little before it attends to its own position."""
        groups = self._config.num_heads // self._config.num_kv_heads
        self.k_proj.weight *= 2
        keys = self.k_proj.weight.unflatten(0, (-1, self._config.head_size))
        self.q_proj.weight.copy_(keys.repeat_interleave(groups, dim=0).flatten(0, 1))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self._config.head_size)).transpose(1, 2)

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        frequencies = self._config.rope_theta ** (-torch.arange(half, device=x.device) / half)
        angles = torch.arange(x.shape[2], device=x.device)[:, None] * frequencies
        cos, sin = angles.cos(), angles.sin()
        first, second = x[..., :half], x[..., half:]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class MLP(nn.Module):
    """Gated feed-forward block."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., hidden_size] to [..., hidden_size]."""
        result: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return result


class EagleLayer(nn.Module):
    """The only layer: attention over (embedding, state), and an MLP."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm, self.hidden_norm = RMSNorm(size, eps), RMSNorm(size, eps)
        self.self_attn = Attention(config, 2 * size)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = MLP(config)

    def forward(
        self, embeddings: torch.Tensor, states: torch.Tensor, cache: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> torch.Tensor:
        """[B, T, hidden_size] each."""
        both = torch.cat((self.input_layernorm(embeddings), self.hidden_norm(states)), dim=-1)
        x = states + self.self_attn(both, cache)
        result: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return result


class EagleHead(nn.Module):
    """The head of EAGLE-3, whose first pass reads states of several layers.

    In a trained model a few elements of the residual stream are a hundred times as large as the others. So training
    scales each of them by `scale`.

    Args:
        embedding: [vocab_size, hidden_size]: the served model's.
    """

    def __init__(self, config: HeadConfig, embedding: torch.Tensor) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.target_layers) * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = EagleLayer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.embedding: torch.Tensor
        self.register_buffer("embedding", embedding, persistent=False)
        self.scale: torch.Tensor
        self.register_buffer("scale", torch.ones(self.fc.in_features), persistent=False)

    def published(self) -> dict[str, torch.Tensor]:
        """The tensors of a published checkpoint, float32: the matrix `fc` reads states that are not scaled."""
        return self.state_dict() | {"fc.weight": self.fc.weight.detach() * self.scale}

    def draft(self, next_tokens: torch.Tensor, states: torch.Tensor, num_passes: int) -> list[Draft]:
        """The drafts of each pass. Those of pass n are valid from position n - 1 on.

        Args:
            next_tokens: [B, T]: the token behind each position.
            states: [B, T, layers * hidden_size]: of the served model.
        """
        embeddings = self.embedding[next_tokens]
        x, cache = self.fc(states * self.scale), list[tuple[torch.Tensor, torch.Tensor]]()
        drafts = []
        for number in range(num_passes):
            if number:
                x = x.roll(1, dims=1)
            x = self.midlayer(embeddings, x, cache)
            hidden = self.norm(x)
            drafts.append(Draft(hidden, self.lm_head(hidden)))
        return drafts


class DecoderLayer(nn.Module):
    """A decoder layer of Llama."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(size, eps), RMSNorm(size, eps)
        self.self_attn = Attention(config, size)
        self.mlp = MLP(config)

    def forward(self, x: torch.Tensor, cache: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """[B, T, hidden_size] each."""
        x = x + self.self_attn(self.input_layernorm(x), cache)
        result: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return result


class MTPModule(DecoderLayer):
    """An MTP module as that of MiMo: a layer behind a projection. It predicts every token.

    Args:
        embedding: [vocab_size, hidden_size]: the served model's, which is also its output matrix.
    """

    def __init__(self, config: HeadConfig, embedding: torch.Tensor) -> None:
        super().__init__(config)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.config = config
        self.token_layernorm, self.hidden_layernorm = RMSNorm(size, eps), RMSNorm(size, eps)
        self.input_proj = nn.Linear(2 * size, size, bias=False)
        self.final_layernorm = RMSNorm(size, eps)
        self.embedding: torch.Tensor
        self.register_buffer("embedding", embedding, persistent=False)

    def draft(self, next_tokens: torch.Tensor, states: torch.Tensor, num_passes: int) -> list[Draft]:
        """As `EagleHead.draft`. The states are the model's last ones, behind its norm."""
        embeddings = self.token_layernorm(self.embedding[next_tokens])
        x, cache = states, list[tuple[torch.Tensor, torch.Tensor]]()
        drafts = []
        for number in range(num_passes):
            if number:
                x = x.roll(1, dims=1)
            both = torch.cat((self.hidden_layernorm(x), embeddings), dim=-1)
            x = self.final_layernorm(super().forward(self.input_proj(both), cache))
            drafts.append(Draft(x, functional.linear(x, self.embedding)))
        return drafts
