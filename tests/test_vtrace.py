"""ppo_vtrace.py: V-trace, the draw of segments, the NNX network, and what they train."""

import os
import subprocess
import sys

import flax.linen as nn
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import probes
import pytest
import rlax
from conftest import ROOT, load_script, tiny, with_devices
from flax import nnx
from scipy import stats
from test_cli import compiling_once, flags, learned, run, run_killed

module = load_script("ppo_vtrace")
ppo_ff = load_script("ppo_ff")


# --------------------------------------- V-trace
def random_steps(seed=0, steps=12, envs=5):
    """ratio, reward, value, next_value, terminated, done, all [T, N]."""
    rng = np.random.default_rng(seed)
    ratio = np.exp(rng.normal(0, 0.7, (steps, envs)))
    reward, value, next_value = rng.normal(0, 1, (3, steps, envs))
    done = rng.random((steps, envs)) < 0.3
    terminated = done & (rng.random((steps, envs)) < 0.5)
    assert (done & ~terminated).any() and (ratio > 1.2).any() and (ratio < 0.8).any()
    return ratio, reward, value, next_value, terminated, done


def rollout_of(module, reward, value, terminated, done):
    """A rollout of which only these fields are known."""
    unknown = dict.fromkeys(module.Transition._fields)
    known = {"reward": reward, "value": value, "terminated": terminated, "done": done}
    return module.Transition(**(unknown | known))


def vtrace(ratio, reward, value, next_value, terminated, done, config):
    """Of the script. The values of the acting critic must not matter."""
    rollout = rollout_of(module, reward, jnp.full_like(value, jnp.nan), terminated, done)
    return module.compute_vtrace(rollout, value, next_value, ratio, config)


def by_definition(ratio, reward, value, next_value, terminated, done, gamma, lam, rho, c):
    """The sum of remark 2 of arXiv 1802.01561, term by term, up to the end of the episode."""
    advantage = np.zeros_like(reward)
    for t, n in np.ndindex(reward.shape):
        weight = 1.0
        for k in range(t, len(reward)):
            bootstrap = 0.0 if terminated[k, n] else gamma * next_value[k, n]
            delta = min(rho, ratio[k, n]) * (reward[k, n] + bootstrap - value[k, n])
            advantage[t, n] += weight * delta
            if done[k, n]:
                break
            weight *= gamma * lam * min(c, ratio[k, n])
    return advantage


@pytest.mark.parametrize(("rho", "c"), [(1.0, 1.0), (2.0, 0.7), (0.5, 1.5)])
def test_vtrace_is_the_sum_of_its_definition(rho, c):
    steps = random_steps()
    config = tiny(module, gamma=0.9, gae_lambda=0.8, rho_clip=rho, c_clip=c)
    advantage, target = vtrace(*map(jnp.array, steps), config)
    expected = by_definition(*steps, 0.9, 0.8, rho, c)
    np.testing.assert_allclose(advantage, expected, atol=1e-5)
    np.testing.assert_allclose(target, expected + steps[2], atol=1e-5)


def test_vtrace_with_ratio_one_is_gae_to_the_last_bit():
    ratio, *steps = map(jnp.array, random_steps())
    reward, value, next_value, *ends = steps
    config = tiny(module, gamma=0.97, gae_lambda=0.95)
    actual = vtrace(jnp.ones_like(ratio), *steps, config)
    rollout = rollout_of(ppo_ff, reward, value, *ends)
    expected = ppo_ff.compute_gae(rollout, next_value, 0.97, 0.95)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
    assert (vtrace(ratio, *steps, config)[0] != expected[0]).any()


@pytest.mark.parametrize("broken", [jnp.nan, jnp.inf])
def test_the_next_value_of_a_terminated_step_is_never_used(broken):
    reward, value, next_value = jnp.ones(2), jnp.zeros(2), jnp.array([0, broken])
    end = jnp.array([False, True])
    config = tiny(module, gamma=0.9, gae_lambda=0.8)
    advantage, target = vtrace(jnp.ones(2), reward, value, next_value, end, end, config)
    np.testing.assert_allclose(advantage, [1.72, 1], rtol=1e-6)
    np.testing.assert_allclose(target, [1.72, 1], rtol=1e-6)


def test_vtrace_is_that_of_rlax_without_time_limits():
    """rlax cuts the trace by a discount of zero and clips c at 1."""
    ratio, reward, value, _, terminated, _ = map(jnp.array, random_steps())
    next_value = jnp.concatenate([value[1:], jnp.ones((1, 5))])
    config = tiny(module, gamma=0.9, gae_lambda=0.8, rho_clip=1.3)
    steps = (ratio, reward, value, next_value, terminated, terminated)
    discount = 0.9 * (1 - terminated)
    reference = lambda *args: rlax.vtrace(*args, lambda_=0.8, clip_rho_threshold=1.3)
    expected = jax.vmap(reference, 1, 1)(value, next_value, reward, discount, ratio)
    np.testing.assert_allclose(vtrace(*steps, config)[0], expected, atol=1e-5)


# -------------------------------------- segments
def draws(priority, count, repeats=4000):
    """rows and probabilities, [repeats, count]."""
    keys = jax.random.split(jax.random.PRNGKey(0), repeats)
    draw = jax.jit(jax.vmap(lambda key: module.draw_segments(key, jnp.array(priority), count)))
    return jax.tree.map(np.array, draw(keys))


def test_drawing_all_segments_takes_each_once_with_certainty():
    rows, probability = draws(np.array([1.0, 1.5, 1.0, 0.8]), 4, repeats=50)
    np.testing.assert_array_equal(np.sort(rows), np.tile(np.arange(4), (50, 1)))
    np.testing.assert_array_equal(probability, np.ones((50, 4)))
    assert len(np.unique(rows, axis=0)) > 10


def test_the_first_draw_follows_the_priorities():
    priority = np.array([0.5, 4.0, 1.0, 2.0, 0.25])
    rows, _ = draws(priority, 3)
    assert all(len(set(row)) == 3 for row in rows)  # without replacement
    expected = priority / priority.sum() * len(rows)
    assert stats.chisquare(np.bincount(rows[:, 0], minlength=5), expected).pvalue > 1e-3
    wrong = np.full(5, len(rows) / 5)
    assert stats.chisquare(np.bincount(rows[:, 0], minlength=5), wrong).pvalue < 1e-9
    # Given the first, the second follows the priorities of the others.
    second = rows[rows[:, 0] == 1, 1]
    others = np.delete(priority, 1)
    expected = others / others.sum() * len(second)
    counts = np.delete(np.bincount(second, minlength=5), 1)
    assert stats.chisquare(counts, expected).pvalue > 1e-3


def test_weights_undo_the_priorities():
    """A sum over the segments, estimated by weights 1 / probability, has no bias."""
    priority, x = np.array([0.5, 4.0, 1.0, 2.0, 0.25, 1.0]), np.array([3.0, 1, -2, 5, 7, 0])
    rows, probability = draws(priority, 3)
    estimates = (x[rows] / probability).sum(1)
    error = estimates.std() / len(rows) ** 0.5
    assert abs(estimates.mean() - x.sum()) < 4 * error
    unweighted = 2 * x[rows].sum(1)
    error = unweighted.std() / len(rows) ** 0.5
    assert abs(unweighted.mean() - x.sum()) > 10 * error


def test_equal_priorities_have_equal_weights():
    _, probability = draws(np.ones(6), 3, repeats=20)
    np.testing.assert_allclose(probability.std(1), np.zeros(20), atol=1e-6)


# --------------------------------------- network
def network_of(config, obs_size, num_actions, policy="gaussian", seed=0):
    return module.ActorCritic(obs_size, num_actions, policy, config, nnx.Rngs(seed))


def linen_cell(cell, params):
    """The linen cell with the weights of an NNX cell, and its parameters."""
    if cell == "gru":
        linen = nn.GRUCell(4)
        inputs, hidden = params["dense_i"], params["dense_h"]
        split = lambda x: jnp.split(x, 3, axis=-1)
        parts = zip("rzn", split(inputs["kernel"]), split(inputs["bias"]), strict=True)
        weights = {f"i{k}": {"kernel": w, "bias": b} for k, w, b in parts}
        parts = dict(zip("rzn", split(hidden["kernel"]), strict=True))
        weights |= {f"h{k}": {"kernel": w} for k, w in parts.items()}
        weights["hn"]["bias"] = jnp.zeros(4)
        return linen, weights
    return nn.LSTMCell(4), {name.strip("_"): layer for name, layer in params.items()}


@pytest.mark.parametrize("cell", ["gru", "lstm"])
@pytest.mark.parametrize("memory", [True, False])
def test_the_network_is_that_of_linen(cell, memory):
    config = tiny(module, hidden_size=4, cell=cell, memory=memory)
    network = network_of(config, 3, 2)
    graphdef, params = nnx.split(network)
    keys = iter(jax.random.split(jax.random.PRNGKey(1), 99))
    params = jax.tree.map(lambda x: x + 0.3 * jax.random.normal(next(keys), x.shape), params)
    weights = nnx.to_pure_dict(params)
    obs = jax.random.normal(jax.random.PRNGKey(2), (6, 2, 3))  # two sequences of six steps
    reset = jnp.array([[0, 0, 1, 0, 1, 0], [1, 0, 0, 0, 0, 1]], bool).T
    carry = jax.random.normal(jax.random.PRNGKey(3), (2, 4))
    carry = carry if cell == "gru" else (carry, -carry)
    network = nnx.merge(graphdef, params)
    policy, value, hidden = network(obs, (carry, carry), reset)

    def unroll(part):
        linen, cell_weights = linen_cell(cell, weights[part]["cell"])
        now, outputs = carry, []
        for t in range(6):
            keep = ~reset[t, :, None] & memory
            now = jax.tree.map(lambda x, keep=keep: x * keep, now)
            x = jnp.tanh(nn.Dense(4).apply({"params": weights[part]["encoder"]}, obs[t]))
            now, output = linen.apply({"params": cell_weights}, now, x)
            outputs.append(output)
        return now, jnp.stack(outputs)

    end, x = unroll("actor")
    expected = nn.Dense(2).apply({"params": weights["actor_head"]}, x)
    np.testing.assert_allclose(policy.mean(), expected, atol=1e-5)
    std = np.exp(np.tile(weights["log_std"], (6, 2, 1)))
    np.testing.assert_allclose(policy.stddev() + 0 * policy.mean(), std, rtol=1e-5)
    last = jax.tree.map(lambda x: x[-1], hidden[0])
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), last, end)
    _, x = unroll("critic")
    expected = nn.Dense(1).apply({"params": weights["critic_head"]}, x)[..., 0]
    np.testing.assert_allclose(value, expected, atol=1e-5)


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_a_step_is_the_next_of_a_sequence(cell):
    """Of one environment, and of many."""
    network = network_of(tiny(module, cell=cell), 3, 2)
    obs = jax.random.normal(jax.random.PRNGKey(2), (6, 5, 3))
    reset = jax.random.bernoulli(jax.random.PRNGKey(3), 0.3, (6, 5))
    start = jnp.ones((5, 4)) if cell == "gru" else (jnp.ones((5, 4)), -jnp.ones((5, 4)))
    policy, value, hidden = network(obs, (start, start), reset)
    before = jax.tree.map(lambda x: x[3], hidden)
    first = jax.tree.map(lambda x: x[0], before)
    for steps, inputs in (
        (np.s_[4], (obs[4], before, reset[4])),
        (np.s_[4, 0], (obs[4, 0], first, reset[4, 0])),
    ):
        step_policy, step_value, step_hidden = network.step(*inputs)
        np.testing.assert_allclose(step_policy.mean(), policy.mean()[steps], atol=1e-6)
        np.testing.assert_allclose(step_value, value[steps], atol=1e-6)
        same = lambda x, y, steps=steps: np.testing.assert_allclose(x, y[steps], atol=1e-6)
        jax.tree.map(same, step_hidden, hidden)
        assert step_policy.sample(seed=jax.random.PRNGKey(4)).shape == (*step_value.shape, 2)


def test_hidden_velocities_are_not_observed():
    for env_id, kept in (("Pendulum-v1", [0, 1]), ("CartPole-v1", [0, 2])):
        env, params = gymnax.make(env_id)
        expected = env.reset(jax.random.PRNGKey(3), params)[0][np.array(kept)]
        reset, step, *_ = module.make_env(tiny(module, env_id=env_id, hide_velocity=True))
        obs, env_state = reset(jax.random.PRNGKey(3))
        np.testing.assert_array_equal(obs, expected)
        action = jnp.zeros(1) if env_id == "Pendulum-v1" else jnp.int32(0)
        obs, *_, next_obs = step(jax.random.PRNGKey(4), env_state, action)
        assert obs.shape == next_obs.shape == (2,)
    for env_id in ("Acrobot-v1", "brax/ant"):
        with pytest.raises(module.ConfigError, match="CartPole-v1 and Pendulum-v1 only"):
            module.make_env(tiny(module, env_id=env_id, hide_velocity=True))


# -------------------------------------- training
@pytest.mark.parametrize(
    "sizes", [{"draw_fraction": 0.1}, {"draw_fraction": 2.0}, {"num_minibatches": 3}]
)
def test_segments_that_cannot_be_drawn(sizes):
    message = "of 4 segments per device"
    with pytest.raises(module.ConfigError, match=message):
        module.make_train(tiny(module, **sizes))


def train(config, seed=0):
    """State and metrics [updates] of the first seed."""
    state, train = probes.start(module, config, seed)
    state, metrics = train(state)
    return state, {name: np.array(x)[0, 0] for name, x in metrics.items()}


def test_minibatches_are_in_order_of_score(monkeypatch):
    """Mixed ones learn Pendulum-v1 without velocity more slowly: docs/ppo_vtrace.md."""
    seen, loss = [], module.ppo_loss

    def draw(key, priority, count):
        return jnp.arange(count), jnp.arange(1.0, count + 1)  # the weight falls with the rank

    def recorded_loss(*arguments):
        jax.debug.callback(lambda weight: seen.append(np.array(weight)), arguments[6], ordered=True)
        return loss(*arguments)

    monkeypatch.setattr(module, "draw_segments", draw)
    monkeypatch.setattr(module, "ppo_loss", recorded_loss)
    train(tiny(module, draw_fraction=1.0, num_minibatches=2, update_epochs=1))
    jax.effects_barrier()
    first, second = seen[:2]
    assert first[0] > first[1] > second[0] > second[1]


def test_replayed_segments_have_ratio_one():
    """Before the first step, memory included: episodes end within and between rollouts."""
    options = {
        "env_params": '{"max_steps_in_episode": 6}',
        "cell": "lstm",
        "normalize_reward": False,
    }
    once = {"update_epochs": 1, "num_minibatches": 1, "lr": 1e-2}
    config = tiny(module, num_evals=1, draw_fraction=1.0, **options, **once)
    _, metrics = train(config)
    assert len(metrics["policy/approx_kl"]) == 8
    assert np.abs(metrics["policy/approx_kl"]).max() < 1e-6
    assert not metrics["policy/clip_fraction"].any()
    assert np.abs(metrics["loss/policy"]).max() < 1e-5  # minus the mean normalized advantage


def same_parameters(a, b):
    pairs = zip(jax.tree.leaves(a.params), jax.tree.leaves(b.params), strict=True)
    return all((x == y).all() for x, y in pairs)


def test_no_gradient_flows_through_the_advantage(monkeypatch):
    config = tiny(module, num_evals=1, lr=1e-2)
    expected, _ = train(config)
    compute, calls = module.compute_vtrace, []

    def detached(*args):
        calls.append(args)
        return jax.lax.stop_gradient(compute(*args))

    monkeypatch.setattr(module, "compute_vtrace", detached)
    assert same_parameters(train(config)[0], expected) and len(calls) > 1


def test_options_change_what_is_trained():
    states = [train(tiny(module, num_evals=1, lr=1e-2))[0]]
    for change in (
        {"recompute_advantages": False},
        {"priority_alpha": 0.0},
        {"policy": "tanh_gaussian", "priority_beta": 1.0},
    ):
        state, metrics = train(tiny(module, num_evals=1, lr=1e-2, **change))
        assert np.isfinite(metrics["loss/value"]).all(), change
        states.append(state)
    trained = [np.concatenate([x.ravel() for x in jax.tree.leaves(s.params)]) for s in states]
    assert len({x.tobytes() for x in trained}) == len(states)


def test_values_of_the_probe_tasks():
    """The time limit is no end: 1 / (1 - gamma) for endless rewards of 1, cut after 3 steps."""
    from test_probes import GAMMA

    sizes = {"num_envs": 32, "num_steps": 8, "total_timesteps": 32 * 8 * 120, "hidden_size": 32}
    options = {"lr": 5e-3, "gamma": GAMMA, "update_epochs": 4, "normalize_reward": False}
    config = probes.probe_config(module, "Tasks", **sizes, **options, num_evals=1)
    state, _ = train(config)
    params = jax.tree.map(lambda x: x[0, 0], probes.to_numpy(state.params))
    graphdef = nnx.graphdef(network_of(config, probes.NUM_STATES, 2, "categorical"))
    network = nnx.merge(graphdef, params)
    hidden = (jnp.zeros(32), jnp.zeros(32))

    def values(*states):
        obs = jax.nn.one_hot(jnp.array(states), probes.NUM_STATES)
        return network(obs, hidden, jnp.zeros(len(states), bool))[1]

    tasks = probes.Tasks
    np.testing.assert_allclose(values(tasks.constant), [1.0], atol=0.1)
    np.testing.assert_allclose(values(tasks.delayed, 5), [GAMMA, 1.0], atol=0.1)
    np.testing.assert_allclose(values(*[tasks.endless] * 3), [1 / (1 - GAMMA)] * 3, rtol=0.1)


@compiling_once(module)
def test_an_interrupted_run_continues_to_the_same_bits(tmp_path):
    words = flags(tiny(module, cell="lstm", num_seeds=2, num_evals=4))
    code, _, err = run(module, *words, "--run-dir", tmp_path / "whole")
    assert code == 0, err
    run_killed(module, [*words, "--run-dir", tmp_path / "cut"], "append_rows", 3)
    code, _, err = run(module, "--run-dir", tmp_path / "cut")
    assert code == 0, err
    assert learned(tmp_path / "cut") == learned(tmp_path / "whole")


# ----------------------------------- many devices
TWO_DEVICES = """
import sys

import jax
import numpy as np
from conftest import ROOT, load_script, tiny, with_devices

module = load_script("ppo_vtrace")
sizes = {"num_seeds": 2, "total_timesteps": 64, "num_evals": 1, "num_minibatches": 1}
options = {"env_params": '{"max_steps_in_episode": 6}', "draw_fraction": 1.0, "lr": 1e-2}
config = tiny(module, **sizes, **options)
init, train, *_ = module.make_train(config)
keys = jax.random.split(jax.random.PRNGKey(0), 2)
state = init(keys)  # [2, S, ...]
assert state.runners.obs.shape[:3] == (2, 2, 2)
# One device with the environments of both, [1, S, 2 N].
merged = jax.tree.map(lambda x: np.array(x[:1]), state)
merge = lambda x: np.concatenate(np.array(x), axis=1)[None]
merged = merged._replace(runners=jax.tree.map(merge, state.runners))
two = train(state)
jax.device_count = lambda: 1
_, train, *_ = module.make_train(config)
one = train(merged)
for name, result in (("one", one), ("two", two)):
    leaves = jax.tree_util.tree_leaves_with_path(result)
    arrays = {jax.tree_util.keystr(path): np.array(x) for path, x in leaves}
    np.savez(f"{sys.argv[1]}/{name}.npz", **arrays)
"""


def test_two_devices_learn_what_one_learns_from_the_environments_of_both(tmp_path):
    """With every segment in one minibatch: devices draw among their own."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    command = [sys.executable, "-W", "ignore", "-c", TWO_DEVICES, str(tmp_path)]
    subprocess.run(command, env=with_devices(2) | {"PYTHONPATH": paths}, check=True, timeout=400)
    one, two = (dict(np.load(tmp_path / f"{name}.npz")) for name in ("one", "two"))
    assert one.keys() == two.keys()
    shared = ("[0].params", "[0].opt_state", "[0].return_stats", "[0].updates_done", "[1]")
    paths = [path for path in one if path.startswith(shared)]
    assert len(paths) > 30 and sum(path.startswith("[1]") for path in paths) == 13
    for path in paths:
        x, y = one[path], two[path]
        np.testing.assert_array_equal(y[0], y[1], err_msg=path)
        # Evaluations have other random numbers, and a variance is not a mean over devices.
        if "eval/" not in path and "explained_variance" not in path:
            np.testing.assert_allclose(y[0], x[0], rtol=1e-4, atol=1e-5, err_msg=path)
    assert (one["[1]['episode/count']"] > 0).any()
    obs = two["[0].runners.obs"]
    assert (obs[0] != obs[1]).any()
    np.testing.assert_allclose(np.concatenate(obs, 1), one["[0].runners.obs"][0], atol=1e-3)
