"""Which checkpoint a run goes on from, and whether it may."""

import dataclasses
import json
from contextlib import suppress
from pathlib import Path

from fabric_ladder import store
from fabric_ladder.errors import UserError
from fabric_ladder.folder import CHECKPOINTS, LOCK, lock

PROGRESS = "progress.json"  # in a checkpoint: place, settings, figures so far
FINISHED = Path("finished")
# Settings that change no gradient but for rounding, and may differ between a run's parts.
FREE = frozenset(
    "micro_batch_size micro_batch_tokens eval_batch_tokens devices num_nodes threads num_workers log_every logger save "
    "runs_dir check_only resume save_every keep max_time cache_dir data_dir config on_nan nan_limit attention".split()
)


def find_checkpoint(settings, fingerprint: str, ranks: int) -> tuple[Path | None, list[str]]:
    """Return the checkpoint to go on from (None: start anew; `FINISHED`: nothing is left to do), and what to print.

    Args:
        settings: `resume` is `no`, `auto`, the folder of a run, or of one of its checkpoints.
        fingerprint: Of the data.
        ranks: Processes of the run.

    Raises:
        UserError: There is no such checkpoint, it is damaged, or belongs to a run of other settings, or to one that is
            still going on.
    """
    if settings.resume == "no":
        return None, []
    wanted = Path(settings.resume)
    if settings.resume == "auto":
        folder = _newest_run(Path(settings.runs_dir) / settings.name)
        if folder is None:
            return None, ["--resume auto: there is no run to go on with; this one starts from the beginning"]
        record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        if record["status"] == "finished":
            if _differences(record["settings"], settings):
                return None, []
            return FINISHED, [f"{folder} has finished: there is nothing to go on with (leave out --resume to run anew)"]
    elif (wanted / store.MANIFEST).exists():
        folder = wanted.absolute().parent.parent
    else:
        folder = wanted
    if not (folder / CHECKPOINTS).is_dir():
        raise UserError(
            f"--resume {settings.resume}: there is no checkpoint in {folder}; --resume auto finds the newest"
        )
    _release(folder)
    if (wanted / store.MANIFEST).exists():
        try:
            found, notes = store.check(wanted.absolute()).folder, []
        except (OSError, ValueError) as error:
            raise UserError(f"--resume {wanted} cannot be used: {error}; --resume auto finds a whole one") from error
    else:
        stored, notes = store.newest_whole(folder / CHECKPOINTS)
        if stored is None and settings.resume == "auto":
            return None, [*notes, f"{folder} has no whole checkpoint: this run starts from the beginning"]
        if stored is None:
            raise UserError(f"--resume {settings.resume}: no checkpoint is whole: {'; '.join(notes)}")
        found = stored.folder
    store.remove_unfinished(folder / CHECKPOINTS)
    progress = json.loads((found / PROGRESS).read_text(encoding="utf-8"))
    differences = _differences(progress["settings"], settings)
    if differences:
        raise UserError(
            f"--resume: {folder} was made with {'; '.join(differences)}: set them so, or leave out --resume"
        )
    if progress["fingerprint"] != fingerprint:
        raise UserError(f"--resume: {folder} was trained on other data: leave out --resume to start anew")
    if settings.deepspeed and progress["ranks"] != ranks:
        raise UserError(f"--resume: DeepSpeed goes on with as many GPUs as before, {progress['ranks']}, not {ranks}")
    return found, [*notes, f"Resumed from {found}"]


def _newest_run(home: Path) -> Path | None:
    """Return the newest run that has finished or has a checkpoint."""
    folders = sorted((path for path in home.glob("*") if path.name.isdigit()), key=lambda path: -int(path.name))
    for folder in folders:
        try:
            status = json.loads((folder / "run.json").read_text(encoding="utf-8"))["status"]
        except (OSError, ValueError, LookupError, TypeError):
            continue
        if status == "finished" or any((folder / CHECKPOINTS).glob("step-*")):
            return folder
        with suppress(UserError):  # it goes on still; else it died before its first checkpoint was whole
            _release(folder)
            store.remove_unfinished(folder / CHECKPOINTS)
            (folder / LOCK).unlink(missing_ok=True)
    return None


def _differences(saved: dict, settings) -> list[str]:
    """Name the settings that would make another run of it."""
    mine = json.loads(json.dumps(dataclasses.asdict(settings)))
    names = (saved.keys() | mine.keys()) - FREE - {"notices"}
    return [
        f"--{name} {saved.get(name)}, not {mine.get(name)}"
        for name in sorted(names)
        if saved.get(name) != mine.get(name)
    ]


def _release(folder: Path) -> None:
    """Refuse a run that is still going on."""
    taken = lock(folder)
    taken.release()
