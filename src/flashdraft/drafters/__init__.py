"""What proposes tokens: the protocol, plain decoding as the drafter that proposes none, the table.

A drafter is told about every committed token (`observe`) and asked for a draft once a round
(`propose`). It never holds the target, only its embedding and head. A new method is one file here
and one line in `DRAFTERS`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, get_type_hints

import torch

from ..draft_folder import CONFIG, read_json
from ..locate import locate_draft, locate_target
from ..sampling import RowSampler
from ..settings import convert
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
        """Whether drafts may have `parents_BN`. A row with rejection acceptance (`RowSampler.rejects`) gets a chain."""
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


def _ngram(
    target: Target, draft: str | Path | None, block_size: int | None, *, max_ngram: int = 3, min_ngram: int = 2
) -> Drafter:
    """max_ngram, min_ngram: how many last tokens have to match."""
    return NGramDrafter(8 if block_size is None else block_size, max_ngram, min_ngram)


# Of a DFlash tree, unless said otherwise, and how many of them may go to a lookup where one request at a time is decoded.
# Ten to 15 with four to six were as good (docs/benchmark.md, "Trees on SmolLM2").
_TREE_NODES, _LOOKUP = 12, 6


def _dflash(
    target: Target, draft: str | Path, block_size: int | None, *,
    passes: int = 1, tree: bool | None = None, nodes: int | None = None, ngram: int | None = None,
) -> Drafter:  # fmt: skip
    """passes: of the network over a block, the most confident slots first; the paper uses one. tree: the `nodes`
    likeliest paths through the slots of one pass (12), block_size - 1 levels; None: if its shape is given. ngram: of
    the nodes, how many may go to a branch that prompt lookup finds."""
    from .. import checkpoint
    from .dflash import DFlashDrafter
    from .dflash_ablations import OwnContextDrafter
    from .lookup_branch import LookupBranchDrafter

    folder = locate_draft(draft)
    kind = DFlashDrafter if checkpoint.read(folder)[0].context == "injected" else OwnContextDrafter
    shape = {key: value for key, value in {"nodes": nodes, "ngram": ngram}.items() if value is not None}
    wanted = _wants_tree(tree, shape)
    nodes = (_TREE_NODES if nodes is None else nodes) if wanted else None
    made = kind.load(folder, target, block_size, passes, nodes)
    return made if ngram is None or not made.drafts_trees else LookupBranchDrafter(made, ngram, target.device)


def _draft_model(target: Target, draft: str | Path, block_size: int | None) -> Drafter:
    from .draft_model import DraftModelDrafter

    return DraftModelDrafter.load(draft, target, block_size)


def _medusa(
    target: Target, draft: str | Path, block_size: int | None, *, tree: bool | None = None, nodes: int | None = None
) -> Drafter:
    """tree: follow the configuration's choices; None: if it has any. nodes: of a tree made here instead."""
    from .medusa import MedusaDrafter

    wanted = _wants_tree(tree, {} if nodes is None else {"nodes": nodes})
    return MedusaDrafter.load(locate_draft(draft), target, block_size, wanted, nodes)


def _eagle3(
    target: Target, draft: str | Path, block_size: int | None, *,
    tree: bool | None = None, top_k: int | None = None, nodes: int | None = None,
) -> Drafter:  # fmt: skip
    """tree: EAGLE-2's, with `top_k` nodes expanded a level (8) and `nodes` kept (32); block_size - 1 levels.
    None: if its shape is given."""
    from .dynamic_tree import TreeShape
    from .eagle3 import Eagle3Drafter

    shape = {key: value for key, value in {"top_k": top_k, "nodes": nodes}.items() if value is not None}
    made = TreeShape(**shape) if _wants_tree(tree, shape) else None
    return Eagle3Drafter.load(locate_draft(draft), target, block_size, made)


def _wants_tree(tree: bool | None, shape: Mapping[str, int]) -> bool | None:
    """Who gives a tree's shape wants one."""
    if tree is False and shape:
        raise FlashdraftError(f"{' and '.join(shape)} would shape a tree, but tree is false; drop one of them.")
    return True if shape else tree


DRAFTERS: dict[str, Callable[..., Drafter]] = {
    "none": _no_drafter,
    "ngram": _ngram,
    "dflash": _dflash,
    "draft_model": _draft_model,
    "medusa": _medusa,
    "eagle3": _eagle3,
}
_WITHOUT_DRAFT = ("none", "ngram")
# in the architecture's name of a language model that is none: drafts, of methods that are read or refused
_DRAFTS = ("dflash", "medusa", "eagle", "dspark", "domino", "lilicorr", "mtp")


def drafter_name(name: str | None = None, draft: str | Path | None = None, target: str | None = None) -> str:
    """The name in the table that a choice means; a choice that cannot work is an error.

    Without a name: what the draft's folder says it is, plain decoding without one. A language model is a
    draft model, but not by mistake: not the target itself, if it is said what was loaded as `target`.
    """
    given, name = name, name or (_method_of(draft) if draft is not None else "none")
    if name not in DRAFTERS:
        raise FlashdraftError(f"no drafter is called {name!r}; expected one of {', '.join(DRAFTERS)}.")
    if draft is not None and name in _WITHOUT_DRAFT:
        raise FlashdraftError(
            f"the drafter {name} takes no draft, but {str(draft)!r} was given; leave one of them out."
        )
    if draft is None and name not in _WITHOUT_DRAFT:
        raise FlashdraftError(f"the drafter {name} needs a trained draft; name its folder with --draft.")
    if draft is not None and given is None and name == "draft_model" and _is_target(draft, target):
        raise FlashdraftError(
            f"{draft} is the target itself, which as a draft would gain nothing; expected a smaller model with its "
            "tokenizer, or a trained draft."
        )
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
    if "eagle3" in kinds or ("draft_vocab_size" in raw and "llamaforcausallm" in kinds):
        return "eagle3"
    language_model = "forcausallm'" in kinds or "lmheadmodel'" in kinds
    return "draft_model" if language_model and not any(part in kinds for part in _DRAFTS) else "dflash"


def _is_target(draft: str | Path, target: str | None) -> bool:
    if target is None:
        return False
    try:
        return locate_draft(draft).resolve() == locate_target(target).resolve()
    except FlashdraftError:  # made in memory, or to be complained about by whoever loads it
        return False


def option_types(name: str) -> dict[str, Any]:
    """A drafter's own options, with their types: the keywords of its function."""
    made = DRAFTERS[name]
    hints = get_type_hints(made, localns={"Target": Any})
    return {key: hints[key] for key, p in inspect.signature(made).parameters.items() if p.kind is p.KEYWORD_ONLY}


def drafter_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """A drafter's own options with their values as it wants them. Raises FlashdraftError for others."""
    known = option_types(name)
    for key in options:
        if key not in known:
            has = [*known, *(["a block size"] if name != "none" else [])]
            raise FlashdraftError(f"the drafter {name} has no option {key!r}; it has {', '.join(has) or 'none'}.")
    return {key: convert(value, known[key], key) for key, value in options.items()}


def usual_options(name: str, draft: str | Path | None, target: Target) -> dict[str, Any]:
    """The options that one request at a time is decoded fastest with, where nothing else was chosen: DFlash's tree,
    with prompt lookup as a branch, for targets in half precision. There a pass over 16 tokens costs little more than
    one over six, which may not be so in float32 on a CPU, nor for many requests at a time."""
    if name != "dflash" or draft is None or target.dtype.itemsize > 2:
        return {}
    method = read_json(locate_draft(draft) / CONFIG).get("dflash_config")
    fills_one_by_one = isinstance(method, dict) and method.get("autoregressive")
    return {} if fills_one_by_one else {"tree": True, "ngram": _LOOKUP}


def make_drafter(
    target: Target,
    name: str | None = None,
    draft: str | Path | None = None,
    block_size: int | None = None,
    **options: Any,
) -> Drafter:
    """A drafter by name; without one, what the draft's folder says, or plain decoding. `options` are the
    method's own: see its function above."""
    name = drafter_name(name, draft, target.name)
    return DRAFTERS[name](target, draft, block_size, **drafter_options(name, options))
