"""The habits that make the scripts readable, so that nobody has to remember them."""

import ast
import inspect
import re
import subprocess
import sys
import types

import pytest
from conftest import ROOT, SCRIPTS, SMALL, TINY, load_script

ALL = ("ppo_ff", "ppo_continuous", "ppo_obs_norm", "ppo_rnn")
OTHERS = ("disco", "ippo")  # share the run part; ippo evaluates more than one return
FEED_FORWARD = ("ppo_ff", "ppo_continuous", "ppo_obs_norm")
SHARED = {  # each of these is byte-identical in the scripts named
    "ConfigError": ALL,
    "check_divides": ALL,
    "compute_gae": ALL,
    "shuffle": ALL,
    "dense": FEED_FORWARD,  # ppo_rnn's takes a dtype
    "ppo_loss": FEED_FORWARD,
    "patches": ("ppo_ff", "ippo"),
    "describe": ALL,
    "open_run": ALL,
    "save": ALL,
    "load": ALL,
    "plot_curve": ALL,
    "write_rows": ALL,
    "report": ALL,
    "caught_signals": ALL,
    "main": ALL,
    "cli": ALL,
}
RUN_PART = ("ConfigError", "check_divides", "describe", "save", "load", "open_run")
RUN_PART += ("write_rows", "plot_curve", "report", "caught_signals", "main", "cli")
RENAMED = {"open_run": ('"xminigrid"', '"gymnax"')}  # but for this word
BANNERS = ["config", "environment", "network", "rollout", "advantage", "loss"]
BANNERS += ["train", "evaluate", "main"]


def text_of(script):
    return (ROOT / f"{script}.py").read_text()


def functions(tree):
    return [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]


def depth(node):
    """How many functions, this one included, are nested in each other at most."""
    inner = max((depth(child) for child in ast.iter_child_nodes(node)), default=0)
    return inner + isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def config_fields(tree):
    """name -> line number of every field of Config."""
    (config,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Config")
    return {n.target.id: n.lineno for n in config.body if isinstance(n, ast.AnnAssign)}


@pytest.fixture(params=SCRIPTS)
def script(request):
    return request.param


@pytest.fixture
def text(script):
    return text_of(script)


@pytest.fixture
def tree(text):
    return ast.parse(text)


# ------------------------------------------------------------------------------------------- shape
def test_functions_nest_three_deep_at_most(tree):
    assert [f.name for f in tree.body if depth(f) > 3] == []


def test_lines_are_short_and_little_indented(text):
    lines = list(enumerate(text.splitlines(), 1))
    assert [n for n, line in lines if len(line) > 100] == []
    assert [n for n, line in lines if len(line) - len(line.lstrip()) > 20] == []


def test_banners_are_the_same_in_the_same_order(text):
    banners = re.findall(r"^# -+ .*$", text, re.M)
    assert [banner.split()[-1] for banner in banners] == BANNERS
    assert {len(banner) for banner in banners} == {99}


def test_the_docstring_is_short_and_shows_the_command(text, tree, script):
    docstring = tree.body[0]
    assert docstring.end_lineno <= 30
    assert re.search(rf"^    python {script}\.py", ast.get_docstring(tree, clean=False), re.M)


def test_comments_tell_why_and_nothing_is_left_over(text, tree):
    assert not re.search(r"TODO|FIXME|XXX|HACK|breakpoint\(|print\(f?\"debug", text)
    for comment in re.findall(r"^ *# ?(.*)$", text, re.M):
        if re.search(r"[=(]", comment) and not comment.endswith("."):
            with pytest.raises(SyntaxError):  # code that was commented out
                ast.parse(comment)


def test_every_module_level_name_is_used(text, tree):
    defined = [n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    for node in tree.body:
        if isinstance(node, ast.Assign):
            defined += [target.id for target in node.targets if isinstance(target, ast.Name)]
    entry_points = {"cli"}
    for name in set(defined) - entry_points:
        assert len(re.findall(rf"\b{name}\b", text)) > 1, f"{name} is not used"


def test_carries_are_read_by_name(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
            carry = re.fullmatch(
                r"state|carry|rollout|transition|batch|runner_state", node.value.id
            )
            assert not (carry and isinstance(node.slice, ast.Constant | ast.UnaryOp)), node.lineno


def test_scripts_do_not_import_each_other(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert not {alias.name for alias in node.names} & {*SCRIPTS, "utils"}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module not in {*SCRIPTS, "utils"}


def test_the_last_line_is_the_entry_point(text):
    assert text.endswith('\n\n\nif __name__ == "__main__": cli()  # fmt: skip\n')


# ------------------------------------------------------------------------------------------ config
def test_every_option_has_help(text, tree):
    lines = text.splitlines()
    for name, number in config_fields(tree).items():
        assert re.search(r"  # \S.{6,}", lines[number - 1]), f"{name} has no help"


def test_every_option_is_read(text, tree):
    attributes = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute)]
    names = ("config", "self")
    read = {n.attr for n in attributes if isinstance(n.ctx, ast.Load) and owner(n) in names}
    assert set(config_fields(tree)) - read == set()


def test_what_follows_run_dir_may_change_when_a_run_goes_on(tree):
    """A checkpoint is compared with the options before it: none of the others may teach."""
    names = list(config_fields(tree))
    assert names[names.index("run_dir") :] == [
        *("run_dir", "resume", "checkpoint_every", "track", "wandb_project", "wandb_entity"),
        *("distributed", "coordinator", "num_processes", "process_id"),
    ]


def owner(attribute):
    value = attribute.value
    return value.id if isinstance(value, ast.Name) else getattr(value, "attr", None)


def test_options_mean_the_same_in_every_script():
    """Same name, same type and same help; only defaults may differ."""
    differ = ("env_id", "hidden_size", "lr")  # what the script's environments and network take
    seen = {}
    for script in SCRIPTS:
        lines = text_of(script).splitlines()
        for name, number in config_fields(ast.parse(text_of(script))).items():
            kind = re.match(r"    \w+: (.*?) = ", lines[number - 1]).group(1)
            meaning = kind, lines[number - 1].split("  # ")[1]
            assert name in differ or seen.setdefault(name, meaning) == meaning


# ---------------------------------------------------------------------------------- shared blocks
@pytest.mark.parametrize("name", SHARED)
def test_shared_blocks_are_identical(name):
    others = ("disco",) if name in ("load", "open_run", "main") else OTHERS
    scripts = [*SHARED[name], *(others if name in RUN_PART else ())]
    sources = {inspect.getsource(getattr(load_script(script), name)) for script in scripts}
    assert len({source.replace(*RENAMED.get(name, ("", ""))) for source in sources}) == 1


def test_every_script_is_listed():
    assert set(SCRIPTS) <= set(ALL) and set(ALL) == set(TINY)


# ------------------------------------------------------------------------------------------- tools
@pytest.mark.parametrize("command", [["check"], ["format", "--check"]], ids=" ".join)
def test_ruff_has_nothing_to_say(command):
    ruff = [sys.executable, "-m", "ruff", *command, "--no-cache", "."]
    result = subprocess.run(ruff, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


# ------------------------------------------------------------------------------------------- paste
def test_the_script_can_be_pasted(script, text, monkeypatch, tmp_path):
    """Its source without the last line trains in a namespace that knows of no file and no argv."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [])
    notebook = types.ModuleType("notebook")
    monkeypatch.setitem(sys.modules, "notebook", notebook)  # dataclasses look their module up
    body = "".join(text.splitlines(keepends=True)[:-1])
    exec(body, notebook.__dict__)
    assert not hasattr(notebook, "__file__")

    import jax

    sizes = {**SMALL, **TINY[script], "total_timesteps": 16}
    init, train = notebook.make_train(notebook.Config(**sizes))
    state = init(jax.random.split(jax.random.key(0), jax.local_device_count()))
    state, metrics = train(state)
    assert all(value.shape == (jax.local_device_count(), 1, 1) for value in metrics.values())
    assert list(tmp_path.iterdir()) == []
