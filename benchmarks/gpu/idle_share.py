"""What the device does in decode steps of 1, 64 and 256 requests, from a profiler's trace: idle share and kernels.

For ours alone. The profiler slows the host down, so the idle share that it shows is an upper bound.
"""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from pathlib import Path

from engines import Ours
from figure import run_alone
from large_step import step_intervals
from workload import equal_prompts

BATCHES, STEPS = (1, 64, 256), 40


def measure(engine: Ours) -> dict[str, float]:
    """Shares and times of the middle steps of the traces; prints the kernels that take most."""
    return {name: value for batch in BATCHES for name, value in _measure_one(engine, batch).items()}


def _measure_one(engine: Ours, batch: int) -> dict[str, float]:
    plain = step_intervals(engine, equal_prompts(batch, 128, 11), STEPS)
    with tempfile.TemporaryDirectory() as folder:
        engine.llm.start_profile(folder)
        step_intervals(engine, equal_prompts(batch, 128, 12), STEPS)
        [path] = engine.llm.stop_profile()
        events = json.loads(Path(path).read_text())["traceEvents"]
    work = sorted(
        (event["ts"], event["ts"] + event["dur"], event["name"])
        for event in events
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    )
    # The prompts come first; the last steps bring less and less. Between them nothing but decode steps runs.
    first, last = work[0][0], work[-1][1]
    window = first + 0.4 * (last - first), first + 0.95 * (last - first)
    inside = [event for event in work if window[0] <= event[0] and event[1] <= window[1]]
    busy, reached, by_name = 0.0, window[0], defaultdict(lambda: [0, 0.0])
    for start, end, name in inside:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
        by_name[name][0] += 1
        by_name[name][1] += end - start
    idle = 1 - busy / (inside[-1][1] - inside[0][0])
    print(f"batch {batch}: device busy {busy:.0f} us of {inside[-1][1] - inside[0][0]:.0f} us; kernels that take most:")
    for name, (count, microseconds) in sorted(by_name.items(), key=lambda item: -item[1][1])[:14]:
        print(f"  {microseconds / busy:6.1%} {microseconds / count:8.1f} us x {count:5}  {name[:110]}")
    middle = sorted(plain)[len(plain) // 2]
    return {f"idle_share_{batch}": idle, f"watched_step_{batch}_ms": 1e3 * middle}


if __name__ == "__main__":
    run_alone(measure)
