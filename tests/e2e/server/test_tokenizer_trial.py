"""A tokenizer whose regular expressions take hours on a line of text stops the server's startup."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

import mvllm
from mvllm.engine.tokenizer import tokenizer as engine_tokenizer
from mvllm.engine.tokenizer.tokenizer_json import JsonTokenizer
from mvllm.entrypoints.openai.server.tokenizer_trial import TokenizerTrial
from mvllm.errors import ModelError, RequestError
from tests.helpers.processes import assert_nothing_left, shared_memory_names
from tests.helpers.server import SMALL, ServerProcess

DEMO = Path(mvllm.__file__).parent / "demo" / "model"


def split(expression: str) -> dict[str, Any]:
    pattern = {"Regex": expression}
    return {"pre_tokenizer": {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}}


def decode(expression: str) -> dict[str, Any]:
    steps = [{"type": "Fuse"}, {"type": "Replace", "pattern": {"Regex": expression}, "content": " "}]
    return {"decoder": {"type": "Sequence", "decoders": steps}}


GROWS = {
    "normalizer": {
        "type": "Sequence",
        "normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 16}] * 6,
    }
}


def write_tokenizer(folder: Path, **parts: Any) -> Path:
    """The demo model's tokenizer with replaced parts."""
    file = json.loads((DEMO / "tokenizer.json").read_text(encoding="utf-8"))
    (folder / "tokenizer.json").write_text(json.dumps({**file, **parts}), encoding="utf-8")
    return folder


def try_tokenizer(folder: Path) -> None:
    trial = TokenizerTrial()
    trial.start(str(folder))
    try:
        trial.result.result(timeout=120)
    finally:
        trial.close()


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        pytest.param(  # the server's test has such an expression, too
            split(r"[a-z]*[a-z]*[a-z]*\Z"),
            r"3 s of processor time, the last of them [0-9]+ characters, (110|300) letters",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(decode(r"(?:1|1){20}$"), r"3 s of processor time, .*digits", marks=pytest.mark.exhaustive),
        (decode(r"(1+)+$"), r"its decoder fails with the tokens of 2000 digits, .*retry-limit"),
        (GROWS, r"more memory than the 512 MB allowed, .*the last of them 2000 letters"),
    ],
    ids=["split", "decoder", "decoder-gives-up", "memory"],
)
def test_a_slow_expression_is_found(tmp_path: Path, parts: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=rf"tokenizer\.json cannot be used: .*{says}.*--tokenizer"):
        try_tokenizer(write_tokenizer(tmp_path, **parts))


def test_a_common_tokenizer_passes(tmp_path: Path) -> None:
    try_tokenizer(DEMO)
    try_tokenizer(tmp_path)  # has no tokenizer.json
    (tmp_path / "tokenizer.json").write_text("{")
    try_tokenizer(tmp_path)  # the server reports that itself


def test_a_server_with_such_a_tokenizer_does_not_start(tmp_path: Path) -> None:
    before = shared_memory_names()
    folder = tmp_path / "model"
    shutil.copytree(DEMO, folder)
    write_tokenizer(folder, **split(r"(a+)+$"))
    with ServerProcess(tmp_path, str(folder), "--port", "0", *SMALL) as server:
        assert server.wait(120) == 1
    assert "tokenizer.json cannot be used: tokenizing short texts took more than 3 s" in server.log
    assert "Traceback" not in server.log and "Ready at" not in server.log
    assert_nothing_left(server.tag, before)


def test_a_match_that_the_library_aborts_is_an_error_of_the_request() -> None:
    fast = Tokenizer(models.WordLevel({"x": 0}, unk_token="x"))
    fast.pre_tokenizer = pre_tokenizers.Split(Regex(r"(a+)+$"), "isolated")
    tokenizer = engine_tokenizer.Tokenizer(lambda: None, JsonTokenizer(fast, None))
    text = "a" * 1000 + "!"
    for encode in (tokenizer.encode, tokenizer.encode_truncated):
        with pytest.raises(RequestError, match=r"cannot tokenize the prompt: PanicException: .*retry-limit"):
            encode(text)
        encode("a")
