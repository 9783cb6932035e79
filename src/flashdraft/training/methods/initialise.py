"""A new DFlash network for a target: its shape, its draft vocabulary, and where its weights start.

From the target: the draft's layers are copies of the target's last ones, `fc` is the identity on
the deepest tapped layer, so that at the start every draft layer reads the target's own states.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from ... import checkpoint
from ...checkpoint import DraftConfig
from ...drafters.dflash import DFlashNetwork
from ...target import Target
from ...types import FlashdraftError
from ..config import TrainConfig
from ..data import TokenSequence
from .base import master_dtype, start_like, take_over

# of the target's decoder layers, Llama's names, which Qwen, Mistral, SmolLM and others share
_COPIED = [
    *(f"self_attn.{name}_proj.{part}" for name in "qkvo" for part in ("weight", "bias")),
    *(f"self_attn.{name}_norm.weight" for name in "qk"),
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
]


def default_layer_ids(num_layers: int, count: int = 5) -> tuple[int, ...]:
    """Evenly spread from layer 1 to the fourth from the end, as the paper's drafts tap."""
    first, last = min(1, num_layers - 2), max(num_layers - 4, 0)
    count = max(1, min(count, last - first + 1))
    if count == 1:
        return (max(num_layers - 2, 0),)
    return tuple(sorted({first + round(i * (last - first) / (count - 1)) for i in range(count)}))


def mask_token(target: Target, sequences: Sequence[TokenSequence]) -> int:
    """An id that stands for MASK: one above the tokenizer's, else a special token that no sequence
    has, else any token that none has."""
    if target.num_tokens < target.vocab_size:
        return target.vocab_size - 1
    used = {token for sequence in sequences for token in sequence.token_ids}
    special = set(getattr(target.tokenizer, "all_special_ids", []) or [])
    special |= set(getattr(target.tokenizer, "added_tokens_decoder", {}) or {})
    taken = used | target.eos_ids | {target.pad_id, getattr(target.tokenizer, "bos_token_id", None)}
    free = sorted(special - taken) or sorted(set(range(target.num_tokens)) - taken)
    if not free:
        raise FlashdraftError(
            f"the data uses all tokens of {target.name}, which leaves none to stand for MASK; set mask_token_id to an "
            "id that is neither end nor padding and rare."
        )
    return int(free[-1])


def draft_vocab(sequences: Sequence[TokenSequence], size: int, target: Target) -> torch.Tensor:
    """The `size` most frequent answer ids, ends of text included; int64, rising."""
    counts: Counter[int] = Counter()
    for sequence in sequences:
        for start, end in sequence.loss_spans:
            counts.update(sequence.token_ids[start:end])
    always = sorted(token for token in target.eos_ids if token < target.num_tokens)
    rest = sorted((t for t in range(target.num_tokens) if t not in target.eos_ids), key=lambda t: (-counts[t], t))
    return torch.tensor(sorted([*always, *rest][: min(size, target.num_tokens)]))


def draft_config(config: TrainConfig, target: Target, sequences: Sequence[TokenSequence]) -> DraftConfig:
    """The network's shape: widths and rope are the target's. Raises FlashdraftError if it cannot be."""
    text = target.config
    heads = int(text.num_attention_heads)
    kv_heads = int(getattr(text, "num_key_value_heads", None) or heads)
    head_dim = int(getattr(text, "head_dim", None) or target.hidden_size // heads)
    made = DraftConfig(
        hidden_size=target.hidden_size,
        intermediate_size=config.intermediate_size or int(text.intermediate_size),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=target.vocab_size,
        target_layer_ids=_tapped(config, target),
        num_target_layers=target.num_layers,
        block_size=config.block_size,
        mask_token_id=config.mask_token_id if config.mask_token_id is not None else mask_token(target, sequences),
        windows=(config.window,) * config.num_layers,
        causal=(config.window is not None,) * config.num_layers,
        max_context=target.max_context,
        rms_norm_eps=float(getattr(text, "rms_norm_eps", 1e-6)),
        attention_bias=_has_bias(target) if config.init == "target" else False,
        rope=rope_of(text),
        embedding_scale=_embedding_scale(text),
        output_multiplier=output_shape(text)[0],
        softcap=output_shape(text)[1],
        context=config.context,
        autoregressive=config.autoregressive,
    )
    checkpoint.check_against(made, target, "the draft to train")
    return made


def _tapped(config: TrainConfig, target: Target) -> tuple[int, ...]:
    return () if config.context == "none" else config.target_layer_ids or default_layer_ids(target.num_layers)


def output_shape(text: Any) -> tuple[float, float | None]:
    """What the target does to its head's logits: a multiplier, and a soft cap or None."""
    scaling = float(getattr(text, "logits_scaling", None) or 1.0)
    return 1.0 / scaling, getattr(text, "final_logit_softcapping", None)


def rope_of(text: Any) -> dict[str, Any]:
    rope = dict(getattr(text, "rope_parameters", None) or {})
    if "full_attention" in rope:  # by layer type: the draft's layers are full ones
        rope = dict(rope["full_attention"])
    kept = {k: v for k, v in rope.items() if v is not None and k != "partial_rotary_factor"}
    kind = kept.setdefault("rope_type", "default")
    kept["rope_theta"] = float(kept.get("rope_theta") or getattr(text, "rope_theta", None) or 10000.0)
    # types the draft's own rotary embedding does not know: it is a new network, so plain is fine
    return (
        kept
        if kind in ("default", "linear", "llama3", "yarn")
        else {"rope_type": "default", "rope_theta": kept["rope_theta"]}
    )


def _embedding_scale(text: Any) -> float:
    if str(getattr(text, "model_type", "")).startswith("gemma"):
        return math.sqrt(text.hidden_size)
    return float(getattr(text, "embedding_multiplier", None) or 1.0)


def _has_bias(target: Target) -> bool:
    return any(name.endswith("q_proj.bias") for name, _ in target.layers[-1].named_parameters())


def new_network(
    config: TrainConfig, shape: DraftConfig, target: Target, sequences: Sequence[TokenSequence]
) -> tuple[DFlashNetwork, set[str]]:
    """A network in full precision, and the names of weights that are copies."""
    network = DFlashNetwork(shape).to(master_dtype(target))
    network.load_state_dict(start_like(network, config.seed), strict=True)
    if config.init_from is not None:  # its block size may be another one
        weights = dict(network.state_dict())
        copied = take_over(weights, checkpoint.read(config.init_from)[1], config.init_from)
        network.load_state_dict(weights, strict=True)
        return network, copied
    return network, _copy_target(network, target, sequences) if config.init == "target" else set()


@torch.no_grad()
def _copy_target(network: DFlashNetwork, target: Target, sequences: Sequence[TokenSequence]) -> set[str]:
    """Copy what has the same name and shape; returns the names in the draft network."""
    own = dict(network.named_parameters())
    copied: set[str] = set()
    first = target.num_layers - len(network.layers)
    if first < 0:
        raise FlashdraftError(f"init target: {len(network.layers)} draft layers, the target has {target.num_layers}.")
    for i in range(len(network.layers)):
        theirs = dict(target.layers[first + i].named_parameters())
        for name in _COPIED:
            mine = f"layers.{i}.{name}"
            if mine in own and name in theirs and own[mine].shape == theirs[name].shape:
                own[mine].copy_(theirs[name])
                copied.add(mine)
    _copy_edges(network, target)
    missing = [i for i in range(len(network.layers)) if f"layers.{i}.self_attn.q_norm.weight" not in copied]
    if missing:
        _set_scales(network, target, sequences, first, missing)
    return copied


def _copy_edges(network: DFlashNetwork, target: Target) -> None:
    """fc, the norm behind it and the final norm."""
    width = network.config.hidden_size
    if network.config.context != "none":
        network.fc.weight.zero_()
        network.fc.weight[:, -width:] = torch.eye(width)  # the deepest tap comes last
        network.hidden_norm.weight.copy_(network.get_parameter("layers.0.input_layernorm.weight"))
    final = getattr(target.model.base_model, "norm", None)
    if final is not None and final.weight.shape == network.norm.weight.shape:
        network.norm.weight.copy_(final.weight)


def _set_scales(
    network: DFlashNetwork, target: Target, sequences: Sequence[TokenSequence], first: int, layers: Sequence[int]
) -> None:
    """A target without query and key norms has scales of its own: measured, they become the norms' weights."""
    squares: dict[tuple[int, str], list[float]] = {(i, name): [] for i in layers for name in "qk"}

    def measure(key: tuple[int, str]) -> Any:
        return lambda _m, _a, out: squares[key].append(float(out.float().square().mean()))

    handles = []
    for i, name in squares:
        projection = getattr(getattr(target.layers[first + i], "self_attn", None), f"{name}_proj", None)
        if projection is not None:
            handles.append(projection.register_forward_hook(measure((i, name))))
    longest = max(len(s.token_ids) for s in sequences[:4])
    cache = target.new_cache(1, longest)
    for sequence in sequences[:4]:
        tokens = torch.tensor([sequence.token_ids], device=target.device)
        target.forward(tokens, cache, [0], keep=slice(0, 0))
    for handle in handles:
        handle.remove()
    own = dict(network.named_parameters())
    for (i, name), values in squares.items():
        if values:
            own[f"layers.{i}.self_attn.{name}_norm.weight"].fill_((sum(values) / len(values)) ** 0.5)
