"""Refuse a checkpoint to start from whose weights would get another meaning: other classes, another tokenizer."""

from pathlib import Path

from torch import nn

from fabric_ladder.data.loaders import Collator, TextCollator
from fabric_ladder.data.tokens import load_tokenizer
from fabric_ladder.errors import UserError, read_outside, refused
from fabric_ladder.models.heads import match_names, show_names


@refused("--load: cannot compare the checkpoint with this run")
def check_meaning(folder: Path, inner: nn.Module, data: Collator) -> str | None:
    """Compare a sharded checkpoint's description with a model and its training data; return a line about other names.

    Raises:
        UserError: The checkpoint has another architecture or task, other tokens, or the classes in another order.
    """
    option = f"--load {folder}"
    if not (folder / "config.json").is_file():  # `state` in a checkpoint of `save_every`
        return f"{option} has no config.json: its classes and its tokenizer are not compared with this run's"
    saved = read_outside(folder / "config.json")
    model = inner.get_base_model() if hasattr(inner, "peft_config") else inner
    (before,), own = saved["architectures"], type(model).__name__.removeprefix("FSDP")
    if before != own:
        raise UserError(f"{option}: made with another model or optimizer, or damaged ({before}, not {own})")
    if isinstance(data, TextCollator):
        tokens = data.tokenizer.get_vocab()
        if any(tokens.get(token) != number for token, number in load_tokenizer(str(folder)).get_vocab().items()):
            raise UserError(f"{option}: trained with another tokenizer; use its own: --tokenizer {folder}")
    if not (names := data.class_names):
        return None
    if (before := saved.get("problem_type")) and before != model.config.problem_type:
        raise UserError(f"{option}: trained with --problem_type {before}, not {model.config.problem_type}")
    before = [*saved["id2label"].values()]
    order, line = match_names(before, names)
    if order != sorted(order) or len(before) != len(names):
        raise UserError(
            f"{option}: the classes of its head are {show_names(before)}, those of the data {show_names(names)}; start "
            f"from its weights: python scripts/export_model.py {folder}, then --model, which follows the names"
        )
    return line
