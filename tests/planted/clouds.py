"""Faults in how jobs of Ray and of SageMaker are made, and in what their ends mean."""

from tests.planted.fault import Fault

_RAY, _SAGEMAKER = "tests/cluster/test_ray_platform.py::", "tests/cluster/test_sagemaker_platform.py::"

FAULTS = [
    Fault(
        "a run that was told to stop before Python ran is not placed again",
        "dtf/cluster/after_exit.py",
        "ALWAYS = (75, 143)",
        "ALWAYS = (75,)",
        ("tests/cluster/test_after_exit.py::test_which_ends_are_followed_by_another_start",),
    ),
    Fault(
        "checkpoints do not count when a run is placed again",
        "dtf/cluster/after_exit.py",
        "(0 if progress else lost) +",
        "lost +",
        ("tests/cluster/test_after_exit.py::test_which_ends_are_followed_by_another_start",),
    ),
    Fault(
        "trainers decide whether a run with servers has finished",
        "dtf/cluster/ray_ends.py",
        "all(code == 0 for code in codes[:deciding])",
        "all(code == 0 for code in codes)",
        (f"{_RAY}test_one_code_of_all_processes",),
    ),
    Fault(
        "what an earlier job of the folder came to is the state of the new one",
        "dtf/cluster/ray_driver_state.py",
        'state if state["id"] == id else None',
        'state if state["id"] else None',
        (f"{_RAY}test_what_the_driver_wrote_last_needs_no_cluster",),
    ),
    Fault(
        "the last line of a job that has ended is lost",
        "dtf/cluster/followed_logs.py",
        "whole=not going)",
        "whole=False)",
        (f"{_RAY}test_lines_of_files_that_grow",),
    ),
    Fault(
        "trials share one folder in S3",
        "dtf/cluster/sagemaker_platform.py",
        '{"S3Uri": own,',
        '{"S3Uri": kept,',
        (f"{_SAGEMAKER}test_each_trial_of_a_sweep_is_a_job",),
    ),
    Fault(
        "SageMaker's hosts are ordered as texts",
        "dtf/cluster/sagemaker_allocation.py",
        "[int(part) if part.isdigit() else part for part",
        "[part for part",
        (f"{_SAGEMAKER}test_a_container_knows_its_place",),
    ),
    Fault(
        "any training job of the name counts as the submitted one",
        "dtf/cluster/sagemaker_aws.py",
        '.get(entry) != job["AlgorithmSpecification"][entry]',
        ".get(entry) is None",
        ("tests/cluster/test_sagemaker_aws.py::test_the_same_request_twice_is_one_job",),
    ),
]
