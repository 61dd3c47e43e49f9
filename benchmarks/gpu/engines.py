"""The engines that are measured, behind one call; each is imported only when it is built, in a process of its own."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

MAX_MODEL_LEN = 4096
MEMORY_SHARE = 0.85


class Engine(Protocol):
    """What a figure needs."""

    start_seconds: dict[str, float]
    """``import`` and ``start``, in a process that had done nothing."""

    def generate(self, prompts: Sequence[Sequence[int]], counts: Sequence[int], temperature: float) -> float:
        """Seconds until every prompt has its count of tokens; none ends before."""


class Ours:
    """fourfold, offline, in this process."""

    def __init__(self, folder: Path, **options: Any) -> None:
        began = time.perf_counter()
        import torch  # noqa: F401 - counted as import

        from fourfold import LLM, SamplingParams

        imported = time.perf_counter()
        settings: dict[str, Any] = {
            "load_format": "dummy",
            "dtype": "bfloat16",
            "max_model_len": MAX_MODEL_LEN,
            "gpu_memory_utilization": MEMORY_SHARE,
            "max_num_seqs": 256,
            "max_num_batched_tokens": 16384,
            "prefix_caching": False,
        }
        self.llm = LLM(str(folder), **(settings | options))
        self._params = SamplingParams
        self.start_seconds = {"import": imported - began, "start": time.perf_counter() - imported}

    def generate(self, prompts: Sequence[Sequence[int]], counts: Sequence[int], temperature: float) -> float:
        """See Engine."""
        params = [self._params(temperature=temperature, max_tokens=count, ignore_eos=True) for count in counts]
        began = time.perf_counter()
        results = self.llm.generate(list(prompts), params)
        seconds = time.perf_counter() - began
        _check([len(result.outputs[0].token_ids) for result in results], counts)
        return seconds


class Peer:
    """vLLM, offline, with its defaults."""

    def __init__(self, folder: Path) -> None:
        for name, value in {
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
            "VLLM_USE_DEEP_GEMM": "0",
            "TVM_FFI_DISABLE_TORCH_C_DLPACK": "1",
            "VLLM_HOST_IP": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",
            "NCCL_SOCKET_IFNAME": "lo",
        }.items():
            os.environ.setdefault(name, value)
        began = time.perf_counter()
        from vllm import LLM, SamplingParams

        imported = time.perf_counter()
        self._llm = LLM(
            model=str(folder),
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            seed=0,
            max_model_len=MAX_MODEL_LEN,
            gpu_memory_utilization=MEMORY_SHARE,
            enable_prefix_caching=False,
            disable_log_stats=True,
        )
        self._params = SamplingParams
        self.start_seconds = {"import": imported - began, "start": time.perf_counter() - imported}

    def generate(self, prompts: Sequence[Sequence[int]], counts: Sequence[int], temperature: float) -> float:
        """See Engine."""
        params = [
            self._params(temperature=temperature, ignore_eos=True, max_tokens=count, detokenize=False)
            for count in counts
        ]
        work = [{"prompt_token_ids": prompt} for prompt in prompts]
        began = time.perf_counter()
        outputs = self._llm.generate(work, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        _check([len(output.outputs[0].token_ids) for output in outputs], counts)
        return seconds


def _check(found: list[int], wanted: Sequence[int]) -> None:
    if found != list(wanted):
        raise RuntimeError(f"the engine brought {sum(found)} tokens in place of {sum(wanted)}")
