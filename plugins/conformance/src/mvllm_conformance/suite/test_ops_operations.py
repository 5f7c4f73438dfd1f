"""OPS: a platform's op providers return the results of the references."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch

from mvllm.extension_api.testing import REFERENCE, SCHEMAS, OpTable, ReadOnce, torch_dtype
from mvllm.plugin_api import (
    BlockQuantizedPart,
    BlockQuantizedWeight,
    DeviceRuntime,
    Float8Weight,
    OpCase,
    OpProvider,
    QuantizedWeight,
)
from mvllm_conformance.markers import clause, skip_not_claimed
from mvllm_conformance.op_call import OpCall
from mvllm_conformance.op_cases import exact, op_calls, result_dtype, tolerance
from mvllm_conformance.platform_under_test import PlatformUnderTest
from mvllm_conformance.quantized_moe_cases import with_unrounded_inputs
from mvllm_conformance.state_cases import compared, has_state, one_request, state_dtypes
from mvllm_conformance.tensor_assertions import assert_close, assert_equal

OPS = sorted(SCHEMAS)


def providers_of(subject: PlatformUnderTest, op: str) -> list[OpProvider]:
    found = [provider for provider in subject.platform.ops() if provider.op == op]
    return found or skip_not_claimed(f"{op}: the reference runs")


def supported_calls(provider: OpProvider, dtype: str, *, batch_invariant: bool = False) -> list[OpCall]:
    """The cases that the provider supports."""
    calls = op_calls(provider.op, dtype)
    return [t for t in calls if not provider.supports(OpCase(provider.op, dtype, t.facts, batch_invariant))]


def contiguous(case_: OpCall) -> OpCall:
    """The case with contiguous tensors."""
    return replace(
        case_,
        make=lambda: tuple(x.contiguous() if isinstance(x, torch.Tensor) else x for x in case_.make()),
    )


def move(runtime: DeviceRuntime, arguments: tuple[Any, ...]) -> list[Any]:
    """Copies arguments to the device; strided views keep their strides."""
    moved = []
    for argument in arguments:
        if isinstance(argument, torch.Tensor) and not argument.is_contiguous():
            whole = torch.empty_strided(argument.size(), argument.stride(), dtype=argument.dtype).copy_(argument)
            storage = runtime.to_device(
                torch.as_strided(whole, (whole.untyped_storage().size() // whole.itemsize,), (1,))
            )
            argument = torch.as_strided(storage, argument.size(), argument.stride())
        elif isinstance(argument, torch.Tensor):
            argument = runtime.to_device(argument.clone())
        elif isinstance(argument, tuple):
            argument = tuple(move(runtime, argument))
        elif isinstance(argument, QuantizedWeight | Float8Weight | BlockQuantizedWeight | BlockQuantizedPart):
            names = [field.name for field in fields(argument)]
            parts = move(runtime, tuple(getattr(argument, name) for name in names))
            argument = replace(argument, **dict(zip(names, parts, strict=True)))
        moved.append(argument)
    return moved


def results(found: Any) -> list[torch.Tensor]:
    return list(found) if isinstance(found, tuple | list) else [found]


def outcome(runtime: DeviceRuntime, case_: OpCall, found: Any, arguments: list[Any]) -> list[torch.Tensor]:
    """The results of a call on the host, with the states that it updated."""
    host = [runtime.to_host(tensor).wait() for tensor in results(found)]
    if not has_state(case_.op):
        return host
    updates = SCHEMAS[case_.op].updates
    after = [
        runtime.to_host(argument).wait() if name in updates else argument
        for name, argument in zip(SCHEMAS[case_.op].parameters, arguments, strict=True)
    ]
    return compared(case_, host, after)


def required(signature: inspect.Signature) -> list[inspect.Parameter]:
    return [p for p in signature.parameters.values() if p.default is inspect.Parameter.empty]


def as_parameter(weight: Any) -> Any:
    """A weight as layers pass it to `prepare`: tensors as parameters, quantized weights unchanged."""
    return torch.nn.Parameter(weight, requires_grad=False) if isinstance(weight, torch.Tensor) else weight


def read_once(weights: Sequence[Any]) -> ReadOnce:
    """The weights of experts, as layers pass them to `prepare`."""
    return ReadOnce(partial(weights.__getitem__, expert) for expert in range(len(weights)))


def call(runtime: DeviceRuntime, provider: OpProvider, case_: OpCall) -> tuple[list[torch.Tensor], list[Any]]:
    """The provider's results on the host, and the arguments of the call."""
    arguments = move(runtime, case_.make())
    if provider.prepare is not None and case_.weight is not None:
        indices = case_.weight if isinstance(case_.weight, tuple) else (case_.weight,)
        weights = tuple(as_parameter(arguments[index]) for index in indices)
        if case_.op in ("quantized_moe", "quantized_ungated_moe"):
            weights = tuple(read_once(of_experts) for of_experts in weights)
        prepared = provider.prepare(weights if isinstance(case_.weight, tuple) else weights[0])
        for index, weight in zip(indices, prepared if isinstance(case_.weight, tuple) else (prepared,), strict=True):
            arguments[index] = weight
    with runtime.inference_mode():
        found = provider.function(*arguments)
    return outcome(runtime, case_, found, arguments), arguments


def assert_like_reference(provider: OpProvider, case_: OpCall, found: list[torch.Tensor], dtype: str) -> None:
    """Fails unless results on the host are the reference's, within the tolerance of `dtype`."""
    wanted = results(exact(case_ if provider.rounds_inputs else with_unrounded_inputs(case_)))
    assert len(found) == len(wanted), f"{provider.name}: {case_}"
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape, f"{provider.name}: {case_}"
        if not other.dtype.is_floating_point:  # indices, for instance
            assert_equal(one, other, f"{provider.name}: {case_}")
            continue
        assert one.dtype in (torch_dtype(dtype), *state_dtypes(case_)), f"{provider.name}: {case_}"
        off = float((one.double() - other).abs().max() / other.abs().max().clamp(min=1e-3))
        assert off < tolerance(dtype, case_), f"{provider.name}, {case_}: off by {off:.2g}"


@clause("OPS-01")
def test_every_provider_replaces_an_operation_that_there_is(
    subject: PlatformUnderTest, bound_device: DeviceRuntime
) -> None:
    providers = list(subject.platform.ops())
    others = [type(provider).__name__ for provider in providers if not isinstance(provider, OpProvider)]
    assert not others, f"ops() must return OpProviders; found {', '.join(others)}"
    OpTable.resolve(providers)
    for provider in providers:
        assert provider.name.strip() and provider.name != REFERENCE
        expected = inspect.signature(SCHEMAS[provider.op].reference)
        found = inspect.signature(provider.function)
        for count in {len(required(expected)), len(expected.parameters)}:
            try:
                found.bind(*range(count))
            except TypeError as e:
                raise AssertionError(f"{provider.name} has the parameters {found}, not {expected}") from e


@clause("OPS-01")
@pytest.mark.parametrize("op", OPS)
def test_a_provider_gives_what_the_reference_gives(
    subject: PlatformUnderTest, bound_device: DeviceRuntime, claimed_dtype: str, op: str
) -> None:
    num_run, dtype = 0, result_dtype(op, claimed_dtype)
    for provider in providers_of(subject, op):
        for case_ in supported_calls(provider, claimed_dtype):
            try:
                assert_like_reference(provider, case_, call(bound_device, provider, case_)[0], dtype)
            except AssertionError as e:
                if has_state(op) or all(x.is_contiguous() for x in case_.make() if isinstance(x, torch.Tensor)):
                    raise
                same = contiguous(case_)
                assert_like_reference(provider, same, call(bound_device, provider, same)[0], dtype)
                raise AssertionError(
                    f"{e}; with contiguous tensors the result is right: the provider ignores strides"
                ) from e
            num_run += 1
    if not num_run:
        skip_not_claimed(f"{op} in {claimed_dtype}: the reference runs")


@clause("OPS-05")
def test_rotary_embedding_rounds_once(
    subject: PlatformUnderTest, bound_device: DeviceRuntime, claimed_dtype: str
) -> None:
    dtype, num_run = torch_dtype(claimed_dtype), 0
    if dtype.itemsize != 2:
        skip_not_claimed(f"{claimed_dtype} is not rounded: OPS-01 tests it")
    for provider in providers_of(subject, "rotary_embedding"):
        for case_ in supported_calls(provider, claimed_dtype):
            half = case_.facts["rotary_dim"] // 2
            found, _ = call(bound_device, provider, case_)
            for one, other in zip(found, results(exact(case_)), strict=True):
                a, b = other[..., :half], other[..., half : 2 * half]
                allowed = 0.6 * torch.finfo(dtype).eps * torch.hypot(a, b).clamp(min=1e-6)
                what = f"{provider.name}, {case_}: not computed in float32 and rounded once, by token, head and element"
                rotated = one[..., : 2 * half]
                assert_close(rotated, other[..., : 2 * half], torch.cat((allowed, allowed), dim=-1), what)
            num_run += 1
    if not num_run:
        skip_not_claimed(f"rotary_embedding in {claimed_dtype}: the reference runs")


@clause("OPS-01")
def test_rows_of_a_prepared_weight_are_those_of_the_weight(
    subject: PlatformUnderTest, bound_device: DeviceRuntime, claimed_dtype: str
) -> None:
    num_run = 0
    for provider in providers_of(subject, "linear"):
        if provider.lookup is None:
            continue
        assert provider.prepare is not None, f"{provider.name} has `lookup` without `prepare`"
        for case_ in op_calls("embedding", claimed_dtype):
            ids, weight, *first = move(bound_device, case_.make())
            facts = {"in_features": weight.shape[1], "out_features": weight.shape[0], "bias": False}
            if provider.supports(OpCase("linear", claimed_dtype, facts)):
                continue
            with bound_device.inference_mode():
                found = provider.lookup(ids, provider.prepare(as_parameter(weight)), *first)
            [wanted] = results(exact(case_))
            assert found.dtype == torch_dtype(claimed_dtype), f"{provider.name}: {case_}"
            assert_equal(bound_device.to_host(found).wait().double(), wanted, f"{provider.name}: {case_}")
            num_run += 1
    if not num_run:
        skip_not_claimed(f"lookup in {claimed_dtype}: no provider has it")


@clause("OPS-02")
@pytest.mark.parametrize("op", OPS)
def test_supports_answers_with_reasons_for_whatever_it_is_asked(
    subject: PlatformUnderTest, bound_device: DeviceRuntime, op: str
) -> None:
    dtypes = [*subject.capabilities.dtypes, "float64"]
    for provider in providers_of(subject, op):
        for dtype in dtypes:
            for case_ in op_calls(op, dtype):
                case = OpCase(op, dtype, case_.facts)
                reasons = provider.supports(case)
                assert reasons == provider.supports(case), "supports must be pure"
                assert isinstance(reasons, list) and all(isinstance(r, str) and r.strip() for r in reasons), reasons


@clause("OPS-02")
@pytest.mark.parametrize("op", OPS)
def test_the_reference_runs_what_no_provider_supports(
    subject: PlatformUnderTest, bound_device: DeviceRuntime, op: str
) -> None:
    table = OpTable.resolve(subject.platform.ops())
    for case_ in op_calls(op, "float64"):
        refused = all(
            provider.supports(OpCase(op, "float64", case_.facts))
            for provider in subject.platform.ops()
            if provider.op == op
        )
        assert (table.get(op, torch.float64, **case_.facts).provider == REFERENCE) is refused


@clause("OPS-02")
@pytest.mark.parametrize("op", OPS)
def test_references_run_on_the_device(
    subject: PlatformUnderTest, bound_device: DeviceRuntime, claimed_dtype: str, op: str
) -> None:
    for case_ in op_calls(op, claimed_dtype):
        arguments = move(bound_device, case_.make())
        with bound_device.inference_mode():
            found = SCHEMAS[op].reference(*arguments)
        hosts = outcome(bound_device, case_, found, arguments)
        for host, other in zip(hosts, results(exact(case_)), strict=True):
            off = float((host.double() - other).abs().max() / other.abs().max().clamp(min=1e-3))
            assert off < tolerance(claimed_dtype, case_), f"{case_}: off by {off:.2g}"


@clause("OPS-03")
@pytest.mark.parametrize("op", OPS)
def test_a_provider_leaves_its_arguments_alone(
    subject: PlatformUnderTest, bound_device: DeviceRuntime, claimed_dtype: str, op: str
) -> None:
    schema = SCHEMAS[op]
    num_run = 0
    for provider in providers_of(subject, op):
        for case_ in supported_calls(provider, claimed_dtype):
            before = case_.make()
            _, arguments = call(bound_device, provider, case_)
            for name, old, new in zip(
                schema.parameters, before, arguments, strict=False
            ):  # optional ones may be left out
                prepared = provider.prepare is not None and name in ("weight", "gate_up", "up", "down")
                changes = name in (*schema.may_overwrite, *schema.updates)
                if not isinstance(old, torch.Tensor) or changes or prepared:
                    continue
                assert_equal(bound_device.to_host(new).wait(), old, f"{provider.name} changed {name}: {case_}")
            num_run += 1
    if not num_run:
        skip_not_claimed(f"{op} in {claimed_dtype}: the reference runs")


FEWEST_ROWS = 4

PER_ROW = {
    *("x", "residual", "gate", "index", "query", "key", "ids", "logits", "expert_ids", "expert_weights"),
    *("peaks", "inv_temperature", "min_p_gap", "top_k", "top_p", "coarse", "fine"),
}
"""Parameters with one row (or number) for each row of the result."""


def with_rows(case_: OpCall, rows: list[int]) -> OpCall:
    """The case with some rows of its arguments, in this order."""
    names = list(SCHEMAS[case_.op].parameters)

    def make() -> tuple[Any, ...]:
        return tuple(
            argument[rows] if name in PER_ROW and isinstance(argument, torch.Tensor) else argument
            for name, argument in zip(names, case_.make(), strict=False)
        )

    return replace(case_, make=make)


def assert_requests_are_independent(
    runtime: DeviceRuntime, provider: OpProvider, case_: OpCall, whole: list[torch.Tensor]
) -> None:
    """Fails unless each request has the bits of the result and of the state that it has among the others, alone and cut
    into two steps.

    Args:
        whole: The outcome of the case.
    """
    names, arguments = list(SCHEMAS[case_.op].parameters), case_.make()
    starts, slots = (arguments[names.index(name)].tolist() for name in ("query_start_loc", "write_slots"))
    for request, (start, stop) in enumerate(pairwise(starts)):
        if start == stop:
            continue
        alone, _ = call(runtime, provider, one_request(case_, request))
        where = f"{provider.name}, request {request} of {case_}"
        assert_equal(alone[0], whole[0][start:stop], where)
        assert_equal(alone[-1][slots[request]], whole[-1][slots[request]], where)
        for middle in {1, (stop - start) // 2, stop - start - 1} - {0, stop - start}:
            first, after = call(runtime, provider, one_request(case_, request, slice(middle)))
            states = [runtime.to_host(after[names.index(name)]).wait() for name in SCHEMAS[case_.op].updates]
            rest, _ = call(runtime, provider, one_request(case_, request, slice(middle, None), states))
            where = f"{provider.name}, request {request} of {case_}, cut behind {middle} tokens"
            assert_equal(torch.cat((first[0], rest[0])), whole[0][start:stop], where)
            assert_equal(rest[-1][slots[request]], whole[-1][slots[request]], where)


def assert_sequences_are_independent(
    runtime: DeviceRuntime, provider: OpProvider, case_: OpCall, whole: torch.Tensor
) -> None:
    """Fails unless each packed sequence has the bits alone that it has among the others.

    Args:
        whole: The outcome of the case.
    """
    query, key, value, starts, scale, keys_of = case_.make()
    for (start, stop), (first, last) in zip(pairwise(starts), pairwise(keys_of or starts), strict=True):
        if start == stop:
            continue
        mine = (query[start:stop], key[first:last], value[first:last], (0, stop - start), scale)
        alone = replace(case_, make=partial(tuple, (*mine, None if keys_of is None else (0, last - first))))
        found, _ = call(runtime, provider, alone)
        assert_equal(found[0], whole[start:stop], f"{provider.name}, tokens {start} to {stop} of {case_}")


@clause("OPS-04")
@pytest.mark.parametrize("op", OPS)
def test_a_row_of_a_batch_invariant_provider_does_not_depend_on_the_others(
    subject: PlatformUnderTest, bound_device: DeviceRuntime, claimed_dtype: str, op: str
) -> None:
    num_run = 0
    for provider in providers_of(subject, op):
        if not provider.batch_invariant:
            continue
        for case_ in supported_calls(provider, claimed_dtype, batch_invariant=True):
            whole, _ = call(bound_device, provider, case_)
            assert_like_reference(provider, case_, whole, result_dtype(op, claimed_dtype))
            if has_state(op):
                assert_requests_are_independent(bound_device, provider, case_, whole)
                num_run += 1
                continue
            if "cu_seqlens" in SCHEMAS[op].parameters:
                assert_sequences_are_independent(bound_device, provider, case_, whole[0])
                num_run += 1
                continue
            count = len(whole[0])
            if count < FEWEST_ROWS:
                continue
            for rows in ([0], [count - 1], list(range(count))[::-1], list(range(2, count, 2)), [1] * 40):
                part, _ = call(bound_device, provider, with_rows(case_, rows))
                for one, other in zip(part, whole, strict=True):
                    assert_equal(one, other[rows], f"{provider.name}, rows {rows} of {case_}")
            num_run += 1
    if not num_run:
        skip_not_claimed(f"{op} in {claimed_dtype}: no batch-invariant provider")
