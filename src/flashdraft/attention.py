"""The one attention path: ragged rows over a preallocated cache, for target and draft network.

Grouped-query attention folds the query heads of a group into the query length, so keys and values
are never repeated. Rows that are neighbours in the cache and read about the same number of slots
share one kernel call; nobody is padded to the slowest.

Shapes: q [B, heads, T, d], k and v [B, kv heads, T, d], result [B, T, heads, d].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .cache import KVCache, round_up
from .tree import ancestor_mask, depths


@dataclass(frozen=True)
class _Span:
    """Batch rows first..last, which are cache rows `row`.., all reading slots 0..num_slots."""

    first: int
    last: int
    row: int
    num_slots: int


class AttentionPlan:
    """Who reads what in one forward pass; masks are built once and shared by all layers.

    Args:
        cache: written at each row's length, cleared behind the pass; lengths are not changed here.
        rows: cache row of every batch row.
        num_tokens: T, the width of the pass.
        valid: per row, how many of the T tokens are real; the rest is padding, which real tokens
            never see. None: all of them.
        parents: per row, the tree of its valid tokens behind the first (tree.py): a token sees the
            context, its ancestors and itself, at the position its depth says. None: chains.
        num_before: how many of the tree's tokens, the root among them, earlier passes have written
            behind the length; `parents` then names theirs first.
    """

    def __init__(
        self,
        cache: KVCache,
        rows: Sequence[int],
        num_tokens: int,
        valid: Sequence[int] | None = None,
        parents: Sequence[Sequence[int]] | None = None,
        num_before: int = 0,
    ) -> None:
        self.cache = cache
        self.rows = list(rows)
        self.num_tokens = num_tokens
        self.num_before = num_before
        self.starts = [cache.lengths[row] for row in rows]
        if num_before:
            self.starts = [start + num_before for start in self.starts]
        self.valid = list(valid) if valid is not None else [num_tokens] * len(self.rows)
        assert all(start + num_tokens <= cache.slots for start in self.starts), "cache is too small"
        for row, start in zip(self.rows, self.starts, strict=True):
            cache.clear(row, start + num_tokens)
        self._spans = self._plan()
        self._masks: dict[tuple[object, ...], torch.Tensor] = {}
        self._tree = None if parents is None else _tree_tables(parents, num_before + num_tokens)

    def positions(self, device: torch.device | str) -> torch.Tensor:
        """Position of every token, int64 [B, T]."""
        starts = torch.tensor(self.starts, dtype=torch.int64, device=device)
        if self._tree is not None:
            return starts[:, None] - self.num_before + self._tree[0][:, self.num_before :].to(device)
        return starts[:, None] + torch.arange(self.num_tokens, dtype=torch.int64, device=device)

    def _plan(self) -> list[_Span]:
        spans: list[_Span] = []
        for b, (row, start) in enumerate(zip(self.rows, self.starts, strict=True)):
            num_slots = min(round_up(start + self.num_tokens), self.cache.slots)
            tail = spans[-1] if spans else None
            if tail and tail.row + (b - tail.first) == row and tail.num_slots == num_slots:
                spans[-1] = _Span(tail.first, b + 1, tail.row, num_slots)
            else:
                spans.append(_Span(b, b + 1, row, num_slots))
        return spans

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float | None = None,
        causal: bool = True,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write k and v into the cache and attend to everything before and with them.

        window: a token sees keys less than `window` positions away. softcap: scores pass
        through softcap * tanh(. / softcap) (Gemma 2). sinks [heads]: a logit per head that takes
        part in the softmax and has no value (gpt-oss).
        """
        self.cache.write(layer, self.rows, self.starts, k, v)
        keys, values = self.cache.layer(layer)
        scale = scale if scale is not None else q.shape[-1] ** -0.5
        outs = []
        for span in self._spans:
            reach = slice(self._first_slot(span, window), span.num_slots)
            rows = slice(span.row, span.row + span.last - span.first)
            mask = self._mask(span, causal, window, q.dtype, q.device, q.shape[1] // keys.shape[1])
            args = (q[span.first : span.last], keys[rows, :, reach], values[rows, :, reach], mask, scale)
            if softcap is None and sinks is None:
                outs.append(_attend_fused(*args))
            else:
                outs.append(_attend_explicit(*args, softcap, sinks))
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _first_slot(self, span: _Span, window: int | None) -> int:
        """Where a window lets the span start reading: in whole buckets, for few kernel shapes."""
        if window is None:
            return 0
        nearest = min(self.starts[span.first : span.last])
        return max(0, nearest - window + 1) // 64 * 64

    def _mask(
        self, span: _Span, causal: bool, window: int | None, dtype: torch.dtype, device: torch.device, group: int
    ) -> torch.Tensor:
        """Additive mask [b, 1, group * T, S'] for folded queries, in the model's dtype (a boolean
        one would be added as 0/1)."""
        key = (span.first, causal, window, dtype, device, group)  # layers may sit on several devices
        if key in self._masks:
            return self._masks[key]
        batch = slice(span.first, span.last)
        starts = torch.tensor(self.starts[batch], device=device)[:, None, None]
        valid = torch.tensor(self.valid[batch], device=device)[:, None, None]
        query = starts + torch.arange(self.num_tokens, device=device)[None, :, None]
        slot = torch.arange(self._first_slot(span, window), span.num_slots, device=device)[None, None, :]
        if self._tree is None:
            seen = slot < starts + valid
            if causal:
                seen = seen & (slot <= query)
            if window is not None:
                seen = seen & (query - slot < window) & (slot - query < window)
            # Padding tokens see themselves, or their softmax would be over nothing: NaN.
            seen = seen | (slot == query)
        else:
            seen = self._seen_in_tree(span, starts, slot, window)
        mask = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, -torch.inf)
        self._masks[key] = mask.repeat(1, group, 1)[:, None]
        return self._masks[key]

    def _seen_in_tree(self, span: _Span, starts: torch.Tensor, slot: torch.Tensor, window: int | None) -> torch.Tensor:
        """bool [b, T, S']: the context before the pass, and in it the ancestors and the token itself.
        A window counts positions, and siblings share one: their slots say nothing about distance."""
        assert self._tree is not None
        before, size = self.num_before, self.num_before + self.num_tokens
        depths, ancestors = (t[span.first : span.last].to(slot.device) for t in self._tree)
        root = starts - before
        inside = slot - root
        within = (inside >= 0) & (inside < size)
        index = inside.clamp(0, size - 1).expand(-1, self.num_tokens, -1)
        seen = (inside < 0) | (within & ancestors[:, before:].gather(2, index))
        if window is None:
            return seen
        key = torch.where(within, root + depths[:, None, :].expand(-1, self.num_tokens, -1).gather(2, index), slot)
        return seen & (root + depths[:, before:, None] - key < window)


def _tree_tables(parents: Sequence[Sequence[int]], num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Depths [B, T] and ancestors, itself included, [B, T, T]; padding sees itself alone."""
    depths_BT = torch.zeros(len(parents), num_tokens, dtype=torch.int64)
    ancestors_BTT = torch.eye(num_tokens, dtype=torch.bool).repeat(len(parents), 1, 1)
    for b, row in enumerate(parents):
        size = len(row) + 1
        depths_BT[b, 1:size] = torch.tensor(depths(row), dtype=torch.int64)
        ancestors_BTT[b, :size, :size] = ancestor_mask(row)
    return depths_BT, ancestors_BTT


def _attend_fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """torch's SDPA with the group's query heads folded into the query length."""
    batch, heads, tokens, dim = q.shape
    kv_heads = k.shape[1]
    folded = q.reshape(batch, kv_heads, heads // kv_heads * tokens, dim)
    out = F.scaled_dot_product_attention(folded, k, v, attn_mask=mask, scale=scale)
    return out.view(batch, heads, tokens, v.shape[-1]).transpose(1, 2)


def _attend_explicit(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Scores in the open, for what the fused kernel does not know: soft caps and sinks."""
    batch, heads, tokens, dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    folded = q.reshape(batch, kv_heads, group * tokens, dim)
    scores = folded @ k.transpose(-1, -2) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores + mask
    accurate = torch.float32 if scores.dtype != torch.float64 else torch.float64
    if sinks is None:
        probs = scores.softmax(-1, dtype=accurate)
    else:
        sink = sinks.view(1, kv_heads, group, 1, 1).expand(batch, -1, -1, tokens, 1)
        sink = sink.reshape(batch, kv_heads, group * tokens, 1).to(scores.dtype)
        probs = torch.cat([scores, sink], dim=-1).softmax(-1, dtype=accurate)[..., :-1]
    out = probs.to(v.dtype) @ v
    return out.view(batch, heads, tokens, v.shape[-1]).transpose(1, 2)
