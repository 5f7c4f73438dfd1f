"""Vectors of prompts with images equal those of transformers: of each token (ColQwen2), and one of a prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mvllm import LLM, PoolingParams, PoolingRequestOutput, RequestError, SamplingParams
from mvllm.config.engine_args import EngineArgs
from mvllm.engine.async_llm import AsyncLLM
from tests.helpers.changed_weights import copy_without_head
from tests.helpers.multimodal_suite import NUM_TOKENS, THREADS, MultiModalOracle, draw_image, engine, oracle
from tests.helpers.parity import bytes_of_blocks
from tests.helpers.zoo_retrieval import IMAGE_PROMPT, RETRIEVAL, RetrievalOracle, prompt_of, retrieval_oracle

CLOSE = {"atol": 1e-4, "rtol": 0}
QUERY = "which one?"
IMAGES = [draw_image(size, seed) for seed, size in enumerate([(40, 24), (19, 50), (64, 64)])]
CONTENTS: list[Image.Image | str] = [*IMAGES, QUERY, "a longer query, about squares"]


def encode(llm: LLM, contents: Sequence[Image.Image | str], **settings: Any) -> list[PoolingRequestOutput]:
    return llm.encode(list(map(prompt_of, contents)), PoolingParams(**settings), use_tqdm=False)


def check(
    expected: RetrievalOracle, outputs: Sequence[PoolingRequestOutput], contents: Sequence[Image.Image | str]
) -> None:
    for content, output in zip(contents, outputs, strict=True):
        assert output.prompt_token_ids == expected.inputs(content)["input_ids"][0].tolist()
        np.testing.assert_allclose(output.outputs.data, expected.vectors(content), **CLOSE)


@pytest.mark.shows("tokens")
@pytest.mark.parametrize("name", ["colqwen2"])
def test_vectors_of_tokens_and_scores_of_late_interaction(name: str) -> None:
    expected = retrieval_oracle(name)
    assert expected.processor.visual_prompt_prefix == IMAGE_PROMPT
    with engine(expected.folder) as llm:
        check(expected, encode(llm, CONTENTS[1:4]), CONTENTS[1:4])
        query, *images = map(prompt_of, (QUERY, *IMAGES[:2]))
        scores = [each.outputs.score for each in llm.score(query, images, use_tqdm=False)]
        np.testing.assert_allclose(scores, expected.scores(QUERY, IMAGES[:2]), atol=1e-3, rtol=0)
        with pytest.raises(RequestError, match="a vector for each token, and none for a whole prompt"):
            llm.embed([QUERY], use_tqdm=False)
        with pytest.raises(RequestError, match="makes embeddings of prompts; it generates nothing"):
            llm.generate([QUERY], SamplingParams(max_tokens=1), use_tqdm=False)


@pytest.mark.exhaustive
@pytest.mark.shows("tokens")
@pytest.mark.parametrize("name", list(RETRIEVAL))
def test_vectors_of_tokens_alone_and_in_chunks(name: str) -> None:
    expected = retrieval_oracle(name)
    with engine(expected.folder) as llm:
        for content in CONTENTS:
            check(expected, encode(llm, [content]), [content])
        again = encode(llm, CONTENTS)
        check(expected, again, CONTENTS)
        assert not any(output.num_cached_tokens for output in again)  # each token has a vector
        cut = encode(llm, CONTENTS[:1], dimensions=8, normalize=False)[0].outputs.data
        assert cut.shape == (len(again[0].prompt_token_ids), 8)
    with engine(expected.folder, max_num_batched_tokens=11) as llm:
        check(expected, encode(llm, CONTENTS), CONTENTS)


@pytest.mark.exhaustive
@pytest.mark.shows("layout")
@pytest.mark.parametrize("name", ["colqwen2"])
@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2)])
def test_vectors_of_tokens_on_two_ranks(name: str, tensor: int, pipeline: int) -> None:
    expected = retrieval_oracle(name)
    sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
    with engine(expected.folder, distributed_executor_backend=THREADS, max_num_batched_tokens=40, **sizes) as llm:
        check(expected, encode(llm, CONTENTS), CONTENTS)


@pytest.mark.exhaustive
def test_vectors_of_tokens_with_the_positions_of_training() -> None:
    expected = retrieval_oracle("colqwen2")
    with engine(expected.folder, hf_overrides={"image_positions": "grid"}) as llm:
        outputs = encode(llm, CONTENTS)
    for content, output in zip(CONTENTS, outputs, strict=True):
        inputs = expected.inputs(content)
        ids, grid = inputs["input_ids"], inputs.get("image_grid_thw")
        types = (ids == expected.processor.image_token_id).int()
        positions, _ = expected.model.vlm.get_rope_index(ids, image_grid_thw=grid, mm_token_type_ids=types)
        np.testing.assert_allclose(output.outputs.data, expected.vectors(content, position_ids=positions), **CLOSE)
        if grid is not None:
            assert np.abs(output.outputs.data - expected.vectors(content)).max() > 0.1


def states_of(expected: MultiModalOracle) -> list[np.ndarray[Any, Any]]:
    """The last hidden states of each request, float64 [tokens, hidden_size]."""
    with torch.inference_mode():
        return [
            expected.model.model(**expected.inputs(request)).last_hidden_state[0].double().numpy()
            for request in expected.requests
        ]


@pytest.mark.parametrize(
    "name", ["qwen3_vl", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("qwen2_vl", "llava"))]
)
def test_a_checkpoint_without_head_embeds_images(name: str, tmp_path: Path) -> None:
    """As Qwen3-VL-Embedding is published."""
    expected = oracle(name)
    folder = copy_without_head(expected.folder, tmp_path / "headless")
    requests = expected.requests[:3]
    last = [each[-1] / np.linalg.norm(each[-1]) for each in states_of(expected)[:3]]
    with engine(folder) as llm:
        outputs = llm.embed([request.as_prompt() for request in requests], use_tqdm=False)
        for output, vector in zip(outputs, last, strict=True):
            np.testing.assert_allclose(output.outputs.embedding, vector, **CLOSE)
        with pytest.raises(RequestError, match="no language-model head"):
            llm.generate(requests[0].as_prompt(), use_tqdm=False)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl", "llava", "gemma3-images"])
def test_one_vector_of_a_prompt_with_images(name: str) -> None:
    expected = oracle(name)
    states, prompts = states_of(expected), [request.as_prompt() for request in expected.requests]
    last = [each[-1] / np.linalg.norm(each[-1]) for each in states]
    of_pooling = {"last": lambda each: each[-1], "mean": lambda each: each.mean(0), "max": lambda each: each.max(0)}

    def check_all(llm: LLM) -> None:
        outputs = llm.embed(prompts, use_tqdm=False)
        for request, output, vector in zip(expected.requests, outputs, last, strict=True):
            assert output.prompt_token_ids == expected.prompt_ids(request)
            np.testing.assert_allclose(output.outputs.embedding, vector, **CLOSE)
        for kind, pool in of_pooling.items():
            found = llm.encode(prompts, PoolingParams(pooling_type=kind, normalize=False), use_tqdm=False)
            np.testing.assert_allclose([each.outputs.data for each in found], [*map(pool, states)], atol=5e-4, rtol=0)

    chunk = max(expected.span_of_image(i)[1] - expected.span_of_image(i)[0] for i in (1, 5, 7)) + 8
    with engine(expected.folder) as llm:
        check_all(llm)
        assert any(output.num_cached_tokens for output in llm.embed(prompts, use_tqdm=False))
    with engine(expected.folder, max_num_batched_tokens=chunk if expected.config.has_non_causal_spans else 11) as llm:
        check_all(llm)
        scores = [each.outputs.score for each in llm.score(prompts[1], prompts, use_tqdm=False)]
        np.testing.assert_allclose(scores, np.stack(last) @ last[1], **CLOSE)
    with engine(expected.folder, distributed_executor_backend=THREADS, tensor_parallel_size=2) as llm:
        check_all(llm)


@pytest.mark.exhaustive
@pytest.mark.parametrize("pooling_type", ["last", "mean", "all"])
@pytest.mark.parametrize("name", ["qwen2_vl"])
def test_a_vector_of_a_request_that_is_preempted_by_generation(name: str, pooling_type: str) -> None:
    expected = oracle(name)
    lengths = [len(expected.prompt_ids(expected.requests[i])) for i in (0, 3, 1)]
    with engine(expected.folder) as llm:
        memory = bytes_of_blocks(llm, sum(-(-length // 16) for length in lengths) + 3)
    sizes = {"max_model_len": max(lengths) + NUM_TOKENS, "max_num_batched_tokens": 4, "max_num_seqs": 4}
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
    with engine(expected.folder, kv_cache_memory_bytes=memory, **sizes) as llm:
        core, done = llm.llm_engine, {}
        texts = [expected.requests[i].as_prompt() for i in (0, 3)]
        core.add_processed_requests(core.input_processor.process_batch(["a", "b"], texts, [params] * 2))
        while core.stats is None or core.stats.num_running < 2:
            core.step()
        pooling = PoolingParams(pooling_type=pooling_type, normalize=False)
        prompts = [expected.requests[1].as_prompt()]
        core.add_processed_requests(core.pooling_input_processor.process_batch(["v"], prompts, [pooling]))
        while core.has_unfinished_requests():
            done |= {output.request_id: output for output in core.step() if output.finished}
        assert core.stats is not None and core.stats.num_preemptions > 0
    for index, request_id in ((0, "a"), (3, "b")):
        expected.check(index, done[request_id].outputs[0].token_ids)
    states = states_of(expected)[1]
    wanted = {"last": states[-1], "mean": states.mean(0), "all": states}[pooling_type]
    np.testing.assert_allclose(
        PoolingRequestOutput.from_request_output(done["v"]).outputs.data, wanted, atol=5e-4, rtol=0
    )


@pytest.mark.exhaustive
def test_prompts_with_images_in_asyncllm_and_contents_of_scores() -> None:
    expected = oracle("llava")
    states = states_of(expected)
    vector = states[1][-1] / np.linalg.norm(states[1][-1])
    text, image = expected.requests[1].prompt, expected.requests[1].images[0]
    settings = {"platform": "cpu", "dtype": "float32", "max_model_len": 512, "kv_cache_memory_bytes": 32 << 20}

    async def run() -> PoolingRequestOutput:
        llm = AsyncLLM.from_engine_args(EngineArgs(model=str(expected.folder), **settings))
        try:
            return await anext(llm.encode(expected.requests[1].as_prompt()))
        finally:
            llm.shutdown()

    np.testing.assert_allclose(asyncio.run(run()).outputs.data, vector, **CLOSE)
    with engine(expected.folder) as llm:
        item = {"type": "image_pil", "image_pil": image}
        written = {"content": [item, {"type": "text", "text": text}]}
        before, after = text.split("<image>")
        placed = {"content": [{"type": "text", "text": before}, item, {"type": "text", "text": after}]}
        plain = {"prompt": f"{before}\n<image>\n{after}", "multi_modal_data": {"image": image}}
        scores = [
            [each.outputs.score for each in llm.score(before, documents, use_tqdm=False)]
            for documents in ([written, placed], [expected.requests[1].as_prompt(), plain])
        ]
        np.testing.assert_allclose(scores[0], scores[1], **CLOSE)
        with pytest.raises(RequestError, match=r"data_2\[1\]: a part of content is a text or an item; found 'file'"):
            llm.score("a", ["b", {"content": [{"type": "file"}]}], use_tqdm=False)
        with pytest.raises(RequestError, match="truncate_prompt_tokens cannot be combined with images"):
            llm.embed(expected.requests[1].as_prompt(), PoolingParams(truncate_prompt_tokens=4), use_tqdm=False)
