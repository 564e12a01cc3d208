"""The drifts of ppo_drift.py, against NumPy; the rest of the script is that of ppo_ff.py."""

import csv
import dataclasses
import math
import types

import distrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import load_script, tiny

module = load_script("ppo_drift")
DRIFTS = module.Config.__dataclass_fields__["drift"].type.__args__
RATIO, ADVANTAGE = (x.ravel() for x in np.meshgrid(np.linspace(0.3, 3, 28), np.linspace(-3, 3, 13)))


# ---------------------------------------- formulas
def clip(r, a):
    return r * a - min(r * a, min(max(r, 0.8), 1.2) * a)


def dpo(r, a):
    if a >= 0:
        return max(0, (r - 1) * a - 2 * math.tanh((r - 1) * a / 2))
    return max(0, math.log(r) * a - 0.6 * math.tanh(math.log(r) * a / 0.6))


def spo(r, a):
    return abs(a) / (2 * 0.2) * (r - 1) ** 2


@pytest.mark.parametrize(
    ("drift", "expected"),
    [
        (lambda r, a: module.clip_drift(r, a, 0.2), clip),
        (module.dpo_drift, dpo),
        (lambda r, a: module.spo_drift(r, a, 0.2), spo),
    ],
    ids=["clip", "dpo", "spo"],
)
def test_a_drift_is_its_formula_and_flat_at_one(drift, expected):
    values = [expected(r, a) for r, a in zip(RATIO, ADVANTAGE, strict=True)]
    assert max(values) > 0.1
    np.testing.assert_allclose(drift(jnp.array(RATIO), jnp.array(ADVANTAGE)), values, atol=2e-6)
    slope = jax.vmap(jax.grad(drift))(jnp.ones(7), jnp.linspace(-3.0, 3.0, 7))
    np.testing.assert_allclose(slope, np.zeros(7), atol=1e-6)


def loss_and_logits(drift, kl_coef=3.0):
    """Loss of a batch whose policy has moved; its old and new logits and everything else."""
    rng = np.random.default_rng(0)
    old, new = rng.normal(0, 1, (2, 32, 4))
    action = rng.integers(0, 4, 32)
    log_prob = np.log(softmax(old)[np.arange(32), action])
    fields = dict.fromkeys(module.Transition._fields)
    fields |= {"obs": jnp.float32(new), "logits": jnp.float32(old), "action": jnp.array(action)}
    batch = module.Transition(**{**fields, "log_prob": jnp.float32(log_prob)})
    network = types.SimpleNamespace(apply=lambda _, obs: (distrax.Categorical(obs), jnp.zeros(32)))
    config = tiny(module, drift=drift, vf_coef=0.0)
    advantage, target = jnp.float32(rng.normal(0, 1, 32)), jnp.zeros(32)
    coefs = (0.0, jnp.float32(kl_coef))
    loss, metrics = module.ppo_loss(None, network, batch, advantage, target, *coefs, config)
    return loss, metrics, old, new, action, np.array(advantage)


def softmax(logits):
    weights = np.exp(logits)
    return weights / weights.sum(-1, keepdims=True)


@pytest.mark.parametrize("drift", DRIFTS)
def test_the_loss_is_the_surrogate_minus_its_drift(drift):
    loss, metrics, old, new, action, advantage = loss_and_logits(drift)
    old, new, rows = softmax(old), softmax(new), np.arange(32)
    ratio = (new / old)[rows, action]
    kl = (old * np.log(old / new)).sum(-1)
    by_name = {"clip": clip, "dpo": dpo, "spo": spo}
    penalty = 3.0 * kl
    if drift in by_name:
        penalty = np.array([by_name[drift](r, a) for r, a in zip(ratio, advantage, strict=True)])
    assert loss == pytest.approx(-(ratio * advantage - penalty).mean(), rel=1e-4)
    assert metrics["policy/kl"] == pytest.approx(kl.mean(), rel=1e-4)
    assert metrics["policy/kl_coef"] == 3


@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_dpo_is_finite_where_the_ratio_underflows(advantage):
    drift = jax.value_and_grad(lambda x: module.dpo_drift(jnp.exp(x), jnp.float32(advantage)))
    assert np.isfinite(drift(jnp.float32(-200.0))).all()


@pytest.mark.parametrize(
    ("kl", "factor"), [(0.0066, 0.5), (0.0067, 1), (0.01, 1), (0.0149, 1), (0.0151, 2)]
)
def test_the_coefficient_keeps_the_kl_near_its_target(kl, factor):
    assert module.adapt_kl_coef(jnp.float32(3), jnp.float32(kl), 0.01) == 3 * factor


def test_the_coefficient_recovers_from_updates_without_change():
    coef = jnp.float32(1)
    for _ in range(200):
        coef = module.adapt_kl_coef(coef, 0.0, 0.01)
    assert module.adapt_kl_coef(coef, 1.0, 0.01) == 2 * coef > 0


# ---------------------------------------- training
def train(drift, module=module):
    """State, and metrics of the updates of one seed on one device."""
    options = {"drift": drift, "adaptive_kl_target": 1e-3} if drift else {}
    init, train, *_ = module.make_train(tiny(module, num_evals=1, lr=1e-2, **options))
    keys = jax.random.split(jax.random.PRNGKey(0), jax.local_device_count())
    state, metrics = train(init(keys))
    return state, {name: np.array(x)[0, 0] for name, x in metrics.items()}


@pytest.fixture(scope="module")
def trained():
    return {drift: train(drift) for drift in DRIFTS}


def test_clip_trains_what_ppo_ff_trains(trained):
    expected, _ = train(None, load_script("ppo_ff"))
    state, _ = trained["clip"]
    check = lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5)
    jax.tree.map(check, state.params, expected.params)


def test_every_drift_trains_in_its_own_way(trained):
    ends = []
    for state, metrics in trained.values():
        assert all(np.isfinite(metrics[name]).all() for name in ("loss/policy", "policy/kl"))
        ends.append(np.concatenate([x.ravel() for x in jax.tree.leaves(state.params)]))
    assert len({end.tobytes() for end in ends}) == len(DRIFTS)


def test_the_adaptive_coefficient_follows_the_kl_of_each_update(trained):
    _, metrics = trained["adaptive_kl"]
    coef, kl = metrics["policy/kl_coef"], metrics["policy/kl"]
    factor = np.where(kl < 1e-3 / 1.5, 0.5, np.where(kl > 1.5e-3, 2, 1))
    np.testing.assert_array_equal(coef[1:], (coef * factor)[:-1])
    assert coef[0] == 1 and len(set(coef)) > 2


def test_the_penalty_keeps_the_coefficient_of_the_options(trained):
    _, metrics = trained["kl_penalty"]
    assert set(metrics["policy/kl_coef"]) == {1}


def test_the_penalty_takes_a_new_coefficient_when_a_run_is_continued(tmp_path):
    config = tiny(module, drift="kl_penalty", num_evals=2, run_dir=str(tmp_path / "run"))
    module.main(config)
    module.main(dataclasses.replace(config, total_timesteps=256, num_evals=4, kl_coef=3.0))
    rows = list(csv.DictReader(open(tmp_path / "run" / "metrics.csv")))
    assert [float(row["policy/kl_coef"]) for row in rows] == [1.0] * 8 + [3.0] * 8


class Killed(BaseException):
    pass


def test_a_killed_run_keeps_its_coefficient(tmp_path, monkeypatch):
    options = {"drift": "adaptive_kl", "num_evals": 4, "adaptive_kl_target": 1e-3}
    config = lambda name: tiny(module, run_dir=str(tmp_path / name), **options)
    module.main(config("whole"))
    write, written = module.write, []

    def killed(path, content):
        written.append(path.name)
        if written.count("checkpoint.msgpack") == 3:  # rows are there, the checkpoint is not
            raise Killed
        write(path, content)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(module, "write", killed)
        module.main(config("cut"))
    module.main(config("cut"))
    whole, cut = (tmp_path / name / "checkpoint.msgpack" for name in ("whole", "cut"))
    assert whole.read_bytes() == cut.read_bytes()
    whole, cut = (list(csv.DictReader(open(x.with_name("metrics.csv")))) for x in (whole, cut))
    assert len({row["policy/kl_coef"] for row in whole}) > 2
    for row in (*whole, *cut):
        del row["time/sps"]
    assert whole == cut
