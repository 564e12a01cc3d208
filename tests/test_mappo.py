"""A critic that sees everything: what it reads, how its values are normalized, and two probes."""

import inspect
import re

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_ippo_rnn
from conftest import load_script
from gymnax.environments import spaces
from probes import start, to_numpy
from test_cli import compiling_once, flags, learned, run, run_killed
from test_ippo import (
    SMALL,
    Aim,
    Hashed,
    Toy,
    assert_close,
    assert_same,
    differ,
    never,
    toy_time_limit,
)

ippo_rnn = load_script("ippo_rnn")
mappo = load_script("mappo")
KINDS = [(True, "gru"), (False, "lstm")]


def small(script=mappo, **changes):
    return script.Config(**{**SMALL, **changes})


@pytest.fixture
def use(monkeypatch):
    """use(env) makes it the environment of every env_id."""

    def use_env(env, time_limit=toy_time_limit):
        for script in (ippo_rnn, mappo):
            monkeypatch.setattr(script, "load_env", lambda config: env)
            monkeypatch.setitem(script.TIME_LIMIT, "toy", time_limit)

    return use_env


@pytest.fixture
def no_evaluation(monkeypatch):
    """Evaluation, which alone uses while_loop, compiles for as long as an update."""
    monkeypatch.setattr(jax.lax, "while_loop", lambda unfinished, play, state: state)


def train(config, script=mappo):
    """Returns the state after, and metrics [S, updates], without the devices' axis."""
    state, program = start(script, config)
    return jax.tree.map(lambda x: x[0], to_numpy(program(state)))


# ------------------------------------------ world
def test_the_environment_of_ippo_rnn_gets_a_world_and_nothing_else():
    def without_observe(script):
        return re.sub(r"    def observe[\s\S]*?\n\n", "", inspect.getsource(script.make_env))

    assert without_observe(mappo) == without_observe(ippo_rnn) != inspect.getsource(mappo.make_env)


class WithWorld(Toy):
    """The same walk, in an environment that tells the state of the world."""

    def see(self, state):
        world = jnp.append(10 * state.place, state.seen)
        return {**super().see(state), "world_state": world}


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("env", [Toy(3), WithWorld(3)], ids=["no state", "a state"])
def test_the_critic_reads_the_world_and_the_actor_its_own_observation(use, env, share):
    use(env)
    config = small(share_parameters=share)
    reset, step, *_ = mappo.make_env(config)
    old_reset, old_step, *_ = ippo_rnn.make_env(config)
    key = jax.random.PRNGKey(0)
    (obs, state), (old_obs, old_state) = reset(key), old_reset(key)
    for _ in range(4):  # the third step ends one agent, the fifth the episode
        own = np.array(obs.features)
        np.testing.assert_array_equal(own, old_obs.features)
        np.testing.assert_array_equal(obs.active, old_obs.active)
        assert obs.world.dtype == np.float32
        if isinstance(env, WithWorld):
            place, seen = state[0].place, state[0].seen
            world = np.append(10 * np.array(place), seen)
        else:
            world = own[:, :2].ravel()
        for k in range(3):
            np.testing.assert_allclose(obs.world[k], [*world, *np.eye(3)[k]], rtol=1e-6)
        action = jnp.array([1, 1, 0])
        obs, state, *_, next_obs = step(key, state, action)
        old_obs, old_state, *_ = old_step(key, old_state, action)
        np.testing.assert_array_equal(next_obs.world[:, -3:], np.eye(3))


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_only_the_critic_depends_on_the_world(cell):
    config = small(cell=cell)
    network = mappo.ActorCritic(False, config)
    keys = jax.random.split(jax.random.PRNGKey(0), 3)
    obs = mappo.Observation(
        features=jax.random.normal(keys[0], (6, 5, 3)),
        world=jax.random.normal(keys[1], (6, 5, 7)),
        mask=jnp.ones((6, 5, 4), bool),
        active=jnp.ones((6, 5), bool),
    )
    zeros = jnp.zeros((5, 4))
    hidden = zeros if cell == "gru" else (zeros, zeros)
    inputs = ({"actor": hidden, "critic": hidden}, jnp.zeros((6, 5), bool))
    params = network.init(keys[2], obs, *inputs)
    assert_same(tuple(params["value_stats"]["moments"]), (0.0, 0.0, 0.0))

    def outputs(features, world):
        seen = obs._replace(features=features, world=world)
        policy, value, _ = network.apply(params, seen, *inputs)
        return policy.log_prob(jnp.zeros((6, 5), int)), value

    policy, value = jax.jacobian(lambda *x: outputs(*x)[0].sum(), (0, 1))(obs.features, obs.world)
    assert (policy != 0).all() and not value.any()
    policy, value = jax.jacobian(lambda *x: outputs(*x)[1].sum(), (0, 1))(obs.features, obs.world)
    assert not policy.any() and (value != 0).all()


# ---------------------------------- normalization
def test_moments_are_debiased_averages_over_what_is_active():
    """Of several updates and two devices, against NumPy in float64."""
    rng = np.random.default_rng(0)
    x = rng.normal(5, 3, (4, 2, 6, 3)).astype(np.float32)  # updates, devices, samples
    active = rng.random(x.shape) < 0.6
    add = jax.vmap(mappo.Moments.add, (None, 0, 0, None), axis_name="devices")
    moments, first, second, total = mappo.Moments(*jnp.zeros(3)), 0.0, 0.0, 0.0
    assert_same(moments.mean_and_std(), (0.0, 1.0))
    for new, mask in zip(x, active, strict=True):
        moments = jax.tree.map(lambda x: x[0], add(moments, new, mask, 0.9))
        chosen = new[mask].astype(np.float64)
        first, second = 0.9 * first + 0.1 * chosen.mean(), 0.9 * second + 0.1 * (chosen**2).mean()
        total = 0.9 * total + 0.1
        mean = first / total
        std = np.sqrt(second / total - mean**2)
        assert_close(moments.mean_and_std(), (mean, std), rtol=1e-5)


def test_values_are_in_units_of_the_reward_and_their_loss_is_of_normalized_ones(
    use, monkeypatch, no_evaluation
):
    """Three updates without learning, so that the weights stay the same; against NumPy."""
    use(Toy(3, scale={"agent_1": 20.0}))
    gae_calls, loss_calls = [], []
    gae, loss = mappo.compute_gae, mappo.ppo_loss

    def record_gae(rollout, next_value, *args):
        result = gae(rollout, next_value, *args)
        known = (rollout.value, rollout.obs.active, result[1])
        jax.debug.callback(lambda *x: gae_calls.append(to_numpy(x)), *known)
        return result

    def record_loss(params, network, batch, advantage, target, *args):
        result = loss(params, network, batch, advantage, target, *args)
        bare = params | {"value_stats": {"moments": mappo.Moments(*jnp.zeros(3))}}
        hidden = jax.tree.map(lambda x: x[0], batch.hidden)
        _, output, _ = network.apply(bare, batch.obs, hidden, batch.reset)
        known = (output, batch.value, target, batch.obs.active, result[1]["loss/value"])
        jax.debug.callback(lambda *x: loss_calls.append(to_numpy(x)), *known)
        return result

    monkeypatch.setattr(mappo, "compute_gae", record_gae)
    monkeypatch.setattr(mappo, "ppo_loss", record_loss)
    frozen = {"actor_lr": 0.0, "critic_lr": 0.0, "actor_epochs": 1, "critic_epochs": 1}
    config = small(**frozen, num_envs=64, num_minibatches=1, total_timesteps=3 * 512)
    state, program = start(mappo, config)
    after, _ = program(state)
    jax.effects_barrier()
    assert len(gae_calls) == len(loss_calls) == 3
    mean, std, first, second, total = 0.0, 1.0, 0.0, 0.0, 0.0
    for (value, active, target), (output, acted, goal, seen, value_loss) in zip(
        gae_calls, loss_calls, strict=True
    ):
        np.testing.assert_allclose(acted[seen], mean + std * output[seen], rtol=1e-4, atol=1e-4)
        assert not value[~active].any() and (~active).any()
        first = 0.99 * first + 0.01 * target[active].mean(dtype=np.float64)
        second = 0.99 * second + 0.01 * (target[active].astype(np.float64) ** 2).mean()
        total = 0.99 * total + 0.01
        mean, std = first / total, np.sqrt(second / total - (first / total) ** 2)
        error = np.where(seen, output - (goal - mean) / std, 0)
        assert value_loss == pytest.approx(0.5 * (error**2).mean(), rel=1e-4)
        assert not goal[~seen].any()
    assert std > 1.5  # the scales differ
    stats = after.params["value_stats"]["moments"]
    assert_close(jax.tree.map(lambda x: x[0, 0], stats).mean_and_std(), (mean, std), rtol=1e-4)


@pytest.mark.parametrize("clip", [False, True])
def test_the_value_loss_is_that_of_normalized_values(clip):
    """Their change is clipped in units of the deviation; against NumPy in float64."""
    config = small(clip_value=clip)
    network = mappo.ActorCritic(False, config)
    keys = iter(jax.random.split(jax.random.PRNGKey(0), 6))
    normal = lambda *shape: jax.random.normal(next(keys), shape)
    every = jnp.ones((6, 5), bool)
    obs = mappo.Observation(normal(6, 5, 3), normal(6, 5, 7), jnp.ones((6, 5, 4), bool), every)
    zeros = {"actor": jnp.zeros((5, 4)), "critic": jnp.zeros((5, 4))}
    params = network.init(next(keys), obs, zeros, ~every)
    stats = mappo.Moments(*jnp.float32([0.5 * 3, 0.5 * (9 + 10.0**2), 0.5]))  # mean 3, std 10
    params = params | {"value_stats": {"moments": stats}}
    _, value, _ = network.apply(params, obs, zeros, ~every)
    old, target = value + 4 * normal(6, 5), value + 10 * normal(6, 5)
    batch = mappo.Transition(
        *(obs, ~every, jax.tree.map(lambda x: x[None], zeros), jnp.zeros((6, 5), int)),
        *(jnp.zeros((6, 5)), old, *[None] * 6),
    )
    _, metrics = mappo.ppo_loss(params, network, batch, jnp.zeros((6, 5)), target, 0.0, config)
    value, old, target = (np.float64((x - 3) / 10) for x in (value, old, target))
    error = (value - target) ** 2
    if clip:
        near = old + np.clip(value - old, -config.clip_eps, config.clip_eps)
        assert 0.1 < (near != value).mean() < 0.9
        error = np.maximum(error, (near - target) ** 2)
    assert float(metrics["loss/value"]) == pytest.approx(0.5 * error.mean(), rel=1e-4)


# --------------------------------------- training
def test_continuous_actions_reach_their_aim(use):
    """As in test_ippo.py. The world: both agents' observations, of different lengths."""
    use(Aim(), never)
    sizes = {"num_envs": 16, "num_steps": 16, "hidden_size": 16, "total_timesteps": 25600}
    rates = {"actor_lr": 0.01, "critic_lr": 0.01, "ent_coef": 0.0, "eval_greedy": True}
    after, metrics = train(small(**sizes, **rates))
    assert after.eval_return > -0.15  # of -14.5 for the initial policy's mode
    assert metrics["episode/return"][0, 0] < -5


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_a_single_agent_learns_as_in_ippo_rnn(use, cell, no_evaluation):
    """Its own observation is the world."""
    use(Toy(1))
    options = {"cell": cell, "total_timesteps": 128, "clip_value": True}
    state, program = start(mappo, small(**options, normalize_values=False))
    after, metrics = program(state)
    state, program = start(ippo_rnn, small(ippo_rnn, **options))
    expected, expected_metrics = program(state)
    assert_close(after.params["params"], expected.params["params"], rtol=1e-5, atol=1e-7)
    # The policy loss is a mean of numbers of order one that cancel.
    assert_close(metrics, expected_metrics, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("share", "cell"), KINDS[1:])  # the other one: test_ippo_rnn.py
def test_permuting_the_agents_permutes_the_results(use, monkeypatch, share, cell, no_evaluation):
    monkeypatch.setattr(mappo.distrax, "Categorical", Hashed)
    config = small(share_parameters=share, cell=cell, num_minibatches=1, actor_lr=0.01)
    order = [2, 0, 1]
    index = [2 + i for i in order]
    rows = {  # of the first layers: an agent's own place and time, those of all, the index
        "actor": [0, 1, *index] if share else [0, 1],
        "critic": [2 * i + j for i in order for j in (0, 1)] + [6 + i for i in order],
    }

    def permute(params):
        """Of [D, S, ...], with an axis of agents if parameters are not shared."""
        parts = {}
        for part, layers in params["params"].items():
            if not share:
                layers = jax.tree.map(lambda x: x[:, :, jnp.array(order)], layers)
            first = layers["Dense_0"]
            kernel = first["kernel"][..., jnp.array(rows[part]), :]
            parts[part] = {**layers, "Dense_0": {**first, "kernel": kernel}}
        return params | {"params": parts}

    use(Toy(3))
    state, program = start(mappo, config)
    params = jax.tree.map(lambda x: 2.0 * x, state.params)
    initial = jax.tree.map(jnp.copy, permute(params))
    after, metrics = program(state._replace(params=params))
    use(Toy(3, order))
    state, program = start(mappo, config)
    permuted, permuted_metrics = program(state._replace(params=initial))
    assert_close(permuted.params, permute(after.params), rtol=1e-4, atol=1e-5)
    assert differ(permuted.params, after.params)
    assert {*metrics} == {*permuted_metrics}
    for name in metrics:
        np.testing.assert_allclose(metrics[name], permuted_metrics[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("share", "cell"), KINDS[:1])  # the other one: test_ippo_rnn.py
def test_a_killed_run_continues_to_the_same_bytes(use, share, cell, tmp_path):
    use(Toy(3))
    sizes = {"num_evals": 2, "num_seeds": 2, "total_timesteps": 128}
    words = flags(small(**sizes, share_parameters=share, cell=cell))
    with compiling_once(mappo):
        code, _, err = run(mappo, *words, "--run-dir", tmp_path / "whole")
        assert code == 0, err
        run_killed(mappo, [*words, "--run-dir", tmp_path / "run"], "save", 2)
        code, _, err = run(mappo, "--run-dir", tmp_path / "run")
    assert code == 0, err
    assert learned(tmp_path / "run") == learned(tmp_path / "whole")
    checkpoint = (tmp_path / "run" / "checkpoint.msgpack").read_bytes()
    best = flax.serialization.msgpack_restore(checkpoint)["best_params"]  # for --init-from
    assert (best["value_stats"]["moments"]["weight"] > 0).all()


# -------------------------------------- the probes
class Pair:
    """One step. Each agent sees a sign of its own; both are paid their product, times `scale`.

    Whatever the agents do, the best prediction from one sign alone is 0, and from both it is exact.
    """

    agents = ("one", "two")

    def __init__(self, scale=1.0):
        self.scale = scale

    def action_space(self, name):
        return spaces.Discrete(2)

    def see(self, signs):
        return {name: jnp.float32(signs[k, None]) for k, name in enumerate(self.agents)}

    def reset(self, key):
        signs = jax.random.rademacher(key, (2,))
        return self.see(signs), signs

    def step_env(self, key, signs, actions):
        reward = self.scale * jnp.float32(signs.prod())
        ended = dict.fromkeys((*self.agents, "__all__"), jnp.bool(True))
        return self.see(signs), signs, dict.fromkeys(self.agents, reward), ended, {}


PROBE = {
    "env_id": "toy",
    "num_envs": 64,
    "num_steps": 16,
    "num_minibatches": 2,
    "hidden_size": 16,
    "actor_lr": 0.01,
    "critic_lr": 0.01,
    "num_evals": 1,
    "eval_episodes": 2,
}


def test_a_cue_is_passed_on_and_remembered(use):
    """The probe of ippo_rnn; without memory the best return is 2."""
    use(test_ippo_rnn.Whisper(), never)
    after, _ = train(mappo.Config(**test_ippo_rnn.PROBE))
    assert after.eval_return > 2.9
    forgetful, _ = train(mappo.Config(**test_ippo_rnn.PROBE, memory=False))
    assert 1.8 < forgetful.eval_return.item() < 2.2


@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_a_value_that_needs_what_others_see(use, scale):
    """In mappo the critic explains it, at any scale of the reward; in ippo_rnn it cannot."""
    use(Pair(scale), never)
    _, metrics = train(mappo.Config(**PROBE, total_timesteps=30_720))
    assert metrics["value/explained_variance"][0, -1] > 0.95
    if scale == 1:
        _, metrics = train(ippo_rnn.Config(**PROBE, total_timesteps=30_720), ippo_rnn)
        assert metrics["value/explained_variance"][0, -1] < 0.1
