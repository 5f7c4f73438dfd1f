"""Raises what is wrong with a request that failed after it was accepted, such as a schema that cannot be enforced."""

from __future__ import annotations

from collections.abc import Sequence

from mvllm.engine.frontend.outputs import RequestOutput
from mvllm.errors import RequestError


def raise_failure(output: RequestOutput, request_ids: Sequence[str]) -> None:
    """Raises the error of a finished request, if one of its sequences has one.

    Args:
        request_ids: Those of all requests of the call, in the order of their prompts.

    Raises:
        RequestError: A sequence has the finish reason `error`.
    """
    for sequence in output.outputs:
        if sequence.finish_reason == "error":
            count = len(request_ids)
            where = f"Prompt {request_ids.index(output.request_id)} of {count}: " if count > 1 else ""
            raise RequestError(f"{where}{sequence.error}", parameter=sequence.error_parameter)
