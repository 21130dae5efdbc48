"""Predict the memory of a run on fake tensors and by formulas, and find the rungs that fit a GPU."""
