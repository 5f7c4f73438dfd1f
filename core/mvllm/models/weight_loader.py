"""Fills a model's parameters from a checkpoint.

The model lists, for each tensor of its checkpoint, which rectangle goes where (`WeightTarget`). These lists are
compared with the checkpoint's header before any data is read. Then each rectangle is read into its destination, through
a small buffer where it has to be converted or cut. A callback reports each loaded tensor, so that a layer can be
converted to its final form while it is in the CPU cache. Peak memory is the weights plus that buffer plus one layer.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from mvllm.checkpoint_formats.registry import is_derived_folder, is_format, load_format_names
from mvllm.checkpoint_formats.tensor_entry import TensorEntry, TensorReader, packed_name
from mvllm.config.tokenizer_check import check_tokenizer
from mvllm.errors import ConfigError, ModelError
from mvllm.layers.weight_target import WeightTarget
from mvllm.models.checkpoint import read_checkpoint
from mvllm.models.dummy_weights import DummyTensors
from mvllm.models.expert_stack import check_quantized_stacks, split_expert_stack
from mvllm.models.safetensors_file import MOST_TENSORS
from mvllm.models.tied_head import check_tied_head
from mvllm.progress import show_progress

__all__ = ["LoadableModel", "check_tokenizer", "load_weights"]

BUFFER_BYTES = 1 << 20
"""Fits a second-level cache, which makes the second copy cheap."""

# Dtypes that are converted to the model's floating-point dtype.
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Dtypes of quantized weights, which are not converted.
_INTEGERS = {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8}
# Likewise; these have scales in other tensors.
_EIGHT_BIT_FLOATS = {"F8_E4M3": torch.float8_e4m3fn}
DTYPES = _FLOATS | _INTEGERS | _EIGHT_BIT_FLOATS
"""Dtypes that can be loaded, by their names in a header."""


class LoadableModel(Protocol):
    """The methods of a model that the loader uses."""

    def weight_targets(self) -> Mapping[str, list[WeightTarget]]:
        """The targets of each checkpoint tensor on this rank."""

    def ignores(self, name: str) -> bool:
        """Whether a checkpoint tensor may be left unread."""

    def given_name(self, name: str) -> str:
        """The name in `weight_targets` of a checkpoint tensor."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """As nn.Module's."""


def load_weights(
    model: LoadableModel,
    folder: Path,
    *,
    load_format: str = "auto",
    use_tqdm: bool = True,
    seed: int = 0,
    on_loaded: Callable[[str], None] = lambda name: None,
    allocate: Callable[[nn.Parameter], None] | None = None,
) -> None:
    """Fills every parameter of `model`; values are converted to each parameter's dtype and device on the way.

    Padding, which no tensor fills, becomes zero. The caller calls `after_load`.

    Args:
        folder: The model folder. `dummy` reads nothing from it.
        load_format: `dummy` draws small random values that depend only on `seed` and each tensor's name, whatever the
            number of ranks; all others read the checkpoint.
        use_tqdm: Show progress on stderr.
        seed: For `dummy`.
        on_loaded: Called with a checkpoint tensor's name when all its targets are filled.
        allocate: Gives a parameter its memory, zeros; called before each of its tensors. None: they have memory.

    Raises:
        ModelError: The checkpoint does not fit the model; names file, tensor, what was expected and found.
        ConfigError: There is no such load format.
    """
    targets = dict(model.weight_targets())  # what has been filled is dropped from it, so that its memory may be freed
    _check_every_parameter_is_targeted(model, targets)
    if allocate is None:
        allocate = _has_memory
        to_zero = targets
    else:
        to_zero = {}
    if load_format == "dummy":
        _zero_padding(to_zero)
        _fill_dummy(targets, seed, on_loaded, allocate)
        return
    if load_format not in ("auto", "safetensors") and not is_format(load_format):
        raise ConfigError(
            f"load_format must be one of {', '.join(map(repr, load_format_names()))}, found {load_format!r}."
        )
    # A head was preceded by the served model, whose checkpoint it is: most of the tensors are that model's.
    is_of_head = getattr(model, "is_of_served_checkpoint", False)
    most_tensors = MOST_TENSORS if is_of_head else _most_tensors(len(targets))
    checkpoint = read_checkpoint(folder, most_tensors, packed=lambda name: packed_name(name) in targets)
    entries = match_names(checkpoint, model, targets, folder)
    tied = getattr(model, "tied_names", None)
    if tied is not None and not is_derived_folder(folder):
        check_tied_head(checkpoint, model.given_name, *tied)
    targets.update({name: targets_as_stored(entry, targets[name]) for name, entry in entries.items()})
    check_tensors(entries, targets, _vocab_size(model))
    _zero_padding(to_zero)
    _copy_all(entries, targets, use_tqdm, on_loaded, allocate)


# ---------------------------------------------------------------------------------------------- before any data is read


def _most_tensors(num_targets: int) -> int:
    """Maximum number of tensors of a checkpoint, given the number that this rank uses: other ranks use others, and some
    are unused. Far more than that is a mistake or an attack, and takes minutes and gigabytes to list.
    """
    return min(MOST_TENSORS, 64 * num_targets + 4096)


def match_names(
    checkpoint: Mapping[str, TensorEntry],
    model: LoadableModel,
    targets: Mapping[str, list[WeightTarget]],
    folder: Path,
    *,
    allow_missing: bool = False,
) -> dict[str, TensorEntry]:
    """Checkpoint entries by the model's names, without those that the model ignores.

    A tensor that stacks the matrices of all experts has an entry for each matrix (see expert_stack.py).

    Some checkpoints were saved without head and omit the first component of every name (`h.0.ln_1.weight` for
    `transformer.h.0.ln_1.weight`); it is added if only that makes the name known.

    Args:
        allow_missing: Whether the checkpoint may have only some of the model's tensors.

    Raises:
        ModelError: A tensor is unknown, missing, or there twice.
    """
    prefixes = _prefixes(targets)
    matched: dict[str, TensorEntry] = {}
    unknown: list[TensorEntry] = []
    for name, entry in checkpoint.items():
        given = model.given_name(name)
        candidates = [given, *(prefix + given for prefix in prefixes)]
        known = next((c for c in candidates if c in targets), None)
        if known is None:
            parts = split_expert_stack(given, entry, targets)
            again = next((part for part in parts if part in matched), None)
            if again is not None:
                raise ModelError(f"{entry.file}: tensors {matched[again].name!r} and {name!r} are both for {again!r}.")
            matched.update(parts)
            if not parts and not any(model.ignores(candidate) for candidate in candidates):
                unknown.append(entry)
        elif known in matched:
            raise ModelError(f"{entry.file}: tensors {matched[known].name!r} and {name!r} are both for {known!r}.")
        else:
            matched[known] = entry
    missing = [] if allow_missing else [name for name in targets if name not in matched]
    check_quantized_stacks(unknown, [(entry, targets[name]) for name, entry in matched.items()])
    if unknown or missing:
        raise ModelError(_mismatch(model, unknown, missing, targets, folder))
    return matched


def _prefixes(targets: Iterable[str]) -> list[str]:
    """First components that contain modules (`model.`), not those that are a module themselves (`lm_head.`)."""
    return sorted({name.split(".", 1)[0] + "." for name in targets if name.count(".") >= 2})


def _mismatch(
    model: LoadableModel,
    unknown: list[TensorEntry],
    missing: list[str],
    targets: Iterable[str],
    folder: Path,
    most: int = 5,
) -> str:
    lines = [f"The weights in {folder} are not those of {type(model).__name__}:"]
    for entry in unknown[:most]:
        nearest = difflib.get_close_matches(entry.name[:200], missing or list(targets), n=1, cutoff=0.6)
        hint = f"; the nearest that it has is {nearest[0]!r}" if nearest else ""
        lines.append(
            f"  unknown tensor {entry.name[:200]!r} in {entry.file.name}, which the model has no place for{hint}"
        )
    if len(unknown) > most:
        lines.append(f"  and {len(unknown) - most} more unknown tensors")
    lines.extend(f"  missing tensor {name!r}, which no file holds" for name in missing[:most])
    if len(missing) > most:
        lines.append(f"  and {len(missing) - most} more missing tensors")
    hf_config = getattr(getattr(model, "config", None), "hf_config", {})
    of_head = missing and not unknown and all(name.startswith("lm_head.") for name in missing)
    if of_head and "tie_word_embeddings" not in hf_config:
        lines.append(
            "The checkpoint has no language-model head, and config.json does not say whether the token embedding is "
            "it. Pass hf_overrides={'tie_word_embeddings': True} if it is, or False to make embeddings without a head."
        )
    else:
        lines.append("Check that config.json and the weights belong together, and that no file is missing.")
    return "\n".join(lines)


def targets_as_stored(entry: TensorEntry, targets: list[WeightTarget]) -> list[WeightTarget]:
    """The targets of a tensor, adapted if its matrices are stored the other way around than the model expects.

    Those of a stack of experts that the model expects transposed are recognised by their shape.
    """
    expected, found = tuple(targets[0].source_shape), entry.shape
    is_stack = len(expected) == len(found) == 3 and targets[0].transpose and found != expected
    if entry.transposed or (is_stack and found == (expected[0], expected[2], expected[1])):
        return [transposed_target(target) for target in targets]
    return targets


def transposed_target(target: WeightTarget) -> WeightTarget:
    """The target for a tensor whose matrices are stored the other way around."""
    (*outer, rows, columns), (*leading, height, width) = target.source, target.source_shape
    source, shape = (*outer, columns, rows), (*leading, width, height)
    return replace(target, source=source, source_shape=shape, transpose=not target.transpose)


def check_tensors(
    entries: Mapping[str, TensorEntry], targets: Mapping[str, list[WeightTarget]], vocab_size: int | None
) -> None:
    """Compares shapes and dtypes.

    Raises:
        ModelError: Names file, tensor, expected and found.
    """
    for name, entry in entries.items():
        for target in targets[name]:
            if entry.shape != tuple(target.source_shape) and not _both_scalars(entry.shape, target.source_shape):
                raise ModelError(_wrong_shape(entry, target, vocab_size))
            fitting = _fitting(target.parameter.dtype)
            if entry.dtype not in fitting:
                raise ModelError(
                    f"{entry.file}: tensor {entry.name!r} has dtype {entry.dtype}, expected one of "
                    f"{', '.join(fitting)}. If the checkpoint is quantized, its config.json should say how "
                    "(quantization_config)."
                )


def _both_scalars(found: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    """Checkpoints store the scale of a whole matrix as a scalar, a vector or a matrix."""
    return math.prod(found) == math.prod(expected) == 1


def _fitting(wanted: torch.dtype) -> list[str]:
    """Checkpoint dtypes that can fill a parameter of dtype `wanted`."""
    if wanted in _FLOATS.values():
        return list(_FLOATS)
    return [name for name, dtype in DTYPES.items() if dtype == wanted]


def _wrong_shape(entry: TensorEntry, target: WeightTarget, vocab_size: int | None) -> str:
    expected = tuple(target.source_shape)
    text = f"{entry.file}: tensor {entry.name!r} has shape {list(entry.shape)}, expected {list(expected)}"
    if vocab_size is not None and expected[:1] == (vocab_size,) and entry.shape[1:] == expected[1:]:
        return (
            f"{text}: it has rows for {entry.shape[0]} tokens, but vocab_size in config.json is {vocab_size}. Check "
            "that both come from the same model."
        )
    return f"{text} according to config.json. Check that config.json and the weights belong together."


def _check_every_parameter_is_targeted(model: LoadableModel, targets: Mapping[str, list[WeightTarget]]) -> None:
    """A model file that forgets one of its own parameters is a mistake of its author."""
    targeted = {id(target.parameter) for of_name in targets.values() for target in of_name}
    forgotten = [name for name, parameter in model.named_parameters() if id(parameter) not in targeted]
    if forgotten:
        raise TypeError(f"{type(model).__name__}.weight_targets() leaves out the parameters {', '.join(forgotten)}.")


def _vocab_size(model: LoadableModel) -> int | None:
    return getattr(getattr(model, "config", None), "vocab_size", None)


# -------------------------------------------------------------------------------------------------------------- copying


def _has_memory(parameter: nn.Parameter) -> None:
    pass


def _zero_padding(targets: Mapping[str, list[WeightTarget]]) -> None:
    """Sets parameters to zero that the checkpoint does not fill completely, since they are uninitialised."""
    unfilled: dict[int, tuple[nn.Parameter, int]] = {}
    for of_name in targets.values():
        for target in of_name:
            parameter, missing = unfilled.get(id(target.parameter), (target.parameter, target.parameter.numel()))
            unfilled[id(parameter)] = parameter, missing - rectangle_of(target)[2].numel()
    for parameter, missing in unfilled.values():
        if missing > 0:
            parameter.detach().zero_()


def _copy_all(
    entries: Mapping[str, TensorEntry],
    targets: dict[str, list[WeightTarget]],
    use_tqdm: bool,
    on_loaded: Callable[[str], None],
    allocate: Callable[[nn.Parameter], None],
) -> None:
    """Copies all tensors, file by file, in the order of their data."""
    buffer = bytearray(BUFFER_BYTES)
    ordered = sorted(entries.items(), key=lambda item: (item[1].file, item[1].start))
    with ExitStack() as stack:
        progress = stack.enter_context(_progress(sum(e.num_bytes for e in entries.values()), use_tqdm))
        reader: TensorReader | None = None
        open_file: Path | None = None
        with ExitStack() as files:
            for name, entry in ordered:
                if entry.file != open_file:
                    files.close()
                    reader, open_file = files.enter_context(entry.open_reader()), entry.file
                    progress.set_postfix_str(entry.file.name, refresh=False)
                assert reader is not None
                for target in targets.pop(name):
                    allocate(target.parameter)
                    buffer = read_target(reader, entry, target, buffer)
                del target
                on_loaded(name)
                progress.update(entry.num_bytes)


def read_target(reader: TensorReader, entry: TensorEntry, target: WeightTarget, buffer: bytearray) -> bytearray:
    """Copies one rectangle, a few rows at a time; returns the buffer, which grows if one row needs it.

    Only the columns of the rectangle are read of each row, so a rank reads only its shard.
    """
    dtype = DTYPES[entry.dtype]
    shape, source, destination = rectangle_of(target)
    if destination.numel() == 0:
        return buffer
    place = _bytes_of(destination) if destination.dtype == dtype and _takes_whole_rows(target) else None
    if place is not None:
        reader.read_into(place, entry, source[0].start * math.prod(shape[1:]) * dtype.itemsize)
        return buffer
    if len(shape) == 1:
        shape, source, destination = (*shape, 1), (*source, slice(0, 1)), destination.unsqueeze(1)
    rows, columns = source[:2]
    every_one = slice(None, None, columns.step)
    column_bytes = math.prod(shape[2:]) * dtype.itemsize  # dimensions after the second are read whole
    row_bytes, part_bytes = shape[1] * column_bytes, (columns.stop - columns.start) * column_bytes
    if len(shape) > 2 and columns.step not in (None, 1):
        _copy_every(reader, entry, target, buffer)
        return buffer
    if part_bytes > len(buffer):
        buffer = bytearray(part_bytes)
    rows_at_once = len(buffer) // part_bytes
    for start in range(rows.start, rows.stop, rows_at_once):
        stop = min(start + rows_at_once, rows.stop)
        view = memoryview(buffer)[: (stop - start) * part_bytes]
        offset = start * row_bytes + columns.start * column_bytes
        reader.read_strided(view, entry, offset, part_bytes, row_bytes)
        chunk = torch.frombuffer(view, dtype=dtype).view(stop - start, columns.stop - columns.start, *shape[2:])
        destination[start - rows.start : stop - rows.start].copy_(chunk[(slice(None), every_one, *source[2:])])
    return buffer


def _copy_every(reader: TensorReader, entry: TensorEntry, target: WeightTarget, buffer: bytearray) -> None:
    """Copies every n-th row of each matrix of a stack, without reading those in between."""
    dtype = DTYPES[entry.dtype]
    shape, (matrices, rows, *rest), destination = rectangle_of(target)
    row_bytes = math.prod(shape[2:]) * dtype.itemsize
    at_once = max(1, len(buffer) // row_bytes)
    view = memoryview(buffer if row_bytes <= len(buffer) else bytearray(row_bytes))
    for i, matrix in enumerate(range(matrices.start, matrices.stop)):
        for start in range(0, destination.shape[1], at_once):
            count = min(at_once, destination.shape[1] - start)
            first = matrix * shape[1] + rows.start + start * rows.step
            part = view[: count * row_bytes]
            reader.read_strided(part, entry, first * row_bytes, row_bytes, rows.step * row_bytes)
            chunk = torch.frombuffer(part, dtype=dtype).view(count, *shape[2:])
            destination[i, start : start + count].copy_(chunk[(slice(None), *rest)])


def _fill_dummy(
    targets: dict[str, list[WeightTarget]],
    seed: int,
    on_loaded: Callable[[str], None],
    allocate: Callable[[nn.Parameter], None],
) -> None:
    tensors = DummyTensors(seed)
    for name in list(targets):
        for target in targets.pop(name):
            allocate(target.parameter)
            _draw(tensors, name, target)
        del target
        on_loaded(name)


def _draw(tensors: DummyTensors, name: str, target: WeightTarget) -> None:
    shape, source, destination = rectangle_of(target)
    rows = source[0]
    for start, values in tensors.rows(name, shape, rows.start, rows.stop):
        chunk = torch.from_numpy(values)[(slice(None), *source[1:])]
        destination[start - rows.start : start - rows.start + len(values)].copy_(chunk)


def rectangle_of(target: WeightTarget) -> tuple[tuple[int, ...], tuple[slice, ...], torch.Tensor]:
    """The checkpoint tensor's shape, the slices to read, and a view of the destination with the same dimensions.

    A scalar counts as a tensor of one row.
    """
    if not target.source_shape:
        return (1,), (slice(0, 1),), target.parameter.detach().view(1)
    destination = target.parameter.detach()[target.destination]
    if target.transpose:
        destination = destination.transpose(-2, -1)
    return tuple(target.source_shape), target.source, destination


def _bytes_of(tensor: torch.Tensor) -> memoryview | None:
    """The memory of `tensor` if it is contiguous host memory, else None."""
    if not tensor.is_contiguous():
        return None
    try:
        return tensor.view(-1).view(torch.uint8).numpy().data
    except (TypeError, RuntimeError):  # not host memory
        return None


def _takes_whole_rows(target: WeightTarget) -> bool:
    """Whether the source is contiguous in the file and in the order of the destination."""
    columns = zip(target.source[1:], target.source_shape[1:], strict=True)
    return not target.transpose and all(part == slice(0, size) for part, size in columns)


def _progress(total: int, use_tqdm: bool) -> Any:
    settings: dict[str, Any] = {"unit": "B", "unit_scale": True, "unit_divisor": 1024}
    return show_progress(total, "Loading weights", disable=not use_tqdm, **settings)
