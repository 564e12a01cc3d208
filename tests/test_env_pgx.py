"""environments/pgx_envs.py against Pgx itself."""

import importlib
import json
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT, SMALL, load_script

import enjoy

pgx = pytest.importorskip("pgx")


@pytest.fixture
def envs():
    """The module, on a copy of ppo_ff.py of its own."""
    load_script("ppo_ff")  # comes back at the end
    flags = os.environ["XLA_FLAGS"]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "environments")
        patch.delitem(sys.modules, "ppo_ff")
        patch.delitem(sys.modules, "pgx_envs", raising=False)
        module = importlib.import_module("pgx_envs")
        os.environ["XLA_FLAGS"] = flags
        yield module
        del sys.modules["pgx_envs"]


def random_others(env, key, state):
    """The others move until it is the turn of player 0. Returns the state, rewards of player 0."""
    reward = 0
    while state.current_player != 0 and not state.terminated:
        key, action_key, step_key = jax.random.split(key, 3)
        logits = jnp.where(state.legal_action_mask, 0, -1e9)
        state = env.step(state, jax.random.categorical(action_key, logits), step_key)
        reward += state.rewards[0]
    return state, reward


@pytest.mark.parametrize(
    "env_id, time_limit", [("minatar-breakout", 12), ("tic_tac_toe", 7), ("kuhn_poker", 9)]
)
def test_steps_are_those_of_pgx(envs, env_id, time_limit):
    params = json.dumps({"time_limit": time_limit})
    reset, step, num_actions = envs.make_env(envs.Config(env_id=env_id, env_params=params))
    env = pgx.make(env_id)
    env_init, env_step = jax.jit(env.init), jax.jit(env.step)
    env.init, env.step = env_init, env_step
    step = jax.jit(step)
    assert num_actions == env.num_actions

    def first(key):
        init_key, others_key = jax.random.split(key)
        return random_others(env, others_key, env.init(init_key))[0]

    def same(obs, state):
        features = state.observation
        features = features if features.ndim == 3 else features.ravel()
        np.testing.assert_array_equal(obs["obs"], features)
        np.testing.assert_array_equal(obs["mask"], state.legal_action_mask)

    key = jax.random.PRNGKey(0)
    (obs, env_state), state = reset(key), first(key)
    same(obs, state)
    ends, returns = [], []
    keys = jax.random.split(key, 50)
    for key in keys:
        action_key, key = jax.random.split(key)
        logits = jnp.where(state.legal_action_mask, 0, -1e9)
        action = jax.random.categorical(action_key, logits)
        outcome = step(key, env_state, action)
        obs, env_state, reward, terminated, truncated, next_obs = outcome
        step_key, others_key, reset_key = jax.random.split(key, 3)
        state = env.step(state, action, step_key)
        own_reward = state.rewards[0]
        state, others_reward = random_others(env, others_key, state)
        same(next_obs, state)
        assert reward == own_reward + others_reward
        assert terminated == state.terminated
        assert truncated == (state._step_count >= time_limit and not state.terminated)
        if terminated or truncated:
            ends.append("terminated" if terminated else "truncated")
            returns.append(float(reward))
            state = first(reset_key)
        same(obs, state)
    if env_id != "kuhn_poker":  # is over after at most three moves
        assert {*ends} == {"terminated", "truncated"}
    if env_id != "minatar-breakout":
        assert min(returns) < 0 < max(returns)  # won some, lost some


def test_player_0_moves_first_in_half_of_the_games(envs):
    reset, *_ = envs.make_env(envs.Config(env_id="tic_tac_toe"))
    obs, _ = jax.jit(jax.vmap(reset))(jax.random.split(jax.random.PRNGKey(0), 1000))
    stones = obs["obs"].sum(axis=(1, 2, 3))
    assert {*stones.tolist()} == {0, 1}
    assert 0.4 < stones.mean() < 0.6
    places = obs["obs"].sum(axis=0)
    assert places[:, :, 0].sum() == 0  # the first plane has the stones of player 0
    assert places[:, :, 1].min() > 30  # of 500 / 9


def test_illegal_actions_are_never_taken(envs):
    """Pgx punishes them, and ends the game."""
    reset, step, num_actions = envs.make_env(envs.Config(env_id="tic_tac_toe"))
    network = envs.script.ActorCritic(num_actions, 8, is_image=True)

    def play(key):
        obs, env_state = reset(key)
        params = network.init(key, obs)
        params = jax.tree.map(lambda x: 100 * x, params)  # it strongly prefers some actions

        def move(carry, key):
            obs, env_state = carry
            action_key, step_key = jax.random.split(key)
            action = network.apply(params, obs)[0].sample(seed=action_key)
            legal = obs["mask"][action]
            carry = step(step_key, env_state, action)[:2]
            return carry, (action, legal)

        return jax.lax.scan(move, (obs, env_state), jax.random.split(key, 40))[1]

    action, legal = jax.jit(jax.vmap(play))(jax.random.split(jax.random.PRNGKey(1), 20))
    assert legal.all()
    assert {*action.ravel().tolist()} == {*range(9)}


def test_training_and_the_trained_policy_as_an_opponent(envs, tmp_path):
    run_dir = tmp_path / "run"
    options = {"env_id": "tic_tac_toe", "total_timesteps": 32, "lr": 0.1, "run_dir": str(run_dir)}
    envs.script.main(envs.Config(**SMALL | options))
    assert len((run_dir / "metrics.csv").read_text().splitlines()) == 3
    for source in (ROOT / "ppo_ff.py", ROOT / "environments" / "pgx_envs.py"):
        assert (run_dir / source.name).read_bytes() == source.read_bytes()
    assert json.loads((run_dir / "config.json").read_text())["script"] == "pgx_envs"

    # Against itself, on an environment of the same file.
    env = pgx.make("tic_tac_toe")
    opponent = jax.jit(envs.make_opponent("tic_tac_toe", env, str(run_dir)))
    params = json.dumps({"opponent": str(run_dir)})
    reset, *_ = envs.make_env(envs.Config(env_id="tic_tac_toe", env_params=params))
    obs, _ = jax.jit(jax.vmap(reset))(jax.random.split(jax.random.PRNGKey(0), 30))
    act = enjoy.load_policy(run_dir)  # last: it changes the module that it plays
    for i, key in enumerate(jax.random.split(jax.random.PRNGKey(2), 30)):
        one = {name: x[i] for name, x in obs.items()}
        _, action_key, _ = jax.random.split(key, 3)
        action = act(one, key)
        assert one["mask"][action]
        assert action == opponent(action_key, one)


def test_errors(envs, tmp_path, capsys):
    with pytest.raises(SystemExit):
        envs.make_env(envs.Config(env_id="list"))
    assert capsys.readouterr().out.split() == [*pgx.available_envs()]
    (tmp_path / "config.json").write_text('{"env_id": "hex"}')
    for env_id, params, message in [
        ("connect_for", "{}", "connect_four"),
        ("hex", '{"time": 3}', "the defaults are"),
        ("hex", '{"time_limit": "3"}', "the defaults are"),
        ("hex", "[3]", "the defaults are"),
        ("hex", "{", "the defaults are"),
        ("hex", '{"opponent": "nowhere"}', "cannot load the opponent"),
        ("hex", json.dumps({"opponent": str(tmp_path)}), "cannot load the opponent"),
    ]:
        with pytest.raises(envs.script.ConfigError, match=message):
            envs.make_env(envs.Config(env_id=env_id, env_params=params))


def test_an_opponent_of_another_game(envs, tmp_path):
    (tmp_path / "config.json").write_text('{"env_id": "hex"}')
    content = envs.flax.serialization.msgpack_serialize({"best_params": {}})
    (tmp_path / "checkpoint.msgpack").write_bytes(content)
    params = json.dumps({"opponent": str(tmp_path)})
    with pytest.raises(envs.script.ConfigError, match="plays hex"):
        envs.make_env(envs.Config(env_id="tic_tac_toe", env_params=params))
