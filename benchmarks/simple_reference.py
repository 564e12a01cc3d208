"""What two agents can reach in MPE_simple_reference_v3 with messages and without.

    python benchmarks/simple_reference.py

In this environment each agent sees the goal of the other, one of three landmarks, and can name it
in a message. Here no network acts: at every step an agent makes the move after which it is nearest
to its target. The target is its own goal, which only messages could tell it, or the point whose
mean distance to the three landmarks is least, the best one without a message. Prints the mean
return, summed over the agents, and its standard error.
"""

import jax
import jax.numpy as jnp
import jaxmarl

EPISODES = 10_000
STEPS = 25
COASTING = 0.1  # seconds that an agent keeps its velocity after the step

env = jaxmarl.make("MPE_simple_reference_v3")


def geometric_median(points):
    """The point [2] with the least mean distance to points [P, 2]: Weiszfeld's algorithm."""

    def step(_, point):
        weights = 1 / jnp.maximum(jnp.linalg.norm(points - point, axis=-1), 1e-3)
        return weights @ points / weights.sum()

    return jax.lax.fori_loop(0, 50, step, points.mean(0))


def episode(key, with_messages):
    """The return of an episode, summed over the agents."""
    _, state = env.reset(key)
    landmarks = state.p_pos[env.num_agents :]
    goals = landmarks[state.goal]
    targets = jnp.where(with_messages, goals, geometric_median(landmarks))

    def best_moves(state):
        """The move [K] of each of K agents out of five, none of which says anything."""

        def distances(move):
            actions = dict.fromkeys(env.agents, move)
            _, state_after, *_ = env.step_env(key, state, actions)
            agents = jnp.arange(env.num_agents)
            position = state_after.p_pos[agents] + COASTING * state_after.p_vel[agents]
            return jnp.linalg.norm(position - targets, axis=-1)

        return jax.vmap(distances)(jnp.arange(5)).argmin(0)

    def step(state, _):
        actions = dict(zip(env.agents, best_moves(state), strict=True))
        _, state, rewards, *_ = env.step_env(key, state, actions)
        return state, sum(rewards.values())

    return jax.lax.scan(step, state, length=STEPS)[1].sum()


def main():
    keys = jax.random.split(jax.random.key(0), EPISODES)
    for name, with_messages in [("with messages", True), ("without", False)]:
        returns = jax.jit(jax.vmap(episode, (0, None)))(keys, with_messages)
        print(f"{name}: {returns.mean():.2f} ± {returns.std() / EPISODES**0.5:.2f}")


if __name__ == "__main__":
    main()
