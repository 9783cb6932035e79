"""Text <-> ids: streams give whole characters, hold back what may become a stop string, and add up
to the text of all ids.
"""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from bed import byte_ids, byte_tokenizer
from flashdraft.text import TextStream, encode_chat, encode_text
from flashdraft.types import FlashdraftError

BROKEN = "\ufffd"


def whole_text(tokenizer: Any, ids: list[int]) -> str:
    text = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


def push_all(stream: TextStream, ids: list[int]) -> list[str]:
    return [stream.push(token)[0] for token in ids]


PIECES = ("€".encode()[:2], b"ab\xf0\x9f", b"\x98\x80!", b" the", b"STOP")
TOKENIZER = byte_tokenizer(*PIECES)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=24))
def test_pieces_add_up_for_any_ids(ids: list[int]) -> None:
    """D12: any ids, broken UTF-8 and special tokens included, give the text of all of them."""
    stream = TextStream(TOKENIZER)
    assert "".join([*push_all(stream, ids), stream.flush()]) == whole_text(TOKENIZER, ids)
    assert stream.flush() == ""


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet=st.characters(codec="utf-8", exclude_characters=BROKEN), max_size=12))
def test_whole_characters_only(text: str) -> None:
    """D12: text that is valid in the end never shows half a character on the way."""
    stream, shown = TextStream(TOKENIZER), ""
    for token in byte_ids(text):
        piece, _ = stream.push(token)
        assert BROKEN not in piece
        shown += piece
        assert text.startswith(shown)
    assert shown + stream.flush() == text


def test_text_before_half_a_character_is_shown_at_once() -> None:
    """A token may end in the middle of a character; its first letters need not wait."""
    stream = TextStream(TOKENIZER)
    smile = [259 + PIECES.index(b"ab\xf0\x9f"), 259 + PIECES.index(b"\x98\x80!")]
    assert push_all(stream, smile) == ["ab", "\U0001f600!"]
    assert stream.flush() == ""


def test_tokens_without_text_cost_nothing() -> None:
    """An answer that goes on behind its end (ignore_eos) used to decode all its EOS again each time."""
    stream = TextStream(TOKENIZER)
    assert push_all(stream, [*byte_ids("ab"), *[2] * 50, *byte_ids("c"), 99999]) == ["a", "b", *[""] * 50, "c", ""]
    assert len(stream._ids) == 4


def test_flush_gives_what_never_became_a_character() -> None:
    stream = TextStream(TOKENIZER)
    assert push_all(stream, byte_ids(b"a\xe2\x82")) == ["a", "", ""]
    assert stream.flush() == BROKEN


def sentencepiece_like() -> Any:
    """Words carry their space in front, and the first word loses it (Llama 2, Mistral, Gemma)."""
    words = ["<unk>", "</s>", "<tool>", "\u2581a", "\u2581b", "c", "\u2581", "<0xE2>", "<0x82>", "<0xAC>"]
    vocab = {word: i for i, word in enumerate(words)}
    core = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    parts = tokenizers.decoders
    core.decoder = parts.Sequence(
        [parts.Replace("\u2581", " "), parts.ByteFallback(), parts.Fuse(), parts.Strip(content=" ", left=1)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", eos_token="</s>", additional_special_tokens=["<tool>"]
    )


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from([1, 2, 3, 4, 5, (7, 8, 9)]), max_size=10))
def test_decoders_that_treat_the_first_token_differently(parts: list[Any]) -> None:
    """A special token in the middle has no text and used to take the space of the word after it."""
    tokenizer = sentencepiece_like()
    ids = [i for part in parts for i in (part if isinstance(part, tuple) else (part,))]
    stream = TextStream(tokenizer)
    assert "".join([*push_all(stream, ids), stream.flush()]) == whole_text(tokenizer, ids)


def run_with_stops(text: str | bytes, stops: tuple[str, ...], armed_from: int = 0) -> tuple[str, int | None]:
    """(text shown, index of the token that ended it) for one token a byte."""
    stream, shown = TextStream(TOKENIZER, stops), ""
    for t, token in enumerate(byte_ids(text)):
        piece, stopped = stream.push(token, armed=t >= armed_from)
        shown += piece
        if stopped:
            return shown, t
    return shown + stream.flush(), None


@settings(max_examples=300, deadline=None)
@given(st.text("ab€", max_size=14), st.lists(st.text("ab€", min_size=1, max_size=4), min_size=1, max_size=3))
def test_stop_strings_against_a_plain_search(text: str, stops: list[str]) -> None:
    """D3: a token at a time, the answer ends with the first token that completes a stop string, and
    its text with the character before that string."""
    expected: tuple[str, int | None] = (text, None)
    size = 0
    for end in range(1, len(text) + 1):
        size += len(text[end - 1].encode())
        starts = [text[:end].find(stop) for stop in stops if stop in text[:end]]
        if starts:
            expected = text[: min(starts)], size - 1
            break
    assert run_with_stops(text, tuple(stops)) == expected


def test_nothing_of_a_stop_string_is_shown_before_it_fails() -> None:
    stream = TextStream(TOKENIZER, ("abcd",))
    assert push_all(stream, byte_ids("xabcxabc")) == ["x", "", "", "", "abcx", "", "", ""]
    assert stream.flush() == "abc"


def test_the_earlier_of_two_stop_strings_in_one_token_counts() -> None:
    stream = TextStream(TOKENIZER, ("OP", "TO"))
    assert stream.push(259 + PIECES.index(b"STOP")) == ("S", True)


def test_a_stop_string_before_half_a_character_is_seen() -> None:
    """The end of the token is half a character; that used to hide the stop string before it."""
    stream = TextStream(TOKENIZER, ("b",))
    assert stream.push(259 + PIECES.index(b"ab\xf0\x9f")) == ("a", True)


def test_a_stop_string_too_early_ends_nothing() -> None:
    """Before the minimum length a complete one is plain text; one that ends after it counts."""
    assert run_with_stops("STOP it", ("STOP",), armed_from=4) == ("STOP it", None)
    assert run_with_stops("STOP it", ("STOP",), armed_from=3) == ("", 3)
    assert run_with_stops("STOPSTOP", ("STOP",), armed_from=4) == ("STOP", 7)


def test_no_tokenizer_no_text() -> None:
    stream = TextStream(None)
    assert stream.push(5) == ("", False)
    assert stream.flush() == ""
    with pytest.raises(FlashdraftError, match=r"stop strings need a tokenizer.*stop_token_ids"):
        TextStream(None, ("x",))


def test_encode_text() -> None:
    assert encode_text(TOKENIZER, "hé") == byte_ids("hé")
    assert encode_text(TOKENIZER, "") == [TOKENIZER.bos_token_id]
    with pytest.raises(FlashdraftError, match="no tokenizer"):
        encode_text(None, "x")
    with pytest.raises(FlashdraftError, match="empty"):
        encode_text(sentencepiece_like(), "")


def test_half_characters_are_refused_in_a_sentence() -> None:
    """What Python makes of a command line that is no UTF-8; tokenizers raise a TypeError about types."""
    for encode in (
        lambda: encode_text(TOKENIZER, "a\ud800"),
        lambda: encode_chat(chat_tokenizer(CHAT), [{"role": "user", "content": "\udcff"}]),
    ):
        with pytest.raises(FlashdraftError, match=r"^the prompt has characters that are no UTF-8 .*\.$"):
            encode()


CHAT = (
    "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}|{% endfor %}{% if add_generation_prompt %}ai:{% endif %}"
)


def chat_tokenizer(template: str | None) -> Any:
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer().backend_tokenizer)
    tokenizer.chat_template = template
    return tokenizer


def test_encode_chat() -> None:
    ids = encode_chat(chat_tokenizer(CHAT), [{"role": "user", "content": "hi"}])
    assert ids == byte_ids("user:hi|ai:")
    with pytest.raises(FlashdraftError, match="no tokenizer"):
        encode_chat(None, [])
    with pytest.raises(FlashdraftError, match="no chat template"):
        encode_chat(chat_tokenizer(None), [])
    answered = [{"role": "user", "content": "hi"}, {"role": "ai", "content": "ho"}]
    assert encode_chat(chat_tokenizer(CHAT), answered, answered=True) == byte_ids("user:hi|ai:ho|")
    refusing = chat_tokenizer("{{ raise_exception('only users may speak') }}")
    with pytest.raises(FlashdraftError, match="only users may speak"):
        encode_chat(refusing, [{"role": "system", "content": "x"}])
