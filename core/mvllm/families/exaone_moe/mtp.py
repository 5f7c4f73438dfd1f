"""The multi-token-prediction module of EXAONE MoE: a layer without experts."""

from __future__ import annotations

from dataclasses import replace

from mvllm.config.model import ModelConfig
from mvllm.errors import ModelError
from mvllm.families.exaone_moe.model import ExaoneMoeForCausalLM
from mvllm.models.llama import LlamaOptions
from mvllm.models.mtp_head import MTP_NAMES, LlamaMTPHead


class ExaoneMoeMTP(LlamaMTPHead, ExaoneMoeForCausalLM):
    """The MTP module of `ExaoneMoeForCausalLM`."""

    names = MTP_NAMES

    @classmethod
    def options(cls, config: ModelConfig) -> LlamaOptions:
        """Without a window there is no positional encoding, as in the model's layers."""
        options = super().options(config)
        if not options.windows or options.windows[-1] is not None:
            return options
        return replace(options, nope_layers=options.nope_layers | {config.num_layers})

    @classmethod
    def window(cls, config: ModelConfig, options: LlamaOptions) -> int | None:
        """As `mtp_layer_types` says, else that of the first layer.

        Raises:
            ModelError: `mtp_layer_types` names another kind.
        """
        types = config.hf_config.get("mtp_layer_types")
        if types is None:
            return options.windows[0]
        windows = {"full_attention": None, "sliding_attention": config.sliding_window}
        if not isinstance(types, list) or not types or types[0] not in windows:
            raise ModelError(
                f"{config.hf_config.source}: mtp_layer_types should name full_attention or sliding_attention for each "
                f"module, found {types!r}."
            )
        return windows[types[0]]

    def is_dense(self, layer: int) -> bool:
        """True."""
        return True
