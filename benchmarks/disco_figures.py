"""Draw docs/disco_catch.png and docs/disco_meta.png from run folders.

python benchmarks/disco_figures.py catch RUN RUN RUN --control RUN
python benchmarks/disco_figures.py meta RUN RUN ...
"""

import dataclasses
import sys
from pathlib import Path
from typing import Annotated

import matplotlib.figure
import numpy as np
import tyro
from matplotlib.ticker import EngFormatter

DOCS = Path(__file__).resolve().parent.parent / "docs"
sys.path.insert(0, str(DOCS.parent))

from report import SKY, SYSTEM_COLORS

import plot

# The original's `eval` notebook, seed 0, on a CPU: mean training return of the last 50 iterations.
ORIGINAL_STEPS = [14_500, 26_100, 29_000, 31_900, 34_800, 37_700, 40_600, 43_500, 58_000]
ORIGINAL_RETURNS = [-0.77, -0.67, -0.69, -0.25, 0.20, 0.79, 0.99, 1.00, 1.00]
CHANCE = -0.75


@dataclasses.dataclass(frozen=True)
class Catch:
    """Seeds of disco.py and the original."""

    runs: Annotated[list[Path], tyro.conf.Positional]  # run folders of `python disco.py --seed S`
    control: Path  # run folder of `python disco.py --weights random`


@dataclasses.dataclass(frozen=True)
class Meta:
    """New agents with learned rules, with Disco103 and with hand-written rules."""

    runs: Annotated[
        list[Path], tyro.conf.Positional
    ]  # run folders of disco.py, on any environments


def read_training(run: Path, window: int = 50) -> tuple[np.ndarray, np.ndarray]:
    """Environment steps [updates] and training return, a moving average [updates, S]."""
    curve = plot.read_run(run, "episode/return").curve
    windows = np.lib.stride_tricks.sliding_window_view(curve.values, window, axis=0)
    return curve.steps[window - 1 :], np.nanmean(windows, axis=-1)


def read_evaluation(run: Path) -> tuple[np.ndarray, np.ndarray]:
    """Environment steps [evaluations] and evaluation return [evaluations, S]."""
    curve = plot.read_run(run, "eval/return").curve
    evaluated = np.isfinite(curve.values).all(axis=1)
    return curve.steps[evaluated], curve.values[evaluated]


def new_axes(columns: int, sharey: bool = True) -> list:
    figure = matplotlib.figure.Figure(figsize=(5.2 * columns, 3.4))
    grid = figure.subplots(1, columns, squeeze=False, sharey=sharey)[0]
    for axes in grid:
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    return grid


def draw_catch(options: Catch) -> matplotlib.figure.Figure:
    (axes,) = new_axes(1)
    curves = [
        (steps, seed) for steps, returns in map(read_training, options.runs) for seed in returns.T
    ]
    for i, curve in enumerate(curves):
        label = f"disco.py ({len(curves)} seeds)" if i == 0 else None
        axes.plot(*curve, color=SYSTEM_COLORS["disco"], linewidth=1.4, label=label)
    axes.plot(ORIGINAL_STEPS, ORIGINAL_RETURNS, "o--", color=SKY, label="original (1 seed)")
    steps, returns = read_training(options.control)
    color = SYSTEM_COLORS["disco random"]
    axes.plot(steps, returns[:, 0], color=color, linewidth=1.4, label="random rule (1 seed)")
    axes.axhline(CHANCE, color=plot.GRAY, linestyle=":", linewidth=1.2)
    axes.annotate("random policy", (1_000, -0.84), va="top", color=plot.GRAY)
    axes.set(xlabel="environment steps", ylabel="training return, mean of 50 updates")
    axes.set(title="Catch 8×8 with Disco103", xlim=(0, 58_500), ylim=(-1.03, 1.07))
    axes.legend(loc="upper left")
    return axes.figure


SYSTEMS = {
    "learned": ("rules learned on Catch 5×5", plot.BLUE),
    "disco103": ("Disco103", SYSTEM_COLORS["disco"]),
    "actor_critic": ("actor_critic", SYSTEM_COLORS["disco actor_critic"]),
    "policy_gradient": ("policy_gradient", SYSTEM_COLORS["disco policy_gradient"]),
    "random": ("random rule", SYSTEM_COLORS["disco random"]),
}


def system_of(options: dict) -> str:
    if options["rule"] != "disco":
        return options["rule"]
    return options["weights"] if options["weights"] in SYSTEMS else "learned"


def draw_meta(options: Meta) -> matplotlib.figure.Figure:
    """A panel per environment. A curve of a learned rule is the mean over its agents."""
    panels = {}  # env_id -> system -> [K, agents] of each run
    for run in options.runs:
        about = plot.read_run(run, "eval/return").options
        steps, returns = read_evaluation(run)
        system = system_of(about)
        values = returns.mean(axis=1, keepdims=True) if system == "learned" else returns
        panels.setdefault(about["env_id"], {}).setdefault(system, []).append((steps, values))
    grid = new_axes(len(panels), sharey=False)
    for axes, (env_id, systems) in zip(grid, panels.items(), strict=True):
        for system, (label, color) in SYSTEMS.items():
            if system not in systems:
                continue
            steps, values = systems[system][0][0], np.hstack([x for _, x in systems[system]])
            unit = "rules" if system == "learned" else "agents"
            label = f"{label} ({values.shape[1]} {unit})"
            plot.draw_line([(axes, steps)], values, color, label=label)
            print(f"{env_id}: {label}: {values[-1].mean():.3g} ± {values[-1].std():.2g}")
        axes.set(title=env_id, xlabel="environment steps", ylabel="return")
    figure = grid[0].figure
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", bbox_to_anchor=(0.5, 0.03), ncols=4)
    return figure


def main() -> None:
    options = tyro.cli(Catch | Meta)
    with matplotlib.rc_context(plot.STYLE):
        if isinstance(options, Catch):
            draw_catch(options).savefig(DOCS / "disco_catch.png")
        else:
            draw_meta(options).savefig(DOCS / "disco_meta.png", bbox_inches="tight")


if __name__ == "__main__":
    main()
