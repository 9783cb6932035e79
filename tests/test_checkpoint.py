"""Draft folders: strict reading (one error lists everything), portable and atomic writing, fit with a target."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from bed import draft_config, random_network, tiny_target
from flashdraft import checkpoint, draft_folder
from flashdraft.checkpoint import DraftConfig, parse_config, tensor_shapes
from flashdraft.drafters.dflash import DFlashDrafter, DFlashNetwork
from flashdraft.types import FlashdraftError

# What z-lab/Qwen3-4B-DFlash-b16 says of itself: old keys, block_size at the top.
QWEN3_4B: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 16,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "dtype": "bfloat16",
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "layer_types": ["full_attention"] * 5,
    "max_position_embeddings": 40960,
    "max_window_layers": 5,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 36,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def changed(base: dict[str, Any] = QWEN3_4B, inner: dict[str, Any] | None = None, **keys: Any) -> dict[str, Any]:
    """A copy with keys changed at the top and in dflash_config; `...` takes one away."""
    raw = copy.deepcopy(base)
    for where, changes in ((raw, keys), (raw["dflash_config"], inner or {})):
        for key, value in changes.items():
            if value is ...:
                where.pop(key, None)
            else:
                where[key] = value
    return raw


def problems_of(raw: dict[str, Any]) -> str:
    with pytest.raises(FlashdraftError) as caught:
        parse_config(raw, "here")
    message = str(caught.value)
    assert "\n" not in message and message.startswith("here ") and message.endswith(".")
    return message


# --- what config.json says


def test_reads_a_published_config() -> None:
    config = parse_config(QWEN3_4B)
    assert config == DraftConfig(
        hidden_size=2560, intermediate_size=9728, num_heads=32, num_kv_heads=8, head_dim=128, vocab_size=151936,
        target_layer_ids=(1, 9, 17, 25, 33), num_target_layers=36, block_size=16, mask_token_id=151669,
        windows=(None,) * 5, causal=(False,) * 5, max_context=40960, rms_norm_eps=1e-6, attention_bias=False,
        rope={"rope_type": "default", "rope_theta": 1000000}, embedding_scale=1.0, output_multiplier=1.0, softcap=None,
    )  # fmt: skip


def test_sizes_equal_the_published_files() -> None:
    """The list of weights is complete: it makes the size of z-lab's files (bf16, and a header)."""
    shapes = tensor_shapes(parse_config(QWEN3_4B))
    numbers = sum(torch.Size(shape).numel() for shape in shapes.values())
    assert len(shapes) == 58
    assert 0 < 1_074_860_568 - 2 * numbers < 10_000


def test_dflash_config_comes_first() -> None:
    twice = {"block_size": 8, "mask_token_id": 5, "target_layer_ids": [2], "num_target_layers": 9}
    outer = {"block_size": 4, "mask_token_id": 6, "target_layer_ids": [3], "num_target_layers": 7}
    config = parse_config(changed(inner=twice, **outer))
    assert (config.block_size, config.mask_token_id, config.target_layer_ids, config.num_target_layers) == (
        8,
        5,
        (2,),
        9,
    )
    config = parse_config(changed(inner=dict.fromkeys(twice, None), **outer))
    assert (config.block_size, config.mask_token_id, config.target_layer_ids, config.num_target_layers) == (
        4,
        6,
        (3,),
        7,
    )
    numbers = {"input_embedding_scale": 2.0, "output_multiplier": 0.5, "final_logit_softcapping": 20}
    for raw in (changed(inner=numbers), changed(**numbers)):
        config = parse_config(raw)
        assert (config.embedding_scale, config.output_multiplier, config.softcap) == (2.0, 0.5, 20.0)


def test_other_keys_are_not_taken_from_dflash_config() -> None:
    assert parse_config(changed(inner={"hidden_size": 3, "num_hidden_layers": 9})) == parse_config(QWEN3_4B)


def test_layer_ids_are_read_not_computed() -> None:
    """T10, z-lab 156: the published rule gives other layers for most published drafts."""
    assert parse_config(changed(inner={"target_layer_ids": [0, 3, 4]})).target_layer_ids == (0, 3, 4)
    assert "target_layer_ids is None" in problems_of(changed(inner={"target_layer_ids": ...}))


def test_defaults_are_those_of_the_reference() -> None:
    left_out = (
        "num_key_value_heads", "head_dim", "block_size", "max_position_embeddings", "rms_norm_eps", "rope_theta",
        "layer_types", "attention_bias", "use_sliding_window", "num_target_layers", "architectures",
    )  # fmt: skip
    config = parse_config(changed(**dict.fromkeys(left_out, ...)))
    assert (config.num_kv_heads, config.head_dim, config.block_size, config.max_context) == (32, 128, 16, 32768)
    assert (config.rms_norm_eps, config.rope["rope_theta"], config.attention_bias) == (1e-6, 10000.0, False)
    assert config.windows == (None,) * 5 and config.num_target_layers == 0
    assert parse_config(changed(num_key_value_heads=None)).num_kv_heads == 32


S, F = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("keys", "windows", "causal"),
    [
        ({"layer_types": [S] * 4 + [F]}, [9, 9, 9, 9, None], [True] * 4 + [False]),
        ({"layer_types": [S] * 5}, [9] * 5, [True] * 5),
        ({"layer_types": [S] * 5, "is_causal": False}, [9] * 5, [False] * 5),
        ({"layer_types": [S] * 5, "is_causal": None}, [9] * 5, [True] * 5),
        ({"layer_types": [F] * 5, "is_causal": True}, [None] * 5, [True] * 5),
        ({"layer_types": [F, S, F, S, F], "is_causal": True}, [None, 9, None, 9, None], [True] * 5),
        ({"layer_types": ...}, [None] * 5, [False] * 5),  # max_window_layers 5
        ({"layer_types": ..., "max_window_layers": 3}, [None] * 3 + [9, 9], [False] * 3 + [True] * 2),
        ({"layer_types": ..., "max_window_layers": ...}, [None] * 5, [False] * 5),
    ],
)
def test_windows_and_causality(keys: dict[str, Any], windows: list[int | None], causal: list[bool]) -> None:
    """T12. test_parity.py runs the same rules through the reference."""
    config = parse_config(changed(use_sliding_window=True, sliding_window=9, **keys))
    assert config.windows == tuple(windows)
    assert config.causal == tuple(causal)


def test_engines_that_disagree_are_not_guessed_at() -> None:
    """`causal` and `use_swa` inside dflash_config: vLLM and llama.cpp follow them, z-lab and SGLang do not."""
    sliding = {"use_sliding_window": True, "sliding_window": 9, "layer_types": [S] * 5}
    assert "engines disagree" in problems_of(changed(inner={"causal": True}))
    assert "engines disagree" in problems_of(changed(inner={"causal": False}, **sliding))
    assert "engines disagree" in problems_of(changed(inner={"use_swa": True, "swa_window_size": 9}))
    assert "engines disagree" in problems_of(changed(inner={"use_swa": True, "swa_window_size": 8}, **sliding))
    assert "no size" in problems_of(changed(sliding_window=9, use_sliding_window=..., layer_types=[S] * 5))
    # said twice and alike it is no question; and is_causal decides everywhere
    agreeing = changed(inner={"use_swa": True, "swa_window_size": 9, "causal": True}, **sliding)
    assert parse_config(agreeing) == parse_config(changed(**sliding))
    assert parse_config(changed(inner={"causal": True}, is_causal=False)).causal == (False,) * 5


YARN = {"factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("keys", "rope"),
    [
        ({}, {"rope_type": "default", "rope_theta": 1000000}),
        ({"rope_theta": ...}, {"rope_type": "default", "rope_theta": 10000.0}),
        ({"rope_scaling": {}}, {"rope_type": "default", "rope_theta": 1000000}),
        ({"rope_scaling": {"type": "yarn", **YARN}}, {"rope_type": "yarn", "rope_theta": 1000000, **YARN}),
        ({"rope_scaling": {"rope_type": "yarn", "type": "yarn", **YARN}},
         {"rope_type": "yarn", "rope_theta": 1000000, **YARN}),
        ({"rope_theta": ..., "rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, **YARN}},
         {"rope_type": "yarn", "rope_theta": 5e5, **YARN}),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, **YARN}, "rope_scaling": {"type": "yarn", **YARN}},
         {"rope_type": "yarn", "rope_theta": 1e6, **YARN}),
        # the axes of a multimodal rope are the same for text
        ({"rope_scaling": {"mrope_section": [24, 20, 20], "mrope_interleaved": True, "rope_type": "default"}},
         {"rope_type": "default", "rope_theta": 1000000}),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 64},
         {"rope_type": "yarn", "rope_theta": 1000000, **YARN}),
        ({"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 1.0}},
         {"rope_type": "default", "rope_theta": 1e6}),
    ],
)  # fmt: skip
def test_rope_keys(keys: dict[str, Any], rope: dict[str, Any]) -> None:
    """T9: old and new spelling mean the same."""
    assert parse_config(changed(**keys)).rope == rope


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"rope_scaling": {"type": "yarn"}}, "rope type 'yarn' needs factor"),
        ({"rope_scaling": {"type": "linear"}}, "rope type 'linear' needs factor"),
        ({"rope_scaling": {"type": "llama3", "factor": 8}}, "needs high_freq_factor"),
        ({"rope_scaling": {"type": "llama3", "factor": 8}}, "needs low_freq_factor"),
        ({"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}}, "not below"),
        ({"rope_scaling": {"type": "yarn", "factor": 4, "beta_fast": 1, "beta_slow": 2}}, "above beta_fast"),
        ({"rope_scaling": {"type": "longrope", "factor": 4}}, "rope_type is 'longrope', expected 'default' or"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4}}, "rope_type is 'dynamic'"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, "rope_type is ['yarn']"),
        ({"rope_scaling": {"type": "linear", "factor": "4"}}, "factor is '4', expected a number above 0"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor is 0"),
        ({"rope_scaling": {"type": "linear", "factor": True}}, "factor is True"),
        ({"rope_scaling": {"type": "linear", "factor": float("nan")}}, "factor is nan"),
        ({"rope_scaling": {"type": "yarn", "factor": 4, "truncate": 1}}, "truncate is 1, expected true or false"),
        ({"rope_scaling": {"type": "linear", "factor": 4, "beta_fast": 32}}, "rope type 'linear' has no beta_fast"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn', expected an object"),
        ({"rope_parameters": [1]}, "rope_parameters is [1], expected an object"),
        ({"rope_parameters": {F: {"rope_type": "default"}, S: {"rope_type": "default"}}}, "differs by layer type"),
        ({"rope_theta": 0}, "rope_theta is 0"),
        ({"rope_theta": 1}, "rope_theta is 1"),
        ({"rope_theta": "1e6"}, "rope_theta is '1e6'"),
        ({"rope_theta": float("inf")}, "rope_theta is inf"),
        ({"rope_parameters": {"rope_theta": 10000.0}}, "rope_theta is given as 10000.0 and as 1000000"),
        ({"rope_parameters": {"rope_theta": 1e6}, "rope_scaling": {"type": "yarn", **YARN}}, "say different things"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 asks for rotary embeddings on a part"),
        ({"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}}, "on a part of the head"),
    ],
)  # fmt: skip
def test_bad_rope_is_refused_at_reading(keys: dict[str, Any], said: str) -> None:
    assert said in problems_of(changed(**keys))


HUGE = 10**30


@pytest.mark.parametrize("name", ["hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
                                  "head_dim", "vocab_size", "max_position_embeddings", "num_hidden_layers",
                                  "block_size", "num_target_layers"])  # fmt: skip
@pytest.mark.parametrize("value", [0, -1, True, 2.5, 32.0, "32", [32], {}, float("nan"), HUGE], ids=repr)
def test_integers_are_integers(name: str, value: Any) -> None:
    """Wrong kinds, negative ones, a bool where a count belongs, and sizes that must not be allocated."""
    message = problems_of(changed(**{name: value}))
    assert f"{name} is {value!r}" in message


def test_huge_counts_allocate_nothing() -> None:
    """A list of 10^9 layers would take the machine down before any other check."""
    message = problems_of(changed(num_hidden_layers=10**9, layer_types=...))
    assert "num_hidden_layers is 1000000000, expected an integer of at least 1 and at most 1024" in message
    assert "block_size is 1000000, expected an integer of at least 1 and at most 1024" in problems_of(
        changed(block_size=10**6)
    )


@pytest.mark.parametrize("name", ["rms_norm_eps", "input_embedding_scale", "output_multiplier"])
@pytest.mark.parametrize(
    "value", [0, -1.0, True, "1", [1.0], float("nan"), float("inf"), 10**400], ids=lambda v: repr(v)[:9]
)
def test_numbers_are_numbers(name: str, value: Any) -> None:
    assert f"{name} is " in problems_of(changed(**{name: value}))


@pytest.mark.parametrize("value", [True, "20", float("nan"), float("inf"), [20.0]])
def test_softcap_is_a_number(value: Any) -> None:
    assert "final_logit_softcapping is " in problems_of(changed(inner={"final_logit_softcapping": value}))


@pytest.mark.parametrize("off", [None, 0, 0.0, -1.0])
def test_softcap_can_be_off(off: Any) -> None:
    assert parse_config(changed(inner={"final_logit_softcapping": off})).softcap is None


@pytest.mark.parametrize("name", ["attention_bias", "is_causal", "use_sliding_window"])
@pytest.mark.parametrize("value", [0, 1, "true", []], ids=repr)
def test_flags_are_flags(name: str, value: Any) -> None:
    assert f"{name} is {value!r}, expected true or false" in problems_of(changed(**{name: value}))


@pytest.mark.parametrize(
    "value", [None, [], "1,9", 3, [1, True], [1, -2], [1.0], ["1"], [[1]], {"0": 1}, [HUGE]], ids=repr
)
def test_layer_ids_are_a_list_of_layers(value: Any) -> None:
    assert "target_layer_ids is " in problems_of(changed(inner={"target_layer_ids": value}))


@pytest.mark.parametrize("value", [None, -1, True, "151669", 1.0, [3], 151936])
def test_mask_token_is_a_token(value: Any) -> None:
    assert "mask_token_id is " in problems_of(changed(inner={"mask_token_id": value}))


@pytest.mark.parametrize("value", [["full_attention"] * 4, ["chunked_attention"] * 5, "full_attention", 5, [{}] * 5])
def test_layer_types_are_known(value: Any) -> None:
    assert "layer_types is " in problems_of(changed(layer_types=value))


def test_layer_types_without_a_window() -> None:
    message = problems_of(changed(layer_types=[S] * 5, use_sliding_window=True, sliding_window=0))
    assert "sliding_window is 0" in message


@pytest.mark.parametrize("value", [[1], "x", 3])
def test_dflash_config_is_an_object(value: Any) -> None:
    assert "dflash_config is " in problems_of({**QWEN3_4B, "dflash_config": value})


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"num_attention_heads": 30}, "30 query heads do not divide among 8"),
        ({"head_dim": 127}, "head_dim is 127, expected an even number"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' asks for another activation"),
        ({"draft_vocab_size": 151937}, "draft_vocab_size is 151937, expected the draft's own 151936"),
        ({"target_hidden_size": 4096}, "target_hidden_size is 4096, expected the draft's own 2560"),
        ({"quantization_config": {"bits": 4}}, "quantised weights"),
        ({"is_neox_style": False}, "interleaved rotary embeddings"),
        ({"use_gemma_norm": True}, "Gemma's norm"),
        ({"has_own_lm_head": True}, "a head of the draft's own"),
        ({"logit_scale": 0.1}, "scaled logits"),
    ],
)
def test_what_does_not_fit_together_or_is_not_supported(keys: dict[str, Any], said: str) -> None:
    assert said in problems_of(changed(**keys))


@pytest.mark.parametrize(
    ("inner", "said"),
    [
        ({"conv_kernel_size": 2, "conv_group_size": 16}, "DFlash 2 convolutions"),
        ({"selector_rank": 256, "selector_top_k": 16}, "the DFlash 2 candidate selector"),
        ({"attention_sink_bias": True}, "attention sinks"),
        ({"attention_value_scale": 0.612}, "scaled attention values"),
        ({"projector_type": "domino"}, "a head of another method"),
        ({"attention_mode": "mla"}, "another kind of attention"),
        ({"markov_rank": 256}, "a Markov head"),
    ],
)
def test_unsupported_features_are_named(inner: dict[str, Any], said: str) -> None:
    """Ignoring one would give a draft that loads and is quietly worse."""
    for raw in (changed(inner=inner), changed(**inner)):
        assert f"asks for {said}, which is not supported" in problems_of(raw)


def test_keys_that_change_nothing_are_ignored() -> None:
    inner = {
        "num_anchors": 4096, "loss_decay_gamma": 7.0, "conv_kernel_size": None, "attention_sink_bias": False,
        "markov_rank": 0, "projector_type": "dflash", "attention_mode": "gqa", "sample_from_anchor": False,
    }  # fmt: skip
    outer = {"draft_vocab_size": 151936, "target_hidden_size": 2560, "n_predict": 15, "auto_map": {}, "is_causal": None}
    assert parse_config(changed(inner=inner, **outer)) == parse_config(QWEN3_4B)


@pytest.mark.parametrize(
    ("architecture", "said"),
    [
        ("DFlash2DraftModel", "a DFlash 2 draft"),
        ("Gemma4DSparkModel", "a DSpark draft of another family"),
        ("DSparkDraftModel", "a DSpark draft of another family"),
        ("DFlashLagunaForCausalLM", "a Laguna draft"),
        ("DominoDraftModel", "a Domino draft"),
        ("LiLiCorrDraftModel", "a LiLiCorr draft"),
        ("MuseGlimmerAssistantModel", "Muse Glimmer"),
        ("LlamaForCausalLMEagle3", "an EAGLE draft"),
        ("Eagle3DraftModel", "an EAGLE draft"),
        ("MedusaModel", "Medusa heads"),
        ("Qwen3ForCausalLM", "is this the target's folder?"),
    ],
)
def test_other_methods_get_one_sentence(architecture: str, said: str) -> None:
    message = problems_of({"architectures": [architecture], "hidden_size": "nonsense"})
    assert said in message and ";" not in message.replace("draft; expected the same", "")


@pytest.mark.parametrize(
    "value", [["BertModel"], "DFlashDraftModel", [], ["DFlashDraftModel", "X"], {"a": 1}, 3, [["DFlashDraftModel"]]]
)
def test_architectures_is_exactly_ours(value: Any) -> None:
    assert "expected ['DFlashDraftModel']" in problems_of(changed(architectures=value))


def test_one_error_lists_everything() -> None:
    raw = changed(
        inner={"mask_token_id": None, "target_layer_ids": "x", "causal": True}, hidden_size="big", vocab_size=-1,
        layer_types=[S], rope_theta=0, hidden_act="relu", attention_bias=1, rms_norm_eps=float("nan"),
    )  # fmt: skip
    message = problems_of(raw)
    for name in (
        "mask_token_id", "target_layer_ids", "causal", "hidden_size", "vocab_size", "layer_types", "rope_theta",
        "hidden_act", "attention_bias", "rms_norm_eps",
    ):  # fmt: skip
        assert name in message


# --- which published drafts load (docs/drafts.md has the table)


def survey(hidden: int, ff: int, taps: list[int], layers: int, **keys: Any) -> dict[str, Any]:
    inner = {"target_layer_ids": taps, **keys.pop("inner", {})}
    return {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": hidden, "intermediate_size": ff,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 5,
        "num_target_layers": layers, "dflash_config": inner, **keys,
    }  # fmt: skip


MIXED = {"layer_types": [S] * 4 + [F], "use_sliding_window": True, "sliding_window": 2048}
OLD, NEW = {"rope_theta": 10000000}, {"rope_parameters": {"rope_theta": 10000000, "rope_type": "default"}}
GPT_OSS_YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
DFLASH2 = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
SURVEY: dict[str, tuple[dict[str, Any], str | None]] = {
    "z-lab/Qwen3-4B-DFlash-b16": (QWEN3_4B, None),
    "z-lab/Qwen3-8B-DFlash-b16": (changed(hidden_size=4096, intermediate_size=12288, tie_word_embeddings=False), None),
    "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat": (
        survey(4096, 14336, [1, 8, 15, 22, 29], 32, inner={"mask_token_id": 128002}, vocab_size=128256, block_size=10,
               rope_theta=500000.0, rope_scaling={"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                                  "original_max_position_embeddings": 8192, "rope_type": "llama3"}),
        None,
    ),
    "z-lab/gpt-oss-20b-DFlash": (
        survey(2880, 7680, [1, 6, 11, 16, 21], 24, inner={"mask_token_id": 200000}, vocab_size=201088, block_size=8,
               num_hidden_layers=8, head_dim=64, rope_theta=150000, rope_scaling=GPT_OSS_YARN),
        None,
    ),
    "z-lab/Qwen3.5-27B-DFlash": (
        survey(5120, 17408, [1, 16, 31, 46, 61], 64, inner={"mask_token_id": 248070}, vocab_size=248320, block_size=16,
               **OLD),
        None,
    ),
    "z-lab/Qwen3.5-27B-DFlash (September)": (
        survey(5120, 17408, [1, 16, 31, 46, 61], 64, inner={"mask_token_id": 248070, "block_size": 16},
               vocab_size=248320, num_hidden_layers=6, layer_types=[S] * 5 + [F], use_sliding_window=True,
               sliding_window=4096, **NEW),
        None,
    ),
    "z-lab/Qwen3.6-27B-DFlash": (
        survey(5120, 17408, [1, 16, 31, 46, 61], 64, inner={"mask_token_id": 248070}, vocab_size=248320, block_size=16,
               **MIXED, **OLD),
        None,
    ),
    "z-lab/gemma-4-31B-it-DFlash": (
        survey(5376, 10752, [1, 12, 23, 35, 46, 57], 60, vocab_size=262144, num_attention_heads=64, block_size=16,
               inner={"mask_token_id": 4, "input_embedding_scale": 73.32, "final_logit_softcapping": 30.0}, **MIXED),
        None,
    ),
    "z-lab/Qwen3.8-27B-DFlash2": (
        survey(5120, 17408, [5, 19, 33, 47, 61], 64, architectures=["DFlash2DraftModel"], vocab_size=248320,
               inner={"mask_token_id": 248070, "block_size": 8, **DFLASH2}, is_causal=False, layer_types=[S] * 5,
               use_sliding_window=True, sliding_window=2048, **NEW),
        "a DFlash 2 draft",
    ),
    "z-lab/Muse-Glimmer-30B-DFlash2": (
        survey(6656, 19968, [1, 13, 25, 37, 49], 52, architectures=["DFlash2DraftModel"], vocab_size=202048,
               inner={"mask_token_id": 201818, "output_multiplier": 0.196, "final_logit_softcapping": 20.0, **DFLASH2}),
        "a DFlash 2 draft",
    ),
    "XiaomiMiMo/MiMo-V2.5-Pro-FP4-DFlash": (
        survey(6144, 16384, [0, 15, 31, 47, 69], 70, vocab_size=152064, num_attention_heads=128, block_size=8,
               sliding_window=1024, rope_theta=10000, partial_rotary_factor=0.5,
               inner={"mask_token_id": 151669, "num_anchors": 4096, "loss_decay_gamma": 7.0, "use_swa": True,
                      "swa_window_size": 1024, "attention_value_scale": 0.612, "attention_sink_bias": True}),
        "attention sinks",
    ),
    "RedHatAI/*-speculator.dflash": (
        {"architectures": ["DFlashDraftModel"], "speculators_model_type": "dflash", "block_size": 8,
         "mask_token_id": 151669, "aux_hidden_state_layer_ids": [2, 10, 18], "draft_vocab_size": 32000,
         "transformer_layer_config": {"model_type": "qwen3", "hidden_size": 2560, "intermediate_size": 9728,
                                      "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
                                      "num_hidden_layers": 3, "vocab_size": 151936, "sliding_window": 2048,
                                      "layer_types": [S] * 3}},
        None,
    ),
    "deepseek-ai/dflash_qwen3_4b_block7": (
        {key: value for key, value in QWEN3_4B.items() if key != "dflash_config"}
        | {"architectures": ["Qwen3DSparkModel"], "block_size": 7, "mask_token_id": 151669, "markov_rank": 0,
           "target_layer_ids": [1, 9, 17, 25, 33], "num_anchors": 512, "enable_confidence_head": False},
        None,
    ),
    "deepseek-ai/dspark_qwen3_4b_block7": (
        {"architectures": ["Qwen3DSparkModel"], "block_size": 7, "mask_token_id": 151669, "markov_rank": 256},
        "with a Markov head",
    ),
    "poolside/Laguna-*-DFlash": (
        {"architectures": ["DFlashLagunaForCausalLM"], "model_type": "laguna",
         "dflash_config": {"block_size": 4, "mask_token_id": 3, "target_layer_ids": [0, 2], "causal": True}},
        "a Laguna draft",
    ),
    "SpecForge export": (
        changed(rope_parameters={"rope_theta": 1000000, "rope_type": "default"}, draft_vocab_size=151936), None
    ),
    "SpecForge kimi-k2.7-code": (
        survey(7168, 18432, [1, 12, 24, 35, 47, 58], 61, inner={"mask_token_id": 163838}, vocab_size=163840,
               num_hidden_layers=6, num_attention_heads=64, block_size=8, rope_theta=50000.0, mask_token_id=163838,
               rope_scaling={"beta_fast": 32.0, "beta_slow": 1.0, "factor": 64.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                             "original_max_position_embeddings": 4096, "rope_type": "yarn", "type": "yarn"}),
        None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SURVEY)
def test_published_drafts(name: str) -> None:
    raw, refused = SURVEY[name]
    if refused is None:
        config = parse_config(raw, name)
        assert tensor_shapes(config)["fc.weight"] == (
            config.hidden_size,
            len(config.target_layer_ids) * config.hidden_size,
        )
    else:
        with pytest.raises(FlashdraftError, match=refused):
            parse_config(raw, name)


# --- folders and files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A good draft for tiny_target("llama")."""
    network = random_network(tiny_target("llama", "float32"))
    checkpoint.write(tmp_path / "draft", network.config, network.state_dict(), {"steps": 3})
    return tmp_path / "draft"


def refusal(folder: Path) -> str:
    with pytest.raises(FlashdraftError) as caught:
        checkpoint.read(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def rewrite_weights(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace weights by name (dots as double underscores); None takes one away."""
    weights = load_file(folder / "model.safetensors")
    for name, tensor in changes.items():
        key = name.replace("__", ".")
        if tensor is None:
            del weights[key]
        else:
            weights[key] = tensor
    save_file(weights, folder / "model.safetensors")


def test_round_trip_is_exact(folder: Path) -> None:
    network = random_network(tiny_target("llama", "float32"))
    config, weights = checkpoint.read(folder)
    assert config == network.config
    expected = network.state_dict()
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in weights)
    assert checkpoint.read(str(folder))[0] == config


@pytest.mark.parametrize("missing", ["the folder", "config.json", "model.safetensors"])
def test_something_is_missing(folder: Path, missing: str) -> None:
    if missing == "the folder":
        assert "no draft at" in refusal(folder / "not there")
    else:
        (folder / missing).unlink()
        assert f"has no {missing}" in refusal(folder)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[1, 2]", "holds a list; expected a JSON object"),
        ("null", "holds a NoneType"),
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ('{"a": ' + "9" * 5000 + "}", "is not JSON"),
        ("{}", "hidden_size is None"),
    ],
    ids=["list", "null", "empty", "cut", "deep", "long number", "empty object"],
)
def test_config_is_not_a_config(folder: Path, text: str, said: str) -> None:
    (folder / "config.json").write_text(text)
    assert said in refusal(folder)


def test_config_in_another_encoding(folder: Path) -> None:
    (folder / "config.json").write_bytes(b"\xff\xfe\xfa")
    assert "is not JSON" in refusal(folder)


def test_infinity_in_the_file_is_refused(folder: Path) -> None:
    """JSON has no NaN, Python's reader does."""
    text = (folder / "config.json").read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": NaN')
    (folder / "config.json").write_text(text)
    assert "rms_norm_eps is nan" in refusal(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("kind", ["loop", "broken link", "folder", "pipe"])
def test_what_is_no_file(folder: Path, name: str, kind: str) -> None:
    file = folder / name
    file.unlink()
    if kind == "folder":
        file.mkdir()
    elif kind == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to(name if kind == "loop" else "nowhere")
    refusal(folder)


def test_a_folder_that_is_a_loop(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert "no draft at" in refusal(tmp_path / "a")


def test_links_are_followed(folder: Path, tmp_path: Path) -> None:
    """The hub's cache is made of links."""
    linked = tmp_path / "linked"
    linked.mkdir()
    for name in ("config.json", "model.safetensors"):
        (linked / name).symlink_to(folder / name)
    assert checkpoint.read(linked)[0] == checkpoint.read(folder)[0]


@pytest.mark.parametrize("content", [b"", b"\x00" * 4, b"not a safetensors file at all", b"\xff" * 64])
def test_weights_are_not_safetensors(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    assert "model.safetensors cannot be read" in refusal(folder)


@pytest.mark.parametrize("kept", [0.1, 0.5, 0.99])
def test_weights_are_cut(folder: Path, kept: float) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: int(len(data) * kept)])
    assert "model.safetensors cannot be read" in refusal(folder)


@pytest.mark.parametrize(
    ("others", "said"),
    [
        (["pytorch_model.bin"], "only pytorch_model.bin, which could run code"),
        (
            ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"],
            "expected one file model.safetensors",
        ),
    ],
)
def test_weights_in_other_files(folder: Path, others: list[str], said: str) -> None:
    for name in others:
        (folder / name).write_bytes(b"")
    (folder / "model.safetensors").unlink()
    assert said in refusal(folder)


def test_every_mismatch_of_the_weights_is_listed(folder: Path) -> None:
    rewrite_weights(
        folder,
        fc__weight=torch.zeros(3, 3),
        norm__weight=None,
        lm_head__weight=torch.zeros(96, 32),
        embed_tokens__weight=torch.zeros(96, 32),
        hidden_norm__weight=torch.zeros(32, dtype=torch.int32),
    )
    message = refusal(folder)
    for said in (
        "fc.weight is [3, 3], expected [32, 64]", "norm.weight is missing", "lm_head.weight is not part of a draft",
        "embed_tokens.weight is not part of a draft", "hidden_norm.weight is stored as I32, expected BF16",
    ):  # fmt: skip
        assert said in message


def test_a_config_that_claims_more_than_the_file_holds(folder: Path) -> None:
    """Shapes come from the file's header, so a claim of terabytes is refused without allocating them."""
    raw = json.loads((folder / "config.json").read_text())
    raw |= {"intermediate_size": 2**31 - 1, "num_hidden_layers": 1024, "layer_types": ["full_attention"] * 1024}
    (folder / "config.json").write_text(json.dumps(raw))
    message = refusal(folder)
    assert "expected [2147483647, 32]" in message or "is missing" in message
    assert len(message) < 2000 and "more" in message


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.float8_e4m3fn, torch.uint8])
def test_weights_of_another_type(folder: Path, dtype: torch.dtype) -> None:
    rewrite_weights(folder, norm__weight=torch.zeros(32).to(dtype))
    assert "norm.weight is stored as" in refusal(folder)


def test_rotary_tables_in_the_file_are_ignored(folder: Path) -> None:
    rewrite_weights(folder, rotary_emb__inv_freq=torch.zeros(4))
    assert "rotary_emb.inv_freq" not in checkpoint.read(folder)[1]


def test_names_with_a_prefix_get_one_sentence(folder: Path) -> None:
    weights = {f"model.{name}": t for name, t in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors")
    assert "has 'model.' in front of every weight's name" in refusal(folder)


# --- writing

GOOD_KINDS = st.sampled_from([
    (windows, causal)
    for n in (1, 2, 3)
    for windows, causal in [
        ((None,) * n, (False,) * n), ((None,) * n, (True,) * n), ((5,) * n, (True,) * n), ((5,) * n, (False,) * n),
        ((5,) * (n - 1) + (None,), (True,) * (n - 1) + (False,)), ((5,) * (n - 1) + (None,), (True,) * n),
        ((None,) * (n - 1) + (5,), (False,) * n),
    ]
])  # fmt: skip
NUMBERS = st.floats(0.01, 100, allow_nan=False)
ROPES = st.one_of(
    st.fixed_dictionaries({"rope_type": st.just("default"), "rope_theta": st.floats(2, 1e8)}),
    st.fixed_dictionaries({"rope_type": st.just("linear"), "rope_theta": st.floats(2, 1e8), "factor": NUMBERS}),
    st.fixed_dictionaries(
        {"rope_type": st.just("llama3"), "rope_theta": st.floats(2, 1e8), "factor": NUMBERS,
         "low_freq_factor": st.floats(0.5, 2), "high_freq_factor": st.floats(3, 9)},
        optional={"original_max_position_embeddings": st.integers(1, 10**6)},
    ),
    st.fixed_dictionaries(
        {"rope_type": st.just("yarn"), "rope_theta": st.floats(2, 1e8), "factor": NUMBERS},
        optional={"original_max_position_embeddings": st.integers(1, 10**6), "attention_factor": NUMBERS,
                  "beta_fast": st.floats(10, 40), "beta_slow": st.floats(0.1, 5), "truncate": st.booleans(),
                  "mscale": NUMBERS, "mscale_all_dim": NUMBERS},
    ),
)  # fmt: skip


@st.composite
def configs(draw: st.DrawFn) -> DraftConfig:
    windows, causal = draw(GOOD_KINDS)
    kv_heads = draw(st.integers(1, 3))
    taps = draw(st.lists(st.integers(0, 40), min_size=1, max_size=4, unique=True))
    vocab = draw(st.integers(2, 10**6))
    return DraftConfig(
        hidden_size=draw(st.integers(1, 12)), intermediate_size=draw(st.integers(1, 12)),
        num_heads=kv_heads * draw(st.integers(1, 3)), num_kv_heads=kv_heads, head_dim=2 * draw(st.integers(1, 4)),
        vocab_size=vocab, target_layer_ids=tuple(sorted(taps)), num_target_layers=draw(st.integers(0, 99)),
        block_size=draw(st.integers(1, 64)), mask_token_id=draw(st.integers(0, vocab - 1)), windows=windows,
        causal=causal, max_context=draw(st.integers(1, 10**7)), rms_norm_eps=draw(st.floats(1e-12, 1)),
        attention_bias=draw(st.booleans()), rope=draw(ROPES), embedding_scale=draw(NUMBERS),
        output_multiplier=draw(NUMBERS), softcap=draw(st.none() | NUMBERS),
    )  # fmt: skip


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    config=configs(), seed=st.integers(0, 100), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64])
)
def test_any_draft_survives_the_disk(config: DraftConfig, seed: int, dtype: torch.dtype, tmp_path: Path) -> None:
    """T9: what is written is read back, the configuration equal and the weights bit by bit."""
    torch.manual_seed(seed)
    weights = {name: torch.randn(shape).to(dtype) for name, shape in tensor_shapes(config).items()}
    checkpoint.write(tmp_path / "draft", config, weights)
    found_config, found = checkpoint.read(tmp_path / "draft")
    assert found_config == config
    assert all(found[name].dtype == dtype and torch.equal(found[name], weights[name]) for name in weights)
    with torch.device("meta"):
        DFlashNetwork(config).load_state_dict(found, strict=True, assign=True)


@pytest.mark.parametrize(
    ("windows", "causal", "keys"),
    [
        # FORMATS: is_causal is left out for full drafts, true for all-sliding ones (llama.cpp), and
        # sliding_window with use_sliding_window only where a layer slides
        ((None, None), (False, False), {"layer_types": [F, F], "use_sliding_window": False, "sliding_window": None}),
        ((None, None), (True, True), {"layer_types": [F, F], "is_causal": True}),
        ((7, 7), (True, True), {"layer_types": [S, S], "use_sliding_window": True, "sliding_window": 7,
                                "is_causal": True}),
        ((7, 7), (False, False), {"layer_types": [S, S], "is_causal": False}),
        ((7, None), (True, False), {"layer_types": [S, F], "use_sliding_window": True, "sliding_window": 7}),
        ((7, None), (True, True), {"layer_types": [S, F], "is_causal": True}),
        ((7, None), (False, False), {"layer_types": [S, F], "is_causal": False}),
    ],
)  # fmt: skip
def test_the_written_config_is_portable(windows: Any, causal: Any, keys: dict[str, Any]) -> None:
    """The keys that every engine we looked at agrees on, nothing they read differently."""
    config = draft_config(tiny_target("llama"), windows=windows, causal=causal)
    raw = checkpoint.config_json(config, torch.bfloat16)
    assert keys.items() <= raw.items()
    assert "is_causal" in keys or "is_causal" not in raw
    assert "causal" not in raw["dflash_config"] and "use_swa" not in raw["dflash_config"]
    assert raw["architectures"] == ["DFlashDraftModel"] and raw["model_type"] == "qwen3" and raw["dtype"] == "bfloat16"
    assert raw["rope_theta"] == raw["rope_parameters"]["rope_theta"]
    assert raw["block_size"] == raw["dflash_config"]["block_size"]
    assert not raw["tie_word_embeddings"] and raw["head_dim"] == config.head_dim
    assert parse_config(raw) == config


@pytest.mark.parametrize(
    ("windows", "causal", "said"),
    [
        ((5, 7), (True, True), "one size for all"),
        ((5, None), (False, True), "the layout cannot say so"),
        ((None, None), (True, False), "the layout cannot say so"),
        ((5, 5), (True, False), "the layout cannot say so"),
    ],
)
def test_what_the_layout_cannot_say_is_not_written(windows: Any, causal: Any, said: str, tmp_path: Path) -> None:
    network = random_network(tiny_target("llama", "float32"), windows=windows, causal=causal)
    with pytest.raises(FlashdraftError, match=said):
        checkpoint.write(tmp_path / "draft", network.config, network.state_dict())
    assert not (tmp_path / "draft").exists()


def test_nothing_unreadable_is_written(tmp_path: Path) -> None:
    network = random_network(tiny_target("llama", "float32"))
    bad = dataclasses.replace(network.config, mask_token_id=96)
    with pytest.raises(FlashdraftError, match="mask_token_id is 96"):
        checkpoint.write(tmp_path / "draft", bad, network.state_dict())
    weights = network.state_dict()
    weights["norm.weight"] = weights["norm.weight"].long()
    with pytest.raises(FlashdraftError, match=r"norm.weight is stored as I64"):
        checkpoint.write(tmp_path / "draft", network.config, weights)
    del weights["norm.weight"]
    with pytest.raises(FlashdraftError, match=r"norm.weight is missing"):
        checkpoint.write(tmp_path / "draft", network.config, weights)
    assert not (tmp_path / "draft").exists()


def test_metadata_and_files(folder: Path) -> None:
    from safetensors import safe_open

    assert sorted(f.name for f in folder.iterdir()) == ["config.json", "model.safetensors", "training.json"]
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_writing_again_replaces_the_draft_and_leaves_other_files(folder: Path) -> None:
    (folder / "README.md").write_text("a card")
    network = random_network(tiny_target("llama", "float32"), seed=5, block_size=4)
    checkpoint.write(folder, network.config, network.state_dict())
    config, weights = checkpoint.read(folder)
    assert config.block_size == 4
    assert torch.equal(weights["fc.weight"], network.fc.weight)
    # what made the older draft is not what made this one
    assert sorted(f.name for f in folder.iterdir()) == ["README.md", "config.json", "model.safetensors"]


@pytest.mark.parametrize("other", ["target", "weights", "no config"])
def test_another_model_is_not_overwritten(tmp_path: Path, other: str) -> None:
    if other != "weights":
        (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}' if other == "target" else "[]")
    (tmp_path / "model.safetensors").write_bytes(b"precious")
    network = random_network(tiny_target("llama", "float32"))
    with pytest.raises(FlashdraftError):
        checkpoint.write(tmp_path, network.config, network.state_dict())
    assert (tmp_path / "model.safetensors").read_bytes() == b"precious"
    assert {f.name for f in tmp_path.iterdir()} <= {"config.json", "model.safetensors"}


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "draft").write_text("a file")
    network = random_network(tiny_target("llama", "float32"))
    with pytest.raises(FlashdraftError, match="cannot be saved"):
        checkpoint.write(tmp_path / "draft", network.config, network.state_dict())


class Crash(BaseException):
    """Not an Exception: what a kill looks like to `finally`."""


@pytest.mark.parametrize("at", range(10))
@pytest.mark.parametrize("training", [None, {"steps": 9}])
@pytest.mark.parametrize("older", ["with training.json", "without"])
def test_a_failure_leaves_the_older_draft(
    folder: Path, at: int, training: dict[str, Any] | None, older: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saving fails at its n-th step (write a file, move a file): the folder is as before, or finished."""
    if older == "without":
        (folder / "training.json").unlink()
    before = {f.name: f.read_bytes() for f in folder.iterdir()}
    network = random_network(tiny_target("llama", "float32"), seed=5, block_size=4)
    steps = iter(range(100))

    def counted(name: str, owner: Any) -> None:
        real = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if next(steps) == at:
                raise Crash
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, wrapped)

    counted("save_file", draft_folder)
    counted("write_text", Path)
    counted("replace", Path)
    try:
        checkpoint.write(folder, network.config, network.state_dict(), training)
        finished = True
    except Crash:
        finished = False
    monkeypatch.undo()
    if finished:
        assert next(steps) <= at and checkpoint.read(folder)[0].block_size == 4
    else:
        assert {f.name: f.read_bytes() for f in folder.iterdir()} == before


def test_a_kill_between_the_moves_is_no_mixed_draft(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed for good there is no clean-up: what is left is refused, not one draft with another's config."""
    network = random_network(tiny_target("llama", "float32"), seed=5, block_size=4)
    real, moves = Path.replace, iter(range(100))
    states = []

    def watch(self: Path, target: Path) -> Path:
        if next(moves):
            present = {f.name for f in folder.iterdir()}
            states.append("config.json" in present)
        return real(self, target)

    monkeypatch.setattr(Path, "replace", watch)
    checkpoint.write(folder, network.config, network.state_dict(), {"steps": 1})
    assert len(states) == 5 and not any(states)


def test_disk_errors_are_sentences(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_args: Any, **_kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(draft_folder, "save_file", full)
    network = random_network(tiny_target("llama", "float32"))
    with pytest.raises(FlashdraftError, match="No space left"):
        checkpoint.write(folder, network.config, network.state_dict())


# --- training.json


def test_training_is_optional_and_read_back(folder: Path) -> None:
    training = checkpoint.read_training(folder)
    assert training == {"steps": 3, "draft_sha256": checkpoint.digest(checkpoint.read(folder)[1])}
    (folder / "training.json").unlink()
    assert checkpoint.read_training(folder) is None


@pytest.mark.parametrize("text", ["{", "[]", "\x00"])
def test_a_bad_training_file_does_not_prevent_decoding(folder: Path, text: str) -> None:
    (folder / "training.json").write_text(text)
    with pytest.raises(FlashdraftError, match=r"training\.json"):
        checkpoint.read_training(folder)
    assert DFlashDrafter.load(folder, tiny_target("llama", "float32")).max_draft_tokens == 7


def test_training_that_is_no_json_changes_nothing(folder: Path) -> None:
    network = random_network(tiny_target("llama", "float32"), block_size=4)
    for bad in ({"loss": float("nan")}, {"path": Path("x")}):
        with pytest.raises((TypeError, ValueError)):
            checkpoint.write(folder, network.config, network.state_dict(), bad)
    assert checkpoint.read(folder)[0].block_size == 8
    assert len(list(folder.iterdir())) == 3


# --- fit with a target

TARGET = SimpleNamespace(
    name="the model", hidden_size=32, vocab_size=96, num_layers=8, eos_ids=frozenset({2, 3}), pad_id=0
)


def fitting(**changes: Any) -> DraftConfig:
    values = {"num_target_layers": 8, "target_layer_ids": (1, 3, 6), **changes}
    return draft_config(tiny_target("llama"), **values)


def test_a_fitting_draft_passes() -> None:
    checkpoint.check_against(fitting(), TARGET)  # type: ignore[arg-type]
    checkpoint.check_against(fitting(num_target_layers=0), TARGET)  # type: ignore[arg-type]


MISMATCHES: dict[str, tuple[dict[str, Any], str]] = {
    "hidden size": ({"hidden_size": 48}, "hidden size 48, the target has 32"),
    "vocabulary": ({"vocab_size": 100}, "vocabulary 100, the target has 96"),
    "layers": ({"num_target_layers": 9}, "made for 9 target layers, the target has 8"),
    "outside": ({"target_layer_ids": (1, 8, 12)}, "taps layers [8, 12], the target's are 0 to 7"),
    "negative": ({"target_layer_ids": (-1, 3)}, "taps layers [-1], the target's are 0 to 7"),
    "last": ({"target_layer_ids": (1, 7)}, "taps the last layer (7)"),
    "order": ({"target_layer_ids": (3, 1)}, "target_layer_ids [3, 1] do not rise strictly"),
    "twice": ({"target_layer_ids": (1, 1)}, "target_layer_ids [1, 1] do not rise strictly"),
    "mask outside": ({"mask_token_id": 96}, "mask token 96 is outside the vocabulary of 96"),
    "mask eos": ({"mask_token_id": 3}, "mask token 3 is the target's end-of-text token"),
    "mask pad": ({"mask_token_id": 0}, "mask token 0 is the target's padding token"),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_each_mismatch_with_the_target(name: str) -> None:
    """T7: the mask token is not the end or the padding. T10: the last layer is not tapped."""
    changes, said = MISMATCHES[name]
    with pytest.raises(FlashdraftError) as caught:
        checkpoint.check_against(fitting(**changes), TARGET, "draft/x")  # type: ignore[arg-type]
    message = str(caught.value)
    assert message.startswith(f"draft/x does not fit the target the model: {said}") and message.endswith(".")
    assert ";" not in message.replace("final norm; tap others", "")  # and nothing else


def test_one_error_lists_every_mismatch() -> None:
    changes = {"hidden_size": 48, "vocab_size": 100, "num_target_layers": 9, "target_layer_ids": (7, 9, 3)}
    with pytest.raises(FlashdraftError) as caught:
        checkpoint.check_against(fitting(mask_token_id=2, **changes), TARGET)  # type: ignore[arg-type]
    for said in ("hidden size", "vocabulary", "made for 9", "taps layers [9]", "the last layer (7)", "rise strictly",
                 "end-of-text"):  # fmt: skip
        assert said in str(caught.value)


def test_loading_checks_the_target(folder: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    raw["dflash_config"] |= {"mask_token_id": 2, "target_layer_ids": [1, 2]}
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(FlashdraftError, match=r"taps the last layer \(2\).*end-of-text"):
        DFlashDrafter.load(folder, tiny_target("llama", "float32"))
