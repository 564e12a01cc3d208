"""The scripts under test, and for each a configuration that compiles and trains in seconds."""

import gc
import importlib
import os
import re
import shutil
import tempfile
from pathlib import Path

# The workers inherit it before they import NumPy: they share the cores, and matrices are small.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import jax
import pytest

# Many tests and their child processes compile the same program: they share a new cache.
CACHE = "JAX_COMPILATION_CACHE_DIR"
OWN_CACHE = CACHE not in os.environ  # in the process that collects; its workers inherit it
if OWN_CACHE:
    os.environ[CACHE] = tempfile.mkdtemp(prefix="jax-cache-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.5"
    jax.config.update("jax_compilation_cache_dir", os.environ[CACHE])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)

# Few tests are about speed: compile in a quarter of the time, to slower programs. The scripts' own
# flag is set here as well, since XLA reads the flags at the first import of an environment.
QUICK, FLAGS = "JAX_DISABLE_MOST_OPTIMIZATIONS", os.environ.get("XLA_FLAGS", "")
SCRIPTS_FLAG = "--xla_cpu_enable_concurrency_optimized_scheduler=false"
QUICK_FLAG = "--xla_cpu_use_fusion_emitters=false"
if SCRIPTS_FLAG not in FLAGS:
    FLAGS += f" {SCRIPTS_FLAG}"
if jax.__version__.startswith("0.10.") and QUICK_FLAG not in FLAGS:  # others may not know it
    FLAGS += f" {QUICK_FLAG}"
os.environ.update({QUICK: "true", "XLA_FLAGS": FLAGS})
jax.config.update("jax_disable_most_optimizations", True)

# They import environments, so they come after the flags.
import xminigrid.environment
from xminigrid.core.goals import AgentOnTileGoal
from xminigrid.envs.minigrid.empty import Empty, EmptyRandom

# Nobody reads where in the source an operation of these programs comes from.
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"
jax.config.update("jax_traceback_in_locations_limit", 0)

# Tracing makes many small objects and no garbage: with the usual threshold of 700, a sixth of the
# time goes to looking for some.
gc.set_threshold(200_000, 20, 100)

ROOT = Path(__file__).parent.parent
SCRIPTS = [path.stem for path in sorted(ROOT.glob("ppo_*.py"))]
SCRIPTS.remove("ppo_drift")  # but for its loss it is ppo_ff; see test_drift.py
SCRIPTS.remove("ppo_meta")  # but for its trials it is ppo_rnn; see test_meta.py
SCRIPTS.remove("ppo_vtrace")  # see test_vtrace.py


# XLand-MiniGrid compiles all kinds of rules and goals, for seconds. An empty room has no rules, and
# one goal: test_xland.py compares the steps.
WITHOUT_RULES = {
    "check_rule": lambda rules, grid, agent, action, position: (grid, agent),
    "check_goal": lambda goal, *state: AgentOnTileGoal.decode(goal)(*state),
}
step_with_rules = xminigrid.environment.Environment.step


def step_without_rules(self, params, timestep, action):
    with pytest.MonkeyPatch.context() as patch:
        for name, function in WITHOUT_RULES.items():
            patch.setattr(xminigrid.environment, name, function)
        return step_with_rules(self, params, timestep, action)


Empty.step = EmptyRandom.step = step_without_rules

SMALL = {
    "total_timesteps": 128,
    "num_envs": 4,
    "num_steps": 4,
    "update_epochs": 2,
    "num_minibatches": 2,
    "hidden_size": 4,
    "lr": 2.5e-4,
    "num_evals": 2,
    "eval_episodes": 4,
}
TINY = {  # what differs from SMALL
    "ppo_ff": {},
    "ppo_drift": {},
    "ppo_continuous": {},
    "ppo_obs_norm": {},
    "ppo_vtrace": {"num_minibatches": 1},
    "ppo_rnn": {
        "env_id": "MiniGrid-Empty-5x5",
        "env_params": '{"max_steps": 16, "view_size": 3}',
        "embedding_size": 2,
        "conv_size": 2,
        "head_size": 4,
    },
}
TINY["ppo_meta"] = TINY["ppo_rnn"]


# `pytest --slow` runs these as well: they repeat with another script or option what a test of the
# same name has shown, or take most of a minute. Beginnings of names, or a script: ppo_obs_norm.py
# acts and learns as ppo_continuous.py does.
SLOW = """
test_against: test_each_agent_is_played_by_its_own_run[pair1
test_brax: test_a_video_holds_every_state[ppo_continuous
test_brax: test_double_precision_leaves_every_type_as_it_is
test_brax: test_episodes_are_those_of_the_unwrapped_environment[ppo_continuous-1000
test_brax: test_episodes_are_those_of_the_unwrapped_environment[ppo_obs_norm
test_cli: test_a_finished_run_can_be_extended[ppo_obs_norm
test_cli: test_a_run_writes_its_folder_and_nothing_else[ppo_obs_norm
test_cli: test_a_run_writes_its_folder_and_nothing_else[ppo_rnn
test_cli: test_every_option_changes_the_program[ppo_rnn
test_cli: test_the_first_line_says_how_long_training_is[ppo_obs_norm
test_cli: test_the_first_line_says_how_long_training_is[ppo_rnn
test_disco: test_any_option_may_change_when_a_run_is_continued
test_disco: test_evaluations_have_random_keys_of_their_own
test_disco: test_the_rule_is_the_original[float32
test_disco: test_three_updates[synthetic-1
test_disco: test_updates_wait_for_the_replay_and_then_change_everything[{'env_id'
test_disco_meta: test_ctrl_c_is_one_line_even_during_the_imports
test_disco_meta: test_environments_of_gymnax_train_too_even_where_jax_computes_in_double_precision
test_disco_meta: test_the_meta_gradient_is_that_of_finite_differences[one-large
test_disco_meta: test_the_meta_gradient_is_that_of_finite_differences[two-small
test_drift: test_the_penalty_takes_a_new_coefficient_when_a_run_is_continued
test_enjoy: test_a_picture_moves_with_its_state[MiniGrid
test_enjoy: test_a_picture_of_many_agents_moves_with_its_state[HeuristicEnemySMAX
test_enjoy: test_a_picture_of_many_agents_moves_with_its_state[MPE_simple_facmac
test_enjoy: test_a_picture_of_many_agents_moves_with_its_state[MPE_simple_tag_v3
test_enjoy: test_a_picture_of_many_agents_moves_with_its_state[overcooked
test_enjoy: test_a_policy_acts_outside_of_its_script[disco
test_enjoy: test_a_policy_acts_outside_of_its_script[ppo_meta
test_enjoy: test_a_policy_acts_outside_of_its_script[ppo_obs_norm
test_enjoy: test_a_policy_acts_outside_of_its_script[ppo_vtrace
test_enjoy: test_a_report_has_each_agent_or_episode_of_a_trial[ppo_meta
test_enjoy: test_replayed_returns_are_those_of_the_runs_evaluation[ppo_rnn
test_enjoy: test_the_absolute_metric_is_of_the_kind_of_an_evaluation[ppo_meta
test_enjoy: test_the_parts_of_a_return_are_those_of_a_recording[ppo_meta
test_env_navix: test_steps_are_those_of_navix[Navix-DoorKey-Random
test_env_navix: test_two_updates
test_invariants: [ppo_continuous
test_invariants: test_a_final_observation_of_nan_is_not_used[ppo_drift
test_invariants: test_a_final_observation_of_nan_is_not_used[ppo_obs_norm
test_invariants: test_double_precision_leaves_every_type_as_it_is[disco_meta
test_invariants: test_first_minibatch_has_ratio_one[ppo_obs_norm
test_invariants: test_gymnax_environment[ppo_obs_norm-CartPole
test_invariants: test_gymnax_environment[ppo_obs_norm-FrozenLake
test_invariants: test_sweep_over_traced_numbers_is_that_of_separate_runs[ppo_rnn
test_invariants: test_the_explained_variance_is_the_mean_of_the_devices[ippo
test_invariants: test_training_is_deterministic[ppo_ff
test_invariants: test_training_is_deterministic[ppo_rnn
test_invariants: test_two_seeds_of_breakout_finish
test_ippo: test_a_killed_run_continues_to_the_same_bytes[env1
test_ippo: test_advantages_are_normalized_over_agents_that_have_not_left[True
test_ippo: test_environments_of_jaxmarl_train[HeuristicEnemySMAX
test_ippo: test_environments_of_jaxmarl_train[MPE_simple_facmac_v1
test_ippo: test_environments_of_jaxmarl_train[MPE_simple_speaker_listener_v4
test_ippo: test_environments_of_jaxmarl_train[overcooked_v2
test_ippo: test_environments_of_jaxmarl_train[storm_2p
test_ippo: test_nothing_is_learned_from_an_agent_that_has_left[True
test_ippo: test_permuting_the_agents_permutes_the_results[True
test_ippo: test_rings_is_learned[True
test_ippo: test_the_time_limit_of_mabrax_is_found_and_its_final_observation_kept
test_ippo: test_the_time_limit_of_smax_is_no_termination[HeuristicEnemySMAX/3m
test_ippo: test_the_time_limit_of_storm_is_no_termination_and_every_agent_acts[storm
test_ippo: test_who_has_won_is_what_jaxmarl_says[HeuristicEnemySMAX
test_ippo_rnn: test_a_cue_is_passed_on_and_remembered[gru
test_ippo_rnn: test_a_killed_run_continues_to_the_same_bytes[False-lstm
test_ippo_rnn: test_acting_is_the_replay_of_whole_episodes[(True
test_ippo_rnn: test_continuous_actions_reach_their_aim[lstm
test_ippo_rnn: test_nothing_is_learned_from_an_agent_that_has_left[True-gru
test_ippo_rnn: test_permuting_the_agents_permutes_the_results[True-gru
test_ippo_rnn: test_without_memory_nobody_remembers_a_cue
test_learning: test_four_devices_learn_what_one_learns
test_learning: test_learns[Empty
test_learning: test_learns[Pendulum]
test_learning: test_most_seeds_find_a_rare_goal
test_mappo: test_a_killed_run_continues_to_the_same_bytes[True-gru
test_mappo: test_a_single_agent_learns_as_in_ippo_rnn[gru
test_mappo: test_a_value_that_needs_what_others_see[100.0
test_mappo: test_continuous_actions_reach_their_aim
test_mappo: test_permuting_the_agents_permutes_the_results[False-lstm
test_meta: test_a_killed_run_continues_to_the_same_bits
test_meta: test_a_recording_holds_a_whole_trial
test_meta: test_a_trial_is_so_many_episodes_of_one_task[layouts
test_meta: test_a_trial_of_so_many_steps
test_numerics: [ppo_obs_norm
test_numerics: test_every_epoch_takes_every_sample_once_in_a_new_order[ppo_continuous
test_numerics: test_every_epoch_takes_every_sample_once_in_a_new_order[ppo_ff
test_numerics: test_gradients_are_clipped_by_their_global_norm[ppo_continuous
test_numerics: test_steps_are_those_of_adam_with_the_learning_rate_of_the_schedule[ppo_continuous
test_numerics: test_steps_are_those_of_adam_with_the_learning_rate_of_the_schedule[ppo_rnn
test_obs_norm: test_catch_is_learned
test_obs_norm: test_discrete_actions_train[Breakout
test_obs_norm: test_discrete_actions_train[FrozenLake
test_patches: test_a_masked_action_is_never_taken[ppo_drift
test_patches: test_scalars_of_the_environment_are_those_at_the_ends_of_episodes[ippo
test_patches: test_scalars_of_the_environment_are_those_at_the_ends_of_episodes[ppo_continuous
test_patches: test_scalars_of_the_environment_are_those_at_the_ends_of_episodes[ppo_drift
test_patches: test_scalars_of_the_environment_are_those_at_the_ends_of_episodes[ppo_rnn
test_patches: test_the_beta_policy_trains[ppo_continuous
test_patches: test_the_beta_policy_trains[ppo_obs_norm
test_patches: test_vtrace_with_a_weighted_reward
test_probes: test_action_reaches_the_environment_in_its_units[ppo_continuous-gaussian
test_probes: test_action_reaches_the_environment_in_its_units[ppo_obs_norm
test_probes: test_memory_of_a_cue[False
test_probes: test_normalized_observations_with_discrete_actions
test_probes: test_value_is_discounted[ppo_continuous
test_probes: test_value_is_discounted[ppo_rnn
test_probes: test_value_of_a_constant_reward[ppo_continuous
test_probes: test_value_of_a_constant_reward[ppo_obs_norm
test_probes: test_value_of_a_constant_reward[ppo_rnn
test_recipes: test_a_diff_applies_and_trains[A deeper network
test_recipes: test_a_diff_applies_and_trains[An LSTM
test_report: test_every_change_of_the_text_is_another_program[ppo_obs_norm
test_report: test_every_change_of_the_text_is_another_program[ppo_rnn
test_resume: test_a_killed_run_ends_in_the_same_bits[disco
test_resume: test_a_killed_run_ends_in_the_same_bits[ippo
test_resume: test_ctrl_c_names_the_folder
test_style: test_the_script_can_be_pasted[disco
test_tools: test_a_notebook_runs_from_top_to_bottom[disco
test_tools: test_a_notebook_runs_from_top_to_bottom[quickstart
test_tools: test_a_notebook_runs_from_top_to_bottom[sweep
test_tools: test_a_notebook_runs_from_top_to_bottom[xland
test_vtrace: test_an_interrupted_run_continues_to_the_same_bits
test_vtrace: test_options_change_what_is_trained
test_vtrace: test_two_devices_learn_what_one_learns_from_the_environments_of_both
test_xland: test_an_empty_room_needs_no_rules[MiniGrid-EmptyRandom
test_xland: test_trains_on_a_benchmark[options0
test_xland: test_trains_on_a_benchmark[options1
"""
SLOW = [line.split(": ") for line in SLOW.strip().splitlines()]


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="run the repetitions, too")


def pytest_collection_modifyitems(config, items):
    """Two workers take file after file: short ones at the end keep both busy."""
    short = ("brax", "drift", "numerics", "obs_norm", "packaging", "patches", "processes", "report")
    items.sort(key=lambda item: item.path.stem.removeprefix("test_") in short)
    if config.getoption("slow"):
        return

    def is_slow(item, file, name):
        part = "[" + item.name.partition("[")[2] if name.startswith("[") else item.name
        return item.path.stem == file and part.startswith(name)

    slow = [item for item in items if any(is_slow(item, *entry) for entry in SLOW)]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if item not in slow]


def pytest_unconfigure():
    if OWN_CACHE:
        shutil.rmtree(os.environ[CACHE], ignore_errors=True)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """A program is found in the cache if all flags are the same; every script adds one."""
    os.environ["XLA_FLAGS"] = f"{FLAGS} {SCRIPTS_FLAG}"


def load_script(name):
    flags = os.environ["XLA_FLAGS"]
    module = importlib.import_module(name)
    os.environ["XLA_FLAGS"] = flags
    return module


def for_a_process(**variables):
    """The environment variables of a process that imports one script."""
    flags = os.environ["XLA_FLAGS"].removesuffix(f" {SCRIPTS_FLAG}")
    return {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", **variables}


def with_devices(count):
    """The environment variables of a process with so many emulated devices."""
    environment = for_a_process()
    environment["XLA_FLAGS"] += f" --xla_force_host_platform_device_count={count}"
    return environment


def tiny(module, **changes):
    return module.Config(**{**SMALL, **TINY[module.SCRIPT], **changes})


def program(module, config):
    """The jaxpr of `train`."""
    init, train, *_ = getattr(module.make_train, "original", module.make_train)(config)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.PRNGKey(0), jax.local_device_count()))
    state = jax.eval_shape(init, keys)
    return re.sub(r"0x[0-9a-f]+", "", str(jax.make_jaxpr(train)(state)))


@pytest.fixture(scope="module", params=SCRIPTS)
def module(request):
    """Each script in turn, imported."""
    return load_script(request.param)


@pytest.fixture
def full_optimization(monkeypatch):
    """For tests that train long enough for optimized programs to pay off."""
    monkeypatch.delenv(QUICK)
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"].replace(QUICK_FLAG, ""))
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(scope="module", autouse=True)
def forget_compiled_programs():
    """Every program keeps memory mapped, and the kernel limits the number of mappings."""
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture(autouse=True)
def forget_compiled_programs_in_time():
    """The same within a module, once a third of the usual 65530 mappings is taken."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 20_000:
        jax.clear_caches()
        gc.collect()
