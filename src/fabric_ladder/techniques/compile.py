"""torch.compile by blocks: one graph serves all layers and all lengths; the time that compiling takes is counted."""

import importlib.util
import os
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from time import perf_counter

import torch
import torch._inductor.config as inductor
from torch import nn
from torch.fx.experimental import _config as shapes
from transformers.modeling_layers import GradientCheckpointingLayer

from fabric_ladder.settings import Settings
from fabric_ladder.techniques.technique import Technique

LEAST = (7, 0)  # lowest compute capability that Inductor compiles for, or it raises GPUTooOldForTriton
MOST_GRAPHS = 64  # of a function; torch.compile takes 8 by default


def keep_kernels(cache_dir: str) -> None:
    """Keep compiled code in the folder `kernels` of the cache, unless TORCHINDUCTOR_CACHE_DIR names another."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(cache_dir) / "kernels"))


def compile_blocks(model: nn.Module, cache_dir: str, accelerator: str) -> None:
    """Compile each layer of the model in place, at its first call.

    Layers of one class run the same code, and their weights are inputs to the compiled graph. So one graph serves all
    layers, and the time does not grow with the depth. A model without layers of transformers' base class is compiled as
    a whole.

    Args:
        model: A model of transformers, perhaps with adapters, before Fabric sets it up.
        cache_dir: For `keep_kernels`.
        accelerator: As resolved. On `cpu` dropout draws PyTorch's own random numbers, as without compiling: a compiled
            loop would draw them one at a time. GPU kernels draw other numbers themselves.
    """
    keep_kernels(cache_dir)
    inductor.fallback_random = accelerator == "cpu"
    shapes.use_duck_shape = False  # otherwise a first length equal to the width becomes the width
    torch._dynamo.config.recompile_limit = MOST_GRAPHS  # all layers of all models of a process share one code object
    torch._dynamo.config.optimize_ddp = False  # it would cut graphs where DDP's buckets end
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    # numbers as variables take a third of the time, and only layers that differ in one (drop_path) need them
    torch._dynamo.config.specialize_float = len(set(map(_numbers, layers))) == len(set(map(type, layers)))
    for module in layers or [model]:
        module.compile(dynamic=True)


def _numbers(layer: nn.Module) -> tuple:
    """Return the class of a layer and the Python floats of its modules."""
    values = (value for module in layer.modules() for value in vars(module).values())
    return type(layer), *(value for value in values if isinstance(value, float))


@cache
def compiles(device: torch.device) -> bool:
    """Return whether torch.compile can make kernels for this CUDA GPU; False for a CPU."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= LEAST and Compile().is_installed()


class CompileClock:
    """Counts the graphs that torch.compile makes, forward and backward, and the seconds that it spends on them.

    It uses `torch._dynamo`'s callbacks, which run around every compilation.

    Args:
        seconds: To count from.
        graphs: To count from.

    Attributes:
        seconds: Spent on compiling.
        graphs: All graphs.
    """

    def __init__(self, seconds: float = 0.0, graphs: int = 0):
        self.seconds, self.graphs = seconds, graphs
        torch._dynamo.on_compile_start(self._begin)
        torch._dynamo.on_compile_end(self._end)

    def _begin(self, _) -> None:
        self._start = perf_counter()

    def _end(self, _) -> None:
        self.seconds += perf_counter() - self._start
        self.graphs += 1

    def stop(self) -> None:
        """Stop counting."""
        torch._dynamo.callback_handler.remove_start_callback(self._begin)
        torch._dynamo.callback_handler.remove_end_callback(self._end)


class Compile(Technique):
    """Compile the layers of the model."""

    rounds_lengths = True
    refused_on_mps = "--compile true: leave it out, or use src/2_grad_accum.py"
    explained_errors = (
        (
            "No working C++ compiler found",
            "torch.compile needs a C++ compiler, and none was found: install g++, or run src/2_grad_accum.py",
        ),
        (
            "C++ compile error",
            f"torch {torch.__version__} compiled the model to invalid C++, a fault of its own: install another torch, "
            "or run src/2_grad_accum.py",
        ),
        (
            "Cannot find a working triton installation",
            "torch.compile needs Triton on a GPU, and none was found: pip install triton, or use --compile false",
        ),
        (
            "Failed to find C compiler",
            "Triton needs a C compiler, and none was found: install gcc, or use --compile false",
        ),
    )

    def is_installed(self) -> bool:
        """Return whether there are Triton and a C compiler, which it starts as Triton's `runtime/build.py` does."""
        compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
        return bool(compiler) and importlib.util.find_spec("triton") is not None

    def reason_against(self, settings: Settings, capability: tuple[int, int] | None) -> str | None:
        if capability and capability < LEAST:
            return (
                "Triton needs a GPU of compute capability 7.0 (Volta) or above, and this GPU has "
                f"{capability[0]}.{capability[1]}; leave it out"
            )
        return None

    def change_model(self, model: nn.Module, settings: Settings) -> nn.Module:
        compile_blocks(model, settings.cache_dir, settings.accelerator)
        return model

    def rehearsed(self, settings: Settings) -> Settings:
        return replace(settings, compile=False)  # compiled code keeps at most the same tensors
