"""A user's file: each optimizer is one line."""

from __future__ import annotations

import dtf

dtf.torch_optimizer("lion", "tests.support.foreign_optimizers:Lion")
dtf.torch_optimizer("counting", "tests.support.foreign_optimizers:Counting")
dtf.torch_optimizer("norm_of_rows", "tests.support.foreign_optimizers:NormOfRows")
dtf.torch_optimizer("in_itself", "tests.support.foreign_optimizers:InItself")
