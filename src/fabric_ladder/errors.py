"""Errors that the user can fix: one line, without a traceback, and exit status 2; and what is read from outside."""

import json
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

OUT_OF_MEMORY = (
    "DefaultCPUAllocator: can't allocate memory",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",  # where a segment that expands is mapped, PyTorch has no error of its own
    "CUBLAS_STATUS_ALLOC_FAILED",
    "MPS backend out of memory",
)
LARGEST = 2**25  # bytes of a file of settings that is read at once
DEEPEST = 50  # objects and lists in each other


class UserError(ValueError):
    """Something that the user can fix; the message is one line that says what is wrong and what to do."""


class Checked(SystemExit):
    """Ends a script, with exit status 0, whose settings and machine have passed all checks: `--check_only true`."""

    def __init__(self, settings):
        super().__init__(0)
        self.settings = settings
        print(f"{settings.name} can run here")


def first_line(error: BaseException, length: int = 200) -> str:
    """Return the first line of an error's message, cut at `length` characters; of none, the name of its class."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:length]


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether memory ran out, of the GPU (`torch.OutOfMemoryError`) or of the host."""
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return named or any(text in str(error) for text in OUT_OF_MEMORY)


@contextmanager
def refused(problem: str) -> Iterator[None]:
    """Say in one line that what a library is to make of a user's file is none: libraries raise errors of many kinds.

    Args:
        problem: What is wrong, in which file; the library's reason follows in brackets.

    Raises:
        UserError: In place of any error but one that says so already, memory that ran out, and Ctrl-C.
    """
    try:
        yield
    except BaseException as error:
        panic = type(error).__name__ == "PanicException"  # Rust's, in tokenizers and safetensors, is no Exception
        if isinstance(error, UserError) or is_out_of_memory(error) or not (panic or isinstance(error, Exception)):
            raise
        reason = " ".join(str(error).split())[:200]
        kind = "" if isinstance(error, OSError | ValueError | RuntimeError) and reason else type(error).__name__
        raise UserError(f"{problem} ({': '.join(part for part in (kind, reason) if part)})") from error


def read_outside(path: Path, parse: Callable[[str], object] = json.loads, kind: str = "JSON", most: int = LARGEST):
    """Return what a file of a user's holds, whatever it is.

    Args:
        path: A regular file. One of size 0 is not read: those of /proc seem so, and some never end.
        parse: Makes a value of its text.
        kind: Of file, for messages.
        most: Bytes that it may have.

    Raises:
        UserError: It is no such file, too large, nested too deeply, or damaged.
    """
    with refused(f"cannot read {path} as {kind}"):
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise UserError(f"{path} is no file")
        if status.st_size > most:
            raise UserError(f"{path} is larger than {most >> 20} MB: this is no {kind} file of settings")
        try:
            value = parse(path.read_text(encoding="utf-8") if status.st_size else "")
        except RecursionError:
            raise UserError(f"{path} is nested too deeply to be read as {kind}") from None
        if _is_deep(value):
            raise UserError(f"{path} is nested too deeply for a file of settings")
        return value


def _is_deep(value: object) -> bool:
    """Return whether values lie deeper in each other than `DEEPEST`; what aliases of YAML repeat is looked at once."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(DEEPEST):
        inner = (each.values() if isinstance(each, dict) else each for each in level)
        level = [*{id(each): each for values in inner for each in values if isinstance(each, dict | list)}.values()]
    return bool(level)
