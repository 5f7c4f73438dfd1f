"""The ways in which checkpoints pack integers; the pictures are in the modules of the methods."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from mvllm.layers.quantization.packed_matrix import Packing, Share, Stored, unpack

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class AWQPacking(Packing):
    """`qweight`, `qzeros` and `scales`, each [in or groups, out]."""

    def tensors(self, share: Share, *, symmetric: bool) -> Mapping[str, Stored]:
        words, covering = share.words(share.num_rows), share.covering(share.rows)
        return {
            "qweight": Stored((share.num_columns, words), (share.columns, covering), torch.int32),
            "qzeros": Stored((share.num_groups, words), (share.groups, covering), torch.int32),
            "scales": Stored((share.num_groups, share.num_rows), (share.groups, share.rows), torch.float32),
        }

    def values(self, share: Share, read: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self._unpacked(share, read["qweight"])

    def scales(self, share: Share, read: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return read["scales"].T

    def zero_points(self, share: Share, read: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        return self._unpacked(share, read["qzeros"])

    def _unpacked(self, share: Share, words: torch.Tensor) -> torch.Tensor:
        return share.trim(unpack(words, share.bits, dim=1, order=_AWQ_ORDER), share.rows, dim=1).T


class GPTQPacking(Packing):
    """`qweight` [in, out] packed along the inputs, `qzeros` [groups, out] along the outputs, `scales` [groups, out].

    Args:
        zeros_less_one: Zero points are stored less one, and a zero as the largest value.
    """

    def __init__(self, *, zeros_less_one: bool) -> None:
        self._zeros_less_one = zeros_less_one

    def tensors(self, share: Share, *, symmetric: bool) -> Mapping[str, Stored]:
        words_in, words_out = share.words(share.num_columns), share.words(share.num_rows)
        return {
            "qweight": Stored((words_in, share.num_rows), (share.covering(share.columns), share.rows), torch.int32),
            "qzeros": Stored((share.num_groups, words_out), (share.groups, share.covering(share.rows)), torch.int32),
            "scales": Stored((share.num_groups, share.num_rows), (share.groups, share.rows), torch.float32),
        }

    def values(self, share: Share, read: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return share.trim(unpack(read["qweight"], share.bits, dim=0), share.columns, dim=0).T

    def scales(self, share: Share, read: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return read["scales"].T

    def zero_points(self, share: Share, read: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        zeros = share.trim(unpack(read["qzeros"], share.bits, dim=1), share.rows, dim=1).T
        if not self._zeros_less_one:
            return zeros
        largest = share.middle - 1
        return torch.where(zeros == largest, -share.middle, zeros + 1).to(torch.int8)


class IntQuantizedPacking(Packing):
    """compressed-tensors `int-quantized`: `weight` is int8 [out, in], with scales and zero points [out, groups]."""

    def tensors(self, share: Share, *, symmetric: bool) -> Mapping[str, Stored]:
        per_group = (share.num_rows, share.num_groups), (share.rows, share.groups)
        tensors = {
            "weight": Stored((share.num_rows, share.num_columns), (share.rows, share.columns), torch.int8),
            "weight_scale": Stored(*per_group, torch.float32),
        }
        return tensors if symmetric else {**tensors, "weight_zero_point": Stored(*per_group, torch.int8)}

    def values(self, share: Share, read: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return read["weight"]

    def scales(self, share: Share, read: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return read["weight_scale"]

    def zero_points(self, share: Share, read: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        return read.get("weight_zero_point")


class PackQuantizedPacking(Packing):
    """compressed-tensors `pack-quantized`: `weight_packed` [out, in] along inputs, zero points along outputs."""

    def tensors(self, share: Share, *, symmetric: bool) -> Mapping[str, Stored]:
        tensors = {
            "weight_packed": Stored(
                (share.num_rows, share.words(share.num_columns)),
                (share.rows, share.covering(share.columns)),
                torch.int32,
            ),
            "weight_scale": Stored((share.num_rows, share.num_groups), (share.rows, share.groups), torch.float32),
        }
        if not symmetric:
            tensors["weight_zero_point"] = Stored(
                (share.words(share.num_rows), share.num_groups),
                (share.covering(share.rows), share.groups),
                torch.int32,
            )
        return tensors

    def values(self, share: Share, read: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return share.trim(unpack(read["weight_packed"], share.bits, dim=1), share.columns, dim=1)

    def scales(self, share: Share, read: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return read["weight_scale"]

    def zero_points(self, share: Share, read: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        if "weight_zero_point" not in read:
            return None
        return share.trim(unpack(read["weight_zero_point"], share.bits, dim=0), share.rows, dim=0)
