"""What proposes tokens: the protocol, plain decoding as the drafter that proposes none, the table.

A drafter is told about every committed token (`observe`) and asked for a draft once a round
(`propose`). It never holds the target, only its embedding and head. A new method is one file here
and one line in `DRAFTERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ..locate import locate_draft
from ..sampling import RowSampler
from ..types import Commit, Draft, FlashdraftError
from .ngram import NGramDrafter

if TYPE_CHECKING:
    from ..target import Target


class Drafter(Protocol):
    """The seam between engine and method. `state` is the drafter's own, one per engine.

    A row's context is all its committed tokens but the last, the anchor.
    """

    @property
    def name(self) -> str: ...

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        """Target layers whose features `observe` needs; empty for none."""
        ...

    @property
    def max_draft_tokens(self) -> int:
        """Most tokens of a draft, all nodes of a tree counted."""
        ...

    @property
    def drafts_trees(self) -> bool:
        """Whether drafts may have `parents_BN`: then rejection acceptance is refused."""
        ...

    def open(self, rows: int, capacity: int) -> Any:
        """State for `rows` requests at a time of up to `capacity` tokens each."""
        ...

    def reset(self, state: Any, row: int, num_context: int, token: int) -> None:
        """The row goes on from its first `num_context` tokens with `token` (0: a new sequence)."""
        ...

    def observe(self, state: Any, commit: Commit) -> None:
        """These tokens are final."""
        ...

    def propose(self, state: Any, rows: Sequence[int], samplers: Sequence[RowSampler], limits: Sequence[int]) -> Draft:
        """A chain (or tree of such depth) of at most `limits[b]` tokens for `rows[b]`, for which
        `samplers[b]` picks tokens."""
        ...


class NoDrafter:
    """Plain decoding: the same engine, cache and attention path, and no draft."""

    name = "none"
    target_layer_ids: tuple[int, ...] = ()
    max_draft_tokens = 0
    drafts_trees = False

    def open(self, rows: int, capacity: int) -> None:
        return None

    def reset(self, state: None, row: int, num_context: int, token: int) -> None:
        pass

    def observe(self, state: None, commit: Commit) -> None:
        pass

    def propose(self, state: None, rows: Sequence[int], samplers: Sequence[RowSampler], limits: Sequence[int]) -> Draft:
        return Draft(torch.zeros(len(rows), 0, dtype=torch.int64), (0,) * len(rows), probs_NV=(None,) * len(rows))


def _no_drafter(target: Target, draft: str | Path | None, block_size: int | None) -> Drafter:
    return NoDrafter()


def _ngram(target: Target, draft: str | Path | None, block_size: int | None) -> Drafter:
    return NGramDrafter() if block_size is None else NGramDrafter(block_size)


def _dflash(target: Target, draft: str | Path | None, block_size: int | None) -> Drafter:
    from .dflash import DFlashDrafter

    assert draft is not None
    return DFlashDrafter.load(locate_draft(draft), target, block_size)


DRAFTERS: dict[str, Callable[[Target, str | Path | None, int | None], Drafter]] = {
    "none": _no_drafter,
    "ngram": _ngram,
    "dflash": _dflash,
}


def drafter_name(name: str | None = None, draft: str | Path | None = None) -> str:
    """The name in the table that a choice means; a choice that cannot work is an error.

    Without a name: dflash if a draft is given, else plain decoding.
    """
    name = name or ("dflash" if draft is not None else "none")
    if name not in DRAFTERS:
        raise FlashdraftError(f"no drafter is called {name!r}; expected one of {', '.join(DRAFTERS)}.")
    if draft is not None and name in ("none", "ngram"):
        raise FlashdraftError(f"the drafter {name} takes no draft, but {str(draft)!r} was given; use --drafter dflash.")
    if draft is None and name == "dflash":
        raise FlashdraftError("the drafter dflash needs a trained draft; name its folder with --draft.")
    return name


def make_drafter(
    target: Target, name: str | None = None, draft: str | Path | None = None, block_size: int | None = None
) -> Drafter:
    """A drafter by name. Without one: dflash if a draft is given, else plain decoding."""
    return DRAFTERS[drafter_name(name, draft)](target, draft, block_size)
