"""Rung 12 on real CPU processes with DeepSpeed, compared with one process without it, and its error messages."""

import json
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.devices import ONE_THREAD, SIZES, read, run_ranks, same
from support.helpers import DEEPSPEED_FILES, MODELS, ROOT, run_script, settings_for
from support.resuming import Evil, lines_of, rows_of
from torch.utils import cpp_extension

from fabric_ladder import UserError
from fabric_ladder.checkpoints.export import find_result, load_result
from fabric_ladder.distributed import deepspeed as module
from fabric_ladder.distributed.deepspeed import check_deepspeed

needs_deepspeed = pytest.mark.skipif(not find_spec("deepspeed"), reason="needs deepspeed: requirements-dev.txt")
SCRIPT = ROOT / "tests" / "support" / "deepspeed_script.py"
SLOW = pytest.mark.slow
LEARNING = ["--learning_rate", "5e-3", "--max_grad_norm", "0.05", "--schedule", "cosine", "--warmup_steps", "2"]


def small(**more):
    """Return a stage 3 configuration with sizes so small that all of DeepSpeed's code runs on a small model."""
    sizes = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_max_live_parameters", "sub_group_size")
    zero = {"stage": 3, "stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 0}
    return {"zero_optimization": zero | dict.fromkeys(sizes, 5000) | more}


@pytest.fixture
def alone(run):
    """Return the folder of a run of rung 2 on one process without DeepSpeed."""
    return lambda *more: run("2_grad_accum", 1, *LEARNING, *more)[0]


def run_deepspeed(cwd, config, *more, **environment):
    """Return the folder of a run on two processes, and its stdout. DeepSpeed may abort at exit: check the record."""
    if isinstance(config, dict):
        (cwd / "zero.json").write_text(json.dumps(config))
        config = cwd / "zero.json"
    process, _ = run_ranks(SCRIPT, 2, *SIZES, *LEARNING, "--deepspeed", config, *more, cwd=cwd, **environment)
    folder = cwd / "runs" / "deepspeed_script" / "1"
    assert (folder / "run.json").exists(), process.stderr[-3000:]
    assert json.loads((folder / "run.json").read_text())["status"] == "finished", process.stderr[-3000:]
    return folder, process.stdout


@SLOW
@needs_deepspeed
def test_zero_prints_the_losses_of_one_process(alone, saved):
    folder, stdout = saved("zero3")
    same(alone(), folder, abs=1e-4)
    rates = read(folder)[1]
    assert (max(rates), rates[-1]) == (5e-3, 0), "the learning rate schedule reaches its end"
    assert stdout.count("Test accuracy") == 1, "only rank 0 prints"
    assert "Parameters: 0.2 M" in stdout, "the whole model is counted, not a shard"
    results = read(folder)[2]
    assert results["parameter_bytes_of_a_rank"] == pytest.approx(2 * results["parameters"], rel=0.01)


@SLOW
@needs_deepspeed
def test_hugging_faces_configuration_runs_unchanged_even_without_a_compiler(alone, tmp_path):
    environment = {"CXX": "no-compiler", "TORCH_EXTENSIONS_DIR": str(tmp_path / "none")}
    constant = ("--schedule", "constant", "--warmup_steps", "0")
    folder, stdout = run_deepspeed(tmp_path, DEEPSPEED_FILES / "zero2_auto.json", *constant, **environment)
    same(alone(*constant), folder, abs=1e-4)
    assert "PyTorch's Adam steps on the CPU: DeepSpeed cannot compile its faster one: " in stdout


@SLOW
@needs_deepspeed
def test_deepspeeds_launcher_starts_the_rung_with_the_guides_file_of_stage_3(alone, tmp_path):
    """It passes `--local_rank=N`. The file offloads weights and optimizer to CPU memory."""
    launcher = [Path(sys.executable).with_name("deepspeed"), "--num_gpus=2", SCRIPT]  # a CPU has one slot to --include
    arguments = [*SIZES, "--learning_rate", "5e-3", "--deepspeed", DEEPSPEED_FILES / "zero3_auto.json"]
    environment = os.environ | ONE_THREAD | {"CXX": "no-compiler", "TORCH_EXTENSIONS_DIR": str(tmp_path / "none")}
    environment |= {"DS_ACCELERATOR": "cpu"}
    command = [*map(str, [*launcher, *arguments])]
    process = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr[-3000:]
    assert "batch 16 = 2 x 2 x 4" in process.stdout
    constant = ("--max_grad_norm", "null", "--schedule", "constant", "--warmup_steps", "0")
    same(alone(*constant), tmp_path / "runs" / "deepspeed_script" / "1", abs=1e-4)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return the folder of a run that saved a DeepSpeed checkpoint and a consolidated model."""

    @cache
    def saved(name, *more):
        cwd = tmp_path_factory.mktemp("saved")
        return run_deepspeed(cwd, CONFIGS[name], "--save", "sharded", *more, SAVE_BOTH="1")

    return saved


CONFIGS = {"zero1": "zero1", "zero2": "zero2", "zero3": small()}
LORA, HALF = ("--lora", "true", "--lora_dropout", "0"), ("--precision", "bf16-mixed")


@SLOW
@needs_deepspeed
@pytest.mark.parametrize(("config", "more"), [("zero3", HALF), ("zero2", LORA)], ids=["zero3-bf16", "zero2-lora"])
def test_deepspeeds_checkpoint_holds_the_consolidated_weights(alone, saved, config, more):
    folder, _ = saved(config, *more)
    if more == LORA:
        same(alone(*LORA), folder, abs=1e-4)
    whole = "adapter" if "--lora" in more else "model"
    models = [load_result(find_result(folder / name)) for name in ("checkpoint", whole)]
    if whole == "adapter":
        models = [model.merge_and_unload() for model in models]
        weights = load_file(folder / "adapter" / "adapter_model.safetensors")
        assert all("lora_" in name or "score" in name for name in weights)
        largest = max(path.stat().st_size for path in (folder / "checkpoint").rglob("*.pt"))
        assert largest < (folder / "base" / "model.safetensors").stat().st_size / 2, "frozen weights are not saved"
    first, second = (model.state_dict() for model in models)
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name
        assert second[name].dtype == torch.float32, "the weights come from the 32-bit copies"
    if "bf16-mixed" in more:
        assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in second.values())
    assert models[0].config.id2label == {0: "negative", 1: "positive"}
    assert (folder / "checkpoint" / "tokenizer.json").is_file()


@SLOW
@needs_deepspeed
def test_training_resumes_from_deepspeeds_checkpoint_on_as_many_ranks(alone, saved, tmp_path):
    folder, _ = saved("zero3")
    again, _ = run_deepspeed(tmp_path, small(), "--load", folder / "checkpoint")
    model = ("--from_scratch", "false", "--model", str(folder / "model"))
    losses = read(again)[0]
    assert losses[0] == pytest.approx(read(alone(*model))[0][0], abs=1e-4), "the run starts from the trained weights"
    assert losses[-1] != pytest.approx(read(alone(*model))[0][-1], abs=1e-4), "Adam's moments are loaded"
    (tmp_path / "other").mkdir()
    arguments = [*SIZES, "--deepspeed", tmp_path / "zero.json", "--load", folder / "checkpoint", "--devices", "1"]
    process = run_script(SCRIPT, *arguments, cwd=tmp_path / "other", **ONE_THREAD)
    assert process.returncode == 2
    assert re.search(
        r"^error: --load \S+checkpoint: DeepSpeed cannot load a checkpoint of 2 GPUs on 1: use 2, or start from its "
        r"weights: python scripts/export_model.py",
        process.stderr,
        re.MULTILINE,
    )


@needs_deepspeed
@pytest.mark.parametrize(("optimizer_class", "decay"), [(torch.optim.Adam, 0.0), (torch.optim.AdamW, 0.1)])
def test_deepspeeds_adam_for_the_cpu_takes_the_same_steps(monkeypatch, optimizer_class, decay):
    built = Path(cpp_extension._get_build_directory("cpu_adam", False))
    ours = str(Path(find_spec("deepspeed").origin).parent)  # another installation would compile its own
    if not (built / "cpu_adam.so").exists() or ours not in (built / "build.ninja").read_text():
        pytest.skip("compiling it takes minutes: run deepspeed_script.py --deepspeed zero2_offload once")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    first, second = (torch.nn.Parameter(torch.linspace(-1, 1, 1000)) for _ in range(2))
    mine = optimizer_class([first], lr=1e-2, weight_decay=decay)
    theirs = module._on_cpu(optimizer_class([second], lr=1e-2, weight_decay=decay))
    for step in range(5):
        for parameter, optimizer in ((first, mine), (second, theirs)):
            parameter.grad = torch.sin(parameter.detach() * 10 + step)
            optimizer.step()
    torch.testing.assert_close(second, first, atol=1e-6, rtol=1e-5)


@pytest.fixture
def refused(tmp_path, monkeypatch):
    """Return the error line for settings on a machine with GPUs."""

    def refused(config, **values):
        monkeypatch.setenv("DS_ACCELERATOR", "cpu")
        if isinstance(config, dict):
            (tmp_path / "zero.json").write_text(json.dumps({"zero_optimization": config}))
            config = str(tmp_path / "zero.json")
        defaults = {"accelerator": "cuda", "model": str(MODELS / "bloom-quickstart.json"), "deepspeed": config}
        with pytest.raises(UserError) as error:
            check_deepspeed(settings_for(tmp_path, **(defaults | values)))
        assert "\n" not in str(error.value)
        return str(error.value)

    return refused


def test_without_a_gpu_or_deepspeed_one_line_names_the_remedy(refused, monkeypatch):
    text = refused("zero2", accelerator="cpu", name="12_deepspeed_zero")
    assert text == "12_deepspeed_zero needs a CUDA GPU; src/10_fsdp.py shards a model on CPUs too"
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    assert refused("zero2").endswith(f'needs DeepSpeed: pip install "{module.DEEPSPEED}"')
    assert f'deepspeed = ["{module.DEEPSPEED}"]' in (ROOT / "pyproject.toml").read_text()


def nvme(**sections):
    return {"stage": 3} | {f"offload_{name}": {"device": "nvme", "nvme_path": path} for name, path in sections.items()}


@needs_deepspeed
def test_two_runs_on_one_disk_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setattr(module, "_compile", lambda builder: "RuntimeError: no compiler")
    (tmp_path / "zero.json").write_text(json.dumps({"zero_optimization": nvme(optimizer=str(tmp_path))}))
    values = {"accelerator": "cuda", "strategy": "deepspeed", "deepspeed": str(tmp_path / "zero.json")}
    settings = settings_for(tmp_path, model=str(MODELS / "bloom-quickstart.json"), **values)
    strategies = [module.deepspeed_strategy(settings) for _ in range(2)]
    folders = {Path(each.config["zero_optimization"]["offload_optimizer"]["nvme_path"]) for each in strategies}
    assert len(folders) == 2
    assert all(folder.parent == tmp_path and folder.is_dir() for folder in folders)


@needs_deepspeed
@pytest.mark.parametrize(
    ("zero", "values", "line"),
    [
        ({"stage": 2, "reduce_bucket": 5}, {}, r"DeepSpeed refuses it .* reduce_bucket Extra inputs are not"),
        ({"stage": 2, "mics_shard_size": 2}, {}, "DeepSpeed refuses it .*MiCS ZeRO-3 sharding has been removed"),
        ("zero3_nvme", {}, "cannot write into zero_optimization.offload_optimizer.nvme_path /local_nvme: in a copy"),
        (nvme(optimizer="."), {}, "DeepSpeed cannot compile its access to NVMe disks, which needs libaio-dev"),
        (nvme(optimizer=".", param="/local_nvme"), {}, "cannot write into zero_optimization.offload_param.nvme_path"),
        (nvme(optimizer="."), {"save_every": 4}, "cannot be continued, since DeepSpeed does not load optimizer state"),
        (nvme(optimizer="."), {"resume": "auto"}, "cannot be continued"),
    ],
)  # fmt: skip
def test_a_run_that_would_fail_later_is_refused_in_one_line_before_any_work(refused, monkeypatch, zero, values, line):
    monkeypatch.setattr(module, "_compile", lambda builder: "RuntimeError: no libaio")
    assert re.search(line, refused(zero, **values))


@needs_deepspeed
def test_a_key_that_deepspeed_does_not_read_is_refused(refused, tmp_path):
    """DeepSpeed ignores unknown keys outside of `zero_optimization`."""
    known = json.loads((DEEPSPEED_FILES / "zero3_manual.json").read_text())
    known |= {"aio": {}, "comms_logger": {"enabled": False}, "data_types": {}}
    for more, line in (
        ({"gradient_clippin": 1.0}, "does not read the key gradient_clippin; did you mean gradient_clipping? Else le"),
        ({"my_notes": "x"}, "does not read the key my_notes; leave it out"),
        ({"sparse_attention": {}}, "sparse_attention"),
    ):
        (tmp_path / "own.json").write_text(json.dumps(known | {"optimizer": {}, "scheduler": {}} | more))
        assert line in refused(str(tmp_path / "own.json"), precision="16-mixed")


@SLOW
@needs_deepspeed
def test_a_run_resumes_from_its_checkpoint(tmp_path):
    """Printed lines and metrics equal the uninterrupted run. Code in a checkpoint is not executed.

    A rank that cannot write the next checkpoint does not end the run, and no rank waits for it.
    """
    config, more = {"zero_optimization": {"stage": 2}}, ["--save_every", "2", "--keep", "9"]
    whole, _ = run_deepspeed(tmp_path, config, *more)
    shutil.copytree(whole, kept := tmp_path / "whole")
    for later in sorted((whole / "checkpoints").iterdir())[1:]:
        shutil.rmtree(later)
    record = json.loads((whole / "run.json").read_text())
    (whole / "run.json").write_text(json.dumps(record | {"status": "running"}))
    folder, stdout = run_deepspeed(tmp_path, config, *more, "--resume", "auto", RANK_1_CANNOT_WRITE="1")
    assert folder == whole
    assert "No checkpoint after step 4: another rank could not write; the previous one is kept\n" in stdout
    assert [path.name for path in (whole / "checkpoints").iterdir()] == ["step-000000002"]
    assert "Resumed from runs/deepspeed_script/1/checkpoints/step-000000002\n" in stdout
    assert "_load_legacy" not in stdout
    assert lines_of(whole) == lines_of(kept)
    assert rows_of(whole) == rows_of(kept)
    state = kept / "checkpoints" / "step-000000002" / "state"
    (weights,) = state.rglob("mp_rank_00_model_states.pt")
    torch.save({"module": Evil()}, weights)
    arguments = [*SIZES, "--deepspeed", tmp_path / "zero.json", "--devices", "2", "--load", state]
    process = run_script(SCRIPT, *arguments, cwd=tmp_path, **ONE_THREAD)
    assert re.search("^error.* --load .*made with another model, optimizer or stage", process.stderr, re.MULTILINE)
    assert not (tmp_path / "executed").exists()
