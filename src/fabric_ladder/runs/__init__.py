"""The printed lines, measurements and records of a run."""
