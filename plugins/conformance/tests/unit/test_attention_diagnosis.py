"""Diagnosis of wrong attention results: the worst position and the mistake that explains it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mvllm_conformance.attention_cases import AttentionVariant, expected, make_case, make_spec
from mvllm_conformance.attention_diagnosis import assert_near, mistakes
from mvllm_conformance.tensor_assertions import assert_close, assert_equal

REQUESTS = [(50, 1), (0, 17), (40, 30)]


def case_of(**fields):
    return make_case(make_spec(4, 2, 16, **fields), REQUESTS, block_size=16)


def error_message(case, found):
    with pytest.raises(AssertionError) as caught:
        assert_near(found.float(), case)
    return str(caught.value)


@pytest.fixture(autouse=True)
def one_thread():
    """Uses one thread, which is faster for small tensors on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_each_mistake_is_identified():
    case = case_of(sliding_window=9, soft_cap=2.0, sinks=True)
    for name, variant in mistakes(case):
        assert f"The result equals that of attention with {name}." in error_message(case, expected(case, variant))


def test_a_result_that_no_mistake_explains_names_the_worst_request_position_and_head():
    case = case_of()
    found = expected(case)
    found[1 + 17 + 4, 3 * 16 + 5] += 2.5  # the fifth token of the third request, in the last head
    text = error_message(case, found)
    assert text.startswith("off by 2.5, allowed 5e-05; worst at request 2 (40 tokens before this step, 30 in it), ")
    assert "position 44 (block 2 of its table, offset 12), head 3 (key/value head 1)" in text
    assert "Wrong: 1 of 192 results, in requests 2." in text and "equals that" not in text


@pytest.mark.parametrize("factor", [1.1, 0.5, 1.4427])
def test_a_wrong_scale_is_named(factor):
    case = case_of()
    wrong = AttentionVariant(spec=replace(case.spec, scale=case.spec.scale * factor))
    text = error_message(case, expected(case, wrong))
    assert f"attention with a scale of {case.spec.scale * factor:.3g}"[:-1] in text
    assert text.endswith(f"not {case.spec.scale:.4g}.")


def test_ignored_strides_are_named():
    case = case_of()
    right, wrong = expected(case).float(), expected(case).roll(1, 0).float()
    with pytest.raises(AssertionError, match="forward ignores their strides"):
        assert_near(wrong, case, lambda: right)
    with pytest.raises(AssertionError) as caught:
        assert_near(wrong, case, lambda: wrong)
    assert "strides" not in str(caught.value)


def test_non_finite_values_are_the_worst():
    case = case_of()
    found = expected(case)
    found[0] += 1
    found[3, 0] = torch.nan
    text = error_message(case, found)
    assert (
        text.startswith("not finite, allowed") and "request 1 (0 tokens before" in text and "in requests 0, 1" in text
    )


def test_the_correct_result_passes_and_another_shape_or_dtype_does_not():
    case = case_of()
    assert_near(expected(case).float(), case)
    assert "returned (48, 32), not (48, 64)" in error_message(case, expected(case)[:, :32])
    with pytest.raises(AssertionError, match=r"torch.float64, not torch.float32"):
        assert_near(expected(case), case)


def test_mistakes_apply_to_the_spec():
    assert not any("window" in name for name, _ in mistakes(case_of()))
    assert not any(
        "num_kv_heads" in name for name, _ in mistakes(make_case(make_spec(2, 2, 16), REQUESTS, block_size=16))
    )
    wider = AttentionVariant(spec=replace(make_spec(4, 2, 16), sliding_window=3))
    assert not torch.equal(expected(case_of(), wider), expected(case_of()))


def test_differing_tensors_are_reported_with_the_index():
    wanted = torch.zeros(2, 3)
    found = wanted.clone()
    found[1, 2] = 4.0
    with pytest.raises(AssertionError, match=r"rows: 4.0 at \[1, 2\], 0.0 expected; 1 of 6 elements differ"):
        assert_equal(found, wanted, "rows")
    with pytest.raises(AssertionError, match=r"rows: 4 at \[1, 2\], 0 expected \(allowed difference 0.5\); 1 of 6"):
        assert_close(found, wanted, 0.5, "rows")
    with pytest.raises(AssertionError, match=r"dtype is torch.int64, expected torch.float32"):
        assert_equal(found.long(), wanted, "rows")
    found[0, 0] = torch.nan
    with pytest.raises(AssertionError, match=r"nan at \[0, 0\]"):
        assert_close(found, wanted, 5.0, "rows")
    assert_close(wanted, wanted, torch.full((2, 3), 1e-9), "rows")
