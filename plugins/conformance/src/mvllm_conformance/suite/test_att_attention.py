"""ATT: paged attention, run with the methods of the contract, equals exact attention for every kind of step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from mvllm.extension_api.testing import checked_attention_backend, rms_norm, rotary_embedding
from mvllm.plugin_api import AttentionBackend, AttentionSpec, DeviceRuntime, PlatformError, RotarySpec
from mvllm_conformance.attention_cases import CacheHarness, expected, make_case, make_layout, make_spec, run, tolerance
from mvllm_conformance.attention_diagnosis import assert_near
from mvllm_conformance.markers import clause, exhaustive, skip_not_claimed
from mvllm_conformance.platform_under_test import PlatformUnderTest
from mvllm_conformance.tensor_assertions import assert_close, assert_equal

BATCHES: dict[str, list[tuple[int, int]]] = {
    "one prompt": [(0, 37)],
    "one decode": [(100, 1)],
    "decodes around the edges of blocks": [(14, 1), (15, 1), (16, 1), (31, 1), (0, 1)],
    "prompts and decodes": [(0, 20), (50, 1), (0, 1), (300, 1)],
    "chunks of prompts": [(16, 16), (33, 40), (7, 2)],
    "everything, in any order": [(50, 1), (0, 17), (9, 30), (129, 1), (0, 1), (64, 64)],
    "one long prompt among decodes": [(3, 1), (0, 290), (4, 1)],
}
CHUNKED = {"chunks of prompts", "everything, in any order"}
FEW = {"prompts and decodes", "everything, in any order"}
HEADS = [(4, 4), (4, 1), (6, 2), (8, 2)]
HEAD_SIZES = (16, 32, 40, 64, 80, 96, 128, 192, 256)
WINDOWS = (1, 5, 16, 33, 1000)

LONG_CHUNK = 2048
"""New tokens of a request in a step for which backends use other kernels than for short prompts."""
CONTEXTS = {"alone": 0, "after a context": 1030, "after a long context": 30_000}
SHARED_BY = {"1": (2, 2), "4": (4, 1), "8": (8, 1)}
"""Query heads for each key/value head, with numbers of heads."""
LONG_CONTEXT_BYTES = 8 << 30
"""Memory of the devices on which a long context is tested."""


def grid(batches: set[str]) -> list[Any]:
    """Names of BATCHES as parameters; those not in `batches` are exhaustive cases, which --quick leaves out."""
    return [pytest.param(name, marks=() if name in batches else exhaustive) for name in BATCHES]


def simple_spec(dtype: str, **fields: Any) -> AttentionSpec:
    """A spec with one query head for each key/value head. Shared heads are the subject of ATT-04."""
    return make_spec(2, 2, 64, dtype, **fields)


def backend_for(subject: PlatformUnderTest, spec: AttentionSpec) -> AttentionBackend:
    backend = checked_attention_backend(subject.platform, spec)
    reasons = type(backend).validate(spec)
    assert reasons == [], f"attention_backend accepts {spec}, but validate returns {reasons}"
    return backend


def claimed(subject: PlatformUnderTest, features: dict[str, Any]) -> dict[str, Any]:
    """The features that the platform claims."""
    return {name: value for name, value in features.items() if getattr(subject.capabilities, name)}


def requests_of(subject: PlatformUnderTest, batch: str) -> list[tuple[int, int]]:
    """The batch, without chunks of prompts if the platform supports neither chunked prefill nor prefix caching."""
    requests = BATCHES[batch]
    if subject.capabilities.chunked_prefill or subject.capabilities.prefix_caching:
        return requests
    kept = [(before, new) for before, new in requests if before == 0 or new == 1]
    return kept or skip_not_claimed("chunked_prefill, prefix_caching")


def assert_exact(
    subject: PlatformUnderTest,
    runtime: DeviceRuntime,
    spec: AttentionSpec,
    requests: list[tuple[int, int]],
    block_size: int | None = None,
    **options: Any,
) -> None:
    backend = backend_for(subject, spec)
    case = make_case(spec, requests, block_size=block_size or backend.kv_layout().block_sizes[0], **options)
    assert_near(run(backend, runtime, case), case, lambda: run(backend, runtime, case, contiguous=True))


# ----------------------------------------------------------------------------------------------------- kinds of steps


@clause("ATT-03")
@pytest.mark.parametrize("batch", grid(FEW | CHUNKED))
def test_every_kind_of_step(
    subject: PlatformUnderTest, bound_device: DeviceRuntime, claimed_dtype: str, batch: str
) -> None:
    assert_exact(subject, bound_device, simple_spec(claimed_dtype), requests_of(subject, batch))


@clause("ATT-03")
@pytest.mark.parametrize("seed", [pytest.param(seed, marks=exhaustive) for seed in range(6)])
def test_random_steps(subject: PlatformUnderTest, bound_device: DeviceRuntime, claimed_dtype: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    chunked = subject.capabilities.chunked_prefill or subject.capabilities.prefix_caching
    requests = []
    for _ in range(int(rng.integers(1, 12))):
        before = int(rng.integers(0, 200)) * int(rng.integers(0, 2))
        new = 1 if before and (not chunked or rng.random() < 0.5) else int(rng.integers(1, 80))
        requests.append((before, new))
    assert_exact(subject, bound_device, simple_spec(claimed_dtype), requests, seed=seed)


def context_of(subject: PlatformUnderTest, runtime: DeviceRuntime, name: str) -> int:
    """Tokens before a long chunk. A host, and a device that a host emulates, would take minutes for the longest."""
    context = CONTEXTS[name]
    if context and not (subject.capabilities.chunked_prefill or subject.capabilities.prefix_caching):
        skip_not_claimed("chunked_prefill, prefix_caching")
    if context > LONG_CHUNK and (subject.capabilities.unified_memory or runtime.memory().total < LONG_CONTEXT_BYTES):
        return 2 * LONG_CHUNK - 1
    return context


@clause("ATT-03")
@pytest.mark.parametrize("shared_by", [pytest.param(n, marks=() if n == "4" else exhaustive) for n in SHARED_BY])
@pytest.mark.parametrize(
    "context", [pytest.param(name, marks=() if name == "after a context" else exhaustive) for name in CONTEXTS]
)
def test_a_long_chunk_of_a_prompt_among_decodes(
    subject: PlatformUnderTest, bound_device: DeviceRuntime, claimed_dtype: str, context: str, shared_by: str
) -> None:
    # Four times the usual scale: few keys have most of the weight. With equal weights every result would be close to 0.
    spec = make_spec(*SHARED_BY[shared_by], 64, claimed_dtype, scale=0.5)
    requests = [(5, 1), (300, 1), (context_of(subject, bound_device, context), LONG_CHUNK)]
    assert_exact(subject, bound_device, spec, requests)


@clause("ATT-01")
def test_a_request_sees_blocks_that_another_request_of_the_same_step_writes(
    subject: PlatformUnderTest, bound_device: DeviceRuntime, claimed_dtype: str
) -> None:
    if not subject.capabilities.prefix_caching:
        skip_not_claimed("prefix_caching")
    spec = simple_spec(claimed_dtype)
    backend = backend_for(subject, spec)
    size = backend.kv_layout().block_sizes[0]
    # Request 0 reads the first block of request 1, which comes after it in the step and writes that block.
    whole = make_case(spec, [(0, size + 3)], block_size=size)
    table = np.array([[0, 2], [0, 1]], dtype=np.int32)
    layout = make_layout([(size, 3), (0, size + 3)], table, size)
    keys, values, query = whole.keys[0], whole.values[0], whole.query
    harness = CacheHarness(backend, bound_device, 4, size)
    metadata = harness.write(layout, torch.cat([keys[size:], keys]), torch.cat([values[size:], values]))
    queries = bound_device.to_device(torch.cat([query[size:], query]))
    found = bound_device.to_host(backend.forward(queries, harness.kv, metadata)).wait()
    assert_near(found[3:], whole)  # the rows that read what they write, so that other faults are named first
    assert_close(
        found[:3].double(),
        expected(whole)[size:],
        tolerance(spec.dtype, spec.kv_dtype),
        "the first 3 rows read the blocks that the other rows write",
    )


# ---------------------------------------------------------------------------------------------------- visible positions


@clause("ATT-02")
@pytest.mark.parametrize("batch", grid(FEW))
def test_a_query_sees_its_own_past_and_nothing_of_its_future(
    subject: PlatformUnderTest, bound_device: DeviceRuntime, claimed_dtype: str, batch: str
) -> None:
    spec = simple_spec(claimed_dtype)
    backend = backend_for(subject, spec)
    size = backend.kv_layout().block_sizes[0]
    case = make_case(spec, [(0, 2 * size + 3)], block_size=size)
    blocks = case.layout.block_table[0]
    harness = CacheHarness(backend, bound_device, case.num_blocks, size)
    harness.write(case.layout, case.keys[0], case.values[0])
    seen = harness.mean_of_visible_values(blocks[blocks < case.num_blocks].tolist(), 2 * size + 3, as_prompt=True)
    positions = torch.arange(1, 2 * size + 4).view(-1, 1, 1)
    means = case.values[0].double().cumsum(0) / positions
    allowed = tolerance(claimed_dtype, claimed_dtype)
    assert_close(seen, means, allowed, "means of the values at [0, position], by position and head")
    assert_exact(subject, bound_device, spec, requests_of(subject, batch))


@clause("ATT-02", needs="sliding_window")
@pytest.mark.parametrize("window", [pytest.param(w, marks=() if w in (5, 33) else exhaustive) for w in WINDOWS])
@pytest.mark.parametrize("batch", grid(FEW))
def test_a_window_hides_what_lies_before_it(
    subject: PlatformUnderTest, bound_device: DeviceRuntime, claimed_dtype: str, batch: str, window: int
) -> None:
    spec = simple_spec(claimed_dtype, sliding_window=window)
    assert_exact(subject, bound_device, spec, requests_of(subject, batch))


@clause("ATT-08")
@pytest.mark.parametrize("batch", grid(FEW))
def test_soft_cap(subject: PlatformUnderTest, bound_device: DeviceRuntime, claimed_dtype: str, batch: str) -> None:
    assert_exact(subject, bound_device, make_spec(dtype=claimed_dtype, soft_cap=1.5), requests_of(subject, batch))


@clause("ATT-09")
@pytest.mark.parametrize("batch", grid(FEW))
def test_sinks(subject: PlatformUnderTest, bound_device: DeviceRuntime, claimed_dtype: str, batch: str) -> None:
    assert_exact(subject, bound_device, make_spec(dtype=claimed_dtype, sinks=True), requests_of(subject, batch))


@clause("ATT-08", refusal=True)
def test_soft_cap_that_is_not_claimed_is_refused(subject: PlatformUnderTest, bound_device: DeviceRuntime) -> None:
    with pytest.raises(PlatformError, match="soft_cap"):
        checked_attention_backend(subject.platform, make_spec(dtype=subject.capabilities.dtypes[0], soft_cap=4.0))


@clause("ATT-09", refusal=True)
def test_sinks_that_are_not_claimed_are_refused(subject: PlatformUnderTest, bound_device: DeviceRuntime) -> None:
    with pytest.raises(PlatformError, match="sinks"):
        checked_attention_backend(subject.platform, make_spec(dtype=subject.capabilities.dtypes[0], sinks=True))


@clause("ATT-02", needs="sliding_window", refusal=True)
def test_a_window_that_is_not_claimed_is_refused(subject: PlatformUnderTest, bound_device: DeviceRuntime) -> None:
    with pytest.raises(PlatformError, match="sliding_window"):
        checked_attention_backend(subject.platform, make_spec(dtype=subject.capabilities.dtypes[0], sliding_window=8))


# ---------------------------------------------------------------------------------------------------- shapes and dtypes


@clause("ATT-04")
@pytest.mark.parametrize("heads", HEADS, ids=lambda heads: f"{heads[0]}x{heads[1]}")
def test_query_heads_share_key_value_heads(
    subject: PlatformUnderTest, bound_device: DeviceRuntime, claimed_dtype: str, heads: tuple[int, int]
) -> None:
    spec = make_spec(*heads, 64, claimed_dtype)
    assert_exact(subject, bound_device, spec, requests_of(subject, "prompts and decodes"))


@clause("ATT-04")
@pytest.mark.parametrize("batch", grid({"everything, in any order"}))
def test_heads_are_shared_in_every_kind_of_step(
    subject: PlatformUnderTest, bound_device: DeviceRuntime, claimed_dtype: str, batch: str
) -> None:
    features = claimed(subject, {"sliding_window": 20})
    assert_exact(subject, bound_device, make_spec(4, 2, 64, claimed_dtype, **features), requests_of(subject, batch))


@clause("ATT-07")
@pytest.mark.parametrize("head_size", [pytest.param(s, marks=() if s in (64, 128) else exhaustive) for s in HEAD_SIZES])
def test_every_head_size_up_to_the_largest(
    subject: PlatformUnderTest, bound_device: DeviceRuntime, claimed_dtype: str, head_size: int
) -> None:
    largest = subject.capabilities.max_head_size
    if largest is not None and head_size > largest:
        skip_not_claimed(f"heads of more than {largest} elements")
    spec = make_spec(4, 2, head_size, claimed_dtype)
    try:
        checked_attention_backend(subject.platform, spec)
    except PlatformError as e:
        assert head_size not in (64, 128), f"most models have heads of {head_size} elements: {e}"
        skip_not_claimed(f"heads of {head_size} elements: {e}")
    assert_exact(subject, bound_device, spec, requests_of(subject, "prompts and decodes"))


@clause("ATT-07")
def test_the_largest_head_that_is_claimed(
    subject: PlatformUnderTest, bound_device: DeviceRuntime, claimed_dtype: str
) -> None:
    head_size = subject.capabilities.max_head_size or 512
    assert_exact(subject, bound_device, make_spec(4, 2, head_size, claimed_dtype), requests_of(subject, "one prompt"))


@clause("ATT-07")
def test_every_block_size_that_is_offered(
    subject: PlatformUnderTest, bound_device: DeviceRuntime, claimed_dtype: str
) -> None:
    spec = make_spec(dtype=claimed_dtype)
    for block_size in backend_for(subject, spec).kv_layout().block_sizes[:12]:
        assert_exact(
            subject, bound_device, spec, requests_of(subject, "everything, in any order"), block_size=block_size
        )


@clause("ATT-07")
def test_every_storage_dtype_that_is_claimed(
    subject: PlatformUnderTest, bound_device: DeviceRuntime, claimed_dtype: str
) -> None:
    num_run = 0
    for kv_dtype in subject.capabilities.kv_dtypes:
        spec = make_spec(dtype=claimed_dtype, kv_dtype=kv_dtype)
        try:
            checked_attention_backend(subject.platform, spec)
        except PlatformError:
            assert kv_dtype != claimed_dtype
            continue
        num_run += 1
        for features in ({}, {"soft_cap": 3.0, "sliding_window": 20, "sinks": True}):
            spec = make_spec(dtype=claimed_dtype, kv_dtype=kv_dtype, **claimed(subject, features))
            assert_exact(subject, bound_device, spec, requests_of(subject, "prompts and decodes"))
    assert num_run, f"no KV cache dtype of {subject.capabilities.kv_dtypes} is supported with {claimed_dtype}"


@clause("ATT-12")
@pytest.mark.parametrize(
    "sizes", [(24, 16), (192, 128), (64, 80), (576, 512)], ids=lambda sizes: f"{sizes[0]}-{sizes[1]}"
)
@pytest.mark.parametrize("in_keys", [False, True], ids=["apart", "in-keys"])
def test_values_of_another_size_than_the_keys(
    subject: PlatformUnderTest, bound_device: DeviceRuntime, claimed_dtype: str, sizes: tuple[int, int], in_keys: bool
) -> None:
    if in_keys and sizes[1] > sizes[0]:
        pytest.skip("values in keys cannot be larger than keys")
    heads = (4, 1) if in_keys else (4, 2)
    for features in ({}, {"soft_cap": 3.0, "sliding_window": 20, "sinks": True}):
        for batch in ("prompts and decodes", "everything, in any order"):
            spec = make_spec(
                *heads,
                sizes[0],
                claimed_dtype,
                value_head_size=sizes[1],
                values_in_keys=in_keys,
                **claimed(subject, features),
            )
            assert_exact(subject, bound_device, spec, requests_of(subject, batch))


@clause("ATT-12")
def test_values_in_keys_take_no_memory_of_their_own(
    subject: PlatformUnderTest, bound_device: DeviceRuntime, claimed_dtype: str
) -> None:
    apart, within = (
        backend_for(subject, make_spec(4, 1, 576, claimed_dtype, value_head_size=512, values_in_keys=in_keys))
        for in_keys in (False, True)
    )
    assert within.kv_layout().bytes_per_token < 0.6 * apart.kv_layout().bytes_per_token


@clause("ATT-12", refusal=True)
def test_mla_that_is_not_claimed_is_refused(subject: PlatformUnderTest, bound_device: DeviceRuntime) -> None:
    dtype = subject.capabilities.dtypes[0]
    for fields in ({"value_head_size": 32}, {"value_head_size": 32, "values_in_keys": True}, {"values_in_keys": True}):
        with pytest.raises(PlatformError, match="mla"):
            checked_attention_backend(subject.platform, make_spec(4, 1, 64, dtype, **fields))


# ------------------------------------------------------------------------------- refusals, padding, earlier contents


@clause("ATT-05")
def test_a_spec_that_cannot_be_is_refused_with_the_reasons(
    subject: PlatformUnderTest, bound_device: DeviceRuntime
) -> None:
    dtype = subject.capabilities.dtypes[0]
    impossibles = [make_spec(5, 2, 64, dtype), make_spec(4, 2, 64, dtype, kv_dtype="complex64")]
    if subject.capabilities.mla:
        impossibles.append(make_spec(4, 1, 64, dtype, value_head_size=80, values_in_keys=True))
    for impossible in impossibles:
        reasons = type(backend_for(subject, make_spec(dtype=dtype))).validate(impossible)
        assert reasons and "" not in [reason.strip() for reason in reasons], f"validate({impossible}) returns {reasons}"
        with pytest.raises(PlatformError) as caught:
            checked_attention_backend(subject.platform, impossible)
        missing = [reason for reason in reasons if reason not in str(caught.value)]
        assert missing != reasons, f"the error {caught.value} has none of the reasons that validate returns: {reasons}"


@clause("ATT-05")
def test_validate_is_pure(subject: PlatformUnderTest, bound_device: DeviceRuntime) -> None:
    spec = make_spec(dtype=subject.capabilities.dtypes[0])
    cls = type(backend_for(subject, spec))
    assert cls.validate(spec) == cls.validate(spec) == []


@clause("ATT-06")
@pytest.mark.parametrize("poison", [0.0, float("nan")], ids=["clean", "poisoned"])
def test_padding_changes_nothing_and_is_finite(
    subject: PlatformUnderTest, bound_device: DeviceRuntime, claimed_dtype: str, poison: float
) -> None:
    spec = make_spec(dtype=claimed_dtype)
    backend = backend_for(subject, spec)
    requests = requests_of(subject, "prompts and decodes")
    case = make_case(spec, requests, block_size=backend.kv_layout().block_sizes[0], padding=13, padding_requests=3)
    found = run(backend, bound_device, case, poison=poison)
    assert_near(found, case)
    rows = (~torch.isfinite(found)).any(dim=1).nonzero().flatten().tolist()
    assert not rows, f"rows {rows} are not finite; padding begins at row {case.num_real_tokens}"


@clause("ATT-10")
@pytest.mark.parametrize("batch", grid(FEW))
def test_what_earlier_tenants_left_is_not_seen(
    subject: PlatformUnderTest, bound_device: DeviceRuntime, claimed_dtype: str, batch: str
) -> None:
    spec = make_spec(dtype=claimed_dtype)
    backend = backend_for(subject, spec)
    case = make_case(spec, requests_of(subject, batch), block_size=backend.kv_layout().block_sizes[0])
    for poison in (float("nan"), 1e4):
        assert_near(run(backend, bound_device, case, poison=poison), case)


@clause("ATT-11")
def test_a_result_does_not_depend_on_what_else_is_in_the_step(
    subject: PlatformUnderTest, bound_device: DeviceRuntime, claimed_dtype: str
) -> None:
    spec = make_spec(dtype=claimed_dtype)
    backend = backend_for(subject, spec)
    size = backend.kv_layout().block_sizes[0]
    alone = run(backend, bound_device, make_case(spec, [(0, 20)], block_size=size))
    batch = make_case(spec, [(0, 20), (50, 1), (0, 33)], block_size=size)
    single = make_case(spec, [(0, 20)], block_size=size)
    batch.keys[0], batch.values[0] = single.keys[0], single.values[0]
    batch.query[:20] = single.query
    assert_equal(run(backend, bound_device, batch)[:20], alone, "the request in a batch, by token")


SEQUENCES = {"short": 45, "long": 613}
CUTS = {"short": ((0, 17), (44, 45), (20, 45)), "long": ((0, 613), (0, 300), (300, 301), (259, 612), (612, 613))}
OTHERS: tuple[list[tuple[int, int]], ...] = ([], [(50, 1)], [(0, 33), (600, 1), (601, 1), (7, 40)], [(30, 1)] * 31)
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "sliding_window": {"sliding_window": 150},
    "soft_cap": {"soft_cap": 3.0},
    "sinks": {"sinks": True},
}


@clause("ATT-14")
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("length", SEQUENCES)
def test_a_batch_invariant_result_has_the_same_bits_in_every_step(
    subject: PlatformUnderTest, bound_device: DeviceRuntime, claimed_dtype: str, length: str, feature: str
) -> None:
    if feature != "plain" and not getattr(subject.capabilities, feature):
        skip_not_claimed(feature)
    spec = make_spec(dtype=claimed_dtype, batch_invariant=True, **FEATURES[feature])
    backend = backend_for(subject, spec)
    size = backend.kv_layout().block_sizes[0]
    whole = make_case(spec, [(0, SEQUENCES[length])], block_size=size, seed=1)
    wanted = run(backend, bound_device, whole)
    assert_near(wanted, whole)
    for number, (first, end) in enumerate(CUTS[length]):
        for others in OTHERS:
            place = number % (len(others) + 1)
            requests = [*others[:place], (first, end - first), *others[place:]]
            case = make_case(spec, requests, block_size=size, seed=2)
            case.keys[place], case.values[place] = whole.keys[0][:end], whole.values[0][:end]
            case.sinks, start = whole.sinks, sum(new for _, new in requests[:place])
            case.query[start : start + end - first] = whole.query[first:end]
            found = run(backend, bound_device, case)[start : start + end - first]
            assert_equal(found, wanted[first:end], f"tokens {first} to {end} in a step of {requests}")


# ---------------------------------------------------------------------------------------------- rotary and KV write


ROTARIES = {
    "rotary": RotarySpec(64),
    "norm, part of a head": RotarySpec(32, norm_eps=1e-5),
    "adjacent pairs": RotarySpec(48, interleaved=True),
    "norm, adjacent pairs": RotarySpec(64, interleaved=True, norm_eps=1e-5),
}


@clause("ATT-13")
@pytest.mark.parametrize("kv_dtype", [None, "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("rotary", ROTARIES.values(), ids=list(ROTARIES))
def test_a_rotary_writer_gives_what_the_operations_and_write_kv_give(
    subject: PlatformUnderTest,
    bound_device: DeviceRuntime,
    claimed_dtype: str,
    rotary: RotarySpec,
    kv_dtype: str | None,
) -> None:
    if kv_dtype not in (None, *subject.capabilities.kv_dtypes):
        skip_not_claimed(f"KV cache dtype {kv_dtype}")
    spec = make_spec(4, 2, 64, claimed_dtype, kv_dtype=kv_dtype or claimed_dtype)
    backend = backend_for(subject, spec)
    writer = backend.rotary_writer(rotary)
    if writer is None:
        skip_not_claimed(f"rotary_writer for {rotary}")
    size = backend.kv_layout().block_sizes[0]
    given = make_case(spec, [(0, 5), (0, 1), (0, 3)], block_size=size, padding=2)
    keys, values = (torch.cat(parts) for parts in (given.keys, given.values))
    padding = torch.full((2, *keys.shape[1:]), 0.5, dtype=keys.dtype)
    key, value = (torch.cat([rows, padding]) for rows in (keys, values))
    angles = torch.rand(40, rotary.rotary_dim // 2, generator=torch.Generator().manual_seed(1)) * 6
    table, index = torch.cat((angles.cos(), angles.sin()), dim=1), torch.arange(len(key)) * 3 % 40
    weights = [torch.rand(64, generator=torch.Generator().manual_seed(seed)).to(key.dtype) + 0.5 for seed in (2, 3)]

    # What the operations give, on the host.
    normed = [given.query, key]
    if rotary.norm_eps is not None:
        normed = [rms_norm(x, weight, rotary.norm_eps) for x, weight in zip(normed, weights, strict=True)]
    if rotary.interleaved:
        order = torch.arange(64)
        order[: rotary.rotary_dim] = order[: rotary.rotary_dim].view(-1, 2).T.flatten()
        normed = [x[..., order] for x in normed]
    wanted_query, wanted_key = rotary_embedding(index, normed[0], normed[1], table)
    wanted = replace(given, query=wanted_query, keys=list(wanted_key[: len(keys)].split([5, 1, 3])))

    harness = CacheHarness(backend, bound_device, given.num_blocks, size)
    unused = np.setdiff1d(np.arange(given.num_blocks * size), given.layout.slot_mapping)
    slots = torch.from_numpy(unused)
    before = [bound_device.to_host(part).wait() for part in backend.read_slots(harness.kv, slots)]
    metadata = harness.begin_step(given.layout)
    fused = bound_device.to_device(torch.cat([x.flatten(1) for x in (given.query, key, value)], dim=1))
    parts = fused.split([x[0].numel() for x in (given.query, key, value)], dim=1)
    views = [part.view(len(key), -1, 64) for part in parts]
    norms = [bound_device.to_device(weight) for weight in weights] if rotary.norm_eps is not None else [None, None]
    angles_given = bound_device.to_device(index), bound_device.to_device(table)
    with bound_device.inference_mode():
        query = writer(harness.kv, *views, metadata, *angles_given, *norms)
        found = backend.forward(query, harness.kv, metadata)
    assert_close(
        bound_device.to_host(query).wait()[: len(keys)].float(), wanted_query[: len(keys)].float(),
        tolerance(claimed_dtype, claimed_dtype), "the query",
    )  # fmt: skip
    assert_near(bound_device.to_host(found).wait(), wanted)
    for old, part in zip(before, backend.read_slots(harness.kv, slots), strict=True):
        same = bound_device.to_host(part).wait().view(torch.uint8)
        assert_equal(same, old.view(torch.uint8), "slots that are not in slot_mapping")
