"""How many devices and machines a run has: from the settings, or from the launcher that started the processes."""

import os
from typing import NamedTuple

import torch
from lightning import Fabric
from lightning.fabric.plugins.environments import SLURMEnvironment

from fabric_ladder.errors import UserError, notebook_shell

SEVERAL = "for more: src/9_ddp.py, or src/10_fsdp.py where the model does not fit one device"


class Launcher(NamedTuple):
    """What has started this process, and how many processes it started for each machine and in all."""

    name: str
    devices: int
    num_nodes: int


def resolve_devices(settings, several: bool) -> None:
    """Replace `devices` and `num_nodes` by numbers, and refuse those that cannot be had.

    Args:
        settings: `accelerator` is resolved already.
        several: Whether the script can use more than one device.

    Raises:
        UserError: More devices than there are, or another count than the launcher's.
    """
    launcher = _launcher()
    if launcher:
        for name, started in (("devices", launcher.devices), ("num_nodes", launcher.num_nodes)):
            wanted = getattr(settings, name)
            follows = wanted == ("auto" if name == "devices" else 1)
            if several and not follows and wanted != started:
                raise UserError(
                    f"--{name} {wanted}, but {launcher.name} started {launcher.devices} processes on each of "
                    f"{launcher.num_nodes} machines: leave --{name} out, or make them equal"
                )
            if not several and started > 1:
                raise UserError(
                    f"{launcher.name} started {launcher.devices * launcher.num_nodes} processes, but {settings.name} "
                    f"runs on one device; {SEVERAL}"
                )
            setattr(settings, name, started)
    elif settings.devices == "auto":
        alone = settings.accelerator == "cpu" or notebook_shell()  # a notebook cannot start its cells anew
        settings.devices = 1 if alone else torch.cuda.device_count()
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
    if settings.num_nodes > 1 and not launcher and not {"NODE_RANK", "MASTER_ADDR"} <= os.environ.keys():
        raise UserError(
            f"--num_nodes {settings.num_nodes}: start the script on every machine by torchrun or srun "
            "(see configs/slurm), or set MASTER_ADDR, MASTER_PORT and NODE_RANK"
        )
    if ranks > settings.batch_size:
        raise UserError(
            f"--batch_size {settings.batch_size} is below the number of devices, {ranks}: it is the effective batch "
            "over all of them; raise it, or use fewer --devices"
        )
    if several and notebook_shell():
        os.environ["LOCAL_RANK"] = "0"  # tells Fabric that this process need not be launched, see `launch`
    if several and ranks == 1:
        settings.notices.append("One device: nothing to share it out to; --devices N or torchrun gives this run more")


def options_of_fabric_run() -> list[str]:
    """Return the settings among `fabric run`'s own options: it keeps those it knows, wherever they stand.

    Raises:
        UserError: Its `--strategy`, which the script sets.
    """
    if not _by_fabric_run():
        return []
    if strategy := os.environ.get("LT_STRATEGY"):
        raise UserError(f"fabric run --strategy={strategy}: leave it out, the script sets the strategy")
    given = {name: os.environ.get(f"LT_{name.upper()}") for name in ("accelerator", "precision")}
    return [f"--{name}={value}" for name, value in given.items() if value]


def launch(fabric: Fabric) -> None:
    """Start the processes, unless `fabric run` did.

    Raises:
        UserError: The processes cannot find each other.
    """
    if _by_fabric_run():
        return
    try:
        fabric.launch()
    except torch.distributed.DistNetworkError as error:
        raise UserError(f"the processes cannot meet ({str(error).splitlines()[0][:200]})") from error
    if notebook_shell():  # a script started from the notebook would inherit this process's rank and port
        for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)


def _by_fabric_run() -> bool:
    return os.environ.get("LT_CLI_USED") == "1"


def _launcher() -> Launcher | None:
    environment = os.environ
    if torch.distributed.is_torchelastic_launched():
        devices = int(environment["LOCAL_WORLD_SIZE"])
        name = "fabric run" if _by_fabric_run() else "torchrun"
        return Launcher(name, devices, int(environment["WORLD_SIZE"]) // devices)
    if SLURMEnvironment.detect():
        tasks = int(environment["SLURM_NTASKS"])
        if tasks > 1 and "SLURM_NTASKS_PER_NODE" not in environment:  # Fabric cannot tell how they are spread
            raise UserError(f"Slurm's --ntasks={tasks}: use --nodes and --ntasks-per-node instead (see configs/slurm)")
        nodes = int(environment.get("SLURM_NNODES", 1))
        return Launcher("srun", tasks // nodes, nodes)
    return None
