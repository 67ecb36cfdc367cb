"""What the training program keeps of the experts' loads: bounded, and nothing is lost or counted twice."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).resolve().parent.parent / "launch"))

from figures import LoadHistory, draw_experts


@pytest.mark.parametrize("windows", [1, 7, 8, 9, 16, 17, 100])
def test_a_long_history_is_bounded_and_whole(windows, monkeypatch):
    monkeypatch.setattr(LoadHistory, "MOST", 8)
    history, counts = LoadHistory(), np.random.default_rng(0).integers(0, 9, (windows, 2, 3))
    for number, row in enumerate(counts):
        if number == windows // 2:  # as a resumed run goes on
            before, history = history, LoadHistory()
            if before.columns:
                history.load(before.state())
        history.add(row)
    assert len(history.columns) <= 8
    assert history.span * (len(history.columns) - 1) + history.last == windows
    parts = [counts[begin : begin + history.span].sum(0) for begin in range(0, windows, history.span)]
    assert np.array_equal(np.stack(history.columns), np.stack(parts))


def test_it_is_drawn(tmp_path):
    history = LoadHistory()
    for step in range(5):
        history.add(np.array([[step, 1], [2, 3]]))
    draw_experts(history, tmp_path / "experts.png")
    assert (tmp_path / "experts.png").read_bytes()[:4] == b"\x89PNG"
