"""A small causal LM of the same tokenizer as drafter: one pass a drafted token, with a cache of its own.

Speculative decoding as first published (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv
2302.01318). Any model that `Target` takes will do. Its cache is rolled back by lengths, as the target's.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import torch

from ..cache import KVCache
from ..sampling import RowSampler
from ..target import Target, padded_width
from ..types import Commit, Draft, FlashdraftError
from .drawing import draw, padded

# Tokens that a round leaves to the next draft's first pass: the bonus token, and the last drafted one
# where all were accepted. More than these are a prompt, which is read when it is committed.
_FEW = 2


class DraftModelState:
    """Per row: the committed tokens, the draft model's cache, and the tokens that are in it."""

    def __init__(self, model: Target, rows: int, capacity: int, slack: int) -> None:
        self.cache: KVCache = model.new_cache(rows, capacity, slack)
        self.tokens: list[list[int]] = [[] for _ in range(rows)]
        self.fed: list[list[int]] = [[] for _ in range(rows)]

    def settle(self, row: int) -> None:
        """Roll the cache back to what agrees with the committed tokens."""
        fed, tokens = self.fed[row], self.tokens[row]
        common = 0
        while common < min(len(fed), len(tokens)) and fed[common] == tokens[common]:
            common += 1
        self.cache.roll_back(row, common)
        del fed[common:]


class DraftModelDrafter:
    """Drafts with a small causal LM, token by token, all rows of a batch together.

    Args:
        model: loaded as a target is, with the same tokenizer; its weights are not changed.
        block_size: anchor + drafted tokens, as everywhere.
    """

    name = "draft_model"
    drafts_trees = False
    target_layer_ids: tuple[int, ...] = ()

    def __init__(self, model: Target, target: Target, block_size: int = 5) -> None:
        if block_size < 1:
            raise FlashdraftError(f"block_size is {block_size}; expected at least 1 (it counts the anchor).")
        check_same_tokens(model, target)
        self.model = model
        self.block_size = block_size
        self.max_draft_tokens = block_size - 1
        self._vocab_size = target.vocab_size
        self._num_tokens = min(target.num_tokens, model.num_tokens)
        self._device = target.device

    @classmethod
    def load(cls, folder: str | Path, target: Target, block_size: int | None = None) -> DraftModelDrafter:
        """From whatever `Target.load` takes, in the target's precision and on its device."""
        model = Target.load(folder, dtype=target.dtype, device=target.device)
        return cls(model, target) if block_size is None else cls(model, target, block_size)

    @functools.cached_property
    def bytes_per_context_token(self) -> int:
        """Asked of the model with one token: its layers' heads may differ."""
        cache = self.model.new_cache(1, 1)
        ids = torch.zeros(1, padded_width(1, self.model.dtype), dtype=torch.int64, device=self.model.device)
        self.model.forward(ids, cache, [0], valid=[1], keep=slice(0, 0))
        return cache.bytes_per_slot

    def open(self, rows: int, capacity: int) -> DraftModelState:
        return DraftModelState(self.model, rows, capacity, max(64, self.block_size))

    def reset(self, state: DraftModelState, row: int, num_context: int, token: int) -> None:
        state.tokens[row] = [*state.tokens[row][:num_context], token]
        state.settle(row)

    def observe(self, state: DraftModelState, commit: Commit) -> None:
        for row, tokens in zip(commit.rows, commit.tokens, strict=True):
            state.tokens[row].extend(tokens)
            self._drop_refused(state, row, len(tokens))
            waiting = state.tokens[row][len(state.fed[row]) : -1]
            if len(waiting) >= _FEW and len(state.tokens[row]) <= self.model.max_context:
                self._read(state, row, waiting)

    def _drop_refused(self, state: DraftModelState, row: int, count: int) -> None:
        """`settle`, looking at the newly committed tokens only."""
        fed, tokens = state.fed[row], state.tokens[row]
        kept = min(len(tokens) - count, len(fed))
        while kept < min(len(fed), len(tokens)) and fed[kept] == tokens[kept]:
            kept += 1
        state.cache.roll_back(row, kept)
        del fed[kept:]

    def _read(self, state: DraftModelState, row: int, tokens: list[int]) -> None:
        """Tokens of a prompt into the cache, without logits."""
        padding = [0] * (padded_width(len(tokens), self.model.dtype) - len(tokens))
        ids = torch.tensor([tokens + padding], dtype=torch.int64, device=self.model.device)
        self.model.forward(ids, state.cache, [row], valid=[len(tokens)], keep=slice(0, 0))
        state.cache.keep(row, len(tokens))
        state.fed[row].extend(tokens)

    def propose(
        self, state: DraftModelState, rows: Sequence[int], samplers: Sequence[RowSampler], limits: Sequence[int]
    ) -> Draft:
        room = [self.model.max_context - len(state.tokens[row]) for row in rows]
        lengths = [max(0, min(self.max_draft_tokens, *pair)) for pair in zip(limits, room, strict=True)]
        drafted: list[list[int]] = [[] for _ in rows]
        probs: list[list[torch.Tensor]] = [[] for _ in rows]
        for step in range(max(lengths)):
            going = [b for b in range(len(rows)) if step < lengths[b]]
            news = [
                [*state.tokens[rows[b]], *drafted[b]][len(state.fed[rows[b]]) :] for b in going
            ]  # the anchor and what waits with it, then one token a step
            for b, logits_V in zip(going, self._pass(state, [rows[b] for b in going], news), strict=True):
                token, law = draw(samplers[b], logits_V[None], [drafted[b]])
                drafted[b].append(int(token))
                if law is not None:
                    probs[b].append(law[0])
        laws = tuple(torch.stack(parts) if parts else None for parts in probs)
        return Draft(padded(drafted, self._device), tuple(lengths), probs_NV=laws)

    def _pass(self, state: DraftModelState, rows: Sequence[int], news: list[list[int]]) -> list[torch.Tensor]:
        """Feed each row its new tokens; logits [V] behind the last of them."""
        counts = [len(tokens) for tokens in news]
        out = self.model.forward(padded(news, self.model.device), state.cache, rows, valid=counts)
        for row, tokens in zip(rows, news, strict=True):
            state.cache.keep(row, len(tokens))
            state.fed[row].extend(tokens)
        return [self._fitted(out.logits_BTV[b, count - 1]) for b, count in enumerate(counts)]

    def _fitted(self, logits_V: torch.Tensor) -> torch.Tensor:
        """The model's logits for the target's ids; padding of either vocabulary is never drafted."""
        fitted = logits_V.new_full((self._vocab_size,), -torch.inf)
        fitted[: self._num_tokens] = logits_V[: self._num_tokens]
        return fitted.to(self._device)


def check_same_tokens(model: Target, target: Target) -> None:
    """Raise FlashdraftError unless both models mean the same by every token id."""
    if model.tokenizer is None or target.tokenizer is None:
        if model.vocab_size != target.vocab_size:
            raise FlashdraftError(
                f"the draft model {model.name} has {model.vocab_size} tokens and {target.name} {target.vocab_size}; "
                "expected a draft model with the target's tokenizer."
            )
        return
    ours, theirs = target.tokenizer.get_vocab(), model.tokenizer.get_vocab()
    if ours != theirs:
        strange = min((t for t in {*ours, *theirs} if ours.get(t) != theirs.get(t)), key=lambda t: (len(t), t))
        raise FlashdraftError(
            f"the draft model {model.name} has another tokenizer than {target.name} ({strange!r} is "
            f"{theirs.get(strange, 'unknown')} there and {ours.get(strange, 'unknown')} here); expected the same vocabulary."
        )
