"""What training reads: prompts, sequences and their loss spans, and what is wrong with a row."""

from __future__ import annotations

import copy
import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from hypothesis import given
from hypothesis import strategies as st

from bed import byte_ids, byte_tokenizer
from flashdraft.training.data import (
    ChatTemplate,
    Rejected,
    TokenSequence,
    join_turns,
    read_meta,
    read_prompts,
    read_sequences,
)
from flashdraft.types import FlashdraftError

PLAIN = (
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
# thinking is kept in the last answer only, as many reasoning models' templates have it
FORGETFUL = (
    "{% for m in messages %}<s>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('#')[-1] }}{% else %}{{ m.content }}{% endif %}"
    "</s>\n{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
# what opens a turn for the model is not what a finished turn begins with
TWO_FACED = PLAIN.replace("<s>assistant\n{% endif %}", "<s>assistant\n#{% endif %}")
SWITCHED = PLAIN.replace(
    "<s>assistant\n{% endif %}", "<s>assistant\n{% if not enable_thinking %}##{% endif %}{% endif %}"
)


def tokenizer_with(template: str | None, tokenizer: Any = None) -> Any:
    tokenizer = copy.deepcopy(tokenizer or byte_tokenizer())
    tokenizer.chat_template = template
    return tokenizer


def chat(template: str = PLAIN, **options: Any) -> ChatTemplate:
    return ChatTemplate(tokenizer_with(template), [2], **options)


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def said(*texts: str) -> list[dict[str, str]]:
    """Messages of user and assistant in turn."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def text_of(ids: Any) -> str:
    text = byte_tokenizer().decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


def learned(sequence: Any) -> list[str]:
    """The texts a sequence puts loss on."""
    return [text_of(sequence.token_ids[start:end]) for start, end in sequence.loss_spans]


# -- prompts -----------------------------------------------------------------------------------


def test_prompts_come_in_three_forms(tmp_path: Path) -> None:
    system = {"role": "system", "content": "Be brief."}
    file = write(
        tmp_path / "mixed.jsonl",
        {"id": 7, "prompt": "one"},
        "",
        {"turns": ["a", "b"], "category": "writing", "system": "s"},
        {"messages": [system, *said("x", "old answer", "y")], "source": "chats"},
        {"id": "last", "messages": said("z", "answer at the end")},
    )
    rejected: list[Rejected] = []
    prompts = list(read_prompts([file], rejected.append))
    assert not rejected
    assert [(p.turns, p.system, p.source, p.line) for p in prompts] == [
        (("one",), None, "mixed", 1),
        (("a", "b"), "s", "writing", 3),
        (("x", "y"), "Be brief.", "chats", 4),
        (("z",), None, "mixed", 5),
    ]
    assert prompts[0].id == "7" and prompts[3].id == "last"
    # an id is made from what is said, so it is the same in another file, at another place
    again = list(read_prompts([write(tmp_path / "b.jsonl", {"turns": ["a", "b"], "system": "s"})], rejected.append))
    assert again[0].id == prompts[1].id != prompts[2].id


def test_gzipped_prompts_and_several_files(tmp_path: Path) -> None:
    first = tmp_path / "a.jsonl.gz"
    first.write_bytes(gzip.compress(b'\xef\xbb\xbf{"prompt": "one"}\n{"prompt": "two"}'))
    second = write(tmp_path / "b.jsonl", {"prompt": "three"})
    prompts = list(read_prompts([first, second], lambda problem: pytest.fail(problem.sentence)))
    assert [p.turns[0] for p in prompts] == ["one", "two", "three"]
    assert [p.source for p in prompts] == ["a", "a", "b"]


@pytest.mark.parametrize(
    ("row", "reason", "words"),
    [
        ("{", "bad row", "not JSON"),
        ("[" * 100_000, "bad row", "not JSON"),
        ("[1]", "bad row", "found a list"),
        ({"text": "x"}, "bad row", "prompt, turns, messages"),
        ({"prompt": 3}, "bad row", "no text"),
        ({"turns": "x"}, "bad row", "no text"),
        ({"prompt": "x", "system": 3}, "bad row", "system"),
        ({"prompt": "\ud800"}, "bad row", "UTF-8"),
        ({"messages": [{"role": "user"}]}, "bad row", "role and content"),
        ({"messages": [*said("x"), {"role": "tool", "content": "x"}]}, "bad row", "'tool'"),
        ({"messages": []}, "empty", "empty"),
        ({"messages": [{"role": "system", "content": "x"}]}, "empty", "empty"),
        ({"turns": []}, "empty", "empty"),
        ({"turns": ["x", " \n"]}, "empty", "empty"),
        ({"id": "first", "prompt": "other"}, "duplicate id", "first.jsonl, line 1"),
    ],
)
def test_a_prompt_that_cannot_be_used_is_reported(tmp_path: Path, row: Any, reason: str, words: str) -> None:
    first = write(tmp_path / "first.jsonl", {"id": "first", "prompt": "x"})
    file = write(tmp_path / "bad.jsonl", {"prompt": "good"}, row, {"prompt": "good too"})
    rejected: list[Rejected] = []
    prompts = list(read_prompts([first, file], rejected.append))
    assert [p.turns[0] for p in prompts] == ["x", "good", "good too"]
    assert [(r.file, r.line, r.reason) for r in rejected] == [(str(file), 2, reason)]
    assert words in rejected[0].sentence and f"{file}, line 2: " in rejected[0].sentence


def test_the_same_prompt_twice_is_a_duplicate(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", {"prompt": "x"}, {"turns": ["x"]}, {"prompt": "x", "system": "s"})
    rejected: list[Rejected] = []
    assert len(list(read_prompts([file], rejected.append))) == 2
    assert [r.reason for r in rejected] == ["duplicate id"]


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress(b'{"prompt": "one"}\n' * 5000)[:-20])
    no_gzip = write(tmp_path / "plain.jsonl.gz", {"prompt": "x"})
    for path, words in ((tmp_path / "none.jsonl", "No such file"), (cut, "damaged"), (no_gzip, "damaged")):
        with pytest.raises(FlashdraftError, match=words) as caught:
            list(read_prompts([path], lambda problem: None))
        assert str(path) in str(caught.value)


# -- sequences ---------------------------------------------------------------------------------

ROW = {
    "id": "a",
    "source": "s",
    "temperature": 0.7,
    "finished": True,
    "num_prompt_tokens": 2,
    "token_ids": [5, 6, 7, 8],
}


def test_rows_with_and_without_spans(tmp_path: Path) -> None:
    spans = [[1, 2], [3, 4]]
    file = write(tmp_path / "rows.jsonl", ROW, {**ROW, "id": "b", "finished": False, "loss_spans": spans})
    old, new = read_sequences([file], vocab_size=9)
    assert old == TokenSequence("a", "s", (5, 6, 7, 8), ((2, 4),), 0.7, True)
    assert new == TokenSequence("b", "s", (5, 6, 7, 8), ((1, 2), (3, 4)), 0.7, False)
    assert (old.num_loss_tokens, new.num_loss_tokens) == (2, 2)


BAD_ROWS: list[tuple[Any, str]] = [
    ('{"id": "a"', "not JSON"),
    ("3", "found a int"),
    ({"id": "a"}, "token_ids"),
    ({**ROW, "token_ids": [5, 6, 7, 9]}, "9 is outside the target's vocabulary of 9"),
    ({**ROW, "token_ids": [5, -1, 7, 8]}, "-1 is outside"),
    ({**ROW, "token_ids": [5, 6.0, 7]}, "whole numbers"),
    ({**ROW, "token_ids": [5, True, 7]}, "whole numbers"),
    ({**ROW, "token_ids": "5 6"}, "whole numbers"),
    ({**ROW, "num_prompt_tokens": 4}, "the response is empty"),
    ({**ROW, "num_prompt_tokens": 5}, "out of range"),
    ({**ROW, "num_prompt_tokens": 0}, "out of range"),
    ({**ROW, "num_prompt_tokens": None}, "no loss_spans and no num_prompt_tokens"),
    ({**ROW, "token_ids": []}, "out of range"),
    ({**ROW, "loss_spans": []}, "the response is empty"),
    ({**ROW, "loss_spans": [[2, 5]]}, "out of range"),
    ({**ROW, "loss_spans": [[0, 2]]}, "out of range"),
    ({**ROW, "loss_spans": [[3, 3], [1, 2]]}, "out of range"),
    ({**ROW, "loss_spans": [[2, 3], [1, 2]]}, "out of range"),
    ({**ROW, "loss_spans": [[1, 3], [2, 4]]}, "out of range"),
    ({**ROW, "loss_spans": [[1]]}, r"no list of \[start, end\]"),
    ({**ROW, "loss_spans": [[1, 2.5]]}, r"no list of \[start, end\]"),
    ({"messages": said("x", "y")}, "no chat template was given"),
]


@pytest.mark.parametrize(("row", "words"), BAD_ROWS)
def test_a_row_that_cannot_be_used_names_file_and_line(tmp_path: Path, row: Any, words: str) -> None:
    file = write(tmp_path / "rows.jsonl", ROW, row, {**ROW, "id": "c"})
    with pytest.raises(FlashdraftError, match=words) as caught:
        list(read_sequences([file], vocab_size=9))
    assert str(caught.value).startswith(f"{file}, line 2: ")
    rejected: list[Rejected] = []
    assert [s.id for s in read_sequences([file], vocab_size=9, on_reject=rejected.append)] == ["a", "c"]
    assert [(r.line, r.sentence) for r in rejected] == [(2, str(caught.value))]


def test_a_cut_off_last_line_says_so(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(ROW) + "\n" + json.dumps(ROW)[:30])
    with pytest.raises(FlashdraftError, match=r"line 2.*cut off"):
        list(read_sequences([file]))


def test_rows_are_read_one_at_a_time(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", ROW, "{broken")
    stream = read_sequences([file])
    assert next(stream).id == "a"  # the second line has not been looked at


def test_the_sidecar_is_found_beside_a_gzipped_file_too(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl.meta.json").write_text('{"target": "t"}')
    assert read_meta(tmp_path / "rows.jsonl") == read_meta(tmp_path / "rows.jsonl.gz") == {"target": "t"}
    assert read_meta(tmp_path / "other.jsonl") is None
    (tmp_path / "bad.jsonl.meta.json").write_text("{")
    with pytest.raises(FlashdraftError, match=r"bad\.jsonl\.meta\.json"):
        read_meta(tmp_path / "bad.jsonl")


# -- conversations -----------------------------------------------------------------------------


def test_loss_is_on_every_answer_and_nothing_else(tmp_path: Path) -> None:
    """T8: the loss mask of a chat template. Spans equal hand-made ones, end of turn included."""
    file = write(tmp_path / "chats.jsonl", {"id": "c", "messages": said("hi", "hello", "and?", "well", "bye")})
    (sequence,) = read_sequences([file], template=chat(), vocab_size=259)
    text = "<s>user\nhi</s>\n<s>assistant\nhello</s>\n<s>user\nand?</s>\n<s>assistant\nwell</s>"
    assert text_of(sequence.token_ids) == text
    first = len("1user\nhi1\n1assistant\n")  # a special token is one id
    second = first + len("hello1\n1user\nand?1\n1assistant\n")
    assert sequence.loss_spans == ((first, first + 6), (second, second + 5))
    assert learned(sequence) == ["hello</s>", "well</s>"]


def test_a_system_message_is_put_in_front_unless_there_is_one(tmp_path: Path) -> None:
    own = [{"role": "system", "content": "own"}, *said("x", "y")]
    file = write(tmp_path / "chats.jsonl", {"messages": said("x", "y")}, {"messages": own})
    texts = [text_of(s.token_ids) for s in read_sequences([file], template=chat(system="given"))]
    assert ["system\ngiven" in text for text in texts] == [True, False]
    assert ["system\nown" in text for text in texts] == [False, True]


def test_a_template_that_rewrites_history_splits_the_conversation(tmp_path: Path) -> None:
    """T8: thinking that is stripped from history. Each answer is learned once, where the model would
    write it, and the stripped one is never learned."""
    messages = said("a", "think#one", "b", "think#two", "c", "three")
    file = write(tmp_path / "chats.jsonl", {"id": "c", "messages": messages})
    sequences = list(read_sequences([file], template=chat(FORGETFUL)))
    assert [learned(s) for s in sequences] == [["think#one</s>"], ["think#two</s>"], ["three</s>"]]
    assert text_of(sequences[2].token_ids).count("think") == 0
    for sequence in sequences:  # loss never on what the model is given
        assert text_of(sequence.token_ids[: sequence.loss_spans[0][0]]).endswith("<s>assistant\n")


def test_turns_that_survive_stay_together(tmp_path: Path) -> None:
    """T8: only the turn that the template rewrites is split off."""
    file = write(tmp_path / "chats.jsonl", {"id": "c", "messages": said("a", "x#one", "b", "two", "c", "three")})
    sequences = list(read_sequences([file], template=chat(FORGETFUL)))
    assert [learned(s) for s in sequences] == [["x#one</s>"], ["two</s>", "three</s>"]]


def test_a_template_whose_opening_is_no_prefix_is_refused(tmp_path: Path) -> None:
    """T8: if the answer does not stand behind the opening, no token can be told to be the model's."""
    file = write(tmp_path / "chats.jsonl", {"messages": said("a", "b")})
    with pytest.raises(FlashdraftError, match=r"line 1: message 2: .*no loss"):
        list(read_sequences([file], template=chat(TWO_FACED)))


def test_tokens_that_merge_across_the_border_are_refused(tmp_path: Path) -> None:
    """T8: the check is on tokens, not on text: a newline that merges with the one before it."""
    newline, letter = "Ċ", "a"
    vocab = {"<s>": 0, "</s>": 1, newline: 2, letter: 3, newline * 2: 4}
    core = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[(newline, newline)]))
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = "{% for m in messages %}<s>\n{{ m.content }}</s>{% endfor %}" + (
        "{% if add_generation_prompt %}<s>\n{% endif %}"
    )
    template = ChatTemplate(tokenizer, [1])
    good, bad = (
        write(tmp_path / f"{i}.jsonl", {"messages": said("a", text)}) for i, text in enumerate(("a\na", "\na"))
    )
    (sequence,) = read_sequences([good], template=template)
    assert sequence.token_ids == (0, 2, 3, 1, 0, 2, 3, 2, 3, 1) and sequence.loss_spans == ((6, 10),)
    with pytest.raises(FlashdraftError, match="no loss"):
        list(read_sequences([bad], template=template))


def test_an_answer_without_end_of_turn_is_learned_to_its_end(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.role[0] }}: {{ m.content }}\n{% endfor %}" + (
        "{% if add_generation_prompt %}a: {% endif %}"
    )
    file = write(tmp_path / "chats.jsonl", {"messages": said("x", "yes", "z", "no")})
    (sequence,) = read_sequences([file], template=chat(template))
    assert learned(sequence) == ["yes\n", "no\n"]


def test_conversations_without_an_answer_are_empty(tmp_path: Path) -> None:
    rows = [said("x"), said("x", "  "), said("x")[:0]]
    file = write(tmp_path / "chats.jsonl", *({"messages": messages} for messages in rows))
    rejected: list[Rejected] = []
    assert not list(read_sequences([file], template=chat(), on_reject=rejected.append))
    assert [r.reason for r in rejected] == ["empty"] * 3


def test_a_template_that_refuses_is_a_reason(tmp_path: Path) -> None:
    refusing = PLAIN + "{% if messages[0].content == 'no' %}{{ raise_exception('not this') }}{% endif %}"
    file = write(tmp_path / "chats.jsonl", {"messages": said("no", "x")}, {"messages": said("yes", "x")})
    rejected: list[Rejected] = []
    assert len(list(read_sequences([file], template=chat(refusing), on_reject=rejected.append))) == 1
    assert [r.reason for r in rejected] == ["template"] and "not this" in rejected[0].detail


def test_thinking_mode_goes_to_the_template() -> None:
    messages = said("x")
    on, off, left = (chat(SWITCHED, thinking=mode).opening(messages) for mode in (True, False, None))
    assert off == left == [*on, *byte_ids("##")]
    with pytest.raises(FlashdraftError, match="no thinking mode"):
        chat(PLAIN, thinking=True)


def test_the_template_hash_tells_templates_apart() -> None:
    assert chat().sha256 == chat(system="x").sha256 != chat(FORGETFUL).sha256
    assert ChatTemplate(tokenizer_with(None), [2]).sha256 is None


IDS = st.lists(st.integers(0, 3), min_size=1, max_size=4)


@given(st.lists(st.tuples(st.booleans(), IDS, IDS), min_size=1, max_size=5))
def test_joined_turns_hold_every_answer_behind_its_own_prompt(script: list[tuple[bool, list[int], list[int]]]) -> None:
    """T8, for any turns: whether the next prompt keeps what was said, or begins otherwise."""
    turns: list[tuple[list[int], list[int]]] = []
    for keeps, more, answer in script:
        before = [*turns[-1][0], *turns[-1][1]] if turns and keeps else []
        turns.append(([*before, *more], answer))
    joined = join_turns(turns)
    spans = [(part.token_ids, span) for part in joined for span in part.loss_spans]
    assert [(ids[:start], ids[start:end]) for ids, (start, end) in spans] == turns
    assert all(part.loss_spans[-1][1] == len(part.token_ids) for part in joined)
    assert joined[-1].last == len(turns) - 1
    splits = sum(new[0][: len(old[0] + old[1])] != old[0] + old[1] for old, new in itertools.pairwise(turns))
    assert len(joined) == 1 + splits
