"""What ranks and hosts must have in common, and how those that differ are named."""

from __future__ import annotations

import json

from dtf.core.consistency import config_facts, describe_differences, shared_keys


def test_secrets_are_compared_and_not_shown() -> None:
    """A tokenizer is no secret, and an empty text stands for no secret."""
    keys = {"tokenizer": "bytes", "api_key": "hunter2", "keys": {"one": "hunter3"}, "token": ""}
    first, other = ({"recipe": keys | more} for more in ({}, {"tokenizer": "words", "api_key": "x", "token": "y"}))
    for facts in (config_facts, shared_keys):  # as trainers and servers compare them, and as hosts do
        text = describe_differences({"server 0": {"config": facts(first)}, "trainer 3": {"config": facts(other)}})
        named = 'api_key="***", server 0 has another; recipe.token="***", server 0 has ""; '
        assert f'{named}recipe.tokenizer="words", server 0 has "bytes"' in text and "keys" not in text
    assert "hunter" not in json.dumps(config_facts(first))
    assert config_facts(first) == config_facts({**first, "launcher": {}})


def test_a_mixture_names_who_differs() -> None:
    same = {"versions": {"nccl": "2.27"}, "training data": "100 ab"}
    assert describe_differences({"rank 0 on a": same, "rank 1 on b": same}) == ""
    other = {"versions": {"nccl": "2.26"}, "training data": "90 cd"}
    text = describe_differences({"rank 0 on a": same, "rank 1 on a": same, "rank 2 on b": other})
    assert text.startswith(
        'ranks differ: rank 2 on b: training data="90 cd", rank 0 on a has "100 ab"; versions.nccl="2.26", rank 0 on '
        'a has "2.27"; give'
    )
