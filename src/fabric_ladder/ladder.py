"""The ladder as a table: one row for each technique and each rung.

A row states the setting, the rung, the conflicts, what the planner tries, and what to try when memory runs out. The
modules of `techniques/` hold the mechanisms. Importing this module needs no torch.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from fabric_ladder.settings import Settings

ALONE: tuple[tuple[str, ...], ...] = ((),)
CHECKPOINTING = ("--activation_checkpointing", "true")
ALONE_OR_CHECKPOINTED = (*ALONE, CHECKPOINTING)
FAST = ("--packing", "true", "--compile", "true")
ON_HOST = ("--optimizer_offload", "true")
IN_4_BITS = ("--quantization", "nf4")
ADAM_IN_4_BITS = ("--optimizer", "adam-4bit")
LEAN = ("--precision", "bf16-true", "--optimizer", "sgd")
OFFLOADING_STAGES = ("zero2_offload", "zero3_offload")
ZERO_STAGES = ("zero1", "zero2", "zero2_offload", "zero3", "zero3_offload")
LONG = 4096  # tokens: two tiles that are large enough for a GPU

SHARDED = "sharded weights"  # stands in `conflicts` for each technique that shards them


class Step(NamedTuple):
    """What to try when memory runs out.

    Attributes:
        rung: The script, for example `18_low_bit_optimizer`; None: the same script with other options.
        reason: How it saves memory, as in "it …".
        options: Options that it needs, as words of a command line: `("--packing", "true")`.
        replaces: Settings that it decides itself: the user's own are left out of the command.
        of_state: Whether it saves the optimizer's state alone, which adapters and SGD hardly have.
        when: Whether it helps with these settings.
    """

    rung: str | None
    reason: str
    options: tuple[str, ...] = ()
    replaces: tuple[str, ...] = ()
    of_state: bool = False
    when: Callable[[Settings], bool] = lambda settings: True


class Row(NamedTuple):
    """The facts about a technique, or about a rung that is a change of the script alone.

    Attributes:
        setting: The field of `Settings` that switches the technique on, or a name of its own; empty: no technique.
        rung: The script that shows the technique; empty for a technique without a rung of its own.
        group: The heading of the rung in tables: what it saves or uses.
        title: Its words in tables, below this heading.
        mechanism: The module of `techniques/` and the class that act on the training; empty: the script alone does.
        values: The values of `setting` that use the technique; empty: all but false, null and `no`.
        conflicts: Keys of rows that it cannot be used with, each with the reason and the remedy.
        plans: The planner tries the rung with each of these options; empty: it leaves the rung out.
        on_one_gpu: What it tries on one GPU; None: `plans`.
        short_name: Its name in the names of plans, where the planner adds it to a rung.
        tries: What to try when memory runs out; the first that helps is named.
        leads: Whether its `tries` are the advice on every rung that uses it.
        anywhere: How it saves memory as an option of any rung; empty: it is not advised so.
        in_training: Whether it saves memory in the training alone.
        stays: Whether the advice keeps it on the way to another rung.
        exact: Whether the losses are those of a run without it, apart from rounding; tests compare them.
    """

    setting: str
    rung: str = ""
    group: str = ""
    title: str = ""
    mechanism: str = ""
    values: tuple[str, ...] = ()
    conflicts: Mapping[str, str] = MappingProxyType({})
    plans: tuple[tuple[str, ...], ...] = ALONE
    on_one_gpu: tuple[tuple[str, ...], ...] | None = None
    short_name: str = ""
    tries: tuple[Step, ...] = ()
    leads: bool = False
    anywhere: str = ""
    in_training: bool = False
    stays: bool = False
    exact: bool = False

    @property
    def key(self) -> str:
        """The setting, with the value that uses the technique if the setting has others too."""
        return f"{self.setting}={self.values[0]}" if self.values else self.setting

    def planned(self, gpus: int) -> tuple[tuple[str, ...], ...]:
        """Return the options that the planner tries on N GPUs."""
        return self.on_one_gpu if gpus == 1 and self.on_one_gpu is not None else self.plans


IN_16_BITS = Step("5_low_precision", "halves weights, gradients and optimizer state", replaces=("precision",))
WITHOUT_STATE = Step(
    "6_lean_optimizer", "keeps no optimizer state", replaces=("optimizer", "schedule", "learning_rate"), of_state=True
)
ADAPTERS = Step(
    "13_lora", "trains thin adapters and keeps no gradient of the model", replaces=("lora", "learning_rate")
)
TILES = Step(
    None,
    "computes the MLP over tiles of a long text, as 23_tiled_mlp does",
    options=("--mlp_tile", str(LONG // 2)),
    when=lambda settings: (
        not settings.mlp_tile and settings.task != "image-classification" and settings.max_length >= LONG
    ),
)
INPUTS_ON_HOST = Step(
    None, "keeps the inputs of blocks in CPU memory", (*CHECKPOINTING, "--activation_offload", "true")
)
ALL_BLOCKS = Step(
    None, "streams all blocks", ("--stream_layers", "true"), when=lambda settings: settings.stream_layers is not True
)
STATE_ON_HOST = "keeps the optimizer's state in CPU memory"
WEIGHTS_ON_HOST = Step("11_fsdp_cpu_offload", "keeps weights in CPU memory", replaces=("offload", "optimizer"))
BY_WEIGHT = {SHARDED: "not on sharded weights; leave it out (rung 11 steps in CPU memory)"}

# The order matters:
# - A low-bit optimizer or SinkGD replaces the optimizer's class, and Kahan and the steps by weight derive their class
#   from it.
# - Packing wraps the forward pass, the chunked loss included.
# - Frozen blocks are not checkpointed.
# - Adapters wrap the whole model, with its forward pass and checkpointing.
# - Weights that adapters left frozen are streamed, in their final layers.
# - Float8 converts only layers that the adapters left frozen.
# - The compiler needs the final layers.
# - The formulas of ZeRO replace what those of other techniques add.
LADDER = (
    Row("", "1_batch_size_1", group="base", title="one sample per step, 32-bit, Adam", tries=(IN_16_BITS,)),
    Row("", "2_grad_accum", group="base", title="gradient accumulation", tries=(IN_16_BITS,)),
    Row(
        "",
        "8_init_on_device",
        group="weights",
        title="weights made on the GPU, without a copy in CPU memory",
        tries=(IN_16_BITS,),
    ),
    Row(
        "precision",
        "5_low_precision",
        group="weights",
        title="everything in bfloat16",
        mechanism="low_precision.LowPrecision",
        values=("bf16-true", "16-true"),
        tries=(WITHOUT_STATE,),
    ),
    Row(
        "precision",
        "4_mixed_precision",
        group="time",
        title="16-bit computation, 32-bit weights",
        mechanism="mixed_precision.MixedPrecision",
        values=("bf16-mixed", "16-mixed"),
        plans=ALONE_OR_CHECKPOINTED,
        tries=(IN_16_BITS,),
    ),
    Row(
        "strategy",
        "10_fsdp",
        group="several GPUs",
        title="FSDP2: weights, gradients and optimizer state sharded",
        mechanism="sharding.FSDP",
        values=("fsdp",),
        plans=ALONE_OR_CHECKPOINTED,
        on_one_gpu=(),
        tries=(WEIGHTS_ON_HOST._replace(replaces=("offload",)),),
    ),
    Row(
        "optimizer",
        "18_low_bit_optimizer",
        group="optimizer state",
        title="Adam's moments in 8 or 4 bits",
        mechanism="low_bit_optimizer.LowBitOptimizer",
        values=("adam-8bit", "adam-4bit"),
        conflicts={
            "optimizer_offload": "with --optimizer_offload true a step takes many times as long as plain Adam's, and "
            "frees no memory of the GPU; use --optimizer adam",
        },
        plans=((), CHECKPOINTING, ADAM_IN_4_BITS, (*ADAM_IN_4_BITS, *CHECKPOINTING)),
        tries=(
            Step(None, "halves Adam's moments again", ADAM_IN_4_BITS, replaces=("resume",), of_state=True),
            Step("19_optimizer_offload", STATE_ON_HOST, replaces=("optimizer",), of_state=True),
        ),
    ),
    Row(
        "optimizer",
        "6_lean_optimizer",
        group="optimizer state",
        title="SGD, which keeps no state",
        mechanism="lean_optimizer.LeanOptimizer",
        values=("sgd",),
        plans=ALONE_OR_CHECKPOINTED,
        tries=(ADAPTERS,),
    ),
    Row(
        "optimizer",
        "26_stateless",
        group="optimizer state",
        title="SinkGD, which learns without state",
        mechanism="sinkgd.Stateless",
        values=("sinkgd",),
        plans=ALONE_OR_CHECKPOINTED,
        tries=(
            Step(
                None,
                "keeps no gradients either",
                options=("--step_in_backward", "true", "--micro_batch_tokens", "null"),
                replaces=("micro_batch_size",),
                when=lambda settings: (  # several would need all their activations together
                    settings.batch_size == 1 and not settings.step_in_backward
                ),
            ),
            ADAPTERS,
        ),
    ),
    Row(
        "kahan_summation",
        "16_bf16_that_learns",
        group="weights",
        title="bfloat16 with Kahan summation",
        mechanism="kahan.KahanSummation",
        conflicts={
            "lora": "adapters are trained in 32-bit, which loses nothing; leave it out",
            SHARDED: "not on sharded weights; leave it out, and use --precision bf16-mixed, whose weights lose nothing",
        },
        plans=(*ALONE_OR_CHECKPOINTED, FAST, (*FAST, *CHECKPOINTING)),
        tries=(Step("18_low_bit_optimizer", "keeps Adam's moments in 8 bits", replaces=("optimizer",), of_state=True),),
    ),
    Row(
        "step_in_backward",
        "17_step_in_backward",
        group="gradients",
        title="the optimizer steps inside the backward pass",
        mechanism="weight_steps.StepInBackward",
        exact=True,
        conflicts=BY_WEIGHT,
        plans=(*ALONE_OR_CHECKPOINTED, (*ON_HOST, *CHECKPOINTING)),
        tries=(
            Step(None, STATE_ON_HOST, ON_HOST, of_state=True, when=lambda settings: "bit" not in settings.optimizer),
            Step(
                None,
                "keeps the state of plain Adam in CPU memory",
                (*ON_HOST, "--optimizer", "adam"),
                of_state=True,
                when=lambda settings: "bit" in settings.optimizer,
            ),
            Step(
                "29_streamed_training",
                "keeps the weights of the blocks in CPU memory",
                replaces=("stream_layers", "optimizer_offload"),
            ),
        ),
    ),
    Row(
        "optimizer_offload",
        "19_optimizer_offload",
        group="optimizer state",
        title="the optimizer on the CPU",
        mechanism="weight_steps.OptimizerOffload",
        exact=True,
        conflicts=BY_WEIGHT,
        plans=ALONE_OR_CHECKPOINTED,
        short_name="optimizer offload",
        tries=(WEIGHTS_ON_HOST._replace(reason="keeps weights there too"),),
    ),
    Row("embedding_rows", mechanism="embedding_rows.EmbeddingRows", exact=True),  # no setting: it is always on
    Row(
        "attention",
        mechanism="fused_attention.FusedAttention",
        exact=True,
        values=("fused", "varlen"),
        anywhere="keeps no matrix of tokens x tokens",
    ),
    Row("loss_chunk", mechanism="chunked_loss.ChunkedLoss", exact=True),
    Row(
        "packing",
        "15_packing",
        group="time",
        title="short texts share a row",
        mechanism="packing.Packing",
        exact=True,
        plans=ALONE_OR_CHECKPOINTED,
        short_name="packing",
        tries=(IN_16_BITS,),
        stays=True,
    ),
    Row(
        "activation_checkpointing",
        "7_grad_checkpointing",
        group="activations",
        title="recompute activations",
        mechanism="checkpointing.ActivationCheckpointing",
        exact=True,
        short_name="checkpointing",
        tries=(
            TILES,
            WITHOUT_STATE,
        ),
        anywhere="recomputes activations",
        in_training=True,
        stays=True,
    ),
    Row(
        "memory_budget",
        "28_memory_budget",
        group="activations",
        title="recompute only the blocks that have no room",
        mechanism="memory_budget.MemoryBudget",
        exact=True,
        plans=(),  # each micro-batch size would be rehearsed several times, and no speed is measured
        tries=(
            Step(None, "recomputes all blocks", ("--memory_budget", "null")),
            Step("7_grad_checkpointing", "recomputes all blocks"),
        ),
        leads=True,
    ),
    Row(
        "activation_offload",
        "20_activation_offload",
        group="activations",
        title="checkpointed activations in CPU memory",
        mechanism="checkpointing.ActivationOffload",
        exact=True,
        conflicts={"compile": "torch.compile skips such blocks; use --compile false"},
        tries=(TILES, WITHOUT_STATE),
        stays=True,
    ),
    Row(
        "selective_checkpointing",
        "21_selective_checkpointing",
        group="activations",
        title="recompute only cheap activations",
        mechanism="checkpointing.SelectiveCheckpointing",
        exact=True,
        tries=(Step(None, "recomputes matrix multiplications too", ("--selective_checkpointing", "false")),),
    ),
    Row(
        "mlp_tile",
        "23_tiled_mlp",
        group="activations",
        title="the MLP over tiles of a long text",
        mechanism="tiled_mlp.TiledMLP",
        exact=True,
        conflicts={
            "compile": "torch.compile would compile a graph for each number of tiles; use --compile false",
            "selective_checkpointing": "selective checkpointing keeps what tiles recompute; leave one of them out",
        },
        tries=(WITHOUT_STATE,),
        stays=True,
    ),
    Row(
        "train_blocks",
        mechanism="freezing.Freezing",
        conflicts={
            "lora": "adapters freeze all blocks by themselves; leave one of them out",
            "stream_layers": "streamed blocks are all trained, or have adapters; leave one of them out",
        },
    ),
    Row(
        "block_steps",
        "25_block_by_block",
        group="weights",
        title="one block is trained at a time",
        mechanism="block_by_block.BlockByBlock",
        conflicts={
            "lora": "adapters freeze all blocks; leave one of them out",
            "train_blocks": "both choose the trained blocks; leave one of them out",
            SHARDED: "not on sharded weights; leave it out",
            "kahan_summation": "the trained block has a copy in 32 bits, which loses nothing; use --kahan_summation "
            "false",
            "step_in_backward": "gradients and state of one block are small; use --step_in_backward false",
            "optimizer_offload": "gradients and state of one block are small; use --optimizer_offload false",
        },
        plans=ALONE_OR_CHECKPOINTED,
        tries=(
            Step(
                "14_qlora",
                "keeps the weights in 4 bits and trains thin adapters",
                options=CHECKPOINTING,
                replaces=("block_steps", "optimizer", "learning_rate"),
            ),
        ),
    ),
    Row(
        "train_tokens",
        mechanism="token_rows.TokenRows",
        conflicts={
            SHARDED: "not tested on sharded weights; leave it out",
            "cuda_graphs": "PEFT sends the rows' numbers to the GPU in each pass, which a graph cannot record; use "
            "--cuda_graphs false",
        },
    ),
    Row(
        "lora",
        "13_lora",
        group="weights",
        title="low-rank adapters",
        mechanism="lora.LoRA",
        plans=ALONE_OR_CHECKPOINTED,
        tries=(Step("14_qlora", "keeps the model in 4 bits", replaces=("quantization",)),),
        stays=True,
    ),
    Row(
        "quantization",
        "14_qlora",
        group="weights",
        title="adapters on 4-bit weights",
        mechanism="qlora.QLoRA",
        plans=ALONE_OR_CHECKPOINTED,
        tries=(
            Step(
                "24_streamed_layers",
                "keeps the 4-bit blocks in CPU memory",
                when=lambda settings: settings.accelerator == "cuda",
            ),
            Step("10_fsdp", "shards the 4-bit weights", replaces=("offload", "optimizer")),
            WEIGHTS_ON_HOST,
        ),
        leads=True,
        stays=True,
    ),
    Row(
        "stream_layers",
        "24_streamed_layers",
        group="weights",
        title="frozen blocks in CPU memory",
        mechanism="streamed_layers.StreamedLayers",
        exact=True,
        conflicts={
            SHARDED: "not on sharded weights; leave it out (rung 11 keeps them in CPU memory)",
            "compile": "torch.compile would compile each block apart from its copies; use --compile false",
        },
        plans=tuple((*bits, *more) for bits in ((), IN_4_BITS) for more in ALONE_OR_CHECKPOINTED),
        short_name="streamed",
        tries=(ALL_BLOCKS, INPUTS_ON_HOST),
    ),
    Row(
        "",
        "29_streamed_training",
        group="weights",
        title="all weights trained in CPU memory, two blocks on the GPU",
        tries=(ALL_BLOCKS, INPUTS_ON_HOST),
    ),
    Row(
        "float8",
        "22_float8",
        group="time",
        title="matrix multiplications in 8 bits",
        mechanism="float8.Float8",
        conflicts={
            "stream_layers": "not with --stream_layers true, which has layers of its own; leave one of them out",
            "cuda_graphs": "not tested with --cuda_graphs true; leave one of them out",
        },
        plans=(),  # it saves time, and little memory
        tries=(IN_16_BITS,),
    ),
    Row(
        "compile",
        "3_torch_compile",
        group="time",
        title="`torch.compile`",
        mechanism="compile.Compile",
        exact=True,
        short_name="compile",
        tries=(IN_16_BITS,),
    ),
    Row(
        "cuda_graphs",
        "27_cuda_graphs",
        group="time",
        title="one launch for all kernels of a pass",
        mechanism="cuda_graphs.CudaGraphs",
        exact=True,
        conflicts={
            "strategy=ddp": "only on one device, since several send gradients within a pass; leave it out",
            SHARDED: "only on one device with whole weights; leave it out",
            "optimizer=adam-8bit": "not tested with low-bit optimizers; use --optimizer adam, or leave it out",
            "step_in_backward": "gradients must stay where a graph writes them; leave one of them out",
            "optimizer_offload": "gradients must stay where a graph writes them; leave one of them out",
            "block_steps": "each block would need graphs of its own; leave one of them out",
            "activation_offload": "a graph cannot wait for CPU memory; leave one of them out",
            "stream_layers": "a graph cannot wait for CPU memory; leave one of them out",
            "quantization": "not tested with 4-bit weights; leave one of them out",
            "compile": "not tested with compiled layers; leave one of them out",
        },
        plans=(),  # it saves time, and no memory
        tries=(Step(None, "frees gradients between steps, and has no pool", ("--cuda_graphs", "false")),),
        leads=True,
    ),
    Row(
        "strategy",
        "9_ddp",
        group="several GPUs",
        title="data parallel",
        mechanism="sharding.DDP",
        values=("ddp",),
        plans=ALONE_OR_CHECKPOINTED,
        on_one_gpu=(),
        tries=(
            Step("10_fsdp", "shards weights, gradients and optimizer state", replaces=("offload", "optimizer")),
            IN_16_BITS,
        ),
    ),
    Row(
        "offload",
        "11_fsdp_cpu_offload",
        group="several GPUs",
        title="FSDP with the shards in CPU memory",
        mechanism="sharding.CpuOffload",
        exact=True,
        plans=(CHECKPOINTING, (*LEAN, *CHECKPOINTING)),  # checkpointing costs less speed than offloading
        tries=(
            Step(
                None,
                "trains thin adapters alone",
                options=("--precision", "bf16-true", "--lora", "true"),
                replaces=("train_blocks",),
            ),
        ),
    ),
    Row(
        "deepspeed",
        "12_deepspeed_zero",
        group="several GPUs",
        title="DeepSpeed ZeRO",
        mechanism="sharding.DeepSpeed",
        plans=tuple(("--deepspeed", stage, *more) for stage in ZERO_STAGES for more in ALONE_OR_CHECKPOINTED),
        on_one_gpu=tuple(  # there is nothing to shard
            ("--deepspeed", stage, *more) for stage in OFFLOADING_STAGES for more in ALONE_OR_CHECKPOINTED
        ),
        tries=(Step(None, "keeps weights in CPU memory", ("--deepspeed", "zero3_offload"), replaces=("optimizer",)),),
    ),
)


def row_of(rung: str) -> Row:
    """Return the row of a rung, given by its script's name; an empty row for a script of the user's own."""
    return next((row for row in LADDER if row.rung == rung), Row("", rung, tries=(IN_16_BITS,)))
