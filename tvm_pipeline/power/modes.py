"""What is known of the power modes of this machine: the contract of a package that reads and sets them.

Planning needs none of it: it plans for the modes that a platform states. Next: doors.py, which finds the package.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager

from tvm_pipeline.core.power_mode import PowerMode
from tvm_pipeline.errors import PowerError


class PowerModes:
    """The power modes of this machine. This class itself is of a machine of which nobody knows any."""

    def modes(self) -> Sequence[PowerMode]:
        """Return the modes that the machine has; raise PowerError if they cannot be read."""
        return ()

    def is_set(self, mode: PowerMode) -> bool:
        """Return whether the machine is in this mode."""
        return False

    def mode_set(self, mode: PowerMode) -> AbstractContextManager[None]:
        """Have the machine in this mode while a block lasts, and put back what was before.

        Raises:
            PowerError: the mode cannot be set.
        """
        raise PowerError(f"power mode {mode.name} cannot be set: no installed package sets modes of this machine")

    def put_back_left(self) -> None:
        """Put back what a process that was killed had set. Each run calls this when it begins."""

    def described(self) -> Iterable[str]:
        """Return lines for `tvm-pipeline devices`: which board this is, its modes, and which of them is set."""
        return ()

    def unsteady(self) -> str:
        """Return why clocks change with the load, and what to do; empty where nothing shows that they do."""
        return ""

    def environment(self) -> Mapping[str, str]:
        """Return what a profile keeps of the machine: `board` and `power mode`; a profile of others is doubted."""
        return {}
