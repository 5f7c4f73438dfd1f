"""PixelDecoder, the base of the decoders that turn the codes of an image into pixels, and the blocks that they share.

A decoder is a convolutional network (the decoder of a VQ-VAE). It is loaded with the language model, from the same
checkpoint, on one rank of the last pipeline stage, and computes in float32.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from mvllm.extension_api import BuildContext, ModelError, WeightTarget
from mvllm.extension_api.model_families import read_json_object

NUM_GROUPS = 32
NORM_EPS = 1e-6


class PixelDecoder(nn.Module, ABC):
    """Decodes images. Subclasses build their modules on the device `meta` and then call `allocate`.

    Args:
        name: The checkpoint module of the VQ-VAE.

    Attributes:
        scale: Pixels per code, along each side.
        mean, std: Pixels are `(x * std + mean) * 255`, where x is the result of `decode`, see `pixel_statistics`.
    """

    scale: int
    mean: Sequence[float] = (0.5, 0.5, 0.5)
    std: Sequence[float] = (0.5, 0.5, 0.5)

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    @abstractmethod
    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """Decodes images of one size.

        Args:
            codes: int64 [n, height, width], from 0.

        Returns:
            float32 [n, height * scale, width * scale, 3], from about -1 to 1.
        """

    @torch.inference_mode()
    def to_pixels(self, codes: torch.Tensor) -> torch.Tensor:
        """int64 [n, height, width] to uint8 [n, height * scale, width * scale, 3]: red, green, blue.

        Images are decoded one at a time, so that the memory does not depend on their number. Fractions are cut off,
        as transformers' image processors do.
        """
        mean, std = (torch.tensor(values, device=codes.device) for values in (self.mean, self.std))
        images = [((self.decode(image.unsqueeze(0))[0] * std + mean) * 255).clamp(0, 255) for image in codes]
        return torch.stack(images).to(torch.uint8)

    def allocate(self, ctx: BuildContext) -> None:
        """Gives all parameters memory on the device, in the compute dtype of `ctx`."""
        for module in self.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = ctx.parameter(*parameter.shape)

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        """Checkpoint tensor names and their targets."""
        for name, parameter in self.named_parameters():
            whole = tuple(slice(0, size) for size in parameter.shape)
            yield f"{self._name}.{name}", WeightTarget(parameter, tuple(parameter.shape), whole, whole)


def pixel_statistics(folder: Path) -> tuple[Sequence[float], Sequence[float]]:
    """`image_mean` and `image_std` of the image processor in a model's folder; 0.5 if it has none.

    Raises:
        ModelError: They are not three numbers each.
    """
    default = PixelDecoder.mean, PixelDecoder.std
    for name in ("processor_config.json", "preprocessor_config.json"):
        if not (folder / name).is_file():
            continue
        values = read_json_object(folder / name)
        values = values.get("image_processor") or values
        mean, std = values.get("image_mean"), values.get("image_std")
        if mean is None or std is None:
            continue
        for each in (mean, std):
            if not isinstance(each, list) or len(each) != 3 or not all(isinstance(v, int | float) for v in each):
                raise ModelError(
                    f"{folder / name}: image_mean and image_std should have three numbers, found {each!r:.80}."
                )
        return mean, std
    return default


class GroupNorm(nn.GroupNorm):
    """Group norm of the feature map; the codes' embeddings are not used."""

    def __init__(self, channels: int) -> None:
        super().__init__(NUM_GROUPS, channels, eps=NORM_EPS)

    def forward(self, x: torch.Tensor, codes: torch.Tensor | None = None) -> torch.Tensor:
        """[n, channels, h, w] to the same."""
        return super().forward(x)


NormMaker = Callable[[int], nn.Module]
"""Makes a norm over a number of channels: `norm(x, codes)`, where `codes` are the codes' embeddings [n, c, h, w]."""


class ResnetBlock(nn.Module):
    """Two convolutions with norms before them, on a residual stream.

    Args:
        in_channels, out_channels: A convolution adapts the residual stream if they differ.
        norm: Makes the norms.
    """

    def __init__(self, in_channels: int, out_channels: int, norm: NormMaker = GroupNorm) -> None:
        super().__init__()
        self.norm1 = norm(in_channels)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.norm2 = norm(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        self.nin_shortcut = nn.Conv2d(in_channels, out_channels, 1) if in_channels != out_channels else None

    def forward(self, x: torch.Tensor, codes: torch.Tensor | None = None) -> torch.Tensor:
        """[n, in_channels, h, w] to [n, out_channels, h, w]."""
        y = self.conv1(F.silu(self.norm1(x, codes)))
        y = self.conv2(F.silu(self.norm2(y, codes)))
        return y + (x if self.nin_shortcut is None else self.nin_shortcut(x))


class Upsample(nn.Module):
    """Doubles height and width."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, channels, h, w] to [n, channels, 2 h, 2 w]."""
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, num_heads: int = 1) -> torch.Tensor:
    """Attention between all positions of an image: three times [n, positions, channels] to the same."""
    heads = (x.unflatten(-1, (num_heads, -1)).transpose(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(-2)
