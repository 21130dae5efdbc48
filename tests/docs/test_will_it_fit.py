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
from fabric_ladder.planning.measured import SPEEDS
from fabric_ladder.planning.overhead import ANY_GPU, assume
from fabric_ladder.planning.plan import HOST_MEMORY
from fabric_ladder.planning.planner import Machine, Samples, make_plans, recommend
from fabric_ladder.planning.run_memory import predict_memory
from fabric_ladder.techniques.memory import ON_DEVICE, Peak

FIT = ROOT / "docs" / "fit"
sys.path.append(str(FIT))
import build  # noqa: E402
import stored  # noqa: E402

DATA = stored.read()
FLAGS = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --dump-dom".split()
COLUMNS = "weights|gradients|optimizer state|activations|other|CUDA|expected|low|high|host|speed|cost".split("|")
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
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    rows = []
    for command, best, line in re.findall(r'<tr data-command="([^"]*)"( data-best="")?>(.*?)</tr>', done.stdout):
        name, verdict, *cells = (html.unescape(cell) for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", line))
        row = {"name": name, "verdict": verdict, "command": html.unescape(command), "best": bool(best)}
        rows.append(row | dict(zip(COLUMNS, cells, strict=True)))
    return done.stdout, rows


def keys_of(question: dict[str, str]) -> dict[str, list]:
    """Return the stored peaks by the key of the row."""
    return DATA["models"][question["model"]]["tasks"][question["task"]][question["length"]]


SMALL = ("BERT base", "GPT-2", "BLOOM 560m", "Qwen3 0.6B", "ViT large")  # predicted in seconds
KEYS = build.list_keys([])
COMPLETE = 19  # rows that have figures for every model
PREDICTED = {key: [each for each in QUESTIONS if each["model"] in SMALL and key in keys_of(each)] for key in KEYS}


@pytest.mark.slow
@pytest.mark.parametrize("key", sorted(key for key, questions in PREDICTED.items() if questions))
def test_the_stored_figures_are_those_of_the_predictor(key):
    """One question for each technique on one GPU, and for each that suits a T4 another one there."""
    number, old = int(key.removesuffix("old")), key.endswith("old")
    row = DATA["rows"][number]
    if not row["single"]:
        pytest.skip("the passes of ZeRO alone are stored; what the page adds to them is tested below")
    question = random.Random(number + 100 * old).choice(PREDICTED[key])
    model = DATA["models"][question["model"]]
    peaks = keys_of(question)[key]
    size = int(question["batch"])
    given = {"batch_size": size if row["whole"] else max(16, 2 * size), "eval_batch_tokens": None}
    given |= {"length": int(question["length"]) or 1024, "micro_batch_size": size, "task": question["task"]}
    given |= {"gpu": "T4" if old else "A100 80GB", **read_words(row["options"].split())}
    peak = predict_memory(str(find_shipped_config(model["name"])), row["rung"], **given).tensors
    found = [getattr(peak, part) / 1e6 for part in ON_DEVICE]
    assert found == pytest.approx(peaks[DATA["sizes"].index(size)], abs=max(1, 0.01 * peak.total / 1e6)), question


def test_blocks_in_4_bits_take_the_cpu_memory_that_the_planner_names():
    """The figure is in the answer of docs/techniques/24_streamed_layers.md."""
    hosts = DATA["facts"]["Qwen3 8B"]["instruction-tuning"]["host"]
    [number] = [number for number, row in enumerate(DATA["rows"]) if row["rung"] == "24_streamed_layers"]
    assert hosts[number] == [pytest.approx(8080, rel=0.01)]


def stored_peak(row: dict[str, str], question: dict[str, str], gpu: str) -> Peak:
    """Return the stored peak of a row of the page."""
    number = next(n for n, known in enumerate(DATA["rows"]) if row["name"] == f"{known['rung']}: {known['title']}")
    rows = keys_of(question)
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
    old = "old" if find_gpu(gpu).capability < (8, 0) else ""
    keys = [f"{number}{old * (row['old'] == 'own')}" for number, row in enumerate(DATA["rows"])
            if row["single"] and (row["old"] or not old)]  # fmt: skip
    assert len(rows) == len({*keys} & keys_of(question).keys())
    row = chance.choice(rows)
    tensors = stored_peak(row, question, gpu)
    low, expected, high = (overhead.needed(tensors) for overhead in assume(find_gpu(gpu).capability))
    values = (tensors.parameters, tensors.gradients, tensors.optimizer_state, tensors.activations + tensors.logits)
    values += (tensors.other, expected - tensors.total, expected, low, high)
    for name, value in zip(COLUMNS[:9], values, strict=True):
        assert float(row[name]) == pytest.approx(value / 1e9, abs=0.015), (question, row["command"], name)
    memory = find_gpu(gpu).memory
    if abs(high - memory) > 1e7:
        assert (row["verdict"] == "fits") == (high <= memory and float(row["host"]) <= HOST_MEMORY / 1e9)


@in_a_browser
@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpus", "question", "gigabytes", "host"),
    [
        (1, {"model": "Qwen3 0.6B", "task": "instruction-tuning", "length": "1024", "batch": "2"}, "14", 8),
        (2, {"model": "BLOOM 560m", "task": "text-classification", "length": "512", "batch": "2"}, "10", 16),
    ],
)
def test_the_page_chooses_as_the_planner_does(tmp_path, gpus, question, gigabytes, host):
    """The planner's answers with the techniques of the page, for all weights and for adapters; rung 11 needs 12 GB."""
    name = DATA["models"][question["model"]]["name"]
    words = ["--model", str(find_shipped_config(name)), "--task", question["task"], "--micro_batch_size", "2"]
    keys = keys_of(question)
    shown = [row for number, row in enumerate(DATA["rows"]) if str(row["base"] or number) in keys
             and not row["whole"] and row["single" if gpus == 1 else "several"]]  # fmt: skip
    choices = [(row["rung"], tuple(row["options"].split())) for row in shown]
    names = [f"{row['rung']}: {row['title']}" for row in shown]
    candidates, problems = read_candidates(choices, words, gpus)
    assert not problems
    gpu = find_gpu("A100 80GB")._replace(name="a GPU", memory=card_memory(gigabytes))
    machine = Machine(gpu, gpus, host_memory=host * 10**9)
    plans = make_plans(candidates, Samples(int(question["length"])), machine, True, lambda _: None)
    chosen = [plan.candidate.rung for plan in recommend(plans).values()]
    _, rows = ask(question | {"gpus": gpus, "gpu": gigabytes, "host": host}, tmp_path)
    if gpus > 1:  # the planner has only the techniques for several GPUs here
        rows = [row for row in rows if row["name"].startswith(("9_", "10_", "12_"))]
    assert [row["name"].split(":")[0] for row in rows if row["best"]] == chosen
    for plan in plans:
        [row] = [row for row in rows if row["name"] == names[candidates.index(plan.candidate)]]
        assert float(row["host"]) == pytest.approx(plan.host / 1e9, rel=0.01)
        assert (row["verdict"] == "fits") == plan.fits


@in_a_browser
def test_the_page_replaces_unknown_values_of_the_address(tmp_path):
    document, rows = ask({"model": "None", "length": "7", "batch": "3", "gpu": "-1"}, tmp_path)
    peaks = DATA["models"]["Qwen3 8B"]["tasks"]["instruction-tuning"]["1024"]
    assert len(rows) == sum(row["single"] and str(row["base"] or n) in peaks for n, row in enumerate(DATA["rows"]))
    assert "Its memory in GB" in document
    shown = "model None (shown: Qwen3 8B), length 7 (shown: 1024), batch 3 (shown: 1), gpu -1 (shown: another GPU)"
    assert f"The address asks for what this page does not have: {shown}." in document
    fields = re.findall(r'<(?:select|input|textarea)[^>]* id="([\w-]+)"', document)
    assert re.findall(r'<label for="([\w-]+)"', document) == fields


@in_a_browser
def test_what_fits_comes_first_and_what_does_not_can_be_hidden(tmp_path):
    document, rows = ask({"gpu": "RTX 4090", "hide": "1"}, tmp_path)
    verdicts = [row["verdict"] for row in rows]
    assert verdicts == sorted(verdicts, key=lambda verdict: {"fits": 0, "may fit": 1}.get(verdict, 2))
    shown = re.findall(r'<span class="fit-verdict[^"]*">. ([^<,]*)', document)
    expected = ["planner's choice" if row["best"] else row["verdict"] for row in rows]
    assert shown == [verdict for verdict in expected if verdict in ("fits", "may fit", "planner's choice")]
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
                assert rows.keys() == next(iter(peaks.values())).keys()
                assert rows.keys() >= {key for key in KEYS if int(key.removesuffix("old")) < COMPLETE}, label
                assert rows.keys() <= KEYS
        for task, facts in DATA["facts"][label].items():
            assert len(facts["host"]) == len(DATA["order"][task][0][0]) == len(DATA["rows"])


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
        places = [DATA["order"]["text-classification"][0][0][number][column] for number in rows]
        assert sorted(rows, key=dict(zip(rows, places, strict=True)).get) == sorted(
            rows, key=dict(zip(rows, ranks, strict=True)).get
        )


@pytest.mark.parametrize("row", DATA["rows"], ids=lambda row: f"{row['rung']} {row['options']}".strip())
def test_the_rungs_accept_the_options_of_the_page(row):
    try:
        read_settings(row["rung"], ["--model", str(find_shipped_config("Qwen/Qwen3-0.6B")), *row["options"].split()])
    except UserError as error:
        pytest.fail(str(error))


@in_a_browser
@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "gpus", "rank", "size"),  # DDP, FSDP, ZeRO 2, 3 and offloaded; adapters on attention and on all layers
    [(28, 2, 8, 2), (30, 2, 8, 1), (30, 8, 8, 16), (31, 4, 8, 1), (32, 2, 8, 16), (33, 8, 8, 1), (7, 1, 64, 8),
     (10, 1, 64, 1), (20, 1, 64, 8), (20, 1, 4, 1)],
)  # fmt: skip
def test_what_the_page_adds_for_gpus_and_ranks_agrees_with_the_predictor(tmp_path, number, gpus, rank, size):
    known, name = DATA["rows"][number], find_shipped_config("bigscience/bloom-560m")
    question = {"model": "BLOOM 560m", "task": "text-classification", "length": 512, "gpu": "A100 80GB"}
    _, rows = ask(question | {"gpus": gpus, "rank": rank, "batch": size}, tmp_path)
    [row] = [row for row in rows if row["name"] == f"{known['rung']}: {known['title']}"]
    settings = read_words(known["options"].split()) | {"batch_size": max(16, 2 * size * gpus)}
    settings |= {"lora_rank": rank} if known["adapters"] else {}
    given = {"length": 512, "micro_batch_size": size, "gpus": gpus, "gpu": "A100 80GB", "eval_batch_tokens": None}
    found = predict_memory(str(name), known["rung"], **given, **settings)
    tensors = sum(float(row[part]) for part in COLUMNS[:5])
    assert tensors == pytest.approx(found.tensors.total / 1e9, rel=0.02, abs=0.03)
    assert float(row["expected"]) == pytest.approx(found.expected / 1e9, rel=0.02, abs=0.03)


@in_a_browser
def test_a_pasted_config_is_found_in_the_list_or_given_to_the_planner(tmp_path):
    config = find_shipped_config("Qwen/Qwen3-0.6B").read_text(encoding="utf-8")
    document, rows = ask({"config": config, "length": "512"}, tmp_path)
    assert "The pasted config.json has the shape of Qwen3 0.6B." in document
    assert "--model Qwen/Qwen3-0.6B" in rows[0]["command"]
    document, rows = ask({"config": config.replace("151936", "1000"), "gpus": "2", "rank": "16"}, tmp_path)
    assert not rows
    command = (
        "python scripts/plan_memory.py --model config.json --task instruction-tuning --max_length 1024 --length 1024 "
        '--micro_batch_size 1 --gpu "RTX 4090" --devices 2 --host_memory 128GB --lora_rank 16'
    )
    assert f">{command}<" in html.unescape(re.sub("</?span>", "", document))
    document, _ = ask({"config": "{}"}, tmp_path)
    assert "The pasted JSON has no model_type" in document


def test_measured_facts_are_the_planners():
    rows = {(row["rung"], row["options"]): row for row in DATA["rows"]}
    assert all(row["speed"] == (SPEEDS.get(rung) if not options else None) for (rung, options), row in rows.items())
    assert rows["13_lora", ""]["cost"] == rows["9_ddp", ""]["cost"] == ""
    assert "points" in rows["13_lora", "--lora_targets attention"]["cost"]
