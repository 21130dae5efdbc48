"""Saving what was trained: sharded, by every rank its own, or consolidated, as one model for transformers."""

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from pickle import UnpicklingError

import torch
import torch.distributed.checkpoint as dcp
import transformers
from huggingface_hub import save_torch_state_dict
from lightning import Fabric
from lightning.fabric.strategies import DeepSpeedStrategy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import PreTrainedTokenizerBase

from fabric_ladder.batching import Collator, TextCollator
from fabric_ladder.errors import UserError
from fabric_ladder.sharded import empty_optimizer_state, optimizer_state, read_tensors, write_tensors
from fabric_ladder.zero import load_engine, save_engine, whole_in_32_bit
from local_dataset_utilities import ImageFormat

OPTIMIZER = "optimizer.json"
ADAPTER = ("peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "target_modules")  # what weights do not tell


def save(
    fabric: Fabric,
    how: str,
    folder: Path | None,
    model: nn.Module,
    optimizer: Optimizer,
    data: Collator,
    from_scratch: bool = False,
) -> Path:
    """Save the model under `folder` and return where. All ranks must call it.

    Of a model with adapters (PEFT) only what is trained is saved, and the name of its base.

    Args:
        fabric: Knows the rank.
        how: `sharded`: model and optimizer in `torch.distributed.checkpoint`'s format, for `load` on any number of
            ranks; under DeepSpeed in its own, for as many ranks. `consolidated`: weights, config and tokenizer as
            transformers' `from_pretrained` reads them, or an adapter as PEFT reads it, gathered in the memory of rank
            0's host; under DeepSpeed from its 32-bit copies.
        folder: The run's folder, as rank 0 knows it.
        model: Set up by Fabric.
        optimizer: Set up by Fabric.
        data: Made the batches; its tokenizer, or how it prepares images, is saved too.
        from_scratch: The weights were random at first: those that adapters leave as they are, which exist nowhere else,
            are saved as `folder / "base"`.
    """
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    inner, adapter = _inner(model), has_adapter(model)
    zero = isinstance(fabric.strategy, DeepSpeedStrategy)
    if zero:
        model._forward_module.empty_partition_cache()  # weights that ZeRO-3 has fetched ahead cannot be gathered
    folder = Path(fabric.broadcast(folder))
    if adapter:
        _name_base(inner, folder / "base" if from_scratch else None)
    if adapter and from_scratch:
        frozen = _gather(fabric, inner, lambda name, tensor: not _of_adapter(name, tensor), zero)
        if fabric.global_rank == 0:
            base = {_name_in_base(name): tensor for name, tensor in frozen.items()}
            (folder / "base").mkdir(exist_ok=True)
            save_torch_state_dict(base, folder / "base", metadata={"format": "pt"})
            _describe(folder / "base", inner, data, _dtype(base.values()))
    if how == "sharded":
        place, weights = folder / "checkpoint", None
        if fabric.global_rank == 0:
            place.mkdir(exist_ok=True)
        fabric.barrier()
        write_state(place, model, optimizer, fabric.global_rank)
        dtype = torch.float32 if zero else _dtype(_trained(inner).values())  # as it is exported
    else:
        place = folder / ("adapter" if adapter else "model")
        weights = _gather(fabric, inner, _of_adapter if adapter else lambda name, tensor: True, zero)
        dtype = _dtype(weights.values())
    if fabric.global_rank == 0:
        if adapter and weights is None:
            inner.peft_config["default"].save_pretrained(place)
        elif adapter:
            inner.save_pretrained(place, state_dict=weights, save_embedding_layers=False)
            (place / "README.md").unlink()  # a model card to be filled in
        elif weights:
            inner.save_pretrained(place, state_dict=weights)
        _describe(place, inner, data, dtype)
    return place


def load(path: str, model: nn.Module, optimizer: Optimizer) -> None:
    """Load a sharded checkpoint into model and optimizer. All ranks must call it.

    DeepSpeed's is for as many ranks as it was made on, any other for any number.

    Raises:
        UserError: It is of another model, optimizer or adapter; one of DeepSpeed's, of another number of ranks.
    """
    if has_adapter(model):
        _check_adapter(path, _inner(model))
    read_state(f"--load {path}", path, model, optimizer)


def write_state(folder: Path, model: nn.Module, optimizer: Optimizer, rank: int) -> None:
    """Write model and optimizer, each rank its share, into a folder that is there. All ranks must call it.

    Raises:
        OSError, dcp.api.CheckpointException: It cannot be written.
    """
    inner, adapter = _inner(model), has_adapter(model)
    if hasattr(model._forward_module, "load_checkpoint"):
        save_engine(model._forward_module, folder, trained_only=adapter)
        return
    state, values = optimizer_state(inner, optimizer.optimizer)
    write_tensors(_weights(inner, adapter) | {f"optimizer.{name}": tensor for name, tensor in state.items()}, folder)
    if rank == 0:
        record = {"kind": type(optimizer.optimizer).__name__, "values": values}
        (folder / OPTIMIZER).write_text(json.dumps(record), encoding="utf-8")


def read_state(where: str, folder: str | Path, model: nn.Module, optimizer: Optimizer) -> None:
    """Read what `write_state` has written. All ranks must call it.

    Raises:
        UserError: It is of another model or optimizer, or damaged; the message begins with `where`.
    """
    inner, adapter = _inner(model), has_adapter(model)
    if hasattr(model._forward_module, "load_checkpoint"):
        load_engine(str(folder), model._forward_module, trained_only=adapter)
        return
    mine = type(optimizer.optimizer).__name__
    try:
        record = json.loads((Path(folder) / OPTIMIZER).read_text(encoding="utf-8"))
        if record["kind"] != mine:
            raise UserError(f"{where}: made with another model or optimizer ({record['kind']}, not {mine})")
        state = empty_optimizer_state(inner, optimizer.optimizer, folder, "optimizer.", record["values"])
        state = {f"optimizer.{name}": tensor for name, tensor in state.items()}
        read_tensors(_weights(inner, adapter) | state, folder)
    except (dcp.api.CheckpointException, OSError, RuntimeError, ValueError, LookupError, UnpicklingError) as error:
        reason = " ".join(str(error).split())[-200:]
        raise UserError(f"{where}: made with another model or optimizer, or damaged ({reason})") from error


def has_adapter(model: nn.Module) -> bool:
    """Return whether PEFT has put adapters into a model that Fabric has set up; PEFT is not imported for it."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(_inner(model), peft.PeftModel)


def end_tokens(tokenizer: PreTrainedTokenizerBase, configured: int | list[int] | None) -> list[int] | None:
    """Return the tokens that end a text: the tokenizer's, and those of a config that are meant for this tokenizer.

    In a config file they are numbers, which a tokenizer of one's own may have given to parts of words.
    """
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    ends = {*(configured if isinstance(configured, list) else [configured])} & special
    return sorted(ends | {tokenizer.eos_token_id} - {None}) or None


def _weights(inner: nn.Module, adapter: bool) -> dict[str, Tensor]:
    """What is saved, of shards this rank's, as tensors that share memory with the model."""
    tensors = _trained(inner) if adapter else inner.state_dict(keep_vars=True)
    return {f"model.{name}": tensor.detach() for name, tensor in tensors.items()}


def _trained(inner: nn.Module) -> dict[str, Tensor]:
    return {name: parameter for name, parameter in inner.named_parameters() if parameter.requires_grad}


def _of_adapter(name: str, tensor: Tensor) -> bool:
    return tensor.requires_grad or ".modules_to_save." in name


def _name_in_base(name: str) -> str:
    """Undo what PEFT adds to the names of the weights that were there before."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".").replace(".original_module.", ".")


def _gather(fabric: Fabric, inner: nn.Module, wanted: Callable[[str, Tensor], bool], zero: bool) -> dict[str, Tensor]:
    """Return the whole tensors, in the memory of rank 0's host; nothing on other ranks. One is gathered at a time."""
    gathered, weights = {}, {}
    for name, tensor in inner.state_dict(keep_vars=True).items():
        if wanted(name, tensor):
            if id(tensor) not in gathered:  # tied weights stay tied
                whole = _whole(tensor, zero)
                gathered[id(tensor)] = whole.cpu() if fabric.global_rank == 0 else None
            weights[name] = gathered[id(tensor)]
    return weights if fabric.global_rank == 0 else {}


@torch.no_grad()
def _whole(tensor: Tensor, zero: bool) -> Tensor:
    if isinstance(tensor, DTensor):
        return tensor.detach().to(tensor.device_mesh.device_type).full_tensor()  # parked shards cannot be gathered
    return whole_in_32_bit(tensor) if zero else tensor.detach()


def _dtype(tensors) -> torch.dtype:
    """The precision of the first weight; 4-bit ones are kept in integers."""
    return next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), torch.float32)


def _name_base(inner: nn.Module, base: Path | None) -> None:
    """Have the adapter's config say what it is for, wherever it is read: a folder's whole path, or the Hub's commit."""
    config, model = inner.peft_config["default"], inner.get_base_model()
    name = str(base or model.name_or_path)
    is_folder = base is not None or Path(name).is_dir()
    config.base_model_name_or_path = str(Path(name).absolute()) if is_folder else name
    config.revision = None if is_folder else getattr(model.config, "_commit_hash", None)


def _check_adapter(path: str, inner: nn.Module) -> None:
    place, mine = Path(path) / "adapter_config.json", inner.peft_config["default"].to_dict()
    if not place.is_file():
        raise UserError(f"--load {path}: holds a whole model, no adapter: leave out --lora true")
    saved = json.loads(place.read_text(encoding="utf-8"))
    for key in ADAPTER:
        first, second = ([*sorted(value)] if isinstance(value, list | set) else value
                         for value in (saved.get(key), mine.get(key)))  # fmt: skip
        if first != second:
            raise UserError(f"--load {path}: made with another model or optimizer ({key} {first}, not {second})")


def _describe(folder: Path, inner: nn.Module, data: Collator, dtype: torch.dtype) -> None:
    """Write what a reader needs beside the weights: config, tokenizer or preprocessor, and when a text ends."""
    model = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    config.dtype = dtype
    config.name_or_path = ""
    if hasattr(config, "use_cache"):
        config.use_cache = True  # off while training
    config.save_pretrained(folder)
    if not isinstance(data, TextCollator):
        (folder / "preprocessor_config.json").write_text(json.dumps(_preprocessor(data.form), indent=2))
        return
    data.tokenizer.save_pretrained(folder)
    if model.can_generate():
        generation = copy.deepcopy(model.generation_config)
        generation.eos_token_id = end_tokens(data.tokenizer, generation.eos_token_id)
        generation.pad_token_id, generation.use_cache = data.tokenizer.pad_token_id, True
        generation.save_pretrained(folder)


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
    """The model itself, without Fabric's wrapper."""
    return model.module
