"""Each patch of docs/details.md applies to its script and trains; so does `--policy beta`."""

import dataclasses
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT, load_script, tiny
from probes import start, to_numpy

DETAILS = (ROOT / "docs" / "details.md").read_text()
PATCHES = re.findall(r"```diff\n(.*?)```", DETAILS, re.S)
MULTI_DISCRETE, WEIGHTED_REWARD, TARGET_KL = PATCHES
AGENTS = ("ippo", "ippo_rnn", "mappo")


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
    assert all(patch.count("\n") <= 10 for patch in PATCHES)


def one_step(observe, reward, *space):
    """A make_env for episodes of one step: observe(key) -> obs, reward(obs, action)."""

    def make_env(config):
        def reset(key):
            obs = observe(key)
            return obs, obs

        def step(key, env_state, action):
            obs, next_state = reset(key)
            paid = jnp.float32(reward(env_state, action))
            return obs, next_state, paid, jnp.bool(True), jnp.bool(False), obs

        return reset, step, *space

    return make_env


@pytest.fixture
def train(monkeypatch):
    def train(module, make_env, **more):
        """Evaluation return after a short training."""
        monkeypatch.setattr(module, "make_env", make_env)
        sizes = {"num_envs": 32, "num_steps": 8, "total_timesteps": 32 * 8 * 50}
        options = {"hidden_size": 32, "lr": 1e-2, "num_evals": 1, "eval_episodes": 256}
        state, train = start(module, tiny(module, **sizes, **options, **more))
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
    assert returns[0, 0, 0] < 1  # it had to be learned


@pytest.mark.parametrize("script", ["ppo_ff", "ppo_drift"])
def test_a_masked_action_is_never_taken(train, script):
    """The highest legal action pays most. No patch: an observation may have a mask."""

    def observe(key):
        legal = jax.random.uniform(key, (4,)) < 0.5
        legal = legal.at[jax.random.randint(key, (), 0, 4)].set(True)
        return {"obs": jnp.float32(legal), "mask": legal}

    reward = lambda obs, action: jnp.where(obs["mask"][action], action, -1000)
    result, returns = train(load_script(script), one_step(observe, reward, 4))
    assert np.nanmin(returns) > 0  # a mean that -1000 would lower
    best = np.mean([np.nonzero(np.array(observe(key)["mask"]))[0][-1] for key in keys(500)])
    assert result > best - 0.15
    assert returns[0, 0, 0] < best - 0.5


TRAINED = ("ppo_ff", "ippo")  # the others are only traced
SIBLINGS = (
    "ppo_rnn",
    "ppo_drift",
    "ppo_continuous",
    "ppo_obs_norm",
    "ppo_vtrace",
    "ippo_rnn",
    "mappo",
)
UNSHARED = ("ippo, unshared", "ippo_rnn, unshared", "mappo, unshared")


@pytest.mark.parametrize("case", [*TRAINED, *SIBLINGS, *UNSHARED])
def test_scalars_of_the_environment_are_those_at_the_ends_of_episodes(case, monkeypatch):
    script = case.removesuffix(", unshared")
    module = load_script(script)
    make_env = module.make_env

    def make_env_with_scalars(config):
        reset, step, *rest = make_env(config)

        def step_with_scalars(key, env_state, action):
            *outcome, terminated, truncated, next_obs = step(key, env_state, action)
            active = env_state[1] if script in AGENTS else True
            ended = ~(active & ~(terminated | truncated)).any()
            scalars = {"three": 3.0, "ended": jnp.where(ended, 1.0, jnp.nan)}
            return *outcome, terminated, truncated, next_obs, scalars

        return reset, step_with_scalars, *rest

    monkeypatch.setattr(module, "make_env", make_env_with_scalars)
    if script in AGENTS:
        sizes = {"total_timesteps": 128, "num_envs": 4, "num_steps": 4, "num_minibatches": 1}
        sizes |= {"share_parameters": case == script}
        config = module.Config(**sizes, num_evals=1, eval_episodes=1)
    else:
        config = tiny(module, num_evals=1)
    if case not in TRAINED:
        init, train, *_ = module.make_train(config)
        keys = jax.random.split(jax.random.PRNGKey(0), jax.local_device_count())
        _, metrics = jax.eval_shape(train, jax.eval_shape(init, keys))
        assert {"env/three", "env/ended"} <= set(metrics)
        return
    state, train = start(module, config)
    _, metrics = to_numpy(train(state))
    has_episodes = metrics["episode/count"] > 0
    assert has_episodes.any() and np.isnan(metrics["env/three"][~has_episodes]).all()
    np.testing.assert_allclose(metrics["env/three"][has_episodes], 3, rtol=1e-6)
    np.testing.assert_allclose(metrics["env/ended"][has_episodes], 1, rtol=1e-6)


def test_vtrace_with_a_weighted_reward():
    """Against the sum of its definition, up to the end of an episode; it also trains."""
    module = patched("ppo_vtrace", WEIGHTED_REWARD)
    rng = np.random.default_rng(0)
    reward, value, next_value = rng.normal(size=(3, 9))
    ratio = np.exp(rng.normal(size=9))
    done, terminated = np.arange(9) % 4 == 2, np.arange(9) == 6
    config = tiny(module, gamma=0.9, gae_lambda=0.8, rho_clip=1.3, c_clip=0.7)
    rho, c = np.minimum(ratio, 1.3), np.minimum(ratio, 0.7)
    delta = rho * reward + 0.9 * next_value * ~terminated - value
    expected = np.zeros(9)
    for t in range(9):
        weight = 1.0
        for k in range(t, 9):
            expected[t] += weight * delta[k]
            weight *= 0.9 * 0.8 * c[k] * ~done[k]
    unknown = dict.fromkeys(module.Transition._fields)
    known = {"reward": reward, "terminated": terminated, "done": done}
    rollout = module.Transition(**(unknown | jax.tree.map(jnp.array, known)))
    arrays = map(jnp.array, (value, next_value, ratio))
    advantage, target = module.compute_vtrace(rollout, *arrays, config)
    np.testing.assert_allclose(advantage, expected, atol=1e-5)
    np.testing.assert_allclose(target, expected + value, atol=1e-5)
    state, train = start(module, tiny(module, num_evals=1))
    state, _ = train(state)
    assert np.isfinite(state.eval_return).all()


def test_target_kl_ends_the_epochs_of_each_seed_by_itself():
    """Seeds with a large and a small learning rate: the KL of the first exceeds the target."""
    lr = jnp.array([0.1, 1e-5])
    stopped, other = 0, 1

    def update(module, update_epochs):
        """Parameters and Adam's state of all seeds after one update, and its metrics."""
        sizes = {"num_seeds": 2, "total_timesteps": 16, "num_evals": 1, "eval_episodes": 1}
        config = tiny(module, update_epochs=update_epochs, anneal_lr=False, **sizes)
        state, _ = start(module, config)

        def run(state, lr):
            *_, train_seed = module.make_train(dataclasses.replace(config, lr=lr))
            return train_seed(state)

        state, metrics = to_numpy(jax.pmap(jax.vmap(run), "devices", in_axes=(0, None))(state, lr))
        return (state.params, state.opt_state), metrics["policy/approx_kl"][0, :, 0]

    def close(actual, expected, seed):
        is_close = lambda x, y: np.allclose(x[0, seed], y[0, seed], atol=1e-6)
        return all(jax.tree.leaves(jax.tree.map(is_close, actual, expected)))

    plain = load_script("ppo_ff")
    (one, _), (three, kl) = update(plain, 1), update(plain, 3)
    limited, _ = update(patched("ppo_ff", TARGET_KL), 3)
    assert kl[stopped] > 0.02 > kl[other]
    assert close(limited, one, stopped) and not close(limited, three, stopped)
    assert close(limited, three, other) and not close(limited, one, other)


# ------------------------------------------ tables
def test_what_the_tables_name_exists():
    """Tests, and functions of the scripts."""
    for file, name in re.findall(r"(test_\w+\.py)::(\w+)", DETAILS):
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(), name
    rows = [line.split(" | ") for line in DETAILS.splitlines() if re.match(r"\| \d+ \|", line)]
    assert len(rows) == 37 + 4
    for _, _, _, where, *_ in rows:
        script = "ppo_ff.py"
        for word in " ".join(re.findall(r"`([^`]+)`", where)).split():
            if word.endswith(".py"):
                script = word if (ROOT / word).exists() else f"environments/{word}"
                continue
            name = word.removeprefix("--").replace("-", "_").split(".")[-1]
            assert re.search(rf"\b{name}( =|\(|:)", (ROOT / script).read_text()), (script, word)


@pytest.mark.parametrize("script", ["ppo_continuous", "ppo_obs_norm"])
def test_the_beta_policy_trains(train, script):
    """The best action is near one end of its range, which is -1 to 1."""
    module = load_script(script)
    space = (1, False) if script == "ppo_obs_norm" else (1,)
    observe = lambda key: jax.random.normal(key, (1,))

    def reward(obs, action):
        return jnp.where(jnp.abs(action).max() <= 1, -((action[0] - 0.8) ** 2), -1000)

    result, returns = train(module, one_step(observe, reward, *space), policy="beta")
    assert result > -0.03 > returns[0, 0, 0]


def keys(count):
    return jax.random.split(jax.random.key(1), count)
