"""Whether the lists of a scheduler agree with what its requests say and hold."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from mvllm.scheduler.request import Request, RequestStatus

_BLOCKED_STATUSES = (RequestStatus.WAITING_FOR_TOKEN, RequestStatus.WAITING_FOR_GRAMMAR)


def check_requests(
    requests: Collection[Request],
    *,
    running: Sequence[Request],
    waiting: Sequence[Request],
    blocked: Sequence[Request],
    num_used_blocks: int,
) -> None:
    """Raises AssertionError unless every request is where its status says and holds what it should.

    Args:
        requests: All that are not finished.
        running: In service order.
        waiting: In any order.
        blocked: Those that wait for something other than their turn, in any order.
        num_used_blocks: Blocks that are not free.
    """
    listed = [*running, *waiting, *blocked]
    assert len(listed) == len(set(listed)), "A request is listed twice"
    assert set(listed) == set(requests), "The lists and the requests known differ"
    assert list(running) == sorted(running), "The running requests are out of order"
    places = ((running, (RequestStatus.RUNNING,)), (waiting, (RequestStatus.WAITING,)), (blocked, _BLOCKED_STATUSES))
    for here, status in places:
        for request in here:
            assert request.status in status, f"{request.request_id} is listed as {status}, says {request.status}"
            _check_request(request)
    num_held = len({block for request in running for block in request.table.held_blocks})
    assert num_held == num_used_blocks, "Blocks leaked"


def _check_request(request: Request) -> None:
    name, known = request.request_id, len(request.token_ids)
    assert request.num_computed_tokens <= request.table.num_slots, f"{name} computed tokens without a slot"
    assert request.num_computed_tokens < request.num_tokens, f"{name} has nothing to compute"
    assert known <= request.num_tokens <= request.max_num_tokens, f"{name}: {known} of {request.num_tokens} tokens"
    if request.status is not RequestStatus.RUNNING:
        assert not request.table.block_ids and request.row < 0 and not request.num_computed_tokens, f"{name} holds"
