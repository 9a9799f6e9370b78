"""A package that brings what others define."""

from tests.support.foreign_optimizers import *  # noqa: F403
from tests.support.foreign_optimizers import Counting as Renamed  # noqa: F401
