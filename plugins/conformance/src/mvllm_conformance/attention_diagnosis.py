"""Diagnosis of wrong attention results: the position of the largest error, and common mistakes that explain it.

Each mistake is an AttentionVariant of the case: a window of another size, another assignment of heads, blocks off by
one. A mistake whose exact result matches the backend's within the tolerance is named in the message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from mvllm_conformance.attention_cases import AttentionVariant, Case, expected, tolerance

_MOST_SCORES = 1 << 22
"""Pairs of queries and keys up to which mistakes are looked for: each of them computes the whole case again."""


def assert_near(found: torch.Tensor, case: Case, again: Callable[[], torch.Tensor] | None = None) -> None:
    """Fails if the result of a step differs from exact attention.

    Args:
        found: [T, num_heads * value_size], on the host.
        case: The case that was run.
        again: Runs the case with contiguous queries, to tell whether their strides were ignored.

    Raises:
        AssertionError: Names the worst request, position and head, and the mistakes that explain the result.
    """
    spec = case.spec
    shape, dtype = (case.layout.num_tokens, spec.num_heads * spec.value_size), f"torch.{spec.dtype}"
    assert found.shape == shape, f"forward returned {tuple(found.shape)}, not {shape}"
    assert str(found.dtype) == dtype, f"forward returned {found.dtype}, not {dtype}"
    message = difference(found[: case.num_real_tokens].double(), case)
    if message is not None and again is not None and difference(again()[: case.num_real_tokens].double(), case) is None:
        message += " With contiguous queries the result is right: forward ignores their strides, which are those of a "
        message += "view of a fused projection."
    assert message is None, message


def difference(real: torch.Tensor, case: Case) -> str | None:
    """Describes the error of a result; None if it is correct.

    Args:
        real: float64 [real tokens, num_heads * value_size].
    """
    spec, exact = case.spec, expected(case)
    allowed = tolerance(spec.dtype, spec.kv_dtype)
    heads = (len(real), spec.num_heads, spec.value_size)
    off = torch.where(torch.isfinite(real), (real - exact).abs(), torch.inf).view(heads).amax(dim=-1)
    worst = float(off.max())
    if worst < allowed:
        return None
    token, head = divmod(int(off.argmax()), spec.num_heads)
    size = f"off by {worst:.2g}" if worst < torch.inf else "not finite"
    bad = off >= allowed
    requests = sorted({_request_of(case, t)[0] for t in bad.any(dim=1).nonzero().flatten().tolist()})
    shares = f"{int(bad.sum())} of {bad.numel()} results, in requests {_listed(requests)}"
    text = f"{size}, allowed {allowed:.2g}; worst at {_place(case, token, head)}. Wrong: {shares}."
    if sum(new * (before + new) for before, new in case.requests) > _MOST_SCORES:
        return text
    fitting = [name for name, variant in mistakes(case) if _fits(real, case, variant, allowed)]
    if fitting:
        return f"{text} The result equals that of attention with {'; or with '.join(fitting)}."
    if (scale := _fitting_scale(real, case, allowed)) is not None:
        return f"{text} The result equals that of attention with a scale of {scale:.4g}, not {spec.scale:.4g}."
    return text


def _fitting_scale(real: torch.Tensor, case: Case, allowed: float) -> float | None:
    """The scale that explains the result; None if none does."""

    def error(exponent: float) -> float:
        scale = case.spec.scale * 2.0**exponent
        return float((real - expected(case, AttentionVariant(spec=replace(case.spec, scale=scale)))).abs().max())

    if not torch.isfinite(real).all():
        return None
    step = 0.5
    best = min((step * i for i in range(-10, 11)), key=error)
    while step > 1e-5:
        step /= 2
        best = min((best - step, best, best + step), key=error)
    return case.spec.scale * 2.0**best if error(best) < allowed else None


def mistakes(case: Case) -> Iterator[tuple[str, AttentionVariant]]:
    """Common mistakes: description and variant."""
    spec, size = case.spec, case.layout.block_size
    window = spec.sliding_window
    if window is not None:
        for other in (window + 1, window - 1):
            if other > 0:
                yield (
                    f"a sliding window of {other}, not {window}",
                    AttentionVariant(spec=replace(spec, sliding_window=other)),
                )
        yield "no sliding window", AttentionVariant(spec=replace(spec, sliding_window=None))
    if case.visible_lens is not None:
        yield "causal spans", AttentionVariant(without_spans=True)
        if window is not None:
            yield "no sliding window for the tokens of spans", AttentionVariant(spans_without_window=True)
    yield "one future token visible to each query", AttentionVariant(future=1)
    yield "the query's own position hidden", AttentionVariant(future=-1)
    yield "no causal mask", AttentionVariant(future=1 << 30)
    if 1 < spec.num_kv_heads < spec.num_heads:
        yield (
            "key/value head `h % num_kv_heads` for query head h, not `h // group`",
            AttentionVariant(heads_in_turn=True),
        )
    yield "each block read in place of the previous one", AttentionVariant(shift=-size)
    yield "each block read in place of the next one", AttentionVariant(shift=size)
    yield "only the tokens of this step visible", AttentionVariant(only_new=True)
    yield "a scale of 1", AttentionVariant(spec=replace(spec, scale=1.0))
    yield "the scale applied twice", AttentionVariant(spec=replace(spec, scale=spec.scale**2))
    if spec.soft_cap is not None:
        yield "no soft cap", AttentionVariant(spec=replace(spec, soft_cap=None))
    if case.sinks is not None:
        yield "no sinks", AttentionVariant(without_sinks=True)


def _fits(real: torch.Tensor, case: Case, variant: AttentionVariant, allowed: float) -> bool:
    wrong = expected(case, variant)
    same = (real - wrong).abs() < allowed
    return bool((same | (torch.isnan(real) & torch.isnan(wrong))).all())


def _request_of(case: Case, token: int) -> tuple[int, int]:
    """The request of a token of the step, and the token's position in it."""
    for request, (before, new) in enumerate(case.requests):
        if token < new:
            return request, before + token
        token -= new
    raise AssertionError("the token is padding")


def _place(case: Case, token: int, head: int) -> str:
    request, position = _request_of(case, token)
    before, new = case.requests[request]
    kv_head = head // (case.spec.num_heads // case.spec.num_kv_heads)
    return (
        f"request {request} ({before} tokens before this step, {new} in it), position {position} (block "
        f"{position // case.layout.block_size} of its table, offset {position % case.layout.block_size}), head {head} "
        f"(key/value head {kv_head})"
    )


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
