"""`flashdraft bench`: every drafter against plain decoding, in one run, per domain.

All arms are the same engine; the plain one has the drafter that proposes nothing. Arms take turns on
each group of prompts, and who begins rotates, so that a machine whose speed drifts favours nobody.
Both are warmed up before any clock counts. A sampled prompt has the same seed in every arm.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from ..drafters import Drafter, drafter_name, drafter_options, make_drafter
from ..engine import Engine
from ..locate import locate_draft, locate_draft_of
from ..provenance import draft_warnings
from ..sampling import counter_key
from ..settings import make_settings
from ..target import Target
from ..types import FlashdraftError, Request, Result, SamplingParams
from .machine import OtherWork, environment, peak_mb
from .records import PLAIN, Cell, Record, RecordFile, begun, round_counts
from .servers import Server, ServerSpec
from .tasks import SHIPPED, Group, TaskPrompt, digest, groups, read_tasks

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
        tasks: name -> file of prompts, or FILE:N for N of them; "ours" is the set that ships along.
        servers: maps with the fields of ServerSpec; without drafters beside them, nothing is loaded here.
        plain: whether plain decoding is an arm; without it there is no ratio.
        drafters: maps with `drafter`, `draft`, `name`, `options`, and `block_size` or `block_sizes`.
        prompts: of each domain, evenly spread over its file; None is all.
        rows: batch sizes. repeats: of every group; figures are medians over them.
        keep_texts: answers of each domain whose tokens are kept for the report's token view.
    """

    out: str
    target: str = "smollm2"
    drafters: tuple[dict[str, Any], ...] = ()
    servers: tuple[dict[str, Any], ...] = ()
    plain: bool = True
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
        if not (self.plain or self.drafters or self.servers):
            raise FlashdraftError("nothing is to be measured: no drafter, no server, and plain is off.")

    def arms(self) -> list[Arm]:
        """One for each drafter and block size. Raises FlashdraftError for names that would collide."""
        found = [arm for raw in self.drafters for arm in _arms(raw)]
        names = [(arm_name(arm), arm.block_size) for arm in found]
        for spec in self.server_specs():  # a name stands for one thing, whatever the block
            names += [(spec.label, size) for size in {0, *(size for name, size in names if name == spec.label)}]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None or any(name == PLAIN for name, _ in names):
            raise FlashdraftError(f"two arms are called {(twice or (PLAIN, 0))[0]!r}; give them names of their own.")
        return found

    def server_specs(self) -> list[ServerSpec]:
        return [make_settings(ServerSpec, raw, "a server") for raw in self.servers]


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


Advance = Callable[[int, int, str], None]


def run_bench(
    config: BenchConfig,
    advance: Advance = lambda done, total, task: None,
    target: Target | None = None,
    warn: Callable[[str], None] = lambda sentence: None,
) -> RecordFile:
    """Measure what the file does not have yet.

    Args:
        advance: told how many of how many groups are done, and what comes next.
        target: already loaded; None loads the configuration's.
        warn: told of drafts that were made for something else (provenance.py), before anything is measured.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    arms = config.arms()
    if arms or not config.servers:
        target = target or Target.load(config.target, dtype=config.dtype, device=config.device)
    else:
        target = None  # the servers have their own
    tasks = read_tasks(config.tasks, config.prompts, target)
    drafters = [] if target is None else [(arm_name(arm), make_arm(arm, target)) for arm in arms]
    sizes = [(name, drafter.max_draft_tokens) for name, drafter in drafters]
    if len(set(sizes)) < len(sizes):  # trees of one name and as many nodes, say
        name, size = next(pair for pair in sizes if sizes.count(pair) > 1)
        raise FlashdraftError(f"two arms are called {name!r} and draft {size} tokens; give them names of their own.")
    for sentence in [] if target is None else _warnings(arms, target):
        warn(sentence)
    servers = [(spec.label, arm, server) for spec in config.server_specs() for arm, server in spec.arms()]
    header = {
        "settings": _settings(config),
        "environment": environment(target),
        "arms": {name: {"method": d.name, "tree": d.drafts_trees} for name, d in drafters},
        # of a file that is gone on with the header stays, and a server that is not needed need not be there
        "servers": {} if begun(config.out) else {server.name: server.describe() for _, _, server in servers},
        "digests": {"prompts": digest(tasks), **dict(filter(None, map(_weights_digest, arms)))},
    }
    file = RecordFile(config.out, header)
    parts = []
    for rows in config.rows:
        for temperature in config.temperatures:
            runners: list[Runner] = []
            if target is not None:
                room = _room(target, tasks, config.max_tokens)
                cells: list[tuple[Cell, Drafter | None]] = []
                cells += [(Cell(PLAIN, 0, temperature, rows), None)] if config.plain else []
                cells += [(Cell(name, d.max_draft_tokens + 1, temperature, rows), d) for name, d in drafters]
                runners += [_Local(config, target, cell, drafter, room) for cell, drafter in cells]
            runners += [_Remote(config, Cell(arm, 0, temperature, rows, name), s) for name, arm, s in servers]
            parts.append(_Bench(config, tasks, runners, rows, temperature, file))
    total = sum(len(part.todo) for part in parts)
    done = 0
    for part in parts:
        for task in part.run():
            advance(done, total, f"{task} at temperature {part.temperature:g}, {part.rows} at a time")
            done += 1
    advance(total, total, "")
    return file


def _warnings(arms: Sequence[Arm], target: Target) -> list[str]:
    """What is not as the drafts' files say; once for arms of one draft."""
    named = {(drafter_name(arm.drafter, arm.draft), arm.draft): arm_name(arm) for arm in arms if arm.draft is not None}
    return [
        f"{name}: {sentence}"
        for (method, draft), name in named.items()
        for sentence in draft_warnings(locate_draft_of(method, str(draft)), target)
    ]


def _settings(config: BenchConfig) -> dict[str, Any]:
    """What a file's runs have in common; keys of newer versions only where they say something."""
    settings = asdict(config) | {"out": None}
    usual = {"servers": (), "plain": True}
    made: dict[str, Any] = json.loads(
        json.dumps({k: v for k, v in settings.items() if k not in usual or v != usual[k]})
    )
    return made


def _room(target: Target, tasks: Mapping[str, Sequence[TaskPrompt]], max_tokens: int) -> int:
    return min(target.max_context, max(len(p.token_ids) for prompts in tasks.values() for p in prompts) + max_tokens)


def _weights_digest(arm: Arm) -> tuple[str, str] | None:
    """(name, hash) of an arm's draft: a folder that is trained on is another draft."""
    if arm.draft is None:
        return None
    folder = Path(arm.draft).expanduser()
    if not folder.is_dir() and drafter_name(arm.drafter, arm.draft) != "draft_model":
        folder = locate_draft(arm.draft)
    found = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            found.update(hashlib.file_digest(stream, "sha256").digest())
    return f"draft of {arm_name(arm)}", found.hexdigest()


class Runner(Protocol):
    """An arm at one temperature and one batch size: what a group is sent through."""

    cell: Cell

    def warm_up(self, group: Group) -> None: ...

    def measure(self, repeat: int, group: Group) -> list[Record]: ...


class _Bench:
    """All arms at one temperature and one batch size."""

    def __init__(
        self,
        config: BenchConfig,
        tasks: Mapping[str, Sequence[TaskPrompt]],
        runners: Sequence[Runner],
        rows: int,
        temperature: float,
        file: RecordFile,
    ) -> None:
        self.rows, self.temperature = rows, temperature
        self._runners, self._file = list(runners), file
        wanted = [(repeat, group) for repeat in range(config.repeats) for group in groups(tasks, rows)]
        self.todo = [(r, g) for r, g in wanted if any(self._missing(runner, r, g) for runner in runners)]

    def run(self) -> Iterator[str]:
        """Measures group after group; says before each which task it is of."""
        if not self.todo:
            return
        for runner in self._runners:
            runner.warm_up(self.todo[0][1])
        for repeat, group in self.todo:
            yield group.task
            first = (repeat + group.number) % len(self._runners)  # who begins rotates
            for runner in self._runners[first:] + self._runners[:first]:
                if self._missing(runner, repeat, group):
                    self._file.add(runner.measure(repeat, group))

    def _missing(self, runner: Runner, repeat: int, group: Group) -> bool:
        return (runner.cell, group.task, group.number, repeat) not in self._file.done


class _Remote:
    """An arm that is a server."""

    def __init__(self, config: BenchConfig, cell: Cell, server: Server) -> None:
        self.cell, self._config, self._server = cell, config, server

    def warm_up(self, group: Group) -> None:
        self._server.warm_up(group.prompts[0], self.cell.temperature, self.cell.arm == PLAIN)

    def measure(self, repeat: int, group: Group) -> list[Record]:
        # 31 bits: not every server takes more
        seeds = [_seed(self._config.seed, prompt) & 0x7FFFFFFF for prompt in group.prompts]
        return self._server.measure(self.cell, repeat, group, self._config.max_tokens, seeds)


class _Local:
    """An arm that is a drafter, or plain decoding, in this program's own engine."""

    def __init__(self, config: BenchConfig, target: Target, cell: Cell, drafter: Drafter | None, room: int) -> None:
        self.cell, self._config, self._target, self._drafter, self._room = cell, config, target, drafter, room

    def warm_up(self, group: Group) -> None:
        self._engine = Engine(
            self._target, self._drafter, max_rows=self.cell.rows, max_context=self._room, reuse_prefix=False
        )
        self._engine.run(self._requests(group, _WARM_UP))

    def measure(self, repeat: int, group: Group) -> list[Record]:
        requests = self._requests(group, self._config.max_tokens)
        others, device = OtherWork(), self._target.device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        began = time.perf_counter()
        results = self._engine.run(requests)
        seconds = time.perf_counter() - began - sum(result.stats.prefill_seconds for result in results)
        cache = self._drafter.bytes_per_context_token if self._drafter is not None else 0
        made = {"decode_seconds": round(seconds, 6), "load": others.load(), "peak_mb": peak_mb(device)}
        made |= {"draft_bytes_per_context_token": cache}
        keep = repeat == 0 and group.number * self.cell.rows < self._config.keep_texts
        return [
            _record(self.cell, repeat, group, prompt, result, made, keep)
            for prompt, result in zip(group.prompts, results, strict=True)
        ]

    def _requests(self, group: Group, max_tokens: int) -> list[Request]:
        return [
            Request(
                prompt.token_ids,
                SamplingParams(
                    max_tokens=max_tokens,
                    temperature=self.cell.temperature,
                    seed=_seed(self._config.seed, prompt),
                    acceptance=self._config.acceptance,  # type: ignore[arg-type]
                ),
            )
            for prompt in group.prompts
        ]


def _seed(seed: int, prompt: TaskPrompt) -> int:
    digest = hashlib.sha256(f"{prompt.task} {prompt.id}".encode()).digest()
    return counter_key(seed, int.from_bytes(digest[:4], "big"), _PROMPTS) >> 1


def _record(
    cell: Cell, repeat: int, group: Group, prompt: TaskPrompt, result: Result, made: dict[str, Any], keep: bool
) -> Record:
    """made: what all of a group have in common."""
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
        rounds=tuple(round_counts(r) for r in stats.rounds),
        prefill_seconds=round(stats.prefill_seconds, 6),
        draft_seconds=round(stats.draft_seconds, 6),
        verify_seconds=round(stats.verify_seconds, 6),
        pieces=tuple((token.text, token.origin) for token in result.tokens) if keep else (),
        **made,
    )
