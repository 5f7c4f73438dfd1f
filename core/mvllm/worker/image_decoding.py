"""Decodes image codes with the pixel decoder of the loaded model."""

from __future__ import annotations

import numpy as np
import torch

from mvllm.config.image_families import IMAGE, image_format
from mvllm.config.model import ModelConfig
from mvllm.errors import RequestError
from mvllm.models.causal_lm import CausalLM
from mvllm.platform.runtime import DeviceRuntime


def decode_images(model: CausalLM, runtime: DeviceRuntime, codes: bytes, rows: int, columns: int) -> bytes:
    """The result of `WorkerProtocol.decode_images`.

    Raises:
        RequestError: The model generates no images, the codes are not whole images, or a code does not exist.
    """
    space = model.token_spaces.get(IMAGE)
    if space is None:
        raise RequestError(f"{type(model).__name__} generates text, not images.", parameter="model")
    if model.pixel_decoder is None:
        return b""
    values = np.frombuffer(codes, dtype="<i4")
    if rows < 1 or columns < 1 or not values.size or values.size % (rows * columns):
        raise RequestError(f"{values.size} codes are no images of {rows} x {columns} codes.", parameter="codes")
    if values.min() < 0 or values.max() >= space.size:
        raise RequestError(
            f"Image codes must be from 0 to {space.size - 1}; found {values.min()} to {values.max()}.",
            parameter="codes",
        )
    grid = torch.from_numpy(values.astype(np.int64)).view(-1, rows, columns)
    return model.pixel_decoder.to_pixels(grid.to(runtime.device)).cpu().numpy().tobytes()


def peak_decode_bytes(model: CausalLM, runtime: DeviceRuntime, config: ModelConfig) -> int:
    """Bytes that decoding one image takes in addition to the memory in use; 0 on ranks without a pixel decoder."""
    found = image_format(config)
    if model.pixel_decoder is None or found is None:
        return 0
    runtime.reset_peak_memory()
    before = runtime.memory().used_by_me
    decode_images(model, runtime, bytes(4 * found.rows * found.columns), found.rows, found.columns)
    runtime.synchronize()
    return max(0, runtime.memory().peak_by_me - before)
