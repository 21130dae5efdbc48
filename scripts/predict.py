"""Predict with a trained model: classes, numbers or labels of words for a file, or classes for a folder of images.

python scripts/predict.py runs/4_mixed_precision/1 tickets.csv [--output answers.csv] [--all_probabilities]

The output has the rows of the file with the columns `predicted` and `probability`. If the file has labels, their scores
are printed. A stopped prediction goes on where it stopped.
"""

import argparse
from pathlib import Path

from fabric_ladder.options import nearest
from fabric_ladder.tools.arguments import PRECISIONS, Arguments, at_least_1, new_path


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = Arguments(__doc__)
    parser.add_argument("model", help="folder of a run, or of a model or adapter")
    parser.add_argument("data", type=Path, help="CSV, JSON, JSON Lines or Parquet file, or a folder of images")
    parser.add_argument("--output", type=new_path, help="file to write, .csv or .jsonl; default: DATA.predicted.csv, "
                        "or .jsonl for other data than CSV")  # fmt: skip
    parser.add_argument("--text_column", help="column of the texts; default: as in training")
    parser.add_argument("--label_column", help="column of the labels; default: as in training")
    parser.add_argument("--column_names", help="names of the columns of a CSV file without a header")
    parser.add_argument("--bad_samples", choices=("refuse", "skip"), help="skip: leave the prediction of a row empty "
                        "that cannot be read")  # fmt: skip
    parser.add_argument("--all_probabilities", action="store_true", help="write the probability of every class")
    parser.add_argument("--accelerator", choices=("auto", "cuda", "mps", "cpu"), default="auto")
    parser.add_argument("--precision", choices=PRECISIONS, help="default: bf16-true on a GPU, 32-true on a CPU")
    parser.add_argument("--batch_tokens", type=at_least_1, help="padded tokens per batch; default: 16,384 on a GPU, "
                        "1,024 on a CPU")  # fmt: skip
    found = parser.parse_args()
    if Path(found.model).is_file():
        parser.error(f"{found.model} is a file: give the folder of the model first, then the data")
    if not found.data.exists():
        parser.error(f"there is no file or folder {found.data}{nearest(found.data)}")
    kind = ".csv" if {".csv", ".tsv"} & {*map(str.lower, found.data.suffixes)} else ".jsonl"
    if found.column_names and kind != ".csv":
        parser.error(f"--column_names is for CSV and TSV files without a header, not for {found.data}")
    try:
        found.output = found.output or new_path(f"{found.data.stem or 'images'}.predicted{kind}")
    except argparse.ArgumentTypeError as error:
        parser.error(f"--output: {error}")
    if found.output.suffix not in (".csv", ".jsonl"):
        parser.error(f"--output {found.output}: give a name that ends in .csv or .jsonl")
    return found


def main(arguments: argparse.Namespace) -> None:
    """Load the model, predict, and print the scores."""
    from fabric_ladder.checkpoints.export import DTYPES
    from fabric_ladder.environment import find_device
    from fabric_ladder.techniques.advice import explain_errors
    from fabric_ladder.tools.inference import load_predictor, predict_file

    explain_errors(smaller="a smaller --batch_tokens or --precision bf16-true")
    device = find_device(arguments.accelerator)
    precision = arguments.precision or ("32-true" if device == "cpu" else "bf16-true")
    tokens = arguments.batch_tokens or (1024 if device == "cpu" else 16_384)
    names = ("text_column", "label_column", "column_names", "bad_samples")
    columns = {name: getattr(arguments, name) for name in names if getattr(arguments, name)}
    options = (device, DTYPES[precision], tokens, arguments.all_probabilities)
    predictor = load_predictor(arguments.model, *options, columns)
    rows, scores = predict_file(predictor, arguments.data, arguments.output, f"{arguments.model} {options} {columns}")
    print(f"Saved {rows:,} predictions in {arguments.output}")
    if scores and Path(predictor.settings.dataset).name == arguments.data.name:
        print(
            f"The model was trained on a file {arguments.data.name}: if it is this one, expect lower scores on new rows"
        )
    for line in scores:
        print(line)


if __name__ == "__main__":
    main(parse())
