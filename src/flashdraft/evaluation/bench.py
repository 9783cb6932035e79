"""`flashdraft bench`: every drafter against plain decoding, in one run, per domain.

All arms are the same engine; the plain one has the drafter that proposes nothing. Arms take turns on
each group of prompts, and who begins rotates, so that a machine whose speed drifts favours nobody.
Both are warmed up before any clock counts. A sampled prompt has the same seed in every arm.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from ..drafters import Drafter, drafter_name, drafter_options, make_drafter
from ..engine import Engine
from ..sampling import counter_key
from ..settings import make_settings
from ..target import Target
from ..text import template_digest
from ..types import FlashdraftError, Request, Result, SamplingParams
from .records import PLAIN, Cell, Record, RecordFile
from .tasks import SHIPPED, TaskPrompt, read_tasks

_PROMPTS = 32  # a stream of counter_key of our own
_WARM_UP = 16  # tokens


@dataclass(frozen=True)
class Arm:
    """A drafter to measure, at one block size. `name` is what records and reports call it; `options` are
    the drafter's own (make_drafter)."""

    drafter: str | None = None
    draft: str | None = None
    block_size: int | None = None
    name: str | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class BenchConfig:
    """What to measure.

    Attributes:
        tasks: name -> file of prompts; "ours" as the file is the set that ships along.
        drafters: maps with `drafter`, `draft`, `name`, `options`, and `block_size` or `block_sizes`.
        prompts: of each domain, evenly spread over its file; None is all.
        rows: batch sizes. repeats: of every group; figures are medians over them.
        keep_texts: answers of each domain whose tokens are kept for the report's token view.
    """

    out: str
    target: str = "smollm2"
    drafters: tuple[dict[str, Any], ...] = ()
    tasks: dict[str, str] = field(default_factory=lambda: {SHIPPED: SHIPPED})
    prompts: int | None = 20
    temperatures: tuple[float, ...] = (0.0,)
    rows: tuple[int, ...] = (1,)
    max_tokens: int = 128
    repeats: int = 3
    seed: int = 0
    acceptance: str = "coupled"
    dtype: str = "auto"
    device: str | None = None
    threads: int | None = None
    keep_texts: int = 1

    def __post_init__(self) -> None:
        for name in ("max_tokens", "repeats", *(["prompts"] if self.prompts is not None else [])):
            if getattr(self, name) < 1:
                raise FlashdraftError(f"{name} is {getattr(self, name)}; expected at least 1.")
        if not self.rows or min(self.rows) < 1:
            raise FlashdraftError(f"rows is {list(self.rows)}; expected batch sizes of at least 1.")
        if not self.temperatures:
            raise FlashdraftError("temperatures is empty; expected at least one, 0 is greedy.")

    def arms(self) -> list[Arm]:
        """One for each drafter and block size. Raises FlashdraftError for names that would collide."""
        found = [arm for raw in self.drafters for arm in _arms(raw)]
        names = [(arm_name(arm), arm.block_size) for arm in found]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None or any(name == PLAIN for name, _ in names):
            raise FlashdraftError(f"two arms are called {(twice or (PLAIN, 0))[0]!r}; give them names of their own.")
        return found


def _arms(raw: Mapping[str, Any]) -> list[Arm]:
    """`block_sizes` stands for several arms."""
    sizes = raw.get("block_sizes", raw.get("block_size"))
    own = {k: v for k, v in raw.items() if k not in ("block_size", "block_sizes")}
    return [
        make_settings(Arm, {**own, "block_size": size}, "a drafter")
        for size in (sizes if isinstance(sizes, list) else [sizes])
    ]


def arm_name(arm: Arm) -> str:
    """Its own, or the method and the options that are not as usual."""
    if arm.name is not None or (arm.drafter is None and arm.draft is None):
        return arm.name or PLAIN
    options = (f"{key}={value}".lower() for key, value in arm.options.items())
    return " ".join([drafter_name(arm.drafter, arm.draft), *options])


def make_arm(arm: Arm, target: Target) -> Drafter:
    name = drafter_name(arm.drafter, arm.draft, target.name)
    return make_drafter(target, name, arm.draft, arm.block_size, **drafter_options(name, arm.options))


@dataclass(frozen=True)
class _Group:
    """Prompts of a domain that are decoded together."""

    task: str
    number: int
    prompts: tuple[TaskPrompt, ...]


Advance = Callable[[int, int, str], None]


def run_bench(
    config: BenchConfig, advance: Advance = lambda done, total, task: None, target: Target | None = None
) -> RecordFile:
    """Measure what the file does not have yet.

    Args:
        advance: told how many of how many groups are done, and what comes next.
        target: already loaded; None loads the configuration's.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    arms = config.arms()
    target = target or Target.load(config.target, dtype=config.dtype, device=config.device)
    tasks = read_tasks(config.tasks, config.prompts, target)
    settings = asdict(config) | {"out": None}
    drafters = [make_arm(arm, target) for arm in arms]
    ways = {arm_name(a): {"method": d.name, "tree": d.drafts_trees} for a, d in zip(arms, drafters, strict=True)}
    header = {"settings": json.loads(json.dumps(settings)), "environment": environment(target), "arms": ways}
    file = RecordFile(config.out, header)
    cells = [(arm_name(arm), drafter) for arm, drafter in zip(arms, drafters, strict=True)]
    sizes = [(name, drafter.max_draft_tokens) for name, drafter in cells]
    if len(set(sizes)) < len(sizes):  # trees of one name and as many nodes, say
        name, size = next(pair for pair in sizes if sizes.count(pair) > 1)
        raise FlashdraftError(f"two arms are called {name!r} and draft {size} tokens; give them names of their own.")
    parts = [
        _Bench(config, target, tasks, cells, rows, temperature, file)
        for rows in config.rows
        for temperature in config.temperatures
    ]
    total = sum(len(part.todo) for part in parts)
    done = 0
    for part in parts:
        for task in part.run():
            advance(done, total, f"{task} at temperature {part.temperature:g}, {part.rows} at a time")
            done += 1
    advance(total, total, "")
    return file


class _Bench:
    """All arms at one temperature and one batch size."""

    def __init__(
        self,
        config: BenchConfig,
        target: Target,
        tasks: Mapping[str, Sequence[TaskPrompt]],
        arms: Sequence[tuple[str, Drafter]],
        rows: int,
        temperature: float,
        file: RecordFile,
    ) -> None:
        self.rows, self.temperature = rows, temperature
        self._config, self._target, self._file = config, target, file
        groups = list(_groups(tasks, rows))
        longest = max(len(p.token_ids) for group in groups for p in group.prompts)
        self._room = min(target.max_context, longest + config.max_tokens)
        self._drafters: dict[Cell, Drafter | None] = {Cell(PLAIN, 0, temperature, rows): None}
        self._drafters |= {
            Cell(name, drafter.max_draft_tokens + 1, temperature, rows): drafter for name, drafter in arms
        }
        wanted = [(repeat, group) for repeat in range(config.repeats) for group in groups]
        self.todo = [(r, g) for r, g in wanted if any(self._missing(cell, r, g) for cell in self._drafters)]

    def run(self) -> Iterator[str]:
        """Measures group after group; says before each which task it is of."""
        if not self.todo:
            return
        self._engines = {
            cell: Engine(self._target, drafter, max_rows=self.rows, max_context=self._room, reuse_prefix=False)
            for cell, drafter in self._drafters.items()
        }
        for cell in self._engines:
            self._engines[cell].run(self._requests(cell, self.todo[0][1], _WARM_UP))
        for repeat, group in self.todo:
            yield group.task
            cells = list(self._engines)
            first = (repeat + group.number) % len(cells)  # who begins rotates
            for cell in cells[first:] + cells[:first]:
                if self._missing(cell, repeat, group):
                    self._file.add(self._measure(cell, repeat, group))

    def _missing(self, cell: Cell, repeat: int, group: _Group) -> bool:
        return (cell, group.task, group.number, repeat) not in self._file.done

    def _requests(self, cell: Cell, group: _Group, max_tokens: int) -> list[Request]:
        return [
            Request(
                prompt.token_ids,
                SamplingParams(
                    max_tokens=max_tokens,
                    temperature=cell.temperature,
                    seed=_seed(self._config.seed, prompt),
                    acceptance=self._config.acceptance,  # type: ignore[arg-type]
                ),
            )
            for prompt in group.prompts
        ]

    def _measure(self, cell: Cell, repeat: int, group: _Group) -> list[Record]:
        requests = self._requests(cell, group, self._config.max_tokens)
        others = _OtherWork()
        if self._target.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._target.device)
        began = time.perf_counter()
        results = self._engines[cell].run(requests)
        seconds = time.perf_counter() - began - sum(result.stats.prefill_seconds for result in results)
        load = others.load()
        keep = repeat == 0 and group.number * cell.rows < self._config.keep_texts
        return [
            _record(cell, repeat, group, prompt, result, seconds, load, _peak_mb(self._target.device), keep)
            for prompt, result in zip(group.prompts, results, strict=True)
        ]


def _groups(tasks: Mapping[str, Sequence[TaskPrompt]], rows: int) -> Iterator[_Group]:
    """Domain after domain would let a drift of the machine's speed look like a difference between
    domains; their groups come in turns."""
    cut = {task: [prompts[i : i + rows] for i in range(0, len(prompts), rows)] for task, prompts in tasks.items()}
    for number in range(max(map(len, cut.values()))):
        for task, parts in cut.items():
            if number < len(parts):
                yield _Group(task, number, tuple(parts[number]))


def _seed(seed: int, prompt: TaskPrompt) -> int:
    digest = hashlib.sha256(f"{prompt.task} {prompt.id}".encode()).digest()
    return counter_key(seed, int.from_bytes(digest[:4], "big"), _PROMPTS) >> 1


def _record(
    cell: Cell, repeat: int, group: _Group, prompt: TaskPrompt, result: Result, seconds: float, load: float,
    peak_mb: float, keep: bool,
) -> Record:  # fmt: skip
    stats = result.stats
    return Record(
        cell=cell,
        task=group.task,
        prompt=prompt.id,
        group=group.number,
        group_size=len(group.prompts),
        repeat=repeat,
        num_prompt_tokens=stats.num_prompt_tokens,
        num_tokens=len(result.token_ids),
        ids_sha256=hashlib.sha256(repr(result.token_ids).encode()).hexdigest()[:16],
        finish_reason=result.finish_reason,
        rounds=tuple((r.num_drafted, r.num_accepted, r.num_committed) for r in stats.rounds),
        prefill_seconds=round(stats.prefill_seconds, 6),
        draft_seconds=round(stats.draft_seconds, 6),
        verify_seconds=round(stats.verify_seconds, 6),
        decode_seconds=round(seconds, 6),
        peak_mb=peak_mb,
        load=load,
        pieces=tuple((token.text, token.origin) for token in result.tokens) if keep else (),
    )


def environment(target: Target) -> dict[str, Any]:
    """What a figure depends on besides the settings."""
    import transformers

    from .. import __version__

    cuda = target.device.type == "cuda"
    return {
        "flashdraft": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(target.device) if cuda else _cpu_name(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "dtype": str(target.dtype).removeprefix("torch."),
        "chat_template_sha256": template_digest(target.tokenizer) if target.tokenizer is not None else None,
    }


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:  # noqa: PTH123
            name = next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
    return name


def _peak_mb(device: torch.device) -> float:
    if device.type == "cuda":
        return round(torch.cuda.max_memory_allocated(device) / 2**20, 1)
    try:
        import resource
    except ImportError:  # not on Windows
        return 0.0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (2**20 if sys.platform == "darwin" else 2**10), 1)


class _OtherWork:
    """CPUs that were busy with other processes' work (or taken by the host) since this was made."""

    def __init__(self) -> None:
        self._began, self._own, self._all = time.perf_counter(), time.process_time(), _busy_seconds()

    def load(self) -> float:
        seconds = max(time.perf_counter() - self._began, 1e-6)
        now = _busy_seconds()
        if now is None or self._all is None:  # not on Linux: a load average, which follows slowly
            average = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
            return max(0.0, round(average - torch.get_num_threads(), 2))
        return max(0.0, round((now - self._all - (time.process_time() - self._own)) / seconds, 2))


def _busy_seconds() -> float | None:
    """CPU seconds of all processes since the start of the machine; None where nobody counts them."""
    try:
        with open("/proc/stat", encoding="utf-8") as file:  # noqa: PTH123
            user, nice, system, _idle, _wait, irq, softirq, steal = map(int, file.readline().split()[1:9])
    except (OSError, ValueError):
        return None
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
