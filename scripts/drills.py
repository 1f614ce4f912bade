"""What can go wrong, done on purpose: every drill that commopt has to stand, to be run again by anybody.

    python scripts/drills.py                  all of them (a quarter of an hour)
    python scripts/drills.py nan flipped-bit  some of them
    python scripts/drills.py --list           what there is, as the table of docs/reliability.md

A drill is one or several tests: pytest runs them, with the requirements of `pip install -e '.[train,test]'`. It exits with 1 if
something does not hold.
"""  # noqa: E501  (a command line)

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Drill:
    """A drill.

    Attributes:
        name: what to call it on the command line.
        done: what is done.
        follows: what must follow.
        tests: where, as "file::test" below tests/.
    """

    name: str
    done: str
    follows: str
    tests: tuple[str, ...]


DRILLS = (
    # a model or its numbers
    Drill(
        "nan",
        "inf or NaN in a parameter, a momentum, or every gradient of one rank",
        "after `max_skipped` steps in a row (25) `NotFinite` on all ranks: tensor and rank",
        (
            "test_guard.py::test_a_poisoned_parameter_ends_the_run_and_is_named",
            "test_guard.py::test_only_gradients_that_are_not_finite_are_named_too",
            "test_train_finite.py::test_ddp_gives_up_after_so_many_skipped_steps",
        ),
    ),
    Drill(
        "overflow",
        "a gradient of 3e38, finite, whose square is not",
        "the step is skipped; residuals, variance and parameters stay",
        ("test_guard.py::test_a_gradient_too_large_for_float32_arithmetic_counts_as_not_finite",),
    ),
    Drill(
        "nan-checkpoint",
        "a checkpoint of weights or state that are not finite",
        "is not written; the good ones stay, and the run ends with the name of the tensor",
        (
            "test_train_finite.py::test_what_is_not_finite_is_not_saved",
            "test_train_finite.py::test_the_first_checkpoint_is_not_written_either",
            "test_train_finite.py::test_a_held_out_loss_that_is_nan_is_said_at_once_and_ends_badly",
        ),
    ),
    Drill(
        "flipped-bit",
        "one flipped bit in a parameter or in common state of one rank",
        "at the next comparison `ReplicasDiffer`: the rank that is alone; or it gets what the majority has",
        (
            "test_guard.py::test_a_flipped_bit_is_noticed_and_the_rank_named",
            "test_guard.py::test_a_replica_that_differs_is_repaired_from_the_majority",
            "test_guard.py::test_two_ranks_cannot_outvote_each_other",
            "test_guard.py::test_states_that_differ_are_noticed_right_after_loading",
        ),
    ),
    Drill(
        "damaged-message",
        "other bytes than were sent: a bit, a scale of NaN, inf, 1e30, a negative one",
        "`MessageDamaged` on all ranks before anything is used: who received from whom",
        (
            "test_damage.py::test_damage_of_what_is_compressed_is_noticed_and_nothing_used",
            "test_damage.py::test_damage_of_a_mean_is_noticed",
            "test_damage.py::test_afterwards_steps_are_refused_until_a_state_is_loaded",
        ),
    ),
    Drill(
        "spoilt-sender",
        "a momentum of NaN on one rank, which sends it",
        "no other rank takes it",
        ("test_damage.py::test_a_momentum_that_is_not_finite_on_one_rank_spoils_no_other",),
    ),
    Drill(
        "unlike-ranks",
        "another lr, step or freeze_step; another config of `commopt train`; another version, wire format or "
        "instruction set on one rank",
        "an error on all ranks, at once, with the value and the rank",
        (
            "test_train_alike.py",
            "test_guard.py::test_other_hyper_parameters_on_one_rank_are_an_error_on_all",
            "test_guard.py::test_a_freeze_step_changed_on_one_rank_is_an_error_and_no_hang",
            "test_guard.py::test_another_version_or_instruction_set_is_refused_by_name",
        ),
    ),
    Drill(
        "unlike-parameters",
        "replicas that start as permutations of each other; other names; another shape later",
        "they get rank 0's values, with a warning; names and shapes are refused",
        (
            "test_guard.py::test_replicas_that_are_permutations_of_each_other_are_not_taken_for_equal",
            "test_guard.py::test_parameters_with_other_names_are_refused",
            "test_guard.py::test_a_parameter_that_was_reshaped_on_one_rank_is_an_error_on_all",
        ),
    ),
    Drill(
        "partitioned",
        "parameters of FSDP1, of ZeroRedundancyOptimizer, DTensors without their mesh; FSDP1 after the optimizer",
        "refused, and left as they are",
        (
            "test_guard.py::test_partitioned_parameters_are_refused_and_left_alone",
            "test_mesh.py::test_what_cannot_work_is_an_error_on_every_rank",
        ),
    ),
    Drill(
        "absent-parameter",
        "a parameter without a gradient on any rank, now and then (experts, alternating heads)",
        "its momentum and residuals stay to the bit; it moves as under AdamW",
        ("test_absent.py",),
    ),
    Drill(
        "nothing-moves",
        "no gradient anywhere; a variance of 0 where it is frozen; a warm-up that cannot end in the run",
        "a warning that names the parameters, or the numbers",
        (
            "test_guard.py::test_no_gradient_at_all_is_said_once",
            "test_absent.py::test_a_variance_that_is_0_where_it_begins_to_stand_is_reported_once",
            "test_train_loop.py::test_a_warm_up_that_cannot_end_is_said",
        ),
    ),
    Drill(
        "made-too-early",
        "an optimizer made before `init_process_group()`",
        "`RuntimeError` in its first step",
        ("test_contract_processes.py::test_compiled_steps_and_optimizers_that_were_made_too_early",),
    ),
    Drill(
        "mixed-checkpoint",
        "`dcp.save` between two rounds, or rank 0's own part loaded on all ranks",
        "is noticed when it is loaded; replicas are equal, and a warning says what is lost",
        (
            "test_contract_processes.py::"
            "test_what_tools_for_distributed_checkpoints_save_is_never_taken_for_what_it_is_not",
            "test_contract.py::test_the_whole_state_of_rank_0_on_every_rank_is_told_and_they_meet",
        ),
    ),
    # waiting and ending
    Drill(
        "late-rank",
        "a rank that is late, stopped (SIGSTOP), or never comes",
        "after 10 s a notice with step, bucket and rank; at the timeout an error with the rank",
        (
            "test_waiting.py::test_over_gloo_a_late_rank_is_named_and_no_word_stays_in_the_store",
            "test_waiting.py::test_over_gloo_a_rank_that_is_stopped_is_named",
            "test_waiting.py::test_over_gloo_a_rank_that_never_comes_is_named",
            "test_waiting.py::test_over_gloo_a_rank_that_is_late_to_construction_is_named",
            "test_waiting.py::test_over_mpi_a_late_rank_is_named_and_making_lines_has_the_timeout",
        ),
    ),
    Drill(
        "killed-rank",
        "SIGKILL to a rank in a step, or of a run",
        "the survivors' error has its number, unless they met it in a collective of torch's own (DDP's, FSDP2's, "
        "a sharded save): then it says that one has ended; the trainer ends with one line and `--resume=auto`",
        (
            "test_waiting.py::test_over_gloo_a_rank_that_was_killed_has_gone",
            "test_train_lost.py::test_the_rank_that_is_left_says_so",
            "test_train_lost.py::test_a_rank_that_does_not_answer_costs_the_timeout",
            "test_train_lost.py::test_one_that_sleeps_while_it_saves_costs_the_timeout_too",
            "test_train_mpi.py::test_messages_between_the_ranks_have_the_timeout_too",
        ),
    ),
    Drill(
        "ranks-come-and-go",
        "to processes: SIGKILL in a round, between two, and where they agree; SIGSTOP; joins; `leave()`; on hosts with "
        "links of their own: a cable that is pulled, and two that cannot reach each other. On threads: a network that "
        "is cut",
        "the others go on, and nothing is lost but that rank's round; one that comes back joins anew",
        (
            "test_members_processes.py",
            "test_members_faults.py",
            "test_members_random.py",
        ),
    ),
    Drill(
        "lost-machine",
        "a machine of a sharded run under torchrun goes, with all its ranks",
        "the machines that are left continue, from the last checkpoint",
        ("test_train_elastic.py::test_a_sharded_run_goes_on_with_the_machines_that_are_left",),
    ),
    Drill(
        "told-to-stop",
        "SIGTERM to one rank while the others are still joining, or rank 0 prepares",
        "all end, soon",
        (
            "test_train_lost.py::test_told_to_stop_before_the_other_is_there",
            "test_train_lost.py::test_told_to_stop_while_rank_0_prepares",
        ),
    ),
    Drill(
        "uneven-batches",
        "`Join` with uneven batches",
        "an error that says what to do; no abort",
        ("test_waiting.py::test_uneven_batches_under_join_are_an_error_and_no_abort",),
    ),
    Drill(
        "own-collectives",
        "a user's `all_reduce` on the same group, before the step on one rank, after it on another",
        "both are right",
        ("test_processes.py::test_what_a_user_sends_on_the_same_group_may_come_in_any_order",),
    ),
    Drill(
        "many-optimizers",
        "a hundred overlapping optimizers, made and deleted without a garbage collection",
        "no thread, descriptor, hook or key is left, and the process ends with 0",
        ("test_lifetime.py", "test_exit.py"),
    ),
    # a run's files
    Drill(
        "two-runs",
        "a second run in the same folder; a run that was killed",
        "the second is refused before it writes; the lock of a killed run is free",
        ("test_train_lock.py",),
    ),
    Drill(
        "damaged-files",
        "bits flipped and files cut, anywhere in a run folder",
        "`--resume=auto` continues from the last good checkpoint, to the bit, or ends with one line",
        (
            "test_train_damage.py",
            "test_train_checkpoint.py::test_damage_is_named_and_auto_takes_the_one_before",
            "test_train_checkpoint.py::test_a_kill_while_writing_leaves_the_last_good_one",
        ),
    ),
    Drill(
        "damaged-corpus",
        "flipped bits, ids out of range, half-prepared folders, two preparations at once",
        "made again, with a warning; or one line",
        (
            "test_data.py::test_a_damaged_cache_is_made_again",
            "test_data.py::test_what_killed_preparations_left_is_removed",
            "test_data.py::test_two_jobs_prepare_at_once",
        ),
    ),
    Drill(
        "full-disk",
        "no space left for a checkpoint, for metrics, for a corpus",
        'one line, "the disk is full"; the last good checkpoint stays',
        (
            "test_train_checkpoint.py::test_a_full_disk_is_one_clear_error",
            "test_train_checkpoint.py::test_torch_does_not_hide_that_the_disk_is_full",
            "test_train_loop.py::test_a_disk_that_is_full_of_metrics_ends_all_ranks",
            "test_data.py::test_a_full_disk_while_preparing_is_called_that",
            "test_train_disk.py",
        ),
    ),
    Drill(
        "hostile-text",
        "labels such as `$\\frac{$` and `[/red]`, tags and alias bombs in YAML, links in a run folder",
        "text is text; tags are refused, aliases bounded; links are replaced and never followed",
        (
            "test_report.py::test_labels_are_text_to_everyone",
            "test_report.py::test_a_config_that_is_no_config_is_one_line",
            "test_train_loop.py::test_links_in_the_run_folder_are_replaced_and_never_followed",
            "test_cli.py::test_print_config_runs_nobodys_code",
        ),
    ),
)


def table() -> str:
    """The drills as a Markdown table."""
    lines = ["| drill | what is done | what follows |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| `{d.name}` | {d.done} | {d.follows} |" for d in DRILLS)])


def run(drill: Drill) -> bool:
    """Runs it; whether it holds. Says what failed."""
    start = time.perf_counter()
    tests = [str(ROOT / "tests" / test) for test in drill.tests]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    holds = done.returncode == 0
    seconds = time.perf_counter() - start
    skipped = re.search(r"(\d+) skipped", done.stdout)
    found = "FAILS" if not holds else f"holds, but for {skipped[1]} parts that cannot run here:" if skipped else "holds"
    sys.stdout.write(f"{found:<6} {drill.name:<18} {seconds:6.1f} s  {drill.follows}\n")
    sys.stdout.flush()
    if not holds:
        sys.stdout.write(done.stdout[-4000:] + done.stderr[-2000:])
    return holds


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="drills to run; none: all")
    parser.add_argument("--list", action="store_true", help="print the table of all drills, and run none")
    options = parser.parse_args(argv)
    if options.list:
        sys.stdout.write(table() + "\n")
        return 0
    known = {drill.name: drill for drill in DRILLS}
    unknown = [name for name in options.names if name not in known]
    if unknown:
        parser.error(f"no drill {', '.join(map(repr, unknown))}; there are {', '.join(known)}")
    results = [run(known[name]) for name in options.names or known]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
