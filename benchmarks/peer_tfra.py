"""Times the CPU table of TensorFlow Recommenders-Addons; table_cpu.py runs it.

Its TensorFlow and today's JAX want different versions of NumPy: it needs an environment of its own.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np
import tensorflow as tf  # pyright: ignore[reportMissingImports]
import tensorflow_recommenders_addons as tfra  # pyright: ignore[reportMissingImports]

WARM_UPS, RUNS = 3, 5


def seconds(run, prepare=lambda: None):
    """As measure.seconds."""
    times = []
    for number in range(WARM_UPS + RUNS):
        prepared = prepare()
        start = time.perf_counter()
        run(prepared)
        if number >= WARM_UPS:
            times.append(time.perf_counter() - start)
    return times


def main() -> None:
    """Arguments: keys, dim."""
    count, dim = int(sys.argv[1]), int(sys.argv[2])
    rng = np.random.default_rng(0)
    ids = tf.constant(rng.permutation(count).astype(np.int64))
    rows = tf.constant(rng.standard_normal((count, dim), np.float32))
    made = iter(range(1000))

    def new_variable():
        return tfra.dynamic_embedding.get_variable(
            f"peer_{next(made)}", tf.int64, tf.float32, dim=dim, init_size=2 * count
        )

    times = {"insert": seconds(lambda variable: variable.upsert(ids, rows), new_variable)}
    full = new_variable()
    full.upsert(ids, rows)
    times["update"] = seconds(lambda _: full.upsert(ids, rows))
    times["lookup"] = seconds(lambda _: full.lookup(ids))
    np.testing.assert_array_equal(full.lookup(ids[:1000]), rows[:1000])
    versions = {"tensorflow": tf.__version__, "tfra": tfra.__version__}
    print(json.dumps({"seconds": times, "versions": versions}))


if __name__ == "__main__":
    main()
