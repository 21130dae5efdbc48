"""scripts/compare_runs.py: logs are read as they stand or not at all, and unlike runs are refused."""

import contextlib
import csv
import dataclasses
import io
import json
import os
import random
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from lightning import Fabric
from scipy.stats import binomtest
from support.helpers import ROOT, run_script, settings_for, tiny_model, token_datasets

from fabric_ladder import Run, UserError, build_dataloaders, build_optimizer, evaluate, train
from fabric_ladder.comparing.charts import smooth, to_png, wilson_interval
from fabric_ladder.comparing.logs import LogParser
from fabric_ladder.comparing.matching import IGNORED, TECHNIQUE, make_rows
from fabric_ladder.comparing.page import to_html
from fabric_ladder.comparing.sources import read_sources
from fabric_ladder.comparing.table import compare, to_csv, to_json, to_markdown
from fabric_ladder.runs.report import title

SCRIPT = ROOT / "scripts" / "compare_runs.py"
BLOG = ROOT / "tests" / "support" / "fixtures" / "blog"
LOG = re.search(r"```\n(Python 3.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL).group(1)
LANGUAGE_LOG = """\
Python 3.11.7 · torch 2.13.0+cpu · lightning 2.6.6
13_lora · belle · bloomz-7b1-mt · seed 7 · batch 64 = 4 x 4 x 4 · bf16-mixed · cuda: 4 x NVIDIA A100-SXM4-80GB
Torch CUDA available? True
Parameters: 22.8 M, 0.074 M trainable (0.33%), torch.bfloat16, torch.float32
Epoch: 0001/0002 | Batch 0005/0005 | Samples 00020/00020 | Loss: 6.9242
Epoch: 0001/0002 | Train acc.: 0.20% | Val acc.: 0.30% | Val perplexity: 705.28
Epoch: 0002/0002 | Batch 0005/0005 | Samples 00020/00020 | Loss: 6.3696
Epoch: 0002/0002 | Train acc.: 3.05% | Val acc.: 5.91% | Val perplexity: 413.37
Time elapsed 0.21 min
Compile time 0.05 min of it, 3 graphs
Throughput 173.3 samples/s, 13631 tokens/s, padding 21.9%
Memory used: 0.60 GB
Memory predicted: 0.55 GB, measured +0.05 GB (+8.3%)
Host memory used: 0.61 GB, loading included
Saved runs/13_lora/1/adapter
Test accuracy 4.00%
Test loss 6.0102 per trained token, perplexity 407.56
"""
HARDWARE = {"device": "cuda", "processor": "AMD EPYC", "cores": 16, "threads": 8, "gpu": "NVIDIA A100"}


def record(name="2_grad_accum", accuracy=0.9, minutes=2.0, memory=8e9, **settings):
    """run.json as `Run` writes it."""
    values = {**dataclasses.asdict(settings_for(Path("/x"))), "micro_batch_size": 1, "accelerator": "cuda"}
    values |= {"name": name, "model": "bigscience/bloom-560m", "seed": 123} | settings
    values.pop("notices")
    return {
        "format": 1,
        "status": "finished",
        "settings": values,
        "versions": {"Python": "3.11.7", "torch": "2.13.0", "transformers": "5.23.0"},
        "hardware": dict(HARDWARE),
        "ranks": 1,
        "data": {"fingerprint": "abc", "train_samples": 100},
        "results": {
            "epochs": [{"train_accuracy": 0.7, "validation_accuracy": 0.8, "validation_loss": 0.5}],
            "parameters": 559_214_592,
            "trainable_parameters": 559_214_592,
            "elapsed_seconds": minutes * 60,
            "samples_per_second": 11.4,
            "tokens_per_second": 3502.0,
            "padding": 0.01,
            "peak_memory_bytes": int(memory),
            "peak_host_memory_bytes": 10**9,
            "test_accuracy": accuracy,
            "test_loss": 0.25,
            "test_samples": 1000,
        },
    }


def write_run(root, content, number=1):
    folder = root / content["settings"]["name"] / str(number)
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(content))
    rows = [f"1,{5e-5},{0.7 - 0.004 * seen + 0.05 * (seen % 3)},{seen},{seen / 10},{seen}" for seen in range(5, 101, 5)]
    rows.append("1,,,100,11,100")
    (folder / "metrics.csv").write_text("\n".join(["epoch,learning_rate,loss,samples,seconds,step", *rows]) + "\n")
    return str(folder)


def parse(text, name="log"):
    return LogParser("log", name).parse(text)


def script(monkeypatch, *args):
    """Run the script in this process; return what it printed."""
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, args)])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return printed.getvalue()


# Reading


@pytest.mark.parametrize(
    ("name", "minutes", "accuracy"),
    [("batch_size_1", 69.97, 78.53), ("gradient_accumulation", 51.37, 87.37), ("compile", 43.33, 87.91)],
)
def test_the_blogs_output_is_read_as_printed(name, minutes, accuracy):
    [run] = read_sources([str(BLOG / f"{name}.txt")]).runs
    assert (run.name, run.unfinished, run.ours) == (name, None, False)
    expected = {"minutes": minutes, "test_accuracy": accuracy}
    if name == "gradient_accumulation":
        expected |= {"train_accuracy": 78.67, "validation_accuracy": 87.28}
    assert run.figures == expected
    assert [(point.loss, point.samples) for point in run.losses] == [(1.9902, None)] * (name == "batch_size_1")


def test_a_file_of_several_scripts_under_headings():
    found = read_sources([str(BLOG / "memory_series.txt")])
    keys = ("minutes", "memory", "train_accuracy", "validation_accuracy", "test_accuracy")
    assert {run.name: tuple(run.figures.get(key) for key in keys) for run in found.runs} == {
        "01_pytorch-vit": (17.94, 26.79, 94.44, 96.00, 95.85),
        "01-2_pytorch-fabric": (17.88, 26.84, 94.44, 96.06, 96.06),
        "02_mixed-precision": (3.45, 18.21, 94.56, 96.02, 95.71),
        "03_bfloat16": (2.88, 13.82, 95.62, 96.94, 96.92),
        "04_lower-batchsize": (3.96, 5.69, 95.21, 97.20, 97.34),
        "05_gradient-accum": (12.91, 3.91, 95.46, 97.24, 97.27),
        "08 FSDP ADAM": (5.53, 6.59, 94.74, 97.28, 97.13),
        "bonus: distilbert before": (None, 3.99, 90.55, 92.99, 92.95),
    }
    assert found.runs[0].versions == {"torch": "2.1.0.dev20230623+cu118", "lightning": "2.1.0.dev0"}
    assert [point.loss for point in found.runs[0].losses] == [2.4105, 0.0640, 0.0680]
    assert found.notices[0].endswith("8 lines are skipped, being no whole line of a log or out of place.")
    assert "divided by the number that is accumulated" in found.notices[1]


def quoted(pattern):
    """A figure of the README's log that another machine or day would print differently."""
    return float(re.search(pattern, LOG)[1])


def test_a_log_of_ours_is_read_in_full():
    [run] = parse(LOG)
    assert run.ours
    assert (run.name, run.hardware) == ("2_grad_accum", {"device": "cpu", "processor": "AMD EPYC"})
    assert run.versions["torch"] == "2.13.0+cpu"
    assert run.versions["Python"] == "3.11.7"
    expected = {"dataset": "synthetic", "model": "bloom-quickstart.json", "seed": 123, "batch_size": 16, "epochs": 1}
    expected |= {"micro_batch_size": 1, "micro_batch_tokens": None, "precision": "32-true", "packing": False}
    assert run.settings == expected | {"ranks": 1, "matmul_precision": "highest"}
    assert [(point.samples, point.loss) for point in run.losses[-2:]] == [(3840, 0.2512), (4000, 0.1438)]
    expected = {
        "minutes": quoted("Time elapsed (.*) min"),
        "samples_per_second": quoted("Throughput (.*?) samples/s"),
        "tokens_per_second": quoted(r"(\d+) tokens/s"),
        "memory": quoted("Memory used: (.*) GB"),
        "host_memory": quoted("Host memory used: (.*?) GB"),
    }
    expected |= {"padding": 7.6, "train_accuracy": 79.07, "validation_accuracy": 91.6}
    assert run.figures == expected | {"test_accuracy": 92.7, "parameters": 0.2, "trainable_parameters": 0.2}


def test_a_language_models_log():
    [run] = parse(LANGUAGE_LOG)
    assert (run.settings["ranks"], run.settings["micro_batch_size"], run.settings["epochs"]) == (4, 4, 2)
    assert run.hardware == {"device": "cuda", "gpu": "NVIDIA A100-SXM4-80GB"}
    assert [(point.samples, point.epochs) for point in run.losses] == [(20, 1.0), (40, 2.0)]
    expected = {"test_loss": 6.0102, "test_perplexity": 407.56, "validation_perplexity": 413.37, "compiled_graphs": 3}
    expected |= {"trainable_parameters": 0.074, "compile_minutes": 0.05, "predicted_memory": 0.55}
    assert run.figures.items() >= expected.items()


def test_a_real_run_says_the_same_in_its_folder_and_in_its_log(tmp_path, monkeypatch):
    settings = settings_for(tmp_path, task="instruction-tuning", model="gpt2", micro_batch_tokens=64)
    run = Run(Fabric(accelerator="cpu", devices=1), settings)
    loaders = build_dataloaders(run.fabric, token_datasets(per_token=True), settings)
    model = run.fabric.setup(tiny_model("gpt2-lm"))
    optimizer = run.fabric.setup_optimizers(build_optimizer(settings, model))
    train(run, model, optimizer, *loaders[:2])
    evaluate(run, model, loaders[2])
    [of_folder] = read_sources([str(run.folder)]).runs
    [of_log] = read_sources([str(run.folder / "log.txt")]).runs
    assert of_log.figures.keys() == of_folder.figures.keys()
    for name, value in of_log.figures.items():
        assert value == pytest.approx(of_folder.figures[name], rel=5e-3, abs=0.06), name
    shared = of_log.settings.keys() - {"name"}
    assert {name: of_folder.settings[name] for name in shared} == {name: of_log.settings[name] for name in shared}
    assert of_log.versions.items() <= of_folder.versions.items()
    assert of_log.hardware.items() <= of_folder.hardware.items()
    for one, other in zip(of_log.losses, of_folder.losses, strict=True):
        assert (one.epochs, one.samples) == (other.epochs, other.samples)
        assert one.loss == pytest.approx(other.loss, abs=6e-5)
    moved = tmp_path / "moved.txt"
    shutil.copy(run.folder / "log.txt", moved)
    printed = script(monkeypatch, run.folder, moved)  # nothing known differs
    assert "learning rate" in printed
    assert "perplexity" in printed


@pytest.mark.parametrize(
    "line",
    [
        "Epoch: 0001/0001 | Batch 24000/35000 | Loss: 1.99",
        "Epoch: 0001/0001 | Batch 24000/350",
        "Epoch: 0001/0001 | Batch 36000/35000 | Loss: 1.9902",
        "poch: 0001/0001 | Batch 24000/35000 | Loss: 1.9902",
        "Epoch: 0002/0001 | Batch 24000/35000 | Loss: 1.9902",
        "Epoch: 0001/0001 | Batch 0030/0250 | Samples 04800/04000 | Loss: 0.6964",
        "Time elapsed 69.9",
        "Time elapsed 69.97 mi",
        "Total Training Time: 69.97 min",
        "Total training time: 0.71 min",
        "GPU Memory used: 1.24 GB",
        "Memory used: 26.79 MB",
        "Test accuracy 78.5%",
        "Test accuracy 178.53%",
        "Test accuracy 78.53% of 10",
        "Best Test accuracy 78.53%",
    ],
)
def test_a_line_that_is_not_whole_is_skipped_and_counted(line):
    parser = LogParser("log", "log")
    [run] = parser.parse(f"Memory used: 1.00 GB\n{line}\n> Test accuracy 50.00%\nTest accuracy 60.00%\n")
    assert run.figures == {"memory": 1.0, "test_accuracy": 60.0}
    assert (parser.skipped, run.losses) == (2, [])


def test_lines_out_of_place_are_skipped():
    lines = LOG.splitlines()
    loss = next(line for line in lines if "Samples 00960" in line)
    for place in (4, 9, len(lines)):  # before the first loss, after later ones, after the end
        parser = LogParser("log", "log")
        [run] = parser.parse("\n".join([*[x for x in lines[:place] if x != loss], loss, loss, *lines[place:]]))
        seen = [point.samples for point in run.losses]
        assert seen == sorted(set(seen))
        assert parser.skipped >= 2  # and the line of three dots
        assert run.figures["test_accuracy"] == 92.7


def test_runs_below_each_other_without_headings():
    runs = parse("".join((BLOG / f"{name}.txt").read_text() for name in ("gradient_accumulation", "compile")) + LOG * 2)
    assert [run.figures["minutes"] for run in runs] == [51.37, 43.33, *[quoted("Time elapsed (.*) min")] * 2]
    assert [run.figures.get("train_accuracy") for run in runs] == [78.67, None, 79.07, 79.07]


def mutate(text, rng):
    """Damage a log as copying does, or worse."""
    lines = text.splitlines()
    for _ in range(rng.randint(1, 8)):
        at = rng.randrange(len(lines))
        match rng.randrange(9):
            case 0:
                del lines[at]
            case 1:
                lines.insert(rng.randrange(len(lines)), lines[at])
            case 2:
                lines[at] = lines[at][: rng.randrange(len(lines[at]) + 1)]
            case 3:
                lines[at] = lines[at][rng.randrange(len(lines[at]) + 1) :]
            case 4:
                lines[at] += lines[rng.randrange(len(lines))]
            case 5:
                rng.shuffle(lines)
            case 6:
                place = rng.randrange(len(lines[at]) + 1)
                lines[at] = lines[at][:place] + rng.choice("0 9|:.%\x00\u202eé\x1b[31m\r#·") + lines[at][place:]
            case 7:
                lines[at] = lines[at].replace(rng.choice("0123456789 |:"), rng.choice("0123456789 "), 1)
            case 8:
                lines.insert(
                    at, rng.choice(["# title", "Loss: 1.0", "100%|███| 3/3", "Traceback (most recent call last):"])
                )
        lines = lines or [""]
    return "\n".join(lines)


PRINTED = {
    "minutes": "Time elapsed:? {:.2f} min",
    "memory": r"Memory used: {:.2f} GB",
    "predicted_memory": r"Memory predicted: {:.2f} GB",
    "host_memory": r"Host memory used: {:.2f} GB",
    "test_accuracy": r"Test accuracy:? {:.2f}%",
    "train_accuracy": r"Train acc\.: {:.2f}%",
    "validation_accuracy": r"Val acc\.: {:.2f}%",
    "samples_per_second": "Throughput {:.1f} samples/s",
    "tokens_per_second": "/s, {:.0f} tokens/s",
    "test_loss": "Test loss {:.4f} per",
    "test_perplexity": "perplexity {:.2f}",
    "validation_perplexity": "Val perplexity: {:.2f}",
}


def test_a_thousand_damaged_logs(tmp_path):
    rng = random.Random(0)
    blog = [path.read_text() for path in sorted(BLOG.glob("*.txt"))]
    path, kept = tmp_path / "log.txt", 0
    for number in range(1000):
        text = mutate(rng.choice([LOG, LANGUAGE_LOG, *blog]), rng)
        path.write_text(text, encoding="utf-8", newline="")
        try:
            found = read_sources([str(path)])
            comparison = compare(found)
        except UserError:
            continue
        kept += 1
        plain = " ".join(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).split())
        plain = re.sub(r" ?\| ?", " | ", plain)
        numbers = set(re.findall(r"\d+", plain))
        for run in found.runs:
            for name, value in run.figures.items():
                pattern = PRINTED.get(name, r"\b{:g}").format(value)
                assert re.search(pattern, plain), (number, name, value)
            for point in run.losses:
                assert f"Loss: {point.loss:.4f}" in plain, (number, point)
            for name in ("seed", "batch_size", "epochs"):
                assert run.settings.get(name) is None or any(int(x) == run.settings[name] for x in numbers)
        if number % 50 == 0:
            json.loads(to_json(comparison))
            assert all(map(str, (to_markdown(comparison), to_csv(comparison), to_html(comparison))))
    assert kept > 500


@pytest.mark.parametrize("text", [LOG, LANGUAGE_LOG, (BLOG / "gradient_accumulation.txt").read_text()])
def test_cut_and_shuffled_lines_give_no_figure_that_was_not_printed(text):
    rng, [whole] = random.Random(1), parse(text)
    for _ in range(300):
        lines = [line[: rng.choice([len(line), len(line), rng.randrange(len(line) + 1)])] for line in text.splitlines()]
        if rng.random() < 0.3:
            rng.shuffle(lines)
        for run in parse("\n".join(line for line in lines if rng.random() < 0.9)):
            for name, value in run.figures.items():
                earlier = ("train_accuracy", "validation_accuracy", "validation_perplexity")
                assert value == whole.figures[name] or (name in earlier and f"{value:.2f}" in text)
            assert all(point in whole.losses for point in run.losses)


def test_broken_run_folders_are_named_and_left_out(tmp_path):
    write_run(tmp_path, record())
    cases = {
        "running": record() | {"status": "running"},
        "newer": record() | {"format": 2},
        "empty": {},
        "list": [],
        "no data": {key: value for key, value in record().items() if key != "data"},
        "text": record() | {"results": "none"},
        "figure": record() | {"results": record()["results"] | {"elapsed_seconds": "long"}},
        "no epoch": record() | {"results": record()["results"] | {"epochs": []}},
        "versions": record() | {"versions": [1]},
    }
    for name, content in cases.items():
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "1" / "run.json").write_text(json.dumps(content))
    (tmp_path / "cut" / "1").mkdir(parents=True)
    (tmp_path / "cut" / "1" / "run.json").write_text('{"format": 1, "sta')
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "log.txt").write_text("a log of something else\n")
    comparison = compare(read_sources([str(tmp_path)]))
    assert [row.label for row in comparison.rows] == ["2_grad_accum"]
    left_out = [notice for notice in comparison.notices if notice.startswith("Left out:")]
    assert len(left_out) == len(cases) + 1
    assert any("'running'" in notice for notice in left_out)
    assert any("other" in notice and "left out" in notice for notice in comparison.notices)
    with pytest.raises(UserError, match="no finished run"):
        read_sources([str(tmp_path / "running")])


# Matching


DIFFERENCES = {
    "data": ({"data": {"fingerprint": "xyz", "train_samples": 100}}, {"max_length": 64}, "data (max_length 1024 / 64)"),
    "content": ({"data": {"fingerprint": "xyz", "train_samples": 100}}, {}, "data (another content)"),
    "seed": ({}, {"seed": 5}, "seed 123 / 5"),
    "model": ({}, {"model": "bert-base-uncased"}, "model bloom-560m / bert-base-uncased"),
    "task": ({}, {"task": "instruction-tuning"}, "task text-classification / instruction-tuning"),
    "epochs": ({}, {"epochs": 3}, "epochs 1 / 3"),
    "batch": ({}, {"batch_size": 32}, "batch_size 16 / 32"),
    "rate": ({}, {"learning_rate": 1e-3}, "learning_rate 5e-05 / 0.001"),
    "schedule": ({}, {"schedule": "linear"}, "schedule constant / linear"),
    "warmup": ({}, {"warmup_steps": 9}, "warmup_steps 0 / 9"),
    "clipping": ({}, {"max_grad_norm": 1.0}, "max_grad_norm none / 1"),
    "start": ({}, {"load": "checkpoint"}, "load none / checkpoint"),
    "scratch": ({}, {"from_scratch": True}, "from_scratch false / true"),
    "gpu": ({"hardware": HARDWARE | {"gpu": "NVIDIA T4"}}, {}, "gpu NVIDIA A100 / NVIDIA T4"),
    "device": ({"hardware": HARDWARE | {"device": "cpu"}}, {}, "device cuda / cpu"),
    "versions": ({"versions": {"torch": "2.11.0"}}, {}, "torch 2.13.0 / 2.11.0"),
    "new setting": ({}, {"of_a_later_version": 1}, None),
}


@pytest.mark.parametrize("kind", DIFFERENCES)
def test_each_difference_is_refused_by_name(tmp_path, monkeypatch, kind):
    more, settings, phrase = DIFFERENCES[kind]
    first = write_run(tmp_path, record(**({"of_a_later_version": 0} if phrase is None else {})))
    second = write_run(tmp_path, record("3_torch_compile", compile=True, **settings) | more)
    phrase = phrase or "of_a_later_version 0 / 1"
    with pytest.raises(UserError) as refused:
        script(monkeypatch, first, second, "--markdown", tmp_path / "out.md")
    assert str(refused.value) == (
        f"these runs differ in more than their technique: {phrase}; --anyway compares them all the same"
    )
    assert not (tmp_path / "out.md").exists()
    comparison = compare(read_sources([first, second]))
    assert comparison.differences == [phrase]
    escaped = phrase.replace("_", "\\_")
    assert (
        to_markdown(comparison).splitlines()[0] == f"**Not comparable without care: these runs differ in {escaped}.**"
    )
    assert to_csv(comparison).splitlines()[0] == f"# differs: {phrase}"
    assert list(json.loads(to_json(comparison)).items())[1] == ("differences", [phrase])
    page = to_html(comparison)
    assert page.index(f"<li>{phrase}</li>") < page.index("<table")


def test_techniques_are_compared(tmp_path):
    sources = [
        write_run(tmp_path, record()),
        write_run(tmp_path, record("6_lean_optimizer", optimizer="sgd", learning_rate=0.01, schedule="cosine")),
        write_run(tmp_path, record("13_lora", lora=True, learning_rate=2e-4, lora_rank=16, precision="bf16-true")),
        write_run(tmp_path, record("8_init_on_device")),
        write_run(tmp_path, record("9_ddp", devices=4) | {"ranks": 4}),
    ]
    comparison = compare(read_sources(sources))
    assert comparison.differences == []
    assert [row.changed for row in comparison.rows] == [
        "reference",
        "optimizer sgd; learning_rate 0.01; schedule cosine",
        "precision bf16-true; lora true; learning_rate 0.0002; lora_rank 16",
        "the script alone",
        "ranks 4",
    ]
    assert ("learning_rate", ["5e-05", "0.01", "0.0002", "5e-05", "5e-05"]) in comparison.settings


def test_no_setting_of_the_technique_is_misspelt():
    names = set(settings_for(Path("/x")).__dataclass_fields__)
    assert set(TECHNIQUE) - {"ranks"} <= names
    assert names >= IGNORED


def test_one_model_in_two_homes_is_one(tmp_path):
    first = write_run(tmp_path, record(model="/a/configs/models/bloom.json"))
    same = write_run(tmp_path, record("3_torch_compile", model="/b/c/configs/models/bloom.json"))
    other = write_run(tmp_path, record("4_mixed_precision", model="runs/2_grad_accum/1/model"))
    third = write_run(tmp_path, record("5_low_precision", model="runs/1_batch_size_1/1/model"))
    assert compare(read_sources([first, same])).differences == []
    assert len(compare(read_sources([other, third])).differences) == 1


def test_seeds_are_one_row(tmp_path):
    for number, (seed, accuracy, minutes) in enumerate([(1, 0.90, 2.0), (2, 0.92, 2.2), (3, 0.91, 2.4)], start=1):
        write_run(tmp_path, record(seed=seed, accuracy=accuracy, minutes=minutes), number)
        write_run(tmp_path, record("3_torch_compile", seed=seed, accuracy=0.9, minutes=1.1, compile=True), number)
    comparison = compare(read_sources([str(tmp_path)]))
    assert (len(comparison.rows), comparison.differences) == (2, [])
    first, second = comparison.rows
    assert first.mean("test_accuracy") == pytest.approx(91)
    assert first.spread("test_accuracy") == pytest.approx(1)  # n - 1 in the denominator
    assert first.spread("minutes") == pytest.approx(0.2)
    assert second.spread("test_accuracy") == pytest.approx(0, abs=1e-9)
    text = to_markdown(comparison)
    assert "mean of seeds 1, 2, 3 (n = 3)" in text
    assert "91.00 ± 1.00 %" in text
    assert "1.10 ± 0.00 min (0.50 x)" in text
    line = next(csv.DictReader(io.StringIO(to_csv(comparison))))
    assert (line["n"], line["seeds"], line["minutes"], line["minutes_spread"]) == ("3", "1 2 3", "2.2", "0.2")
    again = write_run(tmp_path / "again", record(seed=1))
    assert len(make_rows(read_sources([str(tmp_path / "2_grad_accum"), again]).runs)) == 2  # a seed counts once


@pytest.mark.parametrize(
    ("rate", "said"),
    [(20.0, " after 77 batches of 16 samples, against 2_grad_accum."),
     (11.4, ": a batch takes no less time than with 2_grad_accum.")],
)  # fmt: skip
def test_compiling_is_set_against_the_time_that_it_saves(tmp_path, rate, said):
    """16 samples take 16 / 11.4 s without, and 16 / 20 s with it."""
    compiled = record("3_torch_compile", compile=True)
    compiled["results"] |= {"compile_seconds": 46.3, "compiled_graphs": 3, "samples_per_second": rate}
    plain, other = write_run(tmp_path, record()), write_run(tmp_path, compiled)
    for order in ([plain, other], [other, plain]):
        notices = compare(read_sources(order)).notices
        never = "never " if rate == 11.4 else ""
        assert f"3_torch_compile: compiling took 46 s, {never}paid for{said}" in notices
    assert not any("compiling" in notice for notice in compare(read_sources([other])).notices)


def test_faster_products_are_told_in_the_header(tmp_path):
    settings = settings_for(tmp_path, matmul_precision="high")
    hardware = {"device": "cuda", "gpu": "NVIDIA H200", "processor": "AMD"}
    run = parse(f"{title(settings, hardware, 1)}\n{LOG.split(chr(10), 2)[2]}")[0]
    assert (run.settings["precision"], run.settings["matmul_precision"]) == ("32-true", "high")
    assert parse(LOG)[0].settings["matmul_precision"] == "highest"


def test_what_a_text_does_not_tell_is_no_reason_to_refuse(tmp_path):
    run = write_run(tmp_path, record())
    comparison = compare(read_sources([run, str(BLOG / "compile.txt")]))
    assert comparison.differences == []
    assert any(
        notice.startswith("Not told by compile: the content of the data, model") for notice in comparison.notices
    )
    log = tmp_path / "other.txt"
    log.write_text(LOG)
    found = compare(read_sources([run, str(log)])).differences
    assert "device cuda / cpu" in found
    assert "model bloom-560m / bloom-quickstart.json" in found
    assert "dataset imdb / synthetic" in found


# Writing


def test_the_script_writes_all_outputs(tmp_path):
    write_run(tmp_path / "runs", record(minutes=51.37, accuracy=0.8737))
    write_run(tmp_path / "runs", record("3_torch_compile", minutes=43.33, accuracy=0.8791, compile=True))
    outputs = {option: tmp_path / f"out.{option}" for option in ("markdown", "csv", "json", "html", "png")}
    options = [str(text) for option, path in outputs.items() for text in (f"--{option}", path)]
    process = run_script(SCRIPT, tmp_path / "runs", *options, cwd=tmp_path)
    assert (process.returncode, process.stderr) == (0, "")
    for text in ("51.37", "43.33", "0.84 x", "87.91", "+0.54", "compile true", "8.00"):
        assert text in process.stdout
    assert "| 43.33 min (0.84 x) |" in outputs["markdown"].read_text()
    lines = list(csv.DictReader(outputs["csv"].open()))
    assert [(line["minutes"], line["minutes_ratio"]) for line in lines] == [
        ("51.37", "1.0"),
        ("43.33", "0.843488417364"),
    ]
    content = json.loads(outputs["json"].read_text())
    assert content["rows"][1]["figures"]["test_accuracy"] == {"mean": 87.91, "spread": None, "points": 0.54}
    assert len(content["rows"][0]["runs"][0]["losses"]) == 20
    names = {path.name for path in outputs["png"].iterdir()}
    assert names == {"loss.png", "loss_log.png", "time.png", "memory.png", "accuracy.png"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in outputs["png"].iterdir())
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_the_script_refuses_in_one_line(tmp_path):
    first, second = write_run(tmp_path, record()), write_run(tmp_path, record("3_torch_compile", epochs=2))
    process = run_script(SCRIPT, first, second, cwd=tmp_path)
    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr.count("\n") == 1
    assert process.stderr.startswith("error: these runs differ in more than their technique: epochs 1 / 2;")


def test_standard_input_and_markdown_to_standard_output(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO((BLOG / "memory_series.txt").read_bytes())))
    printed = script(monkeypatch, "-", "--markdown", "-")
    assert printed.startswith("| rung | what changed | time |")
    assert "| 02\\_mixed-precision | not told | 3.45 min (0.19 x) |" in printed


def test_one_run_is_a_table_of_one(tmp_path, monkeypatch):
    printed = script(monkeypatch, write_run(tmp_path, record()))
    assert "2_grad_accum" in printed
    assert "ratio" not in printed


def test_bad_input_is_one_line(tmp_path, monkeypatch):
    run = write_run(tmp_path, record())
    (tmp_path / "prose.txt").write_text("Nothing of a log.\n")
    (tmp_path / "binary").write_bytes(bytes(range(256)) * 10)
    (tmp_path / "empty").mkdir()
    (tmp_path / "there.md").write_text("mine")
    cases = {
        "there is no .*nowhere": ["nowhere"],
        "there is no log in": [tmp_path / "prose.txt"],
        "there is no log in .*binary": [tmp_path / "binary"],
        "holds no run": [tmp_path / "empty"],
        "exists: choose another": [run, "--markdown", tmp_path / "there.md"],
        "there is no folder": [run, "--html", tmp_path / "nowhere" / "page.html"],
        "both name": [run, "--csv", tmp_path / "x", "--json", tmp_path / "x"],
        "see --help": ["--color", run],
        "required: SOURCE": [],
    }
    for message, args in cases.items():
        with pytest.raises(UserError, match=message) as error:
            script(monkeypatch, *args)
        assert "\n" not in str(error.value)
    assert (tmp_path / "there.md").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "2_grad_accum",
        "binary",
        "empty",
        "prose.txt",
        "there.md",
    ]


def test_nothing_is_half_written(tmp_path, monkeypatch):
    run = write_run(tmp_path, record())
    rename, calls = os.rename, []

    def full_disk(source, target):
        calls.append(target)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        rename(source, target)

    monkeypatch.setattr(os, "rename", full_disk)
    with pytest.raises(UserError, match=r"cannot write .*page.html \(No space left on device\)"):
        script(monkeypatch, run, "--csv", tmp_path / "t.csv", "--html", tmp_path / "page.html")
    assert [path.name for path in tmp_path.iterdir()] == ["2_grad_accum"]


# Charts


@pytest.mark.parametrize(("hits", "n"), [(0, 10), (5, 10), (10, 10), (8737, 10000), (1, 1)])
def test_wilsons_interval(hits, n):
    expected = binomtest(hits, n).proportion_ci(0.95, "wilson")
    assert wilson_interval(hits / n, n) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_smoothing():
    assert smooth([1, 2, 3], [5.0, 5.0, 5.0], 2) == pytest.approx([5, 5, 5])
    assert smooth([0, 10], [0.0, 3.0], 10) == pytest.approx([0, 2])  # the older weighs half
    assert smooth([0, 10], [1.0, 3.0], 0) == [1, 3]


def test_a_long_run_s_chart_is_small_keeps_its_peak_and_is_the_same_each_time(tmp_path):
    folder = Path(write_run(tmp_path, record()))
    rng = random.Random(0)
    rows = [
        f"1,5e-5,{9.0 if step == 5000 else rng.uniform(0.4, 0.6)},{step},{step},{step}" for step in range(1, 10_000)
    ]
    (folder / "metrics.csv").write_text("\n".join(["epoch,learning_rate,loss,samples,seconds,step", *rows]) + "\n")
    comparison = compare(read_sources([str(folder)]))
    page = to_html(comparison)
    assert len(page) < 200_000
    assert page == to_html(comparison)
    raw = re.search(r'id="raw-loss-0">\s*<path d="([^"]*)"', page).group(1)
    heights = [float(height) for height in re.findall(r"[ML] \S+ (\S+)", raw)]
    assert len(heights) < 3000
    middle = sorted(heights)[len(heights) // 2]
    assert min(heights) < middle - 100  # of about 190 that the chart is high


def test_pictures_of_runs_with_hardly_any_figures(tmp_path):
    (tmp_path / "log.txt").write_text("# $\\frac{ & _x\n" + (BLOG / "compile.txt").read_text())
    comparison = compare(read_sources([str(tmp_path / "log.txt")]))
    assert to_png(comparison).keys() == {"time.png", "accuracy.png"}
    page = to_html(comparison)
    assert "Training loss" not in page
    assert "Peak memory" not in page


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A page with every part: seeds, differences, odd names."""
    root = tmp_path_factory.mktemp("page")
    for number, seed in enumerate((1, 2, 3), start=1):
        write_run(root, record(seed=seed, minutes=40, accuracy=0.90 + 0.01 * seed), number)
        write_run(root, record("3_torch_compile", seed=seed, minutes=30 + seed, compile=True), number)
    write_run(root, record("5_low_precision", minutes=20, memory=4e9, precision="bf16-true", seed=1))
    (root / "odd").mkdir()
    (root / "odd" / "log.txt").write_text("# <script>alert(1)</script>&'\"\n" + (BLOG / "compile.txt").read_text())
    path = root / "report.html"
    path.write_text(to_html(compare(read_sources([str(root)]))), encoding="utf-8")
    return path


def test_the_page_asks_no_host_for_anything(page):
    text = page.read_text()
    assert not re.search(r"https?:|//\w|@import|url\((?!data:|#)", text)
    links = set(re.findall(r"""(?:src|href)=["']?([^"'> ]*)""", text))
    assert {link for link in links if not link.startswith("#")} == {"data:,"}
    assert "<script" not in text
    assert "&lt;script&gt;alert(1)" in text
    assert len(text) < 200_000
    tables, captions = text.count("<table"), text.count("<caption>")
    assert tables == captions == 3
    charts = re.findall(r'<svg class="(\w+)" role="img" aria-label="([^"]+)"', text)
    assert [name for name, _ in charts] == ["loss", "loss_log", "time", "memory", "accuracy"]
    told = dict(charts)
    assert "2_grad_accum ends at 0.3" in told["loss"]
    assert "3_torch_compile 32.00 ± 1.00 min (0.80 x)" in told["time"]
    assert "5_low_precision 4.00 GB (0.50 x)" in told["memory"]
    assert "2_grad_accum 92.00 ± 1.00 % (90.15 to 93.53)" in told["accuracy"]
    assert len(re.findall(r'(?<= id=")[^"]+', text)) == len(set(re.findall(r'(?<= id=")[^"]+', text)))
    assert re.findall(r"<h(\d)", text) == ["1", *"2" * (text.count("<h2"))]


HARNESS = """<body style="margin:0">
<iframe id="f" src="report.html" style="border:0;width:{width}px;height:900px"></iframe>
<script>addEventListener("load", () => {{
  const page = f.contentDocument, view = f.contentWindow, root = page.documentElement, out = {{}};
  const shown = name => page.querySelector("svg." + name).getClientRects().length > 0;
  const widths = name => [...page.querySelectorAll(`g[id^="${{name}}-"]`)].map(x => x.getBoundingClientRect().width);
  out.overflow = root.scrollWidth - root.clientWidth;
  out.background = view.getComputedStyle(page.body).backgroundColor;
  out.linear = [shown("loss"), shown("loss_log")];
  out.lines = widths("loss");
  page.getElementById("log").click();
  out.log = [shown("loss"), shown("loss_log")];
  out.bars = [...widths("time"), ...widths("memory")];
  out.intervals = widths("interval");
  out.ink = view.getComputedStyle(page.querySelector("svg.accuracy text")).fill;
  out.cut = [...page.querySelectorAll("h1, h2, .runs td, .time svg text, .peak-memory svg text")].filter(
    x => x.getClientRects().length && x.getBoundingClientRect().right > root.clientWidth + 1).length;
  out.requests = view.performance.getEntriesByType("resource").length;
  const place = document.createElement("pre");
  place.textContent = JSON.stringify(out);
  document.body.replaceChildren(place);
}})</script>"""


def chromium(tmp_path, *options):
    """Run headless Chromium, without any network where the system allows it; return its stdout and messages."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if not browser:
        pytest.skip("needs Chromium (Debian: apt-get install chromium)")
    alone = ["unshare", "-n"]
    if not shutil.which("unshare") or subprocess.run([*alone, "true"], capture_output=True, check=False).returncode:
        alone = []
    quiet = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync")
    quiet += ("--disable-background-networking", "--disable-component-update", "--hide-scrollbars")
    quiet += ("--enable-logging=stderr", "--allow-file-access-from-files")
    profile = tmp_path / f"profile{len(list(tmp_path.iterdir()))}"
    command = [*alone, browser, *quiet, f"--user-data-dir={profile}", *options]
    process = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert process.returncode == 0, process.stderr[-2000:]
    shutil.rmtree(profile, ignore_errors=True)
    return process.stdout, process.stderr


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_in_a_browser(page, tmp_path, scheme, width):
    (page.parent / "harness.html").write_text(HARNESS.format(width=width))
    look = f"--blink-settings=preferredColorScheme={int(scheme == 'light')}"
    size = f"--window-size={max(width, 500)},1000"
    printed, messages = chromium(tmp_path, look, size, "--dump-dom", (page.parent / "harness.html").as_uri())
    assert "CONSOLE" not in messages
    seen = json.loads(re.search(r"<pre>(.*?)</pre>", printed).group(1))
    assert (seen["overflow"], seen["requests"], seen["cut"]) == (0, 0, 0)
    assert (seen["linear"], seen["log"]) == ([True, False], [False, True])
    assert len(seen["lines"]) == 7
    assert min(seen["lines"]) > 200
    assert len(seen["bars"]) == 7  # the blog's run has a time and no memory
    assert min(seen["bars"]) > 10
    assert len(seen["intervals"]) == 3
    red = int(re.match(r"rgb\((\d+)", seen["background"]).group(1))
    assert red < 60 if scheme == "dark" else red > 200
    ink = int(re.match(r"rgb\((\d+)", seen["ink"]).group(1))
    assert ink > 150 if scheme == "dark" else ink < 120
    picture = tmp_path / f"{scheme}_{width}.png"
    narrow = page.parent / "narrow.html"  # a window is never narrower than 500 pixels
    narrow.write_text(
        f'<body style="margin:0"><iframe src="report.html" style="border:0;width:{width}px;height:3600px">'
    )
    target = page if width > 500 else narrow
    chromium(tmp_path, look, f"--window-size={width},{2400 if width > 500 else 3600}", f"--screenshot={picture}",
             target.as_uri())  # fmt: skip
    assert picture.stat().st_size > 50_000


def test_the_page_on_paper(page, tmp_path):
    chromium(tmp_path, f"--print-to-pdf={tmp_path / 'report.pdf'}", page.as_uri())
    content = (tmp_path / "report.pdf").read_bytes()
    assert content.startswith(b"%PDF")
    assert 1 <= len(re.findall(rb"/Type\s*/Page\b", content)) <= 4
