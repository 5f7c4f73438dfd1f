"""Encoders, decoders without an LM head, and classifiers: embeddings and scores equal those of transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from mvllm import LLM, ConfigError, PoolingParams, RequestError, SamplingParams
from mvllm.messages.pooling_params import PoolingType
from tests.e2e.python_api_examples import example_ClassificationRequestOutput
from tests.helpers import encoder_zoo as zoo
from tests.helpers.thread_executor import ThreadExecutor

TOLERANCE = 1e-5
TOLERANCES = {"Qwen3Next": 1e-4}
"""Of families whose float32 results depend on the order of sums, because they divide by small norms."""
LENGTHS = (1, 7, 7, 33, 2, 60, 60, 5, 128)
THREADS = f"{ThreadExecutor.__module__}.{ThreadExecutor.__name__}"
ENCODERS = ("Bert", "Roberta", "XLMRoberta", "DistilBert")
DECODERS = ("Llama", "Mistral", "Qwen2", "Qwen3", pytest.param("Qwen3Next", marks=pytest.mark.exhaustive))


def make(folder: Path, **settings: Any) -> LLM:
    """An engine whose steps fit only some of the prompts."""
    defaults = {"dtype": "float32", "max_num_seqs": 8, "max_num_batched_tokens": 160, "use_tqdm_on_load": False}
    if "skip_tokenizer_init" not in settings and not (folder / "tokenizer.json").exists():
        settings["skip_tokenizer_init"] = True
    return LLM(str(folder), **(defaults | settings))


def combined(states: np.ndarray, kind: PoolingType) -> np.ndarray:
    match kind:
        case PoolingType.MEAN_SQRT_LEN:
            return np.asarray(states.sum(0) / len(states) ** 0.5)
        case PoolingType.ALL:
            return states
        case _:
            found = {"last": states[-1], "cls": states[0], "mean": states.mean(0), "max": states.max(0)}
            return np.asarray(found[kind])


def check_vectors(llm: LLM, folder: Path, prompts: list[list[int]], tolerance: float = TOLERANCE) -> None:
    """Every pooling type in one batch, one prompt each and more; then the whole batch."""
    states = zoo.states(folder, prompts)
    kinds = [list(PoolingType)[i % len(PoolingType)] for i in range(len(prompts))]
    asked = [PoolingParams(pooling_type=kind, normalize=False) for kind in kinds]
    for output, kind, each in zip(llm.encode(prompts, asked, use_tqdm=False), kinds, states, strict=True):
        np.testing.assert_allclose(output.outputs.data, combined(each, kind), atol=tolerance, rtol=tolerance)
    for output, each in zip(llm.embed(prompts, use_tqdm=False), states, strict=True):
        vector = each[0 if llm.llm_engine.config.model.kind.is_encoder else -1]
        np.testing.assert_allclose(output.outputs.embedding, vector / np.linalg.norm(vector), atol=tolerance)


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return np.asarray(powers / powers.sum(-1, keepdims=True))


def check_scores(llm: LLM, folder: Path, prompts: list[list[int]], tolerance: float = TOLERANCE) -> None:
    expected = zoo.logits(folder, prompts)
    plain = llm.classify(prompts, PoolingParams(use_activation=False), use_tqdm=False)
    np.testing.assert_allclose([output.outputs.probs for output in plain], expected, atol=tolerance, rtol=tolerance)
    found = llm.classify(prompts, use_tqdm=False)
    one = expected.shape[1] == 1
    probabilities = 1 / (1 + np.exp(-expected)) if one else softmax(expected)
    np.testing.assert_allclose([output.outputs.probs for output in found], probabilities, atol=tolerance)
    assert all(output.outputs.num_classes == expected.shape[1] for output in found)
    assert len({tuple(np.round(output.outputs.probs, 3)) for output in found}) > 3, "they say nothing of the prompts"


@pytest.mark.parametrize("family", ENCODERS)
@pytest.mark.parametrize("head", ["Model", "ForMaskedLM"])
def test_encoders_give_the_states_of_transformers(family: str, head: str) -> None:
    folder = zoo.checkpoint(family + head)
    with make(folder) as llm:
        check_vectors(llm, folder, zoo.prompts(LENGTHS))
        assert llm.llm_engine.cache_summary.num_blocks == 0
        with pytest.raises(RequestError, match="generates nothing"):
            llm.generate([[5, 6]], SamplingParams(max_tokens=2), use_tqdm=False)
        longest = 128 if "Roberta" in family else 130  # RoBERTa does not use its first positions
        with pytest.raises(RequestError, match=f"may have {longest}"):
            llm.embed([[5] * (longest + 1)], use_tqdm=False)


@pytest.mark.parametrize("family", ENCODERS)
@pytest.mark.parametrize("labels", [3, 1])
def test_encoders_classify_as_transformers(family: str, labels: int) -> None:
    folder = zoo.checkpoint(f"{family}ForSequenceClassification", labels=labels)
    with make(folder) as llm:
        check_scores(llm, folder, zoo.prompts(LENGTHS))
        with pytest.raises(RequestError, match="gives no embeddings"):
            llm.embed([[5, 6]], use_tqdm=False)
        with pytest.raises(RequestError, match="dimensions is for embeddings"):
            llm.classify([[5, 6]], PoolingParams(dimensions=2), use_tqdm=False)


@pytest.mark.parametrize("family", DECODERS)
def test_decoders_without_a_head_embed(family: str) -> None:
    folder = zoo.checkpoint(f"{family}Model")
    with make(folder, kv_cache_memory_bytes=2**24, max_num_batched_tokens=50) as llm:
        check_vectors(llm, folder, zoo.prompts(LENGTHS), TOLERANCES.get(family, TOLERANCE))  # in chunks
        with pytest.raises(RequestError, match="generates nothing"):
            llm.generate([[5, 6]], SamplingParams(max_tokens=2), use_tqdm=False)
        with pytest.raises(RequestError, match="does not classify"):
            llm.classify([[5, 6]], use_tqdm=False)


@pytest.mark.parametrize("family", DECODERS)
def test_decoders_classify_by_their_last_state(family: str) -> None:
    folder = zoo.checkpoint(f"{family}ForSequenceClassification", labels=1 if family == "Qwen3" else 3)
    with make(folder, kv_cache_memory_bytes=2**24, max_num_batched_tokens=50) as llm:
        check_scores(llm, folder, zoo.prompts(LENGTHS), TOLERANCES.get(family, TOLERANCE))
        again = llm.classify([[*prompt, 9] for prompt in zoo.prompts(LENGTHS[:-1])], use_tqdm=False)
        assert sum(output.num_cached_tokens for output in again) > 0


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 3), (2, 2)])
def test_tensor_and_pipeline_parallel_give_the_outputs_of_transformers(tensor: int, pipeline: int) -> None:
    sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
    prompts = zoo.prompts(LENGTHS)
    folder = zoo.checkpoint("RobertaModel")
    with make(folder, distributed_executor_backend=THREADS, **sizes) as llm:
        check_vectors(llm, folder, prompts)
    folder = zoo.checkpoint("BertForSequenceClassification", labels=3)
    with make(folder, distributed_executor_backend=THREADS, **sizes) as llm:
        check_scores(llm, folder, prompts)


def test_an_encoder_gives_the_same_outputs_after_sleep() -> None:
    folder, prompts = zoo.checkpoint("BertModel"), zoo.prompts((4, 9))
    with make(folder, async_scheduling=True) as llm:
        before = llm.encode(prompts, use_tqdm=False)
        llm.sleep(2)
        llm.wake_up()
        again = llm.encode(prompts, use_tqdm=False)
        assert [output.outputs for output in again] == [output.outputs for output in before]


def test_invalid_settings_of_an_encoder_are_rejected() -> None:
    folder = zoo.checkpoint("BertModel")
    with pytest.raises(ConfigError, match="with an encoder it must be at least max_model_len"):
        make(folder, max_num_batched_tokens=100)
    for settings in ({"pooling": "mean"}, {"pooling_type": "most"}, {"pooling_type": "all"}):
        with pytest.raises(ConfigError, match="pooler_config"):
            make(folder, pooler_config=settings)
    with make(folder, pooler_config={"pooling_type": "mean", "dimensions": 8}, max_model_len=40) as llm:
        prompt = zoo.prompts((12,))
        vector = zoo.states(folder, prompt)[0].mean(0)[:8]
        [found] = llm.embed(prompt, use_tqdm=False)
        np.testing.assert_allclose(found.outputs.embedding, vector / np.linalg.norm(vector), atol=TOLERANCE)


# ------------------------------------------------------------------------------------------------------------- texts

TEXTS = ["What is it?", "it is a thing, and so on", "no", "x" * 90]


@pytest.fixture(scope="module")
def cross_encoder() -> Iterator[tuple[LLM, Path]]:
    folder = zoo.checkpoint("BertForSequenceClassification", labels=1, tokenizer=True)
    with make(folder) as llm:
        yield llm, folder


def expected_scores(folder: Path, pairs: list[tuple[str, str]], **settings: Any) -> list[float]:
    """transformers' scores of text pairs."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    found = []
    for pair in pairs:
        inputs = tokenizer(*pair, return_tensors="pt", **settings)
        assert inputs["token_type_ids"].max() == 1
        with torch.inference_mode():
            found.append(torch.sigmoid(zoo.reference(folder)(**inputs).logits).item())
    return found


def test_a_cross_encoder_scores_depend_on_the_order_of_the_texts(cross_encoder: tuple[LLM, Path]) -> None:
    llm, folder = cross_encoder
    scores = [output.outputs.score for output in llm.score(TEXTS[0], TEXTS, use_tqdm=False)]
    expected = expected_scores(folder, [(TEXTS[0], text) for text in TEXTS])
    np.testing.assert_allclose(scores, expected, atol=TOLERANCE)
    by_pairs = [output.outputs.score for output in llm.score(TEXTS[1:], TEXTS[:3], use_tqdm=False)]
    expected = expected_scores(folder, list(zip(TEXTS[1:], TEXTS[:3], strict=True)))
    np.testing.assert_allclose(by_pairs, expected, atol=TOLERANCE)


def test_the_example_of_the_python_api_runs(cross_encoder: tuple[LLM, Path]) -> None:
    example_ClassificationRequestOutput(cross_encoder[0])


@pytest.mark.parametrize("limit", [4, 5, 12, 31, 60, 100])
def test_long_pairs_are_truncated_like_in_transformers(cross_encoder: tuple[LLM, Path], limit: int) -> None:
    llm, folder = cross_encoder
    pairs = [("y" * 40, "z" * 90), ("q" * 90, "w" * 8), ("a b c", "d"), ("e" * 60, "f" * 61)]
    cut = PoolingParams(truncate_prompt_tokens=limit)
    found = llm.score([a for a, _ in pairs], [b for _, b in pairs], cut, use_tqdm=False)
    expected = expected_scores(folder, pairs, truncation="longest_first", max_length=limit)
    np.testing.assert_allclose([output.outputs.score for output in found], expected, atol=TOLERANCE)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    single = llm.classify([*TEXTS, {"prompt": TEXTS[0]}], cut, use_tqdm=False)
    wanted = tokenizer([*TEXTS, TEXTS[0]], truncation=True, max_length=limit)["input_ids"]
    assert [output.prompt_token_ids for output in single] == wanted
    [ids] = llm.classify([[*range(9, 9 + limit), 7, 8]], cut, use_tqdm=False)
    assert ids.prompt_token_ids == [*range(9, 9 + limit)]


def test_invalid_score_requests_are_rejected(cross_encoder: tuple[LLM, Path]) -> None:
    llm, _ = cross_encoder
    for first, second, wrong in (
        ([], "x", "data_1"),
        ("x", [], "data_2"),
        (["x", "y"], "z", "as many"),
        ("x", [3], "data_2"),
        ("x", "\ud800", "surrogate"),
    ):
        with pytest.raises(RequestError, match=wrong):
            llm.score(first, second, use_tqdm=False)  # type: ignore[arg-type]
    for limit in (0, -2, True, 10**9):
        with pytest.raises(RequestError, match="truncate_prompt_tokens"):
            llm.score("x", "y", PoolingParams(truncate_prompt_tokens=limit), use_tqdm=False)
    with pytest.raises(RequestError, match="no room"):
        llm.score("x", "y", PoolingParams(truncate_prompt_tokens=3), use_tqdm=False)
    with pytest.raises(RequestError, match="may have 130"):
        llm.score("x", "y " * 128, use_tqdm=False)
    assert len(llm.score("x", "y " * 128, PoolingParams(truncate_prompt_tokens=-1), use_tqdm=False)) == 1
    assert llm.score("x", "y", use_tqdm=False)[0].outputs.score > 0


def test_scores_use_the_activation_function_of_the_models_config(tmp_path: Path) -> None:
    source = zoo.checkpoint("BertForSequenceClassification", labels=1, tokenizer=True)
    folder = Path(shutil.copytree(source, tmp_path / "named"))
    config = json.loads((folder / "config.json").read_text())
    named = {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}
    (folder / "config.json").write_text(json.dumps(config | named))
    prompts = zoo.prompts((5, 6))
    with make(folder) as llm:
        found = llm.classify(prompts, use_tqdm=False)
        np.testing.assert_allclose([o.outputs.probs for o in found], zoo.logits(source, prompts), atol=TOLERANCE)
    (folder / "config.json").write_text(json.dumps(config | {"sbert_ce_default_activation_function": "os.system"}))
    with make(folder) as llm, pytest.raises(RequestError, match=r"os\.system"):
        llm.classify(prompts, use_tqdm=False)
