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

from mvllm.config.architecture_support import check_architecture_name
from mvllm.config.context_length import resolve_max_model_len
from mvllm.config.families import core_model_types, find_architecture, find_model_type, multimodal_model
from mvllm.config.generation_config import (
    describe_defaults,
    end_token_ids,
    load_generation_config,
    sampling_defaults,
)
from mvllm.config.hf_config import HFConfig
from mvllm.config.model import ModelConfig
from mvllm.config.model_implementations import names_implementation, read_composite_config
from mvllm.config.model_kind import ModelKind
from mvllm.config.multimodal import MultiModalModel
from mvllm.config.nested_configs import is_tied_by_text, text_part_values, with_inner_config
from mvllm.config.pooler_config import check_pooler_config
from mvllm.config.quantization import resolve_quantization
from mvllm.config.sentence_transformers_config import max_seq_length
from mvllm.config.token_spaces import ReadSpaces, token_spaces_of
from mvllm.errors import ConfigError, ModelError
from mvllm.logging import get_logger

logger = get_logger(__name__)

_LARGEST_SIZE = 2**31 - 1
_DRAWN_SEED_BITS = 48  # two of 100,000 engines are alike with a probability of 2e-5; JSON readers keep all digits
_MOST_LAYERS = 10_000
"""Larger than any model: detects a damaged config before memory is allocated for it."""

_HIDDEN_SIZE = ("hidden_size", "n_embd", "d_model", "dim")
_NUM_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
_NUM_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "decoder_attention_heads")
_NUM_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")

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
    parts = _read_parts(folder, hf_overrides, model_impl)
    hf_config, architecture = parts.hf_config, parts.architecture
    shape = transformer_shape(hf_config)
    own_generation = load_generation_config(folder)
    kind = ModelKind.of(architecture, hf_config, folder)
    return ModelConfig(
        model=model,
        path=folder,
        tokenizer=tokenizer,
        hf_config=hf_config,
        architecture=architecture,
        dtype=DTYPE_ALIASES.get(dtype, dtype),
        checkpoint_dtype=checkpoint_dtype(hf_config),
        max_model_len=_max_model_len(hf_config, kind, folder, None if max_model_len == "auto" else max_model_len),
        max_model_len_is_auto=max_model_len == "auto",
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_size=shape.head_size,
        sliding_window=sliding_window(hf_config),
        max_logprobs=_max_logprobs(max_logprobs, shape.vocab_size),
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
        multimodal=parts.multimodal,
        language_architecture="" if parts.multimodal is None else parts.language,
        token_spaces=token_spaces_of(hf_config, shape.vocab_size, own_generation, parts.read_spaces),
    )


@dataclass(frozen=True)
class _Parts:
    """A checkpoint's language model and encoders.

    Attributes:
        architecture: That of ModelConfig.
        language: The architecture of the language model; empty if that does not matter.
        read_spaces: Reads the token spaces; None for models without.
    """

    hf_config: HFConfig
    architecture: str
    language: str
    multimodal: MultiModalModel | None
    read_spaces: ReadSpaces | None


def _read_parts(folder: Path, overrides: Mapping[str, Any] | None, model_impl: str) -> _Parts:
    hf_config = load_hf_config(folder, overrides)
    architecture = architecture_of(hf_config)
    check_architecture_name(architecture, model_impl, hf_config)
    multimodal: MultiModalModel | None
    composite = read_composite_config(architecture, model_impl, folder, overrides)
    if composite is not None:
        hf_config = load_hf_config(folder, overrides, composite.text_values)
        width = hf_config.positive_int(_key(hf_config, _HIDDEN_SIZE), at_most=_LARGEST_SIZE)
        multimodal = MultiModalModel(composite.placeholders, width, by_transformers=True)
    else:
        multimodal = multimodal_model(architecture, hf_config)
        if multimodal is not None and names_implementation(model_impl):
            multimodal = replace(multimodal, by_transformers=True)
    language = "" if names_implementation(model_impl) else find_model_type(hf_config).architecture or ""
    found = find_architecture(architecture)
    if multimodal is None and language and found is not None and found.may_be_text:
        architecture = language
    return _Parts(hf_config, architecture, language, multimodal, None if found is None else found.read_spaces)


def _max_logprobs(requested: int, vocab_size: int) -> int:
    """The setting, or the size of the vocabulary for -1. The default is clipped to a small vocabulary.

    Raises:
        ConfigError: Another value is above the size of the vocabulary.
    """
    if requested == -1 or (requested > vocab_size and requested == DEFAULT_MAX_LOGPROBS):
        return vocab_size
    if requested > vocab_size:
        raise ConfigError(f"max_logprobs is {requested}, but the vocabulary has only {vocab_size} tokens.")
    return requested


def _max_model_len(hf_config: HFConfig, kind: ModelKind, folder: Path, requested: int | None) -> int:
    """The longest sequence. An embedding model's own setting is the default, if it is shorter than the context."""
    if requested is None and not kind.generates:
        longest = resolve_max_model_len(hf_config, None)
        requested = min(longest, max_seq_length(folder) or longest)
    return resolve_max_model_len(hf_config, requested)


def load_hf_config(
    folder: Path, overrides: Mapping[str, Any] | None = None, absent: Mapping[str, Any] | None = None
) -> HFConfig:
    """`folder/config.json`, merged with `vlm_config` and `text_config` of composite configs, then with `overrides`.

    Keys with a second name have the name that model classes read (see `ModelType`).

    Args:
        absent: Values of keys that `text_config` leaves out.

    Raises:
        ModelError: The file is missing or invalid.
    """
    outer = with_inner_config(HFConfig.load(folder))
    text = outer.get("text_config", {})
    if not isinstance(text, dict):
        raise ModelError(f"{outer.source}: 'text_config' should be a JSON object, found {text!r}.")
    flat = outer.as_dict()
    flat.pop("text_config", None)
    outer_type = find_model_type(outer)
    if outer_type.simplify is not None:
        outer_type.simplify(flat, outer.source)
    names_text = bool(text) or outer_type.text_type is not None
    if names_text and outer_type.architecture is not None:  # the model type that remains is that of the text
        flat.setdefault("architectures", [outer_type.architecture])
    # The outer config is that of the whole checkpoint, with its head.
    of_text = {**(absent or {}), **text_part_values(outer, text)}
    inner = {key: value for key, value in of_text.items() if key not in _OUTER_KEYS or key not in outer}
    if is_tied_by_text(outer, text):
        inner["tie_word_embeddings"] = True
    values = {**flat, **inner, **(overrides or {})}
    model_type = find_model_type(values)
    second_names = model_type.key_aliases.items()
    values = {**{read: values[name] for name, read in second_names if name in values}, **values}
    return HFConfig(values if model_type.read_config is None else model_type.read_config(values), outer.source)


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
    found = find_model_type(hf_config).architecture
    if found is not None:
        return found
    raise ModelError(
        f"{hf_config.source} has no key 'architectures', and its 'model_type' ({hf_config.get('model_type')!r}) is "
        f"none of {', '.join(core_model_types())}. Add 'architectures', for instance ['LlamaForCausalLM']."
    )


def transformer_shape(hf_config: HFConfig) -> TransformerShape:
    """The model's sizes, checked against each other.

    Raises:
        ModelError: A size is missing, not a positive integer, or contradicts another.
    """
    hidden_size = _size(hf_config, _HIDDEN_SIZE)
    num_heads = _size(hf_config, _NUM_HEADS)
    num_kv_heads = _size(hf_config, _NUM_KV_HEADS, default=num_heads)
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


def sliding_window(hf_config: HFConfig) -> int | None:
    """Sliding window in tokens of the layers that have one; None if every layer has full attention.

    Raises:
        ModelError: The window is not a positive integer.
    """
    family = find_model_type(hf_config)
    if family.never_sliding or not hf_config.get("use_sliding_window", family.use_sliding_window):
        return None
    if "sliding_window" not in hf_config.as_dict():
        return family.sliding_window
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
    absent = find_model_type(hf_config).head_dim
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
