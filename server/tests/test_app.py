"""The application's layers around routes that are not its own."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import APIRouter
from pydantic import BaseModel

from fourfold.balancers.least_work import LeastWork
from fourfold.client.engine_client import EngineClient
from fourfold.entries import LoadBalancerContext, RoutesEntry
from fourfold.errors import EngineError, RequestError
from fourfold_server.app import create_app
from fourfold_server.config import ServerConfig
from fourfold_server.plugin import fourfold_routes
from fourfold_server.state import ServerState


class Order(BaseModel):
    count: int


async def plain() -> dict[str, str]:
    return {"answer": "plain"}


async def order(order: Order) -> dict[str, int]:
    return {"count": order.count}


async def refuse() -> None:
    raise RequestError("no more today", parameter="count", code="sold_out", status=429)


async def break_down() -> None:
    raise EngineError("rank 1 failed")


def billing(state: ServerState) -> APIRouter:
    router = APIRouter(prefix=f"/billing/{state.served_names[0]}")
    router.get("/plain")(plain)
    router.post("/order")(order)
    router.get("/refuse")(refuse)
    router.get("/break")(break_down)
    return router


@pytest.fixture
def state() -> Iterator[ServerState]:
    with tempfile.TemporaryDirectory(prefix="fourfold-") as folder:
        client = EngineClient(Path(folder), 0, 1, LeastWork(LoadBalancerContext(num_engines=1)))
        config = ServerConfig(api_key="key")
        state = ServerState(config=config, client=client, served_names=("m",), topology=dict)
        yield state
        client.close()
        state.close()


def request(state: ServerState, method: str, path: str, **options: Any) -> httpx.Response:
    app = create_app(state, {"billing": RoutesEntry(name="billing", build=billing)})

    async def send() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
            return await http.request(method, path, **options)

    return asyncio.run(send())


KEY = {"authorization": "Bearer key"}
WITHOUT_BODY = ["resume", "reset_prefix_cache", "replicas/{rank}/restart"]


def test_plugins_routes_are_mounted_alone_if_they_are_all(state: ServerState) -> None:
    assert request(state, "GET", "/billing/m/plain", headers=KEY).json() == {"answer": "plain"}
    assert request(state, "GET", "/v1/models", headers=KEY).status_code == 404


def test_the_key_guards_them(state: ServerState) -> None:
    assert request(state, "GET", "/billing/m/plain").status_code == 401


def test_their_errors_are_openai_errors(state: ServerState) -> None:
    invalid = request(state, "POST", "/billing/m/order", headers=KEY, json={"count": "ten"})
    assert invalid.status_code == 400
    assert invalid.json()["error"]["param"] == "count"
    refused = request(state, "GET", "/billing/m/refuse", headers=KEY)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert refused.json()["error"] == {
        "message": "no more today",
        "type": "rate_limit_error",
        "param": "count",
        "code": "sold_out",
    }
    broken = request(state, "GET", "/billing/m/break", headers=KEY)
    assert (broken.status_code, broken.json()["error"]["message"]) == (500, "rank 1 failed")


def test_the_servers_own_routes_are_offers() -> None:
    entries = fourfold_routes()
    assert len({entry.name for entry in entries}) == len(entries)
    assert all(entry.summary for entry in entries)


def test_every_route_that_reads_a_body_documents_its_fields(state: ServerState) -> None:
    posts = {path: route["post"] for path, route in create_app(state).openapi()["paths"].items() if "post" in route}
    without = {path for path, post in posts.items() if "requestBody" not in post}
    assert without == {f"/admin/{name}" for name in WITHOUT_BODY}
