"""What a decoder is chosen by: the input, the outputs and the metadata of a model; and what a family makes of them.

Each family of decoders has a function `forms(model, name)` that returns the ways in which it can read the outputs.
`name` is that of a family or of a form where a user gave one; it is empty where the model is to be recognised, so that
a form which other models could have, too, is left out. Read next: choice.py, which asks the families.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from tvm_pipeline import OperatorGraph, Tensor
from tvm_pipeline_video.annotations import Annotation
from tvm_pipeline_video.preprocessing import Transform

Outputs = Mapping[str, NDArray[Any]]

# As in analysis.py, which chooses among these decoders and those of users.
Decoder = Callable[[Outputs, Transform], Sequence[Annotation]]


@dataclass(frozen=True, slots=True)
class Interface:
    """The picture that a model takes, and the tensors that it gives.

    Attributes:
        width, height: of the input, in pixels; 0 where it is no picture.
        nhwc: whether the channels are the input's last extent.
        dtype: of the input.
        outputs: by name, with their shapes, in the model's order.
        metadata: what the model's file says about it, see `core.model.Model`.
        labels: the names of the classes; empty where nobody says them.
    """

    width: int
    height: int
    nhwc: bool
    dtype: str
    outputs: tuple[Tensor, ...]
    metadata: Mapping[str, str] = field(default_factory=dict)
    labels: tuple[str, ...] = ()

    @classmethod
    def of(cls, model: OperatorGraph, metadata: Mapping[str, str], labels: Sequence[str] = ()) -> Interface:
        """Return the interface of a model, with these labels."""
        shape, dtype = model.inputs[0].shape, model.inputs[0].dtype
        nhwc = len(shape) == 4 and shape[1] not in (1, 3) and shape[3] in (1, 3)
        height, width = (shape[1:3] if nhwc else shape[2:4]) if len(shape) == 4 else (0, 0)
        outputs = tuple(model.tensors[name] for name in model.outputs)
        return cls(width, height, nhwc, dtype, outputs, metadata, tuple(labels))

    @property
    def task(self) -> str:
        """What the file says that the model does, as Ultralytics writes it: detect, segment, pose, classify, obb."""
        return self.metadata.get("task", "")

    def cells(self, *strides: int) -> int:
        """Return the number of cells of grids over the input, one grid for each stride in pixels."""
        return sum(-(-self.height // stride) * -(-self.width // stride) for stride in strides)


@dataclass(frozen=True, slots=True)
class Options:
    """What a decoder is made with.

    Attributes:
        labels: of the classes; may be too short or empty.
        threshold: the least score.
    """

    labels: tuple[str, ...]
    threshold: float

    def label(self, index: int) -> str:
        """Return the name of a class, or its number where it has no name."""
        return self.labels[index] if 0 <= index < len(self.labels) else f"class {index}"


@dataclass(frozen=True, slots=True)
class Format:
    """One way to read the outputs of a model.

    Attributes:
        name: of the form, which `decoder` takes, too; a family has several.
        read: the outputs that it reads.
        make: makes the decoder.
        classes: how many the outputs tell apart; 0 where they do not say.
        labels: those that every model of this form has.
        threshold: the usual one; None where the form takes none.
        preset: how pictures go in, by a name of `presets.PRESETS`; empty where the form does not tell.
    """

    name: str
    read: tuple[Tensor, ...]
    make: Callable[[Options], Decoder]
    classes: int = 0
    labels: tuple[str, ...] = ()
    threshold: float | None = None
    preset: str = ""

    def __str__(self) -> str:
        outputs = shown(self.read)
        return f"{self.name}: {outputs}" + (f", {self.classes} classes" if self.classes > 1 else "")


def shown(tensors: Sequence[Tensor]) -> str:
    """Return names and shapes for messages, of at most four: `output0 [1, 84, 8400]`."""
    listed = ", ".join(f"{tensor.name} {list(tensor.shape)}" for tensor in tensors[:4])
    return listed + (f" and {len(tensors) - 4} others" if len(tensors) > 4 else "")
