"""LFM2-VL: a SigLIP 2 tower over images of any proportions, pixel shuffle, a projector, and LFM2."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from mvllm.config.hf_config import HFConfig
from mvllm.config.model import ModelConfig
from mvllm.errors import ModelError
from mvllm.layers.context import BuildContext
from mvllm.layers.embedding import Embedding
from mvllm.layers.linear import ReplicatedLinear
from mvllm.layers.norm import LayerNorm
from mvllm.models.item_encoder import Features, ItemEncoder
from mvllm.models.multimodal_model import MultiModalCausalLM
from mvllm.models.vision.encoder_layers import EncoderLayers, EncoderOptions
from mvllm.models.vision.pixel_shuffle import shuffle_images
from mvllm.models.vision.projector import TwoLayerProjector
from mvllm.models.vision.square_size import square_size

SIGLIP2_TYPE = "siglip2_vision_model"


class Lfm2Vl(MultiModalCausalLM):
    """`Lfm2VlForConditionalGeneration` of Hugging Face checkpoints, before the class of its language model."""

    ignored_encoder_names = re.compile(r"^vision_tower\.head\.|\.position_ids$")

    def build_item_encoder(self, ctx: BuildContext) -> ItemEncoder:
        return Lfm2VlEncoder(ctx, self.config, self.part_config("vision_config"))


class Lfm2VlEncoder(ItemEncoder):
    """Tower and projector.

    Args:
        ctx: Build context of a tower.
        config: Of the model.
        vision: The object `vision_config`.

    Raises:
        ModelError: The tower is of another kind.
    """

    def __init__(self, ctx: BuildContext, config: ModelConfig, vision: HFConfig) -> None:
        super().__init__()
        hf = config.hf_config
        if vision.get("model_type", SIGLIP2_TYPE) != SIGLIP2_TYPE:
            raise ModelError(
                f"{vision.source}: the vision tower of LFM2-VL is {SIGLIP2_TYPE!r}, found "
                f"{vision.get('model_type')!r:.80}, which is not supported."
            )
        self._factor = hf.positive_int("downsample_factor", 2)
        self.tower = Siglip2Tower(ctx, "vision_tower", vision)
        self.projector = TwoLayerProjector(
            ctx,
            "multi_modal_projector",
            self.tower.size * self._factor**2,
            config.hidden_size,
            hf.get("projector_hidden_act", "gelu"),
            bias=bool(hf.get("projector_bias", True)),
            norm=bool(hf.get("projector_use_layernorm", True)),
            inner_size=hf.positive_int("projector_hidden_size", 2560),
        )

    def encode(self, modality: str, items: Sequence[Features]) -> list[torch.Tensor]:
        grids = [[(int(h), int(w)) for h, w in item["spatial_shapes"].tolist()] for item in items]
        tiles = [tile for item in items for tile in item["pixel_values"]]
        shapes = [grid for of_item in grids for grid in of_item]
        patches = torch.cat([tile[: rows * columns] for tile, (rows, columns) in zip(tiles, shapes, strict=True)])
        shuffled = shuffle_images(self.tower(patches, shapes), shapes, self._factor)
        counts = [sum(rows * columns for rows, columns in of_item) // self._factor**2 for of_item in grids]
        return list(self.projector(torch.cat(shuffled)).split(counts))


class Siglip2Tower(nn.Module):
    """A SigLIP 2 tower. Its positions are interpolated to the rows and columns of each image.

    Args:
        ctx: Build context of a tower.
        name: The checkpoint module.
        vision: The object `vision_config`.

    Attributes:
        size: Elements of a patch's features.
    """

    def __init__(self, ctx: BuildContext, name: str, vision: HFConfig) -> None:
        super().__init__()
        options = EncoderOptions.read(
            vision,
            hidden_size=768,
            intermediate_size=3072,
            num_heads=12,
            eps=1e-6,
            act="gelu_pytorch_tanh",
        )
        self.size = size = options.hidden_size
        num_positions = vision.positive_int("num_patches", 256)
        self._side = int(num_positions**0.5)
        elements = vision.positive_int("num_channels", 3) * square_size(vision, "patch_size", 16) ** 2
        self.patches = ReplicatedLinear(ctx, f"{name}.embeddings.patch_embedding", elements, size, bias=True)
        self.positions = Embedding(ctx, f"{name}.embeddings.position_embedding", num_positions, size)
        num_layers = vision.positive_int("num_hidden_layers", 12)
        self.layers = EncoderLayers(ctx, f"{name}.encoder.layers", options, num_layers)
        self.norm = LayerNorm(ctx, f"{name}.post_layernorm", size, options.eps)

    def forward(self, patches: torch.Tensor, grids: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Computes images together.

        Args:
            patches: [T, elements of a patch]: the patches of all images.
            grids: Rows and columns of patches of each image.

        Returns:
            [T, size].
        """
        tables = {grid: self._positions_of(*grid) for grid in set(grids)}
        starts = (0, *itertools.accumulate(rows * columns for rows, columns in grids))
        x = self.patches(patches) + torch.cat([tables[grid] for grid in grids])
        return self.norm(self.layers(x, starts))

    def _positions_of(self, rows: int, columns: int) -> torch.Tensor:
        """[rows * columns, size]. Interpolated in float32."""
        table = self.positions.weight
        grid = table.unflatten(0, (self._side, self._side)).permute(2, 0, 1).unsqueeze(0).float()
        resized = F.interpolate(grid, size=(rows, columns), mode="bilinear", align_corners=False, antialias=True)
        return resized[0].flatten(1).transpose(0, 1).to(table.dtype)
