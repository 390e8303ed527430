"""64-bit keys and scores as pairs of 32-bit words, so that they survive with x64 off."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, UInt32

from jax_hkv._compat import is_fixed, is_traced, is_used_up, replicated
from jax_hkv._id_types import remedy_of

_WORD_BITS = 32
_LOW_WORD = 0xFFFFFFFF
_INTEGERS = tuple(np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Keys:
    """Unsigned 64-bit numbers (keys, or scores in the same form) of any shape.

    Attributes:
      words: ``uint32[..., 2]``, the (low, high) words, of JAX or, on the host, of NumPy. Axes that
        JAX's transformations are told (``in_axes`` of vmap or nn.scan) are theirs, from the front
        those of the keys: -1 is that of the two words.

    Example:
      >>> import numpy as np
      >>> keys = Keys.from_numpy(np.array([-1, 7], np.int64))
      >>> keys.shape
      (2,)
      >>> int(keys.to_numpy()[0]) == 2**64 - 1
      True
    """

    words: UInt32[Any, "*shape 2"]

    @classmethod
    def from_numpy(cls, ids: Any) -> Keys:
        """From integers on the host, where the words stay until an operation needs them.

        No device is touched, so the workers of a data loader can call it. Keys that many calls use
        are put on the device once, by ``jax.device_put(keys)``.

        Args:
          ids: integer array of any shape; signed numbers are sign-extended to 64 bits.

        Raises:
          TypeError: if the array does not hold integers.
          ValueError: if a list's own lists are of unequal lengths.
        """
        return cls(_wide_words(as_integers(ids, "Keys.from_numpy: ids")))

    @classmethod
    def concatenate(cls, parts: Sequence[Keys], axis: int = 0) -> Keys:
        """One after the other along an axis of their shapes, as ``jnp.concatenate``.

        Args:
          parts: Keys, at least one, whose shapes agree but for the axis.
          axis: from ``-ndim`` to ``ndim - 1``.

        Raises:
          TypeError, ValueError: naming the argument.
        """
        call = "Keys.concatenate"
        words = _words_of_parts(call, parts)
        shapes = [list(part.shape[:-1]) for part in words]
        ndim = len(shapes[0])
        if ndim == 0 or any(len(shape) != ndim for shape in shapes):
            raise ValueError(
                f"{call}: parts must have equally many axes, one at least, got the shapes "
                f"{shapes}: reshape them"
            )
        along = _as_axis(call, axis, ndim)
        if len({(*shape[:along], *shape[along + 1 :]) for shape in shapes}) > 1:
            raise ValueError(
                f"{call}: parts must agree in all axes but {axis}, got the shapes {shapes}"
            )
        return cls(_read_only(_library_of(words).concatenate(words, along)))

    @classmethod
    def stack(cls, parts: Sequence[Keys], axis: int = 0) -> Keys:
        """One beside the other along a new axis, as ``jnp.stack``: the batches of a scan, say.

        Args:
          parts: Keys of one shape, at least one.
          axis: of the result, from ``-ndim`` to ``ndim - 1`` of its number of axes.

        Raises:
          TypeError, ValueError: naming the argument.

        Example:
          >>> Keys.stack([Keys.from_numpy([5, 6]), Keys.from_numpy([7, 8])]).to_numpy().tolist()
          [[5, 6], [7, 8]]
        """
        call = "Keys.stack"
        words = _words_of_parts(call, parts)
        shapes = [list(part.shape[:-1]) for part in words]
        if any(shape != shapes[0] for shape in shapes):
            raise ValueError(
                f"{call}: parts must have one shape, got the shapes {shapes}: pad them to one"
            )
        along = _as_axis(call, axis, len(shapes[0]) + 1)
        return cls(_read_only(_library_of(words).stack(words, along)))

    @classmethod
    def where(cls, condition: Any, keys: Any, others: Any) -> Keys:
        """Keys where a condition holds, and others elsewhere, as ``jnp.where``.

        Args:
          condition: an array of bool.
          keys: Keys or integers (see :func:`jax_hkv.find`), of a shape that fits the condition's.
          others: likewise, one key for all of them say.

        Raises:
          TypeError, ValueError: naming the argument.

        Example:
          >>> keys, mask = Keys.from_numpy([7, 2**40]), Keys.from_numpy(-1)
          >>> Keys.where(np.array([True, False]), mask, keys).to_numpy(signed=True).tolist()
          [-1, 1099511627776]
        """
        call = "Keys.where"
        check_unmasked(f"{call}: condition", condition)
        if getattr(condition, "dtype", None) != np.bool_:
            raise TypeError(
                f"{call}: condition must be an array of bool, got {type(condition).__name__} "
                f"{getattr(condition, 'dtype', '')}: compare, as ids == padding"
            )
        words = [as_keys(call, "keys", keys).words, as_keys(call, "others", others).words]
        shapes = [np.shape(condition), *(part.shape[:-1] for part in words)]
        _check_fit(call, "condition, keys and others", *shapes)
        on_host = not any(isinstance(part, jax.Array) for part in (condition, *words))
        choose = np.where if on_host else jnp.where
        return cls(_read_only(choose(condition[..., None], *words)))

    @classmethod
    def cross(cls, *ids: Any, seed: int = 0) -> Keys:
        """One key for each combination of ids: a feature crossing, or an n-gram of tokens.

        It is a hash of 64 bits, the same on every device and on the host, where that of NumPy's
        arrays stays, so that the workers of a data loader can call it: of n different combinations
        about n^2 / 2^65 pairs share a key. Their order matters, and so does how many ids there are.
        The ids are taken by Threefry-2x32 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as
        easy as 1, 2, 3; 2011), each under the hash of those before it, and added to its output
        without carry (Matyas, Meyer, Oseas; 1985): docs/semantics.md, section 14.

        Args:
          *ids: Keys, integers, or arrays of integers (see :func:`jax_hkv.find`; NumPy's of any
            size), one of them at least, whose shapes fit each other's. A constant tells features
            apart, ``np.arange(heads)`` on an axis of its own makes several hashes.
          seed: 0 to 2**32 - 1.

        Raises:
          TypeError, ValueError: naming the argument.

        Example:
          >>> tokens = np.array([[7, 7, 9]], np.int32)
          >>> bigrams = Keys.cross(tokens[:, :-1], tokens[:, 1:])
          >>> [hex(key) for key in bigrams.to_numpy()[0]]
          ['0x2c3d2aaedada506a', '0x5ec601b91d32c8ac']
        """
        call = "Keys.cross"
        if not _is_integer(seed) or not 0 <= seed <= _LOW_WORD:
            raise ValueError(f"{call}: seed must be from 0 to 2**32 - 1, got {seed!r}")
        if not ids:
            raise ValueError(f"{call}: ids must be one array at least, got none")
        parts = []
        for number, own in enumerate(ids):
            is_on_host = _is_integer(own) or isinstance(own, (np.ndarray, np.generic))
            name = f"ids[{number}]"
            if is_on_host:
                parts.append(cls(_wide_words(as_integers(own, f"{call}: {name}"))))
            else:
                parts.append(as_keys(call, name, own))
        _check_fit(call, "ids", *(part.shape for part in parts))
        most = max(part.ndim for part in parts)  # whoever has no rank promoted asks for this
        words = [part.words[(None,) * (most - part.ndim)] for part in parts]
        if _library_of(words) is not np:
            return cls(_crossed_by_jax(np.uint32(seed), words))
        with np.errstate(over="ignore"):  # numbers of NumPy, unlike its arrays, tell of carries
            return cls(_read_only(np.stack(_crossed(np.uint32(seed), words), axis=-1)))

    def to_numpy(self, *, signed: bool = False) -> np.ndarray:
        """On the host as ``uint64``, or as ``int64``, where negative ids are what they were."""
        signed = as_bool("Keys.to_numpy", "signed", signed)
        if is_traced(self.words):
            raise TypeError(
                f"Keys.to_numpy: keys must be on the host, got some of shape {list(self.shape)} "
                "traced inside of jit: return them from there, or take .low and .high of them"
            )
        words = np.asarray(self.words).astype(np.uint64)
        numbers = words[..., 0] | (words[..., 1] << np.uint64(_WORD_BITS))
        return numbers.astype(np.int64) if signed else numbers

    @property
    def shape(self) -> tuple[int, ...]:
        """Without the axis of the words."""
        return tuple(self.words.shape[:-1])

    @property
    def ndim(self) -> int:
        """Axes, without that of the words."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """How many numbers."""
        return math.prod(self.shape)

    @property
    def low(self) -> UInt32[Array, "*shape"]:
        """The low words."""
        return self.words[..., 0]

    @property
    def high(self) -> UInt32[Array, "*shape"]:
        """The high words."""
        return self.words[..., 1]

    def reshape(self, *shape: int | Sequence[int]) -> Keys:
        """With another shape, given as numbers or as a tuple."""
        lengths = shape[0] if len(shape) == 1 and isinstance(shape[0], Sequence) else shape
        return Keys(self.words.reshape(*lengths, 2))

    def ravel(self) -> Keys:
        """One after the other, along one axis."""
        return self.reshape(-1)

    def __getitem__(self, index: Any) -> Keys:
        parts = index if isinstance(index, tuple) else (index,)
        # NumPy's words cannot be asked for positions that are traced.
        is_on_device = any(isinstance(part, jax.Array) for part in parts)
        words = jnp.asarray(self.words) if is_on_device else self.words
        return Keys(_read_only(words[(*parts, slice(None))]))

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("Keys of shape () have no length")
        return self.shape[0]

    def __iter__(self) -> Iterator[Keys]:
        return (self[position] for position in range(len(self)))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        raise TypeError(_NO_ARRAY)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        # Some of NumPy's functions (np.array_equal) would take that error for an answer.
        attribute, given = _OF_SHAPES.get(function), dict(zip(("a", "axis"), args, strict=False))
        if attribute is None:
            raise TypeError(f"{function.__name__}: {_NO_ARRAY}")
        given |= kwargs
        axis = given.get("axis")
        return getattr(given["a"], attribute) if axis is None else np.size(given["a"].low, axis)

    def __eq__(self, other: object) -> bool:
        if other is None:
            return False
        if isinstance(self.words, (jax.Array, np.ndarray)):
            raise TypeError(
                "Keys are not compared by == (nor found by `in`): take jax_hkv.equal(a, b) for "
                "each of them, or compare .to_numpy()"
            )
        # A tree of something else, such as shapes, is compared like any dataclass.
        return isinstance(other, Keys) and self.words == other.words

    def __lt__(self, other: Any) -> NoReturn:
        raise TypeError(
            "Keys have no operators <, <=, > and >=: take jax_hkv.less(a, b) or "
            "jax_hkv.less_equal(a, b) for each of them, or compare .to_numpy()"
        )

    __le__ = __gt__ = __ge__ = __lt__

    def __hash__(self) -> int:
        return hash((type(self), self.words))


_NO_ARRAY = (
    "Keys are no array: take .to_numpy() (uint64 on the host) or .words (uint32[..., 2]), and join "
    "Keys with Keys.concatenate(parts) or Keys.stack(parts)"
)
_OF_SHAPES = {np.shape: "shape", np.ndim: "ndim", np.size: "size"}
_ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)
_PARITY = 0x1BD11BDA


def threefry(key_low: Any, key_high: Any, low: Any, high: Any) -> tuple[Any, Any]:
    """Threefry-2x32 with 20 rounds, of words of NumPy or of JAX."""
    keys = key_low, key_high, key_low ^ key_high ^ np.uint32(_PARITY)
    low, high = low + keys[0], high + keys[1]
    for block in range(5):
        for rotation in _ROTATIONS[block % 2]:
            low = low + high
            high = (high << np.uint32(rotation)) | (high >> np.uint32(_WORD_BITS - rotation))
            high = high ^ low
        low = low + keys[(block + 1) % 3]
        high = high + keys[(block + 2) % 3] + np.uint32(block + 1)
    return low, high


def _wide_words(integers: np.ndarray) -> np.ndarray:
    """Their words; signed ones are sign-extended."""
    wide = np.ascontiguousarray(integers.astype("<u8"))
    words = wide.view("<u4").reshape(*integers.shape, 2)
    return _read_only(words.astype(np.uint32, copy=False))


def _crossed(seed: Any, words: Sequence[Any]) -> tuple[Any, Any]:
    low, high = seed, np.uint32(len(words))
    for own in words:
        crossed = threefry(low, high, own[..., 0], own[..., 1])
        low, high = crossed[0] ^ own[..., 0], crossed[1] ^ own[..., 1]
    return low, high


@jax.jit
def _crossed_by_jax(seed: Any, words: Sequence[Any]) -> jax.Array:
    return jnp.stack(_crossed(seed, words), axis=-1)


def _read_only(words: Any) -> Any:
    """A value, on the host too."""
    if isinstance(words, np.ndarray):
        words = words.view()
        words.flags.writeable = False
    return words


def check_not_donated(call: str, argument: str, array: Any) -> None:
    """Raises of a batch's array that an earlier call has used up."""
    if is_used_up(array):
        raise RuntimeError(
            f"{call}: {argument} was used up by an earlier call, got an array that was donated or "
            "deleted: donate the state alone (donate_argnums=0), or give a batch of its own"
        )


_FILL = (
    "leave out what it masks, or give array.filled(0), and valid=~np.ma.getmaskarray(array) to the "
    "lookup"
)


def check_unmasked(what: str, array: Any, remedy: str = _FILL) -> None:
    """Raises for a masked array, whose mask would be lost; errors begin with what it is."""
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{what} must not be a masked array, whose mask would be lost: {remedy}")


def as_integers(ids: Any, label: str) -> np.ndarray:
    """What a caller gave as ids, as an array of integers; errors begin with what it is."""
    check_unmasked(label, ids)
    if is_traced(ids):
        raise TypeError(
            f"{label} must be on the host, got {ids.dtype}{list(ids.shape)} traced "
            "inside of jit: operations take integers of up to 32 bits as they are; make Keys of "
            "wider ones before, and pass them in"
        )
    try:
        array = np.asarray(ids)
    except ValueError as error:
        raise ValueError(
            f"{label} must have one shape, got {error}: bags of unequal lengths are "
            "jax_hkv.Jagged.from_lists(ids)"
        ) from None
    if array.dtype.kind in "iu":
        return array
    is_list = isinstance(ids, (list, tuple))
    if is_list and not array.size:
        return array.astype(np.int64)
    objects = np.asarray(ids, object) if is_list or array.dtype == object else None
    numbers = () if objects is None else objects.ravel()
    # NumPy has no type for those of both halves of 64 bits.
    if objects is not None and all(map(_is_integer, numbers)):
        if min(numbers, default=0) >= -(2**63) and max(numbers, default=0) < 2**64:
            words = [int(number) % 2**64 for number in numbers]
            return np.array(words, np.uint64).reshape(objects.shape)
        remedy = "hash or cast them to 64 bits first"
    else:
        remedy = remedy_of(array, numbers)
    raise TypeError(f"{label} must hold integers, got dtype {array.dtype}: {remedy}")


def as_bool(call: str, argument: str, value: Any, expected: str = "True or False") -> bool:
    """`value` as a bool; raises unless it is one: a text would be true whatever it says."""
    if not isinstance(value, (bool, np.bool_)):
        remedy = ""
        if is_traced(value):
            remedy = (
                ", traced: Python decides by it, so it must be static (static_argnames= of "
                "jax.jit; static_argnums= of nn.remat, and given by position)"
            )
        raise TypeError(
            f"{call}: {argument} must be {expected}, got {type(value).__name__} {value!r}{remedy}"
        )
    return bool(value)


def as_keys(call: str, argument: str, ids: Any, namespace: Any = None) -> Keys:
    """What a caller gave as keys, as Keys; errors name the call and the argument."""
    return keys_of(check_keys(call, argument, ids, namespace))


def check_fixed(call: str, argument: str, shape: tuple[Any, ...]) -> None:
    """Raises where a size is a symbol of ``jax.export``, for a call that merges equal keys."""
    if not is_fixed(shape):
        raise TypeError(
            f"{call}: {argument} must have a fixed shape, got {list(shape)}: it works in memory "
            "of a size that is known while tracing. On one device lookups that insert nothing take "
            "symbolic sizes (find without touch=, contains, find_pooled, layers without "
            "train=True); export a program of others for each size of a batch, and fill batches up "
            "to one of them with ids that valid= masks"
        )


def _words_of_parts(call: str, parts: Any) -> list[Any]:
    """The words of Keys that are to be joined."""
    if not isinstance(parts, Sequence):
        raise TypeError(f"{call}: parts must be a list of Keys, got {type(parts).__name__}")
    words = [as_keys(call, f"parts[{number}]", part).words for number, part in enumerate(parts)]
    if not words:
        raise ValueError(f"{call}: parts must be Keys, at least one, got none")
    return words


def _as_axis(call: str, axis: Any, ndim: int) -> int:
    if not _is_integer(axis) or not -ndim <= axis < ndim:
        raise ValueError(
            f"{call}: axis must be from {-ndim} to {ndim - 1}, got {axis!r}: give an integer"
        )
    return axis % ndim


def _library_of(words: Sequence[Any]) -> Any:
    """NumPy for what is all on the host, else jax.numpy."""
    return np if all(isinstance(part, np.ndarray) for part in words) else jnp


def keys_of(ids: Any) -> Keys:
    """What :func:`check_keys` has let pass, as Keys."""
    return ids if isinstance(ids, Keys) else Keys(_words(ids))


def check_keys(call: str, argument: str, ids: Any, namespace: Any = None) -> Any:
    """What a caller gave as keys, where it is Keys, or an array of which those can be made.

    Of a table that several of a collection share, whose `namespace` says so, only Keys.

    NumPy's 64-bit integers are taken where JAX, with x64 off, would not cut them: an id is the same
    key whether it comes as such, or through a ``jax.jit`` that has made 32 bits of it.
    """
    if isinstance(ids, Keys):
        check_not_donated(call, argument, ids.words)
        _check_words(call, argument, ids.words)
        words = replicated(ids.words)
        return ids if words is ids.words else Keys(words)
    check_unmasked(f"{call}: {argument}", ids)
    check_not_donated(call, argument, ids)
    check_whose(call, argument, ids, namespace)
    if isinstance(ids, (jax.Array, np.ndarray, np.generic)):
        return _check_array(call, argument, replicated(ids))
    kind = type(ids).__name__
    remedy = "Make keys on the host with jax_hkv.Keys.from_numpy(ids)."
    if kind in ("list", "tuple"):
        remedy += " Bags are jax_hkv.Jagged.from_lists(ids) or from_lengths(values, lengths)."
    if kind == "Jagged":
        remedy = (
            "Bags of ids are for find_pooled, find_or_insert_pooled and the layers Embed, EmbedBag "
            "and EmbedCollection. Others take their ids, bags.ids, with valid=bags.valid."
        )
    elif kind == "Padded":
        remedy = "Give what is in it apart: padded.ids, and valid=padded.valid."
    raise TypeError(
        f"{call}: {argument} must be jax_hkv.Keys or an integer array, got {kind}. {remedy}"
    )


def check_whose(call: str, argument: str, ids: Any, namespace: Any) -> None:
    """Raises for ids that do not say whose they are, of a table that several share."""
    if namespace is not None and not isinstance(ids, Keys):
        raise TypeError(
            f"{call}: {argument} must be jax_hkv.Keys, of group.keys(name, ids), since keys of the "
            f"table, of {list(namespace.tables)}, say whose they are, got {type(ids).__name__}, "
            "which does not (nor do Keys of ids alone, as Jagged.from_lists and from_lengths make "
            "them: give group.keys(name, bags))"
        )


def would_cut(leaf: Any) -> bool:
    """Whether NumPy integers do not fit in the 32 bits that JAX, with x64 off, would leave them."""
    if not isinstance(leaf, (np.ndarray, np.generic)) or leaf.dtype.kind not in "iu":
        return False
    kept = jax.dtypes.canonicalize_dtype(leaf.dtype)
    if kept == leaf.dtype or not leaf.size:
        return False
    bounds = np.iinfo(kept)
    return bool(leaf.min() < bounds.min or leaf.max() > bounds.max)


def form_of(value: Any) -> str:
    """What came, for errors: an array's type and shape, the type of anything else."""
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    return type(value).__name__ if dtype is None or shape is None else f"{dtype}{list(shape)}"


def _is_integer(value: Any) -> bool:
    """Whether it is one of Python's or NumPy's, and no flag."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _check_words(call: str, argument: str, words: Any) -> None:
    shape = getattr(words, "shape", ())
    if getattr(words, "dtype", None) != np.uint32 or shape[-1:] != (2,):
        raise TypeError(
            f"{call}: {argument}.words must be uint32[..., 2], got {form_of(words)}. Make keys "
            "with jax_hkv.Keys.from_numpy(ids); in_axes of a vmap or scan count from the front, "
            "since the last axis is that of the two words."
        )


def _check_fit(call: str, arguments: str, *shapes: tuple[int, ...]) -> None:
    """Raises unless arrays of these shapes can be broadcast against each other."""
    try:
        jnp.broadcast_shapes(*shapes)
    except ValueError:
        raise ValueError(
            f"{call}: {arguments} must have shapes that fit each other, got "
            f"{', '.join(str(list(shape)) for shape in shapes)}: reshape or broadcast them"
        ) from None


def _check_array(call: str, argument: str, ids: Any) -> Any:
    wide = ids.dtype in (np.dtype(np.int64), np.dtype(np.uint64))
    if wide and isinstance(ids, (np.ndarray, np.generic)):
        if would_cut(ids):
            raise TypeError(
                f"{call}: {argument} is a NumPy {ids.dtype} array of numbers from {ids.min()} to "
                f"{ids.max()}, which JAX, with x64 off, would cut to 32 bits wherever it takes "
                "them. Use jax_hkv.Keys.from_numpy(ids)."
            )
        return Keys.from_numpy(ids)
    if ids.dtype not in _INTEGERS:
        remedy = remedy_of(ids)
        if jnp.issubdtype(ids.dtype, np.integer) and not ids.dtype.isnative:
            remedy = "its bytes have another order than here: give jax_hkv.Keys.from_numpy(ids)"
        raise TypeError(
            f"{call}: {argument} must hold integers of 8 to 64 bits, got {ids.dtype}: {remedy}"
        )
    return ids


@functools.partial(jax.jit, inline=True)
def _words(ids: jax.Array) -> UInt32[Array, "*shape 2"]:
    """The words of integers, of which the sign is extended."""
    if ids.dtype.itemsize < 4:
        ids = ids.astype(jnp.int32)  # which holds them all, unsigned ones too
    if ids.dtype.itemsize == 8:
        low = (ids & _LOW_WORD).astype(jnp.uint32)
        high = ((ids >> _WORD_BITS) & _LOW_WORD).astype(jnp.uint32)
    else:
        low = jax.lax.bitcast_convert_type(ids, jnp.uint32)
        is_negative = ids < jnp.zeros((), ids.dtype)
        high = jnp.where(is_negative, jnp.uint32(_LOW_WORD), jnp.uint32(0))
    return jnp.stack([low, high], axis=-1)


def _words_of(call: str, argument: str, number: Any) -> Any:
    if _is_integer(number):
        if not 0 <= number < 2**64:
            raise ValueError(
                f"{call}: {argument} must be an unsigned 64-bit number, 0 to 2**64 - 1, "
                f"got {number}: Keys.from_numpy sign-extends negative ones"
            )
        return np.array([int(number) & _LOW_WORD, int(number) >> _WORD_BITS], np.uint32)
    return as_keys(call, argument, number).words


def _bound(call: str, argument: str, number: Any, beside: Any) -> Any:
    """One number beside Keys, unsigned: checked where known, else at least 0, as scores are.

    Beside one key, as within `jax.vmap`, it is a key itself, as those of arrays are.
    """
    is_array = isinstance(number, (jax.Array, np.ndarray)) and not number.shape
    is_bound = is_array and isinstance(beside, Keys) and bool(beside.shape)
    if not is_bound or getattr(number.dtype, "kind", "") != "i":
        return number
    if is_traced(number):  # what JAX has cut to 32 bits would be as high as numbers are
        return jnp.maximum(number, jnp.zeros((), number.dtype))
    check_not_donated(call, argument, number)
    return np.asarray(number)[()]


def _pair_of(call: str, a: Any, b: Any) -> tuple[Any, Any]:
    """The words of two numbers that are ordered."""
    a, b = _bound(call, "a", a, b), _bound(call, "b", b, a)
    return _words_to_compare(call, a, b)


def _words_to_compare(call: str, a: Any, b: Any) -> tuple[Any, Any]:
    words = _words_of(call, "a", a), _words_of(call, "b", b)
    _check_fit(call, "a and b", *(each.shape[:-1] for each in words))
    return words


def less(a: Any, b: Any) -> Bool[Array, "*shape"]:
    """Whether a < b, as unsigned 64-bit numbers, elementwise.

    Args:
      a: Keys, an int from 0 to 2**64 - 1, or an integer array, which is taken as keys are. One
        number beside several Keys is unsigned: as an argument of ``jax.jit`` it is given as
        ``Keys.from_numpy(number)``, since JAX cuts others to 32 bits, and a traced one below 0 is
        taken as 0.
      b: the same.

    Raises:
      TypeError, ValueError: naming the argument.

    Example:
      >>> import numpy as np
      >>> less(Keys.from_numpy(np.array([3, 2**40])), 2**33).tolist()
      [True, False]
    """
    return _is_less(*_pair_of("less", a, b))


def less_equal(a: Any, b: Any) -> Bool[Array, "*shape"]:
    """Whether a <= b, elementwise; see :func:`less`.

    Example:
      >>> less_equal(np.array([3, -1], np.int32), 3).tolist()  # keys are unsigned
      [True, False]
    """
    return _is_less(*_pair_of("less_equal", a, b), or_equal=True)


def equal(a: Any, b: Any) -> Bool[Array, "*shape"]:
    """Whether a == b, elementwise; see :func:`less`.

    Example:
      >>> equal(np.array([3, -1], np.int32), 2**64 - 1).tolist()
      [False, True]
    """
    return _is_equal(*_words_to_compare("equal", a, b))


@functools.partial(jax.jit, inline=True)
def _is_equal(a: Any, b: Any) -> Bool[Array, "*shape"]:
    return (a[..., 0] == b[..., 0]) & (a[..., 1] == b[..., 1])


@functools.partial(jax.jit, static_argnames="or_equal", inline=True)
def _is_less(a: Any, b: Any, or_equal: bool = False) -> Bool[Array, "*shape"]:
    is_low = a[..., 0] <= b[..., 0] if or_equal else a[..., 0] < b[..., 0]
    return (a[..., 1] < b[..., 1]) | ((a[..., 1] == b[..., 1]) & is_low)
