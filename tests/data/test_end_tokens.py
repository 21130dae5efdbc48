"""The heads of BART and T5 need one end token in each text; all other heads take any number."""

import csv

import pytest
from support.helpers import settings_for
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BartConfig, BertConfig, PreTrainedTokenizerFast, T5Config

from fabric_ladder import UserError
from fabric_ladder.data.load import load_datasets

SIZES = {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}


@pytest.fixture
def settings(tmp_path):
    """Return a function that makes settings for a table whose second text has an end token within."""
    words = {word: number for number, word in enumerate(["<pad>", "<unk>", "</s>", "good", "bad"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", eos_token="</s>")
    fast.save_pretrained(tmp_path / "tokenizer")
    rows = [("good good", "pos"), ("bad </s> bad", "neg"), *[("bad good", "neg"), ("good", "pos")] * 10]
    with open(tmp_path / "train.csv", "w", newline="") as file:
        csv.writer(file).writerows([("text", "label"), *rows])

    def make(config, **values):
        config.to_json_file(tmp_path / "config.json")
        values = {"tokenizer": str(tmp_path / "tokenizer")} | values
        files = {"dataset": str(tmp_path / "train.csv"), "model": str(tmp_path / "config.json"), "from_scratch": True}
        return settings_for(tmp_path, cache_dir=str(tmp_path / "cache"), **files, **values)

    return make


def test_a_text_with_an_end_token_within_is_named(settings):
    config = BartConfig(eos_token_id=2, **SIZES)
    with pytest.raises(UserError, match=r"train.csv, row 2: 2 end tokens </s>.* --bad_samples skip"):
        load_datasets(settings(config))
    splits = load_datasets(settings(config, bad_samples="skip")).splits
    assert sum(map(len, splits.values())) == 21
    assert all(row.count(2) == 1 for split in splits.values() for row in split["input_ids"])


def test_other_heads_keep_the_text(settings):
    splits = load_datasets(settings(BertConfig(eos_token_id=2))).splits
    assert sum(map(len, splits.values())) == 22


def test_a_trained_tokenizer_writes_no_end_token(settings):
    with pytest.raises(UserError, match="--tokenizer trained writes no end token"):
        load_datasets(settings(T5Config(), tokenizer="trained"))
