"""Low-rank adapters (LoRA, by PEFT), alone or on a model of 4-bit weights (QLoRA, by bitsandbytes).

Both packages are imported where they are used: they take a second, and most runs have no use for them.
"""

import importlib.util
import logging
import re
import warnings
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig
from transformers.pytorch_utils import Conv1D

from fabric_ladder.errors import UserError

logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # PEFT loads it, and on a CPU it misses an optional package
TASK_TYPES = {"text-classification": "SEQ_CLS", "instruction-tuning": "CAUSAL_LM"}  # PEFT has none for images


def check_lora(settings, script: dict) -> None:
    """Refuse settings of adapters and of 4-bit weights that cannot work.

    Args:
        settings: All settings of the run.
        script: The defaults that the script names itself.

    Raises:
        UserError: Settings of adapters without adapters, or 4-bit weights without them or without bitsandbytes.
    """
    if not settings.lora:
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
    try:
        from bitsandbytes.functional import quantize_4bit

        quantize_4bit(torch.ones(64, 64, device=settings.accelerator), quant_type="nf4", compress_statistics=True)
    except (ImportError, OSError, RuntimeError, NotImplementedError, AttributeError) as error:
        reason = " ".join(str(error).split())[:160]
        raise UserError(
            f"bitsandbytes cannot make 4-bit weights on {settings.accelerator} here ({reason}): run src/13_lora.py"
        ) from error


def check_targets(settings, model: nn.Module) -> None:
    """Refuse names of layers that the model does not have.

    Args:
        settings: `lora_targets`.
        model: Of the run's architecture; its weights are not looked at.

    Raises:
        UserError: A name matches no linear layer, or only the one that makes the logits, or no attention is found to
            take by default; the message names the layers that there are.
    """
    layers = _linear_layers(model)
    found, targets = ", ".join(_last_parts(layers)), _targets(model, settings.lora_targets)
    for target in targets:
        if not any(_ends_with(name, target) for name in layers):
            raise UserError(
                f"--lora_targets {settings.lora_targets}: {settings.model} has no linear layer {target!r} that could "
                f"get an adapter; it has {found}"
            )
    if not targets:
        raise UserError(
            f"{settings.model}: no attention projections are found that could get adapters; name layers by "
            f"--lora_targets: {found or 'but it has no linear ones'}"
        )


def quantization(settings, make: Callable[[], nn.Module]) -> dict:
    """Return `from_pretrained`'s options for 4-bit weights; none where `settings.quantization` is `no`.

    Args:
        settings: `quantization`, `precision`, `task` and `accelerator`.
        make: Makes a model of the run's architecture; it is called on the meta device.

    NF4 with double quantisation takes 4.127 bits a weight (Dettmers et al., 2023, QLoRA, section 3). What multiplies
    with it is in 16 bits, or in 32 under `32-true`. Embeddings, norms and heads keep their own precision.
    """
    if settings.quantization == "no":
        return {}
    with torch.device("meta"):
        heads = _heads(make()) if settings.task != "instruction-tuning" else None  # None: the one before the logits
    config = BitsAndBytesConfig(
        llm_int8_skip_modules=heads,
        load_in_4bit=True,
        bnb_4bit_quant_type=settings.quantization,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=half_precision(settings) or torch.float32,
    )
    place = torch.cuda.current_device() if settings.accelerator == "cuda" else "cpu"
    return {"quantization_config": config, "device_map": {"": place}}


def half_precision(settings) -> torch.dtype | None:
    """Return the 16-bit type that the precision computes in; None for `32-true` and `64-true`."""
    return {"16": torch.float16, "bf16": torch.bfloat16}.get(settings.precision.split("-")[0])


def add_adapters(model: nn.Module, settings) -> nn.Module:
    """Freeze the model and return it with adapters; a classifier's head is trained, and saved, with them.

    What is trained stays in 32-bit whatever the precision: bfloat16 would round small updates away, and it is little.
    Frozen linear layers are kept in the 16 bits that mixed precision computes in, which changes no bit of a result;
    not so a head that is tied to the embedding, whose values are also read as they are.
    """
    from peft import LoraConfig, get_peft_model

    # PEFT asks transformers for what it renamed in 5.23
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
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
    """Have a module follow when its model moves to a device, but not when the model is converted to half precision.

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
                module.register_forward_pre_hook(_enter_in_own_dtype)


def _enter_in_own_dtype(module: nn.Module, args: tuple) -> tuple:
    """The body hands a 16-bit tensor to a 32-bit head; PEFT's own layers see to it themselves."""
    dtype = next(module.parameters()).dtype
    return tuple(arg.to(dtype) if isinstance(arg, Tensor) and arg.is_floating_point() else arg for arg in args)


def _heads(model: nn.Module) -> list[str]:
    """Names of what stands on the pretrained body: a classifier, and layers of its own before it."""
    children = model.named_children()
    return [
        name for name, child in children if child is not model.base_model and next(child.parameters(), None) is not None
    ]


def _linear_layers(model: nn.Module) -> list[str]:
    """Names of the layers that can get adapters: all linear ones of the body."""
    output, heads = model.get_output_embeddings(), _heads(model)
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not output and name.split(".")[0] not in heads
    ]


def _targets(model: nn.Module, wanted: str | None) -> list[str]:
    layers = _linear_layers(model)
    if wanted == "all-linear":
        return _last_parts(layers)
    if wanted:
        return _split(wanted)
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as TARGETS

    known = TARGETS.get(model.config.model_type, [])
    if known and all(any(_ends_with(name, target) for name in layers) for target in known):
        return list(known)
    attention = [name for name, module in model.named_modules() if "Attention" in type(module).__name__]
    return _last_parts(name for name in layers if any(name.startswith(f"{place}.") for place in attention))


def _last_parts(names: Iterable[str]) -> list[str]:
    return sorted({name.split(".")[-1] for name in names})


def _split(targets: str) -> list[str]:
    return [target for target in re.split(r"[,\s]+", targets) if target]


def _ends_with(name: str, target: str) -> bool:
    """As PEFT matches names."""
    return name == target or name.endswith(f".{target}")
