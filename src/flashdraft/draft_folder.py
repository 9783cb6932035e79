"""A draft folder on the disk, whatever the method: strict reading, whole writing. JSON and safetensors only.

What a configuration means and which tensors belong to it is the business of each method.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .model_folder import one_line
from .types import FlashdraftError

CONFIG, WEIGHTS, TRAINING = "config.json", "model.safetensors", "training.json"
VOCAB, VOCAB_JSON = "draft_vocab.safetensors", "draft_vocab.json"

Shapes = Mapping[str, tuple[int, ...]]

# No configuration is larger; a hostile one may be.
_MOST_JSON = 64 << 20

# Element types of a weight, as safetensors spells them. Integers and 8-bit floats are quantised files.
_FLOATS = {"F64", "F32", "F16", "BF16"}
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.bool: "BOOL",
}  # fmt: skip


@contextlib.contextmanager
def reading(file: Path) -> Iterator[None]:
    """Errors of the disk and of safetensors become one sentence."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise FlashdraftError(f"{file} cannot be read: {one_line(error)}.") from error


def read_config(folder: str | Path) -> tuple[Path, dict[str, Any]]:
    """A draft folder's path and the content of its config.json."""
    path = Path(folder).expanduser()
    with reading(path):
        if not path.is_dir():
            raise FlashdraftError(f"no draft at {str(folder)!r}; expected a folder with {CONFIG} and {WEIGHTS}.")
    return path, read_json(path / CONFIG)


def read_json(file: Path) -> dict[str, Any]:
    with reading(file):
        if not file.is_file():  # a pipe would be waited for, a broken link is nothing
            raise FlashdraftError(f"{file.parent} has no {file.name}; expected a draft folder.")
        if file.stat().st_size > _MOST_JSON:
            raise FlashdraftError(f"{file} has {file.stat().st_size:,} bytes; expected a JSON file of a draft.")
        text = file.read_bytes()
    try:
        value = json.loads(text, object_pairs_hook=_without_doubles)
    except (ValueError, RecursionError) as error:
        raise FlashdraftError(f"{file} is not JSON: {one_line(error)}.") from error
    if not isinstance(value, dict):
        raise FlashdraftError(f"{file} holds a {type(value).__name__}; expected a JSON object.")
    return value


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Of a key that is there twice, readers of JSON take the first, the last, or neither."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in found if names.count(name) > 1)!r} is there twice")
    return found


def read_tensors(
    path: Path,
    wanted: Shapes,
    optional: Shapes | None = None,
    kinds: Mapping[str, str] | None = None,
    renamed: Mapping[str, str] | None = None,
) -> dict[str, torch.Tensor]:
    """The tensors of a folder's model.safetensors: all that are wanted, and nothing but those and the
    optional ones. One FlashdraftError lists everything that does not fit.

    They are views of the mapped file: reading allocates nothing before they are converted.

    Args:
        kinds: element types of those that are no weights ("I64", "BOOL").
        renamed: beginnings of names in other people's files -> ours.
    """
    file = path / WEIGHTS
    with reading(file):
        if not file.is_file():
            raise FlashdraftError(_missing_weights(path))
        with safe_open(file, framework="pt") as weights:
            names = {_ours(key, renamed or {}): key for key in weights.keys()}  # noqa: SIM118
            slices = {name: weights.get_slice(key) for name, key in names.items()}
            found = {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
            check_tensors(wanted, found, str(file), optional or {}, kinds or {})
            return {name: weights.get_tensor(names[name]) for name in (*wanted, *(optional or {})) if name in names}


def _ours(key: str, renamed: Mapping[str, str]) -> str:
    for theirs, ours in renamed.items():
        if key.startswith(theirs):
            return ours + key[len(theirs) :]
    return key


def _missing_weights(path: Path) -> str:
    others = sorted(f.name for f in path.iterdir() if f.suffix in (".safetensors", ".bin", ".pt", ".pth"))
    if any(name.endswith(".safetensors") for name in others):
        return f"{path} has its weights in {', '.join(others[:3])}; expected one file {WEIGHTS}."
    found = f"only {others[0]}, which could run code" if others else f"no {WEIGHTS}"
    return f"{path} has {found}; expected the draft's weights in {WEIGHTS}."


def check_tensors(
    wanted: Shapes,
    found: Mapping[str, tuple[tuple[int, ...], str]],
    where: str,
    optional: Shapes | None = None,
    kinds: Mapping[str, str] | None = None,
) -> None:
    if found and all(key.startswith("model.") for key in found):
        raise FlashdraftError(f"{where} has 'model.' in front of every weight's name; expected names without it.")
    known = {**wanted, **{key: shape for key, shape in (optional or {}).items() if key in found}}
    # rotary tables are recomputed; some exporters store them all the same
    extra = [key for key in found if key not in known and not key.endswith("inv_freq")]
    problems = [f"{key} is missing" for key in known if key not in found]
    problems += [f"{key} is not part of a draft" for key in sorted(extra)]
    for key, expected in known.items():
        kind = (kinds or {}).get(key)
        shape, dtype = found.get(key, (expected, kind or "F32"))
        if shape != expected:
            problems.append(f"{key} is {list(shape)}, expected {list(expected)}")
        if dtype not in (_FLOATS if kind is None else {kind}):
            problems.append(f"{key} is stored as {dtype}, expected {kind or 'BF16, F16, F32 or F64'}")
    if problems:
        more = f"; and {len(problems) - 12} more" if len(problems) > 12 else ""
        raise FlashdraftError(f"{where} does not fit its {CONFIG}: {'; '.join(problems[:12])}{more}.")


def kinds_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and element type of tensors in memory, as `check_tensors` wants them."""
    return {name: (tuple(t.shape), _DTYPES.get(t.dtype, str(t.dtype))) for name, t in tensors.items()}


def on_cpu(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().contiguous().cpu() for name, tensor in weights.items()}


def write_files(
    folder: str | Path,
    raw: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    training: Mapping[str, Any] | None = None,
    vocab_ids: torch.Tensor | None = None,
    replaces: Collection[str] = (),
    extra: Mapping[str, bytes] | None = None,
) -> None:
    """Save config.json, model.safetensors, and training.json and the draft vocabulary if they are given.

    An older draft in the folder is replaced (of the same architecture, or one of `replaces`), and files of
    the names in `extra`; others stay. All is written beside its place and then moved: a failure leaves the older draft. Killed
    in the middle of the move it leaves a folder without config.json, which is refused, and both drafts
    in its `.draft-...`: never one draft's weights with another's configuration.
    """
    path = Path(folder).expanduser()
    _refuse_other_content(path, [*raw["architectures"], *replaces])
    try:
        path.mkdir(parents=True, exist_ok=True)
        stage = Path(tempfile.mkdtemp(prefix=".draft-", dir=path))
        try:
            save_file(dict(tensors), stage / WEIGHTS, metadata={"format": "pt"})
            write_json(stage / CONFIG, raw)
            if training is not None:
                write_json(stage / TRAINING, training)
            if vocab_ids is not None:
                save_file({"ids": vocab_ids.to("cpu", torch.int64)}, stage / VOCAB)
            for name in (WEIGHTS, VOCAB):  # which safetensors writes for the owner's eyes alone
                if (stage / name).exists():
                    shutil.copymode(stage / CONFIG, stage / name)
            for name, data in (extra or {}).items():
                (stage / name).write_bytes(data)
            _move_in(stage, path, tuple(extra or ()))
        finally:
            shutil.rmtree(stage, ignore_errors=True)
    except OSError as error:
        raise FlashdraftError(f"the draft cannot be saved in {path}: {one_line(error)}.") from error


def write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _refuse_other_content(path: Path, own: Collection[str]) -> None:
    """A folder with another model in it, say the target's, is not written to."""
    if (path / CONFIG).exists():
        names = read_json(path / CONFIG).get("architectures")
        if names not in [[name] for name in own]:
            raise FlashdraftError(f"{path} holds another model (architectures {names!r}); save to another folder.")
    elif (path / WEIGHTS).exists():
        raise FlashdraftError(f"{path} holds weights of something else and no {CONFIG}; save to another folder.")


def _move_in(stage: Path, path: Path, extra: tuple[str, ...]) -> None:
    """Put the staged files in place. config.json leaves first and comes last: a folder without it
    is no draft."""
    others = tuple(dict.fromkeys((WEIGHTS, VOCAB, VOCAB_JSON, TRAINING, *extra)))
    old = Path(tempfile.mkdtemp(prefix="old-", dir=stage))
    moved = []
    try:
        for name in (CONFIG, *others):
            if (path / name).exists():
                (path / name).replace(old / name)
        for name in (*others, CONFIG):
            if (stage / name).exists():
                (stage / name).replace(path / name)
                moved.append(name)
    except BaseException:
        for name in moved:
            (path / name).unlink()
        for name in (*others, CONFIG):
            if (old / name).exists():
                (old / name).replace(path / name)
        raise
