"""ppo_rnn on XLand tasks from a tiny benchmark file, in pixels, and in bfloat16."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xminigrid
from conftest import program, tiny
from probes import probe_config, probes_for, start
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
    defaults = {"env_id": "XLand-MiniGrid-R1-9x9", "benchmark_id": "trivial-21k", "env_params": ""}
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

    before, after, done = jax.jit(goals)(jax.random.split(jax.random.key(0), num_envs))
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
        ({"env_params": '{"max_step": 9}'}, "max_step.*known:.*max_steps"),
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


def test_memory_tasks_are_trained_in_four_epochs():
    """The help states the rule; the program shows which number was used."""

    def trained(env_id, update_epochs):
        return program(ppo_rnn, tiny(ppo_rnn, env_id=env_id, update_epochs=update_epochs))

    for env_id, used, other in (("MiniGrid-MemoryS8", 4, 1), ("MiniGrid-Empty-5x5", 1, 4)):
        by_default = trained(env_id, None)
        assert by_default == trained(env_id, used)
        assert by_default != trained(env_id, other)
    assert "None: 1, or 4 in MiniGrid-Memory*" in Path(ppo_rnn.__file__).read_text()


def test_env_params_replace_those_of_the_environment(benchmark):
    params = '{"max_steps": 1, "view_size": 7}'
    reset, step, _ = ppo_rnn.make_env(xland(env_params=params))
    obs, env_state = jax.jit(reset)(jax.random.key(0))
    *_, truncated, _ = jax.jit(step)(jax.random.key(1), env_state, 5)
    assert obs.grid.shape == (7, 7, 2) and truncated


@pytest.mark.parametrize("options", [{"img_obs": True}, {"bf16": True, "memory": False}])
def test_trains_on_a_benchmark(benchmark, options):
    config = xland(num_evals=1, total_timesteps=32, env_params='{"max_steps": 9}', **options)
    init, train, *_ = ppo_rnn.make_train(config)
    state = init(jax.random.split(jax.random.key(0), jax.local_device_count()))
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
    key = jax.random.key(0)
    pixels = RGBImgObservationWrapper(env).reset(params, key).observation
    assert (_render_obs(env.reset(params, key).observation) == pixels).all()


def test_strided_convolutions_are_those_of_flax():
    """The first layer on pixels, as patches, against nn.Conv with stride 8."""
    import flax.linen as nn

    config = xland(img_obs=True, conv_size=4)
    grid = jax.random.randint(jax.random.key(0), (2, 3, 3, 2), 0, 11).astype(jnp.uint8)

    class Pixels(ppo_rnn.ActorCritic):
        @nn.compact
        def __call__(self, grid):
            return self.embed_pixels(grid, jnp.float32)

    output, variables = Pixels(6, config).init_with_output(jax.random.key(1), grid)
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
