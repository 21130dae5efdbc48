"""Compare transformers with bags of words: on the quickstart's reviews, and on all of IMDb.

    python benchmarks/bag_of_words.py [--seeds 3]     the quickstart: rung 2's small BLOOM on the same reviews
    python benchmarks/bag_of_words.py --imdb          IMDb: whole reviews, for the table of docs/results.md

The bag of words takes the better of its regularisations on the test itself, which favours it. On the quickstart both
learn from 4,000 synthetic reviews and are tested on 1,000; each seed draws its own reviews and weights. On IMDb it
learns from the 35,000 reviews of the rungs' own split and is tested on their 10,000.
"""

import tempfile
from pathlib import Path

import common  # first import: it makes the project importable
import torch
from sklearn.feature_extraction.text import CountVectorizer, TfidfVectorizer
from sklearn.linear_model import LogisticRegression

from fabric_ladder.data.tables import read_splits
from fabric_ladder.data.text_sources import find_source
from fabric_ladder.settings import DataSettings

OUT = common.RESULTS / "bag_of_words.json"
QUICKSTART = "--config quickstart.yaml --validation_samples 500 --accelerator cpu".split()


def bag_of_words(settings: DataSettings) -> dict[str, float]:
    """Return the test accuracy of a logistic regression on word counts and on tf-idf."""
    with tempfile.TemporaryDirectory() as scratch:
        splits, *_ = read_splits(settings, find_source(settings), Path(scratch))
    train, test = splits["train"], splits["test"]
    found = {}
    for name, vectorizer in (("counts", CountVectorizer()), ("tf-idf", TfidfVectorizer())):
        features = vectorizer.fit_transform(train["text"][:])
        tested = vectorizer.transform(test["text"][:])
        models = [LogisticRegression(C=c, max_iter=2000).fit(features, train["label"][:]) for c in (0.1, 1.0)]
        found[name] = max(model.score(tested, test["label"][:]) for model in models)
    return found


def on_quickstart(seeds: int) -> list[dict[str, float]]:
    """Return the test accuracies of each seed on the quickstart's reviews."""
    rows = []
    for seed in range(1, seeds + 1):
        options = [*QUICKSTART, "--split_seed", str(seed), "--seed", str(122 + seed)]
        words = bag_of_words(DataSettings(dataset="synthetic", split_seed=seed))
        rows.append({**words, "rung 2": common.run_rung("2_grad_accum", options)["test_accuracy"]})
        print(f"seed {seed}", *(f"{name} {value:g}" for name, value in rows[-1].items()), sep=" · ")
    return rows


def main() -> None:
    """Measure, print, write the results."""
    parser = common.new_parser(__doc__)
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--seeds", type=int, default=3, help="draws of reviews and weights (default: %(default)s)")
    group.add_argument("--imdb", action="store_true", help="all of IMDb instead of the quickstart")
    args = parser.parse_args()
    common.check_storable(OUT)
    torch.set_num_threads(1)  # as the quickstart has
    if args.imdb:
        settings = DataSettings(dataset="imdb")
        part, found = "imdb", bag_of_words(settings)
        print(*(f"{name} {value:g}" for name, value in found.items()), sep=" · ")
    else:
        part, found = "synthetic", {"rows": on_quickstart(args.seeds)}
    common.write_result(OUT, part, found)


if __name__ == "__main__":
    main()
