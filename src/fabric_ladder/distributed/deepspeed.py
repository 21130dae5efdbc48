"""A Fabric strategy for DeepSpeed's ZeRO that works with the train loop of all rungs."""

import atexit
import copy
import difflib
import importlib.util
import io
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path

import torch
from lightning.fabric.strategies import DeepSpeedStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from torch import nn
from torch.optim import Optimizer

from fabric_ladder.distributed.deepspeed_config import offloads, read_deepspeed_config
from fabric_ladder.errors import UserError, first_line, refused
from fabric_ladder.settings import Settings

DEEPSPEED = "deepspeed==0.19.8"
FORCE_WEIGHTS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"  # environment variable that `torch.load` reads


class _Boundary(_BackwardSyncControl):
    """Marks the last micro-batch of an effective batch for DeepSpeed's engine, which adds up the gradients."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager:
        """Set the boundary. Stages 2 and 3 keep only a share of the gradients and reduce them in every micro-batch."""
        module.set_gradient_accumulation_boundary(not enabled)
        return nullcontext()


class LadderDeepSpeedStrategy(DeepSpeedStrategy):
    """Fabric's DeepSpeed strategy for a loop with its own accumulation, and for models larger than one GPU.

    Args:
        config: The result of `read_deepspeed_config`.
        notices: Lines for the user.
        cpu_adam: Whether DeepSpeed's Adam for the CPU replaces PyTorch's.
    """

    def __init__(self, config: dict, notices: list[str], cpu_adam: bool = False):
        super().__init__(config=config)
        self.notices = notices
        self.cpu_adam = cpu_adam
        self._backward_sync_control = _Boundary()
        # DeepSpeed 0.19 calls functions by names that torch 2.13 has deprecated
        warnings.filterwarnings("ignore", ".*`torch.distributed.* is deprecated", FutureWarning)

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler=None
    ) -> tuple[nn.Module, list, object]:
        """Wrap the model into DeepSpeed's engine. In stage 3, first shard it parameter by parameter."""
        if self.zero_stage_3:
            self._shard(module)
        if self.cpu_adam:
            optimizers = [_on_cpu(optimizer) for optimizer in optimizers]
        with redirect_stdout(io.StringIO()):  # stage 1 in bfloat16 always prints its memory
            return super().setup_module_and_optimizers(module, optimizers, scheduler)

    def module_to_device(self, module: nn.Module) -> None:
        """Do nothing: DeepSpeed moves the model after it has converted it to 16 bits, or sharded it."""

    def clip_gradients_norm(self, *args, **kwargs) -> None:
        """Do nothing: the engine clips in its step, to the `gradient_clipping` of its configuration."""

    def _shard(self, module: nn.Module) -> None:
        """Shard the weights one by one; the engine would first copy all of them to each GPU."""
        import deepspeed

        halves = {"bf16": torch.bfloat16, "fp16": torch.float16}
        dtype = next((half for name, half in halves.items() if self.config[name]["enabled"]), torch.float32)
        for parameter in module.parameters():
            parameter.data = parameter.data.to(dtype)
        for buffer in module.buffers():
            buffer.data = buffer.data.to(self.root_device)
        deepspeed.zero.Init(module=module, config_dict_or_path=self.config)


class _Asked(dict):
    """A configuration that records which keys DeepSpeed asks for, since it silently ignores all others."""

    names: set[str]

    def __init__(self, config: dict):
        super().__init__(config)
        self.names = set()

    def get(self, key: str, default: object = None) -> object:
        self.names.add(key)
        return super().get(key, default)

    def __contains__(self, key: str) -> bool:
        self.names.add(key)
        return super().__contains__(key)

    def keys(self) -> "_Asked":
        return self

    def __copy__(self) -> "_Asked":
        return self


def check_deepspeed(settings: Settings) -> None:
    """Refuse settings that DeepSpeed cannot run with on this machine, before processes start.

    Raises:
        UserError: CUDA or DeepSpeed is missing, the configuration does not fit, or an offload cannot work here.
    """
    if settings.accelerator != "cuda":
        raise UserError(f"{settings.name} needs a CUDA GPU; src/10_fsdp.py shards a model on CPUs too")
    if importlib.util.find_spec("deepspeed") is None:
        raise UserError(f'{settings.name} needs DeepSpeed: pip install "{DEEPSPEED}"')
    from deepspeed.runtime.config import DeepSpeedConfig

    config, _ = read_deepspeed_config(settings)
    with refused(f"--deepspeed {settings.deepspeed}: DeepSpeed refuses it"):
        DeepSpeedConfig(asked := _Asked(copy.deepcopy(config)))
    if unread := config.keys() - asked.names:
        near = difflib.get_close_matches(min(unread), asked.names, n=1)
        remedy = f"did you mean {near[0]}? Else leave it out" if near else "leave it out"
        raise UserError(f"--deepspeed {settings.deepspeed}: DeepSpeed does not read the key {min(unread)}; {remedy}")
    if any(section["device"] == "nvme" for section in offloads(config).values()):
        _check_nvme(settings, offloads(config))


def deepspeed_strategy(settings: Settings) -> LadderDeepSpeedStrategy:
    """Return the strategy for the DeepSpeed configuration that the settings name.

    DeepSpeed's mixed precision differs from Fabric's. The forward and backward passes run on 16-bit weights throughout.
    The optimizer steps on 32-bit copies, which start from the rounded weights (DeepSpeed, `bf16` and `fp16`). Gradients
    of micro-batches are added in 16 bits unless `data_types.grad_accum_dtype` is "fp32" in the configuration. DeepSpeed
    skips a step if its gradient is not finite.

    Args:
        settings: Checked, see `check_deepspeed`.
    """
    config, notices = read_deepspeed_config(settings)
    for section in offloads(config).values():
        if section["device"] == "nvme":
            # DeepSpeed names its files by ranks and weights alone: two runs in a folder would overwrite each other's
            parent = Path(section.get("nvme_path") or ".").absolute()
            section["nvme_path"] = tempfile.mkdtemp(prefix="fabric_ladder-", dir=parent)
            atexit.register(shutil.rmtree, section["nvme_path"], ignore_errors=True)
    cpu_adam = "optimizer" in offloads(config) and settings.optimizer in ("adam", "adamw")
    if cpu_adam:
        from deepspeed.ops.op_builder import CPUAdamBuilder

        if problem := _compile(CPUAdamBuilder()):
            cpu_adam = False
            notices.append(f"PyTorch's Adam steps on the CPU: DeepSpeed cannot compile its faster one: {problem}")
    return LadderDeepSpeedStrategy(config, notices, cpu_adam)


class EngineState:
    """Saves and loads the state of a model and its optimizer through DeepSpeed's engine.

    Args:
        engine: DeepSpeed's engine around the model.

    Attributes:
        file: The file that every checkpoint of the engine has.
    """

    file = "latest"

    def __init__(self, engine: nn.Module):
        self.engine = engine

    def prepare_gathering(self) -> None:
        """Release the weights that ZeRO-3 has prefetched: they could not be gathered."""
        self.engine.empty_partition_cache()

    def write(self, folder: Path, trained_only: bool) -> None:
        """Write a checkpoint. All ranks must call it.

        Raises:
            OSError, RuntimeError: This rank could not write. It has taken part in all collectives, so no rank waits.
        """
        engine, tag = self.engine, f"global_step{self.engine.global_steps}"
        writer = engine.checkpoint_engine
        with errors_last((writer, "makedirs"), (writer, "save"), (engine, "_copy_recovery_script")):
            engine.save_checkpoint(str(folder), tag, save_latest=False, exclude_frozen_parameters=trained_only)
        if engine.global_rank == 0:
            (folder / self.file).write_text(tag)

    def read(self, option: str, folder: Path, trained_only: bool) -> None:
        """Load a checkpoint that `write` has written. All ranks must call it.

        Raises:
            UserError: It is from another model or another number of ranks; the message begins with `option`.
        """
        ranks = torch.distributed.get_world_size()
        saved_ranks = len(list(folder.glob("*/*optim_states.pt")))
        if saved_ranks != ranks:
            raise UserError(
                f"{option}: DeepSpeed cannot load a checkpoint of {saved_ranks} GPUs on {ranks}: use {saved_ranks}, or "
                f"start from its weights: python scripts/export_model.py {folder}, then --model"
            )
        # stage 1 in bfloat16 prints a name of its source
        made_otherwise = refused(f"{option}: made with another model, optimizer or stage")
        with made_otherwise, _only_values(), redirect_stdout(io.StringIO()):
            self.engine.load_checkpoint(
                str(folder), load_module_strict=not trained_only, load_lr_scheduler_states=False
            )

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Gather a parameter from all ranks, in 32 bits if DeepSpeed keeps such a copy. All ranks must call it."""
        import deepspeed
        from deepspeed.utils import safe_get_full_fp32_param

        if getattr(tensor, "requires_grad", False) and (whole := safe_get_full_fp32_param(tensor)) is not None:
            return whole.detach()
        if hasattr(tensor, "ds_id"):
            with deepspeed.zero.GatheredParameters([tensor]):
                return tensor.detach().clone()
        return tensor.detach()

    @staticmethod
    def read_weights(folder: Path) -> dict[str, torch.Tensor]:
        """Read the weights of a checkpoint in 32 bits, in one process.

        Raises:
            UserError: DeepSpeed is not installed.
        """
        try:
            from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
        except ImportError as error:
            raise UserError(f'{folder} is a DeepSpeed checkpoint: pip install "{DEEPSPEED}" to read it') from error
        with _only_values(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            return get_fp32_state_dict_from_zero_checkpoint(str(folder))


def engine_state(model: nn.Module) -> EngineState | None:
    """Return the engine that saves and loads a model set up by Fabric, or None if its strategy has no engine."""
    engine = model._forward_module
    return EngineState(engine) if hasattr(engine, "save_checkpoint") else None


@contextmanager
def errors_last(*methods: tuple[object, str]) -> Iterator[None]:
    """Raise the first error of these methods of objects at the end of this block, and skip their calls after it."""
    errors = []

    def deferred(call: Callable) -> Callable:
        def method(*args, **kwargs) -> None:
            if not errors:
                try:
                    call(*args, **kwargs)
                except Exception as error:  # of the disk, of torch.save, or of a writer in the configuration
                    errors.append(error)

        return method

    for owner, name in methods:
        setattr(owner, name, deferred(getattr(owner, name)))
    try:
        yield
    finally:
        for owner, name in methods:
            delattr(owner, name)
    if errors:
        raise errors[0]


@contextmanager
def _only_values() -> Iterator[None]:
    """Make `torch.load` refuse code inside this block. DeepSpeed's own calls allow any pickle.

    DeepSpeed's files hold instances of a few of its own classes, which only keep values.
    """
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    before = os.environ.get(FORCE_WEIGHTS_ONLY)
    os.environ[FORCE_WEIGHTS_ONLY] = "1"
    try:
        with torch.serialization.safe_globals([ZeroStageEnum, fragment_address, LossScaler, DynamicLossScaler]):
            yield
    finally:
        os.environ.pop(FORCE_WEIGHTS_ONLY)
        if before is not None:
            os.environ[FORCE_WEIGHTS_ONLY] = before


def _check_nvme(settings: Settings, offloaded: dict[str, dict]) -> None:
    """Refuse an offload to NVMe disks that would fail in the middle of a run."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    start = f"--deepspeed {settings.deepspeed}"
    reads = settings.save_every or settings.save == "sharded" or settings.load or settings.resume != "no"
    if reads or settings.best_weights:
        # `DeepSpeedEngine.load_checkpoint` would start Adam again from zero, and the file lacks the 32-bit weights
        raise UserError(
            f"{start} cannot be continued, since DeepSpeed does not load optimizer state from a disk: leave out "
            "--save_every, --save sharded, --load, --resume and --best_weights (--save consolidated keeps the last "
            "weights), or use --deepspeed zero3_offload"
        )
    for name, section in offloaded.items():
        folder = section.get("nvme_path") or "."
        with refused(
            f"{start}: cannot write into zero_optimization.offload_{name}.nvme_path {folder}: in a copy of the file, "
            "name a folder on a local NVMe disk, and give --deepspeed COPY.json"
        ):
            if section["device"] == "nvme":
                tempfile.TemporaryFile(dir=folder).close()
    if problem := _compile(AsyncIOBuilder()):
        raise UserError(
            f"{start}: DeepSpeed cannot compile its access to NVMe disks, which needs libaio-dev (apt) or libaio-devel "
            f"(dnf), or use --deepspeed zero3_offload ({problem})"
        )


def _compile(builder) -> str | None:
    """Load one of DeepSpeed's extensions, compiled at its first use; return the problem in one line, or None."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        folder = os.environ.get("TORCH_EXTENSIONS_DIR", "~/.cache/torch_extensions")
        # an interrupted compilation leaves a lock behind, and PyTorch waits silently for its release
        hint = f"its first use compiles it for minutes (stuck? Delete {folder})"
        print(f"Loading DeepSpeed's {builder.name}: {hint}", file=sys.stderr, flush=True)
    try:
        builder.load(verbose=False)
    except Exception as error:  # compilers and missing headers raise errors of every class
        return f"{type(error).__name__}: {first_line(error, 160)}"
    return None


def _on_cpu(optimizer: Optimizer) -> Optimizer:
    """Return DeepSpeed's Adam for the CPU, with the parameters and values of PyTorch's."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    values = {key: optimizer.defaults[key] for key in ("lr", "betas", "eps", "weight_decay")}
    return DeepSpeedCPUAdam(optimizer.param_groups, adamw_mode=isinstance(optimizer, torch.optim.AdamW), **values)
