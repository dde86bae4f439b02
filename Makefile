# `make demo` and `make test` set everything up; both need only Python 3.10-3.13, a C compiler (gcc or clang, for
# linking what TVM compiles) and a package registry.
PYTHON ?= python3
# Relay is TVM 0.19, Relax today's TVM. One environment cannot hold both: `make TVM=relax test` makes a second one.
TVM ?= relay
VENV ?= .venv$(if $(filter relax,$(TVM)),-relax)
BIN := $(VENV)/bin
ifeq ($(filter relay relax,$(TVM)),)
  $(error TVM is relay or relax, not '$(TVM)')
endif

.PHONY: demo test lint docs dist bench clean

# The stamp is made anew when the dependencies change; the project itself is installed in place.
$(VENV)/.stamp: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' || \
	  { echo "Python 3.10-3.13 is needed; say which with: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$(TVM),video,plot,edgetpu,onnxruntime,watch,dev]'
	touch $@

demo: $(VENV)/.stamp
	$(BIN)/python examples/face_detector/demo.py --output out

test: $(VENV)/.stamp
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile

lint: $(VENV)/.stamp
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# The wheel and the source distribution, in dist/; `python .ci/packages.py` tries them in fresh environments.
dist: $(VENV)/.stamp
	rm -rf dist
	$(BIN)/python -m build --outdir dist .

$(VENV)/.docs-stamp: $(VENV)/.stamp
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	touch $@

# The pages of docs/ as a site that reads offline: open site/index.html. A broken link is an error. Browsers search pages
# that a server gives them, not files: $(BIN)/python -m http.server --directory site
docs: $(VENV)/.docs-stamp
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Every figure of docs/figures.md; takes about four hours, and installs TensorFlow (1.6 GB, in a folder of its own) to make two models.
# `make TVM=relax bench` gives those of Relax, beside Relay's of .venv; it and other benchmarks use the last three.
RELAX_BENCHMARKS := $(addprefix benchmarks/,relax.py relax_worker.py relax_gpu.py export_networks.py)

bench: $(VENV)/.stamp
ifeq ($(TVM),relax)
	$(BIN)/python benchmarks/relax.py --relay .venv/bin/python
else
	for script in $(filter-out $(RELAX_BENCHMARKS),$(wildcard benchmarks/*.py)); do grep -q '__main__' $$script || continue; $(BIN)/python $$script || exit 1; done
endif

clean:
	rm -rf .venv .venv-relax $(VENV) out build dist site *.egg-info
