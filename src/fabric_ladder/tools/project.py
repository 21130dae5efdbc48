"""What the project says of itself: what it needs, its README, its address; by the standard library of Python 3.8."""

from __future__ import annotations

import re
from importlib import metadata
from typing import NamedTuple

from fabric_ladder.places import SRC

ROOT = SRC.parent  # of the repository; an installed package has no file of it


class Project(NamedTuple):
    """The project's own description.

    Attributes:
        python: Range of versions.
        needed: Requirements, each a package and a range.
        optional: Requirements of the extras.
        readme: Text of the README.
        url: Address of the repository.
    """

    python: str
    needed: list[str]
    optional: list[str]
    readme: str
    url: str


def describe_project() -> Project:
    """Return the description by the repository's own files, or by what pip keeps of an installed package."""
    if text := read("pyproject.toml"):  # `tomllib` came with Python 3.11

        def find(pattern: str) -> str:
            return re.search(pattern, text, re.MULTILINE | re.DOTALL).group(1)

        needed, optional = find(r"^dependencies = \[(.*?)^\]"), find(r"^\[project\.optional-dependencies\]\n(.*?)^\[")
        lines = (re.findall(r'"(.+?)"', part) for part in (needed, optional))
        return Project(find('^requires-python = "(.*?)"'), *lines, read("README.md"), find('^Repository = "(.*?)"'))
    about = metadata.metadata("fabric-ladder")
    lines = about.get_all("Requires-Dist", ())
    return Project(
        about["Requires-Python"],
        [line for line in lines if "extra ==" not in line],
        [line.split(";")[0].strip() for line in lines if "extra ==" in line],
        about.get_payload(),
        about["Project-URL"].split(", ")[1],
    )


def read(name: str) -> str:
    """Return the text of one of the repository's files, nothing where there is none."""
    path = ROOT / name
    return path.read_text(encoding="utf-8") if path.is_file() else ""
