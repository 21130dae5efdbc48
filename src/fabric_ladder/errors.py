"""Errors that the user can fix (one line, exit status 2), and reading files that the user wrote."""

import atexit
import functools
import json
import os
import select
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TextIO

OUT_OF_MEMORY = (
    "DefaultCPUAllocator: can't allocate memory",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",  # raised when an expandable segment is mapped
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",  # the memory left is too small for cuBLAS itself
    "MPS backend out of memory",
)
DEBUG = "FABRIC_LADDER_DEBUG"  # environment variable
LONGEST = 1000  # characters of a line on stderr; a longer line loses its middle


class UserError(ValueError):
    """An error that the user can fix; it is shown as one line with the problem and the remedy."""


class NotFiniteError(UserError):
    """A loss or a gradient is NaN or infinite; `techniques.advice.explain` adds what to try."""


class Checked(SystemExit):
    """Ends a script, with exit status 0, whose settings and machine have passed all checks: `--check_only`."""

    def __init__(self, settings):
        super().__init__(0)
        self.settings = settings
        print(f"{settings.name} can run here")


def explain_user_error(error: BaseException) -> str | None:
    """Return the line of a `UserError` or a missing package, or None: a bug keeps its traceback."""
    if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("fabric_ladder"):
        return (
            f"{sys.executable} lacks the package {error.name}: pip install -r requirements.txt, or install with "
            "`make run` and start the script with .venv/bin/python"
        )
    return str(error) if isinstance(error, UserError) else None


def show_errors(explain: Callable[[BaseException], str | None] = explain_user_error) -> None:
    """From now on, print explained errors as one line on stderr; in a script, end with exit status 2.

    Args:
        explain: Returns the line of an error that the user can fix, or None. `techniques.advice.explain` explains more
            errors, but imports torch.
    """

    def in_script(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        line = explain(error)
        if isinstance(error, BrokenPipeError) and drop_unread_output():
            raise SystemExit(1)
        if isinstance(error, KeyboardInterrupt):  # while nothing of a run is there that could be saved
            sys.__stderr__.write("Stopped by Ctrl-C\n")
        elif line is None:
            sys.__excepthook__(kind, error, trace)
        else:
            print_error(error, line, sys.__stderr__)  # torch.distributed's own hook holds sys.stderr back
            raise SystemExit(2)  # raised inside the hook, it sets the exit status

    def in_notebook(shell, kind, error, trace, tb_offset=None):
        if (line := explain(error)) is None:
            shell.showtraceback((kind, error, trace), tb_offset)
        else:
            print_error(error, line)

    if shell := notebook_shell():
        shell.set_custom_exc((Exception,), in_notebook)
        return
    atexit.unregister(drop_unread_output)
    atexit.register(drop_unread_output)
    sys.excepthook = in_script


def notebook_shell():
    """Return IPython's shell when this process is a notebook kernel, else None."""
    if "ipykernel" not in sys.modules:
        return None
    from IPython import get_ipython

    return get_ipython()


def drop_unread_output() -> bool:
    """Drop the rest of the output if nothing reads it any more, as after `doctor.py | head`; return whether."""
    if not hasattr(select, "poll"):  # on Windows
        return False
    (poll := select.poll()).register(1, 0)
    if unread := bool(poll.poll(0)):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return unread


def first_line(error: BaseException, length: int = 200) -> str:
    """Return the first line of an error's message, at most `length` characters, or the name of its class."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:length]


def print_error(error: BaseException, line: str, stream: TextIO | None = None) -> None:
    """Print an error as one line, after the whole traceback if FABRIC_LADDER_DEBUG is 1.

    Args:
        error: If a library's error caused it, the line ends with the way to see that one.
        line: The problem and the remedy. A rank other than 0 is named.
        stream: Default: stderr.
    """
    stream = stream or sys.stderr
    rank = os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or "0"
    start = f"error on rank {rank}" if rank.isdecimal() and rank != "0" else "error"
    line = " ".join(f"{start}: {line}".split())  # it may quote a value of any length
    line = line if len(line) <= LONGEST else f"{line[: LONGEST * 2 // 3]} … {line[-LONGEST // 3 :]}"
    if os.environ.get(DEBUG) == "1":
        traceback.print_exception(error, file=stream)
    elif isinstance(error, UserError) and isinstance(error.__cause__, Exception):
        line += f" ({DEBUG}=1 prints the traceback)"
    stream.write(f"{line}\n")  # one write, since other ranks write there too
    stream.flush()


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether GPU memory (`torch.OutOfMemoryError`) or CPU memory ran out."""
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return named or any(text in str(error) for text in OUT_OF_MEMORY)


@contextmanager
def refused(problem: str) -> Iterator[None]:
    """Turn a library's error about a user's file into a one-line `UserError`.

    Args:
        problem: The problem and its file; the library's reason follows in brackets.

    Raises:
        UserError: In place of any error except a `UserError`, out of memory, and Ctrl-C.
    """
    try:
        yield
    except BaseException as error:
        # tokenizers, safetensors and torch.distributed.checkpoint raise errors that are no Exception
        if isinstance(error, UserError | KeyboardInterrupt | SystemExit | GeneratorExit) or is_out_of_memory(error):
            raise
        reason = textwrap.shorten(str(error), 200, placeholder=" …")
        kind = "" if isinstance(error, OSError | ValueError | RuntimeError) and reason else type(error).__name__
        raise UserError(f"{problem} ({': '.join(part for part in (kind, reason) if part)})") from error


def once(pairs: list[tuple[str, object]]) -> dict:
    """Return names and values as a dict; a name that is written twice raises a ValueError."""
    names, found = [name for name, _ in pairs], dict(pairs)
    if len(found) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice} is written {names.count(twice)} times: leave one")
    return found


READ_JSON = functools.partial(json.loads, object_pairs_hook=once)


def read_outside(path: Path, parse: Callable[[str], object] = READ_JSON, kind: str = "JSON"):
    """Return the parsed content of a user's file.

    Args:
        path: The file.
        parse: Turns its text into a value.
        kind: Kind of file, for messages.

    Raises:
        UserError: The file is missing or damaged.
    """
    with refused(f"cannot read {path} as {kind}"):
        return parse(path.read_text(encoding="utf-8"))
