"""Read printed logs: this project's, and the blog's as copied from a terminal or a web page.

Only complete lines are read. A line that names a figure but cannot be parsed is counted as skipped. All other unknown
lines are notes, such as warnings and progress bars, and are ignored.
"""

import math
import re
from dataclasses import dataclass, field
from typing import NamedTuple

WHOLE = r"(?:0|[1-9]\d*)"  # without leading zeros, as Python prints integers
PERCENT = rf"({WHOLE}\.\d\d)%"
NUMBER = rf"({WHOLE}\.\d\d)"
LOSS_NUMBER = rf"({WHOLE}\.\d{{4}})"
LOSS = re.compile(
    r"Epoch: (\d{4,})/(\d{4,}) ?\| ?Batch (\d{4,})/(\d{4,})(?: ?\| ?Samples (\d{5,})/(\d{5,}))?"
    rf" ?\| ?Loss: {LOSS_NUMBER}"
)
EPOCH = re.compile(
    rf"Epoch: (\d{{4,}})/(\d{{4,}}) ?\| ?Train acc\.: {PERCENT} ?\| ?Val acc\.: {PERCENT}"
    rf"(?: ?\| ?Val perplexity: ({WHOLE}\.\d\d|inf))?"
)
RESULTS = {  # pattern of a line -> names of its figures, in the order of the groups
    rf"Time elapsed:? {NUMBER} min": ("minutes",),
    rf"Compile time {NUMBER} min of it, ({WHOLE}) graphs": ("compile_minutes", "compiled_graphs"),
    rf"Throughput ({WHOLE}\.\d) samples/s, ({WHOLE}) tokens/s, padding ({WHOLE}\.\d)%": (
        "samples_per_second",
        "tokens_per_second",
        "padding",
    ),
    rf"Memory used: {NUMBER} GB": ("memory",),
    rf"Memory predicted: {NUMBER} GB.*": ("predicted_memory",),
    rf"Host memory used: {NUMBER} GB, loading included": ("host_memory",),
    rf"Test accuracy:? {PERCENT}": ("test_accuracy",),
    rf"Test macro-F1 {PERCENT}": ("macro_f1",),
    rf"Test loss {LOSS_NUMBER} per trained token, perplexity ({WHOLE}\.\d\d|inf)": ("test_loss", "test_perplexity"),
    rf"Parameters: ({WHOLE}\.\d) M, ({WHOLE}\.\d(?:\d\d)?) M trainable(?: \({WHOLE}\.\d\d%\))?(?:, torch\.\w+)+": (
        "parameters",
        "trainable_parameters",
    ),
}
RESULTS = {re.compile(pattern): names for pattern, names in RESULTS.items()}
PERCENTAGES = ("padding", "macro_f1", "test_accuracy", "train_accuracy", "validation_accuracy")
HEADING = re.compile(r"#{1,6} +(.*?)[ #]*")
PACKAGES = (
    "torch lightning transformers tokenizers datasets numpy pandas peft deepspeed bitsandbytes torchmetrics torchvision"
).split()
VERSION = r"\d+(?:\.\d+)+[\w.+-]*"
WATERMARK = re.compile(rf"({'|'.join(PACKAGES)}) *: *({VERSION})")
PYTHON = re.compile(rf"Python version *: *({VERSION})")
VERSIONS = re.compile(rf"Python {VERSION}(?: · [\w-]+ {VERSION})+")
CUT = re.compile(
    r"batch (\d+)(?: = (?:(\d+) x )?(\d+) x (\d+)| in (packed )?micro-batches of (\d+|auto) tokens"
    r"| packed, (?:(\d+) x )?(\d+) rows? of (?:up to )?(\d+) tokens at once)"
)
PRECISION = re.compile(r"((?:32|64|bf16|16)-true|(?:bf16|16)-mixed)(?:, matmul (high|medium))?")
DEVICE = re.compile(r"(cuda|mps|cpu): (?:(\d+) x )?(\S.*)")
NAMES_FIGURE = re.compile(
    r"\d+/\d+ ?\||^Epoch: |Loss: \d|Train acc\.|Time elapsed|Compile time \d|Throughput|[Mm]emory used"
    r"|Memory predicted|Test (?:accuracy|macro-F1|loss)|^Parameters: | · seed \d| · torch \d"
)


class Point(NamedTuple):
    """A printed loss, or accuracies after an epoch.

    Attributes:
        epochs: Passes over the training data so far, as a fraction.
        samples: Training samples so far, over all epochs, or None if unknown.
        value: The loss as printed, or the validation accuracy in percent.
        minutes: Minutes of training so far, or None if the source is a log.
        train_accuracy: Training accuracy of the epoch in percent, or None for a loss.
    """

    epochs: float
    samples: int | None
    value: float
    minutes: float | None = None
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
        figures: `minutes` and `compile_minutes`; `samples_per_second`, `tokens_per_second`; `memory` and `host_memory`
            (10^9 bytes); `padding`, `train_accuracy`, `validation_accuracy`, `test_accuracy` and `macro_f1` (percent);
            `validation_perplexity`, `test_loss` (per trained token) and `test_perplexity` of language models;
            `parameters` and `trainable_parameters` (millions).
        test_samples: Size of the test set, if the task counts samples.
        losses: In the order of training.
        accuracies: After each epoch, in the order of training.
        classes: As in run.json: names, confusion (rows true, columns predicted) and more; may be empty.
        unfinished: Reason why there is no result, or None for a finished run.
        ours: Whether a script of this project printed it.
        from_text: Whether the source is a printed log.
    """

    source: str
    name: str
    settings: dict = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    hardware: dict = field(default_factory=dict)
    data: str | None = None
    figures: dict[str, float] = field(default_factory=dict)
    test_samples: int | None = None
    losses: list[Point] = field(default_factory=list)
    accuracies: list[Point] = field(default_factory=list)
    classes: dict = field(default_factory=dict)
    unfinished: str | None = None
    ours: bool = True
    from_text: bool = False


class LogParser:
    """Parser of a log's text; `runs` holds the runs, `skipped` counts damaged and misplaced lines.

    A heading, a header, or results after the end of a run start the next run.

    Args:
        source: Name of the text, for messages.
        name: Name of a run without a header or a heading.
    """

    def __init__(self, source: str, name: str):
        self.source = source
        self.name = name
        self.runs: list[LoggedRun] = []
        self.skipped = 0
        self._open()

    def parse(self, text: str) -> list[LoggedRun]:
        """Return the runs of a text; runs without a test accuracy are marked as unfinished."""
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\u00a0", " ")
        for line in text.splitlines():
            line = re.sub(r"\s+", " ", line).strip()
            if not line:
                continue
            if self._take(line):
                self._lines += 1
            elif NAMES_FIGURE.search(line):
                self.skipped += 1
        self._close()
        return self.runs

    def _open(self, name: str | None = None, continued: bool = False) -> None:
        self.run = LoggedRun(self.source, name or self.name, ours=False, from_text=True)
        self._position = (0, -1)  # epoch and batch of the last loss
        self._totals = None
        self._accuracy_epoch = 0
        self._continued = continued
        self._lines = 0

    def _close(self, name: str | None = None, continued: bool = False) -> None:
        finished = "test_accuracy" in self.run.figures
        if self._continued and not finished:
            self.skipped += self._lines  # misplaced lines, not another run
        elif finished or self.run.losses or self.run.figures.keys() - {"parameters", "trainable_parameters"}:
            self.run.unfinished = None if finished else "its log has no test accuracy"
            self.runs.append(self.run)
        self._open(name, continued)

    @property
    def _begun(self) -> bool:
        return bool(self.run.losses or self.run.figures)

    def _take(self, line: str) -> bool:
        """Read one line; return whether it was a valid line at a valid place."""
        if found := HEADING.fullmatch(line):
            self._close(found[1].strip("`*_ ").removesuffix(".py") or None)
            return True
        if found := LOSS.fullmatch(line):
            return self._take_loss(*found.groups())
        if found := EPOCH.fullmatch(line):
            return self._take_epoch(*found.groups())
        for pattern, names in RESULTS.items():
            if found := pattern.fullmatch(line):
                return self._take_results(dict(zip(names, map(float, found.groups()), strict=True)))
        return self._take_versions(line) or self._take_title(line)

    def _take_loss(self, epoch, epochs, batch, batches, seen, samples, loss) -> bool:
        epoch, epochs, batch, batches = int(epoch), int(epochs), int(batch), int(batches)
        if not 1 <= epoch <= epochs or batch > batches or not batches:
            return False
        if seen and not 0 < int(seen) <= int(samples):
            return False
        totals = (epochs, batches, samples)
        if "test_accuracy" in self.run.figures:
            self._close(continued=True)
        if (epoch, batch) <= self._position or totals != (self._totals or totals) or "minutes" in self.run.figures:
            return False
        self._position, self._totals = (epoch, batch), totals
        if seen:
            past = (epoch - 1) * int(samples) + int(seen)
            self.run.losses.append(Point(past / int(samples), past, float(loss)))
        else:
            self.run.losses.append(Point(epoch - 1 + batch / batches, None, float(loss)))
        self.run.settings["epochs"] = epochs
        return True

    def _take_epoch(self, epoch, epochs, train, validation, perplexity) -> bool:
        epoch, epochs = int(epoch), int(epochs)
        figures = {"train_accuracy": float(train), "validation_accuracy": float(validation)}
        if not 1 <= epoch <= epochs or not _percentages(figures):
            return False
        if "test_accuracy" in self.run.figures:
            self._close(continued=True)
        if "minutes" in self.run.figures or self.run.settings.get("epochs", epochs) != epochs:
            return False
        if epoch <= self._accuracy_epoch or epoch < self._position[0]:
            return False
        samples = self._totals and self._totals[2]
        at = (float(epoch), epoch * int(samples) if samples else None)
        self.run.accuracies.append(Point(*at, float(validation), train_accuracy=float(train)))
        self.run.figures |= figures | ({"validation_perplexity": float(perplexity)} if perplexity else {})
        self.run.settings["epochs"] = epochs
        self._accuracy_epoch, self._position = epoch, (epoch, math.inf)
        return True

    def _take_results(self, figures: dict[str, float]) -> bool:
        if not _percentages(figures):
            return False
        if figures.keys() & self.run.figures.keys():
            if "minutes" not in figures or "test_accuracy" not in self.run.figures:
                return False  # a repeated line
            self._close(continued=True)  # an article prints several results below each other
        self.run.figures |= figures
        return True

    def _take_versions(self, line: str) -> bool:
        if VERSIONS.fullmatch(line):
            found = dict(part.split(" ") for part in line.split(" · "))
        elif (match := WATERMARK.fullmatch(line)) or (match := PYTHON.fullmatch(line)):
            found = {"Python" if match.re is PYTHON else match[1]: match[match.lastindex]}
        else:
            return False
        if self._begun:
            self._close()
        self.run.versions |= found
        return True

    def _take_title(self, line: str) -> bool:
        """Read the second line of this project's logs."""
        parts = line.split(" · ")
        if len(parts) != 7 or not re.fullmatch(r"\w+", parts[0]):
            return False
        seed, cut = re.fullmatch(r"seed (\d+)", parts[3]), CUT.fullmatch(parts[4])
        precision, device = PRECISION.fullmatch(parts[5]), DEVICE.fullmatch(parts[6])
        if not (seed and cut and precision and device):
            return False
        if self._begun:
            self._close()
        ranks = int(device[2] or 1)
        values = (int(group) if group and group.isdigit() else group for group in cut.groups())
        batch, _, _, size, packed, tokens, _, rows, length = values
        self.run.name, self.run.ours = parts[0], True
        self.run.settings = {
            "dataset": parts[1],
            "model": parts[2],
            "seed": int(seed[1]),
            "batch_size": batch,
            "micro_batch_size": size or rows,
            "micro_batch_tokens": tokens,
            "packing": bool(packed or rows),
            "precision": precision[1],
            "matmul_precision": precision[2] or "highest",
        }
        if length:
            self.run.settings["max_length"] = length
        self.run.hardware = {"device": device[1], "gpu" if device[1] == "cuda" else "processor": device[3]}
        self.run.settings["ranks"] = ranks
        return True


def _percentages(figures: dict[str, float]) -> bool:
    return all(value <= 100 for name, value in figures.items() if name in PERCENTAGES)
