"""What Relay says of a quantized model whose concatenation may be done in parts."""

from __future__ import annotations

from tests.support.parts import needs

needs("tvm")

from tests.support.networks import Weights, as_model
from tvm_pipeline_tvm.relay.rewrite_concat import RelayRewriting

import tvm  # isort: skip
from tvm import relay  # isort: skip


def int8(w: Weights) -> relay.Expr:
    """Three int8 branches without weights of their own, and a convolution to few channels, which sums in int32."""
    one, zero = relay.const(0.05), relay.const(0)
    data = relay.var("data", shape=(1, 32, 8, 8), dtype="int8")
    wide = [relay.nn.max_pool2d(data, (size, size), padding=(size // 2, size // 2)) for size in (3, 5, 7)]
    joined = relay.concatenate(wide, axis=1)
    weights = w(1, 96, 1, 1, dtype="int8")
    options = {"kernel_size": (1, 1), "channels": 1}
    x = relay.qnn.conv2d(joined, weights, zero, zero, one, relay.const(0.01), **options)
    return relay.qnn.requantize(x, relay.const(0.0005), zero, relay.const(0.5), zero, out_dtype="int8")


def test_a_quantized_model_is_known_as_one_and_its_least_peak_counts_sums_in_int32() -> None:
    """That its outputs stay equal bit for bit is tested in `test_rewrite_concat.py`, and of models by the benchmark."""
    w = Weights()
    body = int8(w)
    mod = tvm.IRModule.from_expr(relay.Function(relay.analysis.free_vars(body), body))
    rewriting = RelayRewriting(as_model("int8", relay.transform.InferType()(mod), w.params))
    assert rewriting.is_quantized
    assert rewriting.names == ("concatenation 0 (1x96x8x8)",)
    # Data, three branches and their concatenation; then data, a branch, and two sums of one channel in int32.
    assert rewriting.peak_bytes(()) == 64 * (32 + 96 + 96)
    assert rewriting.peak_bytes(rewriting.names) == 64 * (32 + 32 + 4 + 4)
