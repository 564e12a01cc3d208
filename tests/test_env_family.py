"""environments/family.py: lazy resets, and what running a script on other environments takes."""

import importlib.util
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import ROOT


@pytest.fixture(scope="module")
def family():
    path = ROOT / "environments" / "family.py"
    spec = importlib.util.spec_from_file_location("family", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def reset(key):
    """An observation and a state of all kinds of arrays."""
    keys = jax.random.split(key, 3)
    world = jax.random.normal(keys[0], (4, 3)).at[0].set(jnp.array([jnp.nan, -0.0, jnp.inf]))
    state = {
        "key": keys[1],
        "alive": jax.random.bernoulli(keys[2]),
        "time": jnp.int32(0),
        "map": jax.random.bits(keys[2], (5,), jnp.uint8),
        "empty": jnp.zeros((0,)),
    }
    return world, (state, None)


def arguments(shape, which):
    """done, key, continued, with leading axes `shape`."""
    done_key, key, continued_key = jax.random.split(jax.random.PRNGKey(7), 3)
    done = {
        "none": jnp.zeros(shape, bool),
        "one": jnp.zeros(shape, bool).at[(-1,) * len(shape)].set(True),
        "some": jax.random.bernoulli(done_key, 0.3, shape),
        "all": jnp.ones(shape, bool),
    }[which]
    fresh = reset
    for _ in shape:
        fresh = jax.vmap(fresh)
    world, (state, _) = fresh(jax.random.split(continued_key, shape))
    continued = (2 * world, (state | {"time": state["time"] + 5}, None))
    return done, jax.random.split(key, shape), continued


def direct(done, key, continued):
    return optax.tree.where(done, reset(key), continued)


def assert_same_bits(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.mark.parametrize("shape", [(), (5,), (70,), (2, 40)])
def test_a_lazy_reset_equals_a_reset(family, shape):
    """Alone, for N environments, and for several seeds of N environments."""
    lazily, directly = family.lazy(reset), direct
    for _ in shape:
        lazily, directly = jax.vmap(lazily), jax.vmap(directly)
    compiled = jax.jit(lazily)
    for which in ("none", "one", "some", "all"):
        args = arguments(shape, which)
        expected = directly(*args)
        assert_same_bits(compiled(*args), expected)
        if shape in [(), (5,)]:
            assert_same_bits(lazily(*args), expected)


@pytest.mark.parametrize("share", [1, 3, 1000])
def test_the_share_changes_nothing(family, share):
    args = arguments((2, 10), "some")
    actual = jax.jit(jax.vmap(jax.vmap(family.lazy(reset, share))))(*args)
    assert_same_bits(actual, jax.jit(jax.vmap(jax.vmap(direct)))(*args))


@pytest.mark.parametrize("in_axes", [(0, None, 0), (None, 0, 0), (0, 0, None), (0, None, None)])
def test_arguments_that_all_environments_share(family, in_axes):
    args = arguments((6,), "some")
    one = lambda tree: jax.tree.map(lambda x: x[1], tree)
    args = [one(x) if axis is None else x for x, axis in zip(args, in_axes, strict=True)]
    actual = jax.jit(jax.vmap(family.lazy(reset), in_axes))(*args)
    assert_same_bits(actual, jax.jit(jax.vmap(direct, in_axes))(*args))


def test_a_state_may_hold_python_numbers(family):
    """As that of Jumanji's Tetris-v0, which keeps its time limit in the state."""
    reset = lambda key: (jax.random.uniform(key), 0)
    direct = lambda done, key, continued: optax.tree.where(done, reset(key), continued)
    done, keys = jnp.array([True, False, True]), jax.random.split(jax.random.PRNGKey(0), 3)
    every = lambda restart: jax.vmap(lambda done, key: restart(done, key, (jnp.float32(2), 1)))
    actual = every(family.lazy(reset))(done, keys)
    np.testing.assert_array_equal(actual[1], [0, 1, 0])
    np.testing.assert_array_equal(actual[0], every(direct)(done, keys)[0])


def test_a_lazy_reset_in_a_loop(family):
    """Where the scripts call it: in the scan of a rollout, in the while loop of an evaluation."""

    def play(restart):
        def step(carry, key):
            world, (state, _) = carry
            done = jax.random.bernoulli(key, 0.2)
            state = state | {"time": state["time"] + 1}
            return restart(done, key, (world + 1, (state, None))), done

        def run(key):
            return jax.lax.scan(step, reset(key), jax.random.split(key, 20))

        def wait(key):
            def move(carry):
                key, _, *state = carry
                key, step_key = jax.random.split(key)
                state, done = step(state, step_key)
                return key, done, *state

            return jax.lax.while_loop(lambda carry: ~carry[1], move, (key, False, *reset(key)))

        return jax.vmap(lambda keys: jax.lax.map(lambda key: (run(key), wait(key)), keys))

    keys = jax.random.split(jax.random.PRNGKey(1), (2, 6))
    actual = jax.jit(play(family.lazy(reset)))(keys)
    assert_same_bits(actual, jax.jit(play(direct))(keys))


@pytest.mark.parametrize(
    "size, which, resets",
    # 1/32 of the environments at a time: 2 of 64, 1 of 5.
    [(64, "none", 0), (64, "one", 2), (64, "all", 64), (5, "none", 0), (5, "one", 1)],
)
def test_only_environments_that_are_done_are_reset(family, size, which, resets):
    count = []

    def counted_reset(key):
        shape = jax.ShapeDtypeStruct((), jnp.int32)
        call = lambda key: np.int32(count.append(0) or 0)
        return jax.pure_callback(call, shape, key, vmap_method="sequential"), key

    done, key, _ = arguments((size,), which)
    continued = (jnp.ones(size, jnp.int32), jnp.zeros_like(key))
    jax.block_until_ready(jax.vmap(family.lazy(counted_reset))(done, key, continued))
    assert len(count) == resets


def test_adapt(family):
    script = types.SimpleNamespace(SCRIPT="ppo_ff", SOURCES=["ppo_ff.py"], COMMAND=["python"])
    groups = [type(name, (), {}) for name in ("Algorithm", "Environment", "Config")]
    config = type("Config", tuple(groups), {})
    family.adapt(script, "/somewhere/my_envs.py", config, print)
    assert (script.Config, script.make_env, script.SCRIPT) == (config, print, "my_envs")
    assert [script.Algorithm, script.Environment] == groups[:2]  # for the boxes of the help
    assert script.SOURCES == ["ppo_ff.py", "/somewhere/my_envs.py"]
    assert script.COMMAND is family.COMMAND  # so that the script adds to what family.py prints
