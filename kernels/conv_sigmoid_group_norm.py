# SPDX-License-Identifier: MIT
"""A convolution, a bias, a scale, a sigmoid and group normalisation: a drop-in for the Model of the same name.

    h = conv2d(x, W) + conv_bias + bias;    v = sigmoid(h * scale);    out = (v - mean) * rstd * gamma + beta

mean and rstd are those of a group of channels of one sample: rstd = 1 / sqrt(mean((v - mean)^2) + eps).

`ModelNew.forward` chooses between our kernels and PyTorch's own by `_are_unchanged` (layers without hooks, stride 1, no
padding, dilation 1, groups 1, eps >= 1e-6), `_eager_is_faster` and `fits`. Our kernels take x and W that are
contiguous (see _is_nchw), and bias and scale of shape (out_channels, 1, 1):

    NVIDIA GPU      float32, float16, bfloat16, autocast; gradients or none; tested from compute capability 7.5 on.
                    Where a tile of 16384 values gets under 5000 on average (if our kernels convolve, under 5000 +
                    128 in_channels), as in small images or few channels, up to 512 tiles (torch.compile: any)
    CPU, float32    without gradients; images of 128 pixels or more (under torch.compile: any)
    CPU, 16 bits    without gradients; types that the CPU has no instructions for: we compute in float32. Images of
                    128 pixels or more, or x.numel() * W.numel() >= 2^19 (under torch.compile: any)
    CPU, autocast   as 16 bits, of autocast's type; x in float32 or 16 bits, any images; bias, gamma, beta in float32

Everything else runs PyTorch's operators. If gradients are wanted in a 16-bit type that the CPU has no instructions for,
we run them in float32, unless converting costs more than it saves: x has fewer than 2048 values, or its images are
below the limits above.

On a GPU `_convolves` decides who convolves: our kernels, if W is 3x3 or 1x1 and has at most 32 input channels, or 16 if
x has a 16-bit type; otherwise cuDNN computes conv2d(x, W) and, in training, x's and W's gradients, and our kernels read
conv2d(x, W) and do the rest. On a CPU the C++ function `direct_is_faster` decides.

The forward keeps v in registers and writes its output once. It reads cuDNN's result once. If it convolves, it reads x
1.2 times (1x1: once), as neighbouring tiles share borders, and again for each further 32 output channels. If a sample
has more tiles than can run at once, there are two launches, and each of them reads all that. Compiled for compute
capability 8.0, 9.0, 10.0 or 10.3, our kernels convolve with tensor cores, which are much faster there than FMA
instructions, and in float32 as accurate. For other GPUs, whose tensor cores gain too little, they use FMA instructions.
Second derivatives are PyTorch's. If gradients are wanted, the forward saves its input, the parameters, mean (as two
floats) and rstd. The backward computes h again, or reads cuDNN's result. Where our kernels convolve, they also compute
x's gradient, if W is 3x3 and has at least 4 input channels. cuDNN computes W's gradient, and x's elsewhere. Our kernels
give the same bits each time; cuDNN's may not, and use TF32 for float32 unless torch.backends.cudnn.allow_tf32 is False.

Work at the benchmark shapes (128 samples, 8 -> 32 channels, 256 x 256): 1.33 GB in float32, 38.1 GFLOP to convolve. An
H200 takes, by `python harness.py conv_sigmoid_group_norm --backward --dtype float32,bfloat16` (in brackets: times as
fast as eager, torch.compile; "compiled for 8.0": with TORCH_CUDA_ARCH_LIST=8.0+PTX, as for an A100):

                                  forward                     forward and backward, with x's gradient
    float32                       1.134 ms (5.15x, 2.97x)     7.163 ms (2.57x, 1.90x)
    float32, compiled for 8.0     1.152 ms (5.07x)            7.192 ms (2.56x)
    bfloat16                      0.786 ms (6.70x, 3.53x)     4.426 ms (2.82x, 1.80x)

Two cores of a CPU take some 2.3 ms (2.41x, 1.65x; it varies) for 4 samples of 128 x 128, forward in float32.
"""

import contextlib
import fcntl
import hashlib
import os
import pathlib
import shutil
import sys
import types

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import cpp_extension

CUDA_SOURCE = r"""
#line 1 "CUDA_SOURCE in conv_sigmoid_group_norm.py"
#undef __CUDA_NO_HALF_CONVERSIONS__  // PyTorch defines both; without them float(v) and T(v) convert all three types
#undef __CUDA_NO_BFLOAT16_CONVERSIONS__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_pipeline_primitives.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

// ---------------------------------------------------------------------------------------------------------------------
// The activation v of z = h * scale, and its gradient dv/dz. To change it, edit (1) `activation` and (2)
// `activation_gradient` here, (3) `_activate` in the Python below, (4) the Model in models/, (5) the file in hopper/,
// as it says. Importing this file compares 1, 2 and 3 on the CPU at 12 z, and 1 and 3 at NaN; harness.py finds a
// forgotten 4 and, on a Hopper, 5. The activation of NaN must be NaN. fminf, fmaxf and __saturatef lose a NaN: use
// comparisons, such as `v < 0 ? 0 : v`. (The fminf below drops a NaN on purpose.)

__device__ __forceinline__ float exp2_approx(float t) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(t));
    return power;
}
__device__ __forceinline__ float reciprocal_approx(float v) {
    float reciprocal;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(v));
    return reciprocal;
}
// ACTIVATION: do not remove this marker and END. Python copies the text between them to CPP_SOURCE, for CPUs, with
// `inline` for `__device__ __forceinline__`: any other spelling breaks the CPU build. On a CPU it may call only
// CPP_SOURCE's own exp2_approx and reciprocal_approx (or neither), and <cmath>'s functions (fmaf, fabsf, expf).
__device__ __forceinline__ float activation(float z) {  // sigmoid(z) = 1 / (1 + 2^(-log2(e) z))
    return reciprocal_approx(1.0f + exp2_approx(-1.44269504f * z));
}
// dv/dz = v (1 - v) = w - w^2, where w is the smaller of v and 1 - v. 1 - v is computed as 2^(-log2(e) z) v, because
// the difference loses digits where it is small.
__device__ __forceinline__ float activation_gradient(float z) {
    const float v = activation(z);
    // Where v is 0, 2^(-log2(e) z) may be infinite: the product is NaN, and fminf returns v. If z is NaN, so is w.
    const float w = fminf(v, exp2_approx(-1.44269504f * z) * v);
    return fmaf(-w, w, w);
}
// END

// ---------------------------------------------------------------------------------------------------------------------
// One kernel, three directions. Read convolve_and_normalize first: it is the kernel, and comes after what it calls. A
// tile is a part of one sample's output: 32 channels of 16 rows x 32 columns or, if there are at most 16 output
// channels, 16 channels of 32 rows x 32 columns. A block of 256 threads does this:
//
//   for each of its tiles
//       for each stage (at most 8 input channels)
//           copy its x to shared memory (a stage ahead; float32 FMA: only stage 0 ahead)   (copy_x)
//           load its weights to shared memory (if they stay there: for the first tile)     (load_weights)
//           wait for x and convert it (FMA in float32: only wait)                          (convert_x)
//           values += the stage's products, in registers                                   (convolve_stage)
//       with tensor cores, or for x's gradient: convolve again if a value may be wrong     (recompute_in_float)
//       add the biases and, in the forward, compute v                                      (add_bias_and_activate)
//       add up the tile's v and v^2 or, in the backward, g and g (v - mean)                (sum_values, sum_gradients)
//       publish these sums: write them to global memory, add 1 to the sample's counter     (publish)
//       start to copy the next tile's x                                                    (copy_x)
//       wait until the counter says that all tiles of the sample are published             (await_sample)
//       add up all published sums of the tile's groups                                     (compute_coefficients)
//       compute the output from the values in registers, and write it                      (write_output, write_dh)
//
// The gradient of x has no sums, and does not wait. The backward reads g, the gradient of out, twice, before and after
// the wait; h (in the forward v) stays in registers. In each launch a block reads each tile's x once, with the border
// that the convolution needs (recompute_in_float reads it again). A launch that computes the output writes it once.
// Tiles of other output channels read the same x. The backward also writes each tile's part of dbeta and dgamma, in
// `publish`, and of dbias and dscale, in `write_bias_scale_sums`. PyTorch adds up the parts.
//
//                forward                                        backward                                  gradient of x
//   registers    h = conv(x) + both biases, v = activation(z)   h = conv(x) + both biases                 dx = conv(dh)
//   published    sums of v, v^2                                 sums of gamma g, gamma g (v - mean) rstd  nothing
//   output       out = (v - mean) rstd gamma + beta             dh                                        dx
//
// The biases are the convolution's and the network's, z = h scale, and W is the convolution's weights. dx, dh, dv, dz
// are the gradients of x, h, v, z. dx is a convolution too (in code: kInputGradient). Its input is dh, with zeros
// around it. Its weights are W, rotated by 180 degrees, with input and output channels exchanged. So in that direction
// the code's `x` is dh, and its `out_channels` are x's channels.
//
// If in_channels is 0, the forward and the backward do not convolve: each thread loads its values of conv(x), which
// PyTorch has computed. `_convolves`, in Python, decides so if W is neither 3x3 nor 1x1, or has many input channels.
//
// Waiting cannot deadlock if (1) all blocks run at once, which a cooperative launch guarantees, and (2) the grid has at
// least as many blocks as a sample has tiles. Block b takes the tiles b, b + grid, b + 2 grid and so on, in this order:
// by (2) each is of a later sample. It publishes a tile, then waits for that tile's sample. Suppose that some blocks
// wait forever, and let s be the lowest sample that any of them waits for. A block that has a tile of s has only tiles
// of lower samples before it, at which no block waits forever. So by (1) it comes to that tile and publishes it. Then
// all of s is published, and nobody waits for s: a contradiction. If the grid has fewer blocks, or the cooperative
// launch is refused, there are two launches. The first only publishes; the block that publishes a sample's last tile
// adds up the sums of each of its groups (add_up_sample). The second repeats the convolution and makes the output.
//
// Two blocks share a multiprocessor: while one waits or stores, the other convolves. In three cases there is only one,
// which is slower, but correct: (1) the gradient of x without tensor cores, which keeps two sets of sums in registers,
// see `convolve_stage`; (2) float32 on 8.0 (or 8.7, if compiled for 8.0), 3x3 and at most 16 output channels, such as
// the benchmark's dx: a block takes 86 of 164 KiB of shared memory; (3) float32, 3x3 or at most 16 output channels, on
// 8.6, 8.9 or 12.x, if compiled for 8.0: a block takes 55 KiB or more, of 100.
//
// A thread has 64 values of h. Without tensor cores these are 16 pixels in each of four channels. A warp has four
// channels of 16 rows, and all of its lanes have the same channels. Each lane has four rows of two pairs of columns:
//
//   columns of the tile   0 1    2 3    ...   14 15    16 17    18 19   ...   30 31
//   rows 0 to 3           lane 0      1 ...       7         0       1   ...       7
//   rows 4 to 7           lane 8      9 ...      15         8       9   ...      15
//   rows 8 to 15          lanes 16 to 31, in the same way
//
// With tensor cores a thread's values are 32 pixels in each of two channels, o and o + 8. A warp has 16 channels of
// four rows. The layout of mma.sync's result decides which lane has which of these values:
//
//   columns of each row   0 1    2 3    4 5    6 7    8 9    ...   30 31
//   channels 0 and 8      lane 0     1      2      3      0  ...       3
//   channels 1 and 9      lane 4     5      6      7      4  ...       7
//
// Where a comment says that another way takes 1.03 times as long, it compares the whole kernel's time with that of this
// code. Both were measured in turns on an H200, in float32 unless it says otherwise, at the benchmark shapes.

constexpr bool uses_tensor_cores(int capability) {  // 80 is 8.0
    return capability == 80 || capability == 90 || capability == 100 || capability == 103;
}
#ifdef __CUDA_ARCH__
constexpr bool kTensorCores = uses_tensor_cores(__CUDA_ARCH__ / 10);
#else
constexpr bool kTensorCores = false;  // for the host: `launch` asks the kernel instead. sizeof(Shared) is the same
#endif

constexpr int kThreads = 256;                                   // per block
constexpr int kBlocksPerSM = 2;                                 // at most; one in the three cases above
constexpr int kWarps = kThreads / 32;                           // per block
constexpr int kThreadValues = 64;                               // values per thread
constexpr int kThreadChannels = kTensorCores ? 2 : 4;           // output channels per thread
constexpr int kChannelStride = kTensorCores ? 8 : 1;            // from one of a thread's channels to the next
constexpr int kWarpChannels = kTensorCores ? 16 : 4;            // output channels per warp
constexpr int kChannelLanes = kTensorCores ? 4 : 32;            // neighbouring lanes that have the same channels
constexpr int kThreadRows = 4;                                  // pixel rows per thread
constexpr int kWarpRows = kTensorCores ? 4 : 16;                // pixel rows per warp
constexpr int kThreadPixels = kThreadValues / kThreadChannels;  // pixels per thread and channel
constexpr int kPairs = kThreadPixels / kThreadRows / 2;         // pairs of columns per row of a thread
constexpr int kChunkPixels = 8;                                 // of a Chunk: a thread has no registers for 16
constexpr int kMaxTileChannels = 32;                            // output channels of a tile, at most
constexpr int kMaxStageChannels = 8;                            // input channels; two taps of 8 are mma's k, 16
constexpr int kMaxTaps = 9;                                     // of a 3x3 kernel; a tap is one of its positions
constexpr int kMaxStages = 16;                                  // with more, weights do not stay in shared memory
constexpr int kMinTilesToStagger = 16;                          // tiles per block; with fewer no block is delayed
constexpr int kTileColumns = 32;                                // pixel columns of a tile
constexpr int kPairStride = kTileColumns / kPairs;              // columns from one of a thread's pairs to the next
// Pixels from one line to the next in shared memory. A line is the part of a row of x that the tile needs: the tile's
// columns and, for a 3x3 convolution, two more. The rest, two or for 1x1 four, is unused, against bank conflicts.
constexpr int kPitch = kTileColumns + 4;
constexpr int kRowBufferPitch = kTileColumns + 8;  // floats per channel in write_rows; 8 unused, against bank conflicts
constexpr int kRowBufferFloats = kWarps * 16 * kRowBufferPitch;  // the row buffer has 16 channels a warp
constexpr int kCounterStride = 32;  // `unsigned`s from one sample's counter to the next: a cache line each, 128 bytes
using ThreadTile = float[kThreadChannels][kThreadPixels];  // [o][i]: the value of the thread's channel o, pixel i
using Chunk = float[kChunkPixels];  // pixels of one of its channels that a thread loads or stores at once

enum Direction { kForward, kBackward, kInputGradient };
// A launch publishes sums and, once all of a sample are there, computes its output (kFused); or it does one of the two.
// In the direction kInputGradient it has no sums, and always computes the output.
enum Mode { kFused, kSumsOnly, kOutputOnly };

// Of a sample's group. mean + mean_lo has about 48 bits: with the float mean alone, all outputs of a group whose values
// are nearly equal would have one and the same error.
struct Statistics { float mean, mean_lo, rstd; };

struct Arguments {  // T, here and below, is the type of x and the parameters
    // If in_channels is 0, x is the convolution's output without its bias, of the shape of `out`.
    const void *x, *weight, *conv_bias, *bias, *scale, *gamma, *beta;  // of T
    Statistics* statistics;  // (samples, groups)
    unsigned* counters;  // (samples, kCounterStride): a row's first counts published tiles; zeros before the launch
    double2* group_sums;  // (samples, groups, max_group_tiles, pixel_tiles): the two published sums; see add_up_sample
    void* out;  // of T; in the backward dh, of dh_type
    const void* g;  // of T: the gradient of out
    double* parameter_sums;  // (samples, pixel_tiles, 4, out_channels): partial sums of dbeta, dgamma, dbias, dscale
    int samples, in_channels, height, width, out_channels, groups, group_channels;
    int out_height, out_width;  // of out
    int dh_type;  // 0 float, 1 half, 2 bfloat16: T or, under autocast (T is float), the autocast type
    int kernel_size;  // rows and columns of W
    int pad;  // rows and columns of zeros on each side of x
    // A tile has tile_channels output channels of tile_rows rows. A stage has at most stage_channels input channels. A
    // sample has pixel_tiles (column_tiles side by side) times channel_tiles tiles; the product is sample_tiles.
    int tile_channels, stage_channels, tile_rows, column_tiles, pixel_tiles, channel_tiles;
    int tile_channels_log2;  // tile_channels = 2^tile_channels_log2: shifts, where a division would take longer
    int lines;  // of each channel of x in shared memory
    int sample_tiles, all_tiles;  // tiles of a sample, of all samples
    int max_group_tiles;  // channel tiles that have channels of one group, at most
    int x_floats;  // of stage_x, whose memory is also the row buffer in which write_rows arranges the output
    int weight_floats;  // of shared memory for a stage's weights
    int stages;
    // Whether all stages' weights stay in shared memory for all tiles. If not, each stage of each tile loads its own.
    bool keeps_weights;
    Mode mode;
    float eps;
    double inverse_count;  // 1 / the number of values of a group
};

// A tile's number among those of all samples, its first pixel and channel, and that channel's group.
struct Tile {
    int number, sample, pixel_tile, first_channel, first_group, row, column;
    __device__ __forceinline__ void set(const Arguments& p, int tile_number) {
        const int tile = tile_number % p.sample_tiles;
        number = tile_number;
        sample = tile_number / p.sample_tiles;
        pixel_tile = tile / p.channel_tiles;
        first_channel = tile % p.channel_tiles * p.tile_channels;
        first_group = first_channel / p.group_channels;
        row = pixel_tile / p.column_tiles * p.tile_rows;
        column = pixel_tile % p.column_tiles * kTileColumns;
    }
};

// What the output of a channel is computed from. Forward: out = (v - mean) factor + shift. Backward: dv = rstd
// (factor g - (v - mean) v_factor - shift). `mean` is the statistics' float mean; mean_lo goes into the shift.
//
//                factor        shift                                    v_factor
//   forward      gamma rstd    beta - mean_lo factor                    unused, as rstd is
//   backward     gamma         (mean of gamma g) - mean_lo v_factor     (mean of gamma g (v - mean) rstd) rstd
struct OutputCoefficients { float mean, factor, shift, v_factor, rstd; };
__device__ __forceinline__ float normalize(float v, const OutputCoefficients& coefficients) {  // the forward's output
    return fmaf(v - coefficients.mean, coefficients.factor, coefficients.shift);
}
// Of an output channel; `bias` is the sum of both biases. alignas: one instruction can load all four.
struct alignas(16) ChannelParameters { float bias, scale, gamma, beta; };

struct Shared {
    double warp_sums[2][kWarps][16];  // two sums of each channel of a warp, as sums_of_warps reads them
    float anchors[kWarps][16];  // what a warp subtracts from a channel's v, see sum_values; 0 in the backward
    double2 channel_totals[kMaxTileChannels];  // sums of each channel of the tile, in `publish`
    OutputCoefficients coefficients[kMaxTileChannels];
    ChannelParameters parameters[kMaxTileChannels];
    int tap_offsets[kMaxTaps + 1];  // see `convolve_mma`
    float largest[kWarps];  // of a warp's values, in prescale_for
    float weight_inverse_prescales[kMaxStages];  // of each stage's weights in shared memory, see Pieces
    bool completes_sample;  // whether the tile that this block has published was its sample's last
    Tile tiles[2];  // this one and the next
};

// threadIdx.x, read anew at each use (`volatile`). Else nvcc keeps values derived from it in registers, and spills.
__device__ __forceinline__ unsigned read_thread() {
    unsigned thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}
// log2(kWarps kWarpChannels / p.tile_channels), the logarithm of how many warps have the same channels, in other rows.
__device__ __forceinline__ int row_warps_log2(const Arguments& p) {
    return (kTensorCores ? 7 : 5) - p.tile_channels_log2;
}
// Where the thread's values lie in each tile: its first channel, and its first pixel.
struct ThreadOrigin {
    int channel, row, column;
    __device__ __forceinline__ explicit ThreadOrigin(const Arguments& p) {
        const int warp = read_thread() / 32, lane = read_thread() % 32;
        const int warps_log2 = row_warps_log2(p), row_warp = warp & ((1 << warps_log2) - 1);  // which of these warps
        const int lanes = kTileColumns / 2 / kPairs;  // lanes side by side in a row
        channel = (warp >> warps_log2) * kWarpChannels + (kTensorCores ? lane / kChannelLanes : 0);
        row = row_warp * kWarpRows + (kTensorCores ? 0 : lane / lanes * kThreadRows);
        column = lane % lanes * 2;
    }
};
// Where the thread's values of one tile lie in the output. Pixel i is column i % 2 of pair i / 2 % kPairs of the
// thread's row i / (2 kPairs).
struct OutputMap {
    int channel, channels_left;  // the thread's first channel in the tile; number of output channels from there on
    int64_t start;  // index of pixel 0 of the first channel in the output, or in a tensor of the output's shape
    int plane;  // pixels of a channel
    unsigned valid_mask;  // bit i: pixel i lies in the output
    int out_width;  // of the output
    __device__ __forceinline__ OutputMap(const Arguments& p, const Tile& tile) {
        const ThreadOrigin origin(p);
        const int row = tile.row + origin.row, column = tile.column + origin.column;
        channel = origin.channel;
        channels_left = p.out_channels - tile.first_channel - channel;
        out_width = p.out_width;
        plane = p.out_height * out_width;
        start =
            (int64_t(tile.sample) * p.out_channels + tile.first_channel + channel) * plane + row * out_width + column;
        unsigned row_mask = 0;
#pragma unroll
        for (int i = 0; i < 2 * kPairs; ++i) row_mask |= unsigned(column + pixel_offset(i, 0) < out_width) << i;
        valid_mask = 0;
#pragma unroll
        for (int i = 0; i < kThreadRows; ++i) valid_mask |= row + i < p.out_height ? row_mask << 2 * kPairs * i : 0;
    }
    // The valid pixels of the thread's channel o: `valid_mask`, or none if that channel lies beyond the last.
    __device__ __forceinline__ unsigned valid_mask_of(int o) const {
        return o * kChannelStride < channels_left ? valid_mask : 0;
    }
    __device__ __forceinline__ bool all_valid() const { return valid_mask == ~0u >> (32 - kThreadPixels); }
    // The offset of pixel i from pixel 0 in an array with `pitch` elements from one row to the next.
    __device__ __forceinline__ int pixel_offset(int i, int pitch) const {
        return i / (2 * kPairs) * pitch + i / 2 % kPairs * kPairStride + i % 2;
    }
};
// PACK neighbours in memory, loaded or stored by one instruction.
template <typename T, int PACK> struct alignas(PACK * sizeof(T)) Pack { T values[PACK]; };
template <int PACK, typename T>
__device__ __forceinline__ void load_packs(const T* from, const OutputMap& map, unsigned mask, int begin, Chunk& to) {
#pragma unroll
    for (int i = 0; i < kChunkPixels; i += PACK) {
        Pack<T, PACK> pack = {};
        const T* const pixel = from + map.pixel_offset(begin + i, map.out_width);
        if (mask >> (begin + i) & 1) pack = *reinterpret_cast<const Pack<T, PACK>*>(pixel);
#pragma unroll
        for (int k = 0; k < PACK; ++k) to[i + k] = float(pack.values[k]);
    }
}
template <int PACK, typename T>
__device__ __forceinline__ void store_packs(T* to, const OutputMap& map, unsigned mask, int begin, const Chunk& from) {
#pragma unroll
    for (int i = 0; i < kChunkPixels; i += PACK) {
        Pack<T, PACK> pack;
#pragma unroll
        for (int k = 0; k < PACK; ++k) pack.values[k] = T(from[i + k]);
        T* const pixel = to + map.pixel_offset(begin + i, map.out_width);
        if (mask >> (begin + i) & 1) *reinterpret_cast<Pack<T, PACK>*>(pixel) = pack;
    }
}
// Load (0 outside the output) or store a chunk of channel o's pixels, from `begin` on; in pairs if all are aligned.
template <typename T>
__device__ __forceinline__ void load_pixels(const T* from, const OutputMap& map, int o, int begin, Chunk& to) {
    from += map.start + int64_t(o) * kChannelStride * map.plane;
    if (map.out_width % 2 == 0) load_packs<2>(from, map, map.valid_mask_of(o), begin, to);
    else load_packs<1>(from, map, map.valid_mask_of(o), begin, to);
}
template <typename T>
__device__ __forceinline__ void store_pixels(T* to, const OutputMap& map, int o, int begin, const Chunk& from) {
    to += map.start + int64_t(o) * kChannelStride * map.plane;
    if (map.out_width % 2 == 0) store_packs<2>(to, map, map.valid_mask_of(o), begin, from);
    else store_packs<1>(to, map, map.valid_mask_of(o), begin, from);
}

// ---------------------------------------------------------------------------------------------------------------------
// The convolution. copy_x copies one stage's channels of x, all lines and columns that the tile's pixels depend on, to
// shared memory, as (channel, line, column); lines are kPitch apart. convolve_stage reads `stage_x`. In float32 without
// tensor cores copy_x fills `stage_x` itself. In all other cases (kConvertsX in the kernel) it fills `copied_x`, and
// convert_x converts that to `stage_x`: to floats or, with tensor cores, to what `convolve_mma` reads. So copy_x can
// fill `copied_x` with the next stage while the block convolves `stage_x`.
//
// Pieces. Tensor cores take 16-bit numbers, so x and weights of 16 bits go in as they are. A float32 number has 24
// significant bits, a float16 has 11. So a float32 u is split into two float16 pieces: hi is the float16 nearest to u,
// lo the one nearest to u - hi. With x's pieces hi and lo, and hi' and lo' the weight w's, x w is about hi hi' + hi lo'
// + lo hi': three products.
//
// A float16 is a multiple of 2^-24, and below 2^16. So convert_x first multiplies the x of each stage of a tile by a
// power of two, the prescale: it brings the largest |x|, if that is 2^-113 or more, to [2^13, 2^14). load_weights does
// the same with each stage's weights. Both functions return the inverse of their prescale, `inverse_prescale`. The
// kernel gives convolve_stage the product of the two, also called `inverse_prescale`: x w = `inverse_prescale` (scaled
// x) (scaled w).
//
// A product of scaled numbers has two errors. One is relative, below 2^-21: leaving out lo lo' costs up to 2^-22, and
// each lo 2^-23, because u - hi has up to 12 bits and lo keeps 11. For random numbers its median is 2^-25. (Rounding a
// product to float32 costs up to 2^-24.) The other is absolute: lo is rounded to a multiple of 2^-24, an error of up to
// 2^-25. For a scaled number below 2^-2 this is more than the relative error of its lo. Multiplied by the other factor,
// which is below 2^14, it is up to 2^-11 per product. So a stage of 8 channels and 9 taps adds to h an error of at most
// 72 * 2^-11 < 0.04 times `inverse_prescale`; with random numbers at most about 0.001 times that. Where this might
// change z, `recompute_in_float` convolves again.

__device__ __forceinline__ int channels_of_stage(const Arguments& p, int first_in_channel) {
    return min(p.stage_channels, p.in_channels - first_in_channel);
}

// By a block. A pack is here PACK neighbouring columns. Distributes the packs of `channels` channels among the threads,
// and calls use(channel, line, column) for each pack of this thread. In copy_x and convert_x a thread has the same
// packs: it reads only what it copied itself, so no __syncthreads is needed in between.
template <int PACK, typename F>
__device__ __forceinline__ void for_each_pack(const Arguments& p, int channels, F use) {
    constexpr int kPacks3x3 = (kTileColumns + 2) / PACK, kPacks1x1 = kTileColumns / PACK;  // constants divide fast
    const bool is_3x3 = p.kernel_size == 3;
    const int packs = is_3x3 ? kPacks3x3 : kPacks1x1;  // of a line
    const int thread = read_thread();
    int channel = 0, line = is_3x3 ? thread / kPacks3x3 : thread / kPacks1x1, pack = thread - line * packs;
    const int line_step = is_3x3 ? kThreads / kPacks3x3 : kThreads / kPacks1x1;
    const int pack_step = kThreads - line_step * packs;
    while (true) {
        while (line >= p.lines) {
            line -= p.lines;
            ++channel;
        }
        if (channel >= channels) return;
        use(channel, line, pack * PACK);
        line += line_step;
        pack += pack_step;
        if (pack < packs) continue;
        pack -= packs;
        ++line;
    }
}
// By a block: copies what the tile needs of a stage's channels, from `first_in_channel` on, to shared memory, and
// writes zeros for pixels outside x. From compute capability 8.0 on it uses cp.async and does not wait; but cp.async
// copies at least 4 bytes, so 16-bit values of an odd width are stored one by one. With tensor cores a call of the
// lambda copies a pack of every channel, because convert_x needs all channels of a pixel in one thread.
template <typename T, int PACK>
__device__ __forceinline__ void copy_packs(const Arguments& p, const Tile& tile, int first_in_channel, T* to) {
    constexpr int kBytes = PACK * sizeof(T), kCallChannels = kTensorCores ? kMaxStageChannels : 1;
    const int64_t plane = int64_t(p.height) * p.width;
    const T* const image =
        static_cast<const T*>(p.x) + (int64_t(tile.sample) * p.in_channels + first_in_channel) * plane;
    const int channels = channels_of_stage(p, first_in_channel);
    for_each_pack<PACK>(p, kTensorCores ? 1 : channels, [&](int first_in_stage, int line, int column) {
        const int row = tile.row - p.pad + line, image_column = tile.column - p.pad + column;
        const bool inside = unsigned(row) < unsigned(p.height) && unsigned(image_column) < unsigned(p.width);
#pragma unroll
        for (int i = 0; i < kCallChannels; ++i) {
            const int channel = first_in_stage + i;
            if (channel >= channels) break;
            const T* const source = inside ? image + channel * plane + row * p.width + image_column : image;
            T* const target = to + (channel * p.lines + line) * kPitch + column;
            // The last argument is how many of the bytes are zeros instead.
            if constexpr (kBytes >= 4) __pipeline_memcpy_async(target, source, kBytes, inside ? 0 : kBytes);
            else *target = inside ? *source : T(0.0f);
        }
    });
    __pipeline_commit();
}
template <typename T> using Piece = std::conditional_t<sizeof(T) == 2, T, __half>;
template <typename T> constexpr int kPieces = sizeof(T) / 2;

// By a block, with tensor cores: from each thread's `largest`, its largest |value|, computes the prescale, see Pieces.
// It is at most 2^126, so that its inverse, `inverse_prescale`, is a normal number. If a value is infinite, it is NaN.
// Contains a __syncthreads, and needs one before a second call.
__device__ __forceinline__ float prescale_for(float largest, Shared& shared, float& inverse_prescale) {
#if __CUDA_ARCH__ >= 800  // of numbers that are not negative the largest has the largest bits
    largest = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(largest)));
#endif
    if (read_thread() % 32 == 0) shared.largest[read_thread() / 32] = largest;
    __syncthreads();
    for (int warp = 0; warp < kWarps; ++warp) largest = fmaxf(largest, shared.largest[warp]);
    constexpr unsigned kOne = 127, kInfinite = 255, kLeast = 14;  // exponents in a float's bits, of 1, infinity, 2^-113
    const unsigned exponent = max(__float_as_uint(largest) >> 23, kLeast);
    inverse_prescale = __uint_as_float((exponent - 13) << 23);
    return exponent < kInfinite ? __uint_as_float((kOne + 13 - exponent + kOne) << 23) : NAN;
}
__device__ __forceinline__ void split(float v, __half& hi, __half& lo) {
    hi = __float2half_rn(v);
    lo = __float2half_rn(v - __half2float(hi));
}
// By a block: each thread waits for its own cp.async copies. Without tensor cores, float32 values stay where they are,
// and 16-bit values are stored to stage_x as floats. With tensor cores the thread stores the channels of each pixel
// side by side: 16-bit values as they are, float32 values as two pieces. Returns x's `inverse_prescale`, see Pieces.
// Contains a __syncthreads if kTensorCores and T is float.
template <typename T, int PACK>
__device__ __forceinline__ float convert_packs(
    const Arguments& p, int first_in_channel, const T* copied_x, float* stage_x, Shared& shared) {
    __pipeline_wait_prior(0);
    const int channels = channels_of_stage(p, first_in_channel), channel_pixels = p.lines * kPitch;
    float inverse_prescale = 1;
    if constexpr (kTensorCores) {
        const auto load = [&](int c, int pixel) {
            return c < channels ? *reinterpret_cast<const Pack<T, PACK>*>(copied_x + c * channel_pixels + pixel)
                                : Pack<T, PACK>();
        };
        float prescale = 1;
        if constexpr (kPieces<T> == 2) {
            float largest = 0;
            for_each_pack<PACK>(p, 1, [&](int, int line, int column) {
#pragma unroll
                for (int c = 0; c < kMaxStageChannels; ++c) {
                    const Pack<T, PACK> pack = load(c, line * kPitch + column);
#pragma unroll
                    for (int i = 0; i < PACK; ++i) largest = fmaxf(largest, fabsf(pack.values[i]));
                }
            });
            prescale = prescale_for(largest, shared, inverse_prescale);
        }
        for_each_pack<PACK>(p, 1, [&](int, int line, int column) {
            const int pixel = line * kPitch + column;
            using PixelPieces = Pack<Piece<T>, kMaxStageChannels>;  // of a pixel's channels
            PixelPieces pieces[kPieces<T>][PACK];
#pragma unroll
            for (int c = 0; c < kMaxStageChannels; ++c) {
                const Pack<T, PACK> pack = load(c, pixel);
#pragma unroll
                for (int i = 0; i < PACK; ++i) {
                    if constexpr (kPieces<T> == 1) pieces[0][i].values[c] = pack.values[i];
                    else split(pack.values[i] * prescale, pieces[0][i].values[c], pieces[1][i].values[c]);
                }
            }
#pragma unroll
            for (int i = 0; i < kPieces<T> * PACK; ++i) {
                const int piece = i / PACK, k = i % PACK;
                reinterpret_cast<PixelPieces*>(stage_x)[piece * channel_pixels + pixel + k] = pieces[piece][k];
            }
        });
    } else if constexpr (sizeof(T) == 2) {
        for_each_pack<PACK>(p, channels, [&](int channel, int line, int column) {
            const int pixel = channel * channel_pixels + line * kPitch + column;
#pragma unroll
            for (int i = 0; i < PACK; ++i) stage_x[pixel + i] = float(copied_x[pixel + i]);
        });
    }
    return inverse_prescale;
}
// copy_x and convert_x take pairs of columns if the width is even: then all pairs are aligned, as x is aligned to 16
// bytes and p.pad is 0 or 2.
template <typename T>
__device__ __forceinline__ void copy_x(const Arguments& p, const Tile& tile, int first_in_channel, T* copied_x) {
    if (p.width % 2 == 0) copy_packs<T, 2>(p, tile, first_in_channel, copied_x);
    else copy_packs<T, 1>(p, tile, first_in_channel, copied_x);
}
template <typename T>
__device__ __forceinline__ float convert_x(
    const Arguments& p, int first_in_channel, const T* copied_x, float* stage_x, Shared& shared) {
    return p.width % 2 == 0 ? convert_packs<T, 2>(p, first_in_channel, copied_x, stage_x, shared)
                            : convert_packs<T, 1>(p, first_in_channel, copied_x, stage_x, shared);
}

// A weight. For the gradient of x out_channel is one of W's input channels, in_channel one of its output channels, and
// the taps are in reverse order.
template <typename T, Direction DIRECTION>
__device__ __forceinline__ float weight_of(const Arguments& p, int out_channel, int in_channel, int tap) {
    const int taps = p.kernel_size * p.kernel_size;
    const int64_t index = DIRECTION == kInputGradient
        ? (int64_t(in_channel) * p.out_channels + out_channel) * taps + taps - 1 - tap
        : (int64_t(out_channel) * p.in_channels + in_channel) * taps + tap;
    const bool exists = out_channel < p.out_channels && in_channel < p.in_channels;
    return exists ? float(static_cast<const T*>(p.weight)[index]) : 0.0f;
}
// By a block, for a tile whose first output channel is `first_channel`: loads the channels' parameters.
template <typename T>
__device__ __forceinline__ void load_parameters(const Arguments& p, int first_channel, Shared& shared) {
    const int c = int(read_thread()), out_channel = first_channel + c;
    const auto load = [&](const void* values) { return float(static_cast<const T*>(values)[out_channel]); };
    if (c >= p.tile_channels || out_channel >= p.out_channels) return;
    shared.parameters[c] = {load(p.conv_bias) + load(p.bias), load(p.scale), load(p.gamma), load(p.beta)};
}
// By a block, for a tile whose first output channel is `first_channel`: loads the weights of a stage's input channels,
// from `first_in_channel` on, as (in_channel, tap, out_channel) or, with tensor cores, as `convolve_mma` reads them.
// Returns the weights' `inverse_prescale`, see Pieces. Contains a __syncthreads if kTensorCores and T is float.
template <typename T, Direction DIRECTION>
__device__ __forceinline__ float load_weights(
    const Arguments& p, int first_channel, int first_in_channel, float* to, Shared& shared) {
    const int taps = p.kernel_size * p.kernel_size, channels = channels_of_stage(p, first_in_channel);
    float inverse_prescale = 1;
    if constexpr (kTensorCores) {
        const int k_steps = (taps + 1) / 2, weight_registers = p.tile_channels / 16 * k_steps * 128;
        // Register i of operand A, see `convolve_mma`, has two weights: of input channels lane % 4 * 2 + k, for k = 0
        // and 1. i = ((set * k_steps + k_step) * 32 + lane) * 4 + register, where a set is 16 output channels.
        const auto load = [&](int i, int k) {
            const int lane = i / 4 % 32, tap = i / 128 % k_steps * 2 + i / 2 % 2;
            const int out_channel = first_channel + i / 128 / k_steps * 16 + i % 2 * 8 + lane / 4;
            return tap < taps ? weight_of<T, DIRECTION>(p, out_channel, first_in_channel + lane % 4 * 2 + k, tap)
                              : 0.0f;
        };
        float prescale = 1;
        if constexpr (kPieces<T> == 2) {
            float largest = 0;
            for (int i = int(read_thread()); i < 2 * weight_registers; i += kThreads)
                largest = fmaxf(largest, fabsf(load(i / 2, i % 2)));
            prescale = prescale_for(largest, shared, inverse_prescale);
        }
        for (int i = int(read_thread()); i < weight_registers; i += kThreads) {
            const int index = i / 128 * 128 * kPieces<T> + i % 128;
            Pack<Piece<T>, 2> pieces[kPieces<T>];
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                if constexpr (kPieces<T> == 1) pieces[0].values[k] = T(load(i, k));
                else split(load(i, k) * prescale, pieces[0].values[k], pieces[1].values[k]);
            }
#pragma unroll
            for (int n = 0; n < kPieces<T>; ++n) reinterpret_cast<Pack<Piece<T>, 2>*>(to)[index + n * 128] = pieces[n];
        }
    } else {
        for (int i = int(read_thread()); i < channels * taps * p.tile_channels; i += kThreads) {
            const int in_channel = i / p.tile_channels / taps, tap = i / p.tile_channels % taps;
            to[i] = weight_of<T, DIRECTION>(p, first_channel + i % p.tile_channels, first_in_channel + in_channel, tap);
        }
    }
    return inverse_prescale;
}

// By a thread, without tensor cores: adds the products of `channels` input channels to `acc`. x points to the input
// pixel of tap 0 of the thread's first output pixel, weights to the thread's first output channel.
template <int KERNEL_SIZE>
__device__ __forceinline__ void convolve_fma(
    const Arguments& p, const float* x, const float* weights, int channels, ThreadTile& acc) {
    constexpr int kTaps = KERNEL_SIZE * KERNEL_SIZE;
    constexpr int kInputColumns = KERNEL_SIZE == 3 ? 4 : 2;  // of x, for a pair of output columns
#pragma unroll 1
    for (int c = 0; c < channels; ++c) {
        float w[kTaps][kThreadChannels];
#pragma unroll
        for (int tap = 0; tap < kTaps; ++tap) {
            const float4 four = *reinterpret_cast<const float4*>(weights + tap * p.tile_channels);
            w[tap][0] = four.x;
            w[tap][1] = four.y;
            w[tap][2] = four.z;
            w[tap][3] = four.w;
        }
#pragma unroll
        for (int line = 0; line < kThreadRows + KERNEL_SIZE - 1; ++line) {
            float in[2][kInputColumns];
#pragma unroll
            for (int i = 0; i < kInputColumns; ++i) {
                const int pair = i / (kInputColumns / 2), column = i % (kInputColumns / 2) * 2;
                const float2 two = *reinterpret_cast<const float2*>(x + line * kPitch + pair * kPairStride + column);
                in[pair][column] = two.x;
                in[pair][column + 1] = two.y;
            }
#pragma unroll
            for (int tap = 0; tap < kTaps; ++tap) {
                const int row = line - tap / KERNEL_SIZE;  // a line contributes to up to KERNEL_SIZE rows
                if (row < 0 || row >= kThreadRows) continue;
#pragma unroll
                for (int i = 0; i < 16; ++i) {
                    const int o = i / 4, pixel = row * 4 + i % 4;
                    acc[o][pixel] = fmaf(w[tap][o], in[i / 2 % 2][i % 2 + tap % KERNEL_SIZE], acc[o][pixel]);
                }
            }
        }
        x += p.lines * kPitch;
        weights += kTaps * p.tile_channels;
    }
}

// By a warp: loads four 8 x 8 matrices of 16-bit numbers from shared memory. Lane 8 i + j passes the address of row j
// of matrix i. A lane receives two elements of each matrix: of row lane / 4, columns lane % 4 * 2 and the next one.
__device__ __forceinline__ void load_matrices(uint32_t (&to)[4], uint32_t from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
        : "r"(from)
        : "memory");
}
// d (16 x 8) += a (16 x 16) b (16 x 8). If T is float, the elements of a and b are half.
template <typename T> __device__ __forceinline__ void mma(float (&d)[4], uint4 a, uint32_t b0, uint32_t b1) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                     "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
    } else {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                     "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
    }
}
// By a warp, with tensor cores: adds the products of one stage's input channels to `acc`, as `convolve_fma` does. A
// k-step is two taps of kMaxStageChannels channels: mma's k = 16. In each the warp loads the weights of its 16 output
// channels from shared memory, 16 bytes a lane and piece. Then, for every 8 pixels (in 16 bits 16), it loads x by
// ldmatrix and multiplies. Tensor cores multiply 16-bit numbers exactly, and add the products in float32, but truncate
// the sums. In 16 bits truncating matters less than rounding the output, so `products` starts as `acc`, and mma adds to
// it. In float32 it starts at zero in each k-step: mma adds the two products that contain a lo, then hi hi', and fmaf
// adds `products` to `acc`, with rounding.
//
//     x              (piece, line, column, channel): 16 bytes are the kMaxStageChannels channels of a pixel
//     weights        (set of 16 output channels, k-step, piece, lane, register, 2): 16 bytes are a lane's operand A
//     tap_offsets    of each tap: bytes from an output's pixel to its input pixel
//
// Register r of a lane's operand A has the weights of output channel lane / 4 + r % 2 * 8, the k-step's tap r / 2, and
// input channels lane % 4 * 2 and the next one.
template <typename T>
__device__ __forceinline__ void convolve_mma(const Arguments& p, uint32_t x, const uint4* weights,
    const int* tap_offsets, float inverse_prescale, ThreadTile& acc) {
    constexpr bool kSplit = kPieces<T> == 2;
    const int k_steps = (p.kernel_size * p.kernel_size + 1) / 2, lane = read_thread() % 32;
    // ldmatrix loads four matrices. 0 and 1 are x's hi at the k-step's two taps, of eight pixels. 2 and 3 are x's lo
    // there or, in 16 bits, x of the next eight pixels.
    x += lane % 8 * 16 + lane / 16 * (kSplit ? p.lines * kPitch * 16 : 128);
    tap_offsets += lane / 8 % 2;
    // A fragment is eight pixels, mma's n; the warp has 16. It takes kFragmentsAtOnce of them through all k-steps, then
    // the next. With two pieces it takes only four at once: with 16, nvcc makes each mma wait for the one before it.
    constexpr int kFragmentsAtOnce = kSplit ? 4 : 16;
#pragma unroll
    for (int first = 0; first < kThreadPixels / 2; first += kFragmentsAtOnce) {
#pragma unroll 1
        for (int k_step = 0; k_step < k_steps; ++k_step) {
            const uint4 weight_hi = weights[k_step * kPieces<T> * 32];
            const uint32_t step_x = x + tap_offsets[2 * k_step];
            uint32_t b[kFragmentsAtOnce][2 * kPieces<T>];  // x's hi and, if it has two pieces, its lo
            float products[kFragmentsAtOnce][4];
#pragma unroll
            for (int f = 0; f < kFragmentsAtOnce; f += kSplit ? 1 : 2) {
                uint32_t four[4];
                load_matrices(four, step_x + ((first + f) / kPairs * kPitch + (first + f) % kPairs * 8) * 16);
#pragma unroll
                for (int i = 0; i < 4; ++i) b[kSplit ? f : f + i / 2][kSplit ? i : i % 2] = four[i];
            }
#pragma unroll
            for (int f = 0; f < kFragmentsAtOnce; ++f) {
#pragma unroll
                for (int i = 0; i < 4; ++i) products[f][i] = kSplit ? 0.0f : acc[i / 2][2 * (first + f) + i % 2];
            }
            if constexpr (kSplit) {
                const uint4 weight_lo = weights[k_step * 64 + 32];
#pragma unroll
                for (int f = 0; f < kFragmentsAtOnce; ++f) mma<T>(products[f], weight_lo, b[f][0], b[f][1]);
#pragma unroll
                for (int f = 0; f < kFragmentsAtOnce; ++f) mma<T>(products[f], weight_hi, b[f][2], b[f][3]);
            }
#pragma unroll
            for (int f = 0; f < kFragmentsAtOnce; ++f) mma<T>(products[f], weight_hi, b[f][0], b[f][1]);
#pragma unroll
            for (int f = 0; f < kFragmentsAtOnce; ++f) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    float& total = acc[i / 2][2 * (first + f) + i % 2];
                    total = kSplit ? fmaf(products[f][i], inverse_prescale, total) : products[f][i];
                }
            }
        }
    }
}
// By a thread, after the convolution: convolves its values again in float32, with x and W from global memory, if
// - one of them is not finite. The exact value may be finite or, in the second case, infinite where this one is NaN:
//       in float32 with tensor cores prescale_for is NaN for an infinite x or weight, and multiplies the whole stage;
//       in 16 bits an infinite x is multiplied by 0, the weight of a tap that does not exist (9 taps are 5 steps);
//       in the gradient of x, of any type, an infinite weight is multiplied by a zero around dh.
//   This function multiplies nothing outside x, and no tap that does not exist.
// - the values may be inaccurate, in float32 with tensor cores. Let s = max(|scale|, 1), and `inverse_prescale` the
//   largest of the tile's stages. Recompute if inverse_prescale s > kMaxInversePrescale. At this limit a stage makes an
//   error of z = h scale of at most 0.04 kMaxInversePrescale < 2^-23 (see Pieces), with random numbers 2^-29; there are
//   at most four stages. float32 itself rounds a z of 1 by up to 2^-24. The limit suits any activation whose slope is
//   at most 1. It is exceeded only if max|x| max|weight| s > 2^26 kMaxInversePrescale = 2^7. Inputs of order 1 stay far
//   below. 12-bit pixels that are not normalized can exceed it; they are correct, but slow. The gradient of x is not
//   checked: a stage's error is at most 2^-30 of its largest |dh| times its largest |weight|.
constexpr float kMaxInversePrescale = 1.0f / (1 << 19);
template <typename T, Direction DIRECTION>
__device__ __forceinline__ void recompute_in_float(
    const Arguments& p, const Tile& tile, const Shared& shared, float inverse_prescale, ThreadTile& values) {
    constexpr bool kIsInputGradient = DIRECTION == kInputGradient;
    const ThreadOrigin origin(p);
    float nan_probe[4] = {};  // 0, or NaN if a value is not finite. Four sums: no fmaf waits for the one before it
#pragma unroll
    for (int i = 0; i < kThreadValues; ++i)
        nan_probe[i % 4] = fmaf(values[i / kThreadPixels][i % kThreadPixels], 0.0f, nan_probe[i % 4]);
    bool usable = nan_probe[0] + nan_probe[1] + (nan_probe[2] + nan_probe[3]) == 0;
    if constexpr (!kIsInputGradient && kPieces<T> == 2) {
#pragma unroll
        for (int o = 0; o < kThreadChannels; ++o) {
            const float scale = fmaxf(fabsf(shared.parameters[origin.channel + o * kChannelStride].scale), 1.0f);
            usable &= inverse_prescale * scale <= kMaxInversePrescale;
        }
    }
    if (usable) return;
    const OutputMap map(p, tile);
    const int taps = p.kernel_size * p.kernel_size;
#pragma unroll
    for (int i = 0; i < kThreadValues; ++i) values[i / kThreadPixels][i % kThreadPixels] = 0;
#pragma unroll 1
    for (int n = 0; n < p.in_channels * taps; ++n) {
        const int in_channel = n / taps;
        const int row = tile.row + origin.row + n % taps / p.kernel_size - (kIsInputGradient ? p.pad : 0);
        const int column = tile.column + origin.column + n % p.kernel_size - (kIsInputGradient ? p.pad : 0);
        float w[kThreadChannels];
#pragma unroll
        for (int o = 0; o < kThreadChannels; ++o) {
            const int out_channel = tile.first_channel + origin.channel + o * kChannelStride;
            w[o] = weight_of<T, DIRECTION>(p, out_channel, in_channel, n % taps);
        }
        const int64_t image_row = (int64_t(tile.sample) * p.in_channels + in_channel) * p.height + row;
        const T* const from = static_cast<const T*>(p.x) + image_row * p.width + column;
#pragma unroll
        for (int i = 0; i < kThreadPixels; ++i) {
            if (!(map.valid_mask >> i & 1)) continue;
            // With a pitch of 2^16, offset / 2^16 is the rows, offset % 2^16 the columns from pixel 0 to pixel i.
            const unsigned pixel_row = row + map.pixel_offset(i, 1 << 16) / (1 << 16);
            const unsigned pixel_column = column + map.pixel_offset(i, 1 << 16) % (1 << 16);
            if (kIsInputGradient && (pixel_row >= unsigned(p.height) || pixel_column >= unsigned(p.width))) continue;
            const float v = float(from[map.pixel_offset(i, p.width)]);
#pragma unroll
            for (int o = 0; o < kThreadChannels; ++o) values[o][i] = fmaf(w[o], v, values[o][i]);
        }
    }
}
// By a block, between two __syncthreads: adds the products of the stage's input channels, from `first_in_channel` on,
// to `values`.
template <typename T, Direction DIRECTION>
__device__ __forceinline__ void convolve_stage(const Arguments& p, const float* stage_x, const float* weights,
    const Shared& shared, int first_in_channel, float inverse_prescale, ThreadTile& values) {
    const ThreadOrigin origin(p);
    if constexpr (kTensorCores) {
        const int k_steps = (p.kernel_size * p.kernel_size + 1) / 2, uint4s_per_set = k_steps * kPieces<T> * 32;
        const auto* const warp_weights = reinterpret_cast<const uint4*>(weights) + origin.channel / 16 * uint4s_per_set;
        const uint32_t warp_x = uint32_t(__cvta_generic_to_shared(stage_x)) + origin.row * kPitch * 16;
        convolve_mma<T>(p, warp_x, warp_weights + read_thread() % 32, shared.tap_offsets, inverse_prescale, values);
    } else {
        const float* const thread_x = stage_x + origin.row * kPitch + origin.column;
        const float* const thread_weights = weights + origin.channel;
        const int channels = channels_of_stage(p, first_in_channel);
        if constexpr (DIRECTION == kInputGradient) {
            // dh often has 32 channels or more. 32 channels make 288 products. One running sum of them has twice the
            // rounding error of summing each stage by itself and then adding the stages' sums. (The forward of up to
            // 32 channels has no registers for a second set of sums.)
            ThreadTile acc = {};
            convolve_fma<3>(p, thread_x, thread_weights, channels, acc);  // PyTorch computes dx of other kernel sizes
#pragma unroll
            for (int i = 0; i < kThreadValues; ++i)
                values[i / kThreadPixels][i % kThreadPixels] += acc[i / kThreadPixels][i % kThreadPixels];
        } else if (p.kernel_size == 3) {
            convolve_fma<3>(p, thread_x, thread_weights, channels, values);
        } else {
            convolve_fma<1>(p, thread_x, thread_weights, channels, values);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Sums. A thread adds up its pixels in float, a warp its lanes' sums by shuffles; these sums are added up in double.
// The order of additions is fixed: results are the same bits each time.

// A sum of floats. `add<true>` adds the addition's rounding error to `correction` (Knuth's two-sum). The sums of g need
// this: their total is dbeta, which may be near zero although the g are not. The g are inputs, without error, so all of
// dbeta's error comes from these additions. (The sums of g (v - mean) use it only between lanes.) `correction` is not
// used if the sum is not finite.
struct CompensatedSum {
    float sum, correction;
    template <bool COMPENSATED> __device__ __forceinline__ void add(float v) {
        const float before = sum;
        sum += v;
        const float added = sum - before;
        if (COMPENSATED) correction += (before - (sum - added)) + (v - added);
    }
    __device__ __forceinline__ double total() const { return isfinite(sum) ? double(sum) + correction : sum; }
};
// Sends `sent` to the lane whose number is this one's xor `distance`, and adds to `to` what that lane sends.
template <bool COMPENSATED>
__device__ __forceinline__ void add_from_lane(CompensatedSum& to, CompensatedSum sent, int distance) {
    to.add<COMPENSATED>(__shfl_xor_sync(~0u, sent.sum, distance));
    if (COMPENSATED) to.correction += __shfl_xor_sync(~0u, sent.correction, distance);
}
// A reduce-scatter among the kChannelLanes lanes with the same channels. Each lane has eight values or, with tensor
// cores, four. It returns one of them, summed over these lanes: number lane / 4 of eight, or lane % 4 of four. In each
// step a lane sends half of its values to another lane, and adds what it receives to the other half.
template <bool COMPENSATED>
__device__ __forceinline__ CompensatedSum reduce_scatter(CompensatedSum (&values)[2 * kThreadChannels]) {
    int distance = kChannelLanes / 2;
#pragma unroll
    for (int kept = kThreadChannels; kept > 0; kept /= 2) {
        const bool upper = read_thread() & distance;
#pragma unroll
        for (int i = 0; i < kept; ++i) {
            const CompensatedSum sent = upper ? values[i] : values[i + kept];
            if (upper) values[i] = values[i + kept];
            add_from_lane<COMPENSATED>(values[i], sent, distance);
        }
        distance /= 2;
    }
    for (; distance > 0; distance /= 2) add_from_lane<COMPENSATED>(values[0], values[0], distance);
    return values[0];
}

// By a lane, for channel c of the tile: adds up the two sums of each warp that has the channel, and returns
//
//     forward                             the sums of v and v^2. Warps have summed d = v - anchor and d^2. From these:
//                                         v = d + anchor, v^2 = d^2 + anchor (2 d + anchor)
//     backward, after sum_gradients       the sums of g and g (v - mean): the anchors are 0
//     backward, after write_dh            the sums of dz / rstd and dz h / rstd: the anchors are 0
__device__ __forceinline__ double2 sums_of_warps(const Arguments& p, const Tile& tile, const Shared& shared, int c) {
    const int warps = 1 << row_warps_log2(p), first_warp = c / kWarpChannels * warps;  // warps that have the channel
    const int warp_channel = c % kWarpChannels, columns_left = min(kTileColumns, p.out_width - tile.column);
    double2 totals = {};
    for (int warp = first_warp; warp < first_warp + warps; ++warp) {
        const int rows_left = min(kWarpRows, p.out_height - tile.row - (warp - first_warp) * kWarpRows);
        if (rows_left <= 0) break;  // rows_left and columns_left are those inside the output
        const double n = rows_left * columns_left, anchor = shared.anchors[warp][warp_channel];
        const double first_sum = shared.warp_sums[0][warp][warp_channel];
        const double second_sum = shared.warp_sums[1][warp][warp_channel];
        totals.x += first_sum + n * anchor;
        totals.y += second_sum + anchor * (2 * first_sum + n * anchor);
    }
    return totals;
}

__device__ __forceinline__ double2* group_sums_of(const Arguments& p, int sample, int group, int group_tile) {
    return p.group_sums + ((int64_t(sample) * p.groups + group) * p.max_group_tiles + group_tile) * p.pixel_tiles;
}
enum ParameterSum { kDBeta, kDGamma, kDBias, kDScale };  // of a channel, in the order of parameter_sums
__device__ __forceinline__ double& parameter_sum(const Arguments& p, const Tile& tile, ParameterSum which, int c) {
    const int64_t row = int64_t(tile.sample) * p.pixel_tiles + tile.pixel_tile;
    return p.parameter_sums[(row * 4 + which) * p.out_channels + tile.first_channel + c];
}

// By the first warp: writes the tile's sums to global memory, and adds 1 to the sample's counter. In kSumsOnly sets
// completes_sample.
template <Direction DIRECTION>
__device__ __forceinline__ void publish(const Arguments& p, const Tile& tile, Shared& shared) {
    const int lane = read_thread(), channels = min(p.tile_channels, p.out_channels - tile.first_channel);
    if (lane < channels) {
        double2 totals = sums_of_warps(p, tile, shared, lane);
        if (DIRECTION == kBackward) {
            const int64_t group = int64_t(tile.sample) * p.groups + (tile.first_channel + lane) / p.group_channels;
            const Statistics statistics = p.statistics[group];
            const double gamma = shared.parameters[lane].gamma;
            totals.y = (totals.y - statistics.mean_lo * totals.x) * statistics.rstd;  // of g times the normalized v
            parameter_sum(p, tile, kDBeta, lane) = totals.x;
            parameter_sum(p, tile, kDGamma, lane) = totals.y;
            totals = {gamma * totals.x, gamma * totals.y};
        }
        shared.channel_totals[lane] = totals;
    }
    __syncwarp();
    // Each lane takes a group, and adds up its channels in this tile. `group_tile` is the index of the tile's channels
    // among the channel tiles of the group.
    const int group = tile.first_group + lane, first_channel = group * p.group_channels;
    if (first_channel < tile.first_channel + channels) {
        double2 totals = {};
        for (int c = max(first_channel - tile.first_channel, 0);
            c < min(first_channel + p.group_channels - tile.first_channel, channels); ++c) {
            totals = {totals.x + shared.channel_totals[c].x, totals.y + shared.channel_totals[c].y};
        }
        const int group_tile = (tile.first_channel >> p.tile_channels_log2) - (first_channel >> p.tile_channels_log2);
        group_sums_of(p, tile.sample, group, group_tile)[tile.pixel_tile] = totals;
    }
    __syncwarp();
    unsigned* const counter = p.counters + int64_t(tile.sample) * kCounterStride;
    // A thread that acquires a count including this 1 sees the warp's writes. With a __threadfence here and one after
    // the wait, in place of release and acquire, the kernel takes 1.012 times as long.
    if (lane == 0 && p.mode == kFused) {
        asm volatile("red.release.gpu.global.add.u32 [%0], 1;" : : "l"(counter) : "memory");
    } else if (lane == 0) {
        unsigned before;
        asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
        shared.completes_sample = before + 1 == unsigned(p.sample_tiles);
    }
}

// By one thread, before __syncthreads: spins until all tiles of the sample are published.
__device__ __forceinline__ void await_sample(const Arguments& p, int sample) {
    const unsigned* const counter = p.counters + int64_t(sample) * kCounterStride;
    while (true) {
        unsigned count;
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(count) : "l"(counter) : "memory");
        if (count >= unsigned(p.sample_tiles)) return;
        __nanosleep(20);  // ns
    }
}

// By a warp: adds up the group's published sums.
__device__ __forceinline__ double2 add_up_group(const Arguments& p, int sample, int group) {
    const int first_channel = group * p.group_channels, last_channel = first_channel + p.group_channels - 1;
    const int group_tiles = (last_channel >> p.tile_channels_log2) - (first_channel >> p.tile_channels_log2) + 1;
    const double2* const group_sums = group_sums_of(p, sample, group, 0);
    double2 totals = {};
#pragma unroll 4
    for (int i = read_thread() % 32; i < group_tiles * p.pixel_tiles; i += 32) {
        const double2 sums = __ldcg(group_sums + i);
        totals = {totals.x + sums.x, totals.y + sums.y};
    }
    for (int distance = 16; distance > 0; distance /= 2) {
        totals.x += __shfl_xor_sync(~0u, totals.x, distance);
        totals.y += __shfl_xor_sync(~0u, totals.y, distance);
    }
    return totals;
}
// By a block, in the first of two launches, when all tiles of the sample are published: writes each group's totals over
// its first sums. Else each tile of the second launch would add up all of them: time would grow with the square of the
// tiles.
__device__ __forceinline__ void add_up_sample(const Arguments& p, int sample) {
    for (int group = read_thread() / 32; group < p.groups; group += kWarps) {
        const double2 totals = add_up_group(p, sample, group);
        if (read_thread() % 32 == 0) *group_sums_of(p, sample, group, 0) = totals;
    }
}

// By a block, a warp per group of the tile: adds up the group's published sums, and from their means computes the
// OutputCoefficients of the group's channels. The forward also writes the group's Statistics.
template <Direction DIRECTION>
__device__ __forceinline__ void compute_coefficients(const Arguments& p, const Tile& tile, Shared& shared) {
    const int lane = read_thread() % 32, end = min(tile.first_channel + p.tile_channels, p.out_channels);
    for (int group = tile.first_group + read_thread() / 32; true; group += kWarps) {
        const int first_channel = group * p.group_channels, last_channel = first_channel + p.group_channels - 1;
        if (first_channel >= end) return;
        const double2 totals =
            p.mode == kFused ? add_up_group(p, tile.sample, group) : __ldcg(group_sums_of(p, tile.sample, group, 0));
        const double first_mean = totals.x * p.inverse_count, second_mean = totals.y * p.inverse_count;
        Statistics& stored = p.statistics[int64_t(tile.sample) * p.groups + group];
        Statistics statistics;
        if (DIRECTION == kBackward) {
            statistics = stored;
        } else {
            const double variance = second_mean - first_mean * first_mean;
            statistics.mean = float(first_mean);
            statistics.mean_lo = float(first_mean - statistics.mean);
            statistics.rstd = rsqrtf(float(variance < 0 ? 0 : variance) + p.eps);
            // The group's other channel tiles write the same values.
            if (lane == 0 && tile.pixel_tile == 0) stored = statistics;
        }
        for (int out_channel = max(first_channel, tile.first_channel) + lane; out_channel <= min(last_channel, end - 1);
            out_channel += 32) {
            const ChannelParameters parameters = shared.parameters[out_channel - tile.first_channel];
            OutputCoefficients& coefficients = shared.coefficients[out_channel - tile.first_channel];
            if (DIRECTION == kBackward) {
                const double v_factor = second_mean * statistics.rstd;
                const float shift = float(first_mean - statistics.mean_lo * v_factor);
                coefficients = {statistics.mean, parameters.gamma, shift, float(v_factor), statistics.rstd};
            } else {
                const float factor = parameters.gamma * statistics.rstd;
                // An infinite gamma rstd gives NaN, as in PyTorch.
                const float shift = isfinite(factor) ? parameters.beta - statistics.mean_lo * factor : NAN;
                coefficients = {statistics.mean, factor, shift};
            }
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// The kernel, and what differs between its directions.

// By a warp: adds up its lanes' sums, and writes them to shared memory for sums_of_warps.
template <bool COMPENSATED>
__device__ __forceinline__ void store_warp_sums(
    CompensatedSum (&sums)[2 * kThreadChannels], const float (&anchors)[kThreadChannels], Shared& shared) {
    const int warp = read_thread() / 32, lane = read_thread() % 32;
    const CompensatedSum sum = reduce_scatter<COMPENSATED>(sums);
    if (!kTensorCores && lane % 4 != 0) return;
    // Which of the 2 kThreadChannels sums this lane has. A lane with a first sum also writes its channel's anchor.
    const int which = kTensorCores ? lane % 4 : lane / 4;
    const int c = (kTensorCores ? lane / kChannelLanes : 0) + which % kThreadChannels * kChannelStride;
    shared.warp_sums[which / kThreadChannels][warp][c] = sum.total();
    float anchor = anchors[0];
#pragma unroll
    for (int o = 1; o < kThreadChannels; ++o) anchor = which == o ? anchors[o] : anchor;
    if (which < kThreadChannels) shared.anchors[warp][c] = anchor;
}

// Forward, by a warp: adds up v - anchor and its square, where anchor is one of the warp's values of the same channel.
// Without the anchor, values that are all close to 1 would lose their variance to rounding.
__device__ __forceinline__ void sum_values(ThreadTile& v, const OutputMap& map, Shared& shared) {
    const bool all_valid = __all_sync(~0u, map.all_valid());
    constexpr int kColumn4Lane = 2;  // the lane whose pixel 0 lies in row 0, column 4 of the warp's pixels
    constexpr int kRow3Pixel = 6 * kPairs;  // the pixel of lane 0 in row 3, column 0
    const unsigned valid = __shfl_sync(~0u, map.valid_mask, kColumn4Lane, kChannelLanes) & map.valid_mask >> kRow3Pixel;
    const bool has_right_and_below = (valid & 1) != 0;  // used in lane 0 of kChannelLanes only
    CompensatedSum sums[2 * kThreadChannels] = {};
    float anchors[kThreadChannels];
#pragma unroll
    for (int o = 0; o < kThreadChannels; ++o) {
        // The anchor is the median of three of the warp's pixels: (row 0, column 0), (0, 4) and (3, 0). In a 3x3
        // convolution no two depend on the same pixel of x, so a huge x, which saturates v near it, does not make the
        // anchor an outlier. If (0, 4) or (3, 0) is outside the output, the anchor is (0, 0). If that is outside, too,
        // sums_of_warps omits this warp.
        const float corner = v[o][0];
        const float at_column_4 = __shfl_sync(~0u, corner, kColumn4Lane, kChannelLanes);
        const float right = has_right_and_below ? at_column_4 : corner;
        const float below = has_right_and_below ? v[o][kRow3Pixel] : corner;
        const float median = fmaxf(fminf(corner, right), fminf(fmaxf(corner, right), below));
        const float anchor = __shfl_sync(~0u, median, 0, kChannelLanes);
        anchors[o] = anchor;
        if (!all_valid) {  // outside the output let v be the anchor, which adds nothing
#pragma unroll
            for (int i = 0; i < kThreadPixels; ++i) v[o][i] = map.valid_mask >> i & 1 ? v[o][i] : anchor;
        }
#pragma unroll
        for (int i = 0; i < kThreadPixels; ++i) {
            const float d = v[o][i] - anchor;
            sums[o].sum += d;
            sums[kThreadChannels + o].sum = fmaf(d, d, sums[kThreadChannels + o].sum);
        }
    }
    store_warp_sums<false>(sums, anchors, shared);
}
// By a warp, with tensor cores: computes the output of its 16 channels, row by row, in its part of the row buffer, and
// copies each row to `out`. So a store writes 128 contiguous bytes of a channel, not 32; in 16 bits 64, not 16.
template <typename T>
__device__ __forceinline__ void write_rows(const Arguments& p, const Tile& tile, const ThreadTile& values,
    const OutputMap& map, const Shared& shared, float* row_buffer) {
    constexpr int kRowLanes = kTileColumns / 2;  // lanes that copy one channel's row, a pair of columns each
    constexpr int kChannelsAtOnce = 32 / kRowLanes;
    const int lane = read_thread() % 32;
    const int warp_first_channel = map.channel / kWarpChannels * kWarpChannels, lane_channel = lane / kRowLanes;
    const int row = tile.row + ThreadOrigin(p).row, column = tile.column + lane % kRowLanes * 2;
    // Rows from the warp's first one on, and channels from the lane's first one on, that lie inside the output.
    const int rows_left = column < p.out_width ? p.out_height - row : 0;
    const int channels_left = p.out_channels - tile.first_channel - warp_first_channel - lane_channel;
    const int64_t channel_start =
        (int64_t(tile.sample) * p.out_channels + tile.first_channel + warp_first_channel + lane_channel) * map.plane;
    T* const to = static_cast<T*>(p.out) + channel_start + int64_t(row) * p.out_width + column;
    const bool even = p.out_width % 2 == 0;
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r) {
        __syncwarp();
#pragma unroll
        for (int i = 0; i < kThreadValues / kThreadRows; i += 2) {
            const int o = i / (2 * kPairs), pair = i / 2 % kPairs, pixel = r * 2 * kPairs + pair * 2;
            const int c = map.channel + o * kChannelStride;
            const OutputCoefficients coefficients = shared.coefficients[c];
            float* const buffered = row_buffer + (c - warp_first_channel) * kRowBufferPitch + pair * 8 + lane % 4 * 2;
            *reinterpret_cast<float2*>(buffered) =
                make_float2(normalize(values[o][pixel], coefficients), normalize(values[o][pixel + 1], coefficients));
        }
        __syncwarp();
        float2 pairs[kWarpChannels / kChannelsAtOnce];
#pragma unroll
        for (int c = 0; c < kWarpChannels; c += kChannelsAtOnce) {
            pairs[c / kChannelsAtOnce] = *reinterpret_cast<const float2*>(
                row_buffer + (c + lane_channel) * kRowBufferPitch + lane % kRowLanes * 2);
        }
        if (r >= rows_left) continue;
        T* target = to + r * p.out_width;
#pragma unroll
        for (int c = 0; c < kWarpChannels; c += kChannelsAtOnce) {
            const Pack<T, 2> pack = {T(pairs[c / kChannelsAtOnce].x), T(pairs[c / kChannelsAtOnce].y)};
            if (c < channels_left && even) *reinterpret_cast<Pack<T, 2>*>(target) = pack;
            if (c < channels_left && !even) target[0] = pack.values[0];
            if (c < channels_left && !even && column + 1 < p.out_width) target[1] = pack.values[1];
            target += int64_t(kChannelsAtOnce) * map.plane;
        }
    }
}
// Writes the tile's output. With tensor cores the row buffer takes stage_x's memory: the convolution is done with it.
template <typename T>
__device__ __forceinline__ void write_output(
    const Arguments& p, const Tile& tile, ThreadTile& values, const Shared& shared, float* row_buffer) {
    const OutputMap map(p, tile);
    if constexpr (kTensorCores) {
        write_rows<T>(p, tile, values, map, shared, row_buffer + read_thread() / 32 * kWarpChannels * kRowBufferPitch);
        __syncthreads();  // because the next stage overwrites the row buffer
    } else {
#pragma unroll
        for (int o = 0; o < kThreadChannels; ++o) {
            const OutputCoefficients coefficients = shared.coefficients[map.channel + o * kChannelStride];
#pragma unroll
            for (int i = 0; i < kThreadPixels; ++i) values[o][i] = normalize(values[o][i], coefficients);
#pragma unroll
            for (int i = 0; i < kThreadPixels; i += kChunkPixels) {
                store_pixels(static_cast<T*>(p.out), map, o, i, reinterpret_cast<Chunk&>(values[o][i]));
            }
        }
    }
}

// By a warp: adds up g and g (v - mean) of its channels. Both are 0 outside the output, where g is loaded as 0.
template <typename T>
__device__ __forceinline__ void sum_gradients(
    const Arguments& p, const Tile& tile, const ThreadTile& h, const OutputMap& map, Shared& shared) {
    CompensatedSum sums[2 * kThreadChannels] = {};
#pragma unroll
    for (int i = 0; i < kThreadValues; i += kChunkPixels) {
        const int o = i / kThreadPixels, begin = i % kThreadPixels, c = map.channel + o * kChannelStride;
        const int group = min(tile.first_channel + c, p.out_channels - 1) / p.group_channels;
        const float mean = p.statistics[int64_t(tile.sample) * p.groups + group].mean;
        const float scale = shared.parameters[c].scale;
        Chunk g;
        load_pixels(static_cast<const T*>(p.g), map, o, begin, g);
#pragma unroll
        for (int k = 0; k < kChunkPixels; ++k) {
            sums[o].add<true>(g[k]);
            float& product_sum = sums[kThreadChannels + o].sum;
            product_sum = fmaf(g[k], activation(h[o][begin + k] * scale) - mean, product_sum);
        }
        __syncwarp();  // otherwise nvcc moves all loads of g to the front, and runs out of registers
    }
    store_warp_sums<true>(sums, {}, shared);
}
// By a warp: writes dh = dz scale, where dz = dv activation_gradient(z) and z = h scale. The sums that it adds up, of
// dz and of dz h, lack the factor rstd.
template <typename T>
__device__ __forceinline__ void write_dh(
    const Arguments& p, const ThreadTile& h, const OutputMap& map, Shared& shared) {
    CompensatedSum sums[2 * kThreadChannels] = {};
#pragma unroll
    for (int i = 0; i < kThreadValues; i += kChunkPixels) {
        const int o = i / kThreadPixels, begin = i % kThreadPixels, c = map.channel + o * kChannelStride;
        Chunk g, dh;
        load_pixels(static_cast<const T*>(p.g), map, o, begin, g);
        const OutputCoefficients coefficients = shared.coefficients[c];
        const float scale = shared.parameters[c].scale;
#pragma unroll
        for (int k = 0; k < kChunkPixels; ++k) {
            const float h_value = h[o][begin + k], z = h_value * scale;
            const float mean_terms = fmaf(activation(z) - coefficients.mean, coefficients.v_factor, coefficients.shift);
            const float dv_over_rstd = fmaf(coefficients.factor, g[k], -mean_terms);
            const float dz_over_rstd = map.valid_mask >> (begin + k) & 1 ? dv_over_rstd * activation_gradient(z) : 0.0f;
            sums[o].sum += dz_over_rstd;
            sums[kThreadChannels + o].sum = fmaf(dz_over_rstd, h_value, sums[kThreadChannels + o].sum);
            dh[k] = dz_over_rstd * coefficients.rstd * scale;
        }
        if (sizeof(T) == 2 || p.dh_type == 0) store_pixels(static_cast<T*>(p.out), map, o, begin, dh);
        else if (p.dh_type == 1) store_pixels(static_cast<__half*>(p.out), map, o, begin, dh);
        else store_pixels(static_cast<__nv_bfloat16*>(p.out), map, o, begin, dh);
        __syncwarp();  // as in sum_gradients
    }
    store_warp_sums<false>(sums, {}, shared);
}

// By the first warp, after __syncthreads: writes the tile's parameter sums of dbias and dscale.
__device__ __forceinline__ void write_bias_scale_sums(const Arguments& p, const Tile& tile, const Shared& shared) {
    const int lane = read_thread();
    if (lane >= min(p.tile_channels, p.out_channels - tile.first_channel)) return;
    const double2 totals = sums_of_warps(p, tile, shared, lane);
    const double rstd = shared.coefficients[lane].rstd, scale = shared.parameters[lane].scale;
    parameter_sum(p, tile, kDBias, lane) = totals.x * rstd * scale;
    parameter_sum(p, tile, kDScale, lane) = totals.y * rstd;
}

// By a thread, in place of a convolution: loads its values of conv(x).
template <typename T>
__device__ __forceinline__ void load_convolved(const Arguments& p, const Tile& tile, ThreadTile& values) {
    const OutputMap map(p, tile);
#pragma unroll
    for (int i = 0; i < kThreadValues; i += kChunkPixels) {
        auto& to = reinterpret_cast<Chunk&>(values[i / kThreadPixels][i % kThreadPixels]);
        load_pixels(static_cast<const T*>(p.x), map, i / kThreadPixels, i % kThreadPixels, to);
    }
}
// Adds the biases and, in the forward, computes the activation. The backward sets h to 1 outside the output: g is 0
// there, but an infinite weight or x may make h NaN; NaN times 0 is NaN. (Not 0: 0 times an infinite scale is NaN.)
template <Direction DIRECTION>
__device__ __forceinline__ void add_bias_and_activate(
    const Arguments& p, const Tile& tile, const Shared& shared, ThreadTile& values) {
    const ThreadOrigin origin(p);
#pragma unroll
    for (int o = 0; o < kThreadChannels; ++o) {
        const ChannelParameters parameters = shared.parameters[origin.channel + o * kChannelStride];
#pragma unroll
        for (int i = 0; i < kThreadPixels; ++i) {
            values[o][i] += parameters.bias;
            if (DIRECTION == kForward) values[o][i] = activation(values[o][i] * parameters.scale);
        }
    }
    if constexpr (DIRECTION == kBackward) {
        const OutputMap map(p, tile);
        if (__all_sync(~0u, map.all_valid())) return;
#pragma unroll
        for (int i = 0; i < kThreadValues; ++i) {
            float& value = values[i / kThreadPixels][i % kThreadPixels];
            value = map.valid_mask >> i % kThreadPixels & 1 ? value : 1.0f;
        }
    }
}
template <typename T, Direction DIRECTION>
__global__ void __launch_bounds__(kThreads, !kTensorCores && DIRECTION == kInputGradient ? 1 : kBlocksPerSM)
    convolve_and_normalize(const __grid_constant__ Arguments p) {
    // Dynamic shared memory: stage_x | weights of all stages, or of one unless keeps_weights | copied_x if kConvertsX.
    extern __shared__ float4 dynamic[];
    __shared__ Shared shared;
    float* const stage_x = reinterpret_cast<float*>(dynamic);
    float* const weights = stage_x + p.x_floats;
    constexpr bool kConvertsX = sizeof(T) == 2 || kTensorCores;  // else copy_x writes to stage_x
    T* const copied_x =
        reinterpret_cast<T*>(kConvertsX ? weights + (p.keeps_weights ? p.stages : 1) * p.weight_floats : stage_x);
    if (read_thread() == 0) shared.tiles[0].set(p, blockIdx.x);
    if (kTensorCores && read_thread() <= kMaxTaps) {
        const int tap = read_thread() < p.kernel_size * p.kernel_size ? read_thread() : 0;
        shared.tap_offsets[read_thread()] = (tap / p.kernel_size * kPitch + tap % p.kernel_size) * 16;
    }
    if (read_thread() < kMaxTileChannels) {  // also channels that do not exist: their values are computed, but not used
        shared.coefficients[read_thread()] = {0, 1, 0};  // so in the gradient of x the output is `values`
        shared.parameters[read_thread()] = {};
    }
    __syncthreads();
    copy_x<T>(p, shared.tiles[0], 0, copied_x);
    // Two blocks of a multiprocessor that begin together also wait and store together. So the grid's second half, whose
    // blocks mostly share multiprocessors with those of the first, begins later, by half of a tile's time on an H200.
    // Without this delay the kernel takes 1.02 times as long, in 16 bits 1.00. Where a block has few tiles, the delay
    // costs more than it saves. In the backward it saves nothing.
    if (DIRECTION == kForward && p.all_tiles / kMinTilesToStagger >= gridDim.x && blockIdx.x >= gridDim.x / 2)
        __nanosleep(9000);
#pragma unroll 1
    for (int current = 0; shared.tiles[current].number < p.all_tiles; current ^= 1) {
        const Tile& tile = shared.tiles[current];
        Tile& next = shared.tiles[current ^ 1];
        ThreadTile values = {};  // conv(x); then, from add_bias_and_activate on, h or, in the forward, v
        float largest_inverse_prescale = 0;  // of the tile's stages
        const bool loads_weights = !p.keeps_weights || tile.number == int(blockIdx.x);
        if (!p.keeps_weights) __syncthreads();  // other warps may still read the previous tile's parameters
        if (loads_weights && DIRECTION != kInputGradient) load_parameters<T>(p, tile.first_channel, shared);
        for (int first_in_channel = 0; first_in_channel < p.in_channels; first_in_channel += p.stage_channels) {
            const int stage = first_in_channel / p.stage_channels;
            const int next_in_channel = first_in_channel + p.stage_channels;
            const int slot = p.keeps_weights ? stage : 0;  // where shared memory has the stage's weights
            float* const stage_weights = weights + slot * p.weight_floats;
            if (stage > 0) __syncthreads();  // warps may still read what is overwritten now
            if (stage > 0 && !kConvertsX) copy_x<T>(p, tile, first_in_channel, copied_x);
            if (loads_weights) {
                shared.weight_inverse_prescales[slot] =
                    load_weights<T, DIRECTION>(p, tile.first_channel, first_in_channel, stage_weights, shared);
                if (kTensorCores && kPieces<T> == 2) __syncthreads();  // load_weights and convert_x use shared.largest
            }
            const float inverse_prescale =
                shared.weight_inverse_prescales[slot] * convert_x<T>(p, first_in_channel, copied_x, stage_x, shared);
            largest_inverse_prescale = fmaxf(largest_inverse_prescale, inverse_prescale);
            if (next_in_channel < p.in_channels && kConvertsX) copy_x<T>(p, tile, next_in_channel, copied_x);
            __syncthreads();
            convolve_stage<T, DIRECTION>(p, stage_x, stage_weights, shared, first_in_channel, inverse_prescale, values);
        }
        if (read_thread() == 0) next.set(p, tile.number + gridDim.x);
        if (DIRECTION != kInputGradient && p.stages == 0) {
            load_convolved<T>(p, tile, values);
            __syncthreads();  // for the parameters
        } else if constexpr (kTensorCores || DIRECTION == kInputGradient) {
            recompute_in_float<T, DIRECTION>(p, tile, shared, largest_inverse_prescale, values);
        }
        if (DIRECTION == kInputGradient) {
            __syncthreads();
            if (next.number < p.all_tiles) copy_x<T>(p, next, 0, copied_x);
            write_output<T>(p, tile, values, shared, stage_x);
            continue;
        }
        add_bias_and_activate<DIRECTION>(p, tile, shared, values);
        if (p.mode != kOutputOnly) {
            const OutputMap map(p, tile);
            if (DIRECTION == kBackward) sum_gradients<T>(p, tile, values, map, shared);
            else sum_values(values, map, shared);
        }
        __syncthreads();
        if (p.mode != kOutputOnly && read_thread() < 32) publish<DIRECTION>(p, tile, shared);
        if (next.number < p.all_tiles && p.stages > 0) copy_x<T>(p, next, 0, copied_x);  // while other blocks publish
        if (p.mode == kSumsOnly) {
            __syncthreads();
            if (shared.completes_sample) add_up_sample(p, tile.sample);
            continue;
        }
        if (p.mode == kFused && read_thread() == 0) await_sample(p, tile.sample);
        __syncthreads();
        compute_coefficients<DIRECTION>(p, tile, shared);
        __syncthreads();
        if (DIRECTION == kBackward) {
            write_dh<T>(p, values, OutputMap(p, tile), shared);
            __syncthreads();
            if (read_thread() < 32) write_bias_scale_sums(p, tile, shared);
        } else {
            write_output<T>(p, tile, values, shared, stage_x);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// The launches. `sizes` has nine numbers: samples, in_channels, height, width, out_channels, groups, rows of the
// convolution's kernel, type of x, type of dh (0 float, 1 half, 2 bfloat16).

static Arguments plan(const int64_t* sizes, int direction) {
    Arguments p = {};
    int* const fields[] = {&p.samples, &p.in_channels, &p.height, &p.width, &p.out_channels, &p.groups, &p.kernel_size};
    for (int i = 0; i < 7; ++i) *fields[i] = int(sizes[i]);
    p.dh_type = int(sizes[8]);
    p.group_channels = p.out_channels / p.groups;
    p.pad = direction == kInputGradient ? p.kernel_size - 1 : 0;
    p.out_height = p.height + 2 * p.pad - p.kernel_size + 1;
    p.out_width = p.width + 2 * p.pad - p.kernel_size + 1;
    p.inverse_count = 1.0 / (double(p.group_channels) * p.out_height * p.out_width);
    p.tile_channels_log2 = p.out_channels <= 16 ? 4 : 5;
    p.tile_channels = 1 << p.tile_channels_log2;
    p.channel_tiles = (p.out_channels + p.tile_channels - 1) / p.tile_channels;
    p.max_group_tiles = p.tile_channels % p.group_channels == 0 ? 1 : (p.group_channels - 2) / p.tile_channels + 2;
    p.tile_rows = kThreads * kThreadValues / p.tile_channels / kTileColumns;
    p.lines = p.tile_rows + p.kernel_size - 1;
    p.column_tiles = (p.out_width + kTileColumns - 1) / kTileColumns;
    p.pixel_tiles = (p.out_height + p.tile_rows - 1) / p.tile_rows * p.column_tiles;
    p.sample_tiles = p.pixel_tiles * p.channel_tiles;
    p.all_tiles = p.samples * p.sample_tiles;
    return p;
}
static int64_t counter_bytes(const Arguments& p) { return int64_t(p.samples) * kCounterStride * sizeof(unsigned); }

// Computes the bytes of the workspace (`counters`, `group_sums`) and the rows of parameter_sums.
extern "C" void conv_workspace_sizes(const int64_t* sizes, int64_t* bytes, int64_t* parameter_sum_rows) {
    const Arguments p = plan(sizes, kForward);
    *parameter_sum_rows = int64_t(p.samples) * p.pixel_tiles;
    *bytes = counter_bytes(p) + *parameter_sum_rows * p.groups * p.max_group_tiles * int64_t(sizeof(double2));
}

#define RETURN_ERROR_OF(call) \
    if (const cudaError_t error = (call)) return error

template <typename T, Direction DIRECTION> static cudaError_t launch(Arguments p, cudaStream_t stream) {
    auto* const kernel = convolve_and_normalize<T, DIRECTION>;
    int device, sms, sm_bytes, max_block_bytes, blocks_per_sm;
    RETURN_ERROR_OF(cudaGetDevice(&device));
    RETURN_ERROR_OF(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
    RETURN_ERROR_OF(cudaDeviceGetAttribute(&sm_bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device));
    RETURN_ERROR_OF(cudaDeviceGetAttribute(&max_block_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    cudaFuncAttributes attributes;
    RETURN_ERROR_OF(cudaFuncGetAttributes(&attributes, kernel));
    // Always the most, not this launch's bytes: so threads that launch at once do not lower each other's limit.
    const int dynamic_bytes = max_block_bytes - int(attributes.sharedSizeBytes);
    RETURN_ERROR_OF(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, dynamic_bytes));
    const bool tensor_cores = uses_tensor_cores(attributes.ptxVersion);  // 80 where 9.0 runs 8.0's PTX
    // Sets stage_channels, x_floats and weight_floats. Returns the bytes of dynamic memory with one stage's weights.
    const auto set_stage = [&](int stage_channels) {
        p.stage_channels = stage_channels;
        const int channel_pixels = p.lines * kPitch, taps = p.kernel_size * p.kernel_size, k_steps = (taps + 1) / 2;
        // Of all 8 channels' pieces, two in a float: x's at a pixel, or an output channel's weights at a tap.
        const int pieces_floats = kMaxStageChannels * kPieces<T> / 2;
        p.x_floats =
            tensor_cores ? std::max(channel_pixels * pieces_floats, kRowBufferFloats) : channel_pixels * stage_channels;
        p.weight_floats = p.tile_channels * (tensor_cores ? k_steps * 2 * pieces_floats : taps * stage_channels);
        const int copied_values = tensor_cores || sizeof(T) == 2 ? stage_channels * channel_pixels : 0;  // kConvertsX
        return 4 * (p.x_floats + p.weight_floats) + copied_values * int(sizeof(T));
    };
    int bytes = set_stage(tensor_cores ? kMaxStageChannels : std::clamp(p.in_channels, 1, kMaxStageChannels));
    const auto two_blocks_fit = [&](int block_bytes) {  // in a multiprocessor, which reserves 1 KiB for each block
        return kBlocksPerSM * (block_bytes + int(sizeof(Shared)) + 1024) <= sm_bytes;
    };
    // Without tensor cores the stages become smaller until two blocks fit.
    while (!tensor_cores && p.stage_channels > 1 && !two_blocks_fit(bytes)) bytes = set_stage(p.stage_channels / 2);
    p.stages = (p.in_channels + p.stage_channels - 1) / p.stage_channels;
    const int other_stages_bytes = 4 * p.weight_floats * (p.stages - 1);
    const bool can_stay = p.channel_tiles == 1 && 1 <= p.stages && p.stages <= kMaxStages;
    p.keeps_weights = can_stay && (p.stages == 1 || two_blocks_fit(bytes + other_stages_bytes));
    if (p.keeps_weights) bytes += other_stages_bytes;
    RETURN_ERROR_OF(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks_per_sm, kernel, kThreads, bytes));
    int grid = std::min(std::min(blocks_per_sm, kBlocksPerSM) * sms, p.all_tiles);
    if (DIRECTION == kInputGradient) {
        p.mode = kOutputOnly;
        kernel<<<grid, kThreads, bytes, stream>>>(p);
        return cudaGetLastError();
    }
    RETURN_ERROR_OF(cudaMemsetAsync(p.counters, 0, counter_bytes(p), stream));
    if (grid >= p.sample_tiles) {
        // In round n each block computes its n-th tile. In a grid of whole samples, one round computes all tiles of a
        // sample. In other grids a sample may begin in one round and end in the next: its first tiles wait for the
        // second round, and the kernel takes 1.03 times as long. So the grid is of whole samples, if that leaves out at
        // most 1/8 of the blocks.
        const int whole_samples_grid = grid / p.sample_tiles * p.sample_tiles;
        if (8 * whole_samples_grid >= 7 * grid) grid = whole_samples_grid;
        p.mode = kFused;
        void* arguments[] = {&p};
        const cudaError_t launch_error =
            cudaLaunchCooperativeKernel(kernel, dim3(grid), dim3(kThreads), arguments, bytes, stream);
        if (launch_error == cudaSuccess) return launch_error;
        cudaGetLastError();  // clears the error of the refused launch; two launches follow instead
    }
    for (const Mode mode : {kSumsOnly, kOutputOnly}) {
        p.mode = mode;
        kernel<<<grid, kThreads, bytes, stream>>>(p);
    }
    return cudaGetLastError();
}

// pointers: x, weight, conv_bias, bias, scale, gamma, beta, statistics, workspace, out. In the backward: dh in place of
// out, then g and parameter_sums. For the gradient of x: dh, weight, seven that are unused, dx; and `sizes` has dh's
// sizes in place of x's, and x's channels as out_channels. Returns a cudaError_t.
extern "C" int conv_launch(
    void* const* pointers, const int64_t* sizes, double eps, int direction, cudaStream_t stream) {
    Arguments p = plan(sizes, direction);
    const void** const inputs[] = {&p.x, &p.weight, &p.conv_bias, &p.bias, &p.scale, &p.gamma, &p.beta};
    for (int i = 0; i < 7; ++i) *inputs[i] = pointers[i];
    p.statistics = static_cast<Statistics*>(pointers[7]);
    p.counters = static_cast<unsigned*>(pointers[8]);
    p.group_sums = reinterpret_cast<double2*>(static_cast<char*>(pointers[8]) + counter_bytes(p));
    p.out = pointers[9];
    p.eps = float(eps);
    if (direction == kBackward) {
        p.g = pointers[10];
        p.parameter_sums = static_cast<double*>(pointers[11]);
    }
    const auto launch_as = [&](auto type_tag) {
        using T = decltype(type_tag);
        if (direction == kForward) return launch<T, kForward>(p, stream);
        return direction == kBackward ? launch<T, kBackward>(p, stream) : launch<T, kInputGradient>(p, stream);
    };
    return sizes[7] == 0 ? launch_as(float()) : sizes[7] == 1 ? launch_as(__half()) : launch_as(__nv_bfloat16());
}
"""

CPP_SOURCE = r"""
#line 1 "CPP_SOURCE in conv_sigmoid_group_norm.py"
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/conv2d.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/group_norm.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>
#ifdef WITH_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif
#include <sys/mman.h>
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>

namespace {
using at::Tensor;
using Outputs = std::tuple<Tensor, Tensor>;
using Gradients = std::tuple<Tensor, Tensor, Tensor>;
// `parameters`, always of x's dtype, are the convolution's weight and bias, bias, scale, and norm's weight and bias. A
// weight of (out_channels, 0, 1, 1) says that x is the convolution's output without its bias.
enum { kWeight, kConvBias, kBias, kScale, kGamma, kBeta };

// The output, and the Statistics of each group of each sample: mean, mean_lo, rstd (on a CPU zeros).
Outputs forward_meta(const Tensor& x, at::TensorList parameters, int64_t groups, double) {
    const Tensor& weight = parameters[kWeight];
    const auto out_height = x.sym_size(2) - weight.sym_size(2) + 1;
    const auto out_width = x.sym_size(3) - weight.sym_size(3) + 1;
    return {at::empty_symint({x.sym_size(0), weight.sym_size(0), out_height, out_width}, x.options()),
        at::empty_symint({x.sym_size(0), groups, 3}, x.options().dtype(at::kFloat))};
}
// ---- on a CPU: a direct convolution in registers, then the other operations while the values are in a cache. A thread
// computes a band at a time: some rows of four channels of a sample. `conv_out`, the convolution without biases, has
// x's row length: its pixel (row, column) is at index row * width + column. Each value is a sum of terms; a term is a
// weight times the x that lies term_offsets[term] from the pixel. So a band is one long row. It is cut into tiles,
// which are not CUDA_SOURCE's: kTilePixels pixels of the four channels. A slice is the fewest channels that are whole
// groups and whole channel tiles, of four. If there are many slices, a thread takes a slice through all steps;
// otherwise all bands come first, then all channels.
//
//     x's rows, width 8      0 1 2 3 4 5 6 7 | 8 9 10 11 12 13 14 15 | ...
//     conv_out of 3 x 3      0 1 2 3 4 5 - - | 8 9 10 11 12 13  -  - | ...      "-" mixes two rows, and is left out
//
// A tile's sums, of the band's 4 channels x 3 vectors, fill 12 of AVX2's 16 registers, or 4 x 6 fill 24 of AVX512's 32;
// a loaded value of x is used in four products. The thread also prefetches `out`, about where its band will go: that
// makes the whole 1.1 times as fast. Then, while the band is in the first-level cache, the thread computes the
// activation, adds up values and squares in double, and copies the band to `out`. Later normalize_channels reads and
// writes `out`.
#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
using Vector = float __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
constexpr int kTileChannels = 4;
constexpr int kTileVectors = kLanes == 16 ? 6 : 3;
constexpr int kTilePixels = kTileVectors * kLanes;
constexpr int64_t kBandPixels = 1024;  // per channel, at most (or one row, if longer): 4 KiB of values
constexpr int64_t kMaxSumTerms = 72;  // 8 channels of 3x3; longer sums are split, because rounding errors grow
constexpr int64_t kMaxTerms = 160;  // terms of a value; with more, PyTorch's convolution is as fast
constexpr int64_t kGrain = 32768;  // least values per thread: for fewer, another thread does not pay (measured)
constexpr int64_t kCacheLineFloats = 16;  // of 64 bytes
constexpr size_t kMmapThreshold = 32 << 20;  // glibc's largest threshold: malloc maps a larger block anew each time

// Computes a tile's sums of `terms` terms in registers. Writes them to conv_out or, if `adds`, adds them to it.
void convolve_tile(const float* x, const int64_t* term_offsets, int64_t terms, const float* packed_weights,
    float* conv_out, int64_t channel_stride, bool adds) {
    Vector sums[kTileChannels][kTileVectors] = {};
    for (int64_t term = 0; term < terms; ++term) {
        Vector pixels[kTileVectors];
#pragma GCC unroll 6
        for (int i = 0; i < kTileVectors; ++i) {
            pixels[i] = *reinterpret_cast<const Vector*>(x + term_offsets[term] + i * kLanes);
        }
#pragma GCC unroll 4
        for (int c = 0; c < kTileChannels; ++c) {
#pragma GCC unroll 6
            for (int i = 0; i < kTileVectors; ++i) sums[c][i] += packed_weights[term * kTileChannels + c] * pixels[i];
        }
    }
#pragma GCC unroll 4
    for (int c = 0; c < kTileChannels; ++c) {
#pragma GCC unroll 6
        for (int i = 0; i < kTileVectors; ++i) {
            Vector& to = *reinterpret_cast<Vector*>(conv_out + c * channel_stride + i * kLanes);
            to = adds ? to + sums[c][i] : sums[c][i];
        }
    }
}

// 2^t in vectorizable operations. t = n + f; n becomes the exponent's bits, a polynomial gives 2^f, |f| <= 0.5. The
// relative error is at most 2.4e-7 for t from -126 to 127.5; above, the result is infinite; below, 2^-126.
inline float exp2_approx(float t) {
    t = std::min(std::max(t, -126.0f), 128.0f);  // in this order they keep a NaN
    constexpr float kRound = 12582912 + 127;  // 1.5 * 2^23: the sum has no fraction, and ends with the bits of n + 127
    const float rounded = t + kRound;
    const float f = t - (rounded - kRound);
    float power = 1.32764725e-3f;
    for (float c : {9.67554096e-3f, 5.55071309e-2f, 2.40221202e-1f, 6.93146944e-1f, 1.00000012f}) power = power * f + c;
    uint32_t bits;
    std::memcpy(&bits, &rounded, sizeof(bits));
    bits <<= 23;
    float two_to_n;
    std::memcpy(&two_to_n, &bits, sizeof(bits));
    return power * two_to_n;
}
inline float reciprocal_approx(float v) { return 1 / v; }
float activation(float z);  // CUDA_SOURCE's, appended below
float activation_gradient(float z);

void activate(float* values, int64_t count, float bias, float scale) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) values[i] = activation((values[i] + bias) * scale);
}

struct Sums {
    double values = 0;
    double squares = 0;
};

Sums add_up(const float* v, int64_t count) {
    double sum = 0;
    double sum_squares = 0;
#pragma omp simd reduction(+ : sum, sum_squares)
    for (int64_t i = 0; i < count; ++i) {
        sum += v[i];
        sum_squares += double(v[i]) * v[i];
    }
    return {sum, sum_squares};
}

// v = (v - mean) * factor + beta. The mean is rounded to float; `shift` is beta, corrected for that. An infinite
// float(factor) gives NaN, as in PyTorch.
void normalize(float* v, int64_t count, double mean, double factor, float beta) {
    const float rounded_mean = float(mean);
    const float rounded_factor = float(factor);
    const float corrected = float(beta + (rounded_mean * factor - mean * factor));
    const float shift = std::isfinite(rounded_factor) ? corrected : NAN;
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) v[i] = (v[i] - rounded_mean) * rounded_factor + shift;
}

// By measurements the direct convolution is faster than PyTorch's if (1) a value has at most kMaxTerms terms, (2) there
// are at most 32 input channels (of these a band's x is 128 KiB, much of the second-level cache), (3) at most a quarter
// of the work is on pixels that mix two rows. The output, in x's row length, must also have kTilePixels values: in a
// smaller output the last tile would begin before x.
bool direct_is_faster(const Tensor& x, const Tensor& weight) {
    const int64_t out_height = x.size(2) - weight.size(2) + 1;
    const int64_t out_width = x.size(3) - weight.size(3) + 1;
    const bool few_terms = weight.size(1) <= 32 && weight[0].numel() <= kMaxTerms;
    return few_terms && x.size(3) >= 4 * (weight.size(3) - 1) &&
        (out_height - 1) * x.size(3) + out_width >= kTilePixels;
}

// Asks the system for pages of 2 MiB in place of 4 KiB. Of the 60 ms that one thread takes for 66 MB of output, the
// system takes 25 to make small pages; to make huge ones takes 1 ms.
void use_huge_pages(const Tensor& t) {
    constexpr uintptr_t kHugePage = 2 << 20;
    const auto begin = reinterpret_cast<uintptr_t>(t.mutable_data_ptr());
    const uintptr_t first_page = (begin / kHugePage + 1) * kHugePage;
    madvise(reinterpret_cast<void*>(first_page), begin + t.nbytes() - first_page, MADV_HUGEPAGE);
}

// The tensors, all contiguous; their sizes and addresses; how they are cut into bands, tiles and slices; the weights.
struct ConvolutionData {
    Tensor input;
    std::vector<Tensor> parameters;
    int64_t groups;
    double eps;
    int64_t samples = input.size(0);
    int64_t in_channels = input.size(1);
    int64_t height = input.size(2);
    int64_t width = input.size(3);
    int64_t out_channels = parameters[kWeight].size(0);
    int64_t kernel_height = parameters[kWeight].size(2);
    int64_t kernel_width = parameters[kWeight].size(3);
    int64_t terms = in_channels * kernel_height * kernel_width;
    int64_t out_height = height - kernel_height + 1;
    int64_t out_width = width - kernel_width + 1;
    int64_t plane = out_height * out_width;  // pixels of an output channel
    int64_t band_rows = std::clamp<int64_t>(kBandPixels / width, 1, out_height);
    int64_t bands = at::divup(out_height, band_rows);
    int64_t channel_tiles = at::divup(out_channels, kTileChannels);  // of a sample, 4 channels each
    int64_t group_channels = out_channels / groups;
    int64_t slice_channels = std::lcm(group_channels, int64_t(kTileChannels));  // whole groups and whole channel tiles
    int64_t slices = at::divup(out_channels, slice_channels);  // of a sample
    Tensor output = at::empty({samples, out_channels, out_height, out_width}, input.options());
    const float* x = input.const_data_ptr<float>();
    const float* weight = parameters[kWeight].const_data_ptr<float>();
    const float* conv_bias = parameters[kConvBias].const_data_ptr<float>();
    const float* bias = parameters[kBias].const_data_ptr<float>();
    const float* scale = parameters[kScale].const_data_ptr<float>();
    const float* gamma = parameters[kGamma].const_data_ptr<float>();
    const float* beta = parameters[kBeta].const_data_ptr<float>();
    float* out = output.mutable_data_ptr<float>();
    std::vector<int64_t> term_offsets = std::vector<int64_t>(terms);  // of each: from an output's pixel to the input's
    std::vector<float> packed_weights = std::vector<float>(channel_tiles * terms * kTileChannels);

    // Fills `term_offsets`, and `packed_weights` as (channel_tiles, terms, 4), with zeros for channels beyond the last.
    void prepare() {
        for (int64_t term = 0; term < terms; ++term) {
            const int64_t row = term / kernel_width % kernel_height;
            term_offsets[term] = (term / kernel_width / kernel_height * height + row) * width + term % kernel_width;
            for (int64_t out_channel = 0; out_channel < out_channels; ++out_channel) {
                const int64_t first = (out_channel / kTileChannels * terms + term) * kTileChannels;  // of four weights
                packed_weights[first + out_channel % kTileChannels] = weight[out_channel * terms + term];
            }
        }
    }
};

// The computation, and what its threads share.
struct DirectConvolution : ConvolutionData {
    std::vector<Sums> band_sums = std::vector<Sums>(samples * out_channels * bands);

    // `scratch`: kTilePixels values of slack (the last tile may begin before the band), then four channels' long rows.
    void compute_band(int64_t sample, int64_t channel_tile, int64_t band, float* scratch) {
        const int64_t first_row = band * band_rows;
        const int64_t rows = std::min(band_rows, out_height - first_row);
        const int64_t band_pixels = (rows - 1) * width + out_width;
        const int64_t channel_stride = band_rows * width + kTilePixels;
        const int64_t first_channel = channel_tile * kTileChannels;
        const int64_t channels = std::min<int64_t>(kTileChannels, out_channels - first_channel);
        const float* const band_x = x + (sample * in_channels * height + first_row) * width;
        float* const band_out = out + ((sample * out_channels + first_channel) * out_height + first_row) * out_width;
        float* const conv_out = scratch + kTilePixels;
        for (int64_t pixel = 0; pixel < band_pixels; pixel += kTilePixels) {
            const int64_t first_pixel = std::min(pixel, band_pixels - kTilePixels);  // the last tile ends with the band
            for (int64_t c = 0; c < channels; ++c) {
                for (int64_t i = first_pixel; i < first_pixel + kTilePixels; i += kCacheLineFloats) {
                    __builtin_prefetch(band_out + c * plane + i, 1);
                }
            }
            for (int64_t term = 0; term < terms; term += kMaxSumTerms) {
                const float* const tile_weights = &packed_weights[(channel_tile * terms + term) * kTileChannels];
                const int64_t sum_terms = std::min(kMaxSumTerms, terms - term);
                convolve_tile(band_x + first_pixel, &term_offsets[term], sum_terms, tile_weights,
                    conv_out + first_pixel, channel_stride, term > 0);
            }
        }
        for (int64_t c = 0; c < channels; ++c) {
            const int64_t channel = first_channel + c;
            float* const v = conv_out + c * channel_stride;
            float* const to = band_out + c * plane;
            activate(v, band_pixels, conv_bias[channel] + bias[channel], scale[channel]);
            for (int64_t i = out_width; i < band_pixels; i += width) std::fill_n(v + i, width - out_width, 0.0f);
            // Adds up the band as one row. The pixels that mix two rows are zeros by now, and add nothing.
            band_sums[(sample * out_channels + channel) * bands + band] = add_up(v, band_pixels);
            for (int64_t row = 0; row < rows; ++row) std::copy_n(v + row * width, out_width, to + row * out_width);
        }
    }

    // Two steps. Each takes a range of indices: of (samples, channel_tiles, bands), then of (samples, out_channels).
    void compute_bands(int64_t begin, int64_t end) {
        const std::unique_ptr<float[]> scratch(
            new float[kTilePixels + kTileChannels * (band_rows * width + kTilePixels)]);
        for (int64_t i = begin; i < end; ++i) {
            compute_band(i / bands / channel_tiles, i / bands % channel_tiles, i % bands, scratch.get());
        }
    }
    void normalize_channels(int64_t begin, int64_t end) {
        const int64_t sums_per_group = group_channels * bands;  // entries of band_sums
        const double count = double(group_channels) * plane;
        Sums sums;  // of the channel's group
        for (int64_t i = begin; i < end; ++i) {
            if (i == begin || i % group_channels == 0) {
                sums = Sums();
                for (int64_t k = 0; k < sums_per_group; ++k) {
                    const Sums& sums_of_band = band_sums[i / group_channels * sums_per_group + k];
                    sums.values += sums_of_band.values;
                    sums.squares += sums_of_band.squares;
                }
            }
            const double mean = sums.values / count;
            const double variance = std::max(sums.squares / count - mean * mean, 0.0);
            const double factor = gamma[i % out_channels] / std::sqrt(variance + eps);
            normalize(out + i * plane, plane, mean, factor, beta[i % out_channels]);
        }
    }

    // Both steps for a slice (whole groups and whole channel tiles), by one thread: its core's cache may hold the
    // values.
    void compute_slice(int64_t sample, int64_t slice) {
        const int64_t begin = slice * slice_channels;
        const int64_t end = std::min(begin + slice_channels, out_channels);
        const int64_t first_tile = sample * channel_tiles;
        compute_bands(
            (first_tile + begin / kTileChannels) * bands, (first_tile + at::divup(end, kTileChannels)) * bands);
        normalize_channels(sample * out_channels + begin, sample * out_channels + end);
    }
    void run() {
        prepare();
        const int64_t band_values = kTileChannels * band_rows * width;
        if (samples * slices >= 4 * at::get_num_threads()) {  // then the threads have about equal work
            const int64_t slice_values = at::divup(channel_tiles, slices) * bands * band_values;
            at::parallel_for(0, samples * slices, kGrain / slice_values + 1, [&](int64_t begin, int64_t end) {
                for (int64_t i = begin; i < end; ++i) compute_slice(i / slices, i % slices);
            });
            return;
        }
        at::parallel_for(0, samples * channel_tiles * bands, kGrain / band_values + 1,
            [&](int64_t begin, int64_t end) { compute_bands(begin, end); });
        at::parallel_for(0, samples * out_channels, kGrain / plane + 1,
            [&](int64_t begin, int64_t end) { normalize_channels(begin, end); });
    }
};

// Computes in float32. If PyTorch's convolution is faster, calls that, and writes v over its output.
Outputs forward_cpu(const Tensor& x, at::TensorList parameters, int64_t groups, double eps) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    if (x.scalar_type() != at::kFloat) {
        std::vector<Tensor> widened;
        for (const Tensor& t : parameters) widened.push_back(t.to(at::kFloat));
        const auto [out, statistics] = forward_cpu(x.to(at::kFloat), widened, groups, eps);
        return {out.to(x.scalar_type()), statistics};
    }
    const Tensor no_statistics = at::zeros({x.size(0), groups, 3}, at::kFloat);  // no backward on a CPU reads them
    if (direct_is_faster(x, parameters[kWeight])) {
        std::vector<Tensor> contiguous;
        for (const Tensor& t : parameters) contiguous.push_back(t.contiguous());
        DirectConvolution convolution{{x.contiguous(), contiguous, groups, eps}};
        if (convolution.output.nbytes() > kMmapThreshold) use_huge_pages(convolution.output);
        convolution.run();
        return {convolution.output, no_statistics};
    }
    const Tensor v = at::conv2d(x, parameters[kWeight], parameters[kConvBias]).contiguous();
    const Tensor bias = parameters[kBias].contiguous();
    const Tensor scale = parameters[kScale].contiguous();
    const int64_t plane = v.size(2) * v.size(3);
    at::parallel_for(0, v.size(0) * v.size(1), kGrain / plane + 1, [&](int64_t begin, int64_t end) {
        float* const values = v.mutable_data_ptr<float>();
        const float* const biases = bias.const_data_ptr<float>();
        const float* const scales = scale.const_data_ptr<float>();
        for (int64_t i = begin; i < end; ++i) {
            activate(values + i * plane, plane, biases[i % v.size(1)], scales[i % v.size(1)]);
        }
    });
    return {at::group_norm(v, groups, parameters[kGamma], parameters[kBeta], eps), no_statistics};
}

// For _check_activation.
std::tuple<double, double> activation_at(double z) { return {activation(float(z)), activation_gradient(float(z))}; }

// Returns the gradient of x, of type `dtype`; four rows, the gradients of beta, of gamma, of either bias (they are
// equal), and of scale; and the gradient of the convolution's weight. x's and the weight's are empty if not needed.
Gradients backward_meta(const Tensor& grad, const Tensor& x, at::TensorList parameters, const Tensor&,
    at::ScalarType dtype, bool needs_x, bool needs_weight) {
    const auto gradient_of = [](const Tensor& t, bool needed, at::ScalarType type) {
        return needed ? at::empty_symint(t.sym_sizes(), t.options().dtype(type)) : at::empty({0}, t.options());
    };
    const Tensor& weight = parameters[kWeight];
    return {gradient_of(x, needs_x, dtype),
        at::empty_symint({4, parameters[kBias].sym_numel()}, grad.options().dtype(at::kFloat)),
        gradient_of(weight, needs_weight, weight.scalar_type())};
}

#ifdef WITH_CUDA
enum { kForward, kBackward, kInputGradient };  // the directions in CUDA_SOURCE
extern "C" void conv_workspace_sizes(const int64_t* sizes, int64_t* bytes, int64_t* parameter_sum_rows);
extern "C" int conv_launch(void* const* pointers, const int64_t* sizes, double eps, int direction, cudaStream_t stream);

// A contiguous tensor whose address is a multiple of 16 bytes; that of a slice may not be.
Tensor aligned(const Tensor& t) {
    const Tensor ready = t.contiguous();
    return reinterpret_cast<uintptr_t>(ready.const_data_ptr()) % 16 == 0 ? ready : ready.clone();
}
int64_t dtype_code(at::ScalarType type) { return type == at::kFloat ? 0 : type == at::kHalf ? 1 : 2; }
// Raises an error if a launch failed, and clears it, so that the runtime does not report it after the next launch.
void check_launch(int error) {
    if (error == 0) return;
    cudaGetLastError();
    TORCH_CHECK(false, "launch failed: ", cudaGetErrorString(cudaError_t(error)));
}

// Launches the forward, or the backward if `grad` is defined; the backward returns its parameter_sums. `out` is the
// output or dh.
Tensor call_kernel(const Tensor& x, at::TensorList parameters, const Tensor& statistics, const Tensor& out, double eps,
    const Tensor& grad) {
    const Tensor& weight = parameters[kWeight];
    const int64_t sizes[] = {x.size(0), weight.size(1), x.size(2), x.size(3), weight.size(0), statistics.size(1),
        weight.size(2), dtype_code(x.scalar_type()), dtype_code(out.scalar_type())};
    int64_t bytes, parameter_sum_rows;
    conv_workspace_sizes(sizes, &bytes, &parameter_sum_rows);
    std::vector<Tensor> arguments = {aligned(x)};
    for (const Tensor& t : parameters) arguments.push_back(t.contiguous());
    arguments.insert(arguments.end(), {statistics, at::empty({bytes}, x.options().dtype(at::kByte)), out});
    Tensor parameter_sums;
    if (grad.defined()) {
        parameter_sums = at::empty({parameter_sum_rows, 4, weight.size(0)}, x.options().dtype(at::kDouble));
        arguments.insert(arguments.end(), {aligned(grad), parameter_sums});
    }
    std::vector<void*> pointers;
    for (const Tensor& t : arguments) pointers.push_back(t.data_ptr());
    check_launch(conv_launch(
        pointers.data(), sizes, eps, grad.defined() ? kBackward : kForward, c10::cuda::getCurrentCUDAStream()));
    return parameter_sums;
}
Outputs forward_cuda(const Tensor& x, at::TensorList parameters, int64_t groups, double eps) {
    const c10::cuda::CUDAGuard guard(x.device());
    auto [out, statistics] = forward_meta(x, parameters, groups, eps);
    if (out.numel() > 0) call_kernel(x, parameters, statistics, out, eps, {});
    return {out, statistics};
}
// dx is the convolution of dh with the rotated weights.
void input_gradient(const Tensor& dh, const Tensor& weight, const Tensor& dx) {
    const int64_t type = dtype_code(dh.scalar_type());
    const int64_t sizes[] = {
        dh.size(0), dh.size(1), dh.size(2), dh.size(3), weight.size(1), 1, weight.size(2), type, type};
    void* const pointers[10] = {dh.data_ptr(), weight.data_ptr(), 0, 0, 0, 0, 0, 0, 0, dx.data_ptr()};
    check_launch(conv_launch(pointers, sizes, 0, kInputGradient, c10::cuda::getCurrentCUDAStream()));
}
Gradients backward_cuda(const Tensor& grad, const Tensor& x, at::TensorList parameters, const Tensor& statistics,
    at::ScalarType dtype, bool needs_x, bool needs_weight) {
    const c10::cuda::CUDAGuard guard(x.device());
    const bool is_empty = grad.numel() == 0;
    auto [dx, parameter_grads, grad_weight] =
        backward_meta(grad, x, parameters, statistics, dtype, needs_x && is_empty, needs_weight);
    if (is_empty) return {dx.zero_(), parameter_grads.zero_(), grad_weight.zero_()};
    const Tensor dh = at::empty(grad.sizes(), grad.options().dtype(dtype));
    parameter_grads.copy_(
        call_kernel(x, parameters, statistics, dh, 0, grad).sum(at::IntArrayRef{0}, false, at::kDouble));
    if (parameters[kWeight].numel() == 0) return {needs_x ? dh : dx, parameter_grads, grad_weight};  // x is conv(x)
    const Tensor weight = parameters[kWeight].to(dtype).contiguous();
    const bool pytorch_computes_dx = needs_x && (weight.size(2) != 3 || weight.size(1) < 4);  // as fast as we are there
    if (needs_x && !pytorch_computes_dx) {
        dx = at::empty(x.sizes(), dh.options());
        input_gradient(dh, weight, dx);
    }
    if (pytorch_computes_dx || needs_weight) {
        const auto conv_grads = at::convolution_backward(dh, x.to(dtype), weight, at::nullopt, {1, 1}, {0, 0}, {1, 1},
            false, {0, 0}, 1, {pytorch_computes_dx, needs_weight, false});
        if (pytorch_computes_dx) dx = std::get<0>(conv_grads);
        if (needs_weight) grad_weight.copy_(std::get<1>(conv_grads));
    }
    return {dx, parameter_grads, grad_weight};
}
#endif

}  // namespace

TORCH_LIBRARY(NAMESPACE, m) {
    m.def("activation(float z) -> (float, float)", activation_at);
    m.def("forward(Tensor x, Tensor[] parameters, int groups, float eps) -> (Tensor, Tensor)");
    m.def("backward(Tensor grad, Tensor x, Tensor[] parameters, Tensor statistics, ScalarType dtype, bool needs_x,"
          " bool needs_weight) -> (Tensor, Tensor, Tensor)");
    m.impl("forward", torch::dispatch(c10::DispatchKey::CPU, forward_cpu));
    m.impl("forward", torch::dispatch(c10::DispatchKey::Meta, forward_meta));
    m.impl("backward", torch::dispatch(c10::DispatchKey::Meta, backward_meta));
#ifdef WITH_CUDA
    m.impl("forward", torch::dispatch(c10::DispatchKey::CUDA, forward_cuda));
    m.impl("backward", torch::dispatch(c10::DispatchKey::CUDA, backward_cuda));
#endif
    // Gradients go through the autograd.Function below; backward through an operator called directly raises an error.
    for (const char* name : {"forward", "backward"}) {
        m.impl(name, torch::dispatch(c10::DispatchKey::Autograd, torch::autograd::autogradNotImplementedFallback()));
    }
}
"""


# The text between the markers begins in the middle of a comment line: the `//` here makes that a comment again.
_before, _, _activation = CUDA_SOURCE.partition("// ACTIVATION")
_activation = _activation.partition("// END")[0].replace("__device__ __forceinline__", "inline")
CPP_SOURCE += f'#line {_before.count(chr(10)) - 1} "CUDA_SOURCE in conv_sigmoid_group_norm.py"\n'  # of compile errors
CPP_SOURCE += f"namespace {{ //{_activation} }}"


def _is_whole(library: pathlib.Path) -> bool:
    """Whether the library is what its build left: the build's last act is to write the library's digest beside it."""
    digest = library.with_suffix(".sha256")
    if not (os.access(library, os.R_OK) and os.access(digest, os.R_OK)):
        return False
    return digest.read_text() == hashlib.sha256(library.read_bytes()).hexdigest()


def _load(name: str, arch: str = "") -> str:
    """Compile CPP_SOURCE and, where there is a GPU, CUDA_SOURCE; return the namespace of their operators in torch.ops.

    GPU code is compiled for `arch` ("90a", say), else for what TORCH_CUDA_ARCH_LIST names, else for the GPUs present.
    The name ends in a hash of sources, targets, flags and torch's version. So a whole library of that name is loaded
    without a build, and edited copies do not collide. If a tool is missing, the RuntimeError says what to do.
    """
    gpus = range(torch.cuda.device_count() if torch.version.cuda else 0)
    cpp_flags = ["-O3", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", *["-DWITH_CUDA"] * bool(gpus)]
    simd = torch.backends.cpu.get_cpu_capability()
    if march := {"AVX2": "x86-64-v3", "AVX512": "x86-64-v4"}.get(simd):  # the two defines are for at::vec, where used
        cpp_flags += [f"-march={march}", f"-DCPU_CAPABILITY={simd}", f"-DCPU_CAPABILITY_{simd}"]
    cuda_flags = ["-O3", "--split-compile=0", *[f"-gencode=arch=compute_{arch},code=sm_{arch}"] * bool(arch)]
    present = sorted({torch.cuda.get_device_capability(gpu) for gpu in gpus})
    targets = os.environ.get("TORCH_CUDA_ARCH_LIST") or present
    if targets is present and not arch and min(present, default=(7, 5)) < (7, 5):
        raise RuntimeError(f"{name} needs GPUs of compute capability 7.5 or more: hide others by CUDA_VISIBLE_DEVICES")
    key = repr((CPP_SOURCE, CUDA_SOURCE, cpp_flags, cuda_flags, targets, torch.__version__))
    name = f"{name}_{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    if hasattr(getattr(torch.ops, name), "forward"):
        return name  # a reload, or a second copy of this file
    cache = os.environ.get("TORCH_EXTENSIONS_DIR") or "~/.cache/torch_extensions"
    folder = pathlib.Path(cache).expanduser() / name
    library = folder / f"{name}.so"
    if _is_whole(library):  # also where the cache is read-only, and where no compiler is installed
        torch.ops.load_library(library)
        return name
    if not os.environ.get("CXX", "c++").strip():  # set, but empty: PyTorch would run a command without a name
        del os.environ["CXX"]
    if not shutil.which("ninja"):  # pip puts it beside python, which is not on PATH if the environment is not activated
        os.environ["PATH"] = os.environ.get("PATH", os.defpath) + os.pathsep + os.path.dirname(sys.executable)
    needs = {"ninja": "pip install ninja", os.environ.get("CXX", "c++").split()[0]: "install g++, or set CXX"}
    if gpus:
        needs[f"{cpp_extension.CUDA_HOME or 'CUDA_HOME'}/bin/nvcc"] = "install the CUDA toolkit, and set CUDA_HOME"
    for tool in filter(lambda tool: not shutil.which(tool), needs):
        raise RuntimeError(f"building {name} needs {tool}, which is not there: {needs[tool]}")
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise RuntimeError(f"{folder} cannot be written: set TORCH_EXTENSIONS_DIR to a folder that can be")
    with open(folder / "build.lock", "w") as lock:
        # One process builds at a time. This lock ends with its process; PyTorch's own file, `lock`, outlives a build
        # that was killed (pytorch#189245). Where flock raises OSError, only PyTorch's lock is used.
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
            (folder / "lock").unlink(missing_ok=True)
        if _is_whole(library):  # another process built it while this one waited
            torch.ops.load_library(library)
            return name
        library.unlink(missing_ok=True)  # an interrupted build or a full disk left it incomplete
        # PyTorch builds a name once in a process: make it forget an attempt that failed.
        cpp_extension.JIT_EXTENSION_VERSIONER.entries.pop(name, None)
        cpp_extension.load_inline(
            name,
            CPP_SOURCE.replace("NAMESPACE", name),
            CUDA_SOURCE if gpus else None,
            extra_cflags=cpp_flags,
            extra_cuda_cflags=cuda_flags,
            build_directory=str(folder),
            is_python_module=False,
            no_implicit_headers=True,
        )
        library.with_suffix(".sha256").write_text(hashlib.sha256(library.read_bytes()).hexdigest())
    return name


NAMESPACE = _load("conv_sigmoid_group_norm")
_forward, _backward = getattr(torch.ops, NAMESPACE).forward, getattr(torch.ops, NAMESPACE).backward

# The dtypes that our kernels take: on a GPU all three, on a CPU float32 and the types for which it has no instructions
# (bfloat16 only with AVX). PyTorch's convolution takes up to 30 times as long in such a type as in float32.
_GPU_DTYPES = [torch.float32, torch.float16, torch.bfloat16]
_CPU_DTYPES = [torch.float32]
if not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_fp16_supported():
    _CPU_DTYPES.append(torch.float16)
if not torch.cpu._is_avx512_bf16_supported() and "AVX" in torch.backends.cpu.get_cpu_capability():
    _CPU_DTYPES.append(torch.bfloat16)


_RUN = "forward _conv_forward _check_input_dim _get_no_batch_dim _handle_no_batch_input _apply_instance_norm".split()
_METHODS = {  # PyTorch's own methods that calling these layers runs. The same text in all kernel files
    kind: [(name, getattr(kind, name)) for name in _RUN if hasattr(kind, name)]
    for kind in (nn.Linear, nn.Conv2d, nn.GroupNorm, nn.InstanceNorm2d)
}


def _is_unchanged(module: nn.Module, kind: type) -> bool:
    """Whether calling the module runs PyTorch's own methods of `kind` alone: no hooks, no tracing, no patches."""
    if type(module) is not kind:
        return False
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    if hooks or nn.modules.module._has_any_global_hook() or torch.jit.is_tracing():
        return False
    for name, function in _METHODS[kind]:
        method = getattr(module, name)
        if not isinstance(method, types.MethodType) or method.__func__ is not function:
            return False
    return True


def _exports_layers() -> bool:
    """Whether torch.export runs for ONNX, or with grad mode on: such programs have PyTorch's operators alone."""
    return torch.compiler.is_exporting() and (torch.is_grad_enabled() or torch.onnx.is_in_onnx_export())


# As torch.compiler.assume_constant_result does: PyTorch 2.11 and older trace torch.compiler.is_exporting as True.
_exports_layers._dynamo_marked_constant = True


def _activate(values: torch.Tensor, bias: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    values = values + bias  # line by line, as in the Model: each line frees the values of the line before
    values = values * scale
    return torch.sigmoid(values)


def _check_activation() -> None:
    """Raise an error unless `activation` is `_activate`, at NaN too, and its gradient is the difference quotient."""
    activation = getattr(torch.ops, NAMESPACE).activation
    z = torch.tensor([-30, -4.3, -3.4, -1.7, -0.6, 0.3, 1.1, 2.2, 3.4, 5.2, 8, 30], dtype=torch.float64, device="cpu")
    below, v, above = (_activate(z + step, 0, 1) for step in (-1e-3, 0, 1e-3))
    ours = z.new_tensor([activation(one) for one in z.tolist()])
    difference = (ours - torch.stack([v, (above - below) / 2e-3], 1)).abs().amax(1)
    ours_at_nan, models_at_nan = z.new_tensor(activation(torch.nan)[0]), _activate(z.new_tensor(torch.nan), 0, 1)
    nan_is_lost = bool(models_at_nan.isnan() and not ours_at_nan.isnan())
    if nan_is_lost or not difference.max() <= 1e-4:
        where = "NaN" if nan_is_lost else f"{z[difference.argmax()]:.1f}"
        functions = "activation and activation_gradient (in CUDA_SOURCE) and _activate"
        raise RuntimeError(f"{functions} compute different functions, see z = {where}: edit all three")


with torch._subclasses.fake_tensor.unset_fake_temporarily():  # also where the file is imported among fake tensors
    _check_activation()


def _normalize(v: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor, groups: int, eps: float) -> torch.Tensor:
    # nn.functional's raises the Model's error for one sample with one value per group, but takes 4 us longer.
    group_norm = nn.functional.group_norm if v.numel() == groups else torch.group_norm
    return group_norm(v, groups, gamma, beta, eps)


def _functional(x, weight, conv_bias, bias, scale, gamma, beta, groups: int, eps: float) -> torch.Tensor:
    """The Model's lines, as a function of its tensors."""
    # No variable keeps the convolution's output: `_activate` frees it.
    return _normalize(_activate(torch.conv2d(x, weight, conv_bias), bias, scale), gamma, beta, groups, eps)


def _is_nchw(t: torch.Tensor) -> bool:
    """Whether t is contiguous, and its strides are not also those of channels_last, as with some sizes of 1."""
    shape = t.shape
    return len(shape) == 4 and t.is_contiguous() and t.stride()[1::2] == (shape[2] * shape[3], 1)


_TENSOR_CLASSES = (nn.Parameter, torch.Tensor, FakeTensor)  # torch.export, not strict, runs a module with FakeTensors


def fits(tensors: tuple, groups: int) -> bool:
    """Whether `_run_kernels` takes the network's tensors: x, then the parameters in the operators' order."""
    x, weight, conv_bias, bias, scale, gamma, beta = tensors
    if torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0:
        return False
    for t in tensors:
        if type(t) not in _TENSOR_CLASSES:
            return False
    if not (x.is_cpu or x.is_cuda and torch.version.cuda) or _exports_layers():
        return False
    device, dtypes, compute_dtype = x.device, [x.dtype], x.dtype
    if torch.is_autocast_enabled(device.type):
        dtypes, compute_dtype = _GPU_DTYPES, torch.get_autocast_dtype(device.type)
        # Our output is float32, as on a GPU. Eager's on a CPU has the type of (conv_out + bias) * scale.
        if x.is_cpu and not bias.dtype == gamma.dtype == beta.dtype == torch.float32:
            return False
    if compute_dtype not in (_CPU_DTYPES if x.is_cpu else _GPU_DTYPES):
        return False
    if x.is_cpu and _wants_gradients(tensors) and (compute_dtype == torch.float32 or x.numel() < 2048):
        return False  # ATen does it; below 2048 values of 16 bits, converting them costs more than it saves
    for t in tensors:
        if t.dtype not in dtypes or t.device != device:
            return False
    if not _is_nchw(x) or not _is_nchw(weight):
        return False
    samples, in_channels, height, width = x.shape
    out_channels, weight_in_channels, kernel_height, kernel_width = weight.shape
    per_channel = (out_channels, 1, 1)
    if not 0 < in_channels == weight_in_channels or not 0 < 32 * out_channels < 2**31 or out_channels % groups != 0:
        return False
    if not bias.shape == scale.shape == per_channel:
        return False
    if not conv_bias.shape == gamma.shape == beta.shape == per_channel[:1]:
        return False
    out_height, out_width = height - kernel_height + 1, width - kernel_width + 1
    one_value_per_group = samples * (out_channels // groups) * out_height * out_width == 1  # and one sample
    if out_height < 1 or out_width < 1 or one_value_per_group:  # PyTorch raises an error
        return False
    if x.is_cpu:
        return True
    # The kernel counts channels, pixels and tiles in 32 bits.
    return _count_tiles(samples, out_channels, out_height, out_width) < 2**30 and height * width < 2**31 - 64


def _count_tiles(samples: int, out_channels: int, out_height: int, out_width: int) -> int:
    """The tiles of an output on a GPU, each of up to 2^14 values."""
    tile_channels = 16 if out_channels <= 16 else 32
    tile_rows = 512 // tile_channels
    pixel_tiles = ((out_height + tile_rows - 1) // tile_rows) * ((out_width + 31) // 32)
    return samples * ((out_channels + tile_channels - 1) // tile_channels) * pixel_tiles


def _convolves(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether our operators are given x, not conv2d(x, W). On a GPU: 3x3 and 1x1, and few input channels."""
    in_channels, kernel = weight.shape[1], tuple(weight.shape[2:])
    return x.is_cpu or kernel in ((1, 1), (3, 3)) and in_channels <= (32 if x.dtype == torch.float32 else 16)


def _wants_gradients(tensors: tuple) -> bool:
    """Whether gradients may be asked for, even if one of `tensors` is no tensor."""
    return torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in tensors)


def _is_batched(grad: torch.Tensor) -> bool:
    """Whether it stands for several gradients, as with is_grads_batched=True: our operators have no rule for that."""
    functorch = torch._C._functorch
    return functorch.is_batchedtensor(grad) or functorch.is_legacy_batchedtensor(grad)


class ConvSigmoidGroupNorm(torch.autograd.Function):
    """The whole network. If the weight has no input channels, x is the convolution's output, and this is the rest.

    The forward saves its inputs and statistics. The backward computes h again, convolving if the forward did.
    """

    @staticmethod
    def forward(ctx, groups, eps, x, *parameters):
        out, statistics = _forward(x, parameters, groups, eps)
        ctx.groups, ctx.eps, ctx.dtype = groups, eps, x.dtype
        if torch.is_autocast_enabled(x.device.type):  # the convolution's gradients are of 16 bits, as PyTorch's are
            ctx.dtype = torch.get_autocast_dtype(x.device.type)
        ctx.save_for_backward(x, *parameters, statistics)
        return out

    @staticmethod
    def backward(ctx, grad):
        (*tensors, statistics), needs = ctx.saved_tensors, ctx.needs_input_grad[2:]
        differentiable = torch.is_grad_enabled()  # create_graph=True
        if differentiable or not torch.compiler.is_compiling() and _is_batched(grad):  # then by PyTorch's operators
            with torch.enable_grad():
                # Views: if one of the tensors was computed from another, each still gets only its own gradient.
                tensors = [t.view_as(t) for t in tensors]
                x, weight, conv_bias, bias, scale, gamma, beta = tensors
                conv_out = torch.conv2d(x, weight, conv_bias) if weight.numel() > 0 else x + conv_bias.view(-1, 1, 1)
                out = _normalize(_activate(conv_out, bias, scale), gamma, beta, ctx.groups, ctx.eps)
                wanted = [t for t, need in zip(tensors, needs, strict=True) if need]
                grads = iter(torch.autograd.grad(out, wanted, grad, create_graph=differentiable))
            return None, None, *(next(grads) if need else None for need in needs)
        x, *parameters = tensors
        grad_x, parameter_grads, grad_weight = _backward(grad, x, parameters, statistics, ctx.dtype, *needs[:2])
        grad_beta, grad_gamma, grad_bias, grad_scale = parameter_grads.to(grad.dtype).unbind()  # one for both biases
        grads = (grad_x, grad_weight, grad_bias, grad_bias.clone(), grad_scale, grad_gamma, grad_beta)
        grads = (g.to(t.dtype).view_as(t) if need else None for g, t, need in zip(grads, tensors, needs, strict=True))
        return None, None, *grads


def _run_kernels(tensors: tuple, groups: int, eps: float) -> torch.Tensor:
    """The network by our operators; 16 bits with gradients on a CPU by PyTorch's, in float32."""
    x, weight, *others = tensors
    out_dtype, device = x.dtype, x.device.type
    if not _convolves(x, weight):  # a weight without input channels says that x is the convolution's output
        tensors = (torch.conv2d(x, weight), weight.new_empty((weight.shape[0], 0, 1, 1)), *others)
    if torch.is_autocast_enabled(device):  # the Model returns float32 there
        tensors, out_dtype = tuple(t.float() for t in tensors), torch.float32
    if not _wants_gradients(tensors):
        return _forward(tensors[0], tensors[1:], groups, eps)[0]
    if device != "cpu":
        return ConvSigmoidGroupNorm.apply(groups, eps, *tensors)
    with torch.autocast("cpu", enabled=False):
        return _functional(*(t.float() for t in tensors), groups, eps).to(out_dtype)


def _are_unchanged(conv: nn.Module, norm: nn.Module) -> bool:
    """Whether the layers are as constructed, without hooks, and eps is 1e-6 or more: above the variance's rounding."""
    unchanged = _is_unchanged(conv, nn.Conv2d) and _is_unchanged(norm, nn.GroupNorm) and norm.eps >= 1e-6
    return unchanged and (conv.stride, conv.padding, conv.dilation, conv.groups) == ((1, 1), (0, 0), (1, 1), 1)


def _tiles_are_underfilled(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether on a GPU the output has more than 512 tiles, and they so few values that PyTorch is faster: at 4 x 4
    pixels by 10 times. A tile takes as long however few values it has. The limits were measured at random shapes. Up to
    512 tiles take no longer than their launch."""
    if not isinstance(weight, torch.Tensor) or weight.dim() != 4:
        return False
    (samples, _, height, width), (out_channels, in_channels, kernel_height, kernel_width) = x.shape, weight.shape
    out_height, out_width = height - kernel_height + 1, width - kernel_width + 1
    tiles = _count_tiles(samples, out_channels, out_height, out_width)
    least_values = 5000 + 128 * in_channels * _convolves(x, weight)
    return tiles > 512 and samples * out_channels * out_height * out_width < least_values * tiles


def _eager_is_faster(tensors: tuple) -> bool:
    """Whether to skip `fits`, which takes some time itself.

    On a GPU eager is faster if the output's tiles are many and underfilled. On a CPU in float32 it is faster below 128
    pixels, where `fits` takes longer than our kernels save, and if gradients are wanted, which our kernels do not
    compute. In other types it is faster if images are too few and small for converting to pay.
    """
    x, weight = tensors[0], tensors[1]
    # Compiled code may be for any size. On a CPU the operator itself chooses anyway, by direct_is_faster.
    if type(x) is not torch.Tensor or torch.compiler.is_compiling() or x.dim() != 4:
        return False
    if x.is_cuda:
        return _tiles_are_underfilled(x, weight)
    if not x.is_cpu or torch.is_autocast_enabled("cpu"):
        return False
    is_small = x.shape[2] * x.shape[3] < 128
    if x.dtype == torch.float32:
        return is_small or _wants_gradients(tensors)
    return is_small and isinstance(weight, torch.Tensor) and x.numel() * weight.numel() < 2**19


def _read(module: nn.Module, name: str) -> torch.Tensor:
    """The attribute of that name. nn.Module's own look-up takes 0.6 us more: much for an image of a few pixels."""
    parameters = module._parameters
    return parameters[name] if name in parameters else getattr(module, name)


class ModelNew(nn.Module):
    """A drop-in for `Model`: the same constructor, attributes, parameters and state_dict.

    forward: x (N, in_channels, H, W), any floating dtype and layout; the output's layout and errors are the Model's.
    torch.export exports our operator under torch.no_grad, else the Model's layers, which can be trained and quantized.
    """

    def __init__(self, in_channels, out_channels, kernel_size, num_groups, bias_shape, scale_shape):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size)
        self.bias = nn.Parameter(torch.randn(bias_shape))
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.group_norm = nn.GroupNorm(num_groups, out_channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.jit.is_scripting():  # torch.jit.script compiles the Model's lines alone
            conv, norm = self.conv, self.group_norm
            if _are_unchanged(conv, norm):
                conv_parameters = _read(conv, "weight"), _read(conv, "bias")
                norm_parameters = _read(norm, "weight"), _read(norm, "bias")
                tensors = (x, *conv_parameters, _read(self, "bias"), _read(self, "scale"), *norm_parameters)
                if _eager_is_faster(tensors):  # what the layers compute, without the time of calling modules
                    return _functional(*tensors, norm.num_groups, norm.eps)
                if fits(tensors, norm.num_groups):
                    return _run_kernels(tensors, norm.num_groups, norm.eps)
        return self.group_norm(_activate(self.conv(x), self.bias, self.scale))
