"""Save the trained model: sharded, each rank its own part, or consolidated, as one model for transformers."""

import copy
import json
import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from huggingface_hub import save_torch_state_dict
from lightning import Fabric
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import PreTrainedTokenizerBase

from fabric_ladder.checkpoints.disk import let_others_read, try_on_all
from fabric_ladder.checkpoints.sharded import empty_optimizer_state, optimizer_state, read_tensors, write_tensors
from fabric_ladder.data.loaders import Collator, TextCollator
from fabric_ladder.data.splits import ImageFormat
from fabric_ladder.distributed.deepspeed import engine_state
from fabric_ladder.distributed.fsdp import free_gathered
from fabric_ladder.environment import write_whole
from fabric_ladder.errors import UserError, read_outside, refused
from fabric_ladder.runs.folder import CHECKPOINTS

OPTIMIZER = "optimizer.json"
BASE = "base_sample.json"  # values of the frozen weights, next to an adapter
# values of an adapter that the sizes of its weights do not show
ADAPTER = "peft_type r lora_alpha use_rslora use_dora target_modules trainable_token_indices".split()


def save(
    fabric: Fabric,
    layout: str,
    folder: Path | None,
    model: nn.Module,
    optimizer: Optimizer,
    data: Collator,
    from_scratch: bool = False,
) -> Path:
    """Save the model under `folder`, completely or not at all, and return its path. All ranks must call it.

    For a model with adapters (PEFT) only the trained weights and the name of the base model are saved.

    Args:
        fabric: Gives the rank.
        layout: `sharded`: model and optimizer in the format of `write_state`. `consolidated`: weights, config and
            tokenizer for `from_pretrained` of transformers, or an adapter for PEFT, gathered in the CPU memory of
            rank 0; an engine gathers its 32-bit copies.
        folder: The run's folder; only rank 0 needs it.
        model: Set up by Fabric.
        optimizer: Set up by Fabric.
        data: The collator, whose tokenizer or image preprocessing is saved too.
        from_scratch: The model started from random weights. Then the frozen ones exist nowhere else, and are saved as
            `base` next to the adapter.

    Raises:
        UserError: The files could not be written.
    """
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    engine = engine_state(model)
    if engine:
        engine.prepare_gathering()
    folder = Path(fabric.broadcast(folder))
    inner = model.module
    adapter = has_adapter(model)
    first = fabric.global_rank == 0
    name = {"sharded": "checkpoint"}.get(layout, "adapter" if adapter else "model")
    unfinished = folder / ".unfinished-save"
    target = unfinished / name
    base = adapter and from_scratch

    def make_folder():
        if adapter:
            _name_base(inner, folder / "base" if base else None)
        if first:
            shutil.rmtree(unfinished, ignore_errors=True)
            target.mkdir(parents=True)

    def write_base():
        if base:
            _save_base(fabric, unfinished / "base", model, data)

    def write_weights():
        if layout == "sharded":
            return write_state(target, model, optimizer, fabric.global_rank)
        weights = _gather(fabric, model, _is_adapter_weight if adapter else lambda *_: True)
        if first:
            inner.save_pretrained(target, state_dict=weights, **({"save_embedding_layers": False} if adapter else {}))
            (target / "README.md").unlink(missing_ok=True)  # an empty model card of PEFT

    def finish():
        if first:
            _write_description(target, inner, data, torch.float32 if engine else _dtype(_trained(inner).values()))
            let_others_read(unfinished)
            for written in unfinished.iterdir():
                shutil.rmtree(folder / written.name, ignore_errors=True)  # left by a run that died here
                written.rename(folder / written.name)
            unfinished.rmdir()

    if problem := try_on_all(fabric, make_folder, write_base, write_weights, finish):
        if first:
            shutil.rmtree(unfinished, ignore_errors=True)
        kept = any((folder / CHECKPOINTS).glob("step-*"))
        again = "add --resume auto: the last checkpoint is kept" if kept else "run again"
        raise UserError(f"--save {layout}: cannot write the model into {folder} ({problem}): free space and {again}")
    return folder / name


def write_state(folder: Path, model: nn.Module, optimizer: Optimizer, rank: int) -> None:
    """Write model and optimizer, each rank its part, into an existing folder. All ranks must call it.

    Raises:
        OSError, RuntimeError: It cannot be written.
    """
    inner = model.module
    free_gathered(inner)
    adapter = has_adapter(model)
    if engine := engine_state(model):
        engine.write(folder, trained_only=adapter)
    else:
        tensors, values = optimizer_state(inner, optimizer.optimizer)
        write_tensors(_weights(inner, adapter) | tensors, folder)
        if rank == 0:
            record = {"class": type(optimizer.optimizer).__name__, "tensors": list(tensors), "values": values}
            write_whole(folder / OPTIMIZER, json.dumps(record))
    if adapter and rank == 0:  # last: an error before the collectives above would leave the other ranks waiting
        inner.peft_config["default"].save_pretrained(folder)
        write_whole(folder / BASE, json.dumps(_sample_base(inner)))


def read_state(option: str, folder: Path, model: nn.Module, optimizer: Optimizer) -> None:
    """Read the files that `write_state` has written. All ranks must call it.

    An engine needs the number of ranks that wrote them; otherwise the number of ranks may differ.

    Raises:
        UserError: They are damaged or from another model, optimizer or adapter; the message begins with `option`.
    """
    inner = model.module
    free_gathered(inner)
    adapter = has_adapter(model)
    if adapter:
        _check_adapter(option, folder, inner.peft_config["default"])
        _check_base(option, folder, inner)
    if engine := engine_state(model):
        engine.read(option, folder, trained_only=adapter)
        return
    own_class = type(optimizer.optimizer).__name__
    with refused(f"{option}: made with another model or optimizer, or damaged"):
        record = json.loads((folder / OPTIMIZER).read_text(encoding="utf-8"))
        if record["class"] != own_class:
            raise UserError(f"{option}: made with another model or optimizer ({record['class']}, not {own_class})")
        optimizer.optimizer.state.clear()  # the best weights are read after other steps
        state = empty_optimizer_state(inner, optimizer.optimizer, folder, record["tensors"], record["values"])
        read_tensors(_weights(inner, adapter) | state, folder)


def has_adapter(model: nn.Module) -> bool:
    """Return whether a model set up by Fabric has adapters of PEFT, without importing PEFT."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model.module, peft.PeftModel)


def end_tokens(tokenizer: PreTrainedTokenizerBase, configured: int | list[int] | None) -> list[int] | None:
    """Return the tokens that end a text: the tokenizer's, and the special tokens among `configured`.

    The tokenizer has an end-of-text token and, after training on chats, the tokens after their answers. A config file
    names tokens by number. A tokenizer trained here may have given these numbers to ordinary tokens.
    """
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    ends = {*(configured if isinstance(configured, list) else [configured])} & special
    ends |= {*tokenizer.convert_tokens_to_ids(tokenizer.init_kwargs.get("answer_ends", []))}
    return sorted(ends | {tokenizer.eos_token_id} - {None}) or None


def _weights(inner: nn.Module, adapter: bool) -> dict[str, Tensor]:
    """Return the tensors to save, or this rank's shards of them; they share memory with the model."""
    tensors = _trained(inner) if adapter else inner.state_dict(keep_vars=True)  # tied weights stay one tensor
    return {f"model.{name}": tensor for name, tensor in tensors.items()}


def _trained(inner: nn.Module) -> dict[str, Tensor]:
    tensors = inner.state_dict(keep_vars=True)  # a head may have buffers too
    return {name: tensor for name, tensor in tensors.items() if _is_adapter_weight(name, tensor)}


def _is_adapter_weight(name: str, tensor: Tensor) -> bool:
    return tensor.requires_grad or ".modules_to_save." in name


def _name_in_base(name: str) -> str:
    """Remove the parts that PEFT adds to the names of the base model's weights."""
    name = name.removeprefix("base_model.model.").replace(".token_adapter.", ".")
    return name.replace(".base_layer.", ".").replace(".original_module.", ".")


def _gather(fabric: Fabric, model: nn.Module, wanted: Callable[[str, Tensor], bool]) -> dict[str, Tensor]:
    """Gather whole tensors one after the other; return them in CPU memory on rank 0, and nothing on other ranks."""
    engine = engine_state(model)
    gathered = {}
    weights = {}
    for name, tensor in model.module.state_dict(keep_vars=True).items():
        if wanted(name, tensor):
            if id(tensor) not in gathered:  # tied weights stay tied
                whole = engine.gather(tensor) if engine else tensor.detach()
                if isinstance(whole, DTensor):  # shards in CPU memory cannot be gathered there
                    whole = whole.to(whole.device_mesh.device_type).full_tensor()
                gathered[id(tensor)] = _on_host(whole) if fabric.global_rank == 0 else None
            weights[name] = gathered[id(tensor)]
    return weights if fabric.global_rank == 0 else {}


def _on_host(tensor: Tensor) -> Tensor:
    """Return the tensor in CPU memory; a part of larger memory, as of a streamed block, cannot be saved by itself."""
    host = tensor.cpu()
    return host.clone() if host.untyped_storage().nbytes() > host.nbytes else host


def _save_base(fabric: Fabric, folder: Path, model: nn.Module, data: Collator) -> None:
    """Save the frozen weights under the names that they have without adapters."""
    frozen = _gather(fabric, model, lambda name, tensor: not _is_adapter_weight(name, tensor))
    if fabric.global_rank == 0:
        folder.mkdir(exist_ok=True)
        base = {_name_in_base(name): tensor for name, tensor in frozen.items()}
        save_torch_state_dict(base, folder, metadata={"format": "pt"})
        _write_description(folder, model.module, data, _dtype(base.values()))


def _dtype(tensors) -> torch.dtype:
    """Return the precision of the first floating-point weight; 4-bit weights are stored as integers."""
    return next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), torch.float32)


def _name_base(inner: nn.Module, base: Path | None) -> None:
    """Name the base model in the adapter's config, by the absolute path of a folder or by the Hub's commit."""
    config = inner.peft_config["default"]
    model = inner.get_base_model()
    name = str(base or model.name_or_path)
    is_folder = base is not None or Path(name).is_dir()
    config.base_model_name_or_path = str(Path(name).absolute()) if is_folder else name
    config.revision = None if is_folder else getattr(model.config, "_commit_hash", None)


def _check_adapter(option: str, folder: Path, own: object) -> None:
    """Refuse a checkpoint whose adapter differs in values that the sizes of its weights do not show."""
    from peft import PeftConfig

    if not (folder / "adapter_config.json").is_file():
        raise UserError(f"{option}: holds a whole model, not an adapter: leave out --lora true")
    with refused(f"{option}: cannot read {folder / 'adapter_config.json'}"):
        saved = PeftConfig.from_pretrained(folder)
    for key in ADAPTER:
        before = getattr(saved, key, None)
        if before != getattr(own, key):
            raise UserError(f"{option}: made with another model or optimizer ({key} {before}, not {getattr(own, key)})")


def _check_base(option: str, folder: Path, inner: nn.Module) -> None:
    """Refuse an adapter of another base model. The first rank's sample counts; older checkpoints have none."""
    if not (folder / BASE).is_file():
        return
    own, before = [_sample_base(inner)], read_outside(folder / BASE)
    if dist.is_initialized():
        dist.broadcast_object_list(own)
    pairs = [pair for name in own[0].keys() & before.keys() for pair in zip(own[0][name], before[name], strict=False)]
    others = sum(not math.isclose(*pair, rel_tol=0.01, abs_tol=1e-4) for pair in pairs)  # 16 bits round
    if others > len(pairs) / 50:  # another device may pack a few weights into other 4 bits
        raise UserError(
            f"{option}: its adapter was trained on a base model with other weights than this --model: use the same "
            "files, or start a new run"
        )


def _sample_base(inner: nn.Module) -> dict[str, list[float]]:
    """Return up to eight values of each frozen weight, the same in all precisions; 4-bit weights have another name.

    A sharded weight's first values are on the first rank. A head that is replaced may be new, and differ by the seed.
    """
    sample = {}
    frozen = {name for name, weight in inner.named_parameters() if not weight.requires_grad}
    for name, weight in inner.state_dict(keep_vars=True).items():
        if name in frozen and ".original_module." not in name:
            weight = getattr(weight, "ds_tensor", weight).detach()  # ZeRO-3 leaves an empty tensor and its part
            weight = weight.to_local() if isinstance(weight, DTensor) else weight
            packed = "" if weight.is_floating_point() else " in 4 bits"
            sample[name + packed] = weight.reshape(-1)[:8].bfloat16().tolist()
    return sample


def _write_description(folder: Path, inner: nn.Module, data: Collator, dtype: torch.dtype) -> None:
    """Write the files that belong to the weights: config, tokenizer or preprocessor, and the tokens that end a text."""
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
        generation.pad_token_id = data.tokenizer.pad_token_id
        generation.use_cache = True
        generation.save_pretrained(folder)


def _preprocessor(images: ImageFormat) -> dict:
    """Return the config of transformers' image processor that prepares images like the evaluation here."""
    return {
        "image_processor_type": "ViTImageProcessor",
        "size": {"height": images.resize_to, "width": images.resize_to},
        "resample": {"bilinear": 2, "bicubic": 3}[images.resample],  # Pillow's constants
        "rescale_factor": 1 / 255,
        "image_mean": images.mean,
        "image_std": images.std,
        "do_center_crop": images.resize_to > images.size,
        "crop_size": {"height": images.size, "width": images.size},
    }
