"""Beam search compared with transformers' `generate(num_beams=...)`: same sequences, same scores, best first."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mvllm import LLM, BeamSearchParams, RequestError, SamplingParams
from tests.helpers.async_engine import async_engine, last
from tests.helpers.model_zoo import load_reference
from tests.helpers.parity import engine

PROMPTS = [[5, 6, 7], list(range(10, 43)), [200]]
ENDS = [[], [17], list(range(3, 320, 9)), list(range(2, 320, 3))]
"""Tokens that end a sequence: none, one, or so many that searches end early, at different lengths."""


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Any:
    return load_reference(checkpoint)


@pytest.fixture(scope="module", params=[True, False], ids=["prefix-cache", "siblings"])
def llm(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[LLM]:
    with engine(checkpoint, enable_prefix_caching=request.param, max_num_seqs=8) as llm:
        yield llm


_known: dict[str, list[tuple[list[int], float]]] = {}


def transformers_beams(
    model: Any, prompt: list[int], ends: list[int], **settings: Any
) -> list[tuple[list[int], float]]:
    """Generated tokens and scores, best first; cached, since all tests use one model."""
    key = str((prompt, ends, settings))
    if key not in _known:
        _known[key] = _transformers_beams(model, prompt, ends, **settings)
    return _known[key]


def _transformers_beams(
    model: Any, prompt: list[int], ends: list[int], **settings: Any
) -> list[tuple[list[int], float]]:
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            eos_token_id=ends or None,
            pad_token_id=-1 % 320,
            return_dict_in_generate=True,
            output_scores=True,
            num_return_sequences=settings["num_beams"],
            **settings,
        )
    sequences = []
    for sequence in found.sequences[:, len(prompt) :].tolist():
        end = next((i for i, token in enumerate(sequence) if token in ends), len(sequence))
        sequences.append(sequence[: end + 1])
    return list(zip(sequences, found.sequences_scores.tolist(), strict=True))


def close(found: list[tuple[list[int], float]], expected: list[tuple[list[int], float]]) -> bool:
    same = [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    return same and all(abs(a - b) < 1e-4 for (_, a), (_, b) in zip(found, expected, strict=True))


SETTINGS = [
    {"beam_width": 4},
    {"beam_width": 2, "length_penalty": 0.0},
    {"beam_width": 3, "length_penalty": 2.0, "early_stopping": True},
    {"beam_width": 5, "length_penalty": -1.0},
    {"beam_width": 4, "length_penalty": 1.5, "early_stopping": "never"},
    {"beam_width": 3, "length_penalty": -0.5, "early_stopping": "never"},
    {"beam_width": 4, "early_stopping": True, "min_tokens": 5},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("ends", ENDS, ids=len)
def test_sequences_and_scores_are_those_of_transformers(
    llm: LLM, reference: Any, ends: list[int], settings: dict[str, Any]
) -> None:
    if settings.get("min_tokens") and not ends:
        pytest.skip("transformers' min_new_tokens is about tokens that end a sequence")
    params = BeamSearchParams(max_tokens=12, ignore_eos=True, stop_token_ids=ends, **settings)
    outputs = llm.beam_search([{"prompt_token_ids": prompt} for prompt in PROMPTS], params)
    theirs = {**settings, "num_beams": settings["beam_width"], "min_new_tokens": settings.get("min_tokens")}
    del theirs["beam_width"]
    theirs.pop("min_tokens", None)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected = transformers_beams(reference, prompt, ends, max_new_tokens=12, **theirs)
        found = [(s.tokens[len(prompt) :], s.score) for s in output.sequences]
        assert close(found, expected), (found, expected)
        for sequence in output.sequences:
            assert sequence.tokens[: sequence.num_prompt_tokens] == prompt
            has_ended = sequence.tokens[-1] in ends
            assert sequence.finish_reason == ("stop" if has_ended else "length")
            assert sequence.stop_reason == (sequence.tokens[-1] if has_ended else None)
    stats = llm.llm_engine.stats
    assert stats is not None and stats.kv_cache_usage == 0 and stats.num_waiting == 0


def test_forked_beams_reuse_the_cached_prefix(llm: LLM) -> None:
    """A beam's step computes at most its last block; the prefix is cached."""
    before = llm.llm_engine.stats
    was = 0 if before is None else before.prefix_cache_hits
    llm.beam_search(
        {"prompt_token_ids": list(range(60, 92))}, BeamSearchParams(beam_width=4, max_tokens=10, ignore_eos=True)
    )
    after = llm.llm_engine.stats
    assert after is not None
    assert after.prefix_cache_hits - was == 4 * 9 * 32  # two full blocks, for each beam of each round except the first


def test_more_beams_than_max_num_seqs(llm: LLM, reference: Any) -> None:
    params = BeamSearchParams(beam_width=12, max_tokens=5, ignore_eos=True)
    output = llm.beam_search([PROMPTS[0]], params)[0]
    expected = transformers_beams(reference, PROMPTS[0], [], max_new_tokens=5, num_beams=12)
    assert close([(s.tokens[3:], s.score) for s in output.sequences], expected)


def test_generate_gives_the_best_n_with_their_log_probabilities(llm: LLM) -> None:
    settings = {"max_tokens": 6, "ignore_eos": True, "logprobs": 2}
    params = SamplingParams(use_beam_search=True, beam_width=4, n=2, temperature=0, **settings)
    found, sampled = llm.generate(
        [[5, 6, 7], [8, 9]], [params, SamplingParams(temperature=0, max_tokens=6)], use_tqdm=False
    )
    best = llm.beam_search([5, 6, 7], BeamSearchParams(beam_width=4, **settings))[0].sequences
    assert [each.index for each in found.outputs] == [0, 1] and found.finished
    assert [each.token_ids for each in found.outputs] == [each.tokens[3:] for each in best[:2]]
    assert len(sampled.outputs[0].token_ids) == 6
    for each in found.outputs:
        assert each.text == llm.get_tokenizer().decode(each.token_ids, skip_special_tokens=True)
        chosen = [position[token].logprob for position, token in zip(each.logprobs, each.token_ids, strict=True)]
        assert sum(chosen) == pytest.approx(each.cumulative_logprob, abs=1e-6)
        assert all(len(position) in (2, 3) for position in each.logprobs)


def test_an_aborted_search_leaves_no_requests_or_blocks(llm: LLM) -> None:
    engine = llm.llm_engine
    for num_steps in (0, 1, 3):
        engine.add_request("1", {"prompt_token_ids": [5, 6]}, SamplingParams(use_beam_search=True, n=4, max_tokens=50))
        engine.add_request("2", {"prompt_token_ids": [5, 6]}, SamplingParams(temperature=0, max_tokens=6))
        for _ in range(num_steps):
            engine.step()
        engine.abort_request("1")
        ended = []
        while engine.has_unfinished_requests():
            ended += [output.request_id for output in engine.step() if output.finished]
        assert ended == ["2"]
    stats = engine.stats
    assert stats is not None and stats.kv_cache_usage == 0 and stats.num_running == stats.num_waiting == 0


def test_a_search_whose_every_candidate_is_forbidden_is_an_error(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=4, min_tokens=2, stop_token_ids=list(range(320)))
    with pytest.raises(RequestError, match="every candidate token"):
        llm.beam_search([5, 6], params)
    assert not llm.llm_engine.has_unfinished_requests()
    with pytest.raises(RequestError, match=r"Prompt 0 of 2: .*every candidate token"):
        llm.beam_search([[5, 6], [7, 8]], params)
    [output] = llm.beam_search([5, 6], params, raise_on_error=False)
    assert [each.finish_reason for each in output.sequences] == ["error"]
    assert "every candidate token" in (output.sequences[0].error or "")


def test_async_searches_run_concurrently_and_end_with_their_callers(checkpoint: Path, reference: Any) -> None:
    params = SamplingParams(use_beam_search=True, beam_width=3, n=3, max_tokens=6, ignore_eos=True)
    expected = transformers_beams(reference, [5, 6, 7], [], max_new_tokens=6, num_beams=3)
    with async_engine(checkpoint) as engine:

        async def main() -> None:
            left = engine.generate(
                [9, 9], SamplingParams(use_beam_search=True, n=4, max_tokens=100, ignore_eos=True), "left"
            )
            waiting = asyncio.ensure_future(anext(left))
            several = [last(engine.generate([5, 6, 7], params)) for _ in range(3)]
            outputs = await asyncio.gather(*several)
            await engine.abort("left")
            assert [each.finish_reason for each in (await waiting).outputs] == ["abort"] * 4
            await left.aclose()
            for output in outputs:
                assert [each.token_ids for each in output.outputs] == [tokens for tokens, _ in expected]
            assert engine.num_requests == 0 and engine._output_processor.num_sequences == 0
            assert await engine.reset_prefix_cache(), "blocks are still held"

        asyncio.run(main())
