# Every target sets up its own virtual environment on first use; later runs reuse it.
#   make demo [N=4]   train a small transformer with N tensor-parallel ranks beside the unsharded model
#   make test         the tests to run before every commit            make lint / make format / make clean
#   make test-driver  three folders of them, where a CUDA driver is present: a stub
#   make test-more    the slow ones, and a minute or two of each fuzzer and of the fault campaign, seeds drawn and printed or
#                     SEED=1; the page of collectives is tested in Chromium (apt install chromium)
#   make test-all     all of these
#   make docs         build/site/index.html: all pages and every public name, as a site that works from disk
#   make semantics    docs/semantics.md: which derivative of which collective is tested, from a run of its tests
#   make collectives  docs/collectives.html: the page on which elements move, of python -m pynccl explain
# Options: PYTHON=python3.12 (of a new .venv), VENV=folder, ARGS="..." (handed to train.py or pytest), DEMO_STEPS=20,
#          WORKERS=4 (tests at once: most of them wait, for ranks or for an end, so twice the cores)

PYTHON ?= python3
VENV ?= .venv
N ?= 2
DEMO_STEPS ?=
WORKERS ?= 4
ARGS ?=
SEED ?=

PY := $(VENV)/bin/python
STAMP := $(VENV)/.complete
LOG := $(VENV).log

.PHONY: help setup demo test test-driver test-more test-all semantics docs collectives lint format clean
.DELETE_ON_ERROR:

help:
	@sed -n '2,/^$$/s/^# //p' Makefile

setup: $(STAMP)

# --local-addr: left to itself, torchrun looks for the address of the hostname, and a hostname need not have one.
demo: $(STAMP)
	OMP_NUM_THREADS=1 $(PY) -m torch.distributed.run --standalone --local-addr=127.0.0.1 --nproc-per-node=$(N) \
	    scripts/train.py --check $(if $(DEMO_STEPS),--steps $(DEMO_STEPS)) $(ARGS)

test: $(STAMP)
	$(PY) -m pytest -n $(WORKERS) --dist worksteal -m "not slow" --junitxml=out/tests.xml $(ARGS)

# As on a machine with a GPU, which a torch for CPUs cannot use: the driver is a stub that ends a process at a wrong handle.
test-driver: $(STAMP)
	$(PY) tests/support/stub_driver.py build/driver
	LD_LIBRARY_PATH=$(CURDIR)/build/driver $(PY) -m pytest -n $(WORKERS) --dist worksteal -m "not slow" \
	    tests/binding tests/torch_backend tests/tools

test-all: test test-driver test-more

test-more: $(STAMP)
	$(PY) -m pytest -n $(WORKERS) --dist worksteal -m slow
	$(PY) scripts/faults/fuzzer.py autograd --runs 20 $(if $(SEED),--seed $(SEED))
	$(PY) scripts/faults/fuzzer.py overlap --runs 100 $(if $(SEED),--seed $(SEED))
	$(PY) scripts/faults/fuzzer.py models --runs 60 $(if $(SEED),--seed $(SEED))
	$(PY) scripts/faults/fuzzer.py arguments --runs 3000 --ranks 1,2 --seed $(shell date +%y%j)0000
	$(PY) scripts/faults/campaign.py --runs 100 $(if $(SEED),--seed $(SEED))

semantics: $(STAMP)
	$(PY) scripts/semantics_table.py $(ARGS)

# The variable silences a notice of the theme about the end of its support.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict $(ARGS)

collectives: $(STAMP)
	PYNCCL_LIBRARY=host OMP_NUM_THREADS=1 $(PY) -m pynccl explain reduce_scatter --html docs/collectives.html

lint: $(STAMP) build/mypy/pynccl_autograd
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy pynccl build/mypy/pynccl_autograd $(wildcard scripts) tests

format: $(STAMP)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean:
	rm -rf $(VENV) $(LOG) build dist out *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# mypy names a package after its folder; through this link the folder autograd/ is pynccl_autograd, as when installed.
build/mypy/pynccl_autograd:
	@mkdir -p $(@D) && ln -sfn ../../autograd $@

# The stamp is written last and removed first, so a set-up that broke off is never taken for a finished one.
# torch goes first because it decides about libnccl: a torch that brings its own nvidia-nccl wheel must stay alone with it
# (two such wheels overwrite each other's libnccl.so.2); beside a torch for CPUs the cu12 extra gives the tests a real one.
NCCL_EXTRA = $(PY) -c 'from importlib.metadata import requires; \
    print("" if any("nvidia-nccl" in r for r in requires("torch") or []) else ",cu12")'

$(STAMP): pyproject.toml setup.py constraints.txt
	@rm -f $@
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	    || { echo "make: $(PYTHON) is not Python 3.10 or later; name one with PYTHON=python3.12"; exit 1; }
	@echo "setting up $(VENV) (once, a minute or two; what pip says goes to $(LOG))"
	@{ { $(PY) -m pip --version || $(PYTHON) -m venv --clear $(VENV); } \
	    && $(PY) -m pip install -c constraints.txt torch \
	    && extra="$$($(NCCL_EXTRA))" \
	    && $(PY) -m pip install -c constraints.txt --no-build-isolation -e ".[test,dev,docs,plot,hf$$extra]"; \
	  } >$(LOG) 2>&1 || { tail -n 20 $(LOG); \
	    echo "make: setting up $(VENV) failed; the last lines of $(LOG) are above. The next make tries again."; exit 1; }
	@touch $@
