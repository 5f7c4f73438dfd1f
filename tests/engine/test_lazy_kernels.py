"""On a platform whose kernels are compiled at their first call, the first request finds them compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mvllm import LLM, SamplingParams
from mvllm.ops.all_schemas import SCHEMAS
from mvllm.plugin_api import Capabilities, OpProvider
from mvllm_cpu.platform import CPUPlatform
from tests.helpers.model_zoo import make_checkpoint

FIRST_REQUESTS = [
    SamplingParams(max_tokens=3, temperature=0, ignore_eos=True),
    SamplingParams(max_tokens=3, temperature=0.7, seed=1, ignore_eos=True),
    SamplingParams(max_tokens=3, temperature=0.7, top_k=5, top_p=0.9, seed=1, ignore_eos=True),
    SamplingParams(max_tokens=3, temperature=1.0, min_p=0.1, presence_penalty=0.5, logprobs=2, ignore_eos=True),
]
LENGTHS = (1, 5, 20, 60)


class Kernels:
    """Operations that are compiled like Triton's kernels: for the dtypes of arguments and for sizes of one."""

    def __init__(self) -> None:
        self.compiled: set[tuple[Any, ...]] = set()

    def providers(self) -> Sequence[OpProvider]:
        return [OpProvider(op, "lazy", self._lazy(op, SCHEMAS[op].reference), lambda case: []) for op in SCHEMAS]

    def _lazy(self, op: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
            self.compiled.add((op, *((t.dtype, tuple(size == 1 for size in t.shape)) for t in tensors)))
            return function(*arguments)

        return call


@pytest.mark.parametrize("declared", [True, False])
def test_the_first_request_compiles_no_kernel(declared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, usual = Kernels(), CPUPlatform().capabilities

    def capabilities(self: CPUPlatform) -> Capabilities:
        return replace(usual, lazy_kernels=declared)

    monkeypatch.setattr(CPUPlatform, "capabilities", property(capabilities))
    monkeypatch.setattr(CPUPlatform, "ops", lambda self: kernels.providers())
    folder = make_checkpoint("qwen3", tmp_path)
    with LLM(str(folder), dtype="float32", max_model_len=80, max_num_seqs=1, enforce_eager=True) as llm:
        at_start = set(kernels.compiled)
        for length, params in zip(LENGTHS, FIRST_REQUESTS, strict=True):
            llm.generate([{"prompt_token_ids": list(range(3, 3 + length))}], params, use_tqdm=False)
    assert {"argmax", "rms_norm", "rotary_embedding", "filtered_draw"} <= {key[0] for key in kernels.compiled}
    assert (kernels.compiled == at_start) is declared
