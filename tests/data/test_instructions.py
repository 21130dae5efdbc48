"""Instructions: prompts, tokens and labels for three kinds of tokenizers, and the cache."""

import json

import pytest
from support.data_files import (
    CHATML,
    KINDS,
    SPLITS,
    cached,
    chats,
    load_instructions,
    rows,
    samples_of,
    with_template,
    write_rows,
)
from transformers import AutoTokenizer

from fabric_ladder.data.instructions import prompt_text, prompt_tokens
from fabric_ladder.errors import UserError

LOAD = load_instructions, {}

REFUSING = CHATML + "{% if messages[0].content == 'Name 4.' %}{{ raise_exception('no fours') }}{% endif %}"

HUMAN = r"Human: {instruction}\n{input}\nAssistant: "

BEGIN = {"trained": [], "wordpiece": ["[CLS]"], "unigram": ["<s>"]}

END = {"trained": "<|endoftext|>", "wordpiece": "[SEP]", "unigram": "</s>"}


def pieces(tokenizer, text):
    """Return the tokens of a text, computed by the tokenizer's Rust part alone."""
    return tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids


def test_the_default_prompts_are_alpacas():
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
        (HUMAN, "Human: A\nB\nAssistant: ", "Human: A\nAssistant: "),
        ("{instruction}\n{input}", "A\nB", "A"),
        ("{instruction} ({input})\n", "A (B)\n", "A ()\n"),
        ("{instruction}\n\n", "A\n\n", "A\n\n"),
        ('{{"asked": "{instruction}"}}', '{"asked": "A"}', '{"asked": "A"}'),
    ],
)
def test_a_users_template_writes_the_prompt(template, with_input, without):
    assert prompt_text("A", "B", template) == with_input
    assert prompt_text("A", "", template) == prompt_text("A", "\n", template) == without


def test_braces_in_the_data_stay_as_they_are():
    for text in ("{input}", "{0} {instruction} }{", "{{x}}", r"\n"):
        assert prompt_text(text, text, "{instruction}|{input}") == f"{text}|{text}"


@pytest.mark.parametrize(
    ("template", "pattern"),
    [
        ("Human:", r"--prompt_template 'Human:' lacks \{instruction\}: add it"),
        ("{input}", r"lacks \{instruction\}"),
        ("{{instruction}}", r"lacks \{instruction\}"),
        ("{instruction} {context}", r"only \{instruction\} and \{input\} are filled in; .* \(KeyError: 'context'\)"),
        ("{instruction} {", r"write each literal brace twice"),
    ],
)
def test_a_template_with_other_fields_is_refused_before_the_data_are_read(load, template, pattern):
    with pytest.raises(UserError, match=pattern) as error:
        load([{"messages": "unread"}], prompt_template=template)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "template", "train_on_inputs"), [*zip(KINDS, (None, HUMAN, HUMAN), (False, True, False), strict=True)]
)
def test_an_instruction_gives_these_tokens_and_labels(load, tokenizers, name, train_on_inputs, template):
    got = load(rows(), tokenizer=tokenizers[name], train_on_inputs=train_on_inputs, prompt_template=template)
    tokenizer = got.tokenizer
    begin, end = tokenizer.convert_tokens_to_ids(BEGIN[name]), tokenizer.convert_tokens_to_ids(END[name])
    expected = {}
    for row in rows():
        text = prompt_text(row["instruction"], row["input"], template)
        prompt, answer = begin + pieces(tokenizer, text), [*pieces(tokenizer, row["output"]), end]
        assert prompt_tokens(tokenizer, [text]) == [prompt], "generation uses the prompts of training"
        expected[(*prompt, *answer)] = (prompt if train_on_inputs else [-100] * len(prompt)) + answer
    assert samples_of(got) == expected
    assert got.notices == got.class_names == []
    assert [len(got.splits[split]) for split in SPLITS] == [28, 4, 8]


@pytest.mark.parametrize(("name", "train_on_inputs"), [*zip(KINDS, (False, True, False), strict=True)])
def test_a_chat_gives_these_tokens_and_labels(load, tokenizers, name, train_on_inputs):
    got = load(chats(), tokenizer=tokenizers[name], train_on_inputs=train_on_inputs)
    tokenizer, expected = got.tokenizer, {}
    for chat in chats():
        text, answers = "", []
        for message in chat["messages"]:
            text += f"<|im_start|>{message['role']}\n"
            if message["role"] == "assistant":
                answers.append((len(text), len(f"{text}{message['content']}<|im_end|>")))
            text += f"{message['content']}<|im_end|>\n"
        encoding = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
        trained = [any(a < end and b > start for start, end in answers) for a, b in encoding.offsets]
        pairs = zip(encoding.ids, trained, strict=True)
        expected[tuple(encoding.ids)] = [token if yes or train_on_inputs else -100 for token, yes in pairs]
    found = samples_of(got)
    assert found == expected
    first = next(index for index, message in enumerate(chats()[0]["messages"]) if message["role"] == "assistant")
    prompt = tokenizer.apply_chat_template(chats()[0]["messages"][:first], add_generation_prompt=True)["input_ids"]
    assert any(ids[: len(prompt)] == tuple(prompt) for ids in found), "generation uses the prompts of training"
    assert tokenizer.init_kwargs["prompt_template"] == "chat"


def test_truncation_counts_the_samples_that_are_cut_or_left_out(load, tokenizers):
    whole = samples_of(load(rows(), tokenizer=tokenizers["unigram"]))
    prompts = sorted(labels.count(-100) for labels in whole.values())
    longest = prompts[len(prompts) // 2] + 2
    got = load(rows(), tokenizer=tokenizers["unigram"], max_length=longest)
    out = sum(prompt >= longest for prompt in prompts)
    cut = sum(labels.count(-100) < longest < len(labels) for labels in whole.values())
    assert min(out, cut) > 0
    kept = {ids[:longest]: labels[:longest] for ids, labels in whole.items() if labels.count(-100) < longest}
    assert samples_of(got) == kept
    assert got.notices == [
        f"{out} of 40 samples have a prompt of --max_length {longest} tokens or more and are left out",
        f"{cut} of 40 samples have their answer cut at --max_length {longest} tokens",
    ]


def test_prompts_longer_than_max_length_need_train_on_inputs(load, tokenizers):
    got = load(rows(), tokenizer=tokenizers["unigram"], max_length=9, train_on_inputs=True)
    assert [len(got.splits[split]) for split in SPLITS] == [28, 4, 8]
    assert got.notices == ["40 of 40 samples have their answer cut at --max_length 9 tokens"]
    line = r"no train sample is left \(40 of 40 samples have a prompt of --max_length 9 .*\): raise --max_length 9"
    with pytest.raises(UserError, match=line):
        load(rows(), tokenizer=tokenizers["trained"], max_length=9)


def test_a_tokenizer_that_cannot_end_an_answer_is_refused(load, tokenizers, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tokenizers["unigram"])
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "endless")
    with pytest.raises(UserError, match=r"endless has no token that ends an answer \(eos_token\): choose another"):
        load(rows(), tokenizer=str(tmp_path / "endless"))


def test_the_template_is_saved_with_the_tokenizer(load, tokenizers, tmp_path):
    for tokenizer, template in (("trained", None), (tokenizers["wordpiece"], "Human: {instruction}\nAssistant: ")):
        got = load(rows(), tokenizer=tokenizer, prompt_template=template)
        got.tokenizer.save_pretrained(tmp_path / "saved")
        saved = AutoTokenizer.from_pretrained(tmp_path / "saved")
        assert saved.init_kwargs["prompt_template"] == (template or "alpaca")
        text = prompt_text("Do it.", "", saved.init_kwargs["prompt_template"])
        assert text == prompt_text("Do it.", "", template)
        assert prompt_tokens(saved, [text]) == prompt_tokens(got.tokenizer, [text])
        assert saved.eos_token_id == got.tokenizer.eos_token_id is not None


def test_a_notice_names_templates_that_may_be_wrong(load, tokenizers):
    got = load(rows(), tokenizer=tokenizers["trained"], prompt_template="{instruction}\n")
    assert got.notices == ["20 of 40 samples have an input that --prompt_template does not show"]
    got = load(chats(), tokenizer=tokenizers["trained"], prompt_template="{instruction}")
    assert got.notices == ["--prompt_template is not used: the tokenizer's chat template writes the messages"]


def test_chats_need_a_chat_template(load, tokenizers, tmp_path):
    tokenizer = with_template(tokenizers["trained"], tmp_path / "own", None)
    with pytest.raises(UserError, match=r"holds messages, and the tokenizer has no chat template .*: choose a --tok"):
        load(chats(), tokenizer=tokenizer)


def test_a_trained_tokenizer_writes_chats_without_the_hub(load):
    got = load(chats(), tokenizer="trained")
    texts = {got.tokenizer.decode(ids) for split in SPLITS for ids in got.splits[split]["input_ids"][:]}
    assert texts == {got.tokenizer.apply_chat_template(chat["messages"], tokenize=False) for chat in chats()}
    sample = got.splits["test"][0]
    answer = got.tokenizer.decode([label for label in sample["labels"] if label != -100])
    assert answer.startswith("It is ")
    assert answer.endswith(", of course.<|im_end|>")
    assert len(pieces(got.tokenizer, "<|im_start|><|im_end|>")) == 2


def test_chats_that_a_template_cannot_write_are_refused(load, tokenizers, tmp_path):
    tokenizer = with_template(tokenizers["trained"], tmp_path / "own", REFUSING)
    found = r"1 of 30 samples cannot be written by the tokenizer's chat template \(.*rows\.jsonl, line .*no fours"
    with pytest.raises(UserError, match=f"^{found}.*: fix or remove them, or"):
        load(chats(), tokenizer=tokenizer)
    got = load(chats(), tokenizer=tokenizer, bad_samples="skip")
    assert (sum(map(len, got.splits.values())), len(got.notices)) == (29, 1)


def test_a_setting_that_changes_the_tokens_makes_a_new_cache(tmp_path, load, tokenizers):
    load(rows(), tokenizer=tokenizers["trained"])
    path = tmp_path / "rows.jsonl"
    changes = [{}, {"prompt_template": "{instruction}"}, {"prompt_template": "{instruction}\n{input}"}]
    changes += [{"train_on_inputs": True}, {"tokenizer": tokenizers["wordpiece"]}]
    for change in changes:
        load(path, **({"tokenizer": tokenizers["trained"]} | change))
    kept = cached(tmp_path)
    prints = {json.loads((folder / "facts.json").read_text())["fingerprint"] for folder in kept}
    assert len(prints) == len(kept) == len(changes)
    load(path, tokenizer=tokenizers["trained"], prompt_template="alpaca")
    assert len(cached(tmp_path)) == len(changes)


def test_another_chat_template_or_end_is_another_tokenizer(load, tokenizers, tmp_path):
    other = with_template(tokenizers["unigram"], tmp_path / "own", CHATML.replace("\n", " "))
    assert load(chats(), tokenizer=other).fingerprint != load(chats(), tokenizer=tokenizers["unigram"]).fingerprint
    other = with_template(tokenizers["unigram"], tmp_path / "other", CHATML, eos_token="<|im_end|>")
    ends = []
    for name in (tokenizers["unigram"], other):
        got = load(rows(), tokenizer=name)
        ends.append({got.tokenizer.convert_ids_to_tokens(ids[-1]) for ids in samples_of(got)})
    assert ends == [{"</s>"}, {"<|im_end|>"}]


def test_real_chinese_answers_come_back(tmp_path, load, instructions):
    rows = json.loads(instructions.read_text(encoding="utf-8"))[:500]
    path = write_rows(rows, tmp_path / "part.json")
    with pytest.raises(UserError, match=r"1 of 500 rows of .*part\.json cannot be used \(row 55: no output\): fix"):
        load(path)
    got = load(path, bad_samples="skip", max_length=8192)
    left_out, copied = got.notices
    assert left_out.endswith("are left out")
    assert copied.startswith("1 of 100 test texts are also training texts")
    tokenizer, found = got.tokenizer, []
    assert len(tokenizer) == 1024
    for split in SPLITS:
        for sample in got.splits[split]:
            *answer, end = [label for label in sample["labels"] if label != -100]
            assert end == tokenizer.eos_token_id
            prompt = sample["input_ids"][: sample["labels"].count(-100)]
            found.append(tuple(tokenizer.decode(ids, clean_up_tokenization_spaces=False) for ids in (prompt, answer)))
    real = [row for row in rows if row["output"].strip()]
    assert sorted(found) == sorted((prompt_text(row["instruction"], row["input"]), row["output"]) for row in real)
