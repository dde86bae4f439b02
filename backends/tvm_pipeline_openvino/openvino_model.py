"""An ONNX model compiled for OpenVINO: any part of its file as a runnable stage.

OpenVINO fuses nodes, and rounds otherwise where it cannot. So nodes that it fuses in the whole model are one operator,
and a part of the file has the bits of the whole. Next: `stages.py`, what runs.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tvm_pipeline.backends.contract import Order, Port, Seconds
from tvm_pipeline.backends.engine import seconds_of_noise
from tvm_pipeline.backends.trial import Trial
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.platform import Device
from tvm_pipeline.errors import ModelError, RunError
from tvm_pipeline.frontends.onnx_folding import folded
from tvm_pipeline.frontends.onnx_model import OnnxModel
from tvm_pipeline_openvino.refused import refusals
from tvm_pipeline_openvino.stages import NODE, OpenvinoStage, compiled

_log = logging.getLogger(__name__)

MOST_KEPT = 8  # compiled parts, since candidates for a plan open theirs again and again
# They add up in another order where what they read lies otherwise, as it does behind a cut.
_BY_LAYOUT = frozenset(("Pooling", "Reduce", "MVN", "NormalizeL2", "Softmax", "LRN", "Interpolate"))


class OpenvinoModel(OnnxModel):
    """The CompiledModel of this backend."""

    def __init__(self, model: Model, order: Order = "listed", joined: Sequence[Sequence[int]] = ()) -> None:
        super().__init__(model, order, joined)
        self._kept: dict[object, Any] = {}
        self._unfit = refusals(self.file)

    @classmethod
    def compile(cls, model: Model, order: Order, targets: Iterable[str], trial: Trial) -> OpenvinoModel:
        model = folded(model)
        whole, layers = cls(model, order), []
        refused, count = list(whole._unfit.values()), len(whole.graph)
        if len(refused) == count:
            raise ModelError(f"{model.name}: {refused[0]}; run the model on another engine")
        if refused:
            _log.warning(
                f"{model.name}: OpenVINO runs {count - len(refused)} of {count} operators, and leaves others to other "
                f"engines: {refused[0]}; name tvm or onnxruntime in `engines`, too"
            )
        ports = *whole.ends(), tuple(map(Port.of, whole.graph.tensors.values()))
        for target in targets:
            try:
                layers += trial.ask((model.name, target, *ports), whole.numbered(prefix=NODE))
            except RunError as error:
                named = str(error).startswith(model.name)
                raise ModelError(str(error) if named else f"{model.name}: OpenVINO on {target}: {error}") from error
        bound = [nodes[0] for nodes, kind in layers if nodes and kind in _BY_LAYOUT]
        alone = {node for name in whole._unfit for node in whole.file.indices[name]}  # on other engines
        joined = whole.file.fused([nodes for nodes, _ in layers], bound)
        left = ([node for node in nodes if node not in alone] for nodes in joined)
        return cls(model, order, [nodes for nodes in left if len(nodes) > 1])

    def runner(
        self, content: bytes, inputs: Sequence[Port], outputs: Sequence[Port], device: Device, timed: bool = False
    ) -> OpenvinoStage:
        key = hashlib.sha256(content).digest(), device, timed  # requests of one compiled model wait for each other
        self._kept[key] = self._kept.pop(key, None) or compiled(self.graph.name, content, device, timed)
        while len(self._kept) > MOST_KEPT:
            del self._kept[next(iter(self._kept))]
        return OpenvinoStage(self.graph.name, self._kept[key], inputs, outputs, device)

    def has_own_threads(self, device: Device) -> bool:
        """Return whether it has several cores: OpenVINO's threads are one pool of a process."""
        return len(device.cores) > 1

    def refusals(self, device: Device) -> Mapping[str, str]:
        return self._unfit

    def counted_s(self, device: Device, repeats: int) -> Seconds:
        """Return seconds of every operator (repeats x operators), as OpenVINO counts those of its layers.

        What belongs to no operator, such as changes of layout, is divided among all by their multiply-accumulates. So
        is all of a device that counts nothing.
        """
        stage = self.runner(self.numbered(prefix=NODE), *self.ends(), device, timed=True)
        layers = stage.layers()
        owner = {node: index for index, name in enumerate(self.file.indices) for node in self.file.indices[name]}
        weights = np.array([operator.macs + 1.0 for operator in self.graph.operators])
        seconds = np.zeros((repeats, len(self.graph)))
        for row, spent_s in zip(seconds, seconds_of_noise(stage, repeats), strict=True):
            counted = stage.layers_s()
            for layer, layer_s in counted.items():
                if layer in layers and (nodes := layers[layer][0]):
                    row[owner[nodes[-1]]] += layer_s
            rest_s = (sum(counted.values()) or spent_s) - row.sum()
            row += max(rest_s, 0.0) * weights / weights.sum()
        return seconds

    def close(self) -> None:
        self._kept.clear()
        super().close()
