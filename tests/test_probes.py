"""Short trainings on environments with known values and best actions."""

import jax
import numpy as np
import pytest
from conftest import SCRIPTS, load_script
from probes import CONTINUOUS, Tasks, look, probe_config, probes_for, start, to_numpy

GAMMA = 0.8


def learn(module, name, **changes):
    """Returns the configuration, and the state and metrics after a short training of one seed."""
    sizes = {"num_envs": 32, "num_steps": 8, "total_timesteps": 32 * 8 * 200, "hidden_size": 32}
    options = {"lr": 5e-3, "gamma": GAMMA, "ent_coef": 0.0, "update_epochs": 4, "num_evals": 1}
    if "normalize_reward" in module.Config.__dataclass_fields__:
        options["normalize_reward"] = False  # the values below are those of raw rewards
    config = probe_config(module, name, **{**sizes, **options, **changes})
    state, train = start(module, config)
    state, metrics = train(state)
    return config, jax.tree.map(lambda x: x[0, 0], to_numpy(state)), metrics


@pytest.fixture(scope="module")
def tasks(module):
    """Returns see(*states) -> actions, values of the trained policy, and the state."""
    with probes_for(module):
        config, state, _ = learn(module, "Tasks", eval_episodes=512, eval_greedy=True)
        yield lambda *states: look(module, config, state.params, states), state


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


def test_value_does_not_end_at_a_time_limit(tasks):
    """1 / (1 - gamma) for endless rewards of 1, not 1 + gamma + gamma^2 at most."""
    _, value = tasks[0](Tasks.endless, Tasks.endless, Tasks.endless)
    np.testing.assert_allclose(value, [1 / (1 - GAMMA)] * 3, rtol=0.1)


def test_evaluation_counts_full_episodes(tasks):
    """Best returns of the five tasks, of which each episode draws one: 1, 1, -1, 1, 3."""
    assert abs(tasks[1].eval_return - 1.0) < 0.25  # 4 standard deviations of 512 episodes


def test_a_time_limit_treated_as_a_termination_would_show(monkeypatch):
    """The test of the time limit above can fail."""
    module = load_script("ppo_ff")
    right = module.compute_gae
    wrong = lambda rollout, *rest: right(rollout._replace(terminated=rollout.done), *rest)
    monkeypatch.setattr(module, "compute_gae", wrong)
    config, state, _ = learn(module, "Tasks")
    _, value = look(module, config, state.params, [Tasks.endless])
    mean = np.mean([1.0, 1 + GAMMA, 1 + GAMMA + GAMMA**2])  # the time is not observed
    np.testing.assert_allclose(value, [mean], rtol=0.1)


@pytest.mark.parametrize("memory", [True, False])
def test_memory_of_a_cue(memory):
    """Only the first observation shows which action the fourth step rewards."""
    module = load_script("ppo_rnn")
    with probes_for(module):
        config, state, metrics = learn(
            module,
            "Cue",
            memory=memory,
            total_timesteps=32 * 8 * 300,
            hidden_size=16,
            head_size=16,
            ent_coef=0.01,
        )
        answers = [look(module, config, state.params, [cue, 2, 3, 4]) for cue in (0, 1)]
    returns = np.array(metrics["episode/return"])[0, 0, -20:].mean()
    last_action = [action[-1] for action, _ in answers]
    last_value = [value[-1] for _, value in answers]
    if memory:
        assert last_action == [0, 1] and returns > 0.95 and state.eval_return > 0.9
        np.testing.assert_allclose(last_value, [1, 1], atol=0.15)
    else:
        assert last_action[0] == last_action[1] and abs(returns - 0.5) < 0.15


@pytest.mark.parametrize("policy", ["gaussian", "tanh_gaussian"])
@pytest.mark.parametrize("script", [name for name in SCRIPTS if name in CONTINUOUS])
def test_action_reaches_the_environment_in_its_units(script, policy):
    """Bounds of -1 and 3, best actions 2.5 and 0."""
    module = load_script(script)
    config, state, _ = learn(module, "Target", policy=policy)
    action, value = look(module, config, state.params, [0, 1])
    np.testing.assert_allclose(action, [2.5, 0.0], atol=0.15)
    assert (value > 0.8).all()


def test_normalized_observations_with_discrete_actions():
    module = load_script("ppo_obs_norm")
    config, state, _ = learn(module, "Tasks", env_id="ProbeTasks-discrete")
    states = [[Tasks.constant], [Tasks.delayed, 5], [Tasks.choice], [Tasks.endless]]
    results = [look(module, config, state.params, visited) for visited in states]
    value = np.concatenate([value for _, value in results])
    np.testing.assert_allclose(value, [1.0, GAMMA, 1.0, 1.0, 1 / (1 - GAMMA)], rtol=0.15)
    assert results[2][0] == [1]
