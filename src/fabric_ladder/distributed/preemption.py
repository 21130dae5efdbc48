"""Stop a run after a signal, at the next point from which it can resume exactly."""

import os
import signal
import sys
from contextlib import suppress

import torch
import torch.distributed as dist

from fabric_ladder.errors import notebook_shell

STATUS = {"SIGINT": 130, "SIGTERM": 143}  # exit statuses of shells
REASONS = (None, *STATUS)


class StopRequest:
    """Catches SIGINT and SIGTERM; a second SIGINT ends the process immediately.

    The ranks of a run agree. Each sends its request to the others while the next step runs, so that no rank waits. All
    of them receive it one step later.

    Args:
        ranks: Processes of the run. All must call `requested` equally often.
    """

    def __init__(self, ranks: int):
        self.reason: str | None = None
        self._own: str | None = None
        self._ranks = ranks
        self._group: dist.ProcessGroup | None = None
        self._exchange: tuple[torch.Tensor, dist.Work] | None = None
        self._before = {}

    def begin(self) -> None:
        """Catch signals from now on. All ranks must call it."""
        if self._ranks > 1:
            self._group = dist.new_group(backend="gloo")
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._catch)
        except ValueError:  # only the main thread gets signals
            pass

    def requested_within_step(self) -> bool:
        """Return whether to stop between two micro-batches: False with several ranks, which must agree first."""
        return self._ranks == 1 and self.requested()

    def requested(self) -> bool:
        """Return whether to stop now. All ranks get the same answer."""
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
        """Restore the previous signal handlers."""
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before = {}

    def close(self) -> None:
        """Restore the previous signal handlers, and end the exchange with the other ranks; all must call it."""
        self.restore()
        if self._exchange:
            self._exchange[1].wait()
            self._exchange = None
        if self._group:  # at the end of Python, its threads could abort the process
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
            # print is not safe here, because the signal may have interrupted a print
            with suppress(OSError):  # Ctrl-C may have ended the reader of a pipe, too
                os.write(2, b"\nStopping at the next micro-batch; press Ctrl-C again to stop immediately\n")


def exit_for(reason: str, rank: int) -> None:
    """End the process with the exit status of the reason; in a notebook, end the cell.

    All ranks except 0 end without an error. Otherwise a launcher would end rank 0 before it has finished.
    """
    sys.stdout.flush()
    if notebook_shell():
        raise KeyboardInterrupt
    raise SystemExit(STATUS[reason] if rank == 0 else 0)
