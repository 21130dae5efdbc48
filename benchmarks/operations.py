"""Measure single operations: attention, recomputation, loss, embedding gradients.

    python benchmarks/operations.py ceilings
    python benchmarks/operations.py attention [--heads 16] [--tokens 1024] [--width 64 72 128 136]
    python benchmarks/operations.py gradients
    python benchmarks/operations.py attention-cost --attention fused --tokens 1024 [settings of the model]
    python benchmarks/operations.py checkpointing [--tokens 512] [--rows 4] [--threads 1] [settings of the model]
    python benchmarks/operations.py loss [--tokens 2048] [--width 1024] [--vocabulary 250880] [--chunk 64 256 1024]
    python benchmarks/operations.py embeddings [--tokens 1024] [--width 1024] [--rows 250880]
    python benchmarks/operations.py bfloat16 [--tokens 512] [--rows 4]

Commands:
    ceilings        The rates of this device: a copy, and a product of 16-bit matrices.
    attention       The kernel that PyTorch chooses for each head width and dtype, and the seconds of every kernel,
                    forward and backward. The heads of BLOOM's fused attention (techniques/fused_attention.py) are 8
                    wider than a power of two.
    gradients       Gradients of tiny models: fused, packed and padded against eager attention in 32-bit. An error of
                    up to 1.5 times eager attention's own error in the same dtype passes.
    attention-cost  One BLOOM with eager or fused attention at one length, without padding: seconds and peak memory.
    checkpointing   One pass of a BLOOM of 4 layers, 512 wide, in bfloat16: all activations kept, recomputed,
                    offloaded, or selectively recomputed.
    loss            The loss of a language model: all logits in one pass (transformers' `ForCausalLMLoss`) against
                    chunks. Fake tensors give the peak; with `--repeats 0` nothing is timed.
    embeddings      An embedding's gradient added to an existing one: PyTorch's dense way against rows. On a CPU the
                    committed figures use one thread (`OMP_NUM_THREADS=1`).
    bfloat16        One pass of 3 blocks of MiniLM and of a small ViT (197 tokens) on a CPU: in 32-bit, in PyTorch's
                    bfloat16 (`bf16-true`), and in bfloat16 that is computed in 32 bits and rounded
                    (models/cpu_bfloat16.py). One thread. Where PyTorch has no fast bfloat16, it fails if the last is
                    not twice as fast as the second.

Sides take turns, and the median of `--repeats` passes counts, after one to warm up. Peaks are bytes of live tensors
without the inputs. `loss` stores its figures in results/chunked_loss.json, `embeddings` in
results/embedding_gradients.json, `bfloat16` in results/cpu_bfloat16.json.
"""

import argparse
import copy
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from time import perf_counter

import common  # first import: it makes the project importable
import torch
from lightning import seed_everything
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy, linear, scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    BloomConfig,
    LlamaConfig,
    ViTConfig,
    ViTForImageClassification,
)
from transformers.loss.loss_utils import ForCausalLMLoss

from fabric_ladder import build_model, parse_settings
from fabric_ladder.environment import cpu_has_fast_bfloat16, keep_freed_memory, peak_memory, reset_peak_memory
from fabric_ladder.models.cpu_bfloat16 import compute_in_32_bits, restore_bfloat16
from fabric_ladder.planning.predict import blank_datasets
from fabric_ladder.planning.tracker import PeakTracker
from fabric_ladder.techniques.chunked_loss import chunked_loss
from fabric_ladder.techniques.embedding_rows import add_rows, adding_rows
from fabric_ladder.techniques.fused_attention import fuse_attention
from fabric_ladder.techniques.packing import support_packing

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ATTENTION_ROWS = 16 if DEVICE.type == "cuda" else 2  # 16,384 tokens on a GPU: fewer would time the launches
KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
OPERATORS = {  # part of the name of PyTorch's operator: its kernel
    "flash_attention": "flash",
    "efficient_attention": "memory-efficient",
    "cudnn_attention": "cuDNN",
    "_math": "math",
}
MODES = {  # dtype, and precision of 32-bit matrix multiplications
    "32-bit": (torch.float32, "highest"),
    "TF32": (torch.float32, "high"),
    "bfloat16": (torch.bfloat16, "highest"),
    "float16": (torch.float16, "highest"),
}
BATCHES = ("full", "padded", "packed", "packed, language model", "packed, BERT", "packed, Llama",
           "packed, Llama, language model")  # fmt: skip
BLOOM = {"model_type": "bloom", "vocab_size": 1024, "hidden_size": 512, "n_layer": 4, "n_head": 8}
CHECKPOINTED = ["--activation_checkpointing", "true"]
WAYS = {
    "all activations kept": [],
    "checkpointing": CHECKPOINTED,
    "activation offload": [*CHECKPOINTED, "--activation_offload", "true"],
    "selective checkpointing": [*CHECKPOINTED, "--selective_checkpointing", "true"],
}


def turns(sides: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Return the median seconds of each side. The sides take turns, and a first turn warms up."""
    seconds = {name: [] for name in sides}
    for _ in range(1 + repeats):
        for name, run in sides.items():
            synchronize()
            start = perf_counter()
            run()
            synchronize()
            seconds[name].append(perf_counter() - start)
    return {name: statistics.median(each[1:]) for name, each in seconds.items()}


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def ceilings(args: argparse.Namespace) -> dict:
    """Return the bytes/s of a copy, and the FLOP/s of a product of 8192 x 8192 matrices (on a CPU 256 x 256)."""
    size = 8192 if DEVICE.type == "cuda" else 256
    matrix, target = torch.randn(2, size, size, device=DEVICE).half()
    seconds = turns({"copy": lambda: target.copy_(matrix), "product": lambda: matrix @ target}, args.repeats)
    return {
        "copy_bytes_per_second": 2 * matrix.nbytes / seconds["copy"],
        "product_flops": 2 * size**3 / seconds["product"],
    }


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
    names = [event.key for event in profiler.key_averages() if "scaled_dot_product" in event.key]
    found = {kernel for part, kernel in OPERATORS.items() if any(part in name for name in names)}
    return (" and ".join(sorted(found)) or "unknown") + problem


def attention(args: argparse.Namespace) -> dict:
    """Time all kernels for all dtypes and head widths."""
    torch.set_float32_matmul_precision("high")  # the rungs' setting on a GPU
    rows = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for width in args.width:
            shape = (ATTENTION_ROWS, args.heads, args.tokens, width)
            parts = [torch.randn(shape, dtype=dtype, device=DEVICE, requires_grad=True) for _ in range(3)]
            row = {"dtype": str(dtype).removeprefix("torch."), "width": width, "chosen": chosen_kernel(parts)}
            for name, kernel in KERNELS.items():
                try:
                    with sdpa_kernel(kernel):
                        row |= turns({name: partial(attention_pass, parts)}, args.repeats)
                except RuntimeError:  # the kernel refuses these tensors, or memory is short
                    row[name] = None
            rows.append(row)
    return {"heads": args.heads, "rows_of_inputs": ATTENTION_ROWS, "tokens": args.tokens, "rows": rows}


def config_of(kind: str, heads: int) -> BloomConfig | BertConfig | LlamaConfig:
    """Return the config of a model of two layers, 128 wide, without dropout."""
    sizes = {"vocab_size": 256, "hidden_size": 128, "pad_token_id": 0, "use_cache": False}
    if "BERT" in kind:
        dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return BertConfig(num_hidden_layers=2, num_attention_heads=heads, intermediate_size=256, **dropout, **sizes)
    if "Llama" in kind:
        return LlamaConfig(num_hidden_layers=2, num_attention_heads=heads, intermediate_size=256, **sizes)
    return BloomConfig(n_layer=2, n_head=heads, hidden_dropout=0.0, attention_dropout=0.0, **sizes)


def gradients(_: argparse.Namespace) -> dict:
    """Return the relative errors of gradients by kind of batch, head width and dtype."""
    found = {}
    for width, heads in ((64, 2), (128, 1)):
        torch.manual_seed(0)
        ids = torch.randint(4, 256, (4, 120))
        visible = torch.arange(120) < torch.tensor([[120], [77], [30], [5]])
        for kind in BATCHES:
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
                error = {"eager": gradient(eager, ids, mask, mode), "fused": gradient(fused, ids, mask, mode, packed)}
                if packed:
                    error["fixed"] = gradient(fused, ids, mask, mode, packed, cudnn=True)
                error = {name: ((mine - exact).norm() / exact.norm()).item() for name, mine in error.items()}
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
    if is_language_model:
        loss = cross_entropy(logits[:, :-1][following], inputs["input_ids"][:, 1:][following])
    else:
        loss = cross_entropy(logits, torch.arange(len(ids), device=DEVICE) % 2)
    (1024 * loss).backward()  # loss scaling for float16
    return torch.cat(
        [(part.grad.double() / 1024).flatten().cpu() for part in model.parameters() if part.grad is not None]
    )


def random_batch(vocabulary: int, rows: int, tokens: int, device: str | torch.device) -> dict[str, Tensor]:
    """Return the inputs of a classifier: full rows of random tokens, and labels of two classes."""
    ids = torch.randint(4, vocabulary, (rows, tokens), device=device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.arange(rows, device=device) % 2}


def one_pass(model: nn.Module, inputs: dict[str, Tensor]) -> None:
    """Compute the loss and its gradients."""
    model(**inputs).loss.backward()


def attention_cost(args: argparse.Namespace, options: list[str]) -> dict:
    """Return the median seconds of a forward and backward pass, the peak memory in bytes, and the loss.

    The gradients stay between the passes, as between the micro-batches of an effective batch.
    """
    settings = parse_settings([*options, "--max_length", str(args.tokens)])
    device = torch.device(settings.accelerator)
    seed_everything(settings.seed, verbose=False)
    torch.set_float32_matmul_precision(settings.matmul_precision)
    model = build_model(settings, blank_datasets(2)).to(device)
    inputs = random_batch(model.config.vocab_size, args.rows, args.tokens, device)
    reset_peak_memory(device)
    seconds = turns({"pass": partial(one_pass, model, inputs)}, args.repeats)["pass"]
    figures = {"seconds": seconds, "peak_memory_bytes": peak_memory(device), "loss": model(**inputs).loss.item()}
    return figures | {"threads": torch.get_num_threads()}


def checkpointing(args: argparse.Namespace, options: list[str]) -> dict:
    """Time each way to keep or recompute activations, and print seconds and ratios."""
    torch.set_num_threads(args.threads)
    models = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bloom.json"
        path.write_text(json.dumps(BLOOM), encoding="utf-8")
        options = ["--model", str(path), "--from_scratch", "true", "--max_length", str(args.tokens), *options]
        for way, more in WAYS.items():
            settings = parse_settings([*options, *more])
            torch.manual_seed(settings.seed)
            models[way] = build_model(settings, blank_datasets(2)).to(settings.accelerator, torch.bfloat16)
    inputs = random_batch(BLOOM["vocab_size"], args.rows, args.tokens, settings.accelerator)
    sides = {way: partial(one_pass, model, inputs) for way, model in models.items()}
    seconds = turns(sides, args.repeats)
    plain = seconds["all activations kept"]
    rows = [[way, f"{value:.3f}", f"{value / plain:.2f}"] for way, value in seconds.items()]
    common.print_table([f"{args.rows} x {args.tokens} tokens, {settings.accelerator}", "seconds", "of the first"], rows)
    return {"seconds": seconds}


def whole_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return transformers' loss from all logits."""
    return ForCausalLMLoss(linear(hidden, weight), None, weight.shape[0], shift_labels=targets)


def loss_inputs(
    args: argparse.Namespace, dtype: torch.dtype, trained: bool, device: str | torch.device
) -> list[Tensor]:
    """Return hidden states, the head's weight, and the next tokens."""
    torch.manual_seed(0)
    hidden = torch.randn(args.tokens, args.width, dtype=dtype, device=device, requires_grad=True)
    weight = torch.randn(args.vocabulary, args.width, dtype=dtype, device=device).mul_(0.02).requires_grad_(trained)
    return [hidden, weight, torch.randint(args.vocabulary, (args.tokens,), device=device)]


def peak_of(run: Callable[[], object], inputs: list[Tensor], mode: FakeTensorMode | None = None) -> int:
    """Return the bytes of the tensors that live at the peak of a run, without its inputs."""
    with PeakTracker(mode) as tracker:
        for tensor in inputs:
            tracker.hold(tensor.detach(), "parameters")
        run()
    return tracker.peak().total - tracker.peak().parameters


def loss(args: argparse.Namespace) -> dict:
    """Compare the ways to compute the loss with the head trained and frozen, as with adapters."""
    ways = {"whole": whole_loss}
    for chunk in args.chunk:
        ways[f"chunks of {chunk}"] = lambda *inputs, chunk=chunk: chunked_loss(*inputs[:2], None, inputs[2], chunk)[0]

    parts = {}
    for precision in args.precision:
        for trained in (True, False):
            conditions = args, getattr(torch, precision), trained
            peaks = {}
            for name, way in ways.items():
                with FakeTensorMode() as mode:
                    fake = loss_inputs(*conditions, "cpu")
                    peaks[name] = peak_of(lambda way=way, fake=fake: way(*fake).backward(), fake, mode)
            seconds = {}
            if args.repeats:
                inputs = loss_inputs(*conditions, DEVICE)
                sides = {name: lambda way=way, real=inputs: way(*real).backward() for name, way in ways.items()}
                seconds = turns(sides, args.repeats)
            figures = {name: {"seconds": seconds.get(name), "peak_bytes": peak} for name, peak in peaks.items()}
            part = f"{precision}, head {'trained' if trained else 'frozen'}, width {args.width}"
            parts[f"{DEVICE.type}, {part}"] = {"shape": shape_of(args), "figures": figures}
    return parts


def shape_of(args: argparse.Namespace) -> dict[str, int]:
    """Return the sizes among the options."""
    return {name: value for name, value in vars(args).items() if isinstance(value, int)}


def embeddings(args: argparse.Namespace) -> dict:
    """Compare both ways to add an embedding's gradient in both precisions."""
    keep_freed_memory()  # as every run on a CPU does
    parts = {}
    for precision in ("float32", "bfloat16"):
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
        seconds, inputs = turns(sides, args.repeats), [table.weight, table.weight.grad, ids]
        figures = {name: {"seconds": seconds[name], "peak_bytes": peak_of(sides[name], inputs)} for name in sides}
        parts[f"{DEVICE.type}, {precision}"] = {"shape": shape_of(args), "figures": figures}
    return parts


def in_32_bits(run: Callable[[], object]) -> None:
    """Run while bfloat16 operations are computed in 32 bits."""
    compute_in_32_bits()
    run()
    restore_bfloat16()


def bfloat16(args: argparse.Namespace) -> dict:
    """Compare a pass in bfloat16, PyTorch's own and the one computed in 32 bits, with a pass in 32-bit."""
    torch.set_num_threads(1)
    keep_freed_memory()  # as every run on a CPU does
    small = {"num_hidden_layers": 3, "hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536}
    pixels = torch.randn(args.rows, 3, 224, 224)
    models = {
        "MiniLM": (
            BertForSequenceClassification(BertConfig(**small)),
            random_batch(1000, args.rows, args.tokens, "cpu"),
            args.tokens,
        ),
        "ViT": (
            ViTForImageClassification(ViTConfig(**small)),
            {"pixel_values": pixels, "labels": torch.zeros(args.rows).long()},
            197,
        ),
    }
    parts = {}
    for name, (model, inputs, tokens) in models.items():
        narrow = copy.deepcopy(model).bfloat16()
        rounded = {key: each.bfloat16() if each.is_floating_point() else each for key, each in inputs.items()}
        own = partial(one_pass, narrow, rounded)
        sides = {
            "32-bit": partial(one_pass, model, inputs),
            "PyTorch's bfloat16": own,
            "computed in 32 bits": partial(in_32_bits, own),
        }
        figures = {side: {"seconds": seconds} for side, seconds in turns(sides, args.repeats).items()}
        ours = figures["computed in 32 bits"]["seconds"]
        ratios = {side: figure["seconds"] / ours for side, figure in figures.items()}
        passed = cpu_has_fast_bfloat16() or ratios["PyTorch's bfloat16"] >= 2
        shape = {"rows": args.rows, "tokens": tokens}
        parts[name] = {"shape": shape, "figures": figures, "ratios": ratios, "passed": passed}
    return parts


STORED = {  # files in results/
    "loss": "chunked_loss.json",
    "embeddings": "embedding_gradients.json",
    "bfloat16": "cpu_bfloat16.json",
}


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    numbers = {
        ceilings: {"repeats": 20},
        attention: {"heads": 16, "tokens": 1024, "repeats": 10},
        gradients: {},
        attention_cost: {"tokens": 1024, "rows": 1, "repeats": 3},
        checkpointing: {"tokens": 512, "rows": 4, "repeats": 5, "threads": 1},
        loss: {"tokens": 2048, "width": 1024, "vocabulary": 250_880, "repeats": 3},
        embeddings: {"tokens": 1024, "width": 1024, "rows": 250_880, "repeats": 10},
        bfloat16: {"tokens": 512, "rows": 4, "repeats": 5},
    }
    for measure, defaults in numbers.items():
        command = commands.add_parser(measure.__name__.replace("_", "-"), help=measure.__doc__.splitlines()[0])
        command.set_defaults(measure=measure, allow_abbrev=False)
        for name, default in defaults.items():
            command.add_argument(f"--{name}", type=int, default=default, help="default: %(default)s")
        stored = STORED.get(measure.__name__)
        command.add_argument("--out", type=Path, default=stored and common.RESULTS / stored, help="results file")
        if measure is attention:
            command.add_argument("--width", type=int, nargs="+", default=[64, 72, 128, 136], help="of a head")
        if measure is loss:
            command.add_argument("--chunk", type=int, nargs="+", default=[64, 256, 1024], help="tokens of a chunk")
            precisions = ["float32", "bfloat16"]
            command.add_argument("--precision", nargs="+", choices=precisions, default=precisions)
    return parser


def main() -> None:
    """Run one command, and store or print its figures."""
    parser = build_parser()
    args, options = parser.parse_known_args()
    takes_settings = args.measure in (attention_cost, checkpointing)
    if options and not takes_settings:
        parser.error(f"unknown options: {' '.join(options)}")
    stored = args.measure.__name__ in STORED
    if stored:
        common.check_storable(args.out)
    figures = args.measure(args, options) if takes_settings else args.measure(args)
    if stored:
        for part, record in figures.items():
            rows = [[name, *side.values()] for name, side in record["figures"].items()]
            common.print_table([part, *next(iter(record["figures"].values()))], rows)
            common.write_result(args.out, part, common.environment(DEVICE) | record)
        sys.exit(not all(record.get("passed", True) for record in figures.values()))
    elif args.out:
        args.out.write_text(json.dumps(figures), encoding="utf-8")
    elif args.measure is not checkpointing:  # its table is printed
        print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
