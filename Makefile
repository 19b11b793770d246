# Everything here needs only Python >= 3.10, pip and make; the first target that needs it builds .venv.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/ready
# How many processes run the tests; the multi-rank tests start more of their own.
JOBS   ?= 2

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-integrations lint pytest bench fixtures clean

help:
	@echo "make demo      train on 4 ranks, kill one in the middle of a save, resume byte-equal"
	@echo "make test      ruff, mypy --strict and pytest"
	@echo "make lint      ruff and mypy alone"
	@echo "make pytest    pytest alone: make pytest ARGS='tests/test_box.py -n 0'"
	@echo "make test-integrations    the loops of Lightning, Transformers and Accelerate, which it installs"
	@echo "make bench     ckptspec beside torch.save, safetensors, torch.distributed.checkpoint and the disk"
	@echo "make fixtures  write tests/conformance again (byte for byte the same unless the format changed)"
	@echo "make clean     remove .venv, caches and build folders"

venv: $(READY)

# A new .venv whenever what it should hold changes: an old one may keep what nobody asks for any more.
# Some systems ship venv without ensurepip; pip >= 22.3 can then install itself into the new environment.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "ckptspec needs Python >= 3.10, $(PYTHON) is " + sys.version)'
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV) || { $(PYTHON) -m venv --clear --without-pip $(VENV) && $(PYTHON) -m pip --python $(BIN)/python install pip; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[torch,store,dev]'
	@touch $@

demo: $(READY)
	$(BIN)/ckptspec demo $(DIR)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint pytest

pytest: $(READY)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(ARGS)

# Apart from the rest: these libraries take longer to install than all else but torch.
$(VENV)/integrations: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[lightning,transformers]'
	@touch $@

test-integrations: $(VENV)/integrations
	$(BIN)/python -m pytest -m integrations $(ARGS)

bench: $(READY)
	$(BIN)/python tools/bench/run.py $(ARGS)

fixtures: $(READY)
	$(BIN)/python tools/make_fixtures.py

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
