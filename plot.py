"""Compare runs in one picture: return against environment steps and against training time.

    python plot.py runs/* --out compare.png
    python plot.py runs/a runs/b --metric eval/return

Runs of one script on one environment with the same options are one line: their seeds are pooled.
The line is the interquartile mean over seeds (of fewer than four: the mean), the band its 95 %
interval by percentile bootstrap over seeds, both as in rliable (Agarwal et al. 2021, arXiv
2108.13264). Its strata are the environments: each is resampled, and drawn, on its own.

Training time is the sum of steps / (steps per second) over the calls of the compiled program, from
the column time/sps: neither compilation nor evaluation counts, and all seeds of a run, which train
side by side, share it.
"""

import argparse
import csv
import json
import sys
from pathlib import Path
from typing import NamedTuple

import matplotlib
import matplotlib.figure
import numpy as np
from scipy.stats import trim_mean

# What may differ between runs whose seeds are pooled.
ASIDE = "seed num_seeds num_devices run_dir resume track wandb_project wandb_entity distributed"
ASIDE += " coordinator num_processes process_id num_calls checkpoint_every versions device"
COLORS = "#3d6cb9 #e4572e #2a9d8f #8e5bb5 #d99a1c #5b6372 #c4457d #6f8f2f".split()
POINTS = 100  # of a line; updates in between are averaged


class RunError(Exception):
    """A wrong input. The message says what is wrong and what to change."""


class Curve(NamedTuple):
    """Seeds that may be averaged, at K points."""

    steps: np.ndarray  # [K] environment steps of each seed
    seconds: np.ndarray  # [K] of training, the mean over the runs
    returns: np.ndarray  # [K, S], all finite


def read_run(run_dir: Path, metric: str) -> tuple[dict, Curve]:
    """Returns the options and the curve, a point per update (NaN where nothing was measured)."""
    try:
        options = json.loads((run_dir / "config.json").read_text())
        with open(run_dir / "metrics.csv", newline="") as file:
            rows = [row for row in csv.DictReader(file) if None not in row.values()]
        seeds = len({row["seed"] for row in rows})
        number = lambda name: np.array([float(row[name] or "nan") for row in rows])
        columns = [number(name) for name in ("env_steps", "time/sps", metric)]
        _, _ = options["script"], options["env_id"]
    except KeyError as error:
        raise RunError(f"{run_dir} has no {error}: is it a run, and is the metric one?") from None
    except (OSError, ValueError, TypeError) as error:
        raise RunError(f"{run_dir} is no run, or a damaged one: {error}") from None
    whole = len(rows) - len(rows) % max(1, seeds)  # the last update of a killed run may lack seeds
    steps, speed, returns = (column[:whole].reshape(-1, max(1, seeds)) for column in columns)
    steps, speed = steps[:, 0], speed[:, 0]
    timed = np.isfinite(speed)  # the last update of each call
    if not timed.any() or not np.isfinite(returns).any():
        raise RunError(f"{run_dir} has measured no {metric} yet")
    seconds = np.cumsum(np.diff(steps[timed], prepend=0) * seeds / speed[timed])
    seconds = np.interp(steps, [0, *steps[timed]], [0, *seconds])
    return options, Curve(steps, seconds, returns)


def pool(curves: list[Curve]) -> Curve:
    """All seeds of several runs, averaged within equal intervals of environment steps.

    An interval counts from where every seed has measured something to the end of the shortest run.
    What a seed did not measure in between is interpolated, behind its last value that is kept.
    """
    edges = np.linspace(0, max(curve.steps[-1] for curve in curves), POINTS + 1)
    binned = []
    for curve in curves:
        place = np.clip(np.searchsorted(edges, curve.steps) - 1, 0, POINTS - 1)  # [updates]
        mean = np.full((POINTS, 2 + curve.returns.shape[1]), np.nan)
        table = np.column_stack([curve.steps, curve.seconds, curve.returns])
        for k in np.unique(place):
            inside = table[place == k]
            inside = inside[np.isfinite(inside[:, 2:]).any(axis=1)]
            measured = np.isfinite(inside)
            total, count = np.where(measured, inside, 0).sum(axis=0), measured.sum(axis=0)
            mean[k] = np.where(count > 0, total / np.maximum(count, 1), np.nan)
        binned.append(mean)
    returns = np.hstack([mean[:, 2:] for mean in binned])  # [K, S]
    for seed in returns.T:
        known = np.flatnonzero(np.isfinite(seed))
        if known.size:
            seed[:] = np.interp(np.arange(POINTS), known, seed[known], left=np.nan)
    kept = np.isfinite(np.hstack([returns, *(mean[:, :2] for mean in binned)])).all(axis=1)
    if not kept.any():
        raise RunError("these runs have no stretch in common where all have measured something")
    steps, seconds = np.mean([mean[kept, :2] for mean in binned], axis=0).T
    return Curve(steps, seconds, returns[kept])


def iqm(returns: np.ndarray) -> np.ndarray:
    """Interquartile mean over the last axis: a quarter is cut off at either end, rounded down."""
    return trim_mean(returns, 0.25, axis=-1)


def bootstrap(returns: np.ndarray, resamples: int = 2000) -> np.ndarray:
    """[K, S] -> 95 % interval of the interquartile mean [2, K], the same draws at all points."""
    seeds = returns.shape[1]
    draws = np.random.default_rng(0).integers(seeds, size=(resamples, seeds))
    means = np.stack([iqm(row[draws]) for row in returns])  # [K, resamples]
    return np.quantile(means, [0.025, 0.975], axis=1)


def group(runs: list[tuple[dict, Curve]]) -> dict[str, dict[str, Curve]]:
    """{env_id: {label: curve}}; a label names the options in which the lines of a script differ."""
    groups = {}
    for options, curve in runs:
        key = {k: v for k, v in options.items() if k not in ASIDE.split()}
        groups.setdefault(json.dumps(key, sort_keys=True), []).append(curve)
    panels = {}
    for text, curves in groups.items():
        key = json.loads(text)
        same = lambda other, key=key: all(other[k] == key[k] for k in ("script", "env_id"))
        twins = [other for other in map(json.loads, groups) if same(other)]
        names = [k for k in key if any(other.get(k) != key[k] for other in twins)]
        label = " ".join([key["script"], *(f"{k}={key[k]}" for k in names)])
        panels.setdefault(key["env_id"], {})[label] = pool(curves)
    return panels


def draw(panels: dict[str, dict[str, Curve]], metric: str) -> matplotlib.figure.Figure:
    size = (11, 0.6 + 3.6 * len(panels))
    figure = matplotlib.figure.Figure(figsize=size, layout="constrained")
    labels = sorted({label for curves in panels.values() for label in curves})
    colors = {label: COLORS[i % len(COLORS)] for i, label in enumerate(labels)}
    rows = figure.subplots(len(panels), 2, sharey="row", squeeze=False)
    for (env_id, curves), row in zip(panels.items(), rows, strict=True):
        for label, curve in curves.items():
            low, high = bootstrap(curve.returns)
            for x, axes in zip((curve.steps, curve.seconds), row, strict=True):
                seeds = f"{label} ({curve.returns.shape[1]} seeds)"
                axes.plot(x, iqm(curve.returns), color=colors[label], linewidth=2, label=seeds)
                axes.fill_between(x, low, high, color=colors[label], alpha=0.18, linewidth=0)
        for axes in row:
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(alpha=0.25)
            axes.set_xlim(left=0)
        row[0].set(xlabel="environment steps of each seed", ylabel=metric)
        row[0].set_title(env_id, loc="left", fontweight="bold")
        row[1].set_title("interquartile mean, 95 % bootstrap interval", loc="right", fontsize=9)
        row[1].set(xlabel="training time of all seeds (s), without compilation and evaluation")
        row[0].xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))
        row[0].legend(frameon=False, loc="best")
    return figure


def main(words: list[str] | None = None) -> dict[str, dict[str, Curve]]:
    """Writes the picture and prints the last point of each line. Raises RunError, OSError."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_dirs", type=Path, nargs="+", help="folders of runs")
    parser.add_argument("--out", type=Path, default=Path("compare.png"), help="picture to write")
    parser.add_argument("--metric", default="episode/return", help="column of metrics.csv")
    options = parser.parse_args(words)
    panels = group([read_run(run_dir, options.metric) for run_dir in options.run_dirs])
    try:
        draw(panels, options.metric).savefig(options.out, dpi=150)
    except ValueError as error:  # the ending names no format
        raise RunError(f"cannot write {options.out}: {error}") from None
    for env_id, curves in panels.items():
        for label, curve in curves.items():
            low, high = bootstrap(curve.returns[-1:])[:, 0]
            at = f"after {curve.steps[-1]:,.0f} steps and {curve.seconds[-1]:.1f} s"
            value = f"{iqm(curve.returns[-1]):.4g} [{low:.4g}, {high:.4g}]"
            print(f"{env_id}: {label}: {value} {at}, {curve.returns.shape[1]} seeds")
    return panels


if __name__ == "__main__":
    try:
        main()
    except (RunError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
