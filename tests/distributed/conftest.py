"""Runs of rungs on one or several processes. Each run is made once for all files of this folder."""

import pytest
from support.devices import SIZES, run_ranks
from support.helpers import SRC, finished


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """Run a rung once for each set of arguments; return the folder of the run and its stdout."""
    done = {}

    def run(name, devices, *more):
        key = (name, devices, *more)
        if key not in done:
            cwd = tmp_path_factory.mktemp(f"{name}-{devices}")
            processes = run_ranks(SRC / f"{name}.py", devices, *SIZES, *more, cwd=cwd)
            stdout, *others = map(finished, processes)
            assert not any(others), "only rank 0 prints"
            done[key] = cwd / "runs" / name / "1", stdout
        return done[key]

    return run
