"""The numerical pieces against independent libraries, or formulas by hand."""

import types
from functools import partial

import distrax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rlax
from conftest import ROOT, SCRIPTS, load_script, tiny
from probes import apply_once, network_of, probe_config, probes_for, start, to_numpy
from scipy import stats
from xminigrid.core.constants import NUM_COLORS, NUM_TILES

GAMMA, GAE_LAMBDA = 0.9, 0.8
SOURCES = {path.stem: path.read_text() for path in sorted(ROOT.glob("*.py"))}
WITH_GAE = [script for script, text in SOURCES.items() if "def compute_gae(" in text]


# -------------------------------------- advantage
def random_rollout(steps=12, envs=40, ends=0.15):
    rng = np.random.default_rng(0)
    reward, value, next_value = rng.normal(size=(3, steps, envs))
    terminated, truncated = rng.random((2, steps, envs)) < ends
    terminated[-1, :2], truncated[-1, :2] = [True, False], [False, True]  # at the rollout's end
    terminated[5, 2] = truncated[5, 2] = True  # both at once
    return reward, value, next_value, terminated, truncated


def gae_by_hand(reward, value, next_value, terminated, truncated):
    """The sum over the steps up to the end of the episode (eq. 16)."""
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


def gae(module, reward, value, next_value, terminated, truncated):
    """compute_gae of a rollout that holds nothing else."""
    fields = dict.fromkeys(module.Transition._fields)
    fields |= {"reward": reward, "value": value, "terminated": terminated}
    rollout = module.Transition(
        **jax.tree.map(jnp.array, fields | {"done": terminated | truncated})
    )
    return module.compute_gae(rollout, jnp.array(next_value), GAMMA, GAE_LAMBDA)


def test_gae_is_the_sum_of_its_definition(module):
    steps = random_rollout()
    advantage, target = gae(module, *steps)
    expected = gae_by_hand(*steps)
    np.testing.assert_allclose(advantage, expected, atol=1e-5)
    np.testing.assert_allclose(target, expected + steps[1], atol=1e-5)


def test_gae_is_that_of_rlax_without_time_limits(module):
    reward, value, _, terminated, _ = random_rollout()
    last_value = np.random.default_rng(1).normal(size=value.shape[1])
    values = np.concatenate([value, last_value[None]])
    advantage, _ = gae(module, reward, value, values[1:], terminated, terminated)
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
    reward, value, next_value = np.array([[1.0, 5.0], [10.0, 20.0], [30.0, 40.0]])
    second = 5 + 0.9 * 40 - 20
    for terminated, truncated, first in (
        (False, False, 1 + 0.9 * 30 - 10 + 0.9 * 0.8 * second),
        (False, True, 1 + 0.9 * 30 - 10),
        (True, False, 1 - 10),
        (True, True, 1 - 10),
    ):
        ends = (np.array([x, False]) for x in (terminated, truncated))  # the first step's
        advantage, _ = gae(module, reward, value, next_value, *ends)
        np.testing.assert_allclose(advantage, [first, second], rtol=1e-6)


@pytest.mark.parametrize("script", WITH_GAE)
@pytest.mark.parametrize("unused", [np.nan, np.inf, -np.inf])
def test_gae_ignores_the_value_after_a_termination(script, unused):
    reward, value, next_value = np.array([[1.0, 1.0], [0.0, 0.0], [0.0, unused]])
    terminated, truncated = np.array([[False, True], [False, False]])
    steps = (reward, value, next_value, terminated, truncated)
    for result in gae(load_script(script), *steps):  # advantage, and target of values of zero
        np.testing.assert_allclose(result, [1.72, 1], rtol=1e-6)


# ------------------------------------------- loss
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


def loss_by_fake_network(module, clip_value=False, ent_coef=0.01):
    """ppo_loss of a network with its outputs as parameters; returns loss, metrics, gradient.

    An observation is the row of the outputs. ppo_rnn.py gets two sequences of three steps.
    """
    is_recurrent = module.SCRIPT == "ppo_rnn"
    shape = (3, 2) if is_recurrent else (6,)
    old_log_prob = np.log(PROBS[np.arange(6), ACTION]) - np.log(RATIO)
    samples = {"obs": np.arange(6), "action": ACTION, "log_prob": old_log_prob, "value": OLD_VALUE}
    if is_recurrent:
        samples |= {"hidden": np.zeros(6), "reset": np.zeros(6, bool)}
    samples = {name: x.reshape(shape) for name, x in samples.items()}
    batch = module.Transition(**dict.fromkeys(module.Transition._fields) | samples)

    def apply(params, row, *memory):
        outputs = (distrax.Categorical(params["logits"][row]), params["value"][row])
        return (*outputs, None) if is_recurrent else outputs

    params = {"logits": jnp.log(PROBS), "value": jnp.array(VALUE)}
    network = types.SimpleNamespace(apply=apply)
    loss = jax.value_and_grad(module.ppo_loss, has_aux=True)
    advantage, target = ADVANTAGE.reshape(shape), TARGET.reshape(shape)
    arguments = (network, batch, advantage, target, ent_coef, loss_config(clip_value))
    (loss, metrics), grads = loss(params, *arguments)
    return loss, metrics, grads


def loss_config(clip_value):
    return types.SimpleNamespace(clip_eps=0.2, clip_value=clip_value, vf_coef=0.5)


@pytest.mark.parametrize("clip_value", [False, True])
def test_loss_by_hand(module, clip_value):
    loss, metrics, _ = loss_by_fake_network(module, clip_value)
    policy_loss = -SURROGATE.mean()
    value_loss = 0.5 * (CLIPPED_ERROR if clip_value else ERROR).mean()
    entropy = -(PROBS * np.log(PROBS)).sum(1).mean()
    expected = {
        "loss/policy": policy_loss,
        "loss/value": value_loss,
        "policy/entropy": entropy,
        "policy/approx_kl": (RATIO - 1 - np.log(RATIO)).mean(),
        "policy/clip_fraction": 4 / 6,
    }
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)
    np.testing.assert_allclose(loss, policy_loss + 0.5 * value_loss - 0.01 * entropy, rtol=1e-5)


@pytest.mark.parametrize("clip_value", [False, True])
def test_loss_gradient_by_hand(module, clip_value):
    _, _, grads = loss_by_fake_network(module, clip_value, ent_coef=0.0)
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
    _, metrics, _ = loss_by_fake_network(module)
    expected = rlax.clipped_surrogate_pg_loss(jnp.array(RATIO), jnp.array(ADVANTAGE), 0.2)
    np.testing.assert_allclose(metrics["loss/policy"], expected, rtol=1e-5)


# ---------------------------------------- network
def initial_params(module, config, obs):
    network = network_of(module, config)
    if module.SCRIPT == "ppo_rnn":
        obs = jax.tree.map(lambda x: x[None], obs)
        hidden = jnp.zeros(config.num_layers * config.hidden_size)
        memory = (hidden, jnp.zeros(1, bool))
        return network, network.init(jax.random.key(0), obs, *memory)["params"]
    return network, network.init(jax.random.key(0), obs)["params"]


def perturb(params):
    return jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(2), x.shape), params)


def random_observations(rnn, shape, view_size=5):
    keys = jax.random.split(jax.random.key(5), 4)
    return rnn.Observation(
        jax.random.randint(keys[0], (*shape, view_size, view_size, 2), 0, 10).astype(jnp.uint8),
        jax.random.randint(keys[1], shape, 0, 4),
        jax.random.randint(keys[2], shape, -1, 6),
        jax.random.normal(keys[3], shape),
    )


def test_initialization_is_orthogonal(module):
    """With scales sqrt(2), 0.01 for the policy and 1 for the value; biases are zero."""
    is_recurrent = module.SCRIPT == "ppo_rnn"
    obs = random_observations(module, ()) if is_recurrent else jnp.zeros(4)
    _, params = initial_params(module, tiny(module, hidden_size=16), obs)
    scales = []
    if is_recurrent:
        gru = params.pop("GRU_0")
        np.testing.assert_allclose(gru["kernel"] @ gru["kernel"].T, np.eye(16), atol=1e-5)
        assert params.pop("Dense_0").keys() == {"kernel"}  # of the embedding
    for layer in params.values():
        if isinstance(layer, dict) and "kernel" in layer:
            singular = np.linalg.svd(layer["kernel"], compute_uv=False)
            scales.append(float(singular.mean()))
            np.testing.assert_allclose(singular, scales[-1], rtol=1e-4)
            assert (layer["bias"] == 0).all()
    expected = [0.01, 1.0] + [2**0.5] * (5 if is_recurrent else 4)
    np.testing.assert_allclose(np.sort(scales), expected, rtol=1e-4)


NETWORKS = [
    ("ppo_ff", {}),
    ("ppo_ff", {"env_id": "Breakout-MinAtar"}),
    *[("ppo_continuous", {"policy": name}) for name in ("gaussian", "tanh_gaussian", "beta")],
    ("ppo_obs_norm", {"policy": "beta"}),
]


@pytest.mark.parametrize(("script", "options"), NETWORKS)
def test_a_network_takes_any_leading_axes(script, options):
    """And gives what it gives for one observation at a time."""
    module = load_script(script)
    network = network_of(module, tiny(module, **options))
    shape = (10, 10, 4) if "env_id" in options else (3,)
    obs = jax.random.normal(jax.random.key(0), (2, 3, *shape))
    params = perturb(network.init(jax.random.key(1), obs[0, 0]))

    def outputs(obs):
        policy, value = network.apply(params, obs)
        action = policy.mode() * 0.9 if hasattr(policy, "to_env") else policy.mode()
        return policy.log_prob(action), policy.entropy(), value

    together = jax.jit(outputs)(obs)
    assert all(x.shape == (2, 3) for x in together)
    one_by_one = jax.jit(jax.vmap(jax.vmap(outputs)))(obs)
    close = lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5)
    jax.tree.map(close, together, one_by_one)


def test_convolutional_network_is_that_of_flax():
    """Outputs and gradients with nn.Conv in place of the dense layer on patches."""
    module = load_script("ppo_ff")
    config = tiny(module, env_id="Breakout-MinAtar", hidden_size=8)
    image = jax.random.normal(jax.random.key(1), (10, 10, 4))
    network, params = initial_params(module, config, image)
    params = perturb(params)

    def by_conv(params, image):
        kernel = params["Dense_0"]["kernel"].reshape(3, 3, 4, 16)
        conv = nn.Conv(16, (3, 3), padding="VALID")
        weights = {"kernel": kernel, "bias": params["Dense_0"]["bias"]}
        x = nn.relu(conv.apply({"params": weights}, image[None])[0]).reshape(-1)
        x = nn.Dense(8).apply({"params": params["Dense_1"]}, x)
        x = nn.relu((x - x.mean()) / jnp.sqrt(x.var() + 1e-6))
        logits = nn.Dense(3).apply({"params": params["Dense_2"]}, x)
        value = nn.Dense(1).apply({"params": params["Dense_3"]}, x)
        return jax.nn.log_softmax(logits), value[0]

    def by_script(params, image):
        policy, value = network.apply({"params": params}, image)
        return jax.nn.log_softmax(policy.logits), value

    gradients = lambda f: jax.jit(jax.jacrev(f, argnums=(0, 1)))(params, image)
    close = lambda x, y: np.testing.assert_allclose(x, y, atol=1e-4)
    jax.tree.map(close, by_script(params, image), by_conv(params, image))
    jax.tree.map(close, gradients(by_script), gradients(by_conv))


# --------------------------------- gradient steps
def record_losses(module, patch):
    """Returns a list that gets the arrays of each gradient step, in the order of `ppo_loss`."""
    steps = []
    ppo_loss = module.ppo_loss

    def record(params, network, *args):
        jax.debug.callback(lambda *arrays: steps.append(to_numpy(arrays)), params, *args[:-1])
        return ppo_loss(params, network, *args)

    patch.setattr(module, "ppo_loss", record)
    return steps


def two_updates(module, **options):
    """The eight gradient steps of the first two of four updates."""
    sizes = {"num_minibatches": 2, "update_epochs": 2, "total_timesteps": 64, "num_evals": 4}
    with probes_for(module) as patch:
        config = probe_config(module, "Clock", ent_coef=0.2, **sizes, **options)
        network = network_of(module, config)
        gradient = jax.jit(jax.grad(module.ppo_loss, has_aux=True), static_argnums=(1, 6))
        steps = record_losses(module, patch)
        state, train = start(module, config)
        metrics = []
        for _ in range(2):
            state, measured = train(state)
            metrics.append({name: x[0, 0, 0] for name, x in to_numpy(measured).items()})
        jax.effects_barrier()
    names = ("batch", "advantage", "target", "ent_coef")
    return {
        "config": config,
        "params": [flat(x["params"]) for x, *_ in steps] + [flat(state.params["params"])],
        "gradients": [flat(gradient(x[0], network, *x[1:], config)[0]["params"]) for x in steps],
        "losses": [dict(zip(names, x[1:], strict=True)) for x in steps],
        "metrics": metrics,
    }


@pytest.fixture(scope="module")
def gradient_steps(module):
    """Once clipped hard with an annealed learning rate, once not, with an annealed bonus."""
    return (
        two_updates(module, max_grad_norm=1e-3, anneal_lr=True, anneal_ent=False),
        two_updates(module, max_grad_norm=1e6, anneal_lr=False, anneal_ent=True),
    )


def flat(tree):
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)]).astype(float)


def test_steps_are_those_of_adam_with_the_learning_rate_of_the_schedule(gradient_steps):
    """The learning rate falls with every update; each gradient is clipped by its global norm."""
    for run in gradient_steps:
        config, params = run["config"], run["params"]
        assert config.num_updates == 4 and len(params) == 9
        mean = square = 0
        for i, gradient in enumerate(run["gradients"]):
            gradient = gradient * min(1, config.max_grad_norm / np.sqrt((gradient**2).sum()))
            mean = 0.9 * mean + 0.1 * gradient
            square = 0.999 * square + 0.001 * gradient**2
            rate = config.lr * (1 - i // 4 / 4 if config.anneal_lr else 1)
            scale = np.sqrt(square / (1 - 0.999 ** (i + 1))) + 1e-5
            step = -rate * mean / (1 - 0.9 ** (i + 1)) / scale
            assert np.abs(step).max() > 0.1 * rate
            np.testing.assert_allclose(params[i + 1] - params[i], step, atol=1e-3 * rate + 2e-7)


def test_gradients_are_clipped_by_their_global_norm(gradient_steps):
    """The test above clips all of one run and none of the other; reported is the norm before."""
    for run in gradient_steps:
        norms = np.sqrt([(gradient**2).sum() for gradient in run["gradients"]])
        limit = run["config"].max_grad_norm
        assert norms.min() > 10 * limit if limit < 1 else norms.max() < limit
        last_epochs = norms.reshape(2, 2, 2)[:, -1].mean(-1)  # [updates, epochs, minibatches]
        reported = [measured["optim/grad_norm"] for measured in run["metrics"]]
        np.testing.assert_allclose(reported, last_epochs, rtol=1e-4)


def test_learning_rate_and_entropy_bonus_decay_to_zero_if_annealed(gradient_steps):
    """Both by the update."""
    decay = lambda is_annealed, update: 1 - update / 4 if is_annealed else 1
    for run in gradient_steps:
        config = run["config"]
        for update, measured in enumerate(run["metrics"]):
            rate = config.lr * decay(config.anneal_lr, update)
            np.testing.assert_allclose(measured["optim/lr"], rate, rtol=1e-6)
            losses = run["losses"][4 * update : 4 * update + 4]
            coefs = [loss["ent_coef"] for loss in losses]
            expected = config.ent_coef * decay(config.anneal_ent, update)
            np.testing.assert_allclose(coefs, [expected] * 4, rtol=1e-6)


def test_advantages_are_normalized_per_minibatch(gradient_steps):
    for loss in [loss for run in gradient_steps for loss in run["losses"]]:
        advantage = loss["target"] - loss["batch"].value
        expected = (advantage - advantage.mean()) / advantage.std()
        np.testing.assert_allclose(loss["advantage"], expected, atol=1e-4)


def assert_uniform(count, freedom):
    """Pearson's chi-squared test: within 6 standard deviations."""
    expected = count.mean()
    statistic = ((count - expected) ** 2 / expected).sum()
    assert abs(statistic - freedom) < 6 * np.sqrt(2 * freedom)


def test_every_epoch_takes_every_sample_once_in_a_new_order(module):
    """The target of a sample is its number; ppo_rnn.py takes whole sequences."""
    epochs, parts, envs, steps = 300, 4, 12, 3
    rows = envs if module.SCRIPT == "ppo_rnn" else envs * steps
    rollouts = []
    compute_gae = module.compute_gae

    def number(rollout, *args):
        jax.debug.callback(lambda value: rollouts.append(np.array(value)), rollout.value)
        advantage, target = compute_gae(rollout, *args)
        return advantage, jnp.arange(target.size, dtype=jnp.float32).reshape(target.shape)

    with probes_for(module) as patch:
        sizes = {"update_epochs": epochs, "num_minibatches": parts, "num_envs": envs}
        sizes |= {"num_steps": steps, "total_timesteps": envs * steps, "num_evals": 1}
        config = probe_config(module, "Clock", lr=1e-12, **sizes)
        patch.setattr(module, "compute_gae", number)
        minibatches = record_losses(module, patch)
        state, train = start(module, config)
        train(state)
        jax.effects_barrier()
    (values,) = rollouts  # [T, N]
    assert len(minibatches) == epochs * parts
    for _, batch, _, target, _ in minibatches:
        np.testing.assert_array_equal(batch.value, values.ravel()[target.astype(int)])
    numbers = np.array([target.ravel() for _, _, _, target, _ in minibatches], int)
    numbers = numbers.reshape(epochs, -1)  # in the order of an epoch
    np.testing.assert_array_equal(np.sort(numbers), [range(envs * steps)] * epochs)
    place = np.argsort(numbers) * parts // (envs * steps)  # the minibatch of each sample
    if module.SCRIPT == "ppo_rnn":
        place = place.reshape(epochs, steps, envs)
        np.testing.assert_array_equal(place, place[:, :1].repeat(steps, 1))
        place = place[:, 0]
    count = (place[:, :, None] == np.arange(parts)).sum(0)  # [rows, parts]
    assert_uniform(count, (rows - 1) * (parts - 1))
    # Neighbors are as rarely together as any two rows.
    together = (place[:, 1:] == place[:, :-1]).mean()
    expected = (rows / parts - 1) / (rows - 1)
    assert abs(together - expected) < 6 * np.sqrt(expected / epochs / rows)


# ---------------------------------- tanh-Gaussian
def continuous_scripts():
    return [name for name in SCRIPTS if name in ("ppo_continuous", "ppo_obs_norm")]


@pytest.fixture(scope="module", params=continuous_scripts())
def continuous(request):
    return load_script(request.param)


def action_distribution(module, squash, scale=1.0):
    mean = jnp.array([[0.0, 0.5, -1.0], [0.3, -2.0, 0.1]])
    log_std = jnp.log(scale * jnp.array([[0.3, 0.7, 0.5]] * 2))
    kind = module.TanhGaussianPolicy if squash else module.GaussianPolicy
    return kind(distrax.Normal(mean, jnp.exp(log_std)), 1)


def gaussian_of(distribution):
    return distrax.MultivariateNormalDiag(distribution.mean(), distribution.stddev())


def test_squashed_log_prob_is_that_of_distrax(continuous):
    distribution = action_distribution(continuous, squash=True)
    squashed = distrax.Transformed(gaussian_of(distribution), distrax.Block(distrax.Tanh(), 1))
    raw = distribution.sample(seed=jax.random.key(0))
    action = distribution.to_env(raw)
    assert (np.abs(action) < 1).all()
    np.testing.assert_allclose(distribution.log_prob(raw), squashed.log_prob(action), atol=1e-3)


def test_squashed_density_integrates_to_one(continuous):
    action = np.linspace(-1, 1, 200_003)[1:-1]
    raw = jnp.arctanh(jnp.array(action))[:, None]
    for mean, std in ((0.0, 0.5), (-1.0, 0.3), (0.5, 1.0)):
        normal = distrax.Normal(jnp.full((1, 1), mean), jnp.full((1, 1), std))
        distribution = continuous.TanhGaussianPolicy(normal, 1)
        np.testing.assert_allclose(distribution.to_env(raw)[:, 0], action, atol=1e-4)
        density = np.exp(np.array(distribution.log_prob(raw), np.float64))
        np.testing.assert_allclose(np.trapezoid(density, action), 1, atol=2e-3)


def test_squashed_density_far_from_the_center_is_finite(continuous):
    distribution = action_distribution(continuous, squash=True)
    raw = jnp.array([[50.0, -50.0, 30.0], [-20.0, 20.0, 100.0]])
    log_prob = lambda raw: distribution.log_prob(raw).sum()
    assert np.isfinite(log_prob(raw)) and np.isfinite(jax.grad(log_prob)(raw)).all()


@pytest.mark.parametrize("squash", [False, True])
def test_entropy_is_the_mean_of_minus_log_prob(continuous, squash):
    for scale in (0.3, 1.0, 3.0):
        distribution = action_distribution(continuous, squash, scale)
        samples = distribution.sample(seed=jax.random.key(0), sample_shape=40_000)
        log_probs = -np.array(jax.vmap(distribution.log_prob)(samples))  # [samples, 2]
        error = log_probs.std(0) / np.sqrt(len(samples))
        assert (np.abs(distribution.entropy() - log_probs.mean(0)) < 5 * error + 2e-3).all()


def test_plain_gaussian_is_that_of_distrax(continuous):
    distribution = action_distribution(continuous, squash=False)
    expected = gaussian_of(distribution)
    raw = distribution.sample(seed=jax.random.key(0))
    np.testing.assert_allclose(distribution.log_prob(raw), expected.log_prob(raw), atol=1e-5)
    np.testing.assert_allclose(distribution.entropy(), expected.entropy(), atol=1e-5)
    np.testing.assert_allclose(distribution.mode(), distribution.mean())
    np.testing.assert_allclose(distribution.to_env(raw), np.clip(raw, -1, 1), atol=1e-6)


def test_the_beta_policy_is_that_of_scipy(continuous):
    alpha, beta = jnp.array([1.5, 4.0]), jnp.array([2.0, 1.2])
    policy = continuous.BetaPolicy(distrax.Beta(alpha, beta), 1)
    raw = jnp.array([0.3, 0.9])
    reference = stats.beta(np.array(alpha), np.array(beta))
    assert policy.log_prob(raw) == pytest.approx(reference.logpdf(np.array(raw)).sum(), rel=1e-4)
    assert policy.entropy() == pytest.approx(reference.entropy().sum(), rel=1e-4)
    np.testing.assert_allclose(policy.mode(), (alpha - 1) / (alpha + beta - 2), rtol=1e-5)
    np.testing.assert_allclose(policy.to_env(raw), [-0.4, 0.8], rtol=1e-5)
    flat = continuous.BetaPolicy(distrax.Beta(jnp.ones(2), jnp.array([1.0, 1.0 + 1e-7])), 1)
    assert np.isfinite(flat.mode()).all() and flat.mode()[0] == 0.5
    narrow = continuous.BetaPolicy(distrax.Beta(jnp.array([1e6]), jnp.array([1.0])), 1)
    keys = jax.random.split(jax.random.key(0), 100)
    samples = jax.vmap(lambda key: narrow.sample(seed=key))(keys)
    assert samples.max() < 1 and np.isfinite(jax.vmap(narrow.log_prob)(samples)).all()


def test_the_deviation_does_not_depend_on_the_state(continuous):
    """The log standard deviation is a parameter of zeros, one for each action."""
    network = network_of(continuous, tiny(continuous))
    obs = jax.random.normal(jax.random.key(0), (5, 3))
    params = network.init(jax.random.key(1), obs)
    np.testing.assert_array_equal(params["params"]["log_std"], np.zeros(1))
    params = jax.tree.map(lambda x: x + 0.3, params)
    policy, _ = network.apply(params, obs)
    np.testing.assert_allclose(policy.stddev(), np.full((5, 1), np.exp(0.3)), rtol=1e-6)
    assert np.ptp(policy.mean()) > 1e-3  # whereas the mean does


# ------------------------------------- statistics
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


def test_scaled_reward_is_clipped(obs_norm):
    """A first reward of 1 after many zeros, and later ones."""
    rng = np.random.default_rng(0)
    stats = obs_norm.Moments(jnp.float32(0), jnp.float32(1), jnp.float32(0))
    scale = jax.vmap(obs_norm.scale_reward, (0, None), axis_name="devices")
    seen = []
    for update in range(6):
        reward = np.zeros((1, 50, 40), np.float32)  # [D, T, N]
        if update == 3:
            reward[0, 0, 0] = 1.0
        elif update > 3:
            reward = rng.normal(size=reward.shape).astype(np.float32)
        fields = dict.fromkeys(obs_norm.Transition._fields)
        fields |= {"reward": reward, "discounted_sum": reward}
        rollout, stats = scale(obs_norm.Transition(**fields), stats)
        stats = jax.tree.map(lambda x: x[0], stats)
        seen.append(reward)
        expected = reward / np.sqrt(np.var(seen) + 1e-8)
        assert (np.abs(expected).max() > 10) == (update == 3)
        np.testing.assert_allclose(rollout.reward, np.clip(expected, -10, 10), rtol=1e-3)


def test_network_reads_normalized_observations(obs_norm):
    network = network_of(obs_norm, tiny(obs_norm))
    obs = jax.random.normal(jax.random.key(0), (3,)) * 50 + 7
    params = network.init(jax.random.key(1), obs)
    moments = obs_norm.Moments(jnp.array([7.0, 0.0, 1.0]), jnp.array([4.0, 0.0, 1e4]), 1.0)
    by_hand = np.clip((obs - moments.mean) / np.maximum(np.sqrt(moments.var), 1e-4), -10, 10)
    frozen = {**params, "obs_stats": {"moments": moments}}
    policy, value = network.apply(frozen, obs)
    expected_policy, expected_value = network.apply(params, by_hand)  # mean 0, variance 1
    np.testing.assert_allclose(value, expected_value, atol=1e-5)
    np.testing.assert_allclose(policy.mean(), expected_policy.mean(), atol=1e-5)


# ----------------------------------------- memory
@pytest.fixture(scope="module")
def rnn():
    return load_script("ppo_rnn")


def cell_params_of(params):
    """Parameters of flax's GRUCell from those of GRU."""
    size = len(params["bias"])
    cell_params = {"hn": {"bias": params["bias"]}}
    for i, gate in enumerate("rzn"):
        part = slice(i * size, (i + 1) * size)
        from_input = params["Dense_0"]
        cell_params[f"i{gate}"] = {name: x[..., part] for name, x in from_input.items()}
        cell_params.setdefault(f"h{gate}", {})["kernel"] = params["kernel"][:, part]
    return {"params": cell_params}


def test_gru_is_that_of_flax(rnn):
    steps, size, inputs = 7, 5, 4
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (steps, inputs))
    hidden = jax.random.normal(keys[1], (size,))
    reset = jnp.array([0, 0, 1, 0, 1, 1, 0], bool)
    gru, cell = rnn.GRU(jnp.float32), nn.GRUCell(size)
    params = perturb(gru.init(keys[3], x, hidden, reset)["params"])
    actual = gru.apply({"params": params}, x, hidden, reset)
    for t in range(steps):
        hidden = jnp.zeros(size) if reset[t] else hidden
        hidden, _ = cell.apply(cell_params_of(params), hidden, x[t])
        np.testing.assert_allclose(actual[t], hidden, atol=1e-5)


@pytest.mark.parametrize("view_size, widths", [(5, (2, 4, 8)), (3, (8, 16))])
@pytest.mark.parametrize("embedding_size, num_layers", [(3, 1), (0, 2)])
def test_recurrent_network_is_that_of_flax(rnn, embedding_size, view_size, widths, num_layers):
    """Embedding by lookup, nn.Conv and nn.GRUCell."""
    config = tiny(
        rnn,
        num_layers=num_layers,
        hidden_size=8,
        conv_size=2,
        embedding_size=embedding_size,
        head_size=4,
    )
    obs = random_observations(rnn, (), view_size)
    network, params = initial_params(rnn, config, obs)
    params = perturb(params)
    hidden = jax.random.normal(jax.random.key(1), (num_layers * 8,))

    def layer(i):
        return {"params": params[f"Dense_{i}"]}

    embedding = params["Dense_0"]["kernel"] if embedding_size else np.eye(NUM_TILES + NUM_COLORS)
    first = 1 if embedding_size else 0  # of the convolutions
    last = first + len(widths)
    x = embedding[obs.grid[..., 0]] + embedding[NUM_TILES + obs.grid[..., 1]]  # [V, V, F]
    for i, channels in enumerate(widths, first):
        kernel = params[f"Dense_{i}"]["kernel"].reshape(2, 2, x.shape[-1], channels)
        conv_params = {"kernel": kernel, "bias": params[f"Dense_{i}"]["bias"]}
        conv = nn.Conv(channels, (2, 2), padding="VALID")
        x = nn.relu(conv.apply({"params": conv_params}, x[None])[0])
    direction = np.eye(4)[obs.direction]
    prev_action = np.eye(6)[obs.prev_action] * (obs.prev_action >= 0)
    x = jnp.concatenate([x.reshape(-1), direction, prev_action, obs.prev_reward[None]])
    expected_hidden = []
    for i in range(num_layers):
        cell_params = cell_params_of(params[f"GRU_{i}"])
        x, _ = nn.GRUCell(8).apply(cell_params, hidden[8 * i : 8 * i + 8], x)
        expected_hidden.append(x)
    actor = nn.tanh(nn.Dense(4).apply(layer(last), np.sum(expected_hidden, axis=0)))
    critic = nn.tanh(nn.Dense(4).apply(layer(last + 1), np.sum(expected_hidden, axis=0)))
    expected_logits = jax.nn.log_softmax(nn.Dense(6).apply(layer(last + 2), actor))
    expected_value = nn.Dense(1).apply(layer(last + 3), critic)[0]

    policy, value, after = apply_once(network, {"params": params}, obs, hidden)
    np.testing.assert_allclose(jax.nn.log_softmax(policy.logits), expected_logits, atol=1e-5)
    np.testing.assert_allclose(value, expected_value, atol=1e-5)
    np.testing.assert_allclose(after, np.concatenate(expected_hidden), atol=1e-5)


def test_many_sequences_are_as_one_at_a_time(rnn):
    """Any axes between the steps and the features."""
    sizes = {"hidden_size": 8, "conv_size": 2, "embedding_size": 4, "head_size": 4}
    steps, axes = 4, (2, 3)
    obs = random_observations(rnn, (steps, *axes))
    network, params = initial_params(rnn, tiny(rnn, **sizes), random_observations(rnn, ()))
    hidden = jax.random.normal(jax.random.key(1), (*axes, 8))
    reset = jax.random.bernoulli(jax.random.key(2), 0.3, (steps, *axes))

    def outputs(*sequence):
        policy, value, hidden = network.apply({"params": perturb(params)}, *sequence)
        return policy.logits, value, hidden

    together = jax.jit(outputs)(obs, hidden, reset)
    assert [x.shape for x in together] == [(steps, *axes, *end) for end in [(6,), (), (8,)]]
    one_by_one = jax.vmap(jax.vmap(outputs, (1, 0, 1), 1), (1, 0, 1), 1)
    close = lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5)
    jax.tree.map(close, together, jax.jit(one_by_one)(obs, hidden, reset))


@pytest.mark.parametrize("memory", [True, False])
def test_sequence_is_the_same_as_step_by_step(rnn, memory):
    steps = 6
    sizes = {"hidden_size": 8, "conv_size": 2, "embedding_size": 4, "head_size": 4}
    config = tiny(rnn, memory=memory, **sizes)
    obs = random_observations(rnn, (steps,))
    at = lambda t: jax.tree.map(lambda x: x[t], obs)
    network, params = initial_params(rnn, config, at(0))
    apply = jax.jit(network.apply)
    one_step = jax.jit(partial(apply_once, network))
    first_hidden = jax.random.normal(jax.random.key(4), (8,))
    for resets in ([], [0], [2, 3]):
        reset = jnp.zeros(steps, bool).at[jnp.array(resets, int)].set(True)
        policy, value, hiddens = apply({"params": params}, obs, first_hidden, reset)
        assert value.shape == (steps,) and hiddens.shape == (steps, 8)
        hidden = first_hidden
        for t in range(steps):
            forgets = reset[t] or not memory
            cleared = jnp.zeros(8) if forgets else hidden
            for given in (hidden, cleared):  # a reset is a hidden state of zeros
                now, now_value, after = one_step({"params": params}, at(t), given, reset[t])
                np.testing.assert_allclose(now.logits, policy.logits[t], atol=1e-5)
                np.testing.assert_allclose(now_value, value[t], atol=1e-5)
                np.testing.assert_allclose(after, hiddens[t], atol=1e-5)
            hidden = after
        # A reset hides everything before it.
        other = apply({"params": params}, obs, jnp.ones(8), reset)[1]
        from_start = 0 if not memory else resets[0] if resets else steps
        np.testing.assert_allclose(other[from_start:], value[from_start:], atol=1e-6)
        if from_start:
            assert (np.abs(other[:from_start] - value[:from_start]) > 1e-4).any()
