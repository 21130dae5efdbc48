"""All that is to be measured on a GPU, worst doubt first, as far as the minutes go.

    python benchmarks/harvest.py --minutes 9 --out FILE [--previous FILE …]
    python benchmarks/harvest.py --out FILE --rehearse         all of it on a CPU, with tiny sizes

It needs no network: data are those in FABRIC_LADDER_DATA, else made here; weights are random, which costs what
pretrained ones cost. Every entry (see harvest_entries.py) is a process of its own with a time limit of its own, and is
written to the file as soon as it is there. What a previous file has for the same GPU, versions and code is taken over
instead of measured; the file itself, if it is there, is such a previous one. What failed before comes last. An entry
is not begun when its estimated time does not fit into what is left. What is left out stands in the file with its
reason. Ctrl-C or SIGTERM leaves a whole file. The exit status is 1 when an entry failed or a check did not pass.

`python benchmarks/gpu_figures.py` puts the figures into the README and docs/gpu.md.
"""

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from time import monotonic, strftime

import common  # first of all: it makes the project importable without an installation
import torch
from harvest_entries import CHECKS, Entry, Job, Measured, entries_of, prepare

from fabric_ladder.advice import show_errors
from fabric_ladder.environment import write_whole
from fabric_ladder.tools.outputs import check_outputs

START = 15.0  # seconds until a process has imported its libraries and made its model: a guess
SOURCES = ("src", "benchmarks", "scripts", "configs", "local_dataset_utilities.py")
STOPPED = {signal.SIGINT: 130, signal.SIGTERM: 143}


class Harvest:
    """A file of measured entries, and what may still be added to it.

    Args:
        out: The file.
        machine: Versions, hardware and code, see `describe`.
        previous: Contents of other harvests, the newest last.
        minutes: That are left; None: as many as it takes.
    """

    def __init__(self, out: Path, machine: dict, previous: list[dict], minutes: float | None = None):
        self.out, self.machine = out, machine
        self.left_out: dict[str, str] = {}
        self.entries: dict[str, dict] = {}
        self.stopping = False
        self._end = None if minutes is None else monotonic() + 60 * minutes
        self._lock = threading.Lock()
        for harvest in previous:
            if key_of(harvest["machine"]) == key_of(machine):
                for name, record in harvest["entries"].items():
                    if "failed" not in record or name not in self.entries:
                        self.entries[name] = record

    def to_do(self, entries: list[Entry]) -> list[Entry]:
        """Return the entries that nobody has measured, in their order, and after them those that failed before."""
        before = [entry for entry in entries if "failed" in self.entries.get(entry.name, {})]
        return [entry for entry in entries if entry.name not in self.entries] + before

    def run(self, entry: Entry, job: Job) -> None:
        """Measure an entry, if there is time for it, and write the file."""
        command = entry.command(self.figures()) if callable(entry.command) else entry.command
        estimated = START + entry.seconds * job.slowness
        left = float("inf") if self._end is None else self._end - monotonic()
        if reason := self._why_not(entry, command, estimated, left):
            return self._leave_out(entry, reason)
        start, limit = monotonic(), min(left, 900.0 if job.rehearse else max(90.0, 4 * estimated))
        record = {"command": common.shown(command), "date": strftime("%Y-%m-%dT%H:%M:%S%z")}
        print(f"{entry.name} … (about {estimated:.0f} s)", file=sys.stderr, flush=True)
        try:
            figures = common.run_command(command, limit=limit)
            record["figures"] = entry.complete(figures) if entry.complete else figures
        except subprocess.TimeoutExpired as error:
            if limit == left:  # not its own fault: the next harvest begins with it
                return self._leave_out(entry, f"stopped after {limit:.0f} s, at the end of the minutes")
            record |= {"failed": f"took more than {limit:.0f} s"} | partial(error)
        except common.ChildError as error:
            if self.stopping:
                return self._leave_out(entry, "stopped")
            if error.status == 2 and "error: " in str(error) and "out of memory" not in str(error):
                return self._leave_out(entry, str(error).split("error: ", 1)[1])  # the project's own refusal
            record |= {"failed": str(error)} | partial(error)
        except (RuntimeError, LookupError, ValueError) as error:  # figures that are not as they should be
            record["failed"] = f"{type(error).__name__}: {error}"
        record["seconds"] = round(monotonic() - start, 1)
        problem = f", failed: {record['failed']}" if "failed" in record else ""
        print(f"  {entry.name}: {record['seconds']} s{problem}", file=sys.stderr, flush=True)
        with self._lock:
            self.left_out.pop(entry.name, None)
            self.entries[entry.name] = record
        self.write()

    def figures(self) -> Measured:
        """Return the figures so far, by entry."""
        with self._lock:
            return {name: record["figures"] for name, record in self.entries.items() if "failed" not in record}

    def write(self) -> None:
        """Write the file, whole."""
        with self._lock:
            content = {"machine": self.machine, "entries": self.entries, "left_out": self.left_out}
            write_whole(self.out, json.dumps(content, indent=1, ensure_ascii=False) + "\n")

    def stop(self) -> None:
        """Begin nothing more, and end what runs."""
        self.stopping = True
        for child in list(common.CHILDREN):
            common.end(child)

    def _why_not(self, entry: Entry, command: list[str] | None, estimated: float, left: float) -> str | None:
        """Return why an entry is not begun."""
        if self.stopping:
            return "stopped before"
        if entry.left_out:
            return entry.left_out
        if command is None:
            return "what it goes by has not been measured"
        if estimated > left:
            return f"needs about {estimated:.0f} s, and {max(0.0, left):.0f} s were left"
        return None

    def _leave_out(self, entry: Entry, reason: str) -> None:
        with self._lock:
            self.left_out[entry.name] = reason
        self.write()

    @property
    def problems(self) -> list[str]:
        """The entries that failed, and the checks that did not pass."""
        return [name for name, record in self.entries.items()
                if "failed" in record or not record["figures"].get("passed", True)]  # fmt: skip


def partial(error: Exception) -> dict:
    """Return what a process had written before it failed, as a part of its record."""
    figures = getattr(error, "figures", None)
    return {"partial": figures} if figures else {}


def key_of(machine: dict) -> list:
    """Return what must be alike in harvests whose figures stand in one file."""
    hardware = machine["hardware"]
    where = hardware.get("gpu") or hardware["processor"], machine["gpus"]
    return [*where, machine["versions"], machine["code"], machine["rehearsal"]]


def hash_code() -> str:
    """Return a hash of all files that a figure can depend on: where there is no git, or changes not committed."""
    found = hashlib.sha256()
    files = [path for name in SOURCES for path in sorted([common.ROOT / name, *(common.ROOT / name).rglob("*")])]
    for path in files:
        if path.suffix in (".py", ".json", ".yaml", ".html") and "results" not in path.parts:
            found.update(str(path.relative_to(common.ROOT)).encode() + path.read_bytes())
    return found.hexdigest()[:12]


def describe(device: str, rehearse: bool, commit: str | None) -> dict:
    """Return versions, hardware, code and what the doctor says; by another process, so that this one holds no GPU."""
    machine = common.run_command([CHECKS, "machine", "--device", device])
    machine |= {"code": hash_code(), "rehearsal": rehearse}
    return machine | ({"commit": commit} if commit else {})


def read_harvests(paths: list[Path], parser: argparse.ArgumentParser) -> list[dict]:
    """Return the contents of harvests' files."""
    found = []
    for path in paths:
        try:
            harvest = json.loads(path.read_text(encoding="utf-8"))
            key_of(harvest["machine"]), harvest["entries"].items()
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            parser.error(f"{path} is no file of a harvest ({type(error).__name__}: {error})")
        found.append(harvest)
    return found


def stop_on_signals() -> None:
    """Let SIGTERM end this process as Ctrl-C does, with the file written."""

    def interrupt(number: int, _) -> None:
        raise KeyboardInterrupt(number)

    for number in STOPPED:
        signal.signal(number, interrupt)


def run_all(harvest: Harvest, entries: list[Entry], job: Job, workers: int = 1) -> int:
    """Run the entries, and return the exit status."""
    with ThreadPoolExecutor(workers) as pool:
        running = [pool.submit(harvest.run, entry, job) for entry in harvest.to_do(entries)]
        try:
            for each in running:
                each.result()
        except BaseException as stopped:
            harvest.stop()
            while wait(running, timeout=1).not_done:  # what was waiting is left out, and says so
                harvest.stop()  # a process may just have begun
            if not isinstance(stopped, KeyboardInterrupt):
                raise
            return STOPPED.get(stopped.args[0] if stopped.args else signal.SIGINT, 130)
    return int(bool(harvest.problems))


def main() -> int:
    """Measure, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, help="default: as many as it takes")
    parser.add_argument("--out", type=Path, required=True, help="file of the harvest")
    parser.add_argument("--previous", type=Path, nargs="+", default=[], metavar="FILE", help="earlier harvests")
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="entries with one of these in their name")
    parser.add_argument("--commit", help="of this code, where there is no git")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, tiny: shows that the commands work")
    args = parser.parse_args()
    show_errors()
    if args.minutes is not None and not 0 < args.minutes < float("inf"):
        parser.error(f"--minutes {args.minutes}: must be a positive number")
    if not args.rehearse and not torch.cuda.is_available():
        parser.error("PyTorch finds no CUDA GPU here; --rehearse runs everything on the CPU, tiny")
    if not args.out.exists():
        check_outputs({"--out": str(args.out)})
    begun = monotonic()
    previous = read_harvests([*args.previous, *([args.out] if args.out.exists() else [])], parser)
    stop_on_signals()
    with tempfile.TemporaryDirectory(prefix="harvest-") as scratch:
        try:
            machine = describe("cpu" if args.rehearse else "cuda", args.rehearse, args.commit)
            os.environ["FABRIC_LADDER_CACHE"] = f"{scratch}/cache"  # so that compiling begins anew
            job = prepare(machine, Path(scratch))
        except KeyboardInterrupt:
            return 130  # nothing is measured yet, and a file that was there is as it was
        if args.out.exists() and key_of(previous[-1]["machine"]) != key_of(machine):
            parser.error(
                f"{args.out} holds a harvest of another GPU, of other versions or of other code: give another "
                "--out; --previous only reads"
            )
        minutes = args.minutes and args.minutes - (monotonic() - begun) / 60
        harvest = Harvest(args.out, machine | {"conditions": job.conditions}, previous, minutes)
        harvest.write()
        chosen = [entry for entry in entries_of(job) if not args.only or any(text in entry.name for text in args.only)]
        status = run_all(harvest, chosen, job, 2 if args.rehearse else 1)
    print(f"{len(harvest.figures())} entries measured, {len(harvest.left_out)} left out: {args.out}")
    for name in harvest.problems:
        print(f"failed: {name}: {harvest.entries[name].get('failed', 'the check did not pass')}")
    return status


if __name__ == "__main__":
    sys.exit(main())
