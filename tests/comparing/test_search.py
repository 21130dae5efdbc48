"""A search names the best values by the validation, over all seeds."""

from pathlib import Path

from support.recorded_runs import record, write_run

from fabric_ladder.comparing.search import best_line


def tried(root, values, losses):
    """Write a run for each loss, one for each seed, and return the values and the folders; None is a failed run."""
    runs = []
    for seed, loss in enumerate(losses):
        content = record(learning_rate=float(values["learning_rate"]), seed=seed)
        last = content["results"]["epochs"][-1]
        last["validation_loss"], last["validation_accuracy"] = loss or 0, 1 - (loss or 0)
        number = f"{values['learning_rate']}-{seed}"
        runs.append(None if loss is None else Path(write_run(root, content, number=number)))
    return values, runs


def best(*found, metric="loss"):
    return best_line("2_grad_accum", metric, list(found)).removeprefix("Best of 2_grad_accum: --learning_rate ")


def test_the_best_value_has_the_lowest_mean_loss_and_a_result_for_every_seed(tmp_path):
    tries = [tried(tmp_path, {"learning_rate": rate}, losses) for rate, losses in
             (("1e-5", [0.5, 0.5]), ("2e-5", [0.7, 0.6]), ("4e-5", [0.4, None]), ("8e-5", [0.2, 0.7]))]  # fmt: skip
    largest = "8e-5 is the largest --learning_rate tried, so try beyond it"
    assert best(*tries) == f"8e-5, by the validation loss 0.45; {largest}"
    assert best(tries[2]) == "2_grad_accum: no value has a result for every seed"


def test_the_best_accuracy_is_the_highest(tmp_path):
    found = [tried(tmp_path, {"learning_rate": rate}, [loss]) for rate, loss in (("1e-5", 0.3), ("2e-5", 0.2))]
    assert best(*found, metric="accuracy") == "2e-5, by the validation accuracy 80"


def test_kept_weights_are_judged_by_their_own_validation(tmp_path):
    content = record(learning_rate=1e-5)
    content["results"]["best_validation"] = {"metric": "loss", "value": 0.1, "place": "epoch 1, batch 3", "used": True}
    kept = {"learning_rate": "1e-5"}, [Path(write_run(tmp_path, content, number="kept"))]
    assert best(kept, tried(tmp_path, {"learning_rate": "2e-5"}, [0.2])).startswith("1e-5, ")
