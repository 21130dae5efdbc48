"""Write the model of any run as a plain folder for others: weights, tokenizer and model card.

python scripts/export_model.py runs/10_fsdp/1 [--output FOLDER] [--push USER/NAME]

The script reads sharded checkpoints and DeepSpeed's, and merges an adapter into its base. The model card, README.md,
lists data, settings, figures and versions. To continue training here, use --model runs/10_fsdp/1/model instead.
"""

import argparse
import shutil
from pathlib import Path

from fabric_ladder.tools.arguments import Arguments


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = Arguments(__doc__)
    parser.add_argument("source", help="folder of a run, or its checkpoint, model or adapter")
    parser.add_argument("--output", type=Path, help="folder to write; default: `export` next to SOURCE's model")
    parser.add_argument("--push", metavar="USER/NAME", help="upload the folder to the Hugging Face Hub; a new "
                        "repository is private until you publish it there")  # fmt: skip
    return parser.parse_args()


def main(arguments: argparse.Namespace) -> None:
    """Load, write and upload."""
    from fabric_ladder.checkpoints.export import find_result, load_result, new_folder, note_on_4_bits, write_plain
    from fabric_ladder.techniques.advice import show_errors
    from fabric_ladder.tools.model_card import check_push, push, write_card

    show_errors(smaller="a machine with more memory")
    if arguments.push:
        check_push(arguments.push)
    source = find_result(arguments.source)
    run = source.folder.absolute().parent
    output = arguments.output or run / "export"
    if note := note_on_4_bits(source):
        print(note)
    with new_folder(output) as folder:
        if source.format == "model":
            shutil.copytree(source.folder, folder, dirs_exist_ok=True)
        else:
            write_plain(load_result(source, quantization="no"), folder, source.folder)
        write_card(folder, run, arguments.push or output.name, note)
    print(f"Saved {output}")
    if arguments.push:
        print(f"Pushed {push(output, arguments.push)}")


if __name__ == "__main__":
    main(parse())
