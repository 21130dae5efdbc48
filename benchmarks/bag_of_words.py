"""Compare rung 2's small BLOOM with bags of words on the quickstart's reviews.

    python benchmarks/bag_of_words.py [--seeds 3]

Both learn from the same 4,000 synthetic reviews and are tested on the same 1,000. The bag of words takes the better of
its regularisations on the test itself, which favours it. Each seed draws its own reviews and weights.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from common import RESULTS, ROOT, environment, run_rung, write_result
from sklearn.feature_extraction.text import CountVectorizer, TfidfVectorizer
from sklearn.linear_model import LogisticRegression

from fabric_ladder.data.sources import Source
from fabric_ladder.data.tables import read_splits
from fabric_ladder.settings import DataSettings

QUICKSTART = ["--config", str(ROOT / "configs" / "quickstart.yaml"), "--validation_samples", "500"]


def bag_of_words(seed: int) -> dict[str, float]:
    """Return the test accuracy of a logistic regression on word counts and on tf-idf."""
    settings = DataSettings(dataset="synthetic", split_seed=seed)
    with tempfile.TemporaryDirectory() as scratch:
        splits, *_ = read_splits(settings, Source(["synthetic"]), Path(scratch))
    train, test = splits["train"], splits["test"]
    found = {}
    for name, vectorizer in (("counts", CountVectorizer()), ("tf-idf", TfidfVectorizer())):
        features = vectorizer.fit_transform(train["text"][:])
        tested = vectorizer.transform(test["text"][:])
        models = [LogisticRegression(C=c, max_iter=2000).fit(features, train["label"][:]) for c in (0.1, 1.0)]
        found[name] = max(model.score(tested, test["label"][:]) for model in models)
    return found


def main() -> None:
    """Measure, print, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="draws of reviews and weights (default: %(default)s)")
    args = parser.parse_args()
    rows = []
    for seed in range(1, args.seeds + 1):
        options = [*QUICKSTART, "--split_seed", str(seed), "--seed", str(122 + seed)]
        rows.append({**bag_of_words(seed), "rung 2": run_rung("2_grad_accum", options)["test_accuracy"]})
        print(f"seed {seed}", *(f"{name} {value:.3f}" for name, value in rows[-1].items()), sep=" · ")
    write_result(RESULTS / "bag_of_words.json", "synthetic", environment(torch.device("cpu")) | {"rows": rows})


if __name__ == "__main__":
    main()
