"""Two stages of two ranks over the nodes of a Ray cluster: prints the answer to a golden prompt, then how it ends."""

from __future__ import annotations

import json
import sys
import time

from fourfold import LLM, SamplingParams
from fourfold.errors import EngineError


def main() -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=4)
    with LLM("smollm2", dtype="float32", executor="ray", tensor_parallel_size=2, pipeline_parallel_size=2) as llm:
        text = llm.generate("The capital of France is", greedy)[0].outputs[0].text
        print(json.dumps({"text": text, "comm": llm._ready.backends["comm"]}), flush=True)
        if sys.stdin.readline() == "go on\n":
            print("going on", flush=True)
            last = time.monotonic()
            try:
                while True:
                    llm.generate("The capital of France is", greedy)
                    last = time.monotonic()
            except EngineError as error:
                print(json.dumps({"error": str(error), "seconds": time.monotonic() - last}), flush=True)


if __name__ == "__main__":
    main()
