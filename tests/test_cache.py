"""The cache after any history of drafts equals the cache of the tokens that were kept."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from bed import CONFIGS, make_model
from flashdraft.cache import BUCKET, KVCache, round_up
from flashdraft.target import Target

SMALL = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1,
}  # fmt: skip
ROWS, ROUNDS, CHECKS = 8, 1680, 8


def small_pair() -> tuple[Any, Target]:
    """A model with transformers' attention, and a target of the same weights."""
    model, other = (make_model(CONFIGS["llama"](**SMALL), torch.float64) for _ in range(2))
    model.set_attn_implementation("sdpa")  # its eager softmax is in fp32
    return model, Target(other)


def fresh_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    """The last logits of a pass over all tokens, by transformers' own attention, without a cache."""
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False).logits
    return logits[0, -1]


def test_ten_thousand_random_accept_patterns() -> None:
    """D6: ragged rows, in any order and company, drafts of any length kept in part, rows cut back to
    a prefix: logits equal a fresh pass and the slots equal a fresh cache (1e-10)."""
    model, target = small_pair()
    rng = random.Random(0)
    cache = target.new_cache(ROWS, 150)
    tokens: list[list[int]] = [[] for _ in range(ROWS)]
    patterns = 0
    for turn in range(1, ROUNDS + 1):
        rows = rng.sample(range(ROWS), rng.randint(ROWS // 2, ROWS))
        for row in rows:
            if len(tokens[row]) > 140 or rng.random() < 0.01:
                length = rng.randint(0, len(tokens[row]))
                cache.roll_back(row, length)
                del tokens[row][length:]
        width = rng.randint(1, 8)
        valid = [rng.randint(1, width) for _ in rows]
        blocks = [[rng.randrange(96) for _ in range(width)] for _ in rows]
        target.forward(torch.tensor(blocks), cache, rows, valid=valid, keep=slice(0, 0))
        for row, block, size in zip(rows, blocks, valid, strict=True):
            kept = rng.randint(0, size)
            cache.keep(row, kept)
            tokens[row] += block[:kept]
            patterns += 1
        assert cache.lengths == [len(t) for t in tokens]
        if turn % (ROUNDS // CHECKS) == 0:
            compare(model, target, cache, tokens)
    assert patterns >= 9_500


def compare(model: Any, target: Target, cache: KVCache, tokens: list[list[int]]) -> None:
    again = target.new_cache(1, 150)
    last = [7 + row for row in range(ROWS)]
    logits = target.forward(torch.tensor(last)[:, None], cache, range(ROWS)).logits_BTV[:, 0]
    for row in range(ROWS):
        whole = [*tokens[row], last[row]]
        assert float((logits[row] - fresh_logits(model, whole)).abs().max()) < 1e-10
        target.forward(torch.tensor([whole]), again, [0])
        for layer in range(target.num_layers):
            for found, expected in zip(cache.layer(layer), again.layer(layer), strict=True):
                size = len(tokens[row])
                assert torch.allclose(found[row, :, :size], expected[0, :, :size], rtol=0, atol=1e-10)


def test_the_comparison_sees_a_stale_slot() -> None:
    """If one token more than kept stays in the cache, the check above fails."""
    model, target = small_pair()
    cache = target.new_cache(ROWS, 150)
    block = torch.randint(96, (ROWS, 5), generator=torch.Generator().manual_seed(0))
    target.forward(block, cache, range(ROWS))
    for row in range(ROWS):
        cache.keep(row, 3)
    compare(model, target, cache, [block[row, :3].tolist() for row in range(ROWS)])
    cache.keep(2, 1)
    with pytest.raises(AssertionError):
        compare(model, target, cache, [block[row, :3].tolist() for row in range(ROWS)])


def numbered(rows: int, heads: int, tokens: int, dim: int, start: float) -> torch.Tensor:
    return torch.arange(rows * heads * tokens * dim, dtype=torch.float64).view(rows, heads, tokens, dim) + start


def test_writes_count_once_they_are_kept_and_are_overwritten_before() -> None:
    cache = KVCache(3, 10)
    assert cache.slots == BUCKET and cache.lengths == [0, 0, 0]
    k = numbered(2, 2, 4, 3, 1.0)
    cache.write(0, [2, 0], [0, 0], k, -k)
    assert cache.lengths == [0, 0, 0]
    cache.keep(2, 3)
    again = numbered(1, 2, 2, 3, 500.0)
    cache.write(0, [2], [cache.lengths[2]], again, -again)
    cache.keep(2, 2)
    keys, values = cache.layer(0)
    assert torch.equal(keys[2, :, :5], torch.cat([k[0, :, :3], again[0]], dim=1))
    assert torch.equal(values[2, :, :5], -keys[2, :, :5])
    assert torch.equal(keys[0, :, :4], k[1]) and not keys[1].any() and not keys[2, :, 5:].any()
    cache.roll_back(2, 1)
    assert cache.lengths == [0, 0, 1]


def test_flat_writes_equal_plain_ones() -> None:
    """The draft's context: tokens of several rows in one list, behind each row's length."""
    plain, flat = KVCache(3, 64), KVCache(3, 64)
    rng = random.Random(1)
    for _ in range(20):
        rows = rng.sample(range(3), 2)
        counts = [rng.randint(0, 3) for _ in rows]
        k = torch.randn(sum(counts), 2, 4)
        if sum(counts):
            flat.write_flat(0, rows, counts, k, k + 1)
        at = 0
        for row, count in zip(rows, counts, strict=True):
            part = k[at : at + count].transpose(0, 1)[None]
            if count:
                plain.write(0, [row], [plain.lengths[row]], part, part + 1)
            plain.keep(row, count)
            flat.keep(row, count)
            at += count
        if max(plain.lengths) > 50:
            break
    assert plain.lengths == flat.lengths
    for a, b in zip(plain.layer(0), flat.layer(0), strict=True):
        assert torch.equal(a, b)


def test_lengths_cannot_leave_the_cache() -> None:
    cache = KVCache(1, 64)
    for length in (1, -1):
        with pytest.raises(AssertionError):
            cache.roll_back(0, length)
    with pytest.raises(AssertionError):
        cache.keep(0, 65)
    cache.keep(0, 64)
    with pytest.raises(AssertionError):
        cache.keep(0, 1)


def test_sizes() -> None:
    assert [round_up(n) for n in (1, 63, 64, 65)] == [64, 64, 64, 128]
    cache = KVCache(2, 100)
    assert cache.slots == 128 and cache.bytes_per_slot == 0
    k = torch.zeros(1, 3, 1, 4, dtype=torch.float32)
    for layer in (0, 5):
        cache.write(layer, [1], [0], k, k)
    assert cache.bytes_per_slot == 2 * 2 * 3 * 4 * 4  # layers, keys and values, heads, width, bytes


def test_write_puts_each_row_at_its_own_start() -> None:
    """Neighbours that start alike are copied together; any order and mix of rows is a copy per row."""
    rng = random.Random(0)
    for _ in range(100):
        rows = rng.sample(range(6), rng.randrange(1, 7))
        rows = sorted(rows) if rng.random() < 0.5 else rows
        starts = [rng.choice([0, 0, 3]) for _ in rows]
        k, v = torch.randn(2, len(rows), 2, rng.randrange(1, 5), 4)
        cache, expected = KVCache(6, 64), torch.zeros(2, 6, 2, 64, 4)
        cache.write(0, rows, starts, k, v)
        for b, (row, start) in enumerate(zip(rows, starts, strict=True)):
            expected[:, row, :, start : start + k.shape[2]] = torch.stack([k[b], v[b]])
        assert all(torch.equal(found, right) for found, right in zip(cache.layer(0), expected, strict=True))
