"""Checkpoints with quantized experts on the CUDA platform, kernels interpreted: experts stay packed; right tokens."""

from __future__ import annotations

import dataclasses

import platforms.cuda.tests.interpreted  # noqa: F401  # skips without Triton; must precede imports of kernels
import pytest
import torch
from platforms.cuda.tests import hosted_plugin
from platforms.cuda.tests.hosted_platform import KERNELS, HostedPlatform

import mvllm_torch_gpu.attention
from mvllm import LLM, SamplingParams
from mvllm.ops.all_schemas import SCHEMAS
from mvllm.plugin_api import OpProvider
from mvllm_torch_gpu.ops import providers
from mvllm_triton.packed_experts import FLOAT8, MXFP4, PackedExperts
from tests.helpers import float8_zoo, parity
from tests.helpers.model_zoo import ZOO, make_checkpoint
from tests.helpers.mxfp4 import pack_experts
from tests.helpers.plugins import prepend

pytestmark = pytest.mark.slow

PROMPTS = [[5 + 7 * i + j for j in range(3 + 2 * i)] for i in range(2)]
SIZES = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 96, "num_hidden_layers": 1}
SETTINGS = {
    "dtype": "float32",
    "max_model_len": 64,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 8,  # the warm-up runs a step of so many tokens, and interpreted kernels are slow
    "kv_cache_memory_bytes": 1 << 20,
    "enforce_eager": True,
    "async_scheduling": False,
    "skip_tokenizer_init": True,
}


@pytest.fixture(autouse=True)
def hosted(tmp_path, monkeypatch):
    """The platform `hosted`, and experts whose sizes are whole groups and blocks."""
    prepend(monkeypatch, hosted_plugin.path(tmp_path / "plugins"))
    for name, function in KERNELS.items():
        monkeypatch.setattr(mvllm_torch_gpu.attention, name, function)

    def with_sizes(entry):
        def config():
            made = entry.config()
            for key in SIZES.keys() & set(dir(made)):
                setattr(made, key, SIZES[key])
            if types := vars(made).get("layer_types"):
                made.layer_types = types[: made.num_hidden_layers]
            return made

        return dataclasses.replace(entry, config=config)

    for name in ("qwen3moe", "gptoss"):
        monkeypatch.setitem(ZOO, name, with_sizes(ZOO[name]))


class Experts:
    """The kernels' provider of `quantized_moe`, which keeps what it prepares and counts its calls."""

    def __init__(self, float8: str = "float8_e4m3fn", *, multiplies_float8: bool = False) -> None:
        found = providers(float8, multiplies_float8=multiplies_float8)
        [self._op] = [p for p in found if p.op == "quantized_moe"]
        self.packed: list[PackedExperts] = []
        self.calls = 0

    def provider(self) -> OpProvider:
        return dataclasses.replace(self._op, function=self._call, prepare=self._prepare)

    def _prepare(self, weights):
        prepared = self._op.prepare(weights)
        self.packed += prepared
        return prepared

    def _call(self, *arguments):
        self.calls += 1
        return self._op.function(*arguments)


def generate(folder, num_tokens):
    params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True, detokenize=False)
    with LLM(str(folder), platform="hosted", **SETTINGS) as llm:
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_gpt_oss_in_mxfp4_gives_the_tokens_of_transformers(tmp_path, monkeypatch):
    plain, packed = make_checkpoint("gptoss", tmp_path / "plain", tokenizer=False), tmp_path / "packed"
    pack_experts(plain, packed)
    experts = Experts()
    monkeypatch.setattr(HostedPlatform, "provided", (experts.provider(),))
    found = generate(packed, 2)
    assert found == parity.oracle_of(plain, PROMPTS, 2).tokens
    assert experts.calls and {weight.kind for weight in experts.packed} == {MXFP4}
    for weight in experts.packed:
        elements = weight.num_experts * weight.out_features * weight.in_features
        padded = -weight.in_features % 64 / weight.in_features
        assert weight.data.nbytes <= elements // 2 * (1 + padded)


@pytest.mark.exhaustive
def test_experts_of_8_bit_floats_give_the_tokens_of_transformers(tmp_path, monkeypatch):
    made = float8_zoo.make_float8("ct-blocks", tmp_path, "qwen3moe")
    experts = Experts("float8_e4m3fnuz")
    monkeypatch.setattr(HostedPlatform, "provided", (experts.provider(),))
    found = generate(made.quantized, 2)
    assert found == parity.oracle_of(made.plain, PROMPTS, 2).tokens
    assert experts.calls and {weight.kind for weight in experts.packed} == {FLOAT8}
    assert {weight.data.dtype for weight in experts.packed} == {torch.float8_e4m3fnuz}
    assert not any(weight.rounded for weight in experts.packed)


def test_block_scaled_experts_with_rounded_inputs_give_the_tokens_of_the_reference(tmp_path, monkeypatch):
    """Like the published FP8 checkpoints of DeepSeek V3 and Qwen3, with smaller blocks."""
    scheme = float8_zoo.FLOAT8_SCHEMES["fp8-blocks"]
    config = {**scheme.config, "weight_block_size": [32, 32]}
    monkeypatch.setitem(
        float8_zoo.FLOAT8_SCHEMES, "fp8-square", dataclasses.replace(scheme, config=config, block=(32, 32))
    )
    folder = float8_zoo.make_float8("fp8-square", tmp_path, "qwen3moe").quantized
    reference = OpProvider("quantized_moe", "reference's", SCHEMAS["quantized_moe"].reference)
    monkeypatch.setattr(HostedPlatform, "provided", (reference,))
    expected = generate(folder, 2)
    experts = Experts()
    monkeypatch.setattr(HostedPlatform, "provided", (experts.provider(),))
    assert generate(folder, 2) == expected
    assert experts.calls and all(weight.rounded and weight.group_size == 32 for weight in experts.packed)
