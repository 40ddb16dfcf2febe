# make demo  : the main job on the embedded engine, no GPU needed
# make test  : the test suite
# Each makes .venv by itself. A CPU build of torch is pinned only where no torch is present and no GPU is seen.
PYTHON ?= python3
VENV   ?= .venv
VLLM_VENV ?= .venv-vllm
BIN     = $(VENV)/bin
TORCH_CPU = torch==2.13.0
# Its interpreter runs our kernels on a CPU; 290 MB to fetch, 1 GB installed. A GPU's torch brings a Triton of its own.
TRITON  = triton==3.9.0
JOBS   ?= auto

.PHONY: demo test test-attach test-extras test-vllm nightly docs lint types bench clean

$(VENV)/.core: pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c 'import torch' 2>/dev/null || $(MAKE) --no-print-directory .torch
	@$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/.ready: $(VENV)/.core
	@$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@$(BIN)/python -c 'import triton' 2>/dev/null || $(MAKE) --no-print-directory .triton
	@touch $@

.PHONY: .torch
.torch:
	@if [ -e /dev/nvidiactl ] || [ -e /dev/kfd ]; then $(BIN)/python -m pip install --quiet 'torch>=2.11'; \
	else $(BIN)/python -m pip install --quiet '$(TORCH_CPU)'; fi

.PHONY: .triton
.triton:
	@if [ "`uname -sm`" = "Linux x86_64" ]; then $(BIN)/python -m pip install --quiet '$(TRITON)'; fi

demo: $(VENV)/.core
	@$(BIN)/python cli.py profile --demo

# A test that hangs, in native code with the GIL held too, ends its worker and not the run.
PYTEST = -m pytest -q $(PYTEST_FLAGS) -n $(JOBS) --timeout 300 --timeout-method thread \
	-o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true

# Tests that attach to other processes come after the rest: they want the cores to themselves.
test: $(VENV)/.ready
	$(BIN)/python $(PYTEST) -m "not vllm and not live and not slow and not attach"
	$(BIN)/python $(PYTEST) -m "attach and not vllm and not live" tests/profiler

test-extras: $(VENV)/.ready
	$(BIN)/python -m pytest -q $(PYTEST_FLAGS) -n $(JOBS) -m slow

docs: $(VENV)/.ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet --site-dir site

$(VLLM_VENV)/.ready: pyproject.toml tests/live_server/requirements.txt
	bash tests/live_server/setup.sh $(VLLM_VENV)
	$(VLLM_VENV)/bin/pip install --quiet --no-compile 'pytest>=8.2' 'pytest-timeout>=2.3' 'pytest-rerunfailures>=14' 'hypothesis>=6.100' 'jsonschema>=4.21' 'rich>=13.7' 'typer>=0.12' 'pyzmq>=25.1' 'frida>=17'
	$(VLLM_VENV)/bin/pip install --quiet --no-deps --editable .
	@touch $@

# The engine under every mode of the planner takes long: make nightly runs it.
test-vllm: $(VLLM_VENV)/.ready
	$(VLLM_VENV)/bin/python -m pytest -q $(PYTEST_FLAGS) --timeout 900 -m "vllm or live" \
		--ignore tests/vllm/test_planned_steps.py

test-attach: $(VENV)/.ready $(VLLM_VENV)/.ready
	$(BIN)/python $(PYTEST) -m "attach and not vllm and not live" tests/profiler
	$(VLLM_VENV)/bin/python -m pytest -q $(PYTEST_FLAGS) -m "attach and live"

# The long runs: BATCHES random batches through the planned builders (SEED: where an earlier run ended), 10,000 steps.
BATCHES ?= 1000000
SEED    ?= 0
nightly: $(VENV)/.ready $(VLLM_VENV)/.ready
	$(BIN)/python bench/service.py --stress
	$(VLLM_VENV)/bin/python tests/vllm/planned_sweep.py --batches $(BATCHES) --seed $(SEED)
	SYNCFREE_PLANNED_ROUNDS=9 $(VLLM_VENV)/bin/python -m pytest -q $(PYTEST_FLAGS) tests/vllm/test_planned_steps.py

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy needs a folder whose name is an identifier: the symlink stands in for the package name.
types: $(VENV)/.ready
	@mkdir -p .types && ln -sfn .. .types/syncfree
	MYPYPATH=.types $(BIN)/mypy --strict -p syncfree

# The peers of the planning rows are vLLM's own functions: they need the environment of the vLLM tests.
bench: $(VENV)/.ready $(VLLM_VENV)/.ready
	$(BIN)/python bench/run.py

clean:
	rm -rf $(VENV) $(VLLM_VENV) .types build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
