"""Write a model card."""

from pathlib import Path

import pandas as pd
import yaml
from huggingface_hub import ModelCard, ModelCardData

from fabric_ladder.comparing.table import markdown_table
from fabric_ladder.data.instructions import prompt_templates
from fabric_ladder.data.label_kind import MOST_CLASSES, percent
from fabric_ladder.data.text_sources import file_format
from fabric_ladder.errors import read_outside, refused
from fabric_ladder.runs.folder import UNNAMED
from fabric_ladder.runs.intervals import wilson_interval
from fabric_ladder.settings import FACTS, SURROUNDINGS, Settings

HUB_NAMES = {"imdb": "stanfordnlp/imdb"}  # data sets with another name on the Hub
TEXT = """Trained by `{name}` of Fabric Ladder from {base}, on {dataset}: {train_samples:,} training samples,
{epochs} epochs, seed {seed}. {figures}{classes}Settings other than the defaults, and versions:

```yaml
{details}```
"""
LOADING = 'from transformers import pipeline\n\nmodel = pipeline("{task}", "{title}"{options})'


def write_card(folder: Path, run: Path, title: str, note: str = "") -> None:
    """Write README.md, a model card: data, test accuracy, settings, versions, and how to load the model.

    Args:
        folder: Folder of a transformers model.
        run: Folder of its run; without a run.json the card only explains how to load the model.
        title: Title of the card.
        note: A sentence about the merged adapter of a run on 4-bit weights.
    """
    architecture = read_outside(folder / "config.json")["architectures"][0]
    kinds = {"ForImageClassification": "image", "ForTokenClassification": "token", "Classification": "text"}
    found = next((kind for end, kind in kinds.items() if architecture.endswith(end)), None)
    task = f"{found}-classification" if found else "text-generation"
    facts = ModelCardData(library_name="transformers", pipeline_tag=task)
    text = ""
    if (run / "run.json").is_file():
        with refused(f"cannot describe the run in {run}"):
            text = _describe_run(read_outside(run / "run.json"), facts)
            text += f"\n{note}. The accuracy was measured on the 4-bit weights.\n" if note else ""
    loading = LOADING.format(task=task, title=title, options=", truncation=True" * (task == "text-classification"))
    card = f"---\n{facts.to_yaml()}\n---\n\n# {title}\n\n{text}\n```python\n{loading}\n```\n"
    card += _describe_prompts(folder) if task == "text-generation" else ""
    ModelCard(card).save(folder / "README.md")


def _describe_run(record: dict, facts: ModelCardData) -> str:
    """Return the card's text about a run, and add its model and data set to the facts if the Hub has them.

    The text contains no paths, because folders are private.
    """
    settings = first = record["settings"]
    known = set()  # a folder may have been used again since
    while (before := Path(first["model"]).parent / "run.json") not in known and before.is_file():
        known.add(before)
        first = read_outside(before)["settings"]  # the run whose model this run began with
    model = _name_in_config(Path(first["model"])) or first["model"]
    dataset = HUB_NAMES.get(settings["dataset"], settings["dataset"])
    if _is_hub_name(model) and not first["from_scratch"]:
        facts.base_model = model
    if _is_hub_name(dataset):
        facts.datasets = [dataset.split(":")[0]]  # without the name of a configuration
    changed = {
        name: settings[name]
        for name, fact in FACTS.items()
        if fact.role != SURROUNDINGS
        and not fact.is_path
        and settings.get(name) not in (None, getattr(Settings(), name))
    }
    start = "random weights of" if first["from_scratch"] else "the weights of"
    path = Path(model)
    name = "/".join(path.parts[-2:]) if path.name in UNNAMED else path.name
    between = "" if first is settings else ", which earlier runs had trained"
    return TEXT.format(
        name=settings["name"],
        base=f"{start} {model if _is_hub_name(model) else name}{between}",
        dataset=dataset if _is_hub_name(dataset) else Path(dataset).name,
        train_samples=record["data"]["train_samples"],
        epochs=settings["epochs"],
        seed=settings["seed"],
        figures=_describe_test(record["results"]),
        classes=_describe_classes(record["results"]),
        details=yaml.safe_dump(changed | {"versions": record["versions"]}),
    )


def _describe_prompts(folder: Path) -> str:
    """Return the forms of the prompts that a language model was trained with; a chat template is in its tokenizer."""
    path = folder / "tokenizer_config.json"
    template = read_outside(path).get("prompt_template") if path.is_file() else None
    if template in (None, "chat"):
        return ""
    with_input, without = prompt_templates(template)
    text = "\nWrite prompts as in the training"
    if with_input != without:
        text += f", with an input\n\n```text\n{with_input}\n```\n\nand without"
    return f"{text}:\n\n```text\n{without}\n```\n"


def _describe_test(results: dict) -> str:
    """Return a sentence with the test accuracy, or with the mean squared error of a regression."""
    if "test_mse" in results:
        pearson = results["test_pearson"]
        correlation = "" if pearson is None else f", Pearson's correlation {pearson:.4f}"
        return f"Test MSE {results['test_mse']:.4f}{correlation}. "
    accuracy, samples = results.get("test_accuracy"), results.get("test_samples")
    if accuracy is None:
        return ""
    if samples is None:  # tokens and words of a text are dependent, so they have no interval
        return f"Test accuracy per {'word' if 'test_words' in results else 'trained token'} {accuracy:.2%}. "
    low, high = wilson_interval(accuracy, samples)
    return f"Test accuracy {accuracy:.2%} ({low:.2%} to {high:.2%}, 95 % interval of {samples:,} test samples). "


def _describe_classes(results: dict) -> str:
    """Return a table of the classes with their scores at the test; empty without scores."""
    classes = results.get("classes") or results.get("entities") or {}
    if not classes or len(classes["names"]) > MOST_CLASSES:
        return ""
    scores = pd.DataFrame({name: map(percent, classes[name]) for name in ("precision", "recall", "f1")})
    scores["labels in the test"] = list(map(str, classes["true"]))
    return f"The classes:\n\n{markdown_table(scores.set_index(pd.Index(classes['names'])), 'class')}\n\n"


def _name_in_config(folder: Path) -> str | None:
    """Return the Hub's name of a model in a local folder, if its config has the name."""
    path = folder / "config.json"
    name = read_outside(path).get("_name_or_path", "") if path.is_file() else ""
    return name if _is_hub_name(name) else None


def _is_hub_name(name: str) -> bool:
    """Return whether a name is USER/NAME on the Hub and not a path; the file of a run may be in another folder."""
    found = name.startswith((".", "/", "~")) or file_format(Path(name)) or Path(name).exists()
    return name.count("/") == 1 and not found
