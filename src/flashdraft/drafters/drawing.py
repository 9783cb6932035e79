"""From a draft network's logits to drafted tokens, by the request's own rule: what all drafters share.

Drafts that obey the request's parameters and noise agree with the target most; nothing here can change
the text, which the target decides.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..sampling import DRAFT, RowSampler, gumbel_noise

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
    if sampler.greedy or sampler.params.acceptance == "coupled" or not len(logits_NV):
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


def padded(drafts: Sequence[Sequence[int]], device: torch.device, filler: int = 0) -> torch.Tensor:
    """Rows of different lengths as int64 [B, N]."""
    width = max(map(len, drafts), default=0)
    rows = [[*row, *[filler] * (width - len(row))] for row in drafts]
    return torch.tensor(rows, dtype=torch.int64, device=device).view(len(drafts), width)
