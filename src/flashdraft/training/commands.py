"""The training commands of the command line; like cli.py it imports what is slow inside them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..options import Threads, option

Config = Annotated[
    Path, typer.Argument(metavar="CONFIG.yaml", help="What to train on what, and how.", show_default=False)
]
Settings = Annotated[
    list[str] | None,
    option("--set", metavar="KEY=VALUE", help="Overrules a line of the file; may be repeated.", show_default=False),
]


def train(config: Config, set_: Settings = None, threads: Threads = None) -> None:
    """Train a draft, from the run's last checkpoint if there is one. Ctrl-C saves; the same command
    goes on."""
    from rich.console import Console

    from .run import run_training

    settings = [*(set_ or []), *([f"threads={threads}"] if threads is not None else [])]
    if not run_training(config, settings, Console()):
        raise typer.Exit(130)
