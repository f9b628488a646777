// A stack of decoder layers of the common kind, in place over a step's hidden states:
//
//   h += o(attention(rope(qkv(norm(h)))));  h += down(act(gate(norm(h))) * up(norm(h)))
//
// Some families norm what is added, too or instead; add a part of it; norm queries and keys; turn them in some layers only,
// or by pairs; scale queries by their positions; compute both parts from the same h; attend to keys and values of an earlier
// layer; scale attention's output by gates; or let an input of the layer's own and a factor follow. A mixer with recurrences may
// stand in attention's place. The caller may compute attention, or what stands in its place, and the feed-forward part: then the stack
// is run up to there, and on from there. Each linear has an adapter term, or a product of the adapter's own in its place, and
// norms have the weights of each row's adapter. Of the last layer, rows whose output nobody reads get keys and values only,
// where it attends. The caller guarantees shapes and keeps all memory alive.
#include "adapted.h"
#include "mixer.h"
#include "outputs.h"

extern "C" {

struct LpLayer {
  const void* qkv;      // bands: query heads, key heads, value heads; null: something else stands in attention's place
  const void* o;
  const LpMixer* mixer;  // null: the caller computes what stands in attention's place, where that has no qkv
  const void* gate_up;  // bands of 16 outputs of gate and the same 16 of up; null: the caller computes the feed-forward part
  const void* down;
  const void* input_gate;  // of the layer's own input; null: it has none
  const void* input_projection;
  const void* qkv_bias;  // null: none
  const void* o_bias;
  LpNorm norm1, norm2, q_norm, k_norm, v_norm;
  LpNorm attention_norm, ffn_norm, input_norm;  // of what is added to the hidden states
  void* k_pages;
  void* v_pages;
  float eps;
  float qk_eps;
  float scaling;
  float softcap;
  int64_t window;
  int64_t turns;  // how queries and keys are turned by their positions, 0: not, 1: by halves, 2: by pairs of neighbours
  const float* sinks;  // [num_heads] scores of keys without values; null: none
  LpTable mixer_in_tables[4], mixer_out_table;  // of the mixer's linears, in the order of its layout
  LpTable q_table, k_table, v_table, o_table, gate_table, up_table, down_table, input_gate_table, input_projection_table;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t ffn;
  int32_t shares_kv;  // keys and values are those of an earlier layer, which has the same pages
  int32_t gates_heads;  // behind each head's queries the linear of q has a gate, whose sigmoid scales attention's output
  float scale;        // what the layer's output is multiplied with
};

struct LpStack {
  int32_t dtype;
  int32_t num_layers;
  int32_t hidden;
  int32_t num_heads;
  // The most that any layer has: queries, outputs of q, k and v, gates of heads, and inputs of down.
  int32_t q_size;
  int32_t qkv_size;
  int32_t gate_size;
  int32_t projected_size;  // outputs of mixers' projections, and their channels, 0: no layer has a mixer
  int32_t convolved_size;
  int32_t recurred_size;  // features of mixers whose recurrences answer in floats
  int32_t ffn;
  int32_t input;  // features of layers' own inputs, 0: none
  int32_t act;  // kSilu or kGeluTanh
  int32_t format;  // lp::Format of the layers' weights
  int32_t merges_qkv;      // q, k and v are one linear with adapters of its own, q_table
  int32_t merges_gate_up;  // so are gate and up, gate_table
  int32_t norms_all_heads;  // q_norm and k_norm are of all heads together
  int32_t narrows;  // norms round values before they are multiplied with the weight
  float norm_offset;  // what norms add to their weights
  float added;  // the part of attention and feed-forward that is added to the hidden states
  int32_t is_layer_norm;  // norms of hidden states take the mean away
  // The feed-forward part reads the states that attention reads, behind norm2 or else behind norm1; both are added as they
  // are.
  int32_t is_parallel;
  int32_t is_grouped;  // the rows of q, k and v lie by heads of keys: the queries of one, its key, its value
  const LpLayer* layers;
};

struct LpStep {
  int32_t num_tokens;
  int32_t num_rotary;  // of a head's features, 0: no rotation
  void* hidden;        // [num_tokens][hidden], in place; rows not among `outputs` are left as they come where the last layer attends
  const float* cos;    // [num_tokens][num_rotary]
  const float* sin;
  const float* query_scales;  // [num_tokens] what queries are multiplied with behind their rotation; null: 1
  const void* inputs;  // [num_layers][num_tokens][input] of the layers themselves
  LpSpans spans;
  LpPieces pieces;  // of recurrences
  LpRuns runs;
  void* scratch;       // lp_stack_scratch_bytes
  const int32_t* outputs;  // [num_outputs] rows whose output is read, each greater than the one before; null: all
  int32_t num_outputs;
  // Where the caller computes parts of layers: a step ends before the first of them, or behind the last layer.
  const void* fed;  // [num_tokens][hidden] what the part before this step computed; null: none is before it
  void* feed;       // [num_tokens][hidden] the input of the part behind this step
  int32_t continues;  // in the first layer, behind the part in attention's place; else behind the whole layer before it
};
}

namespace lp {
namespace {

struct Scratch {
  char* normed;  // [num_tokens][hidden], also of products that are normed or scaled before they are added
  char* q;       // [num_tokens][heads][head_dim]
  char* gates;   // the same of gates
  char* projected;  // [num_tokens][projected_size], of a mixer
  char* convolved;
  float* recurred;
  char* mixed;   // like q, attention's result, or a mixer's
  char* act;     // [num_tokens][ffn], also of the layer's own input
  // Elements from one row to the next, where products read them.
  int64_t normed_stride, mixed_stride, act_stride;
  float* updates;
  int64_t num_bytes;
};

// Elements between rows of n: an odd number of lines, so that rows lie in different sets of a cache. A product reads the same
// few lines of 32 rows at once, of which only 24 have room in the first cache where rows of 2048 bytes follow each other.
int64_t stride_of(int64_t n, DType dtype) {
  const int64_t num_lines = (n * item_bytes(dtype) + 63) / 64;
  return (num_lines | 1) * 64 / item_bytes(dtype);
}

Scratch lay_out(const LpStack& stack, int64_t num_tokens, int64_t max_rank, void* base) {
  const DType dtype = DType(stack.dtype);
  char* start = static_cast<char*>(base);
  char* next = start;
  const auto take = [&](int64_t bytes) {
    char* taken = next;
    next += (bytes + 63) & ~int64_t(63);
    return taken;
  };
  Scratch s;
  s.normed_stride = stride_of(stack.hidden, dtype);
  s.mixed_stride = stride_of(stack.q_size, dtype);
  s.act_stride = stride_of(std::max(stack.ffn, stack.input), dtype);
  s.normed = take(num_tokens * s.normed_stride * item_bytes(dtype));
  s.q = take(num_tokens * stack.q_size * item_bytes(dtype));
  s.gates = take(num_tokens * stack.gate_size * item_bytes(dtype));
  s.projected = take(num_tokens * stack.projected_size * item_bytes(dtype));
  s.convolved = take(num_tokens * stack.convolved_size * item_bytes(dtype));
  s.recurred = reinterpret_cast<float*>(take(num_tokens * stack.recurred_size * int64_t(sizeof(float))));
  s.mixed = take(num_tokens * s.mixed_stride * item_bytes(dtype));
  s.act = take(num_tokens * s.act_stride * item_bytes(dtype));
  const int64_t widest = std::max({stack.qkv_size, stack.projected_size, stack.hidden, 2 * stack.ffn, stack.input});
  s.updates = reinterpret_cast<float*>(
      take(max_rank > 0 ? Updates::num_floats(num_tokens, max_rank, stack.projected_size > 0 ? 4 : 3, widest) * int64_t(sizeof(float)) : 0));
  s.num_bytes = next - start;
  return s;
}

class StackRun {
 public:
  // `prefetches`: empty queues of the pool's threads.
  StackRun(Pool& pool, const Kernels& kernels, const LpStack& stack, const LpStep& step, PrefetchQueues& prefetches)
      : pool_(pool),
        kernels_(kernels),
        stack_(stack),
        step_(step),
        dtype_(DType(stack.dtype)),
        scratch_(lay_out(stack, step.num_tokens, step.runs.max_rank, step.scratch)),
        products_(pool, kernels, dtype_, Format(stack.format), step.runs, step.num_tokens, scratch_.updates, &prefetches),
        prefetches_(prefetches),
        slots_(slots_of(step.runs, step.num_tokens)) {}

  // What the phases of the layers read beside weights, where products are bound by their multiplications.
  void plan_prefetches() {
    if (step_.num_tokens < kernels_.blocking(dtype_).min_rows || step_.num_tokens > 2 * kRows) return;
    if (Format(stack_.format) != Format::PLAIN) return;
    int64_t weights = 0;
    const auto end_phase = [&](int64_t num_weights) {
      prefetches_.end_phase(weights);
      weights += num_weights * item_bytes(dtype_);
    };
    for (int i = 0; i < stack_.num_layers; i++) {
      const LpLayer& layer = stack_.layers[i];
      if (layer.qkv != nullptr) {
        const int64_t rows = q_rows(layer), qkv_rows = qkv_outputs(layer);
        const auto qkv = qkv_targets(layer);
        products_.updates().add_factors(qkv.data(), int(qkv.size()), stack_.hidden, prefetches_);
        add_weights(layer.qkv, stack_.hidden, ceil_div(qkv_rows, kBand), qkv_unit(layer));
        end_phase(qkv_rows * stack_.hidden);
        add_pages(layer, step_.spans);
        end_phase(0);
        const Target o{&layer.o_table, stack_.hidden};
        products_.updates().add_factors(&o, 1, rows, prefetches_);
        add_weights(layer.o, rows, ceil_div(stack_.hidden, kBand), 1);
        end_phase(rows * stack_.hidden);
      } else if (layer.mixer != nullptr) {
        const MixerShape shape{*layer.mixer};
        const auto projection = mixer_targets(layer);
        products_.updates().add_factors(projection.data(), int(projection.size()), stack_.hidden, prefetches_);
        add_weights(layer.mixer->projection, stack_.hidden, ceil_div(shape.num_projected, kBand), unit_of(shape.num_projected));
        end_phase(shape.num_projected * stack_.hidden);
        end_phase(0);
        const Target o{&layer.mixer_out_table, stack_.hidden};
        products_.updates().add_factors(&o, 1, shape.values, prefetches_);
        add_weights(layer.mixer->o, shape.values, ceil_div(stack_.hidden, kBand), 1);
        end_phase(shape.values * stack_.hidden);
      } else if (ends_in(i)) {
        return;
      }
      if (layer.gate_up == nullptr) continue;
      const Target down{&layer.down_table, stack_.hidden};
      const auto gate = gate_targets(layer);
      products_.updates().add_factors(gate.data(), int(gate.size()), stack_.hidden, prefetches_);
      add_weights(layer.gate_up, stack_.hidden, ceil_div(layer.ffn, kPanel), 2);
      end_phase(2 * int64_t(layer.ffn) * stack_.hidden);
      products_.updates().add_factors(&down, 1, layer.ffn, prefetches_);
      add_weights(layer.down, layer.ffn, ceil_div(stack_.hidden, kBand), 1);
      end_phase(int64_t(layer.ffn) * stack_.hidden);
      if (layer.input_gate == nullptr) continue;
      const Target gate_of_input{&layer.input_gate_table, stack_.input}, projection{&layer.input_projection_table, stack_.hidden};
      products_.updates().add_factors(&gate_of_input, 1, stack_.hidden, prefetches_);
      add_weights(layer.input_gate, stack_.hidden, ceil_div(stack_.input, kBand), 1);
      end_phase(int64_t(stack_.input) * stack_.hidden);
      products_.updates().add_factors(&projection, 1, stack_.input, prefetches_);
      add_weights(layer.input_projection, stack_.input, ceil_div(stack_.hidden, kBand), 1);
      end_phase(int64_t(stack_.input) * stack_.hidden);
    }
  }

  // True if the step ends before the part in the place of a layer's attention, which the caller computes.
  bool ends_in(int layer) const { return !has_token_mixer(stack_.layers[layer]) && (layer > 0 || !step_.continues); }

  // The input of that part.
  void feed_own_part(const LpLayer& layer) { feed(normalize(layer.norm1, layer.eps)); }

  // The end of a layer whose feed-forward part the caller computed.
  void add_fed(const LpLayer& layer) { add_whole_rows(fed(), layer.ffn_norm, layer.eps); }

  void before_attention(const LpLayer& layer) {
    prefetches_.begin_phase();
    const Rows x = normalize(layer.norm1, layer.eps);
    const auto targets = qkv_targets(layer);
    products_.prepare(x, stack_.hidden, targets.data(), int(targets.size()));
    project_qkv(layer, x);
  }

  void attend(const LpLayer& layer) {
    prefetches_.begin_phase();
    const Heads heads{stack_.num_heads, layer.num_kv_heads, layer.head_dim, layer.head_dim, layer.scaling, layer.softcap, layer.window, 0,
                      layer.sinks};
    attend_all(pool_, kernels_, dtype_, scratch_.q, scratch_.mixed, scratch_.mixed_stride, {layer.k_pages, layer.v_pages}, heads, step_.spans);
    if (layer.gates_heads) gate_heads(layer);
  }

  // A mixer up to its last product.
  void run_mixer(const LpLayer& layer) {
    const LpMixer& mixer = *layer.mixer;
    const MixerShape shape{mixer};
    prefetches_.begin_phase();
    const Rows x = normalize(layer.norm1, layer.eps);
    const auto targets = mixer_targets(layer);
    products_.prepare(x, stack_.hidden, targets.data(), int(targets.size()));
    project_mixer(mixer, x);
    prefetches_.begin_phase();
    convolve_all(pool_, kernels_, dtype_, projected(mixer), shape.num_projected, mixer.conv_weight, mixer.conv_bias, mixer.width,
                 shape.channels, true, mixer.conv_states, convolved(mixer), step_.pieces);
    recur(mixer);
  }

  // The queries of rows of another run, of which this one computes what is left, and their gates.
  void take_queries(const LpLayer& layer, const StackRun& whole, const OutputRows& rows) {
    rows.gather(whole.scratch_.q, q_rows(layer) * item_bytes(dtype_), scratch_.q);
    if (layer.gates_heads) rows.gather(whole.scratch_.gates, q_rows(layer) * item_bytes(dtype_), scratch_.gates);
  }

  // `input`: the layer's own [num_tokens][input], where it has one.
  void after_attention(const LpLayer& layer, const void* input) {
    const LpNorm& before_ffn = layer.norm2.weight == nullptr ? layer.norm1 : layer.norm2;
    if (has_token_mixer(layer)) prefetches_.begin_phase();
    Rows x{nullptr, 0};
    if (stack_.is_parallel) x = normalize(before_ffn, layer.eps);
    if (layer.qkv != nullptr)
      add_product(layer.o, layer.o_bias, layer.o_table, mixed(), q_rows(layer), layer.attention_norm, layer.eps);
    else if (layer.mixer != nullptr)
      add_product(layer.mixer->o, nullptr, layer.mixer_out_table, mixed(), MixerShape{*layer.mixer}.values, layer.attention_norm, layer.eps);
    else
      add_whole_rows(fed(), layer.attention_norm, layer.eps);
    if (!stack_.is_parallel) x = normalize(layer.norm2, layer.eps);
    if (layer.gate_up == nullptr) return feed(x);
    prefetches_.begin_phase();
    const auto targets = gate_targets(layer);
    products_.prepare(x, stack_.hidden, targets.data(), int(targets.size()));
    gate(layer, x);
    prefetches_.begin_phase();
    add_product(layer.down, nullptr, layer.down_table, activated(), layer.ffn, layer.ffn_norm, layer.eps);
    if (layer.input_gate != nullptr) add_input(layer, input);
    if (layer.scale != 1.0f)
      each_row([&](int64_t, int64_t first) {
        char* row = at(step_.hidden, first, dtype_);
        kernels_.weighted_sum(dtype_, row, &layer.scale, 1, stack_.hidden, row);
      });
  }

 private:
  Rows hidden() const { return {step_.hidden, stack_.hidden}; }
  Rows normed() const { return {scratch_.normed, scratch_.normed_stride}; }
  Rows mixed() const { return {scratch_.mixed, scratch_.mixed_stride}; }
  Rows activated() const { return {scratch_.act, scratch_.act_stride}; }
  Rows fed() const { return {step_.fed, stack_.hidden}; }

  void feed(const Rows& x) {
    each_row([&](int64_t row, int64_t first) {
      std::memcpy(at(step_.feed, first, dtype_), x.at(row, 0, dtype_), size_t(stack_.hidden * item_bytes(dtype_)));
    });
  }

  int64_t q_rows(const LpLayer& layer) const { return int64_t(stack_.num_heads) * layer.head_dim; }

  // Outputs of q, which may have gates.
  int64_t q_outputs(const LpLayer& layer) const { return q_rows(layer) * (layer.gates_heads ? 2 : 1); }

  int64_t qkv_outputs(const LpLayer& layer) const { return q_outputs(layer) + 2 * kv_rows(layer); }

  // Outputs of k, or v, that the layer computes.
  static int64_t kv_rows(const LpLayer& layer) { return layer.shares_kv ? 0 : int64_t(layer.num_kv_heads) * layer.head_dim; }

  std::vector<Target> qkv_targets(const LpLayer& layer) const {
    const int64_t rows = q_outputs(layer), others = kv_rows(layer);
    if (stack_.merges_qkv) return {{&layer.q_table, rows + 2 * others}};
    if (others == 0) return {{&layer.q_table, rows}};
    return {{&layer.q_table, rows}, {&layer.k_table, others}, {&layer.v_table, others}};
  }

  // True if attention, or what stands in its place, is the stack's own.
  static bool has_token_mixer(const LpLayer& layer) { return layer.qkv != nullptr || layer.mixer != nullptr; }

  char* projected(const LpMixer& mixer) const { return mixer.projected == nullptr ? scratch_.projected : static_cast<char*>(mixer.projected); }
  char* convolved(const LpMixer& mixer) const { return mixer.convolved == nullptr ? scratch_.convolved : static_cast<char*>(mixer.convolved); }

  static std::vector<Target> mixer_targets(const LpLayer& layer) {
    const MixerShape shape{*layer.mixer};
    std::vector<Target> targets;
    for (int i = 0; i < shape.num_linears(); i++) targets.push_back({&layer.mixer_in_tables[i], shape.outputs_of(i)});
    return targets;
  }

  std::vector<Target> gate_targets(const LpLayer& layer) const {
    if (stack_.merges_gate_up) return {{&layer.gate_table, 2 * int64_t(layer.ffn)}};
    return {{&layer.gate_table, layer.ffn}, {&layer.up_table, layer.ffn}};
  }

  // Calls body(module, first output) for the outputs from `output` on of one of several parts. `is_merged`: they are one
  // linear, in which `before` outputs of other parts are before those of this one.
  template <class Body>
  static void in_module(bool is_merged, int part, int64_t before, int64_t output, const Body& body) {
    if (is_merged)
      body(0, before + output);
    else
      body(part, output);
  }

  // The slab that each thread multiplies with first: no product before it of the same weight fetches it.
  void add_weights(const void* packed, int64_t k, int num_bands, int unit) {
    const Bands bands{packed, Format(stack_.format)};
    const int num_chunks = ceil_div(num_bands, unit);
    const int64_t num_bytes = std::min(band_bytes(dtype_, k), kernels_.blocking(dtype_).slab_bytes);
    for (int thread = 0; thread < pool_.num_threads(); thread++) {
      const int first = pool_.first_of(thread, num_chunks);
      if (first < pool_.first_of(thread + 1, num_chunks))
        prefetches_.of(thread).add(bands.at(dtype_, int64_t(first) * unit, k, 0), num_bytes);
    }
  }

  // Keys and values in the order in which attention reads them, as many bytes for a thread as its weights of q, k and v have.
  void add_pages(const LpLayer& layer, const LpSpans& spans) {
    const int64_t rows = qkv_outputs(layer);
    const int64_t most = rows * stack_.hidden * item_bytes(dtype_) / pool_.num_threads();
    const int64_t token_bytes = int64_t(layer.num_kv_heads) * layer.head_dim * item_bytes(dtype_);
    std::vector<int64_t> ends;  // bytes of each queue up to which it takes pages
    for (int thread = 0; thread < pool_.num_threads(); thread++) ends.push_back(prefetches_.of(thread).num_bytes() + most);
    const int heads = layer.num_kv_heads, num_chunks = spans.num_spans * heads;
    for (int i = 0; i < spans.num_spans; i++) {
      // Several threads that share a span's heads take its blocks in turns.
      const int first_thread = pool_.owner(i * heads, num_chunks), span = spans.num_spans - 1 - i;
      const int num_threads = pool_.owner((i + 1) * heads - 1, num_chunks) - first_thread + 1;
      const int64_t length = spans.context_lens[span];
      const int64_t first = layer.window > 0 ? std::max<int64_t>(0, length - layer.window) : 0;
      int num_full = 0;  // queues in a row
      for (int64_t block = first / spans.block_size; block * spans.block_size < length && num_full < num_threads; block++) {
        const int thread = first_thread + int(block % num_threads);
        PrefetchQueue& queue = prefetches_.of(thread);
        if (queue.num_bytes() >= ends[size_t(thread)]) {
          num_full++;
          continue;
        }
        num_full = 0;
        const int64_t page = spans.block_tables[span * spans.table_stride + block] * spans.block_size * token_bytes;
        const int64_t size = std::min<int64_t>(spans.block_size, length - block * spans.block_size) * token_bytes;
        queue.add(static_cast<const char*>(layer.k_pages) + page, size);
        queue.add(static_cast<const char*>(layer.v_pages) + page, size);
      }
    }
  }

  // The hidden states behind a norm.
  Rows normalize(const LpNorm& norm, float eps) {
    if (norm.weight == nullptr) return hidden();
    each_row([&](int64_t row, int64_t first) { norm_row(norm, row, eps, at(step_.hidden, first, dtype_)); });
    return normed();
  }

  // hidden += added * norm(rows), which may be scratch.normed.
  void add_whole_rows(const Rows& rows, const LpNorm& norm, float eps) {
    each_row([&](int64_t row, int64_t first) {
      const void* x = rows.at(row, 0, dtype_);
      if (norm.weight != nullptr) {
        norm_row(norm, row, eps, x);
        x = normed().at(row, 0, dtype_);
      }
      kernels_.add_part(dtype_, x, stack_.hidden, stack_.added, at(step_.hidden, first, dtype_));
    });
  }

  // Calls body(row, its first element) for each row of hidden states.
  template <class Body>
  void each_row(const Body& body) {
    constexpr int kNormRows = 4;
    pool_.run(ceil_div(step_.num_tokens, kNormRows), [&](int chunk, int) {
      const int end = std::min(step_.num_tokens, (chunk + 1) * kNormRows);
      for (int64_t row = chunk * kNormRows; row < end; row++) body(row, row * stack_.hidden);
    });
  }

  // A row of scratch.normed from x, which may be that row.
  void norm_row(const LpNorm& norm, int64_t row, float eps, const void* x) {
    const int64_t n = stack_.hidden;
    void* y = at(scratch_.normed, row * scratch_.normed_stride, dtype_);
    if (stack_.is_layer_norm)
      kernels_.layer_norm(dtype_, x, norm.weight, norm.bias, n, eps, stack_.norm_offset, y);
    else
      kernels_.rms_norm(dtype_, x, weight_of(norm, row), n, eps, stack_.norm_offset, stack_.narrows != 0, y);
  }

  // A row's weight of a norm: its adapter's own where that has one.
  const void* weight_of(const LpNorm& norm, int64_t row) const {
    const int slot = slots_.empty() || norm.own_ptrs == nullptr ? -1 : slots_[size_t(row)];
    const int64_t own = slot < 0 ? 0 : norm.own_ptrs[slot];
    return own == 0 ? norm.weight : reinterpret_cast<const void*>(own);
  }

  // Queries go to scratch, keys and values to their pages.
  void project_qkv(const LpLayer& layer, const Rows& x) {
    const int unit = qkv_unit(layer);
    const int64_t num_outputs = qkv_outputs(layer);
    const auto end_of = [=](int band, int bands) { return std::min(int64_t(band + bands) * kBand, num_outputs); };
    products_.multiply(
        x, stack_.hidden, layer.qkv, ceil_div(num_outputs, kBand), unit,
        [&](int band, const auto& body) {
          const int64_t start = int64_t(band) * kBand;
          each_module(layer, start, end_of(band, 1), [&](int module, int64_t output, int64_t all, int width) {
            body(module, output, width, int(all - start));
          });
        },
        [&](int band, int row, int m, float* c, int64_t stride) {
          const int64_t start = int64_t(band) * kBand, end = end_of(band, unit);
          if (layer.qkv_bias != nullptr)
            for (int r = 0; r < m; r++)
              kernels_.add_bias(dtype_, at(layer.qkv_bias, start, dtype_), int(end - start), c + r * stride);
          each_module(layer, start, end, [&](int module, int64_t output, int64_t all, int width) {
            products_.updates().rescale(module, output, width, row, m, c + (all - start), stride);
          });
          if (are_whole_heads(layer)) {
            const Head head = head_of(layer, start);
            for (int r = 0; r < m; r++) finish_head(layer, head, row + r, c + r * stride);
            return;
          }
          each_head(layer, start, end, [&](const Head& head, int feature, int64_t all, int width) {
            for (int r = 0; r < m; r++)
              kernels_.store(dtype_, c + r * stride + (all - start), width, at(place_of(layer, head, row + r), feature, dtype_));
          });
        });
    if (are_whole_heads(layer)) return;
    pool_.run(step_.num_tokens, [&](int token, int) {
      finish_row(layer, 0, token, stack_.num_heads);
      if (layer.shares_kv) return;
      finish_row(layer, 1, token, layer.num_kv_heads);
      if (layer.v_norm.weight != nullptr) finish_row(layer, 2, token, layer.num_kv_heads);
    });
  }

  void project_mixer(const LpMixer& mixer, const Rows& x) {
    const MixerShape shape{mixer};
    const int64_t num_outputs = shape.num_projected;
    const int unit = unit_of(num_outputs);
    products_.multiply(
        x, stack_.hidden, mixer.projection, ceil_div(num_outputs, kBand), unit,
        [&](int band, const auto& body) { shape.each_linear(int64_t(band) * kBand, kBand, body); },
        [&](int band, int row, int m, float* c, int64_t stride) {
          shape.each_linear(int64_t(band) * kBand, unit * kBand, [&](int linear, int64_t output, int width, int place) {
            products_.updates().rescale(linear, output, width, row, m, c + place, stride);
            const float* values = c + place;
            shape.each_column(linear, output, width, [&](int64_t column, int n) {
              for (int64_t r = 0; r < m; r++)
                kernels_.store(dtype_, values + r * stride, n, at(projected(mixer), (row + r) * num_outputs + column, dtype_));
              values += n;
            });
          });
        });
  }

  // A mixer's recurrence and its gated norms: those of single heads right behind a head, others behind all heads.
  void recur(const LpMixer& mixer) {
    const MixerShape shape{mixer};
    const bool norms_heads = mixer.norm_size == mixer.recurrence.v_dim, rounds = mixer.recurrence.rounds != 0;
    void* out = rounds ? static_cast<void*>(scratch_.mixed) : scratch_.recurred;
    const LpLinear linear = shape.over(dtype_, projected(mixer), convolved(mixer), out, rounds ? scratch_.mixed_stride : shape.values);
    attend_linearly_all(pool_, kernels_, dtype_, linear, step_.pieces, [&](int head, int64_t start, int64_t num_tokens) {
      for (int64_t token = start; norms_heads && token < start + num_tokens; token++) norm_recurred(mixer, token, int64_t(head) * mixer.norm_size);
    });
    if (norms_heads) return;
    each_row([&](int64_t row, int64_t) {
      for (int64_t first = 0; first < shape.values; first += mixer.norm_size) norm_recurred(mixer, row, first);
    });
  }

  // One gated norm, of the features from `first` on, to scratch.mixed.
  void norm_recurred(const LpMixer& mixer, int64_t token, int64_t first) {
    const MixerShape shape{mixer};
    const bool rounds = mixer.recurrence.rounds != 0;
    void* y = at(scratch_.mixed, token * scratch_.mixed_stride + first, dtype_);
    void* x = rounds ? y : scratch_.recurred + token * shape.values + first;
    const void* z = at(projected(mixer), token * shape.num_projected + shape.first_z + first, dtype_);
    kernels_.gated_norm(rounds ? dtype_ : DType::F32, dtype_, x, z, at(weight_of(mixer.norm, token), first, dtype_), mixer.norm_size,
                        mixer.norm_eps, mixer.gates_first != 0, x);
    if (!rounds) kernels_.store(dtype_, static_cast<float*>(x), mixer.norm_size, y);
  }

  // Whether a chunk of q, k and v is a head, which is finished at once; else heads are finished when all of a row is there.
  bool are_whole_heads(const LpLayer& layer) const { return layer.head_dim % kBand == 0 && !stack_.norms_all_heads; }
  int qkv_unit(const LpLayer& layer) const { return are_whole_heads(layer) ? layer.head_dim / kBand : 1; }

  // Calls body(module, its output, which that is of all, how many follow) for outputs [start, end) of q, k and v.
  template <class Body>
  void each_module(const LpLayer& layer, int64_t start, int64_t end, const Body& body) const {
    if (stack_.merges_qkv) return body(0, start, start, int(end - start));
    const int64_t ends[] = {q_outputs(layer), q_outputs(layer) + kv_rows(layer), qkv_outputs(layer)};
    for (int part = 0; part < 3; part++) {
      const int64_t before = part == 0 ? 0 : ends[part - 1], first = std::max(start, before), last = std::min(end, ends[part]);
      if (first < last) body(part, first - before, first, int(last - first));
    }
  }

  struct Head {
    int part;  // 0: queries, 1: keys, 2: values, 3: gates
    int idx;   // of that part's
  };

  // That of an output of q, k and v.
  Head head_of(const LpLayer& layer, int64_t output) const {
    int head = int(output / layer.head_dim);
    const int num_heads = stack_.num_heads, num_kv = layer.num_kv_heads, group = num_heads / num_kv;
    if (stack_.is_grouped) {
      const int kv_head = head / (group + 2), part = std::max(0, head % (group + 2) - group + 1);
      return {part, part == 0 ? head - 2 * kv_head : kv_head};
    }
    const int of_each = layer.gates_heads ? 2 : 1;  // queries, and a gate behind them
    if (head < of_each * num_heads) return {head % of_each == 0 ? 0 : 3, head / of_each};
    head -= of_each * num_heads;
    return head < num_kv ? Head{1, head} : Head{2, head - num_kv};
  }

  // Calls body(head, feature, which output that is of all, how many follow) for outputs [start, end) of q, k and v.
  template <class Body>
  void each_head(const LpLayer& layer, int64_t start, int64_t end, const Body& body) const {
    const int dim = layer.head_dim;
    for (int64_t output = start; output < end;) {
      const int feature = int(output % dim), width = int(std::min<int64_t>(dim - feature, end - output));
      body(head_of(layer, output), feature, output, width);
      output += width;
    }
  }

  // c [head_dim]: a head's product, behind the norm of all heads where there is one.
  void finish_head(const LpLayer& layer, const Head& head, int64_t token, float* c) {
    if (head.part == 3) return kernels_.store(dtype_, c, layer.head_dim, place_of(layer, head, token));
    const LpNorm& norm = norm_of(layer, head.part);
    if (norm.weight != nullptr && !is_of_all_heads(head.part))
      kernels_.rms_norm_f32(dtype_, c, weight_of(norm, token), layer.head_dim, layer.qk_eps, stack_.norm_offset,
                            stack_.narrows != 0);
    if (head.part != 2) turn(layer, head.part, token, c);
    kernels_.store(dtype_, c, layer.head_dim, place_of(layer, head, token));
  }

  // The heads of a token's queries, keys or values, which lie in their places.
  void finish_row(const LpLayer& layer, int part, int64_t token, int num_heads) {
    static thread_local std::vector<float> values;
    const int dim = layer.head_dim;
    if (is_of_all_heads(part)) {
      void* row = place_of(layer, {part, 0}, token);
      kernels_.rms_norm(dtype_, row, weight_of(norm_of(layer, part), token), int64_t(num_heads) * dim, layer.qk_eps, stack_.norm_offset,
                        stack_.narrows != 0, row);
    }
    for (int head = 0; head < num_heads; head++) {
      values.assign(size_t(dim), 0.0f);
      kernels_.add_bias(dtype_, place_of(layer, {part, head}, token), dim, values.data());
      finish_head(layer, {part, head}, token, values.data());
    }
  }

  // Whether the norm of queries or keys is of all heads together.
  bool is_of_all_heads(int part) const { return stack_.norms_all_heads && part != 2; }

  static const LpNorm& norm_of(const LpLayer& layer, int part) {
    return part == 0 ? layer.q_norm : part == 1 ? layer.k_norm : layer.v_norm;
  }

  // A head of queries (part 0) or keys (1) by its position.
  void turn(const LpLayer& layer, int part, int64_t token, float* head) {
    const int n = step_.num_rotary;
    if (layer.turns != 0 && n != 0)
      (layer.turns == 2 ? kernels_.rotate_pairs : kernels_.rotate)(head, step_.cos + token * n, step_.sin + token * n, n);
    if (part != 0 || step_.query_scales == nullptr) return;
    const float scale = step_.query_scales[token];
    for (int i = 0; i < layer.head_dim; i++) head[i] *= scale;
  }

  void* place_of(const LpLayer& layer, const Head& head, int64_t token) {
    const int dim = layer.head_dim;
    if (head.part == 0 || head.part == 3)
      return at(head.part == 0 ? scratch_.q : scratch_.gates, (token * stack_.num_heads + head.idx) * dim, dtype_);
    void* pages = head.part == 1 ? layer.k_pages : layer.v_pages;
    return at(pages, (step_.spans.slots[token] * layer.num_kv_heads + head.idx) * dim, dtype_);
  }

  // attention's output times sigmoid(gate)
  void gate_heads(const LpLayer& layer) {
    each_row([&](int64_t row, int64_t) {
      void* mixed = at(scratch_.mixed, row * scratch_.mixed_stride, dtype_);
      const int64_t n = q_rows(layer);
      kernels_.gate_row(dtype_, kSigmoid, at(scratch_.gates, row * n, dtype_), mixed, int(n), mixed);
    });
  }

  // hidden += added * norm(x @ packed + bias + update)
  void add_product(const void* packed, const void* bias, const LpTable& table, const Rows& x, int64_t k,
                   const LpNorm& norm, float eps) {
    const int64_t n = stack_.hidden;
    const bool by_rows = norm.weight != nullptr || stack_.added != 1.0f;
    const Target target{&table, n};
    products_.prepare(x, k, &target, 1);
    products_.multiply_one(
        x, k, packed, n, 1, 0, bias, [&](int64_t output, int width, int row, int m, const float* c, int64_t stride) {
          if (!by_rows) kernels_.add_rows(dtype_, c, stride, m, width, at(step_.hidden, row * n + output, dtype_), n);
          for (int64_t r = 0; by_rows && r < m; r++)
            kernels_.store(dtype_, c + r * stride, width, at(scratch_.normed, (row + r) * scratch_.normed_stride + output, dtype_));
        });
    if (by_rows) add_whole_rows(normed(), norm, eps);
  }

  // hidden += norm(projection(act(gate(hidden)) * input))
  void add_input(const LpLayer& layer, const void* input) {
    const int64_t n = stack_.input;
    const Target target{&layer.input_gate_table, n};
    prefetches_.begin_phase();
    products_.prepare(hidden(), stack_.hidden, &target, 1);
    products_.multiply_one(
        hidden(), stack_.hidden, layer.input_gate, n, 1, 0, nullptr,
        [&](int64_t output, int width, int row, int m, const float* c, int64_t stride) {
          for (int64_t r = 0; r < m; r++) {
            float factors[kBand] = {};
            kernels_.add_bias(dtype_, at(input, (row + r) * n + output, dtype_), width, factors);
            kernels_.gated(dtype_, stack_.act, c + r * stride, factors, width, at(scratch_.act, (row + r) * scratch_.act_stride + output, dtype_));
          }
        });
    prefetches_.begin_phase();
    add_product(layer.input_projection, nullptr, layer.input_projection_table, activated(), n, layer.input_norm, layer.eps);
  }

  void gate(const LpLayer& layer, const Rows& x) {
    const int64_t n = layer.ffn;
    const bool streams = step_.num_tokens * n * item_bytes(dtype_) > kStreamedBytes, is_merged = stack_.merges_gate_up != 0;
    products_.multiply(
        x, stack_.hidden, layer.gate_up, ceil_div(n, kPanel), 2,
        [&](int band, const auto& body) {
          const int64_t output = int64_t(band) * kPanel;
          const int width = int(std::min<int64_t>(kPanel, n - output));
          for (int part = 0; part < 2; part++)
            in_module(is_merged, part, part * n, output,
                      [&](int module, int64_t first) { body(module, first, width, part * kPanel); });
        },
        [&](int first, int row, int m, float* c, int64_t stride) {
          const int64_t start = int64_t(first) * kPanel, end = std::min(start + 2 * kPanel, n);
          for (int64_t output = start; output < end; output += kPanel)
            for (int part = 0; part < 2; part++)
              in_module(is_merged, part, part * n, output, [&](int module, int64_t of_module) {
                products_.updates().rescale(module, of_module, int(std::min<int64_t>(kPanel, end - output)), row, m,
                                            c + 2 * (output - start) + part * kPanel, stride);
              });
          kernels_.gated_bands(dtype_, stack_.act, c, stride, m, int(end - start),
                               at(scratch_.act, row * scratch_.act_stride + start, dtype_), scratch_.act_stride, streams);
        });
  }

  Pool& pool_;
  const Kernels& kernels_;
  const LpStack& stack_;
  const LpStep& step_;
  const DType dtype_;
  const Scratch scratch_;
  AdaptedProducts products_;
  PrefetchQueues& prefetches_;
  const std::vector<int> slots_;
};

}  // namespace
}  // namespace lp

namespace lp {
namespace {

// The hidden states of the rows whose output is read, and the scratch memory of their part of the last layer.
int64_t output_bytes(const LpStack& stack, int64_t num_outputs, int64_t max_rank) {
  const int64_t hidden = num_outputs * stack.hidden * item_bytes(DType(stack.dtype));
  return ((hidden + 63) & ~int64_t(63)) + lay_out(stack, num_outputs, max_rank, nullptr).num_bytes;
}

// A layer's own input.
const char* input_of(const LpStack& stack, const LpStep& step, int layer) {
  return at(step.inputs, int64_t(layer) * step.num_tokens * stack.input, DType(stack.dtype));
}

// Attention and what follows it in the last layer, of some rows.
void finish(Pool& pool, const Kernels& kernels, const LpStack& stack, const LpStep& whole_step, const StackRun& whole,
            PrefetchQueues& prefetches) {
  const LpLayer& layer = stack.layers[stack.num_layers - 1];
  const int64_t row_bytes = stack.hidden * item_bytes(DType(stack.dtype));
  const OutputRows rows(whole_step.spans, whole_step.runs, whole_step.outputs, whole_step.num_outputs);
  char* hidden = static_cast<char*>(whole_step.scratch) +
                 lay_out(stack, whole_step.num_tokens, whole_step.runs.max_rank, nullptr).num_bytes;
  rows.gather(static_cast<const char*>(whole_step.hidden), row_bytes, hidden);
  LpStep step = whole_step;
  step.num_tokens = rows.num_rows();
  step.hidden = hidden;
  step.spans = rows.spans();
  step.runs = rows.runs();
  step.scratch = hidden + ((rows.num_rows() * row_bytes + 63) & ~int64_t(63));
  StackRun run(pool, kernels, stack, step, prefetches);
  run.take_queries(layer, whole, rows);
  run.attend(layer);
  std::vector<char> input;
  if (layer.input_gate != nullptr) {
    const int64_t input_bytes = stack.input * item_bytes(DType(stack.dtype));
    input.resize(size_t(rows.num_rows() * input_bytes));
    rows.gather(input_of(stack, whole_step, stack.num_layers - 1), input_bytes, input.data());
  }
  run.after_attention(layer, input.data());
  rows.scatter(hidden, row_bytes, static_cast<char*>(whole_step.hidden));
}

}  // namespace
}  // namespace lp

extern "C" {

__attribute__((visibility("default"))) int64_t lp_stack_scratch_bytes(const LpStack* stack, int64_t num_tokens,
                                                                      int64_t num_outputs, int64_t max_rank) {
  const int64_t num_bytes = lp::lay_out(*stack, num_tokens, max_rank, nullptr).num_bytes;
  return num_bytes + (num_outputs < num_tokens ? lp::output_bytes(*stack, num_outputs, max_rank) : 0);
}

// All layers of the stack over one step.
__attribute__((visibility("default"))) void lp_stack_run(lp::Pool* pool, const LpStack* stack, const LpStep* step) {
  const auto turn = pool->take_turn();
  static thread_local lp::PrefetchQueues prefetches;  // their memory serves every step
  prefetches.clear(pool->num_threads());
  const lp::Kernels& kernels = *lp::current_kernels();
  lp::StackRun run(*pool, kernels, *stack, *step, prefetches);
  run.plan_prefetches();
  if (step->fed != nullptr && !step->continues) run.add_fed(stack->layers[-1]);
  for (int i = 0; i < stack->num_layers; i++) {
    const LpLayer& layer = stack->layers[i];
    if (run.ends_in(i)) return run.feed_own_part(layer);
    if (layer.qkv != nullptr) {
      run.before_attention(layer);
      if (i + 1 == stack->num_layers && step->outputs != nullptr) {
        if (step->num_outputs > 0) lp::finish(*pool, kernels, *stack, *step, run, prefetches);
        break;
      }
      run.attend(layer);
    } else if (layer.mixer != nullptr) {
      run.run_mixer(layer);
    }
    run.after_attention(layer, lp::input_of(*stack, *step, i));
  }
}
}
