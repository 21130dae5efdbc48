"""The page "Will it fit?" shows what `predict_memory` predicts."""

import html
import random
import re
import shutil
import subprocess
import sys
from urllib.parse import urlencode

import pytest
from support.helpers import ROOT

from fabric_ladder.data.hub import find_shipped_config
from fabric_ladder.errors import UserError
from fabric_ladder.options import read_words
from fabric_ladder.planning.candidates import read_candidates, read_settings
from fabric_ladder.planning.gpus import GPUS, card_memory, find_gpu
from fabric_ladder.planning.overhead import ANY_GPU, assume
from fabric_ladder.planning.plan import HOST_MEMORY
from fabric_ladder.planning.planner import Machine, Samples, make_plans, recommend
from fabric_ladder.planning.run_memory import predict_memory
from fabric_ladder.techniques.memory import ON_DEVICE, Peak

FIT = ROOT / "docs" / "fit"
sys.path.append(str(FIT))
import stored  # noqa: E402

DATA = stored.read()
FLAGS = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --dump-dom".split()
COLUMNS = ("weights", "gradients", "optimizer state", "activations", "other", "CUDA", "expected", "low", "high", "host")
QUESTIONS = [
    {"model": label, "task": task, "length": length, "batch": str(size)}
    for label, model in DATA["models"].items()
    for task, peaks in model["tasks"].items()
    for length in peaks
    for size in DATA["sizes"]
]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
in_a_browser = pytest.mark.skipif(not CHROMIUM, reason="chromium is not installed")


def ask(question: dict[str, str], profile) -> tuple[str, list[dict[str, str]]]:
    """Return the page's document in Chromium for a question, and the rows of its table."""
    address = f"{(FIT / 'index.html').as_uri()}#{urlencode(question)}"
    done = subprocess.run(
        [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", address],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    rows = []
    for command, best, line in re.findall(r'<tr data-command="([^"]*)"( data-best="")?>(.*?)</tr>', done.stdout):
        name, verdict, *cells = (html.unescape(cell) for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", line))
        row = {"name": name, "verdict": verdict, "command": html.unescape(command), "best": bool(best)}
        rows.append(row | dict(zip(COLUMNS, cells, strict=True)))
    return done.stdout, rows


SMALL = ("BERT base", "GPT-2", "BLOOM 560m", "Qwen3 0.6B", "ViT large")  # predicted in seconds
CELLS = [
    (number, old) for number, row in enumerate(DATA["rows"]) for old in ([False, True] if row["suits"] else [False])
]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "old"), CELLS)
def test_the_stored_figures_are_those_of_the_predictor(number, old):
    """One question for each technique, and for each that suits a T4 another one there."""
    row = DATA["rows"][number]
    if old and row["rung"] == "2_grad_accum":
        pytest.skip("32-bit weights take the same memory on a T4, so that the page has no other figure")
    chance = random.Random(number + 100 * old)
    question = chance.choice([each for each in QUESTIONS if each["model"] in SMALL])
    model = DATA["models"][question["model"]]
    peaks = model["tasks"][question["task"]][question["length"]][f"{number}{'old' * old}"]
    size = int(question["batch"])
    given = {"batch_size": max(16, 2 * size), "eval_batch_tokens": None, "task": question["task"]}
    if row["whole"]:
        given["batch_size"] = size
    peak = predict_memory(
        str(find_shipped_config(model["name"])),
        row["rung"],
        length=int(question["length"]) or 1024,  # not used for images
        micro_batch_size=size,
        gpu="T4" if old else "A100 80GB",
        **given | read_words(row["options"].split()),
    ).tensors
    found = [getattr(peak, part) / 1e6 for part in ON_DEVICE]
    assert found == pytest.approx(peaks[DATA["sizes"].index(size)], abs=max(1, 0.01 * peak.total / 1e6)), question


def stored_peak(row: dict[str, str], question: dict[str, str], gpu: str) -> Peak:
    """Return the stored peak of a row of the page."""
    number = next(n for n, known in enumerate(DATA["rows"]) if row["name"] == f"{known['rung']}: {known['title']}")
    rows = DATA["models"][question["model"]]["tasks"][question["task"]][question["length"]]
    old = find_gpu(gpu).capability < (8, 0)
    parts = rows.get(f"{number}{'old' * old}", rows.get(str(number)))[DATA["sizes"].index(int(question["batch"]))]
    nothing = Peak(**dict.fromkeys(Peak._fields, 0))
    return nothing._replace(**{name: part * 10**6 for name, part in zip(ON_DEVICE, parts, strict=True)})


@in_a_browser
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_the_page_shows_the_stored_figures(tmp_path, seed):
    chance = random.Random(seed)
    question = chance.choice(QUESTIONS)
    gpu = "T4" if seed % 3 == 0 else chance.choice(GPUS).name
    _, rows = ask(question | {"gpu": gpu}, tmp_path)
    assert len(rows) == sum(each["suits"] or find_gpu(gpu).capability >= (8, 0) for each in DATA["rows"])
    row = chance.choice(rows)
    tensors = stored_peak(row, question, gpu)
    low, expected, high = (overhead.needed(tensors) for overhead in assume(find_gpu(gpu).capability))
    values = (tensors.parameters, tensors.gradients, tensors.optimizer_state, tensors.activations + tensors.logits)
    values += (tensors.other, expected - tensors.total, expected, low, high)
    for name, value in zip(COLUMNS[:-1], values, strict=True):
        assert float(row[name]) == pytest.approx(value / 1e9, abs=0.015), (question, row["command"], name)
    memory = find_gpu(gpu).memory
    if abs(high - memory) > 1e7:
        assert (row["verdict"] == "fits") == (high <= memory and float(row["host"]) <= HOST_MEMORY / 1e9)


@in_a_browser
@pytest.mark.slow
def test_the_page_chooses_as_the_planner_does(tmp_path):
    """The planner's answers with the techniques of the page, for all weights and for adapters; rung 11 needs 12 GB."""
    gigabytes, host = "14", 8
    question = {"model": "Qwen3 0.6B", "task": "instruction-tuning", "length": "1024", "batch": "2"}
    words = ["--model", str(find_shipped_config("Qwen/Qwen3-0.6B")), "--task", question["task"]]
    words += ["--micro_batch_size", "2"]
    choices = [(row["rung"], tuple(row["options"].split())) for row in DATA["rows"] if not row["whole"]]
    candidates, problems = read_candidates(choices, words, 1)
    assert not problems
    gpu = find_gpu("A100 80GB")._replace(name="a GPU", memory=card_memory(gigabytes))
    machine = Machine(gpu, host_memory=host * 10**9)
    plans = make_plans(candidates, Samples(1024), machine, True, lambda _: None)
    chosen = [plan.candidate.rung for plan in recommend(plans).values()]
    _, rows = ask(question | {"gpu": gigabytes, "host": host}, tmp_path)
    assert [row["name"].split(":")[0] for row in rows if row["best"]] == chosen
    for plan in plans:
        checkpointed = plan.candidate.settings.activation_checkpointing
        same = [row for row in rows if row["name"].startswith(plan.candidate.rung)]
        [row] = [row for row in same if ("checkpointing" in row["name"]) == checkpointed]
        assert float(row["host"]) == pytest.approx(plan.host / 1e9, rel=0.01)
        assert (row["verdict"] == "fits") == plan.fits


@in_a_browser
def test_the_page_replaces_unknown_values_of_the_address(tmp_path):
    document, rows = ask({"model": "None", "length": "7", "batch": "3", "gpu": "-1"}, tmp_path)
    assert len(rows) == len(DATA["rows"])
    assert "Its memory in GB" in document
    shown = "model None (shown: Qwen3 8B), length 7 (shown: 1024), batch 3 (shown: 1), gpu -1 (shown: another GPU)"
    assert f"The address asks for what this page does not have: {shown}." in document
    assert re.findall(r'<label for="([\w-]+)"', document) == re.findall(
        r'<(?:select|input)[^>]* id="([\w-]+)"', document
    )


@in_a_browser
def test_what_fits_comes_first_and_what_does_not_can_be_hidden(tmp_path):
    document, rows = ask({"gpu": "RTX 4090", "hide": "1"}, tmp_path)
    verdicts = [row["verdict"] for row in rows]
    assert verdicts == sorted(verdicts, key=lambda verdict: {"fits": 0, "may fit": 1}.get(verdict, 2))
    shown = re.findall(r'<span class="fit-verdict[^"]*">. ([^<,]*)', document)
    assert shown == [verdict for verdict in verdicts if verdict in ("fits", "may fit")]
    chosen = next(row for row in rows if row["best"])
    assert document.index("<pre>") < document.index('type="radio"', document.index('type="radio"') + 1), "in its row"
    assert "--dataset answers.jsonl" in chosen["command"]


def test_the_data_hold_what_the_page_promises():
    assert DATA["host_memory"] == HOST_MEMORY / 1e9
    for number, bounds in [
        (0, ANY_GPU),
        *((given[3], assume(find_gpu(given[0]).capability)) for given in DATA["gpus"]),
    ]:
        assert DATA["overhead"][number] == [[each.context, each.workspace, each.fragmentation] for each in bounds]
    sizes = [[gpu.name, gpu.memory // 10**6 / 1000, int(gpu.capability < (8, 0))] for gpu in GPUS]
    assert [given[:3] for given in DATA["gpus"]] == sizes
    assert (FIT / "data.js").stat().st_size < 350_000
    for label, model in DATA["models"].items():
        assert find_shipped_config(model["name"]), label
        for peaks in model["tasks"].values():
            for rows in peaks.values():
                plain = [number for number in rows if number.isdigit()]
                assert sorted(map(int, plain)) == list(range(len(DATA["rows"])))
                assert len(rows) - len(plain) == sum(row["suits"] for row in DATA["rows"][1:])


def test_the_stored_order_is_the_planners():
    """For three rows of the task whose accuracies were measured; rung 17 with a batch of 1 loses accuracy."""
    model = str(find_shipped_config("bigscience/bloom-560m"))
    rows = [
        n for n, row in enumerate(DATA["rows"]) if row["whole"] or row["rung"] in ("2_grad_accum", "5_low_precision")
    ]
    for column, size in enumerate(DATA["sizes"][:2]):
        ranks = []
        for number in rows:
            row = DATA["rows"][number]
            option = "--batch_size" if row["whole"] else "--micro_batch_size"
            choices = [(row["rung"], tuple(row["options"].split()))]
            [candidate], _ = read_candidates(choices, ["--model", model, option, str(size)], 1)
            ranks.append(candidate.rank)
        places = [DATA["order"]["text-classification"][number][column] for number in rows]
        assert sorted(rows, key=dict(zip(rows, places, strict=True)).get) == sorted(
            rows, key=dict(zip(rows, ranks, strict=True)).get
        )


@pytest.mark.parametrize("row", DATA["rows"], ids=lambda row: f"{row['rung']} {row['options']}".strip())
def test_the_rungs_accept_the_options_of_the_page(row):
    try:
        read_settings(row["rung"], ["--model", str(find_shipped_config("Qwen/Qwen3-0.6B")), *row["options"].split()])
    except UserError as error:
        pytest.fail(str(error))
