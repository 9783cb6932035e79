"""Lossless acceptance: pure functions from a draft and the target's view of it to a verdict.

Two laws. *Matching* keeps a drafted token while it equals the token the target itself picks there
(greedy, or coupled sampling): exact for any drafter, chain or tree. *Rejection* keeps a token x
drawn from q with probability min(1, p(x) / q(x)) and on refusal draws from the residual
max(0, p - q) (Leviathan et al., arXiv 2211.17192, section 2.3; Chen et al., arXiv 2302.01318).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .types import Verdict


def accept_matching(
    draft: Sequence[int],
    own_tokens: Sequence[int],
    parents: Sequence[int] | None = None,
    reliable: Callable[[int], bool] = lambda node: True,
) -> Verdict:
    """Walk the draft as long as the target agrees.

    Args:
        draft: N drafted tokens.
        own_tokens: N + 1 tokens the target picks: after the anchor, then after each node.
        parents: the tree (see tree.py); None is a chain. Among equal siblings the first is taken.
        reliable: of a node of a tree, whether the token that the target picks behind it counts; where not, the
            walk ends with the node's own token.
    """
    path: list[int] = []
    if parents is None:
        while len(path) < len(draft) and draft[len(path)] == own_tokens[len(path)]:
            path.append(len(path))
        return Verdict(tuple(path), own_tokens[len(path)])
    at = -1
    while True:
        wanted = own_tokens[at + 1]
        child = next((n for n, parent in enumerate(parents) if parent == at and draft[n] == wanted), None)
        if child is None or not reliable(child):
            return Verdict(tuple(path), wanted)
        path.append(child)
        at = child


def residual_probs(target_probs_V: torch.Tensor, draft_probs_V: torch.Tensor | None, token: int) -> torch.Tensor:
    """The law of the token that replaces a refused one: max(0, p - q), normalised, float64.

    Without draft probabilities q is a point mass on `token`. If p equals q up to rounding nothing
    is left over, refusal has probability 0 (up to rounding), and p itself is the answer.
    """
    p = target_probs_V.double()
    if draft_probs_V is None:
        rest = p.clone()
        rest[token] = 0
    else:
        rest = (p - draft_probs_V.double()).clamp_(min=0)
    total = rest.sum()
    return rest / total if float(total) > 0 else p / p.sum()


def sample_at(probs_V: torch.Tensor, u: float) -> int:
    """The token at quantile u of a distribution (inverse of its cumulative sum, in float64)."""
    cumulative = probs_V.double().cumsum(-1)
    index = int(torch.searchsorted(cumulative, u * cumulative[-1], right=True))
    # u close to 1 may round past the last token that has any probability.
    last = int(probs_V.nonzero()[-1])
    return min(index, last)


def accept_rejection(
    draft: Sequence[int],
    target_probs_TV: torch.Tensor,
    draft_probs_NV: torch.Tensor | None,
    accept_uniforms: Sequence[float],
    bonus_uniforms: Sequence[float],
) -> Verdict:
    """Rejection sampling along a chain.

    Args:
        draft: N drafted tokens, token n drawn from `draft_probs_NV[n]` (None: point masses).
        target_probs_TV: N + 1 target distributions, after the anchor and after each node.
        accept_uniforms: N numbers in [0, 1) that decide acceptance.
        bonus_uniforms: N + 1 numbers in [0, 1), independent of those, that draw the last token.
    """
    for n, token in enumerate(draft):
        p = float(target_probs_TV[n, token])
        q = 1.0 if draft_probs_NV is None else float(draft_probs_NV[n, token])
        # A q of nan (a broken drafter) is refused: then the token is drawn from p, which is exact.
        if not accept_uniforms[n] * q < p:
            rest = residual_probs(target_probs_TV[n], None if draft_probs_NV is None else draft_probs_NV[n], token)
            return Verdict(tuple(range(n)), sample_at(rest, bonus_uniforms[n]))
    last = len(draft)
    return Verdict(tuple(range(last)), sample_at(target_probs_TV[last], bonus_uniforms[last]))
