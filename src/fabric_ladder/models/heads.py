"""The classes of a pretrained head, whose names may differ from the data's, or be in another order."""

import re
from collections.abc import Sequence

from torch import nn

from fabric_ladder.models.layers import head_names


def match_names(before: Sequence[str], names: Sequence[str]) -> tuple[list[int], str | None]:
    """Return the rows of a trained head in the order of the data's classes, by their names in any case.

    Args:
        before: Class names of the head's rows.
        names: Class names of the data, as many.

    Returns:
        Row numbers, in the head's order if the names are others, and a line about other names; None if the names are
        the same or unknown (`LABEL_0`, …).
    """
    rows = [name.lower() for name in before]
    wanted = [name.lower() for name in names]
    order = [*range(len(rows))]
    if wanted == rows or len(rows) == 1 or all(re.fullmatch(r"label_\d+", row) for row in rows):
        return order, None
    if sorted(rows) != sorted(wanted) or len({*rows}) < len(rows):
        return order, (
            f"The pretrained head has the classes {show_names(before)} and starts as {show_names(names)}, in this order"
        )
    return [rows.index(name) for name in wanted], None


def show_names(names: Sequence[str]) -> str:
    """Return the first three of the names, for a line."""
    return ", ".join([*names[:3], "…"][: len(names)])


def follow_names(model: nn.Module, before: Sequence[str], names: Sequence[str]) -> str | None:
    """Put the rows of a pretrained head in the order of the data's classes, and return the line of `match_names`."""
    order, line = match_names(before, names)
    for head in head_names(model) if order != sorted(order) else ():
        layers = [each for each in model.get_submodule(head).modules() if isinstance(each, nn.Linear)]
        for parameter in layers[-1].parameters() if layers and layers[-1].out_features == len(order) else ():
            parameter.data = parameter.data[order]
    return line
