"""Kernels of GroupNorm, forward and backward.

B images of R rows (pixels) of C channels, a row's channels side by side, in G groups of neighbouring channels. A
program takes one of the chunks of an image's rows, in a tile of BLOCK_G groups of up to BLOCK_C channels, BLOCK_R rows
at a time, of which it asks for the next ones while it computes. Arithmetic is float32, nothing is atomic: what programs
sum up they leave as one partial result a chunk, which every reader combines anew.
"""

# mypy: disallow-untyped-defs=False

import triton
import triton.language as tl


@triton.jit
def place_program(program, num_groups, num_chunks, BLOCK_G: tl.constexpr):
    """Returns a program's chunk, counted over all images; its image (int64), and its chunk and tile there.

    Tiles that lie side by side in a row follow each other.
    """
    num_tiles = tl.cdiv(num_groups, BLOCK_G)
    part = program // num_tiles
    return part, (part // num_chunks).to(tl.int64), part % num_chunks, program % num_tiles


@triton.jit
def place_channels(
    tile, num_channels, num_groups, GROUP_CHANNELS: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_C: tl.constexpr
):
    """Returns the channels of a tile and which exist, [BLOCK_G * BLOCK_C]; and the same of its groups, [BLOCK_G]."""
    groups = tile * BLOCK_G + tl.arange(0, BLOCK_G)
    lanes = tl.arange(0, BLOCK_G * BLOCK_C)
    if GROUP_CHANNELS == BLOCK_C:
        columns = tile * (BLOCK_G * BLOCK_C) + lanes
        inside = columns < num_channels
    else:
        columns = (tile * BLOCK_G + lanes // BLOCK_C) * GROUP_CHANNELS + lanes % BLOCK_C
        inside = (columns < num_channels) & (lanes % BLOCK_C < GROUP_CHANNELS)
    return columns, inside, groups, groups < num_groups


@triton.jit
def place_rows(start, end, columns, inside, num_channels, BLOCK_R: tl.constexpr):
    """Returns the elements of BLOCK_R rows of an image, counted from its first one, and which exist before `end`."""
    rows = start + tl.arange(0, BLOCK_R)
    return rows[:, None] * num_channels + columns[None, :], (rows < end)[:, None] & inside[None, :]


@triton.jit
def load_rows(image, start, end, columns, inside, num_channels, BLOCK_R: tl.constexpr):
    """Returns BLOCK_R rows of an image in their dtype, zeros from `end` on."""
    places, mask = place_rows(start, end, columns, inside, num_channels, BLOCK_R)
    return tl.load(image + places, mask=mask, other=0.0)


@triton.jit
def sum_groups(channels, BLOCK_G: tl.constexpr, BLOCK_C: tl.constexpr):
    """Sums over the channels of each group, [BLOCK_G * BLOCK_C] -> [BLOCK_G]."""
    return tl.sum(tl.reshape(channels, [BLOCK_G, BLOCK_C]), axis=1)


@triton.jit
def spread(groups, BLOCK_G: tl.constexpr, BLOCK_C: tl.constexpr):
    """Returns for each channel the number of its group, [BLOCK_G] -> [BLOCK_G * BLOCK_C]."""
    return tl.reshape(tl.broadcast_to(groups[:, None], [BLOCK_G, BLOCK_C]), [BLOCK_G * BLOCK_C])


@triton.jit
def load_partials(partials, image, groups, existing, stride, num_groups, num_chunks, MAX_CHUNKS: tl.constexpr):
    """Returns both partial results of an image's chunks, zeros behind the last, two [MAX_CHUNKS, BLOCK_G]."""
    chunks = tl.arange(0, MAX_CHUNKS)
    mask = (chunks < num_chunks)[:, None] & existing[None, :]
    places = partials + (image * num_chunks + chunks)[:, None] * (2 * stride) + groups[None, :]
    return tl.load(places, mask=mask, other=0.0), tl.load(places + stride, mask=mask, other=0.0)


@triton.jit(do_not_specialize=["num_rows", "num_chunks", "rows_of_chunk"])
def statistics_kernel(
    x,
    partials,
    num_rows,
    num_channels,
    num_groups,
    num_chunks,
    rows_of_chunk,
    GROUP_CHANNELS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Writes mean and summed squares of the deviations from it, of each group in each chunk, [B, chunks, 2, G].

    Every element of a block of rows follows mean and squares of its own down the chunk (Welford, Technometrics 4, 419,
    1962), so that a mean far from zero costs no digits; they are combined at the end (Chan, Golub and LeVeque, 1979).
    """
    part, image, chunk, tile = place_program(tl.program_id(0), num_groups, num_chunks, BLOCK_G)
    columns, inside, groups, existing = place_channels(tile, num_channels, num_groups, GROUP_CHANNELS, BLOCK_G, BLOCK_C)
    first, x = chunk * rows_of_chunk, x + image * num_rows * num_channels
    end = tl.minimum(first + rows_of_chunk, num_rows)
    mean = tl.zeros([BLOCK_R, BLOCK_G * BLOCK_C], dtype=tl.float32)
    squares = tl.zeros([BLOCK_R, BLOCK_G * BLOCK_C], dtype=tl.float32)
    ahead = load_rows(x, first, end, columns, inside, num_channels, BLOCK_R)
    for start in range(first, end, BLOCK_R):
        current = ahead.to(tl.float32)
        ahead = load_rows(x, start + BLOCK_R, end, columns, inside, num_channels, BLOCK_R)
        present = (start + tl.arange(0, BLOCK_R) < end)[:, None]
        deviation = tl.where(present, current - mean, 0.0)
        share = BLOCK_R / (start - first + BLOCK_R)
        mean += share * deviation
        squares += (1.0 - share) * deviation * deviation
    counts = ((end - first - tl.arange(0, BLOCK_R) + BLOCK_R - 1) // BLOCK_R).to(tl.float32)[:, None]
    total = (end - first) * GROUP_CHANNELS
    group_mean = sum_groups(tl.sum(counts * mean, axis=0), BLOCK_G, BLOCK_C) / total
    centred = tl.where(inside[None, :], mean - spread(group_mean, BLOCK_G, BLOCK_C)[None, :], 0.0)
    group_squares = sum_groups(tl.sum(squares + counts * centred * centred, axis=0), BLOCK_G, BLOCK_C)
    partials += part * (2 * num_groups) + groups
    tl.store(partials, group_mean, mask=existing)
    tl.store(partials + num_groups, group_squares, mask=existing)


@triton.jit(do_not_specialize=["num_rows", "num_chunks", "rows_of_chunk"])
def output_kernel(
    x,
    partials,
    weight,
    bias,
    output,
    mean,
    inverse_deviation,
    eps,
    num_rows,
    num_channels,
    num_groups,
    num_chunks,
    rows_of_chunk,
    GROUP_CHANNELS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_C: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
):
    """Writes a chunk of the output; programs of the first chunk also mean and inverse deviation, [B, G]."""
    _, image, chunk, tile = place_program(tl.program_id(0), num_groups, num_chunks, BLOCK_G)
    columns, inside, groups, existing = place_channels(tile, num_channels, num_groups, GROUP_CHANNELS, BLOCK_G, BLOCK_C)
    first, offset = chunk * rows_of_chunk, image * num_rows * num_channels
    end = tl.minimum(first + rows_of_chunk, num_rows)
    ahead = load_rows(x + offset, first, end, columns, inside, num_channels, BLOCK_R)
    means, squares = load_partials(partials, image, groups, existing, num_groups, num_groups, num_chunks, MAX_CHUNKS)
    rows = tl.minimum(num_rows - tl.arange(0, MAX_CHUNKS) * rows_of_chunk, rows_of_chunk)
    counts = (tl.maximum(rows, 0) * GROUP_CHANNELS).to(tl.float32)[:, None]
    total = num_rows * GROUP_CHANNELS
    group_mean = tl.sum(counts * means, axis=0) / total
    centred = means - group_mean[None, :]
    variance = tl.sum(squares + counts * centred * centred, axis=0) / total
    group_inverse = 1.0 / tl.sqrt(variance + eps)
    if chunk == 0:
        tl.store(mean + image * num_groups + groups, group_mean, mask=existing)
        tl.store(inverse_deviation + image * num_groups + groups, group_inverse, mask=existing)
    centre = spread(group_mean, BLOCK_G, BLOCK_C)
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32) * spread(group_inverse, BLOCK_G, BLOCK_C)
    shift = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    for start in range(first, end, BLOCK_R):
        current = ahead.to(tl.float32)
        ahead = load_rows(x + offset, start + BLOCK_R, end, columns, inside, num_channels, BLOCK_R)
        result = (current - centre[None, :]) * scale[None, :] + shift[None, :]
        places, mask = place_rows(start, end, columns, inside, num_channels, BLOCK_R)
        tl.store(output + offset + places, result.to(output.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "num_chunks", "rows_of_chunk"])
def sums_kernel(
    x,
    grad_output,
    grad_stride,
    weight,
    mean,
    inverse_deviation,
    sums,
    num_rows,
    num_channels,
    num_groups,
    num_chunks,
    rows_of_chunk,
    GROUP_CHANNELS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Writes a chunk's sums of grad_output x and of grad_output, x normalised here, [B, chunks, 2, C + G].

    Those of the channels are for weight and bias. Those of the groups, whose channels count by their weights, are for
    the gradient of x. `grad_stride` elements lie between the images of grad_output.
    """
    part, image, chunk, tile = place_program(tl.program_id(0), num_groups, num_chunks, BLOCK_G)
    columns, inside, groups, existing = place_channels(tile, num_channels, num_groups, GROUP_CHANNELS, BLOCK_G, BLOCK_C)
    first, x, grad_output = (
        chunk * rows_of_chunk,
        x + image * num_rows * num_channels,
        grad_output + image * grad_stride,
    )
    end = tl.minimum(first + rows_of_chunk, num_rows)
    product = tl.zeros([BLOCK_R, BLOCK_G * BLOCK_C], dtype=tl.float32)
    plain = tl.zeros([BLOCK_R, BLOCK_G * BLOCK_C], dtype=tl.float32)
    ahead = load_rows(x, first, end, columns, inside, num_channels, BLOCK_R)
    grad_ahead = load_rows(grad_output, first, end, columns, inside, num_channels, BLOCK_R)
    group_mean = tl.load(mean + image * num_groups + groups, mask=existing, other=0.0)
    group_inverse = tl.load(inverse_deviation + image * num_groups + groups, mask=existing, other=0.0)
    factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    centre = spread(group_mean, BLOCK_G, BLOCK_C)
    for start in range(first, end, BLOCK_R):
        current, gradient = ahead.to(tl.float32), grad_ahead.to(tl.float32)
        ahead = load_rows(x, start + BLOCK_R, end, columns, inside, num_channels, BLOCK_R)
        grad_ahead = load_rows(grad_output, start + BLOCK_R, end, columns, inside, num_channels, BLOCK_R)
        product += gradient * (current - centre[None, :])
        plain += gradient
    products = tl.sum(product, axis=0) * spread(group_inverse, BLOCK_G, BLOCK_C)
    plains = tl.sum(plain, axis=0)
    width = num_channels + num_groups
    sums += part * (2 * width)
    tl.store(sums + columns, products, mask=inside)
    tl.store(sums + width + columns, plains, mask=inside)
    sums += num_channels + groups
    tl.store(sums, sum_groups(products * factor, BLOCK_G, BLOCK_C), mask=existing)
    tl.store(sums + width, sum_groups(plains * factor, BLOCK_G, BLOCK_C), mask=existing)


@triton.jit(do_not_specialize=["num_rows", "num_chunks", "rows_of_chunk", "num_sums"])
def gradient_kernel(
    x,
    grad_output,
    grad_stride,
    weight,
    mean,
    inverse_deviation,
    sums,
    grad_x,
    grad_parameters,
    num_sums,
    num_rows,
    num_channels,
    num_groups,
    num_chunks,
    rows_of_chunk,
    GROUP_CHANNELS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_C: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
):
    """Writes the gradient of weight or bias in a tile, [2, C], by the first two programs of it; then a chunk of grad_x.

    With x normalised, g = weight * grad_output and r the inverse deviation: grad_x = r (g - mean(g) - x mean(g x)), the
    means those of a group.
    """
    num_tiles = tl.cdiv(num_groups, BLOCK_G)
    width = num_channels + num_groups
    if tl.program_id(0) < 2 * num_tiles:
        columns, inside, groups, existing = place_channels(
            tl.program_id(0) % num_tiles, num_channels, num_groups, GROUP_CHANNELS, BLOCK_G, BLOCK_C
        )
        half = tl.program_id(0) // num_tiles
        total = tl.zeros([4 * BLOCK_R, BLOCK_G * BLOCK_C], dtype=tl.float32)
        for start in range(0, num_sums, 4 * BLOCK_R):
            total += load_rows(sums + half * width, start, num_sums, columns, inside, 2 * width, 4 * BLOCK_R)
        target = grad_parameters + half * num_channels + columns
        tl.store(target, tl.sum(total, axis=0).to(grad_parameters.dtype.element_ty), mask=inside)
    else:
        _, image, chunk, tile = place_program(tl.program_id(0) - 2 * num_tiles, num_groups, num_chunks, BLOCK_G)
        columns, inside, groups, existing = place_channels(
            tile, num_channels, num_groups, GROUP_CHANNELS, BLOCK_G, BLOCK_C
        )
        first, offset = chunk * rows_of_chunk, image * num_rows * num_channels
        end = tl.minimum(first + rows_of_chunk, num_rows)
        grad_output += image * grad_stride
        ahead = load_rows(x + offset, first, end, columns, inside, num_channels, BLOCK_R)
        grad_ahead = load_rows(grad_output, first, end, columns, inside, num_channels, BLOCK_R)
        products, plains = load_partials(
            sums + num_channels, image, groups, existing, width, num_groups, num_chunks, MAX_CHUNKS
        )
        group_mean = tl.load(mean + image * num_groups + groups, mask=existing, other=0.0)
        group_inverse = tl.load(inverse_deviation + image * num_groups + groups, mask=existing, other=0.0)
        factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
        count = num_rows * GROUP_CHANNELS
        slope = tl.sum(products, axis=0) / count * group_inverse * group_inverse
        constant = tl.sum(plains, axis=0) / count * group_inverse
        scale = factor * spread(group_inverse, BLOCK_G, BLOCK_C)
        centre, slope = spread(group_mean, BLOCK_G, BLOCK_C), spread(slope, BLOCK_G, BLOCK_C)
        constant = spread(constant, BLOCK_G, BLOCK_C)
        for start in range(first, end, BLOCK_R):
            current, gradient = ahead.to(tl.float32), grad_ahead.to(tl.float32)
            ahead = load_rows(x + offset, start + BLOCK_R, end, columns, inside, num_channels, BLOCK_R)
            grad_ahead = load_rows(grad_output, start + BLOCK_R, end, columns, inside, num_channels, BLOCK_R)
            result = gradient * scale[None, :] - (current - centre[None, :]) * slope[None, :] - constant[None, :]
            places, mask = place_rows(start, end, columns, inside, num_channels, BLOCK_R)
            tl.store(grad_x + offset + places, result.to(grad_x.dtype.element_ty), mask=mask)
