"""The platform's compiler preserves the model's tokens: in bfloat16, and for batches that shrink.

So steps of several shapes are compiled, and then reused.
"""

from __future__ import annotations

import pytest
import torch

from mvllm import LLM, SamplingParams
from mvllm.plugin_api import CompileBackend
from mvllm_cpu.platform import CPUPlatform
from tests.engine.test_mtp import mtp, reference
from tests.engine.test_speculative import acceptance
from tests.helpers.model_zoo import make_checkpoint
from tests.helpers.parity import engine

PROMPTS = [{"prompt_token_ids": [5 + 7 * i + j for j in range(6 + 3 * i)]} for i in range(3)]
PARAMS = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in (20, 9, 16)]


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama-gqa", {}),
        pytest.param("llama-gqa", {"pipeline_parallel_size": 2}, marks=pytest.mark.exhaustive),
        ("llama-gqa", {"quantization": "int8"}),
        ("llama-gqa", {"quantization": "int4"}),
        ("qwen3", {}),
        pytest.param("qwen3-head-dim-tied", {}, marks=pytest.mark.exhaustive),
        ("mistral-window", {}),
        ("gpt2", {}),
    ],
    ids=str,
)
def test_compiled_steps_give_the_models_tokens(name, settings, tmp_path):
    folder, tokens = make_checkpoint(name, tmp_path), []
    for eager in (True, False):
        with LLM(str(folder), dtype="bfloat16", max_model_len=64, enforce_eager=eager, **settings) as llm:
            outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        tokens.append([list(output.outputs[0].token_ids) for output in outputs])
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("name", ["mimo", pytest.param("qwen35moe", marks=pytest.mark.exhaustive)])
def test_compiled_steps_accept_as_many_drafts_of_a_module(name):
    found = []
    for eager in (True, False):
        with engine(reference(name, "near").folder, dtype="bfloat16", enforce_eager=eager, **mtp(3)) as llm:
            outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
            found.append(([list(output.outputs[0].token_ids) for output in outputs], acceptance(llm)))
    assert found[0] == found[1]
    drafted, accepted = found[0][1]
    assert 0 < accepted < drafted


class AnySize(CompileBackend):
    """Like a compiler with dynamic shapes: one program for dimensions of size one, another for all other sizes."""

    def __init__(self) -> None:
        self.programs: set[tuple[object, ...]] = set()

    def compile(self, function, *, dynamic):
        assert dynamic

        def run(*args):
            self.programs.add(tuple(tuple(d == 1 for d in a.shape) for a in args if isinstance(a, torch.Tensor)))
            return function(*args)

        return run

    def cache_key(self) -> str:
        return "any size"


@pytest.mark.parametrize("needed", [True, False])
def test_a_dynamic_shape_compiler_compiles_before_the_first_request(needed, tmp_path, monkeypatch):
    compiler = AnySize()
    monkeypatch.setattr(compiler, "needs_warm_up", lambda: needed)
    monkeypatch.setattr(CPUPlatform, "compiler", lambda self: compiler)
    folder = make_checkpoint("llama-gqa", tmp_path)
    with LLM(str(folder), dtype="float32", max_model_len=64) as llm:
        at_start = set(compiler.programs)
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert at_start == (compiler.programs if needed else set()) and compiler.programs
