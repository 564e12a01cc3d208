"""docs/results.md and docs/results are what benchmarks/results says; the statistics are right."""

import re
import sys
import types

import numpy as np
import pytest
import tyro
from conftest import ROOT, load_script, program, tiny
from scipy import stats

sys.path.append(str(ROOT / "benchmarks"))
import ablations
import learning
import report

ABLATIONS = learning.all_rows("", learning.ABLATIONS)
CHANGES = [row for row in ABLATIONS if row.system != row.kind]  # without the unchanged scripts
ROWS = [*learning.all_rows(""), *ABLATIONS]
ROWS = [row for row in ROWS if (learning.RESULTS / f"{row.name}.csv").exists()]
RESULTS, RATES = report.read_results()
TASKS = [task for tasks in learning.SECTIONS.values() for task in tasks]
CSV = """# command: python ppo_ff.py
# commit: 0123456
# returns: evaluations on full fresh episodes
seed,env_steps,return
0,100,1
1,100,2
0,200,5
1,200,4
2,100,0
2,200,3
"""


@pytest.fixture(scope="module")
def pages():
    return report.report()


def test_the_report_is_that_of_the_files(pages):
    for path, text in pages.items():
        assert (ROOT / "docs" / path).read_text() == text, path
    written = {f"results/{path.name}" for path in (ROOT / "docs" / "results").glob("*.md")}
    assert written - {"results/CONTRIBUTING.md"} == {*pages} - {"results.md"}


def test_the_pictures_are_those_that_the_pages_show(pages):
    shown = set()
    for text in pages.values():
        shown |= {name.split("/")[-1] for name in re.findall(r"!\[[^]]*\]\(([^)]*)\)", text)}
    assert {path.name for path in (ROOT / "docs" / "results").glob("*.png")} == shown
    for section, curves in RESULTS.items():
        for panels, _ in report.pictures_of(section, curves, RATES).values():
            assert 1 <= len(panels) <= 6


def test_the_first_table_fits_on_a_screen():
    text = (ROOT / "docs" / "results.md").read_text()
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) - 2 == len(report.OVERVIEW) <= 25


def test_one_line_and_one_csv_add_a_system(tmp_path, monkeypatch):
    """As docs/results/CONTRIBUTING.md says: a peer, and an environment."""
    sections = {
        "Classic control": [
            learning.Task("CartPole-v1", 2.5, 3, {"ppo_ff": "", "mylib lr 1e-4": "v1.2, ppo.py"})
        ],
        "Card games": [learning.Task("Snap-v0", 2.5, 3, {"ppo_ff": "--env-id Snap-v0"})],
    }
    monkeypatch.setattr(learning, "SECTIONS", sections)
    monkeypatch.setattr(learning, "RESULTS", tmp_path)
    for name in ("CartPole-v1__ppo_ff", "CartPole-v1__mylib-lr-1e-4", "Snap-v0__ppo_ff"):
        (tmp_path / f"{name}.csv").write_text(CSV.replace("# com", "# peer: MyLib 1.2\n# com"))
    pages = report.report()
    assert "| mylib, learning rate 1e-4 | 4 [3, 5] |  |" in pages["results.md"]
    assert "Peers: MyLib 1.2." in pages["results.md"]
    row = "| [mylib, learning rate 1e-4](../../benchmarks/results/CartPole-v1__mylib-lr-1e-4.csv) |"
    assert (
        f"{row} 4 [3, 5] | 4 ± 0.816 | 3 | 200 | 200 |  |  |"
        in (pages["results/classic_control.md"])
    )
    assert "## Snap-v0" in pages["results/card_games.md"]
    monkeypatch.setattr(report, "DOCS", tmp_path / "docs")
    monkeypatch.setattr(report, "PICTURED", ["CartPole-v1"])
    monkeypatch.setattr(report, "IN_README", ["CartPole-v1"])
    (tmp_path / "docs").mkdir()
    report.write()
    drawn = {path.name for path in (tmp_path / "docs" / "results").glob("*.png")}
    assert drawn == {"overview.png", "classic_control.png", "card_games.png"}


def test_a_peer_is_shown_with_its_best_settings():
    systems = dict.fromkeys(["ppo_ff", "stoix 16 envs", "stoix 64 envs lr 1e-3", "rejax"], "")
    task = learning.Task("Pong", 9.0, 2, systems)
    curve = lambda x: report.Curve({}, np.array([50, 100]), np.full((2, 2), x))
    curves = [(learning.Row(task, name), curve(i)) for i, name in enumerate(systems)]
    shown, others = report.split_variants(curves)
    assert [row.system for row, _ in shown] == ["ppo_ff", "stoix 64 envs lr 1e-3", "rejax"]
    assert [row.system for row, _ in others] == ["stoix 16 envs"]
    label = lambda name, options="": report.label(
        learning.Row(task._replace(systems={name: options}), name)
    )
    assert label("stoix 64 envs lr 1e-3") == "Stoix, 64 environments, learning rate 1e-3"
    assert label("purejaxrl LR=5e-3") == "PureJaxRL, learning rate 5e-3"
    assert label("ppo_ff") == "ppo_ff"
    assert label("jaxmarl mappo_rnn") == "JaxMARL, mappo_rnn"
    assert label("ppo_ff", "--lr 1e-3 --num-envs 64") == "ppo_ff, 64 environments"
    assert label("ppo_ff 16 envs gamma 0.9") == "ppo_ff, 16 environments, discount factor 0.9"


@pytest.mark.parametrize(
    ("system", "script"),
    [
        ("stoix 64 envs lr 1e-3", "stoix"),
        ("purejaxrl LR=5e-3", "purejaxrl"),
        ("xland GRU 64 lr 3e-3", "xland GRU 64"),
        ("ppo_obs_norm 16 envs gamma 0.995", "ppo_obs_norm"),
        ("ppo_rnn 1M steps", "ppo_rnn"),
        ("ppo_rnn min advantage std 1e-8", "ppo_rnn"),
        ("mappo 4 epochs without entropy bonus", "mappo"),
        ("ppo_rnn no memory", "ppo_rnn no memory"),
        ("ppo_vtrace all segments GAE once", "ppo_vtrace all segments GAE once"),
    ],
)
def test_settings_are_no_part_of_a_script(system, script):
    assert report.script_of(learning.Row(TASKS[0], system)) == script


def test_a_picture_shows_the_best_setting_of_a_script():
    systems = ["ippo", "ippo 4 epochs", "ippo_rnn 4 epochs without entropy bonus", "ippo_rnn"]
    task = learning.Task("Tag", 9.0, 2, dict.fromkeys(systems, ""))
    curve = lambda x: report.Curve({}, np.array([50, 100]), np.full((2, 2), x))
    curves = [(learning.Row(task, name), curve(i)) for i, name in enumerate(systems)]
    pictured = [row.system for row, _ in report.pictured(curves)]
    assert pictured == ["ippo 4 epochs", "ippo_rnn"]
    assert len(report.split_variants(curves)[0]) == 4  # the table shows all


@pytest.mark.parametrize(("level", "systems"), [(0.5, ["ppo_rnn 1M steps"]), (0.9, None)])
def test_a_picture_has_the_long_run_only_if_the_short_one_is_not_enough(level, systems):
    ends = {"ppo_rnn": (10, 0.95), "ppo_rnn 1M steps": (1, 0.8)}
    task = learning.Task("Maze", level, 2, dict.fromkeys(ends, ""))
    curve = lambda x, y: report.Curve({}, np.array([x / 2, x]), np.full((2, 2), y))
    curves = [(learning.Row(task, name), curve(*end)) for name, end in ends.items()]
    pictured = [row.system for row, _ in report.pictured(curves)]
    assert pictured == (systems or [*ends])


def test_the_best_peer_is_the_fastest_of_equal_ones():
    ends = {"ppo_ff": 200, "rejax": 99.5, "stoix": 100, "stoix lr 1": 90, "cleanrl": 98}
    speeds = {"ppo_ff": 9e9, "rejax": 20, "stoix": 10, "stoix lr 1": 99, "cleanrl": 99}
    for sign, best, without_clock in ((1, "rejax", "stoix"), (-1, "stoix lr 1", "stoix lr 1")):
        task = learning.Task("Pong", 0, 2, dict.fromkeys(ends, ""))
        curve = lambda x: report.Curve({}, np.array([50, 100]), np.full((2, 2), x))
        curves = [(learning.Row(task, name), curve(sign * x)) for name, x in ends.items()]
        rates = {row.name: report.Rate(*[speeds[row.system]] * 3) for row, _ in curves}
        assert report.best_peer(curves, rates)[0].system == best
        assert report.best_peer(curves, {})[0].system == without_clock
    assert report.best_peer(curves[:1], rates) is None


def test_a_panel_without_learning_is_left_out():
    tasks = [learning.Task(title, 3, 2, {"ippo": ""}) for title in ("easy", "hard")]
    curve = lambda x: report.Curve({}, np.array([50, 100]), np.full((2, 2), [[x], [4.0]]))
    curves = [
        (learning.Row(task, "ippo"), curve(x)) for task, x in zip(tasks, (3.5, 2.5), strict=True)
    ]
    assert [*report.pictures_of("Tag", curves, {})["tag"][0]] == ["hard"]


@pytest.mark.parametrize("titles", [report.PICTURED, report.IN_README])
def test_the_overview_has_one_curve_of_each_system(titles):
    for title, curves in report.chosen_panels(RESULTS, titles).items():
        kinds = [row.kind for row, _ in curves]
        assert len(kinds) == len({*kinds}), title
        assert sum(not row.is_peer for row, _ in curves) == 1, title


def test_curves_that_hide_each_other_are_named():
    task = learning.Task("Pong", 9.0, 2, dict.fromkeys(["ppo_ff", "rejax", "stoix", "cleanrl"], ""))
    levels = {"ppo_ff": [-20, 5], "rejax": [-20, -20], "stoix": [-20, -19.9], "cleanrl": [5, 5]}
    curve = lambda x: report.Curve({}, np.array([50, 100]), np.array([x, x], float).T)
    curves = [(learning.Row(task, name), curve(x)) for name, x in levels.items()]
    assert [row.system for row, _ in report.same_constant(curves)] == ["rejax", "stoix"]
    assert report.same_constant(curves[::3]) == []

    # MountainCarContinuous-v0: from a slightly lower start to the same constant.
    levels = {"ppo_ff": [-19, 0, 0, 0], "rejax": [-25, 0, 0, 0.1], "stoix": [-40, 90, 94, 94]}
    curve = lambda x: report.Curve({}, np.arange(1, 5) * 25, np.array([x, x], float).T)
    curves = [(learning.Row(task, name), curve(x)) for name, x in levels.items()]
    assert [row.system for row, _ in report.same_constant(curves)] == ["ppo_ff", "rejax"]
    levels["rejax"] = [-10, 0, 9, 0]  # not constant
    curves = [(learning.Row(task, name), curve(x)) for name, x in levels.items()]
    assert report.same_constant(curves) == []


# The first edition of the scripts chose these by itself, from the environment or the rule.
IMPLIED = {
    r"-MinAtar__": " --hidden-size 128 --lr 7e-3",
    r"-MemoryS8__ppo_rnn": " --update-epochs 4 --num-steps 32",
    r"__disco-actor_critic": " --lr 5e-4 --ent-coef 0.2 --vf-coef 0.5",
    r"__disco-policy_gradient": " --lr 1e-3 --ent-coef 0.01 --vf-coef 0",
    # These were replacements in the text.
    r"-constant-entropy-bonus-of-0.01$": " --no-anneal-ent --ent-coef 0.01",
    r"-no-observation-statistics$": " --no-normalize-obs",
}


def commands(row):
    """The commands that the CSV of a row may name: this edition's, and that of the first."""
    first = row.command
    for name, words in IMPLIED.items():
        if re.search(name, row.name) and row.kind not in learning.PEERS:
            assert words in first, (row.name, words)
            first = first.replace(words, "")
    if row.system.endswith("target KL 0.02"):  # was an option
        first = first.replace(" --num-seeds", " --target-kl 0.02 --num-seeds")
    return row.command, first


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_curve_names_its_command_and_commit(row):
    curve = report.read_curve(learning.RESULTS / f"{row.name}.csv")
    assert {"command", "commit", "versions", "returns"} <= set(curve.about)
    assert "with changes" not in curve.about["commit"]
    assert curve.values.shape == (len(curve.steps), curve.values.shape[1])
    assert np.isfinite(curve.values).all() and (np.diff(curve.steps) > 0).all()


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.title)
def test_every_curve_is_that_of_the_table(task):
    for row in (learning.Row(task, system) for system in task.systems):
        curve = report.read_curve(learning.RESULTS / f"{row.name}.csv")
        assert curve.about["command"] in commands(row)
        if row.kind in learning.PEERS:
            assert curve.about["settings"] == row.settings
        assert curve.values.shape[1] == row.seeds


README_ROWS = {  # the environment in bold
    "ppo_ff": "CartPole-v1__ppo_ff",
    "ppo_drift": "CartPole-v1__ppo_drift-clip",
    "ppo_continuous": "Pendulum-v1__ppo_continuous",
    "ppo_obs_norm": "Pendulum-v1__ppo_obs_norm",
    "ppo_rnn": "MiniGrid-Empty-6x6__ppo_rnn",
    "ppo_meta": "MiniGrid-MemoryS8-trials__ppo_meta",
    "ppo_vtrace": "Pendulum-v1-without-velocity__ppo_vtrace",
    "ippo": "MPE_simple_spread_v3__ippo",
    "ippo_rnn": "HeuristicEnemySMAX-3m__ippo_rnn",
    "mappo": "HeuristicEnemySMAX-3m__mappo",
    "disco": "Catch-8x8__disco",
}


@pytest.mark.parametrize("script", README_ROWS)
def test_the_readme_shows_the_results(script):
    (line,) = re.findall(rf"^\| \[`{script}\.py`\].*$", (ROOT / "README.md").read_text(), re.M)
    *_, shown, _ = (cell.strip() for cell in line.strip("|").split("|"))
    if script == "ppo_meta":  # a return per episode of the trial
        (row,) = (row for row in ROWS if row.name == README_ROWS[script])
        table = report.trial_table([row]).splitlines()[-1]
        _, *later = re.findall(r"([\d.]+) ±", table)[:4]
        assert set(later) == {later[0]}
        assert shown == f"{later[0]} in episodes 2 to 4 ({row.seeds} seeds)"
        return
    curve = report.read_curve(learning.RESULTS / f"{README_ROWS[script]}.csv")
    final = report.final_returns(curve)
    if shown.startswith("wins"):
        assert shown == f"wins {final.mean():.0%} (training)"
        return
    mean, _, deviation = shown.split()[:3]
    for number, value in ((mean, final.mean()), (deviation, final.std())):
        assert number == f"{value:.{len(number.partition('.')[2])}f}"
    seeds = re.search(r"(\d+) seeds", shown)
    assert len(final) == (int(seeds[1]) if seeds else 5)


def final_of(name: str) -> np.ndarray:
    return report.final_returns(report.read_curve(learning.RESULTS / f"{name}.csv"))


def compare(cell: str, name: str) -> int:
    """Each "mean ± deviation" in a cell is that of the final returns; how many there are."""
    shown = re.findall(r"(-?[\d.]+) ± ([\d.]+)", cell)
    for mean, deviation in shown:
        digits, final = len(deviation.partition(".")[2]), final_of(name)
        assert mean == f"{final.mean():.{digits}f}", name
        assert deviation == f"{final.std():.{digits}f}", name
    return len(shown)


def test_the_page_of_details_shows_the_ablations():
    lines = (ROOT / "docs" / "details.md").read_text().split("| unchanged | changed |")[1]
    rows = [line.strip("| ").split(" | ") for line in lines.splitlines()[2:10]]
    options = {"`--ent-coef 0.01 --no-anneal-ent`": "constant entropy bonus of 0.01"}
    for change, place, *cells in rows:
        title, script = place.replace(".py`", "").split(", `")
        base = f"{title}__{script}"
        changed = f"{base} {options.get(change, change)}".replace(" ", "-")
        for name, cell in zip((base, changed), cells, strict=True):
            cell = cell.split(";")[0]
            shown_steps = re.findall(r"(\S+) steps(?: to (-?\d+))?", cell)
            assert compare(cell, name) + len(shown_steps) > 0, cell
            for steps, level in shown_steps:
                task = next(task for task in TASKS if task.title == title)
                assert not level or float(level) == task.threshold
                curve = report.read_curve(learning.RESULTS / f"{name}.csv")
                arrival = report.median_interval(report.steps_to(curve, task.threshold))[0]
                assert float(steps.rstrip("k")) == round(arrival / 1000), name


def test_the_page_of_ppo_ff_shows_what_the_falling_entropy_bonus_does():
    """With standard errors."""
    text = (ROOT / "docs" / "ppo_ff.md").read_text()
    games = ("Breakout", "Asterix", "SpaceInvaders", "Freeway")
    for row, system in (
        ("from 0.05 to 0", "ppo_ff"),
        ("constant 0.01", "ppo_ff-constant-entropy-bonus-of-0.01"),
    ):
        (cells,) = re.findall(rf"^\| {row} \(.*?\) \| (.*) \|$", text, re.M)
        finals = [final_of(f"{game}-MinAtar__{system}") for game in games]
        shown = [f"{x.mean():.1f} ± {stats.sem(x):.1f}" for x in finals]
        assert cells.split(" | ") == shown


def test_the_pages_of_several_agents_show_the_results():
    settings = {
        "defaults": "",
        "four epochs": "-4-epochs",
        "four epochs, no bonus": "-4-epochs-without-entropy-bonus",
    }
    systems = ("mappo", "ippo_rnn", "ippo", "jaxmarl-mappo_rnn", "jaxmarl-ippo_rnn")
    table = (ROOT / "docs" / "mappo.md").read_text().split("| settings here |")[1]
    compared, title = 0, ""
    for line in table.split("\n\n")[0].splitlines()[2:]:
        place, setting, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        title = place or title
        task = title.replace("/", "-").replace(", shared rewards", "-with-shared-rewards")
        for system, cell in zip(systems, cells, strict=True):
            name = f"{task}__{system}" + ("" if "jaxmarl" in system else settings[setting])
            if "tuned" in cell:
                (path,) = learning.RESULTS.glob(f"{name}-LR=*.csv")
                name = path.stem
            compared += compare(cell, name)
    assert compared == 26


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("MPE_simple_spread_v3", "MPE_simple_spread_v3__{}"),
        ("the same, four epochs", "MPE_simple_spread_v3__{}-4-epochs"),
        ("MPE_simple_reference_v3", "MPE_simple_reference_v3__{}"),
        (
            """coin_game, `--env-params '{"shared_rewards": true}'`""",
            "coin_game-with-shared-rewards__{}",
        ),
        ("HeuristicEnemySMAX/3m, share of episodes won", "HeuristicEnemySMAX-3m__{}"),
        (
            "the same, four epochs, no entropy bonus",
            "HeuristicEnemySMAX-3m__{}-4-epochs-without-entropy-bonus",
        ),
    ],
)
def test_the_page_of_ippo_rnn_shows_the_results(place, name):
    text = (ROOT / "docs" / "ippo_rnn.md").read_text()
    (line,) = (line for line in text.splitlines() if line.startswith(f"| {place} |"))
    recurrent, feedforward = line.split("|")[2:4]
    assert compare(recurrent, name.format("ippo_rnn")) == 1
    assert "±" not in feedforward or compare(feedforward, name.format("ippo"))


def test_no_file_is_without_its_row():
    names = {f"{row.name}.csv" for row in ROWS}
    assert {path.name for path in learning.RESULTS.glob("*.csv")} - {"clock.csv"} == names


@pytest.mark.parametrize("row", CHANGES, ids=lambda row: row.name)
def test_every_ablation_is_that_of_the_table(row):
    curve = report.read_curve(learning.RESULTS / f"{row.name}.csv")
    assert curve.about["command"] in commands(row)
    assert curve.values.shape[1] == row.seeds


@pytest.mark.parametrize("row", ABLATIONS, ids=lambda row: row.name)
def test_every_ablation_changes_its_script(row):
    text = (ROOT / f"{row.kind}.py").read_text()
    changed = ablations.change_text(text, row.task.patches.get(row.system, []))
    assert (changed != text) == (row.system in row.task.patches)
    compile(changed, row.name, "exec")
    tyro.cli(load_script(row.kind).Config, args=row.words)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_row_is_a_command_of_its_script(row):
    if row.kind not in learning.PEERS:
        tyro.cli(load_script(row.kind).Config, args=row.words)


# They change `init` only, or the network for images.
SAME_PROGRAM = {"default initialization of flax", "no layer normalization"}


@pytest.mark.parametrize("system", ["ppo_ff", "ppo_obs_norm", "ppo_rnn"])
def test_every_change_of_the_text_is_another_program(system):
    module, text = load_script(system), (ROOT / f"{system}.py").read_text()
    config, programs = tiny(module), {}
    for row in (row for row in ABLATIONS if row.kind == system):
        if row.system in row.task.patches:
            changed = types.ModuleType(row.system)
            exec(ablations.change_text(text, row.task.patches[row.system]), vars(changed))
            change = row.system.removeprefix(f"{system} ")
            programs[change] = program(changed, changed.Config(**vars(config)))
    plain = program(module, config)
    assert programs
    assert {change for change, x in programs.items() if x == plain} == SAME_PROGRAM & {*programs}


def test_a_change_that_does_not_fit_is_an_error():
    with pytest.raises(ValueError, match="0 times in the script: b"):
        ablations.change_text("a", [("b", "c")])


def test_a_curve_is_read_by_seed(tmp_path):
    (tmp_path / "x.csv").write_text(CSV)
    curve = report.read_curve(tmp_path / "x.csv")
    assert curve.about["command"] == "python ppo_ff.py"
    np.testing.assert_array_equal(curve.steps, [100, 200])
    np.testing.assert_array_equal(curve.values, [[1, 2, 0], [5, 4, 3]])
    np.testing.assert_array_equal(report.final_returns(curve), [5, 4, 3])
    np.testing.assert_array_equal(report.steps_to(curve, 2), [200, 100, 200])
    np.testing.assert_array_equal(report.steps_to(curve, 4), [200, 200, np.inf])


def test_the_level_is_the_final_return_of_the_peer():
    task = learning.Task("Pong", 9.0, 2, {"ppo_ff": "", "purejaxrl": ""})
    steps = np.array([50, 100])
    ours = report.Curve({}, steps, np.array([[1.0, 6.0], [7.0, 6.0]]))
    peer = report.Curve({}, steps, np.array([[0.0, 1.0], [4.0, 6.0]]))
    curves = [(learning.Row(task, "ppo_ff"), ours), (learning.Row(task, "purejaxrl"), peer)]
    table = report.level_table(curves, {"Pong__ppo_ff": report.Rate(10.0, 9.0, 11.0)})
    *_, first, second = table.splitlines()
    assert first == "| Pong | 5 | ppo_ff | 100 [50, 100] | 10 s [5 s, 10 s] |"
    assert second == "| Pong | 5 | PureJaxRL | never [100, never] |  |"


def test_a_missing_training_return_is_interpolated(tmp_path):
    lines = ["# peer: x", "seed,env_steps,return", "0,1,0", "1,1,1", "1,2,3", "0,3,4", "1,3,5"]
    (tmp_path / "x.csv").write_text("\n".join(lines))
    curve = report.read_curve(tmp_path / "x.csv")
    np.testing.assert_array_equal(curve.values, [[0, 1], [2, 3], [4, 5]])


def test_peers_are_described_and_slow_ones_have_fewer_seeds():
    import peers

    assert set(learning.PEERS) == set(learning.PEER_RETURNS)
    for kind in learning.PEERS:
        assert hasattr(peers, f"{kind}_curve") and hasattr(peers, f"{kind}_clock")
    (row,) = learning.all_rows("^Pendulum-v1__cleanrl$")
    assert row.seeds == 3 < row.task.seeds
    assert row.command.endswith("--only 'Pendulum-v1__cleanrl$' --peers cleanrl=DIR")
    (continuous,) = learning.all_rows("^Pendulum-v1__stoix")
    (discrete,) = learning.all_rows("^Breakout-MinAtar__stoix")
    assert continuous.seeds == 10 and discrete.seeds == discrete.task.seeds == 20


def test_the_interval_of_the_median_is_that_of_scipy():
    values = np.random.default_rng(1).normal(size=9)
    median, low, high = report.median_interval(values)
    result = stats.bootstrap((values,), np.median, method="percentile", n_resamples=20_000)
    assert median == np.median(values)
    reference = result.confidence_interval
    np.testing.assert_allclose([low, high], [reference.low, reference.high], atol=0.15)
    assert report.median_interval(np.array([1.0, np.inf, np.inf]))[0] == np.inf


@pytest.mark.parametrize(
    ("value", "text"), [(np.inf, "never"), (500.0, "500"), (20_480.0, "20.5k"), (1e6, "1M")]
)
def test_numbers_are_short(value, text):
    assert report.short(value) == text


@pytest.fixture(scope="module")
def figures(tmp_path_factory):
    """{file name: figure} of the whole report."""
    drawn = {}
    save = lambda figure, path: drawn.update({path.name: figure})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report.matplotlib.figure.Figure, "savefig", save)
        patch.setattr(report, "DOCS", tmp_path_factory.mktemp("docs"))
        report.write()
    return drawn


def test_a_name_has_one_color_in_all_pictures(figures):
    colors = {}
    assert {"readme.png", "overview.png", "minigrid.png"} < {*figures}
    for file, figure in figures.items():
        (legend,) = figure.legends
        names = [text.get_text() for text in legend.get_texts()]
        drawn = [line.get_color() for line in legend.get_lines()]
        assert len({*names}) == len(names) == len({*drawn}), file
        for name, color in zip(names, drawn, strict=True):
            assert colors.setdefault(name, color) == color, (file, name)


def test_every_legend_is_within_its_picture(figures):
    for file, figure in figures.items():
        figure.draw_without_rendering()
        box = figure.legends[0].get_window_extent()
        assert box.x0 >= 0 and box.x1 <= figure.bbox.x1, file


def test_tick_labels_do_not_touch(figures):
    for file, figure in figures.items():
        figure.draw_without_rendering()
        for axes in (axes for axes in figure.axes if axes.get_visible()):
            low, high = axes.get_xlim()
            ticks = zip(axes.get_xticks(), axes.get_xticklabels(), strict=True)
            boxes = [label.get_window_extent() for x, label in ticks if low <= x <= high]
            for left, right in zip(boxes, boxes[1:], strict=False):
                assert left.x1 < right.x0, (file, axes.get_title(loc="left"))
