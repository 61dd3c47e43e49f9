"""Tables of cosines and sines for rotary embeddings, in the arithmetic of the models' reference code."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from fourfold.models.description import RotaryDescription


def rotary_table(rotary: RotaryDescription, length: int, device: torch.device) -> torch.Tensor:
    """fp32 [length, dim]: the cosines of each position, then its sines, dim / 2 each (rotate-half convention).

    ``dynamic`` takes its base from ``length``, the longest sequence that will be served: the table equals the reference
    code's for one sequence of that length, and all positions of all requests share it. Up to the length of training
    that is the unscaled table.
    """
    # fp32 throughout, as the reference code: a more exact angle would differ from what the model saw in training.
    positions = torch.arange(length, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(rotary, length))
    factor = rotary.attention_factor
    return torch.cat((angles.cos() * factor, angles.sin() * factor), dim=-1).to(device)


def inverse_frequencies(rotary: RotaryDescription, length: int) -> torch.Tensor:
    """fp32 [dim / 2]: radians a position for each rotated pair."""
    if rotary.kind == "linear":
        return _frequencies(rotary.theta, rotary.dim) / rotary.factor
    if rotary.kind == "dynamic":
        return _frequencies(_dynamic_base(rotary, length), rotary.dim)
    if rotary.kind == "yarn":
        return _yarn(rotary)
    if rotary.kind == "llama3":
        return _llama3(rotary)
    return _frequencies(rotary.theta, rotary.dim)


def _frequencies(theta: float, dim: int) -> torch.Tensor:
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def _dynamic_base(rotary: RotaryDescription, length: int) -> float:
    stretch = max(length, rotary.original_max_position) / rotary.original_max_position
    growth = rotary.factor * stretch - (rotary.factor - 1)
    return float(rotary.theta * growth ** (rotary.dim / (rotary.dim - 2)))


def _yarn(rotary: RotaryDescription) -> torch.Tensor:
    """Interpolate slow dimensions, keep fast ones, ramp between (Peng et al., 2023, section 3.2)."""
    low = _dimension_of(rotary.beta_fast, rotary)
    high = _dimension_of(rotary.beta_slow, rotary)
    if rotary.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary.dim - 1)
    if low == high:
        high += 0.001  # a ramp of no width would divide by zero
    steps = torch.arange(rotary.dim // 2, dtype=torch.float32)
    kept = 1 - ((steps - low) / (high - low)).clamp(0, 1)
    frequencies = _frequencies(rotary.theta, rotary.dim)
    return frequencies / rotary.factor * (1 - kept) + frequencies * kept


def _dimension_of(rotations: float, rotary: RotaryDescription) -> float:
    """The dimension that turns ``rotations`` times over the length of training."""
    turns = rotary.original_max_position / (rotations * 2 * math.pi)
    return rotary.dim * math.log(turns) / (2 * math.log(rotary.theta))


def _llama3(rotary: RotaryDescription) -> torch.Tensor:
    """Divide slow dimensions by the factor, keep fast ones, blend between by wavelength."""
    frequencies = _frequencies(rotary.theta, rotary.dim)
    turns = rotary.original_max_position * frequencies / (2 * math.pi)
    blend = (turns - rotary.low_freq_factor) / (rotary.high_freq_factor - rotary.low_freq_factor)
    blend = blend.clamp(0, 1)
    return (1 - blend) * frequencies / rotary.factor + blend * frequencies
