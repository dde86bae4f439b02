"""Concatenations are written in place, and results lie where dead inputs were; by hand, on kernels without an IR."""

from __future__ import annotations

from collections.abc import Sequence

from tests.tvm.test_slice_plan import Kernels
from tvm_pipeline.core.graph import Tensor
from tvm_pipeline_tvm.alignment import align
from tvm_pipeline_tvm.kernels import Entry, Kernel, Output, Source
from tvm_pipeline_tvm.shared_bytes import parts_of
from tvm_pipeline_tvm.slice_plan import SlicePlan, plan_slice

DATA: Entry = (-1, 0)
KIB = 1024  # the bytes of the tensors here: 16 channels of 4 x 4


class Net:
    """Kernels that are written one behind the other; each is called by its number."""

    def __init__(self) -> None:
        self.of = Kernels([], [], [], set(), {}, inputs=(Tensor("data", (1, 16, 4, 4)),))

    def kernel(self, *reads: Entry | int, name: str = "conv2d", channels: int = 16) -> int:
        entries = tuple((read, 0) if isinstance(read, int) else read for read in reads)
        sources = tuple(Source(None, index) for index in range(len(reads)))
        output = Output((1, channels, 4, 4), "float32", "", Source(0, 0))
        self.of.kernels.append(Kernel(((name, 16 * channels),), (sources,), entries, (output,), 0, 0))
        self.of.own.append([len(self.of.own)])
        return len(self.of.kernels) - 1

    def concat(self, *reads: int) -> int:
        channels = sum(self.of.kernels[read].outputs[0].shape[1] for read in reads)
        return self.kernel(*reads, name="concatenate", channels=channels)

    def view(self, read: int) -> int:
        shape = (16, 16)
        self.of.kernels.append(Kernel((), (), ((read, 0),), (Output(shape, "float32", "", Source(None, 0)),), 0, 0))
        self.of.own.append([])
        self.of.views.add(len(self.of.kernels) - 1)
        return len(self.of.kernels) - 1

    def plan(self, heads: Sequence[int], **options: bool) -> SlicePlan:
        self.of.heads = [(head, 0) for head in heads]
        graph, [alignment] = align("net", self.of.inputs, [self.of.kernels], [self.of.heads])
        return plan_slice(self.of, alignment, graph, graph.operator_names, **options)


def test_parts_lie_behind_one_another() -> None:
    net = Net()
    a, b = net.kernel(DATA), net.kernel(DATA)
    whole = net.concat(a, b)
    plan = net.plan([net.kernel(whole)])
    assert plan.offsets[whole, 0] == plan.offsets[a, 0] == plan.offsets[b, 0] - KIB
    assert [call.is_view for call in plan.calls] == [False, False, True, False]
    assert plan.concatenations == (1, 0)
    assert plan.activation_bytes == 2 * KIB
    assert net.plan([net.of.heads[0][0]], share=False).activation_bytes == 4 * KIB


def test_concatenations_that_overlap_share_their_parts() -> None:
    net = Net()
    a, b, c = (net.kernel(DATA) for _ in range(3))
    front, back, all_ = net.concat(a, b), net.concat(b, c), net.concat(a, b, c)
    plan = net.plan([net.kernel(front, back, all_)])
    assert plan.concatenations == (3, 0)
    assert plan.offsets[back, 0] == plan.offsets[front, 0] + KIB == plan.offsets[all_, 0] + KIB
    assert plan.activation_bytes == 3 * KIB


def test_a_part_of_two_concatenations_is_copied_to_the_second() -> None:
    net = Net()
    a, b, c = (net.kernel(DATA) for _ in range(3))
    one, two = net.concat(a, b), net.concat(a, c)
    plan = net.plan([net.kernel(one, two)])
    assert plan.concatenations == (1, 1)
    assert plan.offsets[one, 0] == plan.offsets[a, 0] == plan.offsets[b, 0] - KIB
    assert plan.offsets[c, 0] == plan.offsets[two, 0] + KIB  # only a is copied
    assert plan.activation_bytes == 4 * KIB


def test_an_output_holds_what_is_part_of_it_and_nothing_else() -> None:
    net = Net()
    a, b, c = (net.kernel(DATA) for _ in range(3))
    inner = net.concat(b, c)
    output = net.concat(a, b)
    plan = net.plan([output, net.kernel(inner)])
    assert plan.within == {(a, 0): (0, 0)}  # b lies in `inner`, beside c, and is copied
    assert plan.concatenations == (1, 1)
    alone = net.plan([output, net.of.heads[1][0]], into_outputs=False)
    assert not alone.within


def test_no_two_outputs_lie_in_one_another() -> None:
    net = Net()
    a, b = net.kernel(DATA), net.kernel(DATA)
    plan = net.plan([net.concat(a, b), a])
    assert (a, 0) not in plan.within
    assert (b, 0) in plan.within
    assert plan.concatenations == (0, 1)


def test_a_result_lies_where_its_dead_input_was() -> None:
    net = Net()
    a = net.kernel(DATA)
    b = net.kernel(a, name="relu")
    net.of.replaces[b] = ((a, 0),)
    assert net.plan([net.kernel(b)]).activation_bytes == KIB


def test_an_input_that_is_read_again_is_not_overwritten() -> None:
    net = Net()
    a = net.kernel(DATA)
    b = net.kernel(a, name="relu")
    net.of.replaces[b] = ((a, 0),)
    assert net.plan([net.kernel(b, a)]).activation_bytes == 2 * KIB


def test_a_part_of_an_output_is_not_overwritten() -> None:
    """The concatenation is the output; `a` lies in it, and the last kernel that reads `a` may not change it."""
    net = Net()
    a, b = net.kernel(DATA), net.kernel(DATA)
    output = net.concat(a, b)
    result = net.kernel(a, name="relu")
    net.of.replaces[result] = ((a, 0),)
    plan = net.plan([output, net.kernel(result)])
    assert plan.within == {(a, 0): (0, 0), (b, 0): (0, KIB)}
    assert (result, 0) not in plan.within


def test_an_input_that_is_also_read_elsewhere_in_it_is_not_overwritten() -> None:
    """The kernel reads an element of `a` where it writes it, and others of the same bytes through a view."""
    net = Net()
    a = net.kernel(DATA)
    shown = net.view(a)
    b = net.kernel(a, shown)
    net.of.replaces[b] = ((a, 0),)
    assert net.plan([net.kernel(b)]).activation_bytes == 2 * KIB


def test_only_concatenations_of_consecutive_bytes_have_parts() -> None:
    net = Net()
    a, b = net.kernel(DATA), net.kernel(DATA)
    whole = net.concat(a, b)
    assert parts_of(net.of, whole) == [((a, 0), 0), ((b, 0), KIB)]
    rows = Output((1, 16, 8, 4), "float32", "", Source(0, 0))  # along the rows: each channel has some of both
    net.of.kernels[whole] = Kernel(
        (("concatenate", 512),), net.of.kernels[whole].arguments, ((a, 0), (b, 0)), (rows,), 0, 0
    )
    assert parts_of(net.of, whole) == []
    assert parts_of(net.of, a) == []
