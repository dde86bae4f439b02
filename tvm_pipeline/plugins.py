"""What installed packages add to the engine's tables, by entry points: names are listed, and each is loaded when used.

A package states them in its pyproject.toml, as `fair = "my_package:FAIR"` under
`[project.entry-points."tvm_pipeline.schedulers"]`. Nothing of a package is imported before its entry is asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import metadata
from importlib.metadata import EntryPoint, EntryPoints
from typing import Any, TypeVar

from tvm_pipeline.errors import OptionError, PipelineError, nearest

T = TypeVar("T")


def entry_points(group: str) -> EntryPoints:
    """Return the entry points that installed packages register in a group.

    Python reads the files of all packages for that, which takes 10 ms or more, and a command asks dozens of times. So
    this function keeps what it has read as long as `sys.path` stays the same.
    """
    found: EntryPoints = _read(tuple(sys.path)).select(group=group)
    return found


@cache
def _read(_: tuple[str, ...]) -> Any:  # EntryPoints; Python 3.10 has another class for those of all groups
    return metadata.entry_points()


class PluginTable(Mapping[str, T]):
    """A table by name: the engine's own entries in their order, then those of installed packages by name.

    An entry of a package that has the name of one of the engine's is ignored, so that no package changes these.

    Args:
        group: of the entry points, such as `tvm_pipeline.schedulers`.
        noun: the word for an entry in messages, such as `scheduler`.
        own: the engine's entries.
        is_valid: whether a loaded object is an entry.
        page: the page of the documentation that says what an entry is.

    Raises:
        PipelineError: by `[]`, an installed entry cannot be loaded, is no valid entry, or two packages bring it.
    """

    def __init__(self, group: str, noun: str, own: Mapping[str, T], is_valid: Any, page: str) -> None:
        self.own = own
        self._group, self._noun, self._is_valid, self._page = group, noun, is_valid, page

    def __getitem__(self, name: str) -> T:
        if name in self.own:
            return self.own[name]
        found = self._installed()[name]
        if len(found) > 1:
            packages = " and ".join(sorted(f"{_package(entry)} ({entry.value})" for entry in found))
            raise PipelineError(f"two packages bring the {self._noun} {name}: {packages}; uninstall one of them")
        [entry] = found
        where = f"the {self._noun} {name} of the package {_package(entry)} ({entry.value})"
        try:
            loaded: T = entry.load()
        except Exception as error:  # the fault of another package becomes one line
            raise PipelineError(
                f"{where} cannot be loaded: {type(error).__name__}: {error}; install what it needs, or uninstall it"
            ) from error
        if not self._is_valid(loaded):
            raise PipelineError(f"{where} is a {type(loaded).__name__}; {self._page} says what to register")
        return loaded

    def __contains__(self, name: object) -> bool:
        return name in self.own or name in self._installed()

    def __iter__(self) -> Iterator[str]:
        yield from self.own
        yield from sorted(self._installed().keys() - self.own.keys())

    def __len__(self) -> int:
        return len(self.own.keys() | self._installed().keys())

    def check(self, name: str, option: str, other: str) -> None:
        """Raise OptionError, with the likely name or all, if `name` is neither in the table nor is it `other`."""
        if name != other and name not in self:
            known = (other, *self)
            advice = nearest(name, known, f"there are {', '.join(known)}")
            raise OptionError(f"there is no {self._noun} {name}; {advice}", option=option, value=name)

    def _installed(self) -> dict[str, list[EntryPoint]]:
        found: dict[str, dict[str, EntryPoint]] = {}
        for entry in entry_points(group=self._group):
            found.setdefault(entry.name, {})[entry.value] = entry
        return {name: list(entries.values()) for name, entries in found.items()}


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist else "unknown"
