"""Pgx in ppo_ff.py: board and card games against an opponent, 2048 and MinAtar.

    pip install pgx==2.6.0
    python environments/pgx_envs.py --env-id connect_four --total-timesteps 2e6
    python environments/pgx_envs.py --env-params '{"opponent": "runs/my_run"}'

Environments: minatar-breakout and other games of one player; connect_four, tic_tac_toe, othello,
go_9x9, backgammon, kuhn_poker and other games of several. `obs` is what the player on move sees,
with the mask of legal actions; boards of planes go through the CNN, the rest is flat. The policy is
player 0, who moves first in half of the games. The others move uniformly at random, or by the best
parameters of the run folder in `opponent`, of the same game. The return of a board game is 1 if it
is won, -1 if it is lost. The end of a game terminates; `time_limit` moves of all players truncate.
"""

import dataclasses
import difflib
import json
import sys
from pathlib import Path

import family
import flax
import jax
import jax.numpy as jnp

import ppo_ff as script

try:
    import pgx
except ImportError:
    family.missing("Pgx", "pgx==2.6.0")


@dataclasses.dataclass(frozen=True)
class Environment(script.Environment):
    """Where agents act. For example: --env-id minatar-breakout --num-envs 128"""

    env_id: str = "connect_four"  # Pgx environment; list: print them
    env_params: str = "{}"  # JSON, e.g. '{"opponent": "runs/my_run", "time_limit": 1000}'
    num_envs: int = 64  # parallel environments per seed, over all devices


@dataclasses.dataclass(frozen=True)
class Algorithm(script.Algorithm):
    """How agents learn. For example: --lr 3e-3"""

    total_timesteps: float = 1e6  # steps per seed, rounded to whole updates per evaluation
    lr: float = 1e-3  # Adam learning rate


@dataclasses.dataclass(frozen=True)
class Config(Algorithm, Environment, script.Config):
    """PPO on Pgx."""


def make_env(config):
    names = pgx.available_envs()
    if config.env_id == "list":
        print(*names, sep="\n")
        sys.exit()
    if config.env_id not in names:
        nearest = " or ".join(difflib.get_close_matches(config.env_id, names, cutoff=0))
        raise script.ConfigError(f"unknown env_id {config.env_id}: did you mean {nearest}?")
    default = {"opponent": "", "time_limit": 10_000}
    try:
        params = default | json.loads(config.env_params)
        if [type(x) for x in params.values()] != [str, int]:
            raise TypeError("an unknown name, or a value of another type")
    except (TypeError, ValueError) as error:
        raise script.ConfigError(f"env_params: {error}; the defaults are {default}") from None
    env = pgx.make(config.env_id)
    opponent = make_opponent(config.env_id, env, params["opponent"])

    def observe(state):
        obs = state.observation
        obs = obs if obs.ndim == 3 else obs.ravel().astype(jnp.float32)
        return {"obs": obs, "mask": state.legal_action_mask}

    def others_move(key, state):
        """Until it is the turn of player 0 or the game is over. Returns the rewards of player 0."""

        def move(carry):
            key, state, reward = carry
            key, action_key, step_key = jax.random.split(key, 3)
            state = env.step(state, opponent(action_key, observe(state)), step_key)
            return key, state, reward + state.rewards[0]

        waiting = lambda carry: (carry[1].current_player != 0) & ~carry[1].terminated
        _, state, reward = jax.lax.while_loop(waiting, move, (key, state, jnp.float32(0)))
        return state, reward

    def reset(key):
        init_key, others_key = jax.random.split(key)
        state, _ = others_move(others_key, env.init(init_key))
        return observe(state), state

    restart = family.lazy(reset)

    def step(key, env_state, action):
        step_key, others_key, reset_key = jax.random.split(key, 3)
        state = env.step(env_state, action, step_key)
        final, reward = others_move(others_key, state)
        next_obs, terminated = observe(final), final.terminated
        truncated = ~terminated & (final._step_count >= params["time_limit"])
        obs, env_state = restart(terminated | truncated, reset_key, (next_obs, final))
        return obs, env_state, state.rewards[0] + reward, terminated, truncated, next_obs

    return reset, step, env.num_actions


def make_opponent(env_id, env, run_dir):
    """Returns opponent(key, obs) -> action: the policy of a run of this file, or a random one."""
    if not run_dir:
        return lambda key, obs: jax.random.categorical(key, jnp.where(obs["mask"], 0, -1e9))
    try:
        run = json.loads(Path(run_dir, "config.json").read_text())
        state = Path(run_dir, "checkpoint.msgpack").read_bytes()
        best = flax.serialization.msgpack_restore(state)["best_params"]
    except (OSError, ValueError) as error:
        raise script.ConfigError(f"env_params: cannot load the opponent: {error}") from None
    if run["env_id"] != env_id:
        raise script.ConfigError(f"env_params: the opponent in {run_dir} plays {run['env_id']}")
    params = jax.tree.map(lambda x: x[0, 0], best)  # of its first seed
    is_image = len(env.observation_shape) == 3
    network = script.ActorCritic(env.num_actions, run["hidden_size"], is_image)
    return lambda key, obs: network.apply(params, obs)[0].sample(seed=key)


family.adapt(script, __file__, Config, make_env)
if __name__ == "__main__":
    script.cli()
