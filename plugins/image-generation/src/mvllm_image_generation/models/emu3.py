"""Emu3: Llama whose vocabulary contains the codes of images."""

from __future__ import annotations

import re

from mvllm.extension_api import BuildContext, HFConfig, ModelConfig, get_logger
from mvllm.extension_api.models import LlamaForCausalLM
from mvllm_image_generation.models.emu3_vq import Emu3PixelDecoder
from mvllm_image_generation.models.image_decoding import DecodesImages
from mvllm_image_generation.models.pixel_decoder import pixel_statistics

logger = get_logger(__name__)

_ENCODER = re.compile(r"model\.vqmodel\.(encoder|quant_conv)\.")
"""Tensors that only inputs of pixels need."""

_RENAMED = (
    ("model.text_model.", "model."),
    ("text_model.model.", "model."),
    ("text_model.", ""),
    ("vqmodel.", "model.vqmodel."),
)
"""Prefixes of checkpoints and of this class; the later ones are those of transformers before 4.52."""


class Emu3ForConditionalGeneration(DecodesImages, LlamaForCausalLM):
    """`Emu3ForConditionalGeneration` of Hugging Face checkpoints: text, and codes of images.

    Images as input are not supported: the encoder of pixels is not loaded.
    """

    last_stage_names = ("model.norm.", "model.vqmodel.")
    ignored_names = re.compile(r"(^|\.)(rotary_emb\.inv_freq|num_batches_tracked)$")

    def __init__(self, config: ModelConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx)
        hf = config.hf_config
        if self.stage.is_last and ctx.tp.is_first:
            vq = HFConfig(hf.require("vq_config", dict), f"{hf.source}: 'vq_config'")
            self.pixel_decoder = Emu3PixelDecoder(ctx, vq)
            self.pixel_decoder.mean, self.pixel_decoder.std = pixel_statistics(config.path)
        self._mentions_skipped = self.stage.is_first and ctx.tp.is_first

    def model_name(self, name: str) -> str:
        """Names as Llama's: `model.layers.0` for `model.text_model.layers.0`."""
        for prefix, ours in _RENAMED:
            if name.startswith(prefix):
                return ours + name[len(prefix) :]
        return name

    def ignores(self, name: str) -> bool:
        if _ENCODER.match(name):
            if self._mentions_skipped:
                logger.info("The image encoder of the checkpoint is not loaded: images are not supported as input.")
                self._mentions_skipped = False
            return True
        return super().ignores(name) or (self.pixel_decoder is None and name.startswith("model.vqmodel."))
