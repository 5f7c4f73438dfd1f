"""A request that is rejected, aborted or fails does not affect the others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mvllm import RequestError, SamplingParams
from mvllm.errors import EngineDeadError
from tests.engine.conftest import MakeLLM
from tests.helpers.model_zoo import make_checkpoint

GOOD = {"prompt_token_ids": [5, 6, 7, 8]}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def test_one_bad_prompt_in_a_list_is_named_and_nothing_is_queued(make_llm: MakeLLM) -> None:
    llm = make_llm()
    expected = llm.generate(GOOD, GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    with pytest.raises(RequestError, match="vocabulary"):
        llm.generate([GOOD, {"prompt_token_ids": [5, 100_000]}, GOOD], GREEDY, use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests()
    assert llm.generate(GOOD, GREEDY, use_tqdm=False)[0].outputs[0].token_ids == expected


def test_a_too_long_prompt_is_rejected_with_both_numbers(make_llm: MakeLLM) -> None:
    llm = make_llm(max_model_len=32)
    with pytest.raises(RequestError, match=r"33.*32|32.*33"):
        llm.generate({"prompt_token_ids": [5] * 33}, GREEDY, use_tqdm=False)
    with pytest.raises(RequestError):
        llm.generate({"prompt_token_ids": [5] * 32}, GREEDY, use_tqdm=False)
    output = llm.generate({"prompt_token_ids": [5] * 31}, GREEDY, use_tqdm=False)[0]
    assert len(output.outputs[0].token_ids) == 1
    assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
def test_an_aborted_request_frees_its_blocks_in_every_state(make_llm: MakeLLM, num_steps: int) -> None:
    engine = make_llm(max_num_seqs=2, max_num_batched_tokens=16).llm_engine
    for i in range(4):  # two run, one of them in chunks, two wait
        engine.add_request(str(i), {"prompt_token_ids": [5 + i] * 30}, GREEDY)
    for _ in range(num_steps):
        engine.step()
    engine.abort_request(["0", "2", "3", "unknown"])
    finished = []
    while engine.has_unfinished_requests():
        finished += [output.request_id for output in engine.step() if output.finished]
    assert finished == ["1"]
    stats = engine.stats
    assert stats is not None and stats.kv_cache_usage == 0 and stats.num_running == stats.num_waiting == 0


def test_nan_logits_end_the_requests_that_have_them_and_no_other(make_llm: MakeLLM, tmp_path: Path) -> None:
    folder = make_checkpoint("llama-gqa", tmp_path / "poisoned")
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][300] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    llm = make_llm(model=folder)
    healthy = make_llm().generate(GOOD, GREEDY, use_tqdm=False)[0].outputs[0].token_ids

    prompts = [GOOD, {"prompt_token_ids": [5, 300, 7]}, GOOD]
    good, bad, again = llm.generate(prompts, GREEDY, use_tqdm=False, raise_on_error=False)
    assert bad.outputs[0].finish_reason == "error"
    assert "NaN" in (bad.outputs[0].error or "")
    assert good.outputs[0].token_ids == again.outputs[0].token_ids == healthy
    stats = llm.llm_engine.stats
    assert stats is not None and stats.kv_cache_usage == 0


def test_a_failed_step_stops_the_engine_and_keeps_the_cause(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from mvllm.worker.model_runner import ModelRunner

    llm = make_llm()

    def fail(*args: object) -> None:
        raise RuntimeError("the device fell off the bus")

    monkeypatch.setattr(ModelRunner, "execute_model", fail)
    with pytest.raises(EngineDeadError, match="fell off the bus") as caught:
        llm.generate(GOOD, GREEDY, use_tqdm=False)
    assert isinstance(caught.value.__cause__, RuntimeError)
    monkeypatch.undo()
    with pytest.raises(EngineDeadError, match="fell off the bus"):
        llm.generate(GOOD, GREEDY, use_tqdm=False)
    llm.close()


def test_an_interrupted_step_stops_the_engine(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from mvllm.worker.model_runner import ModelRunner

    engine = make_llm().llm_engine
    engine.add_request("0", GOOD, GREEDY)

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ModelRunner, "execute_model", interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    monkeypatch.undo()
    with pytest.raises(EngineDeadError, match="KeyboardInterrupt"):
        engine.step()
    engine.abort_request("0")
    engine.shutdown()


def test_using_a_closed_engine_is_an_error(make_llm: MakeLLM) -> None:
    llm = make_llm()
    llm.close()
    llm.close()
    with pytest.raises(EngineDeadError, match="closed"):
        llm.generate(GOOD, GREEDY, use_tqdm=False)
