# Everything is set up by pip in $(VENV); nothing but make and Python 3.11+ is needed beforehand.
PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
ARGS ?=

BIN := $(VENV)/bin

# The real data sets, where they lie beside the checkout. Set DUALFORM_DATA (even to nothing) to overrule.
ifeq ($(origin DUALFORM_DATA),undefined)
DATA := $(shell cd ../shared/data 2>/dev/null && pwd)
ifneq ($(DATA),)
export DUALFORM_DATA := $(DATA)
endif
endif

.PHONY: help demo test test-long check format docs lock clean

help:
	@echo "make demo       the demonstration"
	@echo "make test       the tests (ARGS='-k name' selects, JOBS=n sets the processes)"
	@echo "make test-long  the tests that take longer than a few minutes"
	@echo "make check      ruff and mypy"
	@echo "make format     let ruff format and fix"
	@echo "make docs       the documentation, into site/"
	@echo "make lock       resolve constraints.txt anew"
	@echo "make clean      remove what make made"

demo: $(VENV)/.demo
	$(BIN)/dualform demo $(ARGS)

# One thread a process, so that the processes do not compete for the cores.
test: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal $(ARGS)

test-long: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal -m long $(ARGS)

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# No --quiet here: it would silence the warnings before --strict counts them.
docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir site

# The build environment obeys the lock too; which of the two variables says so depends on pip's age.
PIP_INSTALL := PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt \
	"$(BIN)/python" -m pip install -qq

# dev contains demo, so installing dev serves both stamps.
$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/.created
	@echo "Installing dualform[dev] into $(VENV). PyTorch is large: the first time takes some minutes."
	@$(PIP_INSTALL) -c constraints.txt -e '.[dev]'
	@touch $@ $(VENV)/.demo

$(VENV)/.demo: pyproject.toml constraints.txt | $(VENV)/.created
	@echo "Installing dualform[demo] into $(VENV). PyTorch is large: the first time takes some minutes."
	@$(PIP_INSTALL) -c constraints.txt -e '.[demo]'
	@touch $@

$(VENV)/.created:
	@command -v $(PYTHON) >/dev/null || { \
		echo "dualform needs Python 3.11 or newer; there is no '$(PYTHON)'. Name one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "dualform needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1). Name another: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "'$(PYTHON)' cannot make virtual environments. On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@$(PYTHON) -m venv --clear $(VENV)
	@touch $@

# torch stays at the version pinned now: change that line of constraints.txt by hand first. Local version labels are cut off.
lock:
	@rm -rf .lock && $(PYTHON) -m venv .lock
	@grep '^torch==' constraints.txt > .lock/torch.txt
	@.lock/bin/python -m pip install -qq -c .lock/torch.txt -e '.[dev]' hatchling editables
	@{ sed '/^#/!d' constraints.txt; .lock/bin/python -m pip freeze --all --exclude-editable \
		| grep -v '^pip==' | sed 's/+.*//'; } > .lock/constraints.txt
	@mv .lock/constraints.txt constraints.txt && rm -rf .lock

clean:
	rm -rf .venv .lock site dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
