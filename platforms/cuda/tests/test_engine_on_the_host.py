"""The whole engine on the CUDA platform with the host as its device: the same tokens with and without graphs."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter

import platforms.cuda.tests.interpreted  # noqa: F401  # skips without Triton; must precede imports of kernels
import pytest
import torch
from platforms.cuda.tests import hosted_plugin
from platforms.cuda.tests.hosted_platform import KERNELS, HostedPlatform, HostedRuntime
from torch.utils._python_dispatch import TorchDispatchMode

import mvllm_torch_gpu.attention
from mvllm import LLM, LoRARequest, SamplingParams, StructuredOutputsParams
from mvllm.errors import MvllmError
from mvllm.ops.all_schemas import SCHEMAS
from mvllm.plugin_api import OpProvider, StepKind
from mvllm.worker.model_runner import ModelRunner
from mvllm.worker.step_inputs import StepInputBuilder
from mvllm_torch_gpu.ops import providers
from tests.helpers import parity
from tests.helpers.float8_zoo import make_float8
from tests.helpers.lora_adapters import write_adapter
from tests.helpers.model_zoo import ZOO, make_checkpoint
from tests.helpers.plugins import prepend

pytestmark = pytest.mark.slow

PROMPTS = [{"prompt_token_ids": [5 + 7 * i + j for j in range(3 + 4 * i)]} for i in range(3)]
PARAMS = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in (12, 5, 9)]
SETTINGS = {"dtype": "float32", "max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 64}


@pytest.fixture
def generate(tmp_path, monkeypatch):
    """`generate(checkpoint, platform, ...)`: the tokens of three requests."""
    prepend(monkeypatch, hosted_plugin.path(tmp_path / "plugins"))
    for name, function in KERNELS.items():
        monkeypatch.setattr(mvllm_torch_gpu.attention, name, function)

    def run(folder, platform, params=PARAMS, **settings):
        HostedPlatform.graphs_made.clear()
        options = {**SETTINGS, "kv_cache_memory_bytes": 1 << 20, **settings}
        with LLM(str(folder), platform=platform, **options) as llm:
            outputs = llm.generate(PROMPTS[: len(params)], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return run


FEW = ("llama-gqa", "gemma2", "phi3-longrope-window", "qwen3moe", "gptoss", "deepseek3", "bamba")
"""Models of ordinary runs: plain; windows and soft caps with two block tables; RoPE that depends on the prompt's
length; experts; sinks; latents; sequence states."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FEW else pytest.mark.exhaustive) for name in ZOO]
)
def test_replayed_steps_give_the_tokens_of_the_cpu_platform(name, generate, tmp_path):
    folder = make_checkpoint(name, tmp_path)
    expected = generate(folder, "cpu")
    assert generate(folder, "hosted", enforce_eager=True) == expected
    assert HostedPlatform.graphs_made == []
    assert generate(folder, "hosted") == expected
    [graphs] = HostedPlatform.graphs_made
    # Decode steps of 1, 2 and 4 requests, mixed steps of 16, 32 and 64 tokens, and the head of each.
    assert graphs.captures == HostedRuntime.captured_in_warm_up == 12, "before the first request"
    assert graphs.replays > graphs.captures


def test_guided_requests_have_the_same_tokens_with_replayed_steps(generate, tmp_path):
    """Steps with a guided row run the replayed model and an eager head; steps after them replay both again."""
    folder = make_checkpoint("llama-gqa", tmp_path)
    guided = SamplingParams(max_tokens=7, temperature=0, ignore_eos=True, guidance_scale=3.0, negative_prompt=[9, 8])
    params = [PARAMS[0], guided, PARAMS[2]]
    expected = generate(folder, "cpu", params)
    assert expected != generate(folder, "cpu", PARAMS)
    for asynchronous in (True, False):
        assert generate(folder, "hosted", params, async_scheduling=asynchronous) == expected
        [graphs] = HostedPlatform.graphs_made
        assert graphs.captures == HostedRuntime.captured_in_warm_up == 12
        assert graphs.replays > graphs.captures


def attention_without_memory(rows):
    """Attention that runs out of memory in steps with this number of rows."""

    def attend(query, *args, **options):
        if len(query) == rows:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nand more")
        return KERNELS["paged_attention"](query, *args, **options)

    return attend


LIMITS = r"does not fit.*Lower max_num_batched_tokens \(now 64\) or max_num_seqs \(now 4\)"


def test_profiling_without_memory_names_the_limits_and_a_new_engine_works(generate, tmp_path, monkeypatch):
    folder = make_checkpoint("llama-gqa", tmp_path)
    monkeypatch.setattr(mvllm_torch_gpu.attention, "paged_attention", attention_without_memory(64))
    with pytest.raises(MvllmError, match=LIMITS):
        generate(folder, "hosted", kv_cache_memory_bytes=None)
    monkeypatch.setattr(mvllm_torch_gpu.attention, "paged_attention", KERNELS["paged_attention"])
    assert generate(folder, "hosted") == generate(folder, "cpu")


def test_a_step_without_memory_fails_its_requests_with_the_limits_and_the_engine_goes_on(
    generate, tmp_path, monkeypatch
):
    folder = make_checkpoint("llama-gqa", tmp_path)
    expected = generate(folder, "cpu")
    monkeypatch.setattr(
        mvllm_torch_gpu.attention, "paged_attention", attention_without_memory(24)
    )  # all prompts, padded
    options = {**SETTINGS, "enforce_eager": True}  # a graph computes attention without Python code
    with LLM(str(folder), platform="hosted", kv_cache_memory_bytes=1 << 20, **options) as llm:
        for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False, raise_on_error=False):
            assert output.outputs[0].finish_reason == "error"
            assert re.search(LIMITS, str(output.outputs[0].error))
        monkeypatch.setattr(mvllm_torch_gpu.attention, "paged_attention", KERNELS["paged_attention"])
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected


def sampling_params(requests, tokens):
    """Parameters of requests with sampling. Few tokens, because the interpreter is slow."""
    settings = {"max_tokens": tokens, "top_k": 9, "top_p": 0.9, "ignore_eos": True}
    return [SamplingParams(seed=i, temperature=0.8 + 0.2 * i, **settings) for i in range(requests)]


def recording(provider, calls):
    """The provider, which appends its op's name to `calls` in each call."""

    def call(*arguments):
        calls.append(provider.op)
        return provider.function(*arguments)

    return dataclasses.replace(provider, function=call)


@pytest.mark.parametrize("size", [(1, 2), pytest.param((3, 5), marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    ("scheme", "float8"),
    [
        ("ct-blocks", "float8_e4m3fnuz"),
        pytest.param("ct-channel", "float8_e4m3fn", marks=pytest.mark.exhaustive),
        ("fp8-static", "float8_e4m3fn"),
    ],
)
def test_float8_and_sampling_kernels_give_the_tokens_of_the_references(
    scheme, float8, size, generate, tmp_path, monkeypatch
):
    """One checkpoint with unquantized inputs, with the same tokens on every platform, and two with rounded inputs."""
    folder, calls = make_float8(scheme, tmp_path).quantized, []
    rounded = OpProvider("float8_linear", "reference's", SCHEMAS["float8_linear"].reference)
    plain = {"enforce_eager": True, "async_scheduling": False, "skip_tokenizer_init": True}
    plain |= {"max_num_batched_tokens": 8, "max_num_seqs": size[0]}  # the warm-up runs steps of these sizes
    monkeypatch.setattr(HostedPlatform, "provided", (rounded,))
    expected = generate(folder, "cpu" if scheme == "ct-blocks" else "hosted", params=sampling_params(*size), **plain)
    kernels = [p for p in providers(float8) if p.op in ("float8_linear", "filtered_draw")]
    monkeypatch.setattr(HostedPlatform, "provided", tuple(recording(p, calls) for p in kernels))
    assert generate(folder, "hosted", params=sampling_params(*size), **plain) == expected
    assert {"float8_linear", "filtered_draw"} == set(calls)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["qwen35", "bamba"])
def test_kernels_on_states_give_the_tokens_of_transformers(name, tmp_path, monkeypatch, generate):
    """In Triton's interpreter: prompts in chunks, decode steps, and a second run from kept states."""
    expected, calls = parity.oracle(name, (5, 6, 8), 6), []
    kernels = [p for p in providers() if p.op in ("causal_conv1d", "ssd", "gated_delta_rule", "gated_rms_norm")]
    monkeypatch.setattr(HostedPlatform, "provided", tuple(recording(p, calls) for p in kernels))
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 64, "state_snapshot_interval": 16}
    with parity.engine(expected.folder, platform="hosted", enforce_eager=True, **settings) as llm:
        for _ in range(2):
            outputs = parity.generate(llm, expected.prompts, max_tokens=6)
            parity.check(expected, outputs)
        assert max(output.num_cached_tokens for output in outputs) >= 16
    assert {"causal_conv1d", "gated_rms_norm", "ssd" if name == "bamba" else "gated_delta_rule"} == set(calls)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["bamba", "qwen35", "kimilinear", "lfm2"])
@pytest.mark.parametrize("kind", ["decode", "mixed", "verify"])
def test_steps_with_states_are_replayed_in_steady_state(kind, name, generate, tmp_path, count_launches):
    wanted, prompts, settings = STEADY[kind]
    folder = make_checkpoint(name, tmp_path)
    options = {**SETTINGS, "kv_cache_memory_bytes": 1 << 22, "enable_prefix_caching": False, **settings}
    params = SamplingParams(max_tokens=14, temperature=0, ignore_eos=True)

    def run(llm):
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    with LLM(str(folder), platform="cpu", **options) as llm:
        expected = run(llm)
    HostedPlatform.graphs_made.clear()
    with LLM(str(folder), platform="hosted", **options) as llm:
        assert_only_replays(llm, run, expected, wanted, count_launches)


@pytest.mark.exhaustive
def test_async_scheduling_changes_no_token(generate, tmp_path):
    folder = make_checkpoint("llama-gqa", tmp_path)
    assert generate(folder, "hosted", async_scheduling=False) == generate(folder, "hosted", async_scheduling=True)


class LaunchCounter(TorchDispatchMode):
    """Counts operations outside of replays and captures, by name. Copies, views and allocations do not count.

    Attributes:
        operations: The counts.
        layouts: Layouts of the steps.
    """

    def __init__(self):
        super().__init__()
        self.operations = Counter()
        self.layouts = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        is_copy = name in ("copy_", "_foreach_copy_", "clone", "detach", "alias") or "empty" in name
        if not (is_copy or func.is_view or HostedPlatform.graphs_made[-1].is_active):
            self.operations[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def count_launches(monkeypatch):
    """Returns a LaunchCounter that counts in the worker's steps from now on."""

    def start():
        counter, execute, build = LaunchCounter(), ModelRunner.execute_model, StepInputBuilder.build

        def execute_model(self, plan):
            with counter:
                return execute(self, plan)

        def build_inputs(self, plan):
            inputs = build(self, plan)
            counter.layouts.append(inputs.layout)
            return inputs

        monkeypatch.setattr(ModelRunner, "execute_model", execute_model)
        monkeypatch.setattr(StepInputBuilder, "build", build_inputs)
        return counter

    return start


DRAFTS = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}}
CHUNKS = {"max_num_batched_tokens": 16}
FEW_TOKENS, MANY_TOKENS = [[5, 6, 7] * 5, [9, 8] * 6], [[5, 6, 7], [9, 8] * 20, [3] * 30]
STEADY = {
    "decode": (StepKind.DECODE, FEW_TOKENS, {}),
    "mixed": (StepKind.MIXED, MANY_TOKENS, CHUNKS),
    "verify": (StepKind.VERIFY, FEW_TOKENS, DRAFTS),
    "structured": (StepKind.DECODE, MANY_TOKENS, CHUNKS),
    "structured-verify": (StepKind.VERIFY, FEW_TOKENS, DRAFTS),
}
"""The kind of steps, prompts and settings; `structured`: every second request has a grammar."""


def assert_only_replays(llm, run, expected, kind, count_launches, *, may_capture=False):
    """`run(llm)` gives the expected tokens twice, the second time with nothing but copies outside of replays.

    Inputs are copied to the addresses that graphs read, and tokens to the host.
    """
    run(llm)  # shapes that the warm-up left out are captured
    captured = [graphs.captures for graphs in HostedPlatform.graphs_made]
    launches = count_launches()
    assert run(llm) == expected
    assert may_capture or [graphs.captures for graphs in HostedPlatform.graphs_made] == captured
    assert kind in {layout.kind for layout in launches.layouts} and len(launches.layouts) > 5
    assert all(layout.capture for layout in launches.layouts)
    assert launches.operations == {}


@pytest.mark.parametrize(
    "name",
    # Steps that verify drafts are tested with grammars, and below with adapters.
    [pytest.param(name, marks=pytest.mark.exhaustive) if name == "verify" else name for name in STEADY],
)
def test_no_operation_runs_outside_of_a_replay_in_steady_state(name, generate, tmp_path, count_launches):
    kind, prompts, settings = STEADY[name]
    folder = make_checkpoint("llama-gqa", tmp_path)
    options = {**SETTINGS, "kv_cache_memory_bytes": 1 << 20, "enable_prefix_caching": False, **settings}
    grammar = StructuredOutputsParams(regex="[a-f]{40}") if "structured" in name else None
    params = [
        SamplingParams(max_tokens=14, temperature=0, ignore_eos=True, structured_outputs=None if i % 2 else grammar)
        for i in range(len(prompts))
    ]

    def run(llm):
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    with LLM(str(folder), platform="cpu", **options) as llm:
        expected = run(llm)
    HostedPlatform.graphs_made.clear()
    with LLM(str(folder), platform="hosted", **options) as llm:
        # Which requests are in a step depends on how fast grammars are compiled.
        assert_only_replays(llm, run, expected, kind, count_launches, may_capture=grammar is not None)


@pytest.mark.parametrize("settings", [CHUNKS, DRAFTS], ids=["mixed", "verify"])
def test_steps_with_lora_rows_give_the_same_tokens(settings, generate, tmp_path, monkeypatch, count_launches):
    """A provider of the operation that reads the adapters of tokens on the device lets such steps be captured."""
    folder = make_checkpoint("llama-gqa", tmp_path / "model")
    targets = ("q_proj", "up_proj")
    paths = [write_adapter(tmp_path / str(i), folder, targets=targets, seed=i) for i in (1, 2)]
    adapters = [LoRARequest(f"adapter {i}", i, str(path)) for i, path in enumerate(paths, 1)]
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in (*MANY_TOKENS, FEW_TOKENS[0])]
    options = {**SETTINGS, **settings, "kv_cache_memory_bytes": 1 << 20, "enable_prefix_caching": False}

    def run(llm):
        outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=[adapters[0], None, *adapters])
        return [list(output.outputs[0].token_ids) for output in outputs]

    with LLM(str(folder), platform="cpu", enable_lora=True, max_loras=2, **options) as llm:
        expected = run(llm)
    by_slot = SCHEMAS.get("add_lora_by_slot")
    if by_slot is not None:
        provider = OpProvider("add_lora_by_slot", "reference's", by_slot.reference)
        monkeypatch.setattr(HostedPlatform, "provided", (provider,))
    HostedPlatform.graphs_made.clear()
    with LLM(str(folder), platform="hosted", enable_lora=True, max_loras=2, **options) as llm:
        if by_slot is None:
            assert run(llm) == expected
        else:
            kind = StepKind.VERIFY if settings is DRAFTS else StepKind.MIXED
            assert_only_replays(llm, run, expected, kind, count_launches)
