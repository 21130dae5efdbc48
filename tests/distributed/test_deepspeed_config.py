"""DeepSpeed configurations: the values for "auto", and a one-line error for each conflict with a setting."""

import json

import pytest
from support.deepspeed_configs import BATCHES, ZERO_2, ZERO_3
from support.helpers import MODELS, ROOT, settings_for
from torch import nn

from fabric_ladder import UserError, build_optimizer
from fabric_ladder.distributed.deepspeed_config import ADAM, FIXED, KEYS, offloads, read_deepspeed_config

SHIPPED = ["zero1", "zero2", "zero2_offload", "zero3", "zero3_nvme", "zero3_offload"]


def nested(path, value):
    """Return {"a": {"b": value}} for the path a.b."""
    for key in reversed(path.split(".")):
        value = {key: value}
    return value


def merged(first, second):
    both = first | second
    for key in first.keys() & second.keys():
        if isinstance(first[key], dict) and isinstance(second[key], dict):
            both[key] = merged(first[key], second[key])
    return both


@pytest.fixture
def ask(tmp_path):
    """Read a configuration with settings; the default is stage 2."""

    def ask(config, **values):
        path = tmp_path / "ds.json"
        if isinstance(config, dict):
            config = json.dumps(merged({"zero_optimization": {"stage": 2}}, config))
        path.write_text(config)
        defaults = {"model": str(MODELS / "bloom-quickstart.json"), "micro_batch_size": 2, "devices": 2}
        settings = settings_for(tmp_path, **({"deepspeed": str(path)} | defaults | values))
        return read_deepspeed_config(settings)

    return ask


def refused(ask, config, **values):
    with pytest.raises(UserError) as error:
        ask(config, **values)
    assert "\n" not in str(error.value)
    return str(error.value)


def autos(config):
    return [key for key, value in config.items() if value == "auto" or (isinstance(value, dict) and autos(value))]


def test_every_shipped_configuration_can_be_read(ask):
    assert sorted(path.stem for path in (ROOT / "configs" / "deepspeed").glob("*")) == SHIPPED
    for name in SHIPPED:
        config, notices = ask("", deepspeed=name, precision="bf16-mixed", max_grad_norm=1.0)
        assert config["zero_optimization"]["stage"] == int(name[4])
        assert ("cpu" if "offload" in name else "nvme" if "nvme" in name else None) == next(
            (section["device"] for section in offloads(config).values()), None
        )
        assert not autos(config)
        assert (config["bf16"]["enabled"], config["fp16"]["enabled"], config["gradient_clipping"]) == (True, False, 1.0)
        assert notices == [line for line in notices if line.startswith(f"DeepSpeed {name}.json: filled train_batch_")]


@pytest.mark.parametrize("config", [ZERO_2, ZERO_3], ids=["zero2", "zero3"])
def test_configurations_of_hugging_faces_guide_run_unchanged(ask, config):
    found, notices = ask(config, precision="bf16-mixed")
    assert not autos(found)
    assert found["bf16"] == {"enabled": True}
    assert found["fp16"] == config["fp16"] | {"enabled": False}
    assert not {"optimizer", "scheduler"} & found.keys()
    zero = found["zero_optimization"]
    assert zero["reduce_bucket_size"] == 64 * 64
    assert {key: value for key, value in config["zero_optimization"].items() if value != "auto"}.items() <= zero.items()
    assert "train_batch_size 16, train_micro_batch_size_per_gpu 2, gradient_accumulation_steps 4" in notices[0]


@pytest.mark.parametrize(
    ("path", "filled", "values"),
    [
        ("train_batch_size", "16", {}),
        ("train_micro_batch_size_per_gpu", "2", {}),
        ("train_micro_batch_size_per_gpu", "6", {"micro_batch_size": 16, "devices": 3}),
        ("train_micro_batch_size_per_gpu", "8", {"micro_batch_size": None, "micro_batch_tokens": 300}),
        ("gradient_accumulation_steps", "2", {"num_nodes": 2}),
        ("gradient_clipping", "0.5", {"max_grad_norm": 0.5}),
        ("gradient_clipping", "0.0", {}),
        ("fp16.enabled", "true", {"precision": "16-mixed"}),
        ("bf16.enabled", "false", {"precision": "16-mixed"}),
        ("bfloat16.enabled", "true", {"precision": "bf16-mixed"}),
        ("optimizer.type", '"Adam"', {}),
        ("optimizer.type", '"SGD"', {"optimizer": "sgd"}),
        ("optimizer.params.lr", "0.003", {"learning_rate": 0.003}),
        ("optimizer.params.betas", "[0.9, 0.999]", {}),
        ("optimizer.params.eps", "1e-08", {}),
        ("optimizer.params.weight_decay", "0", {}),
        ("optimizer.params.weight_decay", "0.01", {"optimizer": "adamw"}),
        ("scheduler.type", '"WarmupCosineLR"', {"schedule": "cosine"}),
        ("scheduler.params.warmup_min_lr", "0", {}),
        ("scheduler.params.warmup_max_lr", "0.003", {"learning_rate": 0.003}),
        ("scheduler.params.warmup_num_steps", "7", {"warmup_steps": 7}),
        ("scheduler.params.total_num_steps", '"all"', {}),
        ("zero_optimization.reduce_bucket_size", "4096", {}),
        ("zero_optimization.stage3_prefetch_bucket_size", "3686", {}),
        ("zero_optimization.stage3_param_persistence_threshold", "640", {}),
        ("zero_optimization.offload_param.buffer_size", "32768", {}),
        ("zero_optimization.allgather_bucket_size", "by DeepSpeed's default", {}),
        ("zero_optimization.offload_optimizer.device", "by DeepSpeed's default", {}),
        ("steps_per_print", "by DeepSpeed's default", {}),
    ],
)
def test_auto_is_filled_from_the_settings_and_reported(ask, path, filled, values):
    config, notices = ask(nested(path, "auto"), **values)
    assert notices == [f"DeepSpeed ds.json: filled {path.replace('bfloat16', 'bf16')} {filled}"]
    assert not autos(config)


def test_deepspeeds_own_auto_stays(ask):
    config, notices = ask({"data_types": {"keep_in_fp32_modules": "auto"}})
    assert (config["data_types"], notices) == ({"keep_in_fp32_modules": "auto"}, [])


@pytest.mark.parametrize(
    ("path", "value", "values", "contradicted"),
    [
        ("train_batch_size", 32, {}, "32 contradicts --batch_size 16: "),
        ("train_micro_batch_size_per_gpu", 4, {}, "4 contradicts --micro_batch_size 2: "),
        (
            "train_micro_batch_size_per_gpu",
            4,
            {"micro_batch_size": None, "micro_batch_tokens": 300},
            "4 contradicts --micro_batch_tokens 300",
        ),
        ("gradient_accumulation_steps", 8, {}, "contradicts --batch_size 16 on 2 GPUs with --micro_batch_size 2"),
        ("gradient_clipping", 1.0, {}, "1.0 contradicts --max_grad_norm null: "),
        ("gradient_clipping", 0, {"max_grad_norm": 1.0}, "0 contradicts --max_grad_norm 1.0"),
        ("bf16.enabled", True, {}, "true contradicts --precision 32-true: "),
        ("fp16.enabled", True, {"precision": "bf16-mixed"}, "contradicts --precision bf16-mixed: "),
        ("optimizer.type", "SGD", {}, '"SGD" contradicts --optimizer adam: '),
        ("optimizer.type", "AdamW", {"optimizer": "sgd"}, "contradicts --optimizer sgd: "),
        ("optimizer.params.lr", 1e-3, {}, "0.001 contradicts --learning_rate 5e-05: "),
        ("optimizer.params.betas", [0.8, 0.999], {}, "[0.8, 0.999] contradicts --optimizer adam"),
        ("optimizer.params.weight_decay", 0.01, {}, "contradicts --optimizer adam: "),
        ("optimizer.params.weight_decay", 0, {"optimizer": "adamw"}, "0 contradicts --optimizer adamw"),
        ("optimizer.params.momentum", 0.9, {"optimizer": "sgd"}, "0.9 contradicts --optimizer sgd"),
        ("scheduler.type", "WarmupDecayLR", {}, "contradicts --schedule constant: "),
        ("scheduler.params.warmup_max_lr", 1e-3, {}, "0.001 contradicts --learning_rate 5e-05"),
        ("scheduler.params.warmup_num_steps", 500, {}, "500 contradicts --warmup_steps 0: "),
    ],
)
def test_a_contradiction_names_key_and_setting_and_a_fix(ask, path, value, values, contradicted):
    text = refused(ask, nested(path, value), **values)
    assert text.startswith(f"ds.json: {path} ")
    assert contradicted in text
    assert text.endswith("change it there or here, or leave it out")


def test_values_that_agree_are_accepted_silently(ask):
    params = {"lr": 5e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01, "torch_adam": True}
    config = {
        **dict(zip(BATCHES, (16, 2, 4), strict=True)), "gradient_clipping": 0.5, "bf16": {"enabled": True},
        "fp16": {"enabled": False}, "optimizer": {"type": "Adam", "params": params},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 3, "warmup_type": "linear"}},
        "activation_checkpointing": {"partition_activations": False}, "autotuning": {"enabled": False},
        "zero_optimization": {"stage": 2, "offload_optimizer": None},
    }  # fmt: skip
    settings = {"max_grad_norm": 0.5, "optimizer": "adamw", "schedule": "linear", "warmup_steps": 3}
    found, notices = ask(config, precision="bf16-mixed", **settings)
    assert notices == []
    assert not {"optimizer", "scheduler", "activation_checkpointing"} & found.keys()


def test_every_fixed_value_is_accepted_and_another_refused(ask):
    for path, (value, why) in FIXED.items():
        other = {False: True, True: False, "mean": "sum"}.get(value, 2) if isinstance(value, bool | str) else 2
        ask(nested(path, value))
        assert why in refused(ask, nested(path, other))


def test_deepspeed_does_not_accumulate_or_clip_by_default(ask):
    for stage in (1, 2, 3):
        config, _ = ask({"zero_optimization": {"stage": stage}}, devices=3)
        assert config["train_micro_batch_size_per_gpu"] == 6, "the largest share of 16 on 3 GPUs"
        assert config["gradient_accumulation_steps"] == 1
        assert "train_batch_size" not in config, "16 is not a multiple of 3"
        assert config["gradient_clipping"] == 0.0, "DeepSpeed 0.19 clips to 1 by default"


def test_deepspeeds_timer_waits_for_the_device_only_if_asked_for(ask):
    config_class = pytest.importorskip("deepspeed.utils.config").get_timers_config
    for asked in ({}, {"timers": {"throughput": {"enabled": True}}}):
        config, _ = ask({"zero_optimization": {"stage": 2}} | asked)
        assert config_class(config).enabled is bool(asked)


def test_live_and_stepped_weights_of_stage_3_fit_a_small_gpu(ask):
    for name in SHIPPED[3:]:
        zero = ask("", deepspeed=name)[0]["zero_optimization"]
        for key in ("stage3_max_live_parameters", "stage3_max_reuse_distance", "sub_group_size"):
            assert zero[key] <= 1e8, "DeepSpeed's 1e9 take 2 GB for weights, and 8 GB more in the optimizer step"


@pytest.mark.parametrize("values", [{}, {"precision": "16-mixed", "max_grad_norm": 1.0}])
def test_adam_steps_in_one_kernel_since_deepspeed_unscales_and_clips_before(tmp_path, values):
    settings = settings_for(tmp_path, deepspeed="zero2", **values)
    assert build_optimizer(settings, nn.Linear(2, 2)).defaults["fused"] is True


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"gradient_clippin": 1.0}, "DeepSpeed has no key gradient_clippin; did you mean gradient_clipping?"),
        ({"zero_optimisation": {}}, "DeepSpeed has no key zero_optimisation; did you mean zero_optimization?"),
        ({"amp": {"enabled": False}}, "DeepSpeed has no key amp; "),
        ({"qqqqqq": 1}, "DeepSpeed has no key qqqqqq; leave it out"),
        ({"optimizer": "Adam"}, "optimizer must be an object, {...}"),
        ({"zero_optimization": True}, "zero_optimization.stage must be 1, 2 or 3"),
        ({"zero_optimization": {"stage": 0}}, "src/9_ddp.py shards nothing"),
        ({"zero_optimization": {"offload_param": {"device": "cpu"}}}, "offload_param needs stage 3"),
        ("{,}", "as JSON ("),
        ("[1]", "it must hold one JSON object"),
    ],
)
def test_a_bad_configuration_is_refused(ask, config, said):
    assert said in refused(ask, config)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"deepspeed": "zero4"},
            "--deepspeed zero4: there is no such file; give a path, or one of " + ", ".join(SHIPPED),
        ),
        ({"deepspeed": None}, "--deepspeed null: there is no such file"),
        ({"deepspeed": "zero2", "precision": "bf16-true"}, "--precision bf16-true: ZeRO computes on 16-bit weights"),
        ({"deepspeed": "zero2", "precision": "64-true"}, "--precision 64-true: "),
        ({"deepspeed": "zero2", "optimizer": "adafactor"}, "--optimizer adafactor: it needs whole weights"),
        (
            {"deepspeed": "zero2", "optimizer": "adam-4bit"},
            "--optimizer adam-4bit: it needs whole weights",
        ),
        ({"deepspeed": "zero2_offload", "optimizer": "adam-8bit"}, "--optimizer adam-8bit steps on a GPU"),
        ({"deepspeed": "zero3_nvme", "optimizer": "sgd"}, "--optimizer sgd: zero3_nvme.json swaps"),
    ],
)
def test_settings_that_do_not_work_with_zero_are_refused(ask, values, said):
    assert refused(ask, "", **values).startswith(said)


def test_a_model_without_a_hidden_size_is_named(ask, tmp_path):
    model = tmp_path / "model.json"
    model.write_text(json.dumps({"model_type": "efficientnet"}))
    text = refused(ask, nested("zero_optimization.reduce_bucket_size", "auto"), model=str(model))
    assert 'has no hidden size for "auto" in ' in text


def test_configurations_are_compared_with_the_optimizers_own_values(tmp_path):
    for name, decay in (("adam", 0), ("adamw", 0.01)):
        values = build_optimizer(settings_for(tmp_path, optimizer=name), nn.Linear(1, 1)).defaults
        assert (list(values["betas"]), values["eps"], values["weight_decay"]) == (*ADAM.values(), decay)


def test_the_keys_are_those_that_this_deepspeed_reads(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    runtime = pytest.importorskip("deepspeed.runtime.config", reason="needs deepspeed: requirements-dev.txt")
    asked = set()

    class Asked(dict):
        """A dict that records every requested key."""

        def get(self, key, default=None):
            asked.add(key)
            return super().get(key, default)

        def __contains__(self, key):
            asked.add(key)
            return super().__contains__(key)

        def keys(self):
            return self

        def __copy__(self):
            return self

    runtime.DeepSpeedConfig(Asked(train_batch_size=8))
    asked -= runtime._REMOVED_TOP_LEVEL_CONFIG_KEYS.keys()
    of_initialize = {"sequence_parallel_size", "data_parallel_size"}
    assert asked | of_initialize == KEYS
