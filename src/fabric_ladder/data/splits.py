"""The results of the data modules: splits of texts or images, and their facts."""

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
        splits: `train`, `validation` and `test`, each with the columns `input_ids` (tokens), `labels` and `length`. For
            instructions, `labels` has a label per token, -100 for tokens that are not trained. The column `items`
            counts the trained tokens, without the first token, which has no prediction.
        class_names: Names of the labels 0, 1, …; empty for instructions.
        tokenizer: The tokenizer that made `input_ids`. For instructions, two values of `init_kwargs` are saved with it:
            `prompt_template`, a template for `prompt_text`, `alpaca`, or `chat` (the tokenizer's chat template); and
            `answer_ends`, the tokens after the last answers of chats.
        fingerprint: A hash of all tokens and labels, equal on every machine.
        notices: Lines that the user should read.
        commit: The commit of a data set on the Hub.
        summary: Lines about what was read.
        new_tokens: Tokens of `train_tokens` that the tokenizer lacked.
    """

    splits: hf.DatasetDict
    class_names: list[str]
    tokenizer: PreTrainedTokenizerBase
    fingerprint: str
    notices: list[str] = field(default_factory=list)
    commit: str | None = None
    summary: list[str] = field(default_factory=list)
    new_tokens: list[str] = field(default_factory=list)


class ImageFormat(NamedTuple):
    """The conversion from stored pixels to the model's input.

    Attributes:
        size: Pixels of a side of the model's square input.
        resize_to: Pixels of a side of the square to which every image is resized first, at least `size`.
        mean: Mean of the red, green and blue channel; the input is (pixel / 255 - mean) / std.
        std: Standard deviation of the channels.
        resample: Interpolation for resizing.
        random_flip: Mirror half of the training images.
        tokens: Tokens of a sample: its patches and the class token.
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
            `height` and `width` (at most `format.resize_to`), `labels`, and `length` (tokens, equal for all).
        class_names: Names of the labels 0, 1, …
        format: The conversion that is left for each batch.
        fingerprint: A hash of all pixels, all labels and the format.
        notices: Lines that the user should read.
        commit: The commit of a data set on the Hub.
        summary: Lines about what was read.
    """

    splits: hf.DatasetDict
    class_names: list[str]
    format: ImageFormat
    fingerprint: str
    notices: list[str]
    commit: str | None = None
    summary: list[str] = field(default_factory=list)
