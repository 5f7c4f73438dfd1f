"""Decode steps of every native family are replayed. A failure names the operation that stops a family."""

from __future__ import annotations

import pytest

from mvllm import LLM, SamplingParams
from mvllm_cpu import kernels
from mvllm_cpu.linear import FASTEST_WITH
from mvllm_cpu.replay import Replay, _Compiled
from tests.helpers.model_zoo import ZOO, make_checkpoint

LOADED = kernels.load()
pytestmark = pytest.mark.skipif(LOADED.library is None, reason=f"no kernels: {LOADED.reason}")

IN_EVERY_RUN = ("llama-gqa", "gemma3", "gptoss", "qwen35", "deepseek3", "glm5")
"""Plain; norms of heads, windows; experts and sinks; a delta rule; latent attention with experts; sparse attention."""

LENGTHS = {"llama-rope-dynamic": 60}
"""New tokens, if they matter: as many as exceed the original context."""

NUM_REQUESTS = (1, 3)


def refusals(folder, dtype, monkeypatch, *, num_tokens=4):
    """Why steps of a checkpoint are not replayed, with one and with three requests."""
    made = []

    def compile_and_keep(backend, function, *, dynamic):
        made.append(_Compiled(backend, function))
        return made[-1]

    monkeypatch.setattr(Replay, "compile", compile_and_keep)
    with LLM(str(folder), dtype=dtype, max_model_len=64, skip_tokenizer_init=True) as llm:
        params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True, detokenize=False)
        for count in NUM_REQUESTS:
            llm.generate([{"prompt_token_ids": [5, 6 + i]} for i in range(count)], params, use_tqdm=False)
    (compiled,) = made
    assert len(compiled._programs) >= 2 * len(NUM_REQUESTS)  # a prompt and a decode step each
    return set(compiled.refusals.values())


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.exhaustive] * (name not in IN_EVERY_RUN)) for name in ZOO]
)
def test_decode_steps_are_replayed(name, dtype, tmp_path, monkeypatch):
    if LOADED.isa not in FASTEST_WITH[dtype]:
        pytest.skip(f"torch's products of {dtype} are the faster ones with {LOADED.isa}, and they are not recorded")
    folder = make_checkpoint(name, tmp_path, tokenizer=False)
    assert not refusals(folder, dtype, monkeypatch, num_tokens=LENGTHS.get(name, 4))
