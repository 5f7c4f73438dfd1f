"""The towers of CLIP and SigLIP: learned positions, norms before each block, biases everywhere.

          patches   first vector      norm before the layers
CLIP      no bias   class embedding   pre_layrnorm
SigLIP    bias      none              none

The norm behind the last layer, post_layernorm, is not applied to features that are taken from single layers.
"""

from __future__ import annotations

import re

import torch

from mvllm.config.hf_config import HFConfig
from mvllm.errors import ModelError
from mvllm.layers.checkpoint_tensor import CheckpointTensor
from mvllm.layers.context import BuildContext
from mvllm.layers.embedding import Embedding
from mvllm.layers.norm import LayerNorm
from mvllm.layers.patch_embedding import PatchEmbedding, image_patches
from mvllm.models.item_encoder import FixedShapeTower
from mvllm.models.vision.encoder_layers import EncoderLayers, EncoderOptions, equal_starts
from mvllm.models.vision.feature_layers import FeatureLayers

CLIP_TYPES = ("clip_vision_model", "clip")
SIGLIP_TYPES = ("siglip_vision_model", "siglip")


class ClipTower(FixedShapeTower):
    """A CLIP or SigLIP tower over images of its one size.

    Args:
        ctx: Build context of a tower.
        name: The checkpoint module.
        vision: The object `vision_config`.
        features: Which layers' states are the result; None for the last layer's with the norm at the end.

    Attributes:
        image_size: Pixels along each side of an image.
        grid: Patches along each side of an image.
        size: Elements of a patch's features.

    Raises:
        ModelError: The tower is of another kind, or config.json has an unusable value.
    """

    def __init__(self, ctx: BuildContext, name: str, vision: HFConfig, features: FeatureLayers | None) -> None:
        super().__init__()
        kind = vision.get("model_type", CLIP_TYPES[0])
        if kind not in (*CLIP_TYPES, *SIGLIP_TYPES):
            raise ModelError(
                f"{vision.source}: the vision tower {kind!r} is not supported. Supported are CLIP "
                f"({CLIP_TYPES[0]!r}) and SigLIP ({SIGLIP_TYPES[0]!r})."
            )
        is_clip = kind in CLIP_TYPES
        options = EncoderOptions.read(
            vision,
            hidden_size=768,
            intermediate_size=3072,
            num_heads=12,
            eps=1e-5 if is_clip else 1e-6,
            act="quick_gelu" if is_clip else "gelu_pytorch_tanh",
        )
        self._name, size = name, options.hidden_size
        self._patch_size = vision.positive_int("patch_size", 32 if is_clip else 16)
        self.image_size = vision.positive_int("image_size", 224)
        self.grid = self.image_size // self._patch_size
        num_layers = vision.positive_int("num_hidden_layers", 12)
        self._keep = None if features is None else features.numbers(num_layers)
        self._drops_first = features is not None and features.without_class
        self.size = size * (1 if self._keep is None else len(self._keep))
        count = num_layers if self._keep is None else max(self._keep)
        shape = (vision.positive_int("num_channels", 3), self._patch_size, self._patch_size)
        self.patches = PatchEmbedding(ctx, f"{name}.embeddings.patch_embedding", shape, size, bias=not is_clip)
        self.class_embedding = CheckpointTensor(ctx, f"{name}.embeddings.class_embedding", size) if is_clip else None
        self._length = self.grid**2 + is_clip
        self.positions = Embedding(ctx, f"{name}.embeddings.position_embedding", self._length, size)
        self.first_norm = LayerNorm(ctx, f"{name}.pre_layrnorm", size, options.eps) if is_clip else None
        self.layers = EncoderLayers(ctx, f"{name}.encoder.layers", options, count)
        self.last_norm: LayerNorm | None = None
        if features is None:
            self.last_norm = LayerNorm(ctx, f"{name}.post_layernorm", size, options.eps)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Images [n, channels, height, width] to features [n, patches, size].

        Raises:
            ModelError: The images have another size than the tower's.
        """
        if tuple(pixels.shape[-2:]) != (self.image_size, self.image_size):
            raise ModelError(
                f"The vision tower takes images of {self.image_size} x {self.image_size} pixels, found "
                f"{pixels.shape[-2]} x {pixels.shape[-1]}. Check that the checkpoint's preprocessor_config.json and "
                "config.json belong together."
            )
        x = self.run(image_patches(pixels, self._patch_size)).unflatten(0, (len(pixels), self._length))
        return x[:, 1:] if self._drops_first else x

    def compute(self, patches: torch.Tensor) -> torch.Tensor:
        n = patches.shape[0]
        x = self.patches(patches.flatten(0, 1)).unflatten(0, (n, -1))
        if self.class_embedding is not None:
            x = torch.cat((self.class_embedding.weight.expand(n, 1, -1), x), dim=1)
        x = (x + self.positions.weight).flatten(0, 1)
        if self.first_norm is not None:
            x = self.first_norm(x)
        x = self.layers(x, equal_starts(n, self._length), keep=self._keep)
        return x if self.last_norm is None else self.last_norm(x)

    def ignores(self, name: str) -> bool:
        """Whether a tensor of the tower's checkpoint module is not needed for its result."""
        found = re.match(re.escape(self._name) + r"\.(?:encoder\.layers\.(\d+)\.|post_layernorm\.|head\.)", name)
        if found is None:
            return False
        return found[1] is None or int(found[1]) >= len(self.layers.layers)
