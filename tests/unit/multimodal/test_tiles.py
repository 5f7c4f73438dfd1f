"""Images that are cut into tiles, as the processor's process sends them to the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mvllm.errors import RequestError
from mvllm.multimodal.item_families.lfm2_vl_image_processor import ImageLayout, Lfm2VlImageProcessorPil, image_layout
from mvllm.multimodal.item_processor import ItemProcessor
from mvllm.multimodal.processed_item import ProcessedItem
from tests.helpers.multimodal_suite import draw_image
from tests.helpers.multimodal_zoo import make_checkpoint
from tests.helpers.paged_driver import read_config
from tests.helpers.processed_items import as_arrays

PUBLISHED = {
    "downsample_factor": 2,
    "do_image_splitting": True,
    "min_tiles": 2,
    "max_tiles": 10,
    "min_image_tokens": 64,
    "max_image_tokens": 256,
    "encoder_patch_size": 16,
    "tile_size": 512,
    "max_pixels_tolerance": 2.0,
}


@pytest.mark.parametrize(
    ("height", "width", "wanted"),
    [
        (50, 60, ImageLayout(1, 1, 256, 288)),  # enlarged
        (400, 600, ImageLayout(1, 1, 384, 608)),  # rounded to even numbers of patches
        (1000, 2000, ImageLayout(2, 4, 352, 704)),
        (1500, 700, ImageLayout(4, 2, 736, 320)),
        (2000, 2000, ImageLayout(3, 3, 512, 512)),
    ],
)
def test_lfm2_vl_images_have_the_sizes_of_transformers(height: int, width: int, wanted: ImageLayout) -> None:
    """Computed with the functions of transformers' Lfm2VlImageProcessor, whose module needs torchvision."""
    assert image_layout(height, width, PUBLISHED) == wanted
    whole = image_layout(height, width, {**PUBLISHED, "do_image_splitting": False})
    assert whole == ImageLayout(1, 1, wanted.height, wanted.width)


def test_lfm2_vl_tiles_are_the_parts_of_the_image_row_by_row() -> None:
    """An image of which no pixel changes when it is resized: one colour for each tile."""
    colours = np.arange(2 * 3, dtype=np.uint8).reshape(2, 3) * 40
    image = Image.fromarray(np.stack([colours.repeat(16, 0).repeat(16, 1)] * 3, axis=-1))
    processor = Lfm2VlImageProcessorPil(
        tile_size=16, encoder_patch_size=4, min_image_tokens=2, max_image_tokens=6, max_tiles=6, do_normalize=False
    )
    found: Any = processor([image], return_row_col_info=True)
    assert (found["image_rows"], found["image_cols"]) == ([2], [3])
    assert found["spatial_shapes"].tolist() == [[4, 4]] * 6 + [[4, 6]]
    *tiles, thumbnail = found["pixel_values"]
    assert np.abs(np.stack(tiles)[:, :16] - colours.reshape(6, 1, 1) / 255).max() < 1e-6
    assert found["pixel_attention_mask"].sum(1).tolist() == [16] * 6 + [24]
    assert thumbnail.shape == (24, 48)


def _processed(name: str, folder: Path, image: Image.Image) -> ProcessedItem:
    make_checkpoint(name, folder)
    config = read_config(folder)
    assert config.multimodal is not None
    processor = ItemProcessor(folder, config.architecture, config.multimodal, config.hf_config)
    return processor.process("image", image, counts={"image": 1})


@pytest.mark.parametrize(
    ("name", "parts", "features"),
    [
        ("smolvlm", 7, {"pixel_values": (1, 7, 3, 16, 16)}),
        ("internvl", 1, {"pixel_values": (3, 3, 16, 16)}),
        ("lfm2_vl", 3, {"pixel_values": (3, 16, 48), "spatial_shapes": (3, 2)}),
    ],
)
def test_each_tile_has_placeholders_of_its_own(
    name: str, parts: int, features: dict[str, tuple[int, ...]], tmp_path: Path
) -> None:
    """The span has text between the tiles, except for InternVL. Only what encoders read is sent."""
    item = _processed(name, tmp_path, draw_image((40, 24), 0))
    assert len(item.embedded) == parts
    assert item.num_embeddings == item.num_encoded == item.token_ids.count(item.embedded_id)
    assert {key: array.shape for key, array in as_arrays(item.features).items()} == features


def test_a_padded_tile_is_refused(tmp_path: Path) -> None:
    make_checkpoint("idefics3", tmp_path)
    config = read_config(tmp_path)
    assert config.multimodal is not None
    processor = ItemProcessor(tmp_path, config.architecture, config.multimodal, config.hf_config)
    of_transformers = processor.processor._process_images

    def padded(images: Any, **settings: Any) -> Any:
        features, replacements = of_transformers(images, **settings)
        features["pixel_attention_mask"][..., -1] = 0
        return features, replacements

    processor.processor._process_images = padded
    with pytest.raises(RequestError, match="pads this image"):
        processor.process("image", draw_image((40, 24), 0), counts={"image": 1})
