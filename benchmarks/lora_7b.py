"""LoRA and QLoRA on BLOOM-7b1's shape with random weights, 512 tokens a sample: speed, peak memory, what fits.

    python benchmarks/lora_7b.py [--model configs/models/bloom-7b1.json] [--tokens 512]

For each of rungs 13 and 14, with micro-batches of 1 and 4 samples, with the loss in chunks and with all logits at once:
samples/s, tokens/s and peak memory of the training step; then the largest micro-batch that trains in 24 GB and in 80 GB
(PyTorch is forbidden more), by doubling and halving. The adapters are the article's: rank 8 on query_key_value. A GPU
with 16 GB at least is needed, and 14 GB of the disk for the weights, which `--weights FOLDER` keeps. Without a GPU the
peaks of rung 13 are predicted (`fabric_ladder.planning`), which 4-bit weights cannot be; `--accelerator cpu` runs all
of it on a small `--model`.
"""

import argparse
import gc
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import common  # first of all: it makes the project importable without an installation
import torch
from lightning import Fabric
from transformers import AutoModelForCausalLM

from fabric_ladder import Settings, build_model, build_optimizer, parse_settings
from fabric_ladder.advice import explain
from fabric_ladder.data.loaders import MicroBatch
from fabric_ladder.environment import prepare_cuda
from fabric_ladder.models.configs import load_config
from fabric_ladder.planning.predict import blank_datasets, largest_batches, predict_peak
from fabric_ladder.rungs import script_defaults
from fabric_ladder.runs.metrics import Meter
from fabric_ladder.training.gradients import accumulate_gradients

OUT = common.RESULTS / "lora_7b.json"
RUNGS = ("13_lora", "14_qlora")
SIZES, CARDS = (1, 4), (24e9, 80e9)
ALL_AT_ONCE = 1_000_000  # tokens in a chunk: more than any micro-batch has


def make_weights(model: str, folder: Path, device: torch.device) -> None:
    """Write random weights in bfloat16, drawn on the GPU, where it takes a second."""
    torch.set_default_dtype(torch.bfloat16)
    with device:
        AutoModelForCausalLM.from_config(load_config(model)).save_pretrained(folder)
    torch.set_default_dtype(torch.float32)


def settings_of(args: argparse.Namespace, rung: str, model: str, samples: int, chunk: int, *more: str) -> Settings:
    """Return a rung's settings for micro-batches of so many samples; effective batches are as large."""
    options = ["--config", str(common.ROOT / "configs" / "belle_bloomz_7b1_lora.yaml"), "--model", model]
    options += ["--batch_size", str(samples), "--micro_batch_size", str(samples), "--loss_chunk", str(chunk)]
    options += ["--max_length", str(args.tokens), "--packing", "false", "--warmup_steps", "0"]
    options += ["--activation_checkpointing", str(args.checkpointing).lower(), *more]
    if load_config(model).model_type != "bloom":
        options += ["--lora_targets=null"]  # those that PEFT takes for the architecture
    return parse_settings(options, **script_defaults(rung))


def filled(batch: MicroBatch, vocabulary: int) -> MicroBatch:
    """Give values to the shapes of `largest_batches`: random tokens, of which all but the first are trained."""
    inputs = dict(batch.inputs)
    shape = inputs["input_ids"].shape
    inputs["input_ids"] = inputs["labels"] = torch.randint(4, vocabulary, shape)
    inputs["attention_mask"] = torch.ones(shape, dtype=torch.long)
    inputs["predicting"] = torch.arange(shape.numel()).view(shape)[:, :-1].flatten()
    return batch._replace(inputs=inputs)


class Trainee:
    """A model with its optimizer, set up as its rung does it."""

    def __init__(self, settings: Settings):
        gc.collect()  # a model before this one, whose replaced forward pass is a circle of references
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        self.settings = settings
        torch.set_float32_matmul_precision(settings.matmul_precision)
        torch.backends.cuda.enable_cudnn_sdp(False)  # as the rungs do for texts, see models/kernels.py
        self.fabric = Fabric(accelerator=settings.accelerator, devices=1, precision=settings.precision)
        self.model = self.fabric.setup(build_model(settings, blank_datasets(2)))
        self.optimizer = self.fabric.setup_optimizers(build_optimizer(settings, self.model))
        self.vocabulary = load_config(settings.model).vocab_size

    def steps(self, samples: int, tokens: int, count: int) -> tuple[float, int]:
        """Train on one micro-batch so often; return the seconds of a step but the first, and peak bytes."""
        settings = replace(self.settings, batch_size=samples, micro_batch_size=samples, micro_batch_tokens=None)
        batch = filled(largest_batches(settings, tokens)[0][0], self.vocabulary)
        cuda = self.fabric.device.type == "cuda"
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        meter = Meter(self.fabric)
        for number in range(count + 1):
            if number == 1:
                start = perf_counter()
            accumulate_gradients(self.fabric, self.model, [batch], meter)
            self.optimizer.step()
            self.optimizer.zero_grad()
            meter.collect()  # waits for the device
        return (perf_counter() - start) / count, torch.cuda.max_memory_allocated() if cuda else 0

    def largest(self, card: float, tokens: int, most: int = 512) -> int:
        """Return the most samples of a micro-batch with which PyTorch stays within so many bytes; 0: not even one."""
        torch.cuda.set_per_process_memory_fraction(card / torch.cuda.get_device_properties(0).total_memory)
        fits, fails = 0, most + 1
        while fails - fits > 1:
            samples = min(2 * fits or 1, most) if fails > most else (fits + fails) // 2
            try:
                self.steps(samples, tokens, 1)
                fits = samples
            except torch.OutOfMemoryError:
                fails = samples
                self.optimizer.zero_grad()
        torch.cuda.set_per_process_memory_fraction(1.0)
        return fits


def measured(args: argparse.Namespace, rung: str, folder: str) -> Iterator[dict]:
    """Run one rung's entries on the device that there is."""
    for chunk in (args.chunk, ALL_AT_ONCE):
        trainee = Trainee(settings_of(args, rung, folder, 1, chunk, "--accelerator", args.accelerator))
        for samples in SIZES:
            seconds, peak = trainee.steps(samples, args.tokens, args.steps)
            speed = {"samples_per_second": samples / seconds, "tokens_per_second": samples * args.tokens / seconds}
            record = {"rung": rung, "micro_batch_size": samples, "loss_chunk": chunk}
            yield record | speed | {"peak_memory_bytes": peak or None}
        if trainee.fabric.device.type == "cuda":
            for card in (card for card in CARDS if card <= torch.cuda.get_device_properties(0).total_memory):
                largest = trainee.largest(card, args.tokens)
                yield {"rung": rung, "loss_chunk": chunk, "card_bytes": card, "largest_micro_batch": largest}
        del trainee


def predicted(args: argparse.Namespace) -> list[dict]:
    """Predict rung 13's peaks."""
    records = []
    for chunk in (args.chunk, ALL_AT_ONCE):
        for samples in SIZES:
            more = ["--accelerator", "cpu", "--from_scratch", "true", "--eval_batch_tokens", "4096"]
            settings = settings_of(args, RUNGS[0], args.model, samples, chunk, *more)
            batches, _ = largest_batches(settings, args.tokens)
            peak = predict_peak(settings, batches)
            records.append({"rung": RUNGS[0], "micro_batch_size": samples, "loss_chunk": chunk,
                            "predicted_peak_bytes": peak.total, "parameters_bytes": peak.parameters,
                            "activations_bytes": peak.activations, "other_bytes": peak.other})  # fmt: skip
    return records


def print_records(records: list[dict]) -> None:
    """Print one line for each, bytes as GB."""
    names = list(dict.fromkeys(name for record in records for name in record))
    rows = [
        [value / 1e9 if value and "bytes" in name else value for name in names for value in [record.get(name)]]
        for record in records
    ]
    common.print_table([name.replace("_bytes", " GB").replace("_", " ") for name in names], rows)


def write(args: argparse.Namespace, device: torch.device, records: list[dict]) -> None:
    """Write the figures so far."""
    conditions = {name: getattr(args, name) for name in ("model", "tokens", "steps", "checkpointing")}
    conditions["model"] = Path(args.model).name
    record = common.environment(device) | {"conditions": conditions, "entries": records}
    part = ("measured" if args.accelerator else "predicted") + (", checkpointing" if args.checkpointing else "")
    common.write_result(args.out, part, record)


def main() -> int:
    """Measure or predict, print a table, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(common.ROOT / "configs" / "models" / "bloom-7b1.json"))
    parser.add_argument("--accelerator", choices=["cuda", "cpu"], help="default: a GPU, or else a prediction")
    parser.add_argument("--rung", nargs="+", choices=RUNGS, default=RUNGS)
    parser.add_argument("--weights", type=Path, help="folder to keep random weights in, or with those of before")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--checkpointing", action="store_true", help="compute activations again")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    args.accelerator = args.accelerator or ("cuda" if torch.cuda.is_available() else None)
    device = torch.device(args.accelerator or "cpu")
    prepare_cuda(device.type, deterministic=False)
    records, failed = [], False
    if args.accelerator:
        with tempfile.TemporaryDirectory(prefix="lora-7b-") as folder:
            weights = args.weights or Path(folder)
            if not (weights / "config.json").exists():
                make_weights(args.model, weights, device)
            for rung in args.rung:
                try:
                    for record in measured(args, rung, str(weights)):
                        records.append(record)
                        write(args, device, records)
                except Exception as error:
                    print(f"{rung} failed: {explain(error) or repr(error)}", file=sys.stderr)
                    failed = True
    else:
        print("Predicted; not measured on a GPU, since PyTorch finds none here")
        records = predicted(args)
        write(args, device, records)
    if records:
        print_records(records)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
