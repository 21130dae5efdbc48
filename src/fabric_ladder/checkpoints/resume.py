"""Find the checkpoint that a run resumes from, and check that it belongs to the run."""

import dataclasses
import json
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from fabric_ladder.checkpoints import store
from fabric_ladder.errors import UserError, read_outside, refused
from fabric_ladder.options import is_met
from fabric_ladder.runs.folder import CHECKPOINTS, LOCK, lock
from fabric_ladder.settings import FACTS, INTERNAL, Settings, names, show

PROGRESS = "progress.json"  # in a checkpoint: position, settings, figures so far
# settings that may differ between the parts of a resumed run
FREE = {*names(free_on_resume=True), *INTERNAL}


class Found(NamedTuple):
    """The result of `find_checkpoint`.

    Attributes:
        folder: The checkpoint to resume from; None to start from the beginning.
        progress: Its position, settings and figures.
        finished: Whether the run has finished already.
        notes: Lines to print.
        kept: Checkpoints of earlier starts with `save_every`, which a start without it leaves where they are.
    """

    folder: Path | None = None
    progress: dict | None = None
    finished: bool = False
    notes: tuple[str, ...] = ()
    kept: tuple[Path, ...] = ()


def find_checkpoint(settings: Settings, fingerprint: str) -> Found:
    """Find the checkpoint for `settings.resume`: `no`, `auto`, the folder of a run or of one of its checkpoints.

    Args:
        settings: All settings of the run.
        fingerprint: Checksum of the data.

    Raises:
        UserError: The checkpoint does not exist, is damaged, or belongs to a run with other settings or to a run that
            is still in progress.
    """
    resume = settings.resume
    if resume == "no":
        return Found()
    if resume == "auto":
        folder, record = _newest_run(Path(settings.runs_dir) / settings.name, settings)
        finished = folder and record["status"] == "finished"
        other = folder and _differences(record["settings"], settings)
        if folder is None or (other and (finished or _is_running(folder))):
            return Found(notes=("--resume auto: no run to resume; this one starts from the beginning",))
        if finished:
            note = f"{folder} has finished already; leave out --resume to start a new run"
            return Found(finished=True, notes=(note,))
        path = folder
    else:
        path = Path(resume).absolute()
        path = path.parent if path.name == CHECKPOINTS else path
        folder = path.parent.parent if (path / store.MANIFEST).exists() else path
    if not (folder / CHECKPOINTS).is_dir():
        raise UserError(f"--resume {resume}: {folder} has no checkpoint; --resume auto finds the newest")
    lock(folder).release()  # refuses a run that is still in progress
    if path == folder:
        found, notes = store.newest_whole(folder / CHECKPOINTS)
    else:
        with refused(f"--resume {resume} cannot be used; --resume auto finds an undamaged one"):
            store.check(path)
        found, notes = path, []
    store.remove_unfinished(folder / CHECKPOINTS)
    if found is None and resume == "auto":
        return Found(notes=(*notes, f"{folder} has only damaged checkpoints: this run starts from the beginning"))
    if found is None:
        raise UserError(f"--resume {resume}: all checkpoints are damaged: {'; '.join(notes)}")
    with refused(f"--resume: cannot use {found}"):
        progress = _read_progress(found)
        _check_progress(settings, folder, progress, fingerprint)
        steps = store.list_steps(found.parent)
        kept = () if settings.save_every else tuple(filter(_is_kept, steps))
        best = store.find_best(steps if settings.save_every else kept)
        progress["run"]["record"]["best_checkpoint"] = best and best.relative_to(folder).as_posix()
    later = 0 if path == folder else sum(store.step_of(step) > store.step_of(found) for step in steps)
    notes.append(f"Resumed from {found}" + f"; the next checkpoint removes the {later} after it" * bool(later))
    before = progress["settings"]
    if settings.save_every and before.get("save_every") and before.get("keep", 0) > settings.keep:
        notes.append(f"--keep {settings.keep} removes checkpoints that --keep {before['keep']} has kept")
    return Found(found, progress, notes=tuple(notes), kept=kept)


def _read_progress(checkpoint: Path) -> dict:
    return json.loads((checkpoint / PROGRESS).read_text(encoding="utf-8"))


def _is_kept(checkpoint: Path) -> bool:
    """Return whether the start that wrote a checkpoint had `save_every`."""
    with suppress(OSError, ValueError, LookupError, TypeError):  # damaged
        return _read_progress(checkpoint)["settings"]["save_every"] > 0
    return False


def _check_progress(settings: Settings, folder: Path, progress: dict, fingerprint: str) -> None:
    """Refuse a checkpoint of another run."""
    if differences := _differences(progress["settings"], settings):
        raise UserError(
            f"--resume: {folder} was made with {'; '.join(differences)}: use its values, or leave out --resume"
        )
    if progress["fingerprint"] != fingerprint:
        raise UserError(f"--resume: {folder} was trained on other data: leave out --resume to start a new run")


def _newest_run(home: Path, settings: Settings) -> tuple[Path | None, dict]:
    """Return the newest run that is finished or has a checkpoint, and its record; equal settings are preferred."""
    newest: tuple[Path | None, dict] = None, {}
    folders = sorted((path for path in home.glob("*") if path.name.isdecimal()), key=lambda path: -int(path.name))
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
    script = [f"src/{saved['name']}.py, not src/{own['name']}.py"] if saved["name"] != own["name"] else []
    return script + [
        f"--{name} {show(saved[name]):.40}, not {show(own[name])}"
        for name in sorted(own.keys() - FREE)
        if saved[name] != own[name] and any(is_met(FACTS[name].needs, values) for values in (saved, own))
    ]


def _is_running(folder: Path) -> bool:
    try:
        lock(folder).release()
    except UserError:
        return True
    return False
