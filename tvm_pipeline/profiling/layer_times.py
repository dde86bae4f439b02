"""Seconds of operators that nobody measured: predicted from shapes, on a device that is known from other networks.

A file of layer times holds what the operators of some networks are (`cost/shapes.py`) and took on one device. For
each kind of operator, this is fitted to them, with coefficients that are not negative:

    seconds = c0 + c1 * macs + c2 * lost_macs + c3 * input_bytes + c4 * output_bytes + c5 * param_bytes

Operators that mostly move numbers have `c0 + c1 * macs + c2 * bytes`. The sum of relative errors is made least, by
least squares that are weighted anew some times. How far a prediction may be off is found out by leaving out each
network in turn and predicting it from the others. Operators of a kind that no network has are predicted from all that
multiply or all that move, and taken to be off by up to a factor of 1 + UNSEEN; so are those of a kind of which only one
network tells.

`benchmarks/layer_times.py` measures how good that is. Neither nearest neighbours nor bytes beyond caches made the
predictions better, so neither is here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from tvm_pipeline.core.device_model import LONGEST_S
from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.graph_limits import MOST_FILE_BYTES
from tvm_pipeline.core.profile import DeviceProfile
from tvm_pipeline.cost.shapes import OperatorWork, operator_work
from tvm_pipeline.documents import blamed
from tvm_pipeline.errors import ProfileError
from tvm_pipeline.files import read_bytes, write_bytes

Floats = npt.NDArray[np.float64]

UNSEEN = 2.0  # relative half-width of the interval of a kind of which no error is known
MOST_UNCERTAIN = 0.3  # measured figures with a wider interval say too little to be fitted to
_LEAST_S = 1e-7  # a call of a kernel takes about so long
_PRODUCT_TERMS, _MOVE_TERMS = 6, 3  # coefficients of operators that multiply, and of others
_ROUNDS = 6  # of weighting
_SMALL_ERROR = 0.03  # errors below it weigh alike


class LayerTime(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One operator of a network, what it is and how long it took."""

    work: OperatorWork
    seconds: float


class DeviceNote(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The device that was measured, as far as it is known: the processor's name, the cores in use, the target, TVM."""

    processor: str = ""
    cores: int = 0
    target: str = ""
    tvm: str = ""

    def __str__(self) -> str:
        threads = f"{self.cores} core{'s' if self.cores > 1 else ''}" if self.cores else ""
        return ", ".join(filter(None, (self.processor, threads, self.target, self.tvm and f"TVM {self.tvm}")))


@dataclass(frozen=True, slots=True)
class KindError:
    """How well operators of a kind are predicted when their network is left out.

    Attributes:
        operators: the number that were predicted so.
        median, worst: of their absolute relative errors.
        half_width: of the interval around a prediction that holds 95 % of the measured seconds, relative to it.
    """

    operators: int
    median: float
    worst: float
    half_width: float


class LayerTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """The layer times of one device.

    Attributes:
        device: what was measured.
        networks: the operators of each network, by its name; pictures of several sizes make one network.

    Raises:
        ProfileError: there is no operator, or a figure is impossible.
    """

    device: DeviceNote
    networks: dict[str, list[LayerTime]]

    def __post_init__(self) -> None:
        if not any(self.networks.values()):
            raise ProfileError("layer times need at least one operator; profile a network on the device first")
        for network, layers in self.networks.items():
            for layer in layers:
                sizes = (getattr(layer.work, name) for name in ("macs", "lost_macs", "input_bytes", "output_bytes"))
                if not 0 < layer.seconds <= LONGEST_S or min(*sizes, layer.work.param_bytes) < 0:
                    raise ProfileError(
                        f"layer times of {network}: a {layer.work.kind} takes {layer.seconds} s, or has a negative "
                        "size; measure again"
                    )

    @cached_property
    def errors(self) -> dict[str, KindError]:
        """The errors of each kind that two networks have, leaving out one network at a time; by kind and dtype."""
        return kind_errors(self.left_out)

    @cached_property
    def left_out(self) -> dict[str, list[tuple[LayerTime, float | None]]]:
        """For each network its operators, each with the seconds that the other networks predict for it.

        The seconds are None where no other network has an operator of its kind.
        """
        found = {}
        for name, layers in self.networks.items():
            fits = _Fits(layer for other, others in self.networks.items() if other != name for layer in others)
            found[name] = [
                (layer, fits.seconds(layer.work) if layer.work.key in fits.kinds else None) for layer in layers
            ]
        return found

    @cached_property
    def _fits(self) -> _Fits:
        return _Fits(layer for layers in self.networks.values() for layer in layers)

    def predict(self, graph: OperatorGraph, source: str = "layer times") -> DeviceProfile:
        """Return the predicted figures of a graph on the device; their uncertainty is that of each kind.

        The host's operators cannot be predicted, and are taken not to run on the device.

        Args:
            source: named in the profile.

        Raises:
            ProfileError: no operator of the graph is of a kind and dtype that is known here.
        """
        works = {o.name: operator_work(o, graph.tensors) for o in graph.operators if not o.is_host}
        if works and not self.unseen(graph) < len(works):
            raise ProfileError(
                f"{source} knows no operator like those of {graph.name}: it has {', '.join(sorted(self._fits.kinds))}; "
                "add a profile of a like network with `tvm-pipeline layer-times`"
            )
        seconds = {o.name: self._fits.seconds(works[o.name]) if o.name in works else None for o in graph.operators}
        uncertainty = {o.name: self._half_width(works[o.name]) if o.name in works else UNSEEN for o in graph.operators}
        return DeviceProfile(seconds, uncertainty=uncertainty, predicted_from=source)

    def unseen(self, graph: OperatorGraph) -> int:
        """Return how many operators of the graph, the host's left out, are of a kind that no network here has."""
        operators = (o for o in graph.operators if not o.is_host)
        return sum(operator_work(o, graph.tensors).key not in self._fits.kinds for o in operators)

    def without(self, network: str) -> LayerTimes:
        """Return the layer times without one network."""
        return LayerTimes(self.device, {name: layers for name, layers in self.networks.items() if name != network})

    @property
    def median_error(self) -> float | None:
        """The median relative error of an operator whose network was left out; None where none could be predicted."""
        errors = [error for layers in self.left_out.values() for error in _errors(layers)]
        return float(np.median(errors)) if errors else None

    def _half_width(self, work: OperatorWork) -> float:
        known = self.errors.get(work.key)
        return UNSEEN if known is None else known.half_width


def layer_times(graph: OperatorGraph, profile: DeviceProfile) -> list[LayerTime]:
    """Return the operators of a graph with their measured seconds; those that were measured too badly are left out.

    Raises:
        ProfileError: the figures are themselves predicted.
    """
    if profile.predicted_from:
        raise ProfileError(
            f"the seconds of {graph.name} are predicted from {profile.predicted_from}; only measured ones can be fitted"
        )
    found = []
    for operator in graph.operators:
        seconds = profile.seconds[operator.name]
        if operator.is_host or not seconds or profile.uncertainty.get(operator.name, 0.0) > MOST_UNCERTAIN:
            continue
        found.append(LayerTime(operator_work(operator, graph.tensors), seconds))
    return found


def kind_errors(predicted: Mapping[str, Sequence[tuple[LayerTime, float | None]]]) -> dict[str, KindError]:
    """Return the errors by kind and dtype, in the order of their names.

    Args:
        predicted: for each network its operators and what was predicted, as `left_out` has them.
    """
    by_kind: dict[str, list[tuple[LayerTime, float | None]]] = defaultdict(list)
    for layers in predicted.values():
        for layer, seconds in layers:
            if seconds is not None:
                by_kind[layer.work.key].append((layer, seconds))
    found = {}
    for kind, layers in sorted(by_kind.items()):
        errors = _errors(layers)
        beyond = [abs(layer.seconds / seconds - 1) for layer, seconds in layers if seconds is not None]
        found[kind] = KindError(
            len(errors), float(np.median(errors)), float(max(errors)), float(np.quantile(beyond, 0.95))
        )
    return found


def read_layer_times(path: Path | str) -> LayerTimes:
    """Read layer times from their JSON file. Raise ProfileError, which names the file."""
    content = read_bytes(path, ProfileError, MOST_FILE_BYTES)
    with blamed(path, ProfileError, "`tvm-pipeline layer-times` writes one"):
        return msgspec.json.decode(content, type=LayerTimes)


def write_layer_times(path: Path | str, times: LayerTimes) -> None:
    """Write the file, one operator a line."""
    lines = []
    for name, layers in times.networks.items():
        listed = ",\n".join("   " + msgspec.json.encode(layer).decode() for layer in layers)
        lines.append(f"  {msgspec.json.encode(name).decode()}: [\n{listed}\n  ]")
    device = msgspec.json.encode(times.device).decode()
    write_bytes(path, ('{\n "device": ' + device + ',\n "networks": {\n' + ",\n".join(lines) + "\n }\n}\n").encode())


def _errors(layers: Iterable[tuple[LayerTime, float | None]]) -> list[float]:
    return [abs(seconds / layer.seconds - 1) for layer, seconds in layers if seconds is not None]


class _Fits:
    """The fitted coefficients of each kind, and of all operators that multiply and all that move."""

    def __init__(self, layers: Iterable[LayerTime]) -> None:
        kinds: dict[str, list[LayerTime]] = defaultdict(list)
        classes: dict[bool, list[LayerTime]] = defaultdict(list)
        for layer in layers:
            kinds[layer.work.key].append(layer)
            classes[layer.work.multiplies].append(layer)
        self._classes = {multiplies: _fitted(members) for multiplies, members in classes.items()}
        self.kinds = {key: self._of_kind(members) for key, members in kinds.items()}

    def _of_kind(self, layers: Sequence[LayerTime]) -> Floats:
        """Return the coefficients of a kind; where its operators are too few to fit, scale those of its class."""
        like = self._classes[layers[0].work.multiplies]
        if len(layers) >= len(like):
            return _fitted(layers)
        return like * float(np.median([layer.seconds / _predicted(layer.work, like) for layer in layers]))

    def seconds(self, work: OperatorWork) -> float:
        """Return the predicted seconds; where the kind was not seen, those of its class, and else of any class."""
        found = self.kinds.get(work.key, self._classes.get(work.multiplies))
        if found is None:
            found = next(iter(self._classes.values()))
        return _predicted(work, found)


def _predicted(work: OperatorWork, coefficients: Floats) -> float:
    return max(_LEAST_S, float(_terms(work, len(coefficients)) @ coefficients))


def _terms(work: OperatorWork, count: int) -> Floats:
    """Return what so many coefficients are multiplied with."""
    if count == _PRODUCT_TERMS:
        sizes = [work.lost_macs, work.input_bytes, work.output_bytes, work.param_bytes]
    else:
        sizes = [work.moved_bytes]
    return np.array([1, work.macs, *sizes], np.float64)


def _fitted(layers: Sequence[LayerTime]) -> Floats:
    """Return the coefficients of the layers, none of them negative, that make the sum of relative errors least."""
    count = _PRODUCT_TERMS if layers[0].work.multiplies else _MOVE_TERMS
    terms = np.array([_terms(layer.work, count) for layer in layers])
    seconds = np.array([layer.seconds for layer in layers])
    scale = np.maximum(terms.max(axis=0), 1.0)
    relative = terms / scale / seconds[:, None]
    weights = np.ones(len(layers))
    for _ in range(_ROUNDS):
        found = _non_negative(relative, weights)
        weights = 1 / np.maximum(np.abs(relative @ found - 1), _SMALL_ERROR)
    coefficients: Floats = found / scale
    return coefficients


def _non_negative(matrix: Floats, weights: Floats) -> Floats:
    """Return the x >= 0 that makes the weighted squares of `matrix @ x - 1` least.

    The best x has some elements of zero and is, in the others, an ordinary least-squares solution. With at most six
    elements all choices are tried.
    """
    size = matrix.shape[1]
    gram = matrix.T @ (weights[:, None] * matrix)
    aim = matrix.T @ weights
    ridge = 1e-9 * np.trace(gram) * np.eye(size)
    used = np.array([[bool(choice >> bit & 1) for bit in range(size)] for choice in range(1, 2**size)])
    systems = np.where(used[:, :, None] & used[:, None, :], gram + ridge, np.eye(size))
    found = np.linalg.solve(systems, np.where(used, aim, 0.0)[:, :, None])[:, :, 0]
    squares: Floats = np.einsum("ci,ij,cj->c", found, gram, found) / 2 - found @ aim
    possible = (found >= 0).all(axis=1)
    best: Floats = found[possible][squares[possible].argmin()]
    return best
