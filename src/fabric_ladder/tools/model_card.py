"""Write a model card, and upload a model to the Hugging Face Hub."""

import json
from dataclasses import asdict
from pathlib import Path

import yaml
from huggingface_hub import EvalResult, HfApi, ModelCard, ModelCardData, get_token
from huggingface_hub.errors import HFValidationError, HTTPError
from huggingface_hub.utils import validate_repo_id

from fabric_ladder.comparing.matching import wilson_interval
from fabric_ladder.errors import UserError, first_line, read_outside
from fabric_ladder.settings import Settings

# Private folders, and settings that change no result
LEFT_OUT = frozenset("name config data_dir cache_dir runs_dir resume load save threads num_workers logger".split())
FILES = ("validation_file", "test_file", "tokenizer", "deepspeed")  # settings that can be paths
TASKS = {"instruction-tuning": "text-generation"}  # tasks with another name on the Hub
HUB_NAMES = {"imdb": "stanfordnlp/imdb", "synthetic": None}  # of data sets
INPUTS = {"text-classification": '"A film."', "image-classification": '"photo.jpg"', "text-generation": '"Hello"'}


def write_card(folder: Path, run: Path, title: str) -> None:
    """Write README.md, a model card: data, figures, settings, versions, and how to load the model.

    Args:
        folder: Folder of a transformers model.
        run: Folder of its run; without a run.json the card only explains how to load the model.
        title: Title of the card: the name on the Hub, if there is one.
    """
    try:
        record = read_outside(run / "run.json")
    except UserError:
        record = {}
    task = _task(folder, record)
    facts = _metadata(record, task, title) if record else ModelCardData(library_name="transformers", pipeline_tag=task)
    load = f'from transformers import pipeline\n\nmodel = pipeline("{task}", "{title}")\nprint(model({INPUTS[task]}))'
    parts = [f"# {title}", *(_sections(record) if record else ()), f"## How to load it\n\n```python\n{load}\n```"]
    ModelCard(f"---\n{facts.to_yaml()}\n---\n\n" + "\n\n".join(parts) + "\n").save(folder / "README.md")


def check_push(name: str) -> None:
    """Check a name on the Hub and the token before any work.

    Raises:
        UserError: The name is invalid, or there is no token.
    """
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UserError(f"--push {name}: {first_line(error)}") from error
    if name.count("/") != 1:
        raise UserError(f"--push {name}: give USER/NAME, the name of the model on the Hub")
    if not get_token():
        raise UserError(f"--push {name}: no token of the Hugging Face Hub: hf auth login, or set HF_TOKEN")


def push(folder: Path, name: str) -> str:
    """Upload a folder to the Hub and return its address; a new repository is private.

    Raises:
        UserError: The upload fails.
    """
    api = HfApi()
    try:
        url = api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="Upload model")
    except (HTTPError, OSError, ValueError, RuntimeError) as error:
        raise UserError(
            f"{folder} is written, but --push {name} failed ({first_line(error)}); to try again: hf upload {name} "
            f"{folder}"
        ) from error
    return str(url)


def _task(folder: Path, record: dict) -> str:
    """Return the Hub's name of the task, from the run or from the class of the model."""
    if record:
        task = record["settings"]["task"]
        return TASKS.get(task, task)
    (name,) = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"]
    images = "image-classification" if "ForImage" in name else "text-classification"
    return images if name.endswith("Classification") else "text-generation"


def _metadata(record: dict, task: str, title: str) -> ModelCardData:
    """Return the card's metadata: base model, data and test accuracy, if they have names on the Hub."""
    settings, accuracy = record["settings"], record["results"].get("test_accuracy")
    pretrained = not settings["from_scratch"] and _is_hub_name(settings["model"])
    name = HUB_NAMES.get(settings["dataset"], settings["dataset"])
    on_hub = name and _is_hub_name(name)
    result = accuracy is not None and EvalResult(
        task_type=task,
        dataset_type=name if on_hub else "other",
        dataset_name=Path(settings["dataset"]).name,
        dataset_split="test",
        metric_type="accuracy",
        metric_value=round(accuracy, 4),
    )
    return ModelCardData(
        library_name="transformers",
        pipeline_tag=task,
        base_model=settings["model"] if pretrained else None,
        datasets=[name] if on_hub else None,
        metrics=["accuracy"] if result else None,
        tags=["fabric-ladder"],
        model_name=title.split("/")[-1],
        eval_results=[result] if result else None,
    )


def _is_hub_name(name: str) -> bool:
    """Return whether a name is USER/NAME on the Hub and not a path."""
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and not Path(name).exists()


def _sections(record: dict) -> list[str]:
    """Return the sections of the card that come from a run's record."""
    settings, data = record["settings"], record["data"]
    start = "random weights of" if settings["from_scratch"] else "the weights of"
    model, dataset = (_shown(settings[name]) for name in ("model", "dataset"))
    changed = {key: value for key, value in settings.items()
               if key not in LEFT_OUT and value != asdict(Settings()).get(key)}  # fmt: skip
    changed |= {"model": model, "dataset": dataset} | {key: _shown(changed[key]) for key in FILES if changed.get(key)}
    versions = "\n".join(f"- {name} {number}" for name, number in record["versions"].items())
    return [
        f"Trained by `{settings['name']}` of Fabric Ladder, from {start} {model}.",
        f"## Data\n\n{dataset}: {data['train_samples']:,} training samples, {settings['epochs']} epochs, seed "
        f"{settings['seed']}. Fingerprint of the data: `{data['fingerprint']}`.",
        f"## Figures\n\n{_figures(record['results'])}",
        f"## Settings\n\nSettings other than the defaults:\n\n```yaml\n{yaml.safe_dump(changed)}```",
        f"## Versions\n\n{versions}",
    ]


def _figures(results: dict) -> str:
    """Return a table of the known figures; the test accuracy has Wilson's 95 % interval."""
    rows = {"test loss": f"{results['test_loss']:.4f}"} if "test_loss" in results else {}
    if samples := results.get("test_samples"):
        low, high = wilson_interval(results["test_accuracy"], samples)
        share = f"{results['test_accuracy']:.2%} ({low:.2%} to {high:.2%}, 95 % interval of {samples:,} test samples)"
        rows = {"test accuracy": share} | rows
    elif "test_tokens" in results:  # tokens of one text are dependent, so there is no interval
        rows = {"test token accuracy": f"{results['test_accuracy']:.2%} of {results['test_tokens']:,} tokens"} | rows
    if results["epochs"]:
        rows["validation accuracy"] = f"{results['epochs'][-1]['validation_accuracy']:.2%}"
    if "elapsed_seconds" in results:
        rows["minutes of training"] = f"{results['elapsed_seconds'] / 60:.2f}"
    return "| | |\n|---|---|\n" + "\n".join(f"| {name} | {value} |" for name, value in rows.items())


def _shown(name: str) -> str:
    """Return a name on the Hub, or the last part of a path, because folders are private."""
    return name if _is_hub_name(name) else Path(name).name
