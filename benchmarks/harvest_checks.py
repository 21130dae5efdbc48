"""What must be right on a GPU before its speed counts: each check is a part, and says whether it passed.

    python benchmarks/harvest_checks.py losses --out FILE [--rehearse]

Parts:
    machine    Versions, hardware, what the doctor says. Fails on nothing.
    losses     The first 50 steps of every rung on the quickstart's model, against the CPU's.
    resume     Rung 2 stopped by SIGTERM and resumed, against an undisturbed run: equal with `--deterministic true`.
    memory     A rung that is given too little memory names the next script in one line, with exit status 2.
    rank       A rank of two that is killed ends the other, with a line that names it.
    calibrate  What the planner adds to the tensors, by scripts/plan_memory.py --calibrate.
    nccl       Seconds and bytes/s of an all-reduce between all GPUs.
"""

import argparse
import json
import os
import re
import resource
import runpy
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic, perf_counter

import common  # first of all: it makes the project importable without an installation
import psutil
import torch

from fabric_ladder.environment import write_whole
from fabric_ladder.planning.formulas import ASSUMED, load_overhead
from fabric_ladder.rungs import RUNGS
from fabric_ladder.settings import Settings

SELF = str(Path(__file__).resolve())
STEPS = 50
TOLERANCES = {"32-true": 0.01, "16 bits": 0.1}  # largest difference of two losses; chance is at 0.69
QUICKSTART = ["--config", str(common.ROOT / "configs" / "quickstart.yaml"), "--validation_samples", "40",
              "--test_samples", "40"]  # fmt: skip


def machine(args: argparse.Namespace) -> dict:
    """Return what a harvest is of."""
    device = torch.device(args.device)
    try:
        items = json.loads(common.run_child([str(common.ROOT / "scripts" / "doctor.py"), "--json"], limit=60))["items"]
    except (common.ChildError, subprocess.TimeoutExpired) as error:  # no reason to measure nothing
        items = [{"problem": str(error)}]
    capability = torch.cuda.get_device_capability() if args.device == "cuda" else None
    gpus = torch.cuda.device_count() if args.device == "cuda" else 0
    return common.environment(device) | {"gpus": gpus, "capability": capability, "doctor": items}


def losses(args: argparse.Namespace) -> dict:
    """Return how far each rung's losses are from those on the CPU; several run at once, since no time is taken."""
    rungs = [rung.stem for rung in RUNGS if rung.stem != "8_init_on_device"]  # which draws its weights on the device
    if args.rehearse:
        rungs = rungs[1:2]
    workers = max(1, min(8, (os.cpu_count() or 2) // 2))

    def run(rung: str, device: str) -> tuple[list[float], str] | str:
        steps = 4 if args.rehearse else STEPS
        batch = 1 if rung == "1_batch_size_1" else 16
        options = [*QUICKSTART, "--accelerator", device, "--train_samples", str(batch * steps), "--save", "no"]
        options += ["--log_every", str(batch), "--predict_memory", "false", "--matmul_precision", "highest"]
        options += ["--lora_dropout", "0"] if "lora" in rung else []  # which each device draws in its own way
        try:
            record, rows = common.run_recorded(rung, options, limit=240)
        except (common.ChildError, subprocess.TimeoutExpired) as error:
            return str(error)
        return [float(row["loss"]) for row in rows if row["loss"]], record["settings"]["precision"]

    found = {}
    with ThreadPoolExecutor(workers) as pool:
        runs = {rung: [pool.submit(run, rung, device) for device in (args.device, "cpu")] for rung in rungs}
        for rung, pair in runs.items():
            mine, reference = (each.result() for each in pair)
            if rung.startswith("12_") and args.device == "cuda":  # it needs a GPU, and computes what rung 4 does
                reference = runs["4_mixed_precision"][1].result()
            if isinstance(mine, str) or isinstance(reference, str):
                refused = [side for side in (mine, reference) if isinstance(side, str)]
                found[rung] = {"right": any("status 2" in text for text in refused), "not run": refused[0]}
            else:
                gaps = [abs(one - other) for one, other in zip(mine[0], reference[0], strict=True)]
                right = max(gaps) <= TOLERANCES["32-true" if mine[1] == "32-true" else "16 bits"]
                found[rung] = {"right": right, "largest difference": max(gaps), "first": gaps[0], "precision": mine[1]}
            write(args, {"passed": False, "rungs": found})  # as far as it has come
    return {"passed": all(each["right"] for each in found.values()), "rungs": found}


def resume(args: argparse.Namespace) -> dict:
    """Return how far the losses of a resumed run are from those of an undisturbed one."""
    found, ways = {}, {"deterministic": True} if args.rehearse else {"deterministic": True, "as it is": False}
    for way, deterministic in ways.items():
        samples = 96 if args.rehearse else 1600
        options = [*QUICKSTART, "--accelerator", args.device, "--deterministic", str(deterministic).lower(),
                   "--train_samples", str(samples), "--log_every", "16", "--predict_memory", "false"]  # fmt: skip
        script = str(common.ROOT / "src" / "2_grad_accum.py")
        with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(1) as pool:
            whole = pool.submit(common.run_recorded, "2_grad_accum", options)
            options += ["--runs_dir", scratch, "--resume", "auto"]
            with start([script, *options]) as process:
                stopped = stop_after(process, f"Samples {samples // 2:05d}")
            record, rows = rows_of_resumed(script, options, scratch)
            undisturbed, expected = whole.result()
        gaps = [abs(float(mine["loss"]) - float(its["loss"])) for mine, its in zip(rows, expected, strict=True)
                if mine["loss"]]  # fmt: skip
        gaps.append(abs(record["results"]["test_loss"] - undisturbed["results"]["test_loss"]))
        same = record["results"]["samples_hash"] == undisturbed["results"]["samples_hash"]
        right = stopped == 143 and same and max(gaps) <= (0 if deterministic else 0.02)
        found[way] = {"right": right, "largest difference": max(gaps), "status": stopped, "same samples": same}
    return {"passed": all(each["right"] for each in found.values()), "ways": found}


def start(command: list[str]) -> subprocess.Popen:
    """Start a script, whose lines can be read as they come, stderr's among them."""
    return subprocess.Popen([sys.executable, "-u", *command], env=common.child_environment(None), cwd=common.ROOT,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)  # fmt: skip


def stop_after(process: subprocess.Popen, text: str) -> int:
    """Send SIGTERM once a text is printed, and return the exit status."""
    for line in process.stdout:
        if text in line:
            process.send_signal(signal.SIGTERM)
            break
    process.communicate()
    return process.returncode


def rows_of_resumed(script: str, options: list[str], runs: str) -> tuple[dict, list[dict]]:
    """Go on with a stopped run; return its run.json and rows."""
    common.run_child([script, *options])
    return common.read_run(next(Path(runs).glob("*/1")))


def memory(args: argparse.Namespace) -> dict:
    """Return what a rung says that runs out of memory."""
    if args.device == "cuda":
        model = common.ROOT / "configs" / "models" / "bloom-560m.json"
        options = [*common.BASE, "--model", str(model), "--from_scratch", "true", "--predict_memory", "false"]
        options += ["--dataset", "synthetic", "--train_samples", "64"]
    else:
        options = [*QUICKSTART, "--train_samples", "1600", "--batch_size", "1600", "--micro_batch_size", "1600"]
    command = [SELF, "limited", "--device", args.device, str(common.ROOT / "src" / "2_grad_accum.py"), *options]
    with tempfile.TemporaryDirectory() as runs, start([*command, "--runs_dir", runs]) as process:
        said = [line.strip() for line in process.stdout]
    line = next((line for line in said if line.startswith("error:")), said[-1] if said else "")
    right = process.returncode == 2 and "out of memory" in line and "5_low_precision.py" in line
    return {"passed": right, "status": process.returncode, "line": common.impersonal(line)}


def limited(args: argparse.Namespace) -> None:
    """Run a script in 6 GB of the GPU, less than the optimizer's state of BLOOM-560m leaves; on a CPU, in 2 GB more."""
    if args.device == "cuda":
        torch.cuda.set_per_process_memory_fraction(6e9 / torch.cuda.get_device_properties(0).total_memory)
    else:
        most = psutil.Process().memory_info().vms + 2 * 10**9
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    sys.argv = args.script
    runpy.run_path(args.script[0], run_name="__main__")


def rank(args: argparse.Namespace) -> dict:
    """Return how long the other rank lives when one is killed, and what it says."""
    options = [*QUICKSTART, "--accelerator", args.device, "--devices", "2", "--log_every", "16", "--epochs", "50"]
    command = [str(common.ROOT / "src" / "9_ddp.py"), *options]
    with tempfile.TemporaryDirectory() as runs, start([*command, "--runs_dir", runs]) as process:
        next((line for line in process.stdout if "Loss:" in line), None)
        children = psutil.Process(process.pid).children()
        [other] = [child for child in children if "9_ddp.py" in " ".join(child.cmdline())]
        other.kill()
        killed = monotonic()
        rest = process.communicate(timeout=120)[0].splitlines()
        seconds = monotonic() - killed
    line = next((line for line in rest if re.search("rank:? 1", line)), "")  # by the watch, or by Fabric's launcher
    return {"passed": process.returncode != 0 and bool(line), "seconds": seconds, "line": line}


def calibrate(args: argparse.Namespace) -> dict:
    """Return the planner's overhead of this GPU as it was measured now, and as it is assumed elsewhere."""
    common.run_child([str(common.ROOT / "scripts" / "plan_memory.py"), "--calibrate"], limit=240)
    measured = load_overhead(Settings().cache_dir, torch.cuda.get_device_name(0))
    return {"measured": measured._asdict(), "assumed": ASSUMED._asdict()}


def nccl(args: argparse.Namespace) -> dict:
    """Return seconds and bus bandwidth of an all-reduce, by bytes: 2 (n - 1) / n of them cross each rank's link."""
    count = torch.cuda.device_count() if args.device == "cuda" else 2
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_all_reduce, (count, args.device, folder), nprocs=count)
        seconds = json.loads((Path(folder) / "seconds.json").read_text(encoding="utf-8"))
    return {"ranks": count, "all_reduce": [
        {"bytes": size, "seconds": each, "bus_bytes_per_second": 2 * (count - 1) / count * size / each}
        for size, each in seconds
    ]}  # fmt: skip


def _all_reduce(number: int, count: int, device: str, folder: str) -> None:
    """Time all-reduces as one of the ranks."""
    place = torch.device(device, number) if device == "cuda" else torch.device("cpu")
    torch.distributed.init_process_group("nccl" if device == "cuda" else "gloo", f"file://{folder}/store",
                                         rank=number, world_size=count)  # fmt: skip
    if device == "cuda":
        torch.cuda.set_device(place)
    found = []
    for size in (2**20, 2**26, 2**30) if device == "cuda" else (2**20,):
        tensor = torch.ones(size // 4, device=place)
        for turn in range(6):
            if turn == 1:  # the first connects
                torch.distributed.barrier()
                start = perf_counter()
            torch.distributed.all_reduce(tensor)
            if device == "cuda":
                torch.cuda.synchronize(place)
        found.append((size, (perf_counter() - start) / 5))
    if number == 0:
        (Path(folder) / "seconds.json").write_text(json.dumps(found), encoding="utf-8")
    torch.distributed.destroy_process_group()


def write(args: argparse.Namespace, figures: dict) -> None:
    """Write figures, whole."""
    write_whole(args.out, json.dumps(figures))


PARTS = (machine, losses, resume, memory, limited, rank, calibrate, nccl)

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.allow_abbrev = False  # what it does not know belongs to the script of `limited`
    parser.add_argument("part", choices=[part.__name__ for part in PARTS])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--rehearse", action="store_true", help="as little as shows that it works")
    parser.add_argument("--out", type=Path)
    args, args.script = parser.parse_known_args()
    try:
        figures = next(part for part in PARTS if part.__name__ == args.part)(args)
    except common.ChildError as error:
        parser.exit(error.status, f"{error}\n")
    if args.out:
        write(args, figures)
