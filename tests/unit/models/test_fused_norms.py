"""Tensor-parallel blocks whose sum, residual sum and norm are one operation of the communicator."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mvllm.distributed.group_coordinator import GroupCoordinator
from mvllm.distributed.torch_communicator import TorchCommunicator
from mvllm.models.llama import LlamaForCausalLM
from mvllm.ops.norm import fused_add_rms_norm
from mvllm.platform.topology import GroupSpec
from tests.helpers import thread_ranks
from tests.helpers.forked_ranks import start_ranks
from tests.helpers.paged_driver import PagedDriver, load_model, make_context, read_config
from tests.helpers.ports import free_port

STEPS = 2  # of `logits_of`


class Counts:
    """Counts the calls of one rank's communicator."""

    def __init__(self) -> None:
        self.fused = self.sums = 0


class FusingMixin:
    """A communicator with the fused operation, for tensors of at most `most_rows` rows."""

    most_rows = 1 << 20
    counts: Counts

    def all_reduce(self, tensor):
        self.counts.sums += 1
        return super().all_reduce(tensor)

    def all_reduce_add_rms_norm(self, tensor, residual, weight, eps):
        if len(tensor) > self.most_rows:
            return None
        self.counts.fused += 1
        return fused_add_rms_norm(super().all_reduce(tensor), residual, weight, eps)


class FusingGloo(FusingMixin, TorchCommunicator):
    pass


class FusingThreads(FusingMixin, thread_ranks.ThreadCommunicator):
    pass


def make(name: str, folder: Path) -> Path:
    from tests.helpers.model_zoo import make_checkpoint  # imports transformers, which the ranks do not need

    return make_checkpoint(name, folder, tokenizer=False)


def logits_of(folder: Path, tp: GroupCoordinator | None = None) -> torch.Tensor:
    driver = PagedDriver(load_model(folder, make_context(tp=tp)))
    sequence = driver.add(20)
    tokens = list(range(3, 23))
    return torch.cat([driver.step([(sequence, piece)])[0] for piece in (tokens[:19], tokens[19:])])


def check_rank(rank: int, address: str, folder: str, expected: torch.Tensor) -> None:
    """A rank: the logits are those of one rank, and only the embedding is summed separately."""
    torch.set_num_threads(1)
    spec = GroupSpec("tp", (0, 1), rank, init_method=address)
    comm = FusingGloo(spec, backend="gloo", timeout=60)
    comm.counts = Counts()
    found = logits_of(Path(folder), GroupCoordinator(spec, comm))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    assert (comm.counts.fused, comm.counts.sums) == (STEPS * 3 * 2, STEPS), "two for each of three layers"
    comm.close()


def test_processes_sum_in_the_norm_after_each_block(tmp_path: Path) -> None:
    folder = make("llama-gqa", tmp_path)
    start_ranks(check_rank, 2, f"tcp://127.0.0.1:{free_port()}", str(folder), logits_of(folder))


def on_threads(monkeypatch: pytest.MonkeyPatch, folder: Path, communicator: type) -> list[tuple[Counts, torch.Tensor]]:
    monkeypatch.setattr(thread_ranks, "ThreadCommunicator", communicator)

    def body(tp: GroupCoordinator) -> tuple[Counts, torch.Tensor]:
        tp.device_group.counts = Counts()
        return tp.device_group.counts, logits_of(folder, tp)

    return thread_ranks.run_ranks(2, body)


def check_logits(found: list[tuple[Counts, torch.Tensor]], folder: Path) -> None:
    for _, logits in found:
        torch.testing.assert_close(logits, logits_of(folder), atol=1e-4, rtol=0)


def test_cases_that_the_communicator_does_not_support_take_both_operations(tmp_path: Path, monkeypatch) -> None:
    folder = make("qwen3", tmp_path)
    monkeypatch.setattr(FusingMixin, "most_rows", 1)
    found = on_threads(monkeypatch, folder, FusingThreads)
    check_logits(found, folder)
    num_layers = found[0][0].fused // 2
    assert num_layers >= 2, "of the step with one token alone"
    assert found[0][0].sums == STEPS + 2 * num_layers, "in the step with 19"


@pytest.mark.parametrize("name", ["gemma2", "granite"])
def test_blocks_whose_result_something_else_reads_are_summed_at_once(name: str, tmp_path: Path, monkeypatch) -> None:
    folder = make(name, tmp_path)
    found = on_threads(monkeypatch, folder, FusingThreads)
    check_logits(found, folder)
    assert found[0][0].fused == 0, "norms of results, or a factor on them"


def test_a_model_with_its_own_forward_gets_sums(tmp_path: Path) -> None:
    class Own(LlamaForCausalLM):
        def forward(self, *args, **options):
            return super().forward(*args, **options)

    class Offers(GroupCoordinator):
        fuses_add_rms_norm = True

    config = read_config(make("llama-gqa", tmp_path))
    group = thread_ranks.fake_group("tp", 0, 2)
    offers = Offers(group.spec, group.device_group)
    sums = {kind: kind(config, make_context(tp=offers)).layers[0].mlp.down._sums for kind in (LlamaForCausalLM, Own)}
    assert sums == {LlamaForCausalLM: False, Own: True}
