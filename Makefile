# `make demo` and `make test` do all their own set-up in .venv. `make help` lists the rest.
#
# PYTHON       the Python that .venv is made with (3.11 or newer, with venv and headers)
# CXX          the C++ compiler that torch.compile calls at run time
# TORCH_INDEX  another package index for torch alone, empty for pip's own. On Linux pip's own
#              index may serve torch with several GB of CUDA libraries; without an NVIDIA GPU,
#              give an index that has the CPU build: make test TORCH_INDEX=<index URL>
#              It counts when torch is installed; to change it later, remove .venv first.
# WORKERS      processes that `make test` runs side by side, each with OMP_NUM_THREADS=1
# SOAK_SECONDS how long `make soak` and `make soak-http` go on
# FUZZ_EXAMPLES cases that `make fuzz` draws for each property
# FUZZ_SEED    what `make fuzz` draws by; printed with its command, so that a run can be repeated
# DEPLOYMENT   what `make demo` decodes with; configs/tiny-v41.yaml is the quantised form
PYTHON ?= python3
CXX ?= g++
TORCH_INDEX ?=
WORKERS ?= 2
SOAK_SECONDS ?= 600
FUZZ_EXAMPLES ?= 1000
FUZZ_SEED ?= $(shell od -An -N4 -tu4 /dev/urandom | tr -d ' ')
DEPLOYMENT ?= configs/tiny.yaml
export CXX

FOLDERS = engine graphs kernels capture configs
BIN = .venv/bin
PIP = $(BIN)/python -m pip --disable-pip-version-check
# What an earlier call made is what counts: its Python may have been another than today's PYTHON.
CHECKED_PYTHON = $(if $(wildcard .venv/bin/python),.venv/bin/python,$(PYTHON))

.DEFAULT_GOAL := help
.PHONY: help demo test slow soak soak-http aiperf fuzz browser packaging kernels cubins \
        check-libraries bench check typing wheel setup clean check-machine

help:
	@echo "make demo        set up, capture the grid of the embedded model, decode three prompts"
	@echo "make test        set up and run the tests"
	@echo "make slow        the tests that take minutes"
	@echo "make soak        one engine under clients of all kinds for SOAK_SECONDS"
	@echo "make soak-http   a server under clients of all kinds for SOAK_SECONDS"
	@echo "make aiperf      aiperf, in an environment of its own, against a server"
	@echo "make fuzz        FUZZ_EXAMPLES random bodies and deployments for each property"
	@echo "make browser     the report page in Chromium (Debian: chromium, chromium-driver)"
	@echo "make packaging   the tests that build the wheel"
	@echo "make kernels     values of the CUDA kernels on the CPU, traces of the CUDA step: minutes"
	@echo "make cubins      every CUDA kernel with nvcc, without a GPU"
	@echo "make check-libraries  the calls of the wrappers against the libraries' own packages"
	@echo "make check       ruff and mypy"
	@echo "make typing      links that let type checkers and editors see decodegrid.<folder>"
	@echo "make bench       the decode benchmark, as ratios"
	@echo "make wheel       dist/*.tar.gz and dist/*.whl"
	@echo "make setup       only the set-up for tests and checks"
	@echo "make clean       remove builds and caches (.venv stays)"
	@echo "variables: PYTHON=$(PYTHON) CXX=$(CXX) TORCH_INDEX=$(TORCH_INDEX) WORKERS=$(WORKERS) DEPLOYMENT=$(DEPLOYMENT)"

demo: .venv/.ready-run
	$(BIN)/python -m decodegrid generate --config $(DEPLOYMENT) \
	  "Once upon a time, in a small village by the sea," \
	  "Write a JSON object with a name, an age and a city." \
	  "Three tips for a good night's sleep:"

test: .venv/.ready-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile

slow: .venv/.ready-dev
	$(BIN)/python -m pytest -q -m slow

soak: .venv/.ready-dev
	DECODEGRID_SOAK_SECONDS=$(SOAK_SECONDS) OMP_NUM_THREADS=1 \
	  $(BIN)/python -m pytest -q -s -m slow tests/engine/test_soak.py

soak-http: .venv/.ready-dev
	DECODEGRID_SOAK_SECONDS=$(SOAK_SECONDS) OMP_NUM_THREADS=1 \
	  $(BIN)/python -m pytest -q -s -m slow tests/engine/serve/soak

aiperf: .venv/.ready-dev
	benchmarks/aiperf.sh

fuzz: .venv/.ready-dev
	DECODEGRID_FUZZ_EXAMPLES=$(FUZZ_EXAMPLES) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q \
	  --hypothesis-seed=$(FUZZ_SEED) \
	  tests/configs/test_load_fuzz.py tests/engine/serve/test_serve_fuzz.py \
	  tests/engine/serve/test_serve_schema.py tests/engine/serve/test_serve_schemathesis.py

browser: .venv/.ready-dev
	$(PIP) install -q -c constraints.txt --no-build-isolation -e '.[browser]'
	$(BIN)/python -m pytest -q -m browser

packaging: .venv/.ready-dev
	$(BIN)/python -m pytest -q -m packaging

kernels: .venv/.ready-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile -m kernels

cubins: .venv/.ready-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m decodegrid.kernels.tile.build --out build/cubins
	$(BIN)/python -m pytest -q -m cubins

check-libraries: .venv/.ready-dev
	$(BIN)/python -m tests.kernels.providers.check_libraries

bench: .venv/.ready-run
	$(BIN)/python -m benchmarks.decode

check: .venv/.ready-dev typing
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy benchmarks/*.py
	$(BIN)/mypy training

typing:  # a link farm that lets type checkers and editors see decodegrid.<folder>
	@mkdir -p build/typing/decodegrid
	@for d in $(FOLDERS); do ln -sfn ../../../$$d build/typing/decodegrid/$$d; done
	@for f in __init__.py __main__.py py.typed; do \
	  ln -sf ../../../decodegrid/$$f build/typing/decodegrid/$$f; done

wheel: .venv/.ready-dev  # through the sdist, so that no stale build/lib is shipped
	rm -rf build/lib build/bdist.* dist *.egg-info
	$(BIN)/python -c "import setuptools.build_meta as b; print(b.build_sdist('dist'))"
	$(PIP) wheel --no-deps --no-build-isolation -w dist dist/*.tar.gz

clean:
	rm -rf build/lib build/bdist.* build/typing dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .decodegrid_cache
	find $(FOLDERS) decodegrid tests benchmarks training -name __pycache__ -prune -exec rm -rf {} + \
	  2>/dev/null || true

setup: .venv/.ready-dev

# One line for each thing that is missing, all of them at once.
define MACHINE_CHECK
import sys, sysconfig, importlib.util, pathlib
version = sys.version.split()[0]
if sys.version_info < (3, 11):
    print(f"error: {sys.executable} is Python {version}; 3.11 or newer is needed (PYTHON=...)")
    sys.exit(1)
missing = [m for m in ("venv", "ensurepip") if importlib.util.find_spec(m) is None]
if missing:
    print(f"error: {sys.executable} lacks the module {missing[0]} (Debian: python3-venv)")
header = pathlib.Path(sysconfig.get_paths()["include"]) / "Python.h"
if not header.is_file():
    print(f"error: the headers of Python {version} are missing: {header} (Debian: python3-dev)")
sys.exit(bool(missing) or not header.is_file())
endef
export MACHINE_CHECK

check-machine:
	@status=0; \
	if ! command -v $(firstword $(CXX)) >/dev/null 2>&1; then \
	  echo "error: no C++ compiler: $(CXX) is not found (Debian: g++; another one: CXX=...)" >&2; \
	  status=1; \
	fi; \
	if ! command -v $(CHECKED_PYTHON) >/dev/null 2>&1; then \
	  echo "error: no Python: $(CHECKED_PYTHON) is not found (another one: PYTHON=...)" >&2; \
	  status=1; \
	else \
	  $(CHECKED_PYTHON) -c "$$MACHINE_CHECK" >&2 || status=1; \
	fi; \
	exit $$status

# torch comes first and alone, so that TORCH_INDEX is asked for nothing else.
.venv/.ready-torch: constraints.txt | check-machine
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv .venv
	@echo "installing torch (a large download)"
	$(PIP) install -q -c constraints.txt \
	  $(if $(TORCH_INDEX),--no-deps --index-url $(TORCH_INDEX)) torch
	$(PIP) install -q -c constraints.txt torch setuptools
	@touch $@

.venv/.ready-run: .venv/.ready-torch pyproject.toml | check-machine
	$(PIP) install -q -c constraints.txt --no-build-isolation -e '.[report]'
	@touch $@

.venv/.ready-dev: .venv/.ready-run | check-machine
	$(PIP) install -q -c constraints.txt --no-build-isolation -e '.[dev,report,cross-check,otel,kernels]'
	@touch $@
