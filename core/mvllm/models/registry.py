"""Architectures by the names that `config.json` uses. A model's module is imported when it is asked for.

Other packages add architectures through entry points of `mvllm.models`: the name is the architecture's, the value
`package.module:Class`, a CausalLM. One that core has as well is core's.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from mvllm.errors import ModelError
from mvllm.logging import get_logger
from mvllm.platform import doors

if TYPE_CHECKING:
    from mvllm.models.causal_lm import CausalLM

logger = get_logger(__name__)

_MODELS = {
    "LlamaForCausalLM": "mvllm.models.llama:LlamaForCausalLM",
    "MistralForCausalLM": "mvllm.models.mistral:MistralForCausalLM",
    "Qwen2ForCausalLM": "mvllm.models.qwen2:Qwen2ForCausalLM",
    "Qwen3ForCausalLM": "mvllm.models.qwen3:Qwen3ForCausalLM",
    "OPTForCausalLM": "mvllm.models.opt:OPTForCausalLM",
    "GPT2LMHeadModel": "mvllm.models.gpt2:GPT2LMHeadModel",
    # decoders that generate nothing
    "LlamaModel": "mvllm.models.pooled_decoders:LlamaModel",
    "LlamaForSequenceClassification": "mvllm.models.pooled_decoders:LlamaForSequenceClassification",
    "MistralModel": "mvllm.models.pooled_decoders:MistralModel",
    "MistralForSequenceClassification": "mvllm.models.pooled_decoders:MistralForSequenceClassification",
    "Qwen2Model": "mvllm.models.pooled_decoders:Qwen2Model",
    "Qwen2ForSequenceClassification": "mvllm.models.pooled_decoders:Qwen2ForSequenceClassification",
    "Qwen3Model": "mvllm.models.pooled_decoders:Qwen3Model",
    "Qwen3ForSequenceClassification": "mvllm.models.pooled_decoders:Qwen3ForSequenceClassification",
    # encoders
    "BertModel": "mvllm.models.encoders:BertModel",
    "BertForMaskedLM": "mvllm.models.encoders:BertForMaskedLM",
    "BertForSequenceClassification": "mvllm.models.encoders:BertForSequenceClassification",
    "RobertaModel": "mvllm.models.encoders:RobertaModel",
    "RobertaForMaskedLM": "mvllm.models.encoders:RobertaForMaskedLM",
    "RobertaForSequenceClassification": "mvllm.models.encoders:RobertaForSequenceClassification",
    "XLMRobertaModel": "mvllm.models.encoders:XLMRobertaModel",
    "XLMRobertaForMaskedLM": "mvllm.models.encoders:XLMRobertaForMaskedLM",
    "XLMRobertaForSequenceClassification": "mvllm.models.encoders:XLMRobertaForSequenceClassification",
    "DistilBertModel": "mvllm.models.encoders:DistilBertModel",
    "DistilBertForMaskedLM": "mvllm.models.encoders:DistilBertForMaskedLM",
    "DistilBertForSequenceClassification": "mvllm.models.encoders:DistilBertForSequenceClassification",
}


def supported_architectures() -> tuple[str, ...]:
    """Names that `resolve_model_class` takes, sorted: core's and those of installed plugins."""
    return tuple(sorted({*_MODELS, *doors.offered(doors.MODELS)}))


def resolve_model_class(architecture: str) -> type[CausalLM]:
    """The class that runs checkpoints of `architecture`.

    Raises:
        ModelError: There is none, and the message lists those there are; or a plugin's is no model class.
        ConfigError: The plugin that has it is not let in, or cannot be loaded.
    """
    if architecture in _MODELS:
        for rival in doors.installed(doors.MODELS):
            if rival.name == architecture:
                logger.warning("%s offers %s, which core has itself: core's runs.", rival, architecture)
        module, _, name = _MODELS[architecture].partition(":")
        model_class: type[CausalLM] = getattr(importlib.import_module(module), name)
        return model_class
    source = doors.find(doors.MODELS, architecture)
    if source is None:
        raise ModelError(
            f"The architecture {architecture!r} is not supported. Supported: {', '.join(supported_architectures())}."
        )
    found = doors.load(doors.MODELS, source)
    from mvllm.models.causal_lm import CausalLM

    if not (isinstance(found, type) and issubclass(found, CausalLM)):
        raise ModelError(f"{source} must name a subclass of mvllm.extension_api.CausalLM, found {found!r}.")
    return found
