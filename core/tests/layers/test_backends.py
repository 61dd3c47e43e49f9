from __future__ import annotations

import logging
from typing import Any

import pytest

from fourfold.config.engine_config import EngineConfig
from fourfold.entries import OperatorsEntry, Suitability
from fourfold.errors import ConfigError, Unsupported
from fourfold.layers.backends import build_backend, log_passed_over


def entry(name: str, score: int) -> OperatorsEntry:
    return OperatorsEntry(
        name=name,
        build=lambda context: name,
        suits=lambda config: Suitability(score=score, reason="for a test"),  # type: ignore[arg-type,return-value]
    )


ENTRIES = {"fast": entry("fast", 20), "plain": entry("plain", 1)}


def build(refused: set[str]) -> Any:
    def run(chosen: Any) -> str:
        if chosen.name in refused:
            raise Unsupported(f"{chosen.name} has no heads of 8")
        return f"built {chosen.name}"

    return run


def test_the_best_one() -> None:
    assert build_backend("operators", ENTRIES, "auto", EngineConfig(), build(set())) == ("fast", "built fast")


def test_auto_takes_the_next_one_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert build_backend("operators", ENTRIES, "auto", EngineConfig(), build({"fast"}))[0] == "plain"
    assert "operators 'fast' cannot run this model, taking the next one: fast has no heads of 8" in caplog.text


def test_a_named_one_is_never_replaced() -> None:
    with pytest.raises(ConfigError, match="operators 'fast' cannot run this model: fast has no heads of 8"):
        build_backend("operators", ENTRIES, "fast", EngineConfig(), build({"fast"}))


def test_none_is_left() -> None:
    with pytest.raises(ConfigError, match="operators 'plain' cannot run this model"):
        build_backend("operators", ENTRIES, "auto", EngineConfig(), build({"fast", "plain"}))


def test_what_cannot_run_here_is_logged_once_a_reason(caplog: pytest.LogCaptureFixture) -> None:
    unfit = entry("wide", 0)
    with caplog.at_level(logging.INFO):
        log_passed_over(EngineConfig(), {"operators": {**ENTRIES, "wide": unfit}, "linear method": {"wide": unfit}})
    assert caplog.messages == ["not used: operators 'wide', linear method 'wide': for a test"]
