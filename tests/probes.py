"""Small environments whose values are known, and what is needed to train any script on them.

An observation says in which of `NUM_STATES` states the environment is: one-hot for the feed-forward
networks, the tile of every cell for the recurrent one. Actions are 0 or 1 (`Probe*-discrete`), or
lie between `LOW` and `HIGH` (`Probe*-continuous`).
"""

import contextlib

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import tiny
from flax import struct
from gymnax.environments import environment, spaces

NUM_STATES, LOW, HIGH = 8, -1.0, 3.0
CONTINUOUS = ("ppo_continuous", "ppo_obs_norm")


@struct.dataclass
class State(environment.EnvState):
    kind: jax.Array


class Probe(environment.Environment):
    num_kinds = 1

    def __init__(self, continuous):
        self.continuous = continuous

    def see(self, kind, time):
        raise NotImplementedError

    def outcome(self, kind, time, action):
        """Returns the reward of the step from `time`, and whether it ends the episode."""
        raise NotImplementedError

    def time_limit(self, kind):
        return 1000

    def match(self, action, goal):
        """1 for the action `goal`, which is 0 or 1, less for every other action."""
        return 1 - (action - goal) ** 2 if self.continuous else jnp.float32(action == goal)

    def get_obs(self, state):
        return jax.nn.one_hot(self.see(state.kind, state.time), NUM_STATES)

    def reset_env(self, key, params):
        state = State(jnp.int32(0), jax.random.randint(key, (), 0, self.num_kinds))
        return self.get_obs(state), state

    def step_env(self, key, state, action, params):
        action = action[0] if self.continuous else action
        reward, terminated = self.outcome(state.kind, state.time, action)
        state = state.replace(time=state.time + 1)
        return self.get_obs(state), state, reward, terminated, {}

    def is_truncated(self, state, params):
        return state.time >= self.time_limit(state.kind)

    def action_space(self, params=None):
        return spaces.Box(LOW, HIGH, (1,)) if self.continuous else spaces.Discrete(2)

    def observation_space(self, params=None):
        return spaces.Box(0, 1, (NUM_STATES,))


class Tasks(Probe):
    """Five questions, one of them asked in each episode."""

    constant, delayed, negative, choice, endless = range(5)
    num_kinds = 5

    def see(self, kind, time):
        # Only `delayed` shows the time, as state 5 in its second step.
        return jnp.where((kind == self.delayed) & (time == 1), 5, kind)

    def outcome(self, kind, time, action):
        rewards = [1.0, 1.0 * (time == 1), -1.0, self.match(action, 1), 1.0]
        terminated = (kind != self.endless) & ((kind != self.delayed) | (time == 1))
        return jnp.stack(jax.tree.map(jnp.float32, rewards))[kind], terminated

    def time_limit(self, kind):
        return jnp.where(kind == self.endless, 3, 1000)


class Clock(Probe):
    """Shows the time. The time limit is 6; from 4 on, action 1 terminates, even at the limit."""

    def see(self, kind, time):
        return time

    def outcome(self, kind, time, action):
        return 1.0 + time, (time >= 4) & (action > 0.5)

    def time_limit(self, kind):
        return 6


class Cue(Probe):
    """State 0 or 1 on the first step; the action of the fourth and last step must repeat it."""

    num_kinds = 2

    def see(self, kind, time):
        return jnp.where(time == 0, kind, 1 + time)

    def outcome(self, kind, time, action):
        return self.match(action, kind) * (time == 3), time == 3


class Target(Probe):
    """One step; what is asked for is 2.5 in state 0 and 0 in state 1. For continuous actions."""

    num_kinds = 2

    def see(self, kind, time):
        return kind

    def outcome(self, kind, time, action):
        return self.match(action, jnp.where(kind == 0, 2.5, 0.0)), True


for cls in (Tasks, Clock, Cue, Target):
    gymnax.register(f"Probe{cls.__name__}-discrete", lambda cls=cls: cls(continuous=False))
    gymnax.register(f"Probe{cls.__name__}-continuous", lambda cls=cls: cls(continuous=True))


def probe_config(module, name, **changes):
    """A small configuration of the script for one of the environments above."""
    env_id = f"Probe{name}-{'continuous' if module.SCRIPT in CONTINUOUS else 'discrete'}"
    sizes = {"conv_size": 2, "embedding_size": 4, "head_size": 4}
    sizes = {k: v for k, v in sizes.items() if k in module.Config.__dataclass_fields__}
    return tiny(module, **{"env_id": env_id, **sizes, **changes})


def make_recurrent_env(module):
    """A make_env for ppo_rnn: the state is the tile of every cell, and nothing else is shown."""

    def observe(obs):
        grid = jnp.zeros((4, 4, 2), jnp.uint8).at[..., 0].set(jnp.argmax(obs).astype(jnp.uint8))
        return module.Observation(grid, jnp.int32(0), jnp.int32(-1), jnp.float32(0))

    def make_env(config):
        env, params = gymnax.make(config.env_id)

        def reset(key):
            obs, env_state = env.reset(key, params)
            return observe(obs), env_state

        def step(key, env_state, action):
            obs, env_state, *outcome, info = env.step(key, env_state, action, params)
            return observe(obs), env_state, *outcome, observe(info["final_observation"])

        return jax.vmap(reset), jax.vmap(step), 2

    return make_env


@contextlib.contextmanager
def probes_for(module):
    """Within it, the script knows the environments above."""
    with pytest.MonkeyPatch.context() as patch:
        if module.SCRIPT == "ppo_rnn":
            patch.setattr(module, "make_env", make_recurrent_env(module))
        yield patch


def start(module, config, num_updates=None, seed=0):
    """Returns state, train."""
    init, train = module.make_train(config, num_updates)
    return init(jax.random.split(jax.random.key(seed), jax.local_device_count())), train


def to_numpy(tree):
    """With random keys as the integers they hold."""
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.tree.map(lambda x: np.array(jax.random.key_data(x) if is_key(x) else x), tree)


def look(module, config, params, states):
    """Modes of the action [T] and values [T] in an episode that goes through these states.

    `params` are those of one seed on one device.
    """
    config = module.resolve(config)
    _, _, actions = module.make_env(config)  # how many, or their bounds
    network = module.ActorCritic(actions, config)
    obs = jax.nn.one_hot(jnp.array(states), NUM_STATES)
    if module.SCRIPT == "ppo_rnn":
        count = len(states)
        grid = jnp.zeros((count, 1, 4, 4, 2), jnp.uint8)
        grid = grid.at[..., 0].set(jnp.array(states, jnp.uint8)[:, None, None, None])
        obs = module.Observation(
            grid, jnp.zeros((count, 1), int), jnp.full((count, 1), -1), jnp.zeros((count, 1))
        )
        hidden = jnp.zeros((1, config.hidden_size))
        reset = jnp.full((count, 1), not config.memory)
        distribution, value, _ = network.apply(params, obs, hidden, reset)
        return np.array(distribution.mode())[:, 0], np.array(value)[:, 0]
    if module.SCRIPT == "ppo_ff":
        distribution, value = network.apply(params, obs)
        return np.array(distribution.mode()), np.array(value)
    distribution, value = network.apply(params, obs)
    return np.array(distribution.to_env(distribution.mode()))[:, 0], np.array(value)
