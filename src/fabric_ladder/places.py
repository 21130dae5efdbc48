"""Where the rungs, the scripts and the configs lie: in the repository, or inside an installed package."""

import sys
from pathlib import Path

PACKAGE = Path(__file__).parent


def folder(name: str) -> Path:
    """Return the folder `src` (the rungs), `scripts` or `configs`; a wheel carries them inside the package."""
    return next(filter(Path.is_dir, (PACKAGE / name, PACKAGE.parents[1] / name)), PACKAGE.parents[1] / name)


CONFIGS, SCRIPTS, SRC = map(folder, ("configs", "scripts", "src"))


def runs_script() -> bool:
    """Return whether a rung or a script of the project imports the package."""
    main = getattr(sys.modules["__main__"], "__file__", None)
    return bool(main) and Path(main).resolve().parent in (SRC, SCRIPTS)
