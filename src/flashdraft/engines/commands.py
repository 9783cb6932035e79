"""`flashdraft export` and `flashdraft import`; like cli.py it imports what is slow inside them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..options import option

Draft = Annotated[str, typer.Argument(metavar="DRAFT", help="A draft's folder, or smollm2.", show_default=False)]
To = Annotated[
    str, option("--to", metavar="ENGINE", help="vllm, sglang, llama.cpp, speculators or zlab.", show_default=False)
]
Out = Annotated[
    Path | None, option("--out", metavar="DIR", help="Folder to write to.", show_default="DRAFT-ENGINE, here")
]
ForTarget = Annotated[
    str | None,
    option(
        "--target", "-t", metavar="MODEL", help="The target it is for: folder, GGUF file, hub name or smollm2.",
        show_default="what the draft's files name",
    ),
]  # fmt: skip
OwnRows = Annotated[
    bool, option("--own-rows", help="Not SGLang, z-lab: write the head's rows of a reduced vocabulary, too.")
]
Kind = Annotated[
    str | None, option("--type", metavar="TYPE", help="llama.cpp: of the draft's weights: q8_0, q4_0, bf16...",
                       show_default="f16"),
]  # fmt: skip
Foreign = Annotated[
    str, typer.Argument(metavar="FOLDER", help="A draft of z-lab, speculators or DeepSpec.", show_default=False)
]
Place = Annotated[Path, option("--out", metavar="DIR", help="Folder to write to.", show_default=False)]


def export(
    draft: Draft, to: To, out: Out = None, target: ForTarget = None, own_rows: OwnRows = False, kind: Kind = None
) -> None:
    """Write a draft as another engine loads it, check what was written, and say how to serve it."""
    from .transfer import export_draft

    made = export_draft(draft, to, out, target, own_rows=own_rows, kind=kind)
    for note in made.notes:
        typer.echo(f"note: {note}", err=True)
    typer.echo(f"wrote {made.folder}, and read it back: the same weights and configuration")
    typer.echo(f"\n{made.launch}")
    if made.request is not None:
        typer.echo(f"\n{made.request}")


def import_(folder: Foreign, out: Place, target: ForTarget = None) -> None:
    """Write a draft of another layout in the one that flashdraft trains, and check what was written."""
    from .transfer import import_draft

    source = import_draft(folder, out, target)
    config = source.config
    typer.echo(
        f"wrote {out}: a {source.layout} draft of {config.num_layers} layers, block size {config.block_size}, "
        f"reading the outputs of layers {', '.join(map(str, config.target_layer_ids))}"
    )
    typer.echo(f'\nflashdraft generate --draft {out} "What is 17 times 23?"')
