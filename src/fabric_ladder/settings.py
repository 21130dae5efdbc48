"""The settings of a run: defaults in code, then the script's own, then a YAML file, then the command line."""

import os
from dataclasses import dataclass, field
from typing import Literal

import platformdirs

INTERNAL = ("name", "config", "notices")
GROUPS = {  # how `--help` and `--print_config` divide the settings: each group, and the first setting of it
    "data": "task", "model": "model", "optimization": "seed", "micro-batches": "batch_size",
    "memory": "activation_checkpointing", "devices": "devices", "logging": "log_every", "checkpoints": "save",
}  # fmt: skip
PRECISIONS = Literal["32-true", "mixed", "16-mixed", "bf16-mixed", "16-true", "bf16-true", "64-true"]


def _folder(variable: str) -> str:
    return os.path.expanduser(os.environ.get(variable, ""))


@dataclass(frozen=True)
class DataSettings:
    """Which texts or images to load, and how to make them into what a model reads.

    Args:
        task: What is learned, and with what kind of model: a class, or the answers to instructions.
        dataset: `imdb`, `synthetic`, a CSV, TSV, JSON, JSON Lines (each also as .gz) or Parquet file, a folder of such
            files (train, validation and test told by their names), or a name on the Hugging Face Hub, with a
            configuration as `glue:sst2`. Images: a folder with a folder for each class, or with `train`, `validation`
            and `test` that hold such folders, a tar or zip archive of either, or a name on the Hub. Instructions: such
            tables with the columns `instruction`, `output` and perhaps `input`, or `input` and `target`, or chat
            `messages`; the reviews are made into questions.
        data_dir: Folder in which files are looked for; it may be read-only. Default: $FABRIC_LADDER_DATA, else `data`.
        cache_dir: Folder for what is derived from them. Default: $FABRIC_LADDER_CACHE, else the user's cache folder.
        text_column: Column of the texts; of several, separated by commas, each text has a line of each.
        label_column: Column of the labels, integers or strings.
        column_names: Names of the columns of CSV and TSV files without a header, from the left, separated by commas.
        image_column: Column of the images of a data set on the Hub; where it has none of this name, its only one.
        validation_file: Validation texts for a `dataset` that is a file (default: 10 % of it).
        test_file: Test texts for a `dataset` that is a file (default: 20 % of it).
        train_samples: Keep only so many training samples, drawn by `split_seed`.
        validation_samples: The same for validation.
        test_samples: The same for the test.
        split_seed: Seed of what is split or drawn here; apart from `seed`, so that all seeds are tested on one set.
        max_length: Tokens kept of a text.
        image_size: Pixels of a side of the square that the model sees. Default: what the model was made for.
        resize_to: Resize images to a square of this side before the square that the model sees is cut out, at random
            in training and from the centre in evaluation. Default: `image_size`, so that nothing is cut off.
        random_flip: Mirror every other training image, drawn anew in each epoch.
        prompt_template: How an instruction becomes a prompt, say `Human: {instruction}\\n{input}\\nAssistant: `. Chat
            `messages` are written by the tokenizer's chat template instead. Default: Alpaca's wording.
        train_on_inputs: Train on the tokens of the prompts too, not on those of the answers alone.
        bad_samples: What to do about images that cannot be decoded, texts without a label and instructions without an
            answer: `refuse` to start, or `skip` and count them.
        model: A name on the Hugging Face Hub, a local folder, or a model's config file (with `from_scratch`).
        tokenizer: The tokenizer's Hub name or folder, or `trained` for a byte-pair encoding learned from the training
            texts. Default: the model's own, or `trained` when `model` is a config file.
    """

    task: Literal["text-classification", "image-classification", "instruction-tuning"] = "text-classification"
    dataset: str = "imdb"
    data_dir: str = field(default_factory=lambda: _folder("FABRIC_LADDER_DATA") or "data")
    cache_dir: str = field(
        default_factory=lambda: _folder("FABRIC_LADDER_CACHE") or platformdirs.user_cache_dir("fabric_ladder")
    )
    text_column: str = "text"
    label_column: str = "label"
    column_names: str | None = None
    image_column: str = "image"
    validation_file: str | None = None
    test_file: str | None = None
    train_samples: int | None = None
    validation_samples: int | None = None
    test_samples: int | None = None
    split_seed: int = 1
    max_length: int = 1024
    image_size: int | None = None
    resize_to: int | None = None
    random_flip: bool = False
    prompt_template: str | None = None
    train_on_inputs: bool = False
    bad_samples: Literal["refuse", "skip"] = "refuse"
    model: str = "bigscience/bloom-560m"
    tokenizer: str | None = None


@dataclass(frozen=True)
class Settings(DataSettings):
    """Everything that is set for a run.

    Args:
        from_scratch: Start from random weights of the model's config instead of pretrained ones. A `model` on the
            command line that is a folder or a name on the Hub is pretrained, unless this is given beside it.
        attention: `fused` computes attention by a kernel that keeps no matrix of tokens x tokens, for BLOOM and where
            transformers has it (as `sdpa`); `eager` makes this matrix for every model. They differ in rounding alone.
        lora: Train low-rank adapters (PEFT) and, for classification, the head; all other weights stay as they are.
        lora_rank: Rank of the adapters.
        lora_alpha: Adapters are scaled by `lora_alpha` / `lora_rank`.
        lora_dropout: Dropout of what enters the adapters.
        lora_targets: Linear layers that get adapters: their names, separated by commas, or `all-linear`. Default: the
            attention projections that PEFT takes for the architecture.
        dora: Weight-decomposed adapters: a trained length for each of the weight's directions.
        rslora: Scale adapters by `lora_alpha` / the square root of `lora_rank`.
        quantization: `nf4` keeps the weights that `lora` does not train in 4 bits (bitsandbytes, double quantisation).
        seed: Seed of weights, dropout and sample order.
        epochs: Passes over the training texts.
        optimizer: `adam-8bit` (bitsandbytes) and `adam-4bit` keep their state in 8 and 4 bits; `sgd` keeps none,
            `adafactor` hardly any.
        kahan_summation: Keep what rounding takes from the steps of 16-bit weights, in 2 bytes a weight, and add it to
            later steps: else a bfloat16 weight learns nothing from steps below a 512th of it.
        step_in_backward: Step each weight as soon as the backward pass has its gradient, and free that: no two
            gradients exist at the same time. The effective batch is one micro-batch, and its gradient is not clipped.
        optimizer_offload: Keep the optimizer's state in the host's memory and step there, during the backward pass.
        learning_rate: Learning rate of the optimizer; on the command line also that of `sgd` and of `lora`.
        sgd_learning_rate: Learning rate of `sgd`, whose steps are not scaled to the size of the gradient.
        lora_learning_rate: Learning rate with `lora`, in place of `learning_rate`.
        schedule: Course of the learning rate over the optimizer steps: `cosine` and `linear` end at 0.
        warmup_steps: Optimizer steps in which the learning rate rises to its full value.
        max_grad_norm: Clip the gradient to this 2-norm.
        on_nan: `stop` ends the run at the next printed line after a loss or gradient that is not finite; `skip` leaves
            such an effective batch out, for which it waits for the device in each step.
        nan_limit: Effective batches that `skip` may leave out before it stops the run.
        batch_size: Effective batch size: samples per optimizer step, over all devices.
        micro_batch_size: Samples of it in a device's memory at once. Default: all.
        micro_batch_tokens: Padded tokens in a device's memory at once, at most; takes the place of `micro_batch_size`.
            `auto` (from rung 3 on, unless `micro_batch_size` is set): as many as the GPU has room for by the prediction
            of the peak memory, up to 16384, halved where a trial runs out of memory; on a CPU, where more is slower,
            1024, unless the command line asks for the trial; on MPS one sample.
        eval_batch_tokens: Padded tokens of an evaluation's batch on each device. Default: on a CUDA GPU as many as the
            largest micro-batch of the training has, at least 4096; elsewhere 1024, since on a CPU more is slower.
        pad_to_multiple_of: Round the length of every micro-batch up to a multiple of so many tokens. Default: 16 with
            `compile`, `packing` or on `mps`, where `max_length` is such a multiple; else 1.
        packing: Let short texts share a row of up to `max_length` tokens, in which they do not see each other, in
            training and in evaluation; then `micro_batch_size` counts rows.
        pack_rows: Make every micro-batch and every batch of the evaluation of exactly so many rows of `max_length`
            tokens, for kernels that are made for one shape; takes the place of `micro_batch_size` and of
            `eval_batch_tokens`.
        num_workers: Processes that make batches; 0 makes them in the training process, while the device computes what
            it was given before, and is enough for texts. Images that must be enlarged or cut out may want 2 or more.
        activation_checkpointing: Keep only the inputs of the transformer blocks and compute the rest again (not
            reentrant), for the backward pass.
        activation_offload: With `activation_checkpointing`, keep those inputs in the host's memory.
        selective_checkpointing: With `activation_checkpointing`, keep the results of attention and of matrix products
            too, and compute only the rest again.
        loss_chunk: Tokens whose logits over the vocabulary exist at once, for the loss of a language model.
        offload: Park what FSDP shards in the host's memory, and let the optimizer step there.
        deepspeed: DeepSpeed configuration: a JSON file, or the name of one in `configs/deepspeed/`.
        predict_memory: Predict the peak memory before the first step, and compare it with the measured one at the end.
            Default: on a GPU.
        devices: Devices of a machine: a number, or `auto` for all GPUs, or what the launcher says.
        num_nodes: Machines on which the script is started.
        accelerator: `auto` takes the CUDA GPU when there is one, else the CPU; `mps` is Apple silicon's GPU.
        threads: PyTorch's threads on the CPU. Default: as many as it finds cores.
        precision: Fabric's name of the precision; `mixed` is `bf16-mixed`, or on GPUs below compute capability 8.0,
            which only emulate bfloat16, `16-mixed` (under FSDP `32-true`).
        matmul_precision: Precision within products of 32-bit matrices: `high` (on a GPU TF32, 10 bits of mantissa) and
            `medium` (bfloat16) are faster. Default: `high` on a GPU, `highest` (all 23 bits) on a CPU.
        float8: Compute the products of linear layers in 8-bit floating point (torchao), on GPUs of compute capability
            8.9 (Ada, Hopper) and above; a CPU emulates it. Slower than 16 bits without `compile`.
        compile: `torch.compile` the layers of the model, one graph for all of them and for all lengths, before the
            first step; what it makes is kept in `cache_dir`.
        deterministic: Equal runs give equal bits on a GPU too, by PyTorch's deterministic algorithms: they are slower,
            and the run stops at an operation that has none. On a CPU equal runs are equal without it.
        check_only: Say whether the run could start here, and do nothing else.
        log_every: Samples between two printed losses. Default: a tenth of an epoch, at most 4800.
        logger: Where the figures go while the run goes on: `csv` is metrics.csv in the run's folder, which every run
            has; `tensorboard`, `trackio`, `mlflow` and `wandb` (Weights & Biases) draw curves live, too. Several are
            separated by commas.
        runs_dir: Folder that gets a folder for every run.
        save: Save what was trained into the run's folder: `sharded` for `load` (model and optimizer), `consolidated`
            for `model`, here or in transformers.
        load: Sharded checkpoint to start from.
        save_every: Optimizer steps between two checkpoints to go on from, which are also written after each epoch; 0:
            only when the run is stopped by Ctrl-C, SIGTERM or `max_time`.
        keep: How many of the newest checkpoints stay, besides the one with the lowest validation loss.
        resume: Go on with the newest run of the same settings (`auto`), or from the folder of a run or a checkpoint.
        max_time: Minutes after which the run stops as by SIGTERM, and can go on by `resume`.
    """

    from_scratch: bool = False
    attention: Literal["fused", "eager"] = "fused"
    lora: bool = False
    lora_rank: int = 8
    lora_alpha: int = 32
    lora_dropout: float = 0.1
    lora_targets: str | None = None
    dora: bool = False
    rslora: bool = False
    quantization: Literal["no", "nf4"] = "no"
    seed: int = 123
    epochs: int = 1
    optimizer: Literal["adam", "adamw", "sgd", "adafactor", "adam-8bit", "adam-4bit"] = "adam"
    kahan_summation: bool = False
    step_in_backward: bool = False
    optimizer_offload: bool = False
    learning_rate: float = 5e-5
    sgd_learning_rate: float = 1e-2
    lora_learning_rate: float = 2e-4
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    max_grad_norm: float | None = None
    on_nan: Literal["stop", "skip"] = "stop"
    nan_limit: int = 10
    batch_size: int = 1
    micro_batch_size: int | None = None
    micro_batch_tokens: int | Literal["auto"] | None = None
    eval_batch_tokens: int | None = None
    pad_to_multiple_of: int | None = None
    packing: bool = False
    pack_rows: int | None = None
    num_workers: int = 0
    activation_checkpointing: bool = False
    activation_offload: bool = False
    selective_checkpointing: bool = False
    loss_chunk: int = 256
    offload: bool = False
    deepspeed: str | None = None
    predict_memory: bool | None = None
    devices: int | Literal["auto"] = 1
    num_nodes: int = 1
    accelerator: Literal["auto", "cuda", "mps", "cpu"] = "auto"
    threads: int | None = None
    precision: PRECISIONS = "32-true"
    matmul_precision: Literal["highest", "high", "medium"] | None = None
    float8: bool = False
    compile: bool = False
    deterministic: bool = False
    check_only: bool = False
    log_every: int | None = None
    logger: str = "csv"
    runs_dir: str = "runs"
    save: Literal["no", "sharded", "consolidated"] = "no"
    load: str | None = None
    save_every: int = 0
    keep: int = 1
    resume: str = "no"
    max_time: float | None = None
    # not the user's to set: the script's name, the YAML file that was read, and what to print first
    name: str = ""
    config: str | None = None
    notices: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        """Processes of the run, one for each device; known once the settings are parsed."""
        return self.devices * self.num_nodes
