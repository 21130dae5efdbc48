"""Low-rank adapters (LoRA: Hu et al., 2021, arXiv:2106.09685), by PEFT.

PEFT is imported where it is used: it takes a second, and most runs do not need it.
"""

import logging
import re
import warnings
from collections.abc import Iterable
from importlib.metadata import version

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.pytorch_utils import Conv1D

from fabric_ladder.errors import UserError
from fabric_ladder.models.dtypes import half_precision, keep_dtype
from fabric_ladder.models.layers import batch_norms, expert_share, head_names, linear_layers, meta_model
from fabric_ladder.models.probe import facts_of, layers_named
from fabric_ladder.settings import Settings
from fabric_ladder.techniques.memory import Counts
from fabric_ladder.techniques.technique import Technique
from fabric_ladder.techniques.token_rows import check_rows

TASK_TYPES = {  # PEFT has none for images
    "text-classification": "SEQ_CLS",
    "token-classification": "TOKEN_CLS",
    "instruction-tuning": "CAUSAL_LM",
}

logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # PEFT imports it; on a CPU it warns of an optional package
# PEFT uses a name that transformers 5.23 has changed
warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)


def _check_targets(settings: Settings) -> None:
    """Refuse names of layers that the model does not have.

    PEFT ignores such names if it finds one of the others.

    Raises:
        UserError: A name matches no linear layer of the body, or no attention projections are found. The message
            lists the model's layers.
    """
    model = meta_model(settings)
    layers = adaptable_layers(model, settings)
    targets = _targets(model, layers, settings.lora_targets)
    found = ", ".join(_last_parts(layers))
    for target in targets:
        if not _matches(target, layers):
            raise UserError(
                f"--lora_targets {settings.lora_targets}: {settings.model} has no linear layer {target!r} that could "
                f"get an adapter; it has {found or 'none'}"
            )
    if not targets:
        raise UserError(
            f"{settings.model}: no attention projections are found that could get adapters; name others: {found}"
            if found
            else f"{settings.model} has no linear layers that could get adapters: leave out --lora true"
        )


def add_adapters(model: nn.Module, settings: Settings) -> nn.Module:
    """Freeze the model and return it with adapters; a classifier's head is trained and saved with them.

    A pooler that the model's files lack is trained and saved like the head.

    Trained weights stay in 32-bit in every precision: bfloat16 would round small updates away, and they are few.
    Mixed precision multiplies frozen linear layers in 16 bits, so they are stored in 16 bits, which changes no bit of
    a result. A head that is tied to the embedding stays in 32-bit, since the embedding is read in 32-bit.
    """
    from peft import LoraConfig, get_peft_model

    from fabric_ladder.techniques.adapter_inputs import keep_16_bit_inputs

    heads = head_names(model) if settings.task != "instruction-tuning" else []
    heads += getattr(model, "new_parts", [])
    layers = adaptable_layers(model, settings)
    targets = _targets(model, layers, settings.lora_targets)
    others = {name for name, _ in model.named_modules()}.difference(layers)
    config = LoraConfig(
        task_type=TASK_TYPES.get(settings.task),
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,
        lora_dropout=settings.lora_dropout,
        target_modules=targets,
        exclude_modules=sorted(name for name in others if any(_matches(target, [name]) for target in targets)) or None,
        modules_to_save=heads or None,
        use_dora=settings.dora,
        trainable_token_indices=getattr(model, "trained_rows", None),
        revision=getattr(model.config, "_commit_hash", None),
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
    )
    # only a language model's head may be tied, and CLIP's classifier raises an error here
    embedding = model.get_input_embeddings().weight if settings.task == "instruction-tuning" else None
    model = get_peft_model(model, config)
    check_rows(model)
    own = tuple(f"base_model.model.{head}." for head in heads)  # PEFT takes all names that end so: an image part's, too
    for name, parameter in model.named_parameters():
        if ".modules_to_save." in name and not name.startswith(own):
            parameter.requires_grad_(False)
    for module in batch_norms(model):  # their statistics would change, and are not saved with an adapter
        module.eval().train = lambda mode=True, module=module: module
    if settings.precision.endswith("mixed"):
        for module in model.modules():
            if type(module) is nn.Linear and not module.weight.requires_grad and module.weight is not embedding:
                module.to(half_precision(settings))
    if not settings.owns_optimizer:  # an engine keeps 32-bit copies by itself
        _keep_trained_in_32_bit(model)
        keep_16_bit_inputs(model)
    return model


def _read_dtype(settings: Settings) -> torch.dtype | None:
    """Return the 16-bit type in which pretrained weights are read; None: 32 bits, as a classifier's new head needs."""
    is_final = settings.task == "instruction-tuning" and settings.precision.endswith("true")
    return half_precision(settings) if is_final else None


def _keep_trained_in_32_bit(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if any(parameter.requires_grad for parameter in module.parameters(recurse=False)):
            if next(module.parameters()).dtype in (torch.float16, torch.bfloat16):  # made under `fabric.init_module`
                module.float()
            keep_dtype(module)
            if "modules_to_save" in name and not isinstance(module, nn.ModuleDict):
                module.register_forward_pre_hook(_convert_inputs)


def _convert_inputs(module: nn.Module, args: tuple) -> tuple:
    """Convert the body's 16-bit output for a 32-bit head; PEFT's own layers convert their inputs themselves."""
    dtype = next(module.parameters()).dtype
    return tuple(arg.to(dtype) if isinstance(arg, Tensor) and arg.is_floating_point() else arg for arg in args)


def adaptable_layers(model: nn.Module, settings: Settings) -> list[str]:
    """Return the names of the linear layers of the body that are used for each token, and may get adapters."""
    layers, facts = linear_layers(model), facts_of(settings)
    unused = layers_named(model, facts.unused) if facts else []
    experts = names_of_experts(model, layers)
    return [name for name in layers if name not in unused and name.split(".")[-1] not in experts]


def names_of_experts(model: nn.Module, layers: list[str]) -> list[str]:
    """Return the last parts of names that PEFT takes for those of experts.

    It would move adapters with these names from the first blocks, or from shared experts, to the stacked weights.
    """
    from peft import LoraConfig
    from peft.utils import transformers_weight_conversion as conversion

    found = []
    for name in sorted({layer.split(".")[-1] for layer in layers}):
        config = LoraConfig(target_modules=[name])
        try:
            conversion.convert_peft_config_for_transformers(config, model, None)
        except ValueError:  # it is one half of a stacked weight
            config.target_modules = set()
        found += [] if name in config.target_modules else [name]
    return found


def _targets(model: nn.Module, layers: list[str], wanted: str) -> list[str]:
    """Return the last parts of the names of layers that get adapters; `attention` is PEFT's choice, if it has one."""
    if wanted == "all-linear":
        return _last_parts(layers)
    if wanted != "attention":
        return re.findall(r"[^,\s]+", wanted)
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as TARGETS

    known = TARGETS.get(model.config.model_type, [])
    if known and all(_matches(target, layers) for target in known):
        return list(known)
    attention = tuple(f"{name}." for name, module in model.named_modules() if "Attention" in type(module).__name__)
    return _last_parts(name for name in layers if name.startswith(attention))


def _last_parts(names: Iterable[str]) -> list[str]:
    """Return the last parts of names; two of a name that ends with a number, as blocks' names do."""
    return sorted({re.search(r"[^.]+(\.\d+)?$", name)[0] for name in names})


def _matches(target: str, names: list[str]) -> bool:
    """Return whether a target matches any of the names, as in PEFT."""
    return any(f".{name}".endswith(f".{target}") for name in names)


class LoRA(Technique):
    """Train adapters and a classifier's head; all other weights are frozen."""

    adapters = True
    trains_all = False

    def reason_against(self, settings: Settings, capability: tuple[int, int] | None) -> str | None:
        """Return what to do about an old torchao: PEFT raises an error for each adapter."""
        from peft.import_utils import is_torchao_available

        try:
            is_torchao_available()
        except ImportError:
            return f"PEFT refuses torchao {version('torchao')}: pip install torchao==0.18.0, or pip uninstall torchao"
        return None

    def check(self, settings: Settings, capability: tuple[int, int] | None) -> None:
        super().check(settings, capability)
        if self.is_used(settings):
            _check_targets(settings)

    def packages(self, settings: Settings) -> tuple[str, ...]:
        return ("peft",)

    def notice(self, settings: Settings) -> str | None:
        """Return a line about experts, which neither PEFT nor bitsandbytes takes for linear layers."""
        model = meta_model(settings)
        share, names = expert_share(model), names_of_experts(model, linear_layers(model))
        bits = {"64-true": 64, "bf16-true": 16, "16-true": 16}.get(settings.precision, 32)
        line = f"{share:.0%} of the weights are experts, which get no adapters and stay in {bits} bits"
        if names:
            line += f"; nor do other layers called {', '.join(names)}, since PEFT takes these names for experts'"
        return line if share else None

    def loading_options(self, settings: Settings, config: PretrainedConfig) -> dict:
        dtype = _read_dtype(settings)
        return {} if dtype is None or settings.from_scratch else {"dtype": dtype}

    def loaded_bytes(self, loaded: int, counts: Counts, settings: Settings) -> int:
        dtype = _read_dtype(settings)
        return loaded if dtype is None else loaded // 2

    def change_model(self, model: nn.Module, settings: Settings) -> nn.Module:
        return add_adapters(model, settings)
