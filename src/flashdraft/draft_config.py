"""What a draft's config.json means: `DraftConfig`, read strictly.

The layout is the public one of DFlash drafts (z-lab): a Qwen3 configuration plus `dflash_config`.
What a key means, and its default, is what z-lab's own code makes of it; where engines read a file
differently, the file is refused rather than guessed at. ../docs/drafts.md has the tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .config_keys import MOST, Keys, is_number, read_rope, short
from .foreign_config import ARCHITECTURE as ARCHITECTURE
from .foreign_config import SLIDING as SLIDING
from .foreign_config import translate
from .types import FlashdraftError

# DFlash without one of its parts (drafters/dflash_ablations.py): another name, so that no engine runs it as DFlash
ABLATION = "DFlashAblationModel"
CONTEXTS = ("injected", "fused", "none")
FULL = "full_attention"

# Upper bounds that no draft comes near: a broken file must not make us allocate what it claims.
_MOST_LAYERS = 1024
MOST_BLOCK = 1024

# Keys that published files hold in `dflash_config`, some of them at the top level: looked at there first.
_INNER = {
    "mask_token_id", "target_layer_ids", "block_size", "num_target_layers", "input_embedding_scale",
    "output_multiplier", "final_logit_softcapping", "context", "autoregressive", "sample_from_anchor",
}  # fmt: skip

# Other methods and formats, by a part of their architecture's name. One sentence is all they get.
_OTHER_METHODS = {
    "dflash2": "a DFlash 2 draft (convolutions and a candidate selector), which is not supported yet",
    "dspark": "a DSpark draft of another family (Qwen3DSparkModel without its extra heads is read)",
    "laguna": "a Laguna draft (gated attention, a norm for every tapped layer): another network",
    "domino": "a Domino draft (a recurrent head on top of DFlash): another method",
    "lilicorr": "a LiLiCorr draft (a head that corrects the block): another method",
    "museglimmer": "transformers' Muse Glimmer draft; expected the same network in the z-lab layout",
    "eagle": "an EAGLE draft: another method (EAGLE-3 drafts are read with --drafter eagle3)",
    "medusa": "a set of Medusa heads: another method (--drafter medusa)",
    "forcausallm": "a language model (is this the target's folder?), which as a draft needs --drafter draft_model",
}

# Keys that change the network and are not implemented: set to anything but these values, they are
# refused, because ignoring them would give a draft that is quietly worse.
_UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "conv_kernel_size": ((0,), "DFlash 2 convolutions"),
    "selector_rank": ((0,), "the DFlash 2 candidate selector"),
    "projector_type": (("dflash",), "a head of another method"),
    "attention_mode": (("gqa", "mha"), "another kind of attention"),
    "attention_sink_bias": ((False,), "attention sinks"),
    "attention_value_scale": ((1,), "scaled attention values"),
    "partial_rotary_factor": ((1,), "rotary embeddings on a part of the head"),
    "is_neox_style": ((True,), "interleaved rotary embeddings"),
    "rope_is_neox_style": ((True,), "interleaved rotary embeddings"),
    "use_gemma_norm": ((False,), "Gemma's norm"),
    "markov_rank": ((0,), "a Markov head"),
    "has_own_lm_head": ((False,), "a head of the draft's own"),
    "logit_scale": ((1,), "scaled logits (output_multiplier is the key for them)"),
    "hidden_act": (("silu",), "another activation"),
    "quantization_config": ((), "quantised weights"),
}


@dataclass(frozen=True)
class DraftConfig:
    """Everything the DFlash network is built from.

    `windows[i]` is layer i's sliding window or None; `causal[i]` says whether a slot of that layer
    sees no later ones. `block_size` counts the anchor. `target_layer_ids`: outputs of the target's
    decoder layers, counted from 0, joined in this order. `num_target_layers` 0 is not known.
    `context`: how features of the context reach the network ("injected" is DFlash); `autoregressive`:
    a block is filled left to right, a pass for each token. `from_anchor`: slot i predicts the token behind
    its own position, so the anchor's slot predicts too and the network sees block_size - 1 slots.
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
    context: str = "injected"
    autoregressive: bool = False
    from_anchor: bool = False

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @property
    def is_ablation(self) -> bool:
        return self.context != "injected" or self.autoregressive


def parse_config(raw: Mapping[str, Any], where: str = "config.json") -> DraftConfig:
    """A DraftConfig from config.json's content.

    DFlash's own keys are looked for in `dflash_config`, then at the top; rope in `rope_parameters`
    (new) or `rope_theta` and `rope_scaling` (old). Raises one FlashdraftError that lists all
    problems; drafts of other methods get one sentence. Layouts that foreign_config.py knows are read too.
    """
    foreign = translate(raw, where)
    if foreign is not None:
        raw, where = foreign.raw, f"{where} (layout of {foreign.layout})"
    _refuse_other_methods(raw, where)
    keys = Keys(raw, "dflash_config", _INNER)
    context = _context(keys)
    num_heads = keys.integer("num_attention_heads")
    windows, causal = _layer_kinds(keys, keys.integer("num_hidden_layers", most=_MOST_LAYERS))
    config = DraftConfig(
        hidden_size=keys.integer("hidden_size"),
        intermediate_size=keys.integer("intermediate_size"),
        num_heads=num_heads,
        # absent and null differ in a Qwen3 configuration
        num_kv_heads=keys.integer("num_key_value_heads", default=num_heads if "num_key_value_heads" in raw else 32),
        head_dim=keys.integer("head_dim", default=128),
        vocab_size=keys.integer("vocab_size"),
        target_layer_ids=() if context == "none" else _layer_ids(keys),
        num_target_layers=0 if keys.get("num_target_layers") is None else keys.integer("num_target_layers"),
        block_size=keys.integer("block_size", most=MOST_BLOCK, default=16),
        mask_token_id=keys.integer("mask_token_id", least=0),
        windows=windows,
        causal=causal,
        max_context=keys.integer("max_position_embeddings", default=32768),
        rms_norm_eps=keys.number("rms_norm_eps", 1e-6),
        attention_bias=bool(keys.flag("attention_bias")),
        rope=read_rope(keys),
        embedding_scale=keys.number("input_embedding_scale", 1.0),
        output_multiplier=keys.number("output_multiplier", 1.0),
        softcap=_softcap(keys),
        context=context,
        autoregressive=keys.get("autoregressive") is True,
        from_anchor=_from_anchor(keys),
    )
    problems = keys.problems + _contradictions(config, keys)
    if problems:
        raise FlashdraftError(f"{where} is no DFlash draft that can be used: {'; '.join(problems)}.")
    return config


def _refuse_other_methods(raw: Mapping[str, Any], where: str) -> None:
    names = raw.get("architectures")
    if names is None or names in ([ARCHITECTURE], [ABLATION]):  # left out by some; then the other keys must do
        return
    text = str(names).lower().replace("_", "")
    found = next((meaning for part, meaning in _OTHER_METHODS.items() if part in text), None)
    if found is not None:
        raise FlashdraftError(f"{where} (architectures {short(names)}) is {found}.")
    raise FlashdraftError(f"{where} is no DFlash draft: architectures is {short(names)}, expected [{ARCHITECTURE!r}].")


def _contradictions(config: DraftConfig, keys: Keys) -> list[str]:
    """What single keys do not show: unsupported features, and keys that do not fit each other."""
    problems = []
    for name, (accepted, meaning) in _UNSUPPORTED.items():
        for value in (keys.inner.get(name), keys.top.get(name)):
            if value is not None and value not in accepted:
                problems.append(f"{name} {short(value)} asks for {meaning}, which is not supported")
                break
    for name, own in (("draft_vocab_size", config.vocab_size), ("target_hidden_size", config.hidden_size)):
        if keys.top.get(name) not in (None, own):
            problems.append(f"{name} is {short(keys.top[name])}, expected the draft's own {own} (or no such key)")
    if config.is_ablation and config.from_anchor:
        problems.append("sample_from_anchor does not go with context or autoregressive")
    if config.num_heads % config.num_kv_heads:
        problems.append(f"{config.num_heads} query heads do not divide among {config.num_kv_heads} key/value heads")
    if config.head_dim % 2:
        problems.append(f"head_dim is {config.head_dim}, expected an even number (rotary embeddings)")
    if config.mask_token_id >= config.vocab_size:
        problems.append(f"mask_token_id is {config.mask_token_id}, expected one below vocab_size {config.vocab_size}")
    return problems


def _layer_ids(keys: Keys) -> tuple[int, ...]:
    """Always read: the rule of the paper's code gives other layers for most published drafts."""
    value = keys.get("target_layer_ids")
    if isinstance(value, list) and value and all(type(i) is int and 0 <= i <= MOST for i in value):
        return tuple(value)
    keys.problem("target_layer_ids", value, "a list of layer numbers counted from 0")
    return (0,)


def _context(keys: Keys) -> str:
    value = "injected" if keys.get("context") is None else keys.get("context")
    if value not in CONTEXTS or keys.get("autoregressive") not in (None, True, False):
        keys.problem(
            "context and autoregressive",
            (value, keys.get("autoregressive")),
            f"one of {', '.join(CONTEXTS)}, and true or false",
        )
        return "injected"
    if keys.top.get("architectures") != [ABLATION] and (value != "injected" or keys.get("autoregressive")):
        keys.problems.append(f"context {short(value)} and autoregressive are for architectures [{ABLATION!r}] only")
    return str(value)


def _from_anchor(keys: Keys) -> bool:
    value = keys.get("sample_from_anchor")
    if value is not None and not isinstance(value, bool):
        keys.problem("sample_from_anchor", value, "true or false")
    return value is True


def _softcap(keys: Keys) -> float | None:
    value = keys.get("final_logit_softcapping")
    if value is None or (is_number(value) and value <= 0):  # 0 is off
        return None
    return keys.number("final_logit_softcapping", 1.0)


def _layer_kinds(keys: Keys, num_layers: int) -> tuple[tuple[int | None, ...], tuple[bool, ...]]:
    """Window and causality per layer: sliding layers are causal and full ones are not, unless
    `is_causal` says so for all (the rule of z-lab's code)."""
    on = keys.flag("use_sliding_window") or False
    window = keys.integer("sliding_window", default=4096) if on else None
    kinds = keys.top.get("layer_types")
    if kinds is None:
        first = keys.integer("max_window_layers", least=0, default=28)
        kinds = [SLIDING if on and i >= first else FULL for i in range(num_layers)]
    elif not isinstance(kinds, list) or len(kinds) != num_layers or any(k not in (FULL, SLIDING) for k in kinds):
        keys.problem("layer_types", kinds, f"{num_layers} of {FULL!r} or {SLIDING!r}")
        kinds = [FULL] * num_layers
    sliding = [kind == SLIDING for kind in kinds]
    if any(sliding) and not on:
        keys.problems.append("layer_types has sliding layers but use_sliding_window is not true, so they have no size")
    windows = tuple(window if s else None for s in sliding)
    is_causal = keys.flag("is_causal")
    causal = tuple(s if is_causal is None else is_causal for s in sliding)
    _check_engines_agree(keys, windows, causal)
    return windows, causal


def _check_engines_agree(keys: Keys, windows: tuple[int | None, ...], causal: tuple[bool, ...]) -> None:
    """`dflash_config.causal` and `use_swa` are followed by some engines and ignored by z-lab's code."""
    said = keys.inner.get("causal")
    if said is not None and keys.top.get("is_causal") is None and any(c != said for c in causal):
        keys.problems.append(
            f"dflash_config.causal is {short(said)}, which engines disagree about; write is_causal at the top level"
        )
    if keys.inner.get("use_swa") and any(w is None or w != keys.inner.get("swa_window_size") for w in windows):
        keys.problems.append(
            "use_swa asks for windows, which engines disagree about; "
            "write layer_types, sliding_window, use_sliding_window and is_causal"
        )
