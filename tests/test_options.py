"""What is given on the command line and in YAML files: what is meant, and what no file or number may do."""

import os
import sys

import pytest
import torch
from support.helpers import MODELS, RUNGS, SRC, run_script, without_package

from fabric_ladder import UserError, parse_settings
from fabric_ladder.errors import Checked, read_outside
from fabric_ladder.options import ALIASES, NAMES, drop_unneeded, is_met, kinds_of
from fabric_ladder.rungs import script_defaults
from fabric_ladder.settings import FACTS, DataSettings, Settings
from fabric_ladder.techniques.advice import explain

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
        (["--learning-rate", "1"], "did you mean --learning_rate"),
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
    assert not {*ALIASES} & {*NAMES}
    assert len(ALIASES) == sum(len(text.split()) for fact in FACTS.values() for text in fact.aliases.values())


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("gradacum", "--batch_size"),
        ("gradient_accumulation", "--batch_size, the effective batch of one optimizer step"),
        ("grad_checkpoint", "--activation_checkpointing"),
        ("epoch", "--epochs"),
    ],
)
def test_a_misspelled_option_names_the_nearest_ones_of_other_libraries_too(written, meant):
    assert meant in refusal(f"--{written}")


def test_every_need_is_a_setting_that_can_be_met():
    for name, fact in FACTS.items():
        if fact.needs:
            need, _, value = fact.needs.partition("=")
            assert need in FACTS, name
            assert value in kinds_of(need)[1] if value else not is_met(need, vars(Settings()))


@pytest.mark.parametrize("args", [["--lora_rank", "4"], ["--pack_rows", "2"], ["--sgd_learning_rate", "1"]])
def test_an_option_without_effect_is_refused(args):
    assert f"{args[0]} has no effect without --" in refusal(*args)


def test_values_that_yaml_takes_for_booleans_are_kept(tmp_path):
    (tmp_path / "own.yaml").write_text("save: no\nquantization: no\nresume: no\nlora: yes\ncompile: off\n")
    settings = parse_settings([*BLOOM, "--config", "own.yaml"])
    assert (settings.save, settings.quantization, settings.resume) == ("no", "no", "no")
    assert (settings.lora, settings.compile) == (True, False)


def test_switches_need_no_value():
    for args in (["--lora"], ["--lora", "true"], ["--lora=true"], ["--lora", "--seed", "3"], ["--seed", "3", "--lora"]):
        assert parse_settings([*BLOOM, *args]).lora, args
    assert not parse_settings([*BLOOM, "--lora", "false"]).lora
    assert "expected one argument" in refusal("--seed")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (f"seed: {'[' * DEEP}{']' * DEEP}", "is nested too deeply"),
        (f"seed: {'9' * 5000}", "--seed 9+: expected a whole number"),
        ("seed: 0x1", "--seed 0x1: expected a whole number"),
        ("batch_size: [1, 2]", "--batch_size 1,2: expected a whole number"),
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
    with pytest.raises(UserError, match="pipe is not a regular file"):
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
        ("--config=", "there is no config file (an empty name); these exist"),
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


@pytest.mark.parametrize("debug", ["", "1"])
def test_the_error_of_a_library_is_one_line_with_a_hint_and_a_traceback_on_request(tmp_path, debug):
    (tmp_path / "bad.yaml").write_text("seed: [1")
    process = run_script(
        SRC / "2_grad_accum.py", "--config", "bad.yaml", cwd=tmp_path, fresh=True, FABRIC_LADDER_DEBUG=debug
    )
    assert process.returncode == 2
    line = process.stderr.splitlines()[-1]
    assert line.startswith("error: cannot read bad.yaml as YAML")
    assert ("yaml.parser.ParserError" in process.stderr) == (debug == "1")
    assert line.endswith("(FABRIC_LADDER_DEBUG=1 prints the traceback)") == (debug == "")


@pytest.mark.parametrize(
    ("rung", "args"),
    [
        *((rung, ["--gradacum", "2"]) for rung in RUNGS),
        *((RUNGS[1], words.split()) for words in ("--help", "--help all", "--batch_size few", "--lora_rank 4")),
    ],
    ids=lambda value: getattr(value, "stem", None),
)
def test_options_are_answered_without_torch_and_lightning(tmp_path, rung, args):
    """The libraries take seconds to import: here they cannot be found."""
    hidden = without_package(tmp_path, "torch")
    process = run_script(rung, *args, cwd=tmp_path, fresh=True, **hidden)
    assert process.returncode == (0 if args[0] == "--help" else 2), process.stderr
    assert ("--batch_size N" in process.stdout) == (args[0] == "--help")


def test_options_for_several_rungs_reach_those_that_use_them():
    words = ["--lora_rank", "16", "--seed=3"]
    assert drop_unneeded(words, script_defaults("13_lora")) == words
    assert drop_unneeded(words, script_defaults("2_grad_accum")) == ["--seed=3"]
    assert drop_unneeded([*words, "--lora", "true"], script_defaults("2_grad_accum")) == [*words, "--lora", "true"]
