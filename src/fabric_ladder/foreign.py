"""Options by the names that other libraries give them, turned into this project's own.

The names and values are facts of the settings (`aliases` and `words`). The meaning of `DEPENDENT` options depends on
other settings, so these stay on the command line until `cli.py` knows the settings.
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from fabric_ladder.errors import UserError
from fabric_ladder.settings import FACTS, kinds_of

LAUNCHERS_OPTION = "local_rank"  # of DeepSpeed's launcher, which sets the environment variable too
INSTEAD = ("print_config", "check_only")  # switches: do this instead of training
OWN_OPTIONS = ("config", *INSTEAD, "help")  # options that are not settings
TRUE = ("true", "yes", "on")
FALSE = ("false", "no", "off")


class Dependent(NamedTuple):
    """An option whose meaning depends on other settings: its type, its other names, and the settings that it means."""

    kind: type
    aliases: str
    means: tuple[str, ...]


BATCH = ("batch_size", "micro_batch_size")
DEPENDENT = {
    "per_device_train_batch_size": Dependent(int, "per_device_batch_size", BATCH),
    "gradient_accumulation_steps": Dependent(
        int, "accumulate_grad_batches grad_accum grad_accum_steps gradient_accumulation", BATCH
    ),
    "logging_steps": Dependent(int, "log_every_n_steps log_interval", ("log_every",)),
    "adam_beta1": Dependent(float, "beta1", ("betas",)),
    "adam_beta2": Dependent(float, "beta2", ("betas",)),
}
ALIASES = {
    alias: (name, value)
    for name, fact in FACTS.items()
    for value, aliases in fact.aliases.items()
    for alias in aliases.split()
} | {alias: (name, "{}") for name, option in DEPENDENT.items() for alias in option.aliases.split()}
WORDS = {
    name: {word: value for value, words in fact.words.items() for word in words.split()}
    for name, fact in FACTS.items()
    if fact.words
}


def split_words(words: list[str]) -> Iterator[tuple[str, str | None]]:
    """Yield the name and the value of each option of a command line; None without a value.

    Raises:
        UserError: A word is neither an option nor a value.
    """
    left = ["--help" if word == "-h" else word for word in words]
    while left:
        word = left.pop(0)
        if not word.startswith("--"):
            raise UserError(f"unexpected {word!r}: write --NAME VALUE, for example --batch_size 16 (see --help)")
        name, equals, text = word.removeprefix("--").partition("=")
        if not equals and left and not left[0].startswith("--"):
            equals, text = "=", left.pop(0)
        yield name, text if equals else None


def to_own_words(words: list[str]) -> tuple[list[str], list[str]]:
    """Return a command line in this project's own names and values, and how each other option was read.

    Unknown options stay as they are.

    Raises:
        UserError: A word is neither an option nor a value, an option lacks its value, or two options set the same
            setting to two values.
    """
    own: dict[str, tuple[str | None, str]] = {}  # for each setting its value, and the option that gave it
    lines, changed = [], False
    for name, text in split_words(words):
        written = shown(name, text)
        setting, value = _translate(name, text)
        if (setting, value) != (name, text):
            changed = True
            if name.replace("-", "_") != LAUNCHERS_OPTION:
                lines.append(f"{written} as {shown(setting, value) if setting else 'nothing to change'}")
        if not setting:
            continue
        before, by = own.get(setting, (value, written))
        if before != value and not written.split()[0] == by.split()[0] == f"--{setting}":  # of its own name the last
            raise UserError(f"{by} and {written} both set --{setting}: leave one of them out")
        own[setting] = value, written
    if not changed:
        return words, []
    return [word for name, (value, _) in own.items() for word in as_words(name, value)], lines


def as_words(name: str, value: str | None) -> list[str]:
    """Return an option as words of a command line."""
    if value is None:
        return [f"--{name}"]
    return [f"--{name}={value}"] if not value or value.startswith("--") else [f"--{name}", value]


def shown(name: str, value: str | None) -> str:
    """Return an option as one text for messages."""
    return " ".join(as_words(name, value))


def _translate(name: str, text: str | None) -> tuple[str | None, str | None]:
    """Return the own name and value of an option; no name for a switch of others that is off."""
    key = name if name in FACTS else name.replace("-", "_").lower()
    setting, value = ALIASES.get(key, (key, "{}"))
    if key == LAUNCHERS_OPTION:
        return None, None
    if setting not in (*FACTS, *DEPENDENT):
        return name, text
    if "{}" not in value:  # a switch, or a number as in `--early_stopping 5`
        if text is None or text.lower() not in (*FALSE, "none", "null", "0"):
            return setting, text if _counts(setting) and (text or "").isdecimal() and text != "1" else value
        return (setting, "false") if value == "true" else (None, None)
    words = WORDS.get(setting, {})
    if text is None and "true" in words:
        return setting, words["true"]
    if text is None:
        return setting, None
    if key != name or key in ALIASES:  # transformers writes whole numbers as 3.0
        text = re.sub(r"^(\d+)\.0+$", r"\1", text) if _counts(setting) else text
    return setting, words.get(text.lower()) or value.replace("{}", text)


def _counts(setting: str) -> bool:
    return int in (kinds_of(setting)[0] if setting in FACTS else (DEPENDENT[setting].kind,))


def read_dependent(
    options: Mapping[str, float],
    values: Mapping[str, object],
    named: Mapping[str, object],
    ranks: int,
) -> tuple[dict[str, object], list[str]]:
    """Return the settings that these options mean, and how each option was read.

    Args:
        options: Values of the options by name.
        values: All settings of the run without these options.
        named: The settings that stand beside the options, on the command line or in the same file.
        ranks: Devices of the run.

    Raises:
        UserError: The options contradict a setting beside them.
    """
    found: dict[str, object] = {}
    lines = []
    if any(DEPENDENT[name].means == BATCH for name in options):
        found, line = _batch(options, values, named, ranks)
        lines.append(line)
    if steps := options.get("logging_steps"):
        batch = found.get("batch_size", values["batch_size"])
        found["log_every"] = steps * batch
        lines.append(f"--logging_steps {steps} as --log_every {steps * batch} ({steps} steps x {batch} samples)")
    betas = {"adam_beta1": 0, "adam_beta2": 1}
    if betas.keys() & options.keys():
        both = values["betas"].split(",")
        for name, place in betas.items():
            both[place] = str(options[name]) if name in options else both[place]
        found["betas"] = ",".join(both)
        given = " ".join(f"--{name} {options[name]}" for name in betas if name in options)
        lines.append(f"{given} as --betas {found['betas']}")
    for name, value in found.items():
        if named.get(name, value) != value:
            raise UserError(f"{', '.join(lines)}, next to --{name} {named[name]}: leave one of them out")
    return found, lines


def _batch(
    options: Mapping[str, float], values: Mapping[str, object], named: Mapping[str, object], ranks: int
) -> tuple[dict[str, object], str]:
    """Return the effective batch and the micro-batch of options that count samples per device and accumulated steps."""
    steps = options.get("gradient_accumulation_steps")
    size = options.get("per_device_train_batch_size", named.get("micro_batch_size"))
    batch = named.get("batch_size")
    given = " ".join(f"--{name} {value}" for name, value in options.items() if DEPENDENT[name].means == BATCH)
    devices = f"{ranks} device{'s' * (ranks > 1)}"
    if size is None:  # the effective batch of the script is shared out
        batch = batch or values["batch_size"]
        size = math.ceil(batch / ranks / steps)
        counted = f"{batch} samples / {devices} / {steps} micro-batches"
    elif steps is None and batch is not None:
        return {"micro_batch_size": size}, f"{given} as --micro_batch_size {size} of --batch_size {batch}"
    else:
        product = size * (steps or 1) * ranks
        counted = f"{size} samples x {steps or 1} micro-batches x {devices}"
        if batch not in (None, product):
            raise UserError(
                f"{given}: {counted} are {product}, not --batch_size {batch}: leave that out, or change one of them"
            )
        batch = product
    return {"batch_size": batch, "micro_batch_size": size}, (
        f"{given} as --batch_size {batch} --micro_batch_size {size} ({counted})"
    )
