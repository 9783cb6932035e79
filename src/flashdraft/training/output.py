"""The rows of a run on disk, so that a run killed at any moment goes on without a lost or doubled row.

OUT is only ever appended to, all rows of a prompt in one write. What a kill cut off (a torn line, a
prompt with some of its rows) is removed at the next start, and the prompt is answered again.
OUT.meta.json says what the rows were made with, OUT.rejected.jsonl what became of the other prompts.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from ..types import FlashdraftError
from .data import Rejected, read_meta

# Facts of the sidecar that may differ between a run and its continuation.
MAY_DIFFER = frozenset({"flashdraft", "endpoint_models"})


class Output:
    """OUT, opened to append.

    Attributes:
        done: ids of prompts that need no answer any more, rows and final rejections alike.
        num_rows, num_tokens: rows that were there before this run, and their tokens.
        rejected_before: final rejections of earlier runs.

    Raises FlashdraftError if OUT was made with other settings, or is being written by somebody else.
    """

    def __init__(self, path: str | Path, meta: Mapping[str, Any]) -> None:
        self.path = Path(path)
        self.rejected_path = Path(f"{path}.rejected.jsonl")
        self._sidecar = Path(f"{path}.meta.json")
        if self.path.suffix == ".gz":
            raise FlashdraftError(f"{path} would be gzipped, which cannot go on after a kill; name a .jsonl file.")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a+b")
        self._rejected: BinaryIO | None = None
        try:
            self._lock()
            self._compare(meta)
            self.done: set[str] = set()
            self.num_rows = self.num_tokens = 0
            self.rejected_before: list[Rejected] = []
            self._recover()
            self._open_rejected()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Output:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append all rows of one prompt."""
        _append(self._file, rows)

    def reject(self, rejected: Rejected) -> None:
        assert self._rejected is not None
        _append(self._rejected, [asdict(rejected)])

    def close(self) -> None:
        for file in (self._file, self._rejected):
            if file is not None and not file.closed:
                with contextlib.suppress(OSError):  # not every file system can
                    os.fsync(file.fileno())
                file.close()

    def _lock(self) -> None:
        """Two runs that append to one file would answer every prompt twice."""
        try:
            import fcntl
        except ImportError:  # no such locks there
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise FlashdraftError(f"{self.path} is being written by another run; wait for it, or stop it.") from error

    def _compare(self, meta: Mapping[str, Any]) -> None:
        """Refuse to go on with other settings; write the sidecar of a new file."""
        if self.path.stat().st_size == 0:
            _replace(self._sidecar, json.dumps(meta, indent=2, ensure_ascii=False).encode() + b"\n")
            return
        before = read_meta(self.path)
        if before is None:
            raise FlashdraftError(f"{self.path} exists without {self._sidecar.name}; give another --out, or remove it.")
        now = json.loads(json.dumps(meta))
        names = [name for name in {**before, **now} if name not in MAY_DIFFER and before.get(name) != now.get(name)]
        if names:
            changes = ", ".join(f"{n} {_short(before.get(n))} then and {_short(now.get(n))} now" for n in names)
            raise FlashdraftError(
                f"{self.path} was written with other settings ({changes}); repeat those of {self._sidecar.name}, "
                "or give another --out."
            )

    def _recover(self) -> None:
        """Cut what a kill tore, and note which prompts are done."""
        self._file.seek(0)
        whole = at = 0
        pending: list[int] = []
        for number, line in enumerate(self._file, 1):
            at += len(line)
            if not line.endswith(b"\n"):
                break
            try:
                row = json.loads(line)
                name, (part, parts), tokens = prompt_id(row), row.get("part", (1, 1)), len(row["token_ids"])
            except (ValueError, KeyError, TypeError) as error:
                raise FlashdraftError(
                    f"{self.path}, line {number} is no row that regenerate wrote; restore the file, or give another --out."
                ) from error
            pending.append(tokens)
            if part == parts:  # the prompt's last row
                self.done.add(name)
                self.num_rows += len(pending)
                self.num_tokens += sum(pending)
                pending, whole = [], at
        self._file.truncate(whole)

    def _open_rejected(self) -> None:
        """Keep the rejections that would come out the same; the others are found anew."""
        with contextlib.suppress(FileNotFoundError):
            for line in self.rejected_path.read_bytes().splitlines(keepends=True):
                with contextlib.suppress(ValueError, TypeError):  # torn
                    problem = Rejected(**json.loads(line))
                    if problem.answered and problem.id not in self.done:
                        self.rejected_before.append(problem)
                        self.done.add(problem.id)
        _replace(self.rejected_path, b"".join(_encode(asdict(problem)) for problem in self.rejected_before))
        self._rejected = self.rejected_path.open("ab")


def prompt_id(row: Mapping[str, Any]) -> str:
    """The id of the prompt a row belongs to: a conversation that was split has rows id#1, id#2..."""
    name = str(row["id"])
    return name.rsplit("#", 1)[0] if "part" in row else name


def _encode(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass") + b"\n"


def _append(file: BinaryIO, rows: Iterable[Mapping[str, Any]]) -> None:
    file.write(b"".join(map(_encode, rows)))
    file.flush()


def _replace(path: Path, data: bytes) -> None:
    """Write a file whole or not at all."""
    work = path.with_name(path.name + ".tmp")
    work.write_bytes(data)
    work.replace(path)


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
