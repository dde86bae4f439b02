"""The fixtures are those of the engine's command line."""

from tests.cli.conftest import bundle, cli, model

__all__ = ["bundle", "cli", "model"]
