"""Ray is behind two files, which import it only where it is used."""

from __future__ import annotations

import ast

from tests.guards.sources import files, imported, imports_of, name, tree

OWN = "plugins/tvm_pipeline_hosts/fleet/ray_"


def test_ray_is_imported_by_its_own_files_alone() -> None:
    """Everything else of a fleet runs and is tested without Ray."""
    wrong = [
        name(path)
        for path in files()
        if any(dotted.split(".")[0] == "ray" for dotted in imported(path)) and not name(path).startswith(OWN)
    ]
    assert wrong == []


def test_ray_is_imported_in_functions() -> None:
    """It takes its settings from the environment when it is imported, and is an extra that may be missing."""
    wrong = [
        name(path)
        for path in files()
        for statement in tree(path).body
        if isinstance(statement, (ast.Import, ast.ImportFrom))
        and any(dotted.split(".")[0] == "ray" for dotted in imports_of(ast.Module([statement], [])))
    ]
    assert wrong == []
