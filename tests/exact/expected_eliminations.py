"""What can be eliminated exactly, written down from the papers' conditions alone.

Karbevski & Mijoski 2025 (arXiv 2510.23912): Lemma 3.1, Propositions 3.2 and 4.1, Theorems 4.2-4.4. Graef 2024 (arXiv
2404.12362): Table 1 and Figure 2. Weights are taken to be invertible where they are square.

The conditions are linear equations between changes of basis, and what they leave free is a question of ranks.
test_exact_derivatives.py holds them against the derivatives of the model itself.
"""

from collections.abc import Collection, Hashable, Iterable

import numpy as np

from leanqkv import LeanConfig
from leanqkv.model.layout import LayerPlan

Weight = tuple[str, int]  # slot and the block that holds it
SLOTS = ("query", "key", "value", "output")


class Generators:
    """Linear equations between the generators A of changes of basis `1 + t A`, one unknown for every basis.

    Two bases that must be one have equal generators, and a basis that must stay has the generator 0. The equations are
    the same for every entry of the matrices A, so that one number stands for each.
    """

    def __init__(self) -> None:
        self.equations: list[dict[Hashable, int]] = []

    def equal(self, one: Hashable, other: Hashable) -> None:
        if one != other:
            self.equations.append({one: 1, other: -1})

    def opposite(self, one: Hashable, other: Hashable) -> None:
        self.equations.append({one: 1, other: 1} if one != other else {one: 1})

    def zero(self, unknown: Hashable) -> None:
        self.equations.append({unknown: 1})

    def free(self, chosen: Collection[Hashable]) -> bool:
        """Whether the chosen unknowns, one entry for each choice, can be given any values at once."""
        given = [*self.equations, *({unknown: 1} for unknown in chosen)]
        unknowns = list({unknown: None for equation in given for unknown in equation})
        rows = np.array([[equation.get(unknown, 0) for unknown in unknowns] for equation in given])
        before = np.linalg.matrix_rank(rows[: len(self.equations)]) if self.equations else 0
        return np.linalg.matrix_rank(rows) == before + len(chosen)


def stream(config: LeanConfig) -> Generators:
    """The bases of the stream: ("in", i) before layer i, ("mid", i) between attention and MLP of a serial block."""
    generators, layers = Generators(), config.plan.layers
    for i, layer in enumerate(layers):
        serial = config.block_type == "serial"
        before, after = ("in", i), ("in", i + 1)
        if serial and config.attention_skip:
            generators.equal(before, ("mid", i))
        if serial and config.mlp_skip:
            generators.equal(("mid", i), after)
        if not serial and config.mlp_skip:
            generators.equal(before, after)
        # An average over depth adds up outputs of blocks and the embedding.
        for j in layer.averaged:
            generators.equal(("in", j), after)
        # One weight reads, or writes, in every layer that shares it.
        for j in range(i):
            if layers[j].block == layer.block:
                for one, other in ((("in", j), before), (("mid", j), ("mid", i)), (("in", j + 1), after)):
                    generators.equal(one, other)
        # Something other than a plain matrix, as the lemma's `X W` is, reads or writes the stream.
        keys = layer.computed_key_heads and layer.key.kind != "linear"
        values = layer.computed_value_heads and layer.value.kind not in ("linear", "keys")
        if layer.query.kind != "linear" or keys or values:
            generators.zero(before)
        if layer.output.kind != "linear":
            generators.zero(place(config, "output", i))
    return generators


def place(config: LeanConfig, slot: str, layer: int) -> tuple[str, int]:
    """Where a change of basis makes the weight an identity: what it reads, or for the output what it writes."""
    if slot != "output":
        return ("in", layer)
    return ("mid", layer) if config.block_type == "serial" else ("in", layer + 1)


def square(config: LeanConfig, slot: str, layer: int) -> bool:
    """Whether the layer has this weight, d x d. A key or value only under MHA: Graef's e = d."""
    plan, d = config.plan.layers[layer], config.hidden_size
    if getattr(plan, slot).kind != "linear" or config.num_attention_heads * plan.head_dim != d:
        return False
    if slot in ("query", "output"):
        return plan.num_query_heads * plan.head_dim == d
    computed = plan.computed_key_heads if slot == "key" else plan.computed_value_heads
    return (
        plan.latent is None
        and config.num_key_value_heads == config.num_attention_heads
        and computed * plan.head_dim == d
    )


def weights_of(config: LeanConfig, slots: Iterable[str], layers: Iterable[int] | None) -> dict[Weight, tuple[str, int]]:
    """The weights that are to go, each with the basis that makes it an identity."""
    chosen = range(config.num_hidden_layers) if layers is None else layers
    pairs = [(slot, layer) for slot in slots for layer in chosen]
    return {(slot, config.plan.layers[layer].block): place(config, slot, layer) for slot, layer in pairs}


def removed(config: LeanConfig, slots: Iterable[str], layers: Iterable[int] | None) -> list[Weight] | None:
    """The weights that go, or None where they cannot all go."""
    slots = tuple(slots)
    chosen = range(config.num_hidden_layers) if layers is None else layers
    if config.norm_type != "none" or not all(square(config, slot, layer) for slot in slots for layer in chosen):
        return None
    weights = weights_of(config, slots, layers)
    return list(weights) if stream(config).free(list(weights.values())) else None


def stays_tied(config: LeanConfig, slots: Iterable[str], layers: Iterable[int] | None) -> bool:
    """Whether Theorem 4.4's basis at the end of the stream, (Theta_1^T)^-1, is to be had."""
    generators = stream(config)
    generators.opposite(("in", 0), ("in", config.num_hidden_layers))
    return generators.free(list(weights_of(config, slots, layers).values()))


def identity_blocks(config: LeanConfig) -> dict[tuple[str, int], int] | None:
    """Proposition 3.2 on both pairs: per ("key" or "value", block) how many weights an identity in every head saves."""
    if config.kv_lora_rank:
        return None
    saved: dict[tuple[str, int], int] = {}
    for side in ("key", "value"):
        rotated = 0
        if side == "key" and config.position_embedding_type == "rope":
            ropes = filter(None, (config.rope_parameters, config.window_rope_parameters))  # the wider, in all layers
            rotated = max(int(config.head_dim * rope.get("partial_rotary_factor", 1.0)) for rope in ropes)
        width = config.head_dim - rotated
        if not 0 < width < config.hidden_size or (side == "key" and config.qk_norm):
            continue
        if side == "value" and gated_columns(config):
            continue
        generators, taken = heads(config, side), []
        makers: dict[int, LayerPlan] = {}
        for plan in config.plan.layers:
            if heads_made(plan, side):
                makers.setdefault(plan.block, plan)
        for block, plan in makers.items():
            own = [(block, head) for head in range(heads_made(plan, side))]
            if getattr(plan, side).kind == "linear" and generators.free([*taken, *own]):
                taken += own
                saved[side, block] = len(own) * width * width
    return saved or None


def gated_columns(config: LeanConfig) -> bool:
    """Whether every column of the heads has a factor of its own before W_O: a diagonal D alone commutes with those."""
    return config.output_gate is not None and not config.output_gate.get("per_head", False)


def heads(config: LeanConfig, side: str) -> Generators:
    """The bases inside the heads: (block, head), and (block, head, "mean") of two of them."""
    generators, plans = Generators(), config.plan.layers
    used: dict[tuple[int, int], tuple[int, int]] = {}
    for plan in plans:
        made = heads_made(plan, side)
        # One head of W_Q or W_O takes up one inverse, in every layer that shares its block.
        sources = plan.layout.keys if side == "key" else plan.layout.values
        attended = [
            (plans[source.layer].block, summands(plans[source.layer], side, head)[0])
            for source in sources
            for head in range(source.start, source.stop)
        ]
        for place, head in enumerate(attended):
            generators.equal(used.setdefault((plan.block, place), head), head)
        if side == "value" and plan.layout.mixed_with is not None:  # heads that are added to each other
            for head in range(made):
                generators.equal((plan.block, head), (plans[plan.layout.mixed_with].block, head))
        if side == "value":
            for mean in range(made, made + plan.layout.derived_value_heads):
                one, other = summands(plan, side, mean)
                generators.equal((plan.block, one), (plan.block, other))
        if plan.value.kind == "keys":  # what the keys are, the values are too
            for head in range(made):
                generators.zero((plan.block, head))
        # Whoever attends with a head must be a plain matrix to take up the inverse.
        if (plan.query if side == "key" else plan.output).kind != "linear":
            for source in plan.layout.keys if side == "key" else plan.layout.values:
                lender = plans[source.layer]
                for head in range(source.start, source.stop):
                    for summand in summands(lender, side, head):
                        generators.zero((lender.block, summand))
    return generators


def heads_made(plan: LayerPlan, side: str) -> int:
    return plan.computed_key_heads if side == "key" else plan.computed_value_heads


def summands(plan: LayerPlan, side: str, head: int) -> tuple[int, int]:
    """The heads of the layer's own that this one is: itself, or the two of which a pooled head is the mean."""
    made, pooled = heads_made(plan, side), plan.layout.derived_value_heads
    return (head, head) if head < made else (head - made, head - pooled)


def two_matrices(config: LeanConfig) -> bool:
    """Proposition 4.1: one head as wide as the stream, its scores bilinear in the stream, nothing shared."""
    return (
        config.num_attention_heads == 1
        and config.head_dim == config.hidden_size
        and config.position_embedding_type != "rope"
        and not config.qk_norm
        and not config.kv_lora_rank
        and all(getattr(plan, slot).kind == "linear" for plan in config.plan.layers for slot in SLOTS)
        and config.key_value["type"] == "projected"
        and not gated_columns(config)
    )


def weights_fewer(config: LeanConfig, remove: str, layers: Iterable[int] | None) -> int | None:
    """How many weights fewer there are after it, or None where it is impossible."""
    d = config.hidden_size
    if remove == "block-diagonal":
        blocks = identity_blocks(config)
        return None if blocks is None else sum(blocks.values())
    if remove == "single-head":
        # Of the biases the key's goes, the value's and the output's become one where no gate is between them.
        biases = d * config.attention_bias * (1 + (config.attention_output_bias and config.output_gate is None))
        return len({plan.block for plan in config.plan.layers}) * (2 * d * d + biases) if two_matrices(config) else None
    slots = remove.split(",")
    gone = removed(config, slots, layers)
    if gone is None:
        return None
    untied = config.tie_word_embeddings and not stays_tied(config, slots, layers)
    return len(gone) * d * d - untied * config.vocab_size * d
