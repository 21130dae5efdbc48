"""What a user can get wrong, each in a real process: one line that says what to mend, status 2, and nothing left."""

import io
import re
import tarfile
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import pandas as pd
import pytest
from support.helpers import MODELS, SRC, run_script, tiny_model
from transformers import AutoConfig, AutoModelForSequenceClassification

from fabric_ladder.settings import DataSettings
from local_dataset_utilities import load_datasets

SMALL = ["--train_samples", "32", "--validation_samples", "8", "--test_samples", "8", "--max_length", "64"]
HEADER = re.compile(
    r"No --config and no CUDA GPU|Python \d|2_grad_accum · |Torch CUDA available\? False$"
    r"|--model \S+: its pretrained weights"
)
OFFLINE = dict.fromkeys(["http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"], "http://127.0.0.1:9")
OFFLINE |= {"no_proxy": "", "NO_PROXY": "", "HF_HUB_OFFLINE": ""}
LLAMA = MODELS / "llama-tiny.json"


class Case(NamedTuple):
    """Arguments, and what the one line must match; paths are looked for in `material` through `data_dir`."""

    args: str
    pattern: str
    kept: str = "nothing"  # `tokens` when they were made before the fault showed, `run` when training had begun


CASES = {
    # IMDb
    "no network and no data": Case(
        "--dataset imdb --data_dir data",
        r"IMDb is not in \S*/data and cannot .*save https://\S+/aclImdb_v1\.tar\.gz as .*FABRIC_LADDER_DATA.*synthetic"
    ),
    "truncated archive": Case("--dataset imdb --data_dir {m}/truncated", r"truncated/aclImdb_v1.* is damaged \(.+\)"),
    "corrupt archive": Case("--dataset imdb --data_dir {m}/corrupt", r"corrupt/aclImdb_v1.* is damaged \(.+\)"),
    "archive with too few reviews": Case(
        "--dataset imdb --data_dir {m}/few", r"few/aclImdb_v1\.tar\.gz holds 8 reviews instead of 50,000"
    ),
    "folder with too few reviews": Case(
        "--dataset imdb --data_dir {m}/unpacked", r"unpacked/aclImdb holds 4 reviews instead of 50,000"
    ),
    # files
    "missing file": Case("--dataset nowhere.csv", r"no file or folder nowhere\.csv here or in \S*material"),
    "folder that is called .csv": Case("--dataset good.csv --test_file folder.csv", r"folder\.csv.*director"),
    "unreadable kind": Case("--dataset notes.txt", r"notes\.txt: files of this kind cannot be read, only \.csv"),
    "missing text column": Case("--dataset columns.csv", r"columns\.csv has no column 'text', only review, label: set"),
    "empty texts": Case("--dataset empty_text.csv", r"2 of 20 rows of .* \(row 3: no text; row 5: no text\)"),
    "empty labels": Case("--dataset empty_label.csv", r"1 of 20 rows of .*empty_label\.csv .* \(row 4: no label\)"),
    "a single class": Case("--dataset one_class.csv", r"same label, 1: there is nothing to learn"),
    "decimal labels": Case("--dataset decimal.csv", r"column 'label' holds decimal numbers, not integers or strings"),
    "unknown validation label": Case(
        "--dataset good.csv --validation_file strange.csv", r"validation texts have labels that .* lack: \[5\]"
    ),
    "not UTF-8": Case("--dataset latin1.csv", r"latin1\.csv is not UTF-8 \(byte 0xe9\): convert it"),
    "null": Case("--dataset null.json", r"null\.json holds no rows that can be read \(line 1: not a JSON object\)"),
    "broken JSON": Case("--dataset broken.json", r"broken\.json cannot be read as json \(.+\)"),
    "ragged CSV": Case(
        "--dataset ragged.csv", r"ragged\.csv cannot be read as csv \(.*line 3"
    ),
    "empty file": Case("--dataset nothing.csv", r"nothing\.csv cannot be read as csv \(No columns"),
    "no Parquet": Case(
        "--dataset no.parquet", r"no\.parquet cannot be read as parquet \(.+\)"
    ),
    # settings
    "misspelt setting": Case("--bach_size 3", r"there is no setting 'bach_size'; did you mean --batch_size"),
    "misspelt in YAML": Case("--config {m}/misspelt.yaml", r"misspelt\.yaml: .*'lerning_rate'; did you mean --learn"),
    "bad YAML": Case("--config {m}/bad.yaml", r"cannot read \S*bad\.yaml as YAML \(.+"),
    "micro batch above batch": Case("--micro_batch_size 32", r"--micro_batch_size 32 is above --batch_size 16: .*"),
    "more rows than samples": Case("--packing true --pack_rows 32", r"--pack_rows 32 is above --batch_size 16: .*"),
    "rows of two shapes": Case(
        "--packing true --pack_rows 2 --micro_batch_tokens 512",
        r"--pack_rows 2 takes the place of --micro_batch_tokens: leave one of them out",
    ),
    "rows without packing": Case("--pack_rows 2", r"--pack_rows has no effect without --packing true"),
    "too long": Case(f"--model {LLAMA} --max_length 2000", r"--max_length 2000 is beyond the 1024 positions .*1024$"),
    "16-mixed on a CPU": Case("--precision 16-mixed", r"--precision 16-mixed needs a CUDA GPU; use .*bf16-mix"),
    "no GPU": Case("--accelerator cuda", r"--accelerator cuda: PyTorch finds no CUDA GPU here; use --accelerator cpu"),
    "runs_dir below a file": Case("--runs_dir {m}/good.csv/runs", r"cannot write --runs_dir \S*good\.csv/runs \(.+\)"),
    "cache_dir below a file": Case("--cache_dir {m}/good.csv/cache", r"cannot write \S*good\.csv/cache.*--cache_dir"),
    # models
    "missing folder": Case("--model runs/10_fsdp/1/model", r"there is no folder runs/10_fsdp/1/model"),
    "unreachable model": Case("--model no/such-model", r"the model 'no/such-model': it is not a folder, and .*Hub"),
    "config without weights": Case("--from_scratch false", r"quickstart\.json is a config .*--from_scratch true"),
    "folder without tokenizer": Case("--model {m}/no_tokenizer", r"no_tokenizer holds no usable tokenizer"),
    "BERT without tokenizer": Case(
        "--model {m}/bert", r"bert holds no usable tokenizer"
    ),
    "folder without weights": Case(
        "--model {m}/no_weights --from_scratch false", r"no_weights holds no usable weights", "tokens"
    ),
    "damaged weights": Case(
        "--model {m}/cut_weights --from_scratch false", r"cut_weights holds no usable weights", "tokens"
    ),
    "damaged tokenizer": Case("--tokenizer {m}/cut_tokenizer", r"cut_tokenizer holds no usable tokenizer"),
    # training
    "loss that turns NaN": Case(
        "--learning_rate 1e30", r"loss is \w+ at epoch 1, batch 2 \(training samples \d+(, \d+){15}\): .*--lear", "run"
    ),
    "NaN in validation": Case(
        "--learning_rate 1e30 --train_samples 16", r"loss is \w+ at .*validation.*--learning_rate", "run"
    ),
}  # fmt: skip


def write_archive(path, members):
    path.parent.mkdir()
    with tarfile.open(path, "w:gz") as tar:
        for name in members:
            content = np.random.default_rng(0).bytes(500).hex().encode()
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return path


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    """A folder with every bad file, and a good one."""
    folder = tmp_path_factory.mktemp("bad") / "material"
    folder.mkdir()
    good = pd.DataFrame({"text": [f"review {index}" for index in range(20)], "label": [0, 1] * 10})

    def csv(name, **columns):
        good.assign(**columns).to_csv(folder / name, index=False)

    csv("good.csv")
    csv("empty_text.csv", text=["a", "b", "", "c", "  ", *"defghijklmnopqr"])
    csv("empty_label.csv", label=["0", "1", "0", "", *"0101010101010101"])
    csv("one_class.csv", label=1)
    csv("decimal.csv", label=[0.5, 1.5] * 10)
    csv("strange.csv", label=[0, 5] * 10)
    good.rename(columns={"text": "review"}).to_csv(folder / "columns.csv", index=False)
    (folder / "latin1.csv").write_bytes("text,label\ncafé,1\n".encode("latin-1"))
    (folder / "broken.json").write_text('[{"text": "a", "label": ')
    (folder / "null.json").write_text("null")
    (folder / "ragged.csv").write_text("text,label\na,1\nb,0,c,d\n")
    (folder / "nothing.csv").touch()
    (folder / "no.parquet").write_bytes(np.random.default_rng(0).bytes(2000))
    (folder / "notes.txt").write_text("a text")
    (folder / "folder.csv").mkdir()
    (folder / "bad.yaml").write_text("seed: [1\nepochs: 2")
    (folder / "misspelt.yaml").write_text("lerning_rate: 0.1")

    names = [f"aclImdb/{split}/{kind}/{number}_1.txt" for split in ("train", "test") for kind in ("pos", "neg")
             for number in range(2)]  # fmt: skip
    whole = write_archive(folder / "few" / "aclImdb_v1.tar.gz", names).read_bytes()
    noise = np.random.default_rng(0).bytes(9999)
    for name, content in (("truncated", whole[: len(whole) // 2]), ("corrupt", noise)):
        (folder / name).mkdir()
        (folder / name / "aclImdb_v1.tar.gz").write_bytes(content)
    with tarfile.open(folder / "few" / "aclImdb_v1.tar.gz") as tar:
        tar.extractall(folder / "unpacked", [f"aclImdb/train/neg/{number}_1.txt" for number in range(2)], filter="data")
        tar.extractall(folder / "unpacked", [f"aclImdb/test/pos/{number}_1.txt" for number in range(2)], filter="data")

    settings = DataSettings(dataset=str(folder / "good.csv"), model=str(LLAMA), cache_dir=str(folder.parent / "cache"))
    tokenizer = load_datasets(settings).tokenizer
    model = AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained(LLAMA))
    for name in ("no_tokenizer", "no_weights", "cut_weights"):
        model.save_pretrained(folder / name)
    for name in ("no_weights", "cut_weights", "cut_tokenizer"):
        tokenizer.save_pretrained(folder / name)
    tiny_model("bert").save_pretrained(folder / "bert")
    (folder / "no_weights" / "model.safetensors").unlink()
    for path in (folder / "cut_weights" / "model.safetensors", folder / "cut_tokenizer" / "tokenizer.json"):
        path.write_bytes(path.read_bytes()[:1000])
    return folder


@pytest.fixture(scope="module")
def processes(request, material, tmp_path_factory):
    """The working folder and the future process of every case that is asked for, two at a time."""
    pool = ThreadPoolExecutor(2)
    done = {}
    for name in [item.callspec.params["name"] for item in request.session.items if item.path == request.path]:
        cwd = tmp_path_factory.mktemp("case")
        args = [*SMALL, *CASES[name].args.format(m=material).split()]
        own = {"FABRIC_LADDER_DATA": str(material), "FABRIC_LADDER_CACHE": str(cwd / "cache")}
        own |= {"HF_HOME": str(material.parent / "hub"), "CUDA_VISIBLE_DEVICES": ""}
        done[name] = cwd, pool.submit(run_script, SRC / "2_grad_accum.py", *args, cwd=cwd, **own, **OFFLINE)

    yield done
    pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_answered_in_one_line_and_leaves_nothing(processes, material, name):
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
