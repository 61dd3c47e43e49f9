"""LoRA adapters over HTTP: loading and unloading by vLLM's routes, and requests that name one as their model."""

from __future__ import annotations

from typing import Any

import pytest

from fourfold.errors import ConfigError
from fourfold.supervision.deployment_state import read_state
from fourfold_server.config import ServerConfig

LOAD = {"lora_name": "sql", "lora_path": "/adapters/sql"}


def test_an_adapter_is_a_model_while_it_is_loaded(start_server: Any) -> None:
    server = start_server()
    assert server.http.post("/v1/load_lora_adapter", json=LOAD).status_code == 200
    ((method, arguments),) = server.engine.operations
    assert (method, arguments["folder"]) == ("load_adapter", "/adapters/sql")
    models = server.http.get("/v1/models").json()["data"]
    assert [(model["id"], model["parent"], model["root"]) for model in models] == [
        ("m", None, "m"),
        ("alias", None, "m"),
        ("sql", "m", "/adapters/sql"),
    ]
    assert server.http.get("/v1/models/sql").json()["parent"] == "m"
    for reply in (server.complete(model="sql", n=2, max_tokens=2), server.chat(model="sql", max_tokens=2)):
        assert (reply.status_code, reply.json()["model"]) == (200, "sql")
    assert [request.adapter for request in server.engine.added] == [arguments["name"]] * 3
    streamed = server.complete(model="sql", stream=True, max_tokens=2)
    assert '"model":"sql"' in streamed.text.replace(" ", "")
    assert server.complete(model="alias", max_tokens=2).json()["model"] == "m"
    assert server.engine.added[-1].adapter == ""

    assert server.http.post("/v1/unload_lora_adapter", json={"lora_name": "sql"}).status_code == 200
    assert server.engine.operations[1:] == [("unload_adapter", {"name": arguments["name"]})]
    unknown = server.complete(model="sql")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    assert server.http.post("/v1/load_lora_adapter", json=LOAD).status_code == 200
    assert server.engine.operations[-1][1]["name"] != arguments["name"]  # nothing cached is taken for the new one's


def test_an_adapter_may_have_the_name_of_its_repository(server: Any) -> None:
    assert server.http.post("/v1/load_lora_adapter", json={**LOAD, "lora_name": "me/sql"}).status_code == 200
    assert server.http.get("/v1/models/me/sql").json()["id"] == "me/sql"
    assert server.complete(model="me/sql").json()["model"] == "me/sql"


def test_an_adapter_that_an_engine_refuses_is_nowhere(start_server: Any) -> None:
    server = start_server()
    server.engine.refusals["load_adapter"] = "/adapters/sql is no LoRA adapter"
    reply = server.http.post("/v1/load_lora_adapter", json=LOAD)
    assert (reply.status_code, "is no LoRA adapter" in reply.text) == (400, True)
    assert [method for method, _ in server.engine.operations] == ["load_adapter", "unload_adapter"]
    assert read_state(server.run_directory).adapters == ()
    assert server.complete(model="sql").status_code == 404


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("load", {"lora_name": "m", "lora_path": "/x"}, 400, "a model 'm' is served already"),
        ("load", {"lora_name": "x"}, 400, "lora_path is missing"),
        ("load", {**LOAD, "base": 1}, 400, "unknown field 'base'"),
        ("load", {**LOAD, "lora_name": "a" * 257}, 400, "has 257 characters; 256 at most"),
        ("load", {**LOAD, "lora_name": "a\u202eb"}, 400, "characters that cannot be printed"),
        ("load", {**LOAD, "lora_name": "a\x00b"}, 400, "no control characters"),
        ("load", {**LOAD, "lora_name": "a\nb"}, 400, "no control characters"),
        ("load", {**LOAD, "lora_path": "/adapters/\x00"}, 400, "no control characters"),
        ("load", {**LOAD, "lora_path": "/" + "a" * 4096}, 400, "4096 characters at most"),
        ("unload", {"lora_name": "x"}, 404, "no LoRA adapter 'x' is loaded"),
        ("unload", {}, 400, "lora_name is missing"),
    ],
)
def test_what_cannot_be_is_refused(server: Any, path: str, body: dict[str, Any], status: int, message: str) -> None:
    reply = server.http.post(f"/v1/{path}_lora_adapter", json=body)
    assert reply.status_code == status
    assert message in reply.json()["error"]["message"]


def test_modules_to_begin_with_are_names_and_folders() -> None:
    assert ServerConfig(lora_modules=("me/a=/x", "b = /y=z")).adapters == [("me/a", "/x"), ("b", "/y=z")]
    for wrong in ("a", "=x", "a= "):
        with pytest.raises(ConfigError, match="a name and a folder, as in"):
            ServerConfig(lora_modules=(wrong,))
    with pytest.raises(ConfigError, match=r"--lora-modules: the name .* has 257 characters"):
        ServerConfig(lora_modules=("a" * 257 + "=/x",))
