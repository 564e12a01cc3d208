"""What agents that know the walls of MiniGrid-FourRooms get if they know the goal, and if not.

    python benchmarks/four_rooms.py

In this environment an agent sees the 7 x 7 tiles in front of it, through walls, and has 100 steps
to find the goal. Agents of `ppo_rnn.py` find the walls and doors on the way. Here they know them:

- goal known: the shortest path, so that no policy is better;
- unknown: the goal may be on any free tile. A plan goes again and again to the pose that shows the
  most new tiles per step, until the goal is in sight. Several plans differ in how they weigh tiles
  against steps, and in some chance. The agent follows the one that takes the fewest steps on
  average over all places of the goal. This is no bound: there may be better plans.

Prints the mean return and its standard error over initial states.
"""

import random
from collections import deque

import jax
import numpy as np
import xminigrid
from xminigrid.core.constants import Tiles

MAZES = 100
# How strongly a plan prefers many new tiles to near ones, and how much it leaves to chance.
PREFERENCES = (0.4, 0.5, 0.6, 0.7, 0.85, 1.0, 1.2, 1.4, 2.0)
CHANCE = (0.0, 0.1, 0.1, 0.2, 0.2, 0.4, 0.4, 0.8)
MOVES = ((-1, 0), (0, 1), (1, 0), (0, -1))  # by direction: up, right, down, left


def visible(pose):
    """The tiles that an agent at `pose` (row, column, direction) sees."""
    row, column, direction = pose
    (forward_y, forward_x), (right_y, right_x) = MOVES[direction], MOVES[(direction + 1) % 4]
    for ahead in range(7):
        for right in range(-3, 4):
            tile_y = row + ahead * forward_y + right * right_y
            tile_x = column + ahead * forward_x + right * right_x
            yield tile_y, tile_x


class Maze:
    """The free tiles of a grid [H, W], and shortest paths between poses."""

    def __init__(self, grid):
        free = np.argwhere(grid != int(Tiles.WALL))
        self.free = {(int(row), int(column)) for row, column in free}
        self.previous = {}  # start -> pose -> (the pose before it, steps)

    def paths(self, start):
        if start not in self.previous:
            self.previous[start] = found = {start: (None, 0)}
            queue = deque([start])
            while queue:
                row, column, direction = pose = queue.popleft()
                move_y, move_x = MOVES[direction]
                turns = [(row, column, (direction + turn) % 4) for turn in (1, -1)]
                ahead = (row + move_y, column + move_x, direction)
                for after in [*turns, ahead] if ahead[:2] in self.free else turns:
                    if after not in found:
                        found[after] = (pose, found[pose][1] + 1)
                        queue.append(after)
        return self.previous[start]

    def steps(self, start, tile):
        """The least number of steps from a pose to a tile."""
        return min(self.paths(start)[*tile, direction][1] for direction in range(4))

    def path(self, start, end):
        poses = [end]
        while poses[-1] != start:
            poses.append(self.paths(start)[poses[-1]][0])
        return poses[-2::-1]


def steps_of_plan(maze, start, preference, chance, rng):
    """Steps to the goal of a plan that looks for it, the mean over all tiles it can be on."""
    goals = maze.free - {start[:2]}
    seen = {pose: maze.free.intersection(visible(pose)) for pose in maze.paths(start)}
    unseen, pose, walked, total = set(goals), start, 0, 0

    def look(pose):
        nonlocal total
        for tile in unseen & seen[pose]:
            unseen.remove(tile)
            total += walked + maze.steps(pose, tile)

    look(start)
    while unseen:
        worth = {
            end: len(unseen & seen[end]) ** preference / steps * (1 + chance * rng.random())
            for end, (_, steps) in maze.paths(pose).items()
            if steps
        }
        path = maze.path(pose, max(worth, key=worth.get))
        for pose in path:
            walked += 1
            look(pose)
    return total / len(goals)


def main():
    env, params = xminigrid.make("MiniGrid-FourRooms")
    keys = jax.random.split(jax.random.key(0), MAZES)
    state = jax.jit(jax.vmap(lambda key: env.reset(params, key)))(keys).state
    grids, agents = np.asarray(state.grid[..., 0]), state.agent
    rng, known, unknown = random.Random(0), [], []
    for grid, position, direction in zip(grids, agents.position, agents.direction, strict=True):
        maze, start = Maze(grid), (int(position[0]), int(position[1]), int(direction))
        goals = maze.free - {start[:2]}
        known.append(np.mean([maze.steps(start, goal) for goal in goals]))
        plans = [(preference, chance) for preference in PREFERENCES for chance in CHANCE]
        unknown.append(min(steps_of_plan(maze, start, *plan, rng) for plan in plans))
    for name, steps in [("goal known", known), ("unknown", unknown)]:
        returns = 1 - 0.9 * np.asarray(steps) / params.max_steps  # the environment's reward
        print(f"{name}: {returns.mean():.3f} ± {returns.std() / MAZES**0.5:.3f}")


if __name__ == "__main__":
    main()
