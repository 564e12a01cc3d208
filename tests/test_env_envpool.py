"""environments/envpool_envs.py against EnvPool itself."""

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

envpool = pytest.importorskip("envpool")
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
        patch.delitem(sys.modules, "envpool_envs", raising=False)
        module = importlib.import_module("envpool_envs")
        os.environ["XLA_FLAGS"] = flags
        yield module
        del sys.modules["envpool_envs"]


class Alone:
    """EnvPool, which resets an environment in the step after the end of its episode."""

    def __init__(self, keys, env_id, env_params="{}"):
        seeds = np.asarray(jax.vmap(jax.random.bits)(keys) >> 1).tolist()
        # One by one, so that a step of one is none of another.
        make = lambda seed: envpool.make_gymnasium(
            env_id, num_envs=1, env_seed=[seed], **json.loads(env_params)
        )
        self.envs = [make(seed) for seed in seeds]
        self.obs = np.concatenate([env.reset()[0] for env in self.envs])

    def step(self, actions):
        """obs, reward, terminated, truncated, next_obs"""
        outcomes = []
        for env, action in zip(self.envs, actions, strict=True):
            next_obs, reward, terminated, truncated, _ = env.step(action[None])
            obs = next_obs
            if terminated or truncated:
                obs, zero, *ended, _ = env.step(action[None])
                assert zero == 0 and not any(ended)
            outcomes.append((obs, reward, terminated, truncated, next_obs))
        return [np.concatenate(x) for x in zip(*outcomes, strict=True)]


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
def test_steps_are_those_of_envpool(envs, env_id, limit, size, ends):
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
        in_range = actions if is_discrete else np.float32(space.high) * actions
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
        compare(outcome, [x[0] for x in alone.step(np.ones(1, int))])


def test_resets_of_evaluations_do_not_touch_the_environments_of_training(envs):
    """`init` resets two times N environments, and either half may be first. Then come others."""
    reset, step, *_ = envs.make_env(envs.Config(**CARTPOLE))
    reset, step = jax.jit(jax.vmap(reset)), jax.jit(jax.vmap(step))
    halves = [(KEYS, Alone(KEYS, **CARTPOLE)), (KEYS[::-1], Alone(KEYS[::-1], **CARTPOLE))]
    states = [reset(keys)[1] for keys, _ in halves]
    first = []
    for _ in range(3):
        new = jax.random.split(jax.random.PRNGKey(5), len(KEYS))  # as many
        obs, env_state = reset(new)
        first += obs.tolist()
        step(new, env_state, jnp.ones(len(KEYS), int))
        for env_state, (keys, alone) in zip(states, halves, strict=True):
            for _ in range(4):
                actions = jnp.arange(len(keys)) % 2
                compare(step(keys, env_state, actions), alone.step(np.asarray(actions)))
    assert len({tuple(x) for x in first}) == 9  # each evaluation has new episodes


def test_other_observations_become_vectors(envs):
    reset, step, *_ = envs.make_env(envs.Config(env_id="FrozenLake-v1"))
    obs, env_state = reset(KEYS[0])
    assert obs.tolist() == np.eye(16)[0].tolist()
    obs, *_ = step(KEYS[0], env_state, jnp.int32(2))
    assert obs.shape == (16,) and obs.sum() == 1
    env_id = "CheetahRun-v1"
    obs, _ = envs.make_env(envs.Config(env_id=env_id))[0](KEYS[0])
    seed = int(jax.random.bits(KEYS[0]) >> 1)
    parts, _ = envpool.make_gymnasium(env_id, num_envs=1, env_seed=[seed]).reset()
    np.testing.assert_allclose(obs, [*parts["position"][0], *parts["velocity"][0]], atol=1e-6)


def test_training_and_continuing(envs, tmp_path):
    options = {"env_id": "CartPole-v1", "env_params": '{"max_episode_steps": 7}'}
    options |= {"total_timesteps": 32, "run_dir": str(tmp_path)}
    config = envs.Config(**SMALL | options)
    assert envs.script.main(config)["env_steps"] == 32
    for source in (ROOT / "ppo_obs_norm.py", ROOT / "environments" / "envpool_envs.py"):
        assert (tmp_path / source.name).read_bytes() == source.read_bytes()
    assert json.loads((tmp_path / "config.json").read_text())["script"] == "envpool_envs"
    more = dataclasses.replace(config, total_timesteps=64)
    assert envs.script.main(more)["env_steps"] == 64  # in new environments
    assert len((tmp_path / "metrics.csv").read_text().splitlines()) == 1 + 4
    act = enjoy.load_policy(tmp_path)  # last: it changes the module that it plays
    assert act(np.zeros(4)) in (0, 1)


def test_errors(envs, capsys):
    with pytest.raises(SystemExit):
        envs.make_env(envs.Config(env_id="list"))
    assert {"CartPole-v1", "HalfCheetah-v5"} < {*capsys.readouterr().out.split()}
    for options, message in [
        ({"env_id": "CartPol-v1"}, "unknown env_id CartPol-v1: did you mean CartPole-v"),
        ({"env_id": "CartPole-v1", "env_params": '{"length": 3}'}, "env_params.*'length'"),
        ({"env_id": "CartPole-v1", "env_params": '{"max_episode_steps": "3"}'}, "env_params"),
        ({"env_id": "CartPole-v1", "env_params": "[3]"}, "env_params"),
        ({"env_id": "CartPole-v1", "env_params": "{"}, "env_params"),
        ({"env_id": "CartPole-v1", "num_seeds": 2}, "only one seed"),
        ({"env_id": "Pong-v5"}, "images"),
    ]:
        with pytest.raises(envs.script.ConfigError, match=message):
            envs.make_env(envs.Config(**options))
