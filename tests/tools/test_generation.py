"""Answers of a trained language model equal those of transformers, on the terminal, from a file and in a chat."""

import io
import json
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from lightning import Fabric
from support.export import run_here, tiny, with_adapter, words_tokenizer
from support.helpers import ROOT, VOCABULARY, settings_for, tiny_model, token_datasets
from transformers import BloomConfig, BloomForCausalLM

from fabric_ladder import UserError, build_dataloaders
from fabric_ladder.checkpoints.save import save
from fabric_ladder.data.instructions import prompt_text, prompt_tokens
from fabric_ladder.data.tokens import load_tokenizer
from fabric_ladder.tools.generation import (
    CHAT,
    RAW,
    Generator,
    Question,
    answer_all,
    choose_template,
    load_language_model,
    read_questions,
)

SCRIPT = ROOT / "scripts" / "generate.py"
TEMPLATE = "word10 {instruction}\n{input}\nword11"
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ 'word12' if m.role == 'user' else 'word13' }} {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}word13{% endif %}"
)
LONG = ("--max_new_tokens", "12")


def language_model(kind="bloom"):
    """Return a model with large weights, so that its answers depend on the prompt."""
    model = tiny_model("llama-lm")
    if kind == "bloom":
        torch.manual_seed(0)
        sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "n_layer": 2, "n_head": 2}
        model = BloomForCausalLM(BloomConfig(**sizes, pad_token_id=0, use_cache=False))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=1 if "embed" in name else 0.5)
    return model


def saved(folder, model, **more):
    """Save a model as a run does, with the template of its training."""
    fabric = Fabric(accelerator="cpu", devices=1)
    datasets = token_datasets()
    datasets.tokenizer = words_tokenizer(**more)
    data = build_dataloaders(fabric, datasets, settings_for(folder))[0].dataset
    folder.mkdir()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model, optimizer = fabric.setup(model, torch.optim.SGD(weights, lr=0.1))
    save(fabric, "consolidated", folder, model, optimizer, data, from_scratch=True)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return SimpleNamespace(
        whole=saved(folder / "whole", language_model("llama"), prompt_template=TEMPLATE),
        adapter=saved(folder / "adapter", with_adapter(language_model(), "bloom-lm"), prompt_template=TEMPLATE),
        chat=saved(folder / "chat", language_model(), chat_template=CHAT_TEMPLATE),
        classifier=saved(folder / "classifier", tiny("bloom")),
    )


def generator(folder, template=RAW, tokens=12, **sampling):
    model, tokenizer = load_language_model(str(folder), torch.float32, None)
    return Generator(model, tokenizer, template, tokens, sampling)


def by_transformers(ours, ids, tokens=12):
    """Return the text that transformers generates after one prompt, without padding."""
    out = ours.model.generate(
        input_ids=torch.tensor([ids]), max_new_tokens=tokens, do_sample=False, eos_token_id=1, pad_token_id=0
    )
    return ours.tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True)


@pytest.mark.parametrize("run", ["whole", "adapter"])
def test_batches_padded_on_the_left_give_the_answers_of_single_prompts(runs, run):
    """Llama counts positions and BLOOM biases distances. Padding must change neither."""
    ours = generator(getattr(runs, run), tokens=16)
    torch.manual_seed(3)
    prompts = [torch.randint(4, VOCABULARY, (length,)).tolist() for length in (1, 17, 4, 9, 2, 30)]
    together, single = ours.answer(prompts), [ours.answer([prompt])[0] for prompt in prompts]
    assert together == single
    assert len({tuple(answer) for answer in together}) > 3, "the answers depend on the prompts"
    for prompt, answer in zip(prompts, together, strict=True):
        assert ours.text(answer) == by_transformers(ours, prompt, 16)


def test_an_answer_ends_at_the_end_token(runs):
    ours = generator(runs.whole, tokens=40)
    torch.manual_seed(0)
    answers = ours.answer([torch.randint(4, VOCABULARY, (5,)).tolist() for _ in range(64)])
    ended = [answer for answer in answers if answer[-1] == 1]
    assert ended
    assert len(ended) < len(answers)
    assert all(answer.index(1) == len(answer) - 1 for answer in ended)
    assert all(len(answer) == 40 for answer in answers if answer[-1] != 1)
    assert "<end>" not in ours.text(ended[0])


def test_prompts_are_tokenised_as_in_training(runs):
    tokenizer = load_tokenizer(str(runs.adapter / "adapter"))
    assert choose_template(tokenizer, None, chat=False) == TEMPLATE, "it came along with the tokenizer"
    ours = generator(runs.adapter, TEMPLATE)
    question = Question("word7", "word8 word9")
    trained = prompt_tokens(tokenizer, [prompt_text("word7", "word8 word9", TEMPLATE)])[0]
    assert ours.tokens(question) == trained == [10, 7, 8, 9, 11]
    assert ours.tokens(Question("word7")) == [10, 7, 11]
    assert generator(runs.adapter, RAW).tokens(Question("word7")) == [7]
    chats = load_tokenizer(str(runs.chat / "model"))
    assert choose_template(chats, None, chat=False) == CHAT
    assert generator(runs.chat, CHAT).tokens(Question("word7")) == [12, 7, 13]
    assert generator(runs.chat, CHAT).tokens(Question("word7", "word8", "word6")) == [13, 6, 12, 7, 8, 13]
    assert choose_template(words_tokenizer(), None, chat=False) == RAW
    assert ours.tokens(Question("word7", system="word6")) == [6, 10, 7, 11], "as a row with a system text in training"
    with pytest.raises(UserError, match="a system text needs a template"):
        generator(runs.adapter, RAW).tokens(Question("word7", system="word6"))
    with pytest.raises(UserError, match="an input needs a template"):
        generator(runs.adapter, RAW).tokens(Question("word7", "word8"))


def test_a_chat_template_that_refuses_a_chat_is_explained(runs):
    ours = generator(runs.whole, TEMPLATE)
    ours.tokenizer.chat_template = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(UserError, match=r"chat template cannot write this chat \(TemplateError: System role not supp"):
        ours.chat_tokens([{"role": "system", "content": "word7"}])


def test_one_prompt_is_streamed_to_the_terminal(runs, monkeypatch, capsys):
    ours = generator(runs.adapter, TEMPLATE)
    expected = by_transformers(ours, ours.tokens(Question("word7", "word9")))
    run_here(monkeypatch, SCRIPT, "--model", runs.adapter, "--prompt", "word7", "--input", "word9", *LONG)
    assert capsys.readouterr().out == expected + "\n"
    raw = by_transformers(ours, [7])
    run_here(monkeypatch, SCRIPT, "--model", runs.adapter / "adapter", "--prompt", "word7", "--raw", *LONG)
    assert capsys.readouterr().out == raw + "\n"


def test_a_file_of_prompts_becomes_a_file_of_answers(runs, tmp_path, monkeypatch, capsys):
    ours = generator(runs.whole, TEMPLATE)
    rows = [{"instruction": f"word{10 + number} " * number, "input": "word5" if number % 2 else "", "output": "known"}
            for number in range(1, 12)]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    (tmp_path / "rows.json").write_text(json.dumps([{"prompt": row["instruction"]} for row in rows]))
    (tmp_path / "rows.txt").write_text("\ufeffword7\n\nword8 word9\n")
    (tmp_path / "rows.csv").write_text('question,context\nword7,"word8, word9"\n')
    assert [question for _, question in read_questions(tmp_path / "rows.csv")] == [Question("word7", "word8, word9")]
    monkeypatch.chdir(tmp_path)
    arguments = ("--model", runs.whole, "--prompts", "rows.jsonl", "--output", "out.jsonl", "--batch_size", "4", *LONG)
    run_here(monkeypatch, SCRIPT, *arguments)
    assert "Saved 11 answers in out.jsonl" in capsys.readouterr().out
    hiding = ("--prompt_template", "Q: {instruction}", "--output", "hidden.jsonl")
    run_here(monkeypatch, SCRIPT, "--model", runs.whole, "--prompts", "rows.jsonl", *hiding, *LONG)
    assert "Warning: 6 of 11 prompts have an input that the template 'Q: {instruction}' does" in capsys.readouterr().err
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    single = [by_transformers(ours, ours.tokens(Question(row["instruction"], row["input"]))) for row in rows]
    assert found == [row | {"generated": text} for row, text in zip(rows, single, strict=True)]
    questions = [question for _, question in read_questions(tmp_path / "rows.json")]
    assert questions == [Question(row["instruction"]) for row in rows]
    lines = [question for _, question in read_questions(tmp_path / "rows.txt")]
    assert lines == [Question("word7"), Question("word8 word9")]
    expected = [by_transformers(ours, ours.tokens(question)) for question in questions]
    assert dict(answer_all(ours, questions, 3)) == dict(enumerate(expected))


def test_answers_written_before_ctrl_c_are_saved(runs, tmp_path, monkeypatch, capsys):
    rows = [{"prompt": "word7 " * number} for number in range(1, 6)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    batches, answer = [], Generator.answer

    def interrupted(self, prompts):
        batches.append(prompts)
        if len(batches) > 2:
            raise KeyboardInterrupt
        return answer(self, prompts)

    monkeypatch.setattr(Generator, "answer", interrupted)
    monkeypatch.chdir(tmp_path)
    arguments = ("--model", runs.whole, "--prompts", "rows.jsonl", "--output", "out.jsonl", "--batch_size", "2", *LONG)
    with pytest.raises(KeyboardInterrupt):
        run_here(monkeypatch, SCRIPT, *arguments)
    assert "Saved 4 answers in out.jsonl" in capsys.readouterr().out
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in found] == [row["prompt"] for row in rows[1:]]


def test_sampling_repeats_with_its_seed_and_differs_with_another(runs):
    def sampled(seed, **how):
        ours = generator(runs.whole, tokens=10, **({"temperature": 1.5} | how))
        torch.manual_seed(seed)
        return ours.answer([[7, 8, 9], [10]])

    assert sampled(1) == sampled(1)
    assert sampled(1) != sampled(2)
    greedy = generator(runs.whole, tokens=10).answer([[7, 8, 9], [10]])
    assert sampled(1, top_k=1) == greedy
    assert sampled(1, top_p=1e-6) == greedy
    assert sampled(1) != greedy


def chat_of(ours, lines):
    """Return the expected answers of a chat, each from the tokens of all lines before."""
    history, messages, answers = [], [], []
    for line in lines:
        if ours.template == CHAT:
            messages.append({"role": "user", "content": line})
            prompt = ours.chat_tokens(messages)
        else:
            prompt = [*history, *ours.tokens(Question(line))]
        (answer,) = ours.answer([prompt])
        answers.append(ours.text(answer))
        messages.append({"role": "assistant", "content": answers[-1]})
        history = [*prompt, *answer, *([] if answer[-1] == 1 else [1])]
    return answers


@pytest.mark.parametrize("run", ["chat", "adapter"])
def test_a_chat_continues_from_all_earlier_lines(runs, monkeypatch, capsys, run):
    folder, lines = getattr(runs, run), ["word7 word8", "word9", "word7 word8"]
    expected = chat_of(generator(folder, CHAT if run == "chat" else TEMPLATE), lines)
    assert expected[0] != expected[2]
    given = "\n".join(lines) + "\n\nword5\n"  # lines after the empty line get no answer
    monkeypatch.setattr(sys, "stdin", io.StringIO(given))
    run_here(monkeypatch, SCRIPT, "--model", folder, "--chat", *LONG)
    assert capsys.readouterr().out.splitlines() == expected


REFUSED = {
    "a classifier": (["--model", "{classifier}", "--prompt", "word7"],
                     r"classifier classifies \(BloomForSequenceClassification\) and writes no text"),
    "nothing to do": (["--model", "{whole}"], "one of the arguments --prompt --prompts --chat is required"),
    "too long": (["--model", "{whole}", "--prompt", "word7", "--max_new_tokens", "2046"],
                 "3 tokens of prompt and --max_new_tokens 2046 are beyond the model's 2048 positions"),
    "no such file": (["--model", "{whole}", "--prompts", "none.txt"], r"none\.txt cannot be read as text"),
    "no instruction": (["--model", "{whole}", "--prompts", "odd.jsonl"], r"odd\.jsonl, line 2: expected texts named"),
    "output is there": (["--model", "{whole}", "--prompts", "good.txt", "--output", "good.txt"],
                        "good.txt exists; choose another name"),
    "greedy with top_k": (["--model", "{whole}", "--prompt", "word7", "--top_k", "4"], "--top_k needs sampling"),
    "an input that the prompt lacks": (["--model", "{whole}", "--prompt", "word7", "--input", "word8",
                                        "--prompt_template", "Q: {{instruction}}"],
                                       r"--input: the prompt template 'Q: \{instruction\}' has no \{input\}"),
    "no such device": (["--model", "{whole}", "--prompt", "word7", "--accelerator", "mps"],
                       "finds no such device"),
    "no such model": (["--model", "no/such", "--prompt", "word7"], "cannot load the model 'no/such'"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_in_one_line(runs, tmp_path, monkeypatch, capsys, case):
    (tmp_path / "odd.jsonl").write_text('{"prompt": "a"}\n{"text": "b"}')
    (tmp_path / "good.txt").write_text("word7\n")
    before = sorted(tmp_path.iterdir())
    arguments, pattern = REFUSED[case]
    folders = {name: str(folder) for name, folder in vars(runs).items()}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises((UserError, SystemExit)) as error:
        run_here(monkeypatch, SCRIPT, *(argument.format(**folders) for argument in arguments))
    line = str(error.value) if isinstance(error.value, UserError) else capsys.readouterr().err
    assert re.search(pattern, line)
    assert "\n" not in line.rstrip()
    assert sorted(tmp_path.iterdir()) == before


def test_histories_and_chats_of_a_file_are_prompts_as_in_training(runs, tmp_path):
    rows = [{"instruction": "word7", "history": [["word5", "word6"]]}]
    turns = [{"role": "user", "content": "word5"}, {"role": "assistant", "content": "word6", "weight": 0}]
    asked = [*turns, {"role": "user", "content": [{"type": "text", "text": "word7"}]}]
    rows.append({"messages": [*asked, {"role": "assistant", "content": "word9"}]})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (_, history), (_, chat) = read_questions(tmp_path / "rows.jsonl")
    chatting = generator(runs.chat, CHAT)
    assert chatting.tokens(history) == chatting.tokens(chat)
    plain = [
        {"role": role, "content": f"word{number}"} for role, number in (("user", 5), ("assistant", 6), ("user", 7))
    ]
    assert chatting.tokens(chat) == chatting.chat_tokens(plain)
    with pytest.raises(UserError, match="messages need the chat template"):
        generator(runs.adapter, RAW).tokens(chat)
    with pytest.raises(UserError, match="a history needs a template"):
        generator(runs.adapter, RAW).tokens(history)
