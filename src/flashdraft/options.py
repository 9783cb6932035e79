"""Options that several commands share: each is spelled, explained and bounded here only.

Those of the sampling panel are named as the fields of SamplingParams, which checks their values.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

MODEL, SAMPLING = "Model", "Sampling"


def option(*names: str, help: str, panel: str | None = None, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


def _model(*names: str, help: str, **more: Any) -> Any:
    return option(*names, help=help, panel=MODEL, **more)


def _sampling(*names: str, help: str, **more: Any) -> Any:
    return option(*names, help=help, panel=SAMPLING, **more)


TargetName = Annotated[
    str, _model("--target", "-t", metavar="MODEL", help="Folder, GGUF file, name in the hub cache, or smollm2.")
]
DraftFolder = Annotated[
    str | None,
    _model(
        "--draft", metavar="FOLDER",
        help="A trained draft of any method, or a small language model: its folder, or smollm2 (ships along).",
    ),
]  # fmt: skip
_DRAFTERS = "none (plain decoding), ngram, dflash, draft_model, medusa or eagle3."
DrafterName = Annotated[
    str | None,
    _model("--drafter", metavar="NAME", help=_DRAFTERS, show_default="what the folder of --draft holds, else none"),
]
OwnDrafterName = Annotated[
    str | None,
    _model(
        "--drafter", metavar="NAME", help=_DRAFTERS,
        show_default="what the folder of --draft holds; without one dflash if a draft for the target ships along "
        "(smollm2), else none",
    ),
]  # fmt: skip
DrafterOptions = Annotated[
    list[str] | None,
    _model(
        "--drafter-option", metavar="KEY=VALUE", show_default=False,
        help="May be repeated. ngram: max_ngram, min_ngram; dflash: passes, tree, nodes, ngram; medusa: tree, nodes; eagle3: tree, top_k, nodes.",
    ),
]  # fmt: skip
BlockSize = Annotated[
    int | None,
    _model(
        "--block-size", metavar="N", min=1,
        help="Tokens of a block: the last one known, and N-1 drafted (of a tree: N-1 levels).",
    ),
]  # fmt: skip
Dtype = Annotated[
    str,
    _model("--dtype", metavar="NAME", help="float32, bfloat16, float16, float64, or auto: bfloat16 where it is fast."),
]
Device = Annotated[
    str | None, _model("--device", metavar="NAME", help="cpu, cuda, cuda:1...", show_default="cuda if there is one")
]
Threads = Annotated[int | None, _model("--threads", metavar="N", min=1, help="CPU threads.", show_default="torch's")]

System = Annotated[str | None, option("--system", metavar="TEXT", help="System message.")]

MaxTokens = Annotated[int, _sampling("--max-tokens", "-n", metavar="N", help="Longest answer, in tokens.")]
MinTokens = Annotated[int, _sampling("--min-tokens", metavar="N", help="Shortest answer, in tokens.")]
Temperature = Annotated[float, _sampling("--temperature", metavar="X", help="0 is greedy.")]
TopP = Annotated[float, _sampling("--top-p", metavar="X", help="Keep the likeliest tokens that reach this mass.")]
TopK = Annotated[int, _sampling("--top-k", metavar="N", help="Keep the N likeliest tokens; 0 is off.")]
MinP = Annotated[float, _sampling("--min-p", metavar="X", help="Drop tokens below this share of the likeliest.")]
Seed = Annotated[
    int | None, _sampling("--seed", metavar="N", min=0, help="Same seed, same text.", show_default="random")
]
Stop = Annotated[
    list[str] | None, _sampling("--stop", metavar="TEXT", help="End the answer at this text; may be repeated.")
]
RepetitionPenalty = Annotated[
    float, _sampling("--repetition-penalty", metavar="X", help="Above 1 avoids tokens of prompt and answer.")
]
PresencePenalty = Annotated[
    float, _sampling("--presence-penalty", metavar="X", help="Taken off the logits of tokens in the answer.")
]
FrequencyPenalty = Annotated[
    float, _sampling("--frequency-penalty", metavar="X", help="The same, for each time they occur.")
]
Acceptance = Annotated[
    str,
    _sampling(
        "--acceptance",
        metavar="NAME",
        help="coupled: same text as plain decoding with that seed; rejection: same distribution.",
    ),
]
