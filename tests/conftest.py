"""One thread a worker: the models are tiny, and OpenMP's waiting threads would slow the others.

And what all tests of the command line start from.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli_bed import Call, Outcome, save_draft, save_rivals, save_target
from flashdraft import cli
from flashdraft.target import Target


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target with a real tokenizer and a chat template."""
    return save_target(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def target(folder: Path) -> Target:
    return Target.load(folder, dtype="float32")


@pytest.fixture(scope="session")
def draft(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DFlash draft of that target, with random weights."""
    out = tmp_path_factory.mktemp("draft")
    save_draft(out, target, vocab_size=target.vocab_size, mask_token_id=target.vocab_size - 1)
    return out


@pytest.fixture(scope="session")
def rival_drafts(target: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Drafts of the other methods for that target, with random weights: method -> folder."""
    return save_rivals(tmp_path_factory.mktemp("rivals"), target)


@pytest.fixture
def call(folder: Path, colourful: None) -> Call:
    """Run a command in this process: `call("generate", "hello", stdin="...", target=...)`."""

    def run(command: str, *args: object, stdin: str | bytes = b"", target: object = folder) -> Outcome:
        options = ["--target", str(target), "--dtype", "float32"]
        return Outcome(CliRunner().invoke(cli.app, [command, *options, *map(str, args)], input=stdin))

    return run


@pytest.fixture
def colourful(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment in which a terminal has colours."""
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
