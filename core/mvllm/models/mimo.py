"""MiMo: Qwen2 with multi-token-prediction modules."""

from __future__ import annotations

import re

from mvllm.models.mtp_head import LlamaMTPHead, MTPNames
from mvllm.models.qwen2 import Qwen2ForCausalLM


class MiMoForCausalLM(Qwen2ForCausalLM):
    """`MiMoForCausalLM` of Hugging Face checkpoints, without the multi-token-prediction modules."""

    ignored_names = re.compile(rf"^model\.mtp_layers\.|{Qwen2ForCausalLM.ignored_names.pattern}")


class MiMoMTP(LlamaMTPHead, Qwen2ForCausalLM):
    """The multi-token-prediction module of `MiMoForCausalLM`."""

    names = MTPNames(
        "model.mtp_layers.0",
        "model.mtp_layers.0.token_layernorm",
        "model.mtp_layers.0.hidden_layernorm",
        "model.mtp_layers.0.input_proj",
        "model.mtp_layers.0.final_layernorm",
        hidden_first=True,
    )
