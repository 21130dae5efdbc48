"""Instructions: prompts, tokens and labels one by one for three kinds of tokenizers, bad rows, and the cache."""

import json
import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from helpers import MODELS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from local_dataset_utilities import DatasetError, DataSettings, load_datasets, prompt_text, prompt_tokens

MODEL = str(MODELS / "llama-tiny.json")
SPLITS = ("train", "validation", "test")
KINDS = ("trained", "wordpiece", "unigram")
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
REWRITING = CHATML.replace("{{ message.content }}", "{{ message.content if loop.last else '(long ago)' }}")
REFUSING = CHATML + "{% if messages[0].content == 'Name 4.' %}{{ raise_exception('no fours') }}{% endif %}"


def rows(count=40):
    """Instructions that are all different; every other one has an input."""
    return [
        {
            "instruction": f"Say in one word what number {index} {'really ' * (index % 7)}is.",
            "input": f"It is {'even' if index % 4 else 'round'}." if index % 2 else "",
            "output": " ".join(f"answer {index + word}" for word in range(1 + index % 5)),
        }
        for index in range(count)
    ]


def chats(count=30):
    """Chats of one or two answers; every third begins with the system's message."""
    some = []
    for index in range(count):
        messages = [{"role": "system", "content": "Be brief."}] if index % 3 == 0 else []
        for turn in range(1 + index % 2):
            messages.append({"role": "user", "content": f"Name {index + turn}."})
            messages.append({"role": "assistant", "content": f"It is {index + turn}, of course."})
        some.append({"messages": messages})
    return some


def write(content, path):
    """Write rows in the form that the name says, or a text as it is."""
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


@pytest.fixture
def load(tmp_path):
    """Load rows or a file with a cache of the test's own."""

    def load(dataset, **values):
        if isinstance(dataset, list):
            dataset = write(dataset, tmp_path / "rows.jsonl")
        folders = {"cache_dir": str(tmp_path / "cache"), "data_dir": str(tmp_path)}
        return load_datasets(
            DataSettings(**({"task": "instruction-tuning", "dataset": str(dataset), "model": MODEL} | folders | values))
        )

    return load


@pytest.fixture(scope="module")
def tokenizers(minilm, tmp_path_factory):
    """Folders of a trained byte-level BPE, of MiniLM's WordPiece, and of a Unigram that adds <s> and </s>."""
    home = tmp_path_factory.mktemp("tokenizers")
    settings = {"task": "instruction-tuning", "model": MODEL, "cache_dir": str(home / "cache")}
    made = {
        "trained": load_datasets(DataSettings(dataset=str(write(rows(), home / "rows.jsonl")), **settings)).tokenizer,
        "wordpiece": AutoTokenizer.from_pretrained(minilm),
        "unigram": unigram([text for row in rows() for text in (prompt_text(row["instruction"]), row["output"])]),
    }
    for name, tokenizer in made.items():
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
        tokenizer.chat_template = CHATML
        tokenizer.save_pretrained(home / name)
    return {name: str(home / name) for name in made}


def unigram(texts):
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


BEGIN = {"trained": [], "wordpiece": ["[CLS]"], "unigram": ["<s>"]}
END = {"trained": "<|endoftext|>", "wordpiece": "[SEP]", "unigram": "</s>"}


def pieces(tokenizer, text):
    """The tokens of a text alone, by the tokenizer's own Rust part."""
    return tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids


def samples_of(datasets):
    """All samples by their tokens, once it is checked that their columns agree."""
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


# ----------------------------------------------------------------------------------------------------------------------
# Prompts
# ----------------------------------------------------------------------------------------------------------------------


def test_alpacas_wordings():
    assert prompt_text("Do it.", "With this.") == (
        "Below is an instruction that describes a task, paired with an input that provides further context. "
        "Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nDo it.\n\n### Input:\nWith this.\n\n### Response:"
    )
    assert prompt_text("Do it.") == prompt_text("Do it.", " ", "alpaca") == (
        "Below is an instruction that describes a task. "
        "Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nDo it.\n\n### Response:"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("template", "with_input", "without"),
    [
        ("Human: {instruction}\n{input}\nAssistant: ", "Human: A\nB\nAssistant: ", "Human: A\nAssistant: "),
        (r"Human: {instruction}\n{input}\nAssistant: ", "Human: A\nB\nAssistant: ", "Human: A\nAssistant: "),
        ("{instruction}\n{input}", "A\nB", "A"),
        ("{instruction} ({input})\n", "A (B)\n", "A ()\n"),
        ("{instruction}\n\n", "A\n\n", "A\n\n"),
        ('{{"asked": "{instruction}"}}', '{"asked": "A"}', '{"asked": "A"}'),
    ],
)
def test_own_templates(template, with_input, without):
    assert prompt_text("A", "B", template) == with_input
    assert prompt_text("A", "", template) == prompt_text("A", "\n", template) == without


def test_braces_in_the_data_are_texts():
    for text in ("{input}", "{0} {instruction} }{", "{{x}}", r"\n"):
        assert prompt_text(text, text, "{instruction}|{input}") == f"{text}|{text}"


@pytest.mark.parametrize(
    ("template", "pattern"),
    [
        ("Human:", r"--prompt_template 'Human:' lacks \{instruction\}: say where"),
        ("{input}", r"lacks \{instruction\}"),
        ("{instruction} {context}", r"names \{context\}: only \{instruction\} and \{input\} are filled in"),
        ("{instruction.__class__}", r"names \{instruction\.__class__\}"),
        ("{instruction!r}", r"only \{instruction\} and \{input\} are filled in, as they are"),
        ("{instruction:>9}", r"as they are"),
        ("{instruction} {}", r"names \{\}"),
        ("{instruction} {", r"write a brace that is meant as one twice"),
    ],
)
def test_templates_that_cannot_be_filled_in_are_refused_before_anything_is_read(load, template, pattern):
    with pytest.raises(DatasetError, match=pattern) as error:
        load([{"messages": "unread"}], prompt_template=template)
    assert "\n" not in str(error.value)


# ----------------------------------------------------------------------------------------------------------------------
# Tokens and labels
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [None, r"Human: {instruction}\n{input}\nAssistant: "])
@pytest.mark.parametrize("train_on_inputs", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_each_token_and_its_label(load, tokenizers, kind, train_on_inputs, template):
    got = load(rows(), tokenizer=tokenizers[kind], train_on_inputs=train_on_inputs, prompt_template=template)
    tokenizer = got.tokenizer
    begin, end = tokenizer.convert_tokens_to_ids(BEGIN[kind]), tokenizer.convert_tokens_to_ids(END[kind])
    expected = {}
    for row in rows():
        text = prompt_text(row["instruction"], row["input"], template)
        prompt, answer = begin + pieces(tokenizer, text), [*pieces(tokenizer, row["output"]), end]
        assert prompt_tokens(tokenizer, [text]) == [prompt], "generation sees what was trained"
        expected[(*prompt, *answer)] = (prompt if train_on_inputs else [-100] * len(prompt)) + answer
    assert samples_of(got) == expected
    assert got.notices == got.class_names == []
    assert [len(got.splits[split]) for split in SPLITS] == [28, 4, 8]


@pytest.mark.parametrize("train_on_inputs", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_each_token_of_a_chat_and_its_label(load, tokenizers, kind, train_on_inputs):
    got = load(chats(), tokenizer=tokenizers[kind], train_on_inputs=train_on_inputs)
    tokenizer, expected = got.tokenizer, {}
    for chat in chats():
        ids, labels, asked = [], [], ""
        for message in chat["messages"]:
            if message["role"] == "assistant":
                prompt = pieces(tokenizer, asked + "<|im_start|>assistant\n")
                answer = pieces(tokenizer, f"{message['content']}<|im_end|>\n")
                ids += prompt + answer
                labels += (prompt if train_on_inputs else [-100] * len(prompt)) + answer
                asked = ""
            else:
                asked += f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n"
        expected[tuple(ids)] = labels
    found = samples_of(got)
    assert found == expected
    first = next(index for index, message in enumerate(chats()[0]["messages"]) if message["role"] == "assistant")
    prompt = tokenizer.apply_chat_template(chats()[0]["messages"][:first], add_generation_prompt=True)["input_ids"]
    assert any(ids[: len(prompt)] == tuple(prompt) for ids in found), "generation sees what was trained"
    assert tokenizer.init_kwargs["prompt_template"] == "chat"


def test_a_template_that_marks_answers_gives_the_same(load, tokenizers, tmp_path):
    """What ends a turn is trained too, be it marked or not."""
    marked = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.role == 'assistant' %}"
        "{% generation %}{{ message.content }}{% endgeneration %}{% else %}{{ message.content }}{% endif %}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    other = with_chat_template(tokenizers["unigram"], marked, tmp_path / "own")
    assert load(chats(), tokenizer=other).fingerprint == load(chats(), tokenizer=tokenizers["unigram"]).fingerprint


def test_what_follows_the_last_answer_is_not_trained(load, tokenizers):
    asked = [chat["messages"] + [{"role": "user", "content": "Thanks."}] for chat in chats()]
    got = load([{"messages": messages} for messages in asked], tokenizer=tokenizers["unigram"])
    thanks = pieces(got.tokenizer, "<|im_start|>user\nThanks.<|im_end|>\n")
    for ids, labels in samples_of(got).items():
        assert ids[-len(thanks) :] == tuple(thanks)
        assert set(labels[-len(thanks) :]) == {-100}


@pytest.mark.parametrize("kind", KINDS)
def test_truncation_counts_what_it_cuts_and_what_it_leaves_out(load, tokenizers, kind):
    whole = samples_of(load(rows(), tokenizer=tokenizers[kind]))
    prompts = sorted(labels.count(-100) for labels in whole.values())
    longest = prompts[len(prompts) // 2] + 2
    got = load(rows(), tokenizer=tokenizers[kind], max_length=longest)
    out = sum(prompt >= longest for prompt in prompts)
    cut = sum(labels.count(-100) < longest < len(labels) for labels in whole.values())
    assert min(out, cut) > 0
    kept = {ids[:longest]: labels[:longest] for ids, labels in whole.items() if labels.count(-100) < longest}
    assert samples_of(got) == kept
    assert got.notices == [
        f"{out} of 40 samples have a prompt of --max_length {longest} tokens or more and are left out",
        f"{cut} of 40 samples have their answer cut at --max_length {longest} tokens",
    ]


def test_with_inputs_trained_a_prompt_alone_is_a_sample(load, tokenizers):
    got = load(rows(), tokenizer=tokenizers["unigram"], max_length=9, train_on_inputs=True)
    assert [len(got.splits[split]) for split in SPLITS] == [28, 4, 8]
    assert got.notices == ["40 of 40 samples have their answer cut at --max_length 9 tokens"]


def test_a_split_without_a_sample_is_refused(load, tokenizers):
    line = (
        r"no train sample is left \(40 of 40 samples have a prompt of --max_length 9 tokens or more and are left "
        r"out\): raise --max_length 9"
    )
    with pytest.raises(DatasetError, match=line):
        load(rows(), tokenizer=tokenizers["trained"], max_length=9)


def test_a_cut_chat_keeps_the_answers_that_fit(load, tokenizers):
    whole = samples_of(load(chats(), tokenizer=tokenizers["trained"]))
    longest = max(map(len, whole)) - 3
    got = load(chats(), tokenizer=tokenizers["trained"], max_length=longest)
    assert samples_of(got) == {ids[:longest]: labels[:longest] for ids, labels in whole.items()}
    cut = sum(len(ids) > longest for ids in whole)
    assert got.notices == [f"{cut} of 30 samples have their answer cut at --max_length {longest} tokens"]


def test_real_chinese_answers_come_back(load):
    path = Path(os.environ.get("FABRIC_LADDER_DATA", "data")) / "instructions_zh_2000.json"
    if not path.exists():
        pytest.skip("needs real instructions: set FABRIC_LADDER_DATA to a folder with instructions_zh_2000.json")
    with pytest.raises(
        DatasetError, match=r"1 of 2,000 rows of .*2000\.json cannot be used \(row 55: no output\): mend"
    ):
        load(path)
    got = load(path, bad_samples="skip", max_length=8192)
    assert len(got.notices) == 1
    tokenizer, found = got.tokenizer, []
    assert len(tokenizer) == 1024
    for split in SPLITS:
        for sample in got.splits[split]:
            *answer, end = [label for label in sample["labels"] if label != -100]
            assert end == tokenizer.eos_token_id
            asked = sample["input_ids"][: sample["labels"].count(-100)]
            found.append(tuple(tokenizer.decode(ids, clean_up_tokenization_spaces=False) for ids in (asked, answer)))
    real = [row for row in json.loads(path.read_text(encoding="utf-8")) if row["output"].strip()]
    assert sorted(found) == sorted((prompt_text(row["instruction"], row["input"]), row["output"]) for row in real)


def test_a_tokenizer_that_cannot_end_an_answer_is_refused(load, tokenizers, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tokenizers["unigram"])
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "endless")
    with pytest.raises(DatasetError, match=r"endless has no token that ends an answer \(eos_token\): choose another"):
        load(rows(), tokenizer=str(tmp_path / "endless"))


@pytest.mark.parametrize("template", [None, "Human: {instruction}\nAssistant: "])
def test_the_template_travels_with_the_tokenizer(load, tokenizers, tmp_path, template):
    for tokenizer in ("trained", tokenizers["wordpiece"]):
        got = load(rows(), tokenizer=tokenizer, prompt_template=template)
        got.tokenizer.save_pretrained(tmp_path / "saved")
        saved = AutoTokenizer.from_pretrained(tmp_path / "saved")
        assert saved.init_kwargs["prompt_template"] == (template or "alpaca")
        text = prompt_text("Do it.", "", saved.init_kwargs["prompt_template"])
        assert text == prompt_text("Do it.", "", template)
        assert prompt_tokens(saved, [text]) == prompt_tokens(got.tokenizer, [text])
        assert saved.eos_token_id == got.tokenizer.eos_token_id is not None


# ----------------------------------------------------------------------------------------------------------------------
# Sources
# ----------------------------------------------------------------------------------------------------------------------


def test_every_format_gives_the_same_tokens(tmp_path, load, tokenizers):
    odd = [
        {"instruction": "None", "input": "NA", "output": "null"},
        {"instruction": "1.50", "input": "", "output": "7"},
    ]
    odd += [{"instruction": 'with "quotes", commas', "input": "two\nlines", "output": "  很好 🎬"}]
    some = odd + rows()
    lines = "".join(json.dumps(row) + "\n\n" for row in some)
    contents = {"a.jsonl": some, "a.json": some, "a.csv": some, "a.parquet": some, "LINES.JSON": lines}
    contents |= {"list.jsonl": json.dumps(some), "mark.json": b"\xef\xbb\xbf" + lines.encode()}
    contents["no_empty_inputs.jsonl"] = [{key: text for key, text in row.items() if text} for row in some]
    contents["null_inputs.json"] = [{key: text or None for key, text in row.items()} for row in some]
    prints = {
        name: load(write(content, tmp_path / name), tokenizer=tokenizers["trained"]).fingerprint
        for name, content in contents.items()
    }
    assert len(set(prints.values())) == 1, prints


def test_pairs_are_instructions_without_an_input(load, tokenizers):
    pairs = [{"input": row["instruction"], "target": row["output"]} for row in rows()]
    plain = [{"instruction": row["instruction"], "output": row["output"]} for row in rows()]
    first, other = (load(some, tokenizer=tokenizers["trained"]).fingerprint for some in (pairs, plain))
    assert first == other


def test_chats_from_parquet(tmp_path, load, tokenizers):
    same = [write(chats(), tmp_path / name) for name in ("a.parquet", "a.jsonl")]
    first, other = (load(path, tokenizer=tokenizers["trained"]).fingerprint for path in same)
    assert first == other


def test_splits_are_files_of_a_folder_or_split_off_and_cut(tmp_path, load, tokenizers):
    some = rows(60)
    pairs = [{"input": row["instruction"], "target": row["output"]} for row in some[:20]]
    for name, part in {"train.csv": some[20:40], "train2.json": pairs, "test.jsonl": some[40:]}.items():
        write(part, tmp_path / "folder" / name)
    got = load("folder", tokenizer=tokenizers["trained"])
    assert [len(got.splits[split]) for split in SPLITS] == [36, 4, 20]
    own = load("folder/train.csv", tokenizer=tokenizers["trained"], test_file="folder/test.jsonl", train_samples=7)
    assert [len(own.splits[split]) for split in SPLITS] == [7, 2, 20]
    assert own.splits["test"][:] == got.splits["test"][:]


def test_chats_and_instructions_do_not_mix(tmp_path, load, tokenizers):
    write(rows(), tmp_path / "folder" / "train.jsonl")
    write(chats(), tmp_path / "folder" / "test.jsonl")
    with pytest.raises(DatasetError, match=r"test\.jsonl and .*train\.jsonl are of two forms: give"):
        load("folder", tokenizer=tokenizers["trained"])


@pytest.mark.parametrize("dataset", ["synthetic", "imdb"])
def test_reviews_become_instructions(request, load, dataset):
    folder = request.getfixturevalue("archive").parent if dataset == "imdb" else Path()
    sizes = {"train_samples": 60, "validation_samples": 20, "test_samples": 30}
    got = load(dataset, data_dir=str(folder), max_length=4096, **sizes)
    assert [len(got.splits[split]) for split in SPLITS] == [60, 20, 30]
    answers = set()
    for ids, labels in samples_of(got).items():
        text = got.tokenizer.decode(ids[: labels.count(-100)])
        assert "### Instruction:\nIs this film review positive or negative?\n\n### Input:\n" in text
        answers.add(got.tokenizer.decode([label for label in labels if label != -100]))
    assert answers == {"positive<|endoftext|>", "negative<|endoftext|>"}


def test_inputs_that_a_template_does_not_show_are_counted(load, tokenizers):
    got = load(rows(), tokenizer=tokenizers["trained"], prompt_template="{instruction}\n")
    assert got.notices == ["20 of 40 samples have an input that --prompt_template does not show"]


# ----------------------------------------------------------------------------------------------------------------------
# Bad input
# ----------------------------------------------------------------------------------------------------------------------

GOOD, CHAT = rows(20), chats(20)
USER, ASSISTANT = CHAT[1]["messages"][:2]
LINES = [json.dumps(row) for row in GOOD]


def changed(row, **values):
    row = row | values
    return {key: value for key, value in row.items() if value is not ...}


BAD_ROWS = {  # what stands in the place of the fourth row, and what is said of it
    "no JSON": (LINES[3][:-2], r"no JSON \(Unterminated string starting at, column \d+\)"),
    "no object": ("[1]", r"no JSON object"),
    "very deep": ('{"instruction":' + "[" * 99_999, r"no JSON \(maximum recursion depth"),
    "no output": (changed(GOOD[3], output=...), r"no output"),
    "null output": (changed(GOOD[3], output=None), r"no output"),
    "blank output": (changed(GOOD[3], output=" \n"), r"no output"),
    "number": (changed(GOOD[3], output=42), r"output is 42, not text"),
    "list": (changed(GOOD[3], output=["x" * 99]), r"output is \['x{38}, not text"),
    "no instruction": (changed(GOOD[3], instruction=...), r"no instruction"),
    "true input": (changed(GOOD[3], input=True), r"input is True, not text"),
    "half a character": ('{"instruction": "a", "output": "\\ud83c"}', r"output holds half a character"),
    "no messages": ({"messages": None}, r"no messages"),
    "empty messages": ({"messages": []}, r"no messages"),
    "text for messages": ({"messages": "Hi."}, r"messages is 'Hi\.', not a list of messages"),
    "text for a message": ({"messages": [USER, "Hi."]}, r"message 2 is 'Hi\.', not role and content"),
    "unknown role": ({"messages": [USER, {"role": "gpt"}]}, r"message 2 has the role 'gpt', not system, user, a"),
    "list for a role": ({"messages": [{"role": ["user"]}]}, r"message 1 has the role \['user'\], not"),
    "no content": ({"messages": [USER, {"role": "assistant"}]}, r"no content in message 2"),
    "empty answer": ({"messages": [USER, ASSISTANT | {"content": ""}]}, r"no content in message 2"),
    "parts": ({"messages": [USER | {"content": [1]}, ASSISTANT]}, r"content in message 1 is \[1\], not text"),
    "no answer": ({"messages": [USER]}, r"no message of the assistant"),
    "answer first": ({"messages": [ASSISTANT, USER]}, r"the first message is the assistant's"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_row_is_named_or_left_out(tmp_path, load, tokenizers, name):
    row, reason = BAD_ROWS[name]
    line = row if isinstance(row, str) else json.dumps(row)
    good = list(map(json.dumps, CHAT)) if "messages" in line else LINES
    path = write("\n".join([*good[:3], line, *good[4:]]), tmp_path / "rows.jsonl")
    found = rf"1 of 20 rows of .*rows\.jsonl cannot be used \(line 4: {reason}.*\)"
    with pytest.raises(DatasetError, match=f"^{found}: mend or remove them, or leave .* --bad_samples skip$") as error:
        load(path, tokenizer=tokenizers["trained"])
    assert len(str(error.value)) < 700
    got, again = (load(path, tokenizer=tokenizers["trained"], bad_samples="skip") for _ in range(2))
    write("\n".join([*good[:3], *good[4:]]), path)
    assert got.fingerprint == load(path, tokenizer=tokenizers["trained"]).fingerprint
    assert len(got.notices) == 1
    assert pd.Series(got.notices).str.fullmatch(found + " and are left out").all()
    assert again.notices == got.notices


REFUSED = {
    "no JSON list": ("a.json", '[\n{"instruction": "a"\n"output": "b"}]', r"a\.json cannot be read as json \(.*line 3"),
    "other columns": ("a.csv", "question,answer\na,b\n", r"a\.csv has the columns question, answer: instructions are"),
    "no answers": ("a.jsonl", [{"instruction": "a"}] * 9, r"has the columns instruction: .* as input and target, or"),
    "no rows": ("a.json", "[]", r"a\.json holds no rows that can be read \(none\): instructions"),
    "header alone": ("a.csv", "instruction,output\n", r"a\.csv holds no rows that can be read"),
    "numbers": ("a.json", "[1, 2]", r"holds no rows that can be read \(row 1: no JSON object; row 2"),
    "a number": ("a.json", "17", r"holds no rows that can be read \(line 1: no JSON object\)"),
    "a poem": ("a.jsonl", "Roses are red\n", r"\(line 1: no JSON \(Expecting value, column 1\)\)"),
    "nothing": ("a.jsonl", "", r"a\.jsonl is empty"),
    "UTF-16": ("a.jsonl", "\n".join(LINES).encode("utf-16"), r"a\.jsonl is not UTF-8 \(byte 0xff\): convert it"),
    "Latin-1": ("a.csv", "instruction,output\n\xe9,\xe9\n".encode("latin-1"), r"a\.csv is not UTF-8 \(byte 0xe9\)"),
    "no Parquet": ("a.parquet", "instruction", r"a\.parquet cannot be read as parquet"),
    "bare commas": ("a.csv", "instruction,output\n" + "a,b,c\n" * 9, r"rows have more fields than its header: quote"),
    "one bare comma": ("a.csv", "instruction,output\na,b\na,b,c\n", r"Expected 2 fields in line 3, saw 3"),
    "short rows": ("a.csv", "instruction,output\na,b\nc\nd\n", r"2 of 3 rows of .*a\.csv .* \(row 2: no output; row "),
    "two rows": ("a.jsonl", GOOD[:2], r"2 samples are too few to be split"),
    "text in a CSV": ("a.csv", "messages\nHi\n", r"row 1: messages is 'Hi', not a list of messages"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_files_that_cannot_be_used_are_refused_in_one_line(tmp_path, load, tokenizers, name):
    file, content, pattern = REFUSED[name]
    with pytest.raises(DatasetError, match=pattern) as error:
        load(write(content, tmp_path / file), tokenizer=tokenizers["trained"])
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 700
    assert [path for path in (tmp_path / "cache").glob("tokenised/*") if path.suffix != ".lock"] == []


def test_rows_that_are_all_bad_are_refused_even_when_they_may_be_left_out(load, tokenizers):
    with pytest.raises(
        DatasetError, match=r"^no row is left: 9 of 9 rows of .* \(line 1: no output; .*; …\) and are left"
    ):
        load([{"instruction": "a", "output": ""}] * 9, tokenizer=tokenizers["trained"], bad_samples="skip")


def with_chat_template(tokenizer, template, folder):
    tokenizer = AutoTokenizer.from_pretrained(tokenizer)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_chats_need_a_chat_template(load, tokenizers, tmp_path):
    for tokenizer in ("trained", with_chat_template(tokenizers["wordpiece"], None, tmp_path / "own")):
        with pytest.raises(
            DatasetError, match=r"holds messages, and the tokenizer has no chat template .*: choose a --tok"
        ):
            load(chats(), tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("template", "count", "reason"),
    [
        (REWRITING, 30, "are written otherwise once it follows"),
        (REFUSING, 1, "no fours"),
    ],
)
def test_chats_that_a_template_cannot_write(load, tokenizers, tmp_path, template, count, reason):
    tokenizer = with_chat_template(tokenizers["trained"], template, tmp_path / "own")
    found = (
        rf"{count} of 30 samples cannot be written by the tokenizer's chat template \(.*rows\.jsonl, line .*{reason}"
    )
    with pytest.raises(DatasetError, match=found + r".*\): mend or remove them, or"):
        load(chats(), tokenizer=tokenizer)
    if count < 30:
        got = load(chats(), tokenizer=tokenizer, bad_samples="skip")
        assert sum(map(len, got.splits.values())) == 30 - count
        assert len(got.notices) == 1
    else:
        with pytest.raises(DatasetError, match=r"^no train sample is left \(30 of 30 samples cannot"):
            load(chats(), tokenizer=tokenizer, bad_samples="skip")


def test_a_prompt_template_is_not_for_chats(load, tokenizers):
    got = load(chats(), tokenizer=tokenizers["trained"], prompt_template="{instruction}")
    assert got.notices == ["--prompt_template is not used: the tokenizer's chat template writes the messages"]


# ----------------------------------------------------------------------------------------------------------------------
# The cache
# ----------------------------------------------------------------------------------------------------------------------


def test_a_second_call_only_maps_the_first_ones_files(tmp_path, load):
    path = write([*rows(), {"instruction": "Be silent.", "output": ""}], tmp_path / "rows.jsonl")
    first = load(path, bad_samples="skip", max_length=64)
    files = {file: file.stat().st_mtime_ns for file in (tmp_path / "cache").rglob("*")}
    stamp = path.stat()
    path.write_bytes(b"?" * stamp.st_size)  # could no longer be read
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    second = load(path, bad_samples="skip", max_length=64)
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "cache").rglob("*")} == files
    assert not list((tmp_path / "cache").rglob("unfinished*"))
    assert second.fingerprint == first.fingerprint
    assert second.notices == first.notices
    assert first.notices
    assert second.tokenizer.init_kwargs["prompt_template"] == "alpaca"
    for split in SPLITS:
        assert second.splits[split][:] == first.splits[split][:]
        mapped = [Path(file["filename"]) for file in second.splits[split].cache_files]
        assert mapped
        assert all(file.is_relative_to(tmp_path / "cache") for file in mapped)


def test_what_changes_the_tokens_is_tokenised_again(tmp_path, load, tokenizers):
    path = write(rows(), tmp_path / "rows.jsonl")
    changes = [{}, {"prompt_template": "{instruction}"}, {"prompt_template": "{instruction}\n{input}"}]
    changes += [{"train_on_inputs": True}, {"max_length": 50}, {"split_seed": 2}, {"train_samples": 20}]
    changes += [{"tokenizer": tokenizers["wordpiece"]}]
    for change in changes:
        load(path, **({"tokenizer": tokenizers["trained"]} | change))
    kept = [folder for folder in (tmp_path / "cache" / "tokenised").iterdir() if folder.is_dir()]
    prints = {json.loads((folder / "facts.json").read_text())["fingerprint"] for folder in kept}
    assert len(prints) == len(kept) == len(changes)
    load(path, tokenizer=tokenizers["trained"], prompt_template="alpaca")
    assert len([folder for folder in (tmp_path / "cache" / "tokenised").iterdir() if folder.is_dir()]) == len(changes)


def test_another_chat_template_or_end_is_another_tokenizer(load, tokenizers, tmp_path):
    other = with_chat_template(tokenizers["unigram"], CHATML.replace("Be ", "").replace("\n", " "), tmp_path / "own")
    assert load(chats(), tokenizer=other).fingerprint != load(chats(), tokenizer=tokenizers["unigram"]).fingerprint
    tokenizer = AutoTokenizer.from_pretrained(tokenizers["unigram"])
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.save_pretrained(tmp_path / "other")
    ends = []
    for name in (tokenizers["unigram"], str(tmp_path / "other")):
        got = load(rows(), tokenizer=name)
        ends.append({got.tokenizer.convert_ids_to_tokens(ids[-1]) for ids in samples_of(got)})
    assert ends == [{"</s>"}, {"<|im_end|>"}]


def test_text_classification_knows_nothing_of_it(load):
    """Neither its tokenizer nor its place in the cache."""
    settings = {"task": "text-classification", "train_samples": 50, "validation_samples": 10, "test_samples": 10}
    first = load("synthetic", **settings)
    other = load("synthetic", **settings, prompt_template="{instruction}", train_on_inputs=True, bad_samples="skip")
    assert first.splits["train"].cache_files == other.splits["train"].cache_files
    assert first.tokenizer.eos_token is None
    assert "prompt_template" not in other.tokenizer.init_kwargs
    assert np.ndim(first.splits["train"]["labels"][:]) == 1
