"""Run rungs in turn in one process, each with settings of its own: what `test_combinations.py` starts.

Argument: a JSON list of pairs, of a script and its settings. Prints a JSON list: null where the run came through, else
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

import torch._dynamo.config as compiling
import torch.distributed as dist

sys.path.append(str(Path(__file__).parents[1]))
from fabric_ladder.techniques.advice import explain
from support.helpers import MODELS

SMALL = "--train_samples 8 --validation_samples 4 --test_samples 4 --batch_size 4 --micro_batch_size 2".split()
MODEL = json.loads((MODELS / "llama-tiny.json").read_text()) | {"num_hidden_layers": 1}  # less to be compiled


def attempt(script: str, settings: list[str]) -> str | None:
    """Return what refused the run, or None."""
    with tempfile.TemporaryDirectory() as runs:
        model = Path(runs) / "model.json"
        model.write_text(json.dumps(MODEL))
        cut = not {"--pack_rows", "--step_in_backward"} & {*settings} and not Path(script).stem.startswith("17_")
        small = SMALL if cut else SMALL[:-2]  # the others say themselves how much is in memory at once
        sys.argv = [script, *small, "--model", str(model), "--max_length", "32", *settings, "--runs_dir", runs]
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
    # a model of another precision or with other modules is compiled anew, however many there have been
    compiling.recompile_limit = compiling.accumulated_recompile_limit = 10_000
    compiling.fail_on_recompile_limit_hit = True
    print(json.dumps([attempt(script, settings) for script, settings in json.loads(sys.argv[1])]))
