"""Data sets of all kinds, from files to micro-batches of tensors."""
