"""Prompts with images that one engine computes and another continues, and replicas behind one front end."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import pytest
from PIL import Image

from mvllm import LLM, RequestOutput, SamplingParams
from mvllm.kv_transfer.remote.tcp import KEY_VARIABLE
from mvllm.multimodal import processor_client
from tests.engine.test_external_launcher import RANK, launch
from tests.engine.test_items_in_tiers import FAMILIES, num_encoded
from tests.engine.test_prefill_decode import save_all
from tests.helpers.async_engine import async_engine, last, params
from tests.helpers.multimodal_suite import (
    BLOCK_SIZE,
    MAX_LEN,
    MultiModalOracle,
    MultiModalRequest,
    ProcessorHere,
    check,
    check_hit,
    draw_image,
    draw_text,
    engine,
    oracle,
)

NUM_TOKENS = 16


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "a key of engines in tests, shared")


def start(stack: ExitStack, expected: MultiModalOracle, role: str, connector: str) -> LLM:
    transfer: dict[str, object] = {"kv_connector": connector, "kv_role": role}
    if connector == "tcp" and role == "consumer":
        transfer["kv_connector_extra_config"] = {"peers": ["127.0.0.1"]}
    settings: dict[str, object] = {"kv_transfer_config": transfer}
    if expected.entry.has_states:
        settings["state_snapshot_interval"] = BLOCK_SIZE
    return stack.enter_context(engine(expected.folder, **settings))


def run(llm: LLM, expected: MultiModalOracle, given: list[dict | None], num_tokens: int) -> list[RequestOutput]:
    """Greedy continuations of all requests; each has its own `kv_transfer_params`."""
    sampling = [
        SamplingParams(
            temperature=0,
            max_tokens=num_tokens,
            ignore_eos=True,
            detokenize=False,
            extra_args=None if each is None else {"kv_transfer_params": each},
        )
        for each in given
    ]
    return llm.generate([request.as_prompt() for request in expected.requests], sampling, use_tqdm=False)


@pytest.mark.exhaustive
@pytest.mark.parametrize("connector", ["shared_memory", "tcp"])
@pytest.mark.parametrize("name", FAMILIES)
def test_prompts_of_one_engine_are_continued_by_another(stack: ExitStack, name: str, connector: str) -> None:
    expected = oracle(name)
    producer, consumer = (start(stack, expected, role, connector) for role in ("producer", "consumer"))
    computed = run(producer, expected, [{"do_remote_decode": True}] * len(expected.requests), 1)
    save_all(producer)
    outputs = run(consumer, expected, [output.kv_transfer_params for output in computed], NUM_TOKENS)
    check(expected, outputs)
    needed = 0
    for index, output in enumerate(outputs):
        length = len(output.prompt_token_ids or ())
        check_hit(expected, output, length - 1)
        assert output.num_cached_tokens or expected.entry.has_states or length <= BLOCK_SIZE
        if index in (1, 5, 6, 7):
            needed += (output.num_cached_tokens or 0) < expected.span_of_image(index)[1]
    # The consumer's encoder computes images only whose ends are behind the blocks that it has fetched.
    assert num_encoded(producer) == 4
    if not expected.entry.has_states:
        assert num_encoded(consumer) <= needed + 2  # and those of the requests with several images


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
def test_replicas_get_the_requests_with_their_images(name: str) -> None:
    """Each prompt is routed to the replica that has its image, although all have the same token ids."""
    known = oracle(name)
    text = draw_text(120, name)
    images = [draw_image(known.entry.sizes[0], seed) for seed in (51, 52)]
    same_text = [MultiModalRequest(known.entry.placeholder + text, (image,)) for image in images]
    expected = MultiModalOracle(name, known.entry, known.folder, [*known.requests[:6], *same_text])
    wanted = params(max_tokens=8, detokenize=False)

    async def ask(llm: object, index: int) -> RequestOutput:
        prompt = expected.requests[index].as_prompt()
        return await last(llm.generate(prompt, wanted))  # type: ignore[attr-defined]

    with (
        patch.object(processor_client, "_make_pool", ProcessorHere),
        async_engine(expected.folder, data_parallel_size=2, max_model_len=MAX_LEN) as llm,
    ):

        async def all_of_them() -> None:
            together = await asyncio.gather(*(ask(llm, index) for index in range(len(expected.requests))))
            check(expected, together)
            assert await llm.reset_prefix_cache()
            order = (6, 7, 6, 7, 7, 6)
            outputs = [await ask(llm, index) for index in order]
            check(expected, outputs, order)
            assert outputs[0].prompt_token_ids == outputs[1].prompt_token_ids
            length = len(outputs[0].prompt_token_ids or ())
            for position, output in enumerate(outputs):
                check_hit(expected, output, 0 if position < 2 else length - 1)

        asyncio.run(all_of_them())


def data_url(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


LAUNCHED = ("llava", "qwen2_5_vl", "gemma3-images")


@pytest.mark.exhaustive
def test_ranks_of_a_launcher_give_the_same_tokens(tmp_path: Path) -> None:
    """Each rank has an engine of its own, which prepares the images of all requests."""
    jobs = []
    for name in LAUNCHED:
        expected = oracle(name)
        settings = {
            "model": str(expected.folder),
            "dtype": "float32",
            "block_size": BLOCK_SIZE,
            "max_model_len": MAX_LEN,
            "max_num_seqs": 5,
            "max_num_batched_tokens": 64,
            "kv_cache_memory_bytes": 2**24,
            "seed": 0,
            "use_tqdm_on_load": False,
            "tensor_parallel_size": 2,
            "distributed_executor_backend": "external_launcher",
        }
        prompts = [
            {"prompt": request.prompt, "multi_modal_data": {"image": list(map(data_url, request.images))}}
            if request.images
            else {"prompt": request.prompt}
            for request in expected.requests
        ]
        jobs.append({"settings": settings, "prompts": prompts, "num_tokens": NUM_TOKENS})
    job = tmp_path / "job.json"
    job.write_text(json.dumps({"engines": jobs}))
    code, text = launch(2, [*RANK, str(job), str(tmp_path)])
    assert code == 0, text
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    for name, found in zip(LAUNCHED, first, strict=True):
        for outputs in (found["greedy"], found["again"]):
            for index, output in enumerate(outputs):
                oracle(name).check(index, output["tokens"])
        assert any(output["num_cached_tokens"] for output in found["again"])
