"""Drafts to other engines' layouts and back: the same weights and configuration, or one sentence why not."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from bed import CONFIGS, PROMPTS, VOCAB, decode, draft_config, make_model, random_network, tiny_target
from cli_bed import Call, save_draft
from flashdraft import checkpoint, cli
from flashdraft.checkpoint import DraftConfig, parse_config, tensor_shapes
from flashdraft.drafters import make_drafter
from flashdraft.drafters.dflash import DFlashDrafter
from flashdraft.drafters.layers import rope_frequencies
from flashdraft.engines.assistant import DFlashAssistant
from flashdraft.engines.layouts import portable
from flashdraft.engines.target_facts import read_target
from flashdraft.engines.transfer import export_draft, import_draft
from flashdraft.target import Target
from flashdraft.types import FlashdraftError
from rivals import Recorder
from test_checkpoint import GOOD_KINDS, QWEN3_4B, ROPES

FOLDERS = ("vllm", "sglang", "speculators", "zlab")
LAYERS, WIDTH = 9, 6


def fake_target(folder: Path, vocab: int = 40, **changes: Any) -> Path:
    """What an export reads of a target: JSON, and the two tables."""
    folder.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": WIDTH, "vocab_size": vocab,
        "num_hidden_layers": LAYERS, "max_position_embeddings": 4096, "eos_token_id": 2, **changes,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": 1, "content": "<s>"}]}))
    torch.manual_seed(vocab)
    tables = {name: torch.randn(vocab, WIDTH).bfloat16() for name in ("model.embed_tokens.weight", "lm_head.weight")}
    save_file(tables | {f"{i}": torch.zeros(1) for i in range(LAYERS)}, folder / "model.safetensors")
    return folder


@st.composite
def configs(draw: st.DrawFn) -> DraftConfig:
    windows, causal = draw(GOOD_KINDS)
    kv_heads = draw(st.integers(1, 2))
    taps = draw(st.lists(st.integers(0, LAYERS - 2), min_size=1, max_size=4, unique=True))
    ones = st.just(1.0)
    return DraftConfig(
        hidden_size=WIDTH, intermediate_size=draw(st.integers(1, 9)), num_heads=kv_heads * draw(st.integers(1, 2)),
        num_kv_heads=kv_heads, head_dim=2 * draw(st.integers(1, 3)), vocab_size=40,
        target_layer_ids=tuple(sorted(taps)), num_target_layers=draw(st.sampled_from([0, LAYERS])),
        block_size=draw(st.integers(2, 64)), mask_token_id=draw(st.integers(3, 39)), windows=windows, causal=causal,
        max_context=draw(st.integers(1, 10**6)), rms_norm_eps=draw(st.floats(1e-12, 1)),
        attention_bias=draw(st.booleans()), rope=draw(ROPES), embedding_scale=draw(ones | ones | st.floats(2, 9)),
        output_multiplier=draw(ones | ones | st.floats(2, 9)), softcap=draw(st.none() | st.none() | st.floats(1, 50)),
        from_anchor=draw(st.sampled_from([False] * 5 + [True])),
    )  # fmt: skip


def cannot_go(engine: str, config: DraftConfig) -> bool:
    """FORMATS, said again: what the engine has no word for."""
    if config.from_anchor and engine != "speculators":
        return True
    if engine != "zlab" and config.embedding_scale != 1:
        return True
    if engine in ("vllm", "speculators") and (config.output_multiplier != 1 or config.softcap is not None):
        return True
    full = [c for c, w in zip(config.causal, config.windows, strict=True) if w is None]
    return engine == "speculators" and any(full)


def random_weights(config: DraftConfig, seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Any bits, nan and infinity among them."""
    torch.manual_seed(seed)
    kind = torch.int16 if dtype.itemsize == 2 else torch.int32
    return {
        name: torch.randint(-(2**15), 2**15, shape, dtype=kind).view(dtype)
        for name, shape in tensor_shapes(config).items()
    }


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[k].dtype == other[k].dtype and torch.equal(one[k].view(torch.uint8), other[k].view(torch.uint8))
        for k in one
    )


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_target(tmp_path_factory.mktemp("models") / "target")


@pytest.mark.parametrize("engine", FOLDERS)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    config=configs(), seed=st.integers(0, 99), dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    ids=st.none() | st.sets(st.integers(0, 39), min_size=1, max_size=30), own_rows=st.booleans(), named=st.booleans(),
)  # fmt: skip
def test_there_and_back(
    engine: str, config: DraftConfig, seed: int, dtype: torch.dtype, ids: set[int] | None, own_rows: bool, named: bool,
    tmp_path: Path, target: Path,
) -> None:  # fmt: skip
    """T9, T12, T13: weights bit by bit, windows, rotary embeddings and a map that is no identity survive the
    way to every engine's layout and back; what the layout cannot say is refused and leaves nothing."""
    own_rows = own_rows and ids is not None and engine in ("vllm", "speculators")
    named = named or own_rows
    vocab = None if ids is None else torch.tensor(sorted(ids))
    weights, training = random_weights(config, seed, dtype), {"target": "no such model", "step": seed}
    draft, sent, back = tmp_path / "draft", tmp_path / f"{engine}-{len(list(tmp_path.iterdir()))}", tmp_path / "back"
    checkpoint.write(draft, config, weights, training, vocab)
    model = str(target) if named else None
    if cannot_go(engine, config):
        with pytest.raises(FlashdraftError, match=r"^the draft cannot go to .*\.$"):
            export_draft(draft, engine, sent, model, own_rows=own_rows)
        assert not sent.exists()
        return
    made = export_draft(draft, engine, sent, model, own_rows=own_rows)
    stored = load_file(sent / "model.safetensors")
    assert same_bits({name: stored[name] for name in weights}, weights)
    assert (stored.keys() == weights.keys()) != own_rows
    assert vocab is None or own_rows or any(f"{len(vocab)} of 40" in note for note in made.notes)
    import_draft(sent, back, model)
    found, returned = checkpoint.read(back)
    expected = portable(config, read_target(target) if named else None)
    assert found == expected and same_bits(returned, weights)
    # and what was made explicit changes nothing in the network
    assert dataclasses.replace(found, rope={}, max_context=0, num_target_layers=0) == dataclasses.replace(
        config, rope={}, max_context=0, num_target_layers=0
    )
    for one, other in zip(
        rope_frequencies(config.rope, config.head_dim, config.max_context),
        rope_frequencies(found.rope, found.head_dim, found.max_context), strict=True,
    ):  # fmt: skip
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))
    again = checkpoint.read_vocab(back, found)
    assert (again is None) if vocab is None else (again is not None and torch.equal(again, vocab))
    read = checkpoint.read_training(back)
    assert read is not None and read["step"] == seed and read["draft_sha256"] == checkpoint.digest(weights)


def test_import_takes_the_number_of_layers_from_the_target(tmp_path: Path, target: Path) -> None:
    """speculators' converter drops it, and without it a target of another depth is not told apart. A target that
    the draft does not fit is refused where it was named, and gives nothing where only the files name it."""
    draft = saved(tmp_path / "draft", num_target_layers=0)
    for named, training, expected in (
        (str(target), None, LAYERS), (None, {"target": str(target)}, LAYERS), (None, {"target": "gone"}, 0),
    ):  # fmt: skip
        config, weights = checkpoint.read(draft)
        checkpoint.write(draft, config, {k: v.clone() for k, v in weights.items()}, training)
        import_draft(draft, tmp_path / "back", named)
        assert checkpoint.read(tmp_path / "back")[0] == dataclasses.replace(config, num_target_layers=expected)
    wide = saved(tmp_path / "wide", num_target_layers=0, hidden_size=2 * WIDTH)
    config, weights = checkpoint.read(wide)
    checkpoint.write(wide, config, {k: v.clone() for k, v in weights.items()}, {"target": str(target)})
    import_draft(wide, tmp_path / "wide back")
    assert checkpoint.read(tmp_path / "wide back")[0].num_target_layers == 0
    with pytest.raises(FlashdraftError, match=r"does not fit the target .*: hidden size 12, the target has 6"):
        import_draft(wide, tmp_path / "nowhere", str(target))
    assert not (tmp_path / "nowhere").exists()


# --- what is refused, and what is said


def saved(folder: Path, vocab_ids: torch.Tensor | None = None, **changes: Any) -> Path:
    values = {"vocab_size": 40, "hidden_size": WIDTH, "num_target_layers": LAYERS, "mask_token_id": 39, **changes}
    config = draft_config(tiny_target("llama", "float32"), **values)
    dtype = torch.float64 if changes.pop("double", False) else torch.float32
    checkpoint.write(folder, config, {n: torch.zeros(s, dtype=dtype) for n, s in tensor_shapes(config).items()},
                     None, vocab_ids)  # fmt: skip
    return folder


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "the last layer": ("vllm", {"target_layer_ids": (1, LAYERS - 1)}, "before or after the final norm"),
    "the final norm": ("sglang", {"target_layer_ids": (1, LAYERS)}, "before or after the final norm"),
    "falling layers": ("zlab", {"target_layer_ids": (3, 1)}, "do not rise strictly"),
    "an ablation": ("vllm", {"context": "fused"}, "DFlash without one of its parts"),
    "left to right": ("zlab", {"autoregressive": True}, "DFlash without one of its parts"),
    "from the anchor": ("sglang", {"from_anchor": True}, "one place off"),
    "a block of one": ("vllm", {"block_size": 1}, "drafts nothing"),
    "a soft cap": ("vllm", {"softcap": 30.0}, "final_logit_softcapping 30 is ignored"),
    "a multiplier": ("speculators", {"output_multiplier": 0.5}, "output_multiplier 0.5 is ignored"),
    "scaled embeddings": ("sglang", {"embedding_scale": 2.0}, "input_embedding_scale 2 is ignored"),
    "causal full layers": ("speculators", {"causal": (True, True)}, "its full layers are causal"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_an_engine_would_spoil_is_refused(name: str, tmp_path: Path) -> None:
    """T10 among them: a tap of the last layer is read before the norm by some and after it by others."""
    engine, changes, said = REFUSED[name]
    draft = saved(tmp_path / "draft", **changes)
    with pytest.raises(FlashdraftError, match=re.escape(said)) as caught:
        export_draft(draft, engine, tmp_path / "out")
    assert str(caught.value).startswith(f"the draft cannot go to {engine}: ") and not (tmp_path / "out").exists()


def test_windows_and_engines(tmp_path: Path) -> None:
    """T12: sliding layers beside full ones are possible in some places only, and it is said where."""
    mixed = saved(tmp_path / "mixed", windows=(7, None), causal=(True, False))
    assert any("on a GPU only" in note for note in export_draft(mixed, "vllm", tmp_path / "a").notes)
    assert any("all layers" in note for note in export_draft(mixed, "speculators", tmp_path / "b").notes)
    assert not any("GPU" in note for note in export_draft(mixed, "sglang", tmp_path / "c").notes)
    both = saved(tmp_path / "both", windows=(7, 7), causal=(False, False))
    assert any("look both ways" in note for note in export_draft(both, "vllm", tmp_path / "d").notes)


def test_every_problem_is_in_one_error(tmp_path: Path) -> None:
    draft = saved(tmp_path / "draft", softcap=30.0, embedding_scale=2.0, target_layer_ids=(1, LAYERS - 1), block_size=1)
    with pytest.raises(FlashdraftError) as caught:
        export_draft(draft, "vllm", tmp_path / "out")
    for said in ("softcapping", "embedding_scale", "final norm", "drafts nothing"):
        assert said in str(caught.value)


@pytest.mark.parametrize(
    ("engine", "changes", "said"),
    [
        ("sglang", {"architectures": ["Qwen2ForCausalLM"]}, "SGLang runs DFlash for other targets than qwen2"),
        ("vllm", {"hidden_size": WIDTH + 2}, "hidden size 6, the target has 8"),
        ("vllm", {"vocab_size": 41}, "vocabulary 40, the target has 41"),
        ("vllm", {"num_hidden_layers": 8}, "made for 9 target layers"),
        ("zlab", {"eos_token_id": [2, 39]}, "the target's end-of-text token"),
        ("vllm", {"hidden_size": "wide"}, "gives hidden_size as 'wide'"),
        ("vllm", {"architectures": None}, "architectures None"),
    ],
)
def test_targets_that_do_not_fit(engine: str, changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    model = fake_target(tmp_path / "target", **changes)
    with pytest.raises(FlashdraftError, match=said):
        export_draft(saved(tmp_path / "draft"), engine, tmp_path / "out", str(model))


@pytest.mark.parametrize(
    ("engine", "architecture", "said"),
    [
        ("vllm", "Gemma3ForCausalLM", "--model-impl transformers"),
        ("vllm", "HyenaForCausalLM", "not known here"),
        ("sglang", "HyenaForCausalLM", "not known here"),
        ("vllm", "Qwen2ForCausalLM", None),
        ("sglang", "Qwen3MoeForCausalLM", None),
        ("zlab", "HyenaForCausalLM", None),
    ],
)
def test_targets_that_an_engine_may_not_serve(engine: str, architecture: str, said: str | None, tmp_path: Path) -> None:
    model = fake_target(tmp_path / "target", architectures=[architecture])
    notes = export_draft(saved(tmp_path / "draft"), engine, tmp_path / "out", str(model)).notes
    assert any(said in note for note in notes) if said else not any("know" in note for note in notes)


def test_a_mask_token_that_sglang_will_not_have(tmp_path: Path) -> None:
    model = fake_target(tmp_path / "target")
    (model / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": 5, "content": "<|MASK|>"}]}))
    with pytest.raises(FlashdraftError, match="SGLang wants no other mask token"):
        export_draft(saved(tmp_path / "draft"), "sglang", tmp_path / "out", str(model))
    export_draft(saved(tmp_path / "other", mask_token_id=5), "sglang", tmp_path / "out", str(model))


def test_float64_is_not_served(tmp_path: Path) -> None:
    config = draft_config(tiny_target("llama"), num_target_layers=LAYERS)
    weights = {n: torch.zeros(s, dtype=torch.float64) for n, s in tensor_shapes(config).items()}
    checkpoint.write(tmp_path / "draft", config, weights)
    with pytest.raises(FlashdraftError, match="float64"):
        export_draft(tmp_path / "draft", "vllm", tmp_path / "out")
    export_draft(tmp_path / "draft", "zlab", tmp_path / "out")


def test_other_methods_and_engines(tmp_path: Path) -> None:
    with pytest.raises(FlashdraftError, match="no engine is called 'tgi' here; expected one of vllm, "):
        export_draft(saved(tmp_path / "draft"), "tgi", tmp_path / "out")
    (tmp_path / "heads").mkdir()
    (tmp_path / "heads" / "config.json").write_text('{"model_type": "medusa", "architectures": ["MedusaModel"]}')
    with pytest.raises(FlashdraftError, match="only DFlash drafts are exported"):
        export_draft(tmp_path / "heads", "vllm", tmp_path / "out")


def test_where_an_export_may_go(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = saved(tmp_path / "draft", torch.tensor([1, 5, 7]))
    before = {f.name: f.read_bytes() for f in draft.iterdir()}
    for out in (draft, tmp_path / "x" / ".." / "draft"):
        with pytest.raises(FlashdraftError, match="the draft's own folder"):
            export_draft(draft, "vllm", out)
    with pytest.raises(FlashdraftError, match="holds another model"):
        export_draft(draft, "vllm", target)
    assert {f.name: f.read_bytes() for f in draft.iterdir()} == before
    monkeypatch.chdir(tmp_path)
    assert export_draft(draft, "vllm").folder == Path("draft-vllm")
    # an older export is replaced whole: nothing of the reduced vocabulary stays
    export_draft(saved(tmp_path / "whole"), "vllm", tmp_path / "draft-vllm")
    assert checkpoint.read_vocab(tmp_path / "draft-vllm", checkpoint.read(tmp_path / "draft-vllm")[0]) is None


# --- what is written


def test_the_contract(tmp_path: Path, target: Path) -> None:
    """FORMATS, section 8: what every engine agrees on; block_size - 1 for who counts drafted tokens."""
    draft = saved(tmp_path / "draft", block_size=6, target_layer_ids=(1, 4), max_context=100)
    for engine in ("vllm", "sglang", "zlab"):
        made = export_draft(draft, engine, tmp_path / engine, str(target))
        raw = json.loads((tmp_path / engine / "config.json").read_text())
        assert raw["architectures"] == ["DFlashDraftModel"] and raw["model_type"] == "qwen3"
        assert raw["block_size"] == raw["dflash_config"]["block_size"] == 6
        assert raw["dflash_config"]["target_layer_ids"] == raw["target_layer_ids"] == [1, 4]
        assert raw["dflash_config"]["mask_token_id"] == raw["mask_token_id"] == 39
        assert raw["max_position_embeddings"] == 4096 and any("4,096" in note for note in made.notes)
        assert raw["num_target_layers"] == LAYERS and raw["vocab_size"] == 40 and "draft_vocab_size" not in raw
        assert raw.get("n_predict") == (5 if engine == "vllm" else None)
        assert sorted(f.name for f in (tmp_path / engine).iterdir()) == ["config.json", "model.safetensors"]
        # a server that runs as somebody else may read both
        assert len({f.stat().st_mode for f in (tmp_path / engine).iterdir()}) == 1


def test_the_speculators_layout(tmp_path: Path, target: Path) -> None:
    """T10: layers are numbered one higher there. No model_type: vLLM would look for it in transformers."""
    draft = saved(tmp_path / "draft", block_size=6, target_layer_ids=(0, 4))
    export_draft(draft, "speculators", tmp_path / "out", str(target))
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    assert raw["aux_hidden_state_layer_ids"] == [1, 5] and raw["block_size"] == 6 and "model_type" not in raw
    assert raw["sliding_window_non_causal"] is True and raw["sample_from_anchor"] is False
    assert raw["transformer_layer_config"]["model_type"] == "qwen3" and raw["draft_vocab_size"] == 40
    inner = raw["speculators_config"]
    assert inner["proposal_methods"][0]["speculative_tokens"] == 5
    assert inner["verifier"] == {"name_or_path": str(target), "architectures": ["LlamaForCausalLM"]}
    sliding = saved(tmp_path / "sliding", windows=(7, 7), causal=(True, True))
    export_draft(sliding, "speculators", tmp_path / "s")
    assert json.loads((tmp_path / "s" / "config.json").read_text())["sliding_window_non_causal"] is False


def test_rows_of_the_head(tmp_path: Path, target: Path) -> None:
    """T13: the rows are the target's, and the maps say which; a changed row, or another target, is noticed."""
    ids = torch.tensor([3, 4, 9, 38])
    draft = saved(tmp_path / "draft", ids)
    head = load_file(target / "model.safetensors")["lm_head.weight"]
    for engine in ("vllm", "speculators"):
        out = tmp_path / engine
        export_draft(draft, engine, out, str(target), own_rows=True)
        stored = load_file(out / "model.safetensors")
        assert json.loads((out / "config.json").read_text())["draft_vocab_size"] == 4
        assert torch.equal(stored["lm_head.weight"], head[ids])
        assert (torch.arange(4) + stored["d2t"]).tolist() == stored["t2d"].nonzero().flatten().tolist() == ids.tolist()
        other = fake_target(tmp_path / f"other {engine}")
        tensors = load_file(other / "model.safetensors")
        tensors["lm_head.weight"][9] += 1
        save_file(tensors, other / "model.safetensors")
        with pytest.raises(FlashdraftError, match=r"a head of its own .* in 1 of 4 rows"):
            import_draft(out, tmp_path / "back", str(other))
        with pytest.raises(FlashdraftError, match="name the target with --target"):
            (out / "config.json").write_text((out / "config.json").read_text().replace(str(target), "gone"))
            import_draft(out, tmp_path / "back")
        assert not (tmp_path / "back").exists()
    for engine, said in (("sglang", "only vLLM, speculators and llama.cpp"), ("vllm", "name it with --target")):
        with pytest.raises(FlashdraftError, match=said):
            export_draft(draft, engine, tmp_path / "out", None if engine == "vllm" else str(target), own_rows=True)
    with pytest.raises(FlashdraftError, match="from the whole vocabulary"):
        export_draft(saved(tmp_path / "whole"), "vllm", tmp_path / "out", str(target), own_rows=True)


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"d2t": None}, "lack d2t"),
        ({"d2t": torch.zeros(4, dtype=torch.int64) - 1}, "do not rise strictly within the vocabulary"),
        ({"d2t": torch.tensor([0, 0, 2**62, 2**62])}, "do not rise strictly within the vocabulary"),
        ({"d2t": torch.tensor([1, 0, 0, 0])}, "do not rise strictly"),
        ({"d2t": torch.zeros(4)}, "d2t is stored as F32, expected I64"),
        ({"d2t": torch.zeros(5, dtype=torch.int64)}, r"d2t is \[5\], expected \[4\]"),
        ({"t2d": torch.ones(40, dtype=torch.bool)}, "name different tokens"),
        ({"lm_head.weight": torch.zeros(3, WIDTH)}, r"lm_head.weight is \[3, 6\]"),
        ({"lm_head.bias": torch.zeros(4)}, "lm_head.bias is not part of a draft"),
        ({"embed_tokens.weight": torch.zeros(40, WIDTH)}, "an embedding of its own"),
    ],
)
def test_tables_that_are_wrong(tables: dict[str, Any], said: str, tmp_path: Path, target: Path) -> None:
    out = tmp_path / "out"
    export_draft(saved(tmp_path / "draft", torch.tensor([3, 4, 9, 38])), "vllm", out, str(target), own_rows=True)
    stored: dict[str, Any] = load_file(out / "model.safetensors") | tables
    save_file({k: v for k, v in stored.items() if v is not None}, out / "model.safetensors")
    with pytest.raises(FlashdraftError, match=said):
        import_draft(out, tmp_path / "back", str(target))


def test_card_and_training_travel(tmp_path: Path) -> None:
    """The card and what made the draft; a link out of the folder is left behind, what it leads to may be private."""
    draft = saved(tmp_path / "draft")
    training = {"target": "gone", "target_sha256": "ab", "chat_template": {"sha256": "cd"}}
    config, weights = checkpoint.read(draft)
    checkpoint.write(draft, config, {k: v.clone() for k, v in weights.items()}, training)
    (draft / "README.md").write_text("a card")
    (tmp_path / "secret").write_text("a key")
    (draft / "card.json").symlink_to(tmp_path / "secret")
    export_draft(draft, "vllm", tmp_path / "out")
    import_draft(tmp_path / "out", tmp_path / "back")
    for folder in (tmp_path / "out", tmp_path / "back"):
        assert (folder / "README.md").read_text() == "a card" and not (folder / "card.json").exists()
        read = checkpoint.read_training(folder)
        assert read is not None and training.items() <= read.items()


def test_weights_that_are_not_those_of_training_json(tmp_path: Path) -> None:
    draft = saved(tmp_path / "draft")
    config, weights = checkpoint.read(draft)
    checkpoint.write(draft, config, {k: v.clone() for k, v in weights.items()}, {"step": 3})
    assert checkpoint.draft_warning(checkpoint.read_training(draft), draft) is None
    tensors = load_file(draft / "model.safetensors")
    tensors["norm.weight"][2] = 1
    save_file(tensors, draft / "model.safetensors")
    assert "other weights than its training.json" in str(
        checkpoint.draft_warning(checkpoint.read_training(draft), draft)
    )
    with pytest.raises(FlashdraftError, match=r"other weights than its training\.json"):
        export_draft(draft, "vllm", tmp_path / "out")
    assert checkpoint.draft_warning({"step": 3}, draft) is None and checkpoint.draft_warning(None, draft) is None


def test_launch_lines_count_in_the_engines_way(tmp_path: Path, target: Path) -> None:
    """block_size 6: vLLM and llama.cpp say how many tokens are drafted, SGLang counts the anchor."""
    draft = saved(tmp_path / "draft", block_size=6)
    for engine in FOLDERS:
        out = tmp_path / f"it's {engine}"
        made = export_draft(draft, engine, out, str(target))
        words = shlex.split(made.launch)
        assert str(target.resolve()) in words
        if engine in ("vllm", "speculators"):
            spec = json.loads(words[words.index("--speculative-config") + 1])
            assert spec == {"method": "dflash", "model": str(out), "num_speculative_tokens": 5}
        else:
            flag = {"sglang": "--speculative-num-draft-tokens", "zlab": "--block-size"}[engine]
            assert words[words.index(flag) + 1] == "6" and str(out) in words
        if engine == "zlab":
            assert made.request is None
        else:
            assert made.request is not None
            body = json.loads(shlex.split(made.request)[-1])
            assert body["model"] == str(target.resolve()) and body["messages"]


def test_llama_cpp_gets_both_models(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/test_engines_llama_cpp.py reads the files; here: who is asked for what, and what the line says."""
    from flashdraft.engines import llama_cpp

    asked: list[tuple[Any, ...]] = []

    def note(*args: Any, **options: Any) -> Path:
        asked.append((*args, options))
        args[-1 if len(args) == 2 else 2].parent.mkdir(exist_ok=True)
        return Path(args[-1 if len(args) == 2 else 2])

    monkeypatch.setattr(llama_cpp, "export_draft", note)
    monkeypatch.setattr(llama_cpp, "export_target", note)
    draft, out = saved(tmp_path / "draft", torch.tensor([3, 4]), block_size=6), tmp_path / "out"
    (draft / "README.md").write_text("a card")
    made = export_draft(draft, "llama.cpp", out, str(target), own_rows=True, kind="q8_0")
    assert asked == [
        (draft, str(target), out / "draft.gguf", "q8_0", {"own_rows": True}),
        (str(target), out / "target.gguf", {}),
    ]
    assert shlex.split(made.launch)[:8] == [
        "llama-server", "-m", str(out / "target.gguf"), "-md", str(out / "draft.gguf"), "--spec-type", "draft-dflash",
        "--spec-draft-n-max",
    ]  # fmt: skip
    assert shlex.split(made.launch)[8] == "5" and "127.0.0.1:8080" in str(made.request)
    assert (out / "README.md").read_text() == "a card"
    with pytest.raises(FlashdraftError, match="name the target with --target"):
        export_draft(draft, "llama.cpp", out)
    with pytest.raises(FlashdraftError, match="attention has biases"):
        export_draft(saved(tmp_path / "b", attention_bias=True), "llama.cpp", out, str(target))
    with pytest.raises(FlashdraftError, match="--type is for llama"):
        export_draft(draft, "vllm", out, str(target), kind="q8_0")


# --- folders that others wrote

SPECULATORS: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"], "auto_map": {"": "config.DFlashSpeculatorConfig"}, "block_size": 8,
    "aux_hidden_state_layer_ids": [2, 10, 18, 26, 34], "draft_vocab_size": 151936, "mask_token_id": 151669,
    "sample_from_anchor": False, "sliding_window_non_causal": False, "speculators_model_type": "dflash",
    "speculators_version": "0.9.0", "target_hidden_size": None,
    "speculators_config": {"algorithm": "dflash", "verifier": {"name_or_path": "Qwen/Qwen3-4B"}},
    "transformer_layer_config": {
        "attention_bias": False, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2560, "intermediate_size": 9728,
        "layer_types": ["full_attention"] * 5, "max_position_embeddings": 40960, "model_type": "qwen3",
        "num_attention_heads": 32, "num_hidden_layers": 5, "num_key_value_heads": 8, "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}, "sliding_window": None,
        "use_sliding_window": False, "vocab_size": 151936,
    },
}  # fmt: skip


def speculators(inner: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    return {
        **SPECULATORS,
        **changes,
        "transformer_layer_config": {**SPECULATORS["transformer_layer_config"], **(inner or {})},
    }


def test_a_speculators_config() -> None:
    """T10: aux_hidden_state_layer_ids count hidden_states, whose first is the embedding."""
    z_lab = dataclasses.replace(parse_config(QWEN3_4B), num_target_layers=0, block_size=8)
    assert parse_config(speculators()) == z_lab
    assert parse_config(speculators(sample_from_anchor=True)) == dataclasses.replace(
        z_lab, block_size=9, from_anchor=True
    )


SLIDE = ["sliding_attention"]


@pytest.mark.parametrize(
    ("kinds", "non_causal", "causal"),
    [
        (SLIDE * 5, False, [True] * 5),
        (SLIDE * 5, True, [False] * 5),
        (SLIDE * 4 + ["full_attention"], False, [True] * 4 + [False]),
        (SLIDE * 4 + ["full_attention"], True, [False] * 5),
        (["full_attention"] * 5, False, [False] * 5),
        (["full_attention"] * 5, True, [False] * 5),
    ],
)
def test_windows_of_speculators(kinds: list[str], non_causal: bool, causal: list[bool]) -> None:
    """T12: full layers look both ways whatever the flag says, sliding ones as it says."""
    config = parse_config(
        speculators({"layer_types": kinds, "sliding_window": 2048}, sliding_window_non_causal=non_causal)
    )
    assert config.windows == tuple(2048 if kind in SLIDE else None for kind in kinds)
    assert config.causal == tuple(causal)


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (speculators(speculators_model_type="eagle3"), "an? 'eagle3' draft|a 'eagle3' draft"),
        (speculators(speculators_model_type=None), "a None draft of the package"),
        (speculators(speculators_model_type="dflash2"), "of its drafts 'dflash' is read"),
        ({**SPECULATORS, "transformer_layer_config": None}, "transformer_layer_config is None"),
        (speculators(shift_label=True), "shift_label"),
        (speculators(projector_type="domino"), "a head of another method"),
        (speculators(markov_rank=8), "a Markov head"),
        (speculators(aux_hidden_state_layer_ids=None), "target_layer_ids is None"),
        (speculators(aux_hidden_state_layer_ids=[0, 4]), r"target_layer_ids is \[-1, 3\]"),
        (speculators(aux_hidden_state_layer_ids=["2"]), r"target_layer_ids is \['2'\]"),
        (speculators(draft_vocab_size=151937), "draft_vocab_size is 151937"),
        (speculators(draft_vocab_size="many"), "draft_vocab_size is 'many'"),
        (speculators(target_hidden_size=4096), "target_hidden_size is 4096"),
        (speculators(sample_from_anchor="yes"), "sample_from_anchor is 'yes'"),
        (speculators(mask_token_id=None), "mask_token_id is None"),
        (speculators({"hidden_act": "gelu"}), "another activation"),
        (speculators({"layer_types": SLIDE * 5, "sliding_window": 0}), "sliding_window is 0"),
        ({**QWEN3_4B, "architectures": ["Qwen3DSparkModel"], "markov_rank": 256}, "with a Markov head"),
        ({**QWEN3_4B, "architectures": ["Qwen3DSparkModel"], "enable_confidence_head": True}, "with a confidence head"),
    ],
)
def test_foreign_configs_that_are_refused(raw: dict[str, Any], said: str) -> None:
    with pytest.raises(FlashdraftError, match=said) as caught:
        parse_config(raw, "here")
    assert str(caught.value).endswith(".") and "\n" not in str(caught.value)


def test_a_deepspec_config() -> None:
    """A block of 7 there proposes 7 tokens, the first of them at the anchor's slot: a block of 8 here."""
    raw = {key: value for key, value in QWEN3_4B.items() if key != "dflash_config"} | {
        "architectures": ["Qwen3DSparkModel"], "block_size": 7, "mask_token_id": 151669, "markov_rank": 0,
        "target_layer_ids": [1, 9, 17, 25, 33], "num_anchors": 512, "enable_confidence_head": False,
    }  # fmt: skip
    assert parse_config(raw) == dataclasses.replace(parse_config(QWEN3_4B), block_size=8, from_anchor=True)
    twice = {**QWEN3_4B, "dflash_config": {**QWEN3_4B["dflash_config"], "sample_from_anchor": 1}}
    with pytest.raises(FlashdraftError, match="sample_from_anchor is 1"):
        parse_config(twice)


TARGET = tiny_target("llama", "float32")


def deepspec(folder: Path, seed: int = 3) -> Path:
    """As DeepSpec saves it: its own architecture, and the target's tables among the weights."""
    network = random_network(TARGET, seed, block_size=7, from_anchor=True)
    raw = checkpoint.config_json(dataclasses.replace(network.config, from_anchor=False), torch.float32)
    raw |= {"architectures": ["Qwen3DSparkModel"], "markov_rank": 0, "enable_confidence_head": False, "block_size": 6}
    raw |= {key: raw["dflash_config"][key] for key in ("mask_token_id", "target_layer_ids")}
    del raw["dflash_config"]
    tables = {
        "embed_tokens.weight": TARGET.model.get_input_embeddings().weight.clone(),
        "lm_head.weight": TARGET.head_rows()[0].clone(),
    }
    folder.mkdir()
    save_file(network.state_dict() | tables, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def drafted(drafter: Any, **params: Any) -> tuple[list[tuple[int, ...]], list[tuple[list[int], list[int]]]]:
    watched = Recorder(drafter)
    results = decode(TARGET, watched, PROMPTS[:3], max_rows=3, max_tokens=12, ignore_eos=True, **params)
    return [r.token_ids for r in results], [(tokens, draft) for tokens, draft, *_ in watched.rounds]


def test_a_draft_that_predicts_from_the_anchor(tmp_path: Path) -> None:
    """The network has as many slots as it drafts tokens, and slot i says token i + 1: without its first
    token, a draft equals what a draft of the usual kind says in a block that is one shorter."""
    drafter = make_drafter(TARGET, None, deepspec(tmp_path / "draft"))
    assert isinstance(drafter, DFlashDrafter) and (drafter.block_size, drafter.max_draft_tokens) == (7, 6)
    texts, rounds = drafted(drafter)
    plain = [r.token_ids for r in decode(TARGET, None, PROMPTS[:3], max_tokens=12, ignore_eos=True)]
    assert texts == plain
    usual = DFlashDrafter(random_network(TARGET, 3, block_size=7), TARGET, 6)
    said = {tuple(tokens): draft for tokens, draft in drafted(usual)[1]}
    shared = [(draft, said[tuple(tokens)]) for tokens, draft in rounds if tuple(tokens) in said]
    whole = [(draft, other) for draft, other in shared if (len(draft), len(other)) == (6, 5)]  # not cut at the end
    assert len(whole) >= 3
    assert all(draft[1:] == other for draft, other in whole)
    assert any(draft[:-1] != other for draft, other in whole)  # and not one place off


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
def test_it_is_lossless_too(passes: int, acceptance: str) -> None:
    params = {"max_tokens": 12, "ignore_eos": True, "temperature": 1.0, "max_rows": 3, "acceptance": acceptance}
    drafter = DFlashDrafter(random_network(TARGET, 3, from_anchor=True), TARGET, passes=passes)
    texts = [r.token_ids for r in decode(TARGET, drafter, PROMPTS[:3], **params)]
    plain = [r.token_ids for r in decode(TARGET, None, PROMPTS[:3], **params)]
    assert texts == plain if acceptance == "coupled" else all(len(text) == 12 for text in texts)


def test_foreign_folders_draft_as_ours_do(tmp_path: Path) -> None:
    """A speculators folder and vLLM's reduced head, given to --draft: the drafts of the folder they came from."""
    ids = torch.arange(0, VOCAB, 3)
    network = random_network(TARGET, 5, windows=(6, 6), causal=(True, True))
    checkpoint.write(tmp_path / "ours", network.config, network.state_dict(), None, ids)
    expected = drafted(make_drafter(TARGET, None, tmp_path / "ours"))
    model = tmp_path / "model"
    TARGET.model.save_pretrained(model)
    (model / "tokenizer.json").write_text("{}")
    for engine in ("vllm", "speculators"):
        export_draft(tmp_path / "ours", engine, tmp_path / engine, str(model), own_rows=True)
        assert drafted(make_drafter(TARGET, None, tmp_path / engine)) == expected
    other = tiny_target("qwen2", "float32")
    with pytest.raises(FlashdraftError, match="a head of its own"):
        make_drafter(other, None, tmp_path / "vllm")
    with pytest.raises(FlashdraftError, match="a head of its own"):
        DFlashAssistant.load(tmp_path / "vllm", make_model(CONFIGS["qwen2"](), torch.float32))
    import_draft(deepspec(tmp_path / "deepspec"), tmp_path / "back", str(model))
    assert drafted(make_drafter(TARGET, None, tmp_path / "back")) == drafted(
        make_drafter(TARGET, None, tmp_path / "deepspec")
    )


# --- the commands


def test_the_commands(folder: Path, target: Path, tmp_path: Path, call: Call) -> None:
    model = Target.load(folder, dtype="float32")
    draft = tmp_path / "draft"
    draft.mkdir()
    save_draft(draft, model, vocab_size=model.vocab_size, mask_token_id=model.vocab_size - 1)
    run = CliRunner()
    done = run.invoke(
        cli.app, ["export", str(draft), "--to", "speculators", "--out", str(tmp_path / "sent"), "-t", str(folder)]
    )
    assert done.exit_code == 0, done.output
    assert "read it back" in done.stdout and "vllm serve" in done.stdout and "curl" in done.stdout
    done = run.invoke(cli.app, ["import", str(tmp_path / "sent"), "--out", str(tmp_path / "back")])
    assert done.exit_code == 0 and "a speculators draft of 2 layers, block size 8" in done.stdout
    texts = {call("generate", "the boats", "--draft", each, "-n", 8).out for each in (draft, tmp_path / "sent")}
    assert len(texts) == 1 and texts != {""}
    done = run.invoke(cli.app, ["export", str(draft), "--to", "vllm", "--out", str(draft)])
    assert done.exit_code == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_generate_warns_of_weights_that_were_changed(folder: Path, tmp_path: Path, call: Call) -> None:
    model = Target.load(folder, dtype="float32")
    network = random_network(model, vocab_size=model.vocab_size, mask_token_id=model.vocab_size - 1)
    checkpoint.write(tmp_path / "draft", network.config, network.state_dict(), {"step": 1})
    assert "warning" not in call("generate", "the boats", "--draft", tmp_path / "draft", "-n", 4).err
    raw = json.loads((tmp_path / "draft" / "training.json").read_text())
    (tmp_path / "draft" / "training.json").write_text(json.dumps({**raw, "draft_sha256": "0" * 64}))
    assert (
        "other weights than its training.json"
        in call("generate", "the boats", "--draft", tmp_path / "draft", "-n", 4).err
    )
