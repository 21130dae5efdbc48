"""DeepSpeed configurations: the values for "auto", and a one-line error for each conflict with a setting."""

import json
import re

import pytest
from support.helpers import DEEPSPEED_FILES, MODELS, ROOT, settings_for
from torch import nn

from fabric_ladder import UserError, build_optimizer
from fabric_ladder.distributed.deepspeed_config import TAKEN, offloads, read_deepspeed_config, settings_in_file
from fabric_ladder.foreign import to_own_words
from fabric_ladder.planning.candidates import read_settings
from fabric_ladder.settings import weight_decay

BATCHES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
SHIPPED = ["zero1", "zero2", "zero2_offload", "zero3", "zero3_nvme", "zero3_offload"]


@pytest.fixture
def ask(tmp_path):
    """Read a configuration with settings. Values are given by paths such as `fp16.enabled`; the default is stage 2."""

    def ask(config, **values):
        path = tmp_path / "ds.json"
        if isinstance(config, dict):
            nested = {"zero_optimization": {"stage": 2}}
            for key, value in config.items():
                *sections, last = key.split(".")
                section = nested
                for name in sections:
                    section = section.setdefault(name, {})
                section[last] = value
            config = json.dumps(nested)
        path.write_text(config)
        defaults = {"model": str(MODELS / "bloom-quickstart.json"), "micro_batch_size": 2, "devices": 2}
        return read_deepspeed_config(settings_for(tmp_path, **({"deepspeed": str(path)} | defaults | values)))

    return ask


def refused(ask, config, **values):
    with pytest.raises(UserError) as error:
        ask(config, **values)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_configuration_can_be_read(ask, name):
    assert sorted(path.stem for path in (ROOT / "configs" / "deepspeed").glob("*")) == SHIPPED
    config, _ = ask("", deepspeed=name, precision="bf16-mixed", max_grad_norm=1.0)
    zero = config["zero_optimization"]
    assert zero["stage"] == int(name[4])
    devices = [section["device"] for section in offloads(config).values()]
    assert devices[:1] == (["cpu"] if "offload" in name else ["nvme"] if "nvme" in name else [])
    assert '"auto"' not in json.dumps(config)
    assert (config["bf16"]["enabled"], config["fp16"]["enabled"], config["gradient_clipping"]) == (True, False, 1.0)
    for key in ("stage3_max_live_parameters", "stage3_max_reuse_distance", "sub_group_size"):
        assert name < "zero3" or zero[key] <= 1e8, "DeepSpeed's 1e9 take 2 GB for weights, 8 GB more in the step"


FROM_FILE = {"learning_rate": 3e-5, "betas": "0.8,0.999", "eps": 1e-8, "weight_decay": 3e-7, "warmup_steps": 500}
FROM_FILE |= {"optimizer": "adam", "schedule": "constant", "precision": "16-mixed"}
AUTO = {"learning_rate": 5e-5, "betas": "0.9,0.999", "weight_decay": None, "warmup_steps": 0, "precision": "bf16-mixed"}
LINEAR = "the warm-up is linear, in place of DeepSpeed's logarithmic one (warmup_type log)"
LEFT_OUT = "activation_checkpointing has no effect on models of transformers and is left out; use --activation_check"


@pytest.mark.parametrize(
    ("name", "expected", "notice"),
    [
        ("zero2_auto", AUTO, None),
        ("zero3_auto", AUTO, None),
        ("zero2_manual", FROM_FILE, LINEAR),
        ("zero3_manual", FROM_FILE, LINEAR),
        ("zero2_belle", {"max_grad_norm": 1.0, "precision": "16-mixed"}, LEFT_OUT),
        ("zero3_nvme_as_printed", AUTO, "aio is moved out of zero_optimization, where DeepSpeed does not read it"),
    ],
)
def test_files_of_guides_run_unchanged_and_their_values_hold(name, expected, notice):
    path = DEEPSPEED_FILES / f"{name}.json"
    given = json.loads(path.read_text())
    settings = read_settings("12_deepspeed_zero", ["--deepspeed", str(path)], gpus=2)
    assert {key: getattr(settings, key) for key in expected} == expected
    config, notices = read_deepspeed_config(settings)
    assert len(notices) == bool(notice)
    assert not notice or notices[0].startswith(f"DeepSpeed {name}.json: {notice}")
    assert '"auto"' not in json.dumps(config)
    halves = {kind: config[kind]["enabled"] for kind in ("fp16", "bf16")}
    assert halves == {"fp16": settings.precision == "16-mixed", "bf16": settings.precision == "bf16-mixed"}
    assert config["gradient_clipping"] == (settings.max_grad_norm or 0)
    assert not {"optimizer", "scheduler", "activation_checkpointing"} & config.keys()
    zero, given_zero = config["zero_optimization"], given["zero_optimization"]
    assert config.get("aio") == given_zero.pop("aio", None)
    assert {key: value for key, value in given_zero.items() if value != "auto"}.items() <= zero.items()
    assert zero["stage"] == int(name[4])


def test_a_value_on_the_command_line_that_differs_from_the_file_is_refused():
    path = str(DEEPSPEED_FILES / "zero2_manual.json")
    for words, line in (
        ("--betas 0.9,0.999", "optimizer.params.betas [0.8, 0.999] contradicts --betas 0.9,0.999: "),
        ("--weight_decay 0.1", "optimizer.params.weight_decay 3e-07 contradicts --weight_decay 0.1: "),
        ("--learning_rate 1e-4", "optimizer.params.lr 3e-05 contradicts --learning_rate 0.0001: "),
        ("--warmup_steps 5", "scheduler.params.warmup_num_steps 500 contradicts --warmup_steps 5: "),
        ("--precision bf16-mixed", "fp16.enabled true contradicts --precision bf16-mixed: "),
    ):
        with pytest.raises(UserError, match=re.escape(f"zero2_manual.json: {line}")):
            read_settings("12_deepspeed_zero", ["--deepspeed", path, *words.split()])
    read_settings("12_deepspeed_zero", ["--deepspeed", path, "--learning_rate", "3e-5", "--betas", "0.8,0.999"])


def test_the_recipe_of_belle_is_read_to_the_letter():
    """Four GPUs, 4 samples on each, 3 accumulated steps, by the Trainer's names."""
    path = str(DEEPSPEED_FILES / "zero2_belle.json")
    words = "--config belle_bloomz_7b1_lora.yaml --lr_scheduler_type constant --num_train_epochs 3 --lr 5e-5".split()
    words, read_as = to_own_words([*words, "--per_device_train_batch_size", "4", "--grad_accum", "3"])
    settings = read_settings("12_deepspeed_zero", ["--deepspeed", path, "--devices", "4", *words], gpus=4)
    assert (settings.batch_size, settings.micro_batch_size, settings.ranks) == (48, 4, 4)
    assert (settings.lora_rank, settings.lora_targets, settings.warmup_steps) == (8, "query_key_value", 100)
    assert (settings.learning_rate, settings.epochs, settings.max_grad_norm) == (5e-5, 3, 1.0)
    assert read_as[0] == "--lr_scheduler_type constant as --schedule constant"


def test_what_a_run_does_otherwise_than_a_file_is_said(tmp_path):
    params = {"lr": 3e-5, "torch_adam": True, "momentum": 0, "bias_correction": False}
    file = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": False}}
    for mode, left in (
        (True, "optimizer.params.bias_correction"),
        (False, "optimizer.params.bias_correction, .*adam_w_mode"),
    ):
        optimizer = {"type": "AdamW", "params": params | {"adam_w_mode": mode}}
        (tmp_path / "ds.json").write_text(json.dumps(file | {"optimizer": optimizer}))
        settings = read_settings("12_deepspeed_zero", ["--deepspeed", str(tmp_path / "ds.json")])
        precision, other = read_deepspeed_config(settings)[1]
        assert precision.endswith("bf16.enabled false gives way to --precision bf16-mixed")
        assert re.search(f": {left} left out: the run has its own optimizer$", other)


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"zero_optimization": None}, "zero_optimization.stage must be 1, 2 or 3"),
        ({"fp16": {"enabled": "true"}}, 'fp16.enabled "true" must be true or false'),
        ({"zero_optimization": {"stage": 2, "reduce_bucket_size": "5e8"}}, 'reduce_bucket_size "5e8" must be a number'),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "gpu"}}}, 'device "gpu" must be none, cpu'),
        ({"optimizer": {"type": "OneBitAdam"}}, 'optimizer.type "OneBitAdam" must be Adam, AdamW, SGD, or left out'),
    ],
)
def test_a_file_that_a_plan_would_misread_is_refused(tmp_path, values, line):
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 2}} | values))
    with pytest.raises(UserError, match=f"^ds.json: .*{re.escape(line)}"):
        read_settings("12_deepspeed_zero", ["--deepspeed", str(tmp_path / "ds.json")])


def test_numbers_of_batches_in_a_file_hold(tmp_path):
    zero = {"zero_optimization": {"stage": 2}}
    for numbers, batch, micro in (
        ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}, 12, 2),
        ({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}, 8, 2),
        ({"gradient_accumulation_steps": 4}, 16, 2),
        (dict(zip(BATCHES, (8, 2, 2), strict=True)), 8, 2),
    ):
        (tmp_path / "ds.json").write_text(json.dumps(zero | numbers))
        options = ["--deepspeed", str(tmp_path / "ds.json"), "--devices", "2"]
        settings = read_settings("12_deepspeed_zero", options, gpus=2)
        assert (settings.batch_size, settings.micro_batch_size) == (batch, micro)


def test_numbers_of_a_file_are_read_as_on_the_command_line(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for section, wanted in (
        ({"train_batch_size": 16.0}, {"batch_size": 16}),
        ({"optimizer": {"params": {"betas": [0.9, 0.98765432]}}}, {"betas": "0.9,0.98765432"}),
        ({"train_batch_size": 16.5}, "--batch_size 16.5: expected a whole number"),
        ({"gradient_accumulation_steps": 0}, "expected a whole number, at least 1"),
        ({"optimizer": {"params": {"betas": ["a", None]}}}, "expected 2 numbers"),
    ):
        (tmp_path / "ds.json").write_text(json.dumps(section))
        if isinstance(wanted, dict):
            assert settings_in_file("~/ds.json") == wanted
            continue
        with pytest.raises(UserError, match=f"^ds.json: .*{wanted}"):
            settings_in_file("~/ds.json")


def test_auto_is_filled_from_the_settings(ask):
    auto = dict.fromkeys((*TAKEN, "zero_optimization.stage3_prefetch_bucket_size", "steps_per_print"), "auto")
    config, notices = ask(auto, micro_batch_size=16, devices=3, max_grad_norm=0.5, precision="16-mixed", warmup_steps=7)
    assert notices == [f"DeepSpeed ds.json: {LINEAR}"]
    assert '"auto"' not in json.dumps(config)
    assert config["train_micro_batch_size_per_gpu"] == 6, "the largest share of 16 on 3 GPUs"
    assert config["gradient_accumulation_steps"] == 1
    assert "train_batch_size" not in config, "16 is not a multiple of 3"
    assert (config["gradient_clipping"], config["fp16"]["enabled"]) == (0.5, True)
    assert config["zero_optimization"]["stage3_prefetch_bucket_size"] == 3686
    assert "steps_per_print" not in config, "DeepSpeed takes its default"
    assert ask({})[0]["gradient_clipping"] == 0.0, "DeepSpeed 0.19 clips to 1 by default"


@pytest.mark.parametrize(
    ("path", "value", "values", "contradicted"),
    [
        ("train_batch_size", 32, {}, "32 contradicts --batch_size 16: "),
        ("gradient_accumulation_steps", 3, {}, "3 contradicts --batch_size 16 on 2 GPUs with --micro_batch_size 2: "),
        ("bf16.enabled", True, {}, "true contradicts --precision 32-true: "),
        ("optimizer.type", "AdamW", {"optimizer": "sgd"}, '"AdamW" contradicts --optimizer sgd: '),
        ("optimizer.params.betas", [0.8, 0.999], {}, "[0.8, 0.999] contradicts --betas 0.9,0.999: "),
        ("scheduler.type", "WarmupDecayLR", {}, '"WarmupDecayLR" contradicts --schedule constant: '),
    ],
)  # fmt: skip
def test_a_contradiction_names_key_and_setting_and_a_fix(ask, path, value, values, contradicted):
    text = refused(ask, {path: value}, **values)
    assert text == f"ds.json: {path} {contradicted}change it there or here, or leave it out"


def test_deepspeeds_timer_waits_for_the_device_only_on_request(ask):
    config_class = pytest.importorskip("deepspeed.utils.config").get_timers_config
    for values in ({}, {"timers.throughput.enabled": True}):
        assert config_class(ask(values)[0]).enabled is bool(values)


@pytest.mark.parametrize(
    ("config", "values", "message"),
    [
        ({"optimizer.type": "OneBitAdam"}, {}, 'ds.json: optimizer.type "OneBitAdam" must be Adam, AdamW'),
        ({"optimizer": "Adam"}, {}, "is not a configuration of DeepSpeed"),
        ({"zero_optimization.stage": 0}, {}, "src/9_ddp.py shards nothing"),
        ("{,}", {}, "as JSON ("),
        ('{"a": 1, "a": 2}', {}, "as JSON (a is written 2 times: leave one)"),
        ("[1]", {}, "is not a configuration of DeepSpeed"),
        ("", {"deepspeed": "zero4"}, "--deepspeed zero4: the file does not exist; give a path, or one of zero1, zero2"),
        ("", {"deepspeed": "zero2", "precision": "bf16-true"}, "--precision bf16-true: ZeRO computes on 16-bit weight"),
        ("", {"deepspeed": "zero2", "optimizer": "adafactor"}, "--optimizer adafactor: it needs whole weights"),
        ("", {"deepspeed": "zero2_offload", "optimizer": "adam-8bit"}, "--optimizer adam-8bit: zero2_offload.json off"),
    ],
)
def test_what_zero_cannot_run_with_is_refused_in_one_line(ask, config, values, message):
    assert message in refused(ask, config, **values)


@pytest.mark.parametrize(("name", "decay"), [("adam", 0), ("adamw", 0.01)])
def test_the_optimizers_have_the_values_that_files_are_compared_with(tmp_path, name, decay):
    """Adam steps in one kernel even with a scaler or clipping, since DeepSpeed unscales and clips before the step."""
    settings = settings_for(
        tmp_path, strategy="deepspeed", deepspeed="zero2", optimizer=name, precision="16-mixed", max_grad_norm=1.0
    )
    optimizer = build_optimizer(settings, nn.Linear(2, 2))
    assert (optimizer.defaults["betas"], optimizer.defaults["eps"]) == ((0.9, 0.999), 1e-8)
    assert [group["weight_decay"] for group in optimizer.param_groups] == sorted({decay, 0}, reverse=True)
    assert weight_decay(settings) == decay
    assert optimizer.defaults["fused"] is True
