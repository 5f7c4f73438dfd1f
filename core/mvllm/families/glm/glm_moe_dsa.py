"""GLM-5: DeepSeek V3.2's sparse attention and experts; a layer may attend to the selection of an earlier layer."""

from __future__ import annotations

from dataclasses import replace

from mvllm.config.model import ModelConfig
from mvllm.errors import ConfigError, ModelError
from mvllm.families.deepseek.model import DeepseekV32ForCausalLM
from mvllm.models.llama import LlamaOptions

_LETTERS = {"F": "full", "S": "shared"}


class GlmMoeDsaForCausalLM(DeepseekV32ForCausalLM):
    """`GlmMoeDsaForCausalLM` of Hugging Face checkpoints, without the multi-token-prediction layers."""

    num_shared_experts = 1
    routing_defaults = (2.5, 1, 1)
    index_heads = 32
    interleaved_indexer = True

    @classmethod
    def options(cls, config: ModelConfig) -> LlamaOptions:
        """DeepSeek's options with another default epsilon."""
        return replace(super().options(config), eps=config.hf_config.positive_number("rms_norm_eps", 1e-5))

    def shares_selection(self, layer: int) -> bool:
        """As `indexer_types` says.

        Raises:
            ConfigError: A pipeline stage begins with such a layer.
        """
        types = _indexer_types(self.config)
        if types[layer] == "shared" and layer == self.stage.first:
            full = [number for number, kind in enumerate(types) if kind == "full"]
            raise ConfigError(
                f"With this pipeline_parallel_size a stage begins at layer {layer}, which attends to the tokens that "
                "the indexer of an earlier layer selects. Choose a pipeline_parallel_size whose stages begin at layers "
                f"with an indexer ({', '.join(map(str, full))}), or 1."
            )
        return types[layer] == "shared"


def _indexer_types(config: ModelConfig) -> list[str]:
    """`full` or `shared` for each layer: a list or pattern of the config, or else every `index_topk_freq`-th is full.

    Raises:
        ModelError: The list does not fit the layers, or the first layer has no indexer.
    """
    hf = config.hf_config
    types = hf.get("indexer_types")
    if types is None:
        types = hf.get("index_topk_pattern")
    if isinstance(types, str):
        types = [_LETTERS.get(letter, letter) for letter in types]
    if types is None:
        every, offset = hf.positive_int("index_topk_freq", 1), hf.positive_int("index_skip_topk_offset", 2)
        layers = range(config.num_layers)
        types = ["shared" if max(layer - offset + 1, 0) % every else "full" for layer in layers]
    if not isinstance(types, list) or len(types) != config.num_layers or not {*types} <= {*_LETTERS.values()}:
        raise ModelError(
            f"{hf.source}: indexer_types should name full or shared for each of the {config.num_layers} layers, "
            f"found {types!r}."
        )
    if types[0] != "full":
        raise ModelError(f"{hf.source}: indexer_types should begin with full, found {types!r}.")
    return types
