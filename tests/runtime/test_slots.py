"""What is shared and what is converted between two devices that lay tensors out differently."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from tests.support.fake_backend import LAYOUTS
from tvm_pipeline.backends.contract import Array, Port, StageRunner
from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline.core.plan import Stage
from tvm_pipeline.errors import PlanError
from tvm_pipeline.runtime.slots import Binding, Slot, bind_slots, keep_on_devices, new_slot, slot_ports

SHAPE = (4, 6)
GRAPH = OperatorGraph(
    "pair",
    (Tensor("x", SHAPE),),
    (Operator("a", "a", ("x",), (Tensor("t", SHAPE),)), Operator("b", "b", ("t",), (Tensor("y", SHAPE),))),
    ("y",),
)


@dataclass
class Ports(StageRunner):
    """A runner that is asked for nothing but its ports."""

    inputs: tuple[Port, ...] = ()
    outputs: tuple[Port, ...] = ()

    def run(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        raise NotImplementedError


def port(name: str, layout: str = "") -> Port:
    return Port(name, LAYOUTS[layout][0](np.empty(SHAPE)).shape, "float32", layout)


def bound(*runners: Ports, slots: int = 1) -> list[tuple[Slot, list[Binding]]]:
    ports = slot_ports(GRAPH, [[runner] for runner in runners])
    made = [new_slot(number, ports) for number in range(slots)]
    bindings = [bind_slots(made, ports, runner) for runner in runners]
    return [(slot, [bound[slot.number] for bound in bindings]) for slot in made]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_devices_that_agree_share_one_aligned_buffer(layout: str) -> None:
    writer = Ports((port("x"),), (port("t", layout),))
    ((slot, (first, second)),) = bound(writer, Ports((port("t", layout),), (port("y"),)))
    assert np.shares_memory(first.outputs[0], second.inputs[0])
    assert [*first.receive, *first.send, *second.receive, *second.send] == []
    for buffer in slot.buffers.values():
        assert buffer.ctypes.data % 64 == 0
        assert buffer.flags.c_contiguous


def test_a_tensor_of_another_logical_shape_is_the_same_memory() -> None:
    flat = Port("t", (24,), "float32")
    ((_, (first, second)),) = bound(Ports((port("x"),), (port("t"),)), Ports((flat,), (port("y"),)))
    assert second.inputs[0].shape == (24,)
    assert np.shares_memory(first.outputs[0], second.inputs[0])
    assert not second.receive


@pytest.mark.parametrize("written", LAYOUTS)
@pytest.mark.parametrize("read", LAYOUTS)
def test_a_reader_with_another_layout_gets_the_same_elements(written: str, read: str) -> None:
    ((_, (first, second)),) = bound(Ports((port("x"),), (port("t", written),)), Ports((port("t", read),)))
    logical = np.arange(24, dtype=np.float32).reshape(SHAPE)
    first.outputs[0][...] = LAYOUTS[written][0](logical)
    for conversion in second.receive:
        conversion.receive()
    np.testing.assert_array_equal(second.inputs[0], LAYOUTS[read][0](logical))
    assert len(second.receive) == (written != read)


@pytest.mark.parametrize("first_layout", LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_replica_writes_as_the_first_one_does(first_layout: str, layout: str) -> None:
    """Readers know one layout, whichever replica a frame went through."""
    one, other = Ports(outputs=(port("t", first_layout),)), Ports(outputs=(port("t", layout),))
    ((slot, (_, binding)),) = bound(one, other)
    logical = np.arange(24, dtype=np.float32).reshape(SHAPE)
    binding.outputs[0][...] = LAYOUTS[layout][0](logical)
    for conversion in binding.send:
        conversion.send()
    np.testing.assert_array_equal(slot.buffers["t"], LAYOUTS[first_layout][0](logical))


def test_frames_have_buffers_of_their_own_and_a_worker_converts_in_one() -> None:
    reader = Ports((port("t", "AB2a"),), (port("y"),))
    slots = bound(Ports((port("x"),), (port("t"),)), reader, slots=3)
    written = [first.outputs[0] for _, (first, _) in slots]
    assert not any(np.shares_memory(a, b) for a, b in ((written[0], written[1]), (written[1], written[2])))
    assert len({id(second.inputs[0]) for _, (_, second) in slots}) == 1
    assert len({id(conversion.slot) for _, (_, second) in slots for conversion in second.receive}) == 3


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (port("z"), "tensor z is needed by a stage and written by none before"),
        (Port("t", SHAPE, "float16"), "tensor t is .*float32.* on one device and .*float16.* on another"),
        (Port("t", (4, 7), "float32"), r"tensor t is .*\(2, 6, 2\).*\(4, 7\)"),
        (Port("t", (3, 4, 2), "float32", "AB2a"), "tensor t: no way from layout AB2a to AB2a"),
        (Port("t", (3, 4, 2), "float32", "BA2b"), "tensor t: no way from layout AB2a to BA2b"),
    ],
)
def test_tensors_that_cannot_be_handed_over_are_refused(wanted: Port, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        bound(Ports((port("x"),), (port("t", "AB2a"),)), Ports((wanted,)))


@dataclass
class Keeping(Ports):
    """A runner whose device keeps tensors: what it was told, by tensor, `copied` or not."""

    told: dict[str, tuple[Sequence[Array], bool]] = field(default_factory=dict, init=False)

    def keep(self, tensor: str, arrays: Sequence[Array], *, copied: bool) -> bool:
        self.told[tensor] = arrays, copied
        return True


def kept(stages: list[tuple[tuple[str, ...], Ports]], room: float = math.inf) -> list[dict[str, bool]]:
    """Return, for each stage of (devices, runner of each), what its first runner keeps, and whether it is copied."""
    runners = [[replace(runner) for _ in devices] for devices, runner in stages]
    ports = slot_ports(GRAPH, runners)
    slots = [new_slot(number, ports) for number in range(3)]
    bindings = [[bind_slots(slots, ports, runner) for runner in own] for own in runners]
    keep_on_devices(
        [Stage(devices, ()) for devices, _ in stages], runners, bindings, ("y",), {"gpu": room, "cpu": room}
    )
    for own in runners:
        for arrays, _ in getattr(own[0], "told", {}).values():
            assert len(arrays) == len(slots)
    return [{name: copied for name, (_, copied) in getattr(own[0], "told", {}).items()} for own in runners]


GPU, CPU, BOTH = ("gpu",), ("cpu",), ("gpu", "cpu")
FIRST = (port("x"),), (port("s"), port("t"))
MIDDLE = (port("t"),), (port("u"),)
LAST = (port("s"), port("u")), (port("y"),)


def test_a_tensor_that_the_device_needs_again_stays_there() -> None:
    assert kept([(GPU, Keeping(*FIRST)), (CPU, Ports(*MIDDLE)), (GPU, Keeping(*LAST))]) == [
        {"s": False},
        {},
        {"s": False},
    ]


def test_no_more_is_kept_than_the_device_has_room_for() -> None:
    stages = [(GPU, Keeping(*FIRST)), (CPU, Ports(*MIDDLE)), (GPU, Keeping(*LAST))]
    all_frames = 3 * port("s").buffer().nbytes
    assert kept(stages, all_frames) == [{"s": False}, {}, {"s": False}]
    assert kept(stages, all_frames - 1) == [{}, {}, {}]


def test_a_tensor_that_others_need_too_is_copied() -> None:
    also = (port("t"), port("s")), (port("u"),)
    assert kept([(GPU, Keeping(*FIRST)), (CPU, Ports(*also)), (GPU, Keeping(*LAST))]) == [{"s": True}, {}, {"s": False}]
    output = (port("s"), port("u")), (port("z"),)
    first = (port("x"),), (port("s"), port("t"), port("y"))
    reads = (port("s"), port("y"), port("u")), (port("z"),)
    assert kept([(GPU, Keeping(*first)), (CPU, Ports(*MIDDLE)), (GPU, Keeping(*reads))])[0] == {"s": False, "y": True}
    assert kept([(GPU, Keeping(*first)), (CPU, Ports(*MIDDLE)), (GPU, Keeping(*output))])[0] == {"s": False}


@pytest.mark.parametrize("stages", [
    [(BOTH, Keeping(*FIRST)), (CPU, Ports(*MIDDLE)), (GPU, Keeping(*LAST))],  # a frame may be the other replica's
    [(GPU, Keeping(*FIRST)), (CPU, Ports(*MIDDLE)), (BOTH, Keeping(*LAST))],
    [(GPU, Keeping(*FIRST)), (CPU, Ports(*MIDDLE)), (CPU, Keeping(*LAST))],  # another device
    [(GPU, Ports(*FIRST)), (CPU, Ports(*MIDDLE)), (GPU, Keeping(*LAST))],  # a backend that cannot
    [(GPU, Keeping(*FIRST)), (CPU, Ports(*MIDDLE)), (GPU, Keeping((port("s", "AB2a"), port("u")), LAST[1]))],
])  # fmt: skip
def test_nothing_is_kept(stages: list[tuple[tuple[str, ...], Ports]]) -> None:
    assert kept(stages) == [{}, {}, {}]
