"""Write what a trained language model answers: to one prompt, to a file of them, or in a chat.

python scripts/generate.py --model runs/13_lora/1 --prompt "Name three films." [--input TEXT]
python scripts/generate.py --model runs/13_lora/1 --prompts questions.jsonl --output answers.jsonl
python scripts/generate.py --model runs/13_lora/1 --chat
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

from fabric_ladder.advice import show_errors
from fabric_ladder.checkpoints.export import DTYPES, Arguments
from fabric_ladder.environment import write_whole
from fabric_ladder.errors import UserError
from fabric_ladder.tools.generation import (
    RAW,
    Generator,
    Question,
    answer_all,
    choose_template,
    load_language_model,
    read_questions,
)


def parse() -> argparse.Namespace:
    """Read the command line, and refuse what does not go together."""
    parser = Arguments(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", required=True, help="folder of a run, a model or an adapter, or a name on the Hub")
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--prompt", help="one instruction, answered on the terminal")
    task.add_argument("--prompts", type=Path, help="text file, or JSON (Lines) with instruction and input, or prompt")
    task.add_argument("--chat", action="store_true", help="talk on the terminal; an empty line ends it")
    parser.add_argument("--input", default="", help="what to do it with, for --prompt")
    template = parser.add_mutually_exclusive_group()
    template.add_argument("--prompt_template", help="how an instruction becomes a prompt; default: as in training")
    template.add_argument("--raw", action="store_true", help="give the prompt to the model as it is")
    parser.add_argument("--max_new_tokens", type=int, default=128, help="longest answer; default: 128")
    parser.add_argument("--temperature", type=float, default=0, help="0, the default, takes the likeliest token")
    parser.add_argument("--top_k", type=int, help="sample from so many of the likeliest tokens only")
    parser.add_argument("--top_p", type=float, help="sample from the likeliest tokens that make up this probability")
    parser.add_argument("--seed", type=int, help="of the sampling; default: 123")
    parser.add_argument("--accelerator", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--precision", choices=DTYPES, help="default: bf16-true on a GPU, 32-true on a CPU")
    parser.add_argument("--quantization", choices=("no", "nf4"), help="default: as the adapter was trained, else no")
    parser.add_argument("--output", type=Path, help="file for the answers to --prompts, in JSON Lines")
    parser.add_argument("--batch_size", type=int, default=8, help="prompts of --prompts at once; default: 8")
    found = parser.parse_args()
    for name in ("max_new_tokens", "batch_size", "top_k"):
        if (value := getattr(found, name)) is not None and value < 1:
            raise UserError(f"--{name} {value}: must be at least 1")
    if not 0 <= found.temperature < float("inf"):
        raise UserError(f"--temperature {found.temperature}: must be 0 or a positive number")
    if found.top_p is not None and not 0 < found.top_p <= 1:
        raise UserError(f"--top_p {found.top_p}: must be above 0 and at most 1")
    for name in ("top_k", "top_p", "seed"):
        if getattr(found, name) is not None and found.temperature == 0:
            raise UserError(f"--{name} needs sampling: add a --temperature above 0, say 0.7")
    if found.output and not found.prompts:
        raise UserError("--output keeps the answers to --prompts; a single answer and a chat are printed")
    if found.output and found.output.exists():
        raise UserError(f"{found.output} is there already and is left as it is: choose another --output")
    if found.output and not os.access(found.output.parent, os.W_OK):
        raise UserError(f"cannot write --output {found.output}: choose another")
    if found.input and not found.prompt:
        raise UserError("--input goes with --prompt")
    if found.accelerator == "cuda" and not torch.cuda.is_available():
        raise UserError("--accelerator cuda: PyTorch finds no CUDA GPU here; use --accelerator cpu")
    return found


def typed_lines() -> Iterator[str]:
    """Yield what is typed, until there is no more; the prompt sign is for a terminal only."""
    with suppress(EOFError):
        while True:
            yield input("> " if sys.stdin.isatty() else "")


if __name__ == "__main__":
    show_errors(smaller="a smaller --batch_size, --precision bf16-true or --quantization nf4")
    arguments = parse()
    questions = read_questions(arguments.prompts) if arguments.prompts else []
    on_gpu = arguments.accelerator != "cpu" and torch.cuda.is_available()
    dtype = DTYPES[arguments.precision or ("bf16-true" if on_gpu else "32-true")]

    ### 1 The model
    model, tokenizer = load_language_model(arguments.model, dtype, arguments.quantization)
    model.to("cuda" if on_gpu else "cpu")
    torch.backends.cuda.enable_cudnn_sdp(False)  # it builds a plan for each length, and each new token makes another
    template = choose_template(tokenizer, RAW if arguments.raw else arguments.prompt_template, arguments.chat)
    chosen = {"temperature": arguments.temperature, "top_k": arguments.top_k, "top_p": arguments.top_p}
    sampling = {name: value for name, value in chosen.items() if value is not None} if arguments.temperature else {}
    generator = Generator(model, tokenizer, template, arguments.max_new_tokens, sampling)
    torch.manual_seed(123 if arguments.seed is None else arguments.seed)

    ### 2 The answers
    if arguments.chat:
        generator.chat(typed_lines())
    elif not arguments.prompts:
        generator.answer([generator.tokens(Question(arguments.prompt, arguments.input))], stream=True)
    else:
        answers = answer_all(generator, [question for _, question in questions], arguments.batch_size)
        rows = [row | {"generated": answer} for (row, _), answer in zip(questions, answers, strict=True)]
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        if arguments.output:
            try:
                write_whole(arguments.output, text)
            except OSError as error:
                print(text, end="")  # the answers took long
                raise UserError(f"cannot write {arguments.output} ({error.strerror}): they are printed") from error
            text = f"Saved {len(answers)} answers in {arguments.output}\n"
        print(text, end="")
