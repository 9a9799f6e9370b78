"""What a rank of the zoo needs, imported once by the fork server."""

from __future__ import annotations

import timm  # noqa: F401

import tests.zoo.recipe
import tests.zoo.worker  # noqa: F401
from tests.zoo.entries import load_zoo

load_zoo()
