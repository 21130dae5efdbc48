"""GPUs that people own or rent, by name: memory, compute capability, and peak speeds of matrix multiplications."""

import csv
import os
import re
from concurrent.futures import ProcessPoolExecutor
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

import torch

from fabric_ladder.environment import read_size
from fabric_ladder.errors import UserError

VARIANTS = {"Laptop", "Max", "Mobile", "Ti", "SUPER", "D", "SFF"}  # with such a word, a driver's name means another GPU


class Gpu(NamedTuple):
    """A GPU.

    Attributes:
        name: The driver's name, with the memory if the GPU exists in several sizes.
        memory: Bytes, as PyTorch reports them.
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
# `card_memory` reads the memory: a whole number is the size as sold. If ECC takes a sixteenth, it is PyTorch's size in
# 10^9 bytes: 15.6 GB on a T4. Tensor cores need capability 7.0, bfloat16 and TF32 need 8.0. `plain` is given only if
# TF32 is faster than plain 32-bit. Where NVIDIA prints no peaks, plain 32-bit is 2 x CUDA cores x boost clock, and
# 16-bit is a multiple of it: 8 in the TITAN RTX, 4 in other Turing GPUs, in the RTX A2000 and the RTX 4000 Ada, 2 in
# GeForce from Ampere on, 1 without tensor cores.


def card_memory(text: str) -> int:
    """Return the bytes that PyTorch reports for a card of this size.

    A whole number of GB is the size as sold, in GiB, of which the driver keeps a part. All other sizes are exact.
    PyTorch's out-of-memory errors print the total. In GiB, the least that was found for each size as sold:

        4: 3.81 (NVlabs/RVT#7)                  6: 5.80 (JiehongLin/SAM-6D#13)    8: 7.75 (vllm-project/vllm#12529)
        10: 9.78 (zai-org/CogVideo#34)          11: 10.76 (RenYurui/StructureFlow#35)
        12: 11.50 and 11.53 (vllm-project/vllm#12030)             16: 15.45 (RTX 50; 15.77 on a V100)
        24: 23.53 (lrzjason/T2ITrainer#37)      32: 31.34 (RTX 5090)              40: 39.59 (bigscience/t-zero#12)
        48: 47.46 (Victarry/stable-dreambooth#8)                  80: 79.15 (pytorch/pytorch#111363)
        96: 94.97 (ggml-org/llama.cpp#23604)    141: 139.80 (H200, benchmarks/results/gpu_h200.json)

    The driver keeps at most 5 % of each, and at most 0.5 GiB and 1 %.

    Raises:
        UserError: The size does not parse.
    """
    size = read_size(text, "--gpu_memory")
    if not re.fullmatch(r"\d+\s*(GB?)?", text.strip().upper()):
        return size
    sold = size // 10**9 * 2**30
    return round(sold - min(0.05 * sold, 2**29 + 0.01 * sold))


def _read_row(row: dict[str, str]) -> Gpu:
    major, minor = map(int, row["capability"].split("."))
    peaks = float(row["half"]), float(row["single"]), float(row["plain"] or row["single"])
    return Gpu(row["name"], card_memory(row["memory_gb"]), (major, minor), *peaks)


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
