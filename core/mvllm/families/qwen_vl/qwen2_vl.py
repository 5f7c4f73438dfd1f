"""Qwen2-VL and Qwen2.5-VL: Qwen2 with three positions for each token, and a vision tower."""

from __future__ import annotations

from mvllm.families.qwen_vl.towers import Qwen2_5_VLTower, Qwen2VLTower
from mvllm.models.grid_model import GridModel
from mvllm.models.qwen2 import Qwen2ForCausalLM


class Qwen2VLForConditionalGeneration(GridModel, Qwen2ForCausalLM):
    """`Qwen2VLForConditionalGeneration` of Hugging Face checkpoints."""

    tower = Qwen2VLTower


class Qwen2_5_VLForConditionalGeneration(GridModel, Qwen2ForCausalLM):
    """`Qwen2_5_VLForConditionalGeneration` of Hugging Face checkpoints."""

    tower = Qwen2_5_VLTower
