"""Methods as they travel: names, importable functions, and what is refused."""

from __future__ import annotations

from functools import partial

import pytest

from fourfold.errors import ConfigError
from fourfold.rpc_method import bind_method, method_name
from fourfold.testing.workers import EchoWorker, scaled_rank


class Worker:
    rank = 3

    def answer(self):
        return 42


def test_names_and_functions_travel_as_text():
    assert method_name("load") == "load"
    assert method_name(scaled_rank) == "fourfold.testing.workers:scaled_rank"
    assert method_name(EchoWorker.who) == "fourfold.testing.workers:EchoWorker.who"


def test_they_are_bound_to_the_worker():
    assert bind_method(Worker(), "answer")() == 42
    assert bind_method(Worker(), method_name(scaled_rank))(10, offset=1) == 31


def test_what_a_worker_cannot_import_is_refused_by_name():
    def inner(worker): ...

    def program(worker): ...

    program.__module__, program.__qualname__ = "__main__", "program"
    renamed = partial(scaled_rank)
    for method, says in (
        (inner, "inner is defined inside another function"),
        (lambda worker: 1, "<lambda> is a lambda"),
        (program, "__main__:program is in the program itself"),
        (renamed, "cannot travel"),
        (3, "3 cannot travel"),
    ):
        with pytest.raises(ConfigError, match=says):
            method_name(method)


def test_a_function_that_is_not_what_its_name_says_is_refused():
    def stranger(worker): ...

    stranger.__module__, stranger.__qualname__ = scaled_rank.__module__, "scaled_rank"
    with pytest.raises(ConfigError, match="is another object when imported"):
        method_name(stranger)
    stranger.__qualname__ = "no_such_function"
    with pytest.raises(ConfigError, match="cannot be imported"):
        method_name(stranger)


@pytest.mark.parametrize("name", ["missing", "rank", "_private", "__init__"])
def test_only_public_methods_can_be_called(name):
    with pytest.raises(AttributeError, match=f"the worker has no method '{name}'"):
        bind_method(Worker(), name)
