"""Paged attention, a request at a time, whose blocks can be copied to host memory."""

import numpy as np
import torch

from mvllm.plugin_api import AttentionBackend, KVLayout, StateBackend, StepKind


class FrostCopy:
    def __init__(self, rows, out):
        self.rows, self.out = rows, out

    def wait(self):
        self.out[:] = self.rows


class FrostAttention(AttentionBackend):
    @classmethod
    def validate(cls, spec):
        reasons = []
        if spec.dtype != "float32" or spec.kv_dtype != "float32":
            reasons.append(f"{spec.dtype} melts")
        if spec.soft_cap is not None or spec.sinks or spec.non_causal_spans or spec.index_topk is not None:
            reasons.append("plain attention only")
        return reasons

    def kv_layout(self):
        return KVLayout((8, 16), 2 * self.spec.num_kv_heads * self.spec.head_size * 4)

    def allocate(self, num_blocks, block_size, device):
        return torch.zeros((num_blocks, 2, block_size, self.spec.num_kv_heads, self.spec.head_size), device=device)

    def build_metadata(self, batch):
        if batch.kind is StepKind.DECODE and not batch.capture:
            assert batch.num_decodes == batch.num_requests
        requests = []
        for r in range(batch.num_requests):
            begin, end = int(batch.query_start_loc[r]), int(batch.query_start_loc[r + 1])
            length = int(batch.seq_lens[r])
            if end > begin:
                pages = -(-length // batch.block_size)
                requests.append((begin, end, length, batch.block_table_device[r, :pages].long()))
        return {"requests": requests, "slots": batch.slot_mapping_device.long()}

    def write_kv(self, kv, key, value, metadata):
        slots = metadata["slots"]
        real = slots >= 0
        block, place = slots[real] // kv.shape[2], slots[real] % kv.shape[2]
        kv[block, 0, place] = key[real]
        kv[block, 1, place] = value[real]

    def forward(self, query, kv, metadata, sinks=None):
        out = torch.zeros_like(query)
        share = self.spec.num_heads // self.spec.num_kv_heads
        for begin, end, length, blocks in metadata["requests"]:
            keys, values = (kv[blocks, i].flatten(0, 1)[:length].repeat_interleave(share, dim=1) for i in (0, 1))
            scores = torch.einsum("qhd,khd->hqk", query[begin:end], keys) * self.spec.scale
            at = torch.arange(length - (end - begin), length)[:, None]
            seen = torch.arange(length)[None, :]
            hidden = seen > at
            if self.spec.sliding_window is not None:
                hidden |= seen <= at - self.spec.sliding_window
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            out[begin:end] = torch.einsum("hqk,khd->qhd", weights, values)
        return out.flatten(1)

    def block_format(self, kv, block_size):
        return f"frost, keys then values, blocks of {block_size}"

    def export_blocks(self, kv, blocks, out):
        rows = kv[torch.from_numpy(blocks)].flatten(1).contiguous().view(torch.uint8).numpy()
        return FrostCopy(rows, out)

    def import_blocks(self, kv, blocks, data):
        rows = torch.from_numpy(np.array(data)).view(kv.dtype)
        kv[torch.from_numpy(blocks)] = rows.view(len(blocks), *kv.shape[1:])


class FrostStates(StateBackend):
    """As core's."""
