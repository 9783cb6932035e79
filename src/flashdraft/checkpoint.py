"""The on-disk draft: read strictly, write, and check against a target. safetensors and JSON only.

The layout is the public one of DFlash drafts (z-lab): config.json is a Qwen3 configuration plus
`dflash_config`, model.safetensors holds the weights without embedding and head, which are the
target's. `training.json`, what made the draft, travels along if it is there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .types import FlashdraftError

if TYPE_CHECKING:
    from .target import Target

ARCHITECTURE = "DFlashDraftModel"

# Keys of published drafts that change the network and are not implemented: found and set, they are
# refused, because ignoring them would give a draft that is quietly worse.
_UNSUPPORTED = {
    "conv_kernel_size": "DFlash 2 convolutions",
    "selector_rank": "the DFlash 2 candidate selector",
    "attention_sink_bias": "attention sinks",
    "attention_value_scale": "attention value scaling",
    "projector_type": "a projector of another method",
    "use_swa": "windows given by use_swa (write layer_types, sliding_window and is_causal instead)",
    "markov_rank": "a Markov head",
    "sample_from_anchor": "sampling from the anchor",
    "draft_vocab_size": "a reduced draft vocabulary",
}


@dataclass(frozen=True)
class DraftConfig:
    """Everything the DFlash network is built from.

    `windows[i]` is layer i's sliding window or None; `causal[i]` says whether a slot sees later
    ones in that layer. `block_size` counts the anchor. `target_layer_ids`: outputs of the target's
    decoder layers, counted from 0, joined in this order.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    block_size: int
    mask_token_id: int
    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]
    max_context: int
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    rope: Mapping[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    softcap: float | None = None

    @property
    def num_layers(self) -> int:
        return len(self.windows)


def read(folder: str | Path) -> tuple[DraftConfig, dict[str, torch.Tensor]]:
    """Configuration and weights of a draft folder; every problem found is in one error."""
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise FlashdraftError(f"no draft at {str(folder)!r}; expected a folder with config.json and model.safetensors.")
    config = parse_config(_read_json(path / "config.json"), str(path))
    file = path / "model.safetensors"
    if not file.is_file():
        raise FlashdraftError(f"{path} has no model.safetensors; expected the draft's weights there.")
    wanted = tensor_shapes(config)
    try:
        with safe_open(file, framework="pt") as weights:
            found = {key: tuple(weights.get_slice(key).get_shape()) for key in weights.keys()}  # noqa: SIM118
            _check_shapes(wanted, found, str(file))
            return config, {key: weights.get_tensor(key) for key in wanted}
    except (SafetensorError, OSError) as error:
        raise FlashdraftError(f"{file} cannot be read as safetensors: {error}") from error


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FlashdraftError(f"{file.parent} has no {file.name}; expected a draft folder.") from None
    except (OSError, ValueError) as error:
        raise FlashdraftError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise FlashdraftError(f"{file} holds a {type(value).__name__}; expected a JSON object.")
    return value


class _Keys:
    """Typed look-ups in a config, `dflash_config` first, that collect problems instead of raising."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        inner = raw.get("dflash_config", {})
        self.problems: list[str] = []
        if not isinstance(inner, dict):
            self.problems.append("dflash_config is no object")
            inner = {}
        self.top = raw
        self.merged = {**raw, **{k: v for k, v in inner.items() if v is not None}}

    def integer(self, name: str, least: int = 1, default: int | None = None) -> int:
        value = self.merged.get(name, default)
        if isinstance(value, int) and not isinstance(value, bool) and value >= least:
            return value
        self.problems.append(f"{name} is {value!r}, expected an integer of at least {least}")
        return least

    def number(self, name: str, default: float) -> float:
        value = self.merged.get(name, default)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
        self.problems.append(f"{name} is {value!r}, expected a number")
        return default


def parse_config(raw: Mapping[str, Any], where: str = "config.json") -> DraftConfig:
    """A DraftConfig from config.json's content. Raises one FlashdraftError that lists all problems.

    Keys may sit in `dflash_config` (looked at first) or at the top; rope in `rope_parameters` (new)
    or `rope_theta` and `rope_scaling` (old).
    """
    keys = _Keys(raw)
    problems = keys.problems
    architectures = raw.get("architectures") or [ARCHITECTURE]
    if ARCHITECTURE not in architectures:
        problems.append(f"architectures is {architectures!r}, expected [{ARCHITECTURE!r}]")
    for name, meaning in _UNSUPPORTED.items():
        if keys.merged.get(name) not in (None, False, 0):
            problems.append(f"{name} asks for {meaning}, which is not supported")
    if raw.get("hidden_act", "silu") != "silu":
        problems.append(f"hidden_act is {raw['hidden_act']!r}, expected 'silu'")
    if keys.merged.get("partial_rotary_factor") not in (None, 1, 1.0):
        problems.append("partial_rotary_factor other than 1 is not supported")
    num_layers = keys.integer("num_hidden_layers")
    num_heads = keys.integer("num_attention_heads")
    hidden_size = keys.integer("hidden_size")
    windows, causal = _layer_kinds(keys, num_layers)
    softcap = keys.number("final_logit_softcapping", 0.0) if keys.merged.get("final_logit_softcapping") else 0.0
    config = DraftConfig(
        hidden_size=hidden_size,
        intermediate_size=keys.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=keys.integer("num_key_value_heads", default=num_heads),
        head_dim=keys.integer("head_dim", default=max(1, hidden_size // num_heads)),
        vocab_size=keys.integer("vocab_size"),
        target_layer_ids=_layer_ids(keys),
        num_target_layers=keys.integer("num_target_layers", least=0, default=0),
        block_size=keys.integer("block_size", default=16),
        mask_token_id=keys.integer("mask_token_id", least=0),
        windows=windows,
        causal=causal,
        max_context=keys.integer("max_position_embeddings", default=32768),
        rms_norm_eps=keys.number("rms_norm_eps", 1e-6),
        attention_bias=bool(raw.get("attention_bias", False)),
        rope=_rope(keys),
        embedding_scale=keys.number("input_embedding_scale", 1.0),
        output_multiplier=keys.number("output_multiplier", 1.0),
        softcap=softcap if softcap > 0 else None,
    )
    if config.num_heads % config.num_kv_heads:
        problems.append(f"{config.num_heads} query heads do not divide among {config.num_kv_heads} key/value heads")
    if config.head_dim % 2:
        problems.append(f"head_dim is {config.head_dim}, expected an even number (rotary embeddings)")
    if problems:
        raise FlashdraftError(f"{where} is no DFlash draft that can be used: {'; '.join(problems)}.")
    return config


def _layer_ids(keys: _Keys) -> tuple[int, ...]:
    """Always read: the rule of the paper's code gives other layers for most published drafts."""
    value = keys.merged.get("target_layer_ids")
    if isinstance(value, list) and value and all(type(i) is int and i >= 0 for i in value):
        return tuple(value)
    keys.problems.append(f"target_layer_ids is {value!r}, expected a list of layer numbers from 0")
    return (0,)


def _layer_kinds(keys: _Keys, num_layers: int) -> tuple[tuple[int | None, ...], tuple[bool, ...]]:
    """Window and causality per layer: sliding layers are causal and full ones are not, unless
    `is_causal` says so for all (the rule of z-lab's code)."""
    kinds = keys.top.get("layer_types") or ["full_attention"] * num_layers
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in known for kind in kinds):
        keys.problems.append(f"layer_types is {kinds!r}, expected {num_layers} of {' or '.join(known)}")
        kinds = [known[0]] * num_layers
    sliding = [kind == known[1] for kind in kinds]
    window = None
    # Without use_sliding_window a Qwen3 configuration has no window; such layers are causal only.
    if any(sliding) and keys.top.get("use_sliding_window", keys.top.get("sliding_window") is not None):
        window = keys.integer("sliding_window")
    is_causal = keys.top.get("is_causal")
    windows = tuple(window if s else None for s in sliding)
    return windows, tuple(s if is_causal is None else bool(is_causal) for s in sliding)


def _rope(keys: _Keys) -> dict[str, Any]:
    new = keys.top.get("rope_parameters")
    old = keys.top.get("rope_scaling")
    rope = dict(new) if isinstance(new, dict) else dict(old) if isinstance(old, dict) else {}
    if "full_attention" in rope or "sliding_attention" in rope:
        keys.problems.append("rope_parameters differ by layer type, which is not supported")
        rope = {}
    rope.setdefault("rope_type", rope.pop("type", "default"))
    theta = rope.get("rope_theta", keys.top.get("rope_theta", 10000.0))
    if not isinstance(theta, (int, float)) or theta <= 0:
        keys.problems.append(f"rope_theta is {theta!r}, expected a positive number")
        theta = 10000.0
    rope["rope_theta"] = float(theta)
    return rope


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


def _check_shapes(wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]], where: str) -> None:
    # rotary tables are recomputed; some exporters store them all the same
    extra = [key for key in found if key not in wanted and not key.endswith("inv_freq")]
    problems = [f"{key} is missing" for key in wanted if key not in found]
    problems += [f"{key} is not part of a draft" for key in sorted(extra)]
    problems += [
        f"{key} is {list(found[key])}, expected {list(shape)}"
        for key, shape in wanted.items()
        if key in found and found[key] != shape
    ]
    if problems:
        more = f"; and {len(problems) - 12} more" if len(problems) > 12 else ""
        raise FlashdraftError(f"{where} does not fit its config.json: {'; '.join(problems[:12])}{more}.")


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
    if max(ids) > last:
        problems.append(f"taps layer {max(ids)}, the target's last one is {last}")
    if last in ids:
        problems.append(f"taps the last layer ({last}), which engines read before or after the final norm; tap others")
    if list(ids) != sorted(set(ids)):
        problems.append(f"target_layer_ids {list(ids)} do not rise strictly")
    if config.mask_token_id >= target.vocab_size:
        problems.append(f"mask token {config.mask_token_id} is outside the vocabulary of {target.vocab_size}")
    if config.mask_token_id in target.eos_ids:
        problems.append(f"mask token {config.mask_token_id} is the target's end-of-text token")
    elif config.mask_token_id == target.pad_id:
        problems.append(f"mask token {config.mask_token_id} is the target's padding token")
    if problems:
        raise FlashdraftError(f"{where} does not fit the target {target.name}: {'; '.join(problems)}.")


def config_json(config: DraftConfig, dtype: torch.dtype) -> dict[str, Any]:
    """config.json's content: the keys all engines agree on (../docs/drafts.md says which read what)."""
    sliding = any(window is not None for window in config.windows)
    windows = {w for w in config.windows if w is not None}
    if len(windows) > 1:
        raise FlashdraftError(f"the layers' windows are {sorted(windows)}; the layout holds one size for all.")
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
        "layer_types": ["full_attention" if w is None else "sliding_attention" for w in config.windows],
        "sliding_window": max(windows) if sliding else None,
        "use_sliding_window": sliding,
        "block_size": config.block_size,
        "num_target_layers": config.num_target_layers,
        "dflash_config": inner,
    }
    if config.rope["rope_type"] != "default":
        raw["rope_scaling"] = {k: v for k, v in config.rope.items() if k != "rope_theta"}
    implied = tuple(w is not None for w in config.windows)
    if config.causal != implied:
        if len(set(config.causal)) > 1:
            raise FlashdraftError("some full or sliding layers are causal and others not; the layout cannot say so.")
        raw["is_causal"] = config.causal[0]
    elif all(implied):
        raw["is_causal"] = True  # llama.cpp reads sliding layers as bidirectional unless told
    return raw


def write(
    folder: str | Path,
    config: DraftConfig,
    weights: Mapping[str, torch.Tensor],
    training: Mapping[str, Any] | None = None,
) -> None:
    """Save a draft that `read` and the public tools load. `training` becomes training.json."""
    path = Path(folder).expanduser()
    _check_shapes(tensor_shapes(config), {k: tuple(v.shape) for k, v in weights.items()}, "the network")
    path.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in weights.items()}
    raw = config_json(config, next(iter(tensors.values())).dtype)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    if training is not None:
        (path / "training.json").write_text(json.dumps(training, indent=2) + "\n", encoding="utf-8")
