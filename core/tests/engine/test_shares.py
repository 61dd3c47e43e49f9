"""What reports say of each API server's part, and of the prefix cache."""

from __future__ import annotations

from typing import Any

from fourfold.engine.prefix_cache import prompt_marks, read_marks


def test_each_api_server_has_its_share(toy_engine: Any) -> None:
    engine = toy_engine(max_num_seqs=2)
    for client in (0, 0, 1):
        engine.add([1, 2, 3, 4, 5], client=client, max_tokens=4, ignore_eos=True)
    assert engine.core.stats.shares == {0: (2, 18), 1: (1, 9)}
    engine.step()
    assert engine.core.stats.shares == {0: (2, 8), 1: (1, 9)}
    assert engine.core.stats.num_queued_tokens == 17
    engine.run()
    assert engine.core.stats.shares == {0: (0, 0), 1: (0, 0)}


def test_versions_grow_with_every_request_and_step(toy_engine: Any) -> None:
    engine = toy_engine(max_num_seqs=2)
    versions = [engine.core.stats.version]
    for _ in range(3):
        name = engine.add([1, 2, 3], max_tokens=3)
        versions.append(engine.core.stats.version)
    engine.step()
    versions.append(engine.core.stats.version)
    engine.core.abort([name])
    versions.append(engine.core.stats.version)
    while engine.core.has_work:
        engine.step()
        versions.append(engine.core.stats.version)
    assert versions == sorted(set(versions))


def test_marks_show_what_the_next_turn_will_find(toy_engine: Any) -> None:
    engine = toy_engine()
    prompt = list(range(1, 14))
    name = engine.add(prompt, max_tokens=6, ignore_eos=True)
    engine.run()
    said = prompt + engine.tokens(name)
    known = set(read_marks(engine.core.prefix_marks()).tolist())
    size = engine.core._scheduler._cache.block_size
    turn = prompt_marks([*said, 1], size, "").tolist()
    held = (len(said) - 1) // size
    assert turn[held - 1] in known
    assert not set(turn[held:]) & known
    assert not set(prompt_marks([*said, 1], size, "another salt").tolist()) & known
    engine.core.reset_prefix_cache()
    assert engine.core.prefix_marks() == b""
