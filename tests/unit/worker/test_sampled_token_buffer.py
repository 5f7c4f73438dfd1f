"""Sampled tokens on the device: replacing placeholders, and when the host reads the tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mvllm.platform.runtime import HostCopy
from mvllm.sampling.sampler_output import SamplerOutput
from mvllm.sampling.token_history import TokenHistory
from mvllm.worker.sampled_token_buffer import SampledTokenBuffer
from mvllm.worker.step_result import StepResult
from tests.unit.worker.builders import HostRuntime, as_list, make_builder, make_new, make_plan, make_rows


class CountingRuntime(HostRuntime):
    """A runtime that records which copies were waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.waited: list[int] = []
        self._num_started = 0

    def to_host(self, tensor: torch.Tensor) -> HostCopy:
        runtime, number, values = self, self._num_started, tensor.clone()
        self._num_started += 1

        class Copy:
            def wait(self) -> torch.Tensor:
                runtime.waited.append(number)
                return values

        return Copy()


def sampled(*tokens: int, peak: float = 1.0) -> SamplerOutput:
    return SamplerOutput(torch.tensor(tokens), torch.full((len(tokens),), peak))


def result(step: int, rows: list[int], *tokens: int, peak: float = 1.0) -> StepResult:
    """A step in which the first rows sample one token each."""
    return StepResult(step, np.array(rows), np.arange(len(tokens)), sampled(*tokens, peak=peak) if tokens else None)


@pytest.fixture
def history() -> TokenHistory:
    history = TokenHistory(4, 16)
    for row in range(4):
        history.set_row(row, [10, 11], 2)
    return history


@pytest.fixture
def runtime() -> CountingRuntime:
    return CountingRuntime()


@pytest.fixture
def tokens(runtime: CountingRuntime, history: TokenHistory) -> SampledTokenBuffer:
    return SampledTokenBuffer(runtime, history)


def test_placeholders_become_the_last_tokens_of_their_rows_and_other_ids_stay(tokens: SampledTokenBuffer) -> None:
    tokens.store(sampled(70, 71), torch.tensor([3, 0, 4], dtype=torch.int32))  # one placeholder is in the padding
    tokens.store(sampled(80), torch.tensor([3], dtype=torch.int32))
    ids = torch.tensor([5, -1 - 3, 0, -1 - 0, 6], dtype=torch.int32)
    resolved = tokens.replace_placeholders(ids)
    assert as_list(resolved) == [5, 80, 0, 71, 6] and resolved.dtype == torch.int32


def test_the_input_of_a_step_contains_placeholders_of_the_step_before() -> None:
    rows = make_rows()
    rows.apply_plan(make_plan({}, new_requests=[make_new(2, [5, 6, 7], [1]), make_new(0, [8], [2])]))
    builder = make_builder(rows, with_sample_rows=True)
    first = builder.build(make_plan({2: 3, 0: 1}))
    assert first.sample_rows is not None and as_list(first.sample_rows) == [2, 0]
    rows.num_computed[first.rows] += first.num_scheduled
    rows.history.append_placeholders(first.rows)
    second = builder.build(make_plan({0: 1, 2: 1}, step=1))
    assert as_list(second.token_ids) == [-1, -3]
    assert as_list(second.sampling_positions) == [0, 1]
    assert make_builder(rows).build(make_plan({0: 1})).sample_rows is None


def test_collecting_a_step_waits_for_its_copies_alone(
    tokens: SampledTokenBuffer, history: TokenHistory, runtime: CountingRuntime
) -> None:
    tokens.add_step(result(0, [1, 3], 50))
    tokens.add_step(result(1, [1], 51))
    assert history.num_tokens[1] == 4 and history.ends_in_placeholder(np.array([0, 1])) and not runtime.waited
    output = tokens.collect_output(0)
    assert output.step == 0 and output.sampled_token_ids == [50, -1] and runtime.waited == [0]
    assert as_list(history.token_ids[1, :4]) == [10, 11, 50, -2]
    assert tokens.collect_output(1).sampled_token_ids == [51]
    assert as_list(history.token_ids[1, :4]) == [10, 11, 50, 51] and not history.ends_in_placeholder(np.array([0, 1]))


def test_outputs_that_are_read_early_are_kept_until_collected(
    tokens: SampledTokenBuffer, history: TokenHistory
) -> None:
    tokens.add_step(result(0, [1], 50))
    tokens.add_step(result(1, [2]))
    tokens.read_all_steps()
    assert as_list(history.token_ids[1, :3]) == [10, 11, 50]
    assert tokens.collect_output(1).sampled_token_ids == [-1]
    assert tokens.collect_output(0).sampled_token_ids == [50]


def test_a_token_of_a_former_request_is_not_written_to_the_new_one_in_its_row(
    tokens: SampledTokenBuffer, history: TokenHistory
) -> None:
    tokens.add_step(result(0, [1], 50))
    history.clear_row(1)
    history.set_row(1, [20, 21], 2)
    tokens.add_step(result(1, [1], 60))
    assert tokens.collect_output(0).sampled_token_ids == [50]
    assert as_list(history.token_ids[1, :3]) == [20, 21, -2]
    tokens.collect_output(1)
    assert as_list(history.token_ids[1, :3]) == [20, 21, 60]


def test_a_row_without_usable_logits_is_reported_when_its_step_is_collected(tokens: SampledTokenBuffer) -> None:
    tokens.add_step(result(0, [1], 50, peak=float("nan")))
    assert "NaN" in tokens.collect_output(0).errors[0]
