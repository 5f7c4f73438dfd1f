"""Prompts with images in replicas behind one front end, and in ranks of a launcher."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from pathlib import Path
from unittest.mock import patch

import pytest
from PIL import Image

from mvllm import RequestOutput
from mvllm.multimodal import processor_client
from tests.engine.test_external_launcher import RANK, launch
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
    oracle,
)

NUM_TOKENS = 16


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
