"""disco.py against arrays measured from the original code, and the harness around the rule.

tests/data holds the update rule alone, with meta-network weights made from a seed. The arrays of
the released weights, and those weights, are looked for beside the repository and in the cache.
Each set exists in float32 and in float64; the latter runs in a process of its own, where JAX is
told to compute in it, and is the one that no wrong formula survives.
"""

import functools
import io
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rlax
from conftest import ROOT

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
    rs, weights = np.random.RandomState(7), {}
    shapes = {}
    for name, shape in disco.WEIGHT_SHAPES.items():
        shapes |= {f"{name}/w": shape, f"{name}/b": shape[-1:]}
    for name in sorted(shapes):
        x = rs.standard_normal(shapes[name])
        scale = 0.1 if name.endswith("/b") else 1 / np.sqrt(np.prod(shapes[name][:-1]))
        weights[name] = (x * scale).astype(np.float32)
    return weights


@functools.cache
def load(source):
    """(golden arrays, meta-network weights) of the released or of the synthetic weights."""
    if source == "synthetic":
        golden, weights = Golden(DATA / f"disco_golden_synth{SUFFIX}.npz"), synthetic_weights()
    else:
        golden = Golden(find(f"disco_golden{SUFFIX}.npz"))
        weights = disco.load_weights(str(find("disco_103.npz")))
    return golden, {name: real(x) for name, x in weights.items()}


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


def on_devices(function, size=1):
    """The function as one of `size` devices runs it, which is what the axis of vmap means too."""
    return jax.jit(jax.vmap(function, axis_name="devices", axis_size=size))


def stack(tree, size=1):
    return jax.tree.map(lambda x: jnp.stack([x] * size), tree)


# ---------------------------------------------------------------------------- A: the rule alone
class RuleCase:
    """Section A: outputs of an agent go in, targets and the loss come out."""

    def __init__(self, source):
        self.golden, self.weights = load(source)
        golden = self.golden
        self.out, self.target_out = (
            disco.AgentOut(**golden.group(f"A/in/{name}")) for name in ("agent_out", "target_out")
        )
        last = lambda x: jnp.concatenate([x, jnp.zeros_like(x[:1])])  # a step that is never read
        mask = last(golden["A/in/loss_mask"])
        self.batch = disco.Transition(
            obs=None,
            action=golden["A/in/actions"],
            logits=golden["A/in/behaviour_logits"],
            reward=last(golden["A/in/rewards"]),
            done=last(golden["A/in/is_terminal"]),
            reset=~mask,
        )
        names = {"moment1": "first", "moment2": "second", "decay_product": "decay_product"}
        moments = lambda group: disco.Moments(**{names[k]: x for k, x in group.items()})
        self.meta = disco.MetaState(
            moments(golden.group("A/in/adv_ema")),
            moments(golden.group("A/in/td_ema")),
            golden["A/in/rnn_hidden"],
            golden["A/in/rnn_cell"],
        )
        self.config = disco.Config(weights="random")

    @property
    def inputs(self):
        return self.out, self.target_out, self.batch

    def rule(self, weights, inputs, meta):
        return disco.discovered_rule(weights, *inputs, meta, self.config)

    def loss(self, out, hat, target, batch):
        pick = lambda name: disco.of_action(getattr(out, name), batch.action)
        out = out._replace(**{name: pick(name) for name in ("z", "aux_pi", "q")})
        return disco.disco_loss(out, hat, target, batch, self.config)


@functools.cache
def rule_case(source):
    case = RuleCase(source)

    def run(meta, weights, inputs):
        out, target_out, batch = inputs
        hat, values, meta = case.rule(weights, inputs, meta)
        probabilities = jax.tree.map(jax.nn.softmax, (out, target_out))
        features = functools.partial(disco.make_features, weights)
        columns, by_action = features(disco.MAIN, *probabilities, batch, values)
        meta_columns, meta_by_action = features(disco.META, *probabilities, batch, values)
        mid = {
            "main_input": columns,
            "main_act_cond_emb": by_action,
            "meta_input": meta_columns,
            "meta_act_cond_emb": meta_by_action,
            "lstm_out": disco.look_back(weights, columns, batch.done[:-1]),
            "meta_x_avg": disco.lifetime_input(weights, meta_columns, hat),
        }
        grad = jax.grad(case.loss, has_aux=True)
        # A target on a bin: the original adds q to target - q, which misses it by this or nothing.
        gradients = [grad(out, hat, values.target + miss, batch) for miss in (0.0, 1e-13)]
        return hat, values, meta, mid, gradients

    run = on_devices(run)
    rest = stack(case.weights), stack(case.inputs)
    first = jax.tree.map(lambda x: x[0], run(stack(case.meta), *rest))
    second = jax.tree.map(lambda x: x[0], run(stack(first[2]), *rest))
    return case, first, second


@pytest.fixture(scope="module", params=["synthetic", "released"])
def rule(request):
    jax.config.update("jax_disable_most_optimizations", DOUBLE)  # they round float32 differently
    yield rule_case(request.param)
    jax.config.update("jax_disable_most_optimizations", True)


def check_hat(golden, section, hat, values, meta):
    close(hat.logits, golden[f"{section}/pi"], LOOSE)
    close(hat.y, golden[f"{section}/y"], LOOSE)
    close(hat.z, golden[f"{section}/z"], LOOSE)
    close(values.normalized_adv, golden[f"{section}/normalized_adv"], LOOSE)
    close(meta.hidden, golden[f"{section}/rnn_hidden"], EXACT)
    close(meta.cell, golden[f"{section}/rnn_cell"], EXACT)


def test_targets_of_the_rule(rule):
    case, (hat, values, meta, _, _), _ = rule
    check_hat(case.golden, "A/out", hat, values, meta)
    close(hat.emb[..., None], case.golden["A/out/meta_input_emb"], LOOSE)


def test_the_rule_remembers_its_first_update_in_its_second(rule):
    case, _, (hat, values, meta, _, _) = rule
    check_hat(case.golden, "A/out2", hat, values, meta)


def test_values_and_advantages(rule):
    case, (_, values, meta, _, _), _ = rule
    expected = {
        "target": "q_target",
        "adv": "adv",
        "qv_adv": "qv_adv",
        "normalized_qv_adv": "normalized_qv_adv",
        "td": "q_td",
    }
    for name, reference in expected.items():
        close(getattr(values, name), case.golden[f"A/out/{reference}"], LOOSE)
    q = disco.expected_value(case.out.q)
    close(q, case.golden["A/out/q_value"], LOOSE)
    _, std = disco.mean_and_std(meta.td)
    close(values.td / std, case.golden["A/out/normalized_q_td"], LOOSE)
    for name in ("adv", "td"):
        group, found = case.golden.group(f"A/out/{name}_ema"), getattr(meta, name)
        close(found.first, group["moment1"], LOOSE)
        close(found.second, group["moment2"], LOOSE)
        close(found.decay_product, group["decay_product"], EXACT)


def test_features_and_the_lifetime_input(rule):
    case, (_, _, _, mid, _), _ = rule
    exact = ("main_act_cond_emb", "meta_act_cond_emb", "meta_x_avg")
    for name, found in mid.items():
        close(found, case.golden[f"A/mid/{name}"], EXACT if name in exact else LOOSE)


def test_loss_and_its_gradient(rule):
    case, (_, values, _, _, [(gradient, metrics), (missing, _)]), _ = rule
    close(metrics["loss/total"], case.golden["A/out/total_loss"], LOOSE)
    expected = disco.AgentOut(**case.golden.group("A/out/grad_agent_out"))
    for name in ("logits", "y", "z", "aux_pi"):
        close(getattr(gradient, name), getattr(expected, name), LOOSE)
    on_bin = disco.squash(values.target) % 1 == 0  # [T, B]
    on_bin = jnp.concatenate([on_bin, on_bin[:1] & False])[:, :, None, None]
    nearer = abs(missing.q - expected.q).max(-1, keepdims=True) < LOOSE
    gradient = gradient._replace(q=jnp.where(on_bin & nearer, missing.q, gradient.q))
    close(gradient.q, expected.q, LOOSE)
    norm = jnp.sqrt(sum((x**2).sum() for x in jax.tree.leaves(gradient)))
    close(norm, case.golden["A/out/grad_agent_out_global_norm"], LOOSE)


def test_gradient_with_respect_to_the_meta_network(rule):
    case, _, _ = rule

    def total(weights, inputs, meta):
        out, _, batch = inputs
        losses = []
        for _ in range(2):
            hat, values, meta = case.rule(weights, inputs, meta)
            loss, _ = case.loss(out, hat, values.target, batch)
            losses.append(loss)
        return sum(losses)

    run = on_devices(jax.value_and_grad(total))
    value, grads = run(stack(case.weights), stack(case.inputs), stack(case.meta))
    close(value[0], case.golden["A/metagrad/value"], LOOSE)
    norms = {name: jnp.linalg.norm(x) for name, x in grads.items()}
    expected = case.golden.group("A/metagrad/norm")
    assert set(norms) == set(expected)
    for name in norms:
        close(norms[name], expected[name], LOOSE)


# ---------------------------------------------------------------- B, D: an agent and its updates
AGENT_NAMES = {
    "torso_0": "~_embedding_pass/torso/~/linear_0",
    "torso_1": "~_embedding_pass/torso/~/linear_1",
    "logits": "~_head_pass/torso_head/~/linear_0",
    "y": "~_head_pass/torso_head_1/~/linear_0",
    "cell": "linear",
    "z_0": "mlp/~/linear_0",
    "z_1": "mlp/~/linear_1",
    "aux_pi_0": "mlp_1/~/linear_0",
    "aux_pi_1": "mlp_1/~/linear_1",
    "q_0": "mlp_2/~/linear_0",
    "q_1": "mlp_2/~/linear_1",
}
NUM_ACTIONS = 3


def agent_params(group):
    """The original's arrays as disco.py's: its LSTM's kernel has the actions' rows first."""
    w = group["mlp/action_cond/linear/w"]
    gates = {"kernel": w[NUM_ACTIONS:], "bias": group["mlp/action_cond/linear/b"]}
    params = {"action_gates": w[:NUM_ACTIONS], "gates": gates}
    for name, original in AGENT_NAMES.items():
        w, b = (group[f"mlp/{original}/{part}"] for part in "wb")
        params[name] = {"kernel": w, "bias": b}
    return {"params": params}


def learner(golden, size):
    """(state, network, optimizer, config) at the start of sections B and D, on `size` devices."""
    sizes = {"hidden_size": 32, "feature_size": 16, "model_size": 8, "branch_size": 12}
    config = disco.Config(weights="random", lr=1e-2, **sizes)
    network, optimizer = disco.Agent(NUM_ACTIONS, config), disco.make_optimizer(config)
    params = agent_params(golden.group("B/in/params"))
    zero, one = jnp.zeros((), float), jnp.ones((), float)
    moments = disco.Moments(zero, zero, one)
    zeros = jnp.zeros(128, float)
    state = disco.RunnerState(**dict.fromkeys(disco.RunnerState._fields))._replace(
        params=params,
        target_params=agent_params(golden.group("B/in/target_params")),
        opt_state=optimizer.init(params),
        meta=disco.MetaState(moments, moments, zeros, zeros),
    )
    return stack(state, size), network, optimizer, config


def rollout(golden, step):
    """Rewards and ends came with the next observation; here they belong to the action."""
    group = golden.group(f"B/in/rollout{step}")
    shift = lambda x: jnp.concatenate([x[1:], jnp.zeros_like(x[:1])])
    reset = ~group["discounts"]
    return disco.Transition(
        group["obs"],
        group["actions"],
        group["behaviour_logits"],
        shift(group["rewards"]),
        shift(reset),
        reset,
    )


def three_updates(size):
    golden, weights = released()
    state, network, optimizer, config = learner(golden, size)

    def update(state, batch, weights):
        out = jax.vmap(network.apply, (None, 0))(state.params, batch.obs)
        target_out = jax.vmap(network.apply, (None, 0))(state.target_params, batch.obs)
        rule = disco.discovered_rule(weights, out, target_out, batch, state.meta, config)
        new, metrics = disco.learn(state, batch, weights, network, optimizer, config)
        steps = jax.tree.map(lambda x, y: x - y, new.params, state.params)
        norm = jnp.sqrt(sum((x**2).sum() for x in jax.tree.leaves(steps)))
        return new, metrics | {"update_norm": norm}, out, rule

    update, records = on_devices(update, size), []
    for step in range(3):
        split = lambda x: x.reshape(x.shape[0], size, -1, *x.shape[2:]).swapaxes(0, 1)
        batch = jax.tree.map(split, rollout(golden, step))  # [devices, L, B / devices, ...]
        state, *record = update(state, batch, stack(weights, size))
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
        for name in ("adv", "td"):
            group, moments = golden.group(f"{section}/{name}_ema"), getattr(final.meta, name)
            close(moments.first, group["moment1"], LOOSE)
            close(moments.second, group["moment2"], LOOSE)
            close(moments.decay_product, group["decay_product"], EXACT)


def test_agent_network(one_device):
    golden, _, records = one_device
    _, out, _ = records[0]
    for name, expected in golden.group("B/out/net").items():
        close(getattr(out, name)[0], expected, LOOSE)


@pytest.mark.parametrize("step", range(3))
def test_three_updates(one_device, step):
    golden, _, records = one_device
    metrics, _, (hat, values, _) = records[step]
    section = f"B/out/step{step}"
    close(hat.logits[0], golden[f"{section}/pi"], LOOSE)
    close(hat.y[0].mean(-1), golden[f"{section}/y_mean_last"], LOOSE)
    close(hat.z[0].mean(-1), golden[f"{section}/z_mean_last"], LOOSE)
    close(values.target[0], golden[f"{section}/q_target"], LOOSE)
    close(values.normalized_adv[0], golden[f"{section}/normalized_adv"], LOOSE)
    log = {"loss/total": "total_loss", "optim/grad_norm": "global_gradient_norm"}
    for name, reference in (log | {"update_norm": "global_update_norm"}).items():
        close(metrics[name][0], golden[f"{section}/log/{reference}"], LOOSE)


def test_state_after_three_updates(one_device):
    golden, state, _ = one_device
    check_final(golden, "B/out/final", state)


def test_two_devices(two_devices):
    golden, state, records = two_devices
    for step, (metrics, *_) in enumerate(records):
        section = f"D/out/step{step}/log"
        for name in ("loss/total", "value/explained_variance"):
            assert metrics[name][0] == metrics[name][1]
        close(metrics["loss/total"][0], golden[f"{section}/total_loss"].mean(), LOOSE)
        close(metrics["optim/grad_norm"], golden[f"{section}/global_gradient_norm"], LOOSE)
        close(metrics["update_norm"], golden[f"{section}/global_update_norm"], LOOSE)
    check_final(golden, "D/out/final", state)


# ------------------------------------------------------------------------ C, E: optimizer, Catch
def test_optimizer_clips_each_entry_after_adam():
    golden, _ = released()
    lr = float(golden["C/in/lr"])
    optimizer = disco.make_optimizer(disco.Config(weights="random", lr=lr))
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
    reset, step, _ = disco.make_env(disco.Config(weights="random"))
    states = golden["E/out/state_bally_ballx_pady_padx"]  # [41, 3, 4]
    ended = golden["E/out/step_type"] == 2
    keys = jax.random.split(jax.random.key(0), 3)
    for t, action in enumerate(golden["E/in/actions"]):
        y, x, paddle_y, paddle_x = states[t].T
        assert (paddle_y == 7).all()
        _, state, reward, terminated, truncated, _ = step(
            keys, disco.CatchState(y, x, paddle_x), action
        )
        assert (terminated == ended[t + 1]).all() and not truncated.any()
        assert (reward == golden["E/out/reward"][t + 1]).all()
        y, x, _, paddle_x = states[t + 1].T
        assert (state.ball_y == y).all() and (state.paddle_x == paddle_x).all()
        assert ((state.ball_x == x) | terminated).all()  # a new ball starts anywhere
    assert ended.any()
    for t in range(len(states) - 1):  # what is seen, from the states that lead there
        y, x, _, paddle_x = states[t].T
        obs, *_, last, _, final_obs = step(
            keys, disco.CatchState(y, x, paddle_x), golden["E/in/actions"][t]
        )
        seen = golden["E/out/obs"][t + 1]
        assert (obs == seen)[~last].all() and (final_obs == seen)[~last].all()
        assert (obs[last][:, 7] == seen[last][:, 7]).all()
        assert (obs[last][:, 0].sum((-1, -2)) == 1).all()


# -------------------------------------------------------------------------------- the baselines
def test_vtrace_is_that_of_rlax():
    keys = jax.random.split(jax.random.key(0), 4)
    steps, batch, trace_lambda = 7, 5, 0.8
    reward = jax.random.normal(keys[0], (steps, batch))
    discount = 0.9 * jax.random.bernoulli(keys[1], 0.7, (steps, batch))
    value = jax.random.normal(keys[2], (steps + 1, batch))
    ratio = jnp.exp(jax.random.normal(keys[3], (steps, batch)))
    adv, target = disco.compute_vtrace(reward, discount, value, ratio, trace_lambda)
    inputs = (value[:-1], value[1:], reward, discount, ratio)
    vtrace = functools.partial(rlax.vtrace_td_error_and_advantage, lambda_=trace_lambda)
    expected = jax.vmap(vtrace, in_axes=1, out_axes=1)(*inputs)
    close(adv, expected.pg_advantage, EXACT)
    close(target - value[:-1], expected.errors, EXACT)


def test_policy_gradient_needs_no_critic():
    """Its advantages are the discounted returns to the end of the episode or the trajectory."""
    config = disco.Config(rule="policy_gradient", gamma=0.5, ema_decay=0.5)
    zeros = jnp.zeros((5, 1))
    out = disco.AgentOut(jnp.zeros((5, 1, 3)), None, None, None, jnp.ones((5, 1, 601)))
    reward = jnp.array([1.0, 2.0, 4.0, 8.0, 0.0])[:, None]
    done = jnp.array([False, True, False, False, False])[:, None]
    batch = disco.Transition(None, zeros.astype(int), jnp.zeros((5, 1, 3)), reward, done, done)
    moments = disco.Moments(jnp.zeros(()), jnp.zeros(()), jnp.ones(()))
    run = lambda meta: disco.baseline_rule(out, batch, meta, config)
    meta = disco.MetaState(moments, moments, zeros[0], zeros[0])
    adv, target, *_ = on_devices(run)(stack(meta))
    expected = np.array([2.0, 2.0, 8.0, 8.0])
    close(target[0, :, 0], expected, EXACT)
    close(adv[0, :, 0], (expected - expected.mean()) / expected.std(), 1e-5)


@pytest.mark.parametrize("rule", ["actor_critic", "policy_gradient"])
def test_what_the_policy_has_given_up_is_not_pushed_further(rule):
    """A replayed action that is hardly taken any more has no advantage, whatever the mean is."""
    config = disco.Config(rule=rule, gamma=0.5, ema_decay=0.5)
    logits = jnp.zeros((5, 1, 3)).at[1, 0, 0].set(-100.0)
    out = disco.AgentOut(logits, None, None, None, jnp.ones((5, 1, 601)))
    reward = jnp.array([1.0, 2.0, 4.0, 8.0, 0.0])[:, None]
    done = jnp.ones((5, 1), bool)
    action = jnp.zeros((5, 1), int)
    batch = disco.Transition(None, action, jnp.zeros((5, 1, 3)), reward, done, done)
    moments = disco.Moments(jnp.zeros(()), jnp.zeros(()), jnp.ones(()))
    meta = disco.MetaState(moments, moments, jnp.zeros(1), jnp.zeros(1))
    run = lambda meta: disco.baseline_rule(out, batch, meta, config)[0]
    adv = on_devices(run)(stack(meta))[0, :, 0]
    assert abs(adv[1]) < 1e-6 < abs(adv[jnp.array([0, 2, 3])]).min()
    if rule == "actor_critic":  # values are zero: as the rewards are, not normalised
        close(adv[jnp.array([0, 2, 3])], np.array([1.0, 4.0, 8.0]), LOOSE)


# ---------------------------------------------------------------------------------- the harness
SMALL = {
    "weights": "random",
    "total_timesteps": 128,
    "num_envs": 2,
    "num_steps": 8,
    "replay_batch": 4,
    "replay_size": 6,
    "hidden_size": 8,
    "feature_size": 8,
    "model_size": 4,
    "branch_size": 4,
    "num_calls": 4,
    "num_evals": 2,
    "eval_episodes": 3,
}


@pytest.fixture
def single():
    """These tests have no float64 reference."""
    if DOUBLE:
        pytest.skip("is about float32")


def start(updates=2, **changes):
    init, train = disco.make_train(disco.Config(**{**SMALL, **changes}), updates)
    return init(jax.random.split(jax.random.key(0), jax.local_device_count())), train


def copy(tree):
    return jax.tree.map(np.array, tree)


@pytest.mark.usefixtures("single")
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rule": "actor_critic", "ent_coef": 0.01},
        {"rule": "policy_gradient"},
        {"env_id": "CartPole-v1"},
        {"env_id": "Catch-bsuite", "num_seeds": 2},
        {"env_id": "Breakout-MinAtar"},
    ],
    ids=str,
)
def test_updates_wait_for_the_replay_and_then_change_everything(changes):
    state, train = start(**changes)
    before = copy(state)
    state, metrics = train(state)  # of the first two updates, the second has four trajectories
    assert np.isnan(metrics["loss/total"][:, 0]).all()
    assert (metrics["optim/grad_norm"][:, 0] == 0).all()
    for name in ("loss/total", "policy/entropy", "optim/grad_norm"):
        assert np.isfinite(metrics[name][:, 1]).all() and (metrics[name][:, 1] > 0).all()
    after = copy(state)
    changed = jax.tree.map(lambda x, y: (x != y).any(), before.params, after.params)
    assert all(jax.tree.leaves(changed)), changed
    assert (after.update == 2).all()


@pytest.mark.usefixtures("single")
def test_the_replay_holds_the_latest_trajectories_in_order():
    state, train = start(env_id="Catch-5x5")
    replays = []
    for _ in range(3):
        state, _ = train(state)
        replays.append(copy(jax.tree.map(lambda x: x[0, 0], state.replay)))
    assert all(replay.action.shape == (6, 8) for replay in replays)
    first, second, third = (replay.obs for replay in replays)
    assert not first[4:].any() and second[4:].any()
    assert (first[2:4] == second[2:4]).all() and (first[:2] != second[:2]).any()
    assert (second[:2] == third[:2]).all() and (second[2:4] != third[2:4]).any()
    replay = replays[-1]
    assert (replay.reset[:, 1:] == replay.done[:, :-1]).all() and replay.done.any()
    row = replay.obs[..., :4, :, 0].any(-1).argmax(-1)  # of the ball, [6, 8]
    assert (row[:, 1:] == np.where(replay.done[:, :-1], 0, row[:, :-1] + 1)).all()
    assert (abs(replay.reward) == replay.done).all()
    assert replay.logits.shape == (6, 8, 3)


@pytest.mark.usefixtures("single")
@pytest.mark.parametrize("rule", ["disco", "actor_critic"])
def test_two_calls_are_one(rule):
    once, train = start(rule=rule, updates=6)
    once, _ = train(once)
    twice, train = start(rule=rule, updates=3)
    twice, _ = train(train(twice)[0])
    equal = jax.tree.map(lambda x, y: (np.asarray(x) == np.asarray(y)).all(), once, twice)
    assert all(jax.tree.leaves(equal))


# --------------------------------------------------------------------------------------- weights
@pytest.fixture
def cache(tmp_path, monkeypatch):
    disco.load_weights.cache_clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield tmp_path / "disco_rl" / "disco_103.npz"
    disco.load_weights.cache_clear()


def test_without_network_the_error_says_what_to_run(cache, monkeypatch):
    def unreachable(*args, **options):
        raise disco.urllib.error.URLError("no route")

    monkeypatch.setattr(disco.urllib.request, "urlopen", unreachable)
    with pytest.raises(disco.ConfigError) as error:
        disco.resolve(disco.Config())
    assert "no route" in str(error.value) and f"curl --create-dirs -o {cache}" in str(error.value)
    assert not cache.exists()
    assert disco.resolve(disco.Config(rule="actor_critic"))  # needs none


def test_a_download_is_kept_only_if_it_is_what_was_released(cache, monkeypatch):
    served = io.BytesIO(b"something else")
    monkeypatch.setattr(disco.urllib.request, "urlopen", lambda *args, **options: served)
    with pytest.raises(disco.ConfigError, match="sha256"):
        disco.load_weights("")
    assert not cache.exists()
    content = find("disco_103.npz").read_bytes()
    served = io.BytesIO(content)
    weights = disco.load_weights("")
    assert cache.read_bytes() == content and set(weights) == set(synthetic_weights())
    monkeypatch.delattr(disco.urllib.request, "urlopen")
    disco.load_weights.cache_clear()
    disco.load_weights("")  # from the cache


def test_weights_of_the_wrong_kind(cache, tmp_path):
    with pytest.raises(disco.ConfigError, match="cannot be read"):
        disco.load_weights(str(tmp_path / "nothing.npz"))
    (tmp_path / "text.npz").write_text("no arrays")
    with pytest.raises(disco.ConfigError, match="npz"):
        disco.load_weights(str(tmp_path / "text.npz"))
    weights = synthetic_weights()
    np.savez(tmp_path / "right.npz", **weights)
    assert disco.load_weights(str(tmp_path / "right.npz")).keys() == weights.keys()
    name = min(weights)
    np.savez(tmp_path / "wrong.npz", **weights | {name: np.zeros(3)})
    with pytest.raises(disco.ConfigError, match=name):
        disco.load_weights(str(tmp_path / "wrong.npz"))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"env_id": "Catch-8x9x"}, "nearest"),
        ({"env_id": "Catch-1x5"}, "Catch-2x2"),
        ({"env_id": "Pendulum-v1"}, "continuous"),
        ({"num_steps": 1}, "at least 2"),
        ({"total_timesteps": 31}, "32"),
        ({"replay_size": 3}, "replay_size = 3"),
    ],
    ids=str,
)
def test_a_wrong_input_says_what_to_change(changes, message):
    with pytest.raises(disco.ConfigError, match=message):
        disco.resolve(disco.Config(**{**SMALL, **changes}))


def test_everything_in_float64():
    """This file again, where JAX computes in float64."""
    if DOUBLE:
        pytest.skip("is this very process")
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", __file__]
    env = {**os.environ, "JAX_ENABLE_X64": "1"}
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
