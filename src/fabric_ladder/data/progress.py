"""Show the progress of work on many samples: a bar on a terminal, and a line now and then in a log."""

import sys
from collections.abc import Iterable, Iterator
from time import perf_counter

from tqdm import tqdm

QUIET = 10  # seconds; work that takes less shows nothing
PAUSE = 60  # seconds between two lines in a log


class Progress:
    """Counts samples, and shows the count, the speed and the share that is done.

    Args:
        work: What is done, at the start of the line.
        total: The number of samples, if it is known.

    Attributes:
        done: The number of samples so far.
    """

    def __init__(self, work: str, total: int | None = None):
        self.work = work
        self.total = total
        self.done = 0
        self._begun = perf_counter()
        self._next = self._begun + QUIET
        hidden = not sys.stderr.isatty()
        self._bar = tqdm(desc=work, total=total, unit=" samples", delay=QUIET, leave=False, disable=hidden)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_) -> None:
        self._bar.close()

    def add(self, count: int) -> None:
        """Count finished samples."""
        self.done += count
        self._bar.update(count)
        now = perf_counter()
        if self._bar.disable and now >= self._next:
            self._next = now + PAUSE
            of = f" of {self.total:,} ({self.done / self.total:.0%})" if self.total else ""
            speed = self.done / (now - self._begun)
            print(f"{self.work}: {self.done:,}{of} samples, {speed:,.0f} samples/s", file=sys.stderr, flush=True)

    def count(self, samples: Iterable) -> Iterator:
        """Yield and count the samples."""
        for sample in samples:
            self.add(1)
            yield sample
