"""disco.py against the original code and against NumPy, and the harness around the rule.

tests/data holds arrays measured from the original code: the rule alone, with meta-network weights
made from a seed. They check disco_reference.py, the rule, an agent and its updates in NumPy, which
checks the rest. Comparisons are in float64, where no wrong formula survives; the rule alone is
compared in float32, too. Only the comparisons with the released weights, and with arrays measured
with them, look for files beside the repository or in the cache, and are skipped without.
"""

import functools
import hashlib
import io
import json
import os
import pickle
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import disco_reference as reference
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import rlax
from conftest import ROOT, with_devices
from test_cli import content, flags, learned, read_rows, run

import disco

DATA, BESIDE = ROOT / "tests" / "data", ROOT.parent / "shared" / "disco"
DOUBLE = 1e-9
EXACT, LOOSE = 1e-5, 5e-4  # float32; unsquash takes the difference of two numbers near 500
NUM_ACTIONS = 3


def find(name):
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "disco_rl"
    for folder in (BESIDE, cache):
        if (folder / name).exists():
            return folder / name
    pytest.skip(f"{name} is neither in {BESIDE} nor in {cache}")


class Golden:
    """The arrays of a file: golden["A/in/actions"], golden.group("A/in/adv_ema") -> dict."""

    def __init__(self, path):
        with np.load(path) as file:
            self.arrays = {name: file[name] for name in file.files}

    def __getitem__(self, name):
        x = self.arrays[name]
        return x.astype(float) if np.issubdtype(x.dtype, np.floating) else x

    def group(self, prefix):
        names = [name for name in self.arrays if name.startswith(prefix + "/")]
        return {name.removeprefix(prefix + "/"): self[name] for name in names}


@functools.cache
def synthetic_weights():
    """The arrays of a file like the released one."""
    rs, weights = np.random.RandomState(7), {}
    shapes = {}
    for layer in jax.tree.leaves(disco.name_layers()):
        shapes |= {f"{layer.name}/w": layer.shape, f"{layer.name}/b": layer.shape[-1:]}
    for name in sorted(shapes):
        x = rs.standard_normal(shapes[name])
        scale = 0.1 if name.endswith("/b") else 1 / np.sqrt(np.prod(shapes[name][:-1]))
        weights[name] = (x * scale).astype(np.float32)
    return weights


@functools.cache
def load(source, precision="float64"):
    """(arrays measured from the original, weights) of the synthetic or of the released weights."""
    suffix = "_f64" if precision == "float64" else ""
    if source == "synthetic":
        return Golden(DATA / f"disco_golden_synth{suffix}.npz"), synthetic_weights()
    weights = Golden(find("disco_103.npz"))
    return Golden(find(f"disco_golden{suffix}.npz")), weights.arrays


def meta_network(weights):
    """As disco.py loads it from a file, in the precision in use."""
    with tempfile.TemporaryDirectory() as folder:
        np.savez(f"{folder}/weights.npz", **weights)
        return real(disco.load_weights(f"{folder}/weights.npz"))


def real(tree):
    """JAX arrays; those of real numbers in the precision in use."""
    convert = lambda x: jnp.asarray(x, float if np.issubdtype(x.dtype, np.floating) else None)
    return jax.tree.map(convert, tree)


def close(found, expected, tolerance, name=""):
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.shape == expected.shape, name
    error = abs(found - expected) / max(1, abs(expected).max())
    np.testing.assert_array_less(error, tolerance, name)


def transitions(**fields):
    """What a batch of the replay has: all but the statistics of the episode."""
    none = dict.fromkeys(disco.Transition._fields)
    return disco.Transition(**none | fields)


def on_devices(function, size=1):
    """The function as one of `size` devices runs it, which is what the axis of vmap means too."""
    return jax.jit(jax.vmap(function, axis_name="devices", axis_size=size))


def lifetime():
    return real(disco.start_lifetime())


def total_loss(losses, config):
    """The weighted sum that a step of Adam reduces."""
    loss = config.policy_coef * losses["loss/policy"] + config.aux_coef * losses["loss/aux_policy"]
    loss += config.y_coef * losses["loss/y"] + config.z_coef * losses["loss/z"]
    return loss + config.vf_coef * losses["loss/value"] - config.ent_coef * losses["policy/entropy"]


def norm_of(tree):
    return sum((x**2).sum() for x in jax.tree.leaves(tree)) ** 0.5


def stack(tree, size=1):
    return jax.tree.map(lambda x: jnp.stack([x] * size), tree)


# ---------------------------------------------------------------------------- A: the rule alone
class RuleInputs(NamedTuple):
    """Section A: outputs of an agent go in, targets and the loss come out."""

    online: disco.AgentOutput
    target: disco.AgentOutput
    batch: disco.Transition
    meta: disco.MetaState


def rule_inputs(golden):
    last = lambda x: np.concatenate([x, np.zeros_like(x[:1])])  # a step that is never read
    output = lambda name: disco.AgentOutput(**golden.group(f"A/in/{name}"))
    ema = golden.group("A/in/adv_ema")
    moments = disco.Moments(np.stack([ema["moment1"], ema["moment2"]]), ema["decay_product"])
    return RuleInputs(
        online=output("agent_out"),
        target=output("target_out"),
        batch=transitions(
            action=golden["A/in/actions"],
            logits=golden["A/in/behaviour_logits"],
            reward=last(golden["A/in/rewards"]),
            done=last(golden["A/in/is_terminal"]),
            reset=~last(golden["A/in/loss_mask"]),
        ),
        meta=disco.MetaState(moments, golden["A/in/rnn_hidden"], golden["A/in/rnn_cell"]),
    )


def rule_loss(inputs, output, targets, returns):
    pick = lambda name: disco.select_action(getattr(output, name), inputs.batch.action)
    taken = output._replace(**{name: pick(name) for name in ("z", "aux_pi", "q")})
    return disco.disco_loss(taken, targets, returns, inputs.batch, disco.Config())


def one_update(meta_net, inputs):
    """What the original recorded of an update, by the names there, and the next MetaState."""
    online, target, batch, meta = inputs
    modulation = meta_net.modulation(meta.hidden)
    targets, values, meta = disco.disco_rule(meta_net, *inputs, disco.Config())
    make = functools.partial(disco.make_features, values=values, moments=meta.moments)
    step_features, actions = make(meta_net.embeddings, online, target, batch)
    meta_features, meta_actions = make(meta_net.lifetime_embeddings, online, target, batch)
    hidden = disco.backward_lstm(meta_net.backward_lstm, step_features, batch.done[:-1])
    center, scale = meta.moments.mean_and_std()
    loss = functools.partial(rule_loss, inputs)
    (total, losses), gradient = jax.value_and_grad(loss, has_aux=True)(
        online, targets, values.returns
    )
    found = {
        "mid/main_input": step_features,
        "mid/main_act_cond_emb": actions,
        "mid/meta_input": meta_features,
        "mid/meta_act_cond_emb": meta_actions,
        "mid/lstm_out": hidden,
        "mid/mult_out": hidden * modulation,
        "mid/meta_x_avg": disco.embed_update(
            meta_net, meta_features, hidden * modulation, targets.y
        ),
        "out/meta_input_emb": meta_net.summary(hidden * modulation),
        "out/pi": targets.logits,
        "out/y": targets.y,
        "out/z": targets.z,
        "out/q_target": values.returns,
        "out/adv": values.advantage,
        "out/normalized_adv": (values.advantage - center) / scale,
        "out/qv_adv": values.action_advantage,
        "out/normalized_qv_adv": (values.action_advantage - center) / scale,
        "out/q_value": disco.expected_return(online.q),
        "out/q_td": values.td,
        "out/rnn_hidden": meta.hidden,
        "out/rnn_cell": meta.cell,
        "out/adv_ema/moment1": meta.moments.raw[0],
        "out/adv_ema/moment2": meta.moments.raw[1],
        "out/adv_ema/decay_product": meta.moments.decay_product,
        "out/total_loss": total,
    }
    found |= {f"out/grad_agent_out/{name}": x for name, x in gradient._asdict().items()}
    found.pop("out/grad_agent_out/value")
    found["out/grad_agent_out_global_norm"] = norm_of(gradient)
    return found, losses, meta


class RuleCase(NamedTuple):
    golden: Golden
    first: dict
    losses: dict
    second: dict
    exact: float  # tolerance
    loose: float  # where unsquash enters


def rule_case(precision):
    golden, weights = load("synthetic", precision)
    inputs, meta_net = real(rule_inputs(golden)), meta_network(weights)
    run = on_devices(one_update)
    first_device = lambda tree: jax.tree.map(lambda x: x[0], tree)
    first, losses, meta = first_device(run(stack(meta_net), stack(inputs)))
    second, *_ = first_device(run(stack(meta_net), stack(inputs._replace(meta=meta))))
    record = jax.tree.map(np.asarray, (first, losses, second))
    tolerances = (DOUBLE, DOUBLE) if precision == "float64" else (EXACT, LOOSE)
    return RuleCase(golden, *record, *tolerances)


@pytest.fixture(scope="module", params=["float64", "float32"])
def rule(request):
    double = request.param == "float64"
    jax.config.update("jax_disable_most_optimizations", double)  # they round float32 differently
    try:
        with jax.enable_x64(double):
            return rule_case(request.param)
    finally:  # before other tests compile
        jax.config.update("jax_disable_most_optimizations", True)


def compare_with_original(golden, found, exact, loose):
    """The arrays of an update of section A, by name."""
    on_bin = reference.squash(golden["A/out/q_target"]) % 1 == 0
    on_bin = np.concatenate([on_bin, on_bin[:1] & False])[:, :, None, None]
    for name, x in found.items():
        expected, tolerance = golden[f"A/{name}"], loose
        if name.endswith(("act_cond_emb", "meta_x_avg", "rnn_hidden", "rnn_cell")):
            tolerance = exact
        if name.endswith("grad_agent_out/q"):
            # A target on a bin: the original adds q to target - q, which may miss it by a
            # rounding error and then moves 1e-5 of the weight to the neighboring bin.
            close(x * on_bin, expected * on_bin, 1e-5, name)
            x, expected = x * ~on_bin, expected * ~on_bin
        close(x, expected, tolerance, name)


def test_the_rule_is_the_original(rule):
    compare_with_original(rule.golden, rule.first, rule.exact, rule.loose)
    config = disco.Config()
    close(rule.first["out/total_loss"], total_loss(rule.losses, config), rule.exact)


def test_the_rule_remembers_its_first_update_in_its_second(rule):
    for name in ("pi", "y", "z", "normalized_adv", "rnn_hidden", "rnn_cell"):
        tolerance = rule.exact if name.startswith("rnn") else rule.loose
        close(rule.second[f"out/{name}"], rule.golden[f"A/out2/{name}"], tolerance, name)


def test_gradient_with_respect_to_the_meta_network():
    golden, weights = load("synthetic")

    def total(meta_net, inputs):
        losses = []
        for _ in range(2):
            targets, values, meta = disco.disco_rule(meta_net, *inputs, disco.Config())
            loss, _ = rule_loss(inputs, inputs.online, targets, values.returns)
            inputs = inputs._replace(meta=meta)
            losses.append(loss)
        return sum(losses)

    with jax.enable_x64(True):
        inputs, meta_net = real(rule_inputs(golden)), meta_network(weights)
        run = on_devices(jax.value_and_grad(total))
        value, grads = jax.tree.map(np.asarray, run(stack(meta_net), stack(inputs)))
    close(value[0], golden["A/metagrad/value"], DOUBLE)
    layers = jax.tree.leaves(disco.name_layers())
    names = [f"{layer.name}/{part}" for layer in layers for part in "wb"]
    expected = golden.group("A/metagrad/norm")
    assert sorted(names) == sorted(expected)
    for name, x in zip(names, jax.tree.leaves(grads), strict=True):
        close(np.linalg.norm(x), expected[name], DOUBLE, name)


@pytest.mark.parametrize("source", ["synthetic", "released"])
def test_the_reference_is_the_original(source):
    """disco_reference.py: the rule alone."""
    golden, weights = load(source)
    online, target, batch, meta = rule_inputs(golden)
    config = disco.Config()
    values = reference.compute_values(online, target, batch, config)
    moments = reference.Moments(*meta.moments.raw, meta.moments.decay_product)
    moments = moments.add([values["advantage"]], config.ema_decay)
    policies = (reference.softmax(online.logits), reference.softmax(target.logits))
    inputs = (online, target, batch, values, moments, policies)
    targets, x, between = reference.apply_rule(weights, *inputs, meta.hidden)
    hidden, cell = reference.remember(weights, [x], meta.hidden, meta.cell)
    losses, gradient = reference.losses_and_gradient(
        online, targets, values["returns"], batch, config
    )
    center, scale = moments.center_and_scale()
    found = {f"mid/{name}": array for name, array in between.items()}
    found["out/meta_input_emb"] = found.pop("mid/meta_input_emb")
    found |= {
        "mid/meta_x_avg": x,
        "out/pi": targets["logits"],
        "out/y": targets["y"],
        "out/z": targets["z"],
        "out/q_target": values["returns"],
        "out/adv": values["advantage"],
        "out/normalized_adv": (values["advantage"] - center) / scale,
        "out/qv_adv": values["action_advantage"],
        "out/normalized_qv_adv": (values["action_advantage"] - center) / scale,
        "out/q_value": values["q"],
        "out/q_td": values["td"],
        "out/rnn_hidden": hidden,
        "out/rnn_cell": cell,
        "out/adv_ema/moment1": moments.mean,
        "out/adv_ema/moment2": moments.square,
        "out/total_loss": total_loss(losses, config),
    }
    found |= {f"out/grad_agent_out/{name}": x for name, x in gradient.items()}
    compare_with_original(golden, found, DOUBLE, DOUBLE)
    # The second update has the new memory.
    moments = moments.add([values["advantage"]], config.ema_decay)
    targets, x, _ = reference.apply_rule(weights, *inputs[:4], moments, policies, hidden)
    hidden, cell = reference.remember(weights, [x], hidden, cell)
    found = {"pi": targets["logits"], "y": targets["y"], "z": targets["z"]}
    for name, x in (found | {"rnn_hidden": hidden, "rnn_cell": cell}).items():
        close(x, golden[f"A/out2/{name}"], DOUBLE, name)


def test_the_value_loss_is_a_cross_entropy_of_two_bins():
    """On a bin, between bins, and beyond the last."""
    targets = np.array([0.0, 1.0, -1.0, 0.3, -7.7, 1234.5, -9e4, 1e6, -1e6])
    logits = np.random.default_rng(0).normal(size=(len(targets), 601))
    with jax.enable_x64(True):
        found = np.asarray(disco.value_loss(jnp.array(logits), jnp.array(targets)))
    goal = reference.two_hot(reference.squash(targets))
    assert goal[0, 300] == 1 and goal[-2, 600] == 1 and goal[-1, 0] == 1
    close(found, -(goal * reference.log_softmax(logits)).sum(-1), DOUBLE)


# ---------------------------------------------------------------- B, D: an agent and its updates
CONFIG = disco.Config(hidden_sizes=(32, 16), model_size=8, branch_size=12)
NETWORK = disco.Agent(NUM_ACTIONS, CONFIG)
ROWS, COLUMNS = 6, 5


class Learner(NamedTuple):
    """What an update reads and replaces."""

    params: Any
    target_params: Any
    opt_state: Any
    meta: disco.MetaState


class UpdateInputs(NamedTuple):
    """Three updates of a new agent, from a rollout each."""

    weights: dict
    layers: dict
    target_layers: dict  # others
    batches: list  # of Transition [L, N]


def random_layers(rng):
    params = jax.eval_shape(NETWORK.init, jax.random.key(0), jnp.zeros(ROWS * COLUMNS))["params"]

    def draw(x):
        scale = len(x.shape) - 1 and x.shape[0] ** -0.5 or 0.1
        return scale * rng.normal(size=x.shape)

    return jax.tree.map(draw, params)


def catch_rollout(rng, steps=13, num_envs=4):
    """The game in NumPy, played by a random policy."""
    names = ("obs", "action", "logits", "reward", "done", "reset")
    columns = []
    for _ in range(num_envs):
        env, reset, rows = reference.Catch(ROWS, COLUMNS, rng), False, []
        for _ in range(steps):
            obs, logits = env.obs(), rng.normal(size=NUM_ACTIONS)
            action = np.int32(rng.choice(NUM_ACTIONS, p=reference.softmax(logits)))
            reward, done = env.step(action)
            rows.append((obs, action, logits, reward, done, reset))
            reset = done
            if done:
                env.reset()
        columns.append([np.array(column) for column in zip(*rows, strict=True)])
    arrays = [np.stack(column, 1) for column in zip(*columns, strict=True)]
    return transitions(**dict(zip(names, arrays, strict=True)))


def synthetic_updates():
    rng = np.random.default_rng(0)
    layers, target_layers = random_layers(rng), random_layers(rng)
    batches = [catch_rollout(rng) for _ in range(3)]
    return UpdateInputs(synthetic_weights(), layers, target_layers, batches)


AGENT_NAMES = {  # here and in the original
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


def original_layers(group):
    layer = lambda name: {"kernel": group[f"mlp/{name}/w"], "bias": group[f"mlp/{name}/b"]}
    return {name: layer(original) for name, original in AGENT_NAMES.items()}


def released_updates():
    golden, weights = load("released")

    def rollout(step):
        """Rewards and ends came with the next observation; here they belong to the action."""
        group = golden.group(f"B/in/rollout{step}")
        shift = lambda x: np.concatenate([x[1:], np.zeros_like(x[:1])])
        reset = ~group["discounts"]
        return transitions(
            obs=group["obs"].reshape(*reset.shape, -1) > 0,
            action=group["actions"],
            logits=group["behaviour_logits"],
            reward=shift(group["rewards"]),
            done=shift(reset),
            reset=reset,
        )

    layers, target_layers = (
        original_layers(golden.group(f"B/in/{name}")) for name in ("params", "target_params")
    )
    return UpdateInputs(weights, layers, target_layers, [rollout(step) for step in range(3)])


@functools.cache
def compile_update(size):
    optimizer = disco.make_optimizer(CONFIG)

    def update(state, batch, meta_net):
        return disco.learn(meta_net, state, batch, NETWORK, optimizer, CONFIG)

    return on_devices(update, size)


def split(batch, size):
    """[L, N, ...] -> one batch per device."""
    parts = [np.split(x, size, axis=1) if x is not None else size * [None] for x in batch]
    return [disco.Transition(*fields) for fields in zip(*parts, strict=True)]


def updates_of_disco(inputs: UpdateInputs, size):
    """Learners [size] and records [size] of three updates on so many devices."""
    with jax.enable_x64(True):
        params, target_params = ({"params": real(x)} for x in (inputs.layers, inputs.target_layers))
        opt_state = disco.make_optimizer(CONFIG).init(params)
        state = stack(Learner(params, target_params, opt_state, lifetime()), size)
        meta_net, update = stack(meta_network(inputs.weights), size), compile_update(size)
        found = []
        for batch in inputs.batches:
            batch = jax.tree.map(lambda *x: np.stack(x), *split(batch, size))
            state, targets, metrics = update(state, real(batch), meta_net)
            found.append(jax.tree.map(np.asarray, (state, targets, metrics)))
    return found


def updates_of_reference(inputs: UpdateInputs, size):
    zeros = reference.tree(np.zeros_like, inputs.layers)
    agent = reference.Agent(
        layers=inputs.layers,
        target_layers=inputs.target_layers,
        adam=reference.Adam(0, zeros, zeros),
        moments=reference.Moments(0.0, 0.0, 1.0),
        hidden=np.zeros(128),
        cell=np.zeros(128),
    )
    expected = []
    for batch in inputs.batches:
        agent, records = reference.update(inputs.weights, agent, split(batch, size), CONFIG)
        expected.append((agent, records))
    return expected


def test_the_network_of_an_agent():
    inputs = synthetic_updates()
    expected = reference.Network(inputs.layers, inputs.batches[0].obs)
    obs, action = inputs.batches[0].obs, inputs.batches[0].action
    with jax.enable_x64(True):
        params = {"params": real(inputs.layers)}
        every = jax.jit(NETWORK.apply)(params, real(obs))
        taken = jax.jit(NETWORK.apply)(params, real(obs), real(action))
    for name in ("logits", "y", "z", "aux_pi", "q"):
        x = getattr(expected, name)
        close(getattr(every, name), x, DOUBLE, name)
        x = reference.take(x, action) if name in ("z", "aux_pi", "q") else x
        close(getattr(taken, name), x, DOUBLE, name)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("source", ["synthetic", "released"])
def test_three_updates(source, size):
    """On one and on two devices, against NumPy.

    With the released weights, also against the original.
    """
    inputs = synthetic_updates() if source == "synthetic" else released_updates()
    found, expected = updates_of_disco(inputs, size), updates_of_reference(inputs, size)
    layers = inputs.layers
    steps = zip(found, expected, inputs.batches, strict=True)
    for (state, targets, metrics), (agent, records), batch in steps:
        mean = lambda name, records=records: np.mean([x["losses"][name] for x in records])
        values = [x["values"] for x in records]
        explained = [1 - x["td"].var() / x["returns"].var() for x in values]
        scalars = {name: mean(name) for name in records[0]["losses"]}
        scalars["value/explained_variance"] = np.mean(explained)
        scalars["value/td"] = np.mean([abs(x["td"]).mean() for x in values])
        scalars["value/target"] = np.mean([x["returns"].mean() for x in values])
        taken_q = [
            reference.take(x["q"], part.action)[:-1]
            for x, part in zip(values, split(batch, size), strict=True)
        ]
        scalars["value/mean"] = np.mean(taken_q)
        scalars["optim/update_norm"] = norm_of(
            jax.tree.map(lambda x, y: x - y, agent.layers, layers)
        )
        networks = [reference.Network(layers, x.obs) for x in split(batch, size)]
        ratios = [
            np.exp(reference.log_softmax(network.logits) - reference.log_softmax(x.logits))
            for network, x in zip(networks, split(batch, size), strict=True)
        ]
        taken = [
            reference.take(ratio, x.action)[:-1]
            for ratio, x in zip(ratios, split(batch, size), strict=True)
        ]
        scalars["policy/ratio"] = np.minimum(taken, 1).mean()
        layers = agent.layers
        scalars["optim/grad_norm"] = norm_of(records[0]["grads"])
        assert metrics.keys() == scalars.keys()
        trees = {
            "params": (state.params["params"], agent.layers),
            "target_params": (state.target_params["params"], agent.target_layers),
            "mu": (state.opt_state[0].mu["params"], agent.adam.mu),
            "nu": (state.opt_state[0].nu["params"], agent.adam.nu),
        }
        for device in range(size):
            of_device = functools.partial(jax.tree.map, lambda x, device=device: x[device])
            for name, x in scalars.items():
                close(metrics[name][device], x, DOUBLE, name)
            for name, x in records[device]["targets"].items():
                close(getattr(targets, name)[device], x, DOUBLE, name)
            for name, (x, y) in trees.items():
                is_close = functools.partial(close, tolerance=DOUBLE, name=name)
                jax.tree.map(is_close, of_device(x), y)
            meta = of_device(state.meta)
            close(meta.hidden, agent.hidden, DOUBLE)
            close(meta.cell, agent.cell, DOUBLE)
            close(meta.moments.raw, agent.moments[:2], DOUBLE)
            close(meta.moments.decay_product, agent.moments.decay_product, DOUBLE)
    if source == "released":
        compare_updates_with_original(inputs, found, size)


def compare_updates_with_original(inputs, found, size):
    """Sections B and D."""
    golden, _ = load("released")
    section, before = "B" if size == 1 else "D", inputs.layers
    for step, (state, targets, metrics) in enumerate(found):
        name = f"{section}/out/step{step}"
        close(total_loss(metrics, CONFIG)[0], golden[f"{name}/log/total_loss"].mean(), DOUBLE, name)
        after = jax.tree.map(lambda x: x[0], state.params["params"])
        norms = {
            "global_gradient_norm": metrics["optim/grad_norm"][0],
            "global_update_norm": norm_of(jax.tree.map(lambda x, y: x - y, after, before)),
        }
        for log, x in norms.items():
            close(x, np.mean(golden[f"{name}/log/{log}"]), DOUBLE, name)
        before = after
        if size == 1:
            close(targets.logits[0], golden[f"{name}/pi"], DOUBLE)
            close(targets.y[0].mean(-1), golden[f"{name}/y_mean_last"], DOUBLE)
            close(targets.z[0].mean(-1), golden[f"{name}/z_mean_last"], DOUBLE)
    final = f"{section}/out/final"
    arrays = {"params": state.params, "target_params": state.target_params}
    arrays |= {"adam_mu": state.opt_state[0].mu, "adam_nu": state.opt_state[0].nu}
    for name, x in arrays.items():
        if group := golden.group(f"{final}/{name}"):
            x = jax.tree.map(lambda x: x[0], x["params"])
            is_close = functools.partial(close, tolerance=DOUBLE, name=name)
            jax.tree.map(is_close, x, original_layers(group))
    close(state.meta.hidden[0], golden[f"{final}/rnn_hidden"], DOUBLE)
    close(state.meta.cell[0], golden[f"{final}/rnn_cell"], DOUBLE)
    ema = golden.group(f"{final}/adv_ema")
    close(state.meta.moments.raw[0], np.stack([ema["moment1"], ema["moment2"]]), DOUBLE)


# ------------------------------------------------------------------------ C, E: optimizer, Catch
def test_optimizer_clips_each_entry_after_adam():
    rng = np.random.default_rng(0)
    grads = rng.normal(size=(400, 8)) * (rng.random((400, 8)) < 0.05)
    grads *= 1.02 ** np.arange(400)[:, None]  # a large gradient after small ones is clipped
    config = disco.Config(lr=0.1)
    with jax.enable_x64(True):
        optimizer = disco.make_optimizer(config)

        def step(state, grad):
            updates, state = optimizer.update(grad, state)
            return state, updates

        state = optimizer.init(jnp.zeros(8))
        state, updates = jax.tree.map(np.asarray, jax.lax.scan(step, state, jnp.array(grads)))
    params, adam = np.zeros(8), reference.Adam(0, np.zeros(8), np.zeros(8))
    for grad, update in zip(grads, updates, strict=True):
        new, adam = adam.step(grad, params, config.lr, config.max_update)
        close(update, new - params, DOUBLE)
        params = new
    close(state[0].mu, adam.mu, DOUBLE)
    close(state[0].nu, adam.nu, DOUBLE)
    assert 0.01 < (abs(updates) > 0.1 - 1e-12).mean() < 0.2


def test_catch_is_the_original():
    """Every state and action of the 8 x 8 board."""
    reset, step, num_actions = disco.make_env(disco.Config())
    assert num_actions == 3
    keys = jax.random.split(jax.random.key(0), 100)
    first_obs, fresh = jax.vmap(reset)(keys)
    assert set(np.asarray(fresh.ball_x).tolist()) == set(range(8))
    assert (fresh.ball_y == 0).all() and (fresh.paddle_y == 7).all() and (fresh.paddle_x == 4).all()
    grid = np.stack(np.meshgrid(*map(np.arange, (7, 8, 8, 3)), indexing="ij"), -1).reshape(-1, 4)
    y, x, paddle, action = jnp.asarray(grid).T
    keys = jax.random.split(jax.random.key(1), len(grid))
    wide = jax.tree.map(lambda x: jnp.broadcast_to(x[0], (len(grid),)), fresh)
    states = wide.replace(ball_y=y, ball_x=x, paddle_x=paddle, time=y)
    outcome = jax.jit(jax.vmap(step))(keys, states, action)
    obs, _, reward, terminated, truncated, next_obs = jax.tree.map(np.asarray, outcome)
    env = reference.Catch(8, 8, np.random.default_rng(0))
    for i, (*start, action) in enumerate(grid):
        env.y, env.x, env.paddle = start
        before = env.obs()
        paid, done = env.step(action)
        assert before.sum() == 2 and reward[i] == paid and terminated[i] == done
        np.testing.assert_array_equal(next_obs[i], env.obs())
        np.testing.assert_array_equal(obs[i][8:56] if done else obs[i], 0 if done else env.obs())
        if done:
            assert obs[i, :8].sum() == 1 and np.flatnonzero(obs[i, 56:]).tolist() == [4]
    assert terminated.any() and not truncated.any()


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


@pytest.mark.parametrize("normalize_advantages", [False, True])
@pytest.mark.parametrize("normalize_errors", [False, True])
def test_a_plain_number_as_value(normalize_errors, normalize_advantages):
    """The losses and the gradient of the first update, in closed form from rlax's V-trace."""
    switches = {"normalize_errors": normalize_errors, "normalize_advantages": normalize_advantages}
    sizes = SIZES | {"hidden_sizes": (8,)}
    config = disco.Config(rule="actor_critic", scalar_value=True, lr=1.0, **switches, **sizes)
    network, optimizer = disco.Agent(3, config), optax.sgd(1.0)
    rng = np.random.default_rng(0)
    params = network.init(jax.random.key(0), jnp.ones(2))
    batch = transitions(
        obs=rng.normal(size=(5, 2, 2)),
        action=rng.integers(0, 3, (5, 2)),
        logits=rng.normal(size=(5, 2, 3)),
        reward=rng.normal(size=(5, 2)),
        done=rng.random((5, 2)) < 0.3,
        reset=np.zeros((5, 2), bool),
    )
    state = Learner(params, params, optimizer.init(params), lifetime())
    learn = lambda state: disco.learn(None, state, batch, network, optimizer, config)
    after, _, metrics = jax.tree.map(lambda x: x[0], on_devices(learn)(stack(state)))

    output = network.apply(params, batch.obs)
    value = np.asarray(output.value[..., 0], float)
    log_policy = reference.log_softmax(np.asarray(output.logits, float))
    log_prob = reference.take(log_policy, batch.action)[:-1]
    log_ratio = log_prob - reference.take(reference.log_softmax(batch.logits), batch.action)[:-1]
    gamma = config.gamma * (1.0 - batch.done[:-1])
    vtrace = functools.partial(rlax.vtrace_td_error_and_advantage, lambda_=config.trace_lambda)
    inputs = (value[:-1], value[1:], batch.reward[:-1], gamma, np.exp(log_ratio))
    error = np.asarray(jax.vmap(vtrace, 1, 1)(*inputs).errors)
    advantage = (error - error.mean()) / error.std() if normalize_advantages else error
    goal = error / error.std() if normalize_errors else error
    close(metrics["loss/policy"], -(advantage * log_prob).mean(), LOOSE)
    close(metrics["loss/value"], 0.5 * (goal**2).mean(), LOOSE)
    close(metrics["value/td"], abs(error).mean(), LOOSE)
    # The value's bias moves by the mean error, times the coefficient.
    moved = after.params["params"]["value"]["bias"][0]
    close(moved, config.vf_coef * goal.mean(), LOOSE)


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
SIZES = {"hidden_sizes": (8, 8), "model_size": 4, "branch_size": 4}
SMALL = SIZES | {
    "weights": "random",
    "num_envs": 2,
    "num_steps": 8,
    "replay_batch": 4,
    "replay_size": 6,
    "eval_episodes": 3,
}


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


def test_the_replay_holds_the_latest_trajectories_in_order():
    state, train = start(calls=3, env_id="Catch-5x5", rule="policy_gradient")
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


def test_the_best_parameters_are_those_of_the_best_evaluation():
    state, train = start(calls=3, env_id="Catch-5x5", rule="policy_gradient")
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
    file = io.BytesIO()
    np.savez(file, **synthetic_weights())
    content = file.getvalue()
    monkeypatch.setattr(disco, "SHA256", hashlib.sha256(content).hexdigest())
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
        jax.tree.leaves(disco.name_layers()),
        strict=True,
    ):
        stddev = released.stddev or released.shape[-2] ** -0.5
        assert layer.w.shape == released.shape[-2:] and not layer.b.any()
        assert abs(layer.w).max() <= 2 * stddev
        if layer.w.size > 1000:
            assert abs(layer.w.std() / stddev - 0.88) < 0.03
    stddevs = {released.stddev for released in disco.name_layers() if hasattr(released, "stddev")}
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
    init, train, *_ = disco.make_train(disco.Config(rule="actor_critic", **changes))
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.PRNGKey(0), 8))
    state = jax.eval_shape(init, keys)
    _, metrics = jax.eval_shape(train, state)
    print(state.replay.action.shape, state.runners.obs.shape, metrics["eval/return"].shape)
"""


def test_as_many_devices_as_divide_the_environments():
    command = [sys.executable, "-W", "ignore", "-c", EIGHT_DEVICES]
    result = subprocess.run(command, cwd=ROOT, env=with_devices(8), capture_output=True, text=True)
    lines = result.stdout.splitlines()
    assert len(lines) == len(ON_EIGHT_DEVICES), result.stderr
    for line, shapes in zip(lines, ON_EIGHT_DEVICES.values(), strict=True):
        assert line.startswith(shapes)


# ------------------------------------------------------------------------------------- whole runs
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


def test_options_with_several_values_come_back_as_tuples(tmp_path, monkeypatch):
    config = disco.Config(hidden_sizes=(8, 4), run_dir=str(tmp_path))
    options = {"script": "disco", **vars(config)}
    (tmp_path / "config.json").write_text(json.dumps(options))
    seen = []
    monkeypatch.setattr(disco, "main", seen.append)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of tyro, which warns of a list
        code, _, err = run(disco, "--run-dir", tmp_path)
    assert code == 0 and seen == [config], err


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
    for wrong in (["--rule", "actor_critic"], ["--replay-size", "8"], ["--hidden-sizes", "4"]):
        code, _, err = run(disco, *words, *longer, *wrong, "--total-timesteps", "256")
        assert code == 2 and err.count("\n") == 1 and "checkpoint.msgpack" in err
    code, _, err = run(disco, *words, "--seed", str(2**32))
    assert code == 2 and "seed" in err
    assert content(tmp_path / "run") == files


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
