# Every target sets up what it needs: a virtual environment with the versions of constraints.txt.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

# TorchRec pins versions and asks for a GPU build of FBGEMM: its tests have an environment of their own.
TORCHREC_VENV  := .venv-torchrec
TORCHREC_BIN   := $(TORCHREC_VENV)/bin
TORCHREC_READY := $(TORCHREC_VENV)/.ready
PINS           := --constraint constraints.txt --constraint constraints-torchrec.txt

.PHONY: setup run test torchrec-setup test-torchrec lint check bench bench-placement studies profiles accuracy validate-cpu clean

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(READY)

setup: $(READY)            ## the environment alone

run: $(READY)              ## search the Criteo Terabyte space
	$(BIN)/dse run spaces/dlrm_terabyte.yaml --overwrite

lint: $(READY)             ## what needs no test run
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint                 ## lint, types, import rules, tests
	$(BIN)/pytest

$(TORCHREC_READY): pyproject.toml constraints.txt constraints-torchrec.txt
	test -x $(TORCHREC_BIN)/python || $(PYTHON) -m venv $(TORCHREC_VENV)
	$(TORCHREC_BIN)/pip install --quiet $(PINS) torch
	$(TORCHREC_BIN)/pip install --quiet $(PINS) --editable '.[torchrec]' pytest pytest-benchmark hypothesis
	$(TORCHREC_BIN)/pip install --quiet $(PINS) --no-deps torchrec fbgemm-gpu-cpu
	touch $(TORCHREC_READY)

torchrec-setup: $(TORCHREC_READY)  ## the environment of test-torchrec alone

test-torchrec: $(TORCHREC_READY)   ## the bridge to TorchRec, with TorchRec; fails where it cannot be imported
	$(TORCHREC_BIN)/python -c 'from dse.placement.torchrec.packages import require; require()'
	$(TORCHREC_BIN)/pytest tests/dse/placement/torchrec

bench: $(READY)            ## rates and ratios; nothing fails on time
	$(BIN)/pytest tests/bench --benchmark-enable --benchmark-only

bench-placement: $(READY)  ## placements against their targets, into docs/placement.md; beside TorchRec after torchrec-setup
	$(if $(wildcard $(TORCHREC_READY)),$(TORCHREC_BIN),$(BIN))/python tests/bench/placement.py --document docs/placement.md

studies: $(READY)          ## re-run every study
	for study in studies/*/run.py; do $(BIN)/python $$study || exit 1; done

validate-cpu: $(READY)     ## calibrate this CPU, then predict and measure designs it has not seen
	$(BIN)/python -m dse.validation.unseen --document docs/validation.md

profiles: $(READY)         ## fit the bundled profiles anew: make profiles DATA=folder of raw measurements
	$(BIN)/python -m perfcore.profile.fit --data $(DATA)

accuracy: $(READY)         ## docs/accuracy.md: kernels from the errors that the profiles state, traces replayed
	$(BIN)/python -m perfcore.profile.accuracy
	$(BIN)/python -m perfcore.trace.accuracy --data tests/data

clean:
	rm -rf $(VENV) $(TORCHREC_VENV) runs .mypy_cache .ruff_cache .pytest_cache
