"""Every kind of labels: the loss, every cut of the effective batch, rungs, and rehearsals."""

import json

import pytest
from support.data_files import BLOOM, write_rows
from support.helpers import SRC, finished, run_script, settings_for
from support.objectives import LABELS, accumulated, assert_exact, labelled, labelling, packable
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss

from fabric_ladder import build_dataloaders
from fabric_ladder.planning.predict import blank_datasets, largest_batches
from fabric_ladder.planning.rehearsal import rehearse

MULTI = LABELS["several"][0]


@pytest.mark.parametrize(("kind", "architecture"), [("words", "llama"), ("several", "bert"), ("numbers", "bert")])
def test_no_cut_of_the_effective_batch_changes_the_gradient(tmp_path, kind, architecture):
    model, tolerance = packable(labelling(kind, architecture)), 1e-5
    if architecture == "bert":  # Llama computes its norms in 32 bits
        model, tolerance = model.double(), 1e-12
    score = assert_exact(tmp_path, model, labelled(kind), tolerance, **LABELS[kind][0])
    assert score.items > 100 or kind != "words", "items are words"


@pytest.mark.parametrize(("kind", "formula"), [("several", binary_cross_entropy_with_logits), ("numbers", mse_loss)])
def test_the_loss_is_the_mean_over_columns_and_samples(tmp_path, fabric, kind, formula):
    datasets, model = labelled(kind), labelling(kind, "bert")
    loader, _, _ = build_dataloaders(fabric, datasets, settings_for(tmp_path, **LABELS[kind][0]))
    inputs = next(iter(loader)).micro_batches[0].inputs
    labels = inputs.pop("labels")
    expected = formula(model(**inputs).logits, labels).item()
    assert accumulated(tmp_path, model, datasets, **LABELS[kind][0])[1].loss == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("options", "names"), [LABELS["words"], LABELS["numbers"], ({"class_weights": "balanced"}, "ab")]
)
def test_the_largest_batches_can_be_rehearsed(tmp_path, options, names):
    settings = settings_for(tmp_path, model=BLOOM, from_scratch=True, packing=True, max_length=64, **options)
    with rehearse(settings, blank_datasets(len(names))) as rehearsal:
        assert rehearsal.peak(settings, *largest_batches(settings, 32, classes=len(names))).total > 0


@pytest.mark.parametrize("rung", ["2_grad_accum", pytest.param("15_packing", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("kind", "names", "line"), [("words", ["B-LOC", "B-PER", "O"], "entity"), ("several", ["art", "law"], "micro")]
)
def test_a_rung_trains_and_its_model_knows_the_labels(tmp_path, rung, kind, names, line):
    rows = [{"tokens": ["Ann", f"{index}", "Ulm"], "ner_tags": ["B-PER", "O", "B-LOC"], "text": f"text number {index}",
             "label": [[], ["art"], ["art", "law"]][index % 3]} for index in range(60)]  # fmt: skip
    write_rows(rows, tmp_path / "rows.jsonl")
    predicts = rung != "2_grad_accum"  # the planner's process imports everything again
    options = ["--model", BLOOM, "--dataset", "rows.jsonl", "--save", "consolidated", "--predict_memory", predicts]
    options += [word for name, value in LABELS[kind][0].items() for word in (f"--{name}", value)]
    lines = finished(run_script(SRC / f"{rung}.py", *options, cwd=tmp_path)).splitlines()
    assert any(each.startswith("Predicted peak: 0.") for each in lines) == predicts, lines
    assert any(each.startswith(f"Test {line}") for each in lines)
    config = json.loads(next((tmp_path / "runs" / rung / "1").rglob("config.json")).read_text())
    assert [*config["id2label"].values()] == names
    assert kind == "words" or config["problem_type"] == MULTI["problem_type"]
