"""Uploads the small host arrays of one batch to the device in one copy."""

from __future__ import annotations

import numpy as np
import torch

from mvllm.platform.staging_buffers import StagingBuffers


class BatchUpload:
    """Collects arrays of numbers, copies them as one float32 tensor, and returns its parts.

    float32 represents integers exactly up to 2**24, enough for rows and token ids. A single dtype needs one copy and no
    bit reinterpretation, which some devices lack.

    Args:
        staging: Buffers to copy from without waiting for the device; None for an ordinary copy.
    """

    def __init__(self, staging: StagingBuffers | None = None) -> None:
        self._staging = staging
        self._parts: list[np.ndarray] = []
        self._tensors: tuple[torch.Tensor, ...] = ()

    def add(self, values: np.ndarray) -> int:
        """Adds a one-dimensional array, before `send`. Returns its key for `get`."""
        self._parts.append(values)
        return len(self._parts) - 1

    def select(self, chosen: np.ndarray) -> RowSelection:
        """A selection of the rows where `chosen`, a boolean array over a batch, is true."""
        indices = np.flatnonzero(chosen)
        whole = len(indices) == len(chosen)
        return RowSelection(self, None if whole else self.add(indices), indices)

    def select_masked(self, chosen: np.ndarray) -> MaskedRowSelection:
        """The same with shapes that do not depend on how many rows are chosen."""
        return MaskedRowSelection(self, self.add(chosen), np.arange(len(chosen)))

    def send(self, device: torch.device) -> None:
        """Copies everything to `device`."""
        if not self._parts:
            return
        sizes = [len(part) for part in self._parts]
        if self._staging is None:
            flat = np.concatenate(self._parts, dtype=np.float32, casting="unsafe")
            self._tensors = torch.from_numpy(flat).to(device, non_blocking=True).split(sizes)
        elif total := sum(sizes):
            host = self._staging.buffer(total, torch.float32)[:total]
            np.concatenate(self._parts, out=host.numpy(), casting="unsafe")
            self._tensors = self._staging.copy_to_device(host).split(sizes)
        else:
            self._tensors = torch.empty(0, dtype=torch.float32, device=device).split(sizes)

    def get(self, key: int) -> torch.Tensor:
        """The array with this key: float32 [m] on the device."""
        return self._tensors[key]

    def get_ids(self, key: int) -> torch.Tensor:
        """The array with this key as int64 [m]."""
        return self._tensors[key].long()


class RowSelection:
    """Some rows of a batch. Selecting all rows costs nothing.

    Attributes:
        indices: int64 [m]: the chosen rows, rising.
    """

    def __init__(self, upload: BatchUpload, key: int | None, indices: np.ndarray) -> None:
        self._upload = upload
        self._key = key
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The chosen rows of `tensor`: a copy, or `tensor` itself if all rows are chosen."""
        return tensor if self._key is None else tensor.index_select(0, self._upload.get_ids(self._key))

    def scatter(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """Writes `source` into the chosen rows of `target`. Returns the result, which may be `source` itself."""
        return source if self._key is None else target.index_copy_(0, self._upload.get_ids(self._key), source)


class MaskedRowSelection(RowSelection):
    """Some rows of a batch for static shapes: all rows are computed, and results of the chosen ones are kept.

    Attributes:
        indices: int64 [n]: all rows, since `gather` returns all.
    """

    def __init__(self, upload: BatchUpload, key: int, indices: np.ndarray) -> None:
        super().__init__(upload, None, indices)
        self._mask = key

    def scatter(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """Returns `target` with the chosen rows replaced by those of `source`, which has all rows."""
        chosen = self._upload.get(self._mask) > 0
        return torch.where(chosen.view(-1, *[1] * (target.dim() - 1)), source, target)
