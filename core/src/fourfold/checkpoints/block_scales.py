"""Weights stored in fp8 with a scale for each block, read as the numbers that they stand for. Imports torch lazily.

The format: DeepSeek-V3's ("DeepSeek-V3 Technical Report", 2024, section 3.3). Beside a weight [out, in] in e4m3 is its
``weight_scale_inv``, fp32 [out / rows, in / columns] rounded up; a number is the stored one times its block's scale.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from fourfold.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    import torch

    from fourfold.contracts.checkpoint import TensorReader
    from fourfold.contracts.parallel_layer import TensorSlices

SCALE_SUFFIX: Final = "_scale_inv"
"""What the scales of a weight are called, after its own name."""


class BlockSize(NamedTuple):
    """How much of a weight has one scale."""

    rows: int
    columns: int


def read_block_size(values: Mapping[str, Any]) -> BlockSize | None:
    """What a config.json says of it; None: weights are as they are. Raises ConfigError for other quantisation."""
    quantization = values.get("quantization_config")
    if not quantization:
        return None
    settings = quantization if isinstance(quantization, Mapping) else {"quant_method": quantization}
    method, block = settings.get("quant_method", "unknown"), settings.get("weight_block_size")
    sizes = block if isinstance(block, list) else []
    if method == "fp8" and len(sizes) == 2 and all(type(size) is int and size > 0 for size in sizes):
        return BlockSize(*sizes)
    raise ConfigError(
        f"config.json has quantization_config ({method}, weight_block_size {block!r:.100}); of quantised safetensors "
        "only fp8 with a scale a block is supported, use that, the unquantised model or a .gguf file"
    )


class BlockScaledReader:
    """A TensorReader over another one, whose scales it keeps to itself."""

    def __init__(self, inner: TensorReader, block: BlockSize) -> None:
        self._inner = inner
        self._block = block
        self._names = set(inner.names())

    def names(self) -> Iterable[str]:
        """Without those of scales."""
        return [name for name in self._names if not self._is_scale(name)]

    def tensor(self, name: str) -> TensorSlices:
        """Raises CheckpointError for a name that is not there, and for scales of another shape than the weight's."""
        if name + SCALE_SUFFIX not in self._names:
            return self._inner.tensor(name)
        scales = self._inner.tensor(name + SCALE_SUFFIX)
        stored = self._inner.tensor(name)
        wanted = tuple(-(-size // step) for size, step in zip(stored.shape, self._block))
        if len(stored.shape) != 2 or tuple(scales.shape) != wanted:
            raise CheckpointError(
                f"tensor {name} of shape {list(stored.shape)} has scales of shape {list(scales.shape)}; one for each "
                f"block of {self._block.rows} x {self._block.columns}"
            )
        return _ScaledSlices(stored, scales, self._block)

    def _is_scale(self, name: str) -> bool:
        return name.endswith(SCALE_SUFFIX) and name.removesuffix(SCALE_SUFFIX) in self._names


class _ScaledSlices:
    """A weight that is multiplied where it is indexed, in fp32."""

    def __init__(self, stored: TensorSlices, scales: TensorSlices, block: BlockSize) -> None:
        self._stored = stored
        self._scales = scales
        self._block = block

    @property
    def shape(self) -> Sequence[int]:
        """Of the weight."""
        return self._stored.shape

    def __getitem__(self, index: slice | tuple[slice, ...]) -> torch.Tensor:
        import torch

        given = index if isinstance(index, tuple) else (index,)
        bounds = [part.indices(size)[:2] for part, size in zip((*given, *[slice(None)] * 2), self.shape)]
        blocks, factors = [], []
        for (start, stop), step in zip(bounds, self._block):
            first = start // step
            blocks.append(slice(first, max(first, -(-stop // step))))
            factors.append(torch.arange(start, max(start, stop)) // step - first)
        scales = self._scales[tuple(blocks)].float()
        numbers = self._stored[tuple(slice(*bound) for bound in bounds)].float()
        return numbers.mul_(scales[factors[0]][:, factors[1]])
