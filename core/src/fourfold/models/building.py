"""Builds one rank's part of a decoder from a description, and says which layer takes which checkpoint tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch

from fourfold.contracts.attention_backend import AttentionSpec
from fourfold.contracts.operators import Foresight
from fourfold.contracts.parallel_layer import SummedLayer
from fourfold.entries import AttentionContext, ComputeContext
from fourfold.errors import Unsupported
from fourfold.layers.backends import build_backend, log_passed_over
from fourfold.layers.latent_attention import ValueOutput
from fourfold.layers.lora_linear import LoraLinearMethod
from fourfold.layers.partition import cut_heads
from fourfold.layers.rotary import rotary_table
from fourfold.layers.weight_memory import WeightMemory
from fourfold.layers.whole_norm import WholeNorm
from fourfold.models.adapters import AdapterSlots, AdapterTarget
from fourfold.models.decoder import Decoder
from fourfold.models.decoder_layer import DecoderLayer, HeadNorm, LayerParts
from fourfold.models.expertless_stage import first_step_parts
from fourfold.models.feed_forward import DenseFeedForward
from fourfold.models.latent_tensors import latent_tensors
from fourfold.models.mixture_tensors import mixture_tensors
from fourfold.models.norm_weight import NormWeight
from fourfold.models.parallel_layers import ParallelLayerFactory
from fourfold.models.summing_norm import find_summing_norm
from fourfold.models.tensor_table import EMBEDDING, FINAL_NORM, HEAD, layer_prefix
from fourfold.selection import AUTO

if TYPE_CHECKING:
    from fourfold.config.engine_config import EngineConfig
    from fourfold.contracts.attention_backend import AttentionBackend
    from fourfold.contracts.linear_method import LinearMethod
    from fourfold.contracts.operators import Operators
    from fourfold.contracts.parallel_layer import (
        HeadLayer,
        LatentLayer,
        MixtureLayer,
        ParallelLayer,
        TensorSlices,
        VocabularyLayer,
    )
    from fourfold.distributed.group_coordinator import GroupCoordinator
    from fourfold.entries import Entry
    from fourfold.models.description import ModelDescription
    from fourfold.models.stage_partition import Stage
    from fourfold.models.summing_norm import SummingNorm
    from fourfold.plugins import PluginRegistry

Load = Callable[["TensorSlices"], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltDecoder:
    """A decoder, and who takes its weights."""

    decoder: Decoder
    parameters: dict[str, Load]
    """Checkpoint tensor name -> takes this rank's part of it."""
    linear_method: LinearMethod
    """Holds the weights of all linear layers."""
    weight_memory: WeightMemory | None
    """Holds those of experts and of latents; None where there are none."""
    adapters: AdapterSlots | None
    """None where --enable-lora is not given."""


class DecoderBuilder:
    """Builds one rank's decoder, once."""

    def __init__(
        self,
        description: ModelDescription,
        config: EngineConfig,
        registry: PluginRegistry,
        group: GroupCoordinator,
        *,
        expert_group: GroupCoordinator,
        stage: Stage,
        device: torch.device,
        dtype: torch.dtype,
        rank: int = 0,
    ) -> None:
        self._description = description
        self._stage = stage
        self._group = group
        self._expert_group = expert_group
        self._config = config
        self._registry = registry
        self._device = device
        self._dtype = self._kv_cache_dtype = dtype
        self._caches_latents = False
        self._cut = cut_heads(description.num_heads, description.num_kv_heads, group.rank, group.world_size)
        self._chosen: dict[str, str] = {}
        """Option -> the backend that was taken for it."""
        self._method, self._operators, self._attentions = self._choose_backends(rank)
        enabled = config.lora.enable_lora
        self._lora = LoraLinearMethod(self._method, device=device, dtype=dtype) if enabled else None
        self._shared = first_step_parts(description, stage, group, expert_group)
        """What layers have in common."""
        self._factory = ParallelLayerFactory(
            config,
            registry,
            group,
            self._method,
            device=device,
            dtype=dtype,
            adapted_method=self._lora,
            shared=self._shared,
        )
        self._parameters: dict[str, Load] = {}
        self._summing_norm: SummingNorm | None = None
        self._targets: dict[str, AdapterTarget] = {}
        self._weight_memory = None if description.mixture is None else WeightMemory(device)

    def build(self) -> BuiltDecoder:
        """Allocate everything."""
        d, stage = self._description, self._stage
        embedding = self._build_embedding() if stage.is_first else None
        length = self._config.model.max_model_len or d.max_model_len
        tables = [rotary_table(rotary, length, self._device) for rotary in d.rotaries]
        if not d.sandwich_norms and d.norm_offset == 0:
            self._summing_norm = find_summing_norm(
                self._group,
                hidden_size=d.hidden_size,
                epsilon=d.norm_epsilon,
                dtype=self._dtype,
                device=self._device,
            )
        layers = [
            self._build_layer(layer, attention, tables) for layer, attention in zip(stage.layers, self._attentions)
        ]
        final_norm = self._norm(FINAL_NORM, d.hidden_size) if stage.is_last else None
        head = self._build_head(embedding) if stage.is_last else None
        layer_names = sorted(set(self._factory.chosen.values()))
        decoder = Decoder(
            d,
            stage=stage,
            embedding=embedding,
            layers=layers,
            final_norm=final_norm,
            head=head,
            operators=self._operators,
            backends={**self._chosen, "parallel_layer": ",".join(layer_names)},
            dtype=self._dtype,
            kv_cache_dtype=self._kv_cache_dtype,
            block_size=self._config.cache.block_size,
            step_parts=tuple(self._shared.values()),
        )
        return BuiltDecoder(
            decoder=decoder,
            parameters=self._parameters,
            linear_method=self._method,
            weight_memory=self._weight_memory,
            adapters=None if self._lora is None else AdapterSlots(self._lora, self._targets, self._parameters),
        )

    def _choose_backends(self, rank: int) -> tuple[LinearMethod, Operators, list[AttentionBackend]]:
        """Those of all layers, and of each layer's attention."""
        d, config, names = self._description, self._config, self._config.backends
        compute = ComputeContext(config=config, device=self._device, dtype=self._dtype, rank=rank)
        methods, operators = self._registry.linear_methods(), self._registry.operators()
        attentions = self._registry.attention_backends()
        self._chosen["linear_method"], method = build_backend(
            "linear method", methods, names.linear_method, config, lambda entry: entry.build(compute)
        )
        self._chosen["operators"], chosen_operators = build_backend(
            "operators", operators, names.operators, config, lambda entry: entry.build(compute)
        )
        self._chosen["attention"], chosen_attentions = build_backend(
            "attention backend", attentions, names.attention, config, self._build_attentions
        )
        log_passed_over(
            config,
            {
                "linear method": methods if names.linear_method == AUTO else {},
                "operators": operators if names.operators == AUTO else {},
                "attention backend": attentions if names.attention == AUTO else {},
            },
        )
        if isinstance(chosen_operators, Foresight):
            chosen_operators.expect(
                hidden_size=d.hidden_size,
                intermediate_size=-(-d.intermediate_size // self._group.world_size),
                activation=d.activation,
            )
        return method, chosen_operators, chosen_attentions

    def _build_embedding(self) -> VocabularyLayer:
        d = self._description
        embedding = cast("VocabularyLayer", self._factory.build("vocab_embedding", d.hidden_size, (d.vocab_size,)))
        self._take(EMBEDDING, embedding, "weight")
        return embedding

    def _build_head(self, embedding: VocabularyLayer | None) -> HeadLayer:
        """``embedding`` is None on another stage: a tied head has a copy of it then."""
        d = self._description
        shared = embedding.weight if d.tied_embeddings and embedding is not None else None
        head = cast("HeadLayer", self._factory.build("head", d.hidden_size, (d.vocab_size,), tied_weight=shared))
        if shared is None:
            self._take(EMBEDDING if d.tied_embeddings else HEAD, head, "weight")
        return head

    def _build_attentions(self, entry: Entry[Any]) -> list[AttentionBackend]:
        """One a layer of this stage, all from one entry."""
        if self._config.cache.kv_cache_dtype == "fp8" and "fp8_cache" not in entry.capabilities:
            raise Unsupported("it keeps no fp8 cache; --kv-cache-dtype auto needs none")
        d, latent = self._description, self._description.latent
        self._caches_latents = latent is not None and self._may_cache_latents(entry)
        backends: list[AttentionBackend] = []
        for layer in d.layers[self._stage.layers.start : self._stage.layers.stop]:
            rotary = None if layer.rotary is None else d.rotaries[layer.rotary]
            spec = AttentionSpec(
                num_heads=len(self._cut.heads),
                num_kv_heads=len(self._cut.kv_heads),
                group_sizes=self._cut.group_sizes,
                head_dim=d.head_dim,
                scale=d.attention_scale,
                sliding_window=layer.sliding_window,
                soft_cap=d.attention_soft_cap,
                rotary_dim=0 if rotary is None else rotary.dim,
                head_norms=d.query_key_norm,
            )
            if latent is not None and self._caches_latents:
                width = latent.rotary_dim + latent.kv_rank
                spec = replace(spec, num_kv_heads=1, group_sizes=(), head_dim=width, shared_values=True)
            context = AttentionContext(config=self._config, device=self._device, dtype=self._dtype, spec=spec)
            backend = entry.build(context)
            backend.kv_cache_shape(1, self._config.cache.block_size)  # refuses a block size that it cannot hold
            backends.append(backend)
            self._kv_cache_dtype = context.cache_dtype
        return backends

    def _may_cache_latents(self, entry: Entry[Any]) -> bool:
        """Whether attention is over latents. Adapters change how heads are made of them, so that it then is not."""
        able = "latent_cache" in entry.capabilities
        if not able and "latent_heads" not in entry.capabilities and self._config.backends.attention == AUTO:
            raise Unsupported("it keeps no latents; by name it is taken, and keeps whole heads")
        return able and not self._config.lora.enable_lora

    def _build_layer(self, layer: int, attention: AttentionBackend, tables: list[torch.Tensor]) -> DecoderLayer:
        d, prefix = self._description, layer_prefix(layer)
        rotary = d.layers[layer].rotary
        norm = partial(self._norm, size=d.hidden_size)
        after_attention = after_feed_forward = None
        if d.sandwich_norms:
            after_attention = norm(f"{prefix}post_attention_layernorm.weight")
            before_feed_forward = norm(f"{prefix}pre_feedforward_layernorm.weight")
            after_feed_forward = norm(f"{prefix}post_feedforward_layernorm.weight")
        else:
            before_feed_forward = norm(f"{prefix}post_attention_layernorm.weight")
        qkv = self._build_qkv(prefix)
        output = self._build_output(prefix, qkv)
        summing_norm = self._summing_norm if isinstance(output, SummedLayer) else None
        # What goes on to another stage is summed.
        leaves_sum = summing_norm is not None and layer + 1 in self._stage.layers and not d.layers[layer].mixture
        parts = LayerParts(
            qkv=qkv,
            output=output.part if summing_norm is not None and isinstance(output, SummedLayer) else output,
            feed_forward=self._build_feed_forward(layer, prefix, leaves_sum=leaves_sum),
            attention=attention,
            cos_sin=None if rotary is None else tables[rotary],
            head_norms=self._head_norms(prefix) if d.query_key_norm else (),
            row_steps=self._row_steps(prefix),
            head_dim=d.head_dim,
            input_norm=norm(f"{prefix}input_layernorm.weight"),
            attention_output_norm=after_attention,
            feed_forward_norm=before_feed_forward,
            feed_forward_output_norm=after_feed_forward,
            summing_norm=summing_norm,
            leaves_sum=leaves_sum,
        )
        return DecoderLayer(parts, self._operators, epsilon=d.norm_epsilon, weight_offset=d.norm_offset)

    def _build_qkv(self, prefix: str) -> ParallelLayer:
        d = self._description
        heads = (d.num_heads, d.num_kv_heads, d.head_dim)
        if d.latent is None:
            modules = {part: f"{prefix}self_attn.{part}_proj" for part in "qkv"}
            return self._linear("qkv", modules, (d.hidden_size, heads), bias=d.qkv_bias)
        layer = self._factory.build(
            "latent_qkv",
            d.hidden_size,
            heads,
            bias=d.qkv_bias,
            latent=d.latent,
            caches_latents=self._caches_latents,
            operators=self._operators,
            weight_memory=self._weight_memory,
        )
        for name, tensor in latent_tensors(d).items():
            self._take(prefix + name, layer, tensor.parameter)
            module, _, kind = (prefix + name).rpartition(".")
            if kind == "weight" and len(tensor.shape) == 2:
                self._targets[module] = AdapterTarget(load=partial(layer.load, tensor.parameter), cuts_inputs=False)
        return layer

    def _build_output(self, prefix: str, qkv: ParallelLayer) -> Callable[[torch.Tensor], torch.Tensor]:
        d = self._description
        output = self._linear(
            "row",
            {"": f"{prefix}self_attn.o_proj"},
            (d.num_heads * d.value_dim, (d.hidden_size,)),
            bias=d.output_bias,
            in_heads=(d.num_heads, d.num_kv_heads, d.value_dim),
        )
        return output if d.latent is None else ValueOutput(cast("LatentLayer", qkv), output)

    def _build_feed_forward(
        self, layer: int, prefix: str, *, leaves_sum: bool
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        d = self._description
        if d.layers[layer].mixture:
            return self._build_mixture(layer, prefix)
        gate_up = self._linear(
            "merged_column",
            {"0": f"{prefix}mlp.gate_proj", "1": f"{prefix}mlp.up_proj"},
            (d.hidden_size, (d.intermediate_size, d.intermediate_size)),
            bias=d.mlp_bias,
        )
        down = self._linear(
            "row", {"": f"{prefix}mlp.down_proj"}, (d.intermediate_size, (d.hidden_size,)), bias=d.mlp_bias
        )
        last = down.part if leaves_sum and isinstance(down, SummedLayer) else down
        return DenseFeedForward(gate_up, last, self._operators, d.activation)

    def _build_mixture(self, layer: int, prefix: str) -> MixtureLayer:
        d = self._description
        moe = self._factory.build(
            "moe",
            d.hidden_size,
            (d.hidden_size,),
            mixture=d.mixture,
            layer=layer,
            activation=d.activation,
            operators=self._operators,
            registry=self._registry,
            weight_memory=self._weight_memory,
            expert_group=self._expert_group,
        )
        for name, tensor in mixture_tensors(d).items():
            self._take(prefix + name, moe, tensor.parameter)
        mixture = cast("MixtureLayer", moe)
        self._chosen.update(mixture.backends)
        return mixture

    def _head_norms(self, prefix: str) -> tuple[HeadNorm, HeadNorm]:
        dim, cut = self._description.head_dim, self._cut
        queries = self._norm(f"{prefix}self_attn.q_norm.weight", dim)
        keys = self._norm(f"{prefix}self_attn.k_norm.weight", dim)
        return (
            HeadNorm(weight=queries, first_head=0, num_heads=len(cut.heads)),
            HeadNorm(weight=keys, first_head=len(cut.heads), num_heads=len(cut.kv_heads)),
        )

    def _row_steps(self, prefix: str) -> tuple[Callable[[torch.Tensor], object], ...]:
        d = self._description
        steps: list[Callable[[torch.Tensor], object]] = []
        if d.whole_query_key_norm:
            heads = (d.num_heads, d.num_kv_heads, d.head_dim)
            norm = WholeNorm(heads, self._group, epsilon=d.norm_epsilon, dtype=self._dtype, device=self._device)
            for part in "qk":
                self._take(f"{prefix}self_attn.{part}_norm.weight", norm, f"{part}.weight")
            steps.append(norm)
        if d.qkv_clip:
            steps.append(partial(torch.clamp_, min=-d.qkv_clip, max=d.qkv_clip))
        return tuple(steps)

    def _linear(
        self,
        kind: Any,
        modules: dict[str, str],
        sizes: tuple[int, tuple[int, ...]],
        *,
        bias: bool,
        in_heads: tuple[int, int, int] | None = None,
    ) -> ParallelLayer:
        """``modules``: the layer's own name of a part -> the checkpoint's name of it; ``sizes``: in and out."""
        layer = self._factory.build(kind, *sizes, bias=bias, in_heads=in_heads)
        for part, module in modules.items():
            own = f"{part}." if part else ""
            self._targets[module] = AdapterTarget(load=partial(layer.load, f"{own}weight"), cuts_inputs=kind == "row")
            for parameter in ("weight", "bias") if bias else ("weight",):
                self._take(f"{module}.{parameter}", layer, own + parameter)
        return layer

    def _norm(self, name: str, size: int) -> NormWeight:
        norm = NormWeight(size, dtype=self._dtype, device=self._device)
        self._take(name, norm, "weight")
        return norm

    def _take(self, name: str, layer: ParallelLayer | NormWeight | WholeNorm, parameter: str) -> None:
        self._parameters[name] = partial(layer.load, parameter)
