"""One line says what was read. Copies of training texts and classes without training samples are named."""

import pytest
from support.data_files import (
    BLOOM,
    VIT,
    chats,
    load_instructions,
    rows,
    table,
    write_pets,
    write_rows,
    write_table,
)

from fabric_ladder import UserError
from fabric_ladder.data.load import check_data
from fabric_ladder.settings import DataSettings


def tickets(path):
    topics = ["billing"] * 210 + ["login"] * 120 + ["other"] * 70
    frame = table(400).assign(label=topics).rename(columns={"text": "body", "label": "topic"})
    return write_table(frame, path)


def test_a_table_is_described_in_one_line(tmp_path, load):
    got = load(tickets(tmp_path / "tickets.csv"), text_column="body", label_column="topic")
    assert got.summary == [
        "tickets.csv: 400 rows · text 'body', label 'topic' · billing 210, login 120, other 70 · train 280, validation "
        "40, test 80"
    ]
    assert got.notices == []


def test_a_folder_has_a_line_for_each_split_with_its_files(tmp_path, load):
    for name, size, start in (("train.csv", 30, 100), ("train_2.csv", 10, 200), ("test.csv", 8, 300)):
        write_table(table(size, start), tmp_path / "folder" / name)
    assert load("folder", test_samples=6).summary == [
        "train (train.csv, train_2.csv): 36 rows · text 'text', label 'label' · 0 18, 1 18",
        "validation (split off): 4 rows · text 'text', label 'label' · 0 2, 1 2",
        "test (test.csv): 6 rows · text 'text', label 'label' · 0 4, 1 2",
    ]


def test_other_kinds_of_data_are_described(tmp_path, load, tokenizers):
    assert load("synthetic", train_samples=50).summary == [
        "synthetic: 5,500 rows · negative 2,761, positive 2,739 · train 50, validation 500, test 1,000"
    ]
    frame = table(40).assign(label=["a|b", "a"] * 20)
    got = load(write_table(frame, tmp_path / "m.csv"), problem_type="multi_label_classification")
    assert got.summary == ["m.csv: 40 rows · text 'text', label 'label' · a 40, b 20 · train 28, validation 4, test 8"]
    words = [{"tokens": ["a", f"b{number}"], "ner_tags": ["O", "B-X" if number % 2 else "O"]} for number in range(30)]
    got = load(write_rows(words, tmp_path / "w.jsonl"), task="token-classification")
    assert got.summary == [
        "w.jsonl: 30 sentences · text 'tokens', label 'ner_tags' · O 45, B-X 15 · train 21, validation 3, test 6"
    ]
    assert load_instructions(tmp_path, rows()).summary == ["rows.jsonl: 40 rows · train 28, validation 4, test 8"]
    got = load_instructions(tmp_path, chats(), tokenizer=tokenizers["trained"])
    assert got.summary == ["rows.jsonl: 30 rows · train 21, validation 3, test 6 · 45 turns trained, 55 masked"]


def test_copies_of_training_texts_are_named(tmp_path, load):
    write_table(table(30), tmp_path / "train.csv")
    write_table(table(10, start=20), tmp_path / "test.csv")
    got = load("train.csv", test_file="test.csv", validation_file="train.csv")
    assert got.notices == [
        '30 of 30 validation texts are also training texts (first: "None"): leave them out of one of the two',
        '1 of 10 test texts are also training texts (first: "review 20: bad"): leave them out of one of the two',
    ]


def test_classes_without_training_samples_are_named(tmp_path, load):
    labels = ["often"] * 40 + ["seldom"] * 19 + ["once"]
    frame = table(60).assign(label=labels)
    path = write_table(frame, tmp_path / "a.csv")
    found = {tuple(load(path, split_seed=seed).notices) for seed in (0, 5)}
    assert found == {(), ("1 of 3 classes have no training sample (once): give more rows",)}
    got = load(path, split_seed=1, train_samples=3)
    assert got.notices[-1].endswith("(once): raise --train_samples or give more rows")


def test_a_check_keeps_nothing(tmp_path):
    path = tickets(tmp_path / "tickets.csv")
    with pytest.raises(UserError, match=r"tickets\.csv has no column 'text'"):
        check_data(DataSettings(model=BLOOM, dataset=str(path), cache_dir=str(tmp_path / "no")))
    assert [*tmp_path.iterdir()] == [path]
    write_pets(tmp_path / "pets")
    images = DataSettings(model=VIT, task="image-classification", dataset=str(tmp_path / "pets"))
    line = "pets: 30 rows · cat 10, dog 10, eel 10 · train 21, validation 3, test 6"
    assert check_data(images) == ([line], 21, ["cat", "dog", "eel"])
