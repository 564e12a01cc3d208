"""Every recipe of docs/recipes.md runs: diffs apply and train, Python runs, commands are valid."""

import dataclasses
import re
import shlex
import types

import gymnasium
import jax
import numpy as np
import pytest
import tyro
from conftest import ROOT, load_script, tiny
from probes import start

TEXT = (ROOT / "docs" / "recipes.md").read_text()
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", TEXT, re.S | re.M))


def blocks(language):
    """[(section, block)]"""
    find = lambda text: re.findall(rf"```{language}\n(.*?)```", text, re.S)
    return [(name, block) for name, text in SECTIONS.items() for block in find(text)]


def patched(section, diff):
    """The script that the section names, with the hunks of the diff applied."""
    script = re.search(r"In `(\w+)\.py`", SECTIONS[section])[1]
    text = (ROOT / f"{script}.py").read_text()
    for hunk in diff.split("@@\n"):
        lines = hunk.splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if line[0] in " -")
        new = "".join(line[1:] for line in lines if line[0] in " +")
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    module = types.ModuleType(script)
    exec(text.replace('__name__ == "__main__"', "False"), module.__dict__)
    return module


@pytest.mark.parametrize(("section", "diff"), blocks("diff"), ids=[x for x, _ in blocks("diff")])
def test_a_diff_applies_and_trains(section, diff):
    module = patched(section, diff)
    state, train = start(module, tiny(module))
    before = jax.tree.map(np.array, state.params)
    state, metrics = train(state)
    leaves = zip(jax.tree.leaves(before), jax.tree.leaves(state.params), strict=True)
    assert all((old != np.array(new)).any() for old, new in leaves)
    assert np.isfinite(metrics["optim/grad_norm"]).all()
    for name in re.findall(r'^\+ +"(\w+/\w+)":', diff, re.M):
        assert np.isfinite(metrics[name]).all()


def test_the_deeper_network_has_four_layers_each():
    (diff,) = (x for name, x in blocks("diff") if name == "A deeper network")
    module = patched("A deeper network", diff)
    state, _ = start(module, tiny(module))
    assert len(state.params["params"]) == 2 * 4 + 2


def test_the_lstm_is_that_of_its_equations():
    """Against a loop in NumPy."""
    (diff,) = (x for name, x in blocks("diff") if "LSTM" in name)
    module = patched("An LSTM instead of the GRU", diff)
    x, hidden = jax.random.normal(jax.random.key(0), (5, 3)), np.zeros(2 * 4, np.float32)
    reset = np.array([False, False, True, False, False])
    network = module.GRU(None)
    params = network.init(jax.random.key(1), x, hidden, reset)
    actual = network.apply(params, x, hidden, reset)
    dense, kernel = params["params"]["Dense_0"], params["params"]["kernel"]
    sigmoid = lambda x: 1 / (1 + np.exp(-x))
    output = cell = np.zeros(4)
    for t in range(5):
        if reset[t]:
            output = cell = np.zeros(4)
        gates = x[t] @ dense["kernel"] + dense["bias"] + output @ kernel
        i, f, g, o = np.split(np.array(gates), 4)
        cell = sigmoid(f + 1) * cell + sigmoid(i) * np.tanh(g)
        output = sigmoid(o) * np.tanh(cell)
        assert np.allclose(actual[t], np.concatenate([output, cell]), atol=1e-5)


@pytest.mark.parametrize("number", [0, 1], ids=["a class", "a gymnax environment"])
def test_an_environment_of_your_own_trains(number, monkeypatch):
    module = load_script("ppo_ff")
    monkeypatch.setattr(module, "make_env", module.make_env)
    done = []

    def main(config):
        sizes = {"total_timesteps": 16 * 50, "num_envs": 16, "num_steps": 16, "eval_episodes": 4}
        config = dataclasses.replace(config, num_evals=1, num_minibatches=2, **sizes)
        state, train = start(module, config)
        state, metrics = train(state)
        done.append(np.array(state.eval_return))

    monkeypatch.setattr(module, "main", main)
    _, source = [block for block in blocks("python") if block[0] == "Your own environment"][number]
    exec(source, {})
    assert np.isfinite(done[0]).all()
    assert done[0].max() <= (1 if number == 0 else 500)


def test_a_trained_policy_acts_in_gymnasium(monkeypatch, capsys):
    """The recipe, with a policy that keeps the pole up for a while."""
    import enjoy

    seen = []

    def load_policy(run_dir, greedy):
        seen.append((run_dir, greedy))
        return lambda obs, key: np.int32(obs[2] + obs[3] > 0)  # lean against the fall

    monkeypatch.setattr(enjoy, "load_policy", load_policy)
    (source,) = (x for name, x in blocks("python") if name == "Act with a trained policy")
    exec(source, {})
    assert seen == [("runs/cartpole", True)]
    assert float(capsys.readouterr().out) > 100
    assert gymnasium.__version__


COMMANDS = [
    line.strip()
    for _, block in blocks("bash")
    for line in block.splitlines()
    if "python " in line and not line.strip().startswith("#")
]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_has_options_that_exist(command, monkeypatch):
    words = shlex.split(command.replace("$lr", "1e-3"))
    script, *options = words[words.index("python") + 1 :]
    if script in ("plot.py", "enjoy.py"):
        text = (ROOT / script).read_text()
        assert all(f'"{word}"' in text for word in options if word.startswith("--"))
    else:
        module = load_script(script.removesuffix(".py").replace("my_ppo", "ppo_ff"))
        assert tyro.cli(module.Config, args=options)


def test_every_section_has_something_to_run():
    last = "Hyper-parameters for a new environment"
    assert all("```" in text or name == last for name, text in SECTIONS.items())
