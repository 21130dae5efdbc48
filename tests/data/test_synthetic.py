"""The synthetic reviews depend only on the seed and are balanced. Some of their labels are wrong."""

import re

import numpy as np
from support.data_files import SPLITS

from fabric_ladder.data.reviews import read_reviews
from fabric_ladder.data.synthetic import synthetic_reviews
from fabric_ladder.settings import DataSettings


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
    settings = (DataSettings(dataset="synthetic", validation_samples=size) for size in (500, 501))
    few, more = (read_reviews(each, tmp_path) for each in settings)
    train, validation, test = ({*few[split]["text"]} for split in SPLITS)
    assert not train & validation | train & test | validation & test
    assert len(more["validation"]) == 501
    assert few["test"]["text"][:] == more["test"]["text"][:]
