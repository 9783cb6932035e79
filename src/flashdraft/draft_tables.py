"""What may stand beside a draft network's weights: the part of the vocabulary it drafts from, and, in other
people's layouts, copies of the target's embedding and head with the maps between the two vocabularies.

DFlash borrows embedding and head. Copies that equal the target's say nothing new, and rows of the head
for some tokens are our reduced vocabulary; a table that differs makes another network, and is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

from .config_keys import MOST
from .draft_config import DraftConfig
from .draft_folder import VOCAB, VOCAB_JSON, WEIGHTS, Shapes, read_config, read_json, reading
from .foreign_config import translate
from .types import FlashdraftError

if TYPE_CHECKING:
    from .target import Target

EMBEDDING, HEAD, OFFSETS, MEMBERS = "embed_tokens.weight", "lm_head.weight", "d2t", "t2d"
TABLE_KINDS = {OFFSETS: "I64", MEMBERS: "BOOL"}
# What the package speculators kept of the target beside them in older files, for training only.
_PASSED_OVER = ("verifier_lm_head.weight", "verifier_norm.weight")


def table_shapes(raw: Mapping[str, Any], config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """Tensors that a draft with this config.json may have beside its network; none in the z-lab layout."""
    foreign = translate(raw)
    if foreign is None:
        return {}
    vocab, hidden = config.vocab_size, config.hidden_size
    rows = foreign.head_rows or vocab
    maps = {OFFSETS: (rows,), MEMBERS: (vocab,)}
    kept: dict[str, tuple[int, ...]] = dict(zip(_PASSED_OVER, ((vocab, hidden), (hidden,)), strict=True))
    return {EMBEDDING: (vocab, hidden), HEAD: (rows, hidden), **maps, **kept}


def read_tables(folder: str | Path, config: DraftConfig) -> dict[str, torch.Tensor]:
    """Those of them that are there, of a folder that `checkpoint.read` accepts. Views of the mapped file."""
    path, raw = read_config(folder)
    wanted: Shapes = table_shapes(raw, config)
    if not wanted:
        return {}
    with reading(path / WEIGHTS), safe_open(path / WEIGHTS, framework="pt") as stored:
        names = set(stored.keys()) & set(wanted) - set(_PASSED_OVER)
        return {name: stored.get_tensor(name) for name in sorted(names)}


def read_vocab(folder: str | Path, config: DraftConfig) -> torch.Tensor | None:
    """The ids a draft was trained to propose, int64 and rising, or None for the whole vocabulary."""
    path = Path(folder).expanduser()
    file, plain = path / VOCAB, path / VOCAB_JSON
    if file.exists():
        return _rising(_stored_ids(file), config, str(file))
    if plain.exists():
        listed = read_json(plain).get("ids")
        if not isinstance(listed, list) or not listed or not all(type(i) is int and 0 <= i <= MOST for i in listed):
            raise FlashdraftError(f"{plain} has no list of token ids under the name ids.")
        return _rising(torch.tensor(listed, dtype=torch.int64), config, str(plain))
    return mapped_ids(path, config)


def _stored_ids(file: Path) -> torch.Tensor:
    if not file.is_file():  # a pipe would be waited for
        raise FlashdraftError(f"{file} is no file; expected the ids of a draft's vocabulary.")
    with reading(file), safe_open(file, framework="pt") as stored:
        names = list(stored.keys())
        ids: torch.Tensor | None = stored.get_tensor("ids") if names == ["ids"] else None
    if ids is None or ids.dtype != torch.int64 or ids.ndim != 1 or not len(ids):
        raise FlashdraftError(f"{file} holds {', '.join(names) or 'nothing'}; expected one int64 list named ids.")
    return ids


def _rising(ids: torch.Tensor, config: DraftConfig, where: str) -> torch.Tensor:
    if int(ids[0]) < 0 or int(ids[-1]) >= config.vocab_size or bool((ids[1:] <= ids[:-1]).any()):
        raise FlashdraftError(f"{where}: the ids do not rise strictly within the vocabulary of {config.vocab_size}.")
    return ids


def mapped_ids(folder: str | Path, config: DraftConfig) -> torch.Tensor | None:
    """The vocabulary of a draft in another layout, from its maps; None is all of it."""
    path, raw = read_config(folder)
    foreign = translate(raw)
    if foreign is None:
        return None
    tables = read_tables(path, config)
    ids = head_ids(tables)
    if ids is None and foreign.head_rows is not None:
        raise FlashdraftError(
            f"{path} drafts from {foreign.head_rows} of {config.vocab_size} tokens, but its weights lack d2t, without "
            "which nobody knows which; export it again."
        )
    if ids is None:
        return None
    ids = _rising(ids.sort().values, config, f"{path / WEIGHTS}, d2t")  # the order of a head's rows says nothing
    members = tables.get(MEMBERS)
    if members is not None and not torch.equal(members.nonzero().flatten(), ids):
        raise FlashdraftError(f"{path / WEIGHTS}: d2t and t2d name different tokens; export the draft again.")
    return None if len(ids) == config.vocab_size else ids


def head_ids(tables: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """The target's id of every row of a draft's head; None: the same. `d2t` holds the differences."""
    offsets = tables.get(OFFSETS)
    return None if offsets is None else torch.arange(len(offsets)) + offsets


def check_tables(folder: str | Path, config: DraftConfig, target: Target) -> None:
    """Raise FlashdraftError if a draft brings an embedding or a head that are not the target's."""
    tables = read_tables(folder, config)
    if tables:
        mapped_ids(folder, config)  # within the vocabulary, before rows are looked up by them
        check_copies(
            tables, lambda: target.model.get_input_embeddings().weight, lambda ids: target.head_rows(ids)[0],
            str(folder), target.name,
        )  # fmt: skip


def check_copies(
    tables: Mapping[str, torch.Tensor],
    embedding: Callable[[], torch.Tensor],
    head_rows: Callable[[torch.Tensor | None], torch.Tensor],
    where: str,
    target: str,
) -> None:
    """Raise FlashdraftError if a table is no copy of the target's, which two functions give."""
    if EMBEDDING in tables:
        _compare(tables[EMBEDDING], embedding(), EMBEDDING, where, target)
    if HEAD in tables:
        _compare(tables[HEAD], head_rows(head_ids(tables)), HEAD, where, target)


def _compare(own: torch.Tensor, theirs: torch.Tensor, name: str, where: str, target: str) -> None:
    """Row by row, in either's precision."""
    theirs = theirs.detach().cpu()
    differ = [int((a != b).any(dim=-1).sum()) for a, b in ((own, theirs.to(own.dtype)), (own.to(theirs.dtype), theirs))]
    if min(differ):
        raise FlashdraftError(
            f"{where} has {'an embedding' if name == EMBEDDING else 'a head'} of its own ({name} differs from that of "
            f"{target} in {min(differ):,} of {len(own):,} rows), which is not supported; is it the target it was made for?"
        )
