"""Tests of multimodal models in the engine: its greedy tokens are those of transformers, in float32.

    class TestLlava(MultiModalSuite):
        names = names_of("llava")

transformers computes each request alone, with the processor's result for all of its images together. The engine must
give the same tokens when it batches requests, cuts them into chunks inside of an image, uses cached prefixes, preempts
and recomputes, and shards the model.
"""

from __future__ import annotations

import functools
import random
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image

from mvllm import LLM, RequestOutput, SamplingParams
from mvllm.config.model import ModelConfig
from mvllm.config.sliding_window_blocks import max_blocks_held
from mvllm.errors import ConfigError, RequestError
from mvllm.messages.inputs import PromptType, TextPrompt
from mvllm.multimodal import processor_client
from mvllm.multimodal.processor_loading import load_processor
from mvllm.multimodal.processor_main import JobServer
from mvllm.multimodal.processor_messages import ItemJob, ItemResult, ProcessorStart
from tests.helpers import parity
from tests.helpers.multimodal_zoo import MultiModalEntry, load_reference, make_checkpoint, zoo
from tests.helpers.paged_driver import read_config
from tests.helpers.thread_executor import ThreadExecutor

NUM_TOKENS = 48
BLOCK_SIZE = 16
MAX_LEN = 512
CLEAR = 1e-4
"""Least difference between the largest and the second largest logit: rounding cannot change a token."""
THREADS = f"{ThreadExecutor.__module__}.{ThreadExecutor.__name__}"
_LETTERS = "abcdefghijklmnopqrstuvwxyz     .,"


@dataclass(frozen=True)
class MultiModalRequest:
    """A prompt with images.

    Attributes:
        prompt: Text with a placeholder for each image.
        images: The images.
    """

    prompt: str
    images: tuple[Image.Image, ...] = ()

    def as_prompt(self, modality: str = "image") -> TextPrompt:
        """As LLM.generate takes it."""
        if not self.images:
            return TextPrompt(prompt=self.prompt)
        return TextPrompt(prompt=self.prompt, multi_modal_data={modality: list(self.images)})


def draw_image(size: tuple[int, int], seed: int) -> Image.Image:
    """A picture of random colours in squares of 5 pixels, so that resizing keeps some of it."""
    generator = np.random.default_rng(seed)
    rows, columns = -(-size[1] // 5), -(-size[0] // 5)
    pixels = generator.integers(0, 256, (rows, columns, 3), dtype=np.uint8).repeat(5, axis=0).repeat(5, axis=1)
    return Image.fromarray(pixels[: size[1], : size[0]])


def draw_text(length: int, seed: object) -> str:
    """A random text of letters."""
    rng = random.Random(str(seed))
    return "".join(rng.choice(_LETTERS) for _ in range(length))


def draw_requests(entry: MultiModalEntry, seed: int = 0) -> list[MultiModalRequest]:
    """Eight requests: without image, with one to three of different sizes, and with an image that another one has."""
    images = [draw_image(size, 10 * seed + i) for i, size in enumerate(entry.sizes)]
    of_other = draw_image(entry.sizes[0], 10 * seed + 7)
    at = entry.placeholder

    def text(length: int) -> str:
        text.calls += 1  # type: ignore[attr-defined]
        return draw_text(length, (seed, text.calls))  # type: ignore[attr-defined]

    text.calls = 0  # type: ignore[attr-defined]
    shared = text(30)
    return [
        MultiModalRequest(text(25)),
        MultiModalRequest(shared + at + text(12), (images[0],)),
        MultiModalRequest(text(9) + at + text(14) + at, (images[1], images[0])),
        MultiModalRequest(text(60)),
        MultiModalRequest(at + text(7) + at + text(20) + at + text(5), (images[2], images[1], images[0])),
        MultiModalRequest(shared + at + text(12), (of_other,)),
        MultiModalRequest(shared + at + text(17), (images[0],)),
        MultiModalRequest(text(40) + at + text(3), (images[2],)),
    ]


@dataclass
class MultiModalOracle:
    """A checkpoint and the outputs of transformers for requests.

    Attributes:
        name: Of the zoo's entry.
        entry: The entry.
        folder: The checkpoint.
        requests: What to ask.
    """

    name: str
    entry: MultiModalEntry
    folder: Path
    requests: list[MultiModalRequest]
    _tokens: dict[int, list[int]] = field(default_factory=dict)

    @functools.cached_property
    def model(self) -> Any:
        """transformers' model."""
        return load_reference(self.folder)

    @functools.cached_property
    def processor(self) -> Any:
        """transformers' processor."""
        return load_processor(self.folder)

    @functools.cached_property
    def config(self) -> ModelConfig:
        """The engine's config of the checkpoint."""
        return read_config(self.folder, **self.settings)

    @property
    def settings(self) -> dict[str, object]:
        """Settings of each engine of the checkpoint."""
        return {"model_impl": self.entry.model_impl}

    def span_of_image(self, index: int) -> tuple[int, int]:
        """First and behind the last position that takes an embedding in the prompt of a request with one image."""
        assert self.config.multimodal is not None
        placeholder = self.config.multimodal.placeholders[self.entry.modality]
        places = [i for i, each in enumerate(self.prompt_ids(self.requests[index])) if each == placeholder]
        return places[0], places[-1] + 1

    def inputs(self, request: MultiModalRequest) -> dict[str, Any]:
        """The processor's result for a whole request."""
        if not request.images:
            return dict(self.processor.tokenizer([request.prompt], return_tensors="pt"))
        return dict(self.processor(text=[request.prompt], images=[list(request.images)], return_tensors="pt"))

    def prompt_ids(self, request: MultiModalRequest) -> list[int]:
        """The token ids of a prompt, with those of its images."""
        ids: list[int] = self.inputs(request)["input_ids"][0].tolist()
        return ids

    @torch.inference_mode()
    def generate(self, request: MultiModalRequest, num_tokens: int = NUM_TOKENS) -> list[int]:
        """Greedy tokens, one after the other, with transformers' own cache."""
        inputs = self.inputs(request)
        found = self.model.generate(
            **inputs, max_new_tokens=num_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        tokens: list[int] = found[0, inputs["input_ids"].shape[1] :].tolist()
        return tokens

    @torch.inference_mode()
    def check(self, index: int, tokens: Sequence[int]) -> None:
        """Asserts that these are the greedy tokens of a request.

        They are if each is the largest logit's behind those before it, so one pass over them all suffices. Longer
        outputs that were checked before are not computed again.
        """
        known = self._tokens.get(index, [])
        if len(known) >= len(tokens):
            assert list(tokens) == known[: len(tokens)], f"request {index} of {self.name}"
            return
        inputs = self.inputs(self.requests[index])
        n = len(tokens) - 1
        ids = torch.cat((inputs["input_ids"], torch.tensor([list(tokens)[:-1]])), dim=1)
        mask = torch.ones_like(ids)
        inputs = self.entry.inputs({**inputs, "input_ids": ids, "attention_mask": mask}, n)
        logits = self.model(**inputs).logits[0, -len(tokens) :].float()
        best = logits.topk(2, dim=-1)
        wanted = best.indices[:, 0].tolist()
        wrong = next((i for i, (a, b) in enumerate(zip(tokens, wanted, strict=True)) if a != b), None)
        assert wrong is None, (
            f"request {index} of {self.name}: token {wrong} is {tokens[wrong or 0]}, not {wanted[wrong or 0]}"
        )
        gap = float((best.values[:, 0] - best.values[:, 1]).min())
        assert gap > CLEAR, f"request {index} of {self.name} has a tie ({gap:.1e}): choose another seed"
        self._tokens[index] = list(tokens)


def oracle(name: str, zoo: Callable[[], Mapping[str, MultiModalEntry]] = zoo) -> MultiModalOracle:
    """The oracle of an entry, with the requests of `draw_requests`; cached for the life of the process."""
    return _make_oracle(name, zoo)


@functools.cache
def _make_oracle(name: str, zoo: Callable[[], Mapping[str, MultiModalEntry]]) -> MultiModalOracle:
    entry = zoo()[name]
    folder = make_checkpoint(entry, Path(tempfile.mkdtemp(prefix="mvllm-multimodal-")) / name)
    return MultiModalOracle(name, entry, folder, draw_requests(entry))


def names_of(
    *families: str, gate: bool | None = None, zoo: Callable[[], Mapping[str, MultiModalEntry]] = zoo
) -> list[str]:
    """Entries of some families: the name up to the first dash. With `gate` only those with that value of `gate`."""
    return [
        name for name, entry in zoo().items() if name.split("-")[0] in families and (gate is None or entry.gate is gate)
    ]


class _JobServerHere(JobServer):
    """Without the limits that end a processor's process."""

    def _limit(self, seconds: float) -> None:
        pass


@functools.cache
def _job_server(path: str, start: bytes) -> _JobServerHere:
    """One server for all engines of a checkpoint."""
    return _JobServerHere(msgspec.msgpack.decode(start, type=ProcessorStart))


class ProcessorHere:
    """Stands for a processor's process, whose start takes longer than a test: runs its jobs in this process."""

    pids: Sequence[int] = ()

    def __init__(self, start: ProcessorStart) -> None:
        self._server = _job_server(start.path, msgspec.msgpack.encode(start))

    def run(self, job: ItemJob) -> ItemResult:
        with _ONE_JOB:
            result = self._server.run(job)
        if result.error is not None:
            raise RequestError(result.error, parameter=result.parameter)
        return result

    def close(self) -> None:
        pass


_ONE_JOB = threading.Lock()


@contextmanager
def engine(folder: Path, **settings: object) -> Iterator[LLM]:
    """An engine for float32 on the platform under test, which processes items in this process."""
    defaults: dict[str, object] = {"max_model_len": MAX_LEN, "max_num_seqs": 8, "max_num_batched_tokens": MAX_LEN}
    with (
        patch.object(processor_client, "_make_pool", ProcessorHere),
        parity.engine(folder, **(defaults | settings)) as llm,
    ):
        yield llm


def generate(llm: LLM, requests: Sequence[MultiModalRequest], num_tokens: int = NUM_TOKENS) -> list[RequestOutput]:
    """Greedy continuations."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    prompts: list[PromptType] = [request.as_prompt() for request in requests]
    return llm.generate(prompts, params, use_tqdm=False, raise_on_error=False)


def check(expected: MultiModalOracle, outputs: Sequence[RequestOutput], which: Sequence[int] | None = None) -> None:
    """Asserts that the outputs have the prompts and the greedy tokens of transformers."""
    for index, output in zip(which or range(len(outputs)), outputs, strict=True):
        assert list(output.prompt_token_ids or ()) == expected.prompt_ids(expected.requests[index]), f"prompt {index}"
        assert output.outputs[0].token_ids, f"request {index} has failed"
        expected.check(index, output.outputs[0].token_ids)


@pytest.mark.shows("tokens")
class MultiModalSuite:
    """`checkpoint` iterates over `names`. Those of the gate run with every change, the others exhaustively."""

    names: ClassVar[list[str]] = []
    zoo: ClassVar[Callable[[], Mapping[str, MultiModalEntry]]] = staticmethod(zoo)
    """The entries that `names` are of."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        metafunc.parametrize("checkpoint", self.names)

    @pytest.fixture
    def expected(self, checkpoint: str) -> MultiModalOracle:
        return oracle(checkpoint, self.zoo)

    def test_alone_in_a_batch_and_after_prefix_hits(self, expected: MultiModalOracle) -> None:
        with engine(expected.folder, **expected.settings) as llm:
            for index in (1, 3, 4):
                (output,) = generate(llm, [expected.requests[index]])
                check(expected, [output], [index])
                assert list(output.outputs[0].token_ids) == expected.generate(expected.requests[index])
            assert llm.reset_prefix_cache()
            check(expected, generate(llm, expected.requests))
            again = generate(llm, expected.requests)
            check(expected, again)
            for output in again:
                assert output.prompt_token_ids is not None
                check_hit(expected, output, len(output.prompt_token_ids) - 1)
            assert any(output.num_cached_tokens for output in again)

    def test_prefix_hits_end_before_in_and_after_an_image(self, expected: MultiModalOracle) -> None:
        """Requests 1, 5 and 6 have the same text before an image; 1 and 6 have the same image, 5 has another one."""
        settings = {"state_snapshot_interval": BLOCK_SIZE} if expected.entry.has_states else {}
        with engine(expected.folder, **expected.settings, **settings) as llm:
            for index in (1, 5, 6, 1):
                (output,) = generate(llm, [expected.requests[index]])
                check(expected, [output], [index])
                first, second = (expected.prompt_ids(expected.requests[i]) for i in (1, index))
                start, stop = expected.span_of_image(1)
                if index == 5:
                    check_hit(expected, output, start)
                elif index == 6:
                    same = next(i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
                    check_hit(expected, output, same)
                    hit = output.num_cached_tokens
                    assert hit is not None and (hit > start or stop - start < BLOCK_SIZE)

    def test_cut_into_chunks_inside_of_images(self, expected: MultiModalOracle) -> None:
        budget = 11
        if expected.config.has_non_causal_spans:  # a step must hold a whole image
            budget = max(stop - start for start, stop in map(expected.span_of_image, (1, 5, 7))) + 8
        with engine(expected.folder, **expected.settings, max_num_batched_tokens=max(budget, 8)) as llm:
            check(expected, generate(llm, expected.requests))

    def test_preempted_and_recomputed(self, expected: MultiModalOracle) -> None:
        lengths = [len(expected.prompt_ids(request)) for request in expected.requests]
        longest = max(lengths) + NUM_TOKENS
        with engine(expected.folder, **expected.settings, max_model_len=longest) as llm:
            summary = llm.llm_engine.cache_summary

        def blocks_for(num_tokens: int, most_in_step: int) -> int:
            return sum(max_blocks_held(num_tokens, window, BLOCK_SIZE, most_in_step) for window in summary.windows)

        # Room for all prompts when they are computed, and for a little of what follows them. Layers with a window need
        # most blocks at the start of a request, so that a preemption happens with few sizes only, if with any.
        computed = sum(blocks_for(length, 1) for length in lengths)
        least, has_windows = blocks_for(longest, MAX_LEN), summary.windows != (None,)
        sizes = range(least, least + 6) if has_windows else [max(computed + len(lengths), least)]
        num_preemptions = 0
        for num_blocks in sizes:
            memory = summary.total_bytes // summary.num_blocks * num_blocks
            sizes_of = {"kv_cache_memory_bytes": memory, "max_model_len": longest}
            with engine(expected.folder, **expected.settings, **sizes_of) as llm:
                check(expected, generate(llm, expected.requests))
                stats = llm.llm_engine.stats
                num_preemptions += 0 if stats is None else stats.num_preemptions
            if num_preemptions:
                break
        assert num_preemptions or None not in summary.windows or len(summary.windows) > 2

    @pytest.mark.shows("layout")
    @pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2)])
    def test_on_two_ranks(self, expected: MultiModalOracle, tensor: int, pipeline: int) -> None:
        sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
        settings = {"distributed_executor_backend": THREADS, **sizes, **expected.settings}
        if pipeline > 1 and not expected.entry.has_stages:
            with pytest.raises(ConfigError, match="pipeline_parallel_size=1"), engine(expected.folder, **settings):
                pass
            return
        with engine(expected.folder, **settings) as llm:
            check(expected, generate(llm, expected.requests))


def check_hit(expected: MultiModalOracle, output: RequestOutput, most: int) -> None:
    """Asserts that the whole blocks of the first `most` tokens were cached; with sequence states no more than that."""
    hit, wanted = output.num_cached_tokens, most // BLOCK_SIZE * BLOCK_SIZE
    assert hit is not None
    if expected.entry.has_states:
        assert hit <= wanted and hit % BLOCK_SIZE == 0
    else:
        assert hit == wanted
