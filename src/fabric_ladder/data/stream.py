"""Stream training samples: read them again in each epoch, and shuffle them in a buffer of fixed size.

The order depends only on the files, the seed, the epoch and the size of the buffer. Every rank reads all samples, and
keeps its share of each effective batch. To resume, the samples of the finished steps are read again and skipped.
"""

import hashlib
import json
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np

from fabric_ladder.data.progress import Progress
from fabric_ladder.data.sampler import EffectiveBatchSampler
from fabric_ladder.errors import UserError
from fabric_ladder.settings import DataSettings, Settings

STREAM_CACHE_FORMAT = 1  # raise it whenever the first pass would find other facts in the same files
HEAD = 10_000  # the first samples, which are tokenized before the training: for a new tokenizer, and for notices
TASKS = ("text-classification", "instruction-tuning")
ONE_CLASS = "single_label_classification"


def check_stream(settings: DataSettings) -> None:
    """Refuse tasks whose samples cannot be streamed."""
    if settings.stream_buffer and (settings.task not in TASKS or settings.problem_type != ONE_CLASS):
        raise UserError(
            f"--stream_buffer {settings.stream_buffer}: only for --task {' and '.join(TASKS)}, with one class per "
            "text; leave it out"
        )


class Survey:
    """Counts all training samples in a first pass, and keeps only the first ones.

    Args:
        most: The number of samples to use; None: all.
    """

    def __init__(self, most: int | None):
        self.most = most
        self.counts = []  # of each table
        self.labels = Counter()
        self.content = hashlib.sha256()

    def keep(self, rows: Iterator[dict]) -> Iterator[dict]:
        """Count the rows of a table, and yield those to keep: the first ones, and the first one of each label."""
        self.counts.append(0)
        before = sum(self.counts)
        left = None if self.most is None else self.most - before
        for number, row in enumerate(islice(rows, left), 1):
            self.counts[-1] = number
            content = {name: value for name, value in row.items() if name != "location"}
            self.content.update(json.dumps(content, ensure_ascii=False).encode())
            label = row.get("label")
            self.labels[label] += 1
            if before + number <= HEAD or self.labels[label] == 1:
                yield row

    def facts(self, class_counts: list[int]) -> dict:
        """Return the facts about the stream, as JSON, with the number of samples of each class."""
        return {"counts": self.counts, "class_counts": class_counts, "content": self.content.hexdigest()}


class Stream:
    """The training samples of a run that are not in the cache.

    Args:
        read: Yields the rows of a table, given its number.
        encode: Turns columns of rows into the columns of a split of `TextDatasets`. It may leave out samples, and
            returns also how many for each reason.
        facts: From `Survey.facts`.
        buffer: Samples in the shuffle buffer.

    Attributes:
        class_counts: Samples of each class.
    """

    def __init__(
        self,
        read: Callable[[int], Iterator[dict]],
        encode: Callable[[dict[str, list]], tuple[dict[str, list], dict[str, int]]],
        facts: dict,
        buffer: int,
    ):
        self.read = read
        self.encode = encode
        self.buffer = buffer
        self.class_counts = np.array(facts["class_counts"], int)
        self._counts = facts["counts"]

    def __len__(self) -> int:
        return sum(self._counts)

    def samples(self, seed: int, epoch: int) -> Iterator[tuple[int, dict]]:
        """Yield the number and the row of each sample in an epoch's order. Numbers count the rows of all tables."""
        tables = np.random.default_rng([seed, epoch, 1]).permutation(len(self._counts))
        return shuffle(self._in_turn(tables), self.buffer, np.random.default_rng([seed, epoch]))

    def _in_turn(self, tables: np.ndarray) -> Iterator[tuple[int, dict]]:
        starts = np.cumsum([0, *self._counts])
        for table in tables:
            number = start = int(starts[table])
            for number, row in enumerate(islice(self.read(table), self._counts[table]), start + 1):
                yield number - 1, row
            if number < starts[table + 1]:
                raise UserError(f"a training file has changed since the start: only {number - start:,} rows are left")


def shuffle(samples: Iterator, size: int, rng: np.random.Generator) -> Iterator:
    """Yield samples in a random order, with at most `size` of them in memory, and one more that is being exchanged.

    If all samples fit, their order is the same permutation as without streaming.
    """
    buffer = list(islice(samples, size))
    for sample in samples:
        place = rng.integers(size)
        yield buffer[place]
        buffer[place] = sample
    for place in rng.permutation(len(buffer)):
        yield buffer[place]


class StreamedBatch(NamedTuple):
    """The samples of an effective batch, before they are tokenized.

    Attributes:
        numbers: As from `Stream.samples`.
        rows: As from `Stream.samples`.
        tokens: Maximum padded tokens of a micro-batch; None: not limited.
    """

    numbers: list[int]
    rows: list[dict]
    tokens: int | None


class StreamSampler(EffectiveBatchSampler):
    """The effective batches of a stream.

    The lengths of its samples are not known. So the batches for trials and predictions have only samples of
    `max_length` tokens. These batches are a full one and the last one of an epoch.
    """

    def __init__(self, stream: Stream, settings: Settings, rank: int, ranks: int):
        last = len(stream) % settings.batch_size or settings.batch_size
        lengths = np.full(min(len(stream), settings.batch_size + last), settings.max_length)
        instructed = settings.task == "instruction-tuning"
        items = np.full_like(lengths, max(1, settings.max_length - 1) if instructed else 1)
        super().__init__(lengths, items, settings, rank, ranks)
        self.stream = stream

    def __len__(self) -> int:
        return math.ceil(len(self.stream) / self.settings.batch_size)

    def __iter__(self) -> Iterator[StreamedBatch]:
        if self.start >= len(self):
            return
        size = self.settings.batch_size
        samples = self.stream.samples(self.settings.seed, self.epoch)
        skipped = self.start * size
        if skipped and self.rank == 0:
            with Progress("Skipping the samples of finished steps", skipped) as progress:
                deque(progress.count(islice(samples, skipped)), maxlen=0)
        elif skipped:
            deque(islice(samples, skipped), maxlen=0)
        while batch := list(islice(samples, size)):
            yield StreamedBatch(*map(list, zip(*batch, strict=True)), self._tokens())
