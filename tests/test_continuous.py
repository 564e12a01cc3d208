"""Policies, bounds and environments of ppo_continuous.py."""

import sys

import distrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tyro
from conftest import load_script, tiny
from probes import network_of
from scipy import stats

SCRIPTS = ("ppo_continuous", "ppo_obs_norm")
POLICIES = ("gaussian", "tanh_gaussian", "beta")


@pytest.fixture(scope="module", params=SCRIPTS)
def module(request):
    return load_script(request.param)


# --------------------------------------- policies
@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_has_any_leading_axes(module, policy):
    """A batch [T, N, ...] is the same as its elements one by one."""
    network = network_of(module, tiny(module, policy=policy))
    obs = jax.random.normal(jax.random.PRNGKey(0), (3, 2, 3))
    params = network.init(jax.random.PRNGKey(1), obs)
    params = {**params, "params": jax.tree.map(lambda x: x + 0.1, params["params"])}
    distribution, value = network.apply(params, obs)
    action = distribution.sample(seed=jax.random.PRNGKey(2))
    assert action.shape == (3, 2, 1) and value.shape == (3, 2)
    log_prob, entropy = distribution.log_prob(action), distribution.entropy()
    mode = distribution.mode()
    assert log_prob.shape == entropy.shape == (3, 2) and mode.shape == (3, 2, 1)
    for t, n in np.ndindex(3, 2):
        one, one_value = network.apply(params, obs[t, n])
        np.testing.assert_allclose(one_value, value[t, n], atol=1e-5)
        np.testing.assert_allclose(one.log_prob(action[t, n]), log_prob[t, n], atol=1e-4)
        np.testing.assert_allclose(one.entropy(), entropy[t, n], atol=1e-4)
        np.testing.assert_allclose(one.mode(), mode[t, n], atol=1e-5)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_environment_receives_actions_within_bounds(module, policy):
    network = network_of(module, tiny(module, policy=policy))
    params = network.init(jax.random.PRNGKey(1), jnp.zeros((1, 3)))
    # Outputs of the last layers far from zero.
    params = {**params, "params": jax.tree.map(lambda x: 30 * x, params["params"])}
    obs = 10 * jax.random.normal(jax.random.PRNGKey(0), (200, 3))
    distribution, _ = network.apply(params, obs)
    raw = distribution.sample(seed=jax.random.PRNGKey(2))
    action = np.array(distribution.to_env(raw))
    assert (np.abs(action) <= 1).all() and np.ptp(action) > 1
    assert np.isfinite(distribution.log_prob(raw)).all()


ULP = float(np.finfo(np.float32).eps)  # the smallest step above 1
EXCESS = (0.0, ULP, 2 * ULP, 3 * ULP, 1e-3, 1.0, 1e6)


def test_the_mode_of_the_beta_policy_is_defined_for_every_parameter(module):
    excess = np.array([(a, b) for a in EXCESS for b in EXCESS], np.float32)
    alpha, beta = (1 + excess).T
    policy = module.BetaPolicy(distrax.Beta(jnp.array(alpha), jnp.array(beta)), 1)
    mode = np.array(policy.mode(), np.float64)
    assert ((mode >= 0) & (mode <= 1)).all()
    assert np.isfinite(policy.to_env(policy.mode())).all()
    total = excess.astype(float).sum(1)
    peaked = total > 1e-4  # otherwise the density is flat
    expected = excess[peaked, 0] / total[peaked]
    np.testing.assert_allclose(mode[peaked], expected, atol=2e-3)
    # The density at the mode is as high as anywhere.
    grid = np.linspace(1e-6, 1 - 1e-6, 1001)[:, None]
    density = stats.beta(alpha.astype(float), beta.astype(float))
    inside = np.clip(mode, 1e-6, 1 - 1e-6)
    assert (density.logpdf(inside) >= density.logpdf(grid).max(0) - 1e-2).all()
    np.testing.assert_array_equal(mode[(excess == 0).all(1)], 0.5)


def test_a_network_that_saturates_the_beta_policy_acts_greedily(module):
    """Strongly negative outputs make both concentrations 1 in float32."""
    network = network_of(module, tiny(module, policy="beta"))
    obs = jnp.zeros((2, 3))
    params = network.init(jax.random.PRNGKey(0), obs)
    saturate = lambda path, x: x - 100.0 * (x.shape == (2,))  # the bias of the policy's layer
    params = jax.tree_util.tree_map_with_path(saturate, params)
    policy, _ = network.apply(params, obs)
    np.testing.assert_array_equal(policy.distribution.alpha, 1)
    np.testing.assert_array_equal(policy.mode(), 0.5)
    assert np.isfinite(policy.entropy()).all()


def test_an_unknown_policy_is_an_error(module, capsys):
    with pytest.raises(SystemExit) as error:
        tyro.cli(module.Config, args=["--policy", "laplace"])
    assert error.value.code == 2 and "tanh_gaussian" in capsys.readouterr().err


# ----------------------------------- environments
def test_actions_are_mapped_to_the_bounds_of_the_environment(module):
    reset, step, *_ = module.make_env(tiny(module))
    _, env_state = reset(jax.random.PRNGKey(0))
    for action, torque in ((-1.0, -2.0), (0.0, 0.0), (0.5, 1.0), (1.0, 2.0)):
        _, after, *_ = step(jax.random.PRNGKey(0), env_state, jnp.array([action]))
        assert after.last_u == torque


@pytest.mark.parametrize(
    "options, message",
    [
        ({"env_id": "Pendulum-v2"}, "did you mean Pendulum-v1"),
        ({"env_id": "hopper"}, "did you mean brax/hopper"),
        ({"env_id": "brax/hoper"}, "did you mean brax/hopper"),
        ({"env_params": '{"dt": "fast"}'}, "env_params: dt"),
        ({"env_params": '{"mass": 1.0}'}, "'mass'; the defaults are"),
        ({"env_params": "[1]"}, "the defaults are"),
        ({"env_params": "{"}, "the defaults are"),
        (
            {"env_id": "brax/hopper", "env_params": '{"max_steps_in_episode": 2.5}'},
            "env_params: max_steps_in_episode",
        ),
        ({"env_id": "brax/hopper", "env_params": '{"dt": 1}'}, "max_steps_in_episode=1000"),
    ],
)
def test_what_does_not_fit_is_one_line(module, options, message):
    with pytest.raises(module.ConfigError) as error:
        module.make_env(tiny(module, **options))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_discrete_actions_belong_to_another_script():
    module = load_script("ppo_continuous")
    with pytest.raises(module.ConfigError, match=r"discrete actions: use ppo_ff\.py"):
        module.make_env(tiny(module, env_id="CartPole-v1"))


def test_without_brax_the_error_says_how_to_install_it(module, monkeypatch):
    monkeypatch.setitem(sys.modules, "brax.envs", None)
    monkeypatch.setitem(sys.modules, "brax", None)
    with pytest.raises(module.ConfigError, match="brax/ant needs Brax: pip install brax"):
        module.make_env(tiny(module, env_id="brax/ant"))
    module.make_env(tiny(module))  # gymnax alone is enough for the others


# ------------------------------- double precision
@pytest.mark.parametrize(
    "options",
    [{"policy": "tanh_gaussian"}, {"policy": "beta"}, {"env_id": "MountainCarContinuous-v0"}],
)
def test_double_precision_leaves_every_type_as_it_is(module, options):
    """The default options are in test_invariants.py."""
    with jax.enable_x64(True):
        init, train, *_ = module.make_train(tiny(module, **options))
        state = jax.eval_shape(init, jax.ShapeDtypeStruct((1, 2), jnp.uint32))
        after, metrics = jax.eval_shape(train, state)
    describe = lambda x: (x.shape, x.dtype)
    assert jax.tree.map(describe, state) == jax.tree.map(describe, after)
    for x in jax.tree.leaves((after.params, after.opt_state, metrics)):
        assert x.dtype in (jnp.float32, jnp.int32)
