"""Brax tasks, against the unwrapped environment: endings, final observations, resets."""

import brax.envs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import load_script

import enjoy

ENV_ID = "inverted_pendulum"  # terminates when the pole falls
NUM_STEPS = 24
SCRIPTS = ("ppo_continuous", "ppo_obs_norm", "ppo_vtrace")


@pytest.fixture(scope="module")
def env():
    return brax.envs.get_environment(ENV_ID)


def play(module, time_limit, push):
    """NUM_STEPS steps with a constant action: states before each step, keys and outcomes."""
    config = module.Config(
        env_id=f"brax/{ENV_ID}", env_params=f'{{"max_steps_in_episode": {time_limit}}}'
    )
    reset, step, *_ = module.make_env(config)
    keys = jax.random.split(jax.random.PRNGKey(1), NUM_STEPS)
    first_obs, first_state = jax.jit(reset)(jax.random.PRNGKey(0))

    def scan(env_state, key):
        outcome = step(key, env_state, jnp.array([push]))
        return outcome[1], (outcome[0], *outcome[2:])

    _, outcomes = jax.jit(lambda state: jax.lax.scan(scan, state, keys))(first_state)
    return first_obs, keys, *map(np.array, outcomes)


@pytest.mark.parametrize("time_limit, push", [(5, 0.0), (1000, 1.0)])
@pytest.mark.parametrize("script", SCRIPTS[:2])  # that of ppo_vtrace is ppo_obs_norm's
def test_episodes_are_those_of_the_unwrapped_environment(script, time_limit, push, env):
    outcome = play(load_script(script), time_limit, push)
    first_obs, keys, obs, reward, terminated, truncated, next_obs = outcome
    reset, step = jax.jit(env.reset), jax.jit(env.step)
    state, age = reset(jax.random.PRNGKey(0)), 0
    np.testing.assert_allclose(first_obs, state.obs, atol=1e-6)
    for t in range(NUM_STEPS):
        state, age = step(state, jnp.array([push])), age + 1
        fell = bool(state.done)
        np.testing.assert_allclose(next_obs[t], state.obs, atol=1e-4)
        np.testing.assert_allclose(reward[t], state.reward, atol=1e-4)
        assert terminated[t] == fell and truncated[t] == (age == time_limit and not fell)
        if fell or age == time_limit:
            state, age = reset(keys[t]), 0  # a new state, not that of the first reset
            assert not np.allclose(state.obs, first_obs)
        np.testing.assert_allclose(obs[t], state.obs, atol=1e-4)
    ends = truncated if time_limit < NUM_STEPS else terminated
    assert ends.sum() >= 2
    assert not (terminated if time_limit < NUM_STEPS else truncated).any()


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_script_knows_every_task_of_brax(script):
    """By name, so that an unknown one is an error without importing Brax."""
    module = load_script(script)
    for name in [*brax.envs._envs, "none"]:
        with pytest.raises(module.ConfigError) as error:
            module.make_env(module.Config(env_id=f"brax/{name}", env_params="[]"))
        assert ("unknown env_id" in str(error.value)) == (name == "none")


def test_double_precision_leaves_every_type_as_it_is():
    module = load_script("ppo_obs_norm")
    config = module.Config(env_id=f"brax/{ENV_ID}", num_envs=2, num_steps=2, num_minibatches=1)
    with jax.enable_x64(True):
        init, train, *_ = module.make_train(config)
        state = jax.eval_shape(init, jax.ShapeDtypeStruct((1, 2), jnp.uint32))
        after, metrics = jax.eval_shape(train, state)
    describe = lambda x: (x.shape, x.dtype)
    assert jax.tree.map(describe, state) == jax.tree.map(describe, after)
    for x in jax.tree.leaves((after.params, after.opt_state, after.runners.obs, metrics)):
        assert x.dtype in (jnp.float32, jnp.int32)


@pytest.mark.parametrize("script", ["ppo_continuous"])
def test_a_video_holds_every_state(script, tmp_path):
    module = load_script(script)
    config = module.Config(env_id=f"brax/{ENV_ID}")
    reset, step, *_ = module.make_env(config)
    key = jax.random.PRNGKey(0)
    env_state, steps = reset(key)[1], []
    for _ in range(2):
        steps.append(enjoy.Step(key, env_state, jnp.ones(1), np.float32(1)))
        _, env_state, _, terminated, _, final_obs = jax.jit(step)(key, env_state, jnp.ones(1))
    video = tmp_path / "out.html"
    assert enjoy.write_video(video, config, [steps]) == 3
    assert "<html" in video.read_text()
    last = enjoy.states_of(steps, enjoy.make_viewer(config))[-1]
    assert terminated  # so that `env_state` is already that of the next episode
    np.testing.assert_allclose(last.obs, final_obs, atol=1e-5)
