"""Faults that others' speculative decoding had with text: stop strings and UTF-8 at block borders."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bed import PuppetTarget, byte_ids, byte_tokenizer, decode, echo, saying
from flashdraft.engine import Engine
from flashdraft.types import Request, Result, SamplingParams
from test_faults_decoding import PROMPT, scripted

# --- D3: stop strings ------------------------------------------------------------------------

PIECES = (b"ST", b"OP", b"xSTO", b"P.", b" it\xe2", b"\x82\xac")
TEXT_TOKENIZER = byte_tokenizer(*PIECES)
TEXT_VOCAB = len(TEXT_TOKENIZER)


def piece(data: bytes) -> int:
    return 259 + PIECES.index(data)


def decode_text(kind: str, answer: list[int], block_size: int, **params: Any) -> Result:
    target = PuppetTarget(saying(answer, len(PROMPT), TEXT_VOCAB), TEXT_VOCAB, tokenizer=TEXT_TOKENIZER, eos_ids=[2])
    made = scripted(kind, answer, block_size, TEXT_VOCAB)
    return decode(target, made, [PROMPT], logprobs=2, **{"max_tokens": len(answer), **params})[0]


STOPS = {
    "bytes": byte_ids("STOP"),
    "two tokens": [piece(b"ST"), piece(b"OP")],
    "begins and ends inside tokens": [piece(b"xSTO"), piece(b"P.")],
    "half of it, twice": [*byte_ids("STSTO"), piece(b"P.")],
}


@pytest.mark.parametrize("kind", ["echo", "coin", "wrong"])
@pytest.mark.parametrize("name", STOPS)
def test_d3_stop_string_in_each_slot_and_across_blocks(name: str, kind: str) -> None:
    """D3: wherever a stop string lies in the blocks, text, ids and logprobs end where plain
    decoding ends: text before it, ids and logprobs with the token that completes it."""
    for before in range(9):
        answer = [*byte_ids("abcdefghi"[:before]), *STOPS[name], *byte_ids("and more, STOP")]
        plain = decode_text("plain", answer, 1, stop=["STOP", "never"])
        result = decode_text(kind, answer, 4, stop=["STOP", "never"])
        assert (result.text, result.finish_reason) == (plain.text, plain.finish_reason)
        assert result.finish_reason == "stop" and "STOP" not in result.text
        assert list(result.token_ids) == answer[: before + len(STOPS[name])]
        assert [(t.id, t.text) for t in result.tokens] == [(t.id, t.text) for t in plain.tokens]
        assert [t.logprob for t in result.tokens] == pytest.approx([t.logprob for t in plain.tokens], abs=1e-6)
        whole = TEXT_TOKENIZER.decode(answer[: before + len(STOPS[name])])
        assert result.text == whole[: whole.index("STOP")]


@pytest.mark.parametrize("kind", ["echo", "coin", "wrong"])
def test_d3_stop_strings_with_every_limit(kind: str) -> None:
    """D3, D2: a stop string, the length limit, EOS and the minimum length in one block."""
    answer = [*byte_ids("a STOP b"), piece(b" it\xe2"), piece(b"\x82\xac"), *byte_ids("STOP"), 2, *byte_ids("c")]
    for max_tokens in range(1, len(answer) + 1):
        for params in ({"stop": "STOP"}, {"stop": "STOP", "min_tokens": min(9, max_tokens)}, {"stop": ["b it", "€S"]}):
            plain = decode_text("plain", answer, 1, **{**params, "max_tokens": max_tokens})
            result = decode_text(kind, answer, 4, **{**params, "max_tokens": max_tokens})
            assert [(t.id, t.text) for t in result.tokens] == [(t.id, t.text) for t in plain.tokens]
            assert (result.text, result.finish_reason) == (plain.text, plain.finish_reason)


# --- D12: UTF-8 in a stream ------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.sampled_from([piece(p) for p in PIECES]).map(lambda token: [token]),
            st.text(min_size=1, max_size=3).filter(lambda s: s.isprintable()).map(byte_ids),
            st.sampled_from(["é", "€", "😀", "👩\u200d🚀"]).map(byte_ids),
            st.binary(min_size=1, max_size=3).map(byte_ids),
        ),
        min_size=1,
        max_size=8,
    ),
    st.integers(1, 6),
)
def test_d12_utf8_cut_at_every_block_border(parts: list[list[int]], block_size: int) -> None:
    """D12: the deltas of a stream add up to the text of all ids, whatever bytes a block border
    cuts, and show no broken character that is not there in the end."""
    answer = [token for part in parts for token in part]
    target = PuppetTarget(saying(answer, len(PROMPT), TEXT_VOCAB), TEXT_VOCAB, tokenizer=TEXT_TOKENIZER)
    engine = Engine(target, echo(answer, block_size, len(PROMPT)))
    deltas = list(engine.stream(Request(PROMPT, SamplingParams(max_tokens=len(answer)))))
    whole = TEXT_TOKENIZER.decode(answer, skip_special_tokens=True)
    assert "".join(delta.text for delta in deltas) == whole
    assert deltas[-1].result is not None and deltas[-1].result.text == whole
    assert sum(delta.text.count("\ufffd") for delta in deltas) == whole.count("\ufffd")
