"""A service is tested through the command line, too: the fixtures are those of its tests."""

from tests.cli.conftest import bundle, cli, model

__all__ = ["bundle", "cli", "model"]
