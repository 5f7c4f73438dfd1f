"""The tasks of LLM's pooling methods, as settings of their requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import msgspec

from mvllm.errors import RequestError
from mvllm.messages.pooling_params import PoolingParams, PoolingTask, PoolingType

PoolingArgument = PoolingParams | Sequence[PoolingParams] | None
VECTORS_OF_ALL = "token_embed"
"""The task of `encode` that returns a vector of each token."""


def for_task(params: PoolingArgument, task: PoolingTask, pooling_type: PoolingType | None = None) -> PoolingArgument:
    """Copies with `task` set where it is None, and with `pooling_type` if that is given.

    Values that are not PoolingParams stay; `encode` rejects them.
    """
    if isinstance(params, list | tuple):
        return [cast(PoolingParams, for_task(each, task, pooling_type)) for each in params]
    if params is None:
        return PoolingParams(task=task, pooling_type=pooling_type)
    if not isinstance(params, PoolingParams):
        return params
    if params.task not in (None, task):
        raise RequestError(
            f"pooling_params.task is {params.task}; this method allows {task} only. Use encode().", parameter="task"
        )
    return msgspec.structs.replace(params, task=task, pooling_type=pooling_type or params.pooling_type)


def for_one_vector(params: PoolingArgument) -> PoolingArgument:
    """`params` for `embed`, which returns one vector per prompt."""
    asked = for_task(params, PoolingTask.EMBED)
    for each in asked if isinstance(asked, list) else [asked]:
        if isinstance(each, PoolingParams) and each.pooling_type == PoolingType.ALL:
            raise RequestError(
                "embed() returns one vector per prompt. Use encode() for a vector per token.", parameter="pooling_type"
            )
    return asked


def for_named_task(params: PoolingArgument, name: str) -> PoolingArgument:
    """Copies for a task by its name in `encode`."""
    if name == VECTORS_OF_ALL:
        return for_task(params, PoolingTask.EMBED, PoolingType.ALL)
    if name not in tuple(PoolingTask):
        known = ", ".join(map(repr, (*map(str, PoolingTask), VECTORS_OF_ALL)))
        raise RequestError(f"pooling_task must be one of {known}, found {name!r:.40}.", parameter="pooling_task")
    return for_task(params, PoolingTask(name))
