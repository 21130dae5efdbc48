"""DeepSpeed's ZeRO as a Fabric strategy that the one train loop can drive like any other."""

import copy
import ctypes
import importlib.util
import io
import mmap
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from pickle import UnpicklingError

import torch
from lightning.fabric.strategies import DeepSpeedStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from torch import nn
from torch.optim import Optimizer

from fabric_ladder.distributed.deepspeed_config import offloads, parameter_sizes, read_deepspeed_config
from fabric_ladder.errors import UserError, first_line
from fabric_ladder.settings import Settings

DEEPSPEED = "deepspeed==0.19.8"
FORCE_WEIGHTS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
STATE_BYTES = 16  # of a parameter, in 32 bits: master weight, gradient, and Adam's two moments
BUFFER_BYTES = 16  # of the largest parameter, for a disk: 4 in 32 bits


class _Boundary(_BackwardSyncControl):
    """Tells DeepSpeed's engine which micro-batch is the last of an effective batch; it sums up those before."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager:
        """Set the boundary; stages 2 and 3, which keep a share only, reduce after every micro-batch all the same."""
        module.set_gradient_accumulation_boundary(not enabled)
        return nullcontext()


class LadderDeepSpeedStrategy(DeepSpeedStrategy):
    """Fabric's DeepSpeed strategy for a loop that accumulates and clips by itself, and for models beyond one GPU.

    Args:
        config: From `read_deepspeed_config`.
        notices: What the user should read.
        cpu_adam: Step what is offloaded by DeepSpeed's Adam for the CPU instead of PyTorch's.
    """

    def __init__(self, config: dict, notices: list[str], cpu_adam: bool = False):
        super().__init__(config=config)
        self.notices, self.cpu_adam = notices, cpu_adam
        self._backward_sync_control = _Boundary()
        # DeepSpeed 0.19 calls what torch 2.13 has renamed
        warnings.filterwarnings("ignore", ".*`torch.distributed.* is deprecated", FutureWarning)

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler=None
    ) -> tuple[nn.Module, list, object]:
        """Wrap the model into DeepSpeed's engine; stage 3 shards it before, parameter by parameter."""
        if self.zero_stage_3:
            self._shard(module)
        if self.cpu_adam:
            optimizers = [_on_cpu(optimizer) for optimizer in optimizers]
        with redirect_stdout(io.StringIO()):  # stage 1 in bfloat16 prints what memory it takes, whatever is asked
            return super().setup_module_and_optimizers(module, optimizers, scheduler)

    def module_to_device(self, module: nn.Module) -> None:
        """Leave the model where it is: DeepSpeed moves it once it is in 16 bits, or sharded."""

    def clip_gradients_norm(self, *args, **kwargs) -> None:
        """Do nothing: the engine clips when it steps, to the `gradient_clipping` of its configuration."""

    def _shard(self, module: nn.Module) -> None:
        """Share the weights out to the GPUs one by one; the engine would first put all of them on each."""
        import deepspeed

        dtype = torch.float32
        for name, half in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
            if self.config[name]["enabled"]:
                dtype = half
        for parameter in module.parameters():
            parameter.data = parameter.data.to(dtype)
        for buffer in module.buffers():
            buffer.data = buffer.data.to(self.root_device)
        deepspeed.zero.Init(module=module, config_dict_or_path=self.config)


def check_deepspeed(settings: Settings) -> None:
    """Refuse, before processes are started, what DeepSpeed cannot do here.

    Raises:
        UserError: No CUDA GPU, no DeepSpeed, a configuration that does not fit, or an offload that cannot work here.
    """
    if settings.accelerator != "cuda":
        raise UserError(f"{settings.name} needs a CUDA GPU; src/10_fsdp.py shards a model on CPUs too")
    if importlib.util.find_spec("deepspeed") is None:
        raise UserError(f'{settings.name} needs DeepSpeed: pip install "{DEEPSPEED}"')
    config, _ = read_deepspeed_config(settings)
    _check_values(settings.deepspeed, config)
    offloaded = offloads(config)
    if any(section["device"] == "nvme" for section in offloaded.values()):
        _check_nvme(settings, offloaded)


def deepspeed_strategy(settings: Settings) -> LadderDeepSpeedStrategy:
    """Return the strategy for the DeepSpeed configuration that the settings name.

    DeepSpeed has one mixed precision, not Fabric's: forward and backward pass run on 16-bit weights throughout, and
    32-bit copies of them, which start from the rounded ones, are stepped (DeepSpeed, `bf16` and `fp16`). Gradients of
    micro-batches are summed in 16 bits unless the configuration's `data_types.grad_accum_dtype` is "fp32". A step whose
    gradient is not finite is left out.

    Args:
        settings: Checked, see `check_deepspeed`.
    """
    config, notices = read_deepspeed_config(settings)
    cpu_adam = "optimizer" in offloads(config) and settings.optimizer in ("adam", "adamw")
    if cpu_adam:
        from deepspeed.ops.op_builder import CPUAdamBuilder

        if problem := _compile(CPUAdamBuilder()):
            cpu_adam = False
            notices.append(f"PyTorch's Adam steps on the CPU: DeepSpeed cannot compile its faster one: {problem}")
    return LadderDeepSpeedStrategy(config, notices, cpu_adam)


def load_engine(option: str, folder: Path, engine: nn.Module, trained_only: bool) -> None:
    """Load the checkpoint that `engine.save_checkpoint` has written. All ranks must call it.

    Raises:
        UserError: It is of another model, or was made on another number of ranks; the message begins with `option`.
    """
    states, ranks = f"{(folder / 'latest').read_text().strip()}/*optim_states.pt", torch.distributed.get_world_size()
    if (made_on := len(list(folder.glob(states)))) != ranks:
        raise UserError(
            f"{option}: DeepSpeed's checkpoint of {made_on} GPUs cannot go on with {ranks}: use {made_on}, or "
            f"start from its weights: python scripts/export_model.py {folder}, then --model"
        )
    try:
        with only_values(), redirect_stdout(io.StringIO()):  # stage 1 in bfloat16 prints a name of its source
            engine.load_checkpoint(str(folder), load_module_strict=not trained_only, load_lr_scheduler_states=False)
    except (RuntimeError, ValueError, KeyError, AssertionError, AttributeError, UnpicklingError) as error:
        raise UserError(f"{option}: made with another model, optimizer or stage ({first_line(error)})") from error


@contextmanager
def only_values() -> Iterator[None]:
    """Have DeepSpeed read its files without running what they say: it asks `torch.load` to unpickle them freely.

    Of its own classes they hold those that are named here, which keep values and do nothing when they are made.
    """
    from deepspeed.runtime.fp16 import loss_scaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    classes = [ZeroStageEnum, fragment_address, loss_scaler.LossScaler, loss_scaler.DynamicLossScaler]
    before = os.environ.get(FORCE_WEIGHTS_ONLY)
    os.environ[FORCE_WEIGHTS_ONLY] = "1"
    try:
        with torch.serialization.safe_globals(classes):
            yield
    finally:
        os.environ.pop(FORCE_WEIGHTS_ONLY)
        if before is not None:
            os.environ[FORCE_WEIGHTS_ONLY] = before


def whole_in_32_bit(tensor: torch.Tensor) -> torch.Tensor:
    """Gather a parameter from all ranks, from its 32-bit copy where DeepSpeed keeps one. All ranks must call it."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    if getattr(tensor, "requires_grad", False) and (whole := safe_get_full_fp32_param(tensor)) is not None:
        return whole.detach()
    if hasattr(tensor, "ds_id"):
        with deepspeed.zero.GatheredParameters([tensor]):
            return tensor.detach().clone()
    return tensor.detach()


def _check_values(name: str, config: dict) -> None:
    """Have DeepSpeed itself read the configuration, before processes are started."""
    from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
    from pydantic import ValidationError

    try:
        DeepSpeedConfig(copy.deepcopy(config))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise UserError(f"--deepspeed {name}: DeepSpeed refuses {key} {first['input']}: {first['msg']}") from error
    except (DeepSpeedConfigError, AssertionError, ValueError, TypeError) as error:
        raise UserError(f"--deepspeed {name}: DeepSpeed refuses it: {error}") from error


def _check_nvme(settings: Settings, offloaded: dict[str, dict]) -> None:
    """Refuse what would fail, or fill a disk, in the middle of a run.

    Bytes on the disk of each machine for P parameters: 16 P / machines (Rajbhandari et al., ZeRO-Infinity, 2021,
    section 3).
    """
    from deepspeed.ops.op_builder import AsyncIOBuilder

    start = f"--deepspeed {settings.deepspeed}"
    if "param" in offloaded and offloaded["param"]["device"] == "nvme":  # fetched for a backward pass that never comes
        raise UserError(
            f"{start}: zero_optimization.offload_param.device nvme: weights from a disk take all of DeepSpeed's "
            "buffers in the evaluation, and the run dies: say cpu in a copy of the file, and give --deepspeed COPY.json"
        )
    _check_not_resumed(start, settings)
    fix = "in a copy of the file, name a folder on a local NVMe disk, and give --deepspeed COPY.json"
    instead = "--deepspeed zero3_offload parks in the host's memory instead"
    sizes, folder = parameter_sizes(settings), Path(offloaded["optimizer"].get("nvme_path") or "")
    try:
        with tempfile.TemporaryFile(dir=folder):
            free = shutil.disk_usage(folder).free
    except OSError as error:
        key = f"zero_optimization.offload_optimizer.nvme_path {folder}"
        raise UserError(f"{start}: {key}: cannot write there ({error.strerror}): {fix}") from error
    if free < (size := STATE_BYTES * sum(sizes) / settings.num_nodes):
        raise UserError(f"{start}: {folder} needs {size / 1e9:.2f} GB and has {free / 1e9:.2f} GB free: {fix}")
    if not AsyncIOBuilder().is_compatible():
        raise UserError(f"{start} needs libaio: apt install libaio-dev, or dnf install libaio-devel; {instead}")
    from torch.utils import cpp_extension  # with setuptools

    if torch.cuda.is_available() and cpp_extension.CUDA_HOME is None:  # DeepSpeed would take it for a path
        raise UserError(
            f"{start} needs the toolkit of CUDA {torch.version.cuda}, with nvcc, to compile with; {instead}"
        )
    check_locking(start, BUFFER_BYTES * max(sizes) // settings.ranks, instead)
    if problem := _compile(AsyncIOBuilder()):
        raise UserError(f"{start}: DeepSpeed cannot compile its access to NVMe disks: {problem}")


def check_locking(start: str, size: int, instead: str) -> None:
    """Refuse where this process may not lock `size` bytes of memory.

    DeepSpeed locks its buffers for NVMe disks, four that each hold the largest parameter at least, and aborts the
    process where it cannot (csrc/pin_memory).

    Raises:
        UserError: From `start` to `instead`, which says what to do otherwise.
    """
    import resource  # not on Windows, and neither is libaio

    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY or size <= limit:
        return
    with mmap.mmap(-1, limit + mmap.PAGESIZE) as memory:  # more than the limit: only the privileged may
        first = ctypes.c_char.from_buffer(memory)
        refused = ctypes.CDLL(None).mlock(ctypes.byref(first), ctypes.c_size_t(len(memory)))
        del first  # or the memory could not be given back
    if refused:
        raise UserError(
            f"{start} locks {size / 1e9:.2f} GB of the host's memory or more, `ulimit -l` allows {limit / 1e9:.2g}: "
            f"raise it (docker run --ulimit memlock=-1; /etc/security/limits.conf); {instead}"
        )


def _check_not_resumed(start: str, settings: Settings) -> None:
    """Refuse to go on later: DeepSpeed 0.19 reads no optimizer state back that was on a disk, and says nothing.

    `DeepSpeedEngine.load_checkpoint` skips it, so that Adam would start anew; nor are the 32-bit weights in the file.
    """
    wanted = {"save_every": settings.save_every, "save": settings.save == "sharded", "load": settings.load}
    for name in [name for name, value in wanted.items() if value] + ["resume"] * (settings.resume != "no"):
        raise UserError(
            f"--{name} {getattr(settings, name)}: {start} cannot be continued, since DeepSpeed reads no optimizer "
            "state back that was on a disk; --save consolidated keeps the weights, --deepspeed zero3_offload can go on"
        )


def _compile(builder) -> str | None:
    """Load one of DeepSpeed's extensions, compiled at its first use, or return in one line why it cannot be had."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        folder = os.environ.get("TORCH_EXTENSIONS_DIR", "~/.cache/torch_extensions")
        # an interrupted compilation leaves a lock behind, and PyTorch waits for its release without a word
        print(f"Loading DeepSpeed's {builder.name}: its first use compiles it for minutes (stuck? Delete {folder})",
              file=sys.stderr, flush=True)  # fmt: skip
    try:
        builder.load(verbose=False)
    except Exception as error:  # compilers, and what is missing for them, have errors of every class
        return f"{type(error).__name__}: {first_line(error, 160)}"
    return None


def _on_cpu(optimizer: Optimizer) -> Optimizer:
    """Return DeepSpeed's Adam for the CPU, with the parameters and values of PyTorch's."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    values = {key: optimizer.defaults[key] for key in ("lr", "betas", "eps", "weight_decay")}
    return DeepSpeedCPUAdam(optimizer.param_groups, adamw_mode=isinstance(optimizer, torch.optim.AdamW), **values)
