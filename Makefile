# Everything a developer or CI runs. `make demo` and `make test` work on a bare machine with Python 3.11+.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# uv installs where it is there, else pip; both show their progress.
UV := $(shell command -v uv 2>/dev/null)
PIP := $(if $(UV),$(UV) pip install --python $(BIN)/python --index-strategy unsafe-best-match,$(BIN)/python -m pip install)
INDEX := $(if $(PIP_EXTRA_INDEX_URL),--extra-index-url $(PIP_EXTRA_INDEX_URL))

# A Python that is too old says so before gigabytes are fetched; one without ensurepip leaves nothing that looks complete.
OLD := {sys.executable} is Python {sys.version.split()[0]} and 3.11 is needed; name a later one: make PYTHON=python3.12
make_venv = $(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit(f"$(OLD)")' \
	&& { $(PYTHON) -m venv $(1) || { rm -f $(1)/bin/python; exit 1; }; }

NATIVE := $(BIN)/python -m loraplex_server.backends.cpu.native.build --objects build/native

.PHONY: help install native demo test test-again test-nightly gpu-tests gpu-bench test-slow test-slow-models test-slow-servers test-slow-faults conformance conformance-ci check format proto wire-baseline docs wheel serve clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

# torch goes first and alone, so that every later install finds it there. Which build the pinned version is, is the package
# index's to say: PyPI's for Linux is the one for CUDA (gigabytes; it runs on a CPU as well). For the CPU build:
#   make install PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu TORCH=torch==2.13.0+cpu
# A build for CUDA brings the Triton that it goes with; elsewhere its kernels' tests take this one, or skip without.
TORCH ?= $(shell grep '^torch==' constraints.txt)
TRITON := triton==3.6.0

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || { $(call make_venv,$(VENV)); }
	$(PIP) $(INDEX) '$(TORCH)'
	@$(BIN)/python -c 'import triton' 2>/dev/null || $(PIP) $(INDEX) '$(TRITON)' \
		|| echo 'Triton cannot be had here; the tests of its kernels are skipped'
	$(PIP) $(INDEX) -c constraints.txt -e '.[dev]'
	@touch $@

install: $(STAMP) native  ## make the virtual environment

# Always asked, because the library knows of which sources it is; compiles only what has changed. A machine without a compiler
# goes on without; code that does not compile stops here.
native: $(STAMP)  ## build the native CPU kernels, where they are not those of the sources
	@$(NATIVE) --if-stale --optional

demo: $(STAMP) native  ## serve six adapters at once and show what each wrote
	$(BIN)/loraplex demo

serve: $(STAMP) native  ## serve a model: make serve MODEL=path-or-hub-id
	$(BIN)/loraplex serve $(MODEL)

# Dozens of child processes import the same modules: these are compiled once, whatever the environment says.
test: export PYTHONDONTWRITEBYTECODE :=
test: $(STAMP) native  ## the ordinary suite, without the repository's own tests (seven to twelve minutes on two cores)
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --ignore=tests/repo

# A test that fails beside another process and passes alone has to be mended, but says nothing against the commit.
test-again: $(STAMP) native  ## what failed last, once more and alone
	$(BIN)/python -m pytest -m 'not nightly and not gpu and not network' --last-failed --last-failed-no-failures none --timeout 1200

gpu-tests:  ## on a machine with a GPU: the tests that need one (eight minutes at most, installs nothing)
	$(PYTHON) scripts/gpu_check.py tests

gpu-bench:  ## on a machine with a GPU: decode steps against the bars (eight minutes at most, installs nothing)
	$(PYTHON) scripts/gpu_check.py bench

SLOW := $(BIN)/python -m pytest -m 'slow and not nightly and not gpu and not network' --timeout 1200
test-slow-models: export PYTHONDONTWRITEBYTECODE :=
test-slow: test-slow-models test-slow-servers test-slow-faults  ## the long suite

test-slow-models: $(STAMP) native
	$(SLOW) -n 2 --dist loadfile --no-loadscope-reorder tests/parity tests/property tests/unit

# What freezes and kills processes and watches the clock runs alone.
FAULTS := tests/integration/faults tests/integration/test_fleet.py tests/integration/test_adapter_churn.py
test-slow-servers: export PYTHONDONTWRITEBYTECODE :=
test-slow-servers: $(STAMP) native
	$(SLOW) -n 2 --dist loadfile --no-loadscope-reorder tests/integration $(FAULTS:%=--ignore=%)

test-slow-faults: export PYTHONDONTWRITEBYTECODE :=
test-slow-faults: $(STAMP) native
	$(SLOW) $(FAULTS)

test-nightly: $(STAMP) native  ## what is longer than the slow suite allows; by hand
	$(BIN)/python -m pytest -m 'nightly and not gpu and not network' --timeout 3600

conformance: $(STAMP) native  ## other servers' clients against a live server, each in an environment of its own
	$(BIN)/python tests/conformance/run.py

conformance-ci: $(STAMP) native  ## the same with fewer clients (six minutes at most)
	timeout 360 $(BIN)/python tests/conformance/run.py --ci

check: $(STAMP) native  ## exactly what CI runs besides the tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/buf lint
	$(BIN)/buf breaking --against proto/baseline.yaml
	bash scripts/proto.sh --check
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder tests/repo

format: $(STAMP)  ## let ruff rewrite
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: $(STAMP)  ## regenerate the committed *_pb2*.py
	bash scripts/proto.sh

# What `make check` compares the wire with. Replacing it in between would let a change pass that breaks users' stubs.
wire-baseline: $(STAMP)  ## at a release only: take the wire as it is now for the one that users hold
	$(BIN)/buf build --exclude-source-info -o proto/baseline.yaml
	sed -i "1i # The wire of version $$($(BIN)/python -c 'import loraplex_proto; print(loraplex_proto.__version__)')" proto/baseline.yaml

# In an environment of its own, whose tools nothing else needs. What it installs it asks of the package index, once.
docs: .venv-docs/.installed  ## build the documentation's site in build/site; wrong links and anchors fail
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --quiet --strict

.venv-docs/.installed: scripts/docs_requirements.txt
	@test -x .venv-docs/bin/python || { $(call make_venv,.venv-docs); }
	.venv-docs/bin/python -m pip install -q -r scripts/docs_requirements.txt
	@touch $@

# In an environment of its own, whose tools nothing else needs; it asks the package index.
wheel:  ## build and check the distributions: wheels and sources, in dist/; publishes nothing
	@test -x .venv-wheel/bin/python || { $(call make_venv,.venv-wheel); }
	.venv-wheel/bin/python -m pip install -q -r packages/requirements.txt
	.venv-wheel/bin/python scripts/wheels.py

clean:
	rm -rf build dist .pytest_cache .ruff_cache
