"""Meta-training: its gradient, its moments, its lifetimes and its run folder."""

import csv
import dataclasses
import functools
import io
import json
import pickle
import signal
import subprocess
import sys
import time
import types

import disco_reference as reference
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT, for_a_process, with_devices
from test_cli import content, flags, learned, run

import disco
import disco_meta

FILES = {"config.json", "metrics.csv", "checkpoint.msgpack", "summary.json", "weights.npz"}
FILES |= {"disco.py", "disco_meta.py"}
SMALL = {
    "env_id": ("Catch-3x3",),
    "num_meta_steps": 2,
    "num_evals": 2,
    "eval_episodes": 2,
    "num_envs": 3,
    "num_steps": 4,
    "valid_steps": 5,
    "num_agents": 2,
    "lifetime": 4,
    "hidden_sizes": (8, 8),
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


def rollout(rng, length, num_envs, num_actions):
    shape = (length, num_envs)
    return disco.Transition(
        obs=rng.random((*shape, 9)) < 0.3,
        action=rng.integers(0, num_actions, shape),
        logits=rng.normal(size=(*shape, num_actions)),
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


META_STEP = """
import pickle, sys

import jax
import jax.numpy as jnp
import numpy as np

import disco
import disco_meta

with open(sys.argv[1], "rb") as file:
    config, agents, rollouts = pickle.load(file)
meta_loss = disco_meta.meta_loss


def loss_of_the_given_rollouts(meta_net, agent, batches, valid, network, config):
    mine = lambda x: jnp.asarray(x)[jax.lax.axis_index("devices")]
    batches, valid = jax.tree.map(mine, rollouts[network.num_actions])
    return meta_loss(meta_net, agent, batches, valid, network, config)


def make_env(config):
    # Since the rollouts are given, any environment will do.
    obs, end = jnp.zeros(9, bool), jnp.bool(True)
    step = lambda key, env_state, action: (obs, key, jnp.float32(0), end, ~end, obs)
    return lambda key: (obs, key), step, int(config.env_id)


disco_meta.meta_loss, disco.make_env = loss_of_the_given_rollouts, make_env
init, train = disco_meta.make_train(config)
state = jax.eval_shape(init, jax.random.split(jax.random.PRNGKey(0), 2))
state = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), state)  # but for what follows
two = lambda tree: jax.tree.map(lambda x: np.stack([x, x]), tree)
double = lambda x: x.astype(float) if x.dtype == np.float32 else x
state = state._replace(
    meta_net=jax.tree.map(double, two(disco.load_weights(config.weights))),
    opt_state=jax.tree.map(double, state.opt_state),
    agents=tuple(
        two(new)._replace(key=old.key) for new, old in zip(agents, state.agents, strict=True)
    ),
)
state, metrics = train(state)
# Adam's first moment started at zero: it is 0.1 times the gradient.
grads = jax.tree.map(lambda x: x / 0.1, state.opt_state[0].mu)
agents = [agents._replace(key=None) for agents in state.agents]
with open(sys.argv[2], "wb") as file:
    pickle.dump(jax.tree.map(np.array, (grads, agents, metrics)), file)
"""


def some_agent(rng, config, rule_sizes, num_actions, scale):
    """With some lifetime behind it: AgentState, and Agent and Critic of the reference."""
    sizes = {"hidden_sizes": (8 * scale, 8 * scale), "model_size": 4 * scale}
    sizes |= {"branch_size": 4 * scale}
    config = dataclasses.replace(config, **sizes)
    network = disco.Agent(num_actions, config, rule_sizes.prediction)
    obs = jnp.zeros(9)
    shapes = jax.eval_shape(lambda key: network.init(key, obs), KEYS[0])["params"]
    critic_shapes = jax.eval_shape(lambda key: disco_meta.Critic().init(key, obs), KEYS[0])

    def layers(shapes):
        """Random, with Adam's moments: some of its steps are clipped."""
        draw = lambda x: rng.normal(size=x.shape) * (x.shape[0] ** -0.5 if x.ndim > 1 else 0.1)
        new, mu = (jax.tree.map(draw, shapes) for _ in range(2))
        root = jax.tree.map(lambda x: rng.uniform(1e-3, 1e-2, x.shape), shapes)
        mu = jax.tree.map(lambda m, x: 0.3 * np.sign(m) * x, mu, root)
        return new, reference.Adam(1000, mu, jax.tree.map(np.square, root))

    def optimizer_state(adam):
        whole = lambda tree: {"params": tree}
        plain = disco_meta.make_optimizer(1.0, 1.0).init(whole(adam.mu))
        state = plain[0]._replace(count=np.int32(adam.count), mu=whole(adam.mu), nu=whole(adam.nu))
        return (state, *plain[1:])

    target_layers, _ = layers(shapes)
    own_layers, adam = layers(shapes)
    agent = reference.Agent(
        layers=own_layers,
        target_layers=target_layers,
        adam=adam,
        moments=reference.Moments(0.05, 0.2, 0.9),
        hidden=rng.normal(size=rule_sizes.lifetime_lstm),
        cell=rng.normal(size=rule_sizes.lifetime_lstm),
    )
    critic = reference.Critic(*layers(critic_shapes["params"]), reference.Moments(0.1, 0.3, 0.9))
    moments = lambda x: disco.Moments(np.array(x[:2]), np.array(x.decay_product))
    state = disco_meta.AgentState(
        key=None,
        params={"params": agent.layers},
        target_params={"params": agent.target_layers},
        opt_state=optimizer_state(agent.adam),
        meta=disco.MetaState(moments(agent.moments), agent.hidden, agent.cell),
        critic={"params": critic.layers},
        critic_opt_state=optimizer_state(critic.adam),
        moments=moments(critic.moments),
    )
    return state, agent, critic


SMALL_RULE = disco.RuleSizes(30, 16, 8, 8)


@pytest.mark.parametrize(
    ("num_actions", "rule_sizes"),
    [((3,), SMALL_RULE), ((3, 4), SMALL_RULE), ((3,), disco.DISCO103_SIZES)],
    ids=["one-small", "two-small", "one-large"],
)
def test_the_meta_gradient_is_that_of_finite_differences(num_actions, rule_sizes, tmp_path):
    """A meta step of two agents on two devices in float64, against NumPy.

    They play on one environment, or each on its own with a size of its own. From the second inner
    update on, the agent and the lifetime state depend on the meta-network, and from the third on,
    so does the target network.
    """
    rng = np.random.default_rng(0)
    file = disco_meta.weights_file(disco.random_weights(0, rule_sizes))
    weights = dict(np.load(io.BytesIO(file)))
    # Biases above zero: no layer is silent behind its ReLU.
    weights |= {k: rng.uniform(0, 1, x.shape) for k, x in weights.items() if k.endswith("/b")}
    weights = {name: x.astype(np.float32).astype(float) for name, x in weights.items()}
    np.savez(tmp_path / "weights.npz", **weights)
    sizes = {"inner_updates": 3, "num_envs": 4, "lifetime": 0, "num_meta_steps": 1, "num_evals": 1}
    options = {"lr": 0.02, "max_update": 0.4, "ent_coef": 0.01, "critic_lr": 0.05}
    options |= {"critic_max_update": 0.3, "critic_ema_decay": 0.8}
    coefs = {"policy_coef": 1.5, "y_coef": 0.5, "z_coef": 2.0, "aux_coef": 0.7, "vf_coef": 0.3}
    scales = (1, 2)[: len(num_actions)]  # of the agents' sizes
    populations = {"env_id": tuple(map(str, num_actions)), "agent_scale": tuple(map(float, scales))}
    options |= populations | {"num_agents": 2 // len(num_actions)}
    config = small(**sizes, **options, **coefs, weights=str(tmp_path / "weights.npz"))
    places = list(zip(num_actions, scales, strict=True)) * config.num_agents  # of both agents
    states, *others = zip(
        *[some_agent(rng, config, rule_sizes, *place) for place in places], strict=True
    )
    join = lambda *x: np.stack(x)
    agents = [jax.tree.map(join, *states[i :: len(num_actions)]) for i in range(len(num_actions))]
    rollouts, played = {}, []
    for n, _ in places:
        batches = [[rollout(rng, 4, 2, n) for _ in range(2)] for _ in range(3)]  # [K][D]
        valid = [rollout(rng, 5, 2, n) for _ in range(2)]
        of_device = lambda d, batches=batches: jax.tree.map(join, *[x[d] for x in batches])
        whole = jax.tree.map(join, (of_device(0), valid[0]), (of_device(1), valid[1]))
        # The agents of one population are given the same rollouts.
        played.append((batches, valid) if rollouts.setdefault(n, whole) is whole else played[-1])

    inputs, outputs = tmp_path / "inputs", tmp_path / "outputs"
    inputs.write_bytes(pickle.dumps((config, agents, rollouts)))
    command = [sys.executable, "-W", "ignore", "-c", META_STEP, str(inputs), str(outputs)]
    env = with_devices(2) | {"JAX_ENABLE_X64": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run(command, env=env, check=True, timeout=400)
    grads, after, metrics = pickle.loads(outputs.read_bytes())

    held = [reference.Held() for _ in states]

    def meta_losses(weights):
        loss = lambda agent, critic, rollouts, hold: reference.meta_loss(
            weights, agent, critic, *rollouts, config, hold
        )
        return [loss(*place) for place in zip(*others, played, held, strict=True)]

    for i, (loss, agent, critic, policy, entropy, penalty) in enumerate(meta_losses(weights)):
        names = {"meta/loss": loss, "meta/policy": policy, "meta/entropy": entropy}
        names["meta/regularizer"] = penalty
        for name, x in names.items():
            np.testing.assert_allclose(metrics[name][:, i, 0], x, rtol=2e-6)
        mine, place = (after[0], i) if len(after) == 1 else (after[i], 0)
        pairs = {
            "params": (mine.params["params"], agent.layers),
            "target_params": (mine.target_params["params"], agent.target_layers),
            "critic": (mine.critic["params"], critic.layers),
            "hidden": (mine.meta.hidden, agent.hidden),
            "cell": (mine.meta.cell, agent.cell),
            "moments": (mine.meta.moments.raw, np.array(agent.moments[:2])),
            "critic_moments": (mine.moments.raw, np.array(critic.moments[:2])),
        }
        for found, expected in pairs.values():
            same = lambda x, y, place=place: np.testing.assert_allclose(
                x[:, place], [y, y], rtol=1e-9, atol=1e-12
            )
            jax.tree.map(same, found, expected)

    def slope(direction):
        """Central difference of the mean loss of the agents."""
        ends = []
        for step in (1e-6, -1e-6):
            for hold in held:
                hold.rewind()
            moved = {name: x + step * direction.get(name, 0) for name, x in weights.items()}
            ends.append(np.mean([loss for loss, *_ in meta_losses(moved)]))
        return (ends[0] - ends[1]) / 2e-6

    places = jax.tree.leaves(disco.name_layers())
    names = [f"{place.name}/{part}" for place in places for part in "wb"]
    leaves = zip(names, jax.tree.leaves(grads), strict=True)
    grads = {name: x.reshape(2, *weights[name].shape) for name, x in leaves}
    for name, x in grads.items():
        np.testing.assert_array_equal(x[0], x[1], err_msg=name)
    each = [[f"{place.name}/w", f"{place.name}/b"] for place in places]
    for moving in [*each, names]:  # along a direction of each layer, and of all
        direction = {name: rng.normal(size=weights[name].shape) for name in moving}
        found = sum((grads[name][0] * x).sum() for name, x in direction.items())
        expected = slope(direction)
        assert abs(expected) > 1e-6, moving
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-9, err_msg=moving[0])


# -------------------------------------- lifetimes
def test_agents_of_all_ages_are_replaced_at_the_end_of_their_lifetime():
    config = small(num_meta_steps=6, num_evals=6)
    state, train = start(config)
    seen = []
    for _ in range(6):
        seen.append(jax.tree.map(lambda x: np.array(x[0]), state.agents[0]))
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


# ------------------------------------ environments
def test_each_environment_has_agents_of_its_own_size_and_rows_of_its_own(tmp_path):
    """Traced only."""
    names = ("Catch-3x3", "CartPole-v1")
    config = small(env_id=names, agent_scale=(1.0, 0.25), num_meta_steps=1, num_evals=1)
    init, _ = MAKE_TRAIN(config)
    state = jax.eval_shape(init, KEYS)
    kernels = [agents.params["params"]["torso_1"]["kernel"].shape for agents in state.agents]
    assert kernels == [(1, 2, 8, 8), (1, 2, 2, 2)]
    assert [runners.obs.shape for runners in state.runners] == [(1, 2, 3, 9), (1, 2, 3, 4)]
    assert state.eval_return.shape == (1, 4)

    metrics = {"eval/return": np.array([[1.0], [np.nan], [3.0], [4.0]])}
    with open(tmp_path / "metrics.csv", "x") as table:
        disco_meta.append_rows(table, config, 5, metrics)
    first, second = names
    cells = [(row["update"], *list(row.values())[1:3]) for row in read_rows(tmp_path)]
    assert cells == [("5", first, "0"), ("5", first, "1"), ("5", second, "2"), ("5", second, "3")]
    assert [row["eval/return"] for row in read_rows(tmp_path)] == ["1.0", "", "3.0", "4.0"]
    assert {row["env_steps"] for row in read_rows(tmp_path)} == {str(5 * config.batch_size)}


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
    assert code == 0 and "has finished 2 meta steps" in out and learned(path) == learned(twin)

    # Any option that leaves the arrays as they are may change.
    longer = ("--num-meta-steps", 3, "--num-evals", 3)
    code, _, err = run(disco_meta, "--run-dir", path, *longer, "--meta-lr", "0.5")
    assert code == 0 and len(read_rows(path)) == 6, err
    assert json.loads((path / "config.json").read_text())["meta_lr"] == 0.5
    files = content(path)
    for wrong in (["--num-envs", "6"], ["--hidden-sizes", "4"], ["--num-agents", "3"]):
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
        (["--env-id"], "env_id must name an environment"),
        (["--agent-scale", "1", "2"], "env_params and agent_scale must have one value or 1"),
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


def test_a_rule_of_another_size_is_found_in_its_file(tmp_path):
    """Traced only."""
    sizes = {"prediction_size": 9, "rule_size": 7, "lifetime_size": 6, "embedding_size": 5}
    init, _ = MAKE_TRAIN(small(**sizes))
    meta_net = jax.tree.map(lambda x: np.asarray(x[0]), init(KEYS).meta_net)
    assert disco.sizes_of(meta_net) == (9, 7, 6, 5) == tuple(sizes.values())
    path = tmp_path / "weights.npz"
    path.write_bytes(disco_meta.weights_file(meta_net))
    jax.tree.map(np.testing.assert_array_equal, disco.load_weights(str(path)), meta_net)
    agent = {"hidden_sizes": (8,), "model_size": 4, "branch_size": 4, "env_id": "Catch-3x3"}
    config = disco.Config(weights=str(path), total_timesteps=5800, **agent)
    init, train, *_ = disco.make_train(config)
    state, _ = jax.eval_shape(train, jax.eval_shape(init, KEYS))
    assert state.params["params"]["y"]["bias"].shape == (1, 1, 9)
    assert state.meta.hidden.shape == (1, 1, 6)
    init, _ = MAKE_TRAIN(small(weights=str(path)))  # whatever the options say
    assert jax.eval_shape(init, KEYS).agents[0].meta.hidden.shape == (1, 2, 6)


def test_it_starts_from_given_and_from_random_weights(tmp_path):
    meta_net = disco.random_weights(3)
    (tmp_path / "own.npz").write_bytes(disco_meta.weights_file(meta_net))
    for config in (small(weights=str(tmp_path / "own.npz")), small(seed=3)):
        init, _ = MAKE_TRAIN(config)
        found = jax.tree.map(lambda x: x[0], init(KEYS).meta_net)
        jax.tree.map(np.testing.assert_array_equal, found, meta_net)


def test_environments_of_gymnax_train_too_even_where_jax_computes_in_double_precision():
    """Traced only. What is trained stays in single precision."""
    config = small(env_id=("CartPole-v1",), num_meta_steps=1, num_evals=1)
    with jax.enable_x64(True):
        init, train = MAKE_TRAIN(config)
        state = jax.eval_shape(init, KEYS)
        assert state.runners[0].obs.shape == (1, 2, 3, 4)
        after, metrics = jax.eval_shape(train, state)
        describe = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
        assert describe(after) == describe(state)
        trained = state._replace(runners=None)
        names = {x.dtype.name for x in jax.tree.leaves(trained)}
        assert names == {"float32", "int32", "uint32"}
        assert {(x.shape, x.dtype.name) for x in metrics.values()} == {((1, 2, 1), "float32")}
