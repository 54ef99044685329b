"""Who runs each command of the site: tests that run pages in order, and for the rest a test that does the same, or why
nobody can here."""

from __future__ import annotations

import re

from tests.documented import PAGES, commands, quick_start

_TASKS = "tests/e2e/test_tasks.py"
FIRST = f"{_TASKS}::test_the_commands_of_the_first_page_and_of_those_that_look_at_its_run_run_one_after_the_other"
PAGE = f"{_TASKS}::test_the_commands_of_a_page_run_one_after_the_other"
LIVE = "tests/e2e/test_quick_starts.py::test_the_commands_for_a_run_that_goes_on_run_beside_one"
_UP = "tests/e2e/test_up.py::test_one_file_brings_up_three_machines_and_a_second_call_changes_nothing"
_THREE = "tests/e2e/test_inviting.py::test_three_commands_make_a_swarm_of_three_hosts"
_CODE = "tests/e2e/test_inviting.py::test_on_a_local_network_a_host_that_has_nothing_joins_by_a_code"
_DISTQAT = "tests/e2e/test_quick_starts.py::test_what_stands_in_place_of_a_quick_start_runs_in_order"
_SERVICE = "tests/unit/cli/remote/test_machine_script.py::test_what_runs_here_is_written_as_a_wheel_beside_the_script"
_CLOUD = "tests/unit/cli/remote/test_deploy.py::test_the_first_node_of_a_cluster_runs_the_client_and_the_others_join_it"
_SMALL = "tests/e2e/test_configs.py::test_a_configuration_trains_in_small_to_its_end"
_MAIL = "tests/unit/monitor/test_notify.py::test_the_program_reads_each_warning_in_order_and_nothing_else"
_CONVERTED = "tests/unit/config/test_distqat.py::test_a_file_is_carried_over_key_by_key"
_CONTINUED = "tests/e2e/test_continuing.py::test_the_printed_line_continues_a_run_and_a_differing_flag_is_named"

IN_ORDER: dict[str, tuple[str, ...]] = {
    f"{PAGE}[own_model]": ("examples/own_model/README.md",),
    f"{PAGE}[your_data]": ("docs/tasks/your_data.md", "examples/own_data/README.md"),
    # Adapters are trained on what the page before has exported.
    f"{PAGE}[transformers]": ("docs/tasks/hugging_face.md", "docs/tasks/adapters.md", "docs/moving.md#pmetal"),
    f"{PAGE}[made_images]": ("docs/tasks/made_images.md",),
    f"{PAGE}[chat]": ("docs/tasks/chat.md",),
    f"{PAGE}[images]": ("docs/tasks/images.md",),
    f"{PAGE}[speech]": ("docs/tasks/speech.md",),
    # The first page makes the sandbox, and what looks at a run, at this one.
    FIRST: (
        "docs/start/one_machine.md",
        "docs/tasks/language_model.md",
        "docs/start/what_you_see.md",
        "docs/monitoring.md",
        "docs/wrong.md",
        "docs/reference/files.md",
        "docs/reference/keys.md",
        "docs/tasks/use_model.md",
        "docs/tasks/own_run.md",
        "docs/reliability.md",
    ),
    LIVE: ("docs/tasks/servers.md", "docs/tasks/steer.md"),
    _DISTQAT: ("docs/moving.md#DistQat",),
    _UP: ("docs/moving.md#smolcluster",),
    _CODE: ("docs/moving.md#MacFleet",),
}
"""What runs pages in their order: all commands of which nothing is said below, and of equal ones the first test has it.
A page's quick start of another system is a page of its own here."""

ELSEWHERE: dict[str, str] = {
    # What goes on.
    r"shoal status( --watch)?( --json)?": LIVE,
    r"shoal doctor( --.*)?": "tests/e2e/test_doctor.py::"
    "test_what_is_wrong_between_two_hosts_is_found_and_a_host_with_nothing_wrong_has_no_finding",
    r"shoal (up|hosts) ?.*": _UP,
    r"shoal invite --code|shoal join( --code.*)?|python start_trainer_client\.py --num-servers 2": _CODE,
    r"python start_trainer_client\.py --invite .*|shoal invite --for 30m": _THREE,
    r"(.* )?shoal join --num-servers 2( .*)?": _THREE,
    r"export INITIAL_PEERS=.*|python start_servers\.py .*--experiment-prefix .*": _DISTQAT,
    r"python start_servers\.py --public-ip .*|python start_trainer_client\.py --public-ip .*": (
        "tests/e2e/test_joining.py::"
        "test_a_server_that_nobody_can_dial_is_named_on_both_terminals_and_found_again_when_it_can"
    ),
    r"python start_trainer_client\.py --notify\.command .*|exec mail .*": _MAIL,
    r"python start_trainer_client\.py --initial-peers .*": _CONTINUED,
    r"python (run_local|start_trainer_client)\.py --resume": "tests/e2e/test_resuming.py::"
    "test_a_run_that_ctrl_c_has_stopped_goes_on_with_what_its_inner_optimizers_knew",
    r"python run_local\.py --resume --diloco.*": "tests/e2e/test_forking.py::"
    "test_a_run_is_forked_with_another_number_of_stages_and_of_rounds",
    r"shoal chaos .*": "tests/e2e/test_chaos.py::test_a_swarm_gets_over_faults_from_a_seed_and_the_verdict_says_so",
    r"python test_failover\.py .*": "tests/e2e/test_failover_script.py::"
    "test_servers_of_a_configuration_of_ones_own_are_killed_one_by_one_at_a_given_address",
    r"shoal key .*": "tests/unit/cli/test_key.py::test_a_key_is_made_once_and_its_fingerprint_shown_without_the_key",
    # What is trained with other keys.
    r"python run_local\.py --baseline": "tests/e2e/test_hosts.py::"
    "test_the_plain_loop_trains_beside_a_client_whose_servers_are_on_another_host",
    r"shoal trainer --run-locally .*": "tests/e2e/test_variants.py::test_the_plain_loop_alone_prints_its_losses",
    r"python run_local\.py .*--num-servers 6 .*": "tests/e2e/test_variants.py::"
    "test_each_server_has_its_threads_and_gives_way_as_told",
    r"python run_local\.py --model-pipeline\.stages 1 .*": "tests/e2e/test_variants.py::"
    "test_a_resnet_trains_in_one_stage_on_images_of_digits",
    r"python run_local\.py --no-param-mirror-enable": "tests/e2e/test_variants.py::"
    "test_a_run_that_need_not_be_repeatable_is_cut_by_what_its_units_take_here",
    r"python run_local\.py --config-path configs/gemma3_270m\.yaml --tiny": "tests/e2e/test_hf.py::"
    "test_a_known_model_in_small_trains_by_its_file_and_speaks_as_transformers_does",
    r"python run_local\.py --config-path configs/biggan_cifar\.yaml --tiny .+": (
        "tests/integration/cluster/test_biggan.py::test_a_gan_is_recorded_replayed_bit_for_bit_and_loaded"
    ),
    r"python run_local\.py --config-path configs/resnet18_split\.yaml": _DISTQAT,
    r"python run_local\.py .*--data\.dataset-name \./clips .*": "tests/e2e/test_speech.py::"
    "test_clips_are_trained_on_in_two_stages_and_the_model_is_evaluated_by_its_characters",
    r"shoal classify .*": "tests/e2e/test_images.py::"
    "test_a_run_on_a_folder_of_images_is_augmented_and_computed_again_bit_for_bit",
    r"python run_local\.py .*--data\.augment\.crop-padding .*": "tests/e2e/test_images.py::"
    "test_a_run_on_a_folder_of_images_is_augmented_and_computed_again_bit_for_bit",
    r"python run_local\.py --data\.dataset-name \./corpus": "tests/integration/data/test_local_folders.py::"
    "test_a_folder_of_text_files_is_a_data_set",
    r"python run_local\.py --data\.dataset-name '\./corpus/\*\.parquet' --data\.tokenizer train:.*": (
        "tests/e2e/test_tokens.py::test_a_run_with_a_tokenizer_of_its_own_makes_tokens_once_and_its_model_speaks_by_it"
    ),
    r"python run_local\.py .*--data\.(shuffle-window|streaming) .*": "tests/e2e/test_streams.py::"
    "test_each_row_of_a_stream_is_trained_once_over_a_killed_data_server_and_a_killed_run",
    r"python run_local\.py .*(--model\.pretrained --lora|--lora\.r 16) .*|shoal export logs/qwen3_tiny .*--merge": (
        "tests/e2e/test_lora.py::test_adapters_on_weights_of_a_folder_train_and_are_loaded_by_peft"
    ),
    r"shoal generate logs/qwen3_tiny .*": f"{PAGE}[transformers]",
    r"shoal generate logs/sandbox --prompt \"Once upon a time\" .*": FIRST,
    r"shoal export logs/resnet18_lsq .*": "tests/e2e/test_lsq.py::"
    "test_a_quantised_run_of_two_stages_is_replayed_bit_for_bit_and_exported_as_integers",
    r"python run_local\.py --diloco\.inner-optim\.type=muon .*": "tests/e2e/test_parquet.py::"
    "test_each_row_of_parquet_files_is_trained_once_over_a_killed_trainer_and_a_killed_run",
    r"python run_local\.py --diloco\.fragments=4 .*": "tests/integration/cluster/test_fragments.py::"
    "test_a_member_weighs_what_it_has_trained_since_its_fragment_was_averaged",
    r"python run_local\.py .*--diloco\.overlap-steps=5": "tests/integration/cluster/test_overlap.py::"
    "test_a_round_averages_what_was_trained_up_to_its_cut_and_the_last_one_all",
    r"shoal config convert .*|python run_local\.py --config-path mine\.yaml": _CONVERTED,
    # What is measured.
    r"shoal benchmark codec.*": "tests/integration/bench/test_command.py::"
    "test_codec_prints_one_json_object_with_all_its_cases_and_leaves_no_process",
    r"shoal benchmark data": "tests/integration/bench/test_command.py::test_data_has_a_case_for_each_size_of_a_batch",
    r"shoal benchmark pipeline.*": "tests/integration/bench/test_pipeline_swarm.py::"
    "test_bursts_tell_what_their_steps_took_and_between_them_nothing_is_trained",
    r"python benchmarks/configs\.py": _SMALL,
    r"python benchmarks/configs\.py --convert .*": _CONVERTED,
    r"python benchmarks/faults\.py .*": "tests/e2e/test_faults_benchmark.py::"
    "test_a_benchmark_that_is_terminated_ends_its_swarm",
    r"python benchmarks/fault_points\.py .*": "tests/e2e/test_fault_points.py::"
    "test_a_swarm_gets_over_a_death_at_each_point_within_the_limits",
    r"python benchmarks/resume_points\.py .*": "tests/e2e/test_resume_points.py::"
    "test_a_run_goes_on_wherever_it_is_killed_with_the_rounds_of_one_that_nobody_has_killed",
    # What is deployed.
    r"shoal machine-script .*": _SERVICE,
    r"make site": "tests/architecture/test_site.py::test_links_lead_to_pages_and_headings_that_exist",
    r"(\w+=\$\(.*\) )?sky launch .*": _CLOUD,
}
"""Patterns of commands, and the test that runs them or what does the same in small; the first pattern counts."""

BY_NOBODY: dict[str, str] = {
    r"make (setup|quick|test|test-all|test-every|test-configs)|source \.venv/bin/activate": ".ci/run calls them",
    r"make run": "it is `python run_local.py`, in place of which the first page's test trains the sandbox shorter",
    r".*(HuggingFaceTB|Salesforce)/.*|.*--data\.dataset-name cifar10 .*|pip .*": "it needs the network",
    r"(ssh|scp|journalctl|docker|runuser) .*|shoal invite .* \| ssh .*": "it needs a host of that name, or a service",
    r".*--device cuda": "it needs a GPU",
    r"python start_trainer_client\.py --config-path configs/(gemma3_270m|qwen3_tiny_lora)\.yaml": "it needs hosts",
    r"(shoal benchmark|python benchmarks/\w+\.py).*": "it takes minutes and measures, which needs an idle machine",
}
"""Patterns of commands that no test runs, and why."""


def commands_of(page: str) -> list[str]:
    """Return the commands of a page, or of the quick start of a system (`page#system`)."""
    path, _, system = page.partition("#")
    return quick_start(system) if system else commands(path)


def _first(patterns: dict[str, str], command: str) -> str | None:
    return next((said for pattern, said in patterns.items() if re.fullmatch(pattern, command)), None)


def runner_of(command: str) -> str | None:
    """Return which test runs what is equal to a command, wherever it stands; None if nothing says it."""
    return _first(ELSEWHERE, command)


def why_not(command: str) -> str | None:
    """Return why nobody runs a command; None if nothing says it."""
    return _first(BY_NOBODY, command)


def to_run(test: str) -> list[str]:
    """Return the commands that a test of pages in order has to run, each once."""
    claimed: dict[str, str] = {}
    for other, pages in IN_ORDER.items():
        for command in (each for page in pages for each in commands_of(page)):
            if runner_of(command) is None and why_not(command) is None:
                claimed.setdefault(command, other)
    given = (command for page in PAGES for command in commands(page) if runner_of(command) == test)
    return [*(command for command, other in claimed.items() if other == test), *dict.fromkeys(given)]
