"""BERT, RoBERTa, XLM-RoBERTa and DistilBERT: encoders with learned position embeddings and a norm after each block.

`EncoderFamily` has the tensor names and classification heads in which they differ; `config.json` has the first position
and the number of token types.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import nn

from mvllm.config.context_length import first_position
from mvllm.config.model import ModelConfig
from mvllm.layers.activation import activation
from mvllm.layers.context import BuildContext, ForwardStep
from mvllm.layers.embedding import Embedding, VocabEmbedding
from mvllm.layers.encoder_attention import EncoderAttention
from mvllm.layers.linear import QKVLinear, ReplicatedLinear, RowParallelLinear
from mvllm.layers.mlp import MLP
from mvllm.layers.norm import LayerNorm
from mvllm.models.pooling_model import PoolingModel


@dataclass(frozen=True)
class EncoderFamily:
    """Tensor names and classification head of a family.

    Attributes:
        root: Prefix of the names of the model's tensors.
        layers: Module of the layers, below `root`.
        query, key, value, attention_output, attention_norm, up, down, mlp_norm: Modules of a layer.
        head: The two modules of the classification head.
        head_activation: Activation between them.
        intermediate_key, activation_key: Keys in `config.json` of the MLP's inner size and activation.
    """

    root: str
    layers: str = "encoder.layer"
    query: str = "attention.self.query"
    key: str = "attention.self.key"
    value: str = "attention.self.value"
    attention_output: str = "attention.output.dense"
    attention_norm: str = "attention.output.LayerNorm"
    up: str = "intermediate.dense"
    down: str = "output.dense"
    mlp_norm: str = "output.LayerNorm"
    head: tuple[str, ...] = ("classifier.dense", "classifier.out_proj")
    head_activation: str = "tanh"
    intermediate_key: str = "intermediate_size"
    activation_key: str = "hidden_act"


BERT = EncoderFamily("bert", head=("bert.pooler.dense", "classifier"))
ROBERTA = EncoderFamily("roberta")
DISTILBERT = EncoderFamily(
    "distilbert",
    layers="transformer.layer",
    query="attention.q_lin",
    key="attention.k_lin",
    value="attention.v_lin",
    attention_output="attention.out_lin",
    attention_norm="sa_layer_norm",
    up="ffn.lin1",
    down="ffn.lin2",
    mlp_norm="output_layer_norm",
    head=("pre_classifier", "classifier"),
    head_activation="relu",
    intermediate_key="hidden_dim",
    activation_key="activation",
)


class EncoderEmbeddings(nn.Module):
    """The normalised sum of token, position and token-type embeddings."""

    def __init__(self, config: ModelConfig, ctx: BuildContext, layout: EncoderFamily) -> None:
        super().__init__()
        name, hf, size = f"{layout.root}.embeddings", config.hf_config, config.hidden_size
        self.words = VocabEmbedding(ctx, f"{name}.word_embeddings", config.vocab_size, size)
        self.positions = Embedding(
            ctx, f"{name}.position_embeddings", hf.positive_int("max_position_embeddings", 512), size
        )
        self.num_types = 0 if layout.root == "distilbert" else hf.positive_int("type_vocab_size", 2)
        self.types = Embedding(ctx, f"{name}.token_type_embeddings", self.num_types, size) if self.num_types else None
        self.norm = LayerNorm(ctx, f"{name}.LayerNorm", size, _eps(config))
        self._first_position = first_position(hf)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, step: ForwardStep) -> torch.Tensor:
        """[T] to [T, hidden_size]."""
        x = self.words(ids) + self.positions(positions + self._first_position)
        if self.types is not None:
            x = x + (self.types.weight[0] if step.token_types is None else self.types(step.token_types))
        return self.norm(x)


class EncoderLayer(nn.Module):
    """An encoder layer: attention and MLP, each with a residual sum followed by a norm."""

    def __init__(self, config: ModelConfig, ctx: BuildContext, layout: EncoderFamily, layer: int) -> None:
        super().__init__()
        name, hf, size = f"{layout.root}.{layout.layers}.{layer}", config.hf_config, config.hidden_size
        heads, head_size = config.num_heads, config.head_size
        names = (f"{name}.{layout.query}", f"{name}.{layout.key}", f"{name}.{layout.value}")
        self.qkv = QKVLinear(ctx, names, size, heads, heads, head_size, bias=True)
        self.attention = EncoderAttention(ctx, self.qkv.heads, head_size, head_size**-0.5)
        self.output = RowParallelLinear(ctx, f"{name}.{layout.attention_output}", heads * head_size, size, bias=True)
        self.attention_norm = LayerNorm(ctx, f"{name}.{layout.attention_norm}", size, _eps(config))
        self.mlp = MLP(
            ctx,
            f"{name}.{layout.up}",
            f"{name}.{layout.down}",
            size,
            hf.positive_int(layout.intermediate_key, 3072),
            hf.get(layout.activation_key, "gelu"),
            bias=True,
        )
        self.mlp_norm = LayerNorm(ctx, f"{name}.{layout.mlp_norm}", size, _eps(config))

    def forward(self, x: torch.Tensor, step: ForwardStep) -> torch.Tensor:
        """[T, hidden_size] to [T, hidden_size]."""
        query, key, value = self.qkv.split(x)
        x, _ = self.attention_norm.add_norm(self.output(self.attention(query, key, value, step)), x)
        x, _ = self.mlp_norm.add_norm(self.mlp(x), x)
        return x


class EncoderHead(nn.Module):
    """Classification head over the first token's state: two linear layers with an activation between them."""

    def __init__(self, config: ModelConfig, ctx: BuildContext, layout: EncoderFamily) -> None:
        super().__init__()
        dense, output, size = *layout.head, config.hidden_size
        self.dense = ReplicatedLinear(ctx, dense, size, size, bias=True)
        self.output = ReplicatedLinear(ctx, output, size, config.kind.num_labels, bias=True)
        self._act = activation(ctx, layout.head_activation, size)

    def forward(self, pooled: torch.Tensor) -> torch.Tensor:
        """[n, hidden_size] to [n, labels]."""
        return self.output(self._act(self.dense(pooled)))


class Encoder(PoolingModel):
    """An encoder, with a classification head if `ModelKind.num_labels` is positive."""

    layout: EncoderFamily
    layer_names = re.compile(r"\w+\.(?:encoder|transformer)\.layer\.(\d+)\.")
    # Masked-LM and question-answering heads, and BERT's pooler for next-sentence prediction.
    ignored_names = re.compile(
        r"(^|\.)(cls|lm_head|pooler|vocab_transform|vocab_layer_norm|vocab_projector|qa_outputs)\."
        r"|(^|\.)embeddings\.(position_ids|token_type_ids)$"
    )

    def __init__(self, config: ModelConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx)
        layout, stage = self.layout, self.stage
        self.first_stage_names = (f"{layout.root}.embeddings.",)
        self.last_stage_names = layout.head
        self.embeddings = EncoderEmbeddings(config, ctx, layout) if stage.is_first else None
        self.uses_token_types = self.embeddings is not None and self.embeddings.num_types > 1
        self.layers = nn.ModuleList(EncoderLayer(config, ctx, layout, i) for i in self._layer_numbers())
        if stage.is_last and config.kind.num_labels:
            self.scores = EncoderHead(config, ctx, layout)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        step: ForwardStep,
        intermediate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        x = intermediate if self.embeddings is None else self.embeddings(input_ids, positions, step)
        assert x is not None, "every pipeline stage but the first needs `intermediate`"
        for layer in self.layers:
            x = layer(x, step)
        return x


class Bert(Encoder):
    """BERT with any head."""

    layout = BERT


class Roberta(Encoder):
    """RoBERTa and XLM-RoBERTa with any head."""

    layout = ROBERTA


class DistilBert(Encoder):
    """DistilBERT with any head."""

    layout = DISTILBERT


def _eps(config: ModelConfig) -> float:
    return config.hf_config.positive_number("layer_norm_eps", 1e-12)
