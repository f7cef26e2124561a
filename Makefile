# make train [ARGS="..."]   sets up and trains; ARGS are Hydra overrides
# make test  [ARGS="..."]   sets up and tests, a process and a thread to each core; ARGS go to pytest
# make check                lint, format, types, and whether the README holds the figures of results/
# make parity               proves the parity suite on a CPU: the reference passes against itself, and fails when broken
# make kernels              compiles every kernel for sm_80 to sm_100 and judges the machine code; needs no GPU
# make docs                 builds the documentation into .cache/site
PYTHON ?= python3
VENV := .venv
ARGS ?=

.PHONY: train test check parity kernels docs clean

train: $(VENV)/installed
	$(VENV)/bin/python train.py $(ARGS)

test: $(VENV)/installed-test
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest --numprocesses auto --maxprocesses 8 --dist worksteal $(ARGS)

check: $(VENV)/installed-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/python -m scripts.readme_figures --check

kernels: $(VENV)/installed
	$(VENV)/bin/python -m scripts.compile_kernels_check $(ARGS)

docs: $(VENV)/installed-docs
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

parity: $(VENV)/installed
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m parity all op=reference against=reference parity=quick \
	    parity.workers=2 $(ARGS)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m parity model op=reference against=reference parity=quick \
	    parity.fault=half_a_pixel_of_shift $(ARGS); test $$? -eq 1

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e .
	touch $@

$(VENV)/installed-test: $(VENV)/installed
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e .[test]
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e .[dev]
	touch $@

$(VENV)/installed-docs: $(VENV)/installed
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e .[docs]
	touch $@

clean:
	rm -rf $(VENV) .cache .mypy_cache .pytest_cache .ruff_cache *.egg-info
