"""The rooms of tvm_pipeline/ stand on floors: each imports only rooms below it."""

from __future__ import annotations

import ast

import pytest

from tests.guards.sources import BACKENDS, CORE, PLUGINS, ROOT, files, imported, imports_of, is_here, module, name, tree

# Floor by floor, from the ground. A room may import the rooms of all floors below its own.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("version", "errors", "addresses"),
    ("files", "processes", "plugins", "option_names", "signals"),
    ("documents", "solvers", "system_files"),
    ("core",),
    ("memory", "power"),
    ("cost",),
    ("planning", "backends"),
    ("frontends", "profiling"),
    ("runtime", "calibration"),
    ("report", "testing", "workflow"),
    ("cli",),
)
TVM = "tvm_pipeline_tvm"  # the backend that compiles by TVM
# The package itself is the public surface; it gathers names of these rooms, and only the command line imports it.
PUBLIC = {"backends", "core", "cost", "errors", "frontends", "planning", "profiling", "runtime", "version", "workflow"}
# Rooms that a backend does not need: it is compiled, measured and planned for by others.
NOT_FOR_BACKENDS = {
    "cost",
    "power",
    "planning",
    "profiling",
    "calibration",
    "runtime",
    "report",
    "workflow",
    "cli",
}
# One room below another inside a room.
INSIDE = {
    ("planning/search", "planning/registry"),
    ("planning/sat", "planning/registry"),
    ("planning/baselines", "planning/registry"),
    ("planning/local", "planning/registry"),
    ("planning/local", "planning/planner"),
    ("planning/search", "planning/planner"),
    ("planning/sat", "planning/planner"),
    ("planning/baselines", "planning/planner"),
}


# The most lines that a package may have, in all its files. A commit that raises one says why.
MOST_LINES = {
    "tvm_pipeline/backends": 3400,
    "tvm_pipeline/calibration": 1110,
    "tvm_pipeline/cli": 3211,
    "tvm_pipeline/core": 3473,
    "tvm_pipeline/cost": 2405,
    "tvm_pipeline/frontends": 2817,
    "tvm_pipeline/memory": 3100,
    "tvm_pipeline/planning": 10_961,
    "tvm_pipeline/power": 800,
    "tvm_pipeline/profiling": 2515,
    "tvm_pipeline/report": 1417,
    "tvm_pipeline/runtime": 3815,
    "tvm_pipeline/solvers": 280,
    "tvm_pipeline/testing": 1119,
    "tvm_pipeline/workflow": 2776,
    "backends/tvm_pipeline_edgetpu": 3344,
    "backends/tvm_pipeline_onnxruntime": 471,
    "backends/tvm_pipeline_openvino": 538,
    "backends/tvm_pipeline_tvm": 18_888,
    "backends/tvm_pipeline_litert": 350,
    "plugins/tvm_pipeline_boards": 1600,
    "plugins/tvm_pipeline_hosts": 11_165,
    "plugins/tvm_pipeline_kernels": 10_270,
    "plugins/tvm_pipeline_loadgen": 600,
    "plugins/tvm_pipeline_papers": 4869,
    "plugins/tvm_pipeline_video": 14_702,
}


# How many modules of the engine a plug-in imports that are not published: each is a name to publish, or to do without.
UNPUBLISHED = {
    "tvm_pipeline_boards": 2,
    "tvm_pipeline_hosts": 34,
    "tvm_pipeline_kernels": 33,
    "tvm_pipeline_loadgen": 3,
    "tvm_pipeline_papers": 14,
    "tvm_pipeline_video": 41,
}


# What a guest may import besides the names of the package itself: the errors, and for each door what comes in by it.
PUBLISHED = {
    "tvm_pipeline",
    "tvm_pipeline.backends",  # backends
    "tvm_pipeline.errors",
    "tvm_pipeline.planning",  # schedulers
    "tvm_pipeline.power",  # sensors and power modes
    "tvm_pipeline.runtime",  # strategies
    "tvm_pipeline.testing",
}


def room(dotted: str) -> str:
    """Return the room of a module, which is a folder or a file of tvm_pipeline/; empty for the package itself."""
    parts = dotted.split(".")
    return parts[1] if len(parts) > 1 else ""


def floor(name: str) -> int:
    return next(number for number, rooms in enumerate(FLOORS) if name in rooms)


def may_import(importer: str, imports: str) -> bool:
    if importer == imports:
        return True
    if not importer:
        return imports in PUBLIC
    if not imports:
        return importer == "cli"
    return floor(imports) < floor(importer)


def test_every_room_stands_on_a_floor() -> None:
    """Every folder and file of tvm_pipeline/ is in the table, and nothing else is."""
    found = {path.stem for path in CORE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert sorted(name for rooms in FLOORS for name in rooms) == sorted(found - {"__init__"})


def test_arrows_point_down() -> None:
    """No room imports one of its own floor or of a higher one, not even in a function or for a type checker."""
    wrong = [
        f"{name(path)} imports {dotted}"
        for path in files(CORE)
        for dotted in imported(path)
        if dotted.split(".")[0] == "tvm_pipeline" and not may_import(room(module(path)), room(dotted))
    ]
    assert wrong == []


def test_searches_do_not_know_their_registry() -> None:
    """The searches under planning/ import neither the table of schedulers nor the planner that calls them."""
    wrong = [
        f"{name(path)} imports {dotted}"
        for below, above in INSIDE
        for path in files(CORE / below)
        for dotted in imported(path)
        if dotted == f"tvm_pipeline.{above.replace('/', '.')}" or dotted == "tvm_pipeline.planning"
    ]
    assert wrong == []


def test_packages_keep_to_their_lines() -> None:
    """A limit for each file would make files; a limit for a package makes people delete."""
    packages = {path.parent for folder in (CORE, BACKENDS, PLUGINS) for path in folder.glob("*/__init__.py")}
    found = {
        folder.relative_to(ROOT).as_posix(): sum(path.read_text().count("\n") for path in files(folder))
        for folder in packages
    }
    assert found.keys() == {package for package in MOST_LINES if is_here(package)}
    assert {package: lines for package, lines in found.items() if lines > MOST_LINES[package]} == {}


# What starts programs beside `processes.py`, by the name of the file.
PROGRAMS = {
    "addons.py": "compilers of C++",
    "credentials.py": "openssl",
    "fleet_join.py": "the command `devices`, as a user would",
    "linking.py": "a linker",
    "node_keeper.py": "an errand that calls Ray, in a child of ours: not moved, since no machine of ours tests it",
    "nvpmodel.py": "the program of a Jetson",
    "ray_node.py": "Ray",
    "service_process.py": "the command `run`, which outlives the agent that started it, as cameras must",
    "supervisor.py": "the command `run`, which gets the signals of its supervisor and drains",
}


def starts_processes(parsed: ast.AST) -> bool:
    """Whether a file starts programs by itself, or forks."""
    names: set[str] = set()
    for node in ast.walk(parsed):
        if isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {getattr(node, "module", ""), *(one.name for one in node.names)}
    return not names.isdisjoint({"subprocess", "multiprocessing", "ProcessPoolExecutor", "fork", "posix_spawn"})


def test_children_are_those_of_processes() -> None:
    """A Python process of ours is a `processes.Child`, which knows what such a process can do to its parent."""
    found = {path.name for path in files() if starts_processes(tree(path))}
    assert found == PROGRAMS.keys() | {"processes.py"}


@pytest.mark.parametrize(
    "line", ["import subprocess", "from subprocess import Popen", "import os\nos.fork()", "from os import fork"]
)
def test_the_guard_sees_every_start(line: str) -> None:
    """Each of these lines starts a program, or may."""
    assert starts_processes(ast.parse(line))


def is_public(dotted: str) -> bool:
    """Whether a guest may import a module: these are the engine's published doors."""
    return dotted in PUBLISHED


def test_the_engine_knows_no_plugin() -> None:
    """The engine and the backends find the packages of plugins/ by entry points, and work without them."""
    plugins = {path.name for path in PLUGINS.glob("*") if path.is_dir()}
    wrong = [
        f"{name(path)} imports {dotted}"
        for path in files(CORE, BACKENDS)
        for dotted in imported(path)
        if dotted.split(".")[0] in plugins
    ]
    assert wrong == []


@pytest.mark.skipif(not PLUGINS.is_dir(), reason="plugins/ is left out")
def test_plugins_import_what_is_published() -> None:
    """A plug-in imports public names of the engine. The table counts the modules beside these, and only shrinks."""
    found: dict[str, set[str]] = {}
    for path in files(PLUGINS):
        modules = found.setdefault(path.relative_to(PLUGINS).parts[0], set())
        modules |= {m for m in imported(path) if m.split(".")[0] in ("tvm_pipeline", TVM) and not is_public(m)}
    assert {plugin: len(modules) for plugin, modules in found.items()} == UNPUBLISHED


def test_the_engine_imports_no_tvm() -> None:
    """TVM is an engine like others: its backend imports it, the Edge TPU's BYOC, and the kernels that it compiles."""
    found = {module(path).split(".")[0] for path in files() if any(f"{m}.".startswith("tvm.") for m in imported(path))}
    assert found <= {TVM, "tvm_pipeline_edgetpu", "tvm_pipeline_kernels"}


def test_the_core_imports_no_backend() -> None:
    """Backends are found by their entry points; only the command `slice`, which is the Edge TPU's, names one."""
    families = {path.name for path in BACKENDS.iterdir() if path.is_dir()}
    found = {name(path) for path in files(CORE) for dotted in imported(path) if dotted.split(".")[0] in families}
    assert found == {"cli/slice.py"}


def test_backends_know_nothing_of_planning_and_running() -> None:
    """A backend imports the contract, the vocabulary, rooms that help it to compile, and no other backend but TVM's."""
    families = {path.name for path in BACKENDS.iterdir() if path.is_dir()} - {TVM}
    for path in files(BACKENDS):
        own = path.relative_to(BACKENDS).parts[0]
        for dotted in imported(path):
            assert dotted.split(".")[0] not in families - {own}, f"{name(path)} imports {dotted}"
            if dotted.split(".")[0] == "tvm_pipeline":
                assert room(dotted) not in NOT_FOR_BACKENDS, f"{name(path)} imports {dotted}"


@pytest.mark.parametrize(
    "line",
    [
        "from tvm_pipeline.planning import plan",
        "from tvm_pipeline import planning",
        "import tvm_pipeline.planning.planner",
        "def late():\n    from tvm_pipeline.planning.planner import plan",
        "if TYPE_CHECKING:\n    from tvm_pipeline.planning import Scheduler",
    ],
)
def test_the_guard_sees_every_way_to_import(line: str) -> None:
    """Each of these lines in a file of cost/ is an arrow upwards."""
    found = [dotted for dotted in imports_of(ast.parse(line)) if not may_import("cost", room(dotted))]
    assert len(found) == 1


def test_the_guards_read_the_source() -> None:
    """The folders are where the guards look for them."""
    assert len(files(CORE)) > 100
    assert len(files(BACKENDS)) > 10


def test_every_package_is_in_the_wheel() -> None:
    """The list of packages in pyproject.toml has every folder with an `__init__.py`."""
    listed = (ROOT / "pyproject.toml").read_text()
    packages = [module(path) for path in files() if path.name == "__init__.py"]
    assert [package for package in packages if f'    "{package}",\n' not in listed] == []
