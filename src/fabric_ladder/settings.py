"""The settings of a run: defaults in code, then the script's own, then a YAML file, then the command line."""

import argparse
import dataclasses
import difflib
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import jsonargparse
import torch
import yaml

from fabric_ladder.checks import check
from fabric_ladder.errors import UserError, notebook_shell, show_errors
from fabric_ladder.launch import options_of_fabric_run
from local_dataset_utilities import DataSettings

REPOSITORY_CONFIGS = Path(__file__).parents[2] / "configs"
CONFIGS = REPOSITORY_CONFIGS if REPOSITORY_CONFIGS.is_dir() else Path(__file__).parent / "configs"
PATHS = ("dataset", "validation_file", "test_file", "model", "tokenizer")
SCRIPT_NAME = re.compile(r'^"""(\w+) ·', re.MULTILINE)  # at the start of each rung's docstring
BUCKET = 16  # tokens; kernels for lengths that may be no multiple of this are slower, and a step of 64 mostly padding
INTERNAL = ("name", "config", "notices")
PRECISIONS = Literal["32-true", "mixed", "16-mixed", "bf16-mixed", "16-true", "bf16-true", "64-true"]


@dataclass
class Settings(DataSettings):
    """Everything that is set for a run.

    Args:
        from_scratch: Start from random weights of the model's config instead of pretrained ones.
        seed: Seed of weights, dropout and sample order.
        epochs: Passes over the training texts.
        optimizer: `adam-8bit` (bitsandbytes) needs a CUDA GPU; `sgd` keeps no state, `adafactor` hardly any.
        learning_rate: Learning rate of the optimizer; `sgd` takes it from the command line only.
        sgd_learning_rate: Learning rate of `sgd`, whose steps are not scaled to the size of the gradient.
        schedule: Course of the learning rate over the optimizer steps: `cosine` and `linear` end at 0.
        warmup_steps: Optimizer steps in which the learning rate rises to its full value.
        batch_size: Effective batch size: samples per optimizer step, over all devices.
        micro_batch_size: Samples of it in a device's memory at once. Default: all.
        micro_batch_tokens: Padded tokens in a device's memory at once; takes the place of `micro_batch_size`. `auto`
            tries the longest effective batch and halves the number until it fits.
        eval_batch_tokens: Padded tokens of an evaluation's batch on each device. Default: 4096 on a GPU; 1024 on a CPU,
            where more is slower.
        pad_to_multiple_of: Round the length of every micro-batch up to a multiple of so many tokens. Default: 16 with
            `compile`, where `max_length` is such a multiple; else 1.
        max_grad_norm: Clip the gradient to this 2-norm.
        on_nan: `stop` ends the run at the next printed line after a loss or gradient that is not finite; `skip` leaves
            such an effective batch out, for which it waits for the device in each step.
        nan_limit: Effective batches that `skip` may leave out before it stops the run.
        attention: `fused` computes attention by a kernel that keeps no matrix of tokens x tokens, for BLOOM and where
            transformers has it (as `sdpa`); `eager` makes this matrix for every model. They differ in rounding alone.
        activation_checkpointing: Keep only the inputs of the transformer blocks and compute the rest again (not
            reentrant), for the backward pass.
        packing: Let short samples share a row of up to `max_length` tokens, in which they do not see each other; then
            `micro_batch_size` counts rows.
        loss_chunk: Tokens whose logits over the vocabulary exist at once, for the loss of a language model.
        lora: Train low-rank adapters (PEFT) and, for classification, the head; all other weights stay as they are.
        lora_rank: Rank of the adapters.
        lora_alpha: Adapters are scaled by `lora_alpha` / `lora_rank`.
        lora_dropout: Dropout of what enters the adapters.
        lora_targets: Linear layers that get adapters: their names, separated by commas, or `all-linear`. Default: the
            attention projections that PEFT takes for the architecture.
        lora_learning_rate: Learning rate with `lora`, in place of `learning_rate`, which only the command line sets.
        dora: Weight-decomposed adapters: a trained length for each of the weight's directions.
        rslora: Scale adapters by `lora_alpha` / the square root of `lora_rank`.
        quantization: `nf4` keeps the weights that `lora` does not train in 4 bits (bitsandbytes, double quantisation).
        compile: `torch.compile` the layers of the model, one graph for all of them and for all lengths, before the
            first step; what it makes is kept in `cache_dir`.
        offload: Park what FSDP shards in the host's memory, and let the optimizer step there.
        deepspeed: DeepSpeed configuration: a JSON file, or the name of one in `configs/deepspeed/`.
        devices: Devices of a machine: a number, or `auto` for all GPUs, or what the launcher says.
        num_nodes: Machines on which the script is started.
        accelerator: `auto` takes the CUDA GPU when there is one.
        threads: PyTorch's threads on the CPU. Default: as many as it finds cores.
        precision: Fabric's name of the precision; `mixed` is `bf16-mixed`, or `16-mixed` on GPUs below compute
            capability 8.0, which only emulate bfloat16.
        matmul_precision: Precision within products of 32-bit matrices: `high` (on a GPU TF32, 10 bits of mantissa) and
            `medium` (bfloat16) are faster. Default: `high` on a GPU, `highest` (all 23 bits) on a CPU.
        num_workers: Processes that make batches; 0 makes them in the training process, while the device computes what
            it was given before, and is enough for texts. Images that must be enlarged or cut out may want 2 or more.
        log_every: Samples between two printed losses.
        logger: Where the figures go while the run goes on: `csv` is metrics.csv in the run's folder; `tensorboard` and
            `wandb` (Weights & Biases) draw curves live, too.
        save: Save what was trained into the run's folder: `sharded` for `load` (model and optimizer), `consolidated`
            for `model`, here or in transformers.
        load: Sharded checkpoint to start from.
        save_every: Optimizer steps between two checkpoints to go on from, which are also written after each epoch; 0:
            only when the run is stopped by Ctrl-C, SIGTERM or `max_time`.
        keep: How many of the newest checkpoints stay, besides the one with the lowest validation loss.
        resume: Go on with the newest run of the same settings (`auto`), or from the folder of a run or a checkpoint.
        max_time: Minutes after which the run stops as by SIGTERM, and can go on by `resume`.
        runs_dir: Folder that gets a folder for every run.
        check_only: Say whether the run could start here, and do nothing else.
    """

    from_scratch: bool = False
    seed: int = 123
    epochs: int = 1
    optimizer: Literal["adam", "adamw", "sgd", "adafactor", "adam-8bit"] = "adam"
    learning_rate: float = 5e-5
    sgd_learning_rate: float = 1e-2
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    batch_size: int = 1
    micro_batch_size: int | None = None
    micro_batch_tokens: int | Literal["auto"] | None = None
    eval_batch_tokens: int | None = None
    pad_to_multiple_of: int | None = None
    max_grad_norm: float | None = None
    on_nan: Literal["stop", "skip"] = "stop"
    nan_limit: int = 10
    attention: Literal["fused", "eager"] = "fused"
    activation_checkpointing: bool = False
    packing: bool = False
    loss_chunk: int = 256
    lora: bool = False
    lora_rank: int = 8
    lora_alpha: int = 32
    lora_dropout: float = 0.1
    lora_targets: str | None = None
    lora_learning_rate: float = 2e-4
    dora: bool = False
    rslora: bool = False
    quantization: Literal["no", "nf4"] = "no"
    compile: bool = False
    offload: bool = False
    deepspeed: str | None = None
    devices: int | Literal["auto"] = 1
    num_nodes: int = 1
    accelerator: Literal["auto", "cuda", "cpu"] = "auto"
    threads: int | None = None
    precision: PRECISIONS = "32-true"
    matmul_precision: Literal["highest", "high", "medium"] | None = None
    num_workers: int = 0
    log_every: int = 4800
    logger: Literal["csv", "tensorboard", "wandb"] = "csv"
    save: Literal["no", "sharded", "consolidated"] = "no"
    load: str | None = None
    save_every: int = 0
    keep: int = 1
    resume: str = "no"
    max_time: float | None = None
    runs_dir: str = "runs"
    check_only: bool = False
    # not the user's to set: the script's name, the YAML file that was read, and what to print first
    name: str = ""
    config: str | None = None
    notices: list[str] = field(default_factory=list)

    def __post_init__(self):
        if self.pad_to_multiple_of is None:
            self.pad_to_multiple_of = BUCKET if self.compile and self.max_length % BUCKET == 0 else 1

    @property
    def ranks(self) -> int:
        """Processes of the run, one for each device; known once the settings are parsed."""
        return self.devices * self.num_nodes


def parse_settings(args: list[str] | None = None, config: str | None = None, **defaults) -> Settings:
    """Read the settings of the running script.

    Args:
        args: What to read instead of the command line; a notebook's own arguments are never read.
        config: YAML file to read when the command line names none.
        **defaults: The script's own defaults, which a YAML file or the command line may override.

    Returns:
        Checked settings, with `accelerator` resolved to `cuda` or `cpu`.

    Raises:
        UserError: An unknown setting, a wrong type, or values that do not go together or ask for what is not there.
    """
    show_errors()
    if args is None:
        args = [] if notebook_shell() else [*sys.argv[1:], *options_of_fabric_run()]
    parser = jsonargparse.ArgumentParser(prog=_script_name(), description=_script_doc(), exit_on_error=False)
    parser.add_argument("--config", help="YAML file of settings.")
    parser.add_class_arguments(Settings, as_group=False, skip=set(INTERNAL))
    parser.set_defaults(defaults)
    chosen, config = _chosen_config(args, config)
    from_file = _read_config(config) if config else []
    _parse(parser, from_file, f"{config}: ")
    values = _parse(parser, [*from_file, *args])
    values.pop("config")
    settings = Settings(**values, name=_script_name(), config=str(config) if config else None)
    if not chosen and config:
        settings.notices.append(
            f"No --config and no CUDA GPU: this is the quickstart ({config.name}), a small model on synthetic reviews. "
            f"For real work: --config configs/imdb_bloom_560m.yaml; all settings: --help"
        )
    if not any(arg.split("=")[0] == "--learning_rate" for arg in args):  # a config's is Adam's, of all weights
        if settings.optimizer == "sgd":
            settings.learning_rate = settings.sgd_learning_rate
        elif settings.lora:
            settings.learning_rate = settings.lora_learning_rate
    check(settings, defaults)
    show_errors(settings)
    return settings


def _script_name() -> str:
    if file := getattr(sys.modules["__main__"], "__file__", None):
        return Path(file).stem
    found = re.search(SCRIPT_NAME, _script_doc())
    return found.group(1) if found else "notebook"


def _script_doc() -> str:
    """The script's docstring; in a notebook, the newest cell that holds one."""
    main = sys.modules["__main__"]  # not imported once: a script may run others by `runpy`
    if not notebook_shell():
        return main.__doc__ or ""
    cells = (cell for cell in reversed(main.In) if not cell.startswith("%%"))  # those only write a script
    return next((cell for cell in cells if re.search(SCRIPT_NAME, cell)), "")


def _chosen_config(args: list[str], config: str | None) -> tuple[bool, Path | None]:
    """Return whether the user chose the config, and its path; the quickstart's on a machine without a CUDA GPU."""
    finder = argparse.ArgumentParser(exit_on_error=False, add_help=False, allow_abbrev=False)
    finder.add_argument("--config")
    try:
        config = finder.parse_known_args(args)[0].config or config
    except argparse.ArgumentError as error:
        raise UserError("--config: give a YAML file") from error
    if config:
        path = next((path for path in (Path(config), CONFIGS / config) if path.is_file()), None)
        if path is None:
            ours = ", ".join(sorted(path.name for path in CONFIGS.glob("*.yaml")))
            raise UserError(f"there is no config file {config}; those that come along: {ours}")
        return True, path
    return False, None if torch.cuda.is_available() else CONFIGS / "quickstart.yaml"


def _read_config(path: Path) -> list[str]:
    """Read a YAML file as arguments; a relative path in it is taken from the file's own folder where that holds it."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"cannot read {path}: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise UserError(f"{path} must hold lines such as 'batch_size: 16'")
    beside = {key: path.parent / str(values[key]) for key in PATHS if values.get(key)}
    values |= {key: str(place) for key, place in beside.items() if place.exists()}
    return [f"--{key}={'null' if value is None else value}" for key, value in values.items()]


def _names() -> list[str]:
    return [item.name for item in dataclasses.fields(Settings) if item.name not in INTERNAL]


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name, _names(), n=1)
    return f"there is no setting {name!r}; " + (f"did you mean {near[0]!r}?" if near else "see --help for all settings")


def _parse(parser: jsonargparse.ArgumentParser, args: list[str], where: str = "") -> dict:
    """Check names and types; `where` starts the message of an error."""
    for arg in args:
        name = arg[2:].split("=")[0]
        if arg.startswith("--") and name not in ("help", "config" if not where else "", *_names()):
            raise UserError(where + _unknown(name))
    try:
        return parser.parse_args(args).as_dict()
    except jsonargparse.ArgumentError as error:
        text = " ".join(str(error).split())
        kind = r"(?:<class '(\w+)'>|typing.Literal\[(.*?)\])"
        if found := re.match(rf'Parser key "(\w+)":.*? Expected an? {kind}.*(?:Got|Given) value: (.*)', text):
            name, plain, choices, value = found.groups()
            text = f"--{name} {value}: expected {plain or f'one of {choices}'}"
        raise UserError(f"{where}{text} (see --help)") from error
