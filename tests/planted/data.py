"""Faults in what is read: sample order, shares of ranks, augmentation, parsing of logs."""

from tests.planted.fault import Fault

FAULTS = [
    Fault(
        "the order of an epoch lacks a row",
        "dtf/data/samplers.py",
        'seed_of(seed, "shuffle", epoch))).permutation(rows)',
        'seed_of(seed, "shuffle", epoch))).permutation(rows)[: max(1, rows - 1)]',
        ("tests/unit/test_sampler.py::test_partial_visits_every_row_once",),
    ),
    Fault(
        "a batch begins with the last row of the one before it",
        "dtf/data/batches.py",
        "return self._order[index * self._batch_size : (index + 1)",
        "return self._order[max(0, index * self._batch_size - 1) : (index + 1)",
        ("tests/unit/test_sampler.py::test_partial_visits_every_row_once",),
    ),
    Fault(
        "every epoch has the order of the first",
        "dtf/data/samplers.py",
        'seed_of(seed, "shuffle", epoch)',
        'seed_of(seed, "shuffle", 0)',
        ("tests/unit/test_sampler.py::test_order_differs_between_epochs_and_seeds",),
    ),
    Fault(
        "two ranks compute the same micro-batch",
        "dtf/data/batches.py",
        "micro_batches * (shard.index + 1) // shard.count",
        "-(-micro_batches * (shard.index + 1) // shard.count)",
        ("tests/unit/test_sampler.py::test_shares_partition_the_micro_batches_evenly",),
    ),
    Fault(
        "a micro-batch of a single row",
        "dtf/data/batches.py",
        "        del bounds[-2]",
        "        pass",
        ("tests/unit/test_sampler.py::test_micro_batches_partition_the_global_batch",),
    ),
    Fault(
        "padding counts in an evaluation",
        "dtf/data/loader.py",
        "weight = torch.zeros(len(rows)) if padding else torch.ones(len(rows))",
        "weight = torch.ones(len(rows))",
        ("tests/laws/test_same_numbers.py::test_every_strategy_follows_the_reference_in_fp64[ddp-{}-3]",),
    ),
    Fault(
        "rows that cannot be read count",
        "dtf/data/loader.py",
        "weight[unread] = 0",
        "weight[unread] = 1",
        (
            "tests/launch/test_photos_runs.py::test_a_bad_file_is_counted_once_however_many_ranks_meet_it",
            "tests/launch/test_photos_runs.py::test_a_run_counts_unreadable_files_and_ends_when_they_are_too_many",
        ),
    ),
    Fault(
        "augmentation ignores the epoch",
        "dtf/core/seeding.py",
        'seed_of(seed, "augment", epoch)',
        'seed_of(seed, "augment", 0)',
        ("tests/unit/test_resnet_images.py::test_seed_and_epoch_change_the_augmentation_and_evaluation_has_none",),
    ),
    Fault(
        "a window of a JPEG file is a row too low",
        "recipes/resnet/jpeg.py",
        "top, left = round(part.top / scale), round",
        "top, left = round(part.top / scale) + 1, round",
        ("tests/unit/test_jpeg.py::test_a_part_is_what_the_whole_picture_shows_there",),
    ),
    Fault(
        "threads wait for the last image of a batch before they begin the next",
        "recipes/resnet/photos.py",
        "self.threads = min(2, threads)",
        "self.threads = 1",
        ("tests/unit/test_photos_order.py::test_a_batch_is_begun_while_the_last_image_of_the_one_before_is_decoded",),
    ),
    Fault(
        "bytes become numbers in passes over the whole batch",
        "recipes/resnet/photos.py",
        'torch.get_num_threads() if pixels.device.type == "cpu" else',
        "",
        ("tests/unit/test_photos.py::test_on_the_device_bytes_become_numbers",),
    ),
    Fault(
        "a mixed row has the share of its partner",
        "recipes/resnet/augment.py",
        "np.where(cut, 1 - inside, share)",
        "np.where(cut, inside, share)",
        ("tests/unit/test_photos.py::test_mixing_is_with_the_neighbour_by_the_share_in_the_targets",),
    ),
    Fault(
        "a crop never reaches the last column",
        "recipes/resnet/images.py",
        "(uniform[:, :2] * (2 * crop_pad + 1))",
        "(uniform[:, :2] * (2 * crop_pad))",
        (
            "tests/unit/test_resnet_images.py::test_augmentation_is_a_window_of_the_padded_image_mirrored_half_of_the_time",
        ),
    ),
    Fault(
        "categories of a log are hashed without their column",
        "recipes/ctr/criteo.py",
        "key_of(INTEGERS + column, value)",
        "key_of(INTEGERS, value)",
        (
            "tests/unit/test_ctr_parsing.py::test_a_log_of_criteo_is_read_whole",
            "tests/unit/test_ctr_parsing.py::test_any_bytes_are_read_as_the_reference_reads_them",
        ),
    ),
    Fault(
        "integers of a log lose their sign",
        "recipes/ctr/lines.py",
        "return (-value if negative else value), i",
        "return value, i",
        ("tests/unit/test_ctr_parsing.py::test_any_bytes_are_read_as_the_reference_reads_them",),
    ),
    Fault(
        "hexadecimal digits overflow into each other",
        "recipes/ctr/lines.py",
        "(value << np.uint64(4))",
        "(value << np.uint64(3))",
        ("tests/unit/test_ctr_parsing.py::test_any_bytes_are_read_as_the_reference_reads_them",),
    ),
]
