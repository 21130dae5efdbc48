"""Tensors of all ranks in one folder, by `torch.distributed.checkpoint`, read without running what a file says.

PyTorch's own reader unpickles the index, and every value that is no tensor, freely: a file from elsewhere could run
anything. Here the index may name nothing but the classes of an index, and values that are no tensors are not read.
"""

import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.optim import Optimizer

INDEX = ".metadata"
# what an index is made of; each only holds values
METADATA = ("Metadata", "TensorStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING", "ChunkStorageMetadata")
NAMES = {("torch.distributed.checkpoint.metadata", name) for name in (*METADATA, "MetadataIndex", "StorageMeta")} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib._local", "PosixPath"),
    ("pathlib._local", "WindowsPath"),
}


class _Index(pickle.Unpickler):
    def find_class(self, module: str, name: str):
        if (module, name) in NAMES or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"the index names {module}.{name}, which does not belong there")


class _Reader(dcp.FileSystemReader):
    def read_metadata(self, *args, **kwargs) -> Metadata:
        metadata = read_index(self.path)
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _TensorsOnly(dcp.DefaultLoadPlanner):
    def load_bytes(self, read_item, value) -> None:
        raise pickle.UnpicklingError(f"{read_item.dest_index.fqn} is no tensor")


def read_index(folder: str | Path) -> Metadata:
    """Return names, sizes and places of the tensors in a folder.

    Raises:
        OSError: It cannot be read.
        pickle.UnpicklingError: It is none, or names what does not belong into one.
    """
    with open(Path(folder) / INDEX, "rb") as file:
        try:
            metadata = _Index(file).load()
        except (EOFError, AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise pickle.UnpicklingError(f"{INDEX} is damaged: {error}") from error
    if not isinstance(metadata, Metadata):
        raise pickle.UnpicklingError(f"{INDEX} is no index")
    return metadata


def write_tensors(tensors: dict[str, Tensor], folder: Path) -> None:
    """Write the tensors, of shards this rank's share, and have the disk keep them. All ranks must call it.

    Raises:
        dcp.api.CheckpointException: A rank could not write.
    """
    with _quiet():
        dcp.save(dict(tensors), storage_writer=dcp.FileSystemWriter(folder))


def read_tensors(tensors: dict[str, Tensor], folder: str | Path, alone: bool = False) -> None:
    """Fill the tensors in place; a folder of any number of ranks will do. All ranks must call it, or one `alone`.

    Raises:
        dcp.api.CheckpointException: The folder lacks a tensor, or has it in another size.
        OSError, RuntimeError, ValueError, pickle.UnpicklingError: The same, or the folder is damaged.
    """
    with _quiet():
        dcp.load(dict(tensors), storage_reader=_Reader(folder), planner=_TensorsOnly(), no_dist=alone)


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # of a run with one process
        yield


def optimizer_state(inner: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, dict]]:
    """Return what the optimizer keeps of each parameter: tensors by `<parameter>.<key>`, other values by parameter."""
    tensors, values = {}, {}
    for name, parameter in inner.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"{name}.{key}"] = value
            else:
                values.setdefault(name, {})[key] = value
    return tensors, values


def empty_optimizer_state(
    inner: nn.Module, optimizer: Optimizer, folder: str | Path, prefix: str, values: dict[str, dict]
) -> dict[str, Tensor]:
    """Give the optimizer the state that a folder holds, and return its tensors, yet to be filled.

    A tensor of its parameter's size is sharded like it; others, such as the number of steps, are whole. Numbers stay on
    the CPU unless the optimizer wants them on the device.

    Args:
        inner: The model.
        optimizer: Without any state.
        folder: From `write_tensors`.
        prefix: In front of the names of the optimizer's tensors.
        values: From `optimizer_state`.
    """
    saved: dict[str, dict] = {}
    for full, item in read_index(folder).state_dict_metadata.items():
        if full.startswith(prefix):
            name, key = full.removeprefix(prefix).rsplit(".", 1)
            saved.setdefault(name, {})[key] = item
    names = {parameter: name for name, parameter in inner.named_parameters()}
    tensors = {}
    for group in optimizer.param_groups:
        on_device = group.get("fused") or group.get("capturable")
        for parameter in group["params"]:
            name, state = names[parameter], optimizer.state[parameter]
            state.update(values.get(name, {}))
            for key, item in saved.get(name, {}).items():
                dtype = item.properties.dtype
                if item.size == parameter.shape:
                    state[key] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
                else:
                    device = parameter.device if item.size or on_device else "cpu"
                    state[key] = torch.zeros(item.size, dtype=dtype, device=device)
                tensors[f"{name}.{key}"] = state[key]
    return tensors
