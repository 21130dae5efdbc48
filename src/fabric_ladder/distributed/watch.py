"""End the whole run within a minute after a rank dies or hangs, with a line that names the rank.

Without this, the other ranks wait in the next collective, for half an hour over NCCL, and no message names the rank.
"""

import os
import re
import socket
import sys
import threading
from datetime import timedelta
from pathlib import Path
from time import monotonic, sleep

import psutil
import torch.distributed as dist

BEAT = 1.0  # seconds between two signs of life, which a thread gives even while its rank compiles or loads
PATIENCE = 30.0  # seconds without a sign of life after which a rank counts as dead


class RankWatch(threading.Thread):
    """Gives signs of life in the key-value store of the ranks, and ends this process when another rank stops doing so.

    Each rank watches the previous rank, so that the store's work grows linearly with the number of ranks. A rank that
    finds a dead rank writes it into the store for all others. A process on the same machine is also checked by its
    process number. Until the ranks have met, a launched process watches the process that launched it.

    Attributes:
        last_words: Is called before this process ends, and returns the end of the line that names the dead rank.
    """

    def __init__(self):
        super().__init__(daemon=True, name="rank-watch")
        launched = "LOCAL_RANK" in os.environ and not dist.is_torchelastic_launched()
        self._parent = os.getppid() if launched else None
        self._met, self._stopping = False, threading.Event()
        self.last_words = lambda: ""
        self.start()

    def meet(self) -> None:
        """Watch the other ranks from now on. All ranks must call it."""
        self._rank, ranks = dist.get_rank(), dist.get_world_size()
        self._watched = (self._rank - 1) % ranks
        self._store = dist.distributed_c10d._get_default_store().clone()  # a connection of its own does not queue
        self._store.set_timeout(timedelta(seconds=PATIENCE / 2))
        self._store.set(f"alive/{self._rank}", "")
        self._ranks: list = [None] * ranks
        dist.all_gather_object(self._ranks, (socket.gethostname(), os.getpid(), _process_space()))
        self._sign, self._seen, self._met = b"", monotonic(), True

    def run(self) -> None:
        """Beat until `stop`; end the process when a rank has died."""
        while not self._stopping.wait(BEAT):
            dead = self._find_dead()
            if dead is not None and not self._stopping.is_set():
                line = f"error: {dead} has died or hangs; the run stops on all ranks{self.last_words()}"
                print(line, file=sys.__stderr__, flush=True)
                if self._met and self._rank == 0:
                    sleep(2 * BEAT)  # the store is in this process, and the other ranks still read it
                os._exit(1)  # the main thread may be inside a collective that never ends

    def find_dead(self) -> None:
        """Wait until a rank is found dead, which ends this process; return if all are alive."""
        self.join(2 * (PATIENCE if self._met else BEAT))

    def stop(self) -> None:
        """Stop watching before this rank ends, which would abort if a thread used the store at that moment."""
        self._stopping.set()
        if self is not threading.current_thread():
            self.join(2 * BEAT)

    def _find_dead(self) -> str | None:
        """Describe a rank that is dead or hangs, if there is one."""
        if not self._met:
            return "rank 0, which launched this one," if self._parent and os.getppid() != self._parent else None
        dead = next((rank for rank in (0, self._watched) if self._is_gone(rank)), None)
        if dead != 0:  # the store is in its process
            try:
                dead = self._ask_store(dead)
            except RuntimeError:  # rank 0 is gone, or its machine
                dead = 0
        if dead is None:
            return None
        host, process, _ = self._ranks[dead]
        return f"rank {dead} (process {process} on {host})"

    def _ask_store(self, dead: int | None) -> int | None:
        """Give a sign of life, and return the dead rank: `dead`, the watched rank, or one found by another rank."""
        self._store.set(f"alive/{self._rank}", str(monotonic()))  # the value changes with each beat
        if self._store.check(["dead"]):
            return int(self._store.get("dead"))
        sign = self._store.get(f"alive/{self._watched}")
        if sign != self._sign:
            self._sign, self._seen = sign, monotonic()
        if dead is None and monotonic() - self._seen < PATIENCE:
            return None
        self._store.set("dead", str(self._watched))
        return self._watched

    def _is_gone(self, rank: int) -> bool:
        """Return whether a rank's process on this machine is dead."""
        _, process, space = self._ranks[rank]
        if space != self._ranks[self._rank][2]:
            return False
        try:
            return psutil.Process(process).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True


def _process_space() -> str:
    """Return an identifier of the machine or container; process numbers are comparable only within one."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return socket.gethostname()


def running_watch() -> RankWatch | None:
    """Return the watch of this process, if it runs."""
    return next((thread for thread in threading.enumerate() if isinstance(thread, RankWatch)), None)


def lost_contact(error: BaseException) -> bool:
    """Return whether a collective has failed because another rank is gone."""
    return isinstance(error, dist.DistBackendError | dist.DistNetworkError) or (
        isinstance(error, RuntimeError) and re.search(r"[Cc]onnection (closed|reset|refused)", str(error)) is not None
    )
