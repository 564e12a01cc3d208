"""What holds for every update of every script, whatever it learns."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xminigrid
from conftest import ROOT, SCRIPTS, load_script, with_devices
from probes import look, probe_config, probes_for, start, to_numpy

TIMES = list(range(7))  # what Clock shows, the final observation of a time limit included


def assert_same(actual, expected):
    """Bit for bit, NaN included."""
    jax.tree.map(np.testing.assert_array_equal, to_numpy(actual), to_numpy(expected))


def differs(actual, expected):
    differences = jax.tree.map(lambda x, y: np.abs(x - y).max(), actual, expected)
    return max(jax.tree.leaves(differences)) > 1e-5


def of_seed(tree, seed, device=0):
    return jax.tree.map(lambda x: x[device, seed], tree)


# -------------------------------------------------------------------------------- a few updates
@pytest.fixture(scope="module")
def recorded(module):
    """Eight updates of one epoch of one minibatch each, and what went into `compute_gae`.

    The parameters stay as they are, so that the memory of an episode that began before an update
    can be computed anew, but are larger than the initial ones: the policy is far from uniform, and
    depends on what it sees and remembers.
    """
    records, rng = [], np.random.default_rng(0)
    compute_gae = module.compute_gae
    names = ("reward", "value", "next_value", "terminated", "done")

    def record(*args):
        store = lambda *arrays: records.append(dict(zip(names, to_numpy(arrays), strict=True)))
        jax.debug.callback(store, *args[:5])
        return compute_gae(*args)

    with probes_for(module) as patch:
        patch.setattr(module, "compute_gae", record)
        config = probe_config(
            module, "Clock", num_envs=8, update_epochs=1, num_minibatches=1, lr=1e-12
        )
        state, train = start(module, config, 1)
        noise = lambda x: x + jnp.array(rng.normal(scale=0.5, size=x.shape), x.dtype)
        state.params["params"] = jax.tree.map(noise, state.params["params"])
        policies, metrics = [], []
        for _ in range(8):
            policies.append(of_seed(to_numpy(state.params), 0))
            state, measured = train(state)
            jax.effects_barrier()
            metrics.append({name: float(x[0, 0, 0]) for name, x in measured.items()})
        records = {name: np.concatenate([r[name] for r in records]) for name in names}  # [T, N]
        times = np.zeros(records["done"].shape, int)
        for t in range(len(times) - 1):
            times[t + 1] = np.where(records["done"][t], 0, times[t] + 1)
        values = np.array([look(module, config, policy, TIMES)[1] for policy in policies])
    return config, metrics, records, times, values


def test_first_minibatch_has_ratio_one(recorded):
    _, metrics, _, _, _ = recorded
    for measured in metrics:
        assert abs(measured["policy/approx_kl"]) < 5e-7
        assert measured["policy/clip_fraction"] == 0
        assert abs(measured["loss/policy"]) < 1e-5  # minus the mean of the normalised advantage


def test_rollout_has_ends_of_every_kind(recorded):
    _, _, records, times, _ = recorded
    terminated, done = records["terminated"], records["done"]
    assert (times.max() == 5) and done[times == 5].all() and not done[times < 4].any()
    assert (done & ~terminated).any() and terminated[times == 4].any()
    assert terminated[times == 5].any()  # a termination and a time limit at once


def test_bootstrap_is_the_value_of_the_true_next_observation(recorded):
    config, _, records, times, values = recorded
    update = (np.arange(len(times)) // config.num_steps)[:, None]
    np.testing.assert_allclose(records["value"], values[update, times], atol=1e-5)
    follows = ~records["terminated"]
    expected = values[update, times + 1]
    np.testing.assert_allclose(records["next_value"][follows], expected[follows], atol=1e-5)
    cut = records["done"] & follows
    assert np.abs(expected - values[update, 0])[cut].min() > 1e-3  # not that of the next episode


def test_episode_metrics(recorded):
    config, metrics, records, times, _ = recorded
    for update, measured in enumerate(metrics):
        part = slice(update * config.num_steps, (update + 1) * config.num_steps)
        lengths = times[part][records["done"][part]] + 1
        assert measured["episode/count"] == len(lengths)
        if update == 0:
            assert len(lengths) == 0
            assert np.isnan(measured["episode/return"]) and np.isnan(measured["episode/length"])
        if len(lengths):
            returns = lengths * (lengths + 1) / 2  # 1 + 2 + ...
            np.testing.assert_allclose(measured["episode/length"], lengths.mean(), rtol=1e-6)
            np.testing.assert_allclose(measured["episode/return"], returns.mean(), rtol=1e-6)
        others = {name: x for name, x in measured.items() if not name.startswith("episode/")}
        assert np.isfinite(list(others.values())).all(), others


# ------------------------------------------------------------------------------ calls and seeds
@pytest.fixture(scope="module")
def calls(module):
    """The state after four updates: in one call, again, with another seed 1, and in two calls."""
    if module.SCRIPT == "ppo_ff":  # one of them as users run it
        jax.config.update("jax_disable_most_optimizations", False)
    with probes_for(module):
        config = probe_config(module, "Clock", num_seeds=2, total_timesteps=64, lr=1e-2)
        assert config.num_updates == 4
        first, train = start(module, config)
        again, _ = start(module, config)
        init, half = module.make_train(config, 2)
        key = jax.random.split(jax.random.key(0), 1)
        before = to_numpy(first)
        whole, metrics = train(first)
        other = jax.tree.map(lambda x: x.at[:, 1].multiply(2.0), init(key).params)
        result = {
            "before": before,
            "whole": (whole, metrics),
            "again": train(again),
            "other": train(init(key)._replace(params=other)),
        }
        state, first_metrics = half(init(key))
        state, second_metrics = half(state)
        join = lambda x, y: np.concatenate([x, y], axis=1)
        result["halves"] = state, jax.tree.map(join, first_metrics, second_metrics)
    jax.config.update("jax_disable_most_optimizations", True)
    return {name: to_numpy(x) for name, x in result.items()}


def test_training_is_deterministic(calls):
    assert_same(calls["again"], calls["whole"])


def test_one_call_is_the_same_as_two_of_half_the_length(calls):
    assert_same(calls["halves"], calls["whole"])


def test_seeds_are_different_agents(calls):
    for state in (calls["before"], calls["whole"][0]):
        assert differs(of_seed(state.params["params"], 0), of_seed(state.params["params"], 1))
        assert (state.key[:, 0] != state.key[:, 1]).any()


def test_seeds_do_not_touch_each_other(calls):
    for i in (0, 1):  # state, metrics
        seed = (lambda s: lambda x: x[:, s]) if i == 0 else (lambda s: lambda x: x[:, :, s])
        assert_same(
            jax.tree.map(seed(0), calls["other"][i]), jax.tree.map(seed(0), calls["whole"][i])
        )
    whole, other = (of_seed(calls[name][0].params["params"], 1) for name in ("whole", "other"))
    assert differs(whole, other)


def test_training_changes_every_parameter(calls):
    change = lambda x, y: np.abs(x - y).max() > 0
    changes = jax.tree.map(
        change, calls["before"].params["params"], calls["whole"][0].params["params"]
    )
    assert all(jax.tree.leaves(changes)), changes


def test_metrics_do_not_grow_with_the_rollout(module):
    with probes_for(module):
        shapes = []
        for num_envs, num_steps in ((4, 4), (8, 4), (4, 16)):
            sizes = {"num_envs": num_envs, "num_steps": num_steps, "num_seeds": 2}
            init, train = module.make_train(probe_config(module, "Clock", **sizes), 3)
            key = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 1))
            state = jax.eval_shape(init, key)
            _, metrics = jax.eval_shape(train, state)
            assert {(x.shape, str(x.dtype)) for x in metrics.values()} == {((1, 3, 2), "float32")}
            shapes.append(jax.tree.map(lambda x: x.shape, state))
    assert shapes[2] == shapes[0]  # nor does what one update hands to the next


# ------------------------------------------------------------------------------------ target_kl
def test_target_kl_ends_the_epochs_of_each_seed_by_itself(module):
    def after_one_update(**changes):
        config = probe_config(module, "Clock", num_seeds=2, lr=1e-2, **changes)
        state, train = start(module, config, 1)
        return to_numpy(train(state))

    with probes_for(module):
        one, metrics = after_one_update(update_epochs=1)
        kl = metrics["policy/approx_kl"][0, 0]  # [S]
        target = float(kl.mean())
        assert abs(kl[0] - kl[1]) > 0.02 * target > 0
        mixed, _ = after_one_update(update_epochs=2, target_kl=target)
    stopped, went_on = np.argmax(kl), np.argmin(kl)
    close = lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6)
    jax.tree.map(close, of_seed(mixed, stopped), of_seed(one, stopped))
    assert differs(*(of_seed(state.params["params"], went_on) for state in (mixed, one)))


# -------------------------------------------------------------------------------- many devices
MANY_DEVICES = """
import sys

import jax
import numpy as np
from conftest import load_script
from probes import probe_config, probes_for, to_numpy

devices, folder, *scripts = sys.argv[1:]
devices = int(devices)
assert jax.local_device_count() == devices
for script in scripts:
    module = load_script(script)
    with probes_for(module):
        sizes = {"num_envs": 4 * devices, "total_timesteps": 48 * devices}
        config = probe_config(module, "Clock", num_seeds=2, lr=1e-3, **sizes)
        init, train = module.make_train(config)
        key = jax.random.key(0)
        same = jax.random.wrap_key_data(np.stack([jax.random.key_data(key)] * devices))
        for name, keys in (("same", same), ("different", jax.random.split(key, devices))):
            state, metrics = train(init(keys))
            leaves = jax.tree_util.tree_leaves_with_path((to_numpy(state), to_numpy(metrics)))
            arrays = {jax.tree_util.keystr(path): x for path, x in leaves}
            np.savez(f"{folder}/{script}_{name}.npz", **arrays)
"""


@pytest.fixture(scope="module", params=[2, 4])
def many_devices(request, tmp_path_factory):
    """State and metrics [D, ...] of each script, by path, on emulated devices.

    Started from one key for all, which makes the devices copies of each other, and from many.
    """
    folder = tmp_path_factory.mktemp("many_devices")
    paths = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    environment = with_devices(request.param) | {"PYTHONPATH": paths}
    arguments = [str(request.param), str(folder), *SCRIPTS]
    command = [sys.executable, "-W", "ignore", "-c", MANY_DEVICES, *arguments]
    subprocess.run(command, env=environment, check=True, timeout=400)
    names = ("same", "different")
    return {(s, n): dict(np.load(folder / f"{s}_{n}.npz")) for s in SCRIPTS for n in names}


def test_devices_hold_the_same_network(many_devices, module):
    arrays = many_devices[module.SCRIPT, "different"]
    shared = (".params", ".opt_state", ".update", ".return_stats", "['")
    for path, x in arrays.items():
        field = path.removeprefix("[0]").removeprefix("[1]")
        if field.startswith(shared):
            np.testing.assert_array_equal(x, np.broadcast_to(x[:1], x.shape), err_msg=path)
    assert len([path for path in arrays if path.startswith("[1]")]) == 12  # the metrics


def test_devices_have_different_environments(many_devices, module):
    arrays = many_devices[module.SCRIPT, "different"]
    different = [path for path, x in arrays.items() if (x[0] != x[1]).any()]
    assert "[0].key" in different and any("env_state" in path for path in different)


def test_copies_of_a_device_learn_what_one_learns(many_devices, module):
    """All that is averaged over the devices: means, variances, gradients, metrics."""
    arrays = many_devices[module.SCRIPT, "same"]
    devices = len(arrays["[0].key"])
    with probes_for(module):
        changes = {"num_envs": 4, "num_seeds": 2, "total_timesteps": 48, "lr": 1e-3}
        config = probe_config(module, "Clock", **changes)
        init, train = module.make_train(config)
        result = train(init(jax.random.key(0)[None]))
    for path, x in jax.tree_util.tree_leaves_with_path(to_numpy(result)):
        path = jax.tree_util.keystr(path)
        is_sum = path.endswith(".count") and "stats" in path or "episode/count" in path
        expected = devices * x[0] if is_sum else x[0]
        for device in range(devices):
            np.testing.assert_allclose(arrays[path][device], expected, atol=2e-5, err_msg=path)


# ----------------------------------------------------------------------------------- statistics
def test_statistics_are_those_of_all_that_was_seen(monkeypatch):
    """Observations, and discounted returns with the last reward of each episode in them."""
    module = load_script("ppo_obs_norm")
    seen, rewards = {1: [], 2: []}, []
    update_moments, compute_gae = module.update_moments, module.compute_gae

    def record_batch(moments, batch):
        jax.debug.callback(lambda x: seen[x.ndim].append(np.array(x)), batch)
        return update_moments(moments, batch)

    def record_reward(reward, *args):
        jax.debug.callback(lambda x: rewards.append(np.array(x)), reward)
        return compute_gae(reward, *args)

    monkeypatch.setattr(module, "update_moments", record_batch)
    monkeypatch.setattr(module, "compute_gae", record_reward)
    config = probe_config(module, "Clock", gamma=0.8, normalize_reward=True)
    state, train = start(module, config, 1)
    for _ in range(6):
        state, _ = train(state)
        jax.effects_barrier()

    obs = np.concatenate(seen[2])  # [steps, 8]
    assert len(obs) == 6 * 16
    moments = jax.tree.map(lambda x: np.array(x)[0, 0], state.params["obs_stats"]["moments"])
    np.testing.assert_allclose(moments.mean, obs.mean(0), atol=1e-5)
    np.testing.assert_allclose(moments.var, obs.var(0), atol=1e-5)
    assert moments.count == len(obs)

    times = obs.reshape(6 * 4, 4, 8).argmax(-1)  # [T, N]
    returns = np.zeros(times.shape)
    for t, now in enumerate(times):
        before = returns[t - 1] * (now > 0) if t else 0
        returns[t] = 0.8 * before + 1 + now
    np.testing.assert_allclose(np.concatenate(seen[1]).reshape(times.shape), returns, rtol=1e-5)
    np.testing.assert_allclose(state.return_stats.var[0, 0], returns.var(), rtol=1e-4)
    for update in range(6):
        part = slice(4 * update, 4 * update + 4)
        expected = (1 + times[part]) / returns[: part.stop].std()
        np.testing.assert_allclose(rewards[update], expected, rtol=1e-4)


# --------------------------------------------------------------------------------- environments
def random_steps(env, num_envs, num_steps, sample_action):
    """obs [N] before the first step, env_states and actions before, and outcomes of, all [T, N]."""

    env_reset, env_step, _ = env

    def step(carry, key):
        obs, env_state = carry
        action_key, step_key = jax.random.split(key)
        action = sample_action(action_key)
        next_obs, next_state, *outcome = env_step(
            jax.random.split(step_key, num_envs), env_state, action
        )
        return (next_obs, next_state), (env_state, action, next_obs, *outcome)

    first = jax.jit(env_reset)(jax.random.split(jax.random.key(0), num_envs))
    scan = jax.jit(lambda first, keys: jax.lax.scan(step, first, keys)[1])
    return first[0], scan(first, jax.random.split(jax.random.key(1), num_steps))


def assert_final_obs(obs, final_obs, done):
    """obs goes on where no episode ended, and only there."""

    def check(x, y):
        assert x.shape == y.shape and x.dtype == y.dtype
        np.testing.assert_array_equal(x[~done], y[~done])

    jax.tree.map(check, to_numpy(obs), to_numpy(final_obs))


GYMNAX = {  # and the steps needed to see both ends, where it has both
    "ppo_ff": [("CartPole-v1", 60), ("FrozenLake-misc", 120), ("Breakout-MinAtar", 60)],
    "ppo_continuous": [("Pendulum-v1", 210), ("MountainCarContinuous-v0", 20)],
    "ppo_obs_norm": [("Pendulum-v1", 210)],
}
GYMNAX = [(s, *rest) for s, envs in GYMNAX.items() if s in SCRIPTS for rest in envs]


@pytest.mark.parametrize(("script", "env_id", "num_steps"), GYMNAX)
def test_gymnax_environment(script, env_id, num_steps):
    module, num_envs = load_script(script), 8
    env = _, _, actions = module.make_env(module.Config(env_id=env_id))
    inner, params = gymnax.make(env_id)
    space = inner.action_space(params)
    continuous = script != "ppo_ff"

    def sample_action(key):
        if continuous:  # often outside of the bounds
            low, high = actions
            return 3 * jax.random.normal(key, (num_envs, len(low))) * high
        return jax.random.randint(key, (num_envs,), 0, actions)

    def reference(key, env_state, action):
        """What the environment itself says, without any reset."""
        if continuous:
            action = jnp.clip(action, space.low, space.high).reshape(space.shape)
        obs, env_state, reward, terminated, _ = inner.step_env(key, env_state, action, params)
        return obs, reward, terminated, inner.is_truncated(env_state, params)

    _, (states, action, obs, reward, terminated, truncated, final_obs) = random_steps(
        env, num_envs, num_steps, sample_action
    )
    keys = jax.random.split(jax.random.key(2), (num_steps, num_envs))
    expected = jax.jit(jax.vmap(jax.vmap(reference)))(keys, states, action)
    expected_obs, expected_reward, expected_terminated, expected_truncated = expected
    if env_id == "FrozenLake-misc":  # slippery: the next state is random, its encoding is not
        assert final_obs.shape[2:] == (16,) and (final_obs.sum(-1) == 1).all()
    else:
        np.testing.assert_allclose(final_obs, expected_obs, atol=1e-6)
        np.testing.assert_array_equal(terminated, expected_terminated)
        np.testing.assert_allclose(reward, expected_reward, atol=1e-5)
    np.testing.assert_array_equal(truncated, expected_truncated)
    done = np.array(terminated | truncated)
    assert terminated.dtype == truncated.dtype == bool and reward.dtype == jnp.float32
    assert done.any() or env_id.startswith("MountainCar")
    assert_final_obs(obs, final_obs, done)
    if env_id == "CartPole-v1":
        assert (np.abs(obs[done]) <= 0.05).all() and (np.abs(final_obs[done]).max(-1) > 0.05).all()


@pytest.mark.parametrize("reset_hidden", [True, False])
def test_xminigrid_environment(monkeypatch, reset_hidden):
    module, num_envs, limit = load_script("ppo_rnn"), 256, 12
    inner, params = xminigrid.make("MiniGrid-Empty-5x5")
    params = params.replace(max_steps=limit)
    monkeypatch.setattr(module.xminigrid, "make", lambda *_: (inner, params))
    env = module.make_env(module.Config(reset_hidden=reset_hidden))
    assert env[2] == 6
    probs = jnp.array([0.6, 0.2, 0.2, 0, 0, 0])
    sample_action = lambda key: jax.random.choice(key, 6, (num_envs,), p=probs)
    first_obs, (states, action, obs, reward, terminated, truncated, final_obs) = random_steps(
        env, num_envs, 40, sample_action
    )
    one_step = lambda timestep, action: inner.step(params, timestep, action)
    expected = jax.jit(jax.vmap(jax.vmap(one_step)))(states, action)
    done = np.array(terminated | truncated)
    np.testing.assert_array_equal(terminated, expected.discount == 0)
    np.testing.assert_array_equal(terminated, reward > 0)  # the goal, the only end but the limit
    np.testing.assert_array_equal(done, expected.last())
    assert terminated.any() and truncated.any() and not (terminated & truncated).any()
    np.testing.assert_array_equal(final_obs.grid, expected.observation)
    np.testing.assert_array_equal(final_obs.direction, expected.state.agent.direction)
    np.testing.assert_array_equal(final_obs.prev_action, action)
    np.testing.assert_array_equal(final_obs.prev_reward, reward)
    assert_final_obs(obs, final_obs, done)
    assert (first_obs.prev_action == -1).all() and (first_obs.prev_reward == 0).all()
    expected = (-1, 0) if reset_hidden else (action[done], reward[done])
    assert (obs.prev_action[done] == expected[0]).all()
    assert (obs.prev_reward[done] == expected[1]).all()
    # An episode is cut at the limit and starts again at step 0.
    steps = np.array(states.state.step_num)
    assert (steps[1:][done[:-1]] == 0).all() and (steps[truncated] == limit - 1).all()


# ----------------------------------------------------------------------------------------- hang
def equations(jaxpr):
    """All equations, those of inner programs too."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=is_program):
            if is_program(inner):
                yield from equations(getattr(inner, "jaxpr", inner))


def is_program(x):
    return hasattr(x, "eqns") or hasattr(x, "jaxpr")


def test_no_decomposition_of_a_stack_of_matrices(module):
    """Orthogonal initialisation under vmap can hang for ever on two cores.

    The QR decomposition of a stack waits, in a thread of XLA's pool, for work that it gives to the
    same pool. Two of them at once wait for each other.
    """
    with probes_for(module):
        init, _ = module.make_train(probe_config(module, "Clock", num_seeds=2), 1)
        program = jax.make_jaxpr(init)(jax.random.split(jax.random.key(0), 1))
    names = ("qr", "geqrf", "householder_product")
    found = [e.invars[0].aval.ndim for e in equations(program.jaxpr) if e.primitive.name in names]
    assert found, "no orthogonal initialisation, or a new name for the decomposition"
    assert set(found) == {2}


def test_two_seeds_of_breakout_finish(tmp_path, full_optimization):
    """XLA on CPU was seen to hang for ever in a PPO with seeds under vmap, on two cores."""
    command = f"""
        {sys.executable} -W ignore {ROOT / "ppo_ff.py"} --env-id Breakout-MinAtar --num-seeds 2
        --num-envs 64 --num-steps 64 --total-timesteps 40_000 --num-evals 1 --eval-episodes 2
        --run-dir {tmp_path / "run"}
    """
    subprocess.run(textwrap.dedent(command).split(), check=True, timeout=200, cwd=tmp_path)
    assert (tmp_path / "run" / "summary.json").exists()
