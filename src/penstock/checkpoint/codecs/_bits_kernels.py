"""What a loop over bits needs of the processor and numba does not offer: words at any byte, leading zeros.

None of these checks its offset: whoever calls them does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

_WORD = ir.IntType(64)


def _pointer(context: Any, builder: Any, array_type: Any, array: Any, offset: Any) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [offset]), _WORD.as_pointer())


def _load_word(typing: Any, data: Any, offset: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = builder.load(_pointer(context, builder, signature.args[0], *arguments))
        word.align = 1
        return word

    return types.uint64(data, types.uint64), generate


def _store_word(typing: Any, data: Any, offset: Any, word: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = _pointer(context, builder, signature.args[0], arguments[0], arguments[1])
        builder.store(arguments[2], place).align = 1
        return context.get_dummy_value()

    return types.void(data, types.uint64, types.uint64), generate


def _leading_zeros(typing: Any, word: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctlz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return word(word), generate


#: Return the eight bytes at data[offset:], little-endian. data: uint8[n]; offset: at most n - 8.
load_word = cast(Callable[[NDArray[np.uint8], np.uint64], np.uint64], intrinsic(_load_word))
#: Write a word to data[offset:offset + 8], little-endian.
store_word = cast(Callable[[NDArray[np.uint8], np.uint64, np.uint64], None], intrinsic(_store_word))
#: Return how many of the highest bits are 0, in the argument's own unsigned type. The argument is not 0.
leading_zeros = cast(Callable[[Any], Any], intrinsic(_leading_zeros))
