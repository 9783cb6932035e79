"""`flashdraft bench` asks other engines' servers, beside our own decoding: the same command compares engines.

Used by parts of engines.py, which start the servers: one with the draft, one without; and by whatever asks an engine
for the prompts of files.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engines_tools import call

from flashdraft import Target
from flashdraft.evaluation.records import PLAIN, read_records
from flashdraft.evaluation.summary import Summary, summarise
from flashdraft.evaluation.tasks import TaskPrompt, read_tasks

NEAR = 0.10  # the same draft, asked by the same prompts, may differ by what rounding does to it


def pick(files: Sequence[str], count: int, target: Target) -> tuple[TaskPrompt, ...]:
    """`count` prompts, the same number of each file."""
    each = -(-count // len(files))
    tasks = read_tasks({Path(file).stem: file for file in files}, each, target)
    return tuple(prompt for prompts in tasks.values() for prompt in prompts)[:count]


def measured(folder: Path, server: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """Facts of a run over the shipped prompts; records lie in FOLDER/bench.jsonl.

    Args:
        server: fields of `ServerSpec`. settings: of `BenchConfig`, over what is usual here.
    """
    out, config = folder / "bench.jsonl", folder / "bench.yaml"
    out.unlink(missing_ok=True)
    wanted = {
        "out": str(out), "target": "smollm2", "dtype": "float32", "servers": [server], "plain": False,
        "drafters": [{"draft": "smollm2"}], "prompts": 2, "max_tokens": 48, "repeats": 1, **settings,
    }  # fmt: skip
    config.write_text(json.dumps(wanted), encoding="utf-8")  # YAML reads JSON
    call([sys.executable, "-m", "flashdraft", "bench", config])
    return compared(summarise(read_records(out).records), str(server["name"]))


def compared(summaries: Sequence[Summary], name: str) -> dict[str, Any]:
    """Acceptance of a server and ours, over all domains. Raises AssertionError if requests failed, nothing
    was counted, no plain server was measured, or acceptance is further than NEAR from ours."""
    served = [s for s in summaries if s.cell.server == name and s.cell.arm != PLAIN]
    ours = [s for s in summaries if not s.cell.server and s.cell.arm != PLAIN]
    plain = [s for s in summaries if s.cell.server == name and s.cell.arm == PLAIN]
    assert served and ours and plain, f"{name}, {name} without a draft, and ours have to be measured; one is not"
    failed = sum(s.num_failed for s in (*served, *plain))
    assert not failed, f"{failed} requests to {name} failed"
    theirs, own = pooled(served), pooled(ours)
    assert theirs is not None, f"{name} did not say what was accepted"
    assert own is not None and abs(theirs / own - 1) <= NEAR, f"{name} accepts {theirs:.3f} tokens a pass, we {own}"
    equal = sum(round((s.equal or 0) * s.num_prompts) for s in served)
    return {
        "bench: acceptance": round(theirs, 3), "bench: ours": round(own, 3),
        "bench: texts as without the draft": f"{equal} of {sum(s.num_prompts for s in served)}",
    }  # fmt: skip


def pooled(summaries: Sequence[Summary]) -> float | None:
    """Tokens a pass, of all domains; None if a domain has no count."""
    if any(s.tau.value != s.tau.value or not s.num_rounds for s in summaries):
        return None
    return sum(s.tau.value * s.num_rounds for s in summaries) / sum(s.num_rounds for s in summaries)
