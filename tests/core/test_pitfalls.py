"""What went wrong in other servers that batch speculation, and the tests that hold each fault here.

Numbers are those of our study of a Rust server with the same drafters. ``COVERED`` names, per pitfall, the
tests that fail with it (``folder/file::test``, below tests/); ``NOT_HERE`` says why one does not apply.
"""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]

COVERED: dict[int, tuple[str, tuple[str, ...]]] = {
    1: (
        "zeroed key tails still take softmax weight",
        ("core/test_ragged_rounds.py::test_any_ragged_rounds_leave_each_row_as_if_alone",),
    ),
    2: (
        "rows behind a shared offset get wrong rope positions",
        (
            "core/test_ragged_rounds.py::test_a_length_off_by_one_in_one_row_is_detected",
            "core/test_ragged_rounds.py::test_a_window_of_any_accepts_and_widths_keeps_every_rows_state",
        ),
    ),
    3: (
        "recurrent and conv state replayed by the largest accept",
        (
            "core/test_ragged_rounds.py::test_extreme_accepts_side_by_side_for_many_rounds",
            "core/test_gated_delta.py::test_each_row_is_committed_at_its_own_count",
        ),
    ),
    4: (
        "rejected rows' features enter the drafter context",
        ("core/test_drafter_context.py::test_a_windows_drafts_are_those_of_the_whole_context_read_anew",),
    ),
    5: (
        "one rectangle as every row's drafter context",
        ("core/test_embedded_pair.py::test_company_costs_no_row_its_drafts",),
    ),
    6: (
        "a clamp throws accepts away",
        ("core/test_window.py::test_every_accept_is_committed_and_counted",),
    ),
    7: (
        "a prompt read through the verify path differs from the plain prefill",
        ("core/test_target_network.py::test_a_prompt_has_mlx_lms_logits_and_caches",),
    ),
    8: (
        "kernels differ by shape: block and chain part at some width or batch",
        (
            "core/test_probe.py::test_one_row_and_one_token_is_equal_and_blocks_are_near_ties",
            "core/test_probe.py::test_logits_that_are_off_are_judged_by_the_margin",
        ),
    ),
    9: (
        "a short probe passes while divergence begins dozens of tokens later",
        (
            "deployments/test_parity_cover.py::test_rows_together_are_the_rows_alone",
            "core/test_probe.py::test_the_probes_rows_stand_on_both_sides_of_128_tokens",
        ),
    ),
    10: (
        "one width probed although the loop plays others",
        (
            "core/test_probe.py::test_the_probe_covers_every_width_and_row_bucket_that_rounds_use",
            "core/test_shapes.py::test_a_window_plays_nothing_but_allowed_shapes",
        ),
    ),
    11: (
        "a verdict kept without model, dtype, batch or width in its key",
        ("deployments/test_exactness.py::test_findings_are_kept_by_model_machine_and_software",),
    ),
    12: (
        "the batched path skips the probe, or loads a drafter before it fails",
        (
            "deployments/test_exactness.py::test_a_failing_verdict_reads_no_drafter_and_calls_none",
            "deployments/test_exactness.py::test_a_strict_drafter_replica_loads_at_its_first_call",
        ),
    ),
    13: (
        "queued requests never form one window, or seeds and lengths keep them apart",
        (
            "deployments/test_ray_windows.py::test_concurrent_requests_share_one_window",
            "deployments/test_desk.py::test_concurrent_requests_share_a_window",
            "core/test_sampling.py::test_a_greedy_row_ignores_its_seed",
        ),
    ),
    14: (
        "mixed half precisions promote the drafter to float32",
        ("core/test_drafter_context.py::test_no_layer_of_a_bfloat16_drafter_is_promoted",),
    ),
    15: (
        "thousands of launches for a short block",
        (
            "core/test_operations.py::test_a_round_has_a_bounded_number_of_operations",
            "core/test_operations.py::test_a_wider_block_is_not_a_loop_over_its_tokens",
        ),
    ),
    16: (
        "block rows leak into the drafter cache",
        ("core/test_drafter_context.py::test_a_blocks_own_keys_are_never_kept",),
    ),
    17: (
        "finished rows keep advancing",
        ("core/test_rejected_tokens.py::test_idle_slots_do_not_advance_and_do_not_matter",),
    ),
    18: (
        "finished rows and short budgets narrow everybody",
        (
            "core/test_window.py::test_a_short_budget_does_not_narrow_its_neighbours_blocks",
            "core/test_window.py::test_a_finished_row_has_no_influence",
        ),
    ),
    19: (
        "a sliding buffer narrower than the block",
        ("core/test_drafter_context.py::test_a_draft_is_the_references",),
    ),
    20: (
        "an aliased snapshot instead of a copy",
        (
            "core/test_gated_delta.py::test_each_row_is_committed_at_its_own_count",
            "core/test_memory.py::test_a_reference_held_across_a_round_costs_a_copy",
        ),
    ),
    21: (
        "slots moved over one another",
        ("core/test_drafter_context.py::test_slots_may_move_shrink_and_grow_between_calls",),
    ),
    22: (
        "fully masked padding gives NaN",
        (
            "core/test_target_network.py::test_prompts_of_mixed_lengths_read_together_equal_prompts_read_alone",
            "core/test_fastmath.py::test_softmax_gives_what_is_masked_nothing",
        ),
    ),
    23: (
        "block_size means different things",
        (
            "core/test_drafter_checkpoint.py::test_the_nested_setting_wins_over_the_one_on_top",
            "core/test_drafter_checkpoint.py::test_todays_layout_reads_as_sliding_causal_layers_and_one_full_layer",
        ),
    ),
    24: (
        "unknown config keys dropped in silence",
        ("core/test_drafter_checkpoint.py::test_a_config_is_refused_for",),
    ),
    25: (
        "another embedding than the target's for the drafter",
        (
            "core/test_drafter_context.py::test_a_draft_is_the_references",
            "core/test_drafter_context.py::test_an_embedding_scale_multiplies_the_block_and_not_the_context",
        ),
    ),
    26: (
        "one prompt feature instead of all",
        (
            "core/test_drafter_context.py::test_context_and_waiting_features_are_the_target_length_after_every_step",
            "core/test_drafter_context.py::test_the_anchor_and_every_context_feature_matter",
        ),
    ),
    27: (
        "ids and shapes that MLX does not range-check",
        (
            "core/test_window.py::test_what_cannot_be_played_is_refused_whole",
            "core/test_drafter_checkpoint.py::test_a_config_is_refused_for",
            "core/test_drafter_checkpoint.py::test_a_tensor_is_refused_that_is",
        ),
    ),
    28: (
        "a mismatched pair aborts the process",
        (
            "core/test_drafter_checkpoint.py::test_a_drafter_of_another_target_is_refused",
            "deployments/test_exchange.py::test_another_drafters_answer_counts_as_none",
        ),
    ),
    29: (
        "a drafter that fails silently: one token a round",
        (
            "core/test_round.py::test_rows_go_on_classic_while_the_drafter_is_away",
            "deployments/test_exchange.py::test_a_dead_drafter_is_called_once_not_once_a_round",
        ),
    ),
    30: (
        "a parity test of two empty strings, or of the fall-back with itself",
        (
            "core/test_embedded_pair.py::test_the_answers_are_worth_comparing",
            "deployments/test_parity_cover.py::test_rows_together_are_the_rows_alone",
        ),
    ),
    31: (
        "comparing text hides differences",
        (
            "core/test_embedded_pair.py::test_a_window_of_four_equals_mlx_lm_token_for_token",
            "core/test_probe.py::test_a_mark_ignores_rejected_places_and_capacity_and_sees_every_bit",
        ),
    ),
    32: (
        "a shell strips the prompt's newline: the reference is shifted by a token",
        (
            "core/test_tokenizer.py::test_a_chat_has_the_ids_that_transformers_gives",
            "deployments/test_http_prepare.py::test_token_ids_are_played_as_they_are",
        ),
    ),
    33: (
        "arg-max acceptance is biased at a temperature",
        (
            "core/test_choose_law.py::test_tokens_follow_the_softmax_at_their_temperature",
            "core/test_choose_law.py::test_wrong_rules_are_rejected_by_the_same_test",
            "core/test_sampling.py::test_speculation_changes_no_token",
        ),
    ),
    36: (
        "stop rules skipped inside a block",
        (
            "core/test_window.py::test_a_stop_token_inside_an_accepted_block_ends_the_row_there",
            "core/test_stops.py::test_a_stop_string_inside_a_block_cuts_text_and_tokens",
        ),
    ),
    37: (
        "a burst runs to its end while a neighbour waits",
        ("core/test_window.py::test_running_rows_play_a_round_in_every_step_while_prompts_are_read",),
    ),
    39: (
        "one speculative slot for all",
        (
            "core/test_window.py::test_a_retired_slot_is_refilled_from_the_queue",
            "core/test_window.py::test_any_rows_in_any_order_say_what_they_say_alone",
        ),
    ),
    34: (
        "token bias is not applied in a verify",
        (
            "core/test_processors.py::test_a_row_alone_says_what_the_reference_says",
            "core/test_processors.py::test_every_setting_has_an_effect_here",
        ),
    ),
    35: (
        "penalties on the first token alone, or dropped in a batch",
        (
            "core/test_processors.py::test_so_does_every_row_of_a_mixed_batch",
            "core/test_processors.py::test_a_refill_disturbs_no_history",
        ),
    ),
    40: (
        "no cancel in a batch",
        (
            "core/test_window.py::test_rows_retire_in_every_state_and_leave_nothing",
            "deployments/test_ray_windows.py::test_a_client_that_leaves_is_out_by_the_next_round",
        ),
    ),
    41: (
        "one row fails, the window fails",
        (
            "core/test_rejected_tokens.py::test_a_row_made_nan_ends_with_its_own_error_and_disturbs_nobody",
            "deployments/test_desk.py::test_a_row_that_fails_tells_its_own_client_alone",
        ),
    ),
    42: (
        "a prefix that is found turns drafts off",
        (
            "core/test_prefixes.py::test_rounds_of_a_warm_row_are_those_of_a_cold_one",
            "core/test_prefixes.py::test_a_row_that_begins_from_a_saved_state_has_the_state_of_one_that_read_it_all",
        ),
    ),
    43: (
        "a prefix saved after the end holds drafts that were never emitted",
        (
            "core/test_prefixes.py::test_a_turn_that_a_stop_token_cuts_leaves_only_what_it_emitted",
            "core/test_prefixes.py::test_a_second_turn_says_in_any_company_what_it_says_from_the_start",
        ),
    ),
    45: (
        "prompt-sized snapshots stay in memory",
        ("core/test_memory.py::test_nothing_stays_of_a_window_that_is_gone",),
    ),
    46: (
        "a host sync per row or token",
        ("core/test_round.py::test_a_round_reads_from_the_device_once",),
    ),
    47: (
        "a fixed default width loses",
        (
            "core/test_width.py::test_where_every_token_costs_as_much_classic_wins_over_bad_drafts",
            "core/test_width.py::test_classic_rounds_are_interrupted_by_trials_inside_the_budget",
        ),
    ),
    48: (
        "drafts after the end are counted, zero and absent confused",
        (
            "core/test_window.py::test_any_rows_in_any_order_say_what_they_say_alone",
            "deployments/test_http_telemetry.py::test_a_classic_round_counts_no_drafts",
        ),
    ),
    50: (
        "lumps instead of a stream",
        (
            "deployments/test_desk.py::test_times_to_the_first_token_and_between_outputs_are_observed",
            "deployments/test_http_wire.py::test_a_stream_has_the_order_that_clients_expect",
        ),
    ),
}

NOT_HERE: dict[int, str] = {
    38: "no tick schedules rounds: a window plays one after another on a thread of its own",
    44: "graph caches that overflow are CUDA's, and no test has a GPU; ours is large and shapes are few",
    49: "prompt classes are a matter of benchmarks: dflash-serve bench takes any file",
}


def test_every_pitfall_is_placed_once() -> None:
    assert sorted([*COVERED, *NOT_HERE]) == list(range(1, 51))


@pytest.mark.parametrize("number", COVERED)
def test_the_tests_that_hold_a_pitfall_exist(number: int) -> None:
    for node in COVERED[number][1]:
        file, _, name = node.partition("::")
        tree = ast.parse((TESTS / file).read_text())
        functions = [n for n in tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
        found = [function for function in functions if function.name == name]
        assert len(found) == 1, node
        assert any(isinstance(n, ast.Assert | ast.With) for n in ast.walk(found[0])), (
            f"{node} asserts nothing"
        )
