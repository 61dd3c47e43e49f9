"""Import and start on a bare machine: seconds, with no compiled kernel kept from before."""

from __future__ import annotations

from engines import Engine
from figure import run_alone


def measure(engine: Engine) -> dict[str, float]:
    """What building the engine took."""
    return {
        "import_s": engine.start_seconds["import"],
        "start_s": engine.start_seconds["start"],
        "import_and_start_s": sum(engine.start_seconds.values()),
    }


if __name__ == "__main__":
    run_alone(measure)
