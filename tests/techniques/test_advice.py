"""What to try next when memory runs out, and errors of libraries in one line."""

import dataclasses
import json
import re
import sys

import pytest
import torch
import torch.distributed as dist
from support.helpers import settings_for
from torch._inductor.exc import CppCompileError, InvalidCxxCompiler

from fabric_ladder import UserError
from fabric_ladder.distributed import watch
from fabric_ladder.errors import NotFiniteError
from fabric_ladder.places import PACKAGE
from fabric_ladder.techniques.advice import _gaps, explain, explain_errors, less_memory

CHECKPOINTED = {"activation_checkpointing": True, "max_length": 4096, "micro_batch_size": 1}
NEXT = r"Next to try: --activation_checkpointing true, which [^;]*; python src/"  # the rung follows


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("2_grad_accum", {"micro_batch_size": 8},
         r": python src/2_grad_accum.py --micro_batch_size 4 \(the same [^;]*; --activation_checkpointing true, which "
         r"[^;]*; python src/5_low_precision.py, which [^;]*; --max_length 512$"),
        ("4_mixed_precision", {"micro_batch_tokens": 4096},
         r"--micro_batch_tokens 2048 [^;]*; --activ[^;]*; python src/5_low_precision\.py"),
        ("5_low_precision", {"micro_batch_size": 1}, NEXT + r"6_lean_optimizer\.py"),
        ("7_grad_checkpointing", {"activation_checkpointing": True}, r"src/6_lean_optimizer\.py[^;]*; --max_length"),
        ("5_low_precision", {"micro_batch_size": 1, "optimizer": "sgd"}, NEXT + r"13_lora\.py, which"),
        ("6_lean_optimizer", {"micro_batch_size": 1, "lora": True, "optimizer": "sgd"}, r"python src/14_qlora\.py, w"),
        ("17_step_in_backward", {"step_in_backward": True, "optimizer": "sgd"},
         r"try: --activ[^;]*; [^;]*--batch_size 8; python src/29_streamed_training\.py, which"),
        ("29_streamed_training", {"step_in_backward": True, "optimizer_offload": True, "stream_layers": True,
                                  "batch_size": 1},
         r"--activation_checkpointing true --activation_offload true, which keeps"),
        ("24_streamed_layers", {"lora": True, "stream_layers": 3, "micro_batch_size": 1},
         r"--stream_layers true, which streams all blocks"),
        ("9_ddp", {"micro_batch_size": 1, "precision": "16-mixed", "devices": 2},
         r"src/10_fsdp\.py --precision 32-true, which"),
        ("9_ddp", {"micro_batch_size": 1, "lora": True, "quantization": "nf4", "strategy": "ddp", "devices": 2},
         r"src/10_fsdp\.py --lora true --quantization nf4, which"),
        ("2_grad_accum", {"attention": "eager"}, r"Next to try: --attention fused[^;]*; python"),
        ("12_deepspeed_zero", {}, r"--deepspeed zero3_offload"),
        # the optimizer has no state on the device
        ("5_low_precision", {"optimizer_offload": True, "precision": "bf16-true"}, r"src/13_lora\.py[^;]*, which"),
        # Apple's GPU has no 4-bit weights, no 8-bit Adam, no offload and no FSDP2
        ("13_lora", {"accelerator": "mps", "lora": True}, r"^(?!.*(14_qlora|11_fsdp)).*; --max_length"),
        ("16_bf16_that_learns", {"accelerator": "mps"}, r"^(?!.*(18_low|19_opt|11_fsdp)).*; --max_length"),
        ("15_packing", {"micro_batch_size": 1, "packing": True}, NEXT + r"5_low_precision\.py --packing true, which"),
        ("18_low_bit_optimizer", {"micro_batch_size": 1, "optimizer": "adam-8bit"},
         NEXT + r"18_low_bit_optimizer\.py --optimizer adam-4bit, which [^;]*; --max_length"),
        ("18_low_bit_optimizer", {"micro_batch_size": 1, "optimizer": "adam-8bit", "lora": True}, r"^(?!.*adam-4bit)"),
        ("18_low_bit_optimizer", {"micro_batch_size": 1, "optimizer": "adam-4bit"},
         NEXT + r"19_optimizer_offload\.py, which"),
        ("20_activation_offload", CHECKPOINTED | {"activation_offload": True},
         r"try: python src/20_activation_offload\.py --mlp_tile 2048, which [^;]*; --max_length"),
        # OPT's blocks have no MLP that tiles could compute
        ("7_grad_checkpointing", CHECKPOINTED | {"model": "OPT"}, r"try: python src/6_lean_optimizer\.py"),
        ("14_qlora", {"lora": True, "quantization": "nf4", "accelerator": "cuda", "micro_batch_size": 1},
         r"src/24_streamed_layers\.py --quantization nf4, which"),
        ("21_selective_checkpointing", CHECKPOINTED | {"selective_checkpointing": True, "max_length": 1024},
         r"try: python src/21_selective_checkpointing\.py --selective_checkpointing false, which"),
        ("28_memory_budget", CHECKPOINTED | {"memory_budget": "1GB"}, r"\.py --memory_budget null, which recompu"),
        ("28_memory_budget", CHECKPOINTED | {"max_length": 1024}, r"try: python src/6_lean_optimizer\.py"),
        ("26_stateless", {"optimizer": "sinkgd", "precision": "bf16-true", "batch_size": 1},
         r"src/26_stateless\.py --step_in_backward true --micro_batch_tokens null, which keeps no gradients either"),
        ("26_stateless", {"optimizer": "sinkgd", "precision": "bf16-true", "block_steps": 5}, r"src/13_lora\.py"),
    ],
)  # fmt: skip
def test_out_of_memory_names_the_next_things_to_try(tmp_path, name, values, expected):
    if values.get("model") == "OPT":
        (tmp_path / "opt.json").write_text(json.dumps({"model_type": "opt", "num_hidden_layers": 1}))
        values |= {"model": str(tmp_path / "opt.json")}
    settings = settings_for(tmp_path, name=name, **values)
    with pytest.raises(RuntimeError, match="allocate") as caught:
        torch.empty(2**60, dtype=torch.uint8)
    on_a_gpu = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
    texts = (
        "CUDA driver error: out of memory",
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    )
    for error in (caught.value, on_a_gpu, *map(RuntimeError, texts)):
        line = explain(error, settings)
        assert line.startswith("out of memory (")
        assert re.search(expected, line)


@pytest.mark.parametrize(
    ("values", "phase", "shape", "expected"),
    [
        ({"micro_batch_size": 8}, "training", (), "--micro_batch_size 4 (the same effective batch"),
        ({"micro_batch_size": 8}, "training", (6, 100), "--micro_batch_size 3 (the same effective batch"),
        ({"micro_batch_size": 8}, "the optimizer", (), None),
        ({"micro_batch_tokens": 1024}, "training", (4, 100), "--micro_batch_tokens 200 (the same effective batch"),
        ({"micro_batch_tokens": "auto"}, "training", (4, 100), "--micro_batch_size 2 (the same effective batch"),
        ({"micro_batch_tokens": 1024}, "training", (4, 3, 32, 32), "--micro_batch_size 2 (the same effective batch"),
        ({"step_in_backward": True}, "training", (16, 128), "--batch_size 8;"),
        ({"eval_batch_tokens": None}, "the evaluation", (4, 1500), "--eval_batch_tokens 3000;"),
        ({"eval_batch_tokens": None}, "the evaluation", (30, 3, 224, 224), "--eval_batch_tokens 2048;"),
    ],
)
def test_half_of_the_batch_that_ran_out_of_memory_is_named(tmp_path, values, phase, shape, expected):
    sizes = {"micro_batch_size": None, "micro_batch_tokens": None} if "micro_batch_tokens" in values else {}
    settings = dataclasses.replace(settings_for(tmp_path, name="2_grad_accum"), **(sizes | values))
    advice = less_memory(settings, phase, shape)
    if expected is None:
        assert not re.search("batch_(size|tokens)", advice)
    else:
        assert f"python src/2_grad_accum.py {expected}" in advice
    assert ("--activation_checkpointing" in advice) == (phase in (None, "training"))


def test_options_without_effect_on_the_next_rung_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["src/5_low_precision.py", "--betas", "0.8,0.9", "--seed", "3"])
    settings = settings_for(tmp_path, name="5_low_precision", micro_batch_size=1, precision="bf16-true")
    assert "python src/6_lean_optimizer.py --seed 3, which" in less_memory(settings)


def test_the_next_rung_keeps_its_own_settings_where_a_yaml_file_has_others(tmp_path, monkeypatch):
    (tmp_path / "own.yaml").write_text("precision: bf16-mixed\noptimizer: adam-8bit\nmax_length: 512\n")
    monkeypatch.chdir(tmp_path)
    for name, expected in {
        "4_mixed_precision": r"src/5_low_precision\.py --config own\.yaml --precision bf16-true, which",
        "9_ddp": r"src/10_fsdp\.py --config own\.yaml --precision mixed --optimizer adam, which",
    }.items():
        monkeypatch.setattr(sys, "argv", [f"src/{name}.py", "--config", "own.yaml"])
        settings = settings_for(tmp_path, name=name, micro_batch_size=1, precision="bf16-mixed", devices=2)
        assert re.search(expected, explain(MemoryError(), settings))
    (tmp_path / "own.yaml").write_text("learning_rate: 1e-3\n")
    for name, there in {"5_low_precision": "6_lean_optimizer", "6_lean_optimizer": "13_lora"}.items():
        monkeypatch.setattr(sys, "argv", [f"src/{name}.py", "--config", "own.yaml"])
        optimizer = "sgd" if name == "6_lean_optimizer" else "adam"
        settings = settings_for(tmp_path, name=name, precision="bf16-true", optimizer=optimizer, micro_batch_size=1)
        rate = {"6_lean_optimizer": 0.01, "13_lora": 0.0002}[there]
        assert f"{there}.py --config own.yaml --learning_rate {rate}, which" in less_memory(settings)


def test_a_gpu_that_emulates_bfloat16_is_not_sent_to_it(tmp_path, monkeypatch):
    monkeypatch.setattr("fabric_ladder.techniques.advice.compute_capability", lambda: (7, 5))
    settings = settings_for(tmp_path, name="4_mixed_precision", precision="16-mixed", micro_batch_size=1)
    line = less_memory(dataclasses.replace(settings, accelerator="cuda"))
    assert "src/13_lora.py" in line
    assert "src/5_low_precision.py" not in line


def test_an_installed_package_names_its_own_command(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(PACKAGE / "src" / "2_grad_accum.py"), "--batch_size", "8"])
    line = less_memory(settings_for(tmp_path, name="2_grad_accum"))
    assert "fabric-ladder run 5_low_precision --batch_size 8, which" in line


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (UserError("mend it"), "mend it"),
        (PermissionError(13, "Permission denied", "/root/x.csv"), "cannot use /root/x.csv (Permission denied): "),
        (OSError(36, "File name too long", "x" * 300), f"cannot use {'x' * 300} (File name too long): "),
        (dist.DistNetworkError("refused\nmore"), "the processes cannot meet (refused)"),
        (RuntimeError("cutlassB: no kernel found to launch!"), "PyTorch has no fused attention for heads of this"),
        (InvalidCxxCompiler(), "torch.compile needs a C++ compiler"),
        (CppCompileError(["g++"], "error"), f"torch {torch.__version__} compiled the model to invalid C++"),
    ],
)
def test_an_error_that_the_user_can_fix_prints_one_line(error, line):
    assert explain(error).startswith(line)


def test_a_bug_keeps_its_traceback():
    assert explain(ValueError("a bug")) is None


def test_out_of_memory_in_another_script_names_its_own_options():
    assert explain(MemoryError(), smaller="a smaller --batch_size").endswith("Next to try: a smaller --batch_size")


def test_gradients_that_overflow_at_every_loss_scale_are_explained():
    scaler = pytest.importorskip("deepspeed.runtime.fp16.loss_scaler").DynamicLossScaler(1, 1000, 1, 1, False)
    with pytest.raises(Exception, match="at minimum") as error:
        scaler.update_scale(overflow=True)
    assert explain(error.value).startswith("gradients overflow float16 at every loss scale: try a lower --learning_r")


@pytest.mark.parametrize(
    ("values", "tries"),
    [
        ({}, "a lower --learning_rate, another --precision or --max_grad_norm 1"),
        ({"max_grad_norm": 0.3}, "a lower --learning_rate or another --precision"),
        ({"optimizer": "sinkgd"}, "a lower --learning_rate or another --precision"),
    ],
)
def test_a_loss_that_is_not_finite_names_only_settings_that_the_run_can_have(tmp_path, values, tries):
    error = NotFiniteError("the loss is nan at epoch 1, batch 2: the run stops")
    line = explain(error, settings_for(tmp_path, **values))
    assert line.startswith(f"{error}; try {tries}")
    assert ("--max_grad_norm" in line) == ("--max_grad_norm" in tries)


@pytest.fixture
def hook(monkeypatch):
    """Return the exception hook of a script."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    explain_errors()
    return sys.excepthook


def test_ctrl_c_before_the_run_starts_prints_one_line(hook, capfd):
    hook(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert capfd.readouterr().err == "Stopped by Ctrl-C\n"


@pytest.mark.parametrize("met", [False, True])
def test_a_failed_collective_keeps_its_traceback_though_no_rank_is_dead(hook, capfd, monkeypatch, met):
    monkeypatch.setattr(watch, "PATIENCE", 1)
    monkeypatch.setattr(watch, "BEAT", 0.25)
    rank = watch.RankWatch()
    if met:
        dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
        rank.meet()
    error = dist.DistBackendError("NCCL: unhandled system error")
    hook(type(error), error, None)
    if met:
        dist.destroy_process_group()
    assert not rank.is_alive()
    assert capfd.readouterr().err.endswith("DistBackendError: NCCL: unhandled system error\n")


def test_out_of_memory_says_whether_gaps_between_tensors_are_the_cause():
    assert "fragmentation" in _gaps(6_000_000_000, 9_000_000_000)
    assert _gaps(8_000_000_000, 9_000_000_000).endswith("9.00 GB reserved: the tensors take it, not gaps between them")


def test_graphs_are_given_up_first_and_a_low_bit_adam_steps_on_the_cpu_as_plain_adam(tmp_path):
    for name in ("27_cuda_graphs", "16_bf16_that_learns"):
        settings = settings_for(tmp_path, name=name, cuda_graphs=True, packing=True, precision="bf16-true")
        assert re.search(r"--cuda_graphs false, which frees gradients[^;]*; --max_length", less_memory(settings))
    settings = settings_for(tmp_path, name="17_step_in_backward", optimizer="adam-8bit", step_in_backward=True,
                            batch_size=1, micro_batch_size=1, precision="bf16-true")  # fmt: skip
    assert re.search(r"--optimizer_offload true [^;]*--optimizer adam, which keeps the state", less_memory(settings))
