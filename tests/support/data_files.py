"""Texts, images and instructions, written as files and loaded with a cache of the test's own."""

import json
import tarfile
import zipfile
from collections import Counter

import numpy as np
import pandas as pd
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from fabric_ladder.data.load import load_datasets
from fabric_ladder.settings import DataSettings
from support.helpers import MODELS

SPLITS = ("train", "validation", "test")
BLOOM, LLAMA, VIT = (str(MODELS / f"{name}.json") for name in ("bloom-quickstart", "llama-tiny", "vit-small"))
PETS = ("cat", "dog", "eel")
KINDS = ("trained", "wordpiece", "unigram")  # kinds of tokenizers
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ODD = [  # texts that a reader of tables may take for something else
    "None",
    "NA",
    "nan",
    "null",
    'with "quotes", commas; and\ttabs',
    "two\nlines",
    "café 很好 🎬",
    "  spaces  ",
    "1.50",
]


def load_in(folder, dataset, **values):
    """Load a data set from a folder, with the cache in the same folder."""
    folders = {"cache_dir": str(folder / "cache"), "data_dir": str(folder)}
    return load_datasets(DataSettings(dataset=str(dataset), **(folders | values)))


def files_of(folder):
    """Return the inode and the time of change of every file and folder."""
    return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in sorted(folder.rglob("*"))}


def cached(folder, name="tokenised"):
    """Return the folders in a cache."""
    return [path for path in (folder / "cache" / name).glob("*") if path.suffix != ".lock"]


def assert_mapped(datasets, folder):
    """Assert that all splits are mapped from files of the cache."""
    mapped = [file["filename"] for split in SPLITS for file in datasets.splits[split].cache_files]
    assert len(mapped) >= 3
    assert all(name.startswith(str(folder / "cache")) for name in mapped)


# Tables


def table(rows=60, start=0):
    """Return different texts with the labels 0 and 1."""
    texts = ODD[: max(0, len(ODD) - start)]
    texts += [f"review {start + index}: {'good' if index % 2 else 'bad'}" for index in range(rows - len(texts))]
    return pd.DataFrame({"text": texts, "label": [index % 2 for index in range(rows)]})


WRITERS = {
    "texts.csv": lambda frame, path: frame.to_csv(path, index=False),
    "texts.tsv": lambda frame, path: frame.to_csv(path, index=False, sep="\t"),
    "texts.json": lambda frame, path: frame.to_json(path, orient="records"),
    "texts.jsonl": lambda frame, path: frame.to_json(path, orient="records", lines=True),
    "texts.parquet": lambda frame, path: frame.to_parquet(path, index=False),
    "texts.csv.gz": lambda frame, path: frame.to_csv(path, index=False),
    "texts.tsv.gz": lambda frame, path: frame.to_csv(path, index=False, sep="\t"),
    "texts.jsonl.gz": lambda frame, path: frame.to_json(path, orient="records", lines=True),
    "byte_order_mark.csv": lambda frame, path: frame.to_csv(path, index=False, encoding="utf-8-sig"),
    "line_ends.csv": lambda frame, path: frame.to_csv(path, index=False, lineterminator="\r\n"),
    "indented.json": lambda frame, path: frame.to_json(path, orient="records", indent=2, force_ascii=False),
}


def write_table(frame, path):
    """Write a table in the format of the file name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    name = path.name if path.name in WRITERS else f"texts{''.join(path.suffixes).lower()}"
    WRITERS[name](frame, path)
    return path


def rows_of(datasets, split):
    return [tuple(row) for row in datasets.splits[split]["input_ids"][:]]


def texts_of(datasets, split):
    return [datasets.tokenizer.decode(row, clean_up_tokenization_spaces=False) for row in rows_of(datasets, split)]


# Images


def noise(number, size=(32, 32)):
    """Return random pixels (height, width, 3), different for each number."""
    return np.random.default_rng(number).integers(0, 256, (*size, 3), np.uint8)


def save_image(path, pixels, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    (pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)).save(path, **options)
    return path


def write_images(folder, counts, start=0, size=(32, 32)):
    """Write N PNGs into each class's folder; return the bytes of their pixels with their classes."""
    written = Counter()
    for label, count in counts.items():
        for _ in range(count):
            written[noise(start, size).tobytes(), label] += 1
            save_image(folder / label / f"{start}.png", noise(start, size))
            start += 1
    return written


def write_pets(folder, each=10):
    return write_images(folder, dict.fromkeys(PETS, each))


def stored(datasets, split):
    """Return the bytes of a split's pixels with their classes."""
    part = datasets.splits[split][:]
    return Counter(zip(part["image"], (datasets.class_names[label] for label in part["labels"]), strict=True))


def packed(folder, target, prefix=""):
    """Pack a folder's files in random order, because other programs do not sort them."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    np.random.default_rng(0).shuffle(files)
    names = {path: prefix + path.relative_to(folder.parent).as_posix() for path in files}
    if target.suffix == ".zip":
        with zipfile.ZipFile(target, "w") as archive:
            archive.mkdir("__MACOSX/train/cat")
            for path, name in names.items():
                archive.write(path, name)
                archive.writestr(f"__MACOSX/{name}", b"no image")
    else:
        with tarfile.open(target, "w" if target.suffix == ".tar" else "w:gz") as archive:
            for path, name in names.items():
                archive.add(path, name)
    return target


# Instructions and chats


def rows(count=40):
    """Return different instructions; every other instruction has an input."""
    return [
        {
            "instruction": f"Say in one word what number {index} {'really ' * (index % 7)}is.",
            "input": f"It is {'even' if index % 4 else 'round'}." if index % 2 else "",
            "output": " ".join(f"answer {index + word}" for word in range(1 + index % 5)),
        }
        for index in range(count)
    ]


def chats(count=30):
    """Return chats with one or two answers; every third chat begins with a system message."""
    made = []
    for index in range(count):
        messages = [{"role": "system", "content": "Be brief."}] if index % 3 == 0 else []
        for turn in range(1 + index % 2):
            messages.append({"role": "user", "content": f"Name {index + turn}."})
            messages.append({"role": "assistant", "content": f"It is {index + turn}, of course."})
        made.append({"messages": messages})
    return made


def write_rows(content, path):
    """Write rows in the format of the file name, or write a text unchanged."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, str):
        path.write_text(content, encoding="utf-8")
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in content), encoding="utf-8")
    elif path.suffix == ".json":
        path.write_text(json.dumps(content, indent=1), encoding="utf-8")
    elif path.suffix == ".csv":
        pd.DataFrame(content).to_csv(path, index=False)
    else:
        pd.DataFrame(content).to_parquet(path, index=False)
    return path


def load_instructions(folder, dataset, **values):
    """Load rows, or a file of a folder, with the cache in the same folder."""
    if isinstance(dataset, list):
        dataset = write_rows(dataset, folder / "rows.jsonl")
    return load_in(folder, dataset, **({"task": "instruction-tuning", "model": LLAMA} | values))


def with_template(tokenizer, folder, template, **special):
    """Save a tokenizer with a chat template, or None, and special tokens; return the folder."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer)
    tokenizer.add_special_tokens(special)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return str(folder)


def unigram(texts):
    """Train a Unigram tokenizer that adds <s> and </s>."""
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=special, unk_token="<unk>", show_progress=False)
    backend.train_from_iterator(texts, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def samples_of(datasets):
    """Return the labels of all samples by their tokens, and assert that the columns agree."""
    found = {}
    for split in SPLITS:
        for sample in datasets.splits[split]:
            assert set(sample) == {"input_ids", "labels", "length", "items"}
            assert sample["length"] == len(sample["input_ids"]) == len(sample["labels"])
            assert sample["items"] == sum(label != -100 for label in sample["labels"][1:]) > 0
            pairs = zip(sample["input_ids"], sample["labels"], strict=True)
            assert all(label in (-100, token) for token, label in pairs)
            found[tuple(sample["input_ids"])] = sample["labels"]
    return found
