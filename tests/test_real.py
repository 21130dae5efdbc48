"""Real pretrained weights, real reviews, offline."""

import json
import re

from helpers import SRC, finished, run_script

FEW = "--train_samples 400 --validation_samples 100 --test_samples 200 --max_length 128 --log_every 80".split()


def test_minilm_learns_from_real_reviews(tmp_path, archive, minilm):
    """The README's command, cut short: 25 optimizer steps already beat chance (50 +- 3.5 % on 200 reviews)."""
    options = ["--config", "imdb_minilm.yaml", "--model", minilm, *FEW]
    options += ["--learning_rate", "2e-4", "--micro_batch_tokens", "1024", "--data_dir", archive.parent]
    stdout = finished(run_script(SRC / "2_grad_accum.py", *options, cwd=tmp_path, timeout=600))
    assert "Parameters: 22.7 M, 22.7 M trainable, torch.float32" in stdout
    record = json.loads((tmp_path / "runs/2_grad_accum/1/run.json").read_text())
    assert record["results"]["test_accuracy"] > 0.62
    losses = [float(loss) for loss in re.findall(r"Loss: ([\d.]+)", stdout)]
    assert losses[-1] < losses[0]
    assert record["results"]["padding"] < 0.1, "sorted by length inside the effective batch"
