"""Law: what sparse tables cannot do is refused before ranks start, by a process without torch."""

from __future__ import annotations

import json
import subprocess
import sys

TABLED, SINGLE = (
    ("plugins=[tests.support.sparse_toy]", "recipe=tabled", "train.steps=1"),
    ("recipe=ctr_clicks", "recipe.model.table=sparse"),
)
BY_SERVERS = ("strategy=pserver", "strategy.dense=allreduce")
REFUSED: list[tuple[tuple[str, ...], str]] = [
    (
        (*TABLED, "strategy=ddp", "strategy.tables={ids: rows}", "launcher.processes=2"),
        "strategy.tables: who is left out; name each table of Tabled: ids, who",
    ),
    ((*TABLED, "strategy=fsdp", "strategy.tables={ids: rows, who: rows, what: rows}"), "there is no table what"),
    ((*TABLED, "strategy=ddp", "strategy.tables={ids: some, who: rows}"), "strategy.tables.ids=some is no choice"),
    (
        (*TABLED, "strategy=ddp", "strategy.tables=column_wise", "launcher.processes=3"),
        "strategy.tables=column_wise: table who has 2 columns, too few for 3 ranks",
    ),
    (
        (*TABLED, "strategy=fsdp", "strategy.tables=columns", "sparse=rowwise_adagrad", "launcher.processes=2"),
        "RowwiseAdagrad keeps sum of whole ones",
    ),
    (
        (*SINGLE, "strategy=tensor", "strategy.tables=tables", "launcher.processes=2"),
        "strategy.tables=table_wise puts whole tables on ranks, and GeneratedClicks has one",
    ),
    (
        (*SINGLE, "strategy=mesh", "strategy.context=2", "launcher.processes=2"),
        "strategy.context=2 divides the positions of a row, and GeneratedClicks has sparse tables",
    ),
    ((*SINGLE, "strategy=pipeline", "strategy.tables=tables", "launcher.processes=2"), "use strategy.tables=row_wise"),
    (
        ("recipe=resnet_shapes", *BY_SERVERS),
        "strategy.dense=allreduce leaves sparse tables to servers, and resnet_shapes has none; use "
        "recipe=ctr_clicks_sparse",
    ),
    (
        ("recipe=ctr_clicks", *BY_SERVERS),
        "this recipe has none as recipe.model.table is set; use recipe.model.table=sparse, or strategy=ddp",
    ),
    ((*TABLED, *BY_SERVERS, "strategy.mode=async"), "strategy.mode=sync, this is async"),
    (
        (*TABLED, *BY_SERVERS, "strategy.min_block=1"),
        "strategy.min_block is of no account with strategy.dense=allreduce",
    ),
    (
        (*TABLED, *BY_SERVERS, "strategy.server_device=cpu", "strategy.placement=hash_name"),
        "strategy.placement is of no account",
    ),
    ((*TABLED, "step.ema=0.9"), "step.ema=0.9 averages all weights"),
    (
        (SINGLE[0], "sparse=ftrl"),
        "GeneratedClicks has none as recipe.model.table is set; leave sparse=... out "
        "(sparse was set on the command line)",
    ),
    (
        (SINGLE[0], "recipe.model.table=dense", "sparse.lr_factor=2"),
        "GeneratedClicks has none as recipe.model.table is set",
    ),
    (
        (*TABLED, "sparse.admit_count=2", "sparse.when_full=error"),
        "sparse.when_full=error ends the run when the table is full, and sparse.admit_count asks for rows that have",
    ),
    *(
        ((*TABLED, job, *options), told)
        for job in ("job=train", "job=evaluate")
        for options, told in (
            (("sparse.values=bf16", "precision=fp64"), "use precision=fp32 or sparse.values=param"),
            (("sparse.disk=rows",), "sparse.memory_gb says not how much there is"),
        )
    ),
    ((*TABLED, "sparse.score_decay=0.5"), "sparse.score_decay=0.5 is of no account where no row leaves by its score"),
    (
        (*TABLED, "sparse.when_full=refuse", "strategy=pserver", "strategy.mode=geo"),
        "strategy.mode=geo adds up rows that trainers made by themselves",
    ),
    ((SINGLE[0], "checkpoint.delta_every=5"), "saves changed rows of sparse tables, and GeneratedClicks has none"),
    (
        (*TABLED, "checkpoint.delta_every=5", "checkpoint.every_steps=5"),
        "checkpoint.delta_every=5 must be less than checkpoint.every_steps=5",
    ),
    ((*TABLED, "checkpoint=off", "checkpoint.delta_every=5"), "has no saves to come between, as checkpoint=off saves"),
    (
        (SINGLE[0], "recipe.data.bag_values=3", "recipe.model.table=dense"),
        "recipe.model.table=dense has one value of each category",
    ),
    ((*SINGLE, "recipe.model.pooling=max"), "recipe.model.pooling=max: no category of recipe.data has several values"),
    (
        (SINGLE[0], "recipe.model.table=dense", "recipe.model.table_per_field=true"),
        "recipe.model.table_per_field=true has a meaning for recipe.model.table=sparse only",
    ),
    (("sparse.lr_factor=2",), "ResnetShapes has none; leave sparse=... out"),
    ((*TABLED, "recipe.capacity=0"), "tables(): table ids has capacity=0; it must be an int of 1 or more"),
    ((*TABLED, "sparse.memory_gb=1e300", "sparse.disk=rows"), "sparse.memory_gb=1e+300 must be 0 to 1000000"),
    ((*TABLED, "sparse.memory_gb=1", "sparse.disk=s3://bucket/x"), "sparse.disk=s3://bucket/x is no folder of a local"),
    ((*TABLED, "sparse.admit_probability=1e-17"), "sparse.admit_probability=1e-17 must be 1e-09 to 1"),
    (
        (*TABLED, "sparse=sgd", "sparse.weight_decay=20", "lr.peak=0.1"),
        "sparse.weight_decay=20 times the learning rate 0.1 must be less than 1",
    ),
    (
        (*TABLED, "sparse=sgd", "sparse.weight_decay=10", "sparse.lr_factor=2", "lr.peak=0.1"),
        "times the learning rate 0.2 must be less than 1",
    ),
]

FINE = [
    (*TABLED, "strategy=ddp", "strategy.tables={ids: row_wise, who: auto}", "launcher.processes=3"),
    (*TABLED, "strategy=ddp", "strategy.tables=auto", "sparse=rowwise_adagrad", "launcher.processes=3"),
    (*SINGLE, "recipe.model.table_per_field=true", "strategy.tables=tables", "launcher.processes=2"),
    (*TABLED, "strategy=ddp", "strategy.tables=columns", "launcher.processes=2"),
    (*TABLED, "strategy=fsdp", "strategy.tables=columns", "launcher.processes=1"),
    (*TABLED, *BY_SERVERS, "strategy.servers=2", "launcher.processes=3", "precision=fp16"),
    (*TABLED, "job=evaluate", "step.ema=0.9"),
    (SINGLE[0], "recipe.model.table=dense", "step.ema=0.9"),
    ("recipe=ctr_clicks_sparse", "recipe.model.table=dense"),
    (*TABLED, "checkpoint.delta_every=5", "strategy=pserver", "strategy.mode=geo"),
]


def test_what_cannot_run_is_refused_before_ranks_start_without_torch() -> None:
    code = (
        "import json, sys\nfrom dtf.config.compose import compose\nfrom dtf.core.errors import ConfigError\n"
        "def said(words):\n"
        "    try: compose(['launcher.devices=cpu', *words]).check(); return ''\n"
        "    except ConfigError as error: return str(error)\n"
        f"told = [said(words) for words, _ in {REFUSED!r}]\n"
        f"fine = [said(words) for words in {FINE!r}]\n"
        "heavy = sorted({'torch', 'numpy', 'numba'} & set(sys.modules))\n"
        "sys.modules['numba'] = None\n"
        f"print(json.dumps([told, fine, heavy, said({TABLED!r})]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    told, fine, heavy, without_numba = json.loads(done.stdout)
    assert [text for text, (_, words) in zip(told, REFUSED, strict=True) if words not in text] == []
    assert fine == [""] * len(FINE) and heavy == [] and "pip install 'dtf[ctr]'" in without_numba
