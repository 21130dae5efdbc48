"""Errors that the user can fix (one line, exit status 2), and reading files that the user wrote."""

import json
import os
import stat
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

OUT_OF_MEMORY = (
    "DefaultCPUAllocator: can't allocate memory",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",  # raised when an expandable segment is mapped
    "CUBLAS_STATUS_ALLOC_FAILED",
    "MPS backend out of memory",
)
DEBUG = "FABRIC_LADDER_DEBUG"  # environment variable
LONGEST = 1000  # characters of a line on stderr; a longer line loses its middle
LARGEST = 2**25  # bytes of a file of settings
DEEPEST = 50  # nested objects and lists


class UserError(ValueError):
    """An error that the user can fix; its message is one line with the problem and the remedy."""


class Checked(SystemExit):
    """Ends a script, with exit status 0, whose settings and machine have passed all checks: `--check_only true`."""

    def __init__(self, settings):
        super().__init__(0)
        self.settings = settings
        print(f"{settings.name} can run here")


def first_line(error: BaseException, length: int = 200) -> str:
    """Return the first line of an error's message, at most `length` characters, or the name of its class."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:length]


def print_error(error: BaseException, line: str, stream: TextIO | None = None) -> None:
    """Print an error as one line, after the whole traceback if FABRIC_LADDER_DEBUG is 1.

    Args:
        error: If a library's error caused it, the line ends with the way to see that one.
        line: The problem and the remedy.
        stream: Default: stderr.
    """
    stream = stream or sys.stderr
    line = " ".join(line.split())  # it may quote a value of any length
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
        panic = type(error).__name__ == "PanicException"  # of Rust, in tokenizers and safetensors: not an Exception
        if isinstance(error, UserError) or is_out_of_memory(error) or not (panic or isinstance(error, Exception)):
            raise
        reason = " ".join(str(error).split())[:200]
        kind = "" if isinstance(error, OSError | ValueError | RuntimeError) and reason else type(error).__name__
        raise UserError(f"{problem} ({': '.join(part for part in (kind, reason) if part)})") from error


def read_outside(path: Path, parse: Callable[[str], object] = json.loads, kind: str = "JSON", most: int = LARGEST):
    """Return the parsed content of a user's file.

    Args:
        path: A regular file. A file of size 0 is not read: files in /proc report this size, and some never end.
        parse: Turns its text into a value.
        kind: Kind of file, for messages.
        most: Largest size in bytes.

    Raises:
        UserError: The file is not a regular one, too large, nested too deeply, or damaged.
    """
    with refused(f"cannot read {path} as {kind}"):
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise UserError(f"{path} is not a regular file")
        if status.st_size > most:
            raise UserError(f"{path} is larger than {most >> 20} MB, too large for a {kind} file of settings")
        try:
            value = parse(path.read_text(encoding="utf-8") if status.st_size else "")
        except RecursionError:
            raise UserError(f"{path} is nested too deeply to be read as {kind}") from None
        if _is_deep(value):
            raise UserError(f"{path} is nested too deeply for a file of settings")
        return value


def _is_deep(value: object) -> bool:
    """Return whether values are nested deeper than `DEEPEST`; an aliased value of YAML counts once."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(DEEPEST):
        inner = (each.values() if isinstance(each, dict) else each for each in level)
        level = [*{id(each): each for values in inner for each in values if isinstance(each, dict | list)}.values()]
    return bool(level)
