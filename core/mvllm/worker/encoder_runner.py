"""Runs the encoders of a step's items, keeps their results, and gathers the rows that the step's tokens take.

The scheduler decides what is encoded, and when a result is dropped. Only towers whose items have one shape are compiled
(`FixedShapeTower`). An item whose encoder fails fails the requests that read it, and nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from mvllm.config.encoder_limits import limits_of
from mvllm.config.engine_config import EngineConfig
from mvllm.distributed.group_coordinator import GroupCoordinator
from mvllm.errors import StepMemoryError
from mvllm.logging import get_logger
from mvllm.messages.multimodal import EMBEDS, ArrayData, EncoderInput
from mvllm.messages.scheduler_output import SchedulerOutput
from mvllm.models.item_encoder import Features, ItemEncoder
from mvllm.ops.dtypes import torch_dtype
from mvllm.platform.runtime import DeviceRuntime
from mvllm.worker.item_rows import EmbeddingRows, StepItems, array_of
from mvllm.worker.step_inputs import StepInputs

logger = get_logger(__name__)

_MISSING = "The embeddings of an item of the prompt are missing."


@dataclass
class StepItemTensors:
    """Fields of ForwardStep for a step over positions of items; see there."""

    item_indices: torch.Tensor | None = None
    item_embeds: torch.Tensor | None = None
    rope_positions: torch.Tensor | None = None
    cross_inputs: list[torch.Tensor | None] | None = None
    query_start_loc: np.ndarray | None = None


class EncoderRunner:
    """The encoder cache of one rank. Ranks behind the first pipeline stage have none, but need rotary positions.

    Args:
        config: The engine's configuration.
        runtime: The bound device.
        tp, pp: The rank's groups.
        on_host: Encoders, their results and the tensors of steps are on the host, see BuildContext.

    Attributes:
        max_cache_bytes: Most bytes of the device's memory that the results take that the scheduler keeps here.
    """

    def __init__(
        self,
        config: EngineConfig,
        runtime: DeviceRuntime,
        tp: GroupCoordinator,
        pp: GroupCoordinator,
        *,
        on_host: bool = False,
    ) -> None:
        model = config.model
        self._runtime = runtime
        self._dtype = torch_dtype(model.dtype)
        self._width = model.hidden_size if model.multimodal is None else model.multimodal.embedding_width
        self._num_ranks = tp.world_size * pp.world_size
        self._is_first = pp.is_first
        limits = limits_of(config) if pp.is_first else None
        self._item_tokens = 0 if limits is None else limits.item_tokens
        num_rows = 0 if limits is None else limits.cache_tokens
        self.max_cache_bytes = 0 if on_host else num_rows * self._width * self._dtype.itemsize
        self._on_host = on_host
        # With several stages NaN keeps the wrong keys and values from being used, should the report be overlooked.
        self._missing = 0.0 if pp.is_last else float("nan")
        self._results: dict[bytes, torch.Tensor] = {}
        self._failures: dict[bytes, str] = {}
        self._seconds = 0.0

    def free(self, plan: SchedulerOutput) -> None:
        """Drops the results that a plan frees."""
        for content_hash in plan.freed_encoder_outputs:
            self._results.pop(content_hash, None)
            self._failures.pop(content_hash, None)

    def clear(self) -> None:
        """Drops all results. The scheduler frees them in its next plan, too."""
        self._results.clear()
        self._failures.clear()

    def encode(self, encoder: ItemEncoder | None, inputs: Sequence[EncoderInput]) -> None:
        """Runs the encoders of these items, those of one modality together.

        Raises:
            Exception: There is no memory, and other ranks depend on this one.
        """
        if not self._is_first:
            return
        start = time.perf_counter()
        by_modality: dict[str, list[EncoderInput]] = {}
        for item in inputs:
            by_modality.setdefault(item.modality, []).append(item)
        for modality, items in by_modality.items():
            if not self._try(encoder, modality, items) and len(items) > 1:
                for item in items:  # one of them has failed
                    self._try(encoder, modality, [item])
        self._seconds = time.perf_counter() - start

    def encode_largest_item(self, encoder: ItemEncoder | None) -> None:
        """Runs the encoder once over the largest item that requests may have, if it gives one, for the memory of the
        device that this takes."""
        example = None if encoder is None or self._on_host else encoder.largest_item(self._item_tokens)
        if encoder is not None and example is not None:
            modality, features = example
            encoder.encode(modality, [features])
            self._runtime.synchronize()

    def pop_seconds(self) -> float:
        """`ModelRunnerOutput.encoder_seconds` of the last step."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def tensors(self, items: StepItems, inputs: StepInputs) -> StepItemTensors:
        """The tensors of a step's items.

        Args:
            items: They get an error for each position in the batch whose embeddings are missing.
            inputs: The inputs of the step.
        """
        rope_positions = None
        if items.rope_spans:
            assert inputs.host_positions is not None
            host = np.repeat(inputs.host_positions[None], 3, axis=0)
            for start, positions in items.rope_spans:
                host[:, start : start + positions.shape[1]] = positions
            rope_positions = self._from_numpy(host)
        tensors = StepItemTensors(rope_positions=rope_positions)
        if self._is_first and items.rows:
            tensors.item_indices = self._from_numpy(items.indices)
            tensors.item_embeds = torch.cat([self._rows_of(rows, items.errors) for rows in items.rows])
        if self._is_first and items.cross_items:
            tensors.cross_inputs = [
                self._cross_input(items.cross_items.get(i, ()), i, items.errors) for i in range(len(inputs.rows))
            ]
            tensors.query_start_loc = inputs.layout.query_start_loc
        return tensors

    def _rows_of(self, rows: EmbeddingRows, errors: dict[int, str]) -> torch.Tensor:
        result = self._results.get(rows.content_hash)
        if result is not None:
            return result[rows.start : rows.stop]
        errors[rows.position] = self._failures.get(rows.content_hash, _MISSING)
        missing = np.full((rows.stop - rows.start, self._width), self._missing, dtype=np.float32)
        return self._from_numpy(missing).to(self._dtype)

    def _cross_input(self, hashes: Sequence[bytes], position: int, errors: dict[int, str]) -> torch.Tensor | None:
        """The results of a request's items behind each other; None without any."""
        found = []
        for content_hash in hashes:
            result = self._results.get(content_hash)
            if result is None:
                errors[position] = self._failures.get(content_hash, _MISSING)
                return None
            found.append(result)
        return None if not found else found[0] if len(found) == 1 else torch.cat(found)

    def _try(self, encoder: ItemEncoder | None, modality: str, items: Sequence[EncoderInput]) -> bool:
        """Encodes items together. Returns False if that fails; a single item's failure is stored."""
        try:
            features = [self._upload(item) for item in items]
            if modality == EMBEDS:
                # Other parts of rows are added behind layers (DeepStack), to tokens of images only.
                results = [F.pad(each[EMBEDS], (0, self._width - each[EMBEDS].shape[1])) for each in features]
            else:
                assert encoder is not None, "the model has no encoder"
                results = encoder.encode(modality, features)
            self._check(items, results)
        except Exception as e:
            is_memory = isinstance(e, StepMemoryError | MemoryError) or self._runtime.is_out_of_memory(e)
            if is_memory and self._num_ranks > 1:
                raise
            if len(items) == 1:
                reason = (str(e) or type(e).__name__).splitlines()[0].rstrip(".")
                place = "host" if self._on_host else "device"
                what = f"does not fit into the {place}'s memory" if is_memory else "cannot be encoded"
                self._failures[items[0].content_hash] = f"An item of modality {modality!r} {what}: {reason}."
                logger.exception("An item of modality %r %s.", modality, what)
            if is_memory:
                self._runtime.release_cached_memory()
            return False
        for item, result in zip(items, results, strict=True):
            result = result.to(self._dtype)
            if result.untyped_storage().nbytes() > result.nbytes:  # a part of the results of all items
                result = result.clone()
            self._results[item.content_hash] = result
            self._failures.pop(item.content_hash, None)
        return True

    def _from_numpy(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array) if self._on_host else self._runtime.from_numpy(array)

    def _upload(self, item: EncoderInput) -> Features:
        tensors = {name: _tensor_of(data) for name, data in item.features.items()}
        if not self._on_host:
            tensors = {name: self._runtime.to_device(each) for name, each in tensors.items()}
        return {name: each.to(self._dtype) if each.is_floating_point() else each for name, each in tensors.items()}

    def _check(self, items: Sequence[EncoderInput], results: Sequence[torch.Tensor]) -> None:
        if len(results) != len(items):
            raise ValueError(f"the encoder returned {len(results)} results for {len(items)} items")
        for item, result in zip(items, results, strict=True):
            if result.shape != (item.num_encoded, self._width):
                raise ValueError(
                    f"the encoder returned embeddings of shape {tuple(result.shape)}, where the prompt has a place for "
                    f"({item.num_encoded}, {self._width})"
                )


def _tensor_of(data: ArrayData) -> torch.Tensor:
    """A copy on the host."""
    if data.dtype == "bfloat16":  # numpy does not have it
        return torch.from_numpy(array_of(ArrayData("int16", data.shape, data.data)).copy()).view(torch.bfloat16)
    return torch.from_numpy(array_of(data).copy())
