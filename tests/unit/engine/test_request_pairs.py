"""Requests with companions in the front end, of a kind of pairs that a package adds; and requests for token spaces."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from pathlib import Path

import msgspec
import pytest

from mvllm import RequestError, SamplingParams
from mvllm.config.token_spaces import TokenSpace
from mvllm.engine.frontend.input_processor import InputProcessor
from mvllm.engine.frontend.output_processor import OutputProcessor
from mvllm.engine.frontend.parallel_sampling import CoreRequestIds
from mvllm.engine.frontend.prompt_items import check_params_with_items
from mvllm.entrypoints.openai.common.request_sampling_params import completion_sampling_params
from mvllm.entrypoints.openai.protocol import CompletionRequest
from mvllm.extension_api.request_pairs import PairRequests
from mvllm.messages.requests import RequestPair
from tests.helpers.plugins import prepend, write_metadata
from tests.unit.engine.builders import make_config
from tests.unit.engine.tokenizers import make_tokenizer


class Settings(msgspec.Struct):
    strength: float


class Contrast(PairRequests):
    """Requests that are compared with a prompt of their own, or with their last token."""

    combiner = "difference"
    parameter = "strength"

    def settings(self, params: SamplingParams) -> bytes:
        return msgspec.json.encode(msgspec.convert((params.extra_args or {})["contrast"], Settings))

    def shared_prompt(self, params: SamplingParams) -> list[int] | None:
        given = (params.extra_args or {}).get("other")
        return None if given is None else self.context.check_token_ids(given)

    def prompt_for(self, params: SamplingParams, prompt_token_ids: list[int]) -> list[int]:
        return prompt_token_ids[-1:]


@pytest.fixture
def contrast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = f"[mvllm.request_pairs]\ncontrast = {__name__}:Contrast\n"
    combiner = f"[mvllm.logits_combiners]\ndifference = {__name__}:Difference\n"
    prepend(monkeypatch, [str(write_metadata(tmp_path, "contrast", group + combiner))])


def asks(**more: object) -> SamplingParams:
    return SamplingParams(extra_args={"request_pair": "contrast", "contrast": {"strength": 2.5}, **more}, n=2)


@pytest.mark.usefixtures("contrast")
def test_a_package_makes_the_companions_of_requests_that_name_it():
    processor = InputProcessor(make_config(), make_tokenizer())
    params = asks()
    plain, other, own = processor.process_batch(
        ["a", "b", "c"], [[7, 8], [7, 9], [7, 9]], [SamplingParams(), params, asks(other=[3, 4, 5])]
    )
    assert plain.core.pair is None
    assert other.core.pair == RequestPair("difference", [9], b'{"strength":2.5}', parameter="strength")
    assert own.core.pair is not None and own.core.pair.prompt_token_ids == [3, 4, 5]
    _, children = OutputProcessor(None, CoreRequestIds()).add_request(own)
    assert [child.pair for child in children] == [own.core.pair] * 2


@pytest.mark.parametrize("allowed", [None, "contrast-pairs"])
def test_a_kind_without_its_combiner_is_refused(
    allowed: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workers would fail in the step that starts such a request, and the engine with them."""
    folders = [
        write_metadata(tmp_path / "a", "contrast-pairs", f"[mvllm.request_pairs]\ncontrast = {__name__}:Contrast\n")
    ]
    if allowed is not None:
        group = f"[mvllm.logits_combiners]\ndifference = {__name__}:Difference\n"
        folders.append(write_metadata(tmp_path / "b", "contrast-combiner", group))
        monkeypatch.setenv("MVLLM_PLUGINS", allowed)
    prepend(monkeypatch, [str(folder) for folder in folders])
    with pytest.raises(RequestError, match="logits combiner 'difference'") as caught:
        InputProcessor(make_config(), None).process("r", [7], asks())
    assert caught.value.parameter == "extra_args"


@pytest.mark.usefixtures("contrast")
def test_companions_are_refused_where_they_cannot_be():
    config = make_config()
    with pytest.raises(RequestError, match="Token ids must be from 0"):
        InputProcessor(config, None).process("r", [7], asks(other=[10_000]))
    with pytest.raises(RequestError, match="strength cannot be combined with images"):
        check_params_with_items(asks(), [], RequestPair("difference", [9], parameter="strength"))


@pytest.mark.usefixtures("contrast")
def test_a_request_has_one_kind_which_has_a_name():
    processor = InputProcessor(make_config(), None)
    both = SamplingParams(guidance_scale=2, extra_args={"request_pair": "contrast"})
    for params, message in (
        (SamplingParams(extra_args={"request_pair": 5}), "must be the name of a kind of request pairs; got 5"),
        (both, "a request has one companion"),
    ):
        with pytest.raises(RequestError, match=message) as caught:
            processor.process("r", [7], params)
        assert caught.value.parameter == "extra_args"


def test_a_kind_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: ())
    processor = InputProcessor(make_config(), None)
    with pytest.raises(RequestError, match=r"no installed package has request pairs 'contrast'\. There are: none"):
        processor.process("r", [7], asks())
    message = "^guidance_scale needs the package mvllm-image-generation, which is not installed\\.$"
    with pytest.raises(RequestError, match=message) as caught:
        processor.process("r", [7], SamplingParams(guidance_scale=3))
    assert caught.value.parameter == "guidance_scale"
    assert processor.process("r", [7], SamplingParams(guidance_scale=1)).core.pair is None


def with_space(**fields: object) -> InputProcessor:
    config = make_config()
    image = TokenSpace("image", first=config.model.vocab_size, size=8, **fields)
    model = dataclasses.replace(config.model, token_spaces={"image": image})
    return InputProcessor(dataclasses.replace(config, model=model), make_tokenizer())


def test_a_space_has_its_own_defaults():
    request = with_space(num_tokens=9).process("r", [7], SamplingParams(token_space="image", max_tokens=None))
    assert (request.params.max_tokens, request.params.ignore_eos, request.params.detokenize) == (9, True, False)
    with pytest.raises(RequestError, match="bad_words must be unset when token_space is 'image'"):
        with_space().process("r", [7], SamplingParams(token_space="image", bad_words=["a"]))
    with pytest.raises(RequestError, match="token_space must be one of the spaces of the model fake: 'text', 'image'"):
        with_space().process("r", [7], SamplingParams(token_space="sound"))


def test_tokens_of_a_space_may_be_in_a_prompt():
    size, processor = make_config().model.vocab_size, with_space()
    assert processor.process("r", [size + 7]).core.prompt_token_ids == [size + 7]
    with pytest.raises(RequestError, match=f"Token ids must be from 0 to {size + 7}"):
        processor.process("r", [size + 8])
    with pytest.raises(RequestError, match=f"Token ids must be from 0 to {size - 1}"):
        InputProcessor(make_config(), None).process("r", [size])


def test_http_requests_have_the_two_fields():
    body = CompletionRequest(prompt="x", guidance_scale=2.5, negative_prompt="not this")
    params = completion_sampling_params(body, {}, None)
    assert (params.guidance_scale, params.negative_prompt) == (2.5, "not this")
