"""The command line and YAML files: values, suggestions, refusals, and no import of torch."""

import ast
import os
import re
import subprocess
import sys
import types

import pytest
from support.helpers import CONFIGS, MODELS, SRC, run_script, without_package

from fabric_ladder import UserError
from fabric_ladder.cli import parse_settings
from fabric_ladder.data.hub import reachable
from fabric_ladder.data.load import check_data
from fabric_ladder.data.splits import SPLITS
from fabric_ladder.foreign import ALIASES, DEPENDENT, WORDS, to_own_words
from fabric_ladder.ladder import LADDER
from fabric_ladder.options import (
    DEFAULTS,
    NAMES,
    combine,
    drop_unneeded,
    find_config,
    is_met,
    read_config,
    read_words,
    script_defaults,
    without_options,
)
from fabric_ladder.places import SCRIPTS
from fabric_ladder.settings import FACTS, DataSettings, Settings, kinds_of


def read(*words, script=types.MappingProxyType({}), text=""):
    """Return all settings of a command line and of a YAML file with this text."""
    if text:
        with open("own.yaml", "w", encoding="utf-8") as file:
            file.write(text)
    return combine(script, read_config(find_config("own.yaml")) if text else {}, read_words([*words]))


def refusal(*words, **sources):
    """Return the one-line error for a command line or a YAML file."""
    with pytest.raises(UserError) as error:
        read(*words, **sources)
    line = str(error.value)
    assert "\n" not in line
    assert len(line) < 400
    return line


@pytest.fixture(autouse=True)
def empty_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("script", "text", "words", "expected"),
    [({}, "", "", 1), ({"batch_size": 16}, "", "", 16), ({"batch_size": 16}, "batch_size: 8", "", 8),
     ({"batch_size": 16}, "batch_size: 8", "--batch_size 4", 4), ({}, "", "--batch_size=4", 4)],
)  # fmt: skip
def test_the_command_line_overrides_yaml_and_yaml_overrides_the_script(script, text, words, expected):
    assert read(*words.split(), script=script, text=text)["batch_size"] == expected


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("--learnin_rate 1", "did you mean --learning_rate"),
        ("--gradacum 2", "did you mean --gradient_accumulation_steps"),
        ("--notices 1", "see --help all for all settings"),
        ("--num_labels 3", "the classes are those of the column"),
    ],
)
def test_an_unknown_setting_names_the_nearest_ones(words, meant):
    name = re.match(r"--([\w-]+)", words)[1]
    assert re.match(rf"there is no setting {name!r}[;:] .*{meant}", refusal(*words.split()))


@pytest.mark.parametrize(
    ("words", "own"),
    [
        ("--lr 1e-3", "--learning_rate 1e-3"),
        ("--learning-rate 1", "--learning_rate 1"),
        ("--fp16", "--precision 16-mixed"),
        ("--fp16 False", "nothing to change"),
        ("--precision bf16", "--precision bf16-mixed"),
        ("--num-train-epochs 3.0", "--epochs 3"),
        ("--grad_accum 4", "--gradient_accumulation_steps 4"),
        ("--resume_from_checkpoint", "--resume auto"),
        ("--optim adamw_torch", "--optimizer adam"),  # the Trainer's weight decay is 0 by default
        ("--num_layers_unfrozen 2", "--train_blocks last:2"),
        ("--metric_for_best_model eval_accuracy", "--best_metric accuracy"),
    ],
)
def test_options_of_other_libraries_are_read_and_a_line_shows_as_what(words, own):
    found, lines = to_own_words(words.split())
    assert " ".join(found) == own.replace("nothing to change", "")
    assert lines == [f"{words.replace('=', ' ')} as {own}"]
    if found and found[0][2:] not in DEPENDENT:
        read_words(found)


def test_every_name_of_another_library_is_accepted():
    """With a value of its setting, or as a switch."""
    for alias in [*ALIASES, *DEPENDENT]:
        setting, value = ALIASES.get(alias, (alias, "{}"))
        kinds, words = kinds_of(setting) if setting in FACTS else ((int,), ())
        example = words[0] if words else "1" if {int, float} & {*kinds} else "x"
        found, lines = to_own_words([f"--{alias}", example] if "{}" in value else [f"--{alias}"])
        assert setting in read_words(found)
        assert lines or alias == setting


def test_own_options_stay_as_they_are_and_the_last_of_two_counts():
    words = "--seed 1 --lora --runs_dir=--odd --tokenizer= --batch_size 4 --seed 2 --xyzzy 3 --help".split()
    assert to_own_words(words) == (words, [])
    own = "--seed 2 --lora --runs_dir=--odd --tokenizer= --batch_size 4 --xyzzy 3 --help --learning_rate 1".split()
    assert to_own_words([*words, "--lr", "1"])[0] == own
    with pytest.raises(UserError, match="--lr 1 and --learning_rate 2 both set --learning_rate: leave one of them out"):
        to_own_words("--lr 1 --learning_rate 2".split())
    assert to_own_words("--lr 1 --learning_rate 1".split())[0] == ["--learning_rate", "1"]


def test_a_yaml_file_may_have_names_of_other_libraries():
    values = read(text="num_train_epochs: 3\nlr: 0.1\nbetas: [0.8, 0.95]\n")
    assert (values["epochs"], values["learning_rate"], values["betas"]) == (3, 0.1, "0.8,0.95")
    assert values["notices"] == ("own.yaml: read --num_train_epochs 3 as --epochs 3, --lr 0.1 as --learning_rate 0.1",)


def test_names_in_other_libraries_are_unique_and_not_settings():
    assert not {*ALIASES} & {*NAMES, *DEPENDENT}
    written = [text for fact in FACTS.values() for text in fact.aliases.values()]
    written += [option.aliases for option in DEPENDENT.values()]
    assert len(ALIASES) == sum(len(text.split()) for text in written)
    for name, words in WORDS.items():
        assert not {*words} & {*kinds_of(name)[1]}
        assert {*words.values()} <= {*kinds_of(name)[1], "csv", "auto", "no"}


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--batch_size many", "--batch_size many: expected a whole number"),
        ("--devices two", "--devices two: expected a whole number or auto"),
        ("--matmul_precision tf32", "--matmul_precision tf32: expected highest, high or medium"),
        ("--from_scratch perhaps", "--from_scratch perhaps: expected true or false"),
        ("stray", "unexpected 'stray': write --NAME VALUE"),
        ("--betas 0.9,1", "--betas 0.9,1.0: must be below 1"),
        ("--seed", "--seed needs a value"),
        (f"--lora_alpha {'9' * 40}", "--lora_alpha 999999999999999999999999999999: must be at most 2147483647"),
        ("--save", "--save needs a value: no or sharded or consolidated (see --help)"),
        ("--tokenizer=", "--tokenizer is empty: give a value, or leave it out"),
    ],
)
def test_a_wrong_value_is_refused_by_name(words, line):
    assert refusal(*words.split()).startswith(line)


def test_every_number_has_a_lower_bound_and_is_finite():
    for name in [name for name in NAMES if {int, float} & {*kinds_of(name)[0]}]:
        fact = FACTS[name]
        assert (fact.at_least is None) != (fact.above is None)
        numbers = [fact.above, "inf"] if fact.at_least is None else [fact.at_least - 1]
        numbers += [-1] + [fact.below] * (fact.below is not None) + ["nan"] * (float in kinds_of(name)[0])
        for number in numbers:
            assert re.match(rf"--{name} \S+: must be ", refusal(f"--{name}={number}"))


def test_switches_need_no_value_and_negative_numbers_are_values():
    for words in ("--lora", "--lora true", "--lora=yes", "--lora --seed 3", "--seed 3 --lora"):
        assert read(*words.split())["lora"] is True
    assert read("--lora", "false")["lora"] is False
    assert "--seed -1: must be at least 0" in refusal("--seed", "-1")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a: [1", r"cannot read own\.yaml as YAML"),
        (f"seed: {'[' * 3000}{']' * 3000}", r"cannot read own\.yaml as YAML"),
        ("- 1\n- 2", r"own\.yaml must hold lines such as 'batch_size: 16'"),
        ("batch_size: [1, 2]", r"own\.yaml: --batch_size 1,2: expected a whole number"),
        ("max_length: 32\nseed: 3\nmax_length: 16", r"cannot read own\.yaml as YAML \(max_length is written 2 times: "),
        ("seed: {a: 1}", r"own\.yaml: 'seed' must be one value"),
        ("lerning_rate: 0.1", r"own\.yaml: there is no setting 'lerning_rate'; did you mean --learning_rate"),
        ("config: quickstart.yaml", r"own\.yaml: there is no setting 'config'"),
        ("sgd_learning_rate: 0.3", r"own\.yaml: there is no setting 'sgd_learning_rate' any more: use --learning_rate"),
        ("max_time: 9\non_nan: skip\nsede: 3", r".* 'max_time' .* `timeout 60m`.*; .* 'on_nan' .*; .* 'sede'; did you"),
        ("cache_dir: here", r".* 'cache_dir' any more: set the environment variable FABRIC_LADDER_CACHE"),
        ("freeze_layers: 2", r"own\.yaml: there is no setting 'freeze_layers'; did you mean --train_blocks"),
    ],
)
def test_a_bad_yaml_file_is_named(text, line):
    assert re.match(line, refusal(text=text))


def test_values_in_a_yaml_file_are_those_of_the_command_line():
    text = "save: no\nquantization: no\nlora: yes\ncompile: off\nlora_targets: [query, dense]\nmicro_batch_size: null\n"
    values = read(text=text, script={"micro_batch_size": 1})
    assert (values["save"], values["quantization"]) == ("no", "no")
    assert (values["lora"], values["compile"]) == (True, False)
    assert (values["lora_targets"], values["micro_batch_size"]) == ("query,dense", None)
    assert read(text="# nothing\n") == vars(Settings())


def test_a_config_is_found_by_name_from_any_folder_and_a_missing_one_names_all():
    assert find_config("imdb_minilm.yaml") == find_config("configs/imdb_minilm.yaml") == CONFIGS / "imdb_minilm.yaml"
    for name, shown in (("nowhere.yaml", "nowhere.yaml"), ("", "(an empty name)"), ("~no_such_user/a",) * 2):
        with pytest.raises(UserError) as error:
            find_config(name)
        assert f"there is no config file {shown}; these exist: " in str(error.value)
        assert all(path.name in str(error.value) for path in CONFIGS.glob("*.yaml"))


def test_paths_are_found_next_to_the_yaml_file_in_the_home_and_among_the_configs(monkeypatch, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    for name in ("a.csv", "b.csv", "t", "m.json", "runs"):
        (home / name).touch()
    (home / "own.yaml").write_text(
        "{dataset: a.csv, validation_file: b.csv, test_file: c.csv, tokenizer: t, model: m.json, runs_dir: runs}"
    )
    values = combine({}, read_config(find_config("~/own.yaml")), {})
    found = [values[name] for name in ("dataset", "validation_file", "tokenizer", "model")]
    assert found == [str(home / name) for name in ("a.csv", "b.csv", "t", "m.json")]
    assert [values[name] for name in ("test_file", "runs_dir")] == ["c.csv", "runs"]
    model = "configs/models/vit-small.json"
    assert read("--model", model)["model"] == str(CONFIGS.parent / model)


NEEDING = [name for name in NAMES if FACTS[name].needs]
PACKAGE = SRC / "fabric_ladder"
VALUES = {int: 3, float: 0.25, bool: True, str: "x"}


@pytest.mark.parametrize("name", NEEDING)
def test_a_setting_without_effect_is_refused_wherever_it_is_set(name):
    """The exception is a YAML file for several rungs, if the setting's name begins with its technique."""
    need, _, wanted = FACTS[name].needs.partition("=")
    without = {"optimizer": "sgd"} if is_met(FACTS[name].needs, vars(Settings())) else {}
    assert not is_met(FACTS[name].needs, vars(Settings()) | without)
    words = [word for other, text in without.items() for word in (f"--{other}", text)]
    kinds, choices = kinds_of(name)
    value = next((VALUES[kind] for kind in kinds if kind in VALUES), choices[-1] if choices else None)
    value = "0.5,0.5" if FACTS[name].numbers else value
    assert value != DEFAULTS[name].default
    line = refusal(f"--{name}={value}", *words)
    if need == "strategy":
        assert re.fullmatch(rf"--{name} has no effect in this script: leave it out, or run src/1\d_\w+\.py", line)
        assert read(f"--{name}={value}", script={"strategy": wanted})[name] == value
    else:
        example = "true" if bool in kinds_of(need)[0] else "N"
        assert line == f"--{name} has no effect without --{need} {wanted or example}: add that, or leave --{name} out"
        option = f"--{need} {wanted.split('|')[0] or example.replace('N', '5')}"
        assert read(f"--{name}={value}", *option.split())[name] == value
    if name.startswith(("lora_", "sgd_")):
        assert read(text=f"{name}: {value}")[name] == value
        assert read(script={name: value})[name] == value
    else:
        text = "".join(f"{other}: {word}\n" for other, word in without.items()) + f"{name}: {value}"
        assert line[:40] == refusal(text=text)[:40] == refusal(script={name: value} | without)[:40]


def settings_read():
    """Return the names of settings that the package reads, apart from the module that parses them.

    These are `settings.NAME`, the switches of techniques, and names that are made from a split.
    """
    found = set()
    for path in {*PACKAGE.rglob("*.py")} - {PACKAGE / "options.py"}:
        text = path.read_text(encoding="utf-8")
        attributes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)]
        found |= {node.attr for node in attributes if ast.unparse(node.value).endswith("settings")}
        if "{split}_samples" in text:
            found |= {f"{split}_samples" for split in SPLITS}
    return found | {row.setting for row in LADDER}


def test_every_setting_is_read_by_the_code_that_it_is_for():
    assert not {*NAMES} - settings_read()


@pytest.mark.parametrize("name", [name for name in NAMES if FACTS[name].replaced_by])
def test_a_setting_whose_place_another_takes_is_refused(name):
    for other in FACTS[name].replaced_by.split():
        needs = [f"--{need.replace('=', ' ')}" for need in (FACTS[name].needs, FACTS[other].needs) if need]
        words = " ".join(["--batch_size 8", *needs, f"--{name} 5"]).split()
        line = refusal(*words, f"--{other}", "6")
        assert line.endswith(f" has no effect next to --{other} 6: leave one of them out"), line
        assert read(*words)[name] == 5
        line = refusal(*words, text=f"{other}: 6")
        assert line.endswith(f" has no effect next to --{other} 6: leave it out, or add --{other} null"), line
        assert read(*words, f"--{other}", "null", text=f"{other}: 6")[name] == 5


def test_a_technique_whose_need_the_user_switches_off_is_refused():
    line = refusal("--activation_checkpointing", "false", script=script_defaults("20_activation_offload"))
    assert line.endswith("without --activation_checkpointing true: add that, or use --activation_offload false")


def test_options_for_several_rungs_reach_those_that_use_them():
    words = ["--lora_rank", "16", "--seed=3"]
    assert drop_unneeded(words, script_defaults("13_lora")) == words
    assert drop_unneeded(words, script_defaults("2_grad_accum")) == ["--seed=3"]
    assert drop_unneeded([*words, "--lora"], script_defaults("2_grad_accum")) == [*words, "--lora"]
    assert drop_unneeded(["--adam_beta1", "0.8"], script_defaults("26_stateless")) == []
    assert without_options(["--lora", "--seed", "3", "--keep=2"], ["seed"]) == ["--lora", "--keep=2"]


@pytest.mark.parametrize(("rung", "words"), [("12_deepspeed_zero", "--gradacum 2"), ("2_grad_accum", "--help all")])
def test_options_are_read_without_torch_and_lightning(tmp_path, rung, words):
    """The libraries take seconds to import. In this test they cannot be found."""
    hidden = without_package(tmp_path, "torch")
    process = run_script(SRC / f"{rung}.py", *words.split(), cwd=tmp_path, fresh=True, **hidden)
    assert process.returncode == (0 if words == "--help all" else 2), process.stderr
    assert ("--batch_size N" in process.stdout) == (words == "--help all")


def test_an_error_of_a_library_prints_one_line_with_a_hint_and_a_traceback_on_request(tmp_path):
    (tmp_path / "bad.yaml").write_text("seed: [1")
    for debug in ("", "1"):
        words = ("--config", "bad.yaml")
        process = run_script(SRC / "2_grad_accum.py", *words, cwd=tmp_path, fresh=True, FABRIC_LADDER_DEBUG=debug)
        assert process.returncode == 2
        line = process.stderr.splitlines()[-1]
        assert line.startswith("error: cannot read bad.yaml as YAML")
        assert ("yaml.parser.ParserError" in process.stderr) == (debug == "1")
        assert line.endswith("(FABRIC_LADDER_DEBUG=1 prints the traceback)") == (debug == "")


@pytest.mark.parametrize(
    ("script", "package"), [(SRC / "13_lora.py", "lightning"), (SCRIPTS / "plan_memory.py", "platformdirs")]
)
def test_a_missing_package_is_named_in_one_line(tmp_path, script, package):
    process = run_script(script, cwd=tmp_path, fresh=True, **without_package(tmp_path, package))
    assert (process.returncode, process.stdout) == (2, "")
    assert re.fullmatch(
        rf"error: \S*python\S* lacks the package {package}: pip install -r requirements\.txt, or .*/python\n",
        process.stderr,
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--gradient_accumulation_steps 0", "expected a whole number, at least 1"),
        ("--gradient_accumulation_steps 4 --micro_batch_tokens 512", "has no effect next to --micro_batch_tokens 512"),
        ("--per_device_train_batch_size 4 --micro_batch_size 2", "next to --micro_batch_size 2: leave one of them out"),
        ("--logging_steps 1 --log_every 8", "(1 steps x 16 samples), next to --log_every 8: leave one of them out"),
        ("--adam_beta1 0.7 --betas 0.8,0.9", "next to --betas 0.8,0.9: leave one of them out"),
    ],
)
def test_values_without_a_meaning_are_refused(words, message):
    with pytest.raises(UserError, match=re.escape(message)):
        parse_settings(words.split(), **script_defaults("2_grad_accum"))


def test_options_that_count_together_may_stand_in_different_places(tmp_path):
    (tmp_path / "own.yaml").write_text("gradient_accumulation_steps: 4\nadam_beta2: 0.9999999")
    words = "--config own.yaml --per_device_train_batch_size 8 --adam_beta1 0.8"
    settings = parse_settings(words.split(), **script_defaults("2_grad_accum"))
    assert (settings.batch_size, settings.micro_batch_size, settings.betas) == (32, 8, "0.8,0.9999999")


def test_a_misspelt_file_and_a_text_in_utf_16_get_the_remedy(tmp_path):
    (tmp_path / "tickets.csv").write_text("text,label\na,b\n", "utf-16")
    for name, line in (
        ("tikets.csv", f"did you mean {tmp_path}/tickets.csv?"),
        ("tickets.csv", "text in UTF-16: save it as UTF-8"),
    ):
        with pytest.raises(UserError, match=re.escape(line)):
            check_data(DataSettings(dataset=str(tmp_path / name), model=str(MODELS / "bloom-quickstart.json")))


def test_a_missing_run_is_no_name_on_the_hub(tmp_path, monkeypatch):
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="there is no folder runs/99"), reachable("runs/99", "model"):
        pass


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ("--dataset Tickets.CSV", r"no file or folder Tickets\.CSV here or in \S+; did you mean tickets\.csv\?"),
        ("--config config/imdb_minilm.yaml", r"no config file config/\S+; did you mean configs/imdb_minilm\.yaml\?"),
    ],
)
def test_missing_files_are_refused_before_torch_is_imported(tmp_path, options, line):
    (tmp_path / "tickets.csv").touch()
    hidden = without_package(tmp_path, "torch")
    process = run_script(SRC / "2_grad_accum.py", *options.split(), cwd=tmp_path, fresh=True, **hidden)
    assert (process.returncode, process.stdout) == (2, "")
    assert re.fullmatch(f"error: .*{line}.*\n", process.stderr)


@pytest.mark.parametrize(("shown", "piped"), [("stdout", "stderr"), ("stderr", "stdout")])
def test_a_terminal_gets_a_line_before_torch_is_imported(tmp_path, shown, piped):
    """Also if it shows only stderr, as in `python src/2_grad_accum.py | tee log.txt`."""
    terminal, output = os.openpty()
    environment = os.environ | without_package(tmp_path, "torch")
    command = [sys.executable, str(SRC / "2_grad_accum.py")]
    process = subprocess.run(command, **{shown: output, piped: subprocess.PIPE}, env=environment, check=False)
    first, *rest = os.read(terminal, 1000).decode().split("\r\n")
    assert first == "Loading PyTorch …"
    error = process.stderr.decode() if piped == "stderr" else rest[0]
    assert "lacks the package torch" in error


def test_a_file_may_hold_settings_of_adam_and_of_a_schedule_that_the_script_or_the_command_line_replaces():
    """The advice names rung 6 with the run's own file, whose betas have no effect on SGD."""
    text = "betas: 0.8,0.9\neps: 1e-6\nschedule: cosine\n"
    assert read(text=text, script={"optimizer": "sgd"})["betas"] == "0.8,0.9"
    assert read("--optimizer", "sgd", "--schedule", "constant", text=text)["betas"] == "0.8,0.9"
    assert "--betas has no effect without" in refusal("--betas", "0.8,0.9", script={"optimizer": "sgd"})
