"""A decoding step's small operations on a CPU, each as one call: products of few rows, norms, rotary positions, gates.

PyTorch starts up to ten operators for an RMSNorm in 16 bits, each of which takes longer to start than to run. The
kernels are step.cpp, compiled as attention.cpp is. Each takes the place of a module, or of a method, that computes
exactly this, and leaves to it what it is not made for: gradients, other dtypes, a graph that is being traced.
"""

import ctypes
import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import GELUActivation, GELUTanh, SiLUActivation

from ..compat import compile_cpp
from ..model.attention import Attention
from ..model.latent import Absorbing, Columns, frequencies_of, is_absorbable, is_rewritten, rotate_columns
from ..model.layers import MLP, GatedMLP, OffsetRMSNorm
from ..model.position import Rotation, rotate
from .repeat import NUMBER, POINTER, ROWS, Arguments, call, fields, not_noted

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Activations that the kernel computes; the numbers are those of `Activation` in step.cpp.
ACTIVATIONS: dict[type[nn.Module], int] = {nn.SiLU: 0, SiLUActivation: 0, GELUTanh: 1, GELUActivation: 2}
# Columns of key heads are filled up to a multiple of it; the same as kPadding in attention.cpp.
KEY_COLUMNS = 32
NORMS = nn.RMSNorm, OffsetRMSNorm, nn.LayerNorm


class _Map(ctypes.Structure):
    """The same, in the same order, as `Map` in step.cpp."""

    _fields_ = [*fields(POINTER, "weight bias"), *fields(NUMBER, "outputs")]


class _Turn(Arguments):
    """The same, in the same order, as `Turn` in step.cpp."""

    _fields_ = [
        *fields(POINTER, "heads cos sin output"),
        *fields(NUMBER, "batch num_heads positions head_dim turned batch_stride head_stride position_stride"),
        *fields(NUMBER, "table_batch table_position threads"),
        *(("frequency", POINTER), ("frequencies", NUMBER)),
    ]
    given = "heads", "cos", "sin"


class _ByHead(Arguments):
    """The same, in the same order, as `ByHead` in step.cpp."""

    _fields_ = [
        *fields(POINTER, "weight bias input output frequency"),
        *fields(NUMBER, "batch heads group outputs inputs threads"),
    ]
    given = ("input",)


class _Write(Arguments):
    """The same, in the same order, as `Write` in step.cpp."""

    _fields_ = [
        *fields(POINTER, "source target places"),
        *fields(NUMBER, "batch heads row from_batch from_head to_batch to_head to_place place"),
    ]
    given = "source", "target"

    def growing(self) -> list[ctypes.c_int64]:
        return [] if self.places else [self.number("place")]


class Product:
    """`x -> [x W^T + b, ...]` of linear maps of one input, by the kernel where there are few rows.

    Weights are read where they lie: there is no second copy of them, and changes in place are seen.
    """

    def __init__(self, maps: Sequence[tuple[Tensor, Tensor | None]]):
        """maps: weights [outputs, inputs] and biases [outputs]."""
        self.maps, self.weight = maps, maps[0][0]
        self.inputs, self.outputs = self.weight.shape[1], [len(weight) for weight, _ in maps]
        # Aliases, which keep the memory that is read where a parameter gets another one.
        self._read = [[None if of is None else of.detach().contiguous() for of in pair] for pair in maps]
        kinds = {(of.dtype, of.device.type) for pair in self._read for of in pair if of is not None}
        self.readable = kinds in [{(dtype, "cpu")} for dtype in DTYPES]
        pointers = [[None if of is None else of.data_ptr() for of in pair] for pair in self._read]
        rows = zip(pointers, self.outputs, strict=True)
        self._maps = (_Map * len(maps))(*[_Map(*pair, outputs) for pair, outputs in rows])
        self._pointers, self.address = ctypes.c_void_p * len(maps), ctypes.addressof(self._maps)

    def matches(self, other: "Product") -> bool:
        """Whether the kernel reads both in one dtype."""
        return self.readable and other.readable and self.weight.dtype == other.weight.dtype

    def __call__(self, inputs: Tensor) -> list[Tensor]:
        rows, size = inputs.shape[:-1], inputs.shape[-1]
        fits = self.readable and size == self.inputs and rows.numel() <= ROWS
        kernels = kernels_for(inputs, self.weight) if fits else None
        if kernels is None:
            return [F.linear(inputs, weight, bias) for weight, bias in self.maps]
        inputs = inputs.contiguous()
        outputs = [inputs.new_empty((*rows, n)) for n in self.outputs]
        pointers = self._pointers(*[output.data_ptr() for output in outputs])
        given = len(outputs), size, inputs.data_ptr(), rows.numel(), pointers, torch.get_num_threads()
        kernels.multiply(self._maps, *given)
        return outputs


class HeadProduct:
    """`x_h -> x_h W_h^T + b_h` of every head h, by the kernel; `group` heads of x that follow each other share one.

    Or `ComplexUp.absorb` of model/latent.py. The weight is a copy: later changes are not seen.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, columns: Columns | None = None, inputs: int = 0):
        """weight: [heads, outputs, inputs]; bias: [heads, outputs]. With complex columns: the weight of a ComplexUp,
        and the width of a head."""
        self.weight = (weight if columns is None else weight.mT).detach().contiguous()
        self.bias = None if bias is None else bias.detach().contiguous()
        pointers = self.weight.data_ptr(), None if self.bias is None else self.bias.data_ptr()
        heads, outputs, self.inputs = weight.shape if columns is None else (len(weight), weight[0].numel(), inputs)
        self._map = _ByHead(*pointers, heads=heads, outputs=outputs, inputs=self.inputs)
        if columns is not None:
            self._map.frequency = frequencies_of(columns, weight.device).data_ptr()  # which is kept
        self.outputs, self.address = outputs, ctypes.addressof(self._map)

    def __call__(self, inputs: Tensor) -> Tensor | None:
        """[batch, heads of x, inputs] to [batch, heads of x, outputs]; None where PyTorch computes."""
        heads, outputs = self._map.heads, self.outputs
        batch, given, _ = inputs.shape
        kernels = kernels_for(inputs, self.weight) if given % heads == 0 else None
        if kernels is None:
            return None
        inputs, output = inputs.contiguous(), inputs.new_empty((batch, given, outputs))
        made = _ByHead.from_buffer_copy(self._map)
        made.input, made.output, made.batch, made.group = inputs.data_ptr(), output.data_ptr(), batch, given // heads
        made.threads = torch.get_num_threads()
        call(kernels.by_head, made)
        return output


class KeyMaps(NamedTuple):
    """What makes key heads of a latent, as the kernel reads it, in float32; a copy.

    up: [heads, columns, head_dim], padded to a multiple of KEY_COLUMNS.
    norm: the weight of every head's norm, [head_dim], and its epsilon; None: there is none.
    """

    up: Tensor
    norm: Tensor | None
    epsilon: float


def key_maps(attention: Any) -> KeyMaps | None:
    """Return what makes an attention's key heads of their latent; None: the kernel cannot make them."""
    up, norm, head_dim = attention.k_up_proj, attention.k_norm, attention.head_dim
    if not attention.turns_keys or not makes_keys(attention) or (norm is not None and len(norm.weight) != head_dim):
        return None
    maps = up.weight.detach().float().unflatten(0, (-1, head_dim)).mT
    maps = nn.functional.pad(maps, (0, -head_dim % KEY_COLUMNS)).contiguous()
    if norm is None:
        return KeyMaps(maps, None, 0.0)
    return KeyMaps(maps, norm.weight.detach().float() + getattr(norm, "offset", 0.0), norm.eps)


def makes_keys(attention: Any) -> bool:
    """Whether the weights of an attention's up projection and norm say all that its keys are made by."""
    norm = attention.k_norm
    plain = norm is None or (type(norm) in (nn.RMSNorm, OffsetRMSNorm, FusedNorm) and _is_plain_norm(norm))
    return plain and is_absorbable(attention.k_up_proj)


def use_head_products(attention: Any) -> None:
    """Let an attention with latents absorb its up projections by products of the kernel, of single queries.

    These are its `head_products`, the maps of queries to the latent of keys, and of attended latents of values to
    outputs; None for what is no latent, or cannot be absorbed.
    """
    key, value, head_dim = attention.k_up_proj, attention.v_up_proj, attention.head_dim
    into = out_of = None
    if is_absorbable(key) and not attention.turns_keys:
        if type(key) is nn.Linear:
            into = HeadProduct(key.weight.unflatten(0, (-1, head_dim)).mT)
        else:
            into = HeadProduct(key.weight, columns=key.columns, inputs=head_dim)
        attention.absorb = _of_single(into, attention.absorb, 2)
    if is_absorbable(value):
        bias = None if value.bias is None else value.bias.unflatten(0, (-1, head_dim))
        out_of = HeadProduct(value.weight.unflatten(0, (-1, head_dim)), bias)
        attention.restore = _of_single(out_of, attention.restore, 1)
    attention.head_products, attention.rotate_columns = (into, out_of), fused_rotate
    attention.key_maps = key_maps(attention) if attention.turns_keys else None


def _of_single(product: HeadProduct, plain: Callable[[Tensor], Tensor], positions: int) -> Callable[[Tensor], Tensor]:
    """Return `plain`, computed by the product where there is one position, in this dimension of what it is given."""

    def computed(states: Tensor) -> Tensor:
        found = product(states.squeeze(positions)) if states.shape[positions] == 1 else None
        return plain(states) if found is None else found.unsqueeze(positions)

    return computed


class FusedNorm(nn.Module):
    """An nn.RMSNorm, or one whose weight has an offset, or an nn.LayerNorm."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, norm: Any):
        super().__init__()
        self.weight, self.bias, self.eps = norm.weight, getattr(norm, "bias", None), norm.eps
        self.offset, self.centered = getattr(norm, "offset", 0.0), isinstance(norm, nn.LayerNorm)
        self._plain = norm.forward

    @property
    def addresses(self) -> tuple[int, int | None]:
        """Of weight and bias."""
        return self.weight.data_ptr(), None if self.bias is None else self.bias.data_ptr()

    def forward(self, x: Tensor) -> Tensor:
        width = len(self.weight)
        kernels = kernels_for(x, self.weight) if x.shape[-1] == width else None
        if kernels is None:
            return self._plain(x)
        x = x.contiguous()
        output = torch.empty_like(x)
        given = *self.addresses, self.centered, self.offset, self.eps
        kernels.norm(x.data_ptr(), x.numel() // width, width, *given, output.data_ptr(), torch.get_num_threads())
        return output


def fused_rotate(heads: Tensor, position_embeddings: Rotation, columns: tuple[int, ...] | None = None) -> Tensor:
    """As `model.position.rotate`, in whose place it is put, or, with columns, `model.latent.rotate_columns`."""
    cos, sin = position_embeddings
    kernels = kernels_for(heads, cos)
    batch, num_heads, positions, head_dim = heads.shape
    width = cos.shape[-1]
    index, turned = (None, width) if columns is None else (frequencies_of(columns, heads.device), head_dim)
    fits = turned <= head_dim and cos.shape[1] == positions and cos.shape[0] in (1, batch)
    if kernels is None or not fits or heads.stride(-1) != 1:
        given = heads, position_embeddings
        return rotate(*given) if columns is None else rotate_columns(*given, columns)
    cos, sin = cos.contiguous(), sin.contiguous()
    output = heads.new_empty(heads.shape)
    arguments = _Turn(
        *(heads.data_ptr(), cos.data_ptr(), sin.data_ptr(), output.data_ptr()),
        *(batch, num_heads, positions, head_dim, turned, *heads.stride()[:3]),
        *(0 if len(cos) == 1 else positions * width, width, torch.get_num_threads()),
        *((None, 0) if index is None else (index.data_ptr(), width // 2)),  # which is kept
    )
    call(kernels.turn, arguments)
    return output


def fused_hidden(mlp: MLP) -> Callable[[Tensor], Tensor]:
    """Return what takes the place of `mlp.hidden`."""
    kind = ACTIVATIONS[type(mlp.activation)]

    def hidden(hidden_states: Tensor) -> Tensor:
        gate, up = mlp.project(hidden_states) if isinstance(mlp, GatedMLP) else (mlp.up_proj(hidden_states), None)
        kernels = kernels_for(gate, gate if up is None else up)
        if kernels is None:
            return mlp.activation(gate) if up is None else mlp.activation(gate) * up
        gate, up = gate.contiguous(), None if up is None else up.contiguous()
        output = torch.empty_like(gate)
        pointers = gate.data_ptr(), None if up is None else up.data_ptr()
        kernels.gate(*pointers, gate.numel(), kind, output.data_ptr(), torch.get_num_threads())
        return output

    return hidden


def write(states: Tensor, buffer: Tensor, place: int | Tensor) -> None:
    """buffer[:, :, place] = states[:, :, 0], of buffers that the kernels take; `place` may be one for every row of the
    batch, which the caller keeps and, where steps are repeated, advances.

    Raises:
        ValueError: other rows or heads than the buffer's.
    """
    if states.shape[:2] != buffer.shape[:2]:
        raise ValueError(f"a step of [rows, heads] {[*states.shape[:2]]} does not fit a cache of {[*buffer.shape[:2]]}")
    kernels = kernels_for(states, buffer)
    if kernels is None or states.stride(-1) != 1 or buffer.stride(-1) != 1:
        rows = torch.arange(len(buffer)) if isinstance(place, Tensor) else slice(None)
        buffer[rows, :, place] = states[:, :, 0]
        return
    size = buffer.itemsize
    strides = [size * stride for stride in (*states.stride()[:2], *buffer.stride()[:3])]
    shape = *buffer.shape[:2], size * buffer.shape[-1]
    places, one = (place.data_ptr(), 0) if isinstance(place, Tensor) else (None, place)
    call(kernels.write, _Write(states.data_ptr(), buffer.data_ptr(), places, *shape, *strides, one))


def fuse(model: nn.Module) -> None:
    """Put the kernels, in place, where modules compute what they do; dropout, which does nothing here, is left out."""
    for module in list(model.modules()):
        if isinstance(module, Attention):
            module.rotate = fused_rotate
        if isinstance(module, Absorbing):
            use_head_products(module)
        if type(module) in (MLP, GatedMLP) and _is_activation(module.activation):
            module.hidden = fused_hidden(module)  # type: ignore[arg-type, assignment]
        for name, child in module.named_children():
            if type(child) is nn.Dropout and not is_rewritten(child):
                setattr(module, name, nn.Identity())
            elif type(child) in NORMS and _is_plain_norm(child):
                setattr(module, name, FusedNorm(child))


def _is_activation(module: Any) -> bool:
    return type(module) in ACTIVATIONS and not is_rewritten(module)


def _is_plain_norm(norm: Any) -> bool:
    return not is_rewritten(norm) and norm.weight is not None and norm.weight.dim() == 1 and norm.eps is not None


def kernels_for(given: Tensor, other: Tensor) -> Any | None:
    """Return the functions of step.cpp for operands of one dtype; None where PyTorch computes."""
    if given.dtype != other.dtype or given.device.type != "cpu" or other.device.type != "cpu":
        return None
    if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling():
        return None
    return compiled_kernels().get(given.dtype)


def kernel_source(file: str) -> str:
    """Return the C++ source beside a Python file, with the headers beside it in the places of their `#include`."""
    own = Path(file).with_suffix(".cpp")
    return re.sub(r'#include "(\w+\.h)"', lambda found: own.with_name(found[1]).read_text(), own.read_text())


@functools.cache
def compiled_kernels() -> dict[torch.dtype, Any]:
    """Return the functions of step.cpp by dtype; none where nothing can be compiled."""
    library = compile_cpp(kernel_source(__file__), "-w", "-ffp-contract=fast")
    if library is None:
        return {}
    pointer, number, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
    arguments: dict[str, list[Any]] = {
        "multiply": [pointer, number, number, pointer, number, pointer, number],
        "by_head": [pointer],
        "norm": [pointer, number, number, pointer, pointer, number, real, real, pointer, number],
        "turn": [pointer],
        "gate": [pointer, pointer, number, number, pointer, number],
        "run": [pointer],
    }
    library.write_head_rows.argtypes, library.write_head_rows.restype = [pointer], ctypes.c_bool
    library.repeat_calls.argtypes, library.repeat_calls.restype = [pointer, number], number
    kernels = {}
    for dtype in DTYPES:
        functions = {name: getattr(library, f"{name}_{str(dtype).removeprefix('torch.')}") for name in arguments}
        for name, function in functions.items():
            noted = len(arguments[name]) == 1
            function.argtypes, function.restype = arguments[name], ctypes.c_bool if noted else None
            functions[name] = function if noted else _alone(function)
        kernels[dtype] = SimpleNamespace(**functions, write=library.write_head_rows, repeat=library.repeat_calls)
    return kernels


def _alone(function: Callable[..., None]) -> Callable[..., None]:
    """A kernel that repeated steps do not call."""

    def called(*arguments: Any) -> None:
        not_noted()
        function(*arguments)

    return called
