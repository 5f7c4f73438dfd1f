"""Tokenizers that expand short texts to very long ones are rejected by their file."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from mvllm.engine.tokenizer.tokenizer_expansion import check_tokenizer_expansion
from mvllm.errors import ModelError


def replace(content: str, **pattern: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(steps)}


def table(*texts: str) -> dict[str, Any]:
    data = (8).to_bytes(4, "little") + bytes(8) + b"\0".join(text.encode() for text in texts) + b"\0"
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}


def check(folder: Path, **parts: Any) -> None:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({"version": "1.0", **parts, "model": {"vocab": {"a": 0}}}))
    check_tokenizer_expansion(path)


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": sequence(*[replace("a" * 16, String="a")] * 8)},
        {"normalizer": sequence(sequence(replace("a" * 9, Regex="a+")), replace("a" * 9, Regex=r"\p{L}"))},
        {"normalizer": replace("a" * 100, Regex="(?=a)")},
        {"normalizer": replace("a" * 100, Regex="(a")},
        {"normalizer": {"type": "Prepend", "prepend": "a" * 100}},
        {"decoder": {"type": "Sequence", "decoders": [replace("a" * 16, String="a")] * 2}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "ByteLevel"}] * 4}},
        {"normalizer": sequence({"type": "ByteLevel"}, replace("a" * 17, String="a"))},
        {"normalizer": table("a" * 65)},
        {"post_processor": {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 65}},
    ],
)
def test_expansion_without_bounds_is_rejected(tmp_path: Path, parts: dict[str, Any]) -> None:
    with pytest.raises(
        ModelError, match=r"tokenizer\.json: its steps can expand one character of the .*64 are allowed"
    ):
        check(tmp_path, **parts)


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"normalizer": None},
        {"normalizer": sequence({"type": "Prepend", "prepend": "▁"}, replace("▁", String=" "))},
        {"normalizer": sequence(*[replace('"', String="``")] * 30, *[replace(" ", Regex=r"[^\p{L}\s]{2,}")] * 30)},
        {"normalizer": sequence({"type": "NFKD"}, {"type": "Precompiled"}, replace(" ", Regex=" {2,}"))},
        {"decoder": {"type": "Sequence", "decoders": [replace(" ", String="▁"), {"type": "Fuse"}]}},
        {"normalizer": sequence(table(" ", "a" * 18), replace(" ", Regex=" {2,}"))},
        {
            "normalizer": sequence(replace(" ", Regex="(?=a)"), {"type": "Prepend", "prepend": " "}),
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Split"}, {"type": "ByteLevel"}]},
            "post_processor": {
                "type": "Sequence",
                "processors": [
                    {"type": "ByteLevel"},
                    {"type": "TemplateProcessing", "pair": [{"Sequence": {"id": "A"}}, {"Sequence": {"id": "B"}}]},
                ],
            },
            "decoder": {"type": "ByteLevel"},
        },
    ],
)
def test_real_tokenizers_are_accepted(tmp_path: Path, parts: dict[str, Any]) -> None:
    check(tmp_path, **parts)


def test_a_file_that_cannot_be_read_is_left_to_the_library(tmp_path: Path) -> None:
    check_tokenizer_expansion(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_text("{")
    check_tokenizer_expansion(tmp_path / "tokenizer.json")
