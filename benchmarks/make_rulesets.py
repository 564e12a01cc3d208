"""Write XLand-MiniGrid tasks that only trying can tell apart.

    python benchmarks/make_rulesets.py runs/arms.bz2
    python ppo_meta.py --env-id XLand-MiniGrid-R1-9x9 --benchmark-id runs/arms.bz2 \\
        --env-params '{"height": 7, "width": 7, "max_steps": 20}'

A bandit with two arms: in half of the tasks an object pays when the agent steps next to it from
above or below, in the other half from the left or right. From the wrong side the object disappears
and the episode is lost. Objects differ in shape and color, which say nothing about the side.
Distractors do nothing. The default limit of 243 steps is too long for the episodes to differ: set
`max_steps`.
"""

import argparse
import math
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from xminigrid.benchmarks import save_bz2_pickle
from xminigrid.core import rules
from xminigrid.core.constants import Colors, Tiles
from xminigrid.core.goals import AgentNearGoal

SHAPES = (Tiles.BALL, Tiles.SQUARE, Tiles.PYRAMID, Tiles.KEY, Tiles.HEX, Tiles.STAR)
COLORS = (Colors.RED, Colors.GREEN, Colors.BLUE, Colors.PURPLE, Colors.YELLOW)
COLORS += (Colors.ORANGE, Colors.PINK, Colors.WHITE, Colors.BROWN, Colors.GREY)
OBJECTS = np.array([(shape, color) for shape in SHAPES for color in COLORS])  # [60, 2]
PAYS = np.array([Tiles.GOAL, Colors.GREEN])  # what the object turns into
GONE = np.array([Tiles.FLOOR, Colors.BLACK])
VERTICAL = (rules.AgentNearUpRule, rules.AgentNearDownRule)
HORIZONTAL = (rules.AgentNearLeftRule, rules.AgentNearRightRule)


def encode_rules(target: np.ndarray, vertical_pays: bool) -> np.ndarray:
    """[4, 7] one for each side of the object."""
    above, beside = (PAYS, GONE) if vertical_pays else (GONE, PAYS)
    turned = [rule(target, above) for rule in VERTICAL]
    turned += [rule(target, beside) for rule in HORIZONTAL]
    return np.stack([rule.encode() for rule in turned])


def make_rulesets(num_distractors: int, max_tasks: int, seed: int) -> dict:
    """The arrays of a benchmark file. No two tasks are the same. Raises ValueError."""
    others = len(OBJECTS) - 1
    if not 0 <= num_distractors <= 8 or max_tasks < 2:
        raise ValueError(f"distractors = {num_distractors} must be 0 to 8, max_tasks at least 2")
    rng = np.random.default_rng(seed)
    num_tasks = min(max_tasks, 2 * len(OBJECTS) * math.comb(others, num_distractors))
    tasks = {}  # in the order drawn
    while len(tasks) < num_tasks:
        target, *distractors = rng.permutation(len(OBJECTS))[: 1 + num_distractors].tolist()
        tasks[target, tuple(sorted(distractors)), bool(rng.integers(2))] = None
    encoded = [encode_rules(OBJECTS[target], vertical) for target, _, vertical in tasks]
    tiles = [OBJECTS[[target, *distractors]] for target, distractors, _ in tasks]
    goal = AgentNearGoal(PAYS).encode()
    return {
        "goals": jnp.tile(goal, (num_tasks, 1)),
        "rules": jnp.array(np.stack(encoded), jnp.uint8),  # [tasks, 4, 7]
        "init_tiles": jnp.array(np.stack(tiles), jnp.uint8),  # [tasks, 1 + distractors, 2]
        "num_rules": jnp.full(num_tasks, 4, jnp.int32),
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", type=Path, help="file to write")
    parser.add_argument("--distractors", type=int, default=0, help="objects that do nothing")
    parser.add_argument("--max-tasks", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="random seed of the tasks")
    args = parser.parse_args()
    try:
        tasks = make_rulesets(args.distractors, args.max_tasks, args.seed)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    args.path.parent.mkdir(parents=True, exist_ok=True)
    save_bz2_pickle(tasks, str(args.path))
    print(f"{len(tasks['goals'])} tasks")


if __name__ == "__main__":
    main()
