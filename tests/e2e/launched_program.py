"""What every rank of a launcher runs: ``launched_program.py MODEL OUT PROMPT [PROMPT OF RANK 1]``.

The variable CUT is the name of the option that says how the model is cut.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from fourfold import LLM, SamplingParams


def main() -> None:
    model, out, prompt, *others = sys.argv[1:]
    rank = int(os.environ["RANK"])
    llm = LLM(
        model,
        load_format="dummy",
        dtype="float32",
        executor="external",
        **{os.environ["CUT"]: int(os.environ["WORLD_SIZE"])},
        seed=3,
        # Ranks of one host may see different free memory; what they may use is what the poorest of them has.
        kv_cache_memory=(4 + rank) << 20,
        rpc_timeout=60,
    )
    with llm:
        texts = others if rank and others else [prompt]
        greedy = llm.generate([*texts, "b c"], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
        drawn = llm.generate(texts, SamplingParams(max_tokens=8, temperature=1, ignore_eos=True))
        ids = [result.outputs[0].token_ids for result in [*greedy, *drawn]]
        ready = llm._ready
        found = {"ids": ids, "blocks": ready.num_blocks, "comm": ready.backends["comm"]}
    Path(f"{out}.{rank}").write_text(json.dumps(found))


main()
