"""Checkpoints of a run: whole or absent, whatever the moment of a crash.

    RUN/checkpoints/step-00001200/   state.safetensors, state.json, the draft's own files, manifest.json
    RUN/latest, RUN/best-draft       links to the newest checkpoint and to the best validated draft

A checkpoint is written to a hidden folder, flushed to the disk and renamed. Its manifest holds the
SHA-256 of every file; one that does not fit is passed over for the one before.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from ..types import FlashdraftError

_log = logging.getLogger("flashdraft")
_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was found whole."""

    folder: Path
    state: dict[str, Any]

    def tensors(self) -> dict[str, torch.Tensor]:
        return load_file(self.folder / "state.safetensors")


class Checkpoints:
    """The checkpoints of one run.

    Args:
        keep: how many; at least two.
        reached: called with the name of every stage of saving; tests crash there.
    """

    def __init__(self, run: str | Path, keep: int = 2, reached: Callable[[str], None] = lambda stage: None) -> None:
        self.run = Path(run).expanduser()
        self.folder = self.run / "checkpoints"
        self._keep, self._reached = keep, reached

    def save(
        self,
        step: int,
        tensors: Mapping[str, torch.Tensor],
        state: Mapping[str, Any],
        write_draft: Callable[[Path], None],
    ) -> Path:
        """Write a checkpoint and make it the latest; older ones beyond `keep` are removed."""
        final = self.folder / f"step-{step:08d}"
        work = self.folder / f".writing-{final.name}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir()
            self._reached("made")
            save_file({k: v.detach().cpu().contiguous() for k, v in tensors.items()}, work / "state.safetensors")
            self._reached("tensors")
            (work / "state.json").write_text(json.dumps(dict(state), indent=1) + "\n", encoding="utf-8")
            write_draft(work)
            self._reached("draft")
            _write_manifest(work)
            self._reached("manifest")
            _flush(work)
            self._reached("flushed")
            self._put(work, final)
            self._reached("renamed")
            link(self.run / "latest", final)
            self._reached("linked")
            self._remove_old()
            self._reached("cleaned")
        except OSError as error:
            raise FlashdraftError(f"the checkpoint of step {step} cannot be saved in {self.folder}: {error}") from error
        return final

    def load(self, relink: bool = True) -> Saved | None:
        """The newest whole checkpoint, or None if there is none at all.

        relink: point `latest` to it; of several processes one does.
        Raises FlashdraftError if there are checkpoints and all are damaged.
        """
        found = self._all()
        for folder in reversed(found):
            problem = _damage(folder)
            if problem is None:
                if relink:
                    link(self.run / "latest", folder)
                return Saved(folder, json.loads((folder / "state.json").read_text(encoding="utf-8")))
            _log.warning("%s is damaged (%s); going back to the one before it", folder.name, problem)
        if found:
            raise FlashdraftError(
                f"all checkpoints in {self.folder} are damaged; remove the folder to start anew, "
                "or train to another run folder."
            )
        return None

    def save_best(self, step: int, write_draft: Callable[[Path], None]) -> None:
        """Keep a draft as the best one; the folder has only the draft's own files."""
        final = self.run / f"best-step-{step:08d}"
        work = self.run / f".writing-{final.name}"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        write_draft(work)
        _flush(work)
        self._put(work, final)
        link(self.run / "best", final)
        for old in self.run.glob("best-step-*"):
            if old != final:
                shutil.rmtree(old, ignore_errors=True)

    def _put(self, work: Path, final: Path) -> None:
        if final.exists():  # the same step again, after going back to an older checkpoint
            shutil.rmtree(final)
        work.replace(final)
        _flush_folder(final.parent)

    def _all(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        return sorted(
            (f for f in self.folder.iterdir() if _NAME.fullmatch(f.name)), key=lambda f: int(f.name.split("-")[1])
        )

    def _remove_old(self) -> None:
        for folder in self._all()[: -self._keep]:
            # renamed first, so that a half-removed one is not taken for a damaged checkpoint
            doomed = folder.with_name(f".writing-{folder.name}")
            shutil.rmtree(doomed, ignore_errors=True)
            folder.replace(doomed)
            shutil.rmtree(doomed)
        for rest in self.folder.glob(".writing-*"):
            shutil.rmtree(rest, ignore_errors=True)


def link(name: Path, to: Path) -> None:
    """Point a relative symbolic link somewhere, in one step."""
    part = name.with_name(f".{name.name}.new")
    part.unlink(missing_ok=True)
    part.symlink_to(os.path.relpath(to, name.parent), target_is_directory=True)
    part.replace(name)


def _write_manifest(folder: Path) -> None:
    sums = {file.name: _sha256(file) for file in sorted(folder.iterdir())}
    (folder / "manifest.json").write_text(json.dumps({"sha256": sums}, indent=1) + "\n", encoding="utf-8")


def _damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    try:
        sums = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["sha256"]
        for name, digest in sums.items():
            if _sha256(folder / name) != digest:
                return f"{name} has another checksum"
    except (OSError, ValueError, KeyError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    missing = {"state.safetensors", "state.json"} - set(sums)
    return f"{', '.join(sorted(missing))} is missing" if missing else None


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _flush(folder: Path) -> None:
    for file in folder.iterdir():
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
    _flush_folder(folder)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
