"""The DLRM-DCNv2 of MLPerf Training in any size.

The shape is that of MLPerf Training's benchmark "dlrm_dcnv2" (from version 3.0 on), with the
hotness of its multi-hot data. The cross layers are the low-rank ones of Wang et al., "DCN V2:
Improved Deep & Cross Network and Practical Lessons for Web-scale Learning to Rank Systems", 2020
(arXiv 2008.13535).
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from criteo import CATEGORIES
from dlrm import Inputs, magnitudes
from flax import linen as nn

import jax_hkv as hkv
from jax_hkv.linen import EmbedCollection

ROWS = (
    *(40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956),
    *(405_282, 10, 2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152),
    *(12_973, 108, 36),
)
HOTNESS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
LEARNING_RATE = 0.005
# MLPerf's, which PyTorch adds outside the root of Adagrad. Optax and jax_hkv add theirs inside,
# where the square does the same: 1e-8 there would drown the gradients of rare ids in a large batch.
EPSILON = 1e-8
EPSILON_INSIDE_ROOT = EPSILON**2
SMALL_TABLE = 128  # rows: dividing fewer would save nothing, and leave the column nothing to say
INITIAL_STDDEV = 0.01  # of embedding rows, and the same for all tables, so that they are one


@dataclass(frozen=True)
class Shape:
    """The sizes of a model and of its batch."""

    rows: tuple[int, ...] = ROWS
    hotness: tuple[int, ...] = HOTNESS
    dim: int = 128
    bottom: tuple[int, ...] = (512, 256, 128)
    cross_layers: int = 3
    cross_rank: int = 512
    top: tuple[int, ...] = (1024, 1024, 512, 256, 1)
    batch: int = 65_536


def scaled(scale: int) -> Shape:
    """Returns MLPerf's shape, smaller: rows and batch by `scale`, widths by its square root.

    Tables keep up to `SMALL_TABLE` rows; hotness and the number of layers stay.
    """
    full = Shape()

    def narrow(width: int) -> int:
        return max(1, round(width / math.sqrt(scale)))

    return Shape(
        rows=tuple(max(math.ceil(rows / scale), min(rows, SMALL_TABLE)) for rows in full.rows),
        dim=narrow(full.dim),
        bottom=tuple(map(narrow, full.bottom)),
        cross_rank=narrow(full.cross_rank),
        top=tuple(map(narrow, full.top)),
        batch=max(1, round(full.batch / scale)),
    )


def embeddings(
    shape: Shape, capacity_factor: float = 1.0, learning_rate: float = LEARNING_RATE, seed: int = 0
) -> hkv.Collection:
    """Returns the 26 tables, which are one table, and the feature that is looked up in each.

    The factor says for how much of the shape's rows there is room.
    """
    names = [f"column_{number}" for number in range(CATEGORIES)]
    config = partial(
        hkv.TableConfig,
        dim=shape.dim,
        choices=2,  # there may be as many ids as rows; with one choice a third would find no room
        init=hkv.initializers.normal(INITIAL_STDDEV),
        seed=seed,
        optimizer=hkv.optim.adagrad(learning_rate, 0.0, EPSILON_INSIDE_ROOT),
    )
    capacities = [math.ceil(rows * capacity_factor) for rows in shape.rows]
    tables = [config(name, capacity) for name, capacity in zip(names, capacities, strict=True)]
    return hkv.Collection(tables, [hkv.Feature(name, name, "sum") for name in names])


class CrossLayers(nn.Module):
    """Layers x <- first * (W (V x) + b) + x, where V has `rank` outputs."""

    layers: int
    rank: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, first: jax.Array) -> jax.Array:
        """Returns crossed features, [n, width] as those given."""
        crossed = first
        for _ in range(self.layers):
            low_rank = _dense(self.rank, self.dtype, use_bias=False)(crossed)
            crossed = first * _dense(first.shape[1], self.dtype)(low_rank) + crossed
        return crossed


class DlrmDcnV2(nn.Module):
    """Integers through an MLP, low-rank cross layers over all vectors, another MLP.

    Parameters are float32; `dtype` is that of the computation.
    """

    shape: Shape
    collection: hkv.Collection
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, inputs: Inputs, *, train: bool = False) -> jax.Array:
        """Returns logits float32[n]; training inserts the ids that it has not seen."""
        shape, dtype = self.shape, self.dtype
        bottom = magnitudes(inputs.integers)
        for width in shape.bottom:
            bottom = nn.relu(_dense(width, dtype)(bottom))
        rows = EmbedCollection(self.collection, dtype)(self._by_feature(inputs), train=train)
        vectors = jnp.concatenate([bottom, *rows.values()], axis=1)
        top = CrossLayers(shape.cross_layers, shape.cross_rank, dtype)(vectors)
        for width in shape.top[:-1]:
            top = nn.relu(_dense(width, dtype)(top))
        return _dense(shape.top[-1], dtype)(top)[:, 0].astype(jnp.float32)

    def _by_feature(self, inputs: Inputs) -> dict[str, hkv.Padded]:
        ends = np.cumsum(self.shape.hotness)
        names = [feature.name for feature in self.collection.features]
        return {
            name: hkv.Padded(keys, jnp.broadcast_to(inputs.valid[:, None], keys.shape))
            for name, hot, end in zip(names, self.shape.hotness, ends, strict=True)
            for keys in [inputs.keys[:, end - hot : end]]
        }


def _dense(width: int, dtype: Any, use_bias: bool = True) -> nn.Dense:
    return nn.Dense(width, use_bias, dtype, kernel_init=nn.initializers.xavier_normal())
