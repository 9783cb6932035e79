"""The arithmetic of speculation: from survival and times to tokens a round, speedup and the best block.

Pure numbers: no model, no files. A block of `b` counts the anchor, so it drafts b - 1 tokens; what others
call gamma is b - 1 here. `docs/plan.md` has the formulas side by side, with curves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from .records import PLAIN

# Less than this over plain decoding is not worth a second network.
WORTH = 1.02


# -- the classical formulas --------------------------------------------------------------------


def iid_tokens(alpha: float, drafted: int) -> float:
    """Expected tokens of a round if every drafted token is kept with chance `alpha`, independently
    (Leviathan et al., arXiv 2211.17192, equation 1): (1 - a^(g+1)) / (1 - a)."""
    return sum(alpha**k for k in range(drafted + 1))


def autoregressive_speedup(alpha: float, drafted: int, cost: float) -> float:
    """Leviathan et al., Theorem 3.8: a round costs g draft passes and one of the target. `cost` is a draft
    pass over a pass of the target, whose price does not depend on how many tokens it checks."""
    return iid_tokens(alpha, drafted) / (drafted * cost + 1)


def one_pass_speedup(alpha: float, drafted: int, cost: float) -> float:
    """The same for a draft that comes in one pass, however long: the price no longer grows with g."""
    return iid_tokens(alpha, drafted) / ((cost if drafted else 0.0) + 1)


def iid_alpha(tokens: float, drafted: int) -> float:
    """The chance with which `iid_tokens` gives that many tokens: what acceptance looks like if one
    believes it to be independent of the slot."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if iid_tokens(middle, drafted) < tokens else (low, middle)
    return (low + high) / 2


# -- survival ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trial:
    """A round, as survival sees it.

    Attributes:
        accepted: drafted tokens kept. limit: how many could have been.
        cut: the answer ended inside the draft, so nobody knows how far the verdict would have gone.
    """

    accepted: int
    limit: int
    cut: bool = False


def survival(trials: Iterable[Trial], drafted: int) -> tuple[float, ...]:
    """Share of rounds in which slots 1 to k were all kept, for k up to `drafted`: joint counts.

    A round whose room was shorter than k says nothing about slot k, nor does one that an ending cut before
    it. A drafter that proposed nothing for slot k, though it could have, kept nothing there.
    """
    known = list(trials)
    found: list[float] = []
    for k in range(1, drafted + 1):
        able = [t for t in known if t.limit >= k and (not t.cut or t.accepted >= k)]
        # of later slots no more can survive; few counts at the end of a file could say otherwise
        share = sum(t.accepted >= k for t in able) / len(able) if able else 0.0
        found.append(min([share, *found[-1:]]))
    return tuple(found)


def expected_tokens(survived: Sequence[float], block_size: int) -> float:
    """Tokens of a round whose block is cut to `block_size`: the bonus token, and each slot's survival."""
    return 1.0 + sum(survived[: block_size - 1])


# -- time --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RoundCost:
    """Where the time of a round goes, in ms."""

    draft: float
    verify: float
    rest: float

    @property
    def total(self) -> float:
        return self.draft + self.verify + self.rest


@dataclass(frozen=True)
class CostPoint:
    """A measured round of an arm. Plain decoding is a block of 1: the anchor alone."""

    arm: str
    block_size: int
    context: float
    rows: int
    cost: RoundCost


@dataclass(frozen=True)
class CostTable:
    """Measured rounds, and what lies between them.

    Between contexts and between block sizes times are interpolated linearly; contexts beyond the table take
    its nearest. Blocks larger than the largest measured one have no price here.
    """

    points: tuple[CostPoint, ...]

    def plain(self, context: float, rows: int) -> RoundCost | None:
        return self._by_block(PLAIN, context, rows).get(1)

    def largest(self, arm: str, rows: int) -> int:
        return max((p.block_size for p in self.points if p.arm == arm and p.rows == rows), default=0)

    def cost(self, arm: str, block_size: int, context: float, rows: int, one_pass: bool = True) -> RoundCost | None:
        """A round of `arm` with that block; None if the table cannot know.

        Below the smallest measured block the verify pass shrinks towards plain decoding's; a draft of one
        pass costs the same, one of many passes as many of them as it drafts tokens.
        """
        plain = self.plain(context, rows)
        own = {b: cost for b, cost in self._by_block(arm, context, rows).items() if b > 1}
        if block_size == 1:
            return plain
        if not own or not 1 <= block_size <= max(own):
            return None
        ends = {1: plain, **own} if plain is not None else own
        draft = {b: cost.draft for b, cost in own.items()}
        if not one_pass:
            draft[1] = 0.0
        return RoundCost(
            _between(draft, block_size),
            _between({b: cost.verify for b, cost in ends.items()}, block_size),
            _between({b: cost.rest for b, cost in ends.items()}, block_size),
        )

    def _by_block(self, arm: str, context: float, rows: int) -> dict[int, RoundCost]:
        found: dict[int, dict[float, RoundCost]] = {}
        for p in self.points:
            if p.arm == arm and p.rows == rows:
                found.setdefault(p.block_size, {})[p.context] = p.cost
        return {
            block: RoundCost(
                *(_between({c: getattr(v, part) for c, v in at.items()}, context) for part in _PARTS),
            )
            for block, at in found.items()
        }


_PARTS = ("draft", "verify", "rest")


def _between(known: dict[int, float] | dict[float, float], x: float) -> float:
    """Linear between the points, flat outside of them."""
    points = sorted(known.items())
    if x <= points[0][0]:
        return points[0][1]
    for (left, low), (right, high) in pairwise(points):
        if x <= right:
            return low + (high - low) * (x - left) / (right - left)
    return points[-1][1]


# -- together ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Forecast:
    """A block size: tokens a round, its time, and the speed over plain decoding's."""

    block_size: int
    tokens: float
    cost: RoundCost
    speedup: float


def forecasts(
    survived: Sequence[float],
    costs: CostTable,
    arm: str,
    context: float = 0.0,
    rows: int = 1,
    one_pass: bool = True,
    blocks: Sequence[int] | None = None,
) -> list[Forecast]:
    """Every block size from 2 to what survival was measured for and the table has a price for, or only
    `blocks`. Empty where plain decoding or the arm was not timed with that many rows."""
    plain = costs.plain(context, rows)
    if plain is None:
        return []
    found = []
    for block in range(2, len(survived) + 2) if blocks is None else blocks:
        cost = costs.cost(arm, block, context, rows, one_pass)
        if cost is not None and cost.total > 0:
            tokens = expected_tokens(survived, block)
            found.append(Forecast(block, tokens, cost, tokens * plain.total / cost.total))
    return found


def best(found: Sequence[Forecast]) -> Forecast | None:
    """The fastest block (the smallest of equals); None where plain decoding is as fast or faster."""
    top = max(found, key=lambda f: (f.speedup, -f.block_size), default=None)
    return top if top is not None and top.speedup > 1 else None


def advice(found: Sequence[Forecast], *, tree: bool = False) -> str:
    """The recommendation, in a sentence; of a tree its anchor counts into the block, too."""

    def named(block_size: int) -> str:
        return f"tree of {block_size - 1} nodes" if tree else f"block of {block_size}"

    if not found:
        return "No prediction: no times of plain decoding and of this arm with so many rows."
    top = best(found)
    if top is None:
        nearest = max(found, key=lambda f: f.speedup)
        return (
            f"Plain decoding is better: the best, a {named(nearest.block_size)}, makes {nearest.tokens:.2f} tokens a "
            f"round, and its round takes {nearest.tokens / nearest.speedup:.2f} times as long as a plain one."
        )
    if top.speedup < WORTH:
        return f"Hardly worth it: a {named(top.block_size)} gives {top.speedup:.2f} times plain decoding's speed."
    return f"Take a {named(top.block_size)}: {top.tokens:.2f} tokens a round, {top.speedup:.2f} times as fast as plain."


def break_even(cost: RoundCost, plain: RoundCost) -> float:
    """Tokens a round has to make, or speculation loses."""
    return cost.total / plain.total
