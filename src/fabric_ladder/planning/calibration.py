"""Measure a GPU's memory overhead by a short training."""

from time import strftime

import torch
from lightning import Fabric

from fabric_ladder.cli import parse_settings
from fabric_ladder.environment import prepare_cuda
from fabric_ladder.errors import UserError
from fabric_ladder.places import CONFIGS
from fabric_ladder.planning.overhead import Overhead, keep_overhead
from fabric_ladder.planning.predict import blank_datasets, largest_batches
from fabric_ladder.planning.rehearsal import quiet_lightning
from fabric_ladder.runs.metrics import Meter
from fabric_ladder.techniques.build import build_model, build_optimizer
from fabric_ladder.training.gradients import accumulate_gradients

MODEL = ["--config", "imdb_bloom_560m.yaml", "--model", str(CONFIGS / "models" / "bloom-560m.json")]


def calibrate(cache_dir: str) -> None:
    """Measure the overhead of the first CUDA GPU, keep it, and print it.

    Raises:
        UserError: This machine has no CUDA GPU.
    """
    if not torch.cuda.is_available():
        raise UserError("--calibrate measures a CUDA GPU, and PyTorch finds none here")
    with quiet_lightning():
        overhead = measure_overhead()
    path = keep_overhead(cache_dir, torch.cuda.get_device_name(0), overhead)
    print(
        f"CUDA context {overhead.context / 1e9:.3f} GB, cuBLAS workspace {overhead.workspace / 1e9:.3f} GB, "
        f"fragmentation {overhead.fragmentation:.1%} of the peak: {overhead.source}"
    )
    print(f"Saved {path}")


def measure_overhead() -> Overhead:
    """Measure context, workspace and fragmentation on the first CUDA GPU.

    This process must not have used the GPU before. Memory that other programs use counts as context.
    """
    prepare_cuda("cuda", deterministic=False)  # as in a run
    workspace = _measure_workspace()
    free, total = torch.cuda.mem_get_info(0)
    context = total - free - torch.cuda.memory_reserved(0)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(0)
    train_briefly([*MODEL, "--precision", "bf16-true"], (512, 448, 200, 320))
    fragmentation = torch.cuda.max_memory_reserved(0) / torch.cuda.max_memory_allocated(0) - 1
    source = f"measured on {torch.cuda.get_device_name(0)}, torch {torch.__version__}, {strftime('%Y-%m-%d')}"
    return Overhead(context, workspace, fragmentation, source)


def train_briefly(options: list[str], lengths: tuple[int, ...]) -> None:
    """Take three optimizer steps with random weights, in micro-batches whose samples have these lengths in tokens."""
    settings = parse_settings([*options, "--from_scratch", "true"], batch_size=4 * len(lengths), micro_batch_size=4)
    fabric = Fabric(accelerator=settings.accelerator, devices=1, precision=settings.precision)
    model = fabric.setup(build_model(settings, blank_datasets(2)))
    optimizer = fabric.setup_optimizers(build_optimizer(settings, model))
    shapes = [largest_batches(settings, length)[0][0] for length in lengths]
    for _ in range(3):
        batches = []
        for shape in shapes:
            inputs = {name: torch.ones_like(tensor, device="cpu") for name, tensor in shape.inputs.items()}
            batches.append(shape._replace(inputs=inputs))
        accumulate_gradients(fabric, model, batches, Meter(fabric))
        optimizer.step()
        optimizer.zero_grad()


def _measure_workspace() -> int:
    """Return the bytes that stay allocated after a forward and a backward pass of a linear layer."""
    layer = torch.nn.Linear(1024, 1024, device="cuda")
    held = torch.cuda.memory_allocated(0)
    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
            layer(torch.zeros(1024, 1024, device="cuda")).sum().backward()
    layer.zero_grad()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated(0) - held
