"""What is installed is what the scripts import, at the same bounds wherever it is written down."""

import ast
import contextlib
import re
import sys
import tomllib
from importlib import metadata

import pytest
from conftest import ROOT, TINY

ALL = sorted([*TINY, "disco", "disco_meta", "ippo", "ippo_rnn", "mappo"])
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BOUNDS = {re.match(r"[\w-]+", line).group(): line for line in PROJECT["dependencies"]}
EXTRAS = PROJECT["optional-dependencies"]


def source(script):
    return (ROOT / f"{script}.py").read_text()


def metadata_block(text):
    """The inline metadata of a script, as PEP 723 defines it."""
    blocks = re.findall(r"(?m)^# /// script$\n((?:^#(?: .*)?$\n)+?)^# ///$", text)
    assert len(blocks) == 1, "one `# /// script` block"
    return tomllib.loads("".join(line[2:] + "\n" for line in blocks[0].splitlines()))


def imported(text, everywhere=True):
    """The packages a script imports; at the top of the file only, unless `everywhere`."""
    tree = ast.parse(text)
    names = set()
    for node in ast.walk(tree) if everywhere else tree.body:
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module.split(".")[0])
    return names - sys.stdlib_module_names


def name_of(requirement):
    return re.match(r"[\w-]+", requirement).group()


def required_by(names):
    """The packages that these bring along."""
    found = set()
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):  # of another platform
            found |= {name_of(x) for x in metadata.requires(name) or [] if "extra" not in x}
    return found


@pytest.mark.parametrize("script", ALL)
def test_the_inline_metadata_brings_what_the_script_imports(script):
    """Named, or required by what is named; upper bounds are those of pyproject.toml."""
    listed = metadata_block(source(script))["dependencies"]
    names = {name_of(requirement) for requirement in listed}
    imports = imported(source(script), everywhere=False) - {"disco"}
    brought = required_by(names)
    assert imports <= names | brought | required_by(brought), script
    for requirement in listed:
        assert all(
            bound in BOUNDS[name_of(requirement)] for bound in re.findall(r"<[\d.]+", requirement)
        )


@pytest.mark.parametrize("script", ALL)
def test_the_inline_metadata_follows_the_docstring(script):
    text = source(script)
    docstring_end = ast.parse(text).body[0].end_lineno
    assert text.splitlines()[docstring_end : docstring_end + 2] == ["", "# /// script"]


@pytest.mark.parametrize("script", ALL)
def test_what_a_script_imports_at_the_top_is_a_dependency_and_the_rest_an_extra(script):
    at_the_top = imported(source(script), everywhere=False) - {"disco"}
    assert at_the_top <= set(BOUNDS)
    extras = {re.match(r"[\w-]+", line).group() for lines in EXTRAS.values() for line in lines}
    rest = imported(source(script)) - at_the_top - {"disco"}
    assert rest <= extras | {"wandb"}  # which takes a second to import


def test_every_dependency_is_imported_by_a_script_or_a_tool():
    files = [*ALL, "plot", "enjoy"]
    assert set(BOUNDS) <= set().union(*(imported(source(name)) for name in files))


def test_every_script_and_tool_is_installed():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert sorted(settings["py-modules"]) == sorted([*ALL, "enjoy", "plot"])


@pytest.mark.parametrize("tool", ["enjoy", "plot"])
def test_a_tool_is_a_command(tool):
    """A run prints these, so they must work in any folder."""
    module, function = PROJECT["scripts"][tool].split(":")
    assert module == tool and f"def {function}()" in source(tool)


def test_every_dependency_has_both_bounds_and_a_reason():
    text = (ROOT / "pyproject.toml").read_text()
    for requirement in [*PROJECT["dependencies"], *sum(EXTRAS.values(), [])]:
        assert re.search(r">=[\d.]+,<[\d.]+$", requirement), requirement
        assert re.search(rf'^.*"{re.escape(requirement)}".* # .+$', text, re.M), requirement


def test_extras_agree_with_each_other_and_with_the_dependencies():
    assert set(EXTRAS["brax"]) <= set(EXTRAS["test"])
    assert [line.replace("[cuda13]", "") for line in EXTRAS["cuda"]] == [BOUNDS["jax"]]
