"""A search names the best values by the validation, over all seeds."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console
from support.recorded_runs import record, write_run

from fabric_ladder.comparing.search import Tried, print_search
from fabric_ladder.comparing.sources import read_sources


def tried(root, values, losses, **settings):
    """Write a run for each loss, one for each seed, and return them; None is a run without a result."""
    runs = []
    for seed, loss in enumerate(losses):
        content = record(learning_rate=float(values["learning_rate"]), seed=seed, **settings)
        last = content["results"]["epochs"][-1]
        last["validation_loss"], last["validation_accuracy"] = loss or 0, 1 - (loss or 0)
        if loss is not None:
            runs.append(Path(write_run(root, content, number=f"{values['learning_rate']}-{seed}")))
    return Tried(values, runs, failed=len(runs) < len(losses))


def printed(*found):
    console = Console(file=io.StringIO(), width=80)
    print_search("2_grad_accum", list(found), console)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("losses", "best", "hint"),
    [
        (([0.5, 0.7], [0.4, 0.6], [0.45, 0.9]), "2e-5, by the validation loss 0.5", False),
        (([0.5, 0.5], [0.7, 0.6], [0.4, None]), "1e-5, by the validation loss 0.5", True),
        (([0.5], [0.4], [0.3]), "4e-5, by the validation loss 0.3", True),
    ],
)
def test_the_best_value_has_the_lowest_mean_loss_and_a_result_for_every_seed(tmp_path, losses, best, hint):
    rates = ("1e-5", "2e-5", "4e-5")
    text = printed(*(tried(tmp_path, {"learning_rate": rate}, each) for rate, each in zip(rates, losses, strict=True)))
    assert re.search(r"validation loss +test accuracy", text)
    line = text.splitlines()[-1]
    assert line.startswith(f"Best of 2_grad_accum: --learning_rate {best}")
    assert ("tried, so try beyond it" in line) == hint
    assert ("failed" in text) == (None in losses[2])


def test_the_best_accuracy_is_the_highest(tmp_path):
    found = [tried(tmp_path, {"learning_rate": rate}, [loss], best_metric="accuracy") for rate, loss in
             (("1e-5", 0.3), ("2e-5", 0.2))]  # fmt: skip
    assert printed(*found).splitlines()[-1] == (
        "Best of 2_grad_accum: --learning_rate 2e-5, by the validation accuracy 80"
    )


def test_kept_weights_are_judged_by_their_own_validation(tmp_path):
    content = record(learning_rate=1e-5)
    content["results"]["best_validation"] = {"metric": "loss", "value": 0.1, "place": "epoch 1, batch 3", "used": True}
    kept = Tried({"learning_rate": "1e-5"}, [Path(write_run(tmp_path, content, number="kept"))], failed=False)
    text = printed(kept, tried(tmp_path, {"learning_rate": "2e-5"}, [0.2]))
    assert text.splitlines()[-1].startswith("Best of 2_grad_accum: --learning_rate 1e-5, ")


def test_a_search_without_any_result_says_so(tmp_path):
    text = printed(tried(tmp_path, {"learning_rate": "1e-5"}, [None]), tried(tmp_path, {"learning_rate": "1"}, [None]))
    assert text == "2_grad_accum: no value has a result for every seed\n"


@pytest.mark.parametrize(("metric", "value", "shown"), [("accuracy", 0.9, 90), ("loss", 0.1, None)])
def test_a_comparison_shows_the_validation_of_the_tested_weights_or_none(tmp_path, metric, value, shown):
    content = record()
    best = {"metric": metric, "value": value, "place": "epoch 1, batch 3", "used": True}
    content["results"]["best_validation"] = best
    (run,) = read_sources([write_run(tmp_path, content)])
    assert (run.unfinished, run.figures.get("validation_accuracy")) == (None, shown)
    best["used"] = False
    (run,) = read_sources([write_run(tmp_path, content, number=2)])
    assert run.figures["validation_accuracy"] == 80
