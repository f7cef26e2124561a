"""The fast path for Hopper GPUs (compute capability 9.0): one lane a sample, and a gradient of value by tensor cores.

`supports` tells whether a call can take it; `forward`, `fused_forward`, `backward`, `fused_backward` run it, on plain
tensors and without autograd. What it does not take, the kernels of `msda_op.triton` do.

Reading order: `primitives`, `samples`, `buckets`, `forward`, `dots`, `backward`, `reduce`, `reduce_float32`,
`deterministic`, `call`, `launch`, `op`.

Limits, where the arithmetic differs from the kernels for every shape:

- With value in half precision, attention weights travel as float16 in the forward and in records. Weights above 65504
  become infinite; weights below 6e-5 lose digits and below 3e-8 vanish. A softmax reaches only the second, where the
  sum in a half does not notice. Records hold a place to 1/2048 pixel, and the reduction multiplies weights rounded to
  the dtype of value. It sums in float32, and the gradient of value is rounded once, at the end.
- With value in float32 nothing is rounded to less, and the reduction leaves out 2^-22 of a product; the gradient of
  value has no deterministic order here.
- A pixel of value that is not finite spoils each sample whose 2 x 2 block, clamped into the level, holds it, even where
  its weight is 0 because the sample lies outside: 0 * inf is NaN. Blocks in a level of one column hold the pixel before
  it, too.
- A row of grad_output or an attention weight that is not finite spoils, through records, the whole windows of 4 x 8
  pixels of the tiles that its samples fall into, not only the pixels that they weigh.
- Locations that are NaN or infinite sample nothing, as everywhere.
- Levels must not overlap in value: the tables of buckets are allocated for h * w adding up to at most S.
"""

from msda_op.triton.hopper.op import backward, forward, fused_backward, fused_forward
from msda_op.triton.hopper.support import supports

__all__ = ["backward", "forward", "fused_backward", "fused_forward", "supports"]
