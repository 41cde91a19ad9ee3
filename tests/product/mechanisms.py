"""One axis of the product: every mechanism preset, and combinations and options that ask something else of a tool."""

from typing import Any, NamedTuple

from shapes import randomize, tiny

from leanqkv import LeanConfig, LeanForCausalLM
from leanqkv.presets.catalog import MECHANISMS
from leanqkv.presets.names import parse_name

# Of the same layer, of the layer below and of the first one, not the last heads; no name can hold them.
ROWS = [[0, 2, 0, 0], [1, 0, 0, 3], [1, 3, 1, 1], [2, 1, 0, 1], [2, 2, 2, 0], [3, 1, 2, 3]]
# Mechanisms in a model's name, fields of its configuration.
COMBINED: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "output-gate:per_head=true": (("output-gate:per_head=true",), {}),
    "borrowed-values:heads=…": ((), {"key_value": {"type": "borrowed_values", "heads": ROWS}}),
    "baseline": ((), {}),
    "gqa+skipv1": (("gqa", "skipv1"), {}),
    "mla+skipv1": (("mla", "skipv1"), {}),
    "mla:rank=4": (("mla:rank=4",), {}),
    "keys-as-values+skipv1": (("keys-as-values", "skipv1"), {}),
    "skipv1:injection=pooling": (("skipv1:injection=pooling",), {}),
    "resformer:mode=per_token": (("resformer:mode=per_token",), {}),
    "nonlinear-query:anchor=linear": (("nonlinear-query:anchor=linear",), {}),
    "hyper-connections:mode=static": (("hyper-connections:mode=static",), {}),
    "hyper-connections:mode=mhc": (("hyper-connections:mode=mhc",), {}),
    "yoco:local=true": (("yoco:local=true",), {"sliding_window": 4}),
    "sliding_window": ((), {"sliding_window": 4}),
    "prefix": ((), {"mask_type": "prefix"}),
    "moe": ((), {"mlp_type": "moe", "num_local_experts": 4}),
    "parallel": ((), {"block_type": "parallel"}),
    "shared blocks": ((), {"num_hidden_groups": 2}),
    "biases and qk_norm": (
        (),
        {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True, "qk_norm": True},
    ),
    "nonlinear-key:anchor=linear+gqa": (("nonlinear-key:anchor=linear", "gqa"), {}),
    "latent-keys+nonlinear-value": (("latent-keys", "nonlinear-value"), {}),
    "latent-keys:before_rotary=true": (("latent-keys:before_rotary=true", "values-from-keys"), {}),
}
PAD = 0
# What the slots that are no field of a configuration set.
FIELDS = {"heads": "num_key_value_heads", "latent": "kv_lora_rank"}
DEPTH = "num_hidden_layers"


class Case(NamedTuple):
    """A model to hand to a tool: a tiny shape with mechanisms.

    name: as the table has it. shape: "gpt" or "llama" of shapes.py.
    """

    name: str
    shape: str
    mechanisms: tuple[str, ...]
    fields: dict[str, Any]

    def config(self, **fields: Any) -> LeanConfig:
        return tiny(self.shape, *self.mechanisms, pad_token_id=PAD, **{**self.fields, **fields})

    def model(self, std: float = 0.3, **fields: Any) -> LeanForCausalLM:
        """In float64 and evaluation mode, with nothing near zero."""
        return randomize(LeanForCausalLM(self.config(**fields)).double(), std=std).eval()

    @property
    def words(self) -> list[str]:
        """What makes the model another one than the baseline: a refusal names one of these."""
        config, plain = self.config(), tiny(self.shape)
        presets = [MECHANISMS[name] for name, _ in parse_name("+".join(("tiny", *self.mechanisms))).mechanisms]
        named = [str(preset.spec.get("type", preset.slot)) for preset in presets] + [preset.slot for preset in presets]
        named += [FIELDS[preset.slot] for preset in presets if preset.slot in FIELDS]
        named += [name for name in self.fields if name != DEPTH and getattr(config, name) != getattr(plain, name, None)]
        return [*named, *(name.replace("_", " ") for name in named)]


def _cases() -> list[Case]:
    # The layer that lends must lie below another one; the middle layers of four are not the first.
    depth = {name: max(4, 2 + preset.spec.get("source_layer", 0)) for name, preset in MECHANISMS.items()}
    named = {name: ((name,), {"num_hidden_layers": depth[name]}) for name in MECHANISMS}
    named |= {name: (mechanisms, {"num_hidden_layers": 4, **more}) for name, (mechanisms, more) in COMBINED.items()}
    return [Case(name, ("gpt", "llama")[i % 2], *given) for i, (name, given) in enumerate(named.items())]


CASES = _cases()
