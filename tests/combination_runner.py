"""Run one script many times in one process, each time with other settings: what `test_combinations.py` starts.

Arguments: the script, then a JSON list of lists of settings. Prints a JSON list: null where the run came through, else
the one line that refused it, or `BUG` and the error.
"""

import contextlib
import io
import json
import runpy
import sys
import tempfile
import warnings
from pathlib import Path

import torch.distributed as dist
from helpers import MODELS

from fabric_ladder.errors import explain

SMALL = "--train_samples 8 --validation_samples 4 --test_samples 4 --batch_size 4 --micro_batch_size 2".split()
MODEL = json.loads((MODELS / "llama-tiny.json").read_text()) | {"num_hidden_layers": 1}  # less to be compiled


def attempt(script: str, settings: list[str]) -> str | None:
    """Return what refused the run, or None."""
    with tempfile.TemporaryDirectory() as runs:
        model = Path(runs) / "model.json"
        model.write_text(json.dumps(MODEL))
        sys.argv = [script, *SMALL, "--model", str(model), "--max_length", "32", *settings, "--runs_dir", runs]
        stdout = io.StringIO()
        try:
            with contextlib.redirect_stdout(stdout):
                runpy.run_path(script, run_name="__main__")
        except Exception as error:
            return explain(error) or f"BUG {type(error).__name__}: {error}"
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
    return None if "Test accuracy" in stdout.getvalue() else "BUG no accuracy was printed"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    script, runs = sys.argv[1], json.loads(sys.argv[2])
    print(json.dumps([attempt(script, settings) for settings in runs]))
