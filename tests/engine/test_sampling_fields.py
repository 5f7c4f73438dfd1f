"""The sampling fields that change single logits, rank sequences or truncate prompts; transformers is the oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from mvllm import LLM, RequestError, SamplingParams, StructuredOutputsParams
from tests.helpers.late_plugin import LOG
from tests.helpers.model_zoo import load_reference
from tests.helpers.parity import engine
from tests.helpers.plugins import late_platform_path, prepend

PROMPTS = [[5, 6, 7], list(range(10, 43)), [200, 9, 200], [31] * 20]
LENGTH = 24
WAYS = {
    "together": {},
    "ahead": {"async_scheduling": True},
    "preempted": {"kv_cache_memory_bytes": 10 * 16 * 768, "async_scheduling": True, "enable_prefix_caching": False},
    "on-device": {"platform": "late", "async_scheduling": True},
    "pipeline": {"distributed_executor_backend": "mp", "pipeline_parallel_size": 2},
    "two-ranks": {"distributed_executor_backend": "mp", "tensor_parallel_size": 2, "async_scheduling": True},
}
PROCESSES = ("pipeline", "two-ranks")


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Any:
    return load_reference(checkpoint)


@pytest.fixture(
    scope="module",
    params=[pytest.param(way, marks=pytest.mark.exhaustive) if way in PROCESSES else way for way in WAYS],
)
def llm(request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("late")
    with pytest.MonkeyPatch.context() as patch:
        prepend(patch, late_platform_path(folder / "plugins"))
        (folder / "log").write_text("")
        patch.setenv(LOG, str(folder / "log"))
        patch.setenv("FAULT_INJECTION", "none")
        platform = {"platform": "cpu"} | WAYS[request.param]
        with engine(checkpoint, max_model_len=96, **platform) as llm:
            yield llm


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> Iterator[LLM]:
    with engine(checkpoint, platform="cpu") as llm:
        yield llm


def transformers_tokens(model: Any, prompt: list[int], **settings: Any) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=LENGTH,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            **settings,
        )
    tokens: list[int] = found[0, len(prompt) :].tolist()
    return tokens


def generate(llm: LLM, params: Any) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
    assert all(output.outputs[0].finish_reason == "length" for output in outputs), outputs
    return [output.outputs[0].token_ids for output in outputs]


def greedy(**settings: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True, **settings)


def bad_words_of(reference: Any, prompt: list[int]) -> list[list[int]]:
    """Words that the model would generate: of one, two and three tokens, and one that begins in the prompt."""
    free = transformers_tokens(reference, prompt)
    return [[free[9]], free[3:5], free[5:8], [*prompt[-2:], free[0]], [prompt[-1]] * 90]


def test_bad_words_are_those_of_transformers(llm: LLM, reference: Any) -> None:
    words = [bad_words_of(reference, prompt) for prompt in PROMPTS]
    expected = [transformers_tokens(reference, p, bad_words_ids=w) for p, w in zip(PROMPTS, words, strict=True)]
    assert generate(llm, [greedy(bad_words_token_ids=w) for w in words]) == expected
    assert expected != [transformers_tokens(reference, prompt) for prompt in PROMPTS]
    stats = llm.llm_engine.stats
    assert stats is not None
    assert (stats.num_preemptions > 0) == (llm.llm_engine.cache_summary.num_blocks < 11)


def test_logit_bias_is_that_of_transformers(llm: LLM, reference: Any) -> None:
    biases = [{i % 320: (-1.0) ** i * (i % 7) for i in range(at, at + 250)} for at in range(4)]
    expected = [
        transformers_tokens(reference, p, sequence_bias={(token,): value for token, value in bias.items()})
        for p, bias in zip(PROMPTS, biases, strict=True)
    ]
    assert generate(llm, [greedy(logit_bias=bias) for bias in biases]) == expected
    assert expected != [transformers_tokens(reference, prompt) for prompt in PROMPTS]


def test_allowed_tokens_are_those_of_transformers(llm: LLM, reference: Any) -> None:
    allowed = [[5, 6, 7, 300], list(range(0, 320, 2)), [319], list(range(100, 120))]
    expected = [
        transformers_tokens(reference, p, prefix_allowed_tokens_fn=lambda batch, ids, a=a: a)
        for p, a in zip(PROMPTS, allowed, strict=True)
    ]
    assert generate(llm, [greedy(allowed_token_ids=a) for a in allowed]) == expected


def test_all_fields_in_one_row_do_not_affect_the_other_rows(llm: LLM, reference: Any) -> None:
    """One row has all fields, the other rows none; the other rows must not change."""
    free = [transformers_tokens(reference, prompt) for prompt in PROMPTS]
    allowed = [token for token in range(320) if token != free[1][0]]
    params = [greedy(), greedy(allowed_token_ids=allowed, logit_bias={9: 4.0}, bad_words_token_ids=[[31], [5, 6]])]
    found = generate(llm, [*params, greedy(), greedy()])
    bias = {"sequence_bias": {(9,): 4.0}, "bad_words_ids": [[31], [5, 6], [free[1][0]]]}
    assert found == [free[0], transformers_tokens(reference, PROMPTS[1], **bias), *free[2:]]


def only(allowed: list[int]) -> Callable[..., torch.Tensor]:
    """A logits processor that allows one token after the other."""

    def process(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        return torch.full_like(logits, -torch.inf).index_fill(0, torch.tensor(allowed[len(output_ids)]), 0.0)

    return process


def without_known(prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    logits[[*prompt_ids, *output_ids]] = -torch.inf
    return logits


def test_functions_of_a_request_change_its_logits(llm: LLM, reference: Any) -> None:
    tokens = list(range(50, 50 + LENGTH))
    params = [greedy(logits_processors=[only(tokens)]), greedy(), greedy(logits_processors=[without_known]), greedy()]
    if llm.llm_engine.config.parallel.distributed_executor_backend == "mp":
        with pytest.raises(RequestError, match="run only where the model does"):
            generate(llm, params)
        return
    found = generate(llm, params)
    assert found[0] == tokens
    assert len(set(found[2])) == LENGTH and not set(found[2]) & set(PROMPTS[2])
    assert found[1::2] == [transformers_tokens(reference, prompt) for prompt in PROMPTS[1::2]]


def test_a_function_that_fails_fails_its_request(plain: LLM) -> None:
    params = [SamplingParams(max_tokens=4, logits_processors=[lambda ids, logits: None]), SamplingParams(max_tokens=4)]
    prompts = [{"prompt_token_ids": PROMPTS[0]}] * 2
    failed, other = plain.generate(prompts, params, use_tqdm=False, raise_on_error=False)
    assert "it must return the logits" in (failed.outputs[0].error or "")
    assert len(other.outputs[0].token_ids) == 4
    with pytest.raises(RequestError, match="give classes to the engine's setting"):
        SamplingParams(logits_processors=[LLM])


def test_max_tokens_0_computes_the_prompt_alone(plain: LLM) -> None:
    prompt = {"prompt_token_ids": PROMPTS[1]}
    known = plain.generate(prompt, SamplingParams(max_tokens=1, prompt_logprobs=1), use_tqdm=False)[0]
    settings: list[dict[str, Any]] = [{}, {"n": 2}, {"logprobs": 1}]
    for each in settings:
        params = SamplingParams(max_tokens=0, prompt_logprobs=1, **each)
        found = plain.generate(prompt, params, use_tqdm=False)[0]
        assert found.prompt_logprobs == known.prompt_logprobs
        assert len(found.outputs) == params.n
        for output in found.outputs:
            assert (output.token_ids, output.text, output.finish_reason) == ([], "", "length")
    with pytest.raises(RequestError, match="max_tokens must be at least 1"):
        SamplingParams(max_tokens=0, use_beam_search=True)


def test_a_request_may_leave_the_prefix_cache_unread(plain: LLM) -> None:
    prompt = {"prompt_token_ids": [9] * 64}
    cached = [
        plain.generate(prompt, SamplingParams(max_tokens=1, skip_reading_prefix_cache=skip), use_tqdm=False)[0]
        for skip in (None, None, True)
    ]
    assert [output.num_cached_tokens for output in cached] == [0, 48, 0]


def test_log_probabilities_are_those_before_any_change(plain: LLM) -> None:
    prompt = {"prompt_token_ids": PROMPTS[0]}
    free = plain.generate(prompt, greedy(logprobs=3), use_tqdm=False)[0].outputs[0]
    first = free.token_ids[0]
    settings = {"logit_bias": {first: -100.0}, "bad_words_token_ids": [[first]]}
    changed = plain.generate(prompt, greedy(logprobs=3, **settings), use_tqdm=False)[0].outputs[0]
    assert changed.token_ids[0] != first and free.logprobs is not None and changed.logprobs is not None
    assert changed.logprobs[0][first] == free.logprobs[0][first] and changed.logprobs[0][first].rank == 1
    assert changed.logprobs[0][changed.token_ids[0]].rank == 2


def test_random_rows_sample_only_allowed_tokens(plain: LLM) -> None:
    params = SamplingParams(
        temperature=2.0, n=8, seed=5, max_tokens=20, ignore_eos=True, allowed_token_ids=[3, 4, 5, 6],
        bad_words_token_ids=[[4], [3, 3]],
    )  # fmt: skip
    output = plain.generate({"prompt_token_ids": [7, 8, 3]}, params, use_tqdm=False)[0]
    for sequence in output.outputs:
        tokens = [3, *sequence.token_ids]
        assert set(tokens) <= {3, 5, 6} and (3, 3) not in pairwise(tokens)
    assert len({tuple(sequence.token_ids) for sequence in output.outputs}) > 1


def test_a_request_without_an_allowed_token_fails_alone(plain: LLM) -> None:
    params = [greedy(allowed_token_ids=[5], bad_words_token_ids=[[5]]), greedy()]
    prompts = [{"prompt_token_ids": PROMPTS[0]}] * 2
    bad, good = plain.generate(prompts, params, use_tqdm=False, raise_on_error=False)
    assert bad.outputs[0].finish_reason == "error" and "masked out" in (bad.outputs[0].error or "")
    assert good.outputs[0].finish_reason == "length"


def test_structured_outputs_and_allowed_tokens_apply_together(plain: LLM) -> None:
    tokenizer = plain.get_tokenizer()
    form = StructuredOutputsParams(choice=["cat", "dog"])
    prompt = {"prompt_token_ids": PROMPTS[0]}
    free = plain.generate(prompt, SamplingParams(temperature=0, structured_outputs=form), use_tqdm=False)[0].outputs[0]
    other = {"cat": "dog", "dog": "cat"}[free.text]
    words = [[token] for token in tokenizer.encode(free.text, add_special_tokens=False)[:1]]
    held = SamplingParams(temperature=0, structured_outputs=form, bad_words_token_ids=[*words, [free.token_ids[0]]])
    assert plain.generate(prompt, held, use_tqdm=False)[0].outputs[0].text == other
    rest = [token for token in range(320) if token != free.token_ids[0]]
    held = SamplingParams(temperature=0, structured_outputs=form, allowed_token_ids=rest)
    assert plain.generate(prompt, held, use_tqdm=False)[0].outputs[0].text == other


def test_bad_words_as_text_are_blocked_at_the_beginning_and_after_a_space(plain: LLM) -> None:
    tokenizer = plain.get_tokenizer()
    params = greedy(bad_words=["ab"])
    core = plain.llm_engine.input_processor.process("1", {"prompt_token_ids": [5]}, params).core
    ids = core.sampling_params.bad_words_token_ids or []
    assert ids[0] == tokenizer.encode("ab", add_special_tokens=False)
    assert all(tokenizer.decode(word).strip() == "ab" for word in ids)
    assert params.bad_words_token_ids is None, "the caller's settings stay as they are"


class TestBestOf:
    def test_best_of_returns_the_sequences_with_the_largest_cumulative_logprob(self, plain: LLM) -> None:
        common = {"temperature": 1.5, "seed": 11, "max_tokens": 12, "stop_token_ids": list(range(0, 320, 12))}
        prompt = {"prompt_token_ids": PROMPTS[0]}
        every = plain.generate(prompt, SamplingParams(n=6, logprobs=0, **common), use_tqdm=False)[0].outputs
        ranked = sorted(every, key=lambda each: -each.cumulative_logprob)
        assert [each.index for each in ranked] != [0, 1, 2, 3, 4, 5]
        for n in (1, 3):
            best = plain.generate(prompt, SamplingParams(n=n, best_of=6, **common), use_tqdm=False)[0].outputs
            assert [each.index for each in best] == list(range(n))
            assert [each.token_ids for each in best] == [each.token_ids for each in ranked[:n]]
            assert [each.text for each in best] == [each.text for each in ranked[:n]]
            assert [each.cumulative_logprob for each in best] == [each.cumulative_logprob for each in ranked[:n]]
            assert all(each.logprobs is None for each in best)

    def test_best_of_has_no_output_before_the_end(self, plain: LLM) -> None:
        params = SamplingParams(best_of=3, max_tokens=6, ignore_eos=True)
        plain.llm_engine.add_request("1", {"prompt_token_ids": [5]}, params)
        shown = []
        while plain.llm_engine.has_unfinished_requests():
            shown += plain.llm_engine.step()
        assert len(shown) == 1 and shown[0].finished and len(shown[0].outputs) == 1


class TestTruncation:
    def test_truncation_keeps_the_last_tokens(self, plain: LLM) -> None:
        long = list(range(5, 60))
        cut = plain.generate({"prompt_token_ids": long}, greedy(truncate_prompt_tokens=8), use_tqdm=False)[0]
        short = plain.generate({"prompt_token_ids": long[-8:]}, greedy(), use_tqdm=False)[0]
        assert cut.prompt_token_ids == long[-8:] and cut.outputs[0].token_ids == short.outputs[0].token_ids
        whole = plain.generate({"prompt_token_ids": long}, greedy(truncate_prompt_tokens=100), use_tqdm=False)[0]
        assert whole.prompt_token_ids == long

    def test_truncation_of_text(self, plain: LLM) -> None:
        text = "once upon a time there was"
        ids = plain.generate(text, greedy(), use_tqdm=False)[0].prompt_token_ids
        cut = plain.generate(text, greedy(truncate_prompt_tokens=3), use_tqdm=False)[0]
        assert cut.prompt_token_ids == ids[-3:] and cut.prompt == text

    def test_minus_one_truncates_to_the_context(self, plain: LLM) -> None:
        room = plain.llm_engine.model_config.max_model_len
        cut = plain.generate([[5] * 1000, "word " * 2000], greedy(truncate_prompt_tokens=-1), use_tqdm=False)
        assert [len(output.prompt_token_ids) for output in cut] == [room - 1] * 2
        with pytest.raises(RequestError, match="truncate_prompt_tokens"):
            plain.generate([5], greedy(truncate_prompt_tokens=room + 1), use_tqdm=False)


def test_without_detokenize_there_is_no_text_and_stop_is_rejected(plain: LLM) -> None:
    output = plain.generate([5, 6], greedy(detokenize=False), use_tqdm=False)[0].outputs[0]
    assert output.text == "" and len(output.token_ids) == LENGTH
    with pytest.raises(RequestError, match="detokenize"):
        greedy(detokenize=False, stop="x")


def test_one_invalid_field_rejects_all_prompts_of_the_call(plain: LLM) -> None:
    wrong: list[Callable[[], SamplingParams]] = [
        lambda: greedy(allowed_token_ids=[320]),
        lambda: greedy(logit_bias={320: 1}),
        lambda: greedy(bad_words_token_ids=[[5, 320]]),
    ]
    for each in wrong:
        with pytest.raises(RequestError, match="vocabulary"):
            plain.generate([[5], [6]], [greedy(), each()], use_tqdm=False)
    assert not plain.llm_engine.has_unfinished_requests()
