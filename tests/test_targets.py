"""Targets: every family in docs/targets.md decodes what `model.generate` does, or is refused in one
sentence; features are what the decoder layers put out; the probe is not fooled.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from bed import ScriptedDrafter, coin, decode, random_prompt, wrong
from families import EXACT, FAMILIES, REFUSED, Family, shown_table, table
from flashdraft.engine import Engine
from flashdraft.target import Target
from flashdraft.types import FlashdraftError, Request, SamplingParams

NUM_TOKENS = 40
PROMPTS = [random_prompt(0), random_prompt(1)]
IDS = [f"{f.model_type}-{f.shown}".replace(" ", "_") for f in FAMILIES]


@dataclass(frozen=True)
class Case:
    """A target, a copy of its model that transformers runs, and what `generate` says."""

    target: Target
    plain: Any
    answers: list[list[int]]


@functools.cache
def case(family: Family) -> Case:
    if not family.known:
        pytest.skip(f"this transformers has no {family.model_type}")
    model = family.model()
    plain = copy.deepcopy(model)
    return Case(Target(model, name=family.shown), plain, generate(plain, PROMPTS))


def generate(model: Any, prompts: Sequence[Sequence[int]], num_tokens: int = NUM_TOKENS) -> list[list[int]]:
    ids = torch.tensor(prompts)
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False, use_cache=True,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
    return [row[ids.shape[1] :].tolist() for row in out]


def tiny(model_type: str, shown: str = "", **changes: Any) -> Any:
    """The model of one family of the table."""
    family = next(f for f in FAMILIES if f.model_type == model_type and f.shown.startswith(shown))
    return family.model(**changes)


def refusal(model: Any, tokenizer: Any = None) -> str:
    with pytest.raises(FlashdraftError) as caught:
        Target(model, tokenizer, name="the model")
    text = str(caught.value)
    assert "the model" in text and "\n" not in text and text.endswith(".") and len(text) < 500
    return text


def flip_coins(answers: Sequence[Sequence[int]], seed: int) -> ScriptedDrafter:
    """Right six times in ten, for rows that are told apart by what they have said."""
    coins = [coin(answer, 6, len(PROMPTS[0]), 0.6, seed) for answer in answers]

    def script(done: list[int]) -> list[int]:
        row = next(i for i, answer in enumerate(answers) if list(answer[: len(done)]) == done)
        return coins[row].script(done)

    return ScriptedDrafter(script, 6, len(PROMPTS[0]))


# Families


@pytest.mark.parametrize("family", EXACT, ids=lambda f: f"{f.model_type}-{f.shown}")
def test_family_equals_generate(family: Family) -> None:
    """D13, D6: plain decoding, and drafts with random accept patterns in ragged rows behind a
    prefill in chunks, say what transformers' cached greedy `generate` says, in float64."""
    it = case(family)
    assert min(len(set(answer)) for answer in it.answers) >= 4, "too dull to show a mistake"
    (result,) = decode(it.target, None, PROMPTS[:1], max_tokens=NUM_TOKENS, ignore_eos=True)
    assert list(result.token_ids) == it.answers[0]
    engine = Engine(it.target, flip_coins(it.answers, seed=1), max_rows=2, prefill_chunk=5)
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    results = engine.run([Request(prompt, params) for prompt in PROMPTS])
    assert [list(r.token_ids) for r in results] == it.answers
    assert any(0 < r.num_accepted < r.num_drafted for result in results for r in result.stats.rounds)


@pytest.mark.parametrize(
    "family", [f for f in EXACT if "window" in f.shown or "local" in f.shown], ids=lambda f: f"{f.model_type}-{f.shown}"
)
def test_windows_survive_roll_back(family: Family) -> None:
    """D4: a window of 8 (or 20, which only the mask tells), 40 tokens, a drafter that is never right."""
    it = case(family)
    assert {w for w in it.target.windows if w is not None} <= {8, 20}
    assert any(w is not None for w in it.target.windows)
    for prompt, answer in zip(PROMPTS, it.answers, strict=True):
        drafter = wrong(answer, 6, len(prompt))
        (result,) = decode(it.target, drafter, [prompt], max_tokens=NUM_TOKENS, ignore_eos=True)
        assert list(result.token_ids) == answer
        assert all(r.num_accepted == 0 for r in result.stats.rounds)


@pytest.mark.parametrize("family", EXACT, ids=lambda f: f"{f.model_type}-{f.shown}")
def test_features_are_layer_outputs(family: Family) -> None:
    """T10: feature id i is what a forward hook on decoder layer i of an untouched copy sees, for all i
    (for all but the last, HF's hidden_states[i + 1]), also in ragged rows and in pieces."""
    it = case(family)
    layer_ids = range(it.target.num_layers)
    rows = [[*prompt, *answer[:8]] for prompt, answer in zip(PROMPTS, it.answers, strict=True)]
    if not family.features:
        with pytest.raises(FlashdraftError, match="a drafter that reads them"):
            it.target.forward(torch.tensor(rows), it.target.new_cache(2, 32), [0, 1], layer_ids=layer_ids)
        return
    expected, states = hooked(it.plain, torch.tensor(rows))
    for i in layer_ids[:-1]:
        torch.testing.assert_close(states[i + 1], expected[i], rtol=0, atol=0)
    found = in_pieces(it.target, rows, list(layer_ids))
    for b, row in enumerate(rows):
        wanted = torch.cat([expected[i][b] for i in layer_ids], dim=-1)
        assert len(found[b]) == len(row)
        # transformers' eager attention rounds its softmax to float32
        torch.testing.assert_close(found[b], wanted, rtol=1e-4, atol=1e-4)


def hooked(model: Any, ids: torch.Tensor) -> tuple[list[torch.Tensor], Any]:
    """Outputs of the decoder layers, and hidden_states, of one pass without a cache."""
    layers = next(
        m for m in model.base_model.modules()
        if isinstance(m, nn.ModuleList) and len(m) == model.config.num_hidden_layers
    )  # fmt: skip
    outputs: list[torch.Tensor] = []
    handles = [
        layer.register_forward_hook(lambda _m, _a, out: outputs.append(out[0] if isinstance(out, tuple) else out))
        for layer in layers
    ]
    with torch.inference_mode():
        states = model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
    for handle in handles:
        handle.remove()
    return outputs, states


def in_pieces(target: Target, rows: list[list[int]], layer_ids: list[int]) -> list[torch.Tensor]:
    """Features of two rows: row 0 gets a head start, then both go on with 1, 4, 6... tokens, padded."""
    cache = target.new_cache(2, 64)
    found: list[list[torch.Tensor]] = [[], []]

    def go_on(batch: list[int], counts: list[int]) -> None:
        width = max(counts)
        starts = [cache.lengths[b] for b in batch]
        pieces = [rows[b][s : s + n] + [5] * (width - n) for b, s, n in zip(batch, starts, counts, strict=True)]
        out = target.forward(torch.tensor(pieces), cache, batch, valid=counts, layer_ids=layer_ids)
        assert out.features_BTF is not None
        for i, (b, n) in enumerate(zip(batch, counts, strict=True)):
            found[b].append(out.features_BTF[i, :n])
            cache.keep(b, n)

    go_on([0], [7])
    while any(cache.lengths[b] < len(rows[b]) for b in (0, 1)):
        left = [len(rows[b]) - cache.lengths[b] for b in (0, 1)]
        batch = [b for b in (0, 1) if left[b]]
        go_on(batch, [min(left[b], 4 + 2 * b) for b in batch])
    return [torch.cat(parts) for parts in found]


@pytest.mark.parametrize("family", REFUSED, ids=lambda f: f"{f.model_type}-{f.shown}")
def test_family_is_refused(family: Family) -> None:
    """D5: recurrent, hybrid, chunked, compressed, bidirectional and home-made attention is refused in
    one sentence, and the model is as it was."""
    if not family.known:
        pytest.skip(f"this transformers has no {family.model_type}")
    model = family.model()
    before = (model.config._attn_implementation, model.training, [p.requires_grad for p in model.parameters()])
    assert family.refused is not None and family.refused in refusal(model)
    assert before == (model.config._attn_implementation, model.training, [p.requires_grad for p in model.parameters()])


def test_the_doc_does_not_lie() -> None:
    assert shown_table() == table(), "run: python tests/families.py"


def test_families_differ() -> None:
    assert len({f.shown for f in FAMILIES}) == len(FAMILIES)
    assert len(EXACT) > 50 and len(REFUSED) > 30
