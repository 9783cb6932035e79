"""The DFlash network and drafter: what a block sees, what the draft cache holds, how a draft is loaded."""

from __future__ import annotations

import gc
import math
import random
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from bed import PROMPTS, VOCAB, decode, dflash_drafter, draft_config, random_network, tiny_target, trained_network
from flashdraft import checkpoint
from flashdraft.drafters.dflash import DFlashDrafter, DFlashNetwork, DFlashState
from flashdraft.drafters.layers import RMSNorm, RotaryEmbedding, rope_frequencies
from flashdraft.engine import Engine
from flashdraft.sampling import RowSampler
from flashdraft.target import Target
from flashdraft.types import Commit, FlashdraftError, Request, SamplingParams

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sliding": {"windows": (5, 5), "causal": (True, True)},
    "sliding, bidirectional": {"windows": (5, 5), "causal": (False, False)},
    "mixed": {"windows": (None, 5), "causal": (False, True)},
    "causal, biases, scaled": {
        "causal": (True, True), "attention_bias": True, "embedding_scale": 3.0, "output_multiplier": 0.3, "softcap": 2.0,
    },
}  # fmt: skip
TAPS = 2


def target() -> Target:
    return tiny_target("llama")


def sampler() -> RowSampler:
    return RowSampler(SamplingParams(), 0, [1], VOCAB)


def features_of(count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, TAPS * 32, generator=generator, dtype=torch.float64)


def context(drafter: DFlashDrafter, lengths: list[int], anchor: int = 7) -> DFlashState:
    """A state whose row b has committed features_of(lengths[b], b), then the anchor."""
    state = drafter.open(len(lengths), 128)
    for row, length in enumerate(lengths):
        drafter.reset(state, row, 0, anchor)
        tokens = tuple([3] * (length - 1) + [anchor]) if length else ()
        drafter.observe(state, Commit((row,), (tokens,), features_of(length, row)))
    return state


def by_definition(drafter: DFlashDrafter, features: torch.Tensor, anchor: int, size: int) -> torch.Tensor:
    """Draft logits [size - 1, V] with no cache and no plan: per head, over context and block at once."""
    net, config = drafter.network, drafter.network.config
    count = len(features)
    positions = torch.arange(count + size)
    angles = positions[:, None].float() * net.rotary.inv_freq
    cos, sin = (f(torch.cat([angles, angles], -1)).double()[:, None] for f in (torch.cos, torch.sin))

    def turn(x: torch.Tensor, at: slice) -> torch.Tensor:
        half = config.head_dim // 2
        return x * cos[at] + torch.cat([-x[..., half:], x[..., :half]], -1) * sin[at]

    ctx = net.hidden_norm(net.fc(features))
    tokens = torch.tensor([anchor] + [config.mask_token_id] * (size - 1))
    x = target().embed(tokens) * config.embedding_scale
    for index, layer in enumerate(net.layers):
        attn, heads = layer.self_attn, config.head_dim
        normed = layer.input_layernorm(x)
        both = torch.cat([ctx, normed])
        k = turn(attn.k_norm(attn.k_proj(both).unflatten(-1, (-1, heads))), slice(None))
        v = attn.v_proj(both).unflatten(-1, (-1, heads))
        q = turn(attn.q_norm(attn.q_proj(normed).unflatten(-1, (-1, heads))), slice(count, None))
        out = torch.zeros_like(q)
        for t in range(size):
            for head in range(config.num_heads):
                kv = head // (config.num_heads // config.num_kv_heads)
                scores = k[:, kv] @ q[t, head] / math.sqrt(heads)
                distance = count + t - positions
                hidden = torch.zeros(count + size, dtype=torch.bool)
                if config.causal[index]:
                    hidden |= distance < 0
                if config.windows[index] is not None:
                    hidden |= distance.abs() >= config.windows[index]
                out[t, head] = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v[:, kv]
        x = x + attn.o_proj(out.flatten(1))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    logits = target().head(net.norm(x)[1:]) * config.output_multiplier
    return logits if config.softcap is None else config.softcap * torch.tanh(logits / config.softcap)


def block_logits(drafter: DFlashDrafter, state: DFlashState, rows: list[int], lengths: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return drafter._block_logits(state, rows, lengths)


# --- what a block sees


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [0, 1, 3, 40, 90])
def test_drafts_equal_the_definition(kind: str, length: int) -> None:
    """T12: within the window, beyond it, and where our path does not read the window's outside."""
    drafter = dflash_drafter(target(), **KINDS[kind])
    found = block_logits(drafter, context(drafter, [length]), [0], [7])[0]
    expected = by_definition(drafter, features_of(length, 0), 7, 8)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_of_a_block_does_not_leak(kind: str) -> None:
    """A row that drafts less is padded to the widest: its logits are those of its own short block."""
    drafter = dflash_drafter(target(), **KINDS[kind])
    lengths, limits, rows = [20, 33, 2, 70], [7, 2, 4, 1], [2, 0, 3, 1]
    together = block_logits(drafter, context(drafter, lengths), rows, [limits[row] for row in rows])
    for b, row in enumerate(rows):
        alone = block_logits(drafter, context(drafter, lengths), [row], [limits[row]])[0]
        assert alone.shape[0] == limits[row]
        torch.testing.assert_close(together[b, : limits[row]], alone, rtol=0, atol=1e-12)


def test_a_row_does_not_depend_on_its_batch_mates() -> None:
    """D8: the same drafts alone, and beside rows of other lengths, in any order."""
    drafter = dflash_drafter(target())
    lengths = [20, 33, 2, 70]
    alone = {
        row: drafter.propose(context(drafter, lengths), [row], [sampler()], [7]).tokens_BN[0].tolist()
        for row in range(4)
    }
    for rows in ([0, 1, 2, 3], [3, 1], [2, 3, 0]):
        state = context(drafter, lengths)
        found = drafter.propose(state, rows, [sampler() for _ in rows], [7] * len(rows)).tokens_BN.tolist()
        assert found == [alone[row] for row in rows]


def test_a_block_sees_its_context_and_itself_only() -> None:
    """Its own row's features and anchor move the draft; another row, stale slots and what is committed
    later do not."""
    drafter = dflash_drafter(target())
    base = block_logits(drafter, context(drafter, [20, 9]), [0], [7])
    other_row = block_logits(drafter, context(drafter, [20, 50]), [0], [7])
    assert torch.equal(base, other_row)

    state = context(drafter, [20, 9])
    drafter.observe(state, Commit((0,), ((5, 5, 7),), features_of(3, 99)))
    drafter.reset(state, 0, 20, 7)  # rolled back: what was behind the length is stale
    torch.testing.assert_close(block_logits(drafter, state, [0], [7]), base, rtol=0, atol=0)

    assert not torch.equal(block_logits(drafter, context(drafter, [20, 9], anchor=8), [0], [7]), base)
    assert not torch.equal(block_logits(drafter, context(drafter, [19, 9]), [0], [7]), base)


@pytest.mark.parametrize("causal", [True, False])
def test_slots_see_later_slots_unless_the_layer_is_causal(causal: bool) -> None:
    """The block is what makes DFlash: bidirectional inside, so a longer block changes earlier slots."""
    drafter = dflash_drafter(target(), causal=(causal, causal))
    short = block_logits(drafter, context(drafter, [20]), [0], [3])[0]
    longer = block_logits(drafter, context(drafter, [20]), [0], [7])[0, :3]
    assert torch.allclose(short, longer, rtol=0, atol=1e-12) == causal


# --- what the draft cache holds


@pytest.mark.parametrize("kind", ["plain", "causal, biases, scaled"])
def test_context_in_pieces_equals_context_at_once(kind: str) -> None:
    """After 300 commits of random sizes, with drafts and roll backs between: the keys and values of
    every row are those of its whole sequence projected in one go (float64, 1e-12)."""
    drafter, rng = dflash_drafter(target(), **KINDS[kind]), random.Random(4)
    rows, capacity = 3, 160
    state = drafter.open(rows, capacity)
    kept = [features_of(0) for _ in range(rows)]
    for step in range(300):
        chosen = rng.sample(range(rows), rng.randint(1, rows))
        counts = [rng.randint(1, 8) for _ in chosen]
        for row, count in zip(chosen, counts, strict=True):
            if len(kept[row]) + count > capacity:
                length = rng.choice([0, len(kept[row]) // 2])
                kept[row] = kept[row][:length]
                drafter.reset(state, row, length, 5)
        if step % 2:
            drafter.propose(state, chosen, [sampler() for _ in chosen], [rng.randint(1, 7) for _ in chosen])
        new = features_of(sum(counts), step)
        drafter.observe(state, Commit(tuple(chosen), tuple((4,) * count for count in counts), new))
        for row, part in zip(chosen, new.split(counts), strict=True):
            kept[row] = torch.cat([kept[row], part])
    assert state.cache.lengths == [len(features) for features in kept]
    for row, features in enumerate(kept):
        at_once = drafter.network.project_context(features, torch.arange(len(features)))
        for index, pair in enumerate(at_once):
            for store, expected in zip(state.cache.layer(index), pair, strict=True):
                found = store[row, :, : len(features)].transpose(0, 1)
                torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("max_rows", [1, 3])
def test_the_cache_keeps_committed_context_only(max_rows: int) -> None:
    """After every round a row holds one slot less than it has tokens: the anchor has no feature yet."""
    engine = Engine(target(), DFlashDrafter(trained_network("llama"), target()), max_rows=max_rows)
    for prompt in PROMPTS:
        engine.submit(Request(prompt, SamplingParams(max_tokens=24)))
    rounds = 0
    while engine.busy:
        engine.step()
        state = engine.session.state
        for row, tokens in enumerate(engine.session.tokens):
            if tokens:
                rounds += 1
                assert state.cache.lengths[row] == engine.session.cache.lengths[row] == len(tokens) - 1
                assert state.anchors[row] == tokens[-1]
    assert rounds > 30


def test_features_that_are_committed_are_the_targets() -> None:
    """Slot t of the draft cache is made from the target's states at position t, of a fresh pass over
    all tokens: no round shifts them by one."""
    drafter = DFlashDrafter(trained_network("llama"), target())
    engine = Engine(target(), drafter)
    result = engine.run([Request(PROMPTS[4], SamplingParams(max_tokens=30, ignore_eos=True))])[0]
    tokens = torch.tensor([[*PROMPTS[4], *result.token_ids]])
    fresh = target().forward(tokens, target().new_cache(1, 100), [0], layer_ids=drafter.target_layer_ids)
    assert fresh.features_BTF is not None
    count = tokens.shape[1] - 1
    expected = drafter.network.project_context(fresh.features_BTF[0, :count].clone(), torch.arange(count))
    for index, pair in enumerate(expected):
        for store, whole in zip(engine.session.state.cache.layer(index), pair, strict=True):
            torch.testing.assert_close(store[0, :, :count].transpose(0, 1), whole, rtol=0, atol=1e-10)


# --- the drafter


@pytest.mark.parametrize("block_size", [1, 2, 5, 16, 40])
def test_other_block_sizes_than_the_trained_one(block_size: int) -> None:
    drafter = DFlashDrafter(trained_network("llama"), target(), block_size)
    assert drafter.max_draft_tokens == block_size - 1
    assert drafter.target_layer_ids == ((0, 1) if block_size > 1 else ())
    results = decode(target(), drafter, PROMPTS, max_tokens=30)
    assert [r.token_ids for r in results] == [r.token_ids for r in decode(target(), None, PROMPTS, max_tokens=30)]
    drafted = [r.num_drafted for result in results for r in result.stats.rounds]
    assert max(drafted) == min(block_size - 1, 28)


@pytest.mark.parametrize("block_size", [0, -1, 1025])
def test_block_sizes_that_make_no_sense(block_size: int) -> None:
    with pytest.raises(FlashdraftError, match=f"block_size is {block_size}"):
        dflash_drafter(target(), block_size)


def test_limits_cut_the_block() -> None:
    drafter = dflash_drafter(target())
    draft = drafter.propose(context(drafter, [4, 4, 4]), [0, 1, 2], [sampler() for _ in range(3)], [0, 3, 99])
    assert draft.lengths_B == (0, 3, 7)
    none = drafter.propose(context(drafter, [4]), [0], [sampler()], [0])
    assert none.lengths_B == (0,) and none.tokens_BN.shape == (1, 0)


def test_a_network_of_another_dtype_is_refused() -> None:
    network = random_network(target()).float()
    with pytest.raises(FlashdraftError, match=r"torch\.float32; expected the target's torch\.float64"):
        DFlashDrafter(network, target())


def test_a_network_that_does_not_fit_is_refused() -> None:
    with pytest.raises(FlashdraftError, match="taps the last layer"):
        dflash_drafter(target(), target_layer_ids=(0, 2))


def test_drafting_leaves_a_network_trainable() -> None:
    """A trainer decodes with the network it trains: gradients must be possible before and after."""
    network = random_network(target())
    decode(target(), DFlashDrafter(network, target()), PROMPTS[:1], max_tokens=8)
    assert all(parameter.requires_grad for parameter in network.parameters())
    sum(part.sum() for pair in network.project_context(features_of(3), torch.arange(3)) for part in pair).backward()
    assert network.fc.weight.grad is not None


# --- the network


def test_no_layers_are_shared() -> None:
    """D16: `[layer] * n` would share weights. Distinct parameters equal the formula, and so do the numbers."""
    for num_layers in (1, 3, 5):
        config = draft_config(target(), windows=(None,) * num_layers, causal=(False,) * num_layers)
        network = DFlashNetwork(config)
        assert len({p.data_ptr() for p in network.parameters()}) == 11 * num_layers + 3
        d, ff, q, kv, dim = 32, 40, 4 * 8, 2 * 8, 8
        layer = 2 * d + 2 * dim + d * (q + kv + kv) + q * d + 3 * d * ff
        assert sum(p.numel() for p in network.parameters()) == TAPS * d * d + 2 * d + num_layers * layer


def test_names_and_shapes_are_the_checkpoints() -> None:
    for bias in (False, True):
        config = draft_config(target(), attention_bias=bias)
        found = {name: tuple(t.shape) for name, t in DFlashNetwork(config).state_dict().items()}
        assert found == checkpoint.tensor_shapes(config)


def test_every_weight_moves_the_draft() -> None:
    """Nothing is loaded and left unused."""
    network = random_network(target(), attention_bias=True)
    drafter = DFlashDrafter(network, target())
    base = block_logits(drafter, context(drafter, [12]), [0], [7])
    for name, parameter in network.named_parameters():
        kept = parameter.detach().clone()
        with torch.no_grad():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        moved = block_logits(drafter, context(drafter, [12]), [0], [7])
        with torch.no_grad():
            parameter.copy_(kept)
        assert float((moved - base).abs().max()) > 1e-6, name


ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "default 1e7": {"rope_type": "default", "rope_theta": 1e7},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "linear below 1": {"rope_type": "linear", "rope_theta": 1e4, "factor": 0.5},
    "llama3": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192},
    "llama3, 3.2": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    "llama3, no original": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
                            "high_freq_factor": 4.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn, no original": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0},
    "yarn, attention_factor": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "attention_factor": 1.3,
                               "original_max_position_embeddings": 4096},
    "yarn, gpt-oss": {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
                      "truncate": False, "original_max_position_embeddings": 4096},
    "yarn, kimi": {"rope_type": "yarn", "rope_theta": 5e4, "factor": 64.0, "beta_fast": 32.0, "beta_slow": 1.0,
                   "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096},
    "yarn, mscale": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.5,
                     "original_max_position_embeddings": 4096},
    "yarn, one mscale": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "mscale": 0.707,
                         "original_max_position_embeddings": 4096},
    "yarn, narrow ramp": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "beta_fast": 2.0, "beta_slow": 2.0,
                          "truncate": False, "original_max_position_embeddings": 4096},
    "yarn, betas": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "beta_fast": 16.0, "beta_slow": 2.0,
                    "original_max_position_embeddings": 256},
}  # fmt: skip


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("dim", [8, 64, 128])
def test_rope_frequencies_equal_transformers(name: str, dim: int) -> None:
    """To the last bit: what transformers computes for a Qwen3 configuration with these parameters."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = ROPES[name]
    config = transformers.Qwen3Config(
        head_dim=dim, max_position_embeddings=40960, rope_parameters=dict(rope), hidden_size=64, num_attention_heads=4
    )
    if rope["rope_type"] == "default":
        expected, factor = transformers.models.qwen3.modeling_qwen3.Qwen3RotaryEmbedding(config).inv_freq, 1.0
    else:
        expected, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config)
    found, found_factor = rope_frequencies(rope, dim, 40960)
    assert found_factor == factor
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ["default 1e7", "yarn, mscale", "llama3"])
def test_rope_tables_equal_transformers(name: str) -> None:
    config = transformers.Qwen3Config(
        head_dim=64, max_position_embeddings=40960, rope_parameters=dict(ROPES[name]), hidden_size=64,
        num_attention_heads=4,
    )  # fmt: skip
    positions = torch.tensor([[0, 1, 5, 1000, 40000]])
    expected = transformers.models.qwen3.modeling_qwen3.Qwen3RotaryEmbedding(config)(torch.zeros(1), positions)
    found = RotaryEmbedding(ROPES[name], 64, 40960).table(positions, torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_an_unknown_rope_is_refused_in_code_too() -> None:
    with pytest.raises(FlashdraftError, match="rope_type is 'longrope'"):
        RotaryEmbedding({"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0}, 8, 64)


def test_frequencies_stay_fp32_in_a_bfloat16_network() -> None:
    """Angles of long contexts need fp32: bfloat16 would round position 1000 times a frequency."""
    network = random_network(target())
    expected = network.rotary.inv_freq.clone()
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        network.to(dtype)
        assert network.rotary.inv_freq.dtype == torch.float32
        assert torch.equal(network.rotary.inv_freq, expected)
    assert "inv_freq" not in " ".join(network.state_dict())


def test_norm_is_taken_in_fp32() -> None:
    norm = RMSNorm(8, 1e-6).to(torch.float16)
    big = torch.full((1, 8), 1000.0, dtype=torch.float16)  # its square overflows float16
    assert torch.equal(norm(big), torch.ones(1, 8, dtype=torch.float16))
    assert norm(big).dtype == torch.float16 and RMSNorm(8, 1e-6).double()(big.double()).dtype == torch.float64


# --- loading


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    network = random_network(tiny_target("llama", "float32"), rope=ROPES["yarn"])
    checkpoint.write(tmp_path / "draft", network.config, network.state_dict())
    return tmp_path / "draft"


@pytest.mark.parametrize("rope", ["default", "linear", "llama3", "yarn", "yarn, mscale"])
def test_a_loaded_draft_is_the_saved_one(rope: str, tmp_path: Path) -> None:
    """T9, and the network is made without memory ("meta") first: rotary tables included."""
    network = random_network(target(), rope=ROPES[rope])
    checkpoint.write(tmp_path / "draft", network.config, network.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = DFlashDrafter.load(tmp_path / "draft", target())
    assert not any(t.is_meta for t in [*loaded.network.parameters(), *loaded.network.buffers()])
    assert not any(p.requires_grad for p in loaded.network.parameters())
    found = block_logits(loaded, context(loaded, [20]), [0], [7])
    built = DFlashDrafter(network, target())
    assert torch.equal(found, block_logits(built, context(built, [20]), [0], [7]))


def test_loading_prints_nothing(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    DFlashDrafter.load(folder, tiny_target("llama", "float32"))
    assert capfd.readouterr() == ("", "")


def watch_reads(monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list[weakref.ref[torch.Tensor]]]:
    """Addresses and lives of the weights that `checkpoint.read` returns."""
    addresses: list[int] = []
    lives: list[weakref.ref[torch.Tensor]] = []
    read = checkpoint.read

    def watch(path: Any) -> Any:
        config, weights = read(path)
        addresses.extend(t.data_ptr() for t in weights.values())
        lives.extend(weakref.ref(t) for t in weights.values())
        return config, weights

    monkeypatch.setattr(checkpoint, "read", watch)
    return addresses, lives


def test_loading_does_not_copy_what_has_the_right_type(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    addresses, _ = watch_reads(monkeypatch)
    drafter = DFlashDrafter.load(folder, tiny_target("llama", "float32"))
    assert sorted(p.data_ptr() for p in drafter.network.parameters()) == sorted(addresses)


def test_converting_frees_each_weight_as_it_goes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversion holds the converted network and one weight more, not both networks."""
    _, lives = watch_reads(monkeypatch)
    left: list[int] = []
    move = DFlashNetwork.to

    def watch(self: DFlashNetwork, *args: Any, **kwargs: Any) -> Any:
        moved = move(self, *args, **kwargs)
        gc.collect()
        left.append(sum(life() is not None for life in lives))
        return moved

    monkeypatch.setattr(DFlashNetwork, "to", watch)
    drafter = DFlashDrafter.load(folder, tiny_target("llama", "float64"))
    assert drafter.network.fc.weight.dtype == torch.float64
    assert left == [0] and len(lives) == 25
