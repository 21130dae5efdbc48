"""Room on the disk: what a run will save has it before the training starts, and is kept elsewhere where it has not."""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import torch
from lightning import Fabric
from torch import nn

from fabric_ladder.environment import notebook_shell
from fabric_ladder.errors import UserError, first_line, is_out_of_memory
from fabric_ladder.models.optimizer import state_dtypes
from fabric_ladder.settings import Settings

CHECKPOINTS = 2  # that are there at once, at the least: the newest, and the one that is being written


def check_room(settings: Settings, model: nn.Module, there: int = 0) -> None:
    """Refuse to train what could not be saved.

    Args:
        settings: Of the run.
        model: Set up by Fabric; its sizes are those before sharding.
        there: Checkpoints of the run that are on the disk already.

    Raises:
        UserError: `runs_dir` has no room for what `save` and two checkpoints by `save_every` take.
    """
    sizes = [(each.requires_grad, _count(each) * each.element_size()) for each in model.parameters()]
    trained, everything = (sum(size for part, size in sizes if part or whole) for whole in (False, True))
    base = settings.lora and settings.from_scratch  # which is nowhere else
    weights = trained if settings.lora else everything
    state = weights + trained * state_dtypes(settings).count(None)  # others need less room
    need = {"no": 0, "consolidated": weights, "sharded": state}[settings.save]
    need += everything * (base and settings.save != "no") + (CHECKPOINTS - there) * state * bool(settings.save_every)
    home = Path(settings.runs_dir).absolute()
    free = shutil.disk_usage(next(path for path in (home, *home.parents) if path.exists())).free
    if free < need:
        raise UserError(
            f"--save {settings.save} --save_every {settings.save_every} needs {need / 1e9:.2f} GB in --runs_dir "
            f"{settings.runs_dir}, where {free / 1e9:.2f} GB are free: make room, or choose another"
        )


def places(folder: Path | None, broadcast: Callable, problems: list[str]) -> Iterator[Path]:
    """Yield, on all ranks, where a result may be written: the run's folder, other disks, and what the user names.

    Args:
        folder: The run's, as rank 0 knows it.
        broadcast: Fabric's.
        problems: What has failed so far, which the user is told.
    """
    yield Path(broadcast(folder))
    disks = {}
    for place in (Path.cwd(), Path.home(), Path(tempfile.gettempdir())) if folder else ():
        if place.is_dir() and place.stat().st_dev != folder.stat().st_dev:
            disks.setdefault(place.stat().st_dev, place)
    for place in broadcast(sorted(disks.values(), key=lambda place: -shutil.disk_usage(place).free)):
        if found := broadcast(folder and _new_folder(place, folder, problems)):
            yield found
            _remove_empty(found)
    while found := broadcast(folder and _ask(folder, problems)):
        yield found
        _remove_empty(found)


def try_on_all(fabric: Fabric, action: Callable[[], object]) -> str | None:
    """Run `action` on all ranks; return why it failed, on whichever rank."""
    problem = None
    try:
        action()
    except Exception as error:  # of safetensors and tokenizers, too, whose errors are of their own kinds
        if is_out_of_memory(error) and fabric.world_size > 1:
            raise  # the others may be waiting for this one's tensors: the watch ends them
        problem = getattr(error, "strerror", None) or first_line(error, 160)
    flag = torch.tensor(float(problem is not None), device=fabric.device)
    if fabric.all_reduce(flag, reduce_op="max"):
        return problem or "another rank could not write"
    return None


def _count(parameter: nn.Parameter) -> int:
    """Return the elements of a parameter, of which ZeRO-3 leaves none in place."""
    return getattr(parameter, "ds_numel", parameter.numel())


def _made_in(place: Path, folder: Path) -> Path:
    """Return a new folder, named like the run's: nothing that lies there is touched."""
    return Path(tempfile.mkdtemp(prefix=f"{folder.parent.name}-{folder.name}-", dir=place))


def _new_folder(place: Path, folder: Path, problems: list[str]) -> Path | None:
    try:
        found = _made_in(place, folder)
    except OSError as error:
        problems.append(f"{place} ({error.strerror})")
        return None
    print(f"Not saved in {problems[-1]}: trying {found}", file=sys.stderr, flush=True)
    return found


def _remove_empty(folder: Path) -> None:
    """Remove a folder into which nothing could be written."""
    with suppress(OSError):
        folder.rmdir()


def _ask(folder: Path, problems: list[str]) -> Path | None:
    """Ask for a folder on a terminal; None where nobody answers."""
    if notebook_shell() or not (sys.stdin and sys.stdin.isatty() and sys.stderr.isatty()):
        return None
    while True:
        print(f"Not saved in {problems[-1]}. Another folder (Enter: the same again, Ctrl-D: none):", file=sys.stderr)
        try:
            answer = input().strip()
        except EOFError:
            return None
        place = Path(os.path.expanduser(answer)).absolute()
        try:
            place.mkdir(parents=True, exist_ok=True)
            return _made_in(place, folder) if answer else folder
        except OSError as error:
            problems.append(f"{place} ({error.strerror})")
