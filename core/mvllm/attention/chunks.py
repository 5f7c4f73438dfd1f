"""Chunked attention: a query sees the keys of its own chunk only, those with the same position // chunk_size.

The backend computes ordinary causal attention. It gets each chunk that a request's new tokens touch as a request of its
own, whose first token is the first of the chunk; so the contract needs no word for chunks.

    chunk_size 8, block_size 4, request with the new tokens 6 to 17     becomes three requests
    block table  [7, 2 | 9, 4 | 1]                                      [7, 2]  tokens 6, 7      of 8
                                                                        [9, 4]  tokens 8 to 15   of 8
                                                                        [1]     tokens 16, 17    of 2
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from mvllm.platform.attention import AttentionBackend, AttentionMetadata, BatchLayout
from mvllm.platform.shapes import StepKind


@dataclass(frozen=True)
class ChunkedMetadataBuilder:
    """Builds the metadata of layers with chunked attention.

    Attributes:
        backend: The backend of these layers alone, which builds no other metadata.
        chunk_size: Tokens per chunk, a multiple of the tokens per block.
    """

    backend: AttentionBackend
    chunk_size: int

    def build_metadata(self, batch: BatchLayout) -> AttentionMetadata:
        """As AttentionBackend.build_metadata."""
        return self.backend.build_metadata(split_into_chunks(batch, self.chunk_size))


def split_into_chunks(batch: BatchLayout, chunk_size: int) -> BatchLayout:
    """The layout with a request for each chunk of each request that has new tokens; its tokens are the same.

    Args:
        batch: The step.
        chunk_size: Tokens per chunk, a multiple of the block size.

    Returns:
        `batch` itself if no sequence is longer than a chunk.
    """
    if batch.max_seq_len <= chunk_size:
        return batch
    starts, block_size = batch.query_start_loc.astype(np.int64), batch.block_size
    assert chunk_size % block_size == 0, f"blocks of {block_size} tokens do not fill chunks of {chunk_size}"
    ends = batch.seq_lens.astype(np.int64)
    begins = ends - np.diff(starts)
    first = begins // chunk_size
    counts = np.where(ends > begins, (ends - 1) // chunk_size - first + 1, 0)
    request = np.arange(len(counts)).repeat(counts)
    chunk = first[request] + np.arange(len(request)) - (counts.cumsum() - counts)[request]
    chunk_start = chunk * chunk_size
    begin = np.maximum(begins[request], chunk_start)
    end = np.minimum(ends[request], chunk_start + chunk_size)
    pages = chunk_size // block_size
    # Columns past the table belong to no token.
    columns = np.minimum(chunk[:, None] * pages + np.arange(pages), batch.block_table.shape[1] - 1)
    query_start_loc = np.concatenate(([0], (end - begin).cumsum())).astype(np.int32)
    seq_lens = (end - chunk_start).astype(np.int32)
    block_table = np.ascontiguousarray(batch.block_table[request[:, None], columns])
    device = batch.seq_lens_device.device
    return replace(
        batch,
        num_requests=len(request),
        max_query_len=int((end - begin).max()),
        max_seq_len=int(seq_lens.max()),
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        block_table=block_table,
        query_start_loc_device=torch.from_numpy(query_start_loc).to(device),
        seq_lens_device=torch.from_numpy(seq_lens).to(device),
        block_table_device=torch.from_numpy(block_table).to(device),
        # Decode rows have one token, so they come first and are as many as before.
        kind=batch.kind if len(request) == batch.num_requests else StepKind.MIXED,
    )
