"""Penalties from counts on the device equal those from host counts, bit for bit."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mvllm.messages.sampling_params import SamplingParams
from mvllm.platform.staging_buffers import StagingBuffers
from mvllm.sampling.penalties import DeviceTokenCounts
from mvllm.sampling.sampler import Sampler
from mvllm.sampling.sampling_state import SamplingState
from tests.helpers.host_sync import ForbidSynchronizingOps
from tests.unit.sampling.builders import Bench, Sampled, random_logits
from tests.unit.worker.builders import HostRuntime

VOCAB, MAX_ROWS, MAX_LEN = 60, 6, 40


class DeviceBench(Bench):
    """A bench with counts on the device, updated after each step; the history has placeholders only."""

    def __init__(self, *, static: bool = False, max_len: int = MAX_LEN) -> None:
        super().__init__(vocab_size=VOCAB, max_rows=MAX_ROWS, max_len=max_len)
        self.counts = DeviceTokenCounts(
            lambda shape, dtype: torch.full(shape, 77, dtype=dtype), MAX_ROWS, VOCAB, max_len
        )
        self.state = SamplingState(MAX_ROWS, VOCAB, 0, device_counts=self.counts)
        self.staging = StagingBuffers(HostRuntime())
        self.sampler = Sampler(self.staging, static=static)
        self.static = static

    def step(self, logits: torch.Tensor, rows: list[int]) -> list[int]:
        padding = MAX_ROWS - len(rows) if self.static else 0
        logits = torch.nn.functional.pad(logits, (0, 0, 0, padding))
        self.staging.begin_step()
        with ForbidSynchronizingOps():
            sampled = self.sample(logits, rows)
            where = torch.tensor([*rows, *[MAX_ROWS] * padding], dtype=torch.int32)
            self.counts.add(sampled.token_ids, where)
        self.staging.end_step()
        self.history.append_placeholders(np.array(rows))
        return sampled.tolist()


def drawn_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice([0.0, 0.9]),
        seed=rng.randrange(100),
        repetition_penalty=rng.choice([1.0, 1.0, 0.7, 1.7]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.9, -1.1]),
        presence_penalty=rng.choice([0.0, 0.0, 1.3, -0.4]),
        logit_bias=rng.choice([None, {3: 2.0}]),
    )


@pytest.mark.parametrize("static", [False, True])
def test_device_counts_equal_host_counts_when_requests_change_rows(static: bool) -> None:
    rng = random.Random(4)
    own, device = Bench(vocab_size=VOCAB, max_rows=MAX_ROWS, max_len=MAX_LEN), DeviceBench(static=static)
    running: dict[int, tuple[Sampled, list[int]]] = {}
    num_penalized = 0
    for step in range(120):
        for row in [row for row, (_, output) in running.items() if rng.random() < 0.1 or len(output) > 20]:
            sequence, output = running.pop(row)
            own.clear_row(row)
            device.clear_row(row)
            if rng.random() < 0.5:  # preempted: it resumes with its generated tokens, in any row
                taken = rng.choice([each for each in range(MAX_ROWS) if each not in running])
                running[taken] = Sampled(sequence.params, sequence.prompt, list(output)), list(output)
        for row in set(range(MAX_ROWS)) - running.keys():
            if rng.random() < 0.5:
                prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 9))]
                running[row] = Sampled(drawn_params(rng), prompt), []
        for row, (sequence, output) in running.items():
            if own.history.num_tokens[row] == 0:
                for bench in (own, device):
                    bench.set_row(row, Sampled(sequence.params, sequence.prompt, output))
        rows = [row for row in running if rng.random() < 0.8]
        rng.shuffle(rows)
        if not rows:
            continue
        logits = random_logits(len(rows), VOCAB, seed=step, scale=1.0)
        expected = own.sample(logits, rows).tolist()
        assert device.step(logits, rows) == expected
        own.append(rows, expected)
        for row, token in zip(rows, expected, strict=True):
            running[row][1].append(token)
        num_penalized += sum(running[row][0].params.repetition_penalty != 1 for row in rows)
    assert num_penalized > 50


def test_with_device_counts_only_bad_words_read_tokens() -> None:
    bench = DeviceBench()
    words = SamplingParams(repetition_penalty=1.3)
    words.bad_words_token_ids = [[5, 6]]
    for row, params in enumerate((SamplingParams(repetition_penalty=1.3, presence_penalty=1.0), words)):
        bench.set_row(row, Sampled(params))
    assert bench.state.rows_reading_tokens(np.arange(2)).tolist() == [1]


def test_the_count_table_exists_only_while_there_are_penalized_rows() -> None:
    made: list[tuple[int, ...]] = []

    def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        made.append(shape)
        return torch.empty(shape, dtype=dtype)

    bench = DeviceBench()
    bench.counts._empty = empty
    logits = random_logits(1, VOCAB)
    best = int(logits.argmax())
    bench.set_row(0, Sampled(SamplingParams(temperature=0), prompt=[best]))
    assert bench.step(logits, [0]) == [best] and made == []
    for _ in range(2):
        bench.set_row(0, Sampled(SamplingParams(temperature=0, repetition_penalty=50.0), prompt=[best]))
        assert bench.step(logits, [0]) != [best]
        bench.counts.free()
    assert made == [(MAX_ROWS + 1, VOCAB)] * 2


def test_counts_of_long_rows_do_not_overflow() -> None:
    num = 1 << 14
    bench = DeviceBench(max_len=num + 2)
    logits = torch.zeros(1, VOCAB)
    logits[0, 7], logits[0, 8] = 1.0, 0.5
    params = SamplingParams(temperature=0, frequency_penalty=1e-3)
    bench.set_row(0, Sampled(params, prompt=[1], output=[7] * num))
    assert bench.step(logits, [0]) == [8]


class Shapes(TorchDispatchMode):
    """Records every operation with the shapes of its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, list[tuple[int, ...]]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append((func.name(), [tuple(each.shape) for each in args if isinstance(each, torch.Tensor)]))
        return func(*args, **(kwargs or {}))


def test_static_shapes_do_not_depend_on_the_number_of_penalized_rows_or_tokens() -> None:
    seen = []
    for num_rows, length in ((1, 3), (5, 9)):
        bench = DeviceBench(static=True)
        for row in range(num_rows):
            bench.set_row(row, Sampled(SamplingParams(repetition_penalty=1.5, seed=1), prompt=range(length)))
        for row in range(num_rows, MAX_ROWS):
            bench.set_row(row, Sampled(SamplingParams(seed=1)))
        with Shapes() as shapes:
            for step in range(2):  # the first step, which writes the rows, and one with existing rows
                bench.step(random_logits(MAX_ROWS, VOCAB, seed=step), list(range(MAX_ROWS)))
        seen.append(shapes.seen)
    assert seen[0] == seen[1]
