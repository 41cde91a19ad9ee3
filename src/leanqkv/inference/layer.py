"""Both halves of a usual layer as one call each: what comes before attention reads the cache, and what follows it.

A call runs a list of step.cpp's operations, with every result in memory of its own that only it sees. A layer is usual
if its projections are linear, identities or begin with a linear map, and its skips are plain; all others go through
their modules.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from ..model.attention import KeyValues, LeanAttention, update_cache
from ..model.latent import frequencies_of, is_rewritten
from ..model.latent_heads import LatentHeadsAttention
from ..model.layers import MLP, GatedMLP
from ..model.layout import LayerPlan
from ..model.position import Rotation, rotation_of
from ..model.projection_identity import IdentityProjection
from ..model.projection_nonlinear import NonlinearProjection
from ..model.query_residual import ResidualQuery
from ..model.transformer import LeanBlock
from .joined import JoinedProjections
from .linear import FewRowsLinear
from .repeat import NUMBER, POINTER, REAL, ROWS, Arguments, call, fields
from .step import ACTIVATIONS, FusedNorm, HeadProduct, Product, kernels_for

MULTIPLY, NORM, TURN, GATE, ADD, BY_HEAD, COPY, ACTIVATE, SCALE = range(9)


class _Operation(ctypes.Structure):
    """The same, in the same order, as `Operation` in step.cpp."""

    _fields_ = [
        *fields(NUMBER, "kind first second output width count"),
        *fields(POINTER, "data bias"),
        *fields(REAL, "offset eps"),
    ]


class _Tables(ctypes.Structure):
    """The same, in the same order, as `Tables` in step.cpp."""

    _fields_ = [*fields(POINTER, "cos sin"), *fields(NUMBER, "turned batch")]


class _Run(Arguments):
    """The same, in the same order, as `Run` in step.cpp."""

    _fields_ = [
        *(("operations", POINTER), ("count", NUMBER), ("given", POINTER), ("num_given", NUMBER)),
        *(("widths", POINTER), ("num_buffers", NUMBER), ("rows", NUMBER), ("tables", POINTER), ("threads", NUMBER)),
    ]
    held: tuple[Any, Any]  # what `given` and `tables` point to

    def pointers(self) -> list[ctypes.c_void_p]:
        places = [ctypes.addressof(self.held[0]) + 8 * number for number in range(self.num_given)]
        if self.tables:
            places += [self.tables + field.offset for field in (_Tables.cos, _Tables.sin)]
        return [ctypes.c_void_p.from_address(place) for place in places]


class Program:
    """Operations on buffers [rows, width], of which the caller gives the first ones."""

    def __init__(self, given: Sequence[int]):
        """given: the widths of what the caller gives."""
        self.widths, self.num_given = list(given), len(given)
        self._listed: list[_Operation] = []
        self._held: list[Any] = []  # whose memory the operations read
        self._pointers = ctypes.c_void_p * self.num_given

    def buffer(self, width: int) -> int:
        """Return the number of a new buffer."""
        self.widths.append(width)
        return len(self.widths) - 1

    def multiply(self, product: Product, first: int, output: int | None = None) -> int:
        """Add a product; its outputs are buffers that follow each other, of which this returns the first."""
        if output is None:
            output = len(self.widths)
            self.widths += product.outputs
        given = MULTIPLY, first, 0, output, product.inputs, len(product.maps), product.address
        return self._add(*given, held=product)

    def norm(self, norm: nn.Module | None, first: int, output: int | None = None, heads: int = 1) -> int:
        """Add a norm, of so many heads each on its own; None and an identity add nothing."""
        if not isinstance(norm, FusedNorm):
            return first
        output = self.buffer(self.widths[first]) if output is None else output
        given = NORM, first, norm.centered, output, len(norm.weight), heads, *norm.addresses, norm.offset, norm.eps
        return self._add(*given, held=(norm.weight.detach(), None if norm.bias is None else norm.bias.detach()))

    def turn(self, first: int, heads: int, output: int | None = None, frequencies: Tensor | None = None) -> int:
        """Add the rotation of so many heads, by default in place; their complex columns may name their frequencies."""
        output = first if output is None else output
        index = None if frequencies is None else frequencies.data_ptr()
        return self._add(TURN, first, 0, output, self.widths[first] // heads, heads, index, held=frequencies)

    def by_head(self, product: HeadProduct, first: int, output: int | None = None) -> int:
        """Add a product of every head with its own map."""
        heads = self.widths[first] // product.inputs
        output = self.buffer(heads * product.outputs) if output is None else output
        return self._add(BY_HEAD, first, 0, output, product.inputs, heads, product.address, held=product)

    def gate(self, gate: int, up: int, activation: int) -> int:
        """Add `act(gate) * up`, in the place of the gate."""
        return self._add(GATE, gate, up, gate, self.widths[gate], activation)

    def activate(self, first: int, activation: int) -> int:
        """Add an activation, in place."""
        return self._add(ACTIVATE, first, 0, first, self.widths[first], activation)

    def add(self, first: int, second: int, output: int, factor: float = 1.0) -> int:
        """Add a sum times a factor."""
        return self._add(ADD, first, second, output, self.widths[first], offset=factor)

    def scale(self, first: int, normed: int, eps: float) -> int:
        """Add a division, in place, by the rms of another buffer's rows."""
        return self._add(SCALE, first, normed, first, self.widths[first], self.widths[normed], eps=eps)

    def copy(self, first: int, output: int) -> int:
        """Add a copy."""
        return self._add(COPY, first, 0, output, self.widths[first])

    def _add(self, *operation: Any, held: Any = None, **reals: float) -> int:
        self._listed.append(_Operation(*operation, **reals))
        self._held.append(held)
        return self._listed[-1].output

    def run(self, kernels: Any, inputs: Sequence[Tensor], rotation: Rotation | None = None) -> list[Tensor]:
        """Run the operations on the first of what is given, and return the others, [rows, width] of those widths."""
        rows = len(inputs[0])
        results = [inputs[0].new_empty((rows, width)) for width in self.widths[len(inputs) : self.num_given]]
        given = [*(one.contiguous() for one in inputs), *results]
        if not hasattr(self, "_operations"):
            self._operations = (_Operation * len(self._listed))(*self._listed)
            self._widths = (ctypes.c_int64 * len(self.widths))(*self.widths)
            self._addresses = ctypes.addressof(self._operations), ctypes.addressof(self._widths)
        tables = None
        if rotation is not None:
            cos, sin = rotation
            turned = cos.shape[-1]
            tables = _Tables(cos.data_ptr(), sin.data_ptr(), turned, 0 if len(cos) == 1 else turned)
        pointers = self._pointers(*[tensor.data_ptr() for tensor in given])
        operations, widths = self._addresses
        arguments = _Run(
            *(operations, len(self._operations), ctypes.addressof(pointers), self.num_given),
            *(widths, len(self.widths), rows, None if tables is None else ctypes.addressof(tables)),
            torch.get_num_threads(),
        )
        arguments.held = pointers, tables
        call(kernels.run, arguments)
        return results


def use_programs(model: nn.Module) -> None:
    """Let what usual layers compute before and after attention be a call each, in place; after `use_products` and
    `fuse`."""
    for module in model.modules():
        if type(module) is LeanAttention and (heads := ProjectedHeads.of(module)) is not None:
            module.project_heads = heads  # type: ignore[method-assign]
    for module in model.modules():
        if type(module) is LeanBlock and (rest := RestOfBlock.of(module)) is not None:
            module.after_attention = rest  # type: ignore[method-assign]
            if (forward := usual_forward(module)) is not None:
                module.forward = forward  # type: ignore[method-assign]


class ProjectedHeads:
    """Takes the place of an attention's `project_heads`: linear projections and identities, norms of heads, rotary
    positions."""

    out_of: HeadProduct | None = None  # what makes heads of what they attended to, where that is something else
    only_linear = False  # whether projections have to be

    def __init__(self, attention: LeanAttention, product: Product, mapped: Sequence[str], others: Sequence[str]):
        """mapped, others: of "qkv", those that begin with the product, in its order, and those whose heads it does not
        give."""
        self.attention, self.product, self.head_dim = attention, product, attention.head_dim
        widths = [getattr(attention, f"{name}_proj").width for name in others]
        self.widths = [product.inputs, *product.outputs, *widths]
        self.mapped = {name: place for place, name in enumerate(mapped, 1)}
        self.places = self.mapped | {name: place for place, name in enumerate(others, len(mapped) + 1)}
        self.programs = self.make_programs(None)
        self.plain = attention.project_heads

    @classmethod
    def of(cls, attention: LeanAttention) -> "Self | None":
        """Return None for an attention whose heads are more than that."""
        made = {name: layer for name in "qkv" if (layer := getattr(attention, f"{name}_proj")) is not None}
        inputs = [name for name, layer in made.items() if _is_whole_input(layer, attention.config.hidden_size)]
        mapped = [name for name in made if name not in inputs]
        more = [name for name in mapped if type(made[name]) in (NonlinearProjection, ResidualQuery)]
        several = len(mapped) > 1  # and so joined, with the norm of a bottleneck in its weights
        starts = [getattr(made[name], "down_proj", made[name]) if several else made[name] for name in mapped]
        product = joint_product(attention, starts)
        if product is None or "q" not in made or attention.g_proj is not None or (cls.only_linear and more + inputs):
            return None
        norms = attention.q_norm, attention.k_norm
        readable = all(norm is None or _is_readable(norm, attention.head_dim, product) for norm in norms)
        readable = readable and all(_is_readable_rest(made[name], product) for name in more)
        return cls(attention, product, mapped, more + inputs) if readable else None

    def make_programs(self, first_norm: nn.Module | None) -> dict[bool, Program]:
        """Programs without and with rotary positions."""
        return {turns: self.make_program(first_norm, turns) for turns in (False, True)}

    def make_program(self, first_norm: nn.Module | None, turns: bool) -> Program:
        """A program of the input, normed or to be normed, and the outputs."""
        program = Program(self.widths)
        normed = program.norm(first_norm, 0)
        program.multiply(self.product, normed, 1)
        for name, place in self.places.items():
            heads = self.widths[place] // self.head_dim
            if name not in self.mapped:
                program.copy(normed, place)
            elif place != self.mapped[name]:
                _add_rest(program, getattr(self.attention, f"{name}_proj"), normed, self.mapped[name], place)
            program.norm(getattr(self.attention, f"{name}_norm", None), place, place, heads)
            if turns and name != "v":
                program.turn(place, heads)
        return program

    def kernels(self, hidden_states: Tensor, rotation: Rotation | None) -> Any | None:
        """Return the kernels, or None for inputs that they are not made for."""
        rows, positions, _ = hidden_states.shape
        if positions != 1 or rows > ROWS or (rotation and not _turns(rotation, hidden_states, self.head_dim)):
            return None
        return kernels_for(hidden_states, self.product.weight)

    def run(self, programs: dict[bool, Program], kernels: Any, hidden_states: Tensor, rotation: Rotation | None) -> Any:
        """Return query, key and value, [batch, heads, 1, head_dim]; None for what is not computed."""
        rows, found = len(hidden_states), programs[rotation is not None].run(kernels, [hidden_states], rotation)
        heads = {name: found[place - 1].view(rows, -1, 1, self.head_dim) for name, place in self.places.items()}
        return heads["q"], heads.get("k"), heads.get("v")

    def attend(
        self, heads: Any, layer: LayerPlan, position_embeddings: Any = None, mlp_hidden: Any = None, **kwargs: Any
    ) -> tuple[Tensor, KeyValues]:
        """Return what the heads that `run` made attended to, and the layer's own keys and values."""
        rotation = rotation_of(layer, position_embeddings)
        query, key, value = heads
        attended, _, own = self.attention.attend_heads(query, key, value, layer, None, rotation, **kwargs)
        return attended, own

    def __call__(self, hidden_states: Tensor, mlp_hidden: Tensor | None, rotation: Rotation | None) -> Any:
        kernels = self.kernels(hidden_states, rotation)
        if kernels is None:
            return self.plain(hidden_states, mlp_hidden, rotation)
        return *self.run(self.programs, kernels, hidden_states, rotation), None


class ProjectedLatents(ProjectedHeads):
    """The same for an attention with latents, each of which is absorbed: queries are on the latent of keys."""

    only_linear = True

    @classmethod
    def of(cls, attention: Any) -> "Self | None":
        """Return None where a latent cannot be absorbed."""
        products, ups = vars(attention)["head_products"], (attention.k_up_proj, attention.v_up_proj)
        if any(up is not None and product is None for up, product in zip(ups, products, strict=True)):
            return None
        found = super().of(attention)
        if found is None or list(found.places) != ["q", "k", "v"]:
            return None
        dtypes = {product.weight.dtype for product in products if product is not None}
        return found if dtypes <= {found.product.weight.dtype} else None

    def make_program(self, first_norm: nn.Module | None, turns: bool) -> Program:
        """The outputs are query, key and value as they are projected, and query and key as attention takes them."""
        attention: Any = self.attention
        self.into, self.out_of = attention.head_products
        columns = getattr(attention.k_up_proj, "columns", None)
        index = None if columns is None else frequencies_of(columns, torch.device("cpu"))
        query_width, key_width, _ = widths = self.product.outputs
        query_heads = query_width // self.head_dim
        self.key_width = self.head_dim if self.into is None else key_width
        key_heads = key_width // self.key_width
        program = Program([self.product.inputs, *widths, query_heads * self.key_width, key_width])
        program.multiply(self.product, program.norm(first_norm, 0), 1)
        query = program.norm(attention.q_norm, 1, 1, query_heads)
        program.norm(attention.k_norm, 2, 2, key_heads)
        if turns:
            program.turn(query, query_heads, 1 if self.into else 4)
            program.turn(2, key_heads, 5, index)
        if self.into is not None:
            program.by_head(self.into, 1, 4)
        return program

    def run(self, programs: dict[bool, Program], kernels: Any, hidden_states: Tensor, rotation: Rotation | None) -> Any:
        """Return query, key and value, [batch, heads, 1, columns], a latent as one head; and the key as it is before
        rotary positions, [batch, 1, width]."""
        rows, found = len(hidden_states), programs[rotation is not None].run(kernels, [hidden_states], rotation)
        plain_query, plain_key, value, query, key = found
        if rotation is None:
            query, key = plain_query if self.into is None else query, plain_key
        widths = self.key_width, self.key_width, self.head_dim if self.out_of is None else value.shape[1]
        heads = [head.view(rows, -1, 1, width) for head, width in zip((query, key, value), widths, strict=True)]
        return *heads, plain_key[:, None]

    def attend(
        self,
        heads: Any,
        layer: LayerPlan,
        position_embeddings: Any = None,
        mlp_hidden: Any = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        borrowed: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, KeyValues]:
        """Every head attends to the latents themselves, which takes fewer multiplications for a single query."""
        attention: Any = self.attention
        query, key, value, new_keys = heads
        own = KeyValues(*update_cache(past_key_values, layer, key, value), value)
        history: Any = own
        keys, values = (
            head if up is None else head.expand(-1, layer.computed_key_heads, -1, -1)
            for head, up in ((history.keys, attention.k_up_proj), (history.values, attention.v_up_proj))
        )
        inputs: Any = attention.inputs_of_values(own, new_keys, layer, position_embeddings) or [values]
        scaling = layer.attention_scale(layer.layer)
        attended, _ = attention.attend(attention, query, keys, inputs, attention_mask, scaling, **kwargs)
        return attended, own


class RestOfBlock:
    """Takes the place of a block's `after_attention`: norms, an MLP, plain skips."""

    def __init__(self, block: LeanBlock, product: Product):
        self.block, self.product = block, product
        self.program = self.make_program(None)
        self.plain = block.after_attention

    @classmethod
    def of(cls, block: LeanBlock) -> "RestOfBlock | None":
        """Return None for a block that does more than that behind its attention."""
        config, mlp = block.config, block.mlp
        skips = config.attention_skip and config.mlp_skip and config.residual_multiplier == 1
        known = type(mlp) in (MLP, GatedMLP)
        if config.block_type != "serial" or not skips or block.mlp_connection is not None or not known:
            return None
        norms = block.attention_output_layernorm, block.post_attention_layernorm, block.mlp_output_layernorm
        first = [mlp.gate_proj, mlp.up_proj] if isinstance(mlp, GatedMLP) else [mlp.up_proj]
        product, down = joint_product(mlp, first), mlp.down_proj
        if product is None or not _is_readable_product(down, product) or not _is_identity(block.dropout):
            return None
        if "hidden" not in vars(mlp) or any(is_rewritten(module) for module in (mlp, mlp.activation)):
            return None
        if any(layer.lends_mlp_hidden for layer in config.plan.layers):
            return None
        readable = all(_is_identity(norm) or _is_readable(norm, product.inputs, product) for norm in norms)
        return cls(block, product) if readable else None

    def make_program(self, output: Product | None, restore: HeadProduct | None = None) -> Program:
        """A program of the stream, of what attention gives, and of the stream behind. What attention gives is
        `output`'s input, or what `restore` makes that of."""
        block, width = self.block, self.product.inputs
        attended_width = width if output is None else output.inputs
        if restore is not None:
            attended_width = attended_width // restore.outputs * restore.inputs
        program = Program([width, attended_width, width])
        attended = 1 if restore is None else program.by_head(restore, 1)
        attended = attended if output is None else program.multiply(output, attended)
        attended = program.norm(block.attention_output_layernorm, attended)
        read = program.add(0, attended, program.buffer(width))
        gate = program.multiply(self.product, program.norm(block.post_attention_layernorm, read))
        kind = ACTIVATIONS[type(block.mlp.activation)]
        hidden = program.gate(gate, gate + 1, kind) if len(self.product.maps) == 2 else program.activate(gate, kind)
        down = program.norm(block.mlp_output_layernorm, program.multiply(block.mlp.down_proj.product, hidden))
        program.add(read, down, 2)
        return program

    def __call__(self, attended: Tensor, normed: Tensor, read: Tensor, write: Any) -> tuple[Tensor, Any]:
        rows, positions, _ = read.shape
        fits = positions == 1 and rows <= ROWS and attended.shape == read.shape and attended.dtype == read.dtype
        kernels = kernels_for(read, self.product.weight) if fits else None
        if kernels is None:
            return self.plain(attended, normed, read, write)
        [after] = self.program.run(kernels, [read, attended])
        return after[:, None], None


def usual_forward(block: LeanBlock) -> Callable[..., Any] | None:
    """Return what takes the place of `block.forward`, without its modules' calls; None where one of them does more."""
    attention, norm, rest = block.self_attn, block.input_layernorm, vars(block)["after_attention"]
    if attention.mixer is not None or is_rewritten(attention) or block.attention_connection is not None:
        return None
    heads = vars(attention).get("project_heads")
    if type(attention) is LatentHeadsAttention:
        heads = ProjectedLatents.of(attention)
    if not isinstance(heads, ProjectedHeads) or not heads.product.matches(rest.product):
        return None
    if not _is_readable_product(attention.o_proj, heads.product) or not (
        _is_identity(norm) or _is_readable(norm, heads.product.inputs, heads.product)
    ):
        return None
    before, after = heads.make_programs(norm), rest.make_program(attention.o_proj.product, heads.out_of)
    plain = block.forward

    def forward(hidden_states: Tensor, layer: LayerPlan, streams: Tensor | None = None, **kwargs: Any) -> Any:
        rotation = rotation_of(layer, kwargs.get("position_embeddings"))
        kernels = heads.kernels(hidden_states, rotation)
        if kernels is None or attention._forward_hooks:  # those that transformers collects weights with come later
            return plain(hidden_states, layer, streams, **kwargs)
        found = heads.run(before, kernels, hidden_states, rotation)
        attended, own = heads.attend(found, layer, **kwargs)
        [stream] = after.run(kernels, [hidden_states, attended])
        return stream[:, None], own, None, None

    return forward


def joint_product(module: Any, linear: Sequence[Any]) -> Product | None:
    """Return the product of all of these plain linear layers, with which `module.project` was replaced, or of the one
    that there is; else None."""
    if len(linear) == 1 and isinstance(linear[0], FewRowsLinear) and not is_rewritten(linear[0]):
        return linear[0].product if linear[0].product.readable else None
    joined = vars(module).get("project")
    if not isinstance(joined, JoinedProjections) or joined._once is None or joined.layers != list(linear):
        return None
    product = joined._once[1]
    return product if isinstance(product, Product) and product.readable else None


def _is_readable_rest(projection: Any, product: Product) -> bool:
    """Whether `_add_rest` can be told what a projection does behind its first linear map."""
    if type(projection) is ResidualQuery:
        return projection.width == product.inputs
    anchor, norm, width = projection.anchor, projection.norm_out, projection.width
    return (
        type(projection.activation) in ACTIVATIONS
        and _is_readable_product(projection.up_proj, product)
        and (_is_identity(norm) or _is_readable(norm, width, product))
        and (width == product.inputs if anchor is None else _is_readable_product(anchor, product))
    )


def _add_rest(program: Program, projection: Any, normed: int, mapped: int, output: int) -> None:
    """Add what a projection does behind its first linear map, which gives `mapped`."""
    anchor = normed
    if not isinstance(projection, ResidualQuery):
        if not isinstance(projection.norm_in, nn.Identity):
            program.scale(mapped, normed, projection.eps)
        bottleneck = program.activate(mapped, ACTIVATIONS[type(projection.activation)])
        mapped = program.norm(projection.norm_out, program.multiply(projection.up_proj.product, bottleneck))
        anchor = normed if projection.anchor is None else program.multiply(projection.anchor.product, normed)
    program.add(anchor, mapped, output, 0.5)


def _is_readable_product(linear: nn.Module, product: Product) -> bool:
    """Whether this is a linear layer whose product the kernel computes, in the dtype of another product."""
    return isinstance(linear, FewRowsLinear) and not is_rewritten(linear) and linear.product.matches(product)


def _is_whole_input(projection: nn.Module, width: int) -> bool:
    """Whether this is an identity of an input so wide, and nothing else."""
    if type(projection) is not IdentityProjection or is_rewritten(projection):
        return False
    return projection.width == width and projection.bias is None


def _is_identity(module: nn.Module) -> bool:
    return type(module) is nn.Identity and not is_rewritten(module)


def _is_readable(norm: nn.Module, width: int, product: Product) -> bool:
    """Whether the kernel can read this norm of so many columns, in the dtype of the product's weights."""
    if not isinstance(norm, FusedNorm) or is_rewritten(norm):
        return False
    return len(norm.weight) == width and norm.weight.dtype == product.weight.dtype and norm.weight.device.type == "cpu"


def _turns(rotation: Rotation, hidden_states: Tensor, head_dim: int) -> bool:
    """Whether these tables are of one position of every row, or of all, and lie as the kernel reads them."""
    cos, sin = rotation
    rows, positions, turned = cos.shape
    fits = rows in (1, len(hidden_states)) and positions == 1 and turned <= head_dim and cos.shape == sin.shape
    return fits and all(table.dtype == hidden_states.dtype and table.is_contiguous() for table in rotation)
