"""GPUs that people own or rent, by name: memory, compute capability, and peak speeds of matrix multiplications."""

import os
import re
from concurrent.futures import ProcessPoolExecutor
from difflib import get_close_matches
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


# Sources: NVIDIA's data sheets and white papers on each architecture; figures "with sparsity" are halved. Memory is the
# nominal size in 10^9 bytes; most GPUs have more. If ECC takes a sixteenth, PyTorch's size is given: 15.6 GB on a T4.
# Tensor cores need capability 7.0, bfloat16 and TF32 need 8.0. The last figure is given only if TF32 is faster
# than plain 32-bit. Where NVIDIA prints no peaks, plain 32-bit is 2 x CUDA cores x boost clock, and 16-bit is a
# multiple of it: 8 in the TITAN RTX, 4 in other Turing GPUs, in the RTX A2000 and the RTX 4000 Ada, 2 in GeForce from
# Ampere on, 1 without tensor cores.
_ROWS = """
GTX 1080 Ti | 11 | 6.1 | 11.3 | 11.3
P100 | 16 | 6.0 | 18.7 | 9.3
V100 | 16 | 7.0 | 125 | 15.7
V100 32GB | 32 | 7.0 | 125 | 15.7
T4 | 15.6 | 7.5 | 65 | 8.1
RTX 2060 | 6 | 7.5 | 25.8 | 6.5
RTX 2070 | 8 | 7.5 | 29.9 | 7.5
RTX 2080 | 8 | 7.5 | 40.3 | 10.1
RTX 2080 Ti | 11 | 7.5 | 53.8 | 13.4
TITAN RTX | 24 | 7.5 | 130.5 | 16.3
A100 40GB | 40 | 8.0 | 312 | 156 | 19.5
A100 80GB | 80 | 8.0 | 312 | 156 | 19.5
A30 | 24 | 8.0 | 165 | 82 | 10.3
RTX 3050 | 8 | 8.6 | 18.2 | 9.1
RTX 3060 | 12 | 8.6 | 25.5 | 12.7
RTX 3060 Ti | 8 | 8.6 | 32.4 | 16.2
RTX 3070 | 8 | 8.6 | 40.6 | 20.3
RTX 3070 Ti | 8 | 8.6 | 43.5 | 21.7
RTX 3080 | 10 | 8.6 | 59.5 | 29.8
RTX 3080 12GB | 12 | 8.6 | 61.3 | 30.6
RTX 3080 Ti | 12 | 8.6 | 68.2 | 34.1
RTX 3090 | 24 | 8.6 | 71 | 35.6
RTX 3090 Ti | 24 | 8.6 | 80.0 | 40.0
A10 | 23.6 | 8.6 | 125 | 62.5 | 31.2
A10G | 23.6 | 8.6 | 70 | 35
A40 | 47.6 | 8.6 | 149.7 | 74.8 | 37.4
RTX A2000 12GB | 12 | 8.6 | 31.9 | 16.0 | 8.0
RTX A4000 | 16 | 8.6 | 76.7 | 38.3 | 19.2
RTX A5000 | 24 | 8.6 | 111.1 | 55.6 | 27.8
RTX A6000 | 48 | 8.6 | 154.8 | 77.4 | 38.7
RTX 4060 | 8 | 8.9 | 30.2 | 15.1
RTX 4060 Ti 8GB | 8 | 8.9 | 44.1 | 22.1
RTX 4060 Ti 16GB | 16 | 8.9 | 44.1 | 22.1
RTX 4070 | 12 | 8.9 | 58.3 | 29.1
RTX 4070 SUPER | 12 | 8.9 | 71.0 | 35.5
RTX 4070 Ti | 12 | 8.9 | 80.2 | 40.1
RTX 4070 Ti SUPER | 16 | 8.9 | 88.2 | 44.1
RTX 4080 | 16 | 8.9 | 97.5 | 48.7
RTX 4080 SUPER | 16 | 8.9 | 104.4 | 52.2
RTX 4090 | 24 | 8.9 | 165.2 | 82.6
RTX 4000 Ada | 20 | 8.9 | 106.9 | 53.5 | 26.7
RTX 6000 Ada | 47.7 | 8.9 | 364.2 | 182.1 | 91.1
L4 | 23.6 | 8.9 | 121 | 60 | 30.3
L40S | 47.6 | 8.9 | 362 | 183 | 91.6
H100 | 80 | 9.0 | 989.5 | 494.7 | 66.9
H100 PCIe | 80 | 9.0 | 756 | 378 | 51.2
H100 NVL | 94 | 9.0 | 835 | 417.5 | 60
GH200 | 96 | 9.0 | 989.5 | 494.7 | 67
H200 | 141 | 9.0 | 989.5 | 494.7 | 67
B200 | 180 | 10.0 | 2250 | 1125 | 75
RTX 5060 | 8 | 12.0 | 38.4 | 19.2
RTX 5060 Ti 8GB | 8 | 12.0 | 47.4 | 23.7
RTX 5060 Ti 16GB | 16 | 12.0 | 47.4 | 23.7
RTX 5070 | 12 | 12.0 | 61.7 | 30.9
RTX 5070 Ti | 16 | 12.0 | 87.9 | 43.9
RTX 5080 | 16 | 12.0 | 112.6 | 56.3
RTX 5090 | 32 | 12.0 | 209.5 | 104.8
RTX PRO 6000 | 96 | 12.0 | 503.8 | 251.9 | 126
"""


def _read_row(row: str) -> Gpu:
    name, memory, capability, half, *single = row.split(" | ")
    major, minor = map(int, capability.split("."))
    return Gpu(name, round(float(memory) * 1e9), (major, minor), float(half), float(single[0]), float(single[-1]))


GPUS = [_read_row(row) for row in _ROWS.strip().splitlines()]
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
