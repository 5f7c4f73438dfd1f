"""Checks which transformers classes are supported. Used in the front end too: imports only classes of known names."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

from mvllm.errors import ModelError


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
    config_class = found.config_class
    if "text_config" in (getattr(config_class, "sub_configs", None) or {}):
        return "transformers' class is for more than text; only language models can be run through it."
    return None


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
    """Whether transformers has a causal language model of that name. Imports no torch for unknown names."""
    import transformers

    if architecture not in dir(transformers):
        return False
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return architecture in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def _class(architecture: str) -> Any:
    import transformers

    return getattr(transformers, architecture)
