"""A user's mistake in a real process prints one line with the remedy, exits with status 2, and leaves no file."""

import re
import tarfile
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pandas as pd
import pytest
from support.helpers import MODELS, SRC, run_script
from transformers import AutoConfig, AutoModelForSequenceClassification

from fabric_ladder.data.load import load_datasets
from fabric_ladder.settings import DataSettings

# few texts: the synthetic reviews take a second
SMALL = ["--train_samples", "32", "--validation_samples", "8", "--test_samples", "8", "--max_length", "64"]
SMALL += ["--dataset", "good.csv"]
HEADER = re.compile(
    r"No --config and no CUDA GPU|Python \d|2_grad_accum · |Torch CUDA available\? False$"
    r"|\S+: [\d,]+ rows · |--model \S+: its pretrained weights"
)
OFFLINE = dict.fromkeys(["http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"], "http://127.0.0.1:9")
OFFLINE |= {"no_proxy": "", "NO_PROXY": "", "HF_HUB_OFFLINE": ""}
LLAMA = MODELS / "llama-tiny.json"


class Case(NamedTuple):
    """A mistake.

    Attributes:
        args: Arguments. Relative paths are found in the folder of data.
        pattern: Matches the one line.
        kept: Files that may stay: `nothing`, `tokens` or the `run`, if it had begun.
        data: The folder of data; `{m}` is `material`.
    """

    args: str
    pattern: str
    kept: str = "nothing"
    data: str = "{m}"


CASES = {
    # IMDb
    "no network and no data": Case(
        "--dataset imdb",
        r"IMDb is not in \S*/data and cannot .*save https://\S+/aclImdb_v1\.tar\.gz as .*FABRIC_LADDER_DATA.*synthetic",
        data="data",
    ),
    "archive with too few reviews": Case(
        "--dataset imdb", r"few/aclImdb_v1\.tar\.gz holds 4 reviews instead of 50,000", data="{m}/few"
    ),
    # files
    "folder that is called .csv": Case("--dataset good.csv --test_file folder.csv", r"folder\.csv.*director"),
    "unreadable kind": Case("--dataset notes.txt", r"notes\.txt: files of this kind cannot be read, only \.csv"),
    "unknown validation label": Case(
        "--dataset good.csv --validation_file strange.csv", r"validation texts have labels that .* lack: \[5\]"
    ),
    "no Parquet": Case("--dataset no.parquet", r"no\.parquet cannot be read as parquet \(.+\)"),
    "workbook": Case("--dataset book.xlsx", r"book\.xlsx is a workbook, .*: in Excel click File > Save As > CSV UTF-8"),
    # settings
    "misspelt choice": Case("--precision bf16-treu", r"expected 32-true, .* or 64-true; did you mean bf16-true\?"),
    "runs_dir below a file": Case("--runs_dir {m}/good.csv/runs", r"cannot write --runs_dir \S*good\.csv/runs \(.+\)"),
    # models
    "unreachable model": Case("--model no/such-model", r"the model 'no/such-model': it is not a folder, and .*Hub"),
    "config without weights": Case("--from_scratch false", r"quickstart\.json is a config .*--from_scratch true"),
    "folder without tokenizer": Case("--model {m}/no_tokenizer", r"no_tokenizer holds no usable tokenizer"),
    "folder without weights": Case(
        "--model {m}/no_weights --from_scratch false", r"no_weights holds no usable weights", "tokens"
    ),
    "damaged weights": Case(
        "--model {m}/cut_weights --from_scratch false", r"cut_weights holds no usable weights", "tokens"
    ),
    # training
    "loss that turns NaN": Case(
        "--learning_rate 1e30", r"loss is \w+ at epoch 1, batch 2 \(training samples \d+(, \d+){15}\): .*--lear", "run"
    ),
    "NaN in validation": Case(
        "--learning_rate 1e30 --train_samples 16", r"loss is \w+ at .*validation.*--learning_rate", "run"
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    """Return a folder with every bad file, and a good one."""
    folder = tmp_path_factory.mktemp("bad") / "material"
    folder.mkdir()
    good = pd.DataFrame({"text": [f"review {index}" for index in range(64)], "label": [0, 1] * 32})
    good.to_csv(folder / "good.csv", index=False)
    good.assign(label=[0, 5] * 32).to_csv(folder / "strange.csv", index=False)
    (folder / "book.xlsx").write_bytes(b"PK\x03\x04")
    (folder / "no.parquet").write_bytes(b"noise" * 400)
    (folder / "notes.txt").write_text("a text")
    (folder / "folder.csv").mkdir()
    (folder / "few").mkdir()
    with tarfile.open(folder / "few" / "aclImdb_v1.tar.gz", "w:gz") as tar:
        for review in ("train/pos/0_9.txt", "train/neg/0_1.txt", "test/pos/0_9.txt", "test/neg/0_1.txt"):
            tar.add(folder / "notes.txt", f"aclImdb/{review}")

    settings = DataSettings(dataset=str(folder / "good.csv"), model=str(LLAMA), cache_dir=str(folder.parent / "cache"))
    tokenizer = load_datasets(settings).tokenizer
    model = AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained(LLAMA))
    for name in ("no_tokenizer", "no_weights", "cut_weights"):
        model.save_pretrained(folder / name)
    for name in ("no_weights", "cut_weights"):
        tokenizer.save_pretrained(folder / name)
    (folder / "no_weights" / "model.safetensors").unlink()
    weights = folder / "cut_weights" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    return folder


@pytest.fixture(scope="module")
def processes(request, material, tmp_path_factory):
    """Start the processes of all selected cases, two at a time; return working folder and future by case."""
    pool = ThreadPoolExecutor(2)
    done = {}
    for name in [item.callspec.params["name"] for item in request.session.items if item.path == request.path]:
        cwd = tmp_path_factory.mktemp("case")
        args = [*SMALL, *CASES[name].args.format(m=material).split()]
        own = {"FABRIC_LADDER_DATA": CASES[name].data.format(m=material), "FABRIC_LADDER_CACHE": str(cwd / "cache")}
        own |= {"HF_HOME": str(material.parent / "hub"), "CUDA_VISIBLE_DEVICES": ""}
        done[name] = cwd, pool.submit(run_script, SRC / "2_grad_accum.py", *args, cwd=cwd, **own, **OFFLINE)
    yield done
    pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("name", CASES)
def test_bad_input_prints_one_line_and_leaves_nothing(processes, material, name):
    cwd, future = processes[name]
    case, process = CASES[name], future.result()
    assert process.returncode == 2, process.stderr[-2000:]
    assert re.fullmatch(r"error: .+\n", process.stderr)
    assert re.search(case.pattern, process.stderr.rstrip())
    if case.kept != "run":
        assert [line for line in process.stdout.splitlines() if not HEADER.match(line)] == []
    left = {str(path.relative_to(cwd)) for path in cwd.rglob("*") if path.suffix != ".lock"}
    allowed = {"nothing": r"cache(/tokenised)?", "tokens": r"cache.*", "run": r"(cache|runs).*"}[case.kept]
    assert [path for path in left if not re.fullmatch(allowed, path) or "unfinished" in path] == []
