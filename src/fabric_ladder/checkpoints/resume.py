"""Find the checkpoint that a run resumes from, and check that it belongs to the run."""

import dataclasses
import json
from pathlib import Path
from typing import NamedTuple

from fabric_ladder.checkpoints import store
from fabric_ladder.distributed.strategies import strategy_traits
from fabric_ladder.errors import UserError, read_outside
from fabric_ladder.runs.folder import CHECKPOINTS, LOCK, lock
from fabric_ladder.settings import INTERNAL, Settings, names, show

PROGRESS = "progress.json"  # in a checkpoint: position, settings, figures so far
# settings that may differ between the parts of a resumed run
FREE = {*names(free_on_resume=True), *INTERNAL} - {"name"}


class Found(NamedTuple):
    """The result of `find_checkpoint`.

    Attributes:
        folder: The checkpoint to resume from; None to start from the beginning.
        finished: Whether the run has finished already.
        notes: Lines to print.
    """

    folder: Path | None = None
    finished: bool = False
    notes: tuple[str, ...] = ()


def find_checkpoint(settings: Settings, fingerprint: str, ranks: int) -> Found:
    """Find the checkpoint for `settings.resume`: `no`, `auto`, the folder of a run or of one of its checkpoints.

    Args:
        settings: All settings of the run.
        fingerprint: Checksum of the data.
        ranks: Number of processes.

    Raises:
        UserError: The checkpoint does not exist, is damaged, or belongs to a run with other settings or to a run that
            is still in progress.
    """
    if settings.resume == "no":
        return Found()
    if settings.resume == "auto":
        folder, record = _newest_run(Path(settings.runs_dir) / settings.name, settings)
        finished = folder and record["status"] == "finished"
        other = folder and _differences(record["settings"], settings)
        if folder is None or (other and (finished or _is_running(folder))):
            note = "--resume auto: no run to resume; this one starts from the beginning"
            return Found(notes=(note,))
        if finished:
            note = f"{folder} has finished already; leave out --resume to start a new run"
            return Found(finished=True, notes=(note,))
        path = folder
    else:
        path = Path(settings.resume).absolute()
        folder = path.parent.parent if (path / store.MANIFEST).exists() else path
    if not (folder / CHECKPOINTS).is_dir():
        raise UserError(f"--resume {settings.resume}: {folder} has no checkpoint; --resume auto finds the newest")
    _refuse_running(folder)
    found, notes = _find_whole(settings.resume, folder, path)
    store.remove_unfinished(folder / CHECKPOINTS)
    if found is None:
        return Found(notes=(*notes, f"{folder} has only damaged checkpoints: this run starts from the beginning"))
    _check_progress(settings, folder, read_progress(found), fingerprint, ranks)
    return Found(found, notes=(*notes, f"Resumed from {found}"))


def _find_whole(resume: str, folder: Path, path: Path) -> tuple[Path | None, list[str]]:
    """Return the named checkpoint or the newest undamaged one of the run, and a line about each damaged one."""
    if path != folder:
        try:
            store.check(path)
            return path, []
        except (OSError, ValueError) as error:
            raise UserError(
                f"--resume {resume} cannot be used: {error}; --resume auto finds an undamaged one"
            ) from error
    found, notes = store.newest_whole(folder / CHECKPOINTS)
    if found is None and resume != "auto":
        raise UserError(f"--resume {resume}: all checkpoints are damaged: {'; '.join(notes)}")
    return found, notes


def read_progress(folder: Path) -> dict:
    """Return a checkpoint's position, settings and figures so far.

    Raises:
        UserError: The file does not come from this project.
    """
    progress = read_outside(folder / PROGRESS)
    parts = {"position": dict, "settings": dict, "fingerprint": str, "ranks": int, "precision": dict, "run": dict}
    for part, kind in parts.items():
        if not isinstance(progress, dict) or not isinstance(progress.get(part), kind):
            raise UserError(f"--resume: {folder / PROGRESS} lacks {part}: leave out --resume to start a new run")
    return progress


def _check_progress(settings: Settings, folder: Path, progress: dict, fingerprint: str, ranks: int) -> None:
    """Refuse a checkpoint of another run."""
    if differences := _differences(progress["settings"], settings):
        raise UserError(
            f"--resume: {folder} was made with {'; '.join(differences)}: use its values, or leave out --resume"
        )
    if progress["fingerprint"] != fingerprint:
        raise UserError(f"--resume: {folder} was trained on other data: leave out --resume to start a new run")
    if strategy_traits(settings).same_ranks_on_resume and progress["ranks"] != ranks:
        raise UserError(
            f"--resume: {folder} was trained on {progress['ranks']} GPUs, and {settings.name} cannot resume it on "
            f"{ranks}: use {progress['ranks']}"
        )


def _newest_run(home: Path, settings: Settings) -> tuple[Path | None, dict]:
    """Return the newest run that is finished or has a checkpoint, and its record; equal settings are preferred."""
    newest: tuple[Path | None, dict] = None, {}
    folders = sorted((path for path in home.glob("*") if path.name.isdigit()), key=lambda path: -int(path.name))
    for folder in folders:
        try:
            record = read_outside(folder / "run.json")
            status, _ = record["status"], dict(record["settings"])
        except (ValueError, LookupError, TypeError):
            continue
        if status == "finished" or any((folder / CHECKPOINTS).glob("step-*")):
            if not _differences(record["settings"], settings):
                return folder, record
            newest = newest if newest[0] else (folder, record)
            continue
        if not _is_running(folder):  # it died before its first checkpoint was complete
            store.remove_unfinished(folder / CHECKPOINTS)
            (folder / LOCK).unlink(missing_ok=True)
    return newest


def _differences(saved: dict, settings: Settings) -> list[str]:
    """Describe the settings that differ and that a resumed run must not change."""
    own, defaults = (json.loads(json.dumps(dataclasses.asdict(each))) for each in (settings, Settings()))
    saved = defaults | saved  # an older version may lack settings, or have others
    return [
        f"--{name} {show(saved[name]):.40}, not {show(own[name])}"
        for name in sorted(own.keys() - FREE)
        if saved[name] != own[name]
    ]


def _is_running(folder: Path) -> bool:
    try:
        _refuse_running(folder)
    except UserError:
        return True
    return False


def _refuse_running(folder: Path) -> None:
    """Refuse a run that is still in progress."""
    lock(folder).release()
