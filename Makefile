# `make flywheel` answers the question; `make test` proves the code. Each builds .venv first when it is absent
# or when the pins have changed. On a machine where torch's exact pin would resolve to a CUDA build of gigabytes,
# set TORCH_INDEX to an index of CPU wheels: it is used for torch alone.

PYTHON      ?= $(shell command -v python3.11 || command -v python3)
TORCH_INDEX ?=
PROFILE     ?= reference
WORKERS     ?= 2

BIN   := .venv/bin
PEERS := $(CURDIR)/.venv/peers
STAMP := .venv/.installed
TORCH := $(shell sed -n 's/^\(torch==.*\)/\1/p' constraints.txt)

# One arithmetic thread a process: two of them share two cores here, and figures must not depend on the count.
export OMP_NUM_THREADS ?= 1

.PHONY: flywheel test lab venv notebooks parity-table peers timing lint clean system-run system-test

flywheel: $(STAMP) system-run
	$(BIN)/python -m moelab run --profile $(PROFILE)

test: $(STAMP) system-test
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadscope --nbval-lax --nbval-current-env --nbval-cell-timeout 900 tests notebooks

lab: $(STAMP) system-run
	$(BIN)/python -m jupyter lab --notebook-dir notebooks

# Execute every notebook with its defaults and keep the outputs of its checked cells.
notebooks: $(STAMP)
	$(BIN)/python -m moelab.lab.refresh notebooks/[0-9]*.ipynb

# The slow study of where prefill is decode: every family, precision and BLAS.
parity-table: $(STAMP) system-run
	$(BIN)/python -m moelab.studies.parity_table reports/committed/parity_table.json

# Other runtimes on the same weights under a kernel's memory cap (Linux, root). They go into a folder of their own,
# without what they would bring along: all of that is pinned already. Needs 10 GB of disk and half an hour.
peers: $(STAMP) system-run
	$(BIN)/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml','rb'))['project']['optional-dependencies']['peers'])" \
		| xargs $(BIN)/python -m pip install --quiet --upgrade --no-deps --target $(PEERS)
	PYTHONPATH=$(PEERS) $(BIN)/python -m moelab.lab.peers reports/committed/peers.json

# What streaming is asked to do in time. Half an hour in which nothing else may run.
timing: $(STAMP) system-run
	$(BIN)/python -m moelab.studies.streaming_timing reports/committed/timing.json

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	sh tools/system_packages.sh venv $(PYTHON)
	$(PYTHON) -m venv .venv
	$(if $(TORCH_INDEX),$(BIN)/python -m pip install -c constraints.txt --index-url $(TORCH_INDEX) $(TORCH))
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	touch $@

system-run:
	@sh tools/system_packages.sh openblas

system-test:
	@sh tools/system_packages.sh openblas chromium

clean:
	rm -rf .venv build *.egg-info
