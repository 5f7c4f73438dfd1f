"""OpTable: selection of providers, its description, and prepared weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mvllm.errors import ConfigError, ContractError
from mvllm.layers.linear import ColumnParallelLinear
from mvllm.layers.mlp import GatedMLP
from mvllm.ops.all_schemas import SCHEMAS
from mvllm.ops.registry import REFERENCE, OpTable
from mvllm.platform.op_provider import OpCase, OpProvider
from tests.helpers.paged_driver import make_context


def provide(op: str, name: str, **settings: object) -> OpProvider:
    return OpProvider(op=op, name=name, function=lambda *args: name, **settings)


def only_bfloat16(case: OpCase) -> list[str]:
    return [] if case.dtype == "bfloat16" else [f"takes bfloat16, not {case.dtype}"]


def test_without_providers_the_reference_runs() -> None:
    op = OpTable.resolve().get("relu", torch.float32, size=4)
    assert op.provider == REFERENCE
    assert op(torch.tensor([-1.0, 2.0])).tolist() == [0.0, 2.0]


def test_of_the_providers_that_support_a_case_the_highest_priority_wins() -> None:
    table = OpTable.resolve(
        [
            provide("relu", "plain"),
            provide("relu", "fast", priority=2, supports=only_bfloat16),
            provide("relu", "middle", priority=1),
        ]
    )
    assert table.get("relu", torch.bfloat16, size=4).provider == "fast"
    assert table.get("relu", torch.float32, size=4).provider == "middle"
    assert table.get("silu", torch.float32, size=4).provider == REFERENCE


def test_a_provider_sees_the_facts_that_the_schema_lists() -> None:
    seen = []
    provider = provide("linear", "watcher", supports=lambda case: seen.append(case) or ["only watching"])
    make_layer(provider)
    assert seen == [OpCase("linear", "float32", {"in_features": 3, "out_features": 6, "bias": True})]


def test_each_case_is_resolved_once() -> None:
    asked = []
    table = OpTable.resolve([provide("relu", "p", supports=lambda case: asked.append(case) or [])])
    assert table.get("relu", torch.float32, size=4) is table.get("relu", torch.float32, size=4)
    table.get("relu", torch.float32, size=8)
    assert len(asked) == 2


def test_facts_are_those_of_the_schema() -> None:
    with pytest.raises(AssertionError, match="hidden_size"):
        OpTable.resolve().get("rms_norm", torch.float32, width=4)


def test_a_provider_for_an_unknown_operation_is_refused() -> None:
    with pytest.raises(ContractError, match=r"'fast' replaces 'warp'.*Operations: .*linear"):
        OpTable.resolve([provide("warp", "fast")])


def test_a_batch_invariant_table_selects_only_providers_that_declare_it() -> None:
    def supports(case: OpCase) -> list[str]:
        return [] if case.batch_invariant else ["another is faster"]

    providers = [
        provide("rms_norm", "fast", priority=1),
        provide("rms_norm", "ordered", batch_invariant=True, supports=supports),
    ]
    assert OpTable.resolve(providers).get("rms_norm", torch.float32, hidden_size=4).provider == "fast"
    table = OpTable.resolve(providers, batch_invariant=True)
    assert table.get("rms_norm", torch.float32, hidden_size=4).provider == "ordered"
    [row] = [row for row in table.describe() if row.op == "rms_norm"]
    assert row.declined == (("fast", ("it is not batch-invariant",)),)


def test_a_batch_invariant_table_has_no_references_that_add_up() -> None:
    table = OpTable.resolve([provide("gelu", "fast")], batch_invariant=True)
    assert table.get("relu", torch.float32, size=4).provider == REFERENCE  # exact
    facts = {"in_features": 2, "size": 2, "bias": False}
    assert table.get("linear_silu_and_mul", torch.float32, **facts).provider == REFERENCE  # not used
    with pytest.raises(ConfigError, match=r"the operation gelu in float32.*\(fast: it is not batch-invariant\)"):
        table.get("gelu", torch.float32, size=4)


def test_the_description_names_the_provider_of_each_case_and_why_others_were_skipped() -> None:
    table = OpTable.resolve([provide("relu", "fast", supports=only_bfloat16), provide("silu", "unasked")])
    table.get("relu", torch.float32, size=4)
    table.get("relu", torch.bfloat16, size=4)
    rows = table.describe()
    relu = [row for row in rows if row.op == "relu"]
    assert [(row.case.dtype, row.provider, row.declined) for row in relu] == [
        ("float32", REFERENCE, (("fast", ("takes bfloat16, not float32",)),)),
        ("bfloat16", "fast", ()),
    ]
    assert {row.op for row in rows} == set(SCHEMAS)
    (silu,) = (row for row in rows if row.op == "silu")
    assert silu.case is None and silu.candidates == ("unasked", REFERENCE)


def make_layer(provider: OpProvider) -> ColumnParallelLinear:
    return ColumnParallelLinear(make_context(providers=[provider]), [("fc", 6)], 3, bias=True)


def test_a_prepared_weight_replaces_the_loaded_one() -> None:
    def packed_linear(x: torch.Tensor, packed: dict, bias: torch.Tensor) -> torch.Tensor:
        return x @ packed["transposed"] + bias

    layer = make_layer(
        OpProvider("linear", "packed", packed_linear, prepare=lambda weight: {"transposed": weight.t().clone()})
    )
    torch.nn.init.normal_(layer.weight)
    torch.nn.init.normal_(layer.bias)
    x, expected = torch.randn(2, 3), None
    expected = torch.nn.functional.linear(x, layer.weight, layer.bias)
    layer.prepare_weights()
    torch.testing.assert_close(layer(x), expected)
    assert [name for name, _ in layer.named_parameters()] == ["bias"], "the loaded weight is dropped"


def test_every_schema_describes_itself() -> None:
    for name, schema in SCHEMAS.items():
        assert schema.name == name and schema.summary and schema.facts
        assert set(schema.may_overwrite) <= set(schema.parameters)
        assert set(schema.updates) <= set(schema.parameters) - set(schema.may_overwrite)


@pytest.mark.parametrize(
    ("asked_for", "runs"),
    [
        (None, "fused"),
        ("rms_norm", "fused"),
        ("linear", "mine"),
        ("silu_and_mul", "platform's"),
        ("linear_silu_and_mul", "mine"),
    ],
)
def test_the_platforms_fused_operation_does_not_bypass_a_requested_provider(asked_for: str | None, runs: str) -> None:
    of_platform = [provide(op, "platform's") for op in ("linear", "silu_and_mul")]
    of_platform.append(provide("linear_silu_and_mul", "fused"))
    asked = [] if asked_for is None else [provide(asked_for, "mine")]
    ctx = replace(make_context(), ops=OpTable.resolve(of_platform, asked))
    mlp = GatedMLP(ctx, "mlp", 4, 8, "silu", bias=False)
    assert mlp.gate_up(torch.zeros(1, 4)) == runs
    assert (mlp._act is not None) == (asked_for in ("linear", "silu_and_mul"))
