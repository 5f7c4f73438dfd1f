"""Guided requests in the front end: their unconditional prompts, their outputs, and what is refused."""

from __future__ import annotations

import dataclasses

import pytest

from mvllm import RequestError, SamplingParams
from mvllm.config.token_spaces import TokenSpace
from mvllm.engine.frontend.input_processor import InputProcessor
from mvllm.engine.frontend.output_processor import OutputProcessor
from mvllm.engine.frontend.parallel_sampling import CoreRequestIds
from mvllm.messages.requests import EngineCoreOutput, EngineCoreOutputs, FinishReason, PositionLogprobs
from tests.unit.engine.builders import make_config
from tests.unit.engine.tokenizers import make_tokenizer

BEGIN, PAD = 6, 4


def make_processor(*, tokenizer: bool = True, spaces: bool = False) -> InputProcessor:
    config = make_config()
    if spaces:
        size = config.model.vocab_size
        image = TokenSpace("image", first=size, size=8, num_tokens=9, begin_token_ids=(BEGIN,), pad_token_id=PAD)
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, token_spaces={"image": image}))
    return InputProcessor(config, make_tokenizer() if tokenizer else None)


def process(params: SamplingParams, prompt: object = (7, 8, 9), **settings: bool):
    return make_processor(**settings).process("r", list(prompt) if isinstance(prompt, tuple) else prompt, params)


@pytest.mark.parametrize("scale", [None, 1.0])
def test_without_guidance_there_is_no_companion(scale):
    negative = None if scale is None else "not this"
    request = process(SamplingParams(guidance_scale=scale, negative_prompt=negative))
    assert request.core.pair is None


def test_guidance_by_the_name_of_its_kind_needs_a_scale():
    with pytest.raises(RequestError, match="needs guidance_scale") as caught:
        process(SamplingParams(extra_args={"request_pair": "guidance"}))
    assert caught.value.parameter == "guidance_scale"
    request = process(SamplingParams(guidance_scale=2, extra_args={"request_pair": "guidance"}))
    assert request.core.pair == process(SamplingParams(guidance_scale=2)).core.pair


def test_a_negative_prompt_is_a_text_or_token_ids():
    text = process(SamplingParams(guidance_scale=2, negative_prompt="Hello world"))
    assert text.core.pair.prompt_token_ids == make_tokenizer().encode("Hello world")
    ids = process(SamplingParams(guidance_scale=2, negative_prompt=(3, 4)))
    assert ids.core.pair.prompt_token_ids == [3, 4]


def test_each_sequence_has_both_prompts():
    processor = make_processor()
    request = processor.process("r", [7, 8], SamplingParams(guidance_scale=2, negative_prompt=[5], n=3))
    _, children = OutputProcessor(None, CoreRequestIds()).add_request(request)
    assert [child.pair.prompt_token_ids for child in children] == [[5]] * 3
    assert len({child.sibling_group for child in children}) == 1


def test_the_longer_prompt_limits_the_output():
    longest = make_config().model.max_model_len
    request = process(SamplingParams(guidance_scale=2, negative_prompt=[5] * (longest - 3), max_tokens=None))
    assert request.params.max_tokens == 3


def test_a_space_has_its_own_defaults():
    request = process(
        SamplingParams(token_space="image", max_tokens=None, guidance_scale=3), (7, BEGIN, 9), spaces=True
    )
    assert (request.params.max_tokens, request.params.ignore_eos, request.params.detokenize) == (9, True, False)
    bos = make_config().model.hf_config.get("bos_token_id")
    expected = [BEGIN if token == BEGIN else PAD for token in (7, BEGIN, 9)]
    assert bos not in (7, 9) and request.core.pair.prompt_token_ids == expected


def test_outputs_have_codes_and_conditional_logprobs():
    params = SamplingParams(token_space="image", max_tokens=2, guidance_scale=3, logprobs=0)
    request = process(params, spaces=True)
    first = make_config().model.vocab_size
    outputs = OutputProcessor(None, CoreRequestIds())
    _, [core] = outputs.add_request(request)
    for token, logprob, reason in ((first + 3, -0.5, None), (first + 7, -1.5, FinishReason.LENGTH)):
        entry = PositionLogprobs([token], [-0.1], 1)
        output = EngineCoreOutput(core.request_id, [token], reason, logprobs=[entry], conditional_logprobs=[logprob])
        [result] = outputs.process_outputs(EngineCoreOutputs([output])).request_outputs
    completion = result.outputs[0]
    assert completion.token_ids == [first + 3, first + 7]
    assert completion.image_codes == [3, 7]
    assert completion.conditional_logprobs == [-0.5, -1.5]
    assert completion.text == ""


def test_a_text_needs_a_tokenizer():
    with pytest.raises(RequestError, match="negative_prompt: it is a text, but the engine was started with"):
        process(SamplingParams(guidance_scale=2, negative_prompt="x", detokenize=False), tokenizer=False)


def test_sequences_are_sent_without_the_text_of_the_negative_prompt():
    request = process(SamplingParams(guidance_scale=2, negative_prompt="Hello world", n=2))
    _, children = OutputProcessor(None, CoreRequestIds()).add_request(request)
    assert [child.sampling_params.negative_prompt for child in children] == [None, None]


def test_a_space_without_tokens_that_begin_an_output_needs_a_negative_prompt():
    config = make_config()
    image = TokenSpace("image", first=config.model.vocab_size, size=8, pad_token_id=PAD)
    model = dataclasses.replace(config.model, token_spaces={"image": image})
    processor = InputProcessor(dataclasses.replace(config, model=model), make_tokenizer())
    with pytest.raises(RequestError, match="names no token that begins an output of the space 'image'") as caught:
        processor.process("r", [7, 8], SamplingParams(token_space="image", guidance_scale=3))
    assert caught.value.parameter == "negative_prompt"
    params = SamplingParams(token_space="image", guidance_scale=3, negative_prompt=[5])
    assert processor.process("r", [7, 8], params).core.pair.prompt_token_ids == [5]
