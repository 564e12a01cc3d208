"""Small environments with known values, and helpers to train any script on them.

An observation is one of `NUM_STATES` states: one-hot for the feed-forward networks, the tile of
every cell for the recurrent one. Actions are 0 or 1 (`Probe*-discrete`), or lie between `LOW` and
`HIGH` (`Probe*-continuous`).
"""

import contextlib
import functools

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
        """Returns the reward of the step from `time` and whether the episode terminates."""
        raise NotImplementedError

    def time_limit(self, kind):
        return 1000

    def match(self, action, goal):
        """1 for the action `goal`, less for every other action."""
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
    """Five tasks, one per episode."""

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
    """Shows the time. The time limit is 6; action 1 terminates from time 4, even at the limit."""

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
    """One step; the best action is 2.5 in state 0 and 0 in state 1. For continuous actions."""

    num_kinds = 2

    def see(self, kind, time):
        return kind

    def outcome(self, kind, time, action):
        return self.match(action, jnp.where(kind == 0, 2.5, 0.0)), True


for cls in (Tasks, Clock, Cue, Target):
    gymnax.register(f"Probe{cls.__name__}-discrete", functools.partial(cls, continuous=False))
    gymnax.register(f"Probe{cls.__name__}-continuous", functools.partial(cls, continuous=True))


def probe_config(module, name, **changes):
    """A small configuration of the script for one of the environments above."""
    env_id = f"Probe{name}-{'continuous' if module.SCRIPT in CONTINUOUS else 'discrete'}"
    sizes = {"conv_size": 8, "embedding_size": 8, "head_size": 4}  # narrow layers can die
    sizes = {k: v for k, v in sizes.items() if k in module.Config.__dataclass_fields__}
    return tiny(module, **{"env_id": env_id, **sizes, **changes})


def observe(module, obs):
    """An observation for ppo_rnn: the state is the tile of every cell."""
    grid = jnp.zeros((4, 4, 2), jnp.uint8).at[..., 0].set(jnp.argmax(obs).astype(jnp.uint8))
    return module.Observation(grid, jnp.int32(0), jnp.int32(-1), jnp.float32(0))


def make_recurrent_env(module):
    """A make_env for ppo_rnn."""

    def make_env(config):
        env, params = gymnax.make(config.env_id)

        def reset(key):
            obs, env_state = env.reset(key, params)
            return observe(module, obs), env_state

        def step(key, env_state, action):
            obs, env_state, *outcome, info = env.step(key, env_state, action, params)
            next_obs = observe(module, info["final_observation"])
            return observe(module, obs), env_state, *outcome, next_obs

        return reset, step, 2

    return make_env


@contextlib.contextmanager
def probes_for(module):
    """Within it, the script knows the environments above."""
    with pytest.MonkeyPatch.context() as patch:
        if module.SCRIPT == "ppo_rnn":
            patch.setattr(module, "make_env", make_recurrent_env(module))
        yield patch


def start(module, config, seed=0):
    """Returns state, train."""
    init, train, *_ = module.make_train(config)
    return init(jax.random.split(jax.random.PRNGKey(seed), jax.local_device_count())), train


def to_numpy(tree):
    return jax.tree.map(np.array, tree)


def network_of(module, config):
    """The network that make_train builds."""
    built = []
    cls = module.ActorCritic

    def build(*args, **kwargs):
        built.append(cls(*args, **kwargs))
        return built[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "ActorCritic", build)
        module.make_train(config)
    (network,) = built
    return network


def apply_once(network, params, obs, hidden, reset=False):
    """The recurrent network on a sequence of one observation -> policy, value [], hidden [H]."""
    obs = jax.tree.map(lambda x: x[None], obs)
    outputs = network.apply(params, obs, hidden, jnp.array([reset]))
    return jax.tree.map(lambda x: x[0], outputs)


@functools.cache
def make_policy(module, config):
    """Returns policy(params, obs, memory) -> distribution, value, memory, of one environment.

    `params` are those of one seed on one device. The memory of a new episode is None.
    """
    network = network_of(module, config)

    @jax.jit
    def policy(params, obs, memory):
        if module.SCRIPT == "ppo_rnn":
            memory = jnp.zeros(config.hidden_size) if memory is None else memory
            return apply_once(network, params, obs, memory)
        return *network.apply(params, obs), None

    return policy


def to_env(distribution, action):
    """The action that the environment receives."""
    return distribution.to_env(action) if hasattr(distribution, "to_env") else action


def look(module, config, params, states):
    """Most likely actions [T] and values [T] in an episode that visits these states.

    Continuous actions are in the units of the environment.
    """
    policy = make_policy(module, config)
    memory = None
    actions = []
    values = []
    for state in states:
        obs = jax.nn.one_hot(state, NUM_STATES)
        obs = observe(module, obs) if module.SCRIPT == "ppo_rnn" else obs
        distribution, value, memory = policy(params, obs, memory)
        actions.append(np.ravel(to_env(distribution, distribution.mode()))[0])
        values.append(value)
    if config.env_id.endswith("continuous"):
        actions = (LOW + HIGH) / 2 + (HIGH - LOW) / 2 * np.array(actions)
    return np.array(actions), np.array(values)


def make_player(module, config):
    """Returns play(params, key) -> return and length of one episode, with the scripts' keys."""
    reset, step, *_ = module.make_env(config)
    policy = make_policy(module, config)

    @jax.jit
    def one_step(params, key, env_state, obs, memory):
        key, action_key, step_key = jax.random.split(key, 3)
        distribution, _, memory = policy(params, obs, memory)
        action = distribution.sample(seed=action_key)
        outcome = step(step_key, env_state, to_env(distribution, action))
        obs, env_state, reward, terminated, truncated, _ = outcome
        return (key, env_state, obs, memory), reward, terminated | truncated

    def play(params, key):
        key, reset_key = jax.random.split(key)
        obs, env_state = reset(reset_key)
        state = (key, env_state, obs, None)
        rewards = []
        done = False
        while not done:
            state, reward, done = one_step(params, *state)
            rewards.append(float(reward))
        return sum(rewards), len(rewards)

    return play
