"""environments/craftax_envs.py against Craftax used alone."""

import csv
import importlib.util
import os
import sys

import jax
import numpy as np
import pytest
from conftest import ROOT, SMALL

import enjoy

pytest.importorskip("craftax")


@pytest.fixture
def craftax_envs(monkeypatch):
    """The file on a script of its own: fresh copies, which other tests do not see."""
    flags = os.environ["XLA_FLAGS"]  # a script adds one
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "environments")])
    for path in ("environments/family.py", "ppo_ff.py", "environments/craftax_envs.py"):
        spec = importlib.util.spec_from_file_location(path.split("/")[-1][:-3], ROOT / path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
    monkeypatch.setenv("XLA_FLAGS", flags)
    return module


def test_steps_are_those_of_craftax(craftax_envs):
    """50 steps with the same keys and actions, by an agent that twice is killed from outside."""
    config = craftax_envs.Config(env_params='{"max_timesteps": 20}')
    reset, step, num_actions = craftax_envs.make_env(config)
    assert num_actions == 17
    env = craftax_envs.make_craftax_env_from_name(config.env_id, auto_reset=False)
    params = env.default_params.replace(max_timesteps=20)
    step = jax.jit(step)
    keys = jax.random.split(jax.random.PRNGKey(1), 51)
    actions = jax.random.randint(keys[0], (50,), 0, num_actions)
    obs, env_state = reset(keys[0])  # compiled by Craftax
    expected_obs, state = env.reset(keys[0], params)
    ends = []
    for i, (key, action) in enumerate(zip(keys[1:], actions, strict=True)):
        np.testing.assert_array_equal(obs, expected_obs)
        if i in (29, 49):  # at the second time, the time is up as well
            env_state, state = (x.replace(player_health=-9) for x in (env_state, state))
        outcome = step(key, env_state, action)
        obs, env_state, reward, terminated, truncated, next_obs, info = outcome
        step_key, reset_key = jax.random.split(key)
        outcome = env.step(step_key, state, action, params)
        expected_obs, state, expected_reward, done, expected_info = outcome
        np.testing.assert_array_equal(next_obs, expected_obs)
        assert reward == expected_reward
        assert info == {k: v for k, v in expected_info.items() if k != "discount"}
        ends.append("death" * bool(terminated) + "limit" * bool(truncated))
        assert bool(done) == bool(ends[-1])
        if done:
            achieved = np.array([v for k, v in info.items() if k != "score"])
            assert achieved.size == 22 and set(achieved) <= {0, 100}
            np.testing.assert_allclose(info["score"], np.exp(np.log1p(achieved).mean()) - 1, 1e-4)
            expected_obs, state = env.reset(reset_key, params)
    assert {i: end for i, end in enumerate(ends) if end} == {19: "limit", 29: "death", 49: "death"}


def test_two_updates(craftax_envs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = SMALL | {"total_timesteps": 32, "num_evals": 1}
    config = craftax_envs.Config(**sizes, env_params='{"max_timesteps": 6}', run_dir="a")
    summary = craftax_envs.script.main(config)
    assert (summary["script"], summary["env_steps"]) == ("craftax_envs", 32)
    names = ("ppo_ff.py", "environments/craftax_envs.py")
    for path in (ROOT / name for name in names):
        assert (tmp_path / "a" / path.name).read_bytes() == path.read_bytes()
    with open(tmp_path / "a" / "metrics.csv") as file:
        first, second = csv.DictReader(file)
    # Every episode takes 6 steps: none ends in the first update, all end in the second.
    assert (first["episode/count"], second["episode/count"]) == ("0.0", "4.0")
    assert sum(name.startswith("env/Achievements/") for name in first) == 22
    assert first["env/score"] == "" and float(second["env/score"]) >= 0
    act = enjoy.load_policy(tmp_path / "a")
    assert 0 <= int(act(np.zeros(1345, np.float32))) < 17


def test_list(craftax_envs, capsys):
    with pytest.raises(SystemExit):
        craftax_envs.make_env(craftax_envs.Config(env_id="list"))
    names = capsys.readouterr().out.split()
    assert names == craftax_envs.NAMES
    for name in names[::2]:  # the others draw textures for minutes
        env = craftax_envs.make_craftax_env_from_name(name, auto_reset=False)
        _, _, num_actions = craftax_envs.make_env(craftax_envs.Config(env_id=name))
        assert num_actions == env.num_actions


@pytest.mark.parametrize(
    "options, message",
    [
        ({"env_id": "Craftax-Clasic"}, "unknown env_id Craftax-Clasic: did you mean Craftax-"),
        ({"env_params": '{"max_steps": 9}'}, "'max_steps'; the defaults are "),
        ({"env_params": '{"max_timesteps": 9.5}'}, "max_timesteps must be of type int; "),
        ({"env_params": "[9]"}, "env_params: "),
        ({"env_params": "{9}"}, "env_params: "),
    ],
)
def test_errors(craftax_envs, options, message):
    with pytest.raises(craftax_envs.script.ConfigError, match=message):
        craftax_envs.make_env(craftax_envs.Config(**options))


def test_without_craftax(craftax_envs, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "craftax.craftax_env", None)
    with pytest.raises(SystemExit, match="^2$"):
        exec(compile((ROOT / "environments" / "craftax_envs.py").read_text(), "x", "exec"), {})
    error = "error: Craftax is missing: pip install craftax==1.6.1\n"
    assert capsys.readouterr().err == error
