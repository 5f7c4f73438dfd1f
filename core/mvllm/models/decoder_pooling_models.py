"""Decoders that generate nothing: without a head, or with one that gives scores to the state of the last token."""

from __future__ import annotations

from mvllm.config.model import ModelConfig
from mvllm.layers.context import BuildContext
from mvllm.models.llama import LlamaForCausalLM
from mvllm.models.mistral import MistralForCausalLM
from mvllm.models.pooling_model import Headless, ScoreHead
from mvllm.models.qwen2 import Qwen2ForCausalLM
from mvllm.models.qwen3 import Qwen3ForCausalLM


class LlamaModel(Headless, LlamaForCausalLM):
    """`LlamaModel` of Hugging Face checkpoints."""


class MistralModel(Headless, MistralForCausalLM):
    """`MistralModel` of Hugging Face checkpoints."""


class Qwen2Model(Headless, Qwen2ForCausalLM):
    """`Qwen2Model` of Hugging Face checkpoints."""


class Qwen3Model(Headless, Qwen3ForCausalLM):
    """`Qwen3Model` of Hugging Face checkpoints."""


class _Classifier(Headless):
    def __init__(self, config: ModelConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx)
        self.last_stage_names = (*self.last_stage_names, "score.")
        if self.stage.is_last:
            self.scores = ScoreHead(ctx, config.hidden_size, config.kind.num_labels)


class LlamaForSequenceClassification(_Classifier, LlamaForCausalLM):
    """`LlamaForSequenceClassification` of Hugging Face checkpoints."""


class MistralForSequenceClassification(_Classifier, MistralForCausalLM):
    """`MistralForSequenceClassification` of Hugging Face checkpoints."""


class Qwen2ForSequenceClassification(_Classifier, Qwen2ForCausalLM):
    """`Qwen2ForSequenceClassification` of Hugging Face checkpoints."""


class Qwen3ForSequenceClassification(_Classifier, Qwen3ForCausalLM):
    """`Qwen3ForSequenceClassification` of Hugging Face checkpoints."""
