"""Reward scaling, discrete actions and running statistics of ppo_obs_norm.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import load_script, tiny

module = load_script("ppo_obs_norm")


def train(**changes):
    """State and metrics of one seed on one device, after the first call of `train`."""
    config = tiny(module, **changes)
    init, train, *_ = module.make_train(config)
    state, metrics = train(init(jax.random.split(jax.random.key(0), jax.local_device_count())))
    state = jax.tree.map(lambda x: np.array(x)[0, 0], state)
    return config, state, {name: np.array(x)[0, :, 0] for name, x in metrics.items()}


# ---------------------------------------- rewards
def scale(rewards, discounted_returns, return_stats):
    """Scaled rewards [T, N] and new statistics, on one device."""
    fields = dict.fromkeys(module.Transition._fields)
    fields["reward"] = jnp.float32(rewards)
    fields["episode"] = jnp.zeros((*rewards.shape, 3)).at[..., 2].set(discounted_returns)
    rollout = module.Transition(**fields)
    scale_on_device = lambda _: module.scale_reward(rollout, return_stats)
    scaled, stats = jax.vmap(scale_on_device, axis_name="devices")(jnp.zeros(1))
    return np.array(scaled.reward[0]), jax.tree.map(lambda x: x[0], stats)


@pytest.mark.parametrize("sign", [-1, 1])
def test_a_first_reward_after_zeros_is_clipped(sign):
    rewards = np.zeros((128, 16))
    rewards[-1, 3] = sign
    zeros = module.Moments(jnp.float32(0), jnp.float32(0), jnp.float32(100 * rewards.size))
    scaled, stats = scale(rewards, rewards, zeros)
    assert 1 / np.sqrt(stats.var) > 400
    assert scaled[-1, 3] == 10 * sign
    assert np.abs(scaled).sum() == 10


def test_rewards_are_divided_by_the_deviation_of_all_returns():
    rng = np.random.default_rng(0)
    stats = module.Moments(jnp.float32(0), jnp.float32(1), jnp.float32(0))
    seen = np.zeros(0)
    for _ in range(3):
        rewards = rng.normal(1, 2, (8, 4))
        returns = rng.normal(5, 3, (8, 4))
        seen = np.append(seen, returns)
        scaled, stats = scale(rewards, returns, stats)
        np.testing.assert_allclose(scaled, rewards / seen.std(), rtol=1e-4)


# ------------------------------- discrete actions
ENVS = {"CartPole-v1": (4,), "Breakout-MinAtar": (10, 10, 4)}
ENVS["FrozenLake-misc"] = (16,)  # one-hot


@pytest.mark.parametrize("env_id", ENVS)
def test_discrete_actions_train(env_id):
    sizes = {"num_steps": 64, "total_timesteps": 1024, "num_minibatches": 1, "update_epochs": 1}
    config, state, metrics = train(env_id=env_id, **sizes)
    moments = state.params["obs_stats"]["moments"]
    assert moments.mean.shape == moments.var.shape == ENVS[env_id]
    assert moments.count == config.updates_per_eval * config.batch_size
    assert np.isfinite(metrics["loss/total"]).all() and np.isfinite(state.eval_return)
    *_, num_actions, is_discrete = module.make_env(config)
    assert is_discrete and (metrics["policy/entropy"] <= np.log(num_actions) + 1e-5).all()
    # Statistics are frozen during an update: its first ratio is 1.
    np.testing.assert_allclose(metrics["policy/approx_kl"], 0, atol=1e-6)
    if env_id == "CartPole-v1":  # one reward a step, reported unscaled
        assert (metrics["episode/count"] > 0).all()
        np.testing.assert_allclose(metrics["episode/return"], metrics["episode/length"])


def test_the_environment_receives_integers(monkeypatch):
    received = []
    make_env = module.make_env

    def make_recorded_env(config):
        reset, step, *rest = make_env(config)

        def recorded_step(key, env_state, action):
            received.append(action)
            return step(key, env_state, action)

        return reset, recorded_step, *rest

    monkeypatch.setattr(module, "make_env", make_recorded_env)
    train(env_id="CartPole-v1")
    assert received and all(x.dtype == jnp.int32 and x.shape == () for x in received)


def test_catch_is_learned():
    sizes = {"num_envs": 16, "num_steps": 32, "hidden_size": 32, "lr": 5e-3, "eval_episodes": 32}
    _, state, _ = train(env_id="Catch-bsuite", total_timesteps=30_000, num_evals=1, **sizes)
    assert state.eval_return > 0.6


# -------------------------------- best parameters
def test_statistics_travel_with_the_best_parameters():
    _, state, _ = train()
    jax.tree.map(np.testing.assert_array_equal, state.best, state.params)
    assert state.best["obs_stats"]["moments"].count > 0
    assert not np.allclose(state.best["obs_stats"]["moments"].mean, 0)
