"""What is given on the command line and in YAML files: what is meant, and what no file or number may do."""

import os
import sys

import pytest
import torch
from support.helpers import MODELS

from fabric_ladder import UserError, parse_settings
from fabric_ladder.advice import explain
from fabric_ladder.errors import Checked, read_outside
from fabric_ladder.options import FIELDS, NAMES, PEERS, SWITCHES
from fabric_ladder.settings import DataSettings

BLOOM = ["--model", str(MODELS / "bloom-quickstart.json"), "--from_scratch", "true", "--dataset", "synthetic"]
DEEP = 3000


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch, tmp_path):
    """An empty folder, no GPU, and Python's own excepthook afterwards, which `parse_settings` replaces."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)


def refusal(*args):
    """The one line that refuses these arguments."""
    with pytest.raises(UserError) as caught:
        parse_settings([*BLOOM, *args])
    assert len(str(caught.value)) < 400
    return str(caught.value)


@pytest.mark.parametrize(
    ("args", "meant"),
    [
        (["--lr", "1e-3"], "here it is --learning_rate 1e-3"),
        (["--lr=1e-3"], "here it is --learning_rate 1e-3"),
        (["--device", "cuda:0"], "here it is --accelerator cuda"),
        (["--device", "gpu"], "here it is --accelerator cuda"),
        (["--gpus", "2"], "here it is --devices 2"),
        (["--bs", "8"], "here it is --batch_size 8"),
        (["--fp16"], "here it is --precision 16-mixed"),
        (["--bf16", "true"], "here it is --precision bf16-mixed"),
        (["--num-train-epochs", "3"], "here it is --epochs 3"),
        (["--gradient_checkpointing", "--seed", "1"], "here it is --activation_checkpointing true"),
        (["--gradient_accumulation_steps", "4"], "here it is --batch_size, the effective batch of one optimizer step"),
        (["--resume_from_checkpoint", "true"], "here it is --resume auto"),
        (["--resume_from_checkpoint"], "here it is --resume auto"),
        (["--resume_from_checkpoint", "False"], "here it is --resume no"),
        (["--resume_from_checkpoint", "runs/a/1"], "here it is --resume runs/a/1"),
        (["--save_steps", "100"], "here it is --save_every 100, in optimizer steps"),
        (["--save_steps", "--lora"], "here it is --save_every, in optimizer steps"),
        (["--learning-rate", "1"], "did you mean 'learning_rate'?"),
    ],
)
def test_what_others_call_a_setting_is_named_as_it_is_here(args, meant):
    assert f"there is no setting {args[0][2:].split('=')[0]!r}" in refusal(*args)
    assert meant in refusal(*args)


def test_a_tilde_is_the_users_home_wherever_a_folder_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "own.yaml").write_text("cache_dir: ~/cache\ntest_file: ~nobody_of_this_name/a\n")
    found = parse_settings(["--config", "own.yaml", *BLOOM, "--runs_dir=~/runs", "--data_dir=a~b"])
    assert [found.runs_dir, found.cache_dir] == [f"{tmp_path}/runs", f"{tmp_path}/cache"]
    assert [found.test_file, found.data_dir] == ["~nobody_of_this_name/a", "a~b"]
    monkeypatch.setenv("FABRIC_LADDER_CACHE", "~/other")
    assert DataSettings().cache_dir == f"{tmp_path}/other"


def test_a_config_in_the_home_of_nobody_is_not_there():
    assert "there is no config file ~nobody_of_this_name/own.yaml" in refusal(
        "--config", "~nobody_of_this_name/own.yaml"
    )


def test_names_of_others_lead_to_settings_and_are_none_themselves():
    assert not {*PEERS} & {*NAMES}
    assert {ours.split()[0].rstrip(",") for ours in PEERS.values()} <= {*NAMES}


def test_switches_need_no_value():
    assert {"lora", "compile", "predict_memory", "packing"} <= {*SWITCHES} < {*FIELDS}
    for args in (["--lora"], ["--lora", "true"], ["--lora=true"], ["--lora", "--seed", "3"], ["--seed", "3", "--lora"]):
        assert parse_settings([*BLOOM, *args]).lora, args
    assert not parse_settings([*BLOOM, "--lora", "false"]).lora
    assert "expected one argument" in refusal("--seed")


ANCHORS = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{chr(98 + number)}: &{chr(98 + number)} [{','.join(9 * ['*' + chr(97 + number)])}]\n" for number in range(9)
)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (ANCHORS, "'b' must be one value, or a list of such"),
        ("seed: &a [*a]", "is nested too deeply"),
        (f"seed: {'[' * DEEP}{']' * DEEP}", "is nested too deeply"),
        (f"seed: {'9' * 5000}", "cannot read .*own.yaml as YAML"),
        (f"seed: 0x{'f' * 5000}", "'seed' is a number of 20000 bits"),
        ("batch_size: [1, 2]", "--batch_size 1,2: expected int"),
        ("seed: {a: 1}", "'seed' must be one value"),
        ("- a\n", "must hold lines such as 'batch_size: 16'"),
        ("5", "must hold lines such as"),
        ("1: 2", "there is no setting '1'"),
        ("lr: 0.1", r"own\.yaml: there is no setting 'lr'; here it is --learning_rate 0\.1"),
        (f"# {'x' * 2**20}", "own.yaml is larger than 1 MB"),
        ("seed: \x00", "cannot read .*own.yaml as YAML"),
    ],
)
def test_no_yaml_file_is_read_without_bound(tmp_path, text, line):
    (tmp_path / "own.yaml").write_text(text)
    with pytest.raises(UserError, match=line):
        parse_settings([*BLOOM, "--config", "own.yaml"])


def test_a_list_in_a_yaml_file_is_its_values(tmp_path):
    (tmp_path / "own.yaml").write_text("lora_targets: [query_key_value, dense]\nlogger: [csv]\n")
    settings = parse_settings([*BLOOM, "--config", "own.yaml"])
    assert (settings.lora_targets, settings.logger) == ("query_key_value,dense", "csv")


def test_a_value_may_stand_once_and_be_used_twice(tmp_path):
    (tmp_path / "own.yaml").write_text("batch_size: &n 8\nmicro_batch_size: *n\n")
    assert parse_settings([*BLOOM, "--config", "own.yaml"]).micro_batch_size == 8


@pytest.mark.skipif(not os.path.exists("/proc/kmsg"), reason="needs Linux")
def test_a_file_of_the_kernel_that_never_ends_is_not_read(tmp_path):
    assert parse_settings([*BLOOM, "--config", "/proc/kmsg"]).config == "/proc/kmsg"
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="pipe is no file"):
        read_outside(tmp_path / "pipe")


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ("--seed 4294967296", "--seed 4294967296: must be at most 4294901760"),
        (f"--lora_alpha {'9' * 40}", "--lora_alpha 999999999999999999999999999999: must be at most 2147483647"),
        (f"--train_samples {'9' * 30}", "must be at most 2147483647"),
        ("--threads 100000", "--threads 100000: must be at most "),
        ("--num_workers 10000", "--num_workers 10000: must be at most "),
        ("--image_size 100000", "--image_size 100000: must be at most 8192"),
        ("--lora_rank 1000000", "--lora_rank 1000000: must be at most 8192"),
        ("--config=", "there is no config file (an empty name); those that come along"),
        ("--tokenizer=", "--tokenizer is empty: give a value, or leave it out"),
        ("--runs_dir=", "--runs_dir is empty"),
    ],
)
def test_numbers_beyond_all_use_and_empty_names_are_refused(args, line):
    assert line in refusal(*args.split())


@pytest.mark.parametrize("name", ["dataset", "config", "model", "tokenizer", "load", "resume", "runs_dir"])
def test_a_name_too_long_for_a_file_is_one_line(name):
    with pytest.raises((UserError, OSError)) as caught:
        parse_settings([*BLOOM, "--check_only", f"--{name}", "n" * 300])
    assert "n" * 30 in explain(caught.value)
    assert "\n" not in explain(caught.value)


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ("--runs_dir file/runs", "cannot write --runs_dir file/runs"),
        ("--cache_dir file/cache", "cannot write --cache_dir file/cache"),
        ("--dataset nowhere.csv", "there is no file or folder nowhere.csv"),
        ("--tokenizer ./none", "there is no folder ./none"),
    ],
)
def test_a_check_refuses_what_the_run_would_refuse(tmp_path, args, line):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(Checked):
        parse_settings([*BLOOM, "--check_only"])
    assert line in refusal("--check_only", *args.split())
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
