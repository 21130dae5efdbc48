"""GPUs that people own or rent, by name: memory, compute capability, and peak speeds of matrix multiplications."""

import csv
import os
import re
from concurrent.futures import ProcessPoolExecutor
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

import torch

from fabric_ladder.errors import UserError

VARIANTS = {"Laptop", "Max", "Mobile", "Ti", "SUPER", "D", "SFF"}  # with such a word, a driver's name means another GPU


class Gpu(NamedTuple):
    """A GPU.

    Attributes:
        name: The driver's name, with the memory if the GPU exists in several sizes.
        memory: Bytes.
        capability: Compute capability.
        half: Dense peak in TFLOP/s of 16-bit matrix multiplications with 32-bit sums.
        single: Peak of 32-bit matrix multiplications, with TF32 if the GPU supports it.
        plain: Peak of 32-bit matrix multiplications without tensor cores.
    """

    name: str
    memory: int
    capability: tuple[int, int]
    half: float
    single: float
    plain: float


# Sources of gpus.csv: NVIDIA's data sheets and white papers on each architecture; figures "with sparsity" are halved.
# Memory is the nominal size in 10^9 bytes; most GPUs have more. If ECC takes a sixteenth, PyTorch's size is given:
# 15.6 GB on a T4. Tensor cores need capability 7.0, bfloat16 and TF32 need 8.0. `plain` is given only if TF32 is faster
# than plain 32-bit. Where NVIDIA prints no peaks, plain 32-bit is 2 x CUDA cores x boost clock, and 16-bit is a
# multiple of it: 8 in the TITAN RTX, 4 in other Turing GPUs, in the RTX A2000 and the RTX 4000 Ada, 2 in GeForce from
# Ampere on, 1 without tensor cores.


def _read_row(row: dict[str, str]) -> Gpu:
    major, minor = map(int, row["capability"].split("."))
    peaks = float(row["half"]), float(row["single"]), float(row["plain"] or row["single"])
    return Gpu(row["name"], round(float(row["memory_gb"]) * 1e9), (major, minor), *peaks)


with open(Path(__file__).with_name("gpus.csv"), encoding="utf-8", newline="") as _file:
    GPUS = [_read_row(row) for row in csv.DictReader(_file)]
ANY = Gpu("a GPU", 0, (8, 0), 312, 156, 19.5)  # an unknown GPU: computes in bfloat16, as fast as an A100


def match_gpu(name: str) -> Gpu | None:
    """Return the GPU for a user's or a driver's name, or None if the table does not have it.

    Capitals, spaces, dashes and brand names do not matter in a user's spelling. For a driver's name, the GPU is the
    longest entry whose words all occur in the name.
    """
    exact = [gpu for gpu in GPUS if _plain(gpu.name) == _plain(name)]
    words = set(name.replace("-", " ").split())
    fitting = [gpu for gpu in GPUS if (own := set(gpu.name.split())) <= words and not VARIANTS & (words - own)]
    return max(exact or fitting, key=lambda gpu: len(gpu.name), default=None)


def find_gpu(name: str) -> Gpu:
    """Return the GPU of this name.

    Raises:
        UserError: The table does not have this GPU. The message lists similar names.
    """
    if gpu := match_gpu(name):
        return gpu
    names = {_plain(gpu.name): gpu.name for gpu in GPUS}
    near = [known for known in names if _plain(name) in known] if _plain(name) else []
    near = near or get_close_matches(_plain(name), names, n=4, cutoff=0.5) or list(names)
    raise UserError(
        f"--gpu {name}: not in the table, which has {', '.join(names[known] for known in near)}; for another GPU "
        "give its memory: --gpu_memory 16GB"
    )


def own_gpus() -> list[Gpu]:
    """Return this machine's GPUs, found by another process, and hide them from this process.

    A process that has not seen a GPU can be forked, see `planner.make_plans`.
    """
    with ProcessPoolExecutor(1) as pool:
        gpus = pool.submit(_list_gpus).result()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    return gpus


def _list_gpus() -> list[Gpu]:
    found = []
    for number in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(number)
        known = match_gpu(f"{gpu.name} {round(gpu.total_memory / 2**30)}GB")  # some drivers' names lack the size
        found.append((known or ANY)._replace(name=gpu.name, memory=gpu.total_memory, capability=(gpu.major, gpu.minor)))
    return found


def _plain(name: str) -> str:
    return re.sub(r"nvidia|geforce|tesla|[gr]tx|[^a-z0-9]", "", name.lower())
