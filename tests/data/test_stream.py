"""Streamed training samples: the same ones as without streaming, in an order that nothing but the seed changes."""

import pickle
import weakref
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch
from support.data_files import BLOOM, CHATML, LLAMA, chats, load_in, rows, table, write_rows, write_table
from support.helpers import settings_for
from support.resuming import assert_same, checkpoints, run_here, tensors_of
from transformers import AutoTokenizer

from fabric_ladder import build_dataloaders
from fabric_ladder.data import progress, stream
from fabric_ladder.data.loaders import StreamCollator
from fabric_ladder.data.progress import Progress
from fabric_ladder.data.stream import Stream, StreamSampler, shuffle
from fabric_ladder.errors import UserError
from fabric_ladder.planning.plan import find_samples

COUNT = 50
FILES = {"train.jsonl": 0, "validation.jsonl": 1000, "test.jsonl": 2000}


def write_texts(folder, name="train.jsonl", count=COUNT):
    """Write three tables into a folder; `name` gives the format of the training table."""
    for file, start in FILES.items():
        write_table(table(count if start == 0 else 12, start), folder / (name if start == 0 else file))
    return folder


def load_stream(tmp_path, folder=None, buffer=7, **values):
    return load_in(
        tmp_path, folder or write_texts(tmp_path / "texts"), stream_buffer=buffer, **{"model": BLOOM, **values}
    )


def batches(fabric, datasets, settings, epoch=0, start=0):
    loader = build_dataloaders(fabric, datasets, settings)[0]
    loader.sampler.set_epoch(epoch, start)
    return list(loader)


def assert_equal(mine, theirs):
    assert [batch.samples for batch in mine] == [batch.samples for batch in theirs]
    for one, other in zip(mine, theirs, strict=True):
        for part, same in zip(one.micro_batches, other.micro_batches, strict=True):
            assert part[1:] == same[1:]
            assert part.inputs.keys() == same.inputs.keys()
            assert all(torch.equal(part.inputs[name], same.inputs[name]) for name in part.inputs)


# ----------------------------------------------------------------------------------------------------------------------
# Order
# ----------------------------------------------------------------------------------------------------------------------


def test_the_buffer_never_holds_more_than_its_size_and_yields_each_sample_once():
    held = most = 0

    class Sample:
        def __init__(self, number):
            self.number = number

    def samples():
        for number in range(500):
            sample = Sample(number)
            alive.add(sample)
            yield sample

    alive = weakref.WeakSet()
    found = []
    for sample in shuffle(samples(), 20, np.random.default_rng(0)):
        found.append(sample.number)
        held = len(alive)
        most = max(most, held)
    assert most <= 22, "the buffer, the sample that is yielded, and the one that takes its place"
    assert sorted(found) == list(range(500))
    assert np.mean(np.diff(found) == 1) < 0.2
    again = [sample.number for sample in shuffle(samples(), 20, np.random.default_rng(0))]
    assert again == found


@pytest.mark.parametrize("name", ["train.jsonl", "train.parquet", "train.jsonl.gz", "train.csv"])
def test_a_buffer_of_all_samples_gives_the_batches_of_a_run_without_streaming(tmp_path, fabric, name):
    folder = write_texts(tmp_path / "texts", name)
    settings = settings_for(tmp_path, micro_batch_size=4, max_length=16, class_weights="balanced")
    plain = load_in(tmp_path, folder, model=BLOOM, max_length=16)
    plain_batches = batches(fabric, plain, settings, epoch=1)
    streamed = load_in(tmp_path, folder, model=BLOOM, max_length=16, stream_buffer=COUNT)
    assert streamed.fingerprint != plain.fingerprint
    assert len(build_dataloaders(fabric, streamed, settings)[0]) == len(plain_batches)
    mine = batches(fabric, streamed, settings, epoch=1)
    for batch in (*mine, *plain_batches):
        batch.micro_batches[:] = [part._replace(objective=None) for part in batch.micro_batches]
    assert_equal(mine, plain_batches)


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("kind", ["instructions", "chats"])
def test_instructions_and_chats_are_streamed_too(tmp_path, fabric, tokenizers, kind, packing):
    content = rows(60) if kind == "instructions" else chats(60)
    for name, part in (("train", content[:40]), ("validation", content[40:50]), ("test", content[50:])):
        write_rows(part, tmp_path / "texts" / f"{name}.jsonl")
    options = {"task": "instruction-tuning", "tokenizer": tokenizers["trained"], "model": LLAMA, "max_length": 128}
    settings = settings_for(tmp_path, micro_batch_size=3, packing=packing, **options)
    plain, streamed = (load_in(tmp_path, tmp_path / "texts", **options, **more) for more in ({}, {"stream_buffer": 99}))
    assert_equal(batches(fabric, streamed, settings), batches(fabric, plain, settings))


def test_every_cut_and_every_number_of_ranks_sees_the_same_order_and_a_resumed_run_goes_on_with_it(tmp_path, fabric):
    datasets = load_stream(tmp_path)
    settings = settings_for(tmp_path, micro_batch_size=4)
    whole = batches(fabric, datasets, settings)
    order = [batch.samples for batch in whole]
    assert sorted(chain(*order)) == list(range(COUNT))
    assert order != [batch.samples for batch in batches(fabric, datasets, settings, epoch=1)]
    other = replace(settings, micro_batch_size=None, micro_batch_tokens=64, num_workers=2)
    assert [batch.samples for batch in batches(fabric, datasets, other)] == order
    assert_equal(batches(fabric, datasets, settings, start=2), whole[2:])
    for rank in range(2):
        sampler = StreamSampler(datasets.stream, settings, rank, 2)
        collator = pickle.loads(pickle.dumps(StreamCollator(datasets, settings, rank, 2)))  # as for a worker on a Mac
        shares = [collator[plan] for plan in sampler]
        assert [batch.samples for batch in shares] == order
        assert [sum(part.items for part in batch.micro_batches) for batch in shares] == [8, 8, 8, 1]


def test_a_resumed_run_shows_the_skipping_and_reads_nothing_after_the_last_step(tmp_path, fabric, capsys, monkeypatch):
    monkeypatch.setattr(progress, "QUIET", 0)
    monkeypatch.setattr(progress, "PAUSE", 0)
    datasets = load_stream(tmp_path)
    settings = settings_for(tmp_path)
    capsys.readouterr()
    assert len(batches(fabric, datasets, settings, start=2)) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 32
    assert lines[-1].startswith("Skipping the samples of finished steps: 32 of 32 (100%) samples, ")
    datasets.stream.read = None
    assert batches(fabric, datasets, settings, start=4) == []


def test_several_files_come_in_another_order_in_each_epoch(tmp_path):
    folder = write_texts(tmp_path / "texts")
    write_table(table(30, 100), folder / "train_more.jsonl")
    write_table(table(30, 200), folder / "train_other.parquet")
    found = load_stream(tmp_path, folder, buffer=1).stream
    firsts = {next(found.samples(1, epoch))[0] for epoch in range(20)}
    assert firsts == {0, 50, 80}, "the first row of each file"
    assert sorted(number for number, _ in found.samples(1, 0)) == list(range(110))


# ----------------------------------------------------------------------------------------------------------------------
# Memory
# ----------------------------------------------------------------------------------------------------------------------


def test_no_more_than_the_buffer_and_a_batch_are_in_memory(tmp_path, fabric):
    """The file has 40 times as many rows as the buffer."""
    datasets = load_stream(tmp_path, buffer=50)
    alive = weakref.WeakSet()
    most = 0

    class Row(dict):
        __hash__ = object.__hash__
        __eq__ = object.__eq__

    def read(_):
        nonlocal most
        for number in range(2000):
            row = Row(text=f"text {number}", label=number % 2)
            alive.add(row)
            most = max(most, len(alive))
            yield row

    facts = {"counts": [2000], "class_counts": [1000, 1000]}
    datasets.stream = Stream(read, datasets.stream.encode, facts, buffer=50)
    loader = build_dataloaders(fabric, datasets, settings_for(tmp_path, micro_batch_size=4))[0]
    assert sum(len(batch.samples) for batch in loader) == 2000
    assert most <= 50 + 2 * 16, "the buffer, a batch, and the one that is being collected"


# ----------------------------------------------------------------------------------------------------------------------
# The first pass
# ----------------------------------------------------------------------------------------------------------------------


def test_the_first_pass_counts_classes_and_tokenizes_only_the_first_samples(tmp_path, monkeypatch):
    monkeypatch.setattr(stream, "HEAD", 5)
    folder = write_texts(tmp_path / "texts")
    frame = table(COUNT).assign(label=["b"] * 30 + ["a"] * 19 + ["c"])
    write_table(frame, folder / "train.jsonl")
    for name in ("validation.jsonl", "test.jsonl"):
        write_table(table(12, 100).assign(label="a"), folder / name)
    found = load_stream(tmp_path, folder)
    assert found.class_names == ["a", "b", "c"]
    assert found.stream.class_counts.tolist() == [19, 30, 1]
    assert len(found.stream) == COUNT
    assert len(found.splits["train"]) == 7, "the first five, and the first ones of the two other classes"
    assert found.notices[0] == "Streaming 50 training samples, shuffled in a buffer of 7"
    labels = {number: row["label"] for number, row in found.stream.samples(0, 0)}
    assert [labels[number] for number in (0, 30, 49)] == [1, 0, 2]
    fewer = load_stream(tmp_path, folder, train_samples=40)
    assert fewer.stream.class_counts.tolist() == [10, 30]
    assert max(number for number, _ in fewer.stream.samples(0, 0)) == 39


def test_validation_and_test_are_read_before_the_training_samples(tmp_path):
    folder = write_texts(tmp_path / "texts")
    for name in ("train.jsonl", "validation.jsonl"):
        (folder / name).write_text('{"text": "no label", "label": null}\n' * 3)
    with pytest.raises(UserError, match=r"3 of 3 rows of \S+validation\.jsonl cannot be used"):
        load_stream(tmp_path, folder)


def test_bad_rows_are_refused_before_the_training_or_left_out(tmp_path):
    folder = write_texts(tmp_path / "texts")
    with open(folder / "train.jsonl", "a", encoding="utf-8") as file:
        file.write('{"text": "no label"}\n')
    with pytest.raises(UserError, match=rf"1 of {COUNT + 1} rows of .*train\.jsonl cannot be used \(line {COUNT + 1}:"):
        load_stream(tmp_path, folder)
    found = load_stream(tmp_path, folder, bad_samples="skip")
    assert len(found.stream) == len(list(found.stream.samples(0, 0))) == COUNT


def test_a_batch_whose_prompts_are_all_too_long_has_no_micro_batches(tmp_path, fabric, tokenizers):
    content = rows(40)
    for row in content[:20]:
        row["instruction"] = "very " * 500
    for name in ("train", "validation", "test"):
        write_rows(content, tmp_path / "texts" / f"{name}.jsonl")
    options = {"task": "instruction-tuning", "tokenizer": tokenizers["trained"], "max_length": 100, "model": LLAMA}
    datasets = load_in(tmp_path, tmp_path / "texts", stream_buffer=1, **options)
    found = batches(fabric, datasets, settings_for(tmp_path, batch_size=10, micro_batch_size=5, **options))
    trained = [[part.items > 0 for part in batch.micro_batches] for batch in found]
    assert trained == [[], [], [True, True], [True, True]]
    assert [len(batch.samples) for batch in found] == [10] * 4
    assert [batch.left_out for batch in found] == [{"prompt too long": 10}] * 2 + [{}] * 2


@pytest.mark.parametrize("workers", [0, 1])
def test_a_chat_that_the_template_cannot_write_is_left_out_and_counted(
    tmp_path, fabric, tokenizers, monkeypatch, workers
):
    """Among the first samples it is refused, and after them it must not end the training."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizers["trained"])
    tokenizer.chat_template = "{% if messages|length > 9 %}{{ raise_exception('too many') }}{% endif %}" + CHATML
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    content = chats(20)
    content[15] = {"messages": content[0]["messages"][-2:] * 5}
    for name, part in (("train", content), ("validation", content[:4]), ("test", content[:4])):
        write_rows(part, tmp_path / "texts" / f"{name}.jsonl")
    options = {"task": "instruction-tuning", "tokenizer": str(tmp_path / "tokenizer"), "model": LLAMA}
    with pytest.raises(UserError, match="1 of 28 samples cannot be written by the tokenizer's chat template"):
        load_stream(tmp_path, tmp_path / "texts", **options)
    monkeypatch.setattr(stream, "HEAD", 10)
    datasets = load_stream(tmp_path, tmp_path / "texts", buffer=1, **options)
    settings = settings_for(tmp_path, batch_size=5, micro_batch_size=5, num_workers=workers, **options)
    found = batches(fabric, datasets, settings)
    assert [batch.left_out for batch in found] == [{}, {}, {}, {"refused by the chat template": 1}]
    assert [len(batch.micro_batches[0].inputs["labels"]) for batch in found] == [5, 5, 5, 4]


def test_a_file_that_becomes_shorter_during_the_training_is_named(tmp_path):
    folder = write_texts(tmp_path / "texts")
    found = load_stream(tmp_path, folder)
    write_table(table(20), folder / "train.jsonl")
    with pytest.raises(UserError, match="a training file has changed since the start: only 20 rows are left"):
        list(found.stream.samples(0, 0))


@pytest.mark.parametrize("label", ["new", 7])
def test_a_label_that_appears_during_the_training_is_named(tmp_path, label):
    folder = write_texts(tmp_path / "texts")
    found = load_stream(tmp_path, folder)
    frame = table(COUNT).astype({"label": object})
    frame.loc[20, "label"] = label
    write_table(frame, folder / "train.jsonl")
    line = rf"^a training file has changed since the start: .*train\.jsonl, line 21 has the new label '{label}'$"
    with pytest.raises(UserError, match=line):
        list(found.stream.samples(0, 0))


def test_a_plan_for_streamed_files_says_that_the_lengths_are_not_known(tmp_path):
    settings = settings_for(tmp_path, dataset=str(write_texts(tmp_path / "texts")), stream_buffer=7, max_length=32)
    samples, (reason,) = find_samples(settings, None)
    assert samples.length == 32
    assert reason.startswith("The lengths of streamed samples are not known: the plan is for --max_length 32; --length")


# ----------------------------------------------------------------------------------------------------------------------
# Refusals
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dataset", "values", "line"),
    [
        ("synthetic", {}, r"--stream_buffer 7 is for files and the Hub, not for synthetic"),
        ("texts/train.jsonl", {}, r"7 splits no data, and \S+ has no validation split: add --validation_file"),
        ("texts/train.jsonl", {"validation_file": "texts/test.jsonl"}, r"has no test split: add --test_file"),
        ("list", {}, r"7: a JSON list such as .*train\.json is read as a whole; write JSON Lines"),
    ],
)
def test_data_that_cannot_be_streamed_are_refused(tmp_path, dataset, values, line):
    write_texts(tmp_path / "texts")
    write_texts(tmp_path / "list", "train.json")
    with pytest.raises(UserError, match=line):
        load_stream(tmp_path, dataset, **values)


@pytest.mark.parametrize(
    ("first", "line"),
    [
        (20, r"same label, '?a'?: there is nothing to learn"),
        (35, r"texts have labels that the training texts lack: \['c'\]"),
    ],
)
def test_a_file_sorted_by_class_of_which_only_the_first_samples_are_used_is_explained(tmp_path, first, line):
    folder = write_texts(tmp_path / "texts")
    for name, size in (("train", (30, 10, 10)), ("validation", (4, 4, 4)), ("test", (4, 4, 4))):
        frame = table(sum(size)).assign(label=list("a" * size[0] + "b" * size[1] + "c" * size[2]))
        write_table(frame, folder / f"{name}.jsonl")
    hint = f"; with --stream_buffer only the first {first} are used: raise --train_samples, or mix the file$"
    with pytest.raises(UserError, match=line + hint):
        load_stream(tmp_path, folder, train_samples=first)


@pytest.mark.parametrize("words", ["--task token-classification", "--problem_type regression"])
def test_tasks_without_streaming_are_refused(tmp_path, words):
    with pytest.raises(UserError, match=r"--stream_buffer 9: only for --task text-classification and instruction-tun"):
        run_here("2_grad_accum", tmp_path, "--stream_buffer", 9, *words.split())


# ----------------------------------------------------------------------------------------------------------------------
# Runs
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_same_samples_bit_by_bit(tmp_path, dropout_model):
    folder = write_texts(tmp_path / "texts", count=60)
    options = ["--model", dropout_model, "--dataset", folder, "--stream_buffer", 10, "--save_every", 3]
    for place, stop in (("undisturbed", None), ("stopped", "Batch 0006/0008")):
        (tmp_path / place).mkdir()
        status, text = run_here("2_grad_accum", tmp_path / place, *options, at=stop)
        assert status == (143 if stop else 0), text
    status, text = run_here("2_grad_accum", tmp_path / "stopped", *options, "--resume", "auto")
    assert status == 0, text
    assert_same(*(tmp_path / place / "runs" / "2_grad_accum" / "1" for place in ("stopped", "undisturbed")))


@pytest.mark.slow
def test_a_batch_of_which_nothing_is_left_takes_no_step_and_the_epoch_counts_its_samples(tmp_path, tokenizers):
    good = rows(16)
    for kind, content in (("good", good), ("more", [*good, *[{**row, "instruction": "very " * 500} for row in good]])):
        for name in ("train", "validation", "test"):
            write_rows(content if name == "train" else good, tmp_path / kind / f"{name}.jsonl")
    options = ["--task", "instruction-tuning", "--model", LLAMA, "--from_scratch", "true", "--save_every", 1]
    options += ["--tokenizer", tokenizers["trained"], "--max_length", 100, "--epochs", 1, "--stream_buffer", 1]
    weights = []
    for kind in ("good", "more"):
        run = ["--dataset", tmp_path / kind, "--runs_dir", tmp_path / f"runs-{kind}"]
        status, text = run_here("2_grad_accum", tmp_path, *options, *run)
        assert status == 0, text
        line = "Epoch: 0001/0001 | 16 training samples left out: prompt too long"
        assert (line in text) == (kind == "more"), text
        tensors = tensors_of(checkpoints(tmp_path / f"runs-{kind}" / "2_grad_accum" / "1")[-1])
        weights.append({name: tensor for name, tensor in tensors.items() if name.startswith("model.")})
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


# ----------------------------------------------------------------------------------------------------------------------
# Progress
# ----------------------------------------------------------------------------------------------------------------------


def test_reading_and_tokenizing_print_lines_only_if_they_take_long(tmp_path, load, capsys, monkeypatch):
    path = write_table(table(), tmp_path / "texts.jsonl")
    load(path)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "QUIET", 0)
    load(path, max_length=9)
    printed = capsys.readouterr().err.splitlines()
    assert printed[0].startswith(f"Reading {path}: 1 samples, ")
    assert any(line.startswith("Tokenizing: 42 of 42 (100%) samples, ") for line in printed), printed
    monkeypatch.setattr(progress, "PAUSE", 0)
    with Progress("Reading") as shown:
        assert list(shown.count("abc")) == ["a", "b", "c"]
    assert len(capsys.readouterr().err.splitlines()) == shown.done == 3
