# Every target does its own set-up: a fresh clone needs nothing but Python >= 3.11 and make.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

# TORCH=1 adds torch (CPU), which the parity tests and the benchmarks compare with.
TORCH  ?= $(if $(CI),1,)
EXTRAS := $(if $(TORCH),$(VENV)/.torch,)

.PHONY: demo test test-long check format bench clean
.DEFAULT_GOAL := demo

$(READY): pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "needs Python >= 3.11 as '$(PYTHON)' (or PYTHON=…)"; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

$(VENV)/.torch: $(READY)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check 'torch==2.13.0' numpy
	@touch $@

demo: $(READY)
	@$(BIN)/python examples/demo.py

test: $(READY) $(EXTRAS)
	$(BIN)/python -m pytest -q

test-long: $(READY) $(EXTRAS)
	$(BIN)/python -m pytest -q -m long --timeout 3600

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY) $(EXTRAS)
	$(BIN)/python -m bench

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis bench/results
