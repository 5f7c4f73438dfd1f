"""Items of prompts (images as rows of embeddings) in a whole engine: the tokens that transformers gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.toy_items import Prompt, expected, install, picture, request, run, toy_engine, write

TEXT: Prompt = [3 + i * 7 % 200 for i in range(40)]
ONE: Prompt = [*TEXT[:10], picture(1), *TEXT[10:20]]
TWO: Prompt = [*TEXT[:7], picture(2, 33), 9, picture(3, 5), *TEXT[20:26]]
FIRST: Prompt = [picture(4, 17), *TEXT[:3]]
LAST: Prompt = [*TEXT[:20], picture(5, 12)]
PROMPTS = {"one": ONE, "two": TWO, "first": FIRST, "last": LAST, "text": TEXT}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("toy") / "toy")


@pytest.fixture(scope="module")
def oracle(folder: Path) -> dict[str, list[int]]:
    return {name: expected(folder, prompt) for name, prompt in PROMPTS.items()}


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "plugin", monkeypatch)


def test_alone_and_in_a_batch_with_text(folder: Path, oracle: dict[str, list[int]]) -> None:
    with toy_engine(folder) as llm:
        for name, prompt in PROMPTS.items():
            assert run(llm, [request(name, prompt)]) == {name: oracle[name]}
    with toy_engine(folder) as llm:
        assert run(llm, [request(name, prompt) for name, prompt in PROMPTS.items()]) == oracle
