"""A program that starts ranks in a cluster of its own, says where, and ends with its standard input."""

from __future__ import annotations

import sys

from conftest import make_context

from fourfold_executor_ray.executor import RayExecutor


def main() -> None:
    executor = RayExecutor(make_context(2))
    assert executor._driver is not None
    print(executor._driver.pid, executor._folder, flush=True)
    sys.stdin.read()
    executor.shutdown()


if __name__ == "__main__":
    main()
