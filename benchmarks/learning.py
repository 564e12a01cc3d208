"""Learning curves of the scripts and of their peers, from one declared table.

    python benchmarks/learning.py                            # measure the rows that are missing
    python benchmarks/learning.py --only MinAtar             # rows whose name matches
    python benchmarks/learning.py --ablations                # one detail changed at a time
    python benchmarks/learning.py --clock                    # steps/s of every row, in turns
    python benchmarks/learning.py --report                   # docs/results.md and its pictures
    python benchmarks/learning.py --peers purejaxrl=DIR rejax=DIR    # see peers.md

A row is one system in one environment: a process of its own, and one CSV in benchmarks/results that
names its command, commit, versions and machine. Finished rows are skipped, and interrupted runs
of our scripts continue.
The learning curves may be measured on a busy machine, ours with all seeds in one program. The
clock needs an idle one: steps/s of one seed without evaluation and compilation, every system that
shares a task in turns. Training seconds are environment steps divided by that rate.
"""

import argparse
import csv
import datetime
import json
import os
import re
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
RUNS = ROOT / "runs" / "learning"
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import ablations  # noqa: E402


class Task(NamedTuple):
    """An environment and the systems that learn it."""

    title: str
    threshold: float  # a return; the time to reach it is reported
    seeds: int
    systems: dict[str, str]  # script or peer, and a label after a space: its options
    patches: dict[str, list[tuple[str, str]]] = {}  # of systems: replacements in the script's text
    wins: bool = False  # the curve is the share of training episodes that were won


MINATAR = "--hidden-size 128 --lr 7e-3 --total-timesteps 1e6 --num-evals 40 --eval-episodes 32"
PURE_MINATAR = "LR=5e-3 NUM_ENVS=64 NUM_MINIBATCHES=8 TOTAL_TIMESTEPS=1e6 ACTIVATION=relu"
STOIX_CONTINUOUS = (
    "arch.total_timesteps=5e5 arch.total_num_envs=16 system.actor_lr=1e-3 system.critic_lr=1e-3"
)
XLAND = (
    "rnn_hidden_dim=64 head_hidden_dim=64 num_envs=256 num_steps=64 num_minibatches=8"
    " eval_episodes=16"
)
STOIX_MINATAR = (
    "arch.total_timesteps=1e6 arch.total_num_envs=16 arch.num_eval_episodes=32"
    " system.actor_lr=1e-3 system.critic_lr=1e-3"
)


def discrete(env_id: str, threshold: float, *learning_rates: str) -> Task:
    ours, peer = f"--env-id {env_id} --num-evals 20", f"ENV_NAME={env_id}"
    tuned = {f"purejaxrl LR={lr}": f"{peer} LR={lr}" for lr in learning_rates}
    systems = {"ppo_ff": ours, "ppo_obs_norm": ours, "purejaxrl": peer, **tuned}
    systems["rejax"] = f"{peer} TOTAL_TIMESTEPS=5e5"
    name = {"MountainCar-v0": "mountain_car"}.get(env_id, env_id.split("-")[0].lower())
    stoix = f"env=gymnax/{name} arch.total_timesteps=5e5 arch.total_num_envs=16"
    systems["stoix 16 envs"] = stoix
    systems["cleanrl"] = f"env_id={env_id}"
    if env_id == "Acrobot-v1":
        systems["cleanrl lr 5e-3"] = f"env_id={env_id} learning_rate=5e-3"
    return Task(env_id, threshold, 10, systems)


def continuous(env_id: str, threshold: float, seeds: int = 10) -> Task:
    ours = f"--env-id {env_id} --num-evals 20"
    tanh = {"ppo_continuous tanh": f"{ours} --policy tanh_gaussian"}
    systems = {"ppo_continuous": ours, **tanh, "ppo_obs_norm": ours}
    systems["ppo_continuous beta"] = f"{ours} --policy beta"
    sizes = "NUM_ENVS=16 NUM_STEPS=128 TOTAL_TIMESTEPS=5e5"
    systems["purejaxrl 16 envs"] = f"ENV_NAME={env_id} {sizes}"
    systems["rejax"] = f"ENV_NAME={env_id} TOTAL_TIMESTEPS=5e5"
    name = "pendulum" if env_id == "Pendulum-v1" else "mountain_car_continuous"
    systems["stoix 16 envs lr 1e-3"] = f"env=gymnax/{name} {STOIX_CONTINUOUS}"
    systems["cleanrl"] = f"env_id={env_id} total_timesteps=5e5"
    return Task(env_id, threshold, seeds, systems)


def minatar(game: str, threshold: float, seeds: int = 5) -> Task:
    env_id = f"{game}-MinAtar"
    name = {"SpaceInvaders": "space_invaders"}.get(game, game.lower())
    systems = {
        "ppo_ff": f"--env-id {env_id} {MINATAR}",
        "purejaxrl": f"ENV_NAME={env_id} {PURE_MINATAR}",
        "stoix 16 envs lr 1e-3": f"env=gymnax/{name} {STOIX_MINATAR}",
    }
    return Task(env_id, threshold, seeds, systems)


def minigrid(name: str, threshold: float, options: str = "") -> Task:
    env_id = f"MiniGrid-{name}"
    ours, peer = f"--env-id {env_id}", f"env_id={env_id} {XLAND}"
    systems = {"ppo_rnn": f"{ours} {options}".strip()}
    if name == "MemoryS8":  # no peer: its convolutions leave nothing of a 3 x 3 view
        systems["ppo_rnn no memory"] = f"{ours} {options} --no-memory"
        return Task(env_id, threshold, 5, systems)
    if name == "DoorKey-6x6":
        systems["ppo_rnn min advantage std 1e-8"] = f"{ours} --min-advantage-std 1e-8"
    # As many environments and steps as the peer.
    systems["ppo_rnn 1M steps"] = f"{ours} --total-timesteps 1e6 --num-evals 20"
    if name in ("Empty-6x6", "DoorKey-5x5"):
        systems["xland GRU 64"] = peer
    if name != "Empty-6x6":
        systems["xland GRU 64 lr 3e-3"] = f"{peer} lr=3e-3"
    return Task(env_id, threshold, 5, systems)


def brax(name: str, threshold: float, *scripts: str) -> Task:
    options = f"--env-id brax/{name} --num-envs 64 --total-timesteps 1e6"
    options += " --num-evals 20 --eval-episodes 32"
    systems = dict.fromkeys(scripts, options)
    peer = f"ENV_NAME=brax/{name} TOTAL_TIMESTEPS=1e6"
    purejaxrl = f"{peer} NUM_ENVS=64 NUM_STEPS=128"
    if name == "hopper":
        few = options.replace("--num-envs 64", "--num-envs 16")
        systems["ppo_obs_norm 16 envs gamma 0.995"] = f"{few} --gamma 0.995"
        # Both peers have settings for this task.
        systems |= {"purejaxrl 64 envs": purejaxrl, "rejax": peer}
    else:
        systems["purejaxrl 64 envs LR=1e-3"] = f"{purejaxrl} LR=1e-3"
    return Task(f"brax/{name}", threshold, 5, systems)


def drifts(env_id: str, threshold: float, options: str = "--num-evals 20") -> Task:
    names = ("clip", "kl_penalty", "adaptive_kl", "dpo", "spo")
    options = f"--env-id {env_id} {options}"
    systems = {f"ppo_drift {name}": f"{options} --drift {name}" for name in names}
    return Task(env_id, threshold, 5, systems)


def meta(title: str, threshold: float, options: str, control: str = "") -> Task:
    systems = {
        "ppo_meta": options,
        "ppo_meta reset memory": f"{options}{control} --reset-memory",
        "ppo_meta no memory": f"{options}{control} --no-memory",
    }
    return Task(title, threshold, 3, systems)


def hidden_velocity(env_id: str, threshold: float) -> Task:
    options = f"--env-id {env_id} --hide-velocity --num-evals 20"
    systems = {
        "ppo_vtrace": options,
        "ppo_vtrace no memory": f"{options} --no-memory",
        "ppo_vtrace uniform draw": f"{options} --priority-alpha 0",
    }
    return Task(f"{env_id} without velocity", threshold, 5, systems | off_policy(options))


def off_policy(options: str) -> dict[str, str]:
    """Eight epochs of all segments, with V-trace and without."""
    options += " --draw-fraction 1 --num-minibatches 16 --priority-alpha 0"
    once = f"{options} --no-recompute-advantages"
    return {"ppo_vtrace all segments": options, "ppo_vtrace all segments GAE once": once}


ACTOR_CRITIC = "--rule actor_critic --lr 5e-4 --ent-coef 0.2 --vf-coef 0.5"
POLICY_GRADIENT = "--rule policy_gradient --lr 1e-3 --ent-coef 0.01 --vf-coef 0"
RINGS = "--env-id rings --total-timesteps 2e5 --eval-episodes 1280"
PLACES = (
    "--env-id XLand-MiniGrid-R1-9x9 --benchmark-id runs/places.bz2"
    """ --env-params '{"height": 6, "width": 6, "max_steps": 12}'"""
    " --total-timesteps 6e6 --num-evals 20 --eval-episodes 2048"
)
ACROBOT = "--env-id Acrobot-v1 --num-evals 20"
SPREAD = "--env-id MPE_simple_spread_v3"
REFERENCE = "--env-id MPE_simple_reference_v3"
JAXMARL_REFERENCE = "TOTAL_TIMESTEPS=1e6 ENV_NAME=MPE_simple_reference_v3"
SMAX_3M = "--env-id HeuristicEnemySMAX/3m"
SMAX_2S3Z = "--env-id HeuristicEnemySMAX/2s3z"
JAXMARL_3M = "MAP_NAME=3m TOTAL_TIMESTEPS=1e6"
COIN_GAME = """--env-id coin_game --env-params '{"shared_rewards": true}'"""
LONG = "--actor-epochs 4 --critic-epochs 4 --ent-coef 0"
SECTIONS = {
    "Classic control": [
        discrete("CartPole-v1", 475),
        discrete("Acrobot-v1", -100, "1e-3", "5e-3"),
        discrete("MountainCar-v0", -130, "1e-3", "5e-3"),
    ],
    "Continuous actions": [
        continuous("Pendulum-v1", -200, seeds=32),
        continuous("MountainCarContinuous-v0", 90),
    ],
    "Brax": [
        brax("inverted_double_pendulum", 5000, "ppo_continuous", "ppo_obs_norm", "ppo_vtrace"),
        brax("hopper", 1500, "ppo_continuous", "ppo_obs_norm"),
    ],
    "MinAtar": [
        minatar("Breakout", 20, seeds=20),
        minatar("Asterix", 2),
        minatar("SpaceInvaders", 70),
        minatar("Freeway", 28),
    ],
    "Drifts": [
        drifts("CartPole-v1", 475),
        drifts("Acrobot-v1", -100),
        drifts("Breakout-MinAtar", 20, MINATAR),
    ],
    "MiniGrid": [
        minigrid("Empty-6x6", 0.94, "--num-envs 8192"),
        minigrid("EmptyRandom-8x8", 0.94),
        minigrid("DoorKey-5x5", 0.94),
        minigrid("DoorKey-6x6", 0.94),
        minigrid("Unlock", 0.94),
        minigrid("UnlockPickUp", 0.9, "--total-timesteps 1e7"),
        minigrid("FourRooms", 0.6, "--total-timesteps 1e7"),
        minigrid("MemoryS8", 0.9, "--total-timesteps 1e7 --update-epochs 4 --num-steps 32"),
    ],
    "V-trace": [
        hidden_velocity("Pendulum-v1", -250),
        hidden_velocity("CartPole-v1", 475),
        Task("Acrobot-v1", -100, 5, {"ppo_vtrace": ACROBOT, **off_policy(ACROBOT)}),
    ],
    "Meta-learning": [
        meta("MiniGrid-MemoryS8 trials", 0.8, "--num-evals 20 --eval-episodes 2048"),
        meta("Which place pays", 0.4, PLACES, control=" --total-timesteps 3e6"),
    ],
    "Several agents": [
        Task("rings", 2.8, 10, {"ippo": RINGS}),
        Task(
            "MPE_simple_spread_v3",
            -60,
            5,
            {
                "ippo": SPREAD,
                "ippo 4 epochs": f"{SPREAD} --actor-epochs 4 --critic-epochs 4",
                "jaxmarl ippo_ff": "TOTAL_TIMESTEPS=1e6",
                "jaxmarl ippo_ff LR=5e-3": "TOTAL_TIMESTEPS=1e6 LR=5e-3",
                "ippo_rnn": SPREAD,
                "ippo_rnn 4 epochs": f"{SPREAD} --actor-epochs 4 --critic-epochs 4",
                "mappo": SPREAD,
                "mappo 4 epochs": f"{SPREAD} --actor-epochs 4 --critic-epochs 4",
                "jaxmarl ippo_rnn": "SCRIPT=ippo_rnn_mpe TOTAL_TIMESTEPS=1e6",
                "jaxmarl ippo_rnn LR=5e-3": "SCRIPT=ippo_rnn_mpe TOTAL_TIMESTEPS=1e6 LR=5e-3",
                "jaxmarl mappo_rnn": "SCRIPT=mappo_rnn_mpe TOTAL_TIMESTEPS=1e6",
            },
        ),
        Task(
            "MPE_simple_reference_v3",
            -40,
            5,
            {
                "ippo": REFERENCE,
                "ippo_rnn": REFERENCE,
                "mappo": REFERENCE,
                "mappo 4 epochs": f"{REFERENCE} --actor-epochs 4 --critic-epochs 4",
                "jaxmarl ippo_rnn": f"SCRIPT=ippo_rnn_mpe {JAXMARL_REFERENCE}",
                "jaxmarl ippo_rnn LR=5e-3": f"SCRIPT=ippo_rnn_mpe {JAXMARL_REFERENCE} LR=5e-3",
                "jaxmarl mappo_rnn": f"SCRIPT=mappo_rnn_mpe {JAXMARL_REFERENCE}",
            },
        ),
        Task(
            "coin_game with shared rewards",
            110,
            5,
            {"ippo": COIN_GAME, "ippo_rnn": COIN_GAME, "mappo": COIN_GAME},
        ),
        Task(
            "HeuristicEnemySMAX/3m",
            0.7,
            5,
            {
                "ippo_rnn": SMAX_3M,
                "ippo_rnn 4 epochs without entropy bonus": f"{SMAX_3M} {LONG}",
                "mappo": SMAX_3M,
                "mappo 4 epochs without entropy bonus": f"{SMAX_3M} {LONG}",
                "jaxmarl ippo_rnn": f"SCRIPT=ippo_rnn_smax {JAXMARL_3M}",
                "jaxmarl mappo_rnn": f"SCRIPT=mappo_rnn_smax {JAXMARL_3M}",
                "jaxmarl mappo_rnn LR=4e-3": f"SCRIPT=mappo_rnn_smax {JAXMARL_3M} LR=4e-3",
            },
            wins=True,
        ),
        Task(
            "HeuristicEnemySMAX/2s3z",
            0.7,
            5,
            {
                "ippo_rnn 4 epochs without entropy bonus": f"{SMAX_2S3Z} {LONG}",
                "mappo 4 epochs without entropy bonus": f"{SMAX_2S3Z} {LONG}",
                "jaxmarl ippo_rnn": "SCRIPT=ippo_rnn_smax MAP_NAME=2s3z TOTAL_TIMESTEPS=1e6",
                "jaxmarl mappo_rnn": "SCRIPT=mappo_rnn_smax MAP_NAME=2s3z TOTAL_TIMESTEPS=1e6",
            },
            wins=True,
        ),
    ],
    "Discovered rule": [
        Task(
            "Catch-8x8",
            0.9,
            5,
            {
                "disco": "",
                "disco random": "--weights random",
                "disco policy_gradient": f"{POLICY_GRADIENT} --total-timesteps 3e4",
                "disco actor_critic": f"{ACTOR_CRITIC} --total-timesteps 3e4",
            },
        ),
    ],
}


def ablate(title: str, system: str, changes: dict, seeds: int = 5) -> Task:
    """The system, which is a row of the task of that title, and each change."""
    base = next(task for tasks in SECTIONS.values() for task in tasks if task.title == title)
    options = base.systems[system]
    systems, patches = {system: options}, {}
    for label, change in changes.items():
        name = f"{system} {label}"
        is_option = isinstance(change, str)
        systems[name] = f"{options} {change}" if is_option else options
        if not is_option:
            patches[name] = change
    return base._replace(seeds=seeds, systems=systems, patches=patches)


ABLATIONS = [
    ablate("Acrobot-v1", "ppo_ff", ablations.PPO | ablations.ENTROPY),
    ablate("Breakout-MinAtar", "ppo_ff", ablations.ENTROPY, seeds=20),
    ablate("Asterix-MinAtar", "ppo_ff", ablations.PPO | ablations.CNN | ablations.ENTROPY),
    ablate("SpaceInvaders-MinAtar", "ppo_ff", ablations.ENTROPY),
    ablate("Freeway-MinAtar", "ppo_ff", ablations.ENTROPY),
    ablate("Pendulum-v1", "ppo_obs_norm", ablations.PPO | ablations.NORMALIZATION),
    ablate("MiniGrid-DoorKey-5x5", "ppo_rnn", ablations.MEMORY),
    ablate("MiniGrid-MemoryS8", "ppo_rnn", ablations.MEMORY),
]
PEERS = {
    "purejaxrl": "PureJaxRL 31756b1, `ppo.py`, `ppo_continuous_action.py` (training returns)",
    "rejax": "rejax d751095, `PPO` (evaluations)",
    "stoix": "Stoix 8fff19c, Anakin `ff_ppo.py`, `ff_ppo_continuous.py` (evaluations)",
    "cleanrl": "CleanRL fe8d8a03, `ppo.py`, `ppo_continuous_action.py` (training returns)",
    "xland": "XLand-MiniGrid 0d306d1, `train_single_task.py` (evaluations)",
    "jaxmarl": (
        "JaxMARL c793d09, `ippo_ff_mpe.py`, `ippo_rnn_mpe.py`, `mappo_rnn_mpe.py`,"
        " `ippo_rnn_smax.py`, `mappo_rnn_smax.py` (training)"
    ),
}
PEER_RETURNS = {
    "purejaxrl": "of training, means of intervals",
    "rejax": "evaluations on full fresh episodes",
    "stoix": "evaluations on full fresh episodes",
    "cleanrl": "of training, means of intervals",
    "xland": "evaluations on full fresh episodes",
    "jaxmarl": "of the team in training, means of intervals",
}
PEER_PACKAGES = {  # named in the CSV besides those of all systems
    "stoix": ["stoa-env"],
    "cleanrl": ["torch", "gymnasium"],
    "xland": ["xminigrid"],
    "jaxmarl": ["jaxmarl"],
}
ENV_PACKAGES = {  # the same, by the beginning of a task's title
    "MiniGrid": "xminigrid",
    "Which place pays": "xminigrid",
    "brax": "brax",
    "MPE": "jaxmarl",
    "HeuristicEnemySMAX": "jaxmarl",
    "coin_game": "jaxmarl",
}
SEEDS = {  # of what is slow
    r"__disco-random": 3,
    r"^Pendulum-v1__cleanrl|^MountainCarContinuous-v0__(cleanrl|stoix)": 3,
    r"^Pendulum-v1__stoix": 10,
}


class Row(NamedTuple):
    task: Task
    system: str

    @property
    def kind(self) -> str:
        return self.system.split()[0]

    @property
    def is_peer(self) -> bool:
        return not (ROOT / f"{self.kind}.py").exists()

    @property
    def name(self) -> str:
        return f"{self.task.title}__{self.system}".replace("/", "-").replace(" ", "-")

    @property
    def words(self) -> list[str]:
        return shlex.split(self.task.systems[self.system])

    @property
    def seeds(self) -> int:
        fewer = [count for name, count in SEEDS.items() if re.search(name, self.name)]
        return fewer[0] if fewer else self.task.seeds

    @property
    def returns(self) -> str:
        """What the curve holds."""
        if self.task.wins:
            return "win rates of training, means of intervals"
        return PEER_RETURNS.get(self.kind, "evaluations on full fresh episodes")

    @property
    def settings(self) -> str:
        return f"{' '.join(self.words)}, {self.seeds} seeds"

    @property
    def command(self) -> str:
        if self.is_peer:
            return f"python benchmarks/learning.py --only '{self.name}$' --peers {self.kind}=DIR"
        return f"python {self.kind}.py {shlex.join([*self.words, '--num-seeds', str(self.seeds)])}"


def all_rows(pattern: str, tasks: list[Task] | None = None) -> list[Row]:
    tasks = tasks or [task for tasks in SECTIONS.values() for task in tasks]
    rows = [Row(task, system) for task in tasks for system in task.systems]
    return [row for row in rows if re.search(pattern, row.name)]


# -------------------------------------------- measure
def make_places(row: Row):
    """Write the tasks of `Which place pays` once."""
    places = "runs/places.bz2"
    if places in row.words and not (ROOT / places).exists():
        command = [sys.executable, "benchmarks/make_rulesets.py", places]
        subprocess.run(command, cwd=ROOT, check=True)


def run_ours(row: Row) -> tuple[np.ndarray, list[str]]:
    """Evaluations [K, 3 + E]: seed, environment steps, return, and those of E episodes of a trial.

    Also returns the names of the last E columns.
    """
    make_places(row)
    run_dir = RUNS / row.name
    words = [*row.words, "--num-seeds", str(row.seeds), "--run-dir", str(run_dir)]
    script = ROOT / f"{row.kind}.py"
    if row.system in row.task.patches:
        text = ablations.change_text(script.read_text(), row.task.patches[row.system])
        script = RUNS / f"{row.name}.py"
        script.write_text(text)
    subprocess.run([sys.executable, "-W", "ignore", script, *words], cwd=ROOT, check=True)
    with open(run_dir / "metrics.csv", newline="") as file:
        table = list(csv.DictReader(file))
    if row.task.wins:
        steps = np.unique([float(x["env_steps"]) for x in table])
        won = np.array([float(x["env/won"] or "nan") for x in table])
        return intervals(steps, won.reshape(len(steps), -1)), []
    rows = [row for row in table if row["eval/return"]]
    episodes = [name for name in rows[0] if name.startswith("eval/return/")]
    names = ["seed", "env_steps", "eval/return", *episodes]
    curve = np.array([[float(x[name]) for name in names] for x in rows])
    return curve, [name.removeprefix("eval/return/") for name in episodes]


def intervals(steps: np.ndarray, values: np.ndarray, points: int = 50) -> np.ndarray:
    """Means in `points` intervals [K, 3] of values [U, S]: seed, environment steps, value."""
    curve = []
    for part in np.array_split(np.arange(len(steps)), points):
        for seed in range(values.shape[1]):
            if np.isfinite(values[part, seed]).any():
                curve.append([seed, steps[part[-1]], np.nanmean(values[part, seed])])
    return np.array(curve)


def run_peer(row: Row, path: Path) -> np.ndarray:
    """Mean training returns in intervals [K, 3]: seed, environment steps, return."""
    env = dict(os.environ)
    # Works around an XLA:CPU deadlock with vmapped loops.
    env["XLA_FLAGS"] = "--xla_cpu_enable_concurrency_optimized_scheduler=false"
    out = RUNS / f"{row.name}.npz"
    task = json.dumps([row.kind, str(path), row.words, row.seeds, str(out)])
    subprocess.run([sys.executable, "-W", "ignore", __file__, "--learn", task], env=env, check=True)
    arrays = np.load(out)
    return intervals(arrays["steps"], arrays["returns"])  # [U], [U, S]


def learn(kind: str, path: str, words: list[str], seeds: int, out: str):
    import peers

    steps, returns = getattr(peers, f"{kind}_curve")(path, peers.parse(words), seeds)
    np.savez(out, steps=steps, returns=returns)


def versions(row: Row) -> str:
    names = ["jax", "flax", "optax", "gymnax", *PEER_PACKAGES.get(row.kind, [])]
    names += [x for title, x in ENV_PACKAGES.items() if row.task.title.startswith(title)]
    names = dict.fromkeys(names)
    return ", ".join(f"{name} {version(name)}" for name in names)


def commit(row: Row) -> str:
    git = ["git", "-C", str(ROOT)]
    script = "benchmarks/peers.py" if row.is_peer else f"{row.kind}.py"
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", script]).returncode
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return head.stdout.strip() + " with changes" * changed


def check_peer(kind: str, path: Path):
    """The CSV names the commit in PEERS, so the checkout must be at it."""
    git = ["git", "-C", str(path), "rev-parse", "--short=40", "HEAD"]
    head = subprocess.run(git, capture_output=True, text=True).stdout
    wanted = re.search(r"[0-9a-f]{7,}", PEERS[kind])[0]
    if not head.startswith(wanted):
        sys.exit(f"error: {path} is at {head[:8] or 'no commit'}, not at {wanted} (peers.md)")


def change_lines(row: Row) -> list[str]:
    """The replacements in the script's text, one line each."""
    patches = row.task.patches.get(row.system, [])
    return [f"{json.dumps(old)} -> {json.dumps(new)}" for old, new in patches]


def measure(rows: list[Row], peers: dict[str, Path]):
    RUNS.mkdir(parents=True, exist_ok=True)
    RESULTS.mkdir(exist_ok=True)
    for row in rows:
        path = RESULTS / f"{row.name}.csv"
        if path.exists() or (row.is_peer and row.kind not in peers):
            continue
        print(row.command, flush=True)
        about = [
            f"# command: {row.command}",
            f"# commit: {commit(row)}",
            f"# versions: {versions(row)}",
            f"# machine: {cpu_model()}",
        ]
        if row.is_peer:
            check_peer(row.kind, peers[row.kind])
            about += [f"# peer: {PEERS[row.kind]}"]
            about += [f"# settings: {row.settings}"]
            about += [f"# returns: {row.returns}"]
            curve, episodes = run_peer(row, peers[row.kind]), []
        else:
            about += [f"# change: {x}" for x in change_lines(row)]
            about += [f"# returns: {row.returns}"]
            curve, episodes = run_ours(row)
        header = ",".join(["seed", "env_steps", "return", *episodes])
        lines = [
            ",".join([f"{seed:.0f}", f"{steps:.0f}", *(f"{x:.6g}" for x in values)])
            for seed, steps, *values in curve
        ]
        path.write_text("\n".join([*about, header, *lines, ""]))


def cpu_model() -> str:
    names = re.findall(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    return f"{len(names)} x {names[0]}"


def clock(rows: list[Row], peers: dict[str, Path], rounds: int):
    """Steps/s of one seed without evaluation, the systems of a task in turns."""
    import speed

    path = RESULTS / "clock.csv"
    text = path.read_text().splitlines() if path.exists() else []
    table = {row["name"]: row for row in csv.DictReader(text)}
    rows = [row for row in rows if not row.is_peer or row.kind in peers]
    for task in dict.fromkeys(row.task.title for row in rows):
        turns = [row for row in rows if row.task.title == task]
        results = {row.name: [] for row in turns}
        for row in turns:
            make_places(row)
        for _ in range(rounds):
            for row in turns:
                arguments = ("clock_ours", row.kind, row.words)
                if row.is_peer:
                    arguments = (f"{row.kind}_clock", str(peers[row.kind]), row.words)
                results[row.name].append(speed.in_a_process(*arguments))
        for name, measured in results.items():
            merged = speed.merge(measured)
            print(name, merged, flush=True)
            if merged["error"]:
                continue
            table[name] = {
                "name": name,
                "steps_per_second": f"{merged['median']:.0f}",
                "min": f"{merged['min']:.0f}",
                "max": f"{merged['max']:.0f}",
                "compile_seconds": f"{merged['compile']:.1f}",
                "commit": commit(next(row for row in turns if row.name == name)),
                "date": datetime.date.today().isoformat(),
                "machine": cpu_model(),
            }
            with open(path, "w", newline="") as file:
                writer = csv.DictWriter(file, table[name], lineterminator="\n")
                writer.writeheader()
                writer.writerows(table[key] for key in sorted(table))


# ----------------------------------------------- main
def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="rows whose name matches this expression")
    parser.add_argument("--ablations", action="store_true", help="measure the ablations")
    parser.add_argument("--clock", action="store_true", help="measure steps/s")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each system's clock")
    parser.add_argument("--report", action="store_true", help="write docs/results.md")
    parser.add_argument("--peers", nargs="*", default=[], metavar="NAME=DIR", help="see peers.md")
    parser.add_argument("--learn", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.learn:
        return learn(*args.learn)
    peers = {name: Path(path).resolve() for name, path in (x.split("=") for x in args.peers)}
    if args.report:
        import report

        report.write()
    elif args.clock:
        clock(all_rows(args.only), peers, args.rounds)
    else:
        rows = all_rows(args.only)
        if args.ablations:  # what they are compared with is measured without this option
            known = {row.name for row in all_rows("")}
            rows = [row for row in all_rows(args.only, ABLATIONS) if row.name not in known]
        measure(rows, peers)


if __name__ == "__main__":
    main()
