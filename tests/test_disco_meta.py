"""disco_meta.py: that it meta-learns at all, and that its copies of disco.py's parts are copies."""

import dataclasses
import functools
import inspect
import signal
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import disco
import disco_meta

SHARED = "make_catch lstm_cell dense Agent random_weights linear embed mix_actions compute_retrace "
SHARED += "compute_vtrace compute_values make_features look_back lifetime_input discovered_rule "
SHARED += "kl_divergence value_loss mean_loss disco_loss update_moments mean_and_std unsquash "
SHARED += "squash expected_value of_action"
SMALL = {
    "env_id": "Catch-3x3",
    "num_envs": 3,
    "num_steps": 4,
    "valid_steps": 5,
    "hidden_size": 8,
    "feature_size": 8,
    "model_size": 4,
    "branch_size": 4,
}


@pytest.mark.parametrize("name", SHARED.split())
def test_the_rule_is_that_of_disco(name):
    sources = {inspect.getsource(getattr(module, name)) for module in (disco, disco_meta)}
    assert len(sources) == 1


@pytest.fixture(scope="module", autouse=True)
def trace_once():
    """Runs that differ in nothing but their files share the program."""
    make_train = functools.cache(disco_meta.make_train)

    def make_train_once(config, num_meta_steps):
        files = {"output": "", "resume": False, "num_meta_steps": 1}
        return make_train(dataclasses.replace(config, **files), num_meta_steps)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disco_meta, "make_train", make_train_once)
        yield


def test_the_update_of_an_agent_is_that_of_disco():
    """With the meta-gradient's own optimizer, the agent still moves as disco.learn moves it."""
    config = disco_meta.Config(**SMALL)
    sizes = {name: SMALL[name] for name in SMALL if name.endswith("_size")}
    plain = disco.Config(**sizes, lr=config.lr, weights="random")
    weights = disco.random_weights(0)
    state = start(config, weights, 1)[0]
    learner = jax.tree.map(lambda x: x[0, 0], state.agents.learner)
    keys = jax.random.split(jax.random.key(1), 4)
    shape = (4, 3)
    batch = disco.Transition(
        jax.random.bernoulli(keys[0], 0.2, (*shape, 3, 3, 1)),
        jax.random.randint(keys[1], shape, 0, 3),
        jax.random.normal(keys[2], (*shape, 3)),
        jax.random.normal(keys[3], shape),
        jax.random.bernoulli(keys[3], 0.3, shape),
        jax.random.bernoulli(keys[2], 0.3, shape),
    )
    agent, optimizer = disco.Agent(3, plain), disco.make_optimizer(plain)
    runner = disco.RunnerState(**dict.fromkeys(disco.RunnerState._fields))._replace(
        params=learner.params,
        target_params=learner.target_params,
        opt_state=optimizer.init(learner.params),
        meta=disco.MetaState(*learner.meta),
    )

    def both(batch):
        expected, _ = disco.learn(runner, batch, weights, agent, optimizer, plain)
        critic = disco_meta.Critic()
        found, _ = disco_meta.inner_update(weights, learner, batch, agent, critic, config)
        return found, expected

    one = jax.vmap(both, axis_name="devices")
    found, expected = jax.jit(one)(jax.tree.map(lambda x: x[None], batch))
    for name in ("params", "target_params", "meta"):
        pairs = zip(
            jax.tree.leaves(getattr(found, name)),
            jax.tree.leaves(getattr(expected, name)),
            strict=True,
        )
        for x, y in pairs:
            np.testing.assert_allclose(x, y, atol=2e-6)


def test_the_meta_gradient_is_that_of_finite_differences():
    """Through one inner update, in float64, with what takes no gradient held where it is."""
    config = disco_meta.Config(**SMALL, inner_updates=1)
    weights = disco.random_weights(0)
    learner = start(config, weights, 1)[0].agents.learner
    agent, critic = disco_meta.Agent(3, config), disco_meta.Critic()
    rng = np.random.default_rng(0)

    def rollout(length):
        shape = (length, 3)
        chance = lambda p: rng.random(shape) < p
        obs, logits = rng.random((*shape, 3, 3, 1)) < 0.3, rng.normal(size=(*shape, 3))
        action, reward = rng.integers(0, 3, shape), rng.normal(size=shape)
        return disco_meta.Transition(obs, action, logits, reward, chance(0.3), chance(0.2))

    def alone(function):  # one device
        program = jax.jit(jax.vmap(function, axis_name="devices", axis_size=1, in_axes=None))
        return lambda x: jax.tree.map(lambda x: x[0], program(x))

    with jax.enable_x64(True):
        double = lambda x: jnp.asarray(x, float if x.dtype == np.float32 else x.dtype)
        weights = jax.tree.map(double, weights)
        learner = jax.tree.map(lambda x: double(x[0, 0]), learner)
        # Some lifetime behind it: at birth the rule's outputs are all zero.
        memory = {name: jnp.array(rng.normal(size=128)) for name in ("hidden", "cell")}
        learner = learner._replace(meta=learner.meta._replace(**memory))
        batch, valid = rollout(4), rollout(5)
        batches = jax.tree.map(lambda x: x[None], batch)
        unroll = jax.vmap(agent.apply, (None, 0, 0))

        def meta_loss(weights):
            return disco_meta.meta_loss(weights, learner, batches, valid, agent, critic, config)

        (loss, (after, _)), grads = alone(jax.value_and_grad(meta_loss, has_aux=True))(weights)

        def parts(weights):
            """The targets, what they cost, and the agent's gradient."""
            unroll_all = jax.vmap(agent.apply, (None, 0))
            out = unroll_all(learner.params, batch.obs)
            target_out = unroll_all(learner.target_params, batch.obs)
            rule = (out, target_out, batch, learner.meta, config)
            hat, values, _ = disco_meta.discovered_rule(weights, *rule)

            def loss(params):
                taken = unroll(params, batch.obs, batch.action)
                return disco_meta.disco_loss(taken, hat, values.target, batch, config)[0]

            penalty = disco_meta.regularizer(hat, target_out.logits[:-1])
            return penalty, jax.grad(loss)(learner.params)

        _, first = alone(parts)(weights)
        logits = unroll(after.params, valid.obs, valid.action).logits
        _, adv, _ = disco_meta.judge(after.critic, critic, logits, valid, config)
        mean, std = disco_meta.mean_and_std(after.adv)
        adv = (adv - mean) / std

        def reference(weights):
            """The first step of Adam is g / |g|: of the two, only the numerator may move."""
            penalty, grads = parts(weights)
            move = lambda x, g, at: x - config.lr * g / (np.abs(at) + 1e-8)
            out = unroll(jax.tree.map(move, learner.params, grads, first), valid.obs, valid.action)
            entropy = lambda x: -(jax.nn.softmax(x) * jax.nn.log_softmax(x)).sum(-1).mean()
            taken = jax.nn.one_hot(valid.action[:-1], 3) * jax.nn.log_softmax(out.logits[:-1])
            loss = -(taken.sum(-1) * adv).mean() - 1e-2 * entropy(out.logits[:-1]) + penalty
            return loss - 1e-3 * (entropy(out.y) + entropy(out.z[:-1]))

        reference = alone(reference)
        np.testing.assert_allclose(reference(weights), loss, rtol=1e-9)
        for name, grad in grads.items():
            direction, step = rng.normal(size=grad.shape), 1e-6
            at = lambda x, name=name, way=direction: {**weights, name: weights[name] + x * way}
            slope = (reference(at(step)) - reference(at(-step))) / (2 * step)
            # What goes into the lifetime's memory is first read by the next update.
            if name.startswith((disco_meta.META, f"{disco_meta.MAIN}/linear_1/")):
                assert slope == 0 and not grad.any(), name
            else:
                assert slope != 0, name
                np.testing.assert_allclose((grad * direction).sum(), slope, rtol=3e-4, atol=1e-9)


def start(config, weights, steps):
    init, train = disco_meta.make_train(config, steps)
    return init(jax.random.split(jax.random.key(0), jax.device_count()), weights), train


def test_a_meta_step_changes_every_weight_and_disco_takes_the_result(tmp_path):
    path = tmp_path / "meta.npz"
    config = disco_meta.Config(**SMALL, num_meta_steps=2, steps_per_call=1, output=str(path))
    weights = disco_meta.main(config)
    before = disco.random_weights(0)
    unchanged = [name for name in before if (weights[name] == before[name]).all()]
    assert unchanged == []
    assert disco.load_weights(str(path)).keys() == before.keys()
    rows = path.with_suffix(".csv").read_text().splitlines()
    assert len(rows) == 3 and "nan" not in rows[2]
    row = dict(zip(rows[0].split(","), map(float, rows[2].split(",")), strict=True))
    each = [row[f"episode/return/agent{i}"] for i in range(config.num_agents)]
    assert np.mean(each) == pytest.approx(row["episode/return"])  # episodes of Catch are as long
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_written_is_an_error(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("not a folder")
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    monkeypatch.setattr(sys, "argv", ["", *flags, f"--output={tmp_path / 'file' / 'meta.npz'}"])
    with pytest.raises(SystemExit) as exit_code:  # before anything is compiled
        disco_meta.cli()
    assert exit_code.value.code == 2 and "choose another --output" in capsys.readouterr().err

    def full(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disco_meta, "replace", full)
    words = ["--num-meta-steps=1", "--steps-per-call=1", f"--output={tmp_path / 'meta.npz'}"]
    monkeypatch.setattr(sys, "argv", ["", *flags, *words])
    with pytest.raises(SystemExit, match="No space left on device; what was saved before is whole"):
        disco_meta.cli()


def test_agents_of_all_ages_start_anew_at_the_end_of_their_lifetime():
    config = disco_meta.Config(**SMALL, lifetime=4)
    state, train = start(config, disco.random_weights(0), 1)
    seen = []
    for _ in range(6):
        seen.append(jax.tree.map(lambda x: np.array(x[0]), state.agents.learner))
        state, _ = train(state)
    ages = [learner.opt_state.count // config.inner_updates for learner in seen]
    np.testing.assert_array_equal(ages, [[0, 0], [1, 1], [2, 2], [3, 1], [4, 2], [1, 3]])
    # Two updates move a parameter by twice the learning rate at most, a birth by more.
    most = config.inner_updates * config.lr * config.max_update * 1.01
    kernel = lambda learner: max(jax.tree.leaves(learner.params), key=np.size)  # [P, ...]
    moved = np.abs(np.diff([kernel(learner) for learner in seen], axis=0)).max(axis=(2, 3))
    born = np.diff(ages, axis=0) != 1
    born[0, 0] = True  # the first begins with the first step
    np.testing.assert_array_equal(moved > most, born)


def test_meta_training_goes_on_where_it_ended(tmp_path, monkeypatch, capsys):
    """Two calls in one run, or in two with Ctrl-C between: the same bits, and the same curve."""
    whole, parts = (str(tmp_path / name) for name in ("whole.npz", "parts.npz"))
    config = disco_meta.Config(**SMALL, num_meta_steps=2, steps_per_call=1, output=whole)
    expected = disco_meta.main(config)
    config = dataclasses.replace(config, output=parts)
    replace = disco_meta.replace

    def interrupted(path, content):
        replace(path, content)
        if path.suffix == ".msgpack":  # the last of the files
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(disco_meta, "replace", interrupted)
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
        flags += ["--num-meta-steps=2", "--steps-per-call=1", f"--output={parts}"]
        patch.setattr(sys, "argv", ["disco_meta.py", *flags])
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)
        with pytest.raises(SystemExit) as exit_code:
            disco_meta.cli()
        signal.signal(signal.SIGINT, handler)
    assert exit_code.value.code == 130 and "--resume" in capsys.readouterr().out
    assert len((tmp_path / "parts.csv").read_text().splitlines()) == 2
    with pytest.raises(disco_meta.ConfigError, match="meta_lr"):
        disco_meta.main(dataclasses.replace(config, resume=True, meta_lr=0.5))
    found = disco_meta.main(dataclasses.replace(config, resume=True))
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name])
    curves = [(tmp_path / name).read_text() for name in ("whole.csv", "parts.csv")]
    assert curves[0] == curves[1] and len(curves[0].splitlines()) == 3
    assert disco.load_weights(parts).keys() == disco.load_weights(whole).keys()
    (tmp_path / "parts.msgpack").write_bytes(b"cut")
    with pytest.raises(disco_meta.ConfigError, match="parts.msgpack is missing, cut short"):
        disco_meta.main(dataclasses.replace(config, resume=True))
