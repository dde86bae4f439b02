"""The command line and the model of tests/cli."""

from __future__ import annotations

from tests.cli.conftest import bundle, cli, model  # noqa: F401
