"""Keys and flags of messages, and columns of chats: each is used, named or refused, and only answers are trained."""

import json
from itertools import chain

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.data_files import CHATML, chats, load_instructions, rows, samples_of, with_template

from fabric_ladder.data.instructions import encode_turns, prompt_text
from fabric_ladder.errors import UserError

TOOLS = (  # writes tools, calls of tools, reasoning and names
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}{% for m in messages %}"
    "<|im_start|>{{ m.role }}\n{% if m.name %}{{ m.name }}: {% endif %}{% if m.reasoning_content %}<think>"
    "{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}{% for call in m.tool_calls or [] %}<call>"
    "{{ call.function.name }}{{ call.function.arguments | tojson }}</call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PARAMETERS = {"type": "object", "properties": {"n": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"n": 7}'}}
LOAD = load_instructions, {"max_length": 4096}


@pytest.fixture
def save(tokenizers, tmp_path):
    """Save a tokenizer with a chat template."""
    return lambda template=TOOLS: with_template(tokenizers["trained"], tmp_path / "tokenizer", template)


def turn(role, content, **keys):
    return {"role": role, "content": content} | keys


def trained(tokenizer, ids, labels):
    """Return the trained texts, each with its end token."""
    kept = tokenizer.decode([label for label in labels if label != -100], clean_up_tokenization_spaces=False)
    return [text + "<|im_end|>" for text in kept.split("<|im_end|>")[:-1]]


def only_sample(got):
    """Return the whole text of the samples, which are all equal, and the trained texts."""
    ((ids, labels),) = samples_of(got).items()
    return got.tokenizer.decode(ids, clean_up_tokenization_spaces=False), trained(got.tokenizer, ids, labels)


def test_tools_calls_and_results_are_written_and_calls_are_trained(load, save, tmp_path):
    chat = [turn("user", "Which?"), turn("assistant", "I look.", tool_calls=[CALL]), turn("tool", "Ulm", name="look")]
    row = {"messages": [*chat, turn("assistant", "Ulm.")], "tools": [TOOL]}
    text, answers = only_sample(load([row] * 10, tokenizer=save()))
    assert answers == ['I look.<call>look{"n": 7}</call><|im_end|>', "Ulm.<|im_end|>"]
    assert text.startswith("<|im_start|>system\nTools: [{")
    assert "<|im_start|>tool\nlook: Ulm<|im_end|>" in text
    parsed = row | {"tools": json.dumps([TOOL])}
    pq.write_table(pa.Table.from_pylist([row] * 10), tmp_path / "rows.parquet")
    for other in ([parsed] * 10, tmp_path / "rows.parquet"):
        assert only_sample(load(other, tokenizer=save()))[1] == answers


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": [turn("user", "a"), turn("assistant", "", tool_calls=[CALL])]}, "message 2 has tool_calls that"),
        ({"messages": [turn("user", "a"), turn("assistant", "b")], "tools": [TOOL]}, "the template does not write"),
        ({"messages": [turn("user", "<image>"), turn("assistant", "b")], "images": ["a.png"]}, "images is "),
        ({"messages": [turn("user", "a"), turn("assistant", "b", weight=0)]}, "no answer from the assistant that"),
        ({"messages": [turn("user", "a"), turn("assistant", "b", weight=0.5)]}, "weight in message 2 is 0.5, not 0, 1"),
        ({"messages": [turn("user", [{"type": "image", "url": "a"}]), turn("assistant", "b")]}, "content in message"),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_written_are_refused(load, save, row, reason):
    with pytest.raises(UserError, match=f"^nothing is left: 10 of 10 .*line 1?[0-9]: {reason}"):
        load([row] * 10, tokenizer=save(CHATML))


def besides_copies(datasets):
    """Return the notices without those about equal chats in two splits."""
    return [line for line in datasets.notices if "also training texts" not in line]


@pytest.mark.parametrize("train_on_inputs", [False, True])
def test_masked_answers_are_context(load, save, train_on_inputs):
    chat = [turn("user", "a"), turn("assistant", "WRONG", weight=0), turn("user", "No."), turn("assistant", "b")]
    chat[2:2] = [turn("assistant", "WRONG", **flag) for flag in ({"train": False}, {"loss": 0}, {"training": "false"})]
    got = load([{"messages": chat}] * 10, tokenizer=save(), train_on_inputs=train_on_inputs)
    text, answers = only_sample(got)
    assert "WRONG" in text
    assert not any("WRONG" in answer for answer in answers)
    assert train_on_inputs or answers == ["b<|im_end|>"]
    assert besides_copies(got) == []


def test_other_roles_parts_and_chats_that_begin_with_the_assistant_are_read(load, save):
    parts = [{"type": "text", "text": "Be "}, "brief."]
    chat = [turn("developer", parts), turn("model", "Hi."), turn("user", "a"), turn("assistant", "\u200b")]
    text, answers = only_sample(load([{"messages": chat}] * 10, tokenizer=save()))
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>assistant\nHi.<|im_end|>")
    assert answers == ["Hi.<|im_end|>", "\u200b<|im_end|>"]
    said = [{"from": "gpt", "value": "Hi."}, {"from": "human", "value": "a"}]
    said += [{"from": "function_call", "value": json.dumps({"name": "look", "arguments": {"n": 7}})}]
    said += [{"from": "observation", "value": "Ulm"}, {"from": "gpt", "value": "b", "thinking": "So."}]
    _, answers = only_sample(load([{"conversations": said}] * 10, tokenizer=save()))
    call = '<call>look{"n": 7}</call><|im_end|>'
    assert answers == ["Hi.<|im_end|>", call, "<think>So.</think>b<|im_end|>"]


def test_columns_and_keys_that_are_not_used_are_named(load, save, tokenizers):
    many = [{"messages": [turn("user", "<image>", id=1, train=True), turn("assistant", "b")], "source": "x"}] * 10
    assert besides_copies(load(many, tokenizer=save())) == [
        "Columns, and keys of messages, that are not used: source, train (user)",
        "10 of 10 samples have <image>, <video> or <audio> in a text, which is trained as a text",
        "The chat template does not write these keys of messages: id (user)",
    ]
    named = [row | {"category": "x", "id": "", "late": None} for row in rows()]
    line = "Columns, and keys of messages, that are not used: category"
    assert load(named, tokenizer=tokenizers["trained"]).notices == [line]


def test_the_history_of_an_instruction_is_its_earlier_turns(load, tokenizers):
    turns = [["Who?", "Ann."], ["Where?", "Ulm."]]
    got = load([row | {"history": turns if row["input"] else []} for row in rows()], tokenizer=tokenizers["trained"])
    tokenizer, found = got.tokenizer, samples_of(got)
    for row in rows():
        prompt = prompt_text(row["instruction"], row["input"])
        parts = encode_turns(tokenizer, [*(turns if row["input"] else []), [prompt, row["output"]]], "{instruction}")
        texts = encode_turns(tokenizer, turns, None) if row["input"] else []
        parts = [*texts, *parts[-2:]]
        labels = [ids if number % 2 else [-100] * len(ids) for number, ids in enumerate(parts)]
        assert found[(*chain(*parts),)] == [*chain(*labels)]
    wrong = [row | {"history": "of a town"} for row in rows()]
    with pytest.raises(UserError, match=r'history is "of a town", not a list of pairs \[question, answer\]: rename'):
        load(wrong, tokenizer=tokenizers["trained"])


def test_a_column_of_maps_is_read(load, tokenizers, tmp_path):
    table = pa.Table.from_pylist(rows())
    maps = pa.array([[("a", "b")]] * len(table), pa.map_(pa.string(), pa.string()))
    pq.write_table(table.append_column("more", maps), tmp_path / "maps.parquet")
    messages = [[[*turn.items()] for turn in chat["messages"]] for chat in chats()]
    spoken = pa.array(messages, pa.list_(pa.map_(pa.string(), pa.string())))
    pq.write_table(pa.table({"messages": spoken}), tmp_path / "chats.parquet")
    for name, content in (("maps", rows()), ("chats", chats())):
        got, same = (load(each, tokenizer=tokenizers["trained"]) for each in (tmp_path / f"{name}.parquet", content))
        assert got.fingerprint == same.fingerprint
        assert got.notices == ["Columns, and keys of messages, that are not used: more"] * (name == "maps")
