"""The settings of a run, with all facts about each of them.

A setting is a field of `Settings`. Its `Fact` holds the help text, the bounds, the names in other libraries, the role
in a comparison, whether a resumed run may change it and whether it changes the memory. Lists of names come from
`names`. This module imports neither torch nor lightning.
"""

import dataclasses
import functools
import os
import types
import typing
from collections.abc import Callable
from dataclasses import MISSING, dataclass
from functools import partial
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
FULL_PASS = 1024  # padded tokens; a GPU needs as long for fewer, because it waits for kernel launches (an estimate)
ENOUGH_PROCESSES = max(256, os.cpu_count() or 1)


@dataclass(frozen=True)
class Fact:
    """All facts about a setting except its type and default.

    Attributes:
        group: Its heading in `--help` and `--print_config`.
        help: Its description for `--help`.
        role: One of the roles above.
        free_on_resume: Whether a resumed run may have another value: the setting changes no gradient except by
            rounding. Default: for the surroundings.
        changes_memory: Whether the predicted memory depends on it, apart from the shapes of the batches.
        changes_figures: Whether it can change any figure of a run, its speed included.
        at_least: Smallest value.
        at_most: Largest value.
        above: Largest value that is too small.
        below: Smallest value that is too large.
        needs: The setting without which it has no effect: `lora`, or with its values `schedule=linear|cosine`.
        replaced_by: Settings that take its place, separated by spaces.
        rung_decides: Whether runs may differ in it where their rungs set it.
        metavar: Placeholder of its value in `--help`; FILE, FOLDER or PATH in it means that the value can be a path.
        for_beginners: Whether the short `--help` shows it.
        numbers: How many numbers its text holds, separated by commas; 0: it is any text.
        aliases: Names in other libraries, several in one string. The key is the value here; `{}` is the given value.
        words: Words of other libraries for its values, several in one string. The key is the value here.
    """

    group: str
    help: str
    role: str
    free_on_resume: bool = False
    changes_memory: bool = False
    changes_figures: bool = True
    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    below: float | None = None
    needs: str = ""
    replaced_by: str = ""
    rung_decides: bool = False
    metavar: str = ""
    for_beginners: bool = False
    numbers: int = 0
    aliases: dict[str, str] = dataclasses.field(default_factory=dict)
    words: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def is_path(self) -> bool:
        """Return whether the value can name a file or folder of the user's."""
        return any(word in self.metavar for word in ("FILE", "FOLDER", "PATH"))


def setting(
    group: str, default: object = MISSING, help: str = "", default_factory: Callable | object = MISSING, **facts: object
):
    """Return the field of a setting with its `Fact`; a group has facts that most of its settings share."""
    facts.setdefault("free_on_resume", facts["role"] == SURROUNDINGS)
    metadata = {"fact": Fact(group, help, **facts)}
    return dataclasses.field(default=default, default_factory=default_factory, metadata=metadata)


data_setting = partial(setting, "data", role=DATA)
model_setting = partial(setting, "model", role=TECHNIQUE)
optimization_setting = partial(setting, "optimization", role=TECHNIQUE)
micro_batch_setting = partial(setting, "micro-batches", role=TECHNIQUE, free_on_resume=True)
memory_setting = partial(setting, "memory", role=TECHNIQUE, changes_memory=True)
device_setting = partial(setting, "devices", role=SURROUNDINGS)
validation_setting = partial(setting, "validation", role=EQUAL)
logging_setting = partial(setting, "logging", role=SURROUNDINGS)
checkpoint_setting = partial(setting, "checkpoints", role=SURROUNDINGS, changes_figures=False)


def _folder(variable: str) -> str:
    return os.path.expanduser(os.environ.get(variable, ""))


@dataclass(frozen=True)
class DataSettings:
    """Which texts or images to load, and how to turn them into the inputs of a model."""

    task: Literal["text-classification", "image-classification", "token-classification", "instruction-tuning"] = (
        data_setting(
            "text-classification",
            "Task of the model: predict a class for each text, image or word, or answer instructions.",
            role=EQUAL,
            changes_memory=True,
        )
    )
    problem_type: Literal["single_label_classification", "multi_label_classification", "regression"] = data_setting(
        "single_label_classification",
        "What the labels of text-classification are: one class per text, any number of classes, or numbers "
        "(`regression`).",
        role=EQUAL,
        changes_memory=True,
    )
    dataset: str = data_setting(
        "imdb",
        "`imdb`, `synthetic`, a file (CSV, TSV, JSON, JSON Lines, each also as .gz, or Parquet), a folder of such "
        "files, or a name on the Hugging Face Hub, with a configuration as `glue:sst2`. Images: a folder or an "
        "archive with one folder per class, or a name on the Hub. Instructions: tables with the columns "
        "`instruction`, `output` and optionally `input`, or with chats in `messages` or `conversations`; "
        "`docs/data.md` lists more. Words: tables with the lists `tokens` and `ner_tags`.",
        metavar="NAME_OR_PATH",
        for_beginners=True,
        aliases={"{}": "data data_path dataset_name train_file"},
    )
    text_column: str = data_setting(
        "text",
        "Column of the texts. Several columns, separated by commas, become the lines of one text. The default of "
        "token-classification is `tokens`, a list of words.",
        metavar="COLUMN",
        for_beginners=True,
    )
    label_column: str = data_setting(
        "label",
        "Column of the labels, which are integers or strings. With `multi_label_classification` a list of labels, or "
        "several columns of 0 and 1, separated by commas; with `regression` one or several columns of numbers. The "
        "default of token-classification is `ner_tags`, a list of labels.",
        metavar="COLUMN",
        for_beginners=True,
        aliases={"{}": "label_name label_field target_column"},
    )
    column_names: str | None = data_setting(
        None,
        "Columns of CSV and TSV files without a header line, from left to right, separated by commas.",
        metavar="COLUMN,…",
    )
    validation_file: str | None = data_setting(
        None,
        "Validation texts for a `dataset` that is a file. Default: 10 % of the file.",
        metavar="FILE",
        aliases={"{}": "eval_file val_file valid_file"},
    )
    test_file: str | None = data_setting(
        None, "Test texts for a `dataset` that is a file. Default: 20 % of the file.", metavar="FILE"
    )
    train_samples: int | None = data_setting(
        None,
        "Use only N training samples, drawn with `split_seed`.",
        at_least=1,
        aliases={"{}": "limit_train_samples max_samples max_train_samples num_samples"},
    )
    validation_samples: int | None = data_setting(
        None, "Use only N validation samples.", at_least=1, aliases={"{}": "max_eval_samples max_val_samples"}
    )
    test_samples: int | None = data_setting(None, "Use only N test samples.", at_least=1)
    split_seed: int = data_setting(
        1,
        "Seed for splitting the data and drawing samples. All values of `seed` share one test set.",
        at_least=0,
        at_most=LARGEST_SEED,
    )
    max_length: int = data_setting(
        1024,
        "Tokens kept of each text.",
        changes_memory=True,
        at_least=1,
        for_beginners=True,
        aliases={"{}": "block_size cutoff_len max_seq_len max_seq_length model_max_length seq_len seq_length"},
    )
    image_size: int | None = data_setting(
        None,
        "Side of the square image that the model gets, in pixels. Default: the model's own.",
        at_least=1,
        at_most=LARGEST_SIDE,
        needs="task=image-classification",
    )
    resize_to: int | None = data_setting(
        None,
        "Resize images to N x N pixels, then crop them to `image_size`: at random in training, at the centre in "
        "evaluation. Default: `image_size`, without cropping.",
        at_least=1,
        at_most=LARGEST_SIDE,
        needs="task=image-classification",
    )
    random_flip: bool = data_setting(
        False, "Mirror half of the training images, chosen again in each epoch.", needs="task=image-classification"
    )
    prompt_template: str | None = data_setting(
        None,
        "Text of a prompt, for example `Human: {instruction}\\n{input}\\nAssistant: `. Default: Alpaca's prompt. Chats "
        "use the tokenizer's chat template.",
        needs="task=instruction-tuning",
    )
    train_on_inputs: bool = data_setting(
        False, "Train on the tokens of the prompts too, not only on the answers.", needs="task=instruction-tuning"
    )
    bad_samples: Literal["refuse", "skip"] = data_setting(
        "refuse",
        "Images that cannot be decoded, texts without a label and instructions without an answer: `refuse` to "
        "start, or `skip` and count them.",
    )
    model: str = model_setting(
        "bigscience/bloom-560m",
        "A name on the Hugging Face Hub, a local folder, or a model's config file (with `from_scratch`).",
        role=EQUAL,
        changes_memory=True,
        metavar="NAME_OR_PATH",
        for_beginners=True,
        aliases={
            "{}": "base_model checkpoint_dir model_id model_name model_name_or_path pretrained_model_name_or_path"
        },
    )
    tokenizer: str | None = model_setting(
        None,
        "The tokenizer's Hub name or folder, or `trained` to train a byte-pair encoding on the training texts. "
        "Default: the model's own, or `trained` if `model` is a config file.",
        role=DATA,
        metavar="NAME_OR_PATH",
    )
    train_tokens: str | None = model_setting(
        None,
        "Also train the rows of these tokens, separated by commas, in the embedding and in a language model's head. "
        "Tokens that the tokenizer lacks are added to it.",
        changes_memory=True,
        needs="lora",
        metavar="TOKEN,…",
        aliases={"{}": "add_tokens new_special_tokens"},
    )
    # folders that only environment variables set: of files with data; of prepared data and compiled kernels
    data_dir: str = dataclasses.field(default_factory=lambda: _folder("FABRIC_LADDER_DATA") or "data")
    cache_dir: str = dataclasses.field(
        default_factory=lambda: _folder("FABRIC_LADDER_CACHE") or platformdirs.user_cache_dir("fabric_ladder")
    )


@dataclass(frozen=True)
class Settings(DataSettings):
    """All settings of a run."""

    from_scratch: bool = model_setting(
        False,
        "Start from random weights instead of pretrained ones. If the YAML file sets this, a folder or Hub name in "
        "`--model` is still loaded with its pretrained weights.",
        role=EQUAL,
    )
    attention: Literal["fused", "eager", "varlen"] = model_setting(
        "fused",
        "`fused` uses a kernel that stores no tokens x tokens matrix, for BLOOM and wherever transformers has one "
        "(`sdpa`), and one kernel for GELU's tanh approximation. `eager` stores this matrix, and computes GELU as "
        "transformers does. `varlen` computes packed documents one by one, on GPUs of compute capability 8.0 and above "
        "in 16 bits; no GPU has measured it yet. They differ by rounding.",
        free_on_resume=True,
        changes_memory=True,
    )
    lora: bool = model_setting(
        False,
        "Train low-rank adapters (PEFT) and, for classification, the head. All other weights are frozen.",
        changes_memory=True,
        aliases={"true": "use_lora use_peft peft"},
    )
    lora_rank: int = model_setting(
        8,
        "Rank of the adapters.",
        changes_memory=True,
        at_least=1,
        at_most=LARGEST_SIDE,
        needs="lora",
        aliases={"{}": "lora_r rank"},
    )
    lora_alpha: int = model_setting(32, "Scale adapters by `lora_alpha` / `lora_rank`.", at_least=1, needs="lora")
    lora_dropout: float = model_setting(
        0.1, "Dropout of the adapters' inputs.", changes_memory=True, at_least=0, below=1, needs="lora"
    )
    lora_targets: str = model_setting(
        "all-linear",
        "Linear layers that get adapters: their names, separated by commas, `all-linear`, or `attention` for PEFT's "
        "attention projections of the architecture.",
        changes_memory=True,
        needs="lora",
        metavar="LAYER,…",
        aliases={"{}": "lora_target_modules target_modules"},
    )
    dora: bool = model_setting(
        False, "DoRA: also train the length of each weight vector.", changes_memory=True, needs="lora"
    )
    quantization: Literal["no", "nf4"] = model_setting(
        "no",
        "`nf4` stores the weights that `lora` freezes in 4 bits (bitsandbytes, double quantization).",
        changes_memory=True,
        aliases={"nf4": "load_in_4bit load_in_8bit quantize use_4bit"},
    )
    seed: int = optimization_setting(
        123,
        "Seed of weights, dropout and sample order.",
        role=SEED,
        at_least=0,
        at_most=LARGEST_SEED,
        for_beginners=True,
    )
    epochs: int = optimization_setting(
        1,
        "Passes over the training samples.",
        role=EQUAL,
        at_least=1,
        for_beginners=True,
        aliases={"{}": "max_epochs n_epochs num_epochs num_train_epochs"},
    )
    optimizer: Literal["adam", "adamw", "sgd", "sinkgd", "adafactor", "adam-8bit", "adam-4bit"] = optimization_setting(
        "adam",
        "`adam-8bit` (bitsandbytes) and `adam-4bit` (torchao) keep their state in 8 and 4 bits, `adafactor` keeps one "
        "row and one column per matrix, `sgd` and `sinkgd` (SGD on balanced gradients) keep no state. `adamw` is "
        "`adam` with weight decay 0.01.",
        changes_memory=True,
        for_beginners=True,
        aliases={"{}": "opt optim"},
        words={
            "adam": "adamw_torch adamw_torch_fused adamw_hf",  # whose weight decay is 0 unless it is given
            "adam-8bit": "adamw_8bit adamw_bnb_8bit paged_adamw_8bit adam_8bit adam8bit",
            "adam-4bit": "adamw_torch_4bit adam_4bit adam4bit",
        },
    )
    betas: str = optimization_setting(
        "0.9,0.999",
        "Share of each moment that a step of Adam keeps.",
        numbers=2,
        at_least=0,
        below=1,
        needs="optimizer=adam|adamw|adam-8bit|adam-4bit",
        metavar="B1,B2",
    )
    eps: float = optimization_setting(
        1e-8,
        "Added to the root of Adam's second moment.",
        above=0,
        needs="optimizer=adam|adamw|adam-8bit|adam-4bit",
        aliases={"{}": "adam_epsilon epsilon"},
    )
    weight_decay: float | None = optimization_setting(
        None,
        "In each step, matrices lose this share times the learning rate, in all optimizers as in AdamW. Biases and "
        "norms do not. Default: 0.01 with `adamw`, else 0.",
        at_least=0,
        aliases={"{}": "wd"},
    )
    train_blocks: str = optimization_setting(
        "all",
        "Transformer blocks to train: `all`, `last:N` for the last N and the head, or `none` for the head alone. The "
        "blocks below and the embeddings are frozen and keep no gradients, optimizer state or activations.",
        changes_memory=True,
        metavar="all|last:N|none",
        aliases={
            "last:{}": "freeze_trainable_layers num_layers_unfrozen num_unfrozen_layers unfreeze_layers",
            "none": "freeze_backbone freeze_base_model freeze_encoder",
        },
    )
    block_steps: int | Literal["auto"] | None = optimization_setting(
        None,
        "Train the transformer blocks in turn, each for N optimizer steps, with gradients and optimizer state for one "
        "block at a time. `auto` shares the steps of the run among the blocks, at most 100 in a turn. Embeddings stay "
        "frozen. Default: train all blocks together.",
        changes_memory=True,
        at_least=1,
        aliases={"{}": "switch_block_every badam_switch_interval", "auto": "badam use_badam"},
    )
    kahan_summation: bool | Literal["8-bit"] = optimization_setting(
        False,
        "Keep the rounding error of 16-bit weights and add it to later steps. Without it a bfloat16 weight ignores "
        "steps below 1/512 of its size. `true` takes 2 bytes per weight, `8-bit` one.",
        changes_memory=True,
    )
    step_in_backward: bool = optimization_setting(
        False,
        "Update each weight during the backward pass and free its gradient immediately. The effective batch is one "
        "micro-batch, and the gradient is not clipped.",
        changes_memory=True,
    )
    optimizer_offload: bool = optimization_setting(
        False,
        "Keep the optimizer's state in CPU memory and update the weights there, during the backward pass.",
        changes_memory=True,
    )
    learning_rate: float = optimization_setting(
        5e-5,
        "Learning rate. Its default is 0.0002 with `lora` (0.002 on random weights) and 0.01 with `sgd`.",
        rung_decides=True,
        above=0,
        for_beginners=True,
        aliases={"{}": "lr max_lr"},
    )
    schedule: Literal["constant", "linear", "cosine"] = optimization_setting(
        "constant",
        "How the learning rate changes over the optimizer steps. `cosine` and `linear` end at 0.",
        rung_decides=True,
        aliases={"{}": "lr_scheduler lr_scheduler_type scheduler"},
        words={"constant": "constant_with_warmup"},
    )
    warmup_steps: int = optimization_setting(
        0,
        "Optimizer steps until the learning rate has its full value.",
        role=EQUAL,
        at_least=0,
        aliases={"{}": "num_warmup_steps warmup"},
    )
    label_smoothing: float = optimization_setting(
        0.0,
        "Share of each label that is spread evenly over all classes, in the training loss of a classification.",
        role=EQUAL,
        at_least=0,
        below=1,
        aliases={"{}": "label_smoothing_factor smoothing"},
    )
    class_weights: str | None = optimization_setting(
        None,
        "Weights of the classes in the training loss: `balanced` (samples / (classes * samples of the class)), or a "
        "number for each class in their order. Validation and test losses have neither weights nor label smoothing.",
        role=EQUAL,
        metavar="balanced|X,…",
        aliases={"{}": "class_weight"},
    )
    max_grad_norm: float | None = optimization_setting(
        None,
        "Clip the gradient to this 2-norm.",
        role=EQUAL,
        changes_memory=True,
        above=0,
        aliases={"{}": "clip_grad clip_grad_norm grad_clip gradient_clip gradient_clip_val gradient_clipping max_norm"},
    )
    batch_size: int = micro_batch_setting(
        1,
        "Effective batch size: samples per optimizer step, over all devices.",
        rung_decides=True,
        at_least=1,
        for_beginners=True,
        aliases={"{}": "bs train_batch_size global_batch_size"},
        free_on_resume=False,
    )
    micro_batch_size: int | None = micro_batch_setting(
        None,
        "Samples of the effective batch on a device at the same time. Default: all.",
        at_least=1,
        replaced_by="micro_batch_tokens",
        for_beginners=True,
        aliases={"{}": "micro_batch"},
    )
    micro_batch_tokens: int | Literal["auto"] | None = micro_batch_setting(
        None,
        "Padded tokens on a device at the same time; replaces `micro_batch_size`. `auto` takes the largest number "
        "up to 16384 that the memory prediction allows, and halves it if memory runs out. It means 1024 on a CPU, "
        "where more is slower, and one sample on MPS.",
        at_least=1,
    )
    eval_batch_tokens: int | None = micro_batch_setting(
        None,
        "Padded tokens of an evaluation batch per device. Default: 1024; on CUDA as in training, at least 4096.",
        at_least=1,
    )
    pad_to_multiple_of: int | None = micro_batch_setting(
        None,
        "Pad every micro-batch to a multiple of N tokens. Default: 64 with `cuda_graphs` on a CUDA GPU, 16 with "
        "`compile`, `packing` or `mps`, if `max_length` is a multiple of it; else 1.",
        at_least=1,
    )
    packing: bool = micro_batch_setting(
        False,
        "Put several short texts, which do not see each other, into one row of up to `max_length` tokens. "
        "`micro_batch_size` then counts rows. On a CUDA GPU `step_in_backward` turns it on.",
        changes_memory=True,
        free_on_resume=False,
    )
    num_workers: int = micro_batch_setting(
        0,
        "Processes that prepare batches. 0: the training process does it. Only large images need 2 or more.",
        at_least=0,
        at_most=ENOUGH_PROCESSES,
        aliases={"{}": "dataloader_num_workers workers"},
    )
    activation_checkpointing: bool = memory_setting(
        False,
        "Keep only the inputs of the transformer blocks, and recompute the other activations for the backward pass.",
        free_on_resume=True,
        aliases={"true": "gradient_checkpointing grad_checkpointing enable_activation_checkpointing"},
    )
    memory_budget: str | None = memory_setting(
        None,
        "Recompute only as many blocks as needed to stay within this GPU memory, for example 8GiB; `auto`: all that is "
        "free on the GPU.",
        free_on_resume=True,
        metavar="auto|SIZE",
        needs="activation_checkpointing",
    )
    activation_offload: bool = memory_setting(
        False,
        "Keep the inputs of checkpointed blocks in CPU memory.",
        free_on_resume=True,
        needs="activation_checkpointing",
    )
    selective_checkpointing: bool = memory_setting(
        False,
        "Also keep the results of attention and matrix multiplications in checkpointed blocks.",
        free_on_resume=True,
        needs="activation_checkpointing",
    )
    mlp_tile: int | None = memory_setting(
        None,
        "Tokens that go through a block's MLP at a time, forward and backward. The backward pass recomputes each such "
        "tile. Default: all tokens of the micro-batch.",
        free_on_resume=True,
        at_least=1,
        aliases={"2048": "tiled_mlp"},
    )
    stream_layers: bool | int = memory_setting(
        False,
        "Keep the blocks in CPU memory, and copy each to the device one block ahead of its use: frozen blocks with "
        "`lora`, trained ones with `step_in_backward` and `optimizer_offload`. N: only N blocks, as far apart as "
        "possible; the others stay on the device.",
        free_on_resume=True,
        at_least=0,
        aliases={"true": "layer_offloading block_swap", "{}": "blocks_to_swap"},
    )
    stream_from: str | None = memory_setting(
        None,
        "Keep the frozen weights of `stream_layers` in files in this folder instead of CPU memory: a local SSD with "
        "room for all weights. The files are gone when the run ends. Not on Windows.",
        role=SURROUNDINGS,
        metavar="FOLDER",
        needs="stream_layers",
    )
    loss_chunk: int = memory_setting(
        256,
        "Tokens whose logits over the vocabulary are in memory at the same time, in a language model's loss.",
        free_on_resume=True,
        at_least=1,
        needs="task=instruction-tuning",
    )
    offload: bool = memory_setting(
        False, "Keep the shards of FSDP in CPU memory, and run the optimizer there.", needs="strategy=fsdp"
    )
    deepspeed: str | None = memory_setting(
        None,
        "DeepSpeed configuration: a JSON file, or the name of one in `configs/deepspeed/`.",
        metavar="NAME_OR_PATH",
        needs="strategy=deepspeed",
    )
    predict_memory: bool | None = memory_setting(
        None,
        "Predict the peak memory, and compare it with the measured one at the end. Default: only on a GPU.",
        role=SURROUNDINGS,
        changes_memory=False,
    )
    gpu_memory_limit: str | None = memory_setting(
        None,
        "Run as on a GPU of this size, for example 8GiB. On a CPU it turns on the prediction, and limits that alone.",
        role=SURROUNDINGS,
        changes_figures=False,
        metavar="SIZE",
        changes_memory=False,
    )
    memory_snapshot: str | None = memory_setting(
        None,
        "Write a snapshot of CUDA memory for pytorch.org/memory_viz here, after the third step or at an error.",
        role=SURROUNDINGS,
        changes_figures=False,
        metavar="FILE",
        changes_memory=False,
    )
    devices: int | Literal["auto"] = device_setting(
        1,
        "Devices of each machine: a number, or `auto` for all GPUs, or for as many as the launcher started.",
        changes_memory=True,
        at_least=1,
        aliases={"{}": "gpu gpus n_gpu ngpu nproc_per_node num_gpus num_processes world_size"},
    )
    num_nodes: int = device_setting(1, "Machines on which the script is started.", changes_memory=True, at_least=1)
    accelerator: Literal["auto", "cuda", "mps", "cpu"] = device_setting(
        "auto",
        "`auto` takes the CUDA GPU if there is one, else the CPU. `mps` is the GPU of Apple silicon.",
        changes_memory=True,
        free_on_resume=False,
        for_beginners=True,
        aliases={"{}": "device", "cpu": "cpu no_cuda use_cpu"},
        words={"cuda": "gpu cuda:0"},
    )
    threads: int | None = device_setting(
        None, "PyTorch's threads on the CPU. Default: one for each core.", at_least=1, at_most=ENOUGH_PROCESSES
    )
    precision: Literal["32-true", "mixed", "16-mixed", "bf16-mixed", "16-true", "bf16-true", "64-true"] = (
        device_setting(
            "32-true",
            "Precision of weights and activations, as Fabric names it. `mixed` is `bf16-mixed`; on GPUs below compute "
            "capability 8.0, which only emulate bfloat16, it is `16-mixed`, or `32-true` under FSDP.",
            role=TECHNIQUE,
            changes_memory=True,
            for_beginners=True,
            aliases={
                "{}": "mixed_precision",
                "16-mixed": "fp16 amp float16 half use_fp16",
                "bf16-mixed": "bf16 bfloat16 use_bf16",
            },
            words={"32-true": "32 fp32 float32 no", "16-mixed": "16 fp16 float16", "bf16-mixed": "bf16 bfloat16"},
        )
    )
    matmul_precision: Literal["highest", "high", "medium"] | None = device_setting(
        None,
        "Precision within multiplications of 32-bit matrices: `high` (TF32 on a GPU, 10 bits of mantissa) and "
        "`medium` (bfloat16) are faster. Default: `high` on a GPU, `highest` (all 23 bits) on a CPU.",
        role=TECHNIQUE,
        aliases={"high": "tf32 allow_tf32"},
    )
    float8: bool = device_setting(
        False,
        "Multiply the matrices of linear layers in 8-bit floating point (torchao). Needs a GPU of compute "
        "capability 8.9 (Ada, Hopper) or above; a CPU emulates it.",
        role=TECHNIQUE,
        changes_memory=True,
        aliases={"true": "enable_fp8_training fp8 use_fp8"},
    )
    compile: bool = device_setting(
        False,
        "Apply `torch.compile` to the layers of the model before the first step: one graph for all layers and lengths. "
        "Some techniques turn it on on a CUDA GPU, with a line.",
        role=TECHNIQUE,
        aliases={"true": "torch_compile"},
    )
    cuda_graphs: bool = device_setting(
        False,
        "Record the forward and backward pass of each shape of micro-batch in a CUDA graph, and launch it as a whole "
        "from then on, where the GPU waits for Python. It takes the memory of the activations twice. Without a CUDA "
        "GPU nothing changes.",
        role=TECHNIQUE,
        changes_memory=True,
        free_on_resume=True,
        aliases={"true": "use_cuda_graphs"},
    )
    deterministic: bool = device_setting(
        False,
        "Use PyTorch's deterministic algorithms, so that equal runs give equal bits on a GPU too. They are slower, "
        "and an operation without one stops the run.",
        role=TECHNIQUE,
    )
    evaluate_every: int = validation_setting(
        0,
        "Optimizer steps between two validations within an epoch. Another one follows each epoch. 0: no others.",
        role=SURROUNDINGS,
        at_least=0,
        aliases={"{}": "eval_every eval_interval eval_steps val_check_interval"},
    )
    patience: int | None = validation_setting(
        None,
        "Stop the training after N validations in a row that are not better than the best one.",
        free_on_resume=True,
        at_least=1,
        aliases={"{}": "early_stopping_patience", "3": "early_stopping"},
    )
    best_metric: Literal["loss", "accuracy"] = validation_setting(
        "loss",
        "Figure of a validation that decides whether it is the best so far.",
        aliases={"{}": "metric_for_best_model"},
        words={"loss": "eval_loss val_loss", "accuracy": "eval_accuracy val_accuracy val_acc"},
    )
    best_weights: bool = validation_setting(
        False,
        "Test and `save` the weights of the best validation, which wait in a checkpoint, not the last ones.",
        aliases={"true": "load_best_model_at_end save_best"},
    )
    log_every: int | None = logging_setting(
        None, "Samples between two printed losses. Default: a tenth of an epoch, at most 4800.", at_least=1
    )
    logger: str = logging_setting(
        "csv",
        "Where to write figures during the run: `csv` (metrics.csv, always written), `tensorboard`, `trackio`, "
        "`mlflow`, `wandb`, or several, separated by commas.",
        changes_figures=False,
        metavar="NAME,…",
        aliases={"{}": "report_to"},
        words={"csv": "none"},
    )
    runs_dir: str = logging_setting(
        "runs",
        "Folder for the folders of all runs.",
        changes_figures=False,
        metavar="FOLDER",
        aliases={"{}": "log_dir logging_dir out_dir output output_dir"},
    )
    save: Literal["no", "sharded", "consolidated"] = checkpoint_setting(
        "no",
        "Save the trained weights in the run's folder: `consolidated`, for `model` here or in transformers; "
        "`sharded`, with the optimizer, for `load`.",
        for_beginners=True,
    )
    load: str | None = checkpoint_setting(
        None, "Sharded checkpoint to start from.", role=EQUAL, metavar="FOLDER", changes_figures=True
    )
    save_every: int = checkpoint_setting(
        0,
        "Optimizer steps between checkpoints, besides one after each epoch. 0: only at Ctrl-C or SIGTERM.",
        at_least=0,
        aliases={"{}": "checkpoint_every save_interval save_steps"},
    )
    keep: int = checkpoint_setting(
        1,
        "Number of newest checkpoints to keep, in addition to the one with the best validation (`best_metric`).",
        at_least=1,
        needs="save_every",
        aliases={"{}": "save_total_limit"},
    )
    resume: str = checkpoint_setting(
        "no",
        "Continue the newest run of the same settings (`auto`), or the run or checkpoint in a folder.",
        metavar="auto|FOLDER",
        for_beginners=True,
        aliases={"{}": "resume_from_checkpoint"},
        words={"auto": "true", "no": "false"},
    )
    # The script sets these, not the user: its name and strategy, the YAML file, and the first lines to print.
    name: str = ""
    strategy: Literal["single", "ddp", "fsdp", "deepspeed"] = "single"
    config: str | None = None
    notices: tuple[str, ...] = ()
    # `cli.resolve` sets it: a pass with fewer padded tokens takes as long as one with these
    full_pass: int = FULL_PASS
    # a rehearsal sets it: the last blocks, whose activations a memory budget has room for
    kept_blocks: int = 0

    @property
    def replays(self) -> bool:
        """Whether passes are replayed from CUDA graphs."""
        return self.cuda_graphs and self.accelerator == "cuda"

    @property
    def ranks(self) -> int:
        """Processes of the run, one for each device; known once the settings are parsed."""
        return self.devices * self.num_nodes

    @property
    def shards_weights(self) -> bool:
        """Whether each rank keeps only a part of each weight."""
        return self.strategy == "fsdp"

    @property
    def owns_optimizer(self) -> bool:
        """Whether an engine trains copies of the weights, wraps the optimizer and adds up the gradients.

        Nothing can undo a trial step then. The engine also skips steps whose gradient is not finite.
        """
        return self.strategy == "deepspeed"


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


def kinds_of(name: str) -> tuple[tuple[type, ...], tuple[str, ...]]:
    """Return the types of a setting's values, and the words that it takes."""
    hint = _hints()[name]
    parts = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    words = tuple(word for part in parts if typing.get_origin(part) is Literal for word in typing.get_args(part))
    return tuple(part for part in parts if typing.get_origin(part) is not Literal), words


@functools.cache
def _hints() -> dict[str, object]:
    return typing.get_type_hints(Settings)


def weight_decay(settings: Settings) -> float:
    """Return the weight decay of matrices: the share of a weight that a step takes, divided by the learning rate."""
    if settings.weight_decay is None:
        return 0.01 if settings.optimizer == "adamw" else 0.0
    return settings.weight_decay


def show(value: object) -> str:
    """Write a setting's value as on a command line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return "null" if value is None else str(value)
