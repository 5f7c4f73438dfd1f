"""The engine runs on the null device, without loading torch."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from mvllm import LLM, SamplingParams
from mvllm.platform.choose import choose_platform
from tests.helpers.plugins import NULL_SOURCE, null_platform_path, prepend

PROGRAM = """
import sys
from mvllm import LLM, SamplingParams
with LLM("demo", platform="null", skip_tokenizer_init=True) as llm:
    params = SamplingParams(max_tokens=3, ignore_eos=True, detokenize=False)
    [output] = llm.generate([{"prompt_token_ids": [5, 6]}], params, use_tqdm=False)
print(output.outputs[0].token_ids, "torch" in sys.modules)
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    path = null_platform_path(tmp_path / "plugins")
    prepend(monkeypatch, path)
    return path


@pytest.mark.parametrize("workers", [{}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_every_request_gets_as_many_tokens_as_it_may_have(installed, workers):
    """Prompts are cut into chunks, requests wait for each other, and some of them are preempted."""
    prompts = [{"prompt_token_ids": list(range(5, 5 + length))} for length in (1, 40, 17, 3, 70)]
    with LLM(
        "demo",
        platform="null",
        skip_tokenizer_init=True,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_model_len=128,
        kv_cache_memory_bytes=9 * 16,
        **workers,
    ) as llm:
        params = SamplingParams(max_tokens=50, ignore_eos=True, detokenize=False)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [len(output.outputs[0].token_ids) for output in outputs] == [50] * 5
        assert llm.llm_engine.stats.num_preemptions > 0


def test_no_torch_is_loaded(installed):
    path = os.pathsep.join([*installed, *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "[7, 7, 7] False"


def test_it_runs_only_where_it_is_named(installed, monkeypatch):
    monkeypatch.delenv("MVLLM_PLATFORM", raising=False)
    assert choose_platform().platform.spec.name == "cpu"
    assert choose_platform("null").platform.spec.name == "null"
    assert str(NULL_SOURCE) in sys.modules["mvllm_null_device"].__file__
