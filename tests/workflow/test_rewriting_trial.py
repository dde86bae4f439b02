"""Operators in parts: accepted where memory falls and outputs stay the same, left out by name where they change."""

from __future__ import annotations

import pickle
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from tvm_pipeline.backends.contract import Array, MemoryRewriting, Order
from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.platform import Device
from tvm_pipeline.errors import OptionError
from tvm_pipeline.memory.stage_memory import least_peak
from tvm_pipeline.testing import FakeBackend, FakeModel
from tvm_pipeline.workflow.rewriting_trial import compiled_in_parts, greatest_difference

WIDTH, JOINS = 8, 2
CPU = Device("d0", "fake")


@dataclass(frozen=True)
class Scaled:
    """The first rows of the input, each times a factor of its own."""

    rows: int

    def __call__(self, x: Array) -> list[Array]:
        return [(np.resize(x, (self.rows, WIDTH)) * np.arange(1, self.rows + 1)[:, None]).astype(x.dtype)]


def joined(left: Array, right: Array) -> list[Array]:
    return [np.concatenate([left, right])]


@dataclass(frozen=True)
class Total:
    """The sum of all rows and of what was summed before; `flaw` is added to the first element."""

    flaw: float = 0.0

    def __call__(self, rows: Array, before: Array | None = None) -> list[Array]:
        total = rows.sum(axis=0, dtype=rows.dtype, keepdims=True)
        total[0, 0] += np.array(self.flaw).astype(rows.dtype)
        return [total if before is None else total + before]


@dataclass
class Joins(FakeBackend):
    """A network of joins one after another, each of two wide tensors and with one reader; a join can be done in parts.

    Attributes:
        flaws: what the parts of a join add to the result.
        hindrances: joins that cannot be done in parts, with the reason.
    """

    dtype: str = "float32"
    flaws: Mapping[str, float] = field(default_factory=dict)
    hindrances: Mapping[str, str] = field(default_factory=dict)
    wasteful: bool = False  # compiled kernels keep what a join in parts would free
    compiled: list[FakeModel] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__([CPU])
        self.names = [name for name in map("join{}".format, range(JOINS)) if name not in self.hindrances]
        self.refused = self.hindrances
        self.is_quantized = self.dtype == "int8"

    def rewriting(self, model: Model) -> Joins:
        return self

    def peak_bytes(self, chosen: Sequence[str]) -> int:
        graph = self.network(chosen)[0]
        return least_peak(graph, graph.operator_names).peak_bytes

    def rewritten(self, chosen: Sequence[str]) -> Model:
        kept = () if self.wasteful else chosen
        return Model("joins", "onnx", pickle.dumps(self.network(kept)))

    def network(self, chosen: Collection[str] = ()) -> tuple[OperatorGraph, dict]:
        x = Tensor("x", (1, WIDTH), self.dtype)
        operators, functions, last = [], {}, "x"

        def add(name: str, reads: tuple[str, ...], rows: int, function: object) -> str:
            operators.append(Operator(name, "any", reads, (Tensor(f"{name}_out", (rows, WIDTH), self.dtype),)))
            functions[name] = function
            return f"{name}_out"

        for index in range(JOINS):
            name = f"join{index}"
            if name in chosen:
                first = add(f"{name}_of_left", (add(f"left{index}", (last,), 8, Scaled(8)),), 1, Total())
                right = add(f"right{index}", (last,), 6, Scaled(6))
                last = add(f"total{index}", (right, first), 1, Total(self.flaws.get(name, 0.0)))
            else:
                sides = (add(f"left{index}", (last,), 8, Scaled(8)), add(f"right{index}", (last,), 6, Scaled(6)))
                last = add(f"total{index}", (add(name, sides, 14, joined),), 1, Total())
        return OperatorGraph("joins", (x,), tuple(operators), (last,)), functions

    def make(self, model: Model) -> FakeModel:
        order: Order = "memory"
        self.compiled.append(self.compile(model, [CPU], order))
        return self.compiled[-1]

    def trial(self) -> tuple[FakeModel, MemoryRewriting]:
        model = Model("joins", "onnx", pickle.dumps(self.network()))
        made, report = compiled_in_parts(model, self, [CPU], self.make)
        assert not made.open_stages
        return made, report


BOTH = ("join0", "join1")
ROW, BIG = 4 * WIDTH, 4 * WIDTH * 28


def test_all_that_the_least_peak_requires_is_done_in_parts() -> None:
    backend = Joins()
    made, report = backend.trial()
    assert made is backend.compiled[-1]
    assert report.operators == BOTH
    assert not report.why
    # Image and a join of two wide tensors; then image, result of the first join, the widest tensor and its sum.
    assert report.peak_bytes == (BIG + ROW, 11 * ROW)
    assert report.device == "d0"
    assert report.difference <= report.tolerance == 1e-4
    assert set(made.graph.operator_names).isdisjoint(BOTH)


def test_sums_of_floats_that_differ_by_more_than_rounding_are_left_out() -> None:
    """The peak then stands where it stood, so that the others are not done in parts either."""
    backend = Joins(flaws={"join1": 1e9})
    made, report = backend.trial()
    assert made is backend.compiled[0]
    assert report.operators == ()
    assert list(report.left_out) == ["join1"]
    assert "0.0001 of the largest output is allowed" in report.left_out["join1"]
    assert report.why == (f"with all of join0 in parts, the least peak is {BIG + ROW:,} bytes, as it is {BIG + ROW:,}")


def test_a_model_of_integers_must_give_equal_bits() -> None:
    assert Joins(dtype="int8").trial()[1].operators == BOTH
    report = Joins(dtype="int8", flaws={"join0": 1.0}).trial()[1]
    assert list(report.left_out) == ["join0"]
    assert "no bit may differ" in report.left_out["join0"]


def test_what_a_backend_refuses_is_named_and_not_tried() -> None:
    backend = Joins(hindrances={"join0": "no int32", "join1": "no int32"})
    made, report = backend.trial()
    assert len(backend.compiled) == 1
    assert made is backend.compiled[0]
    assert report.left_out == {"join0": "no int32", "join1": "no int32"}
    assert "but for those left out" in report.why
    assert report.omissions == ["not done in parts: join0, join1: no int32"]


def test_compiled_kernels_must_need_less_too() -> None:
    backend = Joins(wasteful=True)
    made, report = backend.trial()
    assert made is backend.compiled[0]
    assert report.operators == ()
    assert "the compiled kernels need" in report.why


def test_a_backend_that_cannot_rewrite_is_named() -> None:
    backend = FakeBackend([CPU])
    with pytest.raises(OptionError, match="the backend fake cannot rewrite joins, which is onnx; compile without it"):
        compiled_in_parts(Model("joins", "onnx", b""), backend, [CPU], lambda _: FakeModel)  # type: ignore[arg-type, return-value]


def test_no_device_computes_all_of_it() -> None:
    backend = Joins()
    plain = FakeModel(*backend.network(), refused={"d0": ["join0"]})
    with pytest.raises(OptionError, match="no device of the platform computes all operators of joins"):
        compiled_in_parts(Model("joins", "onnx", b""), backend, [CPU], lambda _: plain)


def test_differences_are_shares_of_the_largest_output() -> None:
    one = [[np.array([1.0, -8.0]), np.array([3])]]
    assert greatest_difference(one, one) == 0
    assert greatest_difference(one, [[np.array([2.0, -8.0]), np.array([3])]]) == 1 / 8
    assert greatest_difference(one, [[np.array([1.0, -8.0]), np.array([4])]]) == 1 / 3
    assert greatest_difference(one, [[np.array([1.0, np.nan]), np.array([3])]]) == float("inf")
    assert greatest_difference(one, [[np.array([[1.0, -8.0]]), np.array([3])]]) == float("inf")
