"""From a draft network's logits to drafted tokens, by the request's own rule: what all drafters share.

Drafts that obey the request's parameters and noise agree with the target most; nothing here can change
the text, which the target decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..sampling import DRAFT, RowSampler, gumbel_noise
from ..tree import chain
from ..types import Draft

Paths = Sequence[Sequence[int]]


def draw(
    sampler: RowSampler, logits_NV: torch.Tensor, paths: Paths | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Drafted tokens [N] for a request, and the distributions they were drawn from if it needs them.

    Greedy and coupled requests draft with the target's own rule and noise, which is what makes them
    agree most. Rejection needs draws that are independent of the acceptance that follows.

    Args:
        paths: per slot, the drafted tokens it follows; None: slot n is n positions ahead, and
            penalties do not count the draft.
    """
    if not sampler.rejects or not len(logits_NV):
        return sampler.choose(logits_NV, paths=paths), None
    scores = sampler.scores(logits_NV, paths=paths)
    ahead = range(len(scores)) if paths is None else map(len, paths)
    noise = [
        gumbel_noise(sampler.seed, sampler.next_position + n, scores.shape[-1], scores.device, stream=DRAFT)
        for n in ahead
    ]
    return (scores + torch.stack(noise)).argmax(-1), scores.softmax(-1)


def likeliest(
    sampler: RowSampler, logits_NV: torch.Tensor, count: int, paths: Paths | None = None
) -> tuple[list[list[int]], list[list[float]]]:
    """The `count` best tokens of every slot, best first, and their log-probabilities: children of tree nodes.

    With coupled sampling the noise that the target will add is known: it is added here too, so that the
    best token is the one the target would pick if it had the draft's logits. Where fewer tokens are
    possible, the best one stands in, with -inf: a padding id is never drafted.
    """
    scores = sampler.scores(logits_NV, paths=paths)
    if not sampler.greedy:
        for n, ahead in enumerate(range(len(scores)) if paths is None else map(len, paths)):
            scores[n] += sampler.noise(sampler.next_position + ahead)
    best = scores.log_softmax(-1).topk(min(count, scores.shape[-1]), dim=-1)
    tokens = torch.where(best.values.isfinite(), best.indices, best.indices[:, :1])
    return tokens.tolist(), best.values.tolist()


def spread(logits_NV: torch.Tensor, vocab_ids: torch.Tensor | None, vocab_size: int) -> torch.Tensor:
    """Logits over all ids, from logits over a draft's own; ids it does not have are never drafted."""
    if vocab_ids is None:
        return logits_NV
    wide = logits_NV.new_full((*logits_NV.shape[:-1], vocab_size), -torch.inf)
    wide[..., vocab_ids] = logits_NV
    return wide


@dataclass(frozen=True)
class RowDraft:
    """One row's part of a draft: tokens, their parents (tree.py), and what they were drawn from if it matters."""

    tokens: list[int]
    parents: list[int]
    probs_NV: torch.Tensor | None = None


def drawn_chain(tokens: torch.Tensor, probs_NV: torch.Tensor | None) -> RowDraft:
    """What `draw` gives, as a row's draft."""
    return RowDraft(tokens.tolist(), chain(len(tokens)), probs_NV)


def joined(rows: Sequence[RowDraft], device: torch.device) -> Draft:
    """The draft of rows of which some or all are trees."""
    return Draft(
        padded([row.tokens for row in rows], device),
        tuple(len(row.tokens) for row in rows),
        padded([row.parents for row in rows], device),
        tuple(row.probs_NV for row in rows),
    )


def parted(draft: Draft) -> list[RowDraft]:
    """The rows of a draft."""
    tokens, probs = draft.tokens_BN.tolist(), draft.probs_NV or (None,) * len(draft.lengths_B)
    parents = draft.parents_BN.tolist() if draft.parents_BN is not None else [chain(n) for n in draft.lengths_B]
    return [RowDraft(t[:n], p[:n], q) for t, p, q, n in zip(tokens, parents, probs, draft.lengths_B, strict=True)]


def padded(drafts: Sequence[Sequence[int]], device: torch.device, filler: int = 0) -> torch.Tensor:
    """Rows of different lengths as int64 [B, N]."""
    width = max(map(len, drafts), default=0)
    rows = [[*row, *[filler] * (width - len(row))] for row in drafts]
    return torch.tensor(rows, dtype=torch.int64, device=device).view(len(drafts), width)
