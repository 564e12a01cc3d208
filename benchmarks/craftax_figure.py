"""Draw docs/craftax.png from run folders of environments/craftax_envs.py, and print its numbers.

    python benchmarks/craftax_figure.py runs/craftax

Left: returns of evaluations, and of training episodes faintly. Right: Crafter's score (Hafner 2021,
arXiv 2109.06780) of the training episodes between evaluations. Lines are means over seeds,
interquartile ones of four or more; bands are 95 % bootstrap intervals. Printed are means and 95 %
intervals by Student's t.
"""

import sys
from pathlib import Path
from typing import NamedTuple

import matplotlib
import matplotlib.figure
import numpy as np
import tyro
from matplotlib.ticker import EngFormatter
from scipy import stats

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import plot

ACHIEVEMENT = "env/Achievements/"


class Curves(NamedTuple):
    """K evaluations of S seeds. Between two of them, E episodes end in training."""

    steps: np.ndarray  # [K]
    eval_return: np.ndarray  # [K, S]
    training_return: np.ndarray  # [K, S]
    episode_score: np.ndarray  # [K, S] mean over episodes of env/score
    percentages: np.ndarray  # [K, S, achievements] of the E episodes
    count: np.ndarray  # [K, S] E


def crafter_score(percentages: np.ndarray) -> np.ndarray:
    """Geometric mean of percentages [..., achievements], with an offset of one (eq. 1)."""
    return np.exp(np.log1p(percentages).mean(axis=-1)) - 1


def read(run_dirs: list[Path]) -> Curves:
    """Runs of the same length. Raises plot.RunError."""
    runs = [plot.read_run(path, "eval/return") for path in run_dirs]
    table = {name: np.hstack([run.table[name] for run in runs]) for name in runs[0].table}
    measured = np.flatnonzero(np.isfinite(table["eval/return"]).all(axis=1))
    starts = [0, *(measured[:-1] + 1)]
    total = lambda x: np.add.reduceat(x[: measured[-1] + 1], starts)  # [updates, S] -> [K, S]
    count = total(table["episode/count"])
    # An update in which no episode ended has no means.
    mean = lambda name: total(np.nan_to_num(table[name]) * table["episode/count"]) / count
    names = [name for name in table if name.startswith(ACHIEVEMENT)]
    return Curves(
        steps=table["env_steps"][measured, 0],
        eval_return=table["eval/return"][measured],
        training_return=mean("episode/return"),
        episode_score=mean("env/score"),
        percentages=np.stack([mean(name) for name in names], axis=-1),
        count=count,
    )


def draw(curves: Curves) -> matplotlib.figure.Figure:
    figure = matplotlib.figure.Figure(figsize=(8, 3.2))
    left, right = figure.subplots(1, 2)
    seeds = plot.count(curves.eval_return.shape[1])
    style = {"marker": "o", "label": f"craftax_envs.py ({seeds})"}
    plot.draw_line([(left, curves.steps)], curves.eval_return, plot.BLUE, **style)
    training = curves.training_return.mean(axis=1)
    left.plot(curves.steps, training, color=plot.BLUE, label="training return", **plot.FAINT)
    left.set(title="Craftax-Classic-Symbolic-v1", ylabel="return")
    left.legend(loc="lower right")
    score = crafter_score(curves.percentages)
    plot.draw_line([(right, curves.steps)], score, plot.BLUE, marker="o")
    right.set(title="Achievements in training", ylabel="Crafter's score (%)")
    for axes in (left, right):
        axes.set(xlabel="environment steps", xlim=(0, None), ylim=(0, None))
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    return figure


def describe(values: np.ndarray) -> str:
    """[S] -> mean ± half of the 95 % interval by Student's t, then each seed."""
    if len(values) == 1:
        return f"{values[0]:.2f}"
    half = stats.sem(values) * stats.t.ppf(0.975, len(values) - 1)
    return f"{values.mean():.2f} ± {half:.2f} ({', '.join(f'{x:.2f}' for x in values)})"


def main(run_dirs: tyro.conf.Positional[list[Path]]) -> None:
    """Draw docs/craftax.png from run folders of environments/craftax_envs.py."""
    curves = read(run_dirs)
    share = curves.count / curves.count.sum(axis=0)
    overall = (curves.percentages * share[..., None]).sum(axis=0)  # [S, achievements]
    before, end = curves.steps[-2:]
    print(f"evaluation after {end:,.0f} steps: return {describe(curves.eval_return[-1])}")
    print(f"training from {before:,.0f} steps on: return {describe(curves.training_return[-1])}")
    print("    env/score", describe(curves.episode_score[-1]))
    print("    Crafter's score", describe(crafter_score(curves.percentages[-1])))
    print("all training: Crafter's score", describe(crafter_score(overall)))
    with matplotlib.rc_context(plot.STYLE):
        draw(curves).savefig(ROOT / "docs" / "craftax.png", dpi=100)


if __name__ == "__main__":
    tyro.cli(main)
