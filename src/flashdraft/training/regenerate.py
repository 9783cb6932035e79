"""Prompts -> sequences written by the target, with the batched engine here or over endpoints.

Both ways answer conversations turn by turn: every answer's prompt is the chat template's text of all
that was said before, the target's own answers included, exactly as in serving. Sampling seeds are a
function of (seed, id), so a row does not depend on order, batch, or how often the run was killed.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from ..text import encode_text
from ..types import FlashdraftError, SamplingParams
from .data import ChatTemplate, Prompt, Rejected, join_turns, read_prompts
from .output import Output
from .tally import Tally
from .ways import Answer, Conversation, Way, open_way

LOOP_TOKENS, LOOP_PERIOD = 48, 16
# rejected rows that the report on the screen shows
SHOWN = 20


@dataclass(frozen=True)
class RegenerateOptions:
    """What `flashdraft regenerate` is asked for; docs/regenerate.md explains it.

    Attributes:
        temperatures: several are split over the prompts by their ids.
        context: longest sequence, prompts and answers together; None is 2048, or the target's limit.
        rows: conversations at a time, in the local engine. concurrency: the same, per endpoint.
        model: what the endpoints call the target; None asks them.
        exact_ids: have the endpoints say the token ids (vLLM does) instead of encoding their text.
    """

    target: str
    prompts: Sequence[str | Path]
    out: str | Path
    max_tokens: int = 512
    temperatures: Sequence[float] = (0.0,)
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    system: str | None = None
    thinking: bool | None = None
    raw: bool = False
    context: int | None = None
    limit: int | None = None
    drop_loops: bool = False
    rows: int = 16
    drafter: str | None = None
    draft: str | Path | None = None
    drafter_options: Mapping[str, Any] = field(default_factory=dict)
    block_size: int | None = None
    dtype: str = "auto"
    device: str | None = None
    threads: int | None = None
    endpoints: Sequence[str] = ()
    model: str | None = None
    exact_ids: bool = False
    concurrency: int = 16
    retries: int = 6
    timeout: float = 600.0

    def __post_init__(self) -> None:
        if not self.prompts:
            raise FlashdraftError("there are no prompts; name at least one file with --prompts.")
        if not self.temperatures:
            raise FlashdraftError("temperatures is empty; expected at least one value.")
        for name in ("rows", "concurrency", "retries"):
            if getattr(self, name) < 1:
                raise FlashdraftError(f"{name} is {getattr(self, name)}; expected at least 1.")
        if self.limit is not None and self.limit < 1:
            raise FlashdraftError(f"limit is {self.limit}; expected at least 1.")
        if self.raw and (self.endpoints or self.system is not None or self.thinking is not None):
            raise FlashdraftError("raw prompts have no chat template: drop --endpoint, --system and --thinking.")
        if self.endpoints and (self.drafter is not None or self.draft is not None):
            raise FlashdraftError("endpoints draft by themselves; drop --drafter and --draft.")
        if self.block_size is not None and self.drafter is None and self.draft is None:
            raise FlashdraftError("a block size is for drafting; add --drafter ngram or --draft FOLDER.")
        for temperature in self.temperatures:
            self.sampling(temperature, 0)

    def sampling(self, temperature: float, seed: int) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.max_tokens, temperature=temperature, top_p=self.top_p, top_k=self.top_k, seed=seed
        )


@dataclass(frozen=True)
class Report:
    """What a run did. `before`: rows that were there already. `rejected`: how many by reason."""

    rows: int
    before: int
    tokens: int
    looping: int
    seconds: float
    rejected: Mapping[str, int]


def run_regenerate(options: RegenerateOptions, console: Console) -> Report:
    """Answer all prompts that OUT has no row of yet; progress and the report go to `console`.

    Raises FlashdraftError for what a user can mend. Whatever stops it, the rows written stay, and the
    same call goes on from there.
    """
    rejected: list[Rejected] = []
    prompts = _read(options, rejected.append)

    def say(sentence: str) -> None:
        console.print(sentence, soft_wrap=True, markup=False, highlight=False)

    with contextlib.ExitStack() as stack:
        with console.status(f"opening {options.target}") if console.is_terminal else contextlib.nullcontext():
            template, way, facts = open_way(options, stack, say)
        output = stack.enter_context(Output(options.out, _meta(options, template, facts)))
        todo = [prompt for prompt in prompts if prompt.id not in output.done]
        run = _Run(options, template, way, output, int(facts["context"]))
        run.rejected += output.rejected_before
        for problem in rejected:
            run.reject(problem)
        began = time.monotonic()
        with Tally(console, len(prompts), len(prompts) - len(todo)) as tally:
            try:
                for _ in run.answer(todo):
                    tally.update(run.num_finished, way.num_tokens, len(run.rejected))
            except KeyboardInterrupt:
                say(f"{run.num_rows} rows were written to {options.out}; the same command goes on from there.")
                raise
    report = Report(
        run.num_rows, output.num_rows, way.num_tokens, run.num_looping, time.monotonic() - began,
        Counter(problem.reason for problem in run.rejected),
    )  # fmt: skip
    _print_report(report, run.rejected, output, say)
    return report


def _read(options: RegenerateOptions, on_reject: Callable[[Rejected], None]) -> list[Prompt]:
    prompts = []
    for prompt in read_prompts(options.prompts, on_reject):
        if options.raw and (len(prompt.turns) > 1 or prompt.system is not None):
            on_reject(
                Rejected(prompt.file, prompt.line, prompt.id, "bad row", "raw prompts have one turn, and no system.")
            )
            continue
        prompts.append(prompt)
        if len(prompts) == options.limit:
            break
    if not prompts:
        raise FlashdraftError(f"no usable prompt in {', '.join(map(str, options.prompts))}; expected JSON lines.")
    return prompts


class _Run:
    """Conversations through a way, into an output."""

    def __init__(
        self, options: RegenerateOptions, template: ChatTemplate, way: Way, output: Output, context: int
    ) -> None:
        self.options, self.template, self.way, self.output, self.context = options, template, way, output, context
        self.rejected: list[Rejected] = []
        self.num_rows = self.num_looping = self.num_finished = 0

    def reject(self, problem: Rejected) -> None:
        self.rejected.append(problem)
        self.output.reject(problem)

    def answer(self, prompts: Sequence[Prompt]) -> Iterator[None]:
        """Answer all; yields after every poll."""
        source, live = iter(prompts), 0
        while True:
            while live < self.way.capacity and (prompt := next(source, None)) is not None:
                live += self._start(prompt)
            if not live:
                return
            for conversation, answer in self.way.poll():
                live -= not self._go_on(conversation, answer)
            yield

    def _start(self, prompt: Prompt) -> bool:
        system = prompt.system if prompt.system is not None else self.template.system
        draw = hashlib.sha256(f"{self.options.seed}/{prompt.id}".encode()).digest()
        temperatures = self.options.temperatures
        conversation = Conversation(
            prompt,
            temperatures[int.from_bytes(draw[4:8]) % len(temperatures)],
            seed=int.from_bytes(draw[:4]) >> 1,
            messages=[] if system is None else [{"role": "system", "content": system}],
        )
        return self._open_turn(conversation)

    def _open_turn(self, conversation: Conversation) -> bool:
        """Ask for the next answer; False if there is no room for one, and the conversation is over."""
        text = conversation.prompt.turns[len(conversation.turns)]
        conversation.messages.append({"role": "user", "content": text})
        problem: Rejected | None = None
        try:
            raw = self.options.raw
            ids = encode_text(self.template.tokenizer, text) if raw else self.template.opening(conversation.messages)
        except FlashdraftError as error:
            problem = conversation.reject("template", str(error))
        else:
            if len(ids) >= self.context:
                room = f"the prompt has {len(ids)} tokens; the context holds {self.context} with the answer."
                problem = conversation.reject("too long", room)
        if problem is not None:
            self._finish(conversation, problem)
            return False
        conversation.opening = ids
        self.way.submit(conversation)
        return True

    def _go_on(self, conversation: Conversation, answer: Answer | Rejected) -> bool:
        """Take an answer; whether the conversation goes on."""
        if isinstance(answer, Rejected):
            self._finish(conversation, answer)
            return False
        if not set(answer.token_ids) - self.template.eos_ids:
            self._finish(conversation, conversation.reject("empty", "the target's answer is empty.", answered=True))
            return False
        message = {"role": "assistant", "content": answer.text}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        conversation.messages.append(message)
        conversation.turns.append((conversation.opening, answer.token_ids))
        conversation.finish_reasons.append(answer.finish_reason)
        if len(conversation.turns) < len(conversation.prompt.turns):
            return self._open_turn(conversation)
        self._finish(conversation, None)
        return False

    def _finish(self, conversation: Conversation, problem: Rejected | None) -> None:
        """Write what there is of a conversation. One that broke off after whole turns keeps those,
        unless an endpoint failed it, which may go better next time."""
        self.num_finished += 1
        looping = any(ends_in_loop(answer) for _, answer in conversation.turns)
        if problem is not None and (not conversation.turns or problem.reason == "endpoint"):
            self.reject(problem)
        elif looping and self.options.drop_loops:
            detail = f"the answer ends in a loop: its last {LOOP_TOKENS} tokens repeat at most {LOOP_PERIOD}."
            self.reject(conversation.reject("loop", detail, answered=True))
        else:
            rows = make_rows(conversation, looping)
            self.output.write(rows)
            self.num_rows += len(rows)
            self.num_looping += looping


def make_rows(conversation: Conversation, looping: bool) -> list[dict[str, Any]]:
    """The rows of a finished conversation: one, or several where the template splits it."""
    prompt, parts = conversation.prompt, join_turns(conversation.turns)
    rows = []
    for number, part in enumerate(parts, 1):
        reason = conversation.finish_reasons[part.last]
        row: dict[str, Any] = {
            "id": prompt.id if len(parts) == 1 else f"{prompt.id}#{number}",
            "source": prompt.source,
            "temperature": conversation.temperature,
            "num_prompt_tokens": part.loss_spans[0][0],
            "finished": reason == "stop",
            "finish_reason": reason,
            "seed": conversation.seed,
        }
        if len(parts) > 1:
            row["part"] = [number, len(parts)]
        if conversation.messages[0]["role"] == "system":
            row["system"] = conversation.messages[0]["content"]
        if looping:
            row["looping"] = True
        rows.append({**row, "loss_spans": part.loss_spans, "token_ids": part.token_ids})
    return rows


def ends_in_loop(tokens: Sequence[int]) -> bool:
    """Whether the last 48 tokens repeat a period of at most 16."""
    tail = list(tokens[-LOOP_TOKENS:])
    return len(tail) == LOOP_TOKENS and any(tail[p:] == tail[:-p] for p in range(1, LOOP_PERIOD + 1))


def _meta(options: RegenerateOptions, template: ChatTemplate, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The sidecar: all that the rows are a function of."""
    return {
        "flashdraft": importlib.metadata.version("flashdraft"),
        "target": options.target,
        "written_by": "endpoints" if options.endpoints else "engine",
        "template_sha256": None if options.raw else template.sha256,
        "system": options.system,
        "thinking": options.thinking,
        "raw": options.raw,
        "max_tokens": options.max_tokens,
        "temperatures": list(options.temperatures),
        "top_p": options.top_p,
        "top_k": options.top_k,
        "seed": options.seed,
        "drop_loops": options.drop_loops,
        **facts,
    }


def _print_report(report: Report, rejected: Sequence[Rejected], output: Output, say: Callable[[str], None]) -> None:
    speed = report.tokens / report.seconds if report.seconds else 0.0
    before = f" behind {report.before} that were there" if report.before else ""
    say(f"{output.path}: {report.rows} rows{before}, {report.tokens} tokens, {speed:.0f} tok/s.")
    if report.looping:
        say(f"{report.looping} rows end in a repetition loop (looping: true); --drop-loops leaves such rows out.")
    if not rejected:
        return
    counts = ", ".join(f"{count} {reason}" for reason, count in sorted(report.rejected.items()))
    say(f"{len(rejected)} rejected ({counts}); all of them are in {output.rejected_path.name}:")
    for problem in rejected[:SHOWN]:
        say(f"  {problem.reason}: {problem.sentence}")
    if len(rejected) > SHOWN:
        say(f"  and {len(rejected) - SHOWN} more.")
