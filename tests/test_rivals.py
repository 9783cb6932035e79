"""The rivals draft what plain loops say they should: no caches, everything computed again for each token."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import rivals
from bed import CONFIGS as FAMILIES
from bed import PROMPTS, VOCAB, byte_tokenizer, decode, make_model, tiny_target
from flashdraft.drafters import drafter_options, make_drafter
from flashdraft.drafters.dflash import DFlashDrafter, DFlashNetwork
from flashdraft.drafters.draft_model import DraftModelDrafter
from flashdraft.drafters.drawing import likeliest
from flashdraft.drafters.dynamic_tree import TreeShape
from flashdraft.drafters.eagle3 import Eagle3Network
from flashdraft.drafters.medusa import MedusaDrafter, static_tree
from flashdraft.drafters.ngram import NGramDrafter
from flashdraft.engine import Engine
from flashdraft.sampling import RowSampler
from flashdraft.target import Target
from flashdraft.tree import chain, paths
from flashdraft.types import Commit, FlashdraftError, Request, SamplingParams
from rivals import CHOICES, EAGLE_IDS, LAYERS, TREE, Recorder

Vector = torch.Tensor
NUM_TOKENS = 14


def recorded(drafter: Any, max_rows: int = 3, prompts: Sequence[list[int]] = PROMPTS[2:5], **params: Any) -> Recorder:
    """What a drafter proposes while real decoding goes on."""
    watched = Recorder(drafter)
    decode(tiny_target(), watched, prompts, max_rows, max_tokens=NUM_TOKENS, **params)
    assert any(drafted for _, drafted, *_ in watched.rounds)
    return watched


def features_of(tokens: list[int], layer_ids: tuple[int, ...]) -> torch.Tensor:
    """[T, F] of the target over all tokens at once."""
    target = tiny_target()
    out = target.forward(torch.tensor([tokens]), target.new_cache(1, len(tokens)), [0], layer_ids=layer_ids)
    assert out.features_BTF is not None
    return out.features_BTF[0].clone()  # no inference tensor


def rms(x: Vector, weight: Vector, eps: float = 1e-6) -> Vector:
    return x / torch.sqrt((x * x).sum() / len(x) + eps) * weight


def silu(x: Vector) -> Vector:
    return x / (1 + torch.exp(-x))


# -- what the head reads -----------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_the_feature_behind_the_last_layer_is_what_the_head_reads(family: str) -> None:
    """Medusa's input: the bare head makes the logits of it, so it is behind the final norm; the last
    layer's own output (id L - 1) is before it."""
    target = tiny_target(family)
    ids, size = torch.tensor([PROMPTS[1]]), target.hidden_size
    last = target.num_layers - 1
    out = target.forward(ids, target.new_cache(1, 64), [0], layer_ids=(last, last + 1))
    assert out.features_BTF is not None and out.features_BTF.shape[-1] == 2 * size
    before, after = out.features_BTF[..., :size], out.features_BTF[..., size:]
    assert torch.allclose(target.head(after), out.logits_BTV, rtol=0, atol=1e-9)
    assert not torch.allclose(target.head(before), out.logits_BTV, rtol=0, atol=1e-2)
    final = target.forward(ids, target.new_cache(1, 64), [0], keep=slice(0, 0), layer_ids=(last + 1,))
    assert final.features_BTF is not None and torch.equal(final.features_BTF, after)  # not only where logits are


# -- a draft model -----------------------------------------------------------------------------------


def continued(model: Target, tokens: list[int], count: int, sampler: RowSampler) -> list[int]:
    drafted: list[int] = []
    for _ in range(count):
        ids = torch.tensor([[*tokens, *drafted]])
        logits = model.forward(ids, model.new_cache(1, ids.shape[1]), [0]).logits_BTV[0, -1:]
        drafted.append(int(sampler.choose(logits, paths=[drafted])))
    return drafted


@pytest.mark.parametrize("params", [{}, {"temperature": 0.9}])
def test_draft_model_continues_the_text(params: dict[str, Any]) -> None:
    model = rivals.small_model("llama")
    watched = recorded(DraftModelDrafter(model, tiny_target(), 5), **params)
    for tokens, drafted, parents, _, sampler in watched.rounds:
        assert drafted == continued(model, tokens, len(drafted), sampler) and parents is None


def test_draft_model_of_another_tokenizer_is_refused() -> None:
    config = FAMILIES["llama"](vocab_size=300)
    target = Target(make_model(config, torch.float32), byte_tokenizer(), name="big")
    small = Target(make_model(config, torch.float32), byte_tokenizer(b"ab"), name="small")
    with pytest.raises(
        FlashdraftError, match=r"^the draft model small has another tokenizer than big \('ab' is 259 there"
    ):
        DraftModelDrafter(small, target)
    DraftModelDrafter(Target(make_model(config, torch.float32), byte_tokenizer(), name="same"), target)
    with pytest.raises(FlashdraftError, match=r"^the draft model tiny llama has 96 tokens and big 300; expected"):
        DraftModelDrafter(tiny_target("llama", "float32"), target)


def test_draft_model_stops_where_its_context_ends() -> None:
    """A draft model made for fewer tokens than the target drafts up to there, and the text goes on."""
    config = FAMILIES["llama"](max_position_embeddings=40)
    small = Target(make_model(config, torch.float64), name="short")
    prompt = PROMPTS[2][:11]
    (plain,) = decode(tiny_target(), None, [prompt], max_tokens=60, ignore_eos=True)
    (found,) = decode(
        tiny_target(), DraftModelDrafter(small, tiny_target(), 4), [prompt], max_tokens=60, ignore_eos=True
    )
    assert found.token_ids == plain.token_ids
    assert found.stats.rounds[0].num_drafted == 3 and found.stats.rounds[-1].num_drafted == 0
    long = list(range(3, 60))  # a prompt beyond it from the start
    (found,) = decode(tiny_target(), DraftModelDrafter(small, tiny_target(), 4), [long], max_tokens=3)
    assert [r.num_drafted for r in found.stats.rounds][:1] == [0]


# -- Medusa ------------------------------------------------------------------------------------------


def medusa_by_hand(tokens: list[int]) -> list[Vector]:
    """Logits of head 1, 2, ... at the state that predicted the last token."""
    network = rivals.medusa_network("llama")
    weights, out = network.state_dict(), []
    state = features_of(tokens[:-1], (tiny_target().num_layers,))[-1]
    for k in range(network.config.num_heads):
        x = state
        for n in range(network.config.num_blocks):
            x = x + silu(weights[f"blocks.{k}.layers.{n}.weight"] @ x + weights[f"blocks.{k}.layers.{n}.bias"])
        out.append(weights[f"lm_heads.{k}.weight"] @ x)
    return out


def test_medusa_chain_equals_a_plain_loop() -> None:
    for tokens, drafted, parents, *_ in recorded(rivals.medusa("llama", "float64", 5)).rounds:
        logits = medusa_by_hand(tokens)
        assert drafted == [int(logits[k].argmax()) for k in range(len(drafted))] and parents is None


def test_medusa_tree_equals_a_plain_loop() -> None:
    """Each choice's node holds the token of that rank of the head for its depth, under its own parent."""
    for tokens, drafted, parents, *_ in recorded(rivals.medusa("llama", "float64", 5, tree=True)).rounds:
        best = [sorted(range(VOCAB), key=lambda t, head=head: -float(head[t])) for head in medusa_by_hand(tokens)]  # type: ignore[misc]
        assert parents is not None
        found = {way for way in paths(drafted, parents) if way}
        depth = max(map(len, found), default=0)
        expected = {tuple(best[d][rank] for d, rank in enumerate(choice)) for choice in CHOICES if len(choice) <= depth}
        assert found == expected and len(drafted) == len(expected)


def test_heads_learn_the_tokens_ahead() -> None:
    """The taught heads say more right tokens at their own distance than at any other: head k is about
    the token k behind the anchor."""
    network, right = rivals.medusa_network("llama", "float32"), torch.zeros(4, 6)
    for tokens, states in rivals.samples("llama", (tiny_target().num_layers,)):
        guesses = network(states).argmax(-1)
        for head in range(4):
            for ahead in range(6):
                hits = guesses[: len(tokens) - 1 - ahead, head] == tokens[1 + ahead :]
                right[head, ahead] += hits.sum()
    assert right.argmax(1).tolist() == [1, 2, 3, 4]


# -- EAGLE-3 -----------------------------------------------------------------------------------------

Pair = tuple[Vector, Vector]  # a token's embedding, and the fused feature or state that predicted it


def turned(x: Vector, position: int) -> Vector:
    """A head's rotary embedding, pair by pair."""
    half, out = len(x) // 2, x.clone()
    for i in range(half):
        angle = position / 10000.0 ** (2 * i / len(x))
        out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return out


def state_behind(network: Eagle3Network, pairs: list[Pair]) -> Vector:
    """The layer's output at the last of some pairs."""
    w, config = network.state_dict(), network.config
    dim, group = config.head_dim, config.num_heads // config.num_kv_heads
    joined = [
        torch.cat([rms(e, w["midlayer.input_layernorm.weight"]), rms(h, w["midlayer.hidden_norm.weight"])])
        for e, h in pairs
    ]
    seen = []
    for head in range(config.num_heads):
        rows, shared = slice(head * dim, head * dim + dim), slice(head // group * dim, head // group * dim + dim)
        q = turned(w["midlayer.self_attn.q_proj.weight"][rows] @ joined[-1], len(pairs) - 1)
        keys = [turned(w["midlayer.self_attn.k_proj.weight"][shared] @ x, i) for i, x in enumerate(joined)]
        powers = [math.exp(float(q @ k) / math.sqrt(dim)) for k in keys]
        values = [w["midlayer.self_attn.v_proj.weight"][shared] @ x for x in joined]
        seen.append(sum(p / sum(powers) * v for p, v in zip(powers, values, strict=True)))
    x = pairs[-1][1] + w["midlayer.self_attn.o_proj.weight"] @ torch.cat(seen)  # type: ignore[arg-type]
    n = rms(x, w["midlayer.post_attention_layernorm.weight"])
    gated = silu(w["midlayer.mlp.gate_proj.weight"] @ n) * (w["midlayer.mlp.up_proj.weight"] @ n)
    return x + w["midlayer.mlp.down_proj.weight"] @ gated


def log_probs(network: Eagle3Network, state: Vector) -> dict[int, float]:
    """By target id; ids outside the draft's vocabulary have none."""
    w = network.state_dict()
    logits = (w["lm_head.weight"] @ rms(state, w["norm.weight"])).tolist()
    total = math.log(sum(math.exp(x) for x in logits))
    return {token: x - total for token, x in zip(EAGLE_IDS, logits, strict=True)}


def context_pairs(network: Eagle3Network, tokens: list[int]) -> list[Pair]:
    """Token j + 1 with what the target's layers said at j."""
    embeds, fc = tiny_target().embed(torch.tensor(tokens)), network.state_dict()["fc.weight"]
    return [(embeds[j + 1], fc @ feature) for j, feature in enumerate(features_of(tokens[:-1], LAYERS))]


def embedding(token: int) -> Vector:
    return tiny_target().embed(torch.tensor([token]))[0]


def test_eagle_chain_equals_a_plain_loop() -> None:
    network = rivals.eagle_network("llama")
    for tokens, drafted, parents, *_ in recorded(rivals.eagle3("llama", "float64", 4)).rounds[::2]:
        pairs, expected = context_pairs(network, tokens), []
        for _ in drafted:
            state = state_behind(network, pairs)
            logp = log_probs(network, state)
            expected.append(max(logp, key=lambda t: logp[t]))
            pairs.append((embedding(expected[-1]), state))
        assert drafted == expected and parents is None


def test_eagle_tree_equals_a_plain_loop() -> None:
    """EAGLE-2: expand the likeliest nodes of each level, then keep the likeliest of all."""
    network, compared = rivals.eagle_network("llama"), 0
    for tokens, drafted, parents, *_ in recorded(rivals.eagle3("llama", "float64", 5, TREE)).rounds[::3]:
        assert parents is not None
        found = {way for way in paths(drafted, parents) if way}
        level: list[tuple[float, tuple[int, ...], list[Pair]]] = [(0.0, (), context_pairs(network, tokens))]
        nodes: list[tuple[float, tuple[int, ...], list[Pair]]] = []
        for _ in range(4):
            children = []
            for score, way, pairs in sorted(level, key=lambda node: -node[0])[: TREE.top_k]:
                state = state_behind(network, pairs)
                best = sorted(log_probs(network, state).items(), key=lambda item: -item[1])[: TREE.top_k]
                children += [(score + logp, (*way, t), [*pairs, (embedding(t), state)]) for t, logp in best]
            level, nodes = children, nodes + children
        if len(tokens) + 4 < len(PROMPTS[2]) + NUM_TOKENS:  # not cut by the end of the answer
            expected = sorted(nodes, key=lambda node: -node[0])[: TREE.nodes]
            assert found == {way for _, way, _ in expected}
            compared += 1
    assert compared >= 2


def test_likeliest_obeys_the_noise() -> None:
    """The best child is the one that the target would pick if it had the draft's logits; children come
    in order; impossible tokens are replaced."""
    sampler = RowSampler(SamplingParams(temperature=0.7), 3, [5], 40)
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
    ways = [(), (7,), (9,)]
    tokens, values = likeliest(sampler, logits, 4, ways)
    assert [row[0] for row in tokens] == sampler.choose(logits, paths=ways).tolist()
    assert all(row == sorted(row, reverse=True) for row in values)
    logits[:, 2:] = -torch.inf
    tokens, values = likeliest(RowSampler(SamplingParams(), 0, [5], 40), logits, 4)
    assert all(set(row) <= {0, 1} and row[2:] == [row[0]] * 2 for row in tokens)
    assert all(math.isinf(row[2]) for row in values)


# -- DFlash, in more passes and without its parts ----------------------------------------------------------


@torch.no_grad()
def block_by_hand(network: DFlashNetwork, tokens: list[int], block: list[int]) -> Vector:
    """Logits [B, V] of a block behind committed tokens, by KV injection, without a cache."""
    context = network.project_context(features_of(tokens[:-1], (0, 1)), torch.arange(len(tokens) - 1))

    def attend(layer: int, q: Vector, k: Vector, v: Vector) -> Vector:
        before = [part.transpose(0, 1)[None] for part in context[layer]]
        keys, values = (torch.cat([old, new], dim=2) for old, new in zip(before, (k, v), strict=True))
        return torch.nn.functional.scaled_dot_product_attention(q, keys, values, enable_gqa=True).transpose(1, 2)

    positions = torch.arange(len(block))[None] + len(tokens) - 1
    states = network(tiny_target().embed(torch.tensor([block])), positions, attend)
    logits = tiny_target().head(states)[0]
    return logits.float()


@pytest.mark.parametrize("passes", [2, 4, 0])
def test_more_passes_fill_the_most_confident_slots_first(passes: int) -> None:
    """Diffusion sampling: each pass fixes its share of the slots that are surest, and the rest is
    filled again with those known. 0: left to right, one pass a token."""
    network = rivals.trained_network("llama")
    for tokens, drafted, *_ in recorded(rivals.several_passes(passes, "llama", "float64", 8)).rounds[::2]:
        block = [tokens[-1]] + [VOCAB - 1] * len(drafted)
        masked = list(range(1, len(block)))
        for left in range(min(passes or 8, len(drafted)), 0, -1):
            logits = block_by_hand(network, tokens, block)
            best = {n: (float(logits[n].log_softmax(-1).max()), int(logits[n].argmax())) for n in masked}
            share = math.ceil(len(masked) / left)
            chosen = sorted(masked, key=lambda n: -best[n][0])[:share] if passes else masked[:1]
            for n in chosen:
                block[n] = best[n][1]
                masked.remove(n)
        assert block[1:] == drafted and not masked


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_dflash_tree_holds_the_likeliest_paths_of_one_pass(temperature: float) -> None:
    """DDTree (arXiv 2604.12989): of all paths through the slots' tokens, found here by trying them all, the
    ones of the highest product of chances, over the draft's own vocabulary and with the request's noise."""
    network, nodes, ids = rivals.trained_network("llama"), 12, torch.tensor(EAGLE_IDS)
    made, compared = rivals.dflash_tree("llama", "float64", 4, nodes), 0
    watched = recorded(made, temperature=temperature, seed=3)
    for (tokens, drafted, parents, _, sampler), limit in zip(watched.rounds, watched.limits, strict=True):
        if not drafted:
            continue
        assert parents is not None
        depth = min(3, limit)
        logits = block_by_hand(network, tokens, [tokens[-1]] + [VOCAB - 1] * depth)[1:, ids]
        if temperature:
            noise = [sampler.noise(len(tokens) + n)[ids] for n in range(depth)]
            logits = logits / temperature + torch.stack(noise)
        chances = [dict(zip(EAGLE_IDS, row.tolist(), strict=True)) for row in logits.log_softmax(-1)]
        best = [sorted(row, key=lambda i, row=row: -row[i])[:nodes] for row in chances]  # type: ignore[misc]
        every = {
            way: sum(chances[d][token] for d, token in enumerate(way))
            for n in range(1, depth + 1)
            for way in itertools.product(*best[:n])
        }
        expected = sorted(every, key=lambda way: -every[way])[:nodes]
        assert [way for way in paths(drafted, parents) if way] == expected
        compared += len(drafted) > depth > 1
    assert compared >= 2


def test_a_tree_may_be_as_small_as_its_chain_and_needs_one_pass() -> None:
    """One node is the first guess; a block of the anchor alone drafts nothing; who asks for more passes gets no tree."""
    network, target = rivals.trained_network("llama"), tiny_target()
    chains = drafts(recorded(DFlashDrafter(network, target, 6)))
    firsts = drafts(recorded(DFlashDrafter(network, target, 6, nodes=1)))
    both = chains.keys() & firsts.keys()
    assert len(both) > 8 and all(
        firsts[key] == (chains[key][0][:1], [-1][: len(firsts[key][0])] or None) for key in both
    )
    alone = DFlashDrafter(network, target, 1, nodes=8)
    assert not alone.drafts_trees and alone.max_draft_tokens == 0
    for nodes in (0, 1025):
        with pytest.raises(FlashdraftError, match=rf"^nodes is {nodes}; expected 1 to 1024\.$"):
            DFlashDrafter(network, target, nodes=nodes)
    left = rivals.several_passes(0, "llama", "float64", 4).network
    for made, passes in ((network, 2), (left, 1)):
        with pytest.raises(FlashdraftError, match=r"^a tree is made of the distributions of one pass; leave out"):
            DFlashDrafter(made, target, passes=passes, nodes=8)


def test_a_lookup_is_one_more_branch_of_the_tree() -> None:
    """Each draft is the tree's, with the path that an n-gram drafter proposes in it; as many of the tree's own nodes
    stay, the likeliest ones, as there is room for."""
    watched, inner = Recorder(rivals.dflash_lookup("llama", "float64", 6)), rivals.dflash_tree("llama", "float64", 6)
    # long enough for the answers to repeat themselves
    decode(tiny_target(), watched, PROMPTS[:3], 3, max_tokens=70, ignore_eos=True)
    branches = 0
    for (tokens, drafted, parents, *_), limit in list(zip(watched.rounds, watched.limits, strict=True))[::3]:
        alone = Recorder(inner)
        Engine(tiny_target(), alone, reuse_prefix=False).run(
            [Request(tokens[:-1], SamplingParams(max_tokens=2 + limit))]
        )
        assert alone.rounds[0][0] == tokens
        own = [way for way in paths(alone.rounds[0][1], alone.rounds[0][2] or []) if way]
        lookup = NGramDrafter(5)
        state = lookup.open(1, 64)
        lookup.reset(state, 0, 0, tokens[0])
        lookup.observe(state, Commit((0,), (tuple(tokens[1:]),), None))
        found = lookup.propose(state, [0], [], [limit]).tokens_BN[0].tolist()
        wanted = {tuple(found[: n + 1]) for n in range(len(found))}
        ways = {way for way in paths(drafted, parents or []) if way}
        assert wanted <= ways and len(drafted) == len(ways) <= 12
        kept = [way for way in own if way in ways - wanted]
        assert kept == [way for way in own[: own.index(kept[-1]) + 1] if way not in wanted] if kept else True
        assert len(ways) == min(12, len(wanted | set(own)))
        branches += bool(wanted - set(own))
    assert branches > 2


@pytest.mark.parametrize("context", ["fused", "none"])
def test_own_context_equals_one_pass_over_everything(context: str) -> None:
    """Context and block in one pass without a cache: features at the input only, or none at all."""
    network = rivals.own_context_network(context)
    for tokens, drafted, *_ in recorded(rivals.own_context(context, "llama", "float64", 6)).rounds[::2]:
        if not drafted:
            continue
        ids, features = torch.tensor(tokens), features_of(tokens[:-1], (0, 1))
        block = torch.tensor([[tokens[-1]] + [VOCAB - 1] * len(drafted)])
        anchors = torch.tensor([len(tokens) - 1])
        states = rivals.own_context_states(network, tiny_target(), ids[:-1], features, anchors, block)
        assert drafted == tiny_target().head(states[0, 1:]).argmax(-1).tolist()


# -- all of them ---------------------------------------------------------------------------------------

MADE = {
    "draft_model": lambda: rivals.draft_model("llama", "float64", 4),
    "medusa": lambda: rivals.medusa("llama", "float64", 4),
    "eagle3": lambda: rivals.eagle3("llama", "float64", 4),
    "medusa-tree": lambda: rivals.medusa("llama", "float64", 5, tree=True),
    "eagle3-tree": lambda: rivals.eagle3("llama", "float64", 4, TREE),
    "dflash-tree": lambda: rivals.dflash_tree("llama", "float64", 6),
    "dflash-lookup": lambda: rivals.dflash_lookup("llama", "float64", 6),
    "passes": lambda: rivals.several_passes(2, "llama", "float64", 6),
    "fused": lambda: rivals.own_context("fused", "llama", "float64", 6),
    "none": lambda: rivals.own_context("none", "llama", "float64", 6),
}


def drafts(watched: Recorder) -> dict[tuple[int, ...], Any]:
    # a draft of nothing is a tree of nothing too
    return {tuple(tokens): (drafted, parents or None) for tokens, drafted, parents, *_ in watched.rounds}


@pytest.mark.parametrize("name", MADE)
def test_a_draft_does_not_depend_on_its_batch(name: str) -> None:
    alone, together = (drafts(recorded(MADE[name](), rows, PROMPTS[1:5])) for rows in (1, 4))
    assert alone == together


@pytest.mark.parametrize("name", MADE)
def test_a_reused_prefix_drafts_as_a_fresh_one(name: str) -> None:
    """The next turn of a chat goes on from the cache: the drafts behind it are those of a fresh start,
    also where the new turn says another token than the old one did."""
    target, first = tiny_target(), PROMPTS[2]
    (answer,) = decode(target, None, [first], max_tokens=9, ignore_eos=True)
    for second in ([*first, *answer.token_ids[:5], 44, 45, 46], [*first[:6], 50, 51], [*first, *answer.token_ids, 7]):
        found = []
        for reuse in (True, False):
            watched = Recorder(MADE[name]())
            engine = Engine(target, watched, reuse_prefix=reuse)
            engine.run([Request(first, SamplingParams(max_tokens=9, ignore_eos=True))])
            watched.rounds.clear()
            (result,) = engine.run([Request(second, SamplingParams(max_tokens=9, ignore_eos=True))])
            assert (result.stats.num_reused_tokens > 0) == reuse
            found.append(drafts(watched))
        assert found[0] == found[1] and found[0]


@pytest.mark.parametrize("name", ["dflash-tree", "medusa-tree", "eagle3-tree"])
def test_rejection_gets_chains_beside_the_trees_of_others(name: str) -> None:
    """A row's draft is what it would be alone: a tree with coupled acceptance, a chain with its law with rejection."""
    laws = [
        SamplingParams(max_tokens=NUM_TOKENS, temperature=0.8, seed=4, acceptance=a) for a in ("coupled", "rejection")
    ]

    def watched(requests: list[Request], rows: int) -> dict[tuple[int, ...], Any]:
        recorder = Recorder(MADE[name]())
        Engine(tiny_target(), recorder, max_rows=rows, reuse_prefix=False).run(requests)
        for _, drafted, parents, law, sampler in recorder.rounds:
            assert (law is not None) == (sampler.rejects and bool(drafted))
            if sampler.rejects:
                assert (parents or chain(len(drafted))) == chain(len(drafted))
                assert len(drafted) <= recorder.max_draft_tokens
        return {
            (sampler.rejects, *tokens): (drafted, parents or chain(len(drafted)))
            for tokens, drafted, parents, _, sampler in recorder.rounds
        }

    requests = [Request(prompt, law) for prompt, law in zip(PROMPTS[1:5], laws * 2, strict=True)]
    alone = {key: value for request in requests for key, value in watched([request], 1).items()}
    assert watched(requests, 4) == alone
    assert any(parents != chain(len(parents)) for _, parents in alone.values())


@pytest.mark.parametrize("name", ["draft_model", "medusa", "eagle3"])
def test_rejection_gets_the_law_of_each_token(name: str) -> None:
    """The distributions that acceptance divides by are those of the drafted tokens, each behind the
    tokens before it; the text ends as the law wants it (tests/test_faults_law.py)."""
    watched = recorded(MADE[name](), temperature=0.8, top_k=30, acceptance="rejection")
    checked = 0
    for tokens, drafted, parents, law, sampler in watched.rounds:
        if not drafted:
            continue
        assert law is not None and parents is None and law.shape == (len(drafted), VOCAB)
        assert torch.allclose(law.sum(-1), torch.ones(len(drafted)), atol=1e-5)
        assert all(float(law[n, token]) > 0 for n, token in enumerate(drafted))
        for n in range(len(drafted)):
            ways = drafted[:n] if name != "medusa" else [0] * n
            expected = sampler.scores(logits_by_hand(name, tokens, drafted, n)[None], paths=[ways]).softmax(-1)
            assert torch.allclose(law[n], expected[0], atol=1e-6)
        checked += 1
        if checked == 3:
            return


def logits_by_hand(name: str, tokens: list[int], drafted: list[int], n: int) -> Vector:
    """Logits over all ids that drafted token n was drawn from."""
    if name == "draft_model":
        model, ids = rivals.small_model("llama"), torch.tensor([[*tokens, *drafted[:n]]])
        return model.forward(ids, model.new_cache(1, ids.shape[1]), [0]).logits_BTV[0, -1]
    if name == "medusa":
        return medusa_by_hand(tokens)[n]
    network = rivals.eagle_network("llama")
    pairs = context_pairs(network, tokens)
    for token in drafted[:n]:
        pairs.append((embedding(token), state_behind(network, pairs)))
    logp = log_probs(network, state_behind(network, pairs))
    return torch.tensor([logp.get(t, -math.inf) for t in range(VOCAB)])


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("ngram", {"tree": True}, "the drafter ngram has no option 'tree'; it has max_ngram, min_ngram, a block size."),
        (
            "dflash",
            {"block_size": 4},
            "the drafter dflash has no option 'block_size'; it has passes, tree, nodes, ngram, a block size.",
        ),
        ("draft_model", {"passes": 2}, "the drafter draft_model has no option 'passes'; it has a block size."),
        ("medusa", {"top_k": 2}, "the drafter medusa has no option 'top_k'; it has tree, nodes, a block size."),
        (
            "eagle3",
            {"target": 1},
            "the drafter eagle3 has no option 'target'; it has tree, top_k, nodes, a block size.",
        ),
        ("none", {"tree": True}, "the drafter none has no option 'tree'; it has none."),
        ("eagle3", {"tree": "maybe"}, "tree is 'maybe'; expected true or false."),
        ("eagle3", {"nodes": 2.5}, "nodes is 2.5; expected a whole number."),
        ("ngram", {"max_ngram": True}, "max_ngram is True; expected a whole number."),
    ],
)
def test_options_that_a_drafter_has_not(name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(FlashdraftError) as caught:
        drafter_options(name, options)
    assert str(caught.value) == said


def test_options_reach_the_drafter() -> None:
    made: Any = make_drafter(tiny_target(), "ngram", block_size=6, max_ngram=5, min_ngram=4)
    assert (made.block_size, made._sizes) == (6, (4, 5))
    with pytest.raises(FlashdraftError, match=r"^n-grams of 2 to 1 tokens; expected"):
        make_drafter(tiny_target(), "ngram", max_ngram=1)
    with pytest.raises(FlashdraftError, match=r"^the drafter eagle3 needs a trained draft"):
        make_drafter(tiny_target(), "eagle3")


def test_medusas_tree_of_so_many_nodes() -> None:
    """Made here, in place of the configuration's; levels are those of the block."""
    network = rivals.medusa_network("llama")
    made = MedusaDrafter(network, tiny_target(), 3, nodes=7)
    assert made.drafts_trees and made.max_draft_tokens == 7 and {len(path) for path in made._choices} == {1, 2}
    assert set(made._choices) == set(static_tree(2, VOCAB, 7))
    for nodes in (0, 1025):
        with pytest.raises(FlashdraftError, match=rf"^nodes is {nodes}; expected 1 to 1024\.$"):
            MedusaDrafter(network, tiny_target(), nodes=nodes)
    with pytest.raises(FlashdraftError, match=r"^top_k is 0; expected 1 to 1024\.$"):
        rivals.eagle3("llama", "float64", 4, TreeShape(top_k=0))
