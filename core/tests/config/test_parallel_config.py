from __future__ import annotations

import pytest

from fourfold.config.parallel_config import ParallelConfig
from fourfold.errors import ConfigError


@pytest.mark.parametrize(
    ("partition", "message"),
    [
        ("7,8,8", r"'7,8,8', for 3 stages, and --pipeline-parallel-size is 4; give 4 numbers, as in 8,8,8,8"),
        ("7,8,0,15", r"'7,8,0,15', and stage 2 would hold no layer; 1 or more each"),
        ("7,8,8,-7", r"'7,8,8,-7'; give the layers of each stage, as in 8,8,8,8, or auto or auto:measure"),
        ("even", r"'even'; give the layers of each stage"),
        ("", r"''; give the layers of each stage"),
        ("7,8,8,", r"'7,8,8,'; give the layers of each stage"),
    ],
)
def test_a_partition_that_cannot_be_says_what_would_do(partition: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"--pipeline-partition is {message}"):
        ParallelConfig(pipeline_parallel_size=4, pipeline_partition=partition)


def test_layers_of_stages() -> None:
    config = ParallelConfig(pipeline_parallel_size=4, pipeline_partition="7, 8,8,7")
    assert config.layers_of_stages == (7, 8, 8, 7)
    assert ParallelConfig(pipeline_parallel_size=4, pipeline_partition="auto").layers_of_stages is None
    assert ParallelConfig(pipeline_parallel_size=4, pipeline_partition="auto:measure").layers_of_stages is None


def test_more_replicas_than_anybody_means_are_refused() -> None:
    with pytest.raises(ConfigError, match="--data-parallel-size is 100000; 1024 at most"):
        ParallelConfig(data_parallel_size=100_000)
