"""OPS: an operation that a platform replaces does what the reference does."""

from __future__ import annotations

import inspect
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from mvllm.ops.all_schemas import SCHEMAS
from mvllm.ops.dtypes import torch_dtype
from mvllm.ops.registry import REFERENCE, OpTable
from mvllm.plugin_api import DeviceRuntime, Float8Weight, OpCase, OpProvider, QuantizedWeight
from mvllm.testing.markers import clause, skip_not_claimed
from mvllm.testing.op_call import OpCall
from mvllm.testing.op_cases import exact, op_calls, tolerance
from mvllm.testing.platform_under_test import PlatformUnderTest
from mvllm.testing.tensor_assertions import assert_equal

OPS = sorted(SCHEMAS)


def providers_of(subject: PlatformUnderTest, op: str) -> list[OpProvider]:
    found = [provider for provider in subject.platform.ops() if provider.op == op]
    return found or skip_not_claimed(f"{op}: the reference runs")


def taken(provider: OpProvider, dtype: str) -> list[OpCall]:
    """The trials that the provider supports."""
    return [t for t in op_calls(provider.op, dtype) if not provider.supports(OpCase(provider.op, dtype, t.facts))]


def move(runtime: DeviceRuntime, arguments: tuple[Any, ...]) -> list[Any]:
    """To the device; views stay views of what they were cut from, in layout."""
    moved = []
    for argument in arguments:
        if isinstance(argument, torch.Tensor) and not argument.is_contiguous():
            whole = torch.empty_strided(argument.size(), argument.stride(), dtype=argument.dtype).copy_(argument)
            there = runtime.to_device(
                torch.as_strided(whole, (whole.untyped_storage().size() // whole.itemsize,), (1,))
            )
            argument = torch.as_strided(there, argument.size(), argument.stride())
        elif isinstance(argument, torch.Tensor):
            argument = runtime.to_device(argument.clone())
        elif isinstance(argument, QuantizedWeight | Float8Weight):
            names = [field.name for field in fields(argument)]
            parts = move(runtime, tuple(getattr(argument, name) for name in names))
            argument = replace(argument, **dict(zip(names, parts, strict=True)))
        moved.append(argument)
    return moved


def results(found: Any) -> list[torch.Tensor]:
    return list(found) if isinstance(found, tuple | list) else [found]


def required(signature: inspect.Signature) -> list[inspect.Parameter]:
    return [p for p in signature.parameters.values() if p.default is inspect.Parameter.empty]


def as_parameter(weight: Any) -> Any:
    """As a layer hands it to `prepare`; a quantized weight is handed over as it is."""
    return torch.nn.Parameter(weight, requires_grad=False) if isinstance(weight, torch.Tensor) else weight


def call(runtime: DeviceRuntime, provider: OpProvider, trial: OpCall) -> tuple[list[torch.Tensor], list[Any]]:
    """What the provider gives, on the host, and the arguments it was called with."""
    arguments = move(runtime, trial.make())
    if provider.prepare is not None and trial.weight is not None:
        places = trial.weight if isinstance(trial.weight, tuple) else (trial.weight,)
        weights = tuple(as_parameter(arguments[place]) for place in places)
        prepared = provider.prepare(weights if isinstance(trial.weight, tuple) else weights[0])
        for place, weight in zip(places, prepared if isinstance(trial.weight, tuple) else (prepared,), strict=True):
            arguments[place] = weight
    with runtime.inference_mode():
        found = results(provider.function(*arguments))
    return [runtime.to_host(tensor).wait() for tensor in found], arguments


@clause("OPS-01")
def test_every_provider_replaces_an_operation_that_there_is(
    subject: PlatformUnderTest, bound_device: DeviceRuntime
) -> None:
    providers = list(subject.platform.ops())
    others = [type(provider).__name__ for provider in providers if not isinstance(provider, OpProvider)]
    assert not others, f"ops() returns OpProviders, and here {', '.join(others)}"
    OpTable.resolve(providers)
    for provider in providers:
        assert provider.name.strip() and provider.name != REFERENCE
        expected = inspect.signature(SCHEMAS[provider.op].reference)
        found = inspect.signature(provider.function)
        for count in {len(required(expected)), len(expected.parameters)}:
            try:
                found.bind(*range(count))
            except TypeError as e:
                raise AssertionError(f"{provider.name} takes {found}, not {expected}") from e


@clause("OPS-01")
@pytest.mark.parametrize("op", OPS)
def test_a_provider_gives_what_the_reference_gives(
    subject: PlatformUnderTest, bound_device: DeviceRuntime, claimed_dtype: str, op: str
) -> None:
    tried = 0
    for provider in providers_of(subject, op):
        for trial in taken(provider, claimed_dtype):
            found, _ = call(bound_device, provider, trial)
            wanted = results(exact(trial))
            assert len(found) == len(wanted), f"{provider.name}: {trial}"
            for one, other in zip(found, wanted, strict=True):
                assert one.shape == other.shape, f"{provider.name}: {trial}"
                if not other.dtype.is_floating_point:  # places, say
                    assert_equal(one, other, f"{provider.name}: {trial}")
                    continue
                assert one.dtype == torch_dtype(claimed_dtype), f"{provider.name}: {trial}"
                off = float((one.double() - other).abs().max() / other.abs().max().clamp(min=1e-3))
                assert off < tolerance(claimed_dtype), f"{provider.name}, {trial}: off by {off:.2g}"
            tried += 1
    if not tried:
        skip_not_claimed(f"{op} in {claimed_dtype}: the reference runs")


@clause("OPS-01")
def test_rows_of_a_prepared_weight_are_those_of_the_weight(
    subject: PlatformUnderTest, bound_device: DeviceRuntime, claimed_dtype: str
) -> None:
    tried = 0
    for provider in providers_of(subject, "linear"):
        if provider.lookup is None:
            continue
        assert provider.prepare is not None, f"{provider.name} has a form to look up rows in, and nothing makes it"
        for trial in op_calls("embedding", claimed_dtype):
            ids, weight, *first = move(bound_device, trial.make())
            facts = {"in_features": weight.shape[1], "out_features": weight.shape[0], "bias": False}
            if provider.supports(OpCase("linear", claimed_dtype, facts)):
                continue
            with bound_device.inference_mode():
                found = provider.lookup(ids, provider.prepare(as_parameter(weight)), *first)
            [wanted] = results(exact(trial))
            assert found.dtype == torch_dtype(claimed_dtype), f"{provider.name}: {trial}"
            assert_equal(bound_device.to_host(found).wait().double(), wanted, f"{provider.name}: {trial}")
            tried += 1
    if not tried:
        skip_not_claimed(f"in {claimed_dtype} no provider reads rows of a weight that it prepared")


@clause("OPS-02")
@pytest.mark.parametrize("op", OPS)
def test_supports_answers_with_reasons_for_whatever_it_is_asked(
    subject: PlatformUnderTest, bound_device: DeviceRuntime, op: str
) -> None:
    dtypes = [*subject.capabilities.dtypes, "float64"]
    for provider in providers_of(subject, op):
        for dtype in dtypes:
            for trial in op_calls(op, dtype):
                case = OpCase(op, dtype, trial.facts)
                reasons = provider.supports(case)
                assert reasons == provider.supports(case), "supports is pure"
                assert isinstance(reasons, list) and all(isinstance(r, str) and r.strip() for r in reasons), reasons


@clause("OPS-02")
@pytest.mark.parametrize("op", OPS)
def test_the_reference_runs_what_no_provider_supports(
    subject: PlatformUnderTest, bound_device: DeviceRuntime, op: str
) -> None:
    table = OpTable.resolve(subject.platform.ops())
    for trial in op_calls(op, "float64"):
        refused = all(
            provider.supports(OpCase(op, "float64", trial.facts))
            for provider in subject.platform.ops()
            if provider.op == op
        )
        assert (table.get(op, torch.float64, **trial.facts).provider == REFERENCE) is refused


@clause("OPS-02")
@pytest.mark.parametrize("op", OPS)
def test_references_run_on_the_device(
    subject: PlatformUnderTest, bound_device: DeviceRuntime, claimed_dtype: str, op: str
) -> None:
    for trial in op_calls(op, claimed_dtype):
        arguments = move(bound_device, trial.make())
        with bound_device.inference_mode():
            found = results(SCHEMAS[op].reference(*arguments))
        for one, other in zip(found, results(exact(trial)), strict=True):
            host = bound_device.to_host(one).wait()
            off = float((host.double() - other).abs().max() / other.abs().max().clamp(min=1e-3))
            assert off < tolerance(claimed_dtype), f"{trial}: off by {off:.2g}"


@clause("OPS-03")
@pytest.mark.parametrize("op", OPS)
def test_a_provider_leaves_its_arguments_alone(
    subject: PlatformUnderTest, bound_device: DeviceRuntime, claimed_dtype: str, op: str
) -> None:
    schema = SCHEMAS[op]
    tried = 0
    for provider in providers_of(subject, op):
        for trial in taken(provider, claimed_dtype):
            before = trial.make()
            _, arguments = call(bound_device, provider, trial)
            for name, old, new in zip(
                schema.parameters, before, arguments, strict=False
            ):  # optional ones may be left out
                prepared = provider.prepare is not None and name in ("weight", "gate_up", "down")
                if not isinstance(old, torch.Tensor) or name in schema.may_overwrite or prepared:
                    continue
                assert_equal(bound_device.to_host(new).wait(), old, f"{provider.name} changed {name}: {trial}")
            tried += 1
    if not tried:
        skip_not_claimed(f"{op} in {claimed_dtype}: the reference runs")
