"""TransformersEncoders: transformers' own encoders of images, videos and audio, as an ItemEncoder.

transformers' class computes the features of an item and merges them into the embeddings of its tokens; the language
model would come next, where a stub takes the merged embeddings:

    token ids of the span    7  9  9  4  9  9  8            (9: the placeholder)
    merged embeddings        .  r0 r1 .  r2 r3 .     ->     rows r0 ... r3

So neither the names of a family's functions nor the shapes of their results need to be known.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mvllm.extension_api import ModelError
from mvllm.extension_api.multimodal_models import Features, ItemEncoder
from mvllm_transformers_backend.replacement_modules import LanguageModelStub

SPAN_IDS = "input_ids"
"""Name of the feature with the token ids of an item's span: int64 [length]."""


class TransformersEncoders(ItemEncoder):
    """The encoders of one model.

    Args:
        model: transformers' model of encoders and language model, with `stub` in place of the latter.
        stub: As given to `model`.
        placeholders: As in MultiModalModel.
    """

    def __init__(self, model: nn.Module, stub: LanguageModelStub, placeholders: Mapping[str, int]) -> None:
        super().__init__()
        self.model = model
        self._stub = [stub]  # in a list: it is a submodule of `model`
        self._placeholders = dict(placeholders)
        self._arguments = inspect.signature(model.forward).parameters.keys()

    def encode(self, modality: str, items: Sequence[Features]) -> list[torch.Tensor]:
        """One item at a time: whether features of several may be concatenated is not known."""
        return [self._encode(modality, item) for item in items]

    def _encode(self, modality: str, features: Features) -> torch.Tensor:
        ids = features[SPAN_IDS][None]
        given: dict[str, Any] = {
            name: value for name, value in features.items() if name in self._arguments and name != SPAN_IDS
        }
        if not given:
            raise ModelError(f"{type(self.model).__name__} takes none of the features {', '.join(features)}")
        if "position_ids" in self._arguments:  # otherwise families with positions of their own compute them
            given["position_ids"] = torch.arange(ids.shape[1], device=ids.device)[None]
        (stub,) = self._stub
        try:
            self.model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **given)
            merged, unknown = stub.arguments.get("inputs_embeds"), stub.unknown_arguments()
            is_merged = merged is not stub.embed_tokens.result
        finally:
            stub.clear()
        if unknown:
            raise ModelError(f"{type(self.model).__name__} gives its language model {', '.join(unknown)}")
        if merged is None or not is_merged:
            raise ModelError(f"{type(self.model).__name__} does not use the features {', '.join(given)}")
        rows: torch.Tensor = merged[0][ids[0] == self._placeholders[modality]]
        return rows
