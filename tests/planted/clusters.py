"""Faults in what clusters are told and in how runs end there."""

from __future__ import annotations

from tests.planted.fault import Fault

FAULTS = [
    Fault(
        "a pod that was evicted counts against its job",
        "dtf/cluster/kubernetes_objects.py",
        '{"action": "Ignore", "onPodConditions"',
        '{"action": "Count", "onPodConditions"',
        ("tests/cluster/test_kubernetes.py::test_every_exit_code_is_decided_alike_in_all_kinds",),
    ),
    Fault(
        "a pod whose config is wrong is started again",
        "dtf/cluster/kubernetes_objects.py",
        '"onExitCodes": _codes(FINAL)',
        '"onExitCodes": _codes((1,))',
        ("tests/cluster/test_kubernetes.py::test_every_exit_code_is_decided_alike_in_all_kinds",),
    ),
    Fault(
        "a pod gets the grace of Kubernetes, not that of its saves",
        "dtf/cluster/kubernetes_objects.py",
        "math.ceil(request.grace_s) + _SHUTDOWN_S",
        "30",
        ("tests/cluster/test_kubernetes.py::test_a_save_has_its_time",),
    ),
    Fault(
        "ends count although there is a new checkpoint",
        "dtf/cluster/ends.py",
        'newest != known["newest"]',
        "False",
        ("tests/cluster/test_kubernetes_ends.py::test_a_run_that_makes_no_progress_is_given_up",),
    ),
    Fault(
        "a run that was submitted again, to go on, is taken for finished",
        "dtf/core/run_record.py",
        'if launch.get("submission") == digest]',
        'if launch.get("submission")]',
        ("tests/cluster/test_kubernetes_ends.py::test_a_process_that_comes_after_the_end_knows_it",),
    ),
    Fault(
        "a run folder leaves its volume by ..",
        "dtf/cluster/paths_inside.py",
        'if ".." in known.parts or not',
        "if not",
        (
            "tests/cluster/test_kubernetes.py::test_a_job_of_one_role_a_folder_elsewhere_and_an_unknown_kind_are_refused",
        ),
    ),
    Fault(
        "hosts do not hear that one of them is asked to stop",
        "dtf/launch/host_rendezvous.py",
        'self.broadcast({"stop": True})',
        "pass",
        ("tests/launch/test_host_notices.py::test_all_hosts_stop_when_one_is_asked_to",),
    ),
    Fault(
        "a name that a cluster forgets for a moment is wrong",
        "dtf/launch/host_rendezvous.py",
        "if isinstance(error, socket.gaierror) and not known:",
        "if isinstance(error, socket.gaierror):",
        ("tests/launch/test_host_notices.py::test_a_name_that_was_known_comes_back_with_its_host",),
    ),
]
