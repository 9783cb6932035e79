"""Between text and token ids: prompts through the chat template, answers through a text stream.

The stream decodes token by token, never emits half a character, and holds text back while it could
still turn into a stop string. Its pieces concatenate to the answer's text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .types import FlashdraftError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# What decoders put for bytes that are no complete character.
_INCOMPLETE = "\ufffd"


class TextStream:
    """Text of one answer as its tokens arrive.

    Args:
        tokenizer: None gives no text at all (a model used with token ids only).
        stop: strings that end the answer; they are not part of its text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, stop: Sequence[str] = ()) -> None:
        if stop and tokenizer is None:
            raise FlashdraftError("stop strings need a tokenizer, and this target has none; use stop_token_ids.")
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._ids: list[int] = []
        # ids from here are decoded together: some decoders treat the first token differently
        self._window = 0
        # up to here their text is whole and given out; of what comes after, so many characters are
        self._shown = 0
        self._ahead = 0
        self._held = ""

    def push(self, token: int, armed: bool = True) -> tuple[str, bool]:
        """(text that became visible, whether a stop string is complete). `armed` False: a stop
        string complete by now ends nothing, as before the minimum length."""
        pending = self._held + self._decode(token)
        ends = [at for at in (pending.find(stop) for stop in self._stop) if at >= 0]
        if ends and armed:
            self._held = ""
            return pending[: min(ends)], True
        keep = max((_overlap(pending, stop) for stop in self._stop), default=0)
        cut = len(pending) - keep
        self._held = pending[cut:]
        return pending[:cut], False

    def flush(self) -> str:
        """What was held back, at the end of an answer that no stop string ended."""
        rest = ""
        if self._tokenizer is not None and self._shown < len(self._ids):
            rest = self._text(len(self._ids))[len(self._text(self._shown)) + self._ahead :]
            self._shown, self._ahead = len(self._ids), 0
        text, self._held = self._held + rest, ""
        return text

    def _decode(self, token: int) -> str:
        """The text a token adds for good. What may be part of a character waits."""
        if self._tokenizer is None:
            return ""
        self._ids.append(token)
        before, now = self._text(self._shown), self._text(len(self._ids))
        whole = now.rstrip(_INCOMPLETE)
        new = whole[len(before) + self._ahead :]
        if whole != now:
            self._ahead += len(new)
            return new
        if now != before:  # a window may not begin with tokens without text: the next would count as the first
            self._window = self._shown
        elif self._is_special(token):  # or endless ones would be decoded again and again
            self._ids.pop()
        self._shown, self._ahead = len(self._ids), 0
        return new

    def _is_special(self, token: int) -> bool:
        """Whether the decoder skips a token wherever it stands."""
        assert self._tokenizer is not None
        return not self._tokenizer.decode([token], skip_special_tokens=True) and bool(self._tokenizer.decode([token]))

    def _text(self, end: int) -> str:
        assert self._tokenizer is not None
        ids = self._ids[self._window : end]
        text = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0


Message = Mapping[str, str]


def encode_text(tokenizer: PreTrainedTokenizerBase | None, text: str) -> list[int]:
    """Token ids of raw text, with whatever the tokenizer puts in front by itself."""
    if tokenizer is None:
        raise FlashdraftError("this target has no tokenizer; give token ids.")
    ids = _tokenize(tokenizer, text)
    if not ids and tokenizer.bos_token_id is not None:
        ids = [tokenizer.bos_token_id]
    if not ids:
        raise FlashdraftError("the prompt is empty; give at least one character.")
    return ids


def encode_chat(
    tokenizer: PreTrainedTokenizerBase | None,
    messages: Sequence[Message],
    *,
    answered: bool = False,
    thinking: bool | None = None,
) -> list[int]:
    """Token ids of a conversation through the model's chat template, open for the assistant.

    Args:
        answered: the last message is the assistant's; nothing is left open.
        thinking: what the template calls enable_thinking or thinking; None leaves it out.
    """
    if tokenizer is None:
        raise FlashdraftError("this target has no tokenizer; give token ids.")
    if not tokenizer.chat_template:
        raise FlashdraftError("this target has no chat template; use --raw for plain continuation.")
    mode = {} if thinking is None else {"enable_thinking": thinking, "thinking": thinking}
    try:
        text = tokenizer.apply_chat_template(list(messages), add_generation_prompt=not answered, tokenize=False, **mode)
    except Exception as error:  # templates raise what they like
        raise FlashdraftError(f"the chat template refuses this conversation: {error}") from error
    return _tokenize(tokenizer, text, add_special_tokens=False)


def template_digest(tokenizer: PreTrainedTokenizerBase | None) -> str | None:
    """SHA-256 of a chat template, or None if there is none."""
    template = getattr(tokenizer, "chat_template", None)
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest() if template else None


def template_warning(
    training: Mapping[str, Any] | None, tokenizer: PreTrainedTokenizerBase | None, thinking: bool | None = None
) -> str | None:
    """A sentence if a draft was trained on chats of another form than it will draft (its
    training.json says so), which costs accepted tokens; else None."""
    made = (training or {}).get("chat_template")
    if not isinstance(made, Mapping):
        return None
    if made.get("sha256") not in (None, template_digest(tokenizer)):
        return "the draft was trained with another chat template than the target has; expect fewer accepted tokens."
    if made.get("thinking") != thinking:
        modes = {True: "on", False: "off", None: "left to the template"}
        return (
            f"the draft was trained with thinking {modes.get(made.get('thinking'), 'unknown')}, and now it is "
            f"{modes[thinking]}; expect fewer accepted tokens."
        )
    return None


def _tokenize(tokenizer: PreTrainedTokenizerBase, text: str, **options: bool) -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise FlashdraftError(
            "the prompt has characters that are no UTF-8 (lone surrogates); mend its encoding."
        ) from None
    return list(tokenizer(text, **options)["input_ids"])
