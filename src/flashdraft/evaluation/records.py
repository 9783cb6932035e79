"""Records of timed runs: JSON lines, one per request, that a benchmark can go on from.

The first line is a header: what was asked for, and on what machine. A run that was killed is gone on
with: whole groups of requests that are there are not repeated, a cut last line is dropped.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from ..types import FlashdraftError, Round

VERSION = 1
PLAIN = "plain"


@dataclass(frozen=True, order=True)
class Cell:
    """What is measured: an arm at a temperature and a batch size.

    Attributes:
        block_size: 0: the arm has none, or a server does not say.
        server: name of the server that was asked; "" is this program's own engine.
    """

    arm: str
    block_size: int
    temperature: float
    rows: int
    server: str = ""

    @property
    def plain(self) -> Cell:
        """The arm that this one is compared with."""
        return replace(self, arm=PLAIN, block_size=0)

    @property
    def name(self) -> str:
        """The arm, as tables call it: every server may have a plain one."""
        return f"{self.server} {PLAIN}" if self.server and self.arm == PLAIN else self.arm


@dataclass(frozen=True)
class Counts:
    """What a server's own counters say of drafts: of one request, or of a group (then one of the group's
    records has them).

    Attributes:
        source: where they come from.
        passes: of the target over a draft. committed: tokens that came out of these passes.
        drafted, accepted: tokens, where the server says. by_slot: passes that kept slots 1 to k.
    """

    source: str
    passes: float
    committed: float
    drafted: int | None = None
    accepted: int | None = None
    by_slot: tuple[int, ...] = ()


@dataclass(frozen=True)
class Record:
    """One request of one run. None is a figure that nobody gives.

    Attributes:
        group: number of the requests decoded together, group_size of them.
        num_tokens: of the answer, the prefill's included.
        ids_sha256: of the answer's token ids (its text, from a server), to compare answers by.
        rounds: (drafted, accepted, committed) of every round; of a tree its depth, too.
        draft_seconds, verify_seconds: shares of the batch's wall clock while this request ran.
        decode_seconds: of the whole group, without the prefills; of a server, while at least one request
            had its first token and not yet its last.
        peak_mb: of the process so far (of the device during this run, on a GPU).
        load: CPUs that other processes kept busy meanwhile.
        pieces: (text, how it came) of every token, where the run keeps them.
        draft_bytes_per_context_token: what the drafter's own cache grows by.
        first_token_seconds: until the first text of a streamed answer came.
        counts: a server's. note: what is wrong with them.
        failure: why there is no answer; such a record has no other figures.
    """

    cell: Cell
    task: str
    prompt: str
    group: int
    group_size: int
    repeat: int
    num_prompt_tokens: int | None
    num_tokens: int
    ids_sha256: str
    finish_reason: str
    rounds: tuple[tuple[int, ...], ...]
    prefill_seconds: float | None
    draft_seconds: float | None
    verify_seconds: float | None
    decode_seconds: float
    peak_mb: float | None
    load: float | None
    pieces: tuple[tuple[str, str], ...] = ()
    draft_bytes_per_context_token: int | None = None
    first_token_seconds: float | None = None
    counts: Counts | None = None
    note: str = ""
    failure: str = ""

    def as_rounds(self) -> list[Round]:
        return [Round(*counts) for counts in self.rounds]


def round_counts(made: Round) -> tuple[int, ...]:
    """A round as records keep it, and `Record.as_rounds` gives it back."""
    counts = (made.num_drafted, made.num_accepted, made.num_committed)
    return counts if made.depth is None else (*counts, made.depth)


@dataclass(frozen=True)
class Recorded:
    """A file of records, as it stands."""

    header: dict[str, Any]
    records: tuple[Record, ...]


class RecordFile:
    """Appends records; what is written is flushed a group at a time.

    Args:
        header: `settings` has to be what the file was begun with, and so have `digests` that both name; the
            rest may differ.
    """

    def __init__(self, path: str | Path, header: dict[str, Any]) -> None:
        self.path = Path(path).expanduser()
        self.done: set[tuple[Cell, str, int, int]] = set()
        found = begun(self.path)
        if found is not None:
            _compare(self.path, found.header.get("settings", {}), header["settings"])
            _compare_digests(self.path, found.header.get("digests", {}), header.get("digests", {}))
            self.done = _whole_groups(found.records)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = [] if found is None else [r for r in found.records if _key(r) in self.done]
        lines = [{"version": VERSION, **(header if found is None else found.header)}, *(_as_json(r) for r in kept)]
        part = self.path.with_name(self.path.name + ".part")
        part.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        part.replace(self.path)

    def add(self, records: list[Record]) -> None:
        text = "".join(json.dumps(_as_json(record)) + "\n" for record in records)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        self.done |= {_key(record) for record in records}


def begun(path: str | Path) -> Recorded | None:
    """What a file holds already; None for one that has no record yet, whatever its header asked for."""
    file = Path(path).expanduser()
    found = read_records(file) if file.exists() and file.stat().st_size else None
    return found if found is not None and found.records else None


def _key(record: Record) -> tuple[Cell, str, int, int]:
    return (record.cell, record.task, record.group, record.repeat)


def _whole_groups(records: tuple[Record, ...]) -> set[tuple[Cell, str, int, int]]:
    """A group is written at once, but a crash may leave half of it."""
    counts = Counter(_key(record) for record in records)
    return {_key(record) for record in records if counts[_key(record)] == record.group_size}


def _compare(path: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    changes = [f"{k}: {old.get(k)!r} -> {new.get(k)!r}" for k in sorted({*old, *new}) if old.get(k) != new.get(k)]
    if changes:
        raise FlashdraftError(
            f"{path} holds runs with other settings: {'; '.join(changes)}. Change them back to go on, or name another "
            "file with --out."
        )


def _compare_digests(path: Path, old: Mapping[str, str], new: Mapping[str, str]) -> None:
    """What the settings only name may have changed behind the name."""
    changed = sorted(name for name in old.keys() & new.keys() if old[name] != new[name])
    if changed:
        raise FlashdraftError(
            f"{path} holds runs with another content of: {', '.join(changed)}. Name another file with --out."
        )


def _as_json(record: Record) -> dict[str, Any]:
    """Fields that are not there in every record are left out where they say nothing."""
    line: dict[str, Any] = {"cell": list(asdict(record.cell).values())}
    for field in fields(record):
        value = getattr(record, field.name)
        if field.name != "cell" and (field.default is MISSING or value != field.default):
            line[field.name] = asdict(value) if isinstance(value, Counts) else value
    return line


def read_records(path: str | Path) -> Recorded:
    """Raises FlashdraftError for a file that is none of ours; a cut last line is passed over."""
    lines = list(_lines(Path(path).expanduser()))
    if not lines or not isinstance(lines[0], dict) or lines[0].get("version") != VERSION:
        raise FlashdraftError(f"{path} holds no records of this version; expected a file of `flashdraft bench`.")
    try:
        return Recorded(lines[0], tuple(_record(line) for line in lines[1:]))
    except (KeyError, TypeError, ValueError) as error:
        raise FlashdraftError(f"{path} has a line that is no record ({error}); expected a file of bench.") from None


def _lines(path: Path) -> Iterator[Any]:
    try:
        texts = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise FlashdraftError(f"{path} cannot be read ({error}); expected a file of `flashdraft bench`.") from None
    for number, text in enumerate(texts, 1):
        try:
            yield json.loads(text)
        except ValueError:
            if number < len(texts):
                raise FlashdraftError(f"{path}, line {number}: no JSON; expected a file of bench.") from None


def _record(line: dict[str, Any]) -> Record:
    values = dict(line)
    values["cell"] = Cell(*line["cell"])
    values["rounds"] = tuple(tuple(counts) for counts in line["rounds"])
    values["pieces"] = tuple(tuple(piece) for piece in line.get("pieces", ()))
    if line.get("counts") is not None:
        values["counts"] = Counts(**(line["counts"] | {"by_slot": tuple(line["counts"].get("by_slot", ()))}))
    return Record(**values)
