"""Which checkpoint a run resumes from, and whether it may."""

import dataclasses
import json
from pathlib import Path
from typing import NamedTuple

from fabric_ladder.checkpoints import store
from fabric_ladder.errors import UserError, read_outside
from fabric_ladder.runs.folder import CHECKPOINTS, LOCK, lock
from fabric_ladder.settings import Settings

PROGRESS = "progress.json"  # in a checkpoint: position, settings, figures so far
# Settings that change no gradient but for rounding, and may differ between a run's parts.
FREE = frozenset(
    "micro_batch_size micro_batch_tokens eval_batch_tokens devices num_nodes threads num_workers log_every logger save "
    "runs_dir check_only resume save_every keep max_time cache_dir data_dir config on_nan nan_limit attention "
    "predict_memory notices activation_checkpointing activation_offload selective_checkpointing "
    "sgd_learning_rate lora_learning_rate".split()  # rates that `learning_rate` is taken from
)


class Found(NamedTuple):
    """What `find_checkpoint` has found.

    Attributes:
        folder: The checkpoint to resume from; None: none.
        finished: Whether the run has finished, so that nothing is left to do.
        notes: Lines to print.
    """

    folder: Path | None = None
    finished: bool = False
    notes: tuple[str, ...] = ()


def find_checkpoint(settings: Settings, fingerprint: str, ranks: int) -> Found:
    """Find the checkpoint that `settings.resume` names: `no`, `auto`, the folder of a run or of one of its checkpoints.

    Args:
        settings: Of the run.
        fingerprint: Of the data.
        ranks: Processes of the run.

    Raises:
        UserError: There is no such checkpoint, it is damaged, or belongs to a run of other settings, or to one that is
            still going on.
    """
    if settings.resume == "no":
        return Found()
    if settings.resume == "auto":
        folder, record = _newest_run(Path(settings.runs_dir) / settings.name, settings)
        finished = folder and record["status"] == "finished"
        other = folder and _differences(record["settings"], settings)
        if folder is None or (other and (finished or _is_running(folder))):
            note = "--resume auto: there is no run to go on with; this one starts from the beginning"
            return Found(notes=(note,))
        if finished:
            note = f"{folder} has finished: there is nothing to go on with (leave out --resume to run anew)"
            return Found(finished=True, notes=(note,))
        path = folder
    else:
        path = Path(settings.resume).absolute()
        folder = path.parent.parent if (path / store.MANIFEST).exists() else path
    if not (folder / CHECKPOINTS).is_dir():
        raise UserError(
            f"--resume {settings.resume}: there is no checkpoint in {folder}; --resume auto finds the newest"
        )
    _refuse_running(folder)
    found, notes = _find_whole(settings.resume, folder, path)
    store.remove_unfinished(folder / CHECKPOINTS)
    if found is None:
        return Found(notes=(*notes, f"{folder} has no whole checkpoint: this run starts from the beginning"))
    _check_progress(settings, folder, read_progress(found), fingerprint, ranks)
    return Found(found, notes=(*notes, f"Resumed from {found}"))


def _find_whole(resume: str, folder: Path, path: Path) -> tuple[Path | None, list[str]]:
    """Return the checkpoint itself, or the newest of the run that is whole, and notes of those that are not."""
    if path != folder:
        try:
            store.check(path)
            return path, []
        except (OSError, ValueError) as error:
            raise UserError(f"--resume {resume} cannot be used: {error}; --resume auto finds a whole one") from error
    found, notes = store.newest_whole(folder / CHECKPOINTS)
    if found is None and resume != "auto":
        raise UserError(f"--resume {resume}: no checkpoint is whole: {'; '.join(notes)}")
    return found, notes


def read_progress(folder: Path) -> dict:
    """Return a checkpoint's progress.

    Raises:
        UserError: It is none that this project has written.
    """
    progress = read_outside(folder / PROGRESS, most=2**31)  # with a row for each line that was printed
    parts = {"position": dict, "settings": dict, "fingerprint": str, "ranks": int, "precision": dict, "run": dict}
    for part, kind in parts.items():
        if not isinstance(progress, dict) or not isinstance(progress.get(part), kind):
            raise UserError(f"--resume: {folder / PROGRESS} is not of a run, it has no {part}: --resume no starts anew")
    return progress


def _check_progress(settings: Settings, folder: Path, progress: dict, fingerprint: str, ranks: int) -> None:
    """Refuse a checkpoint of another run."""
    if differences := _differences(progress["settings"], settings):
        raise UserError(
            f"--resume: {folder} was made with {'; '.join(differences)}: set them so, or leave out --resume"
        )
    if progress["fingerprint"] != fingerprint:
        raise UserError(f"--resume: {folder} was trained on other data: leave out --resume to start anew")
    if settings.deepspeed and progress["ranks"] != ranks:
        raise UserError(f"--resume: DeepSpeed goes on with as many GPUs as before, {progress['ranks']}, not {ranks}")


def _newest_run(home: Path, settings: Settings) -> tuple[Path | None, dict]:
    """Return the newest run that has finished or has a checkpoint, first of all of these settings, and its record."""
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
        if not _is_running(folder):  # it died before its first checkpoint was whole
            store.remove_unfinished(folder / CHECKPOINTS)
            (folder / LOCK).unlink(missing_ok=True)
    return newest


def _differences(saved: dict, settings: Settings) -> list[str]:
    """Name the settings that would make another run of it."""
    own, defaults = (json.loads(json.dumps(dataclasses.asdict(each))) for each in (settings, Settings()))
    saved = defaults | saved  # of an older version, which lacks settings that are new
    return [
        f"--{name:.40} {saved.get(name)!s:.40}, not {own.get(name)}"
        for name in sorted((saved.keys() | own.keys()) - FREE)
        if saved.get(name) != own.get(name)
    ]


def _is_running(folder: Path) -> bool:
    try:
        _refuse_running(folder)
    except UserError:
        return True
    return False


def _refuse_running(folder: Path) -> None:
    """Refuse a run that is still going on."""
    lock(folder).release()
