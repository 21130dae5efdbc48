"""Runs that differ are refused with the name of the setting. Settings of the compared techniques may differ."""

import dataclasses
from itertools import combinations

import pytest
from support.recorded_runs import BLOG, HARDWARE, LOG, OWN, compare, record, script, write_run

from fabric_ladder import UserError, cli, parse_settings
from fabric_ladder.comparing.logs import LoggedRun
from fabric_ladder.comparing.matching import IGNORED, TECHNIQUE, find_differences, make_rows
from fabric_ladder.comparing.sources import read_sources
from fabric_ladder.comparing.table import to_markdown
from fabric_ladder.errors import Checked

DIFFERENCES = {
    "data": ({"data": {"fingerprint": "xyz", "train_samples": 100}}, {"max_length": 64}, "data (max_length 1024 / 64)"),
    "content": ({"data": {"fingerprint": "xyz", "train_samples": 100}}, {}, "data (another content)"),
    "seed": ({}, {"seed": 5}, "seed 123 / 5"),
    "model": ({}, {"model": "bert-base-uncased"}, "model bloom-560m / bert-base-uncased"),
    "epochs": ({}, {"epochs": 3}, "epochs 1 / 3"),
    "rate": ({}, {"learning_rate": 1e-3}, "learning_rate 5e-05 / 0.001"),
    "gpu": ({"resumed": [record() | {"hardware": HARDWARE | {"gpu": "NVIDIA T4"}}]}, {},
            "gpu NVIDIA A100 / NVIDIA A100, then NVIDIA T4"),
    "device": ({"hardware": HARDWARE | {"device": "cpu"}}, {}, "device cuda / cpu"),
    "versions": ({"versions": {"torch": "2.11.0"}}, {}, "torch 2.13.0 / 2.11.0"),
    "new setting": ({}, {"of_a_later_version": 1}, None),
}  # fmt: skip


@pytest.mark.parametrize("kind", DIFFERENCES)
def test_each_difference_is_refused_by_name(tmp_path, monkeypatch, kind):
    more, settings, phrase = DIFFERENCES[kind]
    first = write_run(tmp_path, record(**({"of_a_later_version": 0} if phrase is None else {})))
    second = write_run(tmp_path, record("3_torch_compile", compile=True, **settings) | more)
    phrase = phrase or "of_a_later_version 0 / 1"
    with pytest.raises(UserError) as refused:
        script(monkeypatch, first, second, "--markdown", tmp_path / "out.md")
    assert str(refused.value) == (f"these runs differ in more than their technique: {phrase}; --anyway compares them")
    assert not (tmp_path / "out.md").exists()
    comparison = compare(read_sources([first, second]))
    assert comparison.differences == [phrase]
    escaped = phrase.replace("_", "\\_")
    first_line = to_markdown(comparison).splitlines()[0]
    assert first_line == f"**Not comparable without care: these runs differ in {escaped}.**"


def test_a_resumed_run_counts_with_the_devices_of_its_newest_start(tmp_path):
    (run,) = read_sources([write_run(tmp_path, record() | {"resumed": [record() | {"ranks": 2}]})])
    assert run.settings["ranks"] == 2


def test_runs_that_differ_only_in_techniques_are_compared(tmp_path):
    sources = [
        write_run(tmp_path, record()),
        write_run(tmp_path, record("6_lean_optimizer", optimizer="sgd", learning_rate=0.01, schedule="cosine")),
        write_run(tmp_path, record("13_lora", lora=True, learning_rate=2e-4, lora_rank=16, precision="bf16-true")),
        write_run(tmp_path, record("8_init_on_device")),
        write_run(tmp_path, record("9_ddp", devices=4) | {"ranks": 4}),
        write_run(tmp_path, record(), 2),
    ]
    comparison = compare(read_sources(sources))
    assert comparison.differences == []
    assert [row.changed for row in comparison.rows] == [
        "reference",
        "optimizer sgd; learning_rate 0.01; schedule cosine",
        "lora true; learning_rate 0.0002; precision bf16-true; lora_rank 16",
        "only the script",
        "ranks 4",
        "no technique",
    ]
    assert ("learning_rate", ["5e-05", "0.01", "0.0002", "5e-05", "5e-05", "5e-05"]) in comparison.settings


def test_rungs_set_only_techniques():
    assert all(set(defaults) <= {*IGNORED, *TECHNIQUE} for defaults in OWN.values())


def settings_of(rung, config, *options):
    """Return the settings of a rung as stored in its run.json."""
    with pytest.raises(Checked) as checked:
        parse_settings(["--config", config, "--check_only", "true", "--accelerator", "cpu", *options], **OWN[rung])
    settings = dataclasses.asdict(checked.value.settings)
    return {name: value for name, value in settings.items() if name != "notices"} | {"name": rung}


def logged(settings):
    facts = {"versions": {"torch": "2.13.0"}, "hardware": HARDWARE, "data": "abc"}
    return LoggedRun(settings["name"], settings["name"], settings | {"ranks": 1}, **facts)


def test_all_pairs_of_rungs_on_one_config_are_compared(monkeypatch):
    monkeypatch.setattr(cli, "check_start", lambda settings: [])
    monkeypatch.setattr(cli, "check", lambda settings: None)  # two rungs need a GPU
    runs = [logged(settings_of(rung, "quickstart.yaml")) for rung in OWN]
    assert find_differences(make_rows(runs), OWN) == []
    for first, second in combinations(runs, 2):
        rows = make_rows([first, second])
        assert find_differences(rows, OWN) == []
        assert rows[1].changed not in ("", "unknown")
    first = {row.label: row.changed for row in make_rows(runs)}
    assert first["2_grad_accum"] == "batch_size 16"
    changed = {"batch_size 16", "micro_batch_size null", "micro_batch_tokens 1024", "optimizer sgd"}
    changed |= {"precision bf16-true", "learning_rate 0.01", "schedule cosine"}
    assert set(first["6_lean_optimizer"].split("; ")) == changed


@pytest.mark.parametrize(
    ("first", "second", "phrases"),
    [
        (["2_grad_accum", "--batch_size", "32"], ["3_torch_compile"], []),
        (["5_low_precision"], ["6_lean_optimizer", "--schedule", "linear"], ["schedule constant / linear"]),
        (["5_low_precision"], ["6_lean_optimizer", "--learning_rate", "0.5"], ["learning_rate 0.001 / 0.5"]),
        (["13_lora", "--learning_rate", "0.5"], ["14_qlora"], ["learning_rate 0.5 / 0.002"]),
        (["4_mixed_precision"], ["4_mixed_precision", "--optimizer", "adafactor"], []),
    ],
)
def test_a_rungs_defaults_are_its_technique_but_the_users_settings_are_differences(first, second, phrases, monkeypatch):
    monkeypatch.setattr(cli, "check_start", lambda settings: [])
    monkeypatch.setattr(cli, "check", lambda settings: None)
    runs = [logged(settings_of(rung, "quickstart.yaml", *options)) for rung, *options in (first, second)]
    assert find_differences(make_rows(runs), OWN) == phrases


def test_another_effective_batch_is_named_and_warned_about(tmp_path, monkeypatch):
    write_run(tmp_path, record())
    write_run(tmp_path, record(batch_size=32), 2)
    printed = " ".join(script(monkeypatch, tmp_path).split())
    assert "batch_size 32" in printed
    assert "Warning: the effective batch differs by option (batch_size 16 / 32), and so does" in printed
    first = write_run(tmp_path, record("1_batch_size_1", batch_size=1))
    notices = compare(read_sources([first, str(tmp_path / "2_grad_accum" / "1")])).notices
    assert not any("effective batch" in notice for notice in notices)  # only the rungs' own defaults differ


def test_ranks_that_share_the_threads_are_the_same_hardware(tmp_path):
    on_cpu = HARDWARE | {"device": "cpu"}
    alone = write_run(tmp_path, record("4_mixed_precision") | {"hardware": on_cpu})
    shared = write_run(tmp_path, record("9_ddp") | {"ranks": 2, "hardware": on_cpu | {"threads": 4}})
    fewer = write_run(tmp_path, record("5_low_precision") | {"hardware": on_cpu | {"threads": 4}})
    assert compare(read_sources([alone, shared])).differences == []
    assert compare(read_sources([alone, fewer])).differences == ["threads 8 / 4"]


def test_a_shipped_config_in_two_installations_is_the_same_model(tmp_path):
    first = write_run(tmp_path, record(model="/a/configs/models/bloom.json"))
    same = write_run(tmp_path, record("3_torch_compile", model="/b/c/configs/models/bloom.json"))
    other = write_run(tmp_path, record("4_mixed_precision", model="runs/2_grad_accum/1/model"))
    third = write_run(tmp_path, record("5_low_precision", model="runs/1_batch_size_1/1/model"))
    assert compare(read_sources([first, same])).differences == []
    assert len(compare(read_sources([other, third])).differences) == 1


def test_a_record_of_an_earlier_version_joins_the_row_of_its_seeds(tmp_path):
    earlier, later = record(seed=1), record(seed=2)
    later["hardware"]["a new fact"] = "AVX2"
    for number, each in enumerate((earlier, later)):
        write_run(tmp_path, each, number)
    (row,) = compare(read_sources([str(tmp_path)])).rows
    assert sorted(row.seeds) == ["1", "2"]


def test_seeds_of_the_same_settings_are_one_row(tmp_path):
    for number, (seed, accuracy, minutes) in enumerate([(1, 0.90, 2.0), (2, 0.92, 2.2), (3, 0.91, 2.4)], start=1):
        write_run(tmp_path, record(seed=seed, accuracy=accuracy, minutes=minutes), number)
        write_run(tmp_path, record("3_torch_compile", seed=seed, accuracy=0.9, minutes=1.1, compile=True), number)
    comparison = compare(read_sources([str(tmp_path)]))
    assert (len(comparison.rows), comparison.differences) == (2, [])
    assert comparison.rows[0].spread("minutes") == pytest.approx(0.2)
    text = to_markdown(comparison)
    assert "mean of seeds 1 to 3 (n = 3)" in text
    assert "91.00 ± 1.00 %" in text  # n - 1 in the denominator
    assert "1.10 ± 0.00 min (0.50 x)" in text
    again = write_run(tmp_path / "again", record(seed=1))
    assert len(make_rows(read_sources([str(tmp_path / "2_grad_accum"), again]))) == 2  # each seed counts once


@pytest.mark.parametrize(
    ("rate", "ending"),
    [(20.0, " after 77 batches of 16 samples, against 2_grad_accum."),
     (11.4, ": a batch takes as long as with 2_grad_accum.")],
)  # fmt: skip
def test_compile_time_is_compared_with_the_time_that_it_saves(tmp_path, rate, ending):
    """16 samples take 16 / 11.4 s without torch.compile and 16 / 20 s with it."""
    compiled = record("3_torch_compile", compile=True)
    compiled["results"] |= {"compile_seconds": 46.3, "compiled_graphs": 3, "samples_per_second": rate}
    plain, other = write_run(tmp_path, record()), write_run(tmp_path, compiled)
    for order in ([plain, other], [other, plain]):
        notices = compare(read_sources(order)).notices
        never = "never " if rate == 11.4 else ""
        assert f"3_torch_compile: compiling took 46 s, {never}paid for{ending}" in notices
    single = write_run(tmp_path, record("1_batch_size_1", batch_size=1, micro_batch_size=1))
    notices = compare(read_sources([single, plain, other])).notices
    assert f"3_torch_compile: compiling took 46 s, {never}paid for{ending}" in notices, "not against batch size 1"


def test_facts_that_a_log_lacks_are_not_refused(tmp_path):
    run = write_run(tmp_path, record())
    comparison = compare(read_sources([run, str(BLOG / "compile.txt")]))
    assert comparison.differences == []
    assert any("or the learning rate: compile. The comparison assumes" in notice for notice in comparison.notices)
    log = tmp_path / "other.txt"
    log.write_text(LOG)
    found = {"device cuda / cpu", "model bloom-560m / bloom-quickstart.json", "dataset imdb / synthetic"}
    assert found <= {*compare(read_sources([run, str(log)])).differences}


def test_other_numbers_of_training_samples_are_named(tmp_path):
    """The posts trained on 35,000 reviews: the log of batch size 1 has that many batches."""
    run, post = write_run(tmp_path, record()), str(BLOG / "batch_size_1.txt")
    notices = compare(read_sources([run, post])).notices
    numbers = "2_grad_accum 100, batch_size_1 at least 35,000"
    assert f"Warning: the runs have other numbers of training samples: {numbers}." in notices
