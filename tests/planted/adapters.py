"""Faults in how models and data of other libraries become recipes."""

from tests.planted.fault import Fault

RECIPE = "tests/unit/test_transformers_recipe.py::"
REFUSED = f"{RECIPE}test_what_cannot_be_right_is_refused_by_name"

FAULTS = [
    Fault(
        "a model of transformers may weigh its classes",
        "dtf/adapters/transformers_heads.py",
        "        return classes.masked_fill(~known & known.any(), IGNORED)  # without one there would be no loss\n",
        "        return targets.clone()\n",
        (REFUSED,),
    ),
    Fault(
        "a model of transformers may take the mean of rows in place of labels",
        "dtf/adapters/transformers_heads.py",
        "        labels[:1, 1::2] = IGNORED\n",
        "",
        (REFUSED,),
    ),
    Fault(
        "each row of tokens counts as one label",
        "dtf/adapters/transformers_heads.py",
        "        return cross_entropy(logits, labels).sum(1), (labels != IGNORED).sum(1)\n",
        "        return cross_entropy(logits, labels).sum(1), (labels != IGNORED).any(1)\n",
        (f"{RECIPE}test_tokens_count_where_their_label_is_not_ignored",),
    ),
    Fault(
        "a language model tells each word from itself",
        "dtf/adapters/transformers_heads.py",
        "        return functional.pad(targets, (0, 1), value=IGNORED)[:, 1:]\n",
        "        return targets\n",
        (f"{RECIPE}test_a_language_model_tells_each_word_from_those_before",),
    ),
    Fault(
        "each rank makes a model before it reads rows",
        "dtf/adapters/transformers_run.py",
        "    PreTrainedModel.__init__ = _stop\n",
        "    PreTrainedModel.__init__ = before\n",
        (f"{RECIPE}test_rows_are_read_before_the_memory_of_a_model_is_taken",),
    ),
    Fault(
        "a model keeps the format of the file that it was read from",
        "dtf/adapters/transformers_run.py",
        "        return model.float()",
        "        return model",
        (f"{RECIPE}test_a_file_of_16_bits_gives_a_model_of_32",),
    ),
    Fault(
        "columns that a model does not take reach the collator",
        "dtf/adapters/transformers_data.py",
        " if name in self._columns}",
        "}",
        (f"{RECIPE}test_classes_of_rows_have_a_loss_each_and_names",),
    ),
    Fault(
        "what a model adds to its loss in training alone is not seen",
        "dtf/adapters/transformers_run.py",
        "            trained = model.train()(",
        "            trained = model.eval()(",
        (REFUSED,),
    ),
    Fault(
        "recurrent layers move gathered weights",
        "dtf/strategies/fully_sharded.py",
        "        _keep_weights_in_place(model)\n",
        "",
        ("tests/laws/test_own_memory.py::test_a_layer_that_moves_its_weights_learns",),
    ),
    Fault(
        "a model sees that it is sharded",
        "dtf/strategies/fully_sharded.py",
        '            vars(module).pop("_is_fsdp_managed_module", None)\n',
        "            pass\n",
        ("tests/unit/test_fsdp_mark.py::test_only_compiled_modules_keep_the_mark_of_torch",),
    ),
]
