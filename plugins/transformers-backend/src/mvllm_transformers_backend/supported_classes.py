"""Checks which transformers classes are supported. Used in the front end too: imports only classes of known names."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

from mvllm.extension_api import ModelError


def unsupported_reason(architecture: str) -> str | None:
    """Why transformers' class of that name is not supported, as a sentence; None if no reason is known.

    The dry run finds reasons that show only when the model is built, before any weight is read.
    """
    if importlib.util.find_spec("torch") is None:
        return "transformers cannot run it either without torch."
    if not _is_offered(architecture):
        return "transformers has no causal language model of that name."
    try:
        found = _class(architecture)
    except (ImportError, RuntimeError) as e:  # for instance a missing dependency
        return f"transformers' class cannot be imported: {type(e).__name__}: {e}"
    if getattr(found, "_is_stateful", False):
        return "transformers' class keeps a state between tokens that is not keys and values, which is not supported."
    if not getattr(found, "_supports_attention_backend", False):
        return (
            "transformers' class computes its attention itself, instead of through transformers' attention interface, "
            "so that it cannot use the paged KV cache."
        )
    if found.config_class.is_encoder_decoder:
        return "transformers' class is an encoder and a decoder that attends to it, which is not supported."
    return None


def has_encoders(architecture: str) -> bool:
    """Whether transformers' class of that name, which is supported, has a language model and encoders of items."""
    return "text_config" in (getattr(_class(architecture).config_class, "sub_configs", None) or {})


def model_class(architecture: str) -> Any:
    """transformers' class of that name.

    Raises:
        ModelError: It does not exist, or is not supported.
    """
    reason = unsupported_reason(architecture)
    if reason is not None:
        raise ModelError(f"The architecture {architecture!r} cannot be run through transformers: {reason}")
    return _class(architecture)


@functools.cache
def _is_offered(architecture: str) -> bool:
    """Whether transformers has a causal language model of that name, alone or with encoders. Imports no torch for
    unknown names."""
    import transformers

    if architecture not in dir(transformers):
        return False
    from transformers.models.auto import modeling_auto as names

    offered = (names.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, names.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES)
    return any(architecture in mapping.values() for mapping in offered)


def _class(architecture: str) -> Any:
    import transformers

    return getattr(transformers, architecture)
