// The kernels of one instruction set, and the plain data that they read. One thread runs one call;
// parallel.h, lora.h and stack.cpp share out the work.
//
// A row's result never depends on other rows, on their number, or on how work was shared out: sums over `k` run in one
// fixed order. So a token's bits are the same in every batch, with and without drafts behind it.
#pragma once

#include <cstdint>

namespace lp {

enum class DType : int32_t { F32 = 0, BF16 = 1 };

static inline int64_t item_bytes(DType dtype) { return dtype == DType::BF16 ? 2 : 4; }

// Packed weights: bands of 32 outputs. float32: [k][32]. bfloat16: [k / 32] blocks of two panels of 16 outputs, a panel
// [16 pairs of inputs][16 outputs][2], which is what AMX and AVX512-BF16 read as it is. Outputs are padded with zeros.
constexpr int kBand = 32;
constexpr int kPanel = 16;
constexpr int kSilu = 0, kGeluTanh = 1, kSigmoid = 2;  // activations of gates
constexpr int kRows = 32;  // rows that a product computes at once
constexpr int kWideInputs = 64;  // of a tile of rows that are floats

static inline int64_t band_bytes(DType dtype, int64_t k) { return k * kBand * item_bytes(dtype); }

// Weights of few bits: a band is blocks of kBlock inputs, a block a scale's byte for each of its 32 outputs and then two panels
// of values. What lies behind the last input of a band's last block is not read as a weight.
//
//   INT8  MXINT8 of the OCP's microscaling formats: a weight is (byte - 128) times 2 ** (scale - 127), and zero where the
//         scale is. A panel is [8 groups of inputs][16 outputs][4 inputs].
//   INT4  a weight is the level of its number times (4 + scale % 4) / 4 * 2 ** (scale / 4 - 48), which bfloat16 holds exactly. A
//         panel is [4 groups of pairs][16 outputs][2] words, with the number of a group's pair p at bit 4 p.
enum class Format : int32_t { PLAIN = 0, INT8 = 1, INT4 = 2 };

constexpr int kBlock = 32;
constexpr int kInt4Groups = 4;  // of a panel, each of 64 bytes
constexpr int kInt4Bias = 48;
constexpr uint8_t kInt4Zero = 7;
// Those that leave the least squared error of normally distributed weights, with 0.
#define LP_INT4_LEVELS -31, -24, -18, -14, -10, -6, -3, 0, 3, 5, 8, 11, 15, 19, 24, 31

static inline int64_t block_bytes(Format format) { return kBand + kBlock * kBand / (format == Format::INT4 ? 2 : 1); }

// Of a band's first k inputs.
static inline int64_t band_bytes(Format format, DType dtype, int64_t k) {
  return format == Format::PLAIN ? band_bytes(dtype, k) : (k + kBlock - 1) / kBlock * block_bytes(format);
}

// Where a block of queries of one span finds its keys and values.
struct AttendTask {
  const void* q;          // [rows][...] first query's first head of the KV head
  int64_t q_token_stride; // elements between tokens
  void* out;              // [tokens][heads][v_dim]
  int64_t out_token_stride;
  const void* k;          // [num_blocks][block_size][kv_heads][dim], at the KV head
  const void* v;          // the same of v_dim
  int64_t block_stride;   // elements between blocks of keys, and between tokens of a block
  int64_t token_stride;
  int64_t v_block_stride;  // and of values
  int64_t v_token_stride;
  const int64_t* blocks;  // the span's block table
  int32_t block_size;
  int32_t num_tokens;     // queries
  int32_t group;          // query heads of the KV head; times num_tokens at most what attend_rows says
  int32_t dim;            // of queries and keys
  int32_t v_dim;          // of values, no more than these
  int64_t first_position; // of the first query
  int64_t window;         // 0: none
  int64_t chunk;          // 0: none; else a query sees its own chunk of so many tokens only
  float scaling;
  float softcap;          // 0: none
  const float* sinks;     // [group] one more score of each head, of a key without a value; null: none
  const float* key_bias;  // [group][at least the positions, a multiple of 32] added to scores by key; null: none
  int64_t bias_stride;    // between heads
};

// --- recurrences --------------------------------------------------------------------------------------------------------

constexpr int kMaxStateDim = 512;  // rows and columns of a head's state, multiples of 16 where they are columns
constexpr int kMaxConvWidth = 8;

// A head's tokens of one piece. Strides in elements, between tokens.
struct LinearTask {
  const void *q, *k, *v;  // of the dtype: [k_dim], [k_dim], [v_dim]
  const float* decay;     // what the state's logarithm loses: one number, or [k_dim]
  const float* beta;      // null: 1
  // Gates of the dtype, one number each, a null where decay and beta are given. Decay is rate * softplus(a + bias), beta
  // sigmoid(b). Without b, as Mamba 2 has it, softplus rounds to the dtype, is between `least` and `most`, and is beta.
  const void *a = nullptr, *b = nullptr;
  float rate, bias, least, most;
  float skip = 0.0f;  // the part of v that is added to the output
  void* out;          // [v_dim], floats or of the dtype
  int64_t q_stride, k_stride, v_stride, decay_stride, beta_stride, out_stride;
  int64_t num_tokens;
  int32_t k_dim, v_dim;   // of the state
  bool decay_by_channel, is_delta, normalizes;
  float scale;  // of q
  bool rounds = false;          // `out` is of the dtype
  bool streams = false;         // the state behind the tokens goes past the caches
  const float* next = nullptr;  // the state that the thread reads next; null: none
};

struct ConvTask {
  const void* x;
  void* out;
  const float* weight;  // [width][channels], at the first of the channels
  const float* bias;    // null: none
  int64_t x_stride, out_stride, num_tokens;
  int64_t channels;      // in a row of the weight and of the state [width - 1][channels]
  int64_t num_channels;  // of the task
  int32_t width;
  bool is_activated;  // silu
};

struct ScanTask {
  const float *x, *step, *b, *c;  // [channels], [channels], [n], [n]
  const float* a;                 // [channels][n]
  float* out;                     // [channels]
  int64_t x_stride, step_stride, b_stride, c_stride, out_stride, num_tokens;
  int64_t n, num_channels;
};

// --- draws --------------------------------------------------------------------------------------------------------------

constexpr int kDrawBlock = 64;   // scores that share a maximum and a bound
constexpr int kDrawBins = 2048;  // by distance from the largest score

// An upper bound of a token's noise by its hash h, a float's bits read as an integer: max(least, slope * bits(float(h))) +
// shift. See NoiseField.bounds.
struct NoiseBound {
  float slope, least, shift;
};

// Brings a line into the second cache; the first has no room for what is read later. The compiler takes its own prefetch
// for something without effect, and leaves out functions that do nothing else.
static inline void fetch_line(const void* address) {
#if defined(__x86_64__)
  asm volatile("prefetcht1 (%0)" : : "r"(address));
#elif defined(__aarch64__)
  asm volatile("prfm pldl2keep, [%0]" : : "r"(address));
#endif
}

// Memory to prefetch while a product computes.
struct Prefetch {
  struct Range {
    const char* begin;
    int64_t num_lines;  // of 64 bytes
  };
  static constexpr int kMaxRanges = 160;
  Range weights{nullptr, 0};  // of the next product
  int num_ranges = 0;
  Range ranges[kMaxRanges];  // of anything else

  void add(const void* begin, int64_t num_bytes) {
    if (num_ranges < kMaxRanges && num_bytes > 0) ranges[num_ranges++] = {static_cast<const char*>(begin), (num_bytes + 63) / 64};
  }

  void fetch_all() const {
    for (int i = 0; i < num_ranges; i++)
      for (int64_t line = 0; line < ranges[i].num_lines; line++) fetch_line(ranges[i].begin + 64 * line);
  }
};

// How products are cut where a slab of weights is multiplied with several blocks of rows before the next one is.
struct Blocking {
  int min_rows;        // fewer are bound by memory: they take whole bands
  int64_t slab_bytes;  // of a band's weights, which stay in a cache
  int part_rows;       // rows that take turns with a slab: what they have of its inputs stays in the second cache
  int part_bands;      // most bands of a part of many rows that a chunk computes beside each other
  int num_fetches;     // products of kRows rows that share the prefetch of the next slab
  bool takes_ranges;   // whether products prefetch anything else
  int kept_rows;       // most rows of a step whose low-rank updates of short runs are computed at once and kept
};

// An adapter's part in the low-rank updates of a run of rows.
struct Use {
  const void* h;  // inner products of the first row, as `split` leaves them
  const void* b;  // [outputs][rank]
  int32_t rank;
  int32_t start, end;  // rows
  bool adds;           // to what the use before it makes of the same rows
};

struct Kernels {
  // c[m][32] = (adds ? c : 0) + x[m][k] @ band; m <= kRows. `prefetch`: of a slab, what is fetched meanwhile; null: the band
  // may lie in memory.
  void (*product)(DType, const void* x, int64_t x_stride, int m, const void* band, int64_t k, bool adds, float* c,
                  int64_t c_stride, const Prefetch* prefetch);
  Blocking (*blocking)(DType);
  // Of kernels that widen rows, else both are null: rows as floats, in tiles of kWideInputs inputs with one row below the other,
  // and `product` of bfloat16 weights with these. Tiles begin at multiples of 64 bytes; k is a multiple of 32.
  void (*widen_rows)(const void* x, int64_t x_stride, int m, int64_t k, int64_t tile_stride, float* tiles);
  void (*product_of_wide)(const float* tiles, int64_t tile_stride, int m, const void* band, int64_t k, bool adds, float* c,
                          int64_t c_stride, const Prefetch* prefetch);
  // `product` of a band in few bits, without what c was.
  void (*product_narrow)(DType, Format, const void* x, int64_t x_stride, int m, const void* band, int64_t k, float* c,
                         int64_t c_stride);
  // Makes what `product` reads of k inputs of a band in few bits, from the first of a block on.
  void (*widen)(DType, Format, const void* blocks, int64_t k, void* band);
  void (*end_products)();  // after a thread's last product, shrink or expand of a chunk

  // h[m][rank] = alpha * x[m][k] @ a[rank][k].T
  void (*shrink)(DType, const void* x, int64_t x_stride, int m, const void* a, int64_t k, int rank, float alpha, float* h,
                 int64_t h_stride);
  // Inner products as expand reads them, which need as much memory. Where pairs of bfloat16 are multiplied, they become two
  // terms each, of which the second is what the first one lacks: together they have 16 bits, the output has eight. A row is
  // all first terms, then all second ones. Elsewhere they stay as they are. `term_bytes`: of a (first) term.
  int (*term_bytes)(DType);
  void (*split)(DType, const float* h, int64_t h_stride, int m, int rank, void* out, int64_t out_stride);
  // c[m][num_outputs] = (adds ? c : 0) + h[m][rank] @ b[num_outputs][rank].T, h as `split` leaves it, and 16 outputs `c_panel`
  // behind those before
  void (*expand)(DType, const void* h, int64_t h_stride, int m, const void* b, int rank, int num_outputs, bool adds,
                 float* c, int64_t c_stride, int64_t c_panel);
  // c[m][num_outputs] += the updates of rows from `row` on, by uses in the order of rows, and of at most 256 outputs from
  // `output` on. A row's uses are added up apart and then put on c at once, like what is kept: its sums have one order,
  // however long its run is.
  void (*expand_uses)(DType, const Use* uses, int num_uses, int64_t h_stride, int row, int m, int64_t output, int num_outputs,
                      float* c, int64_t c_stride);

  // y[n] = (weight + offset) * (x / rms(x)). `narrows`: x / rms(x) is rounded to the dtype first.
  void (*rms_norm)(DType, const void* x, const void* weight, int64_t n, float eps, float offset, bool narrows, void* y);
  // Beside a gate, which multiplies x, or, where it does not go first, the result. x and y may be wider than the rest.
  void (*gated_norm)(DType x_dtype, DType, const void* x, const void* gate, const void* weight, int64_t n, float eps, bool gates_first,
                     void* y);
  // y[n] = (weight + offset) * (x - mean(x)) / deviation(x) + bias, which may be null
  void (*layer_norm)(DType, const void* x, const void* weight, const void* bias, int64_t n, float eps, float offset, void* y);
  // `rms_norm` in place, of one head.
  void (*rms_norm_f32)(DType, float* x, const void* weight, int64_t n, float eps, float offset, bool narrows);
  // x[dim] rotated by halves, in place.
  void (*rotate)(float* x, const float* cos, const float* sin, int dim);
  // x[dim] rotated by pairs of neighbours, in place; of cos and sin the first half is read.
  void (*rotate_pairs)(float* x, const float* cos, const float* sin, int dim);
  // out[n] = act(gate[n]) * up[n], with an activation of these
  void (*gated)(DType, int act, const float* gate, const float* up, int n, void* out);
  void (*gate_row)(DType, int act, const void* gate, const void* up, int n, void* out);  // all of the dtype
  // The same of m rows and up to two bands, which hold 16 of gate and the same 16 of up. `streams`: past the caches.
  void (*gated_bands)(DType, int act, const float* c, int64_t stride, int m, int n, void* out, int64_t out_stride,
                      bool streams);
  void (*store)(DType, const float* c, int n, void* out);          // out = c
  void (*add_to)(DType, const float* c, int n, void* inout);       // inout += c
  // inout[m][n] += c[m][n]
  void (*add_rows)(DType, const float* c, int64_t stride, int m, int n, void* inout, int64_t inout_stride);
  void (*add_part)(DType, const void* x, int64_t n, float factor, void* inout);  // inout += x * factor
  void (*add_bias)(DType, const void* bias, int n, float* c);      // c += bias
  void (*weighted_sum)(DType, const void* rows, const float* weights, int num_rows, int64_t n, void* out);  // of rows [n]

  // The largest of x[n] and where it is first; NaN if there is one. `allowed`: a bit for each, the lowest first, of
  // those that count, in whole bytes for 16 of them, or null; infinity among the others gives NaN.
  void (*argmax)(DType, const void* x, int64_t n, const uint8_t* allowed, float* best, int64_t* at);

  // Of each kDrawBlock of x[n] the largest, and the largest of all; NaN if there is one.
  float (*block_maxima)(const float* x, int64_t n, float* maxima);
  // exp((x[n] - top) / temperature), which may go nowhere, and their sum.
  float (*weigh)(const float* x, int64_t n, float top, float temperature, float* weights);
  // bins[n]: of 1 / scale each, and what is farther from the top in the last.
  void (*sort_into_bins)(const float* x, int64_t n, float top, float scale, int32_t* bins);
  // What (x[i] - top) * scale + the noise of mixed_ids[i] is at most, for n up to kDrawBlock. No x is NaN.
  float (*bound_noisy)(const float* x, const int32_t* mixed_ids, int n, const int32_t* key, const NoiseBound&, float top,
                       float scale);

  void (*attend)(DType, const AttendTask&, float* scratch);
  int (*attend_rows)(DType);  // queries times heads that are fastest together

  // Recurrences from the state `from` to `to`, which do not overlap, or are the same.
  void (*attend_linearly)(DType, const LinearTask&, const float* from, float* to);
  void (*convolve)(DType, const ConvTask&, const void* from, void* to);  // `to` may be null
  void (*scan)(const ScanTask&, const float* from, float* to);
};

constexpr int kAttendKeys = 128;  // that are attended to at once, where tiles do it
constexpr int kAttendRows = 128;
constexpr int kVectorKeys = 256;  // and where vectors do it
constexpr int kVectorRows = 64;

// Features of a head as `attend` keeps them: filled up with zeros.
static inline int whole_dim(int dim) { return (dim + 31) & ~31; }

// Elements of float that `attend` needs of `dim` features, which are whole.
static inline int64_t attend_scratch(int64_t dim) {
  const int64_t by_vectors = kVectorRows * kVectorKeys + (2 * kVectorRows + 24) * dim;
  const int64_t by_tiles = (3 * kAttendKeys / 2 + 3 * kAttendRows / 2 + 32) * dim + 24 * kAttendKeys + 2 * kAttendRows;
  return (by_vectors > by_tiles ? by_vectors : by_tiles) + 64;
}

const Kernels* current_kernels();  // nullptr: none of the variants can run here

}  // namespace lp
