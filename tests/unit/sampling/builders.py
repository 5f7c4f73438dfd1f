"""Builders for sampling tests: a batch of requests and a sampler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from mvllm.messages.sampling_params import SamplingParams
from mvllm.sampling.sampler import Sampler
from mvllm.sampling.sampler_output import SamplerOutput
from mvllm.sampling.sampling_state import SamplingState
from mvllm.sampling.token_history import TokenHistory


@dataclass
class Sampled:
    """One request in the form that the sampler gets."""

    params: SamplingParams = field(default_factory=SamplingParams)
    prompt: Sequence[int] = (1, 2, 3)
    output: Sequence[int] = ()
    request_id: str = "request"
    eos: Sequence[int] = ()


class Bench:
    """Rows, token history and sampler over one vocabulary."""

    def __init__(self, *, vocab_size: int, max_rows: int = 16, max_len: int = 64, engine_seed: int = 0) -> None:
        self.state = SamplingState(max_rows, vocab_size, engine_seed)
        self.history = TokenHistory(max_rows, max_len)
        self.sampler = Sampler()

    def set_row(self, row: int, sequence: Sampled) -> None:
        self.history.set_row(row, [*sequence.prompt, *sequence.output], len(sequence.prompt))
        self.state.set_row(
            row,
            sequence.params,
            eos_token_ids=sequence.eos,
            request_id=sequence.request_id,
            num_prompt_tokens=len(sequence.prompt),
        )

    def clear_row(self, row: int) -> None:
        self.history.clear_row(row)
        self.state.clear_row(row)

    def sample(self, logits: torch.Tensor, rows: Sequence[int], mask: torch.Tensor | None = None) -> SamplerOutput:
        return self.sampler.sample(logits, np.array(rows), self.state, self.history, mask)

    def append(self, rows: Sequence[int], token_ids: Sequence[int]) -> None:
        self.history.append(np.array(rows), np.array(token_ids))


def sample_batch(
    logits: torch.Tensor,
    sequences: Sequence[Sampled],
    mask: torch.Tensor | None = None,
    *,
    engine_seed: int = 0,
    sampler: Sampler | None = None,
) -> SamplerOutput:
    """Samples one token for each of `sequences`, in rows 0, 1, ..."""
    longest = max(len(s.prompt) + len(s.output) for s in sequences) + 1
    bench = Bench(vocab_size=logits.shape[1], max_rows=len(sequences), max_len=longest, engine_seed=engine_seed)
    bench.sampler = sampler or bench.sampler
    for row, sequence in enumerate(sequences):
        bench.set_row(row, sequence)
    return bench.sample(logits, range(len(sequences)), mask)


def random_logits(num_rows: int, vocab_size: int, *, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    """float32 [num_rows, vocab_size], normal."""
    generator = np.random.default_rng(seed)
    return torch.from_numpy((generator.standard_normal((num_rows, vocab_size)) * scale).astype(np.float32))
