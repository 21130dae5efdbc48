"""Data sets of all kinds, from where they lie to micro-batches of tensors."""

from fabric_ladder.data.load import prepare

__all__ = ["prepare"]
