"""Rows of instructions and chats from all kinds of files and from reviews, and errors in them."""

import json
from functools import partial
from pathlib import Path

import pandas as pd
import pytest
from support.data_files import SPLITS, cached, chats, load_instructions, rows, samples_of, write_rows

from fabric_ladder.data.instruction_rows import form_of
from fabric_ladder.errors import UserError


@pytest.fixture
def load(tmp_path):
    """Load rows or a file with a cache of the test's own."""
    return partial(load_instructions, tmp_path)


# ----------------------------------------------------------------------------------------------------------------------
# Sources
# ----------------------------------------------------------------------------------------------------------------------


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


def test_pairs_are_instructions_without_an_input(load, tokenizers):
    pairs = [{"input": row["instruction"], "target": row["output"]} for row in rows()]
    plain = [{"instruction": row["instruction"], "output": row["output"]} for row in rows()]
    first, other = (load(made, tokenizer=tokenizers["trained"]).fingerprint for made in (pairs, plain))
    assert first == other


def test_chats_from_parquet(tmp_path, load, tokenizers):
    same = [write_rows(chats(), tmp_path / name) for name in ("a.parquet", "a.jsonl")]
    first, other = (load(path, tokenizer=tokenizers["trained"]).fingerprint for path in same)
    assert first == other


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
    with pytest.raises(UserError, match=r"test\.jsonl and .*train\.jsonl have two forms: use only"):
        load("folder", tokenizer=tokenizers["trained"])


@pytest.mark.parametrize("dataset", ["synthetic", "imdb"])
def test_reviews_become_instructions(request, load, dataset):
    folder = request.getfixturevalue("archive").parent if dataset == "imdb" else Path()
    sizes = {"train_samples": 60, "validation_samples": 20, "test_samples": 30}
    got = load(dataset, data_dir=str(folder), max_length=4096, **sizes)
    assert [len(got.splits[split]) for split in SPLITS] == [60, 20, 30]
    answers = set()
    for ids, labels in samples_of(got).items():
        text = got.tokenizer.decode(ids[: labels.count(-100)])
        assert "### Instruction:\nIs this film review positive or negative?\n\n### Input:\n" in text
        answers.add(got.tokenizer.decode([label for label in labels if label != -100]))
    assert answers == {"positive<|endoftext|>", "negative<|endoftext|>"}


# ----------------------------------------------------------------------------------------------------------------------
# Bad input
# ----------------------------------------------------------------------------------------------------------------------

GOOD, CHAT = rows(20), chats(20)

USER, ASSISTANT = CHAT[1]["messages"][:2]

LINES = [json.dumps(row) for row in GOOD]


def changed(row, **values):
    row = row | values
    return {key: value for key, value in row.items() if value is not ...}


BAD_ROWS = {  # name: (row, reason why it is bad)
    "no output": (changed(GOOD[3], output=...), r"no output"),
    "null output": (changed(GOOD[3], output=None), r"no output"),
    "blank output": (changed(GOOD[3], output=" \n"), r"no output"),
    "number": (changed(GOOD[3], output=42), r"output is 42, not text"),
    "list": (changed(GOOD[3], output=["x" * 99]), r'output is \["x{38}, not text'),
    "no instruction": (changed(GOOD[3], instruction=...), r"no instruction"),
    "true input": (changed(GOOD[3], input=True), r"input is true, not text"),
    "no messages": ({"messages": None}, r"no messages"),
    "empty messages": ({"messages": []}, r"no messages"),
    "text for messages": ({"messages": "Hi."}, r'messages is "Hi\.", not a list of messages'),
    "text for a message": ({"messages": [USER, "Hi."]}, r'message 2 is "Hi\.", not role and content'),
    "unknown role": ({"messages": [USER, {"role": "gpt"}]}, r'message 2 has the role "gpt", not system, user, a'),
    "list for a role": ({"messages": [{"role": ["user"]}]}, r'message 1 has the role \["user"\], not'),
    "no content": ({"messages": [USER, {"role": "assistant"}]}, r"no content in message 2"),
    "empty answer": ({"messages": [USER, ASSISTANT | {"content": ""}]}, r"no content in message 2"),
    "parts": ({"messages": [USER | {"content": [1]}, ASSISTANT]}, r"content in message 1 is \[1\], not text"),
    "no answer": ({"messages": [USER]}, r"no message from the assistant"),
    "answer first": ({"messages": [ASSISTANT, USER]}, r"the first message is from the assistant"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_row_is_refused_with_the_reason(name):
    row, reason = BAD_ROWS[name]
    check, _ = form_of([*row], "rows.jsonl", "") if "messages" in row else form_of(["instruction", "output"], "", "")
    with pytest.raises(ValueError, match=f"^{reason}"):
        check("line 4", row)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (LINES[3][:-2], r"not JSON \(Unterminated string starting at, column \d+\)"),
        ("[1]", r"not a JSON object"),
        ('{"instruction":' + "[" * 99_999, r"not JSON \(maximum recursion depth"),
        (json.dumps(GOOD[3] | {"output": 42}), r"output is 42, not text"),
        ('{"instruction": "a", "output": "\\ud83c"}', r"output holds half a character"),
    ],
)
def test_a_bad_row_is_named_or_left_out(tmp_path, load, tokenizers, row, reason):
    path = write_rows("\n".join([*LINES[:3], row, *LINES[4:]]), tmp_path / "rows.jsonl")
    found = rf"1 of 20 rows of .*rows\.jsonl cannot be used \(line 4: {reason}.*\)"
    with pytest.raises(UserError, match=f"^{found}: fix or remove them, or leave .* --bad_samples skip$") as error:
        load(path, tokenizer=tokenizers["trained"])
    assert len(str(error.value)) < 700
    got, again = (load(path, tokenizer=tokenizers["trained"], bad_samples="skip") for _ in range(2))
    assert sum(map(len, got.splits.values())) == 19
    assert len(got.notices) == 1
    assert pd.Series(got.notices).str.fullmatch(found + " and are left out").all()
    assert again.notices == got.notices


REFUSED = {
    "no JSON list": ("a.json", '[\n{"instruction": "a"\n"output": "b"}]', r"a\.json cannot be read as json \(.*line 3"),
    "other columns": ("a.csv", "question,answer\na,b\n", r"a\.csv has the columns question, answer: instructions need"),
    "no answers": ("a.jsonl", [{"instruction": "a"}] * 9, r"has the columns instruction: .* or input and target; or"),
    "a poem": ("a.jsonl", "Roses are red\n", r"\(line 1: not JSON \(Expecting value, column 1\)\)"),
    "nothing": ("a.jsonl", "", r"a\.jsonl is empty"),
    "no Parquet": ("a.parquet", "instruction", r"a\.parquet cannot be read as parquet"),
    "bare commas": ("a.csv", "instruction,output\n" + "a,b,c\n" * 9, r"rows have more fields than its header: quote"),
    "one bare comma": ("a.csv", "instruction,output\na,b\na,b,c\n", r"Expected 2 fields in line 3, saw 3"),
    "short rows": ("a.csv", "instruction,output\na,b\nc\nd\n", r"2 of 3 rows of .*a\.csv .* \(row 2: no output; row "),
    "two rows": ("a.jsonl", GOOD[:2], r"2 samples are too few to be split"),
    "text in a CSV": ("a.csv", "messages\nHi\n", r'row 1: messages is "Hi", not a list of messages'),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_files_that_cannot_be_used_are_refused_in_one_line(tmp_path, load, tokenizers, name):
    file, content, pattern = REFUSED[name]
    with pytest.raises(UserError, match=pattern) as error:
        load(write_rows(content, tmp_path / file), tokenizer=tokenizers["trained"])
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 700
    assert cached(tmp_path) == []


def test_rows_that_are_all_bad_are_refused_even_when_they_may_be_left_out(load, tokenizers):
    with pytest.raises(
        UserError, match=r"^nothing is left: 9 of 9 rows of .* cannot be used \(line 1: no output; .*; …\)$"
    ):
        load([{"instruction": "a", "output": ""}] * 9, tokenizer=tokenizers["trained"], bad_samples="skip")
