"""environments/atari_envs.py against EnvPool itself, and its network against XLA's convolution."""

import importlib
import json
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT, SMALL, load_script

envpool = pytest.importorskip("envpool")
KEYS = jax.random.split(jax.random.PRNGKey(0), 2)
LIMIT = {"max_episode_steps": 100}  # within these, Pong's first points are lost


@pytest.fixture
def envs():
    """The module, on a copy of ppo_ff.py of its own."""
    load_script("ppo_ff")  # comes back at the end
    flags = os.environ["XLA_FLAGS"]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "environments")
        patch.delitem(sys.modules, "ppo_ff")
        patch.delitem(sys.modules, "atari_envs", raising=False)
        module = importlib.import_module("atari_envs")
        os.environ["XLA_FLAGS"] = flags
        yield module
        del sys.modules["atari_envs"]


def test_steps_are_those_of_envpool(envs):
    config = envs.Config(env_params=json.dumps(LIMIT))
    reset, step, num_actions = envs.make_env(config)
    assert num_actions == 6
    seeds = np.asarray(jax.vmap(jax.random.bits)(KEYS) >> 1).tolist()
    alone = envpool.make_gymnasium("Pong-v5", num_envs=2, env_seed=seeds, **LIMIT)
    frames_last = lambda obs: np.stack([np.stack(list(frames), axis=-1) for frames in obs])
    obs, env_state = jax.jit(jax.vmap(reset))(KEYS)
    np.testing.assert_array_equal(obs, frames_last(alone.reset()[0]))
    assert obs.shape == (2, 84, 84, 4) and obs.dtype == np.uint8
    step, scores, ends, rewards = jax.jit(jax.vmap(step)), np.zeros(2), 0, set()
    for t in range(220):
        actions = np.array([t % 6, 3])
        outcome = step(KEYS, env_state, jnp.asarray(actions))
        obs, env_state, reward, terminated, truncated, next_obs, info = outcome
        final, expected, *flags, _ = alone.step(actions)
        np.testing.assert_array_equal(next_obs, frames_last(final))
        np.testing.assert_array_equal(reward, np.sign(expected))
        np.testing.assert_array_equal([terminated, truncated], flags)
        scores += expected
        np.testing.assert_array_equal(info["score"], scores)
        done = flags[0] | flags[1]
        if done.any():
            first = frames_last(alone.reset(np.flatnonzero(done))[0])
            np.testing.assert_array_equal(obs[done], first)
        else:
            np.testing.assert_array_equal(obs, next_obs)
        scores, ends, rewards = np.where(done, 0, scores), ends + done.sum(), rewards | {*expected}
    assert ends == 4 and not np.asarray(terminated).any() and -1 in rewards


def test_the_layers_on_patches_are_convolutions(envs):
    """All three of the network, on random pixels."""
    obs = np.random.default_rng(0).integers(0, 256, (2, 84, 84, 4), np.uint8)
    network = envs.ActorCritic(6, 16, is_image=True)
    params = network.init(KEYS[0], obs)
    _, found = network.apply(params, obs)
    layers, x = params["params"], obs / np.float32(255)
    for i, (size, stride) in enumerate([(8, 4), (4, 2), (3, 1)]):
        kernel = np.asarray(layers[f"Dense_{i}"]["kernel"])
        assert kernel.shape[1] == (32, 64, 64)[i]
        k, c = size // stride, x.shape[-1]
        kernel = kernel.reshape(k, k, stride, stride, c, -1).transpose(0, 2, 1, 3, 4, 5)
        x = jax.lax.conv_general_dilated(
            *(x, kernel.reshape(size, size, c, -1), (stride, stride), "VALID"),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        x = np.maximum(x, 0)
    assert x.shape == (2, 7, 7, 64)
    x = np.maximum(x.reshape(2, -1) @ layers["Dense_3"]["kernel"], 0)
    expected = (x @ layers["Dense_5"]["kernel"])[:, 0]  # all biases are zero
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    np.testing.assert_allclose(network.apply(params, obs[0])[1], found[0], rtol=1e-5)


def test_two_updates(envs):
    sizes = SMALL | {"total_timesteps": 32, "num_evals": 1, "eval_episodes": 2, "hidden_size": 16}
    config = envs.Config(**sizes, env_params=json.dumps({"max_episode_steps": 12}))
    init, train, *_ = envs.script.make_train(config)
    state = init(KEYS[:1])
    before = jax.tree.map(np.array, state.params)
    state, metrics = train(state)
    assert np.isfinite(metrics["loss/policy"]).all() and metrics["eval/length"][0, 0, -1] == 12
    moved = jax.tree.map(lambda x, y: np.abs(x - y).max() > 0, before, state.params)
    assert all(jax.tree.leaves(moved))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"env_id": "pong"}, "did you mean Pong-v5"),
        ({"env_id": "CartPole-v1"}, "unknown env_id"),
        ({"num_seeds": 2}, "only one seed and one device"),
        ({"env_params": '{"wrong": 1}'}, "Pong-v5, env_params"),
    ],
)
def test_a_wrong_input_says_what_to_change(envs, options, message):
    with pytest.raises(envs.script.ConfigError, match=message):
        envs.make_env(envs.Config(**options))
