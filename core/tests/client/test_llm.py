"""LLM over an engine core that answers from a script; the real engine is tested where all parts meet."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from fourfold.client import llm as module
from fourfold.client.llm import LLM
from fourfold.config.engine_config import EngineConfig
from fourfold.config.scheduler_config import SchedulerConfig
from fourfold.errors import ConfigError, EngineError, ExecutorClosed, RequestError
from fourfold.messages import AddRequest, FinishReason, RequestOutput
from fourfold.sampling_params import SamplingParams
from fourfold.testing.fake_tokenizer import FakeTokenizer
from fourfold.text.chat_template import ChatTemplate
from fourfold.text.served_model import ServedModel

TOKENIZER = FakeTokenizer()
MODEL = ServedModel(
    tokenizer=TOKENIZER,
    chat_template=ChatTemplate("{% for m in messages %}{{ m.content }};{% endfor %}", TOKENIZER),
    eos_token_ids=(2,),
    vocabulary_size=TOKENIZER.vocabulary_size,
)


class ScriptedCore:
    """One token of the script a request and step; at most ``max_waiting`` at once."""

    def __init__(self, script: Callable[[AddRequest], Iterable[int]], max_waiting: int = 4096) -> None:
        self.script = script
        self.max_waiting = max_waiting
        self.added: list[AddRequest] = []
        self.running: dict[str, tuple[AddRequest, Iterator[int], int]] = {}
        self.aborted: list[str] = []
        self.error: Exception | None = None
        self.num_shutdowns = 0

    def add(self, request: AddRequest) -> RequestOutput | None:
        self.added.append(request)
        if len(self.running) >= self.max_waiting:
            return failed(request.request_id, "too many requests wait", 429)
        self.running[request.request_id] = (request, iter(self.script(request)), 0)
        return None

    def abort(self, request_ids: list[str]) -> None:
        self.aborted += request_ids
        for request_id in request_ids:
            self.running.pop(request_id, None)

    def step(self) -> dict[int, list[RequestOutput]]:
        if self.error is not None:
            raise self.error
        outputs = []
        for request_id, (request, tokens, count) in list(self.running.items()):
            output = RequestOutput(request_id=request_id, token_ids=[next(tokens)])
            self.running[request_id] = (request, tokens, count + 1)
            if output.token_ids[0] in request.eos_token_ids:
                output.finish_reason = FinishReason.STOP
            elif count + 1 == request.sampling.max_tokens:
                output.finish_reason = FinishReason.LENGTH
            if output.finish_reason is not None:
                del self.running[request_id]
            outputs.append(output)
        return {0: outputs}

    def shutdown(self) -> None:
        self.num_shutdowns += 1


def failed(request_id: str, message: str, status: int) -> RequestOutput:
    return RequestOutput(request_id=request_id, finish_reason=FinishReason.ERROR, error=message, error_status=status)


def echo(request: AddRequest) -> Iterator[int]:
    """The prompt again and again."""
    return itertools.cycle(request.prompt_token_ids)


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[LLM, ScriptedCore]]:
    def build(
        script: Callable[[AddRequest], Iterable[int]] = echo, config: EngineConfig | None = None
    ) -> tuple[LLM, ScriptedCore]:
        config = config or EngineConfig()
        core = ScriptedCore(script, config.scheduler.max_num_waiting)
        ready = SimpleNamespace(max_model_len=64)
        events = SimpleNamespace(engine_started=lambda info: None, engine_stopped=lambda info: None)
        registry = SimpleNamespace(settings=dict, events=events)
        monkeypatch.setattr(module, "load_plugins", lambda: registry)
        monkeypatch.setattr(module, "resolve", lambda config, registry: SimpleNamespace(config=config, reasons=()))
        monkeypatch.setattr(module, "load_served_model", lambda config, registry: MODEL)
        built = SimpleNamespace(core=core, client=None, ready=ready)
        monkeypatch.setattr(module, "build_engine", lambda config, registry: built)
        return LLM(config), core

    return build


Build = Callable[..., tuple[LLM, ScriptedCore]]


def test_results_are_in_the_order_of_prompts(build: Build) -> None:
    llm, _ = build()
    params = [SamplingParams(max_tokens=count) for count in (6, 1, 4)]
    results = llm.generate(["abc", "def", "ghi"], params)
    assert [result.prompt for result in results] == ["abc", "def", "ghi"]
    assert [result.outputs[0].text for result in results] == ["abcabc", "d", "ghig"]
    assert {result.outputs[0].finish_reason for result in results} == {FinishReason.LENGTH}


def test_prompts_are_text_ids_or_mappings_alone_or_in_lists(build: Build) -> None:
    llm, _ = build()
    ids = TOKENIZER.encode("ab")
    params = SamplingParams(max_tokens=2)
    forms: list[Any] = ["ab", ids, {"prompt": "ab"}, {"prompt_token_ids": ids}]
    for prompts in [*forms, forms, tuple(forms)]:
        results = llm.generate(prompts, params)
        assert {result.outputs[0].text for result in results} == {"ab"}
        assert {tuple(result.prompt_token_ids) for result in results} == {tuple(ids)}
    assert llm.generate([], params) == []


def test_choices_draw_with_seeds_of_their_own(build: Build) -> None:
    llm, core = build()
    (result,) = llm.generate("ab", SamplingParams(n=3, seed=7, max_tokens=1))
    assert [output.index for output in result.outputs] == [0, 1, 2]
    seeds = [request.sampling.seed for request in core.added]
    assert seeds[0] == 7
    assert len(set(seeds)) == 3
    assert {request.sampling.n for request in core.added} == {1}


def test_a_request_without_a_seed_gets_one(build: Build) -> None:
    llm, core = build()
    llm.generate(["a", "b"], SamplingParams(max_tokens=1))
    seeds = [request.sampling.seed for request in core.added]
    assert None not in seeds
    assert seeds[0] != seeds[1]


def test_length_is_cut_to_the_context(build: Build) -> None:
    llm, core = build()
    llm.generate(["a" * 60, "b"], SamplingParams())
    assert [request.sampling.max_tokens for request in core.added] == [4, 63]


def test_stop_strings_end_a_request_in_the_engine_too(build: Build) -> None:
    llm, core = build()
    (result,) = llm.generate("abc", SamplingParams(stop=("ca",), max_tokens=50))
    output = result.outputs[0]
    assert (output.text, output.stop_reason, len(output.token_ids)) == ("ab", "ca", 4)
    assert len(core.aborted) == 1
    assert not core.running


def test_more_prompts_than_may_wait_are_fed_as_others_end(build: Build) -> None:
    llm, _ = build(config=EngineConfig(scheduler=SchedulerConfig(max_num_waiting=3)))
    results = llm.generate([str(index) for index in range(10)], SamplingParams(max_tokens=1))
    assert [result.outputs[0].text for result in results] == list("0123456789")


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([""], "prompt 0 has 0 tokens"),
        (["a", "b" * 64], "prompt 1 has 64 tokens; 1 to 63"),
        ([[5, 100_000]], "prompt 0 has a token id outside the vocabulary"),
        ([[5, -1]], "prompt 0 has a token id outside"),
        ([[5, "a"]], "prompt 0 has an item that is no token id"),
        ([{"text": "a"}], "prompt 0 needs one of prompt and prompt_token_ids"),
        (None, "prompts are of type NoneType"),
        (b"a", "prompts are of type bytes"),
        (["a", b"a"], "prompt 1 is of type bytes; text, token ids, or a mapping"),
        ([1.5], "prompt 0 is of type float"),
        (["\ud800"], "prompt 0 is no Unicode text"),
    ],
)
def test_a_bad_prompt_is_refused_before_anything_runs(build: Build, prompts: list[Any], message: str) -> None:
    llm, core = build()
    with pytest.raises(RequestError, match=message):
        llm.generate(prompts)
    assert core.added == []


def test_params_must_match_prompts(build: Build) -> None:
    llm, _ = build()
    with pytest.raises(RequestError, match="2 prompts and 1 params"):
        llm.generate(["a", "b"], [SamplingParams()])
    wrong: list[Any] = ["x", 3, ["a", "b"]]
    for params in wrong:
        with pytest.raises(RequestError, match="params must be SamplingParams, or a list of them"):
            llm.generate(["a", "b"], params)


def test_messages_must_be_a_list(build: Build) -> None:
    llm, _ = build()
    wrong: list[Any] = [None, "hello", {"role": "user", "content": "hello"}]
    for messages in wrong:
        with pytest.raises(RequestError, match="messages must be a list"):
            llm.chat(messages)


def test_a_fork_is_told_to_build_its_own_and_ends_nothing(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, core = build()
    monkeypatch.setattr(module.os, "getpid", lambda: -1)  # as it is in a fork
    with pytest.raises(EngineError, match="is a fork of it; build one here"):
        llm.generate("a")
    llm.close()
    assert core.num_shutdowns == 0


def test_an_interruption_leaves_nothing_in_the_engine(build: Build) -> None:
    llm, core = build()
    core.error = EngineError("rank 0 died")
    with pytest.raises(EngineError, match="rank 0 died"):
        llm.generate(["a", "b"])
    assert not core.running
    core.error = None
    assert llm.generate("c", SamplingParams(max_tokens=1))[0].outputs[0].text == "c"


def test_a_request_that_the_engine_fails_raises(build: Build) -> None:
    llm, core = build()
    core.step = lambda: {0: [failed(core.added[0].request_id, "nan in the logits", 500)]}  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="nan in the logits"):
        llm.generate("a")


def test_chats_are_rendered_by_the_models_template(build: Build) -> None:
    llm, _ = build()
    hi, bye = [{"role": "user", "content": "hi"}], [{"role": "user", "content": "bye"}]
    assert llm.chat(hi, SamplingParams(max_tokens=3))[0].outputs[0].text == "hi;"
    results = llm.chat([hi, bye], SamplingParams(max_tokens=3))
    assert [result.outputs[0].text for result in results] == ["hi;", "bye"]


def test_closing_twice_ends_the_engine_once(build: Build) -> None:
    llm, core = build()
    with llm:
        pass
    llm.close()
    assert core.num_shutdowns == 1
    with pytest.raises(ExecutorClosed, match="this LLM is closed"):
        llm.generate("a")


def test_options_beside_a_whole_config_are_refused(build: Build) -> None:
    build()
    with pytest.raises(ConfigError, match="options beside a whole config: dtype"):
        LLM(EngineConfig(), dtype="float32")
