"""Images of Janus and Emu3 are those of transformers: codes, log-probabilities and pixels.

The oracle is transformers' `generate(generation_mode="image")` for Janus, and for Emu3 `generate` with a function of
allowed tokens and a negative prompt. Both are greedy, in float32, with one prompt at a time.
"""

from __future__ import annotations

import asyncio
import base64
import importlib
import io
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import torch
from PIL import Image
from prometheus_client import CollectorRegistry
from safetensors.torch import load_file, save_file

from mvllm import LLM, AsyncLLM, EngineArgs, ImageParams, ImageRequestOutput, LoRARequest, RequestError, SamplingParams
from mvllm.entrypoints.openai.common.chat_prompt_renderer import ChatPromptRenderer
from mvllm.entrypoints.openai.common.serving_context import ServingContext
from mvllm.entrypoints.openai.common.serving_models import OpenAIServingModels
from mvllm.entrypoints.openai.common.tokenizer_pool import TokenizerPool
from mvllm.entrypoints.openai.server.app import build_app
from mvllm.entrypoints.openai.server.http_metrics import HTTPMetrics
from mvllm.entrypoints.openai.server.server_state import ServerState
from mvllm.entrypoints.openai.server.settings import ServerSettings
from mvllm.errors import ConfigError
from tests.helpers.model_zoo import VOCAB_SIZE
from tests.helpers.parity import LOGPROB_TOLERANCE
from tests.helpers.thread_executor import ThreadExecutor

zoo = importlib.import_module("plugins.image-generation.tests.image_zoo")
python_api_examples = importlib.import_module("plugins.image-generation.tests.python_api_examples")
BEGIN_OF_IMAGE_ID = zoo.BEGIN_OF_IMAGE_ID
EMU3_FIRST_CODE = zoo.EMU3_FIRST_CODE
EMU3_SCALE = zoo.EMU3_SCALE
EMU3_TOKENS = zoo.EMU3_TOKENS
NUM_CODES = zoo.NUM_CODES
load_emu3 = zoo.load_emu3
load_janus = zoo.load_janus
make_emu3 = zoo.make_emu3
make_janus = zoo.make_janus


GRID = 6
PROMPTS = ("a dog in the rain", "the quick brown fox", "to be", "a tiny sea, and the weather over the sea")
TEXTS = ("the lazy dog", "whether it is nobler")
GREEDY = ImageParams(temperature=0)
PIXEL_TOLERANCE = 0.01  # before the fraction is cut off
ROWS, COLUMNS = 3, 5
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 16,
    "kv_cache_memory_bytes": 1 << 24,
    "seed": 0,
}
THREADS = {"distributed_executor_backend": f"{ThreadExecutor.__module__}.{ThreadExecutor.__name__}"}


class Janus:
    """A checkpoint, and what transformers makes of it."""

    def __init__(self, folder: Path, grid: int) -> None:
        self.folder = make_janus(folder, grid=grid)
        self.model = load_janus(folder)
        # `generate` reads the id from here.
        self.model.generation_config.generation_kwargs = {"boi_token_id": BEGIN_OF_IMAGE_ID}

    def codes(self, prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt])
        settings: dict[str, Any] = {"generation_mode": "image", "do_sample": False, "guidance_scale": 5.0}
        return self.model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0].tolist()

    def text(self, prompt: list[int], count: int) -> list[int]:
        ids = torch.tensor([prompt])
        found = self.model.generate(ids, do_sample=False, max_new_tokens=count, eos_token_id=None)
        return found[0, len(prompt) :].tolist()

    @torch.no_grad()
    def logits(self, prompt: list[int], codes: list[int]) -> torch.Tensor:
        """float32 [codes, NUM_CODES]: the conditional logits of each code."""
        text = self.model.get_input_embeddings()(torch.tensor([prompt]))
        image = self.model.prepare_embeddings_for_image_generation(torch.tensor([codes]))
        hidden = self.model.model.language_model(inputs_embeds=torch.cat((text, image), 1)).last_hidden_state
        return self.model.model.generation_head(hidden[0, len(prompt) - 1 : -1])

    @torch.no_grad()
    def pixels(self, codes: list[int]) -> torch.Tensor:
        """float32 [height, width, 3], 0 to 255."""
        return (self.model.decode_image_tokens(torch.tensor([codes]))[0] + 1) * 127.5


def check_pixels(found: np.ndarray | None, wanted: torch.Tensor) -> None:
    assert found is not None and found.dtype == np.uint8 and found.shape == tuple(wanted.shape)
    low, high = (((wanted + d).clamp(0, 255)).floor().numpy() for d in (-PIXEL_TOLERANCE, PIXEL_TOLERANCE))
    assert (found >= low).all() and (found <= high).all()
    assert found.std() > 5


@pytest.fixture(scope="module")
def janus(tmp_path_factory: pytest.TempPathFactory) -> Janus:
    return Janus(tmp_path_factory.mktemp("janus"), GRID)


@pytest.fixture(scope="module")
def llm(janus: Janus) -> Iterator[LLM]:
    with LLM(str(janus.folder), **SETTINGS) as llm:
        yield llm


def test_576_codes_their_logprobs_and_pixels_are_those_of_transformers(tmp_path: Path) -> None:
    oracle = Janus(tmp_path, 24)
    with LLM(str(oracle.folder), **{**SETTINGS, "max_model_len": 1024}) as llm:
        (output,) = llm.generate_images(PROMPTS[0], ImageParams(temperature=0, logprobs=True), use_tqdm=False)
    (image,) = output.images
    assert image.is_whole and len(image.codes) == 576 and image.finish_reason == "length"
    assert image.codes == oracle.codes(output.prompt_token_ids)
    assert image.token_ids == [VOCAB_SIZE + code for code in image.codes]
    wanted = torch.log_softmax(oracle.logits(output.prompt_token_ids, image.codes), dim=-1)
    of_codes = wanted.gather(1, torch.tensor(image.codes).unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(torch.tensor(image.conditional_logprobs), of_codes, atol=LOGPROB_TOLERANCE, rtol=0)
    assert image.logprobs is not None and max(image.logprobs) <= 0 and image.logprobs != image.conditional_logprobs
    check_pixels(image.pixels, oracle.pixels(image.codes))


def test_prompts_are_formatted_as_transformers_processors_do(llm: LLM) -> None:
    outputs = llm.generate_images(list(PROMPTS[:2]), ImageParams(temperature=0, max_tokens=1), use_tqdm=False)
    tokenizer = llm.get_tokenizer()
    for prompt, output in zip(PROMPTS, outputs, strict=False):
        chat = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        assert output.prompt_token_ids == tokenizer(text + "<begin_of_image>").input_ids


@pytest.mark.shows("tokens", family="janus")
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"async_scheduling": False}, id="plain", marks=pytest.mark.exhaustive),
        pytest.param({"async_scheduling": True, "max_num_batched_tokens": 17}, id="async in chunks"),
        pytest.param({"max_num_seqs": 8, "kv_cache_memory_bytes": 1 << 17, "block_size": 16}, id="preempted"),
        pytest.param(
            {"max_num_seqs": 3, "max_num_batched_tokens": 3, "enable_prefix_caching": False},
            id="three rows",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param({"tensor_parallel_size": 2, **THREADS}, id="TP"),
        pytest.param(
            {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
            id="TP, processes",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"},
            id="PP, processes",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            {"pipeline_parallel_size": 2, "max_num_batched_tokens": 30, **THREADS},
            id="PP in chunks",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_images_beside_text_are_those_of_transformers(janus: Janus, settings: dict[str, Any]) -> None:
    with LLM(str(janus.folder), **{**SETTINGS, **settings}) as llm:
        images = llm.llm_engine.image_requests
        prompts: list[Any] = [images.prompt(prompt, GREEDY) for prompt in PROMPTS]
        params = [images.sampling_params(GREEDY)] * len(PROMPTS)
        text = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        for repeated in (False, True):
            outputs = llm.generate([*prompts, *TEXTS], [*params, *[text] * len(TEXTS)], use_tqdm=False)
            for output in outputs[: len(PROMPTS)]:
                assert output.outputs[0].image_codes == wanted_codes(janus, output.prompt_token_ids)
            for output in outputs[len(PROMPTS) :]:
                assert output.outputs[0].token_ids == wanted_text(janus, output.prompt_token_ids)
            cached = sum(output.num_cached_tokens for output in outputs)
            is_evicted = "kv_cache_memory_bytes" in settings or "enable_prefix_caching" in settings
            assert cached > 0 or not repeated or is_evicted
        stats = llm.llm_engine.stats
        assert stats is not None and stats.kv_cache_usage == 0
        assert stats.num_preemptions > 0 or "kv_cache_memory_bytes" not in settings
        codes = wanted_codes(janus, prompts[0]["prompt_token_ids"])
        check_pixels(llm.decode_images(codes)[0], janus.pixels(codes))


_wanted: dict[tuple[str, int, tuple[int, ...]], list[int]] = {}


def wanted_codes(janus: Janus, prompt: list[int]) -> list[int]:
    key = ("image", id(janus), tuple(prompt))
    return _wanted[key] if key in _wanted else _wanted.setdefault(key, janus.codes(prompt))


def wanted_text(janus: Janus, prompt: list[int]) -> list[int]:
    key = ("text", id(janus), tuple(prompt))
    return _wanted[key] if key in _wanted else _wanted.setdefault(key, janus.text(prompt, 40))


@pytest.mark.parametrize("name", ["Images", "ImageParams", "ImageRequestOutput", "GeneratedImage"])
def test_the_examples_of_the_python_api_run(llm: LLM, name: str) -> None:
    getattr(python_api_examples, f"example_{name}")(llm)


def test_samples_have_seeds_of_their_own_and_can_be_repeated(llm: LLM) -> None:
    params = ImageParams(n=3, seed=5, temperature=0.9, top_k=40)
    first, again = (llm.generate_images(PROMPTS[0], params, use_tqdm=False)[0] for _ in range(2))
    assert [image.seed for image in first.images] == [5, 6, 7]
    assert [image.codes for image in first.images] == [image.codes for image in again.images]
    assert len({tuple(image.codes) for image in first.images}) == 3
    (alone,) = llm.generate_images(PROMPTS[0], ImageParams(seed=6, temperature=0.9, top_k=40), use_tqdm=False)[0].images
    assert alone.codes == first.images[1].codes
    assert alone.pixels is not None and np.array_equal(alone.pixels, first.images[1].pixels)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [-1, -5, 2**63 - 1])
def test_the_seed_of_an_image_repeats_it(llm: LLM, seed: int) -> None:
    images = llm.generate_images(PROMPTS[0], ImageParams(n=2, seed=seed), use_tqdm=False)[0].images
    if seed == -1:
        assert [image.seed for image in images] == [None, None]
        return
    for image in images:
        (again,) = llm.generate_images(PROMPTS[0], ImageParams(seed=image.seed), use_tqdm=False)[0].images
        assert again.codes == image.codes


def test_weight_updates_reach_the_image_head_and_the_pixel_decoder(janus: Janus, tmp_path: Path) -> None:
    other = make_janus(tmp_path, grid=GRID, seed=1)
    with LLM(str(other), **SETTINGS) as llm:
        (wanted,) = llm.generate_images(PROMPTS[0], GREEDY, use_tqdm=False)[0].images
    with LLM(str(janus.folder), **SETTINGS) as llm:
        (before,) = llm.generate_images(PROMPTS[0], GREEDY, use_tqdm=False)[0].images
        llm.update_weights(path=other)
        (after,) = llm.generate_images(PROMPTS[0], GREEDY, use_tqdm=False)[0].images
    assert before.codes != wanted.codes
    assert (after.codes, after.weight_versions) == (wanted.codes, [(1, GRID * GRID)])
    assert np.array_equal(after.pixels, wanted.pixels)  # type: ignore[arg-type]


def test_adapters_change_images_as_merged_weights_do(janus: Janus, tmp_path: Path) -> None:
    generator, rank = torch.Generator().manual_seed(3), 4
    tensors, adapter = load_file(janus.folder / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith(("q_proj.weight", "up_proj.weight"))]:
        if not name.startswith("model.language_model."):
            continue
        out_features, in_features = tensors[name].shape
        down, up = (torch.randn(shape, generator=generator) for shape in ((rank, in_features), (out_features, rank)))
        up *= 0.3 / in_features**0.5
        tensors[name] = tensors[name] + up @ down
        module = "base_model.model." + name.removesuffix(".weight")
        adapter |= {f"{module}.lora_A.weight": down, f"{module}.lora_B.weight": up}
    lora, merged = tmp_path / "lora", tmp_path / "merged"
    lora.mkdir()
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["q_proj", "up_proj"]}
    (lora / "adapter_config.json").write_text(json.dumps(settings))
    save_file(adapter, lora / "adapter_model.safetensors")
    shutil.copytree(janus.folder, merged)
    save_file(tensors, merged / "model.safetensors", metadata={"format": "pt"})
    with LLM(str(merged), **SETTINGS) as llm:
        (wanted,) = llm.generate_images(PROMPTS[0], GREEDY, use_tqdm=False)[0].images
    with LLM(str(janus.folder), enable_lora=True, max_lora_rank=8, **SETTINGS) as llm:
        requests = [LoRARequest("a", 1, str(lora)), None]
        found, plain = llm.generate_images([PROMPTS[0]] * 2, GREEDY, lora_request=requests, use_tqdm=False)
    assert found.images[0].codes == wanted.codes
    assert plain.images[0].codes == wanted_codes(janus, plain.prompt_token_ids) != wanted.codes


def test_without_guidance_codes_are_those_of_the_conditional_logits(janus: Janus, llm: LLM) -> None:
    params = ImageParams(guidance_scale=1.0, temperature=0, logprobs=True)
    (output,) = llm.generate_images(PROMPTS[1], params, use_tqdm=False)
    (image,) = output.images
    logits = janus.logits(output.prompt_token_ids, image.codes)
    assert image.codes == logits.argmax(-1).tolist()
    assert image.conditional_logprobs is None
    wanted = torch.log_softmax(logits, -1).amax(-1)
    torch.testing.assert_close(torch.tensor(image.logprobs), wanted, atol=LOGPROB_TOLERANCE, rtol=0)


def test_a_negative_prompt_replaces_the_padded_prompt(llm: LLM) -> None:
    plain, ids, text = (
        llm.generate_images(PROMPTS[0], ImageParams(temperature=0, negative_prompt=negative), use_tqdm=False)[0]
        for negative in (None, [0, 7, BEGIN_OF_IMAGE_ID], "the lazy dog")
    )
    found = {tuple(output.images[0].codes) for output in (plain, ids, text)}
    assert len(found) == 3


def test_an_unfinished_image_has_codes_and_no_pixels(llm: LLM) -> None:
    (image,) = llm.generate_images(PROMPTS[0], ImageParams(temperature=0, max_tokens=7), use_tqdm=False)[0].images
    assert len(image.codes) == 7 and not image.is_whole and image.pixels is None
    with pytest.raises(ConfigError, match="7 of 36 codes"):
        image.png()
    (codes_only,) = llm.generate_images(PROMPTS[0], ImageParams(temperature=0, decode=False), use_tqdm=False)[0].images
    assert codes_only.is_whole and codes_only.pixels is None


def test_an_image_that_fails_does_not_affect_the_others(janus: Janus, tmp_path: Path) -> None:
    folder = tmp_path / "poisoned"
    shutil.copytree(janus.folder, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.language_model.embed_tokens.weight"][7] = torch.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    bad = {"prompt_token_ids": [5, 7, BEGIN_OF_IMAGE_ID]}
    with LLM(str(folder), **SETTINGS) as llm:
        good = {"prompt_token_ids": [5, 8, BEGIN_OF_IMAGE_ID]}
        with pytest.raises(RequestError, match=r"Prompt 1 of 3: .*NaN"):
            llm.generate_images([good, bad, good], GREEDY, use_tqdm=False)
        outputs = llm.generate_images([good, bad, good], GREEDY, use_tqdm=False, raise_on_error=False)
        first, failed, second = outputs
    for output in (first, second):
        assert output.images[0].codes == wanted_codes(janus, output.prompt_token_ids)
        check_pixels(output.images[0].pixels, janus.pixels(output.images[0].codes))
    (image,) = failed.images
    assert (image.finish_reason, image.is_whole, image.pixels) == ("error", False, None)
    assert "NaN" in (image.error or "")
    with pytest.raises(ConfigError, match=r"Image 0 failed and has no pixels: .*NaN"):
        image.png()


def test_images_become_png_files(llm: LLM) -> None:
    (image,) = llm.generate_images(PROMPTS[0], GREEDY, use_tqdm=False)[0].images
    assert image.pixels is not None
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(image.png()))), image.pixels)
    assert np.array_equal(np.asarray(image.pil()), image.pixels)


def test_without_pillow_the_error_names_the_extra(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    (image,) = llm.generate_images(PROMPTS[0], GREEDY, use_tqdm=False)[0].images
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ConfigError, match=r"pip install 'pillow"):
        image.png()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda llm: llm.generate_images("a", ImageParams(height=24, width=24)), "have 12 x 12 pixels"),
        (lambda llm: llm.generate_images("a", SamplingParams()), "params must be ImageParams"),
        (lambda llm: llm.generate_images("a", [GREEDY, GREEDY]), "params is a list of 2 for 1 prompts"),
        (lambda llm: llm.generate_images({"prompt": "a", "multi_modal_data": {}}), "Images are not supported as input"),
        (
            lambda llm: llm.generate({"prompt": "a", "multi_modal_data": {"image": b"a"}}, use_tqdm=False),
            "takes only text",
        ),
        (lambda llm: llm.decode_images([[1, 2, 3]]), r"integers \[n, 36\].*6 x 6 codes"),
        (lambda llm: llm.decode_images([NUM_CODES] * 36), f"from 0 to {NUM_CODES - 1}"),
        (lambda llm: llm.decode_images([[0.5] * 36]), "must be integers"),
        (lambda llm: llm.decode_images([-1] * 36), "from 0 on; found -1"),
        (lambda llm: llm.decode_images(np.zeros((0, 36), np.int64)), "must be integers"),
        (lambda llm: llm.generate_images({"prompt_token_ids": [7] * 221}), "^prompt has 221 tokens .* codes has 36,"),
        (
            lambda llm: llm.generate_images("a", ImageParams(negative_prompt=[7] * 221)),
            r"^negative_prompt has 221 tokens .* have 256 \(max_model_len\)",
        ),
    ],
    ids=range(12),
)
def test_wrong_requests_are_refused(llm: LLM, call: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        call(llm)


def test_models_of_text_refuse_images(checkpoint: Path) -> None:
    with LLM(str(checkpoint), **SETTINGS) as llm:
        for call in (lambda: llm.generate_images("a"), lambda: llm.decode_images([0])):
            with pytest.raises(RequestError, match=r"\(LlamaForCausalLM\) generates text, not images"):
                call()
        with pytest.raises(RequestError, match="generates text, not images"):
            llm.llm_engine.decode_images(bytes(4), 1, 1)


async def ask(engine: AsyncLLM, bodies: list[dict[str, Any]]) -> list[httpx2.Response]:
    """Sends requests to the HTTP application with this engine."""
    pool = TokenizerPool(engine.tokenizer, engine.model_config.max_model_len)
    state = ServerState(60.0)
    state.set_ready(ServingContext(engine, pool, ChatPromptRenderer(engine, pool)))
    app = build_app(state, OpenAIServingModels(["m"], "m"), HTTPMetrics(CollectorRegistry()), ServerSettings())
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://x") as client:
        return [await client.post("/v1/images/generations", json=body) for body in bodies]


def test_the_async_engine_and_the_server_generate_and_decode(janus: Janus) -> None:
    refused = [
        ({}, "prompt", "must be a text"),
        ({"prompt": "a", "response_format": "url"}, "response_format", "must be 'b64_json'"),
        ({"prompt": "a", "size": "big"}, "size", "such as '384x384'"),
        ({"prompt": "a", "size": "24x24"}, "size", "have 12 x 12 pixels"),
        ({"prompt": "a", "output_format": "webp"}, "output_format", "must be 'png'"),
        ({"prompt": "a", "stream": True}, "stream", "not supported"),
        ({"prompt": "a", "image": "data:"}, "image", "not accepted as input"),
        ({"prompt": "a", "n": 0}, "n", "integer from 1"),
    ]
    good = {"prompt": PROMPTS[2], "temperature": 0, "size": "12x12", "model": "m"}
    two = {"prompt": PROMPTS[2], "n": 2, "seed": 3, "negative_prompt": "sea", "guidance_scale": 2}

    async def run() -> tuple[ImageRequestOutput, np.ndarray, list[httpx2.Response]]:
        engine = AsyncLLM.from_engine_args(EngineArgs(model=str(janus.folder), **SETTINGS), log_stats=False)
        try:
            output = await engine.generate_images(PROMPTS[2], GREEDY)
            pixels = await engine.decode_images(output.images[0].codes)
            await python_api_examples.example_AsyncImages(engine)
            return output, pixels, await ask(engine, [good, two, *(body for body, _, _ in refused)])
        finally:
            engine.shutdown()

    output, pixels, (greedy, sampled, *errors) = asyncio.run(run())
    (image,) = output.images
    assert image.codes == wanted_codes(janus, output.prompt_token_ids)
    check_pixels(image.pixels, janus.pixels(image.codes))
    assert image.pixels is not None and np.array_equal(pixels[0], image.pixels)

    def images_of(answer: httpx2.Response) -> list[np.ndarray]:
        assert answer.status_code == 200, answer.text
        files = [base64.b64decode(each["b64_json"]) for each in answer.json()["data"]]
        return [np.asarray(Image.open(io.BytesIO(file))) for file in files]

    (found,) = images_of(greedy)
    assert np.array_equal(found, image.pixels)
    usage = greedy.json()["usage"]
    assert usage["input_tokens"] == len(output.prompt_token_ids) and usage["output_tokens"] == GRID * GRID
    assert greedy.json()["size"] == "12x12"
    first, second = images_of(sampled)
    assert first.shape == (12, 12, 3) and not np.array_equal(first, second)
    for answer, (_, field, words) in zip(errors, refused, strict=True):
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["param"] == field and words in error["message"], error


def test_an_image_request_that_is_aborted_is_an_error_of_the_server(janus: Janus) -> None:
    async def run() -> httpx2.Response:
        engine = AsyncLLM.from_engine_args(EngineArgs(model=str(janus.folder), **SETTINGS), log_stats=False)
        try:
            await engine.pause_generation(mode="keep")
            asking = asyncio.create_task(ask(engine, [{"prompt": "a"}]))
            while not engine.num_requests:
                await asyncio.sleep(0.01)
            await engine.pause_generation(mode="abort")
            return (await asking)[0]
        finally:
            engine.shutdown()

    answer = asyncio.run(run())
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "aborted")


class Emu3:
    """As Janus."""

    def __init__(self, folder: Path) -> None:
        self.folder = make_emu3(folder)
        self.model = load_emu3(folder)

    def tokens(self, prompt: list[int], negative: list[int]) -> list[int]:
        """The tokens of an image and the three that end it."""
        wrapper, row_end = EMU3_TOKENS["<|image token|>"], EMU3_TOKENS["<|extra_200|>"]
        count = ROWS * (COLUMNS + 1)
        ends = {count + 1: EMU3_TOKENS["<|extra_201|>"], count + 2: EMU3_TOKENS["<|image end|>"], count + 3: 1}

        def allowed(batch: int, ids: torch.Tensor) -> list[int]:
            offset = len(ids) - int((ids == wrapper).nonzero()[0])
            if offset in ends:
                return [ends[offset]]
            return [row_end] if offset % (COLUMNS + 1) == 0 else self.model.vocabulary_mapping.image_tokens

        ids, other = torch.tensor([prompt]), torch.tensor([negative])
        found = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            negative_prompt_ids=other,
            negative_prompt_attention_mask=torch.ones_like(other),
            prefix_allowed_tokens_fn=allowed,
            do_sample=False,
            guidance_scale=3.0,
            max_new_tokens=count + 3,
        )
        return found[0, len(prompt) :].tolist()

    @torch.no_grad()
    def pixels(self, tokens: list[int]) -> torch.Tensor:
        found = self.model.decode_image_tokens(image_tokens=torch.tensor([tokens]), height=ROWS, width=COLUMNS)
        return (found[0].permute(1, 2, 0) + 1) * 127.5


@pytest.fixture(scope="module")
def emu3(tmp_path_factory: pytest.TempPathFactory) -> Emu3:
    return Emu3(tmp_path_factory.mktemp("emu3"))


@pytest.mark.shows("tokens", family="emu3")
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"max_num_batched_tokens": 9, "max_num_seqs": 4}, id="chunks"),
        pytest.param({"tensor_parallel_size": 2, **THREADS}, id="TP", marks=pytest.mark.exhaustive),
    ],
)
def test_images_of_emu3_are_those_of_transformers(emu3: Emu3, settings: dict[str, Any]) -> None:
    size = {"height": ROWS * EMU3_SCALE, "width": COLUMNS * EMU3_SCALE}
    params = ImageParams(temperature=0, logprobs=True, negative_prompt="to be", **size)
    with LLM(str(emu3.folder), **{**SETTINGS, **settings}) as llm:
        negative = llm.llm_engine.image_requests.sampling_params(params).negative_prompt
        assert isinstance(negative, list)
        outputs = llm.generate_images(list(PROMPTS[:2]), params, use_tqdm=False)
        tokenizer = llm.get_tokenizer()
    for prompt, output in zip(PROMPTS, outputs, strict=False):
        size_ids = tokenizer(f"{ROWS}*{COLUMNS}").input_ids
        begin, wrapper = EMU3_TOKENS["<|image start|>"], EMU3_TOKENS["<|image token|>"]
        assert output.prompt_token_ids == [0, *tokenizer(prompt).input_ids, begin, *size_ids, wrapper]
        (image,) = output.images
        tokens = emu3.tokens(output.prompt_token_ids, negative)
        assert image.token_ids == tokens[:-3]
        of_codes = [i for i in range(len(image.token_ids)) if i % (COLUMNS + 1) < COLUMNS]
        assert image.codes == [tokens[i] - EMU3_FIRST_CODE for i in of_codes]
        check_pixels(image.pixels, emu3.pixels(tokens))
        ids = torch.tensor([[*output.prompt_token_ids, *image.token_ids]])
        with torch.no_grad():
            logits = emu3.model(ids).logits[0, len(output.prompt_token_ids) - 1 : -1]
        logits = logits[of_codes, EMU3_FIRST_CODE : EMU3_FIRST_CODE + NUM_CODES]
        wanted = torch.log_softmax(logits, -1).gather(1, torch.tensor(image.codes).unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(torch.tensor(image.conditional_logprobs), wanted, atol=LOGPROB_TOLERANCE, rtol=0)


def test_emu3_scores_the_codes_of_a_prompt_among_the_codes_if_the_request_is_of_images(emu3: Emu3) -> None:
    params = ImageParams(temperature=0, logprobs=True, height=ROWS * EMU3_SCALE, width=COLUMNS * EMU3_SCALE)
    with LLM(str(emu3.folder), **SETTINGS) as llm:
        (output,) = llm.generate_images(PROMPTS[0], params, use_tqdm=False)
        (image,) = output.images
        whole = {"prompt_token_ids": [*output.prompt_token_ids, *image.token_ids]}
        as_image, as_text = (SamplingParams(token_space=s, max_tokens=0, prompt_logprobs=0) for s in ("image", "text"))
        scored = [each.prompt_logprobs for each in llm.generate([whole] * 2, [as_image, as_text], use_tqdm=False)]
    found = []
    for positions in scored:
        assert positions is not None
        entries = zip(image.token_ids, positions[len(output.prompt_token_ids) :], strict=True)
        found.append([entry[token].logprob for token, entry in entries if entry and token >= EMU3_FIRST_CODE])
    assert found[0] == pytest.approx(image.conditional_logprobs, abs=LOGPROB_TOLERANCE)
    assert all(whole < own for own, whole in zip(*found, strict=True)), "text tokens have a part of the probability"


def test_sizes_of_emu3_are_checked(emu3: Emu3) -> None:
    with LLM(str(emu3.folder), **SETTINGS) as llm:
        for params, words in (
            (ImageParams(), "90 x 90 codes has 8190 tokens"),
            (ImageParams(height=5, width=4), "height is 5, but must be a multiple of 2"),
        ):
            with pytest.raises(RequestError, match=words):
                llm.generate_images("a", params)
        (output,) = llm.generate_images("a", ImageParams(height=4, width=6, temperature=0), use_tqdm=False)
        assert output.images[0].pixels is not None and output.images[0].pixels.shape == (4, 6, 3)
        text = llm.generate("the sea", SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)[0]
        assert len(text.outputs[0].token_ids) == 4


def test_emu3_without_a_tokenizer_takes_token_ids(emu3: Emu3) -> None:
    size = {"height": 4, "width": 6, "temperature": 0}
    prompt = {"prompt_token_ids": [0, 7, EMU3_TOKENS["<|image start|>"]]}
    with LLM(str(emu3.folder), skip_tokenizer_init=True, **SETTINGS) as llm:
        for params in (ImageParams(guidance_scale=1, **size), ImageParams(negative_prompt=[0, 7], **size)):
            (output,) = llm.generate_images(prompt, params, use_tqdm=False)
            assert output.images[0].is_whole
        with pytest.raises(RequestError, match="the unconditional prompt must be token ids") as caught:
            llm.generate_images(prompt, ImageParams(**size))
    assert caught.value.parameter == "negative_prompt"
