"""docs/results.md, its pages in docs/results and their pictures, from benchmarks/results.

`python benchmarks/learning.py --report` writes them. The report reads nothing but the table in
learning.py, the CSVs and, for the page on GPUs, gpu.md. How to add a system or an environment:
docs/results/CONTRIBUTING.md.
"""

import csv
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import learning
import matplotlib
import matplotlib.figure
import numpy as np
from learning import ROOT, Row
from matplotlib.ticker import EngFormatter, LogLocator, NullLocator

from plot import BAND, COLORS, STYLE, bootstrap, iqm

DOCS = ROOT / "docs"
OVERVIEW = {  # environment: our system in the table of the first page
    "CartPole-v1": "ppo_ff",
    "Acrobot-v1": "ppo_ff",
    "MountainCar-v0": "ppo_obs_norm",
    "Pendulum-v1": "ppo_obs_norm",
    "MountainCarContinuous-v0": "ppo_obs_norm",
    "brax/inverted_double_pendulum": "ppo_obs_norm",
    "brax/hopper": "ppo_obs_norm 16 envs gamma 0.995",
    "Breakout-MinAtar": "ppo_ff",
    "Asterix-MinAtar": "ppo_ff",
    "SpaceInvaders-MinAtar": "ppo_ff",
    "Freeway-MinAtar": "ppo_ff",
    "MiniGrid-Empty-6x6": "ppo_rnn 256 envs",
    "MiniGrid-DoorKey-5x5": "ppo_rnn 1M steps",
    "MiniGrid-DoorKey-6x6": "ppo_rnn 1M steps",
    "MiniGrid-UnlockPickUp": "ppo_rnn",
    "MiniGrid-FourRooms": "ppo_rnn",
    "MiniGrid-MemoryS8": "ppo_rnn",
    "MiniGrid-MemoryS8 trials": "ppo_meta",
    "Pendulum-v1 without velocity": "ppo_vtrace",
    "MPE_simple_spread_v3": "ippo 4 epochs",
    "MPE_simple_reference_v3": "mappo",
    "HeuristicEnemySMAX/3m": "mappo 4 epochs without entropy bonus",
    "HeuristicEnemySMAX/2s3z": "ippo_rnn 4 epochs without entropy bonus",
    "Catch-8x8": "disco",
}
COMMITS = ("73daa3b", "427f887")  # of curves: no algorithm has changed since
PICTURED = [
    "CartPole-v1",
    "Pendulum-v1",
    "Breakout-MinAtar",
    "brax/hopper",
    "MiniGrid-DoorKey-5x5",
    "MPE_simple_spread_v3",
]
PEER_NAMES = {
    "purejaxrl": "PureJaxRL",
    "rejax": "rejax",
    "stoix": "Stoix",
    "cleanrl": "CleanRL",
    "xland": "XLand-MiniGrid",
    "jaxmarl": "JaxMARL",
}
BLUE, RED, TEAL, PURPLE, GOLD, GRAY, PINK, OLIVE, BROWN = COLORS
SYSTEM_COLORS = {  # of a system, or of all whose name begins so; in every picture
    "ppo_ff": BLUE,
    "ppo_continuous tanh": BROWN,
    "ppo_continuous beta": GRAY,
    "ppo_continuous": BLUE,
    "ppo_obs_norm 16 envs": BROWN,
    "ppo_obs_norm": RED,
    "ppo_vtrace no memory": GRAY,
    "ppo_vtrace uniform draw": TEAL,
    "ppo_vtrace all segments GAE once": GOLD,
    "ppo_vtrace all segments": RED,
    "ppo_vtrace": OLIVE,
    "ppo_drift clip": BLUE,
    "ppo_drift kl_penalty": RED,
    "ppo_drift adaptive_kl": TEAL,
    "ppo_drift dpo": PURPLE,
    "ppo_drift spo": GOLD,
    "ppo_rnn no memory": GRAY,
    "ppo_rnn min advantage std": RED,
    "ppo_rnn 256 envs": BROWN,
    "ppo_rnn 1M steps": BROWN,
    "ppo_rnn": BLUE,
    "ppo_meta reset memory": RED,
    "ppo_meta no memory": GRAY,
    "ppo_meta": BLUE,
    "ippo 4 epochs": PURPLE,
    "ippo_rnn 4 epochs": OLIVE,
    "ippo_rnn": RED,
    "ippo": GRAY,
    "mappo 4 epochs": TEAL,
    "mappo": BLUE,
    "disco random": GRAY,
    "disco policy_gradient": RED,
    "disco actor_critic": GOLD,
    "disco": BLUE,
    "purejaxrl": TEAL,
    "rejax": OLIVE,
    "stoix": GOLD,
    "cleanrl": PINK,
    "xland": PURPLE,
    "jaxmarl ippo_ff": GOLD,
    "jaxmarl ippo_rnn": PINK,
    "jaxmarl mappo_rnn": BROWN,
}


# ---------------------------------------------- read
class Rate(NamedTuple):
    """Steps/s of the timed calls."""

    median: float
    low: float
    high: float


class Curve(NamedTuple):
    """One metric of S seeds at K points."""

    about: dict[str, str]  # the comments of the CSV
    steps: np.ndarray  # [K]
    values: np.ndarray  # [K, S]


def read_curve(path: Path) -> Curve:
    lines = path.read_text().splitlines()
    comments = [line[2:].split(": ", 1) for line in lines if line.startswith("#")]
    table = np.array([x.split(",") for x in lines if x[:1].isdigit()], float)
    steps = np.unique(table[:, 1])
    seeds = np.unique(table[:, 0])
    values = np.full((len(steps), len(seeds)), np.nan)
    values[np.searchsorted(steps, table[:, 1]), table[:, 0].astype(int)] = table[:, 2]
    for seed in values.T:  # training returns: no episode may have ended in an interval
        known = np.isfinite(seed)
        seed[:] = np.interp(steps, steps[known], seed[known], left=np.nan)
    complete = np.isfinite(values).all(axis=1)
    return Curve(dict(comments), steps[complete], values[complete])


def read_clock() -> list[dict[str, str]]:
    path = learning.RESULTS / "clock.csv"
    return list(csv.DictReader(path.read_text().splitlines())) if path.exists() else []


def read_results() -> tuple[dict[str, list[tuple[Row, Curve]]], dict[str, Rate]]:
    """{section: rows and curves} of the CSVs that exist, and steps/s by name."""
    curves = {}
    for section, tasks in learning.SECTIONS.items():
        rows = [Row(task, system) for task in tasks for system in task.systems]
        paths = [learning.RESULTS / f"{row.name}.csv" for row in rows]
        found = [(row, path) for row, path in zip(rows, paths, strict=True) if path.exists()]
        curves[section] = [(row, read_curve(path)) for row, path in found]
    measured = ("steps_per_second", "min", "max")
    rates = {x["name"]: Rate(*(float(x[k]) for k in measured)) for x in read_clock()}
    return curves, rates


# ---------------------------------------- statistics
def final_returns(curve: Curve) -> np.ndarray:
    """[S] of each seed in the last 5% of the steps."""
    return curve.values[curve.steps > 0.95 * curve.steps[-1]].mean(axis=0)


def steps_to(curve: Curve, threshold: float) -> np.ndarray:
    """[S] environment steps of each seed to its first point at or above the threshold, or inf."""
    reached = curve.values >= threshold
    return np.where(reached.any(axis=0), curve.steps[reached.argmax(axis=0)], np.inf)


def median_interval(values: np.ndarray, resamples: int = 2000) -> tuple[float, float, float]:
    """Median and its 95% percentile bootstrap interval; infinities are allowed."""
    draws = np.random.default_rng(0).integers(len(values), size=(resamples, len(values)))
    medians = np.sort(np.quantile(values[draws], 0.5, axis=1, method="higher"))
    low, high = (medians[int(q * (resamples - 1))] for q in (0.025, 0.975))
    return np.quantile(values, 0.5, method="higher"), low, high


# --------------------------------------------- words
def short(x: float, unit: str = "") -> str:
    if not np.isfinite(x):
        return "never"
    for size, suffix in ((1e6, "M"), (1e3, "k")):
        if not unit and x >= size:
            return f"{x / size:.3g}{suffix}"
    return f"{x:.3g}{unit}"


def interval(values: np.ndarray, unit: str = "") -> str:
    middle, low, high = (short(x, unit) for x in median_interval(values))
    return middle if low == middle == high else f"{middle} [{low}, {high}]"


def three_digits(x: float) -> str:
    return f"{x:.0f}" if x >= 100 else f"{x:.3g}"


def duration(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 60 else f"{seconds / 60:.2g} min"


def return_of(curve: Curve) -> str:
    final = final_returns(curve)
    low, high = bootstrap(final[None])[:, 0]
    return f"{iqm(final):.4g} [{low:.4g}, {high:.4g}]"


def label(row: Row) -> str:
    """The name of a system with its settings, the same everywhere."""
    kind, *words = row.system.split()
    if not row.is_peer and not words and "--num-envs" in row.words:
        words = [row.words[row.words.index("--num-envs") + 1], "envs"]
    options = re.sub(r"(?:^| )(?:LR=|lr )(\S+)", r", learning rate \1", " ".join(words))
    options = re.sub(r" gamma (\S+)", r", discount factor \1", options)
    options = re.sub(r"(\d+) envs", r"\1 environments", options).removeprefix(", ")
    return ", ".join(filter(None, [PEER_NAMES.get(kind, kind), options]))


def short_label(row: Row) -> str:
    """In pictures, which leave the settings of peers to the tables."""
    return label(row._replace(system=family_of(row))) if row.is_peer else label(row)


def family_of(row: Row) -> str:
    """The same for all settings of a peer: they differ in learning rate or environments."""
    if not row.is_peer:
        return row.system
    return re.sub(r" (LR=\S+|lr \S+|\d+ envs)", "", row.system)


def split_variants(curves: list[tuple[Row, Curve]], family=family_of):
    """Of the curves of one family, the one with the highest return; and all others.

    By default a family is a peer's script with all its settings, or one row of ours.
    """
    best = {}
    for row, curve in curves:
        key, score = (row.task.title, family(row)), iqm(final_returns(curve))
        if key not in best or score > best[key][0]:
            best[key] = (score, row)
    chosen = [row for _, row in best.values()]
    is_chosen = lambda pair: pair[0] in chosen
    return [x for x in curves if is_chosen(x)], [x for x in curves if not is_chosen(x)]


def pictured(curves: list[tuple[Row, Curve]]) -> list[tuple[Row, Curve]]:
    """One curve of each script: the best of its learning rates (peers) or numbers of epochs."""
    family = lambda row: re.sub(r" \d+ epochs.*", "", family_of(row))
    return split_variants(curves, family)[0]


def file_name(section: str) -> str:
    return re.sub(r"\W+", "_", section.lower())


# --------------------------------------------- pages
FIRST_PAGE = """# Results

All numbers are measured ([how](#how-it-was-measured)). Each command links to the curves of all
seeds; a peer is another implementation of PPO. Returns: interquartile mean [95% interval]; (t): of
training; \\*: measured with an earlier version of the script. Gymnasium, Craftax and others:
[environments](environments.md). Speed with equal networks and sizes:
[benchmarks](../benchmarks/RESULTS.md).

{table}

![Learning curves in six environments](results/overview.png)

{caption}

All environments, systems and our commands: {pages}.
[Add a system or an environment](results/CONTRIBUTING.md).

## How it was measured

The CSVs in [benchmarks/results](../benchmarks/results) hold the command, commit and versions of
every curve; `python benchmarks/learning.py --report` writes these pages from them. Python 3.11, no
GPU. **A star (\\*) marks curves of ours that were measured with earlier versions of the scripts**,
which draw other random numbers (the commits are in the CSVs): today's commands, with the same
settings, give similar but not identical curves. The commands in the table leave out evaluation
options and the number of seeds.

For each environment the table has one script, chosen after seeing the results; on simple_spread
also the number of epochs (two are the default). The settings in SMAX were found on 3m, on another
seed. How settings were found, on which environments and seeds: [ours](../benchmarks/tuning.md),
[peers](../benchmarks/peers.md#learning-curves).

- **return**: interquartile mean over seeds (of three seeds: the mean) and its 95% bootstrap
  interval, in the last 5% of the steps. Evaluations play 128 full episodes from fresh resets (32 in
  MinAtar and Brax, 1280 in rings) with sampled actions. In trials, the return is the mean over all
  their episodes, the first included. Training returns of a peer that does not evaluate are marked
  (t): small differences from evaluations mean nothing. "wins" is the share of training episodes
  that were won.
- **seeds**: five to 32, on the pages. CleanRL on the continuous tasks and Stoix on
  MountainCarContinuous-v0 are slow on a CPU: three. Stoix on Pendulum-v1: ten, where ours have 32.
- **time**: training of one seed on two idle cores of a virtual server, without evaluation and
  compilation (which takes 5 to 30 s more): steps divided by the steps/s that `python
  benchmarks/learning.py --clock` measures, the systems of a task taking turns
  ([clock.csv](../benchmarks/results/clock.csv)); empty: not measured. The server's speed varies by
  a factor of two from day to day: compare within an environment only. XLand-MiniGrid is timed with
  its own layers, which are made for GPUs: with equivalent matrix products it is nine times as fast
  here.
- **best peer**: that with the highest return over all its settings. Peers run with their published
  settings for the environment, else with those of their default environment; what was changed is in
  the name.
- On the pages of the families, **mean ± std** has the standard deviation of these seeds. **steps
  to** a threshold is the median over seeds of the first point of the curve at or above it, with its
  95% bootstrap interval; it can differ from where the drawn interquartile mean crosses. **seconds
  to** it are these steps divided by the steps/s. Curves have a point per evaluation, those of
  training returns up to 50. A seed above the threshold at the first point may have reached it
  earlier. Without brackets, both ends round to the median; "never" means that at least half of the
  seeds did not get there. Thresholds are ours, near what solves a task. **steps/s** is the median
  of the timed calls [slowest, fastest]. If a peer was run with several settings, the tables and
  pictures show those with the highest return; the others follow in a table of their own.

Peers: {peers}.
"""
CAPTION = """Lines: interquartile means over seeds, solid ours, dashed peers. Bands: 95% bootstrap
intervals. Dotted: the threshold, near what solves the task."""
COMMANDS = """
## Commands

Rows with a star: run the command at the commit in the CSV, since defaults have changed. The others
run as they are.

```bash
"""
PAGE = """# {section}

From [the CSVs](../../benchmarks/results); [what the columns
mean](../results.md#how-it-was-measured).{machines}
"""
TRIALS = """
## Episodes of a trial

`Which place pays`: its tasks are written by `python benchmarks/make_rulesets.py runs/places.bz2`.

Returns of the episodes of a trial, on test tasks, which training never draws (mean ± standard
deviation over seeds):

"""
LEVELS = """
## Time to PureJaxRL's return

The networks differ: a small CNN in `ppo_ff.py`, MLPs on flattened observations in PureJaxRL and
Stoix, as in their published settings. Steps and seconds to the final return of PureJaxRL:

| environment | final return | system | steps to it | seconds to it |
|---|---|---|---|---|
"""
ABLATIONS = """# Ablations

One detail changed at a time, by options or by replacements in the script's text
([ablations.py](../../benchmarks/ablations.py); the CSV names them):
`python benchmarks/learning.py --ablations`. Where the intervals of a change and of the unchanged
script overlap, these seeds do not show a difference; an effect may still exist.
"""
GPU = """# On a GPU

Measured with `python benchmarks/gpu.py`: [the file](../../benchmarks/results/gpu.md), [what it
shows](../../benchmarks/RESULTS.md#on-a-gpu). Steps/s of the command lines: those of the whole run,
as in its `summary.json`; of the other tables: the median of three calls after a warm-up.

"""
HEADER = """
| system | return | mean ± std | seeds | steps | steps to {x:g} | seconds to {x:g} | steps/s |
|---|---|---|---|---|---|---|---|
"""
CSVS = "../../benchmarks/results"


def report() -> dict[str, str]:
    """The text of each page, by its path in docs."""
    results, rates = read_results()
    pages = {"results.md": first_page(results, rates)}
    for section, curves in results.items():
        if curves:
            pages[f"results/{file_name(section)}.md"] = family_page(section, curves, rates)
    pages["results/ablations.md"] = ABLATIONS + ablation_tables()
    path = learning.RESULTS / "gpu.md"
    if path.exists():
        pages["results/gpu.md"] = GPU + path.read_text()
    return pages


def first_page(results, rates) -> str:
    curves = [x for section in results.values() for x in section]
    text = "| environment | command | return | time | best peer | its return | its time |\n"
    text += "|---|---|---|---|---|---|---|\n"
    for title, system in OVERVIEW.items():
        of_task = [(row, curve) for row, curve in curves if row.task.title == title]
        ours = [x for x in of_task if x[0].system == system]
        theirs = [x for x in of_task if x[0].is_peer]
        if ours:
            peer = max(theirs, key=lambda x: iqm(final_returns(x[1])), default=None)
            shorter = [x for x in of_task if x[0].system == f"{system} 1M steps"]
            text += overview_row(*ours[0], peer, shorter, rates)
    links = [
        f"[{section}](results/{file_name(section)}.md)"
        for section, found in results.items()
        if found
    ]
    links += ["[Ablations](results/ablations.md)", "[On a GPU](results/gpu.md)"]
    pages = ",\n".join(links)
    kinds = dict.fromkeys(row.kind for row, _ in curves if row.is_peer)
    about = {row.kind: curve.about.get("peer", row.kind) for row, curve in curves}
    peers = "; ".join(learning.PEERS.get(kind, about[kind]) for kind in kinds)
    return FIRST_PAGE.format(table=text.strip(), caption=CAPTION, pages=pages, peers=peers)


def earlier(row: Row, curve: Curve) -> str:
    """A star for curves of ours that an earlier version of the scripts has learned."""
    is_earlier = not row.is_peer and curve.about["commit"] not in COMMITS
    return r" \*" if is_earlier else ""


def overview_row(row: Row, curve: Curve, peer, shorter, rates: dict[str, Rate]) -> str:
    """`shorter`: our system trained as long as the peer, where that differs."""
    time = lambda row, x: (
        duration(x.steps[-1] / rates[row.name].median) if row.name in rates else ""
    )
    words = re.sub(r" --(num-evals|eval-episodes) \d+", "", " " + shlex.join(row.words))
    wins = ", wins" if row.task.wins else ""
    cells = [
        row.task.title + wins,
        f"[`{row.kind}.py{words}`](../benchmarks/results/{row.name}.csv)",
        return_of(curve) + earlier(row, curve),
        time(row, curve),
    ]
    if shorter:
        early = f"{iqm(final_returns(shorter[0][1])):.2g}"
        cells[2] += f"; {early} after {short(shorter[0][1].steps[-1])} steps"
    if peer:
        training = "" if row.task.wins or peer[1].about["returns"].startswith("eval") else " (t)"
        length = f" after {short(peer[1].steps[-1])} steps" if shorter else ""
        cells += [label(peer[0]), return_of(peer[1]) + training + length, time(*peer)]
    else:
        cells += ["none", "", ""]
    return "| " + " | ".join(cells) + " |\n"


def table_row(row: Row, curve: Curve, rate: Rate | None) -> str:
    final = final_returns(curve)
    steps = steps_to(curve, row.task.threshold)
    training = "" if row.task.wins or curve.about["returns"].startswith("evaluations") else " (t)"
    cells = [
        f"[{label(row)}]({CSVS}/{row.name}.csv){training}",
        return_of(curve) + earlier(row, curve),
        f"{final.mean():.4g} ± {three_digits(final.std())}",
        str(len(final)),
        short(curve.steps[-1]),
        interval(steps),
        interval(steps / rate.median, " s") if rate else "",
        f"{short(rate.median)} [{short(rate.low)}, {short(rate.high)}]" if rate else "",
    ]
    return "| " + " | ".join(cells) + " |\n"


def family_page(section: str, curves: list[tuple[Row, Curve]], rates: dict[str, Rate]) -> str:
    machine_of = {row["name"]: row["machine"] for row in read_clock()}
    machines = sorted({machine_of[row.name] for row, _ in curves if row.name in machine_of})
    machines = f" Steps/s on virtual cores ({', '.join(machines)})." if machines else ""
    text = PAGE.format(section=section, machines=machines)
    for name in pictures_of(section, curves, rates):
        x = "seconds" if "_time" in name else "steps"
        text += f"\n![{section}: return against {x}]({name}.png)\n"
    text += f"\n{CAPTION}\n"
    tasks = {row.task.title: row.task for row, _ in curves}
    shown, others = split_variants(curves)
    if len(pictured(curves)) < len(shown):
        text += "\nOf a system with different numbers of epochs, the pictures show the best.\n"
    for title, task in tasks.items():
        wins = ", share of training episodes that were won" if task.wins else ""
        text += f"\n## {title}{wins}\n" + HEADER.format(x=task.threshold)
        text += "".join(table_row(*x, rates.get(x[0].name)) for x in shown if x[0].task == task)
    trials = [row for row, _ in curves if row.kind == "ppo_meta"]
    text += trial_table(trials) if trials else ""
    text += level_table(curves, rates) if section == "MinAtar" else ""
    if others:
        text += "\n## Other settings of peers\n"
        for title, task in tasks.items():
            rows = [x for x in others if x[0].task == task]
            text += f"\n{title}:\n{HEADER.format(x=task.threshold)}" if rows else ""
            text += "".join(table_row(*x, rates.get(x[0].name)) for x in rows)
    text += COMMANDS
    text += "".join(f"{x.about['command']}\n" for row, x in curves if not row.is_peer)
    return text + "```\n"


def trial_table(rows: list[Row]) -> str:
    """Returns of the episodes of a trial in the last 5% of the steps, and last / first."""
    text = ""
    for row in rows:
        lines = (learning.RESULTS / f"{row.name}.csv").read_text().splitlines()
        table = np.array([x.split(",") for x in lines if x[:1].isdigit()], float)
        table = table[table[:, 1] > 0.95 * table[:, 1].max()]
        episodes = np.stack([table[table[:, 0] == k, 3:].mean(0) for k in np.unique(table[:, 0])])
        ratio = episodes[:, -1] / episodes[:, 0]  # [S]
        if not text:
            names = [f"episode {k + 1}" for k in range(episodes.shape[1])]
            names = ["environment", "system", *names, "last / first"]
            text = f"{TRIALS}| {' | '.join(names)} |\n" + "|---" * len(names) + "|\n"
        cells = [f"{x.mean():.3f} ± {x.std():.3f}" for x in (*episodes.T, ratio)]
        link = f"[{label(row)}]({CSVS}/{row.name}.csv)"
        text += f"| {row.task.title} | {link} | {' | '.join(cells)} |\n"
    return text


def level_table(curves: list[tuple[Row, Curve]], rates: dict[str, Rate]) -> str:
    """Steps and seconds of every system to PureJaxRL's final return."""
    ends = {row.task.title: iqm(final_returns(x)) for row, x in curves if row.kind == "purejaxrl"}
    text = LEVELS
    for row, curve in curves:
        if row.task.title not in ends:
            continue
        level, rate = ends[row.task.title], rates.get(row.name)
        steps = steps_to(curve, level)
        seconds = interval(steps / rate.median, " s") if rate else ""
        cells = [row.task.title, f"{level:.3g}", label(row), interval(steps), seconds]
        text += "| " + " | ".join(cells) + " |\n"
    return text


def ablation_tables() -> str:
    """One table per task: the script, then each of its changes."""
    text = ""
    for task in learning.ABLATIONS:
        base = next(iter(task.systems))
        rows = [Row(task, system) for system in task.systems]
        found = [row for row in rows if (learning.RESULTS / f"{row.name}.csv").exists()]
        if len(found) < 2:
            continue
        text += f"\n## {task.title}, `{base}.py`\n\n"
        text += "| change | return (IQM) | mean ± std | seeds | steps to the threshold |\n"
        text += "|---|---|---|---|---|\n"
        for row in found:
            curve = read_curve(learning.RESULTS / f"{row.name}.csv")
            final = final_returns(curve)
            cells = [
                f"[{row.system.removeprefix(base).strip() or 'none'}]({CSVS}/{row.name}.csv)",
                return_of(curve),
                f"{final.mean():.4g} ± {three_digits(final.std())}",
                str(len(final)),
                interval(steps_to(curve, task.threshold)),
            ]
            text += "| " + " | ".join(cells) + " |\n"
    return text


# ------------------------------------------ pictures
def color_of(system: str) -> str:
    begin = [name for name in SYSTEM_COLORS if f"{system} ".startswith(f"{name} ")]
    return SYSTEM_COLORS[max(begin, key=len)] if begin else BROWN


def same_constant(curves: list[tuple[Row, Curve]]) -> list[tuple[Row, float]]:
    """Systems whose curves are constant and lie on each other, with the value."""
    lines = [(row, iqm(curve.values)) for row, curve in curves]
    height = max(x.max() for _, x in lines) - min(x.min() for _, x in lines)
    flat = [(row, x[-1]) for row, x in lines if np.ptp(x) < 0.01 * height]
    same = [(row, x) for row, x in flat if abs(x - flat[0][1]) < 0.01 * height]
    return same if len(same) > 1 else []


def timed_panels(curves: list[tuple[Row, Curve]], rates: dict[str, Rate]) -> list[str]:
    """Environments with a peer whose speed differs by half and more: time tells another story."""
    panels = by_title([x for x in pictured(curves) if x[0].name in rates])
    speeds = lambda rows: [rates[row.name].median for row, _ in rows]
    has_peer = lambda rows: any(row.is_peer for row, _ in rows)
    differs = lambda rows: max(speeds(rows)) > 1.5 * min(speeds(rows))
    return [title for title, rows in panels.items() if has_peer(rows) and differs(rows)]


def is_early(curves: list[tuple[Row, Curve]]) -> bool:
    """Whether a system is at the threshold in the first eighth of training."""
    arrivals = [np.median(steps_to(x, row.task.threshold)) / x.steps[-1] for row, x in curves]
    return min(arrivals) < 1 / 8


@matplotlib.rc_context(STYLE | {"font.size": 10, "axes.labelsize": 10, "lines.linewidth": 1.6})
def draw(panels: dict[str, list[tuple[Row, Curve]]], path: Path, rates=None, name=short_label):
    """A panel per environment, at most six, against steps or, with rates, training seconds.

    The axis is logarithmic for seconds, and for steps where learning is over early: otherwise
    curves lie on each other at the edges of the panel. Where they are constant and do so in spite
    of that, the panel names them.
    """
    width = 2 if len(panels) == 4 else min(3, len(panels))
    height = -(-len(panels) // width)
    names = {name(row): row.is_peer for curves in panels.values() for row, _ in curves}
    names = sorted(names, key=names.get)  # ours first
    inches = 10 if width > 1 else 6  # 10 are shown 800 pixels wide
    columns = min(len(names), 12 * inches // (8 + max(map(len, names))))
    legend_rows = -(-len(names) // columns)
    figure = matplotlib.figure.Figure(figsize=(inches, 2.9 * height + 0.24 * legend_rows))
    grid = figure.subplots(height, width, squeeze=False).flatten()
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    lines = {}
    for (title, curves), axes in zip(panels.items(), grid, strict=False):
        for row, curve in curves:
            known, x = lines.get(name(row)), curve.steps
            color = known.get_color() if known else color_of(row.system)
            if rates:
                if row.name not in rates:
                    continue
                x = x / rates[row.name].median
            style = {"color": color, "linestyle": "--" if row.is_peer else "-"}
            (line,) = axes.plot(x, iqm(curve.values), **style)
            axes.fill_between(x, *bootstrap(curve.values), color=color, **BAND)
            lines.setdefault(name(row), line)
        task = curves[0][0].task
        axes.axhline(task.threshold, color=GRAY, linewidth=0.8, linestyle=":")
        axes.set_title(title + ", wins" * task.wins, fontsize=10)
        if constant := same_constant(curves):
            text = "\n".join(name(row) for row, _ in constant)
            # On the right, where curves have risen; against seconds they may start as low there.
            names_here, low = [row.name for row, _ in constant], constant[0][1]
            starts = [iqm(x.values)[0] for row, x in curves if row.name not in names_here]
            is_low = min(starts, default=np.inf) < low + 0.1 * abs(task.threshold)
            at, side = (0.03, "left") if rates and is_low else (0.97, "right")
            place = {"xycoords": ("axes fraction", "data"), "ha": side, "va": "bottom"}
            axes.annotate(text, (at, low), fontsize=8, **place)
        label_x = "training seconds of one seed" if rates else "environment steps"
        is_log = rates or is_early(curves)
        axes.set_xlabel(f"{label_x} (log)" if is_log else label_x)
        if is_log:
            axes.set_xscale("log")
            low, high = axes.get_xlim()
            subs = (1, 2, 5) if high < 150 * low else (1,)
            axes.xaxis.set_major_locator(LogLocator(subs=subs))
            axes.xaxis.set_minor_locator(NullLocator())
        else:
            axes.set_xlim(0, None)
        axes.xaxis.set_major_formatter("{x:g}" if rates else EngFormatter(sep=""))
    for axes in grid[::width]:
        axes.set_ylabel("return")
    names = [name for name in names if name in lines]
    handles = [lines[name] for name in names]
    figure.legend(handles, names, loc="outside lower center", ncols=columns)
    figure.savefig(path)


def pictures_of(section: str, curves: list[tuple[Row, Curve]], rates: dict[str, Rate]):
    """{file name: panels and, where they are against seconds, rates}; six panels a picture."""
    panels, found = by_title(pictured(curves)), {}
    timed = timed_panels(curves, rates)
    for suffix, titles, scale in (("", [*panels], None), ("_time", timed, rates)):
        for i in range(0, len(titles), 6):
            number = f"_{i // 6 + 1}" if i else ""
            name = f"{file_name(section)}{suffix}{number}"
            found[name] = ({title: panels[title] for title in titles[i : i + 6]}, scale)
    return found


def overview_panels(results) -> dict[str, list[tuple[Row, Curve]]]:
    """Our system of the table, and of each peer the one that ends highest."""
    in_table = lambda row: row.is_peer or row.system == OVERVIEW[row.task.title]
    curves = [x for found in results.values() for x in found if x[0].task.title in PICTURED]
    shown = split_variants([x for x in curves if in_table(x[0])], lambda row: row.kind)[0]
    panels = by_title(shown)
    return {title: panels[title] for title in PICTURED}


def by_title(curves: Iterable[tuple[Row, Curve]]) -> dict[str, list[tuple[Row, Curve]]]:
    panels = {}
    for row, curve in curves:
        panels.setdefault(row.task.title, []).append((row, curve))
    return panels


def write():
    folder = DOCS / "results"
    folder.mkdir(exist_ok=True)
    for path, text in report().items():
        (DOCS / path).write_text(text)
    results, rates = read_results()
    first_word = lambda row: label(row).split(",")[0]
    draw(overview_panels(results), folder / "overview.png", name=first_word)
    for section, curves in results.items():
        for name, (panels, scale) in pictures_of(section, curves, rates).items():
            draw(panels, folder / f"{name}.png", scale)
