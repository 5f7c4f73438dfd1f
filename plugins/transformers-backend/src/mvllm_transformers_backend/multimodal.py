"""TransformersMultiModalForCausalLM: a transformers model that takes items, with its own encoders."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from mvllm.extension_api import BuildContext, ForwardStep, ModelConfig
from mvllm.extension_api.multimodal_models import replace_ids
from mvllm_transformers_backend.encoders import TransformersEncoders
from mvllm_transformers_backend.meta_model import MetaModel
from mvllm_transformers_backend.meta_multimodal import MetaMultiModalModel
from mvllm_transformers_backend.model import TransformersForCausalLM


class TransformersMultiModalForCausalLM(TransformersForCausalLM):
    """A model of transformers whose config has a language model and encoders.

    The language model runs as that of TransformersForCausalLM. The encoders are transformers' modules, whole on each
    rank, unquantized and without adapters; if the engine takes text alone, they are not built.

    Args:
        config: The checkpoint; its architecture names transformers' class.
        ctx: Build context.

    Raises:
        ModelError, ConfigError: The model is not supported, see `MetaMultiModalModel`.
    """

    def make_skeleton(self, config: ModelConfig, ctx: BuildContext) -> MetaModel:
        return MetaMultiModalModel(config, ctx.dtype, ctx.tp)

    def build_encoders(self, skeleton: MetaModel) -> list[tuple[str, nn.Module]]:
        assert isinstance(skeleton, MetaMultiModalModel), "see make_skeleton"
        self._prefixes = f"{skeleton.encoders_name}.", f"{skeleton.layers_name}."
        self._encoder_buffers = {
            f"{skeleton.encoders_name}.{name}" for name, _ in skeleton.encoders.named_buffers(remove_duplicate=False)
        }
        if self.config.multimodal is None:
            return []
        models = [module for module in skeleton.encoders.modules() if hasattr(module, "_init_weights")]
        self._unexpected += [re.compile(p) for each in models for p in each._keys_to_ignore_on_load_unexpected or ()]
        self.item_encoder = TransformersEncoders(skeleton.encoders, skeleton.stub, self.config.multimodal.placeholders)
        return [(f"{skeleton.encoders_name}.", skeleton.encoders)]

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        step: ForwardStep,
        intermediate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if step.item_embeds is None and step.rope_positions is None:
            return super().forward(input_ids, positions, step, intermediate)
        self._now.step = step
        input_ids = replace_ids(input_ids, 0, step)  # placeholders may be ids without an embedding
        embeddings: torch.Tensor = self.layers.get_input_embeddings()(input_ids[None])[0]  # type: ignore[operator]
        rotary = positions[None] if step.rope_positions is None else step.rope_positions[:, None]
        output: Any = self.layers(
            inputs_embeds=self.merge_items(embeddings, step)[None], position_ids=rotary, use_cache=False
        )
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    def ignores(self, name: str) -> bool:
        """Also buffers that some files have, and the encoders' tensors if they are not built."""
        of_model, of_layers = self._prefixes
        if name in self._encoder_buffers:
            return True
        if self.item_encoder is None and name.startswith(of_model) and not name.startswith(of_layers):
            return True
        return super().ignores(name)
