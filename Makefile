PYTHON ?= python3
BIN := .venv/bin
# uv where it is installed, else pip
PIP := $(if $(shell command -v uv),uv pip install --quiet --python $(BIN)/python,$(BIN)/pip install --quiet --disable-pip-version-check)
LOWEST := .venv-lowest/bin
# of uv: https://docs.astral.sh/uv/guides/integration/pytorch; empty: as PyPI has it, on Linux with gigabytes of CUDA
TORCH_BACKEND ?= cpu
# where torch comes from, e.g. https://download.pytorch.org/whl/cpu, which has no CUDA; empty: PyPI
TORCH_INDEX ?=
# without its requirements: it asks for an older pillow than is pinned, which it runs without
TRACKIO := trackio==0.43.0 gradio_client==2.7.2 orjson==3.13.0 starlette==1.10.0 uvicorn==0.54.0

.PHONY: run test test-slow test-lowest lint format bench combinations architectures tables new-rung notebooks docs clean

run: .venv/installed
	$(BIN)/python src/2_grad_accum.py --config configs/quickstart.yaml

test: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow"

# what is slow by nature: a 23rd of the pairs of techniques, a notebook in a kernel, kills, compiling
test-slow: .venv/installed-dev
	$(BIN)/python -m pytest -n 2 --dist loadfile -m slow

# the rungs with the lowest versions that pyproject.toml allows; the random weights that rung 8 draws are others there
test-lowest: .venv-lowest/installed
	$(LOWEST)/python -m pytest -m "not slow" -k "not first_losses" tests/rungs/test_rungs.py tests/techniques/test_tiled_mlp.py

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: .venv/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/installed-dev
	$(BIN)/python benchmarks/bag_of_words.py
	$(BIN)/python benchmarks/against_peers.py --part minilm bloom --reviews 32

combinations: .venv/installed-dev
	FABRIC_LADDER_WRITE_TABLE=1 $(BIN)/python -m pytest tests/rungs/test_combinations.py -m slow

# runs a tiny model of every architecture of transformers on committed code, for docs/techniques/options.md
architectures: .venv/installed-dev
	$(BIN)/python benchmarks/architectures.py

# writes all generated tables: of the rungs, of stored runs and of GPUs, and what the planner reads
tables: .venv/installed-dev
	$(BIN)/python benchmarks/evidence_tables.py
	$(BIN)/python benchmarks/rung_tables.py
	$(BIN)/python benchmarks/harvest.py --fill

# make new-rung NUMBER=30 NAME=bitfit PARENT=2_grad_accum
new-rung:
	@$(PYTHON) scripts/new_rung.py $(NUMBER) $(NAME) $(PARENT)

# writes the notebooks and runs them on small data, in ten minutes; FABRIC_LADDER_DATA names the folder with IMDb
notebooks: .venv/installed-dev
	$(BIN)/python notebooks/build.py --execute

docs: .venv/installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf .venv .venv-lowest

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || \
		{ echo "Python 3.11, 3.12 or 3.13 is needed; name it: make PYTHON=python3.12 ..." >&2; exit 2; }
	$(PYTHON) -m venv .venv

# torch comes first and by its exact version, so that no other package's looser request picks another build
.venv/installed: requirements.txt pyproject.toml | .venv/bin/python
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $$(grep '^torch==' requirements.txt)
	$(PIP) -r requirements.txt
	touch $@

.venv/installed-dev: requirements-dev.txt .venv/installed
	$(PIP) -r requirements-dev.txt
	$(PIP) --no-deps $(TRACKIO)
	touch $@

.venv-lowest/installed: pyproject.toml
	$(PYTHON) -m venv --clear .venv-lowest
	$(LOWEST)/pip install --quiet --disable-pip-version-check uv==0.13.9
	$(LOWEST)/uv pip install --python $(LOWEST)/python --resolution lowest-direct \
		$(if $(TORCH_BACKEND),--torch-backend $(TORCH_BACKEND)) -e '.[bitsandbytes]' $$(grep '^pytest' requirements-dev.txt)
	touch $@
