"""The objectives of ppo_drift.py against the ratio, for an advantage of 1 and of -1.

    python benchmarks/drifts.py    # docs/drifts.png

The KL penalty depends on more than the ratio; here there are two actions, equally likely before.
"""

import sys
from pathlib import Path

import jax.numpy as jnp
import matplotlib
import matplotlib.figure
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from report import SYSTEM_COLORS

import ppo_drift
from plot import STYLE


def objectives(ratio, advantage, config):
    """name -> r A - drift [R], at an old probability of 1/2."""
    kl = 0.5 * jnp.log(0.5 / (0.5 * ratio)) + 0.5 * jnp.log(0.5 / (1 - 0.5 * ratio))
    drifts = {
        "clip": ppo_drift.clip_drift(ratio, advantage, config.clip_eps),
        "kl_penalty": config.kl_coef * kl,
        "dpo": ppo_drift.dpo_drift(ratio, advantage),
        "spo": ppo_drift.spo_drift(ratio, advantage, config.clip_eps),
    }
    return {name: ratio * advantage - drift for name, drift in drifts.items()}


@matplotlib.rc_context(STYLE)
def draw(path: Path):
    config = ppo_drift.Config()
    ratio = jnp.linspace(0.3, 1.7, 281)
    figure = matplotlib.figure.Figure(figsize=(8.4, 3.2))
    for axes, sign in zip(figure.subplots(1, 2), (1, -1), strict=True):
        curves = objectives(ratio, jnp.full_like(ratio, sign), config)
        for name, values in curves.items():
            color = SYSTEM_COLORS[f"ppo_drift {name}"]
            axes.plot(ratio, np.array(values), color=color, label=name)
        axes.axvline(1, color="0.7", linewidth=0.8, zorder=0)
        axes.set(title=f"advantage {sign:+d}", xlabel="ratio", ylabel="objective")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    draw(ROOT / "docs" / "drifts.png")
