"""The examples as recipes: one line each."""

from typing import NamedTuple

import dtf


class Example(NamedTuple):
    """Places of its parts in tests.support.hf."""

    model: str
    data: str
    collator: str


EXAMPLES = {
    "hf_classifier": Example("models:classifier", "taught:sentences", "taught:padding"),
    "hf_tagger": Example("models:tagger", "taught:tags", "taught:tag_padding"),
    "hf_language": Example("models:language_model", "taught:texts", "taught:next_words"),
    "hf_masked": Example("models:masked_words", "taught:texts", "taught:masked_words"),
    "hf_regression": Example("models:regression", "rows:numbers", "rows:padding"),
    "hf_sets": Example("models:label_sets", "rows:sets", "rows:padding"),
    "hf_llama": Example("models:llama", "rows:texts", "rows:padding"),
}
for _name, _example in EXAMPLES.items():
    _model, _data, _collator = (f"tests.support.hf.{part}" for part in _example)
    dtf.transformers_recipe(_name, model=_model, data=_data, collator=_collator)
dtf.transformers_recipe(
    "hf_loaded",
    model="tests.support.hf.models:loaded",
    data="tests.support.hf.taught:texts",
    collator="tests.support.hf.taught:next_words",
)
