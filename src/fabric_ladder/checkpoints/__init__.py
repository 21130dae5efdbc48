"""Checkpoints: crash-safe folders, sharded state, going on with a run, and export."""
