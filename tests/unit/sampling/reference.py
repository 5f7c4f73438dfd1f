"""A slow float64 reference of sampling."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from mvllm.messages.sampling_params import SamplingParams


def distribution(
    logits: np.ndarray,
    params: SamplingParams,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    eos: Sequence[int] = (),
    allowed: np.ndarray | None = None,
) -> np.ndarray:
    """The probability of each token, float64 [vocab]."""
    scores = [float(x) for x in logits]
    ids = range(len(scores))
    if allowed is not None:
        scores = [s if allowed[i] else -math.inf for i, s in enumerate(scores)]
    if len(output) < params.min_tokens:
        ends = set(params.stop_token_ids or []) | (set() if params.ignore_eos else set(eos))
        scores = [-math.inf if i in ends else s for i, s in enumerate(scores)]
    for i in ids:
        if i in prompt or i in output:
            scores[i] *= params.repetition_penalty if scores[i] < 0 else 1 / params.repetition_penalty
        times = list(output).count(i)
        scores[i] -= params.frequency_penalty * times + params.presence_penalty * (times > 0)
    if params.temperature == 0 or params.top_k == 1:
        return np.eye(len(scores))[int(np.argmax(scores))]
    best = max(scores)
    probs = np.array([math.exp((s - best) / params.temperature) for s in scores])
    probs[probs < params.min_p * probs.max()] = 0
    if 0 < params.top_k < len(probs):
        probs[probs < np.sort(probs)[-params.top_k]] = 0
    if params.top_p < 1:
        probs /= probs.sum()
        falling = np.sort(probs)[::-1]
        last = int(np.searchsorted(np.cumsum(falling), params.top_p))
        probs[probs < falling[min(last, len(falling) - 1)]] = 0
    return probs / probs.sum()
