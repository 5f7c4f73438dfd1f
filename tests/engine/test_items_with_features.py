"""Prompts with images under the features of sampling and of steps: tokens and log-probabilities of transformers."""

from __future__ import annotations

import functools
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from mvllm import LLM, BeamSearchParams, RequestOutput, SamplingParams
from mvllm.messages.sampling_params import StructuredOutputsParams
from tests.engine.test_items_in_tiers import FAMILIES, NUM_IMAGES, num_encoded
from tests.helpers.multimodal_suite import NUM_TOKENS, MultiModalOracle, check, engine, oracle
from tests.helpers.multimodal_zoo import FIRST_SPECIAL_ID, TEXT, VOCAB_SIZE, draw_weights

TOLERANCE = 1e-4
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}


@functools.cache
def draft_model() -> Path:
    """A text model with the vocabulary of the multimodal ones."""
    folder = Path(tempfile.mkdtemp(prefix="mvllm-draft-")) / "draft"
    model = LlamaForCausalLM(LlamaConfig(**TEXT))
    draw_weights(model)
    model.save_pretrained(folder)
    return folder


def run(llm: LLM, expected: MultiModalOracle, params: SamplingParams) -> list[RequestOutput]:
    return llm.generate([request.as_prompt() for request in expected.requests], params, use_tqdm=False)


@torch.inference_mode()
def reference_logprobs(expected: MultiModalOracle, index: int, tokens: list[int]) -> torch.Tensor:
    """float32 [prompt + output - 1, vocabulary]: row i predicts token i + 1 of a request's prompt and output."""
    inputs = expected.inputs(expected.requests[index])
    ids = torch.cat((inputs["input_ids"], torch.tensor([tokens[:-1]], dtype=torch.int64)), dim=1)
    whole = {**inputs, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
    logits = expected.model(**expected.entry.inputs(whole, len(tokens) - 1)).logits[0]
    return torch.log_softmax(logits.float(), dim=-1)


def check_logprobs(expected: MultiModalOracle, index: int, output: RequestOutput, number: int = 0) -> None:
    """Log-probabilities of one sequence, and of the prompt if the request has asked for them."""
    tokens = list(output.outputs[number].token_ids)
    reference = reference_logprobs(expected, index, tokens)
    ids = list(output.prompt_token_ids or ())
    found = output.outputs[number].logprobs
    assert found is not None and len(found) == len(tokens)
    by_position = list(enumerate(found, len(ids)))
    if output.prompt_logprobs is not None:
        assert len(output.prompt_logprobs) == len(ids) and output.prompt_logprobs[0] is None
        by_position += list(enumerate(output.prompt_logprobs))[1:]
    for position, entries in by_position:
        assert entries and (ids + tokens)[position] in entries
        for token, entry in entries.items():
            off = abs(entry.logprob - float(reference[position - 1, token]))
            assert off < TOLERANCE, f"request {index}, position {position}: off by {off}"


SETTINGS: dict[str, dict[str, Any]] = {
    "synchronous steps": {"async_scheduling": False},
    "asynchronous steps": {"async_scheduling": True},
    "ngram": {"speculative_config": NGRAM},
    "draft model": {"speculative_config": {"num_speculative_tokens": 2}},
    "batch invariant": {"batch_invariant": True},
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_and_log_probabilities(name: str, settings: str) -> None:
    expected, chosen = oracle(name), SETTINGS[settings]
    if settings == "draft model":
        chosen = {"speculative_config": {**chosen["speculative_config"], "model": str(draft_model())}}
    common: dict[str, Any] = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "detokenize": False}
    with engine(expected.folder, **chosen) as llm:
        for more in ({}, {"logprobs": 2}, {"logprobs": 2, "prompt_logprobs": 2}):
            outputs = run(llm, expected, SamplingParams(**common, **more))
            check(expected, outputs)
            for index, output in enumerate(outputs if more else ()):
                check_logprobs(expected, index, output)
        assert num_encoded(llm) == NUM_IMAGES
        if "speculative_config" in chosen:
            stats = llm.llm_engine.stats
            assert stats is not None and stats.num_draft_tokens > 0
        if chosen.get("batch_invariant"):
            whole = [bits(output) for output in outputs]
            alone = [
                bits(llm.generate([request.as_prompt()], SamplingParams(**common, **more), use_tqdm=False)[0])
                for request in expected.requests
            ]
            assert alone == whole


def bits(output: RequestOutput) -> list[list[float]]:
    """All log-probabilities of a request."""
    positions = [*(output.prompt_logprobs or ()), *(output.outputs[0].logprobs or ())]
    return [[entry.logprob for entry in entries.values()] for entries in positions if entries]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FAMILIES)
def test_several_sequences_beams_and_constrained_outputs(name: str) -> None:
    expected = oracle(name)
    with engine(expected.folder) as llm:
        several = SamplingParams(n=3, temperature=1.0, top_k=8, seed=5, max_tokens=12, ignore_eos=True, logprobs=1)
        for index, output in enumerate(run(llm, expected, several)):
            assert len({tuple(sequence.token_ids) for sequence in output.outputs}) == 3
            for number in range(3):
                check_logprobs(expected, index, output, number)
        assert num_encoded(llm) == NUM_IMAGES
        for index in (1, 2):
            check_beams(expected, llm, index)
        for index in (1, 4):
            check_constrained(expected, llm, index)
        assert num_encoded(llm) == NUM_IMAGES


def check_beams(expected: MultiModalOracle, llm: LLM, index: int, width: int = 3, num_tokens: int = 10) -> None:
    """The sequences and scores of a beam search over the logits of transformers."""
    params = BeamSearchParams(beam_width=width, max_tokens=num_tokens, ignore_eos=True)
    [output] = llm.beam_search([expected.requests[index].as_prompt()], params)
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    for _ in range(num_tokens):
        candidates = []
        for total, tokens in beams:
            best = reference_logprobs(expected, index, [*tokens, 0])[-1].topk(width)
            pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
            candidates += [(total + logprob, [*tokens, token]) for logprob, token in pairs]
        beams = sorted(candidates, reverse=True)[:width]
    assert [each.tokens[-num_tokens:] for each in output.sequences] == [tokens for _, tokens in beams]
    for each, (total, _) in zip(output.sequences, beams, strict=True):
        assert abs(each.score - total / num_tokens) < TOLERANCE


def check_constrained(expected: MultiModalOracle, llm: LLM, index: int, length: int = 12) -> None:
    """Each token is the likeliest of those that a regular expression allows."""
    allowed = {"regex": f"[a-f]{{{length}}}"}
    params = SamplingParams(temperature=0, max_tokens=40, structured_outputs=StructuredOutputsParams(**allowed))
    [output] = llm.generate([expected.requests[index].as_prompt()], params, use_tqdm=False)
    text, tokens = output.outputs[0].text, list(output.outputs[0].token_ids)
    assert re.fullmatch(allowed["regex"], text), text
    tokenizer = llm.get_tokenizer()
    texts = {token: tokenizer.decode([token]) for token in range(FIRST_SPECIAL_ID)}
    reference = reference_logprobs(expected, index, [*tokens, 0])[-len(tokens) - 1 : -1]
    left = length
    for token, logprobs in zip(tokens, reference, strict=True):
        if not left:
            break  # the end of the sequence
        possible = [each for each, of_it in texts.items() if re.fullmatch(f"[a-f]{{1,{left}}}", of_it)]
        assert token == max(possible, key=lambda each: float(logprobs[each]))
        left -= len(texts[token])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
def test_bfloat16_is_as_close_to_float32_as_that_of_transformers(name: str) -> None:
    expected = oracle(name)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=-1, detokenize=False)
    with engine(expected.folder, dtype="bfloat16", max_logprobs=-1) as llm:
        outputs = run(llm, expected, params)
    half = expected.model.__class__.from_pretrained(
        expected.folder, attn_implementation="eager", dtype=torch.bfloat16
    ).eval()
    theirs = MultiModalOracle(expected.name, expected.entry, expected.folder, expected.requests)
    theirs.model = half
    ours_off, theirs_off = [], []
    for index, output in enumerate(outputs):
        assert output.prompt_logprobs is not None
        found = torch.tensor(
            [[entries[token].logprob for token in range(VOCAB_SIZE)] for entries in output.prompt_logprobs[1:]]
        )
        exact = reference_logprobs(expected, index, [0])[: len(found)]
        ours_off.append((found - exact).flatten())
        theirs_off.append((reference_logprobs(theirs, index, [0])[: len(found)] - exact).flatten())
    ours, transformers = (float(torch.cat(each).square().mean().sqrt()) for each in (ours_off, theirs_off))
    assert 0 < ours < 1.3 * transformers, f"{ours} beside {transformers}"
