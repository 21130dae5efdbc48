"""What the data modules return: splits of texts or of images, and all that is known of them."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import datasets as hf
from transformers import PreTrainedTokenizerBase

SPLITS = ("train", "validation", "test")
IGNORED = -100  # label of a token that is not trained, as in PyTorch's cross entropy


@dataclass
class TextDatasets:
    """Tokenized splits, memory-mapped from the cache.

    Attributes:
        splits: `train`, `validation` and `test`, each with the columns `input_ids` (tokens), `labels` and `length`. Of
            instructions `labels` has a label for each token, -100 where it is not trained, and `items` counts those
            that are, without the first token, which nothing predicts.
        class_names: Names of the labels 0, 1, …; none of instructions.
        tokenizer: The tokenizer that made `input_ids`. Of instructions `init_kwargs["prompt_template"]`, which is saved
            and loaded with it, names their template: one for `prompt_text`, `alpaca`, or `chat` (its chat template).
        fingerprint: A hash of all tokens and labels: the same on every machine, another when anything changes.
        notices: Lines that the user should read.
    """

    splits: hf.DatasetDict
    class_names: list[str]
    tokenizer: PreTrainedTokenizerBase
    fingerprint: str
    notices: list[str] = field(default_factory=list)


class ImageFormat(NamedTuple):
    """How stored pixels become what a model sees.

    Attributes:
        size: Pixels of a side of the square that the model sees.
        resize_to: Pixels of a side of the square that every image is resized to before, at least `size`.
        mean: Of the channels red, green and blue; the model sees (pixel / 255 - mean) / std.
        std: Of the channels likewise.
        resample: How images are resized.
        random_flip: Mirror every other training image.
        tokens: Tokens of a sample: its patches and the one that stands for the class.
    """

    size: int
    resize_to: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    resample: Literal["bilinear", "bicubic"]
    random_flip: bool
    tokens: int


@dataclass
class ImageDatasets:
    """Decoded splits, memory-mapped from the cache.

    Attributes:
        splits: `train`, `validation` and `test`, each with the columns `image` (bytes: height x width x 3 colours),
            `height`, `width` (neither above `format.resize_to`), `labels`, and `length` (tokens, the same for all).
        class_names: Names of the labels 0, 1, …
        format: What is left to do when a batch is made.
        fingerprint: A hash of all pixels, all labels and the format: another when anything changes.
        notices: Lines that the user should read.
    """

    splits: hf.DatasetDict
    class_names: list[str]
    format: ImageFormat
    fingerprint: str
    notices: list[str]
