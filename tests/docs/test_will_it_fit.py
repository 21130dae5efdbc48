"""The page "Will it fit?" shows what `predict_memory` predicts."""

import html
import random
import re
import shutil
import subprocess
import sys
from urllib.parse import urlencode

import pytest
from support.helpers import ROOT, run_script

from fabric_ladder.cli import parse_settings
from fabric_ladder.data.hub import find_shipped_config
from fabric_ladder.options import read_words, script_defaults
from fabric_ladder.planning.candidates import read_candidates
from fabric_ladder.planning.gpus import GPUS, card_memory, find_gpu
from fabric_ladder.planning.measured import accuracy_cost, numerics
from fabric_ladder.planning.overhead import ANY_GPU, assume
from fabric_ladder.planning.plan import HOST_MEMORY
from fabric_ladder.planning.planner import Machine, Samples, make_plans, recommend
from fabric_ladder.planning.run_memory import predict_memory
from fabric_ladder.settings import Settings
from fabric_ladder.techniques.memory import ON_DEVICE, Peak

FIT = ROOT / "docs" / "fit"
sys.path += [str(FIT), str(ROOT / "benchmarks")]
import build  # noqa: E402
import evidence_tables  # noqa: E402
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


def keys_wanted(label: str, task: str) -> set[str]:
    """Return the keys of the figures that a model can have."""
    return build.list_keys(DATA["facts"][label][task]["host"], [])


SMALL = ("BERT base", "GPT-2", "BLOOM 560m", "Qwen3 0.6B", "ViT large")  # predicted in seconds
KEYS = set().union(*(keys_wanted(each["model"], each["task"]) for each in QUESTIONS))
COMPLETE = 19  # rows that have figures for every model
PREDICTED = {key: [each for each in QUESTIONS if each["model"] in SMALL and key in keys_of(each)] for key in KEYS}


@pytest.mark.slow
@pytest.mark.parametrize("key", sorted(key for key, questions in PREDICTED.items() if questions))
def test_the_stored_figures_are_those_of_the_predictor(key):
    """One question for each technique on one GPU, and for each that suits a T4 another one there."""
    number, old = int(key.removesuffix("old")), key.endswith("old")
    row = DATA["rows"][number]
    if not row["single"]:
        pytest.skip("the test of what the page adds for several GPUs has these")
    question = random.Random(number + 100 * old).choice(PREDICTED[key])
    size, peaks = int(question["batch"]), keys_of(question)[key]
    given = {"batch_size": size if row["whole"] else max(16, 2 * size), "eval_batch_tokens": None}
    given |= {"length": int(question["length"]) or 1024, "micro_batch_size": size, "task": question["task"]}
    given |= {"gpu": "T4" if old else "A100 80GB", **read_words(row["options"].split())}
    model = str(find_shipped_config(build.MODELS[question["model"]][0]))
    peak = predict_memory(model, row["rung"], **given).tensors
    found = [getattr(peak, part) / 1e6 for part in ON_DEVICE]
    assert found == pytest.approx(peaks[DATA["sizes"].index(size)], abs=max(1, 0.01 * peak.total / 1e6)), question


@in_a_browser
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_the_page_shows_the_stored_figures(tmp_path, seed):
    chance = random.Random(seed)
    question = chance.choice(QUESTIONS)
    gpu = "T4" if seed % 3 == 0 else chance.choice(GPUS).name
    old = "old" if find_gpu(gpu).capability < (8, 0) else ""
    keys = {f"{row['rung']}: {row['title']}": f"{number}{old * (row['old'] == 'own')}"
            for number, row in enumerate(DATA["rows"])
            if row["single"] and row["base"] is None and (row["old"] or not old)}  # fmt: skip
    rows = [row for row in ask(question | {"gpu": gpu}, tmp_path)[1] if row["name"] in keys]
    assert len(rows) == len({*keys.values()} & keys_of(question).keys())
    row = chance.choice(rows)
    parts = [part * 10**6 for part in keys_of(question)[keys[row["name"]]][DATA["sizes"].index(int(question["batch"]))]]
    tensors = Peak(**dict.fromkeys(Peak._fields, 0) | dict(zip(ON_DEVICE, parts, strict=True)))
    low, expected, high = (overhead.needed(tensors) for overhead in assume(find_gpu(gpu).capability))
    values = (tensors.parameters, tensors.gradients, tensors.optimizer_state, tensors.activations + tensors.logits)
    values += (tensors.other, expected - tensors.total, expected, low, high)
    for name, value in zip(COLUMNS[:9], values, strict=True):
        assert float(row[name]) == pytest.approx(value / 1e9, abs=0.015), (question, row["command"], name)
    if abs(room := find_gpu(gpu).memory - high) > 1e7:
        assert (row["verdict"] == "fits") == (room > 0 and float(row["host"]) <= HOST_MEMORY / 1e9)


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
    config = find_shipped_config(build.MODELS[question["model"]][0])
    words = ["--model", str(config), "--task", question["task"], "--micro_batch_size", "2"]
    shown = [row for number, row in enumerate(DATA["rows"]) if str(row["base"] or number) in keys_of(question)
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
    rows = [row for row in rows if row["name"] in names]
    assert [row["name"].split(":")[0] for row in rows if row["best"]] == chosen
    order = sorted(plans, key=lambda plan: (plan.candidate.rank, plan.needed))
    order = [names[candidates.index(plan.candidate)] for plan in order if plan.fits]
    assert [row["name"] for row in rows if row["verdict"] == "fits"] == order
    for plan in plans:
        [row] = [row for row in rows if row["name"] == names[candidates.index(plan.candidate)]]
        assert float(row["host"]) == pytest.approx(plan.host / 1e9, rel=0.01)


@in_a_browser
@pytest.mark.slow
@pytest.mark.parametrize(
    ("label", "task", "length", "gpu"),
    [("BERT base", build.TEXTS, 512, "T4"), ("BLOOM 560m", build.TEXTS, 512, "RTX 4090"),
     ("Qwen3 0.6B", build.ANSWERS, 1024, "RTX 3070"), ("Qwen3 8B", build.ANSWERS, 1024, "RTX 4090")],
)  # fmt: skip
def test_the_page_chooses_what_the_planner_prints(tmp_path, label, task, length, gpu):
    """The planner also has techniques that the page lacks."""
    words = ["--model", build.MODELS[label][0], "--task", task, "--max_length", length, "--micro_batch_size", 1]
    printed = run_script(ROOT / "scripts" / "plan_memory.py", *words, "--length", length, "--gpu", gpu, cwd=tmp_path)
    planned = [{*line.split()[1:], task} for line in printed.stdout.splitlines() if line.startswith("Run ")]
    _, rows = ask({"model": label, "task": task, "length": length, "batch": 1, "gpu": gpu}, tmp_path)
    left_out = {"--task", "--dataset", "answers.jsonl", "texts.csv"}
    chosen = [{*row["command"].split(), task} - left_out for row in rows if row["best"]]
    assert chosen == [each - left_out for each in planned]


@in_a_browser
def test_the_page_replaces_unknown_values_of_the_address(tmp_path):
    document, rows = ask({"model": "None", "length": "7", "batch": "3", "gpu": "-1", "host": "no"}, tmp_path)
    peaks = DATA["models"]["Qwen3 8B"]["tasks"]["instruction-tuning"]["1024"]
    assert len(rows) == sum(row["single"] and str(row["base"] or n) in peaks for n, row in enumerate(DATA["rows"]))
    assert "Its memory in GB" in document
    shown = "model None (shown: Qwen3 8B), length 7 (shown: 1024), batch 3 (shown: 1), gpu -1 (shown: another GPU), "
    assert f"The address asks for what this page does not have: {shown}host no (shown: 64)." in document
    fields = re.findall(r'<(?:select|input|textarea)[^>]* id="([\w-]+)"', document)
    assert re.findall(r'<label for="([\w-]+)"', document) == fields


@in_a_browser
def test_what_fits_comes_first_and_what_does_not_is_hidden(tmp_path):
    document, rows = ask({"gpu": "RTX 4090"}, tmp_path)
    verdicts = [row["verdict"] for row in rows]
    assert verdicts == sorted(verdicts, key=lambda verdict: {"fits": 0, "may fit": 1}.get(verdict, 2))
    shown = re.findall(r'<span class="fit-verdict[^"]*">. ([^<,]*)', document)
    best = [text for text in shown if "choice" in text]
    assert [shown[0], *best[1:]] == ["planner's choice", "choice for all weights (SGD learns little)"]
    assert len(shown) == sum(verdict in ("fits", "may fit") for verdict in verdicts)
    assert ask({"gpu": "RTX 4090", "show": "1"}, tmp_path)[0].count('class="fit-verdict') == len(rows) > len(shown)
    chosen = next(row for row in rows if row["best"])
    assert document.index("<pre>") < document.index('type="radio"', document.index('type="radio"') + 1), "in its row"
    assert "--dataset answers.jsonl" in chosen["command"]
    assert "at this command's learning rate, 0.0002: 2.3 points (MiniLM" in document


def test_the_data_hold_what_the_page_promises():
    assert DATA["host_memory"] == HOST_MEMORY / 1e9
    bounds = [(0, ANY_GPU), *((given[3], assume(find_gpu(given[0]).capability)) for given in DATA["gpus"])]
    for number, bound in bounds:
        assert DATA["overhead"][number] == [[each.context, each.workspace, each.fragmentation] for each in bound]
    sizes = [[gpu.name, gpu.memory // 10**6 / 1000, int(gpu.capability < (8, 0))] for gpu in GPUS]
    assert [given[:3] for given in DATA["gpus"]] == sizes
    assert (FIT / "data.js").stat().st_size < 350_000
    for label, model in DATA["models"].items():
        for task, peaks in model["tasks"].items():
            for rows in peaks.values():
                assert rows.keys() == next(iter(peaks.values())).keys()
                assert rows.keys() >= {key for key in KEYS if int(key.removesuffix("old")) < COMPLETE}, label
                assert rows.keys() <= keys_wanted(label, task)
        for task, facts in DATA["facts"][label].items():
            assert len(facts["host"]) == len(DATA["order"][task][0][0]) == len(DATA["rows"])


@in_a_browser
@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "gpus", "rank", "size"),  # DDP, FSDP, ZeRO 2, 3 and offloaded; adapters on attention and on all layers
    [(28, 2, 8, 2), (30, 2, 8, 1), (38, 8, 8, 16), (31, 4, 8, 1), (32, 2, 8, 16), (33, 8, 8, 1), (7, 1, 64, 8),
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
def test_without_a_fit_the_page_shows_what_needs_the_least_gpu_memory(tmp_path):
    document, rows = ask({"model": "Llama 3.1 70B", "gpu": "RTX 4090", "host": "32"}, tmp_path)
    assert "Try more CPU memory, shorter texts" in document
    least = min(rows, key=lambda row: float(row["high"]))
    assert least["verdict"] == "too little CPU memory"
    assert f">{least['command']}<" in html.unescape(re.sub("</?span>", "", document))


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
    """A rung's own learning rate in the stored runs is the rate of its command."""
    rates = {}
    for name, rung, _ in evidence_tables.variants():
        if row := evidence_tables.own(name).get(rung):
            rates[str(numerics(vars(Settings()) | row.first.settings))] = row.first.settings["learning_rate"]
    for row in DATA["rows"]:
        options = row["options"].split()
        [candidate], _ = read_candidates([(row["rung"], tuple(options))], [], 1 + row["several"])
        sizes = {"batch_size": 1} if row["whole"] else {}, {}
        costs = [accuracy_cost(vars(candidate.settings) | size) for size in sizes]
        assert [row["speed"], *row["costs"]] == [candidate.speed, *(cost and cost["words"] for cost in costs)]
        if costs[1]:
            words = [*options, *"--model bigscience/bloom-560m --dataset texts.csv --accelerator cpu".split()]
            settings = parse_settings(words, **script_defaults(row["rung"]))
            assert settings.learning_rate == float(row["rate"]) == rates[str(numerics(vars(settings)))]


def test_the_page_links_to_files_of_the_documentation():
    links = re.findall(r'href="(\.\.[^"]*)"', (FIT / "index.html").read_text(encoding="utf-8"))
    assert [(FIT / link).is_file() for link in links] == [True] * 3
