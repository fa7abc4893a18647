"""Matrix products of float32 accuracy on tensor cores, never TensorFloat-32.

A float32 is the exact sum of three numbers of eight bits, which bfloat16 holds; products of these are exact in float32.
"""

# mypy: allow-untyped-defs

import triton
import triton.language as tl


@triton.jit
def _leading(x):
    """Truncate float32 numbers to their first eight significant bits."""
    return (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _parts(x):
    """Split float32 numbers into their first, middle and last eight significant bits in bfloat16."""
    high = _leading(x)
    middle = _leading(x - high)
    return high.to(tl.bfloat16), middle.to(tl.bfloat16), (x - high - middle).to(tl.bfloat16)


@triton.jit
def multiply(a, b):
    """Compute a b for float32 tiles as six of nine partial products; the other three are below float32's last bit."""
    a_high, a_middle, a_low = _parts(a)
    b_high, b_middle, b_low = _parts(b)
    product = tl.dot(a_high, b_low)  # smallest first
    product = tl.dot(a_low, b_high, product)
    product = tl.dot(a_middle, b_middle, product)
    product = tl.dot(a_high, b_middle, product)
    product = tl.dot(a_middle, b_high, product)
    return tl.dot(a_high, b_high, product)


@triton.jit
def multiply_vectors(x, matrix):
    """Compute x M for vectors of float32 or of 16 bits, and a float32 matrix with entries of at most about 1.

    Two 16-bit parts of a float32 leave an error far below the rounding of a 16-bit result.
    """
    if x.dtype == tl.float32:
        return multiply(x, matrix)
    else:
        high = matrix.to(x.dtype)
        low = (matrix - high.to(tl.float32)).to(x.dtype)
        return tl.dot(x, high, tl.dot(x, low))


@triton.jit
def outer_products(y, x):
    """Compute y^T x for rows of vectors of one dtype, summed in float32."""
    if x.dtype == tl.float32:
        return multiply(tl.trans(y), x)
    else:
        return tl.dot(tl.trans(y), x)
