"""Both halves of a usual layer as one call each: what comes before attention reads the cache, and what follows it.

A call runs a list of step.cpp's operations, with every result in memory of its own that only it sees. A layer is usual
if its projections are linear, its MLP is gated and its skips are plain; all others go through their modules.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..model.attention import LeanAttention
from ..model.latent import is_rewritten
from ..model.layers import GatedMLP
from ..model.position import Rotation
from ..model.transformer import LeanBlock
from .joined import JoinedProjections
from .linear import FewRowsLinear
from .step import GATES, ROWS, FusedRMSNorm, Product, kernels_for

MULTIPLY, NORM, TURN, GATE, ADD = range(5)


class _Operation(ctypes.Structure):
    """The same, in the same order, as `Operation` in step.cpp."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("kind", "first", "second", "output", "width", "count")),
        *(("data", ctypes.c_void_p), ("offset", ctypes.c_float), ("eps", ctypes.c_float)),
    ]


class _Tables(ctypes.Structure):
    """The same, in the same order, as `Tables` in step.cpp."""

    _fields_ = [("cos", ctypes.c_void_p), ("sin", ctypes.c_void_p)]
    _fields_ += [("turned", ctypes.c_int64), ("batch", ctypes.c_int64)]


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

    def norm(self, norm: nn.Module, first: int, output: int | None = None, heads: int = 1) -> int:
        """Add a norm, of so many heads each on its own; an identity adds nothing."""
        if not isinstance(norm, FusedRMSNorm):
            return first
        weight = norm.weight.detach()
        output = self.buffer(self.widths[first]) if output is None else output
        given = NORM, first, 0, output, len(weight), heads, weight.data_ptr(), norm.offset, norm.eps
        return self._add(*given, held=weight)

    def turn(self, at: int, heads: int) -> int:
        """Add the rotation of so many heads, in place."""
        return self._add(TURN, at, 0, at, self.widths[at] // heads, heads)

    def gate(self, gate: int, up: int, is_gelu: bool) -> int:
        """Add `act(gate) * up`, in the place of the gate."""
        return self._add(GATE, gate, up, gate, self.widths[gate], is_gelu)

    def add(self, first: int, second: int, output: int) -> int:
        """Add a sum."""
        return self._add(ADD, first, second, output, self.widths[first])

    def _add(self, *operation: Any, held: Any = None) -> int:
        self._listed.append(_Operation(*operation))
        self._held.append(held)
        return self._listed[-1].output

    def run(self, kernels: Any, given: Sequence[Tensor], rows: int, rotation: Rotation | None = None) -> None:
        """Run the operations; `given` are contiguous, [rows, width] of those widths."""
        if not hasattr(self, "_operations"):
            self._operations = (_Operation * len(self._listed))(*self._listed)
            self._widths = (ctypes.c_int64 * len(self.widths))(*self.widths)
        tables = None
        if rotation is not None:
            cos, sin = rotation
            turned = cos.shape[-1]
            tables = ctypes.byref(_Tables(cos.data_ptr(), sin.data_ptr(), turned, 0 if len(cos) == 1 else turned))
        pointers = self._pointers(*[tensor.data_ptr() for tensor in given])
        operations = self._operations, len(self._operations), pointers, self.num_given
        kernels.run(*operations, self._widths, len(self.widths), rows, tables, torch.get_num_threads())


def use_programs(model: nn.Module) -> None:
    """Let both halves of usual layers be one call, in place; after `use_products` and `fuse`."""
    for module in model.modules():
        if type(module) is LeanAttention and (heads := projected_heads(module)) is not None:
            module.project_heads = heads  # type: ignore[method-assign]
        if type(module) is LeanBlock and (rest := rest_of_block(module)) is not None:
            module.after_attention = rest  # type: ignore[method-assign]


def projected_heads(attention: LeanAttention) -> Callable[..., Any] | None:
    """Return what takes the place of `attention.project_heads`; None where that is more than linear projections, norms
    of heads and rotary positions."""
    projections = {name: getattr(attention, f"{name}_proj") for name in "qkv"}
    product = joint_product(attention, [linear for linear in projections.values() if linear is not None])
    norms = {name: getattr(attention, f"{name}_norm", None) for name in "qkv"}
    plain, head_dim = attention.project_heads, attention.head_dim
    if product is None or attention.q_proj is None or attention.g_proj is not None:
        return None
    if any(norm is not None and not _is_readable(norm, head_dim, product) for norm in norms.values()):
        return None
    names = [name for name, linear in projections.items() if linear is not None]
    heads = {name: width // head_dim for name, width in zip(names, product.outputs, strict=True)}
    programs = {}
    for turns in (False, True):
        program = programs[turns] = Program([product.inputs, *product.outputs])
        program.multiply(product, 0, 1)
        for output, (name, number) in enumerate(heads.items(), 1):
            program.norm(norms[name] or nn.Identity(), output, output, number)
            if turns and name != "v":
                program.turn(output, number)

    def project_heads(hidden_states: Tensor, mlp_hidden: Tensor | None, rotation: Rotation | None) -> Any:
        rows, positions, _ = hidden_states.shape
        kernels = kernels_for(hidden_states, product.weight) if positions == 1 and rows <= ROWS else None
        if kernels is None or (rotation is not None and not _turns(rotation, hidden_states, head_dim)):
            return plain(hidden_states, mlp_hidden, rotation)
        found = {name: hidden_states.new_empty((rows, number, 1, head_dim)) for name, number in heads.items()}
        given = [hidden_states.contiguous(), *found.values()]
        programs[rotation is not None].run(kernels, given, rows, rotation)
        return found["q"], found.get("k"), found.get("v"), None

    return project_heads


def rest_of_block(block: LeanBlock) -> Callable[..., Any] | None:
    """Return what takes the place of `block.after_attention`; None where that is more than norms, a gated MLP and plain
    skips."""
    config, mlp = block.config, block.mlp
    skips = config.attention_skip and config.mlp_skip and config.residual_multiplier == 1
    if config.block_type != "serial" or not skips or block.mlp_connection is not None or type(mlp) is not GatedMLP:
        return None
    norms = block.attention_output_layernorm, block.post_attention_layernorm, block.mlp_output_layernorm
    product, down = joint_product(mlp, [mlp.gate_proj, mlp.up_proj]), mlp.down_proj
    if product is None or not isinstance(down, FewRowsLinear) or not _is_identity(block.dropout):
        return None
    if "hidden" not in vars(mlp) or any(is_rewritten(module) for module in (mlp, mlp.activation, down)):
        return None
    if any(layer.lends_mlp_hidden for layer in config.plan.layers) or not down.product.matches(product):
        return None
    if not all(_is_identity(norm) or _is_readable(norm, product.inputs, product) for norm in norms):
        return None
    program = Program([product.inputs] * 3)  # the stream, attention's output, and the stream behind the block
    width = product.inputs
    read = program.add(0, program.norm(norms[0], 1), program.buffer(width))
    gate = program.multiply(product, program.norm(norms[1], read))
    output = program.multiply(down.product, program.gate(gate, gate + 1, GATES[type(mlp.activation)]))
    program.add(read, program.norm(norms[2], output), 2)
    plain = block.after_attention

    def after_attention(attended: Tensor, normed: Tensor, read: Tensor, write: Any) -> tuple[Tensor, Tensor | None]:
        rows, positions, _ = read.shape
        kernels = kernels_for(read, product.weight) if positions == 1 and rows <= ROWS else None
        if kernels is None or attended.shape != read.shape or attended.dtype != read.dtype:
            return plain(attended, normed, read, write)
        stream = torch.empty_like(read, memory_format=torch.contiguous_format)
        program.run(kernels, [read.contiguous(), attended.contiguous(), stream], rows)
        return stream, None

    return after_attention


def joint_product(module: Any, linear: Sequence[Any]) -> Product | None:
    """Return the product of all of these plain linear layers, with which `module.project` was replaced; else None."""
    joined = vars(module).get("project")
    if not isinstance(joined, JoinedProjections) or joined._once is None or joined.layers != list(linear):
        return None
    product = joined._once[1]
    plain = all(type(layer) is nn.Linear for layer in linear) and isinstance(product, Product) and product.readable
    return product if plain else None  # type: ignore[return-value]


def _is_identity(module: nn.Module) -> bool:
    return type(module) is nn.Identity and not is_rewritten(module)


def _is_readable(norm: nn.Module, width: int, product: Product) -> bool:
    """Whether the kernel can read this norm of so many columns, in the dtype of the product's weights."""
    if not isinstance(norm, FusedRMSNorm) or is_rewritten(norm):
        return False
    return len(norm.weight) == width and norm.weight.dtype == product.weight.dtype and norm.weight.device.type == "cpu"


def _turns(rotation: Rotation, hidden_states: Tensor, head_dim: int) -> bool:
    """Whether these tables are of one position of every row, or of all, and lie as the kernel reads them."""
    cos, sin = rotation
    return (
        cos.shape[0] in (1, len(hidden_states))
        and cos.shape[1] == 1
        and cos.shape[2] <= head_dim
        and cos.shape == sin.shape
        and cos.dtype == sin.dtype == hidden_states.dtype
        and cos.is_contiguous()
        and sin.is_contiguous()
    )
