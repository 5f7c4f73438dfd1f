"""Items of models whose images and videos are grids of patches: Qwen2-VL, Qwen2.5-VL, Qwen3-VL and GLM-4V.

Each token has three positions: temporal, height and width. Those of an image of 2 rows and 3 columns behind two tokens:

    token        a  b  p  p  p  p  p  p  c
    temporal     0  1  2  2  2  2  2  2  5
    height       0  1  2  2  2  3  3  3  5
    width        0  1  2  3  4  2  3  4  5        the next token has the largest position plus one

The frames of a video follow each other in one block (Qwen2-VL, Qwen2.5-VL), or are blocks with text between them, which
says the time of each frame.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from mvllm.config.hf_config import HFConfig
from mvllm.config.multimodal import MultiModalModel
from mvllm.errors import RequestError
from mvllm.multimodal.contents import VideoContent
from mvllm.multimodal.frame_sampling import FrameDefaults
from mvllm.multimodal.item_families.grid_frames import GridFrames, GridRules
from mvllm.multimodal.item_families.interface import Features, ItemFamily

Positions = np.ndarray[Any, Any]
Block = tuple[int, int, int]
"""Frames, rows and columns of embeddings."""


class GridItems(ItemFamily):
    """Items of Qwen2-VL.

    Attributes:
        frame_rules: How the family's video processor chooses the size of frames.
    """

    unused_features = frozenset({"second_per_grid_ts"})
    frame_rules: ClassVar[GridRules] = GridRules()
    default_frames = FrameDefaults(fewest=4, most=768)

    def __init__(self, processor: Any, model: MultiModalModel, hf_config: HFConfig) -> None:
        super().__init__(processor, model, hf_config)
        vision = hf_config.get("vision_config", {})
        self._vision = HFConfig(vision if isinstance(vision, dict) else {}, f"{hf_config.source}: 'vision_config'")
        self._merge = self._vision.positive_int("spatial_merge_size", 2)

    def frame_processor(self) -> GridFrames:
        return GridFrames.from_config(self.hf_config.source, self.frame_rules)

    def process_video(self, video: VideoContent, settings: dict[str, Any]) -> tuple[Features, str]:
        missing = self.processor.video_processor.temporal_patch_size - len(video.frames)
        if self.frame_rules.of_whole_video and missing > 0:  # transformers' video processors refuse less than a patch
            frames = np.concatenate((video.frames, video.frames[-1:].repeat(missing, axis=0)))
            video = dataclasses.replace(video, frames=frames, indices=[*video.indices, *video.indices[-1:] * missing])
        return super().process_video(video, settings)

    def rope_positions(
        self, modality: str, features: Features, span_ids: Sequence[int], embedded: Sequence[tuple[int, int]]
    ) -> tuple[Positions, int] | None:
        frames, rows, columns = (int(each) for each in np.asarray(features[f"{modality}_grid_thw"]).reshape(-1))
        block = (frames // len(embedded), rows // self._merge, columns // self._merge)
        positions, advance = positions_over_span(embedded, block, self.frame_interval(modality, features))
        if advance > positions.shape[1]:
            raise RequestError(
                f"The frames of a video are so far apart that they take {advance} positions, but only "
                f"{positions.shape[1]} tokens. Send more of its frames, or larger ones.",
                parameter="multi_modal_data",
            )
        return positions, advance

    def frame_interval(self, modality: str, features: Features) -> float:
        """Temporal positions from one frame of a block to the next one."""
        return 1.0


def positions_over_span(
    embedded: Sequence[tuple[int, int]], block: Block, interval: float = 1.0
) -> tuple[Positions, int]:
    """The three positions of each token of a span, relative to its start.

    Args:
        embedded: As in ItemSpan; each range is a block.
        block: Its size.
        interval: Temporal positions from one frame of a block to the next one, which are rounded down.

    Returns:
        int32 [3, length], and by how much positions advance over the span.
    """
    frames, rows, columns = block
    # In float32, as transformers computes it.
    times = (np.arange(frames, dtype=np.float32) * np.float32(interval)).astype(np.int32)
    axes = np.meshgrid(times, np.arange(rows), np.arange(columns), indexing="ij")
    of_block = np.stack(axes).reshape(3, -1).astype(np.int32)
    parts, at, position = [], 0, 0
    for start, stop in embedded:
        between = np.arange(position, position + start - at, dtype=np.int32)
        position += start - at
        parts += [np.tile(between, (3, 1)), position + of_block[:, : stop - start]]
        position += int(of_block.max()) + 1
        at = stop
    return np.concatenate(parts, axis=1), position
