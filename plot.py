"""Learning curves of runs: evaluation return against environment steps, training return faintly.

    python plot.py runs/my_run                      # writes runs/my_run/learning_curve.png
    python plot.py runs/* --out compare.png         # also against training time

Evaluations play full episodes. The training return of an update averages the episodes that ended
in it, at first only the short ones, and is biased by that.

Runs of one script on one environment with the same options share a line: their seeds are pooled.
A copy of a script under another name is another script. Of runs with the same `--seed`, whose
agents are the same, the one with the most is drawn.
The line is the interquartile mean over seeds (of fewer than four: the mean), the band its 95 %
percentile bootstrap interval, as in rliable (Agarwal et al. 2021, arXiv 2108.13264). Environments
are resampled and drawn separately.

Training time includes evaluation, not compilation. All seeds of a run share it.
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
from cycler import cycler
from matplotlib.ticker import EngFormatter
from scipy.stats import trim_mean

# The style of all pictures of the project.
BLUE, RED, GRAY = "#3d6cb9", "#e4572e", "#5b6372"
COLORS = [BLUE, RED, "#2a9d8f", "#8e5bb5", "#d99a1c", GRAY, "#c4457d", "#6f8f2f", "#7a4b2a"]
STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": GRAY,
    "axes.grid": True,
    "axes.labelsize": 10,
    "axes.prop_cycle": cycler(color=COLORS),
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.xmargin": 0.02,
    "figure.constrained_layout.use": True,
    "font.size": 9,
    "grid.color": "#e6e6e6",
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 4,
    "savefig.dpi": 200,
    "xtick.color": GRAY,
    "xtick.labelcolor": "black",
    "ytick.color": GRAY,
    "ytick.labelcolor": "black",
}
BAND = {"alpha": 0.18, "linewidth": 0}
FAINT = {"alpha": 0.35, "linewidth": 1.0}

POINTS = 100  # of a line; updates in between are averaged
# Options in which runs of one line may differ.
POOLED = ["seed", "num_seeds", "run_dir", "track", "distributed"]


class RunError(Exception):
    """A wrong input, and what to change."""


class Curve(NamedTuple):
    """One metric of several seeds at K points."""

    steps: np.ndarray  # [K] environment steps of each seed
    seconds: np.ndarray  # [K] of training, the mean over runs
    values: np.ndarray  # [K, S]


class Run(NamedTuple):
    options: dict  # config.json
    curve: Curve  # a point per update, NaN where nothing was measured
    training: Curve | None  # the training return


def read_run(run_dir: Path, metric: str) -> Run:
    """Raises RunError."""
    try:
        options = json.loads((run_dir / "config.json").read_text())
        with open(run_dir / "metrics.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        _ = options["script"], options["env_id"]
        seeds = len({row["seed"] for row in rows})
        number = lambda name: np.array([float(row[name] or "nan") for row in rows])
        names = ["env_steps", "time/sps", metric]
        if metric == "eval/return" and "episode/return" in rows[0]:
            names.append("episode/return")
        table = {name: number(name).reshape(-1, seeds) for name in names}  # [updates, S] each
    except KeyError as error:
        raise RunError(f"{run_dir} has no {error}: is it a run, and is the metric one?") from None
    except (OSError, ValueError, TypeError, IndexError) as error:
        raise RunError(f"{run_dir} is no run, or damaged: {error}") from None
    if not np.isfinite(table[metric]).any():
        raise RunError(f"{run_dir} has measured no {metric} yet")
    steps = table["env_steps"][:, 0]
    seconds = np.cumsum(np.diff(steps, prepend=0) * seeds / table["time/sps"][:, 0])
    training = table["episode/return"] if len(names) > 3 else np.array(np.nan)
    return Run(
        options=options,
        curve=Curve(steps, seconds, table[metric]),
        training=Curve(steps, seconds, training) if np.isfinite(training).any() else None,
    )


def pool(curves: list[Curve]) -> Curve:
    """All seeds of several runs, averaged within equal intervals of environment steps.

    An interval counts if all runs measured something in it. A seed without a value in it is
    interpolated, and keeps its last value to the end.
    """
    edges = np.linspace(0, max(curve.steps[-1] for curve in curves), POINTS + 1)
    means = []
    for curve in curves:
        interval = np.clip(np.searchsorted(edges, curve.steps) - 1, 0, POINTS - 1)  # [updates]
        table = np.column_stack([curve.steps, curve.seconds, curve.values])
        mean = np.full((POINTS, table.shape[1]), np.nan)
        for k in np.unique(interval):
            rows = table[interval == k]
            rows = rows[np.isfinite(rows[:, 2:]).any(axis=1)]
            count = np.isfinite(rows).sum(axis=0)
            mean[k] = np.where(count > 0, np.nansum(rows, axis=0) / np.maximum(count, 1), np.nan)
        means.append(mean)
    values = np.hstack([mean[:, 2:] for mean in means])  # [POINTS, S]
    for seed in values.T:
        known = np.flatnonzero(np.isfinite(seed))
        if known.size:
            seed[:] = np.interp(np.arange(POINTS), known, seed[known], left=np.nan)
    kept = np.isfinite(np.hstack([values, *(mean[:, :2] for mean in means)])).all(axis=1)
    if not kept.any():
        raise RunError("these runs have no environment steps in common where all have measured")
    steps, seconds = np.mean([mean[kept, :2] for mean in means], axis=0).T
    return Curve(steps, seconds, values[kept])


def iqm(values: np.ndarray) -> np.ndarray:
    """Interquartile mean over the last axis: a quarter is cut off at either end, rounded down."""
    return trim_mean(values, 0.25, axis=-1)


def bootstrap(values: np.ndarray, resamples: int = 2000) -> np.ndarray:
    """[K, S] -> 95 % interval of the interquartile mean [2, K], the same draws at all points."""
    seeds = values.shape[1]
    draws = np.random.default_rng(0).integers(seeds, size=(resamples, seeds))
    means = np.stack([iqm(row[draws]) for row in values])  # [K, resamples]
    return np.quantile(means, [0.025, 0.975], axis=1)


def without_repeats(runs: list[Run]) -> list[Run]:
    """Of runs with the same `seed`, whose agents are the same, the one with the most agents."""
    kept = {}
    for run in sorted(runs, key=lambda run: run.curve.values.shape[1]):
        kept[run.options["seed"]] = run
    if len(kept) < len(runs):
        print(f"runs left out, as their seed repeats: {len(runs) - len(kept)}", file=sys.stderr)
    return list(kept.values())


def group(runs: list[Run]) -> dict[str, dict[str, tuple[Curve, Curve | None]]]:
    """{env_id: {label: (curve, training)}}; a label names the options that differ."""
    lines = {}
    for run in runs:
        options = {k: v for k, v in run.options.items() if k not in POOLED}
        lines.setdefault(json.dumps(options, sort_keys=True), []).append(run)
    panels = {}
    for text, pooled in lines.items():
        pooled = without_repeats(pooled)
        options = json.loads(text)
        siblings = [
            other
            for other in map(json.loads, lines)
            if all(other[k] == options[k] for k in ("script", "env_id"))
        ]
        names = [k for k in options if any(other.get(k) != options[k] for other in siblings)]
        label = " ".join([options["script"], *(f"{k}={options[k]}" for k in names)])
        training = None
        if all(run.training for run in pooled):
            training = pool([run.training for run in pooled])
        curves = (pool([run.curve for run in pooled]), training)
        panels.setdefault(options["env_id"], {})[label] = curves
    return panels


EPISODE = "eval/return/episode_"


def read_trial(run_dir: Path) -> list[Curve]:
    """Evaluation returns of each episode of a trial; empty unless the run is of ppo_meta.py."""
    header = (run_dir / "metrics.csv").read_text().split("\n", 1)[0].split(",")
    names = [x for x in header if x.startswith(EPISODE)]
    names.sort(key=lambda x: int(x.removeprefix(EPISODE)))
    return [pool([read_run(run_dir, name).curve]) for name in names]


@matplotlib.rc_context(STYLE)
def draw_trial(episodes: list[Curve], env_id: str) -> matplotlib.figure.Figure:
    """First and last episode against steps, and at the end the return against the episode."""
    figure = matplotlib.figure.Figure(figsize=(10.4, 3.4))
    left, right = figure.subplots(1, 2, sharey=True)
    for k, color in ((0, COLORS[1]), (-1, COLORS[0])):
        curve = episodes[k]
        label = f"episode {len(episodes) if k else 1} of {len(episodes)}"
        left.plot(curve.steps, iqm(curve.values), color=color, marker="o", label=label)
        left.fill_between(curve.steps, *bootstrap(curve.values), color=color, **BAND)
    left.set(title=env_id, xlabel="environment steps", ylabel="return", xlim=(0, None))
    left.xaxis.set_major_formatter(EngFormatter(sep=""))
    left.legend()
    number = np.arange(1, 1 + len(episodes))
    values = np.stack([curve.values[-1] for curve in episodes])  # [K, S]
    right.plot(number, iqm(values), color=COLORS[0], marker="o")
    right.fill_between(number, *bootstrap(values), color=COLORS[0], **BAND)
    right.set(title="at the end", xlabel="episode of the trial", xticks=number)
    return figure


@matplotlib.rc_context(STYLE)
def draw(panels: dict, metric: str, with_time: bool) -> matplotlib.figure.Figure:
    """A row per environment: against steps and, on request, against training time."""
    columns = 1 + with_time
    figure = matplotlib.figure.Figure(figsize=(5.2 * columns + 2, 3.4 * len(panels)))
    grid = figure.subplots(len(panels), columns, sharey="row", squeeze=False)
    labels = list(dict.fromkeys(label for lines in panels.values() for label in lines))
    name = {"eval/return": "return", "episode/return": "training return"}.get(metric, metric)
    for (env_id, lines), row in zip(panels.items(), grid, strict=True):
        for label, (curve, training) in lines.items():
            color = COLORS[labels.index(label) % len(COLORS)]
            seeds = curve.values.shape[1]
            legend = f"{label} ({seeds} seed{'s' * (seeds > 1)})"
            marker = "o" if metric == "eval/return" else None
            band = bootstrap(curve.values)
            for axis, axes in zip(("steps", "seconds"), row, strict=False):
                x = getattr(curve, axis)
                axes.plot(x, iqm(curve.values), color=color, marker=marker, label=legend)
                axes.fill_between(x, *band, color=color, **BAND)
            if training:
                row[0].plot(training.steps, iqm(training.values), color=color, **FAINT)
        for axes in row:
            axes.set_xlim(left=0)
        row[0].set(title=env_id, xlabel="environment steps", ylabel=name)
        row[0].xaxis.set_major_formatter(EngFormatter(sep=""))
        if any(training for _, training in lines.values()):
            row[0].plot([], [], color=GRAY, label="training return", **FAINT)
        # Outside the axes, where it hides no curve.
        handles, names = row[0].get_legend_handles_labels()
        row[-1].legend(handles, names, loc="upper left", bbox_to_anchor=(1, 1))
        if with_time:
            row[1].set(xlabel="training time (s)")
    return figure


def main(words: list[str] | None = None) -> dict[str, dict[str, Curve]]:
    """Writes the picture and prints the last point of each line. Raises RunError, OSError."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_dirs", type=Path, nargs="+", help="run folders")
    parser.add_argument("--out", type=Path, help="picture to write")
    parser.add_argument("--metric", default="eval/return", help="column of metrics.csv")
    options = parser.parse_args(words)
    is_single = len(options.run_dirs) == 1
    if not is_single:  # `runs/*` may hold other things
        found = [x for x in options.run_dirs if (x / "metrics.csv").exists() or not x.exists()]
        for path in set(options.run_dirs) - set(found):
            print(f"{path} left out: it has no metrics.csv", file=sys.stderr)
        if not found:
            raise RunError("none of these is a run")
        options.run_dirs = found
    out = options.out
    if out is None:
        out = options.run_dirs[0] / "learning_curve.png" if is_single else Path("compare.png")
    panels = group([read_run(run_dir, options.metric) for run_dir in options.run_dirs])
    trial = read_trial(options.run_dirs[0]) if is_single else []
    try:
        if trial and options.metric == "eval/return":
            (env_id,) = panels
            draw_trial(trial, env_id).savefig(out, dpi=STYLE["savefig.dpi"])
        else:
            draw(panels, options.metric, not is_single).savefig(out, dpi=STYLE["savefig.dpi"])
    except ValueError as error:  # the suffix names no format
        raise RunError(f"cannot write {out}: {error}") from None
    panels = {env_id: {k: curve for k, (curve, _) in x.items()} for env_id, x in panels.items()}
    for env_id, lines in panels.items():
        for label, curve in lines.items():
            low, high = bootstrap(curve.values[-1:])[:, 0]
            at = f"after {curve.steps[-1]:,.0f} steps and {curve.seconds[-1]:.1f} s"
            seeds = curve.values.shape[1]
            value = f"{iqm(curve.values[-1]):.4g} [{low:.4g}, {high:.4g}]"
            print(f"{env_id}: {label}: {value} {at}, {seeds} seed{'s' * (seeds > 1)}")
    print(f"{out} written")
    return panels


if __name__ == "__main__":
    try:
        main()
    except (RunError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
