"""Labels keep their texts, or are refused or named in one line. A second reader, pandas, must find the same classes."""

import datetime
import re
from collections import Counter

import datasets as hf
import pytest
from support.data_files import write_rows

from fabric_ladder.data.kinds import kind_of
from fabric_ladder.data.labels import check_labels
from fabric_ladder.data.tables import complete_splits, number_labels
from fabric_ladder.errors import UserError
from fabric_ladder.settings import DataSettings


def write_labels(path, labels, rows=40):
    return write_rows([{"text": f"text {row}", "label": labels[row % len(labels)]} for row in range(rows)], path)


@pytest.mark.parametrize(
    ("labels", "names"),
    [(["0101", "01", "1", "0205"], ["01", "0101", "0205", "1"]), (["１", "1", "2"], ["1", "2", "１"]),
     (["10", "9", "2.0"], ["2", "9", "10"]), (["+1", "-1", "0"], ["+1", "-1", "0"]), (["-0", "0"], ["-0", "0"]),
     (["01.10", "02.30"], ["01.10", "02.30"]), (["1.0", "x"], ["1.0", "x"]), (["1" * 19, "2"], ["1" * 19, "2"])],
)  # fmt: skip
def test_only_plain_integers_are_numbers(tmp_path, load, labels, names):
    assert load(write_labels(tmp_path / "a.csv", labels)).class_names == names


LINES = {
    "case": (["Positive", "positive"], r"2 labels look alike and are different classes: 'Positive' \(20\) and 'positi"),
    "invisible": (["good", "good\u200b", "bad"], r"'good' \(14\) and 'good\\u200b' \(13\): write"),
    "two forms of Unicode": (["caf\u00e9", "cafe\u0301"], r"'café' \(20\) and 'cafe\\u0301' \(20\)"),
    "another script": (["cat", "c\u0430t"], r"2 labels look alike .*'cat' \(20\) and 'c\\u0430t' \("),
    "a leading zero": (["01", "1"], r"'01' \(20\) and '1' \(20\)"),
    "one class": (["1", "1.0", "2"], r"2 labels are one class: '1' \(14\) and '1.0' \(13\)"),
    "missing": (["NaN", "1", "2"], r"14 of 40 labels \('NaN'\) are kept as classes: if they mean no label"),
    "semicolons": (["a;b", "a", "b"], r"14 of 40 labels \('a;b'\) join other labels, .*--problem_type multi_label"),
}  # fmt: skip


@pytest.mark.parametrize("name", LINES)
def test_labels_that_look_wrong_are_named_in_one_line(name):
    labels, pattern = LINES[name]
    (notice,) = check_labels(Counter(labels[row % len(labels)] for row in range(40)), "label")
    assert re.search(pattern, notice)


def test_ordinary_labels_get_no_line():
    for labels in ("and/or either", "none some", "C++ C", "Computers/Hardware Computers/Software"):
        assert check_labels(Counter(labels.split()), "label") == []
    assert check_labels({"Paris, France": 1, "Rome, Italy": 1}, "label") == []


REFUSED = {
    "decimals": (["0.5", "1.0", "nan"], r"column 'label' holds decimal numbers.*--problem_type regression to predict"),
    "dates": (["2024-01-01", "2/1/2024"], r"column 'label' holds dates such as '2024-01-01', not classes: set --label"),
    "printed list": (["['a', 'b']", "c"], r"20 of 40 labels \(\"\['a', 'b'\]\"\) in column 'label' are printed values"),
    "bytes": ([b"good", b"bad"], r"label is \"b'good'\", not a class: write it as text, or set --label_column"),
    "date objects": ([datetime.date(2024, 1, 1)] * 2, r"label is \"2024-01-01\", not a class"),
    "lists": ([["a"], ["b"]], r"not a class: set --problem_type multi_label_classification"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_values_that_are_no_classes_are_refused_in_one_line(tmp_path, load, name):
    labels, pattern = REFUSED[name]
    with pytest.raises(UserError, match=pattern):
        load(write_labels(tmp_path / ("a.csv" if isinstance(labels[0], str) else "a.parquet"), labels))


def test_lists_of_labels_keep_leading_zeros_and_name_other_separators(tmp_path, load):
    got = load(write_labels(tmp_path / "a.csv", ["01|2", "1", "01"]), problem_type="multi_label_classification")
    assert (got.class_names, len(got.notices)) == (["01", "1", "2"], 1)
    got = load(write_labels(tmp_path / "b.csv", ["a;b", "a", "b"]), problem_type="multi_label_classification")
    assert (
        "14 of 40 labels ('a;b') join other labels, and are classes of their own: separate labels by" in got.notices[0]
    )


MULTI, REGRESSION = {"problem_type": "multi_label_classification"}, {"problem_type": "regression"}
BAD_ROWS = [
    (MULTI, {"label": None}, r"no label"),
    (MULTI, {"label": [{}]}, r"label is \[{}\], not a list of labels"),
    (MULTI, {"label": ["0", "1", "0"]}, r"label .*names a label twice: give"),
    (MULTI, {"label": "['b', 'c']"}, r"label .*, a printed list"),
    (MULTI, {"label": "{'b', 'c'}"}, r"label .*, a printed list"),
    (MULTI | {"label_column": "b,c"}, {"b": 0, "c": 2}, r"c is 2, not 0 or 1"),
    (REGRESSION, {"label": None}, r"no label"),
    (REGRESSION, {"label": "3,5"}, r'label is "3,5", not a number'),
    (REGRESSION, {"label": float("inf")}, r"label is Infinity, not a number"),
    (REGRESSION, {"label": datetime.date(2024, 1, 1)}, r"label is .*, not a number"),
    (REGRESSION, {"label": "-2e18"}, r"label is .*, whose square is beyond 32 bits"),
    ({"task": "token-classification"}, {"ner_tags": None}, r"no ner_tags"),
]


@pytest.mark.parametrize(("values", "row", "reason"), BAD_ROWS)
def test_a_row_with_bad_labels_is_refused_with_the_reason(values, row, reason):
    settings = DataSettings(**values)
    _, labels_of = kind_of(settings).reader(settings, {})
    with pytest.raises(ValueError, match=f"^{reason}"):
        labels_of(row)


@pytest.mark.parametrize(
    ("values", "label", "message"),
    [
        (MULTI, ["a"], "all training texts have the same labels"),
        (MULTI, [], "no training text has a label"),
        (REGRESSION, 2, "all training texts have the same label, 2: there is nothing to learn"),
    ],
)
def test_labels_that_teach_nothing_are_refused(tmp_path, load, values, label, message):
    with pytest.raises(UserError, match=message):
        load(write_labels(tmp_path / "a.jsonl", [label]), **values)


def splits_of(labels, seed):
    """Return the splits of a table, and the names of its classes."""
    table = hf.Dataset.from_dict({"text": [f"text {row}" for row in range(len(labels))], "label": labels})
    splits, names = number_labels({"train": table}, "texts")
    return complete_splits(splits, DataSettings(split_seed=seed)), names


def test_a_class_with_two_rows_has_one_in_training():
    """Without an exchange of rows, each of these seeds would leave a class without one."""
    labels = ["often"] * 30 + ["seldom"] * 28 + [f"rare {number // 2}" for number in range(20)]
    for seed in (0, 2):
        splits, names = splits_of(labels, seed)
        assert {split: len(table) for split, table in splits.items()} == {"train": 54, "validation": 8, "test": 16}
        assert len({text for table in splits.values() for text in table["text"]}) == 78
        assert {*splits["train"]["label"][:]} == {*range(len(names))}, seed


def test_a_split_without_an_untrained_class_is_as_it_was():
    """The rows were drawn by the version before rare classes were moved."""
    splits, _ = splits_of(["a"] * 30 + ["b"] * 30, 1)
    assert [int(text.split()[1]) for text in splits["test"]["text"]] == [9, 49, 17, 43, 50, 48, 14, 38, 0, 40, 29, 7]
