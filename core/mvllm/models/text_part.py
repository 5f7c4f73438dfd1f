"""TextPart: a language model that also loads the text part of multimodal checkpoints.

checkpoint                                              here
model.language_model.layers.0...., lm_head.weight       model.layers.0...., lm_head.weight
language_model.model.layers.0...., language_model.lm_head.weight     (older files)
model.vision_tower...., multi_modal_projector....       not loaded
"""

from __future__ import annotations

import re

from mvllm.config.model import ModelConfig
from mvllm.layers.context import BuildContext
from mvllm.logging import get_logger
from mvllm.models.llama import LlamaForCausalLM
from mvllm.models.module_names import names_with_prefixes

logger = get_logger(__name__)

_OTHER_PARTS = re.compile(
    r"(model\.)?(vision_tower|vision_model|vision_embedder|multi_modal_projector|audio_tower|embed_vision|embed_audio)\."
)
_PREFIXES = (("model.language_model.", "model."), ("language_model.model.", "model."), ("language_model.", ""))


class TextPart(LlamaForCausalLM):
    """A base for models whose checkpoints exist alone, and as a part of multimodal checkpoints.

    Images and audio as input are not supported.
    """

    def __init__(self, config: ModelConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx)
        self._mentions_skipped = self.stage.is_first and ctx.tp.is_first

    def model_name(self, name: str) -> str:
        """Names as Llama's."""
        for prefix, ours in _PREFIXES:
            if name.startswith(prefix):
                return ours + name.removeprefix(prefix)
        return super().model_name(name)

    @classmethod
    def checkpoint_names(cls, name: str) -> tuple[str, ...]:
        """Also the names in multimodal checkpoints."""
        own = super().checkpoint_names(name)
        return *own, *names_with_prefixes((name, *own), _PREFIXES)

    def ignores(self, name: str) -> bool:
        if _OTHER_PARTS.match(name):
            if self._mentions_skipped:
                logger.info("Only the text part of the checkpoint is loaded: images and audio are not supported.")
                self._mentions_skipped = False
            return True
        return super().ignores(name)
