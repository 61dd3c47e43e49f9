"""Loaded by every pytest of the environment: shows values in failed conformance tests, and applies waivers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from fourfold.testing.ranks import RankPool

pytest.register_assert_rewrite(
    *(
        f"fourfold.testing.{module}"
        for module in (
            "all_to_all",
            "all_to_all_cases",
            "attention",
            "communicator",
            "communicator_cases",
            "executor",
            "expert_choosing",
            "experts",
            "linear_method",
            "moe",
            "moe_cases",
            "operators",
        )
    )
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Turn each waiver into a strict xfail with its reason."""
    for item in items:
        waivers: dict[str, str] = getattr(getattr(item, "cls", None), "waivers", {})
        reason = waivers.get(getattr(item, "originalname", item.name))
        if reason is not None:
            item.add_marker(pytest.mark.xfail(reason=reason, strict=True))


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[Callable[[int], RankPool]]:
    """Processes to run functions on, by number of ranks; shared by the tests of a session, one test at a time."""
    from fourfold.testing.ranks import RankPool

    pools: dict[int, RankPool] = {}

    def pool(world_size: int) -> RankPool:
        return pools.setdefault(world_size, RankPool(world_size))

    yield pool
    for one in pools.values():
        one.close()
