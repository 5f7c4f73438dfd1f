"""ModelKind: whether a model generates, embeds or classifies, by its architecture.

LlamaForCausalLM                  generates; embeds, too
LlamaModel                        embeds: a decoder without its head
LlamaForCausalLM, without head    embeds: its checkpoint has no head, and the embedding is not the head
LlamaForSequenceClassification    classifies: a decoder with another head
BertModel                         embeds: an encoder
BertForSequenceClassification     classifies: an encoder with a head
ColQwen2ForRetrieval              gives a vector for each token: a decoder with a projection
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mvllm.config.checkpoint_head import lacks_head
from mvllm.config.families import find_architecture
from mvllm.config.hf_config import HFConfig
from mvllm.errors import ModelError

_CLASSIFIER = "ForSequenceClassification"
_MAX_LABELS = 1 << 20
_MAX_VECTOR = 1 << 20


@dataclass(frozen=True)
class ModelKind:
    """Whether a model generates, is an encoder, and classifies.

    Attributes:
        generates: Whether it has a language-model head.
        is_encoder: Whether its attention is bidirectional, which excludes generation, KV caching and chunked prefill.
        num_labels: Number of class scores; 0 if it does not classify.
        token_vector_size: Components of the vector of each token, of models for late interaction; 0 for others.
        lacks_head: Whether the architecture generates, but the checkpoint has no language-model head.
    """

    generates: bool = True
    is_encoder: bool = False
    num_labels: int = 0
    token_vector_size: int = 0
    lacks_head: bool = False

    @property
    def is_embedder(self) -> bool:
        """Whether it is for embeddings of prompts. Models that generate give some, too."""
        return not self.generates and not self.num_labels and not self.token_vector_size

    @classmethod
    def of(cls, architecture: str, hf_config: HFConfig, folder: Path | None = None) -> ModelKind:
        """The kind of an architecture.

        Args:
            folder: The model folder with the checkpoint, which may lack the head; None if that does not matter.

        Raises:
            ModelError: The number of labels or the size of vectors in the config is invalid.
        """
        found = find_architecture(architecture)
        is_encoder = found is not None and found.is_encoder
        if architecture.endswith(_CLASSIFIER):
            return cls(generates=False, is_encoder=is_encoder, num_labels=_num_labels(hf_config))
        if found is not None and found.gives_token_vectors:
            size = hf_config.positive_int("embedding_dim", 128, at_most=_MAX_VECTOR)
            return cls(generates=False, token_vector_size=size)
        if found is not None and found.is_headless:
            return cls(generates=False, is_encoder=is_encoder)
        without = folder is not None and lacks_head(folder, hf_config)
        return cls(generates=not without, lacks_head=without)


def _num_labels(hf_config: HFConfig) -> int:
    """`num_labels`, or the length of `id2label`; two if neither is present, as in transformers."""
    if "num_labels" in hf_config:
        return hf_config.positive_int("num_labels", at_most=_MAX_LABELS)
    labels = hf_config.get("id2label")
    if labels is None:
        return 2
    if not isinstance(labels, dict) or not labels:
        raise ModelError(f"{hf_config.source}: 'id2label' should name every label, found {labels!r:.80}.")
    return len(labels)
