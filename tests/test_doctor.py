"""flashdraft doctor: what is wrong is named, with a remedy, and ends in exit code 1."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
import transformers

from cli_bed import Call, save_draft, strict_json
from flashdraft import doctor
from flashdraft.target import Target


def test_doctor_finds_nothing_wrong(call: Call, draft: Path) -> None:
    done = call("doctor", "--draft", draft)
    assert done.code == 0, done.out
    for part in (transformers.__version__, torch.__version__, "threads", "memory", "bfloat16", "LlamaForCausalLM"):
        assert part in done.out
    for part in ("3 layers", "context 512", "chat template", "probed", "fits the target", "Nothing is wrong."):
        assert part in done.out
    value = strict_json(call("doctor", "--json").out)
    assert value["ok"] is True
    assert {"python", "torch", "dtype", "cache folder", "target"} <= {finding["name"] for finding in value["findings"]}


@pytest.mark.parametrize(
    ("args", "name", "part"),
    [
        (["--target", "./missing"], "target files", "no target at './missing'"),
        (["--draft", "./missing"], "draft", "no draft at './missing'"),
        (["--dtype", "int3"], "dtype", "dtype is 'int3'"),
        (["--device", "toaster"], "device", "device is 'toaster'"),
        (["--threads", "1000"], "threads", "--threads"),
    ],
)
def test_doctor_names_what_is_wrong(args: list[str], name: str, part: str, call: Call) -> None:
    before = torch.get_num_threads()
    try:
        value = strict_json((done := call("doctor", "--json", *args)).out)
        shown = call("doctor", *args)
    finally:
        torch.set_num_threads(before)
    assert (done.code, value["ok"], shown.code) == (1, False, 1)
    wrong = {finding["name"]: finding["problem"] for finding in value["findings"] if finding["problem"]}
    assert list(wrong) == [name]
    assert part in wrong[name]
    assert f"{name}: {wrong[name]}" in shown.out


def test_doctor_refuses_a_draft_of_another_target(call: Call, target: Target, tmp_path: Path) -> None:
    save_draft(tmp_path, target, vocab_size=target.vocab_size + 1, mask_token_id=0)
    done = call("doctor", "--draft", tmp_path)
    assert done.code == 1
    assert "does not fit the target" in done.out
    assert "padding token" in done.out


@pytest.mark.parametrize(
    ("method", "parts"),
    [
        ("medusa", ["Medusa at ", "3 heads", "a tree of 5 nodes", "0.0M parameters"]),
        ("eagle3", ["EAGLE-3 at ", "1 layer, ", " of 320 tokens, ", "taps target layers 0, 1, 2"]),
        ("draft_model", ["draft model LlamaForCausalLM at ", "1 layer, ", "context 512"]),
    ],
)
def test_doctor_examines_drafts_of_all_methods(
    method: str, parts: list[str], call: Call, rival_drafts: dict[str, Path]
) -> None:
    value = strict_json((done := call("doctor", "--json", "--draft", rival_drafts[method])).out)
    found = next(finding for finding in value["findings"] if finding["name"] == "draft")
    assert done.code == 0 and found["problem"] is None, done.out
    for part in (*parts, str(rival_drafts[method]), "fits the target", "no training.json"):
        assert part in found["value"]


def test_doctor_names_what_is_wrong_with_a_draft(
    call: Call, folder: Path, draft: Path, rival_drafts: dict[str, Path], tmp_path: Path
) -> None:
    """The target's own folder; a broken file; T11: trained for another target or in another mode."""
    broken, trained = tmp_path / "broken", tmp_path / "trained"
    shutil.copytree(rival_drafts["medusa"], broken)
    (broken / "model.safetensors").write_bytes(b"")
    shutil.copytree(draft, trained)
    made = {"target": "t", "target_sha256": "0" * 64, "chat_template": {"sha256": None, "thinking": True}}
    (trained / "training.json").write_text(json.dumps(made))
    for place, sentence in (
        (folder, "is the target itself"),
        (broken, "cannot be read"),
        (trained, "made for t with other weights than"),
        (trained, "trained with thinking on, and now"),
    ):
        done = call("doctor", "--draft", place)
        assert done.code == 1 and sentence in done.out


def test_doctor_on_a_broken_installation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A package that does not import or is too old, a cache that cannot be written: a remedy each."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    wrong = {f.name: f.problem for f in doctor.examine("x") if f.problem}
    assert list(wrong) == ["transformers"]
    assert "pip install" in (wrong["transformers"] or "")
    monkeypatch.setattr(doctor, "_wanted", lambda name: "99.1")
    assert "pip install --upgrade 'torch>=99.1'" in (doctor._package("torch").problem or "")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLASHDRAFT_CACHE", str(tmp_path / "file" / "cache"))
    assert "FLASHDRAFT_CACHE" in (doctor._cache_folder().problem or "")


def test_doctor_compares_versions() -> None:
    assert doctor._new_enough("2.13.0+cpu", "2.6")
    assert doctor._new_enough("5.17.0.dev0", "5.17")
    assert not doctor._new_enough("2.5.1", "2.6")
    assert doctor._wanted("torch")
