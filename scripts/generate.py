"""Generate text with a trained language model: for one prompt, for a file of prompts, or in a chat.

python scripts/generate.py --model runs/13_lora/1 --prompt "Name three films." [--input TEXT]
python scripts/generate.py --model runs/13_lora/1 --prompts questions.jsonl --output answers.jsonl
python scripts/generate.py --model runs/13_lora/1 --chat
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from fabric_ladder.errors import UserError
from fabric_ladder.settings import LARGEST_SEED
from fabric_ladder.tools.arguments import PRECISIONS, Arguments, at_least_1, new_path, write_new


def parse() -> argparse.Namespace:
    """Read the command line, and refuse options that contradict each other."""
    parser = Arguments(__doc__)
    parser.add_argument("--model", required=True, help="folder of a run, a model or an adapter, or a name on the Hub")
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--prompt", help="one instruction; the answer is printed")
    task.add_argument("--prompts", type=Path, help="text, CSV, JSON or Parquet with instruction and input, or prompt")
    task.add_argument("--chat", action="store_true", help="chat in the terminal; an empty line ends it")
    parser.add_argument("--input", default="", help="input of the instruction, for --prompt")
    parser.add_argument("--system", default="", help="system text, for --prompt and --chat")
    template = parser.add_mutually_exclusive_group()
    template.add_argument("--prompt_template", help="turns an instruction into a prompt; default: as in training")
    template.add_argument("--raw", action="store_true", help="give the prompt to the model without a template")
    parser.add_argument("--max_new_tokens", type=at_least_1, default=128, help="longest answer; default: 128")
    parser.add_argument("--temperature", type=float, default=0, help="of sampling; 0 (default) decodes greedily")
    parser.add_argument("--top_k", type=at_least_1, help="sample from the K most likely tokens only")
    parser.add_argument("--top_p", type=float, help="sample from the most likely tokens with this total probability")
    parser.add_argument("--seed", type=int, help="of sampling; default: 123")
    parser.add_argument("--accelerator", choices=("auto", "cuda", "mps", "cpu"), default="auto")
    parser.add_argument("--precision", choices=PRECISIONS, help="default: bf16-true on a GPU, 32-true on a CPU")
    parser.add_argument("--quantization", choices=("no", "nf4"), help="default: as the adapter was trained, else no")
    parser.add_argument("--output", type=new_path, help="file for the answers to --prompts, in JSON Lines")
    parser.add_argument("--batch_size", type=at_least_1, help="prompts of --prompts per batch; default: 8")
    found = parser.parse_args()
    if found.temperature and not 1e-3 <= found.temperature < math.inf:
        parser.error(f"--temperature {found.temperature}: must be 0, or a number from 0.001 on")
    if not 0 <= (found.seed or 0) <= LARGEST_SEED:
        parser.error(f"--seed {found.seed}: must be between 0 and {LARGEST_SEED:,}")
    if found.top_p is not None and not 0 < found.top_p <= 1:
        parser.error(f"--top_p {found.top_p}: must be above 0 and at most 1")
    for name in ("top_k", "top_p", "seed"):
        if getattr(found, name) is not None and found.temperature == 0:
            parser.error(f"--{name} needs sampling; add a --temperature above 0, e.g. 0.7")
    if found.output and not found.prompts:
        parser.error("--output stores the answers to --prompts; other answers are printed")
    if found.batch_size and not found.prompts:
        parser.error("--batch_size divides the prompts of --prompts; leave it out")
    if found.input and not found.prompt:
        parser.error("--input needs --prompt")
    if found.system and found.prompts:
        parser.error("--system: a file of --prompts has a column `system`; leave it out")
    return found


def typed_lines() -> Iterator[str]:
    """Yield the lines of standard input; a terminal gets a prompt sign."""
    with suppress(EOFError):
        while True:
            yield input("> " if sys.stdin.isatty() else "")


def main(arguments: argparse.Namespace) -> None:
    """Load the model and answer."""
    import torch

    from fabric_ladder.checkpoints.export import DTYPES
    from fabric_ladder.data.instructions import hides_input
    from fabric_ladder.environment import find_device
    from fabric_ladder.techniques.advice import explain_errors
    from fabric_ladder.tools import generation

    explain_errors(smaller="a smaller --batch_size, --precision bf16-true or --quantization nf4")
    device = find_device(arguments.accelerator)
    rows = generation.read_questions(arguments.prompts) if arguments.prompts else []
    dtype = DTYPES[arguments.precision or ("32-true" if device == "cpu" else "bf16-true")]

    ### 1 The model
    model, tokenizer = generation.load_language_model(arguments.model, dtype, arguments.quantization)
    model.to(device)
    torch.backends.cuda.enable_cudnn_sdp(False)  # it would build a plan for the length of every new token
    wanted = generation.RAW if arguments.raw else arguments.prompt_template
    sampling = {}
    if arguments.temperature:
        options = {name: getattr(arguments, name) for name in ("temperature", "top_k", "top_p")}
        sampling = {name: value for name, value in options.items() if value is not None}
    inputs = sum(bool(question.input.strip()) for _, question in rows)
    template = generation.choose_template(tokenizer, wanted, arguments.chat)
    hides = template not in (generation.CHAT, generation.RAW) and hides_input(template)
    if arguments.input and hides:
        raise UserError(f"--input: the prompt template {template!r} has no {{input}}; write all into --prompt")
    if inputs and hides:
        line = f"{inputs} of {len(rows)} prompts have an input that the template {template!r} does not show"
        print(f"Warning: {line}", file=sys.stderr)
    generator = generation.Generator(model, tokenizer, template, arguments.max_new_tokens, sampling)

    ### 2 The answers
    torch.manual_seed(123 if arguments.seed is None else arguments.seed)
    if arguments.chat:
        generator.chat(typed_lines(), arguments.system)
        return
    if arguments.prompt is not None:
        question = generation.Question(arguments.prompt, arguments.input, arguments.system)
        generator.answer([generator.tokens(question)], stream=True)
        return
    answers = {}
    try:
        questions = [question for _, question in rows]
        for number, text in generation.answer_all(generator, questions, arguments.batch_size or 8):
            answers[number] = text
    finally:  # after Ctrl-C or an error, too
        found = [row | {"generated": answers[number]} for number, (row, _) in enumerate(rows) if number in answers]
        save(found, arguments.output)


def save(lines: list[dict], path: Path | None) -> None:
    """Write the answered rows to a new file, or print them without one; nothing if there are none."""
    text = "".join(json.dumps(line, ensure_ascii=False, default=str) + "\n" for line in lines)
    if not path or not lines:
        print(text, end="")
        return
    try:
        write_new(path, text)
    except UserError:
        print(text, end="")  # rather than lose the answers
        raise
    print(f"Saved {len(lines)} answers in {path}")


if __name__ == "__main__":
    main(parse())
