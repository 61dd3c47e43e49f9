"""The kit cannot be cheated, and its waivers are strict."""

from __future__ import annotations

from typing import ClassVar

import pytest

from fourfold.testing.conformance import Conformance
from fourfold.testing.executor import ExecutorConformance

pytest_plugins = ["pytester"]


def test_a_conformance_test_cannot_be_replaced():
    with pytest.raises(TypeError, match="Cheat replaces test_arguments_reach_every_rank; waive"):

        class Cheat(ExecutorConformance):
            def test_arguments_reach_every_rank(self): ...


def test_a_waiver_names_a_test_that_is_there():
    with pytest.raises(TypeError, match="Typo waives test_nope, which is no test of it"):

        class Typo(ExecutorConformance):
            waivers: ClassVar = {"test_nope": "no such test"}


def test_a_waived_test_that_passes_is_a_failure(pytester):
    pytester.makepyfile(
        """
        from fourfold.testing.conformance import Conformance

        class Kit(Conformance):
            def test_right(self):
                assert True

            def test_wrong(self):
                assert False

        class TestMine(Kit):
            waivers = {"test_right": "thought to be broken", "test_wrong": "not yet"}
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-W", "ignore")
    result.assert_outcomes(xfailed=1, failed=1)
    result.stdout.fnmatch_lines(["*XPASS(strict)*thought to be broken*"])


def test_tests_may_be_added():
    class More(Conformance):
        waivers: ClassVar = {"test_mine": "not yet"}

        def test_mine(self): ...

    assert More.waivers
