"""What went wrong in other servers that batch speculation, and which test holds it here.

Numbers are those of our study of a Rust server with the same drafters; each ``COVERED`` entry names tests of
this tree (``file::test``). ``ELSEWHERE`` are matters of the deployments, benchmarks or features to come.
"""

from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent

COVERED: dict[int, tuple[str, str]] = {
    1: (
        "zeroed key tails still take softmax weight",
        "test_ragged_rounds.py::test_any_ragged_rounds_leave_each_row_as_if_alone",
    ),
    2: (
        "rows behind a shared offset get wrong rope positions",
        "test_ragged_rounds.py::test_a_length_off_by_one_in_one_row_is_detected",
    ),
    3: (
        "recurrent and conv state replayed by the largest accept",
        "test_ragged_rounds.py::test_extreme_accepts_side_by_side_for_many_rounds",
    ),
    4: (
        "rejected rows' features enter the drafter context",
        "test_drafter_context.py::test_a_windows_drafts_are_those_of_the_whole_context_read_anew",
    ),
    5: (
        "one rectangle as every row's drafter context",
        "test_embedded_pair.py::test_company_costs_no_row_its_drafts",
    ),
    6: ("a clamp throws accepts away", "test_window.py::test_every_accept_is_committed_and_counted"),
    7: (
        "a prompt read through the verify path differs from the plain prefill",
        "test_target_network.py::test_a_prompt_has_mlx_lms_logits_and_caches",
    ),
    14: (
        "mixed half precisions promote the drafter to float32",
        "test_drafter_context.py::test_no_layer_of_a_bfloat16_drafter_is_promoted",
    ),
    16: (
        "block rows leak into the drafter cache",
        "test_drafter_context.py::test_a_blocks_own_keys_are_never_kept",
    ),
    17: (
        "finished rows keep advancing",
        "test_rejected_tokens.py::test_idle_slots_do_not_advance_and_do_not_matter",
    ),
    18: (
        "finished rows and short budgets narrow everybody",
        "test_window.py::test_a_short_budget_does_not_narrow_its_neighbours_blocks",
    ),
    19: (
        "a sliding buffer narrower than the block",
        "test_drafter_context.py::test_a_draft_is_the_references",
    ),
    20: (
        "an aliased snapshot instead of a copy",
        "test_gated_delta.py::test_each_row_is_committed_at_its_own_count",
    ),
    21: (
        "slots moved over one another",
        "test_drafter_context.py::test_slots_may_move_shrink_and_grow_between_calls",
    ),
    22: (
        "fully masked padding gives NaN",
        "test_target_network.py::test_prompts_of_mixed_lengths_read_together_equal_prompts_read_alone",
    ),
    23: ("block_size means different things", "test_drafter_checkpoint.py::"),
    24: ("unknown config keys dropped in silence", "test_drafter_checkpoint.py::"),
    25: (
        "another embedding than the target's for the drafter",
        "test_drafter_context.py::test_a_draft_is_the_references",
    ),
    26: (
        "one prompt feature instead of all",
        "test_drafter_context.py::test_a_windows_drafts_are_those_of_the_whole_context_read_anew",
    ),
    27: (
        "ids and shapes that MLX does not range-check",
        "test_window.py::test_what_cannot_be_played_is_refused_whole",
    ),
    28: ("a mismatched pair aborts the process", "test_drafter_checkpoint.py::"),
    29: (
        "a drafter that fails silently: one token a round",
        "test_round.py::test_rows_go_on_classic_while_the_drafter_is_away",
    ),
    30: ("a parity test of two empty strings", "test_embedded_pair.py::test_the_answers_are_worth_comparing"),
    31: (
        "comparing text hides differences",
        "test_embedded_pair.py::test_a_window_of_four_equals_mlx_lm_token_for_token",
    ),
    33: (
        "arg-max acceptance is biased at a temperature",
        "test_choose_law.py::test_wrong_rules_are_rejected_by_the_same_test",
    ),
    36: (
        "stop rules skipped inside a block",
        "test_window.py::test_a_stop_token_inside_an_accepted_block_ends_the_row_there",
    ),
    37: (
        "a burst runs to its end while a neighbour waits",
        "test_window.py::test_running_rows_play_a_round_in_every_step_while_prompts_are_read",
    ),
    39: ("one speculative slot for all", "test_window.py::test_a_retired_slot_is_refilled_from_the_queue"),
    40: ("no cancel in a batch", "test_window.py::test_rows_retire_in_every_state_and_leave_nothing"),
    41: (
        "one row fails, the window fails",
        "test_rejected_tokens.py::test_a_row_made_nan_ends_with_its_own_error_and_disturbs_nobody",
    ),
    45: (
        "prompt-sized snapshots stay in memory",
        "test_memory.py::test_nothing_stays_of_a_window_that_is_gone",
    ),
    46: ("a host sync per row or token", "test_round.py::test_a_round_reads_from_the_device_once"),
    48: (
        "drafts after the end are counted",
        "test_window.py::test_any_rows_in_any_order_say_what_they_say_alone",
    ),
}

ELSEWHERE: dict[int, str] = {
    8: "kernels differ by shape: the start-up probe per width and rows",
    9: "divergence past the probe's length: the parity gate walks beyond 128 tokens",
    10: "every width that the loop may use is probed",
    11: "verdicts are keyed by model, dtype, rows and width",
    12: "a failing verdict loads no drafter: strict mode",
    13: "queued requests form one window: the router",
    15: "launches per round: counted where they cost, on a GPU",
    32: "prompts compared as ids: the parity gate takes ids",
    34: "logit bias is not in the engine yet",
    35: "penalties are not in the engine yet",
    38: "rounds per tick: a window's stream has no tick",
    42: "prefix reuse is not built yet",
    43: "prefix reuse is not built yet",
    44: "graph caches: a soak on a GPU",
    47: "the default width is measured: width control",
    49: "several prompt classes: benchmarks",
    50: "streaming per round: the HTTP surface",
}


def test_every_pitfall_is_placed() -> None:
    assert sorted([*COVERED, *ELSEWHERE]) == list(range(1, 51))


@pytest.mark.parametrize("number", COVERED)
def test_the_test_that_holds_a_pitfall_exists(number: int) -> None:
    file, _, name = COVERED[number][1].partition("::")
    source = (TESTS / file).read_text()
    assert f"def {name or 'test_'}" in source
