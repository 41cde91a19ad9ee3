"""MLA, by itself and with what else it goes together with."""

from typing import Any

from .cases import BIASES, FOUR_LAYERS, LAYERNORM_BIAS, Case

MLA = {"gpt": "mla:rank=7", "llama": "mla:rank=7,rope_dim=6"}


def latent(*named: tuple[str, ...], **overrides: Any) -> list[Case]:
    return [(shape, (MLA[shape], *names), overrides) for names in named for shape in ("gpt", "llama")]


CASES: list[Case] = [
    ("gpt", ("mla",), {}),
    ("llama", ("mla",), {}),
    *latent(
        (),
        ("identity-query",),
        ("identity-query:scale=0.8,layers=0,2",),
        ("residual-query",),
        ("nonlinear-query",),
        ("mlp-query",),
        ("skipv1",),
        ("resformer",),
        ("resformer:mode=per_layer",),
        ("resformer:mode=per_token,weight=0.3",),
        ("svformer",),
    ),
    *latent(
        *[(f"skipv1:injection={injection}",) for injection in ("pooling", "dynamic", "odd_even", "resformer")],
        ("skipv1:ratio=0.25,source_layer=1",),
        ("skipv1:ratio=0.75,injection=pooling", "residual-query"),
        ("skipv1-yoco",),
        ("yoco-v",),
        ("yoco",),
        ("cla-v",),
        ("cla:group_size=3",),
        ("cla", "identity-query"),
        ("fusedkv-lite",),
        **FOUR_LAYERS,
    ),
    *latent((), **BIASES),
    *latent((), head_dim=6),
    *latent(("skipv1",), **BIASES),
    *latent(("resformer:mode=per_token", "nonlinear-query:anchor=linear"), **BIASES),
    *latent(("yoco",), sliding_window=2, **BIASES, **FOUR_LAYERS),
    ("gpt", (MLA["gpt"],), {"position_embedding_type": "none"}),
    ("gpt", (MLA["gpt"],), {"block_type": "parallel_shared_norm", "norm_type": "dyt"}),
    ("llama", (MLA["llama"], "skipv1:keys=true,ratio=1.0"), {}),
    ("llama", (MLA["llama"],), {"rope_parameters": {"rope_theta": 500.0}} | LAYERNORM_BIAS),
    ("llama", (MLA["llama"],), {"num_hidden_groups": 1}),
]
