"""Writing results so that a file is there as a whole or not at all."""

import os
import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path

from fabric_ladder.errors import UserError


def check_outputs(outputs: dict[str, str]) -> None:
    """Refuse what cannot be written, before any work.

    Args:
        outputs: Path of each file or folder, by its option.

    Raises:
        UserError: It exists, its folder does not or cannot be written, or two options name one path.
    """
    options: dict[Path, str] = {}
    for option, name in outputs.items():
        path = Path(name)
        if (other := options.setdefault(path.absolute().resolve(), option)) != option:
            raise UserError(f"{option} and {other} both name {name}")
        if path.exists() or path.is_symlink():
            raise UserError(f"{option} {name} exists: choose another name, or remove it")
        if not path.parent.is_dir():
            raise UserError(f"{option} {name}: there is no folder {path.parent}")
        try:
            tempfile.TemporaryFile(dir=path.parent).close()
        except OSError as error:
            raise UserError(f"cannot write {option} {name} ({error.strerror})") from error


def write_outputs(contents: dict[str, str | dict[str, bytes]]) -> None:
    """Write all files and folders into temporary folders beside their paths first, then move them there.

    Args:
        contents: By path: a file's text, or the files of a folder by their names.

    Raises:
        UserError: Something cannot be written; then nothing has been.
    """
    parts: dict[Path, Path] = {}
    moved: list[Path] = []
    path = Path()
    try:
        with ExitStack() as folders:
            for path, content in zip(map(Path, contents), contents.values(), strict=True):
                folder = tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent)
                part = parts[path] = Path(folders.enter_context(folder)) / path.name
                if isinstance(content, str):
                    part.write_text(content, encoding="utf-8")
                    continue
                part.mkdir()
                for name, data in content.items():
                    (part / name).write_bytes(data)
            for path, part in parts.items():
                if path.exists():
                    raise FileExistsError(17, "it exists by now")
                os.rename(part, path)
                moved.append(path)
    except OSError as error:
        for each in moved:
            shutil.rmtree(each) if each.is_dir() else each.unlink()
        raise UserError(f"cannot write {path} ({error.strerror}): nothing is written") from error
