# The verbs of README.md; .ci/run calls the same ones.
#   make demo TORCH='torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu'
# chooses another build of torch; it is installed first, so that nothing else picks one.
PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0
PYTEST_ARGS ?=
BENCH_ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -qq -c constraints.txt
SOURCES := shapeserve tests benchmarks deploy/examples
PROTO := shapeserve/protocols/proto/oip.proto

# Models come from disk and nothing is reported to anybody.
export HF_HUB_OFFLINE = 1
export RAY_USAGE_STATS_ENABLED = 0

.PHONY: demo test check format bench chaos soak test-gpu proto clean
.DELETE_ON_ERROR:

demo: $(VENV)/.installed-demo
	$(BIN)/python -m shapeserve.demo

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest $(PYTEST_ARGS)

check: $(VENV)/.installed-dev
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix-only $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

bench: $(VENV)/.installed-bench
	$(BIN)/python benchmarks/serve_load.py $(BENCH_ARGS)

# Replicas are killed, device threads die, clients leave: the tests that do so, against real Ray.
chaos: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m ray -k 'killed or died or leaves or ctrl_c or sigterm' $(PYTEST_ARGS)

soak: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

test-gpu: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m gpu $(PYTEST_ARGS)

# An old compiler (Python 3.8 to 3.12), because its code runs with protobuf 4 to 7, and newer code
# refuses older runtimes. The pool of its own lets a client of the same protocol (tritonclient) be
# loaded in the same process.
proto:
	dir=$$(mktemp -d) && $(PYTHON) -m venv $$dir \
	&& $$dir/bin/pip install -qq --disable-pip-version-check grpcio-tools==1.62.3 'setuptools<81' \
	&& $$dir/bin/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. $(PROTO) \
	&& sed -i 's/_descriptor_pool.Default()/_descriptor_pool.DescriptorPool()/' $(PROTO:.proto=_pb2.py) \
	&& rm -r $$dir

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

# Stamps: an environment is made once, and its packages again only when what asks for them changes.
$(VENV)/.torch:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"{sys.executable} is Python {sys.version.split()[0]}; shapeserve needs 3.11 or newer: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	@echo 'installing $(TORCH) (once; a few minutes)'
	$(PIP) $(TORCH)
	@touch $@

$(VENV)/.installed-demo: $(VENV)/.torch pyproject.toml constraints.txt
	@echo 'installing shapeserve[all]'
	$(PIP) -e '.[all]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed-demo
	@echo 'installing shapeserve[all,dev]'
	$(PIP) -e '.[all,dev]'
	@touch $@

$(VENV)/.installed-bench: $(VENV)/.installed-demo
	@echo 'installing shapeserve[all,bench]'
	$(PIP) -e '.[all,bench]'
	@touch $@
