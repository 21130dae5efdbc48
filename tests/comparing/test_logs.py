"""Logs are read completely and unchanged."""

import random
import re

import pytest
from support.helpers import settings_for
from support.recorded_runs import BLOG, LOG, parse

from fabric_ladder.comparing.sources import read_sources
from fabric_ladder.runs.header import title

LANGUAGE_LOG = """\
Python 3.11.7 · torch 2.13.0+cpu · lightning 2.6.6
13_lora · belle · bloomz-7b1-mt · seed 7 · batch 64 = 4 x 4 x 4 · bf16-mixed · cuda: 4 x NVIDIA A100-SXM4-80GB
Torch CUDA available? True
Attention kernels, the first that can: flash, memory-efficient, math
belle.jsonl: 9 rows · train 5, validation 2, test 2 · 8 turns trained, 9 masked
Parameters: 22.8 M, 0.074 M trainable (0.33%), torch.bfloat16, torch.float32
Predicted peak: 0.55 GB (weights 0.10, activations 0.45); 1.10 of 80.00 GB with CUDA's own
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


@pytest.mark.parametrize(
    ("name", "minutes", "accuracy"),
    [("batch_size_1", 69.97, 78.53), ("gradient_accumulation", 51.37, 87.37)],
)
def test_the_blogs_logs_are_read_as_printed(name, minutes, accuracy):
    [run] = read_sources([str(BLOG / f"{name}.txt")])
    assert (run.name, run.unfinished, run.ours) == (name, None, False)
    expected = {"minutes": minutes, "test_accuracy": accuracy}
    if name == "gradient_accumulation":
        expected |= {"train_accuracy": 78.67, "validation_accuracy": 87.28}
    assert run.figures == expected
    assert [(point.value, point.samples) for point in run.losses] == [(1.9902, None)] * (name == "batch_size_1")


def test_a_file_of_several_logs_under_headings_is_read():
    runs = read_sources([str(BLOG / "memory_series.txt")])
    keys = ("minutes", "memory", "train_accuracy", "validation_accuracy", "test_accuracy")
    assert {run.name: tuple(run.figures.get(key) for key in keys) for run in runs} == {
        "01_pytorch-vit": (17.94, 26.79, 94.44, 96.00, 95.85),
        "01-2_pytorch-fabric": (17.88, 26.84, 94.44, 96.06, 96.06),
        "02_mixed-precision": (3.45, 18.21, 94.56, 96.02, 95.71),
        "03_bfloat16": (2.88, 13.82, 95.62, 96.94, 96.92),
        "04_lower-batchsize": (3.96, 5.69, 95.21, 97.20, 97.34),
        "05_gradient-accum": (12.91, 3.91, 95.46, 97.24, 97.27),
        "08 FSDP ADAM": (5.53, 6.59, 94.74, 97.28, 97.13),
        "bonus: distilbert before": (None, 3.99, 90.55, 92.99, 92.95),
    }
    assert runs[0].versions == {"torch": "2.1.0.dev20230623+cu118", "lightning": "2.1.0.dev0"}
    assert [point.value for point in runs[0].losses] == [2.4105, 0.0640, 0.0680]


def quoted(pattern):
    """Match a figure of the stored log that differs between machines or days."""
    return float(re.search(pattern, LOG)[1])


def test_a_language_models_log_is_read():
    [run] = parse(LANGUAGE_LOG)
    assert (run.settings["ranks"], run.settings["micro_batch_size"], run.settings["epochs"]) == (4, 4, 2)
    assert run.hardware == {"device": "cuda", "gpu": "NVIDIA A100-SXM4-80GB"}
    assert [(point.samples, point.epochs) for point in run.losses] == [(20, 1.0), (40, 2.0)]
    expected = {"test_loss": 6.0102, "test_perplexity": 407.56, "validation_perplexity": 413.37, "compiled_graphs": 3}
    expected |= {"trainable_parameters": 0.074, "compile_minutes": 0.05, "predicted_memory": 0.55}
    assert run.figures.items() >= expected.items()


@pytest.mark.parametrize(
    "line", ["Epoch: 0001/0001 | Batch 24000/35000 | Loss: 1.99", "Memory used: 26.79 MB", "> Test accuracy 78.53%"]
)
def test_only_whole_lines_are_read(line):
    [run] = parse(f"Memory used: 1.00 GB\n{line}\nTest accuracy 60.00%\n")
    assert run.figures == {"memory": 1.0, "test_accuracy": 60.0}
    assert run.losses == []


def test_logs_below_each_other_without_headings_are_separate_runs():
    runs = parse("".join((BLOG / f"{name}.txt").read_text() for name in ("gradient_accumulation", "compile")) + LOG * 2)
    assert [run.figures["minutes"] for run in runs] == [51.37, 43.33, *[quoted("Time elapsed (.*) min")] * 2]
    assert [run.figures.get("train_accuracy") for run in runs] == [78.67, None, 79.07, 79.07]


@pytest.mark.parametrize("text", [LANGUAGE_LOG, (BLOG / "gradient_accumulation.txt").read_text()])
def test_cut_and_shuffled_lines_give_no_figure_that_was_not_printed(text):
    rng, [whole] = random.Random(1), parse(text)
    for _ in range(100):
        lines = [line[: rng.choice([len(line), len(line), rng.randrange(len(line) + 1)])] for line in text.splitlines()]
        if rng.random() < 0.3:
            rng.shuffle(lines)
        for run in parse("\n".join(line for line in lines if rng.random() < 0.9)):
            for name, value in run.figures.items():
                earlier = ("train_accuracy", "validation_accuracy", "validation_perplexity")
                assert value == whole.figures[name] or (name in earlier and f"{value:.2f}" in text)
            assert all(point in whole.losses for point in run.losses)


@pytest.mark.parametrize(
    ("ranks", "values"),
    [
        (4, {"matmul_precision": "high", "micro_batch_size": 4}),
        (1, {"micro_batch_size": None, "micro_batch_tokens": "auto", "packing": True}),
        (4, {"packing": True, "micro_batch_size": 4, "max_length": 512, "precision": "bf16-mixed"}),
    ],
)
def test_the_header_has_the_settings(tmp_path, ranks, values):
    settings = settings_for(tmp_path, batch_size=64, **values)
    hardware = {"device": "cuda", "gpu": "NVIDIA H200", "processor": "AMD"}
    [run] = parse(f"{title(settings, hardware, ranks)}\nTest accuracy 60.00%\n")
    assert run.settings.pop("ranks") == ranks
    assert (run.settings.pop("dataset"), run.settings.pop("model")) == (settings.dataset, settings.model)
    assert run.settings == {name: getattr(settings, name) for name in run.settings}
    assert run.hardware == {"device": "cuda", "gpu": "NVIDIA H200"}
