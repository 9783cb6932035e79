"""EAGLE-3 drafts on the disk: the public layout for Llama and Qwen3 targets, read strictly.

config.json is a Llama configuration plus `draft_vocab_size`; a layer is called `midlayer` (or
`layers.0`); `d2t` adds to an id of the draft's vocabulary what makes it the target's, `t2d` marks the
target's ids that are in it. ../docs/drafts.md says what is refused and why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .. import draft_folder
from ..config_keys import MOST, Keys, read_rope, short
from ..types import FlashdraftError

if TYPE_CHECKING:
    from ..target import Target

ARCHITECTURE = "LlamaForCausalLMEagle3"
# the original code's own name is a plain Llama's; `draft_vocab_size` tells it from one
_ARCHITECTURES = (ARCHITECTURE, "Eagle3LlamaForCausalLM", "LlamaForCausalLM")
_RENAMED = {"layers.0.": "midlayer."}

# Keys that change the network and are not implemented: anything but these values is refused.
_UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "num_hidden_layers": ((1,), "more than one layer"),
    "fc_norm": ((False,), "EAGLE 3.1's norms of the features"),
    "norm_before_fc": ((False,), "a norm of the joined features"),
    "norm_output": ((False,), "EAGLE 3.1's normed feedback"),
    "use_aux_hidden_state": ((True,), "features of the last layer only"),
    "parallel_drafting": ((False,), "drafting in parallel (P-EAGLE)"),
    "use_sliding_window": ((False,), "a sliding window"),
    "partial_rotary_factor": ((1,), "rotary embeddings on a part of the head"),
    "mlp_bias": ((False,), "biases in the MLP"),
    "hidden_act": (("silu",), "another activation"),
    "logit_scale": ((1,), "scaled logits"),
    "quantization_config": ((), "quantised weights"),
}


@dataclass(frozen=True)
class Eagle3Config:
    """Everything the network is built from.

    `target_layer_ids`: outputs of the target's decoder layers, counted from 0; None: not written in the
    file, the method's own rule (`default_layer_ids`). `said_layer_ids`: what the file says in a numbering
    that engines disagree about.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    max_context: int
    target_layer_ids: tuple[int, ...] | None = None
    said_layer_ids: tuple[int, ...] | None = None
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    norm_before_residual: bool = False
    own_head: bool = True
    own_embedding: bool = False
    rope: Mapping[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})

    @property
    def num_taps(self) -> int:
        return len(self.target_layer_ids or self.said_layer_ids or (0, 1, 2))


def parse_config(raw: Mapping[str, Any], where: str = "config.json") -> Eagle3Config:
    """An Eagle3Config from config.json's content. One FlashdraftError lists all problems."""
    if "speculators_model_type" in raw:
        raise FlashdraftError(
            f"{where} is in the format of the package speculators, which is not read; export it first."
        )
    names = raw.get("architectures")
    known = isinstance(names, list) and len(names) == 1 and names[0] in _ARCHITECTURES
    if not known or (names == ["LlamaForCausalLM"] and "draft_vocab_size" not in raw):
        raise FlashdraftError(
            f"{where} is no EAGLE-3 draft for a Llama or Qwen3 target: architectures is {short(names)}, "
            f"expected [{ARCHITECTURE!r}]."
        )
    keys = Keys(raw)
    num_heads, hidden = keys.integer("num_attention_heads"), keys.integer("hidden_size")
    vocab = keys.integer("vocab_size")
    config = Eagle3Config(
        hidden_size=hidden,
        intermediate_size=keys.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=keys.integer("num_key_value_heads", default=num_heads),
        head_dim=keys.integer("head_dim", default=max(hidden // num_heads, 1)),
        vocab_size=vocab,
        draft_vocab_size=keys.integer("draft_vocab_size", default=vocab),
        max_context=keys.integer("max_position_embeddings", default=2048),
        target_layer_ids=_ids(keys, raw, "target_layer_ids"),
        said_layer_ids=_said(keys),
        rms_norm_eps=keys.number("rms_norm_eps", 1e-6),
        attention_bias=bool(keys.flag("attention_bias")),
        norm_before_residual=bool(keys.flag("norm_before_residual")),
        rope=read_rope(keys),
    )
    problems = keys.problems + _contradictions(config, raw)
    if problems:
        raise FlashdraftError(f"{where} is no EAGLE-3 draft that can be used: {'; '.join(problems)}.")
    return config


def _ids(keys: Keys, raw: Mapping[str, Any], name: str) -> tuple[int, ...] | None:
    value = raw.get(name)
    if value is None:
        return None
    if isinstance(value, list) and value and all(type(i) is int and 0 <= i <= MOST for i in value):
        return tuple(value)
    keys.problem(name, value, "a list of layer numbers")
    return None


def _said(keys: Keys) -> tuple[int, ...] | None:
    name, inner = "eagle_aux_hidden_state_layer_ids", keys.top.get("eagle_config")
    found = [ids for part in (keys.top, inner) if isinstance(part, dict) and (ids := _ids(keys, part, name))]
    return found[0] if found else None


def _contradictions(config: Eagle3Config, raw: Mapping[str, Any]) -> list[str]:
    inner = raw.get("eagle_config")
    problems = [
        f"{name} {short(part[name])} asks for {meaning}, which is not supported"
        for name, (accepted, meaning) in _UNSUPPORTED.items()
        for part in (raw, inner if isinstance(inner, dict) else {})
        if part.get(name) is not None and part[name] not in accepted
    ]
    if raw.get("target_hidden_size") not in (None, config.hidden_size):
        problems.append(f"target_hidden_size is {short(raw['target_hidden_size'])}, expected {config.hidden_size}")
    if config.num_heads % config.num_kv_heads:
        problems.append(f"{config.num_heads} query heads do not divide among {config.num_kv_heads} key/value heads")
    if config.head_dim % 2:
        problems.append(f"head_dim is {config.head_dim}, expected an even number (rotary embeddings)")
    if config.draft_vocab_size > config.vocab_size:
        problems.append(f"draft_vocab_size {config.draft_vocab_size} is above vocab_size {config.vocab_size}")
    return problems


def default_layer_ids(num_layers: int) -> tuple[int, ...]:
    """Low, middle, high: the original code reads the INPUTS of layers 2, L/2 and L - 3."""
    return (1, num_layers // 2 - 1, num_layers - 4)


def layer_ids(config: Eagle3Config, num_layers: int) -> tuple[int, ...]:
    """Outputs of target layers, counted from 0. `eagle_aux_hidden_state_layer_ids` is read as inputs by
    some engines and as outputs by others: only where both are the default it says which it is."""
    if config.target_layer_ids is not None:
        return config.target_layer_ids
    default = default_layer_ids(num_layers)
    said = config.said_layer_ids
    if said is None or said in (default, tuple(i + 1 for i in default)):
        return default
    raise FlashdraftError(
        f"eagle_aux_hidden_state_layer_ids {list(said)} is read differently by different engines; add target_layer_ids "
        "to config.json: the decoder layers, counted from 0, whose outputs the draft was trained on."
    )


def tensor_shapes(config: Eagle3Config) -> dict[str, tuple[int, ...]]:
    """Name and shape of the weights that every draft has."""
    hidden, ff, dim = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv, layer = config.num_heads * dim, config.num_kv_heads * dim, "midlayer."
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, config.num_taps * hidden),
        "norm.weight": (hidden,),
        **{
            f"{layer}{name}.weight": (hidden,)
            for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        },
        **{f"{layer}mlp.{name}_proj.weight": (ff, hidden) for name in ("gate", "up")},
        f"{layer}mlp.down_proj.weight": (hidden, ff),
    }
    for name, (out, into) in {
        "q": (q, 2 * hidden),
        "k": (kv, 2 * hidden),
        "v": (kv, 2 * hidden),
        "o": (hidden, q),
    }.items():
        shapes[f"{layer}self_attn.{name}_proj.weight"] = (out, into)
        if config.attention_bias:
            shapes[f"{layer}self_attn.{name}_proj.bias"] = (out,)
    return shapes


def extra_shapes(config: Eagle3Config) -> dict[str, tuple[int, ...]]:
    """Tensors that a draft may have: head, embedding, and the maps between the vocabularies."""
    return {
        "lm_head.weight": (config.draft_vocab_size, config.hidden_size),
        "embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "d2t": (config.draft_vocab_size,),
        "t2d": (config.vocab_size,),
    }


def read(folder: str | Path) -> tuple[Eagle3Config, dict[str, torch.Tensor], torch.Tensor | None]:
    """Configuration, weights, and the target's id of every id of the draft's vocabulary (None: the same)."""
    path, raw = draft_folder.read_config(folder)
    config = parse_config(raw, str(path))
    kinds = {"d2t": "I64", "t2d": "BOOL"}
    tensors = draft_folder.read_tensors(path, tensor_shapes(config), extra_shapes(config), kinds, _RENAMED)
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    config = replace(config, own_head="lm_head.weight" in tensors, own_embedding="embed_tokens.weight" in tensors)
    if config.draft_vocab_size < config.vocab_size and not (config.own_head and d2t is not None):
        raise FlashdraftError(
            f"{path} drafts from {config.draft_vocab_size} of {config.vocab_size} tokens, but its weights lack lm_head.weight "
            "or d2t, without which nobody knows which; export it again."
        )
    return config, tensors, _vocab_ids(config, d2t, t2d, path)


def _vocab_ids(
    config: Eagle3Config, d2t: torch.Tensor | None, t2d: torch.Tensor | None, path: Path
) -> torch.Tensor | None:
    if d2t is None:
        return None
    ids = torch.arange(config.draft_vocab_size) + d2t
    if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size or len(set(ids.tolist())) < len(ids):
        raise FlashdraftError(f"{path}: d2t names ids twice or outside the vocabulary of {config.vocab_size}.")
    if t2d is not None and not torch.equal(t2d.nonzero()[:, 0], ids.sort().values):
        raise FlashdraftError(f"{path}: d2t and t2d name different tokens; export the draft again.")
    return ids


def write(
    folder: str | Path,
    config: Eagle3Config,
    weights: Mapping[str, torch.Tensor],
    vocab_ids: torch.Tensor | None = None,
    training: Mapping[str, Any] | None = None,
) -> None:
    """Save a draft in the public layout; `target_layer_ids` has to be known, so that nobody guesses."""
    assert config.target_layer_ids is not None
    tensors = draft_folder.on_cpu(weights)
    if vocab_ids is not None:
        ids = vocab_ids.to("cpu", torch.int64)
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool)
        tensors["t2d"][ids] = True
    kinds = {"d2t": "I64", "t2d": "BOOL"}
    shapes = tensor_shapes(config)
    draft_folder.check_tensors(shapes, draft_folder.kinds_of(tensors), "the network", extra_shapes(config), kinds)
    raw = config_json(config, tensors["fc.weight"].dtype)
    parse_config(raw, "the draft to be saved")
    draft_folder.write_files(folder, raw, tensors, training)


def config_json(config: Eagle3Config, dtype: torch.dtype) -> dict[str, Any]:
    """config.json's content, with the layers in all three spellings: ours, vLLM's and SGLang's."""
    ids = list(config.target_layer_ids or ())
    raw: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "dtype": str(dtype).removeprefix("torch."),
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": config.attention_bias,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "tie_word_embeddings": False,
        "max_position_embeddings": config.max_context,
        "rope_theta": config.rope["rope_theta"],
        "rope_parameters": dict(config.rope),
        "norm_before_residual": config.norm_before_residual,
        "target_layer_ids": ids,
        "eagle_aux_hidden_state_layer_ids": [i + 1 for i in ids],
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": ids},
    }
    if config.rope.get("rope_type", "default") != "default":
        raw["rope_scaling"] = {k: v for k, v in config.rope.items() if k != "rope_theta"}
    return raw


def check_against(config: Eagle3Config, target: Target, where: str = "the draft") -> tuple[int, ...]:
    """The target layers to tap. Raises one FlashdraftError that lists in what draft and target do not fit."""
    problems = []
    if config.hidden_size != target.hidden_size:
        problems.append(f"hidden size {config.hidden_size}, the target has {target.hidden_size}")
    if config.vocab_size != target.vocab_size:
        problems.append(f"vocabulary {config.vocab_size}, the target has {target.vocab_size}")
    ids = layer_ids(config, target.num_layers)
    if not all(0 <= i < target.num_layers for i in ids) or list(ids) != sorted(set(ids)):
        problems.append(f"taps the layers {list(ids)}, the target's are 0 to {target.num_layers - 1}, rising")
    if problems:
        raise FlashdraftError(f"{where} does not fit the target {target.name}: {'; '.join(problems)}.")
    return ids
