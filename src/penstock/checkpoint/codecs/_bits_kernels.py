"""What a loop over bits needs of the processor and numba does not offer: words at any byte, leading zeros.

Words are at addresses, not in arrays: numba counts the references to an array that goes through a small function,
ten times what the function takes. None of these checks an address: whoever calls them does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.cgutils import get_or_insert_function
from numba.extending import intrinsic

_WORD = ir.IntType(64)


def _load(number: Any) -> Any:
    def load(typing: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            bits = ir.IntType(number.bitwidth)
            part = builder.load(builder.inttoptr(arguments[0], bits.as_pointer()))
            part.align = 1
            return builder.zext(part, _WORD) if number.bitwidth < 64 else part

        return types.uint64(types.uint64), generate

    return intrinsic(load)


def _store_word(typing: Any, address: Any, word: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store(arguments[1], builder.inttoptr(arguments[0], _WORD.as_pointer())).align = 1
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64), generate


def _prefetch(typing: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        function = get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")  # type: ignore[no-untyped-call]
        # To read, soon and often, as data.
        how = [ir.Constant(number, constant) for constant in (0, 3, 1)]
        builder.call(function, [builder.inttoptr(arguments[0], byte), *how])
        return context.get_dummy_value()

    return types.void(types.uint64), generate


def _leading_zeros(typing: Any, word: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctlz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return word(word), generate


def _item_bytes(typing: Any, array: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return context.get_constant(types.int64, array.dtype.bitwidth // 8)

    return types.int64(array), generate


def _left(typing: Any, word: Any, places: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.shl(*arguments)

    return word(word, word), generate


def _right(typing: Any, word: Any, places: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.lshr(*arguments)

    return word(word, word), generate


#: Return the one, two, four or eight bytes at an address, little-endian.
load_byte = cast(Callable[[np.uint64], np.uint64], _load(types.uint8))
load_short = cast(Callable[[np.uint64], np.uint64], _load(types.uint16))
load_half = cast(Callable[[np.uint64], np.uint64], _load(types.uint32))
load_word = cast(Callable[[np.uint64], np.uint64], _load(types.uint64))
#: Write a word to the eight bytes at an address, little-endian.
store_word = cast(Callable[[np.uint64, np.uint64], None], intrinsic(_store_word))
#: Begin to load the cache line at an address, which may be any.
prefetch = cast(Callable[[np.uint64], None], intrinsic(_prefetch))
#: Return how many of the highest bits are 0, in the argument's own unsigned type. The argument is not 0.
leading_zeros = cast(Callable[[Any], Any], intrinsic(_leading_zeros))
#: Return how many bytes an array's item has, which its type says: a branch on it is none in the compiled loop.
item_bytes = cast(Callable[[Any], int], intrinsic(_item_bytes))
#: Shift an unsigned word by less than its bits, within its own type. numba's shifts are of 64 bits, and a loop over
#: words of 32 bits then goes at half the speed.
left = cast(Callable[[Any, Any], Any], intrinsic(_left))
right = cast(Callable[[Any, Any], Any], intrinsic(_right))
