"""The habits that keep the scripts readable, as lints."""

import ast
import inspect
import re
import subprocess
import sys
import types

import pytest
import tyro
from conftest import ROOT, SLOW, SMALL, TINY, load_script
from test_disco import SMALL as SMALL_DISCO

PPO = ("ppo_ff", "ppo_drift", "ppo_continuous", "ppo_obs_norm", "ppo_rnn", "ppo_meta")
AGENTS = ("ippo", "ippo_rnn", "mappo")
FEED_FORWARD = ("ppo_ff", "ppo_continuous", "ppo_obs_norm")
SCRIPTS = (*PPO, "ppo_vtrace", *AGENTS, "disco")  # with a run part
ALL = (*SCRIPTS, "disco_meta")
# Characters and lines of the part below the banner `main`, and of the rest of each script. The
# house style allows 6,500 and 130 for the former. It needs more for the lock, changed options,
# tracking that loses no point, seeds that diverge, options with several values, environment
# states of any class, and the boxes of the help.
RUN_PART = (12_800, 239)
HOUSE_STYLE = {
    "ppo_ff": (17_500, 415),
    "ppo_drift": (19_500, 465),
    "ppo_continuous": (19_500, 465),
    "ppo_obs_norm": (22_500, 525),
    "ppo_rnn": (22_500, 510),
    "ppo_meta": (25_500, 545),
    "ppo_vtrace": (28_500, 615),
    "ippo": (26_500, 580),
    "ippo_rnn": (31_500, 680),
    "mappo": (36_500, 770),
    "disco": (35_500, 780),
    "disco_meta": (21_000, 455),  # all of it: it imports disco.py
}
# What the scripts need beyond that: in all of them, Ctrl-C at any moment, environment parameters of
# another type, eval/length, value clipping, the list of environments, where to find others, metrics
# of the environment, boxes in the help, and comments that readers asked for; in ppo_ff and
# ppo_drift, masks of legal actions; in ppo_rnn and ppo_meta, a loader that runs no code, and layers
# of GRUs; in ippo_rnn and mappo, the backward pass of the GRU; in disco and disco_meta, a
# coefficient for each loss, diagnostics, and rules of any size; in disco, a plain value and
# normalized errors; in disco_meta, several environments.
OVERRUN = {
    "ppo_ff": (5_400, 110),
    "ppo_drift": (6_300, 120),
    "ppo_continuous": (5_600, 115),
    "ppo_obs_norm": (6_700, 125),
    "ppo_rnn": (8_800, 150),
    "ppo_meta": (7_000, 130),
    "ppo_vtrace": (5_500, 115),
    "ippo": (7_600, 125),
    "ippo_rnn": (10_200, 170),
    "mappo": (7_600, 120),
    "disco": (11_400, 240),
    "disco_meta": (10_500, 180),
}
BUDGETS = {k: (c + OVERRUN[k][0], n + OVERRUN[k][1]) for k, (c, n) in HOUSE_STYLE.items()}
README = (ROOT / "README.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
DIFFS = {  # parent, child: lines removed and added; in brackets, what HOUSE_STYLE allows
    ("ppo_ff", "ppo_drift"): 88,  # (80) a run continued with another --kl-coef
    ("ppo_ff", "ppo_continuous"): 168,  # (140) no masks of legal actions
    ("ppo_continuous", "ppo_obs_norm"): 125,  # (120)
    ("ppo_ff", "ppo_rnn"): 343,  # (250) the loader that runs no code, the pass at time limits
    ("ppo_rnn", "ppo_meta"): 237,  # (200) no pass at time limits, and the network's second input
    ("ppo_obs_norm", "ppo_vtrace"): 329,  # (300) comments that readers asked for
    ("ppo_ff", "ippo"): 465,  # (380) comments that readers asked for
    ("ippo", "ippo_rnn"): 252,  # (200) the backward pass of the GRU
    ("ippo_rnn", "mappo"): 89,
}
SHARED = {  # each of these is byte-identical in the scripts named
    "ConfigError": SCRIPTS,
    "compute_gae": (*PPO, *AGENTS),
    "dense": (*FEED_FORWARD, "ppo_drift"),  # ppo_rnn's takes a dtype
    "ppo_loss": FEED_FORWARD,
    "RunnerState": ("ppo_ff", "ppo_drift", "ppo_continuous"),
    "ActorCritic": ("ppo_ff", "ppo_drift"),
    "GRU": ("ippo_rnn", "mappo"),  # ppo_rnn's takes a dtype
    "gru_forward": ("ippo_rnn", "mappo"),
    "gru_backward": ("ippo_rnn", "mappo"),
    "LSTM": ("ippo_rnn", "mappo"),
    "RNN": ("ippo_rnn", "mappo"),
    "ArrayUnpickler": ("ppo_rnn", "ppo_meta"),
    "load_benchmark": ("ppo_rnn", "ppo_meta"),
    "Moments": ("ppo_obs_norm", "ppo_vtrace"),
    "update_moments": ("ppo_obs_norm", "ppo_vtrace"),
    "scale_reward": ("ppo_obs_norm", "ppo_vtrace"),
    "make_brax_env": ("ppo_obs_norm", "ppo_vtrace"),
    "GaussianPolicy": ("ppo_continuous", "ppo_obs_norm", "ppo_vtrace"),
    "TanhGaussianPolicy": ("ppo_continuous", "ppo_obs_norm", "ppo_vtrace"),
    "BetaPolicy": ("ppo_continuous", "ppo_obs_norm"),
    "Rings": AGENTS,
    "jaxnav_time_limit": AGENTS,
    "load_env": AGENTS,
    "make_env": ("ippo", "ippo_rnn"),  # mappo's adds the world
}
GROUPS = ("Environment", "Algorithm", "Run")  # of options, and boxes of the help
RUN_OPTIONS = "seed num_seeds num_evals eval_episodes eval_greedy run_dir init_from track"
RUN_OPTIONS = [*RUN_OPTIONS.split(), "distributed"]
BANNERS = ["config", "environment", "network", "algorithm", "main"]


def text_of(script):
    return (ROOT / f"{script}.py").read_text()


def run_part(script):
    text = text_of(script)
    return text[re.search(r"^# -+ main$", text, re.M).start() :]


def depth(node):
    """How many functions, this one included, are nested in each other at most."""
    inner = max((depth(child) for child in ast.iter_child_nodes(node)), default=0)
    return inner + isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def config_fields(tree):
    """name -> line number of every option, of all three groups."""
    nodes = [x for n in tree.body if getattr(n, "name", None) in GROUPS for x in n.body]
    return {n.target.id: n.lineno for n in nodes if isinstance(n, ast.AnnAssign)}


@pytest.fixture(params=ALL)
def script(request):
    return request.param


@pytest.fixture
def text(script):
    return text_of(script)


@pytest.fixture
def tree(text):
    return ast.parse(text)


# ---------------------------------------- budgets
@pytest.mark.parametrize("script", BUDGETS)
def test_budget(script):
    characters, lines = BUDGETS[script]
    text = text_of(script)
    text = text.removesuffix(run_part(script)) if script in SCRIPTS else text
    assert len(text) <= characters and text.count("\n") <= lines, (len(text), text.count("\n"))


def test_budget_of_the_run_part():
    characters, lines = RUN_PART
    text = run_part("ppo_ff")
    assert len(text) <= characters and text.count("\n") <= lines


@pytest.mark.parametrize(("parent", "child"), DIFFS)
def test_diff_between_siblings(parent, child):
    """Counts what `diff` prints with < or >."""
    command = ["diff", f"{parent}.py", f"{child}.py"]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    changed = [line for line in output.splitlines() if line.startswith(("<", ">"))]
    assert 0 < len(changed) <= DIFFS[parent, child], len(changed)
    assert f"| `{' '.join(command)}` | {len(changed)} |" in CONTRIBUTING


PLUMBING = ("init_seeds", "train_seeds")  # the same within make_train


@pytest.mark.parametrize("name", PLUMBING)
@pytest.mark.parametrize("script", [script for script in SCRIPTS if script != "disco"])
def test_seeds_are_trained_in_the_same_way_in_all_scripts(script, name):
    text = text_of("ppo_ff")
    start = text.index(f"    def {name}(")
    assert text[start : text.index("\n\n", start)] in text_of(script)


def test_the_first_lines_are_the_same_in_all_scripts():
    """From the first import to the last before the packages."""
    shared = lambda text: text[text.index("# Works around") : text.index("\nimport distrax")]
    name = lambda script: shared(text_of(script)).replace(f'"{script}"', '"SCRIPT"')
    assert len({name(script) for script in SCRIPTS}) == 1


@pytest.mark.parametrize("script", BUDGETS)
def test_the_readme_states_the_number_of_lines(script):
    row = next(line for line in README.splitlines() if line.startswith(f"| [`{script}.py`]"))
    lines = text_of(script).count("\n")
    assert row.endswith(f"| {lines} |")
    if script == "ppo_ff":
        assert f"\n| lines of the basic PPO | {lines} |" in README


def test_the_examples_of_the_help_work(script):
    module = load_script(script)
    for group in (getattr(module, name) for name in GROUPS):
        words = re.search("For example: (.*)", group.__doc__)[1].split()
        assert tyro.cli(group, args=words) != group()
        assert tyro.cli(module.Config, args=words) != module.Config()


def test_the_readme_fits_on_a_few_screens():
    assert len(README.encode()) <= 6000
    lines = run_part("ppo_ff").count("\n")
    assert f"The remaining {lines} lines run it" in CONTRIBUTING


# ------------------------------------------ shape
def test_functions_nest_three_deep_at_most(tree):
    assert [node.name for node in tree.body if depth(node) > 3] == []


def test_lines_are_short_and_little_indented(text):
    lines = list(enumerate(text.splitlines(), 1))
    assert [n for n, line in lines if len(line) > 100] == []
    assert [n for n, line in lines if len(line) - len(line.lstrip()) > 20] == []


@pytest.mark.parametrize("script", [*PPO, *AGENTS])
def test_banners_are_the_same_in_the_same_order(text):
    banners = re.findall(r"^# -+ .*$", text, re.M)
    assert [banner.split()[-1] for banner in banners] == BANNERS
    assert {len(banner) for banner in banners} == {50}


def test_the_docstring_is_short_and_shows_the_command(text, tree, script):
    docstring = tree.body[0]
    assert docstring.end_lineno <= 20
    assert not re.search(r"steps/s|\d ± \d", docstring.value.value)  # figures age
    assert re.search(rf"^    python {script}\.py", ast.get_docstring(tree, clean=False), re.M)


def test_nothing_is_left_over(text):
    assert not re.search(r"TODO|FIXME|XXX|HACK|breakpoint\(|print\(f?\"debug", text)
    text = re.sub(r"# /// script[\s\S]*?# ///\n", "", text)
    for comment in re.findall(r"^ *# ?(.*)$", text, re.M):
        if re.search(r"[=(]", comment) and not comment.endswith("."):
            with pytest.raises(SyntaxError):  # code that was commented out
                ast.parse(comment)


def test_comments_are_natural_english(text):
    """The pattern that STYLE forbids: diary words and relative clauses instead of nouns."""
    odd = (
        r"\b(anew|goes on|so that its|side by side|for ever|of everything|what it came to|beside)\b"
    )
    comments = re.findall(r"#.*$|\"\"\"[\s\S]*?\"\"\"", text, re.M)
    assert [c for c in comments if re.search(odd, c, re.I)] == []


def test_every_module_level_name_is_used(text, tree, script):
    defined = [n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    for node in tree.body:
        if isinstance(node, ast.Assign):
            defined += [target.id for target in node.targets if isinstance(target, ast.Name)]
    text += text_of("disco_meta") if script == "disco" else ""
    for name in set(defined):
        assert len(re.findall(rf"\b{name}\b", text)) > 1, f"{name} is not used"


def test_carries_are_read_by_name(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
            carry = re.fullmatch(r"state|carry|rollout|transition|batch|runner", node.value.id)
            index = node.slice.operand if isinstance(node.slice, ast.UnaryOp) else node.slice
            by_position = isinstance(index, ast.Constant) and isinstance(index.value, int)
            assert not (carry and by_position), node.lineno


def test_no_lambda_in_a_loop_and_no_lookup_instead_of_a_condition(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.For | ast.While):
            inner = [n for statement in node.body for n in ast.walk(statement)]
            assert not [n.lineno for n in inner if isinstance(n, ast.Lambda)]
        if isinstance(node, ast.Subscript):
            assert not isinstance(node.value, ast.Dict), node.lineno


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_do_not_import_each_other(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert not {alias.name for alias in node.names} & {*ALL, "utils"}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module not in {*ALL, "utils"}


def test_the_last_line_is_the_entry_point(text):
    assert text.endswith('\n\n\nif __name__ == "__main__":\n    cli()\n')


# ----------------------------------------- config
def test_every_option_has_help(text, tree):
    lines = text.splitlines()
    for name, number in config_fields(tree).items():
        assert re.search(r"  # \S.{6,}", lines[number - 1]), f"{name} has no help"


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_option_is_read(text, tree):
    attributes = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute)]
    read = {n.attr for n in attributes if isinstance(n.ctx, ast.Load) and owner(n) in OWNERS}
    assert set(config_fields(tree)) - read == set()


OWNERS = ("config", "self")


def owner(attribute):
    value = attribute.value
    return value.id if isinstance(value, ast.Name) else getattr(value, "attr", None)


def test_options_come_in_three_groups():
    for script in ALL:
        module = load_script(script)
        groups = [list(getattr(module, name).__dataclass_fields__) for name in GROUPS]
        assert [*module.Config.__dataclass_fields__] == sum(groups, [])  # in config.json, too
        assert list(config_fields(ast.parse(text_of(script)))) == sum(groups, [])
        assert groups[2] == [x for x in RUN_OPTIONS if x in groups[2]]
        assert groups[2] == RUN_OPTIONS or script == "disco_meta"


def test_options_mean_the_same_in_every_script():
    """Same name, same type and same help; only defaults may differ."""
    differ = ("env_id", "env_params", "num_steps", "hidden_size", "lr", "ent_coef", "vf_coef")
    differ += ("num_minibatches",)  # ppo_rnn: of whole sequences
    differ += ("update_epochs",)  # ppo_vtrace draws
    differ += ("target_kl", "max_grad_norm")  # ippo has actor and critic apart
    differ += ("clip_eps",)  # ppo_drift has two uses for it
    differ += ("clip_value",)  # mappo clips normalized values
    differ += ("policy",)  # ppo_vtrace has no Beta policy
    differ += ("benchmark_id",)  # ppo_meta takes a file too
    seen = {}
    for script in SCRIPTS:
        lines = text_of(script).splitlines()
        for name, number in config_fields(ast.parse(text_of(script))).items():
            kind = re.match(r"    \w+: (.*?) = ", lines[number - 1]).group(1)
            meaning = kind, lines[number - 1].split("  # ")[1]
            assert name in differ or seen.setdefault(name, meaning) == meaning, script


# ---------------------------------- shared blocks
@pytest.mark.parametrize(("name", "scripts"), [*SHARED.items(), ("GRU", ("ppo_rnn", "ppo_meta"))])
def test_shared_blocks_are_identical(name, scripts):
    sources = {inspect.getsource(getattr(load_script(script), name)) for script in scripts}
    assert len(sources) == 1


def test_the_run_part_is_identical():
    assert len({run_part(script) for script in SCRIPTS}) == 1


def test_every_script_is_listed():
    found = {path.stem for path in ROOT.glob("*.py")} - {"enjoy", "plot"}
    assert found == set(ALL) == set(BUDGETS) and {*PPO, "ppo_vtrace"} == set(TINY)


# ------------------------------------------ tools
@pytest.mark.parametrize("command", [["check"], ["format", "--check"]], ids=" ".join)
def test_ruff_has_nothing_to_say(command):
    ruff = [sys.executable, "-m", "ruff", *command, "--no-cache", "."]
    result = subprocess.run(ruff, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


# ------------------------------------------ paste
SMALL_ENV = {
    **dict.fromkeys(AGENTS, {"env_id": "rings", "num_envs": 2, "num_minibatches": 2}),
    "disco": {**SMALL_DISCO, "env_id": "Catch-5x5", "total_timesteps": 96, "num_evals": 3},
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_script_can_be_pasted(script, text, monkeypatch, tmp_path):
    """Without its last two lines it trains in a namespace that knows of no file and no argv.

    Most are only traced here, all the way through `train`: they train in other tests.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [])
    notebook = types.ModuleType("notebook")
    monkeypatch.setitem(sys.modules, "notebook", notebook)  # dataclasses look their module up
    body = "".join(text.splitlines(keepends=True)[:-2])
    exec(body, notebook.__dict__)
    assert not hasattr(notebook, "__file__")

    import jax

    sizes = {**SMALL, **TINY.get(script, {}), **SMALL_ENV.get(script, {})}
    known = {k: v for k, v in sizes.items() if k in notebook.Config.__dataclass_fields__}
    config = notebook.Config(**known)
    init, train, *_ = notebook.make_train(config)
    keys = jax.random.split(jax.random.PRNGKey(0), jax.local_device_count())
    trains = script in ("ppo_ff", "disco")
    call = (lambda function, x: function(x)) if trains else jax.eval_shape
    state, metrics = call(train, call(init, keys))
    shape = (jax.local_device_count(), 1, config.updates_per_eval)
    assert {value.shape for value in metrics.values()} == {shape}
    assert state.best_params is not None
    assert not trains or bool((state.eval_return == state.best_return).all())
    assert list(tmp_path.iterdir()) == []


def test_slow_tests_exist():
    for file, name in SLOW:
        source = (ROOT / "tests" / f"{file}.py").read_text()
        name = name.partition("[")[0]
        assert not name or f"def {name}(" in source, (file, name)
