"""Every form of a prompt with images, and embeddings as a prompt, in an engine with a small LLaVA."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from PIL import Image

from mvllm import LLM, RequestError, SamplingParams
from mvllm.config.engine_args import EngineArgs
from mvllm.engine.async_llm import AsyncLLM
from mvllm.engine.frontend.input_processor import InputProcessor
from mvllm.engine.tokenizer.tokenizer import load_tokenizer
from mvllm.entrypoints.chat_prompt import chat_prompt
from mvllm.messages.beam_search_params import BeamSearchParams
from mvllm.multimodal.processor_client import ProcessorClient
from tests.helpers.multimodal_zoo import TEXT, make_checkpoint

SETTINGS: dict[str, Any] = {
    "platform": "cpu",
    "dtype": "float32",
    "max_model_len": 256,
    "kv_cache_memory_bytes": 32 << 20,
    "enable_prompt_embeds": True,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
RED, BLUE = (Image.new("RGB", (40, 24), color) for color in ("red", "blue"))


def data_url(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llava", tmp_path_factory.mktemp("prompts") / "llava")


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(str(checkpoint), **SETTINGS) as llm:
        yield llm
        processors = llm.llm_engine.item_client.pids
    assert processors and not any(map(psutil.pid_exists, processors))


def tokens(llm: LLM, prompt: Any, params: SamplingParams = GREEDY) -> list[int]:
    return llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids


def prompt(*images: Any, text: str = "hello <image> world") -> dict[str, Any]:
    return {"prompt": text, "multi_modal_data": {"image": list(images)}}


def test_forms_of_prompts_and_of_outputs(llm: LLM) -> None:
    red = tokens(llm, prompt(RED))
    assert red != tokens(llm, prompt(BLUE))
    assert red == tokens(llm, prompt(np.asarray(RED))) == tokens(llm, prompt(data_url(RED)))
    ids = llm.get_tokenizer()("hello <image> world")["input_ids"]
    output = llm.generate([{"prompt_token_ids": ids, "multi_modal_data": {"image": RED}}], GREEDY, use_tqdm=False)[0]
    assert output.outputs[0].token_ids == red and len(output.prompt_token_ids) > len(ids)
    expanded = {"prompt_token_ids": output.prompt_token_ids, "multi_modal_data": {"image": RED}}
    assert tokens(llm, expanded) == red
    several = llm.generate([prompt(RED)], SamplingParams(n=2, seed=1, max_tokens=6, ignore_eos=True), use_tqdm=False)
    assert len({tuple(each.token_ids) for each in several[0].outputs}) == 2
    [beams] = llm.beam_search([prompt(RED)], BeamSearchParams(beam_width=2, max_tokens=4))
    assert beams.sequences[0].tokens[: len(output.prompt_token_ids)] == output.prompt_token_ids
    parts = [{"type": "text", "text": "what"}, {"type": "image_pil", "image_pil": RED}]
    url = {"type": "image_url", "image_url": {"url": data_url(RED)}}
    one, two, text = llm.chat(
        [[{"role": "user", "content": each}] for each in (parts, [parts[0], url], "what")], GREEDY, use_tqdm=False
    )
    assert one.outputs[0].token_ids == two.outputs[0].token_ids != text.outputs[0].token_ids
    assert one.prompt is not None and one.prompt.count("<image>") == 1


def test_a_cache_salt_separates_items(llm: LLM) -> None:
    """Neither the time of an encoder nor a name that two users chose tells one of the other's images."""

    def cache_hits() -> tuple[float, float]:
        values = {one.name: one.value for one in llm.get_metrics() if hasattr(one, "value")}
        return values["mvllm:mm_cache_hits"], values["mvllm:encoder_cache_hits"]

    def new_hits(salt: str | None, *, text: str) -> tuple[float, ...]:
        before = cache_hits()
        salted = {} if salt is None else {"cache_salt": salt}
        assert tokens(llm, {**prompt(green, text=f"{text} <image>"), **salted})
        return tuple(new - old for new, old in zip(cache_hits(), before, strict=True))

    green = Image.new("RGB", (40, 24), (1, 200, 3))
    texts = iter(["a", "b", "c", "d", "e"])  # no prefix hits, with which no encoder runs
    assert new_hits("one", text=next(texts)) == (0, 0)
    assert new_hits("one", text=next(texts)) == (1, 1)
    assert new_hits("two", text=next(texts)) == (0, 0)
    assert new_hits(None, text=next(texts)) == (0, 0)
    assert new_hits(None, text=next(texts)) == (1, 1)

    names = {"multi_modal_uuids": {"image": ["logo"]}}
    plain = [tokens(llm, prompt(each)) for each in (RED, BLUE)]
    assert plain == [
        tokens(llm, {**prompt(each), **names, "cache_salt": salt}) for each, salt in ((RED, "one"), (BLUE, "two"))
    ]
    embeds = np.zeros((4, 64), np.float32)
    keys = [
        llm.llm_engine.input_processor.process("x", {"prompt_embeds": embeds, "cache_salt": salt}, None).core.items[0]
        for salt in ("one", "two", "two")
    ]
    assert [key.span.content_hash == keys[1].span.content_hash for key in keys] == [False, True, True]


def test_placeholders_that_users_type_stay_text(llm: LLM) -> None:
    typed = [{"type": "text", "text": "is <image> a token"}, {"type": "text", "text": "or <image>"}]
    images = [{"type": "image_pil", "image_pil": each} for each in (RED, BLUE)]
    parts = [typed[0], images[0], typed[1], images[1]]
    [output] = llm.chat([{"role": "user", "content": parts}], GREEDY, use_tqdm=False)
    tokenizer = llm.get_tokenizer()
    ids, image_id = output.prompt_token_ids, tokenizer.convert_tokens_to_ids("<image>")
    assert output.prompt is not None and output.prompt.count("<image>") == 4
    assert ids.count(image_id) == 2 * 9  # their rows
    text = tokenizer.decode([each for each in ids if each != image_id])
    assert "is <image> a token" in text and "or <image>" in text
    expected = {"prompt_token_ids": ids, "multi_modal_data": {"image": [RED, BLUE]}}
    assert output.outputs[0].token_ids == tokens(llm, expected)
    with pytest.raises(RequestError, match="cut_at must be a text"):
        tokens(llm, {"prompt": "a", "cut_at": ""})


GEMMA_TEMPLATES = {
    # As published with Gemma 3: parts of messages, and the token that begins an image.
    "parts": "{{ bos_token }}{% for m in messages %}<turn>{{ m.role }}\n{% if m.content is string %}{{ m.content }}"
    "{% elif m.content is iterable %}{% for item in m.content %}{% if item.type == 'image' %}{{ '<start_of_image>' }}"
    "{% elif item.type == 'text' %}{{ item.text | trim }}{% endif %}{% endfor %}{% endif %}</turn>\n{% endfor %}",
    "text": "{{ bos_token }}{% for m in messages %}<turn>{{ m.role }}\n{{ m.content | trim }}</turn>\n{% endfor %}",
}


@pytest.mark.parametrize("name", [pytest.param("parts", marks=pytest.mark.exhaustive), "text"])
def test_the_placeholder_of_gemma_3_is_not_the_token_that_takes_an_embedding(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    from transformers import AutoProcessor

    folder = make_checkpoint("gemma3-images", tmp_path_factory.mktemp("gemma") / "model")
    config = EngineArgs(model=str(folder), max_model_len=256).create_engine_config()
    tokenizer = load_tokenizer(config.model)
    assert tokenizer is not None
    text = {"type": "text", "text": "what is <start_of_image> or <image_soft_token>"}
    messages = [{"role": "user", "content": [{"type": "image_pil", "image_pil": RED}, text]}]
    with closing(ProcessorClient(config.model, config.multimodal)) as client:
        given: Any = chat_prompt(config, tokenizer, messages, item_client=client, chat_template=GEMMA_TEMPLATES[name])
        found = InputProcessor(config, tokenizer, item_client=client).expand(given, client.process(given))
    processor = AutoProcessor.from_pretrained(folder, backend="pil")
    begin, end = given["prompt"].split("what is ")
    [first] = processor(text=[begin], images=[[RED]], add_special_tokens=False)["input_ids"]
    ids = found["prompt_token_ids"]
    assert begin.count("<start_of_image>") == 1 and ids[: len(first)] == list(first)
    assert processor.tokenizer.image_token_id not in ids[len(first) :] and "</turn>" in end
    assert "what is <start_of_image> or <image_soft_token>" in tokenizer.decode(ids, skip_special_tokens=False)


def test_embeddings_of_the_tokens_give_the_output_of_the_tokens(llm: LLM) -> None:
    ids = [5, 6, 7, 8, 40]
    [table] = llm.apply_model(
        lambda model: (
            model.get_input_embeddings()
            if hasattr(model, "get_input_embeddings")
            else next(m for n, m in model.named_modules() if n.endswith("embed_tokens"))
        )
    )
    rows = table.weight[torch.tensor(ids)].detach()
    expected = tokens(llm, ids)
    assert tokens(llm, {"prompt_embeds": rows}) == expected == tokens(llm, {"prompt_embeds": rows.numpy()})
    output = llm.generate([{"prompt_embeds": rows}], GREEDY, use_tqdm=False)[0]
    assert output.prompt is None and output.prompt_token_ids == [0] * len(ids)


@pytest.mark.parametrize(
    ("bad", "params", "why"),
    [
        (prompt(RED, text="hello"), GREEDY, "0 placeholders '<image>' for 1 image item"),
        (prompt(RED, text="<image><image>"), GREEDY, "2 placeholders"),
        (prompt(*[RED] * 17, text="<image>" * 17), GREEDY, "17 items"),
        (prompt(*[RED] * 16, text="<image>" * 16 + "word " * 80), GREEDY, "max_model_len"),
        (prompt(b"<svg/>"), GREEDY, "SVG"),
        ({"prompt": "<image>", "multi_modal_data": {"audio": b"x"}}, GREEDY, "takes only text and image"),
        ({"prompt": "x", "mm_processor_kwargs": {"a": 1}}, GREEDY, "needs multi_modal_data"),
        ({"prompt": "x", "prompt_embeds": np.zeros((2, 64), np.float32)}, GREEDY, "excludes 'prompt'"),
        ({"prompt_embeds": np.zeros((2, 63), np.float32)}, GREEDY, r"\[tokens, 64\]"),
        ({"prompt_embeds": np.zeros((300, 64), np.float32)}, GREEDY, "300 tokens"),
        ({"prompt_embeds": np.zeros((2, 64), np.float32)}, SamplingParams(prompt_logprobs=1), "no tokens"),
        ({"prompt_token_ids": [5], "multi_modal_items": [1]}, GREEDY, "multi_modal_data"),
        (prompt(RED), SamplingParams(truncate_prompt_tokens=5), "cut one in two"),
        (
            {"prompt_token_ids": [5], "multi_modal_data": {"image": RED}},
            SamplingParams(truncate_prompt_tokens=5),
            "cut one in two",
        ),
    ],
)
def test_prompts_that_are_refused(llm: LLM, bad: Any, params: SamplingParams, why: str) -> None:
    with pytest.raises(RequestError, match=why):
        llm.generate([bad], params, use_tqdm=False)
    assert TEXT["hidden_size"] == 64


@pytest.mark.exhaustive
def test_the_loop_of_an_async_engine_runs_while_items_are_prepared(checkpoint: Path, llm: LLM) -> None:
    expected = tokens(llm, prompt(RED))

    async def main(engine: AsyncLLM) -> None:
        async def generate(each: Any) -> list[int]:
            async for output in engine.generate(each, GREEDY):
                found = output.outputs[0].token_ids
            return found

        turns = 0
        tasks = [asyncio.create_task(generate(each)) for each in (prompt(RED), [5, 6])]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0.01)
            turns += 1
        assert tasks[0].result() == expected and turns > 20  # the processor takes seconds to start
        with pytest.raises(RequestError, match="SVG"):
            await generate(prompt(b"<svg/>"))
        with pytest.raises(RequestError, match="Prompt 1 of 2"):
            await engine.add_requests([prompt(RED), prompt(b"<svg/>")], [GREEDY, GREEDY])
        expanded = await engine.expand_prompt(prompt(RED))
        memory = engine.item_client.memory
        assert memory.num_bytes == engine.all_metrics.mm_inflight_bytes > 0
        assert await generate(expanded) == expected
        assert memory.num_bytes == engine.all_metrics.mm_inflight_bytes == 0
        (stream,) = await engine.add_requests([prompt(RED)], [GREEDY])
        assert memory.num_bytes > 0
        await stream.aclose()
        assert memory.num_bytes == 0

    engine = AsyncLLM.from_engine_args(EngineArgs(model=str(checkpoint), **SETTINGS))
    try:
        asyncio.run(main(engine))
        pids = engine.item_client.pids
    finally:
        engine.shutdown()
    assert pids and not any(map(psutil.pid_exists, pids))


@pytest.mark.exhaustive
def test_the_language_part_alone(checkpoint: Path) -> None:
    settings = {**SETTINGS, "enable_prompt_embeds": False, "language_model_only": True}
    with LLM(str(checkpoint), **settings) as llm:
        assert len(tokens(llm, "hello")) == 6
        with pytest.raises(RequestError, match="takes only text"):
            tokens(llm, prompt(RED))
        with pytest.raises(RequestError, match="prompt_embeds is off"):
            tokens(llm, {"prompt_embeds": np.zeros((2, 64), np.float32)})
