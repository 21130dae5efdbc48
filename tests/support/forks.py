"""Run a case in a fork of the tests' process, which bounds its time and memory, and return its outcome."""

import io
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from fabric_ladder.techniques.advice import explain_errors

SECONDS, MEMORY = 60, 3 * 2**30  # limits of a case; the memory is in addition to that of the tests
RUNS = "runs"


def in_fork(action: Callable[[], object], folder: Path) -> str:
    """Return the result of an action in a fork with this working folder: `RUNS`, or the printed error.

    Raises:
        AssertionError: The fork ends with a traceback, by a signal, or too late.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _run(action, folder, writer)
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8", errors="backslashreplace") as end:
        printed = end.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 2), f"ended by {signal.Signals(-code).name if code < 0 else code}\n{printed}"
    return printed if code else RUNS


def _run(action: Callable[[], object], folder: Path, writer: int) -> None:
    """Run the action in the fork, write the printed error, and end without pytest's work at exit."""
    code, printed = 0, io.StringIO()
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(SECONDS)
        used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
        os.chdir(folder)
        for number in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
        action()
    except SystemExit as end:
        code = end.code or 0
    except BaseException as error:
        code, sys.stderr, sys.__stderr__ = 1, printed, printed
        explain_errors()
        try:
            sys.excepthook(type(error), error, error.__traceback__)
        except SystemExit as end:
            code = end.code
    os.write(writer, printed.getvalue().encode(errors="backslashreplace")[-(2**15) :])  # a pipe holds more bytes
    os._exit(code)
