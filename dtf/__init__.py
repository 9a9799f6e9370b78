"""dtf: declarative distributed training on PyTorch.

`python -m dtf --help` starts here; importing dtf imports no torch.
"""

__version__ = "0.1.0"
