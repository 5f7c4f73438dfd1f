"""Items of Qwen2.5-VL, Qwen3-VL and ColQwen2: grids of patches. Those of Qwen2-VL are `GridItems` as it is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mvllm.multimodal.frame_sampling import FrameDefaults
from mvllm.multimodal.item_families.frames import HALVES
from mvllm.multimodal.item_families.grid_frames import GridRules
from mvllm.multimodal.item_families.grids import GridItems, Positions
from mvllm.multimodal.item_families.interface import Features


class Qwen2_5Items(GridItems):
    """Items of Qwen2.5-VL, whose temporal positions are times."""

    def frame_interval(self, modality: str, features: Features) -> float:
        if modality != "video":
            return 1.0
        seconds = float(np.asarray(features["second_per_grid_ts"]).reshape(-1)[0])
        return self._vision.positive_int("tokens_per_second", 4) * seconds


class ColQwen2Items(GridItems):
    """Items of ColQwen2, whose positions may be those of the sequence."""

    def rope_positions(
        self, modality: str, features: Features, span_ids: Sequence[int], embedded: Sequence[tuple[int, int]]
    ) -> tuple[Positions, int] | None:
        if self.model.rope_sections is None:
            return None
        return super().rope_positions(modality, features, span_ids, embedded)


class Qwen3Items(GridItems):
    """Items of Qwen3-VL, whose videos have text between frames."""

    frame_rules = GridRules(
        mean=HALVES,
        std=HALVES,
        smallest=128 * 32 * 32,
        largest=768 * 32 * 32,
        patch_size=16,
        of_whole_video=True,
    )
    default_frames = FrameDefaults(fps=2.0, fewest=4, most=768)
