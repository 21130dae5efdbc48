"""A rank that dies or hangs ends the whole run within a minute, with a line that names it.

Without this, the others wait in the next collective: for half an hour over NCCL, and without a word of who is missing.
"""

import os
import re
import socket
import sys
import threading
from datetime import timedelta
from pathlib import Path
from time import monotonic

import psutil
import torch.distributed as dist

BEAT = 1.0  # seconds between two signs of life
PATIENCE = 30.0  # seconds without one; a rank that compiles or loads still gives them, from its own thread


class RankWatch(threading.Thread):
    """Gives signs of life in the key-value store of the ranks, and looks for those of the rank before.

    Each rank watches one other, so the store's work grows with the number of ranks, not with its square; who finds a
    dead one tells all through the store. A process on the same machine is also looked for by its number. Until the
    ranks have met, a process that another one launched watches that one.
    """

    def __init__(self):
        super().__init__(daemon=True, name="rank-watch")
        launched = "LOCAL_RANK" in os.environ and not dist.is_torchelastic_launched()
        self._parent = os.getppid() if launched else None
        self._met, self._stopping = False, threading.Event()
        self.start()

    def meet(self) -> None:
        """From now on, watch the other ranks. All ranks must call it."""
        self.rank, ranks = dist.get_rank(), dist.get_world_size()
        self.store = dist.distributed_c10d._get_default_store().clone()  # a connection of its own: no waiting in line
        self.store.set_timeout(timedelta(seconds=PATIENCE / 2))
        self.others: list = [None] * ranks
        dist.all_gather_object(self.others, (socket.gethostname(), os.getpid(), _process_space()))
        self.watched = (self.rank - 1) % ranks
        self._sign, self._seen = b"", monotonic()
        self._met = True

    def run(self) -> None:
        """Beat until `stop`; end the process when a rank has died."""
        while not self._stopping.wait(BEAT):
            found = self._find_dead() if self._met else self._find_dead_parent()
            if found is not None and not self._stopping.is_set():
                print(f"error: {found} has died or hangs; the run stops on all ranks", file=sys.__stderr__, flush=True)
                os._exit(1)  # the main thread may be inside a collective that never ends

    def stop(self) -> None:
        """Watch no longer: this rank is about to end, and would abort if a thread were in the store then."""
        self._stopping.set()
        if self is not threading.current_thread():
            self.join(2 * BEAT)

    def _find_dead_parent(self) -> str | None:
        return "rank 0, which launched this one," if self._parent and os.getppid() != self._parent else None

    def _find_dead(self) -> str | None:
        gone = next((rank for rank in (0, self.watched) if self._is_gone(rank)), None)
        if gone == 0:  # the store was in its process
            return self._describe(0)
        try:
            self.store.set(f"alive/{self.rank}", str(monotonic()))  # any value that is another in each beat
            if self.store.check(["dead"]):
                return self._describe(int(self.store.get("dead")))
            sign = self.store.get(f"alive/{self.watched}") if self.store.check([f"alive/{self.watched}"]) else b""
            if sign != self._sign:
                self._sign, self._seen = sign, monotonic()
            if gone is None and monotonic() - self._seen < PATIENCE:
                return None
            self.store.set("dead", str(self.watched))
            return self._describe(self.watched)
        except RuntimeError:  # rank 0 is gone, or its machine
            return self._describe(0)

    def _describe(self, rank: int) -> str:
        host, process, _ = self.others[rank]
        return f"rank {rank} (process {process} on {host})"

    def _is_gone(self, rank: int) -> bool:
        """Tell whether a rank's process is dead; of other machines that cannot be seen."""
        _, process, space = self.others[rank]
        if space != self.others[self.rank][2]:
            return False
        try:
            return psutil.Process(process).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True


def _process_space() -> str:
    """Return what tells machines and containers apart in which process numbers mean the same."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return socket.gethostname()


def running_watch() -> RankWatch | None:
    """Return the watch of this process."""
    return next((thread for thread in threading.enumerate() if isinstance(thread, RankWatch)), None)


def lost_contact(error: BaseException) -> bool:
    """Tell whether a collective has failed because another rank is gone."""
    return isinstance(error, dist.DistBackendError | dist.DistNetworkError) or (
        isinstance(error, RuntimeError) and re.search(r"[Cc]onnection (closed|reset|refused)", str(error)) is not None
    )
