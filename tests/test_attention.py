"""The attention path against a softmax written as loops: groups, windows, caps, sinks, ragged rows."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from flashdraft import attention
from flashdraft.attention import AttentionPlan
from flashdraft.cache import KVCache

HEADS, KV_HEADS, DIM, TOKENS, SLOTS = 4, 2, 8, 5, 200
# One row empty, two that share a span though their windows begin in different buckets, one a bucket border.
LENGTHS = [0, 66, 110, 131, 63]


def filled_cache(dtype: torch.dtype = torch.float64, kv_heads: int = KV_HEADS) -> KVCache:
    """Rows of LENGTHS random keys and values, and garbage behind them."""
    generator = torch.Generator().manual_seed(1)
    cache = KVCache(len(LENGTHS), SLOTS)
    shape = (1, kv_heads, SLOTS, DIM)
    for row, length in enumerate(LENGTHS):
        k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
        cache.write(0, [row], [0], (k * 3).to(dtype), (v * 3).to(dtype))
        cache.keep(row, length)
    return cache


def pass_inputs(
    rows: int, dtype: torch.dtype = torch.float64, kv_heads: int = KV_HEADS
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    shapes = [(rows, heads, TOKENS, DIM) for heads in (HEADS, kv_heads, kv_heads)]
    q, k, v = (torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes)
    return q * 2, k, v


def by_loops(
    cache: KVCache,
    rows: list[int],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    valid: list[int],
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """[B, T, heads, d] by the definition: one query at a time, one key at a time, nothing masked."""
    out = torch.zeros(len(rows), TOKENS, HEADS, DIM, dtype=q.dtype)
    keys, values = cache.layer(0)
    for b, row in enumerate(rows):
        start = cache.lengths[row]
        for head in range(HEADS):
            kv = head // (HEADS // k.shape[1])
            for t in range(valid[b]):
                terms = []
                for slot in range(start + valid[b]):
                    distance = start + t - slot
                    if (causal and distance < 0) or (window is not None and abs(distance) >= window):
                        continue
                    old = slot < start
                    key = keys[row, kv, slot] if old else k[b, kv, slot - start]
                    value = values[row, kv, slot] if old else v[b, kv, slot - start]
                    score = float(q[b, head, t] @ key) * (scale if scale is not None else DIM**-0.5)
                    if softcap is not None:
                        score = softcap * math.tanh(score / softcap)
                    terms.append((score, value))
                total = sum(math.exp(score) for score, _ in terms)
                if sinks is not None:
                    total += math.exp(float(sinks[head]))
                for score, value in terms:
                    out[b, t, head] += math.exp(score) / total * value
    return out


FEATURES: dict[str, dict[str, Any]] = {
    "causal": {},
    "bidirectional": {"causal": False},
    "window": {"window": 7},
    "window of one": {"window": 1},
    "bidirectional window": {"window": 7, "causal": False},
    "narrow bidirectional window": {"window": 3, "causal": False},
    "window as wide as a bucket": {"window": 64},
    "window that reaches everything": {"window": 500},
    "scale": {"scale": 0.7},
    "softcap": {"softcap": 2.0},
    "softcap and window": {"softcap": 2.0, "window": 7},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 3.0, 0.0], dtype=torch.float64)},
    "sinks, window, both ways": {
        "sinks": torch.tensor([0.5, -1.0, 3.0, 0.0], dtype=torch.float64),
        "window": 7,
        "causal": False,
    },
}


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize(
    ("rows", "valid"),
    [
        ([0, 1, 2, 3, 4], [5, 5, 5, 5, 5]),
        ([3, 1, 4, 0, 2], [1, 3, 5, 2, 4]),  # rows in any order, padding of any length
        ([2, 3], [4, 5]),
        ([3], [2]),
    ],
)
def test_equals_loops(feature: str, rows: list[int], valid: list[int]) -> None:
    cache = filled_cache()
    q, k, v = pass_inputs(len(rows))
    kwargs = FEATURES[feature]
    expected = by_loops(cache, rows, q, k, v, valid, **kwargs)
    found = AttentionPlan(cache, rows, TOKENS, valid).attend(0, q, k, v, **kwargs)
    assert torch.isfinite(found).all()  # padding too: a NaN would spread in the layers above
    for b, count in enumerate(valid):
        torch.testing.assert_close(found[b, :count], expected[b, :count], rtol=0, atol=1e-12)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_grouped_queries(kv_heads: int, softcap: float | None) -> None:
    """Query head h reads key/value head h // group, in the fused path and in the explicit one."""
    cache = filled_cache(kv_heads=kv_heads)
    q, k, v = pass_inputs(2, kv_heads=kv_heads)
    expected = by_loops(cache, [1, 4], q, k, v, [5, 3], softcap=softcap)
    found = AttentionPlan(cache, [1, 4], TOKENS, [5, 3]).attend(0, q, k, v, softcap=softcap)
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(found[1, :3], expected[1, :3], rtol=0, atol=1e-12)


@pytest.mark.parametrize("feature", ["causal", "bidirectional window", "softcap", "sinks"])
def test_bfloat16_is_close(feature: str) -> None:
    """As close as scores in bfloat16 are (the path with caps and sinks has them, as in transformers)."""
    rows, kwargs = [3, 1, 0], FEATURES[feature]
    cache, exact = filled_cache(torch.bfloat16), filled_cache()
    for narrow, wide in zip(cache.layer(0), exact.layer(0), strict=True):
        wide.copy_(narrow)
    q, k, v = pass_inputs(3, torch.bfloat16)
    q = q / 8
    found = AttentionPlan(cache, rows, TOKENS).attend(0, q, k, v, **kwargs)
    expected = AttentionPlan(exact, rows, TOKENS).attend(0, q.double(), k.double(), v.double(), **kwargs)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), expected, rtol=0.03, atol=0.03)


@pytest.mark.parametrize("garbage", [1e30, torch.nan, torch.inf])
def test_what_lies_behind_a_row_changes_nothing(garbage: float) -> None:
    """Slots of refused drafts and of the row's earlier request are masked, and 0 times NaN is NaN: they are
    cleared, so one request's overflow does not poison the next, nor a refused draft the next round."""
    q, k, v = pass_inputs(3)
    rows = [3, 1, 0]
    results = []
    for value in (0.0, garbage):
        cache = filled_cache()
        for row, length in enumerate(LENGTHS):
            for store in cache.layer(0):
                store[row, :, length:] = value
        results.append(AttentionPlan(cache, rows, TOKENS).attend(0, q, k, v))
    assert torch.equal(*results)


def test_only_what_longer_passes_left_is_cleared() -> None:
    cache = filled_cache()
    before = [store.clone() for store in cache.layer(0)]
    AttentionPlan(cache, [1], TOKENS)
    for store, old in zip(cache.layer(0), before, strict=True):
        assert torch.equal(store[1, :, : 66 + TOKENS], old[1, :, : 66 + TOKENS])
        assert not store[1, :, 66 + TOKENS :].any()
        assert torch.equal(store[[0, 2, 3, 4]], old[[0, 2, 3, 4]])


def test_a_window_skips_what_it_cannot_see() -> None:
    """Whole buckets before the window are not read: NaN in them does not show."""
    cache = filled_cache()
    q, k, v = pass_inputs(1)
    expected = by_loops(cache, [3], q, k, v, [TOKENS], window=7)
    for store in cache.layer(0):
        store[3, :, :64] = torch.nan
    found = AttentionPlan(cache, [3], TOKENS).attend(0, q, k, v, window=7)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_a_row_does_not_depend_on_its_batch_mates() -> None:
    """D8 in the attention path: alone or in a batch, the same numbers."""
    q, k, v = pass_inputs(5)
    rows = [3, 1, 4, 0, 2]
    together = AttentionPlan(filled_cache(), rows, TOKENS).attend(0, q, k, v, window=9)
    for b, row in enumerate(rows):
        parts = (t[b : b + 1] for t in (q, k, v))
        alone = AttentionPlan(filled_cache(), [row], TOKENS).attend(0, *parts, window=9)
        torch.testing.assert_close(together[b], alone[0], rtol=0, atol=1e-12)


def test_rows_share_calls_only_with_neighbours_of_their_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is padded to the slowest: reads are as long as each span of rows needs, in buckets of 64."""
    reads: list[tuple[int, int]] = []
    fused = attention._attend_fused

    def watch(q: torch.Tensor, k: torch.Tensor, *rest: Any) -> torch.Tensor:
        reads.append((k.shape[0], k.shape[2]))
        return fused(q, k, *rest)

    monkeypatch.setattr(attention, "_attend_fused", watch)
    q, k, v = pass_inputs(5)
    AttentionPlan(filled_cache(), [0, 1, 2, 3, 4], TOKENS).attend(0, q, k, v)
    assert reads == [(1, 64), (2, 128), (1, 192), (1, 128)]
    reads.clear()
    AttentionPlan(filled_cache(), [2, 1], TOKENS).attend(0, q[:2], k[:2], v[:2])
    assert reads == [(1, 128), (1, 128)]  # not ascending: no slice of the cache holds both in order


def test_masks_are_made_once_and_are_additive() -> None:
    plan = AttentionPlan(filled_cache(torch.float32), [1, 2], TOKENS)
    q, k, v = pass_inputs(2, torch.float32)
    for layer in range(3):
        plan.attend(layer, q, k, v)
    (mask,) = plan._masks.values()
    assert mask.dtype == torch.float32
    assert set(mask.unique().tolist()) == {0.0, -torch.inf}


def test_positions() -> None:
    plan = AttentionPlan(filled_cache(), [3, 0], 3)
    assert plan.positions("cpu").tolist() == [[131, 132, 133], [0, 1, 2]]


def test_a_pass_past_the_last_slot_is_a_programming_error() -> None:
    cache = KVCache(1, 64)
    cache.keep(0, 60)
    with pytest.raises(AssertionError):
        AttentionPlan(cache, [0], TOKENS)
