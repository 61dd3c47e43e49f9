from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from fourfold_server.config import ServerConfig


def samples(server: Any) -> dict[str, float]:
    """name{labels} -> value."""
    reply = server.http.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {
        sample.name + "".join(f",{key}={value}" for key, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(reply.text)
        for sample in family.samples
    }


def test_metrics_count_requests_tokens_and_times(start_server: Any) -> None:
    server = start_server()
    for _ in range(3):
        server.complete(max_tokens=4)
    server.complete(stop=".", max_tokens=9)
    server.complete(model="other")
    server.http.get("/made/up/path")
    found = samples(server)
    model = ",model_name=m"
    assert found[f"fourfold_requests_total,finish_reason=length{model}"] == 3
    assert found[f"fourfold_requests_total,finish_reason=stop{model}"] == 1
    assert found[f"fourfold_time_to_first_token_seconds_count{model}"] == 4
    assert found[f"fourfold_inter_token_latency_seconds_count{model}"] == 10
    assert found[f"fourfold_e2e_request_latency_seconds_count{model}"] == 4
    assert found[f"fourfold_request_generation_tokens_sum{model}"] == 14
    assert found["fourfold_http_requests_total,method=POST,path=/v1/completions,status=200"] == 4
    assert found["fourfold_http_requests_total,method=POST,path=/v1/completions,status=404"] == 1
    assert found["fourfold_http_requests_total,method=GET,path=unmatched,status=404"] == 1
    engine = f",engine=0{model}"
    assert found[f"fourfold_engine_up{engine}"] == 1
    assert found[f"fourfold_generation_tokens_total{engine}"] >= 14
    assert found[f"fourfold_prompt_tokens_total{engine}"] == 20
    for name in ("num_preemptions_total", "prefix_cache_queries_total", "prefix_cache_hits_total", "kv_cache_usage"):
        assert f"fourfold_{name}{engine}" in found
    server.until(lambda: samples(server)[f"fourfold_num_requests_running{engine}"] == 0, "no request to run")


def test_the_request_id_is_echoed_or_drawn(server: Any) -> None:
    assert server.http.get("/livez", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    drawn = {server.http.get("/livez").headers["x-request-id"] for _ in range(3)}
    assert len(drawn) == 3
    for reply in (server.complete(model="other"), server.http.get("/nope")):
        assert reply.headers["x-request-id"]
    assert len(server.http.get("/livez", headers={"x-request-id": "a" * 1000}).headers["x-request-id"]) == 32


def test_equal_request_ids_do_not_clash(server: Any) -> None:
    headers = {"x-request-id": "same"}
    body = {"model": "m", "prompt": "a", "max_tokens": 1}
    ids = {server.http.post("/v1/completions", json=body, headers=headers).json()["id"] for _ in range(3)}
    assert len(ids) == 3


def test_models(server: Any) -> None:
    listed = server.http.get("/v1/models").json()
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == ["m", "alias"]
    assert listed["data"][0]["max_model_len"] == 256
    assert server.http.get("/v1/models/alias").json()["id"] == "alias"


def test_small_answers(server: Any) -> None:
    assert server.http.get("/version").json().keys() == {"version"}
    assert server.http.get("/topology").json() == {"processes": [], "stages": [], "layers": []}
    health = server.http.get("/health").json()
    assert health["status"] == "healthy"
    assert health["engines"][0]["state"] == "ready"
    for probe in ("/livez", "/readyz", "/health"):
        assert server.http.head(probe).status_code == 200


@pytest.mark.parametrize("first_rank", [0, 4])
def test_what_layers_report_is_in_the_topology(start_server: Any, first_rank: int) -> None:
    server = start_server(first_rank=first_rank)
    heat = {"layers": [0, 1], "load": [[3, 1], [2, 2]]}
    server.engine.show_layers([{"expert_balancedness": 0.75}, {}], [{"experts": heat}, {}])
    assert server.complete().status_code == 200
    shown = {name: value for name, value in samples(server).items() if "balancedness" in name}
    assert shown == {f"fourfold_expert_balancedness,engine={first_rank},model_name=m,stage=0": 0.75}
    assert server.http.get("/topology").json()["layers"] == [{"engine": first_rank, "stage": 0, "experts": heat}]
    server.engine.refusals["layer_report"] = "no"
    assert server.http.get("/topology").json()["layers"] == []


def test_errors_name_a_replica_by_the_rank_that_it_has_over_all_nodes(start_server: Any) -> None:
    server = start_server(first_rank=4)
    server.engine.refusals["sleep"] = "no"
    assert server.http.post("/admin/sleep").json()["error"]["message"] == "engine 4: no"
    server.engine.stop("boom")
    server.until(lambda: server.http.get("/readyz").status_code == 503, "the engine to be dead")
    assert server.http.get("/readyz").json()["reason"] == "no engine is ready: engine 4 is dead"


def test_the_key_guards_everything_but_the_probes(start_server: Any) -> None:
    server = start_server(config=ServerConfig(api_key="secret-ключ"))
    for probe in ("/livez", "/readyz", "/health"):
        assert server.http.get(probe).status_code == 200
    key = "secret-ключ".encode()
    wrong = [{}, {"authorization": "Bearer no"}, {"authorization": "Basic secret"}, {"authorization": "Bearer"}]
    paths = ["/v1/models", "/metrics", "/version", "/topology", "/docs", "/openapi.json", "/nope", "/livez/"]
    for path in paths:
        for headers in wrong:
            reply = server.http.get(path, headers=headers)
            assert reply.status_code == 401, path
            assert reply.json()["error"]["code"] == "invalid_api_key"
            assert reply.headers["www-authenticate"] == "Bearer"
    assert server.complete().status_code == 401
    for scheme in (b"Bearer ", b"bearer "):
        reply = server.http.get("/v1/models", headers={b"authorization": scheme + key})
        assert reply.status_code == 200


def test_tokenize_and_detokenize(server: Any) -> None:
    text = "The capital ♥ <|im_end|>"
    reply = server.http.post("/tokenize", json={"prompt": text, "return_token_strs": True})
    tokens = reply.json()["tokens"]
    assert reply.json()["count"] == len(tokens)
    assert reply.json()["max_model_len"] == 256
    assert reply.json()["token_strs"][:2] == ["The", " capital"]
    assert tokens[-1] == 2
    assert server.http.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": text}
    hidden = server.http.post("/detokenize", json={"tokens": tokens, "skip_special_tokens": True}).json()
    assert hidden == {"prompt": "The capital ♥ "}
    chat = server.http.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]}).json()
    server.chat("hi", max_tokens=1)
    assert server.engine.added[-1].prompt_token_ids == chat["tokens"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [1_000_000]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
        ("/detokenize", {"tokens": 5}, "tokens"),
    ],
)
def test_bad_tokenize_requests(server: Any, path: str, body: dict[str, Any], param: str) -> None:
    reply = server.http.post(path, json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


def test_the_documentation_shows_bodies_and_answers(server: Any) -> None:
    page = server.http.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "POST /v1/chat/completions" in page.text
    assert "<code>max_tokens</code>" in page.text
    assert not re.findall(r"(?:src|href)=\W?(?:https?:)?//", page.text)
    whole = server.http.get("/openapi.json").text
    assert "HTTPValidationError" not in whole
    docs = re.findall(r"</td><td>([^<]+)</td></tr>", page.text)
    assert len(docs) > 20
    assert not [doc for doc in docs if re.search(r"(?i)\b(\w+)\W+\1\b|not supported yet.*not supported yet", doc)]
    paths = server.http.get("/openapi.json").json()["paths"]
    for path, field in [
        ("/v1/completions", "prompt"),
        ("/v1/chat/completions", "messages"),
        ("/tokenize", "prompt"),
        ("/detokenize", "tokens"),
    ]:
        route = paths[path]["post"]
        content = route["requestBody"]["content"]["application/json"]
        assert field in content["schema"]["properties"]
        assert content["example"]
        assert route["responses"]["200"]["content"]["application/json"]["schema"]["properties"]
        assert set(route["responses"]) == {"200", "4XX", "5XX"}


def test_the_openai_client_works(server: Any) -> None:
    openai = pytest.importorskip("openai")
    url = f"{server.url}/v1"
    with httpx.Client() as transport, openai.OpenAI(base_url=url, api_key="x", http_client=transport) as client:
        whole = client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hi"}], max_tokens=2, logprobs=True
        )
        assert whole.choices[0].message.content == " Paris."
        stream = client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hi"}], max_tokens=2, stream=True
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == " Paris."
        assert client.completions.create(model="m", prompt="a", max_tokens=2).choices[0].text == " Paris."
        assert [model.id for model in client.models.list()] == ["m", "alias"]
        with pytest.raises(openai.NotFoundError, match="no model called 'x'"):
            client.completions.create(model="x", prompt="a")


def test_the_application_imports_no_torch() -> None:
    code = (
        "import sys, fourfold_server.app, fourfold_server.plugin\n"
        "import fourfold_server.routes_completions, fourfold_server.routes_chat, fourfold_server.routes_tokenize\n"
        "import fourfold_server.routes_models, fourfold_server.routes_operations\n"
        "import fourfold.client.llm\n"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
