"""The on-disk draft: read strictly, write, and check against a target. safetensors and JSON only.

A folder holds config.json (draft_config.py) and model.safetensors: the weights without embedding and
head, which are the target's. `training.json`, what made the draft, travels along if it is there.
A draft trained on a part of the vocabulary has the part's ids in draft_vocab.safetensors: engines
that do not know the file draft from the whole vocabulary, with the same weights.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .draft_config import ARCHITECTURE, FULL, SLIDING, DraftConfig, parse_config
from .types import FlashdraftError

if TYPE_CHECKING:
    from .target import Target

__all__ = [
    "ARCHITECTURE", "DraftConfig", "check_against", "config_json", "parse_config", "read", "read_training",
    "read_vocab", "tensor_shapes", "write",
]  # fmt: skip

CONFIG, WEIGHTS, TRAINING = "config.json", "model.safetensors", "training.json"
VOCAB = "draft_vocab.safetensors"

# Element types of a weight, as safetensors spells them. Integers and 8-bit floats are quantised files.
_FLOATS = {"F64", "F32", "F16", "BF16"}


def read(folder: str | Path) -> tuple[DraftConfig, dict[str, torch.Tensor]]:
    """Configuration and weights of a draft folder. One FlashdraftError lists all that is wrong with
    its config.json, or else all in which the weights do not fit it.

    The weights are views of the mapped file: reading allocates nothing before they are converted.
    """
    path = Path(folder).expanduser()
    with _reading(path):
        if not path.is_dir():
            raise FlashdraftError(f"no draft at {str(folder)!r}; expected a folder with {CONFIG} and {WEIGHTS}.")
    config = parse_config(_read_json(path / CONFIG), str(path))
    file = path / WEIGHTS
    with _reading(file):
        if not file.is_file():
            raise FlashdraftError(_missing_weights(path))
        with safe_open(file, framework="pt") as weights:
            slices = {key: weights.get_slice(key) for key in weights.keys()}  # noqa: SIM118
            found = {key: (tuple(part.get_shape()), part.get_dtype()) for key, part in slices.items()}
            wanted = tensor_shapes(config)
            _check_tensors(wanted, found, str(file))
            return config, {key: weights.get_tensor(key) for key in wanted}


def read_training(folder: str | Path) -> dict[str, Any] | None:
    """What made the draft (training.json), or None. Raises FlashdraftError if it cannot be read;
    `read` does not look at it, so decoding goes on without."""
    file = Path(folder).expanduser() / TRAINING
    with _reading(file):
        return _read_json(file) if file.exists() else None


def read_vocab(folder: str | Path, config: DraftConfig) -> torch.Tensor | None:
    """The ids a draft was trained to propose, int64 and rising, or None for the whole vocabulary."""
    file = Path(folder).expanduser() / VOCAB
    with _reading(file):
        if not file.exists():
            return None
        with safe_open(file, framework="pt") as stored:
            names = list(stored.keys())
            ids: torch.Tensor | None = stored.get_tensor("ids") if names == ["ids"] else None
    if ids is None or ids.dtype != torch.int64 or ids.ndim != 1 or not len(ids):
        raise FlashdraftError(f"{file} holds {', '.join(names) or 'nothing'}; expected one int64 list named ids.")
    if int(ids[0]) < 0 or int(ids[-1]) >= config.vocab_size or bool((ids[1:] <= ids[:-1]).any()):
        raise FlashdraftError(f"{file}: the ids do not rise strictly within the vocabulary of {config.vocab_size}.")
    return ids


@contextlib.contextmanager
def _reading(file: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise FlashdraftError(f"{file} cannot be read: {error}") from error


def _read_json(file: Path) -> dict[str, Any]:
    with _reading(file):
        if not file.is_file():  # a pipe would be waited for, a broken link is nothing
            raise FlashdraftError(f"{file.parent} has no {file.name}; expected a draft folder.")
        text = file.read_bytes()
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FlashdraftError(f"{file} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise FlashdraftError(f"{file} holds a {type(value).__name__}; expected a JSON object.")
    return value


def _missing_weights(path: Path) -> str:
    others = sorted(f.name for f in path.iterdir() if f.suffix in (".safetensors", ".bin", ".pt", ".pth"))
    if any(name.endswith(".safetensors") for name in others):
        return f"{path} has its weights in {', '.join(others[:3])}; expected one file {WEIGHTS}."
    found = f"only {others[0]}, which could run code" if others else f"no {WEIGHTS}"
    return f"{path} has {found}; expected the draft's weights in {WEIGHTS}."


def tensor_shapes(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight of a draft."""
    hidden, ff, dim = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * dim, config.num_kv_heads * dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(config.target_layer_ids) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for i in range(config.num_layers):
        layer = f"layers.{i}."
        shapes |= {layer + "input_layernorm.weight": (hidden,), layer + "post_attention_layernorm.weight": (hidden,)}
        for name, (out, into) in {"q": (q, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, q)}.items():
            shapes[f"{layer}self_attn.{name}_proj.weight"] = (out, into)
            if config.attention_bias:
                shapes[f"{layer}self_attn.{name}_proj.bias"] = (out,)
        shapes |= {f"{layer}self_attn.{name}_norm.weight": (dim,) for name in "qk"}
        shapes |= {f"{layer}mlp.{name}_proj.weight": (ff, hidden) for name in ("gate", "up")}
        shapes[layer + "mlp.down_proj.weight"] = (hidden, ff)
    return shapes


def _check_tensors(
    wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[tuple[int, ...], str]], where: str
) -> None:
    if found and all(key.startswith("model.") for key in found):
        raise FlashdraftError(f"{where} has 'model.' in front of every weight's name; expected names without it.")
    # rotary tables are recomputed; some exporters store them all the same
    extra = [key for key in found if key not in wanted and not key.endswith("inv_freq")]
    problems = [f"{key} is missing" for key in wanted if key not in found]
    problems += [f"{key} is not part of a draft" for key in sorted(extra)]
    for key in wanted:
        shape, dtype = found.get(key, (wanted[key], "F32"))
        if shape != wanted[key]:
            problems.append(f"{key} is {list(shape)}, expected {list(wanted[key])}")
        if dtype not in _FLOATS:
            problems.append(f"{key} is stored as {dtype}, expected BF16, F16, F32 or F64")
    if problems:
        more = f"; and {len(problems) - 12} more" if len(problems) > 12 else ""
        raise FlashdraftError(f"{where} does not fit its {CONFIG}: {'; '.join(problems[:12])}{more}.")


def check_against(config: DraftConfig, target: Target, where: str = "the draft") -> None:
    """Raise one FlashdraftError that lists everything in which draft and target do not fit."""
    problems = []
    if config.hidden_size != target.hidden_size:
        problems.append(f"hidden size {config.hidden_size}, the target has {target.hidden_size}")
    if config.vocab_size != target.vocab_size:
        problems.append(f"vocabulary {config.vocab_size}, the target has {target.vocab_size}")
    if config.num_target_layers not in (0, target.num_layers):
        problems.append(f"made for {config.num_target_layers} target layers, the target has {target.num_layers}")
    ids, last = config.target_layer_ids, target.num_layers - 1
    outside = [i for i in ids if not 0 <= i <= last]
    if outside:
        problems.append(f"taps layers {outside}, the target's are 0 to {last}")
    if last in ids:
        problems.append(f"taps the last layer ({last}), which engines read before or after the final norm; tap others")
    if list(ids) != sorted(set(ids)):
        problems.append(f"target_layer_ids {list(ids)} do not rise strictly")
    if not 0 <= config.mask_token_id < target.vocab_size:
        problems.append(f"mask token {config.mask_token_id} is outside the vocabulary of {target.vocab_size}")
    if config.mask_token_id in target.eos_ids:
        problems.append(f"mask token {config.mask_token_id} is the target's end-of-text token")
    elif config.mask_token_id == target.pad_id:
        problems.append(f"mask token {config.mask_token_id} is the target's padding token")
    if problems:
        raise FlashdraftError(f"{where} does not fit the target {target.name}: {'; '.join(problems)}.")


def config_json(config: DraftConfig, dtype: torch.dtype) -> dict[str, Any]:
    """config.json's content: the keys all engines agree on. Raises FlashdraftError for a
    combination of windows and causality that the layout cannot say."""
    inner: dict[str, Any] = {
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
        "block_size": config.block_size,
    }
    if config.embedding_scale != 1:
        inner["input_embedding_scale"] = config.embedding_scale
    if config.output_multiplier != 1:
        inner["output_multiplier"] = config.output_multiplier
    if config.softcap is not None:
        inner["final_logit_softcapping"] = config.softcap
    raw: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "dtype": str(dtype).removeprefix("torch."),
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": False,
        "max_position_embeddings": config.max_context,
        "rope_theta": config.rope["rope_theta"],
        "rope_parameters": dict(config.rope),
        "block_size": config.block_size,
        **_attention_keys(config),
        "dflash_config": inner,
    }
    if config.num_target_layers:
        raw["num_target_layers"] = config.num_target_layers
    if config.rope.get("rope_type", "default") != "default":
        raw["rope_scaling"] = {k: v for k, v in config.rope.items() if k != "rope_theta"}
    return raw


def _attention_keys(config: DraftConfig) -> dict[str, Any]:
    """Windows and causality. Where the keys' rule (sliding is causal, full is not) does not say it,
    `is_causal` does, for all layers at once."""
    sliding = tuple(window is not None for window in config.windows)
    sizes = sorted({w for w in config.windows if w is not None})
    if len(sizes) > 1:
        raise FlashdraftError(f"the layers' windows are {sizes}; the layout holds one size for all.")
    keys: dict[str, Any] = {
        "layer_types": [SLIDING if s else FULL for s in sliding],
        "sliding_window": max(sizes, default=None),
        "use_sliding_window": any(sliding),
    }
    if len(set(config.causal)) == 1 and (config.causal != sliding or all(sliding)):
        keys["is_causal"] = config.causal[0]  # llama.cpp reads all-sliding drafts as bidirectional unless told
    elif config.causal != sliding:
        raise FlashdraftError("some full or sliding layers are causal and others not; the layout cannot say so.")
    return keys


def write(
    folder: str | Path,
    config: DraftConfig,
    weights: Mapping[str, torch.Tensor],
    training: Mapping[str, Any] | None = None,
    vocab_ids: torch.Tensor | None = None,
) -> None:
    """Save a draft that `read` and the public tools load. `training` becomes training.json, and
    `vocab_ids` the draft vocabulary beside the weights.

    An older draft in the folder is replaced, other files stay. All is written beside its place and
    then moved: a failure leaves the older draft. Killed in the middle of the move it leaves a folder
    without config.json, which `read` refuses, and both drafts in its `.draft-...`: never one draft's
    weights with another's configuration.
    """
    path = Path(folder).expanduser()
    tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in weights.items()}
    kinds = {name: (tuple(t.shape), _DTYPES.get(t.dtype, str(t.dtype))) for name, t in tensors.items()}
    _check_tensors(tensor_shapes(config), kinds, "the network")
    raw = config_json(config, next(iter(tensors.values())).dtype)
    parse_config(raw, "the draft to be saved")  # what is written can be read
    _refuse_other_content(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        stage = Path(tempfile.mkdtemp(prefix=".draft-", dir=path))
        try:
            save_file(tensors, stage / WEIGHTS, metadata={"format": "pt"})
            _write_json(stage / CONFIG, raw)
            if training is not None:
                _write_json(stage / TRAINING, training)
            if vocab_ids is not None:
                save_file({"ids": vocab_ids.to("cpu", torch.int64)}, stage / VOCAB)
            _move_in(stage, path)
        finally:
            shutil.rmtree(stage, ignore_errors=True)
    except OSError as error:
        raise FlashdraftError(f"the draft cannot be saved in {path}: {error}") from error


_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _refuse_other_content(path: Path) -> None:
    """A folder with another model in it, say the target's, is not written to."""
    if (path / CONFIG).exists():
        names = _read_json(path / CONFIG).get("architectures")
        if names != [ARCHITECTURE]:
            raise FlashdraftError(f"{path} holds another model (architectures {names!r}); save to another folder.")
    elif (path / WEIGHTS).exists():
        raise FlashdraftError(f"{path} holds weights of something else and no {CONFIG}; save to another folder.")


def _move_in(stage: Path, path: Path) -> None:
    """Put the staged files in place. config.json leaves first and comes last: a folder without it
    is no draft."""
    old = Path(tempfile.mkdtemp(prefix="old-", dir=stage))
    moved = []
    try:
        for name in (CONFIG, WEIGHTS, VOCAB, TRAINING):
            if (path / name).exists():
                (path / name).replace(old / name)
        for name in (WEIGHTS, VOCAB, TRAINING, CONFIG):
            if (stage / name).exists():
                (stage / name).replace(path / name)
                moved.append(name)
    except BaseException:
        for name in moved:
            (path / name).unlink()
        for name in (WEIGHTS, VOCAB, TRAINING, CONFIG):
            if (old / name).exists():
                (old / name).replace(path / name)
        raise
