"""Tasks: named lists of prompts, read from JSON lines by path; a small set of our own ships along.

The names of the field's sets (gsm8k, math500, humaneval, mbpp, mt_bench, spec_bench...) are file
names here: nothing is downloaded. A file whose rows say `group` (spec_bench's six) is a domain a group.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from ..text import Message, encode_chat, encode_text
from ..training.data import Prompt, Rejected, read_prompts
from ..types import FlashdraftError

if TYPE_CHECKING:
    from ..target import Target

SHIPPED = "ours"


@dataclass(frozen=True)
class TaskPrompt:
    """One prompt of a task: what is said, and its ids as the target reads it (none without a target)."""

    task: str
    id: str
    messages: tuple[Message, ...]
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Group:
    """Prompts of a domain that are decoded together."""

    task: str
    number: int
    prompts: tuple[TaskPrompt, ...]


def shipped_file() -> Path:
    """The prompts that come with the package."""
    return Path(str(resources.files("flashdraft") / "data" / "bench_prompts.jsonl"))


def read_tasks(
    files: Mapping[str, str], count: int | None, target: Target | None = None
) -> dict[str, list[TaskPrompt]]:
    """Prompts by domain: `count` of each, evenly spread over its file, or N for a file that is given as
    FILE:N; the first turn of each.

    Raises FlashdraftError for a file that cannot be read, a row that is no prompt, a task without any.
    """
    tasks: dict[str, list[TaskPrompt]] = {}
    for name, file in files.items():
        path, wanted = _counted(file, count)
        by_domain: dict[str, list[Prompt]] = {}
        for prompt in read_prompts([path], _refuse):
            by_domain.setdefault(_domain(name, prompt), []).append(prompt)
        if not by_domain:
            raise FlashdraftError(f"{path} has no prompt; expected JSON lines with prompt, turns or messages.")
        for domain, prompts in by_domain.items():
            if domain in tasks:
                raise FlashdraftError(f"two tasks are called {domain!r}; name them differently.")
            tasks[domain] = [_prompt(domain, prompt, target) for prompt in spread(prompts, wanted)]
    return tasks


def _counted(file: str, count: int | None) -> tuple[Path, int | None]:
    """The path and the number of prompts that FILE or FILE:N means."""
    found = re.fullmatch(r"(.+):([1-9]\d*)", file)
    if found and not Path(file).expanduser().exists():
        file, count = found[1], int(found[2])
    return (shipped_file() if file == SHIPPED else Path(file).expanduser()), count


def spread(items: Sequence[Prompt], count: int | None) -> list[Prompt]:
    """`count` items at even distances, all if there are no more: files are often sorted."""
    if count is None or len(items) <= count:
        return list(items)
    return [items[i * len(items) // count] for i in range(count)]


def groups(tasks: Mapping[str, Sequence[TaskPrompt]], rows: int) -> Iterator[Group]:
    """Domain after domain would let a drift of the machine's speed look like a difference between
    domains; their groups come in turns."""
    cut = {task: [prompts[i : i + rows] for i in range(0, len(prompts), rows)] for task, prompts in tasks.items()}
    for number in range(max(map(len, cut.values()))):
        for task, parts in cut.items():
            if number < len(parts):
                yield Group(task, number, tuple(parts[number]))


def digest(tasks: Mapping[str, Sequence[TaskPrompt]]) -> str:
    """Of all prompts as they are sent: a file that changed is another benchmark."""
    said = {task: [prompt.token_ids or prompt.messages for prompt in prompts] for task, prompts in tasks.items()}
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()


def _domain(task: str, prompt: Prompt) -> str:
    return task if prompt.group is None else f"{task}/{prompt.group}"


def _prompt(domain: str, prompt: Prompt, target: Target | None) -> TaskPrompt:
    system: list[Message] = [{"role": "system", "content": prompt.system}] if prompt.system else []
    messages: list[Message] = [*system, {"role": "user", "content": prompt.turns[0]}]
    if target is None:
        return TaskPrompt(domain, prompt.id, tuple(messages))
    if target.tokenizer is None:
        raise FlashdraftError(f"{target.name} has no tokenizer; prompts of a task are text.")
    templated = bool(target.tokenizer.chat_template)
    ids = encode_chat(target.tokenizer, messages) if templated else encode_text(target.tokenizer, prompt.turns[0])
    return TaskPrompt(domain, prompt.id, tuple(messages), tuple(ids))


def _refuse(rejected: Rejected) -> None:
    raise FlashdraftError(rejected.sentence)
