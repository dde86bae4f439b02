"""The commands of the entry points `tvm_pipeline.commands`, each imported when it runs, or is asked for its help.

The engine's own commands and those of plug-ins come in by this one door. A function is a command, and a `typer.Typer`
is a group of commands. The list of all commands is read from the compiled files: the docstring of the function or, for
a group, of its module. So the list is printed at once, and a plug-in that cannot be imported breaks only its own
commands.
"""

from __future__ import annotations

import inspect
import re
import sys
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from types import CodeType, ModuleType
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from tvm_pipeline.errors import PipelineError
from tvm_pipeline.plugins import entry_points
from tvm_pipeline.signals import ending, handling
from tvm_pipeline_command import stop

# The commands in the order of their use; in the list, others follow by name.
ORDER = (
    *("devices", "check", "tune", "profile", "layer-times", "calibrate", "plan", "simulate", "deploy", "compile"),
    *("run", "bench", "serve-rpc", "top", "show", "slice", "memory"),
)


class Commands(TyperGroup):
    """The group of all commands that are installed."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.entries = entry_points(group="tvm_pipeline.commands")
        if not self.entries:
            raise PipelineError("no command is installed: install the package with `pip install .`")
        place = {name: number for number, name in enumerate(ORDER)}
        names = sorted(self.entries.names, key=lambda name: (place.get(name, len(place)), name))
        self.commands = {name: TyperCommand(name) for name in names}

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help with a line for each command."""
        for entry in self.entries:
            self.commands[entry.name].help = docstring(entry)
        _import_help()
        super().format_help(ctx, formatter)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Import the command that runs; raise PipelineError if that fails, or if two packages bring it."""
        name, found, rest = super().resolve_command(ctx, args)
        return name, found and self.loaded(str(name)), rest

    def loaded(self, name: str) -> Any:
        """Return a command that can run."""
        found = {
            f"{entry.dist.name if entry.dist else '?'} ({entry.value})": entry
            for entry in self.entries.select(name=name)
        }
        packages = " and ".join(found)
        if len(found) > 1:
            raise PipelineError(f"two packages bring a command called {name}: {packages}; uninstall one of them")
        app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=self.rich_markup_mode)
        try:
            with handling(ending(stop)):  # an import may swallow an exception
                command = found[packages].load()
            if isinstance(command, typer.Typer):
                app.add_typer(command, name=name)
            else:
                app.command(name)(command)
            return typer.main.get_group(app).commands[name]
        except PipelineError:
            raise
        except Exception as error:  # whatever the file of a plug-in does
            reason = f"{type(error).__name__}: {error}"
            raise PipelineError(f"the command {name} of {packages} cannot be loaded: {reason}") from error


def _type_in_help(option: TyperOption, ctx: Any) -> str | None:
    """Return the type of an option in its help: one word, also where it is given several times; None for a flag."""
    if option.is_flag:
        return None
    several = re.fullmatch(r"<list\[(\w+)\]>", option.display_type(ctx))
    return option.metavar or (f"<{several[1].lower()}>" if several else option.display_type(ctx))


if hasattr(TyperOption, "display_type_rich"):  # typer has no setting for it, and writes <bool> and <list[Path]>
    TyperOption.display_type_rich = _type_in_help  # type: ignore[method-assign, assignment]


def docstring(entry: EntryPoint) -> str:
    """Return the docstring of a command without importing it, from the file that Python compiled."""
    name, *inner = entry.module.split(".")
    try:
        spec = find_spec(name)
        for part in inner:
            name = f"{name}.{part}"
            spec = spec and PathFinder.find_spec(name, spec.submodule_search_locations)
        module = spec.loader.get_code(name)  # type: ignore[union-attr]
    except Exception:
        return f"Cannot be loaded; `tvm-pipeline {entry.name}` says why."
    functions = {code.co_name: code for code in module.co_consts if isinstance(code, CodeType)}
    first = functions.get(entry.attr, module).co_consts[0]
    return inspect.cleandoc(first) if isinstance(first, str) else ""


def _import_help() -> None:
    """Import what prints help, without Markdown and tracebacks, which take a quarter of the time and are in no help."""
    stand_ins = {name: ModuleType(name) for name in ("rich.markdown", "rich.traceback") if name not in sys.modules}
    for module in stand_ins.values():
        vars(module)["__getattr__"] = lambda _: object  # whatever is imported from it
    sys.modules.update(stand_ins)
    try:
        import_module("typer.rich_utils")
    finally:
        for name in stand_ins:
            del sys.modules[name]
