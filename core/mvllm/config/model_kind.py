"""What a checkpoint is for, by the name of its architecture: to generate, or to say something about its prompt.

LlamaForCausalLM                  generates; embeds, too
LlamaModel                        embeds: a decoder without its head
LlamaForSequenceClassification    classifies: a decoder with another head
BertModel                         embeds: an encoder
BertForSequenceClassification     classifies: an encoder with a head
"""

from __future__ import annotations

from dataclasses import dataclass

from mvllm.config.hf_config import HFConfig
from mvllm.errors import ModelError

ENCODER_FAMILIES = ("Bert", "Roberta", "XLMRoberta", "DistilBert")
"""Whose tokens see those behind them. What their names begin with; what follows says which head there is."""

_CLASSIFIER = "ForSequenceClassification"
_HEADLESS = ("Model", "ForMaskedLM")
"""Of encoders: a head that fills in masked tokens is left unread."""

HEADLESS_DECODERS = ("LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model")

_MAX_LABELS = 1 << 20


@dataclass(frozen=True)
class ModelKind:
    """What a model can do.

    Attributes:
        generates: Whether it has a head that gives tokens.
        is_encoder: Whether every token sees all others of its prompt, so that there is nothing to generate, to keep or
            to cut into pieces.
        num_labels: Scores that its head gives for a prompt; 0 where it does not classify.
    """

    generates: bool = True
    is_encoder: bool = False
    num_labels: int = 0

    @classmethod
    def of(cls, architecture: str, hf_config: HFConfig) -> ModelKind:
        """By the name that a model class is registered under.

        Raises:
            ModelError: It classifies, and how many labels there are cannot be said.
        """
        is_encoder = _is_encoder(architecture)
        if architecture.endswith(_CLASSIFIER):
            return cls(generates=False, is_encoder=is_encoder, num_labels=_num_labels(hf_config))
        return cls(generates=not is_encoder and architecture not in HEADLESS_DECODERS, is_encoder=is_encoder)


def _is_encoder(architecture: str) -> bool:
    endings = (_CLASSIFIER, *_HEADLESS)
    return any(architecture == family + ending for family in ENCODER_FAMILIES for ending in endings)


def _num_labels(hf_config: HFConfig) -> int:
    """`num_labels`, or as many as `id2label` names; two where neither is there, as transformers has it."""
    if "num_labels" in hf_config:
        return hf_config.positive_int("num_labels", at_most=_MAX_LABELS)
    labels = hf_config.get("id2label")
    if labels is None:
        return 2
    if not isinstance(labels, dict) or not labels:
        raise ModelError(f"{hf_config.source}: 'id2label' should name every label, found {labels!r:.80}.")
    return len(labels)
