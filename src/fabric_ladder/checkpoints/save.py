"""Saving what was trained: sharded, by every rank its own, or consolidated, as one model for transformers."""

import copy
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from huggingface_hub import save_torch_state_dict
from lightning import Fabric
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import PreTrainedTokenizerBase

from fabric_ladder.checkpoints.room import places, try_on_all
from fabric_ladder.checkpoints.sharded import empty_optimizer_state, optimizer_state, read_tensors, write_tensors
from fabric_ladder.data.loaders import Collator, TextCollator
from fabric_ladder.data.splits import ImageFormat
from fabric_ladder.distributed.deepspeed import load_engine, whole_in_32_bit
from fabric_ladder.environment import write_whole
from fabric_ladder.errors import UserError, first_line, read_outside

OPTIMIZER = "optimizer.json"
ADAPTER = ("peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "target_modules")  # what weights do not tell


def save(
    fabric: Fabric,
    layout: str,
    folder: Path | None,
    model: nn.Module,
    optimizer: Optimizer,
    data: Collator,
    from_scratch: bool = False,
) -> Path:
    """Save the model under `folder`, as a whole or not at all, and return where. All ranks must call it.

    Where that disk is full, it is saved on another one: in the current folder, the user's own, or that of temporary
    files; on a terminal the user is asked for one in the end.

    Of a model with adapters (PEFT) only what is trained is saved, and the name of its base.

    Args:
        fabric: Knows the rank.
        layout: `sharded`: model and optimizer as `write_state` writes them. `consolidated`: weights, config and
            tokenizer as transformers' `from_pretrained` reads them, or an adapter as PEFT reads it, gathered in the
            memory of rank 0's host; under DeepSpeed from its 32-bit copies.
        folder: The run's folder, as rank 0 knows it.
        model, optimizer: Set up by Fabric.
        data: Made the batches; its tokenizer, or how it prepares images, is saved too.
        from_scratch: The weights were random at first: those that adapters leave as they are, which exist nowhere else,
            are saved as `base` beside the adapter.

    Raises:
        UserError: It could be written nowhere.
    """
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    if engine := _engine(model):
        engine.empty_partition_cache()  # weights that ZeRO-3 has fetched ahead cannot be gathered
    problems, first = [], fabric.global_rank == 0
    for home in places(folder, fabric.broadcast, problems):
        name = {"sharded": "checkpoint"}.get(layout, "adapter" if has_adapter(model) else "model")
        part = home / ".unfinished-save"
        steps = _saving(fabric, part, home, name, model, optimizer, data, from_scratch)
        problem = next((problem for step in steps if (problem := try_on_all(fabric, step))), None)
        if problem is None:
            return home / name
        if first:
            shutil.rmtree(part, ignore_errors=True)
        problems.append(f"{home} ({problem})")
    raise UserError(f"--save {layout}: the model could not be written into {', nor into '.join(problems)}")


def _saving(
    fabric: Fabric, part: Path, home: Path, name: str, model: nn.Module, optimizer: Optimizer, data: Collator,
    from_scratch: bool,
) -> list[Callable[[], object]]:  # fmt: skip
    """Return the steps by which `home / name` is written: in each, rank 0 writes when all is gathered."""
    inner, adapter, engine, rank = model.module, has_adapter(model), _engine(model), fabric.global_rank
    target, base = part / name, adapter and from_scratch

    def make():
        if adapter:
            _name_base(inner, home / "base" if base else None)
        if rank == 0:
            shutil.rmtree(part, ignore_errors=True)
            target.mkdir(parents=True)

    def write():
        if name == "checkpoint":
            return write_state(target, model, optimizer, rank)
        weights = _gather(fabric, model, _of_adapter if adapter else lambda *_: True)
        if rank == 0:
            inner.save_pretrained(target, state_dict=weights, **({"save_embedding_layers": False} if adapter else {}))
            (target / "README.md").unlink(missing_ok=True)  # PEFT's: a model card to be filled in

    def finish():
        if rank == 0:
            _describe(target, inner, data, torch.float32 if engine else _dtype(_trained(inner).values()))
            for written in part.iterdir():
                shutil.rmtree(home / written.name, ignore_errors=True)  # of a run that died here
                written.rename(home / written.name)
            part.rmdir()

    return [make, *([lambda: _save_base(fabric, part / "base", model, data)] if base else []), write, finish]


def write_state(folder: Path, model: nn.Module, optimizer: Optimizer, rank: int) -> None:
    """Write model and optimizer, each rank its share, into a folder that is there. All ranks must call it.

    Raises:
        OSError, RuntimeError: It cannot be written.
    """
    inner, adapter = model.module, has_adapter(model)
    if engine := _engine(model):
        engine.save_checkpoint(str(folder), exclude_frozen_parameters=adapter)
    else:
        tensors, values = optimizer_state(inner, optimizer.optimizer)
        write_tensors(_weights(inner, adapter) | tensors, folder)
        if rank == 0:
            record = {"class": type(optimizer.optimizer).__name__, "tensors": list(tensors), "values": values}
            write_whole(folder / OPTIMIZER, json.dumps(record))
    if adapter and rank == 0:  # last: the ranks meet above, and one that failed before would leave the others waiting
        inner.peft_config["default"].save_pretrained(folder)


def read_state(option: str, folder: Path, model: nn.Module, optimizer: Optimizer) -> None:
    """Read what `write_state` has written. All ranks must call it.

    DeepSpeed's is for as many ranks as it was made on, any other for any number.

    Raises:
        UserError: It is of another model, optimizer or adapter, or damaged; the message begins with `option`.
    """
    inner, adapter, mine = model.module, has_adapter(model), type(optimizer.optimizer).__name__
    if adapter:
        _check_adapter(option, folder, inner)
    if engine := _engine(model):
        load_engine(option, folder, engine, trained_only=adapter)
        return
    try:
        record = read_outside(folder / OPTIMIZER, most=2**31)  # with a line for each tensor
        if record["class"] != mine:
            raise UserError(f"{option}: made with another model or optimizer ({record['class']}, not {mine})")
        state = empty_optimizer_state(inner, optimizer.optimizer, folder, record["tensors"], record["values"])
        read_tensors(_weights(inner, adapter) | state, folder)
    except (OSError, RuntimeError, LookupError, TypeError, UnicodeDecodeError) as error:
        raise UserError(f"{option}: made with another model or optimizer, or damaged ({first_line(error)})") from error


def has_adapter(model: nn.Module) -> bool:
    """Return whether PEFT has put adapters into a model that Fabric has set up; PEFT is not imported for it."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model.module, peft.PeftModel)


def end_tokens(tokenizer: PreTrainedTokenizerBase, configured: int | list[int] | None) -> list[int] | None:
    """Return the tokens that end a text: the tokenizer's, and those of a config that are meant for this tokenizer.

    In a config file they are numbers, which a tokenizer of one's own may have given to parts of words.
    """
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    ends = {*(configured if isinstance(configured, list) else [configured])} & special
    return sorted(ends | {tokenizer.eos_token_id} - {None}) or None


def _weights(inner: nn.Module, adapter: bool) -> dict[str, Tensor]:
    """Return what is saved, of shards this rank's, as tensors that share memory with the model."""
    tensors = _trained(inner) if adapter else inner.state_dict(keep_vars=True)  # which leaves tied weights one tensor
    return {f"model.{name}": tensor for name, tensor in tensors.items()}


def _trained(inner: nn.Module) -> dict[str, Tensor]:
    return {name: parameter for name, parameter in inner.named_parameters() if parameter.requires_grad}


def _of_adapter(name: str, tensor: Tensor) -> bool:
    return tensor.requires_grad or ".modules_to_save." in name


def _name_in_base(name: str) -> str:
    """Undo what PEFT adds to the names of the weights that were there before."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".").replace(".original_module.", ".")


def _gather(fabric: Fabric, model: nn.Module, wanted: Callable[[str, Tensor], bool]) -> dict[str, Tensor]:
    """Return the whole tensors, in the memory of rank 0's host; nothing on other ranks. One is gathered at a time."""
    engine, gathered, weights = _engine(model), {}, {}
    for name, tensor in model.module.state_dict(keep_vars=True).items():
        if wanted(name, tensor):
            if id(tensor) not in gathered:  # tied weights stay tied
                whole = whole_in_32_bit(tensor) if engine else tensor.detach()
                if isinstance(whole, DTensor):  # moved first: parked shards cannot be gathered
                    whole = whole.to(whole.device_mesh.device_type).full_tensor()
                gathered[id(tensor)] = whole.cpu() if fabric.global_rank == 0 else None
            weights[name] = gathered[id(tensor)]
    return weights if fabric.global_rank == 0 else {}


def _save_base(fabric: Fabric, folder: Path, model: nn.Module, data: Collator) -> None:
    """Save the weights that adapters leave as they are, named as without adapters."""
    frozen = _gather(fabric, model, lambda name, tensor: not _of_adapter(name, tensor))
    if fabric.global_rank == 0:
        folder.mkdir(exist_ok=True)
        base = {_name_in_base(name): tensor for name, tensor in frozen.items()}
        save_torch_state_dict(base, folder, metadata={"format": "pt"})
        _describe(folder, model.module, data, _dtype(base.values()))


def _dtype(tensors) -> torch.dtype:
    """Return the precision of the first weight; 4-bit ones are kept in integers."""
    return next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), torch.float32)


def _name_base(inner: nn.Module, base: Path | None) -> None:
    """Have the adapter's config say what it is for, wherever it is read: a folder's whole path, or the Hub's commit."""
    config, model = inner.peft_config["default"], inner.get_base_model()
    name = str(base or model.name_or_path)
    is_folder = base is not None or Path(name).is_dir()
    config.base_model_name_or_path = str(Path(name).absolute()) if is_folder else name
    config.revision = None if is_folder else getattr(model.config, "_commit_hash", None)


def _check_adapter(option: str, folder: Path, inner: nn.Module) -> None:
    file, mine = folder / "adapter_config.json", inner.peft_config["default"].to_dict()
    if not file.is_file():
        raise UserError(f"{option}: holds a whole model, no adapter: leave out --lora true")
    saved = read_outside(file)
    if not isinstance(saved, dict):
        raise UserError(f"{option}: {file} must hold one JSON object, {{...}}")
    for key in ADAPTER:
        first, second = ([*sorted(value)] if isinstance(value, list | set) else value
                         for value in (saved.get(key), mine.get(key)))  # fmt: skip
        if first != second:
            raise UserError(f"{option}: made with another model or optimizer ({key} {first}, not {second})")


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
        (folder / "preprocessor_config.json").write_text(json.dumps(_preprocessor(data.format), indent=2))
        return
    data.tokenizer.save_pretrained(folder)
    if model.can_generate():
        generation = copy.deepcopy(model.generation_config)
        generation.eos_token_id = end_tokens(data.tokenizer, generation.eos_token_id)
        generation.pad_token_id, generation.use_cache = data.tokenizer.pad_token_id, True
        generation.save_pretrained(folder)


def _preprocessor(images: ImageFormat) -> dict:
    """Return what transformers' image processor must do to feed the model as it was fed here, in evaluation."""
    return {
        "image_processor_type": "ViTImageProcessor",
        "size": {"height": images.resize_to, "width": images.resize_to},
        "resample": {"bilinear": 2, "bicubic": 3}[images.resample],  # Pillow's numbers
        "rescale_factor": 1 / 255,
        "image_mean": images.mean,
        "image_std": images.std,
        "do_center_crop": images.resize_to > images.size,
        "crop_size": {"height": images.size, "width": images.size},
    }


def _engine(model: nn.Module) -> nn.Module | None:
    """Return DeepSpeed's engine around a model that Fabric has set up, if it is DeepSpeed's."""
    return model._forward_module if hasattr(model._forward_module, "save_checkpoint") else None
