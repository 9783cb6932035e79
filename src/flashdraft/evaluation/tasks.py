"""Tasks: named lists of prompts, read from JSON lines by path; a small set of our own ships along.

The names of the field's sets (gsm8k, math500, humaneval, mbpp, mt_bench, spec_bench...) are file
names here: nothing is downloaded. A file whose rows say `group` (spec_bench's six) is a domain a group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from ..text import encode_chat, encode_text
from ..training.data import Prompt, Rejected, read_prompts
from ..types import FlashdraftError

if TYPE_CHECKING:
    from ..target import Target

SHIPPED = "ours"


@dataclass(frozen=True)
class TaskPrompt:
    """One prompt of a task, as the target reads it."""

    task: str
    id: str
    token_ids: tuple[int, ...]


def shipped_file() -> Path:
    """The prompts that come with the package."""
    return Path(str(resources.files("flashdraft") / "data" / "bench_prompts.jsonl"))


def read_tasks(files: Mapping[str, str], count: int | None, target: Target) -> dict[str, list[TaskPrompt]]:
    """Prompts by domain: `count` of each, evenly spread over its file; the first turn of each.

    Raises FlashdraftError for a file that cannot be read, a row that is no prompt, a task without any.
    """
    tasks: dict[str, list[TaskPrompt]] = {}
    for name, file in files.items():
        path = shipped_file() if file == SHIPPED else Path(file).expanduser()
        by_domain: dict[str, list[Prompt]] = {}
        for prompt in read_prompts([path], _refuse):
            by_domain.setdefault(_domain(name, prompt), []).append(prompt)
        if not by_domain:
            raise FlashdraftError(f"{path} has no prompt; expected JSON lines with prompt, turns or messages.")
        for domain, prompts in by_domain.items():
            if domain in tasks:
                raise FlashdraftError(f"two tasks are called {domain!r}; name them differently.")
            tasks[domain] = [
                TaskPrompt(domain, prompt.id, tuple(_encode(prompt, target))) for prompt in spread(prompts, count)
            ]
    return tasks


def spread(items: Sequence[Prompt], count: int | None) -> list[Prompt]:
    """`count` items at even distances, all if there are no more: files are often sorted."""
    if count is None or len(items) <= count:
        return list(items)
    return [items[i * len(items) // count] for i in range(count)]


def _domain(task: str, prompt: Prompt) -> str:
    return task if prompt.group is None else f"{task}/{prompt.group}"


def _encode(prompt: Prompt, target: Target) -> list[int]:
    if target.tokenizer is None:
        raise FlashdraftError(f"{target.name} has no tokenizer; prompts of a task are text.")
    if not target.tokenizer.chat_template:
        return encode_text(target.tokenizer, prompt.turns[0])
    system = [{"role": "system", "content": prompt.system}] if prompt.system else []
    return encode_chat(target.tokenizer, [*system, {"role": "user", "content": prompt.turns[0]}])


def _refuse(rejected: Rejected) -> None:
    raise FlashdraftError(rejected.sentence)
