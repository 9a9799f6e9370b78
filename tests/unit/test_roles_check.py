"""What a strategy says of its processes is refused by name where none can be started so."""

from __future__ import annotations

from typing import Any

import pytest

from dtf.api.helper_roles import HelperRoles
from dtf.api.strategy import check_roles
from dtf.core.errors import ConfigError
from tests.support.roles import RolesStrategy


class Again(HelperRoles):
    """Lost processes of some roles are started again alone."""

    def __init__(self, *roles: str) -> None:
        self._roles = frozenset(roles)

    @property
    def replaceable(self) -> frozenset[str]:
        return self._roles


class Said(RolesStrategy):
    def __init__(self, roles: Any, helper_roles: Any) -> None:
        self.said, self.helper_roles = roles, helper_roles

    def roles(self, processes: int) -> Any:
        return self.said


SERVERS = {"server": 1, "trainer": 2}


@pytest.mark.parametrize(
    ("roles", "helper_roles"), [({"trainer": 2}, HelperRoles()), (SERVERS, Again("trainer")), (SERVERS, Again())]
)
def test_roles_that_can_be_started_are_taken(roles: Any, helper_roles: Any) -> None:
    check_roles(Said(roles, helper_roles), 2)


@pytest.mark.parametrize(
    ("roles", "helper_roles", "words"),
    [
        *(
            (roles, HelperRoles(), r"Said.roles\(2\) returned .*; it must return a dict of role -> number of processes")
            for roles in (None, {}, [1], {"trainer": 0}, {"trainer": True}, {"trainer": "2"}, {"trainer": 2.0})
        ),
        (SERVERS, HelperRoles, "Said.helper_roles is <class .*; it must be a dtf.HelperRoles, or be left out"),
        (SERVERS, None, "Said.helper_roles is None; it must be"),
        (SERVERS, Again("server"), r"replaceable has the role that runs the engine \(server\); it may have trainer: "),
        (SERVERS, Again("nope"), "replaceable has 'nope'; it may have trainer: "),
        ({"trainer": 2}, Again("nope"), "replaceable has 'nope'; it may have no role: "),
    ],
)
def test_others_are_refused_by_name(roles: Any, helper_roles: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_roles(Said(roles, helper_roles), 2)
