# `make demo` and `make test` set everything up; both need only Python 3.10-3.13, a C compiler (gcc or clang, for
# linking what TVM compiles) and a package registry.
PYTHON ?= python3
# The extra that brings TVM: tvm (today's, with Relax) or relay (TVM 0.19). One environment cannot hold both, so
# `make TVM=relay test` makes a second one.
TVM ?= tvm
VENV ?= .venv$(if $(filter relay,$(TVM)),-relay)
BIN := $(VENV)/bin
ifeq ($(filter tvm relay,$(TVM)),)
  $(error TVM is tvm or relay, not '$(TVM)')
endif

# Images of Python tell it to keep no bytecode. A thousand processes of the tests would then compile each module anew.
unexport PYTHONDONTWRITEBYTECODE
# Tests and benchmarks import onnxruntime themselves, too; see docs/install.md, "What is sent".
export ORT_DISABLE_TELEMETRY = 1
# pip compiles no module: most are never imported, and Python compiles those that are.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
# uv needs 15 seconds where pip needs a minute. pip installs where uv does not find the registry, as in pip's own files.
INSTALL = $(PIP) uv && $(BIN)/python -m uv pip install --quiet --editable '$(PARTS)' || $(PIP) --editable '$(PARTS)'
# `make test SEED=7` runs the tests in a random order, and `make test WORKERS=0` in one process; ARGS are more arguments.
WORKERS ?= 3
PYTEST := $(BIN)/python -m pytest --numprocesses $(WORKERS) --maxprocesses 4 --dist worksteal \
  $(if $(SEED),--random-order-bucket module --random-order-seed $(SEED)) $(ARGS)
QUICK := -m 'not thorough' --hypothesis-profile quick

.PHONY: demo test test-all fuzz coverage lint docs dist bench clean ready

# The stamp is made anew when the dependencies change, and the environment with it: an earlier one may have the other TVM.
# The project itself is installed in place.
$(VENV)/.stamp: PARTS := .[$(TVM),video,plot,edgetpu,onnxruntime,openvino,watch,dev]
$(VENV)/.stamp: pyproject.toml
	@$(PYTHON) .ci/needs.py $(VENV) --new
	$(PYTHON) -m venv --clear $(VENV)
	@$(BIN)/python .ci/needs.py $(VENV) --registry $(if $(filter relay,$(TVM)),xtc-tvm-python-bindings,apache-tvm)
	$(INSTALL)
	touch $@

ready: $(VENV)/.stamp
	@$(BIN)/python .ci/needs.py $(VENV)

# A detector on a street video; OPTIONS are more options of `tvm-pipeline run`.
demo: OUT ?= out
demo: ready
	video=$$($(BIN)/python examples/face_detector/assets.py) && $(BIN)/tvm-pipeline run examples/street/detector.tflite \
	  --source "$$video" --labels examples/street/labels.txt --threshold 0.3 --output $(OUT)/street.mp4 --overlay \
	  --results $(OUT)/street.jsonl --report $(OUT) --plan-first $(OPTIONS)

# The quick tests: every public behaviour once. `test-all` has more networks, targets, seeds and faults beside them.
# Their searches are small: numba would compile loops for longer than Python runs them.
test: ready
	NUMBA_DISABLE_JIT=1 $(PYTEST) $(QUICK)

test-all: ready
	$(PYTEST)

# A minute of inputs that nobody expects for each reader and protocol, from new seeds, which are printed.
fuzz: ready
	$(BIN)/python -m tests.fuzz $(ARGS)

# The lines that the quick tests execute, beside those that all tests execute.
coverage: ready
	$(BIN)/python .ci/compare_coverage.py

lint: $(VENV)/.stamp
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# The wheel and the source distribution, in dist/; `python .ci/packages.py` tries them in fresh environments.
dist: $(VENV)/.stamp
	rm -rf dist
	$(BIN)/python -m build --installer uv --outdir dist . || $(BIN)/python -m build --outdir dist .

$(VENV)/.docs-stamp: PARTS := .[docs]
$(VENV)/.docs-stamp: $(VENV)/.stamp
	$(INSTALL)
	touch $@

# The pages of docs/ as a site that reads offline: open site/index.html. A broken link is an error. Browsers search pages
# that a server gives them, not files: $(BIN)/python -m http.server --directory site
docs: $(VENV)/.docs-stamp
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Every figure of docs/figures.md; takes about four hours, and installs TensorFlow (1.6 GB, in a folder of its own) to make two models.
# Most take networks of relay.testing, so they run in the environment with Relay. gpu_acceptance.py runs those of GPUs on a machine lent for minutes.
OTHER_BENCHMARKS := $(addprefix benchmarks/,relax.py relax_worker.py relax_gpu.py tolerance.py first_frame.py emulated_relax.py export_networks.py gpu_acceptance.py)

bench: $(VENV)/.stamp
	$(MAKE) TVM=relay ready
	for script in $(filter-out $(OTHER_BENCHMARKS),$(wildcard benchmarks/*.py)); do grep -q '__main__' $$script || continue; .venv-relay/bin/python $$script || exit 1; done
	$(BIN)/python benchmarks/relax.py --relay .venv-relay/bin/python
	$(BIN)/python benchmarks/tolerance.py
	$(BIN)/python benchmarks/first_frame.py
	$(BIN)/python benchmarks/emulated_relax.py

clean:
	rm -rf .venv .venv-relay $(VENV) out build dist site *.egg-info
