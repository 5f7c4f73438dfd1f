"""InternVL: a vision tower over tiles, pixel shuffle, a projector, and a language model."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from mvllm.config.hf_config import HFConfig
from mvllm.config.model import ModelConfig
from mvllm.errors import ModelError
from mvllm.layers.checkpoint_tensor import CheckpointTensor
from mvllm.layers.context import BuildContext
from mvllm.layers.norm import LayerNorm, Norm, RMSNorm
from mvllm.layers.patch_embedding import PatchEmbedding, image_patches
from mvllm.models.item_encoder import Features, FixedShapeTower, ItemEncoder
from mvllm.models.multimodal_model import MultiModalCausalLM
from mvllm.models.vision.encoder_layers import EncoderLayers, EncoderOptions, LayerNames, equal_starts
from mvllm.models.vision.feature_layers import FeatureLayers
from mvllm.models.vision.pixel_shuffle import pixel_shuffle
from mvllm.models.vision.projector import TwoLayerProjector
from mvllm.models.vision.square_size import square_size

_NORMS = {"layer_norm": LayerNorm, "rms_norm": RMSNorm}
_QK_EPS = 1e-6
_NAMES = LayerNames(
    query="attention.q_proj",
    key="attention.k_proj",
    value="attention.v_proj",
    output="attention.projection_layer",
    attention_norm="layernorm_before",
    mlp_norm="layernorm_after",
    attention_scale="lambda_1",
    mlp_scale="lambda_2",
    q_norm="attention.q_norm",
    k_norm="attention.k_norm",
)


class InternVL(MultiModalCausalLM):
    """`InternVLForConditionalGeneration` of Hugging Face checkpoints, before the class of its language model."""

    ties_embeddings_by_default = True
    ignored_encoder_names = re.compile(r"\.(mask_token|position_ids)$")

    def build_item_encoder(self, ctx: BuildContext) -> ItemEncoder:
        return InternVLEncoder(ctx, self.config, self.part_config("vision_config"))


class InternVLEncoder(ItemEncoder):
    """Tower and projector.

    Args:
        ctx: Build context of a tower.
        config: Of the model.
        vision: The object `vision_config`.

    Raises:
        ModelError: config.json has an unusable value.
    """

    def __init__(self, ctx: BuildContext, config: ModelConfig, vision: HFConfig) -> None:
        super().__init__()
        hf = config.hf_config
        features = FeatureLayers.from_config(hf, layer=-1, strategy="default")
        if not features.without_class or len(features.layers) > 1:
            raise ModelError(
                f"{hf.source}: InternVL takes the features of one layer ('vision_feature_layer'), without the class "
                "embedding ('vision_feature_select_strategy' is 'default')."
            )
        ratio = hf.positive_number("downsample_ratio", 0.5)
        self._factor = round(1 / ratio)
        if self._factor * ratio != 1.0:
            raise ModelError(f"{hf.source}: 'downsample_ratio' should be 1 / n for an integer n, found {ratio}.")
        self.tower = InternVLTower(ctx, "vision_tower", vision, features)
        self.projector = TwoLayerProjector(
            ctx,
            "multi_modal_projector",
            self.tower.size * self._factor**2,
            config.hidden_size,
            hf.get("projector_hidden_act", "gelu"),
            bias=True,
            norm=True,
        )

    def encode(self, modality: str, items: Sequence[Features]) -> list[torch.Tensor]:
        tiles = [item["pixel_values"].flatten(0, -4) for item in items]
        pixels = torch.cat(tiles)
        rows, columns = self.tower.grid(pixels)
        embeddings = self.projector(pixel_shuffle(self.tower(pixels), rows, columns, self._factor))
        per_tile = len(embeddings) // len(pixels)
        return list(embeddings.split([per_tile * len(each) for each in tiles]))

    def ignores(self, name: str) -> bool:
        return self.tower.ignores(name)


class InternVLTower(FixedShapeTower):
    """InternViT: a class embedding before the patches, and a factor for each element of every block's result.

    Args:
        ctx: Build context of a tower.
        name: The checkpoint module.
        vision: The object `vision_config`.
        features: The layer whose states are the result.

    Attributes:
        size: Elements of a patch's features.

    Raises:
        ModelError: config.json has an unusable value.
    """

    def __init__(self, ctx: BuildContext, name: str, vision: HFConfig, features: FeatureLayers) -> None:
        super().__init__()
        norm = vision.get("norm_type", "layer_norm")
        if norm not in _NORMS:
            raise ModelError(
                f"{vision.source}: 'norm_type' should be one of {', '.join(map(repr, _NORMS))}, found {norm!r:.80}."
            )
        options = EncoderOptions.read(
            vision,
            hidden_size=1024,
            intermediate_size=4096,
            num_heads=16,
            eps=1e-6,
            act="gelu",
            norm=_NORMS[norm],
            qkv_bias=bool(vision.get("attention_bias", False)),
            qk_norm=_qk_norm if vision.get("use_qk_norm", False) else None,
            names=_NAMES,
        )
        self._name, self.size = name, options.hidden_size
        self._patch_size = square_size(vision, "patch_size", 14)
        self._grid = square_size(vision, "image_size", 448) // self._patch_size
        num_layers = vision.positive_int("num_hidden_layers", 24)
        (count,) = features.numbers(num_layers)
        shape, size = (vision.positive_int("num_channels", 3), self._patch_size, self._patch_size), self.size
        self.patches = PatchEmbedding(ctx, f"{name}.embeddings.patch_embeddings.projection", shape, size, bias=True)
        self.class_embedding = CheckpointTensor(ctx, f"{name}.embeddings.cls_token", 1, 1, size)
        self.positions: CheckpointTensor | None = None
        if vision.get("use_absolute_position_embeddings", True):
            self.positions = CheckpointTensor(ctx, f"{name}.embeddings.position_embeddings", 1, self._grid**2 + 1, size)
        self.layers = EncoderLayers(ctx, f"{name}.encoder.layer", options, count)
        # Only the feature layer -1 has the norm at the end.
        has_norm = not vision.get("use_mean_pooling", True) and features.layers == (-1,)
        self.norm = LayerNorm(ctx, f"{name}.layernorm", size, options.eps) if has_norm else None

    def grid(self, pixels: torch.Tensor) -> tuple[int, int]:
        """Rows and columns of patches of images [n, channels, height, width]."""
        return pixels.shape[-2] // self._patch_size, pixels.shape[-1] // self._patch_size

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Images [n, channels, height, width] to features [n, patches, size]."""
        patches, grid = image_patches(pixels, self._patch_size), self.grid(pixels)
        x = self.run(patches) if grid == (self._grid, self._grid) else self._compute(patches, *grid)
        return x.unflatten(0, (len(pixels), -1))[:, 1:]

    def compute(self, patches: torch.Tensor) -> torch.Tensor:
        return self._compute(patches, self._grid, self._grid)

    def _compute(self, patches: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        n = patches.shape[0]
        x = self.patches(patches.flatten(0, 1)).unflatten(0, (n, -1))
        x = torch.cat((self.class_embedding.weight.expand(n, 1, -1), x), dim=1)
        if self.positions is not None:
            x = x + self._positions_of(rows, columns)
        x = self.layers(x.flatten(0, 1), equal_starts(n, x.shape[1]))
        return x if self.norm is None else self.norm(x)

    def _positions_of(self, rows: int, columns: int) -> torch.Tensor:
        """[1, 1 + rows * columns, size]: the checkpoint's positions, interpolated for images of another size."""
        assert self.positions is not None
        table = self.positions.weight
        if rows == columns == self._grid:
            return table
        grid = table[:, 1:].unflatten(1, (self._grid, self._grid)).permute(0, 3, 1, 2)
        resized = F.interpolate(grid, size=(rows, columns), mode="bicubic", align_corners=False)
        return torch.cat((table[:, :1], resized.flatten(2).transpose(1, 2)), dim=1)

    def ignores(self, name: str) -> bool:
        """Whether a tensor of the tower's checkpoint module is not needed for its result."""
        found = re.match(re.escape(self._name) + r"\.(?:encoder\.layer\.(\d+)\.|layernorm\.)", name)
        if found is None:
            return False
        return self.norm is None if found[1] is None else int(found[1]) >= len(self.layers.layers)


def _qk_norm(ctx: BuildContext, name: str, size: int, eps: float) -> Norm:
    return RMSNorm(ctx, name, size, _QK_EPS)
