"""Learning curves of runs: evaluation return against environment steps, training return faintly.

    python plot.py runs/my_run                      # writes runs/my_run/learning_curve.png
    python plot.py runs/* --out compare.pdf         # also against training time
    python plot.py runs/* --out compare.pdf --labels "small lr" "large lr"
    python plot.py runs/* --tensorboard runs/tb --json scores.json

Evaluations play full episodes. The training return of an update averages the episodes that ended
in it, at first only the short ones, and is biased by that.

Runs of one script on one environment with the same options share a line: their seeds are pooled.
A copy of a script under another name is another script. Of runs with the same `--seed`, whose
agents are the same, the one with the most steps is drawn (of equally long ones, that with the most
agents). Lines are sorted by script, in the order of the arguments, then by the numbers in their
names. A name holds the options that differ between the lines of a script. Next to another script,
it also holds a word that is not the default of both (`drift=spo`) and a switch that is not at its
default.

The line is the interquartile mean over seeds (of fewer than four: the mean), the band its 95 %
percentile bootstrap interval, as in rliable (Agarwal et al. 2021, arXiv 2108.13264). Of two or
three seeds that is their range; one seed has none. Environments are resampled and drawn separately.

Training time includes evaluation, not compilation. All seeds of a run share it.

--tensorboard writes every column of every seed as event files. --json writes the evaluations in the
layout that marl-eval reads. With one of them, a picture is drawn only if --out is given.
"""

import argparse
import ast
import csv
import functools
import json
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.stats import trim_mean

# The style of all pictures of the project.
BLUE, RED, GRAY = "#3d6cb9", "#e4572e", "#5b6372"
COLORS = [BLUE, RED, "#2a9d8f", "#8e5bb5", "#d99a1c", GRAY, "#c4457d", "#6f8f2f", "#7a4b2a"]
STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": GRAY,
    "axes.grid": True,
    "axes.labelsize": 10,
    "axes.prop_cycle": f"cycler(color={COLORS})",
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
    "pdf.fonttype": 42,  # TrueType, as conferences demand
    "savefig.dpi": 200,
    "xtick.color": GRAY,
    "xtick.labelcolor": "black",
    "ytick.color": GRAY,
    "ytick.labelcolor": "black",
}
BAND = {"alpha": 0.18, "linewidth": 0}
FAINT = {"alpha": 0.35, "linewidth": 1.0}

ROOT = Path(__file__).parent
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
    path: Path
    options: dict  # config.json
    table: dict[str, np.ndarray]  # metrics.csv: columns [updates, S], NaN where a cell is empty
    curve: Curve  # a point per update, NaN where nothing was measured
    training: Curve | None  # the training return

    @property
    def size(self) -> tuple[int, int]:
        """Environment steps and agents."""
        return int(self.curve.steps[-1]), self.curve.values.shape[1]


class Line(NamedTuple):
    """Runs of one script on one environment with the same options."""

    runs: list[Run]  # by seed
    curve: Curve  # of all their seeds
    training: Curve | None


def has_rows(run_dir: Path) -> bool:
    table = run_dir / "metrics.csv"
    return table.exists() and len(table.read_text().splitlines()) > 1


def read_run(run_dir: Path, metric: str) -> Run:
    """Raises RunError."""
    try:
        options = json.loads((run_dir / "config.json").read_text())
        _ = options["script"], options["env_id"], options["seed"]
        with open(run_dir / "metrics.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        if not rows:
            raise RunError(f"{run_dir} has no rows in metrics.csv yet")
        seeds = len({row["seed"] for row in rows})
        number = lambda name: np.array([float(row[name] or "nan") for row in rows])
        names = [name for name in rows[0] if name != "env_id"]
        table = {name: number(name).reshape(-1, seeds) for name in names}
        steps, speed = table["env_steps"][:, 0], table["time/sps"][:, 0]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RunError(f"{run_dir} is no run, or damaged: {error}") from None
    if metric not in table:
        raise RunError(f"{run_dir} has no column {metric}; it has {', '.join(table)}")
    if not np.isfinite(table[metric]).any():
        raise RunError(f"{run_dir} has measured no {metric} yet")
    seconds = np.cumsum(np.diff(steps, prepend=0) * seeds / speed)
    training = table.get("episode/return") if metric == "eval/return" else None
    is_measured = training is not None and np.isfinite(training).any()
    return Run(
        path=run_dir,
        options=options,
        table=table,
        curve=Curve(steps, seconds, table[metric]),
        training=Curve(steps, seconds, training) if is_measured else None,
    )


def warn_of_continuation(run: Run):
    """An annealed learning rate rises where a run is continued for longer."""
    rates = run.table.get("optim/lr", np.zeros((1, 1)))[:, 0]
    rises = np.flatnonzero(np.diff(rates) > 1e-6 * rates[:-1])
    if rises.size:
        steps = f"{run.curve.steps[rises[0]]:,.0f}"
        message = f"{run.path}: its learning rate rises after {steps} steps, where it was continued"
        print(f"{message}; do not compare it with runs that were not", file=sys.stderr)


def split(run: Run) -> list[Run]:
    """A run for each environment. disco_meta.py has several, each with equally many agents."""
    env_ids = run.options["env_id"]
    if isinstance(env_ids, str):
        return [run]
    runs = []
    for i, env_id in enumerate(env_ids):
        if env_ids.count(env_id) > 1:
            env_id += f" #{env_ids[: i + 1].count(env_id)}"
        own = lambda x, i=i: np.split(x, len(env_ids), axis=1)[i]
        of_env = lambda curve, own=own: curve and curve._replace(values=own(curve.values))
        runs.append(
            run._replace(
                options=run.options | {"env_id": env_id},
                table={name: own(x) for name, x in run.table.items()},
                curve=of_env(run.curve),
                training=of_env(run.training),
            )
        )
    return runs


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
    """By seed. Of runs with the same `seed`, whose agents are the same, the longest.

    Of equally long ones, that with the most agents. The order of `runs` does not matter.
    """
    kept = {}
    about = "{} ({:,} steps, {} agents)".format
    for run in sorted(runs, key=lambda run: (run.size, str(run.path)), reverse=True):
        longest = kept.setdefault(run.options["seed"], run)
        if longest is not run:
            left_out, drawn = (about(x.path, *x.size) for x in (run, longest))
            print(f"{left_out} left out: its seed repeats that of {drawn}", file=sys.stderr)
    return [kept[seed] for seed in sorted(kept)]


def read_defaults(run: Run) -> dict:
    """The defaults of the script's options, out of its source; empty if there is none."""
    name = f"{run.options['script']}.py"
    source = next((x / name for x in (run.path, ROOT) if (x / name).is_file()), None)
    body = ast.parse(source.read_bytes()).body if source else []
    groups = "Environment", "Algorithm", "Run", "Config"
    fields = [x for group in body if getattr(group, "name", None) in groups for x in group.body]
    fields = [x for x in fields if isinstance(getattr(x, "value", None), ast.Constant)]
    return {x.target.id: x.value.value for x in fields if isinstance(x, ast.AnnAssign)}


def choose_names(options: dict, panel: list[dict], defaults: dict[str, dict]) -> list[str]:
    """The options of a line that its label names.

    panel: options of all lines of the environment; defaults: of the scripts of the panel.
    """
    script = options["script"]

    def is_named(name):
        value = options[name]
        values = {}  # of each script's lines
        for other in panel:
            if name in other:
                values.setdefault(other["script"], set()).add(json.dumps(other[name]))
        if any(len(found) > 1 for found in values.values()):
            return True
        if len(defaults) == 1 or name in ("script", "env_id"):
            return False
        if isinstance(value, str):
            return any(default.get(name, value) != value for default in defaults.values())
        return isinstance(value, bool) and defaults[script].get(name, value) != value

    return [name for name in options if is_named(name)]


def rank(value) -> tuple:
    """Sorts numbers by size, and before words."""
    is_number = isinstance(value, (int, float))
    return (not is_number, value if is_number else 0, str(value))


def group(runs: list[Run]) -> dict[str, dict[str, Line]]:
    """{env_id: {label: line}}, in the order of the legend."""
    lines = {}
    for run in runs:
        options = {k: v for k, v in run.options.items() if k not in POOLED}
        lines.setdefault(json.dumps(options, sort_keys=True), (options, []))[1].append(run)
    panels = {}
    for env_id in dict.fromkeys(run.options["env_id"] for run in runs):
        panel = [line for line in lines.values() if line[0]["env_id"] == env_id]
        defaults = {}  # in the order of the arguments
        for options, pooled in panel:
            defaults.setdefault(options["script"], read_defaults(pooled[0]))
        found = []
        for options, pooled in panel:
            script = options["script"]
            names = choose_names(options, [options for options, _ in panel], defaults)
            label = " ".join([script, *(f"{k}={options[k]}" for k in names)])
            place = (list(defaults).index(script), [rank(options[k]) for k in names])
            pooled = without_repeats(pooled)
            has_training = all(run.training for run in pooled)
            training = pool([run.training for run in pooled]) if has_training else None
            line = Line(pooled, pool([run.curve for run in pooled]), training)
            found.append((place, label, line))
        found.sort(key=lambda x: x[:2])
        panels[env_id] = {label: line for _, label, line in found}
    return panels


def list_labels(panels: dict[str, dict[str, Line]]) -> list[str]:
    """All labels, each once: a line of each environment has it."""
    return list(dict.fromkeys(label for lines in panels.values() for label in lines))


def rename(panels: dict[str, dict[str, Line]], labels: list[str]) -> dict[str, dict[str, Line]]:
    """The same with other labels, one for each of `list_labels`. Raises RunError."""
    old = list_labels(panels)
    if len(labels) != len(old):
        raise RunError(f"--labels needs {len(old)} names, in this order: {'; '.join(old)}")
    new = dict(zip(old, labels, strict=True))
    renamed = {}
    for env_id, lines in panels.items():
        renamed[env_id] = {new[label]: line for label, line in lines.items()}
        if len(renamed[env_id]) < len(lines):
            raise RunError(f"--labels: two lines of {env_id} have the same name")
    return renamed


# ---------------------------------------- pictures
def styled(draw: Callable) -> Callable:
    """Draws in the project's style. Imports matplotlib, which nothing else needs."""

    @functools.wraps(draw)
    def wrapper(*args, **kwargs):
        try:
            import matplotlib.figure
        except ImportError:
            raise RunError("a picture needs matplotlib: pip install matplotlib") from None
        with matplotlib.rc_context(STYLE):
            return draw(*args, **kwargs)

    return wrapper


EPISODE = "eval/return/episode_"


def read_trial(run_dir: Path) -> list[Curve]:
    """Evaluation returns of each episode of a trial; empty unless the run is of ppo_meta.py."""
    run = read_run(run_dir, "eval/return")
    names = [x for x in run.table if x.startswith(EPISODE)]
    names.sort(key=lambda x: int(x.removeprefix(EPISODE)))
    return [pool([run.curve._replace(values=run.table[name])]) for name in names]


def draw_line(places: Iterable[tuple], values: np.ndarray, color: str, **style) -> None:
    """places: (axes, x [K]); values: [K, S]. A single seed has no band."""
    band = bootstrap(values) if values.shape[1] > 1 else None
    for axes, x in places:
        axes.plot(x, iqm(values), color=color, **style)
        if band is not None:
            axes.fill_between(x, *band, color=color, **BAND)


def count(seeds: int) -> str:
    return f"{seeds} seed{'s' * (seeds > 1)}"


@styled
def draw_trial(episodes: list[Curve], title: str):
    """Returns a Figure: left, the first and the last episode against environment steps.

    Right: at the end, the return against the number of the episode.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    left, right = Figure(figsize=(10.4, 3.4)).subplots(1, 2, sharey=True)
    for k, color in ((0, COLORS[1]), (-1, COLORS[0])):
        label = f"episode {len(episodes) if k else 1} of {len(episodes)}"
        curve = episodes[k]
        draw_line([(left, curve.steps)], curve.values, color, marker="o", label=label)
    left.set(title=title, xlabel="environment steps", ylabel="return", xlim=(0, None))
    left.xaxis.set_major_formatter(EngFormatter(sep=""))
    left.legend()
    number = np.arange(1, 1 + len(episodes))
    values = np.stack([curve.values[-1] for curve in episodes])  # [K, S]
    draw_line([(right, number)], values, COLORS[0], marker="o")
    right.set(title="at the end", xlabel="episode of the trial", xticks=number)
    return left.figure


@styled
def draw(panels: dict[str, dict[str, Line]], metric: str, with_time: bool):
    """Returns a Figure: a row per environment, against steps and, on request, training time."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    columns = 1 + with_time
    labels = list_labels(panels)
    legend = max(2, 1.2 + 0.07 * max(map(len, labels)))  # inches
    figure = Figure(figsize=(5.2 * columns + legend, 3.4 * len(panels)))
    grid = figure.subplots(len(panels), columns, sharey="row", squeeze=False)
    name = {"eval/return": "return", "episode/return": "training return"}.get(metric, metric)
    for (env_id, lines), row in zip(panels.items(), grid, strict=True):
        for label, (_, curve, training) in lines.items():
            color = COLORS[labels.index(label) % len(COLORS)]
            style = {"marker": "o" if metric == "eval/return" else None}
            style["label"] = f"{label} ({count(curve.values.shape[1])})"
            places = zip(row, (curve.steps, curve.seconds), strict=False)
            draw_line(places, curve.values, color, **style)
            if training:
                row[0].plot(training.steps, iqm(training.values), color=color, **FAINT)
        for axes in row:
            axes.set_xlim(left=0)
        row[0].set(title=env_id, xlabel="environment steps", ylabel=name)
        row[0].xaxis.set_major_formatter(EngFormatter(sep=""))
        if any(line.training for line in lines.values()):
            row[0].plot([], [], color=GRAY, label="training return", **FAINT)
        # Outside the axes, where it hides no curve.
        handles, names = row[0].get_legend_handles_labels()
        row[-1].legend(handles, names, loc="upper left", bbox_to_anchor=(1, 1))
        if with_time:
            row[1].set(xlabel="training time (s)")
    return figure


@styled
def save(figure, path: Path) -> None:
    """Raises RunError, OSError."""
    try:
        figure.savefig(path, format=path.suffix[1:] or "without an ending")
    except ValueError as error:
        raise RunError(f"cannot write {path}: {error}") from None


# ----------------------------------------- exports
SUFFIX = ".plot"  # of the event files that this program may replace
SUITES = ("brax", "MinAtar", "bsuite", "XLand-MiniGrid", "MiniGrid", "MPE", "overcooked", "SMAX")


def list_seeds(run: Run, name: str) -> list[dict]:
    """For each seed that has measured something: its evaluations and its absolute metric.

    Where enjoy.py has not measured that, the last evaluation stands in, and a message says so.
    """
    absolute, summary = None, run.path / "summary.json"
    if name == "return":
        if summary.exists():
            absolute = json.loads(summary.read_text()).get("absolute_return_per_seed")
        if absolute is None:
            message = f"{run.path}: the last evaluation stands in for the absolute metric"
            print(f"{message}; `python enjoy.py {run.path}` measures it", file=sys.stderr)
    seeds = []
    for k, values in enumerate(run.curve.values.T):
        steps = {
            f"step_{m}": {"step_count": int(run.curve.steps[i]), name: [values[i]]}
            for m, i in enumerate(np.flatnonzero(np.isfinite(values)))
        }
        if steps:
            last = [absolute[k]] if absolute else list(steps.values())[-1][name]
            seeds.append(steps | {"absolute_metrics": {name: last}})
    return seeds


def write_json(panels: dict[str, dict[str, Line]], metric: str, path: Path) -> None:
    """Evaluations in marl-eval's layout: {environment: {task: {algorithm: {seed_n: steps}}}}.

    steps: {step_m: {step_count, metric: [value]}, absolute_metrics: {metric: [value]}}. The task is
    the env_id, the environment its suite. Raises OSError.
    """
    name = {"eval/return": "return"}.get(metric, metric)
    suites = {}
    for env_id, lines in panels.items():
        tasks = suites.setdefault(next((x for x in SUITES if x in env_id), env_id), {})
        tasks[env_id] = {}
        for label, line in lines.items():
            seeds = [seed for run in line.runs for seed in list_seeds(run, name)]
            # Names without commas: marl-eval does not take them.
            tasks[env_id][label.replace(",", ";")] = {f"seed_{n}": x for n, x in enumerate(seeds)}
    path.write_text(json.dumps(suites, indent=1))
    print(f"{path} written")
    for suite, tasks in suites.items():
        if len({frozenset(task) for task in tasks.values()}) > 1:
            message = f"{path}: marl-eval needs lines of the same names in all of {suite}"
            print(f"{message} (see --labels)", file=sys.stderr)
        lines = [(label, seeds) for task in tasks.values() for label, seeds in task.items()]
        sizes = {x: {(len(seeds), len(s)) for s in seeds.values()} for x, seeds in lines}
        if len({size for found in sizes.values() for size in found}) > 1:
            found = [f"{x} {max(size)}" for x, size in sizes.items()]
            message = f"{path}: marl-eval needs as many seeds and evaluations of each line"
            print(f"{message}; in {suite}: {', '.join(found)}", file=sys.stderr)


def write_tensorboard(runs: list[Run], folder: Path) -> None:
    """One event file per seed, <folder>/<run>/seed_<k>, with every column of metrics.csv.

    Replaces what an earlier call has written. Raises RunError, OSError.
    """
    try:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary
    except ImportError:
        raise RunError("--tensorboard needs tensorboardX: pip install tensorboardX") from None
    paths = [run.path.resolve() for run in runs]
    base = os.path.commonpath([path.parent for path in paths])
    for run, path in zip(runs, paths, strict=True):
        columns = {k: x for k, x in run.table.items() if k not in ("update", "seed", "env_steps")}
        start = (run.path / "metrics.csv").stat().st_mtime - run.curve.seconds[-1]
        for k in range(run.curve.values.shape[1]):
            target = folder / path.relative_to(base) / f"seed_{k}"
            target.mkdir(parents=True, exist_ok=True)
            for old in target.glob(f"events.out.tfevents.*{SUFFIX}"):
                old.unlink()
            writer = EventsWriter(str(target / "events"), SUFFIX)
            for i, (steps, seconds) in enumerate(zip(*run.curve[:2], strict=True)):
                cells = {name: x[i, k] for name, x in columns.items() if np.isfinite(x[i, k])}
                values = [Summary.Value(tag=tag, simple_value=x) for tag, x in cells.items()]
                event = Event(wall_time=start + seconds, step=int(steps))
                event.summary.value.extend(values)
                writer.write_event(event)
            writer.close()
    print(f"{folder} written; tensorboard --logdir {folder}")


# -------------------------------------------- main
OUT_HELP = (
    "a .png or .pdf; if not given: learning_curve.png in the run folder, or compare.png of several"
)


def main(words: list[str] | None = None) -> dict[str, dict[str, Curve]]:
    """Writes what is asked for and prints the last point of each line. Raises RunError, OSError."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_dirs", type=Path, nargs="+", help="run folders")
    parser.add_argument("--out", type=Path, help=OUT_HELP)
    parser.add_argument("--metric", default="eval/return", help="column of metrics.csv")
    parser.add_argument("--labels", nargs="+", help="names of the lines, in the legend's order")
    parser.add_argument("--tensorboard", type=Path, metavar="DIR", help="event files to write")
    parser.add_argument("--json", type=Path, metavar="FILE", help="scores to write, for marl-eval")
    options = parser.parse_args(words)
    run_dirs = list(dict.fromkeys(options.run_dirs))
    is_single = len(options.run_dirs) == 1
    if not is_single:  # `runs/*` may hold other things
        for path in run_dirs:
            if path.exists() and not has_rows(path):
                print(f"{path} left out: it has no rows in metrics.csv", file=sys.stderr)
        run_dirs = [x for x in run_dirs if has_rows(x) or not x.exists()]
        if not run_dirs:
            raise RunError("none of these is a run")
    runs = [read_run(run_dir, options.metric) for run_dir in run_dirs]
    for run in runs:
        warn_of_continuation(run)
    panels = group([part for run in runs for part in split(run)])
    own_names = {env_id: list(lines) for env_id, lines in panels.items()}
    if options.labels:
        panels = rename(panels, options.labels)
    out = options.out
    if out is None and not options.json and not options.tensorboard:
        out = run_dirs[0] / "learning_curve.png" if is_single else Path("compare.png")
    if out:
        trial = read_trial(run_dirs[0]) if is_single and options.metric == "eval/return" else []
        if trial:
            (title,) = options.labels or panels
            figure = draw_trial(trial, title)
        else:
            figure = draw(panels, options.metric, not is_single)
        save(figure, out)
    for env_id, lines in panels.items():
        for own_name, (label, line) in zip(own_names[env_id], lines.items(), strict=True):
            curve = line.curve
            value = f"{iqm(curve.values[-1]):.4g}"
            if curve.values.shape[1] > 1:
                low, high = bootstrap(curve.values[-1:])[:, 0]
                value += f" [{low:.4g}, {high:.4g}]"
            at = f"after {curve.steps[-1]:,.0f} steps and {curve.seconds[-1]:.1f} s"
            what = f"{label} ({own_name})" if options.labels else label
            print(f"{env_id}: {what}: {value} {at}, {count(curve.values.shape[1])}")
    if out:
        print(f"{out} written")
    if options.tensorboard:
        write_tensorboard(runs, options.tensorboard)
    if options.json:
        write_json(panels, options.metric, options.json)
    return {x: {label: line.curve for label, line in lines.items()} for x, lines in panels.items()}


def cli():
    try:
        main()
    except (RunError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    cli()
