"""Folders of the rivals: what is written is read back exactly, public layouts load, and one sentence says what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import rivals
from bed import PROMPTS, VOCAB, decode, tiny_target
from cli_bed import save_target
from flashdraft import checkpoint
from flashdraft.drafters import drafter_name, eagle3_folder, make_drafter, medusa
from flashdraft.drafters.dflash import DFlashDrafter
from flashdraft.drafters.dflash_ablations import OwnContextDrafter
from flashdraft.drafters.draft_model import DraftModelDrafter
from flashdraft.drafters.dynamic_tree import TreeShape
from flashdraft.drafters.eagle3 import Eagle3Drafter
from flashdraft.drafters.medusa import MedusaDrafter
from flashdraft.evaluation.bench import Arm, BenchConfig, arm_name, make_arm
from flashdraft.locate import locate_draft_model
from flashdraft.settings import make_settings
from flashdraft.target import Target
from flashdraft.types import FlashdraftError

TARGET = tiny_target("llama", "float32")


@pytest.fixture
def medusa_folder(tmp_path: Path) -> Path:
    network = rivals.medusa_network("llama", "float32")
    medusa.write(tmp_path / "heads", network.config, network.state_dict(), {"steps": 3})
    return tmp_path / "heads"


@pytest.fixture
def eagle_folder(tmp_path: Path) -> Path:
    network = rivals.eagle_network("llama", "float32")
    ids = torch.tensor(rivals.EAGLE_IDS)
    eagle3_folder.write(tmp_path / "draft", network.config, network.state_dict(), ids, {"steps": 3})
    return tmp_path / "draft"


def change(folder: Path, **keys: Any) -> None:
    raw = json.loads((folder / "config.json").read_text())
    raw |= keys
    (folder / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if v is not ...}))


def rename(folder: Path, *pairs: tuple[str, str]) -> None:
    weights = load_file(folder / "model.safetensors")
    for old, new in pairs:
        weights = {k.replace(old, new, 1) if k.startswith(old) else k: v for k, v in weights.items()}
    save_file(weights, folder / "model.safetensors")


def with_tensors(folder: Path, **tensors: torch.Tensor | None) -> None:
    weights: dict[str, Any] = load_file(folder / "model.safetensors")
    weights |= {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    save_file({k: v for k, v in weights.items() if v is not None}, folder / "model.safetensors")


def same_drafts(first: Any, second: Any) -> bool:
    found = []
    for drafter in (first, second):
        watched = rivals.Recorder(drafter)
        decode(TARGET, watched, PROMPTS[2:4], max_tokens=8)
        found.append([(tokens, drafted) for tokens, drafted, *_ in watched.rounds])
    return found[0] == found[1]


@pytest.mark.parametrize("tree", [False, True])
def test_round_trips_draft_the_same(medusa_folder: Path, eagle_folder: Path, tree: bool) -> None:
    """T13 too: a map that is not the identity survives saving and loading."""
    loaded = make_drafter(TARGET, None, eagle_folder, 5, tree=tree, **({"top_k": 3, "nodes": 9} if tree else {}))
    assert isinstance(loaded, Eagle3Drafter) and loaded.target_layer_ids == rivals.LAYERS
    assert same_drafts(loaded, rivals.eagle3("llama", "float32", 5, rivals.TREE if tree else None))
    assert loaded._vocab_ids is not None and loaded._vocab_ids.tolist() == rivals.EAGLE_IDS
    heads = make_drafter(TARGET, None, medusa_folder, tree=tree)
    assert isinstance(heads, MedusaDrafter) and heads.drafts_trees == tree
    assert same_drafts(heads, rivals.medusa("llama", "float32", 5, tree))


def test_a_language_model_drafts(tmp_path: Path) -> None:
    """Its folder says so. The target's own is a mistake, unless a draft model is asked for by name."""
    folder, other = save_target(tmp_path / "model"), save_target(tmp_path / "small", num_hidden_layers=1)
    target = Target.load(folder, dtype="float32")
    prompt = list(range(20, 30))
    (plain,) = decode(target, None, [prompt], max_tokens=9, ignore_eos=True)
    for drafter in (make_drafter(target, None, other, 4), make_drafter(target, "draft_model", folder, 4)):
        assert isinstance(drafter, DraftModelDrafter)
        (found,) = decode(target, drafter, [prompt], max_tokens=9, ignore_eos=True)
        assert found.token_ids == plain.token_ids
    assert found.stats.acceptance_length == 4  # itself as draft
    (tmp_path / "link").symlink_to(folder)
    for same in (folder, tmp_path / "link", f"{folder}/../model"):
        with pytest.raises(
            FlashdraftError, match=r"is the target itself, which as a draft would gain nothing; expected a"
        ):
            make_drafter(target, None, same)
    with pytest.raises(FlashdraftError, match=r"is a language model \(is this the target's folder\?\)"):
        make_drafter(target, "dflash", folder)
    with pytest.raises(FlashdraftError, match=r"^the draft model is not there: no target at './missing'"):
        locate_draft_model("./missing")


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, "draft_model"),
        ({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}, "draft_model"),
        ({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 99}, "eagle3"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "eagle3"),
        ({"architectures": ["EagleLlamaForCausalLM"]}, "dflash"),  # which says that it is of another method
        ({"architectures": ["DFlashQwen3ForCausalLM"]}, "dflash"),
        ({"architectures": ["MedusaLlamaForCausalLM"]}, "medusa"),
        ({"model_type": "medusa"}, "medusa"),
        ({"architectures": ["DFlashDraftModel"]}, "dflash"),
        ({"architectures": None}, "dflash"),
    ],
)
def test_architectures_say_the_method(keys: dict[str, Any], name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(keys))
    assert drafter_name(None, tmp_path) == name


def test_the_shape_of_a_tree_asks_for_one(eagle_folder: Path, medusa_folder: Path) -> None:
    eagle: Any = make_drafter(TARGET, None, eagle_folder, 5, top_k=3, nodes=9)
    assert eagle.tree_shape == TreeShape(top_k=3, nodes=9) and eagle.max_draft_tokens == 9
    assert not make_drafter(TARGET, None, eagle_folder).drafts_trees
    heads: Any = make_drafter(TARGET, None, medusa_folder, 4, nodes=6)
    assert heads.drafts_trees and heads.max_draft_tokens == 6
    for folder, options in ((eagle_folder, {"top_k": 3, "nodes": 9}), (medusa_folder, {"nodes": 6})):
        with pytest.raises(FlashdraftError, match=r"nodes would shape a tree, but tree is false; drop one of them\.$"):
            make_drafter(TARGET, None, folder, tree=False, **options)


def test_arms_of_a_benchmark_have_options(eagle_folder: Path, medusa_folder: Path) -> None:
    """The same words in bench's YAML; an arm without a name is called by its method and its options."""
    arms = [{"draft": str(eagle_folder), "block_sizes": [3, 5], "options": {"tree": True, "nodes": 5}},
            {"draft": str(medusa_folder)}, {"draft": str(medusa_folder), "name": "heads", "options": {"tree": False}}]  # fmt: skip
    found = make_settings(BenchConfig, {"out": "o", "drafters": arms}).arms()
    names = ["eagle3 tree=true nodes=5"] * 2 + ["medusa", "heads"]
    assert [arm_name(arm) for arm in found] == names
    made: list[Any] = [make_arm(arm, TARGET) for arm in found]
    assert [(d.depth, d.max_draft_tokens) for d in made] == [(2, 5), (4, 5), (4, 10), (4, 4)]
    with pytest.raises(
        FlashdraftError, match=r"^the drafter eagle3 has no option 'depth'; it has tree, top_k, nodes, a"
    ):
        make_arm(Arm(draft=str(eagle_folder), options={"depth": 3}), TARGET)


# -- EAGLE-3 in the layouts that are around --------------------------------------------------------------

# yuhuili/EAGLE3-LLaMA3.1-Instruct-8B, and SpecForge's for Qwen3: what the files say of themselves.
LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "bos_token_id": 128000, "draft_vocab_size": 32000, "hidden_act": "silu",
    "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 2048, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 1, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
    "rope_scaling": {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "rope_theta": 500000.0, "tie_word_embeddings": False, "vocab_size": 128256,
}  # fmt: skip
QWEN3_4B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"], "attention_bias": False, "draft_vocab_size": 32000, "head_dim": 80,
    "hidden_act": "silu", "hidden_size": 2560, "intermediate_size": 9728, "max_position_embeddings": 40960,
    "max_window_layers": 36, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 1,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000,
    "sliding_window": None, "tie_word_embeddings": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip


def test_public_configurations() -> None:
    config = eagle3_folder.parse_config(LLAMA_8B)
    assert (config.head_dim, config.draft_vocab_size, config.rope["rope_type"]) == (128, 32000, "llama3")
    assert eagle3_folder.layer_ids(config, 32) == (1, 15, 28)  # the inputs of layers 2, 16 and 29
    shapes = eagle3_folder.tensor_shapes(config)
    assert shapes["fc.weight"] == (4096, 12288) and shapes["midlayer.self_attn.k_proj.weight"] == (1024, 8192)
    assert eagle3_folder.extra_shapes(config)["lm_head.weight"] == (32000, 4096)
    config = eagle3_folder.parse_config(QWEN3_4B)
    assert (config.head_dim, config.num_kv_heads) == (80, 8)
    assert eagle3_folder.tensor_shapes(config)["midlayer.self_attn.q_proj.weight"] == (2560, 5120)


@pytest.mark.parametrize(
    ("keys", "found"),
    [
        ({}, (1, 15, 28)),
        ({"eagle_aux_hidden_state_layer_ids": [2, 16, 29]}, (1, 15, 28)),  # vLLM's numbers: inputs
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 15, 28]}}, (1, 15, 28)),  # SGLang's: outputs
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 16, 29]}}, (1, 15, 28)),
        ({"eagle_aux_hidden_state_layer_ids": [4, 8, 9], "target_layer_ids": [3, 7, 8]}, (3, 7, 8)),
        ({"eagle_aux_hidden_state_layer_ids": [4, 8, 9]}, None),
    ],
)
def test_layers_are_never_guessed(keys: dict[str, Any], found: tuple[int, ...] | None) -> None:
    """T10's kind: the same numbers mean inputs in one engine and outputs in another."""
    config = eagle3_folder.parse_config(LLAMA_8B | keys)
    if found is None:
        with pytest.raises(FlashdraftError, match=r"^eagle_aux_hidden_state_layer_ids \[4, 8, 9\] is read differently"):
            eagle3_folder.layer_ids(config, 32)
    else:
        assert eagle3_folder.layer_ids(config, 32) == found


def test_other_names_of_the_same_weights(eagle_folder: Path) -> None:
    """`layers.0` for `midlayer`, and an embedding of the draft's own (here the target's: same drafts)."""
    expected = Eagle3Drafter.load(eagle_folder, TARGET)
    rename(eagle_folder, ("midlayer.", "layers.0."))
    embedding = TARGET.embed(torch.arange(VOCAB))
    with_tensors(eagle_folder, embed_tokens__weight=embedding.clone())
    loaded = Eagle3Drafter.load(eagle_folder, TARGET)
    assert loaded.network.embed_tokens is not None and same_drafts(loaded, expected)
    with_tensors(eagle_folder, embed_tokens__weight=embedding.roll(1, 0))
    assert not same_drafts(Eagle3Drafter.load(eagle_folder, TARGET), expected)


def test_a_whole_vocabulary_may_use_the_targets_head(eagle_folder: Path) -> None:
    with_tensors(eagle_folder, lm_head__weight=None, d2t=None, t2d=None)
    change(eagle_folder, draft_vocab_size=VOCAB)
    drafter = Eagle3Drafter.load(eagle_folder, TARGET)
    assert drafter.network.lm_head is None and drafter._vocab_ids is None
    decode(TARGET, drafter, [PROMPTS[0]], max_tokens=4)


def test_norm_before_the_residual_is_another_network(eagle_folder: Path) -> None:
    plain = Eagle3Drafter.load(eagle_folder, TARGET)
    change(eagle_folder, norm_before_residual=True)
    assert not same_drafts(Eagle3Drafter.load(eagle_folder, TARGET), plain)


EAGLE_PROBLEMS: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["MistralForCausalLM"]}, "is no EAGLE-3 draft for a Llama or Qwen3 target"),
    ({"speculators_model_type": "eagle3"}, "in the format of the package speculators"),
    ({"num_hidden_layers": 2}, "num_hidden_layers 2 asks for more than one layer"),
    ({"norm_output": True}, "norm_output True asks for EAGLE 3.1's normed feedback"),
    ({"fc_norm": True}, "fc_norm True asks for"),
    ({"eagle_config": {"use_aux_hidden_state": False}}, "features of the last layer only"),
    ({"hidden_act": "gelu"}, "another activation"),
    ({"hidden_size": "wide"}, "hidden_size is 'wide', expected an integer"),
    ({"draft_vocab_size": VOCAB + 1}, f"draft_vocab_size {VOCAB + 1} is above vocab_size"),
    ({"num_key_value_heads": 3}, "4 query heads do not divide among 3"),
    ({"head_dim": 11}, "head_dim is 11, expected an even number"),
    ({"target_hidden_size": 99}, "target_hidden_size is 99, expected 32"),
    ({"target_layer_ids": [0, 1]}, r"fc.weight is [32, 96], expected [32, 64]"),
    ({"target_layer_ids": [0, 2, 5]}, "taps the layers [0, 2, 5], the target's are 0 to 2, rising"),
    ({"vocab_size": 128}, "t2d is [96], expected [128]"),
]


@pytest.mark.parametrize(("keys", "said"), EAGLE_PROBLEMS, ids=lambda x: x[:30] if isinstance(x, str) else "")
def test_eagle_configurations_that_are_refused(keys: dict[str, Any], said: str, eagle_folder: Path) -> None:
    change(eagle_folder, **keys)
    with pytest.raises(FlashdraftError) as caught:
        Eagle3Drafter.load(eagle_folder, TARGET)
    assert said in str(caught.value) and "\n" not in str(caught.value) and str(caught.value).endswith(".")


def test_eagle_weights_that_are_refused(eagle_folder: Path) -> None:
    """T13: a map that is lost, or says two things, is an error and never rebuilt."""
    ids = torch.tensor(rivals.EAGLE_IDS)
    d2t = ids - torch.arange(len(ids))
    cases: list[tuple[dict[str, torch.Tensor | None], str]] = [
        ({"d2t": None}, "lack lm_head.weight or d2t"),
        ({"d2t": torch.zeros_like(d2t) - torch.arange(len(ids))}, "d2t names ids twice or outside"),
        ({"d2t": d2t.int()}, "d2t is stored as I32, expected I64"),
        ({"d2t": d2t, "t2d": torch.ones(VOCAB, dtype=torch.bool)}, "d2t and t2d name different tokens"),
        ({"norm__weight": None}, "norm.weight is missing"),
        ({"spare": torch.zeros(2)}, "spare is not part of a draft"),
    ]
    original = load_file(eagle_folder / "model.safetensors")
    for tensors, said in cases:
        save_file(original, eagle_folder / "model.safetensors")
        with_tensors(eagle_folder, **tensors)
        with pytest.raises(FlashdraftError) as caught:
            Eagle3Drafter.load(eagle_folder, TARGET)
        assert said in str(caught.value)


def test_pickled_drafts_are_not_opened(eagle_folder: Path) -> None:
    (eagle_folder / "model.safetensors").rename(eagle_folder / "pytorch_model.bin")
    with pytest.raises(FlashdraftError, match=r"has only pytorch_model.bin, which could run code"):
        Eagle3Drafter.load(eagle_folder, TARGET)


# -- Medusa ----------------------------------------------------------------------------------------------

MEDUSA_PROBLEMS: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, "holds no Medusa heads: model_type is 'llama'"),
    ({"num_heads": 0}, "num_heads is 0, expected an integer of at least 1 and at most 64"),
    ({"medusa_choices": [[0], [0, "a"]]}, "expected a list of lists of ranks"),
    ({"medusa_choices": [[0], [1, 0]]}, "medusa_choices has [1, 0] without [1]"),
    ({"medusa_choices": [[0], [0]]}, "medusa_choices has a path twice"),
    ({"medusa_choices": [[VOCAB]]}, f"medusa_choices has the rank {VOCAB} of {VOCAB} tokens"),
    ({"num_heads": 1, "medusa_choices": [[0], [0, 0]]}, "deeper than the 1 heads"),
    ({"truncated_vocab_size": 50}, "truncated_vocab_size is 50, which is not supported"),
    ({"num_heads": 5}, "lm_heads.4.weight is missing"),
    ({"medusa_fc_bias": False}, "bias is not part of a draft"),
    ({"hidden_size": 64}, "is [32, 32], expected [64, 64]"),
]


@pytest.mark.parametrize(("keys", "said"), MEDUSA_PROBLEMS, ids=lambda x: x[:30] if isinstance(x, str) else "")
def test_medusa_folders_that_are_refused(keys: dict[str, Any], said: str, medusa_folder: Path) -> None:
    change(medusa_folder, **keys)
    with pytest.raises(FlashdraftError) as caught:
        MedusaDrafter.load(medusa_folder, TARGET)
    assert said in str(caught.value) and "\n" not in str(caught.value) and str(caught.value).endswith(".")


def test_heads_of_another_target_are_refused(tmp_path: Path) -> None:
    config = medusa.MedusaConfig(48, 100, 2)
    network = medusa.MedusaNetwork(config)
    medusa.write(tmp_path, config, network.state_dict())
    with pytest.raises(
        FlashdraftError, match=r"hidden size 48, the target has 32; vocabulary 100, the target has 96\.$"
    ):
        MedusaDrafter.load(tmp_path, TARGET)
    with pytest.raises(FlashdraftError, match="a Medusa tree is asked for, but"):
        MedusaDrafter(medusa.MedusaNetwork(medusa.MedusaConfig(32, VOCAB, 2)), TARGET, use_tree=True)


def test_names_follow_the_folder(medusa_folder: Path, eagle_folder: Path) -> None:
    change(eagle_folder, architectures=["LlamaForCausalLM"])
    assert drafter_name(None, eagle_folder) == "eagle3"
    assert drafter_name(None, medusa_folder) == "medusa"
    assert drafter_name(None, None) == "none"


# -- DFlash without its parts ------------------------------------------------------------------------------


@pytest.mark.parametrize("context", ["fused", "none"])
def test_ablations_survive_the_disk(context: str, tmp_path: Path) -> None:
    network = rivals.own_context_network(context, "llama", "float32")
    checkpoint.write(tmp_path, network.config, network.state_dict())
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["architectures"] == ["DFlashAblationModel"]
    loaded = make_drafter(TARGET, None, tmp_path, 6)
    assert isinstance(loaded, OwnContextDrafter) and loaded.network.config == network.config
    assert same_drafts(loaded, rivals.own_context(context, "llama", "float32", 6))
    with pytest.raises(FlashdraftError, match=f"^the draft's context is '{context}'; load it with make_drafter"):
        DFlashDrafter.load(tmp_path, TARGET)


def test_ablations_go_by_another_name(tmp_path: Path) -> None:
    """A program that knows DFlash only must not run one as DFlash, and a DFlash draft has no such keys."""
    network = rivals.several_passes(0, "llama", "float32", 4).network
    checkpoint.write(tmp_path, network.config, network.state_dict())
    loaded = make_drafter(TARGET, "dflash", tmp_path)
    assert isinstance(loaded, DFlashDrafter) and loaded.passes == 8
    assert make_drafter(TARGET, "dflash", tmp_path, 4).max_draft_tokens == 3
    change(tmp_path, architectures=["DFlashDraftModel"])
    with pytest.raises(FlashdraftError, match=r"autoregressive are for architectures \['DFlashAblationModel'\] only"):
        checkpoint.read(tmp_path)
    with pytest.raises(FlashdraftError, match=r"^passes is 0; expected 1 to 1024"):
        DFlashDrafter(rivals.trained_network("llama", "float32"), TARGET, passes=0)
