"""Make of anything a rung has saved a plain folder for others: one model, its tokenizer and its card.

python scripts/export_model.py runs/10_fsdp/1 [--output FOLDER] [--push USER/NAME]

A run's own model/ (--save consolidated) is for going on here: --model runs/10_fsdp/1/model. Take this script to hand
a model on: it also reads sharded checkpoints and DeepSpeed's, adds an adapter to its base, and writes README.md, the
model card, with data, settings, figures and versions.
"""

import argparse
import shutil
from pathlib import Path

from fabric_ladder.advice import show_errors
from fabric_ladder.checkpoints.export import Arguments, find_result, load_result, new_folder, write_plain
from fabric_ladder.tools.share import check_push, push, write_card

if __name__ == "__main__":
    show_errors(smaller="--precision bf16-true")
    parser = Arguments(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="folder of a run, or its checkpoint, model or adapter")
    parser.add_argument("--output", help="folder to write; default: `export` beside what is read")
    parser.add_argument("--push", metavar="USER/NAME", help="upload the folder to the Hugging Face Hub; a new name is "
                        "private until you publish it there")  # fmt: skip
    arguments = parser.parse_args()
    if arguments.push:
        check_push(arguments.push)

    source = find_result(arguments.source)
    home = source.folder.absolute().parent
    output = Path(arguments.output or home / "export")
    with new_folder(output) as folder:
        if source.format == "model":
            shutil.copytree(source.folder, folder, dirs_exist_ok=True)
        else:
            write_plain(load_result(source, quantization="no"), folder, source.folder)
        write_card(folder, home, arguments.push or output.name)
    print(f"Saved {output}")
    if arguments.push:
        print(f"Pushed {push(output, arguments.push)}")
