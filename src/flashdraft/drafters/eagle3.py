"""EAGLE-3 (arXiv 2503.01840): one decoder layer that drafts token by token from the target's states.

Features of three target layers are fused by `fc`. The layer reads pairs: the embedding of a token and
the fused feature of the position before it, which predicted it; both are normed and joined, so its
attention projects twice the width. Behind the last pair it goes on with its own state in place of the
feature. Logits come from the normed state and a head of its own, often over a part of the vocabulary.

Drafts are chains, or EAGLE-2's dynamic trees (arXiv 2406.16858): the `top_k` nodes of the highest
joint probability are expanded at every level, and of all nodes the best `nodes` are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..attention import AttentionPlan
from ..cache import KVCache
from ..draft_config import MOST_BLOCK
from ..packing import pack
from ..sampling import RowSampler
from ..types import Commit, Draft, FlashdraftError
from .drawing import RowDraft, draw, joined, likeliest, padded, parted, spread
from .dynamic_tree import GrowingTree, TreeShape
from .eagle3_folder import Eagle3Config, check_against, read
from .layers import RMSNorm, RotaryEmbedding, SwiGLU, rotate

if TYPE_CHECKING:
    from ..target import Target

# attend(q, k, v) -> [B, T, heads, d]: attention over the pairs before and with these
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

# the cache's layer that keeps fused features: the pair of a reused prefix's last token needs one again
_FUSED = 1


class Eagle3Attention(nn.Module):
    """Llama's attention with inputs of twice the width."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        wide, dim, bias = 2 * config.hidden_size, config.head_dim, config.attention_bias
        self.head_dim = dim
        self.q_proj = nn.Linear(wide, config.num_heads * dim, bias=bias)
        self.k_proj = nn.Linear(wide, config.num_kv_heads * dim, bias=bias)
        self.v_proj = nn.Linear(wide, config.num_kv_heads * dim, bias=bias)
        self.o_proj = nn.Linear(config.num_heads * dim, config.hidden_size, bias=bias)

    def keys_values(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [..., kv heads, d] of joined inputs x [..., 2 D]."""
        k, v = (projection(x).unflatten(-1, (-1, self.head_dim)) for projection in (self.k_proj, self.v_proj))
        return rotate(k, cos, sin), v

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend) -> torch.Tensor:
        q = rotate(self.q_proj(x).unflatten(-1, (-1, self.head_dim)), cos, sin)
        k, v = self.keys_values(x, cos, sin)
        out: torch.Tensor = self.o_proj(attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).flatten(2))
        return out


class Eagle3Layer(nn.Module):
    """The decoder layer: embedding and state have a norm each before they are joined."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.norm_before_residual = config.norm_before_residual
        self.self_attn = Eagle3Attention(config)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def join(self, embeds: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.input_layernorm(embeds), self.hidden_norm(hidden)], dim=-1)

    def forward(
        self, embeds: torch.Tensor, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        joined = self.join(embeds, hidden)
        residual = joined[..., embeds.shape[-1] :] if self.norm_before_residual else hidden
        x = residual + self.self_attn(joined, cos, sin, attend)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Eagle3Network(nn.Module):
    """The draft network. Training and decoding call these same methods, on any number of positions.

    `lm_head` is None where the draft has no head of its own, `embed_tokens` where it embeds as the
    target does.
    """

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        hidden = config.hidden_size
        self.fc = nn.Linear(config.num_taps * hidden, hidden, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = RMSNorm(hidden, config.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False) if config.own_head else None
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden) if config.own_embedding else None
        self.rotary = RotaryEmbedding(config.rope, config.head_dim, config.max_context)

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Features [..., F] of the tapped layers -> [..., D]."""
        out: torch.Tensor = self.fc(features)
        return out

    def project_context(
        self, embeds_CD: torch.Tensor, fused_CD: torch.Tensor, positions_C: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [C, kv heads, d] of pairs with the target's features. They depend on nothing but
        the pair, since there is one layer."""
        cos, sin = self.rotary.table(positions_C, embeds_CD.dtype)
        joined = self.midlayer.join(embeds_CD, fused_CD)
        return self.midlayer.self_attn.keys_values(joined, cos.unsqueeze(-2), sin.unsqueeze(-2))

    def forward(
        self, embeds_BTD: torch.Tensor, hidden_BTD: torch.Tensor, positions_BT: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """States [B, T, D] of pairs: embeddings of tokens, and the fused features that predicted them or
        this network's own earlier states. A state predicts the token behind its pair, and takes the
        place of the feature in that token's pair."""
        cos, sin = self.rotary.table(positions_BT, embeds_BTD.dtype)
        out: torch.Tensor = self.midlayer(embeds_BTD, hidden_BTD, cos.unsqueeze(-2), sin.unsqueeze(-2), attend)
        return out


class Eagle3State:
    """Pairs of an engine's rows. Pair j is token j + 1 with the feature of position j; a row's last pair
    is its anchor's, and `last` the state behind that."""

    def __init__(self, rows: int, capacity: int, slack: int, like: torch.Tensor) -> None:
        self.cache = KVCache(rows, capacity + slack)
        self.anchors = [0] * rows
        self.last = like.new_zeros(rows, len(like))
        # after a reset: the pair that has to be made again, its token and fused feature
        self.again: list[tuple[int, torch.Tensor] | None] = [None] * rows


class Eagle3Drafter:
    """Drafts with an EAGLE-3 network: a pass for every token of a chain, or for every level of a tree.

    Args:
        network: in the target's dtype, on its device.
        vocab_ids: target id of every id of the draft's own vocabulary; None if they are the same.
        block_size: anchor + tokens of a chain, or + levels of a tree; None is 6, or the tree's depth + 1.
        tree_shape: None drafts chains.
    """

    name = "eagle3"

    def __init__(
        self,
        network: Eagle3Network,
        target: Target,
        vocab_ids: torch.Tensor | None = None,
        block_size: int | None = None,
        tree_shape: TreeShape | None = None,
    ) -> None:
        config = network.config
        layer_ids = check_against(config, target)
        size = block_size if block_size is not None else (tree_shape.depth + 1 if tree_shape else 6)
        for key, value in {"block_size": size, **(asdict(tree_shape) if tree_shape else {})}.items():
            if not 1 <= value <= MOST_BLOCK:
                raise FlashdraftError(f"{key} is {value}; expected 1 to {MOST_BLOCK}.")
        self.network = network.eval()
        # a tree of so many nodes is never deeper
        self.depth = min(size - 1, tree_shape.nodes) if tree_shape else size - 1
        self.target_layer_ids = layer_ids if self.depth else ()
        self.tree_shape = tree_shape
        self.drafts_trees = tree_shape is not None
        self.max_draft_tokens = tree_shape.nodes if tree_shape and self.depth else self.depth
        self._vocab_ids = vocab_ids.to(target.device) if vocab_ids is not None else None
        self._embed = target.embed if network.embed_tokens is None else network.embed_tokens
        self._head = target.head if network.lm_head is None else network.lm_head
        self._vocab_size, self._num_tokens, self._device = target.vocab_size, target.num_tokens, target.device

    @classmethod
    def load(
        cls, folder: str | Path, target: Target, block_size: int | None = None, tree_shape: TreeShape | None = None
    ) -> Eagle3Drafter:
        """From a draft folder (eagle3_folder.py). Raises FlashdraftError if it does not fit the target."""
        config, weights, vocab_ids = read(folder)
        check_against(config, target, str(folder))
        with torch.device("meta"):
            network = Eagle3Network(config)
        network.load_state_dict(weights, strict=True, assign=True)
        del weights
        network.rotary = RotaryEmbedding(config.rope, config.head_dim, config.max_context)
        network.requires_grad_(False).to(device=target.device, dtype=target.dtype)
        pack(network)
        return cls(network, target, vocab_ids, block_size, tree_shape)

    @property
    def bytes_per_context_token(self) -> int:
        """Keys and values of the one layer, and the fused feature that a reused prefix needs."""
        config = self.network.config
        numbers = 2 * config.num_kv_heads * config.head_dim + config.hidden_size if self.depth else 0
        return numbers * self.network.norm.weight.element_size()

    def open(self, rows: int, capacity: int) -> Eagle3State:
        slack = 1 + (self.tree_shape.top_k if self.tree_shape else 1) * (self.depth + 1)
        return Eagle3State(rows, capacity, slack, self.network.fc.weight[:, 0])

    def reset(self, state: Eagle3State, row: int, num_context: int, token: int) -> None:
        state.anchors[row], state.again[row] = token, None
        if not self.depth:
            return
        if num_context:  # the reused prefix's last feature predicted another token than before
            fused = state.cache.layer(_FUSED)[0][row, 0, num_context - 1].clone()
            state.again[row] = (token, fused)
        state.cache.roll_back(row, max(num_context - 1, 0))

    @torch.inference_mode()
    def observe(self, state: Eagle3State, commit: Commit) -> None:
        if commit.features_CF is None:
            return
        rows, tokens, fused = self._pairs(state, commit)
        if not rows:
            return
        counts = list(map(len, tokens))
        flat = torch.cat(fused)
        state.cache.write_flat(_FUSED, rows, counts, flat[:, None], flat.new_zeros(len(flat), 1, 0))
        states = self._run(state, rows, padded(tokens, self._device), nn.utils.rnn.pad_sequence(fused, True), counts)
        for b, (row, count) in enumerate(zip(rows, counts, strict=True)):
            state.last[row] = states[b, count - 1]
            state.anchors[row] = tokens[b][-1]
            state.cache.keep(row, count)

    def _pairs(self, state: Eagle3State, commit: Commit) -> tuple[list[int], list[list[int]], list[torch.Tensor]]:
        """Rows that have new pairs, their tokens, their fused features [count, D]."""
        assert commit.features_CF is not None
        rows: list[int] = []
        tokens: list[list[int]] = []
        fused: list[torch.Tensor] = []
        parts = torch.split(self.network.fuse(commit.features_CF), [len(new) for new in commit.tokens])
        for row, new, part in zip(commit.rows, commit.tokens, parts, strict=True):
            first = state.again[row]
            if first is not None:
                new, part, state.again[row] = (first[0], *new), torch.cat([first[1][None], part]), None
            if new:
                rows.append(row)
                tokens.append(list(new))
                fused.append(part)
        return rows, tokens, fused

    def _run(
        self,
        state: Eagle3State,
        rows: Sequence[int],
        tokens_BT: torch.Tensor,
        hidden_BTD: torch.Tensor,
        valid: Sequence[int] | None = None,
        parents: Sequence[Sequence[int]] | None = None,
        num_before: int = 0,
    ) -> torch.Tensor:
        plan = AttentionPlan(state.cache, rows, tokens_BT.shape[1], valid, parents, num_before)

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return plan.attend(0, q, k, v)

        out: torch.Tensor = self.network(self._embed(tokens_BT), hidden_BTD, plan.positions(self._device), attend)
        return out

    def _logits(self, states: torch.Tensor) -> torch.Tensor:
        """Logits [..., V] over the target's ids; padding of its table is never drafted."""
        own: torch.Tensor = self._head(self.network.norm(states))
        logits = spread(own, self._vocab_ids, self._vocab_size)
        logits[..., self._num_tokens :] = -torch.inf
        return logits

    @torch.inference_mode()
    def propose(
        self, state: Eagle3State, rows: Sequence[int], samplers: Sequence[RowSampler], limits: Sequence[int]
    ) -> Draft:
        depths = [min(self.depth, limit) for limit in limits]
        if not max(depths):
            return Draft(padded([[] for _ in rows], self._device), (0,) * len(rows))
        lengths = [state.cache.lengths[row] for row in rows]
        trees = [b for b, sampler in enumerate(samplers) if self.drafts_trees and not sampler.rejects]
        if len(trees) in (0, len(rows)):
            draft = (self._tree if trees else self._chain)(state, rows, samplers, depths)
        else:
            draft = self._trees_and_chains(state, rows, samplers, depths, trees)
        for row, length in zip(rows, lengths, strict=True):
            state.cache.lengths[row] = length
        return draft

    def _trees_and_chains(
        self,
        state: Eagle3State,
        rows: Sequence[int],
        samplers: Sequence[RowSampler],
        depths: Sequence[int],
        trees: Sequence[int],
    ) -> Draft:
        """Trees for some of the rows, chains for those with rejection acceptance."""
        found: dict[int, RowDraft] = {}
        for places, way in ((trees, self._tree), ([b for b in range(len(rows)) if b not in trees], self._chain)):
            part = way(state, *([values[b] for b in places] for values in (rows, samplers, depths)))  # type: ignore[arg-type]
            found |= zip(places, parted(part), strict=True)
        return joined([found[b] for b in range(len(rows))], self._device)

    def _chain(
        self, state: Eagle3State, rows: Sequence[int], samplers: Sequence[RowSampler], depths: Sequence[int]
    ) -> Draft:
        drafted: list[list[int]] = [[] for _ in rows]
        laws: list[list[torch.Tensor]] = [[] for _ in rows]
        states = state.last[list(rows)][:, None]
        for step in range(max(depths)):
            if step:
                tokens = torch.tensor([[row[-1] if row else 0] for row in drafted], device=self._device)
                states = self._run(state, rows, tokens, states)
                for row in rows:
                    state.cache.keep(row, 1)
            logits = self._logits(states)
            for b, sampler in enumerate(samplers):
                if step < depths[b]:
                    token, law = draw(sampler, logits[b], [drafted[b]])
                    drafted[b].append(int(token))
                    laws[b] += [law[0]] if law is not None else []
        probs = tuple(torch.stack(parts) if parts else None for parts in laws)
        return Draft(padded(drafted, self._device), tuple(depths), probs_NV=probs)

    def _tree(
        self, state: Eagle3State, rows: Sequence[int], samplers: Sequence[RowSampler], depths: Sequence[int]
    ) -> Draft:
        assert self.tree_shape is not None
        top_k = self.tree_shape.top_k
        trees = [GrowingTree() for _ in rows]
        states = state.last[list(rows)][:, None]
        for row in rows:  # the anchor's pair is the root: the tree's first slot, already written
            state.cache.roll_back(row, state.cache.lengths[row] - 1)
        for level in range(max(depths)):
            if level:
                states = self._expand(state, rows, trees, states)
            logits = self._logits(states)
            for b, (sampler, tree) in enumerate(zip(samplers, trees, strict=True)):
                ways = [tree.path(node) for node in tree.frontier]
                tree.add_level(*likeliest(sampler, logits[b], top_k, ways), top_k)
        pruned = [tree.pruned(self.tree_shape.nodes, depth) for tree, depth in zip(trees, depths, strict=True)]
        tokens_BN, parents_BN = (padded([part[i] for part in pruned], self._device) for i in (0, 1))
        return Draft(tokens_BN, tuple(len(tokens) for tokens, _ in pruned), parents_BN)

    def _expand(
        self, state: Eagle3State, rows: Sequence[int], trees: Sequence[GrowingTree], states: torch.Tensor
    ) -> torch.Tensor:
        """States behind the frontier's nodes; `states` are those behind the frontier before."""
        num_before = 1 + len(trees[0].expanded)
        at = [[tree.before.index(tree.parents[node]) for node in tree.frontier] for tree in trees]
        hidden = torch.stack([states[b, places] for b, places in enumerate(at)])
        tokens = torch.tensor([[tree.tokens[n] for n in tree.frontier] for tree in trees], device=self._device)
        return self._run(state, rows, tokens, hidden, None, [tree.expand() for tree in trees], num_before)
