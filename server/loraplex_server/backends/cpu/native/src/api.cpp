// The C interface of single operations; stacks of layers are in stack.cpp. The caller guarantees shapes and lifetimes.
#include <sys/mman.h>

#include <exception>

#include "lora.h"
#include "parallel.h"

#define LP_API __attribute__((visibility("default")))

namespace {

using lp::DType;

using lp::Format;

// A weight as it comes: values [num_outputs][k] in rows of `stride`, of the dtype or, with scales [num_outputs][blocks], in few
// bits: whole numbers of eight bits, or numbers of levels.
struct Source {
  const void* values;
  const uint8_t* scales;  // null: values are of the dtype
  Format format;
  int64_t num_outputs;
  int64_t stride;
};

// Outputs from..from + 16 into one panel of a band, block by block of inputs, whose part of the band stays in the first cache.
template <class T>
void copy_panel(DType dtype, const Source& source, int64_t k, int64_t from, T* band, int panel) {
  static const T zeros[lp::kBlock] = {};
  for (int64_t first = 0; first < k; first += lp::kBlock) {
    const int64_t width = std::min<int64_t>(lp::kBlock, k - first);
    for (int o = 0; o < lp::kPanel; o++) {
      const bool is_there = from + o < source.num_outputs;
      const T* row = is_there ? static_cast<const T*>(source.values) + (from + o) * source.stride + first : zeros;
      if (dtype == DType::F32) {
        T* to = band + first * lp::kBand + panel * lp::kPanel + o;
        for (int64_t i = 0; i < width; i++) to[i * lp::kBand] = row[i];
      } else {
        T* to = band + first * lp::kBand + panel * 512 + 2 * o;
        for (int64_t pair = 0; pair < 16; pair++) std::memcpy(to + 32 * pair, row + 2 * pair, 2 * sizeof(T));
      }
    }
  }
}

// The same in few bits; zeros where there is no output, and behind the last input.
void copy_narrow_panel(const Source& source, int64_t k, int64_t from, uint8_t* band, int panel) {
  const int64_t num_blocks = lp::ceil_div(k, lp::kBlock);
  const bool is_int4 = source.format == Format::INT4;
  const uint8_t zero = is_int4 ? lp::kInt4Zero : 128;
  for (int64_t block = 0; block < num_blocks; block++) {
    uint8_t* scales = band + block * lp::block_bytes(source.format);
    uint8_t* values = scales + lp::kBand + panel * (lp::block_bytes(source.format) - lp::kBand) / 2;
    const int64_t first = block * lp::kBlock, width = std::min<int64_t>(lp::kBlock, k - first);
    for (int o = 0; o < lp::kPanel; o++) {
      const int64_t output = from + o;
      const bool is_there = output < source.num_outputs;
      const int8_t* row = static_cast<const int8_t*>(source.values) + (is_there ? output * source.stride + first : 0);
      scales[panel * lp::kPanel + o] = is_there ? source.scales[output * num_blocks + block] : 0;
      uint8_t numbers[lp::kBlock];
      for (int i = 0; i < lp::kBlock; i++)
        numbers[i] = is_there && i < width ? uint8_t(row[i] + (is_int4 ? 0 : 128)) : zero;
      if (!is_int4) {
        for (int i = 0; i < lp::kBlock; i += 4) std::memcpy(values + i * lp::kPanel + 4 * o, numbers + i, 4);
        continue;
      }
      for (int group = 0; group < lp::kInt4Groups; group++)
        for (int of_pair = 0; of_pair < 2; of_pair++) {
          const uint8_t* own = numbers + 8 * group + of_pair;  // of four pairs
          uint8_t* word = values + 64 * group + 4 * o + 2 * of_pair;
          word[0] = uint8_t(own[0] | own[2] << 4);
          word[1] = uint8_t(own[4] | own[6] << 4);
        }
    }
  }
}

void pack_panel(DType dtype, const Source& source, int64_t k, int64_t from, char* packed, int band, int panel) {
  char* base = packed + band * lp::band_bytes(source.format, dtype, k);
  if (source.format != Format::PLAIN)
    copy_narrow_panel(source, k, from, reinterpret_cast<uint8_t*>(base), panel);
  else if (dtype == DType::F32)
    copy_panel(dtype, source, k, from, reinterpret_cast<float*>(base), panel);
  else
    copy_panel(dtype, source, k, from, reinterpret_cast<uint16_t*>(base), panel);
}

}  // namespace

extern "C" {

// Null where the system gives the process no more threads or no memory.
LP_API lp::Pool* lp_pool_new(int num_threads) {
  try {
    return new lp::Pool(num_threads);
  } catch (const std::exception&) {
    return nullptr;
  }
}

LP_API void lp_pool_free(lp::Pool* pool) { delete pool; }

LP_API int64_t lp_packed_bytes(int dtype, int format, int64_t num_outputs, int64_t k) {
  return lp::ceil_div(num_outputs, lp::kBand) * lp::band_bytes(Format(format), DType(dtype), k);
}

// weight [num_outputs][k] with its scales or null, rows `stride` elements apart, into bands. Large pages make reading them
// faster.
LP_API void lp_pack(lp::Pool* pool, int dtype, int format, const void* weight, const uint8_t* scales, int64_t stride,
                    int64_t num_outputs, int64_t k, void* packed) {
  const auto turn = pool->take_turn();
  const Source source{weight, scales, Format(format), num_outputs, stride};
  pool->run(lp::ceil_div(num_outputs, lp::kBand), [&](int band, int) {
    for (int panel = 0; panel < 2; panel++)
      pack_panel(DType(dtype), source, k, int64_t(band) * lp::kBand + panel * lp::kPanel, static_cast<char*>(packed), band,
                 panel);
  });
}

// Two weights of one shape: a band holds 16 outputs of each.
LP_API void lp_pack_pair(lp::Pool* pool, int dtype, int format, const void* first, const uint8_t* first_scales,
                         const void* second, const uint8_t* second_scales, int64_t stride, int64_t num_outputs, int64_t k,
                         void* packed) {
  const auto turn = pool->take_turn();
  const Source sources[] = {{first, first_scales, Format(format), num_outputs, stride},
                            {second, second_scales, Format(format), num_outputs, stride}};
  pool->run(lp::ceil_div(num_outputs, lp::kPanel), [&](int band, int) {
    for (int panel = 0; panel < 2; panel++)
      pack_panel(DType(dtype), sources[panel], k, int64_t(band) * lp::kPanel, static_cast<char*>(packed), band, panel);
  });
}

// Asks for large pages where they are given on request; call before memory is first written to.
LP_API void lp_use_large_pages(void* memory, int64_t num_bytes) {
#ifdef MADV_HUGEPAGE  // Linux
  const uintptr_t size = 2 << 20, start = (reinterpret_cast<uintptr_t>(memory) + size - 1) & ~(size - 1);
  const uintptr_t end = (reinterpret_cast<uintptr_t>(memory) + uintptr_t(num_bytes)) & ~(size - 1);
  if (start < end) madvise(reinterpret_cast<void*>(start), end - start, MADV_HUGEPAGE);
#else
  (void)memory, (void)num_bytes;
#endif
}

// y [num_rows][num_outputs] = x [num_rows][k] @ weight.T + bias
LP_API void lp_linear(lp::Pool* pool, int dtype, const void* x, int64_t x_stride, int num_rows, int64_t k,
                      const void* packed, int format, int64_t num_outputs, const void* bias, void* y, int64_t y_stride) {
  const auto turn = pool->take_turn();
  const lp::Kernels& kernels = *lp::current_kernels();
  const DType type = DType(dtype);
  const int num_bands = lp::ceil_div(num_outputs, lp::kBand);
  const int per_chunk = lp::unit_of(num_outputs);
  const lp::Bands bands{packed, Format(format)};
  lp::products(*pool, kernels, type, {x, x_stride}, num_rows, k, bands, num_bands, per_chunk,
               [&](int band, int row, int m, float* c, int64_t stride) {
                 const int64_t output = int64_t(band) * lp::kBand;
                 const int width = int(std::min<int64_t>(per_chunk * lp::kBand, num_outputs - output));
                 for (int64_t r = 0; r < m; r++) {
                   if (bias != nullptr) kernels.add_bias(type, lp::at(bias, output, type), width, c + r * stride);
                   kernels.store(type, c + r * stride, width, lp::at(y, (row + r) * y_stride + output, type));
                 }
               });
}

// Floats of scratch that lp_lora needs.
LP_API int64_t lp_lora_scratch(int64_t num_rows, int64_t max_rank, int64_t num_outputs) {
  return lp::Updates::num_floats(num_rows, max_rank, 1, num_outputs);
}

// y [num_rows][num_outputs] += the runs' updates of x [num_rows][k].
LP_API void lp_lora(lp::Pool* pool, int dtype, const void* x, int64_t k, int num_rows, const LpTable* table,
                    const LpRuns* runs, float* scratch, void* y, int64_t num_outputs, int64_t y_stride) {
  const auto turn = pool->take_turn();
  const lp::Kernels& kernels = *lp::current_kernels();
  const DType type = DType(dtype);
  lp::Updates updates(*pool, kernels, type, *runs, num_rows, scratch);
  const lp::Target target{table, num_outputs};
  updates.prepare({x, k}, k, &target, 1);
  constexpr int kWidth = 256;
  const std::vector<lp::Piece> pieces = lp::pieces_of(*runs);
  const int num_columns = lp::ceil_div(num_outputs, kWidth);
  pool->run(int(pieces.size()) * num_columns, [&](int chunk, int) {
    float c[lp::kPieceRows * kWidth];
    const lp::Piece& piece = pieces[size_t(chunk / num_columns)];
    if (!updates.has_update(0, piece.run)) return;  // not even the sign of a zero changes
    const int64_t output = int64_t(chunk % num_columns) * kWidth;
    const int width = int(std::min<int64_t>(kWidth, num_outputs - output)), m = piece.end - piece.start;
    std::memset(c, 0, size_t(m) * kWidth * sizeof(float));
    updates.add(0, output, width, piece.start, m, c, kWidth);
    kernels.end_products();
    for (int64_t r = 0; r < m; r++)
      kernels.add_to(type, c + r * kWidth, width, lp::at(y, (piece.start + r) * y_stride + output, type));
  });
}

// y [num_rows][num_outputs] = x [num_rows][k] @ weight.T + bias, with a weight [num_outputs][k] as it lies.
LP_API void lp_dense(lp::Pool* pool, int dtype, const void* x, int64_t x_stride, int num_rows, int64_t k,
                     const void* weight, int64_t num_outputs, const void* bias, void* y, int64_t y_stride) {
  const auto turn = pool->take_turn();
  const lp::Kernels& kernels = *lp::current_kernels();
  const DType type = DType(dtype);
  constexpr int kWidth = 64;
  pool->run(lp::ceil_div(num_outputs, kWidth), [&](int chunk, int) {
    float c[lp::kPieceRows * kWidth];
    const int64_t output = int64_t(chunk) * kWidth;
    const int width = int(std::min<int64_t>(kWidth, num_outputs - output));
    for (int64_t row = 0; row < num_rows; row += lp::kPieceRows) {
      const int m = int(std::min<int64_t>(lp::kPieceRows, num_rows - row));
      kernels.shrink(type, lp::at(x, row * x_stride, type), x_stride, m, lp::at(weight, output * k, type), k, width, 1.0f, c,
                     kWidth);
      for (int64_t r = 0; r < m; r++) {
        if (bias != nullptr) kernels.add_bias(type, lp::at(bias, output, type), width, c + r * kWidth);
        kernels.store(type, c + r * kWidth, width, lp::at(y, (row + r) * y_stride + output, type));
      }
    }
    kernels.end_products();
  });
}

// q [num_tokens][num_heads][dim], out [num_tokens][num_heads][v_dim] over pages that hold the step's keys and values already.
LP_API void lp_attend(lp::Pool* pool, int dtype, const void* q, void* out, const void* k_pages, const void* v_pages,
                      int num_heads, int num_kv_heads, int dim, int v_dim, float scaling, float softcap, int64_t window,
                      int64_t chunk, const float* sinks, const float* key_bias, int64_t bias_stride, const LpSpans* spans) {
  const auto turn = pool->take_turn();
  const lp::Heads heads{num_heads, num_kv_heads, dim, v_dim, scaling, softcap, window, chunk, sinks, key_bias, bias_stride};
  lp::attend_all(*pool, *lp::current_kernels(), DType(dtype), q, out, int64_t(num_heads) * v_dim, {k_pages, v_pages}, heads, *spans);
}

LP_API void lp_rms_norm(lp::Pool* pool, int dtype, const void* x, const void* weight, int num_rows, int64_t n, float eps,
                        float offset, int narrows, void* y) {
  const auto turn = pool->take_turn();
  const lp::Kernels& kernels = *lp::current_kernels();
  const DType type = DType(dtype);
  pool->run(lp::ceil_div(num_rows, 8), [&](int chunk, int) {
    for (int64_t row = chunk * 8; row < std::min(num_rows, (chunk + 1) * 8); row++)
      kernels.rms_norm(type, lp::at(x, row * n, type), weight, n, eps, offset, narrows != 0, lp::at(y, row * n, type));
  });
}

LP_API void lp_gated_norm(lp::Pool* pool, int x_dtype, int dtype, const void* x, const void* gate, const void* weight, int num_rows,
                          int64_t n, float eps, int gates_first, void* y) {
  const auto turn = pool->take_turn();
  const lp::Kernels& kernels = *lp::current_kernels();
  const DType of_x = DType(x_dtype), type = DType(dtype);
  pool->run(lp::ceil_div(num_rows, 8), [&](int chunk, int) {
    for (int64_t row = chunk * 8; row < std::min(num_rows, (chunk + 1) * 8); row++)
      kernels.gated_norm(of_x, type, lp::at(x, row * n, of_x), lp::at(gate, row * n, type), weight, n, eps, gates_first != 0,
                         lp::at(y, row * n, of_x));
  });
}

// y [num_rows][n] = act(gate) * up, whose rows are `gate_stride` and `up_stride` elements apart.
LP_API void lp_gate(lp::Pool* pool, int dtype, int act, const void* gate, int64_t gate_stride, const void* up, int64_t up_stride,
                    int num_rows, int64_t n, void* y) {
  const auto turn = pool->take_turn();
  const lp::Kernels& kernels = *lp::current_kernels();
  const DType type = DType(dtype);
  constexpr int kWidth = 1024;
  const int num_columns = lp::ceil_div(n, kWidth);
  pool->run(num_rows * num_columns, [&](int chunk, int) {
    const int64_t row = chunk / num_columns, first = int64_t(chunk % num_columns) * kWidth;
    const int width = int(std::min<int64_t>(kWidth, n - first));
    kernels.gate_row(type, act, lp::at(gate, row * gate_stride + first, type), lp::at(up, row * up_stride + first, type), width,
                     lp::at(y, row * n + first, type));
  });
}

// The largest value of each row of x [num_rows][n], and where it is first. masks [num_rows]: for each row, the number
// of its mask, or -1; bits [..][num_words]: masks of the values that count; both may be null.
LP_API void lp_argmax(lp::Pool* pool, int dtype, const void* x, int num_rows, int64_t n, const int32_t* masks,
                      const uint32_t* bits, int64_t num_words, float* best, int64_t* where) {
  const auto turn = pool->take_turn();
  const lp::Kernels& kernels = *lp::current_kernels();
  const DType type = DType(dtype);
  pool->run(num_rows, [&](int row, int) {
    const bool is_free = masks == nullptr || masks[row] < 0;
    const auto* allowed = is_free ? nullptr : (const uint8_t*)(bits + masks[row] * num_words);
    kernels.argmax(type, lp::at(x, row * n, type), n, allowed, best + row, where + row);
  });
}
}
