"""Weights of a running engine that are replaced from a GGUF file."""

from __future__ import annotations

from pathlib import Path

import pytest
from plugins.gguf.tests.written_files import write_gguf

from mvllm import RequestError
from tests.engine.test_weight_updates import Pair, result_of
from tests.helpers.parity import engine


def test_blocks_of_a_file_are_replaced_by_those_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MVLLM_CACHE_DIR", str(tmp_path / "cache"))
    pair = Pair("llama-gqa", tmp_path)

    def type_of(name: str) -> str:
        return "Q8_0" if "attn_" in name or "ffn_" in name else "F32"

    old, new = (write_gguf(folder, folder.with_suffix(".gguf"), type_of) for folder in (pair.old, pair.new))
    with engine(new, skip_tokenizer_init=True) as llm:
        want = result_of(llm)
    with engine(old, skip_tokenizer_init=True) as llm:
        before = result_of(llm)
        llm.update_weights(path=new)
        assert result_of(llm) == want != before
        with pytest.raises(RequestError, match=r"proj\.weight.*takes no floats"):
            llm.update_weights(path=pair.old)
        assert result_of(llm) == want
