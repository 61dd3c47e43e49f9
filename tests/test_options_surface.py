"""The command line is a promise: an option appears, changes its name or goes only together with this list."""

from __future__ import annotations

from fourfold.config.engine_config import EngineConfig
from fourfold.config.options import OptionSet
from fourfold_server.config import ServerConfig

ENGINE_OPTIONS = {
    "--all-to-all",
    "--attention",
    "--block-size",
    "--chat-template",
    "--cluster-secret",
    "--comm",
    "--data-parallel-address",
    "--data-parallel-backend",
    "--data-parallel-external-lb",
    "--data-parallel-hybrid-lb",
    "--data-parallel-rank",
    "--data-parallel-rpc-port",
    "--data-parallel-size",
    "--data-parallel-size-local",
    "--data-parallel-start-rank",
    "--debug-collectives",
    "--dbo-decode-tokens",
    "--dbo-prefill-tokens",
    "--drain-timeout",
    "--dtype",
    "--enable-dbo",
    "--enable-expert-parallel",
    "--enable-lora",
    "--enforce-eager",
    "--executor",
    "--expert-placement",
    "--experts",
    "--gpu-memory-utilization",
    "--headless",
    "--kv-cache-dtype",
    "--kv-cache-memory",
    "--linear-method",
    "--load-balancer",
    "--load-format",
    "--master-address",
    "--master-port",
    "--lockstep-meeting",
    "--max-in-flight",
    "--max-lora-rank",
    "--max-loras",
    "--max-model-len",
    "--max-num-batched-tokens",
    "--max-num-seqs",
    "--max-num-waiting",
    "--model",
    "--nnodes",
    "--node-interface",
    "--node-rank",
    "--num-blocks",
    "--operators",
    "--parallel-layer",
    "--pipeline-parallel-size",
    "--pipeline-partition",
    "--prefix-caching",
    "--rebalancer",
    "--revision",
    "--rpc-timeout",
    "--scheduler",
    "--seed",
    "--self-test-timeout",
    "--served-model-name",
    "--stall-timeout",
    "--startup-timeout",
    "--tensor-parallel-size",
    "--tokenizer",
}


def test_engine_options_are_these() -> None:
    assert {option.flag for option in OptionSet((EngineConfig,)).options.values()} == ENGINE_OPTIONS


def test_server_options_clash_with_none() -> None:
    both = OptionSet((EngineConfig, ServerConfig))
    assert {option.flag for option in both.options.values()} > ENGINE_OPTIONS
