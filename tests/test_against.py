"""enjoy.py --against: two runs on the two sides of an environment."""

import contextlib
import io
import itertools
import json
import sys
import types

import flax.serialization
import jax
import numpy as np
import pytest
from conftest import ROOT

import enjoy

STATE = """class State(flax.struct.PyTreeNode):
    distance: Any
    step: Any

    def __getitem__(self, name):
        return getattr(self, name)


class Rings:
"""
# rings with two sides, one in the midst of the other, with a scalar, and with a state of a class of
# its own, which is another class in every run.
OPPONENTS = {
    '("ring_3", "ring_4", "ring_5")': '("ring_3", "goal_1", "ring_5")',
    "next_obs, *info\n": 'next_obs, {"paid": (reward * active).sum()}\n',
    "class Rings:\n": STATE,
    '{"distance": distance, "step": jnp.int32(0)}': "State(distance, jnp.int32(0))",
    '{"distance": distance, "step": state["step"] + 1}': (
        "state.replace(distance=distance, step=state.step + 1)"
    ),
}
SIDES = {"ring": [0, 2], "goal": [1]}


def make_run(run_dir, script, changes=None, seed=0, **options):
    """The folder of a run with random parameters instead of trained ones."""
    text = (ROOT / f"{script}.py").read_text()
    for old, new in (changes or {}).items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    run_dir.mkdir()
    (run_dir / f"{script}.py").write_text(text)
    module = enjoy.load_source(run_dir, script)
    config = module.Config(**{"hidden_size": 4, **options})
    init, *_ = module.make_train(config)
    keys = jax.random.split(jax.random.PRNGKey(0), jax.local_device_count())
    shapes, rng = jax.eval_shape(init, keys).params, np.random.default_rng(seed)
    draw = lambda: jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), shapes)
    content = {"best_params": draw(), "params": draw()}
    (run_dir / "checkpoint.msgpack").write_bytes(flax.serialization.to_bytes(content))
    (run_dir / "config.json").write_text(json.dumps({"script": script, **vars(config)}))
    return run_dir


# ---------------------------------------- episodes
RUNS = {
    "ippo": ("ippo", {}),
    "ippo each": ("ippo", {"share_parameters": False}),
    "ippo_rnn each": ("ippo_rnn", {"share_parameters": False, "cell": "lstm"}),
    "mappo": ("mappo", {"hidden_size": 5}),
}


@pytest.mark.parametrize("pair", [("mappo", "ippo each"), ("ippo_rnn each", "ippo")])
def test_each_agent_is_played_by_its_own_run(pair, tmp_path):
    """Nothing that one agent does on its ring matters to others.

    So each has the return that it has in an evaluation of its run from the same key. The rest
    follows from the returns: a step before the goal costs 0.2, the goal pays 1.
    """
    loaded = []
    for seed, name in enumerate(pair):
        script, options = RUNS[name]
        options = {"num_seeds": 2, "seed": seed, **options}
        loaded.append(enjoy.load_run(make_run(tmp_path / name, script, OPPONENTS, **options)))
    runs, params = [run[:2] for run in loaded], [run[2] for run in loaded]
    keys = jax.random.split(jax.random.PRNGKey(0), (2, 32))
    alone = [enjoy.play(*run, keys).returns for run in loaded]  # [2, 32, 3]
    assert (alone[0] != alone[1]).mean((0, 1)).min() > 0.2
    played = enjoy.play_match(runs, params, SIDES, keys)
    for order, is_first in enumerate(([True, False, True], [False, True, False])):
        expected = np.where(is_first, *alone)
        np.testing.assert_array_equal(played.returns[order], expected)
        arrives = expected > -1.5
        steps = np.where(arrives, np.round((1 - expected) / 0.2) + 1, 8)
        length = steps.max(-1)
        np.testing.assert_array_equal(played.length[order], length)
        is_last = steps == length[..., None]
        paid = (is_last * np.where(arrives, 1.0, -0.2)).sum(-1)
        np.testing.assert_allclose(played.info["paid"][order], paid, atol=1e-6)
    assert len(np.unique(played.length)) > 4


def test_each_run_sees_what_the_other_does(tmp_path):
    """On rings that all agents see. Against a loop in Python, by the policies that others load."""
    own = "jax.nn.one_hot(distance, size)"
    all_see = {own: f'jnp.append({own}, state["distance"])', **OPPONENTS}
    options = {"eval_greedy": True, "share_parameters": False}
    folders = [
        make_run(tmp_path / "a", "ippo", all_see, eval_greedy=True),
        make_run(tmp_path / "b", "ippo_rnn", all_see, **options, seed=4),
    ]
    loaded = [enjoy.load_run(folder) for folder in folders]
    runs, params = [run[:2] for run in loaded], [run[2] for run in loaded]
    keys = jax.random.split(jax.random.PRNGKey(0), (1, 8))
    played = enjoy.play_match(runs, params, SIDES, keys)
    acts = [enjoy.load_policy(folder) for folder in folders]
    envs = [module.make_env(config) for module, config in runs]
    resets, steps = [jax.jit(env[0]) for env in envs], [jax.jit(env[1]) for env in envs]
    for order, episode in itertools.product(range(2), range(8)):
        key, reset_key = jax.random.split(keys[0, episode])
        obs, states = zip(*(reset(reset_key) for reset in resets), strict=True)
        first, over, total = True, np.zeros(3, bool), 0.0
        while not over.all():
            key, _, step_key = jax.random.split(key, 3)
            actions = [act(x, first=first) for act, x in zip(acts, obs, strict=True)]
            rings, goal = actions if order == 0 else actions[::-1]
            action = np.array([rings[0], goal[1], rings[2]])
            outcomes = [step(step_key, x, action) for step, x in zip(steps, states, strict=True)]
            obs, states, rewards, terminated, truncated, _, _ = zip(*outcomes, strict=True)
            over = over | terminated[0] | truncated[0]
            total, first = total + rewards[0], False
        np.testing.assert_allclose(played.returns[order, 0, episode], total, rtol=1e-6)
    alone = enjoy.play(*loaded[1], keys).returns
    assert (played.returns[0, ..., 1] != alone[..., 1]).any()  # it matters whom one meets


# ------------------------------------------- sides
@pytest.mark.parametrize(
    "names, sides",
    [
        (["adversary_0", "adversary_1", "agent_0"], {"adversary": [0, 1], "agent": [2]}),
        (["ally_0", "enemy_0", "ally_10", "enemy_1"], {"ally": [0, 2], "enemy": [1, 3]}),
        (["speaker_0", "listener_0"], {"speaker": [0], "listener": [1]}),
        (["agent_0", "agent_1"], {"agent_0": [0], "agent_1": [1]}),
        ([0, 1], {"0": [0], "1": [1]}),
        (["0", "1"], {"0": [0], "1": [1]}),
    ],
)
def test_the_sides_are_kinds_of_agents_or_two_agents(names, sides):
    assert enjoy.find_sides(tuple(names)) == sides


@pytest.mark.parametrize(
    "names", [["agent_0"], ["ring_3", "ring_4", "ring_5"], ["eve_0", "bob_0", "alice_0"]]
)
def test_there_are_two_sides_or_it_is_an_error(names):
    with pytest.raises(enjoy.RunError, match=", ".join(names)):
        enjoy.find_sides(tuple(names))


# ---------------------------------------- reports
@pytest.fixture(scope="module")
def opponents(tmp_path_factory):
    """A run of two seeds, and one of three."""
    folder = tmp_path_factory.mktemp("opponents")
    return (
        make_run(folder / "a", "ippo", OPPONENTS, num_seeds=2),
        make_run(folder / "b", "mappo", OPPONENTS, num_seeds=3, seed=1, eval_greedy=True),
    )


@pytest.fixture
def calls(monkeypatch):
    """Instead of playing: what was to be played, and random returns of it."""
    seen = []

    def play_match(runs, params, sides, keys):
        rng = np.random.default_rng(0)
        draw = lambda *shape: rng.normal(size=(2, *keys.shape[:2], *shape))
        played = enjoy.Played(draw(3), draw(), {"paid": draw() > 0})
        seen.append((runs, params, keys, played))
        return played

    monkeypatch.setattr(enjoy, "play_match", play_match)
    return seen


def printed(opponents, *words):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        enjoy.main([str(opponents[0]), "--against", str(opponents[1]), *words])
    return out.getvalue()


def test_the_report_has_each_side_in_both_orders(opponents, calls):
    lines = printed(opponents, "--episodes", "5").splitlines()
    report = json.loads(printed(opponents, "--episodes", "5", "--json"))
    played = calls[0][-1]
    assert report["runs"] == {
        "A": {"run_dir": str(opponents[0]), "script": "ippo", "greedy": False},
        "B": {"run_dir": str(opponents[1]), "script": "mappo", "greedy": True},
    }
    for name, run_dir, line in zip("AB", opponents, lines[1:3], strict=True):
        assert line.startswith(f"{name} is {run_dir}: {report['runs'][name]['script']}, ")
    assert (report["env_id"], report["checkpoint"], report["episodes"]) == ("rings", "best", 5)
    assert len(report["matches"]) == 2
    at = 3
    for order, match in enumerate(report["matches"]):
        assert lines[at].split() == ["mean", "±", "95", "%", "median", "min", "max"]
        expected = {
            "ring": played.returns[order, ..., 0] + played.returns[order, ..., 2],
            "goal": played.returns[order, ..., 1],
        }
        for row, (side, x) in enumerate(expected.items(), at + 1):
            run, found = "AB"[(order + (side == "goal")) % 2], match["sides"][side]
            assert found.pop("run") == run and lines[row].startswith(f"{run} as {side} ")
            statistics = enjoy.summarize(x)
            assert found == {name: pytest.approx(value) for name, value in statistics.items()}
            assert f"{statistics['mean']:.4g}" in lines[row]
        assert match["length"] == enjoy.summarize(played.length[order])
        assert match["env"]["paid"]["mean"] == pytest.approx(played.info["paid"][order].mean())
        assert [line.split()[0] for line in lines[at + 3 : at + 5]] == ["length", "env/paid"]
        at += 5
    assert "over pairs" in lines[at] and len(lines) == at + 1


def same(actual, expected):
    """The leaves are: each loading of a run has classes of its own."""
    for x, y in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        np.testing.assert_array_equal(x, y)


def test_seeds_meet_in_pairs(opponents, calls):
    """The run with fewer seeds starts over; a pair alone plays the same episodes."""
    report = json.loads(printed(opponents, "--episodes", "5", "--json"))
    assert report["seeds"] == [[0, 0], [1, 1], [0, 2]]
    _, (of_a, of_b), keys, _ = calls[-1]
    (_, _, params_a), (_, _, params_b) = map(enjoy.load_run, opponents)
    same(of_a, jax.tree.map(lambda x: x[np.array([0, 1, 0])], params_a))
    same(of_b, params_b)
    assert keys.shape[:2] == (3, 5) and len(np.unique(keys.reshape(15, -1), axis=0)) == 15
    assert "over episodes" in printed(opponents, "--episodes", "5", "--seed-index", "2")
    _, params, key, _ = calls[-1]
    same(params, jax.tree.map(lambda x: x[2:], [of_a, of_b]))
    np.testing.assert_array_equal(key, keys[2:])


def test_options_are_for_both_runs(opponents, calls):
    """Without them, actions are chosen as in each run's own evaluation."""
    printed(opponents, "--seed", "1", "--checkpoint", "last")
    runs, params, keys, _ = calls[-1]
    same(params[1], enjoy.load_run(opponents[1], "last")[2])
    assert [config.eval_greedy for _, config in runs] == [False, True]
    printed(opponents, "--greedy")
    runs, _, other_keys, _ = calls[-1]
    assert [config.eval_greedy for _, config in runs] == [True, True]
    assert keys.shape[:2] == (3, 1280) and (keys != other_keys).any()
    printed(opponents, "--no-greedy")
    assert [config.eval_greedy for _, config in calls[-1][0]] == [False, False]


def test_what_an_environment_prints_stays_out_of_the_json(tmp_path, monkeypatch):
    """As JaxMARL's, which sets sys.stdout back when it is imported."""
    rings = "            return Rings(**params)\n"
    noise = f'            sys.stdout = sys.__stdout__\n            print("noise")\n{rings}'
    run = make_run(tmp_path / "run", "ippo")
    (run / "ippo.py").write_text((run / "ippo.py").read_text().replace(rings, noise))
    streams = {name: io.StringIO() for name in ("stdout", "__stdout__", "stderr")}
    for name, stream in streams.items():
        monkeypatch.setattr(sys, name, stream)
    enjoy.load_run(run)
    assert [streams[name].getvalue() for name in streams] == ["", "", "noise\n"]
    assert sys.stdout is streams["stdout"] and sys.__stdout__ is streams["__stdout__"]


def test_both_runs_play_one_environment():
    """Whatever the order of its parameters."""
    module = types.SimpleNamespace(
        SCRIPT="ippo", make_env=lambda config: (None, None, ("cat_0", "mouse_0"), False)
    )

    def find(*games):
        configs = [types.SimpleNamespace(env_id=x, env_params=y) for x, y in games]
        return enjoy.find_game(["runs/a", "runs/b"], [(module, x, None) for x in configs])

    game = ("chase", '{"size": 3, "walls": 4}')
    assert find(game, ("chase", '{"walls":4, "size":3}')) == {"cat": [0], "mouse": [1]}
    for other in (("chase", "{}"), ("tag", game[1])):
        with pytest.raises(enjoy.RunError, match=f"runs/a plays chase .*runs/b plays {other[0]} "):
            find(game, other)


def test_what_cannot_be_played(opponents, tmp_path):
    def fails(*words, names):
        with pytest.raises(enjoy.RunError) as error:
            enjoy.main([*map(str, words)])
        assert all(str(name) in str(error.value) for name in names)
        assert len(str(error.value).splitlines()) == 1

    a, b = opponents
    plain = make_run(tmp_path / "plain", "ippo")
    alone = make_run(tmp_path / "alone", "ppo_ff")
    fails(plain, "--against", plain, names=["ring_3, ring_4, ring_5"])
    fails(a, "--against", alone, names=[alone, "ppo_ff", "single"])
    fails(alone, "--against", a, names=[alone, "ppo_ff", "single"])
    fails(a, "--against", tmp_path / "none", names=[tmp_path / "none"])
    fails(a, "--against", b, "--video", "out.gif", names=["--video"])
    fails(a, "--against", b, "--seed-index", "3", names=["seed-index = 3", "3 pair"])
