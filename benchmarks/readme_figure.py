"""The picture of the README, docs/readme.png: learning curves of docs/results.md.

`python benchmarks/learning.py --report` draws it with the pages.
"""

import sys
from pathlib import Path

import matplotlib
import matplotlib.figure
from matplotlib.ticker import EngFormatter

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import learning
import report

from plot import BAND, COLORS, STYLE, bootstrap, iqm

PANELS = {  # title: {file in benchmarks/results: label}
    "Breakout-MinAtar": {
        "Breakout-MinAtar__ppo_ff": "ppo_ff.py",
        "Breakout-MinAtar__purejaxrl": "PureJaxRL",
        "Breakout-MinAtar__stoix-16-envs-lr-1e-3": "Stoix",
    },
    "SpaceInvaders-MinAtar": {
        "SpaceInvaders-MinAtar__ppo_ff": "ppo_ff.py",
        "SpaceInvaders-MinAtar__purejaxrl": "PureJaxRL",
        "SpaceInvaders-MinAtar__stoix-16-envs-lr-1e-3": "Stoix",
    },
    "MiniGrid-DoorKey-6x6": {
        "MiniGrid-DoorKey-6x6__ppo_rnn-1M-steps": "ppo_rnn.py",
        "MiniGrid-DoorKey-6x6__xland-GRU-64-lr-3e-3": "XLand-MiniGrid",
    },
}
OURS, PEERS = COLORS[0], {"PureJaxRL": COLORS[2], "Stoix": COLORS[4], "XLand-MiniGrid": COLORS[3]}


@matplotlib.rc_context(STYLE | {"font.size": 10})
def main():
    figure = matplotlib.figure.Figure(figsize=(10, 3.6))  # shown 800 pixels wide
    for axes, (title, systems) in zip(figure.subplots(1, 3), PANELS.items(), strict=True):
        for file, label in systems.items():
            curve = report.read_curve(learning.RESULTS / f"{file}.csv")
            color = PEERS.get(label, OURS)
            style = "--" if label in PEERS else "-"
            axes.plot(curve.steps, iqm(curve.values), style, color=color, label=label)
            axes.fill_between(curve.steps, *bootstrap(curve.values), color=color, **BAND)
        axes.set(title=title, xlabel="environment steps", xlim=(0, None))
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.legend(loc="upper left")
    figure.axes[0].set_ylabel("return")
    figure.axes[2].set_ylim(-0.02, 1.45)  # room for the legend
    figure.savefig(ROOT / "docs" / "readme.png")
