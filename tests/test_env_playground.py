"""environments/playground_envs.py against MuJoCo Playground itself."""

import importlib
import json
import os
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT, SMALL, load_script

import enjoy

mujoco_playground = pytest.importorskip("mujoco_playground")


@pytest.fixture
def envs():
    """The module, on a copy of ppo_obs_norm.py of its own."""
    load_script("ppo_obs_norm")  # comes back at the end
    flags = os.environ["XLA_FLAGS"]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "environments")
        patch.delitem(sys.modules, "ppo_obs_norm")
        patch.delitem(sys.modules, "playground_envs", raising=False)
        module = importlib.import_module("playground_envs")
        os.environ["XLA_FLAGS"] = flags
        yield module
        del sys.modules["playground_envs"]


def test_steps_are_those_of_playground(envs):
    config = envs.Config(env_params='{"episode_length": 20}')
    reset, step, num_actions, is_discrete = envs.make_env(config)
    env = mujoco_playground.registry.load("CartpoleBalance", config_overrides={"impl": "jax"})
    env_reset, env_step, step = jax.jit(env.reset), jax.jit(env.step), jax.jit(step)
    assert (num_actions, is_discrete) == (1, False)
    close = partial(np.testing.assert_allclose, atol=1e-5)

    key = jax.random.PRNGKey(0)
    state = env_reset(key)
    env_state = (state, jnp.int32(0))  # what `reset` returns, but for the observation
    keys = jax.random.split(key, 50)
    for time, key in enumerate(keys, 1):
        action = jax.random.uniform(key, 1, minval=-1, maxval=1)
        outcome = step(key, env_state, action)
        obs, env_state, reward, terminated, truncated, next_obs = outcome
        state = env_step(state, action)
        close(next_obs, state.obs)
        close(reward, state.reward)
        assert not terminated
        assert truncated == (time % 20 == 0)
        if truncated:
            state = env_reset(key)
        close(obs, state.obs)

    # Only physics that become NaN terminate.
    state, time = env_state
    state = state.replace(data=state.data.replace(qvel=jnp.full_like(state.data.qvel, jnp.nan)))
    for steps_done in (time, jnp.int32(19)):  # the latter at the time limit
        outcome = step(key, (state, steps_done), action)
        obs, (_, new_time), reward, terminated, truncated, next_obs = outcome
        assert terminated and not truncated
        assert jnp.isnan(next_obs).any() and jnp.isfinite(reward)
        close(obs, env_reset(key).obs)
        assert new_time == 0


def test_the_observation_of_a_robot_is_that_of_its_sensors(envs, monkeypatch):
    class Robot:
        action_size = 2
        _config = mujoco_playground.registry.get_default_config("CartpoleBalance")

        def reset(self, key):
            obs = {"state": jnp.ones(3), "privileged_state": jnp.zeros(9)}
            zero = jnp.float32(0)
            return mujoco_playground.State(jnp.zeros(4), obs, zero, zero, {}, {})

        def step(self, state, action):
            return state.replace(reward=action.sum())

    monkeypatch.setattr(envs.registry, "load", lambda *args, **kwargs: Robot())
    reset, step, num_actions, _ = envs.make_env(envs.Config(env_id="Go1Getup"))
    key = jax.random.PRNGKey(0)
    obs, env_state = reset(key)
    outcome = step(key, env_state, jnp.ones(num_actions))
    assert obs.tolist() == outcome[0].tolist() == outcome[5].tolist() == [1, 1, 1]
    assert outcome[2] == 2


def test_training(envs, tmp_path):
    options = {"total_timesteps": 32, "env_params": '{"episode_length": 5}'}
    summary = envs.script.main(envs.Config(**SMALL | options, run_dir=str(tmp_path)))
    assert 0 < summary["eval_return_mean"] < 5
    assert len((tmp_path / "metrics.csv").read_text().splitlines()) == 3
    for source in (ROOT / "ppo_obs_norm.py", ROOT / "environments" / "playground_envs.py"):
        assert (tmp_path / source.name).read_bytes() == source.read_bytes()
    assert json.loads((tmp_path / "config.json").read_text())["script"] == "playground_envs"
    act = enjoy.load_policy(tmp_path)  # last: it changes the module that it plays
    action = act(np.zeros(5))
    assert action.shape == (1,) and abs(action) <= 1


def test_errors(envs, capsys):
    with pytest.raises(SystemExit):
        envs.make_env(envs.Config(env_id="list"))
    assert {"CartpoleBalance", "CheetahRun"} < {*capsys.readouterr().out.split()}
    for env_id, params, message in [
        ("Cheetah", "{}", "did you mean CheetahRun"),
        ("CheetahRun", '{"length": 3}', "length.*the fields are.*episode_length"),
        ("CheetahRun", '{"episode_length": "3"}', "episode_length.*the fields are"),
        ("CheetahRun", '{"action_repeat": 2}', "not supported"),
        ("CheetahRun", "[3]", "the fields are"),
        ("CheetahRun", "{", "the fields are"),
    ]:
        with pytest.raises(envs.script.ConfigError, match=message):
            envs.make_env(envs.Config(env_id=env_id, env_params=params))
