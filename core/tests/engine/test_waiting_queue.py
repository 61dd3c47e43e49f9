from __future__ import annotations

from fourfold.engine.request import Request, Status
from fourfold.engine.waiting_queue import WaitingQueue
from fourfold.messages import AddRequest
from fourfold.sampling_params import SamplingParams


def _request(*order: float) -> Request:
    add = AddRequest(request_id=str(order), client=0, prompt_token_ids=[1], sampling=SamplingParams())
    request = Request(add, max_total=2)
    request.order = order
    return request


def test_requests_come_out_in_order() -> None:
    queue = WaitingQueue()
    requests = [_request(number) for number in (3, 1, 2)]
    for request in requests:
        queue.push(request)
    found = []
    while (first := queue.first()) is not None:
        found.append(first.order[0])
        queue.pop()
    assert found == [1, 2, 3]
    assert len(queue) == 0


def test_withdrawn_requests_are_passed_over_and_not_counted() -> None:
    queue = WaitingQueue()
    requests = [_request(number) for number in range(3)]
    for request in requests:
        queue.push(request)
    requests[0].status = Status.FINISHED
    queue.withdraw()
    assert len(queue) == 2
    assert queue.first() is requests[1]


def test_withdrawn_requests_do_not_pile_up_behind_the_first() -> None:
    queue = WaitingQueue()
    first = _request(0)
    queue.push(first)
    for number in range(1, 2000):
        request = _request(number)
        queue.push(request)
        request.status = Status.FINISHED
        queue.withdraw()
    assert len(queue._heap) < 100
    assert len(queue) == 1
    assert queue.first() is first
