"""What models that generate images do beside the steps of the engine: they decode codes to pixels."""

from __future__ import annotations

import numpy as np
import torch

from mvllm.extension_api import BuildContext, CausalLM, ModelConfig, RequestError
from mvllm_image_generation.formats import image_format, image_space
from mvllm_image_generation.models.pixel_decoder import PixelDecoder


class DecodesImages(CausalLM):
    """Base of models with a pixel decoder.

    Attributes:
        pixel_decoder: Decoder of image codes, on one rank of the last pipeline stage; else None.
    """

    remote_methods = frozenset(("decode_images",))

    def __init__(self, config: ModelConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx)
        self.pixel_decoder: PixelDecoder | None = None

    def decode_images(self, codes: bytes, rows: int, columns: int) -> bytes | None:
        """Decodes images of one size.

        Args:
            codes: int32 [n, rows * columns], little-endian: the codes of n images, from 0, row by row.
            rows, columns: Codes along each side of an image.

        Returns:
            uint8 [n, height, width, 3]: red, green, blue. None on ranks without a pixel decoder.

        Raises:
            RequestError: The codes are not whole images, or a code does not exist.
        """
        if self.pixel_decoder is None:
            return None
        space = image_space(self.config)
        values = np.frombuffer(codes, dtype="<i4")
        if rows < 1 or columns < 1 or not values.size or values.size % (rows * columns):
            raise RequestError(f"{values.size} codes are no images of {rows} x {columns} codes.", parameter="codes")
        if values.min() < 0 or values.max() >= space.size:
            raise RequestError(
                f"Image codes must be from 0 to {space.size - 1}; found {values.min()} to {values.max()}.",
                parameter="codes",
            )
        grid = torch.from_numpy(values.astype(np.int64)).view(-1, rows, columns)
        device = next(self.pixel_decoder.parameters()).device
        return self.pixel_decoder.to_pixels(grid.to(device)).cpu().numpy().tobytes()

    def run_largest_call(self) -> None:
        """Decodes an image of the default size."""
        found = image_format(self.config)
        if self.pixel_decoder is not None and found is not None:
            self.decode_images(bytes(4 * found.rows * found.columns), found.rows, found.columns)
