"""Names: of the public surface, of files, of figures with a unit, of options."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import tvm_pipeline
from tests.guards.sources import BACKENDS, CORE, PLUGINS, ROOT, docstrings, files, is_here, name, tree

PUBLIC = [
    *("Bundle", "CompiledPipeline", "Decision", "Device", "DeviceProfile", "Evaluation", "Link", "Model"),
    *("Operator", "OperatorGraph", "Pipeline", "PipelineError", "Plan", "Platform", "Prediction", "Problem"),
    *("Profile", "Result", "Stage", "Tensor", "compile", "detect_platform", "evaluate", "graph_from_networkx"),
    *("load", "merge_graphs", "open", "open_bundle", "plan", "profile_model", "read_graph", "read_plan"),
    *("read_platform", "read_profile", "settle_platform", "stage_timer", "write_bundle"),
]
# Modules besides the public surface whose names a page may import, each because that page is about it.
DOCUMENTED = {
    "tvm_pipeline.backends.contract": "docs/backend.md: what a backend implements",
    "tvm_pipeline.errors": "what every door may raise",
    "tvm_pipeline.planning": "docs/schedulers.md: schedulers of a user's own",
    "tvm_pipeline.testing": "docs/backend.md: how it is checked",
    "tvm_pipeline.power": "docs/power.md: sensors and power modes of a user's own",
    "tvm_pipeline.runtime": "pipelines that are exchanged while they run",
    "tvm_pipeline_video": "decoders and sources of a user's own, a server beside a pipeline, the application",
    "tvm_pipeline_tvm.relay_passes": "the passes on Relay modules",
    "tvm_pipeline_tvm.relax_passes": "docs/relax.md: the passes on Relax modules",
    "tvm_pipeline_kernels.relax": "docs/relax.md: our kernels in a script",
}

# Endings of numeric fields of the vocabulary, and words that have no unit.
UNITS = ("_s", "_bytes", "_j", "_w", "_fps", "_bytes_per_s", "_s_per_byte")
UNITLESS = {
    *("stage", "stages", "most_stages", "frame", "frames", "bottleneck", "dropped", "in_flight", "batch", "cores"),
    "shape",
    *(
        "macs",
        "lost_macs",
        "factor",
        "error",
        "r2",
        "tolerance",
        "busy_factor",
        "spread",
        "uncertainty",
        "joules_uncertainty",
        "share",
        "index",
        "writer",
        "readers",
        "before",
        "after",
        "bound",
    ),
    *("bubble_share", "miss_share", "output_shape", "samples"),
    # The number of a mode; frequencies of clocks, in the units of their kernel files; numbers of cores.
    *("nvpmodel", "clock_limits", "offline_cores"),
    # Figures of a profile whose words are their units.
    *("seconds", "joules"),
}

_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z_-]*")
# Whole commands that a text may quote: the command, what stands between, and the option.
_COMMANDS = re.compile(r"`(?:tvm-pipeline|run|edgetpu_compiler)(?: [^`]*)?`|v4l2-ctl --list-devices")
# Files that name options on purpose.
NAMES_OPTIONS = {
    ("backends/tvm_pipeline_tvm/relax/cuda_kernels.py", "--ptxas-options"): "an option of NVIDIA's compiler",
    (
        "backends/tvm_pipeline_tvm/relax/cuda_kernels.py",
        "--device-int",
    ): "of NVIDIA's compiler, --device-int128",
    ("option_names.py", "--min-throughput"): "its docstring shows what the command line makes of a field",
    ("plugins/tvm_pipeline_video/kinds.py", "--device"): "an option of docker",
    ("backends/tvm_pipeline_tvm/linking.py", "--eh-frame-hdr"): "an option of linkers",
    ("backends/tvm_pipeline_tvm/linking.py", "--no-as-needed"): "an option of linkers",
    ("plugins/tvm_pipeline_hosts/fleet/service_process.py", "--config"): "of the command that it runs",
    ("backends/tvm_pipeline_edgetpu/compiler.py", "--version"): "an option of edgetpu_compiler",
    ("backends/tvm_pipeline_edgetpu/compiler.py", "--out_dir"): "an option of edgetpu_compiler",
    ("backends/tvm_pipeline_edgetpu/compiler.py", "--timeout_sec"): "an option of edgetpu_compiler",
    ("backends/tvm_pipeline_edgetpu/compiler.py", "--search_delegate"): "an option of edgetpu_compiler",
}


# ---------------------------------------------------------------------------------------------- the public surface


def listed_names(path: Path) -> list[str]:
    """Return what `__all__` of a file lists; empty without one."""
    for statement in tree(path).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
            return [str(name) for name in ast.literal_eval(statement.value)]
    return []


def bound_names(path: Path) -> set[str]:
    """Return the names that a file binds at its top level, also in `try` and `if`."""
    found = set()
    for statement in top_level(tree(path).body):
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            found |= {alias.asname or alias.name for alias in statement.names}
        elif isinstance(statement, (ast.ClassDef, ast.FunctionDef)):
            found.add(statement.name)
        elif isinstance(statement, ast.Assign):
            found |= {target.id for target in statement.targets if isinstance(target, ast.Name)}
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            found.add(statement.target.id)
    return found


def top_level(statements: list[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in statements:
        yield statement
        if isinstance(statement, (ast.Try, ast.If)):
            yield from top_level([*statement.body, *statement.orelse])


def test_the_public_surface_is_this_list() -> None:
    """A name joins or leaves the public surface on purpose, here as well."""
    assert listed_names(CORE / "__init__.py") == PUBLIC


def test_public_names_are_documented() -> None:
    """Every public name is a class or a function with a docstring in the module that it is imported from."""
    for public, imported_from in typed_imports().items():
        assert definition(imported_from, public), f"{public} has no docstring"


def test_names_are_imported_from_where_type_checkers_see_them() -> None:
    """`__getattr__` of the package takes each public name from the module that the imports for type checkers name."""
    assert typed_imports() == tvm_pipeline._MODULES
    assert sorted(tvm_pipeline._MODULES) == sorted(PUBLIC)
    assert all(getattr(tvm_pipeline, public).__name__ == public for public in PUBLIC)


def typed_imports() -> dict[str, str]:
    """Return the module of each name that the package imports for type checkers."""
    return {
        alias.name: statement.module or ""
        for block in tree(CORE / "__init__.py").body
        if isinstance(block, ast.If)
        for statement in block.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }


def definition(module: str, public: str) -> str | None:
    """Return the docstring of a name, also where its module has it from another one."""
    path = ROOT.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for statement in tree(path).body:
        if isinstance(statement, (ast.ClassDef, ast.FunctionDef)) and statement.name == public:
            return ast.get_docstring(statement)
        if isinstance(statement, ast.ImportFrom) and public in {alias.name for alias in statement.names}:
            return definition(statement.module or "", public)
    return None


def test_lists_of_names_are_true() -> None:
    """Every `__all__` names what its file binds, once each."""
    for path in files():
        listed = listed_names(path)
        assert set(listed) <= bound_names(path), name(path)
        assert len(set(listed)) == len(listed), name(path)


def snippets() -> Iterator[tuple[str, ast.ImportFrom]]:
    """Yield the imports from tvm_pipeline and the plug-ins in the Python blocks of the README and the pages."""
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            for line in ast.walk(ast.parse(block)):
                if isinstance(line, ast.ImportFrom) and (line.module or "").startswith("tvm_pipeline"):
                    yield page.name, line


def test_pages_import_public_names() -> None:
    """Python in the pages imports public names, or names of modules that a page is about, and these exist."""
    found = list(snippets())
    assert found
    for page, line in found:
        module = line.module or ""
        names = {alias.name for alias in line.names}
        if module == "tvm_pipeline":
            assert names <= set(PUBLIC), page
            continue
        assert any(module == known or module.startswith(f"{known}.") for known in DOCUMENTED), f"{page}: {module}"
        path = (ROOT if module.startswith("tvm_pipeline.") else PLUGINS).joinpath(*module.split("."))
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        assert names <= bound_names(path), f"{page}: {module}"


# ---------------------------------------------------------------------------------------------- files


def test_class_names_are_unique_in_their_package() -> None:
    """A reader who searches a package for a class finds one."""
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for path in files():
        for statement in tree(path).body:
            if isinstance(statement, ast.ClassDef):
                found[path.parent.as_posix(), statement.name].append(name(path))
    assert [paths for paths in found.values() if len(paths) > 1] == []


def test_every_command_is_tested() -> None:
    """The tests of the command line run over a list that they take from the application, so that none is left out."""
    commands = {path.stem for path in (CORE / "cli").glob("*.py")} - {
        *("__init__", "__main__", "commands", "options", "output"),
    }
    registered = re.findall(
        r'^([\w-]+) = "tvm_pipeline\.cli\.(\w+):', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )
    assert {module for _, module in registered} == commands
    assert all(module == command.replace("-", "_") for command, module in registered)
    tests = (ROOT / "tests/cli/test_commands.py").read_text()
    assert "COMMANDS = sorted(entry.name for entry in GROUP.entries" in tests
    assert '@pytest.mark.parametrize("command", COMMANDS)' in tests


def test_the_version_stands_in_two_places_alike() -> None:
    """pyproject.toml and version.py give the same version."""
    written = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert written
    assert f'__version__ = "{written[1]}"' in (CORE / "version.py").read_text()


# ---------------------------------------------------------------------------------------------- units


def figures(path: Path) -> Iterator[tuple[str, str]]:
    """Yield class and name of each public field of numbers in a file."""
    for node in ast.walk(tree(path)):
        if not isinstance(node, ast.ClassDef) or node.name.startswith("_"):
            continue
        for field in node.body:
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                is_public = not field.target.id.startswith("_")
                if is_public and re.search(r"\b(float|int)\b", ast.unparse(field.annotation)):
                    yield node.name, field.target.id


def has_unit(field: str) -> bool:
    return field.endswith(UNITS) or field in UNITLESS


def test_units_stand_in_names() -> None:
    """A public field of numbers in core/ and cost/ ends with its unit, or is in the table of those without one."""
    wrong = [
        f"{name(path)}: {owner}.{field}"
        for path in files(CORE / "core", CORE / "cost")
        for owner, field in figures(path)
        if not has_unit(field)
    ]
    assert wrong == []


def test_every_word_without_a_unit_is_used() -> None:
    """A word that no field has any more leaves the table."""
    assert {field for path in files(CORE / "core", CORE / "cost") for _, field in figures(path)} >= UNITLESS


@pytest.mark.parametrize("field", ["latency", "bandwidth", "energy", "memory", "timeout", "size", "throughput"])
def test_the_guard_sees_a_figure_without_its_unit(field: str) -> None:
    """Each of these names leaves its unit open."""
    assert not has_unit(field)


# ---------------------------------------------------------------------------------------------- options


def options_in(parsed: ast.Module) -> Iterator[str]:
    """Yield the options that the texts of a file name, docstrings included, outside whole commands that they quote."""
    for node in ast.walk(parsed):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from _OPTION.findall(_COMMANDS.sub("", node.value))


def test_messages_name_fields_and_not_options() -> None:
    """Only the command line knows its options: a library's message names the field, in backticks."""
    wrong = [
        f"{name(path)} names {option}"
        for path in files()
        if not name(path).startswith("cli/") and path.parent.name != "commands"
        for option in options_in(tree(path))
        if (name(path), option) not in NAMES_OPTIONS
    ]
    assert wrong == []


def test_every_file_that_names_options_still_does() -> None:
    """An exception that no file needs any more goes."""
    found = {(name(path), option) for path in files() for option in options_in(tree(path))}
    assert {(file, option) for file, option in NAMES_OPTIONS if is_here(file)} <= found


def test_the_guard_sees_an_option() -> None:
    """A field and a quoted command pass, an option does not."""
    text = 'f"`stages` {n}: give --stages {m}, see `tvm-pipeline plan --help`"'
    assert list(options_in(ast.parse(text))) == ["--stages"]


# ---------------------------------------------------------------------------------------------- docstrings


def test_steps_and_doubts_go_to_the_log() -> None:
    """No function takes another one that it tells of steps or doubts: records of `logging` do that."""
    found = []
    for path in files(CORE, BACKENDS, PLUGINS):
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.arguments):
                names = {one.arg for one in (*node.posonlyargs, *node.args, *node.kwonlyargs)}
                found += [f"{name(path)}: {one}" for one in names & {"tell", "warn", "progress"}]
    assert found == []


def test_guards_say_what_they_guard() -> None:
    """Every guard has one sentence."""
    for path in files(ROOT / "tests/guards"):
        assert any(True for _ in docstrings(tree(path))), name(path)
        for node in tree(path).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                assert (ast.get_docstring(node) or "").endswith("."), node.name
