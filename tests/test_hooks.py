"""Hooks are documented: each with its signature and words in docs/hooks.md, and with an example that works."""

from __future__ import annotations

import inspect
import re
import textwrap
from types import ModuleType
from typing import Any

import pytest

from fourfold.config.engine_config import EngineConfig
from fourfold.config.model_config import ModelConfig
from fourfold.config.parallel_config import ParallelConfig
from fourfold.entries import Entry, LoadBalancerEntry
from fourfold.errors import ConfigError
from fourfold.hook_checks import hook_specifications
from fourfold.hookspecs import CONTRACT_VERSION, MODULES
from fourfold.messages import EngineStats, FinishReason, RequestOutput
from fourfold.offers import OFFER_KINDS
from fourfold.plugins import load_plugins
from fourfold.selection import explain
from fourfold.testing.load_balancer import LoadBalancerConformance
from fourfold.testing.ready_engine import ready_engine

from .distributions import ROOT

DOCUMENT = (ROOT / "docs" / "hooks.md").read_text()
FUNCTIONS = {
    name: function for module in MODULES for name, function in vars(module).items() if name.startswith("fourfold_")
}
READY = ready_engine(3)
every_hook = pytest.mark.parametrize("hook", sorted(FUNCTIONS))


def example(hook: str) -> str:
    return textwrap.dedent(inspect.cleandoc(FUNCTIONS[hook].__doc__).split("Example::")[1]).strip()


def plugin(hook: str) -> ModuleType:
    """The example of ``hook`` as an imported module."""
    module = ModuleType(f"example_of_{hook}")
    exec(compile(example(hook), f"<example of {hook}>", "exec", dont_inherit=True), vars(module))
    return module


def section(hook: str) -> str:
    found = re.search(rf"^### `{hook}\(.*?(?=^##|\Z)", DOCUMENT, flags=re.MULTILINE | re.DOTALL)
    assert found, f"docs/hooks.md does not describe {hook}"
    return found[0]


def test_every_hook_is_a_specification() -> None:
    assert hook_specifications().keys() == FUNCTIONS.keys()
    offers = {f"fourfold_{kind}" for kind in OFFER_KINDS}
    assert offers < FUNCTIONS.keys()


def test_no_hook_is_documented_that_is_not_there() -> None:
    assert set(re.findall(r"^### `(fourfold_\w+)", DOCUMENT, flags=re.MULTILINE)) == FUNCTIONS.keys()
    assert f'FOURFOLD_CONTRACT = ">={CONTRACT_VERSION},<' in DOCUMENT


@every_hook
def test_the_document_has_signature_words_and_example(hook: str) -> None:
    signature = f"{hook}{hook_specifications()[hook]}".replace("'", "")
    text = section(hook)
    assert text.startswith(f"### `{signature}`\n"), f"write: ### `{signature}`"
    words = inspect.cleandoc(FUNCTIONS[hook].__doc__).split("Example::")[0].replace("``", "`")
    assert " ".join(words.split()) in " ".join(text.split()), f"write under {hook}:\n{words}"
    assert example(hook) in text, f"write under {hook}:\n{example(hook)}"


@every_hook
def test_the_docstring_says_when_and_what(hook: str) -> None:
    words = FUNCTIONS[hook].__doc__
    assert "Called " in words
    assert "Returns" in words
    assert not inspect.signature(FUNCTIONS[hook]).parameters.keys() - set(re.findall(r"``(\w+)``", words))


@pytest.mark.parametrize("kind", sorted(OFFER_KINDS))
def test_the_example_of_an_offer_loads(kind: str) -> None:
    registry = load_plugins(entry_points=False, extra={"example": plugin(f"fourfold_{kind}")})
    [entry] = getattr(registry, kind)().values()
    assert type(entry) is OFFER_KINDS[kind].entry
    assert isinstance(entry, Entry)
    assert entry.suits(EngineConfig()).score > 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_installing_every_example_changes_no_choice(dtype: Any) -> None:
    spread = ParallelConfig(data_parallel_size=2, enable_expert_parallel=True)
    config = EngineConfig(model=ModelConfig(dtype=dtype), parallel=spread)
    silent = OFFER_KINDS.keys() - {"attention_backends"}  # whose example claims to be the better one
    examples = {f"example-{kind}": plugin(f"fourfold_{kind}") for kind in silent}
    found = explain(config, load_plugins(extra=examples))
    assert {one.kind: one.reason for one in found} == {one.kind: one.reason for one in explain(config, load_plugins())}
    assert {"tokenizer", "rebalancer", "all-to-all", "expert placement", "linear method"} <= {one.kind for one in found}


class TestExampleOfALoadBalancer(LoadBalancerConformance):
    """What authors copy passes the kit that they are told of."""

    name = "fewest-requests"

    @pytest.fixture
    def entry(self) -> LoadBalancerEntry:
        """The document's."""
        example = plugin("fourfold_load_balancers")
        return load_plugins(entry_points=False, extra={"example": example}).load_balancers()[self.name]


def test_the_example_of_settings_becomes_options() -> None:
    from fourfold.config.options import build_engine_config

    settings = load_plugins(entry_points=False, extra={"slurm": plugin("fourfold_settings")}).settings()
    assert build_engine_config(settings, slurm_partition="gpu").plugins["slurm"].partition == "gpu"


def test_the_example_of_a_check_refuses() -> None:
    from fourfold.config.options import build_engine_config

    registry = load_plugins(entry_points=False, extra={"slurm": plugin("fourfold_check_config")})
    registry.check_config(build_engine_config(executor="slurm"))
    with pytest.raises(ConfigError, match="--data-parallel-size is 9; slurm takes 8 at most"):
        registry.check_config(build_engine_config(executor="slurm", data_parallel_size=9))


@pytest.mark.parametrize(
    ("event", "arguments", "noted", "expected"),
    [
        ("engine_started", (READY,), "started", "engine 3 runs on cpu"),
        ("step_finished", (EngineStats(generation_tokens=5),), "tokens", 5),
        (
            "request_finished",
            (RequestOutput(request_id="r", finish_reason=FinishReason.STOP),),
            "reasons",
            ("r", FinishReason.STOP),
        ),
        ("worker_lost", (1, "killed"), "lost", "rank 1: killed"),
        ("engine_stopped", (READY,), "stopped", 3),
    ],
)
def test_the_example_of_an_event_is_told(event: str, arguments: tuple[Any, ...], noted: str, expected: object) -> None:
    module = plugin(f"fourfold_{event}")
    getattr(load_plugins(entry_points=False, extra={"example": module}).events, event)(*arguments)
    assert getattr(module, noted) == [expected]
