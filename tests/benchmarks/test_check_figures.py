"""The check of the documents' figures: it passes here, and finds a changed figure, a missing file, part or comment."""

import json
import shutil
import subprocess
import sys

import pytest
from support.helpers import ROOT

sys.path.append(str(ROOT / "benchmarks"))
from check_figures import check
from page_figures import blocks_of, figures_of

UNFILED = {"journal.md": 74}  # figures in no file, of code that is no more: only the journal may have them
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RESULTS = ROOT / "benchmarks" / "results"
FILE = {
    "part": {
        "command": "python benchmarks/padding.py",
        "entries": [
            {"rung": "1_batch_size_1", "options": "", "bytes": 8951669932, "seconds": 89.1},
            {"rung": "2_grad_accum", "options": "--micro_batch_size 4", "bytes": 10800000001, "seconds": 31.4},
        ],
        "repeats": {"one": [{"accuracy": 0.786}, {"accuracy": 0.793}, {"accuracy": 0.794}]},
        "ratios": {"speed": 1.117, "memory": 0.63},
    }
}
PARAGRAPH = "It takes 8.95 GB instead of 10.80, and 1.48 minutes.\n"
TABLE = "| rung | GPU, GB | seconds | speed |\n|---|---|---|---|\n| 1, of 24 GB | 8.95 | 89 | +12 % |\n"


NO_FIGURES = "Not `--gpu 3.4 GB`, 16-bit, 10^9 bytes, 2026-11-22, torch 2.13.0, 1 x 1,024 tokens, [here](3.4).\n"


@pytest.fixture
def errors(tmp_path):
    """Check a page against a file of a few measurements."""
    (tmp_path / "some.json").write_text(json.dumps(FILE))
    (tmp_path / "log.txt").write_text("$ python src/2_grad_accum.py\nTime elapsed 0.45 min\nTest accuracy 92.70%\n")
    for seed, accuracy in enumerate((0.786, 0.793, 0.794)):
        run = tmp_path / "runs" / "2_grad_accum" / str(seed) / "run.json"
        run.parent.mkdir(parents=True)
        run.write_text(json.dumps({"command": "python src/2_grad_accum.py", "results": {"test_accuracy": accuracy}}))
    return lambda page: check(page, "page.md", tmp_path).errors


@pytest.mark.parametrize(
    ("text", "comment"),
    [
        (PARAGRAPH, "some.json"),
        (PARAGRAPH, "some.json part.entries.1_batch_size_1 *.2_grad_accum*.bytes"),
        ("At 1,024 and 8.95 GB,\nand 79.1 ±\n  0.4 %\n", "some.json part.entries part.repeats.one.+.accuracy"),
        ("- 1.85 GB\n  more\n", 'some.json "=*.2_grad*.bytes - *.1_batch*.bytes"'),
        ("1.21 times that\n", 'some.json "=*.2_grad*.bytes / *.1_batch*.bytes"'),
        ("79.1 ± 0.4 %\n", "some.json part.repeats.one.+.accuracy"),
        ("| | accuracy, % |\n|---|---|\n| rung 2 | 79.1 ± 0.4 |\n", "runs 2_grad_accum.+.results"),
        ("78.6, 79.3 and 79.4 %\n", "some.json part.repeats"),
        ("-37 %\n", "some.json part.ratios.memory"),
        ("```\n 0.45 min\n 92.70%\n```\n", "log.txt"),
        (TABLE, "some.json part.entries part.ratios -->\n<!-- figures: computed 24 GB: the size of a GPU"),
        ("18.21 GB\n", "published 18.21 GB: https://example.com"),
        (f"{NO_FIGURES}\n9 x\n", "computed x: 3 x 3"),
    ],
)  # fmt: skip
def test_what_is_in_its_source_passes(errors, text, comment):
    assert errors(f"# Page of 3 GB\n\n{text}<!-- figures: {comment} -->\n") == []


@pytest.mark.parametrize(
    ("page", "found"),
    [
        (PARAGRAPH.replace("8.95", "8.96") + "<!-- figures: some.json -->", "1: 8.96 GB: not in some.json"),
        (PARAGRAPH + "<!-- figures: some.json part.entries.2* -->", "1: 8.95 GB: not in some.json part.entries.2*"),
        (PARAGRAPH + "<!-- figures: some.json part.entrys -->", "2: some.json has no part.entrys"),
        (PARAGRAPH + "<!-- figures: none.json -->", "2: none.json no such file"),
        ("\n" + PARAGRAPH, "2: 8.95 GB: no file is named"),
        (TABLE.replace("89 |", "88 |") + "<!-- figures: some.json -->", "3: 88 seconds: not in some.json"),
        ("79.1 ± 0.5 %\n<!-- figures: some.json part.repeats.one.+.accuracy -->", "1: 79.1 ± 0.5 %: not in"),
        ("3 GB\n<!-- figures: computed 4 GB: the size of a GPU -->", "2: 4 GB is not in the block above"),
        ("3 GB\n<!-- figures: computed 3 GB -->", "2: computed: which figures, and after a colon why?"),
        ("3 GB\n<!-- figures: published 3 GB: there -->", "2: published: which figures, and after a colon where?"),
        ("3 GB\n<!-- figures: some.json part.ratios -->", "2: some.json: no figure of the block above is in"),
        ('3 GB\n<!-- figures: some.json "=*.bytes / *.memory" -->', "2: some.json has 2 and 1 numbers for"),
        ('3 GB\n<!-- figures: some.json "=part.ratios.speed" -->', "2: some.json has 1 numbers for =part"),
        ('3 GB\n<!-- figures: some.json "part -->', "2: No closing quotation"),
        ("3 tokens\n<!-- figures: unfiled -->", "2: there is no figure above"),
    ],
)  # fmt: skip
def test_what_is_not_is_named_with_its_line(errors, page, found):
    assert any(error.startswith(f"page.md:{found}") for error in errors(page)), errors(page)


def test_unfiled_figures_are_listed_and_counted(tmp_path):
    found = check("3 GB and 4 %\n<!-- figures: unfiled % -->\n\n5 GB\n<!-- figures: unfiled -->\n", "page.md", tmp_path)
    assert found.errors == ["page.md:1: 3 GB: not in unfiled %"]
    assert found.unfiled == ["page.md:1: 4 %", "page.md:4: 5 GB"]


def test_what_scripts_write_between_marks_is_left_out(errors):
    assert errors("<!-- gpu:speeds -->\n3 GB\n<!-- /gpu -->\n") == []
    assert errors("<!-- board:fastest -->\n3 GB\n<!-- /board -->\n") == []
    assert errors("<!-- gpu:speeds -->\n3 GB\n<!-- /gpu -->\n4 GB\n") == ["page.md:4: 4 GB: no file is named"]


# This repository


def test_every_figure_of_the_documents_is_in_its_file():
    findings = {page.name: check(page.read_text(encoding="utf-8"), page.name, RESULTS) for page in PAGES}
    assert [error for each in findings.values() for error in each.errors] == []
    assert sum(each.count for each in findings.values()) > 1000
    assert {name: len(each.unfiled) for name, each in findings.items() if each.unfiled} == UNFILED


def test_a_changed_digit_is_seldom_another_figure_of_the_same_part():
    """The parts that are named are small: of changed last digits, at least seven in eight are found."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        sound, lines = check(text, "", RESULTS), text.splitlines()
        filed = [block for block in blocks_of(text) if any(".json" in comment for _, comment in block.comments)]
        for figure in [figure for block in filed for figure in figures_of(block)][::5]:
            line = lines[figure.line - 1]
            number = figure.number[:-1] + str((int(figure.number[-1]) + 5) % 10)
            lines[figure.line - 1] = line.replace(figure.number, number)
            found.append(check("\n".join(lines), "", RESULTS) != sound)
            lines[figure.line - 1] = line
    assert len(found) > 100
    assert sum(found) / len(found) >= 7 / 8


@pytest.fixture
def run(tmp_path):
    """Run the check on a copy in which a text of a page is replaced; return its status and its lines."""
    shutil.copytree(ROOT / "benchmarks", tmp_path / "benchmarks")
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "README.md", tmp_path)
    for name in ("src", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)

    def run(page, old="", new="", *arguments):
        path = tmp_path / page
        text = path.read_text(encoding="utf-8")
        assert old in text
        path.write_text(text.replace(old, new, 1), encoding="utf-8")
        command = [sys.executable, "benchmarks/check_figures.py", *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        lines = [line for line in done.stdout.splitlines() if not line.endswith("in no file yet")]
        return done.returncode, lines, done.stderr, text[: text.index(old)].count("\n") + 1

    return run


def test_the_command_passes_here(run):
    status, lines, *_ = run("README.md")
    assert status == 0
    assert len(lines) == 1
    assert lines[0].endswith("0 errors")


@pytest.mark.parametrize(
    ("page", "old", "new", "message"),
    [
        ("docs/results.md", "1.17 x", "1.27 x", "{}:{}: 1.27 x: not in scale.json"),
        ("docs/techniques/17_step_in_backward.md", "6.11", "6.21", "{}:{}: 6.21: not in memory_ladder.json"),
        ("docs/lora.md", "figures: lora_7b.json *.predicted_peak", "figures: lora_7b.json *.predicted_peek",
         "{}:{}: lora_7b.json has no *.predicted_peek"),
        ("docs/results.md", "<!-- figures: scale.json", "<!-- scale.json", "{}:{}: 1.17 x: no file is named"),
    ],
)  # fmt: skip
def test_the_command_fails_with_the_line(run, page, old, new, message):
    status, lines, _, line = run(page, old, new)
    assert status == 1
    line -= 6 if "no file" in message else 0  # of the table's first row
    assert any(each.startswith(message.format(page, line)) for each in lines), lines


def test_a_page_that_is_not_there_is_refused(run):
    status, _, error, _ = run("README.md", "", "", "nothing.md")
    assert status == 2
    assert "nothing.md cannot be read" in error
    assert "Traceback" not in error
