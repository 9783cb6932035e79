"""What answers the turns of a conversation: the batched engine here, or servers over HTTP."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..model_folder import one_line
from ..types import FlashdraftError, Request
from .data import ChatTemplate, Prompt, Reason, Rejected
from .endpoints import EndpointPool, Refusal, Reply

if TYPE_CHECKING:
    from ..engine import Engine
    from .regenerate import RegenerateOptions

DEFAULT_CONTEXT = 2048


@dataclass(frozen=True)
class Answer:
    """One answer of the target: its ids (with the end of turn, if it came to one), and its text."""

    token_ids: list[int]
    text: str
    finish_reason: str
    reasoning: str | None = None


@dataclass
class Conversation:
    """A prompt on its way: what was said so far, and the ids of every turn."""

    prompt: Prompt
    temperature: float
    seed: int
    messages: list[dict[str, str]]
    opening: list[int] = field(default_factory=list)
    turns: list[tuple[list[int], list[int]]] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)

    def reject(self, reason: Reason, detail: str, answered: bool = False) -> Rejected:
        return Rejected(self.prompt.file, self.prompt.line, self.prompt.id, reason, detail, answered)


class Way(Protocol):
    """What answers: the local engine, or endpoints. `num_tokens`: written so far."""

    capacity: int
    num_tokens: int

    def submit(self, conversation: Conversation) -> None:
        """Ask for the answer that `conversation.opening` opens."""

    def poll(self) -> list[tuple[Conversation, Answer | Rejected]]:
        """Wait a little; what is finished."""


class EngineWay:
    """Answers with the batched engine. Rows are refilled as they finish, from here and not from the
    engine's queue, so that a conversation's next turn finds its cache still in its row."""

    def __init__(self, engine: Engine, options: RegenerateOptions, rows: int) -> None:
        self.capacity, self.num_tokens = rows, 0
        self._engine, self._options = engine, options
        self._running: dict[int, Conversation] = {}

    def submit(self, conversation: Conversation) -> None:
        params = self._options.sampling(conversation.temperature, conversation.seed)
        self._running[self._engine.submit(Request(conversation.opening, params))] = conversation

    def poll(self) -> list[tuple[Conversation, Answer | Rejected]]:
        finished: list[tuple[Conversation, Answer | Rejected]] = []
        for delta in self._engine.step():
            self.num_tokens += len(delta.tokens)
            if delta.result is not None:
                result = delta.result
                answer = Answer(list(result.token_ids), result.text, result.finish_reason)
                finished.append((self._running.pop(delta.request_id), answer))
        return finished


class EndpointWay:
    """Answers with servers: their text is tokenised through the template, by the prefix check, or
    they give the ids themselves."""

    def __init__(
        self, pool: EndpointPool, options: RegenerateOptions, template: ChatTemplate, say: Callable[[str], None]
    ) -> None:
        self.capacity, self.num_tokens = 2 * options.concurrency * len(options.endpoints), 0
        self._pool, self._options, self._template, self._say = pool, options, template, say
        self._running: dict[int, Conversation] = {}
        self._next = 0
        self._warned: set[str] = set()

    def submit(self, conversation: Conversation) -> None:
        options = self._options
        body: dict[str, Any] = {
            "messages": conversation.messages,
            "max_tokens": options.max_tokens,
            "temperature": conversation.temperature,
            "seed": conversation.seed,
        }
        if options.top_p < 1:
            body["top_p"] = options.top_p
        if options.top_k:
            body["top_k"] = options.top_k
        if options.exact_ids:
            body["return_token_ids"] = True
        if options.thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": options.thinking, "thinking": options.thinking}
        self._next += 1
        self._running[self._next] = conversation
        # a copy: the conversation grows while a worker may still be sending it
        self._pool.submit(self._next, {**body, "messages": list(conversation.messages)})

    def poll(self) -> list[tuple[Conversation, Answer | Rejected]]:
        finished: list[tuple[Conversation, Answer | Rejected]] = []
        for key, reply in self._pool.poll():
            conversation = self._running.pop(key)
            if isinstance(reply, Refusal):
                finished.append((conversation, conversation.reject("endpoint", reply.detail)))
                continue
            self._compare_counts(conversation, reply)
            answer = self._answer(conversation, reply)
            self.num_tokens += len(answer.token_ids) if isinstance(answer, Answer) else 0
            finished.append((conversation, answer))
        return finished

    def _answer(self, conversation: Conversation, reply: Reply) -> Answer | Rejected:
        if self._options.exact_ids:
            if reply.token_ids is None or reply.prompt_ids != conversation.opening:
                found = "another prompt's" if reply.token_ids is not None else "no"
                detail = f"{reply.endpoint} gave {found} token ids; leave --exact-ids out, or mend its chat template."
                return conversation.reject("endpoint", detail)
            return Answer(reply.token_ids, reply.text, "length" if reply.cut else "stop", reply.reasoning)
        message = {"role": "assistant", "content": reply.text}
        if reply.reasoning:
            message["reasoning_content"] = reply.reasoning
        try:
            _, ids = self._template.last_turn([*conversation.messages, message])
        except FlashdraftError as error:
            return conversation.reject("template", str(error), answered=True)
        if reply.cut and ids and ids[-1] in self._template.eos_ids:
            del ids[-1]  # the template's, not the target's
        return Answer(ids, reply.text, "length" if reply.cut else "stop", reply.reasoning)

    def _compare_counts(self, conversation: Conversation, reply: Reply) -> None:
        counted, ours = reply.num_prompt_tokens, len(conversation.opening)
        if counted not in (None, ours) and reply.endpoint not in self._warned:
            self._warned.add(reply.endpoint)
            self._say(
                f"{reply.endpoint} counts {counted} prompt tokens where the target's template gives {ours}: if it uses "
                "another template, system prompt or thinking mode, its answers belong to other prompts than the rows say."
            )


def open_way(
    options: RegenerateOptions, stack: ExitStack, say: Callable[[str], None]
) -> tuple[ChatTemplate, Way, dict[str, Any]]:
    """The target's template, what answers, and what the sidecar has to say about them."""
    return _open_endpoints(options, stack, say) if options.endpoints else _open_engine(options, say)


def _open_engine(options: RegenerateOptions, say: Callable[[str], None]) -> tuple[ChatTemplate, Way, dict[str, Any]]:
    import torch

    from ..drafters import drafter_name, drafter_options, make_drafter
    from ..engine import Engine
    from ..locate import locate_draft_of
    from ..provenance import draft_warnings
    from ..target import Target

    name = drafter_name(options.drafter, options.draft, options.target)
    own = drafter_options(name, options.drafter_options)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    target = Target.load(options.target, dtype=options.dtype, device=options.device)
    if target.tokenizer is None:
        raise FlashdraftError(f"{target.name} has no tokenizer; expected one beside the weights.")
    drafter = make_drafter(target, name, options.draft, options.block_size, **own)
    if options.draft is not None:
        for sentence in draft_warnings(locate_draft_of(name, options.draft), target, options.thinking):
            say(f"warning: {sentence}")
    context = options.context or min(DEFAULT_CONTEXT, target.max_context)
    engine = Engine(target, drafter, max_rows=options.rows, max_context=context)
    template = ChatTemplate(target.tokenizer, target.eos_ids, system=options.system, thinking=options.thinking)
    dtype = str(target.dtype).removeprefix("torch.")
    return template, EngineWay(engine, options, options.rows), {"context": context, "dtype": dtype}


def _open_endpoints(
    options: RegenerateOptions, stack: ExitStack, say: Callable[[str], None]
) -> tuple[ChatTemplate, Way, dict[str, Any]]:
    tokenizer, eos_ids, longest = load_tokenizer(options.target)
    template = ChatTemplate(tokenizer, eos_ids, system=options.system, thinking=options.thinking)
    pool = EndpointPool(
        options.endpoints, model=options.model, concurrency=options.concurrency, retries=options.retries,
        timeout=options.timeout, say=say,
    )  # fmt: skip
    stack.callback(pool.close)
    context = options.context or min(DEFAULT_CONTEXT, longest)
    return template, EndpointWay(pool, options, template, say), {
        "context": context, "exact_ids": options.exact_ids, "endpoint_models": pool.models,
    }  # fmt: skip


def load_tokenizer(source: str) -> tuple[Any, frozenset[int], int]:
    """(tokenizer, ids that end an answer, longest sequence) of a target; its weights are not needed."""
    from transformers import AutoTokenizer

    from ..loading import quiet_transformers
    from ..locate import locate_target

    folder: Path = Path(source).expanduser()
    name: str | Path = folder if folder.is_dir() else source
    if not folder.is_dir() and source.count("/") != 1:
        name = locate_target(source)  # an alias or a GGUF file
    try:
        with quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # transformers raises many kinds
        raise FlashdraftError(f"{source} has no usable tokenizer: {one_line(error)}.") from error
    ends = {tokenizer.eos_token_id} if isinstance(tokenizer.eos_token_id, int) else set()
    longest = 1 << 20
    for file in ("config.json", "generation_config.json"):
        facts = _facts(name, file)
        found = facts.get("eos_token_id")
        ends |= {found} if isinstance(found, int) else set(found or ())
        longest = facts.get("max_position_embeddings") or longest
    return tokenizer, frozenset(ends), longest


def _facts(name: str | Path, file: str) -> dict[str, Any]:
    """A JSON file of a model, from its folder or the hub cache; empty if it is not there."""
    from transformers.utils import cached_file

    try:
        path = cached_file(name, file, local_files_only=True)
        facts = json.loads(Path(path).read_text(encoding="utf-8")) if path else {}
    except (OSError, ValueError):
        return {}
    text = facts.get("text_config")
    return {**facts, **text} if isinstance(text, dict) else facts
