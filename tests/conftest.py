"""What holds for all tests: the two TVMs, the two speeds, the cache, and no state that one test leaves to the next.

An environment has Relax or Relay. Nearly all tests run with Relax. Those of RELAY run with Relay alone, and those of
BOTH with either.

`make test` runs the quick tests, and `make test-all` runs those with the mark `thorough`, too. If a few cases of a test
stand for all of them, the test has the mark `quick_cases(count)`: the first `count` cases are quick.
"""

from __future__ import annotations

import gc
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import is_hypothesis_test, settings
from hypothesis.internal.conjecture import providers

from tests.support.examples import LEAST, THOROUGH
from tests.support.log_lines import stop_collecting
from tests.support.parts import needs
from tvm_pipeline.profiling import patience

# A shell starts a job in the background with SIGINT ignored, and nohup SIGHUP; tests of both and their processes need
# them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Hypothesis also draws constants of whatever modules are loaded, so that examples would depend on the tests before.
if hasattr(providers, "_get_local_constants"):
    providers._get_local_constants = lambda: providers._local_constants

SHARED = ("targets", "addons")  # folders of a cache that all caches of a run share
CORES = os.sched_getaffinity(0)
# Threads of TVM that wait for work spin by default, which takes the cores from other workers. No test measures speed.
os.environ.setdefault("TVM_THREAD_POOL_SPIN_COUNT", "0")

TESTS = Path(__file__).parent
# Folders and files that need Relay.
RELAY = (
    *("edgetpu/test_byoc.py", "gpu", "support/test_networks.py", "tvm"),
    *(f"plugins/kernels/{name}" for name in ("cli", "gpu", "relay")),
)
# What runs in an environment with Relay, too: what reads models, compiles, cuts, measures, runs them.
BOTH = (
    *(f"frontends/test_{name}.py" for name in ("frontends", "model_metadata", "tflite_checks", "tflite_resizing")),
    *(f"frontends/test_onnx_{name}.py" for name in ("rewriting", "types", "walk")),
    "onnxruntime/test_onnxruntime_backend.py",
    *(f"backends/test_{name}.py" for name in ("elsewhere", "host_backend", "memory_rewriting")),
    "fuzz/test_fuzzers.py",
    "plugins/boards/test_modules.py",
    *(f"cli/test_{name}.py" for name in ("commands", "memory_command", "rewritten_models", "tune_command", "version")),
    "plugins/video/service/test_carried_run.py",
    *(f"workflow/test_{name}.py" for name in ("compiled_pipeline", "engine_fallback", "steps")),
    *(f"test_{name}.py" for name in ("examples", "onnx_coverage")),
)


def _has_relay() -> bool:
    found = find_spec("tvm")  # imports nothing
    return bool(found and found.origin) and (Path(found.origin).parent / "relay").is_dir()


HAS_RELAY = _has_relay()

# Every run of the tests draws the same examples: a failure on one machine is a failure on all. `make test` loads the
# quick profile.
settings.register_profile("thorough", derandomize=True, deadline=None, max_examples=THOROUGH, print_blob=False)
settings.register_profile("quick", settings.get_profile("thorough"), max_examples=LEAST)
settings.load_profile("thorough")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out what is for the other TVM, unless the command line names it."""
    named = {Path(argument.partition("::")[0]).resolve() for argument in config.args}
    if not named <= {TESTS, TESTS.parent} or collection_path in named or not collection_path.is_relative_to(TESTS):
        return None
    if HAS_RELAY:
        own = [TESTS / name for name in (*RELAY, *BOTH)]
        wanted = any(path.is_relative_to(collection_path) or collection_path.is_relative_to(path) for path in own)
    else:
        wanted = collection_path not in [TESTS / name for name in RELAY]
    return None if wanted else True


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--but-passed", metavar="FILE", help="leave out what passed in a JUnit report")


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the cases that are not quick as thorough, leave out what passed before, and put first what stays together.

    A worker without tests takes some of the last ones that another worker has.
    """
    seen: Counter[str] = Counter()
    for item in items:
        if quick := item.get_closest_marker("quick_cases"):
            test = item.nodeid.partition("[")[0]
            seen[test] += 1
            if seen[test] > quick.args[0]:
                item.add_marker("thorough")
    if report := config.getoption("--but-passed"):
        cases = ElementTree.parse(report).iter("testcase")
        passed = {(case.get("classname"), case.get("name")) for case in cases if not len(case)}
        # A test of Hypothesis draws more examples than it drew among the quick tests.
        passed -= {_in_junit(item) for item in items if is_hypothesis_test(getattr(item, "obj", None))}
        left_out = [item for item in items if _in_junit(item) in passed]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if _in_junit(item) not in passed]
    items.sort(key=lambda item: item.get_closest_marker("together") is None)


def pytest_collection_finish() -> None:
    """Let no later collection of garbage look at what the modules hold, which takes seconds where TVM is loaded."""
    gc.collect()
    gc.freeze()


def _in_junit(item: pytest.Item) -> tuple[str, str]:
    """Return the class name and the name of a test in a JUnit report."""
    address, bracket, case = item.nodeid.partition("[")
    file, *names = address.split("::")
    parts = [file.removesuffix(".py").replace("/", "."), *names]
    return ".".join(parts[:-1]), parts[-1] + bracket + case


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Begin each test on all cores, as one that leaves its thread bound to a device must not bind those after it."""
    os.sched_setaffinity(0, CORES)
    for mark in item.iter_markers("needs"):
        needs(*mark.args)


@pytest.fixture(scope="session")
def folder_of_the_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that all workers of this run share."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session", autouse=True)
def _shared_cache(folder_of_the_run: Path) -> Iterator[None]:
    """Let all workers share one cache of compiled models, so that no two of them compile the same; it starts empty."""
    for name in SHARED:
        (folder_of_the_run / "cache" / name).mkdir(parents=True, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TVM_PIPELINE_CACHE", str(folder_of_the_run / "cache"))
        yield


@pytest.fixture(scope="session", autouse=True)
def _brief_measurements() -> None:
    """Measure once, however disturbed, and the work around a model on the fewest frames: no test needs exact times."""
    patience.AGAIN = 0.0
    with suppress(ImportError):  # the plug-in for video, or what it needs, is not installed
        from tvm_pipeline_video import profile_host

        profile_host.__kwdefaults__["seconds"] = 0.0


@pytest.fixture(scope="session", autouse=True)
def _brief_annealing() -> None:
    """Anneal a tenth of the moves where loops are plain Python, which takes a hundred times as long for each."""
    if os.environ.get("NUMBA_DISABLE_JIT") == "1":
        from tvm_pipeline.planning.together import first_deployment

        first_deployment.MOVES //= 10
        first_deployment.MOVES_OF_OPERATOR //= 10


@pytest.fixture(scope="session")
def empty_cache(folder_of_the_run: Path) -> Callable[[Path], Path]:
    """Make a folder an empty cache of compiled models.

    The first compile for a target is a child's, which takes seconds to start, and the first use of a GPU builds what
    TVM lacks. So all caches share the records of the targets that compile, and the add-ons.
    """

    def make(folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        for name in SHARED:
            with suppress(FileExistsError):  # several workers may share a cache
                (folder / name).symlink_to(folder_of_the_run / "cache" / name)
        return folder

    return make


@pytest.fixture
def own_cache(empty_cache: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the test an empty cache, which no other test uses."""
    folder = empty_cache(tmp_path / "cache")
    monkeypatch.setenv("TVM_PIPELINE_CACHE", str(folder))
    return folder


@pytest.fixture(autouse=True)
def _environment_stays() -> Iterator[None]:
    """Fail a test that leaves another environment to the tests after it."""
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    changed -= {"PYTEST_CURRENT_TEST"}  # pytest's; the others are set once, when what they belong to is first imported
    changed -= {"TOPHUB_LOCATION", "TEST_DATA_ROOT_PATH", "ORT_DISABLE_TELEMETRY", "PYOPENCL_HOME"}
    os.environ.update({name: before[name] for name in changed & before.keys()})
    for name in changed - before.keys():
        del os.environ[name]
    assert not changed, f"the test changed the environment: {sorted(changed)}"


@pytest.fixture(autouse=True)
def _no_collected_lines() -> Iterator[None]:
    """End what `log_lines` collects with the test."""
    yield
    stop_collecting()
