"""What the user can mend is said in one line, without a traceback, and ends a script with exit status 2."""

import os
import sys

import torch

from fabric_ladder.watch import lost_contact, running_watch
from local_dataset_utilities import DatasetError

NEXT_RUNG = dict.fromkeys("1234", "src/5_low_precision.py, which halves weights, gradients and optimizer state") | {
    **dict.fromkeys("578", "src/6_lean_optimizer.py, which keeps no optimizer state"),
    "9": "src/10_fsdp.py, which shards weights, gradients and optimizer state",
    "6": "src/13_lora.py, which trains thin adapters and keeps no gradient of the model",
    "10": "src/11_fsdp_cpu_offload.py, which parks weights in the host's memory",
    "11": "--precision bf16-true --lora true, which trains thin adapters alone",
    "12": "--deepspeed zero3_offload, which parks weights in the host's memory",
    "13": "src/14_qlora.py, which keeps the model in 4 bits",
    "14": "src/11_fsdp_cpu_offload.py with --lora true, which parks weights in the host's memory",
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
    if isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator: can't allocate memory" in str(error):
        return f"out of memory ({str(error).splitlines()[0][:160]}). Next to try: {_less_memory(settings)}"
    if "No working C++ compiler found" in str(error):
        return "torch.compile needs a C++ compiler, and none was found: install g++, or run src/2_grad_accum.py"
    if "C++ compile error" in str(error):
        return (
            f"torch {torch.__version__} compiled the model to C++ that is not valid, a fault of its own: "
            "install another torch, or run src/2_grad_accum.py"
        )
    return None


def _less_memory(settings) -> str:
    """The next things to try, in order of their cost."""
    if settings is None:
        return "a smaller --micro_batch_size"
    tries = []
    if settings.micro_batch_tokens:
        tries.append(f"--micro_batch_tokens {settings.micro_batch_tokens // 2}")
    elif settings.micro_batch_size > 1:
        tries.append(f"--micro_batch_size {settings.micro_batch_size // 2} (the same effective batch in less memory)")
    if rung := NEXT_RUNG.get(settings.name.split("_")[0]):
        tries.append(rung)
    if not settings.activation_checkpointing:
        tries.append("--activation_checkpointing true, which computes activations again")
    if settings.task != "image-classification":
        tries.append(f"--max_length {max(1, settings.max_length // 2)}")
    return "; ".join(tries)


def show_errors(settings=None) -> None:
    """From now on, print mendable errors as one line on stderr; in a script, end with exit status 2."""

    def say(error: BaseException, stream) -> bool:
        line = explain(error, settings)
        if line is not None:
            rank = os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or "0"
            start = "error:" if rank == "0" else f"error on rank {rank}:"
            print(start, " ".join(line.split()), file=stream, flush=True)
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
