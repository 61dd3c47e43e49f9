"""Fingerprints of ranks: what must be equal, and how a difference is told."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from fourfold.config.options import build_engine_config
from fourfold.errors import ConfigError, PluginError
from fourfold.manifest import Fingerprint, compare, compare_all, fingerprint, shaping_keys
from fourfold.offers import Origin

ROWS = (
    Origin(plugin="core", distribution="fourfold-core", version="0.1.0"),
    Origin(plugin="x", distribution="dist-x", version="1.0"),
)


def of(rank, rows=ROWS, node="node-a", **options):
    return msgspec.structs.replace(fingerprint(build_engine_config(**options), rows, rank=rank), node=node)


def test_equal_ranks_pass_and_fingerprints_travel():
    first = of(0)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(first), type=Fingerprint) == first
    compare_all([first, of(1, node="node-b"), of(2, rows=ROWS[::-1])])


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (ROWS[:1], r"rank 3 on node-b has nothing as plugin 'x', and rank 0 on node-a has dist-x 1.0"),
        (
            (ROWS[0], dataclasses.replace(ROWS[1], version="1.1")),
            r"rank 3 on node-b has dist-x 1.1 as plugin 'x', and rank 0 on node-a has dist-x 1.0; install the same",
        ),
    ],
)
def test_differing_plugins_are_refused_with_node_rank_and_both_versions(rows, says):
    with pytest.raises(PluginError, match=says):
        compare_all([of(0), of(1), of(3, rows=rows, node="node-b")])


def test_a_differing_key_is_refused_with_both_values():
    with pytest.raises(ConfigError, match=r"rank 1 on node-b has cache\.block_size = 32, and rank 0 on node-a has 16"):
        compare(of(0), of(1, node="node-b", block_size=32))


def test_what_shapes_nothing_may_differ():
    compare(of(0), of(1, served_model_name="other", drain_timeout=1, kv_cache_memory="1GiB"))


def test_every_config_key_is_compared_or_local_on_purpose():
    keys = shaping_keys(build_engine_config())
    assert "parallel.tensor_parallel_size" in keys
    assert "model.dtype" in keys
    assert "cache.num_blocks" in keys
    assert "timeouts.rpc_timeout" not in keys
