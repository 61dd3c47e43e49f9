"""Who norms the heads: the attention backend if it offers to, else the operators."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from fourfold.models.decoder_layer import DecoderLayer, HeadNorm, LayerParts

WEIGHTS = [SimpleNamespace(tensor=torch.ones(4)) for _ in range(4)]


def layer(attention, operators):
    parts = LayerParts(
        qkv=Mock(),
        output=Mock(),
        feed_forward=Mock(),
        attention=attention,
        cos_sin=None,
        head_norms=(
            HeadNorm(weight=WEIGHTS[0], first_head=0, num_heads=2),
            HeadNorm(weight=WEIGHTS[1], first_head=2, num_heads=1),
        ),
        head_dim=4,
        input_norm=WEIGHTS[2],
        attention_output_norm=None,
        feed_forward_norm=WEIGHTS[3],
        feed_forward_output_norm=None,
    )
    return DecoderLayer(parts, operators, epsilon=1e-6, weight_offset=1.0)


@pytest.fixture
def operators():
    return Mock(add_rms_norm=Mock(return_value=(Mock(), Mock())))


def test_a_backend_that_norms_heads_is_told_once_and_the_operators_are_not_asked(operators):
    attention = Mock(spec=["rotate_and_attend", "norm_heads"])
    one = layer(attention, operators)
    attention.norm_heads.assert_called_once_with(WEIGHTS[0].tensor, WEIGHTS[1].tensor, 1e-6, weight_offset=1.0)
    one(Mock(), Mock(), Mock(), Mock(), Mock())
    operators.head_rms_norm.assert_not_called()


def test_other_backends_get_rows_that_the_operators_normed(operators):
    one = layer(Mock(spec=["rotate_and_attend"]), operators)
    one(Mock(), Mock(), Mock(), Mock(), Mock())
    asked = [(call.kwargs["first_head"], call.kwargs["num_heads"]) for call in operators.head_rms_norm.call_args_list]
    assert asked == [(0, 2), (2, 1)]
