"""MultiModalCausalLM: a language model together with the encoders of a multimodal checkpoint.

The class of an architecture is a class of this module's kind in front of the class of the language model:

    LlavaForConditionalGeneration  =  Llava + MistralForCausalLM          (by `model_type` of `text_config`)

    checkpoint                                                         here
    model.language_model.layers.0...., lm_head.weight                  model.layers.0...., lm_head.weight
    language_model.model.layers.0...., language_model.lm_head.weight   likewise               (older files)
    model.vision_tower...., vision_tower....                           vision_tower....
"""

from __future__ import annotations

import dataclasses
import re
from abc import abstractmethod
from collections.abc import Mapping

import numpy as np
import torch

from mvllm.config.hf_config import HFConfig
from mvllm.config.model import ModelConfig
from mvllm.distributed.group_coordinator import GroupCoordinator
from mvllm.layers.context import BuildContext
from mvllm.layers.linear import Linear
from mvllm.logging import get_logger
from mvllm.models.causal_lm import CausalLM
from mvllm.models.item_encoder import ItemEncoder
from mvllm.models.module_names import names_with_prefixes
from mvllm.ops.registry import OpTable

logger = get_logger(__name__)

LANGUAGE_PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.", ""),
    ("model.text_model.", "model."),
)
"""Prefixes of the language model's tensors in checkpoints, and those of its class."""


class MultiModalCausalLM(CausalLM):
    """A base that stands before a language model's class.

    The encoders are on the first pipeline stage, whole on every tensor-parallel rank, unquantized and without adapters.
    If the model takes text alone (`ModelConfig.multimodal` is None), they are not built.

    Attributes:
        encoder_modules: The modules and tensors of encoders, as `build_item_encoder` names them.
        encoder_names: Regular expressions of parts of their names in checkpoints, and what this class has instead.
        ignored_encoder_names: Regular expression of names of encoders' tensors that are not weights, or not used.
    """

    encoder_modules: tuple[str, ...] = ("vision_tower", "multi_modal_projector")
    encoder_names: Mapping[str, str] = {r"^vision_tower\.vision_model\.": "vision_tower."}
    ignored_encoder_names: re.Pattern[str] = re.compile(r"\.position_ids$")

    def __init__(self, config: ModelConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx)
        self._mentions_skipped_encoder = self.stage.is_first and ctx.tp.is_first
        if config.multimodal is None or not self.stage.is_first:
            return
        self.item_encoder = self.build_item_encoder(encoder_context(ctx))
        if ctx.encoders_on_host:
            self._on_host = frozenset(self.item_encoder.modules())
        for module in self.item_encoder.modules():
            if isinstance(module, Linear):
                module.supports_lora = False

    @abstractmethod
    def build_item_encoder(self, ctx: BuildContext) -> ItemEncoder:
        """Builds the encoders.

        Args:
            ctx: See `encoder_context`.
        """

    def part_config(self, key: str) -> HFConfig:
        """An object within config.json, such as `vision_config`; empty if it is absent.

        Raises:
            ModelError: It is not an object.
        """
        hf = self.config.hf_config
        return HFConfig(hf.require(key, dict) if key in hf else {}, f"{hf.source}: {key!r}")

    def model_name(self, name: str) -> str:
        """Names of the language model as its class has them, and of encoders as `encoder_modules`."""
        for prefix, ours in LANGUAGE_PREFIXES:
            if name.startswith(prefix):
                return super().model_name(ours + name.removeprefix(prefix))
        short = name.removeprefix("model.")
        if not self._is_of_encoder(short):
            return super().model_name(name)
        for theirs, ours in self.encoder_names.items():
            short = re.sub(theirs, ours, short)
        return short

    @classmethod
    def checkpoint_names(cls, name: str) -> tuple[str, ...]:
        """Also the names in multimodal checkpoints."""
        own = super().checkpoint_names(name)
        return *own, *names_with_prefixes((name, *own), LANGUAGE_PREFIXES)

    def ignores(self, name: str) -> bool:
        """Tensors of encoders that this rank does not compute are ignored."""
        if not self._is_of_encoder(name.removeprefix("model.")):
            return super().ignores(name)
        if self.item_encoder is not None:
            return bool(self.ignored_encoder_names.search(name)) or self.item_encoder.ignores(name)
        if self._mentions_skipped_encoder:
            logger.info("Only the text part of the checkpoint is loaded: the engine takes text alone.")
            self._mentions_skipped_encoder = False
        return True

    def _is_of_encoder(self, name: str) -> bool:
        return any(name == module or name.startswith(f"{module}.") for module in self.encoder_modules)


def encoder_context(ctx: BuildContext) -> BuildContext:
    """The build context of encoders: unquantized, without adapters, and with a group of this rank alone, so that every
    layer is whole on each rank. With `encoders_on_host` their parameters and operations are the host's."""
    whole = dataclasses.replace(ctx.floats(), tp=GroupCoordinator.single("tp"), with_adapters=False)
    if not ctx.encoders_on_host:
        return whole
    host = torch.from_numpy(np.empty(0)).device
    return dataclasses.replace(whole, device=host, ops=OpTable.resolve(), num_devices=1, spread=None)
