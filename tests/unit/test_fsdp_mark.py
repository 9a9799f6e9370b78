"""What a model can see of its being sharded."""

from torch import nn

from dtf.strategies.fully_sharded import _unmark

MARK = "_is_fsdp_managed_module"


def test_only_compiled_modules_keep_the_mark_of_torch() -> None:
    """Encoders of speech in transformers read it, and then leave out no layers by chance."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    for module in model.modules():
        setattr(module, MARK, True)
    _unmark(model, ["1"])
    assert [name for name, module in model.named_modules() if hasattr(module, MARK)] == ["1", "1.0"]
    _unmark(model, [])
    assert not any(hasattr(module, MARK) for module in model.modules())
