"""Errors that no bad input can provoke on this machine, or that come from the libraries below."""

import dataclasses
import re
import signal
import subprocess
import sys

import pytest
import torch
from support.helpers import SMALL, SRC, run_script, settings_for

from fabric_ladder import UserError
from fabric_ladder.places import PACKAGE
from fabric_ladder.techniques.advice import explain, less_memory

NEXT = r"Next to try: --activation_checkpointing true, which [^;]*; python src/"  # and then this rung


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        (
            "2_grad_accum",
            {"micro_batch_size": 8},
            r": python src/2_grad_accum.py --micro_batch_size 4 \(the same [^;]*; "
            r"--activation_checkpointing true, which [^;]*; "
            r"python src/5_low_precision.py, which [^;]*; --max_length 512$",
        ),
        (
            "3_torch_compile",
            {"micro_batch_size": 1},
            NEXT + r"5_low_precision\.py",
        ),
        (
            "4_mixed_precision",
            {"micro_batch_tokens": 4096},
            r"--micro_batch_tokens 2048 [^;]*; --activ[^;]*; python src/5_low_precision\.py",
        ),
        (
            "5_low_precision",
            {"micro_batch_size": 1},
            NEXT + r"6_lean_optimizer\.py",
        ),
        ("7_grad_checkpointing", {"activation_checkpointing": True}, r"src/6_lean_optimizer\.py[^;]*; --max_length"),
        ("2_grad_accum", {"micro_batch_size": 1, "precision": "bf16-true"}, NEXT + r"6_lean_optimizer\.py, w"),
        ("5_low_precision", {"micro_batch_size": 1, "optimizer": "sgd"}, NEXT + r"13_lora\.py, which"),
        (
            "16_bf16_that_learns",
            {"micro_batch_size": 1, "optimizer": "sgd"},
            NEXT + r"11_fsdp_cpu_offload\.py,",
        ),
        ("6_lean_optimizer", {"micro_batch_size": 1, "lora": True, "optimizer": "sgd"}, r"python src/14_qlora\.py, w"),
        (
            "17_step_in_backward",
            {"step_in_backward": True, "optimizer": "sgd"},
            r"try: --activ[^;]*; [^;]*--batch_size 8; python src/11_fsdp_cpu_offload\.py, which",
        ),
        ("9_ddp", {"micro_batch_size": 1, "precision": "16-mixed"}, r"src/10_fsdp\.py --precision 32-true, which"),
        (
            "9_ddp",
            {"micro_batch_size": 1, "lora": True, "quantization": "nf4"},
            r"src/11_fsdp_cpu_offload\.py --lora true, which",
        ),
        (
            "9_ddp",
            {"task": "image-classification"},
            r"; --activation_checkpointing true[^;]*; [^;]*src/10_fsdp\.py[^;]*$",
        ),
        ("2_grad_accum", {"attention": "eager"}, r"Next to try: --attention fused[^;]*; python"),
        ("12_deepspeed_zero", {}, r"--deepspeed zero3_offload"),
        ("6_lean_optimizer", {"micro_batch_size": 1}, NEXT + r"13_lora\.py"),
        ("15_packing", {"packing": True, "pack_rows": 4}, r"src/15_packing.py [^;]*--pack_rows 2 \(the same [^;]*; "),
        ("15_packing", {"micro_batch_size": 1}, NEXT + r"5_low_precision\.py --packing true, which"),
        (
            "17_step_in_backward",
            {"step_in_backward": True},
            r"try: --activ[^;]*; [^;]*--batch_size 8; "
            r"python src/17_step_in_backward\.py --optimizer_offload true, which",
        ),
        (
            "17_step_in_backward",
            {"step_in_backward": True, "optimizer_offload": True},
            r"try: --activation_c[^;]*; [^;]*--batch_size 8; --max_length",
        ),
        (
            "18_low_bit_optimizer",
            {"micro_batch_size": 1, "optimizer": "adam-8bit"},
            NEXT + r"18_low_bit_optimizer\.py --optimizer adam-4bit, which [^;]*; "
            r"python src/19_optimizer_offload\.py, which",
        ),
        ("18_low_bit_optimizer", {"micro_batch_size": 1}, NEXT + r"19_optimizer_offload\.py, which"),
        ("21_selective_checkpointing", {"micro_batch_size": 1}, NEXT + r"7_grad_checkpointing\.py"),
        ("13_lora", {"task": "instruction-tuning"}, r"--activ[^;]*; [^;]*src/14_qlora\.py[^;]*; --max_length 512$"),
    ],
)
def test_out_of_memory_names_the_next_things_to_try(tmp_path, name, values, expected):
    settings = settings_for(tmp_path, name=name, **values)
    with pytest.raises(RuntimeError, match="allocate") as caught:
        torch.empty(2**60, dtype=torch.uint8)
    on_a_gpu = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
    for error in (caught.value, on_a_gpu, RuntimeError("CUDA driver error: out of memory")):
        line = explain(error, settings)
        assert line.startswith("out of memory (")
        assert re.search(expected, line)


def test_a_smaller_micro_batch_is_not_named_where_the_optimizer_needs_most(tmp_path):
    settings = settings_for(tmp_path, name="2_grad_accum", micro_batch_size=8)
    assert "micro_batch_size 4" in less_memory(settings, "training")
    assert "micro_batch_size" not in less_memory(settings, "the optimizer")
    assert "checkpointing" not in less_memory(settings, "the optimizer")


def test_one_micro_batch_can_only_be_made_smaller_with_its_effective_batch(tmp_path):
    settings = settings_for(tmp_path, name="17_step_in_backward", step_in_backward=True)
    checkpointed, smaller, *_ = less_memory(settings, "training", (16, 128)).split("; ")
    assert "--activation_checkpointing true" in checkpointed
    assert smaller == "python src/17_step_in_backward.py --batch_size 8"


def test_fewer_tokens_are_fewer_than_there_were(tmp_path):
    settings = settings_for(tmp_path, name="5_low_precision", micro_batch_tokens=1024)
    assert less_memory(settings, "training", (4, 100)).startswith(
        "python src/5_low_precision.py --micro_batch_tokens 200"
    )


def test_smaller_moments_are_named_where_they_are_what_fills_the_device(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["src/18_low_bit_optimizer.py", "--resume", "auto"])
    settings = settings_for(tmp_path, name="18_low_bit_optimizer", micro_batch_size=1, optimizer="adam-8bit")
    assert "18_low_bit_optimizer.py --optimizer adam-4bit, which" in less_memory(settings)
    for more in ({"optimizer_offload": True}, {"lora": True}):
        assert "adam-4bit" not in less_memory(dataclasses.replace(settings, **more))


@pytest.mark.parametrize(("shape", "tokens"), [((4, 1500), 3000), ((30, 3, 224, 224), 2048)])
def test_an_evaluation_out_of_memory_gets_half_as_many_tokens(tmp_path, shape, tokens):
    settings = dataclasses.replace(settings_for(tmp_path, name="2_grad_accum"), eval_batch_tokens=None)
    assert f"--eval_batch_tokens {tokens};" in less_memory(settings, "the evaluation", shape)
    settings = dataclasses.replace(settings, eval_batch_tokens=600)
    assert "--eval_batch_tokens 300;" in less_memory(settings, "the evaluation", shape)


def test_an_installed_package_names_its_own_command(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(PACKAGE / "src" / "2_grad_accum.py"), "--batch_size", "8"])
    line = less_memory(settings_for(tmp_path, name="2_grad_accum"))
    assert "fabric-ladder run 5_low_precision --batch_size 8, which" in line


def test_attention_that_has_no_kernel_names_the_one_that_needs_none():
    assert "--attention eager" in explain(RuntimeError("cutlassB: no kernel found to launch!"))


def test_gradients_that_overflow_at_every_loss_scale_are_explained():
    scaler = pytest.importorskip("deepspeed.runtime.fp16.loss_scaler").DynamicLossScaler(1, 1000, 1, 1, False)
    with pytest.raises(Exception, match="at minimum") as error:
        scaler.update_scale(overflow=True)
    assert explain(error.value).startswith("gradients overflow float16 at every loss scale: try a lower --learning_r")


def test_a_bug_is_not_explained_away():
    assert explain(ValueError("a bug")) is None
    assert explain(UserError("mend it")) == "mend it"


def test_a_missing_compiler_is_one_line(tmp_path):
    environment = {"CXX": "/nowhere/g++", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    process = run_script(SRC / "3_torch_compile.py", *SMALL, cwd=tmp_path, **environment)
    assert process.returncode == 2
    assert "Traceback" not in process.stderr
    assert process.stderr.splitlines()[-1].startswith("error: torch.compile needs a C++ compiler")


@pytest.mark.parametrize("met", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_failed_collective_is_told_though_no_rank_is_gone(met):
    code = """if True:
        import torch.distributed as dist
        from fabric_ladder.techniques.advice import show_errors
        from fabric_ladder.distributed import watch
        watch.PATIENCE, watch.BEAT = 2, 0.5
        show_errors()
        if MET:
            dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
        rank = watch.RankWatch()
        if MET:
            rank.meet()
        raise dist.DistBackendError("NCCL: unhandled system error")"""
    command = [sys.executable, "-c", code.replace("MET", str(met))]
    process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert process.returncode == 1
    assert process.stderr.splitlines()[-1].endswith("DistBackendError: NCCL: unhandled system error")


def test_a_folder_that_may_not_be_entered_is_one_line():
    assert explain(PermissionError(13, "Permission denied", "/root/x.csv")).startswith("cannot use /root/x.csv (Perm")


def test_out_of_memory_in_another_script_names_its_own_options():
    assert explain(MemoryError(), smaller="a smaller --batch_size").endswith("Next to try: a smaller --batch_size")


def test_ctrl_c_before_there_is_a_run_is_one_line():
    code = "from fabric_ladder.techniques.advice import show_errors; show_errors(); raise KeyboardInterrupt"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (process.returncode, process.stderr) == (-signal.SIGINT, "Stopped by Ctrl-C\n")


def test_on_a_cpu_images_are_counted_though_its_default_is_tokens(tmp_path):
    settings = settings_for(tmp_path, task="image-classification", micro_batch_size=None, micro_batch_tokens=1024)
    assert "--micro_batch_size 2 (the same effective batch in less memory)" in less_memory(
        settings, "training", (4, 3, 32, 32)
    )
    assert "--micro_batch" not in less_memory(settings, "training", (1, 3, 224, 224))
