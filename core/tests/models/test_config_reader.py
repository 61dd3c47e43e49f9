from __future__ import annotations

import pytest

from fourfold.errors import ConfigError
from fourfold.models.config_reader import ConfigReader
from fourfold.models.families import describe_llama


def test_numbers_out_of_range_are_refused() -> None:
    reader = ConfigReader({"size": 2**31, "epsilon": -1, "theta": 0})
    with pytest.raises(ConfigError, match="size: 2147483648; 2147483647 at most"):
        reader.integer("size")
    for key in ("epsilon", "theta"):
        with pytest.raises(ConfigError, match=f"{key}: .*; a number above 0"):
            reader.positive(key)
    assert reader.positive("absent", 1.5) == 1.5


def test_a_number_of_layers_beyond_reason_is_refused_before_it_takes_memory() -> None:
    with pytest.raises(ConfigError, match="num_hidden_layers: 1000000000; 4096 at most"):
        describe_llama({"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 10**9})
