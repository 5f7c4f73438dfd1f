"""Images and embeddings on a platform with static shapes: encoders run on the host, their rows enter padded steps."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from mvllm import SamplingParams
from mvllm.errors import RequestError
from tests.helpers import multimodal_suite, parity
from tests.helpers.model_zoo import load_reference
from tests.helpers.multimodal_suite import check, generate, names_of, oracle
from tests.helpers.plugins import example_platform_path, prepend

STATIC = {
    "platform": "example",
    "distributed_executor_backend": "mp",
    "max_num_batched_tokens": 24,
    "max_model_len": 256,
}
engine = partial(multimodal_suite.engine, **STATIC)


@pytest.fixture(autouse=True)
def static(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raises on a shape that the warm-up has not run."""
    prepend(monkeypatch, example_platform_path(tmp_path / "plugins"))
    monkeypatch.setenv("MVLLM_EXAMPLE_MODE", "static")


@pytest.mark.parametrize(
    "name", ["qwen3_vl", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("llava", "internvl"))]
)
def test_images_and_text_in_one_batch(name: str) -> None:
    """Three-dimensional positions and rows behind layers (DeepStack), plain rows, tiles."""
    expected = oracle(name)
    with engine(expected.folder) as llm:
        check(expected, generate(llm, expected.requests[:3], num_tokens=12))


@pytest.mark.exhaustive
@pytest.mark.parametrize("settings", [{"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2}])
def test_several_ranks(settings: dict[str, int]) -> None:
    expected = oracle("qwen3_vl")
    with engine(expected.folder, **settings) as llm:
        check(expected, generate(llm, expected.requests[:3], num_tokens=12))


@pytest.mark.exhaustive
def test_encoders_on_the_host_are_loaded_again_after_a_deep_sleep() -> None:
    expected = oracle("llava")
    with engine(expected.folder) as llm:
        for level in (1, 2):
            check(expected, generate(llm, expected.requests[:2], num_tokens=12))
            llm.sleep(level=level)
            llm.wake_up()
        check(expected, generate(llm, expected.requests[:3], num_tokens=12))


@pytest.mark.exhaustive
def test_ready_embeddings() -> None:
    expected = parity.oracle("llama-gqa", (3, 8), 12)
    embedding = load_reference(expected.folder).get_input_embeddings()
    rows = [embedding(torch.tensor(prompt)).detach() for prompt in expected.prompts]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    with parity.engine(expected.folder, **STATIC, enable_prompt_embeds=True) as llm:
        prompts = [{"prompt_embeds": rows[0]}, {"prompt_token_ids": expected.prompts[1]}, {"prompt_embeds": rows[1]}]
        outputs = llm.generate(prompts, params, use_tqdm=False)
    found = [list(output.outputs[0].token_ids) for output in outputs]
    assert found == [expected.tokens[0], expected.tokens[1], expected.tokens[1]]


@pytest.mark.exhaustive
def test_images_that_see_later_tokens_are_refused_and_text_is_not() -> None:
    expected = oracle(names_of("gemma3")[0])
    with engine(expected.folder) as llm:
        check(expected, generate(llm, expected.requests[:1], num_tokens=12))
        with pytest.raises(RequestError, match="every shape for causal attention"):
            generate(llm, expected.requests[1:2])
