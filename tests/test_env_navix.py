"""environments/navix_envs.py against Navix used alone."""

import importlib.util
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT, SMALL

import enjoy

navix = pytest.importorskip("navix")

LEFT, RIGHT, FORWARD, PICK_UP, DROP, TOGGLE, NOTHING = range(7)  # actions
TO_GOAL = [FORWARD, FORWARD, RIGHT, FORWARD, FORWARD]  # in Navix-Empty-5x5-v0


@pytest.fixture
def navix_envs(monkeypatch):
    """The file on a script of its own: fresh copies, which other tests do not see."""
    flags = os.environ["XLA_FLAGS"]  # a script adds one
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "environments")])
    for path in ("environments/family.py", "ppo_ff.py", "environments/navix_envs.py"):
        spec = importlib.util.spec_from_file_location(path.split("/")[-1][:-3], ROOT / path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
    monkeypatch.setenv("XLA_FLAGS", flags)
    return module


@pytest.mark.parametrize(
    "env_id, max_steps, actions",
    [
        ("Navix-Empty-5x5-v0", 20, TO_GOAL + [NOTHING] * 20 + TO_GOAL),
        ("Navix-Empty-5x5-v0", 5, TO_GOAL + [NOTHING] * 5),  # the goal at the time limit
        ("Navix-DoorKey-Random-6x6-v0", 12, []),
    ],
)
def test_steps_are_those_of_navix(navix_envs, env_id, max_steps, actions):
    """50 steps with the same keys and actions. Navix itself never resets here."""
    config = navix_envs.Config(env_id=env_id, env_params=f'{{"max_steps": {max_steps}}}')
    reset, step, num_actions = navix_envs.make_env(config)
    env = navix.make(env_id, max_steps=max_steps, observation_fn=navix.observations.symbolic)
    assert num_actions == 7
    step, env_reset, env_step = jax.jit(step), jax.jit(env.reset), jax.jit(env.step)
    keys = jax.random.split(jax.random.PRNGKey(3), 51)
    rest = jax.random.randint(keys[0], (50 - len(actions),), 0, num_actions)
    obs, env_state = jax.jit(reset)(keys[0])
    timestep = env_reset(keys[0])
    ends = []

    def assert_shows(obs, timestep):
        assert obs.max() <= 1
        np.testing.assert_array_equal(np.round(obs * np.array([10, 5, 3])), timestep.observation)

    for key, action in zip(keys[1:], [*actions, *rest.tolist()], strict=True):
        assert_shows(obs, timestep)
        outcome = step(key, env_state, jnp.int32(action))
        obs, env_state, reward, terminated, truncated, next_obs = outcome
        timestep = env_step(timestep, jnp.int32(action))
        assert_shows(next_obs, timestep)
        assert reward == timestep.reward
        assert terminated == (timestep.step_type == 2)
        assert truncated == (timestep.step_type == 1)
        ends.append("goal" if terminated else "limit" if truncated else "")
        if terminated or truncated:
            timestep = env_reset(key)
    expected = {20: {4: "goal", 24: "limit", 29: "goal"}, 5: {4: "goal", 9: "limit"}}
    for i, end in expected.get(max_steps, {11: "limit", 23: "limit"}).items():
        assert ends[i] == end


def test_two_updates(navix_envs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = SMALL | {"total_timesteps": 32, "num_evals": 1, "num_envs": 4, "num_steps": 4}
    params = '{"max_steps": 6}'
    config = navix_envs.Config(**sizes, env_id="Navix-Empty-5x5-v0", env_params=params, run_dir="a")
    summary = navix_envs.script.main(config)
    assert (summary["script"], summary["env_steps"]) == ("navix_envs", 32)
    names = ("ppo_ff.py", "environments/navix_envs.py")
    for path in (ROOT / name for name in names):
        assert (tmp_path / "a" / path.name).read_bytes() == path.read_bytes()
    assert navix_envs.script.main(config) == summary  # reads the checkpoint
    reset, *_ = navix_envs.make_env(config)
    obs, _ = reset(jax.random.PRNGKey(0))
    act = enjoy.load_policy(tmp_path / "a")
    assert {int(act(obs)) for _ in range(50)} == set(range(7))
    words = [str(tmp_path / "a"), "--episodes", "3"]
    assert enjoy.main(words).shape == (1, 3)
    with pytest.raises(enjoy.RunError, match="no video of navix_envs"):
        enjoy.main([*words, "--video", str(tmp_path / "out.gif")])


def test_a_checkpoint_holds_no_pictures(navix_envs):
    """Navix draws the grid in every reset, for observations in color."""
    reset, *_ = navix_envs.make_env(navix_envs.Config(env_id="Navix-DoorKey-16x16-v0"))
    shapes = jax.eval_shape(reset, jax.random.PRNGKey(0))
    assert sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes)) < 10_000


def test_list(navix_envs, capsys):
    with pytest.raises(SystemExit):
        navix_envs.make_env(navix_envs.Config(env_id="list"))
    names = capsys.readouterr().out.split()
    assert len(names) == 41
    assert navix_envs.Config().env_id in names


@pytest.mark.parametrize(
    "options, message",
    [
        ({"env_id": "Navix-DorKey-5x5"}, "did you mean Navix-DoorKey-5x5-v0 or "),
        ({"env_params": '{"max_step": 9}'}, "wrong name or type; the defaults are"),
        ({"env_params": '{"max_steps": 9.5}'}, "wrong name or type; the defaults are"),
        ({"env_params": "[9]"}, "env_params: "),
        ({"env_params": "{9}"}, "env_params: "),
    ],
)
def test_errors(navix_envs, options, message):
    with pytest.raises(navix_envs.script.ConfigError, match=message):
        navix_envs.make_env(navix_envs.Config(**options))


def test_without_navix(navix_envs, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "navix", None)
    with pytest.raises(SystemExit, match="^2$"):
        exec(compile((ROOT / "environments" / "navix_envs.py").read_text(), "x", "exec"), {})
    assert capsys.readouterr().err == "error: Navix is missing: pip install navix==0.7.4\n"
