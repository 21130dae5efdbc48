"""Run rungs one after another in one process, each with its own settings, for `test_combinations.py`.

Argument: a JSON list of pairs, each a script and its settings. Prints a JSON list: null for a finished run, otherwise
the line that refused it, or `BUG` and the error.
"""

import contextlib
import io
import json
import re
import runpy
import sys
import tempfile
import warnings
from pathlib import Path

import torch._dynamo.config as compiling
import torch.distributed as dist

sys.path.append(str(Path(__file__).parents[1]))
from fabric_ladder.options import script_defaults
from fabric_ladder.techniques.advice import explain
from support.helpers import MODELS

SMALL = "--train_samples 8 --validation_samples 4 --test_samples 4 --batch_size 4 --micro_batch_size 2".split()
MODEL = json.loads((MODELS / "llama-tiny.json").read_text()) | {"num_hidden_layers": 1}  # there is less to compile


def attempt(script: str, settings: list[str]) -> str | None:
    """Return the refusal of the run, or None."""
    with tempfile.TemporaryDirectory() as runs:
        model = Path(runs) / "model.json"
        model.write_text(json.dumps(MODEL))
        one_pass = "step_in_backward" in script_defaults(Path(script).stem)
        cut = not {"--micro_batch_tokens", "--step_in_backward"} & {*settings} and not one_pass
        small = SMALL if cut else SMALL[:-2]  # the other rungs set their own micro-batch
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
    return None if re.search("^Test (accuracy|MSE)", stdout.getvalue(), re.MULTILINE) else "BUG no result was printed"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    # every precision and every kind of module needs a new graph
    compiling.recompile_limit = compiling.accumulated_recompile_limit = 10_000
    compiling.fail_on_recompile_limit_hit = True
    print(json.dumps([attempt(script, settings) for script, settings in json.loads(sys.argv[1])]))
