"""config.json of an exported draft: one content for every engine that reads the z-lab layout, and speculators'."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from .. import checkpoint
from ..draft_config import ARCHITECTURE, SLIDING, DraftConfig
from .target_facts import TargetFacts

SPECULATORS_VERSION = "0.9.0"


def portable(config: DraftConfig, target: TargetFacts | None = None) -> DraftConfig:
    """The same network, said so that engines cannot misread it: as many positions as the target has (vLLM's
    tables end there, without a word), and for YaRN and Llama 3 the original context by name."""
    rope = dict(config.rope)
    if rope.get("rope_type", "default") in ("yarn", "llama3"):
        rope.setdefault("original_max_position_embeddings", config.max_context)
    positions = max(config.max_context, target.max_context if target is not None else 0)
    layers = config.num_target_layers or (target.num_layers if target is not None else 0)
    return dataclasses.replace(config, rope=rope, max_context=positions, num_target_layers=layers)


def engine_config(
    engine: str, config: DraftConfig, dtype: torch.dtype, target: TargetFacts | None, head_rows: int | None
) -> dict[str, Any]:
    """config.json's content for an engine; `config` as `portable` gives it, `head_rows` of a reduced head."""
    raw = checkpoint.config_json(config, dtype)
    if engine == "speculators":
        return _speculators(raw, config, target, head_rows)
    # transformers looks for these at the top
    raw |= {"mask_token_id": config.mask_token_id, "target_layer_ids": list(config.target_layer_ids)}
    if target is not None and target.eos_ids:
        raw["eos_token_id"] = min(target.eos_ids)
    if engine == "vllm":
        raw["n_predict"] = config.block_size - 1  # its default number of speculative tokens
    if head_rows is not None:
        raw["draft_vocab_size"] = head_rows
    return raw


def _speculators(
    zlab: dict[str, Any], config: DraftConfig, target: TargetFacts | None, head_rows: int | None
) -> dict[str, Any]:
    """Without model_type at the top: vLLM looks it up in transformers, which has none for it."""
    drafted = config.block_size - 1
    left_out = ("architectures", "is_causal", "block_size", "dflash_config")
    layer = {key: value for key, value in zlab.items() if key not in left_out}
    bidirectional = not any(config.causal) or SLIDING not in zlab["layer_types"]
    return {
        "architectures": [ARCHITECTURE],
        "speculators_model_type": "dflash",
        "speculators_version": SPECULATORS_VERSION,
        "dtype": zlab["dtype"],
        "block_size": drafted if config.from_anchor else config.block_size,
        "mask_token_id": config.mask_token_id,
        "draft_vocab_size": head_rows or config.vocab_size,
        "target_hidden_size": None,
        "aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids],
        # False would make vLLM run full layers causally too
        "sliding_window_non_causal": bidirectional,
        "sample_from_anchor": config.from_anchor,
        "tie_word_embeddings": False,
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": drafted,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {
                "name_or_path": str(target.path) if target is not None else None,
                "architectures": [target.architecture] if target is not None else [],
            },
        },
    }
