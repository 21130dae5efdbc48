"""DeepSpeed configurations: the values for "auto", and a one-line error for each conflict with a setting."""

import json

import pytest
from support.deepspeed_configs import BATCHES, ZERO_2, ZERO_3
from support.helpers import MODELS, ROOT, settings_for
from torch import nn

from fabric_ladder import UserError, build_optimizer
from fabric_ladder.distributed.deepspeed_config import ADAM, KEYS, offloads, read_deepspeed_config

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
    config, notices = ask("", deepspeed=name, precision="bf16-mixed", max_grad_norm=1.0)
    zero = config["zero_optimization"]
    assert zero["stage"] == int(name[4])
    devices = [section["device"] for section in offloads(config).values()]
    assert devices[:1] == (["cpu"] if "offload" in name else ["nvme"] if "nvme" in name else [])
    assert '"auto"' not in json.dumps(config)
    assert (config["bf16"]["enabled"], config["fp16"]["enabled"], config["gradient_clipping"]) == (True, False, 1.0)
    assert notices[0].startswith(f"DeepSpeed {name}.json: filled train_batch_size 16")
    for key in ("stage3_max_live_parameters", "stage3_max_reuse_distance", "sub_group_size"):
        assert name < "zero3" or zero[key] <= 1e8, "DeepSpeed's 1e9 take 2 GB for weights, 8 GB more in the step"


@pytest.mark.parametrize("config", [ZERO_2, ZERO_3], ids=["zero2", "zero3"])
def test_configurations_of_hugging_faces_guide_run_unchanged(ask, config):
    found, notices = ask(json.dumps(config), precision="bf16-mixed")
    assert '"auto"' not in json.dumps(found)
    assert (found["bf16"], found["fp16"]) == ({"enabled": True}, config["fp16"] | {"enabled": False})
    assert not {"optimizer", "scheduler"} & found.keys()
    zero = found["zero_optimization"]
    assert zero["reduce_bucket_size"] == 64 * 64
    assert {key: value for key, value in config["zero_optimization"].items() if value != "auto"}.items() <= zero.items()
    assert "train_batch_size 16, train_micro_batch_size_per_gpu 2, gradient_accumulation_steps 4" in notices[0]


@pytest.mark.parametrize(
    ("path", "filled", "values"),
    [
        ("train_micro_batch_size_per_gpu", "6", {"micro_batch_size": 16, "devices": 3}),
        ("train_micro_batch_size_per_gpu", "8", {"micro_batch_size": None, "micro_batch_tokens": 300}),
        ("gradient_accumulation_steps", "2", {"num_nodes": 2}),
        ("gradient_clipping", "0.5", {"max_grad_norm": 0.5}),
        ("gradient_clipping", "0.0", {}),
        ("fp16.enabled", "true", {"precision": "16-mixed"}),
        ("bf16.enabled", "false", {"precision": "16-mixed"}),
        ("optimizer.type", '"Adam"', {}),
        ("optimizer.type", '"SGD"', {"optimizer": "sgd"}),
        ("optimizer.params.lr", "0.003", {"learning_rate": 0.003}),
        ("optimizer.params.betas", "[0.9, 0.999]", {}),
        ("optimizer.params.weight_decay", "0.01", {"optimizer": "adamw"}),
        ("scheduler.type", '"WarmupCosineLR"', {"schedule": "cosine"}),
        ("scheduler.params.warmup_max_lr", "0.003", {"learning_rate": 0.003}),
        ("scheduler.params.warmup_num_steps", "7", {"warmup_steps": 7}),
        ("zero_optimization.stage3_prefetch_bucket_size", "3686", {}),
        ("zero_optimization.stage3_param_persistence_threshold", "640", {}),
        ("zero_optimization.allgather_bucket_size", '"default"', {}),
        ("steps_per_print", '"default"', {}),
    ],
)
def test_auto_is_filled_from_the_settings_and_reported(ask, path, filled, values):
    config, notices = ask({path: "auto"}, **values)
    assert notices == [f"DeepSpeed ds.json: filled {path} {filled}"]
    assert '"auto"' not in json.dumps(config)


@pytest.mark.parametrize(
    ("path", "value", "values", "contradicted"),
    [
        ("train_batch_size", 32, {}, "32 contradicts --batch_size 16: "),
        ("train_micro_batch_size_per_gpu", 4, {}, "4 contradicts --micro_batch_size 2: "),
        ("train_micro_batch_size_per_gpu", 4, {"micro_batch_size": None, "micro_batch_tokens": 300},
         "4 contradicts --micro_batch_tokens 300"),
        ("gradient_accumulation_steps", 8, {}, "contradicts --batch_size 16 on 2 GPUs with --micro_batch_size 2"),
        ("gradient_clipping", 1.0, {}, "1.0 contradicts --max_grad_norm null: "),
        ("bf16.enabled", True, {}, "true contradicts --precision 32-true: "),
        ("fp16.enabled", True, {"precision": "bf16-mixed"}, "contradicts --precision bf16-mixed: "),
        ("optimizer.type", "SGD", {}, '"SGD" contradicts --optimizer adam: '),
        ("optimizer.type", "AdamW", {"optimizer": "sgd"}, "contradicts --optimizer sgd: "),
        ("optimizer.params.lr", 1e-3, {}, "0.001 contradicts --learning_rate 5e-05: "),
        ("optimizer.params.weight_decay", 0, {"optimizer": "adamw"}, "0 contradicts --optimizer adamw"),
        ("optimizer.params.momentum", 0.9, {"optimizer": "sgd"}, "0.9 contradicts --optimizer sgd"),
        ("scheduler.type", "WarmupDecayLR", {}, "contradicts --schedule constant: "),
        ("scheduler.params.warmup_num_steps", 500, {}, "500 contradicts --warmup_steps 0: "),
    ],
)  # fmt: skip
def test_a_contradiction_names_key_and_setting_and_a_fix(ask, path, value, values, contradicted):
    text = refused(ask, {path: value}, **values)
    assert text.startswith(f"ds.json: {path} ")
    assert contradicted in text
    assert text.endswith("change it there or here, or leave it out")


def test_values_that_agree_are_accepted_silently(ask):
    config = {
        **dict(zip(BATCHES, (16, 2, 4), strict=True)), "gradient_clipping": 0.5, "bf16.enabled": True,
        "optimizer.type": "Adam", "optimizer.params": {"lr": 5e-5, "betas": [0.9, 0.999], "eps": 1e-8,
                                                       "weight_decay": 0.01, "torch_adam": True},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 3, "warmup_type": "linear"}},
        "zero_optimization.offload_optimizer": None,
    }  # fmt: skip
    settings = {"max_grad_norm": 0.5, "optimizer": "adamw", "schedule": "linear", "warmup_steps": 3}
    assert ask(config, precision="bf16-mixed", **settings)[1] == []


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_does_not_accumulate_or_clip_by_default(ask, stage):
    config, _ = ask({"zero_optimization.stage": stage}, devices=3)
    assert config["train_micro_batch_size_per_gpu"] == 6, "the largest share of 16 on 3 GPUs"
    assert config["gradient_accumulation_steps"] == 1
    assert "train_batch_size" not in config, "16 is not a multiple of 3"
    assert config["gradient_clipping"] == 0.0, "DeepSpeed 0.19 clips to 1 by default"


def test_deepspeeds_timer_waits_for_the_device_only_on_request(ask):
    config_class = pytest.importorskip("deepspeed.utils.config").get_timers_config
    for values in ({}, {"timers.throughput.enabled": True}):
        assert config_class(ask(values)[0]).enabled is bool(values)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"gradient_clippin": 1.0}, "DeepSpeed has no key gradient_clippin that works here; did you mean gradient_cl"),
        ({"amp": {"enabled": False}}, "DeepSpeed has no key amp that works here; leave it out"),
        ({"tensor_parallel": {"autotp_size": 2}}, "DeepSpeed has no key tensor_parallel that works here; "),
        ({"optimizer": "Adam"}, "optimizer must be an object, {...}"),
        ({"zero_optimization": True}, "zero_optimization.stage must be 1, 2 or 3"),
        ({"zero_optimization.stage": 0}, "src/9_ddp.py shards nothing"),
        ({"zero_optimization.offload_param": 5}, "is not a configuration of DeepSpeed"),
        ({"zero_optimization.reduce_bucket_size": "big"}, 'reduce_bucket_size "big" must be a number'),
        ({"zero_optimization.offload_param": {"device": ["cpu"]}}, 'device ["cpu"] must be none, cpu or nvme'),
        ("{,}", "as JSON ("),
        ("[1]", "is not a configuration of DeepSpeed"),
    ],
)
def test_a_bad_configuration_is_refused(ask, config, message):
    assert message in refused(ask, config)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"deepspeed": "zero4"}, "--deepspeed zero4: the file does not exist; give a path, or one of zero1, zero2, "),
        ({"deepspeed": None}, "--deepspeed null: the file does not exist"),
        ({"deepspeed": "zero2", "precision": "bf16-true"}, "--precision bf16-true: ZeRO computes on 16-bit weights"),
        ({"deepspeed": "zero2", "optimizer": "adafactor"}, "--optimizer adafactor: it needs whole weights"),
        ({"deepspeed": "zero2", "optimizer": "sinkgd"}, "--optimizer sinkgd: it needs whole weights"),
        ({"deepspeed": "zero2", "optimizer": "adam-4bit"}, "--optimizer adam-4bit: it needs whole weights"),
        (
            {"deepspeed": "zero2_offload", "optimizer": "adam-8bit"},
            "--optimizer adam-8bit: zero2_offload.json offloads",
        ),
        ({"deepspeed": "zero3_nvme", "optimizer": "sgd"}, "--optimizer sgd: zero3_nvme.json offloads its state"),
    ],
)
def test_settings_that_do_not_work_with_zero_are_refused(ask, values, message):
    assert refused(ask, "", **values).startswith(message)


@pytest.mark.parametrize(("name", "decay"), [("adam", 0), ("adamw", 0.01)])
def test_the_optimizers_have_the_values_that_files_are_compared_with(tmp_path, name, decay):
    """Adam steps in one kernel even with a scaler or clipping, since DeepSpeed unscales and clips before the step."""
    settings = settings_for(
        tmp_path, strategy="deepspeed", deepspeed="zero2", optimizer=name, precision="16-mixed", max_grad_norm=1.0
    )
    values = build_optimizer(settings, nn.Linear(2, 2)).defaults
    assert (list(values["betas"]), values["eps"], values["weight_decay"]) == (*ADAM.values(), decay)
    assert values["fused"] is True


def test_the_keys_are_those_that_this_deepspeed_reads(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    runtime = pytest.importorskip("deepspeed.runtime.config", reason="needs deepspeed: requirements-dev.txt")
    requested = set()

    class Requested(dict):
        """A dict that records every requested key."""

        def get(self, key, default=None):
            requested.add(key)
            return super().get(key, default)

        def __contains__(self, key):
            requested.add(key)
            return super().__contains__(key)

        def keys(self):
            return self

        def __copy__(self):
            return self

    runtime.DeepSpeedConfig(Requested(train_batch_size=8))
    assert requested - runtime._REMOVED_TOP_LEVEL_CONFIG_KEYS.keys() >= KEYS
