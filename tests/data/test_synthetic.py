"""The synthetic reviews depend only on the seed and are balanced. Some of their labels are wrong."""

import re

import numpy as np
from support.data_files import BLOOM, SPLITS, load_in, rows_of, texts_of

from fabric_ladder.data.synthetic import synthetic_reviews


def test_synthetic_reviews_depend_on_the_seed_alone_are_balanced_and_spread_like_imdbs():
    assert synthetic_reviews(50, 3) == synthetic_reviews(50, 3)
    assert synthetic_reviews(50, 3)[0] != synthetic_reviews(50, 4)[0]
    texts, labels = synthetic_reviews(5000, 1)
    assert 0.47 < np.mean(labels) < 0.53
    assert len(set(texts)) > 4950
    assert all(re.match(r"[A-Z].*[.!?\w]$", text, re.DOTALL) for text in texts)
    assert not [text for text in texts if "{" in text or "|" in text or "  " in text]
    words = np.array([len(text.split()) for text in texts])
    assert words.min() > 2
    assert 0.5 < np.log(words).std() < 0.8
    assert words.max() > 5 * np.median(words)


def test_the_splits_share_no_text_and_more_texts_of_one_do_not_change_the_others(tmp_path):
    sizes = {"model": BLOOM, "train_samples": 200, "test_samples": 100}
    few, more = (load_in(tmp_path, "synthetic", validation_samples=size, **sizes) for size in (500, 501))
    train, validation, test = (set(rows_of(few, split)) for split in SPLITS)
    assert min(map(len, (train, validation, test))) > 90
    assert not train & validation | train & test | validation & test
    assert sorted(texts_of(few, "test")) == sorted(texts_of(more, "test"))
