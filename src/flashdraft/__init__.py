"""Lossless speculative decoding with block-diffusion drafts (DFlash), in one process.

    from flashdraft import Engine, Request, SamplingParams, Target, encode_chat, make_drafter

    target = Target.load("smollm2")
    engine = Engine(target, make_drafter(target, "ngram"))
    prompt = encode_chat(target.tokenizer, [{"role": "user", "content": "Hello"}])
    print(engine.run([Request(prompt, SamplingParams(max_tokens=32))])[0].text)

Names are imported at first use: `import flashdraft` loads neither torch nor transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .drafters import Drafter, NoDrafter, make_drafter
    from .drafters.dflash import DFlashDrafter
    from .drafters.ngram import NGramDrafter
    from .engine import Engine
    from .engines.assistant import DFlashAssistant
    from .engines.transfer import export_draft, import_draft
    from .target import Target
    from .text import encode_chat, encode_text
    from .types import Delta, FlashdraftError, Request, Result, Round, SamplingParams, Stats, Token

    __version__: str

__all__ = [
    "DFlashAssistant",
    "DFlashDrafter",
    "Delta",
    "Drafter",
    "Engine",
    "FlashdraftError",
    "NGramDrafter",
    "NoDrafter",
    "Request",
    "Result",
    "Round",
    "SamplingParams",
    "Stats",
    "Target",
    "Token",
    "__version__",
    "encode_chat",
    "encode_text",
    "export_draft",
    "import_draft",
    "make_drafter",
]

_MODULES = {
    "drafters": ("Drafter", "NoDrafter", "make_drafter"),
    "drafters.dflash": ("DFlashDrafter",),
    "drafters.ngram": ("NGramDrafter",),
    "engine": ("Engine",),
    "engines.assistant": ("DFlashAssistant",),
    "engines.transfer": ("export_draft", "import_draft"),
    "target": ("Target",),
    "text": ("encode_chat", "encode_text"),
    "types": ("Delta", "FlashdraftError", "Request", "Result", "Round", "SamplingParams", "Stats", "Token"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value  # the next look-up does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("flashdraft")
    except metadata.PackageNotFoundError:  # run from a source tree that is not installed
        return "unknown"
