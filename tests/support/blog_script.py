"""The lines of the blog's scripts that use `local_dataset_utilities`, and a summary of the resulting data.

python blog_script.py TOKENIZER, with the module in the same folder and nothing else of this project.
"""

import os
import os.path as op
import sys

from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

from local_dataset_utilities import IMDBDataset, download_dataset, load_dataset_into_to_dataframe, partition_dataset


def tokenize_text(batch):
    return tokenizer(batch["text"], truncation=True, padding=True, max_length=64)


if __name__ == "__main__":
    ##########################
    ### 1 Loading the Dataset
    ##########################
    download_dataset()
    df = load_dataset_into_to_dataframe()
    if not (op.exists("train.csv") and op.exists("val.csv") and op.exists("test.csv")):
        partition_dataset(df)

    imdb_dataset = load_dataset("csv", data_files={"train": "train.csv", "validation": "val.csv", "test": "test.csv"})

    #########################################
    ### 2 Tokenization and Numericalization
    #########################################

    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], max_length=1024)
    imdb_tokenized = imdb_dataset.map(tokenize_text, batched=True, batch_size=None)
    del imdb_dataset
    imdb_tokenized.set_format("torch", columns=["input_ids", "attention_mask", "label"])
    os.environ["TOKENIZERS_PARALLELISM"] = "false"

    #########################################
    ### 3 Set Up DataLoaders
    #########################################

    train_dataset = IMDBDataset(imdb_tokenized, partition_key="train")
    val_dataset = IMDBDataset(imdb_tokenized, partition_key="validation")
    test_dataset = IMDBDataset(imdb_tokenized, partition_key="test")

    train_loader = DataLoader(dataset=train_dataset, batch_size=12, shuffle=True, num_workers=1, drop_last=True)

    print(len(df), len(train_dataset), len(val_dataset), len(test_dataset), len(train_loader))
    for name, column in sorted(next(iter(train_loader)).items()):
        print(name, tuple(column.shape), column.dtype)
