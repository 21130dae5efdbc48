"""Data sets of all kinds, from files to micro-batches of tensors."""

from fabric_ladder.data.load import prepare

__all__ = ["prepare"]
