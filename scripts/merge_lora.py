"""Add an adapter (LoRA) to the weights of its base model, and save the sum as one plain model.

python scripts/merge_lora.py runs/13_lora/1 [--base NAME] [--output FOLDER]
"""

import argparse
from pathlib import Path

from fabric_ladder.errors import UserError
from fabric_ladder.tools.arguments import PRECISIONS, Arguments


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = Arguments(__doc__)
    parser.add_argument("adapter", help="folder of an adapter, or of the run that saved it")
    parser.add_argument("--base", help="base model: a folder or a name on the Hub; default: the base of the training")
    parser.add_argument("--output", type=Path, help="folder to write; default: `merged` next to the adapter")
    parser.add_argument("--precision", choices=PRECISIONS, default="32-true", help="of the weights; default: 32-true")
    return parser.parse_args()


def main(arguments: argparse.Namespace) -> None:
    """Load, merge and save."""
    from fabric_ladder.checkpoints.export import (
        DTYPES,
        base_name,
        find_result,
        load_result,
        new_folder,
        note_on_4_bits,
        write_plain,
    )
    from fabric_ladder.techniques.advice import explain_errors

    explain_errors(smaller="--precision bf16-true")
    adapter = find_result(arguments.adapter)
    if not adapter.adapter:
        raise UserError(f"{adapter.folder} is a whole model, not an adapter: there is nothing to merge")
    output = arguments.output or adapter.folder.absolute().parent / "merged"
    with new_folder(output) as folder:
        print(f"Base model: {base_name(adapter, arguments.base)}")
        if note := note_on_4_bits(adapter, arguments.base):
            print(note)
        model = load_result(adapter, arguments.base, DTYPES[arguments.precision], quantization="no")
        write_plain(model, folder, adapter.folder)
    print(f"Saved {output}")


if __name__ == "__main__":
    main(parse())
