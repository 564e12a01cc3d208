"""disco.py against arrays measured from the original code, and the harness around the rule.

tests/data holds the update rule alone, with meta-network weights made from a seed. The arrays of
the released weights, and those weights, are looked for beside the repository and in the cache.
Each set exists in float32 and in float64; the latter runs in a process of its own, where JAX is
told to compute in it, and is the one that no wrong formula survives.
"""

import functools
import io
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rlax
from conftest import ROOT, with_devices
from test_cli import content, flags, learned, read_rows, run

import disco

DOUBLE = jax.config.jax_enable_x64
DATA, BESIDE = ROOT / "tests" / "data", ROOT.parent / "shared" / "disco"
SUFFIX = "_f64" if DOUBLE else ""
EXACT = 1e-9 if DOUBLE else 1e-5
LOOSE = 1e-9 if DOUBLE else 5e-4  # unsquash takes the difference of two numbers near 500


def find(name):
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "disco_rl"
    for folder in (BESIDE, cache):
        if (folder / name).exists():
            return folder / name
    pytest.skip(f"{name} is neither in {BESIDE} nor in {cache}")


def real(x):
    return jnp.asarray(x, float) if np.issubdtype(x.dtype, np.floating) else jnp.asarray(x)


class Golden:
    """The arrays of a file: golden["A/in/actions"], golden.group("A/in/adv_ema") -> dict."""

    def __init__(self, path):
        with np.load(path) as file:
            self.arrays = {name: file[name] for name in file.files}

    def __getitem__(self, name):
        return real(self.arrays[name])

    def group(self, prefix):
        names = [name for name in self.arrays if name.startswith(prefix + "/")]
        return {name.removeprefix(prefix + "/"): self[name] for name in names}


def synthetic_weights():
    """The arrays of a file like the released one."""
    rs, weights = np.random.RandomState(7), {}
    shapes = {}
    for layer in jax.tree.leaves(disco.MetaNetwork()):
        shapes |= {f"{layer.name}/w": layer.shape, f"{layer.name}/b": layer.shape[-1:]}
    for name in sorted(shapes):
        x = rs.standard_normal(shapes[name])
        scale = 0.1 if name.endswith("/b") else 1 / np.sqrt(np.prod(shapes[name][:-1]))
        weights[name] = (x * scale).astype(np.float32)
    return weights


@functools.cache
def load(source):
    """(golden arrays, meta-network) of the released or of the synthetic weights."""
    if source == "synthetic":
        golden = Golden(DATA / f"disco_golden_synth{SUFFIX}.npz")
        with tempfile.TemporaryDirectory() as folder:
            np.savez(f"{folder}/synthetic.npz", **synthetic_weights())
            meta_net = disco.load_weights(f"{folder}/synthetic.npz")
    else:
        golden = Golden(find(f"disco_golden{SUFFIX}.npz"))
        meta_net = disco.load_weights(str(find("disco_103.npz")))
    return golden, jax.tree.map(real, meta_net)


@functools.cache
def released():
    find("disco_103.npz")
    return load("released")


def close(found, expected, tolerance):
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.shape == expected.shape
    np.testing.assert_array_less(
        abs(found - expected) / max(1, abs(expected).max()), tolerance, strict=False
    )


def transitions(**fields):
    """What a batch of the replay has: all but the statistics of the episode."""
    none = dict.fromkeys(disco.Transition._fields)
    return disco.Transition(**none | fields)


def on_devices(function, size=1):
    """The function as one of `size` devices runs it, which is what the axis of vmap means too."""
    return jax.jit(jax.vmap(function, axis_name="devices", axis_size=size))


def lifetime():
    return jax.tree.map(real, disco.start_lifetime())


def total_loss(metrics, config):
    """The weighted sum that a step of Adam reduces."""
    loss = sum(metrics[f"loss/{name}"] for name in ("policy", "y", "z", "aux_policy"))
    return (
        loss + config.vf_coef * metrics["loss/value"] - config.ent_coef * metrics["policy/entropy"]
    )


def stack(tree, size=1):
    return jax.tree.map(lambda x: jnp.stack([x] * size), tree)


# ---------------------------------------------------------------------------- A: the rule alone
def moments(group):
    raw = jnp.stack([group["moment1"], group["moment2"]])
    return disco.Moments(raw=raw, decay_product=group["decay_product"])


class RuleCase:
    """Section A: outputs of an agent go in, targets and the loss come out."""

    def __init__(self, source):
        self.golden, self.meta_net = load(source)
        golden = self.golden
        self.online, self.target = (
            disco.AgentOutput(**golden.group(f"A/in/{name}"))
            for name in ("agent_out", "target_out")
        )
        last = lambda x: jnp.concatenate([x, jnp.zeros_like(x[:1])])  # a step that is never read
        self.batch = transitions(
            action=golden["A/in/actions"],
            logits=golden["A/in/behaviour_logits"],
            reward=last(golden["A/in/rewards"]),
            done=last(golden["A/in/is_terminal"]),
            reset=~last(golden["A/in/loss_mask"]),
        )
        self.meta = disco.MetaState(
            moments=moments(golden.group("A/in/adv_ema")),
            hidden=golden["A/in/rnn_hidden"],
            cell=golden["A/in/rnn_cell"],
        )
        self.config = disco.Config()

    @property
    def inputs(self):
        return self.online, self.target, self.batch

    def rule(self, meta_net, inputs, meta):
        return disco.disco_rule(meta_net, *inputs, meta, self.config)

    def loss(self, output, targets, q_target):
        pick = lambda name: disco.select_action(getattr(output, name), self.batch.action)
        taken = output._replace(**{name: pick(name) for name in ("z", "aux_pi", "q")})
        return disco.disco_loss(taken, targets, q_target, self.batch, self.config)


@functools.cache
def rule_case(source):
    case = RuleCase(source)

    def run(meta, meta_net, inputs):
        online, _, batch = inputs
        modulation = meta_net.modulation(meta.hidden)
        targets, values, meta = case.rule(meta_net, inputs, meta)
        features = functools.partial(disco.make_features, values=values, moments=meta.moments)
        step_features, actions = features(meta_net.embeddings, *inputs)
        meta_features, meta_actions = features(meta_net.lifetime_embeddings, *inputs)
        hidden = disco.backward_lstm(meta_net.backward_lstm, step_features, batch.done[:-1])
        mid = {
            "main_input": step_features,
            "main_act_cond_emb": actions,
            "meta_input": meta_features,
            "meta_act_cond_emb": meta_actions,
            "lstm_out": hidden,
            "mult_out": hidden * modulation,
            "meta_x_avg": disco.embed_update(
                meta_net, meta_features, hidden * modulation, targets.y
            ),
        }
        grad = jax.value_and_grad(case.loss, has_aux=True)
        # A target on a bin: the original adds q to target - q, which misses it by this or nothing.
        gradients = [grad(online, targets, values.returns + miss) for miss in (0.0, 1e-13)]
        return targets, values, meta, mid, gradients

    run = on_devices(run)
    rest = stack(case.meta_net), stack(case.inputs)
    first = jax.tree.map(lambda x: x[0], run(stack(case.meta), *rest))
    second = jax.tree.map(lambda x: x[0], run(stack(first[2]), *rest))
    return case, first, second


@pytest.fixture(scope="module", params=["synthetic", "released"])
def rule(request):
    jax.config.update("jax_disable_most_optimizations", DOUBLE)  # they round float32 differently
    try:
        return rule_case(request.param)
    finally:  # before other tests compile
        jax.config.update("jax_disable_most_optimizations", True)


def normalized(x, meta):
    mean, std = meta.moments.mean_and_std()
    return (x - mean) / std


def check_targets(golden, section, targets, values, meta):
    close(targets.logits, golden[f"{section}/pi"], LOOSE)
    close(targets.y, golden[f"{section}/y"], LOOSE)
    close(targets.z, golden[f"{section}/z"], LOOSE)
    close(normalized(values.advantage, meta), golden[f"{section}/normalized_adv"], LOOSE)
    close(meta.hidden, golden[f"{section}/rnn_hidden"], EXACT)
    close(meta.cell, golden[f"{section}/rnn_cell"], EXACT)


def test_targets_of_the_rule(rule):
    case, (targets, values, meta, mid, _), _ = rule
    check_targets(case.golden, "A/out", targets, values, meta)
    summary = case.meta_net.summary(mid["mult_out"])
    close(summary, case.golden["A/out/meta_input_emb"], LOOSE)


def test_the_rule_remembers_its_first_update_in_its_second(rule):
    case, _, (targets, values, meta, _, _) = rule
    check_targets(case.golden, "A/out2", targets, values, meta)


def test_values_and_advantages(rule):
    case, (_, values, meta, _, _), _ = rule
    expected = {
        "returns": "q_target",
        "advantage": "adv",
        "action_advantage": "qv_adv",
        "td": "q_td",
    }
    for name, reference in expected.items():
        close(getattr(values, name), case.golden[f"A/out/{reference}"], LOOSE)
    close(disco.expected_return(case.online.q), case.golden["A/out/q_value"], LOOSE)
    normal = normalized(values.action_advantage, meta)
    close(normal, case.golden["A/out/normalized_qv_adv"], LOOSE)
    # The original has the moments of td as well, which it only logs.
    td = moments(case.golden.group("A/in/td_ema"))
    (td,) = on_devices(lambda td: (td.add(values.td, case.config.ema_decay),))(stack(td))
    td = jax.tree.map(lambda x: x[0], td)
    check_ema(case.golden, "A/out/td_ema", td)
    _, std = td.mean_and_std()
    close(values.td / std, case.golden["A/out/normalized_q_td"], LOOSE)
    check_ema(case.golden, "A/out/adv_ema", meta.moments)


def check_ema(golden, name, found):
    expected = moments(golden.group(name))
    close(found.raw, expected.raw, LOOSE)
    close(found.decay_product, expected.decay_product, EXACT)


def test_features_and_the_lifetime_input(rule):
    case, (_, _, _, mid, _), _ = rule
    exact = ("main_act_cond_emb", "meta_act_cond_emb", "meta_x_avg")
    for name, found in mid.items():
        close(found, case.golden[f"A/mid/{name}"], EXACT if name in exact else LOOSE)


def test_loss_and_its_gradient(rule):
    case, (_, values, _, _, [((loss, metrics), gradient), (_, missing)]), _ = rule
    close(loss, total_loss(metrics, case.config), EXACT)
    close(loss, case.golden["A/out/total_loss"], LOOSE)
    expected = disco.AgentOutput(**case.golden.group("A/out/grad_agent_out"))
    for name in ("logits", "y", "z", "aux_pi"):
        close(getattr(gradient, name), getattr(expected, name), LOOSE)
    target = values.returns
    squashed = jnp.sign(target) * (jnp.sqrt(abs(target) + 1) - 1) + 1e-3 * target
    on_bin = squashed % 1 == 0  # [T, B]
    on_bin = jnp.concatenate([on_bin, on_bin[:1] & False])[:, :, None, None]
    nearer = abs(missing.q - expected.q).max(-1, keepdims=True) < LOOSE
    gradient = gradient._replace(q=jnp.where(on_bin & nearer, missing.q, gradient.q))
    close(gradient.q, expected.q, LOOSE)
    norm = jnp.sqrt(sum((x**2).sum() for x in jax.tree.leaves(gradient)))
    close(norm, case.golden["A/out/grad_agent_out_global_norm"], LOOSE)


def test_gradient_with_respect_to_the_meta_network(rule):
    case, _, _ = rule

    def total(meta_net, inputs, meta):
        online, *_ = inputs
        losses = []
        for _ in range(2):
            targets, values, meta = case.rule(meta_net, inputs, meta)
            loss, _ = case.loss(online, targets, values.returns)
            losses.append(loss)
        return sum(losses)

    run = on_devices(jax.value_and_grad(total))
    value, grads = run(stack(case.meta_net), stack(case.inputs), stack(case.meta))
    close(value[0], case.golden["A/metagrad/value"], LOOSE)
    layers = jax.tree.leaves(disco.MetaNetwork())
    names = [f"{layer.name}/{part}" for layer in layers for part in "wb"]
    expected = case.golden.group("A/metagrad/norm")
    assert sorted(names) == sorted(expected)
    for name, x in zip(names, jax.tree.leaves(grads), strict=True):
        close(jnp.linalg.norm(x), expected[name], LOOSE)


# ---------------------------------------------------------------- B, D: an agent and its updates
AGENT_NAMES = {
    "torso_0": "~_embedding_pass/torso/~/linear_0",
    "torso_1": "~_embedding_pass/torso/~/linear_1",
    "logits": "~_head_pass/torso_head/~/linear_0",
    "y": "~_head_pass/torso_head_1/~/linear_0",
    "cell": "linear",
    "gates": "action_cond/linear",
    "z_0": "mlp/~/linear_0",
    "z_1": "mlp/~/linear_1",
    "aux_pi_0": "mlp_1/~/linear_0",
    "aux_pi_1": "mlp_1/~/linear_1",
    "q_0": "mlp_2/~/linear_0",
    "q_1": "mlp_2/~/linear_1",
}
NUM_ACTIONS = 3


class Learner(NamedTuple):
    """What an update reads and replaces."""

    params: Any
    target_params: Any
    opt_state: Any
    meta: disco.MetaState


def agent_params(group):
    """The original's arrays as disco.py's."""
    params = {}
    for name, original in AGENT_NAMES.items():
        w, b = (group[f"mlp/{original}/{part}"] for part in "wb")
        params[name] = {"kernel": w, "bias": b}
    return {"params": params}


def learner(golden, size):
    """(state, network, optimizer, config) at the start of sections B and D, on `size` devices."""
    sizes = {"hidden_size": 32, "feature_size": 16, "model_size": 8, "branch_size": 12}
    config = disco.Config(**sizes)
    network, optimizer = disco.Agent(NUM_ACTIONS, config), disco.make_optimizer(config)
    params = agent_params(golden.group("B/in/params"))
    state = Learner(
        params=params,
        target_params=agent_params(golden.group("B/in/target_params")),
        opt_state=optimizer.init(params),
        meta=lifetime(),
    )
    return stack(state, size), network, optimizer, config


def rollout(golden, step):
    """Rewards and ends came with the next observation; here they belong to the action."""
    group = golden.group(f"B/in/rollout{step}")
    shift = lambda x: jnp.concatenate([x[1:], jnp.zeros_like(x[:1])])
    reset = ~group["discounts"]
    return transitions(
        obs=group["obs"].reshape(*reset.shape, -1),
        action=group["actions"],
        logits=group["behaviour_logits"],
        reward=shift(group["rewards"]),
        done=shift(reset),
        reset=reset,
    )


def three_updates(size):
    golden, meta_net = released()
    state, network, optimizer, config = learner(golden, size)

    def update(state, batch, meta_net):
        online = network.apply(state.params, batch.obs)
        target = network.apply(state.target_params, batch.obs)
        values = disco.compute_values(online, target, batch, config)
        new, targets, metrics = disco.learn(meta_net, state, batch, network, optimizer, config)
        steps = jax.tree.map(lambda x, y: x - y, new.params, state.params)
        norm = jnp.sqrt(sum((x**2).sum() for x in jax.tree.leaves(steps)))
        advantage = normalized(values.advantage, new.meta)
        metrics |= {"update_norm": norm, "total_loss": total_loss(metrics, config)}
        return new, targets, metrics, online, values, advantage

    update, records = on_devices(update, size), []
    for step in range(3):
        split = lambda x: x.reshape(x.shape[0], size, -1, *x.shape[2:]).swapaxes(0, 1)
        batch = jax.tree.map(split, rollout(golden, step))  # [devices, L, B / devices, ...]
        state, *record = update(state, batch, stack(meta_net, size))
        records.append(record)
    return golden, state, records


@pytest.fixture(scope="module")
def one_device():
    return three_updates(1)


@pytest.fixture(scope="module")
def two_devices():
    return three_updates(2)


def check_final(golden, section, state):
    for device in range(len(state.meta.hidden)):
        final = jax.tree.map(lambda x, device=device: x[device], state)
        found = {"params": final.params, "target_params": final.target_params}
        found |= {"adam_mu": final.opt_state[0].mu, "adam_nu": final.opt_state[0].nu}
        for name, tree in found.items():
            if group := golden.group(f"{section}/{name}"):
                exact = EXACT if name == "target_params" else LOOSE
                jax.tree.map(functools.partial(close, tolerance=exact), tree, agent_params(group))
        close(final.meta.hidden, golden[f"{section}/rnn_hidden"], EXACT)
        close(final.meta.cell, golden[f"{section}/rnn_cell"], EXACT)
        check_ema(golden, f"{section}/adv_ema", final.meta.moments)


def test_agent_network(one_device):
    golden, _, records = one_device
    online = records[0][2]
    for name, expected in golden.group("B/out/net").items():
        close(getattr(online, name)[0], expected, LOOSE)


@pytest.mark.parametrize("step", range(3))
def test_three_updates(one_device, step):
    golden, _, records = one_device
    targets, metrics, _, values, advantage = records[step]
    section = f"B/out/step{step}"
    close(targets.logits[0], golden[f"{section}/pi"], LOOSE)
    close(targets.y[0].mean(-1), golden[f"{section}/y_mean_last"], LOOSE)
    close(targets.z[0].mean(-1), golden[f"{section}/z_mean_last"], LOOSE)
    close(values.returns[0], golden[f"{section}/q_target"], LOOSE)
    close(advantage[0], golden[f"{section}/normalized_adv"], LOOSE)
    log = {"total_loss": "total_loss", "optim/grad_norm": "global_gradient_norm"}
    for name, reference in (log | {"update_norm": "global_update_norm"}).items():
        close(metrics[name][0], golden[f"{section}/log/{reference}"], LOOSE)


def test_state_after_three_updates(one_device):
    golden, state, _ = one_device
    check_final(golden, "B/out/final", state)


def test_two_devices(two_devices):
    golden, state, records = two_devices
    for step, (_, metrics, *_) in enumerate(records):
        section = f"D/out/step{step}/log"
        for name in ("total_loss", "value/explained_variance"):
            assert metrics[name][0] == metrics[name][1]
        close(metrics["total_loss"][0], golden[f"{section}/total_loss"].mean(), LOOSE)
        close(metrics["optim/grad_norm"], golden[f"{section}/global_gradient_norm"], LOOSE)
        close(metrics["update_norm"], golden[f"{section}/global_update_norm"], LOOSE)
    check_final(golden, "D/out/final", state)


# ------------------------------------------------------------------------ C, E: optimizer, Catch
def test_optimizer_clips_each_entry_after_adam():
    golden, _ = released()
    lr = float(golden["C/in/lr"])
    optimizer = disco.make_optimizer(disco.Config(lr=lr))
    grads = golden["C/in/grads"]
    clipped = abs(abs(golden["C/out/updates"]) - lr) < 1e-12
    assert clipped.any()
    params = jnp.zeros_like(grads[0])

    def step(state, grad):
        updates, state = optimizer.update(grad, state)
        return state, updates

    state, updates = jax.lax.scan(step, optimizer.init(params), grads)
    close(updates, golden["C/out/updates"], EXACT)
    close(state[0].mu, golden["C/out/mu"], EXACT)
    close(state[0].nu, golden["C/out/nu"], EXACT)


def test_catch_is_the_original():
    golden, _ = released()
    reset, step, num_actions = disco.make_env(disco.Config())
    assert num_actions == 3
    states = golden["E/out/state_bally_ballx_pady_padx"]  # [41, 3, 4]
    ended = golden["E/out/step_type"] == 2
    keys = jax.random.split(jax.random.key(0), 3)
    _, fresh = jax.vmap(reset)(keys)
    assert (fresh.paddle_y == 7).all() and (fresh.paddle_x == 4).all()
    step = jax.jit(jax.vmap(step))
    for t, action in enumerate(golden["E/in/actions"]):
        y, x, paddle_y, paddle_x = states[t].T.astype(jnp.int32)
        before = fresh.replace(ball_y=y, ball_x=x, paddle_y=paddle_y, paddle_x=paddle_x)
        obs, state, reward, terminated, truncated, next_obs = step(keys, before, action)
        assert (terminated == ended[t + 1]).all() and not truncated.any()
        assert (reward == golden["E/out/reward"][t + 1]).all()
        y, x, paddle_y, paddle_x = states[t + 1].T
        assert (state.ball_y == y).all() and (state.paddle_x == paddle_x).all()
        assert (state.paddle_y == paddle_y).all()
        assert ((state.ball_x == x) | terminated).all()  # a new ball starts anywhere
        obs, next_obs = obs.reshape(-1, 8, 8), next_obs.reshape(-1, 8, 8)
        seen = golden["E/out/obs"][t + 1][..., 0]
        assert (obs == seen)[~terminated].all() and (next_obs == seen)[~terminated].all()
        assert (obs[terminated][:, 7] == seen[terminated][:, 7]).all()
        assert (obs[terminated][:, 0].sum(-1) == 1).all()
    assert ended.any()


# -------------------------------------------------------------------------------- the baselines
def test_vtrace_is_that_of_rlax():
    keys = jax.random.split(jax.random.key(0), 4)
    steps, batch, trace_lambda = 7, 5, 0.8
    reward = jax.random.normal(keys[0], (steps, batch))
    done = jax.random.bernoulli(keys[1], 0.3, (steps, batch))
    value = jax.random.normal(keys[2], (steps + 1, batch))
    ratio = jnp.exp(jax.random.normal(keys[3], (steps, batch)))
    clipped = jnp.minimum(ratio, 1.0)
    advantage, target = disco.vtrace(reward, done, value, clipped, 0.9, trace_lambda)
    inputs = (value[:-1], value[1:], reward, 0.9 * (1 - done), ratio)
    vtrace = functools.partial(rlax.vtrace_td_error_and_advantage, lambda_=trace_lambda)
    expected = jax.vmap(vtrace, in_axes=1, out_axes=1)(*inputs)
    close(advantage, expected.pg_advantage, EXACT)
    close(target - value[:-1], expected.errors, EXACT)


def test_the_value_after_an_episode_is_never_used():
    """A simulator may end an episode because its state is NaN."""
    reward, done = jnp.ones((2, 1)), jnp.array([[False], [True]])
    value, ones = jnp.array([[0.0], [0.0], [jnp.nan]]), jnp.ones((2, 1))
    advantage, _ = disco.vtrace(reward, done, value, ones, 0.9, 0.8)
    close(advantage[:, 0], np.array([1.72, 1.0]), EXACT)
    target = disco.retrace(reward, done, value, value[:-1], 0.8 * ones, 0.9)
    close(target[:, 0], np.array([1.72, 1.0]), EXACT)


def baseline_advantage(rule, logits, reward, done):
    """Advantages and value targets [T] of action 0, replayed from a uniform policy."""
    config = disco.Config(rule=rule, gamma=0.5, ema_decay=0.5)
    zeros = jnp.zeros((5, 1))
    output = disco.AgentOutput(logits, value=jnp.ones((5, 1, 601)))  # values are zero
    batch = transitions(
        action=zeros.astype(int),
        logits=jnp.zeros((5, 1, 3)),
        reward=jnp.array(reward)[:, None],
        done=jnp.array(done)[:, None],
    )
    run = lambda meta: disco.baseline_rule(output, batch, meta, config)
    advantage, target, _ = on_devices(run)(stack(lifetime()))
    return advantage[0, :, 0], target[0, :, 0]


def test_policy_gradient_has_normalized_returns_as_advantages():
    """Discounted, to the end of the episode or the trajectory."""
    done = [False, True, False, False, False]
    rewards = [1.0, 2.0, 4.0, 8.0, 0.0]
    advantage, _ = baseline_advantage("policy_gradient", jnp.zeros((5, 1, 3)), rewards, done)
    expected = np.array([2.0, 2.0, 8.0, 8.0])
    close(advantage, (expected - expected.mean()) / expected.std(), 1e-5)


@pytest.mark.parametrize("rule", ["actor_critic", "policy_gradient"])
def test_an_abandoned_action_is_not_pushed_further(rule):
    """A replayed action that the policy hardly takes has no advantage, whatever the mean is."""
    logits = jnp.zeros((5, 1, 3)).at[1, 0, 0].set(-100.0)
    advantage, _ = baseline_advantage(rule, logits, [1.0, 2.0, 4.0, 8.0, 0.0], [True] * 5)
    others = advantage[jnp.array([0, 2, 3])]
    assert abs(advantage[1]) < 1e-6 < abs(others).min()
    if rule == "actor_critic":
        close(others, np.array([1.0, 4.0, 8.0]), LOOSE)


def test_policy_gradient_has_no_critic():
    """Neither a value head nor a value loss reaches the shared torso."""
    config = disco.Config(rule="policy_gradient", vf_coef=100.0, ent_coef=0.01, **SIZES)
    network, optimizer = disco.Agent(3, config), disco.make_optimizer(config)
    params = network.init(jax.random.key(0), jnp.ones(2))
    assert set(params["params"]) == {"torso_0", "torso_1", "logits"}
    shape = (5, 2)
    batch = transitions(
        obs=jax.random.normal(jax.random.key(1), (*shape, 2)),
        action=jnp.zeros(shape, int),
        logits=jnp.zeros((*shape, 3)),
        reward=jnp.ones(shape),
        done=jnp.zeros(shape, bool),
        reset=jnp.zeros(shape, bool),
    )
    state = Learner(params, params, optimizer.init(params), lifetime())
    learn = lambda state: disco.learn(None, state, batch, network, optimizer, config)
    _, _, metrics = on_devices(learn)(stack(state))
    assert "loss/value" not in metrics and "value/explained_variance" not in metrics
    loss, metrics = disco.baseline_loss(
        network.apply(params, batch.obs), jnp.ones((4, 2)), None, batch, config
    )
    close(loss, metrics["loss/policy"] - config.ent_coef * metrics["policy/entropy"], EXACT)


# ---------------------------------------------------------------------------------- the harness
SIZES = {"hidden_size": 8, "feature_size": 8, "model_size": 4, "branch_size": 4}
SMALL = SIZES | {
    "weights": "random",
    "num_envs": 2,
    "num_steps": 8,
    "replay_batch": 4,
    "replay_size": 6,
    "eval_episodes": 3,
}


@pytest.fixture
def single():
    """These tests have no float64 reference."""
    if DOUBLE:
        pytest.skip("is about float32")


@functools.cache
def programs(changes):
    return disco.make_train(disco.Config(**{**SMALL, **dict(changes)}))


def start(updates=2, calls=1, **changes):
    """(state, train): a call of train makes so many updates."""
    sizes = {"num_evals": calls, "total_timesteps": 16 * updates * calls}
    init, train, *_ = programs(tuple((sizes | changes).items()))
    return init(jax.random.split(jax.random.PRNGKey(0), jax.local_device_count())), train


def copy(tree):
    return jax.tree.map(np.array, tree)


@pytest.mark.usefixtures("single")
@pytest.mark.parametrize(
    "changes",
    [
        {"rule": "actor_critic"},
        {"rule": "policy_gradient"},
        {"env_id": "Breakout-MinAtar", "num_seeds": 2},
    ],
    ids=str,
)
def test_updates_wait_for_the_replay_and_then_change_everything(changes):
    state, train = start(**changes)
    before = copy(state)
    state, metrics = train(state)  # of the first two updates, the second has four trajectories
    metrics = {name: np.asarray(x).reshape(-1, 2).T for name, x in metrics.items()}
    assert np.isnan(metrics["loss/policy"][0]).all()
    assert (metrics["optim/grad_norm"][0] == 0).all()
    for name in ("policy/entropy", "optim/grad_norm"):
        assert np.isfinite(metrics[name][1]).all() and (metrics[name][1] > 0).all()
    assert np.isfinite(metrics["loss/policy"][1]).all()
    for name in ("eval/return", "eval/length"):
        assert np.isnan(metrics[name][0]).all() and np.isfinite(metrics[name][1]).all()
    after = copy(state)
    changed = jax.tree.map(lambda x, y: (x != y).any(), before.params, after.params)
    assert all(jax.tree.leaves(changed)), changed
    assert (after.updates_done == 2).all()


@pytest.mark.usefixtures("single")
def test_the_replay_holds_the_latest_trajectories_in_order():
    state, train = start(calls=3, env_id="Catch-5x5")
    replays = []
    for _ in range(3):
        state, _ = train(state)
        replays.append(copy(jax.tree.map(lambda x: x[0, 0].swapaxes(0, 1), state.replay)))
    assert all(replay.action.shape == (6, 8) for replay in replays)
    first, second, third = (replay.obs for replay in replays)
    assert not first[4:].any() and second[4:].any()
    assert (first[2:4] == second[2:4]).all() and (first[:2] != second[:2]).any()
    assert (second[:2] == third[:2]).all() and (second[2:4] != third[2:4]).any()
    replay = replays[-1]
    assert (replay.reset[:, 1:] == replay.done[:, :-1]).all() and replay.done.any()
    row = replay.obs.reshape(6, 8, 5, 5)[..., :4, :].any(-1).argmax(-1)  # of the ball, [6, 8]
    assert (row[:, 1:] == np.where(replay.done[:, :-1], 0, row[:, :-1] + 1)).all()
    assert (abs(replay.reward) == replay.done).all()
    assert replay.logits.shape == (6, 8, 3)


@pytest.mark.usefixtures("single")
def test_the_best_parameters_are_those_of_the_best_evaluation():
    state, train = start(calls=3, env_id="Catch-5x5")
    returns, params = [], []
    for _ in range(3):
        state, metrics = train(state)
        returns.append(float(metrics["eval/return"][0, 0, -1]))
        params.append(copy(state.params))
        assert (np.asarray(state.eval_return) == returns[-1]).all()
    assert len(set(returns)) > 1
    assert (np.asarray(state.best_return) == max(returns)).all()
    best = params[int(np.argmax(returns))]
    jax.tree.map(np.testing.assert_array_equal, copy(state.best_params), best)


@pytest.mark.usefixtures("single")
def test_the_target_network_of_a_new_run_starts_at_the_given_parameters():
    """As --init-from replaces `params` alone."""
    state, train = start(updates=1, calls=2, rule="actor_critic")
    params = jax.tree.map(lambda x: x + 1, copy(state.params))
    state, _ = train(state._replace(params=params))  # does not learn yet
    jax.tree.map(np.testing.assert_array_equal, copy(state.params), params)
    jax.tree.map(np.testing.assert_array_equal, copy(state.target_params), params)
    state, _ = train(state)
    near = functools.partial(np.testing.assert_allclose, rtol=1e-6)
    jax.tree.map(near, copy(state.target_params), params)
    changed = jax.tree.map(lambda x, y: (x != y).any(), copy(state.params), params)
    assert all(jax.tree.leaves(changed))


@pytest.mark.usefixtures("single")
def test_evaluations_have_random_keys_of_their_own(monkeypatch):
    """The return of an episode tells the key of its reset: none is one of the training's."""

    def make_env(config):
        def reset(key):
            number = (jax.random.key_data(key)[-1] % 2**20).astype(jnp.float32)
            return jnp.zeros(2), number

        def step(key, number, action):
            obs, new = reset(key)
            done = jnp.bool(True)
            return obs, new, number, done, ~done, obs

        return reset, step, 2

    monkeypatch.setattr(disco, "make_env", make_env)
    sizes = {"rule": "policy_gradient", "eval_episodes": 1, "replay_size": 64}
    config = disco.Config(**SMALL | sizes, total_timesteps=16 * 8, num_evals=4)
    init, train, *_ = disco.make_train(config)
    state = init(jax.random.split(jax.random.PRNGKey(0), jax.local_device_count()))
    evaluated = []
    for _ in range(4):
        state, _ = train(state)
        evaluated.append(float(state.eval_return[0, 0]))
    trained = np.asarray(state.replay.reward)[0, 0, :, :16].ravel().tolist()
    assert len(set(trained)) == 16 * 8 and len(set(evaluated)) == 4
    assert not set(trained) & set(evaluated)


# --------------------------------------------------------------------------------------- weights
@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "disco_rl" / "disco_103.npz"


def test_without_network_the_error_says_what_to_run(cache, monkeypatch):
    def unreachable(*args, **options):
        raise disco.urllib.error.URLError("no route")

    monkeypatch.setattr(disco.urllib.request, "urlopen", unreachable)
    with pytest.raises(disco.ConfigError) as error:
        disco.make_train(disco.Config())
    assert "no route" in str(error.value) and f"curl --create-dirs -o {cache}" in str(error.value)
    assert "\n" not in str(error.value)
    assert not cache.exists()
    disco.make_train(disco.Config(rule="actor_critic"))  # needs none


def test_a_download_is_kept_only_if_it_is_what_was_released(cache, monkeypatch):
    served = io.BytesIO(b"something else")
    monkeypatch.setattr(disco.urllib.request, "urlopen", lambda *args, **options: served)
    with pytest.raises(disco.ConfigError, match="sha256"):
        disco.load_weights("disco103")
    assert not cache.exists()
    content = find("disco_103.npz").read_bytes()
    served = io.BytesIO(content)
    meta_net = disco.load_weights("disco103")
    assert cache.read_bytes() == content
    monkeypatch.delattr(disco.urllib.request, "urlopen")
    jax.tree.map(np.testing.assert_array_equal, disco.load_weights("disco103"), meta_net)  # cached
    assert [path.name for path in cache.parent.iterdir()] == [cache.name]
    cache.write_bytes(content[:-1])
    with pytest.raises(disco.ConfigError, match="sha256"):
        disco.load_weights("disco103")


def test_weights_of_the_wrong_kind(cache, tmp_path):
    with pytest.raises(disco.ConfigError, match="nothing.npz"):
        disco.load_weights(str(tmp_path / "nothing.npz"))
    (tmp_path / "text.npz").write_text("no arrays")
    with pytest.raises(disco.ConfigError, match="text.npz"):
        disco.load_weights(str(tmp_path / "text.npz"))
    weights = synthetic_weights()
    layer = min(weights).rpartition("/")[0]
    for changes in ({f"{layer}/w": np.zeros(3)}, {f"{layer}/b": np.zeros(3)}):
        np.savez(tmp_path / "wrong.npz", **weights | changes)
        with pytest.raises(disco.ConfigError, match=layer):
            disco.load_weights(str(tmp_path / "wrong.npz"))
    weights.pop(f"{layer}/w")
    np.savez(tmp_path / "less.npz", **weights)
    with pytest.raises(disco.ConfigError, match=layer):
        disco.load_weights(str(tmp_path / "less.npz"))


class Crafted:
    """Unpickling it creates a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_weights_are_never_unpickled(tmp_path):
    weights = synthetic_weights()
    weights[min(weights)] = np.array(Crafted(tmp_path / "executed"), dtype=object)
    np.savez(tmp_path / "crafted.npz", **weights)
    with pytest.raises(disco.ConfigError, match="crafted.npz"):
        disco.load_weights(str(tmp_path / "crafted.npz"))
    assert not (tmp_path / "executed").exists()
    (tmp_path / "pickle.npz").write_bytes(pickle.dumps(Crafted(tmp_path / "executed")))
    with pytest.raises(disco.ConfigError, match="pickle.npz"):
        disco.load_weights(str(tmp_path / "pickle.npz"))
    assert not (tmp_path / "executed").exists()


def test_random_weights_are_truncated_and_scaled():
    meta_net = disco.random_weights(0)
    for layer, released in zip(
        jax.tree.leaves(meta_net, is_leaf=lambda x: isinstance(x, disco.Linear)),
        jax.tree.leaves(disco.MetaNetwork()),
        strict=True,
    ):
        stddev = released.stddev or released.shape[-2] ** -0.5
        assert layer.w.shape == released.shape[-2:] and not layer.b.any()
        assert abs(layer.w).max() <= 2 * stddev
        if layer.w.size > 1000:
            assert abs(layer.w.std() / stddev - 0.88) < 0.03
    stddevs = {released.stddev for released in disco.MetaNetwork() if hasattr(released, "stddev")}
    assert stddevs == {None, 0.3, 1.0}


# ---------------------------------------------------------------------------------- wrong inputs
@pytest.mark.parametrize(
    "changes, message",
    [
        ({"env_id": "Catch-8x9x"}, "did you mean"),
        ({"env_id": "Catch-1x5"}, "did you mean Catch-8x8"),
        ({"env_id": "Pendulum-v1"}, "continuous"),
        ({"env_params": '{"speed": 1}'}, "max_steps_in_episode"),
        ({"env_params": '{"max_steps_in_episode": 5.5}'}, "max_steps_in_episode"),
        ({"num_steps": 1}, "trajectories of 1 steps"),
        ({"total_timesteps": 16}, "2 trajectories"),
        ({"replay_size": 3}, "3 trajectories"),
        ({"num_envs": 8}, "6 trajectories"),
    ],
    ids=str,
)
def test_a_wrong_input_says_what_to_change(changes, message):
    with pytest.raises(disco.ConfigError, match=message) as error:
        disco.make_train(disco.Config(**SMALL | {"total_timesteps": 128, "num_evals": 1} | changes))
    assert "\n" not in str(error.value)


ON_EIGHT_DEVICES = {  # options: shapes of actions, observations and returns
    "{}": "(2, 1, 29, 512) (2, 1, 1, 64) (2, 1, 100)",
    '{"num_envs": 6, "replay_size": 12, "replay_batch": 6}': "(6, 1, 29, 2) (6, 1, 1, 64)",
    '{"num_envs": 8}': "(8, 1, 29, 128) (8, 1, 1, 64)",
    '{"num_envs": 3, "replay_size": 7, "replay_batch": 5}': "(1, 1, 29, 7) (1, 1, 3, 64)",
}
EIGHT_DEVICES = f"""
import disco, jax
assert jax.device_count() == 8
for changes in ({", ".join(ON_EIGHT_DEVICES)}):
    init, train, *_ = disco.make_train(disco.Config(weights="random", **changes))
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.PRNGKey(0), 8))
    state = jax.eval_shape(init, keys)
    _, metrics = jax.eval_shape(train, state)
    print(state.replay.action.shape, state.runners.obs.shape, metrics["eval/return"].shape)
"""


@pytest.mark.usefixtures("single")
def test_as_many_devices_as_divide_the_environments():
    command = [sys.executable, "-W", "ignore", "-c", EIGHT_DEVICES]
    result = subprocess.run(command, cwd=ROOT, env=with_devices(8), capture_output=True, text=True)
    lines = result.stdout.splitlines()
    assert len(lines) == len(ON_EIGHT_DEVICES), result.stderr
    for line, shapes in zip(lines, ON_EIGHT_DEVICES.values(), strict=True):
        assert line.startswith(shapes)


# ------------------------------------------------------------------------------------- whole runs
@pytest.mark.usefixtures("single")
def test_a_killed_run_continues_to_the_same_bytes(tmp_path, monkeypatch):
    sizes = SMALL | {"total_timesteps": 128, "num_evals": 4, "env_id": "Catch-5x5"}
    programs = disco.make_train(disco.Config(**sizes))  # shared, as only the folders differ
    monkeypatch.setattr(disco, "make_train", lambda config: programs)
    whole = disco.main(disco.Config(**sizes, run_dir=str(tmp_path / "whole")))
    write, path = disco.write, tmp_path / "killed"
    killed = disco.Config(**sizes, run_dir=str(path))
    for calls in (1, 2):  # until the process dies, before and after a checkpoint
        left = [None] * calls

        def write_or_die(path, content, calls=calls, left=left):
            if path.suffix == ".msgpack":
                left.pop()
                if not left and calls == 1:
                    raise KeyboardInterrupt
            write(path, content)
            if path.suffix == ".msgpack" and not left:
                raise KeyboardInterrupt

        monkeypatch.setattr(disco, "write", write_or_die)
        with pytest.raises(KeyboardInterrupt):
            disco.main(killed)
    monkeypatch.setattr(disco, "write", write)
    again = disco.main(killed)
    assert learned(path) == learned(tmp_path / "whole")
    for name in ("eval_return_per_seed", "best_return_per_seed"):
        assert again[name] == whole[name]
    rows = read_rows(path)
    names = rows[0].keys()
    assert {"loss/y", "loss/z", "loss/aux_policy", "eval/length"} <= names
    assert not {"policy/approx_kl", "policy/clip_fraction"} & names
    assert len(rows) == 8 and all(any(row[name] for row in rows) for name in names)


@pytest.mark.usefixtures("single")
def test_any_option_may_change_when_a_run_is_continued(tmp_path):
    sizes = SMALL | {"rule": "policy_gradient", "env_id": "Catch-5x5", "num_evals": 2}
    words = ["--run-dir", tmp_path / "run"]
    config = disco.Config(**sizes, total_timesteps=64)
    code, _, err = run(disco, *flags(config), *words)
    assert code == 0, err
    changes = {"lr": "1e-3", "gamma": "0.9", "replay-batch": "2", "max-update": "0.5"}
    changes |= {"target-decay": "0.5", "ent-coef": "0.1", "eval-episodes": "5"}
    longer = ["--total-timesteps", "128", "--num-evals", "4"]
    options = [word for name, value in changes.items() for word in (f"--{name}", value)]
    code, _, err = run(disco, *words, *longer, *options)
    assert code == 0, err
    rates = [float(row["optim/lr"]) for row in read_rows(tmp_path / "run")]
    np.testing.assert_allclose(rates, [1e-2] * 4 + [1e-3] * 4, rtol=1e-6)
    files = content(tmp_path / "run")
    for wrong in (["--rule", "actor_critic"], ["--replay-size", "8"], ["--hidden-size", "4"]):
        code, _, err = run(disco, *words, *longer, *wrong, "--total-timesteps", "256")
        assert code == 2 and err.count("\n") == 1 and "checkpoint.msgpack" in err
    code, _, err = run(disco, *words, "--seed", str(2**32))
    assert code == 2 and "seed" in err
    assert content(tmp_path / "run") == files


@pytest.mark.usefixtures("single")
@pytest.mark.parametrize("rule", ["disco", "actor_critic", "policy_gradient"])
def test_it_trains_where_jax_computes_in_double_precision(rule):
    """The parameters, the replay and the statistics stay in single precision."""
    with jax.enable_x64(True):
        config = disco.Config(**SMALL | {"rule": rule, "env_id": "Catch-5x5"})
        init, train, *_ = disco.make_train(config)
        keys = jax.eval_shape(lambda: jax.random.split(jax.random.PRNGKey(0), 1))
        state = jax.eval_shape(init, keys)
        after, metrics = jax.eval_shape(train, state)
        describe = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
        assert describe(after) == describe(state)
        names = {x.dtype.name for x in jax.tree.leaves(state)}
        assert names == {"float32", "int32", "uint32", "bool"}
        assert {x.dtype.name for x in metrics.values()} == {"float32"}


def test_everything_in_float64():
    """This file again, where JAX computes in float64."""
    if DOUBLE:
        pytest.skip("is this very process")
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", __file__]
    env = {**os.environ, "JAX_ENABLE_X64": "1"}
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
