"""Low-rank adapters (LoRA, by PEFT), alone or on a model of 4-bit weights (QLoRA, by bitsandbytes).

Both packages are imported where they are used: they take a second, and most runs have no use for them.
"""

import importlib.util
import logging
import os
import re
import warnings
from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PretrainedConfig
from transformers.pytorch_utils import Conv1D

from fabric_ladder.errors import UserError, first_line, refused
from fabric_ladder.models.configs import MODELS, load_config
from fabric_ladder.settings import Settings

TASK_TYPES = {"text-classification": "SEQ_CLS", "instruction-tuning": "CAUSAL_LM"}  # PEFT has none for images
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}

logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # PEFT loads it, and on a CPU it misses an optional package
# PEFT asks transformers for what it renamed in 5.23
warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)


def check_lora(settings: Settings, script: dict) -> None:
    """Refuse settings of adapters and of 4-bit weights that cannot work.

    Args:
        settings: All settings of the run.
        script: The defaults that the script names itself.

    Raises:
        UserError: Settings of adapters without adapters, layers for adapters that the model does not have, or 4-bit
            weights without adapters or without bitsandbytes.
    """
    if settings.lora:
        _check_targets(settings)
    else:
        for name in ("dora", "rslora"):
            if getattr(settings, name):
                raise UserError(f"--{name} true changes adapters, and there are none: add --lora true")
        if settings.quantization != "no":
            raise UserError(f"--quantization {settings.quantization}: 4-bit weights cannot be trained; add --lora true")
    if settings.quantization == "no":
        return
    if "offload" in script or "deepspeed" in script:
        raise UserError(
            f"--quantization {settings.quantization}: {settings.name} cannot share 4-bit weights out to GPUs; use "
            "src/14_qlora.py, or src/9_ddp.py with --lora true, which keeps all of them on each"
        )
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError("4-bit weights need bitsandbytes: pip install bitsandbytes==0.50.2, or run src/13_lora.py")
    device = settings.accelerator
    if device == "cuda":  # this rank's: on the first GPU each rank's context would take memory
        device = f"cuda:{os.environ.get('LOCAL_RANK') or os.environ.get('SLURM_LOCALID') or 0}"
    try:
        from bitsandbytes.functional import quantize_4bit

        quantize_4bit(torch.ones(64, 64, device=device), quant_type="nf4", compress_statistics=True)
    except (ImportError, OSError, RuntimeError, NotImplementedError, AttributeError) as error:
        raise UserError(
            f"bitsandbytes cannot make 4-bit weights on {settings.accelerator} here ({first_line(error, 160)}): run "
            "src/13_lora.py"
        ) from error


def _check_targets(settings: Settings) -> None:
    """Refuse names of layers that the model does not have; PEFT passes over those if it finds one of the others.

    Raises:
        UserError: A name matches no linear layer, or only the one that makes the logits, or no attention is found to
            take by default; the message names the layers that there are.
    """
    model = without_values(settings, load_config(settings.model))
    layers, targets = linear_layers(model), _targets(model, settings.lora_targets)
    found = ", ".join(_last_parts(layers))
    for target in targets:
        if not _matches(target, layers):
            raise UserError(
                f"--lora_targets {settings.lora_targets}: {settings.model} has no linear layer {target!r} that could "
                f"get an adapter; it has {found}"
            )
    if not targets:
        raise UserError(
            f"{settings.model}: no attention projections are found that could get adapters; name layers by "
            f"--lora_targets: {found or 'but it has no linear ones'}"
        )


def quantization(settings: Settings, config: PretrainedConfig) -> dict:
    """Return `from_pretrained`'s options for 4-bit weights; none where `settings.quantization` is `no`.

    NF4 with double quantisation takes 4.127 bits a weight (Dettmers et al., 2023, QLoRA, section 3). What multiplies
    with it is in 16 bits, or in 32 under `32-true`. Embeddings, norms and heads keep their own precision.
    """
    if settings.quantization == "no":
        return {}
    heads = None  # the one before the logits
    if settings.task != "instruction-tuning":
        heads = _heads(without_values(settings, config))
    options = BitsAndBytesConfig(
        **NF4, llm_int8_skip_modules=heads, bnb_4bit_compute_dtype=half_precision(settings) or torch.float32
    )
    device = torch.cuda.current_device() if settings.accelerator == "cuda" else "cpu"
    return {"quantization_config": options, "device_map": {"": device}}


def half_precision(settings: Settings) -> torch.dtype | None:
    """Return the 16-bit type that the precision computes in; None for `32-true` and `64-true`."""
    return {"16": torch.float16, "bf16": torch.bfloat16}.get(settings.precision.split("-")[0])


def add_adapters(model: nn.Module, settings: Settings) -> nn.Module:
    """Freeze the model and return it with adapters; a classifier's head is trained, and saved, with them.

    What is trained stays in 32-bit whatever the precision: bfloat16 would round small updates away, and it is little.
    Frozen linear layers are kept in the 16 bits that mixed precision computes in, which changes no bit of a result;
    not so a head that is tied to the embedding, whose values are also read as they are.
    """
    from peft import LoraConfig, get_peft_model

    heads = _heads(model) if settings.task != "instruction-tuning" else []
    config = LoraConfig(
        task_type=TASK_TYPES.get(settings.task),
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,
        lora_dropout=settings.lora_dropout,
        target_modules=_targets(model, settings.lora_targets),
        exclude_modules=rf"(.*\.)?({'|'.join(heads)})(\..*)?" if heads else None,
        modules_to_save=heads or None,
        use_dora=settings.dora,
        use_rslora=settings.rslora,
        revision=getattr(model.config, "_commit_hash", None),
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
    )
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):  # else evaluating on a CPU repacks 4-bit weights, with loss,
            module.support_avx512bf16_for_cpu = False  # for a kernel that has no gradient
    embedding = getattr(model.get_input_embeddings(), "weight", None)
    model = get_peft_model(model, config)
    if settings.precision.endswith("mixed"):
        for module in model.modules():
            if type(module) is nn.Linear and not module.weight.requires_grad and module.weight is not embedding:
                module.to(half_precision(settings))
    if not settings.deepspeed:  # which keeps 32-bit copies by itself
        _keep_trained_in_32_bit(model)
    return model


def keep_dtype(module: nn.Module, buffers_alone: bool = False) -> None:
    """Keep a module's tensors in their precision when what holds it is converted, by Fabric say, to half precision.

    With `buffers_alone` its parameters are converted, and only the buffers stay that no checkpoint holds.
    """
    module._apply = partial(_apply_but_dtype, module, buffers_alone)


def _apply_but_dtype(module: nn.Module, buffers_alone: bool, function, recurse: bool = True) -> nn.Module:
    kept = [module._buffers[name] for name in module._non_persistent_buffers_set]

    def move(tensor: Tensor) -> Tensor:
        moved = function(tensor)
        if moved.dtype == tensor.dtype or (buffers_alone and not any(tensor is buffer for buffer in kept)):
            return moved
        return torch.empty_like(tensor, device=moved.device) if tensor.is_meta else tensor.to(moved.device)

    return type(module)._apply(module, move, recurse)


def _keep_trained_in_32_bit(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if any(parameter.requires_grad for parameter in module.parameters(recurse=False)):
            if next(module.parameters()).dtype in (torch.float16, torch.bfloat16):  # made under `fabric.init_module`
                module.float()
            keep_dtype(module)
            if "modules_to_save" in name and not isinstance(module, nn.ModuleDict):
                module.register_forward_pre_hook(_convert_inputs)


def _convert_inputs(module: nn.Module, args: tuple) -> tuple:
    """Give a 32-bit head what the body hands over in 16 bits; PEFT's own layers see to it themselves."""
    dtype = next(module.parameters()).dtype
    return tuple(arg.to(dtype) if isinstance(arg, Tensor) and arg.is_floating_point() else arg for arg in args)


def without_values(settings: Settings, config: PretrainedConfig) -> nn.Module:
    """Return the task's model on the device `meta`, where weights take no memory.

    Raises:
        UserError: The config is of no model.
    """
    with refused(f"no model can be made of {settings.model}"), torch.device("meta"):
        return MODELS[settings.task].from_config(config)


def _heads(model: nn.Module) -> list[str]:
    """Return the names of what stands on the pretrained body: a classifier, and layers of its own before it."""
    children = model.named_children()
    return [name for name, child in children if child is not model.base_model and any(True for _ in child.parameters())]


def linear_layers(model: nn.Module) -> list[str]:
    """Return the names of the layers that can get adapters: all linear ones of the body."""
    output, heads = model.get_output_embeddings(), _heads(model)
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not output and name.split(".")[0] not in heads
    ]


def _targets(model: nn.Module, wanted: str | None) -> list[str]:
    """Return the ends of the names of layers that get adapters: by default PEFT's choice, or the attention's layers."""
    layers = linear_layers(model)
    if wanted == "all-linear":
        return _last_parts(layers)
    if wanted:
        return re.findall(r"[^,\s]+", wanted)
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as TARGETS

    known = TARGETS.get(model.config.model_type, [])
    if known and all(_matches(target, layers) for target in known):
        return list(known)
    attention = tuple(f"{name}." for name, module in model.named_modules() if "Attention" in type(module).__name__)
    return _last_parts(name for name in layers if name.startswith(attention))


def _last_parts(names: Iterable[str]) -> list[str]:
    return sorted({name.split(".")[-1] for name in names})


def _matches(target: str, names: list[str]) -> bool:
    """Return whether a target means any of these layers, as PEFT matches names."""
    return any(f".{name}".endswith(f".{target}") for name in names)
