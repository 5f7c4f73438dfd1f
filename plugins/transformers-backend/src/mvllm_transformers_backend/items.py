"""Items of models that run through transformers, whose encoders take what transformers' processor returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mvllm.extension_api import RequestError
from mvllm.extension_api.multimodal_models import ItemContent, ItemFamily, ItemFeatures


class ItemsOfTransformers(ItemFamily):
    """A base that stands before a family, or alone: all of the processor's features, and the token ids of the span."""

    def process(self, modality: str, content: ItemContent, settings: dict[str, Any]) -> tuple[ItemFeatures, str]:
        try:
            if getattr(self.processor, f"{modality}_token", None) is not None:
                return super().process(modality, content, settings)
        except NotImplementedError as e:
            raise self._unknown_text(modality) from e
        raise self._unknown_text(modality)

    def _unknown_text(self, modality: str) -> RequestError:
        """For processors that replace placeholders in another way than transformers' base class."""
        return RequestError(
            f"transformers' {type(self.processor).__name__} does not say which text replaces an item of modality "
            f"{modality!r}. Send text alone, or use a model that is supported natively.",
            parameter="multi_modal_data",
        )

    def features_to_keep(self, modality: str, features: ItemFeatures) -> ItemFeatures:
        unused = {*self.processor.unused_input_names, "video_metadata"}
        return {name: value for name, value in features.items() if name not in unused}

    def encoder_inputs(self, modality: str, features: ItemFeatures, span_ids: Sequence[int]) -> ItemFeatures:
        ids = np.asarray(span_ids, dtype=np.int64)
        return {**super().encoder_inputs(modality, features, span_ids), "input_ids": ids}
