"""Embeddings equal those of transformers, under chunking, prefix caching and preemption, on every executor."""

from __future__ import annotations

import functools
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from mvllm import LLM, EmbeddingRequestOutput, PoolingParams, PoolingRequestOutput, RequestError, SamplingParams
from mvllm.errors import RequestFailedError
from mvllm.messages.pooling_params import PoolingType
from tests.engine.conftest import MakeLLM
from tests.helpers import parity
from tests.helpers.changed_weights import copy_without_head
from tests.helpers.model_zoo import VOCAB_SIZE, load_reference, make_checkpoint
from tests.helpers.thread_executor import ThreadExecutor

LAST, MEAN, CLS = PoolingType.LAST, PoolingType.MEAN, PoolingType.CLS
TOLERANCE = 1e-4
THREADS = f"{ThreadExecutor.__module__}.{ThreadExecutor.__name__}"
CHUNKS = {"max_num_batched_tokens": 32}
"""Cuts the longer prompts into chunks, and runs only a few at once."""


@dataclass(frozen=True)
class Reference:
    """A checkpoint, prompts with common prefixes, and transformers' hidden states of each: float32 [length,
    hidden_size]."""

    folder: Path
    prompts: list[list[int]]
    states: list[np.ndarray]

    def vector(
        self, i: int, kind: PoolingType, *, normalize: bool = False, dimensions: int | None = None
    ) -> np.ndarray:
        states = self.states[i].astype(np.float64)
        vector = {LAST: states[-1], CLS: states[0], MEAN: states.mean(0)}[kind][:dimensions]
        return vector / np.linalg.norm(vector) if normalize else vector


@functools.cache
def reference(name: str) -> Reference:
    folder = make_checkpoint(name, Path(tempfile.mkdtemp(prefix="mvllm-embeddings-")) / name)
    rng = random.Random(name)
    shared = [rng.randrange(2, VOCAB_SIZE) for _ in range(48)]
    prompts = [shared[:n] + [rng.randrange(2, VOCAB_SIZE) for _ in range(m)]
               for n, m in ((0, 1), (0, 5), (32, 1), (48, 49), (16, 17), (48, 0))]  # fmt: skip
    model = load_reference(folder).base_model
    with torch.inference_mode():
        states = [model(torch.tensor([prompt])).last_hidden_state[0].float().numpy() for prompt in prompts]
    return Reference(folder, prompts, states)


def encode(llm: LLM, prompts: list[list[int]], **settings: object) -> list[PoolingRequestOutput]:
    return llm.encode(prompts, PoolingParams(**settings), use_tqdm=False)  # type: ignore[arg-type]


def check(expected: Reference, outputs: list[PoolingRequestOutput], kind: PoolingType, **settings: bool) -> None:
    for i, output in enumerate(outputs):
        assert output.finished and output.prompt_token_ids == expected.prompts[i]
        vector = output.outputs.data
        assert vector.dtype == np.float32
        np.testing.assert_allclose(vector, expected.vector(i, kind, **settings), atol=TOLERANCE, rtol=0)


def check_all_ways(expected: Reference, llm: LLM) -> None:
    """All prompts in chunked batches, then again with cached prefixes."""
    for kind in (MEAN, CLS, LAST):
        check(expected, encode(llm, expected.prompts, pooling_type=kind, normalize=False), kind)
    again = encode(llm, expected.prompts, pooling_type=LAST, normalize=False)
    check(expected, again, LAST)
    assert sum(output.num_cached_tokens for output in again) > 0
    over_all = encode(llm, expected.prompts, pooling_type=MEAN, normalize=False)
    check(expected, over_all, MEAN)
    assert not any(output.num_cached_tokens for output in over_all)


@pytest.mark.parametrize("name", ["llama-gqa", "mistral-window", "qwen2", "qwen3", "opt", "gpt2"])
def test_every_family_gives_the_states_of_transformers(name: str) -> None:
    expected = reference(name)
    with parity.engine(expected.folder, **CHUNKS) as llm:
        alone = [encode(llm, [prompt], pooling_type=MEAN, normalize=False)[0] for prompt in expected.prompts]
        check(expected, alone, MEAN)
        check_all_ways(expected, llm)


@pytest.mark.parametrize("name", ["opt-projected", "opt-norm-after-projected", "llama-without-prefix"])
def test_models_with_other_final_layers_give_the_states_of_transformers(name: str) -> None:
    expected = reference(name)
    with parity.engine(expected.folder, **CHUNKS) as llm:
        check(expected, encode(llm, expected.prompts, normalize=False), LAST)


@pytest.mark.parametrize(
    ("name", "tensor", "pipeline"),
    [("llama-gqa", 2, 1), ("opt-projected", 1, 2), ("gpt2", 2, 2), ("qwen3", 1, 3)],
)
def test_tensor_and_pipeline_parallel_give_the_states_of_transformers(name: str, tensor: int, pipeline: int) -> None:
    expected = reference(name)
    sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
    with parity.engine(expected.folder, distributed_executor_backend=THREADS, **sizes, **CHUNKS) as llm:
        check_all_ways(expected, llm)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tensor", "pipeline"),
    [(1, 2), *(pytest.param(*sizes, marks=pytest.mark.exhaustive) for sizes in ((2, 1), (2, 2)))],
)
@pytest.mark.exhaustive
def test_worker_processes_give_the_states_of_transformers(tensor: int, pipeline: int) -> None:
    expected = reference("llama-gqa")
    sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
    with parity.engine(expected.folder, distributed_executor_backend="mp", **sizes, **CHUNKS) as llm:
        check_all_ways(expected, llm)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_pooling_request_that_is_preempted_by_generation_gives_the_same_embedding(ahead: bool) -> None:
    expected = reference("llama-gqa")
    texts = parity.oracle("llama-gqa", (2, 4), 40)
    blocks = 12 * 16 * 3 * 2 * 2 * 16 * 4  # blocks of 16 tokens, 3 layers, key and value, 2 heads of 16 float32
    with parity.engine(
        expected.folder,
        kv_cache_memory_bytes=blocks,
        max_model_len=112,
        max_num_batched_tokens=4,
        max_num_seqs=4,
        async_scheduling=ahead,
    ) as llm:
        engine = llm.llm_engine
        greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)
        vector = PoolingParams(pooling_type=MEAN, normalize=False)
        engine.add_processed_requests(
            engine.input_processor.process_batch(["a", "b"], texts.prompts, [greedy] * 2)
        )  # fmt: skip
        while len(finished := engine.step()) == 0:
            if engine.stats is not None and engine.stats.num_running == 2:
                break
        engine.add_processed_requests(
            engine.pooling_input_processor.process_batch(["v"], [expected.prompts[3]], [vector])
        )  # fmt: skip
        done = {output.request_id: output for output in finished if output.finished}
        while engine.has_unfinished_requests():
            done |= {output.request_id: output for output in engine.step() if output.finished}
        assert engine.stats is not None and engine.stats.num_preemptions > 0
        assert [done[name].outputs[0].token_ids for name in "ab"] == texts.tokens
        found = PoolingRequestOutput.from_request_output(done["v"]).outputs.data
        np.testing.assert_allclose(found, expected.vector(3, MEAN), atol=TOLERANCE, rtol=0)


def test_embeddings_are_normalized_and_truncated_as_requested(make_llm: MakeLLM) -> None:
    expected = reference("llama-gqa")
    llm = make_llm(model=expected.folder)
    [by_default, _] = llm.encode(expected.prompts[1:3], use_tqdm=False)
    np.testing.assert_allclose(by_default.outputs.data, expected.vector(1, LAST, normalize=True), atol=1e-5)
    each = [PoolingParams(dimensions=8), PoolingParams(pooling_type=CLS, dimensions=3, normalize=False)]
    cut, as_it_is = llm.embed(expected.prompts[1:3], each, use_tqdm=False)
    np.testing.assert_allclose(cut.outputs.embedding, expected.vector(1, LAST, normalize=True, dimensions=8), atol=1e-5)
    np.testing.assert_allclose(as_it_is.outputs.embedding, expected.vector(2, CLS, dimensions=3), atol=TOLERANCE)
    assert cut.outputs.hidden_size == 8 and isinstance(cut.outputs.embedding[0], float)
    [named] = llm.encode(expected.prompts[1], pooling_task="embed", use_tqdm=False)
    np.testing.assert_array_equal(named.outputs.data, by_default.outputs.data)
    [of_tokens] = llm.encode(expected.prompts[1], each[0], pooling_task="token_embed", use_tqdm=False)
    assert of_tokens.outputs.data.shape == (len(of_tokens.prompt_token_ids), 8)
    np.testing.assert_allclose(of_tokens.outputs.data[-1], cut.outputs.embedding, atol=1e-5)
    for wrong, message in (("classify", "classif"), ("score", "must be one of 'embed', 'classify', 'token_embed'")):
        with pytest.raises(RequestError, match=message):
            llm.encode(expected.prompts[1], pooling_task=wrong)


def test_the_models_files_give_the_pooling_defaults(make_llm: MakeLLM, checkpoint: Path) -> None:
    modules = checkpoint / "modules.json"
    (checkpoint / "1_Pooling").mkdir()
    kinds = ["Transformer", "Pooling"]
    modules.write_text(
        str([{"type": f"x.{kind}", "path": f"{i}_{kind}"} for i, kind in enumerate(kinds)]).replace("'", '"')
    )
    (checkpoint / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    try:
        llm = make_llm()
        prompt = [5, 6, 7, 8]
        [found] = llm.encode(prompt, use_tqdm=False)
        [asked] = encode(llm, [prompt], pooling_type=MEAN, normalize=False)
        assert found.outputs == asked.outputs
        modules.write_text('[{"type": "x.Dense"}]')
        other = make_llm()
        with pytest.raises(RequestError, match="does not support pooling"):
            other.encode(prompt, use_tqdm=False)
        assert other.generate(prompt, SamplingParams(max_tokens=2), use_tqdm=False)[0].finished
    finally:
        modules.unlink()


def test_prompt_formats_are_those_of_generate_and_prompts_may_fill_the_context(make_llm: MakeLLM) -> None:
    llm = make_llm(max_model_len=32)
    prompts = ["Hello world", [5] * 32, {"prompt_token_ids": [5] * 32}]
    text, ids, mapping = llm.embed(prompts, use_tqdm=False)  # type: ignore[arg-type]
    assert text.prompt == "Hello world" and text.prompt_token_ids
    assert ids.outputs == mapping.outputs
    assert llm.embed([], use_tqdm=False) == []
    with pytest.raises(RequestError, match="a prompt may have 32"):
        llm.embed([[5] * 33], use_tqdm=False)
    with pytest.raises(RequestError, match="64 components"):
        llm.embed([[5]], PoolingParams(dimensions=65), use_tqdm=False)
    with pytest.raises(RequestError, match="must be PoolingParams"):
        llm.encode([[5]], SamplingParams(), use_tqdm=False)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="must be SamplingParams"):
        llm.generate([[5]], PoolingParams(), use_tqdm=False)  # type: ignore[arg-type]
    changed = PoolingParams()
    changed.dimensions = -1
    with pytest.raises(RequestError, match="at least 1"):
        llm.encode([[5]], changed, use_tqdm=False)


def test_nan_embeddings_fail_the_prompt_and_not_the_engine(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from mvllm.pooling import pooler

    llm = make_llm()
    finish = pooler.postprocess_vector
    with monkeypatch.context() as patch:
        patch.setattr(pooler, "postprocess_vector", lambda vector, params: finish(vector * np.float32(np.nan), params))
        with pytest.raises(RequestFailedError, match="not finite"):
            llm.encode([[5, 6]], use_tqdm=False)
        [output] = llm.embed([[5, 6]], use_tqdm=False, raise_on_error=False)
        assert "not finite" in (output.error or "") and output.outputs.embedding == []
        [score] = llm.score(
            {"prompt_token_ids": [5, 6]}, {"prompt_token_ids": [7]}, use_tqdm=False, raise_on_error=False
        )
        assert "not finite" in (score.error or "") and np.isnan(score.outputs.score)
        with pytest.raises(RequestFailedError, match=r"Prompt 0 of 2: .*not finite.* 1 more failed") as caught:
            llm.embed([[5, 6], [7]], use_tqdm=False)
        assert [type(each) for each in caught.value.outputs] == [EmbeddingRequestOutput] * 2
    assert np.isfinite(llm.encode([[5, 6]], use_tqdm=False)[0].outputs.data).all()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"distributed_executor_backend": THREADS, "tensor_parallel_size": 2, "pipeline_parallel_size": 2},
        {"enable_lora": True},
    ],
    ids=["alone", "ranks", "lora"],
)
def test_a_checkpoint_without_head_makes_embeddings_and_says_why_it_generates_nothing(
    tmp_path: Path, settings: dict[str, object]
) -> None:
    check_headless(settings, tmp_path)


def check_headless(settings: dict[str, object], tmp_path: Path) -> None:
    expected = reference("llama-gqa")
    folder = copy_without_head(expected.folder, tmp_path / "headless")
    with parity.engine(folder, **settings, **CHUNKS) as llm:
        check(expected, encode(llm, expected.prompts, normalize=False), LAST)
        message = "no language-model head .lm_head.*use a checkpoint with the head"
        with pytest.raises(RequestError, match=message):
            llm.generate(expected.prompts, use_tqdm=False)
        with pytest.raises(RequestError, match=message):
            llm.chat([{"role": "user", "content": "Hello"}], use_tqdm=False)
        if not settings:  # new weights may have a head, and are not used for more than embeddings
            llm.update_weights(path=expected.folder)
            check(expected, encode(llm, expected.prompts, normalize=False), LAST)
