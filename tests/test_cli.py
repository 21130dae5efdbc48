"""Settings: which source wins, what is suggested, what is refused, and what the hardware decides."""

import dataclasses
import os
import re
import sys

import pytest
import torch
import yaml
from support.helpers import MODELS, ROOT, RUNGS

from fabric_ladder import Settings, UserError, parse_settings
from fabric_ladder.checks import check_precision
from fabric_ladder.cli import resolve
from fabric_ladder.environment import mixed_precision
from fabric_ladder.rungs import script_defaults
from fabric_ladder.settings import FACTS, GROUPS, INTERNAL

BLOOM = ["--model", str(MODELS / "bloom-quickstart.json"), "--from_scratch", "true"]
NAMES = [field.name for field in dataclasses.fields(Settings) if field.name not in INTERNAL]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch, tmp_path):
    """An empty folder, no GPU, and Python's own excepthook afterwards, which `parse_settings` replaces."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def gpu(monkeypatch):
    """Pretend that there is a GPU of some compute capability; PyTorch says of all of them that they do bfloat16."""

    def pretend(*capability):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Tesla T4")
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_, **__: True)

    return pretend


@pytest.fixture
def config(tmp_path):
    """Write a YAML file into a folder of its own; return the arguments that name it."""

    def write(text):
        path = tmp_path / "elsewhere" / "own.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return ["--config", str(path)]

    return write


def refusal(*args, **defaults):
    """The one line that refuses these arguments."""
    with pytest.raises(UserError) as error:
        parse_settings([*BLOOM, *args], **defaults)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("script", "file", "line", "expected"),
    [({}, "", [], 1), ({"batch_size": 16}, "", [], 16), ({"batch_size": 16}, "batch_size: 8", [], 8),
     ({"batch_size": 16}, "batch_size: 8", ["--batch_size", "4"], 4), ({}, "", ["--batch_size=4"], 4)],
)  # fmt: skip
def test_the_command_line_wins_over_yaml_and_yaml_over_the_script(config, script, file, line, expected):
    settings = parse_settings([*config(file), *BLOOM, *line], **script)
    assert settings.batch_size == settings.micro_batch_size == expected


def test_all_sources_are_merged(config):
    args = [*config("epochs: 3\nmicro_batch_size: null\nfrom_scratch: true"), *BLOOM[:2], "--seed", "7"]
    settings = parse_settings(args, batch_size=16, micro_batch_size=1)
    assert (settings.epochs, settings.seed, settings.batch_size, settings.from_scratch) == (3, 7, 16, True)
    assert settings.micro_batch_size == 16, "null in a file takes back the script's own value"


def test_relative_paths_in_yaml_are_looked_for_beside_the_file(config, tmp_path):
    """All five settings that may be paths; what is not there stays as it is written."""
    args = config(
        "{dataset: a.csv, validation_file: b.csv, test_file: c.csv, tokenizer: t, model: m.json, from_scratch: true}"
    )
    beside = tmp_path / "elsewhere"
    for name in ("a.csv", "b.csv", "t"):
        (beside / name).touch()
    (beside / "m.json").write_bytes((MODELS / "bloom-quickstart.json").read_bytes())
    settings = parse_settings(args)
    found = (settings.dataset, settings.validation_file, settings.tokenizer, settings.model)
    assert found == tuple(str(beside / name) for name in ("a.csv", "b.csv", "t", "m.json"))
    assert settings.test_file == "c.csv"


def test_relative_paths_on_the_command_line_are_not(config, tmp_path):
    args = [*config("seed: 1"), *BLOOM, "--dataset", "a.csv"]
    (tmp_path / "elsewhere" / "a.csv").touch()
    assert parse_settings(args).dataset == "a.csv"


def test_what_comes_along_is_found_from_any_folder():
    model = "configs/models/bloom-quickstart.json"
    settings = parse_settings(["--config", "configs/imdb_minilm.yaml", "--model", model, "--from_scratch", "true"])
    assert settings.config == str(ROOT / "configs" / "imdb_minilm.yaml")
    assert settings.model == str(ROOT / model)


def test_a_config_that_comes_along_is_found_by_its_name():
    settings = parse_settings(["--config", "imdb_minilm.yaml", *BLOOM])
    assert (settings.dataset, settings.max_length, settings.train_samples) == ("imdb", 256, 2000)
    assert settings.config == str(ROOT / "configs" / "imdb_minilm.yaml")
    assert settings.notices == ()


def test_a_missing_config_names_those_that_come_along():
    message = refusal("--config", "nowhere.yaml")
    assert "no config file nowhere.yaml" in message
    assert all(path.name in message for path in (ROOT / "configs").glob("*.yaml"))


def test_without_a_gpu_the_quickstart_is_taken_and_says_so():
    settings = parse_settings([], batch_size=16)
    assert (settings.dataset, settings.max_length, settings.batch_size) == ("synthetic", 512, 16)
    assert settings.model == str(MODELS / "bloom-quickstart.json")
    assert settings.accelerator == "cpu"
    (notice,) = settings.notices
    for part in ("no CUDA GPU", "quickstart.yaml", "--config configs/imdb_bloom_560m.yaml", "--help"):
        assert part in notice


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "this is the quickstart (quickstart.yaml), a small model on synthetic reviews. For real work"),
        (["--dataset", "a.csv"], "this is the quickstart (quickstart.yaml), a small model. For real work"),
        (
            [f"--model={MODELS / 'llama-tiny.json'}"],
            "this is the quickstart (quickstart.yaml), synthetic reviews. For real work",
        ),
        (
            ["--dataset", "a.csv", "--model", str(MODELS / "llama-tiny.json")],
            "what you do not set is the quickstart's (quickstart.yaml). For",
        ),
    ],
)
def test_the_notice_names_what_the_quickstart_supplies_alone(given, said):
    assert f"CUDA GPU: {said}" in parse_settings(given).notices[0]


def test_products_in_32_bit_are_faster_on_a_gpu_unless_the_user_says_otherwise(gpu):
    assert parse_settings(BLOOM).matmul_precision == "highest"
    gpu(8, 0)
    assert parse_settings(BLOOM).matmul_precision == "high"
    assert parse_settings([*BLOOM, "--matmul_precision", "medium"]).matmul_precision == "medium"
    assert "expected highest, high or medium" in refusal("--matmul_precision", "tf32")


def test_with_a_gpu_the_defaults_in_code_are_taken(gpu):
    gpu(8, 0)
    settings = parse_settings(BLOOM)
    assert (settings.dataset, settings.max_length, settings.config, settings.notices) == ("imdb", 1024, None, ())
    assert settings.accelerator == "cuda"
    assert parse_settings([*BLOOM, "--accelerator", "cpu"]).accelerator == "cpu"


def test_on_a_gpu_the_evaluation_follows_the_training_unless_it_is_set(gpu):
    assert parse_settings(BLOOM).eval_batch_tokens == 1024
    gpu(8, 0)
    assert parse_settings(BLOOM).eval_batch_tokens is None
    assert parse_settings([*BLOOM, "--eval_batch_tokens", "512"]).eval_batch_tokens == 512


def test_the_defaults_are_the_blogs_run():
    settings = Settings()
    assert (settings.dataset, settings.model) == ("imdb", "bigscience/bloom-560m")
    assert (settings.learning_rate, settings.seed) == (5e-5, 123)
    assert (settings.max_length, settings.epochs) == (1024, 1)
    values = yaml.safe_load((ROOT / "configs" / "imdb_bloom_560m.yaml").read_text())
    assert values.pop("log_every") == 300 * 16  # the blog's; by default also a tenth of a shorter epoch
    assert values == {name: getattr(settings, name) for name in values}


def test_the_environment_names_the_folders(monkeypatch):
    monkeypatch.setenv("FABRIC_LADDER_DATA", "/some/data")
    monkeypatch.setenv("FABRIC_LADDER_CACHE", "/some/cache")
    settings = parse_settings(BLOOM)
    assert (settings.data_dir, settings.cache_dir) == ("/some/data", "/some/cache")
    monkeypatch.delenv("FABRIC_LADDER_DATA")
    assert parse_settings(BLOOM).data_dir == "data"


def test_tokens_take_the_place_of_micro_batch_size():
    settings = parse_settings([*BLOOM, "--micro_batch_tokens", "512"], batch_size=16, micro_batch_size=1)
    assert (settings.micro_batch_tokens, settings.micro_batch_size) == (512, None)


@pytest.mark.parametrize(
    ("capability", "precision"),
    [((7, 0), "16-mixed"), ((7, 5), "16-mixed"), *((each, "bf16-mixed") for each in ((8, 0), (8, 9), (9, 0), (12, 0)))],
)
def test_mixed_precision_follows_the_compute_capability(gpu, capability, precision):
    gpu(*capability)
    assert torch.cuda.is_bf16_supported(), "the trap: true of the emulation too"
    assert mixed_precision() == precision
    assert parse_settings(BLOOM, precision="mixed").precision == precision


def test_mixed_precision_on_a_cpu_is_bfloat16():
    assert mixed_precision() == "bf16-mixed"


ON_A_T4 = {
    "5": ("bf16-true", "no tensor cores, and attention keeps a matrix of tokens x tokens"),
    "10": ("32-true", "32-true in place of mixed precision, since FSDP2 cannot scale the loss"),
    "13": ("16-mixed", "16-mixed in place of bf16-true: frozen matrices in float16, adapters in 32-bit"),
}
ON_A_T4 |= dict.fromkeys("6 7 8 16 17 18 19 20 21".split(), ON_A_T4["5"])
ON_A_T4 |= {"11": ON_A_T4["10"], "14": ON_A_T4["13"]}


@pytest.mark.parametrize("rung", RUNGS, ids=lambda path: path.stem)
def test_every_rung_runs_on_a_gpu_without_bfloat16_and_says_what_it_takes(gpu, rung):
    script = script_defaults(rung.stem)
    for capability in ((8, 0), (8, 9), (9, 0), (12, 0)):
        gpu(*capability)
        newer = resolve(Settings(**script), script=script)
        assert newer.precision == {"mixed": "bf16-mixed"}.get(
            script.get("precision"), script.get("precision", "32-true")
        )
        assert newer.notices == ()
        check_precision(newer, capability)
    gpu(7, 5)
    settings = resolve(Settings(**script), script=script)
    check_precision(settings, (7, 5))
    number = rung.stem.split("_")[0]
    if number in ON_A_T4:
        precision, meaning = ON_A_T4[number]
        (notice,) = settings.notices
        assert notice.startswith("Tesla T4 only emulates bfloat16 (compute capability below 8.0): ")
        assert meaning in notice
        assert "\n" not in notice
    else:
        precision = "16-mixed" if number in ("4", "9", "12", "15", "22") else "32-true"
        assert settings.notices == ()
    assert settings.precision == precision


@pytest.mark.parametrize(
    ("rung", "options", "file", "on_gpu", "on_cpu"),
    [("2_grad_accum", [], "", (1, None), (1, None)), ("4_mixed_precision", [], "", (None, "auto"), (None, 1024)),
     ("4_mixed_precision", ["--micro_batch_size", "1"], "", (1, None), (1, None)),
     ("4_mixed_precision", [], "micro_batch_size: 4", (4, None), (4, None)),
     ("5_low_precision", ["--micro_batch_tokens", "2048"], "micro_batch_size: 4", (None, 2048), (None, 2048)),
     ("5_low_precision", ["--micro_batch_tokens", "auto"], "micro_batch_size: 4", (None, "auto"), (None, "auto")),
     ("2_grad_accum", [], "micro_batch_tokens: auto", (None, "auto"), (None, 1024)),
     ("2_grad_accum", ["--micro_batch_size", "4"], "micro_batch_tokens: auto", (4, None), (4, None))],
)  # fmt: skip
def test_from_rung_3_on_a_gpu_takes_what_fits_unless_the_user_says_something(
    gpu, config, rung, options, file, on_gpu, on_cpu
):
    args = [*(config(file) if file else []), *BLOOM, *options]
    for accelerator, expected in (("cpu", on_cpu), ("cuda", on_gpu)):
        gpu(8, 0)
        settings = parse_settings([*args, "--accelerator", accelerator], **script_defaults(rung))
        assert (settings.micro_batch_size, settings.micro_batch_tokens) == expected


def test_a_precision_given_by_hand_is_taken_or_refused_with_the_reason(gpu):
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


@pytest.mark.parametrize(
    ("written", "meant"),
    [("bach_size", "batch_size"), ("batch", "batch_size"), ("learningrate", "learning_rate"), ("epoch", "epochs"),
     ("max_len", "max_length"), ("micro_batch_token", "micro_batch_tokens"), ("data-dir", "data_dir")],
)  # fmt: skip
def test_the_nearest_setting_is_suggested(config, written, meant):
    assert refusal(f"--{written}", "1").startswith(f"there is no setting '{written}'; did you mean --{meant}")
    message = refusal(*config(f"{written}: 1"))
    assert f"own.yaml: there is no setting '{written}'; did you mean --{meant}" in message


@pytest.mark.parametrize("name", ["xyzzy", "notices"])
def test_what_is_like_no_setting_sends_to_the_help(name):
    assert refusal(f"--{name}", "1") == f"there is no setting {name!r}; see --help all for all settings"


@pytest.mark.parametrize(
    ("args", "pattern"),
    [(["--batch_size", "many"], r"--batch_size many: expected a whole number"),
     (["--batch_size", "1.5"], r"--batch_size 1\.5: expected a whole number"),
     (["--precision", "8-bit"], r"--precision 8-bit: expected .*bf16-mixed"),
     (["--from_scratch", "perhaps"], r"--from_scratch perhaps: expected true or false"),
     (["--learning_rate", "1e-"], r"--learning_rate 1e-: expected a number"),
     (["stray"], r"stray"), (["--seed"], r"seed"), (["--config"], r"--config")],
)  # fmt: skip
def test_wrong_types_are_refused_by_name_and_value(args, pattern):
    assert re.search(pattern, refusal(*args))


@pytest.mark.parametrize(("name", "wanted"), [("train_samples", "a whole number"), ("max_grad_norm", "a number")])
def test_wrong_types_of_settings_without_a_value_are_told_alike(name, wanted):
    assert re.search(rf"^--{name} few: expected {wanted}\b", refusal(f"--{name}", "few"))


AT_LEAST_1 = ("epochs", "batch_size", "micro_batch_size", "micro_batch_tokens", "eval_batch_tokens", "log_every",
              "max_length", "threads", "pad_to_multiple_of", "pack_rows", "train_samples", "validation_samples",
              "test_samples", "image_size", "resize_to", "devices", "num_nodes", "keep",
              "lora_rank", "lora_alpha", "loss_chunk")  # fmt: skip
ABOVE_0 = ("learning_rate", "sgd_learning_rate", "lora_learning_rate", "max_grad_norm", "max_time")
TOO_LOW = [(name, value) for name in AT_LEAST_1 for value in ("0", "-1")]
TOO_LOW += [(name, "-1") for name in ("num_workers", "seed", "split_seed", "warmup_steps", "save_every", "nan_limit")]
TOO_LOW += [(name, value) for name in ABOVE_0 for value in ("0", "-1", "nan", "inf")]
TOO_LOW += [("lora_dropout", value) for value in ("-0.1", "1.0", "nan")]


@pytest.mark.parametrize(("name", "value"), TOO_LOW)
def test_numbers_that_cannot_work_are_refused(name, value):
    message = refusal(f"--{name}={value}")
    assert re.match(rf"--{name} {value}(\.0)?: must be ", message)


def test_every_number_has_a_tested_bound():
    """A setting that is new must be added above."""
    numbers = {
        item.name for item in dataclasses.fields(Settings) if item.type in (int, int | None, float, float | None)
    }
    numbers |= {"devices", "micro_batch_tokens"}  # or `auto`
    assert numbers == {name for name, _ in TOO_LOW}


@pytest.mark.parametrize(
    ("text", "pattern"),
    [("a: [1", r"cannot read .*own\.yaml"), ("- 1\n- 2", r"must hold lines such as"), ("\t", r"cannot read|must hold"),
     ("batch_size: [1, 2]", r"own\.yaml: --batch_size .*expected a whole"), ("seed: many", r"own\.yaml: --seed many")],
)  # fmt: skip
def test_a_bad_yaml_file_is_named(config, text, pattern):
    assert re.search(pattern, refusal(*config(text)))


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n"])
def test_an_empty_yaml_file_changes_nothing(config, text):
    assert parse_settings([*config(text), *BLOOM]).dataset == "imdb"


def test_a_config_in_a_config_is_refused(config):
    assert "config" in refusal(*config("config: quickstart.yaml"))


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
    text_of_all = " ".join(text.split())
    assert "set by this script: 16)" in text_of_all
    assert text_of_all.count("set by this script") == 1
    headings = re.findall(r"^(\S[\w-]*):$", text, re.MULTILINE)
    assert headings == ["options", *GROUPS, "examples"]
    with pytest.raises(SystemExit):
        parse_settings(["--help"], batch_size=16)
    short = capsys.readouterr().out
    assert "--batch_size N" in short
    assert "--help all" in short
    assert 10 <= len(re.findall(r"^  --", short, re.MULTILINE)) <= 20


def test_every_setting_is_in_one_group():
    assert [name for group in GROUPS for name in FACTS if FACTS[name].group == group] == NAMES
    for name, group in {
        "dataset": "data",
        "lora": "model",
        "schedule": "optimization",
        "packing": "micro-batches",
        "loss_chunk": "memory",
        "precision": "devices",
        "logger": "logging",
        "resume": "checkpoints",
    }.items():
        assert FACTS[name].group == group


ROUND_TRIPS = {
    "defaults": ([], {}),
    "the script's own": ([], {"batch_size": 16, "micro_batch_size": 1, "precision": "mixed"}),
    "null": (["--micro_batch_size", "null"], {"batch_size": 16, "micro_batch_size": 1}),
    "a rate of its own": ([], {"optimizer": "sgd"}),
    "a rate that is given": (["--learning_rate", "0.25"], {"optimizer": "sgd", "schedule": "cosine"}),
    "adapters": (["--lora", "true", "--lora_targets", "query_key_value,dense"], {}),
    "texts": (
        [
            "--task",
            "instruction-tuning",
            "--prompt_template",
            "Frage: {instruction}\n'{input}'\n# Antwort:",
            "--text_column",
            "text: ü",
        ],
        {},
    ),
    "numbers and names": (
        ["--micro_batch_tokens", "512", "--max_grad_norm", "1e-3", "--logger", "csv,tensorboard"],
        {},
    ),
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
    if "a rate" in name:  # that was not the one of Adam is now all there is
        same |= {"sgd_learning_rate": 0, "lora_learning_rate": 0}
    assert dataclasses.replace(got, **same) == dataclasses.replace(expected, **same)


PRETRAINED = {
    "a folder": ("folder", False), "a folder from scratch": ("folder --from_scratch true", True),
    "a config file": ("{json}", True), "a name on the Hub": ("some/name", False),
}  # fmt: skip


@pytest.mark.parametrize("chosen", [True, False], ids=["own config", "quickstart"])
@pytest.mark.parametrize("name", PRETRAINED)
def test_a_model_on_the_command_line_is_pretrained_whatever_the_file_has(config, monkeypatch, name, chosen):
    monkeypatch.setattr("fabric_ladder.cli.check", lambda *_: None)  # which would load the model
    words, from_scratch = PRETRAINED[name]
    words = words.format(json=MODELS / "llama-tiny.json").split()
    file = config("model: some.json\nfrom_scratch: true\nlearning_rate: 1e-3") if chosen else []
    settings = parse_settings([*file, "--model", *words])
    assert (settings.model, settings.from_scratch, settings.learning_rate) == (words[0], from_scratch, 1e-3)
    notices = [notice for notice in settings.notices if notice.startswith("--model")]
    assert len(notices) == (not from_scratch)
    if notices:
        assert re.search(rf"{words[0]}: its pretrained weights, where \S+\.yaml has random ones", notices[0])


def test_a_folder_that_is_not_there_is_told_as_one():
    for name in ("runs/10_fsdp/1/model", "./model", "/no/model"):
        with pytest.raises(UserError, match=rf"there is no folder {re.escape(name)}$"):
            parse_settings(["--model", name])


@pytest.fixture
def mac(monkeypatch):
    """Pretend that PyTorch finds Apple silicon's GPU, under some macOS."""

    def pretend(macos=15):
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
        monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda major, minor: macos >= major)

    return pretend


def test_apple_silicon_is_taken_when_it_is_asked_for(mac):
    assert "PyTorch finds no Apple GPU here; use --accelerator cpu" in refusal("--accelerator", "mps")
    mac()
    assert parse_settings(BLOOM).accelerator == "cpu"
    for script in ({}, {"precision": "mixed"}, {"precision": "16-mixed"}, {"precision": "bf16-true"}):
        settings = parse_settings([*BLOOM, "--accelerator", "mps"], **script)
        wanted = {"mixed": "bf16-mixed"}.get(script.get("precision"), script.get("precision", "32-true"))
        assert (settings.accelerator, settings.precision, settings.devices) == ("mps", wanted, 1)
        assert (settings.pad_to_multiple_of, settings.matmul_precision) == (16, "highest")
    assert parse_settings([*BLOOM, "--accelerator", "mps"], devices="auto").devices == 1


@pytest.mark.parametrize(
    ("args", "script", "pattern"),
    [("--precision 64-true", {}, "64-true: use 32-true"), ("--compile true", {}, "src/2_grad_accum.py"),
     ("--devices 2", {"strategy": "ddp", "devices": "auto", "batch_size": 16}, "more than one device"),
     ("", {"strategy": "fsdp", "devices": "auto"}, "FSDP2: use src/7_grad_checkpointing.py"),
     ("--lora true --quantization nf4", {}, "src/13_lora.py"), ("--optimizer adam-8bit", {}, "--optimizer adafactor"),
     ("--optimizer_offload true", {}, "share the CPU's memory"), ("--float8 true", {}, "no 8-bit floating point"),
     ("--activation_checkpointing true --activation_offload true", {}, "share the CPU's memory"),
     ("", {"strategy": "deepspeed", "devices": "auto", "deepspeed": "zero2"}, "needs a CUDA GPU")],
)  # fmt: skip
def test_what_apple_silicon_cannot_do_is_refused(mac, args, script, pattern):
    mac()
    assert pattern in refusal("--accelerator", "mps", *args.split(), **script)


def test_bfloat16_needs_macos_14(mac):
    mac(13)
    assert "before macOS 14: use 16-mixed or 32-true" in refusal("--accelerator", "mps", "--precision", "bf16-true")


def alloc_conf(monkeypatch, release="6.8.0-generic", **environment):
    """What the variables for CUDA are when the GPU is first asked for something."""
    seen = {}
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG"):
        monkeypatch.setenv(name, "") if name in environment else monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("platform.release", lambda: release)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (seen.update(os.environ), (8, 0))[1])
    return seen


def test_cuda_starts_with_segments_that_grow_unless_the_user_says_otherwise(gpu, monkeypatch):
    gpu(8, 0)
    for given in ({}, {"PYTORCH_ALLOC_CONF": "backend:native"}, {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}):
        seen = alloc_conf(monkeypatch, **given)
        parse_settings(BLOOM, precision="mixed")
        wanted = given or {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
        assert {name: value for name, value in seen.items() if "ALLOC_CONF" in name} == wanted
    for release in ("5.15.0-microsoft-standard-WSL2", "5.15.148-tegra"):
        seen = alloc_conf(monkeypatch, release)
        parse_settings(BLOOM, precision="mixed")
        assert "PYTORCH_ALLOC_CONF" not in seen


def test_deterministic_products_need_a_workspace_of_one_size(gpu, monkeypatch):
    gpu(8, 0)
    for option, wanted in (("false", None), ("true", ":4096:8")):
        seen = alloc_conf(monkeypatch)
        assert parse_settings([*BLOOM, "--deterministic", option], precision="mixed").deterministic == (
            option == "true"
        )
        assert seen.get("CUBLAS_WORKSPACE_CONFIG") == wanted


def test_sgd_has_a_learning_rate_of_its_own_unless_the_command_line_gives_one(config):
    file = config("learning_rate: 1e-3\nsgd_learning_rate: 0.5")
    assert parse_settings([*file, *BLOOM], optimizer="sgd").learning_rate == 0.5
    assert parse_settings([*file, *BLOOM, "--learning_rate", "0.2"], optimizer="sgd").learning_rate == 0.2
    assert parse_settings([*file, *BLOOM, "--optimizer", "adam"], optimizer="sgd").learning_rate == 1e-3


def test_a_learning_rate_from_a_file_is_never_replaced_in_silence(config):
    for option, name, rate in (("--optimizer sgd", "sgd", 0.01), ("--lora true", "lora", 0.0002)):
        file = config("learning_rate: 1e-3")
        settings = parse_settings([*file, *BLOOM, *option.split()])
        assert settings.learning_rate == rate
        notice, *reasons = settings.notices
        assert [reason[:35] for reason in reasons] == ["SGD barely learns from random weigh"] * (name == "sgd")
        assert notice.startswith(f"Learning rate {rate} (--{name}_learning_rate) in place of 0.001, which own.yaml has")
        assert not parse_settings([*file, *BLOOM, *option.split(), "--learning_rate", "0.5"]).notices[name == "sgd" :]
        assert not parse_settings([*file, *BLOOM]).notices
        assert len(parse_settings([*config("seed: 1"), *BLOOM, *option.split()]).notices) == (name == "sgd")
        assert not parse_settings([*config(f"learning_rate: 1\n{name}_learning_rate: 2"), *BLOOM]).notices


@pytest.mark.parametrize(
    ("args", "pattern"),
    [(["--kahan_summation", "true"], r"under --precision 32-true the weights lose nothing"),
     (["--step_in_backward", "true", "--max_grad_norm", "1"], r"--max_grad_norm needs all gradients together"),
     (["--precision", "16-true"], r"epsilon of --optimizer adam is 0 in float16"),
     (["--load", "nowhere"], r"--load nowhere is no sharded checkpoint; a consolidated model is given as --model"),
     (["--devices", "2"], r"runs on one; for more: src/9_ddp\.py"),
     (["--devices", "two"], r"--devices two: expected a whole number"),
     (["--micro_batch_tokens", "few"], r"--micro_batch_tokens few: expected a whole number"),
     (["--on_nan", "ignore"], r"--on_nan ignore: expected stop or skip"),
     (["--offload", "true"], r"run src/11_fsdp_cpu_offload\.py"),
     (["--deepspeed", "zero2"], r"run src/12_deepspeed_zero\.py"),
     (["--task", "image-classification", "--image_size", "32", "--resize_to", "16"], r"--resize_to 16 is below"),
     (["--task", "image-classification"], r"\(bloom\) has no form for --task image-classification")],
)  # fmt: skip
def test_what_does_not_go_together_is_refused_before_any_work(args, pattern):
    assert re.search(pattern, refusal(*args))


def test_eight_bit_adam_without_its_library_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install bitsandbytes==" in refusal("--optimizer", "adam-8bit")


def test_more_gpus_than_there_are(gpu, monkeypatch):
    gpu(8, 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert parse_settings(BLOOM, strategy="ddp", devices="auto", batch_size=16).devices == 2
    message = refusal("--devices", "4", strategy="ddp", devices="auto", batch_size=16)
    assert message == "--devices 4: this machine has 2 CUDA GPUs"
