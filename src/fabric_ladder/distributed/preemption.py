"""Requests to stop a run, by a signal or `max_time`: it stops at the next point from which it can resume exactly."""

import os
import signal
import sys
from time import perf_counter

import torch
import torch.distributed as dist

from fabric_ladder.environment import notebook_shell

STATUS = {"max_time": 124, "SIGINT": 130, "SIGTERM": 143}  # as `timeout` and shells have them
REASONS = (None, *STATUS)


class StopRequest:
    """Catches SIGINT, SIGTERM and the end of `max_time`; a second SIGINT ends the process at once.

    The ranks of a run agree: each tells the others of its request while the next step runs, so that none waits, and all
    learn of it one step later.

    Args:
        max_time: Minutes after which the run is to stop; None: never.
        begun: When the run began, by `perf_counter`.
        ranks: Processes of the run, which must all call `made` equally often.
    """

    def __init__(self, max_time: float | None, begun: float, ranks: int):
        self.reason: str | None = None
        self._own: str | None = None
        self._end = None if max_time is None else begun + 60 * max_time
        self._group = dist.new_group(backend="gloo") if ranks > 1 else None
        self._exchange: tuple[torch.Tensor, dist.Work] | None = None
        self._before = {}
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._catch)
        except ValueError:  # not in the main thread, which alone gets signals
            pass

    def made_alone(self) -> bool:
        """Return whether to stop between two micro-batches: not with several ranks, which must agree first."""
        return self._group is None and self.made()

    def made(self) -> bool:
        """Return whether to stop now; all ranks get the same answer."""
        if self._end is not None and self._own is None and perf_counter() > self._end:
            self._own = "max_time"
        if self._group is None:
            self.reason = self._own
            return self.reason is not None
        if self._exchange:
            code, work = self._exchange
            work.wait()
            self.reason = REASONS[int(code)]
        code = torch.tensor(REASONS.index(self._own))
        self._exchange = code, dist.all_reduce(code, dist.ReduceOp.MAX, self._group, async_op=True)
        return self.reason is not None

    def restore(self) -> None:
        """Restore the signal handlers from before."""
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before = {}

    def close(self) -> None:
        """Restore the signal handlers from before, and end the exchange with the other ranks; all must call it."""
        self.restore()
        if self._exchange:
            self._exchange[1].wait()
            self._exchange = None
        if self._group:  # left to the end of Python, its threads may abort the process
            dist.destroy_process_group(self._group)
            self._group = None

    def _catch(self, number: int, frame) -> None:
        name = signal.Signals(number).name
        if name == "SIGINT" and self._own:
            if notebook_shell():
                raise KeyboardInterrupt
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.raise_signal(signal.SIGINT)
        elif self._own is None:
            self._own = name
            # print is not safe in here: it may be what was interrupted
            os.write(2, b"\nStopping at the next micro-batch; Ctrl-C again stops at once\n")


def exit_for(reason: str, rank: int) -> None:
    """End the process with the exit status of the reason; in a notebook, the cell.

    Other ranks than 0 end without an error, so that no launcher takes them for broken and ends rank 0 first.
    """
    sys.stdout.flush()
    if notebook_shell():
        raise KeyboardInterrupt
    raise SystemExit(STATUS[reason] if rank == 0 else 0)
