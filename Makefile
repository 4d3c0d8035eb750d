# Each command makes .venv, installs the pinned requirements, and runs. They need Python 3.10 or newer, a C++ compiler
# and make; on a machine with a GPU also the CUDA toolkit's nvcc.
PYTHON ?= python3
VENV = .venv

.PHONY: run test lint measure sweep chart

run: $(VENV)/installed
	$(VENV)/bin/python harness.py

test: $(VENV)/installed-for-tests
	$(VENV)/bin/python -m pytest -n auto --maxschedchunk 1

lint: $(VENV)/installed-for-tests
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/python tests/tools/format_strings.py

# The committed measurements, anew; MACHINE is a folder of results/. Of one file alone: MEASURED=instance_norm. Of
# what an A100 runs: MEASURED=instance_norm TORCH_CUDA_ARCH_LIST=8.0+PTX MACHINE=h200_as_8.0
MACHINE ?= h200
MEASURED ?= $(patsubst kernels/%.py,%,$(wildcard kernels/*.py kernels/hopper/*.py))
RECORD = $(VENV)/bin/python harness.py $$name --device cuda --seconds 0.25
measure: $(VENV)/installed
	set -e; for name in $(MEASURED); do \
	    json=results/$(MACHINE)/$$name; \
	    $(RECORD) --backward --dtype float32,bfloat16 --json $$json.json; \
	    case $$name in *linear*|hopper/conv*) $(RECORD) --backward --precision high --baselines eager --json $${json}_tf32.json;; esac; \
	done

# Other shapes, by events in one process. harness.py --sweep judges each of them, but takes hours for all.
sweep: $(VENV)/installed
	mkdir -p results/sweep/hopper
	set -e; for name in $(MEASURED); do \
	    $(VENV)/bin/python tests/tools/sweep.py --compile --json results/sweep/$$name.json $$name; \
	done

# The charts, and the tables of the three READMEs, from the committed measurements.
chart: $(VENV)/installed
	$(VENV)/bin/pip install --quiet matplotlib
	$(VENV)/bin/python tests/tools/plot.py
	$(VENV)/bin/python tests/tools/summary.py

$(VENV)/installed: requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet -r requirements.txt
	touch $@

$(VENV)/installed-for-tests: $(VENV)/installed requirements-test.txt
	$(VENV)/bin/pip install --quiet -r requirements-test.txt
	touch $@
