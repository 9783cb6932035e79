"""Tiny random models of every causal LM family of transformers that can be built in a moment, with
what a target of that family must be: exact, or refused and why. docs/targets.md shows the table;
`python tests/families.py` writes it there.
"""

from __future__ import annotations

import functools
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from bed import VOCAB

DOC = Path(__file__).parent.parent / "docs" / "targets.md"
FULL, SLIDING = "full_attention", "sliding_attention"

# Values for whichever of these keys a configuration has.
_TINY: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.25, "init_std": 0.25,
    "sliding_window": 8, "tie_word_embeddings": False, "rotary_dim": 8,
    # mixtures of experts
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1,
    # latent attention
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    # older names
    "d_model": 32, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256, "n_inner": 48, "ffn_dim": 48,
    "ffn_hidden_size": 48, "num_layers": 3, "num_heads": 4,
}  # fmt: skip
_LATENT = {"head_dim": 8, "num_key_value_heads": 4}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_expand": 2}
_SHARED = {
    "num_hidden_layers": 4, "layer_types": [SLIDING, FULL, SLIDING, FULL], "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8,
}  # fmt: skip
_LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}


@dataclass(frozen=True, eq=False)
class Family:
    """`refused` is part of the sentence that refuses it, or None if it decodes exactly."""

    model_type: str
    shown: str
    changes: dict[str, Any] = field(default_factory=dict)
    refused: str | None = None
    seed: int = 0

    @property
    def features(self) -> bool:
        """Whether its layers put out one state per token, which drafts like DFlash read."""
        return self.model_type != "gemma3n_text"

    @property
    def known(self) -> bool:
        """Whether the installed transformers has it."""
        return self.model_type in CONFIG_MAPPING

    def config(self, **changes: Any) -> Any:
        kind = CONFIG_MAPPING[self.model_type]
        default = kind()
        values = {key: value for key, value in _TINY.items() if _can_set(default, key)}
        return kind(**{**values, **self.changes, **changes})

    def model(self, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
        """Random weights, the same in every precision; biases and norms are random too."""
        torch.manual_seed(self.seed)
        # experts in a loop: the batched kernels do not take float64
        model = transformers.AutoModelForCausalLM.from_config(
            self.config(**changes), attn_implementation="eager", experts_implementation="eager"
        ).float()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter) * (0.3 if "bias" in name else 0.1))
        return model.eval().to(dtype)


def _can_set(config: Any, key: str) -> bool:
    if isinstance(getattr(type(config), key, None), property):
        return False
    try:
        return hasattr(config, key)
    except Exception:  # some configurations have names that differ by layer and may not be asked for
        return False


def _exact(*rows: tuple[Any, ...]) -> list[Family]:
    return [Family(row[0], row[1], row[2] if len(row) > 2 else {}, seed=row[3] if len(row) > 3 else 0) for row in rows]


def _refused(reason: str, *rows: tuple[Any, ...]) -> list[Family]:
    return [Family(row[0], row[1], row[2] if len(row) > 2 else {}, refused=reason) for row in rows]


FAMILIES: list[Family] = [
    *_exact(
        ("llama", "Llama 1 and 2, SmolLM2, TinyLlama, Yi"),
        ("llama", "Llama 3 (llama3 frequencies)", {"rope_parameters": _LLAMA3}),
        ("llama", "Llama, YaRN frequencies", {"rope_parameters": _YARN}),
        (
            "llama",
            "Llama, dynamic frequencies",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
        ),
        (
            "llama",
            "Llama, biases, tied embeddings",
            {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        ),
        ("qwen2", "Qwen2, Qwen2.5"),
        ("qwen2", "Qwen2, windowed layers", {"use_sliding_window": True, "max_window_layers": 1}),
        (
            "qwen2_moe",
            "Qwen2 MoE, windowed layers",
            {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 20},
        ),
        ("qwen3", "Qwen3"),
        ("qwen3_moe", "Qwen3 MoE"),
        ("mistral", "Mistral, sliding window"),
        ("mistral", "Mistral, all of the context", {"sliding_window": None}),
        ("mixtral", "Mixtral"),
        ("ministral", "Ministral (2024)", {"layer_types": [SLIDING, FULL, SLIDING]}),
        (
            "ministral3",
            "Ministral 3",
            {"rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0}},
        ),
        ("gemma", "Gemma 1"),
        ("gemma2", "Gemma 2 (caps, windows)"),
        ("gemma3_text", "Gemma 3, text (local and global layers)", {"layer_types": [SLIDING, FULL, SLIDING]}),
        ("gemma3n_text", "Gemma 3n, text (shared keys)", {**_SHARED, "laurel_rank": 8}),
        ("gemma4_text", "Gemma 4, text (shared keys)", _SHARED),
        ("vaultgemma", "VaultGemma"),
        ("phi", "Phi 1, 1.5, 2", {}, 7),
        ("phi3", "Phi-3, Phi-4, windowed"),
        (
            "phi3",
            "Phi-3 long (longrope)",
            {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 64, "sliding_window": None},
        ),
        ("phimoe", "Phi-3.5 MoE, windowed", {"sliding_window": 20}),
        ("smollm3", "SmolLM3"),
        ("granite", "Granite 3"),
        ("granitemoe", "Granite MoE"),
        ("granitemoeshared", "Granite MoE, shared expert"),
        ("olmo", "OLMo"),
        ("olmo2", "OLMo 2", {}, 1),
        ("olmo3", "OLMo 3", {"layer_types": [SLIDING, FULL, SLIDING]}, 1),
        ("olmoe", "OLMoE"),
        ("stablelm", "StableLM 2"),
        ("cohere", "Command R"),
        ("cohere2", "Command R7B, A", {"layer_types": [SLIDING, FULL, SLIDING]}),
        ("gpt2", "GPT-2"),
        ("gpt_bigcode", "StarCoder, SantaCoder"),
        ("starcoder2", "StarCoder2, windowed", {}, 2),
        ("gpt_neox", "GPT-NeoX, Pythia"),
        ("gptj", "GPT-J"),
        ("codegen", "CodeGen", {}, 1),
        ("gpt_oss", "gpt-oss (sinks, windows)", {"layer_types": [SLIDING, FULL, SLIDING]}),
        ("opt", "OPT", {"word_embed_proj_dim": 32}, 4),
        ("biogpt", "BioGPT", {}, 1),
        ("ctrl", "CTRL"),
        ("persimmon", "Persimmon", {}, 4),
        ("glm", "GLM-4 (2024)"),
        ("glm4", "GLM-4-0414"),
        ("glm4_moe", "GLM-4.5, 4.6"),
        ("exaone4", "EXAONE 4", {"layer_types": [SLIDING, FULL, SLIDING]}),
        ("deepseek_v2", "DeepSeek-V2", _LATENT),
        ("deepseek_v3", "DeepSeek-V3, R1, Kimi K2 (latent attention)", _LATENT),
        ("minicpm3", "MiniCPM3", _LATENT),
        ("youtu", "Youtu-LLM", _LATENT),
        ("dots1", "dots.llm1", {"n_shared_experts": 1}),
        ("ernie4_5", "ERNIE 4.5"),
        ("ernie4_5_moe", "ERNIE 4.5 MoE"),
        ("hunyuan_v1_dense", "Hunyuan"),
        ("hunyuan_v1_moe", "Hunyuan MoE"),
        ("minimax_m2", "MiniMax M2"),
        ("mimo_v2_flash", "MiMo V2 Flash"),
        ("seed_oss", "Seed-OSS"),
        ("nemotron", "Nemotron 3, 4, Minitron"),
        ("apertus", "Apertus", {}, 1),
        ("arcee", "AFM"),
        ("afmoe", "Trinity"),
        ("bitnet", "BitNet b1.58"),
        ("cwm", "Code World Model"),
        ("helium", "Helium", {"head_dim": 8, "num_key_value_heads": 4}),
        ("jetmoe", "JetMoE"),
        ("modernbert-decoder", "Ettin decoders", {}, 1),
        ("nanochat", "nanochat", {}, 2),
        ("aria_text", "Aria, text"),
        ("exaone_moe", "EXAONE MoE"),
        ("flex_olmo", "FlexOlmo"),
        ("hyperclovax", "HyperCLOVA X"),
        ("jais2", "Jais 2"),
        ("solar_open", "Solar Open"),
    ),
    *_refused(
        "linear_attention",
        ("mamba", "Mamba"),
        ("mamba2", "Mamba 2", {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 8}),
        ("falcon_mamba", "Falcon Mamba"),
        ("recurrent_gemma", "RecurrentGemma"),
        ("jamba", "Jamba"),
        ("bamba", "Bamba", _MAMBA),
        ("zamba", "Zamba"),
        ("qwen3_next", "Qwen3-Next"),
        ("qwen3_5_text", "Qwen3.5, text"),
        ("minimax", "MiniMax-01, M1"),
        ("granitemoehybrid", "Granite 4 hybrid", {**_MAMBA, "layer_types": ["mamba", "attention", "mamba"]}),
        ("nemotron_h", "Nemotron-H"),
        ("olmo_hybrid", "OLMo Hybrid"),
        ("bailing_hybrid", "Ling hybrid"),
    ),
    *_refused("layers of kind hybrid", ("falcon_h1", "Falcon-H1"), ("zaya", "ZAYA", {"num_experts_per_tok": 1})),
    *_refused("layers of kind conv", ("lfm2", "LFM2", {"layer_types": ["conv", FULL, "conv"]})),
    *_refused("attention cannot be replaced", ("rwkv", "RWKV"), ("openai-gpt", "GPT-1"), ("xlm", "XLM")),
    *_refused("keep a state", ("xlstm", "xLSTM")),
    *_refused(
        "attention cannot be replaced",
        ("bloom", "BLOOM (alibi)"),
        ("mpt", "MPT (alibi)"),
        ("falcon", "Falcon 7B, 40B, 180B"),
    ),
    *_refused(
        "attention cannot be replaced",
        ("gpt_neo", "GPT-Neo", {"attention_types": [[["global", "local"], 1], [["global"], 1]]}),
    ),
    *_refused("indexed_attention", ("deepseek_v32", "DeepSeek-V3.2", _LATENT), ("glm_moe_dsa", "GLM-5", _LATENT)),
    *_refused("heavily_compressed_attention", ("deepseek_v4", "DeepSeek-V4", _LATENT)),
    *_refused(
        "minimax_m3_sparse",
        ("minimax_m3_vl_text", "MiniMax M3, text", {"layer_types": [FULL, "minimax_m3_sparse", FULL]}),
    ),
    *_refused("chunked_attention", ("llama4_text", "Llama 4, text")),
    *_refused("attends more than once", ("diffllama", "DiffLlama")),
    *_refused("decoder layers that attend one by one", ("longcat_flash", "LongCat Flash", _LATENT)),
    *_refused("made in a way flashdraft does not know", ("doge", "Doge")),
    *_refused(
        "see later tokens", ("bert", "BERT"), ("roberta", "RoBERTa"), ("electra", "ELECTRA"), ("ernie", "ERNIE 1")
    ),
    *_refused("see later tokens", ("xlm-roberta", "XLM-RoBERTa"), ("camembert", "CamemBERT")),
    *_refused("gives logits for", ("moshi", "Moshi")),
]


EXACT = [family for family in FAMILIES if family.refused is None]
REFUSED = [family for family in FAMILIES if family.refused is not None]


@functools.cache
def table() -> str:
    """The rows of docs/targets.md, between its two marks."""
    lines = [MARKS[0], "", "| family | `model_type` | result |", "|---|---|---|"]
    for family in FAMILIES:
        result = "exact" if family.features else "exact; its layers cannot be tapped, so no DFlash"
        if family.refused is not None:
            result = f"refused: {family.refused}"
        lines.append(f"| {family.shown} | {family.model_type} | {result} |")
    return "\n".join([*lines, "", MARKS[1]])


MARKS = ("<!-- made by tests/families.py -->", "<!-- end -->")
_BETWEEN = re.compile(f"{re.escape(MARKS[0])}.*{re.escape(MARKS[1])}", re.DOTALL)


def shown_table() -> str:
    found = _BETWEEN.search(DOC.read_text(encoding="utf-8"))
    return found[0] if found else ""


if __name__ == "__main__":
    text = _BETWEEN.sub(lambda _: table(), DOC.read_text(encoding="utf-8"))
    sys.stdout.write(f"{DOC.name}: {len(EXACT)} families exact, {len(REFUSED)} refused\n")
    DOC.write_text(text, encoding="utf-8")
