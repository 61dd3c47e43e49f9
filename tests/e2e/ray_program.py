"""A user's program: two ranks in the Ray cluster that it runs in. Prints the executor, then an answer.

``python ray_program.py CPUS``: connect to a new cluster of so many first, in a running event loop, as a notebook does.
"""

from __future__ import annotations

import asyncio
import sys

from fourfold import LLM, SamplingParams


def main() -> None:
    if len(sys.argv) > 1:
        import ray

        ray.init(num_cpus=int(sys.argv[1]), include_dashboard=False, log_to_driver=False)
        asyncio.run(cell())
        print("still connected" if ray.is_initialized() else "no longer connected")
    else:
        answer()


async def cell() -> None:
    answer()


def answer() -> None:
    with LLM("smollm2", dtype="float32", tensor_parallel_size=2) as llm:
        print(llm._ready.backends["executor"])
        greedy = SamplingParams(temperature=0, max_tokens=4)
        print(llm.generate("The capital of France is", greedy)[0].outputs[0].text.strip())


if __name__ == "__main__":
    main()
