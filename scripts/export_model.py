"""Write the model of any run as a plain folder for others: weights, tokenizer and model card.

python scripts/export_model.py runs/10_fsdp/1 [--output FOLDER]
python scripts/export_model.py runs/13_lora/1 [--base NAME] [--precision bf16-true]

The script reads sharded checkpoints and DeepSpeed's, and merges an adapter (LoRA) into its base model. The model card,
README.md, lists data, settings, figures and versions. To continue training here, use --model runs/10_fsdp/1/model
instead. To publish the folder: hf upload USER/NAME FOLDER.
"""

import argparse
import shutil
from pathlib import Path

from fabric_ladder.errors import UserError
from fabric_ladder.tools.arguments import PRECISIONS, Arguments


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = Arguments(__doc__)
    parser.add_argument("source", help="folder of a run, or its checkpoint, model or adapter")
    parser.add_argument("--output", type=Path, help="folder to write; default: `export` next to SOURCE's model")
    parser.add_argument("--base", help="base of an adapter: a folder or a name on the Hub; default: as in training")
    parser.add_argument("--precision", choices=PRECISIONS, help="of the weights; default: as saved, 32-true of a base")
    return parser.parse_args()


def main(arguments: argparse.Namespace) -> None:
    """Load and write."""
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
    from fabric_ladder.tools.model_card import write_card

    explain_errors(smaller="--precision bf16-true or a machine with more memory")
    source = find_result(arguments.source)
    if arguments.base and not source.adapter:
        raise UserError(f"--base: {source.folder} is a whole model, not an adapter; leave it out")
    run = source.folder.absolute().parent
    output = arguments.output or run / "export"
    if source.adapter:
        print(f"Base model: {base_name(source, arguments.base)}")
    if note := note_on_4_bits(source, arguments.base):
        print(note)
    with new_folder(output) as folder:
        if source.format == "model" and not arguments.precision:
            shutil.copytree(source.folder, folder, dirs_exist_ok=True)
        else:
            dtype = DTYPES.get(arguments.precision)
            write_plain(load_result(source, arguments.base, dtype, quantization="no"), folder, source.folder)
        write_card(folder, run, output.name, note)
    print(f"Saved {output}")


if __name__ == "__main__":
    main(parse())
