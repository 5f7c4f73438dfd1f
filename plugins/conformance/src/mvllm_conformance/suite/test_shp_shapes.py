"""SHP: steps have the platform's bucket sizes, and nothing is compiled after the warm-up."""

from __future__ import annotations

import random

import pytest

from mvllm.extension_api.testing import StepInputBuilder, StepInputs, TokensPrompt, Worker, enter_phase
from mvllm.plugin_api import CompileBackend, DeviceRuntime, Phase, SamplingParams, ShapePolicy, StepKind
from mvllm_conformance.markers import clause, skip_not_claimed
from mvllm_conformance.platform_under_test import PlatformUnderTest
from mvllm_conformance.tensor_assertions import assert_equal
from mvllm_conformance.zoo import LONG, MAX_LEN, VOCAB_SIZE, Zoo, assert_tokens, generate, main_dtype, make_llm, tie_of

DIMENSIONS = ("tokens", "requests", "pages")


def shapes_of(subject: PlatformUnderTest) -> ShapePolicy:
    with enter_phase(Phase.WORKER):
        return subject.platform.shapes()


@clause("SHP-01")
def test_shapes_are_pure(subject: PlatformUnderTest) -> None:
    assert isinstance(shapes_of(subject), ShapePolicy)
    assert shapes_of(subject) == shapes_of(subject)


@clause("SHP-01", needs="static_shapes")
def test_static_shapes_have_buckets_for_every_dimension(subject: PlatformUnderTest) -> None:
    shapes = shapes_of(subject)
    assert [name for name in DIMENSIONS if not getattr(shapes, name)] == []


@clause("SHP-02", needs="torch_device")
def test_steps_have_sizes_among_the_buckets_and_nothing_is_compiled_after_warm_up(
    subject: PlatformUnderTest, free_device: None, zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = shapes_of(subject)
    if subject.platform.worker_class() is not None:
        skip_not_claimed("core's worker: the platform has its own")
    if not any(getattr(shapes, name) for name in DIMENSIONS):
        skip_not_claimed("buckets: all sizes are allowed")
    seen: dict[str, set[int]] = {name: set() for name in DIMENSIONS}
    build, warm_up = StepInputBuilder.build, Worker.warm_up
    compiled_after_warm_up: list[str] = []
    warm = False

    def watched_build(self: StepInputBuilder, plan: object) -> StepInputs:
        inputs = build(self, plan)  # type: ignore[arg-type]
        seen["tokens"] |= {inputs.layout.num_tokens, len(inputs.token_ids), len(inputs.positions)}
        seen["requests"] |= {inputs.layout.num_requests, len(inputs.layout.seq_lens_device), len(inputs.logits_indices)}
        seen["pages"].add(int(inputs.layout.block_table_device.shape[1]))
        return inputs

    def watched_warm_up(self: Worker) -> None:
        nonlocal warm
        warm_up(self)
        warm = True

    monkeypatch.setattr(StepInputBuilder, "build", watched_build)
    monkeypatch.setattr(Worker, "warm_up", watched_warm_up)
    with enter_phase(Phase.WORKER):
        compiler = subject.platform.compiler()
    if compiler is not None:
        compile_ = type(compiler).compile

        def watched_compile(self: CompileBackend, function: object, *, dynamic: bool) -> object:
            if warm:
                compiled_after_warm_up.append(repr(function))
            return compile_(self, function, dynamic=dynamic)  # type: ignore[arg-type]

        monkeypatch.setattr(type(compiler), "compile", watched_compile)
    expected = zoo.oracle("llama")
    with make_llm(subject, expected.folder, **LONG) as llm:
        outputs = generate(llm, expected.prompts)
    assert_tokens(zoo, "llama", expected, outputs, tie_of(subject.capabilities, main_dtype(subject.capabilities)))
    for name in DIMENSIONS:
        buckets = getattr(shapes, name)
        assert not buckets or seen[name] <= {0, *buckets}, f"{name}: {sorted(seen[name])}, but buckets are {buckets}"
    assert compiled_after_warm_up == []


@clause("SHP-03", needs="static_shapes")
def test_no_request_that_only_samples_compiles_anything(
    subject: PlatformUnderTest, free_device: None, zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    if subject.platform.worker_class() is not None:
        skip_not_claimed("core's worker: the platform has its own")
    bound: list[DeviceRuntime] = []
    init_device = Worker.init_device

    def watched(self: Worker) -> None:
        init_device(self)
        bound.append(self.runtime)

    monkeypatch.setattr(Worker, "init_device", watched)
    rng = random.Random(0)
    prompts = [[rng.randrange(2, VOCAB_SIZE) for _ in range(rng.randint(1, MAX_LEN // 2))] for _ in range(11)]
    with make_llm(subject, zoo.checkpoint("llama"), **LONG) as llm:
        with enter_phase(Phase.WORKER):
            warm = bound[0].num_compilations()
        if warm is None:
            skip_not_claimed("a count of compilations")
        for round_ in range(4):
            params = [
                SamplingParams(
                    temperature=rng.choice([0.0, 0.6, 1.0]),
                    top_k=rng.choice([-1, 1, 7, VOCAB_SIZE - 1]),
                    top_p=rng.choice([1.0, 0.8]),
                    min_p=rng.choice([0.0, 0.1]),
                    max_tokens=rng.randint(1, 9),
                    ignore_eos=True,
                    detokenize=False,
                )
                for _ in prompts[round_:]
            ]
            llm.generate([TokensPrompt(prompt_token_ids=prompt) for prompt in prompts[round_:]], params, use_tqdm=False)
        with enter_phase(Phase.WORKER):
            assert bound[0].num_compilations() == warm


@clause("SHP-01")
def test_the_device_takes_a_shape_that_it_has_not_met(bound_device: DeviceRuntime) -> None:
    """Profiling and sampling use sizes that are not buckets."""
    import torch

    for size in (1, 3, 17):
        total = bound_device.to_host(bound_device.to_device(torch.ones(size, 5)).sum()).wait()
        assert_equal(total, torch.tensor(5.0 * size), f"the sum of {size} rows of five ones")


def watch_steps(monkeypatch: pytest.MonkeyPatch) -> list[StepInputs]:
    """The inputs of all steps that workers of this process build from plans."""
    found: list[StepInputs] = []
    build = StepInputBuilder.build

    def watched(self: StepInputBuilder, plan: object) -> StepInputs:
        inputs = build(self, plan)  # type: ignore[arg-type]
        found.append(inputs)
        return inputs

    monkeypatch.setattr(StepInputBuilder, "build", watched)
    return found


DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}


@clause("SHP-04", "SHP-05", needs="chunked_prefill")
@pytest.mark.parametrize("speculative", [None, DRAFTS], ids=["one token", "draft tokens"])
def test_decode_rows_come_first_and_steps_have_their_kind_and_captured_shape(
    subject: PlatformUnderTest,
    free_device: None,
    zoo: Zoo,
    monkeypatch: pytest.MonkeyPatch,
    speculative: dict[str, object] | None,
) -> None:
    if subject.platform.worker_class() is not None:
        skip_not_claimed("core's worker: the platform has its own")
    if speculative is not None and subject.capabilities.static_shapes:
        skip_not_claimed("draft tokens: shapes are static")
    steps = watch_steps(monkeypatch)
    expected = zoo.oracle("llama")
    with make_llm(
        subject, expected.folder, max_num_seqs=4, max_num_batched_tokens=16, speculative_config=speculative
    ) as llm:
        outputs = generate(llm, expected.prompts)
    assert_tokens(zoo, "llama", expected, outputs, tie_of(subject.capabilities, main_dtype(subject.capabilities)))
    capabilities, num_drafts = subject.capabilities, 0 if speculative is None else 3
    capture = shapes_of(subject).capture
    if not (capabilities.graphs and capabilities.compile) or capabilities.static_shapes:
        capture = None
    kinds = set()
    for inputs in steps:
        layout, num_own = inputs.layout, inputs.num_scheduled.copy()
        num_own[inputs.sampling_positions] -= inputs.num_draft_tokens
        is_decode = num_own == 1
        assert layout.num_decodes == is_decode.sum() and is_decode[: layout.num_decodes].all(), num_own.tolist()
        with_drafts = bool(inputs.num_draft_tokens.any())
        all_decode = StepKind.VERIFY if with_drafts else StepKind.DECODE
        assert layout.kind is (all_decode if is_decode.all() else StepKind.MIXED)
        num_tokens, num_requests = int(inputs.num_scheduled.sum()), len(inputs.rows)
        shape = None if capture is None else capture.shape_of(layout.kind, num_tokens, num_requests, num_drafts)
        assert layout.capture == (shape is not None)
        longest = int(inputs.num_scheduled.max())
        if shape is None:
            assert layout.max_query_len == longest
        else:
            assert (layout.num_tokens, layout.num_requests) == shape
            constant = {StepKind.DECODE: 1, StepKind.VERIFY: 1 + num_drafts, StepKind.MIXED: shape[0]}
            assert longest <= layout.max_query_len == constant[layout.kind]
        kinds.add(layout.kind)
    assert {StepKind.MIXED, StepKind.DECODE if speculative is None else StepKind.VERIFY} <= kinds
