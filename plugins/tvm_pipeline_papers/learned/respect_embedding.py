"""How RESPECT's network sees a graph: one row of 15 numbers for each operator.

Yin, Li, Robinson, Yu, "RESPECT: Reinforcement Learning based Edge Scheduling on Pipelined Coral Edge TPUs", DAC 2023,
section III.A. What the paper leaves open is chosen here: the number of parents in a row, all scales, an operator's ID
(its place in the graph's order; a hash of its name has no scale), and the order of the rows. Next:
`pointer_network.py`, which reads the rows.
"""

from __future__ import annotations

import numpy as np

from tvm_pipeline import OperatorGraph
from tvm_pipeline_papers.learned.weights import Floats32, Integers

# The largest in-degree of the paper's synthetic graphs.
PARENTS = 6
# The operator's level, its parents' levels, its parents' IDs, its own ID, its memory.
COLUMNS = 1 + PARENTS + PARENTS + 1 + 1
NO_PARENT = 0.0, -1.0  # the level and the ID in a slot without a parent


def embedding(graph: OperatorGraph) -> tuple[Integers, Floats32]:
    """Return the operators in the order in which the network reads them, and a row for each, in that order.

    The order is by level, then the graph's own. The columns of a row:

    - 0: the level of the operator, which is the number of operators on the longest path that ends in it, divided by the
      greatest level;
    - 1 to 6: the levels of its parents, likewise, those of the highest level first (of one level, the last of the graph
      first); 0 where there is no parent. Of more than six parents the first six are kept;
    - 7 to 12: the IDs of the same parents; -1 where there is no parent;
    - 13: its ID, which is its place in the graph's order, from 0, divided by the number of operators;
    - 14: its memory, log(1 + its parameter bytes / their mean over all operators); 0 in a graph without parameters.

    Returns:
        n indices into `graph.operators`, and n x 15 numbers.

    Examples:
        >>> from tvm_pipeline.core.graph import Operator, Tensor
        >>> a = Operator("a", "conv2d", (), (Tensor("x", (2,)),), param_bytes=8)
        >>> b = Operator("b", "relu", ("x",), (Tensor("y", (2,)),))
        >>> queue, rows = embedding(OperatorGraph("net", (), (a, b), ("y",)))
        >>> queue.tolist(), rows[1, [0, 1, 2, 7, 8, 13, 14]].tolist()
        ([0, 1], [1.0, 0.5, 0.0, 0.0, -1.0, 0.5, 0.0])
    """
    before = graph.edges.before
    levels: list[int] = []
    for parents in before:
        levels.append(1 + max((levels[parent] for parent in parents), default=0))
    count, greatest = len(graph), max(levels, default=1)
    param_bytes = np.array([operator.param_bytes for operator in graph.operators], np.float64)
    mean = param_bytes.mean() if param_bytes.any() else 1.0
    rows = np.empty((count, COLUMNS), np.float32)
    rows[:, 1 : 1 + PARENTS], rows[:, 1 + PARENTS : 1 + 2 * PARENTS] = NO_PARENT
    for index, found in enumerate(before):
        nearest = sorted(found, key=lambda parent: (levels[parent], parent), reverse=True)[:PARENTS]
        for slot, parent in enumerate(nearest):
            rows[index, 1 + slot] = levels[parent] / greatest
            rows[index, 1 + PARENTS + slot] = parent / count
    rows[:, 0] = np.array(levels) / greatest
    rows[:, -2] = np.arange(count) / max(count, 1)
    rows[:, -1] = np.log1p(param_bytes / mean)
    queue = np.array(sorted(range(count), key=lambda index: levels[index]), np.int64)
    return queue, rows[queue]
