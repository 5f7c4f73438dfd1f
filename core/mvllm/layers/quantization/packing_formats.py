"""The packing formats of AWQ, GPTQ and compressed-tensors; the methods' modules show their layouts."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from mvllm.layers.quantization.packed_matrix import CheckpointPart, MatrixShard, Packing, unpack

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class AWQPacking(Packing):
    """`qweight`, `qzeros` and `scales`, each [in or groups, out]."""

    def tensors(self, share: MatrixShard, *, symmetric: bool) -> Mapping[str, CheckpointPart]:
        words, covering = share.words(share.num_rows), share.covering(share.rows)
        return {
            "qweight": CheckpointPart((share.num_columns, words), (share.columns, covering), torch.int32),
            "qzeros": CheckpointPart((share.num_groups, words), (share.groups, covering), torch.int32),
            "scales": CheckpointPart((share.num_groups, share.num_rows), (share.groups, share.rows), torch.float32),
        }

    def values(self, share: MatrixShard, read: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self._unpacked(share, read["qweight"])

    def scales(self, share: MatrixShard, read: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return read["scales"].T

    def zero_points(self, share: MatrixShard, read: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        return self._unpacked(share, read["qzeros"])

    def _unpacked(self, share: MatrixShard, words: torch.Tensor) -> torch.Tensor:
        return share.trim(unpack(words, share.bits, dim=1, order=_AWQ_ORDER), share.rows, dim=1).T


class GPTQPacking(Packing):
    """`qweight` [in, out] packed along the inputs, `qzeros` [groups, out] along the outputs, `scales` [groups, out].

    Args:
        zeros_less_one: Zero points are stored minus one; zero wraps around to the largest value.
    """

    def __init__(self, *, zeros_less_one: bool) -> None:
        self._zeros_less_one = zeros_less_one

    def tensors(self, share: MatrixShard, *, symmetric: bool) -> Mapping[str, CheckpointPart]:
        words_in, words_out = share.words(share.num_columns), share.words(share.num_rows)
        return {
            "qweight": CheckpointPart(
                (words_in, share.num_rows), (share.covering(share.columns), share.rows), torch.int32
            ),
            "qzeros": CheckpointPart(
                (share.num_groups, words_out), (share.groups, share.covering(share.rows)), torch.int32
            ),
            "scales": CheckpointPart((share.num_groups, share.num_rows), (share.groups, share.rows), torch.float32),
        }

    def values(self, share: MatrixShard, read: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return share.trim(unpack(read["qweight"], share.bits, dim=0), share.columns, dim=0).T

    def scales(self, share: MatrixShard, read: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return read["scales"].T

    def zero_points(self, share: MatrixShard, read: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        zeros = share.trim(unpack(read["qzeros"], share.bits, dim=1), share.rows, dim=1).T
        if not self._zeros_less_one:
            return zeros
        largest = share.middle - 1
        return torch.where(zeros == largest, -share.middle, zeros + 1).to(torch.int8)


class IntQuantizedPacking(Packing):
    """compressed-tensors `int-quantized`: `weight` is int8 [out, in], with scales and zero points [out, groups]."""

    def tensors(self, share: MatrixShard, *, symmetric: bool) -> Mapping[str, CheckpointPart]:
        per_group = (share.num_rows, share.num_groups), (share.rows, share.groups)
        tensors = {
            "weight": CheckpointPart((share.num_rows, share.num_columns), (share.rows, share.columns), torch.int8),
            "weight_scale": CheckpointPart(*per_group, torch.float32),
        }
        return tensors if symmetric else {**tensors, "weight_zero_point": CheckpointPart(*per_group, torch.int8)}

    def values(self, share: MatrixShard, read: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return read["weight"]

    def scales(self, share: MatrixShard, read: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return read["weight_scale"]

    def zero_points(self, share: MatrixShard, read: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        return read.get("weight_zero_point")


class PackQuantizedPacking(Packing):
    """compressed-tensors `pack-quantized`: `weight_packed` [out, in] along inputs, zero points along outputs."""

    def tensors(self, share: MatrixShard, *, symmetric: bool) -> Mapping[str, CheckpointPart]:
        tensors = {
            "weight_packed": CheckpointPart(
                (share.num_rows, share.words(share.num_columns)),
                (share.rows, share.covering(share.columns)),
                torch.int32,
            ),
            "weight_scale": CheckpointPart(
                (share.num_rows, share.num_groups), (share.rows, share.groups), torch.float32
            ),
        }
        if not symmetric:
            tensors["weight_zero_point"] = CheckpointPart(
                (share.words(share.num_rows), share.num_groups),
                (share.covering(share.rows), share.groups),
                torch.int32,
            )
        return tensors

    def values(self, share: MatrixShard, read: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return share.trim(unpack(read["weight_packed"], share.bits, dim=1), share.columns, dim=1)

    def scales(self, share: MatrixShard, read: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return read["weight_scale"]

    def zero_points(self, share: MatrixShard, read: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        if "weight_zero_point" not in read:
            return None
        return share.trim(unpack(read["weight_zero_point"], share.bits, dim=0), share.rows, dim=0)
