"""Turn what a rung has saved into a plain folder that transformers reads by itself.

python scripts/export_model.py runs/10_fsdp/1 [--output FOLDER]

SOURCE is a run's folder, or its checkpoint (sharded, or DeepSpeed's), model or adapter. An adapter is merged into its
base. Sharded checkpoints are read with pickle: trust their origin.
"""

import shutil
from pathlib import Path

from fabric_ladder.advice import show_errors
from fabric_ladder.checkpoints.export import Arguments, find_result, load_result, new_folder, write_plain

if __name__ == "__main__":
    show_errors()
    parser = Arguments(description=__doc__.split("\n\n")[0])
    parser.add_argument("source", help="folder of a run, or its checkpoint, model or adapter")
    parser.add_argument("--output", help="folder to write; default: `export` beside what is read")
    arguments = parser.parse_args()

    source = find_result(arguments.source)
    output = Path(arguments.output or source.folder.absolute().parent / "export")
    with new_folder(output) as folder:
        if source.format == "model":
            shutil.copytree(source.folder, folder, dirs_exist_ok=True)
        else:
            write_plain(load_result(source, quantization="no"), folder, source.folder)
    print(f"Saved {output}")
