"""Prompt log-probabilities of a step: all prompts share the passes through the head, and each gets its own."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mvllm.ops.logsumexp import logsumexp
from mvllm.worker import prompt_logprobs as module
from mvllm.worker.prompt_logprobs import PromptLogprobsComputer
from tests.unit.worker.builders import VOCAB_SIZE, HostRuntime, make_new, make_plan, make_rows

HIDDEN = 8
PROMPTS = [[*range(1, 8)], [3, 5], [9], [*range(20, 30)], [40, 41, 42]]
ASKED = [0, 0, 0, 2, None]


@pytest.mark.parametrize("sizes", [None, (2, 4)], ids=["any size", "padded"])
@pytest.mark.parametrize("chunk", [3, 4, 100])
def test_prompts_of_all_lengths_share_the_passes_through_the_head(
    chunk: int, sizes: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CHUNK", chunk)
    rows = make_rows(max_rows=5)
    new = [
        make_new(row, tokens, [4 * row + block for block in range(3)], prompt_logprobs=asked)
        for row, (tokens, asked) in enumerate(zip(PROMPTS, ASKED, strict=True))
    ]
    rows.apply_plan(make_plan({}, new_requests=new))
    counts = [len(tokens) for tokens in PROMPTS]
    starts = np.concatenate([[0], np.cumsum(counts)])
    inputs = SimpleNamespace(
        rows=np.arange(5),
        layout=SimpleNamespace(query_start_loc=starts),
        first_positions=np.zeros(5, dtype=np.int64),
        num_scheduled=np.array(counts),
    )
    torch.manual_seed(1)
    hidden, head = torch.randn(sum(counts), HIDDEN), torch.randn(HIDDEN, VOCAB_SIZE)
    passes: list[int] = []

    predicted: list[int] = []

    def compute_logits(states: torch.Tensor, token_ids: np.ndarray, spaces: np.ndarray | None) -> torch.Tensor:
        assert spaces is None
        passes.append(len(states))
        predicted.extend(token_ids.tolist())
        return states @ head

    found = PromptLogprobsComputer(rows, HostRuntime(), sizes, logsumexp).compute(inputs, hidden, compute_logits)
    assert set(found) == {0, 1, 3}
    exact = (hidden @ head).log_softmax(1)
    for index, chunks in found.items():
        entries = [entry for piece in chunks for entry in piece.read()]
        targets = PROMPTS[index][1:]
        assert [entry.token_ids[0] for entry in entries] == targets
        for position, entry in enumerate(entries):
            row = exact[starts[index] + position]
            assert entry.logprobs == pytest.approx(row[entry.token_ids].tolist(), abs=1e-5)
            assert entry.rank == 1 + int((row > row[entry.token_ids[0]]).sum())
            assert len(entry.token_ids) == 1 + (ASKED[index] or 0)
    size = sizes[-1] if sizes else chunk
    assert len(passes) == -(-7 // size) + -(-9 // size), "7 positions with 0 further tokens, 9 with 2"
    assert max(passes) <= size
    assert predicted == [token for index in (0, 1, 3) for token in PROMPTS[index][1:]]
