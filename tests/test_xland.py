"""ppo_rnn on XLand tasks from a tiny benchmark file, in pixels, and in bfloat16."""

import bz2
import io
import pickle
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xminigrid
from conftest import load_script, step_with_rules, tiny
from probes import probe_config, probes_for, start
from test_cli import run
from xminigrid.benchmarks import save_bz2_pickle
from xminigrid.core.constants import TILES_REGISTRY, Colors, Tiles
from xminigrid.core.goals import AgentNearGoal
from xminigrid.core.rules import EmptyRule

import ppo_rnn

COLORS = [Colors.RED, Colors.GREEN, Colors.BLUE]


@pytest.fixture
def benchmark(tmp_path, monkeypatch):
    """Three tasks: stand next to the ball of one colour; a ball of each colour lies about."""
    balls = [TILES_REGISTRY[Tiles.BALL, color] for color in COLORS]
    rulesets = {
        "goals": jnp.stack([AgentNearGoal(tile=ball).encode() for ball in balls]),
        "rules": jnp.stack([EmptyRule().encode()[None]] * 3),
        "init_tiles": jnp.stack([jnp.stack(balls)] * 3),
        "num_rules": jnp.zeros(3, jnp.int32),
    }
    save_bz2_pickle(rulesets, str(tmp_path / "trivial_21k"))
    monkeypatch.setattr(xminigrid.benchmarks, "DATA_PATH", str(tmp_path))
    return rulesets


def xland(**options):
    defaults = {
        "env_id": "XLand-MiniGrid-R1-9x9",
        "benchmark_id": "trivial-21k",
        "env_params": "{}",
    }
    return tiny(ppo_rnn, **defaults | options)


def goals_seen(config, num_envs=64):
    """The goals of fresh environments, and those after a step that ends every episode."""
    reset, step, _ = ppo_rnn.make_env(config)
    limit = xminigrid.make(config.env_id)[1].max_steps

    @jax.vmap
    def goals(key):
        reset_key, step_key = jax.random.split(key)
        _, timestep = reset(reset_key)
        before = timestep.state.goal_encoding
        timestep = timestep.replace(state=timestep.state.replace(step_num=limit - 1))
        toggle = 5  # changes nothing here
        _, timestep, _, terminated, truncated, _ = step(step_key, timestep, toggle)
        return before, timestep.state.goal_encoding, terminated | truncated

    before, after, done = jax.jit(goals)(jax.random.split(jax.random.PRNGKey(0), num_envs))
    assert done.all()
    return np.array(before), np.array(after)


@pytest.mark.parametrize("ruleset_id", [0, 2])
def test_one_ruleset_is_the_one_task(benchmark, ruleset_id):
    for goals in goals_seen(xland(ruleset_id=ruleset_id)):
        assert (goals == np.asarray(benchmark["goals"][ruleset_id])).all()


def test_without_a_ruleset_every_reset_samples_a_task(benchmark):
    before, after = goals_seen(xland())
    for goals in (before, after):
        assert len(np.unique(goals, axis=0)) == 3
    assert (before != after).any()


@pytest.mark.parametrize(
    "options, words",
    [
        ({"ruleset_id": 3}, "must be < 3"),
        ({"benchmark_id": "trivial"}, "benchmark_id.*trivial-21k"),
        ({"benchmark_id": "", "ruleset_id": 0}, "benchmark_id.*trivial-21k"),
        ({"benchmark_id": ""}, "benchmark_id.*trivial-21k"),
        ({"env_id": "MiniGrid-Empty-5x5"}, "XLand-MiniGrid"),
        ({"benchmark_id": "", "env_id": "MiniGrid-Empty-5x5", "ruleset_id": 0}, "XLand-MiniGrid"),
        ({"env_id": "XLand-MiniGrid-R1-9x8"}, "XLand-MiniGrid-R1-9x8.*XLand-MiniGrid-R1-9x9"),
        ({"env_params": '{"max_step": 9}'}, "max_step.*defaults.*max_steps"),
        ({"env_params": '{"max_steps": 9.0}'}, "max_steps.*int"),
        ({"env_params": '{"max_steps": null}'}, "max_steps.*int"),
        ({"env_params": '{"ruleset": {}}'}, "ruleset.*RuleSet"),
        ({"env_params": "[1]"}, "env_params"),
    ],
)
def test_wrong_tasks_are_refused(benchmark, options, words):
    with pytest.raises(ppo_rnn.ConfigError, match=words):
        ppo_rnn.make_env(xland(**options))


def test_a_failed_download_says_where_to_put_the_file(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError("no network")

    monkeypatch.setattr(xminigrid.benchmarks, "DATA_PATH", str(tmp_path))
    monkeypatch.setattr(xminigrid.benchmarks, "_download_from_hf", refuse)
    with pytest.raises(ppo_rnn.ConfigError, match="XLAND_MINIGRID_DATA"):
        ppo_rnn.make_env(xland())


# ---------------------------------- files of users
XLAND = {"env_id": "XLand-MiniGrid-R1-9x9", "env_params": "{}"}
HALF = {"ppo_rnn": {}, "ppo_meta": {"eval_fraction": 0.5}}  # of the three tasks


class Touch:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


class Save(Touch):
    """By a function of NumPy."""

    def __reduce__(self):
        return np.save, (str(self.path), 0)


class Method(Touch):
    """By a method of an admitted class: pickled as numpy's "ndarray.tofile"."""

    def __reduce__(self):
        return np.ndarray.tofile, (np.zeros(3), str(self.path))


def by_name(path):
    """The same with the dotted name that protocol 4 knows."""
    word = lambda x: pickle.SHORT_BINUNICODE + bytes([len(x)]) + x.encode()
    call = word("numpy") + word("ndarray.tofile") + pickle.STACK_GLOBAL
    array, name = (pickle.dumps(x, protocol=4)[2:] for x in (np.zeros(3), str(path)))
    array, name = (x[9:-1] if x[:1] == pickle.FRAME else x[:-1] for x in (array, name))
    arguments = array + name + pickle.TUPLE2
    return pickle.PROTO + b"\x04" + call + arguments + pickle.REDUCE + pickle.STOP


@pytest.mark.parametrize("script", ["ppo_rnn", "ppo_meta"])
@pytest.mark.parametrize("attack", [Touch, Save, Method, by_name], ids=lambda x: x.__name__)
def test_a_file_cannot_run_code(script, attack, benchmark, tmp_path, monkeypatch):
    module, target = load_script(script), tmp_path / "written.npy"
    if attack is by_name:
        content = by_name(target)
    else:
        content = pickle.dumps({**benchmark, "rules": [attack(target)]})
    pickle.loads(content)
    assert target.exists()  # by pickle itself
    target.unlink()
    path = tmp_path / "tasks.bz2"
    path.write_bytes(bz2.compress(content))
    monkeypatch.chdir(tmp_path)
    code, _, err = run(module, "--env-id", XLAND["env_id"], "--benchmark-id", path)
    assert code == 2 and len(err.splitlines()) == 1 and "is not part of an array" in err
    assert not target.exists() and not (tmp_path / "runs").exists()


@pytest.mark.parametrize("script", ["ppo_rnn", "ppo_meta"])
@pytest.mark.parametrize("kind", ["jax", "numpy", "strided"])
def test_files_of_arrays_are_read(script, kind, benchmark, tmp_path):
    module = load_script(script)
    strided = lambda x: np.array([x, x])[0].T.copy().T if x.ndim > 1 else np.repeat(x, 2)[::2]
    convert = {"jax": jnp.asarray, "numpy": np.array, "strided": strided}
    arrays = {name: convert[kind](x) for name, x in benchmark.items()}
    save_bz2_pickle(arrays, str(tmp_path / "tasks.bz2"))
    loaded = module.load_benchmark(str(tmp_path / "tasks.bz2"))
    for name, x in benchmark.items():
        assert (getattr(loaded, name) == x).all() and isinstance(loaded.goals, jax.Array)
    module.make_env(tiny(module, **XLAND, benchmark_id=str(tmp_path / "tasks.bz2"), **HALF[script]))


def test_names_of_numpy_1_are_read():
    reader = ppo_rnn.ArrayUnpickler(io.BytesIO())
    for module, name in (("multiarray", "_reconstruct"), ("numeric", "_frombuffer")):
        assert reader.find_class(f"numpy.core.{module}", name).__name__ == name


@pytest.mark.parametrize("content", [[], {"goals": 0}, "text", {"goals": "text"}])
def test_other_files_are_refused(content, tmp_path):
    save_bz2_pickle(content, str(tmp_path / "tasks.bz2"))
    with pytest.raises(ppo_rnn.ConfigError, match="benchmark_id"):
        ppo_rnn.load_benchmark(str(tmp_path / "tasks.bz2"))


# ----------------------------------------- options
def test_the_rollout_is_short_with_many_environments():
    for num_envs, num_steps, length in (
        (256, 64, 64),
        (1024, 64, 64),
        (1025, 64, 16),
        (8192, 8, 8),
    ):
        config = ppo_rnn.Config(num_envs=num_envs, num_steps=num_steps)
        assert config.rollout_length == length and config.batch_size == num_envs * length
    config = tiny(ppo_rnn, num_envs=1026, num_steps=64, total_timesteps=1)
    init, train, *_ = ppo_rnn.make_train(config)
    keys = jax.random.split(jax.random.PRNGKey(0), jax.local_device_count())
    lengths = []

    def record(rollout, *arguments):
        lengths.append(len(rollout.reward))
        return compute_gae(rollout, *arguments)

    compute_gae = ppo_rnn.compute_gae
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ppo_rnn, "compute_gae", record)
        jax.eval_shape(train, jax.eval_shape(init, keys))
    assert set(lengths) == {16}


def test_env_params_replace_those_of_the_environment(benchmark):
    params = '{"max_steps": 1, "view_size": 7}'
    reset, step, _ = ppo_rnn.make_env(xland(env_params=params))
    obs, env_state = jax.jit(reset)(jax.random.PRNGKey(0))
    *_, truncated, _ = jax.jit(step)(jax.random.PRNGKey(1), env_state, 5)
    assert obs.grid.shape == (7, 7, 2) and truncated


@pytest.mark.parametrize("options", [{"img_obs": True, "bf16": True}, {"memory": False}])
def test_trains_on_a_benchmark(benchmark, options):
    config = xland(num_evals=1, total_timesteps=32, env_params='{"max_steps": 9}', **options)
    init, train, *_ = ppo_rnn.make_train(config)
    state = init(jax.random.split(jax.random.PRNGKey(0), jax.local_device_count()))
    before = jax.tree.map(np.array, state.params)
    state, metrics = train(state)
    assert all(np.isfinite(x).all() for name, x in metrics.items() if name.startswith("loss/"))
    changed = jax.tree.map(lambda old, new: bool((new != old).any()), before, state.params)
    assert changed["params"]["GRU_0"].pop("kernel") == config.memory  # what was remembered
    assert all(jax.tree.leaves(changed))
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}


def test_pixels_are_those_of_the_wrapper():
    """Rendering in the network shows what xminigrid's own pixel wrapper shows."""
    from xminigrid.experimental.img_obs import RGBImgObservationWrapper, _render_obs

    env, params = xminigrid.make("MiniGrid-DoorKey-5x5")
    key = jax.random.PRNGKey(0)
    pixels = RGBImgObservationWrapper(env).reset(params, key).observation
    assert (_render_obs(env.reset(params, key).observation) == pixels).all()


def test_strided_convolutions_are_those_of_flax():
    """The first layer on pixels, as patches, against nn.Conv with stride 8."""
    import flax.linen as nn

    config = xland(img_obs=True, conv_size=4)
    grid = jax.random.randint(jax.random.PRNGKey(0), (2, 3, 3, 2), 0, 11).astype(jnp.uint8)

    class Pixels(ppo_rnn.ActorCritic):
        @nn.compact
        def __call__(self, grid):
            return self.embed_pixels(grid, jnp.float32)

    output, variables = Pixels(6, config).init_with_output(jax.random.PRNGKey(1), grid)
    kernels = [variables["params"][f"Dense_{i}"] for i in (0, 1)]
    from xminigrid.experimental.img_obs import _render_obs

    x = jax.vmap(_render_obs)(grid) / 255
    for kernel, stride, features in zip(kernels, (8, 4), (16, 4), strict=True):
        conv = nn.Conv(features, (stride, stride), strides=stride, padding="VALID")
        shape = (stride, stride, x.shape[-1], features)
        x = nn.relu(
            conv.apply({"params": {**kernel, "kernel": kernel["kernel"].reshape(shape)}}, x)
        )
    np.testing.assert_allclose(output, x, atol=1e-5)


def test_small_advantages_are_not_scaled_up(monkeypatch):
    """The gradient of a minibatch is divided by its deviation, or by min_advantage_std."""
    compute_gae = ppo_rnn.compute_gae
    stds = []

    def record(*arguments):
        advantage, target = compute_gae(*arguments)
        jax.debug.callback(lambda x: stds.append(np.std(x)), advantage)
        return advantage, target

    def gradient_norm(least):
        sizes = {"update_epochs": 1, "num_minibatches": 1, "num_envs": 8}
        sizes |= {"total_timesteps": 8 * 32, "num_evals": 8, "num_seeds": 1}
        weights = {"ent_coef": 0.0, "vf_coef": 0.0, "min_advantage_std": least}
        state, train = start(ppo_rnn, probe_config(ppo_rnn, "Clock", **sizes, **weights))
        _, metrics = train(state)
        jax.effects_barrier()
        return float(metrics["optim/grad_norm"][0, 0, 0])

    monkeypatch.setattr(ppo_rnn, "compute_gae", record)
    with probes_for(ppo_rnn):
        unbounded, bounded = gradient_norm(1e-9), gradient_norm(10.0)
    assert stds[0] == stds[-1] and 0.1 < stds[0] < 5
    np.testing.assert_allclose(bounded * 10, unbounded * stds[0], rtol=1e-4)


@pytest.mark.parametrize("env_id", ["MiniGrid-Empty-5x5", "MiniGrid-EmptyRandom-5x5"])
def test_an_empty_room_needs_no_rules(env_id):
    """The tests step it without, since that compiles faster: see conftest.py."""
    env, params = xminigrid.make(env_id)
    actions = jax.random.randint(jax.random.key(1), (300, 64), 0, env.num_actions(params))
    first = jax.vmap(env.reset, (None, 0))(params, jax.random.split(jax.random.key(0), 64))
    outcomes = []
    for step in (type(env).step, step_with_rules):

        def play(timestep, action, step=step):
            timestep = jax.vmap(step, (None, None, 0, 0))(env, params, timestep, action)
            kept = (timestep.state.grid, timestep.observation, timestep.discount, timestep.reward)
            return timestep, kept

        outcomes.append(jax.lax.scan(play, first, actions)[1])
    (*exact, reward), (*expected, expected_reward) = outcomes
    assert type(env).step is not step_with_rules and (reward > 0).any()
    jax.tree.map(np.testing.assert_array_equal, exact, expected)
    np.testing.assert_allclose(reward, expected_reward, atol=1e-6)
