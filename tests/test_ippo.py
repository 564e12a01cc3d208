"""Many agents: what each learns from, what is masked, when it ends, and what a run writes of it."""

import csv
import dataclasses
import importlib.util
import itertools
import json
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import distrax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from gymnax.environments import spaces
from probes import start, to_numpy

import ippo
import ppo_ff

needs_jaxmarl = pytest.mark.skipif(
    importlib.util.find_spec("jaxmarl") is None, reason="pip install '.[marl]'"
)
SMALL = {
    "env_id": "toy",
    "total_timesteps": 128,
    "num_envs": 4,
    "num_steps": 8,
    "actor_epochs": 2,
    "critic_epochs": 2,
    "num_minibatches": 2,
    "hidden_size": 4,
    "num_calls": 4,
    "checkpoint_every": 1,
    "num_evals": 2,
    "eval_episodes": 3,
}


def small(**changes):
    return ippo.Config(**{**SMALL, **changes})


# ------------------------------------------------------------------------------------ environments
class Toy:
    """Agents that walk on numbers of their own, for five steps at most; nothing is random.

    Agent k starts at 0.1 k and sees its place and the time. Action 1 adds 0.3, others subtract 0.2;
    the reward is minus the distance to 0.5, times `scale[k]`. Beyond 1 the agent's part is over, or
    the whole episode if `all_at_once`. `limit` is the clock's.
    """

    class State(NamedTuple):
        place: jax.Array  # [K]
        time: jax.Array
        seen: jax.Array  # steps so far, which is no clock by name

    def __init__(self, num_agents=3, order=None, scale=None, all_at_once=False, limit=5, haze=0.0):
        self.order = order or list(range(num_agents))  # place in `agents` of agent k
        self.agents = [f"agent_{k}" for k in self.order]
        self.scale = scale or {}
        self.all_at_once, self.limit, self.haze = all_at_once, limit, haze

    def action_space(self, name):
        return spaces.Discrete(3)

    def see(self, state):
        # Haze hides those who left, and only those.
        hidden = self.haze * (state.place > 1)
        place = jnp.stack([state.place + hidden, jnp.sin(state.seen + 0.0 * state.place)], axis=1)
        return {name: place[i] for i, name in enumerate(self.agents)}

    def reset(self, key):
        state = self.State(0.1 * jnp.array(self.order), jnp.int32(0), jnp.int32(0))
        return self.see(state), state

    def step_env(self, key, state, actions):
        action = jnp.stack([actions[name] for name in self.agents])
        gone = state.place > 1
        move = jnp.where(action == 1, 0.3, -0.2) * ~gone
        state = self.State(state.place + move, state.time + 1, state.seen + 1)
        reward = -jnp.abs(state.place - 0.5) + self.haze * gone
        late = state.time >= self.limit
        done = {name: (state.place[i] > 1) | late for i, name in enumerate(self.agents)}
        over = (state.place > 1).any() if self.all_at_once else (state.place > 1).all()
        rewards = {n: self.scale.get(n, 1.0) * reward[i] for i, n in enumerate(self.agents)}
        return self.see(state), state, rewards, {**done, "__all__": over | late}, {}


class Forbidden(Toy):
    """Only the action (time + k) mod 3 + 1 and action 0 are allowed; each other one costs 1."""

    def legal(self, state):
        right = (state.time + jnp.array(self.order)) % 2 + 1  # [K]
        return (jnp.arange(3) == 0) | (jnp.arange(3) == right[:, None])

    def get_avail_actions(self, state):
        return {name: self.legal(state)[i].astype(jnp.uint8) for i, name in enumerate(self.agents)}

    def step_env(self, key, state, actions):
        action = jnp.stack([actions[name] for name in self.agents])
        allowed = self.legal(state)[jnp.arange(len(action)), action]
        obs, state, rewards, done, info = super().step_env(key, state, actions)
        rewards = {name: -1.0 * ~allowed[i] for i, name in enumerate(self.agents)}
        return obs, state, rewards, done, info


class Aim:
    """One step of two agents with 1 and 2 continuous actions; the best are 2.5, and -1 and 3."""

    agents = ["one", "two"]

    class State(NamedTuple):
        step: jax.Array

    def action_space(self, name):
        return spaces.Box(-2.0, 4.0, (1 if name == "one" else 2,))

    def see(self):
        return {"one": jnp.ones(1), "two": jnp.zeros(3)}

    def reset(self, key):
        return self.see(), self.State(jnp.int32(0))

    def step_env(self, key, state, actions):
        best = {"one": jnp.array([2.5]), "two": jnp.array([-1.0, 3.0])}
        assert {name: x.shape for name, x in actions.items()} == {"one": (1,), "two": (2,)}
        rewards = {name: -((actions[name] - best[name]) ** 2).sum() for name in self.agents}
        done = dict.fromkeys([*self.agents, "__all__"], jnp.bool(True))
        return self.see(), self.State(state.step + 1), rewards, done, {}


@pytest.fixture
def use(monkeypatch):
    """use(env) makes it the environment of every env_id."""
    return lambda env: monkeypatch.setattr(ippo, "load_env", lambda env_id: env)


def train(config, change=lambda state: state, num_updates=None, seed=0):
    """Returns the state before and after, and metrics [updates, S], without the devices' axis."""
    state, program = start(ippo, config, num_updates, seed)
    state = change(state)
    before = to_numpy(state)
    after, metrics = to_numpy(program(state))
    first = lambda tree: jax.tree.map(lambda x: x[0], tree)
    return first(before), first(after), first(metrics)


def assert_same(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, to_numpy(actual), to_numpy(expected))


def assert_close(actual, expected, **tolerance):
    close = lambda x, y: np.testing.assert_allclose(x, y, **tolerance)
    jax.tree.map(close, to_numpy(actual), to_numpy(expected))


def differ(actual, expected):
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    return any((np.asarray(x) != np.asarray(y)).any() for x, y in pairs)


# ------------------------------------------------------------------------------------ one agent
def random_batch(size=16):
    rng = np.random.default_rng(0)
    obs, logits = rng.normal(size=(size, 2)), rng.normal(size=(size, 3))
    action = jnp.array(rng.integers(3, size=size))
    log_prob = jnp.array(rng.normal(-1.1, 0.4, size=size), jnp.float32)
    value, advantage, target = jnp.array(rng.normal(size=(3, size)), jnp.float32)
    return jnp.float32(obs), jnp.float32(logits), action, log_prob, value, advantage, target


@pytest.mark.parametrize("clip_value", [False, True])
def test_losses_and_gradients_are_those_of_ppo_ff(clip_value):
    """Bit for bit, for outputs that are free parameters, so that the loss alone is compared."""
    obs, logits, action, log_prob, value, advantage, target = random_batch()
    config = small(clip_value=clip_value, clip_eps=0.25, ent_coef=0.125)
    plain = ppo_ff.Config(clip_value=clip_value, clip_eps=0.25, ent_coef=0.125, vf_coef=1.0)
    hyper = ippo.Hyper(*[jnp.float32(getattr(config, name)) for name in ippo.Hyper._fields])
    fields = {"action": action, "log_prob": log_prob, "value": value}
    old = ppo_ff.Transition(**{**dict.fromkeys(ppo_ff.Transition._fields), **fields, "obs": obs})
    seen = ippo.Observation(obs, jnp.ones((16, 3), bool), jnp.ones(16, bool))
    new = ippo.Transition(**{**dict.fromkeys(ippo.Transition._fields), **fields, "obs": seen})
    params = {"logits": logits, "value": 0.5 * value}
    both = lambda params, _: (distrax.Categorical(params["logits"]), params["value"])
    expected, measured = jax.grad(ppo_ff.ppo_loss, has_aux=True)(
        params, both, old, advantage, target, plain
    )
    actual, metrics = jax.grad(ippo.ppo_loss, has_aux=True)(
        params, both, new, advantage, target, jnp.ones(16), config, hyper
    )
    assert_same(actual, expected)
    assert np.abs(expected["logits"]).max() > 0.01 and np.abs(expected["value"]).max() > 0.01
    assert {*metrics} == {*measured}
    for name, x in metrics.items():
        np.testing.assert_array_equal(x, measured[name], err_msg=name)


def plain_env(env):
    """A make_env for ppo_ff of a Toy with one agent."""

    def reset(key):
        obs, env_state = env.reset(key)
        return obs["agent_0"], env_state

    def step(key, env_state, action):
        obs, env_state, reward, done, _ = env.step_env(key, env_state, {"agent_0": action})
        terminated, truncated = env_state.place[0] > 1, env_state.time >= env.limit
        choose = lambda new, old: jnp.where(done["__all__"], new, old)
        fresh = jax.tree.map(choose, reset(key), (obs["agent_0"], env_state))
        return *fresh, reward["agent_0"], terminated, truncated & ~terminated, obs["agent_0"]

    return lambda config: (jax.vmap(reset), jax.vmap(step), 3)


def test_training_one_agent_is_ppo_ff(use, monkeypatch):
    """Three updates of several epochs and minibatches, time limits and terminations included."""
    env = Toy(num_agents=1)
    use(env)
    monkeypatch.setattr(ppo_ff, "make_env", plain_env(env))
    same = {"num_envs": 4, "num_steps": 16, "num_minibatches": 4, "hidden_size": 8}
    same |= {"gamma": 0.5, "gae_lambda": 0.75, "clip_eps": 0.25, "max_grad_norm": 1e9}
    same |= {"total_timesteps": 192, "clip_value": True, "env_id": "toy"}
    each = {"actor_epochs": 4, "critic_epochs": 4, "actor_lr": 0.01, "critic_lr": 0.01}
    config = ippo.Config(**same, **each, share_parameters=False)
    plain = ppo_ff.Config(**same, lr=0.01, vf_coef=1.0, network="mlp", update_epochs=4)
    state, program = start(ippo, config)
    # [D, S, G] of each, in the names of ppo_ff's one network, where the heads are made first.
    names = {"actor": (1, 2, 0), "critic": (4, 5, 3)}

    def merge(params):
        layers = {
            f"Dense_{number}": params[part][f"Dense_{i}"]
            for part, numbers in names.items()
            for i, number in enumerate(numbers)
        }
        return {"params": jax.tree.map(lambda x: x[:, :, 0], layers)}

    plain_state, plain_program = start(ppo_ff, plain)
    plain_state = plain_state._replace(
        params=jax.tree.map(jnp.copy, merge(state.params)), key=jnp.copy(state.key)
    )
    assert plain_state.obs.shape == (1, 1, 4, 2) and state.obs.view.shape == (1, 1, 1, 4, 2)
    after, metrics = program(state)
    plain_after, plain_metrics = plain_program(plain_state)
    assert_close(merge(after.params), plain_after.params, rtol=2e-5, atol=1e-7)
    np.testing.assert_array_equal(after.key, plain_after.key)
    assert metrics["agent/agent_0/terminated"].max() > 0
    assert metrics["agent/agent_0/truncated"].max() > 0
    assert metrics["policy/clip_fraction"].max() > 0
    for name in plain_metrics:
        np.testing.assert_allclose(
            metrics[name], plain_metrics[name], rtol=1e-4, atol=2e-6, err_msg=name
        )


# ------------------------------------------------------------------------------------ permutation
class Hashed(distrax.Categorical):
    """Chooses by the digits of its logits: pseudo-random, but the same in every order of agents."""

    def sample_and_log_prob(self, seed):
        digits = self.logits * 1e3 % 1.0
        action = jnp.argmax(digits, axis=-1)
        return action, self.log_prob(action)


@pytest.mark.parametrize("share", [False, True])
def test_permuting_the_agents_permutes_the_results(use, monkeypatch, share):
    monkeypatch.setattr(ippo, "make_policy", lambda outputs, mask: Hashed(outputs))
    config = small(share_parameters=share, num_minibatches=1, actor_lr=0.01, total_timesteps=64)
    order = [2, 0, 1]

    def permute(params):
        """Of [D, S, G, ...]: the networks, or the inputs of the first layer that name the agent."""
        if not share:
            return jax.tree.map(lambda x: x[:, :, jnp.array(order)], params)
        rows = jnp.array([0, 1] + [2 + i for i in order])
        pick = lambda x: x[:, :, :, rows] if x.shape[-2:] == (5, config.hidden_size) else x
        return jax.tree.map(pick, params)

    use(Toy(3))
    state, program = start(ippo, config)
    params = jax.tree.map(lambda x: 2.0 * x, state.params)
    initial = jax.tree.map(jnp.copy, permute(params))
    after, metrics = program(state._replace(params=params))
    use(Toy(3, order))
    state, program = start(ippo, config)
    permuted, permuted_metrics = program(state._replace(params=initial))
    assert_close(permuted.params, permute(after.params), rtol=1e-4, atol=1e-5)
    assert differ(permuted.params, after.params)
    assert {*metrics} == {*permuted_metrics}
    for name in metrics:
        np.testing.assert_allclose(metrics[name], permuted_metrics[name], rtol=1e-4, atol=1e-5)
    returns = {float(metrics[f"agent/agent_{k}/total"][0, 0, 0]) for k in range(3)}
    assert len(returns) == 3  # the agents do differ


# ------------------------------------------------------------------------------------ masks
LOGITS = jnp.array([[1.0, -2.0, 0.5, 3.0], [0.0, 0.0, 9.0, -2.0], [2.0, 1.0, 0.0, -1.0]])
MASK = jnp.array([[1, 1, 1, 0], [1, 0, 0, 1], [0, 1, 0, 0]], bool)


def test_a_masked_action_is_never_sampled():
    policy = ippo.make_policy(LOGITS, MASK)
    keys = jax.random.split(jax.random.key(0), 5000)
    actions = np.array(jax.vmap(lambda key: policy.sample(seed=key))(keys))  # [5000, 3]
    for row, mask in enumerate(np.array(MASK)):
        assert set(np.unique(actions[:, row])) == set(np.flatnonzero(mask))
    assert MASK[jnp.arange(3), policy.mode()].all()


def test_entropy_and_log_prob_are_those_of_the_allowed_actions_alone():
    policy = ippo.make_policy(LOGITS, MASK)
    for row, mask in enumerate(np.array(MASK)):
        allowed = np.exp(np.float64(LOGITS[row][mask]))
        allowed /= allowed.sum()
        np.testing.assert_allclose(policy.probs[row][mask], allowed, rtol=1e-5)
        assert (policy.probs[row][~mask] == 0).all()
        entropy = -(allowed * np.log(allowed)).sum()
        np.testing.assert_allclose(policy.entropy()[row], entropy, rtol=1e-5, atol=1e-7)


def masked_gradient(outputs, mask, action, **fields):
    """d ppo_loss / d outputs, entropy bonus included."""
    config, rows = small(ent_coef=0.5), len(mask)
    hyper = ippo.Hyper(*[jnp.float32(getattr(config, name)) for name in ippo.Hyper._fields])
    seen = ippo.Observation(jnp.zeros((rows, 1)), mask, jnp.ones(rows, bool))
    log_prob = ippo.make_policy(outputs, mask).log_prob(action) + 0.01
    batch = ippo.Transition(seen, action, log_prob, *[None] * 5)
    grad = jax.grad(ippo.ppo_loss, has_aux=True)
    advantage, zeros = jnp.array([1.0, -1.0, 2.0])[:rows], jnp.zeros(rows)
    apply_fn = lambda outputs, obs: (ippo.make_policy(outputs, obs.mask), zeros)
    lessons = (batch, advantage, zeros, jnp.ones(rows))
    return grad(outputs, apply_fn, *lessons, config, hyper)[0]


def test_a_masked_action_gets_no_gradient():
    grads = np.array(masked_gradient(LOGITS, MASK, jnp.array([1, 3, 1])))
    assert (grads[~np.array(MASK)] == 0).all()
    assert (grads[:2][np.array(MASK)[:2]] != 0).all()
    # Where one action is left, there is nothing to learn.
    np.testing.assert_allclose(grads[2], 0, atol=1e-7)


def test_a_component_that_does_not_exist_counts_for_nothing():
    rng = np.random.default_rng(0)
    mean, log_std, action = jnp.array(rng.normal(size=(3, 3, 4)), jnp.float32)
    policy = ippo.make_policy((mean, log_std), MASK)
    for row, mask in enumerate(np.array(MASK)):
        normal = distrax.MultivariateNormalDiag(mean[row][mask], jnp.exp(log_std[row][mask]))
        np.testing.assert_allclose(
            policy.log_prob(action)[row], normal.log_prob(action[row][mask]), rtol=1e-5
        )
        np.testing.assert_allclose(policy.entropy()[row], normal.entropy(), rtol=1e-5)
    for grads in masked_gradient((mean, log_std), MASK, action):
        assert (np.array(grads)[~np.array(MASK)] == 0).all()
        assert (np.array(grads)[np.array(MASK)] != 0).all()


@pytest.mark.parametrize("share", [False, True])
def test_no_agent_ever_does_what_is_forbidden(use, share):
    """Its reward is 0 for what is allowed and -1 for the rest."""
    use(Forbidden(3))
    config = small(share_parameters=share, num_envs=16, total_timesteps=1280)
    _, after, metrics = train(config)
    returns = np.stack([metrics[f"agent/agent_{k}/total"] for k in range(3)])
    assert np.isfinite(returns).any() and np.nanmin(returns) == 0
    evaluate = jax.jit(ippo.make_evaluate(config))
    params = jax.tree.map(lambda x: x[0], after.params)
    assert (np.array(evaluate(params, jax.random.key(1))) == 0).all()
    np.testing.assert_array_less(metrics["policy/entropy"], np.log(2) + 1e-6)


# ------------------------------------------------------------------------------------ leaks
@pytest.fixture
def advantages(monkeypatch):
    """A list of the advantages [T, R] of every network and update, filled while training."""
    kept, compute_gae = [], ippo.compute_gae

    def record(*args):
        result = compute_gae(*args)
        jax.debug.callback(lambda x: kept.append(np.array(x)), result[0])
        return result

    monkeypatch.setattr(ippo, "compute_gae", record)
    return kept


def test_one_agents_reward_does_not_leak_into_anothers_advantage(use, advantages):
    config = small(num_envs=4, num_steps=8)
    for scale in (3.0, 7.0):  # not 1, which XLA would leave out: another program, other bits
        use(Toy(3, scale={"agent_0": scale}))
        train(config, num_updates=1)
        jax.effects_barrier()
    plain, scaled = (x.reshape(8, 3, 4) for x in advantages)  # [T, K, N]
    np.testing.assert_array_equal(plain[:, 1:], scaled[:, 1:])
    assert (plain[:, 0] != scaled[:, 0]).all()


def test_one_agents_reward_does_not_leak_into_anothers_network(use):
    config = small(share_parameters=False, total_timesteps=128)
    params = []
    for scale in (3.0, 7.0):  # not 1, which XLA would leave out: another program, other bits
        use(Toy(3, scale={"agent_0": scale}))
        _, after, _ = train(config)
        params.append(after.params)
    of_agent = lambda k: [jax.tree.map(lambda x: x[0, k], p) for p in params]
    assert_same(*of_agent(1))
    assert_same(*of_agent(2))
    assert differ(*of_agent(0))


# ------------------------------------------------------------------------------------ ends
def walk(env, actions, **changes):
    """Fields of every step of one environment, [T, K], for actions [T, K]."""
    reset, step, agents = ippo.make_env(small(**changes))
    keys = jax.random.split(jax.random.key(0), 1)
    obs, env_state = reset(keys)
    steps, shape = [], obs.active.shape
    for action in actions:
        active = obs.active
        obs, env_state, *outcome = step(keys, env_state, jnp.array(action).reshape(shape))
        reward, terminated, truncated, final_obs = outcome
        steps.append((active, reward, terminated, truncated, final_obs.view, obs.view))
    by_agent = lambda *x: np.stack(x).reshape(len(actions), len(agents.names), *x[0].shape[2:])
    return jax.tree.map(by_agent, *steps)


@pytest.mark.parametrize("share", [False, True])
def test_agents_end_one_by_one(use, share):
    """Agent 2 leaves in step 3, agent 1 in step 5 with the time limit, which cuts agent 0."""
    use(Toy(3))
    actions = [[0, 1, 1], [0, 1, 1], [0, 1, 1], [0, 0, 0], [0, 1, 0], [1, 1, 1]]
    active, reward, terminated, truncated, final, view = walk(None, actions, share_parameters=share)
    T, F = True, False
    assert active.tolist() == [[T, T, T]] * 3 + [[T, T, F]] * 2 + [[T, T, T]]
    assert terminated.tolist() == [[F] * 3] * 2 + [[F, F, T], [F] * 3, [F, T, F], [F] * 3]
    assert truncated.tolist() == [[F] * 3] * 4 + [[T, F, F], [F] * 3]
    # Places by hand: agent 2 stays at 1.1, agent 1 goes up to 1, back to 0.8 and ends at 1.1.
    np.testing.assert_allclose(reward[:, 2], [0, -0.3, -0.6, 0, 0, 0], atol=1e-6)
    np.testing.assert_allclose(final[4, :, 0], [-1.0, 1.1, 1.1], atol=1e-6)
    np.testing.assert_allclose(view[4, :, 0], [0, 0.1, 0.2], atol=1e-6)
    np.testing.assert_array_equal(final[:4, :, 0], view[:4, :, 0])


def test_a_time_limit_that_is_a_termination_as_well_terminates(use):
    use(Toy(1, limit=4))
    _, _, terminated, truncated, _, _ = walk(None, [[1]] * 4)
    assert terminated[:, 0].tolist() == [False] * 3 + [True] and not truncated.any()


def test_an_end_of_all_ends_each(use):
    use(Toy(3, all_at_once=True))
    _, _, terminated, truncated, _, _ = walk(None, [[0, 0, 1]] * 3)
    assert terminated.tolist() == [[False] * 3] * 2 + [[True] * 3] and not truncated.any()


def test_the_bootstrap_of_a_cut_agent_is_the_value_of_its_final_observation(use, monkeypatch):
    use(Toy(3))
    records, compute_gae = [], ippo.compute_gae

    def record(*args):
        store = lambda *arrays: records.append([np.array(x) for x in arrays])
        jax.debug.callback(store, *args[:5])
        return compute_gae(*args)

    monkeypatch.setattr(ippo, "compute_gae", record)
    config = small(num_envs=32, num_steps=12, total_timesteps=384)
    state, program = start(ippo, config)
    params = jax.tree.map(lambda x: 2.0 * x, state.params)  # so that values are far apart
    network = ippo.ActorCritic(ippo.make_env(config)[-1], config)
    weights = {"params": jax.tree.map(lambda x: np.array(x)[0, 0, 0], params)}
    program(state._replace(params=params))
    jax.effects_barrier()
    (record,) = records
    reward, value, next_value, terminated, done = (x.reshape(12, -1) for x in record)  # [T, R]
    cut = done & ~terminated
    assert cut.any() and terminated.any()
    mask, active = jnp.ones((1, 3), bool), jnp.ones(1, bool)
    seen = lambda view: ippo.Observation(jnp.array(view)[None], mask, active)
    value_of = lambda view: network.apply(weights, seen(view))[1][0]
    for t, row in np.argwhere(cut):
        k = row // 32
        distance = -reward[t, row]
        candidates = [0.5 + distance, 0.5 - distance]  # the place, from the reward
        ids = np.eye(3)[k]
        found = [value_of([place, np.sin(5.0), *ids]) for place in candidates]
        assert np.abs(np.array(found) - next_value[t, row]).min() < 1e-5
        first = value_of([0.1 * k, 0.0, *ids])  # what an automatic reset would have shown
        assert abs(first - next_value[t, row]) > 1e-4
    inside = ~done[:-1]
    np.testing.assert_array_equal(next_value[:-1][inside], value[1:][inside])


@pytest.mark.parametrize("share", [False, True])
def test_nothing_is_learned_from_an_agent_that_has_left(use, share, full_optimization):
    """What it sees and is paid after its end changes no bit of any network."""
    config = small(share_parameters=share, num_envs=8, total_timesteps=256, actor_lr=0.01)
    always = lambda state: state  # the initial policy leaves often enough
    results = []
    for haze in (0.0, 3.0):
        use(Toy(3, haze=haze))
        _, after, metrics = train(config, always)
        results.append(after.params)
        assert metrics["agent/agent_2/terminated"].max() > 0
    # The critic sees the final observation itself: only where it is not asked is it the same.
    assert_same(*results)


# ------------------------------------------------------------------------------------ spaces
def test_sizes_that_differ_are_padded(use):
    use(ippo.Rings())
    reset, step, agents = ippo.make_env(small(share_parameters=False))
    keys = jax.random.split(jax.random.key(0), 64)
    obs, env_state = reset(keys)
    assert obs.view.shape == (3, 64, 5) and obs.mask.all()
    assert (obs.view.sum(-1) == 1).all()
    for k in range(3):
        assert not obs.view[k, :, 3 + k :].any() and obs.view[k, :, 2 + k].any()
    use(Aim())
    reset, step, agents = ippo.make_env(small(share_parameters=True))
    obs, env_state = reset(keys)
    assert agents == ippo.Agents(("one", "two"), 1, 2, True)
    expected = np.array([[1, 0, 0, 1, 0], [0, 0, 0, 0, 1]])
    np.testing.assert_array_equal(obs.view.reshape(2, 64, 5)[:, 0], expected)
    mask = obs.mask.reshape(2, 64, 2)[:, 0]
    np.testing.assert_array_equal(mask, [[True, False], [True, True]])


class Picture(Toy):
    """The same walk, seen in a picture of 3 x 4 pixels with 2 planes."""

    def see(self, state):
        pixels = lambda x: jnp.zeros((3, 4, 2)).at[1, 2].set(x)
        return {name: pixels(x) for name, x in super().see(state).items()}


@pytest.mark.parametrize("share", [False, True])
def test_a_picture_stays_one_and_every_pixel_names_the_agent(use, share):
    use(Picture(3))
    keys = jax.random.split(jax.random.key(0), 6)
    obs, _ = ippo.make_env(small(share_parameters=share))[0](keys)
    assert obs.view.shape == ((1, 18, 3, 4, 5) if share else (3, 6, 3, 4, 2))
    view = np.array(obs.view).reshape(3, 6, 3, 4, -1)
    for k in range(3):
        np.testing.assert_allclose(view[k, :, 1, 2, 0], 0.1 * k)
        np.testing.assert_array_equal(
            view[k, ..., 2:], np.eye(3)[k][: view.shape[-1] - 2] + 0 * view[k, ..., 2:]
        )
    assert view[..., :2].sum() == pytest.approx(6 * 0.3)
    flat, _ = ippo.make_env(small(share_parameters=share, network="mlp"))[0](keys)
    assert flat.view.shape == ((1, 18, 27) if share else (3, 6, 24))


@pytest.mark.parametrize("share", [False, True])
def test_a_picture_trains_a_convolution_and_then_a_dense_network(use, share):
    use(Picture(3))
    shapes = {}
    for network in ("auto", "cnn", "mlp"):
        before, after, _ = train(small(share_parameters=share, network=network), num_updates=1)
        assert differ(before.params["actor"], after.params["actor"])
        assert differ(before.params["critic"], after.params["critic"])
        layers = before.params["critic"]
        shapes[network] = {n: x["kernel"].shape[2:] for n, x in layers.items() if "kernel" in x}
    planes = 5 if share else 2
    assert shapes["auto"] == shapes["cnn"]
    # 3 x 3 patches of the planes, 16 features at each of 1 x 2 places, the value.
    expected = {"Dense_0": (9 * planes, 16), "Dense_1": (32, 4), "Dense_2": (4, 1)}
    assert shapes["cnn"] == expected
    assert shapes["mlp"]["Dense_0"] == (27 if share else 24, 4)


def test_what_is_no_picture_has_no_convolution(toy):
    with pytest.raises(ippo.ConfigError, match="--network mlp"):
        ippo.make_train(small(network="cnn"))


def test_continuous_actions_reach_their_aim(use):
    use(Aim())
    config = small(num_envs=16, num_steps=16, hidden_size=16, total_timesteps=25600, actor_lr=0.01)
    config = dataclasses.replace(config, ent_coef=0.0, eval_greedy=True, critic_lr=0.01)
    _, after, _ = train(config)
    params = jax.tree.map(lambda x: x[0], after.params)
    returns = np.array(ippo.make_evaluate(config)(params, jax.random.key(1)))
    assert (returns > -0.15).all()  # of -14.5 for the initial policy's mode


def test_kinds_of_actions_do_not_mix(use):
    class Mixed(Aim):
        def action_space(self, name):
            return spaces.Discrete(2) if name == "one" else super().action_space(name)

    use(Mixed())
    with pytest.raises(ippo.ConfigError, match="mixes"):
        ippo.make_train(small())


# ------------------------------------------------------------------------------------ rings
def ring_return(size, policy, horizon=8):
    """Mean return from all places of a ring, by hand; policy maps cells ahead to -1, 0 or 1."""
    total = 0.0
    for ahead in range(1, size):
        for _ in range(horizon):
            ahead = (ahead - policy[ahead]) % size
            total += 1.0 if ahead == 0 else -0.2
            if ahead == 0:
                break
    return total / (size - 1)


def best_of_rings(sizes_and_shifts):
    """The best common policy, over actions, for rings where action a is move (a + shift) % 3."""
    returns = []
    for actions in itertools.product(range(3), repeat=4):
        moves = lambda shift, actions=actions: [0, *[(a + shift) % 3 - 1 for a in actions]]
        returns.append(sum(ring_return(size, moves(shift)) for size, shift in sizes_and_shifts))
    return max(returns)


OPTIMUM = sum(best_of_rings([(3 + k, k)]) for k in range(3))


def test_the_optimum_of_rings_is_what_its_docstring_says():
    assert OPTIMUM == pytest.approx(1 + 14 / 15 + 0.9) and "2.833" in ippo.Rings.__doc__


def test_rings_needs_agents_that_tell_their_observations_apart():
    common = best_of_rings([(3 + k, k) for k in range(3)])
    assert common < 0.5 * OPTIMUM


@pytest.mark.parametrize("share", [True, False])
def test_rings_is_learned(share, full_optimization):
    config = ippo.Config(
        env_id="rings", total_timesteps=100_000, num_seeds=3, share_parameters=share
    )
    _, after, _ = train(config)
    evaluate = jax.jit(jax.vmap(ippo.make_evaluate(dataclasses.replace(config, eval_episodes=512))))
    returns = np.array(evaluate(after.params, jax.random.split(jax.random.key(1), 3))).mean(1)
    assert (returns > 0.95 * OPTIMUM).all(), returns


# ------------------------------------------------------------------------------------ options
@pytest.fixture
def toy(use):
    use(Toy(3))


@pytest.mark.parametrize("share, networks", [(True, 1), (False, 3)])
def test_share_parameters_decides_the_number_of_networks(toy, share, networks):
    before, _, _ = train(small(share_parameters=share), num_updates=1)
    kernels = [x for x in jax.tree.leaves(before.params) if x.ndim == 4]
    assert len(kernels) == 6 and all(x.shape[:2] == (1, networks) for x in kernels)
    inputs = {x.shape[2] for x in kernels}
    assert inputs == {4, 5 if share else 2}  # hidden, and the view with or without the agent


@pytest.mark.parametrize("still, moves", [("actor", "critic"), ("critic", "actor")])
def test_actor_and_critic_have_learning_rates_of_their_own(toy, still, moves):
    before, after, _ = train(small(**{f"{still}_lr": 0.0}))
    assert_same(before.params[still], after.params[still])
    assert differ(before.params[moves], after.params[moves])


@pytest.mark.parametrize("part, other", [("actor", "critic"), ("critic", "actor")])
def test_actor_and_critic_have_epochs_of_their_own(toy, part, other):
    """More epochs of one leave the other's first update as it was."""
    _, base, _ = train(small(), num_updates=1)
    _, more, metrics = train(small(**{f"{part}_epochs": 5}), num_updates=1)
    assert metrics[f"{part}/epochs"] == 5 and metrics[f"{other}/epochs"] == 2
    assert differ(base.params[part], more.params[part])
    # Programs with other loops may differ in the last bit; an epoch moves a weight by about 1e-3.
    assert_close(base.params[other], more.params[other], rtol=1e-5, atol=1e-8)
    assert gradient_steps(more, part) == 5 * 2 and gradient_steps(more, other) == 2 * 2


def gradient_steps(state, part):
    return state.opt_state[part][1][0].count[0]  # [G]


def test_target_kl_stops_the_actor_after_the_epoch_that_exceeds_it(toy):
    config = small(actor_epochs=3, actor_lr=0.02)
    kl = []  # mean of each epoch, from runs that end there
    for epochs in (1, 2):
        _, _, metrics = train(dataclasses.replace(config, actor_epochs=epochs), num_updates=1)
        kl.append(float(metrics["policy/approx_kl"][0, 0]))
    assert 0 < kl[0] < kl[1]
    for limit, expected in ((0.0, 1), (0.5 * (kl[0] + kl[1]), 2), (1e9, 3)):
        _, after, metrics = train(dataclasses.replace(config, target_kl=limit), num_updates=1)
        assert metrics["actor/epochs"] == expected and metrics["critic/epochs"] == 2
        assert gradient_steps(after, "actor").tolist() == [2 * expected]
        assert gradient_steps(after, "critic").tolist() == [4]


def test_target_kl_stops_every_network_by_itself(use):
    use(Toy(3, scale={"agent_0": 0.0}))
    config = small(share_parameters=False, actor_epochs=6, actor_lr=0.02, ent_coef=0.0)
    _, after, metrics = train(dataclasses.replace(config, target_kl=0.016), num_updates=1)
    epochs = gradient_steps(after, "actor") // 2
    assert len({*epochs.tolist()}) > 1
    assert metrics["actor/epochs"][0, 0] == pytest.approx(epochs.mean())
    for k, count in enumerate(epochs.tolist()):
        _, plain, _ = train(dataclasses.replace(config, actor_epochs=count), num_updates=1)
        of_agent = lambda state, k=k: jax.tree.map(lambda x: x[0, k], state.params["actor"])
        assert_close(of_agent(after), of_agent(plain), rtol=1e-5, atol=1e-8)


ONE = {"actor_epochs": 1, "critic_epochs": 1, "num_minibatches": 1, "anneal_lr": False}
ONE |= {"max_grad_norm": 1e9, "actor_lr": 0.25, "critic_lr": 0.5, "optimizer": "sgd"}


@pytest.fixture(scope="module")
def sgd_step():
    """Before and after one step, which shows the gradient."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ippo, "load_env", lambda env_id: Toy(3))
        return train(small(**ONE), num_updates=1)[:2]


@pytest.mark.parametrize("name", ["adam", "adamw", "nadam", "rmsprop", "lion"])
def test_an_optimizer_is_that_of_optax(toy, sgd_step, name):
    """The first step of one epoch of one minibatch."""
    before, plain = sgd_step
    _, after, _ = train(small(**{**ONE, "optimizer": name}), num_updates=1)
    for part, lr in (("actor", 0.25), ("critic", 0.5)):
        grads = jax.tree.map(lambda x, y, lr=lr: (x - y) / lr, before.params, plain.params)[part]
        options = {"eps": 1e-5} if name in ("adam", "adamw", "nadam") else {}
        optimizer = getattr(optax, name)(lr, **options)
        params = before.params[part]
        updates, _ = optimizer.update(grads, optimizer.init(params), params)
        expected = optax.apply_updates(params, updates)
        # A gradient that is zero but for rounding may have any sign.
        clear = jax.tree.map(lambda g: np.abs(g) > 1e-5, grads)
        assert np.mean(np.concatenate([x.ravel() for x in jax.tree.leaves(clear)])) > 0.5
        actual = jax.tree.map(np.where, clear, after.params[part], expected)
        assert_close(actual, expected, rtol=1e-2, atol=2e-3)


def test_hyper_parameters_may_differ_between_seeds(toy):
    """Seed 1 of the run with numbers of its own is seed 1 of a run configured with them."""
    numbers = {"actor_lr": 0.02, "critic_lr": 0.005, "gamma": 0.5, "gae_lambda": 0.25}
    numbers |= {"clip_eps": 0.5, "ent_coef": 0.25}
    assert {*numbers} == {*ippo.Hyper._fields}

    def change(state):
        both = {n: jnp.array([[getattr(small(), n), x]], jnp.float32) for n, x in numbers.items()}
        return state._replace(hyper=ippo.Hyper(**both))

    config = small(num_seeds=2)
    _, mixed, _ = train(config, change)
    _, plain, _ = train(config)
    _, other, _ = train(dataclasses.replace(config, **numbers))
    of_seed = lambda tree, seed: jax.tree.map(lambda x: x[seed], tree.params)
    assert_same(of_seed(mixed, 0), of_seed(plain, 0))
    assert_same(of_seed(mixed, 1), of_seed(other, 1))
    assert differ(of_seed(plain, 1), of_seed(other, 1))


def test_every_hyper_parameter_matters(toy):
    init, program = ippo.make_train(small(actor_lr=0.05))
    key = jax.random.split(jax.random.key(0), 1)

    def params(**changes):
        state = init(key)
        changes = {name: 0 * getattr(state.hyper, name) + x for name, x in changes.items()}
        return to_numpy(program(state._replace(hyper=state.hyper._replace(**changes)))[0].params)

    base = params()
    assert_same(base, params())
    assert all(differ(base, params(**{name: 0.03125})) for name in ippo.Hyper._fields)


# ------------------------------------------------------------------------------------ runs
def rows_of(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def command(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["ippo.py", *map(str, words)])
    ippo.cli()


def words(config):
    pairs = {k: v for k, v in dataclasses.asdict(config).items() if k in SMALL}
    return [w for name, value in pairs.items() for w in (f"--{name}", value)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run of two seeds."""
    path = tmp_path_factory.mktemp("ippo") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ippo, "load_env", lambda env_id: Toy(3))
        command(patch, *words(small()), "--num-seeds", 2, "--run-dir", path)
    return path


@pytest.fixture
def run(toy, finished, tmp_path):
    """A copy of it."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def test_a_run_evaluates_at_step_0_and_on_one_key(run):
    rows = rows_of(run / "metrics.csv")
    assert [(r["update"], r["env_steps"]) for r in rows[:2]] == [("0", "0")] * 2
    evaluated = {int(r["update"]) for r in rows if r["eval/return"]}
    assert evaluated == {0, 2, 4}
    # The same policy on the same key: a run whose networks stand still repeats itself.
    summary = json.loads((run / "summary.json").read_text())
    assert summary["script"] == "ippo" and summary["num_seeds"] == 2


def test_a_policy_that_stands_still_is_evaluated_to_the_same_return(toy, monkeypatch, tmp_path):
    still = [*words(small()), "--actor-lr", 0, "--critic-lr", 0, "--run-dir", tmp_path / "run"]
    command(monkeypatch, *still)
    returns = [r["eval/return"] for r in rows_of(tmp_path / "run" / "metrics.csv")]
    returns = [x for x in returns if x]
    assert len(returns) == 3 and len({*returns}) == 1


def test_evaluations_csv_describes_every_agent_and_the_team(run):
    rows = rows_of(run / "evaluations.csv")
    fields = ["return", "length", "terminated", "truncated", "final_reward"]
    names = ["agent_0", "agent_1", "agent_2", "team"]
    found = [(int(r["update"]), r["metric"], int(r["seed"]), r["agent"]) for r in rows]
    assert found == list(itertools.product((0, 2, 4), fields, (0, 1), names))
    returns = {
        r["update"] + r["seed"]: r["mean"]
        for r in rows
        if r["agent"] == "team" and r["metric"] == "return"
    }
    for row in rows_of(run / "metrics.csv"):
        if row["eval/return"]:
            expected = float(returns[row["update"] + row["seed"]])
            assert float(row["eval/return"]) == pytest.approx(expected, rel=1e-5)


def test_the_summary_of_a_metric(tmp_path, use):
    use(Toy(2))
    rng = np.random.default_rng(0)
    total = rng.normal(size=(1, 9, 2))  # [S, episodes, K]
    total[0, 3, 1] = np.nan
    zeros = np.zeros((1, 9, 2))
    episodes = ippo.Episode(total, zeros + [3, 5], zeros + [1, 0], zeros + [0, 1], zeros + 2)
    returned = ippo.write_evaluation(tmp_path, small(), 7, episodes)
    assert np.isnan(returned).all()
    rows = {(r["agent"], r["metric"]): r for r in rows_of(tmp_path / "evaluations.csv")}
    finite = np.delete(total[0, :, 1], 3)
    row = rows["agent_1", "return"]
    assert row["nan_count"] == "1" and row["update"] == "7"
    expected = {"mean": np.mean, "std": np.std, "min": np.min, "max": np.max, "median": np.median}
    for name, of in expected.items():
        assert float(row[name]) == pytest.approx(of(finite), rel=1e-5), name
    quartiles = np.percentile(finite, [25, 75])
    assert [float(row["q25"]), float(row["q75"])] == pytest.approx(quartiles, rel=1e-5)
    of_team = {m: float(rows["team", m]["mean"]) for _, m in rows}
    assert of_team["length"] == 5 and of_team["final_reward"] == 4
    assert of_team["terminated"] == 0 and of_team["truncated"] == 1


@pytest.mark.parametrize("metric", ["team", "worst", "agent_1"])
def test_best_metric_is_what_evaluation_returns(toy, metric):
    config = small(best_metric=metric)
    before, _, _ = train(config, num_updates=1)
    params, key = jax.tree.map(lambda x: x[0], before.params), jax.random.key(3)
    total = np.array(ippo.make_play(config)(params, key).total)  # [episodes, K]
    assert total.shape == (3, 3) and len(np.unique(total[0])) == 3
    expected = {"team": total.sum(1), "worst": total.min(1), "agent_1": total[:, 1]}[metric]
    returns = np.array(ippo.make_evaluate(config)(params, key))
    np.testing.assert_allclose(returns, expected, rtol=1e-6)


def test_an_unknown_best_metric(toy):
    with pytest.raises(ippo.ConfigError, match="agent_7.*team, worst, agent_0, agent_1, agent_2"):
        ippo.make_train(small(best_metric="agent_7"))


def test_a_finished_run_goes_on_with_a_larger_budget(run, monkeypatch):
    before = rows_of(run / "metrics.csv")
    sizes = ["--num-envs", 4, "--num-steps", 8]  # as before: the defaults are larger than this
    words = ["--resume", run, *sizes, "--total-timesteps", 32 * 7]
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(ippo, "make_train", lambda *_: 1 / 0)
        command(patch, *words)
    assert not (run / "summary.json").exists()  # of the smaller budget
    command(monkeypatch, *words)
    after = rows_of(run / "metrics.csv")
    assert after[: len(before)] == before
    assert [int(r["update"]) for r in after[::2]] == list(range(8))
    assert json.loads((run / "summary.json").read_text())["env_steps"] == 32 * 7
    updates = [int(r["update"]) for r in rows_of(run / "evaluations.csv")]
    assert sorted({*updates})[:3] == [0, 2, 4] and max(updates) == 7
    assert updates == sorted(updates)

    (run / "summary.json").unlink()  # as if killed behind the last checkpoint
    command(monkeypatch, *words)
    assert rows_of(run / "metrics.csv") == after
    assert [int(r["update"]) for r in rows_of(run / "evaluations.csv")] == updates
    assert json.loads((run / "summary.json").read_text())["env_steps"] == 32 * 7


def test_a_smaller_budget_does_not_undo_a_run(run, monkeypatch, capsys):
    with pytest.raises(SystemExit) as stop:
        sizes = ["--num-envs", 4, "--num-steps", 8]
        command(monkeypatch, "--resume", run, *sizes, "--total-timesteps", 64)
    assert stop.value.code == 2 and "raise total_timesteps" in capsys.readouterr().err


# ------------------------------------------------------------------------------------ JaxMARL
def test_without_jaxmarl_the_default_is_rings_and_others_name_the_extra(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert ippo.resolve(ippo.Config()).env_id == "rings"
    for name in [name for name in sys.modules if name.split(".")[0] == "jaxmarl"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "jaxmarl", None)
    with pytest.raises(ippo.ConfigError, match=r"pip install '.\[marl\]'"):
        ippo.make_train(ippo.Config(env_id="MPE_simple_spread_v3"))


@needs_jaxmarl
def test_with_jaxmarl_the_default_is_simple_spread():
    assert ippo.resolve(ippo.Config()).env_id == "MPE_simple_spread_v3"


@needs_jaxmarl
def test_an_unknown_environment_of_jaxmarl():
    with pytest.raises(ippo.ConfigError, match="nearest are.* MPE_simple_spread_v3"):
        ippo.make_train(ippo.Config(env_id="MPE_simple_spread_v4"))


def follow(env_id, choose, steps):
    """Rewards, ends and observations [T, ...] of one environment; choose(obs, t) -> action."""
    reset, step, agents = ippo.make_env(small(env_id=env_id, share_parameters=False))
    step, keys = jax.jit(step), jax.random.split(jax.random.key(0), 1)
    obs, env_state = reset(keys)
    seen = []
    for t in range(steps):
        before = env_state
        obs, env_state, *outcome = step(keys, env_state, choose(obs, t))
        seen.append((before, obs, *outcome))
    return agents, seen


@needs_jaxmarl
@pytest.mark.parametrize("env_id, nearest", [("overcooked/ring", "coord_ring"), ("SMAX/3m", "/3m")])
def test_an_unknown_map_of_jaxmarl(env_id, nearest):
    with pytest.raises(ippo.ConfigError, match=f"nearest are.*{nearest}"):
        ippo.load_env(env_id)


@needs_jaxmarl
def test_a_map_of_jaxmarl_is_named_behind_its_environment():
    assert len(ippo.load_env("HeuristicEnemySMAX/3m").agents) == 3
    assert len(ippo.load_env("HeuristicEnemySMAX/8m").agents) == 8
    assert ippo.load_env("overcooked/coord_ring").obs_shape == (5, 5, 26)
    assert ippo.load_env("overcooked").obs_shape == (5, 4, 26)


@needs_jaxmarl
def test_the_time_limit_of_simple_spread_is_no_death():
    import jaxmarl

    stay = lambda obs, t: jnp.full((3, 1), t % 5)
    agents, seen = follow("MPE_simple_spread_v3", stay, 30)
    ends = np.array([truncated for *_, truncated, _ in seen])  # [T, G, R]
    (last,) = {int(t) for t, *_ in np.argwhere(ends)}
    assert ends[last].all() and not any(terminated.any() for *_, terminated, _, _ in seen)
    before, obs, *_, final_obs = seen[last]
    env = jaxmarl.make("MPE_simple_spread_v3")
    state = jax.tree.map(lambda x: x[0], before[0])
    actions = {name: jnp.int32(last % 5) for name in agents.names}
    expected, _, _, done, _ = env.step_env(jax.random.key(0), state, actions)
    assert done["__all__"]
    for k, name in enumerate(agents.names):
        np.testing.assert_allclose(final_obs.view[k, 0], expected[name], rtol=1e-5)
    assert differ(final_obs.view, obs.view)


@needs_jaxmarl
@pytest.mark.parametrize("kind", ["terminated", "truncated"])
def test_a_riddle_ends_by_telling_or_by_the_clock(kind):
    """In switch_riddle, telling ends the episode for good, its step limit only cuts it."""
    import jaxmarl

    tell = jaxmarl.make("switch_riddle").game_actions["TELL"]
    choice, steps = (tell, 1) if kind == "terminated" else ((tell + 1) % 3, 6)
    _, seen = follow("switch_riddle", lambda obs, t: jnp.full((3, 1), choice), steps)
    ends = {"terminated": [x[3] for x in seen], "truncated": [x[4] for x in seen]}
    assert ends.pop(kind)[-1].all()
    (other,) = ends.values()
    assert not np.any(other)


@needs_jaxmarl
@pytest.mark.parametrize(
    "env_id, share",
    [
        ("MPE_simple_tag_v3", False),  # two teams, observations of 16 and 14
        ("MPE_simple_speaker_listener_v4", True),  # 3 and 5 actions, observations of 3 and 11
        ("MPE_simple_facmac_v1", True),  # continuous
        ("coin_game", True),  # integers
    ],
)
def test_environments_of_jaxmarl_train(env_id, share):
    config = small(env_id=env_id, share_parameters=share, num_envs=2, num_steps=32)
    _, after, metrics = train(config)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(after.params))
    assert np.isfinite(metrics["loss/total"]).all()
