# Everything runs in a virtual environment of its own. Overridable: PYTHON, VENV, CONSTRAINTS, VLLM, the
# environment of the vLLM server, RAY, that of the tests with Ray, and CHROMIUM, a browser.
PYTHON ?= python3
VENV ?= .venv
VLLM ?= .venv-vllm
RAY ?= .venv-ray
CHROMIUM ?= $(shell command -v chromium || command -v chromium-browser || command -v google-chrome)
CONSTRAINTS ?= constraints.txt
BIN := $(VENV)/bin
SOURCES := compound components rewards optimizers benchmarks
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
export PIP_NO_WARN_SCRIPT_LOCATION = 1
export LITELLM_LOCAL_MODEL_COST_MAP = True

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-vllm test-ray test-browser chaos check audit format docs site bench clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

demo: $(VENV)/demo.stamp ## Set up, fetch the embedded model, and optimize a small system with it
	$(BIN)/compound sweep benchmarks/atlas.yaml --methods search,random --run runs/demo
	$(BIN)/compound runs report runs/demo/atlas/search/0
	@echo 'open the report, or try your own data: $(BIN)/compound init data.csv'

# Hundreds of tests start processes, which would each compile the package where PYTHONDONTWRITEBYTECODE is set.
test: $(VENV)/dev.stamp ## Set up and run the tests, without the slow ones
	$(BIN)/python -m compileall -q $(SOURCES) tests/support
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal $(TESTS)

test-all: ## Set up and run all tests
	$(MAKE) test TESTS="--slow $(TESTS)"

test-vllm: $(VENV)/dev.stamp $(VLLM)/vllm.stamp ## Set up a real vLLM on the CPU (3.5 GB) and run the tests with it
	HF_HUB_OFFLINE=1 REAL_VLLM=$(abspath $(VLLM))/bin/vllm $(BIN)/python -m pytest tests/real_vllm

test-ray: $(VENV)/dev.stamp $(RAY)/ray.stamp ## Set up Ray and a store, and run the tests with both on this machine
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 REAL_RAY=1 $(RAY)/bin/python -m pytest tests/real_ray tests/real_stores

test-browser: $(VENV)/dev.stamp ## Run the tests of the studio in a Chromium (CHROMIUM names its program)
	$(PIP) -c $(CONSTRAINTS) -e '.[browser]'
	HF_HUB_OFFLINE=1 REAL_BROWSER=$(CHROMIUM) $(BIN)/python -m pytest tests/real_browser

chaos: $(VENV)/dev.stamp ## Kill runs, misbehave as a server, damage files, fill the disk; write benchmarks/data/chaos.json
	PYTHONPATH=tests/support $(BIN)/python -m chaos --out benchmarks/data/chaos.json

check: $(VENV)/dev.stamp ## Lint, types, import rules, sizes, security
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python docs/measure_code.py --check
	$(BIN)/bandit --quiet --configfile pyproject.toml --severity-level medium --recursive $(SOURCES)
	$(BIN)/python .ci/audit.py

audit: $(VENV)/dev.stamp ## Known vulnerabilities of the installed packages; fails where it cannot look
	$(BIN)/python .ci/audit.py --require

format: $(VENV)/dev.stamp ## Format the code
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

docs: $(VENV)/dev.stamp ## Write the references from docstrings and models, and the tables from what was measured
	$(BIN)/python docs/make_reference.py
	$(BIN)/python docs/make_yaml_reference.py
	$(BIN)/python docs/make_tables.py
	$(BIN)/python docs/package_graph.py

site: $(VENV)/dev.stamp ## Build the documentation site into site/ with Zensical; a broken link fails it
	$(BIN)/python docs/make_site.py

bench: $(VENV)/dev.stamp ## Measure overheads and the embedded engine; results go to benchmarks/data
	HF_HUB_OFFLINE=1 $(BIN)/python -m benchmarks.measure.overhead
	HF_HUB_OFFLINE=1 $(BIN)/python -m benchmarks.measure.engine_throughput
	HF_HUB_OFFLINE=1 $(BIN)/python -m benchmarks.measure.decoding.constrained_decoding
	HF_HUB_OFFLINE=1 $(BIN)/python -m benchmarks.measure.decoding.cpu_kernels

clean: ## Remove the environment and what was built
	rm -rf $(VENV) $(VLLM) $(RAY) build dist site *.egg-info

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/demo.stamp: pyproject.toml $(CONSTRAINTS) | $(VENV)/bin/python
	@echo "setting up (a few minutes the first time) ..."
	$(PIP) -c $(CONSTRAINTS) -e '.[local,search,retrieval,report,serve]'
	$(BIN)/compound models get smollm2
	@touch $@

$(VENV)/dev.stamp: pyproject.toml $(CONSTRAINTS) | $(VENV)/bin/python
	@echo "setting up (a few minutes the first time) ..."
	$(PIP) -c $(CONSTRAINTS) -e '.[dev]'
	$(BIN)/compound models get smollm2
	@touch $@

$(VLLM)/vllm.stamp: tests/real_vllm/install.py tests/real_vllm/constraints.txt
	@echo "setting up vLLM (several minutes the first time) ..."
	$(PYTHON) tests/real_vllm/install.py $(VLLM)
	@touch $@

$(RAY)/ray.stamp: tests/real_ray/install.py $(VENV)/dev.stamp
	@echo "setting up Ray ..."
	$(BIN)/python tests/real_ray/install.py $(RAY)
	@touch $@
