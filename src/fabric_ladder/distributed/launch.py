"""How many devices and machines a run has, from the settings or the launcher, and what `fabric.launch()` needs."""

import logging
import os
from typing import NamedTuple

import torch
from lightning.fabric.plugins.environments import SLURMEnvironment

from fabric_ladder.distributed.watch import RankWatch
from fabric_ladder.environment import notebook_shell
from fabric_ladder.errors import UserError
from fabric_ladder.settings import Settings

SEVERAL = "for more: src/9_ddp.py, or src/10_fsdp.py where the model does not fit one device"
FABRIC_RUN = "LT_CLI_USED"  # set by `fabric run`, whose own options are in variables that start with LT_


class Launcher(NamedTuple):
    """What has started this process, and how many processes it started for each machine and in all."""

    name: str
    devices: int
    num_nodes: int


def find_launcher() -> Launcher | None:
    """Return the launcher that started this process as one of several, if any.

    Raises:
        UserError: Slurm was told a number of tasks, but not how they are spread over the machines.
    """
    environment = os.environ
    if torch.distributed.is_torchelastic_launched():
        devices = int(environment["LOCAL_WORLD_SIZE"])
        name = "fabric run" if environment.get(FABRIC_RUN) == "1" else "torchrun"
        return Launcher(name, devices, int(environment["WORLD_SIZE"]) // devices)
    if SLURMEnvironment.detect():
        tasks = int(environment["SLURM_NTASKS"])
        if tasks > 1 and "SLURM_NTASKS_PER_NODE" not in environment:  # Fabric cannot tell how they are spread
            raise UserError(f"Slurm's --ntasks={tasks}: use --nodes and --ntasks-per-node instead (see configs/slurm)")
        nodes = int(environment.get("SLURM_NNODES", 1))
        return Launcher("srun", tasks // nodes, nodes)
    return None


def check_launcher(settings: Settings, several: bool) -> None:
    """Refuse a launcher that started another number of processes than the settings or the script allow.

    Args:
        settings: As they were given: `devices` may be `auto`.
        several: Whether the script can use more than one device.

    Raises:
        UserError: The numbers differ.
    """
    launcher = find_launcher()
    if launcher is None:
        return
    if not several and launcher.devices * launcher.num_nodes > 1:
        raise UserError(
            f"{launcher.name} started {launcher.devices * launcher.num_nodes} processes, but {settings.name} "
            f"runs on one device; {SEVERAL}"
        )
    for name, started, default in (("devices", launcher.devices, "auto"), ("num_nodes", launcher.num_nodes, 1)):
        if several and getattr(settings, name) not in (default, started):
            raise UserError(
                f"--{name} {getattr(settings, name)}, but {launcher.name} started {launcher.devices} processes on each "
                f"of {launcher.num_nodes} machines: leave --{name} out, or make them equal"
            )


def resolve_devices(settings: Settings) -> tuple[int, int]:
    """Return the devices of each machine and the number of machines; `accelerator` is resolved already."""
    if launcher := find_launcher():
        return launcher.devices, launcher.num_nodes
    if settings.devices != "auto":
        return settings.devices, settings.num_nodes
    alone = settings.accelerator != "cuda" or notebook_shell()  # a notebook cannot start its cells anew
    return 1 if alone else torch.cuda.device_count(), settings.num_nodes


def check_devices(settings: Settings, several: bool) -> None:
    """Refuse numbers of devices and machines that cannot be had.

    Args:
        settings: `devices` is a number.
        several: Whether the script can use more than one device.

    Raises:
        UserError: More devices than there are, than the script can use, or than the effective batch has samples.
    """
    ranks = settings.ranks
    if ranks > 1 and not several:
        raise UserError(
            f"--devices {settings.devices} --num_nodes {settings.num_nodes}: {settings.name} runs on one; {SEVERAL}"
        )
    if ranks > 1 and notebook_shell():
        raise UserError(
            f"a notebook's kernel runs on one device; on {settings.devices}, in a cell of its own: "
            f"!python src/{settings.name}.py --devices {settings.devices}"
        )
    if settings.accelerator == "cuda" and settings.devices > torch.cuda.device_count():
        raise UserError(f"--devices {settings.devices}: there are only {torch.cuda.device_count()} CUDA GPUs here")
    if settings.num_nodes > 1 and not find_launcher() and not {"NODE_RANK", "MASTER_ADDR"} <= os.environ.keys():
        raise UserError(
            f"--num_nodes {settings.num_nodes}: start the script on every machine by torchrun or srun "
            "(see configs/slurm), or set MASTER_ADDR, MASTER_PORT and NODE_RANK"
        )
    if ranks > settings.batch_size:
        raise UserError(
            f"--batch_size {settings.batch_size} is below the number of devices, {ranks}: it is the effective batch "
            "over all of them; raise it, or use fewer --devices"
        )


def options_of_fabric_run() -> list[str]:
    """Return the settings among `fabric run`'s own options, which the script does not get on its command line.

    Raises:
        UserError: Its `--strategy`, which the script sets.
    """
    if os.environ.get(FABRIC_RUN) != "1":
        return []
    if strategy := os.environ.get("LT_STRATEGY"):
        raise UserError(f"fabric run --strategy={strategy}: leave it out, the script sets the strategy")
    given = {name: os.environ.get(f"LT_{name.upper()}") for name in ("accelerator", "precision")}
    return [f"--{name}={value}" for name, value in given.items() if value]


def prepare_launch(several: bool) -> None:
    """Make the script's `fabric.launch()` work under `fabric run` and in a notebook, and watch the launching rank.

    The header names the seed: Fabric's own line of it, on stderr of every rank, is left out.

    Args:
        several: Whether the script can use more than one device.
    """
    logging.getLogger("lightning.fabric.utilities.seed").setLevel(logging.WARNING)
    for name in [name for name in os.environ if name.startswith("LT_")]:  # the settings have taken them over
        del os.environ[name]
    if several and notebook_shell():
        os.environ["LOCAL_RANK"] = "0"  # tells Fabric that this process need not be launched
    if "LOCAL_RANK" in os.environ and not notebook_shell() and not torch.distributed.is_torchelastic_launched():
        RankWatch()


def forget_launch() -> None:
    """In a notebook, let scripts that are started from it not inherit this process's rank and port."""
    if notebook_shell():
        for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
