"""The arguments of `update_weights` and `init_weight_transfer_engine`, as the messages that the engine core takes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from mvllm.errors import RequestError
from mvllm.messages.weights import WeightSource, WeightTransferInfo, WeightUpdate

_SOURCES = ("path", "shared_memory", "safetensors", "tensors", "names with dtype_names and shapes")


def transfer_info(info: Mapping[str, Any] | WeightTransferInfo) -> WeightTransferInfo:
    """The trainer's group, from its fields.

    Raises:
        RequestError: A field is unknown, missing or has a wrong type.
    """
    if isinstance(info, WeightTransferInfo):
        return info
    try:
        return msgspec.convert(dict(info), _StrictTransferInfo)
    except (msgspec.ValidationError, TypeError, ValueError) as e:
        raise RequestError(f"init_info: {e}.", parameter="init_info") from e


class _StrictTransferInfo(WeightTransferInfo, forbid_unknown_fields=True, kw_only=True):
    pass


class UpdateInfo(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Where the weights of one call are. Exactly one source is given.

    Attributes:
        path: A checkpoint folder that every worker can read.
        shared_memory: The name of a segment of shared memory on the workers' machine, with a safetensors file.
        safetensors: The bytes of a safetensors file.
        tensors: Tensors by name, or (name, tensor) pairs.
        names: With `path` or `shared_memory`, the tensors to load; None for all. Alone, with `dtype_names` and
            `shapes`, the tensors that the trainer broadcasts.
        dtype_names, shapes: torch's name of each dtype, and each shape.
    """

    path: str | None = None
    shared_memory: str | None = None
    safetensors: bytes | None = None
    tensors: Any = None
    names: list[str] | None = None
    dtype_names: list[str] | None = None
    shapes: list[list[int]] | None = None


def update_info(fields: Mapping[str, Any]) -> UpdateInfo:
    """Checks the fields of one call.

    Raises:
        RequestError: A field is unknown or has a wrong type, or there is not exactly one source.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    if isinstance(given.get("path"), Path):
        given["path"] = str(given["path"])
    if "tensors" in given:
        given["tensors"] = _named_tensors(given["tensors"])
    try:
        info = msgspec.convert(given, UpdateInfo)
    except msgspec.ValidationError as e:
        raise RequestError(f"update_info: {e}.", parameter="update_info") from e
    is_broadcast = info.dtype_names is not None or info.shapes is not None
    sources = [info.path, info.shared_memory, info.safetensors, info.tensors, True if is_broadcast else None]
    count = sum(source is not None for source in sources)
    if count != 1:
        raise RequestError(
            f"update_weights takes its weights from exactly one of {', '.join(_SOURCES)}; {count} of them were given.",
            parameter="update_info",
        )
    return info


@contextmanager
def weight_update(info: UpdateInfo, *, shares_tensors: bool) -> Iterator[WeightUpdate]:
    """The message for the engine core. Bytes and tensors are in shared memory within the context.

    Args:
        shares_tensors: The worker runs in this process and takes the tensors as they are.
    """
    if info.path is not None:
        yield WeightUpdate(source=WeightSource.FOLDER, path=info.path, names=info.names)
    elif info.shared_memory is not None:
        yield WeightUpdate(source=WeightSource.SHARED_MEMORY, path=info.shared_memory, names=info.names)
    elif info.tensors is not None and shares_tensors:
        yield WeightUpdate(source=WeightSource.TENSORS, tensors=info.tensors, names=info.names)
    elif info.tensors is not None or info.safetensors is not None:
        from mvllm.models.shared_memory_weights import SharedMemoryWeights  # imports torch

        with SharedMemoryWeights(info.tensors if info.safetensors is None else info.safetensors) as held:
            yield WeightUpdate(source=WeightSource.SHARED_MEMORY, path=held.name, names=info.names)
    else:
        yield WeightUpdate(
            source=WeightSource.BROADCAST,
            names=info.names or [],
            dtype_names=info.dtype_names or [],
            shapes=info.shapes or [],
        )


@asynccontextmanager
async def weight_update_in_thread(fields: Mapping[str, Any]) -> AsyncIterator[WeightUpdate]:
    """As `weight_update` of `update_info(fields)`: copies bytes and tensors in a thread, and the event loop goes on.

    Raises:
        RequestError: As `update_info`.
    """

    def enter() -> tuple[Any, WeightUpdate]:
        manager = weight_update(update_info(fields), shares_tensors=False)
        return manager, manager.__enter__()

    entering = asyncio.ensure_future(asyncio.to_thread(enter))
    try:
        manager, update = await asyncio.shield(entering)
    except asyncio.CancelledError:  # the thread cannot be stopped, and its copy must not stay
        entering.add_done_callback(_exit_when_entered)
        raise
    try:
        yield update
    finally:
        manager.__exit__(None, None, None)


def _exit_when_entered(entering: asyncio.Future[tuple[Any, WeightUpdate]]) -> None:
    if not entering.cancelled() and entering.exception() is None:
        entering.result()[0].__exit__(None, None, None)


def _named_tensors(tensors: Any) -> dict[str, Any]:
    try:
        named = dict(tensors.items() if isinstance(tensors, Mapping) else tensors)
    except (TypeError, ValueError) as e:
        raise RequestError(
            f"tensors must be a mapping of names to tensors, or (name, tensor) pairs: {e}.", parameter="tensors"
        ) from e
    for name, tensor in named.items():
        if not isinstance(name, str) or not hasattr(tensor, "dtype") or not hasattr(tensor, "untyped_storage"):
            raise RequestError(f"tensors: {name!r:.60} is no name with a tensor.", parameter="tensors")
    return named
