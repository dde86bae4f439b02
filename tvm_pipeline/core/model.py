"""A model as a file gave it: its bytes, its format and its inputs. `frontends/` makes them, backends compile them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

import msgspec

from tvm_pipeline.core.graph import Tensor

Format = Literal["onnx", "tflite", "relay", "relay.json", "relay.testing"]


@dataclass(frozen=True, slots=True)
class Model:
    """A network that was read and checked, and not yet imported.

    Attributes:
        name: how messages and files call it.
        format: what `content` is; `relay.testing` names a built-in network and has no content.
        content: the bytes of the file.
        inputs: name, shape and dtype of every input, all fixed; empty where the format's importer knows them.
        params: parameters saved beside a Relay file, in TVM's own format; empty where the file holds them.
    """

    name: str
    format: Format
    content: bytes
    inputs: tuple[Tensor, ...] = ()
    params: bytes = b""

    @property
    def digest(self) -> str:
        """SHA-256 of all that decides what is compiled."""
        described = msgspec.json.encode((self.name if not self.content else "", self.format, self.inputs))
        return hashlib.sha256(b"\0".join((described, self.params, self.content))).hexdigest()
