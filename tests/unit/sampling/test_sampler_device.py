"""The sampler's device work: no synchronization, one copy to the device, and only operations that a row needs."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mvllm.messages.sampling_params import SamplingParams
from mvllm.platform.staging_buffers import StagingBuffers
from mvllm.sampling.sampler import Sampler
from mvllm.sampling.sampling_state import MAX_VOCAB_SIZE, SamplingState
from tests.unit.sampling.builders import Sampled, random_logits, sample_batch
from tests.unit.worker.builders import HostRuntime

VOCAB = 256

MIXED = [
    Sampled(SamplingParams(temperature=0)),
    Sampled(SamplingParams(temperature=0.5, top_k=5)),
    Sampled(SamplingParams(top_p=0.5, logprobs=3)),
    Sampled(SamplingParams(min_p=0.5)),
    Sampled(SamplingParams(min_tokens=9, repetition_penalty=1.2, frequency_penalty=1.0), eos=[3]),
    Sampled(SamplingParams(temperature=0, presence_penalty=1.0, logprobs=-1)),
]


class Recorder(TorchDispatchMode):
    """Records every operation, and every copy between devices."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.copies: list[str] = []
        self.largest_result = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.names.append(func.name())
        for tensor in result if isinstance(result, tuple) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.largest_result = max(self.largest_result, tensor.numel())
        source = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if source is not None and isinstance(result, torch.Tensor) and result.device != source.device:
            self.copies.append(func.name())
        return result


def test_an_all_greedy_batch_is_one_pass_over_the_logits():
    logits = random_logits(8, VOCAB).bfloat16()
    with Recorder() as recorder:
        sample_batch(logits, [Sampled(SamplingParams(temperature=0))] * 8)
    assert recorder.names == ["aten::max.dim"]
    assert recorder.largest_result == 8


@pytest.mark.parametrize("with_mask", [False, True])
def test_sampling_copies_once_to_the_device_and_waits_for_nothing(with_mask):
    """Tensors on the meta device have no values: reading one raises."""
    logits = torch.empty(len(MIXED), VOCAB, device="meta", dtype=torch.bfloat16)
    mask = torch.empty(len(MIXED), VOCAB, device="meta", dtype=torch.bool) if with_mask else None
    with Recorder() as recorder:
        sampled = sample_batch(logits, MIXED, mask)
    assert len(recorder.copies) == 1
    assert sampled.token_ids.shape == (len(MIXED),) and sampled.token_ids.dtype == torch.int64
    assert sampled.token_ids.device == logits.device
    with pytest.raises(NotImplementedError):
        sampled.tolist()


def test_staging_buffers_give_the_same_samples_with_one_copy():
    runtime = HostRuntime()
    staging = StagingBuffers(runtime)
    logits = random_logits(len(MIXED), VOCAB)
    expected = sample_batch(logits, MIXED)
    for step in range(1, 4):
        staging.begin_step()
        sampled = sample_batch(logits, MIXED, sampler=Sampler(staging))
        staging.end_step()
        assert sampled.tolist() == expected.tolist() and sampled.logprobs == expected.logprobs
        assert runtime.num_copies == step
    only_greedy = [Sampled(SamplingParams(temperature=0, logprobs=1))] * 2
    sample_batch(logits[:2], only_greedy, sampler=Sampler(staging))
    assert runtime.num_copies == 3, "nothing to tell the device"


def test_started_copies_are_the_ones_that_are_read():
    logits = random_logits(len(MIXED), VOCAB)
    expected, sampled = sample_batch(logits, MIXED), sample_batch(logits, MIXED)
    sampled.send_to_host(HostRuntime().to_host)
    sampled.token_ids.fill_(0)
    sampled.max_logits.fill_(torch.nan)
    assert sampled.gathered_logprobs is not None
    sampled.gathered_logprobs.gathered.fill_(0)
    assert sampled.tolist() == expected.tolist() and sampled.logprobs == expected.logprobs and not sampled.errors


@pytest.mark.parametrize("params", [{}, {"top_p": 0.9}, {"top_k": 50, "top_p": 0.9}, {"min_p": 0.1}])
def test_no_vocabulary_is_sorted(params):
    with Recorder() as recorder:
        sample_batch(random_logits(2, 5000), [Sampled(SamplingParams(**params)), Sampled()])
    assert not any("sort" in name for name in recorder.names)
    assert any("topk" in name for name in recorder.names) is ("top_k" in params)


def test_token_ids_are_int64_in_every_kind_of_batch():
    logits = random_logits(len(MIXED), VOCAB)
    for sequences in (MIXED, MIXED[:1], MIXED[1:2]):
        sampled = sample_batch(logits[: len(sequences)], sequences)
        assert sampled.token_ids.dtype == torch.int64 and sampled.token_ids.tolist() == sampled.tolist()


def test_token_ids_beyond_float32_precision_are_refused():
    with pytest.raises(ValueError, match="vocab_size must be at most"):
        SamplingState(1, MAX_VOCAB_SIZE + 1, 0)


def test_the_largest_token_id_is_copied_exactly():
    logits = torch.zeros(1, MAX_VOCAB_SIZE, dtype=torch.bfloat16)
    logits[0, -1] = 1.0
    sampled = sample_batch(logits, [Sampled(SamplingParams(temperature=0))])
    assert sampled.tolist() == [MAX_VOCAB_SIZE - 1] == sampled.token_ids.tolist()
