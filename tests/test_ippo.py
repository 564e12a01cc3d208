"""Many agents: what each learns from, masks, ends of episodes, and the rows of a run."""

import importlib.util
import inspect
import itertools
import json
import sys
import types
from typing import Any, NamedTuple

import chex
import distrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnax.environments import spaces
from probes import start, to_numpy
from test_cli import compiling_once, flags, learned, read_rows, run, run_killed

import ippo
import ppo_ff

needs_jaxmarl = pytest.mark.skipif(
    importlib.util.find_spec("jaxmarl") is None, reason="pip install '.[marl]'"
)
SMALL = {
    "env_id": "toy",
    "total_timesteps": 64,
    "num_envs": 4,
    "num_steps": 8,
    "num_minibatches": 2,
    "hidden_size": 4,
    "num_evals": 1,
    "eval_episodes": 3,
}


def small(**changes):
    return ippo.Config(**{**SMALL, **changes})


# ----------------------------------- environments
class Toy:
    """Agents that walk on numbers of their own, for five steps at most; nothing is random.

    Agent k starts at 0.1 k and sees its place and the time. Action 1 adds 0.3, others subtract 0.2;
    the reward is minus the distance to 0.5, times `scale[k]`. Beyond 1 the agent's part is over, or
    the whole episode if `all_at_once`. `haze` changes what agents see and earn after their end.
    """

    class State(NamedTuple):
        place: jax.Array  # [K]
        clock: dict
        seen: jax.Array  # steps so far; not the clock

    def __init__(self, num_agents=3, order=None, scale=None, all_at_once=False, limit=5, haze=0.0):
        self.order = order or list(range(num_agents))  # place in `agents` of agent k
        self.agents = [f"agent_{k}" for k in self.order]
        self.scale = scale or {}
        self.all_at_once = all_at_once
        self.limit = limit
        self.haze = haze

    def action_space(self, name):
        return spaces.Discrete(3)

    def see(self, state):
        hidden = self.haze * (state.place > 1)
        place = jnp.stack([state.place + hidden, jnp.sin(state.seen + 0.0 * state.place)], axis=1)
        return {name: place[i] for i, name in enumerate(self.agents)}

    def reset(self, key):
        state = self.State(0.1 * jnp.array(self.order), {"time": jnp.int32(0)}, jnp.int32(0))
        return self.see(state), state

    def step_env(self, key, state, actions):
        action = jnp.stack([actions[name] for name in self.agents])
        gone = state.place > 1
        move = jnp.where(action == 1, 0.3, -0.2) * ~gone
        clock = {"time": state.clock["time"] + 1}
        state = self.State(state.place + move, clock, state.seen + 1)
        reward = -jnp.abs(state.place - 0.5) + self.haze * gone
        late = clock["time"] >= self.limit
        done = {name: (state.place[i] > 1) | late for i, name in enumerate(self.agents)}
        over = (state.place > 1).any() if self.all_at_once else (state.place > 1).all()
        rewards = {n: self.scale.get(n, 1.0) * reward[i] for i, n in enumerate(self.agents)}
        return self.see(state), state, rewards, {**done, "__all__": over | late}, {}


class Forbidden(Toy):
    """Only action 0 and the action (time + k) % 2 + 1 are legal; each other one costs 1."""

    def legal(self, state):
        right = (state.seen + jnp.array(self.order)) % 2 + 1  # [K]
        return (jnp.arange(3) == 0) | (jnp.arange(3) == right[:, None])

    def get_legal_moves(self, state):
        return {name: self.legal(state)[i].astype(jnp.uint8) for i, name in enumerate(self.agents)}

    def step_env(self, key, state, actions):
        action = jnp.stack([actions[name] for name in self.agents])
        allowed = self.legal(state)[jnp.arange(len(action)), action]
        obs, state, rewards, done, info = super().step_env(key, state, actions)
        rewards = {name: -1.0 * ~allowed[i] for i, name in enumerate(self.agents)}
        return obs, state, rewards, done, info


class Picture(Toy):
    """The same walk, seen in a picture of 3 x 4 pixels with 2 planes."""

    def see(self, state):
        return {
            name: jnp.zeros((3, 4, 2)).at[1, 2].set(x) for name, x in super().see(state).items()
        }


class Aim:
    """One step of two agents with 1 and 2 continuous actions; the best are 2.5, and -1 and 3."""

    agents = ["one", "two"]

    def action_space(self, name):
        return spaces.Box(-2.0, 4.0, (1 if name == "one" else 2,))

    def see(self):
        return {"one": jnp.ones(1), "two": jnp.zeros(3)}

    def reset(self, key):
        return self.see(), {"clock": {"time": jnp.int32(0)}}

    def step_env(self, key, state, actions):
        best = {"one": jnp.array([2.5]), "two": jnp.array([-1.0, 3.0])}
        assert {name: x.shape for name, x in actions.items()} == {"one": (1,), "two": (2,)}
        rewards = {name: -((actions[name] - best[name]) ** 2).sum() for name in self.agents}
        done = dict.fromkeys([*self.agents, "__all__"], jnp.bool(True))
        return self.see(), state, rewards, done, {}


def toy_time_limit(env, state, reward):
    gone = state.place > 1
    return ~(gone | (gone.any() if env.all_at_once else gone.all()))


@pytest.fixture
def use(monkeypatch):
    """use(env) makes it the environment of every env_id."""

    def use_env(env, time_limit=toy_time_limit):
        monkeypatch.setattr(ippo, "load_env", lambda config: env)
        for family in ("toy", "SMAX"):
            monkeypatch.setitem(ippo.TIME_LIMIT, family, time_limit)

    return use_env


def never(env, state, reward):
    """An environment without a time limit."""
    return False


@pytest.fixture
def toy(use):
    use(Toy(3))


@pytest.fixture
def no_evaluation(monkeypatch):
    """Evaluation, which alone uses while_loop, compiles for as long as an update."""
    monkeypatch.setattr(jax.lax, "while_loop", lambda unfinished, play, state: state)


def train(config):
    """Returns the state before and after, and metrics [S, updates], without the devices' axis."""
    state, program = start(ippo, config)
    before = to_numpy(state)
    after, metrics = to_numpy(program(state))
    first = lambda tree: jax.tree.map(lambda x: x[0], tree)
    return first(before), first(after), first(metrics)


def parts_of(state, seed=0):
    """Parameters of actor and critic."""
    return jax.tree.map(lambda x: x[seed], state.params["params"])


def assert_same(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, to_numpy(actual), to_numpy(expected))


def assert_close(actual, expected, **tolerance):
    close = lambda x, y: np.testing.assert_allclose(x, y, **tolerance)
    jax.tree.map(close, to_numpy(actual), to_numpy(expected))


def differ(actual, expected):
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    return any((np.asarray(x) != np.asarray(y)).any() for x, y in pairs)


# -------------------------------------- one agent
def test_the_loss_is_that_of_ppo_ff():
    """Actor and critic share nothing, so that a coefficient would only scale the critic's."""
    source = inspect.getsource(ppo_ff.ppo_loss)
    assert inspect.getsource(ippo.ppo_loss) == source.replace("config.vf_coef * ", "")


def plain_env(env):
    """A make_env for ppo_ff of a Toy with one agent."""

    def reset(key):
        obs, env_state = env.reset(key)
        return obs["agent_0"], env_state

    def step(key, env_state, action):
        obs, env_state, reward, done, _ = env.step_env(key, env_state, {"agent_0": action})
        terminated = env_state.place[0] > 1
        truncated = (env_state.clock["time"] >= env.limit) & ~terminated
        choose = lambda new, old: jnp.where(done["__all__"], new, old)
        fresh = jax.tree.map(choose, reset(key), (obs["agent_0"], env_state))
        return *fresh, reward["agent_0"], terminated, truncated, obs["agent_0"]

    return lambda config: (reset, step, 3)


def test_training_one_agent_is_ppo_ff(use, monkeypatch, no_evaluation):
    """Three updates of several epochs and minibatches, time limits and terminations included."""
    env = Toy(num_agents=1)
    use(env)
    monkeypatch.setattr(ppo_ff, "make_env", plain_env(env))
    same = {"num_envs": 4, "num_steps": 16, "num_minibatches": 4, "hidden_size": 8, "num_evals": 1}
    same |= {"gamma": 0.5, "gae_lambda": 0.75, "clip_eps": 0.25, "max_grad_norm": 1e9}
    same |= {"total_timesteps": 192, "clip_value": True, "env_id": "toy", "eval_episodes": 2}
    same |= {"ent_coef": 0.02}
    each = {"actor_epochs": 4, "critic_epochs": 4, "actor_lr": 0.01, "critic_lr": 0.01}
    config = ippo.Config(**same, **each, share_parameters=False)
    plain = ppo_ff.Config(**same, anneal_ent=False, lr=0.01, vf_coef=1.0, update_epochs=4)
    state, program = start(ippo, config)
    # In the names of ppo_ff's one network, where the heads are made last.
    names = {"actor": (0, 1, 4), "critic": (2, 3, 5)}

    def merge(params):
        layers = {
            f"Dense_{number}": params["params"][part][f"Dense_{i}"]
            for part, numbers in names.items()
            for i, number in enumerate(numbers)
        }
        return {"params": jax.tree.map(lambda x: x[:, :, 0], layers)}

    plain_state, plain_program = start(ppo_ff, plain)
    plain_state = plain_state._replace(params=jax.tree.map(jnp.copy, merge(state.params)))
    np.testing.assert_array_equal(state.key, plain_state.key)
    np.testing.assert_array_equal(state.runners.key, plain_state.runners.key)
    after, metrics = program(state)
    plain_after, plain_metrics = plain_program(plain_state)
    assert_close(merge(after.params), plain_after.params, rtol=2e-5, atol=1e-7)
    assert metrics["policy/clip_fraction"].max() > 0
    for name in {*plain_metrics} - {"eval/return", "eval/length"}:
        np.testing.assert_allclose(
            metrics[name], plain_metrics[name], rtol=1e-4, atol=2e-6, err_msg=name
        )


# ------------------------------------ permutation
class Hashed(distrax.Categorical):
    """Chooses by the digits of its logits: pseudo-random, but the same in every order of agents."""

    def sample(self, *, seed):
        return jnp.argmax(self.logits * 1e3 % 1.0, axis=-1)


@pytest.mark.parametrize("share", [False, True])
def test_permuting_the_agents_permutes_the_results(use, monkeypatch, share, no_evaluation):
    monkeypatch.setattr(ippo.distrax, "Categorical", Hashed)
    config = small(share_parameters=share, num_minibatches=1, actor_lr=0.01)
    order = [2, 0, 1]

    def permute(params):
        """Of [D, S, ...]: the networks, or the inputs of the first layer that name the agent."""
        if not share:
            return jax.tree.map(lambda x: x[:, :, jnp.array(order)], params)
        rows = jnp.array([0, 1] + [2 + i for i in order])
        pick = lambda x: x[:, :, rows] if x.shape[-2:] == (5, config.hidden_size) else x
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
    returns = {float(metrics[f"episode/return/agent_{k}"][0, 0, 0]) for k in range(3)}
    assert len(returns) == 3  # the agents do differ


# ------------------------------------------ masks
LOGITS = jnp.array([[1.0, -2.0, 0.5, 3.0], [0.0, 0.0, 9.0, -2.0], [2.0, 1.0, 0.0, -1.0]])
MASK = jnp.array([[1, 1, 1, 0], [1, 0, 0, 1], [0, 1, 0, 0]], bool)


def policy_of(outputs, mask, active=True, continuous=False):
    """Policy and value of a network whose actor returns `outputs` and whose critic returns 5."""
    network = ippo.ActorCritic(2, continuous)
    obs = ippo.Observation(jnp.ones(2), mask, jnp.bool(active))
    params = jax.tree.map(jnp.zeros_like, network.init(jax.random.key(0), obs))
    params["params"]["actor"]["Dense_2"]["bias"] = outputs
    params["params"]["critic"]["Dense_2"]["bias"] = jnp.full(1, 5.0)
    return network.apply(params, obs)


def test_a_masked_action_is_never_sampled():
    policy, _ = jax.vmap(policy_of)(LOGITS, MASK)
    keys = jax.random.split(jax.random.key(0), 5000)
    actions = np.array(jax.vmap(lambda key: policy.sample(seed=key))(keys))  # [5000, 3]
    for row, mask in enumerate(np.array(MASK)):
        assert set(np.unique(actions[:, row])) == set(np.flatnonzero(mask))
    assert MASK[jnp.arange(3), policy.mode()].all()


def test_entropy_and_log_prob_are_those_of_the_legal_actions_alone():
    policy, value = jax.vmap(policy_of)(LOGITS, MASK)
    assert (value == 5).all()
    for row, mask in enumerate(np.array(MASK)):
        legal = np.exp(np.float64(LOGITS[row][mask]))
        legal /= legal.sum()
        np.testing.assert_allclose(policy.probs[row][mask], legal, rtol=1e-5)
        assert (policy.probs[row][~mask] == 0).all()
        entropy = -(legal * np.log(legal)).sum()
        np.testing.assert_allclose(policy.entropy()[row], entropy, rtol=1e-5, atol=1e-7)


def test_the_network_takes_any_leading_axes():
    network = ippo.ActorCritic(4, False)
    features = jax.random.normal(jax.random.PRNGKey(1), (5, 3, 2))
    obs = ippo.Observation(features, jnp.broadcast_to(MASK, (5, 3, 4)), features[..., 0] > 0)
    params = network.init(jax.random.PRNGKey(0), obs)
    policy, value = network.apply(params, obs)
    each = jax.vmap(jax.vmap(lambda x: network.apply(params, x)))
    assert_close((policy.logits, value), (each(obs)[0].logits, each(obs)[1]), rtol=1e-5)


def measure(outputs, mask, action, active=True, continuous=False):
    """Value, entropy and log density, which are all that the loss reads."""
    policy, value = policy_of(outputs, mask, active, continuous)
    return jnp.stack([value, policy.entropy(), policy.log_prob(action)])


def test_a_masked_action_gets_no_gradient():
    grads = np.array(jax.vmap(jax.jacobian(measure))(LOGITS, MASK, jnp.array([1, 3, 1])))
    for row, mask in enumerate(np.array(MASK)):
        assert (grads[row][:, ~mask] == 0).all()
        assert (grads[row][1:, mask] != 0).all() or mask.sum() == 1
    # Where one action is left, there is nothing to learn.
    np.testing.assert_allclose(grads[2], 0, atol=1e-7)


@pytest.mark.parametrize("continuous", [False, True])
def test_an_inactive_agent_gets_no_gradient(continuous):
    outputs = jnp.concatenate([LOGITS[0], LOGITS[1]]) if continuous else LOGITS[0]
    action = LOGITS[2] if continuous else 0
    args = (outputs, MASK[0], action, False, continuous)
    value, entropy, _ = measure(*args)
    assert value == 0 and abs(entropy) < 1e-6
    assert (np.array(jax.jacobian(measure)(*args)) == 0).all()


def test_a_component_that_does_not_exist_counts_for_nothing():
    rng = np.random.default_rng(0)
    mean, log_std, old, action = jnp.array(rng.normal(size=(4, 3, 4)), jnp.float32)
    for row, mask in enumerate(np.array(MASK)):
        measured = []
        expected = []
        for center in (mean[row], old[row]):
            outputs = jnp.concatenate([center, log_std[row]])
            measured.append(measure(outputs, MASK[row], action[row], continuous=True))
            normal = distrax.MultivariateNormalDiag(center[mask], jnp.exp(log_std[row][mask]))
            expected.append([5, normal.entropy(), normal.log_prob(action[row][mask])])
        (_, entropy, log_prob), (_, _, old_log_prob) = np.array(measured)
        (_, expected_entropy, new), (_, _, previous) = np.array(expected)
        np.testing.assert_allclose(entropy, expected_entropy, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(log_prob - old_log_prob, new - previous, atol=1e-5)
        grads = jax.jacobian(measure)(outputs, MASK[row], action[row], continuous=True)
        assert (np.array(grads).reshape(3, 2, 4)[..., ~mask] == 0).all()
        assert (np.array(grads).reshape(3, 2, 4)[2][..., mask] != 0).all()


def test_no_agent_ever_does_what_is_forbidden(use):
    """Its reward is 0 for what is legal and -1 for the rest."""
    use(Forbidden(3))
    _, after, metrics = train(small(num_envs=16, total_timesteps=512))
    assert metrics["episode/count"].min() > 0
    assert (metrics["episode/return"] == 0).all()
    assert after.eval_return == 0
    np.testing.assert_array_less(metrics["policy/entropy"], np.log(2) + 1e-6)


# ------------------------------------------ leaks
@pytest.fixture
def records(monkeypatch):
    """The arguments and the results of every call of compute_gae, filled while training."""
    kept = []
    compute_gae = ippo.compute_gae

    def record(rollout, next_value, *args):
        result = compute_gae(rollout, next_value, *args)
        store = lambda *arrays: kept.append([np.array(x) for x in arrays])
        ends = (rollout.terminated, rollout.done)
        jax.debug.callback(store, rollout.reward, rollout.value, next_value, *ends, *result)
        return result

    monkeypatch.setattr(ippo, "compute_gae", record)
    return kept


def test_one_agents_reward_does_not_leak_into_anothers(use, records, no_evaluation):
    """Neither into its advantages nor into its network."""
    config = small(share_parameters=False, total_timesteps=32)
    params = []
    for scale in (3.0, 7.0):  # not 1, which XLA would leave out: another program, other bits
        use(Toy(3, scale={"agent_0": scale}))
        _, after, _ = train(config)
        jax.effects_barrier()
        params.append(parts_of(after))
    plain, scaled = (record[-2] for record in records)  # [T, N, K]
    np.testing.assert_array_equal(plain[..., 1:], scaled[..., 1:])
    assert (plain[..., 0] != scaled[..., 0]).any()
    of_agent = lambda k: [jax.tree.map(lambda x: x[k], p) for p in params]
    assert_same(*of_agent(1))
    assert_same(*of_agent(2))
    assert differ(*of_agent(0))


# ------------------------------------------- ends
def walk(actions, **changes):
    """Fields of every step of one environment, [T, K], for actions [T, K]."""
    reset, step, _, _ = ippo.make_env(small(**changes))
    step = jax.jit(step)
    obs, env_state = reset(jax.random.key(0))
    steps = []
    for action in actions:
        active = obs.active
        obs, env_state, *outcome = step(jax.random.key(0), env_state, jnp.array(action))
        reward, terminated, truncated, next_obs = outcome
        steps.append((active, reward, terminated, truncated, next_obs.features, obs.features))
    return jax.tree.map(lambda *x: np.stack(x), *steps)


def test_agents_end_one_by_one(use):
    """Agent 2 leaves in step 3, agent 1 in step 5 with the time limit, which cuts agent 0."""
    use(Toy(3))
    actions = [[0, 1, 1], [0, 1, 1], [0, 1, 1], [0, 0, 0], [0, 1, 0], [1, 1, 1]]
    active, reward, terminated, truncated, following, features = walk(actions)
    T, F = True, False
    assert active.tolist() == [[T, T, T]] * 3 + [[T, T, F]] * 2 + [[T, T, T]]
    assert terminated.tolist() == [[F] * 3] * 2 + [[F, F, T], [F] * 3, [F, T, F], [F] * 3]
    assert truncated.tolist() == [[F] * 3] * 4 + [[T, F, F], [F] * 3]
    # Places by hand: agent 2 stays at 1.1, agent 1 goes up to 1, back to 0.8 and ends at 1.1.
    np.testing.assert_allclose(reward[:, 2], [0, -0.3, -0.6, 0, 0, 0], atol=1e-6)
    np.testing.assert_allclose(following[4, :, 0], [-1.0, 1.1, 1.1], atol=1e-6)
    np.testing.assert_allclose(features[4, :, 0], [0, 0.1, 0.2], atol=1e-6)
    np.testing.assert_array_equal(following[:4, :, 0], features[:4, :, 0])


def test_a_time_limit_that_is_a_termination_as_well_terminates(use):
    use(Toy(1, limit=4))
    _, _, terminated, truncated, _, _ = walk([[1]] * 4)
    assert terminated[:, 0].tolist() == [False] * 3 + [True] and not truncated.any()


def test_an_end_of_all_ends_each(use):
    use(Toy(3, all_at_once=True))
    _, _, terminated, truncated, _, _ = walk([[0, 0, 1]] * 3)
    assert terminated.tolist() == [[False] * 3] * 2 + [[True] * 3] and not truncated.any()


def test_the_dead_of_smax_stay_active(use):
    """They are paid for the victory of their team."""
    use(Toy(2), lambda env, state, reward: ~(state.place > 1).all())
    active, reward, terminated, _, _, _ = walk([[0, 1]] * 5, env_id="SMAX")
    assert active.all() and not terminated.any() and (reward[1:] != 0).all()


def test_an_environment_whose_clock_is_unknown_is_an_error(use):
    use(Toy(3))
    with pytest.raises(ippo.ConfigError, match="TIME_LIMIT in ippo.py has no other"):
        ippo.make_env(small(env_id="other_toy"))


def test_the_bootstrap_of_a_cut_agent_is_the_value_of_its_final_observation(
    use, records, no_evaluation
):
    use(Toy(3))
    config = small(num_envs=32, num_steps=12, total_timesteps=384)
    state, program = start(ippo, config)
    params = jax.tree.map(lambda x: 2.0 * x, state.params)  # so that values are far apart
    weights = jax.tree.map(lambda x: np.array(x)[0, 0], params)
    program(state._replace(params=params))
    jax.effects_barrier()
    (record,) = records
    reward, value, next_value, terminated, done, advantage, target = record  # [T, N, K]
    place = np.abs(reward) > 0.5  # unambiguous distance: below 0 or beyond 1
    mask, active = jnp.ones((2, 3), bool), jnp.ones(2, bool)
    network = ippo.ActorCritic(config.hidden_size, False)
    value_of = jax.jit(jax.vmap(lambda obs: network.apply(weights, obs)[1]))
    ends = done & ~terminated & (reward != 0)
    checked = 0
    for t, n, k in np.argwhere(ends & place)[:50]:
        final = [0.5 + reward[t, n, k], np.sin(5.0), *np.eye(3)[k]]  # place from the reward
        first = [0.1 * k, 0.0, *np.eye(3)[k]]  # what an automatic reset would have shown
        values = value_of(ippo.Observation(jnp.array([final, first]), mask, active))
        np.testing.assert_allclose(next_value[t, n, k], values[0], atol=1e-5)
        assert abs(values[0] - values[1]) > 1e-4
        checked += 1
    assert checked > 5 and terminated.any()
    inside = ~done[:-1]
    np.testing.assert_allclose(next_value[:-1][inside], value[1:][inside], atol=1e-6)
    # Between its own end and that of the episode an agent has neither advantage nor error.
    inactive = done & (value == 0)
    assert inactive.any() and not advantage[inactive].any() and not target[inactive].any()


def test_the_length_of_an_episode_counts_all_its_steps(no_evaluation):
    """Also those after an agent's own end: finished and unfinished episodes add up."""
    config = small(env_id="rings", num_envs=8, num_steps=16, total_timesteps=8 * 16 * 4)
    metrics = train(config)[2]
    steps = np.nansum(metrics["episode/count"] * metrics["episode/length"])
    total = config.total_timesteps
    assert total - 8 * config.num_envs < steps <= total + 0.01


@pytest.mark.parametrize("share", [False, True])
def test_nothing_is_learned_from_an_agent_that_has_left(use, share, no_evaluation):
    """What it sees and is paid after its end changes no bit of any network."""
    config = small(share_parameters=share, num_envs=8, actor_lr=0.01)
    results = []
    for haze in (1.5, 3.0):
        use(Toy(3, haze=haze))
        _, after, metrics = train(config)
        results.append(after.params)
    assert metrics["episode/length"].mean() > 1
    assert_same(*results)


@pytest.mark.parametrize("share", [False, True])
def test_advantages_are_normalized_over_agents_that_have_not_left(
    use, monkeypatch, share, no_evaluation
):
    use(Toy(3))
    kept, loss = [], ippo.ppo_loss

    def record(params, network, batch, advantage, *args):
        jax.debug.callback(lambda *x: kept.append(x), batch.obs.active, advantage)
        return loss(params, network, batch, advantage, *args)

    monkeypatch.setattr(ippo, "ppo_loss", record)
    train(small(share_parameters=share, num_envs=16, total_timesteps=128))
    jax.effects_barrier()
    assert len(kept) == (4 if share else 4 * 3)  # two epochs of two minibatches
    for active, advantage in kept:
        assert not advantage[~active].any()
        np.testing.assert_allclose(advantage[active].mean(), 0, atol=1e-5)
        np.testing.assert_allclose(advantage[active].std(), 1, rtol=1e-4)
    assert any(0 < active.mean() < 1 for active, _ in kept)


# ----------------------------------------- spaces
def test_sizes_that_differ_are_padded(use):
    reset, _, names, continuous = ippo.make_env(small(env_id="rings", share_parameters=False))
    obs, _ = jax.vmap(reset)(jax.random.split(jax.random.key(0), 64))
    assert names == ippo.Rings.agents and not continuous
    assert obs.features.shape == (64, 3, 5) and obs.mask.all() and obs.active.all()
    assert (obs.features.sum(-1) == 1).all()
    for k in range(3):
        assert not obs.features[:, k, 3 + k :].any() and obs.features[:, k, 2 + k].any()
    use(Aim(), never)
    reset, _, names, continuous = ippo.make_env(small())
    obs, _ = reset(jax.random.key(0))
    assert names == ("one", "two") and continuous
    np.testing.assert_array_equal(obs.features, [[1, 0, 0, 1, 0], [0, 0, 0, 0, 1]])
    np.testing.assert_array_equal(obs.mask, [[True, False], [True, True]])


def test_a_picture_is_flattened(use):
    use(Picture(3))
    reset, *_ = ippo.make_env(small(share_parameters=False))
    features = reset(jax.random.key(0))[0].features
    assert features.shape == (3, 24)
    np.testing.assert_allclose(features.reshape(3, 3, 4, 2)[:, 1, 2, 0], [0, 0.1, 0.2])


def test_continuous_actions_reach_their_aim(use):
    use(Aim(), never)
    sizes = {"num_envs": 16, "num_steps": 16, "hidden_size": 16, "total_timesteps": 25600}
    rates = {"actor_lr": 0.01, "critic_lr": 0.01, "ent_coef": 0.0, "eval_greedy": True}
    _, after, metrics = train(small(**sizes, **rates))
    assert after.eval_return > -0.15  # of -14.5 for the initial policy's mode
    assert metrics["episode/return"][0, 0] < -5


def test_agents_explore_independently():
    """The policies of a vmapped network draw noise of their own."""
    policy = jax.vmap(lambda x: policy_of(x, jnp.ones(2, bool), continuous=True)[0])
    actions = policy(jnp.zeros((3, 4))).sample(seed=jax.random.key(0))
    assert actions.shape == (3, 2) and len(np.unique(actions)) == 6


# ------------------------------------------ rings
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
    assert OPTIMUM == pytest.approx(1 + 14 / 15 + 0.9) and "1 + 14 / 15 + 0.9" in ippo.Rings.__doc__


def test_rings_needs_agents_that_tell_their_observations_apart():
    common = best_of_rings([(3 + k, k) for k in range(3)])
    assert common < 0.5 * OPTIMUM


@pytest.mark.parametrize("share", [True, False])
def test_rings_is_learned(share):
    config = ippo.Config(
        env_id="rings",
        total_timesteps=100_000,
        num_evals=1,
        eval_episodes=512,
        share_parameters=share,
    )
    _, after, _ = train(config)
    assert (after.eval_return > 0.95 * OPTIMUM).all(), after.eval_return


# ---------------------------------------- options
@pytest.mark.parametrize(("share", "networks"), [(True, ()), (False, (3,))])
def test_share_parameters_decides_the_number_of_networks(toy, share, networks):
    state, _ = start(ippo, small(share_parameters=share))
    kernels = [x[0, 0] for x in jax.tree.leaves(state.params) if x.shape[-1:] + x.shape[-2:] != ()]
    kernels = [x for x in kernels if x.ndim == 2 + len(networks)]
    assert len(kernels) == 6 and all(x.shape[:-2] == networks for x in kernels)
    inputs = {x.shape[-2] for x in kernels}
    assert inputs == {4, 5 if share else 2}  # hidden, and the view with or without the agent
    if not share:
        assert differ(kernels[0][0], kernels[0][1])  # of different keys


@pytest.mark.parametrize("still, moves", [("actor", "critic"), ("critic", "actor")])
def test_actor_and_critic_have_learning_rates_of_their_own(toy, still, moves, no_evaluation):
    before, after, _ = train(small(**{f"{still}_lr": 1e-12}))
    before, after = parts_of(before), parts_of(after)
    assert_close(before[still], after[still], rtol=0, atol=1e-10)
    assert differ(before[moves], after[moves])
    with pytest.raises(AssertionError):
        assert_close(before[moves], after[moves], rtol=0, atol=1e-4)


def gradient_steps(state, part):
    return to_numpy(state.opt_state[part][1].count)[0]


# One gradient step per epoch, of one update.
ONE_STEP = {"num_minibatches": 1, "total_timesteps": 32, "anneal_lr": False}


@pytest.fixture(scope="module")
def two_epochs():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ippo, "load_env", lambda config: Toy(3))
        patch.setitem(ippo.TIME_LIMIT, "toy", toy_time_limit)
        return parts_of(train(small(**ONE_STEP))[1])


@pytest.mark.parametrize("part, other", [("actor", "critic"), ("critic", "actor")])
def test_actor_and_critic_have_epochs_of_their_own(toy, two_epochs, part, other, no_evaluation):
    """Whichever finishes first is frozen, its optimizer included."""
    _, after, metrics = train(small(**ONE_STEP, **{f"{part}_epochs": 5}))
    assert metrics["actor/epochs"] == (5 if part == "actor" else 2)
    assert gradient_steps(after, part) == 5 and gradient_steps(after, other) == 2
    # An epoch moves a weight by about 1e-3.
    assert_close(two_epochs[other], parts_of(after)[other], rtol=1e-5, atol=1e-6)
    assert differ(two_epochs[part], parts_of(after)[part])


def test_target_kl_stops_the_actor_after_the_epoch_that_exceeds_it(toy, two_epochs, no_evaluation):
    """Measured before an epoch's only step, the KL exceeds its target in the second one."""
    base = {"actor_epochs": 4, "critic_epochs": 3, "target_kl": 1e-9}
    _, after, metrics = train(small(**ONE_STEP, **base))
    assert metrics["actor/epochs"] == gradient_steps(after, "actor") == 2
    assert gradient_steps(after, "critic") == 3
    after = parts_of(after)
    assert_close(two_epochs["actor"], after["actor"], rtol=1e-5, atol=1e-6)
    assert differ(two_epochs["critic"], after["critic"])


def test_metrics_are_means_over_the_active_agents(use, no_evaluation):
    """Before it has learned, the policy is uniform: its entropy is log 3, whoever has left."""
    use(Toy(3, limit=9))  # a rollout of 8 steps ends within an episode
    sizes = {"num_envs": 64, "total_timesteps": 512, "num_steps": 8}
    _, after, metrics = train(small(**sizes, num_minibatches=1, actor_lr=1e-9, actor_epochs=1))
    active = after.runners.obs.active.mean()
    assert active < 1
    np.testing.assert_allclose(metrics["policy/entropy"], np.log(3), rtol=1e-3)


def test_an_actor_that_has_stopped_is_measured_as_it_is(toy, no_evaluation):
    """Its metrics do not depend on how many epochs of the critic follow its own."""
    _, _, shorter = train(small(**ONE_STEP, actor_epochs=1, critic_epochs=2))
    _, _, longer = train(small(**ONE_STEP, actor_epochs=1, critic_epochs=4))
    for name in ("loss/policy", "policy/entropy", "policy/approx_kl", "policy/clip_fraction"):
        np.testing.assert_allclose(longer[name], shorter[name], rtol=1e-3, atol=1e-7)
    assert shorter["policy/approx_kl"] > 0  # of the policy after its epoch
    assert longer["loss/value"] < shorter["loss/value"]


@pytest.mark.parametrize("part", ["actor", "critic"])
def test_a_rest_does_not_delay_the_learning_rate(toy, no_evaluation, part):
    """It decays with the updates, not with the gradient steps of the part."""
    epochs = {"actor_epochs": 8, "critic_epochs": 8, f"{part}_epochs": 1}
    _, after, metrics = train(small(num_minibatches=1, total_timesteps=64, **epochs))
    assert gradient_steps(after, part) == 2
    np.testing.assert_allclose(metrics["optim/lr"][0], [3e-3, 1.5e-3], rtol=1e-6)


def test_an_actor_that_diverges_after_the_critic_has_finished_shows(
    toy, no_evaluation, monkeypatch
):
    """The loss is NaN once the policy has changed: from the second epoch on."""
    loss = ippo.ppo_loss

    def poisoned(*args):
        total, metrics = loss(*args)
        return total * jnp.where(metrics["policy/approx_kl"] > 1e-7, jnp.nan, 1.0), metrics

    monkeypatch.setattr(ippo, "ppo_loss", poisoned)
    _, after, metrics = train(small(**ONE_STEP, actor_epochs=3, critic_epochs=1))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(parts_of(after)["critic"]))
    assert np.isnan(metrics["optim/grad_norm"])


def test_target_kl_stops_every_network_by_itself(use, no_evaluation):
    use(Toy(3, scale={"agent_0": 0.0}))
    rates = {"actor_lr": 0.02, "ent_coef": 0.0, "actor_epochs": 6, "target_kl": 0.016}
    _, after, metrics = train(small(**ONE_STEP, **rates, share_parameters=False))
    epochs = gradient_steps(after, "actor")
    assert len({*epochs.tolist()}) > 1 and (gradient_steps(after, "critic") == 2).all()
    assert metrics["actor/epochs"].item() == pytest.approx(epochs.mean())


# ------------------------------------------- runs
RUN = {"num_evals": 2, "num_seeds": 2, "total_timesteps": 128}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run of two seeds."""
    path = tmp_path_factory.mktemp("ippo") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ippo, "load_env", lambda config: Toy(3))
        patch.setitem(ippo.TIME_LIMIT, "toy", toy_time_limit)
        ippo.main(small(**RUN, run_dir=str(path)))
    return path


def test_the_return_of_the_team_is_the_sum_over_agents(finished):
    rows = read_rows(finished)
    assert [bool(row["eval/return"]) for row in rows] == [False, False, True, True] * 2
    for row in rows:
        for name in ("episode/return", "eval/return"):
            agents = [row[f"{name}/agent_{k}"] for k in range(3)]
            assert all(agents) == bool(row[name])
            if row[name]:
                assert float(row[name]) == pytest.approx(sum(map(float, agents)), rel=1e-5)


def test_evaluation_measures_full_episodes(use):
    """Greedy in an environment without chance: by hand."""
    use(Toy(3))
    state, program = start(ippo, small(eval_greedy=True, actor_lr=0.0))
    actor = state.params["params"]["actor"]
    head = {**actor["Dense_2"], "bias": jnp.array([[[0.0, 0.0, 9.0]]])}
    actor = {**actor, "Dense_2": head}
    params = {"params": {**state.params["params"], "actor": actor}}
    _, metrics = program(state._replace(params=params))
    by_hand = walk([[2, 2, 2]] * 5)[1].sum()  # action 2 always
    np.testing.assert_allclose(metrics["eval/return"][0, 0, -1], by_hand, rtol=1e-5)
    assert metrics["eval/length"][0, 0, -1] == 5


def test_evaluation_starts_from_keys_of_its_own(use):
    """It used the key that training was seeded with."""
    starts = []

    class Recorded(Toy):
        def reset(self, key):
            jax.debug.callback(
                lambda x: starts.append(tuple(np.ravel(x))), jax.random.key_data(key)
            )
            return super().reset(key)

    use(Recorded(1, limit=50))  # no reset during the rollout
    config = small(num_envs=4, eval_episodes=8, total_timesteps=32)
    state, program = start(ippo, config)
    jax.effects_barrier()
    training = {*starts}
    assert len(training) == 4
    starts.clear()
    program(state)
    jax.effects_barrier()
    assert len({*starts}) >= 16 and not training & {*starts}


@chex.dataclass
class Place:
    x: jax.Array


@jax.tree_util.register_pytree_node_class
class Clock:
    """A class that neither JAX nor flax knows."""

    def __init__(self, time):
        self.time = time

    def tree_flatten(self):
        return [self.time], None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


class Foreign(Toy):
    """The same walk, with a state that flax cannot save."""

    class State(NamedTuple):
        place: Any
        clock: Any
        seen: Any

    def pack(self, state):
        state = state._replace(place=Place(x=state.place), clock=Clock(state.clock["time"]))
        return self.State(*state)

    def unpack(self, state):
        return Toy.State(state.place.x, {"time": state.clock.time}, state.seen)

    def reset(self, key):
        state = Toy.State(0.1 * jnp.array(self.order), {"time": jnp.int32(0)}, jnp.int32(0))
        return self.see(state), self.pack(state)

    def step_env(self, key, state, actions):
        obs, state, *outcome = super().step_env(key, self.unpack(state), actions)
        return obs, self.pack(state), *outcome


def foreign_time_limit(env, state, reward):
    return toy_time_limit(env, env.unpack(state), reward)


@pytest.mark.parametrize("env", [Toy(3), Foreign(3)])
def test_a_killed_run_continues_to_the_same_bytes(use, env, finished, tmp_path):
    use(env, foreign_time_limit if isinstance(env, Foreign) else toy_time_limit)
    path = tmp_path / "run"
    words = [*flags(small(**RUN)), "--run-dir", path]
    with compiling_once(ippo):
        run_killed(ippo, words, "save", 2)  # before the second checkpoint
        code, _, err = run(ippo, "--run-dir", path)
    assert code == 0, err
    assert learned(path) == learned(finished)


def test_a_run_that_diverges(use, tmp_path, no_evaluation):
    use(Toy(3, scale={"agent_0": np.nan}))
    with pytest.raises(ippo.ConfigError, match="all seeds diverged"):
        ippo.main(small(run_dir=str(tmp_path / "run")))


# ---------------------------------------- JaxMARL
def test_without_jaxmarl_its_environments_name_the_extra(monkeypatch):
    assert ippo.Config().env_id == "rings"
    for name in [name for name in sys.modules if name.split(".")[0] == "jaxmarl"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "jaxmarl", None)
    ippo.make_train(ippo.Config())
    with pytest.raises(ippo.ConfigError, match=r"only rings is .* install 'jaxmarl\[mabrax\]'"):
        ippo.make_train(ippo.Config(env_id="MPE_simple_spread_v3"))


def test_parameters_that_do_not_exist():
    for params in ('{"size": 3}', "{size"):
        with pytest.raises(ippo.ConfigError, match="env_params"):
            ippo.make_train(small(env_id="rings", env_params=params))


@needs_jaxmarl
@pytest.mark.parametrize(
    ("env_id", "params"),
    [
        ("MPE_simple_spread_v3", '{"action_type": "continuous"}'),  # NotImplementedError
        ("MPE_simple_speaker_listener_v4", '{"num_agents": 3}'),  # AssertionError
        ("MPE_simple_spread_v3", '{"num_agents": "3"}'),
        ("MPE_simple_spread_v3", '{"max_steps": "50"}'),  # fails in the first step
    ],
)
def test_parameters_that_jaxmarl_rejects(env_id, params):
    with pytest.raises(ippo.ConfigError, match="env_params"):
        ippo.make_env(small(env_id=env_id, env_params=params))


@needs_jaxmarl
@pytest.mark.parametrize(
    ("env_id", "message"),
    [
        ("MPE_simple_spread_v4", "did you mean.* MPE_simple_spread_v3"),
        ("overcooked/ring", "did you mean.*coord_ring"),
        ("SMAX/3m", "did you mean.*/3m"),
        ("LearnedPolicyEnemySMAX", "policy"),
    ],
)
def test_unknown_environments_of_jaxmarl(env_id, message):
    with pytest.raises(ippo.ConfigError, match=message):
        ippo.make_env(ippo.Config(env_id=env_id))


@needs_jaxmarl
def test_a_map_of_jaxmarl_is_named_behind_its_environment():
    load = lambda env_id, params="{}": ippo.load_env(small(env_id=env_id, env_params=params))
    assert len(load("HeuristicEnemySMAX/3m").agents) == 3
    assert load("overcooked/coord_ring").obs_shape == (5, 5, 26)
    assert load("overcooked").obs_shape == (5, 4, 26)
    assert load("MPE_simple_spread_v3", '{"num_agents": 5}').num_agents == 5


def follow(env_id, action, steps, **changes):
    """Environment states, ends and observations of each step with the same action [K, ...]."""
    reset, step, names, continuous = ippo.make_env(
        small(env_id=env_id, share_parameters=False, **changes)
    )
    step = jax.jit(step)
    obs, env_state = reset(jax.random.key(0))
    action = jnp.broadcast_to(jnp.array(action), obs.mask.shape if continuous else (len(names),))
    seen = []
    for _ in range(steps):
        before = env_state
        obs, env_state, *outcome = step(jax.random.key(1), env_state, action)
        seen.append((before, obs, *outcome[:4]))  # without scalars of the environment
    return names, action, seen


@needs_jaxmarl
def test_the_time_limit_of_simple_spread_is_no_termination():
    import jaxmarl

    names, action, seen = follow("MPE_simple_spread_v3", 1, 27)
    ends = np.array([truncated for *_, truncated, _ in seen])  # [T, K]
    (last,) = {int(t) for t, *_ in np.argwhere(ends)}
    assert ends[last].all() and not any(terminated.any() for *_, terminated, _, _ in seen)
    (before, _), obs, *_, next_obs = seen[last]
    actions = dict(zip(names, action, strict=True))
    env = jaxmarl.make("MPE_simple_spread_v3")
    expected, _, _, done, _ = env.step_env(jax.random.key(0), before, actions)
    assert done["__all__"]
    for k, name in enumerate(names):
        np.testing.assert_allclose(next_obs.features[k], expected[name], rtol=1e-5)
    assert differ(next_obs.features, obs.features)


@needs_jaxmarl
@pytest.mark.parametrize("kind", ["terminated", "truncated"])
def test_a_riddle_ends_by_telling_or_by_the_clock(kind):
    """In switch_riddle, telling ends the episode for good, its step limit only cuts it."""
    import jaxmarl

    tell = jaxmarl.make("switch_riddle").game_actions["TELL"]
    choice, steps = (tell, 1) if kind == "terminated" else ((tell + 1) % 3, 6)
    _, _, seen = follow("switch_riddle", choice, steps)
    ends = {"terminated": [x[3] for x in seen], "truncated": [x[4] for x in seen]}
    assert ends.pop(kind)[-1].all()
    (other,) = ends.values()
    assert not np.any(other)


@needs_jaxmarl
@pytest.mark.skipif(importlib.util.find_spec("brax") is None, reason="pip install '.[brax]'")
@pytest.mark.filterwarnings("ignore")
def test_the_time_limit_of_mabrax_is_found_and_its_final_observation_kept():
    """Its clock is an entry of a dict, and its own reset overwrites the final observation."""
    import jaxmarl

    params = {"episode_length": 3, "backend": "spring"}
    names, action, seen = follow("halfcheetah_6x1", 0.5, 3, env_params=json.dumps(params))
    ends = np.array([truncated for *_, truncated, _ in seen])
    assert ends.tolist() == [[False] * 6] * 2 + [[True] * 6]
    assert not any(terminated.any() for *_, terminated, _, _ in seen)
    (before, _), obs, *_, next_obs = seen[2]
    env = jaxmarl.make("halfcheetah_6x1", auto_reset=False, **params)
    actions = dict(zip(names, action, strict=True))
    expected, *_ = jax.jit(env.step_env)(jax.random.key(0), before, actions)
    for k, name in enumerate(names):
        features = next_obs.features[k, : expected[name].size]  # without padding
        np.testing.assert_allclose(features, expected[name], rtol=1e-4, atol=1e-5)
    assert differ(next_obs.features, obs.features)


@needs_jaxmarl
@pytest.mark.parametrize("env_id", ["storm", "storm_2p"])
def test_the_time_limit_of_storm_is_no_termination_and_every_agent_acts(env_id):
    """Its agents are numbers, and each of its classes gives observations in its own way."""
    left, stay = 0, 4
    params = {"env_params": '{"num_inner_steps": 4}'}
    _, _, still = follow(env_id, stay, 5, **params)
    ends = np.array([truncated for *_, truncated, _ in still])
    assert ends.tolist() == [[False] * 2] * 3 + [[True] * 2] + [[False] * 2]
    assert not any(terminated.any() for *_, terminated, _, _ in still)
    for k in range(2):
        turned = follow(env_id, [left if k == agent else stay for agent in range(2)], 1, **params)[
            2
        ]
        assert differ(still[0][1].features[k], turned[0][1].features[k])


@pytest.mark.parametrize("evaporating", [True, False])
def test_jaxnav_ends_for_each_agent_or_for_all(evaporating):
    """At the time limit, one of two agents has reached its goal."""
    env = types.SimpleNamespace(evaporating=evaporating)
    at = lambda goal, crash: types.SimpleNamespace(
        goal_reached=jnp.array(goal), move_term=jnp.array(crash)
    )
    limit = lambda *ends: np.array(ippo.TIME_LIMIT["jaxnav"](env, at(*ends), None)).tolist()
    assert limit([True, False], [False, False]) == ([False, True] if evaporating else True)
    assert not np.any(limit([True, False], [False, True]))


def test_the_time_limit_of_rings_is_no_termination():
    _, _, seen = follow("rings", [1, 0, 2], 9)  # all stand still
    ends = np.array([truncated for *_, truncated, _ in seen])
    assert ends.tolist() == [[False] * 3] * 7 + [[True] * 3, [False] * 3]
    assert not any(terminated.any() for *_, terminated, _, _ in seen)


@needs_jaxmarl
@pytest.mark.parametrize("env_id", ["HeuristicEnemySMAX/3m", "SMAX"])
def test_the_time_limit_of_smax_is_no_termination(env_id):
    _, _, seen = follow(env_id, 4, 4, env_params='{"max_steps": 3}')  # 4: stop
    ends = np.array([truncated.all() for *_, truncated, _ in seen])
    assert ends.sum() == 1 and not any(terminated.any() for *_, terminated, _, _ in seen)


@needs_jaxmarl
@pytest.mark.parametrize(
    "env_id, allies, walk, max_steps", [("HeuristicEnemySMAX", 4, 4, 20), ("SMAX", 3, 0, 14)]
)
def test_who_has_won_is_what_jaxmarl_says(env_id, allies, walk, max_steps):
    """By its wrapper. Units shoot at what they reach; else the allies `walk`, the others come."""
    from jaxmarl.wrappers.baselines import SMAXLogWrapper

    sizes = {"num_allies": allies, "num_enemies": 3, "max_steps": max_steps}
    config = small(env_id=env_id, env_params=json.dumps(sizes))
    reset, step, names, _ = ippo.make_env(config)
    env = SMAXLogWrapper(ippo.load_env(config))
    otherwise = jnp.array([walk if "ally" in name else 2 for name in names])

    def advance(carry, key):
        (obs, state), wrapped = carry
        in_reach = obs.mask[:, 5:]
        action = jnp.where(in_reach.any(1), 5 + in_reach.argmax(1), otherwise)
        action = jnp.where(jax.random.bernoulli(key, 0.8, action.shape), action, 4)  # 4: stop
        obs, state, _, terminated, truncated, _, info = step(key, state, action)
        actions = dict(zip(names, action, strict=True))
        _, wrapped, _, done, says = env.step(key, wrapped, actions)
        over = (terminated | truncated).all()
        seen = (over, truncated.all(), info["won"], done["__all__"], says["returned_won_episode"])
        return ((obs, state), wrapped), seen

    key, keys = jax.random.PRNGKey(1), jax.random.split(jax.random.PRNGKey(0), 400)
    scan = jax.jit(lambda carry: jax.lax.scan(advance, carry, keys)[1])
    over, cut, won, done, says = to_numpy(scan((reset(key), env.reset(key)[1])))
    np.testing.assert_array_equal(over, done)
    np.testing.assert_array_equal(won[over], says[over, 0])
    lost = over & ~cut & ~won
    assert won.any() and lost.any() and cut.any() and not won[~over].any()


@needs_jaxmarl
@pytest.mark.parametrize(
    "env_id",
    ["coin_game", "overcooked", "overcooked_v2", "jaxnav", "hanabi", "storm_2p", "storm_np"],
)
def test_the_time_limit_of_every_family_is_known(env_id):
    reset, step, names, continuous = ippo.make_env(small(env_id=env_id))
    obs, env_state = jax.eval_shape(reset, jax.random.key(0))
    shape = obs.mask.shape if continuous else (len(names),)
    action = jax.ShapeDtypeStruct(shape, jnp.float32 if continuous else jnp.int32)
    _, after, *_ = jax.eval_shape(step, jax.random.key(0), env_state, action)
    assert jax.tree.structure(after) == jax.tree.structure(env_state)


@needs_jaxmarl
@pytest.mark.parametrize(
    "env_id, params, share",
    [
        ("MPE_simple_speaker_listener_v4", "{}", True),  # 3 and 5 actions, observations of 3 and 11
        ("MPE_simple_facmac_v1", "{}", False),  # continuous
        ("overcooked_v2", "{}", True),
        ("storm_2p", "{}", True),
        ("HeuristicEnemySMAX/3m", '{"action_type": "continuous"}', True),  # its mask is discrete
    ],
)
def test_environments_of_jaxmarl_train(env_id, params, share, no_evaluation):
    changes = {"share_parameters": share, "num_envs": 2, "num_steps": 32}
    config = small(env_id=env_id, env_params=params, **changes)
    _, after, metrics = train(config)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(after.params))
    assert np.isfinite(metrics["loss/value"]).all()
    assert ("env/won" in metrics) == ("SMAX" in env_id)
