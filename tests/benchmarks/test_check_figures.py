"""The check of figures in documents passes here. It finds changed figures and quotes, missing and unused sources."""

import json
import sys

import pytest
from support.helpers import ROOT

sys.path.append(str(ROOT / "benchmarks"))
from check_figures import check

MEASURED = {
    "entries": [
        {"rung": "1_batch_size_1", "options": "", "bytes": 8951669932, "seconds": 89.1},
        {"rung": "2_grad_accum", "options": "--micro_batch_size 4", "bytes": 10800000001, "seconds": 31.4},
    ],
    "ratios": {"speed": 1.117, "memory": 0.63},
}
ACCURACIES = {"0": 0.786, "1": 0.793, "2": 0.794}
FILES = {
    "some.json": json.dumps(MEASURED),
    "log.txt": "Time elapsed 0.45 min\nTest accuracy 92.70%\n",
    **{f"runs/2/{seed}/run.json": f'{{"accuracy": {accuracy}}}' for seed, accuracy in ACCURACIES.items()},
}
PARAGRAPH = "It takes 8.95 GB instead of 10.80, and 1.48 minutes.\n"
TABLE = "| rung | GPU, GB | speed |\n|---|---|---|\n| 1, of 24 GB | 8.95 | +12 % |\n| 2 | -37 % | |\n"
NO_FIGURES = "Not `--gpu 3.4 GB`, 16-bit, 10^9 bytes, 2026-11-22, torch 2.13.0, 1 x 1,024 tokens, [here](3.4).\n"
YAML = "benchmarks/figures/page.yaml"


@pytest.fixture
def errors(tmp_path):
    def write_and_check(page, sources):
        results = {f"benchmarks/results/{name}": text for name, text in FILES.items()}
        for name, text in {**results, "docs/page.md": page, YAML: sources}.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return check("docs/page.md", tmp_path)[0]

    return write_and_check


@pytest.mark.parametrize(
    ("text", "sources"),
    [
        (PARAGRAPH, "It takes: [some.json]"),
        ("8.95 GB at\n1,024, 79.1 ±\n  0.4 %\n", "at 1,024: [some.json entries, runs 2.+.accuracy]"),
        ("- 1.85 GB\n  more\n", """GB more: ['some.json "=*.2_grad*.bytes - *.1_batch*.bytes"']"""),
        ("| | accuracy, % |\n|---|---|\n| rung 2 | 79.1 ± 0.4 |\n", "'accuracy, %': [runs 2.+.accuracy]"),
        ("```\n 0.45 min\n 92.70%\n```\n", "0.45: [log.txt]"),
        (TABLE, "rung |:\n  - some.json entries ratios\n  - computed 24 GB: the size of a GPU\n"),
        ("- 3 GB and 5 %\n- 8.95 GB\n", "5 %: [unfiled]\n8.95 GB: [some.json entries.1*]"),
        (f"{NO_FIGURES}\n9 x\n", "9 x: ['computed x: 3 x 3']"),
    ],
)
def test_a_figure_of_its_source_passes(errors, text, sources):
    assert errors(f"# Page of 3 GB\n\n{text}", sources) == []


@pytest.mark.parametrize(
    ("page", "sources", "found"),
    [
        (PARAGRAPH.replace("8.95", "8.96"), "[some.json]", f":1: 8.96 GB has no source in {YAML}"),
        ("It takes 8.95 GB", "[some.json x]", f":1: some.json x in {YAML}: some.json has no x"),
        ("It takes 3 GB", "[none.json]", f":1: none.json in {YAML}: [Errno 2]"),
        ("It takes 79.1 ± 0.5 %", "[runs 2.+.accuracy]", ":1: 0.5 % has no source"),
        ("It takes 3 GB", "['computed 4 GB: a GPU']", f":1: no figure is 4 GB, of computed 4 GB: a GPU in {YAML}"),
        ("It takes 3 GB", """['some.json "part']""", f':1: some.json "part in {YAML}: No closing quotation'),
        (
            "It takes 9 s",
            """['a.json "entries.memory: b.seconds"']""",
            f':1: a.json "entries.memory: b.seconds" in {YAML}',
        ),
        ("- It takes 3 GB\n- 4 GB", "[unfiled]", f":2: 4 GB has no source in {YAML}"),
        ("<!-- gpu:a -->\n3 GB\n<!-- /gpu -->\nIt takes 4 GB", "[]", f":4: 4 GB has no source in {YAML}"),
        ("It needs 3 GB", "[unfiled]", f': "It takes" occurs 0 times, not once: change the quote in {YAML}'),
        ("It takes 3 GB. It takes", "[unfiled]", f': "It takes" occurs 2 times, not once: change the quote in {YAML}'),
    ],
)
def test_each_figure_source_and_quote_without_its_counterpart_is_reported(errors, page, sources, found):
    assert any(each.startswith(f"docs/page.md{found}") for each in errors(page, f"It takes: {sources}"))


def test_every_figure_of_the_documents_is_in_its_file():
    pages = [path.relative_to(ROOT).as_posix() for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))]
    findings = [check(page) for page in pages]
    assert [error for errors, _ in findings for error in errors] == []
    assert sum(count for _, count in findings) > 600
    folder = ROOT / "benchmarks" / "figures"
    files = {path.relative_to(folder).with_suffix("").as_posix(): path for path in folder.rglob("*.yaml")}
    assert files.keys() <= {page.removeprefix("docs/").removesuffix(".md") for page in pages}
    assert [name for name, path in files.items() if "- unfiled" in path.read_text(encoding="utf-8")] == ["journal"]
