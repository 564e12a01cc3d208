"""docs/results.md, its pages in docs/results and all pictures, from benchmarks/results.

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
    "MiniGrid-Empty-6x6": "ppo_rnn 1M steps",
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
COMMITS = ("73daa3b", "d502b97")  # of curves: since then, no algorithm has changed
PICTURED = [
    "CartPole-v1",
    "Pendulum-v1",
    "Breakout-MinAtar",
    "brax/hopper",
    "MiniGrid-DoorKey-5x5",
    "MPE_simple_spread_v3",
]
IN_README = ["Breakout-MinAtar", "SpaceInvaders-MinAtar", "MiniGrid-DoorKey-6x6"]
PEER_NAMES = {
    "purejaxrl": "PureJaxRL",
    "rejax": "rejax",
    "stoix": "Stoix",
    "cleanrl": "CleanRL",
    "xland": "XLand-MiniGrid",
    "jaxmarl": "JaxMARL",
}
BLUE, RED, TEAL, PURPLE, GOLD, GRAY, PINK, OLIVE, BROWN = COLORS
SKY, BLACK = "#3fa9d6", "#222222"
SYSTEM_COLORS = {  # of a script or peer (`script_of`), the same in every picture
    "ppo_ff": BLUE,
    "ppo_continuous": BLUE,
    "ppo_continuous tanh": BROWN,
    "ppo_continuous beta": GRAY,
    "ppo_obs_norm": RED,
    "ppo_vtrace": PURPLE,
    "ppo_vtrace no memory": GRAY,
    "ppo_vtrace uniform draw": TEAL,
    "ppo_vtrace all segments": RED,
    "ppo_vtrace all segments GAE once": GOLD,
    "ppo_drift clip": BLUE,
    "ppo_drift kl_penalty": RED,
    "ppo_drift adaptive_kl": TEAL,
    "ppo_drift dpo": PURPLE,
    "ppo_drift spo": GOLD,
    "ppo_rnn": BROWN,
    "ppo_rnn no memory": GRAY,
    "ppo_meta": BLUE,
    "ppo_meta reset memory": RED,
    "ppo_meta no memory": GRAY,
    "ippo": PURPLE,
    "ippo_rnn": RED,
    "mappo": BLUE,
    "disco": "black",
    "disco random": RED,
    "disco policy_gradient": GOLD,
    "disco actor_critic": TEAL,
    "purejaxrl": TEAL,
    "rejax": OLIVE,
    "stoix": GOLD,
    "cleanrl": PINK,
    "xland GRU 64": SKY,
    "jaxmarl ippo_ff": GOLD,
    "jaxmarl ippo_rnn": PINK,
    "jaxmarl mappo_rnn": BLACK,
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


def printed(system: str) -> str:
    """The name of a system with its settings, the same everywhere."""
    kind, *words = system.split()
    options = re.sub(r"(?:^| )(?:LR=|lr )(\S+)", r", learning rate \1", " ".join(words))
    options = re.sub(r" gamma (\S+)", r", discount factor \1", options)
    options = re.sub(r"(\d+) envs", r"\1 environments", options).removeprefix(", ")
    return ", ".join(filter(None, [PEER_NAMES.get(kind, kind), options]))


def label(row: Row) -> str:
    """In tables."""
    if not row.is_peer and row.system == row.kind and "--num-envs" in row.words:
        return printed(f"{row.kind} {row.words[row.words.index('--num-envs') + 1]} envs")
    return printed(row.system)


def script_of(row: Row) -> str:
    """The system without its settings, of which a picture shows one."""
    settings = r" (LR=|lr |\d+ envs|\d+ epochs|1M steps|min advantage std).*"
    return re.sub(settings, "", row.system)


def of_tables(row: Row) -> str:
    """All settings of a peer are one system, and every row of ours is another."""
    return script_of(row) if row.is_peer else row.system


def split_variants(curves: list[tuple[Row, Curve]], family=of_tables):
    """Of the curves of one family in one environment, that with the highest return; all others."""
    best = {}
    for row, curve in curves:
        key, score = (row.task.title, family(row)), iqm(final_returns(curve))
        if key not in best or score > best[key][0]:
            best[key] = (score, row)
    chosen = [row for _, row in best.values()]
    is_chosen = lambda pair: pair[0] in chosen
    return [x for x in curves if is_chosen(x)], [x for x in curves if not is_chosen(x)]


def pictured(curves: list[tuple[Row, Curve]]) -> list[tuple[Row, Curve]]:
    """One curve of each script: its best setting.

    If it also ran for as few steps as a peer, both runs, or the short one where that is enough.
    """
    family, enough = lambda row: (row.task.title, script_of(row)), {}
    for row, curve in curves:
        if iqm(final_returns(curve)) >= row.task.threshold:
            enough[family(row)] = min(curve.steps[-1], enough.get(family(row), np.inf))
    is_short = lambda row, curve: curve.steps[-1] < 1.1 * enough.get(family(row), np.inf)
    of_pictures = lambda row: (script_of(row), row.system.endswith("1M steps"))
    return split_variants([x for x in curves if is_short(*x)], of_pictures)[0]


def best_peer(curves: list[tuple[Row, Curve]], rates: dict[str, Rate]) -> tuple[Row, Curve] | None:
    """That with the highest return; of those within 1% of it, the fastest."""
    peers = split_variants([x for x in curves if x[0].is_peer])[0]
    if not peers:
        return None
    ends = [iqm(final_returns(curve)) for _, curve in peers]
    best = max(ends)
    close = [x for x, end in zip(peers, ends, strict=True) if end >= best - abs(best) / 100]
    if any(row.name not in rates for row, _ in close):
        return peers[ends.index(best)]
    return min(close, key=lambda x: x[1].steps[-1] / rates[x[0].name].median)


def file_name(section: str) -> str:
    return re.sub(r"\W+", "_", section.lower())


# --------------------------------------------- pages
FIRST_PAGE = """# Results

All numbers are our own measurements ([how](#how-it-was-measured)). Each command links to the curves
of all seeds; a peer is another implementation of PPO. Returns: interquartile mean [95% interval];
(t): returns in training{star}. Where our run is longer than the peer's, the table also has a run
of about as many steps. For Gymnasium, Craftax and others, see [environments](environments.md); for
speed with equal networks and sizes, [benchmarks](../benchmarks/RESULTS.md).

{table}

![Learning curves in six environments](results/overview.png)

{caption}

All environments, systems and our commands: {pages}.
[Add a system or an environment](results/CONTRIBUTING.md).

## How it was measured

The CSVs in [benchmarks/results](../benchmarks/results) hold the command, commit and versions of
every curve; `python benchmarks/learning.py --report` writes these pages from them. Python 3.11, on
CPUs. The commands in the table leave out evaluation options and the number of seeds.{stars}

Our curves were recorded at commit {commits[0]}, except those of `ippo_rnn.py`, `mappo.py` and, on
simple_reference, `ippo.py` ({commits[1]}). In short runs on one machine, all scripts but
`ippo_rnn.py` and `mappo.py` give the same metrics at both commits, bit for bit.

For each environment the table has one script, chosen after seeing the results; on hopper,
in MPE and on 3m also one of two settings. The settings in SMAX were found on 3m, with another seed.
A script and its best peer can have different networks: on simple_spread, the peer's has memory and
ours does not. How settings were found, on which environments and seeds:
[ours](../benchmarks/tuning.md), [peers](../benchmarks/peers.md#learning-curves).

- **return**: interquartile mean over seeds (of three seeds: the mean) and its 95% bootstrap
  interval, in the last 5% of the steps. Our evaluations play 128 full episodes from fresh resets
  (32 in MinAtar and Brax, 1280 in rings, 2048 in meta-learning) with sampled actions; those of
  peers, the number stated in their CSVs. In "trials", the return is the mean over all episodes of a
  trial, the first included. A peer that does not evaluate has returns of training, marked (t):
  small differences between these and evaluations may not be real. "wins" is the share of training
  episodes that were won, for ours and peers alike.
- **seeds**: five to 32 (see the pages); three in meta-learning and where learning is slow on a CPU
  (DiscoRL's rule with random weights, CleanRL on the continuous tasks, Stoix on
  MountainCarContinuous-v0). Stoix on Pendulum-v1: ten, where ours have 32.
- **time**: training of one seed on two idle cores of a virtual server (the pages name the
  processor), as steps divided by the steps/s that `python benchmarks/learning.py --clock` measures,
  the systems of a task taking turns ([clock.csv](../benchmarks/results/clock.csv)). Evaluation and
  compilation (up to {compilation:.0f} s) are not included. Empty: no peer, or not measured. The
  speed of such a server varies by a factor of two from day to day: compare within an environment
  only. XLand-MiniGrid is timed with its own layers, which are made for GPUs: with equivalent matrix
  products it is nine times as fast here.
- **best peer**: the one with the highest return in its best setting; of several within 1% of it,
  the fastest. Peers run with their published settings for the environment, else with those of their
  default environment. A peer's name lists its main changes to these settings; all changes are in
  the CSVs and in [peers](../benchmarks/peers.md#learning-curves).

The pages of the families have more columns:

- **mean ± std**: with the standard deviation of these seeds.
- **steps to** a level: the median over seeds of the first point of the curve at or above it, with
  its 95% bootstrap interval. It can differ from where the drawn interquartile mean crosses. Curves
  have a point per evaluation, those of training returns up to 50; a seed above the level at the
  first point may have reached it earlier. No brackets: both ends of the interval equal the median
  after rounding. "never": at least half of the seeds did not get there. The levels are ours: near
  what solves a task in classic control and MiniGrid, elsewhere mostly one that a peer reaches too.
- **seconds to** a level: these steps divided by the steps/s.
- **steps/s**: the median of the timed calls [slowest, fastest].

Of a peer that was run with several settings, the first tables show the one with the highest return;
the others are in a table at the end of the page.

Peers: {peers}.
"""
STAR = "; \\*: measured with an earlier version of the script"
STARS = """ **A star (\\*) marks
curves of ours that were measured with earlier versions of the scripts** (the commits are in the
CSVs): today's commands give similar but not identical curves."""
CAPTION = """Lines: interquartile means over seeds, solid ours, dashed peers. Bands: 95% bootstrap
intervals. Dotted: the level of "steps to" in the tables."""
PEERS = ", solid ours, dashed peers"
ONE_OF_SEVERAL = """ Of several settings of a script or
peer, a picture shows the one with the highest return."""
SECONDS = """ Against
seconds: environments with a peer in which the fastest system runs more than 1.5 times as fast as
the slowest."""
NOTES = {  # of a section
    "Drifts": "`clip` is PPO, the algorithm of `ppo_ff.py`, here with five seeds everywhere.",
    "MiniGrid": """XLand-MiniGrid is timed with its own layers, which are made for GPUs: with
equivalent matrix products it is nine times as fast on a CPU
([peers](../../benchmarks/peers.md)). Of `ppo_rnn.py`, pictures show the run of 1M steps, as long as
the peer's, and where that does not reach the level, the run of 10M steps too (MemoryS8: only the
latter).""",
    "Several agents": """rings has no picture: its first evaluation is already at the optimum.
In MPE and the coin game, returns are summed over the agents, and ours are evaluated every 100k
steps: their "steps to" are multiples of that.""",
}
COMMANDS = """
## Commands

```bash
"""
PAGE = """# {section}

From [the CSVs](../../benchmarks/results); [what the columns
mean](../results.md#how-it-was-measured).{machines}{note}
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
([ablations.py](../../benchmarks/ablations.py); each CSV lists its own):
`python benchmarks/learning.py --ablations`. Where the intervals of a change and of the unchanged
script overlap, so few seeds neither show an effect nor rule it out.
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
        if ours:
            peer = best_peer(of_task, rates)
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
    ours = [curve for row, curve in curves if not row.is_peer]
    is_old = any(curve.about["commit"] not in COMMITS for curve in ours)
    return FIRST_PAGE.format(
        commits=COMMITS,
        table=text.strip(),
        caption=CAPTION.replace("tables", "tables of the pages") + ONE_OF_SEVERAL,
        pages=pages,
        peers=peers,
        star=STAR * is_old,
        stars=STARS * is_old,
        compilation=max((float(x["compile_seconds"]) for x in read_clock()), default=0),
    )


def earlier(row: Row, curve: Curve) -> str:
    """A star for curves of ours that an earlier version of the scripts has learned."""
    is_earlier = not row.is_peer and curve.about["commit"] not in COMMITS
    return r" \*" if is_earlier else ""


def overview_row(row: Row, curve: Curve, peer, shorter, rates: dict[str, Rate]) -> str:
    """`shorter`: our system trained as long as the peer, where that differs."""
    time = lambda row, x: (
        duration(x.steps[-1] / rates[row.name].median) if row.name in rates else ""
    )
    command = shlex.join([f"{row.kind}.py", *row.words])
    command = re.sub(r" --(num-evals|eval-episodes) \d+", "", command)
    wins = ", wins" if row.task.wins else ""
    cells = [
        row.task.title + wins,
        f"[`{command}`](../benchmarks/results/{row.name}.csv)",
        return_of(curve) + earlier(row, curve),
        time(row, curve),
    ]
    if shorter:
        early = shorter[0][1]
        cells[2] += f"; in {short(early.steps[-1])} steps {return_of(early)}"
        if cells[3]:  # the same program: the same steps/s
            cells[3] += f"; {duration(early.steps[-1] / rates[row.name].median)}"
    if peer:
        training = "" if row.task.wins or peer[1].about["returns"].startswith("eval") else " (t)"
        length = f"in {short(peer[1].steps[-1])} steps " if shorter else ""
        cells += [label(peer[0]), length + return_of(peer[1]) + training, time(*peer)]
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
    note = f"\n\n{NOTES[section]}" if section in NOTES else ""
    text = PAGE.format(section=section, machines=machines_of(curves), note=note)
    pictures = pictures_of(section, curves, rates)
    for name in pictures:
        x = "seconds" if "_time" in name else "steps"
        text += f"\n![{section}: return against {x}]({name}.png)\n"
    tasks = {row.task.title: row.task for row, _ in curves}
    shown, others = split_variants(curves)
    is_choice = len(pictured(curves)) < len(shown) and section != "MiniGrid"  # see its note
    caption = CAPTION if any(row.is_peer for row, _ in curves) else CAPTION.replace(PEERS, "")
    text += f"\n{caption}{ONE_OF_SEVERAL * is_choice}"
    text += SECONDS * any("_time" in name for name in pictures) + "\n"
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


def machines_of(curves: list[tuple[Row, Curve]]) -> str:
    """Where the steps/s were measured, and of which environments if on several machines."""
    machine_of, titles = {row["name"]: row["machine"] for row in read_clock()}, {}
    for row, _ in curves:
        if row.name in machine_of:
            titles.setdefault(machine_of[row.name], {})[row.task.title] = None
    several = lambda found: f" ({', '.join(found)})" if len(titles) > 1 else ""
    machines = [machine + several(found) for machine, found in sorted(titles.items())]
    return f" Steps/s on virtual cores: {'; '.join(machines)}." if machines else ""


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
        text += "| change | return | mean ± std | seeds | "
        text += f"steps to {task.threshold:g} |\n"
        text += "|---|---|---|---|---|\n"
        for row in found:
            curve = read_curve(learning.RESULTS / f"{row.name}.csv")
            final = final_returns(curve)
            cells = [
                f"[{row.system.removeprefix(base).strip() or 'none'}]({CSVS}/{row.name}.csv)",
                return_of(curve) + earlier(row, curve),
                f"{final.mean():.4g} ± {three_digits(final.std())}",
                str(len(final)),
                interval(steps_to(curve, task.threshold)),
            ]
            text += "| " + " | ".join(cells) + " |\n"
    return text


# ------------------------------------------ pictures
def same_constant(curves: list[tuple[Row, Curve]]) -> list[tuple[Row, float]]:
    """Systems whose curves hardly rise, soon are constant and lie on each other, with the value."""
    lines = [(row, iqm(curve.values)) for row, curve in curves]
    height = max(x.max() for _, x in lines) - min(x.min() for _, x in lines)
    is_constant = lambda x: np.ptp(x) < 0.2 * height and np.ptp(x[len(x) // 2 :]) < 0.01 * height
    flat = [(row, x[-1]) for row, x in lines if is_constant(x)]
    same = [(row, x) for row, x in flat if abs(x - flat[0][1]) < 0.01 * height]
    return same if len(same) > 1 else []


def timed_panels(curves: list[tuple[Row, Curve]], rates: dict[str, Rate]) -> list[str]:
    """Environments with a peer whose speed differs by half and more: time tells another story."""
    panels = by_title([x for x in pictured(curves) if x[0].name in rates])
    speeds = lambda rows: [rates[row.name].median for row, _ in rows]
    has_peer = lambda rows: any(row.is_peer for row, _ in rows)
    differs = lambda rows: max(speeds(rows)) > 1.5 * min(speeds(rows))
    return [title for title, rows in panels.items() if has_peer(rows) and differs(rows)]


def is_uneven(curves: list[tuple[Row, Curve]]) -> bool:
    """Whether a system is at the threshold, or at its end, in the first eighth of the axis."""
    longest = max(x.steps[-1] for _, x in curves)
    ends = [min(np.median(steps_to(x, row.task.threshold)), x.steps[-1]) for row, x in curves]
    return min(ends) < longest / 8


def is_flat(curves: list[tuple[Row, Curve]]) -> bool:
    """A single system that begins at the threshold: no learning to see."""
    return len(curves) == 1 and iqm(curves[0][1].values)[0] >= curves[0][0].task.threshold


def legend_columns(names: list[str], inches: float) -> int:
    """As many as fit; a name of n letters takes 0.7 + 0.085 n inches."""
    for columns in range(len(names), 1, -1):
        widest = [max(map(len, column)) for column in np.array_split(names, columns)]
        if sum(0.7 + 0.085 * n for n in widest) <= inches:
            return columns
    return 1


@matplotlib.rc_context(STYLE | {"font.size": 10, "axes.labelsize": 10, "lines.linewidth": 1.6})
def draw(panels: dict[str, list[tuple[Row, Curve]]], path: Path, rates=None, levels=True):
    """A panel per environment, at most six, against steps or, with rates, training seconds.

    The axis is logarithmic for seconds, and for steps where learning or a run is over early:
    otherwise curves lie on each other at the edges of the panel. Where those without progress do so
    in spite of that, the panel names them. `levels`: whether to draw the thresholds.
    """
    name = lambda row: printed(script_of(row))
    width = 2 if len(panels) == 4 else min(3, len(panels))
    height = -(-len(panels) // width)
    names = {name(row): row.is_peer for curves in panels.values() for row, _ in curves}
    names = sorted(names, key=names.get)  # ours first
    inches = 10 if width > 1 else 6  # 10 are shown 800 pixels wide
    columns = legend_columns(names, inches)
    legend_rows = -(-len(names) // columns)
    figure = matplotlib.figure.Figure(figsize=(inches, 2.9 * height + 0.24 * legend_rows))
    grid = figure.subplots(height, width, squeeze=False).flatten()
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    lines = {}
    for (title, curves), axes in zip(panels.items(), grid, strict=False):
        drawn = {}
        for row, curve in curves:
            x, color = curve.steps, SYSTEM_COLORS.get(script_of(row), BROWN)
            if rates:
                if row.name not in rates:
                    continue
                x = x / rates[row.name].median
            style = {"color": color, "linestyle": "--" if row.is_peer else "-"}
            (line,) = axes.plot(x, iqm(curve.values), **style)
            axes.fill_between(x, *bootstrap(curve.values), color=color, **BAND)
            lines.setdefault(name(row), line)
            drawn[row.name] = line.get_data()
        task = curves[0][0].task
        if levels:
            axes.axhline(task.threshold, color=GRAY, linewidth=0.8, linestyle=":")
        axes.set_title(title + ", wins" * task.wins, fontsize=10)
        is_log = rates or is_uneven(curves)
        if constant := same_constant(curves):
            text = "\n".join(dict.fromkeys(name(row) for row, _ in constant))
            # On the right, where other curves have risen, unless they rise late.
            low, names_here = constant[0][1], [row.name for row, _ in constant]
            begin, end = axes.dataLim.intervalx
            begin_of_names = begin**0.35 * end**0.65  # on a logarithmic axis
            others = [
                np.interp(begin_of_names, *xy) for x, xy in drawn.items() if x not in names_here
            ]
            is_low = min(others, default=np.inf) < low + 0.1 * abs(task.threshold)
            at, side = (0.03, "left") if is_log and is_low else (0.97, "right")
            place = {"xycoords": ("axes fraction", "data"), "ha": side, "va": "bottom"}
            axes.annotate(text, (at, low), fontsize=8, **place)
        label_x = "training seconds of one seed" if rates else "environment steps"
        axes.set_xlabel(f"{label_x} (log)" if is_log else label_x)
        if is_log:
            axes.set_xscale("log")
            low, high = axes.get_xlim()
            most = 150 if width == 3 else 500  # else the labels touch
            subs = (1, 2, 5) if high < most * low else (1,)
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
    panels = {title: panel for title, panel in panels.items() if not is_flat(panel)}
    timed = [title for title in timed_panels(curves, rates) if title in panels]
    for suffix, titles, scale in (("", [*panels], None), ("_time", timed, rates)):
        for i in range(0, len(titles), 6):
            number = f"_{i // 6 + 1}" if i else ""
            name = f"{file_name(section)}{suffix}{number}"
            found[name] = ({title: panels[title] for title in titles[i : i + 6]}, scale)
    return found


def chosen_panels(results, titles: list[str]) -> dict[str, list[tuple[Row, Curve]]]:
    """Our system of the table, and of each peer the one that ends highest."""
    in_table = lambda row: row.is_peer or row.system == OVERVIEW[row.task.title]
    curves = [x for found in results.values() for x in found if x[0].task.title in titles]
    shown = split_variants([x for x in curves if in_table(x[0])], lambda row: row.kind)[0]
    panels = by_title(shown)
    return {title: panels[title] for title in titles}


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
    draw(chosen_panels(results, PICTURED), folder / "overview.png")
    draw(chosen_panels(results, IN_README), DOCS / "readme.png", levels=False)
    for section, curves in results.items():
        for name, (panels, scale) in pictures_of(section, curves, rates).items():
            draw(panels, folder / f"{name}.png", scale)
