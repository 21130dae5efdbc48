"""Predict classes, numbers or labels of words for the rows of a file or for a folder of images, without training."""

import csv
import hashlib
import itertools
import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import datasets as hf
import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import interpolate, one_hot
from transformers import PreTrainedTokenizerBase

from fabric_ladder.checkpoints.export import find_result, load_result
from fabric_ladder.data.cutting import cut
from fabric_ladder.data.image_files import list_images
from fabric_ladder.data.images import decode, name_darkness, read_image_format
from fabric_ladder.data.kinds import kind_of
from fabric_ladder.data.label_kind import class_lines
from fabric_ladder.data.labels import WHOLE
from fabric_ladder.data.rows import Rows, find_columns, read_file, read_text
from fabric_ladder.data.splits import ImageFormat
from fabric_ladder.data.tables import check_column, join_texts, text_columns
from fabric_ladder.data.text_sources import SEPARATORS, file_stamp, read_format
from fabric_ladder.data.tokens import load_tokenizer, tokenize_start
from fabric_ladder.data.word_labels import UNLABELLED, word_list
from fabric_ladder.data.words import place_words, word_columns
from fabric_ladder.environment import write_whole
from fabric_ladder.errors import UserError, is_out_of_memory, read_outside, refused
from fabric_ladder.models.configs import count_positions
from fabric_ladder.models.probe import TOLERANCE, facts_of
from fabric_ladder.runs.intervals import wilson_interval
from fabric_ladder.runs.metrics import describe_classes
from fabric_ladder.settings import Settings

CHUNK = 1024  # rows that are read, sorted by length, predicted and written together
PREDICTED, PROBABILITY = "predicted", "probability"  # names of the new columns
TASKS = {
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForImageClassification": "image-classification",
}  # by the end of the model's class


@dataclass
class Predictor:
    """A trained model for texts, words or images.

    Attributes:
        model: On its device, in eval mode.
        settings: Those of its run, or the defaults.
        names: The names of its outputs.
        tokens: Padded tokens per batch.
        every: Whether to return the probability of every class, too.
        tokenizer: None for images.
        format: Of images, or None.
        levels: The brightest level of each image of more than 8 bits so far.
    """

    model: nn.Module
    settings: Settings
    names: list[str]
    tokens: int
    every: bool
    tokenizer: PreTrainedTokenizerBase | None = None
    format: ImageFormat | None = None
    levels: list[int] = field(default_factory=list)

    def read(self, row: dict | ValueError) -> str | list[str] | Tensor:
        """Return the text, the words or the image of a row.

        Raises:
            ValueError: The row has no text, or its image cannot be read.
        """
        if isinstance(row, ValueError):
            raise row
        if self.format:
            return self._pixels(row)
        if self.settings.task == "token-classification":
            return list(map(str, word_list(row, self.text_columns[0])))
        return join_texts(row, self.text_columns)

    @torch.inference_mode()
    def predict(self, texts: list) -> list[dict]:
        """Return the new columns for the texts, the words or the images of rows."""
        found: list = [None] * len(texts)
        inputs, words = texts, None
        if self.settings.task == "token-classification":
            if len(texts) > 1 and max(map(len, texts)) == 1:
                raise UserError("all texts have one word: write one sentence per row, its words separated by spaces")
            inputs, *words = zip(*place_words(self.tokenizer, texts, self.settings.max_length), strict=True)
        elif not self.format:
            inputs = tokenize_start(self.tokenizer, texts, self.settings.max_length)
        lengths = np.array([self.format.tokens if self.format else len(each) for each in inputs])
        (plans,) = cut(self.settings, np.arange(len(texts)), lengths, np.ones_like(lengths), tokens=self.tokens)
        for batch in (plan.rows for plan in plans):
            for row, logits in zip(batch, self._forward([inputs[row] for row in batch]), strict=True):
                if words is None:
                    found[row] = self._describe(logits)
                else:
                    found[row] = self._describe_words(logits[words[0][row]], words[1][row], len(texts[row]))
        return found

    @property
    def columns(self) -> list[str]:
        """The names of the new columns, without those of all probabilities."""
        if self.settings.problem_type != "regression":
            return [PREDICTED, PROBABILITY]
        return [PREDICTED] if len(self.names) == 1 else [f"{PREDICTED} {name}" for name in self.names]

    @property
    def text_columns(self) -> tuple[str, ...]:
        """The columns of the texts, or of the words."""
        kind = kind_of(self.settings)
        if self.settings.task == "token-classification":
            return word_columns(self.settings, kind)[:1]
        return text_columns(self.settings, kind)[0]

    def _pixels(self, row: dict) -> Tensor:
        """Return the model's input for a file, (3, size, size), as in the evaluation."""
        side, mode = self.format.resize_to, self.format.resample
        pixels = decode(Path(row["file"]).read_bytes(), side, Image.Resampling[mode.upper()], self.levels)
        image = torch.from_numpy(pixels.copy()).permute(2, 0, 1)  # Pillow's memory is read-only
        if image.shape[1:] != (side, side):
            image = interpolate(image[None], (side, side), mode=mode, antialias=True)[0]
        start = (side - self.format.size) // 2
        image = image[:, start : start + self.format.size, start : start + self.format.size]
        mean, std = (torch.tensor(value).view(3, 1, 1) for value in (self.format.mean, self.format.std))
        return image.float().mul(1 / (255 * std)).sub(mean / std)

    def _forward(self, inputs: list) -> Tensor:
        device = self.model.device
        if self.format:
            return self.model(pixel_values=torch.stack(inputs).to(device, self.model.dtype)).logits.float().cpu()
        batch = self.tokenizer.pad({"input_ids": inputs}, padding_side="right", return_tensors="pt").to(device)
        return self.model(**batch).logits.float().cpu()

    def _describe(self, logits: Tensor) -> dict:
        if self.settings.problem_type == "regression":
            return dict(zip(self.columns, logits.tolist(), strict=True))
        several = self.settings.problem_type == "multi_label_classification"
        shares = dict(zip(self.names, (logits.sigmoid() if several else logits.softmax(-1)).tolist(), strict=True))
        chosen = [name for name in shares if shares[name] > 0.5] if several else max(shares, key=shares.get)
        chance = [shares[name] for name in chosen] if several else shares[chosen]
        every = {f"{PROBABILITY} {name}": share for name, share in shares.items()} if self.every else {}
        return {PREDICTED: chosen, PROBABILITY: chance} | every

    def _describe_words(self, logits: Tensor, places: np.ndarray, count: int) -> dict:
        """Return the label of each word; None for words beyond the length of the training."""
        labels, chances = [None] * count, [None] * count
        for place, chance, best in zip(places, *(each.tolist() for each in logits.softmax(-1).max(-1)), strict=True):
            labels[place], chances[place] = self.names[best], chance
        return {PREDICTED: labels, PROBABILITY: chances}


def load_predictor(
    name: str, device: str, dtype: torch.dtype, tokens: int, every: bool, columns: dict[str, str]
) -> Predictor:
    """Load the model of a run or of a folder.

    Args:
        name: See `find_result`.
        device: `cpu`, `cuda` or `mps`.
        dtype: Of the weights.
        tokens: See `Predictor`.
        every: See `Predictor`.
        columns: `text_column` and `label_column`, if they are not the run's.

    Raises:
        UserError: There is no model, or it is a language model.
    """
    result = find_result(name)
    config = result.config
    kind = (getattr(config, "architectures", None) or [""])[0]
    task = next((task for end, task in TASKS.items() if end in kind), None)
    if task is None:
        raise UserError(f"{result.folder} holds no classifier ({kind or 'no config.json'}): try scripts/generate.py")
    record = result.folder.parent / "run.json"
    saved = read_outside(record)["settings"] if record.is_file() else {}
    kept = ("dataset", "max_length", "text_column", "label_column", "problem_type", "column_names")
    saved = {key: saved[key] for key in kept if key in saved}
    problem = config.problem_type or saved.get("problem_type")
    own = {"task": task, "model": result.folder.as_posix(), "problem_type": problem, "pad_to_multiple_of": 1}
    settings = Settings(**saved | own | columns)
    names = [str(config.id2label[number]) for number in range(config.num_labels)]
    if problem == "regression" and "label_column" not in saved | columns:  # of an exported model
        settings = replace(settings, label_column=",".join(names))
    tokenizer = form = None
    if task == "image-classification":
        form, _ = read_image_format(settings)
    else:
        tokenizer = load_tokenizer(settings.model)
        longest = min(tokenizer.model_max_length, count_positions(settings), saved.get("max_length", 10**9))
        settings = replace(settings, max_length=int(min(longest, 10**6)))
        facts = facts_of(settings)
        tokens = tokens if facts and facts.padding <= TOLERANCE and not facts.reads_padding else 1  # each text alone
    model = load_result(result, dtype=dtype).to(device)
    return Predictor(model, settings, names, tokens, every, tokenizer, form)


def read_rows(predictor: Predictor, data: Path) -> Rows:
    """Yield the location and the columns of each row of a file, or of each image below a folder.

    An image has the columns `file` and, if its folder is one of the model's classes, `label`.

    Raises:
        UserError: The data cannot be read, or lack a column of the texts.
    """
    if (predictor.format is not None) != data.is_dir():
        kind, needed = ("images", "a folder of them") if predictor.format else ("texts", "a CSV, JSON or Parquet file")
        raise UserError(f"{predictor.settings.model} classifies {kind}: give {needed}, not {data}")
    if predictor.format:
        for image in list_images(data):
            label = {"label": image.parent.name} if image.parent.name in predictor.names else {}
            yield str(image), {"file": str(image)} | label
        return
    table = read_format(data) in SEPARATORS
    texts, names = predictor.text_columns, predictor.settings.column_names if table else None
    if names and _has_header(data, texts):  # unlike the file of the training
        names = None
    read = read_file(data, names, texts if table else ())
    columns, rows = find_columns(read, str(data))
    for column in texts:
        check_column(columns, column, str(data))
    features = {name: getattr(feature, "feature", feature) for name, feature in read.features.items()}
    classes = {name: feature.names for name, feature in features.items() if isinstance(feature, hf.ClassLabel)}
    for location, row in rows:
        if isinstance(row, dict):
            row |= {name: _named(row[name], names) for name, names in classes.items() if name in row}
        yield location, row


def _has_header(data: Path, texts: tuple[str, ...]) -> bool:
    with suppress(UserError, ValueError):  # its first line is a row of data
        _, first = next(iter(read_file(data, None, texts).rows), ("", {}))
        return isinstance(first, dict) and {*texts} <= {*first}
    return False


def _named(value: int | list | None, names: list[str]) -> str | list | None:
    """Return numbers of classes by their names; other numbers, such as -100, stay numbers."""
    if isinstance(value, list):
        return [_named(each, names) for each in value]
    return names[value] if isinstance(value, int) and 0 <= value < len(names) else value


def predict_file(predictor: Predictor, data: Path, output: Path, options: str) -> tuple[int, list[str]]:
    """Write the rows of a file or the images of a folder with their predictions; return their number and the scores.

    A stopped prediction goes on where it stopped: the finished rows stand in a hidden file next to `output`.

    Args:
        predictor: From `load_predictor`.
        data: A CSV, JSON or Parquet file, or a folder of images.
        output: A new file, `.csv` or `.jsonl`.
        options: What else the predictions depend on. Other options, another model or changed data start again.

    Raises:
        UserError: A row cannot be read, or has no text; or the file cannot be written.
    """
    part, state = (output.with_name(f".{output.name}.{end}") for end in ("part", "state"))
    files = [*(list_images(data) if data.is_dir() else [data]), *sorted(Path(predictor.settings.model).glob("*.*"))]
    key = hashlib.sha256(repr([options, *map(file_stamp, files)]).encode()).hexdigest()
    done, size, bad = 0, 0, [] if predictor.settings.bad_samples == "skip" else None
    if part.is_file() and state.is_file() and (before := read_outside(state))["key"] == key:
        done, size, bad = before["rows"], before["bytes"], before.get("bad", bad)
    rows = itertools.islice(read_rows(predictor, data), done, None)
    try:
        with refused(f"cannot write {output}"), open(part, "r+b" if size else "wb") as file:
            file.truncate(size)
            file.seek(size)
            for chunk in iter(lambda: list(itertools.islice(rows, CHUNK)), []):
                answers = _answer(predictor, data, chunk, bad)
                lines = (json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in answers)
                file.write("".join(lines).encode(errors="backslashreplace"))
                file.flush()
                done += len(chunk)
                write_whole(state, json.dumps({"key": key, "rows": done, "bytes": file.tell(), "bad": bad}))
    finally:
        if not done:
            part.unlink(missing_ok=True)
    if not done:
        raise UserError(f"{data} has no image")
    lost = bad or []
    left_out = f"{len(lost):,} of {done:,} rows have no prediction ({'; '.join(lost[:3])}{'; …' * (len(lost) > 3)})"
    if len(lost) == done:
        part.unlink()
        state.unlink()
        raise UserError(left_out)
    dark = name_darkness(predictor.levels)
    notices = [left_out] * bool(lost) + [f"read as nearly black: {dark}"] * bool(dark)
    scores = notices + score(predictor, (row for row in _written(part) if row[predictor.columns[0]] is not None))
    with refused(f"cannot write {output}"):
        if output.suffix == ".csv":
            _write_csv(part, " " if predictor.settings.task == "token-classification" else "|")
        os.rename(part, output)
        state.unlink()
    return done - len(lost), scores


def _answer(predictor: Predictor, data: Path, chunk: list[tuple[str, dict]], bad: list[str] | None) -> list[dict]:
    """Return rows with their predictions, which are empty for rows in `bad`."""
    found, texts = {}, {}
    for number, (location, row) in enumerate(chunk):
        with _skipped(f"{data}, {location}", bad):
            texts[number] = predictor.read(row)
    try:
        found |= zip(texts, predictor.predict([*texts.values()]), strict=True) if texts else ()
    except Exception as error:  # of one text, or of texts that BART cannot read together
        if isinstance(error, UserError) or is_out_of_memory(error):
            raise
        for number, text in texts.items():
            with _skipped(f"{data}, {chunk[number][0]}", bad):
                [found[number]] = predictor.predict([text])
    rows = [row if isinstance(row, dict) else {} for _, row in chunk]
    new = {*predictor.columns}.union(*found.values())
    if taken := [name for row in rows for name in row if name in new]:
        raise UserError(f"{data} has a column {taken[0]!r} already: rename it")
    return [row | found.get(number, dict.fromkeys(predictor.columns)) for number, row in enumerate(rows)]


@contextmanager
def _skipped(place: str, bad: list[str] | None) -> Iterator[None]:
    """Add a bad row to `bad`, the first three with place and reason; refuse the row if that is None."""
    try:
        with refused(place):
            yield
    except UserError as error:
        if bad is None:
            remedy = "fix or remove it, or leave its prediction empty by --bad_samples skip"
            raise UserError(f"{error}: {remedy}") from error
        bad.append(str(error) if len(bad) < 3 else "")


def _written(part: Path) -> Iterator[dict]:
    with part.open(encoding="utf-8") as file:
        yield from map(json.loads, file)


def _write_csv(part: Path, separator: str) -> None:
    """Turn JSON Lines into CSV, with the columns of all rows; lists become texts."""
    columns = list(dict.fromkeys(name for row in _written(part) for name in row))
    whole = part.with_suffix(".csv")
    with whole.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        for row in _written(part):
            lists = {name: value for name, value in row.items() if isinstance(value, list)}
            texts = {name: separator.join("" if each is None else str(each) for each in lists[name]) for name in lists}
            writer.writerow(row | texts)
    os.rename(whole, part)


def score(predictor: Predictor, rows: Iterator[dict]) -> list[str]:
    """Return lines with the scores of the predicted rows that have labels; empty if there is no column of labels.

    The scores are those that a run prints after its test. Rows with labels that the model lacks do not count.
    """
    settings, names = predictor.settings, predictor.names
    if settings.task == "image-classification":
        settings = replace(settings, label_column="label")
    kind = kind_of(settings, names)
    label_of = kind.reader(settings, {})[1] if kind else partial(_class_of, settings.label_column, names)
    counts = kind and kind.start_counts(torch.device("cpu"))
    confusion, right, total, unknown = np.zeros((len(names),) * 2, int), 0, 0, Counter()
    labels_of_file = False
    for part in iter(lambda: list(itertools.islice(rows, CHUNK)), []):
        labelled = []
        for row in part:
            labels_of_file |= any(name.strip() in row for name in settings.label_column.split(","))
            with suppress(ValueError):  # no label
                labels = label_of(row)
                new = [each for each in labels if isinstance(each, str) and each not in (*names, UNLABELLED)]
                unknown.update(new[:1])
                labelled += [] if new else [(row, labels)]
        if kind and labelled and (found := _as_tensors(predictor, *zip(*labelled, strict=True))):
            logits, tensors = found
            total += len(tensors["labels"])
            right += int(kind.correct(logits, **tensors))
            if counts is not None:
                kind.count(counts, logits, **tensors)
        for row, (label,) in labelled if not kind else ():
            confusion[names.index(label), names.index(row[PREDICTED])] += 1
    found = "; ".join(f"{label!r}: {count:,}" for label, count in unknown.most_common(3))
    lines = [f"{unknown.total():,} rows have labels that the model lacks and do not count ({found})"] if unknown else []
    if not (total or confusion.any()):
        return [*lines, f"No scores: no label in {settings.label_column!r} can be read"] if labels_of_file else lines
    if not kind:
        return lines + _describe_confusion(names, confusion)
    if settings.problem_type == "regression":
        lines.append(f"MSE {counts['mse'].compute().mean():.4f} of {total:,} rows")
    else:
        lines.append(f"Accuracy {right / total:.2%} of {total:,} {'words' if kind.per_token else 'rows'}")
    more = kind.describe(counts.compute()).lines if counts is not None else []
    return lines + [line.removeprefix("Test ") for line in more]


def _class_of(column: str, names: list[str], row: dict) -> list[str]:
    """Return a row's class by its name, or raise ValueError for a row without a label."""
    text = read_text({column: "" if row.get(column) is None else str(row[column])}, column).strip()
    return [str(int(text.split(".")[0])) if text not in names and WHOLE.fullmatch(text) else text]  # 1.0 is the class 1


def _describe_confusion(names: list[str], confusion: np.ndarray) -> list[str]:
    right, total = int(confusion.trace()), int(confusion.sum())
    low, high = wilson_interval(right / total, total)
    lines = [f"Accuracy {right / total:.2%} of {total:,} rows ({low:.2%} to {high:.2%}, 95 % interval)"]
    classes = describe_classes(names, confusion.tolist())
    return [*lines, f"Macro-F1 {classes['macro_f1']:.2%}", *class_lines(classes)]


def _as_tensors(
    predictor: Predictor, rows: tuple[dict], labels: tuple[list]
) -> tuple[Tensor, dict[str, Tensor]] | None:
    """Return logits with the predictions that the rows have, and the labels as the kind of labels counts them.

    None: there are no labels for the model's outputs.
    """
    names, problem = predictor.names, predictor.settings.problem_type
    if problem == "regression":
        values = [[float(row[column]) for column in predictor.columns] for row in rows]
        return (torch.tensor(values), {"labels": torch.tensor(labels)}) if len(labels[0]) == len(names) else None
    found = [row[PREDICTED] for row in rows]
    if problem == "multi_label_classification":
        several = "," in predictor.settings.label_column
        true = labels if several else [[name in row for name in names] for row in labels]
        if len(true[0]) != len(names):
            return None
        chosen = [[name in row for name in names] for row in found]
        return torch.tensor(chosen) * 2.0 - 1, {"labels": torch.tensor(true).float()}
    words = []  # whether a word begins a text, its label and the predicted one
    for pairs in zip(labels, found, strict=True):
        known = [pair for pair in zip(*pairs, strict=False) if pair[0] != UNLABELLED and pair[1]]
        words += [(place == 0, *pair) for place, pair in enumerate(known)] if len(pairs[0]) == len(pairs[1]) else []
    if not words:
        return None
    begins, true, chosen = zip(*words, strict=True)
    logits = one_hot(torch.tensor(list(map(names.index, chosen))), len(names)).float()
    places = {"words": torch.arange(len(words)), "begins": torch.tensor(begins)}
    return logits[None], {"labels": torch.tensor(list(map(names.index, true)))} | places
