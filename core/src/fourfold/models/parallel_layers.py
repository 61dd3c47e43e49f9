"""Builds parallel layers of any kind for one rank, from the installed offers and the names of ``--parallel-layer``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, get_args

from fourfold.contracts.parallel_layer import LayerKind
from fourfold.entries import ParallelLayerContext
from fourfold.errors import ConfigError
from fourfold.layers.backends import build_backend

if TYPE_CHECKING:
    import torch

    from fourfold.config.engine_config import EngineConfig
    from fourfold.contracts.linear_method import LinearMethod
    from fourfold.contracts.parallel_layer import ParallelLayer
    from fourfold.contracts.step_part import StepPart
    from fourfold.distributed.group_coordinator import GroupCoordinator
    from fourfold.entries import ParallelLayerEntry
    from fourfold.plugins import PluginRegistry

_SUMMED: Final = ("row", "moe")
_ADAPTED: Final = ("column", "row", "merged_column", "qkv", "latent_qkv")


class ParallelLayerFactory:
    """Knows the rank and the linear method; each call adds the shape of one layer."""

    def __init__(
        self,
        config: EngineConfig,
        registry: PluginRegistry,
        group: GroupCoordinator,
        linear_method: LinearMethod,
        *,
        device: torch.device,
        dtype: torch.dtype,
        adapted_method: LinearMethod | None = None,
        shared: dict[str, StepPart] | None = None,
    ) -> None:
        """``adapted_method`` is for layers that LoRA adapters may change; by default it is ``linear_method`` too.

        ``shared`` is filled with what the layers have in common.
        """
        self._config = config
        self._group = group
        self._linear_method = linear_method
        self._adapted_method = adapted_method or linear_method
        self._device = device
        self._dtype = dtype
        self._shared = {} if shared is None else shared
        self._names = names_by_kind(config.backends.parallel_layer)
        self._entries = registry.parallel_layers()
        self.chosen: dict[str, str] = {}
        """Chosen name of each kind that was built."""

    def build(
        self, kind: LayerKind, in_features: int, out_sizes: tuple[int, ...], *, bias: bool = False, **special: Any
    ) -> ParallelLayer:
        """A layer of whole sizes ``in_features`` and ``out_sizes``, cut for this rank."""
        context = ParallelLayerContext(
            config=self._config,
            device=self._device,
            dtype=self._dtype,
            rank=self._group.rank,
            world_size=self._group.world_size,
            communicator=self._group.communicator,
            linear_method=self._adapted_method if kind in _ADAPTED else self._linear_method,
            in_features=in_features,
            out_sizes=out_sizes,
            bias=bias,
            shared=self._shared,
            **special,
        )
        entries = {entry.name: entry for (of_kind, _), entry in self._entries.items() if of_kind == kind}
        wanted = self.chosen.get(kind) or self._names.get(kind) or self._names.get("", "auto")
        layer: ParallelLayer
        self.chosen[kind], layer = build_backend(
            f"{kind} parallel layer", entries, wanted, self._config, lambda entry: entry.build(context)
        )
        self._check(kind, entries[self.chosen[kind]])
        return layer

    def _check(self, kind: LayerKind, entry: ParallelLayerEntry) -> None:
        """Refuse a layer that cannot do what the options ask for."""
        parallel = self._config.parallel
        asked = {
            "expert_parallel": ("--enable-expert-parallel", kind == "moe" and parallel.enable_expert_parallel),
            "microbatches": ("--enable-dbo", kind in _SUMMED and parallel.enable_dbo and self._group.world_size > 1),
        }
        for capability, (option, applies) in asked.items():
            if applies and capability not in entry.capabilities:
                raise ConfigError(
                    f"{option} is given, and {kind} parallel layer {entry.name!r} has not the capability {capability}; "
                    f"install a plugin that offers one with it, or leave {kind}=... out of --parallel-layer"
                )


def names_by_kind(option: str) -> dict[str, str]:
    """``tp`` -> {"": "tp"}; ``moe=ep,qkv=tp`` -> {"moe": "ep", "qkv": "tp"}; the empty kind stands for all others."""
    names: dict[str, str] = {}
    for item in option.split(","):
        kind, equals, name = item.partition("=")
        if not equals:
            kind, name = "", item
        kind, name = kind.strip(), name.strip()
        if kind and kind not in get_args(LayerKind):
            raise ConfigError(
                f"--parallel-layer names kind {kind!r}; there are {', '.join(get_args(LayerKind))}, as in moe=ep"
            )
        if not name or kind in names:
            raise ConfigError(f"--parallel-layer is {option!r}; one name, or one a kind as in moe=ep,qkv=tp")
        names[kind] = name
    return names
