"""What the user can mend is said in one line, without a traceback, and ends a script with exit status 2."""

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fabric_ladder.hardware import peak_memory
from fabric_ladder.watch import lost_contact, running_watch
from local_dataset_utilities import DatasetError

OUT_OF_MEMORY = (
    "DefaultCPUAllocator: can't allocate memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


class NextRung(NamedTuple):
    """What needs less memory than a rung.

    Attributes:
        name: The script; None: the same one.
        why: What it does with less.
        options: Settings that it needs.
        decides: Settings that are its own to make; those of the command line before are left out.
    """

    name: str | None
    why: str
    options: str = ""
    decides: tuple[str, ...] = ()


LOW_PRECISION = NextRung("5_low_precision", "halves weights, gradients and optimizer state", "", ("precision",))
LEAN = NextRung("6_lean_optimizer", "keeps no optimizer state", "", ("optimizer", "schedule", "learning_rate"))
NEXT_RUNG = dict.fromkeys("1234", LOW_PRECISION) | {
    **dict.fromkeys("578", LEAN),
    "9": NextRung("10_fsdp", "shards weights, gradients and optimizer state"),
    "6": NextRung("13_lora", "trains thin adapters and keeps no gradient of the model", "", ("lora", "learning_rate")),
    "10": NextRung("11_fsdp_cpu_offload", "parks weights in the host's memory", "", ("offload",)),
    "11": NextRung(None, "trains thin adapters alone", "--precision bf16-true --lora true"),
    "12": NextRung(None, "parks weights in the host's memory", "--deepspeed zero3_offload"),
    "13": NextRung("14_qlora", "keeps the model in 4 bits", "", ("quantization",)),
    "14": NextRung("11_fsdp_cpu_offload", "parks weights in the host's memory", "--lora true", ("quantization",)),
}


class UserError(Exception):
    """Something that the user can mend; the message is one line that says what is wrong and what to do."""


class Checked(SystemExit):
    """Ends a script, with exit status 0, whose settings and machine have passed all checks: `--check_only true`."""

    def __init__(self, settings):
        super().__init__(0)
        self.settings = settings
        print(f"{settings.name} can run here")


def explain(error: BaseException, settings=None) -> str | None:
    """Return the one line for an error that the user can mend, None for any other (a bug keeps its traceback)."""
    if isinstance(error, UserError | DatasetError):
        return str(error)
    if is_out_of_memory(error):
        return _out_of_memory(error, settings)
    if "No working C++ compiler found" in str(error):
        return "torch.compile needs a C++ compiler, and none was found: install g++, or run src/2_grad_accum.py"
    if "C++ compile error" in str(error):
        return (
            f"torch {torch.__version__} compiled the model to C++ that is not valid, a fault of its own: "
            "install another torch, or run src/2_grad_accum.py"
        )
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether memory ran out, of the GPU or of the host."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(text in str(error) for text in OUT_OF_MEMORY)


@contextmanager
def shape_told(inputs: dict[str, Tensor], of: str = "training") -> Iterator[None]:
    """Let an error within know the shape of the batch that it came from, for `explain`."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        error.batch = of, tuple(next(iter(inputs.values())).shape)
        raise


def _out_of_memory(error: BaseException, settings) -> str:
    text = f"out of memory ({(str(error) or type(error).__name__).splitlines()[0][:160]})"
    if settings is None:
        return f"{text}. Next to try: a smaller --micro_batch_size"
    of, shape = getattr(error, "batch", (None, ()))
    if shape:
        form = f"{shape[0]} x {shape[1]} tokens" if len(shape) == 2 else f"{shape[0]} images of {shape[-1]} pixels"
        text += f" in a batch of {form} in {of}"
    peak = peak_memory(torch.device(settings.accelerator))
    return f"{text}, at a peak of {peak / 1e9:.2f} GB. Next to try: {less_memory(settings, of, shape)}"


def less_memory(settings, of: str | None = None, shape: tuple[int, ...] = ()) -> str:
    """Return the next things to try, in order of their cost; for `of` and `shape` see `shape_told`."""
    tries, same = [], " (the same effective batch in less memory)"
    if settings.attention == "eager":
        tries.append("--attention fused, which keeps no matrix of tokens x tokens")
    name = "micro_batch_tokens" if settings.micro_batch_tokens else "micro_batch_size"
    if of == "the evaluation":
        name, same = "eval_batch_tokens", ""
    most = getattr(settings, name)
    if name == "micro_batch_size" and shape:  # a rank's share can be smaller than the setting
        most = min(most, shape[0])
    if isinstance(most, int) and most > 1 and shape[:1] != (1,):
        tries.append(_command(settings, f"--{name} {most // 2}") + same)
    if rung := NEXT_RUNG.get(settings.name.split("_")[0]):
        tries.append(f"{_command(settings, rung.options, rung.name, rung.decides)}, which {rung.why}")
    if not settings.activation_checkpointing:
        tries.append("--activation_checkpointing true, which computes activations again")
    if settings.task != "image-classification":
        tries.append(f"--max_length {max(1, settings.max_length // 2)}")
    return "; ".join(tries)


def _command(settings, options: str, rung: str | None = None, decides: tuple[str, ...] = ()) -> str:
    """Return the command line of this run with other options, or of another rung."""
    script, given = Path(sys.argv[0]), sys.argv[1:]
    if script.stem != settings.name:  # in a notebook, the kernel's
        script, given = Path("src") / f"{settings.name}.py", []
    replaced = {*decides, *(option.removeprefix("--") for option in options.split()), *(["resume"] if rung else [])}
    kept, keeps = [], True
    for word in given:
        if word.startswith("--"):
            keeps = word.removeprefix("--").split("=")[0] not in replaced
        if keeps:
            kept.append(word)
    return shlex.join(["python", str(script.with_name(f"{rung}.py") if rung else script), *kept, *options.split()])


def show_errors(settings=None) -> None:
    """From now on, print mendable errors as one line on stderr; in a script, end with exit status 2."""

    def say(error: BaseException, stream) -> bool:
        line = explain(error, settings)
        if line is not None:
            rank = os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or "0"
            start = "error:" if rank == "0" else f"error on rank {rank}:"
            stream.write(f"{start} {' '.join(line.split())}\n")  # at once: other ranks write there, too
            stream.flush()
        return line is not None

    def in_script(kind, error, trace):
        if watch := running_watch():
            if lost_contact(error):
                watch.join()  # it names the rank that is gone, and ends this process
            watch.stop()
        if say(error, sys.__stderr__):  # torch.distributed's own hook holds sys.stderr back until this one returns
            raise SystemExit(2)  # raised inside the hook, it sets the exit status
        sys.__excepthook__(kind, error, trace)

    def in_notebook(shell, kind, error, trace, tb_offset=None):
        if not say(error, sys.stderr):
            shell.showtraceback((kind, error, trace), tb_offset)

    if shell := notebook_shell():
        shell.set_custom_exc((Exception,), in_notebook)
    else:
        sys.excepthook = in_script


def notebook_shell():
    """Return IPython's shell when this process is a notebook kernel, else None."""
    if "ipykernel" not in sys.modules:
        return None
    from IPython import get_ipython

    return get_ipython()
