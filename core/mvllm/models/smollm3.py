"""SmolLM3: Llama in which some layers have no positional encoding (NoPE), by default every fourth."""

from __future__ import annotations

from dataclasses import replace

from mvllm.config.model import ModelConfig
from mvllm.config.rope_parameters import RopeParameters
from mvllm.errors import ModelError
from mvllm.models.layer_windows import layer_windows
from mvllm.models.llama import LlamaForCausalLM, LlamaOptions

_THETA = 2_000_000.0


class SmolLM3ForCausalLM(LlamaForCausalLM):
    """`SmolLM3ForCausalLM` of Hugging Face checkpoints."""

    ties_embeddings_by_default = True

    @classmethod
    def options(cls, config: ModelConfig) -> LlamaOptions:
        """Without `layer_types`, the window, if any, applies to the NoPE layers."""
        nope = _nope_layers(config)
        return replace(
            super().options(config),
            windows=layer_windows(config, lambda layer: layer not in nope),
            nope_layers=nope,
            rope=RopeParameters.from_config(config.hf_config, config.head_size, theta=_THETA),
        )


def _nope_layers(config: ModelConfig) -> frozenset[int]:
    """The layers whose entry in `no_rope_layers` is 0; by default the last of every `no_rope_layer_interval`.

    Raises:
        ModelError: `no_rope_layers` does not fit the model.
    """
    hf, layers = config.hf_config, range(config.num_layers)
    flags = hf.get("no_rope_layers")
    if flags is None:
        interval = hf.positive_int("no_rope_layer_interval", 4)
        return frozenset(layer for layer in layers if (layer + 1) % interval == 0)
    if not isinstance(flags, list) or len(flags) < config.num_layers or not {*flags} <= {0, 1}:
        raise ModelError(
            f"{hf.source}: no_rope_layers should be a list of 1 (RoPE) or 0 (none) for each of the "
            f"{config.num_layers} layers, found {flags}."
        )
    return frozenset(layer for layer in layers if not flags[layer])
