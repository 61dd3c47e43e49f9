"""Core's own torch backends pass the kit that others are held to."""

from __future__ import annotations

from fourfold.testing.attention import AttentionConformance
from fourfold.testing.experts import ExpertsConformance
from fourfold.testing.linear_method import LinearMethodConformance
from fourfold.testing.operators import OperatorsConformance


class TestTorchLinear(LinearMethodConformance):
    name = "torch"


class TestTorchOperators(OperatorsConformance):
    name = "torch"


class TestTorchAttention(AttentionConformance):
    name = "torch"


class TestLoopExperts(ExpertsConformance):
    name = "loop"


class TestGroupedExperts(ExpertsConformance):
    name = "grouped"
    dtypes = ("bfloat16",)
