"""Saving what was trained: sharded, by every rank its own, or consolidated, as one model for transformers."""

import json
from pathlib import Path

import torch.distributed.checkpoint as dcp
from lightning import Fabric
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.optim import Optimizer

from fabric_ladder.batching import Collator, TextCollator
from fabric_ladder.errors import UserError
from local_dataset_utilities import ImageFormat


def save(fabric: Fabric, how: str, folder: Path | None, model: nn.Module, optimizer: Optimizer, data: Collator) -> Path:
    """Save the model under `folder` and return where. All ranks must call it.

    Args:
        fabric: Knows the rank.
        how: `sharded`: model and optimizer in `torch.distributed.checkpoint`'s format, for `load` on any number of
            ranks. `consolidated`: weights, config and tokenizer as transformers' `from_pretrained` reads them,
            gathered in the memory of rank 0's host.
        folder: The run's folder, as rank 0 knows it.
        model: Set up by Fabric.
        optimizer: Set up by Fabric.
        data: Made the batches; its tokenizer, or how it prepares images, is saved beside a consolidated model.
    """
    inner, bare = _inner(model), optimizer.optimizer
    folder = fabric.broadcast(folder)
    if how == "sharded":
        weights, state = get_state_dict(inner, bare)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder / "checkpoint")
        return folder / "checkpoint"
    weights = get_model_state_dict(inner, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if fabric.global_rank == 0:
        inner.save_pretrained(folder / "model", state_dict=weights)
        if isinstance(data, TextCollator):
            data.tokenizer.save_pretrained(folder / "model")
        else:
            (folder / "model" / "preprocessor_config.json").write_text(json.dumps(_preprocessor(data.form), indent=2))
    return folder / "model"


def load(path: str, model: nn.Module, optimizer: Optimizer) -> None:
    """Load a sharded checkpoint, made on any number of ranks, into model and optimizer. All ranks must call it.

    Raises:
        UserError: It is of another model or optimizer.
    """
    inner, bare = _inner(model), optimizer.optimizer
    weights, state = get_state_dict(inner, bare)
    target = {"model": weights, "optimizer": state}
    try:
        dcp.load(target, checkpoint_id=path)
    except (dcp.api.CheckpointException, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[-200:]
        raise UserError(f"--load {path}: made with another model or optimizer ({reason})") from error
    set_state_dict(inner, bare, model_state_dict=target["model"], optim_state_dict=target["optimizer"])


def _preprocessor(form: ImageFormat) -> dict:
    """Return what transformers' image processor must do to feed the model as it was fed here, in evaluation."""
    crop = {"do_center_crop": form.resize_to > form.size, "crop_size": {"height": form.size, "width": form.size}}
    return {
        "image_processor_type": "ViTImageProcessor",
        "size": {"height": form.resize_to, "width": form.resize_to},
        "resample": {"bilinear": 2, "bicubic": 3}[form.resample],  # Pillow's numbers
        "rescale_factor": 1 / 255,
        "image_mean": form.mean,
        "image_std": form.std,
    } | crop


def _inner(model: nn.Module) -> nn.Module:
    """The model itself, without Fabric's and torch.compile's wrappers."""
    return getattr(model.module, "_orig_mod", model.module)
