"""DeepSpeed configurations: what "auto" becomes, and each contradiction of a setting in one line that names both."""

import json

import pytest
from support.deepspeed_configs import BATCHES, ZERO_2, ZERO_3
from support.helpers import MODELS, ROOT, settings_for
from torch import nn

from fabric_ladder import UserError
from fabric_ladder.distributed.deepspeed_config import FIXED, KEYS, offloads, parameter_sizes, read_deepspeed_config
from fabric_ladder.models.optimizer import build_optimizer

SHIPPED = ["zero1", "zero2", "zero2_offload", "zero3", "zero3_nvme", "zero3_offload"]


def nested(path, value):
    """{"a": {"b": value}} of "a.b"."""
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
    """Read a configuration, of stage 2 unless it says another, with settings."""

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
        ("train_micro_batch_size_per_gpu", "8", {"micro_batch_size": 16}),
        ("train_micro_batch_size_per_gpu", "6", {"micro_batch_size": 16, "devices": 3}),
        ("train_micro_batch_size_per_gpu", "8", {"micro_batch_size": None, "micro_batch_tokens": 300}),
        ("gradient_accumulation_steps", "4", {}),
        ("gradient_accumulation_steps", "2", {"num_nodes": 2}),
        ("gradient_clipping", "0.5", {"max_grad_norm": 0.5}),
        ("gradient_clipping", "0.0", {}),
        ("fp16.enabled", "true", {"precision": "16-mixed"}),
        ("fp16.enabled", "false", {}),
        ("bf16.enabled", "true", {"precision": "bf16-mixed"}),
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
        ("zero_optimization.allgather_bucket_size", "as DeepSpeed does", {}),
        ("zero_optimization.sub_group_size", "as DeepSpeed does", {}),
        ("zero_optimization.stage3_max_live_parameters", "as DeepSpeed does", {}),
        ("zero_optimization.stage3_max_reuse_distance", "as DeepSpeed does", {}),
        ("zero_optimization.stage3_gather_16bit_weights_on_model_save", "as DeepSpeed does", {}),
        ("zero_optimization.overlap_comm", "as DeepSpeed does", {}),
        ("zero_optimization.offload_optimizer.device", "as DeepSpeed does", {}),
        ("zero_optimization.offload_param.device", "as DeepSpeed does", {}),
        ("zero_optimization.offload_param.nvme_path", "as DeepSpeed does", {}),
        ("steps_per_print", "as DeepSpeed does", {}),
    ],
)
def test_auto_is_filled_from_the_settings_and_said(ask, path, filled, values):
    config, notices = ask(nested(path, "auto"), **values)
    assert notices == [f"DeepSpeed ds.json: filled {path.replace('bfloat16', 'bf16')} {filled}"]
    assert not autos(config)


@pytest.mark.parametrize("path", ["zero_optimization.stage3_unheard_of", "tensorboard.job_name", "aio.thread_count"])
def test_an_auto_that_nobody_knows_is_named(ask, path):
    assert f'no setting says what {path} "auto" is' in refused(ask, nested(path, "auto"))


def test_deepspeeds_own_auto_stays(ask):
    config, notices = ask({"data_types": {"keep_in_fp32_modules": "auto"}})
    assert (config["data_types"], notices) == ({"keep_in_fp32_modules": "auto"}, [])


@pytest.mark.parametrize(
    ("path", "value", "values", "said"),
    [
        ("train_batch_size", 32, {}, "32 contradicts --batch_size 16: give --batch_size 32, or leave it out"),
        ("train_micro_batch_size_per_gpu", 4, {}, "4 contradicts --micro_batch_size 2: give --micro_batch_size 4"),
        (
            "train_micro_batch_size_per_gpu", 4, {"micro_batch_size": None, "micro_batch_tokens": 300},
            "4 contradicts --micro_batch_tokens 300",
        ),
        ("gradient_accumulation_steps", 8, {}, "contradicts --batch_size 16 on 2 GPUs with --micro_batch_size 2"),
        ("gradient_clipping", 1.0, {}, "1.0 contradicts --max_grad_norm null: give --max_grad_norm 1.0"),
        ("gradient_clipping", 0, {"max_grad_norm": 1.0}, "0 contradicts --max_grad_norm 1.0"),
        ("bf16.enabled", True, {}, "true contradicts --precision 32-true: give --precision bf16-mixed"),
        ("bf16.enabled", False, {"precision": "bf16-mixed"}, "contradicts --precision bf16-mixed: give --precision 32"),
        ("fp16.enabled", True, {"precision": "bf16-mixed"}, "contradicts --precision bf16-mixed: give --precision 16"),
        ("optimizer.type", "SGD", {}, '"SGD" contradicts --optimizer adam: give --optimizer sgd'),
        ("optimizer.type", "AdamW", {"optimizer": "sgd"}, "contradicts --optimizer sgd: give --optimizer adamw"),
        ("optimizer.type", "Lion", {}, '"Lion" contradicts --optimizer adam: leave it out'),
        ("optimizer.params.lr", 1e-3, {}, "0.001 contradicts --learning_rate 5e-05: give --learning_rate 0.001"),
        ("optimizer.params.betas", [0.8, 0.999], {}, "[0.8, 0.999] contradicts --optimizer adam"),
        ("optimizer.params.eps", 1e-6, {}, "1e-06 contradicts --optimizer adam"),
        ("optimizer.params.weight_decay", 0.01, {}, "contradicts --optimizer adam: give --optimizer adam for 0, adamw"),
        ("optimizer.params.weight_decay", 0, {"optimizer": "adamw"}, "0 contradicts --optimizer adamw"),
        ("optimizer.params.adam_w_mode", False, {"optimizer": "adamw"}, "false contradicts --optimizer adamw"),
        ("optimizer.params.momentum", 0.9, {"optimizer": "sgd"}, "0.9 contradicts --optimizer sgd"),
        ("optimizer.params.freeze_step", 400, {}, "400 contradicts --optimizer adam: leave it out"),
        ("scheduler.type", "WarmupDecayLR", {}, "contradicts --schedule constant: give --schedule linear"),
        ("scheduler.type", "WarmupLR", {"schedule": "cosine"}, "contradicts --schedule cosine: give --schedule const"),
        ("scheduler.type", "OneCycle", {}, '"OneCycle" contradicts --schedule constant: leave it out'),
        ("scheduler.params.warmup_max_lr", 1e-3, {}, "0.001 contradicts --learning_rate 5e-05"),
        ("scheduler.params.warmup_num_steps", 500, {}, "500 contradicts --warmup_steps 0: give --warmup_steps 500"),
        ("scheduler.params.total_num_steps", 1000, {}, "1000 contradicts the schedule, which ends with the run"),
        ("scheduler.params.warmup_min_lr", 1e-6, {}, "1e-06 contradicts the schedule, which starts and ends at 0"),
        ("scheduler.params.warmup_type", "log", {"warmup_steps": 5}, "contradicts --warmup_steps 5, in which"),
        ("activation_checkpointing.cpu_checkpointing", True, {}, "use PyTorch's by --activation_checkpointing true"),
        ("managed_gradient_accumulation", False, {}, "false contradicts the loop, which itself says where"),
        ("gradient_allreduce_op", "sum", {}, '"sum" contradicts the loop'),
        ("torch_autocast.enabled", True, {"precision": "bf16-mixed"}, "true contradicts Fabric"),
        ("zero_optimization.cpu_offload", True, {}, 'is "offload_optimizer": {"device": "cpu"}'),
    ],
)  # fmt: skip
def test_a_contradiction_names_key_and_setting_and_says_what_to_do(ask, path, value, values, said):
    text = refused(ask, nested(path, value), **values)
    assert text.startswith(f"ds.json: {path} ")
    assert said in text
    assert text.endswith("leave it out")


def test_what_agrees_is_accepted_without_a_word(ask):
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


def test_deepspeed_neither_accumulates_nor_clips_unasked(ask):
    for stage in (1, 2, 3):
        config, _ = ask({"zero_optimization": {"stage": stage}}, devices=3)
        assert config["train_micro_batch_size_per_gpu"] == 6, "the largest share of 16 on 3"
        assert config["gradient_accumulation_steps"] == 1
        assert "train_batch_size" not in config, "16 are no multiple of 3"
        assert config["gradient_clipping"] == 0.0, "DeepSpeed 0.19 clips to 1 where it is not said"


def test_deepspeeds_timer_waits_for_the_device_only_if_asked_for(ask):
    config_class = pytest.importorskip("deepspeed.utils.config").get_timers_config
    for asked in ({}, {"timers": {"throughput": {"enabled": True}}}):
        config, _ = ask({"zero_optimization": {"stage": 2}} | asked)
        assert config_class(config).enabled is bool(asked)


def test_what_is_live_or_stepped_at_once_under_stage_3_fits_a_small_gpu(ask):
    for name in SHIPPED[3:]:
        zero = ask("", deepspeed=name)[0]["zero_optimization"]
        for key in ("stage3_max_live_parameters", "stage3_max_reuse_distance", "sub_group_size"):
            assert zero[key] <= 1e8, "DeepSpeed's own 1e9 are 2 GB of weights, and 8 GB more in the optimizer step"


@pytest.mark.parametrize("values", [{}, {"precision": "16-mixed", "max_grad_norm": 1.0}])
def test_adam_steps_in_one_kernel_since_deepspeed_unscales_and_clips_before(tmp_path, values):
    settings = settings_for(tmp_path, deepspeed="zero2", **values)
    assert build_optimizer(settings, nn.Linear(2, 2)).defaults["fused"] is True


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"gradient_clippin": 1.0}, "DeepSpeed knows no gradient_clippin; did you mean gradient_clipping?"),
        ({"zero_optimisation": {}}, "DeepSpeed knows no zero_optimisation; did you mean zero_optimization?"),
        ({"amp": {"enabled": False}}, "DeepSpeed knows no amp; "),
        ({"qqqqqq": 1}, "DeepSpeed knows no qqqqqq; leave it out"),
        ({"optimizer": "Adam"}, "optimizer must be an object, {...}"),
        ({"zero_optimization": True}, "zero_optimization.stage must be 1, 2 or 3"),
        ({"zero_optimization": {"stage": 0}}, "src/9_ddp.py shards nothing"),
        ({"zero_optimization": {"offload_param": {"device": "cpu"}}}, "offload_param needs stage 3"),
        ("{,}", "as JSON ("),
        ("[1]", "it must hold one JSON object"),
    ],
)
def test_a_configuration_that_is_none_is_refused(ask, config, said):
    assert said in refused(ask, config)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"deepspeed": "zero4"},
            "--deepspeed zero4: there is no such file; those that come along: " + ", ".join(SHIPPED),
        ),
        ({"deepspeed": None}, "--deepspeed None: there is no such file"),
        ({"deepspeed": "zero2", "precision": "bf16-true"}, "--precision bf16-true: ZeRO computes on 16-bit weights"),
        ({"deepspeed": "zero2", "precision": "64-true"}, "--precision 64-true: "),
        ({"deepspeed": "zero2", "optimizer": "adafactor"}, "--optimizer adafactor: ZeRO cuts up the matrices"),
        (
            {"deepspeed": "zero2", "optimizer": "adam-4bit"},
            "--optimizer adam-4bit: ZeRO steps on shares of all",
        ),
        ({"deepspeed": "zero2_offload", "optimizer": "adam-8bit"}, "--optimizer adam-8bit steps on a GPU"),
        ({"deepspeed": "zero3_nvme", "optimizer": "sgd"}, "--optimizer sgd: what zero3_nvme.json swaps"),
    ],
)
def test_settings_that_zero_has_no_form_of_are_refused(ask, values, said):
    assert refused(ask, "", **values).startswith(said)


def test_a_model_without_a_hidden_size_is_named(ask, tmp_path):
    model = tmp_path / "model.json"
    model.write_text(json.dumps({"model_type": "efficientnet"}))
    text = refused(ask, nested("zero_optimization.reduce_bucket_size", "auto"), model=str(model))
    assert 'has no hidden size that zero_optimization.reduce_bucket_size "auto" could be made of' in text


def test_parameters_are_counted_without_making_them(tmp_path):
    sizes = parameter_sizes(settings_for(tmp_path, model=str(MODELS / "bloom-560m.json")))
    assert (sum(sizes), max(sizes)) == (559_216_640, 250_880 * 1024)


def test_the_optimizers_own_values_are_what_a_configuration_is_compared_with(tmp_path):
    for name, decay in (("adam", 0), ("adamw", 0.01)):
        values = build_optimizer(settings_for(tmp_path, optimizer=name), nn.Linear(1, 1)).defaults
        assert (values["betas"], values["eps"], values["weight_decay"]) == ((0.9, 0.999), 1e-8, decay)


def test_the_keys_are_those_that_this_deepspeed_asks_for(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    runtime = pytest.importorskip("deepspeed.runtime.config", reason="needs deepspeed: requirements-dev.txt")
    asked = set()

    class Asked(dict):
        """Notes the keys that are looked up, in whatever way."""

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
