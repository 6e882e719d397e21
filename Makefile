# make help lists what there is.
PYTHON ?= python3
# Where tenants reach what make serve starts.
export PORT ?= 8000
BIN := .venv/bin
INSTALLED := .venv/.installed
# The same random cases each time: others are for make soak.
TEST := $(BIN)/pytest -m "not soak and not gpu and not attack" --hypothesis-profile ci
# These start the whole service: a quarter of the processor time of all tests.
SERVICE_TESTS := tests/e2e tests/demo/test_make_serve.py tests/loadtest/test_loadtest.py
# These import torch and mostly PEFT, 8 s of processor time a process. No other file of tests does.
ENGINE_TESTS := tests/engine tests/replica tests/corpus tests/demo tests/doctor tests/gpu \
	tests/cli/test_convert.py tests/gateway/test_heads.py tests/gateway/test_tokenize.py \
	tests/gateway/test_trainer_client.py tests/loadtest/engine tests/loadtest/test_goodput.py \
	tests/loadtest/test_real_service.py tests/test_tokenizer_vocabulary.py
# These hold times to bounds, and run alone.
TIMED_TESTS := tests/engine/execution/test_calibration.py tests/engine/scheduling/test_deadlines.py \
	tests/loadtest/test_client.py \
	tests/metrics/test_size.py tests/routing/test_choice_time.py
# In the order of files: sorted by their number of tests, as is the default, the longest file, one
# test of minutes, would begin last.
UNITS := nice -n 19 $(TEST) --dist loadfile --no-loadscope-reorder
# Where benchmarks on GPUs keep models and adapters, some 100 GB: in memory if there is as much.
MODELS ?= /tmp/lorikeet-models

# Tests and benchmarks start Ray with these, as lorikeet serve does, which sets them itself.
export RAY_SERVE_THROUGHPUT_OPTIMIZED ?= 1
# That makes every call through Serve a gRPC call but the HTTP proxy's.
export RAY_SERVE_PROXY_USE_GRPC ?= 1
# Above 4 MiB calls and answers would fail otherwise; see k8s/base/settings.env.
export RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH ?= 134217728
export RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH ?= lorikeet.serving.proxy_middleware:middlewares
# Ray's own is 15: any other program would take the cores of engines and gateways.
export RAY_worker_niceness ?= 0
export RAY_USAGE_STATS_ENABLED ?= 0
export TOKENIZERS_PARALLELISM ?= false
# Else each of the 200 processes that tests start compiles what it imports, where this is set.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install serve stop test test-service test-engine test-platform check soak attack test-gpu test-ceph bench-gateway bench-http bench-goodput loadtest clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

install: $(INSTALLED)  ## install everything into .venv

# torch first and alone: asked for together with the rest, pip may choose another build of it.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is wanted: make $(MAKECMDGOALS) PYTHON=python3.12")'
	@echo "Installing into .venv: a minute or two, and about 1 GB (torch, Ray, transformers)…"
	@$(PYTHON) -m venv .venv
	@$(BIN)/pip install --quiet --upgrade "pip>=25.1"
	@$(BIN)/pip install --quiet --constraint constraints.txt torch
	@$(BIN)/pip install --quiet --constraint constraints.txt --editable . --group dev
	@touch $@

serve: $(INSTALLED)  ## start the service with the demo model and its adapters; PORT=8000
	@$(BIN)/python -m demo.serve

stop: $(INSTALLED)  ## stop the service that make serve started here
	@$(BIN)/lorikeet stop

check: $(INSTALLED)  ## lint, types, import directions, pinned packages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.constraints

test: $(INSTALLED)  ## everything that must hold, on CPU
	@$(MAKE) --no-print-directory --jobs 4 --output-sync=target test-service test-engine test-platform check
	$(TEST) $(TIMED_TESTS)

# Each prints when it ends. The other tests give way to the service's, which hold times to bounds.
test-service: $(INSTALLED)
	$(TEST) $(SERVICE_TESTS)

# What the service's tests leave of the machine's cores is theirs. Each process imports what its half needs.
# The engine's take longest: alone at the end, one process would leave a core idle.
test-engine: $(INSTALLED)
	$(UNITS) --numprocesses 2 $(ENGINE_TESTS) $(addprefix --ignore=,$(SERVICE_TESTS) $(TIMED_TESTS))

test-platform: $(INSTALLED)
	$(UNITS) --numprocesses 2 tests $(addprefix --ignore=,$(ENGINE_TESTS) $(SERVICE_TESTS) $(TIMED_TESTS))

soak: $(INSTALLED)  ## the long versions of the tests
	$(BIN)/pytest -m soak --timeout 3600

attack: $(INSTALLED)  ## one tenant does its worst, another looks on: ATTACK_S=600 (or 75) for each attack
	$(BIN)/pytest -m attack tests/attack

test-gpu: $(INSTALLED)  ## the tests that need a CUDA device
	$(BIN)/pytest -m gpu

bench-gateway: $(INSTALLED)  ## what the gateway adds to a first token, and the tokens it streams
	@$(BIN)/python -m loadtest.bench_gateway

bench-http: $(INSTALLED)  ## two GPUs through HTTP, beside what they do without a service
	@$(BIN)/python -m loadtest.bench_http --folder $(MODELS) --json $(MODELS)/http.json

bench-goodput: $(INSTALLED)  ## the most requests a second that a GPU serves well
	@$(BIN)/python -m loadtest.bench_goodput --folder $(MODELS) --json $(MODELS)/goodput.json

test-ceph: $(INSTALLED)  ## the catalog's tests on Ceph's S3 server, from Debian's packages
	TEST_S3=radosgw $(BIN)/pytest -m "not soak" tests/catalog tests/gateway/test_uploads.py

loadtest: $(INSTALLED)  ## Locust against the running service
	$(BIN)/locust -f loadtest/locustfile.py --headless --only-summary --host http://127.0.0.1:$(PORT)

clean:  ## stop the service here, and remove the demo's catalog and keys, and caches
	@! test -e .lorikeet/serve.pid || $(BIN)/lorikeet stop
	rm -rf .lorikeet/demo .lorikeet/keys/demo .lorikeet/cache
