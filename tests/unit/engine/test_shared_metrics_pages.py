"""SharedMetricsPages: pages that all front ends can read, and sums over their metrics."""

from __future__ import annotations

import threading

import pytest

from mvllm.engine.metrics.shared_metrics_pages import PAGE_BYTES, SharedMetricsPages
from mvllm.engine.metrics.stats import PRIORITY_CLASSES, EngineMetrics


@pytest.fixture
def pages():
    pages = SharedMetricsPages.create(3)
    yield pages
    pages.close()


def test_pages_contain_the_written_metrics(pages):
    assert pages.read_others(0) == []
    pages.write(1, b"one")
    pages.write(2, b"two")
    pages.write(1, b"1")
    assert pages.read_others(0) == [b"1", b"two"] and pages.read_others(1) == [b"two"]
    with pytest.raises(ValueError, match="do not fit"):
        pages.write(0, bytes(PAGE_BYTES))


def test_a_partially_written_page_is_never_read(pages):
    seen, done = set(), threading.Event()

    def write():
        for index in range(2000):
            pages.write(1, bytes([index % 251]) * (50_000 if index % 2 else 70_000))
        done.set()

    thread = threading.Thread(target=write)
    thread.start()
    while not done.is_set():
        if data := pages.read(1):
            seen.add(len(set(data)))
    thread.join()
    assert seen <= {1}


def test_a_writer_that_died_while_writing_leaves_the_previous_contents(pages):
    pages.write(1, b"whole")
    assert pages.read(1) == b"whole"
    pages._map[PAGE_BYTES + 8] = ord("W")
    assert pages.read(1) == b"whole"


def test_metrics_of_several_front_ends_add_up():
    metrics = [EngineMetrics(1000) for _ in range(3)]
    for index, each in enumerate(metrics, 1):
        each.prompt_tokens += index
        each.finished["stop"] += index
        each.time_to_first_token.observe(0.003 * index)
        each._of_class("time_to_first_token", "high").observe(0.003 * index, index > 1)
    total = metrics[0].merged_with([each.snapshot() for each in metrics[1:]])
    assert total.prompt_tokens == 6 and total.finished == {"stop": 6}
    assert total.time_to_first_token.sum == pytest.approx(0.018)
    assert sum(total.time_to_first_token.counts) == 3 and len(total.time_to_first_token.counts) == 23
    by_priority = [sum(total.latency_of_class("time_to_first_token", each).counts) for each in PRIORITY_CLASSES]
    assert by_priority == [2, 1, 0]
    assert metrics[0].prompt_tokens == 1  # as it was
