"""Trials, tasks and memory of ppo_meta.py, and the tasks of benchmarks/make_rulesets.py."""

import bz2
import csv
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xminigrid
from conftest import ROOT, load_script, tiny
from probes import apply_once
from test_cli import compiling_once, flags, learned, run, run_killed

import enjoy
import plot

sys.path.insert(0, str(ROOT / "benchmarks"))
import make_rulesets  # noqa: E402

module = load_script("ppo_meta")
KEYS = jax.random.split(jax.random.PRNGKey(0), jax.local_device_count())
SHORT = {"env_params": '{"max_steps": 5}', "trial_episodes": 3}
PROGRAMS = {}
WORDS = flags(tiny(module, **SHORT, trial_steps=7, num_seeds=2, num_evals=4))


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Twelve tasks, of six cells."""
    path = tmp_path_factory.mktemp("tasks") / "places.bz2"
    tasks = jax.tree.map(lambda x: x[:330:27][:12], make_rulesets.make_rulesets(9))
    make_rulesets.save_bz2_pickle(tasks, str(path))
    return str(path)


# ---------------------------------------- trials
def random_steps(config, num_steps=60, num_envs=16):
    """Random play [T, N]: what `step` reads and what it returns."""
    reset, step, num_actions = module.make_env(config)

    def play(carry, key):
        obs, env_state = carry
        action_key, step_key = jax.random.split(key)
        action = jax.random.randint(action_key, (num_envs,), 0, num_actions)
        next_obs, after, reward, done = jax.vmap(step)(
            jax.random.split(step_key, num_envs), env_state, action
        )
        return (next_obs, after), (obs, env_state, action, next_obs, after, reward, done)

    @jax.jit
    def run():
        first = jax.vmap(reset)(jax.random.split(jax.random.PRNGKey(1), num_envs))
        return jax.lax.scan(play, first, jax.random.split(jax.random.PRNGKey(2), num_steps))[1]

    return jax.tree.map(np.array, run())


@pytest.mark.parametrize("kind", ["layouts", "rulesets"])
def test_a_trial_is_so_many_episodes_of_one_task(kind, places):
    options = {"env_id": "MiniGrid-EmptyRandom-8x8"}
    if kind == "rulesets":
        options = {"env_id": "XLand-MiniGrid-R1-9x9", "benchmark_id": places}
        options["reset_memory"] = True
    obs, before, action, next_obs, after, reward, done = random_steps(
        tiny(module, **options, **SHORT)
    )
    state = before.timestep.state
    ended = (state.step_num + 1 >= 5) | (reward > 0)
    episode = np.zeros(16, int)
    for t in range(60):  # the rules, replayed
        np.testing.assert_array_equal(before.episode[t], episode)
        episode = episode + ended[t]
        np.testing.assert_array_equal(done[t], episode == 3)
        episode[episode == 3] = 0
    assert done.any() and (ended & ~done).any()

    same_task = after.task == before.task
    assert same_task[~done].all() and not same_task[done].all()
    assert kind == "rulesets" or not same_task[done].any()  # there are 65536 layouts
    np.testing.assert_array_equal(next_obs.new_episode, ended & ~done)
    forget = ended if kind == "rulesets" else done  # by reset_memory
    np.testing.assert_array_equal(next_obs.prev_action, np.where(forget, -1, action))
    np.testing.assert_allclose(next_obs.prev_reward, np.where(forget, 0, reward), rtol=1e-6)
    np.testing.assert_array_equal(after.timestep.state.step_num == 0, ended)

    # At every start of an episode: the layout or the goal, by task.
    grid, goal = after.timestep.state.grid, after.timestep.state.goal_encoding
    starts = {}
    for t, n in np.argwhere(ended):
        seen = starts.setdefault(after.task[t, n], (set(), set()))
        seen[0].add(grid[t, n].tobytes() + after.timestep.state.agent.position[t, n].tobytes())
        seen[1].add(goal[t, n].tobytes())
    assert {len(goals) for _, goals in starts.values()} == {1}
    layouts = [len(layouts) for layouts, _ in starts.values()]
    assert set(layouts) == {1} if kind == "layouts" else max(layouts) > 1
    assert len({goals.copy().pop() for _, goals in starts.values()}) > 1 or kind == "layouts"


def test_training_and_evaluation_never_share_a_task(places):
    options = {"env_id": "XLand-MiniGrid-R1-9x9", "benchmark_id": places, "eval_fraction": 0.25}
    reset, step, _ = module.make_env(tiny(module, **options, **SHORT))
    keys = jax.random.split(jax.random.PRNGKey(0), 512)
    tasks = lambda is_test: jax.jit(jax.vmap(lambda key: reset(key, is_test)[1].task))(keys)
    train, test = (set(np.array(tasks(x)).tolist()) for x in (False, True))
    assert train | test == set(range(12)) and not train & test and len(test) == 3
    # And after a trial of a test task, training tasks follow.
    *_, after, _, done = random_steps(tiny(module, **options, **SHORT), num_steps=100)
    assert set(after.task[done].tolist()) <= train


def test_a_trial_of_so_many_steps(places):
    """Seven steps, in which episodes end after at most five; test trials keep to their episodes."""
    options = {"env_id": "XLand-MiniGrid-R1-9x9", "benchmark_id": places, "trial_steps": 7}
    config = tiny(module, **options, **SHORT)
    _, before, action, next_obs, after, reward, done = random_steps(config)
    ended = (before.timestep.state.step_num + 1 >= 5) | (reward > 0)
    np.testing.assert_array_equal(before.step, np.tile((np.arange(60) % 7)[:, None], 16))
    np.testing.assert_array_equal(done, before.step == 6)
    assert (ended & ~done).any() and (done & ~ended).any()
    same_task = after.task == before.task
    assert same_task[~done].all() and not same_task[done].all()
    np.testing.assert_array_equal(after.timestep.state.step_num == 0, ended | done)
    np.testing.assert_array_equal(next_obs.new_episode, ended & ~done)
    np.testing.assert_array_equal(next_obs.prev_action, np.where(done, -1, action))

    reset, step, _ = module.make_env(config)
    step = jax.jit(step)
    _, env_state = reset(jax.random.PRNGKey(0), is_test=True)
    lengths, done = [0], False
    while not done:
        _, env_state, reward, done = step(jax.random.PRNGKey(0), env_state, 1)  # turns on the spot
        lengths[-1] += 1
        if lengths[-1] == 5 or reward > 0:
            lengths.append(0)
    assert len(lengths) == 4 and sum(lengths) > 7


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eval_fraction": 1.0}, "eval_fraction holds out 65536 of 65536 tasks"),
        ({"eval_fraction": 1e-9}, "eval_fraction holds out 0 of 65536 tasks"),
        ({"benchmark_id": "nothing"}, "XLand-MiniGrid"),
        ({"benchmark_id": "nothing", "env_id": "XLand-MiniGrid-R1-9x9"}, "nothing.*trivial-21k"),
        ({"env_id": "XLand-MiniGrid-R1-9x9"}, "benchmark_id = ''.*trivial-21k"),
    ],
    ids=str,
)
def test_a_wrong_input_says_what_to_change(options, message):
    with pytest.raises(module.ConfigError, match=message):
        module.make_env(tiny(module, **options))


@pytest.mark.parametrize("content", [b"", b"not compressed", bz2.compress(b"not pickled")])
def test_a_corrupt_benchmark_is_a_wrong_input(content, tmp_path):
    path = tmp_path / "tasks.bz2"
    path.write_bytes(content)
    with pytest.raises(module.ConfigError, match="benchmark_id"):
        module.make_env(
            tiny(module, env_id="XLand-MiniGrid-R1-9x9", benchmark_id=str(path), **SHORT)
        )


# ---------------------------------------- memory
@pytest.mark.parametrize(
    ("options", "remembers"),
    [({}, True), ({"reset_memory": True}, False), ({"memory": False}, False)],
    ids=str,
)
def test_memory_lasts_for_a_trial_but_for_the_controls(options, remembers):
    """The hidden state at the start of an inner episode, after two different pasts."""
    config = tiny(module, **options)
    network = module.ActorCritic(6, config)
    steps = jnp.arange(3)
    obs = module.Observation(
        jnp.ones((3, 5, 5, 2), jnp.uint8), steps, steps, jnp.float32(steps), steps == 2
    )
    hidden, never = jnp.zeros(config.hidden_size), jnp.zeros(3, bool)
    params = network.init(jax.random.PRNGKey(0), obs, hidden, never)
    other = obs._replace(direction=obs.direction.at[0].set(3))
    last = lambda obs, reset: np.array(network.apply(params, obs, hidden, reset)[2][-1])
    assert (last(obs, never) != last(other, never)).any() == remembers
    at_trial_end = never.at[2].set(True)
    np.testing.assert_array_equal(last(obs, at_trial_end), last(other, at_trial_end))


@pytest.mark.parametrize("options", [{}, {"reset_memory": True}], ids=str)
def test_the_update_replays_the_memory_of_the_rollout(options, monkeypatch):
    """Before the first gradient step all ratios are one, in trials that end within rollouts."""
    one_step = {"update_epochs": 1, "num_minibatches": 1, "trial_episodes": 5}
    make_env = make_probe(lambda kind, action: action == kind, 2)
    _, _, metrics = learn(monkeypatch, make_env, 4, **one_step, **options)
    assert (metrics["episode/count"] > 0).all()
    np.testing.assert_allclose(metrics["policy/approx_kl"], 0, atol=1e-6)
    np.testing.assert_array_equal(metrics["policy/clip_fraction"], 0)


# ---------------------------------------- probes
def make_probe(reward_of, num_kinds):
    """Trials of one-step episodes, with a hidden kind; the observation shows the episode."""

    def make_env(config):
        def observe(episode, action, reward, new_episode):
            grid = jnp.full((4, 4, 2), episode, jnp.uint8)
            return module.Observation(grid, jnp.int32(0), action, reward, new_episode)

        def reset(key, is_test=False):
            kind = jax.random.randint(key, (), 0, num_kinds)
            obs = observe(0, jnp.int32(-1), jnp.float32(0), jnp.bool(False))
            zero = jnp.int32(0)
            return obs, module.EnvState(zero, kind, zero, zero, jnp.bool(is_test))

        def step(key, env_state, action):
            reward = jnp.float32(reward_of(env_state.task, action))
            episode = env_state.episode + 1
            done = episode == config.trial_episodes
            after = observe(episode, action, reward, jnp.bool(True))
            after = after, env_state._replace(episode=episode)
            obs, env_state = jax.tree.map(lambda x, y: jnp.where(done, x, y), reset(key), after)
            return obs, env_state, reward, done

        return reset, step, 2

    return make_env


def learn(monkeypatch, make_env, updates, **options):
    monkeypatch.setattr(module, "make_env", make_env)
    sizes = {"num_envs": 32, "num_steps": 16, "head_size": 16, "hidden_size": 16, "num_evals": 1}
    options = {**sizes, "lr": 1e-2, "num_minibatches": 2, "eval_episodes": 64, **options}
    config = tiny(module, total_timesteps=32 * 16 * updates, **options)
    init, train, *_ = module.make_train(config)
    state, metrics = train(init(KEYS))
    return config, state, {name: np.array(x)[0, 0] for name, x in metrics.items()}


def test_return_crosses_episodes_and_stops_at_the_trials_end(monkeypatch):
    """Every step pays 1: the value k episodes before the end is 1 + gamma + ... (k terms)."""
    make_env = make_probe(lambda kind, action: 1.0, 1)
    options = {"trial_episodes": 3, "gamma": 0.8, "gae_lambda": 0.5, "vf_coef": 2.0}
    config, state, metrics = learn(monkeypatch, make_env, 200, **options)
    params = jax.tree.map(lambda x: x[0, 0], state.params)
    reset, step, _ = make_env(config)
    obs, env_state = reset(jax.random.PRNGKey(0))
    hidden, values = jnp.zeros(config.hidden_size), []
    for _ in range(3):
        network = module.ActorCritic(2, config)
        _, value, hidden = apply_once(network, params, obs, hidden)
        values.append(float(value))
        obs, env_state, *_ = step(jax.random.PRNGKey(0), env_state, jnp.int32(0))
    np.testing.assert_allclose(values, [1 + 0.8 + 0.64, 1 + 0.8, 1], rtol=0.05)
    for name in ("eval/return", "eval/return/episode_1", "eval/return/episode_3"):
        assert metrics[name][-1] == 1 and np.isnan(metrics[name][:-1]).all()
    assert metrics["eval/length"][-1] == 1
    np.testing.assert_allclose(metrics["episode/return"], 1, rtol=1e-6)
    np.testing.assert_allclose(metrics["episode/length"], 1, rtol=1e-6)
    assert metrics["episode/count"].sum() == 32 * (200 * 16 // 3) * 3  # of whole trials


def test_a_bandit_is_solved_from_the_second_episode_on(monkeypatch):
    """Two arms, one of them pays throughout the trial; nothing shows which."""
    make_env = make_probe(lambda kind, action: action == kind, 2)
    sizes = {"trial_episodes": 4, "eval_episodes": 2048, "ent_coef": 0.0}
    _, _, metrics = learn(monkeypatch, make_env, 120, **sizes)
    returns = np.array([metrics[f"eval/return/episode_{k}"][-1] for k in (1, 2, 3, 4)])
    assert returns.mean() == pytest.approx(metrics["eval/return"][-1], rel=1e-5)
    assert abs(returns[0] - 0.5) < 0.1 and returns[1:].min() >= 0.95


def test_only_evaluation_plays_test_tasks(monkeypatch):
    def make_env(config):
        reset, step, num_actions = make_probe(lambda kind, action: kind == 2, 1)(config)

        def marked_reset(key, is_test=False):
            obs, env_state = reset(key, is_test)
            return obs, env_state._replace(task=jnp.int32(2 * is_test))

        return marked_reset, step, num_actions

    _, _, metrics = learn(monkeypatch, make_env, 2)
    assert metrics["eval/return"][-1] == 1 and (metrics["episode/return"] == 0).all()


# ------------------------------------------ runs
@pytest.fixture(scope="module")
def meta_run(tmp_path_factory):
    path = tmp_path_factory.mktemp("meta") / "run"
    with compiling_once(module, PROGRAMS):
        code, _, err = run(module, *WORDS, "--run-dir", path)
    assert code == 0, err
    return path


@compiling_once(module, PROGRAMS)
def test_a_killed_run_continues_to_the_same_bits(meta_run, tmp_path):
    run_killed(module, [*WORDS, "--run-dir", tmp_path / "cut"], "append_rows", 3)
    code, _, err = run(module, "--run-dir", tmp_path / "cut")
    assert code == 0, err
    assert learned(tmp_path / "cut") == learned(meta_run)
    with open(meta_run / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert "eval/return/episode_3" in rows[0]
    rows = [row for row in rows if row["episode/length"]]
    steps = [float(row["episode/length"]) * float(row["episode/count"]) for row in rows]
    trials = np.array(steps) / 7
    assert rows and trials == pytest.approx(trials.round(), abs=1e-3)


# -------------------------------------- rulesets
def test_one_cell_pays_whatever_the_colors():
    tasks = make_rulesets.make_rulesets(5)  # 9 cells
    env, params = xminigrid.make("XLand-MiniGrid-R1-9x9")
    params = params.replace(height=5, width=5)
    cells = jnp.stack(jnp.meshgrid(*[jnp.arange(1, 4)] * 2, indexing="ij"), -1).reshape(9, 2)

    @jax.jit
    @jax.vmap
    def rewards(goal, rules, init_tiles):
        """For turning on each cell; and the number of colored tiles."""
        ruleset = xminigrid.types.RuleSet(goal, rules, init_tiles)
        timestep = env.reset(params.replace(ruleset=ruleset), jax.random.PRNGKey(0))
        turn = lambda cell: env.step(params, put(timestep, cell), 1).reward
        put = lambda timestep, cell: timestep.replace(
            state=timestep.state.replace(agent=timestep.state.agent.replace(position=cell))
        )
        tile, color = timestep.state.grid[..., 0], timestep.state.grid[..., 1]
        colored = (tile == xminigrid.core.constants.Tiles.FLOOR) & jnp.isin(
            color, jnp.array(make_rulesets.COLORS)
        )
        return jax.vmap(turn)(cells), colored.sum()

    paid, colored = rewards(tasks["goals"], tasks["rules"], tasks["init_tiles"])
    assert paid.shape == (495, 9) and (colored == 2).all()
    assert ((paid > 0).sum(axis=1) == 1).all()
    np.testing.assert_array_equal(np.bincount(paid.argmax(axis=1)), [55] * 9)
    colors = np.sort(tasks["init_tiles"][..., 1], axis=1)  # the order of the tiles does not show
    assert len(np.unique(np.hstack([tasks["goals"], colors]), axis=0)) == 495


# ----------------------------------------- tools
def test_a_recording_holds_a_whole_trial(meta_run):
    loaded, config, params = enjoy.load_run(meta_run, "best", 1)
    steps = enjoy.record(loaded, config, params, jax.random.PRNGKey(0))
    viewer = enjoy.make_viewer(config)
    labels = [viewer.label(step.env_state).strip() for step in steps]
    assert list(dict.fromkeys(labels)) == [f"trial episode {k}/3" for k in (1, 2, 3)]
    assert len({int(step.env_state.task) for step in steps}) == 1
    total = enjoy.get_episode(loaded, config)(params, jax.random.PRNGKey(0))
    assert total == pytest.approx(sum(step.reward for step in steps), rel=1e-5)
    assert viewer.draw(steps[0].env_state).ndim == 3


def test_the_plot_of_a_run_shows_the_episodes_of_a_trial(meta_run, tmp_path):
    plot.main([str(meta_run), "--out", str(tmp_path / "trial.png")])
    assert (tmp_path / "trial.png").stat().st_size > 10_000
    episodes = plot.read_trial(meta_run)
    assert len(episodes) == 3 and episodes[0].values.shape[1] == 2
    figure = plot.draw_trial(episodes, "task")
    left, right = figure.axes
    assert [x.get_label() for x in left.lines] == ["episode 1 of 3", "episode 3 of 3"]
    assert right.lines[0].get_xdata().tolist() == [1, 2, 3]
