"""environments/gymnasium_envs.py against Gymnasium itself."""

import contextlib
import dataclasses
import importlib
import json
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT, SMALL, load_script

import enjoy

gymnasium = pytest.importorskip("gymnasium")
KEYS = jax.random.split(jax.random.PRNGKey(0), 3)  # of three environments
CARTPOLE = {"env_id": "CartPole-v1", "env_params": '{"max_episode_steps": 18}'}


@pytest.fixture
def envs():
    """The module, on a copy of ppo_obs_norm.py of its own."""
    load_script("ppo_obs_norm")  # comes back at the end
    flags = os.environ["XLA_FLAGS"]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "environments")
        patch.delitem(sys.modules, "ppo_obs_norm")
        patch.delitem(sys.modules, "gymnasium_envs", raising=False)
        module = importlib.import_module("gymnasium_envs")
        os.environ["XLA_FLAGS"] = flags
        yield module
        del sys.modules["gymnasium_envs"]


def test_the_help_is_that_of_the_file(envs, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gymnasium_envs.py", "--help"])
    with pytest.raises(SystemExit):
        envs.script.cli()
    out = capsys.readouterr().out
    assert "PPO on Gymnasium" in out and "Gymnasium environment" in out and "HalfCheetah" in out
    assert [out.count(f"{box} options") for box in ("environment", "algorithm", "run")] == [1, 1, 1]


class Alone:
    """Environments of Gymnasium, stepped one by one."""

    def __init__(self, keys, env_id, env_params="{}"):
        seeds = np.asarray(jax.vmap(jax.random.bits)(keys) >> 1).tolist()
        params = json.loads(env_params)
        self.envs = [gymnasium.make(env_id, **params) for _ in seeds]
        self.obs = np.stack([env.reset(seed=x)[0] for env, x in zip(self.envs, seeds, strict=True)])

    def step(self, actions):
        """obs, reward, terminated, truncated, next_obs"""
        outcomes = []
        for env, action in zip(self.envs, actions, strict=True):
            next_obs, reward, terminated, truncated, _ = env.step(action)
            obs = env.reset()[0] if terminated or truncated else next_obs
            outcomes.append((obs, reward, terminated, truncated, next_obs))
        return [np.stack(x) for x in zip(*outcomes, strict=True)]


def random_action(key, is_discrete, size):
    uniform = jax.random.uniform(key, (size,), minval=-1, maxval=1)
    return jax.random.randint(key, (), 0, size) if is_discrete else uniform


def compare(outcome, expected):
    obs, _, *rest = outcome
    for x, y in zip((obs, *rest), expected, strict=True):
        assert x.dtype in (np.float32, bool)
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("env_id", "limit", "size", "ends"),
    [
        ("CartPole-v1", 18, 2, {"terminated", "truncated"}),
        ("Pendulum-v1", 20, 1, {"truncated"}),  # its actions are in [-2, 2]
        ("HalfCheetah-v5", 20, 6, {"truncated"}),
        ("Hopper-v5", 20, 3, {"terminated", "truncated"}),
    ],
)
def test_steps_are_those_of_gymnasium(envs, env_id, limit, size, ends):
    if env_id.endswith("v5"):
        pytest.importorskip("mujoco")
    options = {"env_id": env_id, "env_params": json.dumps({"max_episode_steps": limit})}
    reset, step, num_actions, is_discrete = envs.make_env(envs.Config(**options))
    assert (num_actions, is_discrete) == (size, env_id == "CartPole-v1")
    step, alone, seen = jax.jit(jax.vmap(step)), Alone(KEYS, **options), set()
    obs, env_state = jax.jit(jax.vmap(reset))(KEYS)
    np.testing.assert_allclose(obs, alone.obs, atol=1e-6)
    space = alone.envs[0].action_space
    for key in jax.random.split(jax.random.PRNGKey(1), 50):
        keys = jax.random.split(key, len(KEYS))
        actions = jnp.stack([random_action(key, is_discrete, num_actions) for key in keys])
        outcome = step(keys, env_state, actions)
        env_state = outcome[1]
        in_range = actions if is_discrete else space.low + (actions + 1) / 2 * (2 * space.high)
        expected = alone.step(np.asarray(in_range))
        compare(outcome, expected)
        seen |= {"terminated"} if expected[2].any() else set()
        seen |= {"truncated"} if expected[3].any() else set()
    assert seen == ends


def test_a_single_environment(envs):
    """As a video has it: without vmap."""
    reset, step, *_ = envs.make_env(envs.Config(**CARTPOLE))
    alone = Alone(KEYS[:1], **CARTPOLE)
    obs, env_state = reset(KEYS[0])
    np.testing.assert_allclose(obs, alone.obs[0])
    for _ in range(20):
        outcome = step(KEYS[0], env_state, jnp.int32(1))
        compare(outcome, [x[0] for x in alone.step([1])])


def test_resets_of_evaluations_do_not_touch_the_environments_of_training(envs):
    """`init` resets two times N environments, and either half may be first. Then come others."""
    reset, step, *_ = envs.make_env(envs.Config(**CARTPOLE))
    reset, step = jax.jit(jax.vmap(reset)), jax.jit(jax.vmap(step))
    halves = [(KEYS, Alone(KEYS, **CARTPOLE)), (KEYS[::-1], Alone(KEYS[::-1], **CARTPOLE))]
    states = [reset(keys)[1] for keys, _ in halves]
    for number in (5, 6, 7):
        new = jax.random.split(jax.random.PRNGKey(number), len(KEYS))  # as many
        obs, env_state = reset(new)
        np.testing.assert_allclose(obs, Alone(new, **CARTPOLE).obs)
        step(new, env_state, jnp.ones(len(KEYS), int))
        for env_state, (keys, alone) in zip(states, halves, strict=True):
            for _ in range(4):
                actions = jnp.arange(len(keys)) % 2
                compare(step(keys, env_state, actions), alone.step(np.asarray(actions)))


def test_other_observations_become_vectors(envs):
    reset, step, *_ = envs.make_env(envs.Config(env_id="FrozenLake-v1"))
    obs, env_state = reset(KEYS[0])
    assert obs.tolist() == np.eye(16)[0].tolist()
    obs, *_ = step(KEYS[0], env_state, jnp.int32(2))
    assert obs.shape == (16,) and obs.sum() == 1
    reset, *_ = envs.make_env(envs.Config(env_id="Blackjack-v1"))
    assert reset(KEYS[0])[0].shape == (32 + 11 + 2,)


def test_training_and_continuing(envs, tmp_path):
    options = {"env_id": "Pendulum-v1", "env_params": '{"max_episode_steps": 7}'}
    options |= {"total_timesteps": 32, "run_dir": str(tmp_path)}
    config = envs.Config(**SMALL | options)
    assert envs.script.main(config)["env_steps"] == 32
    for source in (ROOT / "ppo_obs_norm.py", ROOT / "environments" / "gymnasium_envs.py"):
        assert (tmp_path / source.name).read_bytes() == source.read_bytes()
    assert json.loads((tmp_path / "config.json").read_text())["script"] == "gymnasium_envs"
    more = dataclasses.replace(config, total_timesteps=64)
    assert envs.script.main(more)["env_steps"] == 64  # in new environments
    assert len((tmp_path / "metrics.csv").read_text().splitlines()) == 1 + 4
    act = enjoy.load_policy(tmp_path)  # last: it changes the module that it plays
    assert np.abs(act(np.zeros(3))) <= 1


def test_errors(envs, capsys):
    with pytest.raises(SystemExit):
        envs.make_env(envs.Config(env_id="list"))
    assert {"CartPole-v1", "HalfCheetah-v5"} < {*capsys.readouterr().out.split()}
    for options, message in [
        ({"env_id": "CartPol-v1"}, "unknown env_id CartPol-v1: did you mean CartPole-v"),
        ({"env_id": "nowhere:CartPole-v1"}, "No module named 'nowhere'"),
        ({"env_id": "CartPole-v1", "env_params": '{"length": 3}'}, "env_params.*'length'"),
        ({"env_id": "CartPole-v1", "env_params": "[3]"}, "env_params"),
        ({"env_id": "CartPole-v1", "env_params": "{"}, "env_params"),
        ({"env_id": "CartPole-v1", "num_seeds": 2}, "only one seed"),
    ]:
        with pytest.raises(envs.script.ConfigError, match=message):
            envs.make_env(envs.Config(**options))
    space = gymnasium.spaces.MultiDiscrete([10] * 5)  # 100,000 combinations
    with (
        registered("Lock-v0", space),
        pytest.raises(envs.script.ConfigError, match="actions of another kind: MultiDiscrete"),
    ):
        envs.make_env(envs.Config(env_id="Lock-v0"))


@pytest.mark.parametrize(
    ("space", "choices"),
    [
        (gymnasium.spaces.Discrete(3, start=-1), [-1, 0, 1]),
        (gymnasium.spaces.MultiDiscrete([2, 3]), [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]),
        (
            gymnasium.spaces.MultiDiscrete([[2], [2]], start=[[5], [0]]),
            [[5, 0], [5, 1], [6, 0], [6, 1]],
        ),
    ],
)
def test_an_action_of_the_policy_is_a_combination_of_parts(envs, space, choices):
    """The environment tells in its observation which action it was given."""
    with registered("Lock-v0", space):
        reset, step, num_actions, is_discrete = envs.make_env(envs.Config(env_id="Lock-v0"))
        assert (num_actions, is_discrete) == (len(choices), True)
        keys = jax.random.split(KEYS[0], num_actions)
        _, env_state = jax.vmap(reset)(keys)
        obs, *_ = jax.jit(jax.vmap(step))(keys, env_state, jnp.arange(num_actions))
        assert obs.tolist() == np.reshape(choices, obs.shape).tolist()


@contextlib.contextmanager
def registered(name, space):
    gymnasium.register(name, entry_point=lambda: Lock(space))
    yield
    del gymnasium.registry[name]


class Lock(gymnasium.Env):
    """Its observation is the last action."""

    def __init__(self, space):
        self.action_space = space
        self.observation_space = gymnasium.spaces.Box(-9, 9, (max(1, np.prod(space.shape)),))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(self.observation_space.shape, np.float32), {}

    def step(self, action):
        assert action in self.action_space
        return np.float32(action).reshape(-1), 0.0, False, False, {}
