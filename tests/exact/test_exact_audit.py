"""The audit says what can be eliminated, no less and no more, and what that saves."""

import random

import pytest
import torch
from exact_models import (
    BIASES,
    SKIPLESS,
    build,
    elements,
    logits,
    random_config,
    relative,
    small,
    tolerance,
    weights,
    with_condition,
)
from expected_eliminations import weights_fewer

from leanqkv import LeanConfig, LeanError, LeanForCausalLM, count_parameters
from leanqkv.checkpoints.families import FAMILIES
from leanqkv.eliminate import eliminate, findings, parse_request, transform, weight_table
from leanqkv.eliminate.audit import spectra

NORMS_OFF = {"norm_type": "layernorm", "norm_bias": True, "norm_eps": 1e12, **BIASES}


def by_name(config: LeanConfig) -> dict:
    ways = {finding.remove: finding for finding in findings(config)}
    assert len(ways) == len(findings(config))
    return ways


@pytest.mark.parametrize("seed", range(120))
def test_what_applies(seed: int) -> None:
    config = random_config(random.Random(seed))
    total = count_parameters(config).total
    for finding in findings(config):
        assert finding.parameters == total - finding.saves
        assert finding.speedup == pytest.approx(total / finding.parameters)
        at_once = weights_fewer(config, finding.remove, None)
        if finding.layers is None:
            assert finding.applies == (at_once is not None), finding
            assert finding.saves == (at_once or 0), finding
        single = [weights_fewer(config, finding.remove, (layer,)) for layer in range(config.num_hidden_layers)]
        if finding.layers is not None:
            assert finding.applies and at_once is None, finding
            assert list(finding.layers) == [layer for layer, count in enumerate(single) if count is not None], finding
            assert finding.saves in single, finding
        elif not finding.applies and finding.remove in ("query", "key", "value", "output"):
            assert not any(count is not None for count in single), finding
        assert finding.applies or len((finding.why_not or "").split()) >= 3, finding


@pytest.mark.parametrize(
    "family, shape, share",
    [
        ("mistral", {"num_key_value_heads": 8, "intermediate_size": 14336}, "0.06%"),
        ("llama", {"num_key_value_heads": 32, "intermediate_size": 11008}, "0.25%"),
        ("gpt2", {"n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}, "0.95%"),
    ],
    ids=["Mistral-7B", "Llama-2-7B", "GPT-2 124M"],
)
def test_models_with_norms_are_less_than_a_hundredth_redundant(family: str, shape: dict, share: str) -> None:
    """Identity blocks of W_V, and of W_K where no rotary positions act, are all that can go exactly."""
    large = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 32000}
    ways = by_name(FAMILIES[family].lean_config(shape if family == "gpt2" else large | shape))
    assert {remove for remove, finding in ways.items() if finding.applies} == {"block-diagonal"}
    assert f"{ways['block-diagonal'].share:.2%}" == share


def test_a_key_that_is_partly_an_identity_is_left_as_it_is() -> None:
    """In one layer: others are eliminated as `inspect` says."""
    key = [{"type": "block_identity", "width": 2, "layers": [1]}]
    config = small(norm_type="rmsnorm", head_dim=8, num_attention_heads=2, hidden_size=24, key=key)
    finding = by_name(config)["block-diagonal"]
    eliminated = eliminate(build(config, weights(config)), "block-diagonal")
    assert finding.applies and finding.saves == count_parameters(config).total - eliminated.model.num_parameters()


@pytest.mark.parametrize("heads, groups, width", [(4, 2, 6), (3, 1, 12), (6, 3, 4)])
def test_as_many_key_columns_as_the_stream_has_but_fewer_heads(heads: int, groups: int, width: int) -> None:
    """W_K is square here, but an identity has no heads to be cut into: Graef's e = d is MHA."""
    config = small(num_attention_heads=heads, num_key_value_heads=groups, head_dim=width, **SKIPLESS)
    ways = by_name(config)
    assert not any(finding.applies for remove, finding in ways.items() if remove != "block-diagonal")
    for remove in ("query", "key", "value", "output"):
        with pytest.raises(LeanError, match=r"\w+ \w+ \w+"):
            transform(config, weights(config), parse_request(remove))


@pytest.mark.parametrize(
    "fields, remove, source",
    [
        ({}, "query", "4.2"),
        ({"num_hidden_groups": 1}, "query", "4.3"),
        ({"mlp_skip": False}, "query", "4.4"),
        (SKIPLESS, "query", "Fig. 2"),
        (SKIPLESS, "query,output", "Table 1"),
        (SKIPLESS, "value,output", "Table 1"),
        ({"num_attention_heads": 1}, "single-head", "4.1"),
        ({"norm_type": "rmsnorm"}, "block-diagonal", "3.2"),
    ],
)
def test_sources(fields: dict, remove: str, source: str) -> None:
    finding = by_name(small(**fields))[remove]
    assert finding.applies and source in finding.source


def test_parallel_blocks_lose_query_or_output_but_not_both() -> None:
    """Graef's Fig. 3 draws blocks without both: Q of a layer and P of the one below need one basis each."""
    ways = by_name(small(**SKIPLESS, block_type="parallel"))
    assert ways["query"].applies and ways["output"].applies
    assert ways["query"].layers is None and ways["output"].layers is None
    assert not ways["query,output"].applies


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm", "dyt"])
def test_norms_forbid_all_but_what_stays_inside_the_heads(norm: str) -> None:
    ways = by_name(small(norm_type=norm, num_attention_heads=1, position_embedding_type="learned", head_dim=12))
    assert {remove for remove, finding in ways.items() if finding.applies} == {"single-head"}
    ways = by_name(small(norm_type=norm))
    assert {remove for remove, finding in ways.items() if finding.applies} == {"block-diagonal"}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_attention_heads": 1},
        {"tie_word_embeddings": False, "norm_bias": False},
        {"mlp_type": "gated", "attention_bias": False, "attention_output_bias": False, "mlp_bias": False},
        {"mlp_type": "moe", "mlp_bias": False},
        {"block_type": "parallel"},
        {"block_type": "parallel_shared_norm", "position_embedding_type": "rope"},
        {"mlp_skip": False, "num_key_value_heads": 1},
        {"query": [{"type": "identity", "layers": [0]}]},
        {"num_hidden_groups": 1},
        {"key_value": {"type": "interpolated_values", "mode": "per_token"}},
        {"qk_norm": True},
    ],
    ids=str,
)
def test_disabled_norms(fields: dict) -> None:
    """What the audit says of a model whose norms an epsilon disables is what comes out of it."""
    config = small(**{**NORMS_OFF, **fields})
    tensors = weights(config)
    tensors = {name: tensor * 1e6 if "norm.weight" in name else tensor for name, tensor in tensors.items()}
    for finding in findings(config):
        layer = None if finding.layers is None else ",".join(map(str, finding.layers[:1]))
        request = parse_request(finding.remove, layer)
        if not finding.applies:
            with pytest.raises(LeanError, match=r"\w+ \w+ \w+"):
                transform(config, tensors, request)
            continue
        result = transform(config, tensors, request)
        assert elements(tensors) - elements(result.tensors) == finding.saves, finding
        limit = max(1e-9, tolerance(result.conditions))  # the epsilon leaves var / 2e12
        assert relative(logits(result.config, result.tensors), logits(config, tensors)) <= limit, finding


def test_spectra() -> None:
    config = small(key_value={"type": "first_layer_values"}, num_key_value_heads=3)
    tensors = weights(config)
    tensors["model.layers.0.self_attn.k_proj.weight"] = with_condition(12, 1e5)
    tensors["model.layers.1.self_attn.q_proj.weight"][:, 0] = 0
    by_tensor = {spectrum.tensor: spectrum for spectrum in spectra(config, tensors)}
    assert by_tensor.keys() == {name for name in tensors if "self_attn" in name}
    for name, spectrum in by_tensor.items():
        values = torch.linalg.svdvals(tensors[name])
        rank = torch.linalg.matrix_rank(tensors[name]).item()
        assert spectrum.shape == tuple(tensors[name].shape) and spectrum.rank == rank
        if rank == len(values):
            assert spectrum.condition == pytest.approx((values[0] / values[-1]).item(), rel=0.01)
            assert spectrum.smallest == pytest.approx(values[-1].item(), rel=0.01)
        else:
            assert spectrum.condition > 1e14 and spectrum.smallest < 1e-14 * values[0]


def table(**fields: object) -> dict[str, float]:
    return weight_table(LeanConfig(hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, **fields))


def test_graefs_table() -> None:
    """Section 4, with the vocabulary that it prints for Pythia."""
    pythia = table(intermediate_size=16384, vocab_size=50400, block_type="parallel", tie_word_embeddings=False)
    mistral = table(
        num_key_value_heads=8, intermediate_size=14336, vocab_size=32000, mlp_type="gated", tie_word_embeddings=False
    )
    for rows, integers, total, without, saving, speedup in (
        (pythia, (33_554_432, 33_554_432, 134_217_728, 412_876_800), "6.9", "5.8", "16", "1.19"),
        (mistral, (33_554_432, 8_388_608, 176_160_768, 262_144_000), "7.2", "6.2", "15", "1.17"),
    ):
        values = list(rows.values())
        assert set(integers) <= set(values)
        assert f"{values[-4] / 1e9:.1f}" == total and f"{values[-3] / 1e9:.1f}" == without
        assert f"{100 * values[-2]:.0f}" == saving and f"{values[-1]:.2f}" == speedup


def test_a_result_in_sixteen_bits_keeps_the_frequencies_of_rotary_positions() -> None:
    """As a saved one that is loaded does."""
    model = LeanForCausalLM(small(position_embedding_type="rope", hidden_size=24)).eval()
    found = eliminate(model, "block-diagonal", dtype=torch.bfloat16).model
    assert {parameter.dtype for parameter in found.parameters()} == {torch.bfloat16}
    assert [*found.buffers()] and all(buffer.dtype != torch.bfloat16 for buffer in found.buffers())
