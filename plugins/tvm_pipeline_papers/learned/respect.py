"""The scheduler `respect`: a pointer network orders the operators, and dynamic programming cuts its order.

Yin, Li, Robinson, Yu, "RESPECT: Reinforcement Learning based Edge Scheduling on Pipelined Coral Edge TPUs", DAC 2023.
The network is that of the paper; it picks greedily, and may pick an operator before its parents, which `sequences.py`
repairs. `benchmarks/train_respect.py` trains the weights, and `benchmarks/respect.py` compares its plans with others.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from tvm_pipeline import OperatorGraph, Plan, Problem
from tvm_pipeline.errors import OptionError
from tvm_pipeline.planning import BY_CUTS, Scheduler
from tvm_pipeline_papers.learned.pointer_network import PURPOSE, VERSION, PointerNetwork, check_shapes
from tvm_pipeline_papers.learned.respect_embedding import COLUMNS, embedding
from tvm_pipeline_papers.learned.sequences import repaired, rho
from tvm_pipeline_papers.learned.weights import Integers, Weights, read_weights

SHIPPED = Path(__file__).with_name("respect.npz")

# Each pick looks at all operators that are left: beyond this they take more than some seconds.
MOST_READ = 5000


def respect(problem: Problem) -> Plan:
    """Return the best plan along the order of RESPECT's network, with the weights that are shipped.

    The network reads the graph alone: neither the devices nor the number of stages. Nothing is proven of the plan.

    Raises:
        LimitMissedError: no plan of this order keeps the limits of the problem.
        ModelError: the weights that are shipped are damaged or of another version.
        OptionError: the graph has more than MOST_READ operators.
    """
    graph = problem.graph
    if len(graph) > MOST_READ:
        raise OptionError(
            f"{graph.name} has {len(graph)} operators, and the network of `scheduler` respect takes up to {MOST_READ}; "
            "use `scheduler` chain or best",
            option="scheduler",
            value="respect",
        )
    order = repaired(graph.edges.before, ReadGraph.by(graph, network_weights()).sequence())
    return rho(problem, order, "respect")


@cache
def network_weights(path: Path = SHIPPED) -> Weights:
    """Return the weights of a file.

    Raises:
        ModelError: they are not weights of this network and version.
    """
    weights, _ = read_weights(path, PURPOSE, VERSION)
    check_shapes(weights, COLUMNS, str(path))
    return weights


@dataclass(frozen=True, slots=True, eq=False)
class ReadGraph:
    """A graph that a network has read; sequences of its operators are decoded from it.

    Attributes:
        queue: the operators in the order in which the network read them.
    """

    graph: OperatorGraph
    queue: Integers
    network: PointerNetwork

    @classmethod
    def by(cls, graph: OperatorGraph, weights: Weights) -> ReadGraph:
        queue, rows = embedding(graph)
        return cls(graph, queue, PointerNetwork.read(weights, rows))

    def sequence(self, *, ready: bool = False, rng: np.random.Generator | None = None) -> list[int]:
        """Return the operators, as indices into `graph.operators`, in the order in which the network picks them.

        Args:
            ready: an operator is picked after its parents, so that the sequence needs no repair; the paper's is not.
            rng: picks at random by the network's probabilities; without it the most probable operator is picked.
        """
        parents = None
        if ready:
            place = np.argsort(self.queue)
            parents = [place[list(self.graph.edges.before[operator])].tolist() for operator in self.queue]
        picked: list[int] = self.queue[self.network.sequence(parents, rng)].tolist()
        return picked


RESPECT = Scheduler(
    respect,
    "the best pipeline along an order that a neural network chose (RESPECT)",
    BY_CUTS,
    frozenset({"min_throughput_fps", "max_latency_s"}),
)
