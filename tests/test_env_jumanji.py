"""environments/jumanji_envs.py against Jumanji itself."""

import importlib
import itertools
import json
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT, SMALL, load_script

import enjoy

jumanji = pytest.importorskip("jumanji")


@pytest.fixture
def envs():
    """The module, on a copy of ppo_ff.py of its own."""
    load_script("ppo_ff")  # comes back at the end
    flags = os.environ["XLA_FLAGS"]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "environments")
        patch.delitem(sys.modules, "ppo_ff")
        patch.delitem(sys.modules, "jumanji_envs", raising=False)
        module = importlib.import_module("jumanji_envs")
        os.environ["XLA_FLAGS"] = flags
        yield module
        del sys.modules["jumanji_envs"]


def same(obs, observation, sizes):
    """sizes: of the parts of an action."""
    if observation.__class__.__name__ == "Observation" and np.ndim(observation[0]) == 3:
        np.testing.assert_array_equal(obs["obs"], observation.grid)
    else:
        fields = [x for name, x in observation._asdict().items() if name != "action_mask"]
        flat = np.concatenate([np.ravel(x) for x in jax.tree.leaves(fields)])
        np.testing.assert_array_equal(obs["obs"], np.float32(flat))
    combinations = itertools.product(*map(range, sizes))
    legal = np.asarray(observation.action_mask)
    if legal.shape == sizes:
        expected = [legal[parts] for parts in combinations]
    else:  # every part has its own row
        expected = [legal[range(len(sizes)), parts].all() for parts in combinations]
    assert obs["mask"].tolist() == expected


@pytest.mark.parametrize(
    "env_id, time_limit, metrics",
    [
        ("Snake-v1", 9, set()),
        ("Game2048-v1", None, {"highest_tile"}),
        ("Minesweeper-v0", None, set()),  # a mask of all combinations of two parts
        ("Cleaner-v0", 5, {"num_dirty_tiles", "ratio_dirty_tiles"}),  # a mask of each of three
    ],
)
def test_steps_are_those_of_jumanji(envs, env_id, time_limit, metrics):
    params = {"time_limit": time_limit} if time_limit else {}
    config = envs.Config(env_id=env_id, env_params=json.dumps(params))
    reset, step, num_actions = envs.make_env(config)
    env = jumanji.make(env_id, **params)
    sizes = tuple(np.atleast_1d(env.action_spec.num_values).tolist())
    assert num_actions == np.prod(sizes)
    env_reset, env_step, step = jax.jit(env.reset), jax.jit(env.step), jax.jit(step)
    if time_limit:
        endless_step = jax.jit(jumanji.make(env_id, time_limit=1000).step)

    key = jax.random.PRNGKey(0)
    (obs, env_state), (state, first) = jax.jit(reset)(key), env_reset(key)
    same(obs, first.observation, sizes)
    ends, keys = [], jax.random.split(key, 50)
    for i, key in enumerate(keys):
        # Illegal actions, too: they end some of the games.
        logits = jnp.where(obs["mask"] | (i % 7 == 6), 0, -1e9)
        action = jax.random.categorical(key, logits)
        outcome = step(key, env_state, action)
        obs, env_state, reward, terminated, truncated, next_obs, info = outcome
        parts = jnp.array(np.unravel_index(action, sizes))
        env_action = parts if len(sizes) > 1 else parts[0]
        done = env_step(state, env_action)[1].last()
        # The end that the limit alone makes is a truncation.
        is_terminal = endless_step(state, env_action)[1].last() if time_limit else done
        state, last = env_step(state, env_action)
        same(next_obs, last.observation, sizes)
        np.testing.assert_allclose(reward, last.reward, atol=1e-6)
        assert (terminated, truncated) == (is_terminal, done & ~is_terminal)
        assert {*info} == metrics
        for name, x in info.items():
            assert x == last.extras[name]
        if done:
            ends.append("terminated" if terminated else "truncated")
            state, last = env_reset(key)
        same(obs, last.observation, sizes)
    if env_id != "Game2048-v1":  # takes longer
        assert {*ends} == ({"terminated", "truncated"} if time_limit else {"terminated"})


def test_without_a_mask_all_actions_are_legal(envs):
    reset, _, num_actions = envs.make_env(envs.Config(env_id="RubiksCube-v0"))
    obs, _ = jax.eval_shape(reset, jax.random.PRNGKey(0))
    assert num_actions == 18
    assert (obs["obs"].shape, obs["mask"].shape) == ((55,), (18,))


def test_illegal_actions_are_never_taken(envs):
    """Of Cleaner-v0, where they end the episode: a third agent that stays in its corner."""
    reset, step, num_actions = envs.make_env(envs.Config(env_id="Cleaner-v0"))
    network = envs.script.ActorCritic(num_actions, 8, is_image=False)

    def play(key):
        obs, env_state = reset(key)
        params = network.init(key, obs)
        params = jax.tree.map(lambda x: 100 * x, params)  # it strongly prefers some actions

        def move(carry, key):
            obs, env_state = carry
            action = network.apply(params, obs)[0].sample(seed=key)
            obs, env_state, _, terminated, *_ = step(key, env_state, action)
            return (obs, env_state), terminated

        return jax.lax.scan(move, (obs, env_state), jax.random.split(key, 50))[1]

    terminated = jax.jit(jax.vmap(play))(jax.random.split(jax.random.PRNGKey(1), 8))
    assert not terminated.any()


def test_training(envs, tmp_path):
    options = {"env_id": "Game2048-v1", "total_timesteps": 32, "run_dir": str(tmp_path)}
    envs.script.main(envs.Config(**SMALL | options))
    header, *rows = (tmp_path / "metrics.csv").read_text().splitlines()
    assert "env/highest_tile" in header.split(",")
    assert len(rows) == 2
    for source in (ROOT / "ppo_ff.py", ROOT / "environments" / "jumanji_envs.py"):
        assert (tmp_path / source.name).read_bytes() == source.read_bytes()
    assert json.loads((tmp_path / "config.json").read_text())["script"] == "jumanji_envs"
    act = enjoy.load_policy(tmp_path)  # last: it changes the module that it plays
    for action in range(4):
        assert act({"obs": np.zeros(16), "mask": np.arange(4) == action}) == action


def test_errors(envs, capsys):
    with pytest.raises(SystemExit):
        envs.make_env(envs.Config(env_id="list"))
    names = {*capsys.readouterr().out.split()}
    assert names == jumanji.registered_environments() - {*envs.UNFIT.split()}
    for env_id, params, message in [
        ("Snake", "{}", "is unknown: did you mean Snake-v1"),
        ("Connector-v3", "{}", "does not fit"),
        ("Snake-v1", '{"rows": 3}', "env_params.*rows"),
        ("Snake-v1", '{"num_rows": "x"}', "env_params"),
        ("Snake-v1", "[3]", "env_params"),
        ("Snake-v1", "{", "env_params"),
    ]:
        with pytest.raises(envs.script.ConfigError, match=message):
            envs.make_env(envs.Config(env_id=env_id, env_params=params))
