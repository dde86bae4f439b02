"""The pages of docs/: what they name exists, and their programs run."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import tvm_pipeline
from tests.support.parts import needs
from tvm_pipeline.backends.engine_targets import parsed_target
from tvm_pipeline.backends.registry import GROUP
from tvm_pipeline.core.platform import read_platform
from tvm_pipeline.option_names import OTHER_NAMES
from tvm_pipeline.planning import Scheduler
from tvm_pipeline.planning.registry import ALL_LIMITS, BY_CUTS, EVERY, OWN, TIMED
from tvm_pipeline.plugins import entry_points
from tvm_pipeline_onnxruntime.onnxruntime import PACKAGES

ROOT = Path(__file__).parents[1]
ENGINES = ROOT / "docs/engines.md"


def test_files_that_pages_name_exist() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    named = re.compile(r"\b(?:benchmarks|examples|profiles|tests|tvm_pipeline|backends|plugins|upstream)/[\w/.-]*\w")
    missing = {
        f"{page.name}: {name}"
        for page in pages
        for name in named.findall(page.read_text())
        if not (ROOT / name).exists()
    }
    assert not missing


def test_the_api_page_shows_an_example_of_every_public_name() -> None:
    """The page is made by griffe, which imports nothing, so it may take a name for something else than Python does."""
    needs("griffe")
    import griffe

    package = griffe.load("tvm_pipeline", search_paths=[ROOT], docstring_parser="google", resolve_aliases=True)
    without = []
    for name in tvm_pipeline.__all__:
        docstring = package[name].docstring
        if docstring is None or "examples" not in {section.kind.value for section in docstring.parsed}:
            without.append(name)
    assert not without


def test_the_table_of_vendors_has_lines_of_a_platform_file_and_the_package_of_each_provider(tmp_path: Path) -> None:
    rows = re.findall(r"^\|.*\| (.*) \| (`(?:backend|cores) = .*`) \|.*\|.*\|$", ENGINES.read_text(), re.MULTILINE)
    found: dict[str, str] = {}
    for package, cell in rows:
        lines = "\n".join(re.findall("`(.+?)`", cell))
        path = tmp_path / "row.toml"
        path.write_text(f'name = "row"\n[[device]]\nname = "device"\n{lines}\n')
        [device] = read_platform(path).devices
        assert device.backend in {entry.name for entry in entry_points(group=GROUP)}
        if device.backend == "onnxruntime" and device.target:
            found[parsed_target(device.target)[0]] = package.replace("`", "")
    assert found == PACKAGES


@pytest.mark.thorough
def test_the_page_lists_every_room_above_those_that_import_it() -> None:
    page = (ROOT / "docs/how-it-works.md").read_text()
    rooms = re.findall(r"^\| `tvm_pipeline/(\w+)/`", page, re.MULTILINE)
    package = ROOT / "tvm_pipeline"
    assert sorted(rooms) == sorted(path.parent.name for path in package.glob("*/__init__.py"))
    wrong = {
        f"{path.relative_to(ROOT)} imports {imported}"
        for path in package.glob("*/**/*.py")
        for imported in imported_rooms(path)
        if rooms.index(imported) > rooms.index(path.relative_to(package).parts[0])
    }
    assert not wrong


def imported_rooms(path: Path) -> set[str]:
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            modules |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
    rooms = {
        parts[1] for parts in (module.split(".") for module in modules) if parts[0] == "tvm_pipeline" and parts[1:]
    }
    return {room for room in rooms if (ROOT / "tvm_pipeline" / room).is_dir()}


def test_the_page_on_planning_states_what_each_scheduler_takes() -> None:
    page = (ROOT / "docs/planning.md").read_text()
    assert "\n".join(declared_row(name, declared) for name, declared in OWN.items() if not declared.cut) in page


def declared_row(name: str, declared: Scheduler) -> str:
    """Return the row of the table of docs/planning.md."""
    objectives = {EVERY: "all", BY_CUTS: "all but `edge_communication`", TIMED: "throughput, latency, energy"}.get(
        declared.objectives
    )
    stages = " or ".join(map(str, declared.stages)) or "any"
    limits = sorted(declared.counts - {"activations"})
    counts = ["all"] if declared.counts >= ALL_LIMITS else [option(limit) for limit in limits]
    counts += sorted(declared.counts & {"activations"})
    refuses = [option(limit) for limit in sorted(declared.refuses)]
    columns = (
        f"`{name}`",
        objectives or ", ".join(sorted(declared.objectives)),
        stages,
        ", ".join(counts) or "none",
        ", ".join(refuses) or "none",
    )
    return f"| {' | '.join(columns)} |"


def option(field: str) -> str:
    return f"`--{OTHER_NAMES.get(field, field.replace('_', '-'))}`"


def test_the_program_without_hardware_prints_what_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs/first-pipeline.md").read_text()
    section = page[page.index("## Without hardware") : page.index("## In a TVM script")]
    program, printed = re.findall(r"```(?:python|text)\n(.*?)```", section, re.DOTALL)
    exec(program, {})
    assert capsys.readouterr().out.split() == printed.split()


def test_the_api_page_has_each_public_name_once() -> None:
    listed = re.findall(r"(?m)^::: tvm_pipeline\.(\w+)$", (ROOT / "docs/api.md").read_text())
    assert sorted(listed) == sorted(tvm_pipeline.__all__)
