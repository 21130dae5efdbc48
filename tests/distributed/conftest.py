"""Runs of rungs on one or several processes. Each run is made once for all files of this folder."""

import pytest
from support.devices import ONE_THREAD, SIZES
from support.helpers import SRC, finished, run_script


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """Run a rung once for each set of arguments; return the folder of the run and its stdout."""
    done = {}

    def run(name, devices, *more):
        key = (name, devices, *more)
        if key not in done:
            cwd = tmp_path_factory.mktemp(f"{name}-{devices}")
            arguments = [*SIZES, *(("--devices", devices) if devices > 1 else ()), *more]
            stdout = finished(run_script(SRC / f"{name}.py", *arguments, cwd=cwd, **ONE_THREAD))
            done[key] = cwd / "runs" / name / "1", stdout
        return done[key]

    return run
