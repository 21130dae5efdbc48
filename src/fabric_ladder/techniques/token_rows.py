"""Trained rows of single tokens next to adapters, by PEFT's trainable tokens.

PEFT keeps the rows as weights of their own, and writes them into a copy of the whole table in each pass. The backward
pass makes a gradient of the table's size. So the rows save the gradients and the optimizer's state of a table, and not
these two tensors. The prediction rehearses both.
"""

import numpy as np
import torch
from torch import nn

from fabric_ladder.data.load import tokenizer_name
from fabric_ladder.data.splits import TextDatasets
from fabric_ladder.data.tokens import split_tokens
from fabric_ladder.errors import UserError
from fabric_ladder.settings import Settings
from fabric_ladder.techniques.technique import Technique


@torch.no_grad()
def name_rows(model: nn.Module, datasets: TextDatasets, settings: Settings) -> str | None:
    """Name the rows to train in the attribute `trained_rows`, after adding those of new tokens; return a notice.

    A head with a table of its own trains its rows too: otherwise no new token would ever be predicted.

    Raises:
        UserError: The head has biases, which PEFT would leave out.
    """
    tokens = split_tokens(settings.train_tokens)
    if not tokens:
        return None
    head = model.get_output_embeddings()
    if getattr(head, "bias", None) is not None:
        raise UserError(
            f"--train_tokens {settings.train_tokens}: the head of {settings.model} has biases, which PEFT would leave "
            "out; choose another --model"
        )
    rows, new = map(datasets.tokenizer.convert_tokens_to_ids, (tokens, datasets.new_tokens))
    means = [table.weight.mean(0, dtype=torch.float32) for table in _tables(model) if new]
    if max(rows) >= model.get_input_embeddings().num_embeddings:
        model.resize_token_embeddings(max(rows) + 1, mean_resizing=False)
    for table, mean in zip(_tables(model), means, strict=False):
        table.weight[new] = mean.to(table.weight.dtype)
    modules = {module: name for name, module in model.named_modules()}
    model.trained_rows = {modules[table]: rows for table in _tables(model)}
    added = f"; new, and starting as the mean of all rows: {', '.join(datasets.new_tokens)}" if new else ""
    seen = np.full(len(rows), not datasets.splits)  # a rehearsal has no texts
    for batch in datasets.splits["train"].with_format("numpy").iter(1000) if datasets.splits else ():
        seen |= np.isin(rows, np.concatenate(batch["input_ids"]))
    names = ", ".join(token for token, found in zip(tokens, seen, strict=True) if not found)
    absent = f"; in no training text: {names}" if names else ""
    return f"Trained rows of the embedding: {len(rows)}{added}{absent}"


def check_rows(model: nn.Module) -> None:
    """Refuse a model that reads the rows past PEFT's layers.

    Raises:
        UserError: Another module has the embedding's table.
    """
    wrapped, others = {}, {}
    for name, module in model.named_modules(remove_duplicate=False):
        found = wrapped if name.endswith(".token_adapter.base_layer") else others
        found |= {id(parameter): name for parameter in module.parameters(recurse=False)}
    for table in wrapped.keys() & others.keys():
        name = others[table].removeprefix("base_model.model.")
        raise UserError(f"--train_tokens: {name} reads the embedding too, past PEFT's rows; choose another --model")


def _tables(model: nn.Module) -> list[nn.Module]:
    """Return the embedding, and a language model's head unless it has the same table."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    return [embedding] if head is None or head.weight is embedding.weight else [embedding, head]


class TokenRows(Technique):
    """The setting of the trained rows; `add_adapters` gives them to PEFT."""

    trains_all = False

    def reason_against(self, settings: Settings, capability: tuple[int, int] | None) -> str | None:
        if settings.task == "image-classification":
            return "images have no tokens; leave it out"
        split_tokens(settings.train_tokens)
        if tokenizer_name(settings) == "trained":
            return "a trained tokenizer learns its tokens from the texts; choose a --tokenizer"
        return None
