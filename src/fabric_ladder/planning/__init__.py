"""The memory of a run before it is run: rehearsed on fake tensors, by formula, and searched for what fits."""
