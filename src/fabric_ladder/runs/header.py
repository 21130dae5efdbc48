"""The first lines of a run: its settings and its model."""

from torch import nn
from torch.distributed.tensor import DTensor

from fabric_ladder.runs.folder import short_name
from fabric_ladder.settings import Settings, show, weight_decay
from fabric_ladder.techniques import used


def title(settings: Settings, hardware: dict, ranks: int) -> str:
    """Return the title line: script, data, model, seed, effective batch, precision, optimizer and device."""
    described = (technique.describe_batch(settings, ranks) for technique in used(settings))
    batch = next(filter(None, described), None) or _describe_batch(settings, ranks)
    devices = f"{ranks} x " if ranks > 1 else ""
    device = f"{hardware['device']}: {devices}{hardware.get('gpu', hardware['processor'])}"
    device += f", GPU memory at most {settings.gpu_memory_limit}" if settings.gpu_memory_limit else ""
    precision = settings.precision
    if settings.matmul_precision in ("high", "medium"):  # PyTorch's default is highest
        precision += f", matmul {settings.matmul_precision}"
    parts = [
        settings.name,
        short_name(settings.dataset),
        short_name(settings.model),
        f"seed {settings.seed}",
        batch,
        precision,
        _describe_steps(settings),
        device,
    ]
    return " · ".join(parts)


def _describe_batch(settings: Settings, ranks: int) -> str:
    if settings.micro_batch_tokens:
        return f"batch {settings.batch_size} in micro-batches of {settings.micro_batch_tokens} tokens"
    devices = f"{ranks} x " if ranks > 1 else ""
    share = -(-settings.batch_size // ranks)
    size = min(settings.micro_batch_size, share)
    return f"batch {settings.batch_size} = {devices}{-(-share // size)} x {size}"


def _describe_steps(settings: Settings) -> str:
    """Return the optimizer, its learning rate and schedule, and its other numbers where they are not the defaults."""
    parts = [f"{settings.optimizer} {settings.learning_rate:g} {settings.schedule}"]
    parts += [f"warm-up {settings.warmup_steps} steps"] * bool(settings.warmup_steps)
    for name in ("betas", "eps"):
        if (value := getattr(settings, name)) != getattr(Settings, name):
            parts.append(f"{name} {show(value)}")
    parts += [f"weight decay {weight_decay(settings):g}"] * bool(weight_decay(settings))
    if settings.max_grad_norm:
        parts.append(f"clipped to {settings.max_grad_norm:g}")
    return ", ".join(parts)


def describe_parameters(model: nn.Module) -> dict:
    """Return for run.json the number of parameters of the whole model, their precisions, and this rank's bytes."""
    parameters = list(model.parameters())
    states = {id(module.weight): module.quant_state for module in model.modules() if hasattr(module, "quant_state")}
    counts = {each: _elements(each, states.get(id(each))) for each in parameters}
    return {
        "parameters": sum(counts.values()),
        "trainable_parameters": sum(count for each, count in counts.items() if each.requires_grad),
        "parameter_bytes_of_a_rank": sum(_bytes_here(parameter) for parameter in parameters),
        "dtypes": sorted({str(parameter.dtype) for parameter in parameters}),
    }


def parameters_line(described: dict) -> str:
    """Return the printed line of `describe_parameters`."""
    count, trainable = described["parameters"], described["trainable_parameters"]
    all_trained = trainable == count
    digits = 1 if all_trained else 3
    share = "" if all_trained else f" ({trainable / count:.2%})"
    trained = f"{trainable / 1e6:.{digits}f} M trainable{share}"
    return f"Parameters: {count / 1e6:.1f} M, {trained}, {', '.join(described['dtypes'])}"


def _elements(parameter: nn.Parameter, state: object | None) -> int:
    """Return the elements of the whole parameter. ZeRO-3 keeps an empty tensor; 4-bit weights share bytes."""
    return state.shape.numel() if state else getattr(parameter, "ds_numel", parameter.numel())


def _bytes_here(parameter: nn.Parameter) -> int:
    """Return the bytes of this rank's share of a parameter."""
    here = parameter.to_local() if isinstance(parameter, DTensor) else getattr(parameter, "ds_tensor", parameter)
    return here.numel() * here.element_size()
