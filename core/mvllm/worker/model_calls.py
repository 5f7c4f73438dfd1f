"""Calls of a model's own methods, which front ends make between two steps."""

from __future__ import annotations

from typing import Any

from mvllm.errors import RequestError
from mvllm.models.causal_lm import CausalLM


def call_model(model: CausalLM, method: str, args: list[Any]) -> Any:
    """The result of `WorkerProtocol.call_model`.

    Raises:
        RequestError: The model has no such method among its `remote_methods`.
    """
    if method not in model.remote_methods:
        raise RequestError(f"{type(model).__name__} has no method {method!r}.", parameter="model")
    return getattr(model, method)(*args)
