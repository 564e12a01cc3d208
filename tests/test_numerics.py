"""The numerical pieces against references written by others, or from the formulas by hand."""

import types

import distrax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rlax
from conftest import SCRIPTS, load_script, tiny
from probes import probe_config, probes_for, start, to_numpy

GAMMA, GAE_LAMBDA = 0.9, 0.8


# --------------------------------------------------------------------------------------- advantage
def random_rollout(steps=12, envs=40, ends=0.15):
    rng = np.random.default_rng(0)
    reward, value, next_value = rng.normal(size=(3, steps, envs))
    terminated, truncated = rng.random((2, steps, envs)) < ends
    terminated[-1, :2], truncated[-1, :2] = [True, False], [False, True]  # at the rollout's end
    terminated[5, 2] = truncated[5, 2] = True  # both at once
    return reward, value, next_value, terminated, truncated


def gae_by_hand(reward, value, next_value, terminated, truncated):
    """The sum over the steps up to the episode's end that defines the estimate (eq. 16)."""
    steps, envs = reward.shape
    advantage = np.zeros((steps, envs))
    for n in range(envs):
        for t in range(steps):
            for k in range(t, steps):
                follows = 0.0 if terminated[k, n] else next_value[k, n]
                delta = reward[k, n] + GAMMA * follows - value[k, n]
                advantage[t, n] += (GAMMA * GAE_LAMBDA) ** (k - t) * delta
                if terminated[k, n] or truncated[k, n]:
                    break
    return advantage


def test_gae_is_the_sum_of_its_definition(module):
    reward, value, next_value, terminated, truncated = random_rollout()
    advantage, target = module.compute_gae(
        reward, value, next_value, terminated, terminated | truncated, GAMMA, GAE_LAMBDA
    )
    expected = gae_by_hand(reward, value, next_value, terminated, truncated)
    np.testing.assert_allclose(advantage, expected, atol=1e-5)
    np.testing.assert_allclose(target, expected + value, atol=1e-5)


def test_gae_is_that_of_rlax_where_no_time_limit_cuts(module):
    reward, value, _, terminated, _ = random_rollout()
    last_value = np.random.default_rng(1).normal(size=value.shape[1])
    values = np.concatenate([value, last_value[None]])
    advantage, _ = module.compute_gae(
        reward, value, values[1:], terminated, terminated, GAMMA, GAE_LAMBDA
    )
    estimate = jax.vmap(
        lambda reward, discount, values: rlax.truncated_generalized_advantage_estimation(
            reward, discount, GAE_LAMBDA, values
        ),
        in_axes=1,
        out_axes=1,
    )
    expected = estimate(jnp.array(reward), jnp.array(GAMMA * (1.0 - terminated)), jnp.array(values))
    np.testing.assert_allclose(advantage, expected, atol=1e-5)


def test_gae_ends_of_an_episode(module):
    def first_two(terminated, truncated):
        """Advantages of two steps; the first one ends the episode, or does not."""
        terminated, truncated = (jnp.array([x, False]) for x in (terminated, truncated))
        reward, value, next_value = jnp.array([[1.0, 5.0], [10.0, 20.0], [30.0, 40.0]])
        return module.compute_gae(
            reward, value, next_value, terminated, terminated | truncated, GAMMA, GAE_LAMBDA
        )[0]

    second = 5 + 0.9 * 40 - 20
    for terminated, truncated, first in (
        (False, False, 1 + 0.9 * 30 - 10 + 0.9 * 0.8 * second),
        (False, True, 1 + 0.9 * 30 - 10),
        (True, False, 1 - 10),
        (True, True, 1 - 10),
    ):
        advantage = first_two(terminated, truncated)
        np.testing.assert_allclose(advantage, [first, second], rtol=1e-6)


# -------------------------------------------------------------------------------------------- loss
PROBS = np.array([[0.2, 0.8], [0.5, 0.5], [0.9, 0.1], [0.3, 0.7], [0.6, 0.4], [0.5, 0.5]])
ACTION = np.array([0, 1, 0, 1, 1, 0])
RATIO = np.array([0.5, 1.5, 1.5, 0.5, 1.1, 1.0])
ADVANTAGE = np.array([1.0, 2.0, -3.0, -1.0, 2.0, -0.5])
CLIPPED = np.array([False, True, False, True, False, False])  # no gradient: gone far enough
SURROGATE = np.array([0.5 * 1.0, 1.2 * 2.0, 1.5 * -3.0, 0.8 * -1.0, 1.1 * 2.0, 1.0 * -0.5])
OLD_VALUE = np.array([0.0, 0.0, 0.0, 1.0, 1.0, 1.0])
VALUE = np.array([0.1, 0.5, 0.5, 1.5, 0.5, 1.0])
TARGET = np.array([1.0, 1.0, 0.5, 1.0, 1.0, 3.0])
ERROR = np.array([0.9**2, 0.5**2, 0.0, 0.5**2, 0.5**2, 2.0**2])
CLIPPED_ERROR = np.array([0.9**2, 0.8**2, 0.3**2, 0.5**2, 0.5**2, 2.0**2])  # the larger of the two


def loss_by_fake_network(module, config):
    """ppo_loss of a network whose outputs are its parameters; returns loss, metrics, gradient."""
    old_log_prob = np.log(PROBS[np.arange(6), ACTION]) - np.log(RATIO)
    fields = dict.fromkeys(module.Transition._fields)
    fields |= {"action": ACTION, "log_prob": old_log_prob, "value": OLD_VALUE}
    batch = module.Transition(**fields)

    def apply_fn(params, *_):
        policy = distrax.Categorical(params["logits"])
        return (policy, params["value"], None)[: 3 if module.SCRIPT == "ppo_rnn" else 2]

    hidden = (None,) if module.SCRIPT == "ppo_rnn" else ()
    params = {"logits": jnp.log(PROBS), "value": jnp.array(VALUE)}
    loss = jax.value_and_grad(module.ppo_loss, has_aux=True)
    (loss, metrics), grads = loss(params, apply_fn, batch, ADVANTAGE, TARGET, *hidden, config)
    return loss, metrics, grads


def loss_config(clip_value):
    return types.SimpleNamespace(clip_eps=0.2, clip_value=clip_value, ent_coef=0.01, vf_coef=0.5)


@pytest.mark.parametrize("clip_value", [False, True])
def test_loss_by_hand(module, clip_value):
    loss, metrics, _ = loss_by_fake_network(module, loss_config(clip_value))
    policy_loss = -SURROGATE.mean()
    value_loss = 0.5 * (CLIPPED_ERROR if clip_value else ERROR).mean()
    entropy = -(PROBS * np.log(PROBS)).sum(1).mean()
    expected = {
        "loss/total": policy_loss + 0.5 * value_loss - 0.01 * entropy,
        "loss/policy": policy_loss,
        "loss/value": value_loss,
        "policy/entropy": entropy,
        "policy/approx_kl": (RATIO - 1 - np.log(RATIO)).mean(),
        "policy/clip_fraction": 4 / 6,
    }
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)
    np.testing.assert_allclose(loss, expected["loss/total"], rtol=1e-5)


@pytest.mark.parametrize("clip_value", [False, True])
def test_loss_gradient_by_hand(module, clip_value):
    config = loss_config(clip_value)
    config.ent_coef = 0.0
    _, _, grads = loss_by_fake_network(module, config)
    # d ratio / d logit = ratio * (one_hot(action) - probs); nothing where the clip holds.
    slope = np.where(CLIPPED, 0.0, ADVANTAGE * RATIO)[:, None] * (np.eye(2)[ACTION] - PROBS)
    np.testing.assert_allclose(grads["logits"], -slope / 6, atol=1e-6)
    slope = VALUE - TARGET
    if clip_value:
        slope[1:3] = 0.0  # clipped and the worse of the two: a constant
        slope = slope[[0, 1, 2, 5]]  # at 3 and 4 the two errors tie
        np.testing.assert_allclose(
            grads["value"][jnp.array([0, 1, 2, 5])], 0.5 * slope / 6, atol=1e-6
        )
    else:
        np.testing.assert_allclose(grads["value"], 0.5 * slope / 6, atol=1e-6)


def test_loss_is_that_of_rlax(module):
    _, metrics, _ = loss_by_fake_network(module, loss_config(False))
    expected = rlax.clipped_surrogate_pg_loss(jnp.array(RATIO), jnp.array(ADVANTAGE), 0.2)
    np.testing.assert_allclose(metrics["loss/policy"], expected, rtol=1e-5)


# ----------------------------------------------------------------------------------------- shuffle
@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 8, 100, 128, 1000, 4097, 2**17, 3 * 2**15 + 1])
def test_shuffle_is_a_permutation(module, size):
    rows = np.array(module.shuffle(jax.random.key(size), size))
    np.testing.assert_array_equal(np.sort(rows), np.arange(size))


def test_shuffle_spreads_every_row_over_the_minibatches(module):
    size, parts, repeats = 60, 4, 8000  # no power of two
    keys = jax.random.split(jax.random.key(0), repeats)
    rows = np.array(jax.vmap(lambda key: module.shuffle(key, size))(keys))
    place = np.argsort(rows, axis=1) * parts // size  # [repeats, size] the minibatch of each row
    count = (place[:, :, None] == np.arange(parts)).sum(0)  # [size, parts]
    expected = repeats / parts
    statistic = ((count - expected) ** 2 / expected).sum()
    freedom = (size - 1) * (parts - 1)
    assert abs(statistic - freedom) < 6 * np.sqrt(2 * freedom)
    # Neighbours are as rarely together as any two rows.
    together = (place[:, 1:] == place[:, :-1]).mean()
    expected = (size / parts - 1) / (size - 1)
    assert abs(together - expected) < 6 * np.sqrt(expected / repeats / size)


def test_shuffle_of_a_large_batch(module):
    size, parts = 2**18, 16
    rows = np.array(module.shuffle(jax.random.key(0), size)).reshape(parts, -1)
    blocks = rows * parts // size  # which sixteenth of the rollout each row comes from
    count = (blocks[:, :, None] == np.arange(parts)).sum(1)  # [parts, parts]
    expected = size / parts**2
    statistic = ((count - expected) ** 2 / expected).sum()
    freedom = (parts - 1) ** 2
    assert abs(statistic - freedom) < 6 * np.sqrt(2 * freedom)


# ----------------------------------------------------------------------------------------- network
@pytest.mark.parametrize("script", ["ppo_ff", "ppo_rnn"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_dense_on_patches_is_a_convolution(script, size):
    module = load_script(script)
    keys = jax.random.split(jax.random.key(0), 3)
    image = jax.random.normal(keys[0], (2, 6, 5, 4))
    conv = nn.Conv(7, (size, size), padding="VALID")
    params = conv.init(keys[1], image)["params"]
    weight = jax.random.normal(keys[2], conv.apply({"params": params}, image).shape)

    def by_conv(params, image):
        out = conv.apply({"params": params}, image)
        return (out * weight).sum(), out

    def by_patches(params, image):
        kernel = params["kernel"].reshape(-1, 7)
        params = {"kernel": kernel, "bias": params["bias"]}
        out = nn.Dense(7).apply({"params": params}, module.patches(image, size))
        return (out * weight).sum(), out

    expected, expected_out = jax.grad(by_conv, argnums=(0, 1), has_aux=True)(params, image)
    actual, out = jax.grad(by_patches, argnums=(0, 1), has_aux=True)(params, image)
    np.testing.assert_allclose(out, expected_out, atol=1e-4)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-4), actual, expected)


# --------------------------------------------------------------------------------------- optimizer
@pytest.fixture(scope="module")
def gradient_steps(module):
    """States before, after one and after two updates of one gradient step, and their metrics.

    Clipped hard with an annealed learning rate, and not clipped with a constant one: the first step
    of both starts from the same parameters and the same rollout.
    """
    result = []
    changes = {"num_minibatches": 1, "update_epochs": 1, "total_timesteps": 64}
    with probes_for(module):
        for max_grad_norm, anneal_lr in ((1e-3, True), (1e6, False)):
            changes |= {"max_grad_norm": max_grad_norm, "anneal_lr": anneal_lr}
            config = probe_config(module, "Clock", **changes)
            state, train = start(module, config, 1)
            states, metrics = [to_numpy(state)], []
            for _ in range(2):
                state, measured = train(state)
                states.append(to_numpy(state))
                metrics.append({name: x[0, 0, 0] for name, x in measured.items()})
            result.append((config, states, metrics))
    return result


def flat(tree):
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])


def adam_of(state):
    """The moments of Adam in the optimizer's state, and its count of steps."""
    has_moments = lambda x: hasattr(x, "mu")
    leaves = jax.tree.leaves(state.opt_state, is_leaf=has_moments)
    (adam,) = [x for x in leaves if has_moments(x)]
    return flat(adam.mu["params"]), flat(adam.nu["params"]), int(adam.count.item())


def test_gradient_is_clipped_by_its_global_norm(gradient_steps):
    # The first moment of Adam is a tenth of its first gradient.
    clipped, free = (adam_of(states[1])[0] / 0.1 for _, states, _ in gradient_steps)
    norm = np.sqrt((free**2).sum())
    assert norm > 1e-2
    np.testing.assert_allclose(clipped, free * 1e-3 / norm, rtol=1e-3, atol=1e-9)
    for _, _, metrics in gradient_steps:  # reported before it is clipped
        np.testing.assert_allclose(metrics[0]["optim/grad_norm"], norm, rtol=1e-4)


def test_steps_are_those_of_adam_with_the_learning_rate_of_the_schedule(gradient_steps):
    for config, states, metrics in gradient_steps:
        assert config.num_updates == 4
        for update in (0, 1):
            rate = config.lr * (1 - update / 4 if config.anneal_lr else 1)
            np.testing.assert_allclose(metrics[update]["optim/lr"], rate, rtol=1e-6)
            mean, square, count = adam_of(states[update + 1])
            assert count == update + 1
            mean, square = mean / (1 - 0.9**count), square / (1 - 0.999**count)
            before, after = (flat(states[u].params["params"]) for u in (update, update + 1))
            step = -rate * mean / (np.sqrt(square) + 1e-5)
            assert np.abs(step).max() > 0.1 * rate
            np.testing.assert_allclose(after - before, step, atol=1e-3 * rate + 2e-7)


# ---------------------------------------------------------------------------------- tanh-Gaussian
def continuous_scripts():
    return [name for name in SCRIPTS if name in ("ppo_continuous", "ppo_obs_norm")]


@pytest.fixture(scope="module", params=continuous_scripts())
def continuous(request):
    return load_script(request.param)


CENTRE, HALF = np.array([1.0, 0.0, -3.0]), np.array([2.0, 0.5, 1.0])
BOUNDS = (np.float32(CENTRE - HALF), np.float32(CENTRE + HALF))


def action_distribution(module, squash, scale=1.0):
    mean = jnp.array([[0.0, 0.5, -1.0], [0.3, -2.0, 0.1]])
    log_std = jnp.log(scale * jnp.array([0.3, 0.7, 0.5]))
    return module.ActionDistribution(mean, log_std, squash, *BOUNDS)


def by_distrax(distribution):
    """The distribution of what the environment receives."""
    normal = distrax.MultivariateNormalDiag(
        distribution.mean, jnp.exp(jnp.broadcast_to(distribution.log_std, (2, 3)))
    )
    scale = distrax.Block(distrax.ScalarAffine(jnp.array(CENTRE), jnp.array(HALF)), 1)
    return distrax.Transformed(normal, distrax.Chain([scale, distrax.Block(distrax.Tanh(), 1)]))


def test_squashed_log_prob_is_that_of_distrax(continuous):
    distribution = action_distribution(continuous, squash=True)
    raw = distribution.sample(jax.random.key(0))
    action = distribution.to_env(raw)
    assert ((action > BOUNDS[0]) & (action < BOUNDS[1])).all()
    expected = by_distrax(distribution).log_prob(action)
    np.testing.assert_allclose(distribution.log_prob(raw), expected, atol=1e-3)
    raw, log_prob = distribution.sample_and_log_prob(jax.random.key(1))
    np.testing.assert_array_equal(log_prob, distribution.log_prob(raw))


def test_squashed_density_integrates_to_one(continuous):
    low, high = np.float32([-1.0]), np.float32([3.0])
    action = np.linspace(-1, 3, 200_003)[1:-1]
    raw = jnp.arctanh(jnp.array((action - 1) / 2))[:, None]
    for mean, std in ((0.0, 0.5), (-1.0, 0.3), (0.5, 1.0)):
        mean, log_std = jnp.full((1, 1), mean), jnp.full(1, np.log(std))
        distribution = continuous.ActionDistribution(mean, log_std, True, low, high)
        np.testing.assert_allclose(distribution.to_env(raw)[:, 0], action, atol=1e-4)
        density = np.exp(np.array(distribution.log_prob(raw), np.float64))
        np.testing.assert_allclose(np.trapezoid(density, action), 1, atol=2e-3)


def test_squashed_density_far_from_the_centre_is_finite(continuous):
    distribution = action_distribution(continuous, squash=True)
    raw = jnp.array([[50.0, -50.0, 30.0], [-20.0, 20.0, 100.0]])
    log_prob = lambda raw: distribution.log_prob(raw).sum()
    assert np.isfinite(log_prob(raw)) and np.isfinite(jax.grad(log_prob)(raw)).all()


@pytest.mark.parametrize("squash", [False, True])
def test_entropy_is_the_mean_of_minus_log_prob(continuous, squash):
    for scale in (0.3, 1.0, 3.0):
        distribution = action_distribution(continuous, squash, scale)
        keys = jax.random.split(jax.random.key(0), 40_000)
        sample = jax.vmap(lambda key, d=distribution: -d.sample_and_log_prob(key)[1])
        log_probs = np.array(sample(keys))  # [samples, 2]
        error = log_probs.std(0) / np.sqrt(len(keys))
        assert (np.abs(distribution.entropy() - log_probs.mean(0)) < 5 * error + 2e-3).all()


def test_plain_gaussian_is_that_of_distrax(continuous):
    distribution = action_distribution(continuous, squash=False)
    std = jnp.exp(jnp.broadcast_to(distribution.log_std, (2, 3)))
    expected = distrax.MultivariateNormalDiag(distribution.mean, std)
    raw = distribution.sample(jax.random.key(0))
    np.testing.assert_allclose(distribution.log_prob(raw), expected.log_prob(raw), atol=1e-5)
    np.testing.assert_allclose(distribution.entropy(), expected.entropy(), atol=1e-5)
    np.testing.assert_allclose(distribution.to_env(raw), CENTRE + HALF * raw, atol=1e-5)


# -------------------------------------------------------------------------------------- statistics
@pytest.fixture(scope="module")
def obs_norm():
    return load_script("ppo_obs_norm")


def merge(module, moments, batch, devices=1):
    """update_moments with the batch spread over emulated devices, which must agree."""
    parts = jnp.array(batch, jnp.float32).reshape(devices, -1, *batch.shape[1:])
    update = jax.vmap(lambda part: module.update_moments(moments, part), axis_name="devices")
    merged = update(parts)
    for x in merged:
        np.testing.assert_array_equal(x, jnp.broadcast_to(x[0], x.shape))
    return jax.tree.map(lambda x: x[0], merged)


def first_moments(module):
    return module.Moments(jnp.zeros(3), jnp.ones(3), jnp.float32(0))


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("mean", [0.0, 1e4])
def test_statistics_of_many_batches(obs_norm, devices, mean):
    rng = np.random.default_rng(0)
    moments, seen = first_moments(obs_norm), np.zeros((0, 3))
    for size in (2, 64, 6, 500, 2, 128, 64, 64):
        # The mean drifts from batch to batch, so that most of the variance is between them.
        batch = rng.normal(mean + rng.normal(scale=3), [1, 2, 0.1], (size, 3)).astype(np.float32)
        moments, seen = merge(obs_norm, moments, batch, devices), np.concatenate([seen, batch])
        np.testing.assert_allclose(moments.mean, seen.mean(0), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(moments.var, seen.var(0), rtol=1e-2 if mean else 1e-4)
        assert moments.count == len(seen)


def test_statistics_do_not_overflow_or_stall_after_a_billion_samples(obs_norm):
    rng = np.random.default_rng(0)
    count, mean, var = 1e9, np.full(3, 5.0), np.full(3, 4.0)
    moments = obs_norm.Moments(jnp.float32(mean), jnp.float32(var), jnp.float32(count))
    for _ in range(50):
        batch = rng.normal(1000.0, 20.0, (10_000, 3))
        moments = merge(obs_norm, moments, batch)
        # In double precision, from the sums.
        total = count + len(batch)
        square = count * (var + mean**2) + (batch**2).sum(0)
        mean, count = (count * mean + batch.sum(0)) / total, total
        var = square / count - mean**2
    assert var[0] > 400
    np.testing.assert_allclose(moments.mean, mean, rtol=1e-4)
    np.testing.assert_allclose(moments.var, var, rtol=1e-3)
    huge = merge(obs_norm, moments._replace(count=jnp.float32(1e30)), batch)
    np.testing.assert_array_equal(huge.mean, moments.mean)


def test_network_reads_normalised_observations(obs_norm):
    config = tiny(obs_norm)
    network = obs_norm.ActorCritic((np.float32([-1]), np.float32([1])), config)
    obs = jax.random.normal(jax.random.key(0), (5, 3)) * 50 + 7
    params = network.init(jax.random.key(1), obs)
    moments = obs_norm.Moments(jnp.array([7.0, 0.0, 1.0]), jnp.array([4.0, 0.0, 1e4]), 1.0)
    by_hand = np.clip((obs - moments.mean) / np.maximum(np.sqrt(moments.var), 1e-4), -10, 10)
    frozen = {**params, "obs_stats": {"moments": moments}}
    policy, value = network.apply(frozen, obs)
    expected_policy, expected_value = network.apply(params, by_hand)  # mean 0, variance 1
    np.testing.assert_allclose(value, expected_value, atol=1e-5)
    np.testing.assert_allclose(policy.mean, expected_policy.mean, atol=1e-5)


# ----------------------------------------------------------------------------------------- memory
@pytest.fixture(scope="module")
def rnn():
    return load_script("ppo_rnn")


def test_gru_is_that_of_flax(rnn):
    steps, batch, size, inputs = 7, 3, 5, 4
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (steps, batch, inputs))
    hidden = jax.random.normal(keys[1], (batch, size))
    reset = jax.random.bernoulli(keys[2], 0.3, (steps, batch))
    gru, cell = rnn.GRU(size, jnp.float32), nn.GRUCell(size)
    params = gru.init(keys[3], x, hidden, reset)["params"]
    params = jax.tree.map(lambda p: p + 0.1 * jax.random.normal(keys[0], p.shape), params)
    (from_input,) = [p for p in params.values() if isinstance(p, dict)]
    cell_params = {"hn": {"bias": params["bias"]}}
    for i, gate in enumerate("rzn"):
        part = slice(i * size, (i + 1) * size)
        cell_params[f"i{gate}"] = jax.tree.map(lambda p, part=part: p[..., part], from_input)
        cell_params.setdefault(f"h{gate}", {})["kernel"] = params["kernel"][:, part]
    actual = gru.apply({"params": params}, x, hidden, reset)
    for t in range(steps):
        hidden = jnp.where(reset[t][:, None], jnp.zeros_like(hidden), hidden)
        hidden, _ = cell.apply({"params": cell_params}, hidden, x[t])
        np.testing.assert_allclose(actual[t], hidden, atol=1e-5)


def test_sequence_is_the_same_as_step_by_step(rnn):
    steps, batch = 6, 3
    config = tiny(rnn, hidden_size=8, conv_size=2, embedding_size=4, head_size=4)
    network = rnn.ActorCritic(6, config)
    keys = jax.random.split(jax.random.key(0), 6)
    shape = (steps, batch)
    obs = rnn.Observation(
        jax.random.randint(keys[0], (*shape, 5, 5, 2), 0, 10).astype(jnp.uint8),
        jax.random.randint(keys[1], shape, 0, 4),
        jax.random.randint(keys[2], shape, -1, 6),
        jax.random.normal(keys[3], shape),
    )
    reset = jnp.zeros(shape, bool).at[2, 0].set(True).at[4, 1].set(True).at[0, 2].set(True)
    hidden = jax.random.normal(keys[4], (batch, 8))
    params = jax.jit(network.init)(keys[5], obs, hidden, reset)
    policy, value, hiddens = network.apply(params, obs, hidden, reset)
    assert value.shape == shape and hiddens.shape == (*shape, 8)
    at = lambda t: jax.tree.map(lambda x: x[t], obs)
    one_step = jax.jit(lambda *args: network.apply(params, *args, method="one_step"))
    for t in range(steps):
        cleared = jnp.where(reset[t][:, None], jnp.zeros_like(hidden), hidden)
        for given in (hidden, cleared):  # a reset and a hidden state of zeros are the same
            now, now_value, after = one_step(at(t), given, reset[t])
            np.testing.assert_allclose(now.logits, policy.logits[t], atol=1e-5)
            np.testing.assert_allclose(now_value, value[t], atol=1e-5)
            np.testing.assert_allclose(after, hiddens[t], atol=1e-5)
        hidden = after
    # A reset hides everything before it.
    other = network.apply(params, obs, jnp.ones((batch, 8)), reset)[1]
    np.testing.assert_allclose(other[2:, 0], value[2:, 0], atol=1e-6)
    assert (np.abs(other[:2, 0] - value[:2, 0]) > 1e-4).any()
