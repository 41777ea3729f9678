# Every target does its own set-up: a fresh clone needs nothing but Python >= 3.10 and make.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
JOBS   ?= $(shell echo $$(( $$(nproc 2>/dev/null || echo 1) + 1 )))

# TORCH=1 adds torch (CPU) and the frameworks that run on it or beside it: parity, framework tests, benchmarks.
TORCH  ?= $(if $(CI),1,)
EXTRAS := $(if $(TORCH),$(VENV)/.torch,)

.PHONY: options demo test test-all torch-newest versions coverage test-long check format bench prove-packages chaos clean etcd prometheus chromium sshd runc slurm
.DEFAULT_GOAL := demo

$(READY): pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "needs Python >= 3.10 as '$(PYTHON)' (or PYTHON=…)"; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

$(VENV)/.torch: $(READY)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check 'torch==2.13.0' numpy
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check 'torch==2.13.0' jax accelerate lightning transformers requests
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[otel]'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps axe-core-python
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check 'kubernetes-validate==1.37.0' 'kubeflow-trainer-api==2.3.0'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check atheris || echo "no atheris for this Python"
	@touch $@

# The reference page of the options and the schemas of --json; tests compare them with the sources.
options: $(READY)
	@$(BIN)/python -c 'from phalanx.cli.help import reference; print(reference(), end="")' > docs/options.md
	@for name in $$($(BIN)/phalanx help schema | cut -d' ' -f1); do \
		$(BIN)/phalanx help schema $$name > docs/schemas/$$name.json; done

# Slurm for the long tests: large, and not on a newcomer's way.
slurm:
	@{ command -v slurmd && command -v munged; } >/dev/null || { \
	  test "$$(id -u)" = 0 && command -v apt-get >/dev/null && { apt-get -qq update; \
	  DEBIAN_FRONTEND=noninteractive apt-get -qq install -y slurm-wlm munge >/dev/null; }; } || true

# A real etcd for the tests, where it can be had; without one they are skipped, except in CI, where they fail.
# With TORCH=1 a real Prometheus, a browser, sshd and runc, too.
etcd: $(if $(TORCH),prometheus chromium sshd runc)
	@command -v etcd >/dev/null && command -v ip >/dev/null && command -v openssl >/dev/null || { \
	  test "$$(id -u)" = 0 && command -v apt-get >/dev/null && { apt-get -qq update; \
	  DEBIAN_FRONTEND=noninteractive apt-get -qq install -y etcd-server iproute2 openssl gcc >/dev/null; }; } || true

sshd:
	@test -x /usr/sbin/sshd || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && { apt-get -qq update; \
	  DEBIAN_FRONTEND=noninteractive apt-get -qq install -y openssh-server >/dev/null; }; } || true

runc:
	@command -v runc >/dev/null || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && { apt-get -qq update; \
	  DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends runc >/dev/null; }; } || true

chromium:
	@command -v chromium >/dev/null || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && { apt-get -qq update; \
	  DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends chromium >/dev/null; }; } || true

# Only unpacked: installed, it would run as a service.
prometheus: $(READY)
	@command -v promtool >/dev/null || test -x $(VENV)/prometheus/usr/bin/promtool || { \
	  command -v apt-get >/dev/null && { test "$$(id -u)" != 0 || apt-get -qq update; } && cd $(VENV) && \
	  apt-get -qq download prometheus >/dev/null 2>&1 && dpkg -x prometheus_*.deb prometheus && rm prometheus_*.deb; } || true

demo: $(READY)
	@$(BIN)/python examples/demo.py

TESTS  ?=
PYTEST := $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal
test: $(READY) $(EXTRAS) etcd
	$(PYTEST) $(if $(TESTS),$(TESTS),-m "not thorough")

test-all: $(READY) $(EXTRAS) etcd
	$(PYTEST) $(TESTS)

# On every other version of Python that is found here: a part of the tests on each (.ci/versions), or with ALL=1 all
# of them. All on one version: make test-all PYTHON=python3.13 VENV=.venv-3.13
versions: etcd
	@JOBS=$(JOBS) .ci/versions $(PYTHON)

# Parity with torch, its jobs and hang verdicts once more, with the newest torch that is supported. Its environment
# takes all other packages from $(VENV). The build has its libraries for GPUs, which it needs to load: 5 GB.
NEWEST_TORCH ?= 2.15.0
NEWEST := $(VENV)-torch
NEWEST_TESTS := $(addprefix tests/unit/test_,$(addsuffix .py,parity parity_behaviour torch_paths torch_errors \
    torch_client torch_messages config numa record error_file synchronize timers events health)) \
  $(addprefix tests/system/test_,$(addsuffix .py,torch_jobs torch_store collective_hangs agent_steps environment \
    store_functions rendezvous_backend timers swap reentry mismatched_nodes cluster))
# Of modules that are about more than torch, the tests that have it in their names.
NEWEST_ONLY := torch or parity or config or collective or gloo or aborted
$(NEWEST)/.torch-$(NEWEST_TORCH): $(READY) $(VENV)/.torch
	@$(BIN)/python -m venv --clear $(NEWEST)
	@$(BIN)/python -c "import sysconfig; print('import site; site.addsitedir(%r)' % sysconfig.get_path('purelib'))" \
	  > $$($(NEWEST)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/others.pth
	@$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile 'torch==$(NEWEST_TORCH)'
	@$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

torch-newest: $(NEWEST)/.torch-$(NEWEST_TORCH)
	$(NEWEST)/bin/python -m pytest -q -n $(JOBS) --dist worksteal -p no:cacheprovider $(NEWEST_TESTS) \
	  -k "$(NEWEST_ONLY)"

# Coverage of all processes, by the tests named in COVER; no module of the core may be below 95 %.
COVER  ?= tests/unit tests/simulation
coverage: $(READY) $(EXTRAS) etcd
	$(PYTEST) $(COVER) --cov
	$(BIN)/python .ci/core_coverage.py

test-long: $(READY) $(EXTRAS) etcd slurm
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

# Each package in a clean environment of its own: hours. Rewrites src/phalanx/helpers/preload/packages.py and docs/warm.md.
# Some only: make prove-packages PROVE="numpy torch"; go on after an interruption: PROVE=--kept
PROVE  ?=
prove-packages: $(READY)
	$(BIN)/python -m tests.warm_packages $(PROVE)

# Ten minutes of random faults against real agents; as root, each in a network of its own (docs/chaos.md).
chaos: $(READY)
	$(BIN)/python -m tests.chaos $(CHAOS)

clean:
	rm -rf $(VENV) $(NEWEST) .venv-3.* .mypy_cache .ruff_cache .pytest_cache .hypothesis bench/results
