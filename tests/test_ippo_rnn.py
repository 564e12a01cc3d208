"""Many agents with memory: carries, sequences, ends of episodes, and a cue to pass on."""

import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import load_script
from gymnax.environments import spaces
from probes import start, to_numpy
from test_cli import compiling_once, flags, learned, run, run_killed
from test_ippo import (
    SMALL,
    Aim,
    Forbidden,
    Hashed,
    Toy,
    assert_close,
    assert_same,
    differ,
    never,
    toy_time_limit,
)

ippo = load_script("ippo")
ippo_rnn = load_script("ippo_rnn")
# Both cells, with one network for all agents and with one each.
KINDS = [(True, "gru"), (False, "lstm")]


def small(**changes):
    return ippo_rnn.Config(**{**SMALL, **changes})


@pytest.fixture
def use(monkeypatch):
    """use(env) makes it the environment of every env_id."""

    def use_env(env, time_limit=toy_time_limit):
        for script in (ippo, ippo_rnn):
            monkeypatch.setattr(script, "load_env", lambda config: env)
            monkeypatch.setitem(script.TIME_LIMIT, "toy", time_limit)

    return use_env


@pytest.fixture
def no_evaluation(monkeypatch):
    """Evaluation, which alone uses while_loop, compiles for as long as an update."""
    monkeypatch.setattr(jax.lax, "while_loop", lambda unfinished, play, state: state)


# ---------------------------------------- network
def zero_hidden(config, *axes):
    zeros = jnp.zeros((*axes, config.hidden_size))
    hidden = zeros if config.cell == "gru" else (zeros, zeros)
    return {"actor": hidden, "critic": hidden}


def random_inputs(config, steps=6, rows=5, seed=0):
    """A network with parameters, and sequences of all that it reads."""
    network = ippo_rnn.ActorCritic(False, config)
    keys = iter(jax.random.split(jax.random.PRNGKey(seed), 99))
    normal = lambda x: 0.5 * jax.random.normal(next(keys), x.shape)
    features = normal(jnp.zeros((steps, rows, 3)))
    every = jnp.ones((steps, rows), bool)
    obs = ippo_rnn.Observation(features, jnp.ones((steps, rows, 4), bool), every)
    hidden = jax.tree.map(normal, zero_hidden(config, rows))
    reset = jax.random.bernoulli(next(keys), 0.3, (steps, rows))
    params = network.init(next(keys), obs, hidden, reset)
    params = jax.tree.map(lambda x: x + normal(x), params)
    return network, params, obs, hidden, reset


def linen_cell(cell, params):
    """The linen cell with these weights, and its parameters."""
    if cell == "lstm":
        return nn.LSTMCell(4), params["LSTM_0"]["OptimizedLSTMCell_0"]
    params = params["GRU_0"]
    inputs, size = params["Dense_0"], len(params["bias"])
    weights = {}
    for i, gate in enumerate("rzn"):
        part = np.s_[..., i * size : (i + 1) * size]
        weights[f"i{gate}"] = {"kernel": inputs["kernel"][part], "bias": inputs["bias"][part]}
        weights[f"h{gate}"] = {"kernel": params["kernel"][part]}
    weights["hn"]["bias"] = params["bias"]
    return nn.GRUCell(4), weights


def apply_linen(config, params, features, hidden, reset):
    """The network, from linen cells: logits, value, and hidden after each step [T, B, H]."""
    outputs, after = {}, {}
    for part in ("actor", "critic"):
        weights, carry, steps = params["params"][part], hidden[part], []
        linen, cell_weights = linen_cell(config.cell, weights)
        for t in range(len(reset)):
            keep = ~reset[t, :, None] & config.memory
            carry = jax.tree.map(lambda x, keep=keep: x * keep, carry)
            x = jnp.tanh(nn.Dense(4).apply({"params": weights["Dense_0"]}, features[t]))
            carry, x = linen.apply({"params": cell_weights}, carry, x)
            steps.append((carry, x))
        after[part], x = jax.tree.map(lambda *x: jnp.stack(x), *steps)
        outputs[part] = x @ weights["Dense_1"]["kernel"] + weights["Dense_1"]["bias"]
    return jax.nn.log_softmax(outputs["actor"]), outputs["critic"][..., 0], after


@pytest.mark.parametrize("cell", ["gru", "lstm"])
@pytest.mark.parametrize("memory", [True, False])
def test_actor_and_critic_are_cells_of_linen_with_a_memory_each(cell, memory):
    """Outputs, and the gradients of all that they depend on."""
    config = small(cell=cell, memory=memory)
    network, params, obs, hidden, reset = random_inputs(config)

    def apply(params, features, hidden):
        seen = obs._replace(features=features)
        policy, value, after = network.apply(params, seen, hidden, reset)
        return policy.logits, value, after

    inputs = params, obs.features, hidden
    actual, pullback = jax.vjp(apply, *inputs)
    expected, linen_pullback = jax.vjp(lambda *x: apply_linen(config, *x, reset), *inputs)
    assert_close(actual, expected, atol=1e-5)
    leaves, tree = jax.tree.flatten(actual)
    keys = jax.random.split(jax.random.PRNGKey(1), len(leaves))
    weights = [jax.random.normal(*x) for x in zip(keys, (x.shape for x in leaves), strict=True)]
    weights = jax.tree.unflatten(tree, weights)
    gradients = pullback(weights)
    assert_close(gradients, linen_pullback(weights), atol=1e-4, rtol=1e-4)
    assert all(x.any() for x in jax.tree.leaves(gradients[0])) or not memory
    assert all(x.any() for x in jax.tree.leaves(gradients[2])) == memory


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_a_sequence_is_its_steps_one_by_one(cell):
    """Of many rows and of one; a reset leaves nothing of what was before."""
    network, params, obs, hidden, reset = random_inputs(small(cell=cell))
    policy, value, after = network.apply(params, obs, hidden, reset)
    for t in range(len(reset)):
        now = jax.tree.map(lambda x, t=t: x[t : t + 1], obs)
        cleared = jax.tree.map(lambda x, t=t: jnp.where(reset[t, :, None], 0, x), hidden)
        no_reset = jnp.zeros((1, 5), bool)
        step_policy, step_value, steps = network.apply(params, now, cleared, no_reset)
        assert_close(step_policy.logits[0], policy.logits[t], atol=1e-5)
        assert_close(step_value[0], value[t], atol=1e-5)
        one, of_one = jax.tree.map(lambda x: x[:, 2], now), jax.tree.map(lambda x: x[2], hidden)
        _, value_of_one, _ = network.apply(params, one, of_one, reset[t : t + 1, 2])
        assert_close(value_of_one, step_value[:, 2], atol=1e-6)
        hidden = jax.tree.map(lambda x: x[0], steps)
        assert_close(hidden, jax.tree.map(lambda x, t=t: x[t], after), atol=1e-5)


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_an_inactive_agent_gets_no_gradient(cell):
    """Neither from its own steps, nor through the memory that it keeps."""
    network, params, obs, hidden, reset = random_inputs(small(cell=cell))
    active = jnp.arange(6)[:, None] < jnp.array([0, 3, 6, 0, 2])  # [T, B]

    def measure(features, weight):
        """All that the loss reads."""
        seen = obs._replace(features=features, active=active)
        policy, value, _ = network.apply(params, seen, hidden, jnp.zeros_like(reset))
        outputs = (value, policy.entropy(), policy.log_prob(jnp.zeros_like(value, int)))
        return sum((weight * x).sum() for x in outputs)

    grads = jax.grad(measure)(obs.features, jnp.ones((6, 5)))
    assert (grads[~active] == 0).all() and (grads[active] != 0).any(-1).all()
    before = jax.grad(measure)(obs.features, 1.0 * (jnp.arange(6)[:, None] == 2))
    assert (before[:3, 1] != 0).any(-1).all() and not before[3:].any()  # back through time


# ---------------------------------------- rollout
def apply_agents(network, params, share, features, hidden):
    """One step without a reset, agent by agent: features [N, K, F] -> logits, value, hidden."""
    results = []
    for k in range(features.shape[1]):
        of_agent = params if share else jax.tree.map(lambda x, k=k: x[k], params)
        every = np.ones((1, len(features)), bool)
        obs = ippo_rnn.Observation(
            features[None, :, k], np.ones((1, len(features), 3), bool), every
        )
        before = jax.tree.map(lambda x, k=k: x[:, k], hidden)
        policy, value, after = network.apply(of_agent, obs, before, ~every)
        results.append(jax.tree.map(lambda x: x[0], (policy.logits, value, after)))
    return jax.tree.map(lambda *x: jnp.stack(x, axis=1), *results)


@pytest.fixture(scope="module", params=KINDS, ids=str)
def recorded(request):
    """Three rollouts without learning: what the agents did, what the loss saw, and a replay.

    The replay is a loop over steps that clears the memory where an episode has ended.
    """
    share, cell = request.param
    rates = {"actor_lr": 0.0, "critic_lr": 0.0, "num_envs": 12, "num_minibatches": 3}
    config = small(**rates, share_parameters=share, cell=cell, total_timesteps=3 * 12 * 8)
    rollouts, batches = [], []
    gae, loss = ippo_rnn.compute_gae, ippo_rnn.ppo_loss

    def record_gae(rollout, next_value, *args):
        result = gae(rollout, next_value, *args)
        rollout = rollout._replace(info={}, hidden=None, next_obs=None)
        store = lambda *x: rollouts.append(to_numpy(x))
        jax.debug.callback(store, rollout, next_value, *result)
        return result

    def record_loss(params, network, batch, *args):
        hidden = jax.tree.map(lambda x: x[0], batch.hidden)
        policy, value, _ = network.apply(params, batch.obs, hidden, batch.reset)
        log_ratio = policy.log_prob(batch.action) - batch.log_prob
        store = lambda *x: batches.append(to_numpy(x))
        jax.debug.callback(store, batch.log_prob, log_ratio, value - batch.value, args[0])
        return loss(params, network, batch, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ippo_rnn, "load_env", lambda config: Toy(3))
        patch.setitem(ippo_rnn.TIME_LIMIT, "toy", toy_time_limit)
        patch.setattr(ippo_rnn, "compute_gae", record_gae)
        patch.setattr(ippo_rnn, "ppo_loss", record_loss)
        patch.setattr(jax.lax, "while_loop", lambda unfinished, play, state: state)
        state, program = start(ippo_rnn, config)
        params = jax.tree.map(lambda x: 2.0 * x, state.params)  # values that are far apart
        weights = to_numpy(jax.tree.map(lambda x: x[0, 0], params))
        program(state._replace(params=params))
        jax.effects_barrier()
    assert len(rollouts) == 3
    joined = jax.tree.map(lambda *x: np.concatenate(x), *rollouts)  # [3 T, N, K]
    rollout, next_value, advantage, target = joined

    network = ippo_rnn.ActorCritic(False, config)
    step = jax.jit(lambda *x: apply_agents(network, weights, share, *x))
    hidden, replayed = to_numpy(zero_hidden(config, 12, 3)), []
    for t, features in enumerate(rollout.obs.features):
        if t:
            over = rollout.done[t - 1].all(-1)[:, None, None]
            hidden = jax.tree.map(lambda x, over=over: np.where(over, 0, x), hidden)
        logits, value, hidden = step(features, hidden)
        replayed.append((logits, value, hidden))
    logits, value, hidden = jax.tree.map(lambda *x: np.stack(x), *replayed)
    return types.SimpleNamespace(
        share=share,
        config=config,
        step=step,
        batches=batches,
        rollout=rollout,
        next_value=next_value,
        advantage=advantage,
        target=target,
        logits=logits,
        value=value,
        hidden=hidden,  # after each step
    )


def test_acting_is_the_replay_of_whole_episodes(recorded):
    """Log-probabilities and values; the memory crosses rollouts and ends with the episode."""
    rollout, active = recorded.rollout, recorded.rollout.obs.active
    log_probs = jax.nn.log_softmax(recorded.logits)
    expected = np.take_along_axis(np.array(log_probs), rollout.action[..., None], -1)[..., 0]
    np.testing.assert_allclose(rollout.log_prob[active], expected[active], atol=1e-5)
    np.testing.assert_allclose(rollout.value[active], recorded.value[active], atol=1e-5)
    assert not rollout.value[~active].any() and 0 < active.mean() < 1
    over = rollout.done.all(-1)
    np.testing.assert_array_equal(rollout.reset[1:], np.repeat(over[:-1, :, None], 3, 2))
    assert over.any() and not over[7].all()  # some episodes cross the end of a rollout


def test_the_ratio_of_a_minibatch_is_one_before_learning(recorded):
    """The loss replays sequences from the memory before their first steps."""
    for _, log_ratio, change, _ in recorded.batches:
        np.testing.assert_allclose(log_ratio, 0, atol=1e-5)
        np.testing.assert_allclose(change, 0, atol=1e-5)


def test_a_minibatch_holds_whole_sequences_of_all_agents(recorded):
    """In each epoch, every environment is in one minibatch."""
    axes = (3, 2, -1)  # updates, epochs, minibatches: of each network, if they are not shared
    calls = np.array([log_prob for log_prob, *_ in recorded.batches])
    calls = calls.reshape(*axes, *calls.shape[1:])
    assert calls.shape[2:] == ((3, 8, 4, 3) if recorded.share else (9, 8, 4))
    for update, epochs in enumerate(calls):
        expected = recorded.rollout.log_prob[8 * update : 8 * update + 8]  # [T, N, K]
        expected = expected if recorded.share else expected.reshape(8, -1)
        columns = sorted(x.tobytes() for x in expected.swapaxes(0, 1))
        for epoch in epochs:
            rows = epoch.swapaxes(1, 2).reshape(len(columns), *expected[:, 0].shape)
            assert sorted(x.tobytes() for x in rows) == columns


def test_the_bootstrap_of_a_cut_agent_remembers_its_episode(recorded):
    """The value of its final observation, with the memory of the steps before."""
    rollout, next_value, checked = recorded.rollout, recorded.next_value, 0
    cut = rollout.done & ~rollout.terminated & rollout.obs.active
    place = 0.5 + rollout.reward  # of an agent below 0, where the distance tells it
    for t in np.unique(np.argwhere(cut & (place < 0))[:, 0]):
        features = [place[t], np.full_like(place[t], np.sin(5.0))]  # what the agents see
        features = np.stack(features, axis=-1)
        if recorded.share:
            features = np.concatenate([features, np.tile(np.eye(3), (12, 1, 1))], axis=-1)
        features = np.float32(features)
        _, value, _ = recorded.step(features, jax.tree.map(lambda x, t=t: x[t], recorded.hidden))
        blank = to_numpy(zero_hidden(recorded.config, 12, 3))
        _, forgetful, _ = recorded.step(features, blank)
        chosen = cut[t] & (place[t] < 0)
        np.testing.assert_allclose(next_value[t][chosen], value[chosen], atol=1e-5)
        assert (np.abs(value - forgetful)[chosen] > 1e-4).all()
        checked += chosen.sum()
    assert checked > 10 and rollout.terminated.any()


def test_all_other_steps_bootstrap_from_the_next_one(recorded):
    """Also across rollouts, since nothing was learned between them."""
    rollout = recorded.rollout
    inside = ~rollout.done[:-1]
    np.testing.assert_allclose(
        recorded.next_value[:-1][inside], rollout.value[1:][inside], atol=1e-5
    )
    assert inside[7].any() and inside[15].any()


def test_an_agent_that_has_left_has_no_advantage_and_no_error(recorded):
    """Also in the last step of the episode, when the next one is another's."""
    left = ~recorded.rollout.obs.active
    assert (left & recorded.rollout.done.all(-1)[..., None]).any()
    for x in (recorded.next_value, recorded.advantage, recorded.target):
        assert not x[left].any()
    last = [x[-1] for x in recorded.batches]  # advantages of minibatches: some are zero
    assert any((x == 0).any() for x in last) and any((x != 0).any() for x in last)


# --------------------------------------- training
def train(config):
    """Returns the state after, and metrics [S, updates], without the devices' axis."""
    state, program = start(ippo_rnn, config)
    return jax.tree.map(lambda x: x[0], to_numpy(program(state)))


@pytest.mark.parametrize(("share", "cell"), KINDS[:1])  # unshared: test_ippo.py
def test_nothing_is_learned_from_an_agent_that_has_left(use, share, cell, no_evaluation):
    """What it sees and is paid after its end changes no bit of any network."""
    sizes = {"num_envs": 64, "total_timesteps": 1024, "actor_lr": 0.01}  # enough to leave early
    config = small(**sizes, share_parameters=share, cell=cell)
    results = []
    for haze in (1.5, 3.0):
        use(Toy(3, haze=haze))
        after, metrics = train(config)
        results.append(after.params)
    assert metrics["episode/length"].mean() > 1
    assert_same(*results)


@pytest.mark.parametrize(("share", "cell"), KINDS[:1])  # the other one: test_mappo.py
def test_permuting_the_agents_permutes_the_results(use, monkeypatch, share, cell, no_evaluation):
    monkeypatch.setattr(ippo_rnn.distrax, "Categorical", Hashed)
    config = small(share_parameters=share, cell=cell, num_minibatches=1, actor_lr=0.01)
    order = [2, 0, 1]

    def permute(params):
        """Of [D, S, ...]: the networks, or the inputs of the first layer that name the agent."""
        if not share:
            return jax.tree.map(lambda x: x[:, :, jnp.array(order)], params)
        rows = jnp.array([0, 1] + [2 + i for i in order])
        pick = lambda x: x[:, :, rows] if x.shape[-2:] == (5, config.hidden_size) else x
        return jax.tree.map(pick, params)

    use(Toy(3))
    state, program = start(ippo_rnn, config)
    params = jax.tree.map(lambda x: 2.0 * x, state.params)
    initial = jax.tree.map(jnp.copy, permute(params))
    after, metrics = program(state._replace(params=params))
    use(Toy(3, order))
    state, program = start(ippo_rnn, config)
    permuted, permuted_metrics = program(state._replace(params=initial))
    assert_close(permuted.params, permute(after.params), rtol=1e-4, atol=1e-5)
    assert differ(permuted.params, after.params)
    assert {*metrics} == {*permuted_metrics}
    for name in metrics:
        np.testing.assert_allclose(metrics[name], permuted_metrics[name], rtol=1e-4, atol=1e-5)
    returns = {float(metrics[f"episode/return/agent_{k}"][0, 0, 0]) for k in range(3)}
    assert len(returns) > 1  # the agents do differ


def test_no_agent_ever_does_what_is_forbidden(use):
    """Its reward is 0 for what is legal and -1 for the rest."""
    use(Forbidden(3))
    after, metrics = train(small(num_envs=16, total_timesteps=512))
    assert metrics["episode/count"].min() > 0
    assert (metrics["episode/return"] == 0).all()
    assert after.eval_return == 0
    np.testing.assert_array_less(metrics["policy/entropy"], np.log(2) + 1e-6)


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_continuous_actions_reach_their_aim(use, cell):
    """As in test_ippo.py: two agents with 1 and 2 actions."""
    use(Aim(), never)
    sizes = {"num_envs": 16, "num_steps": 16, "hidden_size": 16, "total_timesteps": 25600}
    rates = {"actor_lr": 0.01, "critic_lr": 0.01, "ent_coef": 0.0, "eval_greedy": True}
    after, metrics = train(small(**sizes, **rates, cell=cell))
    assert after.eval_return > -0.15  # of -14.5 for the initial policy's mode
    assert metrics["episode/return"][0, 0] < -5


def test_minibatches_are_of_environments():
    with pytest.raises(ippo_rnn.ConfigError, match="num_minibatches must divide 4"):
        ippo_rnn.make_train(small(env_id="rings", num_minibatches=8))


@pytest.mark.parametrize(("share", "cell"), KINDS[1:])  # the other one: test_mappo.py
def test_a_killed_run_continues_to_the_same_bytes(use, share, cell, tmp_path):
    use(Toy(3))
    sizes = {"num_evals": 2, "num_seeds": 2, "total_timesteps": 128}
    words = flags(small(**sizes, share_parameters=share, cell=cell))
    with compiling_once(ippo_rnn):
        code, _, err = run(ippo_rnn, *words, "--run-dir", tmp_path / "whole")
        assert code == 0, err
        run_killed(ippo_rnn, [*words, "--run-dir", tmp_path / "run"], "save", 2)
        code, _, err = run(ippo_rnn, "--run-dir", tmp_path / "run")
    assert code == 0, err
    assert learned(tmp_path / "run") == learned(tmp_path / "whole")


# --------------------------------------- the probe
class Whisper:
    """The first agent sees a cue in the first step. In the last, both are to name it.

    In the second step, the other agent sees what the first has done. Naming the cue pays 1, and the
    first step pays the first agent for it, so that it speaks. Without memory nobody can know the
    cue in the last step: the best return is 1 + 2 / 2, with memory 1 + 2.
    """

    agents = ("speaker", "listener")
    length = 4

    def action_space(self, name):
        return spaces.Discrete(2)

    def see(self, state):
        time = jax.nn.one_hot(state["time"], self.length)
        cue = jax.nn.one_hot(state["cue"], 2) * (state["time"] == 0)
        said = jax.nn.one_hot(state["said"], 2) * (state["time"] == 1)
        return {"speaker": jnp.append(time, cue), "listener": jnp.append(time, said)}

    def reset(self, key):
        cue = jax.random.randint(key, (), 0, 2)
        state = {"cue": cue, "said": jnp.int32(0), "time": jnp.int32(0)}
        return self.see(state), state

    def step_env(self, key, state, actions):
        first, last = state["time"] == 0, state["time"] == self.length - 1
        named = {name: actions[name] == state["cue"] for name in self.agents}
        rewards = {
            "speaker": named["speaker"] * (first | last),
            "listener": named["listener"] * last,
        }
        state = {"cue": state["cue"], "said": actions["speaker"], "time": state["time"] + 1}
        return self.see(state), state, rewards, {"__all__": last}, {}


PROBE = {
    "env_id": "toy",
    "total_timesteps": 40_960,
    "num_envs": 64,
    "num_steps": 16,
    "num_minibatches": 2,
    "hidden_size": 16,
    "actor_lr": 0.01,
    "critic_lr": 0.01,
    "num_evals": 1,
    "eval_episodes": 512,
    "eval_greedy": True,
}


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_a_cue_is_passed_on_and_remembered(use, cell):
    use(Whisper(), never)
    after, metrics = train(ippo_rnn.Config(**PROBE, cell=cell))
    assert after.eval_return > 2.9 and metrics["eval/length"][0, -1] == 4


def test_without_memory_nobody_remembers_a_cue(use):
    """In ippo.py, and with a hidden state that is cleared at every step."""
    use(Whisper(), never)
    state, program = start(ippo, ippo.Config(**PROBE))
    after, _ = program(state)
    forgetful, _ = train(ippo_rnn.Config(**PROBE, memory=False))
    for eval_return in (after.eval_return, forgetful.eval_return):
        assert 1.8 < eval_return.item() < 2.2  # the speaker speaks, and both guess
