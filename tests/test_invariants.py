"""Invariants of every script, whatever it learns."""

import dataclasses
import functools
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
from conftest import ROOT, SCRIPTS, TINY, load_script, tiny, with_devices
from probes import look, make_player, probe_config, probes_for, start, to_numpy

TRAINABLE = [path.stem for path in ROOT.glob("*.py") if "\ndef make_train(" in path.read_text()]
OTHER_SIZES = {
    "ippo": {"env_id": "rings", "num_envs": 2, "num_steps": 8, "num_minibatches": 2},
    "ippo_rnn": {"env_id": "rings", "num_envs": 2, "num_steps": 8, "num_minibatches": 2},
    "mappo": {"env_id": "rings", "num_envs": 2, "num_steps": 8, "num_minibatches": 2},
    "disco": {"weights": "random", "env_id": "Catch-5x5", "num_steps": 8, "num_envs": 2},
}
TIMES = list(range(7))  # states of Clock, with the final observation of a time limit


def assert_same(actual, expected):
    """Bit for bit, NaN included."""
    jax.tree.map(np.testing.assert_array_equal, to_numpy(actual), to_numpy(expected))


def assert_close(actual, expected):
    """The same shapes and types, and the same numbers up to rounding."""
    close = lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5, strict=True)
    jax.tree.map(close, to_numpy(actual), to_numpy(expected))


def differs(actual, expected):
    differences = jax.tree.map(lambda x, y: np.abs(x - y).max(), actual, expected)
    return max(jax.tree.leaves(differences)) > 1e-5


def of_seed(tree, seed, device=0):
    return jax.tree.map(lambda x: x[device, seed], tree)


def values_of(metrics):
    """Metrics of the only update of the only seed."""
    return {name: float(x[0, 0, 0]) for name, x in metrics.items()}


# ---------------------------------- a few updates
@pytest.fixture(scope="module")
def recorded(module):
    """Eight updates of one epoch of one minibatch each, with inputs and target of `compute_gae`.

    The parameters stay constant, so that the memory of an episode that began before an update can
    be recomputed, but are larger than the initial ones: the policy is far from uniform, and depends
    on the observation and the memory.
    """
    records = []
    rng = np.random.default_rng(0)
    compute_gae = module.compute_gae
    names = ("value", "terminated", "done")

    def record(rollout, next_value, *args):
        advantage, target = compute_gae(rollout, next_value, *args)
        arrays = {name: getattr(rollout, name) for name in names}
        arrays |= {"next_value": next_value, "target": target}
        jax.debug.callback(lambda arrays: records.append(to_numpy(arrays)), arrays)
        return advantage, target

    with probes_for(module) as patch:
        patch.setattr(module, "compute_gae", record)
        sizes = {"num_envs": 8, "total_timesteps": 8 * 32, "num_evals": 8}
        sizes |= {"update_epochs": 1, "num_minibatches": 1}
        config = probe_config(module, "Clock", lr=1e-12, **sizes)
        state, train = start(module, config)
        noise = lambda x: x + jnp.array(rng.normal(scale=0.5, size=x.shape), x.dtype)
        weights = jax.tree.map(noise, state.params["params"])
        state = state._replace(params={**state.params, "params": weights})
        runners = of_seed(to_numpy(state.runners), 0)
        policies = []
        metrics = []
        for _ in range(8):
            policies.append(of_seed(to_numpy(state.params), 0))
            state, measured = train(state)
            jax.effects_barrier()
            metrics.append(values_of(measured))
        records = {name: np.concatenate([r[name] for r in records]) for name in records[0]}
        times = np.zeros(records["done"].shape, int)  # [T, N]
        times[0] = np.where(runners.done, 0, runners.episode_length)  # after a first rollout
        for t in range(len(times) - 1):
            times[t + 1] = np.where(records["done"][t], 0, times[t] + 1)
        values = np.array([look(module, config, policy, TIMES)[1] for policy in policies])
    return config, metrics, records, times, values


def test_first_minibatch_has_ratio_one(recorded):
    _, metrics, _, _, _ = recorded
    for measured in metrics:
        assert abs(measured["policy/approx_kl"]) < 5e-7
        assert measured["policy/clip_fraction"] == 0
        assert abs(measured["loss/policy"]) < 1e-5  # minus the mean of the normalized advantage


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


def test_metrics_of_a_rollout(recorded):
    config, metrics, records, times, _ = recorded
    for update, measured in enumerate(metrics):
        part = slice(update * config.num_steps, (update + 1) * config.num_steps)
        lengths = times[part][records["done"][part]] + 1
        assert measured["episode/count"] == len(lengths)
        assert len(lengths) == 0 or times[0].any() or update > 0
        if len(lengths) == 0:
            assert np.isnan(measured["episode/return"]) and np.isnan(measured["episode/length"])
        else:
            returns = lengths * (lengths + 1) / 2  # 1 + 2 + ...
            np.testing.assert_allclose(measured["episode/length"], lengths.mean(), rtol=1e-6)
            np.testing.assert_allclose(measured["episode/return"], returns.mean(), rtol=1e-6)
        error = (records["target"] - records["value"])[part]
        unexplained = error.var() / records["target"][part].var()
        np.testing.assert_allclose(1 - measured["value/explained_variance"], unexplained, rtol=1e-5)
        others = {name: x for name, x in measured.items() if not name.startswith("episode/")}
        assert np.isfinite(list(others.values())).all(), others


# -------------------------------- calls and seeds
def key_after(key, config, updates):
    """The key of a seed before its evaluation: each update splits one key per epoch off."""
    for _ in range(updates):
        key = jax.random.split(key, 1 + config.update_epochs)[0]
    return np.array(key)


OTHER_SEEDS = (2.0, np.nan, np.inf)  # factors of the parameters of seed 1


@pytest.fixture(scope="module")
def calls(module):
    """The state after four updates: in one call, again, alone, in two calls, with other seeds 1.

    The two calls evaluate greedily. The evaluation between them draws a key, which is put back.
    """
    if module.SCRIPT == "ppo_ff":  # one script as users run it
        jax.config.update("jax_disable_most_optimizations", False)
    with probes_for(module):
        config = probe_config(
            module, "Clock", num_seeds=2, total_timesteps=64, num_evals=1, lr=1e-2
        )
        assert config.num_updates == 4
        init, train, *_ = module.make_train(config)
        greedy = dataclasses.replace(config, num_evals=2, eval_greedy=True)
        _, half, *_ = module.make_train(greedy)
        device_keys = jax.random.split(jax.random.PRNGKey(0), 1)
        before = to_numpy(init(device_keys))
        result = {
            "before": before,
            "whole": train(init(device_keys)),
            "again": train(init(device_keys)),
        }
        for factor in OTHER_SEEDS:
            factors = jnp.array([1, factor], jnp.float32)  # [S]
            scale = lambda x, y=factors: x * y.reshape(-1, *[1] * (x.ndim - 2))
            scaled = jax.tree.map(scale, init(device_keys).params)
            result[factor] = train(init(device_keys)._replace(params=scaled))
        _, train_one, *_ = module.make_train(dataclasses.replace(config, num_seeds=1))
        result["single"] = train_one(jax.tree.map(lambda x: x[:, :1], init(device_keys)))
        first, first_metrics = to_numpy(half(init(device_keys)))
        keys = np.array([key_after(key, config, 2) for key in before.key[0]])
        second, second_metrics = half(first._replace(key=keys[None]))
        join = lambda x, y: np.concatenate([x, y], axis=-1)
        result["halves"] = second, jax.tree.map(join, first_metrics, to_numpy(second_metrics))
        result["actions"] = [
            look(module, greedy, of_seed(to_numpy(second.params), seed), TIMES[:5])[0]
            for seed in (0, 1)
        ]
    jax.config.update("jax_disable_most_optimizations", True)
    return {name: to_numpy(x) for name, x in result.items()}


def test_training_is_deterministic(calls):
    assert_same(calls["again"], calls["whole"])


def test_one_call_is_the_same_as_two_of_half_the_length(calls):
    """But for the evaluations, and for rounding: they are two programs."""
    state, metrics = calls["halves"]
    expected, expected_metrics = calls["whole"]
    ignored = dict.fromkeys(("eval_return", "best_return", "best_params"))
    assert_close(state._replace(**ignored), expected._replace(**ignored))
    for name, x in expected_metrics.items():
        if not name.startswith("eval/"):
            assert_close(metrics[name], x)


def test_evaluation_is_measured_after_the_last_update_of_a_call(calls):
    for name, rows in (("whole", [3]), ("halves", [1, 3])):
        state, metrics = calls[name]
        for measured in (metrics["eval/return"], metrics["eval/length"]):  # [D, S, updates]
            expected = np.broadcast_to(np.isin(range(4), rows), measured.shape)
            np.testing.assert_array_equal(np.isfinite(measured), expected)
        np.testing.assert_array_equal(metrics["eval/return"][..., 3], state.eval_return)


def test_greedy_evaluation_by_hand(calls):
    """Clock gives 1 + ... + 5 if the most likely action at time 4 is 1, and 6 more if not."""
    state, metrics = calls["halves"]
    expected = [15 if actions[4] > 0.5 else 21 for actions in calls["actions"]]
    np.testing.assert_array_equal(state.eval_return[0], expected)
    expected = [5 if actions[4] > 0.5 else 6 for actions in calls["actions"]]
    np.testing.assert_array_equal(metrics["eval/length"][0, :, 3], expected)
    whole, _ = calls["whole"]
    assert (whole.eval_return != state.eval_return).any()  # of sampled actions


def test_seeds_are_different_agents(calls):
    for state in (calls["before"], calls["whole"][0]):
        assert differs(of_seed(state.params, 0), of_seed(state.params, 1))
        assert (state.key[:, 0] != state.key[:, 1]).any()


@pytest.mark.parametrize("factor", OTHER_SEEDS)
def test_seeds_are_independent(calls, factor):
    """Also of one that has diverged."""
    (whole, metrics), (other, other_metrics) = calls["whole"], calls[factor]
    assert_same(of_seed(other, 0), of_seed(whole, 0))
    assert_same(of_seed(other_metrics, 0), of_seed(metrics, 0))
    norm = other_metrics["optim/grad_norm"][0, 1]
    assert (np.isfinite(norm) == np.isfinite(factor)).all()
    assert (norm != metrics["optim/grad_norm"][0, 1]).all()
    if np.isfinite(factor):
        assert differs(of_seed(whole.params, 1), of_seed(other.params, 1))


def test_a_single_seed_is_trained_as_the_first_of_two(calls):
    """It may be another program, without vmap: same shapes, and same numbers up to rounding."""
    first = jax.tree.map(lambda x: x[:, :1], calls["whole"])
    assert_close(calls["single"], first)


def test_training_changes_every_parameter(calls):
    change = lambda x, y: np.abs(x - y).max() > 0
    changes = jax.tree.map(change, calls["before"].params, calls["whole"][0].params)
    assert all(jax.tree.leaves(changes)), changes


def test_metrics_do_not_grow_with_the_rollout(module):
    with probes_for(module):
        shapes = []
        for num_envs, num_steps in ((4, 4), (8, 4), (4, 16)):
            sizes = {"num_envs": num_envs, "num_steps": num_steps, "num_seeds": 2}
            sizes["total_timesteps"] = 6 * num_envs * num_steps
            init, train, *_ = module.make_train(probe_config(module, "Clock", **sizes))
            state = jax.eval_shape(init, jax.random.split(jax.random.PRNGKey(0), 1))
            _, metrics = jax.eval_shape(train, state)
            assert {(x.shape, str(x.dtype)) for x in metrics.values()} == {((1, 2, 3), "float32")}
            shapes.append(jax.tree.map(lambda x: x.shape, state))
    assert shapes[2] == shapes[0]  # nor does the carry between updates


@pytest.mark.parametrize("script", TRAINABLE)
def test_double_precision_leaves_every_type_as_it_is(script):
    """JAX_ENABLE_X64=1: of other programs in the process, or of an environment."""
    module = load_script(script)
    config = tiny(module) if script in TINY else module.Config(**OTHER_SIZES.get(script, {}))
    describe = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
    with jax.enable_x64(True):
        init, train, *_ = module.make_train(config)
        key = jax.ShapeDtypeStruct((1, 2), jnp.uint32)
        state = jax.eval_shape(init, key)
        after, metrics = jax.eval_shape(train, state)
    assert describe(after) == describe(state)
    leaves = jax.tree_util.tree_leaves_with_path(state)
    own = {x.dtype.name for path, x in leaves if ".env_state" not in jax.tree_util.keystr(path)}
    assert own <= {"float32", "int32", "uint32", "uint8", "bool"}
    assert {x.dtype.name for x in metrics.values()} == {"float32"}


@pytest.mark.parametrize("script", [*SCRIPTS, "ppo_drift", "ppo_vtrace"])
def test_a_final_observation_of_nan_is_not_used(script):
    """As of a simulator that ends an episode because its state is NaN."""
    module = load_script(script)
    with probes_for(module) as patch:
        make_env = module.make_env

        def make_broken_env(config):
            reset, step, *space = make_env(config)

            def broken_step(key, env_state, action):
                *outcome, terminated, truncated, next_obs = step(key, env_state, action)
                is_float = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
                spoil = lambda x: jnp.where(terminated, jnp.nan, x) if is_float(x) else x
                return *outcome, terminated, truncated, jax.tree.map(spoil, next_obs)

            return reset, broken_step, *space

        patch.setattr(module, "make_env", make_broken_env)
        state, train = start(module, probe_config(module, "Tasks", num_evals=1))
        state, metrics = to_numpy(train(state))
    assert metrics["episode/count"].sum() > 20
    for path, x in jax.tree_util.tree_leaves_with_path((state.params, state.opt_state)):
        assert np.isfinite(x).all(), path
    assert np.isfinite(state.eval_return).all() and np.isfinite(metrics["loss/value"]).all()


@pytest.mark.parametrize("script", ["ppo_ff"])  # the same functions as in the others
def test_sweep_over_traced_numbers_is_that_of_separate_runs(script):
    """init_seed and train_seed vmapped over fields of Config."""
    module = load_script(script)
    numbers = {"lr": [1e-2, 1e-3], "ent_coef": [0.0, 0.3], "gamma": [0.9, 0.8]}
    with probes_for(module):
        config = probe_config(module, "Clock", total_timesteps=64)
        device_key = jax.random.split(jax.random.PRNGKey(0), 1)[0]
        seed_key = jax.random.split(device_key, 1)[0]

        def run(key, numbers):
            swept = dataclasses.replace(config, **numbers)
            _, _, init_seed, train_seed = module.make_train(swept)
            return train_seed(init_seed(key))

        sweep = jax.pmap(jax.vmap(run, (None, 0)), "devices", in_axes=(0, None))
        arrays = {name: jnp.array(values) for name, values in numbers.items()}
        state, metrics = to_numpy(sweep(seed_key[None], arrays))
        alone = dataclasses.replace(config, **{name: values[1] for name, values in numbers.items()})
        alone_state, train = start(module, alone)
        alone_state, alone_metrics = to_numpy(train(alone_state))
    close = lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5)
    jax.tree.map(close, of_seed(state, 1), of_seed(alone_state, 0))
    for name, x in alone_metrics.items():
        np.testing.assert_allclose(metrics[name][0, 1], x[0, 0], atol=1e-5, err_msg=name)
    assert differs(of_seed(state.params, 0), of_seed(state.params, 1))


# ------------------------------------- evaluation
@pytest.fixture(scope="module")
def evaluated(module):
    """Six calls of one update of two seeds: states before and after each, metrics, reset keys."""
    reset_keys = []
    with probes_for(module):
        make_env = module.make_env

        def make_recorded_env(config):
            env_reset, *rest = make_env(config)

            def reset(key):
                jax.debug.callback(lambda data: reset_keys.append(tuple(map(int, data))), key)
                return env_reset(key)

            return reset, *rest

        # The first update ends the first episode of each environment, and no other.
        sizes = {"num_steps": 6, "total_timesteps": 24 * 6, "num_evals": 6, "eval_episodes": 5}
        config = probe_config(module, "Clock", num_seeds=2, lr=0.02, **sizes)
        with pytest.MonkeyPatch.context() as recording:
            recording.setattr(module, "make_env", make_recorded_env)
            state, train = start(module, config)
            states = [to_numpy(state)]
            metrics = []
            for _ in range(6):
                state, measured = train(state)
                states.append(to_numpy(state))
                metrics.append(to_numpy(measured))
            jax.effects_barrier()
    return config, states, metrics, reset_keys


def test_evaluation_is_that_of_a_python_loop(module, evaluated):
    config, states, metrics, _ = evaluated
    with probes_for(module):
        play = make_player(module, config)
    lengths = []
    for seed in (0, 1):
        for before, after, measured in zip(states[:-1], states[1:], metrics, strict=True):
            key, eval_key = jax.random.split(key_after(before.key[0, seed], config, 1))
            keys = jax.random.split(eval_key, config.eval_episodes)
            episodes = [play(of_seed(after.params, seed), key) for key in keys]
            expected_return, expected_length = np.mean(episodes, 0)
            np.testing.assert_allclose(after.eval_return[0, seed], expected_return, rtol=1e-6)
            assert measured["eval/return"][0, seed, 0] == after.eval_return[0, seed]
            lengths.append(measured["eval/length"][0, seed, 0])
            np.testing.assert_allclose(lengths[-1], expected_length, rtol=1e-6)
            np.testing.assert_array_equal(after.key[0, seed], key)
    assert len(set(lengths)) > 1


def test_best_parameters_are_those_of_the_best_evaluation(evaluated):
    _, states, _, _ = evaluated
    assert (states[0].best_return == -np.inf).all()
    last = []
    for seed in (0, 1):
        returns = np.array([state.eval_return[0, seed] for state in states[1:]])
        best = [np.argmax(returns[: i + 1]) for i in range(6)]  # the first of equals
        for i, state in enumerate(states[1:]):
            assert state.best_return[0, seed] == returns[best[i]]
            best_params = of_seed(states[1 + best[i]].params, seed)
            assert_same(of_seed(state.best_params, seed), best_params)
        last.append(best[-1])
    assert any(0 < i < 5 for i in last), "neither always the first nor the last"


def test_training_and_evaluation_share_one_step(module, evaluated):
    """The first training episode of each environment, in the Python loop of evaluations."""
    config, states, metrics, _ = evaluated
    with probes_for(module):
        play = make_player(module, config)
    (device_key,) = jax.random.split(jax.random.PRNGKey(0), 1)
    for seed, seed_key in enumerate(jax.random.split(device_key, 2)):
        _, _, runner_key = jax.random.split(seed_key, 3)
        params = of_seed(states[0].params, seed)
        episodes = [play(params, key) for key in jax.random.split(runner_key, config.num_envs)]
        measured = {name: x[0, seed, 0] for name, x in metrics[0].items()}
        assert measured["episode/count"] == config.num_envs
        expected_return, expected_length = np.mean(episodes, 0)
        np.testing.assert_allclose(measured["episode/return"], expected_return, rtol=1e-6)
        np.testing.assert_allclose(measured["episode/length"], expected_length, rtol=1e-6)


def test_no_episode_starts_twice(module, evaluated):
    """Training and all evaluations of both seeds draw different keys."""
    config, _, _, reset_keys = evaluated
    episodes = config.num_envs + 6 * config.eval_episodes
    if module.SCRIPT == "ppo_obs_norm":  # the first rollout has environments of its own
        episodes += config.num_envs
    assert len(reset_keys) == len(set(reset_keys)) == 2 * episodes


# ----------------------------------- many devices
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
        sizes = {"num_envs": 4 * devices, "total_timesteps": 64 * devices}
        sizes["eval_episodes"] = 4 * devices
        config = probe_config(module, "Clock", num_seeds=2, lr=1e-2, **sizes)
        init, train, *_ = module.make_train(config)
        key = jax.random.PRNGKey(0)
        same = np.stack([key] * devices)
        for name, keys in (("same", same), ("different", jax.random.split(key, devices))):
            state, _ = train(init(keys))
            state, metrics = train(state)
            leaves = jax.tree_util.tree_leaves_with_path((to_numpy(state), to_numpy(metrics)))
            arrays = {jax.tree_util.keystr(path): x for path, x in leaves}
            np.savez(f"{folder}/{script}_{name}.npz", **arrays)
"""


@pytest.fixture(scope="module")
def many_devices(tmp_path_factory, request):
    """Returns load(script, keys): state and metrics [4, ...] after two calls, by path.

    On emulated devices, all started from the "same" key, which makes them copies of each other, or
    from "different" ones.
    """

    asking = [x.name for x in request.session.items if "many_devices" in x.fixturenames]
    scripts = [script for script in SCRIPTS if any(f"[{script}" in name for name in asking)]

    @functools.cache
    def run(devices):
        folder = tmp_path_factory.mktemp("many_devices")
        paths = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
        environment = with_devices(devices) | {"PYTHONPATH": paths}
        arguments = [str(devices), str(folder), *scripts]
        command = [sys.executable, "-W", "ignore", "-c", MANY_DEVICES, *arguments]
        subprocess.run(command, env=environment, check=True, timeout=400)
        return folder

    return lambda script, keys: dict(np.load(run(4) / f"{script}_{keys}.npz"))


def test_devices_hold_the_same_network(many_devices, module):
    arrays = many_devices(module.SCRIPT, "different")
    shared = (
        ".params",
        ".opt_state",
        ".updates_done",
        ".return_stats",
        ".eval_return",
        ".best",
        "['",
    )
    for path, x in arrays.items():
        field = path.removeprefix("[0]").removeprefix("[1]")
        if field.startswith(shared):
            np.testing.assert_array_equal(x, np.broadcast_to(x[:1], x.shape), err_msg=path)
    assert len([path for path in arrays if path.startswith("[1]")]) == 13  # the metrics


@pytest.mark.parametrize("script", ["ppo_ff", "ippo"])
def test_the_explained_variance_is_the_mean_of_the_devices(script, monkeypatch):
    """All of it on the first of two devices, none on the second."""
    module = load_script(script)

    def compute_gae(rollout, *_):
        target = rollout.value / (1 + jax.lax.axis_index("devices"))
        return target, target

    monkeypatch.setattr(module, "compute_gae", compute_gae)
    sizes = {"num_envs": 4, "num_steps": 4, "num_minibatches": 2, "hidden_size": 4}
    sizes |= {"num_evals": 1, "eval_episodes": 2, "total_timesteps": 16}
    env_id = "rings" if script == "ippo" else "CartPole-v1"
    *_, init_seed, train_seed = module.make_train(module.Config(env_id=env_id, **sizes))
    update = lambda key: train_seed(init_seed(key))[1]["value/explained_variance"]
    keys = jax.random.split(jax.random.PRNGKey(0), 2)
    explained = jax.jit(jax.vmap(update, axis_name="devices"))(keys)
    np.testing.assert_allclose(explained, [[0.5], [0.5]], atol=1e-5)


def test_devices_have_different_environments(many_devices, module):
    arrays = many_devices(module.SCRIPT, "different")
    different = [path for path, x in arrays.items() if (x[0] != x[1]).any()]
    assert "[0].key" in different and any("env_state" in path for path in different)


def test_copies_of_a_device_learn_what_one_learns(many_devices, module):
    """Means, variances, gradients, metrics and evaluations are averages over the devices."""
    arrays = many_devices(module.SCRIPT, "same")
    devices = len(arrays["[0].key"])
    assert devices == 4
    with probes_for(module):
        changes = {"num_seeds": 2, "total_timesteps": 64, "lr": 1e-2}
        config = probe_config(module, "Clock", **changes)
        init, train, *_ = module.make_train(config)
        state, _ = train(init(jax.random.PRNGKey(0)[None]))
        result = train(state)
    for path, x in jax.tree_util.tree_leaves_with_path(to_numpy(result)):
        path = jax.tree_util.keystr(path)
        is_sum = path.endswith(".count") and "stats" in path or "episode/count" in path
        expected = devices * x[0] if is_sum else x[0]
        for device in range(devices):
            np.testing.assert_allclose(arrays[path][device], expected, atol=2e-5, err_msg=path)


# ------------------------------------- statistics
def test_statistics_are_those_of_all_that_was_seen(monkeypatch):
    """Observations, and discounted returns that include the last reward of each episode.

    From a first rollout and six updates.
    """
    module = load_script("ppo_obs_norm")
    seen = {1: [], 0: []}  # by the dimensions of the mean
    rewards = []
    update_moments = module.update_moments
    compute_gae = module.compute_gae

    def record_batch(moments, batch):
        ndim = moments.mean.ndim
        jax.debug.callback(lambda x: seen[ndim].append(np.array(x)), batch)
        return update_moments(moments, batch)

    def record_reward(rollout, *args):
        jax.debug.callback(lambda x: rewards.append(np.array(x)), rollout.reward)
        return compute_gae(rollout, *args)

    monkeypatch.setattr(module, "update_moments", record_batch)
    monkeypatch.setattr(module, "compute_gae", record_reward)
    sizes = {"total_timesteps": 6 * 16, "num_evals": 6}
    config = probe_config(module, "Clock", gamma=0.8, normalize_reward=True, **sizes)
    state, train = start(module, config)
    jax.effects_barrier()
    for _ in range(6):
        state, _ = train(state)
        jax.effects_barrier()

    obs = np.concatenate(seen[1]).reshape(-1, 8)  # [steps, 8]
    assert len(obs) == 7 * 16
    moments = jax.tree.map(lambda x: np.array(x)[0, 0], state.params["obs_stats"]["moments"])
    np.testing.assert_allclose(moments.mean, obs.mean(0), atol=1e-5)
    np.testing.assert_allclose(moments.var, obs.var(0), atol=1e-5)
    assert moments.count == len(obs)

    times = obs.reshape(7 * 4, 4, 8).argmax(-1)  # [T, N]
    returns = np.zeros(times.shape)
    for t, now in enumerate(times):
        before = returns[t - 1] * (now > 0) if t else 0
        returns[t] = 0.8 * before + 1 + now
    np.testing.assert_allclose(np.concatenate(seen[0]).reshape(times.shape), returns, rtol=1e-5)
    np.testing.assert_allclose(state.return_stats.var[0, 0], returns.var(), rtol=1e-4)
    for update, reward in enumerate(rewards, 1):
        part = slice(4 * update, 4 * update + 4)
        expected = (1 + times[part]) / returns[: part.stop].std()
        np.testing.assert_allclose(reward, expected, rtol=1e-4)
    assert update == 6


# ----------------------------------- environments
def random_steps(env, num_envs, num_steps, sample_action):
    """First obs [N]; env_state and action before each step and its outcome, all [T, N]."""
    env_reset, env_step, *_ = env

    def step(carry, key):
        obs, env_state = carry
        action_key, step_key = jax.random.split(key)
        action = sample_action(action_key)
        step_keys = jax.random.split(step_key, num_envs)
        next_obs, next_state, *outcome = jax.vmap(env_step)(step_keys, env_state, action)
        return (next_obs, next_state), (env_state, action, next_obs, *outcome)

    first = jax.jit(jax.vmap(env_reset))(jax.random.split(jax.random.key(0), num_envs))
    scan = jax.jit(lambda first, keys: jax.lax.scan(step, first, keys)[1])
    return first[0], scan(first, jax.random.split(jax.random.key(1), num_steps))


def assert_next_obs(obs, next_obs, done):
    """They are the same where no episode ended."""

    def check(x, y):
        assert x.shape == y.shape and x.dtype == y.dtype
        np.testing.assert_array_equal(x[~done], y[~done])

    jax.tree.map(check, to_numpy(obs), to_numpy(next_obs))


GYMNAX = {  # environment, time limit, and enough steps to reach both ends, where it has both
    "ppo_ff": [("CartPole-v1", 15, 60), ("FrozenLake-misc", 9, 40), ("Breakout-MinAtar", 9, 40)],
    "ppo_continuous": [("Pendulum-v1", 20, 50), ("MountainCarContinuous-v0", 8, 20)],
    "ppo_obs_norm": [("Pendulum-v1", 20, 50), ("CartPole-v1", 15, 60), ("FrozenLake-misc", 9, 40)],
}
GYMNAX = [(s, *rest) for s, envs in GYMNAX.items() if s in SCRIPTS for rest in envs]


@pytest.mark.parametrize("script", ["ppo_ff", "disco"])
def test_minatar_is_stored_as_bools(script):
    """A quarter of the memory of a rollout or a replay, and faster."""
    module = load_script(script)
    reset, step, _ = module.make_env(module.Config(env_id="Breakout-MinAtar"))
    obs, env_state = jax.eval_shape(reset, jax.random.key(0))
    obs, *_, next_obs = jax.eval_shape(step, jax.random.key(0), env_state, 0)
    assert obs.dtype == next_obs.dtype == bool


@pytest.mark.parametrize(("script", "env_id", "limit", "num_steps"), GYMNAX)
def test_gymnax_environment(script, env_id, limit, num_steps):
    module, num_envs = load_script(script), 8
    config = module.Config(env_id=env_id, env_params=f'{{"max_steps_in_episode": {limit}}}')
    env = module.make_env(config)
    inner, params = gymnax.make(env_id)
    params = params.replace(max_steps_in_episode=limit)
    space = inner.action_space(params)
    continuous = not hasattr(space, "n")

    def sample_action(key):
        if continuous:
            return jax.random.uniform(key, (num_envs, *space.shape), minval=-1, maxval=1)
        return jax.random.randint(key, (num_envs,), 0, space.n)

    def reference(key, env_state, action):
        """The environment's own outcome, without a reset."""
        if continuous:
            action = (space.low + space.high) / 2 + (space.high - space.low) / 2 * action
        obs, env_state, reward, terminated, _ = inner.step_env(key, env_state, action, params)
        return obs, reward, terminated, inner.is_truncated(env_state, params)

    _, (states, action, obs, reward, terminated, truncated, next_obs) = random_steps(
        env, num_envs, num_steps, sample_action
    )
    keys = jax.random.split(jax.random.key(2), (num_steps, num_envs))
    expected = jax.jit(jax.vmap(jax.vmap(reference)))(keys, states, action)
    expected_obs, expected_reward, expected_terminated, expected_truncated = expected
    if env_id == "FrozenLake-misc":  # slippery: the next state is random, its encoding is not
        assert next_obs.shape[2:] == (16,) and (next_obs.sum(-1) == 1).all()
    else:
        np.testing.assert_allclose(next_obs, expected_obs, atol=1e-6)
        np.testing.assert_array_equal(terminated, expected_terminated)
        np.testing.assert_allclose(reward, expected_reward, atol=1e-5)
    np.testing.assert_array_equal(truncated, expected_truncated)
    done = np.array(terminated | truncated)
    assert terminated.dtype == truncated.dtype == bool and reward.dtype == jnp.float32
    assert truncated.any() and (terminated.any() or continuous)
    assert_next_obs(obs, next_obs, done)
    if env_id == "CartPole-v1":
        assert (np.abs(obs[done]) <= 0.05).all()
        assert (np.abs(next_obs[np.array(terminated)]).max(-1) > 0.2).all()


def test_xminigrid_environment():
    module, num_envs, limit = load_script("ppo_rnn"), 256, 12
    inner, params = xminigrid.make("MiniGrid-Empty-5x5")
    params = params.replace(max_steps=limit)
    config = module.Config(env_id="MiniGrid-Empty-5x5", env_params=f'{{"max_steps": {limit}}}')
    env = module.make_env(config)
    assert env[2] == 6
    probs = jnp.array([0.6, 0.2, 0.2, 0, 0, 0])
    sample_action = lambda key: jax.random.choice(key, 6, (num_envs,), p=probs)
    first_obs, (states, action, obs, reward, terminated, truncated, next_obs) = random_steps(
        env, num_envs, 40, sample_action
    )
    one_step = lambda timestep, action: inner.step(params, timestep, action)
    expected = jax.jit(jax.vmap(jax.vmap(one_step)))(states, action)
    done = np.array(terminated | truncated)
    np.testing.assert_array_equal(terminated, expected.discount == 0)
    np.testing.assert_array_equal(terminated, reward > 0)  # the goal, the only end but the limit
    np.testing.assert_array_equal(done, expected.last())
    assert terminated.any() and truncated.any() and not (terminated & truncated).any()
    np.testing.assert_array_equal(next_obs.grid, expected.observation)
    np.testing.assert_array_equal(next_obs.direction, expected.state.agent.direction)
    np.testing.assert_array_equal(next_obs.prev_action, action)
    np.testing.assert_array_equal(next_obs.prev_reward, reward)
    assert_next_obs(obs, next_obs, done)
    assert (first_obs.prev_action == -1).all() and (first_obs.prev_reward == 0).all()
    assert (obs.prev_action[done] == -1).all() and (obs.prev_reward[done] == 0).all()
    # An episode is cut at the limit, and the next starts at step 0.
    steps = np.array(states.state.step_num)
    assert (steps[1:][done[:-1]] == 0).all() and (steps[truncated] == limit - 1).all()


# ------------------------------------------- hang
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
    """Orthogonal initialization under vmap can deadlock on two cores.

    The batched QR decomposition blocks a thread of XLA's pool while it waits for work in that pool.
    """
    with probes_for(module):
        init, *_ = module.make_train(probe_config(module, "Clock", num_seeds=2))
        program = jax.make_jaxpr(init)(jax.random.split(jax.random.PRNGKey(0), 1))
    names = ("qr", "geqrf", "householder_product")
    found = [e.invars[0].aval.ndim for e in equations(program.jaxpr) if e.primitive.name in names]
    assert found, "no orthogonal initialization, or a new name for the decomposition"
    assert set(found) == {2}


def test_two_seeds_of_breakout_finish(tmp_path, full_optimization):
    """XLA:CPU can deadlock in a PPO with vmapped seeds on two cores."""
    command = f"""
        {sys.executable} -W ignore {ROOT / "ppo_ff.py"} --env-id Breakout-MinAtar --num-seeds 2
        --num-envs 64 --num-steps 64 --total-timesteps 16_384 --num-evals 1 --eval-episodes 2
        --run-dir {tmp_path / "run"}
    """
    subprocess.run(textwrap.dedent(command).split(), check=True, timeout=200, cwd=tmp_path)
    assert (tmp_path / "run" / "summary.json").exists()
