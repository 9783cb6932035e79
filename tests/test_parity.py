"""The same drafts as other people's implementations, round by round, from one folder saved by us.

Peers: z-lab's package dflash 0.1.0 (the reference) and the DFlash generator inside transformers.
Where the two differ from each other the tests say so; docs/drafts.md has the table.
"""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import peers
from bed import CONFIGS, PROMPTS, make_model, random_network, random_prompt, tiny_target, trained_network
from flashdraft import checkpoint
from flashdraft.drafters.dflash import DFlashNetwork
from flashdraft.target import Target
from flashdraft.types import FlashdraftError
from peers import PeerRound, Trace

needs_reference = pytest.mark.skipif(
    not peers.HAS_REFERENCE, reason="the reference is not installed: pip install --no-deps dflash==0.1.0"
)
needs_native = pytest.mark.skipif(not peers.HAS_NATIVE, reason="this transformers has no DFlash")
BLOCK, NUM_TOKENS = 8, 28
ROPES: dict[str, dict[str, Any]] = {
    "theta": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16},
    "yarn, gpt-oss": {
        "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "original_max_position_embeddings": 64,
        "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    },
    "yarn, kimi": {
        "rope_type": "yarn", "rope_theta": 5e4, "factor": 64.0, "original_max_position_embeddings": 64,
        "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.5,
    },
}  # fmt: skip
# PROMPTS[2] and the rest are 11 to 23 tokens long: windows of 6 end inside the context from the first round.
NETWORKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sliding": {"windows": (6, 6), "causal": (True, True)},
    "sliding, wide": {"windows": (20, 20), "causal": (True, True)},
    "sliding, bidirectional": {"windows": (6, 6), "causal": (False, False)},
    "mixed": {"windows": (6, None), "causal": (True, False)},
    "mixed, causal": {"windows": (None, 6), "causal": (True, True)},
    "mixed, bidirectional": {"windows": (6, None), "causal": (False, False)},
    "causal": {"causal": (True, True)},
    "one tap": {"target_layer_ids": (1,)},
    "biases": {"attention_bias": True},
    "one key/value head": {"num_kv_heads": 1},
    "no groups": {"num_kv_heads": 4},
    "eps": {"rms_norm_eps": 0.3},
    "scaled": {"embedding_scale": 3.0, "output_multiplier": 0.3, "softcap": 2.0},
    **{f"rope: {name}": {"rope": rope} for name, rope in ROPES.items()},
}


@functools.cache
def target_model(family: str) -> Any:
    """The weights of `tiny_target`, in a model whose attention is transformers' own."""
    return make_model(CONFIGS[family](), torch.float32)


def network_of(family: str, taught: bool, **changes: Any) -> DFlashNetwork:
    """Random weights, or trained ones with what the changes add left random."""
    network = random_network(tiny_target(family, "float32"), seed=3, **changes)
    if taught:
        shapes = {name: p.shape for name, p in network.named_parameters()}
        weights = trained_network(family, "float32").state_dict()
        fitting = {name: w for name, w in weights.items() if w.shape == shapes[name]}
        network.load_state_dict(fitting, strict=False)
    return network


def saved(folder: Path, network: DFlashNetwork) -> Path:
    checkpoint.write(folder, network.config, network.state_dict())
    return folder


def assert_same(found: Trace, expected: Trace, block_size: int = BLOCK, num_tokens: int = NUM_TOKENS) -> None:
    """Same tokens; and, up to where the end of the answer is near, the same drafts and counts."""
    assert found.tokens == expected.tokens
    pairs = [trace.full_rounds(block_size, num_tokens) for trace in (found, expected)]
    assert len(pairs[0]) == len(pairs[1]) > 0
    for ours, theirs in zip(*pairs, strict=True):
        assert len(theirs.draft) == block_size - 1
        torch.testing.assert_close(ours.logits, theirs.logits, rtol=0, atol=1e-4)
        assert ours.draft == theirs.draft
        assert ours.num_committed == theirs.num_committed


@needs_reference
@pytest.mark.parametrize("name", NETWORKS)
def test_reference(name: str, tmp_path: Path) -> None:
    """Trained weights, so that rounds accept something, and random ones, so that no part is idle.

    T12: with sliding layers beyond the window.
    """
    target, model = tiny_target("llama", "float32"), target_model("llama")
    for taught, prompt in ((True, PROMPTS[2]), (False, PROMPTS[5])):
        folder = saved(tmp_path / str(taught), network_of("llama", taught, **NETWORKS[name]))
        assert_same(peers.ours(folder, target, prompt, NUM_TOKENS), peers.reference(folder, model, prompt, NUM_TOKENS))


@needs_reference
@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
@pytest.mark.parametrize("name", ["plain", "mixed"])
def test_reference_on_other_targets(family: str, name: str, tmp_path: Path) -> None:
    target, model = tiny_target(family, "float32"), target_model(family)
    folder = saved(tmp_path, network_of(family, True, **NETWORKS[name]))
    for prompt in PROMPTS[1:3]:
        assert_same(peers.ours(folder, target, prompt, NUM_TOKENS), peers.reference(folder, model, prompt, NUM_TOKENS))


@needs_reference
def test_reference_on_a_target_that_scales_and_caps(tmp_path: Path) -> None:
    """D13: the draft gets raw embedding rows and the bare head; scale and cap are its own keys. The
    target's windows of 8 end inside the prompts."""
    config = transformers.Gemma2Config(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=256, sliding_window=8, initializer_range=0.25,
        final_logit_softcapping=5.0, attn_logit_softcapping=5.0, query_pre_attn_scalar=8, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    target = Target(make_model(copy.deepcopy(config), torch.float32), name="tiny gemma2")
    network = random_network(target, seed=3, embedding_scale=32**0.5, softcap=5.0)
    folder, model = saved(tmp_path, network), make_model(config, torch.float32)
    for prompt in PROMPTS[:3]:
        assert_same(peers.ours(folder, target, prompt, NUM_TOKENS), peers.reference(folder, model, prompt, NUM_TOKENS))


@needs_reference
def test_reference_accepts_what_we_accept(tmp_path: Path) -> None:
    """The comparison would be empty if nothing were ever accepted: counts from 1 to a whole block."""
    folder = saved(tmp_path, network_of("llama", True))
    found = [peers.ours(folder, tiny_target("llama", "float32"), prompt, 40) for prompt in PROMPTS]
    expected = [peers.reference(folder, target_model("llama"), prompt, 40) for prompt in PROMPTS]
    for a, b in zip(found, expected, strict=True):
        assert_same(a, b, num_tokens=40)
    counts = [r.num_committed for trace in expected for r in trace.rounds]
    assert {1, 2, 3} <= set(counts) and max(counts) >= 6


@needs_reference
@pytest.mark.parametrize("block_size", [2, 5, 16])
def test_reference_at_other_block_sizes(block_size: int, tmp_path: Path) -> None:
    """A block other than the trained one: fewer or more masked slots, the same network."""
    target, model = tiny_target("llama", "float32"), target_model("llama")
    folder = saved(tmp_path, network_of("llama", True, **NETWORKS["mixed"]))
    assert_same(
        peers.ours(folder, target, PROMPTS[3], NUM_TOKENS, block_size),
        peers.reference(folder, model, PROMPTS[3], NUM_TOKENS, block_size),
        block_size,
    )


@needs_reference
@pytest.mark.parametrize("length", [1, 2, 130])
def test_reference_at_short_and_long_prompts(length: int, tmp_path: Path) -> None:
    """Contexts shorter than the window, and so long that our path skips what the window cannot see."""
    target, model = tiny_target("llama", "float32"), target_model("llama")
    folder = saved(tmp_path, network_of("llama", False, **NETWORKS["sliding"]))
    prompt = random_prompt(7, length)
    assert_same(peers.ours(folder, target, prompt, NUM_TOKENS), peers.reference(folder, model, prompt, NUM_TOKENS))


OLD_AND_NEW: dict[str, tuple[str, ...]] = {
    "old keys": ("rope_parameters",),
    "new keys": ("rope_theta", "rope_scaling"),
}


@needs_reference
@pytest.mark.parametrize("dropped", OLD_AND_NEW)
@pytest.mark.parametrize("rope", ["theta", "llama3", "yarn, kimi"])
def test_reference_reads_either_spelling_of_rope_as_we_do(dropped: str, rope: str, tmp_path: Path) -> None:
    """T9: the same rotary tables from `rope_theta`/`rope_scaling` and from `rope_parameters`."""
    folder = saved(tmp_path, network_of("llama", False, rope=ROPES[rope]))
    raw = json.loads((folder / "config.json").read_text())
    for name in OLD_AND_NEW[dropped]:
        raw.pop(name, None)
    if "rope_scaling" in raw:
        raw["rope_scaling"]["type"] = raw["rope_scaling"].pop("rope_type")
    (folder / "config.json").write_text(json.dumps(raw))
    assert_same(
        peers.ours(folder, tiny_target("llama", "float32"), PROMPTS[2], NUM_TOKENS),
        peers.reference(folder, target_model("llama"), PROMPTS[2], NUM_TOKENS),
    )


@needs_reference
@pytest.mark.parametrize(
    "keys",
    [
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},  # the last layer slides
        {"use_sliding_window": True, "sliding_window": 6},  # max_window_layers is 28 by default: none does
        {"use_sliding_window": False, "sliding_window": 6, "max_window_layers": 0},
        {"sliding_window": 6, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 0, "is_causal": False},
    ],
    ids=str,
)
def test_reference_reads_missing_layer_types_as_we_do(keys: dict[str, Any], tmp_path: Path) -> None:
    folder = saved(tmp_path, network_of("llama", False))
    raw = json.loads((folder / "config.json").read_text())
    for name in ("layer_types", "use_sliding_window", "sliding_window", "is_causal"):
        raw.pop(name, None)
    (folder / "config.json").write_text(json.dumps(raw | keys))
    assert_same(
        peers.ours(folder, tiny_target("llama", "float32"), PROMPTS[2], NUM_TOKENS),
        peers.reference(folder, target_model("llama"), PROMPTS[2], NUM_TOKENS),
    )


@needs_reference
@pytest.mark.parametrize("use", [False, ...])
def test_sliding_layers_without_a_size_are_refused_by_both(use: Any, tmp_path: Path) -> None:
    """Without `use_sliding_window` a Qwen3 configuration has no window, and z-lab's code stops at it."""
    folder = saved(tmp_path, network_of("llama", False, **NETWORKS["sliding"]))
    raw = json.loads((folder / "config.json").read_text())
    raw["use_sliding_window"] = use
    (folder / "config.json").write_text(json.dumps({key: value for key, value in raw.items() if value is not ...}))
    with pytest.raises(TypeError):
        peers.reference(folder, target_model("llama"), PROMPTS[0], NUM_TOKENS)
    with pytest.raises(FlashdraftError, match="they have no size"):
        checkpoint.read(folder)


@needs_reference
def test_reference_looks_in_dflash_config_first(tmp_path: Path) -> None:
    """block_size, layer ids, mask id and scale given twice: the inner ones count, for both of us."""
    folder = saved(tmp_path, network_of("llama", False, block_size=6, embedding_scale=2.0))
    raw = json.loads((folder / "config.json").read_text())
    raw |= {"block_size": 3, "target_layer_ids": [0], "mask_token_id": 7, "input_embedding_scale": 9.0}
    (folder / "config.json").write_text(json.dumps(raw))
    assert_same(
        peers.ours(folder, tiny_target("llama", "float32"), PROMPTS[2], NUM_TOKENS),
        peers.reference(folder, target_model("llama"), PROMPTS[2], NUM_TOKENS),
        block_size=6,
    )


@needs_reference
@pytest.mark.parametrize("wrong", [{"windows": (7, 7)}, {"windows": (None, None)}, {"causal": (False, False)}])
def test_a_wrong_window_would_show(wrong: dict[str, Any], tmp_path: Path) -> None:
    """T12: the comparison notices a window off by one, a window not applied, and the wrong direction."""
    values = NETWORKS["sliding"]
    right = saved(tmp_path / "right", network_of("llama", True, **values))
    other = saved(tmp_path / "wrong", network_of("llama", True, **{**values, **wrong}))
    found = peers.ours(other, tiny_target("llama", "float32"), PROMPTS[2], NUM_TOKENS)
    expected = peers.reference(right, target_model("llama"), PROMPTS[2], NUM_TOKENS)
    assert found.tokens == expected.tokens  # the text never depends on the draft
    assert [r.draft for r in found.rounds] != [r.draft for r in expected.rounds]


@needs_reference
def test_reference_loads_every_weight_we_save(tmp_path: Path) -> None:
    from dflash.model import DFlashDraftModel

    folder = saved(tmp_path, network_of("llama", False, attention_bias=True))
    with peers.their_warnings():
        _, info = DFlashDraftModel.from_pretrained(folder, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))


NATIVE = ["plain", "one tap", "one key/value head", "eps", "rope: llama3", "rope: yarn, kimi"]


@needs_native
@pytest.mark.parametrize("name", NATIVE)
def test_transformers(name: str, tmp_path: Path) -> None:
    """The generator inside transformers, with our weights in its Muse Glimmer network."""
    target, model = tiny_target("llama", "float32"), target_model("llama")
    for taught, prompt in ((True, PROMPTS[2]), (False, PROMPTS[5])):
        folder = saved(tmp_path / str(taught), network_of("llama", taught, **NETWORKS[name]))
        assert_same(peers.ours(folder, target, prompt, NUM_TOKENS), peers.native(folder, model, prompt, NUM_TOKENS))


@needs_native
@pytest.mark.parametrize("name", ["sliding, bidirectional", "mixed, bidirectional"])
def test_transformers_counts_a_window_differently(name: str, tmp_path: Path) -> None:
    """Its window is inclusive and bidirectional: one less there is ours, the same number is not."""
    folder = saved(tmp_path, network_of("llama", True, **NETWORKS[name]))
    found = peers.ours(folder, tiny_target("llama", "float32"), PROMPTS[2], NUM_TOKENS)
    model = target_model("llama")
    assert_same(found, peers.native(folder, model, PROMPTS[2], NUM_TOKENS, window=5))
    other = peers.native(folder, model, PROMPTS[2], NUM_TOKENS, window=6)
    assert other.tokens == found.tokens
    assert [r.draft for r in other.rounds] != [r.draft for r in found.rounds]


def drafts_near_the_end(trace: Trace, num_tokens: int) -> list[tuple[int, int]]:
    """(tokens still wanted, tokens drafted) of the rounds in which a whole block is too long."""
    done, out = 1, []
    for each in trace.rounds:
        wanted = num_tokens - done
        if wanted < BLOCK:
            out.append((wanted, len(each.draft)))
        done += each.num_committed
    return out


@needs_reference
@needs_native
def test_the_last_block_is_cut_differently_by_everyone(tmp_path: Path) -> None:
    """With w tokens still wanted we draft w - 1 (the bonus token is the last one), z-lab w, and
    transformers always a whole block. What is committed is the same."""
    folder = saved(tmp_path, network_of("llama", False))
    model = target_model("llama")
    traces = [
        peers.ours(folder, tiny_target("llama", "float32"), PROMPTS[2], NUM_TOKENS),
        peers.reference(folder, model, PROMPTS[2], NUM_TOKENS),
        peers.native(folder, model, PROMPTS[2], NUM_TOKENS),
    ]
    assert len({trace.tokens for trace in traces}) == 1
    ours, theirs, native = (drafts_near_the_end(trace, NUM_TOKENS) for trace in traces)
    assert ours and all(drafted == wanted - 1 for wanted, drafted in ours)
    assert theirs and all(drafted == min(BLOCK - 1, wanted) for wanted, drafted in theirs)
    assert native and all(drafted == (BLOCK - 1 if wanted > 1 else 0) for wanted, drafted in native)


def test_full_rounds_stop_where_a_block_is_cut() -> None:
    """The comparison's own helper: 9 tokens, block 4, 2 a round: 8, 6, 4 wanted are full, 2 is not."""
    each = PeerRound((1, 2, 3), torch.zeros(3, 1), 2)
    assert len(Trace((), (each,) * 4).full_rounds(4, 9)) == 3
