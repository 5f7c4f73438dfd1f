"""Request pairs of a kind that a package adds, in an engine."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from mvllm import SamplingParams
from mvllm.extension_api import LogitsCombiner
from mvllm.extension_api.request_pairs import PairRequests
from tests.engine.conftest import MakeLLM
from tests.helpers.plugins import prepend, write_metadata


class Contrast(PairRequests):
    """Requests that are compared with their last token, and whose strength is not checked."""

    combiner = "difference"

    def settings(self, params: SamplingParams) -> bytes:
        return msgspec.msgpack.encode((params.extra_args or {})["strength"])

    def prompt_for(self, params: SamplingParams, prompt_token_ids: list[int]) -> list[int]:
        return prompt_token_ids[-1:]


class Difference(LogitsCombiner):
    def weight(self, settings: bytes) -> float:
        return msgspec.msgpack.decode(settings, type=float)

    def combine(self, primary: torch.Tensor, companion: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return primary - weights * companion


def asks(strength: object) -> SamplingParams:
    extra_args = {"request_pair": "contrast", "strength": strength}
    return SamplingParams(max_tokens=4, temperature=0, detokenize=False, extra_args=extra_args)


def test_settings_that_the_combiner_cannot_read_fail_one_request(
    make_llm: MakeLLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = f"[mvllm.request_pairs]\ncontrast = {__name__}:Contrast\n"
    combiners = f"[mvllm.logits_combiners]\ndifference = {__name__}:Difference\n"
    prepend(monkeypatch, [str(write_metadata(tmp_path, "contrast", pairs + combiners))])
    llm, prompt = make_llm(), [5, 6, 7]
    alone = llm.generate([prompt], asks(0.5))[0].outputs[0].token_ids
    good, bad = llm.generate([prompt] * 2, [asks(0.5), asks("much")], raise_on_error=False)
    assert good.outputs[0].token_ids == alone and good.outputs[0].error is None
    assert "NaN logits" in (bad.outputs[0].error or "")
    assert llm.generate([prompt], asks(0.5))[0].outputs[0].token_ids == alone
