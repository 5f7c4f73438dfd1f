"""Builds a ModelConfig from a model folder and checks its values against each other.

Families use different keys for the same value (`hidden_size` or `n_embd`), so each value is looked up under all its
keys. Composite checkpoints have the language model's values in `text_config`, which is merged into the rest, so that
all other modules read one flat config.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from mvllm.config.context_length import resolve_max_model_len
from mvllm.config.generation_config import (
    describe_defaults,
    end_token_ids,
    load_generation_config,
    sampling_defaults,
)
from mvllm.config.hf_config import HFConfig
from mvllm.config.key_aliases import with_read_names
from mvllm.config.model import ModelConfig
from mvllm.config.model_families import ModelFamily, find_family
from mvllm.config.model_kind import ModelKind
from mvllm.config.multimodal import MultiModalModel
from mvllm.config.multimodal_families import multimodal_model
from mvllm.config.pooler_config import check_pooler_config
from mvllm.config.quantization import resolve_quantization
from mvllm.config.retrieval_families import with_inner_config
from mvllm.config.sentence_transformers_config import max_seq_length
from mvllm.config.text_part_defaults import is_tied_by_text, text_part_values
from mvllm.config.token_spaces import token_spaces_of
from mvllm.config.transformers_families import read_composite_config, takes_items_through_transformers
from mvllm.errors import ConfigError, ModelError
from mvllm.logging import get_logger

logger = get_logger(__name__)

_ARCHITECTURE_OF_TYPE = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "ernie4_5_moe": "Ernie4_5_MoeForCausalLM",
    "hunyuan_v1_moe": "HunYuanMoEV1ForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "llama4": "Llama4ForConditionalGeneration",
    "cohere2_moe": "Cohere2MoeForCausalLM",
    "exaone_moe": "ExaoneMoeForCausalLM",
    "opt": "OPTForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "bert": "BertModel",
    "roberta": "RobertaModel",
    "xlm-roberta": "XLMRobertaModel",
    "distilbert": "DistilBertModel",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral4": "Mistral4ForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "hunyuan_v1_dense": "HunYuanDenseV1ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "glm": "GlmForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
    "falcon": "FalconForCausalLM",
    "bamba": "BambaForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "granitemoeshared": "GraniteMoeSharedForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "falcon_h1": "FalconH1ForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "mamba2": "Mamba2ForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2_moe": "Lfm2MoeForCausalLM",
    "kimi_linear": "KimiLinearForCausalLM",
    "olmo_hybrid": "OlmoHybridForCausalLM",
    "whisper": "WhisperForConditionalGeneration",
}

_TEXT_MODELS = ("Mistral3ForConditionalGeneration", "Gemma4ForConditionalGeneration")
"""Architectures of checkpoints that may be text models alone, by the `model_type` of their `text_config`."""

_LARGEST_SIZE = 2**31 - 1
_DRAWN_SEED_BITS = 48  # two of 100,000 engines are alike with a probability of 2e-5; JSON readers keep all digits
_MOST_LAYERS = 10_000
"""Larger than any model: detects a damaged config before memory is allocated for it."""

_HIDDEN_SIZE = ("hidden_size", "n_embd", "d_model", "dim")
_NUM_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
_NUM_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "decoder_attention_heads")
_NUM_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")

# transformers' defaults for an absent key (null means the same as for other families).
_ABSENT_HEAD_DIM = {
    **dict.fromkeys(("qwen3", "glm", "glm4", "seed_oss", "ministral3", "ernie4_5", "qwen3_vl_text"), 128),
    **dict.fromkeys(("gemma2", "gemma3_text", "gemma4_text"), 256),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), 256),
    **dict.fromkeys(("minimax_m2", "llama4_text", "cohere2_moe", "nemotron_h"), 128),
    "gpt_oss": 64,
}
_ABSENT_SLIDING_WINDOW = {
    **dict.fromkeys(("mistral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "gemma2", "gemma3_text"), 4096),
    **dict.fromkeys(("olmo3", "exaone4", "exaone_moe", "cohere2", "cohere2_moe"), 4096),
    **dict.fromkeys(("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"), 4096),
    "gemma4_text": 512,
    "gpt_oss": 128,
}

# Families with full attention even if the config has the key `sliding_window`.
_NEVER_SLIDING = (
    *("llama", "opt", "gpt2", "granite", "olmo2", "glm", "glm4", "falcon"),
    *("bamba", "granitemoe", "granitemoeshared", "granitemoehybrid", "falcon_h1", "nemotron_h"),
    *("deepseek_v2", "deepseek_v3", "mistral4", "seed_oss", "ernie4_5", "hunyuan_v1_dense"),
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "lfm2", "lfm2_moe", "kimi_linear", "olmo_hybrid"),
    *("bert", "roberta", "xlm-roberta", "distilbert"),
    *("deepseek_v32", "glm_moe_dsa", "glm4_moe", "glm4_moe_lite", "minimax_m2"),
    *("ernie4_5_moe", "hunyuan_v1_moe", "llama4_text"),
    *("qwen3_vl_text", "qwen3_vl_moe_text", "glm4v_text", "glm4v_moe_text"),
)
# Families whose `sliding_window` applies only with `use_sliding_window`, which is off by default.
_SLIDING_ON_REQUEST = (
    *("qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "smollm3"),
    *("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"),  # the first checkpoints have a flat config
)

# Keys of a composite config that describe the checkpoint, not the language model within it.
_OUTER_KEYS = ("architectures", "tie_word_embeddings")

DTYPES = ("float32", "bfloat16", "float16")
DEFAULT_MAX_LOGPROBS = 20

DTYPE_ALIASES = {"half": "float16", "float": "float32"}


@dataclass(frozen=True)
class TransformerShape:
    """The sizes of the transformer."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int


def build_model_config(
    *,
    model: str,
    folder: Path,
    tokenizer: str | None,
    dtype: str = "auto",
    max_model_len: int | Literal["auto"] | None = None,
    hf_overrides: Mapping[str, Any] | None = None,
    generation_config: Path | None = None,
    max_logprobs: int = DEFAULT_MAX_LOGPROBS,
    logprobs_mode: str = "raw_logprobs",
    trust_remote_code: bool = False,
    model_impl: str = "auto",
    revision: str | None = None,
    seed: int | None = None,
    quantization: str | None = None,
    pooler_config: Mapping[str, Any] | None = None,
) -> ModelConfig:
    """Reads `folder` and builds the configuration of the model.

    Args:
        model: The user's setting, for messages.
        folder: The model folder.
        generation_config: Folder of the `generation_config.json` with sampling defaults; None for no defaults.
        max_model_len: The user's setting; `auto` begins with the model's context length, as None does.
        max_logprobs: -1 permits the whole vocabulary.
        logprobs_mode, model_impl: As in ModelConfig.
        seed: None draws a seed.
        quantization: The user's setting; None for the checkpoint's method.
        pooler_config: The user's pooling settings, which override the model's.

    Raises:
        ModelError: A file or key is missing, invalid, or contradicts another.
        ConfigError: A setting exceeds the model's limits.
    """
    hf_config, family = _read_config(folder, hf_overrides)
    architecture = architecture_of(hf_config)
    composite = None
    takes_text_only = family is not None and family.text_only and model_impl != "transformers"
    if not takes_text_only and takes_items_through_transformers(
        architecture, model_impl, _ARCHITECTURE_OF_TYPE.values()
    ):
        composite = read_composite_config(HFConfig.load(folder, hf_overrides))
        if composite is not None:
            hf_config = load_hf_config(folder, hf_overrides, composite.text_values)
    shape = transformer_shape(hf_config)
    if max_logprobs > shape.vocab_size:
        if max_logprobs != DEFAULT_MAX_LOGPROBS:
            raise ConfigError(f"max_logprobs is {max_logprobs}, but the vocabulary has only {shape.vocab_size} tokens.")
        max_logprobs = shape.vocab_size  # the default is clipped to a small vocabulary
    own_generation = load_generation_config(folder)
    multimodal: MultiModalModel | None
    if composite is not None:
        multimodal = MultiModalModel(composite.placeholders, shape.hidden_size, by_transformers=True)
    else:
        multimodal = multimodal_model(architecture, hf_config)
        if multimodal is not None and model_impl == "transformers":
            multimodal = replace(multimodal, by_transformers=True)
    by_type = _ARCHITECTURE_OF_TYPE.get(str(hf_config.get("model_type")), "")
    language = "" if model_impl == "transformers" else by_type
    if multimodal is None and architecture in _TEXT_MODELS and language:
        architecture = language
    read_spaces = family.token_spaces if family is not None and architecture == family.architecture else None
    kind = ModelKind.of(architecture, hf_config, folder)
    is_auto = max_model_len == "auto"
    requested = None if max_model_len == "auto" else max_model_len
    if requested is None and not kind.generates:
        longest = resolve_max_model_len(hf_config, None)
        requested = min(longest, max_seq_length(folder) or longest)
    return ModelConfig(
        model=model,
        path=folder,
        tokenizer=tokenizer,
        hf_config=hf_config,
        architecture=architecture,
        dtype=DTYPE_ALIASES.get(dtype, dtype),
        checkpoint_dtype=checkpoint_dtype(hf_config),
        max_model_len=resolve_max_model_len(hf_config, requested),
        max_model_len_is_auto=is_auto,
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_size=shape.head_size,
        sliding_window=sliding_window(hf_config),
        max_logprobs=shape.vocab_size if max_logprobs == -1 else max_logprobs,
        logprobs_mode=logprobs_mode,
        generation_defaults=_defaults_from(generation_config),
        eos_token_ids=end_token_ids(own_generation, hf_config, shape.vocab_size),
        trust_remote_code=trust_remote_code,
        model_impl=model_impl,
        revision=revision,
        seed=secrets.randbits(_DRAWN_SEED_BITS) if seed is None else seed,
        seed_is_random=seed is None,
        quantization=resolve_quantization(hf_config, quantization),
        kind=kind,
        pooler_config=check_pooler_config(pooler_config or {}),
        multimodal=multimodal,
        language_architecture="" if multimodal is None else language,
        token_spaces=token_spaces_of(hf_config, shape.vocab_size, own_generation, read_spaces),
    )


def load_hf_config(
    folder: Path, overrides: Mapping[str, Any] | None = None, absent: Mapping[str, Any] | None = None
) -> HFConfig:
    """`folder/config.json`, merged with `vlm_config` and `text_config` of composite configs, then with `overrides`.

    Keys with a second name (key_aliases.py) have the name that model classes read.

    Args:
        absent: Values of keys that `text_config` leaves out.

    Raises:
        ModelError: The file is missing or invalid.
    """
    return _read_config(folder, overrides, absent)[0]


def _read_config(
    folder: Path, overrides: Mapping[str, Any] | None = None, absent: Mapping[str, Any] | None = None
) -> tuple[HFConfig, ModelFamily | None]:
    """As `load_hf_config`, and the family of another package that the config is of."""
    outer = with_inner_config(HFConfig.load(folder))
    text = outer.get("text_config", {})
    if not isinstance(text, dict):
        raise ModelError(f"{outer.source}: 'text_config' should be a JSON object, found {text!r}.")
    flat = outer.as_dict()
    flat.pop("text_config", None)
    family = find_family(outer.get("model_type"))
    if family is not None and family.simplify is not None:
        family.simplify(flat, outer.source)
    # The outer config is that of the whole checkpoint, with its head.
    of_text = {**(absent or {}), **text_part_values(outer, text)}
    inner = {key: value for key, value in of_text.items() if key not in _OUTER_KEYS or key not in outer}
    if is_tied_by_text(outer, text):
        inner["tie_word_embeddings"] = True
    defaults = family.text_defaults(outer, text) if family is not None and family.text_defaults is not None else {}
    values = {**flat, **defaults, **inner, **(overrides or {})}
    return HFConfig(with_read_names(values), outer.source), family


def architecture_of(hf_config: HFConfig) -> str:
    """The name that a model class is registered under.

    Raises:
        ModelError: The config has neither `architectures` nor a known `model_type`.
    """
    names = hf_config.get("architectures")
    if names is not None:
        if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
            raise ModelError(
                f"{hf_config.source}: 'architectures' should be a list of class names, for instance "
                f"['LlamaForCausalLM'], found {names!r}."
            )
        return names[0]
    model_type = hf_config.get("model_type")
    if isinstance(model_type, str) and model_type in _ARCHITECTURE_OF_TYPE:
        return _ARCHITECTURE_OF_TYPE[model_type]
    if (family := find_family(model_type)) is not None:
        return family.architecture
    raise ModelError(
        f"{hf_config.source} has no key 'architectures', and its 'model_type' ({model_type!r}) is none of "
        f"{', '.join(_ARCHITECTURE_OF_TYPE)}. Add 'architectures', for instance ['LlamaForCausalLM']."
    )


def transformer_shape(hf_config: HFConfig) -> TransformerShape:
    """The model's sizes, checked against each other.

    Raises:
        ModelError: A size is missing, not a positive integer, or contradicts another.
    """
    hidden_size = _size(hf_config, _HIDDEN_SIZE)
    num_heads = _size(hf_config, _NUM_HEADS)
    num_kv_heads = _size(hf_config, _NUM_KV_HEADS, default=num_heads)
    if _is_multi_query(hf_config):
        num_kv_heads = 1
    if num_heads % num_kv_heads:
        raise ModelError(
            f"{hf_config.source}: {_key(hf_config, _NUM_HEADS)!r} is {num_heads}, which is not a multiple of "
            f"{_key(hf_config, _NUM_KV_HEADS)!r} = {num_kv_heads}; query heads share key-value heads in equal groups."
        )
    return TransformerShape(
        vocab_size=hf_config.positive_int("vocab_size", at_most=_LARGEST_SIZE),
        hidden_size=hidden_size,
        num_layers=_num_layers(hf_config),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=_head_size(hf_config, hidden_size, num_heads),
    )


def _num_layers(hf_config: HFConfig) -> int:
    """The number of layers; that of the listed ones where the config only lists their kinds (Nemotron-H)."""
    kinds = hf_config.get("layers_block_type")
    listed = len(kinds) if isinstance(kinds, list) and kinds else None
    return _size(hf_config, _NUM_LAYERS, listed, at_most=_MOST_LAYERS)


def _is_multi_query(hf_config: HFConfig) -> bool:
    """Whether it is a Falcon with multi-query attention, for which `num_kv_heads` is ignored."""
    if hf_config.get("model_type") != "falcon" or hf_config.get("new_decoder_architecture", False):
        return False
    return bool(hf_config.get("multi_query", True))


def sliding_window(hf_config: HFConfig) -> int | None:
    """Sliding window in tokens of the layers that have one; None if every layer has full attention.

    Raises:
        ModelError: The window is not a positive integer.
    """
    model_type = hf_config.get("model_type")
    if model_type in _NEVER_SLIDING:
        return None
    if not hf_config.get("use_sliding_window", model_type not in _SLIDING_ON_REQUEST):
        return None
    if "sliding_window" not in hf_config.as_dict():
        return _ABSENT_SLIDING_WINDOW.get(str(model_type))
    return hf_config.positive_int("sliding_window") if "sliding_window" in hf_config else None


def checkpoint_dtype(hf_config: HFConfig) -> str:
    """The weights' dtype in the config; `float32` if it has none.

    Raises:
        ModelError: It is not a supported compute dtype.
    """
    key = "dtype" if "dtype" in hf_config else "torch_dtype"
    value = hf_config.get(key, "float32")
    name = value.removeprefix("torch.") if isinstance(value, str) else value
    name = DTYPE_ALIASES.get(name, name) if isinstance(name, str) else name
    if name not in DTYPES:
        raise ModelError(
            f"{hf_config.source}: {key!r} should be one of {', '.join(DTYPES)}, found {value!r}. "
            f"Correct the file or pass hf_overrides={{{key!r}: 'float32'}}."
        )
    return str(name)


def _size(
    hf_config: HFConfig, keys: tuple[str, ...], default: int | None = None, *, at_most: int = _LARGEST_SIZE
) -> int:
    return hf_config.positive_int(_key(hf_config, keys), default, at_most=at_most)


def _key(hf_config: HFConfig, keys: tuple[str, ...]) -> str:
    """The first of `keys` that the config has, else the first, for messages."""
    return next((key for key in keys if key in hf_config), keys[0])


def _head_size(hf_config: HFConfig, hidden_size: int, num_heads: int) -> int:
    if "kv_lora_rank" in hf_config:  # MLA: the size of the rotary part of a head
        return hf_config.positive_int("qk_rope_head_dim", at_most=_LARGEST_SIZE)
    if "head_dim" in hf_config:
        return hf_config.positive_int("head_dim", at_most=_LARGEST_SIZE)
    absent = _ABSENT_HEAD_DIM.get(str(hf_config.get("model_type")))
    if absent is not None and "head_dim" not in hf_config.as_dict():
        return absent
    if hidden_size % num_heads:
        raise ModelError(
            f"{hf_config.source}: {_key(hf_config, _HIDDEN_SIZE)!r} is {hidden_size}, which "
            f"{_key(hf_config, _NUM_HEADS)!r} = {num_heads} does not divide, and there is no 'head_dim' to say how "
            "large a head is."
        )
    return hidden_size // num_heads


def _defaults_from(generation_folder: Path | None) -> dict[str, Any]:
    if generation_folder is None:
        return {}
    generation = load_generation_config(generation_folder)
    defaults = sampling_defaults(generation)
    if defaults:
        logger.info(
            "Sampling defaults from %s: %s (generation_config='none' ignores them).",
            generation.source,
            describe_defaults(defaults),
        )
    return defaults
