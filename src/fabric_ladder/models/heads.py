"""The classes of a pretrained head, whose names may differ from the data's, or be in another order."""

import re
from collections.abc import Sequence

from torch import nn

from fabric_ladder.models.layers import head_names


def follow_names(model: nn.Module, before: Sequence[str], names: Sequence[str]) -> str | None:
    """Put the rows of a pretrained head in the order of the data's classes, by their names in any case.

    Args:
        model: A classifier with a pretrained head.
        before: Class names of the head's rows.
        names: Class names of the data, as many.

    Returns:
        A line about other names, or None if the names are the same or unknown (`LABEL_0`, …).
    """
    rows = [name.lower() for name in before]
    wanted = [name.lower() for name in names]
    if wanted == rows or len(rows) == 1 or all(re.fullmatch(r"label_\d+", row) for row in rows):
        return None
    if sorted(rows) != sorted(wanted) or len({*rows}) < len(rows):
        shown = [", ".join([*each[:3], "…"][: len(each)]) for each in (before, names)]
        return f"The pretrained head has the classes {shown[0]} and starts as {shown[1]}, in this order"
    order = [rows.index(name) for name in wanted]
    for head in head_names(model):
        layers = [each for each in model.get_submodule(head).modules() if isinstance(each, nn.Linear)]
        for parameter in layers[-1].parameters() if layers and layers[-1].out_features == len(rows) else ():
            parameter.data = parameter.data[order]
    return None
