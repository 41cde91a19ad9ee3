"""What can be eliminated exactly, written down from the papers' conditions alone.

Karbevski & Mijoski 2025 (arXiv 2510.23912): Lemma 3.1, Propositions 3.2 and 4.1, Theorems 4.2-4.4. Graef 2024 (arXiv
2404.12362): Table 1 and Figure 2. Weights are taken to be invertible where they are square.
"""

from collections.abc import Hashable, Iterable

from leanqkv import LeanConfig

Weight = tuple[str, int]  # slot and the block that holds it
SLOTS = ("query", "key", "value", "output")


class Classes:
    """Things that must be treated alike."""

    def __init__(self) -> None:
        self.parent: dict[Hashable, Hashable] = {}

    def find(self, thing: Hashable) -> Hashable:
        while (above := self.parent.get(thing, thing)) != thing:
            thing = above
        return thing

    def join(self, one: Hashable, other: Hashable) -> None:
        self.parent[self.find(one)] = self.find(other)


def stream_classes(config: LeanConfig) -> Classes:
    """Places on the stream that must have one basis: ("in", i) before layer i, ("mid", i) inside a serial block."""
    classes, layers = Classes(), config.plan.layers
    for i, layer in enumerate(layers):
        serial = config.block_type == "serial"
        before, after = ("in", i), ("in", i + 1)
        if serial and config.attention_skip:
            classes.join(before, ("mid", i))
        if serial and config.mlp_skip:
            classes.join(("mid", i), after)
        if not serial and config.mlp_skip:
            classes.join(before, after)
        # An average over depth adds up outputs of blocks and the embedding.
        for j in layer.averaged:
            classes.join(("in", j), after)
        # One weight reads, or writes, in every layer that shares it.
        for j in range(i):
            if layers[j].block == layer.block:
                for one, other in ((("in", j), before), (("mid", j), ("mid", i)), (("in", j + 1), after)):
                    classes.join(one, other)
    return classes


def place(config: LeanConfig, slot: str, layer: int) -> tuple[str, int]:
    """Where a change of basis makes the weight an identity: what it reads, or for the output what it writes."""
    if slot != "output":
        return ("in", layer)
    return ("mid", layer) if config.block_type == "serial" else ("in", layer + 1)


def frozen(config: LeanConfig) -> set[tuple[str, int]]:
    """Places whose basis something is tied to that is not a plain matrix, as the lemma's `X W` is."""
    found = set()
    for i, layer in enumerate(config.plan.layers):
        keys = layer.computed_key_heads and layer.key.kind != "linear"
        values = layer.computed_value_heads and layer.value.kind not in ("linear", "keys")
        if layer.query.kind != "linear" or keys or values:
            found.add(("in", i))
        if layer.output.kind != "linear":
            found.add(place(config, "output", i))
    return found


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


def removed(config: LeanConfig, slots: Iterable[str], layers: Iterable[int] | None) -> list[Weight] | None:
    """The weights that go, or None where they cannot all go."""
    if config.norm_type != "none":
        return None
    classes, fixed = stream_classes(config), frozen(config)
    fixed_classes = {classes.find(p) for p in fixed}
    served: dict[Hashable, Weight] = {}
    for slot in slots:
        for layer in range(config.num_hidden_layers) if layers is None else layers:
            basis = classes.find(place(config, slot, layer))
            weight = (slot, config.plan.layers[layer].block)
            if not square(config, slot, layer) or basis in fixed_classes or served.get(basis, weight) != weight:
                return None
            served[basis] = weight
    return list(served.values())


def stays_tied(config: LeanConfig, slots: Iterable[str], layers: Iterable[int] | None) -> bool:
    """Theorem 4.4's basis at the end of the stream, (Theta_1^T)^-1, is to be had if nothing else decides that end."""
    classes, fixed = stream_classes(config), frozen(config)
    start, end = classes.find(("in", 0)), classes.find(("in", config.num_hidden_layers))
    chosen = {
        classes.find(place(config, slot, layer))
        for slot in slots
        for layer in (range(config.num_hidden_layers) if layers is None else layers)
    }
    bound = chosen | {classes.find(p) for p in fixed}
    return not chosen & {start, end} or (not {start, end} <= bound and start != end)


def identity_blocks(config: LeanConfig) -> dict[tuple[str, int], int] | None:
    """Proposition 3.2 on both pairs: per ("key" or "value", block) how many weights an identity in every head saves."""
    if config.kv_lora_rank:
        return None
    plans = config.plan.layers
    found: dict[tuple[str, int], int] = {}
    for side in ("key", "value"):
        rotated = 0
        if side == "key" and config.position_embedding_type == "rope":
            rotated = int(config.head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0))
        width = config.head_dim - rotated
        if not 0 < width < config.hidden_size or (side == "key" and config.qk_norm):
            continue
        classes, stuck, makers = Classes(), set(), {}
        for plan in plans:
            count = heads_made(plan, side)
            if count:
                makers.setdefault(plan.block, (plan, count))
            if side == "value" and plan.layout.mixed_with is not None:  # heads that are added to each other
                for head in range(count):
                    classes.join((plan.block, head), (plans[plan.layout.mixed_with].block, head))
            if side == "value":
                for mean in range(count, count + plan.layout.derived_value_heads):
                    one, other = summands(plan, side, mean)
                    classes.join((plan.block, one), (plan.block, other))
            if plan.value.kind == "keys":  # what the keys are, the values are too
                stuck |= {(plan.block, head) for head in range(count)}
            # Whoever attends with a head must be a plain matrix to take up the inverse.
            if (plan.query if side == "key" else plan.output).kind != "linear":
                for source in plan.layout.keys if side == "key" else plan.layout.values:
                    lender = plans[source.layer]
                    for head in range(source.start, source.stop):
                        stuck |= {(lender.block, summand) for summand in summands(lender, side, head)}
        bad, taken = {classes.find(head) for head in stuck}, set()
        for block, (plan, count) in makers.items():
            own = {classes.find((block, head)) for head in range(count)}
            if getattr(plan, side).kind == "linear" and len(own) == count and not own & (taken | bad):
                taken |= own
                found[side, block] = count * width * width
    return found or None


def heads_made(plan, side: str) -> int:
    return plan.computed_key_heads if side == "key" else plan.computed_value_heads


def summands(plan, side: str, head: int) -> tuple[int, int]:
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
    )


def weights_fewer(config: LeanConfig, remove: str, layers: Iterable[int] | None) -> int | None:
    """How many weights fewer there are after it, or None where it is impossible."""
    d = config.hidden_size
    if remove == "block-diagonal":
        blocks = identity_blocks(config)
        return None if blocks is None else sum(blocks.values())
    if remove == "single-head":
        # Of the biases the key's goes, the value's and the output's become one.
        biases = d * config.attention_bias * (1 + config.attention_output_bias)
        return len({plan.block for plan in config.plan.layers}) * (2 * d * d + biases) if two_matrices(config) else None
    slots = remove.split(",")
    gone = removed(config, slots, layers)
    if gone is None:
        return None
    untied = config.tie_word_embeddings and not stays_tied(config, slots, layers)
    return len(gone) * d * d - untied * config.vocab_size * d
