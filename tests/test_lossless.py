"""Speculative decoding says what plain decoding says, token for token: every drafter, acceptance
rule, block size, family, precision, one row and ragged rows. Rejection keeps the law, not the text.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

import rivals
from bed import CONFIGS, PROMPTS, decode, tiny_target, trained_network
from flashdraft.drafters import Drafter, NoDrafter
from flashdraft.drafters.dflash import DFlashDrafter
from flashdraft.drafters.ngram import NGramDrafter

BLOCK_SIZES = (1, 2, 4, 8, 16)
DRAFTERS: dict[str, Callable[[str, str, int], Drafter]] = {
    "none": lambda family, dtype, block: NoDrafter(),
    "ngram": lambda family, dtype, block: NGramDrafter(block, min_ngram=1),
    "dflash": lambda family, dtype, block: DFlashDrafter(
        trained_network(family, dtype), tiny_target(family, dtype), block
    ),
    "draft_model": rivals.draft_model,
    "medusa": rivals.medusa,
    "eagle3": rivals.eagle3,
    "medusa-tree": functools.partial(rivals.medusa, tree=True),
    "dflash-tree": rivals.dflash_tree,
    "dflash-lookup": rivals.dflash_lookup,
    "dflash-passes2": functools.partial(rivals.several_passes, 2),
    "dflash-passes4": functools.partial(rivals.several_passes, 4),
    "dflash-left": functools.partial(rivals.several_passes, 0),
    "dflash-fused": functools.partial(rivals.own_context, "fused"),
    "dflash-none": functools.partial(rivals.own_context, "none"),
    "eagle3-tree": functools.partial(rivals.eagle3, tree=rivals.TREE),
}
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "coupled": {"temperature": 0.8},
    "coupled-cut": {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3, "min_tokens": 6},
}
NUM_TOKENS = 24

THOROUGH = ("none", "ngram", "dflash")
CASES = [
    (drafter, mode, family, dtype)
    for drafter in DRAFTERS
    for mode in MODES
    for family in CONFIGS
    for dtype in ("float64", "float32")
    # the rivals run in the same session, and take their turn of families and precisions
    if drafter in THOROUGH
    or (family, dtype) == ("llama", "float64")
    or (mode, family, dtype) == ("coupled", "qwen2", "float32")
]


@functools.cache
def plain(family: str, dtype: str, mode: str) -> list[tuple[int, ...]]:
    """Plain decoding, one request at a time."""
    results = decode(tiny_target(family, dtype), NoDrafter(), PROMPTS, max_tokens=NUM_TOKENS, **MODES[mode])
    return [result.token_ids for result in results]


@pytest.mark.parametrize(("drafter", "mode", "family", "dtype"), CASES, ids=map("-".join, CASES))
def test_equals_plain_decoding(drafter: str, mode: str, family: str, dtype: str) -> None:
    """6 prompts x 5 block sizes x {one row, ragged rows}: 60 answers a case (rivals: 12)."""
    target = tiny_target(family, dtype)
    expected = plain(family, dtype, mode)
    for block_size in BLOCK_SIZES if drafter in THOROUGH else (2, 6):
        for max_rows in (1, 3) if drafter in THOROUGH else (3,):
            made = DRAFTERS[drafter](family, dtype, block_size)
            results = decode(target, made, PROMPTS, max_rows, max_tokens=NUM_TOKENS, **MODES[mode])
            assert [r.token_ids for r in results] == expected, (block_size, max_rows)


@pytest.mark.parametrize(
    ("drafter", "mode"),
    # penalties forbid the repetition that prompt lookup lives on
    [
        ("ngram", "greedy"),
        ("ngram", "coupled"),
        ("ngram", "coupled-cut"),
        *(("dflash", mode) for mode in MODES),
        *((name, mode) for name in DRAFTERS if name not in THOROUGH for mode in ("greedy", "coupled")),
    ],
)
def test_drafts_are_tried_and_some_are_kept(drafter: str, mode: str) -> None:
    """The equality above would hold for a drafter that proposes nothing or is always wrong."""
    made = DRAFTERS[drafter]("llama", "float64", 8)
    results = decode(tiny_target("llama"), made, PROMPTS, max_tokens=NUM_TOKENS, **MODES[mode])
    rounds = [r for result in results for r in result.stats.rounds]
    assert sum(r.num_drafted for r in rounds) > 15
    assert sum(r.num_accepted for r in rounds) >= 1
    assert any(r.num_accepted < r.num_drafted for r in rounds)
