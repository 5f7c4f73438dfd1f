"""GPU test: compares the outputs of every model family with transformers.

float32: greedy tokens must be equal and log-probabilities within 1e-4 (`tests.helpers.parity`).
bfloat16, float16: the engine's greedy tokens are scored by transformers in float32, with weights rounded to that dtype.
Each token's gap to the largest logit and its log-probability error must be within TOLERANCES, those of the conformance
suite (docs/how-to/conformance.md). For MoE models, 95 % of the tokens must be within them: where router logits are
nearly equal, rounding can select another expert, and the tokens after that differ without being wrong.
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
"""Per dtype: the largest gap between a token's logit and the largest logit, the largest log-probability error."""
FIRST_OF_FAMILY = "first of its family"
"""The kind of the items of the first checkpoint of each family."""
QUICK = ("llama-gqa",)
WITH_EXPERTS = 0.95  # share of the tokens that must be within the tolerances
NUM_TOKENS = 32
SIDE_BY_SIDE = 8  # processes: nothing is timed, and each compiles kernels
WHICH = (0, 1, 3, 5, 7, 10, 12, 15)  # prompts: short, long, at the edges of blocks
QUICK_WHICH = (0, 7)


def items(settings: Settings) -> list[Item]:
    """Test items (checkpoint and dtype), ordered so that one checkpoint of each family comes first."""
    names = QUICK if settings.quick else _names()
    dtypes = ("float32", "bfloat16") if settings.quick else ("float32", "bfloat16", "float16")
    first = {name.split("-")[0]: name for name in reversed(names)}
    ordered = [name for name in names if name in first.values()] + [
        name for name in names if name not in first.values()
    ]
    return [
        Item(f"{name}:{dtype}", 5, 180, kind=FIRST_OF_FAMILY if name in first.values() else "")
        for name in ordered
        for dtype in dtypes
    ]


def run(item: str, settings: Settings, result_log: ResultLog) -> None:
    """Compares one checkpoint in one dtype with transformers and logs the result."""
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
        # Second run: prompts hit the prefix cache, and decode steps replay captured graphs.
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
    gaps, errors = distances(folder, dtype, prompts, outputs)
    max_gap, max_error = TOLERANCES[dtype]
    within = sum(g <= max_gap and e <= max_error for g, e in zip(gaps, errors, strict=True)) / len(gaps)
    needed = WITH_EXPERTS if name in SPARSE else 1.0
    metrics = {"logit_below_largest": max(gaps), "logprob_off": max(errors), "within": within, "tokens": len(gaps)}
    note = f"tolerances: logit gap {max_gap:g}, log-probability {max_error:g}; for {needed:.0%} of the tokens"
    result_log.add(Row("parity", item, item, OK if within >= needed else FAILED, metrics, note))


def distances(
    folder: Path, dtype: str, prompts: list[list[int]], outputs: list[RequestOutput]
) -> tuple[list[float], list[float]]:
    """For each output token: the gap between its logit and the largest, and the error of its log-probability."""
    import torch

    from mvllm.ops.dtypes import torch_dtype
    from tests.helpers.model_zoo import load_reference

    model = load_reference(folder, torch_dtype(dtype)).float()
    logit_gaps: list[float] = []
    logprob_errors: list[float] = []
    for prompt, output in zip(prompts, outputs, strict=True):
        found = output.outputs[0]
        tokens = list(found.token_ids)
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :].float()
        chosen = torch.tensor(tokens)
        token_logits = logits.gather(1, chosen[:, None])[:, 0]
        logit_gaps += (logits.max(1).values - token_logits).tolist()
        reference = torch.log_softmax(logits, dim=-1)
        assert found.logprobs is not None
        for position, entries in enumerate(found.logprobs):
            logprob_errors.append(abs(entries[tokens[position]].logprob - float(reference[position, tokens[position]])))
    return logit_gaps, logprob_errors


def _names() -> Sequence[str]:
    from tests.helpers.model_zoo import ZOO

    return [name for name, entry in ZOO.items() if not entry.exhaustive]
