"""Settings of a run: sources, hardware, precision, learning rates, and refusals."""

import dataclasses
import os
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from support.data_files import write_rows
from support.helpers import CONFIGS, MODELS, RUNGS

from fabric_ladder import Settings, UserError, parse_settings
from fabric_ladder.checks import check_precision
from fabric_ladder.cli import resolve
from fabric_ladder.data.cutting import cut
from fabric_ladder.errors import Checked
from fabric_ladder.models import cpu_bfloat16
from fabric_ladder.options import NAMES, script_defaults
from fabric_ladder.planning.candidates import read_settings
from fabric_ladder.planning.gpus import find_gpu
from fabric_ladder.settings import GROUPS
from fabric_ladder.techniques.advice import explain
from fabric_ladder.techniques.compile import Compile

BLOOM = ["--model", str(MODELS / "bloom-quickstart.json"), "--from_scratch", "true"]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch, tmp_path):
    """Use an empty folder, no GPU and a CPU with fast bfloat16.

    Afterwards restore Python's excepthook, which `parse_settings` replaces.
    """
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(cpu_bfloat16, "cpu_has_fast_bfloat16", lambda: True)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def gpu(monkeypatch):
    """Pretend that there are GPUs of a compute capability. PyTorch reports bfloat16 for all of them."""

    def pretend(*capability, count=1):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Tesla T4")
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_, **__: True)

    return pretend


@pytest.fixture
def triton(monkeypatch):
    """Pretend that Triton is installed, or not; a build of PyTorch for CPUs comes without."""

    def pretend(found=True):
        monkeypatch.setattr(Compile, "is_installed", lambda _: found)

    return pretend


@pytest.fixture
def mac(monkeypatch):
    """Pretend that PyTorch finds the GPU of Apple silicon, under a version of macOS."""

    def pretend(macos=15):
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
        monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda major, minor: macos >= major)

    return pretend


@pytest.fixture
def config(tmp_path):
    """Write a YAML file; return the arguments that name it."""

    def write(text):
        (tmp_path / "own.yaml").write_text(text, encoding="utf-8")
        return ["--config", "own.yaml"]

    return write


def refusal(*args, **defaults):
    """Return the one-line error for these arguments."""
    with pytest.raises(UserError) as error:
        parse_settings([*BLOOM, *args], **defaults)
    assert "\n" not in str(error.value)
    return str(error.value)


# The sources of the settings


def test_the_defaults_are_the_blogs_run():
    settings = Settings()
    assert (settings.dataset, settings.model) == ("imdb", "bigscience/bloom-560m")
    assert (settings.learning_rate, settings.seed) == (5e-5, 123)
    assert (settings.max_length, settings.epochs) == (1024, 1)
    values = yaml.safe_load((CONFIGS / "imdb_bloom_560m.yaml").read_text())
    assert values.pop("log_every") == 300 * 16  # the blog's value; the default is also a tenth of a shorter epoch
    assert values == {name: getattr(settings, name) for name in values}


def test_without_a_gpu_the_quickstart_runs_and_a_notice_names_it():
    settings = parse_settings(["--train_samples", "7"], batch_size=16)
    assert (settings.dataset, settings.max_length, settings.batch_size) == ("synthetic", 512, 16)
    assert (settings.model, settings.train_samples) == (str(MODELS / "bloom-quickstart.json"), 7)
    assert settings.accelerator == "cpu"
    (notice,) = settings.notices
    assert notice.startswith("No --config and no CUDA GPU: this is the quickstart (configs/quickstart.yaml)")
    assert notice.endswith("For real work: --config configs/imdb_bloom_560m.yaml; settings: --help")
    settings = parse_settings(["--config", "imdb_minilm.yaml", *BLOOM])
    assert (settings.config, settings.notices) == (str(CONFIGS / "imdb_minilm.yaml"), ())
    assert (settings.dataset, settings.max_length, settings.train_samples) == ("imdb", 256, 2000)


@pytest.mark.parametrize(
    ("name", "capability", "tokens"), [("A100 80GB", (8, 0), 1024), ("H100", (9, 0), 2048), ("B200", (10, 0), 1024)]
)
def test_a_plan_cuts_as_a_run_on_the_same_gpu(gpu, name, capability, tokens):
    gpu(*capability)
    rows, lengths, items = np.arange(16), np.arange(10, 330, 20), np.ones(16)
    for rung, strategy, price in (("4_mixed_precision", "single", tokens), ("10_fsdp", "fsdp", 5333)):
        run = parse_settings([*BLOOM, "--accelerator", "cuda"], strategy=strategy)
        plan = read_settings(rung, BLOOM, gpu=find_gpu(name))
        assert run.full_pass == plan.full_pass == price, "the tokens that a pass costs at least"
        for settings in (run, plan):
            (parts,) = cut(settings, rows, lengths, items, 1, tokens=16_384)
            assert len(parts) == {1024: 3, 2048: 2, 5333: 1}[price]


def test_with_a_gpu_the_defaults_in_code_are_used(gpu):
    on_cpu = parse_settings(BLOOM)
    assert (on_cpu.matmul_precision, on_cpu.eval_batch_tokens) == ("highest", 1024)
    gpu(8, 0)
    settings = parse_settings(BLOOM)
    assert (settings.dataset, settings.max_length, settings.config, settings.notices) == ("imdb", 1024, None, ())
    assert (settings.accelerator, settings.matmul_precision, settings.eval_batch_tokens) == ("cuda", "high", None)
    given = ["--accelerator", "cpu", "--matmul_precision", "medium", "--eval_batch_tokens", "512"]
    settings = parse_settings([*BLOOM, *given])
    assert (settings.accelerator, settings.matmul_precision, settings.eval_batch_tokens) == ("cpu", "medium", 512)


def test_help_describes_every_setting(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit) as stop:
        parse_settings(["--help", "all"], batch_size=16)
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for name in NAMES:
        found = re.search(rf"^  --{name} (.*?)(?=^  -|\Z)", text, re.MULTILINE | re.DOTALL)
        assert found, name
        assert len(found[1].split()) > 4, found[0]
    assert " ".join(text.split()).count("set by this script: 16)") == 1
    assert text.count("set by this script") == 1
    assert re.findall(r"^(\S[\w-]*):$", text, re.MULTILINE) == ["options", *GROUPS, "examples"]
    with pytest.raises(SystemExit):
        parse_settings(["--help"], batch_size=16)
    short = capsys.readouterr().out
    assert "--batch_size N" in short
    assert "--help all" in short
    assert 10 <= len(re.findall(r"^  --", short, re.MULTILINE)) <= 20


ROUND_TRIPS = {
    "the script's own": ([], {"batch_size": 16, "micro_batch_size": 1, "precision": "mixed"}),
    "null": (["--micro_batch_size", "null"], {"batch_size": 16, "micro_batch_size": 1, "optimizer": "sgd"}),
    "texts": (["--task", "instruction-tuning", "--prompt_template", "Frage: {instruction}\n'{input}'\n# Antwort:"], {}),
    "numbers": (["--micro_batch_tokens", "512", "--max_grad_norm", "1e-3", "--logger", "csv,tensorboard"], {}),
}


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_the_printed_config_gives_the_same_settings(tmp_path, capsys, name):
    args, script = ROUND_TRIPS[name]
    expected = parse_settings(args, **script)
    with pytest.raises(SystemExit) as stop:
        parse_settings([*args, "--print_config"], **script)
    assert stop.value.code == 0
    path = tmp_path / "own.yaml"
    path.write_text(capsys.readouterr().out, encoding="utf-8")
    assert list(yaml.safe_load(path.read_text(encoding="utf-8"))) == NAMES
    got = parse_settings(["--config", str(path)], **script)
    same = {"config": None, "notices": ()}
    assert dataclasses.replace(got, **same) == dataclasses.replace(expected, **same)


@pytest.mark.parametrize(
    ("words", "from_scratch"),
    [("folder", False), ("folder --from_scratch true", True), (str(MODELS / "llama-tiny.json"), True),
     ("some/name", False)],
)  # fmt: skip
def test_a_model_on_the_command_line_is_pretrained_even_if_the_file_has_from_scratch(
    config, monkeypatch, words, from_scratch
):
    for name in ("check", "padding_notice"):  # they would load the model
        monkeypatch.setattr(f"fabric_ladder.cli.{name}", lambda *_: None)
    own = config("model: some.json\nfrom_scratch: true\nlearning_rate: 1e-3\nmax_length: 64")
    model, *options = words.split()
    settings = parse_settings([*own, "--model", model, *options])
    assert (settings.model, settings.from_scratch, settings.learning_rate) == (model, from_scratch, 1e-3)
    notices = [notice for notice in settings.notices if notice.startswith("--model")]
    line = f"--model {model}: its pretrained weights, not the random ones of own.yaml (--from_scratch true)"
    assert notices == [line] * (not from_scratch)


def test_a_pretrained_model_on_a_cpu_has_the_values_of_a_gpu(minilm, tmp_path):
    model = ["--model", str(minilm)]
    settings = parse_settings([*model, "--dataset", "tickets.csv", "--lora", "true"])
    assert (settings.learning_rate, settings.lora_targets, settings.pad_to_multiple_of) == (
        2e-4, "all-linear", 1
    )  # fmt: skip
    assert settings.notices == (
        f"No --config and no CUDA GPU: this trains {minilm} with the values for a GPU, on tickets.csv. For real work: "
        "--config configs/imdb_minilm.yaml; settings: --help",
        f"--max_length 512: {minilm} has no more positions",
    )
    settings = parse_settings(model)
    assert (settings.dataset, settings.learning_rate, settings.max_length) == ("synthetic", Settings.learning_rate, 512)
    (tmp_path / "short.json").write_text('{"model_type": "bert", "max_position_embeddings": 96}')
    assert parse_settings(["--model", str(tmp_path / "short.json"), "--from_scratch", "true"]).max_length == 96
    assert parse_settings([*model, "--from_scratch", "true"]).learning_rate == 1e-3
    adapters = ["--config", "configs/quickstart.yaml", *model, "--lora", "true"]  # their rate is for these weights
    assert parse_settings(adapters).learning_rate == 2e-4


def test_the_length_of_a_user_is_refused_and_not_replaced(minilm):
    with pytest.raises(UserError, match=r"--max_length 513 is beyond the 512 positions of .*: use --max_length 512"):
        parse_settings(["--model", str(minilm), "--max_length", "513"])


def test_sgd_and_adapters_have_their_own_learning_rates_and_a_notice_names_the_replaced_rate(config):
    for option, name, rate in (("--optimizer sgd", "optimizer: sgd", 0.01), ("--lora true", "lora: true", 0.002)):
        words = [*BLOOM, *option.split()]
        settings = parse_settings([*config("learning_rate: 1e-3"), *words])
        assert settings.learning_rate == rate
        notice = f"Learning rate {rate} in place of 0.001, which own.yaml has for Adam on all weights"
        assert settings.notices[0].startswith(notice)
        both = config(f"learning_rate: 0.5\n{name}")  # a file with the technique has its rate
        for args, wanted in (([], 0.5), (["--learning_rate", "0.2"], 0.2)):
            settings = parse_settings([*both, *BLOOM, *args])
            assert settings.learning_rate == wanted
            assert not [line for line in settings.notices if line.startswith("Learning rate")]


# Micro-batches and precision


@pytest.mark.parametrize(
    ("rung", "options", "file", "on_gpu", "on_cpu"),
    [("2_grad_accum", [], "", (1, None), (1, None)), ("4_mixed_precision", [], "", (None, "auto"), (None, 1024)),
     ("2_grad_accum", ["--batch_size", "4"], "micro_batch_size: null", (4, None), (4, None)),
     ("4_mixed_precision", ["--micro_batch_size", "1"], "", (1, None), (1, None)),
     ("4_mixed_precision", [], "micro_batch_size: 4", (4, None), (4, None)),
     ("5_low_precision", ["--micro_batch_tokens", "auto"], "micro_batch_size: 4", (None, "auto"), (None, "auto")),
     ("2_grad_accum", [], "micro_batch_tokens: auto", (None, "auto"), (None, 1024)),
     ("2_grad_accum", ["--micro_batch_size", "1"], "micro_batch_tokens: auto", (1, None), (1, None))],
)  # fmt: skip
def test_the_users_sizes_override_an_automatic_micro_batch(gpu, config, rung, options, file, on_gpu, on_cpu):
    gpu(8, 0)
    args = [*(config(file) if file else []), *BLOOM, *options]
    for accelerator, expected in (("cpu", on_cpu), ("cuda", on_gpu)):
        settings = parse_settings([*args, "--accelerator", accelerator], **script_defaults(rung))
        assert (settings.micro_batch_size, settings.micro_batch_tokens) == expected


ON_A_T4 = {
    "5": ("bf16-true", "no tensor cores, and attention keeps a matrix of tokens x tokens"),
    "10": ("32-true", "32-true in place of mixed precision, since FSDP2 cannot scale the loss"),
    "13": ("16-mixed", "16-mixed in place of bf16-true: frozen matrices in float16, adapters in 32-bit"),
}
ON_A_T4 |= dict.fromkeys("6 7 8 16 17 18 19 20 21 23 25 26 28 29".split(), ON_A_T4["5"])
ON_A_T4 |= {"11": ON_A_T4["10"], "14": ON_A_T4["13"], "24": ON_A_T4["13"]}


@pytest.mark.parametrize("rung", RUNGS, ids=lambda path: path.stem)
def test_every_rung_runs_on_a_gpu_without_bfloat16_and_names_its_precision(gpu, rung):
    script = script_defaults(rung.stem)
    own = script.get("precision", "32-true")
    gpu(8, 0)
    newer = resolve(Settings(**script), script=script)
    assert newer.precision == {"mixed": "bf16-mixed"}.get(own, own)
    assert not [notice for notice in newer.notices if "bfloat16" in notice]
    check_precision(newer, (8, 0))
    gpu(7, 5)
    settings = resolve(Settings(**script), script=script)
    check_precision(settings, (7, 5))
    notices = [notice for notice in settings.notices if "bfloat16" in notice]
    other, meaning = ON_A_T4.get(rung.stem.split("_")[0], ({"mixed": "16-mixed"}.get(own, own), None))
    assert settings.precision == other
    assert len(notices) == bool(meaning)
    for notice in notices:
        assert notice.startswith("Tesla T4 only emulates bfloat16 (compute capability below 8.0): ")
        assert meaning in notice


def test_the_users_precision_is_used_or_refused_with_the_reason(gpu):
    gpu(7, 5)
    for settings in (
        parse_settings([*BLOOM, "--precision", "bf16-true"]),
        resolve(Settings(precision="bf16-true", lora=True), given=["precision"]),
    ):
        assert settings.precision == "bf16-true"
        assert "attention keeps a matrix of tokens x tokens" in settings.notices[0]
    for script, instead in (({}, "16-mixed"), ({"strategy": "fsdp"}, "32-true")):
        message = refusal("--precision", "bf16-mixed", **script)
        assert "capability 7.5, below 8.0, only emulates bfloat16" in message
        assert f"use --precision {instead}" in message
    for precision in ("bf16-mixed", "bf16-true"):
        settings = parse_settings([*BLOOM, "--precision", precision, "--accelerator", "cpu"])
        assert (settings.precision, settings.notices) == (precision, ())


# Switches that a CUDA GPU turns on

TURNED_ON = {
    "17_step_in_backward": "packing", "21_selective_checkpointing": "compile", "22_float8": "compile",
    "29_streamed_training": "packing",
}  # fmt: skip


@pytest.mark.parametrize("fast", [True, False])
def test_a_cpu_without_fast_bfloat16_says_how_it_computes(monkeypatch, fast):
    monkeypatch.setattr(cpu_bfloat16, "cpu_has_fast_bfloat16", lambda: fast)
    for rung in ("4_mixed_precision", "5_low_precision", "16_bf16_that_learns", "22_float8"):
        notices = [each for each in parse_settings(BLOOM, **script_defaults(rung)).notices if "fast bfloat16" in each]
        assert len(notices) == (not fast)
    assert not [each for each in parse_settings(BLOOM, **script_defaults("2_grad_accum")).notices if "bfloat16" in each]


@pytest.mark.parametrize("rung", RUNGS, ids=lambda path: path.stem)
def test_a_rung_is_fast_on_a_cuda_gpu_as_it_stands(gpu, triton, rung):
    script = script_defaults(rung.stem)
    on_cpu = resolve(Settings(**script | {"accelerator": "cpu"}), script=script)
    gpu(9, 0)
    triton()
    on_gpu = resolve(Settings(**script), script=script)
    name = TURNED_ON.get(rung.stem)
    changed = {each for each in ("compile", "packing") if getattr(on_cpu, each) != getattr(on_gpu, each)}
    assert changed == ({name} if name else set())
    assert [notice.split(",")[0] for notice in on_gpu.notices] == ([f"--{name} true"] if name else [])
    bucket = 64 if on_gpu.cuda_graphs else 16
    assert on_gpu.pad_to_multiple_of == (bucket if on_gpu.compile or on_gpu.packing else 1)


@pytest.mark.parametrize("rung", TURNED_ON)
def test_the_user_can_turn_such_a_switch_off(gpu, triton, config, capsys, rung):
    gpu(9, 0)
    triton()
    script, name = script_defaults(rung), TURNED_ON[rung]
    for args in ([f"--{name}", "false"], config(f"{name}: false")):
        settings = parse_settings([*args, *BLOOM], **script)
        assert getattr(settings, name) is False
        assert not [notice for notice in settings.notices if notice.startswith(f"--{name} true")]
    with pytest.raises(SystemExit):
        parse_settings([*BLOOM, "--print_config"], **script)
    printed = capsys.readouterr().out
    assert yaml.safe_load(printed)[name] is True
    settings = parse_settings([*config(printed), "--accelerator", "cpu"], **script)
    assert getattr(settings, name), "a file holds the user's own choice"


def test_a_switch_that_would_stop_the_run_or_help_nothing_stays_off(gpu, triton, tmp_path):
    gpu(9, 0)
    triton()
    for rung, args in (
        ("21_selective_checkpointing", ["--activation_offload", "true"]),
        ("17_step_in_backward", ["--attention", "eager"]),
        ("17_step_in_backward", ["--batch_size", "1"]),
    ):
        settings = parse_settings([*BLOOM, *args], **script_defaults(rung))
        assert not getattr(settings, TURNED_ON[rung])
    triton(found=False)
    settings = parse_settings(BLOOM, **script_defaults("22_float8"))
    assert (settings.compile, *settings.notices) == (False, "--float8 without --compile true is slower than bfloat16")
    gpu(6, 1)
    assert not parse_settings(BLOOM, **script_defaults("21_selective_checkpointing")).compile
    message = refusal("--compile", "true")
    assert message.startswith("--compile true: Triton needs a GPU of compute capability 7.0 (Volta) or above")


# Hardware


def test_more_gpus_than_the_machine_has_are_refused(gpu):
    gpu(8, 0, count=2)
    assert parse_settings(BLOOM, strategy="ddp", devices="auto", batch_size=16).devices == 2
    message = refusal("--devices", "4", strategy="ddp", devices="auto", batch_size=16)
    assert message == "--devices 4: this machine has 2 CUDA GPUs"


def test_apple_silicon_is_used_only_on_request(mac):
    assert "PyTorch finds no Apple GPU here; use --accelerator cpu" in refusal("--accelerator", "mps")
    mac()
    assert parse_settings(BLOOM).accelerator == "cpu"
    for script in ({}, {"precision": "mixed"}, {"precision": "16-mixed"}, {"precision": "bf16-true"}):
        settings = parse_settings([*BLOOM, "--accelerator", "mps"], devices="auto", **script)
        wanted = {"mixed": "bf16-mixed"}.get(script.get("precision"), script.get("precision", "32-true"))
        assert (settings.accelerator, settings.precision, settings.devices) == ("mps", wanted, 1)
        assert (settings.pad_to_multiple_of, settings.matmul_precision) == (16, "highest")


@pytest.mark.parametrize(
    ("args", "script", "pattern"),
    [("--precision 64-true", {}, "64-true: use 32-true"), ("--compile true", {}, "src/2_grad_accum.py"),
     ("", {"strategy": "fsdp", "devices": "auto"}, "FSDP2: use src/7_grad_checkpointing.py"),
     ("--lora true --quantization nf4", {}, "src/13_lora.py"), ("--optimizer adam-8bit", {}, "--optimizer adafactor"),
     ("--precision bf16-true", {}, "before macOS 14: use 16-mixed or 32-true"),
     ("--optimizer_offload true", {}, "share the CPU's memory"), ("--float8 true", {}, "no 8-bit floating point"),
     ("", {"strategy": "deepspeed", "devices": "auto", "deepspeed": "zero2"}, "needs a CUDA GPU")],
)  # fmt: skip
def test_settings_that_apple_silicon_does_not_support_are_refused(mac, args, script, pattern):
    mac(13 if "bf16" in args else 15)
    assert pattern in refusal("--accelerator", "mps", *args.split(), **script)


@pytest.fixture
def variables(gpu, monkeypatch):
    """Return the environment variables for CUDA at the first use of the GPU."""

    def at_start(*args, release="6.8.0-generic", **environment):
        seen = {}
        for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG"):
            monkeypatch.setenv(name, "")  # then its value is restored after the test
            monkeypatch.delenv(name)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        gpu(8, 0)
        monkeypatch.setattr("platform.release", lambda: release)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (seen.update(os.environ), (8, 0))[1])
        parse_settings([*BLOOM, *args], precision="mixed")
        return {name: value for name, value in seen.items() if "ALLOC_CONF" in name or "CUBLAS" in name}

    return at_start


def test_cuda_starts_with_expandable_segments_unless_the_user_sets_others(variables):
    segments = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert variables() == segments
    for given in ({"PYTORCH_ALLOC_CONF": "backend:native"}, {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}):
        assert variables(**given) == given
    for release in ("5.15.0-microsoft-standard-WSL2", "5.15.148-tegra"):
        assert variables(release=release) == {}
    assert variables("--deterministic", "true") == segments | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


# Refusals


@pytest.mark.parametrize(
    ("args", "pattern"),
    [("--kahan_summation true", r"under --precision 32-true the weights lose nothing"),
     ("--precision 16-true", r"epsilon of --optimizer adam is 0 in float16"),
     ("--precision 16-mixed", r"--precision 16-mixed needs a CUDA GPU; use .*bf16-mix"),
     ("--accelerator cuda", r"--accelerator cuda: PyTorch finds no CUDA GPU here; use --accelerator cpu"),
     ("--load nowhere", r"--load nowhere is no sharded checkpoint; load a consolidated model by --model FOLDER"),
     ("--resume nowhere", r"--resume nowhere: the folder does not exist"),
     ("--devices 2", r"runs on one; for more: src/9_ddp\.py"),
     ("--micro_batch_size 32", r"--micro_batch_size 32 is above --batch_size 1: .*"),
     ("--task image-classification --image_size 32 --resize_to 16", r"--resize_to 16 is below"),
     ("--task image-classification", r"\(bloom\) has no form for --task image-classification"),
     ("--model ./model", r"there is no folder \./model$"),
     (f"--model {MODELS / 'llama-tiny.json'} --max_length 2000", r"--max_length 2000 is beyond the 1024 positions")],
)  # fmt: skip
def test_contradicting_settings_are_refused_before_any_work(args, pattern):
    assert re.search(pattern, refusal(*args.split()))


@pytest.mark.parametrize("name", ["dataset", "config", "model", "resume", "runs_dir"])
def test_a_name_too_long_for_a_file_is_refused_in_one_line(name):
    with pytest.raises((UserError, OSError)) as caught:
        parse_settings([*BLOOM, "--check_only", f"--{name}", "n" * 300])
    assert "n" * 30 in explain(caught.value)
    assert "\n" not in explain(caught.value)


def test_check_only_refuses_unusable_folders_data_and_models_and_settings_that_do_not_suit_them(tmp_path, minilm):
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for words in (["--check_only"], ["--check_only", "true"]):
        with pytest.raises(Checked):
            parse_settings([*BLOOM, "--dataset", "synthetic", *words])
    assert parse_settings([*BLOOM, "--dataset", "synthetic", "--check_only", "false"]).dataset == "synthetic"
    for option, value, line in (
        ("--runs_dir", "loop/runs", "cannot write --runs_dir loop/runs (Too many levels of symbolic links)"),
        ("--dataset", "nowhere.csv", "there is no file or folder nowhere.csv"),
        ("--tokenizer", "./none", "there is no folder ./none"),
        ("--tokenizer", str(minilm), "the tokenizer has 30,522 entries, "),
        ("--class_weights", "1,2,3", "3 numbers for 2 classes; give one for each: negative, positive"),
        ("--warmup_steps", "125", "--warmup_steps 125: the run has only 125 optimizer steps"),
        ("--evaluate_every", "125", "--evaluate_every 125: an epoch has only 125 optimizer steps"),
        ("--patience", "1", "--patience 1: the run has only 1 validation; add --evaluate_every N"),
    ):
        assert line in refusal("--dataset", "synthetic", "--batch_size", "32", "--check_only", option, value)
    (tmp_path / "loop").unlink()
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    write_rows([chat] * 9, tmp_path / "c.jsonl")
    instructed = ["--task", "instruction-tuning", "--dataset", "c.jsonl", "--tokenizer", str(minilm)]
    llama = ["--model", str(MODELS / "smollm2-135m.json"), "--from_scratch", "true", "--check_only"]
    assert "the tokenizer has no chat template" in refusal(*llama, *instructed)
    shutil.copy(MODELS / "bert-base-uncased.json", tmp_path / "config.json")
    for file in Path(minilm).glob("*token*"):
        shutil.copy(file, tmp_path)
    assert "the folder . holds no usable weights" in refusal("--model", ".", "--from_scratch", "false", "--check_only")
    assert not (tmp_path / "runs").exists()
