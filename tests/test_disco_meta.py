"""Meta-training: its gradient, its moments, its lifetimes and its run folder."""

import csv
import dataclasses
import functools
import json
import signal
import subprocess
import sys
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import rlax
from conftest import ROOT, for_a_process
from test_cli import content, flags, learned, run

import disco
import disco_meta

FILES = {"config.json", "metrics.csv", "checkpoint.msgpack", "summary.json", "weights.npz"}
FILES |= {"disco_meta.py"}
SMALL = {
    "env_id": "Catch-3x3",
    "num_meta_steps": 2,
    "num_evals": 2,
    "eval_episodes": 2,
    "num_envs": 3,
    "num_steps": 4,
    "valid_steps": 5,
    "num_agents": 2,
    "lifetime": 4,
    "hidden_size": 8,
    "feature_size": 8,
    "model_size": 4,
    "branch_size": 4,
}
KEYS = jax.random.split(jax.random.PRNGKey(0), 1)
MAKE_TRAIN, WRITE = disco_meta.make_train, disco.write
HOLD = """
import fcntl, sys
file = open(sys.argv[1], "r+")
fcntl.lockf(file, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""


def small(**changes):
    return disco_meta.Config(**{**SMALL, **changes})


def compile_train(train, state):
    return train.lower(state).compile()


@pytest.fixture(scope="module", autouse=True)
def compile_once():
    """Runs that differ in nothing but folder and length share the compiled programs."""
    made = {}

    def make_train_once(config):
        size = {"num_meta_steps": config.updates_per_eval, "num_evals": 1}
        key = dataclasses.replace(config, run_dir="", meta_lr=1e-3, **size)
        if key not in made:
            init, train = MAKE_TRAIN(config)
            state = jax.eval_shape(init, KEYS)
            lower = functools.cache(functools.partial(compile_train, train, state))
            init = init.lower(KEYS).compile()
            lowered = types.SimpleNamespace(compile=lower)
            made[key] = init, types.SimpleNamespace(lower=lambda state: lowered)
        return made[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disco_meta, "make_train", make_train_once)
        yield


def start(config):
    init, train = disco_meta.make_train(config)
    return init(KEYS), train.lower(None).compile()


def first_agent(config):
    init, _ = disco_meta.make_train(config)
    return jax.tree.map(lambda x: x[0, 0], init(KEYS).agents)


def alone(function):
    """The function as the only device runs it."""
    program = jax.jit(jax.vmap(function, axis_name="devices", axis_size=1, in_axes=None))
    return lambda *args: jax.tree.map(lambda x: x[0], program(*args))


def rollout(rng, length, num_envs=3):
    shape = (length, num_envs)
    return disco.Transition(
        obs=rng.random((*shape, 9)) < 0.3,
        action=rng.integers(0, 3, shape),
        logits=rng.normal(size=(*shape, 3)),
        reward=rng.normal(size=shape),
        done=rng.random(shape) < 0.3,
        reset=rng.random(shape) < 0.2,
        episode_return=None,
        episode_length=None,
    )


# -------------------------------------- gradients
def test_the_optimizer_moves_as_that_of_disco():
    config = small(lr=0.1, max_update=0.3)
    ours = disco_meta.make_optimizer(config.lr, config.max_update)
    plain = disco.make_optimizer(config)
    rng = np.random.default_rng(0)
    params = {"w": jnp.zeros((3, 4))}
    states = [ours.init(params), plain.init(params)]
    for _ in range(5):
        grads = {"w": jnp.array(rng.normal(size=(3, 4)) * (rng.random((3, 4)) < 0.5))}
        moves = []
        for i, optimizer in enumerate((ours, plain)):
            updates, states[i] = optimizer.update(grads, states[i])
            moves.append(updates["w"])
        np.testing.assert_allclose(*moves, rtol=1e-5)
        assert np.abs(moves[0]).max() <= 0.03 + 1e-7


def test_values_take_no_gradient():
    """From the second inner update on, they depend on the meta-network, as the agent does."""
    config = small()
    agent = first_agent(config)
    network, batch = disco.Agent(3, config), rollout(np.random.default_rng(0), 4)
    target = network.apply(agent.target_params, batch.obs)

    def free(params):
        online = network.apply(params, batch.obs)
        return disco.compute_values(online, target, batch, config).returns.sum()

    def stopped(params):
        online = network.apply(params, batch.obs)
        rule = (disco.random_weights(0), online, target, batch, agent.meta, config)
        _, values, meta = disco.disco_rule(*rule)
        return sum(map(jnp.sum, (*values, *meta.moments)))

    norms = lambda params: [optax.tree.norm(jax.grad(f)(params)) for f in (free, stopped)]
    moving, still = alone(norms)(agent.params)
    assert moving > 0 and still == 0


def test_the_meta_gradient_is_that_of_finite_differences():
    """Through one inner update, in float64, with all that takes no gradient held in place."""
    config = small()
    agent = first_agent(config)
    meta_net = disco.random_weights(0)
    network, rng = disco.Agent(3, config), np.random.default_rng(0)

    with jax.enable_x64(True):
        double = lambda x: jnp.asarray(x, float if x.dtype == np.float32 else x.dtype)
        meta_net, agent = jax.tree.map(double, (meta_net, agent))
        # Some lifetime behind it: with a new agent the rule's outputs are all zero.
        memory = {name: jnp.array(rng.normal(size=128)) for name in ("hidden", "cell")}
        agent = agent._replace(meta=agent.meta._replace(**memory))
        batch, valid = rollout(rng, 4), rollout(rng, 5)
        batches = jax.tree.map(lambda x: x[None], batch)

        def meta_loss(meta_net):
            return disco_meta.meta_loss(meta_net, agent, batches, valid, network, config)

        (loss, (after, _)), grads = alone(jax.value_and_grad(meta_loss, has_aux=True))(meta_net)

        def parts(meta_net):
            """The regularizer, and the agent's gradient."""
            online = network.apply(agent.params, batch.obs)
            target = network.apply(agent.target_params, batch.obs)
            rule = (meta_net, online, target, batch, agent.meta, config)
            targets, values, _ = disco.disco_rule(*rule)

            def loss(params):
                taken = network.apply(params, batch.obs, batch.action)
                return disco.disco_loss(taken, targets, values.returns, batch, config)[0]

            penalty = disco_meta.regularizer(targets, target.logits[:-1])
            return penalty, jax.grad(loss)(agent.params)

        _, first = alone(parts)(meta_net)
        logits = network.apply(after.params, valid.obs).logits
        _, advantage = disco_meta.critic_advantage(after.critic, logits, valid, config)
        moments = alone(lambda x: after.moments.add(x, config.ema_decay))(advantage)
        mean, std = moments.mean_and_std()
        advantage = (advantage - mean) / std

        def reference(meta_net):
            """The first step of Adam is g / |g|: of the two, only the numerator may move."""
            penalty, grads = parts(meta_net)
            move = lambda x, g, at: x - config.lr * g / (np.abs(at) + 1e-8)
            params = jax.tree.map(move, agent.params, grads, first)
            output = network.apply(params, valid.obs, valid.action)
            entropy = lambda x: -(jax.nn.softmax(x) * jax.nn.log_softmax(x)).sum(-1).mean()
            log_prob = jax.nn.one_hot(valid.action, 3) * jax.nn.log_softmax(output.logits)
            loss = -(log_prob.sum(-1)[:-1] * advantage).mean()
            loss += penalty - 1e-2 * entropy(output.logits[:-1])
            return loss - 1e-3 * (entropy(output.y) + entropy(output.z[:-1]))

        reference = alone(reference)
        np.testing.assert_allclose(reference(meta_net), loss, rtol=1e-9)
        weights, tree = jax.tree.flatten(meta_net)
        places = jax.tree.leaves(disco.MetaNetwork())
        names = [f"{place.name}/{part}" for place in places for part in "wb"]
        for i, (name, grad) in enumerate(zip(names, jax.tree.leaves(grads), strict=True)):
            direction = rng.normal(size=grad.shape)
            ends = []
            for step in (1e-6, -1e-6):
                moved = [*weights[:i], weights[i] + step * direction, *weights[i + 1 :]]
                ends.append(reference(jax.tree.unflatten(tree, moved)))
            slope = (ends[0] - ends[1]) / 2e-6
            # The lifetime state takes effect at the next update.
            if name.startswith(("lstm/~/meta_lstm", "lstm/linear_1/")):
                assert slope == 0 and not grad.any(), name
            else:
                assert slope != 0, name
                np.testing.assert_allclose((grad * direction).sum(), slope, rtol=3e-4, atol=1e-9)


def test_the_moments_of_the_advantage_are_those_of_the_training_rollouts():
    """As in the original, against rlax; the validation rollout is only normalized with them."""
    config = small()
    agent, rng = first_agent(config), np.random.default_rng(0)
    network = disco.Agent(3, config)
    batch, valid = rollout(rng, 4), rollout(rng, 5)
    inputs = (disco.random_weights(0), agent, jax.tree.map(lambda x: x[None], batch), valid)
    meta_loss = lambda *inputs: disco_meta.meta_loss(*inputs, network, config)[1]
    after, metrics = alone(meta_loss)(*inputs)

    @jax.jit
    def predict(agent, batch):
        logits = network.apply(agent.params, batch.obs).logits
        value = disco.unsquash(disco_meta.Critic().apply(agent.critic, batch.obs))
        taken = jax.nn.one_hot(batch.action, 3)
        log_prob = (taken * jax.nn.log_softmax(logits)).sum(-1)
        ratio = jnp.exp(log_prob - (taken * jax.nn.log_softmax(batch.logits)).sum(-1))
        discount = config.critic_gamma * (1 - batch.done[:-1])
        steps = (value[:-1], value[1:], batch.reward[:-1], discount, ratio[:-1])
        vtrace = lambda *steps: rlax.vtrace_td_error_and_advantage(*steps, config.critic_lambda)
        return log_prob[:-1], jax.vmap(vtrace, 1, 1)(*steps)

    def update(raw, x):
        return 0.99 * raw + 0.01 * np.array([x.mean(), (x**2).mean()])

    _, vtrace = predict(agent, batch)
    np.testing.assert_allclose(vtrace.errors, vtrace.pg_advantage, atol=1e-3)  # one set of moments
    raw = update(np.zeros(2), vtrace.pg_advantage)
    np.testing.assert_allclose(after.moments.raw, raw, rtol=1e-3)
    np.testing.assert_allclose(after.moments.decay_product, 0.99, rtol=1e-6)
    log_prob, vtrace = predict(after, valid)
    mean, square = update(raw, vtrace.pg_advantage) / (1 - 0.99**2)
    advantage = (vtrace.pg_advantage - mean) / np.sqrt(square - mean**2)
    np.testing.assert_allclose(metrics["meta/policy"], -(log_prob * advantage).mean(), rtol=1e-3)


# -------------------------------------- lifetimes
def test_agents_of_all_ages_are_replaced_at_the_end_of_their_lifetime():
    config = small(num_meta_steps=6, num_evals=6)
    state, train = start(config)
    seen = []
    for _ in range(6):
        seen.append(jax.tree.map(lambda x: np.array(x[0]), state.agents))
        state, _ = train(state)
    ages = [agents.opt_state[0].count // config.inner_updates for agents in seen]
    np.testing.assert_array_equal(ages, [[0, 0], [1, 1], [2, 2], [3, 1], [4, 2], [1, 3]])
    # Two updates move a parameter by twice the learning rate at most, a replacement by more.
    most = config.inner_updates * config.lr * config.max_update * 1.01
    kernel = lambda agents: agents.params["params"]["torso_0"]["kernel"]  # [P, 9, 8]
    moved = np.abs(np.diff([kernel(agents) for agents in seen], axis=0)).max(axis=(2, 3))
    replaced = np.diff(ages, axis=0) != 1
    replaced[0, 0] = True  # the first lifetime begins with the first step
    np.testing.assert_array_equal(moved > most, replaced)


# ------------------------------------- run folder
def read_rows(run_dir):
    with open(run_dir / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_a_run_trains_every_weight_and_disco_takes_the_result(tmp_path):
    config = small(run_dir=str(tmp_path / "run"))
    code, out, err = run(disco_meta, *flags(config))
    assert code == 0, err
    assert {path.name for path in (tmp_path / "run").iterdir()} == FILES
    assert "weights.npz" in out
    before, after = disco.random_weights(0), disco.load_weights(str(tmp_path / "run/weights.npz"))
    assert all((x != y).any() for x, y in zip(*map(jax.tree.leaves, (before, after)), strict=True))
    rows = read_rows(tmp_path / "run")
    assert [(row["update"], row["seed"], row["env_steps"]) for row in rows] == [
        *(("1", "0", "39"), ("1", "1", "39"), ("2", "0", "78"), ("2", "1", "78")),
    ]
    names = {"meta/loss", "meta/policy", "meta/entropy", "meta/grad_norm", "episode/return"}
    names |= {"loss/policy", "policy/entropy", "optim/grad_norm", "eval/return", "eval/length"}
    names |= {"episode/length", "episode/count", "time/sps"}
    assert names <= rows[0].keys() and np.isfinite([float(rows[3][name]) for name in names]).all()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["script"] == "disco_meta" and summary["env_steps"] == 78
    returns = [float(row["eval/return"]) for row in rows[2:]]
    np.testing.assert_allclose(summary["eval_return_per_seed"], returns)


def test_a_killed_run_continues_to_the_same_bytes_and_can_be_extended(tmp_path, monkeypatch):
    """It ends before and after each file of the first call."""
    twin, path = tmp_path / "twin", tmp_path / "run"
    assert run(disco_meta, *flags(small(run_dir=str(twin))))[0] == 0
    for name in ("config.json", "weights.npz", "checkpoint.msgpack"):
        for after in (False, True):

            def interrupt(path, content, name=name, after=after):
                if path.name != name or after:
                    WRITE(path, content)
                if path.name == name:
                    raise KeyboardInterrupt

            with monkeypatch.context() as patch:
                patch.setattr(disco, "write", interrupt)
                patch.setattr(disco_meta, "write", interrupt)
                with pytest.raises(KeyboardInterrupt):
                    run(disco_meta, *flags(small(run_dir=str(path))))
            assert path.joinpath("checkpoint.msgpack").exists() == (
                after and name == "checkpoint.msgpack"
            )
    code, _, err = run(disco_meta, "--run-dir", path)  # options from config.json
    assert code == 0, err
    assert learned(path) == learned(twin)
    assert (path / "weights.npz").read_bytes() == (twin / "weights.npz").read_bytes()
    code, out, _ = run(disco_meta, "--run-dir", path)
    assert code == 0 and "already finished" in out and learned(path) == learned(twin)

    # Any option that leaves the arrays as they are may change.
    longer = ("--num-meta-steps", 3, "--num-evals", 3)
    code, _, err = run(disco_meta, "--run-dir", path, *longer, "--meta-lr", "0.5")
    assert code == 0 and len(read_rows(path)) == 6, err
    assert json.loads((path / "config.json").read_text())["meta_lr"] == 0.5
    files = content(path)
    for wrong in (["--num-envs", "6"], ["--hidden-size", "4"], ["--num-agents", "3"]):
        code, _, err = run(disco_meta, "--run-dir", path, "--num-meta-steps", "9", *wrong)
        assert code == 2 and err.count("\n") == 1, err
    assert content(path) == files
    (path / "checkpoint.msgpack").write_bytes(b"cut")
    code, _, err = run(disco_meta, "--run-dir", path)
    assert code == 2 and err.count("\n") == 1 and "checkpoint.msgpack" in err
    (path / "config.json").write_text("[]")
    code, _, err = run(disco_meta, "--run-dir", path)
    assert code == 2 and err.count("\n") == 1 and "disco_meta.py" in err


def test_two_processes_cannot_share_a_run_folder(tmp_path):
    """The lock is that of another process: one process may open a file twice."""
    words = [*flags(small(run_dir=str(tmp_path)))]
    assert run(disco_meta, *words)[0] == 0
    files = content(tmp_path)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "metrics.csv")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert holder.stdout.readline() == b"locked\n"
        code, _, err = run(disco_meta, *words, "--num-meta-steps", "4")
    finally:
        holder.communicate()
    assert code == 2 and "in use by another process" in err and err.count("\n") == 1
    assert content(tmp_path) == files


def test_ctrl_c_is_one_line_even_during_the_imports(tmp_path):
    words = [sys.executable, "-W", "ignore", str(ROOT / "disco_meta.py")]
    words += ["--run-dir", str(tmp_path / "run")]
    for wait in (1.0, 6.0):
        process = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=for_a_process()
        )
        time.sleep(wait)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 130
        assert err.decode().split("\n")[1:] == [
            f"interrupted; to continue: python {ROOT}/disco_meta.py --run-dir {tmp_path}/run",
            "",
        ]


def test_a_run_that_diverges_keeps_its_last_checkpoint(tmp_path, monkeypatch):
    """The gradient of the second call is NaN."""
    config = small(run_dir=str(tmp_path))
    init, train = disco_meta.make_train(config)
    compiled, calls = train.lower(None).compile(), []

    def diverging(state):
        state, metrics = compiled(state)
        calls.append(jax.tree.map(lambda x: np.array(x[0]), state.meta_net))
        if len(calls) == 2:
            metrics["meta/grad_norm"] *= np.nan
        return state, metrics

    lowered = types.SimpleNamespace(compile=lambda: diverging)
    train = types.SimpleNamespace(lower=lambda state: lowered)
    monkeypatch.setattr(disco_meta, "make_train", lambda config: (init, train))
    code, _, err = run(disco_meta, *flags(config))
    assert code == 2 and "with a lower meta_lr" in err
    assert not (tmp_path / "summary.json").exists()
    weights = (tmp_path / "weights.npz").read_bytes()
    assert weights == disco_meta.weights_file(calls[0])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--valid-steps", "1"], "valid_steps must be at least 2"),
        (["--env-id", "Catsh-8x8"], "unknown env_id Catsh-8x8: did you mean Catch-8x8"),
        (["--env-params", '{"max_steps_in_episode": "9"}'], "env_params: max_steps_in_episode"),
        (["--weights", "missing.npz"], "cannot read missing.npz"),
        (["--weights", str(ROOT / "pyproject.toml")], "cannot read"),
        (["--seed", str(2**32)], f"seed = {2**32} is not in"),
    ],
)
def test_a_wrong_input_is_an_error_before_compiling(words, message, monkeypatch, tmp_path):
    class Compiles(Exception):
        pass

    def compile(*args):
        raise Compiles

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jax, "pmap", lambda *args, **options: compile)
    code, _, err = run(disco_meta, *flags(small(num_meta_steps=3)), *words)
    assert code == 2 and message in err and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_it_starts_from_given_and_from_random_weights(tmp_path):
    meta_net = disco.random_weights(3)
    (tmp_path / "own.npz").write_bytes(disco_meta.weights_file(meta_net))
    for config in (small(weights=str(tmp_path / "own.npz")), small(seed=3)):
        init, _ = MAKE_TRAIN(config)
        found = jax.tree.map(lambda x: x[0], init(KEYS).meta_net)
        jax.tree.map(np.testing.assert_array_equal, found, meta_net)


def test_environments_of_gymnax_train_too():
    """Traced only: the program differs in nothing but the environment."""
    config = small(env_id="CartPole-v1", num_meta_steps=1, num_evals=1)
    init, train = MAKE_TRAIN(config)
    state = jax.eval_shape(init, KEYS)
    assert state.runners.obs.shape == (1, 2, 3, 4)
    after, metrics = jax.eval_shape(train, state)
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, state)
    assert {x.shape for x in metrics.values()} == {(1, 2, 1)}


def test_it_trains_where_jax_computes_in_double_precision():
    """What is trained stays in single precision."""
    with jax.enable_x64(True):
        init, train = MAKE_TRAIN(small())
        state = jax.eval_shape(init, KEYS)
        after, metrics = jax.eval_shape(train, state)
        describe = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
        assert describe(after) == describe(state)
        names = {x.dtype.name for x in jax.tree.leaves(state)}
        assert names == {"float32", "int32", "uint32", "bool"}
        assert {x.dtype.name for x in metrics.values()} == {"float32"}
