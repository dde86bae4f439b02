"""Which tensors of a slice lie at a fixed distance from one another, so that nothing copies them.

    y = concat(a, b)    b lies right behind a, and nothing runs for the concatenation
    z = concat(b, c)    c lies right behind b, so y and z overlap
    y = relu(x)         y lies where x was, if nothing reads x later

A block is a set of tensors at fixed distances. Each of its bytes is taken only while the tensor there is alive, so a
concatenation takes no more memory than its parts. A tensor has one place. If two concatenations want it in different
places, it is copied to the second: that concatenation runs, and copies the parts that lie there onto themselves.

Next: `slice_plan.py`, which lays the blocks out.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from tvm_pipeline_tvm.kernels import Entry, KernelLibrary, entry_bytes, entry_dtype, entry_shape, origin, tensor_bytes


class Part(NamedTuple):
    """A tensor of a concatenation, and the byte of the result at which it begins."""

    entry: Entry
    begin: int


def parts_of(library: KernelLibrary, kernel: int) -> list[Part]:
    """Return what a kernel does no more than put one behind the other; nothing if it does anything else.

    The bytes of each part must be consecutive in the result, as those of channels are in a batch of one:

        (1, 16, 7, 7), (1, 32, 7, 7) -> (1, 48, 7, 7)    parts at bytes 0 and 3136 of float32
        (1, 7, 7, 16), (1, 7, 7, 32) -> (1, 7, 7, 48)    no parts: each pixel has some bytes of both
    """
    made = library.kernels[kernel]
    if [name for name, _ in made.operators] != ["concatenate"] or len(made.outputs) != 1:
        return []
    [sources] = made.arguments
    if any(source.operator is not None or source.index < 0 for source in sources):
        return []
    entries, result = [made.reads[source.index] for source in sources], made.outputs[0]
    shapes = [entry_shape(library, entry) for entry in entries]
    if {entry_dtype(library, entry) for entry in entries} != {result.dtype}:
        return []
    axes = [axis for axis in range(len(result.shape)) if _is_along(axis, shapes, result.shape)]
    if len(axes) != 1 or math.prod(result.shape[: axes[0]]) != 1:
        return []
    begin, parts = 0, []
    for entry, shape in zip(entries, shapes, strict=True):
        parts.append(Part(entry, begin))
        begin += tensor_bytes(shape, result.dtype)
    return parts


def _is_along(axis: int, shapes: Sequence[tuple[int, ...]], result: tuple[int, ...]) -> bool:
    if any(len(shape) != len(result) for shape in shapes):  # a source that the kernel reshapes first
        return False
    others = {shape[:axis] + shape[axis + 1 :] for shape in shapes}
    return others == {result[:axis] + result[axis + 1 :]} and sum(shape[axis] for shape in shapes) == result[axis]


class SharedBytes:
    """The blocks of a slice: at first, each tensor that a kernel writes is one.

    Args:
        kernels: those of the slice that are no views.
        outputs: entries that are written into buffers of the caller. A block holds at most one, and nothing outside it.
        alone: entries that share no bytes.
        kept: entries whose bytes are needed to the end.
        alignment_bytes: a tensor begins at a multiple of it.

    Attributes:
        overwritten: for each tensor that another one takes the bytes of the other one.
    """

    def __init__(
        self,
        library: KernelLibrary,
        kernels: Iterable[int],
        outputs: Collection[Entry] = (),
        alone: Collection[Entry] = (),
        kept: Collection[Entry] = (),
        alignment_bytes: int = 1,
    ) -> None:
        self.overwritten: dict[Entry, Entry] = {}
        self._library, self._alignment_bytes = library, alignment_bytes
        self._outputs, self._alone, self._kept = set(outputs), set(alone), set(kept)
        self._made_of: dict[int, list[Entry]] = {}  # for each concatenation that is joined what it consists of
        self._copied: dict[Entry, int] = {}  # bytes of each part of them that is a copy; its field is 1 or more
        made = [(kernel, index) for kernel in kernels for index in range(len(library.kernels[kernel].outputs))]
        self._place: dict[Entry, tuple[Entry, int]] = {entry: (entry, 0) for entry in made}
        self._members: dict[Entry, list[Entry]] = {entry: [entry] for entry in made}

    def place(self, entry: Entry) -> tuple[Entry, int]:
        """Return the block of a tensor that a kernel of the slice makes, and the byte of it at which it begins.

        The block is called after one of its tensors, which begins at byte 0; others may begin before it.
        """
        return self._place[entry]

    def output_of(self, entry: Entry) -> Entry | None:
        """Return the output of the slice that the bytes of an entry are part of."""
        block, _ = self._place[entry]
        return next((member for member in self._members[block] if member in self._outputs), None)

    def makes(self, kernel: int) -> list[Entry]:
        """Return what a kernel alone writes: its outputs, or the parts that a concatenation copies."""
        if kernel in self._made_of:
            return [entry for entry in self._made_of[kernel] if entry in self._copied and entry[0] == kernel]
        return [(kernel, index) for index in range(len(self._library.kernels[kernel].outputs))]

    def written(self, entry: Entry) -> list[Entry]:
        """Return which of what kernels of the slice make the bytes of an entry are."""
        found, waiting = [], [origin(self._library, entry)]
        while waiting:
            entry = waiting.pop()
            if entry[0] in self._made_of and entry not in self._copied:
                waiting += self._made_of[entry[0]]
            elif entry in self._place:
                found.append(entry)
        return found

    def join(self, kernel: int) -> None:
        """Put the parts of a concatenation where they belong, and copies of those that lie elsewhere, if they fit."""
        before = dict(self._place), {block: list(members) for block, members in self._members.items()}
        for all_move in (True, False):
            components = self._joined(kernel, all_move)
            if not all(entry in self._copied for entry in components):
                self._made_of[kernel] = components
                return
            self._place, self._members = dict(before[0]), {block: list(own) for block, own in before[1].items()}
            self._copied = {entry: size for entry, size in self._copied.items() if entry[0] != kernel}
            self._made_of.pop(kernel)

    def _joined(self, kernel: int, all_move: bool) -> list[Entry]:
        """Return what a concatenation consists of, tensors and copies; nothing if they do not fit.

        Without `all_move` a tensor that has its place in another concatenation is copied.
        """
        made, components = (kernel, 0), self._made_of.setdefault(kernel, [])
        parts = [Part(origin(self._library, entry), begin) for entry, begin in parts_of(self._library, kernel)]
        if any(begin % self._alignment_bytes for _, begin in parts):
            return []
        for number, (entry, begin) in enumerate(parts, start=1):
            is_free = all_move or len(self._members.get(self._place.get(entry, (entry, 0))[0], ())) == 1
            if is_free and self._move(entry, made, begin):
                components.append(entry)
                continue
            copy = kernel, number
            end = parts[number].begin if number < len(parts) else self.size(made)
            self._copied[copy], self._place[copy], self._members[copy] = end - begin, (copy, 0), [copy]
            if not self._move(copy, made, begin):
                return []
            components.append(copy)
        return components

    def overwrite(self, order: Sequence[int]) -> None:
        """Put what a kernel makes where something that it reads was, if nothing reads that later.

        Args:
            order: the kernels that run, in this order.
        """
        last: dict[Entry, int] = {}
        for step, kernel in enumerate(order):
            for read in self._library.kernels[kernel].reads:
                last.update(dict.fromkeys(self.written(read), step))
        for needed in (*self._kept, *self._outputs):  # a concatenation that is joined is none of the kernels that run
            last.update(dict.fromkeys(self.written(needed), len(order)))
        for step, kernel in enumerate(order):
            made = kernel, 0
            for entry in self.replaceable(kernel):
                if last[entry] == step and self._move(entry, made, 0, replaced=True):
                    self.overwritten[entry] = made
                    break

    def replaceable(self, kernel: int) -> list[Entry]:
        """Return tensors of the slice in whose bytes a kernel may write, if it is the last to read them."""
        allowed, reads = set(self._library.overwrites(kernel)), self._library.kernels[kernel].reads
        return [
            entry
            for entry in dict.fromkeys(origin(self._library, read) for read in sorted(allowed))
            if entry in self._place
            and entry[0] not in self._made_of
            and kernel not in self._made_of
            and self.size(entry) == self.size((kernel, 0))
            and allowed.issuperset(read for read in reads if entry in self.written(read))
        ]

    def _move(self, entry: Entry, other: Entry, begin: int, *, replaced: bool = False) -> bool:
        """Put the block of an entry `begin` bytes behind the beginning of another; return whether that can be.

        Args:
            replaced: the other entry is written where the first one was.
        """
        if entry not in self._place or entry in self._outputs or {entry, other} & self._alone:
            return False
        (block, own), (onto, there) = self._place[entry], self._place[other]
        shift = there + begin - own
        if block == onto:
            return shift == 0
        moved = {member: self._place[member][1] + shift for member in self._members[block]}
        stay = {member: self._place[member][1] for member in self._members[onto]}
        if not self._fit(moved, stay, (there + begin, other) if replaced else None):
            return False
        self._place.update({member: (onto, at) for member, at in moved.items()})
        self._members[onto] += self._members.pop(block)
        return True

    def _fit(self, moved: Mapping[Entry, int], stay: Mapping[Entry, int], replaced: tuple[int, Entry] | None) -> bool:
        """Return whether two sets of tensors, by where they begin, do not overlap and lie in no two outputs."""
        both = {**stay, **moved}
        outputs = [entry for entry in both if entry in self._outputs]
        if len(outputs) > 1:
            return False
        for output in outputs:
            first, end = both[output], both[output] + self.size(output)
            if any(at < first or at + self.size(entry) > end for entry, at in both.items()):
                return False
        return not any(
            at < below + self.size(other) and below < at + self.size(entry) and (at, other) != replaced
            for entry, at in moved.items()
            if not self._is_whole(entry)
            for other, below in stay.items()
            if not self._is_whole(other)
        )

    def _is_whole(self, entry: Entry) -> bool:
        """Return whether an entry is a concatenation that is joined: its bytes are those of its parts."""
        return entry[0] in self._made_of and entry not in self._copied

    def size(self, entry: Entry) -> int:
        """Return the bytes of an entry."""
        return self._copied[entry] if entry in self._copied else entry_bytes(self._library, entry)
