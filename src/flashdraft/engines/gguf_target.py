"""A target as llama.cpp loads it: its GGUF file as it is, or one written from a folder of the Llama or Qwen3 family.

Names and keys are those that llama.cpp 11434 reads (src/llama-arch.cpp, src/models/llama.cpp, qwen3.cpp).
"""

from __future__ import annotations

import filecmp
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from ..config_keys import Keys, read_rope, short
from ..draft_folder import reading
from ..drafters.layers import rope_frequencies
from ..gguf_header import read_header
from ..locate import locate_source
from ..model_folder import ModelFolder, check_folder, one_line, weight_files
from ..types import FlashdraftError
from .gguf_file import (
    KINDS,
    Field,
    Fields,
    Piece,
    check_kind,
    open_gguf,
    prefixed,
    read_fields,
    real,
    text,
    uint,
    write_gguf,
)
from .gguf_tokenizer import CONVERTER, tokenizer_fields

# Targets are written in types that keep all tensors alike; mixed ones are llama-quantize's business.
TARGET_KINDS = ("f32", "f16", "bf16", "q8_0")

# Architectures whose layers' inputs llama.cpp 11434 hands to a draft; with others it stops at the first pass.
_TAPPED = {
    "llama", "qwen3", "qwen3moe", "qwen3next", "qwen35", "qwen35moe", "qwen4exp", "gpt-oss", "gemma4", "lfm2", "mimo2",
    "minimax-01", "minimax-m2", "muse-glimmer", "nanbeige", "nemotron_h", "nemotron_h_moe", "bailingmoe3", "deepseek4",
    "hunyuan_vl",
}  # fmt: skip

# Hugging Face's class -> llama.cpp's architecture
_FAMILIES = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3"}

# Names inside a layer, Hugging Face's -> GGUF's; the last ones are Qwen3's, and a DFlash draft's
LAYER_NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
}  # fmt: skip


@dataclass(frozen=True)
class Network:
    """The sizes that llama.cpp asks of every network with this kind of layer."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_context: int
    rms_norm_eps: float
    rope: Mapping[str, Any]

    def fields(self, architecture: str) -> Fields:
        values = {
            "vocab_size": uint(self.vocab_size),
            "context_length": uint(self.max_context),
            "embedding_length": uint(self.hidden_size),
            "feed_forward_length": uint(self.intermediate_size),
            "block_count": uint(self.num_layers),
            "attention.head_count": uint(self.num_heads),
            "attention.head_count_kv": uint(self.num_kv_heads),
            "attention.key_length": uint(self.head_dim),
            "attention.value_length": uint(self.head_dim),
            "attention.layer_norm_rms_epsilon": real(self.rms_norm_eps),
            "rope.dimension_count": uint(self.head_dim),
            "rope.freq_base": real(self.rope["rope_theta"]),
            **self._rope_fields(),
        }
        return prefixed(architecture, values)

    def _rope_fields(self) -> Fields:
        kind = self.rope.get("rope_type", "default")
        if kind not in ("linear", "yarn"):
            return {}
        found = {"rope.scaling.type": text(kind), "rope.scaling.factor": real(self.rope["factor"])}
        if kind == "yarn":
            told = sorted({"attention_factor", "mscale", "mscale_all_dim", "truncate"} & self.rope.keys())
            if told:
                raise FlashdraftError(
                    f"its YaRN says {', '.join(told)}, which llama.cpp follows in another way or not at all."
                )
            original = self.rope.get("original_max_position_embeddings") or self.max_context
            found["rope.scaling.original_context_length"] = uint(original)
            found["rope.scaling.yarn_beta_fast"] = real(self.rope.get("beta_fast") or 32)
            found["rope.scaling.yarn_beta_slow"] = real(self.rope.get("beta_slow") or 1)
        return found

    def rope_pieces(self) -> list[Piece]:
        """Llama 3's slowed waves, as the factors by which llama.cpp divides the plain frequencies."""
        if self.rope.get("rope_type", "default") != "llama3":
            return []
        plain = rope_frequencies({"rope_theta": self.rope["rope_theta"]}, self.head_dim, self.max_context)[0]
        own = rope_frequencies(self.rope, self.head_dim, self.max_context)[0]
        return [Piece("rope_freqs.weight", (self.head_dim // 2,), lambda: plain / own)]


@dataclass(frozen=True)
class TargetFile:
    """What a draft's file has to know of its target. `head_rows` makes the tensor of the head's rows for some ids."""

    name: str
    architecture: str
    hidden_size: int
    vocab_size: int
    num_layers: int
    eos_ids: frozenset[int]
    pad_id: int | None
    tokenizer: Fields
    head_rows: Callable[[torch.Tensor], Piece]


def read_target_file(source: str | Path) -> TargetFile:
    """Of a GGUF file, a folder of the Llama or Qwen3 family, a hub name or an alias."""
    path = locate_source(source)
    return _of_file(path) if path.is_file() else _of_folder(path)


def _of_file(path: Path) -> TargetFile:
    reader = open_gguf(path)
    fields = read_fields(reader, path)
    architecture = _said(fields, "general.architecture", str, path)
    if architecture not in _TAPPED:
        raise FlashdraftError(
            f"llama.cpp (11434) takes no draft of this kind for {architecture} targets, as {path} is."
        )
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    head = tensors.get("output.weight", tensors.get("token_embd.weight"))
    if head is None or len(head.shape) != 2:
        raise FlashdraftError(f"{path} has no tensor token_embd.weight with a row for each token; expected a target.")
    width, vocab = map(int, head.shape)
    tokenizer = {key: field for key, field in fields.items() if key.startswith("tokenizer.")}
    tokens = _said(tokenizer, "tokenizer.ggml.tokens", list, path)
    if len(tokens) != vocab:
        raise FlashdraftError(f"{path} has {len(tokens):,} tokens and {vocab:,} rows for them; get the file again.")
    special = {name: fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "padding")}
    ids = {name: field.value for name, field in special.items() if field is not None and type(field.value) is int}

    def rows(chosen: torch.Tensor) -> Piece:
        def load() -> Any:
            return np.ascontiguousarray(head.data[chosen.numpy()]).view(np.uint8)

        return Piece("output.weight", (len(chosen), width), load, head.tensor_type.name)

    return TargetFile(
        str(path), architecture, width, vocab, int(_said(fields, f"{architecture}.block_count", int, path)),
        frozenset(ids[name] for name in ("eos", "eot") if name in ids), ids.get("padding"), tokenizer, rows,
    )  # fmt: skip


def _said(fields: Fields, key: str, kind: type, path: Path) -> Any:
    field = fields.get(key)
    if field is None or not isinstance(field.value, kind):
        raise FlashdraftError(f"{path} does not say its {key}; expected the GGUF file of a target.")
    return field.value


def _of_folder(path: Path) -> TargetFile:
    source = _Folder.read(path)
    tokenizer = tokenizer_fields(path, source.network.vocab_size)

    def rows(chosen: torch.Tensor) -> Piece:
        whole = source.piece(source.head, "output.weight")
        return Piece(whole.name, (len(chosen), whole.shape[1]), lambda: whole.load()[chosen])

    eos, pad = (tokenizer.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "padding"))
    return TargetFile(
        str(path), source.architecture, source.network.hidden_size, source.network.vocab_size, source.network.num_layers,
        frozenset() if eos is None else frozenset({eos.value}), None if pad is None else pad.value, tokenizer, rows,
    )  # fmt: skip


@dataclass(frozen=True)
class _Folder:
    """A checked folder of a family that is written here."""

    path: Path
    architecture: str
    network: Network
    tied: bool
    stored: Mapping[str, tuple[Path, tuple[int, ...]]]

    @classmethod
    def read(cls, path: Path) -> _Folder:
        folder = check_folder(path)
        names = folder.config.get("architectures")
        family = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else str(names)
        if family not in _FAMILIES:
            raise FlashdraftError(
                f"{path} is a {short(family)}; GGUF files of {', '.join(_FAMILIES)} are written here, so convert it with "
                f"{CONVERTER}, and name that file as the target."
            )
        tied = folder.config.get("tie_word_embeddings")
        source = cls(path, _FAMILIES[family], _network(folder, family), tied is True, _stored(path))
        source._check()
        return source

    @property
    def head(self) -> str:
        return "model.embed_tokens.weight" if self.tied else "lm_head.weight"

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every weight that there has to be."""
        net = self.network
        hidden, inner, q, kv = net.hidden_size, net.intermediate_size, net.num_heads, net.num_kv_heads
        inside = {
            "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (q * net.head_dim, hidden), "self_attn.k_proj": (kv * net.head_dim, hidden),
            "self_attn.v_proj": (kv * net.head_dim, hidden), "self_attn.o_proj": (hidden, q * net.head_dim),
            "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
        }  # fmt: skip
        if self.architecture == "qwen3":
            inside |= {"self_attn.q_norm": (net.head_dim,), "self_attn.k_norm": (net.head_dim,)}
        found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (net.vocab_size, hidden)}
        found |= {"model.norm.weight": (hidden,), self.head: (net.vocab_size, hidden)}
        for i in range(net.num_layers):
            found |= {f"model.layers.{i}.{name}.weight": shape for name, shape in inside.items()}
        return found

    def _check(self) -> None:
        shapes = self.shapes()
        extra = {n for n in self.stored.keys() - shapes if not n.endswith("inv_freq")} - {"lm_head.weight"}
        wrong = [name for name, shape in shapes.items() if name not in self.stored or self.stored[name][1] != shape]
        problems = [*wrong, *sorted(extra)]
        if problems:
            more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
            raise FlashdraftError(
                f"the weights of {self.path} are not those of its config.json: {', '.join(problems[:3])}{more}."
            )

    def piece(self, name: str, gguf_name: str) -> Piece:
        def load() -> torch.Tensor:
            with reading(self.stored[name][0]), safe_open(self.stored[name][0], framework="pt") as part:
                found: torch.Tensor = part.get_tensor(name)
            return self._turned(name, found)

        return Piece(gguf_name, self.shapes()[name], load)

    def _turned(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """llama.cpp rotates neighbours in Llama's heads, Hugging Face number i with i + d/2: rows change places."""
        heads = {"q_proj": self.network.num_heads, "k_proj": self.network.num_kv_heads}.get(name.split(".")[-2])
        if self.architecture != "llama" or heads is None:
            return weight
        rows = weight.shape[0] // heads
        return weight.reshape(heads, 2, rows // 2, -1).transpose(1, 2).reshape(weight.shape)

    def pieces(self) -> list[Piece]:
        plain = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
        if not self.tied:
            plain["lm_head.weight"] = "output.weight"
        found = [self.piece(name, theirs) for name, theirs in plain.items()] + self.network.rope_pieces()
        for name in self.shapes():
            if name.startswith("model.layers."):
                number, inner = name.removeprefix("model.layers.").removesuffix(".weight").split(".", 1)
                found.append(self.piece(name, f"blk.{number}.{LAYER_NAMES[inner]}.weight"))
        return found


def _network(folder: ModelFolder, family: str) -> Network:
    """Sizes from config.json; what changes the network and is not written is refused."""
    keys = Keys(folder.config)
    heads, hidden = keys.integer("num_attention_heads"), keys.integer("hidden_size")
    found = Network(
        hidden_size=hidden,
        intermediate_size=keys.integer("intermediate_size"),
        num_layers=keys.integer("num_hidden_layers", most=512),
        num_heads=heads,
        num_kv_heads=keys.integer("num_key_value_heads", default=heads),
        head_dim=keys.integer("head_dim", default=128 if family == "Qwen3ForCausalLM" else max(1, hidden // heads)),
        vocab_size=keys.integer("vocab_size"),
        max_context=keys.integer("max_position_embeddings"),
        rms_norm_eps=keys.number("rms_norm_eps", 1e-6),
        rope=read_rope(keys),
    )
    plain = {"attention_bias": False, "mlp_bias": False, "use_sliding_window": False, "hidden_act": "silu"}
    for name, value in plain.items():
        if folder.config.get(name) not in (None, value):
            keys.problem(name, folder.config[name], short(value))
    if folder.config.get("quantization_config"):
        keys.problems.append("its weights are quantised")
    if keys.problems:
        raise FlashdraftError(
            f"{folder.path} cannot be written as GGUF here: {'; '.join(keys.problems)}; {CONVERTER} knows more."
        )
    return found


def _stored(path: Path) -> dict[str, tuple[Path, tuple[int, ...]]]:
    """File and shape of every tensor of a folder."""
    found: dict[str, tuple[Path, tuple[int, ...]]] = {}
    for file in weight_files(path):
        with reading(file), safe_open(file, framework="pt") as part:
            found |= {name: (file, tuple(part.get_slice(name).get_shape())) for name in part.keys()}  # noqa: SIM118
    return found


def export_target(target: str | Path, out: str | Path, kind: str | None = None) -> Path:
    """Write a target's GGUF file, and read it back. A GGUF file or alias is copied as it is.

    Args:
        kind: one of TARGET_KINDS, f16 if it is None; for a GGUF file None.
    """
    path, to = locate_source(target), Path(out).expanduser()
    if path.is_file():
        if kind is not None:
            raise FlashdraftError(
                f"{path} is a GGUF file already and is used as it is, not as {kind}; llama.cpp's llama-quantize makes "
                "other types."
            )
        return _copied(path, to)
    source = _Folder.read(path)
    fields = {
        "general.type": text("model"),
        "general.name": text(path.resolve().name),
        "general.quantization_version": uint(2),
        **source.network.fields(source.architecture),
        **tokenizer_fields(path, source.network.vocab_size),
    }
    return write_gguf(to, source.architecture, fields, source.pieces(), check_kind(kind or "f16", TARGET_KINDS))


def _copied(path: Path, out: Path) -> Path:
    read_header(path)
    if out.exists() and out.samefile(path):
        return out
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".gguf-", dir=out.parent) as stage:
            copy = Path(stage) / out.name
            shutil.copyfile(path, copy)
            if not filecmp.cmp(path, copy, shallow=False):
                raise OSError("the copy differs from the file")
            copy.replace(out)
    except OSError as error:
        raise FlashdraftError(f"{out} cannot be written: {one_line(error)}.") from error
    return out


__all__ = ["KINDS", "TARGET_KINDS", "Field", "Network", "TargetFile", "export_target", "read_target_file"]
