"""The .tflite files of 8 bits that benchmarks cut and run; makes those that are not here yet, and says where they are.

    python benchmarks/int8_models.py

MobileNetV2 is in the repository and EfficientNet-Lite0 is what `examples/edge_tpu/build.py` makes: both have trained
weights. ResNet50, InceptionV3 and NASNetMobile (for `memory_real.py`, in float as well) are those of
`keras.applications` with **seeded random weights**, quantised on noise: they have the operators, shapes and sizes of
the real ones, and say nothing about accuracy. All but the first need TensorFlow, which is installed once into an
environment of its own, and stay in the cache folder; delete one there to make it again.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "edge_tpu"))

# TensorFlow's environment, in which this file is run as well, has neither tvm_pipeline nor what that needs.
from tensorflow_tool import quantised, run_with_tensorflow

MOBILENET = Path(__file__).resolve().parents[1] / "tests" / "edgetpu" / "data" / "mobilenet_v2_int8.tflite"
RANDOM = {
    "resnet50": ("ResNet50", 224),
    "inception_v3": ("InceptionV3", 299),
    "nasnet_mobile": ("NASNetMobile", 224),
}
NAMES = ("mobilenet_v2", "efficientnet_lite0", "resnet50", "inception_v3")
SAMPLES = 8  # of noise, to calibrate with


def int8_model(name: str) -> Path:
    """Return the file of one of NAMES or RANDOM; SystemExit where it cannot be made."""
    from build import build

    if name == "mobilenet_v2":
        return MOBILENET
    if name in RANDOM:
        return random_model(name, "int8")
    path = _in_cache(f"{name}_int8.tflite")
    if not path.exists():
        build(path)
    return path


def random_model(name: str, kind: str) -> Path:
    """Return the file of one of RANDOM, `kind` int8 or float; SystemExit where it cannot be made."""
    from tvm_pipeline.files import replacing

    path = _in_cache(f"{name}_{kind}.tflite")
    if not path.exists():
        with replacing(path) as temporary:
            run_with_tensorflow(Path(__file__), ["--convert", name, kind, temporary])
    return path


def _in_cache(name: str) -> Path:
    from tvm_pipeline.files import cache_folder

    folder = cache_folder() / "models"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / name


def random_network(name: str) -> tuple[Any, Any]:
    """Return a network of `keras.applications` with random weights, and the noise that its statistics were taken from.

    It gives out logits: of random weights the softmax is the same for every picture.
    """
    import keras
    import numpy as np

    class_name, size = RANDOM[name]
    keras.utils.set_random_seed(0)
    network = getattr(keras.applications, class_name)(weights=None, classifier_activation=None)
    draw = np.random.default_rng(0)
    noise = draw.standard_normal((SAMPLES, size, size, 3)).astype(np.float32)
    norms = [layer for layer in network.layers if isinstance(layer, keras.layers.BatchNormalization)]
    for layer in norms:
        layer.momentum = 0.0
        scales = [draw.uniform(0.8, 1.2, layer.moving_mean.shape)] if layer.scale else []
        layer.set_weights([*scales, draw.normal(0, 0.2, layer.moving_mean.shape), *layer.get_weights()[-2:]])
    # With the statistics of the noise, values neither vanish nor grow from layer to layer.
    network(noise, training=True)
    image = keras.Input((size, size, 3), batch_size=1, name="image")
    return keras.Model(image, network(image, training=False)), noise


def in_float(network: Any) -> bytes:
    """Return the network as a .tflite in float, its batch of 1."""
    import tensorflow as tf

    with redirect_stdout(StringIO()):  # else hundreds of lines about the network
        content: bytes = tf.lite.TFLiteConverter.from_keras_model(network).convert()
    return content


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--convert", nargs=3, metavar=("NAME", "KIND", "FILE"), help="make one; where TensorFlow is")
    arguments = parser.parse_args()
    if arguments.convert:
        name, kind, file = arguments.convert
        network, noise = random_network(name)
        Path(file).write_bytes(in_float(network) if kind == "float" else quantised(network, noise, kind))
        return
    for name in NAMES:
        path = int8_model(name)
        print(f"{name:<20}{path.stat().st_size / 1e6:6.1f} MB  {path}")


if __name__ == "__main__":
    main()
