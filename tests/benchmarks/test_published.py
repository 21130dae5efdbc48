"""The published peaks can be read, each has options or a reason, and the prediction meets three of them."""

import json
import sys

import pytest
from support.helpers import ROOT

from fabric_ladder.settings import FACTS

sys.path.append(str(ROOT / "benchmarks"))
import published

ROWS = published.read_rows()
ARGUMENTS = {*FACTS, "rung", *published.NUMBERS, *(word.split("=")[0] for word in published.PEERS)}


def test_every_row_has_options_that_exist_or_a_reason():
    models = {path.stem for path in published.common.MODELS.glob("*.json")}
    for row in ROWS:
        unit, measure = row["unit"].split(", ")
        assert unit in published.UNITS
        assert measure in ("allocated", "reserved", "process")
        assert float(row["peak_gb"]) > 0
        assert bool(row["options"]) == bool(row["chosen"])
        assert row["options"] or row["reason"]
        assert None not in {*row, *row.values()}  # all columns, and no more
        values = dict(word.split("=", 1) for word in row["options"].split())
        assert set(values) <= ARGUMENTS
        if values:
            shape = published.SHAPES.get(values["model"], {"base": values["model"]})
            assert shape.get("base") in {None, *models}, row
            assert (ROOT / "src" / f"{values['rung']}.py").is_file()


@pytest.mark.parametrize("number", [2, 24, 65])  # ViT-L in 32 bits, LoRA on a Llama of 1 B, 8-bit AdamW
def test_a_prediction_is_within_the_error_of_its_technique(number):
    record = published.compare(ROWS[number - 1])
    errors = json.loads(published.OUT.read_text(encoding="utf-8"))["published"]["errors"]
    assert abs(record["error"]) <= errors[record["group"]]["largest"] + 1e-9


def test_a_peers_adapters_have_16_bits_and_its_4_bit_layers_keep_their_inputs():
    options = "model=bloom-quickstart rung=14_qlora length=64 precision=bf16-true"
    words = ("", "adapters=16-bit", "adapters=16-bit four_bits=keep")
    ours, adapters, both = (published.predict(f"{options} {word}").tensors for word in words)
    assert adapters.optimizer_state == pytest.approx(ours.optimizer_state / 2, rel=0.01)
    config = json.loads((published.common.MODELS / "bloom-quickstart.json").read_text(encoding="utf-8"))
    widest = 64 * 4 * config["hidden_size"] * config["n_layer"]  # inputs of the last matrix of each block
    assert both.total - adapters.total > widest


def test_the_tables_of_the_page_are_those_of_the_results():
    assert published.fill_page(check=True) == []
