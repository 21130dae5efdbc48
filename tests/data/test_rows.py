"""Tables without a header, compressed tables, tables with several text columns, and broken tables."""

import gzip
import json
from functools import partial

import pandas as pd
import pytest
from support.data_files import BLOOM, load_in, load_instructions, table, write_rows, write_table

from fabric_ladder.errors import UserError

NEWS = [(index % 3 + 1, f"Title {index}", f"What happened on day {index} was told here.") for index in range(30)]


@pytest.fixture
def load(tmp_path):
    """Load a file or folder with a cache of the test's own."""
    return partial(load_in, tmp_path, model=BLOOM)


# ----------------------------------------------------------------------------------------------------------------------
# Columns
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["news.csv", "news.tsv", "news.csv.gz"])
def test_a_file_without_a_header_is_recognised_and_read_by_column_names(tmp_path, load, name):
    frame = pd.DataFrame(NEWS, columns=["label", "title", "text"])
    options = {"index": False, "sep": "\t" if ".tsv" in name else ","}
    frame.to_csv(tmp_path / name, header=False, **options)
    frame.to_csv(tmp_path / f"with_{name}", **options)
    hint = r"the first row looks like data; name the columns from the left, e.g. --column_names label,title,text$"
    with pytest.raises(UserError, match=rf"{name} has no column 'text', only 1, Title 0, What .*: {hint}"):
        load(tmp_path / name)
    got, expected = load(tmp_path / name, column_names="label,title,text"), load(tmp_path / f"with_{name}")
    assert got.class_names == ["1", "2", "3"]
    assert got.fingerprint == expected.fingerprint
    with pytest.raises(UserError, match=rf"--column_names gives 2 names, but \S*{name} has 3 columns"):
        load(tmp_path / name, column_names="label,text")


@pytest.mark.parametrize(("labels", "seen"), [(("good", "bad"), True), (("review", "sentiment"), False)])
def test_short_words_in_place_of_a_header_are_recognised_by_a_label_that_comes_again(tmp_path, load, labels, seen):
    """Without such a label the words may be column names; here only the header has `review` and `sentiment`."""
    rows = [f"film {index},{('good', 'bad')[index % 2]}" for index in range(20)]
    first = f"a film,{labels[0]}" if seen else ",".join(labels)
    (tmp_path / "a.csv").write_text("\n".join([first, *rows]))
    with pytest.raises(UserError, match="no column 'text', only ") as caught:
        load(tmp_path / "a.csv")
    assert ("the first row looks like data" in str(caught.value)) == seen
    assert ("set --text_column" in str(caught.value)) != seen


def test_instructions_without_a_header_are_recognised_and_read(tmp_path):
    pairs = [(f"Say {index}, and then say it once more.", f"It is {index}.") for index in range(20)]
    pd.DataFrame(pairs).to_csv(tmp_path / "a.csv", index=False, header=False)
    with pytest.raises(UserError, match="the first row looks like data; name the columns"):
        load_instructions(tmp_path, tmp_path / "a.csv")
    got = load_instructions(tmp_path, tmp_path / "a.csv", column_names="instruction,output")
    assert sum(map(len, got.splits.values())) == 20


@pytest.mark.parametrize(("dataset", "values"), [("a.jsonl", {}), ("synthetic", {}), ("a.parquet", {})])
def test_column_names_for_what_has_names_are_refused(tmp_path, load, dataset, values):
    if "." in dataset:
        write_table(table(), tmp_path / dataset)
    with pytest.raises(UserError, match=r"--column_names .* CSV and TSV files without a header, not "):
        load(dataset, column_names="text,label")


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.parquet"])
def test_several_text_columns_are_lines_of_one_text(tmp_path, load, name):
    rows = [{"label": label, "title": title, "text": text} for label, title, text in NEWS]
    rows[3]["title"], rows[4]["title"], rows[5]["text"] = "", "  ", ""
    path = write_rows(rows, tmp_path / name)
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
    with pytest.raises(UserError, match="has no column 'head', only label, title, text"):
        load(path, text_column="head,text")


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


def test_labels_that_are_numbers_are_ordered_by_size_in_every_format(tmp_path, load):
    frame = table(60, start=100)
    frame["label"] = [[2, 10, 1][index % 3] for index in range(60)]
    got = [load(write_table(frame, tmp_path / name)) for name in ("a.csv", "a.jsonl", "a.parquet")]
    assert [datasets.class_names for datasets in got] == [["1", "2", "10"]] * 3
    assert len({datasets.fingerprint for datasets in got}) == 1


# ----------------------------------------------------------------------------------------------------------------------
# Broken files
# ----------------------------------------------------------------------------------------------------------------------

GOOD = [{"text": f"review {index}", "label": index % 2} for index in range(20)]
LINES = "".join(json.dumps(row) + "\n" for row in GOOD)
DEEP = "[" * 99_999
REFUSED = {
    "null": ("a.json", "null", r"a\.json holds no rows .* \(line 1: not a JSON object\)"),
    "lines of null": ("a.jsonl", "null\n" * 50, r"holds no rows that can be read \(line 1: not a JSON object; line 2"),
    "list of nulls": ("a.json", "[null, null]", r"holds no rows that can be read \(row 1: not a JSON object; row 2"),
    "empty list": ("a.json", "[]", r"a\.json holds no rows: there is nothing to learn"),
    "some nulls": ("a.jsonl", LINES + "null\n", r"1 of 21 rows of .* \(line 21: not a JSON object\): fix"),
    "a text": ("a.json", '"text"', r"holds no rows .* \(line 1: not a JSON object\)"),
    "columns": ("a.json", '{"text": ["a"], "label": [1]}', r'line 1: text is \[\"a\"\], not text\)'),
    "rows in an object": ("a.json", json.dumps({"data": GOOD}), r"a\.json has no column 'text', only data: set --text"),
    "indented object": ("a.json", json.dumps({"data": GOOD}, indent=1), r"line 1: not JSON \(Expecting prop.*or JSON"),
    "deep list": ("a.json", DEEP, r"a\.json cannot be read as json \(maximum recursion depth"),
    "deep line": ("a.jsonl", LINES + f'{{"text": {DEEP}\n', r"line 21: not JSON \(maximum recursion depth.*\)"),
    "deep value": ("a.jsonl", LINES + f'{{"text": {"[" * 99 + "]" * 99}, "label": 1}}\n', r"line 21: text is \[{40}"),
    "text of numbers": ("a.jsonl", LINES.replace('"review ', "").replace('",', ","), r"line 1: text is 0, not text"),
    "name twice": ("a.csv", "text,label,text\na,1,b\n", r"a\.csv cannot be .* \(several columns are named 'text'"),
    "decimal labels": ("a.csv", "text,label\na,0.5\nb,1\n", r"'label' holds decimal numbers, .*: set --label_column"),
    "decimal JSON labels": ("a.jsonl", LINES.replace("1}", "1.5}"), r"line 2: label is 1\.5, not an integer or a s"),
    "half a character": ("a.jsonl", LINES + '{"text": "\\ud83c", "label": 1}', r"line 21: text holds half a character"),
    "open quote": ("a.tsv", 'text\tlabel\n"Oh dear\t0\nplain\t1\n"the end"\t0\nb\t1\n', r"1 of 2 .*row 1: an open"),
    "half a gzip": ("a.csv.gz", gzip.compress(LINES.encode() * 999)[:999], r"a\.csv\.gz cannot be read as csv \(.*end"),
    "no gzip": ("a.jsonl.gz", LINES, r"cannot read \S*a\.jsonl\.gz \(Not a gzipped file"),
    "Latin-1 in gzip": ("a.csv.gz", gzip.compress("text,label\n\xe9,1\n".encode("latin-1")), r"not UTF-8 \(byte 0xe9"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_broken_table_is_refused_in_one_line(tmp_path, load, name):
    file, content, pattern = REFUSED[name]
    with pytest.raises(UserError, match=pattern) as error:
        load(write_rows(content, tmp_path / file))
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 700
    left = [path for path in (tmp_path / "cache").rglob("*") if path.suffix != ".lock"]
    assert left == [tmp_path / "cache" / "tokenised"]


def test_a_tab_separated_text_in_quotes_may_hold_tabs_and_line_ends(tmp_path, load):
    lines = [f'"def f{number}():\n\treturn ""{number}"""\t{number % 2}' for number in range(20)]
    got = load(write_rows("text\tlabel\n" + "\n".join(lines), tmp_path / "code.tsv"))
    assert sum(len(rows) for rows in got.splits.values()) == 20


def test_columns_without_a_name_stand_in_nobodys_way(tmp_path, load):
    (tmp_path / "a.csv").write_text(
        "text,label,,\n" + "".join(f"review {index},{index % 2},,\n" for index in range(20))
    )
    assert sum(map(len, load("a.csv").splits.values())) == 20
