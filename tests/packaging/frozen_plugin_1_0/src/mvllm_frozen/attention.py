"""Paged attention, a request at a time."""

import torch

from mvllm.plugin_api import AttentionBackend, KVLayout


class IceAttention(AttentionBackend):
    @classmethod
    def validate(cls, spec):
        reasons = []
        if spec.dtype != "float32" or spec.kv_dtype != "float32":
            reasons.append(f"{spec.dtype} melts")
        if spec.soft_cap is not None or spec.sinks:
            reasons.append("no soft cap and no sinks")
        return reasons

    def kv_layout(self):
        return KVLayout((8, 16), 2 * self.spec.num_kv_heads * self.spec.head_size * 4)

    def allocate(self, num_blocks, block_size, device):
        shape = (num_blocks * block_size, self.spec.num_kv_heads, self.spec.head_size)
        return [torch.zeros(shape, device=device), torch.zeros(shape, device=device)]

    def build_metadata(self, batch):
        requests = []
        for r in range(batch.num_requests):
            begin, end = int(batch.query_start_loc[r]), int(batch.query_start_loc[r + 1])
            length = int(batch.seq_lens[r])
            if end > begin:
                positions = torch.arange(length)
                blocks = batch.block_table_device[r].long()[positions // batch.block_size]
                requests.append((begin, end, length, blocks * batch.block_size + positions % batch.block_size))
        return {"requests": requests, "slots": batch.slot_mapping_device.long()}

    def write_kv(self, kv, key, value, metadata):
        slots = metadata["slots"]
        real = slots >= 0
        kv[0][slots[real]] = key[real]
        kv[1][slots[real]] = value[real]

    def forward(self, query, kv, metadata, sinks=None):
        out = torch.zeros_like(query)
        share = self.spec.num_heads // self.spec.num_kv_heads
        for begin, end, length, slots in metadata["requests"]:
            keys = kv[0][slots].repeat_interleave(share, dim=1)
            values = kv[1][slots].repeat_interleave(share, dim=1)
            scores = torch.einsum("qhd,khd->hqk", query[begin:end], keys) * self.spec.scale
            at = torch.arange(length - (end - begin), length)[:, None]
            seen = torch.arange(length)[None, :]
            hidden = seen > at
            if self.spec.sliding_window is not None:
                hidden |= seen <= at - self.spec.sliding_window
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            out[begin:end] = torch.einsum("hqk,khd->qhd", weights, values)
        return out.flatten(1)

    def copy_blocks(self, kv, source, destination):
        for tensor in kv:
            blocks = tensor.view(-1, 8, *tensor.shape[1:])
            blocks[destination] = blocks[source]
