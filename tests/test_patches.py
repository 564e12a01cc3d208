"""The patches of docs/details.md: each applies to its script as it is, and trains."""

import re
import types

import distrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT, tiny
from probes import start
from scipy import stats

PATCHES = re.findall(r"```diff\n(.*?)```", (ROOT / "docs" / "details.md").read_text(), re.S)
MULTI_DISCRETE, MASKED, *BETA = PATCHES


def patched(script: str, *patches: str) -> types.ModuleType:
    """The script with the lines of the diffs replaced."""
    text = (ROOT / f"{script}.py").read_text()
    for patch in patches:
        lines = patch.splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if line[0] in " -")
        new = "".join(line[1:] for line in lines if line[0] in " +")
        assert text.count(old) == 1 and new not in text
        text = text.replace(old, new)
    module = types.ModuleType(script)
    exec(text.replace('__name__ == "__main__"', "False"), module.__dict__)
    return module


def test_patches_are_short():
    assert len(PATCHES) == 4 and all(patch.count("\n") <= 13 for patch in PATCHES)
    assert max(MULTI_DISCRETE.count("\n"), MASKED.count("\n")) <= 10


def one_step(observe, reward, num_actions):
    """A make_env for episodes of one step: observe(key) -> obs, reward(obs, action)."""

    def make_env(config):
        def reset(key):
            obs = observe(key)
            return obs, obs

        def step(key, env_state, action):
            obs, next_state = reset(key)
            paid = jnp.float32(reward(env_state, action))
            return obs, next_state, paid, jnp.bool(True), jnp.bool(False), obs

        return reset, step, num_actions

    return make_env


@pytest.fixture
def train():
    def train(module, make_env):
        """Evaluation return after a short training."""
        module.make_env = make_env
        sizes = {"num_envs": 32, "num_steps": 8, "total_timesteps": 32 * 8 * 50}
        options = {"hidden_size": 32, "lr": 1e-2, "num_evals": 1, "eval_episodes": 256}
        state, train = start(module, tiny(module, **sizes, **options))
        state, metrics = train(state)
        return float(state.eval_return[0, 0]), np.array(metrics["episode/return"])

    return train


def test_components_are_chosen_independently(train):
    """Two components of 3 and 5 actions; the right pair pays 2, one right component 1."""
    observe = lambda key: jax.nn.one_hot(jax.random.randint(key, (), 0, 2), 2)

    def reward(obs, action):
        assert action.shape == (2,)
        target = jnp.where(obs[0] > 0, jnp.array([2, 4]), jnp.array([1, 0]))
        inside = (action < jnp.array([3, 5])).all()
        return jnp.where(inside, (action == target).sum(), -1000)

    result, returns = train(patched("ppo_ff", MULTI_DISCRETE), one_step(observe, reward, (3, 5)))
    assert result > 1.9
    assert np.nanmin(returns) > 0  # padded actions are never taken
    assert returns[0, 0] < 1  # it had to be learned


def test_a_masked_action_is_never_taken(train):
    """The highest legal action pays most."""

    def observe(key):
        legal = jax.random.uniform(key, (4,)) < 0.5
        return jnp.float32(legal.at[jax.random.randint(key, (), 0, 4)].set(True))

    reward = lambda obs, action: jnp.where(obs[action] > 0, action, -1000)
    result, returns = train(patched("ppo_ff", MASKED), one_step(observe, reward, 4))
    assert np.nanmin(returns) > 0  # a mean that -1000 would lower
    best = np.mean([np.nonzero(np.array(observe(key)))[0][-1] for key in keys(500)])
    assert result > best - 0.15
    assert returns[0, 0] < best - 0.5


def test_the_beta_policy_is_that_of_scipy():
    module = patched("ppo_continuous", *BETA)
    alpha, beta = jnp.array([1.5, 4.0]), jnp.array([2.0, 1.2])
    policy = module.BetaPolicy(distrax.Beta(alpha, beta), 1)
    raw = jnp.array([0.3, 0.9])
    reference = stats.beta(np.array(alpha), np.array(beta))
    assert policy.log_prob(raw) == pytest.approx(reference.logpdf(np.array(raw)).sum(), rel=1e-4)
    assert policy.entropy() == pytest.approx(reference.entropy().sum(), rel=1e-4)
    np.testing.assert_allclose(policy.mode(), (alpha - 1) / (alpha + beta - 2), rtol=1e-5)
    np.testing.assert_allclose(policy.to_env(raw), [-0.4, 0.8], rtol=1e-5)
    narrow = module.BetaPolicy(distrax.Beta(jnp.array([1e6]), jnp.array([1.0])), 1)
    samples = jax.vmap(lambda key: narrow.sample(seed=key))(keys(100))
    assert samples.max() < 1 and np.isfinite(jax.vmap(narrow.log_prob)(samples)).all()


def test_the_beta_policy_trains(train):
    """The best action is near one end of its range, which is -1 to 1."""
    observe = lambda key: jnp.ones(1)

    def reward(obs, action):
        return jnp.where(jnp.abs(action).max() <= 1, -((action[0] - 0.8) ** 2), -1000)

    result, returns = train(patched("ppo_continuous", *BETA), one_step(observe, reward, 1))
    assert result > -0.03 > returns[0, 0]


def keys(count):
    return jax.random.split(jax.random.key(1), count)
