"""The pointer network of `learned/pointer_network.py` once more, in JAX, for batches and gradients.

Weights have the names and shapes of the numpy network, so that training is a map from its weights to its weights.
`train_respect.py` checks that both compute the same. Arrays are b x n ...: b graphs of n operators each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.example_libraries import optimizers

Weights = Mapping[str, jax.Array]

NEVER = -1e9  # the score of an operator that may not be picked; what it leaves of a softmax is zero


class Batch(NamedTuple):
    """What the network reads of b graphs.

    Attributes:
        rows: b x n x w; the embedding.
        needs: b x n x n; 1 where the first operator reads the second and must wait for it (the ready mask), else 0;
            all 0 for the paper's mask.
    """

    rows: jax.Array
    needs: jax.Array


def log_probability(weights: Weights, batch: Batch, picks: jax.Array) -> jax.Array:
    """Return b x n logarithms of the probabilities with which the network makes these picks, each after those before.

    Args:
        picks: b x n indices of rows, each once.
    """
    contexts, state = _encoded(weights, batch.rows)
    chosen = jnp.take_along_axis(batch.rows, picks[:, :-1, None], axis=1)
    start = jnp.broadcast_to(weights["start"], (len(picks), 1, len(weights["start"])))
    inputs = _gates(weights, "decoder", jnp.concatenate([start, chosen], axis=1))
    _, hidden = lax.scan(partial(_lstm, weights["decoder/hidden"]), state, inputs.swapaxes(0, 1))
    # The step at which each row is picked, and the first step at which it may be.
    at = jnp.argsort(picks, axis=1)
    ready = jnp.max(batch.needs * (at[:, None, :] + 1), axis=2)
    step = jnp.arange(picks.shape[1])[None, :, None]
    is_open = (at[:, None, :] >= step) & (ready[:, None, :] <= step)
    scores = _pointed(weights, _keys(weights, contexts), hidden.swapaxes(0, 1), is_open)
    return jnp.take_along_axis(jax.nn.log_softmax(scores), picks[:, :, None], axis=2)[:, :, 0]


@jax.jit
def greedy(weights: Weights, batch: Batch) -> jax.Array:
    """Return b x n picks, the most probable one at each step."""
    return _decoded(weights, batch, lambda step, scores: scores.argmax(axis=1))


@jax.jit
def sampled(weights: Weights, batch: Batch, key: jax.Array) -> jax.Array:
    """Return b x n picks, drawn with the network's probabilities."""
    return _decoded(weights, batch, lambda step, scores: jax.random.categorical(jax.random.fold_in(key, step), scores))


@jax.jit
def attention_keys(weights: Weights, rows: jax.Array) -> jax.Array:
    """Return the b x n x d keys of the pointer."""
    return _keys(weights, _encoded(weights, rows)[0])[1]


def _decoded(weights: Weights, batch: Batch, pick: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
    contexts, state = _encoded(weights, batch.rows)
    keys = _keys(weights, contexts)
    inputs = _gates(weights, "decoder", batch.rows)
    first = jnp.broadcast_to(_gates(weights, "decoder", weights["start"]), inputs[:, 0].shape)
    at = jnp.arange(len(batch.rows))

    def step(carried, number):  # type: ignore[no-untyped-def]
        state, gates, taken, waits = carried
        state, hidden = _lstm(weights["decoder/hidden"], state, gates)
        is_open = ~taken & (waits <= 0)
        scores = _pointed(weights, keys, hidden[:, None], is_open[:, None])[:, 0]
        picked = pick(number, scores)
        waits = waits - batch.needs[at, :, picked]
        return (state, inputs[at, picked], taken.at[at, picked].set(True), waits), picked

    taken = jnp.zeros(batch.rows.shape[:2], bool)
    begin = state, first, taken, batch.needs.sum(axis=2)
    _, picks = lax.scan(step, begin, jnp.arange(batch.rows.shape[1]))
    return picks.T


def _encoded(weights: Weights, rows: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Return b x n x d contexts, and the state behind the last row."""
    nothing = jnp.zeros((len(rows), len(weights["pointer/vector"])))
    inputs = _gates(weights, "encoder", rows).swapaxes(0, 1)
    state, contexts = lax.scan(partial(_lstm, weights["encoder/hidden"]), (nothing, nothing), inputs)
    return contexts.swapaxes(0, 1), state


def _gates(weights: Weights, lstm: str, rows: jax.Array) -> jax.Array:
    return rows @ weights[f"{lstm}/input"] + weights[f"{lstm}/bias"]


def _lstm(
    matrix: jax.Array, state: tuple[jax.Array, jax.Array], gates: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    hidden, cell = state
    i, f, g, o = jnp.split(gates + hidden @ matrix, 4, axis=-1)
    cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
    hidden = jax.nn.sigmoid(o) * jnp.tanh(cell)
    return (hidden, cell), hidden


def _keys(weights: Weights, contexts: jax.Array) -> tuple[jax.Array, jax.Array]:
    return contexts @ weights["glimpse/key"], contexts @ weights["pointer/key"]


def _pointed(weights: Weights, keys: tuple[jax.Array, jax.Array], hidden: jax.Array, is_open: jax.Array) -> jax.Array:
    """Return b x s x n scores of the rows at s steps, from b x s x d outputs of the decoder."""
    glimpse_keys, pointer_keys = keys
    seen = jax.nn.softmax(jnp.where(is_open, _scores(weights, "glimpse", glimpse_keys, hidden), NEVER))
    return jnp.where(is_open, _scores(weights, "pointer", pointer_keys, seen @ glimpse_keys), NEVER)


def _scores(weights: Weights, attention: str, keys: jax.Array, hidden: jax.Array) -> jax.Array:
    query = hidden @ weights[f"{attention}/query"] + weights[f"{attention}/query_bias"]
    return jnp.tanh(keys[:, None] + query[:, :, None]) @ weights[f"{attention}/vector"]


class Adam:
    """Adam (Kingma and Ba, 2015), gradients clipped to norm 1."""

    def __init__(self, weights: Weights, rate: float) -> None:
        self._rate = rate
        self._state = optimizers.adam(rate).init_fn(dict(weights))
        self._steps = 0

    @property
    def weights(self) -> Weights:
        return optimizers.adam(self._rate).params_fn(self._state)

    def step(self, batch: Batch, picks: jax.Array, advantage: jax.Array) -> float:
        """Make picks of graphs with a positive advantage less probable, others more; return the loss before the step.

        The loss is the mean over picks of the logarithm of their probability times the advantage.

        Args:
            picks: b x n.
            advantage: b; by how much the cost of a graph's sequence is above the baseline's; -1 to imitate the picks.
        """
        loss, self._state = _step(self._steps, self._rate, self._state, batch, picks, advantage)
        self._steps += 1
        return float(loss)


@jax.jit
def _step(number, rate, state, batch, picks, advantage):  # type: ignore[no-untyped-def]
    adam = optimizers.adam(rate)

    def loss(weights: Weights) -> jax.Array:
        return jnp.mean(advantage[:, None] * log_probability(weights, batch, picks))

    value, gradient = jax.value_and_grad(loss)(adam.params_fn(state))
    return value, adam.update_fn(number, optimizers.clip_grads(gradient, 1.0), state)
