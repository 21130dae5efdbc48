"""Chats in the templates of published models: only the assistant's words and the token after them are trained."""

from dataclasses import dataclass
from functools import partial
from itertools import groupby

import pytest
from support.data_files import CHATML, load_instructions, samples_of, with_template, write_rows
from support.data_files import rows as instruction_rows
from support.helpers import ROOT
from transformers import AutoTokenizer

from fabric_ladder.checkpoints.save import end_tokens
from fabric_ladder.data.chats import end_pattern, write_chat
from fabric_ladder.data.instructions import prompt_text
from fabric_ladder.errors import UserError

TEMPLATES = ROOT / "tests" / "support" / "fixtures" / "chat_templates"
EMPTY_THOUGHT = "<think>\n\n</think>\n\n"


@dataclass
class Family:
    """A template with the tokens that its models have.

    Attributes:
        end: The token after an answer.
        more: Other special tokens.
        lead: What the model writes before the words of an answer.
        last: `lead` and `end` of the last answer, if they differ.
        system: Whether the template has system messages.
        prompted: Whether an answer begins as the generation prompt does.
    """

    end: str
    more: tuple[str, ...] = ()
    lead: str = ""
    last: tuple[str, str] | None = None
    system: bool = True
    prompted: bool = True

    def trained(self, answers):
        """Return the text that is trained for each answer."""
        lead, end = self.last or (self.lead, self.end)
        return [*(self.lead + words + self.end for words in answers[:-1]), lead + answers[-1] + end]


IM = ("<|im_start|>", "<|endoftext|>")
FAMILIES = {
    "chatml": Family("<|im_end|>", IM),
    "deepseek-r1-distill": Family("<｜end▁of▁sentence｜>", ("<｜User｜>", "<｜Assistant｜>"), prompted=False),
    "gemma-2": Family("<end_of_turn>", ("<start_of_turn>",), system=False),
    "gemma-3": Family("<end_of_turn>", ("<start_of_turn>",)),
    "glm-4.5": Family("<|user|>", ("[gMASK]", "<sop>", "<|assistant|>", "<|system|>"), "\n<think></think>\n"),
    "gpt-oss": Family(
        "<|end|>",
        ("<|start|>", "<|channel|>", "<|message|>", "<|return|>"),
        "<|channel|>final<|message|>",
        ("<|channel|>final<|message|>", "<|return|>"),
    ),
    "llama-3.1": Family("<|eot_id|>", ("<|start_header_id|>", "<|end_header_id|>")),
    "mistral-v0.3": Family("</s>", ("[INST]", "[/INST]"), " ", system=False),
    "phi-3": Family("<|end|>", ("<|user|>", "<|assistant|>", "<|system|>", "<|endoftext|>")),
    "phi-4": Family("<|im_end|>", (*IM, "<|im_sep|>")),
    "qwen-2.5": Family("<|im_end|>", IM),
    "qwen-3": Family("<|im_end|>", (*IM, "<think>", "</think>"), "", (EMPTY_THOUGHT, "<|im_end|>")),
    "smollm-3": Family("<|im_end|>", IM),
}  # fmt: skip
LOAD = load_instructions, {"max_length": 8192}


@pytest.fixture
def save(tokenizers, tmp_path):
    """Save a tokenizer with a family's template and tokens."""

    def save(name, kind="trained"):
        tokens = [FAMILIES[name].end, *FAMILIES[name].more]
        special = {"additional_special_tokens": tokens, "bos_token": "<s>", "eos_token": "</s>"}
        template = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
        return with_template(tokenizers[kind], tmp_path / "tokenizer", template, **special)

    return save


def conversations(system, count=12):
    """Return chats of one to three answers, all different."""
    made = []
    for index in range(count):
        chat = [{"role": "system", "content": f"Be brief {index}."}] if system else []
        for turn in range(1 + index % 3):
            chat.append({"role": "user", "content": f"Name {index}, {turn}."})
            chat.append({"role": "assistant", "content": f"It is <b>{index}</b>,\nthen {turn}."})
        made.append(chat)
    return made


def answers_of(chat):
    return [message["content"] for message in chat if message["role"] == "assistant"]


def trained_texts(tokenizer, ids, labels):
    """Return the text of each run of trained tokens."""
    pairs = zip(ids, labels, strict=True)
    runs = [[label for _, label in run] for trained, run in groupby(pairs, lambda pair: pair[1] != -100) if trained]
    return [tokenizer.decode(run, clean_up_tokenization_spaces=False) for run in runs]


def decoded(got):
    """Return the trained texts of all samples by their whole text."""
    return {
        got.tokenizer.decode(ids, clean_up_tokenization_spaces=False): trained_texts(got.tokenizer, ids, labels)
        for ids, labels in samples_of(got).items()
    }


@pytest.mark.parametrize("name", FAMILIES)
def test_the_words_and_the_end_token_of_each_answer_are_trained(load, save, tmp_path, name):
    family = FAMILIES[name]
    system, replied = family.system, [*conversations(False)[1], {"role": "user", "content": "Thanks."}]
    chosen = conversations(system)
    got = load([{"messages": chat} for chat in [*chosen, replied]], tokenizer=save(name))
    write = partial(got.tokenizer.apply_chat_template, tokenize=False)
    tokens = partial(got.tokenizer, add_special_tokens=False)
    appended = "<|user|>" if name == "glm-4.5" else ""
    expected = {write(chat) + appended: family.trained(answers_of(chat)) for chat in chosen}
    # an answer that the user replies to is not written as the last one
    expected[write(replied)] = [family.lead + words + family.end for words in answers_of(replied)]
    assert decoded(got) == expected
    assert {*samples_of(got)} == {tuple(tokens(text)["input_ids"]) for text in expected}
    assert got.notices == []
    last = family.last[1] if family.last else family.end
    stops = got.tokenizer.convert_tokens_to_ids([family.end, last, "</s>"])
    assert {*end_tokens(got.tokenizer, None)} == {*stops}, "generation stops at the end of an answer"
    got.tokenizer.save_pretrained(tmp_path / "saved")
    assert end_tokens(AutoTokenizer.from_pretrained(tmp_path / "saved"), None) == end_tokens(got.tokenizer, None)
    for chat in chosen if family.prompted else ():
        prompt = tuple(tokens(write(chat[: 1 + system], add_generation_prompt=True))["input_ids"])
        assert any(ids[: len(prompt)] == prompt for ids in samples_of(got)), "generation uses the prompts of training"


@pytest.mark.parametrize(
    ("name", "reason"),
    [("gemma-2", "System role not supported"), ("mistral-v0.3", "the template leaves out message 1, from the system")],
)
def test_a_template_without_system_messages_is_refused_with_the_remedy(load, save, name, reason):
    rows = [{"messages": chat} for chat in conversations(system=True)]
    line = rf"{reason}; put the system message into the first message of the user"
    with pytest.raises(UserError, match=rf"nothing is left: 12 of 12 samples cannot be written .*line \d+: {line};"):
        load(rows, tokenizer=save(name))


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("qwen-3", lambda thought, words, last: (f"<think>\n{thought}\n</think>\n\n" if last else "") + words),
        ("glm-4.5", lambda thought, words, last: f"\n<think>{thought if last else ''}</think>\n{words}"),
        ("deepseek-r1-distill", lambda thought, words, last: words),
        ("smollm-3", lambda thought, words, last: f"<think>{thought}</think>{words}"),
    ],
)
def test_thoughts_are_trained_where_the_template_writes_them(load, save, name, kept):
    thought = "Even numbers are round."
    chosen = conversations(system=False)
    rows = [[turn | {"content": f"<think>{thought}</think>" * (turn["role"] == "assistant") + turn["content"]}
             for turn in chat] for chat in chosen]  # fmt: skip
    got = load([{"messages": chat} for chat in rows], tokenizer=save(name))
    expected = []
    for answers in map(answers_of, chosen):
        texts = [kept(thought, words, number == len(answers)) for number, words in enumerate(answers, 1)]
        expected.append([text + FAMILIES[name].end for text in texts])
    assert sorted(decoded(got).values()) == sorted(expected)
    lost = sum(any(thought not in text for text in texts) for texts in expected)
    notice = " of 12 samples have words of the assistant, such as <think>…</think>, that the chat template leaves out"
    assert got.notices == [f"{lost}{notice}"] * bool(lost)


TURNS = {"u": {"role": "user", "content": "Name it."}, "a": {"role": "assistant", "content": "It is."}}


def test_messages_of_one_role_in_a_row_are_separate_turns(load, save):
    got = load([{"messages": [*(TURNS[role] for role in "uauuaa")]}] * 10, tokenizer=save("qwen-3"))
    assert [*decoded(got).values()] == [["It is.<|im_end|>"] * 3]


@pytest.mark.parametrize("name", ["llama-3.1", "chatml"])
def test_the_first_token_is_written_once(load, save, name):
    """The Unigram tokenizer adds <s> and </s>; the template of Llama writes <s> too."""
    got = load([{"messages": chat} for chat in conversations(system=False)], tokenizer=save(name, "unigram"))
    first, last = got.tokenizer.convert_tokens_to_ids(["<s>", "</s>"])
    for ids in samples_of(got):
        assert ids.count(first) == (name != "chatml")
        assert ids.count(last) == 0


def test_a_prompt_and_a_completion_of_messages_are_a_chat_whose_completion_is_trained(load, save, tmp_path):
    chosen = conversations(system=True)
    rows = [{"prompt": chat[:-1], "completion": chat[-1:]} for chat in chosen]
    got = load(write_rows(rows, tmp_path / "rows.parquet"), tokenizer=save("llama-3.1"))
    write = partial(got.tokenizer.apply_chat_template, tokenize=False)
    assert decoded(got) == {write(chat): [f"{chat[-1]['content']}<|eot_id|>"] for chat in chosen}
    rows[0]["completion"] = [{"role": "user", "content": "Name it."}]
    rows[1]["prompt"] = "Name it."
    found = r"line 1: no answer from the assistant; line 2: prompt is \"Name it\.\", not a list of messages"
    with pytest.raises(UserError, match=found):
        load(rows, tokenizer=save("llama-3.1"))


def test_a_system_column_is_the_first_message_of_a_chat_without_one(load, save):
    chosen, column = conversations(system=True), "system_prompt"
    rows = [{"messages": chat[1:], column: chat[0]["content"]} for chat in chosen[:6]]
    rows += [{"messages": chat, column: "Be long."} for chat in chosen[6:9]]
    rows += [{"messages": chat[1:], column: ""} for chat in chosen[9:]]
    whole = [{"messages": chat[position > 8 :]} for position, chat in enumerate(chosen)]
    assert load(rows, tokenizer=save("phi-4")).fingerprint == load(whole, tokenizer=save("phi-4")).fingerprint
    split = [{"prompt": chat[1:-1], "completion": chat[-1:], column: chat[0]["content"]} for chat in chosen]
    same = [{"prompt": chat[:-1], "completion": chat[-1:]} for chat in chosen]
    assert load(split, tokenizer=save("phi-4")).fingerprint == load(same, tokenizer=save("phi-4")).fingerprint


def test_a_system_column_next_to_an_instruction_is_the_start_of_its_prompt(load, tokenizers):
    content = [row | {"system": "Be brief." if number % 2 else ""} for number, row in enumerate(instruction_rows(), 1)]
    got = load(content, tokenizer=tokenizers["trained"])
    prompts = {prompt_text(row["instruction"], row["input"]): row["system"] for row in content}
    for ids, labels in samples_of(got).items():
        text = got.tokenizer.decode([token for token, label in zip(ids, labels, strict=True) if label == -100])
        system = prompts[text.removeprefix("Be brief.\n\n")]
        assert text.startswith("Be brief.\n\n") == bool(system)


PLAIN = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


def test_a_template_without_end_tokens_ends_the_last_answer_with_the_end_of_text(load, save, tokenizers, tmp_path):
    template = PLAIN + "{% if add_generation_prompt %}assistant:{% endif %}"
    tokenizer = with_template(tokenizers["trained"], tmp_path / "plain", template)
    chosen = conversations(system=True)
    got = load([{"messages": chat} for chat in chosen], tokenizer=tokenizer)
    expected = [[f" {words}" for words in answers_of(chat)] for chat in chosen]
    assert sorted(decoded(got).values()) == sorted([*words[:-1], f"{words[-1]}\n<|endoftext|>"] for words in expected)


TWICE = "{{ message.content }}{% if message.role == 'assistant' %}{{ message.content }}{% endif %}"

BAD_TEMPLATES = {
    "leaves out message 1, from the user": CHATML.replace("message.content", "message.content if loop.last"),
    "does not write message 2 exactly once": CHATML.replace("{{ message.content }}", TWICE),
    "changes other messages with message 2": "{{ messages[-1].content[:1] }}" + CHATML,
}


@pytest.mark.parametrize("reason", BAD_TEMPLATES)
def test_a_chat_that_cannot_be_written_exactly_is_refused(tokenizers, reason):
    tokenizer = AutoTokenizer.from_pretrained(tokenizers["trained"])
    tokenizer.chat_template = BAD_TEMPLATES[reason]
    with pytest.raises(ValueError, match=f"^the template {reason}$"):
        write_chat([TURNS["u"], TURNS["a"]], tokenizer, end_pattern(tokenizer))
