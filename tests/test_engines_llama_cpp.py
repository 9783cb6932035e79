"""GGUF files for llama.cpp: drafts and targets are written, read by other readers, and damaged ones refused.

That llama.cpp itself runs them is proved by scripts/engines_llama_cpp.py, whose counting is tested here, on a server
that is made up.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import random
import resource
import signal
import struct
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch

from bed import CONFIGS, draft_config, make_model
from cli_bed import save_target, trained_tokenizer
from flashdraft import checkpoint
from flashdraft.drafters.layers import rope_frequencies
from flashdraft.engines import gguf_file
from flashdraft.engines.gguf_file import Field, Piece, check_gguf, open_gguf, read_fields, write_gguf
from flashdraft.engines.gguf_target import read_target_file
from flashdraft.engines.llama_cpp import KINDS, export_draft, export_target, refusals
from flashdraft.evaluation.tasks import TaskPrompt
from flashdraft.target import Target
from flashdraft.types import FlashdraftError

gguf = pytest.importorskip("gguf")

# What a number may be off, as a share of the tensor's largest; the types round to 127, 16 and 8 steps.
NEAR = {
    "f32": 0.0,
    "f16": 2.0**-10,
    "bf16": 2.0**-8,
    "q8_0": 1 / 200,
    "q5_1": 1 / 25,
    "q5_0": 1 / 14,
    "q4_1": 1 / 13,
    "q4_0": 1 / 7,
}


def contents(file: Path) -> dict[str, Any]:
    return {key: field.contents() for key, field in gguf.GGUFReader(file).fields.items()}


def stored(file: Path) -> dict[str, tuple[str, torch.Tensor]]:
    """Type and numbers of every tensor, unpacked by gguf."""
    found = {}
    for tensor in gguf.GGUFReader(file).tensors:
        kind = tensor.tensor_type.name.lower()
        data = np.array(tensor.data)
        numbers = data if kind == "i64" else gguf.quants.dequantize(data, tensor.tensor_type)
        found[tensor.name] = (
            kind,
            torch.from_numpy(np.array(numbers)).reshape([int(n) for n in reversed(tensor.shape)]),
        )
    return found


def sentence(call: Any, *args: Any, **options: Any) -> str:
    with pytest.raises(FlashdraftError) as caught:
        call(*args, **options)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.fixture(scope="module")
def target_gguf(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_target(folder, tmp_path_factory.mktemp("gguf") / "target.gguf", "f32")


@pytest.fixture(scope="module")
def reduced(draft: Path, target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The draft, made for every third token."""
    config, weights = checkpoint.read(draft)
    out = tmp_path_factory.mktemp("reduced")
    checkpoint.write(out, config, weights, vocab_ids=torch.arange(1, target.vocab_size, 3))
    return out


# Drafts

NAMES = {
    "fc.weight": "fc.weight",
    "hidden_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "layers.1.input_layernorm.weight": "blk.1.attn_norm.weight",
    "layers.1.post_attention_layernorm.weight": "blk.1.ffn_norm.weight",
    "layers.1.self_attn.q_proj.weight": "blk.1.attn_q.weight",
    "layers.1.self_attn.k_proj.weight": "blk.1.attn_k.weight",
    "layers.1.self_attn.v_proj.weight": "blk.1.attn_v.weight",
    "layers.1.self_attn.o_proj.weight": "blk.1.attn_output.weight",
    "layers.1.self_attn.q_norm.weight": "blk.1.attn_q_norm.weight",
    "layers.1.self_attn.k_norm.weight": "blk.1.attn_k_norm.weight",
    "layers.1.mlp.gate_proj.weight": "blk.1.ffn_gate.weight",
    "layers.1.mlp.up_proj.weight": "blk.1.ffn_up.weight",
    "layers.1.mlp.down_proj.weight": "blk.1.ffn_down.weight",
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_in_every_type(kind: str, draft: Path, target_gguf: Path, tmp_path: Path) -> None:
    """Names are llama.cpp's, the rows of q and k stay where they are, vectors are f32, and rows of 40 numbers, which are no
    blocks of 32, are f16 in quantised files."""
    found = stored(export_draft(draft, target_gguf, tmp_path / "draft.gguf", kind))
    weights = checkpoint.read(draft)[1]
    names = NAMES | {ours.replace(".1.", ".0."): theirs.replace(".1.", ".0.") for ours, theirs in NAMES.items()}
    assert names.keys() == weights.keys() and set(names.values()) == found.keys()
    for ours, theirs in names.items():
        own, numbers = found[theirs]
        wanted = weights[ours]
        expected = "f32" if wanted.ndim == 1 else "f16" if kind.startswith("q") and wanted.shape[1] % 32 else kind
        assert own == expected, theirs
        assert numbers.shape == wanted.shape
        assert (numbers - wanted).abs().max() <= NEAR[own] * wanted.abs().max(), theirs


def test_what_a_draft_file_says(draft: Path, target_gguf: Path, tmp_path: Path) -> None:
    """llama.cpp counts layers by their inputs (ours plus one), and knows the mask token by the tokenizer alone."""
    config = checkpoint.read(draft)[0]
    said = contents(export_draft(draft, target_gguf, tmp_path / "draft.gguf", "q8_0"))
    assert {key: said[key] for key in said if key.startswith(("dflash.", "general.")) and key != "general.name"} == {
        "general.architecture": "dflash",
        "general.type": "model",
        "general.quantization_version": 2,
        "general.file_type": 7,
        "dflash.vocab_size": config.vocab_size,
        "dflash.context_length": 256,
        "dflash.embedding_length": 32,
        "dflash.feed_forward_length": 40,
        "dflash.block_count": 2,
        "dflash.attention.head_count": 4,
        "dflash.attention.head_count_kv": 2,
        "dflash.attention.key_length": 8,
        "dflash.attention.value_length": 8,
        "dflash.attention.layer_norm_rms_epsilon": pytest.approx(1e-6),
        "dflash.rope.dimension_count": 8,
        "dflash.rope.freq_base": 10000.0,
        "dflash.block_size": 8,
        "dflash.target_layers": [1, 2],
    }
    theirs = {key: value for key, value in contents(target_gguf).items() if key.startswith("tokenizer.")}
    ours = {key: value for key, value in said.items() if key.startswith("tokenizer.")}
    assert ours == {**theirs, "tokenizer.ggml.mask_token_id": config.mask_token_id}
    assert len(theirs["tokenizer.ggml.tokens"]) == config.vocab_size and "tokenizer.ggml.merges" in theirs


def test_a_folder_and_its_file_give_the_same_draft(
    draft: Path, folder: Path, target_gguf: Path, tmp_path: Path
) -> None:
    one = export_draft(draft, folder, tmp_path / "one.gguf", "bf16")
    other = export_draft(draft, target_gguf, tmp_path / "other.gguf", "bf16")
    assert one.read_bytes() == other.read_bytes()


def test_rows_for_a_part_of_the_vocabulary(
    reduced: Path, folder: Path, target: Target, target_gguf: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Left out and said, or written with the target's id of each (not the difference, as in safetensors)."""
    caplog.set_level("INFO", logger="flashdraft")
    plain = stored(export_draft(reduced, folder, tmp_path / "plain.gguf"))
    assert "own_rows" in caplog.text and not {"output.weight", "d2t"} & plain.keys()
    ids = torch.arange(1, target.vocab_size, 3)
    head = target.head_rows(ids)[0]
    for source, kind, near in ((folder, "q8_0", 1 / 200), (folder, "f32", 0), (target_gguf, "q4_0", 0)):
        found = stored(export_draft(reduced, source, tmp_path / "rows.gguf", kind, own_rows=True))
        assert found["d2t"][0] == "i64" and torch.equal(found["d2t"][1], ids)
        # a target's file keeps its own type: the rows are the very ones it decodes with
        assert found["output.weight"][0] == ("f32" if source == target_gguf else kind)
        assert (found["output.weight"][1] - head).abs().max() <= near * head.abs().max()


def test_rows_are_cut_from_a_quantised_head(reduced: Path, folder: Path, tmp_path: Path) -> None:
    whole = export_target(folder, tmp_path / "target.gguf", "q8_0")
    rows = stored(export_draft(reduced, whole, tmp_path / "draft.gguf", "f32", own_rows=True))["output.weight"]
    assert rows[0] == "q8_0" and torch.equal(rows[1], stored(whole)["output.weight"][1][1::3])


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"causal": (True, False), "windows": (16, None)}, "one word for all of them"),
        ({"windows": (16, 8)}, "one size for all of them"),
        ({"from_anchor": True}, "one place off"),
        ({"attention_bias": True}, "biases"),
        ({"context": "fused"}, "without one of its parts"),
        ({"autoregressive": True}, "without one of its parts"),
        ({"block_size": 1}, "drafts nothing"),
        ({"windows": (None,) * 513, "causal": (False,) * 513}, "at most 512"),
        ({"windows": (16, None), "causal": (True, True)}, ""),
        ({"windows": (16, 16)}, ""),
        ({"softcap": 30.0, "output_multiplier": 0.5, "embedding_scale": 2.0}, ""),
    ],
)
def test_what_llama_cpp_cannot_say_is_refused(changes: dict[str, Any], part: str, target: Target) -> None:
    """One word says for all layers whether they are causal, and so on. It drafts the likeliest token, so caps are harmless."""
    problems = refusals(dataclasses.replace(draft_config(target), **changes))
    assert len(problems) == (1 if part else 0) and part in " ".join(problems)


def test_a_refused_draft_writes_nothing(target: Target, folder: Path, tmp_path: Path) -> None:
    config = dataclasses.replace(draft_config(target), attention_bias=True)
    weights = {name: torch.randn(shape) for name, shape in checkpoint.tensor_shapes(config).items()}
    checkpoint.write(tmp_path / "draft", config, weights)
    text = sentence(export_draft, tmp_path / "draft", folder, tmp_path / "draft.gguf")
    assert "cannot go to llama.cpp: its attention has biases" in text
    assert sorted(file.name for file in tmp_path.iterdir()) == ["draft"]


def test_windows_and_scales(target: Target, folder: Path, tmp_path: Path) -> None:
    config = draft_config(
        target, windows=(16, None), causal=(True, True), softcap=30.0, output_multiplier=0.5, embedding_scale=2.0,
        rope={"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 64},
    )  # fmt: skip
    weights = {name: torch.randn(shape) for name, shape in checkpoint.tensor_shapes(config).items()}
    checkpoint.write(tmp_path / "draft", config, weights)
    said = contents(export_draft(tmp_path / "draft", folder, tmp_path / "draft.gguf"))
    wanted = {
        "attention.causal": True, "attention.sliding_window": 16, "attention.sliding_window_pattern": [True, False],
        "final_logit_softcapping": 30.0, "logit_scale": 0.5, "embedding_scale": 2.0, "rope.freq_base": 5e5,
        "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64,
        "rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_beta_slow": 1.0,
    }  # fmt: skip
    assert {key: said[f"dflash.{key}"] for key in wanted} == wanted
    odd = dataclasses.replace(config, rope={**config.rope, "attention_factor": 1.5})
    checkpoint.write(tmp_path / "draft", odd, weights)
    assert "YaRN says attention_factor" in sentence(export_draft, tmp_path / "draft", folder, tmp_path / "odd.gguf")


def test_llama_3_rope_is_a_tensor(target: Target, folder: Path, tmp_path: Path) -> None:
    """llama.cpp divides the plain frequencies by it; without it long contexts would be read at wrong places."""
    rope = {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    config = draft_config(target, rope=rope)
    weights = {name: torch.randn(shape) for name, shape in checkpoint.tensor_shapes(config).items()}
    checkpoint.write(tmp_path / "draft", config, weights)
    kind, factors = stored(export_draft(tmp_path / "draft", folder, tmp_path / "draft.gguf"))["rope_freqs.weight"]
    plain = rope_frequencies({"rope_theta": 10000.0}, 8, 256)[0]
    assert kind == "f32" and torch.allclose(plain / factors, rope_frequencies(rope, 8, 256)[0])
    assert 1 <= factors.min() < factors.max() <= 8.001


def test_a_draft_of_another_target(draft: Path, tmp_path: Path) -> None:
    other = save_target(tmp_path / "other", hidden_size=64)
    text = sentence(export_draft, draft, export_target(other, tmp_path / "other.gguf"), tmp_path / "draft.gguf")
    assert "hidden size 32, the target has 64" in text
    assert "hidden size 32, the target has 64" in sentence(export_draft, draft, other, tmp_path / "draft.gguf")


# Targets


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHDRAFT_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("family", ["llama", "qwen3", "llama tied"])
def test_a_target_is_read_back_by_transformers(family: str, tmp_path: Path, own_cache: None) -> None:
    """An independent reader: rows of Llama's q and k change places on the way out and on the way back."""
    tokenizer = trained_tokenizer()
    # of Qwen3's files transformers reads no other head size
    heads = {"head_dim": 128} if family == "qwen3" else {}
    config = CONFIGS[family.split()[0]](
        **heads,
        vocab_size=len(tokenizer),
        max_position_embeddings=512,
        tie_word_embeddings="tied" in family,
        rope_theta=50000.0,
    )
    model = make_model(config, torch.bfloat16)
    model.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    file = export_target(tmp_path / "target", tmp_path / "target.gguf", "bf16")
    again = Target.load(file, dtype="bfloat16", device="cpu")
    weights, read = model.state_dict(), again.model.state_dict()
    assert {name for name in weights if not torch.equal(weights[name], read[name].to(weights[name].dtype))} == set()
    text = "The boats leave </s> the harbour\n\n  at 12345!"
    assert again.tokenizer(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert again.tokenizer.chat_template == tokenizer.chat_template
    assert again.tokenizer.eos_token_id == 2 and again.model.config.rope_parameters["rope_theta"] == 50000.0


def test_a_gguf_file_is_a_target_as_it_is(target_gguf: Path, tmp_path: Path) -> None:
    out = export_target(target_gguf, tmp_path / "new" / "copy.gguf")
    assert out.read_bytes() == target_gguf.read_bytes()
    assert export_target(out, out) == out
    assert "used as it is" in sentence(export_target, target_gguf, tmp_path / "copy.gguf", "f16")


def test_types_that_are_not_written(draft: Path, folder: Path, target_gguf: Path, tmp_path: Path) -> None:
    for kind in ("q4_k", "Q6_K", "iq4_xs"):
        assert "llama-quantize makes that type" in sentence(export_draft, draft, folder, tmp_path / "x.gguf", kind)
    assert "llama-quantize makes that type" in sentence(export_target, folder, tmp_path / "x.gguf", "q4_0")
    text = sentence(export_draft, draft, folder, tmp_path / "x.gguf", "int8")
    assert "expected one of f32, f16, bf16" in text and "llama-quantize" not in text
    assert list(tmp_path.iterdir()) == []


def test_targets_that_are_not_written(draft: Path, folder: Path, tmp_path: Path) -> None:
    """Another family, other parts of the network, other tokenizers: named, and llama.cpp's converter with them."""
    make_model(CONFIGS["qwen2"](vocab_size=320), torch.float32).save_pretrained(tmp_path / "qwen2")
    trained_tokenizer().save_pretrained(tmp_path / "qwen2")
    assert "is a 'Qwen2ForCausalLM'" in sentence(export_target, tmp_path / "qwen2", tmp_path / "x.gguf")
    assert "convert_hf_to_gguf.py" in sentence(export_draft, draft, tmp_path / "qwen2", tmp_path / "x.gguf")
    biased = save_target(tmp_path / "biased", attention_bias=True)
    assert "attention_bias is True, expected False" in sentence(export_target, biased, tmp_path / "x.gguf")
    odd = save_target(tmp_path / "odd")
    split = trained_tokenizer()
    split.backend_tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [tokenizers.pre_tokenizers.Punctuation(), tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    split.save_pretrained(odd)
    assert "none that can be written as GGUF here" in sentence(export_target, odd, tmp_path / "x.gguf")


@pytest.mark.parametrize("architecture", ["gemma3", "qwen2"])
def test_targets_that_llama_cpp_gives_no_states_of(architecture: str, draft: Path, tmp_path: Path) -> None:
    fields = {"tokenizer.ggml.tokens": Field(["a"] * 320, "string")}
    rows = Piece("token_embd.weight", (320, 32), lambda: torch.zeros(320, 32))
    file = write_gguf(tmp_path / "target.gguf", architecture, fields, [rows], "f32")
    assert f"no draft of this kind for {architecture} targets" in sentence(
        export_draft, draft, file, tmp_path / "x.gguf"
    )


def test_splitting_names() -> None:
    """A text split in another way becomes other tokens, and nobody is told."""
    from flashdraft.engines.gguf_tokenizer import _splitting

    pre = tokenizers.pre_tokenizers
    words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    raw, spaced = pre.ByteLevel(add_prefix_space=False, use_regex=False), pre.ByteLevel(add_prefix_space=True)

    def named(*parts: Any, **model: Any) -> str:
        core = tokenizers.Tokenizer(tokenizers.models.BPE(**model))
        core.pre_tokenizer = pre.Sequence(list(parts)) if len(parts) > 1 else parts[0]
        return _splitting(json.loads(core.to_str()), Path("folder"))

    def split(regex: str) -> Any:
        return pre.Split(tokenizers.Regex(regex), "isolated")

    assert named(split(words), raw) == "llama-bpe"
    assert named(split(words.replace("{1,3}", "")), raw) == "qwen2"
    assert named(pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)) == "smollm"
    assert named(pre.ByteLevel(add_prefix_space=False)) == "gpt-2"
    for parts in ((raw,), (spaced,), (pre.Digits(), pre.ByteLevel(add_prefix_space=False)), (split(r"\s+"), raw)):
        assert "none that can be written" in sentence(named, *parts)
    assert "none that can be written" in sentence(named, pre.ByteLevel(add_prefix_space=False), byte_fallback=True)


# Files


def pieces(**tensors: torch.Tensor) -> list[Piece]:
    return [Piece(name, tuple(t.shape), lambda t=t: t) for name, t in tensors.items()]  # type: ignore[misc]


def test_what_is_written_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug in between shows before the file has its name; the older file stays."""
    torch.manual_seed(0)
    out, fields = tmp_path / "a.gguf", {"x.y": Field([1, 2], "int32"), "x.z": Field(0.1, "float32")}
    fields["general.file_type"] = Field(KINDS["q4_0"], "uint32")
    kept = pieces(w=torch.randn(4, 64), v=torch.randn(64))
    write_gguf(out, "x", fields, kept, "q4_0")
    before = out.read_bytes()
    check_gguf(out, "x", fields, kept, "q4_0")
    for other in (
        {"fields": {**fields, "x.y": Field([1, 3], "int32")}},
        {"fields": {key: field for key, field in fields.items() if key != "x.y"}},
        {"fields": {**fields, "x.z": Field(0.2, "float32")}},
        {"pieces": kept[:1]},
        {"pieces": pieces(w=kept[0].load() + 0.5, v=kept[1].load())},
        {"pieces": pieces(w=kept[0].load(), v=kept[1].load() * 1.0001)},
        {"kind": "q8_0"},
    ):
        case = {"fields": fields, "pieces": kept, "kind": "q4_0", **other}
        assert "reads back with other content" in sentence(
            check_gguf, out, "x", case["fields"], case["pieces"], case["kind"]
        )
    packed = gguf_file.packed
    monkeypatch.setattr(gguf_file, "packed", lambda piece, kind: packed(piece, kind)[::-1].copy())
    assert "reads back with other content (w)" in sentence(write_gguf, out, "x", fields, kept[:1], "f16")
    assert out.read_bytes() == before and list(tmp_path.iterdir()) == [out]


def test_numbers_that_a_type_cannot_hold(tmp_path: Path) -> None:
    out = tmp_path / "a.gguf"
    assert "not finite" in sentence(write_gguf, out, "x", {}, pieces(w=torch.full((2, 32), float("nan"))), "f32")
    assert "more than f16 can; write bf16" in sentence(
        write_gguf, out, "x", {}, pieces(w=torch.full((2, 32), 1e5)), "f16"
    )
    write_gguf(out, "x", {}, pieces(w=torch.full((2, 32), 1e5), tiny=torch.full((2, 32), 1e-42)), "bf16")
    write_gguf(out, "x", {}, pieces(tiny=torch.full((2, 32), 1e-42), zero=torch.zeros(2, 32)), "q4_0")


def test_without_the_package(draft: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_file.importlib.util, "find_spec", lambda name: None)
    assert "pip install 'flashdraft[gguf]'" in sentence(export_draft, draft, folder, tmp_path / "x.gguf")


def small_gguf(file: Path) -> bytes:
    """A whole target file in a few kilobytes, so that every part of it is hit."""
    names = [*"abcdefghijkl", "<s>", "</s>", "ab", "abc"]
    fields = {
        "llama.block_count": Field(1, "uint32"),
        "llama.rope.freq_base": Field(1e4, "float32"),
        "tokenizer.ggml.model": Field("gpt2", "string"),
        "tokenizer.ggml.tokens": Field(names, "string"),
        "tokenizer.ggml.scores": Field([0.5] * 16, "float32"),
        "tokenizer.ggml.token_type": Field([1] * 16, "int32"),
        "tokenizer.ggml.merges": Field(["a b", "ab c"], "string"),
        "tokenizer.ggml.eos_token_id": Field(13, "uint32"),
        "tokenizer.ggml.add_bos_token": Field(True, "bool"),
    }
    tensors = {
        "token_embd.weight": torch.randn(16, 32), "blk.0.attn_q.weight": torch.randn(4, 32), "output_norm.weight": torch.ones(32)
    }  # fmt: skip
    return write_gguf(file, "llama", fields, pieces(**tensors), "q8_0").read_bytes()


def mutants(original: bytes, count: int) -> Iterator[bytes]:
    """Bytes set, numbers made extreme, parts cut out, doubled or exchanged, ends cut off."""
    rng = random.Random(0)
    extremes = [0, 1, 2, 9, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**60, 2**63 - 1, 2**63, 2**64 - 1]
    for _ in range(count):
        data = bytearray(original)
        for _ in range(rng.choice((1, 1, 2, 4))):
            if len(data) < 8:
                break
            at, size = rng.randrange(len(data)), rng.randrange(1, 40)
            way = rng.randrange(7)
            if way < 2:
                data[at] = rng.choice((0, 1, 8, 9, 0x7F, 0x80, 0xFF, rng.randrange(256)))
            elif way == 2:
                data[at : at + 8] = struct.pack("<Q", rng.choice(extremes))
            elif way == 3:
                data[at : at + 4] = struct.pack("<I", rng.choice(extremes) & 0xFFFFFFFF)
            elif way == 4:
                del data[at : at + size]
            elif way == 5:
                data[at:at] = data[at : at + size]
            else:
                data = data[: max(1, at)]
        yield bytes(data)


def test_5000_damaged_files(tmp_path: Path) -> None:
    """Every one is a sentence of ours or a target, within 2 s of this process's time and without much memory."""

    def late(number: int, frame: FrameType | None) -> None:
        raise TimeoutError

    torch.manual_seed(0)
    original = small_gguf(tmp_path / "good.gguf")
    assert read_target_file(tmp_path / "good.gguf").vocab_size == 16
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    older, read, said = signal.signal(signal.SIGVTALRM, late), 0, set()
    try:
        for number, data in enumerate(mutants(original, 5000)):
            file = tmp_path / f"{number}.gguf"
            file.write_bytes(data)
            signal.setitimer(signal.ITIMER_VIRTUAL, 2)
            try:
                host = read_target_file(file)
                host.head_rows(torch.tensor([0, host.vocab_size - 1])).load()
                read += 1
            except FlashdraftError as error:
                assert "\n" not in str(error)
                said.add(str(error).split(": ", 1)[-1][:24])
            finally:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            file.unlink()
    finally:
        signal.signal(signal.SIGVTALRM, older)
    assert 100 < read < 3000 and len(said) > 10  # it is neither all harmless nor all refused at the first byte
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


def test_an_open_file_is_read_once_more(target_gguf: Path) -> None:
    fields = read_fields(open_gguf(target_gguf), target_gguf)
    assert fields["llama.block_count"] == Field(3, "uint32")
    assert fields["tokenizer.ggml.token_type"].kind == "int32" and "GGUF.version" not in fields


# The script, on a server that is made up


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "scripts"))
    yield importlib.import_module("engines_llama_cpp")
    for name in [name for name in sys.modules if name.startswith("engines_")]:
        sys.modules.pop(name, None)


class MadeUpServer:
    """Says 10 + i at place i of every answer; keeps two tokens of each draft; `odd` = (arm, prompt, place) says another."""

    def __init__(
        self, script: Any, monkeypatch: pytest.MonkeyPatch, gap: float = 0.01, fails_after: int = 10**9
    ) -> None:
        self.script, self.gap, self.left = script, gap, fails_after
        self.odd: tuple[str, int, int] | None = None
        self.checked, self.asked, self.commands = 0, [], []
        self.arm = ""
        monkeypatch.setattr(script, "serving", self.serving)
        monkeypatch.setattr(script, "ask", self.ask)
        monkeypatch.setattr(script, "rounds", lambda url: self.checked)
        monkeypatch.setattr(script, "export", lambda folder, kind: None)
        monkeypatch.setattr(script, "decode_here", self.decode_here)

    @contextlib.contextmanager
    def serving(self, command: list[str], url: str) -> Iterator[None]:
        self.commands.append(command)
        self.arm = command[command.index("--spec-draft-n-max") + 1] if "-md" in command else "plain"
        yield

    def ask(self, url: str, ids: Sequence[int], tokens: int, **more: Any) -> dict[str, Any]:
        if "n_probs" in more:
            top = [{"logprob": -1.0}, {"logprob": -1.0 - self.gap}]
            return {"completion_probabilities": [{"top_logprobs": top}]}
        if tokens == 8:
            return {}
        self.left -= 1
        if self.left < 0:
            raise ConnectionError
        self.asked.append((self.arm, ids[0]))
        said = [10 + i for i in range(tokens)]
        if self.odd is not None and self.odd[:2] == (self.arm, ids[0]):
            said[self.odd[2]] += 1
        times = {"predicted_n": tokens, "predicted_ms": 1000.0 if self.arm == "plain" else 500.0}
        if self.arm != "plain":
            drafts = (tokens - 1) // 3
            self.checked += drafts
            times |= {"draft_n": 5 * drafts, "draft_n_accepted": 2 * drafts}
        return {"tokens": said, "timings": times}

    def decode_here(self, records: Any, settings: Any, target: Any, block_size: int, accepted: int = 19) -> None:
        for drafted in range(1, block_size):
            for prompt in settings.prompts:
                records.add(
                    f"flashdraft {drafted}", 0, self.script.key(prompt), tokens=[], rounds=10, accepted=accepted
                )


@pytest.fixture
def settings(script: Any) -> Any:
    prompts = tuple(TaskPrompt("t", f"p{i}", (), (i, 5)) for i in range(3))
    return script.Settings(prompts, tokens=31, runs=2, kind="q8_0", threads=1)


def test_the_script_counts(script: Any, settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = MadeUpServer(script, monkeypatch)
    found = script.prove(tmp_path, Path("llama-server"), settings, None)
    assert [row["arm"] for row in found["arms"]] == ["plain", *(f"draft {n}" for n in range(1, 8)), "whole 5"]
    assert found["problems"] == [] and found["texts"] == "54 of 54"
    plain, first = found["arms"][:2]
    assert plain["tokens a second"] == 31.0 and first["tokens a second"] == 62.0 and first["ratio"] == 2.0
    assert first["length"] == 3.0 and first["ours"] == pytest.approx(2.9)
    line = " ".join(server.commands[1])
    assert "draft-q8_0.gguf --spec-type draft-dflash --spec-draft-n-max 1" in line and "-md" not in server.commands[0]
    text = script.markdown(found)
    assert (
        "| draft 5 | 6 of 6 | 3.00 | 2.90 | 62.0 | 2.00 |" in text
        and "| plain | 6 of 6 | - | - | 31.0 | 1.00 |" in text
    )
    assert json.loads((tmp_path / "result.json").read_text()) == found


def test_a_stopped_script_goes_on(script: Any, settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No answer is asked for twice, and half a line at the end is no answer."""
    first = MadeUpServer(script, monkeypatch, fails_after=20)
    with pytest.raises(ConnectionError):
        script.prove(tmp_path, Path("llama-server"), settings, None)
    with (tmp_path / "records.jsonl").open("a") as out:
        out.write('{"arm": "draft 7", "run": 0, "prom')
    second = MadeUpServer(script, monkeypatch)
    found = script.prove(tmp_path, Path("llama-server"), settings, None)
    assert len(first.asked) == 20 and len(second.asked) == 54 - 20 and found["texts"] == "54 of 54"
    other = dataclasses.replace(settings, tokens=30)
    with pytest.raises(SystemExit, match="other prompts or settings"):
        script.prove(tmp_path, Path("llama-server"), other, None)


@pytest.mark.parametrize(("gap", "wrong"), [(0.01, 0), (0.5, 2)])
def test_texts_that_differ_are_ties_or_problems(
    gap: float, wrong: int, script: Any, settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    MadeUpServer(script, monkeypatch, gap=gap).odd = ("3", 1, 7)
    found = script.prove(tmp_path, Path("llama-server"), settings, None)
    assert [(t["arm"], t["prompt"], t["token"]) for t in found["ties"]] == [("draft 3", "t p1", 7)] * 2
    assert [t["gap"] for t in found["ties"]] == pytest.approx([gap] * 2)
    assert len(found["problems"]) == wrong and found["texts"] == "52 of 54"
    assert "t p1 parts at token 7" in script.markdown(found)


def test_another_acceptance_is_a_problem(
    script: Any, settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = MadeUpServer(script, monkeypatch)
    monkeypatch.setattr(script, "decode_here", lambda *args: server.decode_here(*args, accepted=16))
    found = script.prove(tmp_path, Path("llama-server"), settings, None)
    assert len(found["problems"]) == 7 and "acceptance length 3.000, ours is 2.600" in found["problems"][0]


def test_first_differences(script: Any) -> None:
    assert script.first_difference([1, 2], [1, 2]) is None
    assert script.first_difference([1, 2, 3], [1, 4, 3]) == 1
    assert script.first_difference([1, 2], [1, 2, 3]) == script.first_difference([1, 2, 3], [1, 2]) == 2
