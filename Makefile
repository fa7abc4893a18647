# make demo   moving digits: a learned table against rotary encodings, five to ten minutes on two cores
# make check  lint, types, architecture
# make test   the tests                                make slow    those that take long, and sanitize
# make sanitize  the kernels for CPUs under AddressSanitizer and UndefinedBehaviorSanitizer
# make readme the README's table, from the committed leaderboard
# make docs   the site with the pages of all results, into site/; warnings are errors
# make release-check  what a release publishes, into dist/, used by Python 3.10 and 3.13, which must be on PATH
# make bench  every row of speed that has a target, into benchmarks/results and docs/speed.md

PYTHON ?= python3.11
BIN := .venv/bin
READY := .venv/.ready

# Bytecode is written even where the environment says otherwise: the tests start hundreds of processes.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test slow sanitize check readme docs release-check bench clean

demo: $(READY)
	$(BIN)/torchrope compare --recipe demo --out runs/demo

# A process of one thread on each core, up to four: more would need more memory than they save time. worksteal keeps the tests of a file, which share
# fixtures, in one process.
test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --maxprocesses 4 --dist worksteal -m "not slow"

slow: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --maxprocesses 4 --dist worksteal -m slow
	$(BIN)/python tests/support/sanitize.py

sanitize: $(READY)
	$(BIN)/python tests/support/sanitize.py

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

readme: $(READY)
	$(BIN)/python benchmarks/readme.py

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

release-check: $(READY)
	rm -rf dist
	$(BIN)/python tests/support/release.py dist python3.10 python3.13

bench: $(READY)
	$(BIN)/python benchmarks/cpu.py

clean:
	rm -rf .venv runs site build dist *.egg-info src/*.egg-info lab/src/*.egg-info lab/build .pytest_cache .mypy_cache .ruff_cache

# Made anew where the versions or the extras change; a broken install leaves no mark. pip installs groups since 25.1.
$(READY): pyproject.toml lab/pyproject.toml setup.py constraints.txt $(wildcard src/torchrope/ops/native/*.[ch])
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt pip
	$(BIN)/python -m pip install --quiet --quiet -c constraints.txt -e '.[integrations,diffusion]' -e './lab[all]' --group dev
	touch $@
