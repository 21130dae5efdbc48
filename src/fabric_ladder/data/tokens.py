"""Load tokenizers, or train them on the training texts."""

import re
from pathlib import Path

import datasets as hf
from tokenizers import AddedToken
from transformers import AutoTokenizer, BatchEncoding, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from fabric_ladder.data.hub import load_config, reachable
from fabric_ladder.errors import UserError

TOKENIZER_FILES = ("tokenizer.*", "vocab.*", "*.model")
CACHE_FORMAT = 7  # raise it whenever the same inputs would give other tokens, labels or notices
MOST_CHARACTERS = 200  # of a token, more than in any text; tokenizers are slow on a text of one long word
LONG_WORD = re.compile(r"\w{1000,}|[^\s\w]{1000,}")  # byte-pair encoding is quadratic in the length of a word
PIECE, MOST_LEARNED = 100, 10_000  # characters of a piece of a long word, e.g. DNA, and of all its pieces
NO_TOKEN = "the tokenizer has no token for a text"
END_OF_TEXT = "<|endoftext|>"  # in trained tokenizers


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a folder or the Hub, with a padding token (the end-of-text token where it has none).

    Raises:
        UserError: The name is neither a folder nor reachable, or the tokenizer has no fast version.
    """
    with reachable(name, "tokenizer") as options:
        folder = Path(name)
        if folder.is_dir() and not any(found for pattern in TOKENIZER_FILES for found in folder.glob(pattern)):
            raise OSError("no tokenizer.json and no vocabulary")  # transformers would invent one for some models
        tokenizer = AutoTokenizer.from_pretrained(name, **options)
    if not tokenizer.is_fast:
        raise UserError(f"the tokenizer of {name} has no fast version: choose another --tokenizer")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    if tokenizer.pad_token is None:
        raise UserError(f"the tokenizer of {name} names no token to pad with: add pad_token to tokenizer_config.json")
    return tokenizer


def split_tokens(train_tokens: str | None) -> list[str]:
    """Return the tokens of `--train_tokens`, each once.

    Raises:
        UserError: A token is empty, or holds a space.
    """
    tokens = [] if train_tokens is None else [token.strip() for token in train_tokens.split(",")]
    for token in tokens:
        if len(token.split()) != 1:
            problem = f"{token!r} splits into several tokens" if token else "a token is empty"
            raise UserError(f"--train_tokens {train_tokens:.80}: {problem}; separate tokens by single commas")
    return [*dict.fromkeys(tokens)]


def add_tokens(tokenizer: PreTrainedTokenizerBase, train_tokens: str | None) -> list[str]:
    """Add the tokens of `--train_tokens` that the tokenizer lacks, and return them.

    Raises:
        UserError: As `split_tokens`; or a token cannot be trained, or the tokenizer does not keep a new one whole.
    """
    tokens, known = split_tokens(train_tokens), tokenizer.get_vocab()
    new = [token for token in tokens if token not in known]
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in new])
    for token in tokens:
        if token == tokenizer.pad_token != tokenizer.eos_token:
            raise UserError(f"--train_tokens {token}: it pads texts, and its row gets no gradient; leave it out")
        if token in new and tokenizer.encode(token, add_special_tokens=False) != [tokenizer.get_vocab()[token]]:
            raise UserError(f"--train_tokens {token}: the tokenizer splits it into several; choose another name")
    return new


def tokenize_start(tokenizer: PreTrainedTokenizerBase, texts: list[str], max_length: int) -> list[list[int]]:
    """Return the `input_ids` of texts, at most `max_length` of each, without reading the rest of a text."""
    most = MOST_CHARACTERS * max_length
    left = tokenizer.truncation_side == "left"
    texts = [text if len(text) <= most else text[-most:] if left else text[:most] for text in texts]
    return tokenize(tokenizer, texts, truncation=True, max_length=max_length)["input_ids"]


def tokenize(tokenizer: PreTrainedTokenizerBase, texts: list[str], **options) -> BatchEncoding:
    """Return the `input_ids` of texts, and other outputs by the options, without warnings about long texts."""
    return tokenizer(texts, return_attention_mask=False, return_token_type_ids=False, verbose=False, **options)


def check_entries(tokenizer: PreTrainedTokenizerBase, new_tokens: list[str], model: str, rows: int | None) -> None:
    """Refuse a tokenizer with more entries, new tokens aside, than the embedding of a model has rows."""
    entries = len(tokenizer) - len(new_tokens)
    if entries > (rows or entries):
        raise UserError(
            f"the tokenizer has {entries:,} entries, {model} only {rows:,}: choose the model's own --tokenizer"
        )


def trained_vocabulary(model: str) -> int:
    """Return the vocabulary size of a tokenizer trained for this model: its embedding's rows, at most 32,768."""
    rows = getattr(load_config(model), "vocab_size", None)
    if not isinstance(rows, int):
        raise UserError(f"--tokenizer trained needs a config with vocab_size, unlike {model}")
    return min(rows, 32_768)


def _pieces(word: re.Match[str]) -> str:
    """Return the start of a long word in pieces, one per line; a space would be learned as part of a token."""
    return "\n".join(word[0][start : start + PIECE] for start in range(0, min(len(word[0]), MOST_LEARNED), PIECE))


def train_tokenizer(texts: hf.Dataset, vocabulary: int, **special: str) -> PreTrainedTokenizerFast:
    """Learn a byte-level byte-pair encoding, BLOOM's kind of tokenizer, from the training texts.

    Args:
        texts: Training texts, in the column `text`.
        vocabulary: Maximum entries.
        special: Special tokens other than the padding token, by their names in transformers, e.g. `eos_token`.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<pad>", *special.values()],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    batches = ([LONG_WORD.sub(_pieces, text) for text in batch["text"]] for batch in texts.iter(1000))
    bpe.train_from_iterator(batches, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", **special)
