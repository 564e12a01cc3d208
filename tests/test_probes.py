"""Short trainings on environments whose values and best actions are known."""

import jax
import numpy as np
import pytest
from conftest import SCRIPTS, load_script
from probes import (  # noqa: F401
    CONTINUOUS,
    Tasks,
    look,
    probe_config,
    probes_for,
    start,
    to_numpy,
)

GAMMA = 0.8


def learn(module, name, **changes):
    """Returns the configuration and the policy of a short training of the first seed."""
    sizes = {"num_envs": 32, "num_steps": 8, "total_timesteps": 32 * 8 * 200, "hidden_size": 32}
    options = {"lr": 5e-3, "gamma": GAMMA, "ent_coef": 0.0, "update_epochs": 4}
    if "normalize_reward" in module.Config.__dataclass_fields__:
        options["normalize_reward"] = False  # the values below are those of the rewards as they are
    config = probe_config(module, name, **{**sizes, **options, **changes})
    state, train = start(module, config)
    state, metrics = train(state)
    return config, jax.tree.map(lambda x: x[0, 0], to_numpy(state.params)), metrics


@pytest.fixture(scope="module")
def tasks(module):
    with probes_for(module):
        config, policy, _ = learn(module, "Tasks")
        yield lambda *states: look(module, config, policy, states), config, policy


def test_value_of_a_constant_reward(tasks):
    _, value = tasks[0](Tasks.constant)
    np.testing.assert_allclose(value, [1.0], atol=0.1)


def test_value_is_discounted(tasks):
    _, value = tasks[0](Tasks.delayed, 5)
    np.testing.assert_allclose(value, [GAMMA, 1.0], atol=0.1)


def test_value_depends_on_the_observation(tasks):
    _, value = tasks[0](Tasks.negative)
    np.testing.assert_allclose(value, [-1.0], atol=0.1)


def test_policy_finds_the_rewarded_action(tasks):
    action, value = tasks[0](Tasks.choice)
    np.testing.assert_allclose(action, [1.0], atol=0.15)
    np.testing.assert_allclose(value, [1.0], atol=0.2)


def test_value_goes_on_behind_a_time_limit(tasks):
    """Three steps of reward 1, for ever: 1 / (1 - gamma), not 1 + gamma + gamma^2 at most."""
    _, value = tasks[0](Tasks.endless, Tasks.endless, Tasks.endless)
    np.testing.assert_allclose(value, [1 / (1 - GAMMA)] * 3, rtol=0.1)


def test_evaluation_counts_full_episodes(tasks, module):
    _, config, policy = tasks
    config = module.Config(**{**vars(config), "eval_episodes": 512, "eval_greedy": True})
    returns = np.array(jax.jit(module.make_evaluate(config))(policy, jax.random.key(0)))
    best = np.array([1.0, 1.0, -1.0, 1.0, 3.0])  # of the five tasks
    assert returns.shape == (512,)
    np.testing.assert_allclose(np.abs(returns[:, None] - best).min(1), 0, atol=0.1)
    count = (np.abs(returns[:, None] - [-1.0, 1.0, 3.0]) < 0.5).sum(0)
    assert np.abs(count / 512 - np.array([0.2, 0.6, 0.2])).max() < 0.1


def test_a_time_limit_taken_for_a_termination_would_show(monkeypatch):
    """The test of the time limit above can fail."""
    module = load_script("ppo_ff")
    right = module.compute_gae
    wrong = lambda reward, value, next_value, terminated, done, *rest: right(
        reward, value, next_value, done, done, *rest
    )
    monkeypatch.setattr(module, "compute_gae", wrong)
    config, policy, _ = learn(module, "Tasks")
    _, value = look(module, config, policy, [Tasks.endless])
    mean = np.mean([1.0, 1 + GAMMA, 1 + GAMMA + GAMMA**2])  # the time is not observed
    np.testing.assert_allclose(value, [mean], rtol=0.1)


@pytest.mark.parametrize("memory", [True, False])
def test_memory_of_a_cue(memory):
    """Only the first observation shows which action the fourth step rewards."""
    module = load_script("ppo_rnn")
    with probes_for(module):
        config, policy, metrics = learn(
            module,
            "Cue",
            memory=memory,
            total_timesteps=32 * 8 * 300,
            hidden_size=16,
            head_size=16,
            ent_coef=0.01,
        )
        answers = [look(module, config, policy, [cue, 2, 3, 4]) for cue in (0, 1)]
    returns = np.array(metrics["episode/return"])[0, -20:, 0].mean()
    last_action, last_value = ([answer[i][-1] for answer in answers] for i in (0, 1))
    if memory:
        assert last_action == [0, 1] and returns > 0.95
        np.testing.assert_allclose(last_value, [1, 1], atol=0.15)
    else:
        assert last_action[0] == last_action[1] and abs(returns - 0.5) < 0.15


@pytest.mark.parametrize("policy", ["gaussian", "tanh_gaussian"])
@pytest.mark.parametrize("script", [name for name in SCRIPTS if name in CONTINUOUS])
def test_action_reaches_the_environment_in_its_units(script, policy):
    """Bounds of -1 and 3, best actions 2.5 and 0."""
    module = load_script(script)
    config, params, _ = learn(module, "Target", policy=policy)
    action, value = look(module, config, params, [0, 1])
    np.testing.assert_allclose(action, [2.5, 0.0], atol=0.15)
    assert (value > 0.8).all()
