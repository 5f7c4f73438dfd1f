"""ColQwen2: Qwen2-VL with a projection of each token's state, for retrieval by late interaction (arXiv:2407.01449).

checkpoint                                                              here
vlm.model.language_model.layers.0...., vlm.language_model.layers.0....  model.layers.0....
vlm.model.layers.0....                                                  likewise           (older files)
vlm.model.visual...., vlm.visual....                                    visual....
vlm.lm_head.weight                                                      not loaded
"""

from __future__ import annotations

import torch

from mvllm.config.model import ModelConfig
from mvllm.families.qwen_vl.qwen2_vl import Qwen2VLForConditionalGeneration
from mvllm.layers.context import BuildContext, ForwardStep
from mvllm.layers.linear import ReplicatedLinear
from mvllm.models.pooling_model import PoolingModel

_PROJECTION = "embedding_proj_layer"
_VLM, _TEXT = "vlm.", "language_model."


class ColQwen2ForRetrieval(PoolingModel, Qwen2VLForConditionalGeneration):
    """`ColQwen2ForRetrieval` of Hugging Face checkpoints.

    `forward` of the last stage gives the projected states, [T, embedding_dim]; they get the length 1 when they are
    pooled.
    """

    def __init__(self, config: ModelConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx)
        self.last_stage_names = (*self.last_stage_names, f"{_PROJECTION}.")
        if self.stage.is_last:
            size = config.kind.token_vector_size
            self.projection = ReplicatedLinear(ctx, _PROJECTION, config.hidden_size, size, bias=True)

    def model_name(self, name: str) -> str:
        """Names below `vlm` are those of Qwen2-VL."""
        name = name.removeprefix(_VLM)
        return super().model_name(f"model.{name}" if name.startswith(_TEXT) else name)

    @classmethod
    def checkpoint_names(cls, name: str) -> tuple[str, ...]:
        """Also the names below `vlm`."""
        own = super().checkpoint_names(name)
        return *own, *(_VLM + each for each in (name, *own))

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        step: ForwardStep,
        intermediate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        hidden = super().forward(input_ids, positions, step, intermediate)
        return self.projection(hidden) if self.stage.is_last else hidden
