"""Decoders that generate nothing: without a head, or with one that gives scores to the state of the last token."""

from __future__ import annotations

from mvllm.config.model import ModelConfig
from mvllm.layers.context import BuildContext
from mvllm.models.llama import LlamaForCausalLM
from mvllm.models.mistral import MistralForCausalLM
from mvllm.models.pooling_model import PoolingModel, ScoreHead
from mvllm.models.qwen2 import Qwen2ForCausalLM
from mvllm.models.qwen3 import Qwen3ForCausalLM


class LlamaModel(PoolingModel, LlamaForCausalLM):
    """`LlamaModel` of Hugging Face checkpoints."""


class MistralModel(PoolingModel, MistralForCausalLM):
    """`MistralModel` of Hugging Face checkpoints."""


class Qwen2Model(PoolingModel, Qwen2ForCausalLM):
    """`Qwen2Model` of Hugging Face checkpoints."""


class Qwen3Model(PoolingModel, Qwen3ForCausalLM):
    """`Qwen3Model` of Hugging Face checkpoints."""


class _ClassifierModel(PoolingModel):
    def __init__(self, config: ModelConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx)
        self.last_stage_names = (*self.last_stage_names, "score.")
        if self.stage.is_last:
            self.scores = ScoreHead(ctx, config.hidden_size, config.kind.num_labels)


class LlamaForSequenceClassification(_ClassifierModel, LlamaForCausalLM):
    """`LlamaForSequenceClassification` of Hugging Face checkpoints."""


class MistralForSequenceClassification(_ClassifierModel, MistralForCausalLM):
    """`MistralForSequenceClassification` of Hugging Face checkpoints."""


class Qwen2ForSequenceClassification(_ClassifierModel, Qwen2ForCausalLM):
    """`Qwen2ForSequenceClassification` of Hugging Face checkpoints."""


class Qwen3ForSequenceClassification(_ClassifierModel, Qwen3ForCausalLM):
    """`Qwen3ForSequenceClassification` of Hugging Face checkpoints."""
