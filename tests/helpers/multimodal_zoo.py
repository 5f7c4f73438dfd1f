"""Tiny random checkpoints of multimodal models, made with transformers, with their processors.

Weights are drawn as those of tests/helpers/model_zoo.py: a wrong mask or angle changes the greedy token. The features
of images are as large as the embeddings of tokens, so another image changes it, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.models.auto import AutoModelForMultimodalLM

from mvllm.testing.zoo import draw_weight

VOCAB_SIZE = 384
FIRST_SPECIAL_ID = 320
"""Id of the first token in an entry's `specials`."""
BOS_TOKEN_ID, EOS_TOKEN_ID = 0, 1

TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": BOS_TOKEN_ID,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": None,
}
"""Sizes of language models."""


@dataclass(frozen=True)
class MultiModalEntry:
    """One checkpoint.

    Attributes:
        config: Makes its transformers config.
        processor: Makes its processor for a tokenizer, which has the tokens of `specials`.
        specials: Special tokens, with the ids from FIRST_SPECIAL_ID on.
        placeholder: The text that stands for an image in a prompt.
        modality: What its items are.
        seed: Of the weights.
    """

    config: Callable[[], Any]
    processor: Callable[[Any], Any]
    specials: tuple[str, ...] = ("<image>",)
    placeholder: str = "<image>"
    modality: str = "image"
    seed: int = 0


def save_model(config: Any, folder: Path, seed: int = 0) -> PreTrainedModel:
    """Writes a model with random weights; returns it as transformers runs it: eager attention, float32."""
    model = AutoModelForMultimodalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    draw_weights(model, seed)
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def draw_weights(model: PreTrainedModel, seed: int = 0) -> None:
    """Fills a multimodal model with random weights."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 2:  # a convolution
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / math.sqrt(parameter[0].numel()))
        else:
            parameter.copy_(draw_weight(name, parameter.shape, generator, embedding_scale=0.4))
    model.tie_weights()
