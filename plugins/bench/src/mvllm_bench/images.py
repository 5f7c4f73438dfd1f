"""Random pictures for benchmarks of models that take images."""

from __future__ import annotations

import base64
import io
import re
from typing import TYPE_CHECKING

from mvllm.extension_api import ConfigError, install_command

if TYPE_CHECKING:
    import numpy as np

_SIZE = re.compile(r"(\d{1,5})x(\d{1,5})")
_COARSE = 8


def parse_size(text: str) -> tuple[int, int]:
    """Width and height of `640x480`.

    Raises:
        ConfigError: `text` is no such size.
    """
    match = _SIZE.fullmatch(text)
    if match is None or not int(match[1]) or not int(match[2]):
        raise ConfigError(f"The size of pictures is {text!r}; it must be like 640x480.")
    return int(match[1]), int(match[2])


def random_image_url(size: tuple[int, int], random: np.random.Generator) -> str:
    """A data URL of a picture in PNG format: random colours in a coarse grid, smoothed, so that no two are equal.

    Args:
        size: Width and height in pixels.

    Raises:
        ConfigError: Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError as e:
        raise ConfigError(f"Pictures need Pillow. Run: {install_command('mvllm-bench[images]')}") from e
    import numpy as np

    coarse = random.integers(0, 256, (_COARSE, _COARSE, 3), dtype=np.uint8)
    picture = Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
