"""Masks of a model become masks of the picture, whatever the sizes of the two.

Read next: segmentation.py and yolo_variants.py, which use this.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tvm_pipeline_video.preprocessing import Transform

Ints = NDArray[np.intp]


def picture_size(transform: Transform, width: int, height: int) -> tuple[int, int]:
    """Return width and height of the picture; those of the model's input where the transform does not know them."""
    return transform.width or width, transform.height or height


def positions(count: int, scale: float, offset: float, extent: int, cells: int) -> NDArray[np.float64]:
    """Return where the centers of `count` pixels of the picture lie in a grid of `cells` over `extent` pixels.

    Cell i has its center at i. Positions outside of the grid are at its edge.
    """
    found = ((np.arange(count) + 0.5) * scale + offset) * (cells / extent) - 0.5
    return np.asarray(np.clip(found, 0, cells - 1))


def grid_positions(
    transform: Transform, size: tuple[int, int], cells: tuple[int, ...]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return where the rows and the columns of the picture lie in a grid over the model's input.

    Args:
        size: width and height of the model's input.
        cells: rows and columns of the grid.
    """
    width, height = picture_size(transform, *size)
    return (
        positions(height, transform.scale_y, transform.offset_y, size[1], cells[0]),
        positions(width, transform.scale_x, transform.offset_x, size[0], cells[1]),
    )


def nearest(found: NDArray[np.float64]) -> Ints:
    """Return the index of the cell next to each position."""
    return np.rint(found).astype(np.intp)


def interpolated(grid: NDArray[Any], rows: NDArray[np.float64], columns: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return a grid (cells down, cells across) at positions, interpolated bilinearly: (rows, columns)."""
    above, left = rows.astype(np.intp), columns.astype(np.intp)
    below, right = np.minimum(above + 1, grid.shape[0] - 1), np.minimum(left + 1, grid.shape[1] - 1)
    down = (rows - above).astype(np.float32)[:, None]
    across = (columns - left).astype(np.float32)
    lines = grid[above] * (1 - down) + grid[below] * down
    return np.asarray(lines[:, left] * (1 - across) + lines[:, right] * across, np.float32)
