"""Statistics, switches, reward scaling and discrete actions of ppo_obs_norm.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import load_script, tiny
from jax.flatten_util import ravel_pytree
from probes import network_of, probe_config, start, to_numpy

module = load_script("ppo_obs_norm")


def first(tree):
    """Of the first device and seed, as NumPy arrays."""
    return jax.tree.map(lambda x: np.array(x)[0, 0], tree)


def train(**changes):
    """Config, state and metrics of one seed on one device, after the first call of `train`."""
    config = tiny(module, **changes)
    state, train = start(module, config)
    return config, *map(first, train(state))


# ------------------------------------- statistics
def test_a_batch_has_any_leading_axes():
    batch = jax.random.normal(jax.random.PRNGKey(0), (5, 4, 3)) * 3 + 2
    zeros = jnp.zeros(3)
    moments = module.Moments(zeros, zeros + 1, jnp.float32(0))
    update = jax.vmap(module.update_moments, (None, 0), axis_name="devices")
    grid, flat = update(moments, batch[None]), update(moments, batch.reshape(1, 20, 3))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), grid, flat)
    np.testing.assert_allclose(grid.mean[0], batch.mean((0, 1)), rtol=1e-5)
    np.testing.assert_allclose(grid.var[0], batch.var((0, 1)), rtol=1e-4)
    np.testing.assert_array_equal(grid.count, 20)


def test_adam_keeps_no_moments_of_the_statistics():
    """But for scalars, the state of the optimizer is two vectors as long as all weights."""
    state, _ = start(module, tiny(module))
    size = sum(x[0, 0].size for x in jax.tree.leaves(state.params["params"]))
    (adam,) = [x for x in jax.tree.leaves(state.opt_state, is_leaf=is_adam) if is_adam(x)]
    assert adam.mu.shape[2:] == adam.nu.shape[2:] == (size,)
    assert len([x for x in jax.tree.leaves(state.opt_state) if x.ndim > 2]) == 2


def is_adam(x):
    return hasattr(x, "mu") and hasattr(x, "nu")


def test_statistics_do_not_change_the_norm_of_the_gradient(monkeypatch):
    """The metric is that of the weights, which alone are clipped together."""
    vectors = []

    def record(tree):
        vectors.append(jax.tree.structure(tree))
        return ravel_pytree(tree)

    monkeypatch.setattr(module, "ravel_pytree", record)
    state, step = start(module, tiny(module))
    assert vectors.pop() == jax.tree.structure(state.params["params"])  # for Adam
    jax.eval_shape(step, state)
    assert vectors and set(vectors) == {jax.tree.structure(state.params["params"])}


def test_a_first_rollout_starts_the_statistics():
    """In four steps, the Clock shows 0, 1, 2, 3 and gives 1, 2, 3, 4 whatever the actions."""
    config = probe_config(module, "Clock", num_steps=4, gamma=0.5)
    state, _ = start(module, config)
    state = first(state)
    assert state.updates_done == 0 and np.isnan(state.eval_return)
    for count in (x for path, x in leaves_of(state.opt_state) if "count" in path):
        assert count == 0  # no update yet
    moments = state.params["obs_stats"]["moments"]
    seen = np.eye(8)[[0, 1, 2, 3] * config.num_envs]
    np.testing.assert_allclose(moments.mean, seen.mean(0), atol=1e-6)
    np.testing.assert_allclose(moments.var, seen.var(0), atol=1e-6)
    sums = [1, 2.5, 4.25, 6.125]
    np.testing.assert_allclose(state.return_stats.mean, np.mean(sums), rtol=1e-5)
    np.testing.assert_allclose(state.return_stats.var, np.var(sums), rtol=1e-5)
    assert moments.count == state.return_stats.count == config.batch_size
    # Training does not continue this rollout: it has environments of its own.
    np.testing.assert_array_equal(state.runners.episode_length, 0)
    np.testing.assert_array_equal(state.runners.obs.argmax(-1), 0)
    jax.tree.map(np.testing.assert_array_equal, state.best_params, state.params)


def leaves_of(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(path), x) for path, x in leaves]


def test_statistics_travel_with_the_best_parameters(tmp_path):
    """Into the checkpoint and, by --init-from, into another run with its own first rollout."""
    sizes = {"total_timesteps": 64, "num_evals": 1, "num_seeds": 2}
    module.main(tiny(module, run_dir=str(tmp_path / "run"), **sizes))
    config = tiny(module, init_from=str(tmp_path / "run"), seed=1, **sizes)
    state, _ = start(module, config, seed=1)
    fresh = to_numpy(state)
    restored = module.restore(fresh, config, tmp_path / "new")
    path = tmp_path / "run" / "checkpoint.msgpack"
    best = module.flax.serialization.msgpack_restore(path.read_bytes())["best_params"]
    restored = module.flax.serialization.to_state_dict(restored.params)
    for seed in range(2):
        compare = lambda x, y, seed=seed: np.testing.assert_array_equal(x[0, seed], y[0, 0])
        jax.tree.map(compare, restored, best)
    moments = best["obs_stats"]["moments"]
    assert (moments["count"] == 16 * (1 + 4)).all()  # the first rollout and four updates
    assert not np.allclose(moments["mean"], fresh.params["obs_stats"]["moments"].mean)


# --------------------------------------- switches
@pytest.mark.parametrize("normalize", [True, False])
def test_the_switch_of_the_observations(normalize):
    network = network_of(module, tiny(module, normalize_obs=normalize))
    obs = 3 + 2 * jax.random.normal(jax.random.PRNGKey(0), (5, 3))
    params = network.init(jax.random.PRNGKey(1), obs)
    moments = module.Moments(jnp.full(3, 3.0), jnp.full(3, 4.0), jnp.float32(9))
    shifted = {**params, "obs_stats": {"moments": moments}}
    _, value = network.apply(shifted, obs)
    _, expected = network.apply(params, (obs - 3) / 2 if normalize else obs)
    np.testing.assert_allclose(value, expected, atol=1e-5)
    if not normalize:  # large observations are not clipped either
        assert network.apply(params, 20 + obs)[1][0] != network.apply(params, 30 + obs)[1][0]


@pytest.mark.parametrize("normalize", [True, False])
def test_the_switch_of_the_rewards(normalize, monkeypatch):
    """What learns: 1 to 4 as the Clock gives them, or divided by one number."""
    rewards = []
    compute_gae = module.compute_gae

    def record(rollout, *args):
        jax.debug.callback(lambda x: rewards.append(np.array(x)), rollout.reward)
        return compute_gae(rollout, *args)

    monkeypatch.setattr(module, "compute_gae", record)
    sizes = {"num_steps": 6, "total_timesteps": 24, "num_evals": 1}
    config = probe_config(module, "Clock", normalize_reward=normalize, **sizes)
    state, train = start(module, config)
    jax.block_until_ready(train(state))
    jax.effects_barrier()
    (reward,) = rewards
    if not normalize:
        np.testing.assert_array_equal(reward, reward.round())
        assert reward.min() == 1 and reward.max() >= 4
    else:
        assert not np.allclose(reward, reward.round())
        ratio = reward / reward.min()
        np.testing.assert_allclose(ratio, ratio.round(), rtol=1e-4)


# ---------------------------------------- rewards
def scale(rewards, discounted_sums, return_stats):
    """Scaled rewards [T, N] and new statistics, on one device."""
    fields = dict.fromkeys(module.Transition._fields)
    fields["reward"] = jnp.float32(rewards)
    fields["discounted_sum"] = jnp.float32(discounted_sums)
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


def test_rewards_are_divided_by_the_deviation_of_all_sums():
    rng = np.random.default_rng(0)
    stats = module.Moments(jnp.float32(0), jnp.float32(1), jnp.float32(0))
    seen = np.zeros(0)
    for _ in range(3):
        rewards = rng.normal(1, 2, (8, 4))
        sums = rng.normal(5, 3, (8, 4))
        seen = np.append(seen, sums)
        scaled, stats = scale(rewards, sums, stats)
        np.testing.assert_allclose(scaled, rewards / seen.std(), rtol=1e-4)


# ------------------------------- discrete actions
ENVS = {"CartPole-v1": 4, "Breakout-MinAtar": 400}
ENVS["FrozenLake-misc"] = 16  # one-hot


@pytest.mark.parametrize("env_id", ENVS)
def test_discrete_actions_train(env_id):
    sizes = {"num_steps": 64, "total_timesteps": 1024, "num_minibatches": 1, "update_epochs": 1}
    config, state, metrics = train(env_id=env_id, **sizes)
    moments = state.params["obs_stats"]["moments"]
    assert moments.mean.shape == moments.var.shape == (ENVS[env_id],)
    assert moments.count == (1 + config.updates_per_eval) * config.batch_size
    assert np.isfinite(metrics["optim/grad_norm"]).all() and np.isfinite(state.eval_return)
    *_, num_actions, is_discrete = module.make_env(config)
    assert is_discrete and (metrics["policy/entropy"] <= np.log(num_actions) + 1e-5).all()
    # Statistics are fixed during an update: its first ratio is 1.
    np.testing.assert_allclose(metrics["policy/approx_kl"], 0, atol=1e-6)
    if env_id == "CartPole-v1":  # one reward a step, reported unscaled
        assert (metrics["episode/count"] > 0).all()
        np.testing.assert_allclose(metrics["episode/return"], metrics["episode/length"])
        assert state.eval_return == metrics["eval/length"][-1]


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
    init, *_ = module.make_train(tiny(module, env_id="CartPole-v1"))
    jax.eval_shape(init, jax.ShapeDtypeStruct((1, 2), jnp.uint32))
    assert received and all(x.dtype == jnp.int32 and x.shape == () for x in received)


def test_catch_is_learned():
    sizes = {"num_envs": 16, "num_steps": 32, "hidden_size": 32, "lr": 5e-3, "eval_episodes": 32}
    _, state, _ = train(env_id="Catch-bsuite", total_timesteps=30_000, num_evals=1, **sizes)
    assert state.eval_return > 0.6
