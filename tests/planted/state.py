"""Faults in what is kept: checkpoints on disk, what a run goes on from, clocks, run folders."""

from tests.planted.fault import Fault

SAME = "tests/laws/test_same_numbers.py::test_every_strategy_follows_the_reference_in_fp64"

FAULTS = [
    Fault(
        "a file of a checkpoint is not synced",
        "dtf/checkpoint/storage.py",
        "rest = rest[os.write(file, rest) :]\n        os.fsync(file)\n",
        "rest = rest[os.write(file, rest) :]\n",
        ("tests/laws/test_storage_kill.py::test_nothing_is_renamed_before_it_is_on_the_disk",),
    ),
    Fault(
        "the rename of a checkpoint is not synced",
        "dtf/checkpoint/storage.py",
        "os.rename(draft, final)\n    _sync_folder(draft.parent)\n",
        "os.rename(draft, final)\n",
        ("tests/laws/test_storage_kill.py::test_nothing_is_renamed_before_it_is_on_the_disk",),
    ),
    Fault(
        "a checkpoint is there before its manifest",
        "dtf/checkpoint/storage.py",
        "    write(draft / MANIFEST, [data])\n    _sync_folder(draft)\n"
        "    final = draft.parent / step_name(manifest.step)\n",
        "    final = draft.parent / step_name(manifest.step)\n    os.rename(draft, final)\n"
        "    write(final / MANIFEST, [data])\n    os.rename(final, draft)\n",
        ("tests/laws/test_storage_kill.py::test_nothing_is_renamed_before_it_is_on_the_disk",),
    ),
    Fault(
        "digests are not compared",
        "dtf/checkpoint/storage.py",
        "zlib.crc32(block) != self._stored.crc32[number]",
        "zlib.crc32(block) < 0",
        ("tests/laws/test_checkpoint_faults.py::test_200_of_200_damages_are_found",),
    ),
    Fault(
        "the digest of a manifest is not compared",
        "dtf/checkpoint/manifest.py",
        "if seal != _seal(body):",
        "if not seal:",
        ("tests/unit/test_manifest.py::test_no_bit_of_a_manifest_can_change",),
    ),
    Fault(
        "boxes of a tensor may overlap",
        "dtf/checkpoint/manifest.py",
        "if any(intersect(offset, size, *other) for other in open_boxes):",
        "if not open_boxes and offset is None:",
        ("tests/unit/test_manifest.py::test_overlapping_boxes_of_the_right_volume_are_no_partition",),
    ),
    Fault(
        "a part of a box is read from its first row",
        "dtf/checkpoint/boxes.py",
        "start = slot.start + first * row",
        "start = slot.start",
        ("tests/laws/test_checkpoint.py::test_any_cut_by_any_ranks_is_read_back_under_any_other_cut",),
    ),
    Fault(
        "the newest checkpoint is removed instead of the oldest",
        "dtf/checkpoint/storage.py",
        "in complete[max(1, keep_last) :]:",
        "in complete[: -max(1, keep_last)]:",
        ("tests/unit/test_storage.py::test_retention_keeps_the_newest_and_the_best",),
    ),
    Fault(
        "the worst checkpoint is kept as the best",
        "dtf/checkpoint/storage.py",
        'sign = -1.0 if objective[1] == "max" else 1.0',
        "sign = 1.0",
        ("tests/unit/test_storage.py::test_retention_keeps_the_newest_and_the_best",),
    ),
    Fault(
        "a run starts anew over a damaged checkpoint",
        "dtf/checkpoint/checkpointer.py",
        "        if not candidates:\n            return None\n",
        "        return None\n",
        ("tests/laws/test_checkpoint.py::test_a_run_never_starts_anew_over_checkpoints_that_cannot_be_loaded",),
    ),
    Fault(
        "a checkpoint lacks the optimizer state of a rank",
        "dtf/optim/update.py",
        "if self._writes or self._divided:",
        "if self._writes:",
        (f"{SAME}[ddp-{{'shard_optimizer': True}}-3]",),
    ),
    Fault(
        "a resumed run begins with a new optimizer",
        "dtf/optim/update.py",
        'tensor.copy_(source.read(f"optimizer/{name}/{key}", offset, tuple(tensor.shape)))',
        'source.read(f"optimizer/{name}/{key}", offset, tuple(tensor.shape))',
        ("tests/laws/test_update.py::test_rows_count_the_steps_that_dense_adam_counts",),
    ),
    Fault(
        "a resumed run begins with the running statistics of no rank",
        "dtf/strategies/buffers.py",
        "== shard.count > 1:",
        "== shard.count > 99:",
        ("tests/laws/test_resume.py::test_resume_is_exact",),
    ),
    Fault(
        "a resumed run counts its steps of batch normalisation from zero",
        "dtf/strategies/buffers.py",
        'part.statistics.restore(int(source.read(f"model/{name}", shape=())))',
        'int(source.read(f"model/{name}", shape=()))',
        ("tests/laws/test_resume.py::test_resume_is_exact",),
    ),
    Fault(
        "a resumed run forgets where it was in the data",
        "dtf/engine/clock.py",
        "Progress(**state) if state else Progress()",
        "Progress()",
        ("tests/laws/test_clock.py::test_resuming_continues_the_plan",),
    ),
    Fault(
        "an early stop comes an evaluation late",
        "dtf/engine/clock.py",
        "plan.patience and evaluated and at.since_best >= plan.patience",
        "plan.patience and evaluated and at.since_best > plan.patience",
        ("tests/laws/test_clock.py::test_early_stop_saves_and_stops_at_the_same_step_everywhere",),
    ),
    Fault(
        "a stop that was asked for is not saved",
        "dtf/engine/clock.py",
        "or last or stopping or (improved",
        "or last or (improved",
        ("tests/laws/test_clock.py::test_a_request_to_stop_is_heard_within_two_seconds_without_any_report",),
    ),
    Fault(
        "the window of metrics before a save is lost",
        "dtf/engine/loop.py",
        "            total += torch.tensor(self._carried, dtype=torch.float64)\n",
        "            total += 0\n",
        ("tests/laws/test_recovery.py::test_the_gradient_norm_of_a_window_does_not_depend_on_saves",),
    ),
    Fault(
        "an evaluation that lost a row is believed",
        "dtf/engine/loop.py",
        "if values[0] + unread != rows:",
        "if values[0] + unread > rows:",
        ("tests/laws/test_loop.py::test_an_evaluation_that_loses_a_row_is_an_error",),
    ),
    Fault(
        "a record keeps steps that are done again",
        "dtf/runs/record.py",
        'json.loads(line).get("step", start) < start)',
        'json.loads(line).get("step", start) <= start)',
        ("tests/laws/test_recovery.py::test_a_rank_killed_before_its_first_step_leaves_the_evidence_of_earlier_ones",),
    ),
    Fault(
        "verify overlooks ranks that hold different numbers",
        "dtf/runs/compare.py",
        "if held[name] != digest:",
        "if held[name] is None:",
        ("tests/laws/test_verify.py::test_a_planted_fault_is_found_and_named",),
    ),
]
