"""Measure single operations: attention, streamed layers, optimizers, loss, embedding gradients.

    python benchmarks/operations.py --help                   lists the commands
    python benchmarks/operations.py COMMAND --help           lists the options of a command

Sides take turns, and the median of `--repeats` passes counts, after one to warm up. Peaks are bytes of live tensors
without the inputs. `loss` stores its figures in results/chunked_loss.json, `embeddings` in
results/embedding_gradients.json, `bfloat16` in results/cpu_bfloat16.json.
"""

import argparse
import copy
import json
import runpy
import statistics
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from time import perf_counter

import common  # first import: it makes the project importable
import torch
from lightning import Fabric, seed_everything
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy, linear, scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
)
from transformers.loss.loss_utils import ForCausalLMLoss

import fabric_ladder
from fabric_ladder import build_model, parse_settings
from fabric_ladder.environment import cpu_has_fast_bfloat16, keep_freed_memory, peak_memory, reset_peak_memory
from fabric_ladder.models.cpu_bfloat16 import compute_in_32_bits, restore_bfloat16
from fabric_ladder.planning.predict import blank_datasets
from fabric_ladder.planning.tracker import PeakTracker
from fabric_ladder.techniques import streamed_layers
from fabric_ladder.techniques.chunked_loss import chunked_loss
from fabric_ladder.techniques.embedding_rows import add_rows, adding_rows
from fabric_ladder.techniques.fused_attention import fuse_attention
from fabric_ladder.techniques.memory import streamed_weights
from fabric_ladder.techniques.packing import support_packing
from fabric_ladder.training.state import Training

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ATTENTION_ROWS = 16 if DEVICE.type == "cuda" else 2  # 16,384 tokens on a GPU: fewer would time the launches
KERNELS = {  # the kernel, and part of the name of PyTorch's operator
    "flash": (SDPBackend.FLASH_ATTENTION, "flash_attention"),
    "memory-efficient": (SDPBackend.EFFICIENT_ATTENTION, "efficient_attention"),
    "cuDNN": (SDPBackend.CUDNN_ATTENTION, "cudnn_attention"),
    "math": (SDPBackend.MATH, "_math"),
}
MODES = {  # dtype, and precision of 32-bit matrix multiplications
    "32-bit": (torch.float32, "highest"),
    "TF32": (torch.float32, "high"),
    "bfloat16": (torch.bfloat16, "highest"),
    "float16": (torch.float16, "highest"),
}
BATCHES = ("full", "padded", "packed", "packed, language model", "packed, BERT", "packed, Llama",
           "packed, Llama, language model")  # fmt: skip
PRECISIONS = ("float32", "bfloat16")


def turns(sides: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Return the median seconds of each side. The sides take turns, and a first turn warms up."""
    synchronize = torch.cuda.synchronize if DEVICE.type == "cuda" else lambda: None
    seconds = {name: [] for name in sides}
    for _ in range(1 + repeats):
        for name, run in sides.items():
            synchronize()
            start = perf_counter()
            run()
            synchronize()
            seconds[name].append(perf_counter() - start)
    return {name: statistics.median(each[1:]) for name, each in seconds.items()}


def ceilings(args: argparse.Namespace) -> dict:
    """Return the bytes/s of a copy, and the FLOP/s of a product of 8192 x 8192 matrices (on a CPU 256 x 256)."""
    size = 8192 if DEVICE.type == "cuda" else 256
    matrix, target = torch.randn(2, size, size, device=DEVICE).half()
    seconds = turns({"copy": lambda: target.copy_(matrix), "product": lambda: matrix @ target}, args.repeats)
    copied, flops = 2 * matrix.nbytes / seconds["copy"], 2 * size**3 / seconds["product"]
    return {"copy_bytes_per_second": copied, "product_flops": flops}


def attention_pass(parts: list[Tensor]) -> None:
    """Run causal attention forward and backward on query, key and value of shape (rows, heads, tokens, width)."""
    scaled_dot_product_attention(*parts, is_causal=True).sum().backward()


def chosen_kernel(parts: list[Tensor]) -> str:
    """Return the name of the kernel that PyTorch chooses."""
    problem = ""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        try:
            attention_pass(parts)
        except RuntimeError as error:  # the chosen kernel has no backward pass
            problem = f" (fails: {str(error).splitlines()[0][:80]})"
    names = " ".join(event.key for event in profiler.key_averages() if "scaled_dot_product" in event.key)
    found = {kernel for kernel, (_, part) in KERNELS.items() if part in names}
    return (" and ".join(sorted(found)) or "unknown") + problem


def attention(args: argparse.Namespace) -> dict:
    """Time all kernels of attention for all dtypes and head widths, forward and backward, and name PyTorch's choice.

    The heads of BLOOM's fused attention (techniques/fused_attention.py) are 8 wider than a power of two.
    """
    torch.set_float32_matmul_precision("high")  # the rungs' setting on a GPU
    rows = []
    for dtype, width in product((torch.bfloat16, torch.float16, torch.float32), args.width):
        shape = (ATTENTION_ROWS, args.heads, args.tokens, width)
        parts = [torch.randn(shape, dtype=dtype, device=DEVICE, requires_grad=True) for _ in range(3)]
        row = {"dtype": str(dtype).removeprefix("torch."), "width": width, "chosen": chosen_kernel(parts)}
        for name, (kernel, _) in KERNELS.items():
            try:
                with sdpa_kernel(kernel):
                    row |= turns({name: partial(attention_pass, parts)}, args.repeats)
            except RuntimeError:  # the kernel refuses these tensors, or memory is short
                row[name] = None
        rows.append(row)
    return {"heads": args.heads, "rows_of_inputs": ATTENTION_ROWS, "tokens": args.tokens, "rows": rows}


def config_of(kind: str, heads: int) -> PreTrainedConfig:
    """Return the config of a model of two layers, 128 wide, without dropout."""
    name = next((name for name in ("BERT", "Llama") if name in kind), "BLOOM").lower()
    sizes = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "pad_token_id": 0, "use_cache": False}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": heads}
    return AutoConfig.for_model(name, **sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


def gradients(_: argparse.Namespace) -> dict:
    """Compare gradients of tiny models, fused, packed and padded, with eager attention in 32-bit.

    An error of up to 1.5 times eager attention's own error in the same dtype passes.
    """
    found = {}
    for (width, heads), kind in product(((64, 2), (128, 1)), BATCHES):
        torch.manual_seed(0)
        ids = torch.randint(4, 256, (4, 120))
        visible = torch.arange(120) < torch.tensor([[120], [77], [30], [5]])
        packed = "packed" in kind
        model_class = AutoModelForCausalLM if "language" in kind else AutoModelForSequenceClassification
        eager = model_class.from_config(config_of(kind, heads), attn_implementation="eager")
        fused = model_class.from_config(config_of(kind, heads))
        with torch.no_grad():
            for weight in eager.parameters():  # with initial weights attention hardly matters
                if weight.dim() == 2:
                    weight.normal_(0, weight.shape[-1] ** -0.5)
        fused.load_state_dict(eager.state_dict())
        fuse_attention(fused)
        if packed:
            support_packing(fused, ids.numel())
        mask = visible if kind != "full" else torch.ones_like(visible)
        exact = gradient(eager, ids, mask, "32-bit")
        for mode in MODES:
            mine = {"eager": gradient(eager, ids, mask, mode), "fused": gradient(fused, ids, mask, mode, packed)}
            if packed:
                mine["fixed"] = gradient(fused, ids, mask, mode, packed, cudnn=True)
            error = {name: ((each - exact).norm() / exact.norm()).item() for name, each in mine.items()}
            right = max(error.values()) <= 1.5 * error["eager"] + 1e-5
            found[f"{kind}, heads of {width}, {mode}"] = error | {"right": right}
    return {"passed": all(each["right"] for each in found.values()), "errors": found}


def gradient(
    model: nn.Module, ids: Tensor, mask: Tensor, mode: str, packed: bool = False, cudnn: bool = False
) -> Tensor:
    """Return the gradient of all weights as one 64-bit vector.

    Args:
        model: A classifier, or a causal language model that predicts every token except each sample's first.
        ids: Token ids (rows, tokens).
        mask: Like `ids`; False for padding.
        mode: One of `MODES`.
        packed: Put all samples into one row.
        cudnn: Allow cuDNN's kernel, which the rungs use only for rows of one shape (models/kernels.py).
    """
    dtype, precision = MODES[mode]
    torch.set_float32_matmul_precision(precision)
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    is_language_model = model.get_output_embeddings() is not None
    model = copy.deepcopy(model).to(DEVICE, dtype)
    ids, mask = (ids * mask).to(DEVICE), mask.to(DEVICE)  # a classifier finds the last token by the padding id 0
    inputs = {"input_ids": ids, "attention_mask": mask.long()}
    following = mask[:, 1:]
    if packed:
        positions = torch.arange(ids.shape[1], device=DEVICE).expand_as(ids)
        inputs = {"input_ids": ids[mask][None], "position_ids": positions[mask][None]}
        following = inputs["position_ids"][:, 1:] > 0
        if not is_language_model:
            ends = mask.sum(1).cumsum(0)
            inputs["spans"] = torch.stack([ends - mask.sum(1), ends], 1)
    logits = model(**inputs).logits.float()
    targets = torch.arange(len(ids), device=DEVICE) % 2
    if is_language_model:
        logits, targets = logits[:, :-1][following], inputs["input_ids"][:, 1:][following]
    (1024 * cross_entropy(logits, targets)).backward()  # loss scaling for float16
    found = [part.grad.double().flatten().cpu() / 1024 for part in model.parameters() if part.grad is not None]
    return torch.cat(found)


def random_batch(vocabulary: int, rows: int, tokens: int, device: str | torch.device) -> dict[str, Tensor]:
    """Return the inputs of a classifier: full rows of random tokens, and labels of two classes."""
    ids = torch.randint(4, vocabulary, (rows, tokens), device=device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.arange(rows, device=device) % 2}


def one_pass(model: nn.Module, inputs: dict[str, Tensor]) -> None:
    """Compute the loss and its gradients."""
    model(**inputs).loss.backward()


def random_weights(args: argparse.Namespace) -> dict:
    """Write a model with the config `config` to `folder`; return the number of its weights."""
    config = AutoConfig.for_model(**json.loads(args.config.read_text(encoding="utf-8")))
    torch.set_default_dtype(torch.bfloat16)
    with DEVICE:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(args.folder, max_shard_size="4GB")
    return {"parameters": sum(weight.numel() for weight in model.parameters())}


def streamed(args: argparse.Namespace) -> dict:
    """Compare gradients of streamed blocks with those of the same blocks on the device, bit by bit, in two passes."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings, streams, stream_blocks = parse_settings(args.options), [], streamed_layers.stream_blocks
    streamed_layers.stream_blocks = lambda *given: streams.append(stream_blocks(*given))
    fabric = Fabric(accelerator=settings.accelerator, devices=1, precision=settings.precision)
    model = fabric.setup(build_model(settings, blank_datasets(2)))
    ids = torch.randint(model.config.vocab_size, (2, 1, args.tokens), device=fabric.device)

    def gradients() -> list[Tensor]:
        found = []
        for row in ids:
            model.zero_grad()
            loss = model(input_ids=row, labels=row, predicting=torch.arange(args.tokens - 1, device=row.device)).loss
            fabric.backward(loss)
            found += [loss.detach(), *(weight.grad for weight in model.parameters() if weight.grad is not None)]
        return found

    mine, (stream,) = gradients(), streams
    blocks = [list(weights.values()) for weights in streamed_weights(model.module).values()]
    for number, block in enumerate(blocks):
        for weight, whole in zip(block, stream.on_host(number), strict=True):
            weight.data = whole.to(fabric.device)
    stream.use = lambda *_: None
    same = [torch.equal(*pair) for pair in zip(mine, gradients(), strict=True)]
    sizes = [sum(weight.nbytes for weight in block) for block in blocks]
    return {"passed": all(same), "compared": len(same), "block_bytes": max(sizes), "blocks": len(blocks)}


def attention_cost(args: argparse.Namespace) -> dict:
    """Return the median seconds of a pass of a model at one length, its peak memory in bytes, and the loss.

    The gradients stay between the passes, as between the micro-batches of an effective batch.
    """
    settings = parse_settings([*args.options, "--max_length", str(args.tokens)])
    device = torch.device(settings.accelerator)
    seed_everything(settings.seed, verbose=False)
    torch.set_float32_matmul_precision(settings.matmul_precision)
    model = build_model(settings, blank_datasets(2)).to(device)
    inputs = random_batch(model.config.vocab_size, args.rows, args.tokens, device)
    reset_peak_memory(device)
    seconds = turns({"pass": partial(one_pass, model, inputs)}, args.repeats)["pass"]
    figures = {"seconds": seconds, "peak_memory_bytes": peak_memory(device), "loss": model(**inputs).loss.item()}
    return figures | {"threads": torch.get_num_threads()}


def whole_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return transformers' loss from all logits."""
    return ForCausalLMLoss(linear(hidden, weight), None, weight.shape[0], shift_labels=targets)


def loss_inputs(args: argparse.Namespace, precision: str, trained: bool, device: str | torch.device) -> list[Tensor]:
    """Return hidden states, the head's weight, and the next tokens."""
    torch.manual_seed(0)
    how = {"dtype": getattr(torch, precision), "device": device}
    hidden = torch.randn(args.tokens, args.width, requires_grad=True, **how)
    weight = torch.randn(args.vocabulary, args.width, **how).mul_(0.02).requires_grad_(trained)
    return [hidden, weight, torch.randint(args.vocabulary, (args.tokens,), device=device)]


def peak_of(run: Callable[[], object], inputs: list[Tensor], mode: FakeTensorMode | None = None) -> int:
    """Return the bytes of the tensors that live at the peak of a run, without its inputs."""
    with PeakTracker(mode) as tracker:
        for tensor in inputs:
            tracker.hold(tensor.detach(), "parameters")
        run()
    return tracker.peak().total - tracker.peak().parameters


def record_of(args: argparse.Namespace, sides: dict, peaks: dict[str, int] | None = None) -> dict:
    """Time the sides, and return the sizes among the options with the figures."""
    shape = {name: value for name, value in vars(args).items() if isinstance(value, int)}
    seconds = turns(sides, args.repeats) if args.repeats else dict.fromkeys(sides)
    figures = {name: {"seconds": seconds[name]} | ({"peak_bytes": peaks[name]} if peaks else {}) for name in sides}
    return {"shape": shape, "figures": figures}


def loss(args: argparse.Namespace) -> dict:
    """Compare the loss of all logits in one pass with that of chunks, the head trained and frozen, as with adapters.

    Fake tensors give the peak; with `--repeats 0` nothing is timed.
    """
    ways, parts = {"whole": whole_loss}, {}
    for chunk in args.chunk:
        ways[f"chunks of {chunk}"] = lambda *inputs, chunk=chunk: chunked_loss(*inputs[:2], None, inputs[2], chunk)[0]
    for precision, trained in product(args.precision, (True, False)):
        peaks = {}
        for name, way in ways.items():
            with FakeTensorMode() as mode:
                fake = loss_inputs(args, precision, trained, "cpu")
                peaks[name] = peak_of(lambda way=way, fake=fake: way(*fake).backward(), fake, mode)
        inputs = loss_inputs(args, precision, trained, DEVICE) if args.repeats else []
        sides = {name: lambda way=way, real=inputs: way(*real).backward() for name, way in ways.items()}
        part = f"{DEVICE.type}, {precision}, head {'trained' if trained else 'frozen'}, width {args.width}"
        parts[part] = record_of(args, sides, peaks)
    return parts


def embeddings(args: argparse.Namespace) -> dict:
    """Compare PyTorch's dense way to add an embedding's gradient with rows, in both precisions.

    On a CPU the committed figures use one thread (`OMP_NUM_THREADS=1`).
    """
    keep_freed_memory()  # as every run on a CPU does
    parts = {}
    for precision in PRECISIONS:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(args.rows, args.width, dtype=getattr(torch, precision), device=DEVICE))
        add_rows(model)
        (table,) = model
        ids = torch.randint(args.rows, (1, args.tokens), device=DEVICE)
        table.weight.grad = torch.zeros_like(table.weight)

        def run(by_rows: bool, table: nn.Embedding = table, ids: Tensor = ids) -> None:
            with adding_rows(hooked=False) if by_rows else nullcontext():
                table(ids).sum().backward()

        sides = {"PyTorch": partial(run, by_rows=False), "by rows": partial(run, by_rows=True)}
        inputs = [table.weight, table.weight.grad, ids]
        peaks = {name: peak_of(side, inputs) for name, side in sides.items()}
        parts[f"{DEVICE.type}, {precision}"] = record_of(args, sides, peaks)
    return parts


def in_32_bits(run: Callable[[], object]) -> None:
    """Run while bfloat16 operations are computed in 32 bits."""
    compute_in_32_bits()
    run()
    restore_bfloat16()


def bfloat16(args: argparse.Namespace) -> dict:
    """Compare a pass in bfloat16, PyTorch's own and the one computed in 32 bits, with a pass in 32-bit.

    The models are 3 blocks of MiniLM and of a small ViT on one thread of a CPU. Where PyTorch has no fast bfloat16, it
    fails if computing in 32 bits (models/cpu_bfloat16.py) is not twice as fast as PyTorch's own.
    """
    torch.set_num_threads(1)
    keep_freed_memory()  # as every run on a CPU does
    small = {"num_hidden_layers": 3, "hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536}
    images = {"pixel_values": torch.randn(args.rows, 3, 224, 224), "labels": torch.zeros(args.rows).long()}
    texts = random_batch(1000, args.rows, args.tokens, "cpu")
    models = {
        "MiniLM": (AutoModelForSequenceClassification, "bert", texts, args.tokens),
        "ViT": (AutoModelForImageClassification, "vit", images, 197),
    }
    parts = {}
    for name, (model_class, model_type, inputs, tokens) in models.items():
        model = model_class.from_config(AutoConfig.for_model(model_type, **small))
        rounded = {key: each.bfloat16() if each.is_floating_point() else each for key, each in inputs.items()}
        own = partial(one_pass, copy.deepcopy(model).bfloat16(), rounded)
        sides = {"32-bit": partial(one_pass, model, inputs), "PyTorch's bfloat16": own}
        record = record_of(args, sides | {"computed in 32 bits": partial(in_32_bits, own)})
        seconds = {side: figures["seconds"] for side, figures in record["figures"].items()}
        ratios = {side: value / seconds["computed in 32 bits"] for side, value in seconds.items()}
        passed = cpu_has_fast_bfloat16() or ratios["PyTorch's bfloat16"] >= 2
        shape = {"rows": args.rows, "tokens": tokens}
        parts[name] = record | {"shape": shape, "ratios": ratios, "passed": passed}
    return parts


def profile_rung(args: argparse.Namespace) -> dict:
    """Train by a rung under torch.profiler; return its seconds and the kernels or operators that take most of them."""
    train, figures = fabric_ladder.train, {}

    def profiled_train(*given) -> Training:
        cuda = [ProfilerActivity.CUDA] if DEVICE.type == "cuda" else []
        start = perf_counter()
        with profile(activities=[ProfilerActivity.CPU, *cuda]) as profiler:
            training = train(*given)
        events = profiler.key_averages()
        on_gpu = [event for event in events if event.device_type.name == "CUDA" and not event.is_user_annotation]
        times = [(event.self_device_time_total if on_gpu else event.self_cpu_time_total, event)
                 for event in on_gpu or events]  # fmt: skip
        total = sum(time for time, _ in times)
        top = [{"name": event.key, "share": time / total, "ms": time / 1e3, "calls": event.count}
               for time, event in sorted(times, key=lambda row: -row[0])[:10]]  # fmt: skip
        figures.update(wall_seconds=perf_counter() - start, busy_seconds=total / 1e6, top=top)
        return training

    fabric_ladder.train = profiled_train
    sys.argv = [str(common.ROOT / "src" / f"{args.script}.py"), *args.options]
    runpy.run_path(sys.argv[0], run_name="__main__")
    return figures


def machine(_: argparse.Namespace) -> dict:
    """Return versions, hardware and number of GPUs."""
    return common.environment(DEVICE) | {"gpus": torch.cuda.device_count()}


COMMANDS = {  # options with numbers, and the results file
    ceilings: ({"repeats": 20}, None),
    attention: ({"heads": 16, "tokens": 1024, "repeats": 10}, None),
    gradients: ({}, None),
    machine: ({}, None),
    profile_rung: ({}, None),
    random_weights: ({}, None),
    streamed: ({"tokens": 512}, None),
    attention_cost: ({"tokens": 1024, "rows": 1, "repeats": 3}, None),
    loss: ({"tokens": 2048, "width": 1024, "vocabulary": 250_880, "repeats": 3}, "chunked_loss.json"),
    embeddings: ({"tokens": 1024, "width": 1024, "rows": 250_880, "repeats": 10}, "embedding_gradients.json"),
    bfloat16: ({"tokens": 512, "rows": 4, "repeats": 5}, "cpu_bfloat16.json"),
}


def parse() -> argparse.Namespace:
    """Return the options of a command; `options` has the settings of its model."""
    parser = common.new_parser(__doc__)
    commands = parser.add_subparsers(required=True)
    for measure, (numbers, stored) in COMMANDS.items():
        name, first_line = measure.__name__.replace("_", "-"), measure.__doc__.splitlines()[0]
        command = commands.add_parser(name, help=first_line, allow_abbrev=False)
        command.set_defaults(measure=measure, stored=stored)
        for name, default in numbers.items():
            command.add_argument(f"--{name}", type=int, default=default, help="default: %(default)s")
        command.add_argument("--out", type=Path, default=stored and common.RESULTS / stored, help="results file")
        if measure is attention:
            command.add_argument("--width", type=int, nargs="+", default=[64, 72, 128, 136], help="of a head")
        if measure is random_weights:
            command.add_argument("config", type=Path, help="JSON file")
            command.add_argument("folder", type=Path, help="folder to write")
        if measure is profile_rung:
            command.add_argument("--script", required=True, help="name of a rung; its settings follow")
        if measure is loss:
            command.add_argument("--chunk", type=int, nargs="+", default=[64, 256, 1024], help="tokens of a chunk")
            command.add_argument("--precision", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    args, args.options = parser.parse_known_args()
    if args.options and args.measure not in (attention_cost, profile_rung, streamed):
        parser.error(f"unknown options: {' '.join(args.options)}")
    return args


def main() -> None:
    """Run one command, and store or print its figures."""
    args = parse()
    if args.stored:
        common.check_storable(args.out)
    figures = args.measure(args)
    if args.stored:
        for part, record in figures.items():
            rows = [[name, *side.values()] for name, side in record["figures"].items()]
            common.print_table([part, *next(iter(record["figures"].values()))], rows)
            common.write_result(args.out, part, record, DEVICE)
        sys.exit(not all(record.get("passed", True) for record in figures.values()))
    elif args.out:
        args.out.write_text(json.dumps(figures), encoding="utf-8")
    elif figures:
        print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
