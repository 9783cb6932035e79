"""Tiny rivals of DFlash for the tests: networks taught the tiny targets' answers, right often, not always."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from bed import CONFIGS, DTYPES, PROMPTS, VOCAB, decode, make_model, random_network, tiny_target, trained_network
from flashdraft.drafters.dflash import DFlashDrafter, DFlashNetwork
from flashdraft.drafters.dflash_ablations import OwnContextDrafter
from flashdraft.drafters.draft_model import DraftModelDrafter
from flashdraft.drafters.dynamic_tree import TreeShape
from flashdraft.drafters.eagle3 import Eagle3Drafter, Eagle3Network
from flashdraft.drafters.eagle3_folder import Eagle3Config
from flashdraft.drafters.lookup_branch import LookupBranchDrafter
from flashdraft.drafters.medusa import MedusaConfig, MedusaDrafter, MedusaNetwork
from flashdraft.sampling import RowSampler
from flashdraft.target import Target
from flashdraft.types import Commit, Draft

CHOICES = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0), (0, 0, 0, 0), (2, 1))
TREE = TreeShape(top_k=3, depth=4, nodes=9)
LAYERS = (0, 1, 2)
# every id but some, none of the first the same as its place: a map that is not the identity
EAGLE_IDS = [i for i in range(1, VOCAB - 1) if i % 11 != 5]


@functools.cache
def samples(family: str, layer_ids: tuple[int, ...]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(tokens [T], features [T, F]) of the target's greedy answers to PROMPTS, in float32."""
    target, out = tiny_target(family, "float32"), []
    for prompt, result in zip(PROMPTS, decode(target, None, PROMPTS, max_tokens=40, ignore_eos=True), strict=True):
        tokens = torch.tensor([[*prompt, *result.token_ids]])
        features = target.forward(tokens, target.new_cache(1, tokens.shape[1]), [0], layer_ids=layer_ids).features_BTF
        assert features is not None
        out.append((tokens[0].clone(), features[0].clone()))
    return out


def shaken(module: torch.nn.Module, seed: int, std: float) -> None:
    """Random weights that move every part of a network: norms around 1, biases too."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            norm = parameter.ndim == 1 and "bias" not in name
            torch.nn.init.normal_(parameter, mean=1.0 if norm else 0.0, std=std)


def taught(network: torch.nn.Module, losses: Sequence[Any], steps: int, lr: float = 1e-2) -> None:
    optimizer = torch.optim.AdamW(network.parameters(), lr=lr, weight_decay=0.0)
    for step in range(steps):
        optimizer.zero_grad()
        losses[step % len(losses)]().backward()
        optimizer.step()
    network.requires_grad_(False)


# -- a draft model ---------------------------------------------------------------------------------


@functools.cache
def small_model(family: str, dtype: str = "float64", noise: float = 0.02) -> Target:
    """The target's own weights, a little off: a draft model that is often right."""
    config = CONFIGS[family]()
    model = make_model(config, torch.float32)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * noise)
    return Target(model.to(DTYPES[dtype]), name="small")


def draft_model(family: str, dtype: str, block_size: int) -> DraftModelDrafter:
    return DraftModelDrafter(small_model(family, dtype), tiny_target(family, dtype), block_size)


# -- Medusa ----------------------------------------------------------------------------------------


@functools.cache
def medusa_network(family: str, dtype: str = "float64", num_heads: int = 4, num_blocks: int = 2) -> MedusaNetwork:
    target = tiny_target(family, "float32")
    config = MedusaConfig(target.hidden_size, VOCAB, num_heads, num_blocks, bias=True, choices=CHOICES)
    network = MedusaNetwork(config)
    shaken(network, 2, 0.15)

    def loss(tokens: torch.Tensor, states: torch.Tensor) -> Any:
        # the state at t predicts token t + 1; head k, from 1, the one k places behind that
        logits = network(states)
        return sum(
            F.cross_entropy(logits[: len(tokens) - 1 - k, k - 1], tokens[1 + k :]) for k in range(1, num_heads + 1)
        )

    parts = [functools.partial(loss, *sample) for sample in samples(family, (target.num_layers,))]
    taught(network, parts, 90)
    return network.to(DTYPES[dtype])


def medusa(family: str, dtype: str, block_size: int, tree: bool = False) -> MedusaDrafter:
    return MedusaDrafter(medusa_network(family, dtype), tiny_target(family, dtype), min(block_size, 5), tree)


# -- EAGLE-3 ---------------------------------------------------------------------------------------


def eagle_config(target: Target, **changes: Any) -> Eagle3Config:
    values: dict[str, Any] = {
        "hidden_size": target.hidden_size,
        "intermediate_size": 40,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 12,
        "vocab_size": VOCAB,
        "draft_vocab_size": len(EAGLE_IDS),
        "max_context": 256,
        "target_layer_ids": LAYERS,
        **changes,
    }
    return Eagle3Config(**values)


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


@functools.cache
def eagle_network(family: str, dtype: str = "float64") -> Eagle3Network:
    """Taught two steps: on the target's features, and on its own states behind them (training-time test
    in short)."""
    target = tiny_target(family, "float32")
    network = Eagle3Network(eagle_config(target))
    shaken(network, 3, 0.15)
    place = torch.full((VOCAB,), -100)
    place[torch.tensor(EAGLE_IDS)] = torch.arange(len(EAGLE_IDS))

    def loss(tokens: torch.Tensor, features: torch.Tensor) -> Any:
        positions = torch.arange(len(tokens) - 1)[None]
        states = network(target.embed(tokens[None, 1:]), network.fuse(features[None, :-1]), positions, causal)
        assert network.lm_head is not None
        total = F.cross_entropy(network.lm_head(network.norm(states))[0, :-1], place[tokens[2:]])
        again = network(target.embed(tokens[None, 2:]), states[:, :-1], positions[:, 1:], causal)
        return total + F.cross_entropy(network.lm_head(network.norm(again))[0, :-1], place[tokens[3:]])

    parts = [functools.partial(loss, *sample) for sample in samples(family, LAYERS)]
    taught(network, parts, 90)
    return network.to(DTYPES[dtype])


def eagle3(family: str, dtype: str, block_size: int, tree: TreeShape | None = None) -> Eagle3Drafter:
    ids = torch.tensor(EAGLE_IDS)
    return Eagle3Drafter(eagle_network(family, dtype), tiny_target(family, dtype), ids, block_size, tree)


# -- watching a drafter ------------------------------------------------------------------------------


class Recorder:
    """A drafter, and what it proposed: (committed tokens of the row, drafted tokens, parents, law)."""

    def __init__(self, drafter: Any) -> None:
        self.drafter = drafter
        self.tokens: dict[int, list[int]] = {}
        self.limits: list[int] = []  # of each round
        self.rounds: list[tuple[list[int], list[int], list[int] | None, torch.Tensor | None, RowSampler]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drafter, name)

    def reset(self, state: Any, row: int, num_context: int, token: int) -> None:
        self.tokens[row] = [*self.tokens.get(row, [])[:num_context], token]
        self.drafter.reset(state, row, num_context, token)

    def observe(self, state: Any, commit: Commit) -> None:
        for row, tokens in zip(commit.rows, commit.tokens, strict=True):
            self.tokens[row] += tokens
        self.drafter.observe(state, commit)

    def propose(self, state: Any, rows: Sequence[int], samplers: Sequence[RowSampler], limits: Sequence[int]) -> Draft:
        draft: Draft = self.drafter.propose(state, rows, samplers, limits)
        for b, (row, size) in enumerate(zip(rows, draft.lengths_B, strict=True)):
            parents = None if draft.parents_BN is None else draft.parents_BN[b, :size].tolist()
            law = draft.probs_NV[b] if draft.probs_NV else None
            sampler = copy.copy(samplers[b])
            sampler._noise = {}
            self.limits.append(limits[b])
            self.rounds.append((list(self.tokens[row]), draft.tokens_BN[b, :size].tolist(), parents, law, sampler))
        return draft


# -- DFlash without its parts --------------------------------------------------------------------------


def own_context_states(
    network: DFlashNetwork,
    target: Target,
    tokens: torch.Tensor,
    features: torch.Tensor,
    anchors: torch.Tensor,
    blocks: torch.Tensor,
) -> torch.Tensor:
    """Final states [A, B, D] of blocks at some anchors, the context in the same pass, without a cache.

    One sequence: all tokens, then the blocks; masks say who sees whom."""
    size, (count, width) = len(tokens), blocks.shape
    embeds = target.embed(torch.cat([tokens, blocks.flatten()]))
    if network.config.context == "fused":
        fused = network.fuse(features)  # of position t, which predicted token t + 1
        added = torch.zeros_like(embeds)
        added[1:size] = fused[: size - 1]
        added[size::width] = fused[anchors - 1]
        embeds = embeds + added
    positions = torch.cat([torch.arange(size), (anchors[:, None] + torch.arange(width)).flatten()])
    owner = torch.cat([torch.full((size,), -1), torch.arange(count).repeat_interleave(width)])
    end = torch.cat([torch.arange(size) + 1, anchors.repeat_interleave(width)])  # context seen ends here
    slot = torch.arange(len(positions))
    mask = (slot[None] < end[:, None]) & (owner[None] < 0) | (owner[None] == owner[:, None]) & (owner[:, None] >= 0)

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True).transpose(1, 2)

    return network(embeds[None], positions[None], attend)[0, size:].unflatten(0, (count, width))


@functools.cache
def own_context_network(context: str, family: str = "llama", dtype: str = "float64") -> DFlashNetwork:
    target = tiny_target(family, "float32")
    network = random_network(target, std=0.12, context=context, target_layer_ids=(0, 1) if context == "fused" else ())
    network.requires_grad_(True)

    def loss(tokens: torch.Tensor, features: torch.Tensor, start: int) -> Any:
        anchors = torch.arange(start, len(tokens) - 8, 2)
        blocks = torch.full((len(anchors), 8), network.config.mask_token_id)
        blocks[:, 0] = tokens[anchors]
        states = own_context_states(network, target, tokens, features, anchors, blocks)
        labels = tokens[anchors[:, None] + torch.arange(1, 8)]
        return F.cross_entropy(target.head(states[:, 1:]).flatten(0, 1), labels.flatten())

    parts = [
        functools.partial(loss, *sample, len(prompt))
        for sample, prompt in zip(samples(family, (0, 1)), PROMPTS, strict=True)
    ]
    taught(network, parts, 90)
    return network.to(DTYPES[dtype])


def own_context(context: str, family: str, dtype: str, block_size: int) -> OwnContextDrafter:
    return OwnContextDrafter(own_context_network(context, family, dtype), tiny_target(family, dtype), block_size)


def several_passes(passes: int, family: str, dtype: str, block_size: int) -> DFlashDrafter:
    """DFlash with more passes over a block; 0: left to right."""
    network = copy.copy(trained_network(family, dtype))
    network.config = dataclasses.replace(network.config, autoregressive=not passes)
    return DFlashDrafter(network, tiny_target(family, dtype), block_size, passes=passes or 1)


def dflash_lookup(family: str, dtype: str, block_size: int) -> LookupBranchDrafter:
    """A tree, of which up to four nodes are a branch that prompt lookup finds."""
    return LookupBranchDrafter(dflash_tree(family, dtype, max(block_size, 2)), 4, torch.device("cpu"))


def dflash_tree(family: str, dtype: str, block_size: int, nodes: int = 12) -> DFlashDrafter:
    """A tree over the slots of one pass; the draft's vocabulary is a part of the target's."""
    target = tiny_target(family, dtype)
    return DFlashDrafter(trained_network(family, dtype), target, block_size, torch.tensor(EAGLE_IDS), nodes=nodes)
