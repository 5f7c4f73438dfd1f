"""Updates of the weights of one worker: reads the tensors of a WeightUpdate from where they are.

The engine core calls `start`, then `check` and `update` for each part, then `check_complete` and `finish`. Only
`update` and `finish` write to the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

import torch

from mvllm.checkpoint_formats.registry import checkpoint_format, format_of_file
from mvllm.checkpoint_formats.tensor_entry import TensorEntry, TensorReader
from mvllm.distributed.weight_transfer import JoiningWeightTransferGroup, WeightTransferGroup
from mvllm.errors import RequestError
from mvllm.layers.weight_target import WeightTarget
from mvllm.messages.weights import WeightSource, WeightTransferInfo, WeightUpdate
from mvllm.models.checkpoint import read_checkpoint
from mvllm.models.safetensors_file import DTYPE_NAMES, read_header
from mvllm.models.shared_memory_weights import segment_path
from mvllm.models.weight_loader import BUFFER_BYTES, DTYPES, read_target, rectangle_of
from mvllm.models.weight_update import CopyTensor, ModelWeightUpdate, WeightUpdateWithHead
from mvllm.platform.runtime import DeviceRuntime

Entries = dict[str, TensorEntry]
ModelUpdate = ModelWeightUpdate | WeightUpdateWithHead


class WeightUpdater:
    """The weight updates of one worker.

    Args:
        start_model_update: Starts an update of the loaded model.
        runtime: The device.
        rank: The worker's rank, for the trainer's process group.
    """

    def __init__(self, start_model_update: Callable[[], ModelUpdate], runtime: DeviceRuntime, rank: int) -> None:
        self._start_model_update = start_model_update
        self._runtime = runtime
        self._rank = rank
        self._update: ModelUpdate | None = None
        self._checked: tuple[WeightUpdate, Entries] | None = None
        self._group: WeightTransferGroup | None = None
        self._joining: JoiningWeightTransferGroup | None = None

    def join(self, info: WeightTransferInfo) -> None:
        """Begins to join the trainer's process group, in place of an earlier one; see `has_joined`.

        Raises:
            RequestError: Another group is being joined, or this worker has no rank in the group.
        """
        if self._joining is not None:
            raise RequestError(
                f"This engine is still joining the weight transfer group at {self._joining.address}. Let its trainer "
                "join, or wait until the timeout of that call has passed."
            )
        joining = JoiningWeightTransferGroup(info, info.rank_offset + self._rank)
        self.leave()
        self._joining = joining

    def has_joined(self, *, give_up: bool = False) -> bool:
        """Whether the group of `join` is complete.

        Args:
            give_up: Stop waiting for it.

        Raises:
            RequestError: It cannot be joined, or its timeout has passed.
        """
        joining = self._joining
        if joining is None:
            return self._group is not None
        if give_up:
            self._joining = None
            joining.give_up()
            return False
        try:
            self._group = joining.poll()
        except BaseException:
            self._joining = None
            raise
        if self._group is not None:
            self._joining = None
        return self._group is not None

    def leave(self) -> None:
        """Leaves the trainer's process group, or stops waiting for it. Idempotent."""
        self.has_joined(give_up=True)
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def start(self) -> None:
        """Begins an update; an earlier one that was not finished is dropped."""
        self._update = self._checked = None
        self._update = self._start_model_update()

    def check(self, update: WeightUpdate) -> None:
        """Compares the names, shapes and dtypes of a part of the update with the model. Reads no values.

        Raises:
            ModelError, RequestError: They do not fit, or the source cannot be read.
        """
        current = self._started()
        found, where = self._entries(update, current)
        if update.names is not None:
            missing = [name for name in update.names if name not in found]
            if missing:
                raise RequestError(f"{where} has no tensor {missing[0]!r}.", parameter="names")
            found = {name: found[name] for name in update.names}
        whole = update.source is WeightSource.FOLDER and update.names is None
        matched = current.check(found, where, whole=whole)
        if update.is_only_part:
            current.check_complete(upcoming=matched)
        self._checked = update, matched

    def update(self, update: WeightUpdate) -> None:
        """Loads the part of the update that `check` has checked last."""
        assert self._checked is not None, "check comes first"
        (_, matched), self._checked = self._checked, None
        current = self._started()
        if update.source is WeightSource.BROADCAST:
            self._receive(update, matched, current)
        elif update.source is WeightSource.TENSORS:
            for name, entry in matched.items():
                tensor: torch.Tensor = update.tensors[entry.name]
                current.load(name, entry, _copy_from(tensor))
        else:
            _read_files(matched, current)

    def check_complete(self, *, whole: bool) -> None:
        """Raises RequestError if tensors of a module are missing, or with `whole` any tensor of the model."""
        self._started().check_complete(whole=whole)

    def finish(self) -> bool:
        """Ends the update. Returns whether weights have moved, so that captured steps are invalid."""
        update = self._started()
        update.finish()
        self._runtime.synchronize()
        self._update = None
        return update.storage_replaced

    def abandon(self) -> None:
        """Drops the update. What it has written stays."""
        self._update = self._checked = None

    def _started(self) -> ModelUpdate:
        assert self._update is not None, "start comes first"
        return self._update

    def _entries(self, update: WeightUpdate, current: ModelUpdate) -> tuple[Mapping[str, TensorEntry], Path]:
        match update.source:
            case WeightSource.FOLDER:
                folder = Path(update.path)
                if folder.is_file() and (name := format_of_file(folder.name)) is not None:
                    folder = checkpoint_format(name, str(folder)).model_folder(folder, with_tokenizer=False)
                return read_checkpoint(folder, packed=current.is_packed), folder
            case WeightSource.SHARED_MEMORY:
                path = segment_path(update.path)
                return {entry.name: entry for entry in read_header(path, is_segment=True)}, path
            case WeightSource.TENSORS:
                where = Path("the tensors given")
                return {name: _entry(name, where, t.dtype, t.shape) for name, t in update.tensors.items()}, where
        if self._group is None:
            raise RequestError(
                "Weights are to be received from a trainer's process group, but this engine has joined none yet. Call "
                "init_weight_transfer_engine first, or give a path or tensors."
            )
        where, names = Path("the tensors announced"), update.names or []
        if not len(names) == len(update.dtype_names) == len(update.shapes):
            raise RequestError("names, dtype_names and shapes must have one entry per tensor.", parameter="names")
        found = {}
        for name, dtype, shape in zip(names, update.dtype_names, update.shapes, strict=True):
            found[name] = _entry(name, where, _dtype(dtype), shape)
        return found, where

    def _receive(self, update: WeightUpdate, matched: Entries, current: ModelUpdate) -> None:
        """Receives all tensors in the order of the broadcast, also those of other ranks."""
        assert self._group is not None, "checked"
        own: dict[str, list[tuple[str, TensorEntry]]] = {}
        for name, entry in matched.items():
            own.setdefault(entry.name, []).append((name, entry))
        device = None if self._group.on_host else self._runtime.device
        for name, dtype, shape in zip(update.names or [], update.dtype_names, update.shapes, strict=True):
            tensor = torch.empty(shape, dtype=_dtype(dtype), device=device)
            self._group.broadcast(tensor)
            for each in own.get(name, ()):
                current.load(*each, _copy_from(tensor))


def copy_tensor(tensor: torch.Tensor, target: WeightTarget) -> None:
    """Copies the rectangle of a whole checkpoint tensor that a target names."""
    shape, source, destination = rectangle_of(target)
    with torch.no_grad():
        destination.copy_(tensor.detach().reshape(shape)[source])


def _copy_from(tensor: torch.Tensor) -> CopyTensor:
    """Copies from a tensor in memory. An entry may be one of the matrices that it stacks (see expert_stack.py)."""

    def copy(entry: TensorEntry, target: WeightTarget) -> None:
        size, start = math.prod(entry.shape), entry.start // tensor.dtype.itemsize
        values = tensor if tensor.numel() == size else tensor.detach().reshape(-1)[start : start + size]
        copy_tensor(values, target)

    return copy


def _read_files(matched: Entries, current: ModelUpdate) -> None:
    """Reads tensors file by file, in the order of their data."""
    buffer = bytearray(BUFFER_BYTES)

    with ExitStack() as files:
        reader: TensorReader | None = None
        open_file: Path | None = None

        def copy(entry: TensorEntry, target: WeightTarget) -> None:
            nonlocal buffer
            assert reader is not None
            buffer = read_target(reader, entry, target, buffer)

        for name, entry in sorted(matched.items(), key=lambda item: (item[1].file, item[1].start)):
            if entry.file != open_file:
                files.close()
                reader, open_file = files.enter_context(entry.open_reader()), entry.file
            current.load(name, entry, copy)


def _entry(name: str, where: Path, dtype: torch.dtype, shape: torch.Size | list[int]) -> TensorEntry:
    known = DTYPE_NAMES.get(str(dtype).removeprefix("torch."))
    if known is None:
        raise RequestError(f"Tensor {name!r} has dtype {dtype}, which no checkpoint has.")
    return TensorEntry(name, where, known, tuple(shape), 0, math.prod(shape) * dtype.itemsize)


def _dtype(name: str) -> torch.dtype:
    dtype = DTYPES.get(DTYPE_NAMES.get(name.removeprefix("torch."), ""))
    if dtype is None:
        known = ", ".join(torch_name for torch_name, header_name in DTYPE_NAMES.items() if header_name in DTYPES)
        raise RequestError(f"dtype_names: {name!r:.40} is not one of {known}.", parameter="dtype_names")
    return dtype
