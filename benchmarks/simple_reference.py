"""What hand-written agents get in MPE_simple_reference_v3 if they know their goals, and if not.

    python benchmarks/simple_reference.py

In this environment each agent sees the goal of the other, one of three landmarks, and can name it
in a message, which arrives one step later. Here agents say nothing: at every step each makes the
move after which it is nearest to its target. The target is its own goal (known) or the point whose
mean distance to the three landmarks is least (unknown). Prints the mean return, summed over the
agents, and its standard error. Neither is a bound: better control is possible.
"""

import jax
import jax.numpy as jnp
import jaxmarl

env = jaxmarl.make("MPE_simple_reference_v3")

EPISODES = 10_000
STEPS = env.max_steps + 1  # MPE tests the limit before it counts the step


def geometric_median(points):
    """The point [2] with the least mean distance to points [P, 2]: Weiszfeld's algorithm."""

    def step(_, point):
        weights = 1 / jnp.maximum(jnp.linalg.norm(points - point, axis=-1), 1e-3)
        return weights @ points / weights.sum()

    return jax.lax.fori_loop(0, 50, step, points.mean(0))


def episode(key, goals_known):
    """The return of an episode, summed over the agents."""
    _, state = env.reset(key)
    landmarks = state.p_pos[env.num_agents :]
    targets = jnp.where(goals_known, landmarks[state.goal], geometric_median(landmarks))

    def best_moves(state):
        """The best of the five moves [K] of each of K agents."""

        def distances(move):
            _, after, *_ = env.step_env(key, state, dict.fromkeys(env.agents, move))
            # A move changes the velocity, and only that the next position.
            position = (after.p_pos + env.dt * after.p_vel)[: env.num_agents]
            return jnp.linalg.norm(position - targets, axis=-1)

        return jax.vmap(distances)(jnp.arange(5)).argmin(0)

    def step(state, _):
        actions = dict(zip(env.agents, best_moves(state), strict=True))
        _, state, rewards, *_ = env.step_env(key, state, actions)
        return state, sum(rewards.values())

    return jax.lax.scan(step, state, length=STEPS)[1].sum()


def main():
    keys = jax.random.split(jax.random.key(0), EPISODES)  # the environment's steps draw nothing
    for name, goals_known in [("goals known", True), ("unknown", False)]:
        returns = jax.jit(jax.vmap(episode, (0, None)))(keys, goals_known)
        print(f"{name}: {returns.mean():.2f} ± {returns.std() / EPISODES**0.5:.2f}")


if __name__ == "__main__":
    main()
