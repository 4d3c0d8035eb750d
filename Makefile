# Both commands make .venv, install the pinned requirements, and run. They need python 3.10 or newer, a C++ compiler and make; on a machine
# with a GPU also the CUDA toolkit's nvcc.
PYTHON ?= python3
VENV = .venv

.PHONY: run test measure chart versions

run: $(VENV)/installed
	$(VENV)/bin/python harness.py

test: $(VENV)/installed
	$(VENV)/bin/python -m pytest

# The CPU tests with older versions of PyTorch, and gigabytes of wheels for them; see tests/versions.py.
versions:
	python3.11 tests/versions.py
	python3.11 tests/versions.py --shared-cache

# The committed measurements, anew; they are an H200's. Of one pair alone: make measure MEASURED=instance_norm
MEASURED ?= $(notdir $(basename $(wildcard kernels/*.py)))
RECORD = $(VENV)/bin/python harness.py $$name --device cuda
measure: $(VENV)/installed
	set -e; for name in $(MEASURED); do \
	    $(RECORD) --precision highest,high --backward --json results/h200/$$name.json; \
	    $(RECORD) --sweep --dtype float32,bfloat16 --json results/sweep/$$name.json; \
	done

# The README's table and charts, from the committed measurements.
chart: $(VENV)/installed
	$(VENV)/bin/pip install --quiet matplotlib
	$(VENV)/bin/python tests/tools/plot.py
	$(VENV)/bin/python harness.py $(patsubst %,--from %,$(wildcard results/h200/*.json)) --markdown

$(VENV)/installed: requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet -r requirements.txt
	touch $@
