"""DFlash without KV injection, for the paper's ablations (arXiv 2602.06036): the context runs through the network.

"fused": the features are added to the embeddings of the tokens they predicted, at the input and nowhere
else (as EAGLE does it). "none": no features, a block-diffusion language model of its own. In both the
context's tokens pass through all layers, causally, and their keys and values are kept; a block sees them
as in DFlash. That an autoregressive block fills left to right needs no code of its own: dflash.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..attention import AttentionPlan
from ..types import Commit
from .dflash import DFlashDrafter, DFlashState
from .drawing import padded


class OwnContextState(DFlashState):
    """fused_RSD: at a token's position, the fused feature that predicted it; zeros without features."""

    def __init__(self, rows: int, capacity: int, block_size: int, like: torch.Tensor) -> None:
        super().__init__(rows, capacity, block_size)
        self.fused_RSD = like.new_zeros(rows, self.cache.slots + 1, len(like))


class OwnContextDrafter(DFlashDrafter):
    """Drafts as DFlash does, from a context that the draft network reads itself."""

    contexts = ("fused", "none")

    @property
    def bytes_per_context_token(self) -> int:
        """Keys and values, and the fused feature."""
        return super().bytes_per_context_token + self._feature.nbytes

    @property
    def _feature(self) -> torch.Tensor:
        """Any tensor like the feature that is kept of a token: empty where none is."""
        keeps = self.network.config.context == "fused" and self.block_size > 1
        weight: torch.Tensor = self.network.norm.weight
        return weight if keeps else weight[:0]

    def open(self, rows: int, capacity: int) -> OwnContextState:
        return OwnContextState(rows, capacity, self.block_size, self._feature)

    def reset(self, state: DFlashState, row: int, num_context: int, token: int) -> None:
        # the feature of position num_context - 1 stays where it is: it predicts whatever token comes there
        if self.block_size > 1:
            state.cache.roll_back(row, num_context)
        state.anchors[row] = token

    @torch.inference_mode()
    def observe(self, state: DFlashState, commit: Commit) -> None:
        assert isinstance(state, OwnContextState)
        rows = [row for row, tokens in zip(commit.rows, commit.tokens, strict=True) if tokens]
        news = [tokens for tokens in commit.tokens if tokens]
        if not rows:
            return
        if self.block_size == 1:
            for row, tokens in zip(rows, news, strict=True):
                state.anchors[row] = tokens[-1]
            return
        counts = [len(tokens) for tokens in news]
        if commit.features_CF is not None:
            parts = torch.split(self.network.fuse(commit.features_CF), counts)
            for row, part in zip(rows, parts, strict=True):
                first = state.cache.lengths[row] + 1
                state.fused_RSD[row, first : first + len(part)] = part
        # the anchor is context from now on, and the last new token the anchor
        self._read(state, rows, [[state.anchors[row], *tokens[:-1]] for row, tokens in zip(rows, news, strict=True)])
        for row, tokens in zip(rows, news, strict=True):
            state.anchors[row] = tokens[-1]

    def _read(self, state: OwnContextState, rows: Sequence[int], tokens: list[list[int]]) -> None:
        """Tokens of the context through all layers, causally; their keys and values stay."""
        config, counts = self.network.config, list(map(len, tokens))
        plan = AttentionPlan(state.cache, rows, max(counts), counts)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return plan.attend(layer, q, k, v, causal=True, window=config.windows[layer])

        embeds = self._embed(padded(tokens, self._device)) * config.embedding_scale
        if config.context == "fused":
            for b, (row, count) in enumerate(zip(rows, counts, strict=True)):
                first = state.cache.lengths[row]
                embeds[b, :count] += state.fused_RSD[row, first : first + count]
        self.network(embeds, plan.positions(self._device), attend)
        for row, count in zip(rows, counts, strict=True):
            state.cache.keep(row, count)

    def _block_embeds(self, state: DFlashState, rows: Sequence[int], tokens_BT: torch.Tensor) -> torch.Tensor:
        """The anchor's feature is known, the masked slots' are not."""
        assert isinstance(state, OwnContextState)
        embeds = super()._block_embeds(state, rows, tokens_BT)
        if self.network.config.context == "fused":
            embeds[:, 0] += torch.stack([state.fused_RSD[row, state.cache.lengths[row]] for row in rows])
        return embeds
