"""Every part that a configuration can name, one line each. A checkpoint's folder has the lines that it needs."""

from typing import Any

from .attention import LeanAttention
from .attention_latent import LatentAttention
from .depth_average import DepthAverages
from .hyper_connections import HyperConnections
from .images import Images
from .keyvalue_borrowed_values import BorrowedValues
from .keyvalue_first_layer_values import FirstLayerValues
from .keyvalue_interpolated_values import InterpolatedValues
from .keyvalue_shared import FirstValuesMiddleKeys, SharedAdjacent, SharedMiddle
from .latent_heads import LatentHeadsAttention, LatentKeys, LatentValues
from .layers import MLP, GatedMLP, Text
from .layout import ProjectedKeyValue
from .moe import MixtureOfExperts
from .output_gate import OutputGate
from .projection_block_identity import BlockIdentity
from .projection_identity import IdentityKey, IdentityOutput, IdentityQuery, IdentityValue
from .projection_nonlinear import NonlinearKey, NonlinearQuery, NonlinearValue
from .query_residual import FromMLP, Residual
from .registry import LinearOutput, LinearProjection, by_kind
from .value_keys import KeysAsValues

Table = dict[str, Any]

QUERIES: Table = by_kind(
    LinearProjection,
    IdentityQuery,
    NonlinearQuery,
    Residual,
    FromMLP,
)
KEYS: Table = by_kind(
    LinearProjection,
    IdentityKey,
    NonlinearKey,
    BlockIdentity,
    LatentKeys,
)
VALUES: Table = by_kind(
    LinearProjection,
    IdentityValue,
    NonlinearValue,
    BlockIdentity,
    KeysAsValues,
    LatentValues,
)
OUTPUTS: Table = by_kind(
    LinearOutput,
    IdentityOutput,
)
OUTPUT_GATES: Table = by_kind(
    OutputGate,
)
KEY_VALUES: Table = by_kind(
    ProjectedKeyValue,
    FirstLayerValues,
    InterpolatedValues,
    SharedMiddle,
    SharedAdjacent,
    FirstValuesMiddleKeys,
    BorrowedValues,
)
ATTENTIONS: Table = by_kind(
    LeanAttention,
    LatentHeadsAttention,
    LatentAttention,
)
MLPS: Table = by_kind(
    MLP,
    GatedMLP,
    MixtureOfExperts,
)
TASKS: Table = {
    "causal_lm": Text,
    "masked_lm": Text,
    "image_classification": Images,
}
DEPTH: Table = by_kind(
    DepthAverages,
)
CONNECTIONS: Table = by_kind(
    HyperConnections,
)
