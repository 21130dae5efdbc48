"""Writing results so that a file is there as a whole or not at all."""

import os
import shutil
import tempfile
from pathlib import Path

from fabric_ladder.errors import UserError


def check_outputs(outputs: dict[str, str]) -> None:
    """Refuse what cannot be written, before any work.

    Args:
        outputs: Path of each file or folder, by its option.

    Raises:
        UserError: It exists, its folder does not or cannot be written, or two options name one place.
    """
    places: dict[Path, str] = {}
    for option, name in outputs.items():
        path = Path(name)
        place = path.absolute().resolve()
        if place in places:
            raise UserError(f"{option} and {places[place]} both name {name}")
        places[place] = option
        if path.exists() or path.is_symlink():
            raise UserError(f"{option} {name} exists: choose another name, or remove it")
        if not path.parent.is_dir():
            raise UserError(f"{option} {name}: there is no folder {path.parent}")
        try:
            tempfile.TemporaryFile(dir=path.parent).close()
        except OSError as error:
            raise UserError(f"cannot write {option} {name} ({error.strerror})") from error


def write_outputs(contents: dict[str, str | dict[str, bytes]]) -> None:
    """Write all files and folders beside their places first, then move them there.

    Args:
        contents: By path: a file's text, or the files of a folder by their names.

    Raises:
        UserError: Something cannot be written; then nothing has been.
    """
    made: list[Path] = []
    moved: list[Path] = []
    path = Path()
    try:
        for path, content in ((Path(name), content) for name, content in contents.items()):
            part = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
            made.append(part)
            if isinstance(content, str):
                (part / path.name).write_text(content, encoding="utf-8")
            else:
                (part / path.name).mkdir()
                for name, data in content.items():
                    (part / path.name / name).write_bytes(data)
        for part, path in zip(made, map(Path, contents), strict=True):
            if path.exists():
                raise FileExistsError(17, "it exists by now")
            os.rename(part / path.name, path)
            moved.append(path)
    except OSError as error:
        for place in moved:
            shutil.rmtree(place) if place.is_dir() else place.unlink()
        raise UserError(f"cannot write {path} ({error.strerror}): nothing is written") from error
    finally:
        for part in made:
            shutil.rmtree(part, ignore_errors=True)
