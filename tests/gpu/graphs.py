"""Runs one model with different settings of graphs and scheduling and compares the greedy tokens.

Steps replayed or not, planned ahead or not, the platform's attention or core's in plain torch, and what `--also` names.
In float32 tokens must be equal. In bfloat16 another way may round otherwise: there the row says how many of the
sequences are equal, and fails only where tokens are further below transformers' largest logit than parity permits.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.gpu.result_log import FAILED, OK, ResultLog, Row
from tests.gpu.settings import Item, Settings

KINDS = ("llama-gqa", "qwen3moe", "qwen3next", "deepseek2")
"""Dense, with experts, hybrid (recurrent states beside attention), and MLA."""
MODELS = (*KINDS, "mistral-window")
NUM_TOKENS = 48
SIDE_BY_SIDE = 6  # processes: nothing is timed, and each compiles kernels
QUICK_NUM_TOKENS = 12

WAYS: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True, "async_scheduling": False},
    "eager, ahead": {"enforce_eager": True, "async_scheduling": True},
    "captured": {"async_scheduling": False},
    "captured, ahead": {"async_scheduling": True},
    "captured, chunks of prompts": {"async_scheduling": True, "max_num_batched_tokens": 32},
    "captured, draft tokens": {
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    },
}
PLAIN_ATTENTION = "eager, attention in plain torch"


def items(settings: Settings) -> list[Item]:
    """Each model in both dtypes, in all ways."""
    if settings.quick:
        return [Item(f"{model}:float32", 15, 240) for model in KINDS] + [Item(f"{KINDS[0]}:bfloat16", 15, 240)]
    return [Item(f"{model}:{dtype}", 15, 240) for model in MODELS for dtype in ("float32", "bfloat16")]


def run(item: str, settings: Settings, result_log: ResultLog) -> None:
    """One model in one dtype."""
    from tests.gpu import parity
    from tests.gpu.zoo import zoo_checkpoint
    from tests.helpers.parity import prompts_of
    from tests.helpers.zoo_moe import SPARSE

    name, _, dtype = item.partition(":")
    folder = zoo_checkpoint(name, settings)
    prompts = prompts_of(name, parity.QUICK_WHICH if settings.quick else None)
    baseline: list[list[int]] | None = None
    for way in [*WAYS, PLAIN_ATTENTION, *settings.also]:
        try:
            outputs = _generate(way, folder, dtype, prompts, settings)
        except Exception as e:
            result_log.add(Row("graphs", item, f"{item}, {way}", FAILED, note=f"{type(e).__name__}: {e}"))
            continue
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        baseline = tokens if baseline is None else baseline
        equal = sum(mine == theirs for mine, theirs in zip(tokens, baseline, strict=True))
        figures: dict[str, float | int] = {"sequences": len(tokens), "equal": equal}
        fine = equal == len(tokens)
        if not fine and dtype != "float32":
            below = parity.distances(folder, dtype, prompts, outputs)[0]
            figures["within"] = sum(b <= parity.TOLERANCES[dtype][0] for b in below) / len(below)
            fine = figures["within"] >= (parity.WITH_EXPERTS if name in SPARSE else 1.0)
        note = "what others are compared with" if tokens is baseline else ""
        result_log.add(Row("graphs", item, f"{item}, {way}", OK if fine else FAILED, figures, note))


def _generate(way: str, folder: Path, dtype: str, prompts: list[list[int]], settings: Settings) -> list[Any]:
    from tests.helpers import parity

    choices, variables, plain = WAYS.get(way), {}, way == PLAIN_ATTENTION
    if choices is None:
        choices = {"enforce_eager": plain}
        if not plain:
            name, _, value = way.partition("=")
            variables = {name: value}
    num_tokens = QUICK_NUM_TOKENS if settings.quick else NUM_TOKENS
    with _environment(variables), _plain_attention(settings.platform) if plain else contextlib.nullcontext():
        with parity.engine(folder, platform=settings.platform, dtype=dtype, **choices) as llm:
            parity.generate(llm, prompts[:2], max_tokens=4)  # what is captured late is captured now
            assert llm.reset_prefix_cache()
            return parity.generate(llm, prompts, max_tokens=num_tokens)


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _plain_attention(platform: str) -> Iterator[None]:
    """The platform's class answers with core's attention, for engines whose worker is in this process."""
    from mvllm.platform.choose import choose_platform
    from mvllm.plugin_api import ReferenceAttention

    cls = type(choose_platform(platform).platform)
    own = cls.__dict__.get("attention_backend")
    setattr(cls, "attention_backend", lambda self, spec: ReferenceAttention(spec))  # noqa: B010
    try:
        yield
    finally:
        if own is None:
            del cls.attention_backend
        else:
            setattr(cls, "attention_backend", own)  # noqa: B010
