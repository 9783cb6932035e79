"""GGUF files: dequantised once, to bfloat16, and kept as safetensors with checksums.

A kept folder is complete or absent: it is written under another name and renamed, and an intact one
is never touched again. So any number of processes may convert and load at the same time.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .gguf_header import GgufHeader, read_header
from .model_folder import one_line
from .types import FlashdraftError

# Says what takes long; the command line shows it.
_log = logging.getLogger("flashdraft")

# Part of a kept folder's name: raise it when what is written changes.
_FORMAT = 2
_SUMS = "flashdraft.json"
_SMALL = 256 << 20
_SECONDS_A_DAY = 86400.0


def cache_dir() -> Path:
    """Where converted weights are kept: FLASHDRAFT_CACHE, else the user's cache folder."""
    override = os.environ.get("FLASHDRAFT_CACHE")
    if override:
        return Path(override)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flashdraft"


def dequantised(gguf: Path) -> Path:
    """The folder with a GGUF file's weights as bfloat16 safetensors; made on first use.

    Its checksums are compared at every load, and a damaged one is made again.
    """
    place = cache_dir() / "targets"
    stem = re.sub(r"[^\w.-]+", "_", gguf.stem)[:60] + "-" + _fingerprint(gguf)
    for folder in _kept(place, stem):
        if _intact(folder):
            return folder
    # transformers' GGUF reader needs both
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise FlashdraftError(
            f"reading {gguf} needs the package {' and '.join(missing)}; run: pip install 'flashdraft[gguf]'"
        )
    header = read_header(gguf)
    _log.info("unpacking the weights of %s; this is done once and takes up to half a minute", gguf.name)
    try:
        place.mkdir(parents=True, exist_ok=True)
        _sweep(place)
        work = Path(tempfile.mkdtemp(prefix=stem + ".", suffix=".part", dir=place))
    except OSError as error:
        raise _cannot_keep(gguf, place, error) from error
    try:
        _convert(gguf, header, work)
        return _publish(work, place, stem)
    except OSError as error:
        raise _cannot_keep(gguf, place, error) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _cannot_keep(gguf: Path, place: Path, error: Exception) -> FlashdraftError:
    return FlashdraftError(
        f"the unpacked weights of {gguf.name} cannot be kept in {place}: {one_line(error)}; "
        "set FLASHDRAFT_CACHE to a folder with room that can be written."
    )


def _fingerprint(gguf: Path) -> str:
    """Of the content, or of size, time and samples where reading it all would take seconds. Two
    fine-tunes have the same size and the same beginning."""
    try:
        stat = gguf.stat()
        if stat.st_size <= _SMALL:
            return f"{_FORMAT}-{_sha256(gguf)[:16]}"
        digest = hashlib.sha256(f"{stat.st_size} {stat.st_mtime_ns}".encode())
        with gguf.open("rb") as file:
            for sample in range(64):
                file.seek(stat.st_size * sample // 64)
                digest.update(file.read(4096))
    except OSError as error:
        raise FlashdraftError(f"{gguf} cannot be read: {one_line(error)}.") from error
    return f"{_FORMAT}-{digest.hexdigest()[:16]}"


def _kept(place: Path, stem: str) -> Iterator[Path]:
    try:
        yield from sorted(f for f in place.glob(f"{stem}.*") if f.suffix != ".part")
    except OSError:
        return


def _publish(work: Path, place: Path, stem: str) -> Path:
    """Give a finished folder its final name, unless another process was faster."""
    damaged = list(_kept(place, stem))
    for folder in damaged:
        if _intact(folder):
            return folder
    final = work.with_suffix("")
    work.rename(final)
    for folder in damaged:
        shutil.rmtree(folder, ignore_errors=True)
    return final


def _sweep(place: Path) -> None:
    """Remove what conversions left that were killed."""
    for part in place.glob("*.part"):
        if time.time() - part.stat().st_mtime > _SECONDS_A_DAY:
            shutil.rmtree(part, ignore_errors=True)


def _intact(folder: Path) -> bool:
    try:
        sums = json.loads((folder / _SUMS).read_text(encoding="utf-8"))["sha256"]
        with ThreadPoolExecutor(max_workers=2) as pool:
            found = pool.map(_sha256, [folder / name for name in sums])
            _import_transformers()  # hashing leaves the interpreter free
            return bool(sums) and list(found) == list(sums.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _import_transformers() -> None:
    """What every load needs next."""
    from transformers import modeling_utils  # noqa: F401
    from transformers.models.auto import modeling_auto  # noqa: F401


def _convert(gguf: Path, header: GgufHeader, out: Path) -> None:
    import torch
    from safetensors import SafetensorError

    from .loading import quiet_transformers

    with quiet_transformers():
        try:
            model, tokenizer = _read(gguf, header, torch.bfloat16)
        except FlashdraftError:
            raise
        except Exception as error:  # transformers and gguf raise many kinds
            raise FlashdraftError(f"{gguf} cannot be read as a GGUF model: {one_line(error)}.") from error
        try:
            model.save_pretrained(out)
            tokenizer.save_pretrained(out)
        except SafetensorError as error:  # how a full disk looks from there
            raise OSError(one_line(error)) from error
    sums = {file.name: _sha256(file) for file in sorted(out.iterdir()) if file.is_file()}
    (out / _SUMS).write_text(json.dumps({"source": gguf.name, "sha256": sums}, indent=2), encoding="utf-8")


def _read(gguf: Path, header: GgufHeader, dtype: Any) -> tuple[Any, Any]:
    import transformers

    from .loading import check_complete, check_size

    where: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True, "trust_remote_code": False}
    config = transformers.AutoConfig.from_pretrained(gguf.parent, **where)
    check_size(config, header.num_weights, gguf.name)
    options: dict[str, Any] = {"config": config, "dtype": dtype, "output_loading_info": True}
    # Newer transformers keep GGUF weights packed unless told otherwise; older ones unpack always.
    if hasattr(transformers, "GgufConfig"):
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, **where, **options)
    check_complete(info, gguf.name)
    return model, transformers.AutoTokenizer.from_pretrained(gguf.parent, **where)
