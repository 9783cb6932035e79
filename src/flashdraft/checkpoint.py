"""The on-disk draft: read strictly, write, and check against a target. safetensors and JSON only.

A folder holds config.json (draft_config.py) and model.safetensors: the weights without embedding and
head, which are the target's. `training.json`, what made the draft, travels along if it is there.
A draft trained on a part of the vocabulary has the part's ids in draft_vocab.safetensors (or, where an
engine would take that for weights, in draft_vocab.json): engines that do not know the file draft from the
whole vocabulary, with the same weights. Folders in other layouts (foreign_config.py) are read as well.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .draft_config import ABLATION, ARCHITECTURE, FULL, SLIDING, DraftConfig, parse_config
from .draft_folder import (
    TRAINING,
    check_tensors,
    kinds_of,
    on_cpu,
    read_config,
    read_json,
    read_tensors,
    reading,
    write_files,
)
from .draft_tables import TABLE_KINDS, check_tables, read_tables, read_vocab, table_shapes
from .types import FlashdraftError

if TYPE_CHECKING:
    from .target import Target

__all__ = [
    "ARCHITECTURE", "DraftConfig", "check_against", "check_tables", "config_json", "digest", "draft_warning",
    "parse_config", "read", "read_tables", "read_training", "read_vocab", "target_digest", "target_warning",
    "tensor_shapes", "write",
]  # fmt: skip


def read(folder: str | Path) -> tuple[DraftConfig, dict[str, torch.Tensor]]:
    """Configuration and weights of a draft folder. One FlashdraftError lists all that is wrong with
    its config.json, or else all in which the weights do not fit it.

    The weights are views of the mapped file: reading allocates nothing before they are converted.
    """
    path, raw = read_config(folder)
    config = parse_config(raw, str(path))
    shapes = tensor_shapes(config)
    tensors = read_tensors(path, shapes, table_shapes(raw, config), TABLE_KINDS)
    return config, {name: tensors[name] for name in shapes}


def read_training(folder: str | Path) -> dict[str, Any] | None:
    """What made the draft (training.json), or None. Raises FlashdraftError if it cannot be read;
    `read` does not look at it, so decoding goes on without."""
    file = Path(folder).expanduser() / TRAINING
    with reading(file):
        return read_json(file) if file.exists() else None


def tensor_shapes(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight of a draft."""
    hidden, ff, dim = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * dim, config.num_kv_heads * dim
    shapes: dict[str, tuple[int, ...]] = {"norm.weight": (hidden,)}
    if config.context != "none":
        shapes |= {"fc.weight": (hidden, len(config.target_layer_ids) * hidden), "hidden_norm.weight": (hidden,)}
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


def target_digest(target: Target) -> str | None:
    """SHA-256 that tells a target's weights from others' (`digest`). None for float16, which bfloat16
    weights do not survive."""
    return None if target.dtype == torch.float16 else digest(target.model.state_dict())


def digest(weights: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 of names, shapes and up to 1024 values of each tensor, spread over it, rounded to bfloat16:
    the same in bfloat16 and float32. It tells weights apart; it is no proof against someone who wants to
    deceive."""
    made = hashlib.sha256()
    for name, weight in sorted(weights.items()):
        if not weight.is_floating_point():
            continue
        flat = weight.detach().reshape(-1)
        values = flat[:: max(1, -(-flat.numel() // 1024))].to(torch.bfloat16).cpu()
        made.update(f"{name} {list(weight.shape)}\n".encode())
        made.update(values.view(torch.int16).numpy().tobytes())
    return made.hexdigest()


def draft_warning(training: Mapping[str, Any] | None, folder: str | Path) -> str | None:
    """A sentence if a draft's weights are not those its training.json was written with; else None."""
    made = (training or {}).get("draft_sha256")
    if not isinstance(made, str) or made == digest(read(folder)[1]):
        return None
    return (
        f"{folder} has other weights than its {TRAINING} was written for, so what it says of target and template may "
        "be wrong; get the folder again, or remove that file."
    )


def target_warning(training: Mapping[str, Any] | None, target: Target) -> str | None:
    """A sentence if a draft was trained for other weights than the target's (its training.json says
    so), which costs accepted tokens; else None."""
    made = (training or {}).get("target_sha256")
    if made is None or made == (target_digest(target) or made):
        return None
    name = (training or {}).get("target", "another target")
    return (
        f"the draft was made for {name} with other weights than {target.name} has; the text stays the target's, "
        "expect fewer accepted tokens."
    )


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
    if config.from_anchor:
        inner["sample_from_anchor"] = True
    if config.is_ablation:
        inner |= {"context": config.context, "autoregressive": config.autoregressive}
    raw: dict[str, Any] = {
        "architectures": [ABLATION if config.is_ablation else ARCHITECTURE],
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
    """Save a draft that `read` and the public tools load. `training` becomes training.json, with the
    weights' digest added, and `vocab_ids` the draft vocabulary beside the weights.

    An older draft in the folder is replaced, other files stay, whole or not at all (draft_folder.py).
    """
    tensors = on_cpu(weights)
    check_tensors(tensor_shapes(config), kinds_of(tensors), "the network")
    raw = config_json(config, next(iter(tensors.values())).dtype)
    parse_config(raw, "the draft to be saved")  # what is written can be read
    made = None if training is None else {**training, "draft_sha256": digest(tensors)}
    write_files(folder, raw, tensors, made, vocab_ids)
