"""The kind of labels that the settings choose."""

from collections.abc import Sequence

from fabric_ladder.data.label_kind import LabelKind
from fabric_ladder.data.multi_label import MultiLabel
from fabric_ladder.data.regression import Regression
from fabric_ladder.data.word_labels import WordLabels
from fabric_ladder.errors import UserError
from fabric_ladder.settings import DataSettings

KINDS: dict[str, type[LabelKind]] = {"multi_label_classification": MultiLabel, "regression": Regression}


def kind_of(settings: DataSettings, names: Sequence[str] = ()) -> LabelKind | None:
    """Return the kind of labels, with the names of the model's outputs if known; None: one class, or the next token."""
    kind = WordLabels if settings.task == "token-classification" else KINDS.get(settings.problem_type)
    return kind(names) if kind else None


def check_kind(settings: DataSettings) -> None:
    """Refuse a kind of labels that the task or the data set does not have."""
    if settings.problem_type in KINDS and settings.task != "text-classification":
        raise UserError(f"--problem_type {settings.problem_type}: only for --task text-classification; leave it out")
