"""Tensors of all ranks in one folder of safetensors files, written by `torch.distributed.checkpoint`.

Its default format contains pickled values, so that a file from an unknown source could execute code. A safetensors file
holds only names, sizes and numbers.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.optim import Optimizer

from fabric_ladder.errors import first_line

FILE_BYTES = 2**30  # size of a file, and of the tensors that all ranks together copy to CPU memory at a time


class _Reader(dcp.HuggingFaceStorageReader):
    def read_metadata(self) -> Metadata:
        metadata = super().read_metadata()
        for name, tensor in metadata.state_dict_metadata.items():
            if sum(chunk.sizes.numel() for chunk in tensor.chunks) != tensor.size.numel():
                raise ValueError(f"a part of {name} is missing")
        return metadata


def read_index(folder: str | Path) -> Metadata:
    """Return names, sizes and places of the tensors in a folder.

    Raises:
        Exception: The folder cannot be read, is damaged, or lacks a part of a tensor.
    """
    return _Reader(str(folder)).read_metadata()


def write_tensors(tensors: dict[str, Tensor], folder: Path) -> None:
    """Write the tensors, and only this rank's shards of sharded ones. All ranks must call it.

    Raises:
        OSError, RuntimeError: A rank could not write.
    """
    files = {}
    written = 0
    state = {}
    seen = set()
    for name, tensor in tensors.items():
        files[name] = 1 + written // FILE_BYTES
        written += tensor.nbytes
        plain = tensor.is_contiguous() and id(tensor) not in seen  # a file cannot hold a tensor under two names
        state[name] = tensor if plain else tensor.detach().clone(memory_format=torch.contiguous_format)
        seen.add(id(tensor))
    writer = dcp.HuggingFaceStorageWriter(str(folder), files, save_distributed=True)
    writer.per_thread_copy_ahead = 0  # otherwise copies from a GPU stay in pinned CPU memory
    with _plain_errors():
        dcp.save(state, storage_writer=writer)


def read_tensors(tensors: dict[str, Tensor], folder: str | Path, alone: bool = False) -> None:
    """Fill the tensors in place from a folder that any number of ranks has written.

    All ranks must call it, or one rank with `alone`.

    Raises:
        OSError, RuntimeError: The folder is damaged, lacks a tensor, or has it in another size.
    """
    with _plain_errors():
        dcp.load(dict(tensors), storage_reader=_Reader(str(folder)), no_dist=alone)


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Raise an error of any rank as OSError or RuntimeError on all ranks, and hide a warning about single processes."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            yield
    except dcp.api.CheckpointException as error:  # a BaseException
        cause = next(iter(error.failures.values()))[0]
        raise cause if isinstance(cause, OSError) else RuntimeError(first_line(cause)) from error


def optimizer_state(inner: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, dict]]:
    """Return the optimizer's tensors by `optimizer.<parameter>.<key>`, and its other values by parameter.

    `torch.distributed.checkpoint.state_dict` cannot be used here. It creates missing state with an optimizer step,
    which is counted. It pickles the hyperparameters. When it loads, it casts the state to the dtype of the weights.
    """
    tensors = {}
    values = {}
    for name, parameter in inner.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{name}.{key}"] = value
            else:
                values.setdefault(name, {})[key] = value
    return tensors, values


def empty_optimizer_state(
    inner: nn.Module, optimizer: Optimizer, folder: Path, names: list[str], values: dict[str, dict]
) -> dict[str, Tensor]:
    """Allocate the optimizer state that a folder holds, and return its tensors by name for `read_tensors`.

    A tensor of its parameter's size is sharded like the parameter. Other tensors, such as the number of steps, are
    whole. Scalars stay on the CPU unless the optimizer needs them on the device. An optimizer that steps on the CPU
    keeps all its state there.

    Args:
        inner: The model.
        optimizer: Without any state.
        folder: Written by `write_tensors`.
        names: Names of the tensors from `optimizer_state`.
        values: Other values from `optimizer_state`.

    Raises:
        KeyError: The model or the folder lacks a name.
        OSError, RuntimeError: The folder cannot be read.
    """
    saved = read_index(folder).state_dict_metadata
    parameters = dict(inner.named_parameters())
    tensors = {}
    on_device = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
    offloads = getattr(optimizer, "offloads", False)
    for full in names:
        name, key = full.removeprefix("optimizer.").rsplit(".", 1)
        parameter = parameters[name]
        size = saved[full].size
        dtype = saved[full].properties.dtype
        device = "cpu" if offloads else parameter.device
        if size == parameter.shape:
            tensors[full] = torch.zeros_like(parameter, dtype=dtype, device=device, requires_grad=False)
        else:
            device = device if size or on_device else "cpu"
            tensors[full] = torch.zeros(size, dtype=dtype, device=device)
        optimizer.state[parameter][key] = tensors[full]
    for name, state in values.items():
        optimizer.state[parameters[name]].update(state)
    return tensors
