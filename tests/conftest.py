"""Every run of the tests takes the same examples: a failure on one machine is a failure on all.

An environment has Relay or Relax. Nearly all tests run with Relay, and those in tests/relax with Relax alone. Tests
that must hold with both are listed in BOTH; the others know no TVM, or are Relay's.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers

# A shell starts a job in the background with SIGINT ignored, and nohup SIGHUP; tests of both and their processes need
# them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Hypothesis also draws constants of whatever modules are loaded, so that examples would depend on the tests before.
if hasattr(providers, "_get_local_constants"):
    providers._get_local_constants = lambda: providers._local_constants

CORES = os.sched_getaffinity(0)

TESTS = Path(__file__).parent
# Folders and files that run in an environment with Relax, too: what reads models, compiles, cuts, measures, runs them.
BOTH = (
    "frontends",
    "onnxruntime",
    *(f"backends/test_{name}.py" for name in ("elsewhere", "host_backend", "missing_extras")),
    "boards/test_modules.py",
    *(f"cli/test_{name}.py" for name in ("bad_input", "commands", "memory_command", "rewritten_models", "version")),
    *(f"service/test_{name}.py" for name in ("carried_run", "engine_fallback", "workflow")),
)


def _has_relax() -> bool:
    found = find_spec("tvm")  # imports nothing
    return bool(found and found.origin) and not (Path(found.origin).parent / "relay").is_dir()


HAS_RELAX = _has_relax()

settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=60, print_blob=False)
settings.load_profile("repeatable")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out what is for the other TVM, unless the command line names it."""
    named = {Path(argument.partition("::")[0]).resolve() for argument in config.args}
    if not named <= {TESTS, TESTS.parent} or collection_path in named or not collection_path.is_relative_to(TESTS):
        return None
    own = [TESTS / name for name in ("relax", *BOTH)]
    if HAS_RELAX:
        wanted = any(path.is_relative_to(collection_path) or collection_path.is_relative_to(path) for path in own)
    else:
        wanted = collection_path != own[0]
    return None if wanted else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The longest first, so that at the end no core waits for another.
    items.sort(key=lambda item: item.path.name != "test_examples.py")


def pytest_runtest_setup() -> None:
    """Begin each test on all cores: one that leaves its thread bound to a device must not bind those after it."""
    os.sched_setaffinity(0, CORES)


@pytest.fixture(scope="session")
def empty_cache(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """Make a folder an empty cache of compiled models.

    The first compile for a target is a child's, which takes seconds to start. So all caches share the records of the
    targets that compile.
    """
    base = tmp_path_factory.getbasetemp()
    records = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "targets"
    records.mkdir(exist_ok=True)

    def make(folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "targets").exists():  # several workers may share a cache
            with suppress(FileExistsError):
                (folder / "targets").symlink_to(records)
        return folder

    return make


@pytest.fixture
def own_cache(empty_cache: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the test an empty cache of its own."""
    folder = empty_cache(tmp_path / "cache")
    monkeypatch.setenv("TVM_PIPELINE_CACHE", str(folder))
    return folder
