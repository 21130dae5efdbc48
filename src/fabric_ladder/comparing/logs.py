"""Read printed logs: this project's, and the blog's as copied from a terminal or a web page.

Only complete lines are read. All other lines are ignored, such as warnings, progress bars and cut lines.
"""

import math
import re
from dataclasses import dataclass, field
from typing import NamedTuple

PERCENT = r"(\d+\.\d\d)%"
NUMBER = r"(\d+\.\d\d)"
LOSS = re.compile(
    r"Epoch: (\d{4,})/(\d{4,}) ?\| ?Batch (\d{4,})/(\d{4,})(?: ?\| ?Samples (\d{5,})/(\d{5,}))? ?\| ?Loss: (\d+\.\d{4})"
)
EPOCH = re.compile(
    rf"Epoch: (\d{{4,}})/(\d{{4,}}) ?\| ?Train acc\.: {PERCENT} ?\| ?Val acc\.: {PERCENT}"
    r"(?: ?\| ?Val perplexity: (\d+\.\d\d|inf))?"
)
VALIDATION = re.compile(
    r"Epoch: (\d{4,})/\d{4,} ?\| ?Batch \d{4,}/\d{4,} ?\| ?Samples (\d{5,})/(\d{5,}) ?\| ?Val loss: \d+\.\d{4} ?\| ?"
    rf"Val acc\.: {PERCENT}"
)
MSE_EPOCH = re.compile(r"Epoch: (\d{4,})/(\d{4,}) ?\| ?Train MSE: (\d+\.\d{4}) ?\| ?Val MSE: (\d+\.\d{4})")
BEST = re.compile(
    rf"Best validation (?:loss (\d+\.\d{{4}})|accuracy {PERCENT}) at epoch \d+, batch \d+: its weights are tested.*"
)
RESULTS = {  # pattern of a line -> names of its figures, in the order of the groups
    rf"Time elapsed:? {NUMBER} min": ("minutes",),
    rf"Compile time {NUMBER} min of it, (\d+) graphs": ("compile_minutes", "compiled_graphs"),
    r"Throughput (\d+\.\d) samples/s, (\d+) tokens/s, padding (\d+\.\d)%": (
        "samples_per_second",
        "tokens_per_second",
        "padding",
    ),
    rf"Memory used: {NUMBER} GB": ("memory",),
    rf"Memory predicted: {NUMBER} GB.*": ("predicted_memory",),
    rf"Host memory used: {NUMBER} GB, loading included": ("host_memory",),
    rf"Test accuracy:? {PERCENT}": ("test_accuracy",),
    rf"Test macro-F1 {PERCENT}": ("macro_f1",),
    rf"Test micro-F1 {PERCENT}": ("micro_f1",),
    rf"Test entity F1 {PERCENT}": ("entity_f1",),
    r"Test MSE (\d+\.\d{4})": ("test_mse",),
    r"Test Pearson (-?\d\.\d{4}|nan)": ("test_pearson",),
    r"Test loss (\d+\.\d{4}) per trained token, perplexity (\d+\.\d\d|inf)": ("test_loss", "test_perplexity"),
    r"Parameters: (\d+\.\d) M, (\d+\.\d(?:\d\d)?) M trainable(?: \(\d+\.\d\d%\))?(?:, torch\.\w+)+": (
        "parameters",
        "trainable_parameters",
    ),
}
RESULTS = {re.compile(pattern): names for pattern, names in RESULTS.items()}
TESTED = ("test_accuracy", "test_mse")  # a finished run has one of them
HEADING = re.compile(r"#{1,6} +(.*?)[ #]*")
VERSION = r"\d+(?:\.\d+)+[\w.+-]*"
VERSIONS = re.compile(rf"Python {VERSION}(?: · [\w-]+ {VERSION})+")
WATERMARK = re.compile(rf"(Python version|torch|lightning|transformers|torchmetrics|torchvision) *: *({VERSION})")
TITLE = re.compile(  # the second line of this project's logs
    r"(?P<name>\w+) · (?P<dataset>.+?) · (?P<model>.+?) · seed (?P<seed>\d+) · batch (?P<batch_size>\d+)"
    r"(?: = (?:\d+ x )?\d+ x (?P<samples>\d+)"
    r"| in (?P<packed>packed )?micro-batches of (?P<tokens>\d+|auto) tokens"
    r"| packed, (?:\d+ x )?(?P<rows>\d+) rows? of (?:up to )?(?P<max_length>\d+) tokens at once)"
    r" · (?P<precision>(?:32|64|bf16|16)-(?:true|mixed))(?:, matmul (?P<matmul>high|medium))?"
    r"(?: · (?P<optimizer>[\w-]+) (?P<learning_rate>[\d.e+-]+) (?P<schedule>constant|linear|cosine)(?:, [^·]+)?)?"
    r" · (?P<device>cuda|mps|cpu): (?:(?P<ranks>\d+) x )?(?P<processor>\S.*)"
)


class Point(NamedTuple):
    """A printed loss, or the accuracies of a validation.

    Attributes:
        epochs: Passes over the training data so far, as a fraction.
        samples: Training samples so far, over all epochs, or None if unknown.
        value: The loss as printed, or the validation accuracy in percent.
        train_accuracy: Training accuracy of the epoch in percent; None for a loss, or within an epoch.
    """

    epochs: float
    samples: int | None
    value: float
    train_accuracy: float | None = None


@dataclass
class LoggedRun:
    """Everything known about a run. Unknown facts are missing; they never get a default.

    Attributes:
        source: Folder or file that was read.
        name: The rung's or script's name.
        settings: Settings by name.
        versions: Versions by package.
        hardware: Facts by name, as `describe_hardware` returns them.
        data: The data's fingerprint.
        contents: Hashes or commits of the files that settings name, if they are known.
        read: Lines about the files, rows, classes and splits that were read.
        figures: `minutes` and `compile_minutes`; `samples_per_second`, `tokens_per_second`; `memory` and `host_memory`
            (10^9 bytes); `padding`, `train_accuracy`, `validation_accuracy`, `test_accuracy` and `macro_f1` (percent);
            `validation_perplexity`, `test_loss` (per trained token) and `test_perplexity` of language models;
            `micro_f1` (percent) with several labels per text; `entity_f1` (percent) of words; `train_mse`,
            `validation_mse`, `test_mse` and `test_pearson` of a regression; `parameters` and `trainable_parameters`
            (millions).
        train_samples: Samples of an epoch; for a log of another script its batches, the fewest that these can be.
        begun: Date and time of the first start.
        times: Seconds since 1970 of the start and of the end of training, or earlier; None if it was interrupted.
        test_samples: Size of the test set, if the task counts samples.
        losses: In the order of training.
        accuracies: Of all validations, in the order of training.
        classes: As in run.json: names, confusion (rows true, columns predicted) and more; may be empty.
        unfinished: Reason why the result is missing, or None for a finished run.
        ours: Whether a script of this project printed it.
    """

    source: str
    name: str
    settings: dict = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    hardware: dict = field(default_factory=dict)
    data: str | None = None
    contents: dict[str, str] = field(default_factory=dict)
    read: list[str] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    train_samples: int | None = None
    test_samples: int | None = None
    begun: str | None = None
    times: tuple[float, float] | None = None
    losses: list[Point] = field(default_factory=list)
    accuracies: list[Point] = field(default_factory=list)
    classes: dict = field(default_factory=dict)
    unfinished: str | None = None
    ours: bool = True


def perplexity(loss: float) -> float:
    """Return the exponential of a loss, or infinity above 700."""
    return math.exp(loss) if loss < 700 else math.inf


class LogParser:
    """Parser of a log's text.

    A heading, a header, a repeated figure or an earlier batch starts the next run.

    Args:
        source: Name of the text, for messages.
        name: Name of a run without a header or a heading.
    """

    def __init__(self, source: str, name: str):
        self.source = source
        self.name = name
        self.runs: list[LoggedRun] = []
        self._start_run(name)

    def parse(self, text: str) -> list[LoggedRun]:
        """Return the runs of a text; runs without a test accuracy are marked as unfinished."""
        for line in text.replace("\u00a0", " ").splitlines():
            self._read(" ".join(line.split()))
        runs = [run for run in self.runs if run.losses or run.figures]
        for run in runs:
            tested = run.figures.keys() & {*TESTED}
            run.unfinished = None if tested else "its log has no test accuracy"
        return runs

    def _start_run(self, name: str) -> None:
        self.run = LoggedRun(self.source, name, ours=False)
        self.runs.append(self.run)
        self._position = (0, -1)  # epoch and batch of the last line

    def _end_run(self) -> None:
        """Start the next run if this one has figures."""
        if self.run.losses or self.run.figures:
            self._start_run(self.name)

    def _read(self, line: str) -> None:
        if found := HEADING.fullmatch(line):
            self._start_run(found[1].strip("`*_ ").removesuffix(".py") or self.name)
        elif VERSIONS.fullmatch(line):
            self._end_run()
            self.run.versions |= dict(part.split(" ") for part in line.split(" · "))
        elif found := WATERMARK.fullmatch(line):
            self._end_run()
            self.run.versions[found[1].removesuffix(" version")] = found[2]
        elif found := TITLE.fullmatch(line):
            self._end_run()
            self._read_title(found)
        elif found := LOSS.fullmatch(line):
            self._read_loss(*found.groups())
        elif found := VALIDATION.fullmatch(line):
            self._read_validation(*found.groups())
        elif found := EPOCH.fullmatch(line):
            self._read_epoch(*found.groups())
        elif found := MSE_EPOCH.fullmatch(line):
            self._read_mse(*found.groups())
        elif found := BEST.fullmatch(line):
            self._read_best(*found.groups())
        else:
            for pattern, names in RESULTS.items():
                if found := pattern.fullmatch(line):
                    figures = dict(zip(names, map(float, found.groups()), strict=True))
                    if figures.keys() & self.run.figures.keys():
                        self._end_run()
                    self.run.figures |= figures

    def _move_to(self, epoch: int, batch: float) -> None:
        """Go to a later batch. An earlier batch, or one after the end of the training, belongs to the next run."""
        if (epoch, batch) <= self._position or self.run.figures.keys() & {"minutes", *TESTED}:
            self._end_run()
        self._position = (epoch, batch)

    def _read_loss(self, epoch, epochs, batch, batches, seen, samples, loss) -> None:
        self._move_to(int(epoch), int(batch))
        share = int(seen) / int(samples) if seen else int(batch) / int(batches)
        total = (int(epoch) - 1) * int(samples) + int(seen) if seen else None
        self.run.losses.append(Point(int(epoch) - 1 + share, total, float(loss)))
        self.run.train_samples = int(samples or batches)
        self.run.settings["epochs"] = int(epochs)

    def _read_validation(self, epoch, seen, samples, accuracy) -> None:
        total = (int(epoch) - 1) * int(samples) + int(seen)
        self.run.accuracies.append(Point(total / int(samples), total, float(accuracy)))

    def _read_epoch(self, epoch, epochs, train, validation, perplexity) -> None:
        self._move_to(int(epoch), math.inf)
        last = self.run.losses[-1] if self.run.losses else None  # the last line of an epoch is at its end
        passes = last.epochs if last and self.run.ours else float(epoch)  # `patience` may end an epoch early
        self.run.accuracies.append(Point(passes, last and last.samples, float(validation), float(train)))
        self.run.figures |= {"train_accuracy": float(train), "validation_accuracy": float(validation)}
        if perplexity:
            self.run.figures["validation_perplexity"] = float(perplexity)
        self.run.settings["epochs"] = int(epochs)

    def _read_mse(self, epoch, epochs, train, validation) -> None:
        self._move_to(int(epoch), math.inf)
        self.run.figures |= {"train_mse": float(train), "validation_mse": float(validation)}
        self.run.settings["epochs"] = int(epochs)

    def _read_best(self, loss, accuracy) -> None:
        """Replace the figures of the last validation by those of the best, whose weights are tested."""
        figures = self.run.figures
        found = [figures.pop(name, None) for name in ("validation_accuracy", "validation_mse")]
        if accuracy:
            figures["validation_accuracy"] = float(accuracy)
        elif found[1] is not None:
            figures["validation_mse"] = float(loss)
        elif "validation_perplexity" in figures:
            figures["validation_perplexity"] = perplexity(float(loss))

    def _read_title(self, found: re.Match) -> None:
        tokens = found["tokens"]
        size = found["samples"] or found["rows"]
        self.run.name = found["name"]
        self.run.ours = True
        self.run.settings = {
            "dataset": found["dataset"],
            "model": found["model"],
            "seed": int(found["seed"]),
            "batch_size": int(found["batch_size"]),
            "micro_batch_size": int(size) if size else None,
            "micro_batch_tokens": int(tokens) if tokens and tokens != "auto" else tokens,
            "packing": bool(found["packed"] or found["rows"]),
            "precision": found["precision"],
            "matmul_precision": found["matmul"] or "highest",
            "ranks": int(found["ranks"] or 1),
        }
        if found["max_length"]:
            self.run.settings["max_length"] = int(found["max_length"])
        if found["optimizer"]:
            steps = {name: found[name] for name in ("optimizer", "schedule")}
            self.run.settings |= steps | {"learning_rate": float(found["learning_rate"])}
        kind = "gpu" if found["device"] == "cuda" else "processor"
        self.run.hardware = {"device": found["device"], kind: found["processor"]}
