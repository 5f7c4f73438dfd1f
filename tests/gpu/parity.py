"""Compares every model family with transformers.

float32: the same greedy tokens, log-probabilities within 1e-4; the comparison of `tests.helpers.parity`.
bfloat16, float16: the engine's own greedy tokens are given to transformers, which computes in float32 with weights
rounded to that dtype. Each token must be within a tolerance of its largest logit, and its log-probability within
another; these are the conformance suite's (docs/how-to/conformance.md). Of models with experts, 95 % of the tokens
must: where a router is near a tie, rounding chooses another expert, and what follows is another answer of equal right.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tests.gpu.result_log import FAILED, OK, ResultLog, Row
from tests.gpu.settings import Item, Settings

if TYPE_CHECKING:
    from mvllm import RequestOutput

TOLERANCES = {"float16": (0.1, 0.06), "bfloat16": (0.6, 0.4)}
"""Of a token's logit below the largest, and of its log-probability."""
QUICK = ("llama-gqa",)
WITH_EXPERTS = 0.95  # share of the tokens that must be within the tolerances
NUM_TOKENS = 32
SIDE_BY_SIDE = 8  # processes: nothing is timed, and each compiles kernels
WHICH = (0, 1, 3, 5, 7, 10, 12, 15)  # prompts: short, long, at the edges of blocks
QUICK_WHICH = (0, 7)


def items(settings: Settings) -> list[Item]:
    """Checkpoints of the zoo, one of each family first, in three dtypes each."""
    names = QUICK if settings.quick else _names()
    dtypes = ("float32", "bfloat16") if settings.quick else ("float32", "bfloat16", "float16")
    first = {name.split("-")[0]: name for name in reversed(names)}
    ordered = [name for name in names if name in first.values()] + [
        name for name in names if name not in first.values()
    ]
    return [Item(f"{name}:{dtype}", 5, 180) for name in ordered for dtype in dtypes]


def run(item: str, settings: Settings, result_log: ResultLog) -> None:
    """One checkpoint in one dtype."""
    from tests.gpu.zoo import zoo_checkpoint

    name, _, dtype = item.partition(":")
    folder = zoo_checkpoint(name, settings)
    which = QUICK_WHICH if settings.quick else WHICH
    if dtype == "float32":
        note = _exact(name, folder, which, settings)
        result_log.add(Row("parity", item, item, OK, {"prompts": len(which), "tokens_each": NUM_TOKENS}, note))
    else:
        _within_tolerance(item, name, folder, dtype, which, settings, result_log)


def _exact(name: str, folder: Path, which: tuple[int, ...], settings: Settings) -> str:
    from tests.helpers import parity
    from tests.helpers.model_zoo import ZOO

    remembers = ZOO[name].max_prompt_len < parity.MAX_LEN
    expected = parity.oracle_of(folder, parity.prompts_of(name, which), NUM_TOKENS, remembers=remembers)
    with parity.engine(folder, platform=settings.platform) as llm:
        parity.check(expected, parity.generate(llm, expected.prompts, max_tokens=NUM_TOKENS))
        # Once more: prefixes are in the cache now, and the decode steps have been captured.
        parity.check(expected, parity.generate(llm, expected.prompts, max_tokens=NUM_TOKENS))
    return f"tokens equal, log-probabilities within {parity.LOGPROB_TOLERANCE:g}"


def _within_tolerance(
    item: str, name: str, folder: Path, dtype: str, which: tuple[int, ...], settings: Settings, result_log: ResultLog
) -> None:
    from tests.helpers import parity
    from tests.helpers.zoo_moe import SPARSE

    prompts = parity.prompts_of(name, which)
    with parity.engine(folder, platform=settings.platform, dtype=dtype) as llm:
        outputs = parity.generate(llm, prompts, max_tokens=NUM_TOKENS)
    below, off = distances(folder, dtype, prompts, outputs)
    most_below, most_off = TOLERANCES[dtype]
    within = sum(b <= most_below and o <= most_off for b, o in zip(below, off, strict=True)) / len(below)
    needed = WITH_EXPERTS if name in SPARSE else 1.0
    figures = {"logit_below_largest": max(below), "logprob_off": max(off), "within": within, "tokens": len(below)}
    note = f"permitted: {most_below:g} and {most_off:g}, for {needed:.0%} of the tokens"
    result_log.add(Row("parity", item, item, OK if within >= needed else FAILED, figures, note))


def distances(
    folder: Path, dtype: str, prompts: list[list[int]], outputs: list[RequestOutput]
) -> tuple[list[float], list[float]]:
    """How far each of the outputs' tokens is below the largest logit, and its log-probability off."""
    import torch

    from mvllm.ops.dtypes import torch_dtype
    from tests.helpers.model_zoo import load_reference

    model = load_reference(folder, torch_dtype(dtype)).float()
    below: list[float] = []
    off: list[float] = []
    for prompt, output in zip(prompts, outputs, strict=True):
        found = output.outputs[0]
        tokens = list(found.token_ids)
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :].float()
        chosen = torch.tensor(tokens)
        at = logits.gather(1, chosen[:, None])[:, 0]
        below += (logits.max(1).values - at).tolist()
        reference = torch.log_softmax(logits, dim=-1)
        assert found.logprobs is not None
        for position, entries in enumerate(found.logprobs):
            off.append(abs(entries[tokens[position]].logprob - float(reference[position, tokens[position]])))
    return below, off


def _names() -> Sequence[str]:
    from tests.helpers.model_zoo import ZOO

    return [name for name, entry in ZOO.items() if not entry.exhaustive]
