"""Runs of rungs on one or several processes. Each run is made once for all files of this folder."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from support.devices import ONE_THREAD, SIZES
from support.helpers import SRC, finished, free_port, run_script


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """Run a rung once for each set of arguments; return the folder of the run and its stdout."""
    done = {}

    def run(name, devices, *more):
        key = (name, devices, *more)
        if key not in done:
            cwd = tmp_path_factory.mktemp(f"{name}-{devices}")
            arguments = [*SIZES, *(("--devices", devices) if devices > 1 else ()), *more]
            ranks = [ONE_THREAD]
            if devices > 1 and name != "9_ddp":  # Lightning's launcher starts the other ranks fresh
                common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": devices, "NODE_RANK": 0}
                ranks = [ONE_THREAD | common | {"LOCAL_RANK": rank} for rank in range(devices)]
            with ThreadPoolExecutor(len(ranks)) as pool:
                started = [pool.submit(run_script, SRC / f"{name}.py", *arguments, cwd=cwd, **rank) for rank in ranks]
                stdout, *others = [finished(process.result()) for process in started]
            assert not any(others), "only rank 0 prints"
            done[key] = cwd / "runs" / name / "1", stdout
        return done[key]

    return run
