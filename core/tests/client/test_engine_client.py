from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest
import zmq

from fourfold.balancers.least_work import LeastWork
from fourfold.client.engine_client import EngineClient
from fourfold.contracts.load_balancer import EngineState
from fourfold.engine.operations import sleep_calls
from fourfold.entries import LoadBalancerContext
from fourfold.errors import EngineError, ExecutorFailed, RequestError
from fourfold.messages import AddRequest, EngineOutputs, EngineReady, EngineStats, FinishReason, RequestOutput
from fourfold.process_messages import EngineDead, EngineDraining, EngineStarting
from fourfold.sampling_params import SamplingParams
from fourfold.testing.fake_engine import FakeEngine
from fourfold.testing.ready_engine import ready_engine

T = TypeVar("T")


@asynccontextmanager
async def started_client(run_directory: Path, num_engines: int = 1, **options: float) -> AsyncIterator[EngineClient]:
    balancer = LeastWork(LoadBalancerContext(num_engines=num_engines))
    client = EngineClient(run_directory, 0, num_engines, balancer, **options)
    await client.start()
    try:
        yield client
    finally:
        client.close()


async def until(condition: Callable[[], bool], what: str, *, timeout: float = 10.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout:g} s: {what}")
        await asyncio.sleep(0.002)


async def within(awaitable: Awaitable[T], timeout: float = 10.0) -> T:
    return await asyncio.wait_for(awaitable, timeout)


def request(name: str = "r", *, max_tokens: int = 4, num_prompt: int = 3) -> AddRequest:
    return AddRequest(
        request_id=name,
        client=0,
        prompt_token_ids=list(range(1, num_prompt + 1)),
        sampling=SamplingParams(max_tokens=max_tokens, seed=1),
    )


def count_up(added: AddRequest) -> Iterator[int]:
    return itertools.count(10)


async def ready(client: EngineClient) -> None:
    await until(lambda: all(state is EngineState.READY for state in client.engine_states), "all engines ready")


async def read(client: EngineClient, added: AddRequest) -> tuple[list[int], RequestOutput]:
    token_ids: list[int] = []
    async for output in client.submit(added):
        token_ids += output.token_ids
    return token_ids, output


def assert_no_load(client: EngineClient) -> None:
    assert client.num_requests == 0
    for link in client.links:
        assert (link.num_requests, link.num_tokens) == (0, 0)


def test_outputs_come_in_order_and_load_returns_to_zero(run_directory: Path) -> None:
    async def scenario() -> None:
        async with started_client(run_directory) as client:
            with FakeEngine(run_directory, count_up):
                await ready(client)
                token_ids, last = await within(read(client, request()))
                assert token_ids == [10, 11, 12, 13]
                assert last.finish_reason is FinishReason.LENGTH
                assert_no_load(client)
                await until(lambda: client.loads.num_tokens[0] == 0, "the engine's report of no load")

    asyncio.run(scenario())


def test_many_requests_with_aborts_leave_no_load(run_directory: Path) -> None:
    async def scenario() -> None:
        async with started_client(run_directory, num_engines=2) as client:
            with (
                FakeEngine(run_directory, count_up, engine=0, step_seconds=0.001),
                FakeEngine(run_directory, count_up, engine=1, step_seconds=0.001),
            ):
                await ready(client)

                async def use(index: int) -> None:
                    stream = client.submit(request(f"r{index}", max_tokens=1 + index % 7, num_prompt=1 + index % 5))
                    async for output in stream:
                        if index % 3 == 0 and output.finish_reason is None:
                            stream.close()

                await within(asyncio.gather(*(use(index) for index in range(300))))
                assert_no_load(client)

    asyncio.run(scenario())


def test_a_burst_before_the_first_report_is_spread(run_directory: Path) -> None:
    async def scenario() -> None:
        async with started_client(run_directory, num_engines=3) as client:
            for engine in range(3):
                client.mark_ready(notice(engine, 1))
            for index in range(10):
                client.open(request(f"r{index}"), lambda output: None)
            counts = sorted(link.num_requests for link in client.links)
            assert counts == [3, 3, 4]

    asyncio.run(scenario())


def test_an_abort_reaches_the_engine_and_silences_the_request(run_directory: Path) -> None:
    async def scenario() -> None:
        async with started_client(run_directory) as client:
            with FakeEngine(run_directory, count_up) as engine:
                await ready(client)
                heard: list[RequestOutput] = []
                client.open(request(max_tokens=100), heard.append)
                await until(lambda: len(heard) >= 3, "three outputs")
                client.abort(["r", "unknown"])
                count = len(heard)
                await until(lambda: engine.num_requests == 0, "the engine to drop the request")
                assert engine.aborted == ["r"]
                assert len(heard) == count
                assert_no_load(client)

    asyncio.run(scenario())


def test_no_ready_engine_is_a_503_that_says_so(run_directory: Path) -> None:
    async def scenario() -> None:
        async with started_client(run_directory) as client:
            with pytest.raises(RequestError, match="engine 0 is starting") as caught:
                client.submit(request())
            assert caught.value.status == 503

    asyncio.run(scenario())


def test_an_id_in_use_is_refused(run_directory: Path) -> None:
    async def scenario() -> None:
        async with started_client(run_directory) as client:
            client.mark_ready(notice(0, 1))
            client.submit(request())
            with pytest.raises(EngineError, match="'r' is in use"):
                client.submit(request())

    asyncio.run(scenario())


def test_a_dead_engine_ends_its_requests_and_calls_at_once(run_directory: Path) -> None:
    async def scenario() -> None:
        async with started_client(run_directory) as client:
            client.mark_ready(notice(0, 1))
            reader = asyncio.create_task(read(client, request()))
            call = asyncio.create_task(client.call_utility(0, "echo"))
            await until(lambda: client.num_requests == 1, "the request to be sent")
            client.mark_dead(0, "killed by signal 9")
            _, last = await within(reader)
            assert (last.finish_reason, last.error_status) == (FinishReason.ERROR, 503)
            assert "engine 0 failed: killed by signal 9" in str(last.error)
            with pytest.raises(ExecutorFailed, match="died during 'echo': killed by signal 9"):
                await within(call)
            with pytest.raises(ExecutorFailed, match="engine 0 is dead"):
                await client.call_utility(0, "echo")
            assert_no_load(client)

    asyncio.run(scenario())


def test_a_request_goes_on_elsewhere_when_its_engine_dies(run_directory: Path) -> None:
    async def scenario() -> None:
        async with started_client(run_directory, 2) as client:
            first = FakeEngine(run_directory, count_up)
            with first, FakeEngine(run_directory, count_up, engine=1) as second:
                await ready(client)
                heard: list[RequestOutput] = []
                client.open(request(max_tokens=50), heard.append, engine=0)
                await until(lambda: len(heard) >= 5, "five tokens")
                first.pause()
                client.hear(EngineDead(engine=0, incarnation=1, reason="killed"))
                await until(lambda: heard[-1].finish_reason is not None, "the end")
                (moved,) = second.added
                assert (moved.attempt, moved.output_token_ids) == (1, list(range(10, 10 + len(moved.output_token_ids))))
                assert len(moved.output_token_ids) >= 5
                assert [token for output in heard for token in output.token_ids] == list(range(10, 60))
                assert heard[-1].finish_reason is FinishReason.LENGTH
                assert_no_load(client)

    asyncio.run(scenario())


def test_a_request_waits_for_an_engine_when_all_are_gone(run_directory: Path) -> None:
    async def scenario() -> None:
        async with started_client(run_directory, 2) as client:
            client.mark_ready(notice(0, 1))
            heard: list[RequestOutput] = []
            client.open(request("moves"), heard.append)
            client.open(request("aborted"), heard.append)
            client.hear(EngineDead(engine=0, incarnation=1, reason="killed"))
            client.abort(["aborted"])
            with pytest.raises(RequestError, match="no engine is ready"):
                client.open(request("new"), heard.append)
            with FakeEngine(run_directory, count_up, engine=1) as engine:
                await until(lambda: bool(heard) and heard[-1].finish_reason is not None, "the end")
                assert [added.request_id for added in engine.added] == ["moves"]
            assert [token for output in heard for token in output.token_ids] == [10, 11, 12, 13]
            assert_no_load(client)

    asyncio.run(scenario())


def test_a_request_that_killed_two_engines_is_not_tried_again(run_directory: Path) -> None:
    async def scenario() -> None:
        async with started_client(run_directory, 3) as client:
            for engine in range(3):
                client.mark_ready(notice(engine, 1))
            heard: list[RequestOutput] = []
            client.open(request("poison"), heard.append, engine=0)
            client.hear(EngineDead(engine=0, incarnation=1, reason="killed"))
            holder = next(link.engine for link in client.links if link.num_requests)
            client.hear(EngineDead(engine=holder, incarnation=1, reason="killed"))
            (last,) = heard
            assert last.finish_reason is FinishReason.ERROR
            assert "another engine died with this request before" in str(last.error)
            assert_no_load(client)

    asyncio.run(scenario())


def test_an_engine_that_drains_gets_no_requests_and_a_planned_end_blames_none(run_directory: Path) -> None:
    async def scenario() -> None:
        async with started_client(run_directory, 2) as client:
            for engine in range(2):
                client.mark_ready(notice(engine, 1))
            heard: list[RequestOutput] = []
            client.open(request("r"), heard.append, engine=0)
            client.hear(EngineDraining(engine=0, incarnation=1))
            assert client.engine_states == [EngineState.DRAINING, EngineState.READY]
            for number in range(4):
                client.open(request(str(number)), heard.append)
            assert [link.num_requests for link in client.links] == [1, 4]
            with pytest.raises(RequestError, match="engine 0 is draining"):
                client.open(request("there"), heard.append, engine=0)
            # It still computes, with weights that an operation on the other one would take from both.
            with pytest.raises(RequestError, match="engine 0 is draining; try again when all are ready") as draining:
                await client.call_all([("discard_weights", {})], timeout=5)
            assert draining.value.status == 409
            for engine, incarnation in ((0, 1), (1, 1), (0, 2), (1, 2)):
                client.hear(EngineDead(engine=engine, incarnation=incarnation, reason="restart", planned=True))
                client.mark_ready(notice(engine, incarnation + 1))
            assert not heard
            assert sum(link.num_requests for link in client.links) == 5

    asyncio.run(scenario())


def test_engines_that_are_lost_with_their_node_blame_no_request(run_directory: Path) -> None:
    """One after the other, so that requests of the first go to the second, which is as dead."""

    async def scenario() -> None:
        async with started_client(run_directory, 3) as client:
            for engine in range(3):
                client.mark_ready(notice(engine, 1))
            heard: list[RequestOutput] = []
            for number in range(6):
                client.open(request(str(number)), heard.append)
            for engine in (1, 2):
                client.hear(EngineDead(engine=engine, incarnation=1, reason="node b is lost", with_node=True))
            assert not heard
            assert [link.num_requests for link in client.links] == [6, 0, 0]
            client.hear(EngineDead(engine=0, incarnation=1, reason="killed"))
            assert not heard, "the first engine that died of itself"

    asyncio.run(scenario())


def test_an_engine_that_says_it_failed_is_dead(run_directory: Path) -> None:
    async def scenario() -> None:
        async with started_client(run_directory) as client:
            with FakeEngine(run_directory, count_up) as engine:
                await ready(client)
                engine.pause()
                reader = asyncio.create_task(read(client, request()))
                await until(lambda: bool(engine.added), "the request to arrive")
                await asyncio.to_thread(engine.stop, "out of memory")
                _, last = await within(reader)
                assert "out of memory" in str(last.error)
                assert client.engine_states == [EngineState.DEAD]

    asyncio.run(scenario())


def test_messages_of_other_incarnations_are_dropped(run_directory: Path) -> None:
    async def scenario() -> None:
        async with started_client(run_directory) as client:
            client.mark_ready(notice(0, 1))
            client.mark_dead(0, "killed")
            client.set_incarnation(0, 2)
            client.mark_ready(notice(0, 1))
            assert client.engine_states == [EngineState.STARTING]
            client.mark_ready(notice(0, 2))
            assert client.engine_states == [EngineState.READY]
            heard: list[RequestOutput] = []
            client.open(request(), heard.append)
            with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
                socket.connect(f"ipc://{run_directory}/api-0")
                for incarnation in (1, 3, 2):
                    output = RequestOutput(request_id="r", token_ids=[incarnation])
                    await asyncio.to_thread(socket.send, outputs(incarnation, output))
                await until(lambda: bool(heard), "an output")
            assert [item.token_ids for item in heard] == [[2]]

    asyncio.run(scenario())


def test_a_restarted_engine_gets_nothing_that_was_meant_for_the_old_one(run_directory: Path) -> None:
    async def scenario() -> None:
        async with started_client(run_directory) as client:
            client.mark_ready(notice(0, 1))
            heard: list[RequestOutput] = []
            client.open(request("old"), heard.append)
            client.set_incarnation(0, 2)
            assert heard[0].finish_reason is FinishReason.ERROR
            with FakeEngine(run_directory, count_up, incarnation=2) as engine:
                await ready(client)
                await within(read(client, request("new")))
                assert [added.request_id for added in engine.added] == ["new"]

    asyncio.run(scenario())


def test_what_is_no_message_is_dropped(run_directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with started_client(run_directory) as client:
            with FakeEngine(run_directory, count_up):
                await ready(client)
                with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
                    socket.connect(f"ipc://{run_directory}/api-0")
                    await asyncio.to_thread(socket.send, b"\xc1")
                    await asyncio.to_thread(socket.send, msgspec.msgpack.encode(notice(7, 1)))
                    await until(lambda: len(caplog.records) >= 2, "two errors in the log")
                await within(read(client, request()))

    asyncio.run(scenario())
    assert "none of an engine's" in caplog.text
    assert "engine 7; there are 1" in caplog.text


def test_a_receiver_that_fails_hurts_no_other_request(run_directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with started_client(run_directory) as client:
            with FakeEngine(run_directory, count_up) as engine:
                await ready(client)

                def fail(output: RequestOutput) -> None:
                    raise ValueError("broken receiver")

                client.open(request("bad", max_tokens=1000), fail)
                token_ids, _ = await within(read(client, request("good")))
                assert token_ids == [10, 11, 12, 13]
                await until(lambda: engine.aborted == ["bad"], "the abort of the other")
                assert_no_load(client)

    asyncio.run(scenario())
    assert "broken receiver" in caplog.text


def test_utilities_are_answered_refused_and_have_a_deadline(run_directory: Path) -> None:
    async def scenario() -> None:
        async with started_client(run_directory, utility_timeout=0.2) as client:
            client.mark_ready(notice(0, 1))
            with pytest.raises(EngineError, match=r"no reply to 'echo' within 0\.2 s from engine 0"):
                await client.call_utility(0, "echo", value=1)
        async with started_client(run_directory) as client:
            with FakeEngine(run_directory, count_up):
                await ready(client)
                assert await within(client.call_utility(0, "echo", value=1)) == {"value": 1}
                with pytest.raises(EngineError, match="'other' failed on engine 0: no method called"):
                    await within(client.call_utility(0, "other"))

    asyncio.run(scenario())


def test_only_an_engine_with_requests_can_stall(run_directory: Path) -> None:
    async def scenario() -> None:
        async with started_client(run_directory) as client:
            with FakeEngine(run_directory, count_up) as engine:
                await ready(client)
                engine.pause()
                await asyncio.sleep(0.05)
                assert client.stalled(0.02) is None
                reader = asyncio.create_task(read(client, request()))
                await until(lambda: client.stalled(0.05) is not None, "a stall")
                assert "engine 0 has 1 requests and finished no step for 0." in str(client.stalled(0.05))
                engine.resume()
                await within(reader)
                assert client.stalled(0.0) is None

    asyncio.run(scenario())


def test_operations_are_made_in_step_on_all_engines(run_directory: Path) -> None:
    async def scenario() -> None:
        async with started_client(run_directory, num_engines=2) as client:
            with FakeEngine(run_directory, count_up) as first:
                await until(lambda: client.engine_states[0] is EngineState.READY, "engine 0 ready")
                with pytest.raises(RequestError, match="engine 1 is starting") as starting:
                    await client.call_all([("pause", {"mode": "keep"})], timeout=5)
                assert (starting.value.status, first.operations) == (409, [])
                with FakeEngine(run_directory, count_up, engine=1) as second:
                    await ready(client)
                    second.refusals["sleep"] = "not now"
                    with pytest.raises(RequestError, match="engine 1: not now") as refused:
                        await client.call_all(
                            [("pause", {"mode": "keep"}), ("sleep", {"level": 1}), ("wake_up", {})], timeout=5
                        )
                    assert refused.value.status == 400
                    # The next call comes when all have answered the one before, and not after a refusal.
                    assert first.operations == second.operations == sleep_calls(1)
                    assert client.engine_states == [EngineState.ASLEEP, EngineState.READY]
                    second.stop("boom")
                    await until(lambda: client.engine_states[1] is EngineState.DEAD, "engine 1 dead")
                await client.call_all([("wake_up", {})], timeout=5)  # who starts the dead one again tells it
                assert client.engine_states[0] is EngineState.READY
                client.mark_dead(0, "gone")
                with pytest.raises(RequestError, match="no engine is up"):
                    await client.call_all([("pause", {"mode": "keep"})], timeout=5)

    asyncio.run(scenario())


def test_an_engine_that_fails_again_and_again_holds_up_no_operation(run_directory: Path) -> None:
    async def scenario() -> None:
        async with started_client(run_directory, num_engines=2) as client:
            with FakeEngine(run_directory, count_up) as first:
                with FakeEngine(run_directory, count_up, engine=1) as second:
                    await ready(client)
                    second.stop("boom")
                    await until(lambda: client.engine_states[1] is EngineState.DEAD, "engine 1 dead")
                assert client.links[1].condition == "dead"
                assert (client.engines_missed(client.engines_up()), client.engines_up()) == ([1], {0: 1})
                client.hear(EngineStarting(engine=1, incarnation=2))
                with pytest.raises(RequestError, match="engine 1 is starting"):  # it may be there in a moment
                    client.engines_up()
                client.hear(EngineDead(engine=1, incarnation=2, reason="no such folder"))
                client.hear(EngineStarting(engine=1, incarnation=3))
                assert (client.links[1].condition, client.links[1].failure) == ("failing", "no such folder")
                engines = client.engines_up()
                await client.call_all([("pause", {"mode": "keep"})], timeout=5, engines=engines)
                assert (first.operations, client.engines_missed(engines)) == ([("pause", {"mode": "keep"})], [1])
                client.hear(EngineDead(engine=1, incarnation=3, reason="wished", planned=True))
                client.hear(EngineStarting(engine=1, incarnation=4))
                with FakeEngine(run_directory, count_up, engine=1, incarnation=4) as second:
                    await ready(client)
                    assert (client.links[1].condition, client.links[1].failure) == ("ready", "")
                    # It was not there when the operation began, and hears nothing of it half way.
                    await client.call_all([("wake_up", {})], timeout=5, engines=engines)
                    assert (second.operations, client.engines_missed(engines)) == ([], [1])

    asyncio.run(scenario())


def test_an_engine_that_sleeps_gets_no_requests_and_keeps_what_it_has(run_directory: Path) -> None:
    async def scenario() -> None:
        async with started_client(run_directory) as client:
            with FakeEngine(run_directory, count_up) as engine:
                await ready(client)
                engine.pause()
                reader = asyncio.create_task(read(client, request()))
                await until(lambda: bool(engine.added), "the request to arrive")
                await client.call_all([("sleep", {"level": 1})], timeout=5)
                with pytest.raises(RequestError, match="no engine is ready: engine 0 is asleep") as refused:
                    client.submit(request("other"))
                assert refused.value.status == 503
                assert client.stalled(0.0) is None
                await client.call_all([("wake_up", {})], timeout=5)
                engine.resume()
                token_ids, _ = await within(reader)
                assert token_ids == [10, 11, 12, 13]

    asyncio.run(scenario())


def test_all_requests_can_be_failed(run_directory: Path) -> None:
    async def scenario() -> None:
        async with started_client(run_directory) as client:
            with FakeEngine(run_directory, count_up) as engine:
                await ready(client)
                engine.pause()
                reader = asyncio.create_task(read(client, request()))
                await until(lambda: bool(engine.added), "the request to arrive")
                client.fail_all("shutting down")
                _, last = await within(reader)
                assert last.error == "shutting down"
                await until(lambda: engine.aborted == ["r"], "the abort")

    asyncio.run(scenario())


def test_a_report_adds_other_servers_load_to_what_is_known(run_directory: Path) -> None:
    async def scenario() -> None:
        async with started_client(run_directory) as client:
            client.mark_ready(notice(0, 1))
            client.open(request(max_tokens=7), lambda output: None)
            assert client.loads.num_tokens[0] == 10
            shares = {0: (1, 10), 1: (2, 100)}
            client.links[0].report(EngineStats(num_running=2, num_waiting=1, num_queued_tokens=110, shares=shares))
            loads = client.loads
            assert (loads.num_running[0], loads.num_waiting[0], loads.num_tokens[0]) == (2, 1, 110)
            client.abort(["r"])
            assert (loads.num_running[0], loads.num_waiting[0], loads.num_tokens[0]) == (2, 0, 100)

    asyncio.run(scenario())


def test_closing_twice_is_harmless_and_ends_requests(run_directory: Path) -> None:
    async def scenario() -> list[RequestOutput]:
        heard: list[RequestOutput] = []
        async with started_client(run_directory) as client:
            client.mark_ready(notice(0, 1))
            client.open(request(), heard.append)
            client.close()
        return heard

    (last,) = asyncio.run(scenario())
    assert last.error == "the server is shutting down"


def notice(engine: int, incarnation: int) -> EngineReady:
    return ready_engine(engine, incarnation=incarnation)


def outputs(incarnation: int, *items: RequestOutput) -> bytes:
    message = EngineOutputs(engine=0, incarnation=incarnation, outputs=list(items), stats=EngineStats())
    return msgspec.msgpack.encode(message)
