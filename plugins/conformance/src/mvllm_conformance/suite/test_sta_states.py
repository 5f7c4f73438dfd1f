"""STA: sequence states have the announced size, and operations read and write exactly the given slots."""

from __future__ import annotations

import math

import pytest
import torch

from mvllm.extension_api.testing import SCHEMAS, checked_state_backend, torch_dtype
from mvllm.plugin_api import ConfigError, DeviceRuntime, StateArguments, StateSpec, StateTensor
from mvllm_conformance.markers import clause
from mvllm_conformance.platform_under_test import PlatformUnderTest
from mvllm_conformance.state_steps import (
    Piece,
    StateCase,
    StateHarness,
    make_layout,
    step_by_step,
    step_cases,
    tolerance,
)
from mvllm_conformance.tensor_assertions import assert_close, assert_equal
from mvllm_conformance.zoo import STATE_FAMILY, Zoo, assert_tokens, generate, main_dtype, make_llm, tie_of

OPS = [op for op in sorted(SCHEMAS) if step_cases(op, "float32")]
NUM_SLOTS = 8
LENGTHS = (150, 70, 9, 1)
"""Tokens of the sequences: more than two chunks of 64, more than one, and a few."""
CUTS = {
    "whole": [[150], [70], [9], [1]],
    "chunks": [[64, 64, 22], [1, 63, 6], [2, 1, 1, 5], [1]],
    "decode after a prompt": [[135, *[1] * 15], [65, 1, 1, 1, 1, 1], [1, 1, 7], [1]],
}


def near(found: torch.Tensor, wanted: torch.Tensor, case: StateCase, dtype: str, what: str) -> None:
    """Fails unless a tensor equals the exact one within the tolerance of `dtype`."""
    allowed = tolerance(dtype) * max(1.0, float(wanted.abs().max()))
    assert_close(found.float(), wanted.float(), allowed, f"{what} of {case}")


def other_slot(slot: int) -> int:
    """The second of the two slots that a sequence uses in turn."""
    return slot ^ 1


@clause("STA-01")
def test_states_are_zeros_of_the_announced_size(
    subject: PlatformUnderTest, bound_device: DeviceRuntime, claimed_dtype: str
) -> None:
    for op in OPS:
        for case in step_cases(op, claimed_dtype):
            backend = checked_state_backend(subject.platform, case.spec)
            state = backend.allocate(NUM_SLOTS, bound_device.device)
            assert isinstance(state, tuple) and len(state) == len(case.spec.tensors), f"{case}: one tensor is needed"
            for tensor, wanted in zip(state, case.spec.tensors, strict=True):
                assert tuple(tensor.shape) == (NUM_SLOTS + 1, *wanted.shape), f"{case}: {tuple(tensor.shape)}"
                assert tensor.dtype == torch_dtype(wanted.dtype) and tensor.device == bound_device.device, str(case)
                found = bound_device.to_host(tensor).wait()
                assert_equal(found, torch.zeros_like(found), f"new states of {case}")
            taken = sum(tensor.untyped_storage().nbytes() for tensor in state)
            announced = backend.bytes_per_sequence()
            assert announced * (NUM_SLOTS + 1) == pytest.approx(taken, rel=0.02), (
                f"{case}: bytes_per_sequence gives {announced} bytes, {NUM_SLOTS + 1} slots take {taken}"
            )


@clause("STA-02")
def test_metadata_hold_the_slots_of_the_layout(
    subject: PlatformUnderTest, bound_device: DeviceRuntime, claimed_dtype: str
) -> None:
    harness = StateHarness(subject, bound_device, step_cases(OPS[0], claimed_dtype)[0], NUM_SLOTS)
    steps = (
        [Piece(0, slice(0, 1), 3, 3), Piece(1, slice(0, 1), -1, 5), Piece(2, slice(0, 1), 0, 2)],
        [Piece(0, slice(0, 1), 4, 4), Piece(1, slice(0, 5), -1, 0)],
    )
    for pieces in steps:
        layout = make_layout(pieces, padding=2, padding_requests=2)
        found = harness.metadata(layout)
        assert isinstance(found, StateArguments), f"build_metadata returned a {type(found).__name__}"
        for name in ("query_start_loc", "read_slots", "write_slots"):
            on_host = bound_device.to_host(getattr(found, name)).wait()
            assert_equal(on_host, torch.from_numpy(getattr(layout, name)), f"{name} of the metadata")
        assert found.max_query_len == layout.max_query_len
        bound_device.step_mark()


@clause("STA-03")
@pytest.mark.parametrize("op", OPS)
def test_a_new_sequence_starts_from_zeros(
    subject: PlatformUnderTest, bound_device: DeviceRuntime, claimed_dtype: str, op: str
) -> None:
    for case in step_cases(op, claimed_dtype):
        sequences = [case.draw(length, seed) for seed, length in enumerate((1, 5, 70))]
        exact = [step_by_step(case, sequence)[0] for sequence in sequences]
        for lengths in ((1,), (1, 5, 70)):
            harness = StateHarness(subject, bound_device, case, NUM_SLOTS)
            harness.backend.fill(harness.state, math.nan)
            pieces = [Piece(i, slice(0, length), -1, 2 * i + 1) for i, length in enumerate(lengths)]
            *results, _ = harness.run(sequences, pieces)
            for piece, found in zip(pieces, results, strict=True):
                near(found, exact[piece.sequence], case, case.dtype, "results after slot -1")


@clause("STA-04")
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("lengths", [(1, 1, 1), (1, 3, 70)], ids=["decode", "mixed"])
def test_only_the_written_slots_change(
    subject: PlatformUnderTest,
    bound_device: DeviceRuntime,
    claimed_dtype: str,
    op: str,
    lengths: tuple[int, ...],
) -> None:
    for case in step_cases(op, claimed_dtype):
        sequences = [case.draw(length, seed) for seed, length in enumerate(lengths)]
        for padding in (0, 2):
            harness = StateHarness(subject, bound_device, case, NUM_SLOTS)
            harness.backend.fill(harness.state, 0.25)
            before = harness.contents()
            # One sequence stays in its slot, one keeps what it reads, and one starts.
            slots = [(1, 1), (2, 4), (-1, 6)]
            pieces = [Piece(i, slice(0, n), *slots[i]) for i, n in enumerate(lengths)]
            *_, rest = harness.run(sequences, pieces, padding=padding, padding_requests=padding)
            assert torch.isfinite(rest.float()).all(), f"{case}: results of padding are not finite"
            after = harness.contents()
            changed = [slot for slot in range(NUM_SLOTS) if not torch.equal(before[slot], after[slot])]
            assert changed == [1, 4, 6], f"{case}: the step writes to the slots 1, 4 and 6, and changed {changed}"


@clause("STA-05")
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("cuts", CUTS)
def test_a_sequence_in_pieces_gives_what_it_gives_token_by_token(
    subject: PlatformUnderTest, bound_device: DeviceRuntime, claimed_dtype: str, op: str, cuts: str
) -> None:
    case = step_cases(op, claimed_dtype)[0]
    sequences = [case.draw(length, seed) for seed, length in enumerate(LENGTHS)]
    harness = StateHarness(subject, bound_device, case, NUM_SLOTS)
    harness.backend.fill(harness.state, math.nan)
    queues = [list(sizes) for sizes in CUTS[cuts]]
    done, slots = [0] * len(LENGTHS), [-1] * len(LENGTHS)
    found: list[list[torch.Tensor]] = [[] for _ in LENGTHS]
    step = 0
    while any(queues):
        pieces = []
        for i, queue in enumerate(queues):
            if queue:
                size, read = queue.pop(0), slots[i]
                # In every third step a sequence keeps its slot.
                write = 2 * i if read < 0 else read if step % 3 == 1 else other_slot(read)
                pieces.append(Piece(i, slice(done[i], done[i] + size), read, write))
                done[i], slots[i] = done[i] + size, write
        pieces.sort(key=lambda piece: piece.tokens.stop - piece.tokens.start != 1)  # decode rows first
        *results, _ = harness.run(sequences, pieces, padding=step % 2)
        for piece, result in zip(pieces, results, strict=True):
            found[piece.sequence].append(result)
        step += 1
    state = harness.contents()
    for i, sequence in enumerate(sequences):
        wanted, last = step_by_step(case, sequence)
        near(torch.cat(found[i]), wanted, case, case.dtype, f"results of {LENGTHS[i]} tokens")
        near(state[slots[i]], last, case, case.spec.tensors[0].dtype, f"state after {LENGTHS[i]} tokens")


@clause("STA-06")
def test_slots_are_copied_and_filled_whole(
    subject: PlatformUnderTest, bound_device: DeviceRuntime, claimed_dtype: str
) -> None:
    for op in OPS:
        for case in step_cases(op, claimed_dtype):
            harness = StateHarness(subject, bound_device, case, NUM_SLOTS)
            harness.backend.fill(harness.state, 2.5)
            assert_equal(harness.contents(), torch.full_like(harness.contents(), 2.5), f"filled states of {case}")
            sequence = case.draw(3, 0)
            harness.run([sequence], [Piece(0, slice(0, 3), -1, 6)])
            before = harness.contents()
            source, destination = (bound_device.to_device(torch.tensor(slots)) for slots in ([6, 1], [0, 7]))
            harness.backend.copy_slots(harness.state, source, destination)
            before[[0, 7]] = before[[6, 1]]
            assert_equal(harness.contents(), before, f"states of {case} after copy_slots")


@clause("STA-07")
def test_a_model_with_states_generates_the_oracles_tokens(
    subject: PlatformUnderTest, free_device: None, zoo: Zoo
) -> None:
    expected = zoo.oracle(STATE_FAMILY)
    tie = tie_of(subject.capabilities, main_dtype(subject.capabilities))
    with make_llm(subject, expected.folder) as llm:
        for _ in range(2):  # the second time from states that are kept
            assert_tokens(zoo, STATE_FAMILY, expected, generate(llm, expected.prompts), tie)
        [several] = generate(llm, expected.prompts[-1:], n=3, temperature=1.0, top_k=1)
        if tie == 0:
            assert [list(each.token_ids) for each in several.outputs] == [expected.tokens[-1]] * 3
    if subject.capabilities.chunked_prefill:
        with make_llm(subject, expected.folder, max_num_batched_tokens=11) as llm:
            assert_tokens(zoo, STATE_FAMILY, expected, generate(llm, expected.prompts), tie)


@clause("STA-01", "STA-02", "STA-03", "STA-04", "STA-05", "STA-06", "STA-07", refusal=True)
def test_states_that_are_not_claimed_are_refused(subject: PlatformUnderTest) -> None:
    with pytest.raises(ConfigError, match=r"Capabilities\.state"):
        checked_state_backend(subject.platform, StateSpec((StateTensor((4, 8), "float32"),)))
