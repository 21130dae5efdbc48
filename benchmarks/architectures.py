"""Train a tiny random model of every architecture of the installed transformers, for docs/techniques/options.md.

    python benchmarks/architectures.py [--only NAME …] [--every N] [--task TASK …] [--jobs 2] [--page]

The page describes the runs and what each column compares. A cell is yes, the reason of a refusal, the largest
difference of two losses, or an error.
"""

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import random
import re
import runpy
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import common  # first import: it makes the project importable
import numpy as np
import pandas as pd
import tiny_models
import torch
import transformers
from lightning import Fabric
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast
from transformers.models.auto import modeling_auto as auto

from fabric_ladder import build_dataloaders, parse_settings
from fabric_ladder.data.load import load_datasets
from fabric_ladder.data.splits import IGNORED
from fabric_ladder.errors import first_line
from fabric_ladder.techniques.advice import explain

OUT = common.RESULTS / "architectures.json"
TASKS = {  # mappings of transformers with their auto classes; files of data
    "text-classification": ({"SEQUENCE_CLASSIFICATION": "SequenceClassification"}, "texts.jsonl"),
    "token-classification": ({"TOKEN_CLASSIFICATION": "TokenClassification"}, "words.jsonl"),
    "instruction-tuning": ({"SEQ_TO_SEQ_CAUSAL_LM": "Seq2SeqLM", "CAUSAL_LM": "CausalLM"}, "instructions.jsonl"),
    "image-classification": ({"IMAGE_CLASSIFICATION": "ImageClassification"}, "images"),
}
BODIES = ("MaskedLM", "CausalLM", "Seq2SeqLM")  # checkpoints that are fine-tuned with another head
EPS = 1e-4  # of Adam: the usual 1e-8 turns rounding errors of gradients that are 0 into whole steps
COMMON = "--precision 32-true --batch_size 4 --learning_rate 1e-3 --log_every 4 --threads 1 --accelerator cpu".split()
COMMON += f"--config quickstart.yaml --from_scratch false --pad_to_multiple_of 1 --eps {EPS}".split()
RUNGS = {  # columns: rung, options
    "7": ("7_grad_checkpointing", ()),
    "13": ("13_lora", ("--lora_dropout", "0")),
    "14": ("14_qlora", ("--lora_dropout", "0")),
    "15": ("15_packing", ("--micro_batch_tokens", "64")),
    "17": ("17_step_in_backward", ("--kahan_summation", "false")),
    "18": ("18_low_bit_optimizer", ("--kahan_summation", "false")),
}
COLUMNS = ("trains", "padded", *RUNGS, "saves", "resumes")
LESS = {"token-classification": {"7", "14", "17", "18", "resumes"}, "image-classification": {"padded", "15"}}
TOLERANCE = 2e-5  # of a loss near 1, after up to 2 steps
LIMIT = 240  # seconds for an architecture
LABELS = ("bad", "good")
WORDS = ["<pad>", "<unk>", "<s>", "</s>", "<mask>", *LABELS, *(f"w{number}" for number in range(50))]
Record = tuple[list[float], float, float]  # losses, test loss and test accuracy of a run


def write_data(folder: Path) -> None:
    """Write 12 samples for training, 4 for validation and 8 for the test, of each task."""
    for split, count, seed in (("train", 12, 1), ("validation", 4, 2), ("test", 8, 3)):
        draw = random.Random(seed)
        files: dict[str, list] = {name: [] for _, name in TASKS.values() if name != "images"}
        for index in range(count):
            words = [draw.choice(WORDS[7:]) for _ in range(draw.randint(3, 20))]
            label = draw.choice(LABELS)
            words[draw.randrange(len(words))] = label
            tags = ["good" if word in ("good", "w1", "w2", "w3") else "bad" for word in words]
            files["texts.jsonl"].append({"text": " ".join(words), "label": label})
            files["words.jsonl"].append({"tokens": words, "ner_tags": tags})
            files["instructions.jsonl"].append({"instruction": " ".join(words), "output": " ".join(words[:3])})
            pixels = np.random.default_rng(100 * seed + index).integers(0, 128, (tiny_models.IMAGE,) * 2 + (3,))
            path = folder / "images" / split / LABELS[index % 2] / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray((pixels + 100 * (index % 2)).astype(np.uint8)).save(path)
        for name, rows in files.items():
            (folder / f"{split}.{name}").write_text("".join(json.dumps(row) + "\n" for row in rows))


def data_options(task: str, folder: Path) -> list[str]:
    """Return the options that choose the task and its data."""
    _, name = TASKS[task]
    if name == "images":
        return ["--task", task, "--dataset", str(folder / name), "--image_size", str(tiny_models.IMAGE)]
    files = ("--dataset", "train"), ("--validation_file", "validation"), ("--test_file", "test")
    chosen = [word for option, split in files for word in (option, str(folder / f"{split}.{name}"))]
    return ["--task", task, *chosen, "--max_length", "32" if name != "instructions.jsonl" else "128"]


def tokenizer(task: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of words; all texts but instructions end with the end token."""
    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    single = "<s> $A" if task == "instruction-tuning" else "<s> $A </s>"
    inner.post_processor = processors.TemplateProcessing(single=single, special_tokens=[("<s>", 2), ("</s>", 3)])
    named = {"bos_token": "<s>", "eos_token": "</s>", "cls_token": "<s>", "sep_token": "</s>", "mask_token": "<mask>"}
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", unk_token="<unk>", **named)


def classes(task: str) -> dict[str, type]:
    """Return the architectures of a task, each with its auto class."""
    return {
        name: getattr(transformers, f"AutoModelFor{kind}")
        for mapping, kind in TASKS[task][0].items()
        for name in getattr(auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES")
    }


# Runs


def run(rung: str, options: list[str], runs: Path, number: int) -> tuple[Record, bool]:
    """Run a rung in this process; return the figures of its newest run, or of one, and whether padding is named.

    Args:
        rung: Its name.
        options: Its command line, without the folder.
        runs: Folder of the runs.
        number: Of the run; 0: the newest one.
    """
    printed = io.StringIO()
    sys.argv = [str(common.ROOT / "src" / f"{rung}.py"), *options, "--runs_dir", str(runs)]
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
        runpy.run_path(sys.argv[0], run_name="__main__")
    folder = runs / rung / str(number or len([*(runs / rung).iterdir()]))
    losses = pd.read_csv(folder / "metrics.csv")["loss"].dropna().tolist()
    results = json.loads((folder / "run.json").read_text(encoding="utf-8"))["results"]
    record = losses, results["test_loss"], results["test_accuracy"]
    return record, bool(re.search("changes? the (results|losses)", printed.getvalue()))


def difference(found: Record, expected: Record, tolerance: float = TOLERANCE) -> str:
    """Return yes for equal losses, or the largest difference."""
    pairs = [*zip(found[0], expected[0], strict=True), (found[1], expected[1])]
    return compared(max(abs(a - b) / max(1, abs(b)) for a, b in pairs), tolerance)


def compared(distance: float, tolerance: float = TOLERANCE) -> str:
    """Return the words for a difference of losses."""
    return "yes" if distance <= tolerance else f"differs by {distance:.1e}"


class Plain:
    """The loop and the evaluation of plain transformers on the samples that rungs read: texts one at a time."""

    def __init__(self, kind: type, model: Path, options: list[str]):
        settings = parse_settings(options)
        self.kind, self.model, self.causal = kind, model, settings.task == "instruction-tuning"
        data = load_datasets(settings)
        train, _, test = build_dataloaders(Fabric(accelerator="cpu", devices=1), data, settings)
        if settings.task.startswith("image"):
            self.batches = [[part.inputs for part in batch.micro_batches] for batch in train]
            self.test = [part.inputs for part in test]
        else:
            self.batches = [[tokens(data.splits["train"][row]) for row in batch.samples] for batch in train]
            self.test = [tokens(row) for row in data.splits["test"]]

    def train(self) -> list[float]:
        """Return the losses of Adam, each of an effective batch."""
        model = self.load(self.model).train()
        optimizer, losses = torch.optim.Adam(model.parameters(), 1e-3, eps=EPS), []
        for batch in self.batches:
            parts = [self.run(model, sample) for sample in batch]
            loss = cross_entropy(*map(torch.cat, zip(*parts, strict=True)))
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return losses

    def evaluate(self, folder: Path) -> tuple[float, float]:
        """Return loss and accuracy of a saved model."""
        model = self.load(folder).eval()
        with torch.no_grad():
            logits, labels = map(torch.cat, zip(*(self.run(model, sample) for sample in self.test), strict=True))
        return cross_entropy(logits, labels).item(), (logits.argmax(-1) == labels).float().mean().item()

    def load(self, folder: Path) -> nn.Module:
        """Return a model that keeps no keys and values for generation, which some of these configs cannot."""
        model = self.kind.from_pretrained(folder)
        model.config.use_cache = False
        return model

    def run(self, model: nn.Module, sample: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return logits and labels of all items of a sample."""
        inputs = {name: value for name, value in sample.items() if name != "labels"}
        logits, labels = model(**inputs).logits.float(), sample["labels"]
        if self.causal:
            logits, labels = logits[:, :-1], labels[:, 1:]
        known = labels.flatten() != IGNORED
        return logits.flatten(0, -2)[known], labels.flatten()[known]


def tokens(row: dict) -> dict[str, Tensor]:
    """Return the input of a sample."""
    return {name: torch.tensor([row[name]]) for name in ("input_ids", "labels")}


# A row


def answer(make: Callable[[], str], model: str) -> str:
    """Return a cell: what `make` returns, or a refusal, or an error."""
    try:
        return make()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a script's own exit, and errors that are no Exception
        line = explain(error)
        text = f"refused: {line}" if line else f"error: {type(error).__name__}: {first_line(error, 120)}"
        text = re.sub(rf"\$SCRATCH/(body/)?{re.escape(model)}(?![\w-])", "MODEL", common.impersonal(text))
        return re.sub(rf"(?<![\w-]){re.escape(model)}(?![\w-])", "MODEL", text.replace(f" ({model})", ""))


def draw(name: str, task: str, kind: type, home: Path) -> tuple[Path, Path, str | None]:
    """Save a tiny model, and a checkpoint of its body with another head; return their folders, and a failure."""
    whole, body = home / name, home / "body" / name
    inputs = "pixel_values" if task.startswith("image") else "input_ids"
    model, problem = tiny_models.draw(
        name, kind, inputs, **{} if task == "instruction-tuning" else {"id2label": dict(enumerate(LABELS))}
    )
    model.save_pretrained(whole)
    if task != "instruction-tuning":
        config = model.config
        others = [getattr(transformers, f"AutoModelFor{each}") for each in BODIES if not task.startswith("image")]
        other = next((each for each in (*others, transformers.AutoModel) if type(config) in each._model_mapping), kind)
        with contextlib.suppress(Exception):  # then it is fine-tuned from its own class
            other.from_config(config).save_pretrained(body)
    if not body.exists():
        model.save_pretrained(body)
    if not task.startswith("image"):
        for folder in (whole, body):
            tokenizer(task).save_pretrained(folder)
    return whole, body, problem


def row_of(name: str, task: str, data: Path) -> dict[str, str]:
    """Return the cells of an architecture, or only `drawn`: the reason why no tiny model can be drawn."""
    kind = classes(task)[name]
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch)
        os.environ["FABRIC_LADDER_CACHE"] = str(data / "cache")
        options = [*data_options(task, data), *COMMON]
        try:
            whole, body, problem = draw(name, task, kind, home)
        except Exception as error:
            return {"drawn": " ".join(str(error).split())[:160]}
        found = cells_of(task, kind, whole, body, options, home / "runs")
        return {"drawn": problem} if problem and found["trains"].startswith("error") else found


def columns(task: str) -> list[str]:
    """Return the columns of a task: for words those that depend on the head, and for images those without padding."""
    return [column for column in COLUMNS if column not in LESS.get(task, ())]


def cells_of(task: str, kind: type, whole: Path, body: Path, options: list[str], runs: Path) -> dict[str, str]:
    """Return the cells of a drawn architecture. Where rung 2 fails there are no others."""
    records: dict[str, Record] = {}
    said: dict[str, bool] = {}
    found: dict[str, str] = {}
    together = "4" if task.startswith("image") else "1"  # BatchNorm needs several images
    options += ["--model", str(whole)]
    sizes = {"15": [], "17": [], "padded": ["--micro_batch_size", "4"]}

    def told(column: str, cell: str) -> str:
        return f"{cell}, as the run says" if said[column] and cell.startswith("differs") else cell

    def attempt(column: str, rung: str, more: list[str], compare: Callable[[Record], str], number: int = 0) -> None:
        def make() -> str:
            size = sizes.get(column, ["--micro_batch_size", together])
            records[column], said[column] = run(rung, [*options, *size, *more], runs, number)
            return told(column, compare(records[column]))

        if column in columns(task):
            found[column] = answer(make, whole.name)

    saving = ["--save", "consolidated", "--save_every", "2", "--keep", "9"]
    attempt("trains", "2_grad_accum", saving, lambda record: "yes")
    if "trains" not in records:
        return found
    reference = records["trains"]
    plain = Plain(kind, whole, [*options, "--micro_batch_size", together])

    def check_saved(folder: Path, record: Record) -> str:
        loss, accuracy = plain.evaluate(folder)
        return compared(max(abs(loss - record[1]) / max(1, abs(loss)), abs(accuracy - record[2])))

    def check_export(record: Record) -> str:
        output = runs / "export"
        sys.argv = ["export_model.py", str(runs / "13_lora" / "1"), "--output", str(output)]
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            runpy.run_path(str(common.ROOT / "scripts" / "export_model.py"), run_name="__main__")
        return check_saved(output, record)

    def first(record: Record) -> str:
        return compared(abs(record[0][0] - reference[0][0]))

    home = runs / "2_grad_accum" / "1"
    found["trains"] = answer(lambda: difference((plain.train(), 0, 0), (reference[0], 0, 0)), whole.name)
    found["saves"] = answer(lambda: told("trains", check_saved(home / "model", reference)), whole.name)
    attempt("padded", "2_grad_accum", [], lambda record: difference(record, reference))
    compare = {"13": check_export, "14": lambda record: "yes", "18": first}
    compare["17"] = lambda record: difference(record, records.get("padded", reference))
    for column, (rung, more) in RUNGS.items():
        model = ["--model", str(body)] if column in ("13", "14") else []
        attempt(column, rung, [*more, *model], compare.get(column, lambda record: difference(record, reference)))
    resumed = [*saving, "--resume", str(home / "checkpoints" / "step-000000002")]
    attempt("resumes", "2_grad_accum", resumed, lambda record: difference(record, reference, 0.0), 1)
    return found


# All rows


def sweep(rows: list[tuple[str, str]], jobs: int) -> Iterator[tuple[str, str, dict[str, str]]]:
    """Yield task, name and cells of each architecture."""
    with tempfile.TemporaryDirectory(prefix="architectures-") as folder:
        write_data(Path(folder))
        with multiprocessing.get_context("fork").Pool(jobs, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield from pool.imap(_row, [(task, name, Path(folder)) for task, name in rows])


def _row(row: tuple[str, str, Path]) -> tuple[str, str, dict[str, str]]:
    """Return task, name and those cells of an architecture that are not yes, within the time limit."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"it took more than {LIMIT} s")

    task, name, data = row
    signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        found = row_of(name, task, data)
    finally:
        signal.alarm(0)
    return task, name, {column: cell for column, cell in found.items() if cell != "yes"}


def all_rows() -> list[tuple[str, str]]:
    """Return task and name of every architecture."""
    return [(task, name) for task in TASKS for name in sorted(classes(task))]


# The page


def fill_page(check: bool = False) -> list[Path]:
    """Write all results as CSV, and their numbers into docs/techniques/options.md; see `common.fill_pages`."""
    results, counts = common.read_results(OUT), []
    rows = [[task, name, *shown(task, row)] for task in TASKS for name, row in results[task]["rows"].items()]
    for task in TASKS:
        own = [cells for name, _, *cells in rows if name == task]
        trained = [cells for cells in own if cells[0].startswith(("yes", "differs"))]
        equal = ["–" if not any(column) else str(column.count("yes")) for column in zip(*trained, strict=True)]
        counts.append([f"`{task}`", str(len(own)), str(len(trained)), *equal])
    summary = ["", *common.markdown_table(["task", "all", "trained", *COLUMNS], counts), ""]
    whole = common.markdown_table(["task", "architecture", *COLUMNS], rows)
    return common.fill_pages("architectures", lambda _: summary, check, {"architectures": whole})


def shown(task: str, row: dict[str, str]) -> list[str]:
    """Return the cells of a row: empty ones for a column that the task lacks, or if rung 2 does not train it."""
    if row.get("trains", "differs").startswith("differs") and "drawn" not in row:
        cells = [row.get(column, "yes") if column in columns(task) else "" for column in COLUMNS]
    else:
        cells = [next(f"not drawn: {why}" if kind == "drawn" else why for kind, why in row.items())]
        cells += [""] * (len(COLUMNS) - 1)
    return [re.sub(r" \(bert, [^)]*\)", "", cell) for cell in cells]  # a list in hundreds of refusals


def main() -> None:
    """Run the architectures, and write the results and the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="print the rows of these, and write nothing")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="print every Nth row, and write nothing")
    parser.add_argument("--task", nargs="+", choices=TASKS, default=[*TASKS], help="others stay as they are")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument("--page", action="store_true", help="run nothing; write the page from the results")
    args = parser.parse_args()
    part = args.only or args.every > 1
    if not (part or args.page):
        common.check_storable(OUT)
    rows = [row for row in all_rows() if row[0] in args.task and row[1] in (args.only or [row[1]])]
    found: dict[str, dict] = {}
    for task, name, row in sweep(rows[:: args.every], args.jobs) if not args.page else ():
        found.setdefault(task, {})[name] = row
        print(json.dumps([task, name, row], ensure_ascii=False), flush=True)
    if not part:
        for task, cells in found.items():
            common.write_result(OUT, task, common.environment(torch.device("cpu")) | {"rows": cells})
        fill_page()


if __name__ == "__main__":
    main()
