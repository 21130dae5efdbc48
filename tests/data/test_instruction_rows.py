"""Rows of instructions and chats from all kinds of files and from reviews, and errors in them."""

import json

import pandas as pd
import pytest
from support.data_files import SPLITS, cached, chats, load_instructions, rows, samples_of, write_rows

from fabric_ladder.data.instruction_rows import check_for
from fabric_ladder.errors import UserError

LOAD = load_instructions, {}


def test_every_format_gives_the_same_tokens(tmp_path, load, tokenizers):
    odd = [
        {"instruction": "None", "input": "NA", "output": "null"},
        {"instruction": "1.50", "input": "", "output": "7"},
    ]
    odd += [{"instruction": 'with "quotes", commas', "input": "two\nlines", "output": "  很好 🎬"}]
    many = odd + rows()
    lines = "".join(json.dumps(row) + "\n\n" for row in many)
    contents = {"a.jsonl": many, "a.json": many, "a.csv": many, "a.parquet": many, "LINES.JSON": lines}
    contents |= {"list.jsonl": json.dumps(many), "mark.json": b"\xef\xbb\xbf" + lines.encode()}
    contents["no_empty_inputs.jsonl"] = [{key: text for key, text in row.items() if text} for row in many]
    contents["null_inputs.json"] = [{key: text or None for key, text in row.items()} for row in many]
    prints = {
        name: load(write_rows(content, tmp_path / name), tokenizer=tokenizers["trained"]).fingerprint
        for name, content in contents.items()
    }
    assert len(set(prints.values())) == 1, prints
    same = [write_rows(chats(), tmp_path / name) for name in ("chats.parquet", "chats.jsonl")]
    pairs = [{"input": row["instruction"], "target": row["output"]} for row in rows()]
    plain = [{"instruction": row["instruction"], "output": row["output"]} for row in rows()]
    for one, other in (same, (pairs, plain)):
        first, second = (load(content, tokenizer=tokenizers["trained"]).fingerprint for content in (one, other))
        assert first == second


FORMS = [  # columns of the instruction, the input and the answer
    ("instruction", "context", "response"), ("instruction", "context", "output"), ("instruction", "input", "target"),
    ("input", None, "target"), ("prompt", None, "response"), ("prompt", None, "completion"),
    ("question", None, "answer"), ("question", "context", "answer"), ("query", None, "response"),
]  # fmt: skip


def test_other_names_of_the_columns_give_the_same_rows():
    for question, given, answer in FORMS:
        row = {question: "a", answer: "b"} | ({given: "c"} if given else {})
        check, _ = check_for("rows.jsonl", row, {})
        expected = {"instruction": "a", "input": "c" if given else "", "output": "b"}
        assert expected.items() <= check("line 1", row).items()


@pytest.mark.parametrize("kind", ["json", "parquet"])
def test_sharegpt_conversations_give_the_tokens_of_messages(tmp_path, load, tokenizers, kind):
    speakers = {"user": "human", "assistant": "gpt", "system": "system"}
    conversations = [{"id": "1", "conversations": [{"from": speakers[turn["role"]], "value": turn["content"]}
                                                   for turn in chat["messages"]]} for chat in chats()]  # fmt: skip
    path = write_rows(conversations, tmp_path / f"conversations.{kind}")
    first, second = (load(content, tokenizer=tokenizers["trained"]) for content in (chats(), path))
    assert first.fingerprint == second.fingerprint
    named = [{"conversations": chat["messages"]} for chat in chats()]
    assert load(named, tokenizer=tokenizers["trained"]).fingerprint == first.fingerprint


def test_of_two_inputs_the_first_with_text_counts_and_an_input_that_is_no_text_is_refused():
    row = {"instruction": "a", "input": "", "context": "c", "response": "b"}
    check, _ = check_for("rows.jsonl", row, {})
    assert [check("line 1", row | {"input": one})["input"] for one in ("", "d")] == ["c", "d"]
    row = {"question": "Who?", "context": {"title": ["Ann"], "sentences": [["Ann did."]]}, "answer": "Ann"}
    with pytest.raises(UserError, match=r"^rows.jsonl: the column context is no text, but .*: write it as text or"):
        check_for("rows.jsonl", row, {})


def test_splits_are_files_of_a_folder_or_split_off_and_cut(tmp_path, load, tokenizers):
    many = rows(60)
    pairs = [{"input": row["instruction"], "target": row["output"]} for row in many[:20]]
    for name, part in {"train.csv": many[20:40], "train2.json": pairs, "test.jsonl": many[40:]}.items():
        write_rows(part, tmp_path / "folder" / name)
    got = load("folder", tokenizer=tokenizers["trained"])
    assert [len(got.splits[split]) for split in SPLITS] == [36, 4, 20]
    own = load("folder/train.csv", tokenizer=tokenizers["trained"], test_file="folder/test.jsonl", train_samples=7)
    assert [len(own.splits[split]) for split in SPLITS] == [7, 2, 20]
    assert own.splits["test"][:] == got.splits["test"][:]


def test_chats_and_instructions_do_not_mix(tmp_path, load, tokenizers):
    write_rows(rows(), tmp_path / "folder" / "train.jsonl")
    write_rows(chats(), tmp_path / "folder" / "test.jsonl")
    with pytest.raises(UserError, match="folder has files of two forms: use only messages or only"):
        load("folder", tokenizer=tokenizers["trained"])


def test_reviews_become_instructions(load):
    sizes = {"train_samples": 60, "validation_samples": 20, "test_samples": 30}
    got = load("synthetic", max_length=4096, **sizes)
    assert [len(got.splits[split]) for split in SPLITS] == [60, 20, 30]
    answers = set()
    for ids, labels in samples_of(got).items():
        text = got.tokenizer.decode(ids[: labels.count(-100)])
        assert "### Instruction:\nIs this film review positive or negative?\n\n### Input:\n" in text
        answers.add(got.tokenizer.decode([label for label in labels if label != -100]))
    assert answers == {"positive<|endoftext|>", "negative<|endoftext|>"}


GOOD, CHAT = rows(20), chats(20)

USER, ASSISTANT = CHAT[1]["messages"][:2]

LINES = [json.dumps(row) for row in GOOD]


def changed(row, **values):
    row = row | values
    return {key: value for key, value in row.items() if value is not ...}


BAD_ROWS = {  # name: (row, reason why it is bad)
    "no output": (changed(GOOD[3], output=...), r"no output"),
    "number": (changed(GOOD[3], output=42), r"output is 42, not text"),
    "no instruction": (changed(GOOD[3], instruction=...), r"no instruction"),
    "empty messages": ({"messages": []}, r"no answer from the assistant"),
    "text for a message": ({"messages": [USER, "Hi."]}, r"message 2 has the role null, not system, user, assistant"),
    "parts": ({"messages": [USER | {"content": [1]}, ASSISTANT]}, r"content in message 1 is \[1\], not text"),
    "no answer": ({"messages": [USER]}, r"no answer from the assistant"),
    "unknown speaker": ({"conversations": [{"from": "bing", "value": "a"}]}, r'message 1 has the role "bing", not s'),
    "list for a speaker": ({"conversations": [{"from": ["gpt"], "value": "a"}]}, r'message 1 has the role \["gpt"\], '),
    "no value": ({"conversations": [{"from": "human", "content": "a"}]}, r"no value in message 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_row_is_refused_with_the_reason(name):
    row, reason = BAD_ROWS[name]
    chat = [column for column in row if column in ("messages", "conversations")]
    check, _ = check_for("rows.jsonl", dict.fromkeys(chat or ["instruction", "output"]), {})
    with pytest.raises(ValueError, match=f"^{reason}"):
        check("line 4", row)


def test_a_bad_row_is_named_or_left_out(tmp_path, load, tokenizers):
    lines = [*LINES[:3], LINES[3][:-2], *LINES[4:]]
    path = write_rows("\n".join(lines), tmp_path / "rows.jsonl")
    found = r"1 of 20 rows of .*rows\.jsonl cannot be used \(line 4: not JSON \(.+, column \d+\)\)"
    with pytest.raises(UserError, match=f"^{found}: fix or remove them, or leave .* --bad_samples skip$"):
        load(path, tokenizer=tokenizers["trained"])
    got = load(path, tokenizer=tokenizers["trained"], bad_samples="skip")
    assert sum(map(len, got.splits.values())) == 19
    assert pd.Series(got.notices).str.fullmatch(found + " and are left out").tolist() == [True]
    line = r"^nothing is left: 9 of 9 rows of .* cannot be used \(line 1: no output; .*; …\)$"
    with pytest.raises(UserError, match=line):
        load([{"instruction": "a", "output": ""}] * 9, tokenizer=tokenizers["trained"], bad_samples="skip")


REFUSED = {
    "other columns": (
        "a.csv",
        "ask,tell\na,b\n",
        r"a\.csv has the columns ask, tell: chats need the column messages or",
    ),
    "short rows": ("a.csv", "instruction,output\na,b\nc\nd\n", r"2 of 3 rows of .*a\.csv .* \(row 2: no output; row "),
    "two rows": ("a.jsonl", GOOD[:2], r"2 samples are too few to be split"),
    "text in a CSV": ("a.csv", "messages\nHi\n", r'row 1: messages is "Hi", not a list of messages'),
}


@pytest.mark.parametrize("name", REFUSED)
def test_files_without_instructions_are_refused(tmp_path, load, tokenizers, name):
    file, content, pattern = REFUSED[name]
    with pytest.raises(UserError, match=pattern):
        load(write_rows(content, tmp_path / file), tokenizer=tokenizers["trained"])
    assert cached(tmp_path) == []
    with pytest.raises(UserError, match="--text_column and --label_column are not for instructions"):
        load(tmp_path / file, text_column="instruction")
