"""What a backend has as well if it can do operators of a model in parts, so that stages need less memory.

`workflow/rewriting_trial.py` chooses which operators, and compares the outputs before it accepts them. Next:
`tvm/relay/relay_rewriting.py`; `memory/rewriting.py`, for what it is that is done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from tvm_pipeline.backends.contract import Progress
from tvm_pipeline.core.model import Model


class Rewriting(Protocol):
    """A model, and what of it can be done in parts."""

    @property
    def names(self) -> Sequence[str]:
        """The operators that can be done in parts; a concatenation stands for all that reads it."""

    @property
    def refused(self) -> Mapping[str, str]:
        """The operators that cannot although the model's shape allows it, with the reason."""

    @property
    def is_quantized(self) -> bool:
        """Whether the model computes in integers, so that its outputs must stay equal bit for bit."""

    def peak_bytes(self, chosen: Sequence[str]) -> int:
        """Return the least peak of activations if these operators, in the sequence of `names`, are done in parts."""

    def rewritten(self, chosen: Sequence[str]) -> Model:
        """Return the model with these operators done in parts; it has the same inputs and outputs."""


@runtime_checkable
class MemoryRewriter(Protocol):
    """What a Backend has as well if it can rewrite models."""

    def rewriting(self, model: Model, progress: Progress) -> Rewriting:
        """Read a model that is to be rewritten before it is compiled.

        Raises:
            ModelError: it cannot be read.
            OptionError: models of this format cannot be rewritten.
        """


@dataclass(frozen=True, slots=True)
class MemoryRewriting:
    """What was done in parts to a model, and what that saves.

    Attributes:
        operators: those that are done in parts; none where nothing is gained.
        left_out: those that could be, and are not, with the reason.
        peak_bytes: of the whole model's activations in the order of least memory, before and after.
        arena_bytes: what the allocator of `device` plans for the whole model, before and after.
        device: the first device, on which outputs were compared and arenas planned.
        difference: the greatest one of the outputs, as a share of the largest output; 0 where all bits are equal.
        tolerance: the difference that was allowed; 0 for a model that computes in integers.
        why: why the model stays as it is; empty where it was rewritten.
    """

    operators: tuple[str, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    peak_bytes: tuple[int, int] = (0, 0)
    arena_bytes: tuple[int, int] = (0, 0)
    device: str = ""
    difference: float = 0.0
    tolerance: float = 0.0
    why: str = ""

    @property
    def omissions(self) -> list[str]:
        """What was left out as lines, those of one reason together."""
        names: dict[str, list[str]] = {}
        for name, reason in self.left_out.items():
            names.setdefault(reason, []).append(name)
        return [f"not done in parts: {', '.join(of)}: {reason}" for reason, of in names.items()]
