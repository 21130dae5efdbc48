"""The settings of a run, with all facts about each of them.

A setting is a field of `Settings`. Its `Fact` holds the help text, the bounds, the aliases of other libraries, the role
in a comparison, whether a resumed run may change it and whether it changes the memory. Lists of names come from `names`
and are never kept by hand. This module imports neither torch nor lightning.
"""

import dataclasses
import os
from collections.abc import Callable
from dataclasses import MISSING, dataclass
from typing import Literal

import platformdirs

# The roles of a setting when two runs are compared:
TECHNIQUE = "technique"  # a part of the technique, which may differ
EQUAL = "equal"  # runs that are compared must have the same value
DATA = "data"  # covered by the fingerprint of the data
SEED = "seed"  # runs that differ in it alone are one row
SURROUNDINGS = "surroundings"  # where the run happens and what it leaves behind

LARGEST = 2**31 - 1  # the largest whole number that all libraries take
LARGEST_SIDE = 2**13  # pixels, or ranks of adapters: far above any use
LARGEST_SEED = 2**32 - 2**16  # NumPy's bound, less the numbers of the ranks
ENOUGH_PROCESSES = max(256, os.cpu_count() or 1)


@dataclass(frozen=True)
class Fact:
    """All facts about a setting except its type and default.

    Attributes:
        help: Its description for `--help`.
        group: Its heading in `--help` and `--print_config`.
        role: One of the roles above.
        free_on_resume: Whether a resumed run may have another value: the setting changes no gradient except by
            rounding.
        changes_memory: Whether the predicted memory depends on it, apart from the shapes of the batches.
        changes_figures: Whether it can change any figure of a run, its speed included.
        at_least: Smallest value.
        at_most: Largest value.
        above: Largest value that is too small.
        below: Smallest value that is too large.
        needs: The setting without which it has no effect: `lora`, or with a value `optimizer=sgd`.
        strategy: The only strategy that uses it; empty: all.
        strategy_rung: The script with this strategy.
        rung_decides: Whether runs may differ in it where their rungs set it.
        is_path: Whether it can name a file or folder of the user's, so that `~` is the user's home.
        beside_config: Whether a relative path in a YAML file is looked for in the file's own folder.
        metavar: Placeholder of its value in `--help`.
        for_beginners: Whether the short `--help` shows it.
        aliases: Names of other libraries, several in one string. The key is the value here; `{}` is the given value.
    """

    help: str
    group: str
    role: str
    free_on_resume: bool = False
    changes_memory: bool = False
    changes_figures: bool = True
    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    below: float | None = None
    needs: str = ""
    strategy: str = ""
    strategy_rung: str = ""
    rung_decides: bool = False
    is_path: bool = False
    beside_config: bool = False
    metavar: str = ""
    for_beginners: bool = False
    aliases: dict[str, str] = dataclasses.field(default_factory=dict)


def setting(default: object = MISSING, help: str = "", default_factory: Callable | object = MISSING, **facts: object):
    """Return the field of a setting with its `Fact`."""
    metadata = {"fact": Fact(help, **facts)}
    return dataclasses.field(default=default, default_factory=default_factory, metadata=metadata)


def _folder(variable: str) -> str:
    return os.path.expanduser(os.environ.get(variable, ""))


@dataclass(frozen=True)
class DataSettings:
    """Which texts or images to load, and how to turn them into the inputs of a model."""

    task: Literal["text-classification", "image-classification", "instruction-tuning"] = setting(
        "text-classification",
        "What the model learns: a class for each text or image, or answers to instructions.",
        group="data",
        role=EQUAL,
        changes_memory=True,
    )
    dataset: str = setting(
        "imdb",
        "`imdb`, `synthetic`, a CSV, TSV, JSON, JSON Lines (each also as .gz) or Parquet file, a folder of such files "
        "(their names tell train, validation and test apart), or a name on the Hugging Face Hub, with a configuration "
        "as `glue:sst2`. Images: a folder with one folder per class, or with `train`, `validation` and `test` folders "
        "that hold such folders, a tar or zip archive of either, or a name on the Hub. Instructions: tables with the "
        "columns `instruction`, `output` and optionally `input`, or `input` and `target`, or chat `messages`.",
        group="data",
        role=DATA,
        is_path=True,
        beside_config=True,
        metavar="NAME_OR_PATH",
        for_beginners=True,
        aliases={"{}": "data data_path dataset_name train_file"},
    )
    dataset_revision: str | None = setting(
        None,
        "Branch, tag or commit of a `dataset` on the Hub. Default: its main branch.",
        group="data",
        role=DATA,
    )
    data_dir: str = setting(
        help="Folder with data files; it may be read-only. Default: $FABRIC_LADDER_DATA, else `data`.",
        default_factory=lambda: _folder("FABRIC_LADDER_DATA") or "data",
        group="data",
        role=SURROUNDINGS,
        free_on_resume=True,
        is_path=True,
        metavar="FOLDER",
    )
    cache_dir: str = setting(
        help="Folder for everything derived from data files. Default: $FABRIC_LADDER_CACHE, else the user's cache.",
        default_factory=lambda: _folder("FABRIC_LADDER_CACHE") or platformdirs.user_cache_dir("fabric_ladder"),
        group="data",
        role=SURROUNDINGS,
        free_on_resume=True,
        is_path=True,
        metavar="FOLDER",
    )
    text_column: str = setting(
        "text",
        "Column of the texts. Several columns, separated by commas, become the lines of one text.",
        group="data",
        role=DATA,
        metavar="COLUMN",
        for_beginners=True,
    )
    label_column: str = setting(
        "label",
        "Column of the labels, integers or strings.",
        group="data",
        role=DATA,
        metavar="COLUMN",
        for_beginners=True,
        aliases={"{}": "label_name label_field target_column"},
    )
    column_names: str | None = setting(
        None,
        "Column names of CSV and TSV files without a header, from left to right, separated by commas.",
        group="data",
        role=DATA,
        metavar="COLUMN,…",
    )
    image_column: str = setting(
        "image",
        "Column of the images of a data set on the Hub. A data set with a single image column needs no name.",
        group="data",
        role=DATA,
        metavar="COLUMN",
    )
    validation_file: str | None = setting(
        None,
        "Validation texts for a `dataset` that is a file. Default: 10 % of the file.",
        group="data",
        role=DATA,
        is_path=True,
        beside_config=True,
        metavar="FILE",
        aliases={"{}": "eval_file val_file valid_file"},
    )
    test_file: str | None = setting(
        None,
        "Test texts for a `dataset` that is a file. Default: 20 % of the file.",
        group="data",
        role=DATA,
        is_path=True,
        beside_config=True,
        metavar="FILE",
    )
    train_samples: int | None = setting(
        None,
        "Keep only N training samples, drawn by `split_seed`.",
        group="data",
        role=DATA,
        at_least=1,
        aliases={"{}": "limit_train_samples max_samples max_train_samples num_samples"},
    )
    validation_samples: int | None = setting(
        None,
        "Keep only N validation samples.",
        group="data",
        role=DATA,
        at_least=1,
        aliases={"{}": "max_eval_samples max_val_samples"},
    )
    test_samples: int | None = setting(
        None,
        "Keep only N test samples.",
        group="data",
        role=DATA,
        at_least=1,
    )
    split_seed: int = setting(
        1,
        "Seed of splits and of drawn samples. It is separate from `seed`, so that all seeds share one test set.",
        group="data",
        role=DATA,
        at_least=0,
        at_most=LARGEST_SEED,
    )
    max_length: int = setting(
        1024,
        "Tokens kept of each text.",
        group="data",
        role=DATA,
        changes_memory=True,
        at_least=1,
        for_beginners=True,
        aliases={"{}": "block_size cutoff_len max_seq_len max_seq_length model_max_length seq_len seq_length"},
    )
    image_size: int | None = setting(
        None,
        "Side in pixels of the square that the model sees. Default: the size that the model was made for.",
        group="data",
        role=DATA,
        at_least=1,
        at_most=LARGEST_SIDE,
        needs="task=image-classification",
    )
    resize_to: int | None = setting(
        None,
        "Resize images to a square with sides of N pixels, then cut out the square that the model sees: at random in "
        "training, from the centre in evaluation. Default: `image_size`, so that nothing is cut off.",
        group="data",
        role=DATA,
        at_least=1,
        at_most=LARGEST_SIDE,
        needs="task=image-classification",
    )
    random_flip: bool = setting(
        False,
        "Mirror half of the training images, drawn again in each epoch.",
        group="data",
        role=DATA,
        needs="task=image-classification",
    )
    prompt_template: str | None = setting(
        None,
        "How an instruction becomes a prompt, for example `Human: {instruction}\\n{input}\\nAssistant: `. Default: "
        "Alpaca's wording. The tokenizer's chat template writes chat `messages` instead.",
        group="data",
        role=DATA,
        needs="task=instruction-tuning",
    )
    train_on_inputs: bool = setting(
        False,
        "Train on the tokens of the prompts too, not on the answers alone.",
        group="data",
        role=DATA,
        needs="task=instruction-tuning",
    )
    bad_samples: Literal["refuse", "skip"] = setting(
        "refuse",
        "What to do about images that cannot be decoded, texts without a label and instructions without an answer: "
        "refuse to start, or skip and count them.",
        group="data",
        role=DATA,
    )
    model: str = setting(
        "bigscience/bloom-560m",
        "A name on the Hugging Face Hub, a local folder, or a model's config file (with `from_scratch`).",
        group="model",
        role=EQUAL,
        changes_memory=True,
        is_path=True,
        beside_config=True,
        metavar="NAME_OR_PATH",
        for_beginners=True,
        aliases={
            "{}": "base_model checkpoint_dir model_id model_name model_name_or_path pretrained_model_name_or_path"
        },
    )
    model_revision: str | None = setting(
        None,
        "Branch, tag or commit of a `model` on the Hub. Default: its main branch.",
        group="model",
        role=EQUAL,
    )
    tokenizer: str | None = setting(
        None,
        "The tokenizer's Hub name or folder, or `trained` for a byte-pair encoding learned from the training texts. "
        "Default: the model's own, or `trained` when `model` is a config file.",
        group="model",
        role=DATA,
        is_path=True,
        beside_config=True,
        metavar="NAME_OR_PATH",
    )


@dataclass(frozen=True)
class Settings(DataSettings):
    """All settings of a run."""

    from_scratch: bool = setting(
        False,
        "Start from random weights of the model's config instead of pretrained ones. A `model` on the command line "
        "that is a folder or a Hub name is pretrained, unless this option is given with it.",
        group="model",
        role=EQUAL,
    )
    attention: Literal["fused", "eager"] = setting(
        "fused",
        "`fused` computes attention with a kernel that keeps no tokens x tokens matrix, for BLOOM and wherever "
        "transformers has such a kernel (`sdpa`). `eager` computes this matrix for every model. They differ by "
        "rounding.",
        group="model",
        role=TECHNIQUE,
        free_on_resume=True,
        changes_memory=True,
    )
    lora: bool = setting(
        False,
        "Train low-rank adapters (PEFT) and, for classification, the head. All other weights are frozen.",
        group="model",
        role=TECHNIQUE,
        changes_memory=True,
        aliases={"true": "use_lora use_peft peft"},
    )
    lora_rank: int = setting(
        8,
        "Rank of the adapters.",
        group="model",
        role=TECHNIQUE,
        changes_memory=True,
        at_least=1,
        at_most=LARGEST_SIDE,
        needs="lora",
        aliases={"{}": "lora_r rank"},
    )
    lora_alpha: int = setting(
        32,
        "Scale adapters by `lora_alpha` / `lora_rank`.",
        group="model",
        role=TECHNIQUE,
        at_least=1,
        needs="lora",
    )
    lora_dropout: float = setting(
        0.1,
        "Dropout of the adapters' inputs.",
        group="model",
        role=TECHNIQUE,
        changes_memory=True,
        at_least=0,
        below=1,
        needs="lora",
    )
    lora_targets: str | None = setting(
        None,
        "Linear layers that get adapters: their names, separated by commas, or `all-linear`. Default: the attention "
        "projections that PEFT takes for the architecture.",
        group="model",
        role=TECHNIQUE,
        changes_memory=True,
        needs="lora",
        metavar="LAYER,…",
        aliases={"{}": "lora_target_modules target_modules"},
    )
    dora: bool = setting(
        False,
        "Weight-decomposed adapters: train a length for each direction of the weight.",
        group="model",
        role=TECHNIQUE,
        changes_memory=True,
        needs="lora",
    )
    rslora: bool = setting(
        False,
        "Scale adapters by `lora_alpha` / the square root of `lora_rank`.",
        group="model",
        role=TECHNIQUE,
        needs="lora",
    )
    quantization: Literal["no", "nf4"] = setting(
        "no",
        "`nf4` keeps the weights that `lora` freezes in 4 bits (bitsandbytes, double quantisation).",
        group="model",
        role=TECHNIQUE,
        changes_memory=True,
        aliases={"nf4": "load_in_4bit load_in_8bit quantize use_4bit"},
    )
    seed: int = setting(
        123,
        "Seed of weights, dropout and sample order.",
        group="optimization",
        role=SEED,
        at_least=0,
        at_most=LARGEST_SEED,
        for_beginners=True,
    )
    epochs: int = setting(
        1,
        "Passes over the training samples.",
        group="optimization",
        role=EQUAL,
        at_least=1,
        for_beginners=True,
        aliases={"{}": "max_epochs n_epochs num_epochs num_train_epochs"},
    )
    optimizer: Literal["adam", "adamw", "sgd", "adafactor", "adam-8bit", "adam-4bit"] = setting(
        "adam",
        "`adam-8bit` (bitsandbytes) and `adam-4bit` keep their state in 8 and 4 bits, `adafactor` keeps a row and a "
        "column per matrix, and `sgd` keeps no state. `adamw` has weight decay 0.01.",
        group="optimization",
        role=TECHNIQUE,
        changes_memory=True,
        for_beginners=True,
        aliases={"adamw, which has weight decay 0.01": "weight_decay wd", "{}": "opt optim"},
    )
    kahan_summation: bool = setting(
        False,
        "Carry the rounding error of 16-bit weights in 2 bytes a weight and add it to later steps. Without it a "
        "bfloat16 weight ignores steps below a 512th of its size.",
        group="optimization",
        role=TECHNIQUE,
        changes_memory=True,
    )
    step_in_backward: bool = setting(
        False,
        "Update each weight as soon as the backward pass has its gradient, and free the gradient immediately. The "
        "effective batch is one micro-batch, and its gradient is not clipped.",
        group="optimization",
        role=TECHNIQUE,
        changes_memory=True,
    )
    optimizer_offload: bool = setting(
        False,
        "Keep the optimizer's state in CPU memory and update the weights there, during the backward pass.",
        group="optimization",
        role=TECHNIQUE,
        changes_memory=True,
    )
    learning_rate: float = setting(
        5e-5,
        "Learning rate. On the command line it also replaces the rates of `sgd` and `lora`.",
        group="optimization",
        role=TECHNIQUE,
        rung_decides=True,
        above=0,
        for_beginners=True,
        aliases={"{}": "lr max_lr"},
    )
    sgd_learning_rate: float = setting(
        1e-2,
        "Learning rate of `sgd`, whose steps are not scaled by the size of the gradient.",
        group="optimization",
        role=EQUAL,
        free_on_resume=True,  # `learning_rate` is taken from it
        above=0,
        needs="optimizer=sgd",
    )
    lora_learning_rate: float = setting(
        2e-4,
        "Learning rate with `lora`, in place of `learning_rate`.",
        group="optimization",
        role=EQUAL,
        free_on_resume=True,  # `learning_rate` is taken from it
        above=0,
        needs="lora",
    )
    schedule: Literal["constant", "linear", "cosine"] = setting(
        "constant",
        "Course of the learning rate over the optimizer steps. `cosine` and `linear` end at 0.",
        group="optimization",
        role=TECHNIQUE,
        rung_decides=True,
        aliases={"{}": "lr_scheduler lr_scheduler_type scheduler"},
    )
    warmup_steps: int = setting(
        0,
        "Optimizer steps in which the learning rate rises to its full value.",
        group="optimization",
        role=EQUAL,
        at_least=0,
        aliases={"{}": "num_warmup_steps warmup"},
    )
    max_grad_norm: float | None = setting(
        None,
        "Clip the gradient to this 2-norm.",
        group="optimization",
        role=EQUAL,
        changes_memory=True,
        above=0,
        aliases={
            "{}": "clip_grad clip_grad_norm grad_clip gradient_clip gradient_clip_val gradient_clipping max_norm",
        },
    )
    on_nan: Literal["stop", "skip"] = setting(
        "stop",
        "`stop` ends the run at the next printed line after a loss or gradient that is not finite. `skip` leaves such "
        "an effective batch out, and waits for the device in each step to do so.",
        group="optimization",
        role=SURROUNDINGS,
        free_on_resume=True,
    )
    nan_limit: int = setting(
        10,
        "Number of effective batches that `on_nan` `skip` may leave out before it stops the run.",
        group="optimization",
        role=SURROUNDINGS,
        free_on_resume=True,
        at_least=0,
    )
    batch_size: int = setting(
        1,
        "Effective batch size: samples per optimizer step, over all devices.",
        group="micro-batches",
        role=TECHNIQUE,
        rung_decides=True,
        at_least=1,
        for_beginners=True,
        aliases={
            "{}": "bs train_batch_size global_batch_size",
            ", the effective batch of one optimizer step, next to --micro_batch_size": "accumulate_grad_batches "
            "grad_accum grad_accum_steps gradient_accumulation gradient_accumulation_steps",
        },
    )
    micro_batch_size: int | None = setting(
        None,
        "Samples of the effective batch in the memory of a device at the same time. Default: all.",
        group="micro-batches",
        role=TECHNIQUE,
        free_on_resume=True,
        at_least=1,
        for_beginners=True,
        aliases={"{}": "micro_batch per_device_batch_size per_device_train_batch_size"},
    )
    micro_batch_tokens: int | Literal["auto"] | None = setting(
        None,
        "Padded tokens in the memory of a device at the same time; replaces `micro_batch_size`. `auto`: the largest "
        "number up to 16384 that fits by the prediction of the peak memory, halved when memory runs out; on a CPU, "
        "where more is slower, 1024; on MPS one sample.",
        group="micro-batches",
        role=TECHNIQUE,
        free_on_resume=True,
        at_least=1,
    )
    eval_batch_tokens: int | None = setting(
        None,
        "Padded tokens of an evaluation batch on each device. Default: on a CUDA GPU those of the largest training "
        "micro-batch, at least 4096; elsewhere 1024, since more is slower on a CPU.",
        group="micro-batches",
        role=TECHNIQUE,
        free_on_resume=True,
        at_least=1,
    )
    pad_to_multiple_of: int | None = setting(
        None,
        "Round the length of every micro-batch up to a multiple of N tokens. Default: 16 with `compile`, `packing` or "
        "on `mps` if `max_length` is a multiple of 16; else 1.",
        group="micro-batches",
        role=TECHNIQUE,
        free_on_resume=True,
        at_least=1,
    )
    packing: bool = setting(
        False,
        "Put several short texts into one row of up to `max_length` tokens, in which they do not see each other, in "
        "training and evaluation. `micro_batch_size` then counts rows.",
        group="micro-batches",
        role=TECHNIQUE,
        changes_memory=True,
    )
    pack_rows: int | None = setting(
        None,
        "Make every micro-batch and evaluation batch of exactly N rows of `max_length` tokens, for kernels that are "
        "compiled for one shape; replaces `micro_batch_size` and `eval_batch_tokens`.",
        group="micro-batches",
        role=TECHNIQUE,
        free_on_resume=True,
        at_least=1,
        needs="packing",
    )
    num_workers: int = setting(
        0,
        "Processes that prepare batches. 0 prepares them in the training process while the device computes, which is "
        "enough for texts. Images that must be resized may want 2 or more.",
        group="micro-batches",
        role=TECHNIQUE,
        free_on_resume=True,
        at_least=0,
        at_most=ENOUGH_PROCESSES,
        aliases={"{}": "dataloader_num_workers workers"},
    )
    activation_checkpointing: bool = setting(
        False,
        "Keep only the inputs of the transformer blocks, and recompute the other activations for the backward pass.",
        group="memory",
        role=TECHNIQUE,
        free_on_resume=True,
        changes_memory=True,
        aliases={"true": "gradient_checkpointing grad_checkpointing enable_activation_checkpointing"},
    )
    activation_offload: bool = setting(
        False,
        "Keep the inputs of checkpointed blocks in CPU memory.",
        group="memory",
        role=TECHNIQUE,
        free_on_resume=True,
        changes_memory=True,
        needs="activation_checkpointing",
    )
    selective_checkpointing: bool = setting(
        False,
        "Keep the results of attention and of matrix multiplications in checkpointed blocks too, and recompute only "
        "the rest.",
        group="memory",
        role=TECHNIQUE,
        free_on_resume=True,
        changes_memory=True,
        needs="activation_checkpointing",
    )
    loss_chunk: int = setting(
        256,
        "Tokens whose logits over the vocabulary are in memory at the same time, for a language model's loss.",
        group="memory",
        role=TECHNIQUE,
        free_on_resume=True,
        changes_memory=True,
        at_least=1,
        needs="task=instruction-tuning",
    )
    offload: bool = setting(
        False,
        "Keep the shards of FSDP in CPU memory, and run the optimizer there.",
        group="memory",
        role=TECHNIQUE,
        changes_memory=True,
        strategy="fsdp",
        strategy_rung="src/11_fsdp_cpu_offload.py",
    )
    deepspeed: str | None = setting(
        None,
        "DeepSpeed configuration: a JSON file, or the name of one in `configs/deepspeed/`.",
        group="memory",
        role=TECHNIQUE,
        changes_memory=True,
        strategy="deepspeed",
        strategy_rung="src/12_deepspeed_zero.py",
        is_path=True,
        metavar="NAME_OR_PATH",
    )
    predict_memory: bool | None = setting(
        None,
        "Predict the peak memory before the first step, and compare it with the measured one at the end. Default: on "
        "a GPU.",
        group="memory",
        role=SURROUNDINGS,
        free_on_resume=True,
    )
    devices: int | Literal["auto"] = setting(
        1,
        "Devices of each machine: a number, or `auto` for all GPUs, or for as many as the launcher started.",
        group="devices",
        role=SURROUNDINGS,
        free_on_resume=True,
        changes_memory=True,
        at_least=1,
        aliases={"{}": "gpu gpus n_gpu ngpu nproc_per_node num_gpus num_processes world_size"},
    )
    num_nodes: int = setting(
        1,
        "Machines on which the script is started.",
        group="devices",
        role=SURROUNDINGS,
        free_on_resume=True,
        changes_memory=True,
        at_least=1,
    )
    accelerator: Literal["auto", "cuda", "mps", "cpu"] = setting(
        "auto",
        "`auto` takes the CUDA GPU if there is one, else the CPU. `mps` is the GPU of Apple silicon.",
        group="devices",
        role=SURROUNDINGS,
        for_beginners=True,
        aliases={"{}": "device", "cpu": "cpu no_cuda use_cpu"},
    )
    threads: int | None = setting(
        None,
        "PyTorch's threads on the CPU. Default: one for each core.",
        group="devices",
        role=SURROUNDINGS,
        free_on_resume=True,
        at_least=1,
        at_most=ENOUGH_PROCESSES,
    )
    precision: Literal["32-true", "mixed", "16-mixed", "bf16-mixed", "16-true", "bf16-true", "64-true"] = setting(
        "32-true",
        "Fabric's name of the precision. `mixed` is `bf16-mixed`, or `16-mixed` on GPUs below compute capability 8.0, "
        "which only emulate bfloat16 (`32-true` under FSDP).",
        group="devices",
        role=TECHNIQUE,
        changes_memory=True,
        for_beginners=True,
        aliases={"16-mixed": "fp16 amp float16 half use_fp16", "bf16-mixed": "bf16 bfloat16 use_bf16"},
    )
    matmul_precision: Literal["highest", "high", "medium"] | None = setting(
        None,
        "Precision within multiplications of 32-bit matrices: `high` (TF32 on a GPU, 10 bits of mantissa) and "
        "`medium` (bfloat16) are faster. Default: `high` on a GPU, `highest` (all 23 bits) on a CPU.",
        group="devices",
        role=TECHNIQUE,
        aliases={"high": "tf32 allow_tf32"},
    )
    float8: bool = setting(
        False,
        "Multiply the matrices of linear layers in 8-bit floating point (torchao), on GPUs of compute capability 8.9 "
        "(Ada, Hopper) and above. A CPU emulates it. Without `compile` it is slower than 16 bits.",
        group="devices",
        role=TECHNIQUE,
        changes_memory=True,
        aliases={"true": "enable_fp8_training fp8 use_fp8"},
    )
    compile: bool = setting(
        False,
        "Apply `torch.compile` to the layers of the model before the first step: one graph for all layers and all "
        "lengths. Kernels are kept in `cache_dir`.",
        group="devices",
        role=TECHNIQUE,
        aliases={"true": "torch_compile"},
    )
    deterministic: bool = setting(
        False,
        "Make equal runs give equal bits on a GPU too, with PyTorch's deterministic algorithms. They are slower, and "
        "the run stops at an operation that has no such algorithm. A CPU needs no switch for this.",
        group="devices",
        role=TECHNIQUE,
    )
    check_only: bool = setting(
        False,
        "Check whether the run could start here, and exit.",
        group="devices",
        role=SURROUNDINGS,
        free_on_resume=True,
        changes_figures=False,
    )
    log_every: int | None = setting(
        None,
        "Samples between two printed losses. Default: a tenth of an epoch, at most 4800.",
        group="logging",
        role=SURROUNDINGS,
        free_on_resume=True,
        at_least=1,
        aliases={"{}, in samples": "log_interval logging_steps log_every_n_steps"},
    )
    logger: str = setting(
        "csv",
        "Where figures go during the run: `csv` is metrics.csv in the run's folder, which every run has; "
        "`tensorboard`, `trackio`, `mlflow` and `wandb` (Weights & Biases) draw curves too. Several are separated by "
        "commas.",
        group="logging",
        role=SURROUNDINGS,
        free_on_resume=True,
        changes_figures=False,
        metavar="NAME,…",
        aliases={"{}": "report_to"},
    )
    runs_dir: str = setting(
        "runs",
        "Folder that gets a folder for every run.",
        group="logging",
        role=SURROUNDINGS,
        free_on_resume=True,
        changes_figures=False,
        is_path=True,
        metavar="FOLDER",
        aliases={"{}": "log_dir logging_dir out_dir output output_dir"},
    )
    save: Literal["no", "sharded", "consolidated"] = setting(
        "no",
        "Save the trained weights into the run's folder: `consolidated` for `model`, here or in transformers; "
        "`sharded`, with the optimizer, for `load`.",
        group="checkpoints",
        role=SURROUNDINGS,
        free_on_resume=True,
        changes_figures=False,
        for_beginners=True,
    )
    load: str | None = setting(
        None,
        "Sharded checkpoint to start from.",
        group="checkpoints",
        role=EQUAL,
        is_path=True,
        metavar="FOLDER",
    )
    save_every: int = setting(
        0,
        "Optimizer steps between two checkpoints to resume from. Checkpoints are also written after each epoch. 0: "
        "only when Ctrl-C, SIGTERM or `max_time` stops the run.",
        group="checkpoints",
        role=SURROUNDINGS,
        free_on_resume=True,
        changes_figures=False,
        at_least=0,
        aliases={"{}, in optimizer steps": "checkpoint_every save_interval save_steps"},
    )
    keep: int = setting(
        1,
        "Number of newest checkpoints to keep, besides the one with the lowest validation loss.",
        group="checkpoints",
        role=SURROUNDINGS,
        free_on_resume=True,
        changes_figures=False,
        at_least=1,
    )
    resume: str = setting(
        "no",
        "Continue the newest run of the same settings (`auto`), or the run or checkpoint in a folder.",
        group="checkpoints",
        role=SURROUNDINGS,
        free_on_resume=True,
        changes_figures=False,
        is_path=True,
        metavar="auto|FOLDER",
        for_beginners=True,
        aliases={"{}": "resume_from_checkpoint"},
    )
    max_time: float | None = setting(
        None,
        "Minutes after which the run stops as by SIGTERM; `resume` continues it.",
        group="checkpoints",
        role=SURROUNDINGS,
        free_on_resume=True,
        changes_figures=False,
        above=0,
        metavar="MINUTES",
    )
    # The script sets these, not the user: its name and strategy, the YAML file, and the first lines to print.
    name: str = ""
    strategy: Literal["single", "ddp", "fsdp", "deepspeed"] = "single"
    config: str | None = None
    notices: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        """Processes of the run, one for each device; known once the settings are parsed."""
        return self.devices * self.num_nodes


FACTS: dict[str, Fact] = {
    field.name: field.metadata["fact"] for field in dataclasses.fields(Settings) if "fact" in field.metadata
}
INTERNAL = tuple(field.name for field in dataclasses.fields(Settings) if field.name not in FACTS)
GROUPS = tuple(dict.fromkeys(fact.group for fact in FACTS.values()))


def names(**wanted: object) -> list[str]:
    """Return the names of the settings whose facts have these values, in the order of the fields.

    Example: `names(role=DATA)`, `names(free_on_resume=True)`.
    """
    return [name for name, fact in FACTS.items() if all(getattr(fact, key) == value for key, value in wanted.items())]


def show(value: object) -> str:
    """Write a setting's value as on a command line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return "null" if value is None else str(value)
