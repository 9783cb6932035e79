"""flashdraft demo: both arms compared token by token; a difference is reported, not hidden."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cli_bed import PROMPT, Call, engine_answer, save_target, tokens
from flashdraft import demo
from flashdraft.engine import Engine
from flashdraft.target import Target
from flashdraft.text import encode_chat
from flashdraft.types import Request, Result, SamplingParams, Stats

PROMPTS = [
    {"kind": "copying", "prompt": "Repeat: [bold] the boats, the boats, the boats", "repeats_prompt": True},
    {"kind": "story", "prompt": "The harbour"},
]


@pytest.mark.parametrize("drafter", ["ngram", "dflash"])
@pytest.mark.parametrize("columns", ["140", "60"])
def test_demo_compares_both_ways(
    columns: str,
    drafter: str,
    call: Call,
    draft: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    file = tmp_path / "prompts.json"
    file.write_text(json.dumps(PROMPTS))
    options = ["--draft", draft] if drafter == "dflash" else []
    done = call("demo", "--prompts", file, "--max-tokens", 20, "--repeat", 2, *options)
    assert done.code == 0, done.out
    assert len(re.findall(r"identical: (\d+) of \1 tokens", done.out)) == 2
    arms = 2 if drafter == "dflash" else 1  # a draft is compared with n-grams, too
    assert f"Texts: {2 * arms} of {2 * arms} identical" in done.out
    assert "Repeat: [bold] the boats" in done.out
    assert ("come from prompt lookup" in done.out) == (drafter == "ngram")
    assert bool(re.search(r"^plain +speculative", done.out, re.MULTILINE)) == (columns == "140")
    numbers = 5 + (columns == "140" and drafter == "dflash")
    for row in ("copying", "story"):
        assert re.search(rf"^{row}(?: +\d+(?:\.\d+)?){{{numbers}}} *$", done.out, re.MULTILINE), done.out
        # slot by slot a bar and per cent, as many as the terminal has room for
        slots = re.search(rf"^{row} +((?:[ ▁▂▃▄▅▆▇█] *\d+ *)+)$", done.out.split("kept slots")[1], re.MULTILINE)
        assert slots is not None, done.out
        shares = [int(number) for number in re.findall(r"\d+", slots[1])]
        assert len(shares) == {"140": 7, "60": 5}[columns]
        assert max(shares) <= 100


def test_built_in_prompts_are_of_both_kinds() -> None:
    cases = demo.read_prompts()
    assert [sum(case.repeats_prompt is kind for case in cases) for kind in (True, False)] == [2, 5]
    assert len({case.kind for case in cases}) == 7


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("[", "cannot be read as JSON"),
        ("[]", "holds no prompts"),
        ('[{"prompt": " "}]', "holds no prompts"),
        (None, "No such file"),
    ],
)
def test_demo_refuses_bad_prompts(content: str | None, part: str, call: Call, tmp_path: Path) -> None:
    file = tmp_path / "prompts.json"
    if content is not None:
        file.write_text(content)
    done = call("demo", "--prompts", file)
    assert done.code == 2
    assert part in done.err
    assert "ngram" in call("demo", "--drafter", "none").err


def test_demo_reports_texts_that_differ(
    call: Call, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One arm decodes with other weights: found, shown with the gap, and the demo fails."""
    other = Target.load(save_target(tmp_path / "other", seed=1), dtype="float32")
    case = demo.Case("story", PROMPT, False)
    request = Request(
        encode_chat(target.tokenizer, [{"role": "user", "content": PROMPT}]), SamplingParams(max_tokens=9)
    )
    plain, wrong = Engine(target, reuse_prefix=False), Engine(other, reuse_prefix=False)
    assert demo.compare(plain, Engine(target), case, request, 1).differs_at is None
    found = demo.compare(plain, wrong, case, request, 1)
    at = demo.first_difference(found.plain[0].token_ids, found.speculative[0].token_ids)
    assert found.differs_at == at is not None
    logprobs = engine_answer(target, max_tokens=9, logprobs=2).tokens[at].top_logprobs
    assert found.gap == pytest.approx(logprobs[0][1] - logprobs[1][1])
    assert f"differs from token {at + 1} on" in demo.verdict(found).plain
    assert f"{found.gap:.3g} apart" in demo.verdict(found).plain
    assert not demo.explained(found, torch.float32)

    monkeypatch.setattr(demo, "compare_all", lambda *_: [found])
    done = call("demo", "--max-tokens", 9)
    assert done.code == 1
    assert "Texts: 0 of 7 identical" in done.out


def test_a_near_tie_explains_a_difference() -> None:
    result = Result(0, (5, 6), "ab", tuple(tokens(("a", "bonus"), ("b", "bonus"))), "stop", 0, _stats())
    found = demo.Comparison(demo.Case("x", "y", False), (result,), (replace(result, token_ids=(5, 7)),), 1, 0.125)
    assert demo.explained(found, torch.bfloat16)
    assert not demo.explained(found, torch.float32)
    assert not demo.explained(replace(found, gap=2.0), torch.bfloat16)
    assert not demo.explained(replace(found, gap=None), torch.bfloat16)
    assert "0.125 apart" in demo.verdict(found).plain
    assert demo.first_difference((1, 2), (1, 2)) is None
    assert demo.first_difference((1, 2, 3), (1, 2)) == 2


def _stats() -> Any:
    return Stats(1, 0, (), 0.1, 0.0, 0.1, 0.2)
