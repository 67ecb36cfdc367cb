"""One table and one picture out of what DeepSpeed's monitor wrote."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

# DeepSpeed's CSV monitor writes one file a figure, "<prefix><figure>.csv", of (step, value) lines.
PREFIX = "Train_Window_"


def collect(folder: Path) -> list[dict[str, float]]:
    """One row a step out of the monitor's files; a file that was appended to by a second run holds its header twice."""
    table: dict[int, dict[str, float]] = {}
    for file in sorted(folder.glob(f"{PREFIX}*.csv")):
        figure = file.stem.removeprefix(PREFIX)
        with file.open(newline="") as lines:
            for step, value in csv.reader(lines):
                if step != "step":
                    table.setdefault(int(step), {})[figure] = float(value)
    return [{"step": step, **table[step]} for step in sorted(table)]


def clear(folder: Path) -> None:
    """Remove what an earlier run left: the monitor appends, and its steps would pass for this run's."""
    for file in folder.glob(f"{PREFIX}*.csv"):
        file.unlink()


def write_table(rows: list[dict[str, float]], file: Path) -> None:
    """metrics.csv: step first, then the figures by name; empty where a step has none."""
    names = ["step", *sorted({name for row in rows for name in row} - {"step"})]
    with file.open("w", newline="") as out:
        writer = csv.DictWriter(out, names, restval="")
        writer.writeheader()
        writer.writerows(rows)


def smooth(values: list[float], weight: float = 0.9) -> list[float]:
    """Exponential mean without the bias of its start."""
    result, mean, total = [], 0.0, 0.0
    for value in values:
        mean = weight * mean + (1 - weight) * value
        total = weight * total + (1 - weight)
        result.append(mean / total)
    return result


def draw(rows: list[dict[str, float]], file: Path) -> None:
    """loss.png: the token mean of the loss, the gradient norm before and after clipping, and the speed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    def series(name: str) -> tuple[list[float], list[float]]:
        points = [(row["step"], row[name]) for row in rows if name in row]
        return [step for step, _ in points], [value for _, value in points]

    figure, axes = pyplot.subplots(3, 1, figsize=(8, 8), sharex=True, height_ratios=[3, 2, 1], constrained_layout=True)
    steps, losses = series("loss")
    axes[0].plot(steps, losses, color="#9db7d5", linewidth=1, label="each window")
    axes[0].plot(steps, smooth(losses), color="#1f4e8c", linewidth=2, label="smoothed")
    axes[0].set_ylabel("loss (nats a token)")
    axes[1].plot(*series("grad_norm"), color="#c77c3a", linewidth=1.2, label="before clipping")
    axes[1].plot(*series("clipped_norm"), color="#4b8b57", linewidth=1.2, linestyle="--", label="after clipping")
    axes[1].set_ylabel("gradient norm")
    axes[2].plot(*series("tokens_per_s"), color="#666666", linewidth=1)
    axes[2].set_ylabel("tokens/s")
    axes[2].set_ylim(bottom=0)
    axes[2].set_xlabel("optimizer step")
    for axis in axes:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(frameon=False)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


class LoadHistory:
    """Tokens by layer and expert over time, in at most MOST columns of ``span`` windows each.

    When there are too many, neighbours are added up: a run of any length needs as much memory, and as much of a
    checkpoint.

    Attributes:
        columns: [layers, E] int64 each, sums over ``span`` windows; over ``last`` in the last one.
    """

    MOST = 400  # even

    def __init__(self) -> None:
        self.columns: list[np.ndarray] = []
        self.span = self.last = 1

    def add(self, counts: np.ndarray) -> None:
        """One window's, [layers, E]."""
        if self.columns and self.last < self.span:
            self.columns[-1] = self.columns[-1] + counts
            self.last += 1
            return
        if len(self.columns) == self.MOST:
            self.columns = [a + b for a, b in zip(self.columns[::2], self.columns[1::2], strict=True)]
            self.span *= 2
        self.columns.append(counts)
        self.last = 1

    def state(self) -> dict[str, object]:
        """For a checkpoint."""
        import torch

        return {"columns": torch.from_numpy(np.stack(self.columns)), "span": self.span, "last": self.last}

    def load(self, state: dict) -> None:
        """What `state` gave."""
        self.columns, self.span, self.last = list(state["columns"].numpy()), state["span"], state["last"]


def draw_experts(history: LoadHistory, file: Path) -> None:
    """experts.png: each layer's share of tokens by expert over time, where 1 is an even share."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    table = np.stack(history.columns).astype(float)  # [columns, layers, E]
    share = table / np.maximum(table.mean(-1, keepdims=True), 1)
    columns, layers, experts = share.shape
    place = (0.5, columns * history.span + 0.5, -0.5, experts - 0.5)
    figure, axes = pyplot.subplots(layers, 1, figsize=(8, 1.2 + 1.5 * layers), sharex=True, constrained_layout=True)
    for layer, axis in enumerate(np.atleast_1d(axes)):
        image = axis.imshow(
            share[:, layer].T,
            aspect="auto",
            origin="lower",
            cmap="RdBu_r",
            vmin=0,
            vmax=2,
            interpolation="nearest",
            extent=place,
        )
        axis.set_ylabel(f"layer {layer}\nexpert")
    np.atleast_1d(axes)[-1].set_xlabel("optimizer step")
    figure.colorbar(image, ax=axes, label="tokens, in even shares", fraction=0.04)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
