"""The check of figures in documents passes here. It finds changed figures and missing files, parts and comments."""

import json
import sys

import pytest
from support.helpers import ROOT

sys.path.append(str(ROOT / "benchmarks"))
from check_figures import check

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FILE = {
    "part": {
        "entries": [
            {"rung": "1_batch_size_1", "options": "", "bytes": 8951669932, "seconds": 89.1},
            {"rung": "2_grad_accum", "options": "--micro_batch_size 4", "bytes": 10800000001, "seconds": 31.4},
        ],
        "repeats": {"one": [{"accuracy": 0.786}, {"accuracy": 0.793}, {"accuracy": 0.794}]},
        "ratios": {"speed": 1.117, "memory": 0.63},
    }
}
PARAGRAPH = "It takes 8.95 GB instead of 10.80, and 1.48 minutes.\n"
TABLE = "| rung | GPU, GB | speed |\n|---|---|---|\n| 1, of 24 GB | 8.95 | +12 % |\n"
NO_FIGURES = "Not `--gpu 3.4 GB`, 16-bit, 10^9 bytes, 2026-11-22, torch 2.13.0, 1 x 1,024 tokens, [here](3.4).\n"


@pytest.fixture
def errors(tmp_path):
    """Check a page against a file with a few measurements."""
    (tmp_path / "some.json").write_text(json.dumps(FILE))
    (tmp_path / "log.txt").write_text("Time elapsed 0.45 min\nTest accuracy 92.70%\n")
    for seed, accuracy in enumerate((0.786, 0.793, 0.794)):
        run = tmp_path / "runs" / "2_grad_accum" / str(seed) / "run.json"
        run.parent.mkdir(parents=True)
        run.write_text(json.dumps({"results": {"test_accuracy": accuracy}}))
    return lambda page: check(page, "page.md", tmp_path)[0]


@pytest.mark.parametrize(
    ("text", "comment"),
    [
        (PARAGRAPH, "some.json"),
        ("At 1,024 and 8.95 GB,\nand 79.1 ±\n  0.4 %\n", "some.json part.entries part.repeats.one.+.accuracy"),
        ("- 1.85 GB\n  more\n", 'some.json "=*.2_grad*.bytes - *.1_batch*.bytes"'),
        ("| | accuracy, % |\n|---|---|\n| rung 2 | 79.1 ± 0.4 |\n", "runs 2_grad_accum.+.results"),
        ("-37 %\n", "some.json part.ratios.memory"),
        ("```\n 0.45 min\n 92.70%\n```\n", "log.txt"),
        (TABLE, "some.json part.entries part.ratios -->\n<!-- figures: computed 24 GB: the size of a GPU"),
        ("3 GB and 5 %\n", "unfiled"),
        (f"{NO_FIGURES}\n9 x\n", "computed x: 3 x 3"),
    ],
)
def test_a_figure_of_its_source_passes(errors, text, comment):
    assert errors(f"# Page of 3 GB\n\n{text}<!-- figures: {comment} -->\n") == []


@pytest.mark.parametrize(
    ("page", "found"),
    [
        (PARAGRAPH.replace("8.95", "8.96") + "<!-- figures: some.json -->", "1: 8.96 GB: not in"),
        (PARAGRAPH + "<!-- figures: some.json part.entries.2* -->", "1: 8.95 GB: not in"),
        (PARAGRAPH + "<!-- figures: some.json part.x -->", "1: some.json part.x: some.json has no part.x"),
        (PARAGRAPH + "<!-- figures: none.json -->", "1: none.json: [Errno 2]"),
        ("\n" + PARAGRAPH, "2: 8.95 GB: not in a file: name one"),
        ("79.1 ± 0.5 %\n<!-- figures: some.json part.repeats.one.+.accuracy -->", "1: 0.5 %: not in"),
        ("3 GB\n<!-- figures: computed 4 GB: the size of a GPU -->", "1: computed 4 GB: the size of a GPU: no figure"),
        ('3 GB\n<!-- figures: some.json "part -->', '1: some.json "part: No closing quotation'),
        ("3 GB and 4 %\n<!-- figures: unfiled % -->", "1: 3 GB: not in"),
        ("<!-- gpu:speeds -->\n3 GB\n<!-- /gpu -->\n4 GB\n", "4: 4 GB: not in a file"),
    ],
)
def test_any_other_figure_is_reported_with_its_line(errors, page, found):
    reported = errors(page)
    assert any(each.startswith(f"page.md:{found}") for each in reported)
    assert not any("gpu:" in each for each in reported)


def test_every_figure_of_the_documents_is_in_its_file():
    texts = {page.name: page.read_text(encoding="utf-8") for page in PAGES}
    findings = [check(text, name) for name, text in texts.items()]
    assert [error for errors, _ in findings for error in errors] == []
    assert sum(count for _, count in findings) > 600
    assert [name for name, text in texts.items() if "figures: unfiled" in text] == ["journal.md"]
