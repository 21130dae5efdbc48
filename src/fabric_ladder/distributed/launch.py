"""Find the devices and machines of a run, from the settings or the launcher, and prepare `fabric.launch()`."""

import logging
import os
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
from lightning import Fabric
from lightning.fabric.plugins.environments import SLURMEnvironment

from fabric_ladder.distributed.watch import RankWatch, running_watch
from fabric_ladder.errors import UserError, notebook_shell
from fabric_ladder.options import check_ranks
from fabric_ladder.places import PACKAGE
from fabric_ladder.settings import Settings

SEVERAL = "for more: src/9_ddp.py, or src/10_fsdp.py where the model does not fit one device"
FABRIC_RUN = "LT_CLI_USED"  # set by `fabric run`, whose own options are in variables that start with LT_


class Launcher(NamedTuple):
    """The program that started this process, its processes on each machine, and the number of machines."""

    name: str
    devices: int
    num_nodes: int


def find_launcher() -> Launcher | None:
    """Return the launcher that started this process as one of several, if any.

    Raises:
        UserError: Slurm's options give a number of tasks without the number for each machine.
    """
    environment = os.environ
    if torch.distributed.is_torchelastic_launched():
        devices = int(environment["LOCAL_WORLD_SIZE"])
        name = "fabric run" if environment.get(FABRIC_RUN) == "1" else "torchrun"
        return Launcher(name, devices, int(environment["WORLD_SIZE"]) // devices)
    if SLURMEnvironment.detect():
        tasks = int(environment["SLURM_NTASKS"])
        if tasks > 1 and "SLURM_NTASKS_PER_NODE" not in environment:  # Fabric needs the distribution
            raise UserError(f"Slurm's --ntasks={tasks}: use --nodes and --ntasks-per-node instead (see configs/slurm)")
        nodes = int(environment.get("SLURM_NNODES", 1))
        return Launcher("srun", tasks // nodes, nodes)
    if {"LOCAL_SIZE", "LOCAL_RANK"} <= environment.keys():
        return Launcher("deepspeed", int(environment["LOCAL_SIZE"]), int(environment.get("CROSS_SIZE", 1)))
    return None


def command_line(script: Path, arguments: Iterable[str]) -> str:
    """Return the shell command that starts a script as this process was started.

    Args:
        script: Any rung.
        arguments: Options of the rung.

    Returns:
        For instance `python src/2_grad_accum.py …`, `torchrun --nproc-per-node 2 src/9_ddp.py …` or
        `srun --nodes=1 --ntasks-per-node=2 python src/9_ddp.py …`.
    """
    installed = script.parent == PACKAGE / "src"
    alone = ["fabric-ladder", "run", script.stem] if installed else [Path(sys.executable).name, str(script)]
    launcher = find_launcher()
    if launcher is None:
        start = alone
    elif launcher.name == "srun":
        start = ["srun", f"--nodes={launcher.num_nodes}", f"--ntasks-per-node={launcher.devices}", *alone]
    elif launcher.name == "deepspeed":
        start = ["deepspeed", f"--num_nodes={launcher.num_nodes}", f"--num_gpus={launcher.devices}", str(script)]
    else:
        start = [*_torchrun_words(launcher), str(script)]
    return shlex.join([*start, *arguments])


def _torchrun_words(launcher: Launcher) -> list[str]:
    """Return the words before the script in the command of the parent process, which is torchrun or `fabric run`."""
    try:
        words = psutil.Process().parent().cmdline()
        words = words[: [Path(word).name for word in words].index(Path(sys.argv[0]).name)]
    except (psutil.Error, AttributeError, ValueError):  # the parent is hidden, e.g. outside of a container
        words = ["torchrun", f"--nnodes={launcher.num_nodes}", f"--nproc-per-node={launcher.devices}"]
    if len(words) > 1 and not words[1].startswith("-"):  # the interpreter of a console script
        words = words[1:]
    return [Path(words[0]).name, *words[1:]]


def check_launcher(settings: Settings) -> None:
    """Refuse a launcher whose number of processes contradicts the settings or the script.

    Args:
        settings: As they were given: `devices` may be `auto`.

    Raises:
        UserError: The numbers differ, or one is not a number.
    """
    check_ranks()
    launcher = find_launcher()
    if launcher is None:
        return
    started = f"{launcher.name} started {launcher.devices} processes on each of {launcher.num_nodes} machines"
    if settings.strategy == "single" and launcher.devices * launcher.num_nodes > 1:
        raise UserError(f"{started}, but {settings.name} runs on one device; {SEVERAL}")
    if settings.devices not in ("auto", launcher.devices) or settings.num_nodes not in (1, launcher.num_nodes):
        raise UserError(
            f"--devices {settings.devices} --num_nodes {settings.num_nodes}, but {started}: leave both options out"
        )


def resolve_devices(settings: Settings) -> tuple[int, int]:
    """Return the devices of each machine and the number of machines; `accelerator` is resolved already."""
    if launcher := find_launcher():
        return launcher.devices, launcher.num_nodes
    if settings.devices != "auto":
        return settings.devices, settings.num_nodes
    alone = settings.accelerator != "cuda" or notebook_shell()  # Fabric cannot restart the cells of a notebook
    return 1 if alone else torch.cuda.device_count(), settings.num_nodes


def check_devices(settings: Settings) -> None:
    """Refuse numbers of devices and machines that do not exist or do not fit the script.

    Args:
        settings: `devices` is a number.

    Raises:
        UserError: There are fewer devices, the script uses only one, or the effective batch has fewer samples.
    """
    ranks = settings.ranks
    if ranks > 1 and settings.strategy == "single":
        raise UserError(
            f"--devices {settings.devices} --num_nodes {settings.num_nodes}: {settings.name} runs on one; {SEVERAL}"
        )
    if ranks > 1 and notebook_shell():
        raise UserError(
            f"a notebook's kernel runs on one device; for {settings.devices} run in a cell of its own: "
            f"!python src/{settings.name}.py --devices {settings.devices}"
        )
    if settings.accelerator == "cuda" and settings.devices > torch.cuda.device_count():
        raise UserError(f"--devices {settings.devices}: this machine has {torch.cuda.device_count()} CUDA GPUs")
    if settings.num_nodes > 1 and not find_launcher() and not {"NODE_RANK", "MASTER_ADDR"} <= os.environ.keys():
        raise UserError(
            f"--num_nodes {settings.num_nodes}: start the script on every machine with torchrun or srun "
            "(see configs/slurm), or set MASTER_ADDR, MASTER_PORT and NODE_RANK"
        )
    if ranks > settings.batch_size:
        raise UserError(
            f"--batch_size {settings.batch_size} is below the number of devices, {ranks}: it counts the samples on "
            "all devices; raise it, or use fewer --devices"
        )


def options_of_fabric_run() -> list[str]:
    """Return the settings among the options of `fabric run`, which does not pass them to the script.

    They are also added to `sys.argv`, from which a run's command is printed.

    Raises:
        UserError: `--strategy` is among them, which only the script sets.
    """
    if os.environ.get(FABRIC_RUN) != "1":
        return []
    if strategy := os.environ.get("LT_STRATEGY"):
        raise UserError(f"fabric run --strategy={strategy}: leave it out; the script sets the strategy")
    given = {name: os.environ.get(f"LT_{name.upper()}") for name in ("accelerator", "precision")}
    options = [f"--{name}={value}" for name, value in given.items() if value]
    sys.argv += options
    return options


def prepare_launch(settings: Settings) -> None:
    """Make the script's `fabric.launch()` work under `fabric run` and in a notebook, and watch the launching rank.

    Fabric's own line about the seed is switched off, because the run's header already shows it.

    Args:
        settings: All settings of the run.
    """
    logging.getLogger("lightning.fabric.utilities.seed").setLevel(logging.WARNING)
    for name in [name for name in os.environ if name.startswith("LT_")]:  # the settings contain them already
        del os.environ[name]
    if "CROSS_RANK" in os.environ:  # DeepSpeed's launcher; Fabric reads the machine's number by another name
        os.environ.setdefault("NODE_RANK", os.environ["CROSS_RANK"])
    if settings.strategy != "single" and notebook_shell():
        os.environ["LOCAL_RANK"] = "0"  # Fabric then launches no processes
    if "LOCAL_RANK" in os.environ and not notebook_shell() and not torch.distributed.is_torchelastic_launched():
        RankWatch()


def watch_ranks(fabric: Fabric) -> None:
    """From now on, end this process when another rank dies. Call it after `fabric.launch()`.

    In a notebook, also remove this process's rank and port from the environment, which other scripts would inherit.
    """
    if fabric.world_size > 1:
        (running_watch() or RankWatch()).meet()
    if notebook_shell():
        for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)


def release_ranks(fabric: Fabric) -> None:
    """Wait until all ranks are done, and stop watching them: they may end now. All ranks must call it."""
    watch = running_watch()
    if fabric.world_size > 1 and watch:
        fabric.barrier()
        watch.stop()
