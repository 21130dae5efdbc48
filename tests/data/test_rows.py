"""Tables without a header, tables with several text columns, and broken tables."""

import gzip
import json

import pandas as pd
import pytest
from support.data_files import cached, load_instructions, table, write_rows, write_table

from fabric_ladder.errors import UserError

NEWS = [(index % 3 + 1, f"Title {index}", f"A longer text about day {index}.") for index in range(30)]


@pytest.mark.parametrize("name", ["news.tsv", "news.csv.gz"])
def test_column_names_replace_a_missing_header(tmp_path, load, name):
    frame = pd.DataFrame(NEWS, columns=["label", "title", "text"])
    options = {"index": False, "sep": "\t" if ".tsv" in name else ","}
    frame.to_csv(tmp_path / name, header=False, **options)
    frame.to_csv(tmp_path / f"with_{name}", **options)
    with pytest.raises(UserError, match=rf"{name} has no column 'text', only 1, Title 0, A lo.*: .*--column_names for"):
        load(name)
    got = load(name, column_names="label,title,text")
    assert got.class_names == ["1", "2", "3"]
    assert got.fingerprint == load(f"with_{name}").fingerprint
    with pytest.raises(UserError, match=rf"{name} holds no rows .*row 1: more fields than column names \(3 ins"):
        load(name, column_names="label,text")


def test_column_names_for_instructions(tmp_path):
    pairs = [(f"Say {index}.", f"It is {index}.") for index in range(20)]
    pd.DataFrame(pairs).to_csv(tmp_path / "a.csv", index=False, header=False)
    with pytest.raises(UserError, match=r"has the columns Say 0\., It is 0\.: chats need .*--column_names"):
        load_instructions(tmp_path, tmp_path / "a.csv")
    got = load_instructions(tmp_path, tmp_path / "a.csv", column_names="instruction,output")
    assert sum(map(len, got.splits.values())) == 20


@pytest.mark.parametrize("dataset", ["a.jsonl", "synthetic"])
def test_column_names_are_refused_for_data_with_names(tmp_path, load, dataset):
    if "." in dataset:
        write_table(table(), tmp_path / dataset)
    with pytest.raises(UserError, match=r"--column_names .* CSV and TSV files without a header, not "):
        load(dataset, column_names="text,label")


def test_several_text_columns_are_lines_of_one_text(tmp_path, load):
    rows = [{"label": label, "title": title, "text": text} for label, title, text in NEWS]
    rows[3]["title"], rows[4]["title"], rows[5]["text"] = "", "  ", ""
    path = write_rows(rows, tmp_path / "a.csv")
    joined = [{"label": row["label"], "text": f"{row['title']}\n{row['text']}"} for row in rows]
    for number, text in ((3, rows[3]["text"]), (4, rows[4]["text"]), (5, rows[5]["title"])):
        joined[number]["text"] = text
    got = load(path, text_column="title, text")
    assert got.fingerprint == load(write_rows(joined, tmp_path / "joined.jsonl")).fingerprint
    write_rows([*rows, {"label": 1, "title": "", "text": " "}], path)
    with pytest.raises(UserError, match=r"1 of 31 rows of .* 31: no title and no text\)"):
        load(path, text_column="title,text")
    with pytest.raises(UserError, match="name the same column, 'label'"):
        load(path, text_column="title,label")


def test_bad_rows_are_left_out_and_counted(tmp_path, load):
    frame = table(40)
    write_table(frame, tmp_path / "good.csv")
    frame = frame.astype({"label": object})
    frame.loc[len(frame)] = ["no label here", ""]
    frame.loc[len(frame)] = ["", 1]
    path = write_table(frame, tmp_path / "bad.csv")
    found = r"2 of 42 rows of \S*bad\.csv cannot be used \(row 41: no label; row 42: no text\)"
    with pytest.raises(UserError, match=rf"^{found}: fix or remove them, or leave them out with --bad_samples skip$"):
        load(path)
    for _ in range(2):  # the second load reads the cache
        got = load(path, bad_samples="skip")
        assert pd.Series(got.notices).str.fullmatch(f"{found} and are left out").tolist() == [True]
    assert got.fingerprint == load("good.csv").fingerprint


GOOD = [{"text": f"review {index}", "label": index % 2} for index in range(20)]
CSV = pd.DataFrame(GOOD).to_csv(index=False)
LINES = "".join(json.dumps(row) + "\n" for row in GOOD)
DEEP = "[" * 99_999
REFUSED = {
    "three rows": ("a.csv", "text,label\na b,0\nc d,1\ne f,0\n", r"have a single label: 3 are too few, give more"),
    "one class": ("a.csv", "text,label\n" + "a,x\n" * 9, r"the same label, 'x'"),
    "no text": ("a.csv", CSV.replace("review 3", "  "), r"1 of 20 rows of .*a\.csv cannot be used \(row 4: no text\)"),
    "list": ("a.json", json.dumps([{"text": ["a"], "label": 1}] * 9), r"nothing is left: 9 .*row 1: text is \[\"a\""),
    "list label": ("a.jsonl", LINES + '{"text": "a", "label": [1]}', r"label is \[1\], not a class: set --problem"),
    "decimal labels": ("a.csv", "text,label\na,0.5\nb,1\n", r"'label' holds decimal numbers, .*or --problem_type"),
    "instructions": ("a.csv", "instruction,output\na,b\n", r"no column 'text', only .* or --task instruction-tuning"),
    "UTF-16": ("a.csv", CSV.encode("utf-16"), r"text in UTF-16: save it as UTF-8"),
    "Latin-1 in gzip": ("a.csv.gz", gzip.compress("text,label\n\xe9,1\n".encode("latin-1")), r"not UTF-8 \(byte 0xe9"),
    "open quote": ("a.tsv", 'text\tlabel\n"Oh dear\t0\nplain\t1\n"the end"\t0\nb\t1\n', r"cannot be.*row 1: an open"),
    "half a gzip": ("a.csv.gz", gzip.compress(CSV.encode() * 999)[:999], r"a\.csv\.gz cannot be read as csv \(.*end"),
    "bare comma": ("a.csv", "text,label\na,b\na,b,c\n", r"row 2: more fields .* \(3 instead of 2\): quote texts that"),
    "bare commas": ("a.csv", "text,label\n" + "a,b,1\n" * 9, r"row 1: more fields than column names .*: quote"),
    "deep list": ("a.json", DEEP, r"a\.json cannot be read as json \(maximum recursion"),
    "half a character": ("a.jsonl", LINES + '{"text": "\\ud83c", "label": 1}', r"line 21: .*surrogates not allowed"),
    "no Parquet rows": ("a.parquet", [], r"a\.parquet holds no rows"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_broken_table_is_refused_in_one_line(tmp_path, load, name):
    file, content, pattern = REFUSED[name]
    with pytest.raises(UserError, match=pattern) as error:
        load(write_rows(content, tmp_path / file))
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 700
    assert cached(tmp_path) == []


def test_a_tab_separated_text_in_quotes_may_hold_tabs_and_line_ends(tmp_path, load):
    lines = [f'"def f{number}():\n\treturn ""{number}"""\t{number % 2}' for number in range(20)]
    got = load(write_rows("text\tlabel\n" + "\n".join(lines), tmp_path / "code.tsv"))
    assert sum(len(rows) for rows in got.splits.values()) == 20
