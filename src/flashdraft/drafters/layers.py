"""Building blocks that draft networks share: RMSNorm, rotary embeddings, SwiGLU."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..types import FlashdraftError


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension; the mean is taken in fp32 (fp64 stays fp64)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) (arXiv 2002.05202)."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


def rope_frequencies(rope: Mapping[str, Any], dim: int, max_context: int) -> tuple[torch.Tensor, float]:
    """Inverse frequencies [dim / 2] fp32 and the factor on cos and sin, for a `rope_parameters` map.

    Types: default, linear, llama3 (Llama 3.1), yarn (arXiv 2309.00071).
    """
    kind = rope.get("rope_type", "default")
    base = float(rope["rope_theta"])
    frequencies = 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if kind == "default":
        return frequencies, 1.0
    if kind not in ("linear", "llama3", "yarn"):
        raise FlashdraftError(f"rope_type is {kind!r}; expected default, linear, llama3 or yarn.")
    factor = float(rope["factor"])
    if kind == "linear":
        return frequencies / factor, 1.0
    original = float(rope.get("original_max_position_embeddings") or max_context)
    if kind == "llama3":
        return _llama3_frequencies(frequencies, rope, factor, original), 1.0
    return _yarn_frequencies(rope, factor, original, dim)


def _llama3_frequencies(
    frequencies: torch.Tensor, rope: Mapping[str, Any], factor: float, original: float
) -> torch.Tensor:
    """Long waves are slowed by `factor`, short ones kept, those between blended."""
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    waves = 2 * math.pi / frequencies
    blend = ((original / waves - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * frequencies / factor + blend * frequencies


def _yarn_frequencies(rope: Mapping[str, Any], factor: float, original: float, dim: int) -> tuple[torch.Tensor, float]:
    """NTK by parts, and the attention temperature folded into cos and sin (YaRN, section 3)."""
    base = float(rope["rope_theta"])

    def dimension(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = dimension(float(rope.get("beta_fast") or 32))
    high = dimension(float(rope.get("beta_slow") or 1))
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / ((high - low) or 0.001)).clamp(0, 1)
    # This order of operations is the public code's, to the last bit.
    powers = base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    kept = 1 - ramp
    mixed = 1.0 / (factor * powers) * (1 - kept) + 1.0 / powers * kept

    def temperature(scale: float, weight: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0

    given = rope.get("attention_factor")
    if given is not None:
        return mixed, float(given)
    mscale, all_dims = rope.get("mscale"), rope.get("mscale_all_dim")
    if mscale and all_dims:
        return mixed, temperature(factor, mscale) / temperature(factor, all_dims)
    return mixed, temperature(factor)


class RotaryEmbedding(nn.Module):
    """Rotates pairs (i, i + d/2) of every head by the angle position * frequency_i."""

    inv_freq: torch.Tensor

    def __init__(self, rope: Mapping[str, Any], dim: int, max_context: int) -> None:
        super().__init__()
        frequencies, self.factor = rope_frequencies(rope, dim, max_context)
        self.register_buffer("inv_freq", frequencies, persistent=False)

    def _apply(self, fn: Any, recurse: bool = True) -> RotaryEmbedding:
        """Angles of long contexts need fp32: `.to(bfloat16)` moves the table but keeps its type."""
        kept = self.inv_freq
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.inv_freq = kept.to(self.inv_freq.device)
        return self

    def table(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin) of positions [...], each [..., d], computed in fp32 and cast."""
        angles = positions[..., None].float() * self.inv_freq
        angles = torch.cat([angles, angles], dim=-1)
        return (angles.cos() * self.factor).to(dtype), (angles.sin() * self.factor).to(dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply a rotary table; cos and sin broadcast against x on all but the last dimension."""
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * cos + turned * sin
