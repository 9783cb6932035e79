"""What proposes tokens: the protocol, plain decoding as the drafter that proposes none, the table.

A drafter is told about every committed token (`observe`) and asked for a draft once a round
(`propose`). It never holds the target, only its embedding and head. A new method is one file here
and one line in `DRAFTERS`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ..draft_folder import CONFIG, read_json
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

    @property
    def bytes_per_context_token(self) -> int:
        """Bytes that a token of context takes in the drafter's own tensors; 0 if it keeps none."""
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
    bytes_per_context_token = 0

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


def _dflash(target: Target, draft: str | Path, block_size: int | None, *, passes: int = 1) -> Drafter:
    """passes: of the network over a block, the most confident slots first; the paper uses one."""
    from .. import checkpoint
    from .dflash import DFlashDrafter
    from .dflash_ablations import OwnContextDrafter

    folder = locate_draft(draft)
    kind = DFlashDrafter if checkpoint.read(folder)[0].context == "injected" else OwnContextDrafter
    return kind.load(folder, target, block_size, passes)


def _draft_model(target: Target, draft: str | Path, block_size: int | None) -> Drafter:
    from .draft_model import DraftModelDrafter

    return DraftModelDrafter.load(draft, target, block_size)


def _medusa(target: Target, draft: str | Path, block_size: int | None, *, tree: bool | None = None) -> Drafter:
    """tree: follow the configuration's choices; None: if it has any."""
    from .medusa import MedusaDrafter

    return MedusaDrafter.load(locate_draft(draft), target, block_size, tree)


def _eagle3(
    target: Target, draft: str | Path, block_size: int | None, *, tree: bool = False, top_k: int = 8, nodes: int = 32
) -> Drafter:
    """tree: EAGLE-2's, with `top_k` nodes expanded a level and `nodes` kept; block_size - 1 levels."""
    from .eagle3 import Eagle3Drafter, TreeShape

    shape = TreeShape(top_k=top_k, nodes=nodes) if tree else None
    return Eagle3Drafter.load(locate_draft(draft), target, block_size, shape)


DRAFTERS: dict[str, Callable[..., Drafter]] = {
    "none": _no_drafter,
    "ngram": _ngram,
    "dflash": _dflash,
    "draft_model": _draft_model,
    "medusa": _medusa,
    "eagle3": _eagle3,
}
_WITHOUT_DRAFT = ("none", "ngram")


def drafter_name(name: str | None = None, draft: str | Path | None = None) -> str:
    """The name in the table that a choice means; a choice that cannot work is an error.

    Without a name: what the draft's folder says it is, plain decoding without one. A language model as
    draft has to be asked for by name.
    """
    name = name or (_method_of(draft) if draft is not None else "none")
    if name not in DRAFTERS:
        raise FlashdraftError(f"no drafter is called {name!r}; expected one of {', '.join(DRAFTERS)}.")
    if draft is not None and name in _WITHOUT_DRAFT:
        raise FlashdraftError(f"the drafter {name} takes no draft, but {str(draft)!r} was given; use --drafter dflash.")
    if draft is None and name not in _WITHOUT_DRAFT:
        raise FlashdraftError(f"the drafter {name} needs a trained draft; name its folder with --draft.")
    return name


def _method_of(draft: str | Path) -> str:
    """The method that a folder's config.json names; DFlash says what is wrong with all others."""
    try:
        raw = read_json(locate_draft(draft) / CONFIG)
    except FlashdraftError:
        return "dflash"
    kinds = str(raw.get("architectures")).lower()
    if raw.get("model_type") == "medusa" or "medusa" in kinds:
        return "medusa"
    return "eagle3" if "eagle3" in kinds or ("draft_vocab_size" in raw and "llamaforcausallm" in kinds) else "dflash"


def make_drafter(
    target: Target,
    name: str | None = None,
    draft: str | Path | None = None,
    block_size: int | None = None,
    **options: Any,
) -> Drafter:
    """A drafter by name; without one, what the draft's folder says, or plain decoding. `options` are the
    method's own: see its function above."""
    name = drafter_name(name, draft)
    known = [key for key, p in inspect.signature(DRAFTERS[name]).parameters.items() if p.kind is p.KEYWORD_ONLY]
    strange = sorted(options.keys() - set(known))
    if strange:
        raise FlashdraftError(f"the drafter {name} has no option {strange[0]!r}; it has {', '.join(known) or 'none'}.")
    return DRAFTERS[name](target, draft, block_size, **options)
