"""Index scores, the selection of positions, and attention over them in the reference backend."""

from __future__ import annotations

import pytest
import torch

from mvllm.attention.reference import ReferenceAttention
from mvllm.attention.selection import best_positions, index_scores
from mvllm.errors import PlatformError
from mvllm.platform.attention import AttentionBackend
from mvllm.platform.checked_calls import checked_attention_backend
from tests.unit.attention.specs import make_spec
from tests.unit.worker.fake_platform import FakePlatform

SPARSE = {"value_head_size": 16, "values_in_keys": True, "index_topk": 4}


def test_a_score_is_the_weighted_sum_of_positive_products() -> None:
    query = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    keys = torch.tensor([[2.0, -3.0], [-2.0, 4.0], [1.0, 1.0]])
    found = index_scores(query, torch.tensor([[3.0, -1.0]]), keys, scale=0.5)
    assert found.tolist() == [[3.0, -2.0, 1.0]]


def test_of_equal_scores_the_earlier_positions_are_selected() -> None:
    scores = torch.tensor([[0.0, 1.0, -0.0, 0.0, 1.0, -1.0, 0.0]])
    assert best_positions(scores, 6, 4).tolist() == [[1, 4, 0, 2]]
    assert best_positions(scores, 6, 6).tolist() == [[1, 4, 0, 2, 3, 6]]


def test_scores_of_every_sign_and_size_keep_their_order() -> None:
    scores = torch.tensor([[-1e30, -1.0, -1e-30, 0.0, 1e-30, 1.0, 1e30, -3.0]])
    assert best_positions(scores, 7, 8).tolist() == [[6, 5, 4, 3, 2, 1, 7, 0]]


def test_only_visible_positions_are_selected_and_the_rest_of_a_row_is_empty() -> None:
    scores = torch.arange(20.0).expand(5, 20)
    assert best_positions(scores[:, :5], 0, 3).tolist() == [[0, -1, -1], [1, 0, -1], [2, 1, 0], [3, 2, 1], [4, 3, 2]]
    assert best_positions(scores[:2, :3], 1, 9).tolist() == [[1, 0, -1], [2, 1, 0]]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"indexer": True}, "an indexer has no index_topk"),
        ({**SPARSE, "index_topk": 0}, "0 positions are selected"),
        ({"index_topk": 4}, "one key/value head with the values in its keys"),
        ({**SPARSE, "sliding_window": 5}, "no sliding window"),
        ({**SPARSE, "sinks": True}, "no sinks"),
    ],
)
def test_impossible_specs_are_refused_with_the_reason(fields, reason: str) -> None:
    assert any(reason in found for found in ReferenceAttention.validate(make_spec(4, 1, 16, **fields)))


def test_a_backend_without_the_methods_says_what_to_implement() -> None:
    backend = ReferenceAttention(make_spec(4, 1, 16, **SPARSE))
    with pytest.raises(PlatformError, match=r"Implement ReferenceAttention\.select, .* Capabilities.sparse_attention"):
        AttentionBackend.select(backend, torch.empty(0), torch.empty(0), None, None)
    with pytest.raises(PlatformError, match=r"Implement ReferenceAttention\.forward_selected"):
        AttentionBackend.forward_selected(backend, torch.empty(0), None, None, torch.empty(0))


def test_a_platform_that_does_not_claim_it_is_given_no_such_spec() -> None:
    with pytest.raises(PlatformError, match=r"'acme' does not support\. Set max_model_len to at most 4, or"):
        checked_attention_backend(FakePlatform(), make_spec(4, 1, 16, **SPARSE))
