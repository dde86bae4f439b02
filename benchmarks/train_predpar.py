"""Train PredPar's predictor of segment latency, and say how far off it is, beside formulas fitted to the same data.

    python benchmarks/train_predpar.py                  # both sets of features, a process each, 14 minutes
    python benchmarks/train_predpar.py --write FOLDER   # and write predpar.npz and predpar_extended.npz there
    python benchmarks/train_predpar.py --short          # a few steps and networks, for CI

It needs `pip install 'tvm-pipeline[train]'` (JAX); what it writes is computed with numpy alone
(`learned/segment_predictor.py`, which states the layers). Networks and labels: `predpar_data.py`.
The paper states no loss, rate, batch or scaling. Here: AdamW, 2e-3, warmed up and then a cosine down to 0; the Huber
loss of the logarithm of the seconds, since the paper's predictor underestimates long segments; up to 256 segments of
about one length a batch. The steps are fixed, so that a seed makes one result on one kind of machine.

Errors are the mean of |predicted / measured - 1|, of what is written (rounded to float16), on networks that were not
learned: the test networks, by operators of the segment, and the 13 networks of Keras. Beside them, fitted to the same
segments: non-negative least squares of operators, MACs and bytes by kind; the shipped model of the device as it is, and
refitted to a segment of each of 60 networks, as `tvm-pipeline calibrate` does.
No predictor can know how much faster or slower than its kind an operator is on that board: `all but that` is the board
itself without it.

Required: JAX's network and numpy's agree, and the loss is lower at the end than at the beginning; else the exit status
is 1.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

# Two processes train at a time, each with a thread of its own. JAX reads this as it is imported.
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
os.environ["OMP_NUM_THREADS"] = "1"

import jax
import jax.numpy as jnp
import numpy as np
from predpar_data import (
    CHOSEN,
    LEARNED,
    TESTED,
    Labelled,
    board,
    keras_networks,
    labelled,
    networks,
    role,
    shipped_model,
)
from predpar_errors import Predictor, by_board, by_least_squares, by_model, by_network, refitted, tell

from tvm_pipeline_papers.learned.segment_features import SegmentBatch, graph_features
from tvm_pipeline_papers.learned.segment_predictor import (
    EPSILON,
    LARGEST,
    PURPOSE,
    UNIT_S,
    VERSION,
    predicted_seconds,
    read_predictor,
    shapes,
)
from tvm_pipeline_papers.learned.weights import Weights, WeightsNote, write_weights

LENGTHS = (8, 16, 32, 64, 128, 320)  # to which segments are padded
BATCH, BATCH_NODES = 256, 2048  # segments of a batch, and their operators with padding, at most
RATE, DECAY, WARM_UP = 2e-3, 1e-2, 50  # of AdamW; steps
CALIBRATED = 60  # segments, each of another network, to which the shipped model is refitted
KERAS = 100_000  # the index of the first network of Keras
HUBER = 0.1  # errors of the logarithm up to here count by their square
FILES = {False: "predpar.npz", True: "predpar_extended.npz"}
NAMES = {False: "the paper's features", True: "extended features"}


@dataclass(frozen=True)
class Sizes:
    """How much is learned from, and how long."""

    networks: int = 600
    segments: int = 80  # of each network
    steps: int = 7000  # of each training
    longest: int = LENGTHS[-1]  # in operators


SHORT = Sizes(networks=7, segments=40, steps=12, longest=LENGTHS[0])
Params = dict[str, Any]  # of JAX's arrays; a pytree


# The network, as `segment_predictor.predicted_seconds` computes it


def seconds(params: Params, batch: SegmentBatch) -> jax.Array:
    """Return the predicted seconds of the B segments."""
    heads = params["pair_bias"].shape[-1]
    h = params["kind"][batch.kind] + params["in_degree"][batch.in_degree]
    h += batch.numbers @ params["node"] + params["node_bias"]
    virtual = batch.segment @ params["virtual"] + params["virtual_bias"]
    h = jnp.concatenate([virtual[:, None], h], axis=1)
    size, nodes, width = h.shape
    present = jnp.pad(batch.present, ((0, 0), (1, 0)), constant_values=True)
    hidden = jnp.where(present, 0.0, -1e9)[:, None, None, :]
    reads = jnp.pad(batch.reads, ((0, 0), (1, 0), (1, 0))).astype(jnp.float32)[:, None]
    inner = jnp.arange(nodes) > 0
    after = jnp.eye(nodes, k=-1) * inner
    virtually = (inner[:, None] != inner).astype(jnp.float32)

    def layer(h: jax.Array, own: Params) -> tuple[jax.Array, None]:
        asked = normal(h, own["attention_norm"]) @ own["qkv"] + own["qkv_bias"]
        q, k, v = asked.reshape(size, nodes, 3, heads, width // heads).transpose(2, 0, 3, 1, 4)
        bias = own["pair_bias"][:, :, None, None]
        score = q @ k.swapaxes(-1, -2) / np.sqrt(width // heads) + hidden
        score += bias[0] * reads + bias[1] * reads.swapaxes(-1, -2)
        score += bias[2] * after + bias[3] * after.T + bias[4] * virtually
        told = (jax.nn.softmax(score) @ v).swapaxes(1, 2).reshape(h.shape)
        h += told @ own["mixed"] + own["mixed_bias"]
        wide = jax.nn.gelu(normal(h, own["mlp_norm"]) @ own["up"] + own["up_bias"])
        return h + wide @ own["down"] + own["down_bias"], None

    stacked = {name: array for name, array in params.items() if name in STACKED}
    h, _ = jax.lax.scan(layer, h, stacked)
    read = jax.nn.gelu(normal(h, params["last_norm"]) @ params["read"] + params["read_bias"])
    units = jnp.exp(jnp.minimum(read @ params["units"] + params["units_bias"], LARGEST))
    return UNIT_S * jnp.sum(units * present, axis=1)


STACKED = [name for name, shape in shapes(extended=False, layers=97).items() if shape[0] == 97]


def normal(h: jax.Array, gain_and_shift: jax.Array) -> jax.Array:
    centred = h - h.mean(axis=-1, keepdims=True)
    deviation = jnp.sqrt(jnp.square(centred).mean(axis=-1, keepdims=True) + EPSILON)
    return centred / deviation * gain_and_shift[0] + gain_and_shift[1]


jax.tree_util.register_dataclass(SegmentBatch)


def initial(extended: bool, units_bias: float, chance: np.random.Generator) -> dict[str, np.ndarray]:
    """Return random weights: matrices by the number of their inputs, gains 1, all that is added 0.

    What layers add to a node begins small, and the read-out at about the right seconds.
    """
    made: dict[str, np.ndarray] = {}
    for name, shape in shapes(extended=extended).items():
        if name.endswith("_norm"):
            made[name] = np.broadcast_to([[1.0], [0.0]], shape)
        elif name.endswith("_bias"):
            made[name] = np.zeros(shape)
        else:
            inputs = 1 if name in ("kind", "in_degree") else shape[0] if name == "units" else shape[-2]
            made[name] = chance.normal(0.0, 0.5 if inputs == 1 else inputs**-0.5, shape)
    made["mixed"], made["down"], made["units_bias"] = 0.3 * made["mixed"], 0.3 * made["down"], np.array([units_bias])
    return {name: np.array(array, np.float32) for name, array in made.items()}


# Training


@dataclass(frozen=True)
class Bucket:
    """Segments that are padded to one length, and the logarithms of their seconds."""

    batch: SegmentBatch
    log_s: np.ndarray

    def __len__(self) -> int:
        return len(self.log_s)

    @property
    def at_once(self) -> int:
        return min(BATCH, BATCH_NODES // self.batch.present.shape[1], len(self))

    def rows(self, chosen: np.ndarray) -> tuple[SegmentBatch, np.ndarray]:
        return of_rows([self.batch], lambda arrays: arrays[0][chosen]), self.log_s[chosen]


def of_rows(batches: Sequence[SegmentBatch], joined: Callable[[list[np.ndarray]], np.ndarray]) -> SegmentBatch:
    """Return a batch, each array of which is made of those of other batches."""
    names = SegmentBatch.__slots__
    return SegmentBatch(**{name: joined([getattr(batch, name) for batch in batches]) for name in names})


class Scales:
    """The mean and the deviation of each number that enters; the network learns with standardised ones."""

    def __init__(self, found: Sequence[Bucket]) -> None:
        numbers = np.concatenate([bucket.batch.numbers[bucket.batch.present] for bucket in found])
        segment = np.concatenate([bucket.batch.segment for bucket in found])
        self.of = {
            "node": (numbers.mean(axis=0), numbers.std(axis=0)),
            "virtual": (segment.mean(axis=0), segment.std(axis=0)),
        }

    def standardised(self, batch: SegmentBatch) -> SegmentBatch:
        (mean, deviation), (segment_mean, segment_deviation) = self.of["node"], self.of["virtual"]
        numbers, segment = (batch.numbers - mean) / deviation, (batch.segment - segment_mean) / segment_deviation
        return replace(batch, numbers=numbers, segment=segment)

    def unscaled(self, params: Params) -> Weights:
        """Return the weights for numbers as they come."""
        weights = {name: np.asarray(array) for name, array in params.items()}
        for name, (mean, deviation) in self.of.items():
            weights[name] = weights[name] / deviation[:, None]
            weights[f"{name}_bias"] = weights[f"{name}_bias"] - mean @ weights[name]
        return weights


def buckets(data: Sequence[Labelled], *, extended: bool) -> list[Bucket]:
    """Sort the segments of all networks by their length."""
    sorted_in: dict[int, list[tuple[SegmentBatch, np.ndarray]]] = {length: [] for length in LENGTHS}
    for one in data:
        features = graph_features(one.graph, shipped_model().cached_bytes or 0, extended=extended)
        length_of = np.searchsorted(LENGTHS, [end - start for start, end in one.segments])
        for index, length in enumerate(LENGTHS):
            mine = np.flatnonzero(length_of == index)
            if len(mine):
                batch = features.batch([one.segments[row] for row in mine], length)
                sorted_in[length].append((batch, np.log(one.seconds[mine])))
    return [
        Bucket(of_rows([batch for batch, _ in found], np.concatenate), np.concatenate([log_s for _, log_s in found]))
        for found in sorted_in.values()
        if found
    ]


def batches(found: Sequence[Bucket], chance: np.random.Generator) -> Iterator[tuple[SegmentBatch, np.ndarray]]:
    """Yield batches for ever; each segment comes once a turn, a few of a bucket twice, so that its batches are full."""
    while True:
        turn = []
        for bucket in found:
            order = chance.permutation(len(bucket))
            order = np.resize(order, -(-len(bucket) // bucket.at_once) * bucket.at_once)
            turn += [(bucket, chosen) for chosen in np.split(order, len(order) // bucket.at_once)]
        for index in chance.permutation(len(turn)):
            bucket, chosen = turn[index]
            yield bucket.rows(chosen)


def loss(params: Params, batch: SegmentBatch, log_s: np.ndarray) -> jax.Array:
    error = jnp.abs(jnp.log(seconds(params, batch)) - log_s)
    return jnp.where(error < HUBER, error**2 / (2 * HUBER), error - HUBER / 2).mean()


@functools.partial(jax.jit, donate_argnums=(0, 1, 2))
def step(
    params: Params,
    mean: Params,
    square: Params,
    count: jax.Array,
    rate: jax.Array,
    batch: SegmentBatch,
    log_s: jax.Array,
) -> tuple[Params, Params, Params, jax.Array]:
    """Return what a step of AdamW makes of the weights and its two averages, and the loss before it."""
    lost, slope = jax.value_and_grad(loss)(params, batch, log_s)
    size = jnp.sqrt(sum(jnp.vdot(part, part) for part in jax.tree.leaves(slope)))
    slope = jax.tree.map(lambda part: part * jnp.minimum(1.0, 1.0 / size), slope)
    mean = jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, mean, slope)
    square = jax.tree.map(lambda old, new: 0.99 * old + 0.01 * new**2, square, slope)

    def moved(name: str) -> jax.Array:
        direction = mean[name] / (1 - 0.9**count) / (jnp.sqrt(square[name] / (1 - 0.99**count)) + 1e-8)
        decay = 0.0 if name.endswith(("_bias", "_norm")) else DECAY
        return params[name] - rate * (direction + decay * params[name])

    return {name: moved(name) for name in params}, mean, square, lost


@dataclass(frozen=True)
class Trained:
    """Weights, the loss of each step, how far numpy's loss was off JAX's before that, and the CPU time they took."""

    weights: Weights
    losses: list[float]
    disagreement: float
    cpu_s: float


def trained(extended: bool, sizes: Sizes, seed: int) -> Trained:
    """Train one predictor, in a process of its own."""
    began = time.process_time()
    chance = np.random.default_rng(seed)
    found = buckets(measured(sizes)[LEARNED], extended=extended)
    scales = Scales(found)
    # Of the mean segment, if all its nodes took the same time.
    share = np.concatenate([bucket.log_s - np.log(UNIT_S * (1 + bucket.batch.present.sum(axis=1))) for bucket in found])
    weights = initial(extended, float(share.mean()), chance)
    params, mean, square = jax.device_put((weights, zeros(weights), zeros(weights)))
    drawn = batches(found, chance)
    losses: list[float] = []
    off = disagreement(extended, found[0])
    for index in range(sizes.steps):
        rate = RATE * min(1.0, (index + 1) / WARM_UP) * (1 + np.cos(np.pi * index / sizes.steps)) / 2
        batch, log_s = next(drawn)
        now = jnp.float32(index + 1), jnp.float32(rate)
        params, mean, square, lost = step(
            params, mean, square, *now, scales.standardised(batch), log_s.astype(np.float32)
        )
        losses.append(float(lost))
        if index % 100 == 99:
            print(f"{NAMES[extended]}: step {index + 1}, loss {np.mean(losses[-100:]):.4f}", flush=True)
    return Trained(scales.unscaled(params), losses, off, time.process_time() - began)


def zeros(weights: Weights) -> Weights:
    return {name: np.zeros_like(array) for name, array in weights.items()}


def disagreement(extended: bool, bucket: Bucket) -> float:
    """Return how far numpy's loss is off JAX's, relatively, with random weights none of which is 0."""
    chance = np.random.default_rng(0)
    weights = {
        name: (array + chance.normal(0.0, 0.1, array.shape)).astype(np.float32)
        for name, array in initial(extended, 0.0, chance).items()
    }
    batch, log_s = bucket.rows(np.arange(bucket.at_once) % len(bucket))
    params, mean, square = jax.device_put((weights, zeros(weights), zeros(weights)))
    lost = step(params, mean, square, jnp.float32(1), jnp.float32(0), batch, log_s.astype(np.float32))[-1]
    error = np.abs(np.log(predicted_seconds(weights, batch)) - log_s)
    in_numpy = np.where(error < HUBER, error**2 / (2 * HUBER), error - HUBER / 2).mean()
    return abs(float(in_numpy / lost) - 1)


@functools.cache
def measured(sizes: Sizes) -> dict[str, list[Labelled]]:
    """Return the measured segments of all networks, by their roles."""
    device = board()
    found: dict[str, list[Labelled]] = {LEARNED: [], CHOSEN: [], TESTED: []}
    for index, graph in enumerate(networks(sizes.networks)):
        found[role(index)].append(labelled(graph, device, index, sizes.segments).up_to(sizes.longest))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="where the weights are written")
    parser.add_argument("--seed", type=int, default=0, help="of the first weights and the order of the batches")
    parser.add_argument("--steps", type=int, default=Sizes.steps, help="of each training")
    parser.add_argument("--short", action="store_true", help="the extended features, short segments, 12 steps, for CI")
    args = parser.parse_args()
    if args.short and args.write:
        parser.error("--short learns too little to be written; leave out one of the two")
    sizes = SHORT if args.short else Sizes(steps=args.steps)
    began = time.perf_counter()
    if args.short:
        jax.config.update("jax_disable_most_optimizations", True)
        found = {True: trained(True, sizes, args.seed)}
    else:
        spawned = multiprocessing.get_context("spawn")  # JAX has threads, which a fork would lose
        with ProcessPoolExecutor(len(FILES), spawned) as pool:
            run = functools.partial(trained, sizes=sizes, seed=args.seed)
            found = dict(zip(FILES, pool.map(run, FILES), strict=True))
    for extended, one in found.items():
        first, last = np.mean(one.losses[:5]), np.mean(one.losses[-5:])
        print(
            f"{NAMES[extended]}: loss {first:.3f} -> {last:.4f} in {sizes.steps} steps, {one.cpu_s:.0f} s of CPU time; "
            f"numpy is {one.disagreement:.1e} off JAX"
        )
        if not (last < first and one.disagreement < 1e-4):
            raise SystemExit(f"{NAMES[extended]}: nothing was learned, or numpy computes another network than JAX")
    report(found, sizes, args)
    print(f"{time.perf_counter() - began:.0f} s in all")


def report(found: dict[bool, Trained], sizes: Sizes, args: argparse.Namespace) -> None:
    """Show the errors, and write the weights where that is asked."""
    data, device, kept = measured(sizes), board(), shipped_model().cached_bytes or 0
    graphs = [] if args.short else keras_networks()
    keras = [labelled(graph, device, KERAS + index, sizes.segments) for index, graph in enumerate(graphs)]
    predictors: dict[str, Predictor] = {
        "the shipped model": by_model(shipped_model()),
        "the same, refitted": by_model(refitted(shipped_model(), data[LEARNED][:CALIBRATED])),
        "least squares": by_least_squares(data[LEARNED], kept),
        "all but the residual": by_board(device),
    }
    for extended, one in found.items():
        rounded = {name: array.astype(np.float16).astype(np.float32) for name, array in one.weights.items()}
        predictors[NAMES[extended]] = by_network(rounded, kept)
    title = f"mean error, {len(data[TESTED])} test networks and {len(keras)} of Keras"
    means = tell(title, predictors, data[TESTED], keras)
    for extended, one in found.items() if args.write else ():
        on_tested, on_keras = means[NAMES[extended]]
        figures = {"error, tested": round(on_tested, 4), "error, Keras": round(on_keras, 4)}
        figures |= {"steps": sizes.steps, "CPU seconds": round(one.cpu_s)}
        command = f"python benchmarks/train_predpar.py --write FOLDER --steps {sizes.steps} --seed {args.seed}"
        path = args.write / FILES[extended]
        write_weights(path, one.weights, WeightsNote(PURPOSE, VERSION, command, args.seed, figures=figures))
        read_predictor(path)


if __name__ == "__main__":
    main()
