"""Draw docs/disco_catch.png and docs/disco_meta.png from run folders and the meta-training's csv.

python benchmarks/disco_figures.py catch RUN RUN RUN --control RUN
python benchmarks/disco_figures.py meta CSV --start RUN --learned RUN
"""

import csv
import dataclasses
from pathlib import Path
from typing import Annotated

import matplotlib.figure
import numpy as np
import tyro

DOCS = Path(__file__).resolve().parent.parent / "docs"
# The original's `eval` notebook, seed 0, run on a CPU: mean return of the last 50 iterations.
ORIGINAL_STEPS = [14_500, 26_100, 29_000, 31_900, 34_800, 37_700, 40_600, 43_500, 58_000]
ORIGINAL_RETURNS = [-0.77, -0.67, -0.69, -0.25, 0.20, 0.79, 0.99, 1.00, 1.00]
CHANCE = -0.75


@dataclasses.dataclass(frozen=True)
class Catch:
    """Seeds of disco.py beside the original."""

    runs: Annotated[list[Path], tyro.conf.Positional]  # run folders of `python disco.py --seed S`
    control: Path  # run folder of `python disco.py --weights random`


@dataclasses.dataclass(frozen=True)
class Meta:
    """Meta-training, and agents that learn with the rule before it and after it."""

    table: Annotated[Path, tyro.conf.Positional]  # csv that disco_meta.py wrote
    start: Path  # run folder of `disco.py` with the weights it started from
    learned: Path  # and with those that it wrote


def read(run: Path, window: int) -> tuple[np.ndarray, np.ndarray]:
    """Environment steps [updates] and the mean return of the `window` updates before, by seed."""
    with open(run / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    seeds = sorted({int(row["seed"]) for row in rows})
    steps = np.array([float(row["env_steps"]) for row in rows if int(row["seed"]) == seeds[0]])
    curves = []
    for seed in seeds:
        returns = [
            float(row["episode/return"] or "nan") for row in rows if int(row["seed"]) == seed
        ]
        parts = np.lib.stride_tricks.sliding_window_view(returns, window)
        curves.append(np.nanmean(parts, axis=1))
    return steps[window - 1 :], np.array(curves)  # [updates], [S, updates]


def finish(axes, **labels):
    axes.set(**labels)
    axes.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def draw_catch(options: Catch) -> None:
    read_50 = lambda run: read(run, 50)
    axes = matplotlib.figure.Figure(figsize=(6.4, 3.8), layout="constrained").subplots()
    curves = [(steps, curve) for steps, returns in map(read_50, options.runs) for curve in returns]
    for i, curve in enumerate(curves):
        label = f"disco.py, {len(curves)} seeds" if i == 0 else None
        axes.plot(*curve, color="tab:blue", alpha=0.85, lw=1.6, label=label)
    axes.plot(
        ORIGINAL_STEPS, ORIGINAL_RETURNS, "o--", color="black", ms=4, label="original, 1 seed"
    )
    steps, (curve,) = read_50(options.control)
    axes.plot(steps, curve, color="tab:red", lw=1.4, label="random rule, 1 seed")
    axes.axhline(CHANCE, color="gray", ls=":", lw=1.2)
    axes.annotate("random policy", (1_000, -0.84), va="top", color="gray")
    finish(axes, xlabel="environment steps", ylabel="return, mean of 50 updates", xlim=(0, 58_500))
    axes.set(title="Catch 8×8 with Disco103", ylim=(-1.03, 1.07))
    axes.legend(loc="upper left", frameon=False)
    axes.figure.savefig(DOCS / "disco_catch.png", dpi=200)


def draw_meta(options: Meta) -> None:
    figure = matplotlib.figure.Figure(figsize=(8.4, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    table = np.genfromtxt(options.table, delimiter=",", names=True, deletechars="")
    smooth = lambda x: np.convolve(x, np.full(20, 1 / 20), "valid")
    left.plot(table["meta_step"], table["episode/return"], color="tab:blue", alpha=0.2, lw=0.8)
    left.plot(table["meta_step"][19:], smooth(table["episode/return"]), color="tab:blue")
    finish(left, xlabel="meta steps", ylabel="return", title="The population, meta-training")
    colours = {"the rule it started from": "tab:red", "the learned rule": "tab:blue"}
    for (label, colour), run in zip(colours.items(), (options.start, options.learned), strict=True):
        steps, returns = read(run, 20)
        mean, std = returns.mean(axis=0), returns.std(axis=0)
        right.plot(steps, mean, color=colour, label=f"{label}, {len(returns)} seeds")
        right.fill_between(steps, mean - std, mean + std, color=colour, alpha=0.2, lw=0)
    finish(right, xlabel="environment steps", ylabel="return", title="New agents, rule frozen")
    right.set(ylim=left.get_ylim())
    right.legend(frameon=False)
    figure.savefig(DOCS / "disco_meta.png", dpi=200)


if __name__ == "__main__":
    chosen = tyro.cli(Catch | Meta)
    draw_catch(chosen) if isinstance(chosen, Catch) else draw_meta(chosen)
