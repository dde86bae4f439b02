"""RESPECT's network against the same equations in plain Python, and its embedding against rows worked out by hand."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import generators
from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline.errors import ModelError
from tvm_pipeline_papers.learned.pointer_network import PointerNetwork, check_shapes, untrained, weight_shapes
from tvm_pipeline_papers.learned.respect_embedding import COLUMNS, embedding

Floats = list[float]


def net(reads: Sequence[Sequence[int]], param_bytes: Sequence[int]) -> OperatorGraph:
    operators = tuple(
        Operator(f"op{i}", "kind", tuple(f"t{j}" for j in found), (Tensor(f"t{i}", (1,)),), size)
        for i, (found, size) in enumerate(zip(reads, param_bytes, strict=True))
    )
    return OperatorGraph("net", (), operators, (f"t{len(operators) - 1}",))


def test_the_rows_are_those_of_the_definition() -> None:
    """0 is read by 1 and 3, and 4 reads 1, 2 and 3; the mean memory is 4 bytes."""
    queue, rows = embedding(net([[], [0], [], [0, 1], [2, 1, 3]], [4, 0, 12, 4, 0]))
    assert queue.tolist() == [0, 2, 1, 3, 4]
    assert rows.dtype == np.float32
    none = [-1.0]
    expected = [
        [1 / 4, *[0] * 6, *none * 6, 0, math.log(2)],
        [1 / 4, *[0] * 6, *none * 6, 2 / 5, math.log(4)],
        [2 / 4, 1 / 4, *[0] * 5, 0, *none * 5, 1 / 5, 0],
        [3 / 4, 2 / 4, 1 / 4, *[0] * 4, 1 / 5, 0, *none * 4, 3 / 5, math.log(2)],
        [4 / 4, 3 / 4, 2 / 4, 1 / 4, *[0] * 3, 3 / 5, 1 / 5, 2 / 5, *none * 3, 4 / 5, 0],
    ]
    assert rows == pytest.approx(np.array(expected), abs=1e-6)


def test_of_many_parents_those_of_the_highest_level_are_kept() -> None:
    """The last operator reads eight, of levels 1, 1, 1, 2, 3, 1, 1, 4."""
    graph = net([[], [], [], [0], [3], [], [], [4], list(range(8))], [1] * 9)
    _, rows = embedding(graph)
    assert rows[-1, 1:7].tolist() == pytest.approx([level / 5 for level in (4, 3, 2, 1, 1, 1)])
    assert rows[-1, 7:13].tolist() == pytest.approx([parent / 9 for parent in (7, 4, 3, 6, 5, 2)])


@pytest.mark.parametrize("size", [0, 5])
def test_one_operator_has_a_row(size: int) -> None:
    queue, rows = embedding(net([[]], [size]))
    assert queue.tolist() == [0]
    assert rows.tolist() == [[1.0, *[0.0] * 6, *[-1.0] * 6, 0.0, pytest.approx(math.log(2) if size else 0.0)]]


def product(vector: Floats, matrix: npt.NDArray[np.float32]) -> Floats:
    rows, columns = matrix.shape
    return [sum(vector[i] * float(matrix[i, j]) for i in range(rows)) for j in range(columns)]


def added(*vectors: Sequence[float] | npt.NDArray[np.float32]) -> Floats:
    return [float(sum(numbers)) for numbers in zip(*vectors, strict=True)]


def cell_of(weights: Mapping[str, npt.NDArray[np.float32]], lstm: str, x: Floats, h: Floats, c: Floats) -> list[Floats]:
    gates = added(product(x, weights[f"{lstm}/input"]), product(h, weights[f"{lstm}/hidden"]), weights[f"{lstm}/bias"])
    size = len(h)
    i, f, o = (
        [1 / (1 + math.exp(-gate)) for gate in gates[at * size : (at + 1) * size]] for at in (0, 1, 3)
    )  # the third is the candidate
    g = [math.tanh(gate) for gate in gates[2 * size : 3 * size]]
    c = [f[j] * c[j] + i[j] * g[j] for j in range(size)]
    return [[o[j] * math.tanh(c[j]) for j in range(size)], c]


def softmax(scores: Mapping[int, float]) -> dict[int, float]:
    powers = {key: math.exp(score) for key, score in scores.items()}
    return {key: power / sum(powers.values()) for key, power in powers.items()}


def probabilities(
    weights: Mapping[str, npt.NDArray[np.float32]],
    rows: npt.NDArray[np.float32],
    picked: Sequence[int],
    parents: Sequence[Sequence[int]] | None,
) -> list[dict[int, float]]:
    """Return for each step the probability of every row that may be picked, after the rows picked before it."""
    h = c = [0.0] * len(weights["pointer/vector"])
    contexts = []
    for row in rows.tolist():
        h, c = cell_of(weights, "encoder", row, h, c)
        contexts.append(h)
    steps = []
    x: Floats = weights["start"].tolist()
    for step, pick in enumerate(picked):
        h, c = cell_of(weights, "decoder", x, h, c)
        before = set(picked[:step])
        free = [row for row in range(len(rows)) if row not in before]
        if parents is not None:
            free = [row for row in free if before.issuperset(parents[row])]

        def attention(name: str, query: Floats, free: list[int] = free) -> dict[int, float]:
            query = added(product(query, weights[f"{name}/query"]), weights[f"{name}/query_bias"])
            scores = {}
            for row in free:
                key = product(contexts[row], weights[f"{name}/key"])
                scores[row] = sum(
                    float(v) * math.tanh(at) for v, at in zip(weights[f"{name}/vector"], added(key, query), strict=True)
                )
            return softmax(scores)

        shares = attention("glimpse", h)
        keys = {row: product(contexts[row], weights["glimpse/key"]) for row in free}
        glimpse = [sum(shares[row] * keys[row][j] for row in free) for j in range(len(h))]
        steps.append(attention("pointer", glimpse))
        x = rows[pick].tolist()
    return steps


@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 7), ready=st.booleans())
def test_each_pick_is_the_most_probable_one(seed: int, count: int, ready: bool) -> None:
    rng = np.random.default_rng(seed)
    weights = {name: 8 * array for name, array in untrained(4, 3, seed).items()}
    rows = rng.normal(size=(count, 4)).astype(np.float32)
    parents = [[j for j in range(i) if rng.random() < 0.4] for i in range(count)] if ready else None
    picked = PointerNetwork.read(weights, rows).sequence(parents).tolist()
    assert sorted(picked) == list(range(count))
    for pick, shares in zip(picked, probabilities(weights, rows, picked, parents), strict=True):
        assert shares[pick] >= max(shares.values()) - 1e-4


@pytest.mark.thorough
def test_samples_are_drawn_by_the_network_s_probabilities() -> None:
    weights = {name: 4 * array for name, array in untrained(4, 3, 6).items()}
    rows = np.random.default_rng(1).normal(size=(4, 4)).astype(np.float32)
    network, rng = PointerNetwork.read(weights, rows), np.random.default_rng(2)
    drawn = [tuple(network.sequence(rng=rng).tolist()) for _ in range(1000)]
    assert all(sorted(sequence) == [0, 1, 2, 3] for sequence in drawn)
    first = probabilities(weights, rows, [0], None)[0]
    assert max(first.values()) - min(first.values()) > 0.2
    assert list(first.values()) != sorted(first.values())
    for row, share in first.items():
        assert sum(sequence[0] == row for sequence in drawn) / 1000 == pytest.approx(share, abs=0.04)
    # The second pick depends on the first.
    begun = [sequence for sequence in drawn if sequence[0] == max(first, key=lambda row: first[row])]
    second = probabilities(weights, rows, begun[0][:2], None)[1]
    for row, share in second.items():
        assert sum(sequence[1] == row for sequence in begun) / len(begun) == pytest.approx(share, abs=0.08)


def test_a_seed_makes_a_sequence() -> None:
    graph = generators.random_dag(random.Random(3), 40)
    network = PointerNetwork.read(untrained(COLUMNS, 16, 1), embedding(graph)[1])
    drawn = [network.sequence(rng=np.random.default_rng(seed)).tolist() for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert network.sequence().tolist() == network.sequence().tolist()


def test_long_sequences_and_large_weights_stay_finite() -> None:
    graph = generators.random_dag(random.Random(3), 300)
    weights = {name: 1000 * array for name, array in untrained(COLUMNS, 8, 1).items()}
    with np.errstate(all="raise", under="ignore"):
        network = PointerNetwork.read(weights, embedding(graph)[1])
        picked = network.sequence(rng=np.random.default_rng(1))
    assert sorted(picked.tolist()) == list(range(300))
    assert all(np.isfinite(keys).all() for keys in (network.glimpse_keys, network.pointer_keys))


def test_the_paper_s_network_has_the_paper_s_size() -> None:
    """The facts count 822 287 with the two biases of PyTorch's LSTMs; one of them says as much."""
    size = sum(math.prod(shape) for shape in weight_shapes(15, 256).values())
    assert size == 822_287 - 2 * 4 * 256


@pytest.mark.parametrize("name", sorted(weight_shapes(COLUMNS, 4)))
def test_weights_of_other_shapes_are_refused(name: str) -> None:
    weights = untrained(COLUMNS, 4, 1)
    check_shapes(weights, COLUMNS, "file")
    missing = {other: array for other, array in weights.items() if other != name}
    wider = weights | {name: np.zeros((*weights[name].shape, 2), np.float32)}
    for wrong in (missing, wider):
        with pytest.raises(ModelError, match=r"file: the pointer network has weights .* of shape .* needed; train"):
            check_shapes(wrong, COLUMNS, "file")


def test_weights_for_other_rows_and_more_arrays_are_refused() -> None:
    with pytest.raises(ModelError, match=r"weights [a-z/]*input of shape"):
        check_shapes(untrained(COLUMNS + 1, 4, 1), COLUMNS, "file")
    with pytest.raises(ModelError, match="weights extra of shape"):
        check_shapes(untrained(COLUMNS, 4, 1) | {"extra": np.zeros(1, np.float32)}, COLUMNS, "file")
