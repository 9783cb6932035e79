"""DFlash (arXiv 2602.06036): a block-diffusion network that fills a block of MASKs in one pass.

The block is [anchor, MASK x (B - 1)], bidirectional inside. What it knows of the context are the
target's own states: features of several target layers, compressed by `fc` and a norm, become keys
and values in every draft layer through that layer's k/v projections (KV injection). Queries, output
projection and MLP see the block only; embedding and head are the target's.

The context's keys and values depend on nothing but the features, so they are projected once, when
tokens are committed, and kept; the block's own are written behind them for one pass and dropped.

A draft is the chain of every slot's best token, or DDTree's tree (arXiv 2604.12989): one pass gives a
distribution for every slot, and of all paths through them the likeliest ones are verified together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from .. import checkpoint, tree
from ..attention import AttentionPlan
from ..cache import KVCache
from ..draft_config import MOST_BLOCK, DraftConfig
from ..packing import pack, packed_linear
from ..sampling import RowSampler
from ..types import Commit, Draft, FlashdraftError
from .drawing import RowDraft, draw, drawn_chain, joined, likeliest, spread
from .layers import RMSNorm, RotaryEmbedding, SwiGLU, rotate

if TYPE_CHECKING:
    from ..target import Target

# attend(layer, q, k, v) -> [B, T, heads, d]: attention over the context's and the block's keys
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class DFlashAttention(nn.Module):
    """Grouped-query attention with normed queries and keys (Qwen3 style)."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        hidden, dim, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.head_dim = dim
        self.q_proj = nn.Linear(hidden, config.num_heads * dim, bias=bias)
        self.k_proj = nn.Linear(hidden, config.num_kv_heads * dim, bias=bias)
        self.v_proj = nn.Linear(hidden, config.num_kv_heads * dim, bias=bias)
        self.o_proj = nn.Linear(config.num_heads * dim, hidden, bias=bias)
        self.q_norm = RMSNorm(dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(dim, config.rms_norm_eps)

    def keys_values(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [..., kv heads, d] of states x [..., D]: context and block alike."""
        k = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim)))
        return rotate(k, cos, sin), self.v_proj(x).unflatten(-1, (-1, self.head_dim))

    def queries(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return rotate(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim))), cos, sin)


class DFlashLayer(nn.Module):
    """Pre-norm transformer layer; only its attention sees anything outside the block."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.self_attn = DFlashAttention(config)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, x_BTD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, index: int, attend: Attend
    ) -> torch.Tensor:
        normed = self.input_layernorm(x_BTD)
        k, v = self.self_attn.keys_values(normed, cos, sin)
        q = self.self_attn.queries(normed, cos, sin)
        seen = attend(index, q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        x_BTD = x_BTD + self.self_attn.o_proj(seen.flatten(2))
        out: torch.Tensor = x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))
        return out


class DFlashNetwork(nn.Module):
    """The draft network. Training and decoding call these same two methods."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        hidden = config.hidden_size
        if config.context != "none":
            self.fc = nn.Linear(len(config.target_layer_ids) * hidden, hidden, bias=False)
            self.hidden_norm = RMSNorm(hidden, config.rms_norm_eps)
        self.layers = nn.ModuleList(DFlashLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(hidden, config.rms_norm_eps)
        self.rotary = RotaryEmbedding(config.rope, config.head_dim, config.max_context)

    @classmethod
    def load(cls, folder: str | Path, dtype: torch.dtype, device: torch.device) -> DFlashNetwork:
        """The network of a draft folder (checkpoint.py), not to be trained."""
        config, weights = checkpoint.read(folder)
        with torch.device("meta"):
            network = cls(config)
        network.load_state_dict(weights, strict=True, assign=True)
        del weights  # or the conversion below would hold both copies of the whole network
        network.rotary = RotaryEmbedding(config.rope, config.head_dim, config.max_context)
        network.requires_grad_(False).to(device=device, dtype=dtype)
        pack(network)
        return network

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Context features [..., F] -> [..., D]."""
        out: torch.Tensor = self.hidden_norm(self.fc(features))
        return out

    def project_context(
        self, features_CF: torch.Tensor, positions_C: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values [C, kv heads, d] of context features, for every layer (KV injection)."""
        context = self.fuse(features_CF)
        cos, sin = self._table(positions_C, context.dtype)
        return [layer.self_attn.keys_values(context, cos, sin) for layer in self.layers]  # type: ignore[operator, union-attr]

    def forward(self, embeds_BTD: torch.Tensor, positions_BT: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Final states [B, T, D] of blocks given as embeddings of [anchor, MASK, MASK, ...]."""
        cos, sin = self._table(positions_BT, embeds_BTD.dtype)
        x = embeds_BTD
        for index, layer in enumerate(self.layers):
            x = layer(x, cos, sin, index, attend)
        out: torch.Tensor = self.norm(x)
        return out

    def shape_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """The head's logits with the multiplier and soft cap some published drafts have."""
        if self.config.output_multiplier != 1:
            logits = logits * self.config.output_multiplier
        if self.config.softcap is not None:
            logits = torch.tanh(logits / self.config.softcap) * self.config.softcap
        return logits

    def _table(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self.rotary.table(positions, dtype)
        return cos.unsqueeze(-2), sin.unsqueeze(-2)  # one table for all heads


class DFlashState:
    """Draft caches of an engine's rows: context keys/values, and the anchor of each row."""

    def __init__(self, rows: int, capacity: int, block_size: int) -> None:
        self.cache = KVCache(rows, capacity + block_size)
        self.anchors = [0] * rows


class DFlashDrafter:
    """Drafts with a DFlash network: one pass a round, `block_size - 1` tokens.

    Args:
        network: in the target's dtype, on its device. Switched to evaluation, not changed.
        target: its embedding and head are borrowed; the model is not called.
        block_size: None takes the network's; others work, with fewer accepted tokens.
        vocab_ids: the only ids it proposes, rising; None is all of them.
        passes: of the network over a block. DFlash needs one; more fix the most confident slots of each
            pass and fill the rest again (an autoregressive draft: the first slot, until all are filled).
        nodes: of a tree of at most `block_size - 1` levels; None drafts chains.
    """

    name = "dflash"
    contexts: tuple[str, ...] = ("injected",)

    def __init__(
        self,
        network: DFlashNetwork,
        target: Target,
        block_size: int | None = None,
        vocab_ids: torch.Tensor | None = None,
        passes: int = 1,
        nodes: int | None = None,
    ) -> None:
        checkpoint.check_against(network.config, target)
        if network.config.context not in self.contexts:
            raise FlashdraftError(f"the draft's context is {network.config.context!r}; load it with make_drafter.")
        size = block_size if block_size is not None else network.config.block_size
        if not 1 <= size <= MOST_BLOCK:
            raise FlashdraftError(f"block_size is {size}; expected 1 (the anchor alone) to {MOST_BLOCK}.")
        if not 1 <= passes <= MOST_BLOCK:
            raise FlashdraftError(f"passes is {passes}; expected 1 to {MOST_BLOCK}.")
        if nodes is not None and not 1 <= nodes <= MOST_BLOCK:
            raise FlashdraftError(f"nodes is {nodes}; expected 1 to {MOST_BLOCK}.")
        if nodes is not None and (passes > 1 or network.config.autoregressive):
            raise FlashdraftError(
                "a tree is made of the distributions of one pass; leave out passes, or what asks for a tree."
            )
        dtype = network.norm.weight.dtype
        if dtype != target.dtype:
            raise FlashdraftError(f"the draft network is in {dtype}; expected the target's {target.dtype}.")
        self.network = network.eval()
        self.block_size = size
        self.passes = size if network.config.autoregressive else passes
        self.depth = size - 1
        self.nodes = nodes
        self.drafts_trees = nodes is not None and size > 1
        self.max_draft_tokens = nodes if nodes is not None and size > 1 else self.depth
        self.target_layer_ids = network.config.target_layer_ids if size > 1 else ()
        self._embed = target.embed
        self._head: Callable[[torch.Tensor], torch.Tensor] = target.head
        self._vocab_ids = None
        if vocab_ids is not None:
            if int(vocab_ids[-1]) >= target.num_tokens:
                raise FlashdraftError(
                    f"the draft vocabulary has the id {int(vocab_ids[-1])}; the target has {target.num_tokens} tokens."
                )
            self._vocab_ids = vocab_ids.to(target.device)
            weight, bias = target.head_rows(vocab_ids)
            self._head = packed_linear(weight, bias)
        self._num_tokens = target.num_tokens
        self._device = target.device

    @classmethod
    def load(
        cls,
        folder: str | Path,
        target: Target,
        block_size: int | None = None,
        passes: int = 1,
        nodes: int | None = None,
    ) -> DFlashDrafter:
        """From a draft folder (checkpoint.py). Raises FlashdraftError if it does not fit the target."""
        network = DFlashNetwork.load(folder, target.dtype, target.device)
        config = network.config
        checkpoint.check_against(config, target, str(folder))
        checkpoint.check_tables(folder, config, target)
        return cls(network, target, block_size, checkpoint.read_vocab(folder, config), passes, nodes)

    @property
    def bytes_per_context_token(self) -> int:
        """Keys and values of every layer; a block of 1 keeps none."""
        config = self.network.config
        numbers = 2 * config.num_layers * config.num_kv_heads * config.head_dim if self.block_size > 1 else 0
        return numbers * self.network.norm.weight.element_size()

    def open(self, rows: int, capacity: int) -> DFlashState:
        return DFlashState(rows, capacity, self.block_size)

    def reset(self, state: DFlashState, row: int, num_context: int, token: int) -> None:
        if self.target_layer_ids:  # a block of 1 drafts nothing, taps nothing and keeps no context
            state.cache.roll_back(row, num_context)
        state.anchors[row] = token

    @torch.inference_mode()
    def observe(self, state: DFlashState, commit: Commit) -> None:
        counts = [len(tokens) for tokens in commit.tokens]
        for row, tokens in zip(commit.rows, commit.tokens, strict=True):
            if tokens:
                state.anchors[row] = tokens[-1]
        if commit.features_CF is None or not sum(counts):
            return
        positions = torch.cat(
            [
                torch.arange(state.cache.lengths[row], state.cache.lengths[row] + count)
                for row, count in zip(commit.rows, counts, strict=True)
            ]
        ).to(self._device)
        for index, (k, v) in enumerate(self.network.project_context(commit.features_CF, positions)):
            state.cache.write_flat(index, commit.rows, counts, k, v)
        for row, count in zip(commit.rows, counts, strict=True):
            state.cache.keep(row, count)

    @torch.inference_mode()
    def propose(
        self, state: DFlashState, rows: Sequence[int], samplers: Sequence[RowSampler], limits: Sequence[int]
    ) -> Draft:
        lengths = tuple(min(self.depth, limit) for limit in limits)
        width = max(lengths)
        if width == 0:
            return Draft(torch.zeros(len(rows), 0, dtype=torch.int64, device=self._device), lengths)
        if self.passes > 1:
            return self._denoise(state, rows, samplers, lengths)
        logits_BNV = self._block_logits(state, rows, lengths)
        if self.drafts_trees:
            parts = zip(samplers, logits_BNV, lengths, strict=True)
            return joined([self._row_tree(sampler, rows_NV[:depth]) for sampler, rows_NV, depth in parts], self._device)
        tokens_BN = torch.zeros(len(rows), width, dtype=torch.int64, device=self._device)
        probs: list[torch.Tensor | None] = []
        for b, (sampler, length) in enumerate(zip(samplers, lengths, strict=True)):
            tokens, draft_probs = self._draw(sampler, logits_BNV[b, :length])
            tokens_BN[b, :length] = tokens
            probs.append(draft_probs)
        return Draft(tokens_BN, lengths, probs_NV=tuple(probs))

    def _draw(self, sampler: RowSampler, logits_NV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Tokens and distributions over all ids, from logits over the draft's own."""
        if self._vocab_ids is None:
            return draw(sampler, logits_NV)
        if sampler.plain_argmax:  # nothing but the order counts: no need to spread them out
            return self._vocab_ids[sampler.choose(logits_NV)], None
        return draw(sampler, spread(logits_NV, self._vocab_ids, sampler.vocab_size))

    def _row_tree(self, sampler: RowSampler, logits_NV: torch.Tensor) -> RowDraft:
        """Of the paths through the slots' tokens the likeliest ones, as many as there are nodes."""
        assert self.nodes is not None
        if sampler.rejects:
            return drawn_chain(*self._draw(sampler, logits_NV[: self.nodes]))
        tokens, logprobs = self._likeliest(sampler, logits_NV, self.nodes)
        paths = tree.best_first(logprobs, self.nodes)
        return RowDraft([tokens[len(path) - 1][path[-1]] for path in paths], tree.parents_of(paths))

    def _likeliest(
        self, sampler: RowSampler, logits_NV: torch.Tensor, count: int
    ) -> tuple[list[list[int]], list[list[float]]]:
        """The `count` best tokens of every slot and their log-probabilities, from logits over the draft's own ids."""
        if self._vocab_ids is None or not sampler.plain_argmax:
            return likeliest(sampler, spread(logits_NV, self._vocab_ids, sampler.vocab_size), count)
        tokens, logprobs = likeliest(sampler, logits_NV, count)  # nothing depends on which ids they are
        return self._vocab_ids[torch.tensor(tokens, dtype=torch.int64, device=self._device)].tolist(), logprobs

    def _denoise(
        self, state: DFlashState, rows: Sequence[int], samplers: Sequence[RowSampler], lengths: tuple[int, ...]
    ) -> Draft:
        """Fill the blocks in several passes. The tokens of a slot depend on later slots too, so they are
        no draws along a chain: without `probs_NV` they are point masses, for which rejection is exact."""
        width = max(lengths)
        config, known = self.network.config, torch.full((len(rows), width), -1, dtype=torch.int64)
        for left in range(min(self.passes, width), 0, -1):
            logits_BNV = spread(
                self._block_logits(state, rows, lengths, known), self._vocab_ids, samplers[0].vocab_size
            )
            for b, (sampler, length) in enumerate(zip(samplers, lengths, strict=True)):
                masked = [n for n in range(length) if known[b, n] < 0]
                if not masked:
                    continue
                tokens, sure = likeliest(sampler, logits_BNV[b, :length], 1)
                if not config.autoregressive:
                    masked.sort(key=lambda n: -sure[n][0])
                for n in masked[: -(-len(masked) // left)]:
                    known[b, n] = tokens[n][0]
        return Draft(known.clamp_(min=0).to(self._device), lengths)

    def _block_logits(
        self, state: DFlashState, rows: Sequence[int], lengths: Sequence[int], known_BN: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Logits [B, N, V] of the drafted tokens, from one pass over all rows' blocks; V counts the
        draft's own vocabulary. known_BN: tokens of slots that are filled already, -1 for the others.

        A slot predicts its own token, except in a draft that predicts from the anchor: there it predicts the
        next one, so the last token needs no slot."""
        config = self.network.config
        first = 0 if config.from_anchor else 1
        width = max(lengths) + first
        tokens = torch.full((len(rows), width), config.mask_token_id, dtype=torch.int64)
        tokens[:, 0] = torch.tensor([state.anchors[row] for row in rows])
        if known_BN is not None:
            known = known_BN[:, : width - 1]
            tokens[:, 1:] = torch.where(known < 0, tokens[:, 1:], known)
        # a row that drafts nothing still has its anchor in the pass
        plan = AttentionPlan(state.cache, rows, width, [max(length + first, 1) for length in lengths])

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return plan.attend(layer, q, k, v, causal=config.causal[layer], window=config.windows[layer])

        embeds = self._block_embeds(state, rows, tokens.to(self._device))
        hidden = self.network(embeds, plan.positions(self._device), attend)
        # flat: of this view torch would multiply row by row, with a copy of the head for each
        bare = self._head(hidden[:, first:].flatten(0, 1)).view(len(rows), max(lengths), -1)
        logits = self.network.shape_logits(bare)
        if self._vocab_ids is None:
            # ids above the tokenizer's are padding of the table (the mask token is often one): no draft
            logits[..., self._num_tokens :] = -torch.inf
        return logits

    def _block_embeds(self, state: DFlashState, rows: Sequence[int], tokens_BT: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._embed(tokens_BT) * self.network.config.embedding_scale
        return out
