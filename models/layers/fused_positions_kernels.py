"""Kernels of sine position encoding plus level embedding, of all levels at once, and of the embedding's gradient.

B images of S pixels of C channels, levels one after the other. Angles are counted in full turns, of which whole ones
are dropped exactly. A program of `turns_kernel` takes the columns or the rows of a strip of one level of an image;
of the others, a tile of at most TILE_R pixels of one level of an image, or, in the last one, tiles' sums. Arithmetic is
float32, nothing is atomic.
"""

# mypy: disallow-untyped-defs=False

import triton
import triton.language as tl


@triton.jit
def load_padding(padding, lines, along, num_lines, length, line_stride, step):
    """Returns which pixels of some lines are padding, as what lies outside is: int32 [lines, along], 0 or 1."""
    mask = (lines < num_lines)[:, None] & (along < length)[None, :]
    places = lines[:, None] * line_stride + along[None, :] * step
    return (tl.load(padding + places, mask=mask, other=1) != 0).to(tl.int32)


@triton.jit
def write_turns(
    padding,
    turns,
    first_line,
    num_lines,
    length,
    line_stride,
    step,
    offset,
    eps,
    LINES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes (count + offset) / (total + eps) of each pixel, both of the unpadded pixels of its line."""
    lines = first_line + tl.arange(0, LINES)
    total = tl.zeros([LINES], dtype=tl.int32)
    for start in range(0, length, BLOCK):
        along = start + tl.arange(0, BLOCK)
        total += tl.sum(1 - load_padding(padding, lines, along, num_lines, length, line_stride, step), axis=1)
    divisor = total.to(tl.float32) + eps
    passed = tl.zeros([LINES], dtype=tl.int32)
    for start in range(0, length, BLOCK):
        along = start + tl.arange(0, BLOCK)
        valid = 1 - load_padding(padding, lines, along, num_lines, length, line_stride, step)
        count = (tl.cumsum(valid, axis=1) + passed[:, None]).to(tl.float32)
        passed += tl.sum(valid, axis=1)
        mask = (lines < num_lines)[:, None] & (along < length)[None, :]
        places = lines[:, None] * line_stride + along[None, :] * step
        tl.store(turns + places, tl.div_rn(count + offset, divisor[:, None]), mask=mask)


@triton.jit(do_not_specialize=["batch_size", "num_pixels"])
def turns_kernel(
    padding,
    turns,
    spatial_shapes,
    level_start_index,
    offset,
    eps,
    batch_size,
    num_pixels,
    NUM_LEVELS: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes a strip of the turns of rows, first half of [2, B, S], or columns: a line is a column, then, or a row."""
    half = tl.program_id(0) % 2
    level = tl.program_id(0) // 2 % NUM_LEVELS
    image = tl.program_id(0) // (2 * NUM_LEVELS) % batch_size
    first_line = tl.program_id(0) // (2 * NUM_LEVELS) // batch_size * LINES
    height = tl.load(spatial_shapes + 2 * level).to(tl.int32)
    width = tl.load(spatial_shapes + 2 * level + 1).to(tl.int32)
    first_pixel = tl.load(level_start_index + level)
    padding += image.to(tl.int64) * num_pixels + first_pixel
    turns += (half * batch_size + image).to(tl.int64) * num_pixels + first_pixel
    if half == 0:
        if first_line < width:
            write_turns(padding, turns, first_line, width, height, 1, width, offset, eps, LINES, BLOCK)
    else:
        if first_line < height:
            write_turns(padding, turns, first_line, height, width, width, 1, offset, eps, LINES, BLOCK)


@triton.jit
def find_tile(tile, spatial_shapes, TILE_R: tl.constexpr, NUM_LEVELS: tl.constexpr):
    """Returns the level of a tile, its first pixel, and the pixel after its last one."""
    level, begin, end = 0, 0, 0
    first_tile, first_pixel = 0, 0
    for each in tl.static_range(NUM_LEVELS):
        size = (tl.load(spatial_shapes + 2 * each) * tl.load(spatial_shapes + 2 * each + 1)).to(tl.int32)
        num_tiles = tl.cdiv(size, TILE_R)
        here = (tile >= first_tile) & (tile < first_tile + num_tiles)
        start = first_pixel + (tile - first_tile) * TILE_R
        level = tl.where(here, each, level)
        begin = tl.where(here, start, begin)
        end = tl.where(here, tl.minimum(start + TILE_R, first_pixel + size), end)
        first_tile += num_tiles
        first_pixel += size
    return level, begin, end


@triton.jit
def quarter_sine(turns):
    """Returns sin(2 pi turns) of -0.25..0.25: turns times a minimax polynomial in turns^2, relative error 5e-9."""
    square = turns * turns
    result = 39.710918036888178 * square - 76.574992171787987
    result = result * square + 81.602231242559875
    result = result * square - 41.341677478395813
    return (result * square + 6.2831852737908231) * turns


@triton.jit
def sine_and_cosine(turns):
    """Returns both of 2 pi turns, which quarters of a turn mirror.

    Triton's own are libdevice's, no more exact here, with a branch to local memory for large angles.
    """
    rest = turns - tl.floor(turns + 0.5)
    size = tl.abs(rest)
    sine = quarter_sine(tl.minimum(size, 0.5 - size))
    return tl.where(rest < 0.0, -sine, sine), quarter_sine(0.25 - size)


@triton.jit(do_not_specialize=["batch_size", "num_pixels"])
def encode_kernel(
    turns,
    frequencies,
    level_embed,
    output,
    spatial_shapes,
    batch_size,
    num_pixels,
    num_channels,
    NUM_LEVELS: tl.constexpr,
    TILE_R: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Writes the row channels or the column channels of a tile, pairs of a sine and a cosine."""
    half = tl.program_id(0) % 2
    image = tl.program_id(0) // 2 % batch_size
    level, begin, end = find_tile(tl.program_id(0) // 2 // batch_size, spatial_shapes, TILE_R, NUM_LEVELS)
    num_pairs = num_channels // 4
    pairs = tl.arange(0, BLOCK_P)
    frequency = tl.load(frequencies + pairs, mask=pairs < num_pairs, other=0.0)
    columns = tl.arange(0, 2 * BLOCK_P)
    inside = columns < 2 * num_pairs
    first_channel = half * 2 * num_pairs
    embed = tl.load(level_embed + level * num_channels + first_channel + columns, mask=inside, other=0.0)
    turns += (half * batch_size + image).to(tl.int64) * num_pixels
    output += image.to(tl.int64) * num_pixels * num_channels + first_channel
    for start in range(begin, end, BLOCK_R):
        pixels = start + tl.arange(0, BLOCK_R)
        turn = tl.load(turns + pixels, mask=pixels < end, other=0.0)
        sine, cosine = sine_and_cosine(turn[:, None] * frequency[None, :])
        result = tl.interleave(sine, cosine) + embed.to(tl.float32)[None, :]
        places = pixels[:, None] * num_channels + columns[None, :]
        mask = (pixels < end)[:, None] & inside[None, :]
        tl.store(output + places, result.to(output.dtype.element_ty), mask=mask)


@triton.jit
def sum_block(rows, begin, end, columns, num_columns, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Returns the sums of some columns over rows begin to end, in a fixed order: float32 [BLOCK_C]."""
    total = tl.zeros([BLOCK_R, BLOCK_C], dtype=tl.float32)
    for start in range(begin, end, BLOCK_R):
        places = start + tl.arange(0, BLOCK_R)
        mask = (places < end)[:, None] & (columns < num_columns)[None, :]
        total += tl.load(rows + places[:, None] * num_columns + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    return tl.sum(total, axis=0)


@triton.jit(do_not_specialize=["batch_size", "num_pixels"])
def sum_tiles_kernel(
    gradient,
    sums,
    spatial_shapes,
    batch_size,
    num_pixels,
    num_channels,
    NUM_LEVELS: tl.constexpr,
    TILE_R: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Writes the sums of some channels of a tile, a row of [tiles * B, C]."""
    tiles_of_row = tl.cdiv(num_channels, BLOCK_C)
    row = tl.program_id(0) // tiles_of_row
    columns = tl.program_id(0) % tiles_of_row * BLOCK_C + tl.arange(0, BLOCK_C)
    _, begin, end = find_tile(row // batch_size, spatial_shapes, TILE_R, NUM_LEVELS)
    gradient += (row % batch_size).to(tl.int64) * num_pixels * num_channels
    total = sum_block(gradient, begin, end, columns, num_channels, BLOCK_R, BLOCK_C)
    tl.store(sums + row.to(tl.int64) * num_channels + columns, total, mask=columns < num_channels)


@triton.jit(do_not_specialize=["batch_size"])
def sum_levels_kernel(
    sums,
    grad_level_embed,
    spatial_shapes,
    batch_size,
    num_channels,
    NUM_LEVELS: tl.constexpr,
    TILE_R: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Adds up what `sum_tiles_kernel` has written for some channels of a level."""
    tiles_of_row = tl.cdiv(num_channels, BLOCK_C)
    level = tl.program_id(0) // tiles_of_row
    columns = tl.program_id(0) % tiles_of_row * BLOCK_C + tl.arange(0, BLOCK_C)
    begin, end = 0, 0
    for each in tl.static_range(NUM_LEVELS):
        size = (tl.load(spatial_shapes + 2 * each) * tl.load(spatial_shapes + 2 * each + 1)).to(tl.int32)
        num_rows = tl.cdiv(size, TILE_R) * batch_size
        begin += tl.where(each < level, num_rows, 0)
        end += tl.where(each <= level, num_rows, 0)
    total = sum_block(sums, begin, end, columns, num_channels, BLOCK_R, BLOCK_C)
    places = grad_level_embed + level * num_channels + columns
    tl.store(places, total.to(grad_level_embed.dtype.element_ty), mask=columns < num_channels)
