"""The waiting queue."""

from hypothesis import given
from hypothesis import strategies as st

from mvllm.kv_cache.block_table import BlockTable
from mvllm.scheduler.request import Request
from mvllm.scheduler.request_queue import RequestQueue
from tests.unit.scheduler.builders import make_request


def waiting_request(*order: int) -> Request:
    data = make_request()
    return Request(data, BlockTable(list(data.prompt_token_ids), None, 0), order, 64)


@given(st.lists(st.integers(0, 3)), st.data())
def test_the_queue_is_sorted_and_any_request_can_be_removed(priorities, data):
    queue, model = RequestQueue(), []
    for number, priority in enumerate(priorities):
        request = waiting_request(priority, number)
        queue.push(request)
        model.append(request)
        model.sort(key=lambda r: r.order)
        match data.draw(st.sampled_from(["nothing", "pop", "remove"])):
            case "pop":
                assert queue.peek() is queue.pop() is model.pop(0)
            case "remove":
                queue.remove(model.pop(data.draw(st.integers(0, len(model) - 1))))
        assert len(queue) == len(model)
        assert set(queue) == set(model)
    assert [queue.pop() for _ in model] == model


def test_removed_requests_are_not_kept_in_memory():
    queue = RequestQueue()
    queue.push(waiting_request(0, 0))
    for number in range(1, 1000):
        request = waiting_request(0, number)
        queue.push(request)
        queue.remove(request)
    assert len(queue) == 1
    assert len(queue._heap) < 50
