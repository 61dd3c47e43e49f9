"""What operators ask of all replicas: the routes, who may use them, and what a later start finds noted."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from fourfold.contracts.load_balancer import EngineState
from fourfold.engine.operations import Call
from fourfold.errors import ExecutorFailed, RequestError
from fourfold.process_messages import RestartEngine
from fourfold.sleep_tags import TAGS
from fourfold.supervision.deployment_state import DeploymentState, changing_state, read_state
from fourfold_server.authentication import is_loopback
from fourfold_server.config import ServerConfig
from fourfold_server.errors import error_response
from fourfold_server.operations import Operations

BOTH = ["weights", "kv_cache"]


def test_sleep_and_wake_up(start_server: Any) -> None:
    server = start_server()
    reply = server.http.post("/admin/sleep?level=2")
    assert (reply.status_code, reply.json()) == (200, {"is_sleeping": True, "replicas": [{"rank": 0, "asleep": BOTH}]})
    assert server.engine.operations == [("pause", {"mode": "keep"}), ("sleep", {"level": 2})]
    assert read_state(server.run_directory) == DeploymentState(sleep_level=2, asleep=("weights", "kv_cache"))
    refused = server.complete()
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert "engine 0 is asleep" in refused.json()["error"]["message"]
    assert server.http.get("/readyz").status_code == 503
    assert server.http.get("/livez").status_code == 200

    assert server.http.post("/admin/wake_up?tags=weights").status_code == 200
    # A pause first: replicas that share experts take it only after one, and they may be awake.
    waking = [("pause", {"mode": "keep"}), ("wake_up", {"tags": ["weights"]}), ("resume", {})]
    assert server.engine.operations[-3:] == waking
    assert read_state(server.run_directory).asleep == ("kv_cache",)
    assert server.http.post("/admin/wake_up").json()["is_sleeping"] is False
    assert read_state(server.run_directory).asleep == ()
    assert server.http.get("/admin/is_sleeping").json()["is_sleeping"] is False
    assert server.complete().status_code == 200


def test_what_belongs_into_the_query_may_stand_in_the_body(start_server: Any) -> None:
    server = start_server()
    for path, body, call in (
        ("pause", {"mode": "abort"}, ("pause", {"mode": "abort"})),
        ("pause", {}, ("pause", {"mode": "keep"})),
        ("sleep", {"level": 2}, ("sleep", {"level": 2})),
        ("wake_up", {"tags": ["kv_cache"]}, ("wake_up", {"tags": ["kv_cache"]})),
        ("wake_up", {}, ("wake_up", {"tags": []})),
    ):
        assert server.http.post(f"/admin/{path}", json=body).status_code == 200
        assert call in server.engine.operations
        server.engine.operations.clear()


def test_update_weights(start_server: Any) -> None:
    server = start_server()
    update = {"model": "/models/new"}
    server.engine.refusals["check_weights"] = "rank 1: the checkpoint lacks model.norm.weight"
    refused = server.http.post("/admin/update_weights", json=update)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == "engine 0: rank 1: the checkpoint lacks model.norm.weight"
    assert server.engine.operations == [("check_weights", update)]
    assert read_state(server.run_directory) == DeploymentState()
    server.engine.refusals.clear()
    assert server.http.post("/admin/update_weights", json=update).status_code == 200
    assert server.engine.operations[2:] == [
        ("pause", {"mode": "keep"}),
        ("discard_weights", {}),
        ("load_weights", update),
        ("resume", {}),
    ]
    assert read_state(server.run_directory).weights == "/models/new"


def test_a_refusal_leaves_no_wish_behind(start_server: Any) -> None:
    server = start_server()
    server.engine.refusals["pause"] = "not now"
    for path, body in (("/admin/sleep", None), ("/admin/update_weights", {"model": "/new"})):
        assert server.http.post(path, json=body).status_code == 400
    assert read_state(server.run_directory) == DeploymentState()
    stop = [("pause", {"mode": "keep"}), ("resume", {})]
    assert server.engine.operations == [*stop, ("check_weights", {"model": "/new"}), *stop]


def test_pause_and_resume(start_server: Any) -> None:
    server = start_server()
    reply = server.http.post("/admin/pause?mode=wait")
    assert (reply.status_code, reply.json()) == (200, {"is_paused": True, "replicas": [{"rank": 0, "paused": True}]})
    assert server.engine.operations == [("pause", {"mode": "wait"})]
    assert read_state(server.run_directory).paused
    server.http.post("/admin/sleep")
    server.http.post("/admin/wake_up")
    assert ("resume", {}) not in server.engine.operations, "the operator has paused them"
    assert server.http.get("/admin/is_paused").json()["is_paused"] is True
    assert server.http.post("/admin/resume").json()["is_paused"] is False
    assert server.engine.operations[-1] == ("resume", {})
    assert read_state(server.run_directory) == DeploymentState(sleep_level=1)


def test_a_replica_that_others_need_is_not_restarted_alone(start_server: Any) -> None:
    server = start_server()
    wished: list[RestartEngine] = []
    server.state.restart_engine = wished.append
    reply = server.http.post("/admin/replicas/0/restart")
    assert (reply.status_code, wished) == (202, [RestartEngine(engine=0)])
    server.state.bound = True
    refused = server.http.post("/admin/replicas/0/restart")
    assert (refused.status_code, "shares its experts" in refused.text) == (400, True)
    assert len(wished) == 1


class UnevenEngines:
    """Two engines, of which the first sleeps, as a client of ``Operations`` sees them."""

    def __init__(self, run_directory: Path) -> None:
        self.run_directory = run_directory
        self.engine_states = [EngineState.ASLEEP, EngineState.READY]
        self.calls: list[str] = []

    def engines_up(self) -> dict[int, int]:
        return {0: 1, 1: 1}

    def engines_missed(self, engines: dict[int, int]) -> list[int]:
        return []

    async def call_all(self, calls: Sequence[Call], *, timeout: float, engines: dict[int, int]) -> None:
        self.calls += [method for method, _ in calls]


@pytest.mark.parametrize("bound", [True, False])
def test_an_engine_does_not_go_on_without_one_that_it_would_wait_for(tmp_path: Path, bound: bool) -> None:
    client: Any = UnevenEngines(tmp_path)
    operations = Operations(client, lambda order: None, timeout=1, bound=bound)
    asyncio.run(operations.wake_up(["kv_cache"]))
    assert client.calls == ["pause", "wake_up", *([] if bound else ["resume"])]
    client.calls.clear()
    with pytest.raises(RequestError, match="engine 0 sleeps, and the others") if bound else nullcontext():
        asyncio.run(operations.resume())
    assert client.calls == ([] if bound else ["resume"])
    client.engine_states[0] = EngineState.READY
    asyncio.run(operations.resume())
    assert client.calls[-1] == "resume"


def test_the_death_of_all_engines_in_an_operation_is_worth_another_try() -> None:
    answer = error_response(ExecutorFailed("engine 0 died during 'sleep': killed by signal 9"))
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert b"engine 0 died during 'sleep': killed by signal 9" in answer.body


def test_what_another_api_server_has_done_holds_here_before_the_engines_say_so(start_server: Any) -> None:
    """They say it to all at once, and a client may be quicker than one of these messages."""
    server = start_server()
    (link,) = server.state.client.links
    heard = link.stats

    def report(*, asleep: bool) -> None:
        # In the place of the message, which comes a little later than the client's next request.
        stats = msgspec.structs.replace(heard, asleep=TAGS if asleep else (), paused=asleep, state_changes=1000)
        server.loop.call_soon_threadsafe(
            server.loop.call_later, 0.02, server.state.client.report, 0, link.incarnation, stats
        )

    with changing_state(server.run_directory) as change:
        change.write(DeploymentState(sleep_level=1, asleep=TAGS))
    report(asleep=True)
    assert server.http.get("/readyz").status_code == 503
    with changing_state(server.run_directory) as change:
        change.write(DeploymentState(sleep_level=1))
    report(asleep=False)
    assert server.complete().status_code == 200
    with changing_state(server.run_directory) as change:
        change.write(DeploymentState(sleep_level=1, asleep=TAGS))
    assert server.http.get("/livez").status_code == 200
    assert server.http.get("/readyz").status_code == 200, "nobody says so: it is not waited for for ever"


def test_one_operation_at_a_time(start_server: Any) -> None:
    server = start_server()
    with changing_state(server.run_directory):
        for path in ("/admin/sleep", "/admin/wake_up", "/admin/replicas/0/restart"):
            reply = server.http.post(path)
            assert (reply.status_code, "another operation" in reply.text) == (409, True)
    assert server.http.post("/admin/reset_prefix_cache").status_code == 200
    assert server.engine.operations == [("reset_prefix_cache", {})]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/admin/sleep?level=3", None, "level is 3"),
        ("/admin/sleep?level=x", None, "level"),
        ("/admin/pause?mode=stop", None, "mode is 'stop'; there are abort, wait, keep"),
        ("/admin/wake_up?tags=weights&tags=all", None, "no tag 'all'"),
        ("/admin/sleep", {"level": 3}, "level is 3"),
        ("/admin/sleep", {"level": True}, "level is True; a whole number"),
        ("/admin/sleep", {"mode": "abort"}, "unknown field 'mode'; the only one is level"),
        ("/admin/sleep?level=1", {"level": 2}, "level is in the query and in the body"),
        ("/admin/sleep", [], "the body is a JSON array"),
        ("/admin/pause", {"mode": None}, "mode is None; a text"),
        ("/admin/wake_up", {"tags": "weights"}, "tags is 'weights'; a list of texts"),
        ("/admin/wake_up", {"tags": ["weights", 5]}, "no tag 5"),
        ("/admin/update_weights", {"model": 5}, "model is 5"),
        ("/admin/update_weights", {"model": " "}, "model is ' '"),
        ("/admin/update_weights", {"model": "a", "x": 1}, "unknown field 'x'; the fields are model"),
        ("/admin/update_weights", {"path": "a"}, "unknown field 'path'; the fields are model"),
        ("/admin/update_weights", {}, "model is missing; a text"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_called(server: Any, path: str, body: Any, message: str) -> None:
    before = list(server.engine.operations)
    reply = server.http.post(path, json=body) if body is not None else server.http.post(path)
    assert reply.status_code == 400
    assert message in reply.json()["error"]["message"]
    assert server.engine.operations == before


def test_without_a_key_only_this_host_administers(start_server: Any) -> None:
    # The socket of these tests is on the loopback; what counts is what the server was told to listen on.
    server = start_server(config=ServerConfig(host="0.0.0.0"))
    for path in ("/admin/sleep", "/admin/replicas/0/restart", "/admin/nonsense", "/v1/load_lora_adapter"):
        reply = server.http.post(path)
        assert (reply.status_code, reply.json()["error"]["code"]) == (403, "admin_routes_closed")
    assert server.complete().status_code == 200
    assert server.engine.operations == []


def test_with_a_key_its_holders_administer(start_server: Any) -> None:
    server = start_server(config=ServerConfig(host="0.0.0.0", api_key="k"))
    assert server.http.post("/admin/sleep").status_code == 401
    reply = httpx.post(f"{server.url}/admin/sleep", headers={"authorization": "Bearer k"})
    assert reply.status_code == 200


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("::", False),
        ("0.0.0.0", False),
        ("example.org", False),
    ],
)
def test_is_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback
