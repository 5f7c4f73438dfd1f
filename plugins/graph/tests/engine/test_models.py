"""Engines whose models run as graphs give the tokens of transformers, with the features that core computes."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plugins.graph.tests.interpreter_engine import start
from plugins.graph.tests.interpreter_platform import graph_platform_path

from mvllm import LLM, PoolingParams, RequestError, RequestOutput, SamplingParams, StructuredOutputsParams
from mvllm_graph.interpreter import InterpretedProgram
from mvllm_graph.worker.graph_model import GraphModel
from tests.helpers import parity
from tests.helpers.changed_weights import changed_copy, tensors_of
from tests.helpers.model_zoo import load_reference
from tests.helpers.parity import Oracle
from tests.helpers.plugins import prepend

WHICH = (0, 3, 6, 8, 10)
NUM_TOKENS = 16


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepend(monkeypatch, graph_platform_path(tmp_path))


@pytest.fixture(scope="module")
def expected() -> Oracle:
    return parity.oracle("llama-gqa", WHICH, NUM_TOKENS)


def generate(llm: LLM, prompts: list[list[int]], **settings: Any) -> list[RequestOutput]:
    return parity.generate(llm, prompts, max_tokens=NUM_TOKENS, **settings)


def test_tokens_logprobs_and_prompt_logprobs_are_those_of_transformers(stack: ExitStack, expected: Oracle) -> None:
    llm = start(stack, expected.folder, max_num_batched_tokens=48)
    for _ in range(2):  # the second time from the prefix cache
        outputs = generate(llm, expected.prompts, prompt_logprobs=2)
        parity.check(expected, outputs)
        parity.check_prompt_logprobs(expected, outputs)


def check_tokens(found: list[RequestOutput], expected: Oracle) -> None:
    assert [list(output.outputs[0].token_ids) for output in found] == expected.tokens


class Sampled(list[int]):
    """Numbers of rows that were sampled on the host, by step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        largest = GraphModel.largest_logits

        def note(model: GraphModel, *args: Any) -> tuple[np.ndarray, np.ndarray]:
            found = largest(model, *args)
            self.append(len(found[1]))
            return found

        monkeypatch.setattr(GraphModel, "largest_logits", note)


def test_tokens_that_the_host_finds_are_those_of_transformers(
    stack: ExitStack, expected: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, sampled = start(stack, expected.folder, max_num_batched_tokens=48), Sampled(monkeypatch)
    check_tokens(generate(llm, expected.prompts, logprobs=None), expected)
    assert sum(sampled) == len(expected.prompts) * NUM_TOKENS
    sampled.clear()
    check_tokens(generate(llm, expected.prompts[:1], logprobs=None), replace(expected, tokens=expected.tokens[:1]))
    assert sampled == [1] * NUM_TOKENS


def test_other_steps_are_sampled_as_on_other_platforms(
    stack: ExitStack, expected: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, sampled = start(stack, expected.folder), Sampled(monkeypatch)
    plain = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
    for settings in ({"logprobs": 2}, {"prompt_logprobs": 1}, {"temperature": 1.0}, {"logit_bias": {3: 1.0}}):
        other = SamplingParams(**{"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True, **settings})
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in expected.prompts[:2]], [plain, other], use_tqdm=False
        )
        assert list(outputs[0].outputs[0].token_ids) == expected.tokens[0]
    assert not sampled


def test_a_row_without_a_usable_logit_fails_alone(
    stack: ExitStack, expected: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, run_head = start(stack, expected.folder), GraphModel._run_head

    def damage(model: GraphModel, *args: Any) -> np.ndarray:
        logits = run_head(model, *args).copy()
        if len(logits) > 1:
            logits[1, 5] = np.nan
        return logits

    monkeypatch.setattr(GraphModel, "_run_head", damage)
    first, second, *_ = generate(llm, expected.prompts, logprobs=None)
    assert second.outputs[0].finish_reason == "error" and "NaN" in (second.outputs[0].error or "")
    assert list(first.outputs[0].token_ids) == expected.tokens[0]


def test_preempted_requests_are_computed_again(stack: ExitStack, expected: Oracle) -> None:
    llm = start(stack, expected.folder, kv_cache_memory_bytes=12 * 16 * 768)  # 12 blocks
    parity.check(expected, generate(llm, expected.prompts))


def num_draft_tokens(llm: LLM) -> int:
    stats = llm.llm_engine.stats
    assert stats is not None
    return stats.num_draft_tokens


def test_draft_tokens_from_the_prompt_are_verified(stack: ExitStack, expected: Oracle) -> None:
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    llm = start(stack, expected.folder, speculative_config=ngram)
    counts = [0]
    parity.check(expected, generate(llm, expected.prompts))
    counts.append(num_draft_tokens(llm))
    check_tokens(generate(llm, expected.prompts, logprobs=None), expected)  # the tokens are chosen on the host
    counts.append(num_draft_tokens(llm))
    assert counts[0] < counts[1] < counts[2]


def test_draft_tokens_of_a_model_with_states_are_verified(stack: ExitStack) -> None:
    """Accepted and rejected ones, in steps with prompts of other requests."""
    found = parity.oracle("granitehybrid", WHICH, NUM_TOKENS)
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    llm = start(stack, found.folder, speculative_config=ngram, max_num_batched_tokens=48)
    parity.check(found, generate(llm, found.prompts))
    stats = llm.llm_engine.stats
    assert stats is not None and 0 < stats.num_accepted_tokens < stats.num_draft_tokens


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["granitehybrid", "gemma2"])
def test_states_and_windows(stack: ExitStack, name: str) -> None:
    found = parity.oracle(name, WHICH, NUM_TOKENS)
    parity.check(found, generate(start(stack, found.folder), found.prompts))


def test_embeddings_are_those_of_the_last_hidden_state(stack: ExitStack, expected: Oracle) -> None:
    model = load_reference(expected.folder).base_model
    llm = start(stack, expected.folder, max_num_batched_tokens=32)
    for prompt, output in zip(
        expected.prompts, llm.encode(expected.prompts, PoolingParams(normalize=False), use_tqdm=False), strict=True
    ):
        with torch.inference_mode():
            wanted = model(torch.tensor([prompt])).last_hidden_state[0, -1].numpy()
        np.testing.assert_allclose(output.outputs.data, wanted, atol=1e-4, rtol=0)


def test_structured_outputs_follow_their_grammar(stack: ExitStack, expected: Oracle) -> None:
    llm = start(stack, expected.folder)
    form = StructuredOutputsParams(choice=["yes", "no"])
    [output] = llm.generate("a", SamplingParams(max_tokens=8, structured_outputs=form), use_tqdm=False)
    assert output.outputs[0].text in ("yes", "no")


@pytest.mark.exhaustive
def test_pipeline_stages_have_a_program_each(stack: ExitStack, expected: Oracle) -> None:
    llm = start(stack, expected.folder, pipeline_parallel_size=2, distributed_executor_backend="mp")
    check_tokens(generate(llm, expected.prompts, logprobs=None), expected)
    outputs = generate(llm, expected.prompts, prompt_logprobs=2)
    parity.check(expected, outputs)
    parity.check_prompt_logprobs(expected, outputs)


def test_a_program_gets_each_weight_once_and_its_caches_are_freed(
    stack: ExitStack, expected: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[str] = []
    programs: list[InterpretedProgram] = []
    set_weight, finish = InterpretedProgram.set_weight, InterpretedProgram.finish_weights

    def note(self: InterpretedProgram, name: str, array: np.ndarray) -> None:
        given.append(name)
        set_weight(self, name, array)

    def note_program(self: InterpretedProgram) -> None:
        programs.append(self)
        finish(self)

    monkeypatch.setattr(InterpretedProgram, "set_weight", note)
    monkeypatch.setattr(InterpretedProgram, "finish_weights", note_program)
    llm = start(stack, expected.folder)
    assert len(given) == len(set(given)) > 10

    def host_bytes(model: Any) -> int:
        return max(parameter.untyped_storage().nbytes() for parameter in model.parameters())

    assert llm.apply_model(host_bytes) == [4], "the weights have moved to the program"
    [program] = programs
    assert program._caches
    llm.sleep(level=1)
    assert not program._caches
    llm.wake_up()
    parity.check(expected, generate(llm, expected.prompts))
    llm.sleep(level=2)
    assert not program._arrays
    llm.wake_up()
    assert len(programs) == 2 and len(given) == 2 * len(set(given))
    parity.check(expected, generate(llm, expected.prompts))


def test_updated_weights_give_the_tokens_of_a_new_engine(stack: ExitStack, expected: Oracle, tmp_path: Path) -> None:
    changed = changed_copy(expected.folder, tmp_path / "changed")
    with ExitStack() as other:
        new = [list(each.outputs[0].token_ids) for each in generate(start(other, changed), expected.prompts)]
    llm = start(stack, expected.folder)
    parity.check(expected, generate(llm, expected.prompts))
    llm.update_weights(path=changed)
    found = [list(each.outputs[0].token_ids) for each in generate(llm, expected.prompts)]
    assert found == new != expected.tokens
    llm.start_weight_update()
    names = list(tensors_of(expected.folder))
    for some in (names[::2], names[1::2]):
        llm.update_weights(path=expected.folder, names=some)
    llm.finish_weight_update()
    parity.check(expected, generate(llm, expected.prompts))


def test_an_update_needs_all_tensors_of_a_module(stack: ExitStack, expected: Oracle) -> None:
    llm = start(stack, expected.folder)
    query = next(name for name in tensors_of(expected.folder) if name.endswith("q_proj.weight"))
    with pytest.raises(RequestError, match=r"The update lacks .*k_proj"):
        llm.update_weights(path=expected.folder, names=[query])
    parity.check(expected, generate(llm, expected.prompts))


def test_a_compiler_that_lacks_an_operation_is_refused_by_name(
    expected: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mvllm_graph.interpreter import Interpreter

    every = Interpreter().operations()
    monkeypatch.setattr(Interpreter, "operations", lambda self: set(every) - {"slice"})
    with pytest.raises(Exception, match="does not translate the operation 'slice'"):
        LLM(str(expected.folder), platform="graph-interpreter", max_model_len=64)
