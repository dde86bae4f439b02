"""The weights of PredPar's predictor that are shipped, as `benchmarks/train_predpar.py` wrote them."""

from __future__ import annotations

import sys
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

from tvm_pipeline_papers.learned.segment_predictor import read_predictor, segment_predictor

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

from predpar_data import TESTED, board, labelled, networks, role, shipped_model

ROOT = Path(__file__).parents[3]
FOLDERS = {"predpar.npz": ROOT / "benchmarks", "predpar_extended.npz": files("tvm_pipeline_papers.learned")}
NAMES = tuple(FOLDERS)


@pytest.mark.parametrize("name", NAMES)
def test_their_note_says_what_made_them(name: str) -> None:
    path = Path(str(FOLDERS[name] / name))
    _, note = read_predictor(path)
    assert path.stat().st_size < 600_000
    assert (ROOT / note.command.split()[1]).is_file()
    assert f"--seed {note.seed}" in note.command
    assert f"--steps {note.figures['steps']:.0f}" in note.command
    assert {"error, tested", "error, Keras", "CPU seconds"} < set(note.figures)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", NAMES)
def test_they_are_as_exact_as_their_note_says(name: str) -> None:
    weights, note = read_predictor(Path(str(FOLDERS[name] / name)))
    errors = []
    for index, graph in enumerate(networks(10)):
        if role(index) == TESTED:
            one = labelled(graph, board(), index, most=24)
            predictor = segment_predictor(graph, shipped_model().cached_bytes or 0, weights)
            predictor.ask(one.segments)
            errors.append(np.abs([predictor.known[part] for part in one.segments] / one.seconds - 1).mean())
    assert len(errors) == 2
    # Of 120 networks the note says; of these two it may be somewhat more.
    assert np.mean(errors) < 2 * note.figures["error, tested"] < 0.5
