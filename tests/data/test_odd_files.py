"""Files that other projects read wrongly in silence: each is read right, refused in one line, or named."""

import gzip
import io
import json
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

import datasets as hf
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from support.data_files import BLOOM, SPLITS, VIT, load_in, noise, save_image, stored, table, texts_of, write_table

from fabric_ladder.data.rows import read_file
from fabric_ladder.data.text_sources import find_source
from fabric_ladder.errors import UserError
from fabric_ladder.settings import DataSettings


def load_pets(folder, dataset="pets", **values):
    return load_in(folder, dataset, model=VIT, task="image-classification", **values)


def test_grey_images_of_12_bits_in_16_are_refused(tmp_path):
    for number in range(20):
        grey = np.full((16, 16), 3895 + 10 * number, np.uint16)
        save_image(tmp_path / "pets" / ("cat" if number % 2 else "dog") / f"{number}.png", Image.fromarray(grey))
    with pytest.raises(UserError, match="less than half of the 65,535 levels, as those of 12 bits do: convert them to"):
        load_pets(tmp_path)


@pytest.mark.parametrize(
    ("encoding", "names", "slash"),
    [("gbk", ("狗", "猫"), "/"), ("utf-8", ("café", "thé"), "\\"), ("cp437", ("ä", "ö"), "\\")],
)
def test_a_zip_of_a_windows_program_is_read(tmp_path, encoding, names, slash):
    """Python marks names as UTF-8 unless they are ASCII, so they are written as ASCII of the same length first."""
    data = io.BytesIO()
    plain = [f"{'@' if name == names[0] else '#'}" * len(name.encode(encoding)) for name in names]
    with zipfile.ZipFile(data, "w") as archive:
        for number in range(20):
            png = save_image(tmp_path / "a.png", noise(number)).read_bytes()
            archive.writestr(f"pets|{plain[number % 2]}|{number}.png", png)
    raw = data.getvalue()
    for name, ascii_name in zip(names, plain, strict=True):
        raw = raw.replace(f"|{ascii_name}|".encode(), b"|" + name.encode(encoding) + b"|")
    for number in range(20):
        raw = raw.replace(f"|{number}.png".encode(), f"{slash}{number}.png".encode())
    (tmp_path / "pets.zip").write_bytes(raw.replace(b"pets|", b"pets" + slash.encode()))
    got = load_pets(tmp_path, "pets.zip")
    assert got.class_names == sorted(names)
    assert sum(sum(stored(got, split).values()) for split in SPLITS) == 20
    assert bool(got.notices) == (encoding != "utf-8")


def test_images_are_labelled_by_the_tables_of_their_splits(tmp_path):
    """As in Hugging Face's image folders. One image is in no table."""
    for split, numbers in (("train", range(20)), ("test", range(20, 24))):
        for number in numbers:
            save_image(tmp_path / "pets" / split / "photos" / f"{number}.png", noise(number))
        lines = [f"photos/{number}.png,{('cat', 'dog')[number % 2]}" for number in numbers if number]
        (tmp_path / "pets" / split / "metadata.csv").write_text("\n".join(["file_name,label", *lines]))
    got = load_pets(tmp_path)
    assert got.class_names == ["cat", "dog"]
    assert [sum(stored(got, split).values()) for split in SPLITS] == [17, 2, 4]
    assert any("1 of 24 images are in no table and are left out" in line for line in got.notices)
    with open(tmp_path / "pets" / "test" / "metadata.csv", "a") as table:
        table.write("\nphotos/99.png,cat")
    with pytest.raises(UserError, match=r"row 5 of test/metadata\.csv names no image \(photos/99\.png\)"):
        load_pets(tmp_path)


@pytest.mark.parametrize("ending", [".png", ""])
def test_images_are_labelled_by_a_table_beside_their_folder(tmp_path, ending):
    for number in range(20):
        save_image(tmp_path / "pets" / "images" / f"{number:02}.png", noise(number))
    lines = [f"{number:02}{ending},{('cat', 'dog')[number % 2]}" for number in range(20)]
    (tmp_path / "pets" / "train.csv").write_text("\n".join(["image_id,label", *lines]))
    got = load_pets(tmp_path)
    assert [sum(stored(got, split).values()) for split in SPLITS] == [14, 2, 4]
    (tmp_path / "pets" / "train.csv").write_text("image_id,kind\n00,cat\n")
    with pytest.raises(UserError, match=r"train\.csv has no column label, only image_id, kind: images need a table wi"):
        load_pets(tmp_path)


# The names of splits


@pytest.mark.parametrize(
    "names",
    [
        "reviews_train.csv reviews_dev.csv reviews_test.csv",
        "train.csv val/part1.csv test/part1.csv",
        "data/train-00000-of-1.parquet data/validation-00000-of-1.parquet data/test-00000-of-1.parquet",
        "train-00000.csv dev.csv eval.csv",
        "valères.csv devtest.csv test2.csv",
        "evaluated.csv eval.csv test.csv",
    ],
)
def test_the_words_of_splits_count_anywhere_in_a_path(tmp_path, names):
    first, *others = names.split()
    for name in [first, *others, f"more_{first}", "notes.txt", "._train.csv"]:  # the last is a file of macOS
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    source = find_source(DataSettings(dataset=str(tmp_path)))
    found = {split: [str(path.relative_to(tmp_path)) for path in paths] for split, paths in source.files.items()}
    assert found == dict(zip(SPLITS, (sorted([first, f"more_{first}"]), *([name] for name in others)), strict=True))
    assert bool(source.notices) == ("train" not in first.lower())


def test_files_without_the_word_of_a_split_are_named(tmp_path):
    for name in ("train.csv", "test.csv", "old_test.csv", "all.csv", "sub/more.csv"):
        write_table(table(), tmp_path / "a" / name)
    source = find_source(DataSettings(dataset=str(tmp_path / "a")))
    assert {split: [path.name for path in paths] for split, paths in source.files.items()} == {
        "test": ["old_test.csv", "test.csv"], "train": ["train.csv"]
    }  # fmt: skip
    assert source.notices[0].endswith(
        "/a: all.csv, sub/more.csv names no split, and is not read: rename it, e.g. train_2.csv"
    )
    (tmp_path / "a" / "train.csv").unlink()
    source = find_source(DataSettings(dataset=str(tmp_path / "a")))
    assert [path.name for path in source.files["train"]] == ["all.csv"]
    assert source.notices[0].endswith("/a: all.csv names no split: used as training data")
    write_table(table(), tmp_path / "a" / "train_test.csv")
    with pytest.raises(
        UserError, match=r"train_test\.csv holds the words of several splits \(train, test\): rename it"
    ):
        find_source(DataSettings(dataset=str(tmp_path / "a")))


def test_a_folder_of_save_to_disk_is_read(tmp_path):
    parts = {split: hf.Dataset.from_pandas(table(30, start=100 * number)) for number, split in enumerate(SPLITS, 1)}
    hf.DatasetDict(parts).save_to_disk(tmp_path / "all")
    parts["train"].save_to_disk(tmp_path / "one")
    got = load_in(tmp_path, "all", model=BLOOM)
    assert texts_of(got, "test") == parts["test"]["text"][:]
    assert sum(map(len, load_in(tmp_path, "one", model=BLOOM).splits.values())) == 30


def test_a_test_with_labels_of_minus_one_is_left_out(tmp_path):
    for split, labels in (("train", [0, 1]), ("test", [-1, -1])):
        write_table(table(30).assign(label=labels * 15), tmp_path / "glue" / f"{split}.csv")
    got = load_in(tmp_path, "glue", model=BLOOM)
    assert [len(got.splits[split]) for split in SPLITS] == [21, 3, 6]
    assert got.notices == [f"{tmp_path}/glue/test.csv has no labels in 'label' and is left out"]


# Rows

LINES = [f"item {number} is here,{'np'[number % 2]}" for number in range(12)]
ROWS = [{"text": line.split(",")[0], "label": line.split(",")[1]} for line in LINES]


def rows_of(folder, name, content):
    """Return the good rows and the reasons of the bad ones."""
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    rows = list(read_file(folder / name, None, ("text", "label")).rows)
    return [row for _, row in rows if isinstance(row, dict)], [
        f"{at}: {row}" for at, row in rows if not isinstance(row, dict)
    ]


BODY = "\n".join(LINES)
READ = {
    "sep.csv": "sep=;\ntext;label\n" + BODY.replace(",", ";"),
    "comments.csv": "# exported, 2024\n# by hand\ntext,label\n" + BODY,
    "unnamed.csv": "text,label,,\n" + "".join(f"{line},,\n" for line in LINES),
    "trailing.csv": "text,label\n" + "".join(f"{line},\n" for line in LINES),
    "spaces.csv": "text, label\n" + BODY.replace(",", ", "),
    "quoted_after_spaces.csv": "label,text\n" + "\n".join(f'{row["label"]}, "{row["text"]}"' for row in ROWS),
    "gzip.csv": gzip.compress(("text,label\n" + BODY).encode()),
    "pandas.json": pd.DataFrame(ROWS).to_json(),
    "split.json": pd.DataFrame(ROWS).to_json(orient="split"),
    "index.json": pd.DataFrame(ROWS).to_json(orient="index"),
    "table.json": pd.DataFrame(ROWS).to_json(orient="table", index=False),
    "wrapped.json": json.dumps({"version": 1, "data": ROWS}, indent=1),
    "pretty.jsonl": "\n".join(json.dumps(row, indent=1) for row in ROWS),
    "commas.jsonl": ",\n".join(map(json.dumps, ROWS)),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_other_shapes_of_tables_are_read(tmp_path, name):
    assert rows_of(tmp_path, name, READ[name]) == (ROWS, [])


@pytest.mark.parametrize(("suffix", "separator"), [("csv", ","), ("csv", ";"), ("tsv", "\t")])
@pytest.mark.parametrize("last", ['item 9 is" here', '"item 9 is here', 'item 9 is here"'])
def test_an_open_quote_is_named_by_its_row(tmp_path, separator, last, suffix):
    text = ("text,label\n" + BODY).replace("item 2 is", '"item 2 is').replace("item 9 is here", last)
    found = ""
    try:
        good, bad = rows_of(tmp_path, f"a.{suffix}", text.replace(",", separator))
        found = " ".join(bad)
        assert good == [row for number, row in enumerate(ROWS) if not 2 <= number <= 9]
    except UserError as error:
        found = str(error)
    assert "row 3: an open quote in line 4 has taken in the 7 lines below: write" in found


def test_rows_that_cannot_be_rows_are_named(tmp_path):
    rows = "\n".join(["text,label", *LINES[:5], "text ,label", *LINES[5:]])
    assert rows_of(tmp_path, "a.csv", rows) == (ROWS, ["row 6: it repeats the header"])
    named = "not UTF-8 (byte 0xf0): save it as UTF-8 (in Excel click File > Save As > CSV UTF-8)"
    bad = ("text,label\n" + BODY).encode().replace(b"item 4", b"item \xf0")
    assert rows_of(tmp_path, "a.csv", bad) == (ROWS[:4] + ROWS[5:], [f"row 5: {named}"])
    bad = b'{"text": "\xf0", "label": "n"}\n' + json.dumps(ROWS[0]).encode()
    assert rows_of(tmp_path, "a.jsonl", bad) == (ROWS[:1], [f"line 1: {named}"])


REFUSED = {
    "twice.csv": ("text,label,label\na,b,c\n", r"2 columns are called 'label': rename or remove one"),
    "mysql.csv": (
        'text,label\n"they said \\"a, b\\"\nand left",n\n',
        r"row 1: a quote in a text is written as \\\", as",
    ),
    "excel.csv": (b"PK\x03\x04...", "is an XLSX or ZIP file: in Excel click File > Save As"),
    "lfs.parquet": (
        "version https://git-lfs.github.com/spec/v1\noid",
        "is a pointer of Git LFS, not the data: run git",
    ),
    "page.jsonl": ("<!DOCTYPE html><html>", "is an HTML page, not the data"),
    "lists.json": ('{"a": [{"x": 1}, {"x": 1}], "b": [{"x": 1}, {"x": 1}]}', "its lists a, b hold rows: write each"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_content_that_is_not_what_its_name_says_is_refused(tmp_path, name):
    content, pattern = REFUSED[name]
    with pytest.raises(UserError, match=pattern):
        rows_of(tmp_path, name, content)


# Against a second reader


cells = st.text(st.sampled_from('ab",;\t\n 1é|\\'), min_size=1, max_size=12).map(lambda text: f"x{text}")


@settings(deadline=None, max_examples=150, derandomize=True, database=None)
@given(
    st.lists(st.tuples(cells, st.sampled_from("np")), min_size=1, max_size=6), st.sampled_from(",;\t"), st.booleans()
)
def test_tables_are_read_as_pandas_reads_them(rows, separator, quoted):
    """Rows are equal, or at least one row is named."""
    text = pd.DataFrame(rows, columns=["text", "label"]).to_csv(index=False, sep=separator, quoting=int(quoted))
    with TemporaryDirectory() as folder:
        try:
            got, bad = rows_of(Path(folder), "a.csv", text)
        except UserError:
            return
    if not bad:
        theirs = pd.read_csv(io.StringIO(text), sep=separator, dtype=str, keep_default_na=False)
        assert got == theirs.to_dict("records")
