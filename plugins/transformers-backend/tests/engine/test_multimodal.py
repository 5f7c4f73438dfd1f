"""Models that run through transformers with its encoders give the tokens of transformers in the engine."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar

import pytest

from mvllm import SamplingParams
from tests.engine.test_items_with_other_weights import check_other_encoders
from tests.helpers.audio_suite import AudioSuite
from tests.helpers.multimodal_suite import (
    THREADS,
    MultiModalOracle,
    MultiModalRequest,
    MultiModalSuite,
    check,
    engine,
    generate,
    names_of,
    oracle,
)
from tests.helpers.multimodal_zoo import MultiModalEntry

zoo = importlib.import_module("plugins.transformers-backend.tests.multimodal_zoo").through_transformers
NUM_TOKENS = 12
IMAGES = ("llava", "qwen2_5_vl", "gemma3", "llava_next", "aya_vision", "vipllava")


@pytest.mark.shows("tokens", impl="transformers")
@pytest.mark.parametrize("name", names_of(*IMAGES, gate=True, zoo=zoo))
def test_requests_with_images_and_without_in_one_batch_and_a_chat(name: str) -> None:
    expected = oracle(name, zoo)
    request = expected.requests[1]
    text, image = {"type": "text", "text": "What is this?"}, {"type": "image_pil", "image_pil": request.images[0]}
    with engine(expected.folder, **expected.settings) as llm:
        (alone,) = generate(llm, [expected.requests[2]], NUM_TOKENS)
        check(expected, [alone], [2])
        check(expected, generate(llm, expected.requests[:3], NUM_TOKENS))
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        (chat,) = llm.chat([{"role": "user", "content": [text, image]}], params, use_tqdm=False)
        assert chat.prompt is not None and chat.prompt_token_ids is not None
        asked = MultiModalRequest(chat.prompt, request.images)
        start, stop = expected.span_of_image(1)
        assert list(chat.prompt_token_ids).count(expected.prompt_ids(request)[start]) == stop - start
        assert list(chat.outputs[0].token_ids) == expected.generate(asked, NUM_TOKENS)


class ThroughTransformers(MultiModalSuite):
    shown_impl: ClassVar[str] = "transformers"
    zoo: ClassVar[Callable[[], Mapping[str, MultiModalEntry]]] = staticmethod(zoo)

    @pytest.mark.shows("tp")
    def test_on_two_ranks(self, expected: MultiModalOracle) -> None:  # type: ignore[override]
        settings = {"distributed_executor_backend": THREADS, "tensor_parallel_size": 2, **expected.settings}
        with engine(expected.folder, **settings) as llm:
            check(expected, generate(llm, expected.requests))


@pytest.mark.exhaustive
class TestImages(ThroughTransformers):
    names: ClassVar[list[str]] = names_of(*IMAGES, zoo=zoo)


@pytest.mark.exhaustive
class TestSounds(ThroughTransformers, AudioSuite):
    names: ClassVar[list[str]] = names_of("glmasr", zoo=zoo)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["llava-through", "llava_next-through"])
def test_images_are_encoded_again_with_new_weights_and_after_sleep(name: str, tmp_path: Path) -> None:
    check_other_encoders(oracle(name, zoo), tmp_path)
