"""Blocks in training: what they see, what they learn, and that it is what decoding does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex

from bed import VOCAB, random_network, random_prompt, tiny_target
from flashdraft.drafters.dflash import DFlashDrafter, DFlashNetwork
from flashdraft.target import Target
from flashdraft.training.blocks import attend_piece, block_masks, block_states, make_blocks
from flashdraft.training.data import TokenSequence
from flashdraft.training.flex import _call, tile_mask, visible_runs
from flashdraft.training.plan import Piece, usable_anchors
from flashdraft.types import Commit

MASK = VOCAB - 1

# dynamo looks at every input, network states among them
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
both_ways = pytest.mark.parametrize("attention", ["sdpa", "flex"])


@contextlib.contextmanager
def flex_that_trains_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch refuses FlexAttention on a CPU where gradients are asked for, as its CPU kernel has none.
    The program behind it, run operator by operator, has an exact backward pass of its own, written out
    (not found by differentiating); without the refusal it can be tested."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *args: None)
    # All tests together make more programs than one run may.
    limit = "recompile_limit" if hasattr(torch._dynamo.config, "recompile_limit") else "cache_size_limit"
    with torch._dynamo.config.patch({limit: 64}):
        yield


@pytest.fixture(autouse=True)
def flex_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with flex_that_trains_on_a_cpu(monkeypatch):
        yield


def sequence(length: int = 30, prompt: int = 9, seed: int = 3, **changes: Any) -> TokenSequence:
    values: dict[str, Any] = {
        "id": f"s{seed}", "source": "bed", "token_ids": tuple(random_prompt(seed, length)),
        "loss_spans": ((prompt, length),), **changes,
    }  # fmt: skip
    return TokenSequence(**values)


def features_of(target: Target, tokens: tuple[int, ...], layer_ids: tuple[int, ...]) -> torch.Tensor:
    """Rows behind the sequence are padding, as training has them."""
    width = -(-len(tokens) // 64) * 64
    ids = torch.zeros(1, width, dtype=torch.int64)
    ids[0, : len(tokens)] = torch.tensor(tokens)
    out = target.forward(ids, target.new_cache(1, width), [0], valid=[len(tokens)], layer_ids=layer_ids)
    assert out.features_BTF is not None
    return out.features_BTF[0].clone()


def states_of(
    network: DFlashNetwork,
    target: Target,
    sequences: list[TokenSequence],
    pieces: list[Piece],
    size: int,
    attention: str = "sdpa",
) -> torch.Tensor:
    blocks = make_blocks(pieces, sequences, network.config.block_size, network.config.mask_token_id, size)
    features = {
        i: features_of(target, sequences[i].token_ids, network.config.target_layer_ids) for i in set(blocks.sequences)
    }
    return block_states(network, target.embed, blocks, features, attention)


def piece(index: int, anchors: list[int], end: int) -> Piece:
    return Piece(index, tuple(anchors), (end,) * len(anchors))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"windows": (5, None), "causal": (True, False)},
        {"windows": (5, 5), "causal": (False, False)},
        {"softcap": 3.0, "output_multiplier": 0.5, "embedding_scale": 2.0},
    ],
    ids=["full", "mixed windows", "bidirectional windows", "caps and scales"],
)
@pytest.mark.parametrize(
    ("family", "attention"), [("llama", "sdpa"), ("qwen3", "sdpa"), ("llama", "flex")], ids=["llama", "qwen3", "flex"]
)
def test_training_logits_are_those_of_decoding(attention: str, family: str, changes: dict[str, Any]) -> None:
    """T3: right in training and wrong when serving. For every anchor the logits are equal."""
    target = tiny_target(family)
    network = random_network(target, **changes)
    drafter = DFlashDrafter(network, target)
    sample = sequence()
    anchors = [p for p, _ in usable_anchors(sample)]
    states = states_of(network, target, [sample], [piece(0, anchors, len(sample.token_ids))], len(anchors), attention)
    trained = network.shape_logits(target.head(states))
    features = features_of(target, sample.token_ids, network.config.target_layer_ids)
    for a, anchor in enumerate(anchors):
        state = drafter.open(1, 64)
        drafter.reset(state, 0, 0, sample.token_ids[0])
        drafter.observe(state, Commit((0,), (sample.token_ids[1 : anchor + 1],), features[:anchor]))
        with torch.inference_mode():
            served = drafter._block_logits(state, [0], [network.config.block_size - 1])
        assert torch.allclose(trained[a], served[0], rtol=0, atol=1e-10)


@both_ways
def test_a_block_does_not_see_other_blocks(attention: str) -> None:
    """T2: a loss that is too good with many anchors. A block among others is as it is alone, and
    gives no gradient to another block's anchor."""
    target = tiny_target()
    network = random_network(target).requires_grad_(True)
    samples = [sequence(seed=3), sequence(seed=4, length=80, prompt=20)]
    pieces = [piece(0, [9, 10, 17, 28], 30), piece(1, [20, 33, 70, 78], 80), piece(0, [11, 12, 13, 14], 30)]
    together = states_of(network, target, samples, pieces, 4, attention)
    for p, part in enumerate(pieces):
        for a, anchor in enumerate(part.anchors):
            alone = states_of(network, target, samples, [piece(part.sequence, [anchor], part.ends[0])], 1, attention)
            assert torch.allclose(alone[0], together[4 * p + a], rtol=0, atol=1e-9)

    embeds: list[torch.Tensor] = []

    def embed(tokens: torch.Tensor) -> torch.Tensor:
        embeds.append(target.embed(tokens).clone().requires_grad_(True))
        return embeds[-1]

    blocks = make_blocks(pieces, samples, 8, MASK, 4)
    features = {i: features_of(target, samples[i].token_ids, (0, 1)) for i in (0, 1)}
    states = block_states(network, embed, blocks, features, attention)
    (gradient,) = torch.autograd.grad(states[2].sum(), embeds[0])
    assert gradient[2].abs().sum() > 0
    assert gradient[[i for i in range(12) if i != 2]].abs().sum() == 0


@both_ways
def test_a_context_ends_before_the_anchor(attention: str) -> None:
    """Neither the features of the anchor nor of what follows it reach its block."""
    target = tiny_target()
    network = random_network(target)
    sample = sequence()
    blocks = make_blocks([piece(0, [9, 15], 30)], [sample], 8, MASK, 2)
    features = features_of(target, sample.token_ids, (0, 1))
    before = block_states(network, target.embed, blocks, {0: features}, attention)
    changed = features.clone()
    changed[15:] += 100
    after = block_states(network, target.embed, blocks, {0: changed}, attention)
    assert torch.equal(before, after)
    changed[14] += 1
    third = block_states(network, target.embed, blocks, {0: changed}, attention)
    assert torch.equal(before[0], third[0]) and not torch.allclose(before[1], third[1])


def test_positions_and_labels_that_are_trained() -> None:
    """T4: the first response token never trained. The list of (anchor, slot, label) is the
    hand-made one: every token of the answer is an anchor that has a label behind it, the first one
    included; labels end with the span."""
    sample = TokenSequence("a", "bed", (50, 51, 52, 53, 54, 55, 2, 60, 61, 62, 63), ((3, 7), (9, 11)))
    found = usable_anchors(sample)
    assert found == [(3, 7), (4, 7), (5, 7), (9, 11)]
    part = Piece(0, tuple(p for p, _ in found), tuple(end for _, end in found))
    blocks = make_blocks([part], [sample], 4, MASK, 6)
    assert blocks.tokens_AB[:, 0].tolist() == [53, 54, 55, 62, 62, 62]
    assert (blocks.tokens_AB[:, 1:] == MASK).all()
    pairs = {
        (int(blocks.positions_AB[a, 0]), k + 1, int(blocks.labels_AL[a, k]))
        for a in range(6)
        for k in range(3)
        if blocks.labels_AL[a, k] >= 0
    }
    assert pairs == {(3, 1, 54), (3, 2, 55), (3, 3, 2), (4, 1, 55), (4, 2, 2), (5, 1, 2), (9, 1, 63)}
    assert (blocks.labels_AL[4:] == -1).all()  # blocks that fill up the piece


def loop_attention(q: torch.Tensor, ck: torch.Tensor, cv: torch.Tensor, bk: torch.Tensor, bv: torch.Tensor,
                   anchors: list[int], window: int | None, causal: bool) -> torch.Tensor:  # fmt: skip
    """The same, key by key."""
    n, heads, size, dim = q.shape
    group = heads // bk.shape[1]
    out = torch.zeros(n, size, heads, dim, dtype=q.dtype)
    for b in range(n):
        for h in range(heads):
            for t in range(size):
                keys, values = [], []
                for s in range(anchors[b]):
                    if window is None or anchors[b] + t - s < window:
                        keys.append(ck[s, h // group])
                        values.append(cv[s, h // group])
                for s in range(size):
                    if not (causal and s > t) and (window is None or abs(s - t) < window):
                        keys.append(bk[b, h // group, s])
                        values.append(bv[b, h // group, s])
                scores = torch.stack([q[b, h, t] @ k for k in keys]) * dim**-0.5
                out[b, t, h] = scores.softmax(0) @ torch.stack(values)
    return out


WINDOWS = [(None, False), (4, True), (4, False), (None, True)]


@pytest.mark.parametrize(("window", "causal"), WINDOWS)
def test_attention_equals_a_loop(window: int | None, causal: bool) -> None:
    """T5: one kernel and nothing to compare it with. Masks and folding equal a for-loop."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    anchors, size = [1, 6, 11], 5
    q, ck, cv = random(3, 4, size, 8), random(16, 2, 8), random(16, 2, 8)
    bk, bv = random(3, 2, size, 8), random(3, 2, size, 8)
    positions = torch.tensor(anchors)[:, None] + torch.arange(size)
    masks = block_masks(positions, 16, window, causal, torch.float64)
    found = attend_piece(q, ck, cv, bk, bv, *masks)
    assert torch.allclose(found, loop_attention(q, ck, cv, bk, bv, anchors, window, causal), rtol=0, atol=1e-9)


@pytest.mark.parametrize(("window", "causal"), WINDOWS)
def test_flex_attention_equals_a_loop(window: int | None, causal: bool) -> None:
    """T5 for the other way: contexts of two sequences behind one another, 15 queries and 113 that fill
    up their tile."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    anchors, starts, size = [1, 130, 11], [0, 0, 140], 5
    q, ck, cv = random(3, 4, size, 8), random(256, 2, 8), random(256, 2, 8)
    bk, bv, filling = random(3, 2, size, 8), random(3, 2, size, 8), random(113, 2, 8)
    positions = torch.tensor(anchors)[:, None] + torch.arange(size)
    runs = visible_runs(positions, torch.tensor(starts), 256, window, causal)
    keys, values = (torch.cat([c, b.transpose(1, 2).flatten(0, 1), filling]) for c, b in ((ck, bk), (cv, bv)))
    queries = torch.cat([q.transpose(1, 2).flatten(0, 1), random(113, 4, 8)])
    out = _call(queries, keys, values, tile_mask(runs, len(keys)))
    assert out.isfinite().all()
    for b, (anchor, start) in enumerate(zip(anchors, starts, strict=True)):
        one = slice(b, b + 1)
        expected = loop_attention(q[one], ck[start:], cv[start:], bk[one], bv[one], [anchor], window, causal)
        assert torch.allclose(out[b * size : (b + 1) * size], expected[0], rtol=0, atol=1e-9)


@pytest.mark.parametrize("changes", [{}, {"windows": (5, None), "causal": (True, False)}], ids=["full", "windows"])
def test_gradients_are_the_same_both_ways(changes: dict[str, Any]) -> None:
    """T5: of all weights, through the keys and values of contexts that several blocks share. The first
    way's is autograd's of plain products."""
    target = tiny_target()
    network = random_network(target, **changes).requires_grad_(True)
    samples = [sequence(seed=3), sequence(seed=4, length=80, prompt=20)]
    pieces = [piece(0, [9, 10, 17, 28], 30), piece(1, [20, 33, 70, 78], 80), piece(0, [11, 12, 13], 30)]
    found = []
    for attention in ("sdpa", "flex"):
        states = states_of(network, target, samples, pieces, 4, attention)
        weights = torch.randn(states.shape, generator=torch.Generator().manual_seed(1), dtype=states.dtype)
        found.append(torch.autograd.grad((states * weights).sum(), list(network.parameters())))
    for one, other in zip(*found, strict=True):
        assert one.abs().sum() > 0
        assert torch.allclose(one, other, rtol=0, atol=1e-10)
