"""Why a strategy may refuse a model: the few causes that no strategy can do away with, and how a refusal names them."""

from __future__ import annotations

import re

CAUSES: dict[str, str] = {
    "hidden state": "the forward pass changes state that replicas cannot agree on",
    "unseen randomness": "the forward pass draws from generators that torch does not seed",
    "uneven use": "which modules a pass uses depends on the rows, and ranks wait for each other in them",
    "layout": "the model cannot be divided as the strategy or its recipe divides it, or talks to other ranks itself",
    "sparse gradients": "a gradient is sparse",
    "non-real parameters": "parameters are complex, integers, of several formats, without a shape, or not the model's",
    "several updates": "there is more than one loss or optimizer",
    "loss": "the loss is no mean over rows or labels",
}
"""Name -> what it means."""

_WORDS = {
    "several updates": r"several (losses|optimizers)|two (losses|optimizers)|one optimizer",
    "unseen randomness": r"random numbers? (that|of|from) (Python|numpy|a generator|torch does not)|unseen random|"
    r"draws? .*(Python|numpy|generator of its own)",
    "non-real parameters": r"real numbers|several formats|complex|uninitialized|lazy|Lazy|"
    r"no optimizer knows|is no parameter of the model|leaves out",
    "uneven use": r"find_unused_parameters|others do not|do(es)? not use|uneven|not all ranks|other modules",
    "hidden state": r"\.grad, which|copy of the|other memory|"
    r"passes read from|buffer|attribute|state that|hidden state|differs? between replicas",
    "sparse gradients": r"sparse grad|sparse=True|gradient .* is sparse",
    "loss": r"\.loss returned|no mean|mean over rows|loss per row",
    "layout": r"strategy=(tensor|pipeline|mesh)|split over|layout|block|stage|cut|splits|too few|divided|channels|"
    r"train\(\) of its own|__eq__|SyncBatchNorm|talks to other ranks|TorchScript|share memory|"
    r"register_post_accumulate_grad_hook",
}


def cause_of(message: str) -> str:
    """The cause that a refusal names; "other" if none."""
    return next((cause for cause, words in _WORDS.items() if re.search(words, message)), "other")
