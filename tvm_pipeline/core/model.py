"""The Model: the bytes, the format and the inputs of a network's file.

Models come from `frontends/`, and backends compile them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import msgspec

from tvm_pipeline.core.graph import Tensor
from tvm_pipeline.errors import OptionError

TOLERANCE, MOST_TOLERANCE = 1e-5, 1e-2  # of a model that nobody gave another one, and what no model should lose

WeightType = Literal["float32", "float16", "bfloat16"]
FLOAT32: WeightType = "float32"

Format = Literal["onnx", "tflite", "relay", "relay.json", "relay.testing", "relax.json"]


@dataclass(frozen=True, slots=True)
class Model:
    """A network that was read and checked, but not yet imported.

    Attributes:
        name: the name in messages and files.
        format: what `content` is; `relay.testing` names a built-in network and has no content.
        content: the bytes of the file.
        inputs: name, shape and dtype of every input, all fixed; empty where the format's importer knows them.
        params: the parameters of a Relay file or a module, in TVM's own format; empty where `content` has them.
        outputs: the name of every output, in order; empty where the importer alone knows them, or nobody.
        obstacles: what TVM's importer cannot take of the file, a line each with what to do; another engine may take it.
        shaped: the inputs whose shapes were given, since the file leaves them open or has others.
        tolerance: the error that faster algorithms may add to an output, over its largest value. 0 keeps each sum as
            plain TVM computes it; see `tvm_pipeline_tvm/kernel_sets.py`.
        metadata: what the file says about itself, as text; see `frontends/model_metadata.py`.
        notes: what was assumed or changed while it was read, a line each, for the user.
        weights: the type in which the weights of convolutions and matrix products are stored. All is computed in
            float32; weights in 16 bits take half of the memory.

    Examples:
        >>> model = load("resnet-50", {"data": (1, 3, 64, 64)})
        >>> model.name, model.format, model.inputs[0].bytes
        ('resnet-50', 'relay.testing', 49152)
    """

    name: str
    format: Format
    content: bytes
    inputs: tuple[Tensor, ...] = ()
    params: bytes = b""
    tolerance: float = TOLERANCE
    outputs: tuple[str, ...] = ()
    obstacles: tuple[str, ...] = ()
    shaped: tuple[str, ...] = ()
    metadata: Mapping[str, str] = field(default_factory=dict, compare=False)
    notes: tuple[str, ...] = field(default=(), compare=False)
    weights: WeightType = FLOAT32

    @property
    def digest(self) -> str:
        """The SHA-256 of all that the compiled code depends on, but for the choices that tuning may make."""
        described = msgspec.json.encode((self.name if not self.content else "", self.format, self.inputs))
        rounded = () if self.weights == FLOAT32 else (self.weights.encode(),)
        return hashlib.sha256(b"\0".join((described, self.params, self.content, *rounded))).hexdigest()


def with_tolerance(model: Model, tolerance: float | None) -> Model:
    """Return the model with this tolerance, or its own; raise OptionError where no user could mean such an error."""
    if tolerance is None:
        return model
    if not 0 <= tolerance <= MOST_TOLERANCE:
        raise OptionError(
            f"`tolerance` {tolerance:g}: give the error of an output over its largest value, from 0 (direct sums) to "
            f"{MOST_TOLERANCE:g}",
            option="tolerance",
            value=tolerance,
        )
    return replace(model, tolerance=tolerance)


def with_weights(model: Model, weights: str | None) -> Model:
    """Return the model with weights of this type, or its own; raise OptionError where there is no such type."""
    found = next((known for known in get_args(WeightType) if known == weights), None)
    if weights is None:
        return model
    if found is None:
        raise OptionError(
            f"`weights` {weights}: weights are stored as float32, or in half of the memory as float16 or bfloat16; "
            "give one of these",
            option="weights",
            value=weights,
        )
    return replace(model, weights=found)
