"""lm-eval scores the demo model over HTTP as transformers does."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mvllm.demo import demo_model_path
from tests.clients.conftest import RunClient
from tests.helpers.server import ServerProcess

TASKS = Path(__file__).parent / "tasks"
TOLERANCE = 1e-3

Samples = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def evaluate(
    server: ServerProcess, run_client: RunClient, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., tuple[dict[str, Any], Samples]]:
    """Runs lm-eval as it is started from a terminal; returns its results and samples, by task."""

    def run(model: str, path: str, tasks: str, *more: str, **settings: object) -> tuple[dict[str, Any], Samples]:
        folder = tmp_path_factory.mktemp("scores")
        settings = {"model": "demo", "base_url": server.url + path, "max_length": 1024, **settings}
        arguments = ",".join(f"{name}={value}" for name, value in settings.items())
        run_client(
            *("lm_eval", "-m", "lm_eval", "run", "--model", model, "--model_args", arguments, "--tasks", tasks),
            *("--include_path", str(TASKS), "--output_path", str(folder), "--log_samples", *more),
            cwd=TASKS,
        )
        [results] = folder.rglob("results_*.json")
        samples: Samples = {}
        for task in tasks.split(","):
            [file] = folder.rglob(f"samples_{task}_*.jsonl")
            lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
            samples[task] = sorted(lines, key=lambda sample: sample["doc_id"])
        return json.loads(results.read_text(encoding="utf-8"))["results"], samples

    return run


@cache
def oracle() -> tuple[Any, Any]:
    folder = demo_model_path()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return AutoTokenizer.from_pretrained(folder), model


def logprobs(ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each token but the first, its log-probability and whether it is the most probable."""
    with torch.inference_mode():
        scores = oracle()[1](torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    wanted = torch.tensor(ids[1:])
    return scores[torch.arange(len(wanted)), wanted], scores.argmax(-1) == wanted


def encode(text: str) -> list[int]:
    ids: list[int] = oracle()[0](text, add_special_tokens=False)["input_ids"]
    return ids


def tokenizer() -> dict[str, object]:
    return {"tokenizer": demo_model_path(), "tokenizer_backend": "huggingface"}


@pytest.mark.parametrize(
    "how",
    [("--batch_size", "1"), ("--batch_size", "3")],
    ids=["prompts at once", "lists of prompts"],
)
def test_log_likelihoods_are_those_of_transformers(evaluate: Callable[..., Any], how: tuple[str, str]) -> None:
    results, samples = evaluate(
        "local-completions", "/v1/completions", "mvllm_facts,mvllm_stories", *how, **tokenizer(), num_concurrent=4
    )
    num_seen = 0
    for sample in samples["mvllm_facts"]:
        for argument, [found] in zip(sample["arguments"].values(), sample["resps"], strict=True):
            context, continuation = argument["arg_0"], argument["arg_1"]
            before, ids = len(encode(context)), encode(context + continuation)
            expected, is_best = logprobs(ids)
            assert float(found[0]) == pytest.approx(float(expected[before - 1 :].sum()), abs=TOLERANCE)
            assert str(found[1]) == str(bool(is_best[before - 1 :].all()))
            num_seen += 1
    assert num_seen == 15 and results["mvllm_facts"]["acc,none"] == 1
    for sample in samples["mvllm_stories"]:
        text = sample["arguments"]["gen_args_0"]["arg_0"]
        expected, _ = logprobs([oracle()[0].bos_token_id, *encode(text)])
        [[found]] = sample["resps"]
        assert float(found) == pytest.approx(float(expected.sum()), abs=TOLERANCE * len(expected))


def test_generated_texts_are_those_of_the_model(evaluate: Callable[..., Any]) -> None:
    """Through completions, as token ids, and through chat."""
    _, samples = evaluate("local-completions", "/v1/completions", "mvllm_answers", num_concurrent=4, **tokenizer())
    for sample in samples["mvllm_answers"]:
        context = sample["arguments"]["gen_args_0"]["arg_0"]
        ids = encode(context)
        model = oracle()[1]
        with torch.inference_mode():
            whole = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=24)[0, len(ids) :]
        expected = oracle()[0].decode(whole, skip_special_tokens=True).split("\n")[0]
        assert sample["resps"] == [[expected]]


def test_chat(evaluate: Callable[..., Any]) -> None:
    path, template = "/v1/chat/completions", "--apply_chat_template"
    results, samples = evaluate("local-chat-completions", path, "mvllm_answers", template, num_concurrent=4)
    assert results["mvllm_answers"]["exact_match,none"] == 1, samples
